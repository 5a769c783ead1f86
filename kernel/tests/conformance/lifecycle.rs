// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SAs and policies come, change and go.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::{
    Direction, Op, Outcome, PolicyAction, PolicySet, SaEntry, SaId, UdpEncap,
};
use swanherd_kernel::audit::{Owner, Verdict};

use swanherd_kernel::DataPlane as _;

use super::bench::{
    Bed, Bench, Host, PATIENCE, PORT, SPI_IN, SPI_OUT, bind, child, datagram, network, outer,
    receive, sa, sa_in, sa_out, shunt,
};
use super::packet::Esp;
use crate::common::{Lab, OUTER};

const OTHER: u32 = 0xc000_0033;
const TO: (&str, u16) = ("10.2.0.1", 7000);

fn alloc() -> Op {
    Op::AllocSpi {
        src: outer(1),
        dst: outer(0),
        reqid: 1,
    }
}

async fn spi<B: Bed>(host: &Host<B>) -> u32 {
    match host.apply(alloc()).await.unwrap() {
        Outcome::Spi(spi) => spi,
        Outcome::Done => panic!("an SPI was asked for"),
    }
}

fn reserved(spi: u32) -> SaId {
    SaId { spi, dst: outer(0) }
}

pub(crate) async fn spis_are_reserved_and_released<B: Bed>() {
    let bench = Bench::<B>::start().await;
    let host = &bench.host;
    let mut spis = BTreeSet::new();
    for _ in 0..50 {
        let spi = spi(host).await;
        assert!(spi > 255 && spis.insert(spi), "{spi}");
    }
    assert!(host.plane.counters().await.unwrap().is_empty());
    assert!(host.plane.reconcile(true).await.unwrap().is_clean());

    let first = *spis.first().unwrap();
    assert_eq!(host.plane.counters_of(reserved(first)).await, None);
    host.install(sa(first, 1, 0)).await;
    assert_eq!(host.counters(reserved(first)).await.packets, 0);
    for spi in &spis {
        host.remove(reserved(*spi)).await;
    }

    assert!(host.plane.counters().await.unwrap().is_empty());
    // What was released may be had again.
    let last = *spis.last().unwrap();
    host.install(sa(last, 1, 0)).await;
    host.remove(reserved(last)).await;
    assert_eq!(bench.lab.xfrm_entries(0), (0, 0));
}

pub(crate) async fn a_second_sa_of_one_name_is_refused<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    bench.inject(&Esp::new(SPI_IN, 1, datagram(7000, b"one").build()));
    assert!(receive(&socket, PATIENCE).await.is_some());

    for entry in [sa_in(), sa_out()] {
        let again = bench.host.apply(Op::InstallSa(Box::new(entry))).await;
        let refusal = again.unwrap_err().to_string();
        assert!(refusal.contains("c00000"), "{refusal}");
    }

    // The first ones go on where they were.
    let (esp, _) = bench.probe(TO).await.unwrap().protected();
    assert_eq!(esp.seq, 2);
    bench.inject(&Esp::new(SPI_IN, 1, datagram(7000, b"old").build()));
    bench.inject(&Esp::new(SPI_IN, 2, datagram(7000, b"two").build()));
    assert_eq!(receive(&socket, PATIENCE).await.unwrap().0, b"two");
    let counters = bench.host.counters(sa_in().id()).await;
    assert_eq!((counters.packets, counters.replay_drops), (2, 1));
}

pub(crate) async fn removing_what_is_not_there_succeeds<B: Bed>() {
    let bench = Bench::<B>::start().await;
    bench.host.remove(reserved(0xc000_0077)).await;
    bench.host.done(Op::RemovePolicies(77)).await;
    let moved = Op::UpdateSa {
        id: reserved(0xc000_0077),
        src: outer(1),
        dst: outer(0),
        encap: sa_in().encap,
    };
    assert!(bench.host.apply(moved).await.is_err());

    // What is there goes once.
    bench.host.install(sa_in()).await;
    for _ in 0..2 {
        bench.host.remove(sa_in().id()).await;
    }
    assert!(bench.host.plane.counters().await.unwrap().is_empty());
}

