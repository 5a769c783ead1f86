// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Request ids and policy sets, kept across rekeys, reauthentication and reconnects.
//!
//! CHILD SAs that carry the same traffic of one child of one connection with one peer, one after
//! the other or side by side (as during make-before-break reauthentication), are a group: they
//! share a request id, a policy set and the values drawn for `%unique`. The set is bound to one
//! of them at a time; it goes when the last of them goes. CHILD SAs that carry other traffic of
//! the same child, as a peer negotiates that has one for each subnet, are a group of their own.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_config::model::Connection;
use swanherd_ipsec::plane::{Op, PolicySet};
use swanherd_ipsec::{Identity, TrafficSelector};

use super::narrow::covers;
use super::reqids::{Name, Reqids};
use crate::api::ChildSaId;

pub(crate) use super::reqids::ReqidTaken;

/// Identifies a request id and the policy set that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    /// For the data plane; 0 for shunts.
    pub(crate) reqid: u32,
    /// Id of the policy set.
    pub(crate) set: u32,
}

/// Values that were drawn for `%unique` and `%unique-dir`, inbound and outbound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uniques {
    /// Interface ids.
    pub(crate) if_id: (Option<u32>, Option<u32>),
    /// Marks, before they are fitted to their masks.
    pub(crate) mark: (Option<u32>, Option<u32>),
}

/// The selectors of a CHILD SA: this side's and the peer's.
pub(crate) type Traffic = (Vec<TrafficSelector>, Vec<TrafficSelector>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: Name,
    peer: Identity,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Holder {
    key: Key,
    group: Group,
    uniques: Uniques,
    /// With their selectors, once those are agreed.
    users: BTreeMap<ChildSaId, Option<Traffic>>,
    /// Policies that users want, the last being those that are installed.
    wanted: Vec<(ChildSaId, PolicySet)>,
}

#[derive(Clone, Debug)]
struct Trap {
    group: Group,
    uniques: Uniques,
    /// What it waits for.
    traffic: Traffic,
}

/// All request ids and policy sets.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct PolicyBook {
    next_set: u32,
    reqids: Reqids,
    holders: BTreeMap<u32, Holder>,
    by_key: BTreeMap<Key, BTreeSet<u32>>,
    by_reqid: BTreeMap<u32, u32>,
    /// Traps and shunts by connection and child.
    traps: BTreeMap<Name, Trap>,
    /// The policy sets of traps and shunts.
    trap_sets: BTreeMap<u32, Name>,
}

impl PolicyBook {
    pub(crate) fn new(base: u32) -> Self {
        Self {
            next_set: 0,
            reqids: Reqids::new(base),
            holders: BTreeMap::new(),
            by_key: BTreeMap::new(),
            by_reqid: BTreeMap::new(),
            traps: BTreeMap::new(),
            trap_sets: BTreeMap::new(),
        }
    }

    /// A connection is loaded: no other child gets the request ids that it configures.
    pub(crate) fn configure(&mut self, conn: &Connection) {
        self.reqids.configure(conn);
    }

    /// A connection is replaced.
    pub(crate) fn unconfigure(&mut self, conn: &Connection) {
        self.reqids.unconfigure(conn);
    }

    /// A connection is not loaded any more.
    pub(crate) fn forget(&mut self, conn: &Connection) {
        self.reqids.unconfigure(conn);
        self.reqids.forget(conn);
    }

    /// The group of a CHILD SA that is being set up; `fixed` is the configured request id, or 0.
    ///
    /// # Errors
    /// If another child has the configured request id.
    pub(crate) fn acquire(
        &mut self,
        connection: &str,
        child: &str,
        peer: &Identity,
        fixed: u32,
        user: ChildSaId,
    ) -> Result<Group, ReqidTaken> {
        let key = Key {
            name: (connection.to_owned(), child.to_owned()),
            peer: peer.clone(),
        };
        let first = self.by_key.get(&key).and_then(BTreeSet::first);
        if let Some(holder) = first.and_then(|set| self.holders.get_mut(set)) {
            holder.users.insert(user, None);
            return Ok(holder.group);
        }
        self.found(key, fixed, false, user)
    }

