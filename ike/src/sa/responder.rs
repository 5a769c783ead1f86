// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Setting up an IKE SA that the peer wants: IKE_SA_INIT and IKE_AUTH (RFC 7296 sections 1.2,
//! 2.6, 2.7, 2.15 and 2.23).

use std::collections::VecDeque;

use swanherd_config::identity::display_identity;
use swanherd_config::model::{Childless, Connection, Fragmentation, Unique};
use swanherd_ipsec::Identity;
use swanherd_ipsec::plane::Outcome;
use swanherd_ipsec::proposal::IkeSuite;

use super::auth::{self, AuthFailure, LocalAuth, PeerCheck, Transcript};
use super::child_offer::{ChildFailure, ChildPayloads, Selected, notify};
use super::env::{Env, Request, Slot};
use super::exchange::Sealed;
use super::initiator::{hash_notify, plane_failure, spi_failure};
use super::install::{Installing, Outbound};
use super::judge::{Accepted, allows};
use super::proposal::KeyExchangeRule;
use super::standby::Sign;
use super::timers::Timer;
use super::{Answer, IkeSa, Passive, mode, nat, virtual_ip};
use crate::api::{
    ChildSaId, ConnectionRef, Datagram, Event, FailureReason, IkeState, LogGroup, Now, Token,
};
use crate::compute::{Computed, Job};
use crate::crypto::hash::sha1;
use crate::wire::{
    AuthPayload, ExchangeType, KePayload, Message, NoncePayload, NotifyPayload, NotifyType,
    Payload, SaPayload, SaProposal,
};

/// The most connections whose peer authentication is tried one after the other.
const MAX_CANDIDATES: usize = 8;

/// States of a responder, named for what they await.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Responding {
    /// The shared secret.
    SharedSecret {
        /// Of the computation.
        token: Token,
        /// What was agreed.
        init: Box<Init>,
    },
    /// The IKE_AUTH request.
    AuthRequest(Box<Transcript>),
    /// Whether the peer's signature is right.
    Verification {
        /// Of the computation.
        token: Token,
        /// The request.
        context: Box<Context>,
    },
    /// The own signature.
    Signature {
        /// Of the computation.
        token: Token,
        /// The request.
        context: Box<Context>,
        /// CERT payloads to go with it.
        certs: Vec<Payload>,
    },
    /// The SPI of the child.
    Spi {
        /// Of the operation.
        token: Token,
        /// The request.
        context: Box<Context>,
        /// The response so far.
        response: Vec<Payload>,
        /// The child.
        child: ChildSaId,
        /// What it will be like.
        selected: Box<Selected>,
    },
    /// The data plane has the child.
    Installation {
        /// What it does.
        installing: Installing,
        /// The response so far.
        response: Vec<Payload>,
        /// What goes into it once the child is installed.
        child_payloads: Vec<Payload>,
        /// The request.
        context: Box<Context>,
    },
}

impl Responding {
    /// The child that is being made.
    pub(crate) fn child(&self) -> Option<ChildSaId> {
        match self {
            Self::Spi { child, .. } => Some(*child),
            Self::Installation { installing, .. } => Some(installing.child),
            _ => None,
        }
    }
}

/// What IKE_SA_INIT agreed on.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Init {
    suite: IkeSuite,
    reply: SaProposal,
    request: Vec<u8>,
    nonce_i: Vec<u8>,
    fragmentation: bool,
    hashes: bool,
    method: swanherd_ipsec::registry::KeyExchangeId,
    childless: bool,
    fake: bool,
    /// The connection that IKE_SA_INIT was judged by; IKE_AUTH may find a better one.
    first: ConnectionRef,
}

/// An IKE_AUTH request that is being judged.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Context {
    transcript: Transcript,
    payloads: Vec<Payload>,
    auth: AuthPayload,
    candidates: VecDeque<ConnectionRef>,
    id_r: Option<Identity>,
    initial_contact: bool,
    last: Option<AuthFailure>,
}

