// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Setting up.

use std::time::Duration;

use swanherd_config::model::HostSpec;
use swanherd_ipsec::registry::KeyExchangeId;

use super::harness::*;
use crate::api::{IkeState, Settings};

#[test]
fn a_handshake_with_a_pre_shared_key_brings_up_ike_sa_and_child() {
    let pair = connected();

    let (a, b) = (pair.alice.sa(), pair.bob.sa());
    assert_eq!(a.state, IkeState::Established);
    assert_eq!(b.state, IkeState::Established);
    assert_eq!((a.spi_i, a.spi_r), (b.spi_i, b.spi_r));
    assert_eq!(b.connection.as_deref(), Some("gw"));
    assert_eq!(pair.alice.live().len(), 1);
    assert_tunnel(&pair);
    assert_eq!(pair.alice.story(), ["ike up", "child up"]);
    assert_eq!(pair.bob.story(), ["ike up", "child up"]);
    assert_eq!(pair.alice.plane.policies.len(), 1);
    assert_eq!(pair.bob.endpoint.half_open(), 0);
}

#[test]
fn a_wrong_secret_fails_on_both_sides_and_leaves_nothing() {
    let mut pair = Pair::new();
    pair.bob
        .endpoint
        .set_credentials(psk_credentials("another secret"));
    pair.load(alice(), bob());

    let id = pair.initiate("gw", "net");

    assert_eq!(
        pair.alice.done(id),
        Some(Err("establishing CHILD_SA 'net' failed".to_owned()))
    );
    assert!(pair.alice.sas().is_empty());
    assert!(pair.bob.sas().is_empty());
    assert!(pair.alice.plane.is_empty());
    assert!(pair.bob.plane.is_empty());
    assert_eq!(pair.alice.story(), ["ike down"]);
}

#[test]
fn the_responder_gets_the_key_exchange_that_it_prefers() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.proposals = vec![ike_proposal(&[
        KeyExchangeId::Curve25519,
        KeyExchangeId::Ecp256,
    ])];
    let mut b = bob();
    b.proposals = vec![ike_proposal(&[KeyExchangeId::Ecp256])];
    pair.load(a, b);

    let id = pair.initiate("gw", "net");

    assert_eq!(pair.alice.done(id), Some(Ok(())));
    let suite = pair.alice.sa().suite.unwrap();
    assert_eq!(suite.key_exchange, KeyExchangeId::Ecp256);
}

#[test]
fn a_cookie_is_given_back() {
    let settings = Settings {
        cookie_threshold: 1,
        ..Settings::default()
    };
    let mut pair = Pair::with(Settings::default(), settings);
    let mut b = bob();
    b.remote_addrs = vec![HostSpec::Any(None)];
    pair.load(alice(), b);
    // One half-open IKE SA: an initiator whose IKE_AUTH never arrives.
    pair.filter = Box::new(|to_bob, datagram| !(to_bob && datagram.local.port() == 4500));
    pair.initiate("gw", "net");
    assert_eq!(pair.bob.endpoint.half_open(), 1);
    pair.filter = Box::new(|_, _| true);
    let mut second = alice();
    second.name = "other".to_owned();
    second.mobike = false;
    pair.alice
        .endpoint
        .load_connection(pair.now, std::sync::Arc::new(second));

    let id = pair.initiate("other", "net");

    assert_eq!(
        pair.alice.done(id),
        Some(Ok(())),
        "{:#?}",
        pair.alice.logs()
    );
    assert!(pair.alice.logs().iter().any(|l| l.contains("cookie")));
}

#[test]
fn lost_messages_are_sent_again_and_answered_from_the_cache() {
    let mut pair = Pair::new();
    pair.load(alice(), bob());
    let mut count = 0;
    pair.filter = Box::new(move |_, _| {
        count += 1;
        ![1, 3, 5, 8, 10].contains(&count)
    });

    let id = pair.initiate("gw", "net");
    pair.pass(Duration::from_secs(60));

    assert_eq!(
        pair.alice.done(id),
        Some(Ok(())),
        "{:#?}",
        pair.alice.logs()
    );
    assert_eq!(pair.bob.sas().len(), 1);
    assert_tunnel(&pair);
}

#[test]
fn a_dead_peer_is_given_up_after_all_retransmissions() {
    let mut pair = Pair::new();
    pair.load(alice(), bob());
    pair.filter = Box::new(|_, _| false);

    let id = pair.initiate("gw", "net");
    pair.pass(Duration::from_secs(160));
    assert_eq!(pair.alice.done(id), None);
    pair.pass(Duration::from_secs(10));

    assert_eq!(
        pair.alice.done(id),
        Some(Err("establishing CHILD_SA 'net' failed".to_owned()))
    );
    assert!(pair.alice.plane.is_empty());
}

#[test]
fn selectors_are_narrowed_to_what_both_sides_allow() {
    let mut pair = Pair::new();
    let mut a = alice();
    a.children = vec![child("net", "10.1.0.0/16", "0.0.0.0/0")];
    pair.load(a, bob());

    pair.initiate("gw", "net");

    let live = pair.alice.live();
    assert_eq!(live[0].remote_ts, pair.bob.live()[0].local_ts);
    assert_eq!(live[0].remote_ts[0].prefix_len(), Some(16));
}

#[test]
fn a_child_that_is_refused_leaves_the_ike_sa_up() {
    let mut pair = Pair::new();
    let mut b = bob();
    b.children = vec![child("net", "172.16.0.0/16", "10.1.0.0/16")];
    pair.load(alice(), b);

    let id = pair.initiate("gw", "net");

    assert_eq!(
        pair.alice.done(id),
        Some(Err("establishing CHILD_SA 'net' failed".to_owned()))
    );
    assert_eq!(pair.alice.sa().state, IkeState::Established);
    assert_eq!(pair.bob.sa().state, IkeState::Established);
    assert!(pair.alice.plane.is_empty());
    assert!(pair.bob.plane.is_empty());
}

#[test]
fn a_data_plane_that_refuses_leaves_nothing_behind() {
    let mut pair = Pair::new();
    pair.load(alice(), bob());
    pair.alice.plane.refuse = 1;

    let id = pair.initiate("gw", "net");
    pair.pass(Duration::from_secs(10));

    assert!(pair.alice.done(id).unwrap().is_err());
    assert!(pair.alice.plane.is_empty(), "{:?}", pair.alice.plane);
    assert!(pair.bob.plane.is_empty(), "{:?}", pair.bob.plane);
}
