// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Message ids, retransmission and the response cache, with a window of 1 in each direction
//! (RFC 7296 sections 2.1 to 2.3).

use std::time::Duration;

use super::IkeSa;
use super::env::Env;
use super::protect::max_message_len;
use super::timers::Timer;
use crate::api::{
    Action, Counter, Event, Exchange, FailureReason, LogGroup, Now, Settings, Transmit,
};
use crate::crypto::Rng;
use crate::crypto::hash::sha1;
use crate::wire::{ExchangeType, Flags, Header, Message, Payload};

/// Requests of this side.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    /// Id of the next request.
    pub(crate) next_id: u32,
    /// The request that awaits its response.
    pub(crate) in_flight: Option<InFlight>,
}

/// A request that awaits its response.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) message_id: u32,
    pub(crate) exchange: ExchangeType,
    datagrams: Vec<Vec<u8>>,
    /// Retransmissions made so far.
    tries: u32,
}

/// Requests of the peer.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// Id of the next request.
    pub(crate) expected_id: u32,
    /// The request that is being worked on.
    pub(crate) processing: Option<(u32, ExchangeType)>,
    /// Digest of the first datagram of the request that is being worked on.
    pub(crate) current: [u8; 20],
    /// The last request and what it was answered.
    pub(crate) last: Option<Answered>,
}

/// A request of the peer's and the response that it got.
#[derive(Debug)]
pub(crate) struct Answered {
    message_id: u32,
    digest: [u8; 20],
    datagrams: Vec<Vec<u8>>,
}

impl Answered {
    /// `digest` is that of the request's first datagram.
    pub(crate) fn new(message_id: u32, digest: [u8; 20], datagrams: Vec<Vec<u8>>) -> Self {
        Self {
            message_id,
            digest,
            datagrams,
        }
    }

    /// The response, if `raw` is the request again.
    pub(crate) fn to(&self, message_id: u32, raw: &[u8]) -> Option<&[Vec<u8>]> {
        (self.message_id == message_id && self.digest == sha1(raw)).then_some(&self.datagrams)
    }
}

impl Inbound {
    /// The response to give again, if `raw` is the last request again.
    pub(crate) fn cached(&self, message_id: u32, raw: &[u8]) -> Option<&[Vec<u8>]> {
        self.last.as_ref()?.to(message_id, raw)
    }
}

/// How long to wait after the n-th transmission of a request, the first being number 0.
pub(crate) fn retransmit_delay(settings: &Settings, rng: &mut Rng, tries: u32) -> Duration {
    let mut millis = u64::try_from(settings.retransmit_timeout.as_millis()).unwrap_or(u64::MAX);
    let limit = u64::try_from(settings.retransmit_limit.as_millis()).unwrap_or(u64::MAX);
    for _ in 0..tries {
        millis = millis.saturating_mul(u64::from(settings.retransmit_base_milli)) / 1000;
        // An absurd base must not overflow a moment in time.
        millis = millis.min(7 * 24 * 3600 * 1000);
    }
    if limit != 0 {
        millis = millis.min(limit);
    }
    let jitter = millis.saturating_mul(u64::from(settings.retransmit_jitter.min(100))) / 100;
    millis -= rng.below(jitter.saturating_add(1)).min(millis);
    Duration::from_millis(millis.max(1))
}

/// The exchange as counters name it.
pub(crate) fn counted(exchange: ExchangeType) -> Option<Exchange> {
    match exchange {
        ExchangeType::IkeSaInit => Some(Exchange::IkeSaInit),
        ExchangeType::IkeAuth => Some(Exchange::IkeAuth),
        ExchangeType::CreateChildSa => Some(Exchange::CreateChildSa),
        ExchangeType::Informational => Some(Exchange::Informational),
        _ => None,
    }
}

impl IkeSa {
    /// The header of a message of this IKE SA.
    pub(crate) fn header(&self, exchange: ExchangeType, message_id: u32, response: bool) -> Header {
        Header {
            spi_i: self.spi_i,
            spi_r: self.spi_r,
            exchange,
            flags: Flags {
                initiator: self.initiator,
                response,
                higher_version: false,
            },
            message_id,
        }
    }

    /// Sends a protected request. False if it could not be made; the SA has failed then.
    pub(crate) fn send_request(
        &mut self,
        env: &mut Env,
        now: Now,
        exchange: ExchangeType,
        payloads: &[Payload],
    ) -> bool {
        let message_id = self.outbound.next_id;
        let header = self.header(exchange, message_id, false);
        self.log_sending(env, header, payloads);
        match self.seal(env, &header, payloads) {
            Ok(datagrams) => {
                self.launch(env, now, exchange, datagrams);
                true
            }
            Err(error) => {
                self.fail(
                    env,
                    now,
                    FailureReason::PeerMisbehaved,
                    format!("{exchange} request could not be written: {error}"),
                );
                false
            }
        }
    }

    fn log_sending(&self, env: &mut Env, header: Header, payloads: &[Payload]) {
        let shown = Message {
            header,
            payloads: payloads.to_vec(),
        };
        self.log(env, LogGroup::Enc, 1, format!("sending {shown}"));
    }

    /// Sends the datagrams of a new request, and goes on sending them until there is a response.
    pub(crate) fn launch(
        &mut self,
        env: &mut Env,
        now: Now,
        exchange: ExchangeType,
        datagrams: Vec<Vec<u8>>,
    ) {
        let message_id = self.outbound.next_id;
        self.outbound.next_id = message_id.wrapping_add(1);
        self.transmit(env, now, &datagrams);
        self.count_message(env, exchange, false, false);
        self.outbound.in_flight = Some(InFlight {
            message_id,
            exchange,
            datagrams,
            tries: 0,
        });
        let delay = retransmit_delay(&env.settings, &mut env.rng, 0);
        self.timers.set(Timer::Retransmit, now.instant + delay);
    }

