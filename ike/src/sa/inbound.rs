// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages from the peer: the right keys, the right id, the right state.

use super::env::Env;
use super::exchange::Path;
use super::protect::ProtectError;
use super::standby::Sign;
use super::timers::Timer;
use super::{Active, IkeSa, Passive};
use crate::api::{Counter, Datagram, Event, FailureReason, IkeState, LogGroup, Now};
use crate::crypto::hash::sha1;
use crate::wire::{
    ExchangeType, Header, Message, NotifyPayload, NotifyType, Payload, WireError,
    unsupported_critical,
};

/// How long a peer's request may take to be answered before it is given up.
const PASSIVE_LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

impl IkeSa {
    /// A message with this IKE SA's SPIs has arrived.
    pub(crate) fn handle_message(
        &mut self,
        env: &mut Env,
        now: Now,
        datagram: &Datagram,
        message: Message,
    ) {
        if self.dead {
            return;
        }
        let header = message.header;
        if header.flags.initiator == self.initiator {
            self.drop_message(env, "it claims to come from this side");
            return;
        }
        if header.exchange == ExchangeType::IkeSaInit {
            if header.flags.response && self.initiator {
                self.handle_init_response(env, now, datagram, &message);
                self.proceed(env, now);
            }
            return;
        }
        if header.spi_i != self.spi_i || header.spi_r != self.spi_r || self.protection.is_none() {
            self.drop_message(env, "its SPIs do not belong to this IKE_SA");
            return;
        }
        let first_fragment = match message.payloads.last() {
            Some(Payload::Sk(_)) => true,
            Some(Payload::Skf(skf)) => skf.number == 1,
            _ => {
                self.drop_message(env, "it is not protected");
                return;
            }
        };
        if header.flags.response {
            let awaited = self.outbound.in_flight.as_ref().is_some_and(|flight| {
                flight.message_id == header.message_id && flight.exchange == header.exchange
            });
            if !awaited {
                return;
            }
        } else if header.message_id.wrapping_add(1) == self.inbound.expected_id {
            if self.is_last_request(env, datagram, &message) {
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    format!(
                        "{} request {} was received again, its response is sent again",
                        header.exchange, header.message_id
                    ),
                );
                self.inbound.path = Some((datagram.local, datagram.remote));
                self.respond_again(env, now);
            }
            return;
        } else if header.message_id != self.inbound.expected_id {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!(
                    "{} request has message id {}, expected is {}",
                    header.exchange, header.message_id, self.inbound.expected_id
                ),
            );
            return;
        } else if self.inbound.processing.is_some() {
            // The same request again, while it is still being worked on.
            return;
        }

        if let Some(Payload::Skf(skf)) = message.payloads.last()
            && self.reassembly.has(&header, skf)
        {
            return;
        }
        let payloads = match self.open(env, datagram, &message) {
            Ok(Some(payloads)) => payloads,
            Ok(None) => {
                if first_fragment && !header.flags.response {
                    self.inbound.current = sha1(&datagram.payload);
                }
                return;
            }
            Err(ProtectError::Crypto(error)) => {
                env.count(self.connection_name(), Counter::Invalid);
                self.drop_message(env, &error.to_string());
                return;
            }
            Err(ProtectError::Wire(error)) => {
                env.count(self.connection_name(), Counter::Invalid);
                self.syntax_error(env, now, &message, datagram, &error);
                return;
            }
        };
        if first_fragment && !header.flags.response {
            self.inbound.current = sha1(&datagram.payload);
        }
        self.last_inbound = now.instant;
        self.count_message(env, header.exchange, true, header.flags.response);
        let path = (datagram.local, datagram.remote);
        if !header.flags.response {
            self.inbound.path = Some(path);
        }
        self.learn_addresses(env, now, path, header);
        let opened = Message { header, payloads };
        self.log(env, LogGroup::Enc, 1, format!("received {opened}"));
        if header.flags.response {
            self.landed();
            self.handle_response(env, now, opened.header.exchange, &opened.payloads, path);
        } else if header.exchange == ExchangeType::CreateChildSa
            && self.state == IkeState::Connecting
        {
            // The peer's last message of IKE_AUTH is still on its way; it will ask again.
            self.drop_message(env, "its exchange is too early");
        } else {
            self.begin_request(now, header.message_id, header.exchange);
            if let Some(critical) = unsupported_critical(&opened.payloads) {
                self.refuse(
                    env,
                    now,
                    NotifyPayload::new(NotifyType::UnsupportedCriticalPayload, vec![critical]),
                );
            } else {
                self.handle_request(env, now, opened.header.exchange, &opened.payloads);
            }
        }
        // Last, for what stands by may just have been deleted.
        if self.is_established() {
            self.peer_is_ready(
                env,
                if header.flags.response {
                    Sign::Message
                } else {
                    Sign::Request
                },
            );
        }
        self.proceed(env, now);
    }

    fn begin_request(&mut self, now: Now, message_id: u32, exchange: ExchangeType) {
        self.inbound.processing = Some((message_id, exchange));
        self.inbound.asked = Some(now.instant);
        self.inbound.unsettled = None;
        self.timers.set(Timer::Passive, now.instant + PASSIVE_LIMIT);
    }

    fn drop_message(&self, env: &mut Env, why: &str) {
        self.log(
            env,
            LogGroup::Net,
            1,
            format!("message from {} dropped: {why}", self.remote),
        );
    }

    /// Whether a message is the request that was answered last. One that is fragmented anew
    /// differs in every octet, and is known by its first fragment, if that is authentic (RFC 7383
    /// section 2.6.1).
    fn is_last_request(&self, env: &Env, datagram: &Datagram, message: &Message) -> bool {
        let id = message.header.message_id;
        if self.inbound.cached(id, &datagram.payload).is_some() {
            return true;
        }
        match (message.payloads.last(), &self.protection) {
            (Some(Payload::Skf(skf)), Some(protection)) => {
                skf.number == 1
                    && protection
                        .open_fragment(&datagram.payload, skf, env.rng.tape())
                        .is_ok()
            }
            _ => false,
        }
    }

    fn open(
        &mut self,
        env: &Env,
        datagram: &Datagram,
        message: &Message,
    ) -> Result<Option<Vec<Payload>>, ProtectError> {
        let Some(protection) = self.protection.as_ref() else {
            return Ok(None);
        };
        match message.payloads.last() {
            Some(Payload::Sk(sk)) => protection
                .open(&datagram.payload, sk, env.rng.tape())
                .map(Some),
            Some(Payload::Skf(skf)) => {
                let content = protection.open_fragment(&datagram.payload, skf, env.rng.tape())?;
                let limit = usize::try_from(env.settings.max_packet).unwrap_or(usize::MAX);
                Ok(self.reassembly.add(&message.header, skf, content, limit)?)
            }
            _ => Ok(None),
        }
    }

    /// A message that is authentic but malformed (RFC 7296 section 2.21.2).
    fn syntax_error(
        &mut self,
        env: &mut Env,
        now: Now,
        message: &Message,
        datagram: &Datagram,
        error: &WireError,
    ) {
        self.log(
            env,
            LogGroup::Enc,
            1,
            format!("message from {} is malformed: {error}", self.remote),
        );
        env.event(Event::Alert {
            kind: "parse-error-body",
            sa: Some(Box::new(self.info_without_children())),
        });
        if message.header.flags.response {
            // Its request cannot be concluded; the peer's state is unknown.
            self.landed();
            self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("the peer's response is malformed: {error}"),
            );
            return;
        }
        self.inbound.current = sha1(&datagram.payload);
        self.inbound.path = Some((datagram.local, datagram.remote));
        self.begin_request(now, message.header.message_id, message.header.exchange);
        let data = Vec::new();
        self.refuse(
            env,
            now,
            NotifyPayload::new(NotifyType::InvalidSyntax, data),
        );
        // The peer takes this answer for the end of the IKE SA (RFC 7296 section 2.21.3).
        self.fail(
            env,
            now,
            FailureReason::PeerMisbehaved,
            format!("the peer's request is malformed: {error}"),
        );
    }

    /// Answers the request that is being worked on with an error.
    pub(crate) fn refuse(&mut self, env: &mut Env, now: Now, notify: NotifyPayload) {
        let kind = notify.notify_type;
        let auth = matches!(self.inbound.processing, Some((_, ExchangeType::IkeAuth)));
        self.send_response(env, now, &[Payload::Notify(notify)]);
        if auth {
            self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("IKE_AUTH refused with {kind}"),
            );
        }
    }

    fn handle_request(
        &mut self,
        env: &mut Env,
        now: Now,
        exchange: ExchangeType,
        payloads: &[Payload],
    ) {
        match (exchange, self.state) {
            (ExchangeType::IkeAuth, IkeState::Connecting) => {
                self.handle_auth_request(env, now, payloads);
            }
            (ExchangeType::Informational, IkeState::Connecting) => {
                // The initiator may learn only from IKE_AUTH's response that it is wrong here.
                self.handle_informational(env, now, payloads);
            }
            (
                ExchangeType::Informational,
                IkeState::Established | IkeState::Rekeying | IkeState::Rekeyed | IkeState::Deleting,
            ) => self.handle_informational(env, now, payloads),
            (
                ExchangeType::CreateChildSa,
                IkeState::Established | IkeState::Rekeying | IkeState::Rekeyed | IkeState::Deleting,
            ) => self.handle_create_child(env, now, payloads),
            _ => {
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    format!("{exchange} request does not fit the state {:?}", self.state),
                );
                let notify = NotifyPayload::new(NotifyType::InvalidSyntax, Vec::new());
                self.send_response(env, now, &[Payload::Notify(notify)]);
                self.fail(
                    env,
                    now,
                    FailureReason::PeerMisbehaved,
                    format!("the peer's {exchange} request fits nothing"),
                );
            }
        }
    }

    fn handle_response(
        &mut self,
        env: &mut Env,
        now: Now,
        exchange: ExchangeType,
        payloads: &[Payload],
        path: Path,
    ) {
        let is_fatal = |payload: &Payload| {
            matches!(payload, Payload::Notify(notify)
                if notify.notify_type == NotifyType::InvalidSyntax)
        };
        // Of IKE_AUTH the initiator says what it was that failed.
        if exchange != ExchangeType::IkeAuth && payloads.iter().any(is_fatal) {
            self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("the peer answers the {exchange} request with INVALID_SYNTAX"),
            );
            return;
        }
        match std::mem::replace(&mut self.active, Active::Idle) {
            Active::Initiating(state) => self.handle_auth_response(env, now, *state, payloads),
            Active::CreatingChild(state) => {
                self.handle_create_response(env, now, *state, payloads);
            }
            Active::Rekeying(state) => self.handle_rekey_response(env, now, *state, payloads),
            Active::DeletingChild(id) => self.child_delete_answered(env, now, id, payloads),
            Active::DeletingIke => self.ike_delete_answered(env, now),
            Active::Probing => {
                self.probe_answered(env, now, payloads);
                // Listings must not show it as under way until something else happens.
                self.changed(env);
            }
            Active::Moving(moving) => self.move_answered(env, now, &moving, payloads, path),
            Active::Proving(proof) => self.proof_answered(env, now, &proof, payloads),
            Active::Idle => {
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    format!("{exchange} response belongs to nothing"),
                );
            }
        }
    }

    /// Follows a peer that is behind a NAT, or that moves to the NAT-T port, to where its newest
    /// authenticated message came from (RFC 7296 sections 2.11 and 2.23). Behind a NAT ourselves we
    /// stay: anybody on the way could lead us elsewhere with one packet, and we keep the mapping
    /// open from this side anyway. With MOBIKE peers say when they move (RFC 4555 section 3.8).
    fn learn_addresses(&mut self, env: &mut Env, now: Now, path: Path, header: Header) {
        if path == (self.local, self.remote) {
            return;
        }
        let setting_up =
            header.exchange == ExchangeType::IkeAuth && self.state == IkeState::Connecting;
        if !setting_up && self.is_mobile() {
            if header.flags.response {
                self.heard_over(env, now, path);
            }
            return;
        }
        let (local, remote) = path;
        let same_host = self.remote.ip() == remote.ip();
        let follows = !self.nat.local && (self.nat.remote || (same_host && self.nat.supported));
        if !follows && (!setting_up || self.initiator) {
            return;
        }
        if !setting_up {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("the peer moved from {} to {remote}", self.remote),
            );
        }
        if self.half_open {
            env.half_open.remove(self.remote.ip());
            env.half_open.add(remote.ip());
        }
        self.relocate(env, now, local, remote);
        self.move_children(env);
    }

    /// Whether a request of the peer's is being worked on.
    pub(crate) fn is_answering(&self) -> bool {
        self.inbound.processing.is_some() || !matches!(self.passive, Passive::Idle)
    }
}
