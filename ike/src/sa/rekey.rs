// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CREATE_CHILD_SA for the IKE SA itself, from either side, and both at once (RFC 7296 sections
//! 1.3.2, 2.8, 2.18 and 2.25.1).

use std::time::Duration;

use swanherd_ipsec::Secret;
use swanherd_ipsec::proposal::{IkeSuite, Proposal};
use swanherd_ipsec::registry::KeyExchangeId;

use super::child_offer::{ChildPayloads, notify, usable_ike_proposals};
use super::env::{Env, Request, Slot};
use super::lifecycle::CLEANUP_LIMIT;
use super::proposal;
use super::protect::Protection;
use super::timers::Timer;
use super::{Active, Answer, IkeSa, Passive, Task};
use crate::api::{
    ChildSaId, Counter, Event, FailureReason, IkeSaId, IkeState, LogGroup, Now, Token,
};
use crate::compute::{Computed, Job};
use crate::crypto::{IkeKeys, KeyPair};
use crate::wire::{
    ExchangeType, KePayload, NoncePayload, NotifyPayload, NotifyType, Payload, SaPayload,
    SaProposal,
};

/// How often a request starts over because the peer wants another key exchange.
const MAX_RESTARTS: u32 = 3;

/// What this side is negotiating.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Negotiation {
    id: IkeSaId,
    pub(super) spi: u64,
    pub(super) nonce: Vec<u8>,
    proposals: Vec<Proposal>,
    pub(super) method: KeyExchangeId,
    pub(super) restarts: u32,
}

/// States of an initiator, named for what they await.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Rekeying {
    /// The private value.
    PrivateValue {
        token: Token,
        negotiation: Box<Negotiation>,
    },
    /// The response.
    Response {
        pair: KeyPair,
        negotiation: Box<Negotiation>,
    },
    /// The shared secret.
    SharedSecret {
        token: Token,
        negotiation: Box<Negotiation>,
        suite: IkeSuite,
        spi_r: u64,
        nonce_r: Vec<u8>,
    },
    /// The end of the peer's own rekeying, which is being answered: only then can be said which
    /// of the two IKE SAs is the successor.
    Rival {
        negotiation: Box<Negotiation>,
        new: Box<IkeSa>,
        nonce_r: Vec<u8>,
    },
}

impl Rekeying {
    /// Gives back the SPI of an IKE SA that will not be.
    pub(crate) fn release(&self, env: &mut Env) {
        let (Self::PrivateValue { negotiation, .. }
        | Self::Response { negotiation, .. }
        | Self::SharedSecret { negotiation, .. }
        | Self::Rival { negotiation, .. }) = self;
        env.spis.remove(&negotiation.spi);
    }
}

/// The state of a responder: it awaits the shared secret.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Answering {
    token: Token,
    id: IkeSaId,
    pub(super) spi_i: u64,
    pub(super) spi_r: u64,
    suite: IkeSuite,
    reply: SaProposal,
    pub(super) nonce_i: Vec<u8>,
    pub(super) nonce_r: Vec<u8>,
}

impl Answering {
    /// Gives back the SPI of an IKE SA that will not be.
    pub(crate) fn release(&self, env: &mut Env) {
        env.spis.remove(&self.spi_r);
    }
}

/// The IKE SA that the peer made while this side was making its own.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Twin {
    pub(crate) sa: Box<IkeSa>,
    /// The lower of its two nonces.
    pub(super) nonce: Vec<u8>,
}

