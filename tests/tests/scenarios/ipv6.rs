// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IPv6 outside, inside, or both.

use swanherd_tests::{Daemon, Lab, peer, subject};

use crate::support::{HASTY, MOON, SUN, Side, assert_pings, lists, node, start, xfrm};

/// What carries the tunnel, and what the tunnel carries: addresses with prefix, and networks.
struct Addresses {
    outer: [&'static str; 2],
    inner: [&'static str; 2],
    networks: [&'static str; 2],
}

const OUTER_4: [&str; 2] = ["192.0.2.1/24", "192.0.2.2/24"];
const OUTER_6: [&str; 2] = ["2001:db8::1/64", "2001:db8::2/64"];

const V6_IN_V6: Addresses = Addresses {
    outer: OUTER_6,
    inner: ["2001:db8:1::1/128", "2001:db8:2::1/128"],
    networks: ["2001:db8:1::/64", "2001:db8:2::/64"],
};
const V4_IN_V6: Addresses = Addresses {
    outer: OUTER_6,
    inner: ["10.1.0.1/32", "10.2.0.1/32"],
    networks: ["10.1.0.0/16", "10.2.0.0/16"],
};
const V6_IN_V4: Addresses = Addresses {
    outer: OUTER_4,
    ..V6_IN_V6
};
const HOSTS: Addresses = Addresses {
    outer: OUTER_6,
    inner: OUTER_6,
    networks: ["2001:db8::1/128", "2001:db8::2/128"],
};

fn address(text: &str) -> &str {
    text.split('/').next().unwrap_or(text)
}

/// Both sides, one of which initiates, with pings in both directions.
fn established(addresses: &Addresses, child: &str, initiator: Daemon) {
    let Addresses {
        outer,
        inner,
        networks,
    } = addresses;
    let mut lab = Lab::new();
    let moon = lab.namespace("moon");
    let sun = lab.namespace("sun");
    lab.link((&moon, "u0", ""), (&sun, "u0", ""));
    for (namespace, outer, inner) in [(&moon, outer[0], inner[0]), (&sun, outer[1], inner[1])] {
        for (address, dev) in [(outer, "u0"), (inner, "lo")] {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            if dev == "u0" || address != outer {
                namespace.ip(&format!("addr add {address} dev {dev}{nodad}"));
            }
        }
    }
    let mut moon = node(&lab, &moon, subject(), HASTY);
    let mut sun = node(&lab, &sun, peer(), HASTY);
    start(&mut [&mut moon, &mut sun]);
    let own = outer.map(address);
    for (node, [here, there], ids) in [(&sun, [1, 0], [SUN, MOON]), (&moon, [0, 1], [MOON, SUN])] {
        let settings = format!(
            "local_ts = {}\n remote_ts = {}\n {child}",
            networks[here], networks[there]
        );
        node.configure(
            &Side {
                name: "gw-gw",
                addresses: [own[here], own[there]],
                ids,
                auth: "psk",
                connection: "",
                children: &[("net-net", &settings)],
            }
            .conf(),
        );
        node.load();
    }

    let first = if initiator == subject() { &moon } else { &sun };
    first.initiate("net-net");

    let mode = if child.contains("transport") {
        "mode=TRANSPORT"
    } else {
        "mode=TUNNEL"
    };
    for (node, [here, there]) in [(&moon, [0, 1]), (&sun, [1, 0])] {
        lists(
            node,
            &[
                "gw-gw {",
                "state=ESTABLISHED",
                &format!("local-host={}", own[here]),
                &format!("remote-host={}", own[there]),
                "child-sas {net-net",
                "state=INSTALLED",
                mode,
                "protocol=ESP",
                &format!("local-ts=[{}]", networks[here]),
                &format!("remote-ts=[{}]", networks[there]),
            ],
            5,
        );
        assert_eq!(xfrm(node, "state").len(), 2, "{}", node.log());
        assert_pings(node, address(inner[here]), address(inner[there]));
    }
}

#[test]
fn net2net_ikev2() {
    established(&V6_IN_V6, "", subject());
}

#[test]
fn net2net_ip4_in_ip6_ikev2() {
    established(&V4_IN_V6, "", subject());
}

#[test]
fn net2net_ip6_in_ip4_ikev2() {
    established(&V6_IN_V4, "", subject());
}

#[test]
fn host2host_ikev2() {
    established(&HOSTS, "", subject());
}

#[test]
fn transport_ikev2() {
    established(&HOSTS, "mode = transport", peer());
}
