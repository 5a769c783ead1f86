// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Anything at any time, and then peace: whatever happened, both ends agree in the end.

use std::time::Duration;

use swanherd_config::model::{Connection, Unique};
use swanherd_ike::api::{Command, Selector, Settings};
use swanherd_ike::crypto::Provider;

use crate::config::{child, pair, psk};
use crate::handshake::ready;
use crate::net::{Conditions, SimRng};
use crate::plane::OpKind;
use crate::world::{ALICE, BOB, World, for_seeds};

/// Two children, liveness checks, and rekeying about as often as anything else happens.
fn connections() -> (Connection, Connection) {
    let mut connections = pair();
    for (conn, local, remote) in [
        (&mut connections.0, "10.3.0.0/16", "10.4.0.0/16"),
        (&mut connections.1, "10.4.0.0/16", "10.3.0.0/16"),
    ] {
        conn.unique = Unique::Replace;
        conn.dpd_delay = Duration::from_secs(20);
        conn.rekey_time = Duration::from_secs(150);
        conn.rand_time = Duration::from_secs(30);
        conn.children.push(child("second", local, remote));
        for child in &mut conn.children {
            child.rekey_time = Duration::from_secs(70);
            child.life_time = Duration::from_secs(110);
            child.rand_time = Duration::from_secs(20);
        }
    }
    connections
}

fn selector(rng: &mut SimRng, host: usize) -> Selector {
    let name = if host == ALICE { "to-bob" } else { "to-alice" };
    match rng.next() % 3 {
        0 => Selector {
            child: Some("net".to_owned()),
            ..Selector::default()
        },
        1 => Selector {
            child: Some("second".to_owned()),
            ..Selector::default()
        },
        _ => Selector {
            ike: Some(name.to_owned()),
            ..Selector::default()
        },
    }
}

fn something(world: &mut World, rng: &mut SimRng) {
    let host = if rng.chance(500) { ALICE } else { BOB };
    match rng.next() % 12 {
        0..=3 => {
            let child = if rng.chance(500) { "net" } else { "second" };
            world.initiate(host, child);
        }
        4..=6 => {
            let selector = selector(rng, host);
            let reauth = rng.chance(200);
            world.command(host, Command::Rekey { selector, reauth });
        }
        7 => {
            let selector = selector(rng, host);
            let force = rng.chance(200);
            world.command(host, Command::Terminate { selector, force });
        }
        8 => {
            let kinds = [OpKind::AllocSpi, OpKind::InstallSa, OpKind::InstallPolicies];
            let kind = kinds[usize::try_from(rng.next() % 3).unwrap()];
            world.hosts[host].plane.failing = vec![(kind, 1)];
        }
        9 => world.net.cut = rng.chance(300),
        10 => {
            world.restart(host, Settings::default(), Provider::fake());
            let (alice, bob) = connections();
            let connection = if host == ALICE { alice } else { bob };
            world.load(host, &psk(), connection);
        }
        _ => world.net.conditions.loss = rng.next() % 300,
    }
}

#[test]
fn whatever_happens_both_ends_agree_in_the_end() {
    for_seeds(200, |seed| {
        let mut rng = SimRng::new(seed ^ 0xc4a0_5c4a);
        let mut world = World::new(seed).conditions(Conditions::rough(100));
        ready(&mut world, connections());
        for _ in 0..40 {
            something(&mut world, &mut rng);
            let upper = [50, 1000, 30_000][usize::try_from(rng.next() % 3).unwrap()];
            let pause = rng.millis(&(0..=upper));
            world.run_for(pause);
        }

        world.net.cut = false;
        world.net.conditions = Conditions::default();
        for host in [ALICE, BOB] {
            world.hosts[host].plane.failing.clear();
        }
        // Long enough for retransmissions, liveness checks and lifetimes to have their say.
        world.run_for(Duration::from_secs(600));
        // A rekey may be under way at this very moment.
        let at_rest = world.run_until(Duration::from_secs(60), World::is_at_rest);
        assert!(at_rest, "no rest");
        if world.host(ALICE).ike_sas().is_empty() {
            world.assert_all_clean();
        } else {
            let children = world.host(ALICE).children().len();
            world.assert_in_sync(children);
        }
    });
}