impl IkeSa {
    /// Starts to answer an IKE_SA_INIT request.
    pub(crate) fn respond_init(
        &mut self,
        env: &mut Env,
        now: Now,
        datagram: &Datagram,
        message: &Message,
        accepted: Accepted,
    ) {
        self.state = IkeState::Connecting;
        self.spi_i = message.header.spi_i;
        self.spi_r = env.new_spi(self.id);
        self.suite = Some(accepted.chosen.suite);
        self.read_features(message);
        self.count_message(env, ExchangeType::IkeSaInit, true, false);
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("{} is initiating an IKE_SA", self.remote.ip()),
        );
        self.log(env, LogGroup::Enc, 1, format!("received {message}"));
        self.nat = nat::detect(&message.payloads, self.spi_i, 0, self.local, self.remote);
        if self.nat.local || self.nat.remote {
            let who = if self.nat.remote {
                "the peer"
            } else {
                "this side"
            };
            self.log(env, LogGroup::Ike, 1, format!("{who} is behind a NAT"));
        }
        self.half_open = true;
        env.half_open.add(self.remote.ip());
        self.timers.set(
            Timer::HalfOpen,
            now.instant + env.settings.half_open_timeout,
        );
        self.inbound.processing = Some((0, ExchangeType::IkeSaInit));
        self.inbound.current = sha1(&datagram.payload);

