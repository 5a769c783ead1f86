// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several IKE SAs with one peer: policies of uniqueness, both sides calling at once, and two hosts
//! with one identity.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use swanherd_config::model::{Action, Connection, HostSpec, Unique};
use swanherd_ike::api::{ChildState, Event, FailureReason, IkeState, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ike::wire::{ExchangeType, Message};

use crate::config::{child, pair, psk};
use crate::handshake::ready;
use crate::net::Conditions;
use crate::world::{ALICE, BOB, World, for_seeds};

const MINUTE: Duration = Duration::from_secs(60);
const CAROL: usize = 2;
const POLICIES: [Unique; 4] = [Unique::No, Unique::Never, Unique::Keep, Unique::Replace];
const START: Action = Action {
    trap: false,
    start: true,
};

/// Both sides bring up the same child.
fn both_start(unique: Unique) -> (Connection, Connection) {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.unique = unique;
        conn.children[0].start_action = START;
    }
    connections
}

fn assert_one_ike_sa(world: &World) {
    for host in [ALICE, BOB] {
        let sas = world.host(host).ike_sas();
        assert_eq!(sas.len(), 1);
    }
}

#[test]
fn both_sides_that_call_at_once_settle_on_one_ike_sa_without_losing_a_packet() {
    for unique in [Unique::No, Unique::Keep, Unique::Replace] {
        for_seeds(60, |seed| {
            let conditions = Conditions {
                delay: 5..=80,
                ..Conditions::default()
            };
            let mut world = World::new(seed).conditions(conditions);
            let connections = both_start(unique);
            world.load(BOB, &psk(), connections.1);
            world.run_for(Duration::from_millis(seed % 20 * 10));
            world.load(ALICE, &psk(), connections.0);
            world.run_for(Duration::from_secs(1));
            world.set_traffic(true);
            world.run_for(MINUTE);
            world.set_traffic(false);
            world.run_for(Duration::from_secs(5));
            assert_one_ike_sa(&world);
            world.assert_in_sync(1);
            let traffic = world.traffic;
            assert_eq!((traffic.blocked, traffic.refused), (0, 0), "{traffic:?}");
        });
    }
}

#[test]
fn a_child_survives_the_policy_though_both_ike_sas_are_rekeyed_before_one_goes() {
    let mut connections = pair();
    let other = |local, remote| child("other", local, remote);
    let (alice, bob) = (&mut connections.0, &mut connections.1);
    alice.children.push(other("10.3.0.0/16", "10.4.0.0/16"));
    bob.children.push(other("10.4.0.0/16", "10.3.0.0/16"));
    alice.children[0].start_action.start = true;
    bob.children[1].start_action.start = true;
    bob.unique = Unique::Replace;
    let mut world = World::new(7);
    // What Alice begins with comes to Bob when he has set up an IKE SA of his own.
    let mut lost = false;
    let bobs = world.host(BOB).addr;
    world.filter = Some(Box::new(move |datagram| {
        let init = |m: &Message| m.header.exchange == ExchangeType::IkeSaInit;
        let first = !lost
            && datagram.remote.ip() == bobs
            && Message::parse(&datagram.payload).is_ok_and(|message| init(&message));
        lost |= first;
        !first
    }));
    world.load(ALICE, &psk(), connections.0);
    world.load(BOB, &psk(), connections.1);
    world.run_for(Duration::from_secs(6));
    assert_eq!(world.host(BOB).count(IkeState::Established), 2);

    let both = Selector {
        ike: Some("to-alice".to_owned()),
        ..Selector::default()
    };
    world.rekey(BOB, both);
    world.run_for(MINUTE);
    assert_one_ike_sa(&world);
    world.assert_in_sync(2);
}

#[test]
fn two_ike_sas_that_are_rekeyed_before_one_is_given_up_still_become_one() {
    for_seeds(20, |seed| {
        let mut world = World::new(seed);
        ready(&mut world, both_start(Unique::No));
        world.run_for(Duration::from_millis(500));
        let count = world.host(ALICE).ike_sas().len();
        let both = Selector {
            ike: Some("to-bob".to_owned()),
            ..Selector::default()
        };
        world.rekey(ALICE, both);
        world.run_for(MINUTE);
        assert_eq!(count, 2);
        assert_one_ike_sa(&world);
        world.assert_in_sync(1);
    });
}

