// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What should be in the kernel, recorded before it is put there, and how that differs from what
//! is there.
//!
//! Nothing in here does I/O. A plane asks [`Desired`] which kernel policies an operation changes,
//! executes the changes, and gives dumps to [`audit`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use netlink_packet_xfrm::{Address, Selector};
use swanherd_ipsec::plane::{Direction, Mark, PolicyAction, SaEntry, SaId};

use crate::audit::Owner;

mod difference;
mod journal;

pub(crate) use difference::{ActualPolicy, ActualSa, ActualTemplate, SeenPolicies, SeenSas, audit};
pub(crate) use journal::{Journal, Record, Thresholds};

/// Names one kernel policy: no two policies of a namespace agree in all of this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyKey {
    /// In, out or fwd.
    pub direction: Direction,
    /// Source network of the packets and the length of its prefix.
    pub src: (IpAddr, u8),
    /// Destination network and the length of its prefix.
    pub dst: (IpAddr, u8),
    /// IP protocol; 0 is any.
    pub proto: u8,
    /// Source port (or ICMP type) and its mask.
    pub sport: (u16, u16),
    /// Destination port (or ICMP code) and its mask.
    pub dport: (u16, u16),
    /// Mark that packets must carry.
    pub mark: Option<Mark>,
    /// XFRM interface; 0 is none.
    pub if_id: u32,
}

impl PolicyKey {
    pub(crate) fn new(
        direction: Direction,
        selector: &Selector,
        mark: Option<Mark>,
        if_id: u32,
    ) -> Self {
        let ip = |addr: &Address| -> IpAddr {
            if selector.family == netlink_packet_xfrm::AF_INET {
                addr.to_ipv4().into()
            } else {
                addr.to_ipv6().into()
            }
        };
        Self {
            direction,
            src: (ip(&selector.saddr), selector.prefixlen_s),
            dst: (ip(&selector.daddr), selector.prefixlen_d),
            proto: selector.proto,
            sport: (selector.sport, selector.sport_mask),
            dport: (selector.dport, selector.dport_mask),
            mark,
            if_id,
        }
    }

    pub(crate) fn selector(&self) -> Selector {
        Selector {
            daddr: Address::from_ip(&self.dst.0),
            saddr: Address::from_ip(&self.src.0),
            dport: self.dport.0,
            dport_mask: self.dport.1,
            sport: self.sport.0,
            sport_mask: self.sport.1,
            family: if self.src.0.is_ipv4() {
                netlink_packet_xfrm::AF_INET
            } else {
                netlink_packet_xfrm::AF_INET6
            },
            prefixlen_d: self.dst.1,
            prefixlen_s: self.src.1,
            proto: self.proto,
            ifindex: 0,
            user: 0,
        }
    }
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.direction {
            Direction::In => "in",
            Direction::Out => "out",
            Direction::Fwd => "fwd",
        };
        write!(
            f,
            "{direction} {}/{} {}/{}",
            self.src.0, self.src.1, self.dst.0, self.dst.1
        )?;
        if self.proto != 0 {
            write!(f, " proto {}", self.proto)?;
        }
        for (name, (port, mask)) in [("sport", self.sport), ("dport", self.dport)] {
            if mask != 0 {
                write!(f, " {name} {port}/{mask:#x}")?;
            }
        }
        if let Some(mark) = self.mark {
            write!(f, " mark {:#x}/{:#x}", mark.value, mark.mask)?;
        }
        if self.if_id != 0 {
            write!(f, " if_id {}", self.if_id)?;
        }
        Ok(())
    }
}

/// An SA, or the SPI reserved for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WantedSa {
    /// Only the SPI is taken.
    Reserved,
    /// Installed.
    Installed(Box<SaEntry>),
}

