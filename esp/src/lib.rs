// SPDX-License-Identifier: Apache-2.0 OR MIT
//! ESP (RFC 4303) without I/O.
//!
//! An [`OutboundSa`] seals payloads, an [`InboundSa`] opens packets, both in buffers of the caller
//! and without allocating. The [`Spd`] finds the policy of a packet among thousands.
//! Nothing here reads a clock, draws a random number, or does I/O: lifetimes in time, sockets and
//! devices belong to the data plane that uses this crate.

#![forbid(unsafe_code)]

pub mod flow;
pub mod fragments;
pub mod replay;
pub mod sa;
pub mod spd;
mod suite;

pub use flow::Flow;
pub use fragments::Fragments;
pub use replay::ReplayWindow;
pub use sa::{Expiry, InboundSa, OpenError, Opened, OutboundSa, SealError};
pub use spd::{Protection, Spd, Verdict};
pub use suite::{UnsupportedSuite, supports_cipher, supports_integrity};

/// IP protocol number of a tunnelled IPv4 packet, the next header of tunnel mode.
pub const PROTO_IPV4: u8 = 4;
/// IP protocol number of a tunnelled IPv6 packet.
pub const PROTO_IPV6: u8 = 41;
/// "No next header": a dummy packet for traffic flow confidentiality (RFC 4303 section 2.6).
pub const PROTO_NONE: u8 = 59;

/// The SPI of an ESP packet, or `None` if it is too short to have one.
pub fn spi_of(packet: &[u8]) -> Option<u32> {
    packet.first_chunk().map(|spi| u32::from_be_bytes(*spi))
}
