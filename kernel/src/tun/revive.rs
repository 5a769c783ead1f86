// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the TUN device anew when somebody has deleted it or moved it to another network namespace.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, Notify};

use super::shared::Shared;
use super::system::System;
use crate::watch::ANY_INTERFACE;

/// Rest after an attempt, doubled after each failure,
const PAUSE: Duration = Duration::from_millis(100);
/// but not longer.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// What was heard of the device's end, from whoever notices first.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Index of an interface of ours that has left this host or network namespace.
    gone: AtomicU32,
    news: Notify,
}

impl Losses {
    /// An interface, or any, has gone, while the device has the index `ours`.
    pub(super) fn vanished(&self, interface: u32, ours: u32) {
        if interface == ours {
            self.gone.store(ours, Ordering::Relaxed);
        } else if interface != ANY_INTERFACE {
            return;
        }
        self.look();
    }

    /// The device may be gone.
    pub(super) fn look(&self) {
        self.news.notify_one();
    }

    fn has(&self, shared: &Shared) -> bool {
        self.gone.load(Ordering::Relaxed) == shared.device.index() || !shared.device.is_there()
    }
}

/// Waits for the device's end, and replaces it, for ever.
pub(super) async fn run(shared: Arc<Shared>, system: Arc<Mutex<System>>) {
    loop {
        shared.losses.news.notified().await;
        replace(&shared, &system).await;
    }
}

async fn replace(shared: &Shared, system: &Mutex<System>) {
    let device = shared.device.name();
    let mut pause = PAUSE;
    let mut told = false;
    let mut is_new = false;
    loop {
        let outcome = {
            let mut system = system.lock().await;
            if shared.is_stopping() {
                return;
            }
            if shared.losses.has(shared) {
                if !told {
                    tracing::error!(device, "TUN device is gone; no packet passes without it");
                }
                is_new = false;
            } else if !told {
                return;
            }
            revive(shared, &mut system, &mut is_new).await
        };
        match outcome {
            Ok(()) => {
                tracing::info!(device, "TUN device is back");
                tokio::time::sleep(PAUSE).await;
                return;
            }
            Err(error) => {
                if pause == PAUSE {
                    tracing::error!(device, %error, "cannot make the TUN device anew yet");
                }
            }
        }
        told = true;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Makes a device unless that `is_new` already, and leads the routes into it.
async fn revive(shared: &Shared, system: &mut System, is_new: &mut bool) -> io::Result<()> {
    if !*is_new {
        shared.device.renew()?;
        *is_new = true;
    }
    system
        .move_to(shared.device.index())
        .await
        .map_err(io::Error::other)
}
