// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A data plane that keeps what it is told, and notices what no kernel would stand for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use swanherd_ipsec::plane::{
    Direction, Op, Outcome, PlaneError, PolicyAction, PolicySet, SaEntry, SaId,
};

/// Length of the packets of the traffic.
pub(crate) const PACKET_OCTETS: u64 = 1000;

/// Kinds of operations, for making some of them fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    AllocSpi,
    InstallSa,
    InstallPolicies,
}

/// State of one host's data plane.
#[derive(Clone, Debug)]
pub(crate) struct FakePlane {
    next_spi: u32,
    order: u64,
    pub(crate) reserved: BTreeSet<SaId>,
    /// With the order of their installation.
    pub(crate) sas: BTreeMap<SaId, (u64, SaEntry)>,
    pub(crate) policies: BTreeMap<u32, PolicySet>,
    /// Virtual addresses, once for each addition.
    pub(crate) addresses: Vec<IpAddr>,
    /// Packets that each SA has carried.
    pub(crate) carried: BTreeMap<SaId, u64>,
    /// When each SA last carried a packet; also of those that are gone.
    pub(crate) used: BTreeMap<SaId, Instant>,
    /// When lifetimes end, by the clock that the kernel uses: soft and hard.
    pub(crate) ends: BTreeMap<(SaId, bool), i128>,
    /// SAs that were refused, or that ended by themselves.
    gone: BTreeSet<SaId>,
    /// Refuses policies that another set has with another request id, as a kernel's SPD does.
    pub(crate) one_owner: bool,
    /// How many operations of a kind fail from now on.
    pub(crate) failing: Vec<(OpKind, u32)>,
    /// What should never have been asked for.
    pub(crate) violations: Vec<String>,
    keys_seen: BTreeSet<Vec<u8>>,
}

impl FakePlane {
    pub(crate) fn new(first_spi: u32) -> Self {
        Self {
            next_spi: first_spi,
            order: 0,
            reserved: BTreeSet::new(),
            sas: BTreeMap::new(),
            policies: BTreeMap::new(),
            addresses: Vec::new(),
            carried: BTreeMap::new(),
            used: BTreeMap::new(),
            ends: BTreeMap::new(),
            gone: BTreeSet::new(),
            one_owner: false,
            failing: Vec::new(),
            violations: Vec::new(),
            keys_seen: BTreeSet::new(),
        }
    }

    pub(crate) fn apply(&mut self, op: Op) -> Result<Outcome, PlaneError> {
        let kind = match &op {
            Op::AllocSpi { .. } => Some(OpKind::AllocSpi),
            Op::InstallSa(_) => Some(OpKind::InstallSa),
            Op::InstallPolicies(_) => Some(OpKind::InstallPolicies),
            _ => None,
        };
        if let Some((_, left)) = self
            .failing
            .iter_mut()
            .find(|(failing, left)| Some(*failing) == kind && *left > 0)
        {
            *left -= 1;
            match &op {
                Op::InstallSa(entry) => {
                    self.gone.insert(entry.id());
                }
                // It stays bound to an SA whose removal is on its way already.
                Op::InstallPolicies(set) => self
                    .gone
                    .extend(self.policies.get(&set.id).and_then(bound_to)),
                _ => {}
            }
            return Err(refusal("made to fail", 12));
        }
        match op {
            Op::AllocSpi { dst, .. } => {
                self.next_spi += 1;
                let spi = self.next_spi;
                self.reserved.insert(SaId { spi, dst });
                return Ok(Outcome::Spi(spi));
            }
            Op::InstallSa(entry) => self.install(*entry)?,
            Op::UpdateSa {
                id,
                src,
                dst,
                encap,
            } => {
                let Some((order, mut entry)) = self.sas.remove(&id) else {
                    return Err(refusal("no such SA", 3));
                };
                entry.src = src;
                entry.dst = dst;
                entry.encap = encap;
                let new = entry.id();
                for hard in [false, true] {
                    if let Some(end) = self.ends.remove(&(id, hard)) {
                        self.ends.insert((new, hard), end);
                    }
                }
                if let Some(count) = self.carried.remove(&id) {
                    self.carried.insert(new, count);
                }
                self.sas.insert(new, (order, entry));
            }
            Op::RemoveSa(id) => {
                self.reserved.remove(&id);
                self.carried.remove(&id);
                self.forget_ends(id);
                if self.sas.remove(&id).is_some()
                    && !self.gone.contains(&id)
                    && let Some(set) = self.policies.values().find(|set| bound_to(set) == Some(id))
                {
                    let text = format!("SA {id:?} is removed while {} is bound to it", set.owner);
                    self.violations.push(text);
                }
            }
            Op::InstallPolicies(set) => {
                if set.local.is_empty() || set.remote.is_empty() {
                    self.violations
                        .push(format!("policies {} without selectors", set.id));
                }
                if let Some(id) = bound_to(&set)
                    && !self.gone.contains(&id)
                    && self
                        .sas
                        .get(&id)
                        .is_none_or(|(_, entry)| entry.direction != Direction::Out)
                {
                    let text = format!("policies of {} name {id:?}, which is not there", set.owner);
                    self.violations.push(text);
                }
                if self.one_owner
                    && let Some(owner) = self.owner_of(&set)
                {
                    let text = format!("the policy belongs to {owner}");
                    return Err(refusal(&text, 17));
                }
                self.policies.insert(set.id, *set);
            }
            Op::RemovePolicies(id) => {
                self.policies.remove(&id);
            }
            Op::AddAddress { addr, .. } => self.addresses.push(addr),
            Op::RemoveAddress(addr) => {
                if let Some(at) = self.addresses.iter().position(|known| *known == addr) {
                    self.addresses.swap_remove(at);
                }
            }
        }
        Ok(Outcome::Done)
    }

