// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traps, the traffic that hits them, and shunts.

use std::time::Duration;

use swanherd_config::model::{Action, ChildMode, Connection, HostSpec, SelectorSpec};
use swanherd_ike::api::{AcquireFate, Command, Counter, Event, IkeState, Selector};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, PlaneEvent, PolicyAction, PolicySet};

use crate::config::{child, network, pair, psk};
use crate::handshake::ready;
use crate::plane::OpKind;
use crate::world::{ALICE, BOB, World};

const TRAP: Action = Action {
    trap: true,
    start: false,
};

fn trapping() -> (Connection, Connection) {
    let mut connections = pair();
    connections.0.children[0].start_action = TRAP;
    connections
}

fn trapped(seed: u64, connections: (Connection, Connection)) -> World {
    let mut world = World::new(seed);
    ready(&mut world, connections);
    world.run_for(Duration::from_secs(1));
    world
}

fn trap(world: &World, child: &str) -> PolicySet {
    let policies = world.host(ALICE).plane.policies.values();
    let mut traps = policies.filter(|set| set.trap && set.owner.ends_with(child));
    let found = traps
        .next()
        .unwrap_or_else(|| panic!("no trap for {child}"));
    assert!(traps.next().is_none(), "several traps for {child}");
    found.clone()
}

fn reqid(set: &PolicySet) -> u32 {
    match set.action {
        PolicyAction::Protect { reqid, .. } => reqid,
        PolicyAction::Bypass | PolicyAction::Discard => panic!("{} protects nothing", set.owner),
    }
}

fn host(text: &str) -> TrafficSelector {
    TrafficSelector::host(text.parse().unwrap())
}

fn acquire(reqid: u32, local: &str, remote: &str) -> PlaneEvent {
    PlaneEvent::Acquire {
        reqid,
        local: host(local),
        remote: host(remote),
    }
}

fn fates(world: &World) -> [usize; 3] {
    [
        AcquireFate::Started,
        AcquireFate::Coalesced,
        AcquireFate::Ignored,
    ]
    .map(|fate| world.host(ALICE).counted(Counter::Acquire(fate)))
}

fn the_child() -> Selector {
    Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    }
}

#[test]
fn a_thousand_flows_into_one_trap_negotiate_once() {
    let mut world = trapped(70, trapping());
    let reqid = reqid(&trap(&world, "net"));
    for flow in 0..1000 {
        let remote = format!("10.2.{}.{}", flow / 250, flow % 250 + 1);
        world.plane_event(ALICE, acquire(reqid, "10.1.0.5", &remote));
        world.run_for(Duration::from_millis(1));
    }
    world.run_for(Duration::from_secs(5));

    world.assert_in_sync(1);
    assert_eq!(fates(&world), [1, 999, 0]);
    let ups = |event: &Event| matches!(event, Event::IkeUpDown { up: true, .. });
    let events = &world.host(ALICE).events;
    assert_eq!(events.iter().filter(|(_, event)| ups(event)).count(), 1);
    assert_eq!(world.host(ALICE).children()[0].reqid, reqid);
}

