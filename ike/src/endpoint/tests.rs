// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints in virtual time over a perfect network.

mod exchange;
mod explore;
mod handshake;
mod harness;
mod lifetime;
mod rekey;
mod transport;
mod virtual_ip;

pub(crate) use harness::{alice, bob, psk_credentials};
