// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Answering CREATE_CHILD_SA for children: new ones and rekeys (RFC 7296 sections 1.3.1, 1.3.3,
//! 2.8 and 2.25).

use swanherd_ipsec::plane::Outcome;
use swanherd_ipsec::{ProtocolId, Secret};

use super::child_offer::{ChildFailure, ChildPayloads, Selected, notify};
#[cfg(test)]
use super::env::Mutant;
use super::env::{Env, Slot};
use super::initiator::{plane_failure, spi_failure};
use super::install::{Installing, Outbound};
use super::proposal::KeyExchangeRule;
use super::standby::Sign;
use super::{Active, Answer, IkeSa, Passive};
use crate::api::{ChildSaId, ChildState, FailureReason, IkeState, LogGroup, Now, Token};
use crate::compute::{Computed, Job};
use crate::wire::{KePayload, NoncePayload, NotifyPayload, NotifyType, Payload};

/// The most children of one IKE SA that a peer may ask for, counting those that are on their way
/// out. It bounds an authenticated peer to a few megabytes, and leaves room for a thousand that are
/// all being replaced at once.
pub(super) const MAX_CHILDREN: usize = 4096;

/// States of a responder, named for what they await.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Answering {
    /// The SPI, and the shared secret if there is a key exchange.
    Preparation(Box<AnswerDraft>),
    /// The data plane has it.
    Installation {
        installing: Installing,
        draft: Box<AnswerDraft>,
    },
}

/// An answer in the making.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct AnswerDraft {
    pub(super) child: ChildSaId,
    pub(super) rekeys: Option<ChildSaId>,
    pub(super) selected: Selected,
    pub(super) spi: Option<Token>,
    pub(super) secret: Option<Token>,
    pub(super) exchanged: Option<(Vec<u8>, Secret)>,
    pub(super) nonce_i: Vec<u8>,
    pub(super) nonce_r: Vec<u8>,
}

impl Answering {
    /// The answer in the making.
    pub(super) fn draft(&self) -> &AnswerDraft {
        match self {
            Self::Preparation(draft) | Self::Installation { draft, .. } => draft,
        }
    }

    /// The child that is being made.
    pub(crate) fn child(&self) -> Option<ChildSaId> {
        Some(self.draft().child)
    }

    /// Whether it replaces another.
    pub(crate) fn is_rekey(&self) -> bool {
        self.draft().rekeys.is_some()
    }
}

