// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many CHILD SAs: they come, are listed, and go in time that grows with their number and no
//! faster.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Direction, Op, PolicyAction, PolicySet, SaEntry};
use swanherd_kernel::DataPlane as _;

use crate::common::block_on;
use crate::hosts::{GCM, Hosts, done, entry, outer, policies};

/// The SAs and policies of child `n`, as the daemon asks for them.
fn child(n: u32) -> [Op; 3] {
    let sa = |direction, src, dst, base: u32| {
        Op::InstallSa(Box::new(SaEntry {
            direction,
            reqid: n + 1,
            ..entry(&GCM, src, dst, base + n)
        }))
    };
    let network = Ipv4Addr::from_bits(0x0b00_0000 + (n << 8));
    let mut set = PolicySet {
        id: n + 1,
        remote: vec![TrafficSelector::network(network.into(), 24).unwrap()],
        routes: false,
        ..policies(0, 0xd000_0000 + n)
    };
    if let PolicyAction::Protect { reqid, .. } = &mut set.action {
        *reqid = n + 1;
    }
    [
        sa(Direction::In, outer(1), outer(0), 0xc000_0000),
        sa(Direction::Out, outer(0), outer(1), 0xd000_0000),
        Op::InstallPolicies(Box::new(set)),
    ]
}

/// Times to install, count and remove `count` children.
async fn times(count: u32) -> [Duration; 3] {
    let hosts = Hosts::start().await;
    let plane = &hosts.planes[0];
    let begun = Instant::now();
    for outcome in plane.apply_all((0..count).flat_map(child).collect()).await {
        done(outcome);
    }
    let installed = begun.elapsed();

    // The event task reads its copies of the changes between the first of these.
    let mut counted = Duration::MAX;
    for _ in 0..3 {
        let begun = Instant::now();
        let counters = plane.counters().await.unwrap();
        let listed = plane.policies().await.unwrap();
        counted = counted.min(begun.elapsed());
        assert_eq!(counters.len(), 2 * count as usize);
        assert_eq!(listed.len(), 3 * count as usize);
    }
    assert!(plane.reconcile(true).await.unwrap().is_clean());

    let begun = Instant::now();
    plane.shutdown().await;
    let removed = begun.elapsed();
    assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    [installed, counted, removed]
}

#[test]
fn children_come_and_go_in_linear_time() {
    let (few, factor) = match std::env::var_os("SWANHERD_LONG") {
        Some(_) => (1000, 10),
        None => (100, 10),
    };
    block_on(async {
        times(10).await;
        let small = times(few).await;
        let large = times(few * factor).await;
        for (what, (small, large)) in ["install", "list", "remove"]
            .into_iter()
            .zip(small.into_iter().zip(large))
        {
            println!("{what}: {few} in {small:?}, {} in {large:?}", few * factor);
            // Quadratic growth would be a hundredfold; a busy machine is worth a factor of 5.
            let bound = small.max(Duration::from_millis(10)) * factor * 5;
            assert!(large < bound, "{what}: {small:?} grew to {large:?}");
        }
    });
}

#[test]
fn an_overrun_of_events_while_sas_are_installed_loses_none() {
    const COUNT: u32 = 400;
    let folder = tempfile::tempdir().unwrap();
    let batch = folder.path().join("batch");
    let lines: String = (0..20_000)
        .map(|i| {
            format!(
                "xfrm policy update dir fwd src 10.9.{}.{} dst 10.8.0.1 tmpl proto esp mode tunnel\n",
                i % 200,
                i % 250
            )
        })
        .collect();
    std::fs::write(&batch, lines).unwrap();
    block_on(async {
        let mut hosts = Hosts::start().await;
        // More events than the socket holds, before the event task has a chance to read any.
        hosts.lab.ip(0, &format!("-batch {}", batch.display()));
        let plane = &hosts.planes[0];
        for outcome in plane.apply_all((0..COUNT).flat_map(child).collect()).await {
            done(outcome);
        }
        let begun = Instant::now();
        while plane.event_counts().overruns == 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "no overrun");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }

        assert!(plane.reconcile(true).await.unwrap().is_clean());
        assert_eq!(plane.counters().await.unwrap().len(), 2 * COUNT as usize);
        assert!(hosts.events[0].try_recv().is_err());
    });
}
