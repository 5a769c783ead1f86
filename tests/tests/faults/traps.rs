// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many flows hit one trap at once.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Namespace, Node, Pair, Plane, Scenario, subject};

use crate::support::{Site, View, assert_reachable, coalesced, signal};

/// Flows in each second of a storm.
const RATE: u32 = 1000;
const SECONDS: u32 = 6;
/// The peer is silent for so many of them; a kernel that is asked to asks again each second.
const SILENCE: u32 = RATE * 7 / 2;

#[test]
fn a_storm_of_flows_makes_one_tunnel() {
    one_tunnel(Plane::Kernel, "trap");
}

#[test]
fn a_trap_that_is_also_started_makes_one_tunnel() {
    one_tunnel(Plane::Kernel, "trap|start");
}

/// Lets a thousand flows a second hit one trap while the peer is silent, and then until the tunnel
/// is there; exactly one IKE SA and one child come of it.
pub(crate) fn one_tunnel(plane: Plane, action: &'static str) {
    let pair = Scenario {
        // One request waits for the peer, and not so many copies of it that it asks for cookies.
        settings: "  retransmit_timeout = 20.0\n",
        ..Scenario::new(plane)
    }
    .start();
    if plane == Plane::Kernel {
        // The kernel asks once and then not again until its larval SA ends, for 30 s by default.
        let asked = pair
            .left
            .namespace
            .run("sh", ["-c", "echo 1 >/proc/sys/net/core/xfrm_acq_expires"]);
        assert!(asked.ok(), "{asked}");
    }
    signal(&pair.right, rustix::process::Signal::STOP);
    pair.left.configure(
        &Site {
            own: "192.0.2.1",
            other: "192.0.2.2",
            names: ["1", "2"],
            children: vec![("c".into(), "10.1.0.0/24".into(), "10.2.0.0/24".into())],
            child: &format!("start_action = {action}"),
        }
        .definitions(),
    );
    pair.left.load();
    let trap = trapped(&pair.left);
    let kernel = usize::from(plane == Plane::Kernel);
    assert_eq!(trap.len(), kernel, "{trap:?}\n{}", pair.left.log());
    let sent = Arc::new(AtomicU32::new(0));
    let storm = start_storm(&pair.left.namespace, &sent);
    let (mut answers, mut most) = (false, (0, 0));

    while !storm.is_finished() {
        if !answers && sent.load(Ordering::Relaxed) > SILENCE {
            signal(&pair.right, rustix::process::Signal::CONT);
            answers = true;
        }
        let sas = pair.left.sas();
        let children = sas.iter().map(|(_, ike)| ike.sections("child-sas").len());
        most = (most.0.max(sas.len()), most.1.max(children.sum()));
        std::thread::sleep(Duration::from_millis(50));
    }

    storm.join().expect("the storm ends");
    let sent = sent.load(Ordering::Relaxed);
    assert!(sent >= RATE * SECONDS * 9 / 10, "only {sent} flows");
    assert!(answers, "the storm was too short");
    pair.left.wait_until("the tunnel", 10, |node| {
        node.children("INSTALLED").len() == 1
    });
    // On a busy machine the tunnel may only be there after the storm.
    assert!(
        most.0 == 1 && most.1 <= 1,
        "{most:?} IKE SAs and children\n{}",
        pair.logs()
    );
    assert_one(&pair);
    assert_reachable(&pair.left, "10.1.0.1", "10.2.0.1", 5);
    // The tunnel goes, the trap stays.
    if plane == Plane::Kernel {
        let states = View::of(&pair.left.namespace).list("states").len();
        assert_eq!(states, 2, "{}", pair.logs());
    }
    let _ = pair
        .left
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();
    pair.left
        .wait_until("no SA", 5, |node| node.sas().is_empty());
    assert_eq!(trapped(&pair.left), trap, "{}", pair.left.log());
    assert_reachable(&pair.left, "10.1.0.1", "10.2.0.1", 5);
    assert_one(&pair);
    if subject() == Daemon::Swanherd {
        let count = coalesced(&pair.left);
        eprintln!("{sent} flows, {count} requests coalesced");
        assert!(count > 0, "{}", pair.left.log());
    }
}

fn assert_one(pair: &Pair) {
    for node in [&pair.left, &pair.right] {
        let sas = node.sas();
        assert_eq!(sas.len(), 1, "{sas:#?}\n{}", pair.logs());
        let children = sas[0].1.sections("child-sas").len();
        assert_eq!(children, 1, "{sas:#?}\n{}", pair.logs());
    }
}

/// The policies that are not for sockets, in the direction of a trap.
fn trapped(node: &Node) -> Vec<String> {
    let view = View::of(&node.namespace).without_sockets();
    let outbound = view
        .list("policies")
        .iter()
        .filter(|p| p.contains("dir out"));
    outbound.cloned().collect()
}

/// Sends one datagram of each flow from a thread in the namespace, and counts them.
fn start_storm(namespace: &Namespace, sent: &Arc<AtomicU32>) -> JoinHandle<()> {
    let (namespace, sent) = (namespace.clone(), Arc::clone(sent));
    std::thread::spawn(move || namespace.enter(move || storm(&sent)))
}

fn storm(sent: &AtomicU32) {
    let begun = Instant::now();
    for flow in 0..RATE * SECONDS {
        let due = Duration::from_secs(1) * flow / RATE;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        let host = u8::try_from(flow % 250 + 1).unwrap_or(1);
        let port = u16::try_from(flow % 60_000 + 1024).unwrap_or(1024);
        // Each with a socket, and so a port, of its own.
        let datagram = UdpSocket::bind((Ipv4Addr::new(10, 1, 0, 1), 0))
            .and_then(|socket| socket.send_to(b"?", (Ipv4Addr::new(10, 2, 0, host), port)));
        sent.fetch_add(u32::from(datagram.is_ok()), Ordering::Relaxed);
    }
}