/// The claim of one policy set to one kernel policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// A child's, a trap's or a shunt's.
    pub(crate) owner: Owner,
    /// What the kernel policy does.
    pub(crate) action: PolicyAction,
    /// Its priority; of several claims the lowest is in force.
    pub(crate) priority: u32,
    /// Index of the interface that takes over.
    pub(crate) device: Option<u32>,
}

impl Claim {
    pub(crate) fn reqid(&self) -> Option<u32> {
        match self.action {
            PolicyAction::Protect { reqid, .. } => Some(reqid),
            PolicyAction::Bypass | PolicyAction::Discard => None,
        }
    }
}

/// What is in force for one kernel policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InForce {
    pub(crate) action: PolicyAction,
    pub(crate) priority: u32,
    pub(crate) device: Option<u32>,
}

/// A kernel policy that has to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) key: PolicyKey,
    /// `None`: it is not there yet.
    pub(crate) before: Option<InForce>,
    /// `None`: it has to go.
    pub(crate) after: Option<InForce>,
}

/// Two children want the same kernel policy with different request ids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the policy {key} belongs to {owner} (reqid {reqid}); set if_id or marks to tell them apart"
)]
pub(crate) struct Conflict {
    key: PolicyKey,
    owner: String,
    reqid: u32,
}

/// Lengths of the prefixes of a policy, as the kernel's hash thresholds count them: what is local
/// and what is remote depends on the direction alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape {
    pub(crate) v6: bool,
    pub(crate) local: u8,
    pub(crate) remote: u8,
}

/// How many policies have each shape.
pub(crate) type Shapes = BTreeMap<Shape, usize>;

impl Shape {
    fn of(key: &PolicyKey) -> Self {
        let (local, remote) = match key.direction {
            Direction::Out => (key.src.1, key.dst.1),
            Direction::In | Direction::Fwd => (key.dst.1, key.src.1),
        };
        Self {
            v6: key.src.0.is_ipv6(),
            local,
            remote,
        }
    }
}

/// The claims of one set, by kernel policy.
pub(crate) type Claims = BTreeMap<PolicyKey, Claim>;

/// The SAs and policies that should be in the kernel.
#[derive(Debug, Default)]
pub(crate) struct Desired {
    sas: BTreeMap<SaId, WantedSa>,
    sets: BTreeMap<u32, Claims>,
    /// Which sets claim a policy, oldest first.
    claimants: BTreeMap<PolicyKey, Vec<u32>>,
    /// How many claims have each request id.
    reqids: BTreeMap<u32, usize>,
    shapes: Shapes,
}

impl Desired {
    pub(crate) fn sa(&self, id: SaId) -> Option<&WantedSa> {
        self.sas.get(&id)
    }

    pub(crate) fn want_sa(&mut self, id: SaId, sa: WantedSa) -> Option<WantedSa> {
        self.sas.insert(id, sa)
    }

    pub(crate) fn forget_sa(&mut self, id: SaId) -> Option<WantedSa> {
        self.sas.remove(&id)
    }

    pub(crate) fn sas(&self) -> impl Iterator<Item = (&SaId, &WantedSa)> {
        self.sas.iter()
    }

    /// The kernel policies that a set claims.
    pub(crate) fn keys_of(&self, id: u32) -> impl Iterator<Item = PolicyKey> {
        self.sets
            .get(&id)
            .into_iter()
            .flat_map(|claims| claims.keys().copied())
    }

    /// How many kernel policies have each pair of lengths of prefixes.
    pub(crate) fn shapes(&self) -> &Shapes {
        &self.shapes
    }

    pub(crate) fn sets(&self) -> impl Iterator<Item = u32> {
        self.sets.keys().copied()
    }

    /// Every kernel policy with what is in force for it.
    pub(crate) fn policies(&self) -> impl Iterator<Item = (PolicyKey, InForce)> {
        self.claimants
            .keys()
            .filter_map(|key| Some((*key, self.in_force(key)?)))
    }

    /// Whether a policy of ours has this request id.
    pub(crate) fn knows_reqid(&self, wanted: u32) -> bool {
        self.reqids.contains_key(&wanted)
    }

