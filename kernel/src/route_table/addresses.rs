// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtual addresses (RFC 7296 section 3.15), counted by their users.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::netlink::NetlinkError;
use crate::route::{LocalAddress, Router};

/// The virtual addresses that SAs use.
#[derive(Debug, Default)]
pub(super) struct VirtualAddresses {
    table: BTreeMap<IpAddr, Virtual>,
    /// Added by an earlier run.
    left: BTreeSet<IpAddr>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Virtual {
    users: usize,
    /// The interface that we added it to; `None` if the host had it before.
    pub(super) interface: Option<u32>,
}

impl VirtualAddresses {
    pub(super) async fn add(
        &mut self,
        router: &Router,
        addr: IpAddr,
        local: IpAddr,
        record: impl FnOnce(),
    ) -> Result<(), NetlinkError> {
        if let Some(known) = self.table.get_mut(&addr) {
            known.users += 1;
            return Ok(());
        }
        let present = router.local_addresses().await?;
        let interface = match present.iter().find(|there| there.addr == addr) {
            Some(there) if !self.is_ours(there) => None,
            // Left by an earlier run. It may be on another interface than today's.
            Some(there) => {
                router.remove_address(addr, there.interface).await?;
                Some(interface_of(&present, local)?)
            }
            None => Some(interface_of(&present, local)?),
        };
        if let Some(interface) = interface {
            record();
            match router.add_address(addr, interface).await {
                // Kernels before 5.18 do not keep our mark: it was there, whoever's it is.
                Err(error) if error.errno() == Some(libc::EEXIST) => {}
                result => result?,
            }
        }
        self.table.insert(
            addr,
            Virtual {
                users: 1,
                interface,
            },
        );
        Ok(())
    }

    pub(super) async fn remove(
        &mut self,
        router: &Router,
        addr: IpAddr,
    ) -> Result<(), NetlinkError> {
        let Some(known) = self.table.get_mut(&addr) else {
            return Ok(());
        };
        known.users -= 1;
        if known.users > 0 {
            return Ok(());
        }
        let interface = known.interface;
        self.table.remove(&addr);
        match interface {
            Some(interface) => router.remove_address(addr, interface).await,
            None => Ok(()),
        }
    }

    pub(super) fn has(&self, addr: IpAddr) -> bool {
        self.table.contains_key(&addr)
    }

    pub(super) fn take_for_ours(&mut self, addresses: BTreeSet<IpAddr>) {
        self.left.extend(addresses);
    }

    /// Audited: what an earlier run left is gone, and may come back by other hands.
    pub(super) fn nothing_left(&mut self) {
        self.left.clear();
    }

    fn is_ours(&self, there: &LocalAddress) -> bool {
        there.ours || self.left.contains(&there.addr)
    }

    pub(super) async fn clear(&mut self, router: &Router) {
        for (addr, known) in std::mem::take(&mut self.table) {
            if let Some(interface) = known.interface
                && let Err(error) = router.remove_address(addr, interface).await
            {
                tracing::warn!(%addr, %error, "cannot remove a virtual address");
            }
        }
    }

    /// Addresses that should be there and are not, with their interfaces.
    pub(super) fn missing(&self, present: &[LocalAddress]) -> Vec<(IpAddr, u32)> {
        self.table
            .iter()
            .filter_map(|(addr, known)| Some((*addr, known.interface?)))
            .filter(|(addr, _)| !present.iter().any(|there| there.addr == *addr))
            .collect()
    }

    /// Addresses of ours that nobody uses, with their interfaces.
    pub(super) fn unwanted(&self, present: &[LocalAddress]) -> Vec<(IpAddr, u32)> {
        present
            .iter()
            .filter(|there| self.is_ours(there) && !self.table.contains_key(&there.addr))
            .map(|there| (there.addr, there.interface))
            .collect()
    }
}

fn interface_of(present: &[LocalAddress], local: IpAddr) -> Result<u32, NetlinkError> {
    present
        .iter()
        .find(|there| there.addr == local)
        .map(|there| there.interface)
        .ok_or_else(|| NetlinkError::Refused {
            errno: libc::EADDRNOTAVAIL,
            text: Some(format!("no interface has {local}")),
        })
}
