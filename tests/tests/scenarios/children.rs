// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How children are agreed on: after the IKE SA instead of with it, and for some protocols alone.

use swanherd_tests::{Daemon, Lab, Node, peer, subject};

use crate::support::{
    HASTY, MOON, Nets, Side, assert_kernel_has, assert_pings, lists, lists_nothing, node, start,
};

/// The first child has a key exchange of its own: it was not made together with the IKE SA.
const APART: [&str; 7] = [
    "gw-gw {",
    "state=ESTABLISHED",
    "child-sas {net-net",
    "state=INSTALLED",
    "dh-group=CURVE_25519",
    "local-ts=[10.",
    "remote-ts=[10.",
];

#[test]
fn net2net_childless() {
    let nets = Nets::with(HASTY, ["childless = force", ""], ["", ""]);

    nets.moon.initiate("net-net");

    for node in [&nets.moon, &nets.sun] {
        lists(node, &APART, 5);
        assert_eq!(node.sas().len(), 1);
        assert_kernel_has(node, 2, 3);
    }
    nets.assert_traffic_passes();
}

#[test]
fn net2net_childless_as_the_responder() {
    let nets = Nets::with(HASTY, ["childless = force", "childless = force"], ["", ""]);

    nets.sun.initiate("net-net");

    for node in [&nets.moon, &nets.sun] {
        lists(node, &APART, 5);
        assert_kernel_has(node, 2, 3);
    }
    nets.assert_traffic_passes();
}

/// Of two who do not want the same, neither is left with half of it.
#[test]
fn net2net_childless_that_only_one_wants() {
    let settings = format!("{HASTY}  half_open_timeout = 2\n");
    let sides = ["childless = force", "childless = never"];
    let nets = Nets::with(&settings, sides, ["", ""]);
    for node in [&nets.moon, &nets.sun] {
        let refused = node.swanctl(&["--initiate", "--child", "net-net", "--timeout", "5"]);
        assert!(!refused.ok(), "{refused}");
        for node in [&nets.moon, &nets.sun] {
            // Who was called and left may learn it from silence alone.
            lists_nothing(node, 10);
            assert_kernel_has(node, 0, 0);
        }
    }
}

/// A host and a gateway with the networks of the scenarios about protocols.
struct Host {
    carol: Node,
    moon: Node,
    _lab: Lab,
}

impl Host {
    /// Children by name: what the host and what the gateway has at its end of each.
    fn with(carol_is: Daemon, moon_is: Daemon, children: &[(&str, &str, &str)]) -> Self {
        let mut lab = Lab::new();
        let (carol, moon) = (lab.namespace("carol"), lab.namespace("moon"));
        lab.link(
            (&carol, "u0", "192.0.2.100/24"),
            (&moon, "u0", "192.0.2.1/24"),
        );
        moon.ip("addr add 10.1.0.1/32 dev lo");
        carol.ip("route add 10.1.0.0/16 via 192.0.2.1");
        let mut carol = node(&lab, &carol, carol_is, HASTY);
        let mut moon = node(&lab, &moon, moon_is, HASTY);
        start(&mut [&mut moon, &mut carol]);
        let settings: Vec<[String; 2]> = children
            .iter()
            .map(|(_, host, gateway)| {
                [
                    format!("local_ts = dynamic{host}\n remote_ts = 10.1.0.0/16{gateway}"),
                    format!("local_ts = 10.1.0.0/16{gateway}\n remote_ts = dynamic{host}"),
                ]
            })
            .collect();
        for (node, side, addresses, ids) in [
            (&moon, 1, ["192.0.2.1", "%any"], [MOON, "*.example.org"]),
            (
                &carol,
                0,
                ["192.0.2.100", "192.0.2.1"],
                ["carol.example.org", MOON],
            ),
        ] {
            let children: Vec<(&str, &str)> = children
                .iter()
                .zip(&settings)
                .map(|((name, ..), settings)| (*name, settings[side].as_str()))
                .collect();
            let side = Side {
                name: "rw",
                addresses,
                ids,
                auth: "psk",
                connection: "",
                children: &children,
            };
            node.configure(&side.conf());
            node.load();
        }
        for (name, ..) in children {
            carol.initiate(name);
        }
        let host = Self {
            carol,
            moon,
            _lab: lab,
        };
        for (node, [own, other]) in [
            (&host.carol, ["192.0.2.100/32", "10.1.0.0/16"]),
            (&host.moon, ["10.1.0.0/16", "192.0.2.100/32"]),
        ] {
            for (name, at_host, at_gateway) in children {
                // Type 8, code 0.
                let [at_host, at_gateway] =
                    [at_host, at_gateway].map(|of| of.replace("/2048", "/8"));
                let [at_own, at_other] = if own.starts_with("10.1.") {
                    [at_gateway, at_host]
                } else {
                    [at_host, at_gateway]
                };
                lists(
                    node,
                    &[
                        "rw {",
                        "state=ESTABLISHED",
                        "child-sas {",
                        &format!("{name}-"),
                        "state=INSTALLED",
                        "mode=TUNNEL",
                        &format!("local-ts=[{own}{at_own}]"),
                        &format!("remote-ts=[{other}{at_other}]"),
                    ],
                    5,
                );
            }
            assert_eq!(node.sas().len(), 1, "{}", node.log());
            assert_kernel_has(node, 2 * children.len(), 3 * children.len());
        }
        host
    }

