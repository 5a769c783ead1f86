// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Routers that translate addresses.
//!
//! ```text
//!  alice 10.1.0.10 --+                                            +-- 10.2.0.10 bob
//!                    +-- 10.1.0.1 moon 192.0.2.1 ---- 192.0.2.2 sun 10.2.0.1
//!  venus 10.1.0.20 --+
//! ```

use swanherd_tests::{Daemon, Lab, Namespace, Pings, Pki, peer, subject};

use crate::support::{
    ALICE, HASTY, SUN, Side, VENUS, assert_pings, assert_reaches, iptables, lists, node, start,
    xfrm,
};

const BOB: &str = "bob.example.org";

/// The two routers and what is behind them.
pub(crate) struct Routers {
    pub(crate) moon: Namespace,
    pub(crate) sun: Namespace,
    pub(crate) lab: Lab,
}

impl Routers {
    pub(crate) fn new() -> Self {
        let mut lab = Lab::new();
        let moon = lab.namespace("moon");
        let sun = lab.namespace("sun");
        lab.link((&moon, "u0", "192.0.2.1/24"), (&sun, "u0", "192.0.2.2/24"));
        for (router, address) in [(&moon, "10.1.0.1/16"), (&sun, "10.2.0.1/16")] {
            router.ip("link add lan type bridge");
            router.ip(&format!("addr add {address} dev lan"));
            router.ip("link set lan up");
            let _ = router
                .run("sysctl", ["-qw", "net.ipv4.ip_forward=1"])
                .expect_ok();
        }
        Self { moon, sun, lab }
    }

    /// A host behind a router, `.1.` or `.2.`.
    pub(crate) fn host(&mut self, name: &str, address: &str) -> Namespace {
        let host = self.lab.namespace(name);
        let (router, gateway) = if address.starts_with("10.1.") {
            (&self.moon, "10.1.0.1")
        } else {
            (&self.sun, "10.2.0.1")
        };
        self.lab.link(
            (&host, "u0", &format!("{address}/16")),
            (router, &format!("to-{name}"), ""),
        );
        router.ip(&format!("link set to-{name} master lan"));
        host.ip(&format!("route add default via {gateway}"));
        host
    }

    /// Translates what leaves a router's network, UDP to ports of that range.
    fn translate(router: &Namespace, ports: &str) {
        iptables(router, "-t nat -F POSTROUTING");
        iptables(
            router,
            &format!("-t nat -A POSTROUTING -o u0 -p udp -j MASQUERADE --to-ports {ports}"),
        );
        iptables(router, "-t nat -A POSTROUTING -o u0 -j MASQUERADE");
    }
}

/// A host that calls the gateway.
pub(crate) fn host<'a>(
    auth: &'a str,
    own: &'a str,
    children: &'a [(&'a str, &'a str)],
) -> Side<'a> {
    Side {
        name: "nat-t",
        addresses: ["%any", "192.0.2.2"],
        ids: [own, SUN],
        auth,
        connection: "",
        children,
    }
}

fn gateway(auth: &str) -> Side<'_> {
    Side {
        name: "nat-t",
        addresses: ["192.0.2.2", "%any"],
        ids: [SUN, "*.example.org"],
        auth,
        connection: "",
        children: &[("nat-t", "local_ts = 10.2.0.0/16\n remote_ts = 10.1.0.0/16")],
    }
}

