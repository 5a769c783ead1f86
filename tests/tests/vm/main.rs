// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What needs a distribution's kernel: xfrm interfaces, transport mode under tunnel devices, and
//! the differences between old and new ones. `cargo xtask test --only vm` runs these under Debian's
//! kernels in an emulator, where programs run twenty times slower: few tests, ours at both ends
//! where the peer does not matter, and no tool where VICI does.

mod offload;

use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Lab, Message, Namespace, Node, Pings, Plane, subject, xfrm};

/// An end of a tunnel.
struct End<'a> {
    address: &'a str,
    id: &'a str,
}

/// A connection with PSK and fast algorithms.
fn connection(name: &str, own: &End<'_>, other: &End<'_>, children: &str) -> String {
    format!(
        "connections {{
  {name} {{
    version = 2
    local_addrs = {}
    remote_addrs = {}
    proposals = aes128gcm16-prfsha256-x25519
    local {{
      auth = psk
      id = {}
    }}
    remote {{
      auth = psk
      id = {}
    }}
    children {{
{children}
    }}
  }}
}}
",
        own.address, other.address, own.id, other.id
    )
}

const SECRETS: &str = "secrets {
  ike-1 {
    secret = \"a secret for the laboratory\"
  }
}
";

/// A daemon with its definitions loaded.
fn start(lab: &Lab, namespace: &Namespace, daemon: Daemon, definitions: &[String]) -> Node {
    let mut node = Node::new(lab, namespace, daemon, Plane::Kernel, "");
    node.configure(&(definitions.concat() + SECRETS));
    node.start();
    // Ours loads its definitions at its start.
    if daemon == Daemon::Charon {
        node.load();
    }
    node
}

