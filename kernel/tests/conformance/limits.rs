// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lifetimes of SAs.

use std::time::{Duration, Instant};

use swanherd_ipsec::plane::{Lifetime, PlaneEvent, SaEntry, SaId};

use swanherd_kernel::DataPlane as _;

use super::bench::{
    Bed, Bench, PATIENCE, QUIET, SPI_IN, SPI_OUT, child, datagram, receive, sa_in, sa_out,
};
use super::packet::Esp;

fn expire(id: SaId, hard: bool) -> PlaneEvent {
    PlaneEvent::Expire { id, hard }
}

async fn bench_with<B: Bed>(lifetime: Lifetime) -> Bench<B> {
    let bench = Bench::<B>::start().await;
    for entry in [sa_in(), sa_out()] {
        bench.host.install(SaEntry { lifetime, ..entry }).await;
    }
    bench.host.install_set(child(1)).await;
    bench
}

pub(crate) async fn limits_in_packets_rekey_once_and_then_end_the_sa<B: Bed>() {
    let lifetime = Lifetime {
        soft_packets: Some(2),
        hard_packets: Some(4),
        ..Lifetime::default()
    };
    let mut bench = bench_with::<B>(lifetime).await;
    let (incoming, outgoing) = (sa_in().id(), sa_out().id());

    // What was processed before is compared, so the third packet is the first beyond.
    for _ in 0..2 {
        assert_eq!(bench.leaves_by(("10.2.0.1", 7000)).await, Some(SPI_OUT));
    }
    assert_eq!(bench.host.events_of(QUIET).await, []);
    for _ in 0..2 {
        assert_eq!(bench.leaves_by(("10.2.0.1", 7000)).await, Some(SPI_OUT));
    }
    assert_eq!(bench.host.events_of(QUIET).await, [expire(outgoing, false)]);
    assert!(bench.is_stopped(("10.2.0.1", 7000)).await);
    assert_eq!(bench.host.event().await, expire(outgoing, true));
    assert_eq!(bench.host.plane.counters_of(outgoing).await, None);
    assert!(bench.is_stopped(("10.2.0.1", 7000)).await);
    // The policy asks for another SA by now.
    bench.host.events_of(QUIET).await;

    let socket = bench.listen(7000).await;
    for seq in 1..=6 {
        bench.inject(&Esp::new(SPI_IN, seq, datagram(7000, b"in").build()));
    }
    for _ in 0..4 {
        assert!(receive(&socket, PATIENCE).await.is_some());
    }
    assert!(receive(&socket, QUIET).await.is_none());
    assert_eq!(bench.host.event().await, expire(incoming, false));
    assert_eq!(bench.host.event().await, expire(incoming, true));
    assert_eq!(bench.host.events_of(QUIET).await, []);
    assert!(bench.host.plane.counters().await.unwrap().is_empty());
    assert!(bench.host.plane.reconcile(true).await.unwrap().is_clean());
}

pub(crate) async fn limits_in_octets_count_what_was_before<B: Bed>() {
    let lifetime = Lifetime {
        // Packets of 48 octets.
        soft_bytes: Some(96),
        hard_bytes: Some(97),
        ..Lifetime::default()
    };
    let mut bench = bench_with::<B>(lifetime).await;
    let outgoing = sa_out().id();

    for _ in 0..2 {
        assert!(bench.leaves_by(("10.2.0.1", 7000)).await.is_some());
    }
    assert_eq!(bench.host.events_of(QUIET).await, []);
    assert!(bench.leaves_by(("10.2.0.1", 7000)).await.is_some());
    assert_eq!(bench.host.event().await, expire(outgoing, false));
    assert_eq!(bench.host.counters(outgoing).await.bytes, 3 * 48);
    assert!(bench.is_stopped(("10.2.0.1", 7000)).await);
    assert_eq!(bench.host.event().await, expire(outgoing, true));
}

pub(crate) async fn limits_in_time_need_no_traffic<B: Bed>() {
    let began = Instant::now();
    let lifetime = Lifetime {
        soft_time: Some(Duration::from_secs(1)),
        hard_time: Some(Duration::from_secs(2)),
        ..Lifetime::default()
    };
    let mut bench = bench_with::<B>(lifetime).await;

    let mut events = Vec::new();
    for _ in 0..4 {
        events.push(bench.host.event().await);
    }

    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1500), "{took:?}");
    for id in [sa_in().id(), sa_out().id()] {
        let of_one: Vec<_> = events
            .iter()
            .filter(|event| [expire(id, false), expire(id, true)].contains(event))
            .cloned()
            .collect();
        assert_eq!(of_one, [expire(id, false), expire(id, true)]);
    }
    assert!(bench.host.plane.counters().await.unwrap().is_empty());
    assert!(bench.is_stopped(("10.2.0.1", 7000)).await);
}

pub(crate) async fn one_soft_expiry_whatever_limit_comes_first<B: Bed>() {
    let lifetime = Lifetime {
        soft_time: Some(Duration::from_secs(1)),
        soft_packets: Some(1),
        soft_bytes: Some(1),
        ..Lifetime::default()
    };
    let mut bench = bench_with::<B>(lifetime).await;
    for _ in 0..3 {
        bench.leaves_by(("10.2.0.1", 7000)).await;
    }

    let events = bench.host.events_of(Duration::from_millis(2500)).await;
    bench.leaves_by(("10.2.0.1", 7000)).await;
    bench.inject(&Esp::new(SPI_IN, 1, datagram(7000, b"x").build()));
    bench.inject(&Esp::new(SPI_IN, 2, datagram(7000, b"x").build()));

    // One by packets, one by time.
    assert_eq!(
        events,
        [expire(sa_out().id(), false), expire(sa_in().id(), false)]
    );
    assert_eq!(bench.host.events_of(QUIET).await, []);
}