    /// The group of a CHILD SA whose peer and traffic are agreed by now: the same as long as it is
    /// alone there, or carries what others of the group carry.
    ///
    /// # Errors
    /// If it has to be a group of its own, and its configured request id is in use.
    pub(crate) fn settle(
        &mut self,
        set: u32,
        peer: &Identity,
        fixed: u32,
        user: ChildSaId,
        traffic: Traffic,
    ) -> Result<Group, ReqidTaken> {
        let Some(holder) = self.holders.get_mut(&set) else {
            return Ok(Group { reqid: 0, set });
        };
        let key = Key {
            name: holder.key.name.clone(),
            peer: peer.clone(),
        };
        let reqid = holder.group.reqid;
        let fits = holder.key == key && holder.fits(user, &traffic);
        // What a trap waits for besides would take its SA, had both the same request id.
        let part = fixed == 0 && self.is_part_of_trap(&key.name, &traffic);
        let trapped = part
            && self
                .traps
                .get(&key.name)
                .is_some_and(|trap| trap.group.reqid == reqid);
        if fits
            && !trapped
            && let Some(holder) = self.holders.get_mut(&set)
        {
            holder.users.insert(user, Some(traffic));
            return Ok(holder.group);
        }
        let other = self.by_key.get(&key).into_iter().flatten().find(|other| {
            **other != set
                && self
                    .holders
                    .get(other)
                    .is_some_and(|holder| holder.fits(user, &traffic))
        });
        if let Some(other) = other.copied() {
            self.leave(set, user);
            let holder = self.holders.get_mut(&other);
            let holder = holder.expect("it was found a moment ago");
            holder.users.insert(user, Some(traffic));
            return Ok(holder.group);
        }
        if let Some(holder) = self.holders.get_mut(&set)
            && holder.users.len() == 1
            && !trapped
        {
            // Alone: only the peer's name has become known.
            holder.users.insert(user, Some(traffic));
            let (group, old) = (
                holder.group,
                std::mem::replace(&mut holder.key, key.clone()),
            );
            self.drop_key(&old, set);
            self.by_key.entry(key).or_default().insert(set);
            return Ok(group);
        }
        let group = self.found(key, fixed, part, user)?;
        self.leave(set, user);
        if let Some(holder) = self.holders.get_mut(&group.set) {
            holder.users.insert(user, Some(traffic));
        }
        Ok(group)
    }

    /// Whether others of a child carry the very same traffic with a peer.
    pub(crate) fn is_carried(
        &self,
        connection: &str,
        child: &str,
        peer: &Identity,
        user: ChildSaId,
        traffic: &Traffic,
    ) -> bool {
        let key = Key {
            name: (connection.to_owned(), child.to_owned()),
            peer: peer.clone(),
        };
        let sets = self.by_key.get(&key).into_iter().flatten();
        sets.filter_map(|set| self.holders.get(set))
            .flat_map(|holder| &holder.users)
            .any(|(id, other)| *id != user && other.as_ref() == Some(traffic))
    }

    /// Adds `user`, which replaces another one of the group by a rekey.
    pub(crate) fn join(&mut self, set: u32, user: ChildSaId) {
        if let Some(holder) = self.holders.get_mut(&set) {
            holder.users.insert(user, None);
        }
    }

    /// Notes the traffic of one that joined.
    pub(crate) fn joined(&mut self, set: u32, user: ChildSaId, traffic: Traffic) {
        if let Some(holder) = self.holders.get_mut(&set) {
            holder.users.insert(user, Some(traffic));
        }
    }

    /// What was drawn for a group.
    pub(crate) fn uniques(&mut self, set: u32) -> Option<&mut Uniques> {
        if let Some(holder) = self.holders.get_mut(&set) {
            return Some(&mut holder.uniques);
        }
        let trap = self.traps.get_mut(self.trap_sets.get(&set)?)?;
        Some(&mut trap.uniques)
    }

    /// Binds the group to the policies of `user`; returns the operation, unless they are
    /// installed. They stay bound to another one that wants them later.
    pub(crate) fn want(&mut self, user: ChildSaId, policies: PolicySet) -> Option<Op> {
        let holder = self.holders.get_mut(&policies.id)?;
        let installed = holder.installed().cloned();
        match holder.wanted.iter_mut().find(|(id, _)| *id == user) {
            Some((_, set)) => *set = policies,
            None => holder.wanted.push((user, policies)),
        }
        holder.change(installed.as_ref())
    }

    /// Binds the group to the policies of `user`, which wants them already; returns the operation,
    /// unless they are installed.
    pub(crate) fn prefer(&mut self, set: u32, user: ChildSaId) -> Option<Op> {
        let holder = self.holders.get_mut(&set)?;
        let installed = holder.installed().cloned();
        let place = holder.wanted.iter().position(|(id, _)| *id == user)?;
        let own = holder.wanted.remove(place);
        holder.wanted.push(own);
        holder.change(installed.as_ref())
    }

