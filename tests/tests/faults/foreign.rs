// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Another process meddles with what is ours: it is noticed, mended, and said once.

use std::fs;
use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Message, Pair, Plane, Scenario, subject};

use crate::support::{View, assert_audit_is_clean, assert_reachable, assert_same, command};

/// Audits are made so often; what no event tells is mended within one interval.
const INTERVAL: u64 = 5;
/// What a slow machine may need beyond it.
const SLACK: u64 = 10;

/// A tunnel, and what the kernel has for it.
struct Tunnel {
    pair: Pair,
    whole: View,
    /// Lines in the log so far.
    logged: usize,
}

impl Tunnel {
    fn new() -> Option<Self> {
        if subject() == Daemon::Charon {
            // charon does not look after what it has installed.
            return None;
        }
        let pair = Scenario {
            settings: "}\nswanherd {\n  reconcile_interval = 5s\n}\ncharon {\n",
            ..Scenario::new(Plane::Kernel)
        }
        .start();
        pair.left.initiate("c");
        pair.assert_traffic_passes();
        let whole = View::masked(&pair.left.namespace);
        let logged = printed(&pair).len();
        Some(Self {
            pair,
            whole,
            logged,
        })
    }

    fn ip(&self, args: &str) {
        self.pair.left.namespace.ip(args);
    }

    /// What has been logged since, apart from IKE's own messages.
    fn log(&self) -> Vec<String> {
        let ours = printed(&self.pair).into_iter().skip(self.logged);
        ours.filter(|line| !line.contains("group=\"ENC\"") && !line.contains("group=\"IKE\""))
            .collect()
    }

    /// Waits until the kernel has what it had before, and traffic passes.
    fn assert_mended(&self) {
        let begun = Instant::now();
        let left = &self.pair.left;
        loop {
            let now = View::masked(&left.namespace);
            if now == self.whole {
                break;
            }
            if begun.elapsed() > Duration::from_secs(INTERVAL + SLACK) {
                assert_same("mended", &self.whole, &now, left);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        eprintln!("mended after {:.1?}", begun.elapsed());
        assert_reachable(left, "10.1.0.1", "10.2.0.1", 5);
        assert_eq!(left.sas().len(), 1, "{}", self.pair.logs());
        assert_audit_is_clean(left);
    }

    /// Exactly one line has one of these texts: an event told of it, or an audit did.
    fn assert_said_once(&self, texts: &[&str]) {
        let log = self.log();
        let said = log
            .iter()
            .filter(|line| texts.iter().any(|text| line.contains(text)))
            .count();
        assert_eq!(said, 1, "{texts:?} in {log:#?}\n{}", self.pair.left.log());
    }
}

/// The lines that the left daemon has printed.
fn printed(pair: &Pair) -> Vec<String> {
    let file = pair.lab.dir().join(pair.left.namespace.name()).join("out");
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_deleted_policy_is_installed_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("xfrm policy delete src 10.1.0.0/24 dst 10.2.0.0/24 dir out");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["policy out 10.1.0.0/24", "put back policies"]);
}

#[test]
fn a_policy_with_another_priority_gets_its_own_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip(
        "xfrm policy update src 10.1.0.0/24 dst 10.2.0.0/24 dir out priority 7 \
         tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 1 mode tunnel",
    );

    tunnel.assert_mended();
    tunnel.assert_said_once(&["policy out 10.1.0.0/24", "put back policies"]);
}

#[test]
fn a_policy_that_was_made_to_block_protects_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("xfrm policy update src 10.1.0.0/24 dst 10.2.0.0/24 dir out action block");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["policy out 10.1.0.0/24", "put back policies"]);
}

#[test]
fn a_deleted_sa_is_negotiated_again() {
    for direction in ["spi-in", "spi-out"] {
        let Some(tunnel) = Tunnel::new() else { return };
        let child = &tunnel.pair.left.children("INSTALLED")[0];
        let (spi, dst) = match direction {
            "spi-in" => (child.text("spi-in"), "192.0.2.1"),
            _ => (child.text("spi-out"), "192.0.2.2"),
        };

        tunnel.ip(&format!(
            "xfrm state delete dst {dst} proto esp spi 0x{spi}"
        ));

        tunnel.assert_mended();
        tunnel.assert_said_once(&["another process deleted"]);
    }
}

