// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What must hold in every state, and what must hold once nothing moves any more.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::{Direction, SaId};

use super::plane::bound_to;
use super::world::{ALICE, BOB, World, own_address};
use crate::api::{ChildState, IkeState};
use crate::sa::{Active, Passive};

const NAMES: [&str; 2] = ["alice", "bob"];

macro_rules! ensure {
    ($holds:expr, $($text:tt)*) => {
        if !$holds {
            return Err(format!($($text)*));
        }
    };
}

impl World {
    /// What must hold at any moment.
    ///
    /// # Errors
    /// With what does not.
    pub(super) fn check_always(&self) -> Result<(), String> {
        for host in [ALICE, BOB] {
            let (own, peer) = (&self.hosts[host], &self.hosts[1 - host]);
            let name = NAMES[host];
            if let Some(violation) = own.plane.violations.first() {
                return Err(format!("data plane of {name}: {violation}"));
            }
            let policies = own.plane.policies.values().filter(|policy| !policy.trap);
            let mut carried = false;
            for policy in policies {
                let lossless = self.scenario.lossless && policy.owner == "gw/net";
                carried |= lossless;
                let Some(out) = own.plane.outbound(policy) else {
                    ensure!(!lossless, "{name} has no SA to send with");
                    continue;
                };
                // Where there is no other, or it is being removed, nothing is gained by waiting.
                let other = own.plane.of(Direction::Out).any(|other| {
                    let dst = own_address(1 - host);
                    other.reqid == out.reqid
                        && peer.plane.inbound(other.spi, dst).is_some()
                        && !own.removes(other.id())
                        && !peer.removes(other.id())
                });
                ensure!(
                    peer.received_by.contains(&out.spi) || !other,
                    "{name} sends by {:08x}, which the peer cannot receive by yet",
                    out.spi
                );
                ensure!(
                    !lossless || peer.plane.inbound(out.spi, own_address(1 - host)).is_some(),
                    "{name} sends by {:08x}, which the peer has not any more",
                    out.spi
                );
            }
            ensure!(
                carried || !self.scenario.lossless,
                "{name} has no policy to send by"
            );
            ensure!(
                own.outages == 0 || !self.scenario.lossless,
                "{name} told the world that a child is down"
            );
        }
        Ok(())
    }

    /// What must hold when all is over.
    ///
    /// # Errors
    /// With what does not.
    pub(super) fn check_at_rest(&self) -> Result<(), String> {
        if self.hosts.iter().any(|host| host.gave_up) {
            // The peer keeps what it was not told of until it sees to whether this side lives.
            return [ALICE, BOB]
                .into_iter()
                .filter(|host| self.hosts[*host].gave_up)
                .try_for_each(|host| self.check_host_at_rest(host));
        }
        let spis = |host: usize| -> BTreeSet<(u64, u64)> {
            self.established(host)
                .map(|sa| (sa.spi_i, sa.spi_r))
                .collect()
        };
        ensure!(
            spis(ALICE) == spis(BOB),
            "the sides have different IKE SAs: {:x?} and {:x?}",
            spis(ALICE),
            spis(BOB)
        );
        let sas = spis(ALICE).len();
        ensure!(
            self.is_pending() || self.scenario.ends.ike_sas.contains(&sas),
            "{sas} IKE SAs are left"
        );
        for host in [ALICE, BOB] {
            self.check_host_at_rest(host)?;
        }
        let pairs = |host: usize, mirrored: bool| -> BTreeSet<(u32, u32)> {
            let children = self.established(host).flat_map(|sa| sa.children.values());
            let pair = |(a, b)| if mirrored { (b, a) } else { (a, b) };
            children
                .map(|child| pair((child.spi_in, child.spi_out)))
                .collect()
        };
        ensure!(
            pairs(ALICE, false) == pairs(BOB, true),
            "the sides have different CHILD SAs: {:x?} and {:x?}",
            pairs(ALICE, false),
            pairs(BOB, true)
        );
        for host in [ALICE, BOB] {
            let (own, peer) = (&self.hosts[host], &self.hosts[1 - host]);
            for out in own.plane.of(Direction::Out) {
                let inward = peer.plane.inbound(out.spi, own_address(1 - host));
                ensure!(
                    inward.is_some_and(|inward| inward.keys == out.keys),
                    "{} sends by {:08x}, which the peer does not have, or with another key",
                    NAMES[host],
                    out.spi
                );
            }
        }
        Ok(())
    }

