// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hosts that move: MOBIKE in both roles, paths that die, and what happens without MOBIKE.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use swanherd_config::model::{Connection, HostSpec};
use swanherd_ike::api::{Event, IkeState, Selector};
use swanherd_ipsec::plane::Direction;

use crate::config::pair;
use crate::handshake::established_with;
use crate::net::Nat;
use crate::world::{ALICE, BOB, World, for_seeds};

const FIRST: &str = "192.0.2.1";
const SECOND: &str = "203.0.113.7";
const BOBS: &str = "198.51.100.1";
const BOBS_SECOND: &str = "203.0.113.99";

/// Alice, who may come from anywhere, and Bob, with liveness checks.
fn connections() -> (Connection, Connection) {
    let (mut alice, mut bob) = pair();
    bob.remote_addrs = vec![HostSpec::Any(None)];
    alice.dpd_delay = Duration::from_secs(10);
    bob.dpd_delay = Duration::from_secs(10);
    (alice, bob)
}

fn up(seed: u64, alices: &[&str], bobs: &[&str]) -> World {
    up_with(World::new(seed), connections(), alices, bobs)
}

fn up_with(
    mut world: World,
    connections: (Connection, Connection),
    alices: &[&str],
    bobs: &[&str],
) -> World {
    world.set_addresses(ALICE, alices);
    world.set_addresses(BOB, bobs);
    established_with(world, connections)
}

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The addresses of the only IKE SA.
fn ends(world: &World, host: usize) -> (SocketAddr, SocketAddr) {
    let sas = world.host(host).ike_sas();
    assert_eq!(sas.len(), 1, "IKE SAs of {}", world.host(host).name);
    (sas[0].local, sas[0].remote)
}

/// How often the world was told of new addresses of an IKE SA that is up.
fn updates(world: &World, host: usize) -> usize {
    let moved = |event: &Event| matches!(event, Event::IkeUpdate { sa, .. } if sa.state == IkeState::Established);
    let events = &world.host(host).events;
    events.iter().filter(|(_, event)| moved(event)).count()
}

/// Both ends, and the data planes of both, use these addresses.
#[track_caller]
fn assert_between(world: &World, alices: &str, bobs: &str) {
    let (local, remote) = ends(world, ALICE);
    assert_eq!((local.ip(), remote.ip()), (addr(alices), addr(bobs)));
    let (local, remote) = ends(world, BOB);
    assert_eq!((local.ip(), remote.ip()), (addr(bobs), addr(alices)));
    for (host, own, other) in [(ALICE, alices, bobs), (BOB, bobs, alices)] {
        let plane = &world.host(host).plane;
        for sa in plane.of(Direction::Out) {
            assert_eq!((sa.src, sa.dst), (addr(own), addr(other)));
        }
        for sa in plane.of(Direction::In) {
            assert_eq!((sa.src, sa.dst), (addr(other), addr(own)));
        }
        for set in plane.policies.values() {
            let swanherd_ipsec::plane::PolicyAction::Protect { local, remote, .. } = set.action
            else {
                panic!("{set:?}");
            };
            assert_eq!((local, remote), (addr(own), addr(other)));
        }
    }
    world.assert_in_sync(1);
}

/// Loses what is sent from and to an address.
fn kill_path(world: &mut World, text: &str) {
    world.net.dead.insert(addr(text));
}

#[test]
fn the_initiator_roams_and_the_responder_follows() {
    for_seeds(50, |seed| {
        let mut world = up(seed, &[FIRST], &[BOBS]);
        world.set_traffic(true);
        kill_path(&mut world, FIRST);
        world.set_addresses(ALICE, &[SECOND]);

        world.run_for(Duration::from_secs(5));

        assert_between(&world, SECOND, BOBS);
        assert_eq!((updates(&world, ALICE), updates(&world, BOB)), (1, 1));
        let before = world.traffic;
        world.run_for(Duration::from_secs(10));
        let after = world.traffic;
        assert_eq!(after.refused, before.refused);
        assert!(after.sent - before.sent >= 390);
        assert!(after.arrived - before.arrived >= 390);
    });
}

