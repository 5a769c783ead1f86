// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which child replaces which: the end of a rekey, collisions, and peers that forget (RFC 7296
//! sections 2.8.1 and 2.25).

use std::time::Duration;

use super::child::PEER_DELETE_LIMIT;
use super::create_child::{Creating, Negotiation};
use super::env::Env;
use super::{Active, IkeSa, Passive, Task};
use crate::api::{ChildSaId, ChildState, LogGroup, Now};

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
        let Some(old) = negotiation.rekeys else {
            self.child_installed(env, now, id, true);
            return;
        };
        let gone = !self.children.contains_key(&old);
        self.child_installed(env, now, id, gone && !negotiation.superseded);
        if negotiation.superseded {
            self.enqueue(Task::DeleteChild(id));
            return;
        }
        if gone {
            return;
        }
        let collision = negotiation
            .collision
            .filter(|(theirs, _)| self.children.contains_key(theirs));
        let Some((theirs, their_nonce)) = collision else {
            self.announce_rekey(env, old, id);
            self.delete_replaced(old);
            return;
        };
        // The SA made by the exchange with the lowest of the four nonces is the redundant one; its
        // initiator deletes it, and the other one deletes the old SA (RFC 7296 section 2.8.1).
        let our_nonce = negotiation.nonce.as_slice().min(nonce_r);
        if our_nonce < their_nonce.as_slice() {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("both sides rekeyed CHILD_SA {{{old}}}; the peer's {{{theirs}}} is kept"),
            );
            self.announce_rekey(env, old, theirs);
            self.rekeyed_by_peer(now, old);
            self.enqueue(Task::DeleteChild(id));
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
            self.announce_rekey(env, old, id);
            self.delete_replaced(old);
        }
    }

    /// Whether the peer's request to rekey this child is being answered.
    pub(super) fn answers_rekey_of(&self, old: Option<ChildSaId>) -> bool {
        matches!(&self.passive, Passive::CreatingChild(answering)
            if old.is_some() && answering.draft().rekeys == old)
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
        if let Some(old) = self.children.get_mut(&old) {
            old.check_at = Some(now.instant + PEER_DELETE_LIMIT);
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
        if !self.children.contains_key(theirs) {
            return false;
        }
        self.announce_rekey(env, old, *theirs);
        self.rekeyed_by_peer(now, old);
        true
    }

    /// The child with which the peer replaces `old` while this side's rekeying of it is under way.
    pub(crate) fn collision_successor(
        &mut self,
        env: &mut Env,
        old: ChildSaId,
    ) -> Option<ChildSaId> {
        let Active::CreatingChild(creating) = &mut self.active else {
            return None;
        };
        let negotiation = creating.negotiation_mut();
        if negotiation.rekeys != Some(old) {
            return None;
        }
        let (theirs, _) = negotiation.collision.take()?;
        negotiation.superseded = true;
        self.announce_rekey(env, old, theirs);
        Some(theirs)
    }
}