#[test]
fn traffic_that_keeps_coming_while_the_peer_is_silent_piles_nothing_up() {
    let mut connections = trapping();
    let (mut second, mut back) = (
        child("second", "10.3.0.0/16", "10.4.0.0/16"),
        child("second", "10.4.0.0/16", "10.3.0.0/16"),
    );
    second.start_action = TRAP;
    back.start_action = Action::default();
    connections.0.children.push(second);
    connections.1.children.push(back);
    let mut world = trapped(71, connections);
    let (first, second) = (reqid(&trap(&world, "net")), reqid(&trap(&world, "second")));
    assert_ne!(first, second);
    world.plane_event(ALICE, acquire(first, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);

    // CREATE_CHILD_SA for the second one is never answered.
    world.net.cut = true;
    for _ in 0..160 {
        world.plane_event(ALICE, acquire(second, "10.3.0.5", "10.4.0.5"));
        world.run_for(Duration::from_secs(1));
    }
    assert_eq!(fates(&world), [2, 159, 0]);
    let sas = world.host(ALICE).ike_sas();
    assert!(sas[0].tasks_queued.is_empty(), "{:?}", sas[0].tasks_queued);
    world.run_for(Duration::from_secs(120));
    assert_eq!(world.host(ALICE).count(IkeState::Established), 0);

    // Traffic brings up both again once the peer answers.
    world.net.cut = false;
    world.run_for(Duration::from_secs(200));
    world.plane_event(ALICE, acquire(second, "10.3.0.5", "10.4.0.5"));
    world.plane_event(ALICE, acquire(first, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(200));
    assert_eq!(world.host(ALICE).children().len(), 2);
}

#[test]
fn traffic_for_nobody_is_ignored_and_counted() {
    let mut world = trapped(72, trapping());
    for reqid in [0, 4711] {
        world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
    }
    let known = reqid(&trap(&world, "net"));
    world.unload(ALICE, "to-bob");
    world.plane_event(ALICE, acquire(known, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(5));

    assert_eq!(fates(&world), [0, 0, 3]);
    assert!(world.host(ALICE).ike_sas().is_empty());
}

#[test]
fn traffic_for_a_child_that_is_being_deleted_gets_a_new_one() {
    let mut world = trapped(73, trapping());
    let reqid = reqid(&trap(&world, "net"));
    world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(2));
    let before = world.inbound_spis(ALICE);

    world.terminate(ALICE, the_child());
    world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(10));

    world.assert_in_sync(1);
    assert_ne!(world.inbound_spis(ALICE), before);
    assert_eq!(fates(&world), [2, 0, 0]);
}

#[test]
fn the_packet_that_asks_is_offered_first() {
    let mut world = trapped(74, trapping());
    let port = |net: TrafficSelector, port| TrafficSelector {
        protocol: 17,
        start_port: port,
        end_port: port,
        ..net
    };
    let event = PlaneEvent::Acquire {
        reqid: reqid(&trap(&world, "net")),
        local: port(host("10.1.0.5"), 4000),
        remote: port(host("10.2.0.9"), 53),
    };
    world.plane_event(ALICE, event);
    world.run_for(Duration::from_secs(2));

    world.assert_in_sync(1);
    let offered = world.host(ALICE).events.iter().any(|(_, event)| {
        let wanted = "offering TS 10.1.0.5/32[17/4000] 10.1.0.0/16 === \
                      10.2.0.9/32[17/53] 10.2.0.0/16";
        matches!(event, Event::Log(line) if line.message == wanted)
    });
    assert!(offered);
    // What is agreed is the whole: the packet is part of it.
    let child = &world.host(ALICE).children()[0];
    assert_eq!(child.local_ts, [network("10.1.0.0/16")]);
    assert_eq!(child.remote_ts, [network("10.2.0.0/16")]);
    let narrowed =
        |event: &Event| matches!(event, Event::Alert { kind, .. } if *kind == "ts-narrowed");
    let events = &world.host(ALICE).events;
    assert!(!events.iter().any(|(_, event)| narrowed(event)));
}

#[test]
fn a_peer_with_an_sa_for_each_subnet_gets_one_for_each() {
    let mut connections = trapping();
    // One child here, two there.
    connections.1.children = vec![
        child("one", "10.2.1.0/24", "10.1.0.0/16"),
        child("two", "10.2.2.0/24", "10.1.0.0/16"),
    ];
    connections.0.children[0].remote_ts = vec![
        SelectorSpec::Fixed(network("10.2.1.0/24")),
        SelectorSpec::Fixed(network("10.2.2.0/24")),
        SelectorSpec::Fixed(network("10.2.3.0/24")),
    ];
    let mut world = trapped(75, connections);
    let trap = reqid(&trap(&world, "net"));
    for remote in ["10.2.1.5", "10.2.2.5"] {
        world.plane_event(ALICE, acquire(trap, "10.1.0.5", remote));
        world.run_for(Duration::from_secs(2));
    }

    world.assert_in_sync(2);
    let children = world.host(ALICE).children();
    let reqids: Vec<u32> = children.iter().map(|child| child.reqid).collect();
    // With the request id of the trap, an SA would get what the trap waits for.
    assert!(!reqids.contains(&trap), "{reqids:?}");
    assert_ne!(reqids[0], reqids[1]);
    // More of the same needs nothing.
    world.plane_event(ALICE, acquire(trap, "10.1.0.6", "10.2.2.9"));
    world.run_for(Duration::from_secs(2));
    assert_eq!(fates(&world), [2, 1, 0]);
    // What the peer has no SA for does not become another one of what there is.
    world.plane_event(ALICE, acquire(trap, "10.1.0.6", "10.2.3.9"));
    world.run_for(Duration::from_secs(2));
    assert_eq!(fates(&world), [3, 1, 0]);
    world.assert_in_sync(2);

    // Each has policies of its own, which its rekeys keep.
    world.set_traffic(true);
    world.rekey(ALICE, the_child());
    world.run_for(Duration::from_secs(60));
    world.assert_in_sync(2);
    assert_eq!((world.traffic.blocked, world.traffic.refused), (0, 0));
}

#[test]
fn trap_and_start_make_one_child_and_the_trap_stays() {
    let mut connections = pair();
    connections.0.children[0].start_action = Action {
        trap: true,
        start: true,
    };
    let mut world = World::new(76);
    world.load(BOB, &psk(), connections.1);
    world.load(ALICE, &psk(), connections.0);
    world.run_for(Duration::from_millis(1));
    let reqid = reqid(&trap(&world, "net"));
    world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
    assert_eq!(fates(&world), [0, 1, 0]);

    let command = world.terminate(ALICE, the_child());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(10));
    world.assert_in_sync(0);
    trap(&world, "net");
    world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
    assert_eq!(world.host(ALICE).children()[0].reqid, reqid);
}