    /// Answers the request that is being worked on.
    pub(crate) fn send_response(&mut self, env: &mut Env, now: Now, payloads: &[Payload]) {
        let Some((message_id, exchange)) = self.inbound.processing else {
            return;
        };
        let header = self.header(exchange, message_id, true);
        self.log_sending(env, header, payloads);
        match self.seal(env, &header, payloads) {
            Ok(datagrams) => self.respond(env, now, datagrams),
            Err(error) => self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("{exchange} response could not be written: {error}"),
            ),
        }
    }

    /// Sends the datagrams of a response and keeps them for retransmitted requests.
    pub(crate) fn respond(&mut self, env: &mut Env, now: Now, datagrams: Vec<Vec<u8>>) {
        let Some((message_id, exchange)) = self.inbound.processing.take() else {
            return;
        };
        self.timers.stop(Timer::Passive);
        self.transmit(env, now, &datagrams);
        self.count_message(env, exchange, false, true);
        self.inbound.expected_id = message_id.wrapping_add(1);
        self.inbound.last = Some(Answered::new(message_id, self.inbound.current, datagrams));
    }

    /// The response that is in the cache, once more.
    pub(crate) fn respond_again(&mut self, env: &mut Env, now: Now) {
        let Some(last) = self.inbound.last.take() else {
            return;
        };
        self.transmit(env, now, &last.datagrams);
        self.inbound.last = Some(last);
        env.count(self.connection_name(), Counter::RetransmitReceived);
    }

    /// The request in flight is overdue.
    pub(crate) fn retransmit(&mut self, env: &mut Env, now: Now) {
        let Some(mut flight) = self.outbound.in_flight.take() else {
            return;
        };
        if flight.tries >= env.settings.retransmit_tries {
            let text = format!(
                "{} gave no answer to {} request {} after {} retransmissions",
                self.remote, flight.exchange, flight.message_id, flight.tries
            );
            env.count(self.connection_name(), Counter::PeerTimeout);
            env.event(Event::Alert {
                kind: "retransmit-send-timeout",
                sa: Some(Box::new(self.info_without_children())),
            });
            self.peer_timed_out(env, now, text);
            return;
        }
        flight.tries += 1;
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!(
                "sending {} request {} to {} again (retransmission {} of {})",
                flight.exchange,
                flight.message_id,
                self.remote,
                flight.tries,
                env.settings.retransmit_tries
            ),
        );
        env.count(self.connection_name(), Counter::Retransmit);
        env.event(Event::Alert {
            kind: "retransmit-send",
            sa: Some(Box::new(self.info_without_children())),
        });
        self.transmit(env, now, &flight.datagrams);
        let delay = retransmit_delay(&env.settings, &mut env.rng, flight.tries);
        self.timers.set(Timer::Retransmit, now.instant + delay);
        self.outbound.in_flight = Some(flight);
    }

    /// The response came.
    pub(crate) fn landed(&mut self) {
        self.outbound.in_flight = None;
        self.timers.stop(Timer::Retransmit);
    }

    pub(crate) fn transmit(&mut self, env: &mut Env, now: Now, datagrams: &[Vec<u8>]) {
        self.last_outbound = now.instant;
        let dscp = self.conn.as_ref().map_or(0, |conn| conn.dscp);
        for payload in datagrams {
            env.actions.push_back(Action::Transmit(Transmit {
                local: self.local,
                remote: self.remote,
                payload: payload.clone(),
                dscp,
                keepalive: false,
            }));
        }
    }

    pub(crate) fn count_message(
        &self,
        env: &mut Env,
        exchange: ExchangeType,
        inbound: bool,
        response: bool,
    ) {
        if let Some(exchange) = counted(exchange) {
            env.count(
                self.connection_name(),
                Counter::Message {
                    exchange,
                    inbound,
                    response,
                },
            );
        }
    }

    fn seal(
        &mut self,
        env: &mut Env,
        header: &Header,
        payloads: &[Payload],
    ) -> Result<Vec<Vec<u8>>, super::protect::ProtectError> {
        use swanherd_config::model::Fragmentation;
        let rule = self
            .conn
            .as_ref()
            .map_or(Fragmentation::Yes, |c| c.fragmentation);
        let fragment = match rule {
            Fragmentation::Force => true,
            Fragmentation::Yes => self.peer.fragmentation,
            Fragmentation::Accept | Fragmentation::No => false,
        };
        let marker = self.remote.port() != 500;
        let max_len = fragment
            .then(|| max_message_len(env.settings.fragment_size, self.remote.is_ipv4(), marker));
        let Some(protection) = self.protection.as_mut() else {
            return Err(crate::crypto::CryptoError::KeyLength.into());
        };
        protection.seal(header, payloads, max_len, &mut env.rng)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retransmission_backs_off_as_strongswan_does() {
        let settings = Settings::default();
        let mut rng = Rng::new([0; 32]);
        let millis: Vec<u128> = (0..6)
            .map(|tries| retransmit_delay(&settings, &mut rng, tries).as_millis())
            .collect();

        assert_eq!(millis, [4000, 7200, 12_960, 23_328, 41_990, 75_582]);
    }
}
