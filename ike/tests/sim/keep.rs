// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children with a start action are up whenever they can be, whatever took them down; and how
//! often that is tried.

use std::time::Duration;

use swanherd_config::model::{Action, Connection};
use swanherd_ike::api::{Command, Counter, Event, FailureReason, IkeState, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ike::wire::{ExchangeType, Message};

use crate::config::{child, ike_proposal_cbc, pair, psk, psk_of};
use crate::handshake::{established_with, ready};
use crate::plane::OpKind;
use crate::world::{ALICE, BOB, World, for_seeds};

const MINUTE: Duration = Duration::from_secs(60);
const START: Action = Action {
    trap: false,
    start: true,
};

/// Alice keeps her child up; no other action is configured anywhere.
fn kept() -> (Connection, Connection) {
    let mut connections = pair();
    connections.0.children[0].start_action = START;
    connections
}

fn up(mut world: World, connections: (Connection, Connection)) -> World {
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
    world
}

fn of_bob(child: bool) -> Selector {
    Selector {
        ike: (!child).then(|| "to-alice".to_owned()),
        child: child.then(|| "net".to_owned()),
        ..Selector::default()
    }
}

fn assert_back(world: &mut World, within: Duration) {
    let back = world.run_until(within, |world| {
        [ALICE, BOB]
            .iter()
            .all(|host| world.host(*host).children().len() == 1)
            && world.is_at_rest()
    });
    assert!(back, "the child did not come back");
    world.run_for(Duration::from_secs(30));
    world.assert_in_sync(1);
}

/// When Alice began each attempt to set up an IKE SA, in seconds since the world began.
fn attempts(world: &World) -> Vec<f64> {
    let mut seen = std::collections::BTreeSet::new();
    let begin = world.now.instant - world.elapsed();
    let events = &world.host(ALICE).events;
    events
        .iter()
        .filter_map(|(at, event)| match event {
            Event::Log(line) if line.message.starts_with("initiating IKE_SA") => {
                seen.insert(line.message.clone());
                Some((*at - begin).as_secs_f64())
            }
            _ => None,
        })
        .collect()
}

#[test]
fn the_peer_deletes_the_ike_sa() {
    let mut world = up(World::new(500), kept());
    world.terminate(BOB, of_bob(false));
    assert_back(&mut world, Duration::from_secs(5));
}

#[test]
fn the_peer_deletes_the_child() {
    let mut world = up(World::new(501), kept());
    world.terminate(BOB, of_bob(true));
    assert_back(&mut world, Duration::from_secs(5));
    assert_eq!(world.host(ALICE).ike_sas().len(), 1);
}

#[test]
fn the_peer_is_dead_for_a_while() {
    let mut connections = kept();
    connections.0.dpd_delay = Duration::from_secs(30);
    let mut world = up(World::new(502), connections.clone());
    world.net.cut = true;
    world.restart(BOB, Settings::default(), Provider::fake());
    world.load(BOB, &psk(), connections.1);
    world.run_for(10 * MINUTE);
    assert!(world.host(ALICE).children().is_empty());
    world.net.cut = false;
    assert_back(&mut world, 6 * MINUTE);
}

#[test]
fn the_peer_loses_its_memory_and_calls_by_itself() {
    let mut connections = kept();
    connections.1.children[0].start_action = START;
    let mut world = World::new(503);
    ready(&mut world, connections.clone());
    assert_back(&mut world, Duration::from_secs(20));
    world.restart(BOB, Settings::default(), Provider::fake());
    world.load(BOB, &psk(), connections.1);
    assert_back(&mut world, MINUTE);
    for host in [ALICE, BOB] {
        assert_eq!(world.host(host).ike_sas().len(), 1);
    }
}

#[test]
fn a_child_that_the_peer_does_not_bring_along_after_its_restart_comes_back() {
    let mut connections = kept();
    let other = |local, remote| child("other", local, remote);
    connections
        .0
        .children
        .push(other("10.3.0.0/16", "10.4.0.0/16"));
    connections
        .1
        .children
        .push(other("10.4.0.0/16", "10.3.0.0/16"));
    let mut world = up(World::new(504), connections.clone());
    world.restart(BOB, Settings::default(), Provider::fake());
    world.load(BOB, &psk(), connections.1);
    let command = world.initiate(BOB, "other");
    assert_eq!(world.finish(BOB, command), Ok(()));
    world.run_for(MINUTE);
    world.assert_in_sync(2);
}

#[test]
fn the_lifetime_of_the_child_is_over_and_rekeying_fails() {
    let mut connections = kept();
    let cfg = &mut connections.0.children[0];
    cfg.rekey_time = Duration::from_secs(50);
    cfg.life_time = Duration::from_secs(100);
    let mut world = up(World::new(505), connections);
    // Bob does not let anything be rekeyed.
    let mut refusing = 200;
    world.hosts[BOB]
        .plane
        .failing
        .push((OpKind::InstallSa, refusing));
    world.run_for(Duration::from_secs(120));
    assert!(world.host(ALICE).children().is_empty());
    refusing = 0;
    world.hosts[BOB].plane.failing = vec![(OpKind::InstallSa, refusing)];
    assert_back(&mut world, MINUTE);
}

#[test]
fn the_lifetime_of_the_child_is_over_while_the_peer_is_dead() {
    let mut connections = kept();
    connections.0.children[0].rekey_time = Duration::ZERO;
    connections.0.children[0].life_time = 2 * MINUTE;
    let mut world = up(World::new(515), connections);
    world.run_for(MINUTE);
    world.net.cut = true;
    // The child ends, and the IKE SA with it when nobody answers the deletion.
    world.run_for(5 * MINUTE);
    assert!(world.host(ALICE).children().is_empty());
    world.net.cut = false;
    assert_back(&mut world, 6 * MINUTE);
}

#[test]
fn the_peer_deletes_a_child_that_is_being_rekeyed() {
    for forgets in [false, true] {
        let mut world = up(World::new(518), kept());
        // What Alice asks for is lost, what she answers is not.
        world.filter = Some(Box::new(|datagram| {
            let rekey = |m: &Message| {
                m.header.exchange == ExchangeType::CreateChildSa && !m.header.flags.response
            };
            !Message::parse(&datagram.payload).is_ok_and(|message| rekey(&message))
        }));
        let child = Selector {
            child: Some("net".to_owned()),
            ..Selector::default()
        };
        world.rekey(ALICE, child);
        world.run_for(Duration::from_secs(1));
        world.terminate(BOB, of_bob(true));
        world.run_for(Duration::from_secs(1));
        if forgets {
            world.restart(BOB, Settings::default(), Provider::fake());
            world.load(BOB, &psk(), kept().1);
        } else {
            world.filter = None;
        }
        if forgets {
            let lost = |world: &World| world.host(ALICE).count(IkeState::Established) == 0;
            assert!(world.run_until(4 * MINUTE, lost));
            world.filter = None;
        }
        assert_back(&mut world, MINUTE);
    }
}

#[test]
fn the_peer_deletes_a_child_before_its_rekeying_is_asked_for() {
    let mut world = up(World::new(520), kept());
    world.hosts[ALICE].plane_delay = 50..=50;
    let child = Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    };
    world.terminate(BOB, of_bob(true));
    world.rekey(ALICE, child);
    assert_back(&mut world, MINUTE);
}

