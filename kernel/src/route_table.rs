// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Routes of tunnels: each has one or more owners, and goes when the last one does.
//!
//! What is wanted is kept apart from what is installed: a route that cannot be made now, because
//! there is no way to the peer or no address to send from, is made by [`RouteTable::audit`] once
//! it can be, and one that someone or the kernel itself removed is put back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use swanherd_ipsec::plane::PolicySet;

use crate::netlink::NetlinkError;
use crate::route::{Router, TunnelRoute, family};

mod addresses;
mod audit;
mod demand;

use addresses::VirtualAddresses;
pub use demand::Network;
use demand::{Demand, Way, World};

/// The routes, rules and virtual addresses that tunnels need of this host. An owner of a route is
/// the id of a policy set.
#[derive(Debug)]
pub struct RouteTable {
    way: Way,
    demands: BTreeMap<u32, Demand>,
    /// Who wants each network, oldest first: the first one's route is installed.
    owners: BTreeMap<Network, Vec<u32>>,
    /// What we put into the kernel.
    installed: BTreeMap<Network, Installed>,
    /// What it refused last, so that each refusal is told once.
    refused: BTreeMap<Network, String>,
    /// Families (`AF_INET`, `AF_INET6`) whose rule is ours.
    rules: BTreeSet<u8>,
    addresses: VirtualAddresses,
}

/// A route that we installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Installed {
    /// What was wanted when we did.
    wanted: TunnelRoute,
    /// What the kernel took instead, if not that.
    actual: TunnelRoute,
}

impl Default for RouteTable {
    fn default() -> Self {
        Self::new(Way::Peer)
    }
}

impl RouteTable {
    /// For routes into a device, which `mark` tells from the device's own packets.
    pub fn into_device(interface: u32, mark: u32) -> Self {
        Self::new(Way::Device { interface, mark })
    }

    fn new(way: Way) -> Self {
        Self {
            way,
            demands: BTreeMap::new(),
            owners: BTreeMap::new(),
            installed: BTreeMap::new(),
            refused: BTreeMap::new(),
            rules: BTreeSet::new(),
            addresses: VirtualAddresses::default(),
        }
    }

    /// Leads the routes into another device from the next audit on.
    pub(crate) fn lead_into(&mut self, interface: u32) {
        if let Way::Device { interface: old, .. } = &mut self.way {
            *old = interface;
        }
        for demand in self.demands.values_mut() {
            demand.lead_into(interface);
        }
    }

    /// Installs the routes that `set` needs, in place of those that it had. What cannot be
    /// installed is reported and left to the next audit: a tunnel without a route still carries
    /// traffic that other routes send its way.
    pub async fn install(
        &mut self,
        router: &Router,
        set: &PolicySet,
    ) -> Vec<(Network, NetlinkError)> {
        let demand = Demand::of(self.way, set);
        let old = match self.demands.get(&set.id) {
            Some(old) if *old == demand => return Vec::new(),
            Some(old) => old.networks.clone(),
            None => BTreeSet::new(),
        };
        for network in &demand.networks {
            let owners = self.owners.entry(*network).or_default();
            if !owners.contains(&set.id) {
                owners.push(set.id);
            }
        }
        let obsolete: Vec<Network> = old.difference(&demand.networks).copied().collect();
        let wanted: Vec<Network> = demand.networks.iter().copied().collect();
        self.demands.insert(set.id, demand);
        for network in &obsolete {
            self.disown(*network, set.id);
        }
        let mut failures = Vec::new();
        let mut world = World::default();
        for network in &wanted {
            self.refused.remove(network);
        }
        for network in wanted.into_iter().chain(obsolete) {
            if let Err(error) = self.settle(router, &mut world, network).await {
                failures.push((network, error));
            }
        }
        failures
    }

    /// Removes the routes of owner `id` that no other owner needs.
    pub async fn remove(&mut self, router: &Router, id: u32) {
        let Some(demand) = self.demands.remove(&id) else {
            return;
        };
        let mut world = World::default();
        for network in demand.networks {
            self.disown(network, id);
            let settled = self.settle(router, &mut world, network).await;
            warn_on_error(network, settled);
        }
    }

    /// Adds a virtual address to the interface that has `local`. Each addition needs its own
    /// removal; an address that was there before is left alone. `record` is called just before
    /// the kernel is asked to add it.
    ///
    /// # Errors
    /// The kernel's refusal, or in words that no interface has `local`.
    pub async fn add_address(
        &mut self,
        router: &Router,
        addr: IpAddr,
        local: IpAddr,
        record: impl FnOnce(),
    ) -> Result<(), NetlinkError> {
        self.addresses.add(router, addr, local, record).await
    }

    /// Whether a virtual address is in use.
    pub fn has_address(&self, addr: IpAddr) -> bool {
        self.addresses.has(addr)
    }

    /// Takes addresses for ours though the kernel may not have kept our mark of them (before
    /// 5.18): an earlier run wrote down that it added them. The next audit removes them.
    pub fn take_for_ours(&mut self, addresses: BTreeSet<IpAddr>) {
        self.addresses.take_for_ours(addresses);
    }

