// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Addresses and routes that have nothing to do with a tunnel come and go by the thousand.

use std::fmt::Write as _;
use std::fs;
use std::time::{Duration, Instant};

use swanherd_tests::{Pair, Pings, Plane, Scenario};

use crate::support::{View, assert_same, processor_time};

/// Changes in all: additions and removals of addresses and routes.
const CHANGES: u32 = 10_000;
/// Changes of one call of `ip`.
const BATCH: u32 = 500;
/// The daemon's processor time for each change, at the most.
const MOST: Duration = Duration::from_millis(2);

#[test]
fn ten_thousand_changes_of_addresses_and_routes_do_not_disturb() {
    changes(Plane::Kernel);
}

/// Changes addresses and routes all the time while echo requests go through a tunnel.
pub(crate) fn changes(plane: Plane) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");
    pair.assert_traffic_passes();
    let left = &pair.left;
    left.namespace
        .ip("link add churn type veth peer name churned");
    left.namespace.ip("link set churn up");
    // With its last address a device loses its routes.
    left.namespace.ip("addr add 10.79.0.1/32 dev churn");
    let before = View::masked(&left.namespace);
    let ike = left.sas()[0].1.text("initiator-spi").to_owned();
    let busy = processor_time(left);
    let pings = Pings::start(&left.namespace, "10.1.0.1", "10.2.0.1", 100);
    let begun = Instant::now();

    let mut done = 0;
    while done < CHANGES {
        batch(&pair, done);
        done += BATCH;
    }

    let (took, spent) = (begun.elapsed(), processor_time(left).saturating_sub(busy));
    eprintln!("{done} changes in {took:.1?}, the daemon used {spent:.1?} of it");
    let report = pings.finish();
    assert_eq!(
        report.received,
        report.sent,
        "{}\n{}",
        report.text,
        pair.logs()
    );
    assert!(spent < MOST * CHANGES, "{spent:?}\n{}", left.log());
    let sas = left.sas();
    assert_eq!(sas.len(), 1, "{sas:#?}\n{}", pair.logs());
    assert_eq!(sas[0].1.text("initiator-spi"), ike, "{}", pair.logs());
    assert_same(
        "after the changes",
        &before,
        &View::masked(&left.namespace),
        left,
    );
    pair.assert_traffic_passes();
}

/// One call of `ip` that adds addresses and routes and takes them away again.
fn batch(pair: &Pair, number: u32) {
    let mut lines = String::new();
    for i in 0..BATCH / 4 {
        let (third, fourth) = (i / 250, i % 250 + 1);
        let net = (number / BATCH) % 250;
        for sign in ["add", "del"] {
            let _ = writeln!(lines, "addr {sign} 10.77.{third}.{fourth}/32 dev churn");
            let _ = writeln!(lines, "route {sign} 10.78.{net}.{fourth}/32 dev churn");
        }
    }
    let file = pair.lab.dir().join("changes");
    fs::write(&file, lines).expect("a file for changes");
    pair.left
        .namespace
        .ip(&format!("-batch {}", file.display()));
}