    /// `user` wants its policies no more; returns what that means for the data plane.
    pub(crate) fn unwant(&mut self, set: u32, user: ChildSaId) -> Option<Op> {
        let holder = self.holders.get_mut(&set)?;
        let installed = holder.installed().cloned();
        holder.wanted.retain(|(id, _)| *id != user);
        match holder.change(installed.as_ref()) {
            None if installed.is_some() && holder.wanted.is_empty() => {
                Some(Op::RemovePolicies(set))
            }
            op => op,
        }
    }

    /// Whether there are policies besides those of `user` to fall back to.
    pub(crate) fn has_others(&self, set: u32, user: ChildSaId) -> bool {
        let holder = self.holders.get(&set);
        holder.is_some_and(|holder| holder.wanted.iter().any(|(id, _)| *id != user))
    }

    /// `user` is gone; returns what that means for the data plane.
    pub(crate) fn release(&mut self, set: u32, user: ChildSaId) -> Option<Op> {
        let op = self.unwant(set, user);
        self.leave(set, user);
        op
    }

    /// The group of a trap; the same as long as it is installed.
    ///
    /// # Errors
    /// If another child has the configured request id.
    pub(crate) fn trap(
        &mut self,
        connection: &str,
        child: &str,
        fixed: u32,
    ) -> Result<Group, ReqidTaken> {
        let name = (connection.to_owned(), child.to_owned());
        if let Some(trap) = self.traps.get(&name) {
            return Ok(trap.group);
        }
        let reqid = self.reqids.of_trap(&name, fixed)?;
        let group = Group {
            reqid,
            set: self.new_set(),
        };
        // A CHILD SA that is up already has what the trap would draw.
        let uniques = self
            .by_reqid
            .get(&reqid)
            .and_then(|set| self.holders.get(set))
            .map(|holder| holder.uniques)
            .unwrap_or_default();
        self.trap_sets.insert(group.set, name.clone());
        self.traps.insert(name, Trap::new(group, uniques));
        Ok(group)
    }

    /// What a trap waits for.
    pub(crate) fn trap_waits_for(&mut self, connection: &str, child: &str, traffic: Traffic) {
        let name = (connection.to_owned(), child.to_owned());
        if let Some(trap) = self.traps.get_mut(&name) {
            trap.traffic = traffic;
        }
    }

    /// The policy set of a shunt, which has no request id.
    pub(crate) fn shunt(&mut self, connection: &str, child: &str) -> Group {
        let name = (connection.to_owned(), child.to_owned());
        if let Some(trap) = self.traps.get(&name) {
            return trap.group;
        }
        let group = Group {
            reqid: 0,
            set: self.new_set(),
        };
        let uniques = Uniques::default();
        self.trap_sets.insert(group.set, name.clone());
        self.traps.insert(name, Trap::new(group, uniques));
        group
    }

    /// Forgets a trap; returns the operation that removes it.
    pub(crate) fn untrap(&mut self, connection: &str, child: &str) -> Option<Op> {
        let name = (connection.to_owned(), child.to_owned());
        let trap = self.traps.remove(&name)?;
        self.trap_sets.remove(&trap.group.set);
        self.reqids.untrap(trap.group.reqid);
        Some(Op::RemovePolicies(trap.group.set))
    }

    /// The connection and child that a request id belongs to.
    pub(crate) fn owner(&self, reqid: u32) -> Option<Name> {
        self.reqids.owner(reqid).cloned()
    }

    /// Whether the trap of a child waits for more than that.
    fn is_part_of_trap(&self, name: &Name, traffic: &Traffic) -> bool {
        self.traps.get(name).is_some_and(|trap| {
            !covers(&traffic.0, &trap.traffic.0) || !covers(&traffic.1, &trap.traffic.1)
        })
    }

    /// Makes a group; with `part`, for less than a trap waits for.
    fn found(
        &mut self,
        key: Key,
        fixed: u32,
        part: bool,
        user: ChildSaId,
    ) -> Result<Group, ReqidTaken> {
        let reqid = self.reqids.take(&key.name, &key.peer, fixed, part)?;
        let group = Group {
            reqid,
            set: self.new_set(),
        };
        // The first one is what the trap stands for.
        let uniques = self
            .traps
            .get(&key.name)
            .filter(|trap| trap.group.reqid == reqid)
            .map(|trap| trap.uniques)
            .unwrap_or_default();
        self.by_key
            .entry(key.clone())
            .or_default()
            .insert(group.set);
        self.by_reqid.insert(reqid, group.set);
        self.holders.insert(
            group.set,
            Holder {
                key,
                group,
                uniques,
                users: BTreeMap::from([(user, None)]),
                wanted: Vec::new(),
            },
        );
        Ok(group)
    }

