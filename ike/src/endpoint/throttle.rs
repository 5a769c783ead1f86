// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bounds answers to messages that nobody vouches for, so that this host is no mirror for those who
//! forge addresses: token buckets for all of them and for each origin (RFC 7296 sections 1.5, 2.5,
//! 2.6 and 2.21.4).
//!
//! Memory is fixed: origins share a table of buckets by a hash with a random key. Two origins in
//! one bucket share its tokens, which costs a stranger an answer now and then.

use std::net::IpAddr;
use std::time::Instant;

use super::half_open::origin;
use crate::crypto::Rng;

/// Buckets of origins, a power of two.
const SLOTS: usize = 1024;

/// Kinds of answers, with budgets of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    /// An error notify.
    Error,
    /// A cookie, or the response to an IKE_SA_INIT request once more: what a handshake needs.
    Handshake,
}

impl AnswerKind {
    const fn rates(self) -> Rates {
        match self {
            Self::Error => Rates {
                all: Rate {
                    per_second: 200,
                    burst: 400,
                },
                each: Rate {
                    per_second: 5,
                    burst: 10,
                },
            },
            Self::Handshake => Rates {
                all: Rate {
                    per_second: 20_000,
                    burst: 20_000,
                },
                each: Rate {
                    per_second: 100,
                    burst: 200,
                },
            },
        }
    }
}

/// The budgets of all kinds of answers.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Throttle {
    key: Option<u64>,
    errors: Budget,
    handshakes: Budget,
}

impl Throttle {
    /// Takes a token for an answer to `addr`. Returns whether there was one. `all` says whether the
    /// answer counts among those of all origins, too.
    pub(crate) fn take(
        &mut self,
        rng: &mut Rng,
        now: Instant,
        kind: AnswerKind,
        addr: IpAddr,
        all: bool,
    ) -> bool {
        let key = *self.key.get_or_insert_with(|| rng.u64());
        let budget = match kind {
            AnswerKind::Error => &mut self.errors,
            AnswerKind::Handshake => &mut self.handshakes,
        };
        let rates = kind.rates();
        if budget.each.is_empty() {
            budget.each = vec![Bucket::default(); SLOTS];
        }
        let Some(bucket) = budget.each.get_mut(slot(key, addr)) else {
            return false;
        };
        bucket.take(now, rates.each) && (!all || budget.all.take(now, rates.all))
    }
}

#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Budget {
    all: Bucket,
    /// Empty until the first answer.
    each: Vec<Bucket>,
}

struct Rates {
    all: Rate,
    each: Rate,
}

#[derive(Clone, Copy)]
struct Rate {
    per_second: u32,
    burst: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// When it was filled last, and the thousandths of tokens that it held then; `None` is full.
    state: Option<(Instant, u32)>,
}

impl Bucket {
    fn take(&mut self, now: Instant, rate: Rate) -> bool {
        let full = rate.burst * 1000;
        let held = match self.state {
            None => full,
            Some((at, held)) => {
                let millis = now.saturating_duration_since(at).as_millis();
                let gained = millis.saturating_mul(u128::from(rate.per_second));
                u32::try_from(gained).map_or(full, |gained| held.saturating_add(gained).min(full))
            }
        };
        match held.checked_sub(1000) {
            Some(left) => {
                self.state = Some((now, left));
                true
            }
            // What has trickled in since the last time is not lost: the time stays.
            None => false,
        }
    }
}

fn slot(key: u64, addr: IpAddr) -> usize {
    let (high, low) = match origin(addr) {
        IpAddr::V4(v4) => (0, u64::from(v4.to_bits())),
        IpAddr::V6(v6) => (1, (v6.to_bits() >> 64) as u64),
    };
    // Multiply and fold, twice: without the key nobody can say which origins fall together.
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product >> 64) as u64 ^ product as u64
    };
    let mixed = fold(
        low ^ key,
        high ^ key.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15,
    );
    let mixed = fold(mixed ^ key, 0xd6e8_feb8_6659_fd93);
    usize::try_from((mixed >> 32) % SLOTS as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn start() -> (Throttle, Rng, Instant) {
        #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
        let now = Instant::now();
        (Throttle::default(), Rng::new([5; 32]), now)
    }

    #[test]
    fn one_origin_gets_its_burst_and_then_its_rate() {
        let (mut throttle, mut rng, now) = start();
        let addr = "192.0.2.1".parse().unwrap();
        let mut taken = |at| {
            (0..1000)
                .filter(|_| throttle.take(&mut rng, at, AnswerKind::Error, addr, true))
                .count()
        };

        assert_eq!(taken(now), 10);
        assert_eq!(taken(now + Duration::from_millis(100)), 0);
        assert_eq!(taken(now + Duration::from_millis(200)), 1);
        assert_eq!(taken(now + Duration::from_millis(1200)), 5);
        assert_eq!(taken(now + Duration::from_secs(3600)), 10);
    }

    #[test]
    fn all_origins_together_are_bounded_in_answers_and_memory() {
        let (mut throttle, mut rng, now) = start();
        let taken = (0..100_000_u32)
            .filter(|index| {
                let addr = IpAddr::from(index.to_be_bytes());
                throttle.take(&mut rng, now, AnswerKind::Error, addr, true)
            })
            .count();

        assert_eq!(taken, 400);
        assert_eq!(throttle.errors.each.len(), SLOTS);
        assert!(throttle.handshakes.each.is_empty());
    }

    #[test]
    fn origins_spread_over_the_buckets() {
        for key in [0, u64::MAX, 0x0123_4567_89ab_cdef] {
            let mut used = std::collections::BTreeSet::new();
            for index in 0..4096_u32 {
                used.insert(slot(key, IpAddr::from(index.to_be_bytes())));
            }
            assert!(used.len() > SLOTS / 2, "{} of {key}", used.len());
        }
        let v6 = |text: &str| slot(77, text.parse().unwrap());
        assert_eq!(v6("2001:db8::1"), v6("2001:db8::ffff:1"));
    }
}
