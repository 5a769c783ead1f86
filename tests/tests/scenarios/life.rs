// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SAs grow old and are replaced.

use swanherd_tests::{Daemon, Drops, Node, Pings};

use crate::support::{HASTY, Nets, assert_kernel_has, child_spi, ike_spi, lists, xfrm};

/// Both kinds of SA, by time: of each one that is replaced by its owner, and pings all along.
fn rekeyed(connection: [&str; 2], child: [&str; 2]) {
    let nets = Nets::with(HASTY, connection, child);
    nets.moon.initiate("net-net");
    let (ike, child) = (ike_spi(&nets.moon), child_spi(&nets.moon));
    let pings = Pings::start(&nets.moon.namespace, "10.1.0.1", "10.2.0.1", 200);

    nets.moon
        .wait_until("another IKE SA and another child", 15, |node| {
            let (sas, children) = (node.sas(), node.children("INSTALLED"));
            sas.iter().all(|(_, sa)| sa.text("initiator-spi") != ike)
                && children.iter().all(|sa| sa.text("spi-in") != child)
        });
    assert_none_lost(&nets, pings);
    for node in [&nets.moon, &nets.sun] {
        lists(
            node,
            &[
                "gw-gw {",
                "version=2",
                "state=ESTABLISHED",
                "encr-alg=AES_GCM_16",
                "encr-keysize=128",
                "prf-alg=PRF_HMAC_SHA2_256",
                "dh-group=CURVE_25519",
                "child-sas {net-net",
                "state=INSTALLED",
                "mode=TUNNEL",
                "encr-alg=AES_GCM_16",
                "dh-group=CURVE_25519",
            ],
            5,
        );
    }
    nets.assert_traffic_passes();
}

fn assert_none_lost(nets: &Nets, pings: Pings) {
    let report = pings.finish();
    assert_eq!(
        report.sent,
        report.received,
        "{}\n{}",
        report.text,
        nets.moon.log()
    );
}

#[test]
fn net2net_rekey() {
    rekeyed(
        ["rekey_time = 6s\n over_time = 60s\n rand_time = 0s", ""],
        ["rekey_time = 3s\n life_time = 60s\n rand_time = 0s", ""],
    );
}

#[test]
fn net2net_rekey_by_the_peer() {
    rekeyed(
        ["", "rekey_time = 6s\n over_time = 60s\n rand_time = 0s"],
        ["", "rekey_time = 3s\n life_time = 60s\n rand_time = 0s"],
    );
}

/// What was replaced is gone: three policies and one pair of states.
#[test]
fn net2net_rekey_by_command() {
    let nets = Nets::with(HASTY, ["", ""], ["", ""]);
    nets.moon.initiate("net-net");
    let (ike, child) = (ike_spi(&nets.moon), child_spi(&nets.moon));

    let _ = nets
        .moon
        .swanctl(&["--rekey", "--child", "net-net"])
        .expect_ok();
    nets.moon.wait_until("another child", 5, |node| {
        node.children("INSTALLED")
            .iter()
            .any(|sa| sa.text("spi-in") != child)
    });
    let _ = nets
        .moon
        .swanctl(&["--rekey", "--ike", "gw-gw"])
        .expect_ok();
    nets.moon.wait_until("another IKE SA", 5, |node| {
        node.sas()
            .iter()
            .all(|(_, sa)| sa.text("initiator-spi") != ike)
    });

    nets.assert_traffic_passes();
    nets.moon.wait_until("one pair of states", 15, |node| {
        xfrm(node, "state").len() == 2
    });
    assert_kernel_has(&nets.moon, 2, 3);
}