#[test]
fn the_lifetime_of_the_ike_sa_is_over() {
    let mut connections = kept();
    connections.0.rekey_time = Duration::from_secs(60);
    connections.0.over_time = Duration::from_secs(30);
    connections.1.proposals = vec![ike_proposal_cbc()];
    connections.1.proposals.extend(pair().1.proposals);
    let mut world = up(World::new(506), connections);
    // What Alice asks for is lost, what she answers is not.
    world.filter = Some(Box::new(|datagram| {
        let rekey = |m: &Message| m.header.exchange == ExchangeType::CreateChildSa;
        !Message::parse(&datagram.payload).is_ok_and(|message| rekey(&message))
    }));
    let lost = world.run_until(4 * MINUTE, |world| world.host(ALICE).children().is_empty());
    assert!(lost);
    world.filter = None;
    assert_back(&mut world, 2 * MINUTE);
}

#[test]
fn the_lifetime_of_the_ike_sa_is_over_while_a_child_is_being_made() {
    let mut connections = kept();
    connections.0.rekey_time = Duration::from_secs(60);
    connections.0.over_time = Duration::from_secs(30);
    let mut world = up(World::new(521), connections);
    let child = Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    };
    world.terminate(ALICE, child);
    world.run_for(Duration::from_secs(1));
    world.filter = Some(Box::new(|datagram| {
        let create = |m: &Message| m.header.exchange == ExchangeType::CreateChildSa;
        !Message::parse(&datagram.payload).is_ok_and(|message| create(&message))
    }));
    world.initiate(ALICE, "net");
    let old = world.host(ALICE).ike_sas()[0].spi_i;
    let over = world.run_until(3 * MINUTE, |world| {
        world.host(ALICE).ike_sas().iter().all(|sa| sa.spi_i != old)
    });
    assert!(over);
    world.filter = None;
    assert_back(&mut world, MINUTE);
}