/// Two hosts behind one address; the subject is the gateway, or the first of the hosts.
fn roadwarriors(auth: &str, gateway_is: Daemon, alice_is: Daemon) {
    let mut routers = Routers::new();
    let (alice, venus) = (
        routers.host("alice", "10.1.0.10"),
        routers.host("venus", "10.1.0.20"),
    );
    Routers::translate(&routers.moon, "1024-1100");
    let lab = &routers.lab;
    let mut sun = node(lab, &routers.sun, gateway_is, HASTY);
    let mut alice = node(lab, &alice, alice_is, HASTY);
    let mut venus = node(lab, &venus, peer(), HASTY);
    if auth == "pubkey" {
        let pki = Pki::new(&lab.dir().join("pki"), "ecdsa", "256");
        for (host, node) in [(SUN, &sun), (ALICE, &alice), (VENUS, &venus)] {
            pki.issue(host, &node.swanctl_dir());
        }
    }
    start(&mut [&mut sun, &mut alice, &mut venus]);
    sun.configure(&gateway(auth).conf());
    sun.load();
    for (node, id, address) in [(&alice, ALICE, "10.1.0.10"), (&venus, VENUS, "10.1.0.20")] {
        let child = format!("local_ts = {address}/32\n remote_ts = 10.2.0.0/16");
        node.configure(&host(auth, id, &[("nat-t", &child)]).conf());
        node.load();
        node.initiate("nat-t");
        lists(
            node,
            &[
                "nat-t {",
                "state=ESTABLISHED",
                &format!("local-host={address}"),
                "local-port=4500",
                &format!("local-id={id}"),
                "remote-host=192.0.2.2",
                "remote-port=4500",
                "remote-id=sun.example.org",
                "nat-local=yes",
                "nat-any=yes",
                "child-sas {nat-t",
                "state=INSTALLED",
                "mode=TUNNEL",
                "encap=yes",
                &format!("local-ts=[{address}/32]"),
                "remote-ts=[10.2.0.0/16]",
            ],
            5,
        );
        // Each is another port to the gateway, and none is 4500.
        lists(
            &sun,
            &[
                "nat-t {",
                "state=ESTABLISHED",
                "local-host=192.0.2.2",
                "local-port=4500",
                "remote-host=192.0.2.1",
                "remote-port=10",
                &format!("remote-id={id}"),
                "nat-remote=yes",
                "nat-any=yes",
                "child-sas {nat-t",
                "encap=yes",
                &format!("remote-ts=[{address}/32]"),
            ],
            5,
        );
    }

    for (node, address) in [(&alice, "10.1.0.10"), (&venus, "10.1.0.20")] {
        assert_pings(node, address, "10.2.0.1");
        assert_pings(&sun, "10.2.0.1", address);
        assert!(
            xfrm(node, "state")
                .iter()
                .all(|state| state.contains("encap type espinudp")),
            "{}",
            node.log()
        );
    }
    assert_eq!(xfrm(&sun, "state").len(), 4);
}

#[test]
fn nat_rw() {
    roadwarriors("pubkey", subject(), peer());
}

#[test]
fn nat_rw_psk_as_the_host() {
    roadwarriors("psk", peer(), subject());
}

/// Alice and bob, each behind a router; sun hands to bob what comes for IKE.
fn double(alice_is: Daemon, bob_is: Daemon, bobs_net: &str, ping: &str) {
    let mut routers = Routers::new();
    let (alice, bob) = (
        routers.host("alice", "10.1.0.10"),
        routers.host("bob", "10.2.0.10"),
    );
    Routers::translate(&routers.moon, "1024-1100");
    Routers::translate(&routers.sun, "2000-2100");
    for port in ["500", "4500"] {
        iptables(
            &routers.sun,
            &format!(
                "-t nat -A PREROUTING -i u0 -p udp --dport {port} -j DNAT --to-destination \
                 10.2.0.10:{port}"
            ),
        );
    }
    bob.ip("addr add 10.3.0.1/32 dev lo");
    let lab = &routers.lab;
    let mut alice = node(lab, &alice, alice_is, HASTY);
    let mut bob = node(lab, &bob, bob_is, HASTY);
    start(&mut [&mut alice, &mut bob]);
    let children = [
        format!("local_ts = 10.1.0.10/32\n remote_ts = {bobs_net}"),
        format!("local_ts = {bobs_net}\n remote_ts = 10.1.0.10/32"),
    ];
    bob.configure(
        &Side {
            name: "nat-t",
            addresses: ["%any", "%any"],
            ids: [BOB, ALICE],
            auth: "psk",
            connection: "",
            children: &[("nat-t", &children[1])],
        }
        .conf(),
    );
    bob.load();
    alice.configure(
        &Side {
            name: "nat-t",
            addresses: ["%any", "192.0.2.2"],
            ids: [ALICE, BOB],
            auth: "psk",
            connection: "",
            children: &[("nat-t", &children[0])],
        }
        .conf(),
    );
    alice.load();

    alice.initiate("nat-t");

    lists(
        &alice,
        &[
            "nat-t {",
            "state=ESTABLISHED",
            "local-host=10.1.0.10",
            "local-port=4500",
            "remote-host=192.0.2.2",
            "remote-port=4500",
            "nat-local=yes",
            "nat-remote=yes",
            "child-sas {nat-t",
            "encap=yes",
            "local-ts=[10.1.0.10/32]",
            &format!("remote-ts=[{bobs_net}]"),
        ],
        5,
    );
    lists(
        &bob,
        &[
            "nat-t {",
            "state=ESTABLISHED",
            "local-host=10.2.0.10",
            "local-port=4500",
            "remote-host=192.0.2.1",
            "remote-port=10",
            "nat-local=yes",
            "nat-remote=yes",
            "child-sas {nat-t",
            "encap=yes",
        ],
        5,
    );
    assert_pings(&alice, "10.1.0.10", ping);
    assert_pings(&bob, ping, "10.1.0.10");
}

#[test]
fn double_nat() {
    double(subject(), peer(), "10.2.0.10/32", "10.2.0.10");
}

