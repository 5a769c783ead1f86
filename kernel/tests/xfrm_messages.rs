// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XFRM plane against any kernel with XFRM, also one without ESP: policies, reservations,
//! acquires, routes, events.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::net::IpAddr;
use std::time::Duration;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, Op, Outcome, PlaneEvent, PolicyAction, PolicySet, SaId};
use swanherd_kernel::audit::Difference;
use swanherd_kernel::route::{self, Router};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use swanherd_kernel::{DataPlane as _, PlaneKind};
use tokio::sync::mpsc::Receiver;

mod common;

use common::{INNER, Lab, OUTER, block_on};

async fn start(lab: &Lab) -> (XfrmPlane, Receiver<PlaneEvent>) {
    lab.within(0, XfrmPlane::start(XfrmOptions::default()))
        .await
        .unwrap()
}

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn network(text: &str) -> TrafficSelector {
    let (network, len) = text.split_once('/').unwrap();
    TrafficSelector::network(addr(network), len.parse().unwrap()).unwrap()
}

fn set(id: u32, reqid: u32, local: &str, remote: &str) -> PolicySet {
    PolicySet::new(
        id,
        format!("lab/{id}"),
        vec![network(local)],
        vec![network(remote)],
        PolicyAction::Protect {
            mode: Mode::Tunnel,
            local: addr(OUTER[0]),
            remote: addr(OUTER[1]),
            reqid,
            spi: 0,
        },
    )
}

fn install(set: PolicySet) -> Op {
    Op::InstallPolicies(Box::new(set))
}

#[test]
fn a_reserved_spi_is_in_range_and_can_be_given_back() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        let op = Op::AllocSpi {
            src: addr(OUTER[1]),
            dst: addr(OUTER[0]),
            reqid: 9,
        };

        let Outcome::Spi(spi) = plane.apply(op).await.unwrap() else {
            panic!("an SPI was asked for");
        };

        assert!((0xc000_0000..=0xcfff_ffff).contains(&spi));
        assert_eq!(lab.xfrm_entries(0), (1, 0));
        let id = SaId {
            spi,
            dst: addr(OUTER[0]),
        };
        assert!(plane.counters().await.unwrap().is_empty());
        assert_eq!(plane.apply(Op::RemoveSa(id)).await, Ok(Outcome::Done));
        assert_eq!(plane.apply(Op::RemoveSa(id)).await, Ok(Outcome::Done));
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn a_trap_gives_way_to_the_sa_policy_and_comes_back() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        let priority = || lab.ip(0, "xfrm policy list dir out");
        let trap = PolicySet {
            trap: true,
            ..set(1, 4, "10.1.0.0/24", "10.2.0.0/24")
        };

        plane.apply(install(trap)).await.unwrap();
        assert!(priority().contains("priority 375424"), "{}", priority());
        plane
            .apply(install(set(2, 4, "10.1.0.0/24", "10.2.0.0/24")))
            .await
            .unwrap();
        assert!(priority().contains("priority 375423"), "{}", priority());
        assert_eq!(lab.xfrm_entries(0), (0, 3));
        plane.apply(Op::RemovePolicies(2)).await.unwrap();
        assert!(priority().contains("priority 375424"), "{}", priority());
        plane.apply(Op::RemovePolicies(1)).await.unwrap();
        plane.apply(Op::RemovePolicies(1)).await.unwrap();
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn a_set_that_meets_an_alien_policy_leaves_nothing_and_the_alien_stays() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        lab.ip(
            0,
            "xfrm policy add dir in src 10.2.0.0/24 dst 10.1.0.0/24 tmpl proto esp reqid 77 mode tunnel",
        );

        let refused = plane
            .apply(install(set(1, 4, "10.1.0.0/24", "10.2.0.0/24")))
            .await
            .unwrap_err();

        assert_eq!(refused.errno, Some(libc::EEXIST));
        assert!(refused.reason.contains("reqid 77"), "{refused}");
        assert_eq!(lab.xfrm_entries(0), (0, 1));
        assert!(plane.reconcile(true).await.unwrap().is_clean());
    });
}

#[test]
fn a_shunt_that_meets_an_alien_policy_shows_in_each_audit_until_it_stands() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        let shunt = PolicySet {
            action: PolicyAction::Bypass,
            routes: false,
            ..set(1, 4, "10.1.0.0/24", "10.2.0.0/24")
        };
        let alien = "dir in src 10.2.0.0/24 dst 10.1.0.0/24";
        lab.ip(0, &format!("xfrm policy add {alien} action block"));

        plane.apply(install(shunt.clone())).await.unwrap_err();

        let audit = plane.reconcile(false).await.unwrap();
        assert_eq!(audit.findings.len(), 1, "{audit:?}");
        assert_eq!(audit.findings[0].difference, Difference::InTheWay);
        assert_eq!(audit.findings[0].owner.as_deref(), Some("lab/1"));
        lab.ip(0, &format!("xfrm policy delete {alien}"));
        let audit = plane.reconcile(false).await.unwrap();
        assert_eq!(audit.findings[0].difference, Difference::Missing);
        plane.apply(install(shunt)).await.unwrap();
        assert!(plane.reconcile(true).await.unwrap().is_clean());
    });
}

