// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Datagrams: which IKE SA they belong to, and what becomes of those that start one.

use super::Endpoint;
use super::half_open::Admission;
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

    /// An IKE_SA_INIT request.
    fn init_request(&mut self, now: Now, datagram: &Datagram, header: Header) {
        if header.spi_i == 0 || header.message_id != 0 || !header.flags.initiator {
            self.dropped(DropReason::Malformed);
            return;
        }
        if let Some(&id) = self.init_requests.get(&(datagram.remote, header.spi_i)) {
            self.with(id, |sa, env| {
                if sa.inbound.cached(0, &datagram.payload).is_some() {
                    sa.respond_again(env, now);
                }
            });
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
                    self.reply(datagram, header, NotifyPayload::new(kind, Vec::new()));
                }
                return;
            }
        };
        if let Some(critical) = message.unsupported_critical() {
            let kind = NotifyType::UnsupportedCriticalPayload;
            self.reply(datagram, header, NotifyPayload::new(kind, vec![critical]));
            return;
        }
        if !self.is_admitted(now, datagram, header, &message) {
            return;
        }
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
                self.reply(datagram, header, notify);
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

    fn is_admitted(
        &mut self,
        now: Now,
        datagram: &Datagram,
        header: Header,
        message: &Message,
    ) -> bool {
        let limit = usize::try_from(self.env.settings.ikesa_limit).unwrap_or(usize::MAX);
        if limit != 0 && self.sas.len() >= limit {
            self.dropped(DropReason::HalfOpenTotal);
            return false;
        }
        let nonce = message.payloads.iter().find_map(|payload| match payload {
            Payload::Nonce(nonce) => Some(nonce.as_slice()),
            _ => None,
        });
        let Some(nonce) = nonce else {
            self.dropped(DropReason::Malformed);
            return false;
        };
        let cookie = message
            .notify(NotifyType::Cookie)
            .map(|notify| notify.data.as_slice());
        let source = datagram.remote;
        let known = self.env.connections.is_known_peer(source.ip());
        let admission = self.env.half_open.admit(
            &self.env.settings,
            &mut self.env.rng,
            now.instant,
            source,
            header.spi_i,
            nonce,
            cookie,
            known,
        );
        match admission {
            Admission::Admit => true,
            Admission::DemandCookie => {
                let cookie = self.env.half_open.cookie(nonce, source, header.spi_i);
                self.dropped(DropReason::CookieDemanded);
                let notify = NotifyPayload::new(NotifyType::Cookie, cookie);
                self.reply(datagram, header, notify);
                false
            }
            Admission::Drop(reason) => {
                self.dropped(reason);
                false
            }
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
            let kind = NotifyType::InvalidMajorVersion;
            self.reply(datagram, header, NotifyPayload::new(kind, Vec::new()));
        }
    }

    /// Answers without keeping anything.
    fn reply(&mut self, datagram: &Datagram, header: Header, notify: NotifyPayload) {
        let message = Message {
            header: Header {
                flags: Flags {
                    initiator: false,
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
