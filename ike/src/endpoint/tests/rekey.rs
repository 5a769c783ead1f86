// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rekeying from either side, and from both at once.

use std::time::Duration;

use swanherd_config::model::Connection;
use swanherd_ipsec::registry::KeyExchangeId;

use super::harness::*;
use crate::api::{Command, Datagram, Event, IkeState, Selector};

/// The children and data planes are as after a rekey: one live child on each side, the same.
fn assert_one_child(pair: &Pair) {
    let (a, b) = (pair.alice.live(), pair.bob.live());
    assert_eq!(a.len(), 1, "{:#?}\n{a:#?}", pair.alice.logs());
    assert_eq!(b.len(), 1, "{:#?}\n{b:#?}", pair.bob.logs());
    assert_eq!(a[0].inbound, b[0].outbound);
    assert_eq!(a[0].outbound, b[0].inbound);
    assert_tunnel(pair);
}

/// After the delay that follows a rekey only one pair of SAs is left on each side.
fn assert_settled(pair: &mut Pair) {
    pair.pass(Duration::from_secs(20));
    assert_one_child(pair);
    for host in [&pair.alice, &pair.bob] {
        assert_eq!(host.plane.sas.len(), 2, "{:#?}", host.plane.sas.keys());
        assert_eq!(host.plane.policies.len(), 1);
        assert!(host.plane.reserved.is_empty());
        assert_eq!(host.sa().children.len(), 1);
        assert_eq!(host.sa().state, IkeState::Established);
    }
}

#[test]
fn either_side_can_rekey_a_child() {
    for on_alice in [true, false] {
        let mut pair = connected();
        let before = pair.alice.live()[0].clone();

        rekey(&mut pair, on_alice, true);
        pair.drive();

        assert_one_child(&pair);
        let after = pair.alice.live()[0].clone();
        assert_ne!(before.inbound, after.inbound);
        assert_eq!(before.reqid, after.reqid);
        // The replaced inbound SA still takes packets in flight.
        assert_eq!(pair.alice.plane.sas.len(), 3);
        assert_settled(&mut pair);
        assert_eq!(pair.alice.story(), ["ike up", "child up", "child rekey"]);
        assert_eq!(pair.bob.story(), ["ike up", "child up", "child rekey"]);
    }
}

#[test]
fn a_child_can_be_rekeyed_with_a_key_exchange_of_its_own() {
    let mut pair = Pair::new();
    let (mut a, mut b) = (alice(), bob());
    a.children[0].proposals = vec![esp_proposal(&[
        KeyExchangeId::Curve25519,
        KeyExchangeId::Ecp256,
    ])];
    b.children[0].proposals = vec![esp_proposal(&[KeyExchangeId::Ecp256])];
    pair.load(a, b);
    pair.initiate("gw", "net");

    rekey(&mut pair, true, true);
    pair.drive();

    assert_settled(&mut pair);
    let suite = pair.alice.live()[0].suite.unwrap();
    assert_eq!(suite.key_exchange, Some(KeyExchangeId::Ecp256));
}

#[test]
fn children_are_rekeyed_again_and_again_by_their_lifetime() {
    let mut pair = connected();

    pair.pass(Duration::from_secs(3 * 3600 + 60));

    assert_settled(&mut pair);
    let rekeys = pair
        .alice
        .story()
        .iter()
        .filter(|s| *s == "child rekey")
        .count();
    assert!(rekeys >= 3, "{:?}", pair.alice.story());
    assert!(!pair.alice.story().contains(&"child down".to_owned()));
}

#[test]
fn both_sides_may_rekey_a_child_at_once() {
    let mut pair = connected();

    rekey(&mut pair, true, true);
    rekey(&mut pair, false, true);
    pair.drive();

    assert_settled(&mut pair);
    for host in [&pair.alice, &pair.bob] {
        assert_eq!(host.story(), ["ike up", "child up", "child rekey"]);
    }
}

