// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Routes of tunnels: each has one or more owners, and goes when the last one does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, PolicyAction, PolicySet};

use crate::netlink::NetlinkError;
use crate::route::{LocalAddress, OUR_PROTOCOL, Router, TunnelRoute, family};
use crate::xfrm::covering_prefix;

/// A destination network: its address and the length of its prefix.
pub type Network = (IpAddr, u8);

/// The routes that we installed, by destination, with their owners. An owner is the id of a
/// policy set.
#[derive(Debug, Default)]
pub struct RouteTable {
    /// Oldest owner first; the first one's route is installed.
    routes: BTreeMap<Network, Vec<(u32, TunnelRoute)>>,
    rules: BTreeSet<u8>,
}

impl RouteTable {
    /// Installs the routes that `set` needs, in place of those that it had. What cannot be
    /// installed is reported and left out: a tunnel without a route still carries traffic that
    /// other routes send its way.
    pub async fn install(
        &mut self,
        router: &Router,
        set: &PolicySet,
    ) -> Vec<(Network, NetlinkError)> {
        let mut failures = Vec::new();
        let wanted = match routes_for(router, set).await {
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::warn!(owner = %set.owner, %error, "cannot look up routes of a tunnel");
                return failures;
            }
        };
        let obsolete: Vec<Network> = self
            .routes
            .iter()
            .filter(|(network, owners)| {
                owners.iter().any(|(id, _)| *id == set.id) && !wanted.contains_key(network)
            })
            .map(|(network, _)| *network)
            .collect();
        for (network, route) in wanted {
            if let Err(error) = self.add(router, set.id, network, route).await {
                failures.push((network, error));
            }
        }
        for network in obsolete {
            self.release(router, set.id, network).await;
        }
        failures
    }

    /// Removes the routes of owner `id` that no other owner needs.
    pub async fn remove(&mut self, router: &Router, id: u32) {
        let owned: Vec<Network> = self
            .routes
            .iter()
            .filter(|(_, owners)| owners.iter().any(|(owner, _)| *owner == id))
            .map(|(network, _)| *network)
            .collect();
        for network in owned {
            self.release(router, id, network).await;
        }
    }

    /// Removes all routes and rules that we installed.
    pub async fn clear(&mut self, router: &Router) {
        for network in std::mem::take(&mut self.routes).into_keys() {
            warn_on_error(network, router.remove(network).await);
        }
        for code in std::mem::take(&mut self.rules) {
            if let Err(error) = router.remove_rule(AddressFamily::from(code), None).await {
                tracing::warn!(%error, "cannot remove the routing rule of the tunnels");
            }
        }
    }

    /// Removes what an earlier run left: routes with our mark that nobody owns now.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn remove_leftovers(&mut self, router: &Router) -> Result<usize, NetlinkError> {
        let mut removed = 0;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for seen in router.tunnel_routes(family).await? {
                if seen.protocol == OUR_PROTOCOL && !self.routes.contains_key(&seen.network) {
                    router.remove(seen.network).await?;
                    removed += 1;
                }
            }
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            if !self.rules.contains(&u8::from(family)) {
                router.remove_rule(family, None).await?;
            }
        }
        Ok(removed)
    }

    async fn add(
        &mut self,
        router: &Router,
        id: u32,
        network: Network,
        route: TunnelRoute,
    ) -> Result<(), NetlinkError> {
        let code = u8::from(family(network.0));
        if !self.rules.contains(&code) && router.install_rule(family(network.0), None).await? {
            self.rules.insert(code);
        }
        let owners = self.routes.entry(network).or_default();
        let installed = owners.first().map(|(_, route)| *route);
        match owners.iter_mut().find(|(owner, _)| *owner == id) {
            Some((_, own)) => *own = route,
            None => owners.push((id, route)),
        }
        let Some((_, first)) = owners.first().copied() else {
            return Ok(());
        };
        if installed == Some(first) {
            return Ok(());
        }
        let result = install(router, network, first).await;
        if result.is_err() {
            owners.retain(|(owner, _)| *owner != id);
            if owners.is_empty() {
                self.routes.remove(&network);
            }
        }
        result
    }

    async fn release(&mut self, router: &Router, id: u32, network: Network) {
        let Some(owners) = self.routes.get_mut(&network) else {
            return;
        };
        let installed = owners.first().map(|(_, route)| *route);
        owners.retain(|(owner, _)| *owner != id);
        let result = match owners.first().map(|(_, route)| *route) {
            None => {
                self.routes.remove(&network);
                router.remove(network).await
            }
            Some(route) if Some(route) != installed => install(router, network, route).await,
            Some(_) => Ok(()),
        };
        warn_on_error(network, result);
    }
}

