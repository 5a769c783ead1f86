// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Networks that lose, duplicate and reorder.

use std::time::Duration;

use swanherd_ike::api::{Counter, Selector};

use crate::config::pair;
use crate::handshake::ready;
use crate::net::Conditions;
use crate::world::{ALICE, BOB, World, for_seeds};

/// Attempts until it must be up. About one in two hundred uses up its retransmissions, two in a
/// row do so once in a few ten thousand seeds.
fn attempts(seed: u64) -> u32 {
    if seed < 1000 { 2 } else { 4 }
}

#[test]
fn a_thousand_handshakes_at_20_percent_loss() {
    for_seeds(1000, |seed| {
        let mut world = World::new(seed).conditions(Conditions::rough(200));
        ready(&mut world, pair());
        let mut up = false;
        for _ in 0..attempts(seed) {
            let timeouts = world.host(ALICE).counted(Counter::PeerTimeout);
            let command = world.initiate(ALICE, "net");
            match world.finish(ALICE, command) {
                Ok(()) => {
                    up = true;
                    break;
                }
                Err(_) => {
                    let now = world.host(ALICE).counted(Counter::PeerTimeout);
                    assert_eq!(now, timeouts + 1, "seed {seed}: failed without a timeout");
                }
            }
        }
        assert!(up, "seed {seed}: did not come up");

        // What a lost attempt has left behind goes away by itself.
        world.net.conditions.loss = 0;
        world.run_for(Duration::from_secs(240));
        world.assert_in_sync(1);

        // And everything can be taken down again over the same network.
        world.net.conditions.loss = 200;
        let selector = Selector {
            ike: Some("to-bob".to_owned()),
            ..Selector::default()
        };
        let command = world.terminate(ALICE, selector);
        let _ = world.finish(ALICE, command);
        world.run_for(Duration::from_secs(240));
        world.assert_clean(ALICE);
    });
}

#[test]
fn rekeys_of_all_kinds_by_both_sides_survive_10_percent_loss() {
    for_seeds(400, |seed| {
        let mut world = World::new(seed).conditions(Conditions::rough(100));
        ready(&mut world, pair());
        let command = world.initiate(ALICE, "net");
        if world.finish(ALICE, command).is_err() {
            return;
        }
        for round in 0..6 {
            for host in [ALICE, BOB] {
                let mut selector = Selector::default();
                if (seed >> round) & 1 == 0 {
                    selector.child = Some("net".to_owned());
                } else {
                    selector.ike_id = world.host(host).ike_sas().last().map(|sa| sa.id);
                }
                world.rekey(host, selector);
                world.run_for(Duration::from_millis(seed * 37 % 900));
            }
            world.run_for(Duration::from_secs(20));
        }
        world.net.conditions.loss = 0;
        world.run_for(Duration::from_secs(300));
        // Six retransmissions in a row may be lost; then everything is down, but never half.
        if world.host(ALICE).ike_sas().is_empty() && world.host(BOB).ike_sas().is_empty() {
            world.assert_all_clean();
            return;
        }
        world.assert_in_sync(1);
        assert_eq!(world.host(ALICE).ike_sas().len(), 1, "seed {seed}");
    });
}

#[test]
fn a_request_that_arrives_again_is_answered_again_and_not_executed_again() {
    let mut world = World::new(70);
    world.net.conditions.duplication = 1000;
    ready(&mut world, pair());
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(60));
    world.assert_in_sync(1);
    assert_eq!(world.host(BOB).ike_sas().len(), 1);
}
