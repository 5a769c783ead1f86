// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::net::Ipv4Addr;

use proptest::prelude::*;
use swanherd_ipsec::plane::{HwOffload, Mode};

use super::*;

fn protect(reqid: u32) -> PolicyAction {
    PolicyAction::Protect {
        mode: Mode::Tunnel,
        local: Ipv4Addr::new(192, 0, 2, 1).into(),
        remote: Ipv4Addr::new(192, 0, 2, 2).into(),
        reqid,
        spi: 0,
    }
}

fn set(
    id: u32,
    action: PolicyAction,
    local: TrafficSelector,
    remote: TrafficSelector,
) -> PolicySet {
    PolicySet {
        id,
        owner: "c/c".to_owned(),
        local: vec![local],
        remote: vec![remote],
        action,
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

fn net(text: &str, len: u8) -> TrafficSelector {
    TrafficSelector::network(text.parse().unwrap(), len).unwrap()
}

fn flow(src: &str, dst: &str) -> Flow {
    Flow {
        src: src.parse().unwrap(),
        dst: dst.parse().unwrap(),
        protocol: 17,
        ports: Some((1000, 53)),
    }
}

#[test]
fn narrower_selectors_win_and_shunts_win_over_children() {
    let mut spd = Spd::default();
    let any = TrafficSelector::any_v4();
    spd.insert(set(1, protect(1), any, any));
    spd.insert(set(2, protect(2), any, net("10.2.0.0", 16)));
    let mut trap = set(3, protect(3), any, net("10.2.3.4", 32));
    trap.trap = true;
    spd.insert(trap);
    spd.insert(set(4, PolicyAction::Bypass, any, net("10.9.0.0", 16)));

    let decides = |dst| {
        spd.lookup(&flow("10.1.0.1", dst))
            .map(|verdict| verdict.set)
    };
    assert_eq!(decides("8.8.8.8"), Some(1));
    assert_eq!(decides("10.2.3.4"), Some(2));
    assert_eq!(decides("10.9.0.1"), Some(4));
    assert_eq!(spd.lookup(&flow("2001:db8::1", "2001:db8::2")), None);
}

#[test]
fn replacing_and_removing_leave_nothing_behind() {
    let mut spd = Spd::default();
    let any = TrafficSelector::any_v4();
    spd.insert(set(7, protect(1), any, net("10.2.0.0", 16)));
    spd.insert(set(7, protect(2), any, net("10.3.0.0", 16)));
    assert_eq!(spd.lookup(&flow("10.1.0.1", "10.2.0.1")), None);
    assert!(spd.lookup(&flow("10.1.0.1", "10.3.0.1")).is_some());
    assert!(!spd.admits_inbound(1, &flow("10.3.0.1", "10.1.0.1")));

    assert!(spd.remove(7).is_some());
    assert!(spd.remove(7).is_none());
    assert!(spd.outbound.is_empty() && spd.shapes.is_empty() && spd.by_reqid.is_empty());
}

#[test]
fn inbound_packets_must_fit_the_selectors_of_their_own_child() {
    let mut spd = Spd::default();
    spd.insert(set(1, protect(1), net("10.1.0.0", 16), net("10.2.0.0", 16)));
    spd.insert(set(2, protect(2), net("10.1.0.0", 16), net("10.3.0.0", 16)));

    assert!(spd.admits_inbound(1, &flow("10.2.0.1", "10.1.0.1")));
    assert!(!spd.admits_inbound(1, &flow("10.3.0.1", "10.1.0.1")));
    assert!(!spd.admits_inbound(1, &flow("10.1.0.1", "10.2.0.1")));
    assert!(!spd.admits_inbound(9, &flow("10.2.0.1", "10.1.0.1")));
}

#[test]
fn thousands_of_tunnels_share_one_shape() {
    let mut spd = Spd::default();
    for index in 0..5_000u32 {
        let remote = TrafficSelector::host(Ipv4Addr::from_bits(0x0a80_0000 + index).into());
        spd.insert(set(
            index + 1,
            protect(index + 1),
            net("10.1.0.0", 16),
            remote,
        ));
    }
    assert_eq!(spd.shapes.len(), 1);
    let found = spd.lookup(&flow("10.1.0.1", "10.128.0.77")).unwrap();
    assert_eq!(found.set, 78);
}

fn any_selector() -> impl Strategy<Value = TrafficSelector> {
    // A small space, so that selectors overlap.
    (0u32..64, 0u32..64, 0u8..3, any::<bool>()).prop_map(|(a, b, protocol, ports)| {
        let (start, end) = (a.min(b), a.max(b));
        TrafficSelector {
            protocol: if protocol == 0 { 0 } else { 16 + protocol },
            start_port: if ports { 10 } else { 0 },
            end_port: if ports { 60 } else { u16::MAX },
            start: Ipv4Addr::from_bits(start).into(),
            end: Ipv4Addr::from_bits(end).into(),
        }
    })
}

proptest! {
    #[test]
    fn lookup_agrees_with_a_linear_search(
        selectors in proptest::collection::vec((any_selector(), any_selector(), 0u8..4), 1..20),
        removed in proptest::collection::vec(0u32..20, 0..8),
        (src, dst) in (0u32..64, 0u32..64),
        (protocol, port) in (16u8..19, 0u16..80),
    ) {
        let mut spd = Spd::default();
        let mut all = Vec::new();
        for (id, (local, remote, kind)) in (0u32..).zip(selectors) {
            let action = if kind == 0 { PolicyAction::Discard } else { protect(id + 1) };
            let mut set = set(id, action, local, remote);
            set.trap = kind == 1;
            set.priority = (kind == 2).then_some(300_000);
            spd.insert(set.clone());
            all.push(set);
        }
        for id in removed {
            spd.remove(id);
            all.retain(|set| set.id != id);
        }
        let flow = Flow {
            src: Ipv4Addr::from_bits(src).into(),
            dst: Ipv4Addr::from_bits(dst).into(),
            protocol,
            ports: Some((port, port)),
        };
        let expected = all
            .iter()
            .filter(|set| flow.is_selected(&set.local[0], &set.remote[0]))
            .min_by_key(|set| (priority(set, &set.local[0], &set.remote[0]), set.id))
            .map(|set| set.id);
        prop_assert_eq!(spd.lookup(&flow).map(|verdict| verdict.set), expected);
    }
}