#[test]
fn double_nat_net_as_the_responder() {
    double(peer(), subject(), "10.3.0.0/16", "10.3.0.1");
}

/// A router that starts again gives a host another port: the tunnel follows.
fn mapping_changes(gateway_is: Daemon, alice_is: Daemon) {
    let mut routers = Routers::new();
    let alice = routers.host("alice", "10.1.0.10");
    Routers::translate(&routers.moon, "2001-2099");
    let lab = &routers.lab;
    let mut sun = node(lab, &routers.sun, gateway_is, HASTY);
    let mut alice = node(lab, &alice, alice_is, HASTY);
    start(&mut [&mut sun, &mut alice]);
    sun.configure(&gateway("psk").conf());
    sun.load();
    let child = [("nat-t", "local_ts = 10.1.0.10/32\n remote_ts = 10.2.0.0/16")];
    let side = Side {
        connection: "dpd_delay = 2s",
        ..host("psk", ALICE, &child)
    };
    alice.configure(&side.conf());
    alice.load();
    alice.initiate("nat-t");
    lists(&sun, &["nat-t {", "state=ESTABLISHED", "remote-port=20"], 5);
    let first = sun.sas()[0].1.text("initiator-spi").to_owned();

    // An address that goes takes its translations along; without it, nothing leaves untranslated.
    routers.moon.ip("addr del 192.0.2.1/24 dev u0");
    Routers::translate(&routers.moon, "3001-3099");
    routers.moon.ip("addr add 192.0.2.1/24 dev u0");
    let pings = Pings::start(&alice.namespace, "10.1.0.10", "10.2.0.1", 60);

    lists(
        &sun,
        &[
            "nat-t {",
            "state=ESTABLISHED",
            "remote-host=192.0.2.1",
            "remote-port=30",
            "nat-remote=yes",
            "child-sas {nat-t",
            "state=INSTALLED",
        ],
        10,
    );
    drop(pings);
    assert_reaches(&alice, "10.1.0.10", "10.2.0.1");
    assert_pings(&alice, "10.1.0.10", "10.2.0.1");
    assert_pings(&sun, "10.2.0.1", "10.1.0.10");
    let sas = sun.sas();
    assert_eq!(sas.len(), 1, "{sas:?}");
    assert_eq!(sas[0].1.text("initiator-spi"), first);
    let states = xfrm(&sun, "state");
    assert_eq!(states.len(), 2, "{states:#?}");
    assert!(
        states.iter().all(|state| state.contains("port 30")),
        "{states:#?}"
    );
}

#[test]
fn mobike_nat_mappings() {
    mapping_changes(subject(), peer());
}

#[test]
fn mobike_nat_mappings_as_the_host() {
    mapping_changes(peer(), subject());
}

/// Transport mode through a router that translates: to the gateway, the host is the router.
fn transport(gateway_is: Daemon, alice_is: Daemon) {
    let mut routers = Routers::new();
    let alice = routers.host("alice", "10.1.0.10");
    Routers::translate(&routers.moon, "1024-1100");
    let lab = &routers.lab;
    let mut sun = node(lab, &routers.sun, gateway_is, HASTY);
    let mut alice = node(lab, &alice, alice_is, HASTY);
    start(&mut [&mut sun, &mut alice]);
    let child = [("nat-t", "mode = transport")];
    sun.configure(
        &Side {
            children: &child,
            ..gateway("psk")
        }
        .conf(),
    );
    sun.load();
    alice.configure(&host("psk", ALICE, &child).conf());
    alice.load();

    alice.initiate("nat-t");

    for (node, own, port, other, by, nat) in [
        (&alice, "10.1.0.10", "4500", "192.0.2.2", "4500", "local"),
        (&sun, "192.0.2.2", "4500", "192.0.2.1", "10", "remote"),
    ] {
        lists(
            node,
            &[
                "nat-t {",
                "state=ESTABLISHED",
                &format!("local-host={own}"),
                &format!("local-port={port}"),
                &format!("remote-host={other}"),
                &format!("remote-port={by}"),
                &format!("nat-{nat}=yes"),
                "child-sas {nat-t",
                "state=INSTALLED",
                "mode=TRANSPORT",
                "encap=yes",
                &format!("local-ts=[{own}/32]"),
                &format!("remote-ts=[{other}/32]"),
            ],
            5,
        );
        let states = xfrm(node, "state");
        assert_eq!(states.len(), 2, "{states:#?}");
        assert!(
            states
                .iter()
                .all(|state| state.contains("mode transport")
                    && state.contains("encap type espinudp")),
            "{states:#?}"
        );
        assert_pings(node, own, other);
    }
}

#[test]
fn host2host_transport_nat() {
    transport(subject(), peer());
}

#[test]
fn host2host_transport_nat_as_the_host() {
    transport(peer(), subject());
}
