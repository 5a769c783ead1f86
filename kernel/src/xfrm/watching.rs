// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What changes of this host's network mean to the kernel's SAs and routes.

use std::sync::Arc;

use swanherd_ipsec::plane::HwOffload;

use super::message::{self, SeenSa};
use super::{Shared, absent_is_fine, event};
use crate::netlink::NetlinkError;
use crate::reconcile::WantedSa;
use crate::route_table::RouteTable;
use crate::watch::{ANY_INTERFACE, Watcher};

/// Adapts routes, and lets go of devices that vanish.
pub(super) struct Adapter {
    pub(super) shared: Arc<Shared>,
    pub(super) routes: Arc<tokio::sync::Mutex<RouteTable>>,
}

impl Watcher for Adapter {
    fn own_ports(&self) -> Vec<u32> {
        vec![self.shared.router.port()]
    }

    /// The kernel cannot get rid of a device as long as SAs refer to it. Those SAs are of no use:
    /// their keys and sequence numbers were the device's.
    async fn vanished(&self, interface: u32) {
        if self.shared.offload.lets_go(interface) {
            tracing::warn!(interface, "a device to which SAs were offloaded has gone");
            if let Err(error) = self.release(interface).await {
                tracing::warn!(%error, interface, "cannot remove the SAs of a vanished device");
            }
            event::compare_all(&self.shared);
        }
    }

    /// The kernel drops what the device had taken over, and tells nobody.
    async fn set_down(&self, interface: u32) {
        if self.shared.offload.is_in_use(interface) {
            tracing::warn!(
                interface,
                "a device to which SAs are offloaded was set down"
            );
            event::compare_all(&self.shared);
        }
    }

    async fn evaluate(&self, contest: bool) {
        let mut routes = self.routes.lock().await;
        if let Err(error) = routes.mend(&self.shared.router, contest).await {
            tracing::warn!(%error, "cannot adapt the routes of tunnels");
        }
    }
}

impl Adapter {
    /// Removes our SAs that are still offloaded to a device that has gone.
    async fn release(&self, interface: u32) -> Result<(), NetlinkError> {
        let seen = self
            .shared
            .requests
            .dump(&message::dump_sas(), |_, payload| {
                let sa = SeenSa::parse(payload)?;
                Some((sa.id, sa.mark, sa.offload?.interface))
            })
            .await?;
        let present = match interface {
            ANY_INTERFACE => Some(self.shared.router.interfaces().await?),
            _ => None,
        };
        let gone = |device: u32| match &present {
            Some(present) => !present.contains(&device),
            None => device == interface,
        };
        for (id, mark, device) in seen {
            let ours = matches!(
                self.shared.books().desired.sa(id),
                Some(WantedSa::Installed(entry)) if entry.offload != HwOffload::No
            );
            if ours && gone(device) {
                let removal = message::remove_sa(id, mark);
                absent_is_fine(self.shared.requests.command(&removal, 0).await)?;
            }
        }
        Ok(())
    }
}