/// Initiates by VICI, and waits for the child.
fn initiate(node: &Node, child: &str, other: &Node) {
    let arguments = Message::new(&[("child", child), ("timeout", "-1")]);
    let answer = node.vici().request("initiate", &arguments);
    assert!(
        answer.as_ref().is_ok_and(|m| m.text("success") != "no"),
        "{answer:?}\n{}",
        node.log()
    );
    let begun = Instant::now();
    while child_sa(node, child).is_none() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "no {child}\n{}\n--- peer\n{}",
            node.log(),
            other.log()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn child_sa(node: &Node, child: &str) -> Option<Message> {
    let mut installed = node.children("INSTALLED");
    installed.retain(|c| c.text("name") == child);
    installed.pop()
}

fn terminate(node: &Node, connection: &str) {
    let arguments = Message::new(&[("ike", connection), ("timeout", "15000")]);
    let answer = node.vici().request("terminate", &arguments);
    assert!(
        answer.as_ref().is_ok_and(|m| m.text("success") == "yes"),
        "{answer:?}\n{}",
        node.log()
    );
}

/// All that a daemon may leave in a namespace.
fn remains(namespace: &Namespace) -> Vec<String> {
    let mut all = [xfrm(namespace, "state"), xfrm(namespace, "policy")].concat();
    for what in [
        "-4 rule",
        "-6 rule",
        "-4 route show table all",
        "-6 route show table all",
        "addr show",
    ] {
        all.push(namespace.ip(what));
    }
    all
}

fn assert_pings(from: (&Node, &str), to: &str, other: &Node) {
    let report = Pings::start(&from.0.namespace, from.1, to, 5).finish();
    assert_eq!(
        (report.sent, report.received),
        (5, 5),
        "{}\n{}\n{}\n{}",
        report.text,
        remains(&from.0.namespace).join("\n"),
        from.0.log(),
        other.log()
    );
}

/// The packets that a child has carried, once they are `expected` in both directions.
fn assert_packets(node: &Node, child: &str, expected: u64) {
    node.wait_until(&format!("{expected} packets in {child}"), 20, |n| {
        child_sa(n, child)
            .is_some_and(|c| ["packets-in", "packets-out"].map(|k| c.number(k)) == [expected; 2])
    });
}

/// Asserts that the daemon finds nothing to mend.
fn assert_audit_is_clean(node: &Node) {
    let audit = node.swanherd(&["reconcile", "--dry-run", "--json"]);
    assert!(audit.ok(), "{audit}\n{}", node.log());
}

#[test]
fn interfaces_tell_two_peers_apart_that_both_have_every_address() {
    let mut lab = Lab::new();
    let [gateway, a, b] = ["gw", "a", "b"].map(|name| lab.namespace(name));
    lab.link((&gateway, "u0", "192.0.2.1/24"), (&a, "u0", "192.0.2.2/24"));
    lab.link(
        (&gateway, "u1", "198.51.100.1/24"),
        (&b, "u0", "198.51.100.2/24"),
    );
    let interface = |namespace: &Namespace, name: &str, id: u32, address: &str, route: &str| {
        namespace.ip(&format!("link add {name} type xfrm dev u0 if_id {id}"));
        namespace.ip(&format!("link set {name} up"));
        namespace.ip(&format!("addr add {address} dev {name}"));
        namespace.ip(&format!("route add {route} dev {name}"));
    };
    // One interface is there before the daemon, another comes when the child is up.
    interface(&gateway, "xa", 1, "10.9.1.1/30", "10.1.0.0/24");
    interface(&a, "x0", 7, "10.9.1.2/30", "10.100.0.0/24");
    interface(&b, "x0", 8, "10.9.2.2/30", "10.100.0.0/24");
    a.ip("addr add 10.1.0.1/32 dev lo");
    b.ip("addr add 10.2.0.1/32 dev lo");
    let child = |name: &str, id: u32| {
        format!(
            "      {name} {{
        local_ts = 0.0.0.0/0
        remote_ts = 0.0.0.0/0
        if_id_in = {id}
        if_id_out = {id}
        esp_proposals = aes128gcm16-x25519
      }}"
        )
    };
    let end = |address, id| End { address, id };
    let [gw_a, gw_b] = ["192.0.2.1", "198.51.100.1"].map(|address| end(address, "gw"));
    let [end_a, end_b] = [end("192.0.2.2", "a"), end("198.51.100.2", "b")];
    let before = remains(&gateway);
    let mut gw = start(
        &lab,
        &gateway,
        subject(),
        &[
            connection("to-a", &gw_a, &end_a, &child("a", 1)),
            connection("to-b", &gw_b, &end_b, &child("b", 2)),
        ],
    );
    let a = start(
        &lab,
        &a,
        Daemon::Swanherd,
        &[connection("to-gw", &end_a, &gw_a, &child("gw", 7))],
    );
    let b = start(
        &lab,
        &b,
        Daemon::Charon,
        &[connection("to-gw", &end_b, &gw_b, &child("gw", 8))],
    );

    initiate(&gw, "a", &a);
    initiate(&b, "gw", &gw);
    interface(&gateway, "xb", 2, "10.9.2.1/30", "10.2.0.0/24");

    assert_pings((&gw, "10.9.1.1"), "10.1.0.1", &a);
    assert_pings((&gw, "10.9.2.1"), "10.2.0.1", &b);
    assert_pings((&a, "10.1.0.1"), "10.9.1.1", &gw);
    assert_packets(&gw, "a", 10);
    assert_packets(&gw, "b", 5);
    let states = xfrm(&gateway, "state");
    for id in ["if_id 0x1", "if_id 0x2"] {
        let with_id = states.iter().filter(|s| s.contains(id)).count();
        assert_eq!(with_id, 2, "{states:#?}");
    }
    assert_eq!(xfrm(&gateway, "policy").len(), 6);
    let rules = gateway.ip("route show table all");
    assert!(!rules.contains("table 220"), "{rules}");

    terminate(&gw, "to-a");
    assert_pings((&gw, "10.9.2.1"), "10.2.0.1", &b);
    gw.stop();
    gateway.ip("link del xb");
    assert_eq!(remains(&gateway), before, "{}", gw.log());
}

