// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Message ids, retransmission and the response cache, with a window of 1 in each direction
//! (RFC 7296 sections 2.1 to 2.3).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::IkeSa;
use super::env::Env;
use super::protect::{ProtectError, max_message_len, smaller_packet};
use super::timers::Timer;
use crate::api::{
    Action, Counter, Event, Exchange, FailureReason, LogGroup, Now, Settings, Transmit,
};
use crate::crypto::Rng;
use crate::crypto::hash::sha1;
use crate::wire::{ExchangeType, Flags, Header, Message, Payload};

/// Requests of this side.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Outbound {
    /// Id of the next request.
    pub(crate) next_id: u32,
    /// The request that awaits its response.
    pub(crate) in_flight: Option<InFlight>,
}

/// A request that awaits its response.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct InFlight {
    pub(crate) message_id: u32,
    pub(crate) exchange: ExchangeType,
    sealed: Sealed,
    /// Retransmissions made so far.
    pub(super) tries: u32,
}

/// A message as it goes out.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Sealed {
    datagrams: Vec<Vec<u8>>,
    /// What is inside, if it may be cut into smaller fragments (RFC 7383 section 2.5.2).
    inside: Option<Vec<Payload>>,
}

impl Sealed {
    /// One that always goes out as it is.
    pub(crate) fn fixed(datagrams: Vec<Vec<u8>>) -> Self {
        Self {
            datagrams,
            inside: None,
        }
    }
}

/// Between which own and which peer's address and port a message travels.
pub(crate) type Path = (SocketAddr, SocketAddr);

/// How long the response to CREATE_CHILD_SA may be on its way. A peer that has not received it asks
/// again within this time, twice by the usual settings; and the longer it has been asking, the less
/// often.
const SETTLING: Duration = Duration::from_secs(12);

/// Transmissions after which a path is suspected of losing messages for their length.
const LONG_AND_LOST: u32 = 2;

/// Requests of the peer.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Inbound {
    /// Id of the next request.
    pub(crate) expected_id: u32,
    /// The request that is being worked on.
    pub(crate) processing: Option<(u32, ExchangeType)>,
    /// Digest of the first datagram of the request that is being worked on.
    pub(crate) current: [u8; 20],
    /// When the last request came.
    pub(crate) asked: Option<Instant>,
    /// How it came, own address first: its response goes back that way (RFC 7296 section 2.11).
    pub(crate) path: Option<Path>,
    /// The last request and what it was answered.
    pub(crate) last: Option<Answered>,
    /// Until then the peer may not have received the response to its CREATE_CHILD_SA, unless it
    /// sends another request: to the peer, that exchange is still under way.
    pub(crate) unsettled: Option<Instant>,
}

/// A request of the peer's and the response that it got.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Answered {
    message_id: u32,
    exchange: ExchangeType,
    digest: [u8; 20],
    sealed: Sealed,
    /// How often it was given again.
    repeats: u32,
}

impl Answered {
    /// `digest` is that of the request's first datagram.
    pub(crate) fn new(
        message_id: u32,
        exchange: ExchangeType,
        digest: [u8; 20],
        sealed: Sealed,
    ) -> Self {
        Self {
            message_id,
            exchange,
            digest,
            sealed,
            repeats: 0,
        }
    }

