// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What carries IKE and ESP.

use swanherd_tests::{Daemon, Lab, Namespace, Pki, peer, subject};

use crate::support::{
    HASTY, MOON, NET, NET_BACK, Nets, SUN, Side, assert_pings, lists, node, start, xfrm,
};

#[test]
fn force_udp_encap() {
    let nets = Nets::with(HASTY, ["encap = yes", ""], ["", ""]);

    nets.moon.initiate("net-net");

    for (node, own, other) in [
        (&nets.moon, "192.0.2.1", "192.0.2.2"),
        (&nets.sun, "192.0.2.2", "192.0.2.1"),
    ] {
        lists(
            node,
            &[
                "gw-gw {",
                "state=ESTABLISHED",
                &format!("local-host={own}"),
                "local-port=4500",
                &format!("remote-host={other}"),
                "remote-port=4500",
                "nat-any=yes",
                "child-sas {net-net",
                "state=INSTALLED",
                "encap=yes",
            ],
            5,
        );
        let states = xfrm(node, "state");
        assert!(
            states
                .iter()
                .all(|state| state.contains("encap type espinudp sport 4500 dport 4500")),
            "{states:#?}"
        );
    }
    nets.assert_traffic_passes();
}

fn host_to_host(mode: &'static str, initiator: Daemon) {
    let nets = Nets::start(HASTY);
    let child = format!("mode = {mode}");
    let children = [("host-host", child.as_str())];
    let [moon, sun] = Nets::sides(["", ""], [&children, &children]);
    nets.sun.configure(&sun.conf());
    nets.sun.load();
    nets.moon.configure(&moon.conf());
    nets.moon.load();
    if initiator == subject() {
        nets.moon.initiate("host-host");
    } else {
        nets.sun.initiate("host-host");
    }

    for (node, own, other) in [
        (&nets.moon, "192.0.2.1", "192.0.2.2"),
        (&nets.sun, "192.0.2.2", "192.0.2.1"),
    ] {
        lists(
            node,
            &[
                "gw-gw {",
                "state=ESTABLISHED",
                &format!("local-host={own}"),
                &format!("remote-host={other}"),
                "child-sas {host-host",
                "state=INSTALLED",
                &format!("mode={}", mode.to_uppercase()),
                &format!("local-ts=[{own}/32]"),
                &format!("remote-ts=[{other}/32]"),
            ],
            5,
        );
        let states = xfrm(node, "state");
        assert!(
            states
                .iter()
                .all(|state| state.contains(&format!("mode {mode}"))),
            "{states:#?}"
        );
        assert_pings(node, own, other);
    }
}

#[test]
fn host2host_transport() {
    host_to_host("transport", subject());
}

#[test]
fn host2host_transport_as_the_responder() {
    host_to_host("transport", peer());
}

#[test]
fn host2host() {
    host_to_host("tunnel", subject());
}

/// Messages with certificates over a link that carries none of them whole: no packet is
/// fragmented, for that is IKE's own part.
fn fragments(
    addresses: [&str; 2],
    mtu: &str,
    settings: &str,
    children: [&str; 2],
    inner: [&str; 2],
) {
    let mut lab = Lab::new();
    let moon = lab.namespace("moon");
    let sun = lab.namespace("sun");
    let v6 = addresses[0].contains(':');
    let length = if v6 { 64 } else { 24 };
    lab.link((&moon, "u0", ""), (&sun, "u0", ""));
    for (namespace, own, inner) in [
        (&moon, addresses[0], inner[0]),
        (&sun, addresses[1], inner[1]),
    ] {
        let nodad = if v6 { " nodad" } else { "" };
        namespace.ip(&format!("link set u0 mtu {mtu}"));
        namespace.ip(&format!("addr add {own}/{length} dev u0{nodad}"));
        namespace.ip(&format!("addr add {inner} dev lo{nodad}"));
    }
    let settings = format!("{HASTY}{settings}");
    let mut moon = node(&lab, &moon, subject(), &settings);
    let mut sun = node(&lab, &sun, peer(), &settings);
    let pki = Pki::new(&lab.dir().join("pki"), "rsa", "3072");
    pki.issue(MOON, &moon.swanctl_dir());
    pki.issue(SUN, &sun.swanctl_dir());
    start(&mut [&mut moon, &mut sun]);
    for (node, [own, other], ids, child) in [
        (&sun, [addresses[1], addresses[0]], [SUN, MOON], children[1]),
        (&moon, addresses, [MOON, SUN], children[0]),
    ] {
        node.configure(
            &Side {
                name: "gw-gw",
                addresses: [own, other],
                ids,
                auth: "pubkey",
                connection: "",
                children: &[("net-net", child)],
            }
            .conf(),
        );
        node.load();
    }

    for initiator in [&moon, &sun] {
        initiator.initiate("net-net");
        for node in [&moon, &sun] {
            lists(
                node,
                &[
                    "gw-gw {",
                    "state=ESTABLISHED",
                    "child-sas {net-net",
                    "state=INSTALLED",
                ],
                5,
            );
        }
        let _ = initiator
            .swanctl(&["--terminate", "--ike", "gw-gw", "--timeout", "5"])
            .expect_ok();
    }

    for node in [&moon, &sun] {
        assert_eq!(fragmented(&node.namespace), 0, "{}", node.log());
    }
}

/// How many packets a namespace has fragmented or was asked to put together.
fn fragmented(namespace: &Namespace) -> u64 {
    let text = namespace.run("nstat", ["-asz"]).stdout;
    [
        "IpFragCreates",
        "IpReasmReqds",
        "Ip6FragCreates",
        "Ip6ReasmReqds",
    ]
    .iter()
    .map(|name| {
        text.lines()
            .filter_map(|line| line.strip_prefix(name))
            .find_map(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or_else(|| panic!("no {name} in {text}"))
    })
    .sum()
}

#[test]
fn frags_ipv4() {
    fragments(
        ["192.0.2.1", "192.0.2.2"],
        "700",
        "  fragment_size = 600\n",
        [NET, NET_BACK],
        ["10.1.0.1/32", "10.2.0.1/32"],
    );
}

#[test]
fn frags_ipv6() {
    fragments(
        ["2001:db8::1", "2001:db8::2"],
        "1280",
        "",
        [
            "local_ts = 2001:db8:1::/64\n remote_ts = 2001:db8:2::/64",
            "local_ts = 2001:db8:2::/64\n remote_ts = 2001:db8:1::/64",
        ],
        ["2001:db8:1::1/128", "2001:db8:2::1/128"],
    );
}
