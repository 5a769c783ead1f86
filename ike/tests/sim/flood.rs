// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Floods of first messages, and answers to messages that belong to nothing.
//!
//! `SWANHERD_LONG=1` floods with a hundred thousand messages.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use swanherd_config::model::{Connection, HostSpec};
use swanherd_ike::api::{
    Action, CommandId, Counter, Datagram, DropReason, IkeState, Now, Settings, Transmit,
};
use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_ike::wire::{
    ExchangeType, Flags, Header, KePayload, Message, NoncePayload, NotifyPayload, NotifyType,
    Payload, SaPayload, SaProposal,
};
use swanherd_ipsec::registry::KeyExchangeId;

use crate::config::{child, ike_proposal, network, pair, psk, round};
use crate::net::SimRng;
use crate::world::World;

const PEERS: usize = 30;
/// How long the flood lasts.
const FLOOD: Duration = Duration::from_secs(10);

#[test]
fn thirty_peers_return_in_their_normal_time_through_a_flood_from_everywhere() {
    let usual = return_of_all(0, &mut |_, _| unreachable!("no flood"));
    let flooded = return_of_all(messages(), &mut |rng, _| {
        let [a, b, c, ..] = rng.next().to_be_bytes();
        IpAddr::from([11, a, b, c])
    });

    // A cookie costs one round trip, which the simulated network makes in a tenth of a second.
    assert!(
        flooded <= usual + Duration::from_millis(200),
        "{flooded:?} instead of {usual:?}"
    );
}

#[test]
fn thirty_peers_return_through_a_flood_in_their_own_name() {
    let usual = return_of_all(0, &mut |_, _| unreachable!("no flood"));
    let flooded = return_of_all(messages(), &mut |rng, peers| {
        peers[usize::try_from(rng.next() % PEERS as u64).unwrap()]
    });

    assert!(
        flooded <= usual + Duration::from_millis(200),
        "{flooded:?} instead of {usual:?}"
    );
}

fn messages() -> u32 {
    if std::env::var_os("SWANHERD_LONG").is_some_and(|value| value != "0") {
        100_000
    } else {
        10_000
    }
}

/// Has thirty peers connect at the same time, through that many forged messages, and tells how
/// long it took until the last one was up.
fn return_of_all(
    messages: u32,
    source: &mut dyn FnMut(&mut SimRng, &[IpAddr]) -> IpAddr,
) -> Duration {
    let mut world = World::with(700, Settings::default(), Provider::fake());
    let gateway = world.add_host(
        "gateway",
        "198.18.0.1",
        Settings::default(),
        Provider::fake(),
    );
    let mut addrs = Vec::new();
    let mut peers = Vec::new();
    // One for clients anywhere, or the messages of strangers would be refused without ado.
    let (_, mut open) = connections(PEERS, "192.0.2.1");
    open.remote_addrs = vec![HostSpec::Any(None)];
    world.load(gateway, &psk(), open);
    for index in 0..PEERS {
        let addr = format!("198.18.1.{}", index + 1);
        let name: &'static str = Box::leak(format!("peer{index}").into_boxed_str());
        let peer = world.add_host(name, &addr, Settings::default(), Provider::fake());
        let (at_peer, at_gateway) = connections(index, &addr);
        world.load(peer, &psk(), at_peer);
        world.load(gateway, &psk(), at_gateway);
        addrs.push(addr.parse().unwrap());
        peers.push(peer);
    }
    let mut rng = SimRng::new(9);
    let begin = world.now.instant;
    let mut most = 0;
    let waves = 100;
    let mut commands: Vec<(usize, CommandId)> = Vec::new();
    let mut up: BTreeMap<usize, Instant> = BTreeMap::new();
    for wave in 0..waves {
        for _ in 0..messages / waves {
            let from = source(&mut rng, &addrs);
            let datagram = Datagram {
                local: SocketAddr::new(world.host(gateway).addr, 500),
                remote: SocketAddr::new(from, 500),
                payload: init_request(&mut rng),
            };
            world.inject(gateway, datagram);
        }
        if wave == waves / 4 {
            commands = peers
                .iter()
                .map(|peer| (*peer, world.initiate(*peer, "net")))
                .collect();
        }
        most = most.max(world.host(gateway).endpoint.half_open());
        world.run_for(FLOOD / waves);
        note_who_is_up(&world, &commands, &mut up);
    }
    world.run_until(Duration::from_secs(60), |world| {
        note_who_is_up(world, &commands, &mut up);
        up.len() == PEERS
    });

    assert_eq!(up.len(), PEERS, "some peers stayed out");
    assert_eq!(world.host(gateway).count(IkeState::Established), PEERS);
    assert!(most <= 3 * PEERS, "{most} half-open IKE SAs");
    if messages > 0 {
        let gateway = world.host(gateway);
        let demanded = gateway.counted(Counter::Dropped(DropReason::CookieDemanded));
        assert!(demanded > messages as usize / 2, "{demanded} cookies");
    }
    world.run_for(Duration::from_secs(60));
    assert_eq!(world.host(gateway).endpoint.half_open(), 0);
    assert_eq!(world.host(gateway).ike_sas().len(), PEERS);
    *up.values().max().unwrap() - begin - FLOOD / waves * (waves / 4)
}

