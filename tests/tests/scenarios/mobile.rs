// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hosts that move, and hosts that are sent elsewhere.
//!
//! ```text
//!  10.3.0.1  alice 192.0.2.50 ------------------- wire --- 192.0.2.2 sun 10.2.0.1
//!            alice 10.1.0.10 --- 10.1.0.1 moon 192.0.2.1 --- wire
//! ```

use swanherd_tests::{Daemon, Lab, Node, Pings, peer, subject};

use crate::support::{
    ALICE, HASTY, MOON, SUN, Side, assert_kernel_has, assert_pings, assert_reaches, ike_spi, lists,
    node, start, xfrm,
};

/// Alice's first uplink goes away; the second one leads through another host. With `given`, her
/// inner address is one that sun gives her.
fn moves(alice_is: Daemon, sun_is: Daemon, given: bool) {
    let mut lab = Lab::new();
    let (wire, moon) = (lab.namespace("wire"), lab.namespace("moon"));
    let (alice, sun) = (lab.namespace("alice"), lab.namespace("sun"));
    wire.ip("link add wire type bridge");
    wire.ip("link set wire up");
    for (namespace, dev, address) in [
        (&alice, "to-alice", "192.0.2.50/24"),
        (&moon, "to-moon", "192.0.2.1/24"),
        (&sun, "to-sun", "192.0.2.2/24"),
    ] {
        lab.link((namespace, "u0", address), (&wire, dev, ""));
        wire.ip(&format!("link set {dev} master wire"));
    }
    lab.link((&alice, "u1", "10.1.0.10/16"), (&moon, "u1", "10.1.0.1/16"));
    let _ = moon
        .run("sysctl", ["-qw", "net.ipv4.ip_forward=1"])
        .expect_ok();
    alice.ip("route add 192.0.2.2 via 10.1.0.1 metric 100");
    sun.ip("route add 10.1.0.0/16 via 192.0.2.1");
    if !given {
        alice.ip("addr add 10.3.0.1/32 dev lo");
    }
    sun.ip("addr add 10.2.0.1/32 dev lo");
    // The way by the wire comes first as long as there is one.
    alice.ip("route add 192.0.2.2 dev u0 metric 10");
    let mut alice = node(&lab, &alice, alice_is, HASTY);
    let mut sun = node(&lab, &sun, sun_is, HASTY);
    start(&mut [&mut alice, &mut sun]);
    let [inner, vips, pools] = if given {
        ["dynamic", "vips = 0.0.0.0", "pools = rw_pool"]
    } else {
        ["10.3.0.1/32", "", ""]
    };
    let child = format!("local_ts = 10.2.0.0/16\n remote_ts = {inner}");
    let of_sun = Side {
        name: "mobike",
        addresses: ["192.0.2.2", "%any"],
        ids: [SUN, ALICE],
        auth: "psk",
        connection: &format!("dpd_delay = 2s\n {pools}"),
        children: &[("alice", &child)],
    };
    if given {
        let pool = "pools {\n rw_pool {\n addrs = 10.3.0.0/28\n }\n}\n";
        sun.configure(&of_sun.with(pool));
        let _ = sun.swanctl(&["--load-all"]).expect_ok();
    } else {
        sun.configure(&of_sun.conf());
        sun.load();
    }
    let child = format!("local_ts = {inner}\n remote_ts = 10.2.0.0/16");
    alice.configure(
        &Side {
            name: "mobike",
            addresses: ["192.0.2.50, 10.1.0.10", "192.0.2.2"],
            ids: [ALICE, SUN],
            auth: "psk",
            connection: &format!("dpd_delay = 2s\n {vips}"),
            children: &[("alice", &child)],
        }
        .conf(),
    );
    alice.load();
    alice.initiate("alice");
    assert_at(&alice, ["192.0.2.50", "192.0.2.2"]);
    assert_at(&sun, ["192.0.2.2", "192.0.2.50"]);
    assert_pings(&alice, "10.3.0.1", "10.2.0.1");
    let first = ike_spi(&alice);

    alice.namespace.ip("link set u0 down");
    let pings = Pings::start(&alice.namespace, "10.3.0.1", "10.2.0.1", 100);

    assert_at(&alice, ["10.1.0.10", "192.0.2.2"]);
    assert_at(&sun, ["192.0.2.2", "10.1.0.10"]);
    drop(pings);
    assert_reaches(&alice, "10.3.0.1", "10.2.0.1");
    assert_pings(&alice, "10.3.0.1", "10.2.0.1");
    assert_pings(&sun, "10.2.0.1", "10.3.0.1");
    assert_eq!(ike_spi(&alice), first);
    assert_eq!(ike_spi(&sun), first);
    for node in [&alice, &sun] {
        assert_kernel_has(node, 2, 3);
        let states = xfrm(node, "state");
        assert!(
            states.iter().all(|state| state.contains("10.1.0.10")),
            "{states:#?}"
        );
    }
}

