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
    next_reqid: u32,
    next_set: u32,
    /// Request ids that were given back.
    free: BTreeSet<u32>,
    /// Policy sets by request id.
    by_reqid: BTreeMap<u32, BTreeSet<u32>>,
    holders: BTreeMap<u32, Holder>,
    by_key: BTreeMap<Key, u32>,
    /// The first request id that a child of a connection got; it gets that one again.
    stable: BTreeMap<(String, String), u32>,
    /// The children that remember a request id.
    remembered: BTreeMap<u32, (String, String)>,
    /// Traps by connection and child.
    traps: BTreeMap<(String, String), Group>,
}

impl PolicyBook {
    pub(crate) fn new(base: u32) -> Self {
        Self {
            base: base.max(1),
            next_reqid: base.max(1),
            next_set: 0,
            free: BTreeSet::new(),
            by_reqid: BTreeMap::new(),
            holders: BTreeMap::new(),
            by_key: BTreeMap::new(),
            stable: BTreeMap::new(),
            remembered: BTreeMap::new(),
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
        if let Some(holder) = self
            .by_key
            .get(&key)
            .and_then(|set| self.holders.get_mut(set))
        {
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
        self.by_reqid.entry(reqid).or_default().insert(group.set);
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
            if let Some(sets) = self.by_reqid.get_mut(&reqid) {
                sets.remove(&set);
                if sets.is_empty() {
                    self.by_reqid.remove(&reqid);
                    self.give_back(reqid);
                }
            }
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
        Some(Op::RemovePolicies(group.set))
    }

    /// Forgets all traps; returns the operations that remove them.
    pub(crate) fn untrap_all(&mut self) -> Vec<Op> {
        std::mem::take(&mut self.traps)
            .into_values()
            .map(|group| Op::RemovePolicies(group.set))
            .collect()
    }

    /// The connection and child that a request id belongs to.
    pub(crate) fn owner(&self, reqid: u32) -> Option<(String, String)> {
        let holder = self
            .by_reqid
            .get(&reqid)
            .and_then(BTreeSet::first)
            .and_then(|set| self.holders.get(set));
        match holder {
            Some(holder) => Some((holder.key.connection.clone(), holder.key.child.clone())),
            None => self.remembered.get(&reqid).cloned().or_else(|| {
                // A configured request id of a trap is remembered nowhere else.
                let trap = self.traps.iter().find(|(_, group)| group.reqid == reqid)?;
                Some(trap.0.clone())
            }),
        }
    }

    /// The remembered request id of a child, if no other peer has it now, else a fresh one.
    fn stable_reqid(&mut self, name: (String, String)) -> u32 {
        if let Some(&reqid) = self.stable.get(&name) {
            if self.by_reqid.contains_key(&reqid) {
                return self.fresh();
            }
            return reqid;
        }
        let reqid = self.fresh();
        self.remembered.insert(reqid, name.clone());
        self.stable.insert(name, reqid);
        reqid
    }

    fn fresh(&mut self) -> u32 {
        if let Some(reqid) = self.free.pop_first() {
            return reqid;
        }
        let reqid = self.next_reqid;
        self.next_reqid = self.next_reqid.saturating_add(1);
        reqid
    }

    /// Frees a request id that was drawn and is not remembered for a child.
    fn give_back(&mut self, reqid: u32) {
        if reqid < self.next_reqid && reqid >= self.base && !self.remembered.contains_key(&reqid) {
            self.free.insert(reqid);
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
