// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::sync::Arc;

use proptest::prelude::*;
use swanherd_config::decode::{Origin, decode_connection};
use swanherd_config::names::Names;
use swanherd_config::parse_str;

use super::*;

fn connection(name: &str, text: &str) -> ConnectionRef {
    let tree = parse_str("test", text.as_bytes()).unwrap().tree;
    let origin = Origin::File {
        dir: std::path::Path::new("/"),
        files: &swanherd_config::files::SystemFiles,
    };
    Arc::new(
        decode_connection(name, &tree, origin, &Names::builtin())
            .unwrap()
            .value,
    )
}

fn id(text: &str) -> Identity {
    IdentityPattern::parse(text).unwrap().identity().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Branch `n` of a fleet, as kinds of fleets are written: its definition, its address, its identity.
fn branch(kind: &str, n: usize) -> (String, IpAddr, Identity) {
    let addr: IpAddr = format!("10.{}.{}.9", n / 250, n % 250).parse().unwrap();
    let fqdn = format!("b{n}.example.org");
    let dn = format!("C=CH, O=Example, CN=b{n}");
    match kind {
        "by name" => (format!("remote {{ id = {fqdn}\n }}"), addr, id(&fqdn)),
        "by certificate" => (format!("remote {{ id = \"{dn}\"\n }}"), addr, id(&dn)),
        "by address" => (format!("remote_addrs = {addr}\n"), addr, id(&fqdn)),
        "by network" => {
            let network = format!("10.{}.{}.0/24", n / 250, n % 250);
            (format!("remote_addrs = {network}\n"), addr, id(&fqdn))
        }
        "by host name" => (
            format!("remote_addrs = {fqdn}\nremote {{ id = {fqdn}\n }}"),
            addr,
            id(&fqdn),
        ),
        _ => unreachable!(),
    }
}

#[test]
fn a_peer_is_found_among_ten_thousand_with_as_little_work_as_among_ten() {
    for kind in [
        "by name",
        "by certificate",
        "by address",
        "by network",
        "by host name",
    ] {
        let mut work = Vec::new();
        for size in [10, 10_000] {
            let mut connections = Connections::default();
            for n in 0..size {
                let (text, addr, _) = branch(kind, n);
                connections.insert(connection(&format!("c{n}"), &text));
                if kind == "by host name" {
                    connections.learn(&format!("b{n}.example.org"), &[addr]);
                }
            }
            let wanted = size / 2;
            let (_, addr, identity) = branch(kind, wanted);
            LOOKED_AT.set(0);
            assert!(!connections.for_addresses(ip("192.0.2.1"), addr).is_empty());
            let found = connections.for_identities(ip("192.0.2.1"), addr, None, &identity);
            assert_eq!(found[0].name, format!("c{wanted}"), "{kind}");
            work.push(LOOKED_AT.get());
        }
        assert_eq!(work[0], work[1], "{kind}");
        assert!(work[1] <= 6, "{kind}: {work:?}");
    }
}

#[test]
fn unloading_leaves_nothing_in_the_indices() {
    let mut connections = Connections::default();
    let texts = [
        "remote_addrs = 10.0.0.1, b.example.org, 10.1.0.0/16\nchildren { net { } }",
        "remote_addrs = 10.1.0.0/16, 2001:db8::/32\nremote { id = b\n }",
        "remote { id = *.example.org\n }",
    ];
    for (n, text) in texts.iter().enumerate() {
        connections.insert(connection(&format!("c{n}"), text));
    }
    // Replaced, and then removed.
    connections.insert(connection("c0", texts[1]));
    assert!(connections.with_child("net").is_none());
    for n in 0..texts.len() {
        assert!(connections.remove(&format!("c{n}")).is_some());
    }
    assert!(connections.by_remote.is_empty() && connections.by_host.is_empty());
    assert!(connections.by_remote_id.is_empty() && connections.open_ids.is_empty());
    assert!(connections.open_ids_of_group.is_empty() && connections.by_child.is_empty());
    let groups = &connections.groups;
    assert!(groups.ids.is_empty() && groups.members.is_empty());
    assert!(groups.wide.is_empty() && groups.networks.is_empty());
}

fn remote_addrs() -> impl Strategy<Value = Vec<&'static str>> {
    proptest::sample::subsequence(
        vec![
            "10.0.0.1",
            "10.0.0.2",
            "10.0.0.0/24",
            "10.0.0.0/31",
            "10.0.0.1-10.0.0.9",
            "a.example.org",
            "b.example.org",
            "%any",
            "2001:db8::1",
            "2001:db8::/32",
        ],
        0..4,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// What the indices give is what looking at every connection gives.
    #[test]
    fn the_indices_find_what_a_walk_over_all_finds(
        loaded in proptest::collection::vec(
            (
                0..6u8,
                remote_addrs(),
                proptest::sample::select(vec![
                    "", "gw.example.org", "GW.example.org", "*.example.org", "%any",
                    "C=CH, CN=gw", "C=CH, CN=*", "10.0.0.0/24", "10.0.0.1",
                ]),
                proptest::sample::select(vec!["default", "aes128-sha256-x25519"]),
                proptest::sample::select(vec!["", "192.0.2.1", "192.0.2.2"]),
            ),
            1..12,
        ),
        removed in 0..6u8,
        resolved in proptest::sample::select(vec!["10.0.0.1", "10.0.0.7", "2001:db8::1"]),
        remote in proptest::sample::select(vec!["10.0.0.1", "10.0.0.7", "10.9.0.1", "2001:db8::1"]),
        identity in proptest::sample::select(vec!["gw.example.org", "C=CH, CN=GW", "10.0.0.1", "x"]),
    ) {
        let mut connections = Connections::default();
        for (name, addrs, remote_id, proposals, local) in &loaded {
            let text = format!(
                "remote_addrs = \"{}\"\nproposals = {proposals}\nlocal_addrs = \"{local}\"\n{}",
                addrs.join(","),
                if remote_id.is_empty() { String::new() } else { format!("remote {{ id = \"{remote_id}\"\n }}") },
            );
            connections.insert(connection(&format!("c{name}"), &text));
        }
        connections.learn("a.example.org", &[ip("10.0.0.9")]);
        connections.learn("a.example.org", &[ip(resolved)]);
        connections.remove(&format!("c{removed}"));
        let (local, remote, identity) = (ip("192.0.2.1"), ip(remote), id(identity));

        let names = |found: &[ConnectionRef]| -> Vec<String> {
            found.iter().map(|c| c.name.clone()).collect()
        };
        let mut all: Vec<(u32, u32, Order, ConnectionRef)> = connections
            .by_order
            .iter()
            .filter_map(|(order, c)| {
                let ids = identity_match(c, None, &identity)?;
                Some((ids, connections.address_match(c, local, remote)?, *order, c.clone()))
            })
            .collect();
        all.sort_by_key(|(ids, addresses, order, _)| (u32::MAX - ids, u32::MAX - addresses, *order));
        let all: Vec<_> = all.into_iter().map(|(.., c)| c).collect();
        prop_assert_eq!(
            names(&connections.for_identities(local, remote, None, &identity)),
            names(&all)
        );

        let mut all: Vec<(u32, Order, ConnectionRef)> = connections
            .by_order
            .iter()
            .filter_map(|(order, c)| {
                Some((connections.address_match(c, local, remote)?, *order, c.clone()))
            })
            .collect();
        all.sort_by_key(|(addresses, order, _)| (u32::MAX - addresses, *order));
        // With the same proposals, IKE_SA_INIT comes to the same whichever it is for: the best of
        // them is all that matters.
        let mut seen = BTreeSet::new();
        let kinds: Vec<_> = all
            .iter()
            .filter(|(_, _, c)| seen.insert(c.proposals.clone()))
            .map(|(score, _, c)| (*score, c.name.clone()))
            .collect();
        let mut seen = BTreeSet::new();
        let found: Vec<_> = connections
            .for_addresses(local, remote)
            .into_iter()
            .filter_map(|c| {
                let score = connections.address_match(&c, local, remote)?;
                seen.insert(c.proposals.clone()).then(|| (score, c.name.clone()))
            })
            .collect();
        prop_assert_eq!(found, kinds);
    }
}