#[test]
fn both_sides_that_call_at_once_over_a_bad_network_settle_on_one_ike_sa() {
    for unique in [Unique::No, Unique::Keep, Unique::Replace] {
        for_seeds(60, |seed| {
            let mut world = World::new(seed);
            world.net.conditions = Conditions {
                delay: 5..=300,
                loss: 300,
                ..Conditions::default()
            };
            // An answer that never arrives leaves one side with an IKE SA of its own.
            let mut connections = both_start(unique);
            connections.0.dpd_delay = Duration::from_secs(30);
            connections.1.dpd_delay = Duration::from_secs(30);
            ready(&mut world, connections);
            world.run_for(4 * MINUTE);
            world.net.conditions = Conditions::default();
            world.run_for(6 * MINUTE);
            assert_one_ike_sa(&world);
            world.assert_in_sync(1);
        });
    }
}

#[test]
fn what_each_side_has_brought_up_at_once_is_all_on_the_ike_sa_that_stays() {
    for_seeds(40, |seed| {
        let mut connections = pair();
        let other = |local, remote| child("other", local, remote);
        connections
            .0
            .children
            .push(other("10.3.0.0/16", "10.4.0.0/16"));
        connections
            .1
            .children
            .push(other("10.4.0.0/16", "10.3.0.0/16"));
        connections.0.children[0].start_action = START;
        connections.1.children[1].start_action = START;
        let mut world = World::new(seed);
        ready(&mut world, connections);
        world.run_for(MINUTE);
        assert_one_ike_sa(&world);
        world.assert_in_sync(2);
        let names: BTreeSet<String> = world
            .host(ALICE)
            .children()
            .into_iter()
            .map(|child| child.name)
            .collect();
        assert_eq!(names.len(), 2);
    });
}

#[test]
fn with_unique_never_both_ike_sas_stay() {
    let mut world = World::new(600);
    ready(&mut world, both_start(Unique::Never));
    world.run_for(MINUTE);
    assert_eq!(world.host(ALICE).ike_sas().len(), 2);
    assert_eq!(world.host(BOB).ike_sas().len(), 2);
}

/// Bob accepts whoever has Alice's identity, from anywhere; Carol claims to be Alice.
fn world_of_three(seed: u64, unique: Unique, close: Action) -> (World, Connection) {
    let mut connections = pair();
    connections.1.remote_addrs = vec![HostSpec::Any(None)];
    connections.1.unique = unique;
    connections.0.unique = unique;
    connections.0.dpd_delay = Duration::from_secs(30);
    let cfg = &mut connections.0.children[0];
    cfg.start_action = START;
    cfg.close_action = close;
    let mut world = World::new(seed);
    let carol = world.add_host(
        "carol",
        "203.0.113.5",
        Settings::default(),
        Provider::fake(),
    );
    assert_eq!(carol, CAROL);
    world.load(BOB, &psk(), connections.1);
    (world, connections.0)
}

/// Where Bob's peers are.
fn holders(world: &World) -> Vec<IpAddr> {
    let sas = world.host(BOB).ike_sas();
    sas.iter()
        .filter(|sa| sa.state == IkeState::Established)
        .map(|sa| sa.remote.ip())
        .collect()
}

/// How often an IKE SA came up at Bob's.
fn ups(world: &World) -> usize {
    let up = |event: &Event| matches!(event, Event::IkeUpDown { up: true, .. });
    let events = &world.host(BOB).events;
    events.iter().filter(|(_, event)| up(event)).count()
}

fn conflicts(world: &World) -> usize {
    let alert =
        |event: &Event| matches!(event, Event::Alert { kind, .. } if *kind == "identity-conflict");
    let events = &world.host(BOB).events;
    events.iter().filter(|(_, event)| alert(event)).count()
}

#[test]
fn a_second_host_with_the_same_identity_is_treated_as_the_policy_says() {
    for unique in POLICIES {
        let (mut world, mut conn) = world_of_three(601, unique, Action::default());
        conn.children[0].start_action = Action::default();
        // Nobody is told of a first contact: that is a matter of its own.
        conn.unique = Unique::Never;
        for host in [ALICE, CAROL] {
            world.load(host, &psk(), conn.clone());
            let command = world.initiate(host, "net");
            let outcome = world.finish(host, command);
            assert_eq!(outcome.is_err(), unique == Unique::Keep && host == CAROL);
            world.run_for(Duration::from_secs(1));
        }
        world.run_for(Duration::from_secs(30));
        let expected: &[usize] = match unique {
            Unique::No | Unique::Never => &[ALICE, CAROL],
            Unique::Keep => &[ALICE],
            Unique::Replace => &[CAROL],
        };
        let expected: Vec<IpAddr> = expected.iter().map(|h| world.host(*h).addr).collect();
        assert_eq!(holders(&world), expected, "{unique:?}");
    }
}

