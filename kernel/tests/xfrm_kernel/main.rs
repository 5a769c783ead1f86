// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XFRM plane on a kernel that has ESP: two hosts in namespaces. Not among what `cargo test`
//! runs by itself; `cargo xtask test --only kernel` boots such a kernel for it.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

#[path = "../common/mod.rs"]
mod common;
mod hosts;
mod options;
mod ownership;
mod scale;
mod traffic;
