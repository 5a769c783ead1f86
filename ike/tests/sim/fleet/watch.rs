// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What must hold all the time, and what must hold in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use swanherd_ike::api::{ChildSaInfo, ChildState, IkeSaInfo, IkeState};
use swanherd_ipsec::plane::{Direction, PolicyAction, SaId};

use super::acts::{Fleet, HUB, end_of};
use super::sites::{SITES, connection, name};
use super::{END, PEACE};

/// Within this time after there is peace, what is started by itself is up: the peer's silence has
/// to be noticed (30 s and 165 s of retransmissions), the longest wait between attempts has to
/// pass (360 s), and that attempt may have to give up an address of old (165 s).
const UP_AGAIN: Duration = Duration::from_secs(30 + 165 + 360 + 165);
/// IKE SAs that a host may have with one peer: the one in use, one that replaces it, and those
/// that are being deleted while the peer is silent.
const MOST_IKE_SAS: usize = 8;
/// CHILD SAs that an IKE SA may have per child.
const MOST_CHILDREN: usize = 6;
/// Tasks that may wait.
const MOST_TASKS: usize = 12;
/// How long two ends may take until neither is in the middle of something.
const REST: Duration = Duration::from_secs(120);

impl Fleet {
    /// Looks at all hosts.
    pub(crate) fn look(&mut self) {
        for host in 0..self.world.hosts.len() {
            self.look_at(host);
        }
        if self.world.elapsed() >= PEACE + UP_AGAIN {
            self.check_up();
        }
    }

    fn look_at(&self, host: usize) {
        let state = self.world.host(host);
        if state.off {
            return;
        }
        let sas = state.ike_sas();
        let name = &state.name;
        if let Err(wrong) = state.ledger.check_listed(&sas) {
            panic!("{name}: {wrong}");
        }
        let plane = &state.plane;
        assert_eq!(plane.violations, Vec::<String>::new(), "{name}");

        let mut with: BTreeMap<Option<&str>, usize> = BTreeMap::new();
        for sa in &sas {
            *with.entry(sa.connection.as_deref()).or_default() += 1;
            let waiting = sa.tasks_queued.len();
            assert!(waiting <= MOST_TASKS, "{name}: {:?}", sa.tasks_queued);
            let mut of: BTreeMap<&str, usize> = BTreeMap::new();
            for child in sa.children.values() {
                *of.entry(&child.name).or_default() += 1;
            }
            if let Some(most) = of.values().max() {
                assert!(*most <= MOST_CHILDREN, "{name} piles up children: {sa:?}");
            }
        }
        for (connection, count) in with {
            let limit = if connection.is_some() {
                MOST_IKE_SAS
            } else {
                MOST_IKE_SAS * SITES
            };
            assert!(
                count <= limit,
                "{name} piles up {count} IKE SAs of {connection:?}"
            );
        }

        if !state.plane_is_idle() {
            return;
        }
        let children: Vec<&ChildSaInfo> = sas.iter().flat_map(|sa| sa.children.values()).collect();
        let listed: BTreeSet<SaId> = children
            .iter()
            .flat_map(|child| [child.inbound, child.outbound])
            .flatten()
            .collect();
        for id in plane.sas.keys().chain(&plane.reserved) {
            assert!(listed.contains(id), "{name}: {id:?} is nobody's");
        }
        let reqids: BTreeSet<u32> = children.iter().map(|child| child.reqid).collect();
        for policy in plane.policies.values().filter(|policy| !policy.trap) {
            if let PolicyAction::Protect { reqid, .. } = policy.action {
                let owner = &policy.owner;
                assert!(
                    reqids.contains(&reqid),
                    "{name}: policy of {owner} is nobody's"
                );
            }
        }
    }

    /// What is started by itself is up at both ends.
    fn check_up(&self) {
        for site in 0..SITES {
            for child in 0..self.sites[site].children() {
                if !self.starts(true, site, child) && !self.starts(false, site, child) {
                    continue;
                }
                let definition = &self.sites[site].hub;
                for (at_hub, connection) in [(true, &*definition.name), (false, "hub")] {
                    let host = self.world.host(end_of(at_hub, site));
                    let child = &definition.children[child].name;
                    let up = host.ledger.children_up(connection, child);
                    let since = self.world.elapsed() - PEACE;
                    assert!(
                        up >= 1,
                        "{}: {connection}/{child} of {} is not up after {since:?} of peace",
                        host.name,
                        name(site)
                    );
                }
            }
        }
    }

