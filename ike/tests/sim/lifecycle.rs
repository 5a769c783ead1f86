// SPDX-License-Identifier: Apache-2.0 OR MIT
//! INFORMATIONAL: delete, liveness, restart; and what an operator asks for.

use std::time::{Duration, Instant};

use swanherd_config::model::{Action, Connection};
use swanherd_ike::api::{Command, Counter, Event, IkeState, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::plane::{PlaneEvent, PolicyAction};

use crate::config::{pair, psk};
use crate::handshake::{established, established_with, ready};
use crate::world::{ALICE, BOB, World};

#[test]
fn either_side_deletes_the_ike_sa() {
    for host in [ALICE, BOB] {
        let mut world = established(40);
        let name = if host == ALICE { "to-bob" } else { "to-alice" };
        let selector = Selector {
            ike: Some(name.to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(host, selector);
        assert_eq!(world.finish(host, command), Ok(()));
        world.run_for(Duration::from_secs(10));
        world.assert_all_clean();
        for host in [ALICE, BOB] {
            let down = |event: &Event| matches!(event, Event::IkeUpDown { up: false, .. });
            let events = &world.host(host).events;
            assert_eq!(events.iter().filter(|(_, event)| down(event)).count(), 1);
        }
    }
}

#[test]
fn what_was_terminated_has_left_the_data_plane_when_the_command_ends() {
    for child in [None, Some("net".to_owned())] {
        let mut world = established(54);
        world.hosts[ALICE].plane_delay = 50..=100;
        let selector = Selector {
            ike: child.is_none().then(|| "to-bob".to_owned()),
            child,
            ..Selector::default()
        };
        let command = world.terminate(ALICE, selector);
        assert_eq!(world.finish(ALICE, command), Ok(()));
        assert!(world.host(ALICE).plane.sas.is_empty());
        assert!(world.host(ALICE).plane.policies.is_empty());
    }
}

#[test]
fn a_lost_answer_to_the_delete_of_an_ike_sa_is_given_again() {
    let mut world = established(44);
    let selector = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    let command = world.terminate(ALICE, selector);
    // The request is on its way by then, and arrives; the answer does not.
    world.run_for(Duration::from_millis(5));
    world.net.cut = true;
    world.run_for(Duration::from_secs(1));
    assert!(world.host(BOB).ike_sas().is_empty());
    world.net.cut = false;
    let before = world.elapsed();

    assert_eq!(world.finish(ALICE, command), Ok(()));

    // At the first retransmission, rather than when the deletion is given up.
    assert!(world.elapsed() - before < Duration::from_secs(5));
    assert_eq!(world.host(BOB).counted(Counter::RetransmitReceived), 1);
    world.run_for(Duration::from_secs(10));
    world.assert_all_clean();
}

#[test]
fn either_side_deletes_a_child_and_the_ike_sa_stays() {
    for host in [ALICE, BOB] {
        let mut world = established(41);
        let selector = Selector {
            child: Some("net".to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(host, selector);
        assert_eq!(world.finish(host, command), Ok(()));
        world.run_for(Duration::from_secs(10));
        world.assert_in_sync(0);
    }
}

#[test]
fn both_sides_delete_at_the_same_moment() {
    for by_child in [true, false] {
        let mut world = established(42);
        for host in [ALICE, BOB] {
            let selector = if by_child {
                Selector {
                    child: Some("net".to_owned()),
                    ..Selector::default()
                }
            } else {
                let id = world.host(host).ike_sas()[0].id;
                Selector {
                    ike_id: Some(id),
                    ..Selector::default()
                }
            };
            world.terminate(host, selector);
        }
        world.run_for(Duration::from_secs(60));
        if by_child {
            world.assert_in_sync(0);
        } else {
            world.assert_all_clean();
        }
    }
}

#[test]
fn terminating_what_is_not_there_is_an_error() {
    let mut world = established(43);
    let selector = Selector {
        ike: Some("nobody".to_owned()),
        ..Selector::default()
    };
    let command = world.terminate(ALICE, selector);
    assert!(world.finish(ALICE, command).is_err());
    world.assert_in_sync(1);
}

#[test]
fn force_does_not_wait_for_a_dead_peer() {
    let mut world = established(44);
    world.net.cut = true;
    let selector = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    let force = true;
    let begin = world.elapsed();
    let command = world.command(ALICE, Command::Terminate { selector, force });
    assert_eq!(world.finish(ALICE, command), Ok(()));
    assert!(world.elapsed() - begin < Duration::from_secs(2));
    world.run_for(Duration::from_secs(2));
    world.assert_clean(ALICE);
}

fn with_dpd() -> (Connection, Connection) {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.dpd_delay = Duration::from_secs(30);
    }
    connections
}

#[test]
fn a_live_peer_answers_liveness_checks() {
    let mut world = established_with(World::new(45), with_dpd());
    world.tape = Some(Vec::new());
    world.run_for(Duration::from_secs(600));
    let sent = world.tape.as_ref().unwrap().len();
    // One exchange in about every 30 s, from whichever side comes first.
    assert!((30..=90).contains(&sent), "{sent} messages");
    world.assert_in_sync(1);
}

#[test]
fn listings_are_told_that_a_liveness_check_is_over() {
    let mut world = established_with(World::new(68), with_dpd());
    let checks = |world: &World| world.host(ALICE).ike_sas()[0].tasks_active == ["IKE_DPD"];
    assert!(world.run_until(Duration::from_secs(600), checks));
    let begun = world.now.instant;
    assert!(world.run_until(Duration::from_secs(5), |world| !checks(world)));
    let told = |(at, event): &(Instant, Event)| *at > begun && matches!(event, Event::Changed(_));
    assert!(world.host(ALICE).events.iter().any(told));
}

#[test]
fn a_dead_peer_is_noticed_and_everything_cleared() {
    let mut world = established_with(World::new(46), with_dpd());
    world.net.cut = true;
    world.run_for(Duration::from_secs(30 + 170));
    world.assert_all_clean();
    assert_eq!(world.host(ALICE).counted(Counter::PeerTimeout), 1);
}

#[test]
fn a_lost_peer_is_called_again_if_so_configured() {
    let mut connections = with_dpd();
    connections.0.keyingtries = 0;
    connections.0.children[0].dpd_action = Action {
        trap: false,
        start: true,
    };
    let mut world = established_with(World::new(47), connections);
    world.net.cut = true;
    world.run_for(Duration::from_secs(400));
    assert_eq!(world.host(ALICE).count(IkeState::Established), 0);
    world.net.cut = false;
    let up = world.run_until(Duration::from_secs(300), |world| {
        world.host(ALICE).count(IkeState::Established) == 1
    });
    assert!(up, "not called again");
    world.run_for(Duration::from_secs(10));
    world.assert_in_sync(1);
}

#[test]
fn a_peer_that_lost_its_state_is_replaced_by_its_new_self() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.unique = swanherd_config::model::Unique::Replace;
    }
    let (alice, _) = connections.clone();
    let mut world = established_with(World::new(48), connections);
    world.restart(ALICE, Settings::default(), Provider::fake());
    world.load(ALICE, &psk(), alice);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    // Bob deletes the old one, and nobody is there to answer that.
    world.run_for(Duration::from_secs(300));
    world.assert_in_sync(1);
}

#[test]
fn start_action_brings_up_the_tunnel_when_it_is_loaded() {
    let mut connections = pair();
    connections.0.children[0].start_action = Action {
        trap: false,
        start: true,
    };
    let mut world = World::new(49);
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
}

#[test]
fn a_packet_that_hits_a_trap_brings_up_the_tunnel() {
    let mut connections = pair();
    connections.0.children[0].start_action = Action {
        trap: true,
        start: false,
    };
    let mut world = World::new(50);
    ready(&mut world, connections);
    world.run_for(Duration::from_secs(1));
    let plane = &world.host(ALICE).plane;
    let trap = plane.policies.values().find(|policy| policy.trap).unwrap();
    let PolicyAction::Protect { reqid, .. } = trap.action else {
        panic!("a trap that does not protect");
    };
    let host = |text: &str| swanherd_ipsec::TrafficSelector::host(text.parse().unwrap());
    let acquire = PlaneEvent::Acquire {
        reqid,
        local: host("10.1.0.5"),
        remote: host("10.2.0.9"),
    };
    world.plane_event(ALICE, acquire.clone());
    // Packets keep coming while the first one is being dealt with.
    world.plane_event(ALICE, acquire);
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
    assert_eq!(world.host(ALICE).children()[0].reqid, reqid);
}

#[test]
fn unloading_a_connection_removes_its_trap() {
    let mut connections = pair();
    connections.0.children[0].start_action = Action {
        trap: true,
        start: false,
    };
    let mut world = World::new(51);
    ready(&mut world, connections);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.host(ALICE).plane.policies.len(), 1);
    world.unload(ALICE, "to-bob");
    world.run_for(Duration::from_secs(1));
    // Draining happens with the next call.
    world.shutdown(ALICE);
    world.run_for(Duration::from_secs(1));
    assert!(world.host(ALICE).plane.policies.is_empty());
}

#[test]
fn shutdown_does_not_wait_for_a_deletion_that_was_under_way() {
    let mut world = established(40);
    world.net.cut = true;
    let selector = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    world.terminate(ALICE, selector);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.host(ALICE).count(IkeState::Deleting), 1);

    world.shutdown(ALICE);
    world.run_for(Duration::from_millis(2_100));
    world.assert_clean(ALICE);
}

#[test]
fn shutdown_leaves_no_successor_of_an_ike_sa_that_the_peer_rekeys() {
    let mut world = established(40);
    world.hosts[BOB].compute_delay = 200..=200;
    world.net.conditions.delay = 50..=50;
    let selector = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    world.rekey(ALICE, selector);
    world.run_for(Duration::from_millis(240));
    world.shutdown(BOB);
    world.run_for(Duration::from_secs(3));
    world.assert_clean(BOB);
}

#[test]
fn shutdown_deletes_everything_on_both_sides() {
    let mut world = established(52);
    world.shutdown(ALICE);
    world.run_for(Duration::from_secs(10));
    world.assert_all_clean();
    assert!(world.host(ALICE).plane.policies.is_empty());
}

#[test]
fn a_vanished_client_cancels_nothing_but_its_wait() {
    let mut world = World::new(53);
    ready(&mut world, pair());
    let command = world.initiate(ALICE, "net");
    world.cancel(ALICE, command);
    world.run_for(Duration::from_secs(5));
    assert_eq!(world.host(ALICE).result(command), None);
}