fn note_who_is_up(
    world: &World,
    commands: &[(usize, CommandId)],
    up: &mut BTreeMap<usize, Instant>,
) {
    for (peer, command) in commands {
        if !up.contains_key(peer) && world.host(*peer).result(*command) == Some(Ok(())) {
            up.insert(*peer, world.now.instant);
        }
    }
}

fn connections(index: usize, addr: &str) -> (Connection, Connection) {
    let (mut at_peer, mut at_gateway) = pair();
    let id = format!("peer{index}.example");
    let net = format!("10.200.{index}.0/24");
    at_peer.remote_addrs = vec![HostSpec::Addr("198.18.0.1".parse().unwrap())];
    at_peer.local = vec![round("local", at_peer.local[0].auth.clone(), &id)];
    at_peer.children = vec![child("net", &net, "10.2.0.0/16")];
    at_gateway.name = format!("peer{index}");
    at_gateway.remote_addrs = vec![HostSpec::Addr(addr.parse().unwrap())];
    at_gateway.remote = vec![round("remote", at_gateway.remote[0].auth.clone(), &id)];
    at_gateway.children = vec![child("net", "10.2.0.0/16", &net)];
    assert_eq!(network(&net).prefix_len(), Some(24));
    (at_peer, at_gateway)
}

/// A first message that the gateway would accept.
fn init_request(rng: &mut SimRng) -> Vec<u8> {
    init_request_with(rng, KeyExchangeId::Curve25519, Vec::new())
}

fn init_request_with(rng: &mut SimRng, ke: KeyExchangeId, extra: Vec<Payload>) -> Vec<u8> {
    let mut payloads = extra;
    payloads.extend([
        Payload::Sa(SaPayload {
            proposals: vec![SaProposal {
                number: 1,
                spi: Vec::new(),
                proposal: ike_proposal(&[KeyExchangeId::Curve25519]),
            }],
        }),
        Payload::Ke(KePayload {
            method: ke,
            data: vec![7; 32],
        }),
        Payload::Nonce(NoncePayload::new(rng.seed().to_vec()).unwrap()),
    ]);
    let header = Header {
        spi_i: rng.next() | 1,
        spi_r: 0,
        exchange: ExchangeType::IkeSaInit,
        flags: Flags {
            initiator: true,
            ..Flags::default()
        },
        message_id: 0,
    };
    Message { header, payloads }.emit().unwrap()
}

/// An endpoint that expects Alice, and what it answers to a stranger.
struct Lonely {
    endpoint: Endpoint,
    now: Now,
    withheld: usize,
}

impl Lonely {
    fn new() -> Self {
        let world = World::new(701);
        let mut endpoint = Endpoint::new(Settings::default(), Provider::fake(), [9; 32]);
        let (_, bob) = pair();
        endpoint.set_credentials(std::sync::Arc::new(psk()));
        endpoint.load_connection(world.now, std::sync::Arc::new(bob));
        Self {
            endpoint,
            now: world.now,
            withheld: 0,
        }
    }

    fn tell(&mut self, from: &str, payload: Vec<u8>) -> Vec<Message> {
        let datagram = Datagram {
            local: "198.51.100.1:500".parse().unwrap(),
            remote: from.parse().unwrap(),
            payload,
        };
        self.endpoint.handle_datagram(self.now, datagram);
        let mut answers = Vec::new();
        while let Some(action) = self.endpoint.poll_action() {
            match action {
                Action::Transmit(Transmit { payload, .. }) => {
                    answers.push(Message::parse(&payload).unwrap());
                }
                Action::Event(swanherd_ike::api::Event::Counter {
                    counter: Counter::AnswerWithheld,
                    ..
                }) => self.withheld += 1,
                _ => {}
            }
        }
        answers
    }
}

fn notifies(answers: &[Message]) -> Vec<NotifyType> {
    let payloads = answers.iter().flat_map(|message| &message.payloads);
    payloads
        .map(|payload| match payload {
            Payload::Notify(notify) => notify.notify_type,
            other => panic!("{other} is no notify"),
        })
        .collect()
}

fn informational(response: bool) -> Header {
    Header {
        spi_i: 11,
        spi_r: 12,
        exchange: ExchangeType::Informational,
        flags: Flags {
            initiator: true,
            response,
            ..Flags::default()
        },
        message_id: 7,
    }
}

#[test]
fn a_request_for_an_unknown_ike_sa_is_answered_and_a_response_never() {
    let mut bob = Lonely::new();
    let message = |response| Message {
        header: informational(response),
        payloads: Vec::new(),
    };

    let answers = bob.tell("203.0.113.9:500", message(false).emit().unwrap());
    assert_eq!(notifies(&answers), [NotifyType::InvalidIkeSpi]);
    let header = answers[0].header;
    assert_eq!((header.spi_i, header.spi_r, header.message_id), (11, 12, 7));
    assert_eq!(header.exchange, ExchangeType::Informational);
    assert!(header.flags.response && !header.flags.initiator);

    assert!(
        bob.tell("203.0.113.9:500", message(true).emit().unwrap())
            .is_empty()
    );
    let answer = answers[0].emit().unwrap();
    assert!(bob.tell("203.0.113.9:500", answer).is_empty());
}