/// The IKE SA is made anew, with authentication, before the old one goes, and pings all along. The
/// first of the `roles` is the initiator of both.
fn reauthenticated(connection: [&str; 2], roles: fn(&Nets) -> [&Node; 2]) {
    let settings = format!("{HASTY}  make_before_break = yes\n");
    let nets = Nets::with(&settings, connection, ["", ""]);
    let [initiator, responder] = roles(&nets);
    initiator.initiate("net-net");
    let (ike, child) = (ike_spi(&nets.moon), child_spi(&nets.moon));
    let before = early(initiator);
    let pings = Pings::start(&nets.moon.namespace, "10.1.0.1", "10.2.0.1", 140);

    nets.moon
        .wait_until("another IKE SA, and no more", 20, |node| {
            let (sas, children) = (node.sas(), node.children("INSTALLED"));
            sas.len() == 1
                && sas[0].1.text("initiator-spi") != ike
                && children.len() == 1
                && children[0].text("spi-in") != child
        });
    lists(
        initiator,
        &[
            "gw-gw {",
            "state=ESTABLISHED",
            "initiator=yes",
            "child-sas {net-net",
            "state=INSTALLED",
        ],
        10,
    );
    nets.moon
        .wait_until("one pair of states, and their policies", 15, |node| {
            [xfrm(node, "state").len(), xfrm(node, "policy").len()] == [2, 3]
        });
    let report = pings.finish();
    // charon sends by the new SA once it has sent its response, which the initiator may not have
    // seen yet, whoever it is; we do not.
    let excused = match responder.daemon {
        Daemon::Charon => early(initiator) - before,
        Daemon::Swanherd => 0,
    };
    assert!(
        report.sent - report.received <= excused,
        "{excused} came too early\n{}\n{}",
        report.text,
        nets.moon.log()
    );
}

/// How many packets have come by an SA that had no keys yet.
fn early(node: &Node) -> u32 {
    Drops::of(&node.namespace).number("XfrmAcquireError")
}

/// Of the one that the initiator wants, and of no other.
const OFTEN: &str = "reauth_time = 6s\n over_time = 60s\n rand_time = 0s";

#[test]
fn reauth_mbb() {
    reauthenticated([OFTEN, ""], |nets| [&nets.moon, &nets.sun]);
}

#[test]
fn reauth_mbb_by_the_peer() {
    reauthenticated(["", OFTEN], |nets| [&nets.sun, &nets.moon]);
}

/// The responder grants less time than the initiator would take. (charon sends AUTH_LIFETIME only
/// when it cannot begin by itself, as with peers that have their address from it.)
#[test]
fn reauth_early() {
    let settings = format!("{HASTY}  make_before_break = yes\n");
    let nets = Nets::start(&settings);
    let [moon, sun] = Nets::sides(
        [
            "vips = 0.0.0.0\n reauth_time = 60m\n over_time = 2s\n rand_time = 0s",
            "pools = guests\n reauth_time = 6s\n over_time = 60s\n rand_time = 0s",
        ],
        [
            &[("net-net", "remote_ts = 10.2.0.0/16")],
            &[("net-net", "local_ts = 10.2.0.0/16")],
        ],
    );
    nets.sun
        .configure(&sun.with("pools {\n guests {\n addrs = 10.3.0.0/28\n }\n}\n"));
    nets.sun.load();
    nets.moon.configure(&moon.conf());
    nets.moon.load();
    nets.moon.initiate("net-net");
    let first = ike_spi(&nets.moon);

    nets.moon
        .wait_until("another IKE SA, and no more", 10, |node| {
            let sas = node.sas();
            sas.len() == 1
                && sas[0].1.text("initiator-spi") != first
                && node.children("INSTALLED").len() == 1
        });

    lists(
        &nets.moon,
        &[
            "gw-gw {",
            "state=ESTABLISHED",
            "initiator=yes",
            "local-vips=[10.3.0.1]",
            "child-sas {net-net",
            "state=INSTALLED",
            "local-ts=[10.3.0.1/32]",
        ],
        5,
    );
    nets.moon
        .wait_until("one pair of states, and their policies", 15, |node| {
            [xfrm(node, "state").len(), xfrm(node, "policy").len()] == [2, 3]
        });
    let pings = Pings::start(&nets.moon.namespace, "10.3.0.1", "10.2.0.1", 20);
    assert!(pings.finish().received >= 10, "{}", nets.moon.log());
}

#[test]
fn reauth_early_as_the_responder() {
    let patient = "reauth_time = 60m\n over_time = 2s\n rand_time = 0s";
    reauthenticated([OFTEN, patient], |nets| [&nets.sun, &nets.moon]);
}

/// The responder grants more time than the initiator takes.
#[test]
fn reauth_late() {
    let patient = "reauth_time = 60m\n over_time = 60s\n rand_time = 0s";
    reauthenticated([OFTEN, patient], |nets| [&nets.moon, &nets.sun]);
}

#[test]
fn reauth_late_as_the_responder() {
    let patient = "reauth_time = 60m\n over_time = 60s\n rand_time = 0s";
    reauthenticated([patient, OFTEN], |nets| [&nets.sun, &nets.moon]);
}
