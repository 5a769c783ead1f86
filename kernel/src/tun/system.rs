// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the TUN plane asks of the host: its link up, a routing rule, routes into the device.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::AddressFamily;
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};

use crate::netlink::NetlinkError;
use crate::route::{Router, TunnelRoute};

/// A destination network.
type Network = (IpAddr, u8);

/// Routes, rules and the link of one TUN device.
pub(super) struct System {
    router: Router,
    interface: u32,
    mark: u32,
    /// Families whose rule is installed.
    rules: Vec<AddressFamily>,
    /// Which policy sets want each route.
    routes: BTreeMap<Network, BTreeSet<u32>>,
}

impl System {
    pub(super) fn open(interface: u32, mark: u32) -> io::Result<Self> {
        Ok(Self {
            router: Router::open()?,
            interface,
            mark,
            rules: Vec::new(),
            routes: BTreeMap::new(),
        })
    }

    /// Brings the link up and installs the rules. What an earlier run left behind is replaced.
    pub(super) async fn start(&mut self, mtu: u32, gso_max_size: u32) -> Result<(), NetlinkError> {
        self.router.raise_link(self.interface, mtu).await?;
        // Only makes batches fit better; kernels before 4.16 cannot set it.
        if let Err(error) = self
            .router
            .set_gso_max_size(self.interface, gso_max_size)
            .await
        {
            tracing::debug!(%error, "TUN device keeps its largest segment size");
        }

        // Everything but our own ESP and IKE looks into the tunnels' table.
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            match self.router.install_rule(family, Some(self.mark)).await {
                // One that is there was left behind by a run that was killed.
                Ok(_) => self.rules.push(family),
                Err(error) if family == AddressFamily::Inet6 => {
                    tracing::info!(%error, "no IPv6 routing rule; IPv6 is not tunnelled");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Installs the routes of a set and removes those that only its predecessor `old` needed.
    pub(super) async fn install(
        &mut self,
        set: &PolicySet,
        old: Option<&PolicySet>,
    ) -> Result<(), NetlinkError> {
        let wanted = networks(set);
        if !wanted.is_empty() {
            let source = self.source(&set.local).await?;
            let route = |network: &Network| match set.action {
                PolicyAction::Bypass => TunnelRoute::Throw,
                PolicyAction::Protect { .. } | PolicyAction::Discard => TunnelRoute::Via {
                    interface: self.interface,
                    gateway: None,
                    source: source
                        .iter()
                        .copied()
                        .find(|addr| addr.is_ipv4() == network.0.is_ipv4()),
                },
            };
            let mut outcome = Ok(());
            for network in &wanted {
                outcome = self.router.install(*network, route(network)).await;
                if outcome.is_err() {
                    break;
                }
                self.routes.entry(*network).or_default().insert(set.id);
            }
            if let Err(error) = outcome {
                let kept = old.map(networks).unwrap_or_default();
                self.release(set.id, wanted.iter().filter(|n| !kept.contains(n)))
                    .await;
                return Err(error);
            }
        }
        if let Some(old) = old {
            let obsolete = networks(old);
            self.release(set.id, obsolete.iter().filter(|n| !wanted.contains(n)))
                .await;
        }
        Ok(())
    }

    /// Removes the routes that only this set needed.
    pub(super) async fn remove(&mut self, set: &PolicySet) {
        self.release(set.id, networks(set).iter()).await;
    }

    /// Removes all routes and rules. The link goes with the device.
    pub(super) async fn shutdown(&mut self) {
        for network in std::mem::take(&mut self.routes).into_keys() {
            if let Err(error) = self.router.remove(network).await {
                tracing::warn!(%error, ?network, "route stays behind");
            }
        }
        for family in std::mem::take(&mut self.rules) {
            if let Err(error) = self.router.remove_rule(family, Some(self.mark)).await {
                tracing::warn!(%error, "routing rule stays behind");
            }
        }
    }

    async fn release(&mut self, set: u32, networks: impl Iterator<Item = &Network>) {
        for network in networks {
            let Some(users) = self.routes.get_mut(network) else {
                continue;
            };
            users.remove(&set);
            if users.is_empty() {
                self.routes.remove(network);
                if let Err(error) = self.router.remove(*network).await {
                    tracing::warn!(%error, ?network, "route stays behind");
                }
            }
        }
    }

    /// Own addresses inside the local selectors: hosts of the tunnel send from them.
    async fn source(&self, local: &[TrafficSelector]) -> Result<Vec<IpAddr>, NetlinkError> {
        let inside = |addr: &IpAddr| {
            local.iter().any(|ts| {
                ts.start <= *addr && *addr <= ts.end && ts.start.is_ipv4() == addr.is_ipv4()
            })
        };
        Ok(self
            .router
            .local_addresses()
            .await?
            .into_iter()
            .map(|local| local.addr)
            .filter(inside)
            .collect())
    }
}

/// The networks that a set's routes lead to.
fn networks(set: &PolicySet) -> BTreeSet<Network> {
    if !set.routes {
        return BTreeSet::new();
    }
    set.remote.iter().flat_map(prefixes).collect()
}

/// The fewest networks that make up the addresses of a selector.
fn prefixes(selector: &TrafficSelector) -> Vec<Network> {
    let (mut start, end, width) = match (selector.start, selector.end) {
        (IpAddr::V4(s), IpAddr::V4(e)) => (u128::from(s.to_bits()), u128::from(e.to_bits()), 32),
        (IpAddr::V6(s), IpAddr::V6(e)) => (s.to_bits(), e.to_bits(), 128),
        _ => return Vec::new(),
    };
    let mut found = Vec::new();
    while start <= end {
        // As many host bits as alignment allows and the end leaves room for.
        let mut host = start.trailing_zeros().min(width);
        while host > 0 && start | low_bits(host) > end {
            host -= 1;
        }
        let addr = if width == 32 {
            Ipv4Addr::from_bits(start as u32).into()
        } else {
            Ipv6Addr::from_bits(start).into()
        };
        found.push((addr, (width - host) as u8));
        let Some(next) = (start | low_bits(host)).checked_add(1) else {
            break;
        };
        start = next;
    }
    found
}

fn low_bits(count: u32) -> u128 {
    1u128.checked_shl(count).map_or(u128::MAX, |bit| bit - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(start: &str, end: &str) -> Vec<String> {
        let selector = TrafficSelector {
            start: start.parse().unwrap(),
            end: end.parse().unwrap(),
            ..TrafficSelector::any_v4()
        };
        prefixes(&selector)
            .iter()
            .map(|(addr, len)| format!("{addr}/{len}"))
            .collect()
    }

    #[test]
    fn ranges_become_the_fewest_networks() {
        assert_eq!(of("10.0.0.0", "10.0.255.255"), ["10.0.0.0/16"]);
        assert_eq!(of("0.0.0.0", "255.255.255.255"), ["0.0.0.0/0"]);
        assert_eq!(
            of("10.0.0.1", "10.0.0.4"),
            ["10.0.0.1/32", "10.0.0.2/31", "10.0.0.4/32"]
        );
        assert_eq!(
            of("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ["::/0"]
        );
        assert_eq!(of("2001:db8::", "2001:db8::1"), ["2001:db8::/127"]);
        assert_eq!(
            of("255.255.255.254", "255.255.255.255"),
            ["255.255.255.254/31"]
        );
    }
}
