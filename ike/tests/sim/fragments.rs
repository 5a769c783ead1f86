// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long messages over paths that do not carry them (RFC 7383).

use std::time::Duration;

use swanherd_config::model::{Connection, Fragmentation, SelectorSpec};
use swanherd_ike::api::{Counter, Selector, Transmit};
use swanherd_ike::wire::{ExchangeType, Message, Payload};

use crate::config::{network, pair};
use crate::handshake::{established_with, ready};
use crate::net::Conditions;
use crate::world::{ALICE, BOB, World, for_seeds};

/// A pair whose selectors make IKE_AUTH about two thousand octets long, both ways.
fn long_winded(alices: Fragmentation, bobs: Fragmentation) -> (Connection, Connection) {
    let (mut alice, mut bob) = pair();
    let nets = |first: u8| -> Vec<SelectorSpec> {
        (0..60)
            .map(|n| SelectorSpec::Fixed(network(&format!("10.{first}.{n}.0/24"))))
            .collect()
    };
    alice.children[0].local_ts = nets(1);
    alice.children[0].remote_ts = nets(2);
    bob.children[0].local_ts = nets(2);
    bob.children[0].remote_ts = nets(1);
    alice.fragmentation = alices;
    bob.fragmentation = bobs;
    (alice, bob)
}

fn with_mtu(seed: u64, mtu: usize) -> World {
    let mut world = World::new(seed);
    world.net.conditions.mtu = mtu;
    world.tape = Some(Vec::new());
    world
}

/// What was sent in IKE_AUTH: of each datagram its length as an IP packet, and whether it is a
/// fragment.
fn auth_packets(world: &World) -> Vec<(usize, bool)> {
    let tape = world.tape.as_ref().unwrap();
    let packet = |transmit: &Transmit| {
        let message = Message::parse(&transmit.payload).ok()?;
        let fragment = matches!(message.payloads.last(), Some(Payload::Skf(_)));
        (message.header.exchange == ExchangeType::IkeAuth)
            .then_some((transmit.payload.len() + 20 + 8 + 4, fragment))
    };
    tape.iter().filter_map(packet).collect()
}

#[test]
fn long_messages_go_in_fragments_that_fit_the_configured_size() {
    let world = established_with(
        with_mtu(300, 1280),
        long_winded(Fragmentation::Yes, Fragmentation::Yes),
    );
    let packets = auth_packets(&world);
    assert!(
        packets
            .iter()
            .all(|(len, fragment)| *fragment && *len <= 1280)
    );
    assert!(packets.len() >= 4);
    assert_eq!(world.host(ALICE).counted(Counter::Retransmit), 0);
}

#[test]
fn fragments_become_smaller_where_longer_ones_vanish() {
    let mut world = with_mtu(301, 700);
    ready(
        &mut world,
        long_winded(Fragmentation::Yes, Fragmentation::Yes),
    );
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(1);
    // Two transmissions of the request in vain, then smaller ones; and two of the response.
    assert!(world.host(ALICE).counted(Counter::Retransmit) <= 4);
    let smallest = auth_packets(&world).iter().map(|(len, _)| *len).max();
    assert!(smallest > Some(700));

    // From now on they are small at once.
    let before = world.host(ALICE).counted(Counter::Retransmit);
    world.tape = Some(Vec::new());
    let child = Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    };
    let command = world.rekey(ALICE, child);
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(20));
    let tape = world.tape.take().unwrap();
    assert!(
        tape.iter()
            .all(|transmit| transmit.payload.len() + 32 <= 576)
    );
    assert_eq!(world.host(ALICE).counted(Counter::Retransmit), before);
    world.assert_in_sync(1);
}

#[test]
fn what_this_host_refuses_to_send_goes_in_smaller_fragments_at_once() {
    let mut world = with_mtu(302, 1500);
    world.net.link_mtu = Some(700);
    let world = established_with(world, long_winded(Fragmentation::Yes, Fragmentation::Yes));
    assert_eq!(world.host(ALICE).counted(Counter::Retransmit), 0);
    assert!(world.elapsed() < Duration::from_secs(3));
}

#[test]
fn who_only_accepts_fragments_sends_none() {
    let connections = long_winded(Fragmentation::Accept, Fragmentation::Yes);
    let world = established_with(with_mtu(303, 9000), connections);
    let packets = auth_packets(&world);
    let whole = packets.iter().filter(|(_, fragment)| !fragment).count();
    assert_eq!(whole, 1, "{packets:?}");
    assert!(packets.len() >= 3, "{packets:?}");
}

#[test]
fn who_wants_no_fragments_announces_none_and_gets_none() {
    let connections = long_winded(Fragmentation::No, Fragmentation::Yes);
    let world = established_with(with_mtu(304, 9000), connections);
    assert!(auth_packets(&world).iter().all(|(_, fragment)| !fragment));
}

#[test]
fn fragments_can_be_forced_upon_a_peer_that_announces_none() {
    let connections = long_winded(Fragmentation::Force, Fragmentation::No);
    let world = established_with(with_mtu(305, 9000), connections);
    let packets = auth_packets(&world);
    // Bob takes them nevertheless, and answers in one piece.
    let whole = packets.iter().filter(|(_, fragment)| !fragment).count();
    assert_eq!(whole, 1, "{packets:?}");
    assert!(packets.len() >= 3, "{packets:?}");
}

#[test]
fn fragments_arrive_lost_doubled_and_in_any_order() {
    for_seeds(200, |seed| {
        let mut world = World::new(seed).conditions(Conditions {
            delay: 1..=400,
            loss: 30,
            duplication: 300,
            mtu: 700,
        });
        ready(
            &mut world,
            long_winded(Fragmentation::Yes, Fragmentation::Yes),
        );
        let command = world.initiate(ALICE, "net");
        if world.finish(ALICE, command).is_err() {
            // Six transmissions of four and more fragments each may be in vain.
            return;
        }
        world.net.conditions.loss = 0;
        world.run_for(Duration::from_secs(60));
        world.assert_in_sync(1);
        assert_eq!(world.host(BOB).ike_sas().len(), 1);
    });
}
