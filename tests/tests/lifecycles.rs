// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tunnels over their whole lives, with strongSwan at the other end: reauthentication, being kept
//! up whatever happens, idleness, and who may have an identity. Both daemons encrypt in user space.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use swanherd_tests::{Daemon, Lab, Message, Node, Pair, Plane, Scenario};

/// Settings of both daemons: peers that do not answer are noticed soon.
const IMPATIENT: &str =
    "  retransmit_tries = 1\n  retransmit_timeout = 1.0\n  retransmit_base = 1.0\n";

fn scenario() -> Scenario {
    Scenario {
        left: Daemon::Swanherd,
        right: Daemon::Charon,
        ..Scenario::new(Plane::User)
    }
}

/// Adds settings to the child of one side only.
fn set_child(node: &Node, settings: &str) {
    set_before(node, "local_ts =", settings);
}

/// Adds settings to the connection of one side only.
fn set_connection(node: &Node, settings: &str) {
    set_before(node, "remote_addrs =", settings);
}

fn set_before(node: &Node, option: &str, settings: &str) {
    let file = node.swanctl_dir().join("swanctl.conf");
    let text = fs::read_to_string(&file).expect("it has definitions");
    let changed = text.replace(option, &format!("{settings}\n        {option}"));
    assert_ne!(changed, text);
    node.configure(&changed);
    node.load();
}

fn spi(node: &Node) -> String {
    let sas = node.sas();
    let up = sas
        .iter()
        .find(|(_, ike)| ike.text("state") == "ESTABLISHED");
    up.map_or_else(String::new, |(_, ike)| ike.text("initiator-spi").to_owned())
}

fn has_one_tunnel(node: &Node) -> bool {
    let sas = node.sas();
    sas.len() == 1
        && sas[0].1.text("state") == "ESTABLISHED"
        && sas[0].1.sections("child-sas").len() == 1
        && node.children("INSTALLED").len() == 1
}

fn await_one_tunnel(pair: &Pair, seconds: u64) {
    for node in [&pair.left, &pair.right] {
        node.wait_until("one tunnel", seconds, has_one_tunnel);
    }
    pair.assert_traffic_passes();
}

/// What troubles the child, as our daemon tells.
fn trouble(node: &Node) -> (String, Option<u64>) {
    let told = node
        .vici()
        .stream("list-last-errors", "list-last-error", &Message::default())
        .expect("it tells");
    let connection = told.iter().flat_map(|event| event.sections(""));
    let Some((_, connection)) = connection.into_iter().find(|(name, _)| *name == "t") else {
        return (String::new(), None);
    };
    let next = connection.text("children.c.next-attempt").parse().ok();
    (connection.text("text").to_owned(), next)
}

/// One side initiates and reauthenticates, by its own schedule; no ping is lost.
fn reauthenticates(by: fn(&Pair) -> &Node) {
    let pair = Scenario {
        // charon may miss an answer that comes before it has filed its request, and has to ask
        // again before the time is up.
        settings: "  make_before_break = yes\n  retransmit_timeout = 0.4\n  retransmit_base = 1.3\n",
        ..scenario()
    }
    .start();
    set_connection(
        by(&pair),
        "reauth_time = 4s\n    over_time = 2s\n    rand_time = 0",
    );
    by(&pair).initiate("c");
    let mut seen = vec![spi(&pair.left)];
    let pings = pair.pings(200);
    for _ in 0..40 {
        sleep(Duration::from_millis(250));
        let now = spi(&pair.left);
        if !now.is_empty() && !seen.contains(&now) {
            seen.push(now);
        }
    }
    let report = pings.finish();
    assert!(seen.len() >= 3, "{seen:?}\n{}", pair.logs());
    assert_eq!(
        report.sent,
        report.received,
        "{}\n{}",
        report.text,
        pair.logs()
    );
}

#[test]
fn own_reauthentications_lose_nothing() {
    reauthenticates(|pair| &pair.left);
}

#[test]
fn the_peers_reauthentications_lose_nothing() {
    reauthenticates(|pair| &pair.right);
}

#[test]
fn break_before_make_ends_with_one_tunnel_whoever_begins() {
    let pair = Scenario {
        settings: "  make_before_break = no\n",
        ..scenario()
    }
    .start();
    pair.left.initiate("c");
    for by in [&pair.left, &pair.right] {
        let before = spi(&pair.left);
        let _ = by
            .swanctl(&["--rekey", "--ike", "t", "--reauth"])
            .expect_ok();
        pair.left.wait_until("another IKE SA", 10, |node| {
            let now = spi(node);
            !now.is_empty() && now != before
        });
        await_one_tunnel(&pair, 10);
    }
}

