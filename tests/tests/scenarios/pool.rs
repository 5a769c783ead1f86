// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hosts that are given addresses. The gateway is charon: only it has pools.
//!
//! ```text
//!  carol 192.0.2.100 ---- wire ---- 192.0.2.1 moon 10.1.0.1, fd00:1::1 (lo)
//!  dave  192.0.2.200 ---- wire
//! ```

use swanherd_tests::{Daemon, Lab, Namespace, Node, peer, subject};

use crate::support::{
    HASTY, MOON, Side, assert_kernel_has, assert_pings, ike_spi, lists, lists_nothing, node, start,
};

const CAROL: &str = "carol.example.org";
const DAVE: &str = "dave.example.org";

/// Several hosts on one link.
pub(crate) fn wire(lab: &mut Lab, hosts: &[(&str, &str)]) -> Vec<Namespace> {
    let wire = lab.namespace("wire");
    wire.ip("link add wire type bridge");
    wire.ip("link set wire up");
    hosts
        .iter()
        .map(|(name, address)| {
            let host = lab.namespace(name);
            let dev = format!("to-{name}");
            lab.link((&host, "u0", &format!("{address}/24")), (&wire, &dev, ""));
            wire.ip(&format!("link set {dev} master wire"));
            host
        })
        .collect()
}

struct Hosts {
    carol: Node,
    dave: Node,
    moon: Node,
    _lab: Lab,
}

impl Hosts {
    /// What carol and dave ask for, and the gateway's file.
    fn with(vips: [&str; 2], remote_ts: &str, gateway: &str) -> Self {
        let mut lab = Lab::new();
        let hosts = wire(
            &mut lab,
            &[
                ("carol", "192.0.2.100"),
                ("dave", "192.0.2.200"),
                ("moon", "192.0.2.1"),
            ],
        );
        hosts[2].ip("addr add 10.1.0.1/32 dev lo");
        hosts[2].ip("addr add fd00:1::1/128 dev lo nodad");
        let mut carol = node(&lab, &hosts[0], subject(), HASTY);
        let mut dave = node(&lab, &hosts[1], peer(), HASTY);
        let mut moon = node(&lab, &hosts[2], Daemon::Charon, HASTY);
        start(&mut [&mut carol, &mut dave, &mut moon]);
        moon.configure(gateway);
        let _ = moon.swanctl(&["--load-all"]).expect_ok();
        let child = format!("local_ts = dynamic\n remote_ts = {remote_ts}");
        for (host, own, id, vips) in [
            (&carol, "192.0.2.100", CAROL, vips[0]),
            (&dave, "192.0.2.200", DAVE, vips[1]),
        ] {
            host.configure(
                &Side {
                    name: "home",
                    addresses: [own, "192.0.2.1"],
                    ids: [id, MOON],
                    auth: "psk",
                    connection: &format!("vips = {vips}"),
                    children: &[("home", &child)],
                }
                .conf(),
            );
            host.load();
            host.initiate("home");
        }
        Self {
            carol,
            dave,
            moon,
            _lab: lab,
        }
    }

    /// Asserts what a host was given, and that both ends say so.
    fn assert_given(&self, host: &Node, id: &str, given: &[&str], networks: &str) {
        let own: Vec<String> = given
            .iter()
            .map(|addr| format!("{addr}/{}", if addr.contains(':') { 128 } else { 32 }))
            .collect();
        let (vips, own) = (given.join(" "), own.join(" "));
        lists(
            host,
            &[
                "home {",
                "state=ESTABLISHED",
                &format!("local-id={id}"),
                "remote-id=moon.example.org",
                &format!("local-vips=[{vips}]"),
                "child-sas {home",
                "state=INSTALLED",
                "mode=TUNNEL",
                &format!("local-ts=[{own}]"),
                &format!("remote-ts=[{networks}]"),
            ],
            5,
        );
        lists(
            &self.moon,
            &[
                "state=ESTABLISHED",
                &format!("remote-id={id}"),
                &format!("remote-vips=[{vips}]"),
                "child-sas {",
                "state=INSTALLED",
                &format!("local-ts=[{networks}]"),
                &format!("remote-ts=[{own}]"),
            ],
            5,
        );
        for addr in given {
            assert_eq!(has(host, addr), 1, "{addr}");
            let far = if addr.contains(':') {
                "fd00:1::1"
            } else {
                "10.1.0.1"
            };
            assert_pings(host, addr, far);
            assert_pings(&self.moon, far, addr);
        }
    }

    /// Both leave, and have what they had before.
    fn leave(&self) {
        for host in [&self.carol, &self.dave] {
            let _ = host
                .swanctl(&["--terminate", "--ike", "home", "--timeout", "5"])
                .expect_ok();
            lists_nothing(host, 5);
            host.wait_until("that the address has gone", 5, |node| {
                has(node, "10.3.0.") + has(node, "10.4.0.") + has(node, "fd00:3:") == 0
            });
            assert_kernel_has(host, 0, 0);
            let routes = host.namespace.ip("route show table 220 type unicast");
            assert_eq!(routes.trim(), "", "{}", host.log());
        }
    }
}

