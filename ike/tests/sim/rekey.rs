// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CREATE_CHILD_SA: rekeying by either side, by both at once, and under traffic.

use std::collections::BTreeSet;
use std::time::Duration;

use swanherd_config::model::Connection;
use swanherd_ike::api::{Command, Event, IkeState, Selector};
use swanherd_ipsec::registry::KeyExchangeId;

use crate::config::{child, esp_proposal, pair};
use crate::handshake::{established, established_with};
use crate::net::Conditions;
use crate::plane::OpKind;
use crate::world::{ALICE, BOB, World, for_seeds};

fn the_child() -> Selector {
    Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    }
}

fn the_ike_sa(host: usize) -> Selector {
    let name = if host == ALICE { "to-bob" } else { "to-alice" };
    Selector {
        ike: Some(name.to_owned()),
        ..Selector::default()
    }
}

/// Long enough for the replaced SAs to be gone.
const AFTERMATH: Duration = Duration::from_secs(60);

#[test]
fn either_side_rekeys_a_child_without_losing_a_packet() {
    for host in [ALICE, BOB] {
        let mut world = established(30);
        let before = world.inbound_spis(ALICE);
        world.set_traffic(true);
        world.run_for(Duration::from_secs(1));

        let command = world.rekey(host, the_child());
        assert_eq!(world.finish(host, command), Ok(()));
        world.run_for(AFTERMATH);
        world.set_traffic(false);
        world.run_for(Duration::from_secs(1));

        world.assert_in_sync(1);
        assert_ne!(world.inbound_spis(ALICE), before);
        assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
        assert_eq!(world.traffic.arrived, world.traffic.sent);
        assert!(world.traffic.sent > 1000);
        for host in [ALICE, BOB] {
            let told = |event: &Event| matches!(event, Event::ChildRekey { .. });
            let events = &world.host(host).events;
            assert_eq!(events.iter().filter(|(_, event)| told(event)).count(), 1);
        }
    }
}

#[test]
fn a_child_is_rekeyed_with_a_key_exchange_of_its_own() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.children[0].proposals = vec![esp_proposal(&[KeyExchangeId::Ecp256])];
    }
    let mut world = established_with(World::new(31), connections);
    let command = world.rekey(ALICE, the_child());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(AFTERMATH);

    world.assert_in_sync(1);
    let suite = world.host(BOB).children()[0].suite.unwrap();
    assert_eq!(suite.key_exchange, Some(KeyExchangeId::Ecp256));
}

#[test]
fn either_side_rekeys_the_ike_sa_and_the_children_stay() {
    for host in [ALICE, BOB] {
        let mut world = established(32);
        let (old, before) = (
            world.host(ALICE).ike_sas()[0].spi_i,
            world.inbound_spis(ALICE),
        );
        world.set_traffic(true);

        let command = world.rekey(host, the_ike_sa(host));
        assert_eq!(world.finish(host, command), Ok(()));
        world.run_for(AFTERMATH);

        world.assert_in_sync(1);
        let sas = world.host(ALICE).ike_sas();
        assert_eq!(sas.len(), 1);
        assert_ne!(sas[0].spi_i, old);
        assert_eq!(world.inbound_spis(ALICE), before);
        assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));

        // The new one can do everything that the old one could.
        let command = world.rekey(1 - host, the_child());
        assert_eq!(world.finish(1 - host, command), Ok(()));
        world.run_for(AFTERMATH);
        world.assert_in_sync(1);
        let command = world.rekey(1 - host, the_ike_sa(1 - host));
        assert_eq!(world.finish(1 - host, command), Ok(()));
        world.run_for(AFTERMATH);
        world.assert_in_sync(1);
        assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
    }
}

#[test]
fn simultaneous_child_rekeys_end_with_one_child() {
    for_seeds(100, |seed| {
        let conditions = Conditions {
            delay: 5..=100,
            ..Conditions::default()
        };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        world.set_traffic(true);
        world.rekey(ALICE, the_child());
        world.run_for(Duration::from_millis(seed % 40 * 5));
        world.rekey(BOB, the_child());
        world.run_for(AFTERMATH * 2);
        world.assert_in_sync(1);
        assert_eq!(world.traffic.blocked, 0);
    });
}

