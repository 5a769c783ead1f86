// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VICI, the Versatile IKE Control Interface that strongSwan's tools speak.
//!
//! [`Message`] and [`Packet`] are the codec, with no I/O; a server uses them as well as a client.
//! [`Client`] is an asynchronous client on tokio:
//!
//! ```no_run
//! # async fn run() -> Result<(), swanherd_vici::Error> {
//! let mut client = swanherd_vici::Client::connect("unix:///run/charon.vici").await?;
//! for sa in client.list_sas(&Default::default()).await? {
//!     println!("{} {}: {} children", sa.name, sa.state, sa.children.len());
//! }
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

pub mod client;
pub mod de;
pub mod frame;
pub mod installed;
pub mod message;
pub mod packet;
mod ser;
#[cfg(feature = "tls")]
pub mod tls;
pub mod types;

pub use client::{Client, Error, Event};
pub use frame::{FrameError, FrameReader, MAX_FRAME};
pub use message::{EncodeError, Item, Message, ParseError};
pub use packet::{Packet, PacketError, PacketType, RawPacket};
#[cfg(feature = "tls")]
pub use tls::Tls;
pub use types::{ChildSa, IkeSa};