#[test]
fn flushed_states_are_negotiated_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("xfrm state flush");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["flushed"]);
}

#[test]
fn flushed_policies_are_installed_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("xfrm policy flush");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["flushed"]);
}

#[test]
fn a_deleted_rule_is_installed_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("rule delete table 220");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["IPv4 rule", "adapted routes"]);
}

#[test]
fn deleted_routes_are_installed_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("route flush table 220");

    tunnel.assert_mended();
    tunnel.assert_said_once(&["route to 10.2.0.0/24", "adapted routes"]);
}

#[test]
fn a_link_that_was_down_carries_the_tunnel_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("link set u0 down");
    // Long enough for an audit, which finds nothing that it could do about it.
    std::thread::sleep(Duration::from_secs(INTERVAL + 1));
    tunnel.ip("link set u0 up");

    tunnel.assert_mended();
}

#[test]
fn an_address_that_was_gone_carries_the_tunnel_again() {
    let Some(tunnel) = Tunnel::new() else { return };

    tunnel.ip("addr delete 192.0.2.1/24 dev u0");
    std::thread::sleep(Duration::from_secs(1));
    tunnel.ip("addr add 192.0.2.1/24 dev u0");

    tunnel.assert_mended();
}

/// A policy of somebody else that drops what the tunnel is for: reported, and never touched.
#[test]
fn a_policy_of_somebody_else_that_blocks_is_reported_and_stays() {
    let Some(tunnel) = Tunnel::new() else { return };
    let block = "src 10.1.0.0/16 dst 10.2.0.0/24 dir out priority 1";

    tunnel.ip(&format!("xfrm policy add {block} action block"));

    let before = View::masked(&tunnel.pair.left.namespace);
    let stays = before.list("policies").iter().any(|p| p.contains("block"));
    assert!(stays, "{before:?}");
    assert!(
        !tunnel
            .pair
            .left
            .namespace
            .run("ping", ["-c", "1", "-W", "1", "-I", "10.1.0.1", "10.2.0.1"])
            .ok()
    );
    let left = &tunnel.pair.left;
    let policies = left.swanherd(&["policies", "--json"]).expect_ok();
    assert!(policies.contains("alien"), "{policies}");
    std::thread::sleep(Duration::from_secs(2 * INTERVAL + 1));
    tunnel.assert_said_once(&["alien: 0 SAs, 1 policy"]);
    let after = View::masked(&left.namespace);
    assert_same("untouched", &before, &after, left);
    // It does not outlive its maker's wish, nor does the tunnel die of it.
    tunnel.ip("xfrm policy delete src 10.1.0.0/16 dst 10.2.0.0/24 dir out");
    assert_reachable(&tunnel.pair.left, "10.1.0.1", "10.2.0.1", 5);
}

/// The tunnel that was mended is a whole one: it can be rekeyed and deleted, and leaves nothing.
#[test]
fn a_mended_tunnel_is_a_whole_one() {
    let Some(tunnel) = Tunnel::new() else { return };
    let left = &tunnel.pair.left;
    for what in ["state flush", "policy flush"] {
        tunnel.ip(&format!("xfrm {what}"));
        tunnel.assert_mended();
    }
    let before = left.children("INSTALLED")[0].text("spi-in").to_owned();

    let rekey = Message::new(&[("child", "c")]);
    assert_eq!(command(&mut left.vici(), "rekey", &rekey), Ok(()));
    left.wait_until("another child", 10, |node| {
        let children = node.children("INSTALLED");
        children.len() == 1 && children[0].text("spi-in") != before
    });
    tunnel.assert_mended();
    let _ = left
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();
    left.wait_until("nothing", 5, |node| {
        let view = View::of(&node.namespace).without_sockets();
        view.list("states").is_empty() && view.list("policies").is_empty()
    });
}