// Initiator.
impl IkeSa {
    /// Replaces this IKE SA.
    pub(crate) fn start_rekey(&mut self, env: &mut Env, now: Now) {
        if self.state != IkeState::Established {
            return;
        }
        if self.is_answering() {
            self.delay(now, Duration::from_secs(1), Task::RekeyIke);
            return;
        }
        let Some(conn) = self.conn.clone() else {
            return;
        };
        let proposals = usable_ike_proposals(env, &conn.proposals);
        // What the peer agreed to before it will agree to again.
        let agreed = self.suite.map(|suite| suite.key_exchange);
        let offered = proposal::key_exchanges(&proposals);
        let method = agreed
            .filter(|method| offered.contains(method))
            .or_else(|| offered.first().copied());
        let Some(method) = method else {
            return;
        };
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("rekeying IKE_SA {}[{}]", conn.name, self.id),
        );
        self.state = IkeState::Rekeying;
        let id = env.new_ike_id();
        let negotiation = Box::new(Negotiation {
            id,
            spi: env.new_spi(id),
            nonce: env.nonce(),
            proposals,
            method,
            restarts: 0,
        });
        self.generate_for_rekey(env, now, negotiation);
        self.changed(env);
    }

    fn generate_for_rekey(&mut self, env: &mut Env, now: Now, negotiation: Box<Negotiation>) {
        match self.generate_value(env, Slot::Active, negotiation.method) {
            Some(token) => {
                self.active =
                    Active::Rekeying(Box::new(Rekeying::PrivateValue { token, negotiation }));
            }
            None => {
                let text = format!("{} is not supported", negotiation.method);
                self.rekey_failed(env, now, &negotiation, FailureReason::Unsupported, text);
            }
        }
    }

    fn request_rekey(
        &mut self,
        env: &mut Env,
        now: Now,
        pair: KeyPair,
        negotiation: Box<Negotiation>,
    ) {
        let proposals = proposal::promote_key_exchange(&negotiation.proposals, negotiation.method);
        let mut payloads = vec![Payload::Sa(SaPayload {
            proposals: (1..)
                .zip(proposals)
                .map(|(number, proposal)| SaProposal {
                    number,
                    spi: negotiation.spi.to_be_bytes().to_vec(),
                    proposal,
                })
                .collect(),
        })];
        payloads.extend(NoncePayload::new(negotiation.nonce.clone()).map(Payload::Nonce));
        payloads.push(Payload::Ke(KePayload {
            method: pair.id(),
            data: pair.public().to_vec(),
        }));
        if self.send_request(env, now, ExchangeType::CreateChildSa, &payloads) {
            self.active = Active::Rekeying(Box::new(Rekeying::Response { pair, negotiation }));
        }
    }

    /// The response to CREATE_CHILD_SA for the IKE SA.
    pub(crate) fn handle_rekey_response(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Rekeying,
        payloads: &[Payload],
    ) {
        let Rekeying::Response {
            pair,
            mut negotiation,
        } = state
        else {
            self.active = Active::Rekeying(Box::new(state));
            return;
        };
        let answer = ChildPayloads::of(payloads);
        let misbehaved = FailureReason::PeerMisbehaved;
        let (Some(sa), Some(ke), Some(nonce_r)) = (&answer.sa, answer.ke, answer.nonce) else {
            let Some((kind, data)) = answer.error else {
                let text = "the peer's answer lacks SA, KE or nonce".to_owned();
                self.rekey_failed(env, now, &negotiation, misbehaved, text);
                return;
            };
            if kind == NotifyType::InvalidKePayload && negotiation.restarts < MAX_RESTARTS {
                let wanted = <[u8; 2]>::try_from(data.as_slice())
                    .map(|octets| KeyExchangeId::from(u16::from_be_bytes(octets)));
                let offered = proposal::key_exchanges(&negotiation.proposals);
                if let Ok(method) = wanted
                    && offered.contains(&method)
                    && method != negotiation.method
                {
                    negotiation.restarts += 1;
                    negotiation.method = method;
                    self.generate_for_rekey(env, now, negotiation);
                    return;
                }
            }
            let reason = match kind {
                NotifyType::NoProposalChosen => FailureReason::IkeProposalMismatch,
                _ => FailureReason::PeerError,
            };
            let text = format!("the peer answered {kind}");
            self.rekey_failed(env, now, &negotiation, reason, text);
            return;
        };
        let chosen = match sa.proposals.as_slice() {
            [theirs] => proposal::select_ike(
                &negotiation.proposals,
                std::slice::from_ref(&theirs.proposal),
                true,
            )
            .zip(theirs.ike_spi().filter(|spi| *spi != 0)),
            _ => None,
        };
        let fitting = chosen.filter(|(chosen, _)| {
            chosen.suite.key_exchange == ke.method && ke.method == negotiation.method
        });
        let Some((chosen, spi_r)) = fitting else {
            let text = "the peer chose what was not offered".to_owned();
            self.rekey_failed(env, now, &negotiation, misbehaved, text);
            return;
        };
        let peer = ke.data;
        let token = env.compute(self.id, Slot::Active, Job::Agree { pair, peer });
        self.active = Active::Rekeying(Box::new(Rekeying::SharedSecret {
            token,
            negotiation,
            suite: chosen.suite,
            spi_r,
            nonce_r,
        }));
    }

    /// An answer for the exchange under way.
    pub(crate) fn rekeying_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Rekeying,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match (state, answer) {
            (
                Rekeying::PrivateValue {
                    token: awaited,
                    negotiation,
                },
                Answer::Computed(Computed::Generated(result)),
            ) if awaited == token => match result {
                Ok(pair) => self.request_rekey(env, now, pair, negotiation),
                Err(error) => {
                    let reason = FailureReason::Resources;
                    self.rekey_failed(env, now, &negotiation, reason, error.to_string());
                }
            },
            (
                Rekeying::SharedSecret {
                    token: awaited,
                    negotiation,
                    suite,
                    spi_r,
                    nonce_r,
                },
                Answer::Computed(Computed::Agreed(result)),
            ) if awaited == token => {
                let made = result.and_then(|shared| {
                    let spis = (negotiation.spi, spi_r);
                    let nonces = (negotiation.nonce.as_slice(), nonce_r.as_slice());
                    self.successor_sa(env, now, negotiation.id, true, spis, suite, &shared, nonces)
                });
                match made {
                    Ok(new) if matches!(self.passive, Passive::Rekeying(_)) => {
                        self.active = Active::Rekeying(Box::new(Rekeying::Rival {
                            negotiation,
                            new,
                            nonce_r,
                        }));
                    }
                    Ok(new) => self.rekeyed(env, now, new, &negotiation.nonce, &nonce_r),
                    Err(error) => {
                        let reason = FailureReason::PeerMisbehaved;
                        self.rekey_failed(env, now, &negotiation, reason, error.to_string());
                    }
                }
            }
            (state, answer) => {
                self.active = Active::Rekeying(Box::new(state));
                return Some(answer);
            }
        }
        None
    }

    /// The peer's own rekeying has been answered, in whatever way.
    pub(crate) fn rival_answered(&mut self, env: &mut Env, now: Now) {
        match std::mem::replace(&mut self.active, Active::Idle) {
            Active::Rekeying(state) => match *state {
                Rekeying::Rival {
                    negotiation,
                    new,
                    nonce_r,
                } => self.rekeyed(env, now, new, &negotiation.nonce, &nonce_r),
                other => self.active = Active::Rekeying(Box::new(other)),
            },
            other => self.active = other,
        }
    }

    fn rekey_failed(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: &Negotiation,
        reason: FailureReason,
        text: String,
    ) {
        env.spis.remove(&negotiation.spi);
        if let Some(twin) = self.rekey_twin.take() {
            // Ours failed, the peer's did not: that one is the successor, and the peer deletes
            // this one.
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("own rekeying failed ({text}), the peer's stands"),
            );
            self.hand_over(env, now, twin.sa);
            self.bound_delete(now, CLEANUP_LIMIT);
            return;
        }
        self.state = IkeState::Established;
        let temporary = text.contains("TEMPORARY_FAILURE");
        let wait = if temporary {
            Duration::from_millis(2_000 + env.rng.below(4_000))
        } else {
            Duration::from_millis(30_000 + env.rng.below(30_000))
        };
        self.log(
            env,
            LogGroup::Ike,
            u8::from(temporary),
            format!(
                "rekeying the IKE_SA failed: {text}; next attempt in {} s",
                wait.as_secs()
            ),
        );
        if !temporary {
            env.count(self.connection_name(), Counter::Failure(reason));
            env.event(Event::Failure {
                connection: self.connection_name(),
                child: None,
                reason,
                text: format!("rekeying failed: {text}"),
            });
        }
        self.delay(now, wait, Task::RekeyIke);
        self.changed(env);
    }

    /// This side's successor is ready.
    fn rekeyed(
        &mut self,
        env: &mut Env,
        now: Now,
        mut new: Box<Self>,
        nonce_i: &[u8],
        nonce_r: &[u8],
    ) {
        env.count(self.connection_name(), Counter::IkeRekeyInit);
        let Some(mut twin) = self.rekey_twin.take() else {
            self.hand_over(env, now, new);
            self.enqueue(Task::DeleteIke);
            self.bound_delete(now, CLEANUP_LIMIT);
            return;
        };
        // The SA made by the exchange with the lowest of the four nonces is the redundant one; its
        // initiator deletes it, and the other one deletes the old SA (RFC 7296 section 2.8.2).
        if nonce_i.min(nonce_r) < twin.nonce.as_slice() {
            self.log(
                env,
                LogGroup::Ike,
                1,
                "both sides rekeyed the IKE_SA; the peer's is kept",
            );
            new.redundant = true;
            new.enqueue(Task::DeleteIke);
            new.bound_delete(now, CLEANUP_LIMIT);
            new.state = IkeState::Rekeyed;
            new.proceed(env, now);
            env.request(Request::Adopt(new));
            self.hand_over(env, now, twin.sa);
            self.bound_delete(now, CLEANUP_LIMIT);
        } else {
            self.log(
                env,
                LogGroup::Ike,
                1,
                "both sides rekeyed the IKE_SA; ours is kept",
            );
            twin.sa.redundant = true;
            twin.sa.state = IkeState::Rekeyed;
            twin.sa.bound_delete(now, CLEANUP_LIMIT);
            env.request(Request::Adopt(twin.sa));
            self.hand_over(env, now, new);
            self.enqueue(Task::DeleteIke);
            self.bound_delete(now, CLEANUP_LIMIT);
        }
    }

    /// Makes the IKE SA that replaces this one, without children yet.
    #[expect(
        clippy::too_many_arguments,
        reason = "the inputs of RFC 7296 section 2.18"
    )]
    fn successor_sa(
        &self,
        env: &mut Env,
        now: Now,
        id: IkeSaId,
        initiator: bool,
        (spi_i, spi_r): (u64, u64),
        suite: IkeSuite,
        shared: &Secret,
        (nonce_i, nonce_r): (&[u8], &[u8]),
    ) -> Result<Box<Self>, crate::crypto::CryptoError> {
        let (Some(old_suite), Some(old_keys)) = (self.suite, self.keys.as_ref()) else {
            return Err(crate::crypto::CryptoError::KeyLength);
        };
        let keys = IkeKeys::rekeyed(
            &suite,
            old_suite.prf,
            &old_keys.d,
            shared,
            nonce_i,
            nonce_r,
            spi_i,
            spi_r,
        )?;
        let protection = Protection::new(&suite, &keys, initiator)?;
        let mut new = Box::new(Self::new(id, initiator, self.local, self.remote, now));
        new.conn.clone_from(&self.conn);
        new.local_id = self.local_id.clone();
        new.remote_id = self.remote_id.clone();
        new.spi_i = spi_i;
        new.spi_r = spi_r;
        new.nat = self.nat;
        new.packet = self.packet;
        new.suite = Some(suite);
        new.keys = Some(keys);
        new.protection = Some(protection);
        new.peer = self.peer.clone();
        new.if_id = self.if_id;
        new.announced = true;
        new.set_established(env, now);
        // Rekeying does not make an authentication younger.
        new.timers
            .put(Timer::Reauth, self.timers.get(Timer::Reauth));
        new.authenticate_by = self.authenticate_by;
        let ends = [new.timers.get(Timer::HardLifetime), new.authenticate_by];
        new.timers
            .put(Timer::HardLifetime, ends.into_iter().flatten().min());
        Ok(new)
    }

    /// Gives children and tasks to the successor, tells the world, and keeps only the shell.
    fn hand_over(&mut self, env: &mut Env, now: Now, mut new: Box<Self>) {
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "IKE_SA {}[{}] is replaced by [{}]",
                self.connection_name().unwrap_or_default(),
                self.id,
                new.id
            ),
        );
        // It may have been made before this one moved.
        new.local = self.local;
        new.remote = self.remote;
        new.nat = self.nat;
        new.packet = self.packet;
        new.mobility = self.mobility.inherit();
        if matches!(self.active, Active::Moving(_)) {
            // Whether the peer has heard of the last move is not known.
            new.enqueue_first(Task::Move);
        }
        let old_info = Box::new(self.info_without_children());
        let new_info = Box::new(new.info_without_children());
        env.event(Event::IkeRekey {
            old: old_info,
            new: new_info,
        });
        new.children = std::mem::take(&mut self.children);
        env.hand_over(self.id, new.id);
        let ids: Vec<ChildSaId> = new.children.keys().copied().collect();
        for id in ids {
            let Some(child) = new.children.get(&id) else {
                continue;
            };
            for sa in [child.inbound(), child.outbound()].into_iter().flatten() {
                if let Some(owner) = env.by_sa.get_mut(&sa) {
                    *owner = (new.id, id);
                }
            }
            env.standbys.moved(child.group.set, id, new.id);
        }
        for task in std::mem::take(&mut self.queue) {
            match task {
                Task::RekeyIke | Task::Probe => {}
                Task::Move | Task::Announce | Task::Prove => new.enqueue_first(task),
                task => new.enqueue(task),
            }
        }
        new.delayed = std::mem::take(&mut self.delayed);
        new.delayed
            .retain(|(_, task)| !matches!(task, Task::RekeyIke));
        new.supersedes = self.supersedes.take();
        new.restores = self.restores;
        new.replaced = self.replaced;
        new.vips = std::mem::take(&mut self.vips);
        new.target = self.target;
        new.serve_delayed(now);
        new.arm_children(now);
        self.state = IkeState::Rekeyed;
        self.successor = Some(new.id);
        for timer in [
            Timer::Rekey,
            Timer::Reauth,
            Timer::Dpd,
            Timer::Keepalive,
            Timer::Child,
            Timer::Retry,
            Timer::HardLifetime,
        ] {
            self.timers.stop(timer);
        }
        new.proceed(env, now);
        new.changed(env);
        self.changed(env);
        env.request(Request::Adopt(new));
    }

    /// The peer deletes this IKE SA, which it has replaced while this side was about to. False if
    /// it has not.
    pub(crate) fn adopt_twin(&mut self, env: &mut Env, now: Now) -> bool {
        let Some(twin) = self.rekey_twin.take() else {
            return false;
        };
        self.hand_over(env, now, twin.sa);
        true
    }
}