pub(crate) async fn the_newest_sa_sends_until_it_goes<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));

    bench.host.install(sa(OTHER, 0, 0)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(OTHER));
    bench.host.remove(sa(OTHER, 0, 0).id()).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));

    // Both inbound ones receive, whatever their order.
    let socket = bench.listen(7000).await;
    bench.host.install(sa(OTHER, 1, 0)).await;
    for spi in [OTHER, SPI_IN] {
        bench.inject(&Esp::new(spi, 1, datagram(7000, b"in").build()));
        assert!(receive(&socket, PATIENCE).await.is_some());
    }
    bench.host.remove(sa_in().id()).await;
    bench.inject(&Esp::new(SPI_IN, 2, datagram(7000, b"gone").build()));
    bench.inject(&Esp::new(OTHER, 2, datagram(7000, b"there").build()));
    assert_eq!(receive(&socket, PATIENCE).await.unwrap().0, b"there");
}

pub(crate) async fn a_moved_sa_keeps_its_numbers_and_counters<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    for seq in 1..=3 {
        bench.leaves_by(TO).await;
        bench.inject(&Esp::new(SPI_IN, seq, datagram(7000, b"x").build()));
        assert!(receive(&socket, PATIENCE).await.is_some());
    }
    let there = "192.0.2.77";
    bench.lab.ip(1, "addr add 192.0.2.77/24 dev veth");
    let moved = bind(&bench.lab, 1, (there, 4600)).await;

    // First another port, then another address as well.
    for (number, peer) in [(0, outer(1)), (1, there.parse().unwrap())] {
        let before = |id: SaId| SaId {
            dst: if number == 1 { outer(1) } else { id.dst },
            ..id
        };
        let update = |entry: SaEntry, src, dst, src_port, dst_port| Op::UpdateSa {
            id: before(entry.id()),
            src,
            dst,
            encap: Some(UdpEncap { src_port, dst_port }),
        };
        let out = update(sa_out(), outer(0), peer, PORT, 4600);
        let mut into = update(sa_in(), peer, outer(0), 4600, PORT);
        if let Op::UpdateSa { id, .. } = &mut into {
            *id = sa_in().id();
        }
        bench.host.done(out).await;
        bench.host.done(into).await;
        let mut set = child(1);
        if let PolicyAction::Protect { remote, .. } = &mut set.action {
            *remote = peer;
        }
        bench.host.install_set(set).await;
        let seen = bench.probe(TO).await.unwrap();
        assert_eq!(std::net::IpAddr::from(seen.outer.dst), peer);
        assert_eq!(seen.outer.udp().unwrap().1, 4600);
        // Numbers may be left out, but none is used twice.
        assert!(seen.protected().0.seq > 3 + number);
    }
    let old = Esp::new(SPI_IN, 2, datagram(7000, b"old").build()).seal();
    moved.send_to(&old, (OUTER[0], PORT)).unwrap();
    let new = Esp::new(SPI_IN, 4, datagram(7000, b"new").build()).seal();
    moved.send_to(&new, (OUTER[0], PORT)).unwrap();

    assert_eq!(receive(&socket, PATIENCE).await.unwrap().0, b"new");
    let incoming = bench.host.counters(sa_in().id()).await;
    assert_eq!((incoming.packets, incoming.replay_drops), (4, 1));
    let moved = SaId {
        spi: SPI_OUT,
        dst: there.parse().unwrap(),
    };
    assert_eq!(bench.host.counters(moved).await.packets, 5);
    assert_eq!(bench.host.plane.counters_of(sa_out().id()).await, None);
    assert!(bench.host.plane.reconcile(true).await.unwrap().is_clean());
}

