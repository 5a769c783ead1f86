// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKEv2 (RFC 7296) without I/O.
//!
//! This crate is deterministic: it contains no networking code, reads no clock and draws no
//! randomness that was not injected. Its whole interface is values in and values out: see
//! [`api`] for what goes in and comes out of an [`endpoint::Endpoint`].

#![forbid(unsafe_code)]

pub mod api;
pub mod compute;
pub mod credentials;
pub mod crypto;
pub mod endpoint;
pub mod record;
mod sa;
pub mod wire;
