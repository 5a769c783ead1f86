// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Policies of the XFRM plane beside those of others, many of them, and what a crash leaves. Runs
//! on any kernel with XFRM.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::{
    Direction, Mode, Op, Outcome, PolicyAction, PolicySet, SaEntry, SaKeys,
};
use swanherd_ipsec::registry::EncryptionId;
use swanherd_ipsec::{Secret, TrafficSelector};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::audit::{Difference, Object, Owner, Remedy};
use swanherd_kernel::udp::{IkeSocket, SocketOptions};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};

mod common;

use common::{Lab, OUTER, block_on};

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn network(text: &str) -> TrafficSelector {
    let (network, len) = text.split_once('/').unwrap();
    TrafficSelector::network(addr(network), len.parse().unwrap()).unwrap()
}

fn set(id: u32, local: &str, remote: &str) -> PolicySet {
    PolicySet {
        routes: false,
        ..PolicySet::new(
            id,
            format!("lab/{id}"),
            vec![network(local)],
            vec![network(remote)],
            PolicyAction::Protect {
                mode: Mode::Tunnel,
                local: addr(OUTER[0]),
                remote: addr(OUTER[1]),
                reqid: id,
                spi: 0,
            },
        )
    }
}

fn install(set: PolicySet) -> Op {
    Op::InstallPolicies(Box::new(set))
}

/// Set `n` of many: one local network, and a remote one of its own.
fn numbered(n: u32) -> Op {
    let mut set = set(n + 1, "10.1.0.0/16", "10.2.0.0/24");
    let remote = Ipv4Addr::from_bits(0x0b00_0000 + (n << 8));
    set.remote = vec![TrafficSelector::network(remote.into(), 24).unwrap()];
    install(set)
}

async fn start(lab: &Lab, options: &XfrmOptions) -> XfrmPlane {
    let (plane, events) = lab
        .within(0, XfrmPlane::start(options.clone()))
        .await
        .unwrap();
    // Nothing here reads events, and none of them matters here.
    drop(events);
    plane
}

fn ledger(folder: &Path) -> XfrmOptions {
    XfrmOptions {
        ledger: Some(folder.join("ledger")),
        ..XfrmOptions::default()
    }
}

/// IPv4's and IPv6's thresholds, as `ip` tells them.
fn thresholds(lab: &Lab) -> String {
    lab.ip(0, "-s -s xfrm policy count")
        .lines()
        .filter(|line| line.contains("threshold"))
        .collect()
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "no {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn forwarded_packets_have_a_policy_of_their_own_if_asked_for() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let plane = start(&lab, &XfrmOptions::default()).await;
        let set = PolicySet {
            fwd_out: true,
            ..set(1, "10.1.1.0/24", "10.2.1.0/24")
        };

        plane.apply(install(set)).await.unwrap();

        let policies = lab.ip(0, "xfrm policy list dir fwd");
        let outbound = policies
            .split("src ")
            .find(|policy| policy.starts_with("10.1.1.0/24 dst 10.2.1.0/24"))
            .unwrap();
        // As charon does: behind the policy of what comes from the tunnel, and without template.
        assert!(outbound.contains("dir fwd priority 375424"), "{policies}");
        assert!(!outbound.contains("tmpl"), "{policies}");
        assert!(plane.reconcile(true).await.unwrap().is_clean());
        plane.apply(Op::RemovePolicies(1)).await.unwrap();
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn policies_of_sockets_and_of_other_kinds_are_not_ours() {
    if !common::may_use_namespaces() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let lab = Lab::single();
        let options = ledger(folder.path());
        let plane = start(&lab, &options).await;
        let socket = SocketOptions {
            bypass: true,
            ..SocketOptions::default()
        };
        let _socket = lab
            .within(0, async { IkeSocket::bind(None, 500, &socket) })
            .await
            .unwrap();
        plane
            .apply(install(set(1, "10.1.0.0/24", "10.2.0.0/24")))
            .await
            .unwrap();
        // The same selector, but bound to an interface; and one of the other kind.
        lab.ip(
            0,
            "xfrm policy add dir out src 10.1.0.0/24 dst 10.2.0.0/24 dev lo action block",
        );
        lab.ip(
            0,
            "xfrm policy add dir out src 10.1.0.0/24 dst 10.2.0.0/24 ptype sub action block",
        );

        let listed = plane.policies().await.unwrap();
        let audit = plane.reconcile(false).await.unwrap();

        let count = |owner: &Owner| listed.iter().filter(|p| p.owner == *owner).count();
        assert!(count(&Owner::Socket) >= 2, "{listed:?}");
        assert_eq!(count(&Owner::Child("lab/1".to_owned())), 3, "{listed:?}");
        assert_eq!(count(&Owner::Alien), 2, "{listed:?}");
        assert!(audit.is_clean(), "{audit:?}");
        assert_eq!((audit.policies, audit.alien_policies), (5, 2));

        drop(plane);
        let next = start(&lab, &options).await;
        let audit = next.reconcile(true).await.unwrap();
        assert_eq!((audit.policies, audit.alien_policies), (2, 2));
        let left = lab.ip(0, "xfrm policy list dir out");
        assert_eq!(left.matches("action block").count(), 2, "{left}");
    });
}

