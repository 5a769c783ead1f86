// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Datagrams: which IKE SA they belong to, and what becomes of those that start one.

use super::Endpoint;
use super::half_open::{Admission, Applicant};
use super::throttle::AnswerKind;
use crate::api::{Action, Counter, Datagram, DropReason, LogGroup, Now, Transmit};
use crate::sa::IkeSa;
use crate::sa::judge::{Judgement, judge};
use crate::wire::{
    ExchangeType, Flags, Header, Message, NotifyPayload, NotifyType, Payload, WireError,
};

impl Endpoint {
    /// A datagram has arrived on an IKE port.
    pub fn handle_datagram(&mut self, now: Now, datagram: Datagram) {
        match Header::parse(&datagram.payload) {
            Ok(header) => self.route(now, &datagram, header),
            Err(WireError::MajorVersion { major, header }) => {
                self.other_version(now, &datagram, major, header);
            }
            // A NAT keepalive is one octet; it is not worth a word.
            Err(_) if datagram.payload == [0xff] => {}
            Err(_) => self.dropped(DropReason::Malformed),
        }
        self.settle(now);
    }

    fn route(&mut self, now: Now, datagram: &Datagram, header: Header) {
        let starts = header.exchange == ExchangeType::IkeSaInit
            && header.spi_r == 0
            && !header.flags.response;
        if starts {
            self.init_request(now, datagram, header);
            return;
        }
        let own = if header.flags.initiator {
            header.spi_r
        } else {
            header.spi_i
        };
        let Some(&id) = self.env.spis.get(&own) else {
            if self.say_farewell_again(now, own, datagram, header) {
                return;
            }
            self.env.count(None, Counter::InvalidSpi);
            self.deny_spi(now, datagram, header);
            self.log_stranger(now, LogGroup::Net, 2, || {
                format!(
                    "{} message from {} for unknown IKE SPI {own:016x} dropped",
                    header.exchange, datagram.remote
                )
            });
            return;
        };
        match Message::parse(&datagram.payload) {
            Ok(message) => {
                self.with(id, |sa, env| sa.handle_message(env, now, datagram, message));
            }
            Err(error) => {
                self.env.count(None, Counter::Invalid);
                self.log_stranger(now, LogGroup::Enc, 1, || {
                    format!("message from {} dropped: {error}", datagram.remote)
                });
            }
        }
    }

    /// Repeats the last answer of an IKE SA that is gone, if that is what the peer asks for.
    fn say_farewell_again(
        &mut self,
        now: Now,
        own_spi: u64,
        datagram: &Datagram,
        header: Header,
    ) -> bool {
        let id = header.message_id;
        let answer = self
            .farewells
            .answer(now.instant, own_spi, id, &datagram.payload);
        let Some(answer) = answer.filter(|_| !header.flags.response) else {
            return false;
        };
        for payload in answer {
            self.env.actions.push_back(Action::Transmit(Transmit {
                local: datagram.local,
                remote: datagram.remote,
                payload: payload.clone(),
                dscp: 0,
                keepalive: false,
            }));
        }
        self.env.count(None, Counter::RetransmitReceived);
        true
    }

    /// Tells the sender of a request that its IKE SA does not exist here (any more), as after a
    /// crash (RFC 7296 sections 1.5 and 2.21.4). Responses are never answered.
    fn deny_spi(&mut self, now: Now, datagram: &Datagram, header: Header) {
        if !header.flags.response && header.exchange != ExchangeType::IkeSaInit && !self.stopping {
            let notify = NotifyPayload::new(NotifyType::InvalidIkeSpi, Vec::new());
            self.reply_within_budget(now, datagram, header, notify);
        }
    }

    /// An IKE_SA_INIT request.
    fn init_request(&mut self, now: Now, datagram: &Datagram, header: Header) {
        if header.spi_i == 0 || header.message_id != 0 || !header.flags.initiator {
            self.dropped(DropReason::Malformed);
            return;
        }
        if let Some(&id) = self.init_requests.get(&(datagram.remote, header.spi_i)) {
            let again = self
                .sas
                .get(&id)
                .is_some_and(|sa| sa.inbound.cached(0, &datagram.payload).is_some());
            if again && self.may_answer(now, AnswerKind::Handshake, datagram, false) {
                self.with(id, |sa, env| sa.respond_again(env, now));
            }
            return;
        }
        if self.stopping {
            return;
        }
        let message = match Message::parse(&datagram.payload) {
            Ok(message) => message,
            Err(error) => {
                self.dropped(DropReason::Malformed);
                if let Some(kind) = error.notify() {
                    let notify = NotifyPayload::new(kind, Vec::new());
                    self.reply_within_budget(now, datagram, header, notify);
                }
                return;
            }
        };
        if let Some(critical) = message.unsupported_critical() {
            self.dropped(DropReason::Malformed);
            let kind = NotifyType::UnsupportedCriticalPayload;
            let notify = NotifyPayload::new(kind, vec![critical]);
            self.reply_within_budget(now, datagram, header, notify);
            return;
        }
        let nonce = message.payloads.iter().find_map(|payload| match payload {
            Payload::Nonce(nonce) => Some(nonce.as_slice()),
            _ => None,
        });
        let Some(nonce) = nonce else {
            self.dropped(DropReason::Malformed);
            return;
        };
        let applicant = Applicant {
            source: datagram.remote,
            spi_i: header.spi_i,
            nonce,
            cookie: message
                .notify(NotifyType::Cookie)
                .map(|notify| notify.data.as_slice()),
            configured: self.env.connections.is_known_peer(datagram.remote.ip()),
        };
        let Some(proven) = self.admit(now, datagram, header, &applicant) else {
            return;
        };
        let conns = self
            .env
            .connections
            .for_addresses(datagram.local.ip(), datagram.remote.ip());
        match judge(&self.env, &conns, &message) {
            Judgement::Refuse(notify, why) => {
                self.dropped(DropReason::NoConfig);
                self.log_stranger(now, LogGroup::Ike, 1, || {
                    format!(
                        "IKE_SA_INIT request from {} to {} is refused with {}: {why}",
                        datagram.remote.ip(),
                        datagram.local.ip(),
                        notify.notify_type
                    )
                });
                // A refusal may be what a peer needs to go on, as with INVALID_KE_PAYLOAD. When too
                // many are asked for, those who return a cookie get theirs.
                let known = self.is_known(now, &applicant);
                if proven || self.may_answer(now, AnswerKind::Error, datagram, !known) {
                    self.reply(datagram, header, notify);
                } else {
                    self.demand_cookie(now, datagram, header, &applicant);
                }
            }
            Judgement::Accept(accepted) => {
                let id = self.env.new_ike_id();
                let mut sa = Box::new(IkeSa::new(id, false, datagram.local, datagram.remote, now));
                sa.init_key = Some((datagram.remote, header.spi_i));
                sa.respond_init(&mut self.env, now, datagram, &message, *accepted);
                self.init_requests
                    .insert((datagram.remote, header.spi_i), id);
                self.adopt(sa);
            }
        }
    }

