// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Redirects, and what of MOBIKE only a peer that misbehaves shows.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use super::harness::{ALICE, BOB, Pair, alice, assert_tunnel, bob};
use crate::api::{Command, CommandId, Datagram, IkeState, Settings};
use crate::sa::{Active, Task};
use crate::wire::{
    ExchangeType, Flags, Gateway, Header, Message, NotifyPayload, NotifyType, Payload, Redirect,
};

/// Where Bob can be reached as well.
const CAROL: &str = "192.0.2.3";

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Both know each other, at whatever address.
fn loaded(settings: Settings) -> Pair {
    let mut pair = Pair::with(settings, Settings::default());
    let mut bob = bob();
    bob.local_addrs = Vec::new();
    pair.load(alice(), bob);
    pair
}

fn up() -> Pair {
    let mut pair = loaded(Settings::default());
    let command = pair.initiate("gw", "net");
    assert_eq!(pair.alice.done(command), Some(Ok(())));
    pair
}

/// Lets Alice begin, but nobody answers at [`BOB`]; the request.
fn begin(pair: &mut Pair) -> (CommandId, Datagram) {
    let seen = Rc::new(RefCell::new(None));
    let note = Rc::clone(&seen);
    pair.filter = Box::new(move |to_bob, datagram| {
        let lost = to_bob && datagram.local.ip() == addr(BOB);
        if lost {
            *note.borrow_mut() = Some(datagram.clone());
        }
        !lost
    });
    let command = pair.initiate("gw", "net");
    let request = seen.borrow().clone().expect("Alice calls Bob");
    (command, request)
}

/// An answer to IKE_SA_INIT that sends Alice to `gateway`.
fn send_away(pair: &mut Pair, request: &Datagram, gateway: Gateway, nonce: Option<Vec<u8>>) {
    let asked = Message::parse(&request.payload).unwrap();
    let own = asked.payloads.iter().find_map(|payload| match payload {
        Payload::Nonce(nonce) => Some(nonce.as_slice().to_vec()),
        _ => None,
    });
    let redirect = Redirect {
        gateway,
        nonce: nonce.or(own).unwrap(),
    };
    let answer = Message {
        header: Header {
            flags: Flags {
                initiator: false,
                response: true,
                higher_version: false,
            },
            ..asked.header
        },
        payloads: vec![Payload::Notify(NotifyPayload::redirect(&redirect))],
    };
    let datagram = Datagram {
        local: request.remote,
        remote: request.local,
        payload: answer.emit().unwrap(),
    };
    let now = pair.now;
    pair.alice.endpoint.handle_datagram(now, datagram);
    pair.drive();
}

fn has(request: &Datagram, kind: NotifyType) -> bool {
    let message = Message::parse(&request.payload).unwrap();
    message.notify(kind).is_some()
}

#[test]
fn a_gateway_redirects_before_anything_is_agreed() {
    let mut pair = loaded(Settings::default());
    let (command, request) = begin(&mut pair);
    assert!(has(&request, NotifyType::RedirectSupported));
    assert!(!has(&request, NotifyType::RedirectedFrom));

    send_away(&mut pair, &request, Gateway::Addr(addr(CAROL)), None);

    assert_eq!(pair.alice.done(command), Some(Ok(())));
    assert_eq!(pair.alice.sa().remote.ip(), addr(CAROL));
    assert_ne!(
        pair.alice.sa().spi_i,
        Message::parse(&request.payload).unwrap().header.spi_i
    );
    assert_tunnel(&pair);
}

#[test]
fn the_new_gateway_is_told_who_redirected() {
    let mut pair = loaded(Settings::default());
    let (_, request) = begin(&mut pair);
    let second = Rc::new(RefCell::new(None));
    let note = Rc::clone(&second);
    pair.filter = Box::new(move |to_bob, datagram| {
        if to_bob {
            *note.borrow_mut() = Some(datagram.clone());
        }
        false
    });
    send_away(&mut pair, &request, Gateway::Addr(addr(CAROL)), None);
    let second = second.borrow().clone().unwrap();
    let message = Message::parse(&second.payload).unwrap();
    let from = message.notify(NotifyType::RedirectedFrom).unwrap();
    assert_eq!(from.data, [1, 4, 192, 0, 2, 2]);
}

#[test]
fn who_has_not_seen_the_request_redirects_nobody() {
    let mut pair = loaded(Settings::default());
    let (command, request) = begin(&mut pair);
    let gateway = Gateway::Addr(addr(CAROL));
    send_away(&mut pair, &request, gateway, Some(vec![0; 32]));
    assert_eq!(pair.alice.done(command), None);
    assert_eq!(pair.alice.sa().remote.ip(), addr(BOB));
}

