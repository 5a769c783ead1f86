// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Somebody else has what we want: an SPI, a selector.

use swanherd_tests::{Pair, Plane, Scenario};

use crate::support::{View, initiate};

const OUR_KEY: &str = "0x000102030405060708090a0b0c0d0e0f10111213";

fn fails_to_initiate(pair: &Pair) -> String {
    let mut vici = pair.left.vici();
    match initiate(&mut vici, "t", "c") {
        Ok(()) => panic!("the child came up\n{}", pair.left.log()),
        Err(error) => error,
    }
}

#[test]
fn an_spi_of_somebody_else_is_named_and_left_alone() {
    // The peer chooses the SPI of our outbound SA; it is told which.
    let pair = Scenario {
        settings: "  spi_min = 0xc0ffee00\n  spi_max = 0xc0ffee00\n",
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    pair.left.namespace.ip(&format!(
        "xfrm state add src 198.51.100.9 dst 192.0.2.2 proto esp spi 0xc0ffee00 reqid 77 \
         mode tunnel aead rfc4106(gcm(aes)) {OUR_KEY} 128"
    ));
    let before = View::of(&pair.left.namespace);

    let error = fails_to_initiate(&pair);

    eprintln!("{error}");
    assert!(error.contains("c0ffee00"), "{error}\n{}", pair.left.log());
    pair.left
        .wait_until("no child", 5, |n| n.children("INSTALLED").is_empty());
    let after = View::of(&pair.left.namespace);
    assert_eq!(
        before.list("states"),
        after.list("states"),
        "{}",
        pair.logs()
    );
    assert_eq!(
        before.list("policies"),
        after.list("policies"),
        "{}",
        pair.logs()
    );
    // The peer has been told: nothing stays there.
    pair.right
        .wait_until("no child", 5, |n| n.children("INSTALLED").is_empty());

    pair.left
        .namespace
        .ip("xfrm state delete dst 192.0.2.2 proto esp spi 0xc0ffee00");
    pair.left.initiate("c");
    pair.assert_traffic_passes();
}

#[test]
fn a_policy_of_somebody_else_is_named_and_left_alone() {
    for direction in ["out", "in"] {
        let pair = Scenario::new(Plane::Kernel).start();
        let (src, dst) = match direction {
            "out" => ("10.1.0.0/24", "10.2.0.0/24"),
            _ => ("10.2.0.0/24", "10.1.0.0/24"),
        };
        pair.left.namespace.ip(&format!(
            "xfrm policy add src {src} dst {dst} dir {direction} priority 99 \
             tmpl src 0.0.0.0 dst 198.51.100.9 proto esp reqid 77 mode tunnel"
        ));
        let before = View::of(&pair.left.namespace);

        let error = fails_to_initiate(&pair);

        eprintln!("{error}");
        for word in [src, dst, direction, "reqid 77"] {
            assert!(
                error.contains(word),
                "{word} in {error}\n{}",
                pair.left.log()
            );
        }
        let after = View::of(&pair.left.namespace);
        assert_eq!(
            before.list("policies"),
            after.list("policies"),
            "{}",
            pair.logs()
        );
        pair.left.wait_until("no state", 5, |n| {
            View::of(&n.namespace).list("states").is_empty()
        });

        pair.left.namespace.ip(&format!(
            "xfrm policy delete src {src} dst {dst} dir {direction}"
        ));
        pair.left.initiate("c");
        pair.assert_traffic_passes();
    }
}