impl IkeSa {
    /// A CREATE_CHILD_SA request.
    pub(crate) fn handle_create_child(&mut self, env: &mut Env, now: Now, payloads: &[Payload]) {
        let offer = ChildPayloads::of(payloads);
        if self.rekeys_what_is_replaced(&offer) {
            self.passive = Passive::Postponed(payloads.to_vec());
            return;
        }
        let for_ike = offer
            .sa
            .as_ref()
            .and_then(|sa| sa.proposals.first())
            .is_some_and(|p| p.proposal.protocol == ProtocolId::Ike);
        if for_ike {
            self.handle_rekey_request(env, now, &offer);
            return;
        }
        let busy = self.state != IkeState::Established
            || matches!(self.active, Active::Rekeying(_) | Active::DeletingIke);
        if busy {
            self.refuse_child(
                env,
                now,
                NotifyType::TemporaryFailure,
                "the IKE_SA is being replaced",
            );
            return;
        }
        if self.children.len() >= MAX_CHILDREN {
            self.refuse_child(env, now, NotifyType::NoAdditionalSas, "there are too many");
            return;
        }
        let (conn, only, rekeys) = match offer.rekeys {
            None => (self.conn.clone(), None, None),
            Some(spi) => match self.rekey_target(spi) {
                Ok(old) => {
                    let found = self.children.get(&old);
                    (
                        found.map(|old| old.conn.clone()),
                        found.map(|old| old.index),
                        Some(old),
                    )
                }
                Err(NotifyType::ChildSaNotFound) => {
                    let kind = NotifyType::ChildSaNotFound;
                    let missing = NotifyPayload::for_child(kind, ProtocolId::Esp, spi);
                    self.send_response(env, now, &[Payload::Notify(missing)]);
                    self.log(
                        env,
                        LogGroup::Ike,
                        1,
                        format!("the peer rekeys CHILD_SA {spi:08x}, which does not exist"),
                    );
                    return;
                }
                Err(kind) => {
                    self.refuse_child(env, now, kind, "it is being deleted or replaced");
                    return;
                }
            },
        };
        let (Some(conn), Some(nonce_i)) = (conn, offer.nonce.clone()) else {
            self.refuse_child(env, now, NotifyType::InvalidSyntax, "it has no nonce");
            return;
        };
        let rule = KeyExchangeRule::Negotiate;
        let selected = match self.select_child(env, &conn, only, rule, &offer) {
            Ok(selected) => selected,
            Err(failure) => {
                self.refuse_child(env, now, failure.notify, &failure.text);
                return;
            }
        };
        if rekeys.is_none() && self.initiator && self.makes_new_child(&conn, selected.index) {
            let kind = NotifyType::TemporaryFailure;
            self.refuse_child(env, now, kind, "this side is making the same");
            return;
        }
        let method = selected.chosen.suite.key_exchange;
        let mut job = None;
        if let Some(method) = method {
            let fitting = offer.ke.filter(|ke| ke.method == method);
            let (Some(ke), Ok(exchange)) = (fitting, env.crypto.key_exchange(method)) else {
                let wanted = u16::from(method).to_be_bytes().to_vec();
                let notify = NotifyPayload::new(NotifyType::InvalidKePayload, wanted);
                self.send_response(env, now, &[Payload::Notify(notify)]);
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    format!("the peer is asked to use {method} for the CHILD_SA"),
                );
                return;
            };
            job = Some(Job::Respond {
                method: exchange,
                seed: env.rng.seed(),
                peer: ke.data,
            });
        }
        let child = match self.new_child(env, &conn, selected.index, rekeys) {
            Ok(child) => child,
            Err(failure) => {
                self.refuse_child(env, now, failure.notify, &failure.text);
                return;
            }
        };
        self.apply_selected(child, &selected);
        let spi = self.alloc_spi(env, child, Slot::Passive);
        let secret = job.map(|job| env.compute(self.id, Slot::Passive, job));
        self.passive =
            Passive::CreatingChild(Box::new(Answering::Preparation(Box::new(AnswerDraft {
                child,
                rekeys,
                selected,
                spi,
                secret,
                exchanged: None,
                nonce_i,
                nonce_r: env.nonce(),
            }))));
        self.changed(env);
    }

    /// The child that the peer may rekey by this SPI of its.
    fn rekey_target(&self, spi: u32) -> Result<ChildSaId, NotifyType> {
        let found = self
            .children
            .values()
            .find(|child| child.spi_out == spi && child.state != ChildState::Deleted);
        let Some(child) = found else {
            // It may be the one that this side is making: the peer has it already, but its
            // response is still on its way or being worked on.
            return Err(if matches!(self.active, Active::CreatingChild(_)) {
                NotifyType::TemporaryFailure
            } else {
                NotifyType::ChildSaNotFound
            });
        };
        match child.state {
            ChildState::Installed | ChildState::Rekeying if child.replaced_by.is_none() => {
                Ok(child.id)
            }
            _ => Err(NotifyType::TemporaryFailure),
        }
    }

    fn refuse_child(&mut self, env: &mut Env, now: Now, kind: NotifyType, why: &str) {
        self.send_response(env, now, &[notify(kind)]);
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("the peer's request for a CHILD_SA is refused with {kind}: {why}"),
        );
    }

    /// An answer for the request that is being worked on.
    pub(crate) fn answering_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Answering,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match (state, answer) {
            (Answering::Preparation(mut draft), Answer::Plane(result))
                if draft.spi == Some(token) =>
            {
                draft.spi = None;
                match result {
                    Ok(Outcome::Spi(spi)) => {
                        if let Some(child) = self.children.get_mut(&draft.child) {
                            child.spi_in = spi;
                        }
                        self.continue_answer(env, now, draft);
                    }
                    Ok(Outcome::Done) | Err(_) => {
                        let failure = spi_failure(result.err());
                        self.answer_failed(env, now, &draft, &failure);
                    }
                }
            }
            (Answering::Preparation(mut draft), Answer::Computed(Computed::Responded(result)))
                if draft.secret == Some(token) =>
            {
                draft.secret = None;
                match result {
                    Ok(exchanged) => {
                        draft.exchanged = Some(exchanged);
                        self.continue_answer(env, now, draft);
                    }
                    Err(error) => {
                        let failure = ChildFailure::new(
                            FailureReason::PeerMisbehaved,
                            NotifyType::InvalidSyntax,
                            error.to_string(),
                        );
                        self.answer_failed(env, now, &draft, &failure);
                    }
                }
            }
            (
                Answering::Installation {
                    mut installing,
                    draft,
                },
                Answer::Plane(result),
            ) => match self.install_progress(env, &mut installing, token, result) {
                None => {
                    self.passive = Passive::CreatingChild(Box::new(Answering::Installation {
                        installing,
                        draft,
                    }));
                }
                Some(Ok(())) => self.answer_created(env, now, *draft),
                Some(Err(error)) => {
                    let failure = plane_failure(&error);
                    self.answer_failed(env, now, &draft, &failure);
                }
            },
            (state, answer) => {
                self.passive = Passive::CreatingChild(Box::new(state));
                return Some(answer);
            }
        }
        None
    }

    fn answer_failed(
        &mut self,
        env: &mut Env,
        now: Now,
        draft: &AnswerDraft,
        failure: &ChildFailure,
    ) {
        self.remove_child(env, draft.child);
        self.refuse_child(env, now, failure.notify, &failure.text);
        self.rival_child_answered(env, now);
    }

    fn continue_answer(&mut self, env: &mut Env, now: Now, draft: Box<AnswerDraft>) {
        if draft.spi.is_some() || draft.secret.is_some() {
            self.passive = Passive::CreatingChild(Box::new(Answering::Preparation(draft)));
            return;
        }
        if let Some(old) = draft.rekeys
            && !self.children.get(&old).is_some_and(|old| old.is_live())
        {
            let failure = ChildFailure::new(
                FailureReason::PeerError,
                NotifyType::TemporaryFailure,
                "the CHILD_SA went away while it was being rekeyed",
            );
            self.answer_failed(env, now, &draft, &failure);
            return;
        }
        let shared = draft.exchanged.as_ref().map(|(_, secret)| secret);
        let suite = draft.selected.chosen.suite;
        let (id, nonce_i, nonce_r) = (draft.child, &draft.nonce_i, &draft.nonce_r);
        match self.ready_child(env, id, &suite, shared, nonce_i, nonce_r) {
            Ok(keys) => {
                // A new one is used at once, unless there is another that the peer has already.
                let set = self.children.get(&id).map(|child| child.group.set);
                let early = draft.rekeys.is_none()
                    && !set.is_some_and(|set| env.policies.has_others(set, id));
                #[cfg(test)]
                let early = early || env.is(Mutant::Hasty);
                let outbound = if early {
                    Outbound::Now
                } else {
                    Outbound::Later
                };
                let slot = Slot::Passive;
                let installing =
                    self.install_child(env, now, draft.child, keys, false, outbound, slot);
                self.passive =
                    Passive::CreatingChild(Box::new(Answering::Installation { installing, draft }));
            }
            Err(failure) => self.answer_failed(env, now, &draft, &failure),
        }
    }

    fn answer_created(&mut self, env: &mut Env, now: Now, draft: AnswerDraft) {
        let mut payloads = Vec::new();
        for payload in self.answer_child(draft.child, &draft.selected) {
            let is_sa = matches!(payload, Payload::Sa(_));
            payloads.push(payload);
            if is_sa {
                payloads.extend(NoncePayload::new(draft.nonce_r.clone()).map(Payload::Nonce));
                if let (Some((public, _)), Some(method)) =
                    (&draft.exchanged, draft.selected.chosen.suite.key_exchange)
                {
                    payloads.push(Payload::Ke(KePayload {
                        method,
                        data: public.clone(),
                    }));
                }
            }
        }
        self.send_response(env, now, &payloads);
        if self.dead {
            return;
        }
        let Some(old) = draft.rekeys else {
            self.child_installed(env, now, draft.child, true);
            self.stand_by(env, now, draft.child, Sign::Request);
            return;
        };
        if self.is_gone(old) {
            // It went while its successor was being installed, which stands for itself now.
            self.child_installed(env, now, draft.child, true);
            self.install_outbound(env, draft.child);
            return;
        }
        self.child_installed(env, now, draft.child, false);
        // Our own rekeying of the same SA may be under way; its outcome decides between the two.
        if let Active::CreatingChild(creating) = &mut self.active
            && creating.collide(old, draft.child, draft.nonce_i.min(draft.nonce_r))
        {
            self.rival_child_answered(env, now);
            return;
        }
        self.announce_rekey(env, old, draft.child);
        self.rekeyed_by_peer(now, old);
    }
}
