// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transport and BEET mode, and when they are not to be had.

use std::time::Duration;

use swanherd_config::model::{ChildMode, Connection, SelectorSpec};
use swanherd_ike::api::Selector;
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Direction, Mode, PolicyAction};

use crate::config::{network, pair};
use crate::handshake::{established_with, ready};
use crate::world::{ALICE, BOB, World};

const DYNAMIC: SelectorSpec = SelectorSpec::Dynamic {
    protocol: 0,
    start_port: 0,
    end_port: u16::MAX,
};

/// Between the two hosts, in these modes.
fn hosts(alice: ChildMode, bob: ChildMode) -> (Connection, Connection) {
    let mut connections = pair();
    for (conn, mode) in [(&mut connections.0, alice), (&mut connections.1, bob)] {
        conn.children[0].mode = mode;
        conn.children[0].local_ts = vec![DYNAMIC];
        conn.children[0].remote_ts = vec![DYNAMIC];
    }
    connections
}

fn assert_mode(world: &World, mode: Mode) {
    for host in [ALICE, BOB] {
        let host = world.host(host);
        assert_eq!(host.children()[0].mode, mode, "{}", host.name);
        for (_, sa) in host.plane.sas.values() {
            assert_eq!(sa.mode, mode);
            let child = &host.children()[0];
            let selector = (child.local_ts[0], child.remote_ts[0]);
            let expected = (mode != Mode::Tunnel).then_some(selector);
            assert_eq!(sa.selector, expected);
        }
        for set in host.plane.policies.values() {
            assert!(matches!(set.action, PolicyAction::Protect { mode: m, .. } if m == mode));
        }
    }
}

#[test]
fn transport_and_beet_are_used_if_both_sides_want_them_else_tunnel_mode() {
    let modes = [Mode::Tunnel, Mode::Transport, Mode::Beet];
    for (index, (alice, bob)) in modes
        .iter()
        .flat_map(|alice| modes.map(|bob| (*alice, bob)))
        .enumerate()
    {
        let seed = 100 + u64::try_from(index).unwrap();
        let connections = hosts(ChildMode::Ipsec(alice), ChildMode::Ipsec(bob));
        let mut world = established_with(World::new(seed), connections);
        let mode = if alice == bob { alice } else { Mode::Tunnel };
        assert_mode(&world, mode);

        // A rekey by either side, and of the IKE SA, agrees on the same.
        let name = Selector {
            child: Some("net".to_owned()),
            ..Selector::default()
        };
        for host in [ALICE, BOB] {
            let command = world.rekey(host, name.clone());
            assert_eq!(world.finish(host, command), Ok(()));
            world.run_for(Duration::from_secs(30));
            assert_mode(&world, mode);
        }
        world.assert_in_sync(1);
    }
}

#[test]
fn beet_between_networks_becomes_tunnel_mode() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.children[0].mode = ChildMode::Ipsec(Mode::Beet);
    }
    let world = established_with(World::new(110), connections);
    assert_mode(&world, Mode::Tunnel);
}

#[test]
fn beet_carries_inner_hosts_of_their_own() {
    let mut connections = pair();
    let (a, b) = (network("10.1.0.1/32"), network("10.2.0.1/32"));
    for (conn, local, remote) in [(&mut connections.0, a, b), (&mut connections.1, b, a)] {
        conn.children[0].mode = ChildMode::Ipsec(Mode::Beet);
        conn.children[0].local_ts = vec![SelectorSpec::Fixed(local)];
        conn.children[0].remote_ts = vec![SelectorSpec::Fixed(remote)];
    }
    let world = established_with(World::new(111), connections);
    assert_mode(&world, Mode::Beet);
    let out = world.host(ALICE).plane.of(Direction::Out).next().unwrap();
    assert_eq!(out.selector, Some((a, b)));
}

#[test]
fn transport_mode_offers_the_hosts_rather_than_a_range_around_them() {
    let mut connections = hosts(
        ChildMode::Ipsec(Mode::Transport),
        ChildMode::Ipsec(Mode::Transport),
    );
    let all = SelectorSpec::Fixed(network("0.0.0.0/0"));
    connections.0.children[0].local_ts = vec![all];
    connections.0.children[0].remote_ts = vec![all];
    let world = established_with(World::new(112), connections);
    assert_mode(&world, Mode::Transport);
    let child = &world.host(ALICE).children()[0];
    assert_eq!(
        child.local_ts,
        [TrafficSelector::host(world.host(ALICE).addr)]
    );
    assert_eq!(
        child.remote_ts,
        [TrafficSelector::host(world.host(BOB).addr)]
    );
}

#[test]
fn transport_mode_between_networks_becomes_tunnel_mode() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.children[0].mode = ChildMode::Ipsec(Mode::Transport);
    }
    let mut world = World::new(113);
    ready(&mut world, connections);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    assert_mode(&world, Mode::Tunnel);
}

#[test]
fn a_proxy_has_transport_mode_for_others() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.children[0].mode = ChildMode::TransportProxy;
    }
    let world = established_with(World::new(114), connections);
    assert_mode(&world, Mode::Transport);
    assert_eq!(
        world.host(BOB).children()[0].remote_ts,
        [network("10.1.0.0/16")]
    );
}
