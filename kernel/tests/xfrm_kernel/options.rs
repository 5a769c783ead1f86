// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every option of SAs and policies, as the kernel's own listing shows it.

use std::time::Duration;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{
    Direction, HwOffload, Lifetime, Mark, Mode, Op, PolicyAction, PolicySet, SaEntry,
};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::audit::{Owner, Verdict};

use crate::common::{INNER, block_on};
use crate::hosts::{GCM, Hosts, addr, done, outer, policies};

/// What `ip -d xfrm state` says of one SA, lines joined.
fn state(hosts: &Hosts, side: usize, sa: &SaEntry) -> String {
    block(
        &hosts.lab.ip(side, "-d -s xfrm state"),
        &format!("spi {:#010x}", sa.spi),
    )
}

/// The paragraph of a listing that has `marker`, lines joined.
fn block(listing: &str, marker: &str) -> String {
    let mut blocks: Vec<String> = Vec::new();
    for line in listing.lines() {
        if line.starts_with("src ") {
            blocks.push(String::new());
        }
        if let Some(block) = blocks.last_mut() {
            block.push_str(line.trim());
            block.push(' ');
        }
    }
    blocks
        .into_iter()
        .find(|block| block.contains(marker))
        .unwrap_or_else(|| panic!("no {marker} in {listing}"))
}

#[test]
fn copied_header_fields_are_flags_of_the_state() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, back] = hosts
            .connect(&GCM, |sa| {
                sa.copy_df = false;
                sa.copy_ecn = false;
                sa.copy_dscp_in = true;
                sa.copy_dscp_out = false;
            })
            .await;

        // The same flags that charon sets for copy_df, copy_ecn = no and copy_dscp = in.
        let out = state(&hosts, 0, &forth);
        assert!(out.contains("noecn"), "{out}");
        assert!(out.contains("nopmtudisc"), "{out}");
        assert!(out.contains("dont-encap-dscp"), "{out}");
        let into = state(&hosts, 0, &back);
        assert!(into.contains("noecn decap-dscp"), "{into}");
        assert!(hosts.lab.ping(0, 1));
    });
}

#[test]
fn windows_of_each_size_are_the_inbound_states_alone() {
    block_on(async {
        for (esn, window) in [
            (false, 0),
            (false, 32),
            (false, 33),
            (false, 1024),
            (false, 4096),
            (true, 32),
            (true, 4096),
        ] {
            let hosts = Hosts::start().await;
            let [forth, back] = hosts
                .connect(&GCM, |sa| {
                    sa.esn = esn;
                    sa.replay_window = window;
                })
                .await;
            let (out, into) = (state(&hosts, 0, &forth), state(&hosts, 0, &back));
            if esn || window > 32 {
                // The kernel is right about powers of two only.
                let size = window.next_power_of_two();
                assert!(into.contains(&format!("replay_window {size},")), "{into}");
            } else {
                assert!(into.contains(&format!("replay-window {window} ")), "{into}");
            }
            assert_eq!(
                into.contains("esn context") && into.contains("flag af-unspec esn"),
                esn,
                "{into}"
            );
            if !esn {
                assert!(out.contains("replay-window 0 "), "{out}");
            }
            assert!(hosts.lab.ping(0, 2), "window {window}, ESN {esn}");
        }
    });
}

#[test]
fn limits_of_each_kind_reach_the_kernel() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, _] = hosts
            .connect(&GCM, |sa| {
                sa.lifetime = Lifetime {
                    soft_time: Some(Duration::from_secs(3600)),
                    hard_time: Some(Duration::from_secs(3960)),
                    soft_bytes: Some(1_000_000_000_000),
                    hard_bytes: Some(1_100_000_000_000),
                    soft_packets: Some(10_000_000_000),
                    hard_packets: Some(11_000_000_000),
                };
            })
            .await;

        let out = state(&hosts, 0, &forth);

        for limit in [
            "soft 1000000000000(bytes), hard 1100000000000(bytes)",
            "soft 10000000000(packets), hard 11000000000(packets)",
            "expire add: soft 3600(sec), hard 3960(sec)",
        ] {
            assert!(out.contains(limit), "{out}");
        }
    });
}