#[test]
fn the_setup_fails_until_somebody_mends_the_secret() {
    let mut world = World::new(507);
    let connections = kept();
    world.load(BOB, &psk_of(b"wrong"), connections.1.clone());
    world.load(ALICE, &psk(), connections.0);
    world.run_for(60 * MINUTE);
    // With the usual keyingtries of 1.
    let at = attempts(&world);
    assert!((15..=25).contains(&at.len()), "{at:?}");
    world.load(BOB, &psk(), connections.1);
    assert_back(&mut world, 6 * MINUTE + MINUTE / 2);
}

#[test]
fn a_child_that_is_defined_anew_while_it_comes_up_comes_up_by_its_new_definition() {
    let mut world = World::new(519);
    let (mut alice, bob) = kept();
    world.load(BOB, &psk(), bob);
    world.load(ALICE, &psk(), alice.clone());
    let coming = world.run_until(MINUTE, |world| !world.host(ALICE).children().is_empty());
    assert!(coming);
    assert_eq!(world.host(ALICE).children()[0].installed, None);

    alice.children[0].rekey_time += MINUTE;
    world.load(ALICE, &psk(), alice);
    assert_back(&mut world, MINUTE);
}

#[test]
fn the_data_plane_refuses_what_was_agreed() {
    for (host, kind) in [
        (ALICE, OpKind::InstallSa),
        (ALICE, OpKind::InstallPolicies),
        (ALICE, OpKind::AllocSpi),
        (BOB, OpKind::InstallSa),
    ] {
        let mut world = World::new(508);
        let connections = kept();
        world.load(BOB, &psk(), connections.1);
        world.hosts[host].plane.failing.push((kind, 1));
        world.load(ALICE, &psk(), connections.0);
        assert_back(&mut world, MINUTE);
    }
}

#[test]
fn an_attempt_is_still_made_after_somebody_wanted_the_ike_sa_alone() {
    let mut world = World::new(516);
    let connections = kept();
    world.load(BOB, &psk(), connections.1);
    world.hosts[ALICE].plane.failing = vec![(OpKind::InstallPolicies, 2)];
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(2));
    assert!(world.host(ALICE).children().is_empty());

    let wanted = Command::Initiate {
        connection: Some("to-bob".to_owned()),
        child: None,
        respect_limits: false,
    };
    let command = world.command(ALICE, wanted);
    assert_eq!(world.finish(ALICE, command), Ok(()));
    assert_back(&mut world, MINUTE);
}