// Responder.
impl IkeSa {
    /// The peer wants to replace this IKE SA.
    pub(crate) fn handle_rekey_request(&mut self, env: &mut Env, now: Now, offer: &ChildPayloads) {
        let busy = match (&self.active, self.state) {
            (_, IkeState::Rekeyed | IkeState::Deleting) => true,
            (Active::CreatingChild(_) | Active::DeletingChild(_) | Active::DeletingIke, _) => true,
            _ => self.rekey_twin.is_some(),
        };
        if busy {
            self.refuse_rekey(env, now, NotifyType::TemporaryFailure, "this side is busy");
            return;
        }
        let (Some(conn), Some(sa), Some(ke), Some(nonce_i)) = (
            self.conn.clone(),
            &offer.sa,
            offer.ke.clone(),
            offer.nonce.clone(),
        ) else {
            let kind = NotifyType::InvalidSyntax;
            self.refuse_rekey(env, now, kind, "it lacks SA, KE or nonce");
            return;
        };
        let ours = usable_ike_proposals(env, &conn.proposals);
        let theirs: Vec<Proposal> = sa.proposals.iter().map(|p| p.proposal.clone()).collect();
        let prefer = env.settings.prefer_configured_proposals;
        let chosen = proposal::select_ike(&ours, &theirs, prefer);
        let Some((chosen, offered)) =
            chosen.and_then(|c| sa.proposals.get(c.index).map(|p| (c.clone(), p)))
        else {
            let kind = NotifyType::NoProposalChosen;
            self.refuse_rekey(env, now, kind, "none of its proposals is acceptable");
            return;
        };
        let Some(spi_i) = offered.ike_spi().filter(|spi| *spi != 0) else {
            self.refuse_rekey(env, now, NotifyType::InvalidSyntax, "it has no SPI");
            return;
        };
        let suite = chosen.suite;
        let exchange = env.crypto.key_exchange(suite.key_exchange);
        let (true, Ok(method)) = (ke.method == suite.key_exchange, exchange) else {
            let wanted = u16::from(suite.key_exchange).to_be_bytes().to_vec();
            let notify = NotifyPayload::new(NotifyType::InvalidKePayload, wanted);
            self.send_response(env, now, &[Payload::Notify(notify)]);
            return;
        };
        let id = env.new_ike_id();
        let spi_r = env.new_spi(id);
        let seed = env.rng.seed();
        let peer = ke.data;
        let token = env.compute(self.id, Slot::Passive, Job::Respond { method, seed, peer });
        self.passive = Passive::Rekeying(Box::new(Answering {
            token,
            id,
            spi_i,
            spi_r,
            suite,
            reply: SaProposal {
                number: offered.number,
                spi: spi_r.to_be_bytes().to_vec(),
                proposal: chosen.reply,
            },
            nonce_i,
            nonce_r: env.nonce(),
        }));
    }

