// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the tunnels carry, and what the kernel tells of them.

use std::net::IpAddr;
use std::time::Duration;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Direction, Mode, Op, PlaneEvent, PolicyAction, SaId, UdpEncap};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::audit::{Difference, Remedy};
use swanherd_kernel::xfrm::XfrmOptions;

use crate::common::{Lab, block_on};
use crate::hosts::{GCM, Hosts, Suite, done, next_event, outer, policies, start_plane};

#[test]
fn a_tunnel_carries_traffic_and_leaves_nothing_behind() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, back] = hosts.connect(&GCM, |_| {}).await;
        let policy = hosts.lab.ip(0, "xfrm policy");
        let routes = hosts.lab.ip(0, "route show table 220");

        assert!(hosts.lab.ping(0, 3));

        for plane in &hosts.planes {
            let counters = plane.counters().await.unwrap();
            assert_eq!(counters.len(), 2);
            for sa in [&forth, &back] {
                assert_eq!(counters[&sa.id()].packets, 3);
                assert_eq!(counters[&sa.id()].bytes, 3 * 84);
                assert_eq!(plane.counters_of(sa.id()).await, Some(counters[&sa.id()]));
            }
            assert!(plane.reconcile(true).await.unwrap().is_clean());
        }
        assert!(policy.contains("dir out priority 375423"), "{policy}");
        assert!(
            policy.contains(&format!("spi {:#010x}", forth.spi)),
            "{policy}"
        );
        assert!(
            routes.contains("10.2.0.0/24 via 192.0.2.2 dev veth"),
            "{routes}"
        );
        assert!(routes.contains("src 10.1.0.1"), "{routes}");

        hosts.shutdown().await;

        for side in 0..2 {
            assert_eq!(hosts.lab.xfrm_entries(side), (0, 0));
            assert_eq!(hosts.lab.ip(side, "rule show table 220"), "");
        }
    });
}

#[test]
fn every_suite_of_ours_is_one_of_the_kernels() {
    let mac = |id, len| Some((id, len));
    let suites = [
        (EncryptionId::AesGcm16, 36, None),
        (EncryptionId::AesGcm12, 20, None),
        (EncryptionId::AesGcm8, 20, None),
        (EncryptionId::AesCcm16, 19, None),
        (EncryptionId::ChaCha20Poly1305, 36, None),
        (EncryptionId::AesCbc, 16, mac(IntegrityId::HmacSha1_96, 20)),
        (
            EncryptionId::AesCbc,
            32,
            mac(IntegrityId::HmacSha2_256_128, 32),
        ),
        (
            EncryptionId::AesCbc,
            16,
            mac(IntegrityId::HmacSha2_384_192, 48),
        ),
        (
            EncryptionId::AesCbc,
            16,
            mac(IntegrityId::HmacSha2_512_256, 64),
        ),
        (
            EncryptionId::AesCtr,
            20,
            mac(IntegrityId::HmacSha2_256_128, 32),
        ),
        (
            EncryptionId::Null,
            0,
            mac(IntegrityId::HmacSha2_256_128, 32),
        ),
    ];
    block_on(async {
        for (encryption, key_len, integrity) in suites {
            let hosts = Hosts::start().await;
            let suite = Suite {
                encryption,
                key_len,
                integrity,
            };
            hosts.connect(&suite, |_| {}).await;
            assert!(hosts.lab.ping(0, 1), "{encryption}");
            hosts.shutdown().await;
        }
    });
}

#[test]
fn extended_sequence_numbers_with_a_wide_window_carry_traffic() {
    block_on(async {
        let hosts = Hosts::start().await;
        hosts
            .connect(&GCM, |sa| {
                sa.esn = true;
                sa.replay_window = 1024;
            })
            .await;

        assert!(hosts.lab.ping(0, 2));

        let states = hosts.lab.ip(0, "-d xfrm state");
        assert!(states.contains("replay_window 1024"), "{states}");
        assert!(states.contains("esn"), "{states}");
    });
}

#[test]
fn limits_raise_soft_and_hard_expiries() {
    block_on(async {
        let mut hosts = Hosts::start().await;
        let [forth, _] = hosts
            .connect(&GCM, |sa| {
                if sa.dst == outer(1) {
                    sa.lifetime.soft_packets = Some(2);
                    sa.lifetime.hard_packets = Some(4);
                }
            })
            .await;

        // The kernel looks at the limits before it counts a packet.
        assert!(hosts.lab.ping(0, 3));
        let soft = next_event(&mut hosts.events[0]).await;
        hosts.lab.ping(0, 4);
        let hard = next_event(&mut hosts.events[0]).await;

        let id = forth.id();
        assert_eq!(soft, PlaneEvent::Expire { id, hard: false });
        assert_eq!(hard, PlaneEvent::Expire { id, hard: true });
        assert_eq!(hosts.planes[0].counters_of(id).await, None);
        assert!(hosts.planes[0].reconcile(true).await.unwrap().is_clean());
    });
}

