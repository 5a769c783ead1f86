// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Endpoints over a simulated network in virtual time.
//!
//! Everything that happens in a [`world::World`] follows from one number, the seed. A failing
//! test prints its seed and what happened last; `SWANHERD_SEED=n cargo test -p swanherd-ike
//! --test sim <test>` runs the tests that go through many seeds with this one only.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy's exemption covers only the tests themselves"
)]

mod check;
mod config;
mod history;
mod ledger;
mod net;
mod plane;
mod traffic;
mod world;

mod attack;
mod chaos;
mod expiry;
mod fleet;
mod flood;
mod fragments;
mod handshake;
mod idle;
mod keep;
mod lifecycle;
mod loss;
mod modes;
mod names;
mod nat;
mod reauth;
mod recording;
mod rekey;
mod reqids;
mod roam;
mod traps;
mod unique;
