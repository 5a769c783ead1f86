// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Request ids, marks and interface ids: whose they are, and for how long.

use std::collections::BTreeMap;
use std::time::Duration;

use swanherd_config::model::{Action, Connection, HostSpec, IfId, MarkSpec, SelectorSpec, Unique};
use swanherd_ike::api::{ChildState, Command, Event, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::plane::{Mark, PolicyAction};

use crate::config::{child, network, pair, psk, round};
use crate::handshake::established_with;
use crate::net::SimRng;
use crate::world::{ALICE, BOB, World, for_seeds};

const CAROL: usize = 2;

fn by_child(name: &str) -> Selector {
    Selector {
        child: Some(name.to_owned()),
        ..Selector::default()
    }
}

/// Alice with two peers: her connections, Bob's and Carol's.
fn three() -> [Connection; 4] {
    let (to_bob, bob) = pair();
    let mut to_carol = to_bob.clone();
    to_carol.name = "to-carol".to_owned();
    to_carol.remote_addrs = vec![HostSpec::Addr("203.0.113.1".parse().unwrap())];
    to_carol.remote = vec![round(
        "remote",
        to_bob.remote[0].auth.clone(),
        "carol.example",
    )];
    to_carol.children = vec![child("net", "10.1.0.0/16", "10.3.0.0/16")];
    let mut carol = bob.clone();
    carol.local = vec![round("local", bob.local[0].auth.clone(), "carol.example")];
    carol.children = vec![child("net", "10.3.0.0/16", "10.1.0.0/16")];
    [to_bob, to_carol, bob, carol]
}

fn three_hosts(seed: u64, connections: [Connection; 4]) -> World {
    let mut world = World::new(seed);
    world.add_host(
        "carol",
        "203.0.113.1",
        Settings::default(),
        Provider::fake(),
    );
    let [to_bob, to_carol, bob, carol] = connections;
    world.load(BOB, &psk(), bob);
    world.load(CAROL, &psk(), carol);
    world.load(ALICE, &psk(), to_bob);
    world.load(ALICE, &psk(), to_carol);
    world
}

fn up(world: &mut World, connection: &str, child: &str) -> Result<(), String> {
    let command = Command::Initiate {
        connection: Some(connection.to_owned()),
        child: Some(child.to_owned()),
        respect_limits: false,
    };
    let command = world.command(ALICE, command);
    world.finish(ALICE, command)
}

/// No request id is that of live children of different connections, names or peers; policies and
/// SAs agree about it.
fn assert_request_ids_are_nobody_elses(world: &World) {
    for host in &world.hosts {
        let mut owners: BTreeMap<u32, (String, String, String)> = BTreeMap::new();
        for sa in host.ike_sas() {
            for child in sa.children.values() {
                if !matches!(child.state, ChildState::Installed | ChildState::Rekeying) {
                    continue;
                }
                let owner = (
                    sa.connection.clone().unwrap(),
                    child.name.clone(),
                    format!("{:?}", sa.remote_id),
                );
                let known = owners.entry(child.reqid).or_insert_with(|| owner.clone());
                assert_eq!(*known, owner, "{} shares reqid {}", host.name, child.reqid);
            }
        }
        let mut sets: BTreeMap<u32, String> = BTreeMap::new();
        for set in host.plane.policies.values() {
            if let PolicyAction::Protect { reqid, .. } = set.action {
                let known = sets.entry(reqid).or_insert_with(|| set.owner.clone());
                assert_eq!(*known, set.owner, "{} shares reqid {reqid}", host.name);
            }
        }
    }
}

#[test]
fn whatever_happens_no_two_children_share_a_request_id() {
    for_seeds(150, |seed| {
        let mut rng = SimRng::new(seed ^ 0x7e91_d000);
        let trap = Action {
            trap: true,
            start: false,
        };
        let connections = |variant: u64| {
            let mut all = three();
            for conn in &mut all {
                conn.unique = Unique::Replace;
                conn.dpd_delay = Duration::from_secs(20);
            }
            // A configured one that collides with what would be drawn first, a trap, and selectors
            // that come and go.
            let wide = [(0, "10.7.0.0/16"), (1, "10.8.0.0/16")];
            for (index, extra) in wide {
                let cfg = &mut all[index].children[0];
                if variant & 1 == 1 {
                    cfg.local_ts.push(SelectorSpec::Fixed(network(extra)));
                    all[index + 2].children[0]
                        .remote_ts
                        .push(SelectorSpec::Fixed(network(extra)));
                }
            }
            all[1].children[0].reqid = if variant & 2 == 2 { 1 } else { 0 };
            if variant & 4 == 4 {
                all[0].children[0].start_action = trap;
            }
            all[0]
                .children
                .push(child("second", "10.5.0.0/16", "10.6.0.0/16"));
            all[2]
                .children
                .push(child("second", "10.6.0.0/16", "10.5.0.0/16"));
            all[0].children[1].reqid = if variant & 8 == 8 { 2 } else { 0 };
            all
        };
        let mut variant = rng.next();
        let mut world = three_hosts(seed, connections(variant));
        for _ in 0..30 {
            let (conn, name) = [("to-bob", "net"), ("to-bob", "second"), ("to-carol", "net")]
                [usize::try_from(rng.next() % 3).unwrap()];
            let selector = Selector {
                ike: Some(conn.to_owned()),
                child: Some(name.to_owned()),
                ..Selector::default()
            };
            match rng.next() % 10 {
                0..=3 => {
                    let command = Command::Initiate {
                        connection: Some(conn.to_owned()),
                        child: Some(name.to_owned()),
                        respect_limits: false,
                    };
                    world.command(ALICE, command);
                }
                4 => {
                    world.rekey(ALICE, selector);
                }
                5 => {
                    let selector = Selector {
                        child: None,
                        ..selector
                    };
                    let reauth = rng.chance(700);
                    world.command(ALICE, Command::Rekey { selector, reauth });
                }
                6 => {
                    world.terminate(ALICE, selector);
                }
                7 => {
                    world.unload(ALICE, conn);
                    let [to_bob, to_carol, ..] = connections(variant);
                    let again = if conn == "to-bob" { to_bob } else { to_carol };
                    world.load(ALICE, &psk(), again);
                }
                _ => {
                    variant = rng.next();
                    let [to_bob, to_carol, bob, carol] = connections(variant);
                    world.load(BOB, &psk(), bob);
                    world.load(CAROL, &psk(), carol);
                    world.load(ALICE, &psk(), to_bob);
                    world.load(ALICE, &psk(), to_carol);
                }
            }
            let pause = rng.millis(&(0..=3000));
            world.run_for(pause);
            assert_request_ids_are_nobody_elses(&world);
        }
        for host in [ALICE, BOB, CAROL] {
            world.shutdown(host);
        }
        world.run_for(Duration::from_secs(30));
        for host in [ALICE, BOB, CAROL] {
            world.assert_clean(host);
            assert!(world.host(host).plane.policies.is_empty());
        }
    });
}

#[test]
fn a_configured_request_id_that_is_taken_is_refused_in_words() {
    let mut connections = three();
    connections[0].children[0].reqid = 5;
    connections[1].children[0].reqid = 5;
    let mut world = three_hosts(90, connections);
    assert_eq!(up(&mut world, "to-bob", "net"), Ok(()));
    let text = up(&mut world, "to-carol", "net").unwrap_err();
    assert_eq!(
        text,
        "establishing CHILD_SA 'net' failed: reqid 5 is in use by to-bob/net; configure another one"
    );
    let told = world.host(ALICE).events.iter().any(|(_, event)| {
        matches!(event, Event::Failure { connection: Some(name), text, .. }
            if name == "to-carol" && text.starts_with("reqid 5 is in use"))
    });
    assert!(told);
    // Once it is free it can be had.
    let command = world.terminate(ALICE, by_child("net"));
    assert_eq!(world.finish(ALICE, command), Ok(()));
    assert_eq!(up(&mut world, "to-carol", "net"), Ok(()));
    assert_eq!(world.host(ALICE).children()[0].reqid, 5);
}

#[test]
fn drawn_request_ids_step_around_configured_ones() {
    let mut connections = three();
    connections[1].children[0].reqid = 1;
    let mut world = three_hosts(91, connections);
    assert_eq!(up(&mut world, "to-bob", "net"), Ok(()));
    assert_eq!(world.host(ALICE).children()[0].reqid, 2);
    assert_eq!(up(&mut world, "to-carol", "net"), Ok(()));
    assert_request_ids_are_nobody_elses(&world);
}

#[test]
fn changed_selectors_keep_the_request_id_and_replace_the_policies() {
    let mut connections = pair();
    let mut world = established_with(World::new(92), connections.clone());
    let before = world.host(ALICE).children()[0].reqid;
    let set = world.host(ALICE).plane.policies.values().next().unwrap().id;
    world.set_traffic(true);

    // The new subnet is there with the next reauthentication.
    let more = SelectorSpec::Fixed(network("10.9.0.0/16"));
    connections.0.children[0].local_ts.push(more);
    connections.1.children[0].remote_ts.push(more);
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    let selector = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    let reauth = true;
    world.command(ALICE, Command::Rekey { selector, reauth });
    world.run_for(Duration::from_secs(60));

    world.assert_in_sync(1);
    assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
    let child = &world.host(ALICE).children()[0];
    assert_eq!(child.reqid, before);
    assert_eq!(child.local_ts.len(), 2);
    let policies: Vec<_> = world.host(ALICE).plane.policies.values().collect();
    assert_eq!(policies.len(), 1);
    assert_eq!((policies[0].id, policies[0].local.len()), (set, 2));
}

#[test]
fn what_is_drawn_for_unique_stays_with_the_child_and_differs_between_children() {
    let mut connections = three();
    for conn in &mut connections[..2] {
        let cfg = &mut conn.children[0];
        cfg.mark_in = MarkSpec::Unique(0xff00);
        cfg.mark_out = MarkSpec::Unique(0xff00);
        cfg.set_mark_out = MarkSpec::Same(0xff00);
        cfg.set_mark_in = MarkSpec::Mark(Mark {
            value: 0x42,
            mask: 0xff,
        });
        cfg.mark_in_sa = true;
        cfg.if_id_in = IfId::UniqueDir;
        cfg.if_id_out = IfId::UniqueDir;
    }
    let mut world = three_hosts(93, connections);
    assert_eq!(up(&mut world, "to-bob", "net"), Ok(()));
    assert_eq!(up(&mut world, "to-carol", "net"), Ok(()));
    let children = world.host(ALICE).children();
    let tags = |index: usize| {
        let child = &children[index];
        (child.mark_in, child.mark_out, child.if_id)
    };
    let (mark_in, mark_out, if_id) = tags(0);
    assert_eq!(mark_in, mark_out);
    assert_ne!(if_id.0, if_id.1);
    let mark = mark_in.unwrap();
    assert_eq!(mark.value & !mark.mask, 0);
    assert_ne!(mark.value, 0);
    assert_ne!(tags(0), tags(1));
    assert_ne!(tags(0).0, tags(1).0);
    for (_, sa) in world.host(ALICE).plane.sas.values() {
        assert!(sa.mark.is_some());
        let set = sa.set_mark.unwrap();
        let inbound = sa.direction == swanherd_ipsec::plane::Direction::In;
        assert_eq!(set.value == 0x42, inbound);
        assert!(inbound || Some(set) == sa.mark);
        assert_ne!(sa.if_id, 0);
    }
    assert!(
        world
            .host(ALICE)
            .plane
            .policies
            .values()
            .all(|set| !set.routes)
    );

    for (selector, reauth) in [
        (by_child("net"), false),
        (
            Selector {
                ike: Some("to-bob".to_owned()),
                ..Selector::default()
            },
            false,
        ),
        (
            Selector {
                ike: Some("to-bob".to_owned()),
                ..Selector::default()
            },
            true,
        ),
    ] {
        world.command(ALICE, Command::Rekey { selector, reauth });
        world.run_for(Duration::from_secs(60));
        let found = world.host(ALICE).children();
        assert_eq!(found.len(), 2);
        let same = found
            .iter()
            .filter(|child| (child.mark_in, child.mark_out, child.if_id) == tags(0));
        assert_eq!(same.count(), 1);
    }
}

#[test]
fn children_inherit_the_interface_of_their_connection() {
    let mut connections = three();
    for conn in &mut connections[..2] {
        conn.if_id_in = IfId::Unique;
        conn.if_id_out = IfId::Unique;
    }
    let mut second = child("second", "10.5.0.0/16", "10.6.0.0/16");
    second.if_id_out = IfId::Id(77);
    connections[0].children.push(second);
    connections[2]
        .children
        .push(child("second", "10.6.0.0/16", "10.5.0.0/16"));
    let mut world = three_hosts(94, connections);
    for (conn, child) in [("to-bob", "net"), ("to-bob", "second"), ("to-carol", "net")] {
        assert_eq!(up(&mut world, conn, child), Ok(()));
    }
    let ids: Vec<_> = world
        .host(ALICE)
        .children()
        .iter()
        .map(|c| c.if_id)
        .collect();
    assert_eq!(ids[0].0, ids[0].1);
    assert_eq!(ids[1], (ids[0].0, 77));
    assert_ne!(ids[2].0, ids[0].0);
}

#[test]
fn a_trap_has_the_drawn_values_that_its_child_will_have() {
    let mut connections = pair();
    let conn = &mut connections.0;
    conn.if_id_in = IfId::Unique;
    conn.if_id_out = IfId::Unique;
    conn.children[0].mark_out = MarkSpec::Unique(u32::MAX);
    conn.children[0].start_action = Action {
        trap: true,
        start: true,
    };
    let mut world = World::new(95);
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_secs(3));
    world.assert_in_sync(1);
    let tags: Vec<_> = world
        .host(ALICE)
        .plane
        .policies
        .values()
        .map(|set| (set.mark_out, set.if_id_in, set.if_id_out))
        .collect();
    assert_eq!(tags.len(), 2);
    assert_eq!(tags[0], tags[1]);
    assert!(tags[0].0.is_some() && tags[0].1 != 0);
}