#[test]
fn a_trap_follows_the_loss_of_a_child() {
    for expires in [true, false] {
        let mut connections = pair();
        let conn = &mut connections.0;
        conn.dpd_delay = Duration::from_secs(10);
        conn.children[0].dpd_action = TRAP;
        if expires {
            conn.children[0].life_time = Duration::from_secs(60);
        }
        let mut world = trapped(77, connections);
        let command = world.initiate(ALICE, "net");
        assert_eq!(world.finish(ALICE, command), Ok(()));
        let policies = |world: &World| world.host(ALICE).plane.policies.values().any(|s| s.trap);
        assert!(!policies(&world));

        world.net.cut = !expires;
        // One that has merely expired is made anew.
        world.run_for(Duration::from_secs(if expires { 80 } else { 200 }));
        assert_eq!(world.host(ALICE).children().is_empty(), !expires);
        world.net.cut = false;
        let reqid = reqid(&trap(&world, "net"));
        world.plane_event(ALICE, acquire(reqid, "10.1.0.5", "10.2.0.5"));
        world.run_for(Duration::from_secs(5));
        assert_eq!(world.host(ALICE).children().len(), 1);
    }
}

#[test]
fn an_operator_installs_and_removes_traps() {
    let mut world = trapped(78, pair());
    let install = |connection: Option<&str>, child: &str| Command::Install {
        connection: connection.map(str::to_owned),
        child: child.to_owned(),
    };
    let uninstall = || Command::Uninstall {
        connection: None,
        child: "net".to_owned(),
    };
    let command = world.command(ALICE, install(Some("to-bob"), "net"));
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    trap(&world, "net");

    let command = world.command(ALICE, install(None, "nothing"));
    assert!(world.finish(ALICE, command).is_err());
    let command = world.command(ALICE, uninstall());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    assert!(world.host(ALICE).plane.policies.is_empty());
    let command = world.command(ALICE, uninstall());
    let gone = Err("policy 'net' not found".to_owned());
    assert_eq!(world.finish(ALICE, command), gone);
}

