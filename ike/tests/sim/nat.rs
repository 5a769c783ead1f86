// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NAT detection, the float to port 4500, encapsulation, and mappings that change.

use std::net::SocketAddr;
use std::time::Duration;

use swanherd_config::model::{Connection, HostSpec};
use swanherd_ike::api::{Datagram, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::plane::{Direction, PlaneEvent};

use crate::config::{pair, psk};
use crate::net::Nat;
use crate::world::{ALICE, BOB, World};

/// Alice behind a NAT, established.
fn behind_nat(seed: u64) -> World {
    behind_nat_with(seed, pair())
}

/// The same without MOBIKE, where peers are followed by where their messages come from.
fn behind_nat_without_mobike(seed: u64) -> World {
    let mut connections = pair();
    connections.0.mobike = false;
    behind_nat_with(seed, connections)
}

fn behind_nat_with(seed: u64, connections: (Connection, Connection)) -> World {
    behind_nat_in(World::new(seed), connections)
}

fn behind_nat_in(mut world: World, (alice, mut bob): (Connection, Connection)) -> World {
    let inside = world.host(ALICE).addr;
    world.net.nats = vec![Nat::new(inside, "203.0.113.1".parse().unwrap())];
    bob.remote_addrs = vec![HostSpec::Any(None)];
    world.load(ALICE, &psk(), alice);
    world.load(BOB, &psk(), bob);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(1);
    world
}

/// Where Bob sends packets for Alice.
fn bobs_idea_of_alice(world: &World) -> SocketAddr {
    let plane = &world.host(BOB).plane;
    let out = plane.of(Direction::Out).next().unwrap();
    SocketAddr::new(out.dst, out.encap.unwrap().dst_port)
}

/// Where the NAT lets Bob reach Alice.
fn way_in(world: &mut World) -> SocketAddr {
    let inside = world.host(ALICE).addr;
    world.way_in(inside, 4500)
}

#[test]
fn a_nat_is_detected_and_both_ends_float_and_encapsulate() {
    let mut world = behind_nat(60);
    let alice = &world.host(ALICE).ike_sas()[0];
    assert!(alice.nat_local && !alice.nat_remote);
    assert_eq!((alice.local.port(), alice.remote.port()), (4500, 4500));
    let bob = &world.host(BOB).ike_sas()[0];
    assert!(bob.nat_remote && !bob.nat_local);
    assert!(world.host(ALICE).children()[0].encap);
    assert_eq!(bobs_idea_of_alice(&world), way_in(&mut world));
}

#[test]
fn no_nat_means_no_encapsulation() {
    let world = crate::handshake::established(61);
    let alice = &world.host(ALICE).ike_sas()[0];
    assert!(!alice.nat_local && !alice.nat_remote);
}

#[test]
fn encapsulation_is_forced_where_the_data_plane_can_do_nothing_else() {
    let settings = Settings {
        force_encap: true,
        ..Settings::default()
    };
    let world = World::with(62, settings, Provider::fake());
    let world = crate::handshake::established_with(world, pair());
    for host in [ALICE, BOB] {
        assert!(world.host(host).children()[0].encap);
        for sa in world.host(host).plane.sas.values() {
            assert!(sa.1.encap.is_some());
        }
    }
}

#[test]
fn one_side_that_wants_encapsulation_gets_it_from_both() {
    for own in [ALICE, BOB] {
        let mut connections = pair();
        if own == ALICE {
            connections.0.encap = true;
        } else {
            connections.1.encap = true;
        }
        let mut world = crate::handshake::established_with(World::new(67), connections);
        for host in [ALICE, BOB] {
            assert!(world.host(host).children()[0].encap);
            let sa = &world.host(host).ike_sas()[0];
            // Nobody is behind a NAT, whatever the other one was told.
            assert_eq!(sa.nat_remote, host != own);
            assert!(!sa.nat_local);
        }
        // It stays so when the keys are new.
        for selector in [ike_sa(), child()] {
            let command = world.rekey(ALICE, selector);
            assert_eq!(world.finish(ALICE, command), Ok(()));
            world.run_for(Duration::from_secs(20));
            world.assert_in_sync(1);
            assert!(world.host(BOB).children()[0].encap);
        }
    }
}

fn ike_sa() -> Selector {
    Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    }
}

