// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::net::Ipv4Addr;

use proptest::prelude::*;
use swanherd_ipsec::plane::Mode;

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
    PolicySet::new(id, "c/c".to_owned(), vec![local], vec![remote], action)
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

fn insert(spd: &mut Spd, set: PolicySet) {
    let priority = set.priority.unwrap_or(1000);
    spd.insert(set, |_, _| priority);
}

fn with_priority(priority: u32, set: PolicySet) -> PolicySet {
    PolicySet {
        priority: Some(priority),
        ..set
    }
}

fn protection(reqid: u32) -> Protection {
    Protection {
        reqid,
        local: Ipv4Addr::new(192, 0, 2, 1).into(),
        remote: Ipv4Addr::new(192, 0, 2, 2).into(),
    }
}

#[test]
fn the_lowest_priority_decides_and_of_equal_ones_the_older() {
    let mut spd = Spd::default();
    let any = TrafficSelector::any_v4();
    let decides = |spd: &Spd, dst| {
        spd.lookup(&flow("10.1.0.1", dst))
            .map(|verdict| verdict.set)
    };
    insert(&mut spd, set(9, protect(1), any, any));
    insert(
        &mut spd,
        with_priority(7, set(3, protect(3), any, net("10.2.3.4", 32))),
    );
    let equal = set(2, protect(2), any, net("10.2.0.0", 16));
    insert(&mut spd, equal.clone());
    assert_eq!(decides(&spd, "8.8.8.8"), Some(9));
    assert_eq!(decides(&spd, "10.2.3.4"), Some(3));
    assert_eq!(decides(&spd, "10.2.0.1"), Some(9));
    assert_eq!(spd.lookup(&flow("2001:db8::1", "2001:db8::2")), None);

    // Replacing makes nothing younger, nor older.
    insert(&mut spd, set(9, protect(1), any, any));
    assert_eq!(decides(&spd, "10.2.0.1"), Some(9));
    spd.remove(9);
    assert_eq!(decides(&spd, "10.2.0.1"), Some(2));

    // For the very same packets, the newer one decides while it lasts.
    insert(&mut spd, PolicySet { id: 5, ..equal });
    assert_eq!(decides(&spd, "10.2.0.1"), Some(5));
    spd.remove(5);
    assert_eq!(decides(&spd, "10.2.0.1"), Some(2));
}

#[test]
fn replacing_and_removing_leave_nothing_behind() {
    let mut spd = Spd::default();
    let any = TrafficSelector::any_v4();
    insert(&mut spd, set(7, protect(1), any, net("10.2.0.0", 16)));
    insert(&mut spd, set(7, protect(2), any, net("10.3.0.0", 16)));
    assert_eq!(spd.lookup(&flow("10.1.0.1", "10.2.0.1")), None);
    assert!(spd.lookup(&flow("10.1.0.1", "10.3.0.1")).is_some());
    assert!(!spd.admits_inbound(&protection(1), &flow("10.3.0.1", "10.1.0.1")));

    assert!(spd.remove(7).is_some());
    assert!(spd.remove(7).is_none());
    assert!(spd.entries.is_empty() && spd.shapes.is_empty() && spd.sets.is_empty());
}

#[test]
fn inbound_packets_must_fit_the_policy_that_decides_on_them() {
    let mut spd = Spd::default();
    let (local, one) = (net("10.1.0.0", 16), net("10.2.0.0", 16));
    insert(&mut spd, set(1, protect(1), local, one));
    insert(&mut spd, set(2, protect(2), local, net("10.3.0.0", 16)));
    let bypass = set(3, PolicyAction::Bypass, local, net("10.2.9.0", 24));
    insert(&mut spd, with_priority(5, bypass));
    let any = set(4, protect(0), local, net("10.4.0.0", 16));
    insert(&mut spd, any);

    let admits = |reqid, src, dst| spd.admits_inbound(&protection(reqid), &flow(src, dst));
    assert!(admits(1, "10.2.0.1", "10.1.0.1"));
    assert!(!admits(1, "10.3.0.1", "10.1.0.1"));
    assert!(!admits(1, "10.1.0.1", "10.2.0.1"));
    assert!(!admits(9, "10.2.0.1", "10.1.0.1"));
    assert!(!admits(1, "10.2.9.1", "10.1.0.1"));
    assert!(admits(9, "10.4.0.1", "10.1.0.1"));
    let elsewhere = Protection {
        remote: Ipv4Addr::new(192, 0, 2, 3).into(),
        ..protection(1)
    };
    assert!(!spd.admits_inbound(&elsewhere, &flow("10.2.0.1", "10.1.0.1")));
}

#[test]
fn the_same_packets_for_another_request_id_are_a_conflict() {
    let mut spd = Spd::default();
    let (local, remote) = (net("10.1.0.0", 16), net("10.2.0.0", 16));
    insert(&mut spd, set(1, protect(1), local, remote));

    let conflict = |id, action, remote| {
        let set = set(id, action, local, remote);
        spd.conflict(&set).map(|(other, ..)| other.id)
    };
    assert_eq!(conflict(2, protect(2), remote), Some(1));
    assert_eq!(conflict(2, protect(1), remote), None);
    assert_eq!(conflict(1, protect(2), remote), None);
    assert_eq!(conflict(2, PolicyAction::Bypass, remote), None);
    assert_eq!(conflict(2, protect(2), net("10.2.0.0", 17)), None);
}

#[test]
fn thousands_of_tunnels_share_one_shape() {
    let mut spd = Spd::default();
    for index in 0..5_000u32 {
        let remote = TrafficSelector::host(Ipv4Addr::from_bits(0x0a80_0000 + index).into());
        insert(
            &mut spd,
            set(index + 1, protect(index + 1), net("10.1.0.0", 16), remote),
        );
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
            set.priority = Some(300_000 + u32::from(kind == 2));
            insert(&mut spd, set.clone());
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
            .min_by_key(|set| {
                let twins = |other: &&PolicySet| {
                    (other.priority, &other.local, &other.remote)
                        == (set.priority, &set.local, &set.remote)
                };
                let eldest = all.iter().find(twins).map_or(set.id, |twin| twin.id);
                (set.priority, eldest, std::cmp::Reverse(set.id))
            })
            .map(|set| set.id);
        prop_assert_eq!(spd.lookup(&flow).map(|verdict| verdict.set), expected);
    }
}