#[test]
fn a_first_contact_replaces_what_was_before_unless_that_is_never_to_be() {
    for unique in POLICIES {
        let (mut world, conn) = world_of_three(602, unique, Action::default());
        world.load(ALICE, &psk(), conn.clone());
        world.run_for(Duration::from_secs(2));
        // Alice crashes, and comes back elsewhere.
        world.restart(ALICE, Settings::default(), Provider::fake());
        world.load(CAROL, &psk(), conn);
        world.run_for(Duration::from_secs(30));
        let alice = world.host(ALICE).addr;
        let carol = world.host(CAROL).addr;
        let expected = match unique {
            Unique::Never => vec![alice, carol],
            _ => vec![carol],
        };
        assert_eq!(holders(&world), expected, "{unique:?}");
        assert_eq!(conflicts(&world), 0);
    }
}

#[test]
fn a_host_that_moves_to_and_fro_is_followed_and_is_no_conflict() {
    for unique in [Unique::No, Unique::Replace] {
        let (mut world, conn) = world_of_three(603, unique, Action::default());
        for round in 0..20 {
            let (here, gone) = if round % 2 == 0 {
                (ALICE, CAROL)
            } else {
                (CAROL, ALICE)
            };
            world.restart(gone, Settings::default(), Provider::fake());
            world.load(here, &psk(), conn.clone());
            world.run_for(Duration::from_secs(5));
            let sas = world.host(BOB).ike_sas();
            let addr = world.host(here).addr;
            let live = sas.iter().any(|sa| {
                sa.state == IkeState::Established
                    && sa.remote.ip() == addr
                    && sa
                        .children
                        .values()
                        .any(|c| c.state == ChildState::Installed)
            });
            assert!(live, "round {round}");
        }
        world.run_for(MINUTE);
        assert_eq!(holders(&world).len(), 1);
        assert_eq!(conflicts(&world), 0);
    }
}

#[test]
fn two_hosts_with_one_identity_are_reported_and_do_not_take_turns_for_ever() {
    for unique in [Unique::No, Unique::Keep, Unique::Replace] {
        for close in [Action::default(), START] {
            let (mut world, conn) = world_of_three(604, unique, close);
            world.load(ALICE, &psk(), conn.clone());
            world.run_for(Duration::from_secs(5));
            world.load(CAROL, &psk(), conn);
            world.run_for(60 * MINUTE);

            assert_eq!(conflicts(&world), 1, "{unique:?}");
            let ups = ups(&world);
            assert!(ups <= 6, "{ups} times with {unique:?}");
            assert_eq!(holders(&world).len(), 1);
            let told = world
                .host(BOB)
                .events
                .iter()
                .rev()
                .find_map(|(_, event)| match event {
                    Event::Failure {
                        connection: Some(name),
                        reason,
                        text,
                        ..
                    } if *reason == FailureReason::IdentityConflict => {
                        assert_eq!(name, "to-alice");
                        Some(text.clone())
                    }
                    _ => None,
                });
            let told = told.expect("nobody was told");
            for part in ["alice.example", "192.0.2.1", "203.0.113.5"] {
                assert!(told.contains(part), "{told}");
            }
        }
    }
}

#[test]
fn the_other_host_of_a_conflict_takes_over_when_the_holder_is_gone() {
    let (mut world, conn) = world_of_three(605, Unique::Replace, START);
    world.load(ALICE, &psk(), conn.clone());
    world.run_for(Duration::from_secs(5));
    world.load(CAROL, &psk(), conn);
    world.run_for(30 * MINUTE);
    assert_eq!(conflicts(&world), 1);
    let holder = holders(&world)[0];
    let (holder, other) = if holder == world.host(ALICE).addr {
        (ALICE, CAROL)
    } else {
        (CAROL, ALICE)
    };
    world.restart(holder, Settings::default(), Provider::fake());
    let addr = world.host(other).addr;
    let taken = world.run_until(15 * MINUTE, |world| holders(world) == [addr]);
    assert!(taken, "the dead holder is kept");
}

#[test]
fn a_peer_that_is_calling_is_not_told_of_a_first_contact() {
    // Bob's call is under way when Alice authenticates herself.
    let mut world = World::new(606);
    ready(&mut world, pair());
    world.tape = Some(Vec::new());
    world.initiate(BOB, "net");
    world.initiate(ALICE, "net");
    world.run_for(MINUTE);
    assert_one_ike_sa(&world);
    world.assert_in_sync(1);
    let auths = world.tape.as_ref().unwrap().iter().filter(|datagram| {
        Message::parse(&datagram.payload)
            .is_ok_and(|message| message.header.exchange == ExchangeType::IkeAuth)
    });
    assert!(auths.count() >= 4);
}