#[test]
fn the_responder_roams_and_the_initiator_follows() {
    for_seeds(50, |seed| {
        let mut world = up(seed, &[FIRST], &[BOBS]);
        kill_path(&mut world, BOBS);
        world.set_addresses(BOB, &[BOBS_SECOND]);

        world.run_for(Duration::from_secs(5));

        assert_between(&world, FIRST, BOBS_SECOND);
        assert_eq!((updates(&world, ALICE), updates(&world, BOB)), (1, 1));
    });
}

#[test]
fn both_sides_roam_in_turn_over_a_rough_network_and_meet_again() {
    for_seeds(100, |seed| {
        let mut world = up(seed, &[FIRST, SECOND], &[BOBS]);
        world.net.conditions = crate::net::Conditions::rough(50);
        let uplinks = [FIRST, SECOND];
        for turn in 0..6 {
            let alive = uplinks[turn % 2];
            world.net.dead = BTreeSet::from([addr(uplinks[(turn + 1) % 2])]);
            world.set_addresses(ALICE, &[alive]);
            world.run_for(Duration::from_secs(45));
        }
        world.net.conditions = crate::net::Conditions::default();
        world.run_for(Duration::from_secs(60));
        assert_between(&world, SECOND, BOBS);
        // At first she was there already.
        assert_eq!((updates(&world, ALICE), updates(&world, BOB)), (5, 5));
    });
}

#[test]
fn an_uplink_that_still_serves_is_kept_and_further_addresses_are_told() {
    let mut world = up(200, &[FIRST], &[BOBS]);
    world.set_addresses(ALICE, &[SECOND, FIRST]);
    world.run_for(Duration::from_secs(5));
    assert_between(&world, FIRST, BOBS);
    assert_eq!(updates(&world, ALICE), 0);

    // Bob has learned of the other address: he finds Alice there when the first is dead, and she
    // answers there, so that nobody takes the other for dead until she moves.
    kill_path(&mut world, FIRST);
    world.run_for(Duration::from_secs(60));
    assert_eq!(world.host(BOB).count(IkeState::Established), 1);
    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(30));
    assert_between(&world, SECOND, BOBS);
}

#[test]
fn a_peer_that_does_not_answer_is_looked_for_at_its_other_addresses() {
    let mut world = up(201, &[FIRST], &[BOBS, BOBS_SECOND]);
    kill_path(&mut world, BOBS);

    // Ten seconds of silence until the question, four until it is repeated over all paths.
    world.run_for(Duration::from_secs(20));

    assert_between(&world, FIRST, BOBS_SECOND);
    assert_eq!((updates(&world, ALICE), updates(&world, BOB)), (1, 1));
}

#[test]
fn roaming_from_ipv4_to_ipv6_works_where_the_peer_has_both() {
    let (alices, bobs) = ("2001:db8:1::1", "2001:db8:2::1");
    let mut world = up(202, &[FIRST], &[BOBS, bobs]);
    kill_path(&mut world, FIRST);
    world.set_addresses(ALICE, &[alices]);
    world.run_for(Duration::from_secs(10));
    assert_between(&world, alices, bobs);
}

#[test]
fn a_connection_with_an_own_address_does_not_move_to_another_uplink() {
    let (mut alice, bob) = connections();
    alice.local_addrs = vec![HostSpec::Addr(addr(FIRST))];
    let mut world = up_with(World::new(203), (alice, bob), &[FIRST], &[BOBS]);
    world.set_addresses(ALICE, &[SECOND, FIRST]);
    world.run_for(Duration::from_secs(5));
    assert_between(&world, FIRST, BOBS);

    // Nor when it is gone; it waits for it to come back.
    kill_path(&mut world, FIRST);
    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(30));
    assert_eq!(updates(&world, ALICE), 0);
    world.net.dead.clear();
    world.set_addresses(ALICE, &[FIRST]);
    world.run_for(Duration::from_secs(30));
    assert_between(&world, FIRST, BOBS);
}

