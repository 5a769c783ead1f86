// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many CHILD SAs of one peer: this end's network to a network each. Never for real traffic: the
//! keys are in this file.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use swanherd_ipsec::plane::{
    Direction, Lifetime, Mode, Op, PolicyAction, PolicySet, SaEntry, SaKeys,
};
use swanherd_ipsec::registry::EncryptionId;
use swanherd_ipsec::{Secret, TrafficSelector};

/// The network of this end.
pub(crate) const OWN: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 0);

/// SPI of a child's outbound SA.
pub(crate) fn outbound(child: u32) -> u32 {
    0xd000_0000 + child
}

/// The network at the other end of a child.
pub(crate) fn network(child: u32) -> Ipv4Addr {
    let third = u8::try_from(child % 250).unwrap_or(0);
    let second = u8::try_from(child / 250 + 2).unwrap_or(2);
    Ipv4Addr::new(10, second, third, 0)
}

/// Both SAs of a child.
pub(crate) fn sas(child: u32, spi: u32, local: IpAddr, remote: IpAddr) -> [Op; 2] {
    let sa = |direction, spi, src, dst| {
        Op::InstallSa(Box::new(SaEntry {
            replay_window: 32,
            lifetime: Lifetime {
                hard_time: Some(Duration::from_secs(3960)),
                ..Lifetime::default()
            },
            ..SaEntry::tunnel(
                direction,
                spi,
                [src, dst],
                child + 1,
                SaKeys {
                    encryption: EncryptionId::AesGcm16,
                    encryption_key: Secret::new(vec![0x5a; 20]),
                    integrity: None,
                },
            )
        }))
    };
    [
        sa(Direction::In, spi, remote, local),
        sa(Direction::Out, outbound(child), local, remote),
    ]
}

/// The policies of a child.
pub(crate) fn policies(child: u32, local: IpAddr, remote: IpAddr) -> Op {
    let selector = |network: Ipv4Addr| {
        TrafficSelector::network(network.into(), 24).expect("24 is a length of IPv4")
    };
    Op::InstallPolicies(Box::new(PolicySet::new(
        child + 1,
        format!("bench/c{child}"),
        vec![selector(OWN)],
        vec![selector(network(child))],
        PolicyAction::Protect {
            mode: Mode::Tunnel,
            local,
            remote,
            reqid: child + 1,
            spi: outbound(child),
        },
    )))
}
