// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE goes on where policies cover everything, its own packets included.

use swanherd_tests::{Message, Node, Pair, Plane, Scenario};

use crate::support::{Site, assert_reachable, command, initiate, meet_without_solicitation};

/// Policies of somebody else that drop whatever no better policy lets pass.
fn drop_everything(node: &Node) {
    for all in ["0.0.0.0/0", "::/0"] {
        for direction in ["out", "in", "fwd"] {
            node.namespace.ip(&format!(
                "xfrm policy add src {all} dst {all} dir {direction} priority 4000000 action block"
            ));
        }
    }
}

fn is_dropped(node: &Node, to: &str) -> bool {
    !node.namespace.run("ping", ["-c", "1", "-W", "1", to]).ok()
}

/// Each side rekeys child and IKE SA, and says goodbye.
fn lives_a_life(pair: &Pair, near: &str, far: &str) {
    let mut vici = pair.left.vici();
    assert_eq!(initiate(&mut vici, "t", "c"), Ok(()), "{}", pair.logs());
    assert_reachable(&pair.left, near, far, 5);
    for node in [&pair.left, &pair.right] {
        for (key, name) in [("child", "c"), ("ike", "t")] {
            let before = spis(&pair.left);
            let rekey = Message::new(&[(key, name)]);
            assert_eq!(command(&mut node.vici(), "rekey", &rekey), Ok(()));
            pair.left.wait_until("other SPIs", 10, |left| {
                let now = spis(left);
                now.len() == 2
                    && match key {
                        "child" => now[1] != before[1],
                        _ => now[0] != before[0],
                    }
            });
            assert_reachable(&pair.left, near, far, 5);
        }
    }
    let _ = pair
        .left
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();
    pair.right
        .wait_until("that the goodbye arrives", 5, |n| n.sas().is_empty());
}

/// Of the IKE SA and of its child, if there is one of each.
fn spis(node: &Node) -> Vec<String> {
    let sas = node.sas();
    let established = sas
        .iter()
        .filter(|(_, ike)| ike.text("state") == "ESTABLISHED");
    let ike: Vec<String> = established
        .map(|(_, ike)| ike.text("initiator-spi").to_owned())
        .collect();
    let children = node.children("INSTALLED");
    if ike.len() != 1 || children.len() != 1 {
        return Vec::new();
    }
    let child = children[0].text("spi-in").to_owned();
    [ike, vec![child]].concat()
}

#[test]
fn ike_works_while_somebody_drops_everything_ipv4() {
    let pair = Scenario::new(Plane::Kernel).start();
    for node in [&pair.left, &pair.right] {
        drop_everything(node);
    }
    assert!(is_dropped(&pair.left, "192.0.2.2"));

    lives_a_life(&pair, "10.1.0.1", "10.2.0.1");

    assert!(is_dropped(&pair.left, "192.0.2.2"));
}

#[test]
fn ike_works_while_somebody_drops_everything_ipv6() {
    let pair = over_ipv6("fd01::/64", "fd02::/64");
    for node in [&pair.left, &pair.right] {
        drop_everything(node);
    }
    assert!(is_dropped(&pair.left, "2001:db8::2"));

    lives_a_life(&pair, "fd01::1", "fd02::1");

    assert!(is_dropped(&pair.left, "2001:db8::2"));
}

#[test]
fn ike_works_beside_a_tunnel_for_everything_ipv4() {
    let pair = Scenario::new(Plane::Kernel).start();
    for (node, own, other) in [(&pair.left, "1", "2"), (&pair.right, "2", "1")] {
        node.configure(
            &Site {
                own: &format!("192.0.2.{own}"),
                other: &format!("192.0.2.{other}"),
                names: [own, other],
                children: vec![("c".into(), "0.0.0.0/0".into(), "0.0.0.0/0".into())],
                child: "",
            }
            .definitions(),
        );
        node.load();
    }

    lives_a_life(&pair, "10.1.0.1", "10.2.0.1");
}

#[test]
fn ike_works_beside_a_tunnel_for_everything_ipv6() {
    let pair = over_ipv6("::/0", "::/0");

    lives_a_life(&pair, "fd01::1", "fd02::1");
}

/// Two gateways with IPv6 outside and inside.
fn over_ipv6(left_net: &str, right_net: &str) -> Pair {
    let pair = Scenario::new(Plane::Kernel).start();
    let nets = [left_net, right_net];
    for (index, node) in [&pair.left, &pair.right].into_iter().enumerate() {
        let (own, other) = (index + 1, 2 - index);
        node.namespace
            .ip(&format!("addr add 2001:db8::{own}/64 dev u0 nodad"));
        node.namespace
            .ip(&format!("addr add fd0{own}::1/128 dev lo nodad"));
        node.configure(
            &Site {
                own: &format!("2001:db8::{own}"),
                other: &format!("2001:db8::{other}"),
                names: [&own.to_string(), &other.to_string()],
                children: vec![("c".into(), nets[own - 1].into(), nets[other - 1].into())],
                child: "",
            }
            .definitions(),
        );
    }
    // Policies for everything cover neighbour solicitations too.
    meet_without_solicitation(&pair, ["2001:db8::1", "2001:db8::2"]);
    for node in [&pair.left, &pair.right] {
        node.load();
    }
    pair
}
