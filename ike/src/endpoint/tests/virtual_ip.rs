// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtual addresses of the initiator.

use std::net::IpAddr;
use std::time::Duration;

use swanherd_config::model::{Connection, SelectorSpec};
use swanherd_ipsec::TrafficSelector;

use super::harness::{Pair, alice, assert_tunnel, bob, child, rekey};
use crate::api::{Command, Event, Selector};

const GIVEN: &str = "10.99.0.7";

fn given(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Alice asks for an address, Bob expects her to use the one that he gives.
fn asking() -> (Connection, Connection) {
    let mut alice = alice();
    alice.vips = vec![given("0.0.0.0")];
    alice.children[0].local_ts = vec![SelectorSpec::Dynamic {
        protocol: 0,
        start_port: 0,
        end_port: u16::MAX,
    }];
    let mut bob = bob();
    bob.children = vec![child("net", "10.2.0.0/16", "10.99.0.7/32")];
    (alice, bob)
}

fn pair(gives: Option<&[&str]>) -> Pair {
    let mut pair = Pair::new();
    let addrs = gives.map(|gives| gives.iter().map(|text| given(text)).collect());
    pair.bob.endpoint.env.given = addrs;
    let (alice, bob) = asking();
    pair.load(alice, bob);
    pair
}

fn up(gives: &[&str]) -> Pair {
    let mut pair = pair(Some(gives));
    let id = pair.initiate("gw", "net");
    assert_eq!(
        pair.alice.done(id),
        Some(Ok(())),
        "{:#?}",
        pair.alice.logs()
    );
    pair
}

fn of_ike() -> Selector {
    Selector {
        ike: Some("gw".to_owned()),
        ..Selector::default()
    }
}

#[test]
fn the_address_that_the_peer_gives_is_in_place_and_dynamic_stands_for_it() {
    let mut pair = up(&[GIVEN]);
    assert_eq!(pair.alice.plane.addresses, [given(GIVEN)]);
    assert_eq!(pair.alice.sa().local_vips, [given(GIVEN)]);
    let host = [TrafficSelector::host(given(GIVEN))];
    assert_eq!(pair.alice.live()[0].local_ts, host);
    assert_eq!(
        pair.alice.plane.policies.values().next().unwrap().local,
        host
    );
    assert_tunnel(&pair);

    // It outlives rekeying, of either kind and by either side.
    for on_alice in [true, false] {
        for child in [true, false] {
            rekey(&mut pair, on_alice, child);
            pair.pass(Duration::from_secs(30));
            assert_eq!(pair.alice.plane.addresses, [given(GIVEN)]);
            assert_eq!(pair.alice.sa().local_vips, [given(GIVEN)]);
            assert_eq!(pair.alice.live()[0].local_ts, host);
            assert_tunnel(&pair);
        }
    }

    let selector = of_ike();
    let force = false;
    pair.command(true, Command::Terminate { selector, force });
    pair.pass(Duration::from_secs(10));
    assert!(pair.alice.plane.is_empty());
}

#[test]
fn reauthentication_asks_for_the_same_address_and_never_loses_it() {
    let mut pair = up(&[GIVEN]);
    let before = pair.alice.sa().id;
    let selector = of_ike();
    let reauth = true;
    pair.command(true, Command::Rekey { selector, reauth });
    pair.pass(Duration::from_secs(30));
    assert_ne!(pair.alice.sa().id, before);
    assert_eq!(pair.alice.plane.addresses, [given(GIVEN)]);
    assert_eq!(pair.alice.sa().local_vips, [given(GIVEN)]);
    assert_tunnel(&pair);
}

#[test]
fn a_peer_that_gives_no_address_gets_no_child() {
    // One that says so, and one that keeps silent and makes the child all the same.
    for gives in [None, Some(&[][..])] {
        let mut pair = pair(gives);
        let id = pair.initiate("gw", "net");
        assert!(matches!(pair.alice.done(id), Some(Err(_))));
        let told = pair.alice.events.iter().any(|event| {
            matches!(event, Event::Failure { text, .. }
                if text.contains("INTERNAL_ADDRESS_FAILURE")
                    || text.contains("gave no virtual address"))
        });
        assert!(told, "{:#?}", pair.alice.logs());
        pair.pass(Duration::from_secs(30));
        assert!(pair.alice.plane.is_empty());
        assert!(pair.bob.plane.is_empty());
        assert!(pair.alice.sas().is_empty());
    }
}

#[test]
fn no_more_and_no_other_addresses_are_taken_than_asked_for() {
    let pair = up(&[
        "127.0.0.1",
        "224.0.0.1",
        "0.0.0.0",
        GIVEN,
        "10.99.0.8",
        "2001:db8::1",
    ]);
    assert_eq!(pair.alice.plane.addresses, [given(GIVEN)]);
}

#[test]
fn addresses_of_both_families_can_be_asked_for() {
    let mut pair = Pair::new();
    let given: Vec<IpAddr> = ["10.99.0.7", "2001:db8:99::7"].map(given).to_vec();
    pair.bob.endpoint.env.given = Some(given.clone());
    let (mut alice, mut bob) = asking();
    alice.vips = vec!["::".parse().unwrap(), "10.99.0.7".parse().unwrap()];
    alice.children[0]
        .remote_ts
        .push(super::harness::net("2001:db8:2::/64"));
    let cfg = &mut bob.children[0];
    cfg.local_ts.push(super::harness::net("2001:db8:2::/64"));
    cfg.remote_ts
        .push(super::harness::net("2001:db8:99::7/128"));
    pair.load(alice, bob);
    let id = pair.initiate("gw", "net");
    assert_eq!(
        pair.alice.done(id),
        Some(Ok(())),
        "{:#?}",
        pair.alice.logs()
    );
    assert_eq!(pair.alice.plane.addresses, given);
    let hosts: Vec<_> = given.iter().copied().map(TrafficSelector::host).collect();
    assert_eq!(pair.alice.live()[0].local_ts, hosts);
}

#[test]
fn an_address_that_cannot_be_put_in_place_fails_the_child() {
    let mut pair = pair(Some(&[GIVEN]));
    pair.alice.plane.refuse_addresses = true;
    let id = pair.initiate("gw", "net");
    let Some(Err(text)) = pair.alice.done(id) else {
        panic!("{:#?}", pair.alice.logs());
    };
    assert!(text.contains("no such interface"), "{text}");
    pair.pass(Duration::from_secs(30));
    assert!(pair.alice.plane.sas.is_empty());
    assert!(pair.bob.plane.sas.is_empty());
}
