// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is asked of others: names, routes, addresses, and what the data plane holds. Each runs on a
//! task of its own, so that whoever is slow holds up nobody else.

use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_ike::api::{HostAddress, Input, Token};
use swanherd_kernel::DataPlane;
use swanherd_kernel::route::{Router, source_for};
use tokio::sync::Semaphore;

use super::{Answer, Engine, Sender, now};
use crate::control::PoliciesReply;

/// Lookups of names at a time. A resolver that answers nobody keeps a thread for half a minute and
/// more; this is how many it can keep, and how many names must fail before one has to wait.
const RESOLVER_LIMIT: usize = 64;
/// A name that takes longer cannot be resolved now; so it is if it has to wait for so long.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Questions about routes at a time: each has a socket of its own.
const ROUTE_LIMIT: usize = 32;

/// Bounds of what is asked at a time.
#[derive(Debug)]
pub(super) struct Lookups {
    names: Arc<Semaphore>,
    routes: Arc<Semaphore>,
    /// The addresses of this host are being listed.
    listing: bool,
    /// They have changed since that began.
    again: bool,
}

impl Default for Lookups {
    fn default() -> Self {
        Self {
            names: Arc::new(Semaphore::new(RESOLVER_LIMIT)),
            routes: Arc::new(Semaphore::new(ROUTE_LIMIT)),
            listing: false,
            again: false,
        }
    }
}

/// The addresses of a name; none if it has none, or they are not known in time.
///
/// The system's resolver cannot be interrupted: a lookup that is given up goes on for a while, and
/// counts as long as it does. Its thread is not one of the runtime's, which would wait for it
/// before the daemon can end.
async fn resolve(name: String, limit: Arc<Semaphore>) -> Vec<IpAddr> {
    let lookup = async {
        let permit = limit.acquire_owned().await.ok()?;
        let (answer, answered) = tokio::sync::oneshot::channel();
        let begun = std::thread::Builder::new()
            .name("resolver".to_owned())
            .spawn(move || {
                let found = (name.as_str(), 0).to_socket_addrs();
                drop(permit);
                // Nobody may be waiting any more.
                let _ = answer.send(found);
            });
        if let Err(error) = begun {
            tracing::warn!(%error, "cannot start a thread for a lookup");
            return None;
        }
        let found = answered.await.ok()?.ok()?;
        Some(found.map(|addr| addr.ip()).collect())
    };
    let found = tokio::time::timeout(RESOLVE_TIMEOUT, lookup).await;
    found.ok().flatten().unwrap_or_default()
}

impl<P: DataPlane + 'static, S: Sender> Engine<P, S> {
    pub(super) fn resolve(&self, token: Token, name: String) {
        let answers = self.answers_in.clone();
        let limit = Arc::clone(&self.lookups.names);
        tokio::spawn(async move {
            let _ = answers.send(Answer::Resolved(token, resolve(name, limit).await));
        });
    }

    pub(super) fn find_source(&self, token: Token, remote: IpAddr) {
        let answers = self.answers_in.clone();
        let limit = Arc::clone(&self.lookups.routes);
        tokio::spawn(async move {
            let Ok(_permit) = limit.acquire().await else {
                return;
            };
            let addr = source_for(remote).await;
            let _ = answers.send(Answer::Source(token, addr));
        });
    }

    /// Lists the addresses of this host, or does so again if that is under way.
    pub(super) fn list_addresses(&mut self) {
        if std::mem::replace(&mut self.lookups.listing, true) {
            self.lookups.again = true;
            return;
        }
        let answers = self.answers_in.clone();
        tokio::spawn(async move {
            let found = match Router::open() {
                Ok(router) => router.usable_addresses().await.map_err(|e| e.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let found = found
                .inspect_err(|error| tracing::warn!(%error, "addresses cannot be listed"))
                .ok();
            let host = |usable: swanherd_kernel::route::UsableAddress| HostAddress {
                addr: usable.addr,
                link: usable.interface,
                routed: usable.routed,
            };
            let found = found.map(|found| found.into_iter().map(host).collect());
            let _ = answers.send(Answer::Addresses(found));
        });
    }

    pub(super) fn addresses_listed(&mut self, found: Option<Vec<HostAddress>>) {
        self.lookups.listing = false;
        if let Some(found) = found {
            self.scripts.addresses(&found);
            self.endpoint.handle(now(), Input::Addresses(found));
        }
        if std::mem::take(&mut self.lookups.again) {
            self.list_addresses();
        }
    }

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

    /// There is a fresh dump: answers who asked when SAs were last used.
    pub(super) fn tell_usage(&mut self) {
        let at = now();
        for (token, sas) in std::mem::take(&mut self.usage_waiters) {
            let last = self.accounting.last_used(&sas);
            let ago = last.map(|last| at.instant.saturating_duration_since(last));
            self.endpoint.handle(at, Input::Usage(token, ago));
        }
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
