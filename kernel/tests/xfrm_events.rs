// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel and other processes do behind the plane's back. Policies and reservations work
//! without ESP, so that these run anywhere.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::fmt::Write as _;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use common::{Lab, block_on, may_use_namespaces};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, Op, PlaneEvent, PolicyAction, PolicySet};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(20);

/// A namespace with an inner address and a way to everywhere.
fn host() -> Lab {
    let lab = Lab::single();
    lab.ip(0, "link add up0 type veth peer name far0");
    for link in ["up0", "far0"] {
        lab.ip(0, &format!("link set {link} up"));
    }
    lab.ip(0, "addr add 192.0.2.1/24 dev up0");
    lab.ip(0, "addr add 10.1.0.1/24 dev lo");
    lab.ip(0, "neigh add 192.0.2.254 lladdr 02:00:00:00:00:01 dev up0");
    lab.ip(0, "route add default via 192.0.2.254");
    lab
}

fn trap(id: u32, remote: &str, prefix: u8) -> PolicySet {
    let network = |text: &str, len| TrafficSelector::network(text.parse().unwrap(), len).unwrap();
    PolicySet {
        trap: true,
        ..PolicySet::new(
            id,
            format!("conn/trap-{id}"),
            vec![network("10.1.0.0", 24)],
            vec![network(remote, prefix)],
            PolicyAction::Protect {
                mode: Mode::Tunnel,
                local: "192.0.2.1".parse().unwrap(),
                remote: "198.51.100.1".parse().unwrap(),
                reqid: id,
                spi: 0,
            },
        )
    }
}

async fn plane(event_queue: usize) -> (XfrmPlane, mpsc::Receiver<PlaneEvent>) {
    let options = XfrmOptions {
        event_queue,
        ..XfrmOptions::default()
    };
    XfrmPlane::start(options).await.unwrap()
}

async fn install(plane: &XfrmPlane, set: PolicySet) {
    plane
        .apply(Op::InstallPolicies(Box::new(set)))
        .await
        .unwrap();
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn acquires(events: &mut mpsc::Receiver<PlaneEvent>) -> Vec<(u32, TrafficSelector)> {
    std::iter::from_fn(|| events.try_recv().ok())
        .filter_map(|event| match event {
            PlaneEvent::Acquire { reqid, remote, .. } => Some((reqid, remote)),
            _ => None,
        })
        .collect()
}

#[test]
fn policies_that_others_delete_change_or_flush_come_back_at_once() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    block_on(lab.within(0, async {
        let (plane, _events) = plane(64).await;
        install(&plane, trap(1, "10.2.0.0", 24)).await;
        let ours = || lab.xfrm_entries(0).1;
        assert_eq!(ours(), 3);

        lab.ip(
            0,
            "xfrm policy delete dir out src 10.1.0.0/24 dst 10.2.0.0/24",
        );
        until("the deleted policy", || ours() == 3).await;

        lab.ip(
            0,
            "xfrm policy update dir out src 10.1.0.0/24 dst 10.2.0.0/24 priority 7 action block",
        );
        until("what it did", || {
            !lab.ip(0, "xfrm policy").contains("action block")
        })
        .await;

        lab.ip(
            0,
            "xfrm policy add dir out src 10.8.0.0/24 dst 10.9.0.0/24 priority 5",
        );
        lab.ip(0, "xfrm policy flush");
        until("all policies", || ours() == 3).await;

        assert!(plane.event_counts().foreign_changes >= 4);
        assert!(plane.reconcile(true).await.unwrap().is_clean());
        plane.shutdown().await;
    }));
}

#[test]
fn a_storm_of_changes_by_others_ends_with_our_policies_in_place() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    let folder = tempfile::tempdir().unwrap();
    let batch = folder.path().join("batch");
    let mut text = String::new();
    for change in 0..5000 {
        let network = format!("172.{}.{}.0/24", 16 + change / 250, change % 250);
        writeln!(
            text,
            "xfrm policy add dir out src 10.7.0.0/24 dst {network}"
        )
        .unwrap();
        if change % 100 == 0 {
            writeln!(
                text,
                "xfrm policy update dir out src 10.1.0.0/24 dst 10.2.0.0/24 action block"
            )
            .unwrap();
        }
    }
    std::fs::write(&batch, text).unwrap();
    block_on(lab.within(0, async {
        let (plane, _events) = plane(64).await;
        install(&plane, trap(1, "10.2.0.0", 24)).await;

        let mut storm = lab.spawn(0, &format!("ip -batch {}", batch.display()));
        tokio::task::spawn_blocking(move || storm.wait().unwrap())
            .await
            .unwrap();

        until("our policy among theirs", || {
            let found = lab.ip(
                0,
                "xfrm policy list dir out src 10.1.0.0/24 dst 10.2.0.0/24",
            );
            found.contains("reqid 1")
        })
        .await;
        assert_eq!(lab.xfrm_entries(0).1, 5003);
        plane.shutdown().await;
        assert_eq!(lab.xfrm_entries(0).1, 5000);
    }));
}