    /// Takes back one addition of a virtual address; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_address(
        &mut self,
        router: &Router,
        addr: IpAddr,
    ) -> Result<(), NetlinkError> {
        self.addresses.remove(router, addr).await
    }

    /// Removes all routes, rules and virtual addresses that we installed.
    pub async fn clear(&mut self, router: &Router) {
        self.demands.clear();
        let guarded = std::mem::take(&mut self.owners);
        self.refused.clear();
        if self.way.mark().is_some() {
            // Also those whose routes have gone with the device.
            for network in guarded.into_keys() {
                warn_on_error(network, router.remove_guard(network).await);
            }
        }
        for network in std::mem::take(&mut self.installed).into_keys() {
            warn_on_error(network, router.remove(network).await);
        }
        for code in std::mem::take(&mut self.rules) {
            let removed = router
                .remove_rule(AddressFamily::from(code), self.way.mark())
                .await;
            if let Err(error) = removed {
                tracing::warn!(%error, "cannot remove the routing rule of the tunnels");
            }
        }
        self.addresses.clear(router).await;
    }

    /// Makes the kernel's route to one network what its owners want, as far as we know it.
    async fn settle(
        &mut self,
        router: &Router,
        world: &mut World,
        network: Network,
    ) -> Result<(), NetlinkError> {
        let wanted = match self.wanted(router, world, network).await {
            Ok(wanted) => wanted,
            Err(error) => return self.note(network, Err(error)),
        };
        let outcome = match (self.installed.get(&network), wanted) {
            (Some(installed), Some(wanted)) if installed.wanted == wanted => Ok(()),
            (_, Some(wanted)) => self.put(router, network, wanted).await,
            (Some(_), None) => self.take_out(router, network).await,
            // One whose device did not take a route.
            (None, None) if self.way.mark().is_some() => router.remove_guard(network).await,
            (None, None) => Ok(()),
        };
        self.note(network, outcome)
    }

    /// The route that the oldest owner wants whose route can be made.
    async fn wanted(
        &self,
        router: &Router,
        world: &mut World,
        network: Network,
    ) -> Result<Option<TunnelRoute>, NetlinkError> {
        for id in self.owners.get(&network).into_iter().flatten() {
            let Some(demand) = self.demands.get(id) else {
                continue;
            };
            if let Some(route) = demand.route(router, world, network).await? {
                return Ok(Some(route));
            }
        }
        Ok(None)
    }

    async fn put(
        &mut self,
        router: &Router,
        network: Network,
        route: TunnelRoute,
    ) -> Result<(), NetlinkError> {
        let family = family(network.0);
        if !self.rules.contains(&u8::from(family)) {
            self.put_rule(router, family).await?;
        }
        // First, so that it is there from the first packet on.
        if self.way.guards(route) {
            router.install_guard(network).await?;
        }
        let actual = install(router, network, route).await?;
        if !self.way.guards(route)
            && let Some(old) = self.installed.get(&network)
            && self.way.guards(old.wanted)
        {
            router.remove_guard(network).await?;
        }
        let wanted = route;
        self.installed.insert(network, Installed { wanted, actual });
        Ok(())
    }

    async fn put_rule(
        &mut self,
        router: &Router,
        family: AddressFamily,
    ) -> Result<(), NetlinkError> {
        // One that is there may be someone else's, and then stays theirs.
        if router.install_rule(family, self.way.mark()).await? {
            self.rules.insert(u8::from(family));
        }
        Ok(())
    }

    async fn take_out(&mut self, router: &Router, network: Network) -> Result<(), NetlinkError> {
        if let Some(installed) = self.installed.get(&network)
            && self.way.guards(installed.wanted)
        {
            router.remove_guard(network).await?;
        }
        router.remove(network).await?;
        self.installed.remove(&network);
        Ok(())
    }

    /// Keeps in mind what was refused. A refusal that was told before is not an error again.
    fn note(
        &mut self,
        network: Network,
        outcome: Result<(), NetlinkError>,
    ) -> Result<(), NetlinkError> {
        let Err(error) = outcome else {
            self.refused.remove(&network);
            return Ok(());
        };
        let text = error.to_string();
        if self.refused.get(&network) == Some(&text) {
            return Ok(());
        }
        self.refused.insert(network, text);
        Err(error)
    }

    fn disown(&mut self, network: Network, id: u32) {
        if let Some(owners) = self.owners.get_mut(&network) {
            owners.retain(|owner| *owner != id);
            if owners.is_empty() {
                self.owners.remove(&network);
            }
        }
    }

    fn owner_of(&self, network: &Network) -> Option<String> {
        let id = self.owners.get(network)?.first()?;
        Some(self.demands.get(id)?.owner.clone())
    }
}

/// Installs a route, and returns what the kernel took: some links do not take the peer itself for
/// a gateway; then none is named.
async fn install(
    router: &Router,
    network: Network,
    route: TunnelRoute,
) -> Result<TunnelRoute, NetlinkError> {
    let result = router.install(network, route).await;
    match (route, result) {
        (
            TunnelRoute::Via {
                interface,
                gateway: Some(_),
                source,
            },
            Err(NetlinkError::Refused { errno, .. }),
        ) if [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EINVAL].contains(&errno) => {
            let direct = TunnelRoute::Via {
                interface,
                gateway: None,
                source,
            };
            router.install(network, direct).await?;
            Ok(direct)
        }
        (route, result) => result.map(|()| route),
    }
}

fn warn_on_error((addr, prefix_len): Network, result: Result<(), NetlinkError>) {
    if let Err(error) = result {
        tracing::warn!(route = %format_args!("{addr}/{prefix_len}"), %error, "cannot change a route");
    }
}