#[test]
fn redirects_can_be_switched_off() {
    let mut pair = loaded(Settings {
        follow_redirects: false,
        ..Settings::default()
    });
    let (command, request) = begin(&mut pair);
    assert!(!has(&request, NotifyType::RedirectSupported));
    send_away(&mut pair, &request, Gateway::Addr(addr(CAROL)), None);
    assert_eq!(pair.alice.done(command), None);
    assert_eq!(pair.alice.sa().remote.ip(), addr(BOB));
}

#[test]
fn a_gateway_may_be_named_by_its_host_name() {
    let mut pair = loaded(Settings::default());
    let (command, request) = begin(&mut pair);
    pair.filter = Box::new(|_, _| true);
    let name = Gateway::Name("gw.example.org".to_owned());
    send_away(&mut pair, &request, name, None);
    assert_eq!(pair.alice.done(command), Some(Ok(())));
}

#[test]
fn gateways_that_redirect_in_a_circle_are_given_up() {
    let mut pair = loaded(Settings::default());
    let seen: Rc<RefCell<Vec<Datagram>>> = Rc::default();
    let note = Rc::clone(&seen);
    pair.filter = Box::new(move |to_bob, datagram| {
        if to_bob {
            note.borrow_mut().push(datagram.clone());
        }
        false
    });
    let command = pair.initiate("gw", "net");
    for round in 0..6 {
        let request = seen.borrow().last().cloned().unwrap();
        let gateway = if round % 2 == 0 { CAROL } else { BOB };
        send_away(&mut pair, &request, Gateway::Addr(addr(gateway)), None);
    }
    assert_eq!(seen.borrow().len(), 6);
    assert!(matches!(pair.alice.done(command), Some(Err(_))));
    assert!(pair.alice.sas().is_empty());
}

#[test]
fn a_gateway_redirects_once_both_sides_are_authenticated() {
    let mut pair = loaded(Settings::default());
    pair.bob.endpoint.env.redirects = Some(Gateway::Addr(addr(CAROL)));
    let command = pair.command(true, super::harness::initiate("gw", "net"));
    pair.filter = Box::new(|_, _| true);
    pair.drive();
    pair.bob.endpoint.env.redirects = None;
    pair.pass(Duration::from_secs(30));

    assert_eq!(pair.alice.done(command), Some(Ok(())));
    assert_eq!(pair.alice.sa().remote.ip(), addr(CAROL));
    assert_eq!(pair.bob.sas().len(), 1);
    assert_tunnel(&pair);
}

#[test]
fn a_gateway_that_goes_down_sends_its_peers_elsewhere() {
    let mut pair = up();
    let now = pair.now;
    let id = pair.bob.sa().id;
    let redirect = Redirect {
        gateway: Gateway::Addr(addr(CAROL)),
        nonce: Vec::new(),
    };
    pair.bob.endpoint.with(id, |sa, env| {
        let payloads = [Payload::Notify(NotifyPayload::redirect(&redirect))];
        assert!(sa.send_request(env, now, ExchangeType::Informational, &payloads));
        sa.active = Active::Probing;
    });
    pair.pass(Duration::from_secs(30));
    assert_eq!(pair.alice.sa().remote.ip(), addr(CAROL));
    assert_eq!(pair.bob.sas().len(), 1);
    assert_tunnel(&pair);
}

#[test]
fn nobody_redirects_a_gateway() {
    let mut pair = up();
    let now = pair.now;
    let id = pair.alice.sa().id;
    let redirect = Redirect {
        gateway: Gateway::Addr(addr(CAROL)),
        nonce: Vec::new(),
    };
    let before = pair.bob.sa().spi_i;
    pair.alice.endpoint.with(id, |sa, env| {
        let payloads = [Payload::Notify(NotifyPayload::redirect(&redirect))];
        assert!(sa.send_request(env, now, ExchangeType::Informational, &payloads));
        sa.active = Active::Probing;
    });
    pair.pass(Duration::from_secs(30));
    assert_eq!(pair.bob.sa().spi_i, before);
    assert_tunnel(&pair);
}

/// Alice tells Bob to use `remote` - her own address, with `more`.
fn alice_moves(pair: &mut Pair, remote: &str, more: Vec<Payload>) {
    let now = pair.now;
    let id = pair.alice.sa().id;
    pair.alice.endpoint.with(id, |sa, env| {
        sa.remote.set_ip(addr(remote));
        let update = NotifyPayload::new(NotifyType::UpdateSaAddresses, Vec::new());
        let mut payloads = vec![Payload::Notify(update)];
        payloads.extend(more);
        assert!(sa.send_request(env, now, ExchangeType::Informational, &payloads));
        sa.active = Active::Probing;
    });
    pair.drive();
}

