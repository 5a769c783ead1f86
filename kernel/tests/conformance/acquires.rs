// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets that ask for an SA.

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Op, PlaneEvent, PolicySet, SaEntry};

use super::bench::{
    Bed, Bench, QUIET, SPI_OUT, child, child_to, inner, network, sa_in, sa_out, udp_port,
};

fn trap(id: u32) -> PolicySet {
    PolicySet {
        trap: true,
        ..child(id)
    }
}

fn acquire(reqid: u32, ports: (u16, u16), remote: &str) -> PlaneEvent {
    PlaneEvent::Acquire {
        reqid,
        local: udp_port(TrafficSelector::host(inner(0).into()), ports.0),
        remote: udp_port(network(remote, 32), ports.1),
    }
}

pub(crate) async fn many_packets_of_many_flows_raise_one_acquire<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    bench.host.install_set(trap(1)).await;

    for flow in 0..20u16 {
        for _ in 0..10 {
            let to = (inner(1), 7001 + flow);
            bench.send_from((inner(0), 5001 + flow), to, b"hello").await;
        }
    }

    let events = bench.host.events_of(2 * QUIET).await;
    assert_eq!(events, [acquire(1, (5001, 7001), "10.2.0.1")]);
    assert!(bench.sniffer.next(QUIET).await.is_none());
}

pub(crate) async fn policies_of_one_request_id_share_an_acquire<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    bench.host.install_set(trap(1)).await;
    let other = PolicySet {
        trap: true,
        ..child_to(2, 1, network("10.2.7.0", 24))
    };
    bench.host.install_set(other).await;
    let third = PolicySet {
        trap: true,
        ..child_to(3, 3, network("10.2.8.0", 24))
    };
    bench.host.install_set(third).await;

    for to in ["10.2.0.1", "10.2.7.1", "10.2.8.1", "10.2.7.1"] {
        bench.send((to, 7000), 10).await;
    }

    let events = bench.host.events_of(2 * QUIET).await;
    assert_eq!(
        events,
        [
            acquire(1, (5000, 7000), "10.2.0.1"),
            acquire(3, (5000, 7000), "10.2.8.1")
        ]
    );
}

pub(crate) async fn an_sa_ends_the_acquires_and_its_end_begins_them_again<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    bench.host.install_set(trap(1)).await;
    bench.send(("10.2.0.1", 7000), 10).await;
    let first = bench.host.event().await;

    bench.host.install(sa_in()).await;
    bench.host.install(sa_out()).await;
    bench.host.install_set(child(2)).await;
    let sent = bench.leaves_by(("10.2.0.1", 7000)).await;
    let silence = bench.host.events_of(QUIET).await;

    bench.host.done(Op::RemovePolicies(2)).await;
    bench.host.remove(sa_out().id()).await;
    bench.host.remove(sa_in().id()).await;
    // Though it comes soon after the first, it is not the same: the kernel asks only once.
    bench.send(("10.2.0.1", 7000), 10).await;
    let again = bench.host.event().await;

    assert_eq!(first, acquire(1, (5000, 7000), "10.2.0.1"));
    assert_eq!(sent, Some(SPI_OUT));
    assert_eq!(silence, []);
    assert_eq!(again, first);
    assert!(bench.sniffer.next(QUIET).await.is_none());
}

/// The peer has less than the trap is for: an SA of another request id takes what there is.
pub(crate) async fn what_a_narrower_child_leaves_to_its_trap_is_asked_for_at_once<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    let wide = PolicySet {
        trap: true,
        ..child_to(1, 1, network("10.2.0.0", 16))
    };
    bench.host.install_set(wide).await;
    bench.send(("10.2.0.1", 7000), 10).await;
    let first = bench.host.event().await;

    for entry in [sa_in(), sa_out()] {
        bench.host.install(SaEntry { reqid: 2, ..entry }).await;
    }
    let elsewhere = child_to(3, 2, network("10.2.9.0", 24));
    bench.host.install_set(elsewhere).await;
    bench.send(("10.2.0.1", 7000), 10).await;
    let meanwhile = bench.host.events_of(QUIET).await;
    let narrow = child_to(2, 2, network("10.2.0.0", 24));
    bench.host.install_set(narrow).await;
    let sent = bench.leaves_by(("10.2.0.1", 7000)).await;
    bench.send(("10.2.7.1", 7000), 10).await;
    let rest = bench.host.event().await;

    assert_eq!(first, acquire(1, (5000, 7000), "10.2.0.1"));
    assert_eq!(meanwhile, []);
    assert_eq!(sent, Some(SPI_OUT));
    assert_eq!(rest, acquire(1, (5000, 7000), "10.2.7.1"));
    assert!(bench.sniffer.next(QUIET).await.is_none());
}