#[test]
fn simultaneous_ike_rekeys_end_with_one_ike_sa() {
    for_seeds(100, |seed| {
        let conditions = Conditions {
            delay: 5..=100,
            ..Conditions::default()
        };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        world.rekey(ALICE, the_ike_sa(ALICE));
        world.run_for(Duration::from_millis(seed % 40 * 5));
        world.rekey(BOB, the_ike_sa(BOB));
        world.run_for(AFTERMATH * 2);
        world.assert_in_sync(1);
        assert_eq!(world.host(ALICE).ike_sas().len(), 1);
        assert_eq!(world.host(BOB).ike_sas().len(), 1);
    });
}

#[test]
fn a_child_rekey_that_meets_an_ike_rekey_ends_well() {
    for_seeds(100, |seed| {
        let conditions = Conditions {
            delay: 5..=100,
            ..Conditions::default()
        };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        world.rekey(ALICE, the_ike_sa(ALICE));
        world.run_for(Duration::from_millis(seed % 40 * 5));
        world.rekey(BOB, the_child());
        world.run_for(AFTERMATH * 2);
        world.assert_in_sync(1);
        assert_eq!(world.host(ALICE).count(IkeState::Established), 1);
    });
}

/// Rekeys its child every 60 s and its IKE SA every 300 s, each with some jitter.
fn lively() -> (Connection, Connection) {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.rekey_time = Duration::from_secs(300);
        conn.rand_time = Duration::from_secs(60);
        conn.children[0].rekey_time = Duration::from_secs(60);
        conn.children[0].life_time = Duration::from_secs(90);
        conn.children[0].rand_time = Duration::from_secs(20);
    }
    connections
}

#[test]
fn a_random_part_of_each_lifetime_is_left_to_chance_and_no_more() {
    let mut seen = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
    for seed in 0..20 {
        let mut connections = lively();
        let conn = &mut connections.0;
        conn.rekey_time = Duration::from_secs(400);
        conn.reauth_time = Duration::from_secs(500);
        conn.rand_time = Duration::from_secs(50);
        let cfg = &conn.children[0];
        let child = cfg.rekey_time - cfg.rand_time..=cfg.rekey_time;
        let world = established_with(World::new(seed), connections);
        let sa = &world.host(ALICE).ike_sas()[0];
        let began = sa.established.unwrap();
        let plans = [
            (sa.rekey_at.unwrap() - began, 350..=400),
            (sa.reauth_at.unwrap() - began, 450..=500),
        ];
        for (index, (after, range)) in plans.into_iter().enumerate() {
            let millis = after.as_millis();
            assert!((range.start() * 1000..=range.end() * 1000).contains(&millis));
            seen[index].insert(millis);
        }
        let own = &world.host(ALICE).children()[0];
        // The plan is made when the SAs are handed to the data plane, a moment before.
        let after = own.rekey_at.unwrap() + Duration::from_millis(10) - own.installed.unwrap();
        assert!((*child.start()..=*child.end() + Duration::from_millis(10)).contains(&after));
        seen[2].insert(after.as_millis());
    }
    for plans in seen {
        assert!(plans.len() > 15, "no jitter: {plans:?}");
    }
}

#[test]
fn an_hour_of_lifetimes_passes_without_losing_a_packet() {
    let mut world = established_with(World::new(36), lively());
    world.set_traffic(true);
    world.run_for(Duration::from_secs(3600));
    world.set_traffic(false);
    world.run_for(Duration::from_secs(10));

    assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
    assert!(world.traffic.sent > 100_000);
    let rekeys = |told: fn(&Event) -> bool| {
        let events = &world.host(ALICE).events;
        events.iter().filter(|(_, event)| told(event)).count()
    };
    assert!(rekeys(|event| matches!(event, Event::ChildRekey { .. })) >= 40);
    assert!(rekeys(|event| matches!(event, Event::IkeRekey { .. })) >= 10);
    assert_eq!(
        rekeys(|event| matches!(event, Event::ChildUpDown { up: false, .. })),
        0
    );
}

#[test]
fn what_could_not_be_rekeyed_ends_with_its_hard_lifetime_and_is_made_anew() {
    let mut connections = pair();
    connections.0.children[0].life_time = Duration::from_secs(100);
    let mut world = established_with(World::new(37), connections);
    let before = world.inbound_spis(ALICE);
    world.run_for(Duration::from_secs(150));
    assert_ne!(world.inbound_spis(ALICE), before);
    world.assert_in_sync(1);
}

