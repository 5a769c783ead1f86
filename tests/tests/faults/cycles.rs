// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Thirty tunnels go up and down again and again, and leave nothing behind.

use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Node, Plane, Star, StarPlan, peer};

use crate::support::{
    View, assert_audit_is_clean, assert_same, initiate, resident, terminate, times,
};

const TUNNELS: u16 = 30;
/// How much more memory the daemon may have after all cycles than after the first few, in kB.
const GROWTH: u64 = 4 * 1024;

#[test]
fn cycles_of_thirty_tunnels_leave_nothing_behind() {
    cycles(Plane::Kernel, peer(), TUNNELS, times(5, 100));
}

/// Goes through `count` cycles over a star of tunnels, and compares what the kernel has.
pub(crate) fn cycles(plane: Plane, responders: Daemon, tunnels: u16, count: u32) {
    let mut star = Star::start(&StarPlan {
        responders,
        ..StarPlan::new(plane, tunnels)
    });
    let pristine = View::of(&star.gateway.namespace);
    star.start_gateway();
    star.gateway
        .wait_until("all tunnels", 60, |n| up(n) == usize::from(tunnels));
    let first_up = View::masked(&star.gateway.namespace);
    down_all(&star);
    let first_down = [&star.gateway, &star.responders[0]].map(|n| View::of(&n.namespace));

    let begun = Instant::now();
    let mut settled = None;
    for cycle in 1..=count {
        up_all(&star);
        if cycle == count {
            let last_up = View::masked(&star.gateway.namespace);
            assert_same("tunnels that are up", &first_up, &last_up, &star.gateway);
            assert_audit_is_clean(&star.gateway);
        }
        down_all(&star);
        if cycle == (count / 4).max(2) {
            settled = Some(resident(&star.gateway));
        }
    }
    report(count, tunnels, begun.elapsed());

    for (node, before) in [&star.gateway, &star.responders[0]].iter().zip(&first_down) {
        let after = View::of(&node.namespace);
        assert_same("tunnels that are down", before, &after, node);
        assert_audit_is_clean(node);
    }
    let (settled, finally) = (settled.unwrap_or(0), resident(&star.gateway));
    eprintln!("memory: {settled} kB, at the end {finally} kB");
    assert!(
        finally <= settled + GROWTH,
        "{finally} kB after {count} cycles, {settled} kB before\n{}",
        star.gateway.log()
    );
    star.gateway.stop();
    let after = View::of(&star.gateway.namespace);
    assert_same("a daemon that ended", &pristine, &after, &star.gateway);
}

fn report(count: u32, tunnels: u16, took: Duration) {
    let each = took.as_secs_f32() / count as f32;
    eprintln!("{count} cycles of {tunnels} tunnels, {each:.2} s each");
}

fn up(node: &Node) -> usize {
    node.children("INSTALLED").len()
}

fn up_all(star: &Star) {
    let mut vici = star.gateway.vici();
    for name in &star.names {
        if let Err(error) = initiate(&mut vici, name, "net") {
            panic!("{name}: {error}\n{}", star.gateway.log());
        }
    }
    assert_eq!(up(&star.gateway), star.names.len());
}

fn down_all(star: &Star) {
    let mut vici = star.gateway.vici();
    for name in &star.names {
        if let Err(error) = terminate(&mut vici, name) {
            panic!("{name}: {error}\n{}", star.gateway.log());
        }
    }
    star.gateway
        .wait_until("no SA", 10, |node| node.sas().is_empty());
}
