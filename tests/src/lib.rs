// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Daemons in network namespaces.
//!
//! A [`Lab`] owns namespaces, folders and processes, and takes all of them down when dropped, also
//! when a test panics. A [`Node`] is one IKE daemon, ours or strongSwan's charon, in a namespace of
//! its own; tests speak to both in the same way, so that any scenario can be run with charon in our
//! place to tell a defect of the daemon from one of the test.
//!
//! Everything here needs root.

mod foreign;
mod lab;
mod mask;
mod netem;
mod node;
mod ping;
mod pki;
mod process;
mod scenario;
mod star;
mod vici;
mod xfrm;

pub use foreign::{Foreign, ForeignPair, Make};
pub use lab::{Lab, Namespace, sweep};
pub use mask::{mask, mask_sas};
pub use netem::{Class, Netem};
pub use node::{Daemon, Node, Plane, swanherd_binary};
pub use ping::{PingReport, Pings};
pub use pki::Pki;
pub use process::{Output, run, run_ok};
pub use scenario::{Auth, Pair, Scenario, Suite, peer, subject};
pub use star::{Star, StarPlan};
pub use vici::{Event, Events, Message, Packet, Value, Vici, frame};
pub use xfrm::{Drops, xfrm};
