// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Initiating CREATE_CHILD_SA for children: new ones and rekeys (RFC 7296 sections 1.3.1, 1.3.3,
//! 2.8 and 2.25).

use std::time::Duration;

use swanherd_ipsec::plane::Outcome;
use swanherd_ipsec::proposal::ChildSuite;
use swanherd_ipsec::registry::KeyExchangeId;
use swanherd_ipsec::{Proposal, ProtocolId, Secret, Transform};

use super::child::ChildSa;
use super::child_offer::{ChildFailure, ChildPayloads, usable_child_proposals};
use super::env::{Env, Request, Slot};
use super::initiator::{plane_failure, spi_failure};
use super::install::{Installing, Outbound};
use super::proposal::KeyExchangeRule;
use super::{Active, Answer, IkeSa, Packet, Task, narrow};
use crate::api::{
    ChildSaId, ChildState, ConnectionRef, Event, FailureReason, LogGroup, Now, Token,
};
use crate::compute::{Computed, Job};
use crate::crypto::KeyPair;
use crate::wire::{ExchangeType, KePayload, NoncePayload, NotifyPayload, NotifyType, Payload};

/// How often a request starts over because the peer wants another key exchange.
const MAX_RESTARTS: u32 = 3;

/// What this side is negotiating.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Negotiation {
    pub(super) child: ChildSaId,
    pub(super) rekeys: Option<ChildSaId>,
    proposals: Vec<Proposal>,
    pub(super) method: Option<KeyExchangeId>,
    pub(super) nonce: Vec<u8>,
    pub(super) restarts: u32,
    /// A child that the peer made to replace the same SA, with the lower of its nonces.
    pub(super) collision: Option<(ChildSaId, Vec<u8>)>,
    /// SPIs that the peer has deleted, and that this side has never heard of: one of them may be
    /// in the response, which is late.
    pub(super) doomed: Vec<u32>,
}

/// States of an initiator, named for what they await.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Creating {
    /// The SPI and the private value.
    Preparation {
        negotiation: Box<Negotiation>,
        spi: Option<Token>,
        value: Option<Token>,
        pair: Option<KeyPair>,
    },
    /// The response.
    Response {
        negotiation: Box<Negotiation>,
        pair: Option<KeyPair>,
    },
    /// The shared secret.
    SharedSecret {
        token: Token,
        negotiation: Box<Negotiation>,
        suite: ChildSuite,
        nonce_r: Vec<u8>,
    },
    /// The data plane has it.
    Installation {
        installing: Installing,
        negotiation: Box<Negotiation>,
        nonce_r: Vec<u8>,
    },
    /// The end of the peer's own rekeying of the same child, which is being answered: only then
    /// can be said which of the two children is the successor.
    Rival {
        negotiation: Box<Negotiation>,
        nonce_r: Vec<u8>,
    },
}

impl Creating {
    pub(super) fn negotiation(&self) -> &Negotiation {
        match self {
            Self::Preparation { negotiation, .. }
            | Self::Response { negotiation, .. }
            | Self::SharedSecret { negotiation, .. }
            | Self::Installation { negotiation, .. }
            | Self::Rival { negotiation, .. } => negotiation,
        }
    }

    pub(super) fn negotiation_mut(&mut self) -> &mut Negotiation {
        match self {
            Self::Preparation { negotiation, .. }
            | Self::Response { negotiation, .. }
            | Self::SharedSecret { negotiation, .. }
            | Self::Installation { negotiation, .. }
            | Self::Rival { negotiation, .. } => negotiation,
        }
    }

    /// The peer has replaced `old` by `theirs` while this side is about to, too; `nonce` is the
    /// lower one of the peer's exchange. False if there is no collision.
    pub(crate) fn collide(&mut self, old: ChildSaId, theirs: ChildSaId, nonce: Vec<u8>) -> bool {
        if self.negotiation().rekeys != Some(old) || matches!(self, Self::Preparation { .. }) {
            return false;
        }
        self.negotiation_mut().collision = Some((theirs, nonce));
        true
    }

