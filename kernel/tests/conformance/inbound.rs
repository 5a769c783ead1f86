// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is let in.

use std::net::UdpSocket;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use swanherd_ipsec::plane::{PlaneEvent, PolicyAction, PolicySet, SaEntry, SaId};

use swanherd_kernel::DataPlane as _;

use super::bench::{
    Bed, Bench, PATIENCE, PORT, QUIET, SPI_IN, bind, child, child_to, datagram, network, outer,
    protect, receive, sa, sa_in, sa_out, shunt,
};
use super::packet::{Esp, Ip, udp};
use crate::common::OUTER;

/// What arrives at `socket`, as numbers that [`numbered`] sent.
async fn arrivals(socket: &UdpSocket) -> Vec<u64> {
    let mut seen = Vec::new();
    while let Some((data, _)) = receive(socket, QUIET).await {
        seen.push(u64::from_be_bytes(data.try_into().unwrap()));
    }
    seen
}

/// A packet whose inner datagram says its number.
fn numbered(seq: u64) -> Esp {
    Esp::new(SPI_IN, seq, datagram(7000, &seq.to_be_bytes()).build())
}

async fn bench_with<B: Bed>(entry: SaEntry) -> Bench<B> {
    let bench = Bench::<B>::start().await;
    bench.host.install(entry).await;
    bench.host.install(sa_out()).await;
    bench.host.install_set(child(1)).await;
    bench
}

pub(crate) async fn a_window_lets_late_packets_pass_once<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    for size in [1u64, 32, 64, 128, 4096] {
        bench
            .host
            .reinstall(SaEntry {
                replay_window: size as u32,
                ..sa_in()
            })
            .await;
        let top = 10_000;

        // Within the window the oldest passes, once; the one before does not; nor does zero.
        let last = top - size + 1;
        for seq in [top, last, last, top, last - 1, 1, 0, top + 1, last] {
            bench.inject(&numbered(seq));
        }

        let mut expected = vec![top, top + 1];
        if size > 1 {
            expected.insert(1, last);
        }
        assert_eq!(arrivals(&socket).await, expected, "{size}");
        let counters = bench.host.counters(sa_in().id()).await;
        assert_eq!(counters.packets, expected.len() as u64, "{size}");
        // Zero is refused without being a replay.
        let dropped = 9 - expected.len() as u64 - 1;
        assert_eq!(counters.replay_drops, dropped, "{size}");
        assert_eq!(counters.integrity_drops, 0);
    }
}

pub(crate) async fn the_first_packets_pass_once_whatever_the_window<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    for (size, esn) in [(5, true), (33, false), (33, true), (96, false), (100, true)] {
        let sa = SaEntry {
            replay_window: size,
            esn,
            ..sa_in()
        };
        bench.host.reinstall(sa).await;

        for seq in [1, 1, 2, 1, 2, 3, 3, 1, 2] {
            bench.inject(&Esp {
                esn,
                ..numbered(seq)
            });
        }

        assert_eq!(arrivals(&socket).await, [1, 2, 3], "{size} {esn}");
        let counters = bench.host.counters(sa_in().id()).await;
        assert_eq!(counters.replay_drops, 6, "{size} {esn}");
    }
}

pub(crate) async fn a_window_of_none_lets_everything_pass<B: Bed>() {
    let bench = bench_with::<B>(SaEntry {
        replay_window: 0,
        ..sa_in()
    })
    .await;
    let socket = bench.listen(7000).await;

    for seq in [5, 5, 1, 0, 9, 5] {
        bench.inject(&numbered(seq));
    }

    assert_eq!(arrivals(&socket).await, [5, 5, 1, 0, 9, 5]);
    assert_eq!(bench.host.counters(sa_in().id()).await.replay_drops, 0);
}

pub(crate) async fn extended_sequence_numbers_have_a_window<B: Bed>() {
    let bench = bench_with::<B>(SaEntry {
        esn: true,
        replay_window: 64,
        ..sa_in()
    })
    .await;
    let socket = bench.listen(7000).await;
    let esn = |seq| Esp {
        esn: true,
        ..numbered(seq)
    };

    bench.inject(&esn(100));
    bench.inject(&esn(37));
    bench.inject(&esn(37));
    // Far ahead, but within the same 2^32; then beyond them.
    bench.inject(&esn(0xffff_fff0));
    bench.inject(&esn(0x1_0000_0002));
    bench.inject(&esn(0xffff_fff5));
    bench.inject(&esn(0xffff_fff5));
    // Authentic under another upper half than the one that its lower half stands for.
    bench.inject(&esn(0x2_0000_0007));
    bench.inject(&esn(0x1_0000_0009));

    assert_eq!(
        arrivals(&socket).await,
        [
            100,
            37,
            0xffff_fff0,
            0x1_0000_0002,
            0xffff_fff5,
            0x1_0000_0009
        ]
    );
    let counters = bench.host.counters(sa_in().id()).await;
    assert_eq!((counters.replay_drops, counters.integrity_drops), (2, 1));
}

