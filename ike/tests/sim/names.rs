// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Peers that are found by name, at one of several addresses, or at other ports.

use std::net::IpAddr;
use std::time::Duration;

use swanherd_config::model::{Action, Connection, HostSpec};
use swanherd_ike::api::{FailureReason, Settings};
use swanherd_ike::crypto::Provider;

use crate::config::pair;
use crate::handshake::{established_with, ready};
use crate::world::{ALICE, BOB, World};

const BOBS: &str = "198.51.100.1";
const NOBODYS: &str = "198.51.100.250";

fn addrs(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// `gw.example` stands for these addresses from now on.
fn name(world: &mut World, delay: Duration, texts: &[&str]) {
    let entry = (delay, addrs(texts));
    world.net.names.insert("gw.example".to_owned(), entry);
}

/// Alice wants to be connected to `gw.example` for ever.
fn by_name() -> (Connection, Connection) {
    let (mut alice, bob) = pair();
    alice.remote_addrs = vec![HostSpec::Name("gw.example".to_owned())];
    alice.keyingtries = 0;
    alice.dpd_delay = Duration::from_secs(10);
    let keep = Action {
        start: true,
        ..Action::default()
    };
    alice.children[0].start_action = keep;
    alice.children[0].dpd_action = keep;
    alice.children[0].close_action = keep;
    (alice, bob)
}

fn is_up(world: &World) -> bool {
    !world.host(ALICE).children().is_empty() && !world.host(BOB).children().is_empty()
}

fn remotes_tried(world: &World) -> Vec<IpAddr> {
    let mut tried: Vec<IpAddr> = Vec::new();
    for transmit in world.tape.as_ref().unwrap() {
        let addr = transmit.remote.ip();
        if addr.to_string() != "192.0.2.1" && tried.last() != Some(&addr) {
            tried.push(addr);
        }
    }
    tried
}

#[test]
fn a_name_is_looked_up_anew_for_each_attempt() {
    let mut world = World::new(400);
    name(&mut world, Duration::from_millis(20), &[NOBODYS]);
    ready(&mut world, by_name());
    world.run_for(Duration::from_secs(60));
    assert!(!is_up(&world));

    name(&mut world, Duration::from_millis(20), &[BOBS]);
    assert!(world.run_until(Duration::from_secs(300), is_up));
}

#[test]
fn a_name_that_cannot_be_resolved_is_tried_again_and_is_no_failed_attempt() {
    let mut world = World::new(401);
    let (mut alice, bob) = by_name();
    alice.keyingtries = 2;
    name(&mut world, Duration::from_secs(10), &[]);
    ready(&mut world, (alice, bob));
    world.run_for(Duration::from_secs(900));
    let failed = swanherd_ike::api::Counter::Failure(FailureReason::Unreachable);
    assert!(world.host(ALICE).counted(failed) > 2);

    name(&mut world, Duration::from_millis(20), &[BOBS]);
    assert!(world.run_until(Duration::from_secs(400), is_up));
}

#[test]
fn what_a_name_stood_for_is_taken_while_it_cannot_be_resolved() {
    let mut world = World::new(402);
    name(&mut world, Duration::from_millis(20), &[BOBS]);
    ready(&mut world, by_name());
    assert!(world.run_until(Duration::from_secs(10), is_up));

    name(&mut world, Duration::from_secs(10), &[]);
    world.restart(BOB, Settings::default(), Provider::fake());
    world.load(BOB, &crate::config::psk(), by_name().1);
    // The loss is noticed, and Bob called again at once.
    assert!(world.run_until(Duration::from_secs(300), is_up));
}

#[test]
fn a_slow_name_holds_up_no_other_connection() {
    let mut world = World::new(403);
    name(&mut world, Duration::from_secs(3600), &[BOBS]);
    let (slow, bob) = by_name();
    ready(&mut world, (slow, bob));
    world.run_for(Duration::from_secs(1));
    let mut other = pair().0;
    other.name = "other".to_owned();
    other.children[0].name = "quick".to_owned();
    world.load(ALICE, &crate::config::psk(), other);
    let command = world.initiate(ALICE, "quick");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    assert!(world.elapsed() < Duration::from_secs(5));
}

#[test]
fn all_addresses_of_all_peers_named_are_tried_in_turn() {
    let mut world = World::new(404);
    let others = ["198.51.100.251", "198.51.100.252"];
    name(&mut world, Duration::from_millis(20), &others);
    let (mut alice, bob) = by_name();
    alice.remote_addrs = vec![
        HostSpec::Addr(NOBODYS.parse().unwrap()),
        HostSpec::Name("gw.example".to_owned()),
        HostSpec::Addr(BOBS.parse().unwrap()),
    ];
    world.tape = Some(Vec::new());
    world.net.cut = true;
    ready(&mut world, (alice, bob));
    world.run_for(Duration::from_secs(2400));
    let expected = [NOBODYS, others[0], BOBS, NOBODYS, others[1], BOBS];
    let tried = remotes_tried(&world);
    assert!(tried.starts_with(&addrs(&expected)), "{tried:?}");

    world.net.cut = false;
    assert!(world.run_until(Duration::from_secs(1800), is_up));
}

#[test]
fn ports_may_be_others_than_500_and_4500() {
    // As with `charon.port = 0`: the system has chosen Alice's.
    let mut settings = Settings::default();
    (settings.port, settings.port_nat_t) = (38_000, 38_001);
    let mut world = World::with(405, Settings::default(), Provider::fake());
    world.restart(ALICE, settings, Provider::fake());
    let world = established_with(world, pair());
    let alice = &world.host(ALICE).ike_sas()[0];
    assert_eq!((alice.local.port(), alice.remote.port()), (38_001, 4500));
    let bob = &world.host(BOB).ike_sas()[0];
    assert_eq!((bob.local.port(), bob.remote.port()), (4500, 38_001));
}

#[test]
fn who_begins_on_the_nat_traversal_port_calls_that_of_the_peer() {
    let mut connections = pair();
    connections.0.local_port = 4500;
    let mut world = World::new(407);
    world.tape = Some(Vec::new());
    let world = established_with(world, connections);
    for transmit in world.tape.as_ref().unwrap() {
        assert_eq!(
            (transmit.local.port(), transmit.remote.port()),
            (4500, 4500)
        );
    }
}

#[test]
fn a_peer_at_another_port_is_called_from_the_nat_traversal_port() {
    let mut settings = Settings::default();
    (settings.port, settings.port_nat_t) = (1500, 1501);
    let mut world = World::with(406, Settings::default(), Provider::fake());
    world.restart(BOB, settings, Provider::fake());
    let mut connections = pair();
    connections.0.remote_port = 1501;
    world.tape = Some(Vec::new());
    let world = established_with(world, connections);
    let tape = world.tape.as_ref().unwrap();
    let alices =
        |transmit: &&swanherd_ike::api::Transmit| transmit.local.ip() == world.host(ALICE).addr;
    for transmit in tape.iter().filter(alices) {
        assert_eq!(transmit.local.port(), 4500);
        assert_eq!(transmit.remote.port(), 1501);
    }
}

#[test]
fn ipv6_does_as_well_and_every_message_has_its_code_point() {
    let (mut alice, mut bob) = pair();
    let ends = ["2001:db8:1::1", "2001:db8:2::1"];
    alice.remote_addrs = vec![HostSpec::Addr(ends[1].parse().unwrap())];
    bob.remote_addrs = vec![HostSpec::Addr(ends[0].parse().unwrap())];
    (alice.dscp, bob.dscp) = (46, 10);
    (alice.dpd_delay, bob.dpd_delay) = (Duration::from_secs(10), Duration::from_secs(10));
    let mut world = World::new(408);
    world.set_addresses(ALICE, &ends[..1]);
    world.set_addresses(BOB, &ends[1..]);
    world.tape = Some(Vec::new());
    let mut world = established_with(world, (alice, bob));
    world.run_for(Duration::from_secs(60));
    world.assert_in_sync(1);
    let tape = world.tape.take().unwrap();
    assert!(tape.len() > 8);
    for transmit in &tape {
        let alices = transmit.local.ip().to_string() == ends[0];
        assert_eq!(transmit.dscp, if alices { 46 } else { 10 }, "{transmit:?}");
    }
}
