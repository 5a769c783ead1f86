// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Deletion, liveness, keeping up, commands.

use std::time::Duration;

use swanherd_config::model::Action;

use super::harness::*;
use crate::api::{ChildState, Command, Event, IkeState, Selector};

const START: Action = Action {
    trap: false,
    start: true,
};

fn terminate(selector: Selector) -> Command {
    Command::Terminate {
        selector,
        force: false,
    }
}

fn ike() -> Selector {
    Selector {
        ike: Some("gw".to_owned()),
        ..Selector::default()
    }
}

#[test]
fn either_side_can_delete_the_ike_sa_and_nothing_is_left() {
    for on_alice in [true, false] {
        let mut pair = connected();

        let id = pair.command(on_alice, terminate(ike()));
        pair.drive();

        let asked = if on_alice { &pair.alice } else { &pair.bob };
        assert_eq!(asked.done(id), Some(Ok(())));
        for host in [&pair.alice, &pair.bob] {
            assert!(host.sas().is_empty());
            assert!(host.plane.is_empty(), "{:?}", host.plane);
            assert_eq!(
                host.story(),
                ["ike up", "child up", "ike down", "child down"]
            );
        }
    }
}

#[test]
fn either_side_can_delete_a_child_and_the_ike_sa_stays() {
    for on_alice in [true, false] {
        let mut pair = connected();
        let selector = Selector {
            child: Some("net".to_owned()),
            ..Selector::default()
        };

        let id = pair.command(on_alice, terminate(selector));
        pair.drive();

        let asked = if on_alice { &pair.alice } else { &pair.bob };
        assert_eq!(asked.done(id), Some(Ok(())));
        for host in [&pair.alice, &pair.bob] {
            assert!(host.plane.is_empty(), "{:?}", host.plane);
            assert_eq!(host.sa().state, IkeState::Established);
            assert_eq!(host.story(), ["ike up", "child up", "child down"]);
            let state = host.events.iter().rev().find_map(|event| match event {
                Event::ChildUpDown { up: false, sa } => {
                    sa.children.values().next().map(|c| c.state)
                }
                _ => None,
            });
            assert_eq!(state, Some(ChildState::Deleted));
        }
    }
}

#[test]
fn a_duplicate_child_is_refused_and_a_child_can_be_added() {
    let mut pair = Pair::new();
    let (mut a, mut b) = (alice(), bob());
    a.children.push(child("lan", "10.3.0.0/16", "10.4.0.0/16"));
    b.children.push(child("lan", "10.4.0.0/16", "10.3.0.0/16"));
    pair.load(a, b);
    pair.initiate("gw", "net");

    let second = pair.initiate("gw", "net");
    let other = pair.initiate("gw", "lan");

    assert_eq!(
        pair.alice.done(second),
        Some(Err("establishing CHILD_SA 'net' failed".to_owned()))
    );
    assert_eq!(pair.alice.done(other), Some(Ok(())));
    assert_eq!(pair.alice.sa().children.len(), 2);
    let reqids: Vec<u32> = pair.alice.live().iter().map(|c| c.reqid).collect();
    assert_ne!(reqids[0], reqids[1]);
    assert_tunnel(&pair);
}

#[test]
fn commands_for_the_same_child_share_one_attempt() {
    let mut pair = Pair::new();
    pair.load(alice(), bob());

    let ids: Vec<_> = (0..8)
        .map(|_| pair.command(true, initiate("gw", "net")))
        .collect();
    pair.drive();

    assert!(ids.iter().all(|id| pair.alice.done(*id) == Some(Ok(()))));
    assert_eq!(pair.alice.sas().len(), 1);
    assert_eq!(pair.bob.live().len(), 1);
}