#[test]
fn the_data_plane_refuses_the_outbound_sa_of_a_child_that_the_peer_rekeyed() {
    // Alice answers Bob's rekeying; her outbound SA comes last, when nobody asks her any more.
    for kind in [OpKind::InstallSa, OpKind::InstallPolicies] {
        let mut world = up(World::new(509), kept());
        let selector = of_bob(true);
        world.rekey(BOB, selector);
        let rekeyed = world.run_until(MINUTE, |world| world.inbound_spis(ALICE).len() == 2);
        assert!(rekeyed);
        world.hosts[ALICE].plane.failing.push((kind, 1));
        assert_back(&mut world, 2 * MINUTE);
    }
}

#[test]
fn the_peer_discards_the_winner_of_a_collision() {
    for_seeds(40, |seed| {
        let mut world = up(World::new(seed), kept());
        let net = || of_bob(true);
        world.rekey(ALICE, net());
        world.rekey(BOB, net());
        world.run_for(Duration::from_millis(10 + seed));
        // Whatever Bob has by now goes.
        world.terminate(BOB, net());
        assert_back(&mut world, 3 * MINUTE);
    });
}

#[test]
fn attempts_back_off_with_jitter_up_to_five_minutes() {
    let mut world = World::new(510);
    let connections = kept();
    world.load(BOB, &psk_of(b"wrong"), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(60 * MINUTE);
    let at = attempts(&world);
    let waits: Vec<f64> = at.windows(2).map(|two| two[1] - two[0]).collect();
    for (wait, least) in waits.iter().zip([5.0, 10.0, 20.0, 40.0, 80.0, 160.0]) {
        assert!((least..=least * 1.21).contains(wait), "{waits:?}");
    }
    for wait in &waits[6..] {
        assert!((300.0..=361.0).contains(wait), "{waits:?}");
    }
    let mut later = waits[6..].to_vec();
    later.dedup();
    assert!(later.len() > 3, "no jitter: {later:?}");
}

#[test]
fn the_next_attempt_is_told_and_withdrawn() {
    let mut world = World::new(511);
    let connections = kept();
    world.load(BOB, &psk_of(b"wrong"), connections.1.clone());
    world.load(ALICE, &psk(), connections.0);
    world.run_for(MINUTE);
    let plans = |world: &World| -> Vec<_> {
        let events = &world.host(ALICE).events;
        events
            .iter()
            .filter_map(|(told, event)| match event {
                Event::NextAttempt {
                    connection,
                    child,
                    at,
                } => {
                    assert_eq!((connection.as_str(), child.as_str()), ("to-bob", "net"));
                    Some((*told, *at))
                }
                _ => None,
            })
            .collect()
    };
    // Each plan is withdrawn at the moment at which it is carried out.
    let before = plans(&world);
    assert!(before.len() >= 6, "{before:?}");
    for two in before.windows(2) {
        if let (_, Some(at)) = two[0] {
            assert_eq!(two[1], (at, None));
        }
    }
    let failed = world.host(ALICE).events.iter().any(|(_, event)| {
        matches!(event, Event::Failure { connection: Some(name), reason, .. }
            if name == "to-bob" && *reason == FailureReason::LocalAuthFailed)
    });
    assert!(failed);

    world.load(BOB, &psk(), connections.1);
    world.run_for(6 * MINUTE);
    world.assert_in_sync(1);
    assert_eq!(plans(&world).last().unwrap().1, None);
}

#[test]
fn a_child_that_is_deleted_as_soon_as_it_is_up_is_no_storm() {
    let mut world = World::new(512);
    let connections = kept();
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    let mut deleted = 0;
    let end = world.elapsed() + 20 * MINUTE;
    while world.elapsed() < end {
        let there = world.run_until(Duration::from_secs(10), |world| {
            world.is_at_rest() && !world.host(BOB).children().is_empty()
        });
        if there {
            world.terminate(BOB, of_bob(true));
            deleted += 1;
            world.run_for(Duration::from_secs(1));
        }
    }
    assert!((5..=15).contains(&deleted), "{deleted} times in 20 minutes");
}

#[test]
fn keyingtries_is_how_many_sequences_an_operator_waits_for() {
    for (tries, sent) in [(1, 6), (3, 18)] {
        let mut connections = pair();
        connections.0.keyingtries = tries;
        let mut world = World::new(513);
        ready(&mut world, connections);
        world.net.cut = true;
        world.tape = Some(Vec::new());
        let command = world.initiate(ALICE, "net");
        assert!(world.finish(ALICE, command).is_err());
        assert_eq!(world.tape.as_ref().unwrap().len(), sent, "{tries}");
        world.run_for(30 * MINUTE);
        assert_eq!(world.tape.as_ref().unwrap().len(), sent, "{tries}");
        world.assert_clean(ALICE);
        assert!(world.host(ALICE).counted(Counter::PeerTimeout) == tries as usize);
    }
}

#[test]
fn keyingtries_zero_goes_on_until_the_peer_answers() {
    let mut connections = pair();
    connections.0.keyingtries = 0;
    let mut world = World::new(514);
    ready(&mut world, connections);
    world.net.cut = true;
    let command = world.initiate(ALICE, "net");
    world.run_for(60 * MINUTE);
    assert_eq!(world.host(ALICE).result(command), None);
    assert_eq!(world.host(ALICE).count(IkeState::Connecting), 1);
    world.net.cut = false;
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(10));
    world.assert_in_sync(1);
}

