// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Datagrams from someone who should not be there.

use std::net::SocketAddr;
use std::time::Duration;

use swanherd_ike::api::{Counter, Datagram, DropReason, Settings};
use swanherd_ike::crypto::Provider;

use crate::config::{pair, psk};
use crate::handshake::{established_with, ready};
use crate::net::SimRng;
use crate::world::{ALICE, BOB, World, for_seeds};

fn from_mallory(world: &World, to: usize, payload: Vec<u8>) -> Datagram {
    Datagram {
        local: SocketAddr::new(world.host(to).addr, 500),
        remote: "203.0.113.66:500".parse().unwrap(),
        payload,
    }
}

#[test]
fn damaged_copies_of_real_messages_change_nothing() {
    for_seeds(30, |seed| {
        let mut world = World::new(seed);
        world.tape = Some(Vec::new());
        let mut world = established_with(world, pair());
        let before = (world.inbound_spis(ALICE), world.inbound_spis(BOB));
        let mut rng = SimRng::new(seed);
        let tape = world.tape.take().unwrap();
        for _ in 0..300 {
            let pick = usize::try_from(rng.next()).unwrap_or(0) % tape.len();
            let original = &tape[pick];
            let mut payload = original.payload.clone();
            for _ in 0..1 + rng.next() % 4 {
                let at = usize::try_from(rng.next()).unwrap_or(0) % payload.len();
                payload[at] = rng.next().to_le_bytes()[0];
            }
            let to = usize::from(original.remote.ip() == world.host(BOB).addr);
            let mut datagram = from_mallory(&world, to, payload);
            if rng.chance(500) {
                datagram.remote = SocketAddr::new(world.host(1 - to).addr, 500);
            }
            world.inject(to, datagram);
            world.run_for(Duration::from_millis(20));
        }
        world.run_for(Duration::from_secs(120));
        assert_eq!((world.inbound_spis(ALICE), world.inbound_spis(BOB)), before);
        world.assert_in_sync(1);
        assert_eq!(world.host(BOB).endpoint.half_open(), 0);
    });
}

#[test]
fn noise_is_dropped_and_counted() {
    let mut world = World::new(80);
    ready(&mut world, pair());
    for len in 0..200 {
        let datagram = from_mallory(&world, BOB, vec![0x5a; len]);
        world.inject(BOB, datagram);
    }
    world.run_for(Duration::from_secs(60));
    world.assert_all_clean();
    let dropped = world
        .host(BOB)
        .counted(Counter::Dropped(DropReason::Malformed))
        + world
            .host(BOB)
            .counted(Counter::Dropped(DropReason::Version))
        + world.host(BOB).counted(Counter::Invalid);
    assert!(dropped >= 200, "{dropped} counted");
}

#[test]
fn a_replayed_session_brings_nothing_back() {
    let mut world = World::new(81);
    world.tape = Some(Vec::new());
    let mut world = established_with(world, pair());
    let tape = world.tape.take().unwrap();
    let selector = swanherd_ike::api::Selector {
        ike: Some("to-bob".to_owned()),
        ..Default::default()
    };
    let command = world.terminate(ALICE, selector);
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(10));
    for transmit in tape {
        let to = usize::from(transmit.remote.ip() == world.host(BOB).addr);
        let datagram = Datagram {
            local: transmit.remote,
            remote: SocketAddr::new(world.host(1 - to).addr, transmit.local.port()),
            payload: transmit.payload,
        };
        world.inject(to, datagram);
        world.run_for(Duration::from_millis(50));
    }
    world.run_for(Duration::from_secs(120));
    world.assert_all_clean();
}

#[test]
fn a_flood_of_first_messages_stays_bounded_and_the_real_peer_gets_through() {
    let settings = Settings::default();
    let mut world = World::with(82, settings.clone(), Provider::fake());
    let (alice, mut bob) = pair();
    bob.remote_addrs
        .push(swanherd_config::model::HostSpec::Any(None));
    world.load(ALICE, &psk(), alice.clone());
    world.load(BOB, &psk(), bob);
    // A first message of someone else, sent from many addresses.
    let other = world.add_host("other", "192.0.2.77", settings, Provider::fake());
    world.tape = Some(Vec::new());
    world.load(other, &psk(), alice);
    world.net.cut = true;
    world.initiate(other, "net");
    world.run_for(Duration::from_secs(1));
    world.net.cut = false;
    let first = world.tape.take().unwrap().swap_remove(0).payload;
    let mut rng = SimRng::new(82);
    for _ in 0..3000 {
        let mut payload = first.clone();
        payload[..8].copy_from_slice(&rng.next().to_be_bytes());
        let mut datagram = from_mallory(&world, BOB, payload);
        let [a, b, ..] = rng.next().to_be_bytes();
        datagram.remote = SocketAddr::from(([203, 0, a, b], 500));
        world.inject(BOB, datagram);
    }
    let half_open = world.host(BOB).endpoint.half_open();
    assert!(half_open <= 100, "{half_open} half-open IKE SAs");

    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(300));
    assert_eq!(world.host(BOB).endpoint.half_open(), 0);
}
