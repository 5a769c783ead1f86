// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Data planes for IPsec on Linux.
//!
//! [`DataPlane`] is what the daemon sees: operations in, outcomes and events out, counters on
//! request. [`xfrm`] programs the kernel over netlink; [`tun`] processes ESP in user space behind
//! a TUN device. [`select`] tells which of them a host can run.

pub mod audit;
pub mod memory;
mod netlink;
pub mod plane;
pub mod reconcile;
pub mod route;
pub mod route_table;
mod rtnl;
pub mod select;
pub mod tun;
pub mod udp;
mod watch;
pub mod xfrm;

pub use netlink::NetlinkError;
pub use plane::{Capabilities, DataPlane, DropCounts, EventCounts, PlaneKind};
