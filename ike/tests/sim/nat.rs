// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NAT detection, the float to port 4500, encapsulation, and mappings that change.

use std::net::SocketAddr;
use std::time::Duration;

use swanherd_config::model::{Connection, HostSpec};
use swanherd_ike::api::{Selector, Settings};
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

fn behind_nat_with(seed: u64, (alice, mut bob): (Connection, Connection)) -> World {
    let mut world = World::new(seed);
    let inside = world.host(ALICE).addr;
    world.net.nat = Some(Nat::new(inside, "203.0.113.1".parse().unwrap()));
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
    let nat = world.net.nat.as_mut().unwrap();
    SocketAddr::new(nat.outside, nat.outside_port(4500))
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
    world.net.nat.as_mut().unwrap().rebind();
    // Anything authenticated will do; rekeying also moves nothing by itself.
    let selector = Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    };
    let command = world.rekey(ALICE, selector);
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
    world.net.nat.as_mut().unwrap().rebind();
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