#[test]
fn traffic_is_not_sent_to_an_address_where_the_peer_has_not_been_proven() {
    let mut world = up(204, &[FIRST], &[BOBS]);
    // Bob's question whether Alice receives at her new address never gets there; all else does.
    let mut bobs = 0;
    world.filter = Some(Box::new(move |transmit| {
        let to_second = transmit.remote.ip() == addr(SECOND);
        bobs += u32::from(to_second);
        !to_second || bobs == 1
    }));
    kill_path(&mut world, FIRST);
    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(8));
    assert_eq!(ends(&world, BOB).1.ip(), addr(SECOND));
    let out = world.host(BOB).plane.of(Direction::Out).next().unwrap();
    assert_eq!(out.dst, addr(FIRST));

    world.filter = None;
    world.run_for(Duration::from_secs(60));
    assert_between(&world, SECOND, BOBS);
}

#[test]
fn a_message_over_another_path_is_answered_there_and_moves_nothing() {
    let (alice, mut bob) = connections();
    bob.dpd_delay = Duration::ZERO;
    let mut world = up_with(World::new(205), (alice, bob), &[FIRST, SECOND], &[BOBS]);
    world.tape = Some(Vec::new());
    world.run_for(Duration::from_secs(11));
    let tape = world.tape.take().unwrap();
    let question = tape
        .iter()
        .find(|transmit| transmit.local.ip() == addr(FIRST) && !transmit.keepalive)
        .unwrap()
        .clone();
    // The same question again, from another address.
    world.tape = Some(Vec::new());
    world.inject(
        BOB,
        swanherd_ike::api::Datagram {
            local: question.remote,
            remote: SocketAddr::new(addr(SECOND), 4500),
            payload: question.payload,
        },
    );
    let answer = world.tape.take().unwrap();
    assert_eq!(answer[0].remote.ip(), addr(SECOND));
    assert_between(&world, FIRST, BOBS);
}

#[test]
fn roaming_behind_a_nat_and_out_again_switches_encapsulation() {
    let inside = "10.99.0.5";
    let mut world = up(206, &[FIRST], &[BOBS]);
    assert!(!world.host(ALICE).children()[0].encap);
    world.net.nats = vec![Nat::new(addr(inside), addr("203.0.113.1"))];
    world.set_addresses(ALICE, &[inside]);
    world.run_for(Duration::from_secs(10));
    world.assert_in_sync(1);
    let alice = &world.host(ALICE).ike_sas()[0];
    assert!(alice.nat_local && !alice.nat_remote);
    let bob = &world.host(BOB).ike_sas()[0];
    assert!(bob.nat_remote && !bob.nat_local);
    assert_eq!(bob.remote.ip(), addr("203.0.113.1"));
    for host in [ALICE, BOB] {
        assert!(world.host(host).children()[0].encap);
    }

    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(10));
    world.net.nats.clear();
    assert_between(&world, SECOND, BOBS);
    assert!(!world.host(ALICE).ike_sas()[0].nat_local);
    for host in [ALICE, BOB] {
        assert!(!world.host(host).children()[0].encap);
    }
}

#[test]
fn a_new_nat_mapping_is_noticed_by_a_liveness_check_and_told() {
    let mut world = World::new(207);
    let inside = world.host(ALICE).addr;
    world.net.nats = vec![Nat::new(inside, addr("203.0.113.1"))];
    let mut world = established_with(world, connections());
    let before = ends(&world, BOB).1;
    world.net.nats[0].rebind();

    world.run_for(Duration::from_secs(25));

    let now = world.way_in(inside, 4500);
    assert_eq!(before.ip(), now.ip());
    assert_ne!(before, now);
    assert_eq!(ends(&world, BOB).1, now);
    let out = world.host(BOB).plane.of(Direction::Out).next().unwrap();
    assert_eq!(out.encap.unwrap().dst_port, now.port());
    assert_eq!((updates(&world, ALICE), updates(&world, BOB)), (0, 1));
    world.assert_in_sync(1);
}

