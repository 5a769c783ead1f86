// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Acquires of one policy that come in quick succession are one.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use tokio::time::Instant;

/// Later acquires of the same policy to the same peer are not delivered for so long.
const WINDOW: Duration = Duration::from_secs(1);
/// Old ones are looked for no more often than this when there are too many.
const SWEEP: Duration = Duration::from_millis(100);
/// Pairs of policy and peer that may be remembered at once.
const MAX_REMEMBERED: usize = 4096;

/// When each policy last asked, by request id and peer: a trap for any peer asks for each.
#[derive(Debug, Default)]
pub(super) struct Acquires {
    asked: BTreeMap<(u32, IpAddr), Instant>,
    /// When old ones were last looked for.
    swept: Option<Instant>,
}

/// What becomes of an acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is delivered.
    Deliver,
    /// The same was delivered a moment ago.
    Coalesced,
    /// Too many different ones were.
    TooMany,
}

impl Acquires {
    pub(super) fn judge(&mut self, reqid: u32, peer: IpAddr, now: Instant) -> Fate {
        let recent = |asked: &Instant| now.saturating_duration_since(*asked) < WINDOW;
        if self.asked.get(&(reqid, peer)).is_some_and(recent) {
            return Fate::Coalesced;
        }
        let rested = |swept: Instant| now.saturating_duration_since(swept) >= SWEEP;
        if self.asked.len() >= MAX_REMEMBERED && self.swept.is_none_or(rested) {
            self.asked.retain(|_, asked| recent(asked));
            self.swept = Some(now);
        }
        if self.asked.len() >= MAX_REMEMBERED {
            return Fate::TooMany;
        }
        self.asked.insert((reqid, peer), now);
        Fate::Deliver
    }

    /// One that was to be delivered could not be: the next one may.
    pub(super) fn forget(&mut self, reqid: u32, peer: IpAddr) {
        self.asked.remove(&(reqid, peer));
    }

    /// What was asked for under this request id is over. The kernel asks once and then waits for
    /// as long as its own placeholder of the SA lives, so the next one must not be taken for a
    /// repetition.
    pub(super) fn forget_all(&mut self, reqid: u32) {
        let lowest = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let highest = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));
        let over: Vec<_> = self
            .asked
            .range((reqid, lowest)..=(reqid, highest))
            .map(|(asked, _)| *asked)
            .collect();
        for asked in over {
            self.asked.remove(&asked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u32) -> IpAddr {
        Ipv4Addr::from_bits(0xc633_6400 + last).into()
    }

    #[test]
    fn a_thousand_flows_into_one_trap_are_one_acquire_a_second() {
        let mut acquires = Acquires::default();
        let start = Instant::now();
        let fates: Vec<Fate> = (0..3000)
            .map(|flow| acquires.judge(1, peer(1), start + Duration::from_millis(flow)))
            .collect();
        let delivered = fates.iter().filter(|fate| **fate == Fate::Deliver).count();
        assert_eq!(delivered, 3);
        assert!(fates.iter().all(|fate| *fate != Fate::TooMany));
    }

    #[test]
    fn a_trap_for_any_peer_asks_for_each() {
        let mut acquires = Acquires::default();
        let now = Instant::now();
        assert_eq!(acquires.judge(1, peer(1), now), Fate::Deliver);
        assert_eq!(acquires.judge(1, peer(2), now), Fate::Deliver);
        acquires.forget(1, peer(2));
        assert_eq!(acquires.judge(1, peer(2), now), Fate::Deliver);
    }

    #[test]
    fn what_is_over_is_asked_for_anew_and_the_rest_is_not() {
        let v6: IpAddr = "ffff:ffff::1".parse().unwrap();
        let mut acquires = Acquires::default();
        let now = Instant::now();
        let all = [(1, peer(1)), (1, v6), (2, peer(1)), (0, v6)];
        for (reqid, peer) in all {
            assert_eq!(acquires.judge(reqid, peer, now), Fate::Deliver);
        }

        acquires.forget_all(1);

        let fates = all.map(|(reqid, peer)| acquires.judge(reqid, peer, now));
        let again = Fate::Coalesced;
        assert_eq!(fates, [Fate::Deliver, Fate::Deliver, again, again]);
    }

    #[test]
    fn a_scan_through_a_trap_is_bounded_and_passes() {
        let mut acquires = Acquires::default();
        let now = Instant::now();
        for host in 0..100_000 {
            acquires.judge(1, peer(host), now);
        }
        assert_eq!(acquires.asked.len(), MAX_REMEMBERED);
        assert_eq!(acquires.judge(1, peer(200_000), now), Fate::TooMany);
        assert_eq!(
            acquires.judge(1, peer(200_000), now + WINDOW),
            Fate::Deliver
        );
    }
}