#[test]
fn someone_elses_policy_in_place_of_ours_is_told_and_left() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let plane = start(&lab, &XfrmOptions::default()).await;
        for id in [1, 2, 3] {
            let remote = format!("10.2.{id}.0/24");
            let outcome = plane.apply(install(set(id, "10.1.0.0/24", &remote))).await;
            assert_eq!(outcome, Ok(Outcome::Done));
        }
        lab.ip(
            0,
            "xfrm policy update dir out src 10.1.0.0/24 dst 10.2.1.0/24 tmpl src 192.0.2.1 \
             dst 192.0.2.9 proto esp reqid 4711 mode tunnel",
        );
        lab.ip(
            0,
            "xfrm policy delete dir in src 10.2.2.0/24 dst 10.1.0.0/24",
        );
        lab.ip(
            0,
            "xfrm policy update dir fwd src 10.2.3.0/24 dst 10.1.0.0/24 priority 9 action block",
        );

        let dry = plane.reconcile(true).await.unwrap();
        let audit = plane.reconcile(false).await.unwrap();

        let found: Vec<_> = audit
            .findings
            .iter()
            .map(|finding| {
                let owner = finding.owner.as_deref();
                (finding.difference, &finding.remedy, owner)
            })
            .collect();
        assert_eq!(
            found,
            [
                (Difference::Missing, &Remedy::Installed, Some("lab/2")),
                (Difference::InTheWay, &Remedy::None, Some("lab/1")),
                (Difference::Changed, &Remedy::Installed, Some("lab/3")),
            ],
            "{audit:?}"
        );
        assert_eq!(dry.findings.len(), 3);
        assert!(dry.findings.iter().all(|f| f.remedy == Remedy::None));
        let words = &audit.findings[1].reason;
        assert!(words.contains("reqid 4711"), "{words}");
        let out = lab.ip(0, "xfrm policy list dir out");
        assert!(out.contains("reqid 4711"), "{out}");
        let again = plane.reconcile(false).await.unwrap();
        assert_eq!(again.findings.len(), 1, "{again:?}");
        assert!(matches!(again.findings[0].object, Object::Policy(_)));
        // It goes neither with a change of ours nor with ours.
        let mut changed = set(1, "10.1.0.0/24", "10.2.1.0/24");
        changed.priority = Some(7);
        let refused = plane.apply(install(changed)).await.unwrap_err();
        assert!(refused.reason.contains("reqid 4711"), "{refused}");
        plane.shutdown().await;
        let left = lab.ip(0, "xfrm policy");
        assert_eq!(lab.xfrm_entries(0), (0, 1), "{left}");
        assert!(left.contains("reqid 4711"), "{left}");
    });
}