    /// Both ends of everything agree; and when all is shut down, nothing is left.
    pub(crate) fn settle(&mut self) {
        assert!(self.world.elapsed() >= END);
        for site in 0..SITES {
            let world = &mut self.world;
            let children = self.sites[site].children();
            let rest = world.run_until(REST, |world| {
                [true, false].iter().all(|at_hub| {
                    let host = world.host(end_of(*at_hub, site));
                    let sas = sas_with(&host.ike_sas(), *at_hub, site);
                    host.plane_is_idle() && sas.iter().all(is_at_rest)
                })
            });
            assert!(rest, "{} and the hub never come to rest", name(site));
            self.check_pair(site, children);
        }
        for host in &self.world.hosts {
            let unanswered = host.ledger.unanswered();
            assert!(
                unanswered.is_empty(),
                "{} never answers {unanswered:?}",
                host.name
            );
        }
        for host in 0..self.world.hosts.len() {
            self.world.shutdown(host);
        }
        self.world.run_for(Duration::from_secs(5));
        self.world.assert_all_clean();
    }

    /// One that shuts down leaves nothing.
    pub(crate) fn check_over(&self, host: usize) {
        self.world.assert_clean(host);
    }

    fn check_pair(&self, site: usize, children: usize) {
        let who = name(site);
        let [hub, peer] = [true, false].map(|at_hub| {
            let host = self.world.host(end_of(at_hub, site));
            sas_with(&host.ike_sas(), at_hub, site)
        });
        let spis = |sas: &[IkeSaInfo]| -> BTreeSet<(u64, u64)> {
            sas.iter().map(|sa| (sa.spi_i, sa.spi_r)).collect()
        };
        assert_eq!(spis(&hub), spis(&peer), "IKE SAs of the hub and {who}");
        assert!(
            hub.len() <= 1,
            "{} IKE SAs between the hub and {who}",
            hub.len()
        );
        let of = |sas: &[IkeSaInfo], child: &str| -> Vec<ChildSaInfo> {
            let all = sas.iter().flat_map(|sa| sa.children.values());
            all.filter(|info| info.name == child).cloned().collect()
        };
        for child in 0..children {
            let child_name = &self.sites[site].hub.children[child].name;
            let (near, far) = (of(&hub, child_name), of(&peer, child_name));
            assert_eq!(near.len(), far.len(), "{child_name} of the hub and {who}");
            assert!(
                near.len() <= 1,
                "{child_name} exists twice between the hub and {who}"
            );
            let wanted = self.starts(true, site, child) || self.starts(false, site, child);
            assert!(
                !wanted || near.len() == 1,
                "{child_name} of {who} is not up"
            );
            for (near, far) in near.iter().zip(&far) {
                self.check_ends(site, near, far);
            }
        }
        self.world.assert_nothing_leaked(end_of(false, site));
    }

    fn check_ends(&self, site: usize, near: &ChildSaInfo, far: &ChildSaInfo) {
        let mut mirrored = far.local_ts.clone();
        mirrored.sort();
        let mut own = near.remote_ts.clone();
        own.sort();
        assert_eq!(own, mirrored, "selectors of {}", name(site));
        for (from, to, out, inward) in [(HUB, site + 1, near, far), (site + 1, HUB, far, near)] {
            let mut sending = self.world.host(from).plane.of(Direction::Out);
            let out = sending.find(|sa| Some(sa.id()) == out.outbound);
            let receiver = self.world.host(to);
            let mut receiving = receiver.plane.of(Direction::In);
            let inward = receiving.find(|sa| Some(sa.id()) == inward.inbound);
            let (Some(out), Some(inward)) = (out, inward) else {
                panic!("an SA between the hub and {} is not installed", name(site));
            };
            assert_eq!(out.spi, inward.spi, "{}", name(site));
            assert!(receiver.has(inward.dst), "{}", name(site));
            self.world.assert_ends_fit(out, inward);
        }
    }
}

/// The IKE SAs of one end of the tunnels with a peer.
fn sas_with(sas: &[IkeSaInfo], at_hub: bool, site: usize) -> Vec<IkeSaInfo> {
    let wanted = connection(site);
    sas.iter()
        .filter(|sa| !at_hub || sa.connection.as_deref() == Some(&*wanted))
        .cloned()
        .collect()
}

fn is_at_rest(sa: &IkeSaInfo) -> bool {
    sa.state == IkeState::Established
        && sa.tasks_active.is_empty()
        && sa.tasks_passive.is_empty()
        && sa.tasks_queued.is_empty()
        && sa
            .children
            .values()
            .all(|child| child.state == ChildState::Installed)
}