    /// Gives set `id` the claims `claims` in place of those it had, and returns the old ones and
    /// the kernel policies that change: installations first, so that traffic is never without a
    /// policy in between.
    ///
    /// # Errors
    /// If another set claims one of the policies for SAs of another request id. Nothing has
    /// changed then.
    pub(crate) fn claim(
        &mut self,
        id: u32,
        claims: Claims,
    ) -> Result<(Claims, Vec<Change>), Conflict> {
        for (key, claim) in &claims {
            self.check_conflict(id, key, claim)?;
        }
        let old = self.sets.remove(&id).unwrap_or_default();
        let touched: BTreeSet<PolicyKey> = old.keys().chain(claims.keys()).copied().collect();
        if !old.is_empty() {
            self.sets.insert(id, old.clone());
        }
        let before: Vec<_> = touched.iter().map(|key| self.in_force(key)).collect();
        self.replace(id, claims);
        let mut changes: Vec<Change> = touched
            .into_iter()
            .zip(before)
            .map(|(key, before)| Change {
                key,
                before,
                after: self.in_force(&key),
            })
            .filter(|change| change.before != change.after)
            .collect();
        changes.sort_by_key(|change| change.after.is_none());
        Ok((old, changes))
    }

    /// Puts back the claims that [`Desired::claim`] returned.
    pub(crate) fn restore(&mut self, id: u32, old: Claims) {
        self.replace(id, old);
    }