fn child() -> Selector {
    Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    }
}

/// Bob behind a NAT that forwards to him; Alice behind one that does not, if so wanted.
fn behind_nats(seed: u64, both: bool) -> World {
    let (mut alice, mut bob) = pair();
    alice.remote_addrs = vec![HostSpec::Addr("203.0.113.2".parse().unwrap())];
    bob.remote_addrs = vec![HostSpec::Any(None)];
    let mut world = World::new(seed);
    if both {
        alice.dpd_delay = Duration::from_secs(10);
        let inside = world.host(ALICE).addr;
        world
            .net
            .nats
            .push(Nat::new(inside, "203.0.113.1".parse().unwrap()));
    }
    let inside = world.host(BOB).addr;
    world
        .net
        .nats
        .push(Nat::forwarding(inside, "203.0.113.2".parse().unwrap()));
    let mut world = crate::handshake::established_with(world, (alice, bob));
    world.assert_in_sync(1);
    world.set_traffic(true);
    world.run_for(Duration::from_secs(5));
    world
}

/// Nothing that was sent was refused; and as much was sent as there is time for.
fn assert_traffic_arrived(world: &World) {
    let traffic = world.traffic;
    assert_eq!((traffic.refused, traffic.blocked), (0, 0));
    assert!(traffic.arrived >= 190, "{traffic:?}");
}

#[test]
fn a_responder_behind_a_nat_is_reached_and_keeps_its_mapping_open() {
    let mut world = behind_nats(68, false);
    let alice = &world.host(ALICE).ike_sas()[0];
    assert!(alice.nat_remote && !alice.nat_local);
    let bob = &world.host(BOB).ike_sas()[0];
    assert!(bob.nat_local && !bob.nat_remote);
    assert_traffic_arrived(&world);

    let inside = world.host(BOB).addr;
    world.set_traffic(false);
    world.tape = Some(Vec::new());
    world.run_for(Duration::from_secs(100));
    let tape = world.tape.take().unwrap();
    let mut keepalives = tape.iter().filter(|transmit| transmit.keepalive);
    assert!(keepalives.clone().count() >= 3);
    assert!(keepalives.all(|keepalive| keepalive.local.ip() == inside));

    for selector in [ike_sa(), child()] {
        let command = world.rekey(ALICE, selector);
        assert_eq!(world.finish(ALICE, command), Ok(()));
        world.run_for(Duration::from_secs(20));
        world.assert_in_sync(1);
    }
}

#[test]
fn with_nats_on_both_sides_only_the_one_that_moved_says_so() {
    let mut world = behind_nats(69, true);
    for host in [ALICE, BOB] {
        let sa = &world.host(host).ike_sas()[0];
        assert!(sa.nat_local && sa.nat_remote);
    }
    assert_traffic_arrived(&world);

    // The kernel sees the new mapping before IKE; but who is behind a NAT is not led by packets.
    world.net.nats[0].rebind();
    let (before, new) = (bobs_idea_of_alice(&world), way_in(&mut world));
    assert_ne!(before, new);
    let id = world.host(BOB).children()[0].inbound.unwrap();
    let (addr, port) = (new.ip(), new.port());
    world.plane_event(BOB, PlaneEvent::MappingChange { id, addr, port });
    assert_eq!(bobs_idea_of_alice(&world), before);

    // Alice's next liveness check tells her that she moved, and she tells Bob.
    world.run_for(Duration::from_secs(30));
    assert_eq!(bobs_idea_of_alice(&world), new);
    world.assert_in_sync(1);
}

#[test]
fn keepalives_have_their_interval_and_can_be_switched_off() {
    for (interval, expected) in [(7, 26..=29), (0, 0..=0)] {
        let settings = Settings {
            keep_alive: Duration::from_secs(interval),
            ..Settings::default()
        };
        let world = World::with(70, settings, Provider::fake());
        let mut world = behind_nat_in(world, pair());
        world.tape = Some(Vec::new());
        world.run_for(Duration::from_secs(200));
        let tape = world.tape.take().unwrap();
        let keepalives = tape.iter().filter(|transmit| transmit.keepalive).count();
        assert!(expected.contains(&keepalives), "{keepalives} keepalives");
    }
}