#[test]
fn a_child_rekey_collision_survives_any_single_loss() {
    for lost in 0..12 {
        let mut pair = connected();
        let mut count = 0;
        pair.filter = Box::new(move |_, _| {
            count += 1;
            count != lost + 1
        });

        rekey(&mut pair, true, true);
        rekey(&mut pair, false, true);
        pair.pass(Duration::from_secs(30));

        assert_settled(&mut pair);
        for host in [&pair.alice, &pair.bob] {
            let rekeys = host.story().iter().filter(|s| *s == "child rekey").count();
            assert_eq!(
                rekeys,
                1,
                "lost {lost}: {:?}\n{:#?}",
                host.story(),
                host.logs()
            );
        }
    }
}

/// Whether a datagram is a response, by its flags (RFC 7296 section 3.1).
fn is_response(datagram: &Datagram) -> bool {
    datagram.payload[19] & 0x20 != 0
}

/// Whether a side has begun to rekey what the word names.
fn has_begun(host: &Host, what: &str) -> bool {
    let begin = format!("rekeying {what}");
    host.logs().iter().any(|line| line.starts_with(&begin))
}

#[test]
fn the_ike_sa_is_not_rekeyed_before_the_peer_knows_that_it_has_rekeyed_a_child() {
    let mut pair = connected();
    pair.filter = Box::new(|to_bob, _| to_bob);
    rekey(&mut pair, true, true);
    pair.drive();

    rekey(&mut pair, false, false);
    // alice asks again after 4 s.
    pair.pass(Duration::from_secs(3));
    assert!(!has_begun(&pair.bob, "IKE_SA"), "{:#?}", pair.bob.logs());
    pair.filter = Box::new(|_, _| true);
    pair.pass(Duration::from_secs(2));

    assert!(has_begun(&pair.bob, "IKE_SA"), "{:#?}", pair.bob.logs());
    assert_settled(&mut pair);
    assert_eq!(
        pair.bob.story(),
        ["ike up", "child up", "child rekey", "ike rekey"]
    );
}

#[test]
fn a_child_is_not_rekeyed_before_the_peer_knows_that_it_may_not_yet() {
    let mut pair = connected();
    pair.filter = Box::new(|to_bob, _| to_bob);
    rekey(&mut pair, false, false);
    rekey(&mut pair, true, true);
    pair.drive();
    rekey(&mut pair, false, true);

    // Requests arrive again, responses of bob's do not.
    pair.filter = Box::new(|to_bob, datagram| to_bob || !is_response(datagram));
    pair.pass(Duration::from_secs(10));
    let logs = pair.bob.logs();
    assert!(
        logs.iter()
            .any(|line| line.contains("the peer answered TEMPORARY_FAILURE")),
        "{logs:#?}"
    );
    assert!(!has_begun(&pair.bob, "CHILD_SA"), "{logs:#?}");
    pair.filter = Box::new(|_, _| true);
    pair.pass(Duration::from_secs(60));

    assert_settled(&mut pair);
    assert_eq!(pair.alice.story().last().unwrap(), "ike rekey");
}

#[test]
fn a_request_to_rekey_what_is_being_deleted_is_left_until_that_is_done() {
    let mut pair = connected();
    // alice's rekeying succeeds; bob's has not arrived, and alice's delete does not.
    let mut first = true;
    pair.filter = Box::new(move |to_bob, datagram| {
        if to_bob {
            std::mem::take(&mut first)
        } else {
            is_response(datagram)
        }
    });
    rekey(&mut pair, false, true);
    pair.drive();
    rekey(&mut pair, true, true);
    pair.drive();

    pair.filter = Box::new(|to_bob, _| !to_bob);
    pair.pass(Duration::from_secs(5));
    let answers = |host: &Host| -> Vec<String> {
        let begin = "sending CREATE_CHILD_SA response";
        let lines = host.logs().into_iter();
        lines.filter(|line| line.starts_with(begin)).collect()
    };
    assert!(answers(&pair.alice).is_empty(), "{:#?}", pair.alice.logs());
    pair.filter = Box::new(|_, _| true);
    pair.pass(Duration::from_secs(30));

    let answers = answers(&pair.alice);
    assert!(
        answers.len() == 1 && answers[0].contains("CHILD_SA_NOT_FOUND"),
        "{answers:?}"
    );
    assert_settled(&mut pair);
    for host in [&pair.alice, &pair.bob] {
        assert_eq!(host.story(), ["ike up", "child up", "child rekey"]);
    }
}