#[test]
fn a_batch_answers_each_operation_in_order() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let plane = start(&lab, &XfrmOptions::default()).await;
        lab.ip(
            0,
            "xfrm policy add dir in src 10.2.3.0/24 dst 10.1.0.0/24 tmpl proto esp reqid 77 mode tunnel",
        );
        let spi = || Op::AllocSpi {
            src: addr(OUTER[1]),
            dst: addr(OUTER[0]),
            reqid: 1,
        };
        let of = |id: u32| install(set(id, "10.1.0.0/24", &format!("10.2.{id}.0/24")));
        let trap = |id: u32| {
            let mut set = set(id, "10.1.0.0/24", "10.2.1.0/24");
            set.trap = true;
            if let PolicyAction::Protect { reqid, .. } = &mut set.action {
                *reqid = 1;
            }
            install(set)
        };

        let outcomes = plane
            .apply_all(vec![
                of(1),
                spi(),
                // Of the same policies as the first.
                trap(9),
                // Meets the alien one.
                of(3),
                of(4),
                spi(),
                Op::RemovePolicies(4),
                Op::RemovePolicies(1),
                Op::RemovePolicies(1234),
            ])
            .await;

        let done = Ok(Outcome::Done);
        assert_eq!(outcomes.len(), 9);
        for (place, outcome) in outcomes.iter().enumerate() {
            match place {
                1 | 5 => assert!(matches!(outcome, Ok(Outcome::Spi(_))), "{outcome:?}"),
                3 => {
                    let refused = outcome.as_ref().unwrap_err();
                    assert_eq!(refused.errno, Some(libc::EEXIST));
                    assert!(refused.reason.contains("reqid 77"), "{refused}");
                }
                _ => assert_eq!(*outcome, done, "{place}"),
            }
        }
        // The trap's three and the alien one.
        assert_eq!(lab.xfrm_entries(0), (2, 4));
        let out = lab.ip(0, "xfrm policy list dir out");
        assert!(out.contains("priority 375424"), "{out}");
        assert!(plane.reconcile(true).await.unwrap().is_clean());
        plane.shutdown().await;
        assert_eq!(lab.xfrm_entries(0), (0, 1));
    });
}

#[test]
fn thousands_of_policies_come_and_go_in_linear_time() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let mut times = Vec::new();
        for count in [1000, 10_000] {
            let lab = Lab::single();
            let plane = start(&lab, &XfrmOptions::default()).await;
            let begun = Instant::now();
            for outcome in plane.apply_all((0..count).map(numbered).collect()).await {
                assert_eq!(outcome, Ok(Outcome::Done));
            }
            let added = begun.elapsed();
            let begun = Instant::now();
            let listed = plane.policies().await.unwrap();
            assert_eq!(listed.len(), 3 * count as usize);
            let listing = begun.elapsed();
            assert!(plane.reconcile(true).await.unwrap().is_clean());
            until("thresholds for /16 and /24", || {
                thresholds(&lab).contains("16") && thresholds(&lab).contains("24")
            })
            .await;
            let begun = Instant::now();
            let removals = (1..=count).map(Op::RemovePolicies).collect();
            for outcome in plane.apply_all(removals).await {
                assert_eq!(outcome, Ok(Outcome::Done));
            }
            let removed = begun.elapsed();
            assert_eq!(lab.xfrm_entries(0), (0, 0));
            println!("{count} sets: add {added:?}, list {listing:?}, remove {removed:?}");
            times.push([added, listing, removed]);
        }
        for (what, (few, many)) in ["add", "list", "remove"]
            .into_iter()
            .zip(times[0].into_iter().zip(times[1]))
        {
            // Quadratic growth would be a hundredfold; a busy machine is worth a factor of 4.
            let bound = few.max(Duration::from_millis(5)) * 40;
            assert!(many < bound, "{what}: {few:?} grew to {many:?}");
        }
    });
}

#[test]
fn what_others_flush_comes_back_and_what_a_crash_left_goes() {
    if !common::may_use_namespaces() {
        return;
    }
    const COUNT: u32 = 1000;
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let lab = Lab::single();
        let options = ledger(folder.path());
        let plane = start(&lab, &options).await;
        for outcome in plane.apply_all((0..COUNT).map(numbered).collect()).await {
            assert_eq!(outcome, Ok(Outcome::Done));
        }
        lab.ip(0, "xfrm policy flush");
        lab.ip(0, "xfrm policy add dir out src 10.9.0.0/24 dst 10.8.0.0/24");

        let audit = plane.reconcile(false).await.unwrap();

        assert_eq!(audit.findings.len(), 3 * COUNT as usize);
        for finding in &audit.findings {
            assert_eq!(finding.difference, Difference::Missing);
            assert_eq!(finding.remedy, Remedy::Installed);
        }
        assert_eq!(lab.xfrm_entries(0), (0, 3 * COUNT as usize + 1));
        assert!(plane.reconcile(true).await.unwrap().is_clean());

        // A crash.
        drop(plane);
        let next = start(&lab, &options).await;
        assert_eq!(lab.xfrm_entries(0), (0, 1));
        assert!(next.reconcile(true).await.unwrap().is_clean());
        next.shutdown().await;
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    });
}

