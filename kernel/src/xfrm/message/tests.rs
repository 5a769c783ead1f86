// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the requests say, read back from their octets.

use std::net::IpAddr;

use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::SaKeys;
use swanherd_ipsec::registry::EncryptionId;

use super::*;
use crate::xfrm::attribute::XFRMA_SA_DIR;

const DIRECTED: SaOptions = SaOptions {
    sa_dir: true,
    offload: None,
};

fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// An SA with every option that applies to one direction only.
fn entry(direction: Direction) -> SaEntry {
    SaEntry {
        esn: true,
        replay_window: 128,
        copy_df: false,
        copy_dscp_out: false,
        copy_dscp_in: true,
        ..SaEntry::tunnel(
            direction,
            0xcafe_0001,
            [addr("192.0.2.1"), addr("192.0.2.2")],
            7,
            SaKeys {
                encryption: EncryptionId::AesGcm16,
                encryption_key: Secret::new(vec![7; 20]),
                integrity: None,
            },
        )
    }
}

/// The base structure, and the attributes behind it.
fn sent(entry: &SaEntry, options: SaOptions) -> (UserSaInfo, Vec<(u16, Vec<u8>)>) {
    let message = install_sa(entry, false, CarriedState::default(), options).unwrap();
    let mut octets = vec![0; NetlinkSerializable::buffer_len(&message)];
    message.serialize(&mut octets);
    let behind = attributes(&octets, XFRM_USER_SA_INFO_LEN)
        .map(|(kind, value)| (kind, value.to_vec()))
        .collect();
    (UserSaInfo::parse(&octets).unwrap(), behind)
}

fn value(attributes: &[(u16, Vec<u8>)], wanted: u16) -> Option<&[u8]> {
    attributes
        .iter()
        .find(|(kind, _)| *kind == wanted)
        .map(|(_, value)| value.as_slice())
}

#[test]
fn with_directions_each_sa_has_only_what_is_its_directions() {
    use netlink_packet_xfrm::XFRMA_SA_EXTRA_FLAGS;

    let (out, behind_out) = sent(&entry(Direction::Out), DIRECTED);
    assert_eq!(value(&behind_out, XFRMA_SA_DIR), Some(&[2][..]));
    assert_eq!(
        out.flags,
        XFRM_STATE_AF_UNSPEC | XFRM_STATE_NOPMTUDISC | XFRM_STATE_ESN
    );
    assert!(value(&behind_out, XFRMA_SA_EXTRA_FLAGS).is_some());
    let replay = ReplayEsn::parse(value(&behind_out, XFRMA_REPLAY_ESN_VAL).unwrap()).unwrap();
    assert_eq!((replay.replay_window, replay.bmp_len), (0, 0));
    assert_eq!(out.replay_window, 0);

    let (into, behind_in) = sent(&entry(Direction::In), DIRECTED);
    assert_eq!(value(&behind_in, XFRMA_SA_DIR), Some(&[1][..]));
    assert_eq!(
        into.flags,
        XFRM_STATE_AF_UNSPEC | XFRM_STATE_DECAP_DSCP | XFRM_STATE_ESN
    );
    assert!(value(&behind_in, XFRMA_SA_EXTRA_FLAGS).is_none());
    let replay = ReplayEsn::parse(value(&behind_in, XFRMA_REPLAY_ESN_VAL).unwrap()).unwrap();
    assert_eq!((replay.replay_window, replay.bmp_len), (128, 4));
}

#[test]
fn without_directions_both_sas_have_charons_flags() {
    for direction in [Direction::In, Direction::Out] {
        let (info, behind) = sent(&entry(direction), SaOptions::default());
        assert_eq!(value(&behind, XFRMA_SA_DIR), None);
        assert_ne!(info.flags & XFRM_STATE_NOPMTUDISC, 0);
        let decapsulates = info.flags & XFRM_STATE_DECAP_DSCP != 0;
        assert_eq!(decapsulates, direction == Direction::In);
        // The kernel refuses ESN without a window then, outbound too.
        let replay = ReplayEsn::parse(value(&behind, XFRMA_REPLAY_ESN_VAL).unwrap()).unwrap();
        assert!(replay.replay_window >= 1);
    }
}