#[test]
fn a_move_during_any_rekey_leaves_one_tunnel_at_the_new_address() {
    for_seeds(300, |seed| {
        let mut world = up(seed, &[FIRST], &[BOBS]);
        world.net.conditions.delay = 20..=60;
        for host in [ALICE, BOB] {
            let mut selector = Selector::default();
            if (seed + host as u64).is_multiple_of(2) {
                selector.child = Some("net".to_owned());
            } else {
                selector.ike_id = Some(world.host(host).ike_sas()[0].id);
            }
            if host == ALICE || seed.is_multiple_of(3) {
                world.rekey(host, selector);
            }
        }
        world.run_for(Duration::from_millis(seed % 200));
        kill_path(&mut world, FIRST);
        world.set_addresses(ALICE, &[SECOND]);
        world.run_for(Duration::from_secs(150));
        assert_between(&world, SECOND, BOBS);
    });
}

#[test]
fn an_attempt_from_an_address_that_has_gone_is_made_again_from_another_one() {
    let mut world = World::new(210);
    world.set_addresses(ALICE, &[FIRST]);
    world.net.cut = true;
    let (mut alice, bob) = connections();
    alice.keyingtries = 0;
    alice.children[0].start_action.start = true;
    crate::handshake::ready(&mut world, (alice, bob));
    world.run_for(Duration::from_secs(10));
    kill_path(&mut world, FIRST);
    world.net.cut = false;
    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(15));
    assert_between(&world, SECOND, BOBS);
}

#[test]
fn without_mobike_another_ike_sa_takes_over_from_the_new_address() {
    let (mut alice, bob) = connections();
    alice.mobike = false;
    let mut world = up_with(World::new(208), (alice, bob), &[FIRST], &[BOBS]);
    let before = world.host(ALICE).ike_sas()[0].spi_i;
    kill_path(&mut world, FIRST);
    world.set_addresses(ALICE, &[SECOND]);
    world.run_for(Duration::from_secs(200));
    assert_between(&world, SECOND, BOBS);
    assert_ne!(world.host(ALICE).ike_sas()[0].spi_i, before);
}

#[test]
fn nobody_leads_away_a_host_that_is_behind_a_nat() {
    let mut world = World::new(209);
    let inside = world.host(ALICE).addr;
    world.net.nats = vec![Nat::new(inside, addr("203.0.113.1"))];
    let (mut alice, mut bob) = pair();
    alice.mobike = false;
    bob.remote_addrs = vec![HostSpec::Any(None)];
    bob.dpd_delay = Duration::from_secs(10);
    let mut world = established_with(world, (alice, bob));
    let (local, remote) = ends(&world, ALICE);
    // A question of Bob's that is authentic and new, but comes from elsewhere.
    world.tape = Some(Vec::new());
    world.net.cut = true;
    world.run_for(Duration::from_secs(12));
    let tape = world.tape.take().unwrap();
    let bobs = |transmit: &&swanherd_ike::api::Transmit| transmit.local.ip() == addr(BOBS);
    let question = tape.iter().find(bobs).unwrap().clone();
    world.tape = Some(Vec::new());
    world.inject(
        ALICE,
        swanherd_ike::api::Datagram {
            local,
            remote: SocketAddr::new(addr("203.0.113.66"), 4500),
            payload: question.payload,
        },
    );
    let answer = world.tape.take().unwrap();
    assert_eq!(answer[0].remote.ip(), addr("203.0.113.66"));
    assert_eq!(ends(&world, ALICE), (local, remote));
    let out = world.host(ALICE).plane.of(Direction::Out).next().unwrap();
    assert_eq!(out.dst, remote.ip());
}
