// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children that carry nothing are taken down after a while, and only those.

use std::time::Duration;

use swanherd_config::model::{Action, Connection};
use swanherd_ike::api::{Event, Selector};

use crate::config::pair;
use crate::handshake::established_with;
use crate::world::{ALICE, BOB, World, for_seeds};

const LIMIT: Duration = Duration::from_secs(100);

/// Alice takes idle children down; her action would keep them up.
fn impatient() -> (Connection, Connection) {
    let mut connections = pair();
    let cfg = &mut connections.0.children[0];
    cfg.inactivity = LIMIT;
    cfg.start_action = Action {
        trap: false,
        start: true,
    };
    connections
}

/// How many seconds pass until Alice has no child.
fn idle_for(world: &mut World) -> Option<u64> {
    let start = world.elapsed();
    let gone = world.run_until(4 * LIMIT, |world| world.host(ALICE).children().is_empty());
    gone.then(|| (world.elapsed() - start).as_secs())
}

#[test]
fn an_idle_child_is_deleted_and_stays_down_until_it_is_wanted() {
    let mut world = established_with(World::new(700), impatient());
    assert!(matches!(idle_for(&mut world), Some(98..=101)));
    world.run_for(20 * LIMIT);
    for host in [ALICE, BOB] {
        assert!(world.host(host).children().is_empty());
        assert_eq!(world.host(host).ike_sas().len(), 1);
    }
    let downs = world
        .host(ALICE)
        .events
        .iter()
        .filter(|(_, event)| matches!(event, Event::ChildUpDown { up: false, .. }));
    assert_eq!(downs.count(), 1);

    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(1);
}

#[test]
fn a_child_in_use_stays_and_is_deleted_that_long_after_the_last_packet() {
    let mut world = established_with(World::new(701), impatient());
    world.set_traffic(true);
    world.run_for(10 * LIMIT + LIMIT / 3);
    world.assert_in_sync(1);
    world.set_traffic(false);
    assert!(matches!(idle_for(&mut world), Some(99..=101)));
}

#[test]
fn a_rekey_is_no_use_of_a_child() {
    for rekeyed_by in [ALICE, BOB] {
        let mut connections = impatient();
        let of_rekeyer = if rekeyed_by == ALICE {
            &mut connections.0
        } else {
            &mut connections.1
        };
        of_rekeyer.children[0].rekey_time = LIMIT * 2 / 5;
        let mut world = established_with(World::new(702), connections);
        world.set_traffic(true);
        world.run_for(10 * LIMIT + LIMIT / 4);
        world.assert_in_sync(1);
        world.set_traffic(false);
        assert!(matches!(idle_for(&mut world), Some(95..=111)));
    }
}

#[test]
fn a_child_that_is_idle_on_an_ike_sa_that_is_rekeyed_is_deleted() {
    for_seeds(20, |seed| {
        let mut world = established_with(World::new(seed), impatient());
        // Just when the data plane is asked.
        world.run_for(LIMIT - Duration::from_millis(25 + 2 * seed));
        let selector = Selector {
            ike: Some("to-alice".to_owned()),
            ..Selector::default()
        };
        world.rekey(BOB, selector);
        assert!(matches!(idle_for(&mut world), Some(0..=15)));
        world.run_for(Duration::from_secs(30));
        assert_eq!(world.host(BOB).ike_sas().len(), 1);
        assert!(world.host(BOB).children().is_empty());
    });
}
