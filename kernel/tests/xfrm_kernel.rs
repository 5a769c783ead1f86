// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XFRM plane on a kernel that has ESP: two hosts in namespaces, traffic through the tunnel.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::net::IpAddr;
use std::time::Duration;

use swanherd_ipsec::plane::{
    Direction, HwOffload, Lifetime, Mode, Op, Outcome, PlaneEvent, PolicyAction, PolicySet,
    SaEntry, SaId, SaKeys, UdpEncap,
};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};
use swanherd_ipsec::{Secret, TrafficSelector};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::audit::{Difference, Remedy};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use tokio::sync::mpsc::Receiver;

mod common;

use common::{INNER, Lab, OUTER, block_on};

struct Suite {
    encryption: EncryptionId,
    key_len: usize,
    integrity: Option<(IntegrityId, usize)>,
}

const GCM: Suite = Suite {
    encryption: EncryptionId::AesGcm16,
    key_len: 20,
    integrity: None,
};

/// Two hosts with a plane each.
struct Hosts {
    lab: Lab,
    planes: [XfrmPlane; 2],
    events: [Receiver<PlaneEvent>; 2],
}

impl Hosts {
    async fn start() -> Self {
        let lab = Lab::pair();
        let (a, a_events) = start_plane(&lab, 0, XfrmOptions::default()).await;
        let (b, b_events) = start_plane(&lab, 1, XfrmOptions::default()).await;
        Self {
            lab,
            planes: [a, b],
            events: [a_events, b_events],
        }
    }

    /// Installs SAs both ways and policies; returns the SAs, towards host 1 first. `adjust` may
    /// change each SA before it is installed.
    async fn connect(&self, suite: &Suite, adjust: impl Fn(&mut SaEntry)) -> [SaEntry; 2] {
        self.connect_with(suite, adjust, |_, _| {}).await
    }

    /// [`Hosts::connect`]; `adjust_set` may change the policies of each side.
    async fn connect_with(
        &self,
        suite: &Suite,
        adjust: impl Fn(&mut SaEntry),
        adjust_set: impl Fn(usize, &mut PolicySet),
    ) -> [SaEntry; 2] {
        let spis = [
            alloc_spi(&self.planes[0], 0).await,
            alloc_spi(&self.planes[1], 1).await,
        ];
        let mut forth = entry(suite, outer(0), outer(1), spis[1]);
        let mut back = entry(suite, outer(1), outer(0), spis[0]);
        for (side, plane) in self.planes.iter().enumerate() {
            for sa in [&forth, &back] {
                let direction = if sa.dst == outer(side) {
                    Direction::In
                } else {
                    Direction::Out
                };
                let mut sa = SaEntry {
                    direction,
                    ..sa.clone()
                };
                adjust(&mut sa);
                done(plane.apply(Op::InstallSa(Box::new(sa))).await);
            }
            let spi = if side == 0 { forth.spi } else { back.spi };
            let mut set = policies(side, spi);
            adjust_set(side, &mut set);
            done(plane.apply(Op::InstallPolicies(Box::new(set))).await);
        }
        adjust(&mut forth);
        adjust(&mut back);
        [forth, back]
    }

    async fn shutdown(&self) {
        for plane in &self.planes {
            plane.shutdown().await;
        }
    }
}

async fn start_plane(
    lab: &Lab,
    side: usize,
    options: XfrmOptions,
) -> (XfrmPlane, Receiver<PlaneEvent>) {
    lab.within(side, XfrmPlane::start(options)).await.unwrap()
}

fn outer(side: usize) -> IpAddr {
    OUTER[side].parse().unwrap()
}

fn done(outcome: Result<Outcome, swanherd_ipsec::plane::PlaneError>) {
    assert_eq!(outcome, Ok(Outcome::Done));
}

async fn alloc_spi(plane: &XfrmPlane, side: usize) -> u32 {
    let op = Op::AllocSpi {
        src: outer(1 - side),
        dst: outer(side),
        reqid: 1,
    };
    match plane.apply(op).await.unwrap() {
        Outcome::Spi(spi) => spi,
        Outcome::Done => panic!("an SPI was asked for"),
    }
}

fn entry(suite: &Suite, src: IpAddr, dst: IpAddr, spi: u32) -> SaEntry {
    let last = u8::try_from(spi & 0xff).unwrap();
    SaEntry {
        direction: Direction::Out,
        spi,
        src,
        dst,
        mode: Mode::Tunnel,
        reqid: 1,
        keys: SaKeys {
            encryption: suite.encryption,
            encryption_key: Secret::new((0..suite.key_len).map(|i| i as u8 ^ last).collect()),
            integrity: suite
                .integrity
                .map(|(id, len)| (id, Secret::new(vec![last; len]))),
        },
        esn: false,
        replay_window: 32,
        encap: None,
        lifetime: Lifetime::default(),
        mark: None,
        set_mark: None,
        if_id: 0,
        selector: None,
        copy_df: true,
        copy_ecn: true,
        copy_dscp_out: true,
        copy_dscp_in: false,
        offload: HwOffload::No,
    }
}

fn policies(side: usize, spi: u32) -> PolicySet {
    let network = |side: usize| TrafficSelector::network(INNER[side].parse().unwrap(), 24).unwrap();
    PolicySet {
        id: 1,
        owner: "lab/tunnel".to_owned(),
        local: vec![network(side)],
        remote: vec![network(1 - side)],
        action: PolicyAction::Protect {
            mode: Mode::Tunnel,
            local: outer(side),
            remote: outer(1 - side),
            reqid: 1,
            spi,
        },
        priority: None,
        mark_in: None,
        mark_out: None,
        if_id_in: 0,
        if_id_out: 0,
        routes: true,
        trap: false,
        fwd_out: false,
        offload: HwOffload::No,
    }
}

async fn next_event(events: &mut Receiver<PlaneEvent>) -> PlaneEvent {
    tokio::time::timeout(Duration::from_secs(20), events.recv())
        .await
        .expect("an event within 20 s")
        .expect("the plane is alive")
}

#[test]
fn a_tunnel_carries_traffic_and_leaves_nothing_behind() {
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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

        // The next run starts while nothing of the first was undone.
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
    if !common::kernel_has_esp() {
        return;
    }
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