/// Alice protects TCP to port 80 of whomever she talks to, in transport mode.
fn to_anybody() -> (Connection, Connection) {
    let mut connections = pair();
    let any = HostSpec::Any(None);
    connections.0.remote_addrs = vec![any];
    connections.0.remote[0].id = None;
    let dynamic = |protocol, port: Option<u16>| SelectorSpec::Dynamic {
        protocol,
        start_port: port.unwrap_or(0),
        end_port: port.unwrap_or(u16::MAX),
    };
    for conn in [&mut connections.0, &mut connections.1] {
        conn.children[0].mode = ChildMode::Ipsec(Mode::Transport);
    }
    connections.0.children[0].start_action = TRAP;
    connections.0.children[0].local_ts = vec![dynamic(6, None)];
    connections.0.children[0].remote_ts = vec![dynamic(6, Some(80))];
    connections.1.children[0].local_ts = vec![dynamic(6, Some(80))];
    connections.1.children[0].remote_ts = vec![dynamic(6, None)];
    connections
}

#[test]
fn a_trap_for_anybody_calls_whom_the_packet_is_for() {
    let mut world = trapped(79, to_anybody());
    let set = trap(&world, "net");
    assert_eq!(set.remote[0].prefix_len(), Some(0));
    assert_eq!(set.remote[0].start_port, 80);
    let reqid = reqid(&set);
    // Nobody can be called without an address.
    world.plane_event(ALICE, acquire(reqid, "0.0.0.0", "0.0.0.0"));
    let any = PlaneEvent::Acquire {
        reqid,
        local: TrafficSelector::any_v4(),
        remote: TrafficSelector::any_v4(),
    };
    world.plane_event(ALICE, any);
    assert_eq!(fates(&world), [0, 0, 2]);

    for _ in 0..10 {
        world.plane_event(ALICE, acquire(reqid, "192.0.2.1", "198.51.100.1"));
    }
    world.run_for(Duration::from_secs(5));
    world.assert_in_sync(1);
    assert_eq!(fates(&world), [1, 9, 2]);
    let child = &world.host(ALICE).children()[0];
    assert_eq!(child.mode, Mode::Transport);
    assert_eq!(child.remote_ts[0].start, world.host(BOB).addr);
    assert_eq!(child.remote_ts[0].end, world.host(BOB).addr);
}

#[test]
fn a_tunnel_to_nobody_in_particular_has_no_trap() {
    let mut connections = trapping();
    connections.0.remote_addrs = vec![HostSpec::Any(None)];
    let mut world = trapped(80, connections);
    assert!(world.host(ALICE).plane.policies.is_empty());
    let command = Command::Install {
        connection: None,
        child: "net".to_owned(),
    };
    let command = world.command(ALICE, command);
    let text = world.finish(ALICE, command).unwrap_err();
    assert!(
        text.starts_with("installing policy 'net' failed: "),
        "{text}"
    );
}

#[test]
fn a_trap_follows_the_address_of_its_host() {
    let mut world = World::new(81);
    let own = world.host(ALICE).source;
    world.hosts[ALICE].source = None;
    ready(&mut world, trapping());
    world.run_for(Duration::from_secs(1));
    let local = |world: &World| match trap(world, "net").action {
        PolicyAction::Protect { local, .. } => local,
        PolicyAction::Bypass | PolicyAction::Discard => panic!("no trap"),
    };
    assert!(local(&world).is_unspecified());
    let before = trap(&world, "net");

    world.hosts[ALICE].source = own;
    for _ in 0..50 {
        world.plane_event(ALICE, PlaneEvent::NetworkChanged);
        world.run_for(Duration::from_millis(10));
    }
    world.run_for(Duration::from_secs(3));
    assert_eq!(Some(local(&world)), own);
    // It is the same trap still.
    assert_eq!(trap(&world, "net").id, before.id);
    assert_eq!(reqid(&trap(&world, "net")), reqid(&before));

    let other = Some("192.0.2.99".parse().unwrap());
    world.hosts[ALICE].source = other;
    world.plane_event(ALICE, PlaneEvent::NetworkChanged);
    world.run_for(Duration::from_secs(3));
    assert_eq!(Some(local(&world)), other);
}