    fn leave(&mut self, set: u32, user: ChildSaId) {
        let Some(holder) = self.holders.get_mut(&set) else {
            return;
        };
        holder.users.remove(&user);
        if !holder.users.is_empty() {
            return;
        }
        let (reqid, key) = (holder.group.reqid, holder.key.clone());
        self.holders.remove(&set);
        self.by_reqid.remove(&reqid);
        self.drop_key(&key, set);
        self.reqids.give_back(reqid);
    }

    fn drop_key(&mut self, key: &Key, set: u32) {
        if let Some(sets) = self.by_key.get_mut(key) {
            sets.remove(&set);
            if sets.is_empty() {
                self.by_key.remove(key);
            }
        }
    }

    fn new_set(&mut self) -> u32 {
        loop {
            self.next_set = self.next_set.wrapping_add(1).max(1);
            let set = self.next_set;
            let taken = self.holders.contains_key(&set) || self.trap_sets.contains_key(&set);
            if !taken {
                return set;
            }
        }
    }
}

impl Trap {
    fn new(group: Group, uniques: Uniques) -> Self {
        Self {
            group,
            uniques,
            traffic: Traffic::default(),
        }
    }
}

impl Holder {
    fn installed(&self) -> Option<&PolicySet> {
        self.wanted.last().map(|(_, set)| set)
    }

    /// The operation that makes of `before` what is to be installed now.
    fn change(&self, before: Option<&PolicySet>) -> Option<Op> {
        let now = self.installed()?;
        (before != Some(now)).then(|| Op::InstallPolicies(Box::new(now.clone())))
    }

    /// Whether `user` carries, in part at least, the very traffic of each other user.
    fn fits(&self, user: ChildSaId, traffic: &Traffic) -> bool {
        self.users
            .iter()
            .filter(|(id, _)| **id != user)
            .filter_map(|(_, other)| other.as_ref())
            .all(|other| {
                let shared = |a: &[TrafficSelector], b: &[TrafficSelector]| {
                    a.iter().any(|selector| b.contains(selector))
                };
                shared(&traffic.0, &other.0) && shared(&traffic.1, &other.1)
            })
    }
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::plane::{Mode, PolicyAction};

    use super::*;

    fn traffic(local: &str, remote: &str) -> Traffic {
        let net = |text: &str| vec![TrafficSelector::network(text.parse().unwrap(), 24).unwrap()];
        (net(local), net(remote))
    }

    fn policies(group: Group, spi: u32) -> PolicySet {
        let host = |text: &str| text.parse().unwrap();
        let (local, remote) = traffic("10.1.0.0", "10.2.0.0");
        PolicySet::new(
            group.set,
            "c/net".to_owned(),
            local,
            remote,
            PolicyAction::Protect {
                mode: Mode::Tunnel,
                local: host("192.0.2.1"),
                remote: host("192.0.2.2"),
                reqid: group.reqid,
                spi,
            },
        )
    }

    #[test]
    fn a_child_gets_its_request_id_again_and_peers_never_share_one() {
        let mut book = PolicyBook::new(1);
        let (alice, bob) = (Identity::fqdn("alice"), Identity::fqdn("bob"));

        let first = book.acquire("c", "net", &alice, 0, 1).unwrap();
        let other = book.acquire("c", "net", &bob, 0, 2).unwrap();
        let twin = book.acquire("c", "net", &alice, 0, 3).unwrap();
        assert_ne!(first.reqid, other.reqid);
        assert_eq!(first, twin);

        assert_eq!(book.release(first.set, 1), None);
        assert_eq!(book.release(first.set, 3), None);
        let again = book.acquire("c", "net", &alice, 0, 4).unwrap();
        assert_eq!(again.reqid, first.reqid);
        let lan = book.acquire("c", "lan", &alice, 0, 5).unwrap();
        assert_ne!(lan.reqid, first.reqid);
    }