#[test]
fn time_limits_raise_expiries() {
    block_on(async {
        let mut hosts = Hosts::start().await;
        hosts
            .connect(&GCM, |sa| {
                sa.lifetime.soft_time = Some(Duration::from_secs(1));
                sa.lifetime.hard_time = Some(Duration::from_secs(2));
            })
            .await;

        let mut hard = 0;
        while hard < 2 {
            if let PlaneEvent::Expire { hard: true, .. } = next_event(&mut hosts.events[1]).await {
                hard += 1;
            }
        }

        assert_eq!(hosts.planes[1].counters().await.unwrap().len(), 0);
    });
}

/// A UDP socket that takes ESP out of UDP, as IKE daemons open on port 4500.
#[allow(unsafe_code)]
async fn encapsulation_socket(lab: &Lab, side: usize) -> std::net::UdpSocket {
    use std::os::fd::AsRawFd as _;
    const UDP_ENCAP: libc::c_int = 100;
    let espinudp: libc::c_int = 2;
    let socket = lab
        .within(side, async { std::net::UdpSocket::bind("0.0.0.0:4500") })
        .await
        .unwrap();
    // SAFETY: the option value is a c_int that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_UDP,
            UDP_ENCAP,
            (&raw const espinudp).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    socket
}

#[test]
fn udp_encapsulation_carries_traffic_and_follows_a_changed_port() {
    block_on(async {
        let mut hosts = Hosts::start().await;
        let _a = encapsulation_socket(&hosts.lab, 0).await;
        let _b = encapsulation_socket(&hosts.lab, 1).await;
        let encap = |src_port, dst_port| Some(UdpEncap { src_port, dst_port });
        let [forth, _] = hosts.connect(&GCM, |sa| sa.encap = encap(4500, 4500)).await;
        assert!(hosts.lab.ping(0, 2));

        // Host 0 sends from another port, as through a NAT that lost its mapping.
        let update = |encap| Op::UpdateSa {
            id: forth.id(),
            src: forth.src,
            dst: forth.dst,
            encap,
        };
        done(hosts.planes[0].apply(update(encap(4600, 4500))).await);
        hosts.lab.ping(0, 1);
        let event = next_event(&mut hosts.events[1]).await;
        done(hosts.planes[1].apply(update(encap(4600, 4500))).await);
        assert!(hosts.lab.ping(0, 1));

        assert_eq!(
            event,
            PlaneEvent::MappingChange {
                id: forth.id(),
                addr: outer(0),
                port: 4600
            }
        );
        let counters = hosts.planes[0].counters_of(forth.id()).await.unwrap();
        assert_eq!(counters.packets, 4);
    });
}

#[test]
fn a_moved_sa_keeps_its_sequence_numbers_and_counters() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, back] = hosts.connect(&GCM, |sa| sa.esn = true).await;
        assert!(hosts.lab.ping(0, 3));
        let moved: IpAddr = "192.0.2.77".parse().unwrap();
        hosts.lab.ip(0, "addr add 192.0.2.77/24 dev veth");

        for plane in &hosts.planes {
            let forth = Op::UpdateSa {
                id: forth.id(),
                src: moved,
                dst: forth.dst,
                encap: None,
            };
            let back = Op::UpdateSa {
                id: back.id(),
                src: back.src,
                dst: moved,
                encap: None,
            };
            done(plane.apply(forth).await);
            done(plane.apply(back).await);
        }
        for (side, plane) in hosts.planes.iter().enumerate() {
            let spi = if side == 0 { forth.spi } else { back.spi };
            let mut set = policies(side, spi);
            if let PolicyAction::Protect { local, remote, .. } = &mut set.action {
                *(if side == 0 { local } else { remote }) = moved;
            }
            done(plane.apply(Op::InstallPolicies(Box::new(set))).await);
        }
        assert!(hosts.lab.ping(0, 2));

        let counters = hosts.planes[1].counters().await.unwrap();
        assert_eq!(counters[&forth.id()].packets, 5);
        assert_eq!(counters[&forth.id()].replay_drops, 0);
        let back = SaId {
            spi: back.spi,
            dst: moved,
        };
        assert_eq!(counters[&back].packets, 5);
        hosts.shutdown().await;
        assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn after_a_crash_ours_is_removed_and_what_others_installed_stays() {
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let mut hosts = Hosts::start().await;
        let options = XfrmOptions {
            ledger: Some(folder.path().join("ledger")),
            ..XfrmOptions::default()
        };
        hosts.planes[0].shutdown().await;
        (hosts.planes[0], hosts.events[0]) = start_plane(&hosts.lab, 0, options.clone()).await;
        hosts.connect(&GCM, |_| {}).await;
        hosts.lab.ip(
            0,
            "xfrm state add src 192.0.2.9 dst 192.0.2.1 proto esp spi 0xc0000001 mode tunnel \
             auth-trunc hmac(sha256) 0x00112233445566778899aabbccddeeff 128 \
             enc cbc(aes) 0x00112233445566778899aabbccddeeff",
        );
        hosts.lab.ip(
            0,
            "xfrm policy add dir out src 10.9.0.0/24 dst 10.8.0.0/24 tmpl src 192.0.2.1 \
             dst 192.0.2.9 proto esp mode tunnel",
        );
        assert_eq!(hosts.lab.xfrm_entries(0), (3, 4));

        // The next run starts when the first is gone and nothing of it was undone.
        (hosts.planes[0], hosts.events[0]) =
            start_plane(&hosts.lab, 0, XfrmOptions::default()).await;
        let (next, _events) = start_plane(&hosts.lab, 0, options).await;

        assert_eq!(hosts.lab.xfrm_entries(0), (1, 1));
        assert_eq!(hosts.lab.ip(0, "route show table 220"), "");
        let audit = next.reconcile(true).await.unwrap();
        assert!(audit.is_clean());
        assert_eq!((audit.alien_sas, audit.alien_policies), (1, 1));
    });
}