fn assert_at(node: &Node, [own, other]: [&str; 2]) {
    lists(
        node,
        &[
            "mobike {",
            "state=ESTABLISHED",
            &format!("local-host={own}"),
            &format!("remote-host={other}"),
            "child-sas {alice",
            "state=INSTALLED",
        ],
        20,
    );
}

#[test]
fn mobike() {
    moves(subject(), peer(), false);
}

#[test]
fn mobike_as_the_gateway() {
    moves(peer(), subject(), false);
}

/// Only charon has addresses to give.
#[test]
fn mobike_virtual_ip() {
    moves(subject(), Daemon::Charon, true);
}

/// Carol calls moon, which has her go to alice once their SA is there.
#[test]
fn redirect_active() {
    let mut lab = Lab::new();
    let wire = lab.namespace("wire");
    wire.ip("link add wire type bridge");
    wire.ip("link set wire up");
    let hosts = ["carol", "moon", "alice"].map(|name| lab.namespace(name));
    let addresses = ["192.0.2.100", "192.0.2.1", "192.0.2.10"];
    for (namespace, address) in hosts.iter().zip(addresses) {
        let dev = format!("to-{address}");
        lab.link(
            (namespace, "u0", &format!("{address}/24")),
            (&wire, &dev, ""),
        );
        wire.ip(&format!("link set {dev} master wire"));
    }
    let [carol, moon, alice] = hosts;
    for gateway in [&moon, &alice] {
        gateway.ip("addr add 10.1.0.1/32 dev lo");
    }
    carol.ip("route add 10.1.0.0/16 dev u0");
    let mut carol = node(&lab, &carol, subject(), HASTY);
    let mut moon = node(&lab, &moon, Daemon::Charon, HASTY);
    let mut alice = node(&lab, &alice, peer(), HASTY);
    start(&mut [&mut carol, &mut moon, &mut alice]);
    for (gateway, own) in [(&moon, "192.0.2.1"), (&alice, "192.0.2.10")] {
        gateway.configure(
            &Side {
                name: "rw",
                addresses: [own, "%any"],
                ids: [MOON, "carol.example.org"],
                auth: "psk",
                connection: "",
                children: &[("rw", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")],
            }
            .conf(),
        );
        gateway.load();
    }
    carol.configure(
        &Side {
            name: "home",
            addresses: ["192.0.2.100", "192.0.2.1"],
            ids: ["carol.example.org", MOON],
            auth: "psk",
            connection: "",
            children: &[("home", "local_ts = dynamic\n remote_ts = 10.1.0.0/16")],
        }
        .conf(),
    );
    carol.load();
    carol.initiate("home");
    let at = |gateway: &str, seconds| {
        lists(
            &carol,
            &[
                "home {",
                "state=ESTABLISHED",
                "local-host=192.0.2.100",
                &format!("remote-host={gateway}"),
                "remote-id=moon.example.org",
                "child-sas {home",
                "state=INSTALLED",
            ],
            seconds,
        )
    };
    at("192.0.2.1", 5);
    assert_pings(&carol, "192.0.2.100", "10.1.0.1");

    let _ = moon
        .swanctl(&["--redirect", "--ike", "rw", "--gateway", "192.0.2.10"])
        .expect_ok();

    at("192.0.2.10", 10);
    moon.wait_until("that moon has no SA", 10, |node| node.sas().is_empty());
    lists(
        &alice,
        &[
            "rw {",
            "state=ESTABLISHED",
            "remote-host=192.0.2.100",
            "child-sas {rw",
        ],
        5,
    );
    assert_pings(&carol, "192.0.2.100", "10.1.0.1");
    assert_eq!(carol.sas().len(), 1);
    assert_kernel_has(&carol, 2, 3);
}
