// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tunnels with the same selectors, which marks tell apart.

use swanherd_tests::{Daemon, Namespace, Node, Pings, peer, subject};

use crate::nat::{Routers, host};
use crate::support::{
    ALICE, HASTY, NET, NET_BACK, Nets, SUN, Side, VENUS, assert_pings, iptables, lists, node,
    start, xfrm,
};

/// Two hosts behind one address who both have the network 10.1.0.0/25. The gateway marks what comes
/// by the port that it comes from, and shows each under another address to those behind it.
fn marked_roadwarriors(gateway_is: Daemon, alice_is: Daemon) {
    let mut routers = Routers::new();
    let (alice, venus) = (
        routers.host("alice", "10.1.0.10"),
        routers.host("venus", "10.1.0.20"),
    );
    let bob = routers.host("bob", "10.2.0.10");
    for (own, ports) in [("10.1.0.10", "1024-1100"), ("10.1.0.20", "2024-2100")] {
        iptables(
            &routers.moon,
            &format!(
                "-t nat -A POSTROUTING -o u0 -s {own} -p udp -j MASQUERADE --to-ports {ports}"
            ),
        );
    }
    for (mark, ports, real, shown) in [
        ("10", "1024:1100", "10.1.0.10", "10.3.0.10"),
        ("20", "2024:2100", "10.1.0.20", "10.3.0.20"),
    ] {
        for rule in [
            format!(
                "-t mangle -A PREROUTING -i u0 -p udp -s 192.0.2.1 --sport {ports} -j MARK \
                 --set-mark {mark}"
            ),
            format!("-t mangle -A PREROUTING -i lan -d {shown} -j MARK --set-mark {mark}"),
            format!("-t nat -A PREROUTING -i lan -d {shown} -j DNAT --to-destination {real}"),
            format!(
                "-t nat -A POSTROUTING -o lan -m mark --mark {mark} -j SNAT --to-source {shown}"
            ),
        ] {
            iptables(&routers.sun, &rule);
        }
    }
    let lab = &routers.lab;
    let mut sun = node(lab, &routers.sun, gateway_is, HASTY);
    let mut alice = node(lab, &alice, alice_is, HASTY);
    let mut venus = node(lab, &venus, peer(), HASTY);
    start(&mut [&mut sun, &mut alice, &mut venus]);
    let of_gateway = |name: &'static str, id: &'static str, mark: u32| {
        let child = format!(
            "local_ts = 10.2.0.0/16\n remote_ts = 10.1.0.0/25\n mark_in = {mark}\n mark_out = {mark}"
        );
        Side {
            name,
            addresses: ["192.0.2.2", "%any"],
            ids: [SUN, id],
            auth: "psk",
            connection: "",
            children: &[(name, &child)],
        }
        .conf()
    };
    sun.configure(
        &[
            of_gateway("alice", ALICE, 10),
            of_gateway("venus", VENUS, 20),
        ]
        .concat(),
    );
    sun.load();
    for (node, id) in [(&alice, ALICE), (&venus, VENUS)] {
        let child = "local_ts = 10.1.0.0/25\n remote_ts = 10.2.0.0/16";
        node.configure(&host("psk", id, &[("nat-t", child)]).conf());
        node.load();
        node.initiate("nat-t");
        lists(
            node,
            &[
                "nat-t {",
                "state=ESTABLISHED",
                &format!("local-id={id}"),
                "nat-local=yes",
                "child-sas {nat-t",
                "state=INSTALLED",
                "mode=TUNNEL",
                "encap=yes",
                "local-ts=[10.1.0.0/25]",
                "remote-ts=[10.2.0.0/16]",
            ],
            5,
        );
    }

    for (name, port, id, mark) in [
        ("alice", "10", ALICE, "0000000a"),
        ("venus", "20", VENUS, "00000014"),
    ] {
        lists(
            &sun,
            &[
                &format!("{name} {{"),
                "state=ESTABLISHED",
                "remote-host=192.0.2.1",
                &format!("remote-port={port}"),
                &format!("remote-id={id}"),
                "nat-remote=yes",
                &format!("child-sas {{{name}"),
                "state=INSTALLED",
                "encap=yes",
                &format!("mark-in={mark}"),
                &format!("mark-out={mark}"),
                "local-ts=[10.2.0.0/16]",
                "remote-ts=[10.1.0.0/25]",
            ],
            5,
        );
    }
    assert_marked(&sun, ["0xa/0xffffffff", "0x14/0xffffffff"]);
    for (node, own, shown) in [
        (&alice, "10.1.0.10", "10.3.0.10"),
        (&venus, "10.1.0.20", "10.3.0.20"),
    ] {
        assert_pings(node, own, "10.2.0.10");
        assert_answers(&bob, "10.2.0.10", shown, &sun);
    }
}