#[test]
fn marks_have_masks_on_states_and_on_what_they_set() {
    block_on(async {
        let hosts = Hosts::start().await;
        let mark = Mark {
            value: 0x20,
            mask: 0xff,
        };
        let [forth, back] = hosts
            .connect_with(
                &GCM,
                |sa| match sa.direction {
                    Direction::Out if sa.src == outer(0) => {
                        sa.mark = Some(mark);
                        sa.set_mark = Some(Mark {
                            value: 0x200,
                            mask: 0xff00,
                        });
                    }
                    Direction::In if sa.dst == outer(0) => {
                        sa.set_mark = Some(Mark {
                            value: 0x11,
                            mask: 0xff,
                        });
                    }
                    _ => {}
                },
                |side, set| {
                    if side == 0 {
                        set.mark_out = Some(mark);
                    }
                },
            )
            .await;

        let out = state(&hosts, 0, &forth);
        assert!(out.contains("mark 0x20/0xff"), "{out}");
        assert!(out.contains("output-mark 0x200/0xff00"), "{out}");
        let into = state(&hosts, 0, &back);
        assert!(into.contains("output-mark 0x11/0xff"), "{into}");
        let policy = block(&hosts.lab.ip(0, "-d xfrm policy"), "dir out");
        assert!(policy.contains("mark 0x20/0xff"), "{policy}");
        let ping = |mark: &str| {
            hosts.lab.exec(
                0,
                &format!("ping -q -c 1 -W 1 -m {mark} -I {} {}", INNER[0], INNER[1]),
            )
        };
        assert!(ping("32"));
        assert!(!ping("33"));
        let counters = hosts.planes[0].counters_of(forth.id()).await.unwrap();
        assert_eq!(counters.packets, 1);
        hosts.shutdown().await;
        assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn interface_ids_differ_by_direction() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, back] = hosts
            .connect_with(
                &GCM,
                |sa| {
                    sa.if_id = match sa.direction {
                        Direction::Out => 0x2a,
                        Direction::In | Direction::Fwd => 0x2b,
                    };
                },
                |_, set| (set.if_id_in, set.if_id_out) = (0x2b, 0x2a),
            )
            .await;

        assert!(state(&hosts, 0, &forth).contains("if_id 0x2a"));
        assert!(state(&hosts, 0, &back).contains("if_id 0x2b"));
        let policy = hosts.lab.ip(0, "-d xfrm policy");
        assert!(block(&policy, "dir out").contains("if_id 0x2a"), "{policy}");
        assert!(block(&policy, "dir in").contains("if_id 0x2b"), "{policy}");
        assert!(block(&policy, "dir fwd").contains("if_id 0x2b"), "{policy}");
        assert_eq!(hosts.lab.ip(0, "rule show table 220"), "");
        assert!(hosts.planes[0].reconcile(true).await.unwrap().is_clean());
        hosts.shutdown().await;
        assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    });
}

#[test]
fn beet_mode_binds_the_inner_addresses_to_the_state() {
    block_on(async {
        let hosts = Hosts::start().await;
        let host = |side: usize| TrafficSelector::host(addr(INNER[side]));
        let [forth, _] = hosts
            .connect_with(
                &GCM,
                |sa| {
                    sa.mode = Mode::Beet;
                    let side = usize::from(sa.src != outer(0));
                    sa.selector = Some(match sa.direction {
                        Direction::Out => (host(side), host(1 - side)),
                        Direction::In | Direction::Fwd => (host(1 - side), host(side)),
                    });
                },
                |side, set| {
                    (set.local, set.remote) = (vec![host(side)], vec![host(1 - side)]);
                    if let PolicyAction::Protect { mode, .. } = &mut set.action {
                        *mode = Mode::Beet;
                    }
                },
            )
            .await;

        let out = state(&hosts, 0, &forth);
        assert!(out.contains("mode beet"), "{out}");
        assert!(out.contains("sel src 10.1.0.1/32 dst 10.2.0.1/32"), "{out}");
        assert!(hosts.lab.ping(0, 2));
        let counters = hosts.planes[1].counters_of(forth.id()).await.unwrap();
        assert_eq!(counters.packets, 2);
    });
}