#[test]
fn a_second_sequence_after_a_lost_authentication_starts_from_scratch() {
    let mut connections = pair();
    connections.0.keyingtries = 2;
    let mut world = World::new(515);
    ready(&mut world, connections);
    let mut lost = 0;
    world.filter = Some(Box::new(move |datagram| {
        let auth = Message::parse(&datagram.payload)
            .is_ok_and(|message| message.header.exchange == ExchangeType::IkeAuth);
        lost += u32::from(auth);
        !auth || lost > 6
    }));
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(MINUTE);
    world.assert_in_sync(1);
}

#[test]
fn what_an_operator_takes_down_stays_down() {
    for by_child in [true, false] {
        let mut world = up(World::new(516), kept());
        let selector = Selector {
            ike: Some("to-bob".to_owned()),
            child: by_child.then(|| "net".to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(ALICE, selector);
        assert_eq!(world.finish(ALICE, command), Ok(()));
        world.run_for(30 * MINUTE);
        assert!(world.host(ALICE).children().is_empty());
        let command = world.initiate(ALICE, "net");
        assert_eq!(world.finish(ALICE, command), Ok(()));
        world.run_for(Duration::from_secs(1));
        world.assert_in_sync(1);
    }
}

#[test]
fn taking_down_a_child_that_is_connecting_ends_its_attempt() {
    for (by_child, passes_init) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut world = World::new(517);
        let connections = kept();
        world.load(BOB, &psk(), connections.1);
        world.filter = Some(Box::new(move |datagram| {
            let init = Message::parse(&datagram.payload)
                .is_ok_and(|message| message.header.exchange == ExchangeType::IkeSaInit);
            init && passes_init
        }));
        world.load(ALICE, &psk(), connections.0);
        world.run_for(Duration::from_secs(10));
        assert_eq!(world.host(ALICE).count(IkeState::Connecting), 1);
        let waiting = world.initiate(ALICE, "net");
        let selector = Selector {
            ike: Some("to-bob".to_owned()),
            child: by_child.then(|| "net".to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(ALICE, selector);
        assert_eq!(world.finish(ALICE, command), Ok(()));
        assert!(world.finish(ALICE, waiting).is_err());
        world.assert_clean(ALICE);
        world.filter = None;
        world.run_for(30 * MINUTE);
        world.assert_clean(ALICE);
    }
}

#[test]
fn taking_down_a_child_between_two_attempts_ends_them() {
    let mut world = World::new(518);
    let connections = kept();
    world.load(BOB, &psk_of(b"wrong"), connections.1.clone());
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(4));
    world.assert_clean(ALICE);
    let selector = Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    };
    let command = world.terminate(ALICE, selector.clone());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.load(BOB, &psk(), connections.1);
    world.run_for(30 * MINUTE);
    world.assert_clean(ALICE);
    // There is nothing left to end.
    let command = world.terminate(ALICE, selector);
    assert!(world.finish(ALICE, command).is_err());
}

#[test]
fn taking_down_one_child_of_two_that_are_connecting_leaves_the_other() {
    let mut connections = kept();
    let other = |local, remote| child("other", local, remote);
    connections
        .0
        .children
        .push(other("10.3.0.0/16", "10.4.0.0/16"));
    connections
        .1
        .children
        .push(other("10.4.0.0/16", "10.3.0.0/16"));
    for first in ["net", "other"] {
        let mut world = World::new(519);
        let mut connections = connections.clone();
        connections.0.children[0].start_action = Action::default();
        ready(&mut world, connections);
        let kept = if first == "net" { "other" } else { "net" };
        world.net.cut = true;
        let ended = world.initiate(ALICE, first);
        let goes_on = world.initiate(ALICE, kept);
        world.run_for(Duration::from_secs(1));
        let selector = Selector {
            child: Some(first.to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(ALICE, selector);
        assert_eq!(world.finish(ALICE, command), Ok(()));
        world.net.cut = false;
        assert_eq!(world.finish(ALICE, goes_on), Ok(()));
        assert!(world.finish(ALICE, ended).is_err());
        world.run_for(Duration::from_secs(10));
        world.assert_in_sync(1);
        assert_eq!(world.host(ALICE).children()[0].name, kept);
    }
}

#[test]
fn what_the_peer_deletes_while_it_is_taken_down_stays_down() {
    for by_child in [true, false] {
        let mut connections = kept();
        connections.0.children[0].close_action = START;
        let mut world = up(World::new(520), connections);
        // Something else is under way, so that the deletion waits.
        world.hosts[ALICE].compute_delay = 100..=100;
        world.rekey(
            ALICE,
            Selector {
                ike: Some("to-bob".to_owned()),
                ..Selector::default()
            },
        );
        let selector = Selector {
            ike: Some("to-bob".to_owned()),
            child: by_child.then(|| "net".to_owned()),
            ..Selector::default()
        };
        world.terminate(ALICE, selector);
        world.terminate(BOB, of_bob(by_child));
        world.run_for(10 * MINUTE);
        assert!(world.host(ALICE).children().is_empty());
    }
}

#[test]
fn a_dead_peer_sets_off_what_dpd_action_says() {
    let trap = Action {
        trap: true,
        start: false,
    };
    for action in [Action::default(), trap, START] {
        let mut connections = pair();
        connections.0.dpd_delay = Duration::from_secs(30);
        connections.0.children[0].dpd_action = action;
        let mut world = established_with(World::new(521), connections.clone());
        world.net.cut = true;
        world.restart(BOB, Settings::default(), Provider::fake());
        world.load(BOB, &psk(), connections.1);
        world.run_for(15 * MINUTE);
        let plane = &world.host(ALICE).plane;
        let trapped = plane.policies.values().any(|set| set.trap);
        assert_eq!(trapped, action.trap, "{action:?}");
        world.net.cut = false;
        world.run_for(6 * MINUTE);
        let up = world.host(ALICE).children().len() == 1;
        assert_eq!(up, action.start, "{action:?}");
    }
}

#[test]
fn a_dead_peer_leaves_a_trap_and_nothing_is_tried() {
    let mut connections = pair();
    connections.0.dpd_delay = Duration::from_secs(30);
    connections.0.children[0].start_action.trap = true;
    let mut world = established_with(World::new(522), connections);
    world.net.cut = true;
    world.run_for(5 * MINUTE);
    world.tape = Some(Vec::new());
    world.run_for(60 * MINUTE);
    assert_eq!(world.tape.as_ref().unwrap().len(), 0);
    let plane = &world.host(ALICE).plane;
    assert!(plane.policies.values().any(|set| set.trap));
    assert!(world.host(ALICE).ike_sas().is_empty());
}

#[test]
fn a_deletion_by_the_peer_sets_off_what_close_action_says() {
    let trap = Action {
        trap: true,
        start: false,
    };
    for by_child in [true, false] {
        for action in [Action::default(), trap, START] {
            let mut connections = pair();
            connections.0.children[0].close_action = action;
            let mut world = established_with(World::new(523), connections);
            world.terminate(BOB, of_bob(by_child));
            world.run_for(Duration::from_secs(30));
            let host = world.host(ALICE);
            let trapped = host.plane.policies.values().any(|set| set.trap);
            assert_eq!(trapped, action.trap, "{action:?}");
            assert_eq!(
                host.children().len(),
                usize::from(action.start),
                "{action:?}"
            );
        }
    }
}

#[test]
fn close_actions_on_both_sides_bring_up_one_tunnel() {
    for_seeds(20, |seed| {
        let mut connections = pair();
        connections.0.children[0].close_action = START;
        connections.1.children[0].close_action = START;
        let mut world = established_with(World::new(seed), connections);
        world.command(
            if seed & 1 == 0 { ALICE } else { BOB },
            Command::Terminate {
                selector: Selector {
                    child: Some("net".to_owned()),
                    ..Selector::default()
                },
                force: false,
            },
        );
        world.run_for(MINUTE);
        world.assert_in_sync(1);
        for host in [ALICE, BOB] {
            assert_eq!(world.host(host).ike_sas().len(), 1);
        }
    });
}

#[test]
fn an_ike_rekey_that_is_blocked_until_both_give_up_ends_with_one_child() {
    for_seeds(20, |seed| {
        let mut connections = kept();
        connections.1.children[0].start_action = START;
        for conn in [&mut connections.0, &mut connections.1] {
            conn.rekey_time = Duration::from_secs(60);
            conn.over_time = Duration::from_secs(120);
            conn.rand_time = Duration::from_secs(5);
        }
        let mut world = World::new(seed);
        ready(&mut world, connections);
        world.run_for(Duration::from_secs(50));
        world.net.cut = true;
        world.run_for(Duration::from_secs(200 + seed * 10));
        world.net.cut = false;
        world.run_for(8 * MINUTE);
        let rest = world.run_until(MINUTE, World::is_at_rest);
        assert!(rest);
        world.assert_in_sync(1);
    });
}

#[test]
fn a_link_that_bounces_during_an_ike_rekey_keeps_the_new_ike_sa() {
    for_seeds(60, |seed| {
        let mut world = established_with(World::new(seed), pair());
        let ike = Selector {
            ike: Some("to-bob".to_owned()),
            ..Selector::default()
        };
        world.rekey(ALICE, ike);
        world.run_for(Duration::from_millis(seed));
        world.net.cut = true;
        world.run_for(Duration::from_secs(20));
        world.net.cut = false;
        world.run_for(2 * MINUTE);
        world.assert_in_sync(1);
        for host in [ALICE, BOB] {
            assert_eq!(world.host(host).ike_sas().len(), 1);
        }
    });
}

#[test]
fn nothing_but_what_was_asked_for_is_retried_when_a_setup_fails() {
    // Two children with start actions; an operator has taken one of them down.
    let mut connections = kept();
    let other = |local, remote| child("other", local, remote);
    connections
        .0
        .children
        .push(other("10.3.0.0/16", "10.4.0.0/16"));
    connections.0.children[1].start_action = START;
    connections
        .1
        .children
        .push(other("10.4.0.0/16", "10.3.0.0/16"));
    connections.0.dpd_delay = Duration::from_secs(30);
    let mut world = World::new(524);
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(2);
    let selector = Selector {
        child: Some("other".to_owned()),
        ..Selector::default()
    };
    let command = world.terminate(ALICE, selector);
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.net.cut = true;
    world.run_for(10 * MINUTE);
    world.net.cut = false;
    world.run_for(10 * MINUTE);
    let names: Vec<String> = world
        .host(ALICE)
        .children()
        .into_iter()
        .map(|child| child.name)
        .collect();
    assert_eq!(names, ["net"]);
}