/// How often an address is among those of a host.
fn has(node: &Node, address: &str) -> usize {
    node.namespace
        .ip("-o addr show")
        .matches(&format!(" {address}"))
        .count()
}

/// The gateway's end.
fn gateway<'a>(connection: &'a str, peer: &'a str, children: &'a [(&'a str, &'a str)]) -> Side<'a> {
    Side {
        name: "rw",
        addresses: ["192.0.2.1", "%any"],
        ids: [MOON, peer],
        auth: "psk",
        connection,
        children,
    }
}

#[test]
fn ip_pool() {
    let child = [("net", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")];
    let moon = gateway("pools = rw_pool", "*.example.org", &child)
        .with("pools {\n rw_pool {\n addrs = 10.3.0.0/28\n }\n}\n");
    let hosts = Hosts::with(["0.0.0.0", "0.0.0.0"], "10.1.0.0/16", &moon);

    hosts.assert_given(&hosts.carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
    hosts.assert_given(&hosts.dave, DAVE, &["10.3.0.2"], "10.1.0.0/16");

    let pools = hosts.moon.swanctl(&["--list-pools"]).expect_ok();
    assert!(pools.contains("2 / 0 / 14"), "{pools}");
    hosts.leave();
    // Whose it was has it again.
    hosts.carol.initiate("home");
    hosts.assert_given(&hosts.carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
}

/// Whatever hosts wish for, they take what they get.
#[test]
fn ip_pool_wish() {
    let child = [("net", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")];
    let moon = gateway("pools = rw_pool", "*.example.org", &child)
        .with("pools {\n rw_pool {\n addrs = 10.3.0.0/28\n }\n}\n");
    let hosts = Hosts::with(["10.3.0.10", "10.3.0.20"], "10.1.0.0/16", &moon);

    hosts.assert_given(&hosts.carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
    hosts.assert_given(&hosts.dave, DAVE, &["10.3.0.2"], "10.1.0.0/16");

    hosts.leave();
}

/// A pool for each of the hosts.
#[test]
fn ip_two_pools() {
    let child = [("net", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")];
    let of_dave = Side {
        name: "rw-dave",
        ..gateway("pools = pool_2", DAVE, &child)
    };
    let moon = [
        gateway("pools = pool_1", CAROL, &child).conf(),
        of_dave.with(
            "pools {\n pool_1 {\n addrs = 10.3.0.0/28\n }\n pool_2 {\n addrs = 10.4.0.0/28\n }\n}\n",
        ),
    ];
    let hosts = Hosts::with(["0.0.0.0", "0.0.0.0"], "10.1.0.0/16", &moon.concat());

    hosts.assert_given(&hosts.carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
    hosts.assert_given(&hosts.dave, DAVE, &["10.4.0.1"], "10.1.0.0/16");

    hosts.leave();
}

/// An address of each IP version, in one child.
#[test]
fn ip_two_pools_v4v6() {
    let networks = "10.1.0.0/16, fd00:1::/64";
    let settings = format!("local_ts = {networks}\n remote_ts = dynamic");
    let child = [("net", settings.as_str())];
    let moon = gateway("pools = pool_v4, pool_v6", "*.example.org", &child).with(
        "pools {\n pool_v4 {\n addrs = 10.3.0.0/28\n }\n pool_v6 {\n addrs = fd00:3::/120\n }\n}\n",
    );
    let hosts = Hosts::with(["0.0.0.0, ::", "::, 0.0.0.0"], networks, &moon);

    let networks = networks.replace(',', "");
    let given = ["10.3.0.1", "fd00:3::1"];
    hosts.assert_given(&hosts.carol, CAROL, &given, &networks);

    hosts.leave();
}

/// The new IKE SA asks for the address that the old one had, and it is there all the time.
#[test]
fn reauth_mbb_virtual_ip() {
    let child = [("net", "local_ts = 10.1.0.0/16\n remote_ts = dynamic")];
    let moon = gateway("pools = rw_pool", "*.example.org", &child)
        .with("pools {\n rw_pool {\n addrs = 10.3.0.0/28\n }\n}\n");
    let hosts = Hosts::with(["0.0.0.0", "0.0.0.0"], "10.1.0.0/16", &moon);
    let carol = &hosts.carol;
    hosts.assert_given(carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
    let first = ike_spi(carol);

    let _ = carol
        .swanctl(&["--rekey", "--ike", "home", "--reauth"])
        .expect_ok();

    carol.wait_until("the new IKE SA alone", 10, |node| {
        let sas = node.sas();
        sas.len() == 1
            && sas[0].1.text("initiator-spi") != first
            && sas[0].1.text("state") == "ESTABLISHED"
    });
    hosts.assert_given(carol, CAROL, &["10.3.0.1"], "10.1.0.0/16");
    assert_kernel_has(carol, 2, 3);
    hosts.leave();
}