#[test]
fn two_peers_for_all_traffic_need_interfaces_to_tell_them_apart() {
    for apart in [false, true] {
        let mut connections = three();
        for conn in &mut connections {
            let all = SelectorSpec::Fixed(network("0.0.0.0/0"));
            conn.children[0].local_ts = vec![all];
            conn.children[0].remote_ts = vec![all];
            if apart {
                conn.if_id_in = IfId::Unique;
                conn.if_id_out = IfId::Unique;
            }
        }
        let mut world = three_hosts(96, connections);
        world.hosts[ALICE].plane.one_owner = true;
        assert_eq!(up(&mut world, "to-bob", "net"), Ok(()));
        let second = up(&mut world, "to-carol", "net");
        world.run_for(Duration::from_secs(10));
        if apart {
            assert_eq!(second, Ok(()));
            assert_eq!(world.host(ALICE).children().len(), 2);
            continue;
        }
        let text = second.unwrap_err();
        assert!(text.contains("belongs to to-bob/net"), "{text}");
        let told = world.host(ALICE).events.iter().any(|(_, event)| {
            matches!(event, Event::Failure { connection: Some(name), text, .. }
                if name == "to-carol" && text.contains("belongs to to-bob/net"))
        });
        assert!(told);
        let logged = world.host(ALICE).events.iter().any(|(_, event)| {
            matches!(event, Event::Log(line)
                if line.level == 0 && line.message.contains("belongs to to-bob/net"))
        });
        assert!(logged);
        // The first one is none the worse for it.
        assert_eq!(world.host(ALICE).children().len(), 1);
        world.assert_nothing_leaked(ALICE);
        assert_eq!(world.host(CAROL).children().len(), 0);
    }
}