        self.dscp = accepted.conn.dscp;
        let rule = accepted.conn.fragmentation;
        let fake = self.nat.supported && (env.settings.force_encap || accepted.conn.encap);
        self.nat.fake = fake;
        let init = Box::new(Init {
            suite: accepted.chosen.suite,
            reply: SaProposal {
                number: accepted.number,
                spi: Vec::new(),
                proposal: accepted.chosen.reply,
            },
            request: datagram.payload.clone(),
            nonce_i: accepted.nonce,
            fragmentation: self.peer.fragmentation && rule != Fragmentation::No,
            hashes: !self.peer.hashes.is_empty() && env.settings.signature_authentication,
            method: accepted.ke.method,
            childless: accepted.conn.childless != Childless::Never,
            fake,
            first: accepted.conn,
        });
        match env.crypto.key_exchange(accepted.ke.method) {
            Ok(method) => {
                let seed = env.rng.seed();
                let peer = accepted.ke.data;
                let job = Job::Respond { method, seed, peer };
                let token = env.compute(self.id, Slot::Passive, job);
                self.passive =
                    Passive::Responding(Box::new(Responding::SharedSecret { token, init }));
            }
            Err(error) => self.fail(env, now, FailureReason::Unsupported, error.to_string()),
        }
        self.changed(env);
    }

    fn send_init_response(
        &mut self,
        env: &mut Env,
        now: Now,
        init: Init,
        public: Vec<u8>,
    ) -> Option<Transcript> {
        let nonce_r = env.nonce();
        let mut payloads = vec![
            Payload::Sa(SaPayload {
                proposals: vec![init.reply],
            }),
            Payload::Ke(KePayload {
                method: init.method,
                data: public,
            }),
        ];
        payloads.extend(NoncePayload::new(nonce_r.clone()).map(Payload::Nonce));
        if self.nat.supported {
            payloads.extend(nat::notifies(
                self.spi_i,
                self.spi_r,
                self.local,
                self.remote,
                init.fake,
            ));
        }
        payloads.extend(auth::certificate_request(env, Some(&init.first)));
        if init.fragmentation {
            payloads.push(notify(NotifyType::FragmentationSupported));
        }
        if init.hashes {
            payloads.push(hash_notify());
        }
        if self.peer.private_notifies {
            payloads.extend(mode::vendor_id(&init.first));
        }
        if init.childless {
            payloads.push(notify(NotifyType::ChildlessSupported));
        }
        let message = Message {
            header: self.header(ExchangeType::IkeSaInit, 0, true),
            payloads,
        };
        self.log(env, LogGroup::Enc, 1, format!("sending {message}"));
        match message.emit() {
            Ok(raw) => {
                self.respond(env, now, Sealed::fixed(vec![raw.clone()]));
                Some(Transcript {
                    request: init.request,
                    response: raw,
                    nonce_i: init.nonce_i,
                    nonce_r,
                })
            }
            Err(error) => {
                self.fail(env, now, FailureReason::Unsupported, error.to_string());
                None
            }
        }
    }

    /// The IKE_AUTH request.
    pub(crate) fn handle_auth_request(&mut self, env: &mut Env, now: Now, payloads: &[Payload]) {
        let transcript = match std::mem::replace(&mut self.passive, Passive::Idle) {
            Passive::Responding(state) => match *state {
                Responding::AuthRequest(transcript) => transcript,
                other => {
                    self.passive = Passive::Responding(Box::new(other));
                    return;
                }
            },
            other => {
                self.passive = other;
                self.refuse(
                    env,
                    now,
                    NotifyPayload::new(NotifyType::InvalidSyntax, Vec::new()),
                );
                return;
            }
        };
        let mut id_i = None;
        let mut id_r = None;
        let mut auth = None;
        for payload in payloads {
            match payload {
                Payload::IdI(id) => id_i = Some(id.clone()),
                Payload::IdR(id) => id_r = Some(id.clone()),
                Payload::Auth(found) => auth = Some(found.clone()),
                _ => {}
            }
        }
        let Some(id_i) = id_i else {
            let text = "the peer's IKE_AUTH request has no IDi".to_owned();
            self.refuse_auth(env, now, FailureReason::PeerMisbehaved, text);
            return;
        };
        self.remote_id = id_i;
        let Some(auth) = auth else {
            let text = "the peer wants to authenticate by EAP, which is not supported".to_owned();
            self.refuse_auth(env, now, FailureReason::Unsupported, text);
            return;
        };
        let candidates = self.candidates(env, id_r.as_ref());
        if candidates.is_empty() {
            let text = format!(
                "no connection matches {}[{}] and {}",
                self.local.ip(),
                id_r.as_ref()
                    .map_or_else(|| "%any".to_owned(), display_identity),
                self.peer_text()
            );
            self.refuse_auth(env, now, FailureReason::NoConfig, text);
            return;
        }
        let has = |kind| {
            payloads
                .iter()
                .any(|p| matches!(p, Payload::Notify(n) if n.notify_type == kind))
        };
        let context = Context {
            transcript: *transcript,
            initial_contact: has(NotifyType::InitialContact),
            payloads: payloads.to_vec(),
            auth,
            candidates,
            id_r,
            last: None,
        };
        self.try_candidate(env, now, Box::new(context));
    }

    fn candidates(&self, env: &Env, id_r: Option<&Identity>) -> VecDeque<ConnectionRef> {
        let Some(suite) = self.suite else {
            return VecDeque::new();
        };
        env.connections
            .for_identities(self.local.ip(), self.remote.ip(), id_r, &self.remote_id)
            .into_iter()
            .filter(|conn| allows(conn, &suite) && auth::unsupported(conn).is_none())
            .take(MAX_CANDIDATES)
            .collect()
    }

    /// Judges the peer's proof by the next connection that may be meant.
    fn try_candidate(&mut self, env: &mut Env, now: Now, mut context: Box<Context>) {
        while let Some(conn) = context.candidates.pop_front() {
            self.local_id = match &context.id_r {
                Some(asked) if !asked.is_any() => asked.clone(),
                _ => self.default_local_id(env, &conn),
            };
            let checked = self.peer_auth(
                env,
                now,
                &conn,
                &context.transcript,
                &context.auth,
                &context.payloads,
            );
            match checked {
                Ok(PeerCheck::Accepted) => {
                    self.conn = Some(conn);
                    self.peer_is_authentic(env, now, context);
                    return;
                }
                Ok(PeerCheck::Verify(job)) => {
                    self.conn = Some(conn);
                    let token = env.compute(self.id, Slot::Passive, job);
                    self.passive =
                        Passive::Responding(Box::new(Responding::Verification { token, context }));
                    return;
                }
                Err(failure) => {
                    self.log(
                        env,
                        LogGroup::Cfg,
                        1,
                        format!("connection {} does not fit: {}", conn.name, failure.1),
                    );
                    // The best match explains the failure best.
                    context.last.get_or_insert(failure);
                    self.conn.get_or_insert(conn);
                }
            }
        }
        let (reason, text) = context.last.unwrap_or_else(|| {
            (
                FailureReason::PeerAuthFailed,
                "no connection accepts the peer".to_owned(),
            )
        });
        self.refuse_auth(env, now, reason, text);
    }

    fn refuse_auth(&mut self, env: &mut Env, now: Now, reason: FailureReason, text: String) {
        let kind = NotifyType::AuthenticationFailed;
        self.refuse_auth_with(env, now, kind, reason, text);
    }

    fn refuse_auth_with(
        &mut self,
        env: &mut Env,
        now: Now,
        kind: NotifyType,
        reason: FailureReason,
        text: String,
    ) {
        self.send_response(env, now, &[notify(kind)]);
        if reason == FailureReason::PeerAuthFailed {
            env.event(Event::Alert {
                kind: "peer-auth-failed",
                sa: Some(Box::new(self.info_without_children())),
            });
        }
        self.fail(env, now, reason, text);
    }

    fn peer_is_authentic(&mut self, env: &mut Env, now: Now, context: Box<Context>) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        if let Err((reason, text)) = self.admit_rival(env, now, &conn, context.initial_contact) {
            self.refuse_auth(env, now, reason, text);
            return;
        }
        self.read_auth_notifies(env, &context.payloads);
        let requested = auth::requested_authorities(&context.payloads);
        match self.local_auth(env, &conn, &context.transcript, requested.as_deref()) {
            Ok(LocalAuth::Ready(auth)) => self.authenticated(env, now, context, auth, Vec::new()),
            Ok(LocalAuth::Sign { job, certs }) => {
                let token = env.compute(self.id, Slot::Passive, job);
                self.passive = Passive::Responding(Box::new(Responding::Signature {
                    token,
                    context,
                    certs,
                }));
            }
            Err((reason, text)) => self.refuse_auth(env, now, reason, text),
        }
    }

    /// Both proofs are there: the IKE SA stands; now the child.
    fn authenticated(
        &mut self,
        env: &mut Env,
        now: Now,
        context: Box<Context>,
        auth: AuthPayload,
        certs: Vec<Payload>,
    ) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        let mut response = vec![Payload::IdR(self.local_id.clone())];
        response.extend(certs);
        response.push(Payload::Auth(auth));
        if self.peer.mobike {
            response.extend(self.mobike_payloads(env));
        }
        #[cfg(test)]
        if let Some(gateway) = env.redirects.take() {
            let redirect = crate::wire::Redirect {
                gateway,
                nonce: Vec::new(),
            };
            response.push(Payload::Notify(NotifyPayload::redirect(&redirect)));
            self.send_response(env, now, &response);
            self.conclude_auth(env, now, &context);
            return;
        }
        response.extend(auth_lifetime(&conn));
        let offer = ChildPayloads::of(&context.payloads);
        if offer.sa.is_some() && conn.childless == Childless::Force {
            let text =
                "the peer wants a child along with the IKE_SA, which is not allowed".to_owned();
            let kind = NotifyType::InvalidSyntax;
            self.refuse_auth_with(env, now, kind, FailureReason::PeerMisbehaved, text);
            return;
        }
        if offer.sa.is_none() {
            if conn.childless == Childless::Never {
                let text = "the peer wants no child, which is not allowed".to_owned();
                self.refuse_auth(env, now, FailureReason::PeerMisbehaved, text);
                return;
            }
            self.send_response(env, now, &response);
            self.conclude_auth(env, now, &context);
            return;
        }
        if virtual_ip::asks_for_addresses(&context.payloads) {
            let given = addresses_for_peers(env);
            let Some(_given) = given else {
                let failure = ChildFailure::new(
                    FailureReason::Unsupported,
                    NotifyType::InternalAddressFailure,
                    "the peer asks for a virtual address, and there is none to give",
                );
                self.answer_without_child(env, now, &context, response, &failure);
                return;
            };
            #[cfg(test)]
            response.push(virtual_ip::reply(&_given));
        }
        let selected = self.select_child(env, &conn, None, KeyExchangeRule::Ignore, &offer);
        let selected = match selected {
            Ok(selected) => Box::new(selected),
            Err(failure) => {
                self.answer_without_child(env, now, &context, response, &failure);
                return;
            }
        };
        let child = match self.new_child(env, &conn, selected.index, None) {
            Ok(child) => child,
            Err(failure) => {
                self.answer_without_child(env, now, &context, response, &failure);
                return;
            }
        };
        self.apply_selected(child, &selected);
        match self.alloc_spi(env, child, Slot::Passive) {
            Some(token) => {
                self.passive = Passive::Responding(Box::new(Responding::Spi {
                    token,
                    context,
                    response,
                    child,
                    selected,
                }));
            }
            None => {
                let failure = spi_failure(None);
                self.answer_without_child(env, now, &context, response, &failure);
            }
        }
    }

    /// The IKE SA comes up although its child does not.
    fn answer_without_child(
        &mut self,
        env: &mut Env,
        now: Now,
        context: &Context,
        mut response: Vec<Payload>,
        failure: &ChildFailure,
    ) {
        response.push(notify(failure.notify));
        self.send_response(env, now, &response);
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "CHILD_SA is refused with {}: {}",
                failure.notify, failure.text
            ),
        );
        self.conclude_auth(env, now, context);
        env.count(
            self.connection_name(),
            crate::api::Counter::Failure(failure.reason),
        );
        env.event(Event::Failure {
            connection: self.connection_name(),
            child: None,
            reason: failure.reason,
            text: failure.text.clone(),
        });
        env.event(Event::Alert {
            kind: "keep-on-child-sa-failure",
            sa: Some(Box::new(self.info_without_children())),
        });
    }

    /// The response is sent; the IKE SA is established.
    fn conclude_auth(&mut self, env: &mut Env, now: Now, context: &Context) {
        if self.dead {
            return;
        }
        self.establish(env, now);
        let unique = self.conn.as_ref().map_or(Unique::No, |conn| conn.unique);
        let initial_contact = context.initial_contact;
        if unique == Unique::Replace || (initial_contact && unique != Unique::Never) {
            env.request(Request::ReplaceOthers {
                keep: self.id,
                initial_contact,
            });
        }
    }

    /// An answer for the request that is being worked on.
    pub(crate) fn responding_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Responding,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match (state, answer) {
            (
                Responding::SharedSecret {
                    token: awaited,
                    init,
                },
                Answer::Computed(Computed::Responded(result)),
            ) if awaited == token => self.shared_secret_ready(env, now, *init, result),
            (
                Responding::Verification {
                    token: awaited,
                    mut context,
                },
                Answer::Computed(Computed::Verified(result)),
            ) if awaited == token => match result {
                Ok(verified) => {
                    self.log(
                        env,
                        LogGroup::Ike,
                        1,
                        format!(
                            "authentication of {} with {} is right",
                            display_identity(&self.remote_id),
                            verified.scheme.name()
                        ),
                    );
                    self.peer_is_authentic(env, now, context);
                }
                Err(error) => {
                    let failure = (FailureReason::PeerAuthFailed, error.to_string());
                    context.last.get_or_insert(failure);
                    self.try_candidate(env, now, context);
                }
            },
            (
                Responding::Signature {
                    token: awaited,
                    context,
                    certs,
                },
                Answer::Computed(Computed::Signed(result)),
            ) if awaited == token => match result {
                Ok((method, data)) => {
                    self.authenticated(env, now, context, AuthPayload { method, data }, certs);
                }
                Err(error) => {
                    let reason = FailureReason::MissingCredentials;
                    self.refuse_auth(env, now, reason, error.to_string());
                }
            },
            (
                Responding::Spi {
                    token: awaited,
                    context,
                    response,
                    child,
                    selected,
                },
                Answer::Plane(result),
            ) if awaited == token => match result {
                Ok(Outcome::Spi(spi)) => {
                    if let Some(child) = self.children.get_mut(&child) {
                        child.spi_in = spi;
                    }
                    self.install_answered(env, now, context, response, child, &selected);
                }
                Ok(Outcome::Done) | Err(_) => {
                    self.remove_child(env, child);
                    let failure = spi_failure(result.err());
                    self.answer_without_child(env, now, &context, response, &failure);
                }
            },
            (
                Responding::Installation {
                    mut installing,
                    response,
                    child_payloads,
                    context,
                },
                Answer::Plane(result),
            ) => match self.install_progress(env, &mut installing, token, result) {
                None => {
                    self.passive = Passive::Responding(Box::new(Responding::Installation {
                        installing,
                        response,
                        child_payloads,
                        context,
                    }));
                }
                Some(Ok(())) => {
                    let mut response = response;
                    response.extend(child_payloads);
                    self.send_response(env, now, &response);
                    self.conclude_auth(env, now, &context);
                    self.child_installed(env, now, installing.child, true);
                }
                Some(Err(error)) => {
                    self.remove_child(env, installing.child);
                    let failure = plane_failure(&error);
                    self.answer_without_child(env, now, &context, response, &failure);
                }
            },
            (state, answer) => {
                self.passive = Passive::Responding(Box::new(state));
                return Some(answer);
            }
        }
        None
    }

    fn shared_secret_ready(
        &mut self,
        env: &mut Env,
        now: Now,
        init: Init,
        result: Result<(Vec<u8>, swanherd_ipsec::Secret), crate::crypto::CryptoError>,
    ) {
        let (public, shared) = match result {
            Ok(both) => both,
            Err(error) => {
                let refusal = Message {
                    header: self.header(ExchangeType::IkeSaInit, 0, true),
                    payloads: vec![notify(NotifyType::InvalidSyntax)],
                };
                if let Ok(raw) = refusal.emit() {
                    self.respond(env, now, Sealed::fixed(vec![raw]));
                }
                self.fail(env, now, FailureReason::PeerMisbehaved, error.to_string());
                return;
            }
        };
        let suite = init.suite;
        let Some(transcript) = self.send_init_response(env, now, init, public) else {
            return;
        };
        let derived = self.derive_keys(suite, &shared, &transcript.nonce_i, &transcript.nonce_r);
        match derived {
            Ok(()) => {
                self.passive =
                    Passive::Responding(Box::new(Responding::AuthRequest(Box::new(transcript))));
            }
            Err((reason, text)) => self.fail(env, now, reason, text),
        }
    }

    fn install_answered(
        &mut self,
        env: &mut Env,
        now: Now,
        context: Box<Context>,
        response: Vec<Payload>,
        child: ChildSaId,
        selected: &Selected,
    ) {
        let Transcript {
            nonce_i, nonce_r, ..
        } = &context.transcript;
        let suite = &selected.chosen.suite;
        match self.ready_child(env, child, suite, None, nonce_i, nonce_r) {
            Ok(keys) => {
                let child_payloads = self.answer_child(child, selected);
                let slot = Slot::Passive;
                // What takes over from another one is not used before the peer can receive by it.
                let set = self.children.get(&child).map(|child| child.group.set);
                let outbound = if set.is_some_and(|set| env.policies.has_others(set, child)) {
                    Outbound::Later
                } else {
                    Outbound::Now
                };
                let installing = self.install_child(env, now, child, keys, false, outbound, slot);
                if outbound == Outbound::Later {
                    self.stand_by(env, now, child, Sign::Message);
                }
                self.passive = Passive::Responding(Box::new(Responding::Installation {
                    installing,
                    response,
                    child_payloads,
                    context,
                }));
            }
            Err(failure) => {
                self.remove_child(env, child);
                self.answer_without_child(env, now, &context, response, &failure);
            }
        }
    }
}

/// AUTH_LIFETIME: within what time the initiator is to authenticate itself again (RFC 4478).
fn auth_lifetime(conn: &Connection) -> Option<Payload> {
    let seconds = u32::try_from(conn.reauth_time.as_secs()).unwrap_or(u32::MAX);
    (seconds != 0).then(|| {
        let data = seconds.to_be_bytes().to_vec();
        Payload::Notify(NotifyPayload::new(NotifyType::AuthLifetime, data))
    })
}

/// Virtual addresses for a peer that asks for some. Pools are not supported, outside of tests.
fn addresses_for_peers(env: &Env) -> Option<Vec<std::net::IpAddr>> {
    #[cfg(test)]
    return env.given.clone();
    #[cfg(not(test))]
    {
        let _ = env;
        None
    }
}