#[test]
fn a_rekey_with_a_key_exchange_that_the_peer_does_not_want_is_corrected() {
    let mut connections = pair();
    connections.0.children[0].proposals = vec![esp_proposal(&[
        KeyExchangeId::Ecp256,
        KeyExchangeId::Ecp384,
    ])];
    connections.1.children[0].proposals = vec![esp_proposal(&[KeyExchangeId::Ecp384])];
    let mut world = established_with(World::new(38), connections);
    let command = world.rekey(ALICE, the_child());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(AFTERMATH);

    world.assert_in_sync(1);
    let suite = world.host(BOB).children()[0].suite.unwrap();
    assert_eq!(suite.key_exchange, Some(KeyExchangeId::Ecp384));
}

#[test]
fn a_rekey_that_the_data_plane_refuses_keeps_the_old_child() {
    for (host, kind) in [
        (ALICE, OpKind::AllocSpi),
        (ALICE, OpKind::InstallSa),
        (BOB, OpKind::AllocSpi),
        (BOB, OpKind::InstallSa),
    ] {
        let mut world = established(39);
        world.set_traffic(true);
        world.hosts[host].plane.failing.push((kind, 1));
        world.rekey(ALICE, the_child());
        world.run_for(AFTERMATH * 3);
        world.assert_in_sync(1);
        assert_eq!(world.traffic.blocked, 0, "{host} {kind:?}");
    }
}

#[test]
fn reauthentication_makes_the_new_before_it_breaks_the_old() {
    let mut world = established(40);
    let before = world.host(ALICE).ike_sas()[0].id;
    world.set_traffic(true);
    let selector = the_ike_sa(ALICE);
    let reauth = true;
    world.command(ALICE, Command::Rekey { selector, reauth });
    world.run_for(AFTERMATH);

    world.assert_in_sync(1);
    let sas = world.host(ALICE).ike_sas();
    assert_eq!(sas.len(), 1);
    assert_ne!(sas[0].id, before);
    assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
}

#[test]
fn a_random_part_beyond_the_lifetime_is_no_storm_of_rekeys() {
    let mut connections = pair();
    let conn = &mut connections.0;
    (conn.rekey_time, conn.rand_time) = (Duration::from_secs(100), Duration::from_secs(1000));
    let cfg = &mut conn.children[0];
    (cfg.rekey_time, cfg.rand_time) = (Duration::from_secs(100), Duration::from_secs(1000));
    let mut world = established_with(World::new(45), connections);
    world.run_for(Duration::from_secs(1000));
    let told = |event: &Event| matches!(event, Event::ChildRekey { .. } | Event::IkeRekey { .. });
    let events = &world.host(ALICE).events;
    let rekeys = events.iter().filter(|(_, event)| told(event)).count();
    assert!((18..=42).contains(&rekeys), "{rekeys} rekeys");
}

#[test]
fn reauthentication_over_a_slow_network_loses_no_packet() {
    for_seeds(50, |seed| {
        let conditions = Conditions {
            delay: 20..=60,
            ..Conditions::default()
        };
        let host = if seed & 1 == 0 { ALICE } else { BOB };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        world.hosts[1 - host].compute_delay = 50..=150;
        world.hosts[host].compute_delay = 50..=150;
        world.set_traffic(true);
        world.run_for(Duration::from_millis(500 + seed));
        let selector = the_ike_sa(host);
        let reauth = true;
        world.command(host, Command::Rekey { selector, reauth });
        world.run_for(AFTERMATH);
        world.set_traffic(false);
        world.run_for(Duration::from_secs(1));
        world.assert_in_sync(1);
        assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
    });
}