    fn install(&mut self, entry: SaEntry) -> Result<(), PlaneError> {
        let id = entry.id();
        if self.sas.contains_key(&id) {
            return Err(refusal("SA exists", 17));
        }
        if entry.reqid == 0 || entry.spi < 256 {
            self.violations
                .push(format!("SA {id:?} with reqid 0 or a reserved SPI"));
        }
        if entry.direction == Direction::In && !self.reserved.remove(&id) {
            self.violations
                .push(format!("inbound SA {id:?} without reservation"));
        }
        if !self
            .keys_seen
            .insert(entry.keys.encryption_key.expose().to_vec())
        {
            self.violations
                .push(format!("SA {id:?} with a key that was used before"));
        }
        self.order += 1;
        self.sas.insert(id, (self.order, entry));
        Ok(())
    }

    /// The SA that the kernel would take for a packet under this policy: the youngest.
    pub(crate) fn outbound(&self, policy: &PolicySet) -> Option<&SaEntry> {
        let PolicyAction::Protect {
            reqid, spi, remote, ..
        } = policy.action
        else {
            return None;
        };
        self.sas
            .values()
            .filter(|(_, entry)| {
                entry.direction == Direction::Out
                    && entry.reqid == reqid
                    && entry.dst == remote
                    && (spi == 0 || entry.spi == spi)
            })
            .max_by_key(|(order, _)| *order)
            .map(|(_, entry)| entry)
    }

    fn owner_of(&self, set: &PolicySet) -> Option<&str> {
        let reqid = |set: &PolicySet| match set.action {
            PolicyAction::Protect { reqid, .. } => reqid,
            PolicyAction::Bypass | PolicyAction::Discard => 0,
        };
        self.policies
            .values()
            .find(|other| {
                other.id != set.id
                    && reqid(other) != reqid(set)
                    && other.if_id_out == set.if_id_out
                    && other.mark_out == set.mark_out
                    && other.local.iter().any(|ts| set.local.contains(ts))
                    && other.remote.iter().any(|ts| set.remote.contains(ts))
            })
            .map(|other| other.owner.as_str())
    }

    /// A packet passes through an SA. Tells which limits it reaches, hard ones last; after a hard
    /// one the SA is gone.
    pub(crate) fn carry(&mut self, id: SaId) -> Vec<bool> {
        let Some((_, entry)) = self.sas.get(&id) else {
            return Vec::new();
        };
        let limits = entry.lifetime;
        let count = self.carried.entry(id).or_default();
        *count += 1;
        let octets = *count * PACKET_OCTETS;
        let reaches = |packets: Option<u64>, bytes: Option<u64>| {
            packets == Some(*count)
                || bytes.is_some_and(|limit| octets >= limit && octets - PACKET_OCTETS < limit)
        };
        let mut reached = Vec::new();
        if reaches(limits.soft_packets, limits.soft_bytes) {
            reached.push(false);
        }
        if reaches(limits.hard_packets, limits.hard_bytes) {
            reached.push(true);
            self.expire(id);
        }
        reached
    }

    /// An SA ends by itself.
    pub(crate) fn expire(&mut self, id: SaId) {
        self.sas.remove(&id);
        self.gone.insert(id);
        self.forget_ends(id);
    }

    /// Lifetimes that are over by `now`.
    pub(crate) fn overdue(&self, now: i128) -> Vec<(SaId, bool)> {
        let due = self.ends.iter().filter(|(_, end)| **end <= now);
        due.map(|(key, _)| *key).collect()
    }

    fn forget_ends(&mut self, id: SaId) {
        for hard in [false, true] {
            self.ends.remove(&(id, hard));
        }
    }

    /// SAs of one direction.
    pub(crate) fn of(&self, direction: Direction) -> impl Iterator<Item = &SaEntry> {
        self.sas
            .values()
            .map(|(_, entry)| entry)
            .filter(move |entry| entry.direction == direction)
    }

    /// The inbound SA with that SPI and own address.
    pub(crate) fn inbound(&self, spi: u32, dst: IpAddr) -> Option<&SaEntry> {
        self.sas
            .get(&SaId { spi, dst })
            .map(|(_, entry)| entry)
            .filter(|entry| entry.direction == Direction::In)
    }
}

/// The outbound SA that a set of policies names.
pub(crate) fn bound_to(set: &PolicySet) -> Option<SaId> {
    match set.action {
        PolicyAction::Protect { spi, remote, .. } if spi != 0 => Some(SaId { spi, dst: remote }),
        _ => None,
    }
}

fn refusal(reason: &str, errno: i32) -> PlaneError {
    PlaneError {
        op: "simulated".to_owned(),
        reason: reason.to_owned(),
        errno: Some(errno),
    }
}
