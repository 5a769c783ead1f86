// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The window, repeated messages, fragments, and what only a peer that has keys and no manners
//! sends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use super::harness::{Pair, alice, assert_tunnel, bob, child, connected, initiate, rekey};
use crate::api::{Datagram, IkeState};
use crate::sa::Active;
use crate::wire::{
    ExchangeType, Header, Message, NotifyPayload, NotifyType, Payload, PayloadType, SkfPayload,
    UnknownPayload,
};

/// A status notify that means nothing here, of that length.
fn filler(len: usize) -> Payload {
    Payload::Notify(NotifyPayload::new(50_000.into(), vec![0x5a; len]))
}

/// What Alice sends when she asks this of Bob, who does not get it.
fn asked(pair: &mut Pair, exchange: ExchangeType, payloads: &[Payload]) -> Vec<Datagram> {
    let now = pair.now;
    let id = pair.alice.sa().id;
    let sent: Rc<RefCell<Vec<Datagram>>> = Rc::default();
    let note = Rc::clone(&sent);
    pair.filter = Box::new(move |to_bob, datagram| {
        if to_bob {
            note.borrow_mut().push(datagram.clone());
        }
        !to_bob
    });
    pair.alice.endpoint.with(id, |sa, env| {
        assert!(sa.send_request(env, now, exchange, payloads));
        sa.active = Active::Probing;
    });
    pair.drive();
    pair.filter = Box::new(|_, _| true);
    sent.take()
}

/// Hands datagrams to Bob; what he sends in return, which Alice does not get.
fn told(pair: &mut Pair, datagrams: &[Datagram]) -> Vec<Datagram> {
    let heard: Rc<RefCell<Vec<Datagram>>> = Rc::default();
    let note = Rc::clone(&heard);
    pair.filter = Box::new(move |to_bob, datagram| {
        if !to_bob {
            note.borrow_mut().push(datagram.clone());
        }
        to_bob
    });
    for datagram in datagrams {
        let now = pair.now;
        pair.bob.endpoint.handle_datagram(now, datagram.clone());
        pair.drive();
    }
    pair.filter = Box::new(|_, _| true);
    heard.take()
}

/// Alice has her answer, as far as she knows.
fn settled(pair: &mut Pair) {
    let id = pair.alice.sa().id;
    pair.alice.endpoint.with(id, |sa, _| {
        sa.landed();
        sa.active = Active::Idle;
    });
}

/// Bob's answer to what Alice asks, as she reads it.
fn answer(pair: &mut Pair, exchange: ExchangeType, payloads: &[Payload]) -> String {
    let request = asked(pair, exchange, payloads);
    let answer = told(pair, &request);
    read(pair, &answer)
}

fn read(pair: &mut Pair, answer: &[Datagram]) -> String {
    let before = pair.alice.logs().len();
    for datagram in answer {
        let now = pair.now;
        pair.alice.endpoint.handle_datagram(now, datagram.clone());
        pair.drive();
    }
    let logs = pair.alice.logs().split_off(before);
    let read = logs.into_iter().find(|line| line.starts_with("received"));
    read.unwrap_or_default()
}

#[test]
fn no_request_begins_before_the_one_before_is_answered() {
    let mut pair = Pair::new();
    let (mut at_alice, mut at_bob) = (alice(), bob());
    at_alice
        .children
        .push(child("more", "10.3.0.0/16", "10.4.0.0/16"));
    at_bob
        .children
        .push(child("more", "10.4.0.0/16", "10.3.0.0/16"));
    pair.load(at_alice, at_bob);
    pair.initiate("gw", "net");

    let open: Rc<RefCell<BTreeSet<(bool, u64, u32)>>> = Rc::default();
    let most = Rc::new(Cell::new(0));
    let (watched, peak) = (Rc::clone(&open), Rc::clone(&most));
    pair.filter = Box::new(move |to_bob, datagram| {
        let header = Header::parse(&datagram.payload).unwrap();
        let mut open = watched.borrow_mut();
        if header.flags.response {
            open.remove(&(!to_bob, header.spi_i, header.message_id));
        } else {
            open.insert((to_bob, header.spi_i, header.message_id));
            let same = |(to, spi, _): &&(bool, u64, u32)| (*to, *spi) == (to_bob, header.spi_i);
            let now = open.iter().filter(same).count();
            peak.set(now.max(peak.get()));
        }
        true
    });
    for _ in 0..3 {
        for on_alice in [true, false] {
            rekey(&mut pair, on_alice, true);
            rekey(&mut pair, on_alice, false);
        }
        pair.command(true, initiate("gw", "more"));
        pair.pass(Duration::from_secs(20));
    }
    assert_eq!(most.get(), 1);
    assert_eq!(open.borrow().len(), 0);
    assert_eq!(pair.bob.live().len(), 2);
    assert_tunnel(&pair);
}