#[test]
fn a_higher_version_is_told_ours_and_a_lower_one_nothing() {
    let mut bob = Lonely::new();
    let mut rng = SimRng::new(1);
    let mut request = init_request(&mut rng);

    request[17] = 0x30;
    let answers = bob.tell("203.0.113.9:500", request.clone());
    assert_eq!(notifies(&answers), [NotifyType::InvalidMajorVersion]);
    assert_eq!(answers[0].emit().unwrap()[17], 0x20);
    request[17] = 0x10;
    assert!(bob.tell("203.0.113.9:500", request.clone()).is_empty());
    // A minor version that is not known yet is accepted.
    request[17] = 0x2f;
    assert!(bob.tell("192.0.2.1:500", request).is_empty());
    assert_eq!(bob.endpoint.half_open(), 1);
}

#[test]
fn an_unknown_critical_payload_is_refused_and_one_that_is_not_critical_ignored() {
    for (critical, expected) in [(true, 0), (false, 1)] {
        let mut bob = Lonely::new();
        let mut rng = SimRng::new(2);
        let mut request = init_request(&mut rng);
        // Put a payload of an unknown type in front.
        let first = std::mem::replace(&mut request[16], 200);
        let unknown = [first, if critical { 0x80 } else { 0 }, 0, 8, 1, 2, 3, 4];
        request.splice(28..28, unknown);
        let len = u32::try_from(request.len()).unwrap();
        request[24..28].copy_from_slice(&len.to_be_bytes());

        let answers = bob.tell("192.0.2.1:500", request);
        assert_eq!(bob.endpoint.half_open(), expected, "critical: {critical}");
        if critical {
            let Payload::Notify(notify) = &answers[0].payloads[0] else {
                panic!("no notify");
            };
            let kind = NotifyType::UnsupportedCriticalPayload;
            assert_eq!(
                (notify.notify_type, notify.data.as_slice()),
                (kind, &[200][..])
            );
        }
    }
}

#[test]
fn answers_to_one_origin_and_to_all_are_bounded_and_counted() {
    let mut bob = Lonely::new();
    let request = Message {
        header: informational(false),
        payloads: Vec::new(),
    }
    .emit()
    .unwrap();

    let mut to_one = 0;
    for _ in 0..1000 {
        to_one += bob.tell("203.0.113.9:500", request.clone()).len();
    }
    assert_eq!((to_one, bob.withheld), (10, 990));
    let mut to_all = 0;
    for index in 0..10_000_u32 {
        let [_, b, c, d] = index.to_be_bytes();
        to_all += bob
            .tell(&format!("11.{b}.{c}.{d}:500"), request.clone())
            .len();
    }
    assert_eq!(to_one + to_all, 400);
    bob.now = bob.now.after(Duration::from_secs(1));
    assert_eq!(bob.tell("203.0.113.9:500", request).len(), 1);
}

#[test]
fn whoever_returns_a_cookie_learns_the_key_exchange_however_many_are_refused() {
    let mut bob = Lonely::new();
    let mut rng = SimRng::new(3);
    let wrong = |rng: &mut SimRng, extra| init_request_with(rng, KeyExchangeId::Ecp256, extra);
    for _ in 0..1000 {
        let request = wrong(&mut rng, Vec::new());
        bob.tell("192.0.2.1:500", request);
    }

    // Alice, in whose name the others asked.
    let mut nonce_and_spi = SimRng::new(44);
    let request = wrong(&mut nonce_and_spi.clone(), Vec::new());
    let answers = bob.tell("192.0.2.1:500", request);
    assert_eq!(notifies(&answers), [NotifyType::Cookie]);
    let cookie = answers[0].notify(NotifyType::Cookie).unwrap().data.clone();
    let cookie = Payload::Notify(NotifyPayload::new(NotifyType::Cookie, cookie));
    let request = wrong(&mut nonce_and_spi, vec![cookie]);
    let answers = bob.tell("192.0.2.1:500", request);
    assert_eq!(notifies(&answers), [NotifyType::InvalidKePayload]);
}

#[test]
fn a_repeated_first_message_is_answered_within_bounds() {
    let mut bob = Lonely::new();
    let mut rng = SimRng::new(4);
    let request = init_request(&mut rng);
    bob.tell("192.0.2.1:500", request.clone());
    let mut answers = 0;
    for _ in 0..5000 {
        answers += bob.tell("192.0.2.1:500", request.clone()).len();
    }
    // The computation is never done here, so there is no response to repeat, and one SA only.
    assert_eq!((answers, bob.endpoint.half_open()), (0, 1));
}