#[test]
fn only_what_is_new_and_authentic_shows_where_a_peer_is() {
    let (mut alice, bob) = pair();
    alice.mobike = false;
    alice.dpd_delay = Duration::from_secs(10);
    let mut world = behind_nat_with(71, (alice, bob));
    world.tape = Some(Vec::new());
    world.run_for(Duration::from_secs(35));
    let tape = world.tape.take().unwrap();
    let inside = world.host(ALICE).addr;
    let own = tape
        .iter()
        .filter(|sent| sent.local.ip() == inside && !sent.keepalive);
    let questions: Vec<_> = own.cloned().collect();
    assert!(questions.len() >= 3);
    let before = bobs_idea_of_alice(&world);
    let bobs = world.host(BOB).ike_sas()[0].local;
    for question in &questions {
        for damage in [false, true] {
            let mut payload = question.payload.clone();
            if damage {
                // The next message id, so that it is looked at.
                payload[23] += u8::try_from(questions.len()).unwrap();
            }
            let datagram = Datagram {
                local: bobs,
                remote: "203.0.113.66:4500".parse().unwrap(),
                payload,
            };
            world.inject(BOB, datagram);
        }
    }
    assert_eq!(bobs_idea_of_alice(&world), before);
    assert_eq!(world.host(BOB).ike_sas()[0].remote, before);
    world.run_for(Duration::from_secs(30));
    world.assert_in_sync(1);
}

#[test]
fn the_mapping_is_kept_open_by_keepalives() {
    let mut world = behind_nat(63);
    world.tape = Some(Vec::new());
    world.run_for(Duration::from_secs(200));
    let tape = world.tape.as_ref().unwrap();
    let keepalives = tape.iter().filter(|transmit| transmit.keepalive).count();
    assert!((8..=11).contains(&keepalives), "{keepalives} keepalives");
    for keepalive in tape.iter().filter(|transmit| transmit.keepalive) {
        assert_eq!(keepalive.payload, [0xff]);
        assert_eq!(keepalive.local.ip(), world.host(ALICE).addr);
    }
}

#[test]
fn a_new_mapping_is_learnt_from_the_peers_next_message() {
    let mut world = behind_nat_without_mobike(64);
    let before = bobs_idea_of_alice(&world);
    world.net.nats[0].rebind();
    // Anything authenticated will do; rekeying also moves nothing by itself.
    let command = world.rekey(ALICE, child());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(60));
    world.assert_in_sync(1);
    assert_ne!(bobs_idea_of_alice(&world), before);
    assert_eq!(bobs_idea_of_alice(&world), way_in(&mut world));
    assert_eq!(world.host(BOB).ike_sas()[0].remote, way_in(&mut world));
}

#[test]
fn a_new_mapping_is_learnt_from_the_data_plane() {
    let mut world = behind_nat(65);
    world.net.nats[0].rebind();
    let new = way_in(&mut world);
    let id = world.host(BOB).children()[0].inbound.unwrap();
    let event = PlaneEvent::MappingChange {
        id,
        addr: new.ip(),
        port: new.port(),
    };
    world.plane_event(BOB, event);
    world.run_for(Duration::from_secs(10));
    world.assert_in_sync(1);
    assert_eq!(bobs_idea_of_alice(&world), new);
}

#[test]
fn a_rekeyed_tunnel_behind_a_nat_can_be_deleted_by_the_other_side() {
    let mut world = behind_nat(66);
    let selector = Selector {
        ike: Some("to-alice".to_owned()),
        ..Selector::default()
    };
    let command = world.rekey(BOB, selector.clone());
    assert_eq!(world.finish(BOB, command), Ok(()));
    world.run_for(Duration::from_secs(30));
    world.assert_in_sync(1);
    let command = world.terminate(BOB, selector);
    assert_eq!(world.finish(BOB, command), Ok(()));
    world.run_for(Duration::from_secs(10));
    world.assert_all_clean();
}
