// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NAT detection (RFC 7296 section 2.23).

use std::net::SocketAddr;

use crate::crypto::hash::nat_detection;
use crate::wire::{NotifyPayload, NotifyType, Payload};

/// Where NATs are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nat {
    /// This side is behind one.
    pub(crate) local: bool,
    /// The peer is behind one.
    pub(crate) remote: bool,
    /// This side pretended to be behind one, so that ESP goes in UDP.
    pub(crate) fake: bool,
    /// The peer takes part in NAT detection.
    pub(crate) supported: bool,
}

impl Nat {
    /// Whether ESP goes in UDP.
    pub(crate) fn any(self) -> bool {
        self.local || self.remote || self.fake
    }
}

/// The two notifies of a message from `local` to `remote`. `fake` makes the peer see a NAT here.
pub(crate) fn notifies(
    spi_i: u64,
    spi_r: u64,
    local: SocketAddr,
    remote: SocketAddr,
    fake: bool,
) -> [Payload; 2] {
    let mut source = nat_detection(spi_i, spi_r, local);
    if fake {
        // Any other value will do; inverting it can never yield the true hash.
        for octet in &mut source {
            *octet = !*octet;
        }
    }
    let destination = nat_detection(spi_i, spi_r, remote);
    [
        Payload::Notify(NotifyPayload::new(
            NotifyType::NatDetectionSourceIp,
            source.to_vec(),
        )),
        Payload::Notify(NotifyPayload::new(
            NotifyType::NatDetectionDestinationIp,
            destination.to_vec(),
        )),
    ]
}

/// What a message says about NATs on its way; it came from `remote` to `local`.
pub(crate) fn detect(
    payloads: &[Payload],
    spi_i: u64,
    spi_r: u64,
    local: SocketAddr,
    remote: SocketAddr,
) -> Nat {
    let of = |kind| {
        payloads.iter().filter_map(move |payload| match payload {
            Payload::Notify(notify) if notify.notify_type == kind => Some(notify),
            _ => None,
        })
    };
    let mut sources = of(NotifyType::NatDetectionSourceIp).peekable();
    let mut destinations = of(NotifyType::NatDetectionDestinationIp).peekable();
    if sources.peek().is_none() || destinations.peek().is_none() {
        return Nat::default();
    }
    let seen_remote = nat_detection(spi_i, spi_r, remote);
    let seen_local = nat_detection(spi_i, spi_r, local);
    // A multihomed sender gives one source hash per address that it may send from.
    let remote = !sources.any(|notify| notify.data == seen_remote);
    let local = !destinations.any(|notify| notify.data == seen_local);
    Nat {
        local,
        remote,
        fake: false,
        supported: true,
    }
}
