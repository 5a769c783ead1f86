// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Time limits of SAs, in the order in which they fall due.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::SaId;

/// When a limit falls due, then in order of arming.
type Key = (Instant, u64);

/// A limit that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) id: SaId,
    pub(super) hard: bool,
}

#[derive(Debug, Default)]
pub(super) struct Deadlines {
    queue: BTreeMap<Key, Due>,
    of: BTreeMap<SaId, Vec<Key>>,
    serial: u64,
}

impl Deadlines {
    /// Arms the limits of an SA that was installed at `now`. One too far away to be told is none.
    pub(super) fn arm(
        &mut self,
        id: SaId,
        now: Instant,
        soft: Option<Duration>,
        hard: Option<Duration>,
    ) {
        for (after, hard) in [(soft, false), (hard, true)] {
            if let Some(at) = after.and_then(|after| now.checked_add(after)) {
                let key = (at, self.serial);
                self.serial += 1;
                self.queue.insert(key, Due { id, hard });
                self.of.entry(id).or_default().push(key);
            }
        }
    }

    /// Drops the limits of an SA.
    pub(super) fn disarm(&mut self, id: SaId) {
        for key in self.of.remove(&id).unwrap_or_default() {
            self.queue.remove(&key);
        }
    }

    /// An SA goes by another name now.
    pub(super) fn rename(&mut self, from: SaId, to: SaId) {
        let Some(keys) = self.of.remove(&from) else {
            return;
        };
        for key in &keys {
            if let Some(due) = self.queue.get_mut(key) {
                due.id = to;
            }
        }
        self.of.entry(to).or_default().extend(keys);
    }

    /// Takes one limit that is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Due> {
        let first = self.queue.first_entry().filter(|e| e.key().0 <= now)?;
        let (key, due) = first.remove_entry();
        if let Some(keys) = self.of.get_mut(&due.id) {
            keys.retain(|other| *other != key);
            if keys.is_empty() {
                self.of.remove(&due.id);
            }
        }
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn id(spi: u32) -> SaId {
        SaId {
            spi,
            dst: [192, 0, 2, 1].into(),
        }
    }

    #[test]
    fn limits_fall_due_in_order_and_once() {
        let begin = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.arm(id(1), begin, Some(2 * SECOND), Some(4 * SECOND));
        deadlines.arm(id(2), begin, None, Some(3 * SECOND));
        let due = |deadlines: &mut Deadlines, seconds: u32| {
            std::iter::from_fn(|| deadlines.pop(begin + seconds * SECOND))
                .map(|due| (due.id.spi, due.hard))
                .collect::<Vec<_>>()
        };
        assert_eq!(due(&mut deadlines, 1), []);
        assert_eq!(due(&mut deadlines, 3), [(1, false), (2, true)]);
        assert_eq!(due(&mut deadlines, 9), [(1, true)]);
        assert!(deadlines.queue.is_empty() && deadlines.of.is_empty());
    }

    #[test]
    fn limits_follow_a_renamed_sa_and_go_with_a_removed_one() {
        let begin = Instant::now();
        let mut deadlines = Deadlines::default();
        deadlines.arm(id(1), begin, Some(SECOND), Some(2 * SECOND));
        deadlines.arm(id(2), begin, Some(SECOND), None);
        deadlines.rename(id(1), id(3));
        deadlines.disarm(id(2));
        let due = deadlines.pop(begin + SECOND);
        assert_eq!(due.map(|due| due.id), Some(id(3)));
        deadlines.disarm(id(3));
        assert!(deadlines.queue.is_empty() && deadlines.of.is_empty());
    }
}