    /// Decides about an IKE_SA_INIT request, and answers it if it is not to go on. Returns whether
    /// its sender has proven its address by a cookie.
    fn admit(
        &mut self,
        now: Now,
        datagram: &Datagram,
        header: Header,
        applicant: &Applicant<'_>,
    ) -> Option<bool> {
        let limit = usize::try_from(self.env.settings.ikesa_limit).unwrap_or(usize::MAX);
        // What strangers have begun must not keep those out who are expected.
        let counted = if self.is_known(now, applicant) {
            self.sas.len().saturating_sub(self.env.half_open.total())
        } else {
            self.sas.len()
        };
        if limit != 0 && counted >= limit {
            self.dropped(DropReason::HalfOpenTotal);
            return None;
        }
        let env = &mut self.env;
        let admission = env
            .half_open
            .admit(&env.settings, &mut env.rng, now.instant, applicant);
        match admission {
            Admission::Admit { proven } => Some(proven),
            Admission::DemandCookie => {
                self.dropped(DropReason::CookieDemanded);
                self.demand_cookie(now, datagram, header, applicant);
                None
            }
            Admission::Drop(reason) => {
                self.dropped(reason);
                None
            }
        }
    }

    fn is_known(&self, now: Now, applicant: &Applicant<'_>) -> bool {
        applicant.configured
            || self
                .env
                .half_open
                .is_familiar(now.instant, applicant.source.ip())
    }

    /// Answers with a cookie. Known peers get theirs however many others ask, in their name or not:
    /// it is shorter than the request.
    fn demand_cookie(
        &mut self,
        now: Now,
        datagram: &Datagram,
        header: Header,
        applicant: &Applicant<'_>,
    ) {
        if self.is_known(now, applicant)
            || self.may_answer(now, AnswerKind::Handshake, datagram, true)
        {
            let cookie = self.env.half_open.cookie(&self.env.rng, applicant);
            let notify = NotifyPayload::new(NotifyType::Cookie, cookie);
            self.reply(datagram, header, notify);
        }
    }

    /// A message of another major version (RFC 7296 section 2.5).
    fn other_version(&mut self, now: Now, datagram: &Datagram, major: u8, header: Header) {
        self.dropped(DropReason::Version);
        self.log_stranger(now, LogGroup::Net, if major == 1 { 1 } else { 2 }, || {
            format!(
                "message of IKE version {major} from {} dropped",
                datagram.remote
            )
        });
        if major > 2 && !header.flags.response {
            let notify = NotifyPayload::new(NotifyType::InvalidMajorVersion, Vec::new());
            self.reply_within_budget(now, datagram, header, notify);
        }
    }

    /// Whether an answer to somebody who has not proven his address may be sent; `all` says whether
    /// it counts among those to all origins.
    fn may_answer(&mut self, now: Now, kind: AnswerKind, datagram: &Datagram, all: bool) -> bool {
        let addr = datagram.remote.ip();
        let rng = &mut self.env.rng;
        let may = self.throttle.take(rng, now.instant, kind, addr, all);
        if !may {
            self.env.count(None, Counter::AnswerWithheld);
        }
        may
    }

    fn reply_within_budget(
        &mut self,
        now: Now,
        datagram: &Datagram,
        header: Header,
        notify: NotifyPayload,
    ) {
        if self.may_answer(now, AnswerKind::Error, datagram, true) {
            self.reply(datagram, header, notify);
        }
    }

    /// Answers without keeping anything.
    fn reply(&mut self, datagram: &Datagram, header: Header, notify: NotifyPayload) {
        let message = Message {
            header: Header {
                flags: Flags {
                    initiator: !header.flags.initiator,
                    response: true,
                    higher_version: false,
                },
                ..header
            },
            payloads: vec![Payload::Notify(notify)],
        };
        let Ok(payload) = message.emit() else {
            return;
        };
        self.env.actions.push_back(Action::Transmit(Transmit {
            local: datagram.local,
            remote: datagram.remote,
            payload,
            dscp: 0,
            keepalive: false,
        }));
    }

    fn dropped(&mut self, reason: DropReason) {
        self.env.count(None, Counter::Dropped(reason));
    }
}