    /// The peer has deleted an SA that this side does not know, or not yet.
    pub(super) fn doom(&mut self, spi: u32) {
        const MAX_DOOMED: usize = 16;
        if matches!(self, Self::Preparation { .. }) {
            return;
        }
        let doomed = &mut self.negotiation_mut().doomed;
        if doomed.len() < MAX_DOOMED {
            doomed.push(spi);
        }
    }

    /// The child that is being made.
    pub(crate) fn child(&self) -> Option<ChildSaId> {
        Some(self.negotiation().child)
    }

    /// What it is to replace.
    pub(crate) fn rekeys(&self) -> Option<ChildSaId> {
        self.negotiation().rekeys
    }

    /// Whether it replaces another.
    pub(crate) fn is_rekey(&self) -> bool {
        self.rekeys().is_some()
    }
}

impl IkeSa {
    /// Negotiates a new child.
    pub(crate) fn start_child(
        &mut self,
        env: &mut Env,
        now: Now,
        conn: &ConnectionRef,
        index: usize,
        packet: Option<Packet>,
    ) {
        let Some(cfg) = conn.children.get(index) else {
            return;
        };
        let twin = self.children.values().find(|child| {
            child.cfg().name == cfg.name
                && child.is_live()
                && !child.redundant
                && packet.is_none_or(|(local, remote)| {
                    narrow::covers(&child.local_ts, &[local])
                        && narrow::covers(&child.remote_ts, &[remote])
                })
        });
        let twin = twin.map(|twin| (twin.id, twin.expired));
        let expired = twin.filter(|(_, expired)| *expired);
        let again = Task::CreateChild {
            conn: conn.clone(),
            index,
            packet,
        };
        match expired {
            // The peer is about to make it; this side's is needed only if that fails.
            _ if self.answers_new_child(conn, index) => {
                self.delay(now, Duration::from_secs(1), again);
                return;
            }
            Some((twin, _)) if self.answers_rekey_of(Some(twin)) => {
                self.delay(now, Duration::from_secs(1), again);
                return;
            }
            // First that one goes, lest the peer go on with it.
            Some((twin, _)) => {
                self.enqueue(Task::DeleteChild(twin));
                self.enqueue(again);
                return;
            }
            None => {}
        }
        if twin.is_some() {
            let child = cfg.name.clone();
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("not establishing CHILD_SA {child} due to existing duplicate"),
            );
            env.request(Request::ChildUp {
                ike: self.id,
                connection: conn.name.clone(),
                child,
            });
            return;
        }
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("establishing CHILD_SA {}", cfg.name),
        );
        self.negotiate(env, now, conn.clone(), index, None, packet);
    }

    /// Replaces a child.
    pub(crate) fn start_child_rekey(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let awaited = self
            .children
            .get(&id)
            .and_then(|child| child.replaces)
            .and_then(|before| self.children.get(&before))
            .is_some_and(|before| before.check_at.is_some());
        let Some(old) = self.children.get_mut(&id) else {
            return;
        };
        if old.state != ChildState::Installed || old.replaced_by.is_some() || old.redundant {
            return;
        }
        if old.pending_out.is_some() && awaited {
            // The peer has asked for it, but perhaps not seen the response yet.
            self.delay(now, Duration::from_secs(1), Task::RekeyChild(id));
            return;
        }
        old.state = ChildState::Rekeying;
        let (conn, index, name) = (old.conn.clone(), old.index, old.cfg().name.clone());
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("rekeying CHILD_SA {name}{{{id}}}"),
        );
        self.negotiate(env, now, conn, index, Some(id), None);
        self.changed(env);
    }

    fn negotiate(
        &mut self,
        env: &mut Env,
        now: Now,
        conn: ConnectionRef,
        index: usize,
        rekeys: Option<ChildSaId>,
        packet: Option<Packet>,
    ) {
        let Some(cfg) = conn.children.get(index) else {
            return;
        };
        if rekeys.is_none() && self.lacks_addresses(&conn, cfg) {
            let failure = ChildFailure::new(
                FailureReason::PeerError,
                NotifyType::FailedCpRequired,
                "the peer has given no virtual address",
            );
            self.child_refused(env, &conn, index, &failure);
            return;
        }
        let proposals = usable_child_proposals(env, cfg);
        let child = match self.new_child(env, &conn, index, rekeys) {
            Ok(child) => child,
            Err(failure) => {
                self.child_refused(env, &conn, index, &failure);
                return;
            }
        };
        if let Some(child) = self.children.get_mut(&child) {
            child.packet = packet;
        }
        if proposals.is_empty() {
            let failure = ChildFailure::new(
                FailureReason::Unsupported,
                NotifyType::NoProposalChosen,
                "none of the configured ESP proposals is supported",
            );
            self.creation_failed(env, now, child, rekeys, &failure);
            return;
        }
        let method = preferred_method(&proposals);
        let spi = self.alloc_spi(env, child, Slot::Active);
        let negotiation = Box::new(Negotiation {
            child,
            rekeys,
            proposals,
            method,
            nonce: env.nonce(),
            restarts: 0,
            collision: None,
            doomed: Vec::new(),
        });
        let value = method.and_then(|method| self.generate_value(env, Slot::Active, method));
        self.active = Active::CreatingChild(Box::new(Creating::Preparation {
            negotiation,
            spi,
            value,
            pair: None,
        }));
        self.changed(env);
    }

    pub(crate) fn generate_value(
        &self,
        env: &mut Env,
        slot: Slot,
        method: KeyExchangeId,
    ) -> Option<Token> {
        let method = env.crypto.key_exchange(method).ok()?;
        let seed = env.rng.seed();
        Some(env.compute(self.id, slot, Job::Generate { method, seed }))
    }

    fn request_child(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: Box<Negotiation>,
        pair: Option<KeyPair>,
    ) {
        let mut payloads = Vec::new();
        if let Some(old) = negotiation.rekeys {
            match self.children.get(&old) {
                Some(old) if old.state == ChildState::Rekeying => {
                    payloads.push(Payload::Notify(NotifyPayload::for_child(
                        NotifyType::RekeySa,
                        ProtocolId::Esp,
                        old.spi_in,
                    )));
                }
                // The peer deleted or replaced it meanwhile.
                _ => {
                    let attempt = self.remove_child(env, negotiation.child);
                    if !self.adopt_collision(env, now, &negotiation) {
                        let rekeys = negotiation.rekeys;
                        self.make_good_if_pointless(env, rekeys, attempt.as_ref());
                    }
                    return;
                }
            }
        }
        let offer = self.offer_child(env, negotiation.child, &negotiation.proposals);
        for payload in offer {
            let is_sa = matches!(payload, Payload::Sa(_));
            payloads.push(payload);
            if is_sa {
                payloads.extend(NoncePayload::new(negotiation.nonce.clone()).map(Payload::Nonce));
                if let Some(pair) = &pair {
                    payloads.push(Payload::Ke(KePayload {
                        method: pair.id(),
                        data: pair.public().to_vec(),
                    }));
                }
            }
        }
        if self.send_request(env, now, ExchangeType::CreateChildSa, &payloads) {
            self.active = Active::CreatingChild(Box::new(Creating::Response { negotiation, pair }));
        }
    }

    /// The response to CREATE_CHILD_SA for a child.
    pub(crate) fn handle_create_response(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Creating,
        payloads: &[Payload],
    ) {
        let Creating::Response { negotiation, pair } = state else {
            self.active = Active::CreatingChild(Box::new(state));
            return;
        };
        let answer = ChildPayloads::of(payloads);
        if answer.sa.is_none()
            && let Some((kind, data)) = &answer.error
        {
            self.creation_refused(env, now, negotiation, *kind, data);
            return;
        }
        let id = negotiation.child;
        let rule = KeyExchangeRule::Negotiate;
        let suite = match self.accept_child(env, id, &negotiation.proposals, rule, &answer) {
            Ok(suite) => suite,
            Err(failure) => {
                self.discard_agreed(env, now, id);
                self.negotiation_failed(env, now, *negotiation, &failure);
                return;
            }
        };
        let invalid = |text: &str| {
            ChildFailure::new(
                FailureReason::PeerMisbehaved,
                NotifyType::InvalidSyntax,
                text,
            )
        };
        if self.is_doomed(id, &negotiation) {
            self.creation_undone(env, now, &negotiation);
            return;
        }
        let Some(nonce_r) = answer.nonce else {
            self.discard_agreed(env, now, id);
            let failure = invalid("the peer's answer has no nonce");
            self.negotiation_failed(env, now, *negotiation, &failure);
            return;
        };
        let Some(method) = suite.key_exchange else {
            self.install_created(env, now, negotiation, suite, None, nonce_r);
            return;
        };
        match (pair, answer.ke) {
            (Some(pair), Some(ke)) if ke.method == method && pair.id() == method => {
                let peer = ke.data;
                let token = env.compute(self.id, Slot::Active, Job::Agree { pair, peer });
                self.active = Active::CreatingChild(Box::new(Creating::SharedSecret {
                    token,
                    negotiation,
                    suite,
                    nonce_r,
                }));
            }
            _ => {
                self.discard_agreed(env, now, id);
                let failure = invalid("the peer's answer lacks the key exchange that it chose");
                self.negotiation_failed(env, now, *negotiation, &failure);
            }
        }
    }

    /// The peer refused a request for a child.
    fn creation_refused(
        &mut self,
        env: &mut Env,
        now: Now,
        mut negotiation: Box<Negotiation>,
        kind: NotifyType,
        data: &[u8],
    ) {
        let (child, rekeys) = (negotiation.child, negotiation.rekeys);
        match (kind, rekeys) {
            (NotifyType::InvalidKePayload, _) if negotiation.restarts < MAX_RESTARTS => {
                let wanted = <[u8; 2]>::try_from(data)
                    .map(|octets| KeyExchangeId::from(u16::from_be_bytes(octets)))
                    .ok();
                let offered = |method: KeyExchangeId| {
                    negotiation
                        .proposals
                        .iter()
                        .any(|p| p.transforms.contains(&Transform::KeyExchange(method)))
                };
                let acceptable =
                    wanted.filter(|method| offered(*method) && Some(*method) != negotiation.method);
                if let Some(method) = acceptable {
                    self.log(
                        env,
                        LogGroup::Ike,
                        1,
                        format!("the peer prefers {method} for the CHILD_SA"),
                    );
                    negotiation.restarts += 1;
                    negotiation.method = (method != KeyExchangeId::None).then_some(method);
                    let value = negotiation
                        .method
                        .and_then(|method| self.generate_value(env, Slot::Active, method));
                    if value.is_none() {
                        self.request_child(env, now, negotiation, None);
                        return;
                    }
                    self.active = Active::CreatingChild(Box::new(Creating::Preparation {
                        negotiation,
                        spi: None,
                        value,
                        pair: None,
                    }));
                    return;
                }
            }
            (NotifyType::TemporaryFailure, _) => {
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    "the peer is busy (TEMPORARY_FAILURE), the CHILD_SA is tried again later",
                );
                let attempt = self.remove_child(env, child);
                if self.adopt_collision(env, now, &negotiation)
                    || self.make_good_if_pointless(env, rekeys, attempt.as_ref())
                {
                    return;
                }
                self.retry_creation(env, now, &negotiation);
                return;
            }
            (NotifyType::ChildSaNotFound, Some(old)) => {
                let attempt = self.remove_child(env, child);
                if self.adopt_collision(env, now, &negotiation)
                    || self.make_good_if_pointless(env, rekeys, attempt.as_ref())
                {
                    return;
                }
                let Some(old_child) = self.children.get(&old) else {
                    return;
                };
                if old_child.state != ChildState::Rekeying {
                    return;
                }
                let (conn, index) = (old_child.conn.clone(), old_child.index);
                if self.return_to_predecessor(env, now, old) {
                    return;
                }
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    "the peer does not have the CHILD_SA any more, a new one is made",
                );
                self.close_child(env, old);
                self.enqueue(Task::CreateChild {
                    conn,
                    index,
                    packet: None,
                });
                return;
            }
            (NotifyType::TsUnacceptable, Some(old)) => {
                let narrowed = self
                    .children
                    .get_mut(&old)
                    .filter(|old| !old.offer_configured && old.state == ChildState::Rekeying);
                if let Some(old_child) = narrowed {
                    old_child.offer_configured = true;
                    old_child.state = ChildState::Installed;
                    self.remove_child(env, child);
                    if !self.adopt_collision(env, now, &negotiation) {
                        self.enqueue(Task::RekeyChild(old));
                        self.delete_expired(old);
                    }
                    return;
                }
            }
            _ => {}
        }
        let failure = ChildFailure::from_notify(kind);
        self.negotiation_failed(env, now, *negotiation, &failure);
    }

    pub(super) fn retry_creation(&mut self, env: &mut Env, now: Now, negotiation: &Negotiation) {
        let wait = Duration::from_millis(2_000 + env.rng.below(4_000));
        match negotiation.rekeys {
            Some(old) => {
                if let Some(old) = self.children.get_mut(&old)
                    && old.state == ChildState::Rekeying
                {
                    old.state = ChildState::Installed;
                    old.retry_at = Some(now.instant + wait);
                }
                self.delete_expired(old);
                self.arm_children(now);
            }
            None => {
                if let Some((conn, index, packet)) = self.retry_of.take() {
                    let task = Task::CreateChild {
                        conn,
                        index,
                        packet,
                    };
                    self.delay(now, wait, task);
                }
            }
        }
    }

    fn negotiation_failed(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: Negotiation,
        failure: &ChildFailure,
    ) {
        let (child, rekeys) = (negotiation.child, negotiation.rekeys);
        if rekeys.is_some() && negotiation.collision.is_some() {
            // Ours failed, the peer's did not: that one is the successor.
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("own rekeying failed ({}), the peer's stands", failure.text),
            );
            self.remove_child(env, child);
            self.adopt_collision(env, now, &negotiation);
            return;
        }
        self.creation_failed(env, now, child, rekeys, failure);
    }

    /// Whether the peer has deleted meanwhile what a failed rekeying was to replace. Then that is
    /// made good: until now it looked as if there would be a successor.
    pub(super) fn make_good_if_pointless(
        &self,
        env: &mut Env,
        rekeys: Option<ChildSaId>,
        attempt: Option<&ChildSa>,
    ) -> bool {
        let gone = rekeys.is_some_and(|old| !self.children.contains_key(&old));
        if let Some(attempt) = attempt.filter(|_| gone) {
            self.make_good(env, attempt, Some(attempt.cfg().close_action));
        }
        gone
    }

    fn creation_failed(
        &mut self,
        env: &mut Env,
        now: Now,
        child: ChildSaId,
        rekeys: Option<ChildSaId>,
        failure: &ChildFailure,
    ) {
        let Some(old) = rekeys else {
            self.child_failed(env, now, child, failure);
            return;
        };
        let attempt = self.remove_child(env, child);
        if self.make_good_if_pointless(env, rekeys, attempt.as_ref()) {
            return;
        }
        let wait = Duration::from_millis(10_000 + env.rng.below(10_000));
        let Some(old_child) = self.children.get_mut(&old) else {
            return;
        };
        if old_child.state == ChildState::Rekeying {
            old_child.state = ChildState::Installed;
            old_child.retry_at = Some(now.instant + wait);
        }
        let (name, connection) = (old_child.cfg().name.clone(), old_child.conn.name.clone());
        self.delete_expired(old);
        self.arm_children(now);
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "rekeying CHILD_SA {name}{{{old}}} failed: {}; next attempt in {} s",
                failure.text,
                wait.as_secs()
            ),
        );
        env.count(
            Some(connection.clone()),
            crate::api::Counter::Failure(failure.reason),
        );
        env.event(Event::Failure {
            connection: Some(connection),
            child: Some(name),
            reason: failure.reason,
            text: format!("rekeying failed: {}", failure.text),
        });
        self.changed(env);
    }

    fn install_created(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: Box<Negotiation>,
        suite: ChildSuite,
        shared: Option<&Secret>,
        nonce_r: Vec<u8>,
    ) {
        let id = negotiation.child;
        match self.ready_child(env, id, &suite, shared, &negotiation.nonce, &nonce_r) {
            Ok(keys) => {
                let slot = Slot::Active;
                let installing = self.install_child(env, now, id, keys, true, Outbound::Now, slot);
                self.active = Active::CreatingChild(Box::new(Creating::Installation {
                    installing,
                    negotiation,
                    nonce_r,
                }));
            }
            Err(failure) => {
                self.discard_agreed(env, now, id);
                self.negotiation_failed(env, now, *negotiation, &failure);
            }
        }
    }

    /// An answer for the exchange under way.
    pub(crate) fn creating_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Creating,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match (state, answer) {
            (
                Creating::Preparation {
                    negotiation,
                    spi: Some(awaited),
                    value,
                    pair,
                },
                Answer::Plane(result),
            ) if awaited == token => match result {
                Ok(Outcome::Spi(spi)) => {
                    if let Some(child) = self.children.get_mut(&negotiation.child) {
                        child.spi_in = spi;
                    }
                    self.prepared(env, now, negotiation, None, value, pair);
                }
                Ok(Outcome::Done) | Err(_) => {
                    let failure = spi_failure(result.err());
                    self.negotiation_failed(env, now, *negotiation, &failure);
                }
            },
            (
                Creating::Preparation {
                    negotiation,
                    spi,
                    value: Some(awaited),
                    ..
                },
                Answer::Computed(Computed::Generated(result)),
            ) if awaited == token => match result {
                Ok(pair) => self.prepared(env, now, negotiation, spi, None, Some(pair)),
                Err(error) => {
                    let failure = ChildFailure::new(
                        FailureReason::Resources,
                        NotifyType::NoProposalChosen,
                        error.to_string(),
                    );
                    self.negotiation_failed(env, now, *negotiation, &failure);
                }
            },
            (
                Creating::SharedSecret {
                    token: awaited,
                    negotiation,
                    suite,
                    nonce_r,
                },
                Answer::Computed(Computed::Agreed(result)),
            ) if awaited == token => match result {
                Ok(shared) => {
                    self.install_created(env, now, negotiation, suite, Some(&shared), nonce_r);
                }
                Err(error) => {
                    self.discard_agreed(env, now, negotiation.child);
                    let failure = ChildFailure::new(
                        FailureReason::PeerMisbehaved,
                        NotifyType::InvalidSyntax,
                        error.to_string(),
                    );
                    self.negotiation_failed(env, now, *negotiation, &failure);
                }
            },
            (
                Creating::Installation {
                    mut installing,
                    negotiation,
                    nonce_r,
                },
                Answer::Plane(result),
            ) => match self.install_progress(env, &mut installing, token, result) {
                None => {
                    self.active = Active::CreatingChild(Box::new(Creating::Installation {
                        installing,
                        negotiation,
                        nonce_r,
                    }));
                }
                Some(Ok(())) if self.answers_rekey_of(negotiation.rekeys) => {
                    self.active = Active::CreatingChild(Box::new(Creating::Rival {
                        negotiation,
                        nonce_r,
                    }));
                }
                Some(Ok(())) => self.created(env, now, *negotiation, &nonce_r),
                Some(Err(error)) => {
                    self.discard_agreed(env, now, negotiation.child);
                    let failure = plane_failure(&error);
                    self.negotiation_failed(env, now, *negotiation, &failure);
                }
            },
            (state, answer) => {
                self.active = Active::CreatingChild(Box::new(state));
                return Some(answer);
            }
        }
        None
    }

    fn prepared(
        &mut self,
        env: &mut Env,
        now: Now,
        negotiation: Box<Negotiation>,
        spi: Option<Token>,
        value: Option<Token>,
        pair: Option<KeyPair>,
    ) {
        if spi.is_some() || value.is_some() {
            self.active = Active::CreatingChild(Box::new(Creating::Preparation {
                negotiation,
                spi,
                value,
                pair,
            }));
        } else {
            if negotiation.rekeys.is_none()
                && let Some(child) = self.children.get(&negotiation.child)
            {
                self.retry_of = Some((child.conn.clone(), child.index, child.packet));
            }
            self.request_child(env, now, negotiation, pair);
        }
    }
}

/// The key exchange method to begin with: the first that is configured, if that is not `none`.
fn preferred_method(proposals: &[Proposal]) -> Option<KeyExchangeId> {
    let first = proposals
        .iter()
        .flat_map(|p| &p.transforms)
        .find_map(|t| match t {
            Transform::KeyExchange(id) => Some(*id),
            _ => None,
        })?;
    (first != KeyExchangeId::None).then_some(first)
}