/// The left side keeps its child up.
fn kept() -> Pair {
    let pair = Scenario {
        settings: IMPATIENT,
        connection: "dpd_delay = 1s",
        ..scenario()
    }
    .start();
    set_child(&pair.left, "start_action = start");
    pair
}

#[test]
fn a_kept_child_comes_back_after_the_peer_has_deleted_it() {
    let pair = kept();
    await_one_tunnel(&pair, 10);
    let up = pair.left.swanherd(&["up", "--quiet", "t/c"]);
    assert!(up.ok(), "what is up already: {up}");

    for what in [["--child", "c"], ["--ike", "t"]] {
        let before = pair.left.children("INSTALLED")[0].text("spi-in").to_owned();
        let _ = pair
            .right
            .swanctl(&["--terminate", what[0], what[1]])
            .expect_ok();
        pair.left.wait_until("another child", 10, |node| {
            let up = node.children("INSTALLED");
            up.len() == 1 && up[0].text("spi-in") != before
        });
        await_one_tunnel(&pair, 10);
    }
}

#[test]
fn a_kept_child_comes_back_when_the_peer_that_died_does_and_status_tells_when() {
    let mut pair = kept();
    await_one_tunnel(&pair, 10);

    // For longer than one attempt takes.
    pair.right.kill();
    pair.left
        .wait_until("a plan for another attempt", 20, |node| {
            trouble(node).1.is_some()
        });
    let (error, next) = trouble(&pair.left);
    assert!(
        error.contains("no answer") && next <= Some(7),
        "{error}, in {next:?}"
    );
    let status = pair.left.swanherd(&["status"]);
    assert!(
        !status.ok() && status.stdout.contains("next attempt in "),
        "{status}"
    );
    let json = pair.left.swanherd(&["status", "--json"]).stdout;
    assert!(json.contains("\"next_attempt_seconds\":"), "{json}");
    pair.right.start();
    pair.right.load();
    await_one_tunnel(&pair, 15);
    assert_eq!(trouble(&pair.left).1, None);
}

#[test]
fn a_connecting_child_that_is_taken_down_is_not_tried_again() {
    let mut pair = scenario().start();
    pair.right.kill();
    set_child(&pair.left, "start_action = start");
    pair.left.wait_until("an attempt", 5, |node| {
        node.sas()
            .iter()
            .any(|(_, ike)| ike.text("state") == "CONNECTING")
    });
    let down = pair.left.swanherd(&["down", "--quiet", "t/c"]);
    assert!(down.ok(), "{down}\n{}", pair.logs());
    assert!(pair.left.sas().is_empty() && trouble(&pair.left).1.is_none());
    pair.right.start();
    pair.right.load();
    sleep(Duration::from_secs(7));
    for node in [&pair.left, &pair.right] {
        assert!(node.sas().is_empty(), "{}", pair.logs());
    }
}

#[test]
fn an_idle_child_is_deleted_and_its_ike_sa_stays() {
    let pair = scenario().start();
    set_child(&pair.left, "inactivity = 3s");
    pair.left.initiate("c");
    // In use for longer than that.
    for _ in 0..5 {
        pair.assert_traffic_passes();
        sleep(Duration::from_secs(1));
    }
    for node in [&pair.left, &pair.right] {
        node.wait_until("no child", 6, |node| {
            let sas = node.sas();
            sas.len() == 1 && sas[0].1.sections("child-sas").is_empty()
        });
    }
}

#[test]
fn both_sides_that_call_at_once_end_with_one_tunnel() {
    for _ in 0..2 {
        let pair = scenario().start();
        // Whoever is late finds the tunnel there, which charon calls a duplicate.
        std::thread::scope(|scope| {
            for node in [&pair.left, &pair.right] {
                scope.spawn(|| node.swanctl(&["--initiate", "--child", "c", "--timeout", "20"]));
            }
        });
        for node in [&pair.left, &pair.right] {
            node.wait_until("one IKE SA", 20, |node| node.sas().len() == 1);
        }
        pair.assert_traffic_passes();
    }
}

/// A gateway of ours, and two of charon that both claim to be gw2.example.org.
struct Rivals {
    gateway: Node,
    peers: [Node; 2],
    _lab: Lab,
}