#[test]
fn requests_outside_of_the_window_are_not_answered() {
    let mut pair = connected();
    let mut requests = Vec::new();
    for _ in 0..3 {
        let request = asked(&mut pair, ExchangeType::Informational, &[]);
        settled(&mut pair);
        requests.push(request);
    }

    // The second is ahead of the window until the first is there.
    assert!(told(&mut pair, &requests[1]).is_empty());
    assert!(told(&mut pair, &requests[2]).is_empty());
    assert_eq!(told(&mut pair, &requests[0]).len(), 1);
    assert_eq!(told(&mut pair, &requests[1]).len(), 1);
    // The first is behind it now.
    assert!(told(&mut pair, &requests[0]).is_empty());
    assert_eq!(told(&mut pair, &requests[2]).len(), 1);
    assert_eq!(pair.bob.sa().state, IkeState::Established);
}

#[test]
fn a_repeated_request_gets_the_same_octets_and_a_damaged_copy_nothing() {
    let mut pair = connected();
    let request = asked(&mut pair, ExchangeType::Informational, &[filler(40)]);
    let mut damaged = request[0].clone();
    *damaged.payload.last_mut().unwrap() ^= 1;

    assert!(told(&mut pair, std::slice::from_ref(&damaged)).is_empty());
    let first = told(&mut pair, &request);
    assert_eq!(first.len(), 1);
    assert_eq!(told(&mut pair, &request), first);
    assert!(told(&mut pair, &[damaged]).is_empty());

    // From elsewhere, too, and there; which moves nothing.
    let remote = pair.bob.sa().remote;
    let mut elsewhere = request[0].clone();
    elsewhere.remote.set_ip("192.0.2.66".parse().unwrap());
    let there = told(&mut pair, std::slice::from_ref(&elsewhere));
    assert_eq!(there[0].payload, first[0].payload);
    assert_eq!(there[0].local, elsewhere.remote);
    assert_eq!(pair.bob.sa().remote, remote);
}

#[test]
fn a_response_that_nobody_awaits_changes_nothing() {
    let mut pair = connected();
    let request = asked(&mut pair, ExchangeType::Informational, &[]);
    let answer = told(&mut pair, &request);
    assert!(read(&mut pair, &answer).contains("INFORMATIONAL response"));

    assert_eq!(read(&mut pair, &answer), "");

    let next = asked(&mut pair, ExchangeType::Informational, &[]);
    assert_eq!(read(&mut pair, &answer), "");
    let answer = told(&mut pair, &next);
    assert!(read(&mut pair, &answer).contains("INFORMATIONAL response"));
}

#[test]
fn a_protected_request_that_is_malformed_ends_the_ike_sa_on_both_sides() {
    for exchange in [ExchangeType::Informational, ExchangeType::CreateChildSa] {
        let mut pair = Pair::new();
        let mut at_alice = alice();
        at_alice.children[0].dpd_action.start = true;
        pair.load(at_alice, bob());
        pair.initiate("gw", "net");
        let before = pair.bob.sa().spi_i;
        let request = asked(&mut pair, exchange, &[]);
        let id = pair.alice.sa().id;
        pair.alice
            .endpoint
            .with(id, |sa, _| sa.outbound.next_id -= 1);
        // A notify payload that claims to be longer than the message.
        let octets = [0, 0, 0, 200, 0, 0, 0x40, 0];
        let payload = pair
            .alice
            .endpoint
            .seal_octets(id, exchange, None, PayloadType::Notify, &octets)
            .unwrap();
        let malformed = Datagram {
            payload,
            ..request[0].clone()
        };
        let answer = told(&mut pair, std::slice::from_ref(&malformed));
        assert!(pair.bob.sas().is_empty() && pair.bob.plane.is_empty());
        // Should the answer be lost, it is given again.
        assert_eq!(told(&mut pair, &[malformed]), answer);

        // Alice drops hers without a word, and begins anew.
        assert!(read(&mut pair, &answer).contains("N(INVALID_SYNTAX)"));
        pair.pass(Duration::from_secs(30));
        assert_ne!(pair.bob.sa().spi_i, before);
        assert_tunnel(&pair);
    }
}