#[test]
fn a_reservation_has_the_direction_of_what_replaces_it() {
    let id = SaId {
        spi: 0xc000_0001,
        dst: addr("192.0.2.1"),
    };
    let octets = |sa_dir| {
        let message = alloc_spi(addr("192.0.2.2"), id, 7, sa_dir);
        let mut octets = vec![0; NetlinkSerializable::buffer_len(&message)];
        message.serialize(&mut octets);
        octets
    };
    let plain = octets(false).len();
    let directed = octets(true);
    let behind: Vec<_> = attributes(&directed, plain).collect();
    assert_eq!(behind, [(XFRMA_SA_DIR, &[1][..])]);
}

#[test]
fn offload_names_the_interface_and_what_it_is_to_do() {
    let flags = |direction, dst, packet| {
        let entry = SaEntry {
            dst: addr(dst),
            src: addr(dst),
            ..entry(direction)
        };
        let options = SaOptions {
            sa_dir: false,
            offload: Some((42, packet)),
        };
        let (_, behind) = sent(&entry, options);
        let device = UserOffloadDev::parse(value(&behind, XFRMA_OFFLOAD_DEV).unwrap()).unwrap();
        assert_eq!(device.ifindex, 42);
        device.flags
    };
    assert_eq!(flags(Direction::Out, "192.0.2.2", false), 0);
    assert_eq!(flags(Direction::In, "192.0.2.2", false), 2);
    assert_eq!(flags(Direction::Out, "2001:db8::2", false), 1);
    assert_eq!(flags(Direction::In, "2001:db8::2", true), 7);
}

#[test]
fn an_offloaded_policy_names_the_interface() {
    let key = PolicyKey {
        direction: Direction::Out,
        src: (addr("10.1.0.0"), 24),
        dst: (addr("10.2.0.0"), 24),
        proto: 0,
        sport: (0, 0),
        dport: (0, 0),
        mark: None,
        if_id: 0,
    };
    let device = |device| {
        let policy = InForce {
            action: PolicyAction::Bypass,
            priority: 5,
            device,
        };
        let message = install_policy(&key, &policy, false);
        let mut octets = vec![0; NetlinkSerializable::buffer_len(&message)];
        message.serialize(&mut octets);
        attributes(&octets, XFRM_USER_POLICY_INFO_LEN)
            .find(|(kind, _)| *kind == XFRMA_OFFLOAD_DEV)
            .map(|(_, value)| UserOffloadDev::parse(value).unwrap())
    };
    let offloaded = device(Some(42)).unwrap();
    assert_eq!((offloaded.ifindex, offloaded.flags), (42, 4));
    assert_eq!(device(None), None);
}

#[test]
fn policies_of_sockets_and_bound_ones_are_told_apart() {
    let of = |direction: u8, ifindex: i32, index: u32| {
        let mut info = UserPolicyInfo {
            index,
            direction,
            ..UserPolicyInfo::default()
        };
        info.selector.family = netlink_packet_xfrm::AF_INET;
        info.selector.ifindex = ifindex;
        let message = XfrmMessage::AddPolicy(PolicyMessage {
            user_policy_info: info,
            nlas: Vec::new(),
        });
        let mut octets = vec![0; NetlinkSerializable::buffer_len(&message)];
        message.serialize(&mut octets);
        let seen = SeenPolicy::parse(&octets).unwrap();
        (seen.kind, seen.key.direction)
    };
    assert_eq!(of(1, 0, 9), (PolicyClass::Plain, Direction::Out));
    assert_eq!(of(1, 3, 9), (PolicyClass::Bound, Direction::Out));
    assert_eq!(of(3, 0, 11), (PolicyClass::Socket, Direction::In));
    assert_eq!(of(4, 0, 12), (PolicyClass::Socket, Direction::Out));
}