    fn replace(&mut self, id: u32, claims: Claims) {
        for (key, claim) in self.sets.remove(&id).unwrap_or_default() {
            if let Some(reqid) = claim.reqid()
                && let Some(count) = self.reqids.get_mut(&reqid)
            {
                *count -= 1;
                if *count == 0 {
                    self.reqids.remove(&reqid);
                }
            }
            if let Some(ids) = self.claimants.get_mut(&key) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.claimants.remove(&key);
                    let shape = Shape::of(&key);
                    if let Some(count) = self.shapes.get_mut(&shape) {
                        *count -= 1;
                        if *count == 0 {
                            self.shapes.remove(&shape);
                        }
                    }
                }
            }
        }
        for (key, claim) in &claims {
            if let Some(reqid) = claim.reqid() {
                *self.reqids.entry(reqid).or_default() += 1;
            }
            let ids = self.claimants.entry(*key).or_default();
            if ids.is_empty() {
                *self.shapes.entry(Shape::of(key)).or_default() += 1;
            }
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        if !claims.is_empty() {
            self.sets.insert(id, claims);
        }
    }

    /// Of several claims the one with the lowest priority is in force, of equal ones the newest.
    pub(crate) fn in_force(&self, key: &PolicyKey) -> Option<InForce> {
        self.claim_in_force(key).map(|claim| InForce {
            action: claim.action,
            priority: claim.priority,
            device: claim.device,
        })
    }

    /// Whose the claim in force is.
    pub(crate) fn owner(&self, key: &PolicyKey) -> Option<&Owner> {
        self.claim_in_force(key).map(|claim| &claim.owner)
    }

    /// Whose policies have each request id.
    pub(crate) fn owners_by_reqid(&self) -> BTreeMap<u32, &Owner> {
        self.sets
            .values()
            .filter_map(|claims| claims.values().find_map(|c| Some((c.reqid()?, &c.owner))))
            .collect()
    }

    fn claim_in_force(&self, key: &PolicyKey) -> Option<&Claim> {
        self.claims_of(key)
            .rev()
            .min_by_key(|(_, claim)| claim.priority)
            .map(|(_, claim)| claim)
    }

    fn claims_of(&self, key: &PolicyKey) -> impl DoubleEndedIterator<Item = (u32, &Claim)> {
        let key = *key;
        self.claimants
            .get(&key)
            .into_iter()
            .flatten()
            .filter_map(move |id| Some((*id, self.sets.get(id)?.get(&key)?)))
    }

    fn check_conflict(&self, id: u32, key: &PolicyKey, claim: &Claim) -> Result<(), Conflict> {
        let Some(wanted) = claim.reqid() else {
            return Ok(());
        };
        for (other_id, other) in self.claims_of(key) {
            if let Some(reqid) = other.reqid()
                && other_id != id
                && reqid != wanted
            {
                return Err(Conflict {
                    key: *key,
                    owner: other.owner.name().unwrap_or_default().to_owned(),
                    reqid,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(network: &str) -> PolicyKey {
        PolicyKey {
            direction: Direction::Out,
            src: ("10.1.0.0".parse().unwrap(), 24),
            dst: (network.parse().unwrap(), 24),
            proto: 0,
            sport: (0, 0),
            dport: (0, 0),
            mark: None,
            if_id: 0,
        }
    }

    fn claim(reqid: u32, priority: u32) -> Claim {
        let local = "192.0.2.1".parse().unwrap();
        let remote = "192.0.2.2".parse().unwrap();
        Claim {
            owner: Owner::Child(format!("conn/child-{reqid}")),
            action: PolicyAction::Protect {
                mode: swanherd_ipsec::plane::Mode::Tunnel,
                local,
                remote,
                reqid,
                spi: 0,
            },
            priority,
            device: None,
        }
    }

    #[test]
    fn a_key_survives_the_kernel_selector() {
        let mut wanted = key("10.2.0.0");
        wanted.proto = 6;
        wanted.dport = (80, 0xffff);
        let selector = wanted.selector();
        assert_eq!(PolicyKey::new(Direction::Out, &selector, None, 0), wanted);
    }

    #[test]
    fn an_sa_policy_takes_over_from_its_trap_and_gives_it_back() {
        let mut desired = Desired::default();
        let shared = key("10.2.0.0");

        let (_, trap) = desired.claim(1, [(shared, claim(7, 100))].into()).unwrap();
        let (_, up) = desired.claim(2, [(shared, claim(7, 99))].into()).unwrap();
        let (_, down) = desired.claim(2, Claims::new()).unwrap();

        assert_eq!(trap[0].before, None);
        assert_eq!(up[0].before.unwrap().priority, 100);
        assert_eq!(up[0].after.unwrap().priority, 99);
        assert_eq!(down[0].after.unwrap().priority, 100);
    }

    #[test]
    fn a_changed_set_installs_before_it_removes() {
        let mut desired = Desired::default();
        desired
            .claim(1, [(key("10.2.0.0"), claim(7, 100))].into())
            .unwrap();

        let (_, changes) = desired
            .claim(1, [(key("10.3.0.0"), claim(7, 100))].into())
            .unwrap();

        assert_eq!(changes.len(), 2);
        assert_eq!(changes[0].key, key("10.3.0.0"));
        assert!(changes[1].after.is_none());
    }

    #[test]
    fn a_policy_of_another_reqid_is_a_conflict_and_changes_nothing() {
        let mut desired = Desired::default();
        desired
            .claim(1, [(key("10.2.0.0"), claim(7, 100))].into())
            .unwrap();

        let refused = desired.claim(2, [(key("10.2.0.0"), claim(8, 100))].into());

        assert_eq!(refused.unwrap_err().owner, "conn/child-7");
        assert_eq!(desired.sets().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_failed_change_can_be_undone() {
        let mut desired = Desired::default();
        desired
            .claim(1, [(key("10.2.0.0"), claim(7, 100))].into())
            .unwrap();
        let (old, _) = desired
            .claim(1, [(key("10.3.0.0"), claim(7, 100))].into())
            .unwrap();

        desired.restore(1, old);

        assert!(desired.in_force(&key("10.2.0.0")).is_some());
        assert!(desired.in_force(&key("10.3.0.0")).is_none());
    }
}
