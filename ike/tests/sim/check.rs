// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What must hold whenever two hosts have come to rest.

use std::collections::BTreeSet;

use swanherd_ike::api::{ChildState, IkeState};
use swanherd_ipsec::plane::{Direction, SaEntry, SaId};

use crate::plane::bound_to;
use crate::world::{ALICE, BOB, World};

impl World {
    /// Both sides have the same SAs with the same keys, mirrored policies, the same IKE SAs, and
    /// nothing else is left anywhere.
    #[track_caller]
    pub(crate) fn assert_in_sync(&self, children: usize) {
        let spis = |host: usize| -> BTreeSet<(u64, u64)> {
            self.host(host)
                .ike_sas()
                .iter()
                .filter(|sa| sa.state == IkeState::Established)
                .map(|sa| (sa.spi_i, sa.spi_r))
                .collect()
        };
        assert_eq!(spis(ALICE), spis(BOB), "IKE SAs");
        assert!(!spis(ALICE).is_empty(), "no IKE SA");

        for (from, to) in [(ALICE, BOB), (BOB, ALICE)] {
            let sender = self.host(from);
            let receiver = self.host(to);
            let outbound: Vec<_> = sender.plane.of(Direction::Out).collect();
            let inbound: Vec<_> = receiver.plane.of(Direction::In).collect();
            let direction = format!("{} -> {}", sender.name, receiver.name);
            assert_eq!(outbound.len(), children, "outbound SAs {direction}");
            assert_eq!(inbound.len(), children, "inbound SAs {direction}");
            for out in outbound {
                let Some(inward) = inbound.iter().find(|inward| inward.spi == out.spi) else {
                    panic!("SA {:08x} {direction} has no other end", out.spi);
                };
                assert!(
                    receiver.has(inward.dst),
                    "destination of {:08x} {direction}",
                    out.spi
                );
                self.assert_ends_fit(out, inward);
            }
        }

        let selectors = |host: usize, mirrored: bool| -> Vec<_> {
            let mut all: Vec<_> = self
                .host(host)
                .plane
                .policies
                .values()
                .filter(|policy| !policy.trap)
                .map(|policy| {
                    let (mut local, mut remote) = (policy.local.clone(), policy.remote.clone());
                    local.sort();
                    remote.sort();
                    if mirrored {
                        (remote, local)
                    } else {
                        (local, remote)
                    }
                })
                .collect();
            all.sort();
            all
        };
        assert_eq!(selectors(ALICE, false), selectors(BOB, true), "policies");
        for host in [ALICE, BOB] {
            self.assert_nothing_leaked(host);
        }
    }

    /// Neither side is in the middle of something: all IKE SAs are established and idle, all
    /// children installed, and what they replaced is gone.
    pub(crate) fn is_at_rest(&self) -> bool {
        [ALICE, BOB].iter().all(|host| {
            let host = self.host(*host);
            let sas = host.ike_sas();
            let children: usize = sas.iter().map(|sa| sa.children.len()).sum();
            host.plane.sas.len() == 2 * children
                && sas.iter().all(|sa| {
                    sa.state == IkeState::Established
                        && sa.tasks_active.is_empty()
                        && sa.tasks_passive.is_empty()
                        && sa
                            .children
                            .values()
                            .all(|child| child.state == ChildState::Installed)
                })
        })
    }

    pub(crate) fn assert_ends_fit(&self, out: &SaEntry, inward: &SaEntry) {
        let spi = out.spi;
        assert_eq!(out.keys, inward.keys, "keys of {spi:08x}");
        assert_eq!(out.esn, inward.esn, "ESN of {spi:08x}");
        assert_eq!(out.mode, inward.mode, "mode of {spi:08x}");
        assert_eq!(
            out.encap.is_some(),
            inward.encap.is_some(),
            "encapsulation of {spi:08x}"
        );
        if self.net.nats.is_empty() {
            assert_eq!((out.src, out.dst), (inward.src, inward.dst), "{spi:08x}");
        }
    }

    /// The data plane holds what the listings name, and was never asked for nonsense; the world
    /// has been told of what there is.
    #[track_caller]
    pub(crate) fn assert_nothing_leaked(&self, host: usize) {
        let host = self.host(host);
        let name = &host.name;
        assert_eq!(host.ledger.check_told(&host.ike_sas()), Ok(()), "{name}");
        assert_eq!(host.plane.violations, Vec::<String>::new(), "{name}");
        assert!(
            host.plane.reserved.is_empty(),
            "{name} leaks reservations {:?}",
            host.plane.reserved
        );
        let listed: BTreeSet<SaId> = host
            .children()
            .iter()
            .flat_map(|child| [child.inbound, child.outbound])
            .flatten()
            .collect();
        let installed: BTreeSet<SaId> = host.plane.sas.keys().copied().collect();
        assert_eq!(listed, installed, "listed and installed SAs of {name}");
        for policy in host.plane.policies.values() {
            if let Some(id) = bound_to(policy) {
                let out = host.plane.sas.get(&id).map(|(_, entry)| entry.direction);
                assert_eq!(
                    out,
                    Some(Direction::Out),
                    "{name}: policies of {} are bound to {id:?}",
                    policy.owner
                );
            }
        }
        let reqids: BTreeSet<u32> = host.plane.sas.values().map(|(_, sa)| sa.reqid).collect();
        for policy in host.plane.policies.values().filter(|policy| !policy.trap) {
            if let swanherd_ipsec::plane::PolicyAction::Protect { reqid, .. } = policy.action {
                assert!(
                    reqids.contains(&reqid),
                    "{name} has policies of {} without SAs",
                    policy.owner
                );
            }
        }
    }

    /// Nothing at all is left of any SA.
    #[track_caller]
    pub(crate) fn assert_clean(&self, host: usize) {
        self.assert_nothing_leaked(host);
        let host = self.host(host);
        let name = &host.name;
        let states: Vec<_> = host.ike_sas().iter().map(|sa| (sa.id, sa.state)).collect();
        assert_eq!(states, [], "IKE SAs of {name}");
        assert_eq!(host.ledger.check_over(), Ok(()), "{name}");
        assert_eq!(host.endpoint.half_open(), 0, "half-open IKE SAs of {name}");
        assert!(host.plane.sas.is_empty(), "SAs of {name}");
        let policies: Vec<_> = host
            .plane
            .policies
            .values()
            .filter(|policy| !policy.trap)
            .collect();
        assert!(policies.is_empty(), "policies of {name}: {policies:?}");
    }

    /// Everyone's [`Self::assert_clean`].
    #[track_caller]
    pub(crate) fn assert_all_clean(&self) {
        for host in 0..self.hosts.len() {
            self.assert_clean(host);
        }
    }
}
