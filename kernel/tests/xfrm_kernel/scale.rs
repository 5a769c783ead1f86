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
            // Quadratic growth would be a hundredfold; a busy machine is worth a factor of 3.
            let bound = small.max(Duration::from_millis(10)) * factor * 3;
            assert!(large < bound, "{what}: {small:?} grew to {large:?}");
        }
    });
}