/// Asserts that policies of each mark are in force, and one outbound state.
fn assert_marked(node: &Node, marks: [&str; 2]) {
    let (states, policies) = (xfrm(node, "state"), xfrm(node, "policy"));
    for mark in marks {
        let mark = format!("mark {mark}");
        let count = |list: &[String]| list.iter().filter(|entry| entry.contains(&mark)).count();
        assert_eq!(
            [count(&states), count(&policies)],
            [1, 3],
            "{mark}: {states:#?} {policies:#?}"
        );
    }
}

fn assert_answers(from: &Namespace, own: &str, to: &str, gateway: &Node) {
    let report = Pings::start(from, own, to, 3).finish();
    let seen = (report.sent, report.received);
    assert_eq!(seen, (3, 3), "{}\n{}", report.text, gateway.log());
}

#[test]
fn nat_rw_mark() {
    marked_roadwarriors(subject(), peer());
}

#[test]
fn nat_rw_mark_as_the_host() {
    marked_roadwarriors(peer(), subject());
}

/// One tunnel for what may wait and one for what may not, by the traffic class of packets.
#[test]
fn net2net_dscp() {
    let nets = Nets::start(HASTY);
    for (node, alice, venus) in [
        (&nets.moon, "10.1.0.10", "10.1.0.20"),
        (&nets.sun, "10.2.0.10", "10.2.0.20"),
    ] {
        for address in [alice, venus] {
            node.namespace.ip(&format!("addr add {address}/32 dev lo"));
        }
        let class = format!("-t mangle -A OUTPUT -s {venus} -j DSCP --set-dscp-class EF");
        iptables(&node.namespace, &class);
        for (class, mark) in [("BE", "10"), ("EF", "20")] {
            for chain in ["OUTPUT -d 10.0.0.0/8", "PREROUTING -i u0"] {
                let rule = format!(
                    "-t mangle -A {chain} -m dscp --dscp-class {class} -j MARK --set-mark {mark}"
                );
                iptables(&node.namespace, &rule);
            }
        }
    }
    let conf = |addresses: [&'static str; 2], sides: [&str; 2], net: &str| {
        let of_class = |name: &str, mark: u32| {
            let ids = sides.map(|side| format!("{name}.{side}.example.org"));
            let child = format!("{net}\n mark_in = {mark}\n mark_out = {mark}");
            Side {
                name,
                addresses,
                ids: [&ids[0], &ids[1]],
                auth: "psk",
                connection: "",
                children: &[(name, &child)],
            }
            .conf()
        };
        [of_class("dscp-be", 10), of_class("dscp-ef", 20)].concat()
    };
    let outer = ["192.0.2.1", "192.0.2.2"];
    nets.sun
        .configure(&conf([outer[1], outer[0]], ["sun", "moon"], NET_BACK));
    nets.sun.load();
    nets.moon.configure(&conf(outer, ["moon", "sun"], NET));
    nets.moon.load();
    for name in ["dscp-be", "dscp-ef"] {
        nets.moon.initiate(name);
    }

    for (node, own, other) in [(&nets.moon, "moon", "sun"), (&nets.sun, "sun", "moon")] {
        for (name, mark) in [("dscp-be", "0000000a"), ("dscp-ef", "00000014")] {
            lists(
                node,
                &[
                    &format!("{name} {{"),
                    "state=ESTABLISHED",
                    &format!("local-id={name}.{own}.example.org"),
                    &format!("remote-id={name}.{other}.example.org"),
                    &format!("child-sas {{{name}"),
                    "state=INSTALLED",
                    &format!("mark-in={mark}"),
                    &format!("mark-out={mark}"),
                ],
                5,
            );
        }
        assert_marked(node, ["0xa/0xffffffff", "0x14/0xffffffff"]);
    }

    // Which one packets take is up to their class, both ways.
    for (host, taken) in [("10", "dscp-be"), ("20", "dscp-ef")] {
        let before = packets(&nets);
        let [from, to] = ["10.1.0.", "10.2.0."].map(|net| format!("{net}{host}"));
        assert_pings(&nets.moon, &from, &to);
        let after = packets(&nets);
        for (name, [was, is]) in ["dscp-be", "dscp-ef"]
            .iter()
            .zip([[before[0], after[0]], [before[1], after[1]]])
        {
            let more = if *name == taken { 3 } else { 0 };
            assert_eq!([was[0] + more, was[1] + more], is, "{host}: {name}");
        }
    }
}

/// Packets that moon has received and sent in each tunnel.
fn packets(nets: &Nets) -> [[u64; 2]; 2] {
    let sas = nets.moon.sas();
    ["dscp-be", "dscp-ef"].map(|name| {
        let (_, sa) = sas.iter().find(|(of, _)| of == name).expect("it is up");
        let children = sa.sections("child-sas");
        let (_, child) = children.first().expect("it has its child");
        ["packets-in", "packets-out"].map(|key| child.number(key))
    })
}