#[test]
fn transport_mode_protects_what_tunnel_devices_send() {
    let mut lab = Lab::new();
    let [left, right] = ["left", "right"].map(|name| lab.namespace(name));
    lab.link(
        (&left, "u0", "192.0.2.1/24"),
        (&right, "u0", "192.0.2.2/24"),
    );
    for (namespace, own, other) in [(&left, "1", "2"), (&right, "2", "1")] {
        for (index, kind) in ["gre", "ipip"].iter().enumerate() {
            namespace.ip(&format!(
                "link add t{index} type {kind} local 192.0.2.{own} remote 192.0.2.{other} ttl 64"
            ));
            // IPv6 would speak through it by itself, and be counted.
            let switch = format!("echo 1 >/proc/sys/net/ipv6/conf/t{index}/disable_ipv6");
            let _ = namespace.run("sh", ["-c", &switch]).expect_ok();
            namespace.ip(&format!("addr add 10.9.{index}.{own}/30 dev t{index}"));
            namespace.ip(&format!("link set t{index} up"));
        }
    }
    let children = ["gre", "4"]
        .map(|protocol| {
            format!(
                "      p{protocol} {{
        mode = transport
        local_ts = dynamic[{protocol}]
        remote_ts = dynamic[{protocol}]
        esp_proposals = aes128gcm16-x25519
      }}\n"
            )
        })
        .concat();
    let [one, two] =
        [("192.0.2.1", "left"), ("192.0.2.2", "right")].map(|(address, id)| End { address, id });
    let before = [&left, &right].map(remains);
    let mut left = start(
        &lab,
        &left,
        subject(),
        &[connection("t", &one, &two, &children)],
    );
    let right = start(
        &lab,
        &right,
        Daemon::Swanherd,
        &[connection("t", &two, &one, &children)],
    );

    initiate(&left, "pgre", &right);
    initiate(&right, "p4", &left);

    assert_pings((&left, "10.9.0.1"), "10.9.0.2", &right);
    assert_packets(&left, "pgre", 5);
    assert_packets(&left, "p4", 0);
    assert_pings((&right, "10.9.1.2"), "10.9.1.1", &left);
    assert_packets(&left, "p4", 5);
    let states = xfrm(&left.namespace, "state");
    assert!(
        states.iter().all(|s| s.contains("mode transport")),
        "{states:#?}"
    );

    terminate(&left, "t");
    right.wait_until("nothing", 20, |n| n.sas().is_empty());
    let after = [&left.namespace, &right.namespace].map(remains);
    // The listing of daemons that still run: their own rule stays until they end.
    for (namespace, after) in ["left", "right"].iter().zip(&after) {
        assert!(
            after.iter().all(|entry| !entry.contains("proto esp")),
            "{namespace}: {after:#?}"
        );
    }
    left.stop();
    assert_eq!(remains(&left.namespace), before[0], "{}", left.log());
}