    #[test]
    fn policies_are_bound_to_one_sa_and_fall_back_to_the_one_before() {
        let mut book = PolicyBook::new(1);
        let peer = Identity::fqdn("alice");
        let group = book.acquire("c", "net", &peer, 0, 1).unwrap();
        book.join(group.set, 2);
        let bound = |spi| Some(Op::InstallPolicies(Box::new(policies(group, spi))));

        assert_eq!(book.want(1, policies(group, 0x100)), bound(0x100));
        assert_eq!(book.want(2, policies(group, 0x200)), bound(0x200));
        assert_eq!(book.want(1, policies(group, 0x101)), None);
        assert_eq!(book.unwant(group.set, 2), bound(0x101));
        assert_eq!(book.want(2, policies(group, 0x200)), bound(0x200));
        assert_eq!(book.release(group.set, 1), None);
        assert_eq!(
            book.release(group.set, 2),
            Some(Op::RemovePolicies(group.set))
        );
    }

    #[test]
    fn other_traffic_of_the_same_child_is_a_group_of_its_own() {
        let mut book = PolicyBook::new(1);
        let peer = Identity::fqdn("alice");
        let one = book.acquire("c", "net", &peer, 0, 1).unwrap();
        let one = book.settle(one.set, &peer, 0, 1, traffic("10.1.0.0", "10.2.0.0"));
        let one = one.unwrap();
        let two = book.acquire("c", "net", &peer, 0, 2).unwrap();
        assert_eq!(one, two);

        let two = book.settle(two.set, &peer, 0, 2, traffic("10.1.0.0", "10.3.0.0"));
        let two = two.unwrap();
        assert_ne!(one.reqid, two.reqid);
        assert_ne!(one.set, two.set);

        // The one that reauthenticates it joins it.
        let three = book.acquire("c", "net", &peer, 0, 3).unwrap();
        let three = book.settle(three.set, &peer, 0, 3, traffic("10.1.0.0", "10.3.0.0"));
        assert_eq!(three, Ok(two));
    }

    #[test]
    fn what_is_less_than_a_trap_waits_for_has_another_request_id() {
        let mut book = PolicyBook::new(1);
        let peer = Identity::fqdn("alice");
        let trap = book.trap("c", "net", 0).unwrap();
        let (near, one) = traffic("10.1.0.0", "10.2.0.0");
        let (_, two) = traffic("10.1.0.0", "10.3.0.0");
        let whole = (near.clone(), [one.clone(), two.clone()].concat());
        book.trap_waits_for("c", "net", whole.clone());
        let agreed = |book: &mut PolicyBook, user, traffic: &Traffic| {
            let group = book.acquire("c", "net", &peer, 0, user).unwrap();
            book.settle(group.set, &peer, 0, user, traffic.clone())
                .unwrap()
        };

        let first = agreed(&mut book, 1, &(near.clone(), one.clone()));
        let second = agreed(&mut book, 2, &(near.clone(), two));
        let again = agreed(&mut book, 3, &(near, one));

        assert_ne!(first.reqid, trap.reqid);
        assert_ne!(second.reqid, trap.reqid);
        assert_ne!(first.reqid, second.reqid);
        assert_eq!(again, first);
        for (set, user) in [(first.set, 1), (second.set, 2), (first.set, 3)] {
            book.release(set, user);
        }
        assert_eq!(agreed(&mut book, 4, &whole).reqid, trap.reqid);
    }

    #[test]
    fn the_peer_that_turns_out_joins_what_it_has_already() {
        let mut book = PolicyBook::new(1);
        let (any, bob) = (Identity::any(), Identity::fqdn("bob"));
        let nets = || traffic("10.1.0.0", "10.2.0.0");
        let theirs = book.acquire("c", "net", &bob, 0, 1).unwrap();
        book.settle(theirs.set, &bob, 0, 1, nets()).unwrap();

        let ours = book.acquire("c", "net", &any, 0, 2).unwrap();
        assert_ne!(ours.reqid, theirs.reqid);
        assert_eq!(book.settle(ours.set, &bob, 0, 2, nets()), Ok(theirs));
    }

    #[test]
    fn a_configured_request_id_has_one_owner() {
        let mut book = PolicyBook::new(1);
        let (alice, bob) = (Identity::fqdn("alice"), Identity::fqdn("bob"));
        let group = book.acquire("c", "net", &alice, 7, 1).unwrap();
        assert_eq!(group.reqid, 7);

        let taken = book.acquire("d", "lan", &bob, 7, 2).unwrap_err();
        assert_eq!(
            taken.to_string(),
            "reqid 7 is in use by c/net; configure another one"
        );
        assert!(book.acquire("c", "net", &bob, 7, 3).is_err());
        assert!(book.trap("d", "lan", 7).is_err());

        book.release(group.set, 1);
        assert_eq!(book.acquire("d", "lan", &bob, 7, 4).unwrap().reqid, 7);
    }
}
