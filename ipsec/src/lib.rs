// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vocabulary that IKE, ESP and the data planes share, as plain values.
//!
//! Nothing in this crate does I/O, reads a clock or draws a random number. IKE hands a data plane
//! [`plane::Op`] values; the data plane answers with [`plane::Outcome`] and reports
//! [`plane::PlaneEvent`]. Configuration, IKE and the planes agree on algorithms
//! ([`registry`]), proposals ([`proposal`]), selectors ([`selector`]) and identities
//! ([`identity`]) because there is one definition of each.

#![forbid(unsafe_code)]

pub mod hex;
pub mod identity;
pub mod plane;
pub mod proposal;
pub mod registry;
pub mod secret;
pub mod selector;

pub use identity::Identity;
pub use proposal::{Proposal, ProtocolId, Transform};
pub use secret::Secret;
pub use selector::TrafficSelector;
/// For [`open_registry`].
#[doc(hidden)]
pub use serde;