#[test]
fn policies_of_a_run_whose_ledger_is_lost_are_taken_over() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let trap = PolicySet {
            trap: true,
            ..set(1, 4, "10.1.0.0/24", "10.2.0.0/24")
        };
        let (earlier, _events) = start(&lab).await;
        earlier.apply(install(trap.clone())).await.unwrap();
        drop(earlier);

        let (plane, _events) = start(&lab).await;
        assert_eq!(lab.xfrm_entries(0), (0, 3), "nobody knows whose they are");
        plane.apply(install(trap)).await.unwrap();

        assert!(plane.reconcile(true).await.unwrap().is_clean());
        plane.shutdown().await;
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn two_children_cannot_have_one_policy_unless_interfaces_tell_them_apart() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        let all = |id, reqid, if_id| PolicySet {
            if_id_in: if_id,
            if_id_out: if_id,
            ..set(id, reqid, "0.0.0.0/0", "0.0.0.0/0")
        };
        plane.apply(install(all(1, 4, 0))).await.unwrap();

        let refused = plane.apply(install(all(2, 5, 0))).await.unwrap_err();
        plane.apply(install(all(2, 5, 42))).await.unwrap();

        assert!(refused.reason.contains("lab/1"), "{refused}");
        assert_eq!(lab.xfrm_entries(0), (0, 6));
        plane.shutdown().await;
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn a_changed_set_replaces_its_policies() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let (plane, _events) = start(&lab).await;
        plane
            .apply(install(set(1, 4, "10.1.0.0/24", "10.2.0.0/24")))
            .await
            .unwrap();

        plane
            .apply(install(set(1, 5, "10.1.0.0/24", "10.3.0.0/24")))
            .await
            .unwrap();

        let policies = lab.ip(0, "xfrm policy");
        assert!(!policies.contains("10.2.0.0"), "{policies}");
        assert_eq!(policies.matches("reqid 5").count(), 3);
    });
}

#[test]
fn a_packet_that_hits_a_trap_raises_an_acquire() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        let (plane, mut events) = start(&lab).await;
        let trap = PolicySet {
            trap: true,
            ..set(1, 4, "10.1.0.0/24", "10.2.0.0/24")
        };
        plane.apply(install(trap)).await.unwrap();

        lab.exec(0, "ping -c 1 -W 1 10.2.0.1");

        let event = tokio::time::timeout(Duration::from_secs(10), events.recv())
            .await
            .unwrap()
            .unwrap();
        let PlaneEvent::Acquire {
            reqid,
            local,
            remote,
        } = event
        else {
            panic!("{event:?}");
        };
        assert_eq!(reqid, 4);
        assert_eq!((local.start, local.end), (addr(INNER[0]), addr(INNER[0])));
        assert_eq!((remote.start, remote.end), (addr(INNER[1]), addr(INNER[1])));
    });
}

#[test]
fn acquires_of_other_daemons_are_counted_and_kept_away() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        let (plane, mut events) = start(&lab).await;
        lab.ip(
            0,
            "xfrm policy add dir out src 10.1.0.0/24 dst 192.0.2.2 tmpl src 192.0.2.1 dst 192.0.2.2 proto esp reqid 99 mode tunnel",
        );

        lab.exec(0, "ping -c 1 -W 1 -I 10.1.0.1 192.0.2.2");
        while plane.event_counts().acquires.foreign == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }

        assert!(events.try_recv().is_err());
    });
}

#[test]
fn lost_events_are_noticed_and_later_ones_still_arrive() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        let (plane, mut events) = start(&lab).await;
        let trap = PolicySet {
            trap: true,
            ..set(1, 4, "10.1.0.0/24", "10.2.0.0/24")
        };
        plane.apply(install(trap)).await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let batch = folder.path().join("batch");
        let mut lines = String::new();
        for i in 0..30_000 {
            lines += &format!(
                "xfrm policy update dir fwd src 10.9.{}.{} dst 10.8.0.1 tmpl proto esp mode tunnel\n",
                i % 200,
                i % 250
            );
        }
        std::fs::write(&batch, lines).unwrap();

        // The event task cannot run while this blocks its only thread.
        lab.ip(0, &format!("-batch {}", batch.display()));
        while plane.event_counts().overruns == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        lab.exec(0, "ping -c 1 -W 1 10.2.0.1");

        let event = tokio::time::timeout(Duration::from_secs(10), events.recv())
            .await
            .unwrap()
            .unwrap();
        assert!(
            matches!(event, PlaneEvent::Acquire { reqid: 4, .. }),
            "{event:?}"
        );
    });
}

