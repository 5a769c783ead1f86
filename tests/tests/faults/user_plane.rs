// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What needs no ESP in the kernel: the daemon encrypts.

use swanherd_tests::{Daemon, Plane, Scenario, subject};

use crate::support::{Dice, View, assert_reachable, assert_same, initiate, signal, times};
use crate::{churn, cycles, traps};

#[test]
fn cycles_of_tunnels_leave_nothing_behind() {
    cycles::cycles(Plane::User, subject(), 10, times(5, 100));
}

#[test]
fn a_storm_of_flows_makes_one_tunnel() {
    traps::one_tunnel(Plane::User, "trap");
}

#[test]
fn ten_thousand_changes_of_addresses_and_routes_do_not_disturb() {
    churn::changes(Plane::User);
}

#[test]
fn killed_it_finds_what_it_left() {
    if subject() == Daemon::Charon {
        // charon leaves its routes behind; nothing to measure against.
        return;
    }
    let mut dice = Dice::new();
    let mut pair = Scenario::new(Plane::User).start();
    pair.left.stop();
    let pristine = View::of(&pair.left.namespace);
    pair.left.start();
    let idle = View::of(&pair.left.namespace);

    for point in 0..times(4, 50) {
        let delay = std::time::Duration::from_micros(dice.below(30_000));
        eprintln!("point {point}: {delay:?}");
        std::thread::scope(|scope| {
            let left = &pair.left;
            let working = scope.spawn(|| initiate(&mut left.vici(), "t", "c"));
            std::thread::sleep(delay);
            signal(left, rustix::process::Signal::KILL);
            let _ = working.join();
        });
        pair.left.kill();
        pair.left.start();

        let found = View::of(&pair.left.namespace);
        assert_same("after the start", &idle, &found, &pair.left);
        pair.left.initiate("c");
        assert_reachable(&pair.left, "10.1.0.1", "10.2.0.1", 5);
    }

    pair.left.stop();
    let after = View::of(&pair.left.namespace);
    assert_same("a daemon that ended", &pristine, &after, &pair.left);
}
