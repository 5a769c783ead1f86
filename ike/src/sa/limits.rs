// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When a CHILD SA is rekeyed, and when it ends.

use std::time::Duration;

use swanherd_config::model::Child;
use swanherd_ipsec::plane::Lifetime;

use super::env::Env;

/// The limits of one CHILD SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Rekeying begins after this time. The data plane does not see to it, this side does.
    pub(super) rekey: Option<Duration>,
    /// What the data plane sees to.
    pub(super) plane: Lifetime,
}

impl Limits {
    /// Draws the limits of a CHILD SA of `cfg`.
    pub(super) fn of(env: &mut Env, cfg: &Child) -> Self {
        let mut below = |range: u64| env.rng.below(range.saturating_add(1));
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let rekey = soft(
            millis(cfg.rekey_time),
            millis(cfg.life_time),
            millis(cfg.rand_time),
            &mut below,
        );
        let plane = Lifetime {
            soft_time: None,
            hard_time: (!cfg.life_time.is_zero()).then_some(cfg.life_time),
            soft_bytes: soft(cfg.rekey_bytes, cfg.life_bytes, cfg.rand_bytes, &mut below),
            hard_bytes: (cfg.life_bytes != 0).then_some(cfg.life_bytes),
            soft_packets: soft(
                cfg.rekey_packets,
                cfg.life_packets,
                cfg.rand_packets,
                &mut below,
            ),
            hard_packets: (cfg.life_packets != 0).then_some(cfg.life_packets),
        };
        Self {
            rekey: rekey.map(Duration::from_millis),
            plane,
        }
    }
}

/// A soft limit below `hard`, less a random part of at most `rand`. Zero means none.
///
/// A soft limit at or beyond the hard one would end the SA before its successor is there, and a
/// random part that is as large as the limit would have it rekeyed all the time: the limit is kept
/// at ten elevenths of the hard one, which is the usual distance, and the random part at half.
fn soft(soft: u64, hard: u64, rand: u64, below: &mut impl FnMut(u64) -> u64) -> Option<u64> {
    if soft == 0 {
        return None;
    }
    let limit = if hard != 0 && soft >= hard {
        hard - hard.div_ceil(11)
    } else {
        soft
    };
    Some((limit - below(rand.min(limit / 2))).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soft_limit_lies_below_the_hard_one_and_is_no_storm() {
        let mut most = |range| range;
        assert_eq!(soft(0, 100, 10, &mut most), None);
        assert_eq!(soft(100, 0, 0, &mut most), Some(100));
        assert_eq!(soft(100, 110, 10, &mut most), Some(90));
        assert_eq!(soft(110, 110, 0, &mut most), Some(100));
        assert_eq!(soft(u64::MAX, 1100, 0, &mut most), Some(1000));
        assert_eq!(soft(100, 400, 300, &mut most), Some(50));
        assert_eq!(soft(1, 1, 1, &mut most), Some(1));
        assert_eq!(soft(u64::MAX, 0, u64::MAX, &mut most), Some(1 << 63));
    }
}