pub(crate) async fn damage_is_dropped_and_only_forgery_counted<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;

    let mut forged = numbered(1).seal();
    forged[20] ^= 1;
    bench.inject_raw(&forged);
    let mut forged = numbered(1).seal();
    *forged.last_mut().unwrap() ^= 1;
    bench.inject_raw(&forged);
    let unknown = Esp {
        spi: 0xc000_0099,
        ..numbered(1)
    };
    bench.inject(&unknown);
    let sealed = numbered(1).seal();
    bench.inject_raw(&sealed[..sealed.len() - 1]);
    bench.inject_raw(&sealed[..20]);
    // Padding that is longer than the packet; no payload at all; dummies, twice the same.
    let garbage = Esp {
        pad_len: Some(255),
        ..numbered(2)
    };
    bench.inject(&garbage);
    let empty = Esp {
        payload: Vec::new(),
        ..numbered(3)
    };
    bench.inject(&empty);
    let dummy = Esp {
        next_header: 59,
        ..numbered(4)
    };
    bench.inject(&dummy);
    bench.inject(&dummy);
    // What is authentic and no tunnelled packet.
    let other = Esp {
        next_header: 17,
        ..numbered(5)
    };
    bench.inject(&other);
    bench.inject_raw(&[0xff]);
    bench.inject(&numbered(6));

    assert_eq!(arrivals(&socket).await, [6]);
    let counters = bench.host.counters(sa_in().id()).await;
    // Two damaged ones and one cut short; the shortest had nothing to be authentic.
    assert_eq!((counters.replay_drops, counters.integrity_drops), (0, 3));
    // The one that was no tunnelled packet was processed by the SA, and so was the good one.
    assert_eq!(counters.packets, 2);
}

pub(crate) async fn what_came_by_an_sa_must_fit_its_policies<B: Bed>() {
    const OTHER: u32 = 0xc000_0044;
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    bench.lab.ip(0, "addr add 10.3.0.1/24 dev lo");
    bench
        .host
        .install(SaEntry {
            reqid: 2,
            ..sa(OTHER, 1, 0)
        })
        .await;
    bench
        .host
        .install_set(child_to(2, 2, network("10.2.7.0", 24)))
        .await;
    let bypass = shunt(3, PolicyAction::Bypass, network("10.2.0.64", 26));
    bench.host.install_set(bypass).await;
    let discard = PolicySet {
        priority: Some(9),
        ..shunt(4, PolicyAction::Discard, network("10.2.0.128", 26))
    };
    bench.host.install_set(discard).await;
    let from = |src: &str, seq: u64| -> Vec<u8> {
        let src = (src.parse().unwrap(), 6000);
        let dst = (super::bench::inner(0), 7000);
        udp(src, dst, &seq.to_be_bytes()).build()
    };

    // A stranger, the other child's network, what should have come in clear or not at all.
    for (src, seq) in [
        ("10.9.0.1", 1),
        ("10.2.7.1", 2),
        ("10.2.0.65", 3),
        ("10.2.0.130", 4),
        ("10.2.0.2", 5),
    ] {
        bench.inject(&Esp::new(SPI_IN, seq, from(src, seq)));
    }
    bench.inject(&Esp::new(OTHER, 1, from("10.2.0.2", 6)));
    bench.inject(&Esp::new(OTHER, 2, from("10.2.7.2", 7)));
    let outside: Ip = udp(
        ("10.2.0.2".parse().unwrap(), 6000),
        ("10.3.0.1".parse().unwrap(), 7000),
        &8u64.to_be_bytes(),
    );
    let third = bind(&bench.lab, 0, ("10.3.0.1", 7000)).await;
    bench.inject(&Esp::new(SPI_IN, 6, outside.build()));

    assert_eq!(arrivals(&socket).await, [5, 7]);
    assert!(arrivals(&third).await.is_empty());
    // The SAs did their part.
    assert_eq!(bench.host.counters(sa_in().id()).await.packets, 6);

    // A change of address leaves the policies behind until they are told.
    let elsewhere = "192.0.2.77".parse().unwrap();
    for moves_peer in [true, false] {
        let mut moved = child(1);
        if let PolicyAction::Protect { local, remote, .. } = &mut moved.action {
            *(if moves_peer { remote } else { local }) = elsewhere;
        }
        bench.host.install_set(moved).await;
        bench.inject(&Esp::new(SPI_IN, 20, from("10.2.0.2", 20)));
        assert!(arrivals(&socket).await.is_empty(), "{moves_peer}");
    }
    bench.host.install_set(child(1)).await;
    // Any request id will do.
    let any = PolicySet {
        action: protect(0, 0),
        ..child(1)
    };
    bench.host.install_set(any).await;
    bench.inject(&Esp::new(OTHER, 21, from("10.2.0.2", 21)));
    assert_eq!(arrivals(&socket).await, [21]);
}

