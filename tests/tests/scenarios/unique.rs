// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Peers that come again while their last IKE SA is there.

use swanherd_tests::{Lab, Node, peer, subject};

use crate::support::{HASTY, Side, assert_pings, lists, node, start};

/// A gateway for whoever comes, and two hosts who say that they are carol.
struct Hosts {
    moon: Node,
    carol: Node,
    dave: Node,
    _lab: Lab,
}

impl Hosts {
    fn with(policy: &str) -> Self {
        Self::with_those(policy, policy)
    }

    /// Policies of the gateway and of the hosts, who say that this is their first contact unless
    /// they never care.
    fn with_those(policy: &str, hosts: &str) -> Self {
        let mut lab = Lab::new();
        let moon = lab.namespace("moon");
        let carol = lab.namespace("carol");
        let dave = lab.namespace("dave");
        lab.link(
            (&moon, "u0", "192.0.2.1/24"),
            (&carol, "u0", "192.0.2.100/24"),
        );
        lab.link(
            (&moon, "u1", "198.51.100.1/24"),
            (&dave, "u0", "198.51.100.200/24"),
        );
        moon.ip("addr add 10.1.0.1/32 dev lo");
        carol.ip("route add 10.1.0.0/16 via 192.0.2.1");
        dave.ip("route add 10.1.0.0/16 via 198.51.100.1");
        let mut moon = node(&lab, &moon, subject(), HASTY);
        let mut carol = node(&lab, &carol, peer(), HASTY);
        let mut dave = node(&lab, &dave, peer(), HASTY);
        start(&mut [&mut moon, &mut carol, &mut dave]);
        let [unique, of_hosts] = [policy, hosts].map(|policy| format!("unique = {policy}"));
        moon.configure(
            &Side {
                name: "moon",
                addresses: ["192.0.2.1, 198.51.100.1", "%any"],
                ids: ["moon.example.org", "carol.example.org"],
                auth: "psk",
                connection: &unique,
                children: &[("moon", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")],
            }
            .conf(),
        );
        moon.load();
        for (host, own, gateway) in [
            (&carol, "192.0.2.100", "192.0.2.1"),
            (&dave, "198.51.100.200", "198.51.100.1"),
        ] {
            host.configure(
                &Side {
                    name: "moon",
                    addresses: [own, gateway],
                    ids: ["carol.example.org", "moon.example.org"],
                    auth: "psk",
                    connection: &of_hosts,
                    children: &[("moon", "local_ts = dynamic\n remote_ts = 10.1.0.0/16")],
                }
                .conf(),
            );
            host.load();
        }
        Self {
            moon,
            carol,
            dave,
            _lab: lab,
        }
    }

    fn remotes(&self) -> Vec<String> {
        let mut remotes: Vec<String> = self
            .moon
            .sas()
            .iter()
            .map(|(_, sa)| sa.text("remote-host").to_owned())
            .collect();
        remotes.sort();
        remotes
    }

    fn await_remotes(&self, expected: &[&str]) {
        self.moon
            .wait_until(&format!("{expected:?}"), 10, |_| self.remotes() == expected);
    }
}

/// Whoever comes last with an identity has it: the address is nothing that the gateway knew.
#[test]
fn dynamic_initiator() {
    let hosts = Hosts::with("replace");
    hosts.carol.initiate("moon");
    assert_pings(&hosts.carol, "192.0.2.100", "10.1.0.1");

    hosts.dave.initiate("moon");

    hosts.await_remotes(&["198.51.100.200"]);
    lists(
        &hosts.moon,
        &[
            "moon {",
            "state=ESTABLISHED",
            "local-id=moon.example.org",
            "remote-host=198.51.100.200",
            "remote-id=carol.example.org",
            "child-sas {moon",
            "state=INSTALLED",
            "local-ts=[10.1.0.0/16]",
            "remote-ts=[198.51.100.200/32]",
        ],
        5,
    );
    assert_pings(&hosts.dave, "198.51.100.200", "10.1.0.1");
}

#[test]
fn unique_never() {
    let hosts = Hosts::with("never");
    hosts.carol.initiate("moon");
    hosts.dave.initiate("moon");

    hosts.await_remotes(&["192.0.2.100", "198.51.100.200"]);
    assert_pings(&hosts.carol, "192.0.2.100", "10.1.0.1");
    assert_pings(&hosts.dave, "198.51.100.200", "10.1.0.1");
    assert_eq!(hosts.remotes().len(), 2);
}

/// Who is there stays, and the other one is refused, unless it says that there is no other one.
#[test]
fn unique_keep() {
    let hosts = Hosts::with_those("keep", "never");
    hosts.carol.initiate("moon");

    let output = hosts
        .dave
        .swanctl(&["--initiate", "--child", "moon", "--timeout", "10"]);

    assert!(!output.ok(), "{output}");
    hosts.await_remotes(&["192.0.2.100"]);
    assert_pings(&hosts.carol, "192.0.2.100", "10.1.0.1");
}

/// A host that has lost its memory says that this is its first contact.
#[test]
fn unique_no_and_initial_contact() {
    let mut hosts = Hosts::with("no");
    hosts.carol.initiate("moon");
    let first = hosts.moon.sas()[0].1.text("initiator-spi").to_owned();

    hosts.carol.kill();
    hosts.carol.start();
    hosts.carol.load();
    hosts.carol.initiate("moon");

    hosts.moon.wait_until("only the new SA", 10, |node| {
        let sas = node.sas();
        sas.len() == 1 && sas[0].1.text("initiator-spi") != first
    });
    assert_pings(&hosts.carol, "192.0.2.100", "10.1.0.1");
}