#[test]
fn a_child_without_policies_has_sas_alone() {
    let mut connections = pair();
    connections.0.children[0].policies = false;
    connections.1.children[0].policies = false;
    let mut world = established_with(World::new(97), connections);
    assert!(world.host(ALICE).plane.policies.is_empty());
    assert_eq!(world.host(ALICE).plane.sas.len(), 2);
    let command = world.rekey(ALICE, by_child("net"));
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(60));
    assert!(world.host(ALICE).plane.policies.is_empty());
    assert_eq!(world.host(ALICE).plane.sas.len(), 2);
}

#[test]
fn both_sides_that_call_at_once_share_one_request_id() {
    // Without an identity for the peer, who it is turns out only in IKE_AUTH.
    let mut connections = pair();
    connections.0.remote[0].id = None;
    connections.1.remote[0].id = None;
    let mut world = World::new(98);
    crate::handshake::ready(&mut world, connections);
    let ours = world.initiate(ALICE, "net");
    let theirs = world.initiate(BOB, "net");
    assert_eq!(world.finish(ALICE, ours), Ok(()));
    assert_eq!(world.finish(BOB, theirs), Ok(()));
    // One is given up for the other, and keeps its request id until then.
    for (wait, count) in [(1, 2), (20, 1)] {
        world.run_for(Duration::from_secs(wait));
        assert_request_ids_are_nobody_elses(&world);
        for host in [ALICE, BOB] {
            let children = world.host(host).children();
            assert_eq!(children.len(), count);
            assert!(children.iter().all(|c| c.reqid == children[0].reqid));
            assert_eq!(world.host(host).plane.policies.len(), 1);
        }
    }
}