#[test]
fn either_family_travels_in_either() {
    let mut lab = Lab::new();
    let [left, right] = ["left", "right"].map(|name| lab.namespace(name));
    lab.link(
        (&left, "u0", "192.0.2.1/24"),
        (&right, "u0", "192.0.2.2/24"),
    );
    for (namespace, own) in [(&left, "1"), (&right, "2")] {
        namespace.ip(&format!("addr add 2001:db8::{own}/64 dev u0 nodad"));
        namespace.ip(&format!("addr add 10.{own}.0.1/32 dev lo"));
        namespace.ip(&format!("addr add fd00:{own}::1/128 dev lo nodad"));
        namespace.ip(&format!("addr add fd00:1{own}::1/128 dev lo nodad"));
    }
    let child = |name: &str, local: &str, remote: &str| {
        format!(
            "      {name} {{
        local_ts = {local}
        remote_ts = {remote}
        esp_proposals = aes128gcm16-x25519
      }}\n"
        )
    };
    let over = |own: &str, other: &str| {
        let (near6, far6) = (format!("2001:db8::{own}"), format!("2001:db8::{other}"));
        let (near4, far4) = (format!("192.0.2.{own}"), format!("192.0.2.{other}"));
        let ids = |id: &str| format!("{id}.example.org");
        let (near_id, far_id) = (ids(own), ids(other));
        let end = |address, id| End { address, id };
        vec![
            connection(
                "over6",
                &end(&near6, &near_id),
                &end(&far6, &far_id),
                &(child(
                    "six-in-six",
                    &format!("fd00:{own}::/64"),
                    &format!("fd00:{other}::/64"),
                ) + &child(
                    "four-in-six",
                    &format!("10.{own}.0.0/24"),
                    &format!("10.{other}.0.0/24"),
                )),
            ),
            connection(
                "over4",
                &end(&near4, &near_id),
                &end(&far4, &far_id),
                &child(
                    "six-in-four",
                    &format!("fd00:1{own}::/64"),
                    &format!("fd00:1{other}::/64"),
                ),
            ),
        ]
    };
    let before = remains(&left);
    let mut left = start(&lab, &left, subject(), &over("1", "2"));
    let right = start(&lab, &right, Daemon::Swanherd, &over("2", "1"));

    for (child, near, far) in [
        ("six-in-six", "fd00:1::1", "fd00:2::1"),
        ("four-in-six", "10.1.0.1", "10.2.0.1"),
        ("six-in-four", "fd00:11::1", "fd00:12::1"),
    ] {
        initiate(&left, child, &right);
        assert_pings((&left, near), far, &right);
        assert_pings((&right, far), near, &left);
        assert_packets(&left, child, 10);
    }

    left.stop();
    assert_eq!(remains(&left.namespace), before, "{}", left.log());
}

#[test]
fn rekeys_after_so_many_packets_lose_none() {
    let mut lab = Lab::new();
    let [left, right] = ["left", "right"].map(|name| lab.namespace(name));
    lab.link(
        (&left, "u0", "192.0.2.1/24"),
        (&right, "u0", "192.0.2.2/24"),
    );
    left.ip("addr add 10.1.0.1/32 dev lo");
    right.ip("addr add 10.2.0.1/32 dev lo");
    let child = |own: &str, other: &str, limits: &str| {
        format!(
            "      c {{
        local_ts = 10.{own}.0.0/24
        remote_ts = 10.{other}.0.0/24
        esp_proposals = aes128gcm16-x25519
        {limits}
      }}"
        )
    };
    let [one, two] =
        [("192.0.2.1", "left"), ("192.0.2.2", "right")].map(|(address, id)| End { address, id });
    let limits = "rekey_packets = 150\n        life_packets = 2000\n        rand_packets = 0";
    let before = remains(&left);
    let mut left = start(
        &lab,
        &left,
        subject(),
        &[connection("t", &one, &two, &child("1", "2", limits))],
    );
    let right = start(
        &lab,
        &right,
        Daemon::Swanherd,
        &[connection("t", &two, &one, &child("2", "1", ""))],
    );
    initiate(&left, "c", &right);

    let every = Duration::from_millis(10);
    let report = Pings::every(every, &left.namespace, "10.1.0.1", "10.2.0.1", 700).finish();

    assert_eq!(
        (report.sent, report.received),
        (700, 700),
        "{}\n{}\n{}",
        report.text,
        left.log(),
        right.log()
    );
    left.wait_until("three rekeys", 20, |n| {
        child_sa(n, "c").is_some_and(|c| c.number("uniqueid") > 3)
    });
    left.wait_until("one pair of states", 30, |n| {
        xfrm(&n.namespace, "state").len() == 2
    });

    left.stop();
    assert_eq!(remains(&left.namespace), before, "{}", left.log());
}
