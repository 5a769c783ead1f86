// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A CHILD SA beside the one that it is to take over from, as a peer makes it that reauthenticates
//! before it breaks. Until the peer has our response it cannot receive by it, so that packets keep
//! to the SA from before: until the peer is heard over the new IKE SA, or the SA from before goes.

use std::collections::BTreeMap;
use std::time::Duration;

use swanherd_ipsec::plane::{Op, PolicySet, SaEntry};

use super::IkeSa;
use super::env::{Env, Request, Slot};
use crate::api::{ChildSaId, IkeSaId, Now};

/// Beyond this time nobody waits for a sign of the peer's. It covers the usual retransmissions.
const LIMIT: Duration = Duration::from_secs(60);

/// What shows that the peer has the response which made a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// Any message over its IKE SA, which is as new as the child.
    Message,
    /// The next request over its IKE SA: responses may be older.
    Request,
}

/// What is done once a CHILD SA is put to use.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Standby {
    ike: IkeSaId,
    child: ChildSaId,
    entry: Box<SaEntry>,
    policies: PolicySet,
}

/// CHILD SAs that stand by, by policy set.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Standbys(BTreeMap<u32, Standby>);

impl Standbys {
    /// A child is not to be put to use any more, or has been.
    pub(super) fn forget(&mut self, set: u32, child: ChildSaId) {
        if self.0.get(&set).is_some_and(|found| found.child == child) {
            self.0.remove(&set);
        }
    }

    /// Another IKE SA has the child now.
    pub(super) fn moved(&mut self, set: u32, child: ChildSaId, ike: IkeSaId) {
        if let Some(found) = self.0.get_mut(&set)
            && found.child == child
        {
            found.ike = ike;
        }
    }
}

impl Env {
    /// Whether another CHILD SA carries the packets of `leaving` from now on, or can.
    pub(super) fn has_relief(&self, set: u32, leaving: ChildSaId) -> bool {
        let standby = self.standbys.0.get(&set);
        self.policies.has_others(set, leaving)
            || standby.is_some_and(|standby| standby.child != leaving)
    }

    /// `leaving` gives up its outbound SA in a moment: what stands by takes over before that.
    pub(super) fn relieve(&mut self, set: u32, leaving: ChildSaId) {
        // Packets keep to another one that is in use.
        if self.policies.has_others(set, leaving) {
            return;
        }
        let Some(standby) = self.standbys.0.remove(&set) else {
            return;
        };
        let Standby { ike, child, .. } = standby;
        if child == leaving {
            return;
        }
        let sa = standby.entry.id();
        if *self.by_sa.entry(sa).or_insert((ike, child)) != (ike, child) {
            return;
        }
        self.plane(ike, Slot::Child(child), Op::InstallSa(standby.entry));
        if let Some(op) = self.policies.want(child, standby.policies) {
            self.plane(ike, Slot::Child(child), op);
        }
        self.request(Request::InUse { ike, child });
    }
}

impl IkeSa {
    /// Lets a child whose outbound SA is held back stand by for the others of its group, until
    /// that sign of the peer's.
    pub(super) fn stand_by(&mut self, env: &mut Env, now: Now, id: ChildSaId, sign: Sign) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        let Some(entry) = child.pending_out.clone() else {
            return;
        };
        child.use_at = Some(now.instant + LIMIT);
        child.use_on = sign;
        let standby = Standby {
            ike: self.id,
            child: id,
            entry,
            policies: child.policy_set_for(child.spi_out),
        };
        env.standbys.0.insert(child.group.set, standby);
        self.arm_children(now);
    }

    /// The addresses of a child have changed.
    pub(super) fn standby_moved(&self, env: &mut Env, id: ChildSaId) {
        let Some(child) = self.children.get(&id) else {
            return;
        };
        if let Some(standby) = env.standbys.0.get_mut(&child.group.set)
            && standby.child == id
            && let Some(entry) = &child.pending_out
        {
            standby.entry.clone_from(entry);
            standby.policies = child.policy_set_for(child.spi_out);
        }
    }

    /// The peer has been heard: what stands by on this IKE SA can be used.
    pub(super) fn peer_is_ready(&mut self, env: &mut Env, sign: Sign) {
        let ready: Vec<ChildSaId> = self
            .children
            .values()
            .filter(|child| child.use_at.is_some())
            .filter(|child| child.use_on == Sign::Message || sign == Sign::Request)
            .map(|child| child.id)
            .collect();
        for id in ready {
            self.install_outbound(env, id);
        }
    }

    /// The outbound SA of a child has been put to use on behalf of another IKE SA.
    pub(crate) fn in_use(&mut self, id: ChildSaId) {
        if let Some(child) = self.children.get_mut(&id) {
            child.out_installed = true;
            child.pending_out = None;
            child.use_at = None;
        }
    }
}
