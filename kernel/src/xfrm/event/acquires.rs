// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Acquires of one policy that come in quick succession are one.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};
use tokio::time::Instant;

use super::super::message::Placeholder;

/// Later acquires of the same policy to the same peer are not delivered for so long.
const WINDOW: Duration = Duration::from_secs(1);
/// Old ones are looked for no more often than this when there are too many.
const SWEEP: Duration = Duration::from_millis(100);
/// Pairs of policy and peer that may be remembered at once.
const MAX_REMEMBERED: usize = 4096;

/// When each policy last asked, by request id and peer: a trap for any peer asks for each.
#[derive(Debug, Default)]
pub(super) struct Acquires {
    asked: BTreeMap<(u32, IpAddr), Asked>,
    /// When old ones were last looked for.
    swept: Option<Instant>,
}

/// One acquire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) placeholder: Placeholder,
    /// The packet, as selectors of this side and the peer's.
    pub(super) packet: (TrafficSelector, TrafficSelector),
    pub(super) at: Instant,
}

impl Asked {
    fn key(&self) -> (u32, IpAddr) {
        key(&self.placeholder)
    }

    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < WINDOW
    }
}

fn key(placeholder: &Placeholder) -> (u32, IpAddr) {
    (placeholder.reqid, placeholder.dst)
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
    pub(super) fn judge(&mut self, asked: Asked) -> Fate {
        let now = asked.at;
        if let Some(before) = self.asked.get_mut(&asked.key())
            && before.is_recent(now)
        {
            // Of two placeholders the older one has gone.
            before.placeholder = asked.placeholder;
            return Fate::Coalesced;
        }
        let rested = |swept: Instant| now.saturating_duration_since(swept) >= SWEEP;
        if self.asked.len() >= MAX_REMEMBERED && self.swept.is_none_or(rested) {
            self.asked.retain(|_, asked| asked.is_recent(now));
            self.swept = Some(now);
        }
        if self.asked.len() >= MAX_REMEMBERED {
            return Fate::TooMany;
        }
        self.asked.insert(asked.key(), asked);
        Fate::Deliver
    }

    /// One that was to be delivered could not be: the next one may.
    pub(super) fn forget(&mut self, placeholder: &Placeholder) {
        self.asked.remove(&key(placeholder));
    }

    /// Takes out what other request ids asked for on behalf of packets that `set`, with the request
    /// id `reqid`, selects.
    pub(super) fn answer(&mut self, reqid: u32, set: &PolicySet) -> Vec<Placeholder> {
        let PolicyAction::Protect { remote, .. } = set.action else {
            return Vec::new();
        };
        let answered: Vec<Placeholder> = self
            .asked
            .values()
            .filter(|asked| {
                let placeholder = asked.placeholder;
                placeholder.reqid != reqid
                    && placeholder.dst == remote
                    && set.local.iter().any(|ts| ts.contains(&asked.packet.0))
                    && set.remote.iter().any(|ts| ts.contains(&asked.packet.1))
            })
            .map(|asked| asked.placeholder)
            .collect();
        answered
            .iter()
            .for_each(|placeholder| self.forget(placeholder));
        answered
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

    fn asked(reqid: u32, peer: IpAddr, at: Instant) -> Asked {
        let host = |text: &str| TrafficSelector::host(text.parse().unwrap());
        Asked {
            placeholder: Placeholder {
                reqid,
                seq: 1,
                src: Ipv4Addr::UNSPECIFIED.into(),
                dst: peer,
                mark: None,
            },
            packet: (host("10.1.0.1"), host("10.2.0.1")),
            at,
        }
    }

    fn peer(last: u32) -> IpAddr {
        Ipv4Addr::from_bits(0xc633_6400 + last).into()
    }

    #[test]
    fn a_thousand_flows_into_one_trap_are_one_acquire_a_second() {
        let mut acquires = Acquires::default();
        let start = Instant::now();
        let fates: Vec<Fate> = (0..3000)
            .map(|flow| {
                let at = start + Duration::from_millis(flow);
                acquires.judge(asked(1, peer(1), at))
            })
            .collect();
        let delivered = fates.iter().filter(|fate| **fate == Fate::Deliver).count();
        assert_eq!(delivered, 3);
        assert!(fates.iter().all(|fate| *fate != Fate::TooMany));
    }

    #[test]
    fn a_trap_for_any_peer_asks_for_each() {
        let mut acquires = Acquires::default();
        let now = Instant::now();
        assert_eq!(acquires.judge(asked(1, peer(1), now)), Fate::Deliver);
        assert_eq!(acquires.judge(asked(1, peer(2), now)), Fate::Deliver);
        acquires.forget(&asked(1, peer(2), now).placeholder);
        assert_eq!(acquires.judge(asked(1, peer(2), now)), Fate::Deliver);
    }

    #[test]
    fn what_is_over_is_asked_for_anew_and_the_rest_is_not() {
        let v6: IpAddr = "ffff:ffff::1".parse().unwrap();
        let mut acquires = Acquires::default();
        let now = Instant::now();
        let all = [(1, peer(1)), (1, v6), (2, peer(1)), (0, v6)];
        for (reqid, peer) in all {
            assert_eq!(acquires.judge(asked(reqid, peer, now)), Fate::Deliver);
        }

        acquires.forget_all(1);

        let fates = all.map(|(reqid, peer)| acquires.judge(asked(reqid, peer, now)));
        let again = Fate::Coalesced;
        assert_eq!(fates, [Fate::Deliver, Fate::Deliver, again, again]);
    }

    #[test]
    fn a_scan_through_a_trap_is_bounded_and_passes() {
        let mut acquires = Acquires::default();
        let now = Instant::now();
        for host in 0..100_000 {
            acquires.judge(asked(1, peer(host), now));
        }
        assert_eq!(acquires.asked.len(), MAX_REMEMBERED);
        assert_eq!(acquires.judge(asked(1, peer(200_000), now)), Fate::TooMany);
        assert_eq!(
            acquires.judge(asked(1, peer(200_000), now + WINDOW)),
            Fate::Deliver
        );
    }

    #[test]
    fn a_narrower_child_answers_what_its_trap_asked_on_behalf_of_its_packets() {
        let mut acquires = Acquires::default();
        let now = Instant::now();
        let network = |text: &str| TrafficSelector::network(text.parse().unwrap(), 24).unwrap();
        let mut set = PolicySet::new(
            9,
            "gw/net".to_owned(),
            vec![network("10.1.0.0")],
            vec![network("10.2.0.0")],
            PolicyAction::Protect {
                mode: swanherd_ipsec::plane::Mode::Tunnel,
                local: peer(9),
                remote: peer(1),
                reqid: 5,
                spi: 0,
            },
        );
        let trap = asked(1, peer(1), now);
        let newer = Asked {
            placeholder: Placeholder {
                seq: 2,
                ..trap.placeholder
            },
            ..trap
        };
        for asked in [trap, newer, asked(1, peer(2), now), asked(5, peer(1), now)] {
            acquires.judge(asked);
        }

        set.remote = vec![network("10.3.0.0")];
        assert_eq!(acquires.answer(5, &set), []);
        set.remote = vec![network("10.3.0.0"), network("10.2.0.0")];
        assert_eq!(acquires.answer(5, &set), [newer.placeholder]);

        assert_eq!(acquires.judge(trap), Fate::Deliver);
        assert_eq!(acquires.judge(asked(1, peer(2), now)), Fate::Coalesced);
        assert_eq!(acquires.judge(asked(5, peer(1), now)), Fate::Coalesced);
    }
}
