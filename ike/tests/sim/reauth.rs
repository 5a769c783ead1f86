// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reauthentication, in both orders, begun by either side or by both.

use std::time::Duration;

use swanherd_config::model::{Action, Connection, Unique};
use swanherd_ike::api::{Command, Event, IkeState, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ike::wire::{ExchangeType, Message};

use crate::config::{pair, psk, psk_of};
use crate::handshake::{established_with, ready};
use crate::net::Conditions;
use crate::world::{ALICE, BOB, World, for_seeds};

const MINUTE: Duration = Duration::from_secs(60);

fn times(conn: &mut Connection, reauth: u64, over: u64) {
    conn.reauth_time = Duration::from_secs(reauth);
    conn.over_time = Duration::from_secs(over);
    conn.rand_time = Duration::from_secs(over);
}

fn reauthenticate(world: &mut World, host: usize) {
    let selector = Selector {
        ike_id: Some(world.host(host).ike_sas()[0].id),
        ..Selector::default()
    };
    let reauth = true;
    world.command(host, Command::Rekey { selector, reauth });
}

/// How often an IKE SA came up.
fn ups(world: &World, host: usize) -> usize {
    let up = |event: &Event| matches!(event, Event::IkeUpDown { up: true, .. });
    let events = &world.host(host).events;
    events.iter().filter(|(_, event)| up(event)).count()
}

/// Ends the traffic and sees that none of it was lost, and that one tunnel is left.
fn assert_one_tunnel_without_a_gap(world: &mut World) {
    world.set_traffic(false);
    world.run_for(Duration::from_secs(30));
    world.assert_in_sync(1);
    for host in [ALICE, BOB] {
        assert_eq!(world.host(host).ike_sas().len(), 1);
    }
    let traffic = world.traffic;
    assert_eq!((traffic.blocked, traffic.refused), (0, 0), "{traffic:?}");
}

#[test]
fn an_initiator_reauthenticates_again_and_again_without_losing_a_packet() {
    for unique in [Unique::No, Unique::Never, Unique::Keep, Unique::Replace] {
        let mut connections = pair();
        times(&mut connections.0, 60, 6);
        connections.1.unique = unique;
        let mut world = established_with(World::new(400), connections);
        world.set_traffic(true);
        world.run_for(10 * MINUTE + MINUTE / 2);
        let ups = ups(&world, ALICE);
        assert!((10..=14).contains(&ups), "{ups} IKE_SAs with {unique:?}");
        assert_one_tunnel_without_a_gap(&mut world);
    }
}

#[test]
fn an_initiator_follows_the_lifetime_that_the_responder_demands() {
    let mut connections = pair();
    times(&mut connections.1, 60, 6);
    let mut world = established_with(World::new(401), connections);
    world.set_traffic(true);
    world.run_for(10 * MINUTE + MINUTE / 2);

    let ups = ups(&world, BOB);
    assert!((10..=16).contains(&ups), "{ups} IKE_SAs");
    assert!(
        world.host(ALICE).ike_sas()[0].initiator,
        "roles have changed"
    );
    assert_one_tunnel_without_a_gap(&mut world);
}

#[test]
fn a_deletion_is_answered_once_packets_take_the_successor() {
    let mut world = established_with(World::new(407), pair());
    // The peer receives by the old SA no more once it has the answer.
    world.hosts[BOB].plane_delay = 100..=100;
    world.set_traffic(true);
    for _ in 0..5 {
        reauthenticate(&mut world, ALICE);
        world.run_for(Duration::from_secs(10));
    }
    assert_eq!(ups(&world, BOB), 6);
    assert_one_tunnel_without_a_gap(&mut world);
}

#[test]
fn a_responder_reauthenticates_where_the_initiator_does_not() {
    let mut connections = pair();
    times(&mut connections.1, 60, 10);
    let mut world = World::new(402);
    // The initiator never learns what is demanded of it.
    world.load(ALICE, &psk(), connections.0.clone());
    connections.0.reauth_time = Duration::ZERO;
    let mut silent = connections.1.clone();
    silent.reauth_time = Duration::ZERO;
    world.load(BOB, &psk(), silent);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.load(BOB, &psk(), connections.1);
    world.set_traffic(true);
    reauthenticate(&mut world, BOB);
    world.run_for(Duration::from_secs(10));

    assert!(world.host(BOB).ike_sas()[0].initiator);
    assert_one_tunnel_without_a_gap(&mut world);
}

#[test]
fn both_sides_with_the_same_reauthentication_time_keep_one_tunnel() {
    for_seeds(10, |seed| {
        let mut connections = pair();
        times(&mut connections.0, 60, 6);
        times(&mut connections.1, 60, 6);
        let mut world = established_with(World::new(seed), connections);
        world.set_traffic(true);
        world.run_for(30 * MINUTE);
        assert_one_tunnel_without_a_gap(&mut world);
    });
}

#[test]
fn both_sides_that_reauthenticate_at_once_settle_on_one_tunnel() {
    for_seeds(100, |seed| {
        let conditions = Conditions {
            delay: 5..=60,
            ..Conditions::default()
        };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        world.set_traffic(true);
        world.run_for(Duration::from_millis(500 + seed));
        reauthenticate(&mut world, ALICE);
        world.run_for(Duration::from_millis(seed % 10 * 20));
        if world.host(BOB).ike_sas().len() == 1 {
            reauthenticate(&mut world, BOB);
        }
        world.run_for(2 * MINUTE);
        assert_one_tunnel_without_a_gap(&mut world);
    });
}

#[test]
fn both_sides_that_reauthenticate_at_once_over_a_bad_network_settle_on_one_tunnel() {
    for_seeds(100, |seed| {
        // An answer that never arrives leaves one side with an IKE SA of its own.
        let mut connections = pair();
        connections.0.children[0].start_action.start = true;
        connections.0.dpd_delay = Duration::from_secs(30);
        connections.1.dpd_delay = Duration::from_secs(30);
        let mut world = World::new(seed);
        ready(&mut world, connections);
        world.run_for(Duration::from_secs(2));
        world.net.conditions = Conditions {
            delay: 5..=60,
            loss: 300,
            ..Conditions::default()
        };
        reauthenticate(&mut world, ALICE);
        world.run_for(Duration::from_millis(seed % 10 * 20));
        reauthenticate(&mut world, BOB);
        world.run_for(5 * MINUTE);
        world.net.conditions = Conditions::default();
        world.run_for(6 * MINUTE);
        world.assert_in_sync(1);
        for host in [ALICE, BOB] {
            assert_eq!(world.host(host).ike_sas().len(), 1);
        }
    });
}

#[test]
fn rekeying_the_ike_sa_does_not_put_off_reauthentication() {
    let mut connections = pair();
    times(&mut connections.0, 100, 10);
    connections.0.rekey_time = Duration::from_secs(30);
    let mut world = established_with(World::new(403), connections);
    world.set_traffic(true);
    world.run_for(5 * MINUTE);
    let rekey = |event: &Event| matches!(event, Event::IkeRekey { .. });
    let events = &world.host(ALICE).events;
    assert!(events.iter().filter(|(_, event)| rekey(event)).count() >= 6);
    assert_eq!(ups(&world, ALICE), 4);
    assert_one_tunnel_without_a_gap(&mut world);
}

/// Break before make.
fn breaking() -> World {
    let settings = Settings {
        make_before_break: false,
        ..Settings::default()
    };
    let mut connections = pair();
    connections.1.remote_addrs = connections.1.remote_addrs.clone();
    established_with(World::with(404, settings, Provider::fake()), connections)
}

#[test]
fn break_before_make_deletes_the_old_and_makes_the_new_at_once() {
    for host in [ALICE, BOB] {
        let mut world = breaking();
        let before = world.host(host).ike_sas()[0].id;
        reauthenticate(&mut world, host);
        world.run_for(Duration::from_secs(1));

        world.assert_in_sync(1);
        let after = &world.host(host).ike_sas()[0];
        assert_ne!(after.id, before);
        let story: Vec<bool> = world
            .host(host)
            .events
            .iter()
            .filter_map(|(_, event)| match event {
                Event::IkeUpDown { up, .. } => Some(*up),
                _ => None,
            })
            .collect();
        assert_eq!(story, [true, false, true]);
    }
}

#[test]
fn break_before_make_goes_on_until_the_peer_is_back() {
    let mut world = breaking();
    world.net.cut = true;
    reauthenticate(&mut world, ALICE);
    // Long enough for a whole attempt to fail.
    world.run_for(10 * MINUTE);
    assert_eq!(world.host(ALICE).count(IkeState::Established), 0);
    world.net.cut = false;
    let back = world.run_until(6 * MINUTE, |world| {
        world.host(ALICE).count(IkeState::Established) == 1
            && world.host(BOB).count(IkeState::Established) == 1
    });
    assert!(back, "nobody called again");
    world.run_for(MINUTE);
    assert_eq!(world.host(ALICE).children().len(), 1);
}

#[test]
fn a_failed_reauthentication_keeps_the_old_tunnel_and_is_tried_again() {
    let mut connections = pair();
    times(&mut connections.0, 600, 300);
    connections.0.rand_time = Duration::ZERO;
    let mut world = established_with(World::new(405), connections.clone());
    world.set_traffic(true);
    world.load(BOB, &psk_of(b"another"), connections.1.clone());
    world.run_for(Duration::from_secs(660));
    // Whatever is tried, the old one carries the traffic.
    assert_eq!(world.host(ALICE).count(IkeState::Established), 1);
    world.load(BOB, &psk(), connections.1);
    world.run_for(Duration::from_secs(120));

    assert_eq!(ups(&world, ALICE), 2);
    assert_one_tunnel_without_a_gap(&mut world);
}

#[test]
fn without_reauthentication_the_hard_limit_ends_the_ike_sa() {
    let mut connections = pair();
    times(&mut connections.0, 60, 20);
    let mut world = established_with(World::new(406), connections);
    // No new IKE SA can be made.
    world.filter = Some(Box::new(|datagram| {
        let init = |message: &Message| message.header.exchange == ExchangeType::IkeSaInit;
        !Message::parse(&datagram.payload).is_ok_and(|message| init(&message))
    }));
    let start = world.elapsed();
    let lost = world.run_until(3 * MINUTE, |world| world.host(ALICE).children().is_empty());
    let after = (world.elapsed() - start).as_secs();
    assert!(lost && (78..=80).contains(&after), "{lost} after {after} s");
    assert_eq!(world.host(BOB).children().len(), 1);
    world.run_for(Duration::from_secs(1));
    assert!(world.host(BOB).children().is_empty(), "Bob was not told");

    // What was to take over goes on, though there is nothing left to take over from.
    world.filter = None;
    world.run_for(2 * MINUTE);
    world.assert_in_sync(1);
}

#[test]
fn a_tunnel_lost_while_it_is_reauthenticated_comes_back() {
    let mut connections = pair();
    connections.0.children[0].close_action = Action {
        trap: false,
        start: true,
    };
    let mut world = established_with(World::new(407), connections);
    reauthenticate(&mut world, ALICE);
    world.run_for(Duration::from_millis(5));
    let selector = Selector {
        ike: Some("to-alice".to_owned()),
        ..Selector::default()
    };
    world.terminate(BOB, selector);
    world.run_for(MINUTE);
    world.assert_in_sync(1);
    assert_eq!(world.host(ALICE).ike_sas().len(), 1);
}