impl Rivals {
    /// `unique` is the gateway's policy, `of_peers` the peers'.
    fn start(unique: &str, of_peers: &str, child_of_peers: &str) -> Self {
        let mut lab = Lab::new();
        let middle = lab.namespace("gateway");
        middle.ip("addr add 10.1.0.1/32 dev lo");
        let mut gateway = Node::new(&lab, &middle, Daemon::Swanherd, Plane::User, IMPATIENT);
        gateway.configure(&definitions("1", "2", "%any", unique, ""));
        let nets = [("u0", "192.0.2"), ("u1", "198.51.100")];
        let mut peers = nets.map(|(dev, net)| {
            let namespace = lab.namespace(dev);
            lab.link(
                (&middle, dev, &format!("{net}.1/24")),
                (&namespace, dev, &format!("{net}.2/24")),
            );
            namespace.ip("addr add 10.2.0.1/32 dev lo");
            let node = Node::new(&lab, &namespace, Daemon::Charon, Plane::User, IMPATIENT);
            node.configure(&definitions(
                "2",
                "1",
                &format!("{net}.1"),
                of_peers,
                child_of_peers,
            ));
            node
        });
        gateway.spawn();
        for node in &mut peers {
            node.start();
        }
        gateway.await_ready();
        gateway.load();
        Self {
            gateway,
            peers,
            _lab: lab,
        }
    }

    /// Addresses of the peers that have an IKE SA, in order.
    fn holders(&self) -> Vec<String> {
        let mut holders: Vec<String> = self
            .gateway
            .sas()
            .iter()
            .filter(|(_, ike)| ike.text("state") == "ESTABLISHED")
            .map(|(_, ike)| ike.text("remote-host").to_owned())
            .collect();
        holders.sort();
        holders
    }
}

fn definitions(own: &str, other: &str, remote: &str, unique: &str, child: &str) -> String {
    format!(
        r#"connections {{
  t {{
    version = 2
    remote_addrs = {remote}
    proposals = aes128gcm16-prfsha256-x25519
    unique = {unique}
    dpd_delay = 2s
    local {{
      auth = psk
      id = gw{own}.example.org
    }}
    remote {{
      auth = psk
      id = gw{other}.example.org
    }}
    children {{
      c {{
        local_ts = 10.{own}.0.0/24
        remote_ts = 10.{other}.0.0/24
        esp_proposals = aes128gcm16-x25519
        {child}
      }}
    }}
  }}
}}
secrets {{
  ike-1 {{
    secret = "a secret for the laboratory"
  }}
}}
"#
    )
}

#[test]
fn a_second_host_with_one_identity_is_treated_as_the_policy_says() {
    let (first, second) = ("192.0.2.2".to_owned(), "198.51.100.2".to_owned());
    for (unique, expected) in [
        ("replace", vec![second.clone()]),
        ("keep", vec![first.clone()]),
        ("never", vec![first, second]),
    ] {
        // A charon with `never` does not tell of a first contact, which would decide by itself.
        let rivals = Rivals::start(unique, "never", "");
        for node in &rivals.peers {
            node.load();
        }
        rivals.peers[0].initiate("c");
        let outcome = rivals.peers[1].swanctl(&["--initiate", "--child", "c", "--timeout", "10"]);
        assert_eq!(outcome.ok(), unique != "keep", "{unique}: {outcome}");
        rivals
            .gateway
            .wait_until(&format!("what {unique} says"), 10, |_| {
                rivals.holders() == expected
            });
    }
}

#[test]
fn the_first_contact_of_a_host_that_has_moved_replaces_its_old_tunnel() {
    let mut rivals = Rivals::start("no", "no", "");
    for node in &rivals.peers {
        node.load();
    }
    rivals.peers[0].initiate("c");
    rivals.peers[0].kill();
    rivals.peers[1].initiate("c");
    assert_eq!(rivals.holders(), ["198.51.100.2"]);
}

#[test]
fn two_hosts_with_one_identity_are_reported_and_do_not_take_turns() {
    let child = "start_action = start\n        close_action = start";
    let rivals = Rivals::start("replace", "replace", child);
    rivals.peers[0].load();
    rivals
        .gateway
        .wait_until("the first one", 10, |_| rivals.holders().len() == 1);
    rivals.peers[1].load();
    rivals.gateway.wait_until("a report", 20, |node| {
        trouble(node).0.contains("two hosts claim to be")
    });
    let holder = rivals.holders();
    assert_eq!(holder.len(), 1, "{}", rivals.gateway.log());
    sleep(Duration::from_secs(6));
    assert_eq!(rivals.holders(), holder, "{}", rivals.gateway.log());
    let status = rivals.gateway.swanherd(&["status"]);
    for part in ["192.0.2.2", "198.51.100.2", "gw2.example.org"] {
        let log = rivals.gateway.log();
        assert!(log.contains(part), "{part} is not in\n{log}");
    }
    assert!(status.ok(), "the tunnel of the one is up: {status}");
}
