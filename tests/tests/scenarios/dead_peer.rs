// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A peer that is no longer there.

use swanherd_tests::Pings;

use crate::support::{HASTY, Nets, assert_kernel_has, assert_reaches, lists, lists_nothing};

const UP: [&str; 5] = [
    "gw-gw {",
    "state=ESTABLISHED",
    "remote-host=192.0.2.2",
    "child-sas {net-net",
    "state=INSTALLED",
];

fn established(action: &str) -> Nets {
    let nets = Nets::with(HASTY, ["dpd_delay = 1s", ""], [action, ""]);
    nets.moon.initiate("net-net");
    lists(&nets.moon, &UP, 5);
    nets.assert_traffic_passes();
    nets
}

#[test]
fn dpd_clear() {
    let nets = established("dpd_action = clear");

    let cut = nets.cut();
    lists_nothing(&nets.moon, 15);

    assert_kernel_has(&nets.moon, 0, 0);
    drop(cut);
    nets.assert_no_traffic();
    assert_eq!(nets.moon.sas().len(), 0);
}

#[test]
fn dpd_restart() {
    let nets = established("dpd_action = restart");
    let first = nets.moon.sas()[0].1.text("initiator-spi").to_owned();

    let cut = nets.cut();
    nets.moon.wait_until("that it tries anew", 15, |node| {
        node.sas()
            .iter()
            .any(|(_, sa)| sa.text("state") == "CONNECTING" && sa.text("initiator-spi") != first)
    });
    drop(cut);

    lists(&nets.moon, &UP, 15);
    nets.assert_traffic_passes();
    assert_kernel_has(&nets.moon, 2, 3);
}

#[test]
fn dpd_trap() {
    let nets = established("dpd_action = trap");

    let cut = nets.cut();
    lists_nothing(&nets.moon, 15);
    assert_kernel_has(&nets.moon, 0, 3);
    drop(cut);
    // The first packets bring the tunnel back.
    let pings = Pings::start(&nets.moon.namespace, "10.1.0.1", "10.2.0.1", 40);

    lists(&nets.moon, &UP, 5);
    drop(pings);
    assert_reaches(&nets.moon, "10.1.0.1", "10.2.0.1");
    nets.assert_traffic_passes();
    assert_kernel_has(&nets.moon, 2, 3);
}