#[test]
fn whoever_has_little_time_left_does_not_wait_for_the_peer() {
    let mut pair = Pair::new();
    let hurried = Connection {
        rekey_time: Duration::from_secs(20),
        over_time: Duration::from_secs(10),
        ..bob()
    };
    pair.load(alice(), hurried);
    pair.initiate("gw", "net");
    pair.filter = Box::new(|to_bob, _| to_bob);
    rekey(&mut pair, true, true);
    pair.drive();

    rekey(&mut pair, false, false);
    pair.drive();

    assert!(has_begun(&pair.bob, "IKE_SA"), "{:#?}", pair.bob.logs());
}

#[test]
fn either_side_can_rekey_the_ike_sa() {
    for on_alice in [true, false] {
        let mut pair = connected();
        let (before, child) = (pair.alice.sa(), pair.alice.live()[0].clone());

        rekey(&mut pair, on_alice, false);
        pair.drive();

        let after = pair.alice.sa();
        assert_ne!(before.id, after.id);
        assert_ne!(before.spi_i, after.spi_i);
        assert_eq!(after.initiator, on_alice);
        assert_eq!(after.children[&child.id].inbound, child.inbound);
        assert_settled(&mut pair);
        assert_eq!(pair.alice.story(), ["ike up", "child up", "ike rekey"]);
        assert_eq!(pair.bob.story(), ["ike up", "child up", "ike rekey"]);

        // The new IKE SA carries on in both directions.
        rekey(&mut pair, true, true);
        pair.drive();
        rekey(&mut pair, false, true);
        pair.pass(Duration::from_secs(10));
        assert_settled(&mut pair);
    }
}

#[test]
fn both_sides_may_rekey_the_ike_sa_at_once() {
    for lost in 0..12 {
        let mut pair = connected();
        let mut count = 0;
        pair.filter = Box::new(move |_, _| {
            count += 1;
            count != lost
        });

        rekey(&mut pair, true, false);
        rekey(&mut pair, false, false);
        pair.pass(Duration::from_secs(60));

        assert_settled(&mut pair);
        let (a, b) = (pair.alice.sa(), pair.bob.sa());
        assert_eq!((a.spi_i, a.spi_r), (b.spi_i, b.spi_r), "lost {lost}");
        for host in [&pair.alice, &pair.bob] {
            assert!(
                !host.story().iter().any(|s| s.contains("down")),
                "{:?}",
                host.story()
            );
        }
    }
}

#[test]
fn an_ike_rekey_beside_a_child_rekey_ends_well() {
    for lost in 0..10 {
        let mut pair = connected();
        let mut count = 0;
        pair.filter = Box::new(move |_, _| {
            count += 1;
            count != lost
        });

        rekey(&mut pair, true, false);
        rekey(&mut pair, false, true);
        pair.pass(Duration::from_secs(90));

        assert_settled(&mut pair);
    }
}

#[test]
fn reauthentication_makes_before_it_breaks() {
    let mut pair = connected();
    let before = pair.alice.sa();

    pair.command(
        true,
        Command::Rekey {
            selector: Selector {
                ike: Some("gw".to_owned()),
                ..Selector::default()
            },
            reauth: true,
        },
    );
    pair.drive();

    let after = pair.alice.sa();
    assert_ne!(before.id, after.id);
    assert_settled(&mut pair);
    assert_eq!(
        pair.alice.story(),
        [
            "ike up",
            "child up",
            "ike up",
            "child up",
            "ike down",
            "child down"
        ]
    );
    let downs: Vec<_> = pair
        .alice
        .events
        .iter()
        .filter_map(|event| match event {
            Event::IkeUpDown { up: false, sa } => Some(sa.id),
            _ => None,
        })
        .collect();
    assert_eq!(downs, [before.id]);
}