    fn refuse_rekey(&mut self, env: &mut Env, now: Now, kind: NotifyType, why: &str) {
        self.send_response(env, now, &[notify(kind)]);
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("the peer's request to rekey the IKE_SA is refused with {kind}: {why}"),
        );
    }

    /// The shared secret of the peer's rekeying is there.
    pub(crate) fn rekey_answering_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Answering,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        let Answer::Computed(Computed::Responded(result)) = answer else {
            self.passive = Passive::Rekeying(Box::new(state));
            return Some(answer);
        };
        if state.token != token {
            self.passive = Passive::Rekeying(Box::new(state));
            return Some(Answer::Computed(Computed::Responded(result)));
        }
        let made = result.and_then(|(public, shared)| {
            let spis = (state.spi_i, state.spi_r);
            let nonces = (state.nonce_i.as_slice(), state.nonce_r.as_slice());
            let new = self.successor_sa(
                env,
                now,
                state.id,
                false,
                spis,
                state.suite,
                &shared,
                nonces,
            )?;
            Ok((public, new))
        });
        let (public, new) = match made {
            Ok(made) => made,
            Err(error) => {
                state.release(env);
                self.refuse_rekey(env, now, NotifyType::InvalidSyntax, &error.to_string());
                self.rival_answered(env, now);
                return None;
            }
        };
        let mut payloads = vec![Payload::Sa(SaPayload {
            proposals: vec![state.reply.clone()],
        })];
        payloads.extend(NoncePayload::new(state.nonce_r.clone()).map(Payload::Nonce));
        payloads.push(Payload::Ke(KePayload {
            method: state.suite.key_exchange,
            data: public,
        }));
        self.send_response(env, now, &payloads);
        if self.dead {
            state.release(env);
            return None;
        }
        env.count(self.connection_name(), Counter::IkeRekeyResp);
        let in_flight = matches!(
            &self.active,
            Active::Rekeying(rekeying) if !matches!(**rekeying, Rekeying::PrivateValue { .. })
        );
        if in_flight {
            self.rekey_twin = Some(Box::new(Twin {
                sa: new,
                nonce: state.nonce_i.min(state.nonce_r),
            }));
            self.rival_answered(env, now);
            return None;
        }
        // Our own has not been sent yet; it is not needed any more.
        if matches!(self.active, Active::Rekeying(_)) {
            self.cancel_active(env);
        }
        self.hand_over(env, now, new);
        self.bound_delete(now, CLEANUP_LIMIT);
        None
    }
}
