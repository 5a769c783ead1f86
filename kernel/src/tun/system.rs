// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the TUN plane asks of the host: its link up, routes into the device, virtual addresses.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use swanherd_ipsec::plane::{PolicyAction, PolicySet};

use super::detour;
use crate::audit::Finding;
use crate::netlink::NetlinkError;
use crate::route::Router;
use crate::route_table::RouteTable;

/// Routes, rules and the link of one TUN device.
pub(super) struct System {
    router: Arc<Router>,
    interface: u32,
    mtu: u32,
    gso_max_size: u32,
    /// Its rule sends everything but our own ESP and IKE into the device.
    routes: RouteTable,
}

impl System {
    /// For a device of this index, MTU, and largest packet before segmentation.
    pub(super) fn open(interface: u32, mtu: u32, gso_max_size: u32, mark: u32) -> io::Result<Self> {
        Ok(Self {
            router: Arc::new(Router::open()?),
            interface,
            mtu,
            gso_max_size,
            routes: RouteTable::into_device(interface, mark),
        })
    }

    /// Brings the link up, and removes what an earlier run left behind.
    pub(super) async fn start(&mut self) -> Result<(), NetlinkError> {
        self.raise().await?;
        self.audit(false).await.map(|_| ())
    }

    /// Goes on with another device in place of one that is gone: brings its link up, and leads
    /// the routes into it.
    pub(super) async fn move_to(&mut self, interface: u32) -> Result<(), NetlinkError> {
        self.interface = interface;
        self.routes.lead_into(interface);
        self.raise().await?;
        self.mend(false).await
    }

    async fn raise(&self) -> Result<(), NetlinkError> {
        self.router.raise_link(self.interface, self.mtu).await?;
        // Only makes batches fit better; kernels before 4.16 cannot set it.
        if let Err(error) = self
            .router
            .set_gso_max_size(self.interface, self.gso_max_size)
            .await
        {
            tracing::debug!(%error, "TUN device keeps its largest segment size");
        }
        Ok(())
    }

    /// Installs the routes of a set in place of those of its predecessor `old`. Without them no
    /// packet would reach the device, so a route that is refused refuses the set. `others` are the
    /// other sets.
    pub(super) async fn install(
        &mut self,
        set: &PolicySet,
        old: Option<&PolicySet>,
        others: &[PolicySet],
    ) -> Result<(), NetlinkError> {
        let all = || others.iter().chain([set]);
        // First, so that nothing is routed around a policy that has just come.
        self.settle_bypasses(others, all).await;
        let wanted = self.for_routes(set, all()).await;
        let failures = self.routes.install(&self.router, &wanted).await;
        let Some((_, error)) = failures.into_iter().next() else {
            return Ok(());
        };
        match old {
            Some(old) => {
                let wanted = self.for_routes(old, others.iter()).await;
                self.routes.install(&self.router, &wanted).await;
            }
            None => self.routes.remove(&self.router, set.id).await,
        }
        self.settle_bypasses(others, || others.iter().chain(old))
            .await;
        Err(error)
    }

    /// Removes the routes that only this set needed. `others` are the sets that stay.
    pub(super) async fn remove(&mut self, set: &PolicySet, others: &[PolicySet]) {
        self.routes.remove(&self.router, set.id).await;
        self.settle_bypasses(others, || others.iter()).await;
    }

    /// Routes the packets of each bypass among `sets` around the device or into it, as `all` sets
    /// together allow.
    async fn settle_bypasses<'a, I: Iterator<Item = &'a PolicySet>>(
        &mut self,
        sets: &[PolicySet],
        all: impl Fn() -> I,
    ) {
        for set in sets {
            if set.action == PolicyAction::Bypass {
                let wanted = self.for_routes(set, all()).await;
                for ((addr, len), error) in self.routes.install(&self.router, &wanted).await {
                    tracing::warn!(owner = %set.owner, route = %format_args!("{addr}/{len}"),
                        %error, "cannot change the route of a bypass");
                }
            }
        }
    }

    /// What the routes of a set are to be made from.
    async fn for_routes<'a>(
        &self,
        set: &PolicySet,
        all: impl Iterator<Item = &'a PolicySet>,
    ) -> PolicySet {
        if set.action != PolicyAction::Bypass || !set.routes || detour::is_for_all(set, all) {
            return set.clone();
        }
        let mut source = None;
        if let Some(remote) = set.remote.first() {
            source = self.router.source_for(remote.start).await.ok().flatten();
        }
        detour::through_device(set, source)
    }

    pub(super) async fn add_address(
        &mut self,
        addr: IpAddr,
        local: IpAddr,
    ) -> Result<(), NetlinkError> {
        // The mark of the address has to do: this plane keeps no ledger.
        self.routes
            .add_address(&self.router, addr, local, || {})
            .await
    }

    pub(super) async fn remove_address(&mut self, addr: IpAddr) -> Result<(), NetlinkError> {
        self.routes.remove_address(&self.router, addr).await
    }

    /// Compares routes, rules and addresses with what is wanted; see [`RouteTable::audit`].
    pub(super) async fn audit(&mut self, dry_run: bool) -> Result<Vec<Finding>, NetlinkError> {
        self.routes.audit(&self.router, dry_run).await
    }

    /// Audits because this host's network changed; see [`RouteTable::mend`].
    pub(super) async fn mend(&mut self, contest: bool) -> Result<(), NetlinkError> {
        self.routes.mend(&self.router, contest).await
    }

    /// The connection by which all of this is done.
    pub(super) fn router(&self) -> Arc<Router> {
        Arc::clone(&self.router)
    }

    /// Removes all routes, rules and addresses. The link goes with the device.
    pub(super) async fn shutdown(&mut self) {
        self.routes.clear(&self.router).await;
    }
}
