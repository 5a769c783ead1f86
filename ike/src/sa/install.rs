// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a CHILD SA gets into the data plane, and away again.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::{Direction, Op, PlaneError, SaId};

use super::child::ChildSa;
use super::env::{Env, Slot};
use super::limits::Limits;
use super::timers::Timer;
use super::{Active, IkeSa, Task};
use crate::api::{
    ChildSaId, ChildState, Event, IkeSaId, IkeSaInfo, IkeState, LogGroup, Now, PlaneAnswer, Token,
};
use crate::crypto::ChildKeys;

/// Operations of the data plane under way for a child.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Installing {
    pub(crate) child: ChildSaId,
    slot: Slot,
    pub(super) waiting: BTreeSet<Token>,
    error: Option<PlaneError>,
    /// The policies follow once the SAs are there.
    policies: bool,
}

impl Installing {
    /// Awaits these answers, too.
    pub(super) fn also_await(&mut self, tokens: Vec<Token>) {
        self.waiting.extend(tokens);
    }
}

/// Whether the outbound SA is installed together with the inbound one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outbound {
    /// Yes: the peer is ready.
    Now,
    /// No: the peer installs its inbound SA only when it has our response.
    Later,
}

impl IkeSa {
    /// Installs what was agreed. `initiated` is whether this side initiated the exchange.
    #[expect(
        clippy::too_many_arguments,
        reason = "everything that an installation rests on"
    )]
    pub(crate) fn install_child(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        keys: ChildKeys,
        initiated: bool,
        outbound: Outbound,
        slot: Slot,
    ) -> Installing {
        let mut installing = Installing {
            child: id,
            slot,
            waiting: BTreeSet::new(),
            error: None,
            policies: outbound == Outbound::Now,
        };
        let encap = self
            .nat
            .any()
            .then_some((self.local.port(), self.remote.port()));
        let Some(child) = self.children.get_mut(&id) else {
            return installing;
        };
        // Its addresses are those that its SPI was reserved with. If the IKE SA has moved since,
        // it follows once it is installed.
        child.state = ChildState::Installing;
        child.encap = encap;

        let cfg = child.cfg().clone();
        let window = cfg.replay_window.unwrap_or(env.settings.replay_window);
        let limits = Limits::of(env, &cfg);
        child.rekey_at = limits.rekey.map(|after| now.instant + after);
        child.rekey_planned = child.rekey_at;
        child.expires_at = limits.plane.hard_time.map(|after| now.instant + after);
        let lifetime = limits.plane;
        let (keys_out, keys_in) = if initiated {
            (keys.initiator, keys.responder)
        } else {
            (keys.responder, keys.initiator)
        };
        let inbound = child.entry(Direction::In, keys_in, lifetime, window);
        let out = Box::new(child.entry(Direction::Out, keys_out, lifetime, window));
        let owner = (self.id, id);
        if let Some(sa) = child.inbound() {
            env.by_sa.insert(sa, owner);
        }
        let mut wait = |token| {
            installing.waiting.insert(token);
        };
        wait(env.plane(self.id, slot, Op::InstallSa(Box::new(inbound))));
        match outbound {
            Outbound::Now => match claim(env, out.id(), owner) {
                Ok(()) => {
                    child.out_installed = true;
                    wait(env.plane(self.id, slot, Op::InstallSa(out)));
                }
                Err(error) => installing.error = Some(error),
            },
            Outbound::Later => {
                child.pending_out = Some(out);
            }
        }
        installing
    }

    /// Takes one answer about a child that is being installed; the outcome once all are there.
    /// The policies come last: they never name an SA that the data plane does not have.
    pub(crate) fn install_progress(
        &self,
        env: &mut Env,
        installing: &mut Installing,
        token: Token,
        answer: PlaneAnswer,
    ) -> Option<Result<(), PlaneError>> {
        if !installing.waiting.remove(&token) {
            return None;
        }
        if let Err(error) = answer {
            installing.error.get_or_insert(error);
        }
        if !installing.waiting.is_empty() {
            return None;
        }
        if let Some(error) = installing.error.take() {
            return Some(Err(error));
        }
        if std::mem::take(&mut installing.policies)
            && let Some(op) = self.bind_policies(env, installing.child)
        {
            let token = env.plane(self.id, installing.slot, op);
            installing.waiting.insert(token);
            return None;
        }
        Some(Ok(()))
    }

    /// Binds the policies of a child's group to its outbound SA.
    fn bind_policies(&self, env: &mut Env, id: ChildSaId) -> Option<Op> {
        let child = self.children.get(&id)?;
        if !child.cfg().policies {
            return None;
        }
        env.policies.want(id, child.policy_set())
    }

    /// Packets are to take the children of this IKE SA rather than those of another one.
    pub(crate) fn take_precedence(&mut self, env: &mut Env) {
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            self.install_outbound(env, id);
            let lasting = self.children.get(&id).filter(|child| child.is_lasting());
            if let Some(set) = lasting.map(|child| child.group.set)
                && let Some(op) = env.policies.prefer(set, id)
            {
                env.plane(self.id, Slot::Child(id), op);
            }
        }
    }

    /// Installs the outbound SA that was held back.
    pub(crate) fn install_outbound(&mut self, env: &mut Env, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        let Some(entry) = child.pending_out.take() else {
            return;
        };
        child.use_at = None;
        env.standbys.forget(child.group.set, id);
        self.tell_rekey(env, id);
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        if let Err(error) = claim(env, entry.id(), (self.id, id)) {
            self.log(env, LogGroup::Chd, 0, format!("CHILD_SA {{{id}}}: {error}"));
            self.enqueue(Task::DeleteChild(id));
            return;
        }
        child.out_installed = true;
        env.plane(self.id, Slot::Child(id), Op::InstallSa(entry));
        if let Some(op) = self.bind_policies(env, id) {
            env.plane(self.id, Slot::Child(id), op);
        }
    }

    /// A child's outbound SA is not there any more: its policies go back to the SA from before, or
    /// to none, so that packets ask for a new one.
    pub(crate) fn unbind_policies(&mut self, env: &mut Env, id: ChildSaId) {
        if let Some(op) = self.unbound(env, id) {
            env.plane_forget(op);
        }
    }

    /// As [`Self::unbind_policies`], and then deletes the child: not before the data plane has
    /// done it, lest it send by what the peer has not any more.
    pub(crate) fn step_aside(&mut self, env: &mut Env, id: ChildSaId) {
        match self.unbound(env, id) {
            Some(op) => {
                env.plane(self.id, Slot::Unbound(id), op);
            }
            None => self.enqueue(Task::DeleteChild(id)),
        }
    }

    /// Binds the policies to another SA, and returns the operation that removes this one.
    pub(super) fn unbound(&mut self, env: &mut Env, id: ChildSaId) -> Option<Op> {
        let child = self.children.get_mut(&id)?;
        if !std::mem::take(&mut child.out_installed) {
            return None;
        }
        let set = child.group.set;
        env.relieve(set, id);
        let op = if env.policies.has_others(set, id) {
            env.policies.unwant(set, id)
        } else {
            self.bind_policies(env, id)
        };
        if let Some(op) = op {
            env.plane_forget(op);
        }
        let sa = self.children.get(&id).and_then(ChildSa::outbound)?;
        if env.by_sa.get(&sa) == Some(&(self.id, id)) {
            env.by_sa.remove(&sa);
        }
        Some(Op::RemoveSa(sa))
    }

    /// A child is installed. `announce` tells the world at once; one that a rekey made is told of
    /// with [`Self::announce_rekey`].
    pub(crate) fn child_installed(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        announce: bool,
    ) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.state = ChildState::Installed;
        child.installed = Some(now.instant);
        let line = format!(
            "CHILD_SA {}{{{}}} is established with SPIs {:08x}_i {:08x}_o and TS {} === {}{}",
            child.cfg().name,
            id,
            child.spi_in,
            child.spi_out,
            super::narrow::describe(&child.local_ts),
            super::narrow::describe(&child.remote_ts),
            if child.encap.is_some() {
                ", in UDP"
            } else {
                ""
            },
        );
        let (connection, name) = (child.conn.name.clone(), child.cfg().name.clone());
        if announce {
            child.announced = true;
        }
        self.log(env, LogGroup::Ike, 0, line);
        if announce {
            let sa = Box::new(self.info_with_child(id));
            env.event(Event::ChildUpDown { up: true, sa });
            env.request(super::env::Request::ChildUp {
                ike: self.id,
                connection,
                child: name,
            });
        }
        self.move_children(env);
        self.watch_idleness(now, id);
        self.arm_children(now);
        self.changed(env);
    }

    /// `new` takes over from `old`. The world is told once there is no way back: when packets are
    /// sent with `new`, or when `old` is being deleted.
    pub(crate) fn announce_rekey(&mut self, env: &mut Env, old: ChildSaId, new: ChildSaId) {
        if !self.children.contains_key(&new) {
            return;
        }
        // Whoever replaces this side's rival contends in its stead.
        if let Active::CreatingChild(creating) = &mut self.active
            && let Some((rival, _)) = &mut creating.negotiation_mut().collision
            && *rival == old
        {
            *rival = new;
        }
        let Some(replaced) = self.children.get_mut(&old) else {
            return;
        };
        replaced.replaced_by = Some(new);
        replaced.retry_at = None;
        if !replaced.is_known() {
            return;
        }
        if replaced.untold == Some(new) {
            // It is back before anybody heard that it was replaced.
            replaced.untold = None;
            return;
        }
        let Some(child) = self.children.get_mut(&new) else {
            return;
        };
        child.untold = Some(old);
        self.changed(env);
    }

    /// Tells the world, if it was not told yet, that a child has taken over.
    pub(crate) fn tell_rekey(&mut self, env: &mut Env, new: ChildSaId) {
        let Some(child) = self.children.get_mut(&new) else {
            return;
        };
        let Some(old) = child.untold.take() else {
            return;
        };
        // What that had taken over from, comes first.
        self.tell_rekey(env, old);
        let Some(replaced) = self.children.get_mut(&old) else {
            return;
        };
        replaced.announced = false;
        let mut old_info = Box::new(replaced.info());
        old_info.state = ChildState::Rekeyed;
        let Some(child) = self.children.get_mut(&new) else {
            return;
        };
        child.announced = true;
        let connection = child.conn.name.clone();
        let new_info = Box::new(child.info());
        let sa = Box::new(self.info_without_children());
        env.event(Event::ChildRekey {
            sa,
            old: old_info,
            new: new_info,
        });
        env.count(Some(connection), crate::api::Counter::ChildRekey);
        self.changed(env);
    }

    /// As [`Self::tell_rekey`], for what has taken over from `old`.
    pub(crate) fn tell_successor(&mut self, env: &mut Env, old: ChildSaId) {
        let successor = self
            .children
            .values()
            .find(|child| child.untold == Some(old))
            .map(|child| child.id);
        if let Some(successor) = successor {
            self.tell_rekey(env, successor);
        }
    }

    /// Removes everything of a child from the data plane and from the listings.
    pub(crate) fn remove_child(&mut self, env: &mut Env, id: ChildSaId) -> Option<ChildSa> {
        self.tell_successor(env, id);
        let child = self.children.remove(&id)?;
        env.standbys.forget(child.group.set, id);
        env.relieve(child.group.set, id);
        let out = child
            .outbound()
            .filter(|sa| child.out_installed || env.by_sa.get(sa) == Some(&(self.id, id)));
        for sa in [child.inbound(), child.outbound()].into_iter().flatten() {
            if env.by_sa.get(&sa) == Some(&(self.id, id)) {
                env.by_sa.remove(&sa);
            }
        }
        if let Some(op) = env.policies.release(child.group.set, id) {
            env.plane_forget(op);
        }
        if let Some(sa) = child.inbound() {
            env.plane_forget(Op::RemoveSa(sa));
        }
        if let Some(sa) = out {
            env.plane_forget(Op::RemoveSa(sa));
        }
        for old in self.children.values_mut() {
            if old.replaced_by == Some(id) {
                old.replaced_by = None;
            }
        }
        self.changed(env);
        Some(child)
    }

    /// Ends a child for good: as [`Self::remove_child`], and the world is told if it knew it.
    pub(crate) fn close_child(&mut self, env: &mut Env, id: ChildSaId) -> Option<ChildSa> {
        self.tell_rekey(env, id);
        self.tell_successor(env, id);
        let child = self.children.get_mut(&id)?;
        if child.announced {
            child.announced = false;
            // One that goes with its IKE_SA is told in the state in which it carried traffic.
            if self.state != IkeState::Deleting {
                child.state = ChildState::Deleted;
            }
            let sa = Box::new(self.info_with_child(id));
            env.event(Event::ChildUpDown { up: false, sa });
        }
        self.remove_child(env, id)
    }

    /// A replaced child is deleted at both ends: its outbound SA goes at once, its inbound SA after
    /// a delay that lets packets in flight arrive.
    pub(crate) fn retire_child(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        self.tell_successor(env, id);
        let delay = env.settings.delete_rekeyed_delay;
        if delay.is_zero() {
            self.remove_child(env, id);
            return;
        }
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.state = ChildState::Deleted;
        child.rekey_at = None;
        child.remove_at = Some(now.instant + delay);
        child.pending_out = None;
        child.check_at = None;
        if std::mem::take(&mut child.out_installed)
            && let Some(sa) = child.outbound()
        {
            env.relieve(child.group.set, id);
            if let Some(op) = env.policies.unwant(child.group.set, id) {
                env.plane_forget(op);
            }
            env.by_sa.remove(&sa);
            env.plane_forget(Op::RemoveSa(sa));
        }
        self.arm_children(now);
        self.changed(env);
    }

    /// Arms the timer that serves all children.
    pub(crate) fn arm_children(&mut self, now: Now) {
        let next = self
            .children
            .values()
            .filter_map(ChildSa::next_deadline)
            .min()
            .map(|at| at.max(now.instant));
        self.timers.put(Timer::Child, next);
    }

    /// Listing of this IKE SA with one child.
    pub(crate) fn info_with_child(&self, id: ChildSaId) -> IkeSaInfo {
        let mut info = self.info_without_children();
        if let Some(child) = self.children.get(&id) {
            info.children.insert(id, child.info());
        }
        info
    }

    /// Moves the SAs of all children to this IKE SA's present addresses.
    pub(crate) fn move_children(&mut self, env: &mut Env) {
        self.hold_identity(env);
        if self.mobility.holds_children() {
            return;
        }
        let encap = self
            .nat
            .any()
            .then_some((self.local.port(), self.remote.port()));
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            let owner = (self.id, id);
            let Some(child) = self.children.get_mut(&id) else {
                continue;
            };
            if child.local == local && child.remote == remote && child.encap == encap {
                continue;
            }
            // Not there yet; it follows when it is.
            if child.installed.is_none() {
                continue;
            }
            let (old_in, old_out) = (child.inbound(), child.outbound());
            child.local = local;
            child.remote = remote;
            child.encap = encap;
            let (udp_in, udp_out) = (child.udp(false), child.udp(true));
            let mut update = |sa: Option<SaId>, new: Option<SaId>, src, dst, encap| {
                let (Some(sa), Some(new)) = (sa, new) else {
                    return;
                };
                if env.by_sa.remove(&sa).is_some() {
                    env.by_sa.insert(new, owner);
                }
                env.plane_forget(Op::UpdateSa {
                    id: sa,
                    src,
                    dst,
                    encap,
                });
            };
            update(old_in, child.inbound(), remote, local, udp_in);
            if child.out_installed {
                update(old_out, child.outbound(), local, remote, udp_out);
            }
            if let Some(pending) = child.pending_out.as_mut() {
                pending.src = local;
                pending.dst = remote;
                pending.encap = udp_out;
                self.standby_moved(env, id);
            }
            let Some(child) = self.children.get(&id) else {
                continue;
            };
            if child.cfg().policies && child.out_installed {
                let set = child.policy_set();
                if let Some(op) = env.policies.want(id, set) {
                    env.plane_forget(op);
                }
            }
        }
    }
}

/// Notes whose an outbound SA is. One that another CHILD SA has must not be touched on behalf of
/// this one: its peer has lost that, or plays tricks.
fn claim(env: &mut Env, sa: SaId, owner: (IkeSaId, ChildSaId)) -> Result<(), PlaneError> {
    let holder = *env.by_sa.entry(sa).or_insert(owner);
    if holder == owner {
        return Ok(());
    }
    Err(PlaneError {
        op: "install SA".to_owned(),
        reason: format!(
            "the peer gave the SPI {:08x} of CHILD_SA {{{}}} to another one",
            sa.spi, holder.1
        ),
        errno: None,
    })
}
