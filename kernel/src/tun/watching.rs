// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What changes of this host's network mean to the routes into the device.

use std::sync::{Arc, Weak};

use tokio::sync::Mutex;

use super::shared::Shared;
use super::system::System;
use crate::route::Router;
use crate::watch::Watcher;

/// Adapts routes.
pub(super) struct Adapter {
    pub(super) router: Arc<Router>,
    pub(super) system: Arc<Mutex<System>>,
    pub(super) shared: Weak<Shared>,
}

impl Watcher for Adapter {
    fn own_ports(&self) -> Vec<u32> {
        vec![self.router.port()]
    }

    /// The TUN device may be among them, deleted or moved to another network namespace.
    async fn vanished(&self, interface: u32) {
        if let Some(shared) = self.shared.upgrade() {
            shared.losses.vanished(interface, shared.device.index());
        }
    }

    /// That the TUN device is down shows in what it does with packets.
    async fn set_down(&self, _interface: u32) {}

    async fn evaluate(&self, contest: bool) {
        if let Err(error) = self.system.lock().await.mend(contest).await {
            tracing::warn!(%error, "cannot adapt the routes of tunnels");
        }
    }
}
