// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Setting up an IKE SA from this side: IKE_SA_INIT and IKE_AUTH (RFC 7296 sections 1.2, 2.6,
//! 2.7, 2.15 and 2.23).

use swanherd_config::identity::display_identity;
use swanherd_config::model::{Fragmentation, HostSpec, IkeVersion};
use swanherd_ipsec::plane::PlaneError;
use swanherd_ipsec::proposal::{IkeSuite, Proposal};
use swanherd_ipsec::registry::KeyExchangeId;
use swanherd_ipsec::{Identity, Secret};

use super::auth::{self, AuthFailure, Transcript};
use super::child_offer::{ChildFailure, ChildPayloads, notify, usable_ike_proposals};
use super::env::{Env, Slot};
use super::exchange::Sealed;
use super::install::Installing;
use super::proposal;
use super::protect::Protection;
use super::{Active, Answer, IkeSa, Task, mode, nat};
use crate::api::{
    ChildSaId, ConnectionRef, Datagram, Event, FailureReason, IkeState, LogGroup, Now, Token,
};
use crate::compute::{Computed, Job};
use crate::crypto::auth::{ANNOUNCED_HASHES, HashId};
use crate::crypto::{IkeKeys, KeyPair};
use crate::wire::{
    AuthPayload, ExchangeType, KePayload, Message, NoncePayload, NotifyPayload, NotifyType,
    Payload, STRONGSWAN, SaPayload, SaProposal,
};

/// How often IKE_SA_INIT starts over because the responder wants another key exchange or a cookie.
const MAX_RESTARTS: u32 = 8;

/// States of an initiator, named for what they await.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Initiating {
    /// The addresses of a name of the peer's.
    PeerAddress {
        /// Of the lookup.
        token: Token,
        /// The name.
        name: String,
        /// Which of its addresses is meant, counted round and round.
        turn: usize,
    },
    /// The own address.
    OwnAddress(Token),
    /// A private value.
    PrivateValue {
        /// Of the computation.
        token: Token,
        /// What has been decided.
        setup: Box<Setup>,
    },
    /// The response to IKE_SA_INIT.
    InitResponse {
        /// The private value.
        pair: KeyPair,
        /// What has been decided.
        setup: Box<Setup>,
    },
    /// The shared secret.
    SharedSecret {
        /// Of the computation.
        token: Token,
        /// What was agreed.
        agreed: Box<Agreed>,
    },
    /// The SPI of the child and the own signature.
    Preparation(Box<Preparation>),
    /// The response to IKE_AUTH.
    AuthResponse(Box<AuthWait>),
    /// Whether the peer's signature is right.
    Verification {
        /// Of the computation.
        token: Token,
        /// Waiting for it.
        wait: Box<AuthWait>,
        /// The response.
        payloads: Vec<Payload>,
    },
    /// The data plane has the child.
    Installation(Installing),
}

impl Initiating {
    /// The child that is being made.
    pub(crate) fn child(&self) -> Option<ChildSaId> {
        match self {
            Self::Preparation(preparation) => preparation.child,
            Self::AuthResponse(wait) | Self::Verification { wait, .. } => wait.child,
            Self::Installation(installing) => Some(installing.child),
            _ => None,
        }
    }
}

/// What IKE_SA_INIT's request says.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Setup {
    proposals: Vec<Proposal>,
    method: KeyExchangeId,
    nonce: Vec<u8>,
    cookie: Option<Vec<u8>>,
    restarts: u32,
    request: Vec<u8>,
}

/// What IKE_SA_INIT's response says.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Agreed {
    pub(super) suite: IkeSuite,
    pub(super) transcript: Transcript,
    pub(super) requested: Option<Vec<[u8; 20]>>,
}

/// On the way to the IKE_AUTH request.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Preparation {
    pub(super) transcript: Transcript,
    pub(super) child: Option<ChildSaId>,
    pub(super) spi: Option<Token>,
    pub(super) signature: Option<Token>,
    pub(super) auth: Option<AuthPayload>,
    pub(super) certs: Vec<Payload>,
}

/// Waiting for the IKE_AUTH response.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct AuthWait {
    pub(super) transcript: Transcript,
    pub(super) child: Option<ChildSaId>,
    pub(super) proposals: Vec<Proposal>,
}

