// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Against libreswan and OpenIKED under a kernel that has ESP: part of
//! `cargo xtask test --only kernel`.

use swanherd_tests::{Drops, ForeignPair, Make, Pings, xfrm};

/// Children that outlive the test.
const HOUR: u32 = 3600;

fn assert_one_tunnel(pair: &ForeignPair) {
    let namespace = &pair.left.namespace;
    let (states, policies) = (xfrm(namespace, "state"), xfrm(namespace, "policy"));
    assert_eq!(states.len(), 2, "{states:#?}\n{}", pair.logs());
    assert_eq!(policies.len(), 3, "{policies:#?}\n{}", pair.logs());
}

/// No SA with either daemon, and no state in either kernel; no policy with ours.
fn assert_nothing_left(pair: &ForeignPair) {
    pair.left.wait_until("no SA", 10, |n| n.sas().is_empty());
    pair.left.wait_until("no state at the peer", 10, |_| {
        xfrm(&pair.right.namespace, "state").is_empty()
    });
    for what in ["state", "policy"] {
        let left = xfrm(&pair.left.namespace, what);
        assert!(left.is_empty(), "{what}: {left:#?}\n{}", pair.logs());
    }
}

fn wait_for_one_child_other_than(pair: &ForeignPair, spi: &str, seconds: u64) {
    pair.left.wait_until("another child", seconds, |n| {
        let children = n.children("INSTALLED");
        children.len() == 1 && children[0].text("spi-in") != spi
    });
}

fn spi(pair: &ForeignPair) -> String {
    let children = pair.left.children("INSTALLED");
    assert_eq!(children.len(), 1, "{children:#?}\n{}", pair.logs());
    children[0].text("spi-in").to_owned()
}

/// As many pings as may be lost while a child is replaced: those of a fifth of a second.
///
/// libreswan sends by a new child as soon as it has answered, so that packets may arrive before its
/// keys can be known, and takes an old child out of its kernel before it tells; OpenIKED answers
/// before it has installed a new child, and deletes the old one before it has installed another.
const MOMENT: u32 = 4;

/// Pings may be lost for a moment only, and only those for which a kernel had no SA: none, or one
/// whose SPI is reserved while its keys are awaited (`XfrmAcquireError`).
fn assert_lost(pair: &ForeignPair, pings: Pings) {
    let report = pings.finish();
    let lost = report.sent - report.received;
    let [ours, peers] = [&pair.left.namespace, &pair.right.namespace].map(Drops::of);
    let without = peers.number("XfrmInNoStates")
        + peers.number("XfrmOutNoStates")
        + peers.number("XfrmAcquireError")
        + ours.number("XfrmAcquireError");
    assert!(
        lost <= MOMENT.min(without),
        "{}\nours: {ours}\nthe peer's: {peers}\n{}",
        report.text,
        pair.logs()
    );
}

/// We initiate, rekey child and IKE SA under traffic, and terminate.
fn we_do_everything(make: Make) {
    let mut pair = ForeignPair::new(make, HOUR);
    pair.right.start();

    let initiate = ["--initiate", "--child", "c", "--timeout", "20"];
    let output = pair.left.swanctl(&initiate);
    assert!(output.ok(), "{output}\n{}", pair.logs());
    pair.assert_traffic_passes();
    assert_one_tunnel(&pair);
    let first = spi(&pair);
    let pings = pair.pings(60);
    let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
    wait_for_one_child_other_than(&pair, &first, 10);
    let ike = pair.left.sas()[0].1.text("initiator-spi").to_owned();
    let _ = pair.left.swanctl(&["--rekey", "--ike", "t"]).expect_ok();
    pair.left.wait_until("another IKE SA", 10, |n| {
        let sas = n.sas();
        sas.len() == 1 && sas[0].1.text("initiator-spi") != ike
    });
    assert_lost(&pair, pings);
    pair.left.wait_until("one pair of states", 15, |_| {
        xfrm(&pair.left.namespace, "state").len() == 2
    });
    pair.assert_traffic_passes();
    assert_one_tunnel(&pair);

    let _ = pair
        .left
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();
    assert_nothing_left(&pair);
}

/// The peer initiates, rekeys under traffic, and terminates.
fn the_peer_does_everything(make: Make, lifetime: u32) {
    let mut pair = ForeignPair::new(make, lifetime);
    if make == Make::Libreswan {
        pair.right.start();
    }

    pair.right.initiate();
    pair.left
        .wait_until("a child", 10, |n| n.children("INSTALLED").len() == 1);
    let first = spi(&pair);
    pair.assert_traffic_passes();
    let pings = pair.pings(if lifetime == HOUR { 60 } else { 20 * lifetime });
    let by_command = pair.right.rekey_child();
    assert_eq!(by_command, lifetime == HOUR);
    wait_for_one_child_other_than(&pair, &first, 30);
    let ike = pair.left.sas()[0].1.text("initiator-spi").to_owned();
    if pair.right.rekey_ike() {
        pair.left.wait_until("another IKE SA", 10, |n| {
            let sas = n.sas();
            sas.len() == 1 && sas[0].1.text("initiator-spi") != ike
        });
    }
    assert_lost(&pair, pings);
    pair.assert_traffic_passes();

    pair.right.terminate();
    assert_nothing_left(&pair);
}

#[test]
fn libreswan_as_responder() {
    we_do_everything(Make::Libreswan);
}

#[test]
fn libreswan_as_initiator() {
    the_peer_does_everything(Make::Libreswan, HOUR);
}

#[test]
fn openiked_as_responder() {
    we_do_everything(Make::Openiked);
}

#[test]
fn openiked_as_initiator() {
    // It rekeys when most of the lifetime is over, and has no command for it.
    the_peer_does_everything(Make::Openiked, 8);
}
