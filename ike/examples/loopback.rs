// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints in one process shake hands with real cryptography, pass traffic, and rekey.
//!
//! Small enough to run under an emulator: `cargo xtask mips` runs it on the processor of a router.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    dead_code,
    unused_imports,
    reason = "the simulated network is the one of the tests, of which this uses a part"
)]

#[path = "../tests/sim/check.rs"]
mod check;
#[path = "../tests/sim/config.rs"]
mod config;
#[path = "../tests/sim/history.rs"]
mod history;
#[path = "../tests/sim/ledger.rs"]
mod ledger;
#[path = "../tests/sim/net.rs"]
mod net;
#[path = "../tests/sim/plane.rs"]
mod plane;
#[path = "../tests/sim/traffic.rs"]
mod traffic;
#[path = "../tests/sim/world.rs"]
mod world;

use std::time::Duration;

use swanherd_ike::api::{Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::registry::KeyExchangeId;

use crate::config::{ike_proposal, ike_proposal_cbc, pair, psk};
use crate::world::{ALICE, BOB, World};

fn main() {
    for (name, proposal) in [
        (
            "AES-GCM and X25519",
            ike_proposal(&[KeyExchangeId::Curve25519]),
        ),
        ("AES-GCM and P-256", ike_proposal(&[KeyExchangeId::Ecp256])),
        (
            "AES-GCM and MODP 2048",
            ike_proposal(&[KeyExchangeId::Modp2048]),
        ),
        ("AES-CBC and HMAC", ike_proposal_cbc()),
    ] {
        let mut world = World::with(1, Settings::default(), Provider::ring());
        let (mut alice, mut bob) = pair();
        alice.proposals = vec![proposal.clone()];
        bob.proposals = vec![proposal];
        world.load(ALICE, &psk(), alice);
        world.load(BOB, &psk(), bob);

        let command = world.initiate(ALICE, "net");
        assert_eq!(world.finish(ALICE, command), Ok(()), "{name}");
        world.set_traffic(true);
        world.run_for(Duration::from_secs(2));
        let selector = Selector {
            ike: Some("to-bob".to_owned()),
            ..Selector::default()
        };
        world.rekey(ALICE, selector);
        world.run_for(Duration::from_secs(20));
        world.set_traffic(false);
        world.run_for(Duration::from_secs(1));

        world.assert_in_sync(1);
        let traffic = world.traffic;
        assert!(traffic.arrived > 0, "{name}: {traffic:?}");
        assert_eq!(traffic.arrived, traffic.sent, "{name}: {traffic:?}");
        println!(
            "{name}: up, rekeyed, {} packets of {} arrived",
            traffic.arrived, traffic.sent
        );
    }
}