impl IkeSa {
    /// Starts to set up the IKE SA of `conn`, and then does `tasks`.
    pub(crate) fn initiate(
        &mut self,
        env: &mut Env,
        now: Now,
        conn: &ConnectionRef,
        tasks: Vec<Task>,
    ) {
        self.conn = Some(conn.clone());
        self.state = IkeState::Connecting;
        for task in tasks {
            self.enqueue(task);
        }
        let unsupported = if conn.version == IkeVersion::V1 {
            Some("IKEv1 is not supported".to_owned())
        } else {
            auth::unsupported(conn)
        };
        if let Some(text) = unsupported {
            self.fail(env, now, FailureReason::Unsupported, text);
            return;
        }
        if let Some(pattern) = auth::remote_round(conn).and_then(|round| round.id.as_ref()) {
            self.remote_id = pattern.identity().unwrap_or_else(Identity::any);
        }
        if let Some(gateway) = self.redirection.to.clone() {
            self.go_to(env, now, gateway);
            return;
        }
        if let Some(target) = self.target {
            self.peer_found(env, now, target);
            return;
        }
        let targets: Vec<&HostSpec> = conn
            .remote_addrs
            .iter()
            .filter(|host| matches!(host, HostSpec::Addr(_) | HostSpec::Name(_)))
            .collect();
        // Round by round, and in each round the next address of each name.
        let attempt = usize::try_from(self.attempt).unwrap_or(0);
        let turn = attempt.checked_rem(targets.len()).unwrap_or(0);
        match targets.get(turn) {
            Some(HostSpec::Addr(addr)) => self.peer_found(env, now, *addr),
            Some(HostSpec::Name(name)) => {
                let round = attempt.checked_div(targets.len()).unwrap_or(0);
                self.look_up(env, name.clone(), round);
            }
            _ => self.fail(
                env,
                now,
                FailureReason::Unreachable,
                "the connection names no single address to initiate to".to_owned(),
            ),
        }
    }