#[test]
fn routes_come_and_go_with_the_sets_that_need_them() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        let (plane, _events) = start(&lab).await;
        let table = || lab.ip(0, "route show table 220");
        let narrow = |id| PolicySet {
            mark_out: Some(swanherd_ipsec::plane::Mark {
                value: id,
                mask: u32::MAX,
            }),
            ..set(id, id, "10.1.0.0/24", "10.2.0.0/24")
        };

        plane.apply(install(narrow(1))).await.unwrap();
        let first = table();
        let sharing = PolicySet {
            mark_in: narrow(2).mark_out,
            ..narrow(2)
        };
        plane.apply(install(sharing)).await.unwrap();
        plane.apply(Op::RemovePolicies(1)).await.unwrap();
        let shared = table();
        plane.apply(Op::RemovePolicies(2)).await.unwrap();
        let none = table();

        assert!(
            first.contains("10.2.0.0/24 via 192.0.2.2 dev veth"),
            "{first}"
        );
        assert!(first.contains("src 10.1.0.1"), "{first}");
        assert_eq!(shared, first);
        assert_eq!(none, "");
        assert_eq!(lab.ip(0, "rule show table 220").lines().count(), 1);
        plane.shutdown().await;
        assert_eq!(lab.ip(0, "rule show table 220"), "");
    });
}

#[test]
fn sets_with_an_interface_and_without_own_address_get_no_route() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        let (plane, _events) = start(&lab).await;
        let bound = PolicySet {
            if_id_out: 3,
            ..set(1, 1, "10.1.0.0/24", "10.2.0.0/24")
        };
        let off = PolicySet {
            routes: false,
            ..set(2, 2, "10.1.0.0/24", "10.3.0.0/24")
        };
        let foreign = set(3, 3, "10.77.0.0/24", "10.4.0.0/24");
        for set in [bound, off, foreign] {
            plane.apply(install(set)).await.unwrap();
        }
        assert_eq!(lab.ip(0, "rule show table 220"), "");

        let mut bypass = set(4, 0, "10.1.0.0/24", "10.5.0.0/24");
        bypass.action = PolicyAction::Bypass;
        plane.apply(install(bypass)).await.unwrap();

        let table = lab.ip(0, "route show table 220");
        assert!(table.starts_with("throw 10.5.0.0/24"), "{table}");
    });
}

#[test]
fn a_later_run_removes_policies_and_routes_of_a_crashed_one() {
    if !common::may_use_namespaces() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = XfrmOptions {
        ledger: Some(folder.path().join("ledger")),
        ..XfrmOptions::default()
    };
    block_on(async {
        let lab = Lab::pair();
        let begin = || lab.within(0, XfrmPlane::start(options.clone()));
        let (crashed, _events) = begin().await.unwrap();
        crashed
            .apply(install(set(1, 4, "10.1.0.0/24", "10.2.0.0/24")))
            .await
            .unwrap();
        lab.ip(
            0,
            "xfrm policy add dir out src 10.7.0.0/24 dst 10.8.0.0/24 action block",
        );
        lab.ip(0, "route add 10.66.0.0/24 dev veth table 220");
        assert_eq!(lab.xfrm_entries(0), (0, 4));
        drop(crashed);

        let (_next, _events) = begin().await.unwrap();

        assert_eq!(lab.xfrm_entries(0), (0, 1));
        let table = lab.ip(0, "route show table 220");
        assert!(table.starts_with("10.66.0.0/24"), "{table}");
        assert_eq!(table.lines().count(), 1);
    });
}

#[test]
fn lookups_do_not_follow_the_tunnels_own_routes() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::pair();
        lab.ip(0, "route add default via 192.0.2.2");
        let (plane, _events) = start(&lab).await;
        let before = plane.router().next_hop(addr("198.51.100.1")).await.unwrap();
        plane
            .apply(install(set(1, 4, "10.1.0.0/24", "198.51.100.0/24")))
            .await
            .unwrap();

        let router = lab.within(0, async { Router::open() }).await.unwrap();
        let after = router.next_hop(addr("198.51.100.1")).await.unwrap();
        let source = lab.within(0, route::source_for(addr("198.51.100.1"))).await;
        let own = router.local_addresses().await.unwrap();

        assert_eq!(before, after);
        assert_eq!(after.unwrap().gateway, Some(addr("192.0.2.2")));
        assert_eq!(source, Some(addr("192.0.2.1")));
        let own: Vec<IpAddr> = own.iter().map(|local| local.addr).collect();
        assert_eq!(own, [addr("10.1.0.1"), addr("192.0.2.1")]);
        assert_eq!(router.source_for(addr("2001:db8::1")).await.unwrap(), None);
    });
}

#[test]
fn a_probe_says_which_plane_and_why_and_leaves_nothing() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();

        let found = lab.within(0, swanherd_kernel::select::probe()).await;

        match found.kind {
            PlaneKind::Xfrm => assert!(found.reason.contains("takes ESP SAs"), "{found:?}"),
            // The kernel's own words, not only an errno.
            PlaneKind::Tun => assert!(found.reason.contains("not found ("), "{found:?}"),
        }
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}
