// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The last answers of IKE SAs that are gone.
//!
//! A responder has to repeat its answer while the peer repeats its request (RFC 7296 section 2.1).
//! The answer to the request that deletes an IKE SA outlives the SA: were it lost and not given
//! again, the peer would keep the SA until its own retransmissions run out.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::sa::Answered;

/// Most answers that are remembered; the oldest go first.
const CAPACITY: usize = 1024;
/// Longer than a peer with usual settings keeps asking (165 s).
const MEMORY: Duration = Duration::from_secs(180);

/// See the module's text.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Farewells {
    by_spi: BTreeMap<u64, Farewell>,
    order: VecDeque<u64>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Farewell {
    until: Instant,
    answered: Answered,
}

impl Farewells {
    /// Remembers the last answer of the IKE SA that had `spi` here.
    pub(crate) fn remember(&mut self, now: Instant, spi: u64, answered: Answered) {
        while let Some(oldest) = self.order.front().copied() {
            let over = self.order.len() >= CAPACITY;
            let stale = self.by_spi.get(&oldest).is_none_or(|one| one.until <= now);
            if !over && !stale {
                break;
            }
            self.order.pop_front();
            self.by_spi.remove(&oldest);
        }
        let until = now + MEMORY;
        if self
            .by_spi
            .insert(spi, Farewell { until, answered })
            .is_none()
        {
            self.order.push_back(spi);
        }
    }

    /// The datagrams to send again, if `raw` is octet for octet the request that was answered.
    pub(crate) fn answer(
        &self,
        now: Instant,
        spi: u64,
        message_id: u32,
        raw: &[u8],
    ) -> Option<&[Vec<u8>]> {
        let farewell = self.by_spi.get(&spi).filter(|one| now < one.until)?;
        farewell.answered.to(message_id, raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::hash::sha1;
    use crate::sa::Sealed;
    use crate::wire::ExchangeType;

    #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
    fn origin() -> Instant {
        Instant::now()
    }

    fn answered(request: &[u8]) -> Answered {
        Answered::new(
            7,
            ExchangeType::Informational,
            sha1(request),
            Sealed::fixed(vec![b"answer".to_vec()]),
        )
    }

    #[test]
    fn only_the_same_request_is_answered_again() {
        let mut farewells = Farewells::default();
        farewells.remember(origin(), 1, answered(b"delete"));

        assert!(farewells.answer(origin(), 1, 7, b"delete").is_some());
        assert!(farewells.answer(origin(), 1, 8, b"delete").is_none());
        assert!(farewells.answer(origin(), 1, 7, b"other").is_none());
        assert!(farewells.answer(origin(), 2, 7, b"delete").is_none());
    }

    #[test]
    fn answers_are_forgotten_after_a_while() {
        let mut farewells = Farewells::default();
        let begin = origin();
        farewells.remember(begin, 1, answered(b"delete"));

        assert!(farewells.answer(begin + MEMORY, 1, 7, b"delete").is_none());
        farewells.remember(begin + MEMORY, 2, answered(b"delete"));
        assert_eq!(farewells.by_spi.len(), 1);
    }

    #[test]
    fn no_more_than_the_capacity_is_kept() {
        let mut farewells = Farewells::default();
        let begin = origin();
        for spi in 0..2 * CAPACITY as u64 {
            farewells.remember(begin, spi, answered(b"delete"));
        }

        assert_eq!(farewells.by_spi.len(), CAPACITY);
        assert_eq!(farewells.order.len(), CAPACITY);
        assert!(farewells.answer(begin, 0, 7, b"delete").is_none());
    }
}
