// SPDX-License-Identifier: Apache-2.0 OR MIT
//! strongSwan's regression scenarios, as far as they concern lifecycles and transport, each under
//! its name there.
//!
//! They are checked as strongSwan checks them: patterns in a certain order in what
//! `swanctl --list-sas --raw` prints, traffic, and what the kernel has. The daemon under test is
//! the one that a scenario is about; the other ones are charons. docs/testing.md lists what is
//! here and what is not.
//!
//! All of it needs a kernel with ESP: `cargo xtask test --only kernel`.

mod action;
mod children;
mod critical;
mod dead_peer;
mod ipv6;
mod life;
mod marks;
mod mobile;
mod nat;
mod pool;
mod support;
mod transport;
mod unique;