pub(crate) async fn batches_answer_each_operation<B: Bed>() {
    let bench = Bench::<B>::start().await;
    let ops = vec![
        alloc(),
        Op::InstallSa(Box::new(sa_in())),
        Op::InstallSa(Box::new(sa_out())),
        Op::InstallSa(Box::new(sa_out())),
        Op::InstallPolicies(Box::new(child(1))),
        Op::RemoveSa(reserved(0xc000_0077)),
        Op::RemovePolicies(99),
    ];

    let answers = bench.host.plane.apply_all(ops).await;

    assert_eq!(answers.len(), 7);
    assert!(matches!(answers[0], Ok(Outcome::Spi(_))), "{answers:?}");
    assert!(answers[3].is_err());
    for index in [1, 2, 4, 5, 6] {
        assert_eq!(answers[index], Ok(Outcome::Done), "{index}");
    }
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
}

pub(crate) async fn what_is_listed_is_what_was_asked_for<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let bypass = PolicySet {
        owner: "lab/lan".to_owned(),
        ..shunt(2, PolicyAction::Bypass, network("10.2.5.0", 24))
    };
    bench.host.install_set(bypass).await;
    let trap = PolicySet {
        trap: true,
        ..super::bench::child_to(3, 3, network("10.2.8.0", 24))
    };
    bench.host.install_set(trap).await;

    let listed = bench.host.plane.policies().await.unwrap();
    let audit = bench.host.plane.reconcile(true).await.unwrap();

    let mut found: Vec<_> = listed
        .iter()
        .filter(|policy| policy.owner != Owner::Socket)
        .map(|policy| {
            let (src, dst) = (policy.key.src.0, policy.key.dst.0);
            let other = if policy.key.direction == Direction::Out {
                dst
            } else {
                src
            };
            (
                other.to_string(),
                policy.key.direction,
                policy.priority,
                policy.owner.clone(),
            )
        })
        .collect();
    found.sort();
    let mut expected = Vec::new();
    for direction in [Direction::In, Direction::Out, Direction::Fwd] {
        for (network, priority, owner) in [
            ("10.2.0.0", 375_423, Owner::Child("lab/1".to_owned())),
            ("10.2.5.0", 175_423, Owner::Shunt("lab/lan".to_owned())),
            ("10.2.8.0", 375_424, Owner::Trap("lab/3".to_owned())),
        ] {
            expected.push((network.to_owned(), direction, priority, owner));
        }
    }
    expected.sort();
    assert_eq!(found, expected);
    let out = listed
        .iter()
        .find(|p| p.key.direction == Direction::Out && p.owner.kind() == "child")
        .unwrap();
    let Verdict::Protect {
        reqid, endpoints, ..
    } = out.verdict
    else {
        panic!("{out:?}");
    };
    assert_eq!((reqid, endpoints), (1, (outer(0), outer(1))));
    assert!(audit.is_clean(), "{audit:?}");
    assert_eq!((audit.sas, audit.policies), (2, 9));
    assert_eq!((audit.alien_sas, audit.alien_policies), (0, 0));
    assert!(bench.host.plane.reconcile(false).await.unwrap().is_clean());
}

pub(crate) async fn nothing_is_left_after_the_end<B: Bed>() {
    let lab = Lab::pair();
    let state = || {
        let interfaces: Vec<String> = lab
            .ip(0, "-br link")
            .lines()
            .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
            .collect();
        let rest = [
            "rule",
            "-6 rule",
            "route show table all",
            "-6 route show table all",
            "xfrm state",
        ]
        .map(|what| lab.ip(0, what))
        .concat();
        // Link-local addresses take their time to become usable.
        let rest = rest
            .lines()
            .filter(|line| !line.contains("fe80:") && !line.contains("ff00:"));
        interfaces.join(" ") + &rest.collect::<Vec<_>>().join("\n")
    };
    let before = state();
    let host = Host::<B>::start(&lab, 0).await;
    host.install(sa_in()).await;
    host.install(sa_out()).await;
    host.install_set(child(1)).await;
    let bypass = shunt(2, PolicyAction::Bypass, network("10.2.5.0", 24));
    host.install_set(bypass).await;
    spi(&host).await;
    assert_ne!(state(), before);

    host.plane.shutdown().await;

    assert_eq!(state(), before);
    assert_eq!(lab.xfrm_entries(0), (0, 0));
}