#[test]
fn commands_without_a_target_are_refused_in_the_words_of_vici() {
    let mut pair = Pair::new();
    pair.load(alice(), bob());
    let unknown = pair.initiate("gw", "nothing");
    let nothing = pair.command(true, terminate(ike()));
    let rekey = pair.command(
        true,
        Command::Rekey {
            selector: ike(),
            reauth: false,
        },
    );
    pair.drive();

    let text = |id| pair.alice.done(id).unwrap().unwrap_err();
    assert_eq!(text(unknown), "CHILD_SA config 'nothing' not found");
    assert_eq!(text(nothing), "no matching SAs to terminate found");
    assert_eq!(text(rekey), "no matching SAs to rekey found");
}

#[test]
fn a_start_action_brings_up_and_dpd_notices_a_dead_peer_and_restarts() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.dpd_delay = Duration::from_secs(30);
    a.keyingtries = 0;
    a.children[0].start_action = START;
    a.children[0].dpd_action = START;
    pair.load(a, bob());
    assert_eq!(pair.alice.live().len(), 1);

    // The peer answers as long as it lives.
    pair.pass(Duration::from_secs(300));
    assert_eq!(pair.alice.live().len(), 1);

    // It dies without a word, and comes back without a memory of the past.
    pair.filter = Box::new(|_, _| false);
    pair.pass(Duration::from_secs(240));
    assert!(pair.alice.live().is_empty());
    assert!(pair.alice.plane.sas.is_empty());
    pair.filter = Box::new(|_, _| true);
    pair.pass(Duration::from_secs(400));

    assert_eq!(pair.alice.live().len(), 1, "{:#?}", pair.alice.logs());
    assert_tunnel(&pair);
}

#[test]
fn unloading_undoes_the_start_action() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.children[0].start_action = START;
    pair.load(a, bob());
    assert_eq!(pair.bob.live().len(), 1);

    let now = pair.now;
    assert!(pair.alice.endpoint.unload_connection(now, "gw"));
    assert!(!pair.alice.endpoint.unload_connection(now, "gw"));
    pair.drive();

    assert!(pair.alice.sas().is_empty());
    assert!(pair.bob.sas().is_empty());
    assert!(pair.alice.plane.is_empty());
}

#[test]
fn an_identical_definition_disturbs_nothing() {
    let mut pair = connected();
    let sent = pair.sent;

    let now = pair.now;
    pair.alice
        .endpoint
        .load_connection(now, std::sync::Arc::new(alice()));
    pair.drive();

    assert_eq!(pair.sent, sent);
    assert_eq!(pair.alice.live().len(), 1);
}

#[test]
fn a_trap_waits_for_traffic() {
    use swanherd_ipsec::plane::PlaneEvent;
    let mut pair = Pair::new();
    let mut a = alice();
    a.children[0].start_action = Action {
        trap: true,
        start: false,
    };
    pair.load(a, bob());
    let trap = pair.alice.plane.policies.values().next().unwrap().clone();
    assert!(trap.trap);
    let swanherd_ipsec::plane::PolicyAction::Protect { reqid, .. } = trap.action else {
        panic!("{trap:?}");
    };

    let now = pair.now;
    let acquire = PlaneEvent::Acquire {
        reqid,
        local: trap.local[0],
        remote: trap.remote[0],
    };
    pair.alice.endpoint.handle_plane_event(now, acquire.clone());
    pair.alice.endpoint.handle_plane_event(now, acquire);
    pair.drive();

    let live = pair.alice.live();
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].reqid, reqid);
    assert_tunnel(&pair);
}

#[test]
fn a_child_that_cannot_be_rekeyed_is_made_anew_at_the_end_of_its_lifetime() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.children[0].rekey_time = Duration::ZERO;
    let mut b = bob();
    b.children[0].rekey_time = Duration::ZERO;
    pair.load(a, b);
    pair.initiate("gw", "net");
    let before = pair.alice.live()[0].inbound;

    pair.pass(Duration::from_secs(3970));

    assert_ne!(pair.alice.live()[0].inbound, before);
    assert_tunnel(&pair);
}