#[test]
fn an_sa_that_someone_else_deletes_is_reported() {
    block_on(async {
        let mut hosts = Hosts::start().await;
        let [forth, _] = hosts.connect(&GCM, |_| {}).await;

        hosts.lab.ip(
            0,
            &format!(
                "xfrm state delete src 192.0.2.1 dst 192.0.2.2 proto esp spi {:#x}",
                forth.spi
            ),
        );

        assert_eq!(
            next_event(&mut hosts.events[0]).await,
            PlaneEvent::Expire {
                id: forth.id(),
                hard: true
            }
        );
    });
}

#[test]
fn policies_changed_by_others_are_put_right() {
    block_on(async {
        let hosts = Hosts::start().await;
        hosts.connect(&GCM, |_| {}).await;
        hosts.lab.ip(
            0,
            "xfrm policy delete dir out src 10.1.0.0/24 dst 10.2.0.0/24",
        );
        hosts.lab.ip(
            0,
            "xfrm policy update dir in src 10.2.0.0/24 dst 10.1.0.0/24 action block",
        );
        assert!(!hosts.lab.ping(0, 1));

        let audit = hosts.planes[0].reconcile(false).await.unwrap();

        let found: Vec<_> = audit
            .findings
            .iter()
            .map(|finding| {
                (
                    finding.difference,
                    &finding.remedy,
                    finding.owner.as_deref(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                (Difference::Changed, &Remedy::Installed, Some("lab/tunnel")),
                (Difference::Missing, &Remedy::Installed, Some("lab/tunnel")),
            ],
            "{audit:?}"
        );
        assert!(hosts.lab.ping(0, 1));
    });
}

#[test]
fn transport_mode_protects_what_the_hosts_say_to_each_other() {
    block_on(async {
        let hosts = Hosts::start().await;
        let host = |side: usize| TrafficSelector::host(outer(side));
        let [forth, _] = hosts
            .connect_with(
                &GCM,
                |sa| {
                    sa.mode = Mode::Transport;
                    let side = usize::from(sa.src != outer(0));
                    // Local first, seen from where it is installed.
                    sa.selector = Some(match sa.direction {
                        Direction::Out => (host(side), host(1 - side)),
                        Direction::In | Direction::Fwd => (host(1 - side), host(side)),
                    });
                },
                |side, set| {
                    (set.local, set.remote) = (vec![host(side)], vec![host(1 - side)]);
                    if let PolicyAction::Protect { mode, .. } = &mut set.action {
                        *mode = Mode::Transport;
                    }
                },
            )
            .await;

        assert!(hosts.lab.exec(0, "ping -q -c 2 -i 0.1 -W 2 192.0.2.2"));

        let counters = hosts.planes[1].counters_of(forth.id()).await.unwrap();
        assert_eq!(counters.packets, 2);
        assert_eq!(hosts.lab.xfrm_entries(0), (2, 2));
    });
}

#[test]
fn ipv6_travels_in_a_tunnel_between_ipv4_hosts() {
    block_on(async {
        let hosts = Hosts::start().await;
        let inner = ["fd00:1::1", "fd00:2::1"];
        let network =
            |side: usize| TrafficSelector::network(inner[side].parse().unwrap(), 64).unwrap();
        for (side, addr) in inner.iter().enumerate() {
            hosts
                .lab
                .ip(side, &format!("addr add {addr}/64 dev lo nodad"));
        }
        let [forth, _] = hosts
            .connect_with(
                &GCM,
                |_| {},
                |side, set| {
                    (set.local, set.remote) = (vec![network(side)], vec![network(1 - side)]);
                },
            )
            .await;

        assert!(
            hosts
                .lab
                .exec(0, "ping -6 -q -c 2 -i 0.1 -W 2 -I fd00:1::1 fd00:2::1")
        );

        let counters = hosts.planes[1].counters_of(forth.id()).await.unwrap();
        assert_eq!(counters.packets, 2);
        hosts.shutdown().await;
        assert_eq!(hosts.lab.ip(0, "-6 route show table 220"), "");
    });
}