    /// Whether some of the scenario's deeds have not been done.
    fn is_pending(&self) -> bool {
        self.done.contains(&false)
    }

    fn check_host_at_rest(&self, host: usize) -> Result<(), String> {
        let name = NAMES[host];
        let state = &self.hosts[host];
        let endpoint = &state.endpoint;
        for (id, ended) in &state.commands {
            ensure!(*ended, "command {id} of {name} has not ended");
        }
        let mut listed = BTreeSet::new();
        let mut names: Vec<&str> = Vec::new();
        for sa in endpoint.sas.values() {
            let id = sa.id;
            ensure!(
                sa.state == IkeState::Established,
                "IKE SA [{id}] of {name} is left as {:?}",
                sa.state
            );
            ensure!(
                matches!(sa.active, Active::Idle)
                    && matches!(sa.passive, Passive::Idle)
                    && sa.outbound.in_flight.is_none()
                    && sa.inbound.processing.is_none(),
                "IKE SA [{id}] of {name} is in the middle of something: {:?} {:?}",
                sa.active,
                sa.passive
            );
            ensure!(
                sa.queue.is_empty() && sa.delayed.is_empty() && sa.rekey_twin.is_none(),
                "IKE SA [{id}] of {name} has something left to do"
            );
            for child in sa.children.values() {
                let id = child.id;
                ensure!(
                    child.state == ChildState::Installed
                        && child.out_installed
                        && !child.redundant
                        && !child.expired
                        && child.replaced_by.is_none(),
                    "CHILD SA {{{id}}} of {name} is left as {:?}, outbound {}, redundant {}",
                    child.state,
                    child.out_installed,
                    child.redundant
                );
                listed.extend(child.inbound());
                listed.extend(child.outbound());
                names.push(&child.cfg().name);
            }
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        ensure!(
            names.len() == count,
            "{name} has {count} CHILD SAs of {} children",
            names.len()
        );
        ensure!(
            self.is_pending() || self.scenario.ends.children.contains(&count),
            "{count} CHILD SAs are left at {name}"
        );
        // As many as came up and did not go down are there, as far as the world was told.
        let told = i64::from(state.told.0) - i64::from(state.told.1) + 1;
        ensure!(
            usize::try_from(told) == Ok(count),
            "{name} told of {} children more and {} less, and has {count}",
            state.told.0,
            state.told.1
        );
        let installed: BTreeSet<SaId> = state.plane.sas.keys().copied().collect();
        ensure!(
            listed == installed,
            "{name} lists {listed:x?}, and its data plane has {installed:x?}"
        );
        ensure!(
            state.plane.reserved.is_empty(),
            "{name} leaks reservations {:x?}",
            state.plane.reserved
        );
        for policy in state.plane.policies.values() {
            let bound = bound_to(policy);
            ensure!(
                bound.is_some_and(|id| installed.contains(&id)),
                "policies of {} at {name} lead to {bound:x?}",
                policy.owner
            );
        }
        ensure!(
            state.plane.policies.len() == count,
            "{name} has {} sets of policies for {count} CHILD SAs",
            state.plane.policies.len()
        );
        // What nobody sees, but would fill memory.
        let env = &endpoint.env;
        let spis: BTreeSet<u64> = endpoint.sas.values().map(|sa| sa.own_spi()).collect();
        let known: BTreeSet<u64> = env.spis.keys().copied().collect();
        ensure!(
            spis == known,
            "{name} has IKE SPIs {spis:x?}, knows {known:x?}"
        );
        let by_sa: BTreeSet<SaId> = env.by_sa.keys().copied().collect();
        ensure!(
            listed == by_sa,
            "{name} lists {listed:x?}, knows {by_sa:x?}"
        );
        ensure!(
            env.pending.is_empty() && env.requests.is_empty() && endpoint.waiters.is_empty(),
            "{name} waits for something that never comes: {:?} {:?}",
            env.pending,
            endpoint.waiters
        );
        Ok(())
    }
}
