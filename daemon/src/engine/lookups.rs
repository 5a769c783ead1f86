// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is asked of the data plane beside the operations on it. Each runs on a task of its own.

use std::sync::Arc;
use std::time::Instant;

use swanherd_kernel::DataPlane;

use super::{Answer, Engine, Sender};
use crate::control::PoliciesReply;

impl<P: DataPlane + 'static, S: Sender> Engine<P, S> {
    pub(super) fn start_counters(&mut self) {
        if std::mem::replace(&mut self.counters_running, true) {
            return;
        }
        let plane = Arc::clone(&self.plane);
        let answers = self.answers_in.clone();
        tokio::spawn(async move {
            let dump = match plane.counters().await {
                Ok(dump) => Some(dump),
                Err(error) => {
                    tracing::warn!(%error, "the data plane gave no counters");
                    None
                }
            };
            let _ = answers.send(Answer::Counters(dump));
        });
    }

    pub(super) fn start_audit(&mut self) {
        let Some(dry_run) = self.audits.begin() else {
            return;
        };
        let plane = Arc::clone(&self.plane);
        let answers = self.answers_in.clone();
        tokio::spawn(async move {
            let begun = Instant::now();
            let outcome = plane.reconcile(dry_run).await;
            let _ = answers.send(Answer::Audit(begun.elapsed(), outcome));
        });
    }

    pub(super) fn list_policies(&self, reply: PoliciesReply) {
        let plane = Arc::clone(&self.plane);
        let listings = Arc::clone(&self.listings);
        tokio::spawn(async move {
            let Ok(_permit) = listings.acquire().await else {
                return;
            };
            // A client that left while others were served needs none.
            if reply.is_closed() {
                return;
            }
            let listed = plane.policies().await;
            let _ = reply.send(listed.map_err(|error| error.to_string()));
        });
    }
}
