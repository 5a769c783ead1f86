// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic through tunnels.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use socket2::SockRef;
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::{Op, SaEntry, SaId, SaKeys};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

use super::bench::{
    Bed, Bench, Host, PATIENCE, PORT, bind, child_of, inner, lab, receive, sa, sa_out,
};
use super::packet::HEADERS;
use crate::common::{INNER, Lab};

/// Two hosts with a plane each.
struct Pair<B: Bed> {
    lab: Lab,
    hosts: [Host<B>; 2],
}

const FORTH: u32 = 0xc000_0100;
const BACK: u32 = 0xc000_0200;

impl<B: Bed> Pair<B> {
    async fn start() -> Self {
        let lab = lab();
        let hosts = [Host::start(&lab, 0).await, Host::start(&lab, 1).await];
        Self { lab, hosts }
    }

    /// Installs SAs both ways, the receiver's first; generation `number`.
    async fn connect(&self, number: u32, keys: &SaKeys, adjust: impl Fn(&mut SaEntry)) {
        let entry = |spi, from, at| {
            let mut entry = SaEntry {
                keys: keys.clone(),
                ..sa(spi + number, from, at)
            };
            adjust(&mut entry);
            entry
        };
        for at in [1, 0] {
            let host = &self.hosts[at];
            host.install(entry(FORTH, 0, at)).await;
            host.install(entry(BACK, 1, at)).await;
            host.install_set(child_of(at, 1)).await;
        }
    }

    async fn disconnect(&self, number: u32) {
        for host in &self.hosts {
            host.done(Op::RemovePolicies(1)).await;
            for (spi, from) in [(FORTH, 0), (BACK, 1)] {
                host.remove(sa(spi + number, from, 0).id()).await;
            }
        }
    }

    fn ids(number: u32) -> [SaId; 2] {
        [(FORTH, 0), (BACK, 1)].map(|(spi, from)| sa(spi + number, from, 0).id())
    }
}

fn gcm() -> SaKeys {
    keys_of(EncryptionId::AesGcm16, 20, None)
}

fn keys_of(
    encryption: EncryptionId,
    key_len: usize,
    integrity: Option<(IntegrityId, usize)>,
) -> SaKeys {
    let octets = |len: usize| Secret::new((0..len).map(|i| i as u8 ^ 0x5a).collect());
    SaKeys {
        encryption,
        encryption_key: octets(key_len),
        integrity: integrity.map(|(id, len)| (id, octets(len))),
    }
}

pub(crate) async fn every_suite_carries_traffic_both_ways<B: Bed>() {
    let pair = Pair::<B>::start().await;
    let sockets = [
        bind(&pair.lab, 0, (INNER[0], 7000)).await,
        bind(&pair.lab, 1, (INNER[1], 7000)).await,
    ];
    use EncryptionId::{AesCbc, AesGcm16, ChaCha20Poly1305, Null};
    use IntegrityId::{HmacSha1_96, HmacSha2_256_128, HmacSha2_384_192, HmacSha2_512_256};
    let suites = [
        (AesGcm16, 20, None),
        (AesGcm16, 36, None),
        (ChaCha20Poly1305, 36, None),
        (AesCbc, 16, Some((HmacSha1_96, 20))),
        (AesCbc, 24, Some((HmacSha2_384_192, 48))),
        (AesCbc, 32, Some((HmacSha2_256_128, 32))),
        (AesCbc, 16, Some((HmacSha2_512_256, 64))),
        (Null, 0, Some((HmacSha2_256_128, 32))),
    ];
    for (number, (encryption, key_len, integrity)) in (0..).zip(suites) {
        for esn in [false, true] {
            let number = 2 * number + u32::from(esn);
            let keys = keys_of(encryption, key_len, integrity);
            pair.connect(number, &keys, |sa| {
                sa.esn = esn;
                sa.replay_window = 64;
            })
            .await;

            // Of every length of padding.
            let sizes = 100..117;
            for size in sizes.clone() {
                for from in [0, 1] {
                    let data = vec![size as u8; size];
                    let to = (INNER[1 - from], 7000);
                    sockets[from].send_to(&data, to).unwrap();
                    let got = receive(&sockets[1 - from], PATIENCE).await;
                    assert_eq!(got.unwrap().0, data, "{encryption} esn {esn}");
                }
            }

            let octets: usize = sizes.clone().map(|size| size + HEADERS).sum();
            for host in &pair.hosts {
                for id in Pair::<B>::ids(number) {
                    let counters = host.counters(id).await;
                    assert_eq!(counters.packets, sizes.len() as u64);
                    assert_eq!(counters.bytes, octets as u64);
                }
            }
            pair.disconnect(number).await;
        }
    }
}