#[test]
fn a_child_that_waits_for_a_way_to_its_peer_takes_the_first_there_is() {
    let mut connections = pair();
    connections.0.children[0].start_action.start = true;
    let mut world = World::new(82);
    let own = world.host(ALICE).source;
    world.hosts[ALICE].source = None;
    ready(&mut world, connections);
    // Failures without anybody called are no keying tries.
    world.run_for(Duration::from_secs(100));
    assert!(world.host(ALICE).ike_sas().is_empty());

    world.hosts[ALICE].source = own;
    let before = world.elapsed();
    world.plane_event(ALICE, PlaneEvent::NetworkChanged);
    let up = world.run_until(Duration::from_secs(5), |world| {
        world.host(ALICE).children().len() == 1
    });
    assert!(up, "not called");
    assert!(world.elapsed() - before < Duration::from_secs(2));
    world.run_for(Duration::from_secs(2));
    world.assert_in_sync(1);
}

#[test]
fn a_trap_that_the_data_plane_refuses_is_reported_and_tried_again() {
    let mut world = World::new(84);
    world.hosts[ALICE].plane.failing = vec![(OpKind::InstallPolicies, 2)];
    ready(&mut world, trapping());
    world.run_for(Duration::from_secs(1));
    assert!(world.host(ALICE).plane.policies.is_empty());
    let told = |world: &World| {
        let is = |event: &Event| {
            matches!(event, Event::Failure { connection: Some(name), text, .. }
                if name == "to-bob" && text.contains("made to fail"))
        };
        let events = &world.host(ALICE).events;
        events.iter().filter(|(_, event)| is(event)).count()
    };
    assert_eq!(told(&world), 1);
    world.run_for(Duration::from_secs(150));
    trap(&world, "net");
    assert_eq!(told(&world), 1);

    // An operator learns at once.
    let mut world = trapped(85, pair());
    world.hosts[ALICE].plane.failing = vec![(OpKind::InstallPolicies, 1)];
    let install = || Command::Install {
        connection: None,
        child: "net".to_owned(),
    };
    let command = world.command(ALICE, install());
    let text = world.finish(ALICE, command).unwrap_err();
    assert!(text.contains("made to fail"), "{text}");
    let command = world.command(ALICE, install());
    assert_eq!(world.finish(ALICE, command), Ok(()));
    trap(&world, "net");
}

#[test]
fn shunts_are_policies_without_request_id() {
    let mut connections = pair();
    for (name, mode) in [("lan", ChildMode::Pass), ("bad", ChildMode::Drop)] {
        let mut shunt = child(name, "10.1.0.0/16", "10.1.0.0/16");
        shunt.mode = mode;
        shunt.start_action = TRAP;
        shunt.priority = if name == "lan" { 0 } else { 7 };
        connections.0.children.push(shunt);
    }
    let mut world = trapped(83, connections);
    let priorities: Vec<_> = world
        .host(ALICE)
        .plane
        .policies
        .values()
        .map(|set| (set.owner.as_str(), set.action, set.priority, set.trap))
        .collect();
    assert_eq!(
        priorities,
        [
            ("to-bob/lan", PolicyAction::Bypass, None, false),
            ("to-bob/bad", PolicyAction::Discard, Some(7), false)
        ]
    );
    // They are not initiated.
    let command = world.initiate(ALICE, "lan");
    assert!(world.finish(ALICE, command).is_err());
    world.shutdown(ALICE);
    world.run_for(Duration::from_secs(5));
    assert!(world.host(ALICE).plane.policies.is_empty());
}
