// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What changes of this host's network mean to the kernel's SAs and routes.

use std::collections::BTreeSet;
use std::sync::Arc;

use swanherd_ipsec::plane::{HwOffload, Mark, SaId};

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
        if let Err(error) = self.release(interface).await {
            tracing::warn!(%error, interface, "cannot remove the SAs of a vanished device");
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
    async fn release(&self, interface: u32) -> Result<(), NetlinkError> {
        let offloaded: BTreeSet<SaId> = {
            let books = self.shared.books();
            let sas = books.desired.sas();
            sas.filter(|(_, sa)| {
                matches!(sa, WantedSa::Installed(entry) if entry.offload != HwOffload::No)
            })
            .map(|(id, _)| *id)
            .collect()
        };
        if offloaded.is_empty() {
            return Ok(());
        }
        let seen = self
            .shared
            .requests
            .dump(&message::dump_sas(), |_, payload| {
                let sa = SeenSa::parse(payload)?;
                Some((sa.id, sa.mark, sa.device?))
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
        let lost: Vec<(SaId, Option<Mark>)> = seen
            .into_iter()
            .filter(|(id, _, device)| offloaded.contains(id) && gone(*device))
            .map(|(id, mark, _)| (id, mark))
            .collect();
        for (id, mark) in &lost {
            let removal = message::remove_sa(*id, *mark);
            absent_is_fine(self.shared.requests.command(&removal, 0).await)?;
        }
        let lost: Vec<SaId> = lost.into_iter().map(|(id, _)| id).collect();
        if !lost.is_empty() {
            tracing::warn!(
                interface,
                sas = lost.len(),
                "a device vanished with its SAs"
            );
        }
        event::report_missing(&self.shared, &lost);
        Ok(())
    }
}