#[test]
fn hash_thresholds_follow_the_prefixes_and_are_put_back() {
    if !common::may_use_namespaces() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let lab = Lab::single();
        let options = ledger(folder.path());
        let before = thresholds(&lab);
        let plane = start(&lab, &options).await;
        assert_eq!(thresholds(&lab), before);

        plane.apply(numbered(1)).await.unwrap();
        until("thresholds", || thresholds(&lab) != before).await;
        let followed = thresholds(&lab);
        let wide = set(1000, "10.0.0.0/8", "10.2.0.0/20");
        plane.apply(install(wide)).await.unwrap();
        until("wider thresholds", || thresholds(&lab) != followed).await;

        // A crash, and a run that may not set any.
        drop(plane);
        let next = XfrmOptions {
            hash_thresholds: false,
            ..options.clone()
        };
        let plane = start(&lab, &next).await;
        assert_eq!(thresholds(&lab), before);
        plane.apply(numbered(1)).await.unwrap();
        plane.shutdown().await;

        let plane = start(&lab, &options).await;
        plane.apply(numbered(1)).await.unwrap();
        until("thresholds", || thresholds(&lab) != before).await;
        plane.shutdown().await;
        assert_eq!(thresholds(&lab), before);

        // What an operator has chosen stays.
        lab.ip(0, "xfrm policy set hthresh4 20 20");
        let chosen = thresholds(&lab);
        let plane = start(&lab, &options).await;
        plane.apply(numbered(1)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        plane.shutdown().await;
        assert_eq!(thresholds(&lab), chosen);
    });
}

/// An SA with everything that the kernel checks by direction.
fn sa(direction: Direction, esn: bool, window: u32) -> SaEntry {
    let (src, dst) = match direction {
        Direction::Out => (addr(OUTER[0]), addr(OUTER[1])),
        Direction::In | Direction::Fwd => (addr(OUTER[1]), addr(OUTER[0])),
    };
    SaEntry {
        esn,
        replay_window: window,
        copy_df: false,
        copy_ecn: false,
        copy_dscp_out: false,
        copy_dscp_in: true,
        ..SaEntry::tunnel(
            direction,
            0xcafe_0001,
            [src, dst],
            1,
            SaKeys {
                encryption: EncryptionId::AesGcm16,
                encryption_key: Secret::new(vec![7; 20]),
                integrity: None,
            },
        )
    }
}

/// Kernels that know directions of SAs check what goes with each before they look for ciphers, so
/// that any refusal but "invalid" means that the message is right.
#[test]
fn no_kernel_finds_an_sa_of_either_direction_invalid() {
    if !common::may_use_namespaces() {
        return;
    }
    block_on(async {
        let lab = Lab::single();
        let plane = start(&lab, &XfrmOptions::default()).await;
        for direction in [Direction::In, Direction::Out] {
            for (esn, window) in [
                (false, 0),
                (false, 32),
                (false, 512),
                (true, 32),
                (true, 512),
            ] {
                let entry = sa(direction, esn, window);
                let id = entry.id();
                let outcome = plane.apply(Op::InstallSa(Box::new(entry))).await;
                if let Err(error) = outcome {
                    let without_esp = [libc::ENOSYS, libc::EPROTONOSUPPORT, libc::ENOENT];
                    assert!(
                        error
                            .errno
                            .is_some_and(|errno| without_esp.contains(&errno)),
                        "{direction:?}, ESN {esn}, window {window}: {error}"
                    );
                }
                plane.apply(Op::RemoveSa(id)).await.unwrap();
            }
        }
        assert_eq!(lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn a_ledger_that_cannot_be_kept_is_an_error_that_names_it() {
    if !common::may_use_namespaces() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    block_on(async {
        let lab = Lab::single();
        let options = ledger(&folder.path().join("file"));
        let refused = lab
            .within(0, XfrmPlane::start(options))
            .await
            .map(|_| ())
            .unwrap_err();
        assert!(refused.to_string().contains("file/ledger"), "{refused}");
    });
}
