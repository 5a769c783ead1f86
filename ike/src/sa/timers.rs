// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one timer table of an IKE SA.

use std::time::Instant;

/// What an IKE SA waits for in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// The request in flight is sent again, or given up.
    Retransmit,
    /// Liveness is checked when the peer has been silent.
    Dpd,
    /// The IKE SA is rekeyed.
    Rekey,
    /// The IKE SA is reauthenticated.
    Reauth,
    /// The IKE SA ends, whatever its state.
    HardLifetime,
    /// A half-open IKE SA is given up.
    HalfOpen,
    /// A NAT keepalive is due.
    Keepalive,
    /// Something of a child is due: rekey, expiry, removal of a replaced SA.
    Child,
    /// A task that had to step back is tried again.
    Retry,
    /// A polite delete has taken long enough.
    Delete,
    /// A peer's request that is being worked on is abandoned.
    Passive,
}

const COUNT: usize = 11;

/// At most one deadline per [`Timer`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers([Option<Instant>; COUNT]);

impl Timers {
    /// Arms `timer`, replacing an earlier deadline.
    pub(crate) fn set(&mut self, timer: Timer, at: Instant) {
        self.0[timer as usize] = Some(at);
    }

    /// Arms or disarms `timer`.
    pub(crate) fn put(&mut self, timer: Timer, at: Option<Instant>) {
        self.0[timer as usize] = at;
    }

    /// Disarms `timer`.
    pub(crate) fn stop(&mut self, timer: Timer) {
        self.0[timer as usize] = None;
    }

    /// The deadline of `timer`.
    pub(crate) fn get(&self, timer: Timer) -> Option<Instant> {
        self.0[timer as usize]
    }

    /// All deadlines.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = Option<Instant>> {
        self.0.into_iter()
    }

    /// Disarms everything.
    pub(crate) fn clear(&mut self) {
        self.0 = [None; COUNT];
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.iter().flatten().min().copied()
    }

    /// Disarms `timer` and returns true if it is due.
    pub(crate) fn take_due(&mut self, timer: Timer, now: Instant) -> bool {
        let slot = &mut self.0[timer as usize];
        let due = slot.is_some_and(|at| at <= now);
        if due {
            *slot = None;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_earliest_timer_is_next_and_fires_once() {
        #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
        let start = Instant::now();
        let mut timers = Timers::default();
        timers.set(Timer::Dpd, start + Duration::from_secs(5));
        timers.set(Timer::Rekey, start + Duration::from_secs(3));

        assert_eq!(timers.next(), Some(start + Duration::from_secs(3)));
        assert!(!timers.take_due(Timer::Rekey, start));
        assert!(timers.take_due(Timer::Rekey, start + Duration::from_secs(4)));
        assert!(!timers.take_due(Timer::Rekey, start + Duration::from_secs(4)));
        assert_eq!(timers.next(), Some(start + Duration::from_secs(5)));
    }
}