    /// Connects from the host to a port of the gateway, where nothing listens: the answer says so.
    fn connect(&self, port: u16) {
        let connect = format!("exec 3<>/dev/tcp/10.1.0.1/{port}");
        let tried = self
            .carol
            .namespace
            .run("timeout", ["5", "bash", "-c", &connect]);
        assert!(
            tried.stderr.contains("Connection refused"),
            "{tried}\n{}",
            self.carol.log()
        );
    }

    /// Packets that the host has received and sent by a child.
    fn packets(&self, name: &str) -> [u64; 2] {
        let children = self.carol.children("INSTALLED");
        let child = children.iter().find(|child| child.text("name") == name);
        let child = child.expect("it is installed");
        ["packets-in", "packets-out"].map(|key| child.number(key))
    }
}

fn one_for_each_protocol(carol_is: Daemon, moon_is: Daemon) {
    let host = Host::with(
        carol_is,
        moon_is,
        &[("icmp", "[icmp]", "[icmp]"), ("ssh", "[tcp]", "[tcp/ssh]")],
    );

    assert_pings(&host.carol, "192.0.2.100", "10.1.0.1");
    assert_eq!(host.packets("icmp"), [3, 3]);
    assert_eq!(host.packets("ssh"), [0, 0]);
    host.connect(22);
    assert_eq!(host.packets("icmp"), [3, 3]);
    assert_eq!(host.packets("ssh"), [1, 1]);
    // What is for neither goes past both.
    host.connect(80);
    assert_eq!(host.packets("ssh"), [1, 1]);
}

#[test]
fn protoport_dual() {
    one_for_each_protocol(subject(), peer());
}

#[test]
fn protoport_dual_as_the_responder() {
    one_for_each_protocol(peer(), subject());
}

fn types_and_ranges(carol_is: Daemon, moon_is: Daemon) {
    let host = Host::with(
        carol_is,
        moon_is,
        &[
            ("icmp-req", "[icmp/2048]", "[icmp/2048]"),
            ("icmp-rep", "[icmp/0]", "[icmp/0]"),
            ("ftp-ssh", "[tcp/32768-65535]", "[tcp/21-22]"),
        ],
    );

    assert_pings(&host.carol, "192.0.2.100", "10.1.0.1");
    // Requests go by one, answers come by the other.
    assert_eq!(host.packets("icmp-req"), [0, 3]);
    assert_eq!(host.packets("icmp-rep"), [3, 0]);
    assert_pings(&host.moon, "10.1.0.1", "192.0.2.100");
    assert_eq!(host.packets("icmp-req"), [3, 3]);
    assert_eq!(host.packets("icmp-rep"), [3, 3]);
    host.connect(21);
    host.connect(22);
    assert_eq!(host.packets("ftp-ssh"), [2, 2]);
}

#[test]
fn protoport_range() {
    types_and_ranges(subject(), peer());
}

#[test]
fn protoport_range_as_the_responder() {
    types_and_ranges(peer(), subject());
}
