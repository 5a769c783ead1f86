// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hard limits that are reached while both sides rekey: in the end there is one child, and only
//! one.

use std::time::Duration;

use swanherd_config::model::{Child, Connection};
use swanherd_ike::api::{Event, Settings};
use swanherd_ike::crypto::Provider;

use crate::config::pair;
use crate::handshake::established_with;
use crate::net::Conditions;
use crate::world::{ALICE, BOB, World, for_seeds};

/// Requests are repeated until they are answered, so that no IKE SA is given up.
fn patient() -> Settings {
    Settings {
        retransmit_timeout: Duration::from_secs(1),
        retransmit_base_milli: 1300,
        retransmit_limit: Duration::from_secs(5),
        retransmit_tries: 60,
        delete_rekeyed_delay: Duration::from_secs(1),
        ..Settings::default()
    }
}

/// Both sides have the same limits. Nothing is configured that would bring a lost child back.
fn limited(limit: impl Fn(&mut Child)) -> (Connection, Connection) {
    let mut connections = pair();
    limit(&mut connections.0.children[0]);
    limit(&mut connections.1.children[0]);
    connections
}

/// Lets both sides run into the limits under traffic, then lets the network and the limits rest.
fn run_into_limits(seed: u64, loss: u64, connections: (Connection, Connection)) -> World {
    let mut world = established_with(World::with(seed, patient(), Provider::fake()), connections);
    world.net.conditions = Conditions {
        delay: 5..=150,
        loss,
        ..Conditions::default()
    };
    world.set_traffic(true);
    world.run_for(Duration::from_secs(40));
    world.net.conditions = Conditions::default();
    world.run_for(Duration::from_secs(20));
    world.set_traffic(false);
    // Long enough for the last retransmissions, and for what the peer should have deleted.
    world.run_for(Duration::from_secs(150));
    assert!(
        world.run_until(Duration::from_secs(60), World::is_at_rest),
        "no rest"
    );
    world
}

fn assert_one_end_per_sa(world: &World) {
    for host in [ALICE, BOB] {
        let mut told = std::collections::BTreeSet::new();
        for (_, event) in &world.host(host).events {
            if let Event::Log(line) = event
                && line
                    .message
                    .ends_with("has reached the end of its lifetime")
            {
                let first = told.insert(line.message.clone());
                assert!(first, "told again: {}", line.message);
            }
        }
    }
}

#[test]
fn a_limit_of_packets_during_a_collision_of_rekeys_leaves_one_child() {
    for_seeds(60, |seed| {
        let connections = limited(|child| {
            child.rekey_packets = 20 + seed % 20;
            child.life_packets = child.rekey_packets + 2 + seed % 13;
        });
        let loss = [0, 100, 300][usize::try_from(seed % 3).unwrap()];
        let world = run_into_limits(seed, loss, connections);
        world.assert_in_sync(1);
        assert_one_end_per_sa(&world);
    });
}

#[test]
fn a_limit_of_time_during_a_collision_of_rekeys_leaves_one_child() {
    for_seeds(60, |seed| {
        let connections = limited(|child| {
            child.rekey_time = Duration::from_secs(5);
            child.life_time = Duration::from_millis(5_500 + seed % 10 * 1000);
            child.rand_time = Duration::from_secs(1);
        });
        let loss = [0, 300, 400][usize::try_from(seed % 3).unwrap()];
        let world = run_into_limits(seed, loss, connections);
        world.assert_in_sync(1);
        assert_one_end_per_sa(&world);
    });
}