    pub(super) fn begin_init(&mut self, env: &mut Env, now: Now) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        self.local_id = self.default_local_id(env, &conn);
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "initiating IKE_SA {}[{}] to {}",
                conn.name,
                self.id,
                self.remote.ip()
            ),
        );
        let proposals = usable_ike_proposals(env, &conn.proposals);
        let Some(method) = proposal::key_exchanges(&proposals).first().copied() else {
            self.fail(
                env,
                now,
                FailureReason::Unsupported,
                "none of the configured IKE proposals is supported".to_owned(),
            );
            return;
        };
        if self.spi_i == 0 {
            self.spi_i = env.new_spi(self.id);
        }
        let setup = Setup {
            proposals,
            method,
            nonce: env.nonce(),
            cookie: None,
            restarts: 0,
            request: Vec::new(),
        };
        self.generate(env, now, setup);
        self.changed(env);
    }

    fn generate(&mut self, env: &mut Env, now: Now, setup: Setup) {
        match env.crypto.key_exchange(setup.method) {
            Ok(method) => {
                let seed = env.rng.seed();
                let token = env.compute(self.id, Slot::Active, Job::Generate { method, seed });
                let setup = Box::new(setup);
                self.active =
                    Active::Initiating(Box::new(Initiating::PrivateValue { token, setup }));
            }
            Err(error) => self.fail(env, now, FailureReason::Unsupported, error.to_string()),
        }
    }

    fn send_init(&mut self, env: &mut Env, now: Now, pair: KeyPair, mut setup: Box<Setup>) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        let mut payloads = Vec::new();
        if let Some(cookie) = &setup.cookie {
            payloads.push(Payload::Notify(NotifyPayload::new(
                NotifyType::Cookie,
                cookie.clone(),
            )));
        }
        payloads.push(Payload::Sa(SaPayload {
            proposals: (1..)
                .zip(&setup.proposals)
                .map(|(number, proposal)| SaProposal {
                    number,
                    spi: Vec::new(),
                    proposal: proposal.clone(),
                })
                .collect(),
        }));
        payloads.push(Payload::Ke(KePayload {
            method: setup.method,
            data: pair.public().to_vec(),
        }));
        payloads.extend(NoncePayload::new(setup.nonce.clone()).map(Payload::Nonce));
        self.nat.fake = env.settings.force_encap || conn.encap;
        payloads.extend(nat::notifies(
            self.spi_i,
            0,
            self.local,
            self.remote,
            self.nat.fake,
        ));
        if conn.fragmentation != Fragmentation::No {
            payloads.push(notify(NotifyType::FragmentationSupported));
        }
        if env.settings.signature_authentication {
            payloads.push(hash_notify());
        }
        payloads.extend(self.redirect_offer(env));
        payloads.extend(mode::vendor_id(&conn));
        let message = Message {
            header: self.header(ExchangeType::IkeSaInit, 0, false),
            payloads,
        };
        self.log(env, LogGroup::Enc, 1, format!("sending {message}"));
        match message.emit() {
            Ok(raw) => {
                setup.request.clone_from(&raw);
                self.outbound.next_id = 0;
                self.launch(env, now, ExchangeType::IkeSaInit, Sealed::fixed(vec![raw]));
                self.active =
                    Active::Initiating(Box::new(Initiating::InitResponse { pair, setup }));
            }
            Err(error) => self.fail(env, now, FailureReason::Unsupported, error.to_string()),
        }
    }

    /// The response to IKE_SA_INIT, which nothing authenticates yet.
    pub(crate) fn handle_init_response(
        &mut self,
        env: &mut Env,
        now: Now,
        datagram: &Datagram,
        message: &Message,
    ) {
        if message.header.message_id != 0 || message.header.spi_i != self.spi_i {
            return;
        }
        let (pair, setup) = match std::mem::replace(&mut self.active, Active::Idle) {
            Active::Initiating(state) => match *state {
                Initiating::InitResponse { pair, setup } => (pair, setup),
                other => {
                    self.active = Active::Initiating(Box::new(other));
                    return;
                }
            },
            // A late copy must not disturb what is under way by now.
            other => {
                self.active = other;
                return;
            }
        };
        self.last_inbound = now.instant;
        self.count_message(env, ExchangeType::IkeSaInit, true, true);
        self.log(env, LogGroup::Enc, 1, format!("received {message}"));
        if let Some(critical) = message.unsupported_critical() {
            self.log(
                env,
                LogGroup::Enc,
                1,
                format!("response with unknown critical payload {critical} dropped"),
            );
            self.active = Active::Initiating(Box::new(Initiating::InitResponse { pair, setup }));
            return;
        }
        let has_sa = message.payloads.iter().any(|p| matches!(p, Payload::Sa(_)));
        if !has_sa {
            self.init_refused(env, now, message, pair, setup);
            return;
        }
        self.landed();
        let agreed = match self.read_init(env, datagram, message, &setup) {
            Ok(agreed) => agreed,
            Err((reason, text)) => {
                self.fail(env, now, reason, text);
                return;
            }
        };
        let (peer_value, agreed) = agreed;
        let token = env.compute(
            self.id,
            Slot::Active,
            Job::Agree {
                pair,
                peer: peer_value,
            },
        );
        let agreed = Box::new(agreed);
        self.active = Active::Initiating(Box::new(Initiating::SharedSecret { token, agreed }));
    }

    /// A response without SA: a cookie, another key exchange, or no.
    fn init_refused(
        &mut self,
        env: &mut Env,
        now: Now,
        message: &Message,
        pair: KeyPair,
        mut setup: Box<Setup>,
    ) {
        if setup.restarts >= MAX_RESTARTS {
            self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                "the peer keeps asking to start over".to_owned(),
            );
            return;
        }
        setup.restarts += 1;
        if let Some(cookie) = message.notify(NotifyType::Cookie) {
            if cookie.data.is_empty() || cookie.data.len() > 64 {
                self.active =
                    Active::Initiating(Box::new(Initiating::InitResponse { pair, setup }));
                return;
            }
            self.landed();
            self.log(env, LogGroup::Ike, 1, "the peer asks for a cookie");
            setup.cookie = Some(cookie.data.clone());
            self.send_init(env, now, pair, setup);
            return;
        }
        if let Some(wanted) = message.notify(NotifyType::InvalidKePayload) {
            let method = <[u8; 2]>::try_from(wanted.data.as_slice())
                .map(|octets| KeyExchangeId::from(u16::from_be_bytes(octets)));
            let offered = proposal::key_exchanges(&setup.proposals);
            let acceptable = method
                .ok()
                .filter(|method| offered.contains(method) && *method != setup.method);
            self.landed();
            let Some(method) = acceptable else {
                self.fail(
                    env,
                    now,
                    FailureReason::PeerMisbehaved,
                    "the peer asks for a key exchange method that was not offered".to_owned(),
                );
                return;
            };
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("the peer prefers {method} to {}", setup.method),
            );
            setup.method = method;
            self.generate(env, now, *setup);
            return;
        }
        if let Some(gateway) = self.redirect_in_init(env, message, &setup.nonce) {
            self.landed();
            self.begin_elsewhere(env, now, gateway);
            return;
        }
        let error = message
            .notifies()
            .find(|notify| notify.notify_type.is_error())
            .map(|notify| notify.notify_type);
        let Some(kind) = error else {
            self.active = Active::Initiating(Box::new(Initiating::InitResponse { pair, setup }));
            return;
        };
        self.landed();
        let reason = match kind {
            NotifyType::NoProposalChosen => FailureReason::IkeProposalMismatch,
            _ => FailureReason::PeerError,
        };
        if kind == NotifyType::NoProposalChosen {
            env.event(Event::Alert {
                kind: "proposal-mismatch-ike",
                sa: Some(Box::new(self.info_without_children())),
            });
        }
        self.fail(env, now, reason, format!("the peer answered {kind}"));
    }

    fn read_init(
        &mut self,
        env: &mut Env,
        datagram: &Datagram,
        message: &Message,
        setup: &Setup,
    ) -> Result<(Vec<u8>, Agreed), AuthFailure> {
        let misbehaved = |text: &str| (FailureReason::PeerMisbehaved, text.to_owned());
        let parts = ChildPayloads::of(&message.payloads);
        let (Some(sa), Some(ke), Some(nonce)) = (parts.sa, parts.ke, parts.nonce) else {
            return Err(misbehaved("the response lacks SA, KE or nonce"));
        };
        if message.header.spi_r == 0 {
            return Err(misbehaved("the response has no responder SPI"));
        }
        let [theirs] = sa.proposals.as_slice() else {
            return Err(misbehaved("the response does not have one proposal"));
        };
        let chosen = proposal::select_ike(
            &setup.proposals,
            std::slice::from_ref(&theirs.proposal),
            true,
        )
        .ok_or_else(|| misbehaved("the peer chose a proposal that was not offered"))?;
        if ke.method != setup.method || chosen.suite.key_exchange != setup.method {
            return Err(misbehaved(
                "the peer chose another key exchange than it answered with",
            ));
        }
        self.spi_r = message.header.spi_r;
        self.suite = Some(chosen.suite);
        self.read_features(message);
        let fake = self.nat.fake;
        self.nat = nat::detect(
            &message.payloads,
            self.spi_i,
            self.spi_r,
            self.local,
            datagram.remote,
        );
        self.nat.fake = fake && self.nat.supported;
        self.mobility.seen_as = super::mobike::seen_as(&message.payloads);
        if self.nat.local || self.nat.remote {
            let who = match (self.nat.local, self.nat.remote) {
                (true, true) => "both sides are",
                (true, false) => "this side is",
                _ => "the peer is",
            };
            self.log(env, LogGroup::Ike, 1, format!("{who} behind a NAT"));
        }
        let requested = auth::requested_authorities(&message.payloads);
        Ok((
            ke.data,
            Agreed {
                suite: chosen.suite,
                transcript: Transcript {
                    request: setup.request.clone(),
                    response: datagram.payload.clone(),
                    nonce_i: setup.nonce.clone(),
                    nonce_r: nonce,
                },
                requested,
            },
        ))
    }

    /// Notes what the peer's IKE_SA_INIT message says that it can do.
    pub(crate) fn read_features(&mut self, message: &Message) {
        let has = |kind| message.notify(kind).is_some();
        self.peer.fragmentation = has(NotifyType::FragmentationSupported);
        self.peer.childless = has(NotifyType::ChildlessSupported);
        self.peer.private_notifies = message
            .payloads
            .iter()
            .any(|payload| matches!(payload, Payload::Vendor(vendor) if vendor.0 == STRONGSWAN));
        self.peer.hashes = message
            .notify(NotifyType::SignatureHashAlgorithms)
            .map(|notify| {
                let (pairs, _) = notify.data.as_chunks::<2>();
                pairs
                    .iter()
                    .map(|pair| HashId::from(u16::from_be_bytes(*pair)))
                    .collect()
            })
            .unwrap_or_default();
    }

    /// Derives the keys of the IKE SA.
    pub(crate) fn derive_keys(
        &mut self,
        suite: IkeSuite,
        shared: &Secret,
        nonce_i: &[u8],
        nonce_r: &[u8],
    ) -> Result<(), AuthFailure> {
        let keys = IkeKeys::initial(&suite, shared, nonce_i, nonce_r, self.spi_i, self.spi_r)
            .map_err(|error| (FailureReason::Unsupported, error.to_string()))?;
        let protection = Protection::new(&suite, &keys, self.initiator)
            .map_err(|error| (FailureReason::Unsupported, error.to_string()))?;
        self.keys = Some(keys);
        self.protection = Some(protection);
        Ok(())
    }

    /// An answer for the exchange under way.
    pub(crate) fn initiating_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Initiating,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match (state, answer) {
            (
                Initiating::PeerAddress {
                    token: awaited,
                    name,
                    turn,
                },
                Answer::Resolved(addrs),
            ) if awaited == token => self.looked_up(env, now, &name, turn, &addrs),
            (Initiating::OwnAddress(awaited), Answer::Source(addr)) if awaited == token => {
                match addr {
                    Some(addr) => {
                        self.local.set_ip(addr);
                        self.begin_init(env, now);
                    }
                    None => self.fail(
                        env,
                        now,
                        FailureReason::Unreachable,
                        format!("no route to {}", self.remote.ip()),
                    ),
                }
            }
            (
                Initiating::PrivateValue {
                    token: awaited,
                    setup,
                },
                Answer::Computed(Computed::Generated(result)),
            ) if awaited == token => match result {
                Ok(pair) => self.send_init(env, now, pair, setup),
                Err(error) => self.fail(env, now, FailureReason::Resources, error.to_string()),
            },
            (
                Initiating::SharedSecret {
                    token: awaited,
                    agreed,
                },
                Answer::Computed(Computed::Agreed(result)),
            ) if awaited == token => {
                let derived = result
                    .map_err(|error| (FailureReason::PeerMisbehaved, error.to_string()))
                    .and_then(|shared| {
                        let Transcript {
                            nonce_i, nonce_r, ..
                        } = &agreed.transcript;
                        self.derive_keys(agreed.suite, &shared, nonce_i, nonce_r)
                    });
                match derived {
                    Ok(()) => self.prepare_auth(env, now, *agreed),
                    Err((reason, text)) => self.fail(env, now, reason, text),
                }
            }
            (Initiating::Preparation(preparation), answer) => {
                return self.preparation_answer(env, now, preparation, token, answer);
            }
            (
                Initiating::Verification {
                    token: awaited,
                    wait,
                    payloads,
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
                    self.peer_accepted(env, now, *wait, &payloads);
                }
                Err(error) => {
                    self.drop_auth_child(env, &wait);
                    let reason = FailureReason::PeerAuthFailed;
                    self.reject_peer(env, now, reason, error.to_string());
                }
            },
            (Initiating::Installation(mut installing), Answer::Plane(answer)) => {
                let id = installing.child;
                match self.install_progress(env, &mut installing, token, answer) {
                    None => {
                        self.active =
                            Active::Initiating(Box::new(Initiating::Installation(installing)));
                    }
                    Some(result) => {
                        self.installed_or_failed(env, now, id, result);
                        self.after_auth(env);
                    }
                }
            }
            (state, answer) => {
                self.active = Active::Initiating(Box::new(state));
                return Some(answer);
            }
        }
        None
    }

    /// The data plane has a child, or not.
    pub(crate) fn installed_or_failed(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        result: Result<(), PlaneError>,
    ) -> bool {
        match result {
            Ok(()) => {
                self.child_installed(env, now, id, true);
                true
            }
            Err(error) => {
                self.discard_agreed(env, now, id);
                let failure = plane_failure(&error);
                self.child_failed(env, now, id, &failure);
                false
            }
        }
    }
}

/// The data plane gave no SPI.
pub(crate) fn spi_failure(error: Option<PlaneError>) -> ChildFailure {
    let text = error.map_or_else(
        || "the data plane gave no SPI".to_owned(),
        |error| error.to_string(),
    );
    ChildFailure::new(FailureReason::DataPlane, NotifyType::NoProposalChosen, text)
}

/// The data plane refused an SA or a policy.
pub(crate) fn plane_failure(error: &PlaneError) -> ChildFailure {
    ChildFailure::new(
        FailureReason::DataPlane,
        NotifyType::NoProposalChosen,
        error.to_string(),
    )
}

/// SIGNATURE_HASH_ALGORITHMS with what this build verifies.
pub(crate) fn hash_notify() -> Payload {
    let data = ANNOUNCED_HASHES
        .iter()
        .flat_map(|hash| u16::from(*hash).to_be_bytes())
        .collect();
    Payload::Notify(NotifyPayload::new(
        NotifyType::SignatureHashAlgorithms,
        data,
    ))
}
