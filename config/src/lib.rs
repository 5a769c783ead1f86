// SPDX-License-Identifier: Apache-2.0 OR MIT
//! swanctl.conf, strongswan.conf and VICI trees as typed, validated definitions.
//!
//! Text goes through [`grammar`] into a [`Tree`](tree::Tree); [`decode`] turns that, or the tree of
//! a VICI message, into the types of [`model`]. [`load`] does it for a whole swanctl.conf with its
//! credential directories, [`settings`] for the daemon's own settings.

#![forbid(unsafe_code)]

pub mod check;
pub mod decode;
pub mod diagnostic;
mod dn;
pub mod files;
pub mod grammar;
pub mod identity;
pub mod listing;
pub mod load;
pub mod model;
pub mod names;
pub mod proposal;
pub mod reference;
pub mod secret;
pub mod settings;
pub mod tree;
pub mod value;

pub use diagnostic::Diagnostic;
pub use dn::certificate_subject;
pub use grammar::{parse_file, parse_str};
pub use identity::IdentityPattern;
pub use load::load_swanctl;
pub use tree::Tree;
