// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that ask for what cannot happen, and leave.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Message, Node, Plane, Scenario, frame, subject};

/// Clients that start a negotiation with a peer that is silent, and go away at odd moments.
const CLIENTS: u32 = 200;
/// Each so manieth is a `swanctl` that is killed; the others hang up.
const KILLED: u32 = 10;

#[test]
fn two_hundred_interrupted_initiates_leave_the_daemon_as_it_was() {
    if subject() == Daemon::Charon {
        // Its workers are all taken by the eighth.
        return;
    }
    let mut pair = Scenario::new(Plane::User).start();
    pair.right.kill();
    let node = &pair.left;
    let mut answered = Vec::new();
    let mut half_way = 0;

    for client in 0..CLIENTS {
        // Between nothing and 30 ms, in no order that a scheduler would fall in with.
        let pause = Duration::from_millis(u64::from(client * 37 % 31));
        if client % KILLED == 0 {
            let mut swanctl = Command::new("swanctl")
                .args(["--initiate", "--child", "c", "--uri"])
                .arg(format!("unix://{}", node.socket().display()))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("swanctl is installed");
            std::thread::sleep(pause);
            let _ = swanctl.kill();
            let _ = swanctl.wait();
        } else {
            let mut vici = node.vici();
            let request = Message::new(&[("child", "c"), ("timeout", "0")]);
            for octets in [
                frame(3, "control-log", None),
                frame(0, "initiate", Some(&request)),
            ] {
                vici.write(&octets).expect("the daemon reads");
            }
            std::thread::sleep(pause);
        }
        let begun = Instant::now();
        let sas = node.sas();
        answered.push(begun.elapsed());
        assert!(sas.len() <= 1, "one negotiation for all: {sas:?}");
        if client == CLIENTS / 2 {
            half_way = resident(node);
        }
    }

    let end = resident(node);
    assert!(
        end <= half_way + 1024,
        "{half_way} KiB after half of them, {end} KiB after all"
    );
    answered.sort_unstable();
    // The worst of them may have met another process that has the processor.
    let most = answered[answered.len() * 95 / 100];
    assert!(most < Duration::from_millis(100), "{answered:?}");
    let begun = Instant::now();
    pair.left.stop();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// Memory of the daemon that is in RAM, KiB.
fn resident(node: &Node) -> u64 {
    let pid = node.pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .expect("the kernel says how much")
}
