// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The plane follows this host's network: gateways, addresses, links, and what others do to the
//! routes of tunnels. Policies work without ESP, so that these run anywhere.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod common;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Lab, block_on, may_use_namespaces};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, Op, PlaneEvent, PolicyAction, PolicySet};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::tun::{DEFAULT_MARK, TunConfig, TunPlane};
use swanherd_kernel::udp::{IkeSocket, SocketOptions};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use tokio::sync::mpsc;

/// Longer than any of these takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn host() -> Lab {
    let lab = Lab::single();
    lab.ip(0, "link add up0 type veth peer name far0");
    for link in ["up0", "far0"] {
        // Link-local addresses would come and change on their own, later.
        lab.ip(0, &format!("link set {link} addrgenmode none"));
        lab.ip(0, &format!("link set {link} up"));
    }
    lab.ip(0, "addr add 192.0.2.1/24 dev up0");
    lab.ip(0, "addr add 10.1.0.1/24 dev lo");
    lab
}

fn tunnel() -> PolicySet {
    let network = |text: &str| TrafficSelector::network(text.parse().unwrap(), 24).unwrap();
    PolicySet::new(
        1,
        "conn/child".to_owned(),
        vec![network("10.1.0.0")],
        vec![network("10.2.0.0"), network("10.3.0.0")],
        PolicyAction::Protect {
            mode: Mode::Tunnel,
            local: "192.0.2.1".parse().unwrap(),
            remote: "198.51.100.1".parse().unwrap(),
            reqid: 1,
            spi: 0,
        },
    )
}

async fn plane() -> (XfrmPlane, mpsc::Receiver<PlaneEvent>) {
    let (plane, events) = XfrmPlane::start(XfrmOptions::default()).await.unwrap();
    plane
        .apply(Op::InstallPolicies(Box::new(tunnel())))
        .await
        .unwrap();
    (plane, events)
}

fn routes(lab: &Lab) -> Vec<String> {
    lab.ip(0, "route show table all")
        .lines()
        // Those that stand in for routes into a device lead nowhere.
        .filter(|line| line.contains("table 220") && !line.starts_with("unreachable"))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn told(events: &mut mpsc::Receiver<PlaneEvent>) -> usize {
    std::iter::from_fn(|| events.try_recv().ok())
        .filter(|event| *event == PlaneEvent::NetworkChanged)
        .count()
}

#[test]
fn routes_follow_the_way_to_the_peer_without_being_asked() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    block_on(lab.within(0, async {
        let (plane, mut events) = plane().await;
        assert!(routes(&lab).is_empty(), "there is no way to the peer yet");

        lab.ip(0, "route add default via 192.0.2.254");
        until("a route", || routes(&lab).len() == 2).await;
        assert_eq!(events.recv().await, Some(PlaneEvent::NetworkChanged));

        lab.ip(0, "route replace default via 192.0.2.253");
        until("the new gateway", || {
            routes(&lab)
                .iter()
                .filter(|r| r.contains("192.0.2.253"))
                .count()
                == 2
        })
        .await;

        lab.ip(0, "addr del 10.1.0.1/24 dev lo");
        until("no source, no route", || routes(&lab).is_empty()).await;
        lab.ip(0, "addr add 10.1.0.1/24 dev lo");
        until("the source again", || routes(&lab).len() == 2).await;

        plane.shutdown().await;
        assert!(routes(&lab).is_empty());
    }));
}

#[test]
fn routes_and_the_rule_that_others_or_the_kernel_remove_come_back() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    lab.ip(0, "route add default via 192.0.2.254");
    block_on(lab.within(0, async {
        let (plane, mut events) = plane().await;
        assert_eq!(routes(&lab).len(), 2);
        // What the set-up of the host itself causes passes by.
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            if told(&mut events) == 0 {
                break;
            }
        }

        lab.ip(0, "route flush table 220");
        until("the routes", || routes(&lab).len() == 2).await;
        lab.ip(0, "rule del pref 220");
        until("the rule", || lab.ip(0, "rule").contains("lookup 220")).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(told(&mut events), 0, "nothing of the host has changed");

        lab.ip(0, "link set up0 down");
        until("no link, no route", || routes(&lab).is_empty()).await;
        lab.ip(0, "link set up0 up");
        lab.ip(0, "route add default via 192.0.2.254");
        until("the link again", || routes(&lab).len() == 2).await;

        lab.ip(0, "link del up0");
        until("no device, no route", || routes(&lab).is_empty()).await;
        assert!(told(&mut events) >= 1);
        plane.shutdown().await;
        assert!(!lab.ip(0, "rule").contains("lookup 220"));
    }));
}

