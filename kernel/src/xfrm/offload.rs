// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which network device takes over ESP (`hw_offload`).
//!
//! `auto` asks for what any policy goes with: encryption by the device. Full offload needs
//! policies that the device has too, and the kernel lets no other packets through its SAs, so it
//! has to be asked for.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use swanherd_ipsec::plane::{Direction, HwOffload, SaEntry};

use crate::route::Router;
use crate::watch::ANY_INTERFACE;

/// Remembers which devices have taken over, and which have disappointed, to say so once.
#[derive(Debug, Default)]
pub(super) struct Offload {
    told: Mutex<BTreeSet<(u32, IpAddr)>>,
    /// Interface indices of devices that SAs were given to.
    in_use: Mutex<BTreeSet<u32>>,
}

/// A device that is to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Interface index.
    pub(super) index: u32,
    /// The address by which it was found.
    address: IpAddr,
    /// Everything, policies included.
    pub(super) packet: bool,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {} with {}", self.index, self.address)
    }
}

impl Offload {
    /// The device for an SA, if one is to take over.
    ///
    /// # Errors
    /// In words: there is no device with the SA's own address, and it must be one.
    pub(super) async fn device(
        &self,
        router: &Router,
        entry: &SaEntry,
    ) -> Result<Option<Device>, String> {
        let packet = match entry.offload {
            HwOffload::No => return Ok(None),
            HwOffload::Packet => true,
            HwOffload::Crypto | HwOffload::Auto => false,
        };
        let own = match entry.direction {
            Direction::Out => entry.src,
            Direction::In | Direction::Fwd => entry.dst,
        };
        match self.device_of(router, own).await {
            Ok(device) => Ok(Some(Device { packet, ..device })),
            Err(reason) if entry.offload == HwOffload::Auto => {
                self.tell((0, own), &reason);
                Ok(None)
            }
            Err(reason) => Err(reason),
        }
    }

    /// The device that has an own address.
    ///
    /// # Errors
    /// In words: there is none.
    pub(super) async fn device_of(&self, router: &Router, own: IpAddr) -> Result<Device, String> {
        let addresses = router
            .local_addresses()
            .await
            .map_err(|error| format!("no device for offload: {error}"))?;
        addresses
            .iter()
            .find(|local| local.addr == own)
            .map(|local| Device {
                index: local.interface,
                address: own,
                packet: true,
            })
            .ok_or_else(|| format!("no device for offload: no interface has {own}"))
    }

    /// An SA was given to a device.
    pub(super) fn uses(&self, device: &Device) {
        self.in_use().insert(device.index);
    }

    /// Whether SAs were given to a device.
    pub(super) fn is_in_use(&self, interface: u32) -> bool {
        self.in_use().contains(&interface)
    }

    /// A device has gone, or any one may have: whether SAs were given to it.
    pub(super) fn lets_go(&self, interface: u32) -> bool {
        let mut in_use = self.in_use();
        match interface {
            ANY_INTERFACE => !in_use.is_empty(),
            _ => in_use.remove(&interface),
        }
    }

    fn in_use(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says once for each device that the kernel does the work itself.
    pub(super) fn falls_back(&self, device: &Device, reason: &str) {
        self.tell((device.index, device.address), reason);
    }

    fn tell(&self, device: (u32, IpAddr), reason: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.insert(device) {
            tracing::info!(
                address = %device.1,
                reason,
                "hw_offload = auto: the kernel itself processes ESP here"
            );
        }
    }
}