#[allow(dead_code, reason = "not what every plane can do")]
pub(crate) async fn clear_text_that_should_have_been_protected_is_not_delivered<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    let bypass = shunt(3, PolicyAction::Bypass, network("10.2.0.64", 26));
    bench.host.install_set(bypass).await;
    let unselected = bind(&bench.lab, 1, ("10.2.9.1", 6000)).await;
    let bypassed = bind(&bench.lab, 1, ("10.2.0.65", 6000)).await;
    let selected = bind(&bench.lab, 1, ("10.2.0.1", 6000)).await;

    for (number, socket) in [(1u64, &selected), (2, &unselected), (3, &bypassed)] {
        let to = (super::bench::inner(0), 7000);
        socket.send_to(&number.to_be_bytes(), to).unwrap();
    }

    assert_eq!(arrivals(&socket).await, [2, 3]);
    bench.inject(&numbered(4));
    assert_eq!(arrivals(&socket).await, [4]);
}

pub(crate) async fn an_sa_belongs_to_one_address<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    bench.lab.ip(0, "addr add 192.0.2.5/24 dev veth");

    let to_other = ("192.0.2.5", PORT);
    bench.peer().send_to(&numbered(1).seal(), to_other).unwrap();
    bench.inject(&numbered(2));

    assert_eq!(arrivals(&socket).await, [2]);
    assert_eq!(bench.host.counters(sa_in().id()).await.packets, 1);
    let absent = SaId {
        dst: to_other.0.parse().unwrap(),
        ..sa_in().id()
    };
    assert_eq!(bench.host.plane.counters_of(absent).await, None);
}

pub(crate) async fn packets_of_a_new_address_are_reported_once<B: Bed>() {
    let mut bench = Bench::<B>::connected().await;
    let socket = bench.listen(7000).await;
    bench.inject(&numbered(1));
    let moved = bind(&bench.lab, 1, (OUTER[1], 4600)).await;
    let to = (OUTER[0], PORT);

    // A forger moves nobody.
    let mut forged = numbered(2).seal();
    forged[20] ^= 1;
    moved.send_to(&forged, to).unwrap();
    assert_eq!(bench.host.events_of(QUIET).await, []);
    for seq in 2..12 {
        moved.send_to(&numbered(seq).seal(), to).unwrap();
    }

    assert_eq!(arrivals(&socket).await, Vec::from_iter(1..12));
    let change = |port| PlaneEvent::MappingChange {
        id: sa_in().id(),
        addr: outer(1),
        port,
    };
    assert_eq!(bench.host.events_of(QUIET).await, [change(4600)]);
    let again = bind(&bench.lab, 1, (OUTER[1], 4700)).await;
    for seq in 12..14 {
        again.send_to(&numbered(seq).seal(), to).unwrap();
    }
    assert_eq!(bench.host.events_of(QUIET).await, [change(4700)]);
}

pub(crate) async fn traffic_classes_come_in_as_the_sa_says<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    // Sees the IP header.
    let raw = bench
        .lab
        .within(0, async {
            Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).unwrap()
        })
        .await;
    raw.set_nonblocking(true).unwrap();
    for (copy_ecn, copy_dscp_in) in [(true, false), (false, true), (true, true), (false, false)] {
        bench
            .host
            .reinstall(SaEntry {
                copy_ecn,
                copy_dscp_in,
                ..sa_in()
            })
            .await;
        let mut seq = 0;
        for outer_tos in [0u32, 0xb8, 0xb9, 0xbb, 0x03] {
            for inner_tos in [0u8, 0x28, 0x29, 0x2a, 0x2b] {
                SockRef::from(bench.peer()).set_tos_v4(outer_tos).unwrap();
                seq += 1;
                let inside = Ip {
                    tos: inner_tos,
                    ..datagram(7000, b"class")
                };
                bench.inject(&Esp::new(SPI_IN, seq, inside.build()));

                let got = raw_receive(&raw).await.expect("a packet").tos;

                let (ecn, dscp) = (inner_tos & 3, inner_tos & !3);
                let dscp = if copy_dscp_in {
                    outer_tos as u8 & !3
                } else {
                    dscp
                };
                let congested = copy_ecn && outer_tos & 3 == 3 && ecn != 0;
                let wanted = dscp | if congested { 3 } else { ecn };
                assert_eq!(
                    got, wanted,
                    "outer {outer_tos:#x} inner {inner_tos:#x} ecn {copy_ecn} dscp {copy_dscp_in}"
                );
            }
        }
    }
}

/// The next inner packet that a raw socket sees.
async fn raw_receive(socket: &Socket) -> Option<Ip> {
    let end = std::time::Instant::now() + PATIENCE;
    let mut buffer = [0; 2000];
    while std::time::Instant::now() < end {
        use std::io::Read as _;
        if let Ok(len) = (&mut &*socket).read(&mut buffer)
            && let Some(ip) = Ip::parse(&buffer[..len])
            && ip.udp().is_some_and(|(_, port, _)| port == 7000)
        {
            return Some(ip);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    None
}
