// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which routes a set of policies needs, and what they are on this host at this moment.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mode, PolicyAction, PolicySet};

use crate::netlink::NetlinkError;
use crate::route::{
    Candidate, LocalAddress, Lookup, NextHop, Router, TunnelRoute, family, next_hop_among,
};
use crate::xfrm::covering_prefix;

/// A destination network: its address and the length of its prefix.
pub type Network = (IpAddr, u8);

/// How packets get to where they are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// They go towards the peer, and XFRM takes them on the way.
    Peer,
    /// They go into a device. Packets with the mark are its own and do not.
    Device { interface: u32, mark: u32 },
}

impl Way {
    /// Whether packets to where `route` leads must be stopped while it is gone: the device, which
    /// protects them, may vanish, while XFRM protects them on every other way as well.
    pub(super) fn guards(self, route: TunnelRoute) -> bool {
        matches!(
            (self, route),
            (Self::Device { .. }, TunnelRoute::Via { .. })
        )
    }

    /// The mark of packets that do not look into the tunnels' table.
    pub(super) fn mark(self) -> Option<u32> {
        match self {
            Self::Peer => None,
            Self::Device { mark, .. } => Some(mark),
        }
    }
}

/// What a set of policies needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    /// `connection/child`.
    pub(super) owner: String,
    pub(super) networks: BTreeSet<Network>,
    local: Vec<TrafficSelector>,
    target: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// As if there were no tunnels, whoever sends.
    Past,
    /// Towards this peer.
    Peer(IpAddr),
    /// Into this device.
    Device(u32),
}

impl Demand {
    pub(super) fn of(way: Way, set: &PolicySet) -> Self {
        let (target, networks) = match (way, set.action) {
            _ if !set.routes || set.if_id_out != 0 => (Target::Past, BTreeSet::new()),
            (Way::Device { .. }, PolicyAction::Bypass) => {
                (Target::Past, set.remote.iter().flat_map(prefixes).collect())
            }
            (Way::Device { interface, .. }, _) => (
                Target::Device(interface),
                set.remote.iter().flat_map(prefixes).collect(),
            ),
            (Way::Peer, PolicyAction::Bypass) => (Target::Past, routable(&set.remote)),
            (Way::Peer, PolicyAction::Protect { mode, remote, .. })
                if mode != Mode::Transport && !remote.is_unspecified() =>
            {
                (Target::Peer(remote), routable(&set.remote))
            }
            (Way::Peer, _) => (Target::Past, BTreeSet::new()),
        };
        Self {
            owner: set.owner.clone(),
            networks,
            local: set.local.clone(),
            target,
        }
    }

    /// Leads into another device, if into one.
    pub(super) fn lead_into(&mut self, interface: u32) {
        if let Target::Device(device) = &mut self.target {
            *device = interface;
        }
    }

    /// The route to one of the networks. `None` if it cannot be made: there is no way to the
    /// peer, or packets of this host would carry an address that the peer does not accept.
    pub(super) async fn route(
        &self,
        router: &Router,
        world: &mut World,
        network: Network,
    ) -> Result<Option<TunnelRoute>, NetlinkError> {
        let ipv4 = network.0.is_ipv4();
        let (interface, gateway) = match self.target {
            Target::Past => return Ok(Some(TunnelRoute::Throw)),
            Target::Device(interface) => (interface, None),
            Target::Peer(peer) => {
                let Some(hop) = world.hop(router, peer).await? else {
                    return Ok(None);
                };
                let gateway = hop.gateway.unwrap_or(peer);
                (hop.interface, Some(gateway).filter(|g| g.is_ipv4() == ipv4))
            }
        };
        let source = match source_within(&self.local, world.addresses(router).await?, ipv4) {
            Source::Any => None,
            Source::Address(source) => Some(source),
            // A device forwards for others too, however this host is addressed.
            Source::None if matches!(self.target, Target::Device(_)) => None,
            Source::None => return Ok(None),
        };
        Ok(Some(TunnelRoute::Via {
            interface,
            gateway,
            source,
        }))
    }
}

/// This host's addresses and its ways to peers, asked for when first needed.
#[derive(Debug, Default)]
pub(super) struct World {
    addresses: Option<Vec<LocalAddress>>,
    hops: BTreeMap<IpAddr, Option<NextHop>>,
    /// All routes without those of tunnels, by whether they are IPv4.
    routes: BTreeMap<bool, Vec<Candidate>>,
}

impl World {
    pub(super) async fn addresses(
        &mut self,
        router: &Router,
    ) -> Result<&[LocalAddress], NetlinkError> {
        if self.addresses.is_none() {
            self.addresses = Some(router.local_addresses().await?);
        }
        Ok(self.addresses.as_deref().unwrap_or_default())
    }

    pub(super) async fn hop(
        &mut self,
        router: &Router,
        peer: IpAddr,
    ) -> Result<Option<NextHop>, NetlinkError> {
        if let Some(hop) = self.hops.get(&peer) {
            return Ok(*hop);
        }
        let hop = match router.lookup(peer).await? {
            Lookup::Hop(hop) => Some(hop),
            Lookup::Unreachable => None,
            Lookup::Hidden => {
                self.addresses(router).await?;
                let routes = match self.routes.entry(peer.is_ipv4()) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(unknown) => unknown.insert(router.routes(family(peer)).await?),
                };
                let addresses = self.addresses.as_deref().unwrap_or_default();
                next_hop_among(routes, addresses, peer)
            }
        };
        self.hops.insert(peer, hop);
        Ok(hop)
    }
}

/// Networks of selectors that select all traffic of a network. A route for one protocol or port
/// would catch the rest as well.
fn routable(selectors: &[TrafficSelector]) -> BTreeSet<Network> {
    selectors
        .iter()
        .filter(|ts| ts.protocol == 0 && ts.start_port == 0 && ts.end_port == u16::MAX)
        .map(covering_prefix)
        .collect()
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
        let networks = routable(&[tcp, network("10.3.0.0", 24)]);
        assert_eq!(networks, [("10.3.0.0".parse().unwrap(), 24)].into());
    }

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
