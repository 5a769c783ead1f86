// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What SAs count.

use std::time::{SystemTime, UNIX_EPOCH};

use super::bench::{Bed, Bench, PATIENCE, SPI_IN, datagram, receive, sa_in, sa_out};
use super::packet::{Esp, HEADERS};

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

pub(crate) async fn octets_are_those_of_inner_packets<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    let sizes = [1, 2, 3, 4, 100, 1200];

    for (size, seq) in sizes.into_iter().zip(1..) {
        bench.send(("10.2.0.1", 7000), size).await;
        let (esp, ip) = bench.sniffer.next(PATIENCE).await.unwrap().protected();
        assert_eq!(esp.seq, seq);
        assert_eq!(ip.udp().unwrap().2.len(), size);
        let inside = datagram(7000, &vec![1; size]).build();
        bench.inject(&Esp::new(SPI_IN, seq, inside));
        assert_eq!(receive(&socket, PATIENCE).await.unwrap().0.len(), size);
    }

    let octets = sizes.iter().map(|size| (size + HEADERS) as u64).sum();
    for id in [sa_in().id(), sa_out().id()] {
        let counters = bench.host.counters(id).await;
        assert_eq!((counters.packets, counters.bytes), (6, octets));
        assert_eq!((counters.replay_drops, counters.integrity_drops), (0, 0));
    }
}

/// Nor is what lies behind an inner packet: padding for the sake of confidentiality (RFC 4303
/// section 2.7) is counted, since only the inner header tells it from the packet.
pub(crate) async fn padding_is_not_counted<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    let mut padded = datagram(7000, b"padded").build();
    let whole = padded.len() as u64 + 30;
    padded.resize(padded.len() + 30, 0);

    bench.inject(&Esp::new(SPI_IN, 1, datagram(7000, b"five5").build()));
    bench.inject(&Esp::new(SPI_IN, 2, padded));

    assert_eq!(receive(&socket, PATIENCE).await.unwrap().0, b"five5");
    assert_eq!(receive(&socket, PATIENCE).await.unwrap().0, b"padded");
    let counters = bench.host.counters(sa_in().id()).await;
    assert_eq!(counters.bytes, HEADERS as u64 + 5 + whole);
}

pub(crate) async fn use_is_remembered<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let (incoming, outgoing) = (sa_in().id(), sa_out().id());
    let unused = [incoming, outgoing].map(|id| bench.host.counters(id));
    for counters in unused {
        assert_eq!(counters.await.last_used, 0);
    }
    let began = now();

    bench.leaves_by(("10.2.0.1", 7000)).await;
    let between = bench.host.counters(incoming).await;
    bench.inject(&Esp::new(SPI_IN, 1, datagram(7000, b"x").build()));
    let received = bench.host.until(incoming, |c| c.packets == 1).await;
    let sent = bench.host.counters(outgoing).await;

    assert_eq!(between.last_used, 0);
    for counters in [received, sent] {
        // The kernel's coarse clock may lag behind.
        assert!((began.saturating_sub(1)..=now()).contains(&counters.last_used));
    }
}