/// Installs a route. Some links do not take the peer itself for a gateway; then none is named.
async fn install(
    router: &Router,
    network: Network,
    route: TunnelRoute,
) -> Result<(), NetlinkError> {
    let result = router.install(network, route).await;
    match (route, &result) {
        (
            TunnelRoute::Via {
                interface,
                gateway: Some(_),
                source,
            },
            Err(NetlinkError::Refused { errno, .. }),
        ) if [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EINVAL].contains(errno) => {
            router
                .install(
                    network,
                    TunnelRoute::Via {
                        interface,
                        gateway: None,
                        source,
                    },
                )
                .await
        }
        _ => result,
    }
}

/// The routes that make the packets of `set` leave, by destination.
async fn routes_for(
    router: &Router,
    set: &PolicySet,
) -> Result<BTreeMap<Network, TunnelRoute>, NetlinkError> {
    let mut routes = BTreeMap::new();
    if !set.routes || set.if_id_out != 0 {
        return Ok(routes);
    }
    match set.action {
        PolicyAction::Discard => {}
        PolicyAction::Bypass => {
            for network in routable(&set.remote) {
                routes.insert(network, TunnelRoute::Throw);
            }
        }
        PolicyAction::Protect { mode, remote, .. } => {
            if mode == Mode::Transport || remote.is_unspecified() {
                return Ok(routes);
            }
            let addresses = router.local_addresses().await?;
            let Some(hop) = router.next_hop(remote).await? else {
                tracing::info!(owner = %set.owner, %remote, "no route to the peer, so none for its networks");
                return Ok(routes);
            };
            for network in routable(&set.remote) {
                let gateway = Some(hop.gateway.unwrap_or(remote))
                    .filter(|gateway| gateway.is_ipv4() == network.0.is_ipv4());
                let route = match source_within(&set.local, &addresses, network.0.is_ipv4()) {
                    Source::Any => None,
                    Source::Address(source) => Some(source),
                    // Packets of this host would carry an address that the peer does not accept.
                    Source::None => continue,
                };
                routes.insert(
                    network,
                    TunnelRoute::Via {
                        interface: hop.interface,
                        gateway,
                        source: route,
                    },
                );
            }
        }
    }
    Ok(routes)
}

/// Networks of selectors that select all traffic of a network. A route for one protocol or port
/// would catch the rest as well.
fn routable(selectors: &[TrafficSelector]) -> impl Iterator<Item = Network> {
    selectors
        .iter()
        .filter(|ts| ts.protocol == 0 && ts.start_port == 0 && ts.end_port == u16::MAX)
        .map(covering_prefix)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// Whatever the kernel chooses is selected.
    Any,
    /// An own address that is selected.
    Address(IpAddr),
    /// No own address is selected.
    None,
}

fn source_within(local: &[TrafficSelector], addresses: &[LocalAddress], ipv4: bool) -> Source {
    let same_family = || local.iter().filter(|ts| ts.start.is_ipv4() == ipv4);
    if same_family().any(|ts| ts.prefix_len() == Some(0)) {
        return Source::Any;
    }
    same_family()
        .find_map(|ts| {
            addresses
                .iter()
                .map(|local| local.addr)
                .find(|addr| (ts.start..=ts.end).contains(addr) && addr.is_ipv4() == ipv4)
        })
        .map_or(Source::None, Source::Address)
}

fn warn_on_error((addr, prefix_len): Network, result: Result<(), NetlinkError>) {
    if let Err(error) = result {
        tracing::warn!(route = %format_args!("{addr}/{prefix_len}"), %error, "cannot change a route");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str, len: u8) -> TrafficSelector {
        TrafficSelector::network(text.parse().unwrap(), len).unwrap()
    }

    fn own(addr: &str) -> LocalAddress {
        LocalAddress {
            addr: addr.parse().unwrap(),
            prefix_len: 24,
            interface: 2,
            ours: false,
        }
    }

    #[test]
    fn the_source_is_an_own_address_that_the_tunnel_carries() {
        let own = [own("192.0.2.1"), own("10.1.0.1"), own("10.1.0.2")];
        assert_eq!(
            source_within(&[network("10.1.0.0", 24)], &own, true),
            Source::Address("10.1.0.1".parse().unwrap())
        );
        assert_eq!(
            source_within(&[network("10.9.0.0", 24)], &own, true),
            Source::None
        );
        assert_eq!(
            source_within(&[TrafficSelector::any_v4()], &own, true),
            Source::Any
        );
        assert_eq!(
            source_within(&[TrafficSelector::any_v4()], &own, false),
            Source::None
        );
    }

    #[test]
    fn selectors_of_one_protocol_get_no_route() {
        let mut tcp = network("10.2.0.0", 24);
        tcp.protocol = 6;
        let selectors = [tcp, network("10.3.0.0", 24)];
        let networks: Vec<Network> = routable(&selectors).collect();
        assert_eq!(networks, [("10.3.0.0".parse().unwrap(), 24)]);
    }
}