fn bobs_answer(pair: &Pair, text: &str) -> bool {
    let logs = pair.alice.logs();
    logs.iter()
        .any(|line| line.starts_with("received") && line.contains(text))
}

#[test]
fn a_move_to_an_address_that_the_configuration_forbids_is_refused() {
    let mut pair = Pair::new();
    let mut bob = bob();
    bob.local_addrs = vec![swanherd_config::model::HostSpec::Addr(addr(BOB))];
    pair.load(alice(), bob);
    pair.initiate("gw", "net");

    alice_moves(&mut pair, CAROL, Vec::new());

    assert!(bobs_answer(&pair, "UNACCEPTABLE_ADDRESSES"));
    assert_eq!(pair.bob.sa().local.ip(), addr(BOB));
}

#[test]
fn a_move_that_must_not_pass_a_nat_is_followed_only_if_it_did_not() {
    let mut pair = up();
    let (local, remote) = (pair.alice.sa().local, pair.alice.sa().remote);
    let elsewhere = "192.0.2.77:4500".parse().unwrap();
    let wrong = NotifyPayload::no_nats_allowed(elsewhere, remote);
    alice_moves(&mut pair, CAROL, vec![Payload::Notify(wrong)]);
    assert!(bobs_answer(&pair, "UNEXPECTED_NAT_DETECTED"));
    assert_eq!(pair.bob.sa().local.ip(), addr(BOB));

    let carol = std::net::SocketAddr::new(addr(CAROL), remote.port());
    let right = NotifyPayload::no_nats_allowed(local, carol);
    alice_moves(&mut pair, CAROL, vec![Payload::Notify(right)]);
    assert_eq!(pair.bob.sa().local.ip(), addr(CAROL));
    assert_eq!(pair.bob.sa().remote.ip(), addr(ALICE));
}

#[test]
fn cookies_and_nat_detection_come_back_with_the_answer() {
    let mut pair = up();
    let now = pair.now;
    let id = pair.alice.sa().id;
    pair.alice.endpoint.with(id, |sa, env| {
        let notify = |kind, data| Payload::Notify(NotifyPayload::new(kind, data));
        let payloads = [
            notify(NotifyType::Cookie2, vec![7; 16]),
            notify(NotifyType::NatDetectionSourceIp, vec![1; 20]),
            notify(NotifyType::NatDetectionDestinationIp, vec![2; 20]),
        ];
        assert!(sa.send_request(env, now, ExchangeType::Informational, &payloads));
        sa.active = Active::Probing;
    });
    pair.drive();
    assert!(bobs_answer(&pair, "N(COOKIE2) N(NATD_S_IP) N(NATD_D_IP)"));
    // No other message than UPDATE_SA_ADDRESSES changes where Bob thinks that Alice is.
    assert!(!pair.bob.sa().nat_remote);
}

#[test]
fn a_peer_that_returns_another_cookie_is_dropped() {
    let mut pair = up();
    let now = pair.now;
    let id = pair.bob.sa().id;
    pair.bob.endpoint.with(id, |sa, env| {
        sa.remote.set_ip(addr("192.0.2.9"));
        sa.enqueue_first(Task::Prove);
        sa.proceed(env, now);
        let Active::Proving(proof) = std::mem::replace(&mut sa.active, Active::Idle) else {
            panic!("Bob asks for a proof");
        };
        let wrong = NotifyPayload::new(NotifyType::Cookie2, vec![0; 16]);
        sa.landed();
        sa.proof_answered(env, now, &proof, &[Payload::Notify(wrong)]);
    });
    pair.drive();
    let gone = pair
        .bob
        .sas()
        .iter()
        .all(|sa| sa.state != IkeState::Established);
    assert!(gone);
}

#[test]
fn commands_reach_an_ike_sa_that_has_moved() {
    let mut pair = up();
    alice_moves(&mut pair, CAROL, Vec::new());
    let selector = crate::api::Selector {
        ike: Some("gw".to_owned()),
        ..crate::api::Selector::default()
    };
    let force = false;
    let command = pair.command(false, Command::Terminate { selector, force });
    pair.drive();
    assert_eq!(pair.bob.done(command), Some(Ok(())));
    assert!(pair.alice.sas().is_empty());
}
