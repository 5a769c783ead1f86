// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Request ids and policy sets, kept across rekeys, reauthentication and reconnects.
//!
//! A request id belongs to one child of one connection with one peer. While two CHILD SAs of that
//! child live side by side (as during make-before-break reauthentication), they share request id
//! and policies; the policies go when the last of them goes.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_ipsec::Identity;
use swanherd_ipsec::plane::{Op, PolicySet};

use crate::api::ChildSaId;

/// Identifies a request id and the policy set that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    /// For the data plane.
    pub(crate) reqid: u32,
    /// Id of the policy set.
    pub(crate) set: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    connection: String,
    child: String,
    peer: Identity,
}

#[derive(Debug)]
struct Holder {
    key: Key,
    group: Group,
    users: BTreeSet<ChildSaId>,
    /// Policies that users want, the last being the one that is installed.
    wanted: Vec<(ChildSaId, PolicySet)>,
}

/// All request ids and policy sets.
#[derive(Debug)]
pub(crate) struct PolicyBook {
    base: u32,
    next_set: u32,
    reqids: BTreeSet<u32>,
    holders: BTreeMap<u32, Holder>,
    by_key: BTreeMap<Key, u32>,
    /// The first request id that a child of a connection got; it gets that one again.
    stable: BTreeMap<(String, String), u32>,
    /// Traps by connection and child.
    traps: BTreeMap<(String, String), Group>,
}

impl PolicyBook {
    pub(crate) fn new(base: u32) -> Self {
        Self {
            base: base.max(1),
            next_set: 0,
            reqids: BTreeSet::new(),
            holders: BTreeMap::new(),
            by_key: BTreeMap::new(),
            stable: BTreeMap::new(),
            traps: BTreeMap::new(),
        }
    }

    /// The group of a CHILD SA that is being set up; `fixed` is the configured request id, or 0.
    pub(crate) fn acquire(
        &mut self,
        connection: &str,
        child: &str,
        peer: &Identity,
        fixed: u32,
        user: ChildSaId,
    ) -> Group {
        let key = Key {
            connection: connection.to_owned(),
            child: child.to_owned(),
            peer: peer.clone(),
        };
        if let Some(holder) = self.by_key.get(&key).and_then(|set| self.holders.get_mut(set)) {
            holder.users.insert(user);
            return holder.group;
        }
        let name = (key.connection.clone(), key.child.clone());
        let reqid = if fixed != 0 {
            fixed
        } else {
            self.stable_reqid(name)
        };
        self.next_set += 1;
        let group = Group {
            reqid,
            set: self.next_set,
        };
        self.by_key.insert(key.clone(), group.set);
        self.holders.insert(
            group.set,
            Holder {
                key,
                group,
                users: BTreeSet::from([user]),
                wanted: Vec::new(),
            },
        );
        group
    }

    /// Adds `user`, which replaces another one of the group by a rekey.
    pub(crate) fn join(&mut self, set: u32, user: ChildSaId) {
        if let Some(holder) = self.holders.get_mut(&set) {
            holder.users.insert(user);
        }
    }

    /// Records that `user` needs `policies`; returns the operation, unless they are installed.
    pub(crate) fn want(&mut self, user: ChildSaId, policies: PolicySet) -> Option<Op> {
        let holder = self.holders.get_mut(&policies.id)?;
        let installed = holder.wanted.last().map(|(_, set)| set.clone());
        holder.wanted.retain(|(id, _)| *id != user);
        holder.wanted.push((user, policies.clone()));
        (installed.as_ref() != Some(&policies)).then(|| Op::InstallPolicies(Box::new(policies)))
    }

    /// `user` is gone; returns what that means for the data plane.
    pub(crate) fn release(&mut self, set: u32, user: ChildSaId) -> Option<Op> {
        let holder = self.holders.get_mut(&set)?;
        holder.users.remove(&user);
        let installed = holder.wanted.last().map(|(_, set)| set.clone());
        holder.wanted.retain(|(id, _)| *id != user);
        let wanted = holder.wanted.last().map(|(_, set)| set.clone());
        if holder.users.is_empty() {
            let (reqid, key) = (holder.group.reqid, holder.key.clone());
            self.holders.remove(&set);
            self.by_key.remove(&key);
            self.free(reqid);
        }
        match (installed, wanted) {
            (Some(_), None) => Some(Op::RemovePolicies(set)),
            (Some(a), Some(b)) if a != b => Some(Op::InstallPolicies(Box::new(b))),
            _ => None,
        }
    }