    /// The response, if `raw` is the request again.
    pub(crate) fn to(&self, message_id: u32, raw: &[u8]) -> Option<&[Vec<u8>]> {
        (self.message_id == message_id && self.digest == sha1(raw))
            .then_some(&self.sealed.datagrams)
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
            Ok(sealed) => {
                self.launch(env, now, exchange, sealed);
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
        sealed: Sealed,
    ) {
        let message_id = self.outbound.next_id;
        self.outbound.next_id = message_id.wrapping_add(1);
        self.transmit(env, now, &sealed.datagrams, (self.local, self.remote));
        self.count_message(env, exchange, false, false);
        self.outbound.in_flight = Some(InFlight {
            message_id,
            exchange,
            sealed,
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
            Ok(sealed) => self.respond(env, now, sealed),
            Err(error) => self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("{exchange} response could not be written: {error}"),
            ),
        }
    }

    /// Sends the datagrams of a response and keeps them for retransmitted requests.
    pub(crate) fn respond(&mut self, env: &mut Env, now: Now, sealed: Sealed) {
        let Some((message_id, exchange)) = self.inbound.processing.take() else {
            return;
        };
        self.timers.stop(Timer::Passive);
        let path = self.inbound.path.unwrap_or((self.local, self.remote));
        self.transmit(env, now, &sealed.datagrams, path);
        self.count_message(env, exchange, false, true);
        self.inbound.expected_id = message_id.wrapping_add(1);
        let digest = self.inbound.current;
        self.inbound.last = Some(Answered::new(message_id, exchange, digest, sealed));
        self.unsettle(now, exchange);
    }

    /// A response has been sent, the first time or again.
    fn unsettle(&mut self, now: Now, exchange: ExchangeType) {
        let asked = self.inbound.asked.unwrap_or(now.instant);
        let since = now.instant.saturating_duration_since(asked);
        self.inbound.unsettled =
            (exchange == ExchangeType::CreateChildSa).then(|| now.instant + SETTLING + since);
    }

    /// The response that is in the cache, once more. A peer that goes on asking has not received
    /// it, which may be for its length.
    pub(crate) fn respond_again(&mut self, env: &mut Env, now: Now) {
        let Some(mut last) = self.inbound.last.take() else {
            return;
        };
        last.repeats = last.repeats.saturating_add(1);
        if last.repeats >= LONG_AND_LOST {
            let header = self.header(last.exchange, last.message_id, true);
            self.cut_smaller(env, &header, &mut last.sealed);
        }
        let path = self.inbound.path.unwrap_or((self.local, self.remote));
        self.transmit(env, now, &last.sealed.datagrams, path);
        self.unsettle(now, last.exchange);
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
        if flight.tries >= LONG_AND_LOST {
            let header = self.header(flight.exchange, flight.message_id, false);
            self.cut_smaller(env, &header, &mut flight.sealed);
        }
        let first = flight.tries == 1;
        let delay = retransmit_delay(&env.settings, &mut env.rng, flight.tries);
        self.timers.set(Timer::Retransmit, now.instant + delay);
        self.outbound.in_flight = Some(flight);
        self.send_in_flight(env, now, (self.local, self.remote));
        self.probe_other_paths(env, now, first);
    }

    /// Sends the request in flight, over any path.
    pub(crate) fn send_in_flight(&mut self, env: &mut Env, now: Now, path: Path) {
        if let Some(flight) = self.outbound.in_flight.take() {
            self.transmit(env, now, &flight.sealed.datagrams, path);
            self.outbound.in_flight = Some(flight);
        }
    }

    /// Sends the request in flight over a path that is new, and gives it the time of a new one.
    pub(crate) fn relaunch(&mut self, env: &mut Env, now: Now) {
        let Some(flight) = self.outbound.in_flight.as_mut() else {
            return;
        };
        flight.tries = 0;
        let delay = retransmit_delay(&env.settings, &mut env.rng, 0);
        self.timers.set(Timer::Retransmit, now.instant + delay);
        self.send_in_flight(env, now, (self.local, self.remote));
    }

    /// The host could not send a message of this length: sends it again in smaller pieces.
    pub(crate) fn too_long(&mut self, env: &mut Env, now: Now, header: &Header) {
        if header.flags.response {
            let last = self.inbound.last.as_mut();
            if last.is_some_and(|last| last.message_id == header.message_id)
                && let Some(mut last) = self.inbound.last.take()
            {
                if self.cut_smaller(env, header, &mut last.sealed) {
                    let path = self.inbound.path.unwrap_or((self.local, self.remote));
                    self.transmit(env, now, &last.sealed.datagrams, path);
                }
                self.inbound.last = Some(last);
            }
            return;
        }
        let in_flight = self.outbound.in_flight.as_ref();
        if in_flight.is_some_and(|flight| flight.message_id == header.message_id)
            && let Some(mut flight) = self.outbound.in_flight.take()
        {
            let smaller = self.cut_smaller(env, header, &mut flight.sealed);
            self.outbound.in_flight = Some(flight);
            if smaller {
                self.send_in_flight(env, now, (self.local, self.remote));
            }
        }
    }

    /// Cuts a message into smaller fragments than before, if it can be, and the following ones,
    /// too. Whether it did.
    fn cut_smaller(&mut self, env: &mut Env, header: &Header, sealed: &mut Sealed) -> bool {
        let Some(inside) = &sealed.inside else {
            return false;
        };
        let ipv4 = self.remote.is_ipv4();
        let longest = sealed.datagrams.iter().map(Vec::len).max().unwrap_or(0);
        let mut packet = self.packet_len(env);
        // What already is shorter than the next smaller size would not change.
        loop {
            let Some(next) = smaller_packet(packet, ipv4) else {
                return false;
            };
            packet = next;
            if longest > max_message_len(packet, ipv4, self.remote.port() != 500) {
                break;
            }
        }
        self.packet = Some(packet);
        let Ok(again) = self.seal(env, header, inside) else {
            return false;
        };
        self.log(
            env,
            LogGroup::Net,
            1,
            format!(
                "messages of {longest} octets seem to get lost on the way to {}; packets have at \
                 most {packet} octets from now on",
                self.remote.ip()
            ),
        );
        *sealed = again;
        true
    }

    /// The longest IP packet for a message that can be fragmented.
    fn packet_len(&self, env: &Env) -> u32 {
        let configured = env.settings.fragment_size;
        match self.packet {
            Some(packet) if configured == 0 || packet < configured => packet,
            _ => configured,
        }
    }

    /// The response came.
    pub(crate) fn landed(&mut self) {
        self.outbound.in_flight = None;
        self.mobility.forget_probes();
        self.timers.stop(Timer::Retransmit);
    }

    pub(crate) fn transmit(
        &mut self,
        env: &mut Env,
        now: Now,
        datagrams: &[Vec<u8>],
        (local, remote): Path,
    ) {
        self.last_outbound = now.instant;
        let dscp = self.conn.as_ref().map_or(self.dscp, |conn| conn.dscp);
        for payload in datagrams {
            env.actions.push_back(Action::Transmit(Transmit {
                local,
                remote,
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
    ) -> Result<Sealed, ProtectError> {
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
        let (ipv4, marker) = (self.remote.is_ipv4(), self.remote.port() != 500);
        let packet = self.packet_len(env);
        let max_len = fragment.then(|| max_message_len(packet, ipv4, marker));
        let Some(protection) = self.protection.as_mut() else {
            return Err(crate::crypto::CryptoError::KeyLength.into());
        };
        let datagrams = protection.seal(header, payloads, max_len, &mut env.rng)?;
        let smallest = max_message_len(0, ipv4, marker);
        let divisible = fragment && datagrams.iter().any(|datagram| datagram.len() > smallest);
        Ok(Sealed {
            datagrams,
            inside: divisible.then(|| payloads.to_vec()),
        })
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

    #[test]
    fn the_limit_of_retransmission_delays_holds_and_chance_shortens_them() {
        let settings = Settings {
            retransmit_limit: Duration::from_secs(20),
            retransmit_jitter: 20,
            ..Settings::default()
        };
        let mut rng = Rng::new([0; 32]);
        for (tries, longest) in [(0, 4000), (2, 12_960), (3, 20_000), (100, 20_000)] {
            let millis: Vec<u128> = (0..200)
                .map(|_| retransmit_delay(&settings, &mut rng, tries).as_millis())
                .collect();
            assert!(
                millis
                    .iter()
                    .all(|n| (longest * 4 / 5..=longest).contains(n))
            );
            assert!(millis.iter().any(|n| *n < longest * 17 / 20));
            assert!(millis.iter().any(|n| *n > longest * 19 / 20));
        }
    }
}