#[test]
fn an_unknown_payload_inside_is_refused_if_critical_and_else_ignored() {
    let unknown = |critical| {
        Payload::Unknown(UnknownPayload {
            payload_type: 200,
            critical,
            data: vec![1, 2, 3],
        })
    };
    let mut pair = connected();
    let answered = answer(&mut pair, ExchangeType::Informational, &[unknown(true)]);
    assert!(
        answered.contains("N(UNSUPPORTED_CRITICAL_PAYLOAD)"),
        "{answered}"
    );

    let answered = answer(&mut pair, ExchangeType::Informational, &[unknown(false)]);
    assert!(answered.contains("INFORMATIONAL response"), "{answered}");
    assert!(!answered.contains("N("), "{answered}");
    assert_eq!(pair.bob.sa().state, IkeState::Established);
}

#[test]
fn what_is_not_protected_changes_nothing_once_there_are_keys() {
    let mut pair = connected();
    let request = asked(&mut pair, ExchangeType::Informational, &[]);
    let header = Header::parse(&request[0].payload).unwrap();
    let naked = Message {
        header,
        payloads: vec![Payload::Notify(NotifyPayload::new(
            NotifyType::InvalidSyntax,
            Vec::new(),
        ))],
    };
    let naked = Datagram {
        payload: naked.emit().unwrap(),
        ..request[0].clone()
    };
    assert!(told(&mut pair, &[naked]).is_empty());
    // The real one is still expected.
    assert_eq!(told(&mut pair, &request).len(), 1);
    assert_eq!(pair.bob.sa().state, IkeState::Established);
}

#[test]
fn forged_and_repeated_fragments_neither_disturb_nor_add_up() {
    let mut pair = connected();
    let fragments = asked(&mut pair, ExchangeType::Informational, &[filler(6000)]);
    assert!(fragments.len() >= 5, "{}", fragments.len());
    let real = Message::parse(&fragments[0].payload).unwrap();
    let Some(Payload::Skf(skf)) = real.payloads.last() else {
        panic!("it is a fragment");
    };
    let forged = |number, total| {
        let payloads = vec![Payload::Skf(SkfPayload {
            number,
            total,
            ..skf.clone()
        })];
        let header = real.header;
        Datagram {
            payload: Message { header, payloads }.emit().unwrap(),
            ..fragments[0].clone()
        }
    };

    // Backwards, each twice, with lies of three kinds between them.
    let mut answers = Vec::new();
    for fragment in fragments.iter().rev() {
        for lie in [forged(2, skf.total), forged(1, 255), forged(3, 1000)] {
            assert!(told(&mut pair, &[lie]).is_empty());
        }
        for copy in [fragment, fragment] {
            answers.extend(told(&mut pair, std::slice::from_ref(copy)));
        }
    }
    // The last one was number 1, and its copy a request for the answer that was given.
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0].payload, answers[1].payload);
    assert!(read(&mut pair, &answers[..1]).contains("INFORMATIONAL response"));

    // The fragment that stands for the message has it answered again, no other one does.
    assert_eq!(told(&mut pair, &fragments[..1]), answers[..1]);
    assert!(told(&mut pair, &fragments[1..]).is_empty());
}

#[test]
fn a_message_longer_than_max_packet_is_refused_however_it_is_cut() {
    let mut pair = connected();
    let fragments = asked(&mut pair, ExchangeType::Informational, &[filler(12_000)]);
    assert!(told(&mut pair, &fragments[..8]).is_empty());
    let answer = told(&mut pair, &fragments[8..]);
    assert!(read(&mut pair, &answer).contains("N(INVALID_SYNTAX)"));
    assert!(pair.alice.sas().is_empty() && pair.bob.sas().is_empty());
}