#[test]
fn shutdown_tells_the_peer_and_ends_in_bounded_time_without_it() {
    let mut pair = connected();
    let now = pair.now;
    pair.alice.endpoint.shutdown(now);
    pair.drive();
    assert!(pair.alice.sas().is_empty());
    assert!(pair.bob.sas().is_empty());
    assert!(pair.alice.plane.is_empty() && pair.bob.plane.is_empty());

    let mut pair = connected();
    pair.filter = Box::new(|_, _| false);
    let now = pair.now;
    pair.alice.endpoint.shutdown(now);
    pair.pass(Duration::from_secs(3));
    assert!(pair.alice.sas().is_empty());
    assert!(pair.alice.plane.is_empty());
}

#[test]
fn hundreds_of_connections_come_up_and_each_finds_its_own() {
    let mut pair = Pair::new();
    for n in 0..300_u32 {
        let (a_net, b_net) = (
            format!("10.{}.{}.0/24", n / 200, n % 200),
            format!("172.{}.{}.0/24", 16 + n / 200, n % 200),
        );
        let name = format!("site{n}");
        let mut a = connection(
            ALICE,
            BOB,
            &format!("a{n}.example"),
            &format!("b{n}.example"),
        );
        a.name.clone_from(&name);
        let mut b = connection(
            BOB,
            ALICE,
            &format!("b{n}.example"),
            &format!("a{n}.example"),
        );
        b.name = name;
        a.children = vec![child("net", &a_net, &b_net)];
        b.children = vec![child("net", &b_net, &a_net)];
        a.children[0].start_action = START;
        let now = pair.now;
        pair.bob
            .endpoint
            .load_connection(now, std::sync::Arc::new(b));
        pair.alice
            .endpoint
            .load_connection(now, std::sync::Arc::new(a));
    }

    pair.drive();

    assert_eq!(pair.alice.live().len(), 300);
    assert_tunnel(&pair);
    let mut reqids: Vec<u32> = pair.alice.live().iter().map(|c| c.reqid).collect();
    reqids.sort_unstable();
    reqids.dedup();
    assert_eq!(reqids.len(), 300);
    for sa in pair.bob.sas() {
        let name = sa.connection.clone().unwrap();
        let number = name.strip_prefix("site").unwrap();
        assert_eq!(sa.local_id.data, format!("b{number}.example").into_bytes());
    }
}

#[test]
fn a_changed_child_replaces_the_old_one_even_while_the_ike_sa_is_busy() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.dpd_delay = Duration::from_secs(10);
    a.children[0].start_action = START;
    pair.load(a.clone(), bob());
    // A probe is in flight and is not answered for a while.
    pair.filter = Box::new(|_, _| false);
    pair.pass(Duration::from_secs(11));

    let mut changed = a;
    changed.children[0].remote_ts = vec![net("10.2.3.0/24")];
    let now = pair.now;
    pair.alice
        .endpoint
        .load_connection(now, std::sync::Arc::new(changed));
    pair.drive();
    pair.filter = Box::new(|_, _| true);
    pair.pass(Duration::from_secs(30));

    let live = pair.alice.live();
    assert_eq!(live.len(), 1, "{:#?}", pair.alice.logs());
    assert_eq!(live[0].remote_ts[0].prefix_len(), Some(24));
    assert_tunnel(&pair);
}

#[test]
fn a_refusal_that_is_lost_is_given_again() {
    let mut pair = Pair::new();
    pair.bob
        .endpoint
        .set_credentials(psk_credentials("another secret"));
    pair.load(alice(), bob());
    let mut answers = 0;
    pair.filter = Box::new(move |to_bob, _| {
        answers += u32::from(!to_bob);
        to_bob || answers != 2
    });

    let id = pair.initiate("gw", "net");
    assert_eq!(pair.alice.done(id), None);
    pair.pass(Duration::from_secs(5));

    assert!(pair.alice.done(id).unwrap().is_err());
    assert!(pair.alice.sas().is_empty());
}