#[test]
fn ten_thousand_changes_make_few_events_and_end_right() {
    const CHANGES: usize = 10_000;
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    lab.ip(0, "route add default via 192.0.2.254");
    let folder = tempfile::tempdir().unwrap();
    let batch = folder.path().join("batch");
    let mut text = String::new();
    for change in 0..CHANGES / 4 {
        let (high, low) = (change / 250, change % 250);
        writeln!(text, "route add 172.16.{high}.{low}/32 via 192.0.2.9").unwrap();
        writeln!(text, "addr add 172.20.{high}.{low}/32 dev up0").unwrap();
        writeln!(text, "addr del 172.20.{high}.{low}/32 dev up0").unwrap();
        writeln!(
            text,
            "route replace default via 192.0.2.{}",
            100 + change % 100
        )
        .unwrap();
    }
    writeln!(text, "route flush table 220").unwrap();
    writeln!(text, "route replace default via 192.0.2.77").unwrap();
    std::fs::write(&batch, text).unwrap();

    block_on(lab.within(0, async {
        let (plane, mut events) = plane().await;
        let begun = Instant::now();
        let cpu = cpu_time();
        let churn = lab.spawn(0, &format!("ip -batch {}", batch.display()));
        let status = tokio::task::spawn_blocking(move || {
            let mut churn = churn;
            churn.wait().unwrap()
        })
        .await
        .unwrap();
        assert!(status.success());
        until("the last gateway", || {
            routes(&lab)
                .iter()
                .filter(|r| r.contains("192.0.2.77"))
                .count()
                == 2
        })
        .await;

        let seconds = begun.elapsed().as_secs_f64();
        let told = told(&mut events);
        let spent = cpu_time() - cpu;
        println!("{CHANGES} changes in {seconds:.2} s: {told} events, {spent:?} of CPU time");
        assert!(told >= 1);
        assert!(
            (told as f64) <= seconds + 3.0,
            "{told} events in {seconds} s"
        );
        assert!(plane.reconcile(true).await.unwrap().is_clean());
        plane.shutdown().await;
    }));
}

#[test]
fn the_user_planes_routes_into_its_device_come_back_too() {
    if !may_use_namespaces() {
        return;
    }
    let lab = host();
    lab.ip(0, "route add default via 192.0.2.254");
    block_on(lab.within(0, async {
        let options = SocketOptions::for_tun_plane(DEFAULT_MARK);
        let socket = IkeSocket::bind(None, 4500, &options).unwrap();
        let (plane, mut events, _ike) = TunPlane::start(Arc::new(socket), &TunConfig::default())
            .await
            .unwrap();
        plane
            .apply(Op::InstallPolicies(Box::new(tunnel())))
            .await
            .unwrap();
        let device = format!("dev {} ", plane.device());
        let whole = || {
            let routes = routes(&lab);
            routes.len() == 2 && routes.iter().all(|route| route.contains(&device))
        };
        assert!(whole(), "{:?}", routes(&lab));

        lab.ip(0, "route flush table 220");
        until("the routes", whole).await;
        lab.ip(0, "rule del pref 220");
        until("the rule", || lab.ip(0, "rule").contains("lookup 220")).await;

        lab.ip(0, "addr del 10.1.0.1/24 dev lo");
        until("no source", || {
            whole() && routes(&lab).iter().all(|route| !route.contains("src"))
        })
        .await;
        lab.ip(0, "addr add 10.1.0.1/24 dev lo");
        until("the source again", || {
            routes(&lab)
                .iter()
                .filter(|r| r.ends_with("src 10.1.0.1"))
                .count()
                == 2
        })
        .await;
        until("the news of it", || told(&mut events) > 0).await;
        plane.shutdown().await;
        assert!(!lab.ip(0, "rule").contains("lookup 220"));
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