#[test]
fn lost_events_are_made_up_for_by_comparing() {
    /// More than the socket's buffer holds.
    const CHANGES: usize = 20_000;
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    let folder = tempfile::tempdir().unwrap();
    let batch = folder.path().join("batch");
    let mut text = String::new();
    for change in 0..CHANGES / 2 {
        let network = format!("172.{}.{}.0/24", 16 + change / 250, change % 250);
        writeln!(
            text,
            "xfrm policy add dir out src 10.7.0.0/24 dst {network}"
        )
        .unwrap();
        writeln!(
            text,
            "xfrm policy delete dir out src 10.7.0.0/24 dst {network}"
        )
        .unwrap();
    }
    writeln!(
        text,
        "xfrm policy delete dir out src 10.1.0.0/24 dst 10.2.0.0/24"
    )
    .unwrap();
    std::fs::write(&batch, text).unwrap();
    block_on(lab.within(0, async {
        let (plane, _events) = plane(64).await;
        install(&plane, trap(1, "10.2.0.0", 24)).await;
        tokio::time::sleep(Duration::from_millis(50)).await;

        // The plane runs on this thread, so that nobody reads meanwhile.
        assert!(lab.exec(0, &format!("ip -batch {}", batch.display())));
        assert_eq!(lab.xfrm_entries(0).1, 2);

        until("our policy", || lab.xfrm_entries(0).1 == 3).await;
        assert!(plane.event_counts().overruns >= 1);
        let begun = Instant::now();
        let cpu = cpu_time();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let spent = cpu_time() - cpu;
        assert!(spent < begun.elapsed() / 2, "it spins: {spent:?}");
        plane.shutdown().await;
    }));
}

/// Of this thread, on which the plane runs.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap(),
    )
}

#[test]
fn a_thousand_flows_into_one_trap_are_one_acquire() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    block_on(lab.within(0, async {
        let (plane, mut events) = plane(64).await;
        install(&plane, trap(1, "10.2.0.0", 16)).await;
        let begun = Instant::now();
        for flow in 0..1000u32 {
            let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
            let to = format!("10.2.{}.{}:9", flow / 250, 1 + flow % 250);
            let _ = socket.send_to(b"x", to);
            // The kernel itself asks once for each SA that it waits for.
            if flow % 50 == 49 {
                lab.ip(0, "xfrm state flush");
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;

        let asked = acquires(&mut events);
        let counts = plane.event_counts().acquires;
        println!(
            "{} events, {counts:?}, in {:?}",
            asked.len(),
            begun.elapsed()
        );
        assert!(!asked.is_empty() && asked.iter().all(|(reqid, _)| *reqid == 1));
        let most = 1 + usize::try_from(begun.elapsed().as_secs()).unwrap();
        assert!(asked.len() <= most, "{} events", asked.len());
        assert_eq!(asked[0].1.protocol, 17);
        assert!(counts.coalesced > 0 && counts.dropped == 0 && counts.foreign == 0);
        plane.shutdown().await;
    }));
}

#[test]
fn acquires_of_policies_that_are_not_ours_are_counted() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    lab.ip(
        0,
        "xfrm policy add dir out src 10.1.0.0/24 dst 10.6.0.0/24 \
         tmpl src 192.0.2.1 dst 198.51.100.9 proto esp reqid 77 mode tunnel",
    );
    block_on(lab.within(0, async {
        let (plane, mut events) = plane(64).await;
        let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
        let _ = socket.send_to(b"x", "10.6.0.1:9");

        until("the count", || plane.event_counts().acquires.foreign == 1).await;

        assert!(acquires(&mut events).is_empty());
        plane.shutdown().await;
        assert_eq!(lab.xfrm_entries(0).1, 1, "theirs stays");
    }));
}

#[test]
fn a_daemon_that_is_behind_costs_no_more_than_its_queue() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    block_on(lab.within(0, async {
        let (plane, mut events) = plane(1).await;
        for id in 1..=8u32 {
            install(&plane, trap(id, &format!("10.2.{id}.0"), 24)).await;
        }
        let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
        for id in 1..=8u32 {
            lab.ip(0, "xfrm state flush");
            let _ = socket.send_to(b"x", format!("10.2.{id}.1:9"));
        }
        until("the drops", || plane.event_counts().acquires.dropped >= 6).await;

        // What found no room may ask again.
        while events.try_recv().is_ok() {}
        lab.ip(0, "xfrm state flush");
        let _ = socket.send_to(b"x", "10.2.8.1:9");
        until("a new acquire", || {
            acquires(&mut events).iter().any(|(reqid, _)| *reqid == 8)
        })
        .await;
        plane.shutdown().await;
    }));
}

/// A crash leaves the kernel waiting for an SA of a trap, and the trap that comes next has the same
/// request id.
#[test]
fn what_the_kernel_waits_for_since_a_crash_does_not_keep_it_from_asking() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    let folder = tempfile::tempdir().unwrap();
    let options = XfrmOptions {
        ledger: Some(folder.path().join("ledger")),
        ..XfrmOptions::default()
    };
    block_on(lab.within(0, async {
        let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
        let asked = async |options: &XfrmOptions| {
            let (plane, mut events) = XfrmPlane::start(options.clone()).await.unwrap();
            let left = lab.xfrm_entries(0);
            install(&plane, trap(1, "10.2.0.0", 24)).await;
            let _ = socket.send_to(b"x", "10.2.0.1:9");
            until("an acquire", || acquires(&mut events).len() == 1).await;
            left
        };
        let first = asked(&options).await;
        // The first plane has gone without taking anything back.
        assert_eq!(lab.xfrm_entries(0), (1, 3));

        let second = asked(&options).await;

        assert_eq!([first, second], [(0, 0), (0, 0)]);
    }));
}
