// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who has which request id. Configured ones are never drawn, and none has two owners at once.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_config::identity::display_identity;
use swanherd_config::model::Connection;
use swanherd_ipsec::Identity;

/// A connection and a child of it.
pub(crate) type Name = (String, String);

/// A configured request id is in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("reqid {reqid} is in use by {owner}; configure another one")]
pub(crate) struct ReqidTaken {
    reqid: u32,
    owner: String,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct User {
    name: Name,
    peer: Identity,
}

/// All request ids.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Reqids {
    base: u32,
    next: u32,
    /// Drawn once and given back.
    free: BTreeSet<u32>,
    /// Those of CHILD SAs.
    users: BTreeMap<u32, User>,
    /// Those of traps.
    traps: BTreeMap<u32, Name>,
    /// The request id that a child was given first, and gets again.
    stable: BTreeMap<Name, u32>,
    /// The reverse of `stable`.
    remembered: BTreeMap<u32, Name>,
    /// Configured ones, with how many loaded children name each.
    configured: BTreeMap<u32, u32>,
}

impl Reqids {
    pub(super) fn new(base: u32) -> Self {
        Self {
            base: base.max(1),
            next: base.max(1),
            free: BTreeSet::new(),
            users: BTreeMap::new(),
            traps: BTreeMap::new(),
            stable: BTreeMap::new(),
            remembered: BTreeMap::new(),
            configured: BTreeMap::new(),
        }
    }

    pub(super) fn configure(&mut self, conn: &Connection) {
        for child in conn.children.iter().filter(|child| child.reqid != 0) {
            *self.configured.entry(child.reqid).or_default() += 1;
        }
    }

    pub(super) fn unconfigure(&mut self, conn: &Connection) {
        for child in &conn.children {
            if let Some(count) = self.configured.get_mut(&child.reqid) {
                *count -= 1;
                if *count == 0 {
                    self.configured.remove(&child.reqid);
                }
            }
        }
    }

    /// The children of a connection need not get the same request ids again.
    pub(super) fn forget(&mut self, conn: &Connection) {
        for child in &conn.children {
            let name = (conn.name.clone(), child.name.clone());
            if let Some(reqid) = self.stable.remove(&name) {
                self.remembered.remove(&reqid);
                if !self.users.contains_key(&reqid) && !self.traps.contains_key(&reqid) {
                    self.free.insert(reqid);
                }
            }
        }
    }

    /// A request id for CHILD SAs of a child with a peer; with `apart`, none that the trap of the
    /// child may have.
    pub(super) fn take(
        &mut self,
        name: &Name,
        peer: &Identity,
        fixed: u32,
        apart: bool,
    ) -> Result<u32, ReqidTaken> {
        let reqid = match fixed {
            0 if apart => self.fresh(),
            0 => {
                let stable = self.stable(name);
                if self.users.contains_key(&stable) {
                    self.fresh()
                } else {
                    stable
                }
            }
            _ => {
                if let Some(user) = self.users.get(&fixed) {
                    let (connection, child) = &user.name;
                    let owner = if user.name == *name {
                        format!("{connection}/{child} with {}", display_identity(&user.peer))
                    } else {
                        format!("{connection}/{child}")
                    };
                    return Err(ReqidTaken {
                        reqid: fixed,
                        owner,
                    });
                }
                self.claim_fixed(name, fixed)?;
                fixed
            }
        };
        let (name, peer) = (name.clone(), peer.clone());
        self.users.insert(reqid, User { name, peer });
        Ok(reqid)
    }

    /// The request id of the trap of a child: the one that its first CHILD SA has or will have.
    pub(super) fn of_trap(&mut self, name: &Name, fixed: u32) -> Result<u32, ReqidTaken> {
        let reqid = match fixed {
            0 => self.stable(name),
            _ => {
                if let Some(user) = self.users.get(&fixed)
                    && user.name != *name
                {
                    return Err(ReqidTaken {
                        reqid: fixed,
                        owner: format!("{}/{}", user.name.0, user.name.1),
                    });
                }
                self.claim_fixed(name, fixed)?;
                fixed
            }
        };
        self.traps.insert(reqid, name.clone());
        Ok(reqid)
    }

    pub(super) fn untrap(&mut self, reqid: u32) {
        self.traps.remove(&reqid);
        self.unless_used(reqid);
    }

    /// The last CHILD SA with a request id is gone.
    pub(super) fn give_back(&mut self, reqid: u32) {
        self.users.remove(&reqid);
        self.unless_used(reqid);
    }

    /// The connection and child that a request id belongs to.
    pub(super) fn owner(&self, reqid: u32) -> Option<&Name> {
        self.users
            .get(&reqid)
            .map(|user| &user.name)
            .or_else(|| self.traps.get(&reqid))
            .or_else(|| self.remembered.get(&reqid))
    }

    /// Sees to it that no other child has a configured request id, now or later.
    fn claim_fixed(&mut self, name: &Name, fixed: u32) -> Result<(), ReqidTaken> {
        if let Some(other) = self.traps.get(&fixed).filter(|other| *other != name) {
            return Err(ReqidTaken {
                reqid: fixed,
                owner: format!("the trap of {}/{}", other.0, other.1),
            });
        }
        if let Some(other) = self.remembered.remove(&fixed) {
            self.stable.remove(&other);
        }
        self.free.remove(&fixed);
        Ok(())
    }

    fn stable(&mut self, name: &Name) -> u32 {
        if let Some(reqid) = self.stable.get(name).copied() {
            // It may have been configured for another child since.
            let foreign = self.configured.contains_key(&reqid)
                && self.users.get(&reqid).is_none_or(|user| user.name != *name)
                && !self.traps.contains_key(&reqid);
            let taken = self.users.get(&reqid).is_some_and(|u| u.name != *name)
                || self.traps.get(&reqid).is_some_and(|other| other != name);
            if !foreign && !taken {
                return reqid;
            }
            self.remembered.remove(&reqid);
        }
        let reqid = self.fresh();
        self.remembered.insert(reqid, name.clone());
        self.stable.insert(name.clone(), reqid);
        reqid
    }

    fn fresh(&mut self) -> u32 {
        let usable = |reqids: &Self, reqid: u32| {
            !reqids.configured.contains_key(&reqid)
                && !reqids.users.contains_key(&reqid)
                && !reqids.traps.contains_key(&reqid)
                && !reqids.remembered.contains_key(&reqid)
        };
        let free = self
            .free
            .iter()
            .find(|reqid| usable(self, **reqid))
            .copied();
        if let Some(reqid) = free {
            self.free.remove(&reqid);
            return reqid;
        }
        loop {
            let reqid = self.next;
            self.next = self.next.checked_add(1).unwrap_or(self.base);
            if usable(self, reqid) {
                self.free.remove(&reqid);
                return reqid;
            }
        }
    }

    /// Frees what was drawn and is neither in use nor remembered for a child.
    fn unless_used(&mut self, reqid: u32) {
        let drawn = reqid >= self.base && reqid < self.next;
        if drawn
            && !self.users.contains_key(&reqid)
            && !self.traps.contains_key(&reqid)
            && !self.remembered.contains_key(&reqid)
        {
            self.free.insert(reqid);
        }
    }
}
