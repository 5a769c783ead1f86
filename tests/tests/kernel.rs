// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Against strongSwan under a kernel that has ESP: `cargo xtask test --only kernel` runs these
//! under User-mode Linux.

use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Node, Pair, Pings, Plane, Scenario, Star, StarPlan, subject};

mod interop;

interop::suite!(Plane::Kernel);

/// The states or policies of a node, comparable.
fn xfrm(node: &Node, what: &str) -> Vec<String> {
    swanherd_tests::xfrm(&node.namespace, what)
}

fn assert_nothing_left(node: &Node) {
    for what in ["state", "policy"] {
        let left = xfrm(node, what);
        assert!(
            left.is_empty(),
            "left in `ip xfrm {what}`: {left:#?}\n{}",
            node.log()
        );
    }
}

fn established(left: Daemon) -> Pair {
    let pair = Scenario {
        left,
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    pair.left.initiate("c");
    pair
}

#[test]
fn nothing_is_left_after_terminate() {
    let pair = established(subject());

    let _ = pair
        .left
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();

    pair.left.wait_until("no SA", 5, |n| n.sas().is_empty());
    assert_nothing_left(&pair.left);
    assert!(
        !pair
            .left
            .namespace
            .ip("route show table all")
            .contains("10.2.0.0/24")
    );
}

#[test]
fn nothing_is_left_after_sigterm() {
    let mut pair = established(subject());

    pair.left.stop();

    assert_nothing_left(&pair.left);
    assert!(
        !pair
            .left
            .namespace
            .ip("route show table all")
            .contains("10.2.0.0/24")
    );
    pair.right
        .wait_until("that the peer has said goodbye", 5, |n| n.sas().is_empty());
}

#[test]
fn a_daemon_that_was_killed_starts_again_and_clears_what_it_left() {
    if subject() == Daemon::Charon {
        // charon leaves its states behind; nothing to measure against.
        return;
    }
    let mut pair = established(subject());
    pair.left.kill();
    assert!(!xfrm(&pair.left, "state").is_empty());

    pair.left.start();
    pair.left.load();
    pair.left.initiate("c");

    assert_eq!(xfrm(&pair.left, "state").len(), 2);
    assert_eq!(xfrm(&pair.left, "policy").len(), 3);
    pair.assert_traffic_passes();
}

#[test]
fn rekeys_leave_one_pair_of_states() {
    let pair = established(subject());

    for _ in 0..3 {
        let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
        std::thread::sleep(Duration::from_secs(1));
    }

    pair.left
        .wait_until("one pair of states", 15, |n| xfrm(n, "state").len() == 2);
    assert_eq!(xfrm(&pair.left, "policy").len(), 3);
}

#[test]
fn thirty_tunnels_to_thirty_peers() {
    let mut star = Star::start(&StarPlan::new(Plane::Kernel, 30));
    let begun = Instant::now();
    star.start_gateway();

    star.gateway.wait_until("thirty tunnels", 60, |n| {
        n.children("INSTALLED").len() == 30
    });
    eprintln!("thirty tunnels in {:.1} s", begun.elapsed().as_secs_f32());

    let (near, far): (String, Vec<String>) = (
        star.near().to_string(),
        (0..30).map(|i| star.far(i).to_string()).collect(),
    );
    let pings: Vec<Pings> = far
        .iter()
        .map(|far| Pings::start(&star.gateway.namespace, &near, far, 3))
        .collect();
    for (name, pings) in star.names.iter().zip(pings) {
        let report = pings.finish();
        assert_eq!(
            report.received,
            3,
            "{name}: {}\n{}",
            report.text,
            star.gateway.log()
        );
    }
    assert_eq!(xfrm(&star.gateway, "state").len(), 60);
    assert_eq!(xfrm(&star.gateway, "policy").len(), 90);
    star.gateway.stop();
    assert_nothing_left(&star.gateway);
}
