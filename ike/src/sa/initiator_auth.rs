// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Setting up an IKE SA from this side: IKE_AUTH (RFC 7296 sections 1.2, 2.15 and 2.16).

use std::time::Duration;

use swanherd_config::model::{Childless, Unique};
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::Outcome;
use swanherd_ipsec::proposal::ChildSuite;

use super::auth::{self, LocalAuth, PeerCheck};
use super::child_offer::{ChildFailure, ChildPayloads, notify, usable_child_proposals};
use super::env::{Env, Request, Slot};
use super::initiator::{Agreed, AuthWait, Initiating, Preparation, spi_failure};
use super::install::Outbound;
use super::proposal::{self, KeyExchangeRule};
use super::{Active, Answer, IkeSa, Task};
use crate::api::{ChildSaId, ConnectionRef, Counter, Event, FailureReason, LogGroup, Now, Token};
use crate::compute::Computed;
use crate::crypto::ChildKeys;
use crate::wire::{AuthPayload, ExchangeType, NotifyPayload, NotifyType, Payload};

impl IkeSa {
    pub(super) fn prepare_auth(&mut self, env: &mut Env, now: Now, agreed: Agreed) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        // With a NAT in the way, and towards peers that expect it, everything that follows uses
        // the NAT-T ports.
        if self.nat.supported && (self.nat.any() || conn.mobike) {
            if self.remote.port() == 500 {
                self.remote.set_port(4500);
            }
            if self.local.port() == env.settings.port {
                self.local.set_port(env.settings.port_nat_t);
            }
        }
        let childless_wanted = matches!(conn.childless, Childless::Prefer | Childless::Force);
        if conn.childless == Childless::Force && !self.peer.childless {
            self.fail(
                env,
                now,
                FailureReason::Unsupported,
                "the peer does not support IKE_SAs without children, which is required".to_owned(),
            );
            return;
        }
        let first = match self.queue.front() {
            Some(Task::CreateChild {
                conn,
                index,
                packet,
            }) if !(childless_wanted && self.peer.childless) => {
                Some((conn.clone(), *index, *packet))
            }
            _ => None,
        };
        if first.is_none() && !self.peer.childless {
            self.fail(
                env,
                now,
                FailureReason::Unsupported,
                "the peer does not support IKE_SAs without children".to_owned(),
            );
            return;
        }
        let transcript = agreed.transcript;
        let made = self.local_auth(env, &conn, &transcript, agreed.requested.as_deref());
        let (auth, job, certs) = match made {
            Ok(LocalAuth::Ready(auth)) => (Some(auth), None, Vec::new()),
            Ok(LocalAuth::Sign { job, certs }) => (None, Some(job), certs),
            Err((reason, text)) => {
                self.fail(env, now, reason, text);
                return;
            }
        };
        let mut child = None;
        let mut spi = None;
        if let Some((conn, index, packet)) = first {
            self.queue.pop_front();
            self.first_child = Some((conn.clone(), index, packet));
            match self.new_child(env, &conn, index, None) {
                Ok(id) => {
                    if let Some(made) = self.children.get_mut(&id) {
                        made.packet = packet;
                    }
                    child = Some(id);
                    spi = self.alloc_spi(env, id, Slot::Active);
                }
                Err(failure) => {
                    self.child_refused(env, &conn, index, &failure);
                    if !self.peer.childless {
                        self.fail(env, now, failure.reason, failure.text);
                        return;
                    }
                }
            }
        }
        let signature = job.map(|job| env.compute(self.id, Slot::Active, job));
        let preparation = Preparation {
            transcript,
            child,
            spi,
            signature,
            auth,
            certs,
        };
        self.continue_preparation(env, now, Box::new(preparation));
    }

    fn continue_preparation(&mut self, env: &mut Env, now: Now, preparation: Box<Preparation>) {
        if preparation.spi.is_some() || preparation.signature.is_some() {
            self.active = Active::Initiating(Box::new(Initiating::Preparation(preparation)));
            return;
        }
        let Preparation {
            transcript,
            child,
            auth,
            certs,
            ..
        } = *preparation;
        let (Some(conn), Some(auth)) = (self.conn.clone(), auth) else {
            return;
        };
        let mut payloads = vec![Payload::IdI(self.local_id.clone())];
        payloads.extend(certs);
        // A peer that is calling at this moment has, or will have, another IKE SA, and so may one
        // whose identity is not known yet.
        let alone = env
            .rivals
            .others(&self.identities(), self.id)
            .next()
            .is_none()
            && env.half_open.of(self.remote.ip()) == 0
            && !self.remote_id.is_any();
        if alone && self.supersedes.is_none() && conn.unique != Unique::Never {
            payloads.push(notify(NotifyType::InitialContact));
        }
        payloads.extend(auth::certificate_request(env, Some(&conn)));
        if !self.remote_id.is_any() {
            payloads.push(Payload::IdR(self.remote_id.clone()));
        }
        payloads.push(Payload::Auth(auth));
        payloads.extend(self.address_request(&conn));
        payloads.extend(self.mobike_payloads(env));
        let mut proposals = Vec::new();
        if let Some(id) = child {
            if let Some(child) = self.children.get(&id) {
                let usable = usable_child_proposals(env, child.cfg());
                proposals = proposal::without_key_exchange(&usable);
            }
            payloads.extend(self.offer_child(env, id, &proposals));
        }
        if self.send_request(env, now, ExchangeType::IkeAuth, &payloads) {
            let wait = Box::new(AuthWait {
                transcript,
                child,
                proposals,
            });
            self.active = Active::Initiating(Box::new(Initiating::AuthResponse(wait)));
        }
    }

    /// The response to IKE_AUTH.
    pub(crate) fn handle_auth_response(
        &mut self,
        env: &mut Env,
        now: Now,
        state: Initiating,
        payloads: &[Payload],
    ) {
        let Initiating::AuthResponse(wait) = state else {
            self.active = Active::Initiating(Box::new(state));
            return;
        };
        let mut auth = None;
        let mut id_r = None;
        for payload in payloads {
            match payload {
                Payload::Auth(found) => auth = Some(found.clone()),
                Payload::IdR(found) => id_r = Some(found.clone()),
                Payload::Eap(_) => {
                    self.drop_auth_child(env, &wait);
                    let text = "the peer asks for EAP, which is not supported".to_owned();
                    self.reject_peer(env, now, FailureReason::Unsupported, text);
                    return;
                }
                _ => {}
            }
        }
        let (Some(auth), Some(conn)) = (auth, self.conn.clone()) else {
            let error = ChildPayloads::of(payloads).error;
            self.drop_auth_child(env, &wait);
            let (reason, text) = match error {
                Some((NotifyType::AuthenticationFailed, _)) => {
                    env.event(Event::Alert {
                        kind: "local-auth-failed",
                        sa: Some(Box::new(self.info_without_children())),
                    });
                    (
                        FailureReason::LocalAuthFailed,
                        "the peer answered AUTHENTICATION_FAILED".to_owned(),
                    )
                }
                Some((kind, _)) => (
                    FailureReason::PeerError,
                    format!("the peer answered {kind}"),
                ),
                None => (
                    FailureReason::PeerMisbehaved,
                    "the peer's response has no AUTH".to_owned(),
                ),
            };
            self.fail(env, now, reason, text);
            return;
        };
        let Some(id_r) = id_r else {
            self.drop_auth_child(env, &wait);
            let text = "the peer's response has no IDr".to_owned();
            self.reject_peer(env, now, FailureReason::PeerMisbehaved, text);
            return;
        };
        self.remote_id = id_r;
        match self.peer_auth(env, now, &conn, &wait.transcript, &auth, payloads) {
            Ok(PeerCheck::Accepted) => self.peer_accepted(env, now, *wait, payloads),
            Ok(PeerCheck::Verify(job)) => {
                let token = env.compute(self.id, Slot::Active, job);
                self.active = Active::Initiating(Box::new(Initiating::Verification {
                    token,
                    wait,
                    payloads: payloads.to_vec(),
                }));
            }
            Err((reason, text)) => {
                self.drop_auth_child(env, &wait);
                self.reject_peer(env, now, reason, text);
            }
        }
    }

    pub(super) fn drop_auth_child(&mut self, env: &mut Env, wait: &AuthWait) {
        if let Some(id) = wait.child {
            self.remove_child(env, id);
        }
    }

    /// The responder is not who it should be: it is told, once.
    pub(super) fn reject_peer(
        &mut self,
        env: &mut Env,
        now: Now,
        reason: FailureReason,
        text: String,
    ) {
        if reason == FailureReason::PeerAuthFailed {
            env.event(Event::Alert {
                kind: "peer-auth-failed",
                sa: Some(Box::new(self.info_without_children())),
            });
        }
        let failed = notify(NotifyType::AuthenticationFailed);
        self.send_request(env, now, ExchangeType::Informational, &[failed]);
        self.fail(env, now, reason, text);
    }

    pub(super) fn peer_accepted(
        &mut self,
        env: &mut Env,
        now: Now,
        wait: AuthWait,
        payloads: &[Payload],
    ) {
        self.read_auth_notifies(env, payloads);
        self.first_child = None;
        if let Some(gateway) = self.redirect_of(payloads) {
            self.redirected_in_auth(env, now, &wait, gateway);
            return;
        }
        self.establish(env, now);
        let Some(conn) = self.conn.clone() else {
            return;
        };
        let given = self.take_addresses(env, &conn, payloads);
        let Some(id) = wait.child else {
            self.add_addresses(env, None);
            self.after_auth(env);
            return;
        };
        let answer = ChildPayloads::of(payloads);
        if !given && answer.error.is_none() {
            // What the peer has installed on its side has to go.
            if answer.sa.is_some() {
                self.discard_agreed(env, now, id);
            }
            let failure = ChildFailure::new(
                FailureReason::PeerError,
                NotifyType::FailedCpRequired,
                "the peer gave no virtual address although one was asked for",
            );
            self.child_failed(env, now, id, &failure);
            self.after_auth(env);
            self.enqueue(Task::DeleteIke);
            return;
        }
        self.follow_addresses(id);
        let accepted =
            self.accept_child(env, id, &wait.proposals, KeyExchangeRule::Ignore, &answer);
        let suite = match accepted {
            Ok(suite) => suite,
            Err(failure) => {
                // What the peer has installed on its side has to go.
                if answer.sa.is_some() {
                    self.discard_agreed(env, now, id);
                }
                self.child_failed(env, now, id, &failure);
                self.after_auth(env);
                if !given {
                    // Addresses are given in IKE_AUTH or not at all.
                    self.enqueue(Task::DeleteIke);
                }
                return;
            }
        };
        let keys = self.ready_child(
            env,
            id,
            &suite,
            None,
            &wait.transcript.nonce_i,
            &wait.transcript.nonce_r,
        );
        let keys = match keys {
            Ok(keys) => keys,
            Err(failure) => {
                self.discard_agreed(env, now, id);
                self.child_failed(env, now, id, &failure);
                self.after_auth(env);
                return;
            }
        };
        let addresses = self.add_addresses(env, Some(Slot::Active));
        let mut installing =
            self.install_child(env, now, id, keys, true, Outbound::Now, Slot::Active);
        installing.also_await(addresses);
        self.active = Active::Initiating(Box::new(Initiating::Installation(installing)));
    }

    /// A child is agreed and can be installed: finds its group and derives its keys.
    pub(crate) fn ready_child(
        &mut self,
        env: &mut Env,
        id: ChildSaId,
        suite: &ChildSuite,
        shared: Option<&Secret>,
        nonce_i: &[u8],
        nonce_r: &[u8],
    ) -> Result<ChildKeys, ChildFailure> {
        self.settle_group(env, id)?;
        self.child_keys(suite, shared, nonce_i, nonce_r)
    }

    fn child_keys(
        &self,
        suite: &ChildSuite,
        shared: Option<&Secret>,
        nonce_i: &[u8],
        nonce_r: &[u8],
    ) -> Result<ChildKeys, ChildFailure> {
        let unsupported = |text: String| {
            ChildFailure::new(
                FailureReason::Unsupported,
                NotifyType::NoProposalChosen,
                text,
            )
        };
        let (Some(ike), Some(keys)) = (self.suite, self.keys.as_ref()) else {
            return Err(unsupported("the IKE_SA has no keys".to_owned()));
        };
        ChildKeys::derive(ike.prf, &keys.d, suite, shared, nonce_i, nonce_r)
            .map_err(|error| unsupported(error.to_string()))
    }

    /// Notes what an IKE_AUTH message says besides.
    pub(crate) fn read_auth_notifies(&mut self, env: &mut Env, payloads: &[Payload]) {
        for payload in payloads {
            let Payload::Notify(notify) = payload else {
                continue;
            };
            match notify.notify_type {
                NotifyType::MobikeSupported => self.peer.mobike = true,
                NotifyType::EspTfcPaddingNotSupported => self.peer.no_tfc = true,
                NotifyType::AuthLifetime => {
                    self.auth_lifetime = auth_lifetime(notify).filter(|_| self.initiator);
                }
                _ => {}
            }
        }
        self.read_addresses(env, payloads);
    }

    /// A child of the peer's agreement is not to be: deletes it at the peer.
    pub(crate) fn discard_agreed(&mut self, _env: &mut Env, _now: Now, id: ChildSaId) {
        // The child is removed by the caller; only its SPI has to be named to the peer.
        if let Some(child) = self.children.get(&id)
            && child.spi_in != 0
        {
            self.enqueue(Task::DeleteSpi(child.spi_in));
        }
    }

    /// A child could not be brought up.
    pub(crate) fn child_failed(
        &mut self,
        env: &mut Env,
        _now: Now,
        id: ChildSaId,
        failure: &ChildFailure,
    ) {
        let Some(child) = self.remove_child(env, id) else {
            return;
        };
        self.child_refused(env, &child.conn, child.index, failure);
    }

    /// A child cannot even be begun.
    pub(crate) fn child_refused(
        &mut self,
        env: &mut Env,
        conn: &ConnectionRef,
        index: usize,
        failure: &ChildFailure,
    ) {
        self.first_child = None;
        let Some(cfg) = conn.children.get(index) else {
            return;
        };
        let (connection, name) = (conn.name.clone(), cfg.name.clone());
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("establishing CHILD_SA {name} failed: {}", failure.text),
        );
        let kind = match failure.reason {
            FailureReason::ChildProposalMismatch => Some("proposal-mismatch-child"),
            FailureReason::SelectorMismatch => Some("ts-mismatch"),
            FailureReason::DataPlane => Some("install-child-sa-failed"),
            _ => None,
        };
        let sa = Box::new(self.info_without_children());
        for kind in kind.into_iter().chain(["keep-on-child-sa-failure"]) {
            let sa = Some(sa.clone());
            env.event(Event::Alert { kind, sa });
        }
        env.count(Some(connection.clone()), Counter::Failure(failure.reason));
        env.event(Event::Failure {
            connection: Some(connection.clone()),
            child: Some(name.clone()),
            reason: failure.reason,
            text: failure.text.clone(),
        });
        env.request(Request::ChildFailed {
            ike: self.id,
            connection,
            child: name,
            reason: failure.reason,
            text: failure.text.clone(),
            insist: self.restores,
        });
        if env.settings.close_ike_on_child_failure {
            self.enqueue(Task::DeleteIke);
        }
    }

    /// IKE_AUTH is done, with or without a child.
    pub(super) fn after_auth(&mut self, _env: &mut Env) {
        if self.supersedes.is_some() || self.restores {
            // A peer that has heard of this one has its packets take it before the other one goes.
            self.enqueue(Task::Probe);
            self.enqueue(Task::FinishReauth);
        }
    }

    pub(super) fn preparation_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        mut preparation: Box<Preparation>,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        match answer {
            Answer::Plane(result) if preparation.spi == Some(token) => {
                preparation.spi = None;
                match result {
                    Ok(Outcome::Spi(spi)) => {
                        if let Some(child) =
                            preparation.child.and_then(|id| self.children.get_mut(&id))
                        {
                            child.spi_in = spi;
                        }
                    }
                    Ok(Outcome::Done) | Err(_) => {
                        // Without an SPI there is no child, and without a child no IKE_AUTH, unless
                        // the peer can do without.
                        let text = spi_failure(result.err());
                        if let Some(id) = preparation.child.take() {
                            self.child_failed(env, now, id, &text);
                        }
                        if !self.peer.childless {
                            self.fail(env, now, FailureReason::DataPlane, text.text);
                            return None;
                        }
                    }
                }
            }
            Answer::Computed(Computed::Signed(result)) if preparation.signature == Some(token) => {
                preparation.signature = None;
                match result {
                    Ok((method, data)) => preparation.auth = Some(AuthPayload { method, data }),
                    Err(error) => {
                        if let Some(id) = preparation.child {
                            self.remove_child(env, id);
                        }
                        self.fail(
                            env,
                            now,
                            FailureReason::MissingCredentials,
                            error.to_string(),
                        );
                        return None;
                    }
                }
            }
            answer => {
                self.active = Active::Initiating(Box::new(Initiating::Preparation(preparation)));
                return Some(answer);
            }
        }
        self.continue_preparation(env, now, preparation);
        None
    }
}

/// What AUTH_LIFETIME says (RFC 4478).
pub(super) fn auth_lifetime(notify: &NotifyPayload) -> Option<Duration> {
    let seconds = <[u8; 4]>::try_from(notify.data.as_slice()).ok()?;
    Some(Duration::from_secs(u64::from(u32::from_be_bytes(seconds))))
}
