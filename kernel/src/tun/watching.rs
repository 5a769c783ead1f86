// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What changes of this host's network mean to the routes into the device.

use std::sync::Arc;

use tokio::sync::Mutex;

use super::system::System;
use crate::route::Router;
use crate::watch::Watcher;

/// Adapts routes.
pub(super) struct Adapter {
    pub(super) router: Arc<Router>,
    pub(super) system: Arc<Mutex<System>>,
}

impl Watcher for Adapter {
    fn own_ports(&self) -> Vec<u32> {
        vec![self.router.port()]
    }

    /// Nothing of ours refers to devices.
    async fn vanished(&self, _interface: u32) {}

    async fn evaluate(&self) {
        if let Err(error) = self.system.lock().await.mend().await {
            tracing::warn!(%error, "cannot adapt the routes of tunnels");
        }
    }
}