pub(crate) async fn bursts_pass_both_ways<B: Bed>() {
    const OCTETS: usize = 1 << 20;
    let pair = Pair::<B>::start().await;
    pair.connect(0, &gcm(), |sa| sa.replay_window = 128).await;

    for from in [0, 1] {
        let listener = pair
            .lab
            .within(1 - from, async {
                TcpListener::bind((INNER[1 - from], 0)).unwrap()
            })
            .await;
        let to = listener.local_addr().unwrap();
        let data: Vec<u8> = (0..OCTETS).map(|i| (i * 7 / 5) as u8).collect();
        let expected = data.clone();
        let receiver = std::thread::spawn(move || {
            let mut received = Vec::new();
            let mut stream = listener.accept().unwrap().0;
            stream.read_to_end(&mut received).unwrap();
            received == expected
        });
        let socket = pair
            .lab
            .within(from, async {
                let kind = socket2::Type::STREAM;
                socket2::Socket::new(socket2::Domain::IPV4, kind, None).unwrap()
            })
            .await;
        let sender = std::thread::spawn(move || {
            let local = std::net::SocketAddr::new(inner(from).into(), 0);
            socket.bind(&local.into()).unwrap();
            socket.connect(&to.into()).unwrap();
            TcpStream::from(socket).write_all(&data).unwrap();
        });
        sender.join().unwrap();
        assert!(receiver.join().unwrap());
    }

    for host in &pair.hosts {
        let [forth, back] = Pair::<B>::ids(0);
        let (forth, back) = (host.counters(forth).await, host.counters(back).await);
        assert!(forth.bytes > OCTETS as u64 && back.bytes > OCTETS as u64);
        assert_eq!((forth.integrity_drops, back.integrity_drops), (0, 0));
        assert_eq!((forth.replay_drops, back.replay_drops), (0, 0));
    }
}

pub(crate) async fn large_datagrams_pass_whole<B: Bed>() {
    let pair = Pair::<B>::start().await;
    // For one port only, which later fragments do not show.
    pair.connect(0, &gcm(), |_| {}).await;
    for at in [0, 1] {
        let mut set = child_of(at, 1);
        set.local = vec![super::bench::udp_port(set.local[0], 7000)];
        set.remote = vec![super::bench::udp_port(set.remote[0], 7000)];
        pair.hosts[at].install_set(set).await;
    }
    let sockets = [
        bind(&pair.lab, 0, (INNER[0], 7000)).await,
        bind(&pair.lab, 1, (INNER[1], 7000)).await,
    ];

    for size in [1300, 1400, 1473, 3000, 20_000] {
        for from in [0, 1] {
            let data: Vec<u8> = (0..size).map(|i| (i * 3 / 2) as u8).collect();
            let to = (INNER[1 - from], 7000);
            sockets[from].send_to(&data, to).unwrap();
            let got = receive(&sockets[1 - from], PATIENCE).await;
            assert_eq!(got.expect("a datagram").0, data, "{size}");
        }
    }
}

/// Whoever is told that a tunnel is up may use it at once.
pub(crate) async fn the_first_packets_after_a_set_up_pass<B: Bed>() {
    let pair = Pair::<B>::start().await;
    let sockets = [
        bind(&pair.lab, 0, (INNER[0], 7000)).await,
        bind(&pair.lab, 1, (INNER[1], 7000)).await,
    ];
    for number in 0..50 {
        pair.connect(number, &gcm(), |_| {}).await;
        let data = number.to_be_bytes();
        for from in [0, 1] {
            for _ in 0..5 {
                let to = (INNER[1 - from], 7000);
                sockets[from].send_to(&data, to).unwrap();
            }
        }
        for socket in &sockets {
            for packet in 0..5 {
                let got = receive(socket, PATIENCE).await;
                let got = got.unwrap_or_else(|| panic!("packet {packet} of set-up {number}"));
                assert_eq!(got.0, data);
            }
        }
        pair.disconnect(number).await;
    }
}

pub(crate) async fn traffic_classes_go_out_as_the_sa_says<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    let socket = bench.listen(5000).await;
    for (copy_ecn, copy_dscp_out) in [(true, true), (false, true), (true, false), (false, false)] {
        bench
            .host
            .reinstall(SaEntry {
                copy_ecn,
                copy_dscp_out,
                ..sa_out()
            })
            .await;
        for tos in [0, 0xb8, 0xb9, 0xba, 0xbb] {
            SockRef::from(&socket).set_tos_v4(tos).unwrap();
            socket.send_to(b"class", (INNER[1], 7000)).unwrap();
            let seen = bench.sniffer.next(PATIENCE).await.unwrap();

            let got = seen.outer.tos;
            assert_eq!(seen.outer.udp().unwrap().0, PORT);
            let (_, inside) = seen.protected();
            assert_eq!(u32::from(inside.tos), tos);
            let dscp = if copy_dscp_out { inside.tos & !3 } else { 0 };
            // Congestion experienced before does not count against the tunnel's own path.
            let ecn = match inside.tos & 3 {
                _ if !copy_ecn => 0,
                3 => 2,
                ecn => ecn,
            };
            assert_eq!(got, dscp | ecn, "{tos:#x} ecn {copy_ecn} {copy_dscp_out}");
        }
    }
}