#[test]
fn ipv4_travels_in_a_tunnel_between_ipv6_hosts() {
    block_on(async {
        let hosts = Hosts::start().await;
        let outer6 = ["2001:db8::1", "2001:db8::2"].map(addr);
        for (side, addr) in outer6.iter().enumerate() {
            hosts
                .lab
                .ip(side, &format!("addr add {addr}/64 dev veth nodad"));
        }
        let [forth, back] = hosts
            .connect_with(
                &GCM,
                |sa| {
                    let side = usize::from(sa.src != outer(0));
                    (sa.src, sa.dst) = (outer6[side], outer6[1 - side]);
                },
                |side, set| {
                    if let PolicyAction::Protect { local, remote, .. } = &mut set.action {
                        (*local, *remote) = (outer6[side], outer6[1 - side]);
                    }
                },
            )
            .await;

        // The peer is reached over IPv6, so that the inner route is the operator's to make.
        for side in 0..2 {
            let to = format!(
                "route replace {}/32 dev veth src {}",
                INNER[1 - side],
                INNER[side]
            );
            hosts.lab.ip(side, &to);
        }
        assert!(hosts.lab.ping(0, 2));
        for sa in [forth, back] {
            let counters = hosts.planes[1].counters_of(sa.id()).await.unwrap();
            assert_eq!(counters.packets, 2);
        }
        hosts.shutdown().await;
        assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    });
}

/// A policy as [`crate::hosts::policies`] makes it, but of another set.
fn other_set(id: u32, adjust: impl Fn(&mut PolicySet)) -> PolicySet {
    let mut set = PolicySet {
        id,
        owner: format!("lab/{id}"),
        ..policies(0, 0)
    };
    set.local = vec![TrafficSelector::network(addr("10.7.0.0"), 24).unwrap()];
    adjust(&mut set);
    set
}

#[test]
fn policies_are_listed_with_their_owners() {
    block_on(async {
        let hosts = Hosts::start().await;
        hosts.connect(&GCM, |_| {}).await;
        let sets = [
            other_set(2, |set| set.trap = true),
            other_set(3, |set| {
                set.local = vec![TrafficSelector::network(addr("10.8.0.0"), 24).unwrap()];
                set.action = PolicyAction::Discard;
                set.priority = Some(77);
            }),
        ];
        for set in sets {
            done(
                hosts.planes[0]
                    .apply(Op::InstallPolicies(Box::new(set)))
                    .await,
            );
        }
        hosts.lab.ip(
            0,
            "xfrm policy add dir out src 10.9.0.0/24 dst 10.8.0.0/24 action block priority 5",
        );

        let listed = hosts.planes[0].policies().await.unwrap();

        let outbound: Vec<_> = listed
            .iter()
            .filter(|policy| policy.key.direction == Direction::Out)
            .map(|policy| (policy.priority, policy.owner.clone()))
            .collect();
        assert_eq!(listed.len(), 10);
        assert_eq!(
            outbound,
            [
                (5, Owner::Alien),
                (77, Owner::Shunt("lab/3".to_owned())),
                (375_424, Owner::Trap("lab/2".to_owned())),
                (375_423, Owner::Child("lab/tunnel".to_owned())),
            ]
        );
        assert!(listed.iter().all(|policy| policy.index != 0));
        let into = listed
            .iter()
            .find(|policy| policy.owner.kind() == "child" && policy.key.direction == Direction::In)
            .unwrap();
        assert_eq!(
            into.verdict,
            Verdict::Protect {
                mode: Mode::Tunnel,
                reqid: 1,
                endpoints: (outer(1), outer(0)),
            }
        );
    });
}

#[test]
fn a_device_without_esp_is_told_from_one_that_takes_over() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, _] = hosts.connect(&GCM, |sa| sa.offload = HwOffload::Auto).await;
        assert!(!state(&hosts, 0, &forth).contains("offload"));
        assert!(hosts.lab.ping(0, 1));
        hosts.shutdown().await;

        let mut sa = forth;
        sa.offload = HwOffload::Crypto;
        let install = |sa: &SaEntry| Op::InstallSa(Box::new(sa.clone()));
        let refused = hosts.planes[0].apply(install(&sa)).await.unwrap_err();
        assert!(
            refused
                .reason
                .contains("with 192.0.2.1 does not take over ESP"),
            "{refused}"
        );
        sa.offload = HwOffload::Packet;
        hosts.planes[0].apply(install(&sa)).await.unwrap_err();
        sa.src = addr("192.0.2.200");
        let nowhere = hosts.planes[0].apply(install(&sa)).await.unwrap_err();
        assert!(
            nowhere.reason.contains("no interface has 192.0.2.200"),
            "{nowhere}"
        );
        assert_eq!(hosts.lab.xfrm_entries(0), (0, 0));
    });
}
