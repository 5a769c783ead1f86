// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which child replaces which: the end of a rekey, collisions, and peers that forget (RFC 7296
//! sections 2.8.1 and 2.25).

use std::time::Duration;

use swanherd_config::model::Action as CloseAction;

use super::child::{ChildSa, EXPIRED_LIMIT, PEER_DELETE_LIMIT};
use super::child_offer::ChildPayloads;
use super::create_child::{Creating, Negotiation};
#[cfg(test)]
use super::env::Mutant;
use super::env::{Env, Request};
use super::{Active, IkeSa, Passive, Task, narrow};
use crate::api::{ChildSaId, ChildState, ConnectionRef, LogGroup, Now};
use crate::endpoint::keep::Cause;

impl IkeSa {
    /// A child that this side initiated is in the data plane.
    pub(super) fn created(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: Negotiation,
        nonce_r: &[u8],
    ) {
        let id = negotiation.child;
        if self.is_doomed(id, &negotiation) {
            self.creation_undone(env, now, &negotiation);
            return;
        }
        let Some(old) = negotiation.rekeys else {
            self.created_anew(env, now, id);
            return;
        };
        // The peer may have deleted it already, even in vain: what it has answered with an SA of
        // its own is decided by the nonces, whoever deleted the old one.
        let gone = self.is_gone(old);
        let rival = negotiation
            .collision
            .filter(|(theirs, _)| self.children.get(theirs).is_some_and(ChildSa::is_live));
        let Some((theirs, their_nonce)) = rival else {
            self.child_installed(env, now, id, gone);
            if !gone {
                self.announce_rekey(env, old, id);
                self.delete_replaced(old);
            }
            return;
        };
        self.child_installed(env, now, id, false);
        // The SA made by the exchange with the lowest of the four nonces is the redundant one; its
        // initiator deletes it, and the other one deletes the old SA (RFC 7296 section 2.8.1).
        let our_nonce = negotiation.nonce.as_slice().min(nonce_r);
        let lost = our_nonce < their_nonce.as_slice();
        #[cfg(test)]
        let lost = lost != env.is(Mutant::Nonces);
        if lost {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("both sides rekeyed CHILD_SA {{{old}}}; the peer's {{{theirs}}} is kept"),
            );
            if let Some(ours) = self.children.get_mut(&id) {
                ours.redundant = true;
            }
            if !gone {
                self.announce_rekey(env, old, theirs);
                self.rekeyed_by_peer(now, old);
            }
            // The peer has it only until it learns that it is redundant: packets go back to the
            // old one, or to the peer's if that has taken over.
            self.step_aside(env, id);
        } else {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("both sides rekeyed CHILD_SA {{{old}}}; our {{{id}}} is kept"),
            );
            if let Some(theirs) = self.children.get_mut(&theirs) {
                theirs.redundant = true;
                theirs.check_at = Some(now.instant + PEER_DELETE_LIMIT);
            }
            if gone {
                // Theirs took over when the old one went.
                self.announce_rekey(env, theirs, id);
                self.arm_children(now);
            } else {
                self.announce_rekey(env, old, id);
                self.delete_replaced(old);
            }
        }
    }

    /// A new child that this side initiated is in the data plane. The peer may have made the same
    /// meanwhile: the original responder gives its own up, and the original initiator has refused
    /// the peer's as long as it was making its own.
    fn created_anew(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let twin = self.children.get(&id).filter(|_| !self.initiator);
        let twin = twin.and_then(|own| {
            let others = self.children.values().filter(|child| {
                child.id != id
                    && child.is_lasting()
                    && child.conn.name == own.conn.name
                    && child.index == own.index
            });
            others
                .filter(|child| {
                    narrow::covers(&child.local_ts, &own.local_ts)
                        && narrow::covers(&child.remote_ts, &own.remote_ts)
                })
                .map(|child| child.id)
                .next()
        });
        let Some(twin) = twin else {
            self.child_installed(env, now, id, true);
            return;
        };
        self.child_installed(env, now, id, false);
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("both sides made the same CHILD_SA; the peer's {{{twin}}} is kept"),
        );
        let Some(own) = self.children.get_mut(&id) else {
            return;
        };
        own.redundant = true;
        let (connection, child) = (own.conn.name.clone(), own.cfg().name.clone());
        env.request(Request::ChildUp {
            ike: self.id,
            connection,
            child,
        });
        self.step_aside(env, id);
    }

    /// Whether this side is making that child, not to replace another.
    pub(super) fn makes_new_child(&self, conn: &ConnectionRef, index: usize) -> bool {
        let Active::CreatingChild(creating) = &self.active else {
            return false;
        };
        let negotiation = creating.negotiation();
        negotiation.rekeys.is_none() && self.is_child_of(negotiation.child, conn, index)
    }

    /// Whether the peer's request for that child is being answered, not to replace another.
    pub(super) fn answers_new_child(&self, conn: &ConnectionRef, index: usize) -> bool {
        let Passive::CreatingChild(answering) = &self.passive else {
            return false;
        };
        let draft = answering.draft();
        draft.rekeys.is_none() && self.is_child_of(draft.child, conn, index)
    }

    fn is_child_of(&self, id: ChildSaId, conn: &ConnectionRef, index: usize) -> bool {
        self.children
            .get(&id)
            .is_some_and(|child| child.conn.name == conn.name && child.index == index)
    }

    /// Whether a child is deleted at both ends.
    pub(super) fn is_gone(&self, id: ChildSaId) -> bool {
        self.children
            .get(&id)
            .is_none_or(|child| child.state == ChildState::Deleted)
    }

    /// Whether the peer's request to rekey this child is being answered.
    pub(super) fn answers_rekey_of(&self, old: Option<ChildSaId>) -> bool {
        matches!(&self.passive, Passive::CreatingChild(answering)
            if old.is_some() && answering.draft().rekeys == old)
    }

    /// Whether a request of the peer's is to rekey a child that this side has replaced and is about
    /// to delete. The peer sent it before it had seen ours. To refuse it before the delete is worse
    /// than to let it wait: charon takes a refusal for leave to go on with the old child, so that
    /// it does not send by the new one when the old one is deleted.
    pub(super) fn rekeys_what_is_replaced(&self, offer: &ChildPayloads) -> bool {
        let Some(spi) = offer.rekeys else {
            return false;
        };
        self.children.values().any(|child| {
            let deletes = |task: &Task| matches!(task, Task::DeleteChild(id) if *id == child.id);
            child.spi_out == spi
                && child.replaced_by.is_some()
                && (self.queue.iter().any(deletes)
                    || matches!(self.active, Active::DeletingChild(id) if id == child.id))
        })
    }

    /// Answers a request that had to wait, if its time has come.
    pub(super) fn answer_postponed(&mut self, env: &mut Env, now: Now) {
        match std::mem::replace(&mut self.passive, Passive::Idle) {
            Passive::Postponed(payloads) => self.handle_create_child(env, now, &payloads),
            other => self.passive = other,
        }
    }

    /// Whether this child is made for a request of the peer's that is being answered.
    pub(super) fn answers_creation_of(&self, id: ChildSaId) -> bool {
        matches!(&self.passive, Passive::CreatingChild(answering)
            if answering.draft().child == id)
    }

    /// The peer's own rekeying has been answered, in whatever way.
    pub(crate) fn rival_child_answered(&mut self, env: &mut Env, now: Now) {
        match std::mem::replace(&mut self.active, Active::Idle) {
            Active::CreatingChild(state) => match *state {
                Creating::Rival {
                    negotiation,
                    nonce_r,
                } => self.created(env, now, *negotiation, &nonce_r),
                other => self.active = Active::CreatingChild(Box::new(other)),
            },
            other => self.active = other,
        }
    }

    /// A child has been replaced and waits to be deleted.
    pub(crate) fn rekeyed_from(&mut self, old: ChildSaId) {
        if let Some(old) = self.children.get_mut(&old) {
            old.state = ChildState::Rekeyed;
        }
    }

    /// As [`Self::rekeyed_from`], where it is for the peer to delete it.
    pub(crate) fn rekeyed_by_peer(&mut self, now: Now, old: ChildSaId) {
        self.rekeyed_from(old);
        if let Some(child) = self.children.get_mut(&old) {
            let limit = if child.expired {
                EXPIRED_LIMIT
            } else {
                PEER_DELETE_LIMIT
            };
            child.check_at = Some(now.instant + limit);
            if !child.taken_down {
                // One that has expired may be about to be deleted out of turn.
                let delete = |task: &Task| matches!(task, Task::DeleteChild(id) if *id == old);
                self.queue.retain(|task| !delete(task));
            }
        }
        self.arm_children(now);
    }

    /// Deletes `old`, which this side has replaced, and what it had replaced in turn if the peer
    /// has kept that.
    pub(super) fn delete_replaced(&mut self, old: ChildSaId) {
        self.rekeyed_from(old);
        self.enqueue(Task::DeleteChild(old));
        let older: Vec<ChildSaId> = self
            .children
            .values()
            .filter(|child| child.replaced_by == Some(old) && child.state == ChildState::Rekeyed)
            .map(|child| child.id)
            .collect();
        for id in older {
            self.enqueue(Task::DeleteChild(id));
        }
    }

    /// The peer never learned that its rekeying had succeeded: it has the SA from before, and not
    /// `lost`, which was to replace that. False if the SA from before is gone.
    pub(super) fn return_to_predecessor(
        &mut self,
        env: &mut Env,
        now: Now,
        lost: ChildSaId,
    ) -> bool {
        let before = self
            .children
            .values()
            .find(|child| {
                child.replaced_by == Some(lost)
                    && child.state == ChildState::Rekeyed
                    && child.out_installed
                    && !child.expired
            })
            .map(|child| child.id);
        let Some(before) = before else {
            return false;
        };
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("the peer does not have CHILD_SA {{{lost}}}, {{{before}}} is used again"),
        );
        let wait = Duration::from_millis(2_000 + env.rng.below(4_000));
        if let Some(child) = self.children.get_mut(&before) {
            child.state = ChildState::Installed;
            child.replaced_by = None;
            child.check_at = None;
        }
        self.announce_rekey(env, lost, before);
        if let Some(child) = self.children.get_mut(&before) {
            child.retry_at = Some(now.instant + wait);
        }
        self.remove_child(env, lost);
        self.arm_children(now);
        true
    }

    /// Takes the child that the peer made in a collision as the successor. False if there is none.
    pub(super) fn adopt_collision(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: &Negotiation,
    ) -> bool {
        let (Some(old), Some((theirs, _))) = (negotiation.rekeys, &negotiation.collision) else {
            return false;
        };
        #[cfg(test)]
        if env.is(Mutant::Forgetful) {
            return false;
        }
        if !self.children.get(theirs).is_some_and(ChildSa::is_live) {
            return false;
        }
        // If the peer has deleted the old one, its own has taken over already.
        if !self.is_gone(old) {
            self.announce_rekey(env, old, *theirs);
            self.rekeyed_by_peer(now, old);
        }
        true
    }

    /// The child with which the peer replaces `old` while this side's rekeying of it is under way.
    /// It takes over for now; which of the two stays is decided once this side's is there, too.
    pub(crate) fn collision_successor(
        &mut self,
        env: &mut Env,
        old: ChildSaId,
    ) -> Option<ChildSaId> {
        let theirs = self.rival_of(old)?;
        self.announce_rekey(env, old, theirs);
        Some(theirs)
    }

    /// The child that the peer has made to replace `old`, while this side is about to replace it,
    /// too.
    pub(super) fn rival_of(&self, old: ChildSaId) -> Option<ChildSaId> {
        let Active::CreatingChild(creating) = &self.active else {
            return None;
        };
        let negotiation = creating.negotiation();
        let (theirs, _) = negotiation.collision.as_ref()?;
        let live = self.children.get(theirs).is_some_and(ChildSa::is_live);
        (negotiation.rekeys == Some(old) && live).then_some(*theirs)
    }

    /// Whether the peer has deleted what it has agreed to just now.
    pub(super) fn is_doomed(&self, id: ChildSaId, negotiation: &Negotiation) -> bool {
        let spi = self.children.get(&id).map_or(0, |child| child.spi_out);
        spi != 0 && negotiation.doomed.contains(&spi)
    }

    pub(super) fn creation_undone(&mut self, env: &mut Env, now: Now, negotiation: &Negotiation) {
        self.log(
            env,
            LogGroup::Ike,
            1,
            "the peer has deleted the CHILD_SA before this side learned of it",
        );
        let attempt = self.remove_child(env, negotiation.child);
        if self.adopt_collision(env, now, negotiation)
            || self.make_good_if_pointless(env, negotiation.rekeys, attempt.as_ref())
        {
            return;
        }
        let Some(old) = negotiation.rekeys else {
            self.retry_creation(env, now, negotiation);
            return;
        };
        // The peer keeps the old one no longer than until it is deleted.
        if let Some(child) = self.children.get_mut(&old)
            && child.state == ChildState::Rekeying
        {
            child.state = ChildState::Installed;
            child.expired = true;
            self.enqueue(Task::DeleteChild(old));
        }
    }

    /// A child that expired meanwhile does not wait for another attempt to rekey it.
    pub(super) fn delete_expired(&mut self, old: ChildSaId) {
        let expired = |old: &ChildSa| old.expired && old.state == ChildState::Installed;
        if self.children.get(&old).is_some_and(expired) {
            self.enqueue(Task::DeleteChild(old));
        }
    }

    /// A child is gone that nobody wanted gone: it is made anew unless another of its kind is left.
    /// `close` is what `close_action` says, if it was the peer who deleted it.
    pub(super) fn make_good(&self, env: &mut Env, lost: &ChildSa, close: Option<CloseAction>) {
        if lost.taken_down {
            return;
        }
        let left = self.children.values().any(|child| {
            child.conn.name == lost.conn.name
                && child.cfg().name == lost.cfg().name
                && (child.is_lasting()
                    || matches!(child.state, ChildState::Created | ChildState::Installing))
        });
        if left {
            return;
        }
        let (connection, cfg) = (lost.conn.name.clone(), lost.cfg());
        // Whoever brought it up, by hand too, has not taken it down; strongSwan makes a new one
        // after a hard limit whatever the actions are.
        let ours = close.is_none() || lost.redundant || lost.expired;
        let close = close.unwrap_or_default();
        // Where both sides bring it up again, they should not do so at the same moment.
        let after = if ours || self.initiator {
            Duration::ZERO
        } else {
            Duration::from_millis(1_000 + env.rng.below(1_000))
        };
        env.request(Request::Restart {
            connection: connection.clone(),
            child: cfg.name.clone(),
            after,
            cause: match (lost.refused, lost.expired) {
                (true, _) => Cause::Failed,
                (false, true) => Cause::Expired,
                (false, false) => Cause::Lost,
            },
            insist: ours || close.start,
        });
        let actions = [cfg.start_action, cfg.dpd_action, cfg.close_action];
        if close.trap || ours && actions.iter().any(|action| action.trap) {
            env.request(Request::Trap {
                connection,
                child: cfg.name.clone(),
            });
        }
    }
}