#[test]
fn a_rekey_that_meets_a_deletion_leaves_nothing_half_done() {
    for_seeds(100, |seed| {
        let conditions = Conditions {
            delay: 5..=100,
            ..Conditions::default()
        };
        let mut world = established_with(World::new(seed).conditions(conditions), pair());
        let (rekeys, deletes) = (seed & 1 == 0, seed & 2 == 0);
        let rekeyed = if rekeys {
            the_child()
        } else {
            the_ike_sa(ALICE)
        };
        let deleted = if deletes {
            the_child()
        } else {
            the_ike_sa(BOB)
        };
        world.rekey(ALICE, rekeyed);
        world.run_for(Duration::from_millis(seed % 40 * 5));
        world.terminate(BOB, deleted);
        world.run_for(AFTERMATH * 5);
        if world.host(ALICE).ike_sas().is_empty() && world.host(BOB).ike_sas().is_empty() {
            world.assert_all_clean();
        } else {
            let children = world.host(ALICE).children().len();
            world.assert_in_sync(children);
        }
    });
}

#[test]
fn a_limit_of_packets_or_octets_is_a_reason_to_rekey() {
    for by_packets in [true, false] {
        let mut connections = pair();
        let cfg = &mut connections.0.children[0];
        if by_packets {
            (cfg.rekey_packets, cfg.life_packets, cfg.rand_packets) = (1000, 2000, 100);
        } else {
            (cfg.rekey_bytes, cfg.life_bytes) = (1_000_000, 2_000_000);
        }
        let mut world = established_with(World::new(41), connections);
        world.set_traffic(true);
        // Twenty packets a second each way, so that a soft limit is reached in about 50 s.
        world.run_for(Duration::from_secs(600));
        world.set_traffic(false);
        world.run_for(AFTERMATH);

        world.assert_in_sync(1);
        let told = |event: &Event| matches!(event, Event::ChildRekey { .. });
        let events = &world.host(BOB).events;
        let rekeys = events.iter().filter(|(_, event)| told(event)).count();
        assert!((10..=14).contains(&rekeys), "{rekeys} rekeys");
        assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
    }
}

#[test]
fn a_child_without_any_limit_stays() {
    let mut world = established(42);
    let before = world.inbound_spis(ALICE);
    world.set_traffic(true);
    world.run_for(Duration::from_secs(7200));
    assert_eq!(world.inbound_spis(ALICE), before);
}

#[test]
fn a_soft_limit_that_lies_beyond_the_hard_one_still_comes_first() {
    let mut connections = pair();
    let cfg = &mut connections.0.children[0];
    (cfg.rekey_time, cfg.life_time) = (Duration::from_secs(500), Duration::from_secs(110));
    let mut world = established_with(World::new(43), connections);
    world.set_traffic(true);
    world.run_for(Duration::from_secs(1050));
    world.assert_in_sync(1);
    assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
}

#[test]
fn a_child_that_is_to_be_up_comes_back_after_a_hard_limit() {
    let mut connections = pair();
    let cfg = &mut connections.0.children[0];
    cfg.life_packets = 100;
    cfg.start_action.start = true;
    let mut world = established_with(World::new(44), connections);
    world.set_traffic(true);
    world.run_for(Duration::from_secs(60));
    world.set_traffic(false);
    world.run_for(AFTERMATH);

    world.assert_in_sync(1);
    let ups = |event: &Event| matches!(event, Event::ChildUpDown { up: true, .. });
    let events = &world.host(ALICE).events;
    assert!(events.iter().filter(|(_, event)| ups(event)).count() > 5);
}

#[test]
fn more_than_a_thousand_children_of_one_ike_sa_come_up_and_can_be_rekeyed() {
    const MANY: usize = 1100;
    let mut connections = pair();
    for (conn, local, remote) in [(&mut connections.0, 3, 4), (&mut connections.1, 4, 3)] {
        for n in 1..MANY {
            let net = |side: u8| format!("10.{side}.{}.{}/32", n / 250, n % 250);
            conn.children
                .push(child(&format!("net{n}"), &net(local), &net(remote)));
        }
    }
    let mut world = established_with(World::new(46), connections);
    for n in 1..MANY {
        world.initiate(ALICE, &format!("net{n}"));
    }
    let up = |world: &World| world.host(ALICE).plane.sas.len() == 2 * MANY;
    assert!(world.run_until(Duration::from_secs(300), up));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(MANY);

    let before = world.inbound_spis(BOB);
    world.rekey(
        BOB,
        Selector {
            ike: Some("to-alice".to_owned()),
            child: Some("net7".to_owned()),
            ..Selector::default()
        },
    );
    world.run_for(AFTERMATH);
    world.assert_in_sync(MANY);
    assert_ne!(world.inbound_spis(BOB), before);
}