    /// The group of a trap; the same as long as it is installed.
    pub(crate) fn trap(&mut self, connection: &str, child: &str, fixed: u32) -> Group {
        let name = (connection.to_owned(), child.to_owned());
        if let Some(group) = self.traps.get(&name) {
            return *group;
        }
        let reqid = if fixed != 0 {
            fixed
        } else {
            match self.stable.get(&name) {
                Some(reqid) => *reqid,
                None => self.stable_reqid(name.clone()),
            }
        };
        self.next_set += 1;
        let group = Group {
            reqid,
            set: self.next_set,
        };
        self.traps.insert(name, group);
        group
    }

    /// Whether a trap is installed.
    pub(crate) fn has_trap(&self, connection: &str, child: &str) -> bool {
        self.traps
            .contains_key(&(connection.to_owned(), child.to_owned()))
    }

    /// Forgets a trap; returns the operation that removes it.
    pub(crate) fn untrap(&mut self, connection: &str, child: &str) -> Option<Op> {
        let group = self
            .traps
            .remove(&(connection.to_owned(), child.to_owned()))?;
        self.free(group.reqid);
        Some(Op::RemovePolicies(group.set))
    }

    /// Forgets all traps; returns the operations that remove them.
    pub(crate) fn untrap_all(&mut self) -> Vec<Op> {
        let groups: Vec<Group> = std::mem::take(&mut self.traps).into_values().collect();
        for group in &groups {
            self.free(group.reqid);
        }
        groups
            .into_iter()
            .map(|group| Op::RemovePolicies(group.set))
            .collect()
    }

    /// The connection and child that a request id belongs to.
    pub(crate) fn owner(&self, reqid: u32) -> Option<(String, String)> {
        let trap = self.traps.iter().find(|(_, group)| group.reqid == reqid);
        if let Some((name, _)) = trap {
            return Some(name.clone());
        }
        self.holders
            .values()
            .find(|holder| holder.group.reqid == reqid)
            .map(|holder| (holder.key.connection.clone(), holder.key.child.clone()))
    }

    /// The remembered request id of a child, if no other peer has it now, else a fresh one.
    fn stable_reqid(&mut self, name: (String, String)) -> u32 {
        if let Some(&reqid) = self.stable.get(&name) {
            let taken = self
                .holders
                .values()
                .any(|holder| holder.group.reqid == reqid);
            if !taken {
                return reqid;
            }
            return self.fresh();
        }
        let reqid = self.fresh();
        self.stable.insert(name, reqid);
        reqid
    }

    fn fresh(&mut self) -> u32 {
        let mut reqid = self.base;
        for used in self.reqids.range(self.base..) {
            if *used != reqid {
                break;
            }
            reqid = reqid.saturating_add(1);
        }
        self.reqids.insert(reqid);
        reqid
    }

    /// Frees a request id that is not remembered for a child.
    fn free(&mut self, reqid: u32) {
        if !self.stable.values().any(|stable| *stable == reqid) {
            self.reqids.remove(&reqid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_gets_its_request_id_again_and_peers_never_share_one() {
        let mut book = PolicyBook::new(1);
        let (alice, bob) = (Identity::fqdn("alice"), Identity::fqdn("bob"));

        let first = book.acquire("c", "net", &alice, 0, 1);
        let other = book.acquire("c", "net", &bob, 0, 2);
        let twin = book.acquire("c", "net", &alice, 0, 3);
        assert_ne!(first.reqid, other.reqid);
        assert_eq!(first, twin);

        assert_eq!(book.release(first.set, 1), None);
        assert_eq!(book.release(first.set, 3), None);
        assert_eq!(book.acquire("c", "net", &alice, 0, 4).reqid, first.reqid);
        assert_ne!(book.acquire("c", "lan", &alice, 0, 5).reqid, first.reqid);
    }
}
