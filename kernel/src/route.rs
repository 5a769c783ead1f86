// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where packets would go and which addresses this host has, asked of the kernel over rtnetlink,
//! and the few things that tunnels change there.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteMessage};
use netlink_packet_route::rule::RuleMessage;

use crate::netlink::NetlinkError;
use crate::rtnl::Rtnl;

mod message;

pub(crate) use message::{SeenRoute, SeenRule};
use message::{
    destination_of, guard_route, is_usable, local_address, metric_of, next_hop_of, seen_rule,
    table_of, tunnel_route, tunnel_rule, virtual_address,
};

/// The routing table that tunnels' routes go into, and the priority of the rule that consults it.
/// Both as strongSwan's defaults.
pub const TUNNEL_TABLE: u8 = 220;

/// The protocol that marks routes, rules and addresses as ours, so that a later run recognises
/// what an earlier one left behind.
pub const OUR_PROTOCOL: u8 = 220;

/// A connection to ask for and change routes, rules, addresses and links.
#[derive(Debug)]
pub struct Router {
    rtnl: Rtnl,
}

/// Where packets for some destination go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// Interface index.
    pub interface: u32,
    /// The gateway; `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The address that the kernel would use as source.
    pub source: Option<IpAddr>,
}

/// An address of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// The address.
    pub addr: IpAddr,
    /// Length of its network's prefix.
    pub prefix_len: u8,
    /// Index of the interface that it is configured on.
    pub interface: u32,
    /// Whether it carries our mark ([`OUR_PROTOCOL`]): a virtual address. Kernels before 5.18
    /// keep no mark.
    pub ours: bool,
}

/// An address of this host that packets to elsewhere can be sent from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsableAddress {
    /// The address.
    pub addr: IpAddr,
    /// Index of the interface that it is configured on.
    pub interface: u32,
    /// Whether a route outside of [`TUNNEL_TABLE`] leads over that interface to a gateway, or
    /// everywhere.
    pub routed: bool,
}

/// What a route in [`TUNNEL_TABLE`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TunnelRoute {
    /// Leave by this interface; XFRM takes the packets on the way.
    Via {
        /// Interface index.
        interface: u32,
        /// Next hop, if it is of the same family as the destination.
        gateway: Option<IpAddr>,
        /// Preferred source address.
        source: Option<IpAddr>,
    },
    /// Go on with the next routing table (for bypass policies).
    Throw,
}

impl Router {
    /// Opens the connection. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the kernel gives no netlink socket.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            rtnl: Rtnl::open()?,
        })
    }

    /// The port number that the kernel's reports of our changes carry.
    pub(crate) fn port(&self) -> u32 {
        self.rtnl.port()
    }

    /// The route to `remote` without regard to [`TUNNEL_TABLE`], which may send the peer's own
    /// network through its tunnel. `None` if there is no route.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn next_hop(&self, remote: IpAddr) -> Result<Option<NextHop>, NetlinkError> {
        match self.lookup(remote).await? {
            Lookup::Hop(hop) => Ok(Some(hop)),
            Lookup::Unreachable => Ok(None),
            Lookup::Hidden => {
                let routes = self.routes(family(remote)).await?;
                let addresses = self.local_addresses().await?;
                Ok(next_hop_among(&routes, &addresses, remote))
            }
        }
    }

    /// Asks the kernel for the route to `remote`.
    pub(crate) async fn lookup(&self, remote: IpAddr) -> Result<Lookup, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(remote);
        message.header.destination_prefix_length = full_prefix(remote);
        // For IPv6 the kernel always names the table, and refuses to be asked for it.
        if remote.is_ipv4() {
            message.header.flags = RouteFlags::LookupTable;
        }
        message
            .attributes
            .push(RouteAttribute::Destination(remote.into()));
        let answer = self.rtnl.get(RouteNetlinkMessage::GetRoute(message)).await;
        Ok(match answer {
            Ok(Some(RouteNetlinkMessage::NewRoute(route))) => {
                if table_of(&route) == u32::from(TUNNEL_TABLE) {
                    Lookup::Hidden
                } else if is_usable(&route) {
                    next_hop_of(&route).map_or(Lookup::Unreachable, Lookup::Hop)
                } else {
                    Lookup::Unreachable
                }
            }
            // Perhaps by a route of ours; see `install_guard`.
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EHOSTUNREACH => {
                Lookup::Hidden
            }
            Ok(_) | Err(NetlinkError::Refused { .. }) => Lookup::Unreachable,
            Err(error) => return Err(error),
        })
    }

    /// The source address of packets to `remote`, or `None` if it cannot be reached.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn source_for(&self, remote: IpAddr) -> Result<Option<IpAddr>, NetlinkError> {
        Ok(self.next_hop(remote).await?.and_then(|hop| hop.source))
    }

    /// All addresses of this host that others may know it by, in the kernel's order: no loopback
    /// addresses, no IPv6 link-local ones, none still being checked for duplicates.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn local_addresses(&self) -> Result<Vec<LocalAddress>, NetlinkError> {
        self.rtnl
            .dump(
                &RouteNetlinkMessage::GetAddress(AddressMessage::default()),
                |answer| match answer {
                    RouteNetlinkMessage::NewAddress(message) => local_address(&message),
                    _ => None,
                },
            )
            .await
    }

    /// Those of [`Self::local_addresses`] that serve: on interfaces that are up and have a carrier,
    /// without virtual addresses.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn usable_addresses(&self) -> Result<Vec<UsableAddress>, NetlinkError> {
        let links = self
            .rtnl
            .dump(
                &RouteNetlinkMessage::GetLink(LinkMessage::default()),
                |answer| match answer {
                    RouteNetlinkMessage::NewLink(link) => {
                        let alive = LinkFlags::Up | LinkFlags::LowerUp;
                        let serves = link.header.flags.contains(alive);
                        serves.then_some(link.header.index)
                    }
                    _ => None,
                },
            )
            .await?;
        let links: BTreeSet<u32> = links.into_iter().collect();
        let mut routed = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let routes = self.routes(family).await?;
            let beyond = |route: &&Candidate| route.hop.gateway.is_some() || route.network.1 == 0;
            routed.extend(
                routes
                    .iter()
                    .filter(beyond)
                    .map(|route| (route.hop.interface, route.network.0.is_ipv4())),
            );
        }
        let addresses = self.local_addresses().await?;
        Ok(addresses
            .into_iter()
            .filter(|address| links.contains(&address.interface) && !address.ours)
            .map(|address| UsableAddress {
                addr: address.addr,
                interface: address.interface,
                routed: routed.contains(&(address.interface, address.addr.is_ipv4())),
            })
            .collect())
    }

    /// Indices of all links.
    pub(crate) async fn interfaces(&self) -> Result<BTreeSet<u32>, NetlinkError> {
        let links = self
            .rtnl
            .dump(
                &RouteNetlinkMessage::GetLink(LinkMessage::default()),
                |answer| match answer {
                    RouteNetlinkMessage::NewLink(link) => Some(link.header.index),
                    _ => None,
                },
            )
            .await?;
        Ok(links.into_iter().collect())
    }

    /// Adds `addr` to an interface as a host address that bears our mark. IPv6 ones are usable at
    /// once, but never chosen as source unless a route names them.
    ///
    /// # Errors
    /// The kernel's refusal; `EEXIST` if that interface has it.
    pub async fn add_address(&self, addr: IpAddr, interface: u32) -> Result<(), NetlinkError> {
        self.rtnl
            .command(|handle| {
                let mut request = handle.address().add(interface, addr, full_prefix(addr));
                *request.message_mut() = virtual_address(addr, interface);
                request.execute()
            })
            .await
    }

    /// Removes `addr` from an interface; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_address(&self, addr: IpAddr, interface: u32) -> Result<(), NetlinkError> {
        let gone = self
            .rtnl
            .command(|handle| {
                handle
                    .address()
                    .del(virtual_address(addr, interface))
                    .execute()
            })
            .await;
        match gone {
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EADDRNOTAVAIL => Ok(()),
            other => absent_is_fine(other),
        }
    }

    /// Brings a link up with this MTU.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn raise_link(&self, interface: u32, mtu: u32) -> Result<(), NetlinkError> {
        let mut link = LinkMessage::default();
        link.header.index = interface;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        link.attributes = vec![LinkAttribute::Mtu(mtu)];
        self.set_link(link).await
    }

    /// Sets the largest packet that segmentation offload hands to a link.
    ///
    /// # Errors
    /// The kernel's refusal; those before 4.16 cannot set it.
    pub async fn set_gso_max_size(&self, interface: u32, octets: u32) -> Result<(), NetlinkError> {
        let mut link = LinkMessage::default();
        link.header.index = interface;
        link.attributes = vec![LinkAttribute::GsoMaxSize(octets)];
        self.set_link(link).await
    }

    async fn set_link(&self, link: LinkMessage) -> Result<(), NetlinkError> {
        self.rtnl
            .command(|handle| handle.link().set(link).execute())
            .await
    }

    /// Adds a route in [`TUNNEL_TABLE`], marked as ours, or replaces ours to that destination.
    ///
    /// # Errors
    /// The kernel's refusal; `EEXIST` if someone else has a route there, which is left alone.
    pub async fn install(
        &self,
        destination: (IpAddr, u8),
        route: TunnelRoute,
    ) -> Result<(), NetlinkError> {
        let message = tunnel_route(destination, Some(route));
        let added = self
            .rtnl
            .command(|handle| handle.route().add(message.clone()).execute())
            .await;
        match added {
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EEXIST => {}
            other => return other,
        }
        // Replacing takes the first route to that destination, whoever's it is.
        let present = self.tunnel_routes(family(destination.0)).await?;
        let mut there = present.iter().filter(|seen| seen.network == destination);
        if let Some(alien) = there.find(|seen| seen.protocol != OUR_PROTOCOL) {
            return Err(NetlinkError::Refused {
                errno: libc::EEXIST,
                text: Some(format!(
                    "someone else has a route there in table {TUNNEL_TABLE} (protocol {})",
                    alien.protocol
                )),
            });
        }
        self.rtnl
            .command(|handle| handle.route().add(message).replace().execute())
            .await
    }

    /// Removes our route to `destination` from [`TUNNEL_TABLE`]; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove(&self, destination: (IpAddr, u8)) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.rtnl
                .command(|handle| {
                    handle
                        .route()
                        .del(tunnel_route(destination, None))
                        .execute()
                })
                .await,
        )
    }

    /// Adds a route in [`TUNNEL_TABLE`], marked as ours, that stops packets to `destination` while
    /// there is no other route of that table: those into a device go when the device does. One
    /// that is there already is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(crate) async fn install_guard(
        &self,
        destination: (IpAddr, u8),
    ) -> Result<(), NetlinkError> {
        let message = guard_route(destination);
        let added = self
            .rtnl
            .command(|handle| handle.route().add(message).execute())
            .await;
        match added {
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EEXIST => Ok(()),
            other => other,
        }
    }

    /// Removes what [`install_guard`](Self::install_guard) added; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(crate) async fn remove_guard(&self, destination: (IpAddr, u8)) -> Result<(), NetlinkError> {
        let message = guard_route(destination);
        absent_is_fine(
            self.rtnl
                .command(|handle| handle.route().del(message).execute())
                .await,
        )
    }

    /// Installs the rule that consults [`TUNNEL_TABLE`], marked as ours; with `mark`, for all
    /// packets but those that carry it. `false` if such a rule is there already.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn install_rule(
        &self,
        family: AddressFamily,
        mark: Option<u32>,
    ) -> Result<bool, NetlinkError> {
        let installed = self
            .rtnl
            .command(|handle| {
                let mut request = handle.rule().add();
                *request.message_mut() = tunnel_rule(family, mark);
                request.execute()
            })
            .await;
        match installed {
            Ok(()) => Ok(true),
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EEXIST => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes our rule for [`TUNNEL_TABLE`]; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_rule(
        &self,
        family: AddressFamily,
        mark: Option<u32>,
    ) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.rtnl
                .command(|handle| handle.rule().del(tunnel_rule(family, mark)).execute())
                .await,
        )
    }

    /// The rules that consult [`TUNNEL_TABLE`], anybody's.
    pub(crate) async fn rules(&self, family: AddressFamily) -> Result<Vec<SeenRule>, NetlinkError> {
        let mut message = RuleMessage::default();
        message.header.family = family;
        let rules = self
            .rtnl
            .dump(
                &RouteNetlinkMessage::GetRule(message),
                |answer| match answer {
                    RouteNetlinkMessage::NewRule(rule) => seen_rule(&rule),
                    _ => None,
                },
            )
            .await;
        absent_is_empty(rules)
    }

    /// All routes of [`TUNNEL_TABLE`], anybody's.
    pub(crate) async fn tunnel_routes(
        &self,
        family: AddressFamily,
    ) -> Result<Vec<SeenRoute>, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        // Newer kernels list only this table then, the others all of them.
        message.header.table = TUNNEL_TABLE;
        let routes = self
            .rtnl
            .dump(
                &RouteNetlinkMessage::GetRoute(message),
                |answer| match answer {
                    RouteNetlinkMessage::NewRoute(route) => SeenRoute::read(&route),
                    _ => None,
                },
            )
            .await;
        absent_is_empty(routes)
    }

    /// All routes of the other tables that lead anywhere.
    pub(crate) async fn routes(
        &self,
        family: AddressFamily,
    ) -> Result<Vec<Candidate>, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        let routes = self
            .rtnl
            .dump(
                &RouteNetlinkMessage::GetRoute(message),
                |answer| match answer {
                    RouteNetlinkMessage::NewRoute(route) => candidate(&route),
                    _ => None,
                },
            )
            .await;
        absent_is_empty(routes)
    }
}

/// The kernel's answer for one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// It goes this way.
    Hop(NextHop),
    /// [`TUNNEL_TABLE`] hides where it would go without tunnels.
    Hidden,
    /// There is no route.
    Unreachable,
}

/// A route outside [`TUNNEL_TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    network: (IpAddr, u8),
    metric: u32,
    hop: NextHop,
}

fn candidate(route: &RouteMessage) -> Option<Candidate> {
    if table_of(route) == u32::from(TUNNEL_TABLE) || !is_usable(route) {
        return None;
    }
    Some(Candidate {
        network: destination_of(route)?,
        metric: metric_of(route),
        hop: next_hop_of(route)?,
    })
}

/// The longest matching route, for when [`TUNNEL_TABLE`] hides it from a lookup. Of equally long
/// prefixes the one with the lowest metric wins, and the first of those.
pub(crate) fn next_hop_among(
    routes: &[Candidate],
    addresses: &[LocalAddress],
    remote: IpAddr,
) -> Option<NextHop> {
    let best = routes
        .iter()
        .filter(|route| in_network(remote, route.network.0, route.network.1))
        .min_by_key(|route| (u8::MAX - route.network.1, route.metric))?;
    let mut hop = best.hop;
    if hop.source.is_none() {
        let near = hop.gateway.unwrap_or(remote);
        let on_interface = |a: &&LocalAddress| {
            a.interface == hop.interface && a.addr.is_ipv4() == remote.is_ipv4()
        };
        hop.source = addresses
            .iter()
            .filter(on_interface)
            .find(|a| in_network(near, a.addr, a.prefix_len))
            .or_else(|| addresses.iter().find(on_interface))
            .map(|a| a.addr);
    }
    Some(hop)
}

/// The source address of packets to `remote`, or `None` if it cannot be reached or the kernel
/// cannot be asked. Opens a socket for this one question.
pub async fn source_for(remote: IpAddr) -> Option<IpAddr> {
    Router::open().ok()?.source_for(remote).await.ok()?
}

/// All addresses of this host; see [`Router::local_addresses`].
///
/// # Errors
/// If the kernel cannot be asked.
pub async fn local_addresses() -> Result<Vec<LocalAddress>, NetlinkError> {
    Router::open()?.local_addresses().await
}

/// Whether `addr` is in the network of `network` with `prefix_len`.
pub(crate) fn in_network(addr: IpAddr, network: IpAddr, prefix_len: u8) -> bool {
    match (addr, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) => {
            let host = u32::MAX.checked_shr(prefix_len.into()).unwrap_or(0);
            (a.to_bits() ^ n.to_bits()) & !host == 0
        }
        (IpAddr::V6(a), IpAddr::V6(n)) => {
            let host = u128::MAX.checked_shr(prefix_len.into()).unwrap_or(0);
            (a.to_bits() ^ n.to_bits()) & !host == 0
        }
        _ => false,
    }
}

/// The address family of `addr`.
pub(crate) fn family(addr: IpAddr) -> AddressFamily {
    if addr.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn full_prefix(addr: IpAddr) -> u8 {
    if addr.is_ipv4() { 32 } else { 128 }
}

fn absent_is_fine(result: Result<(), NetlinkError>) -> Result<(), NetlinkError> {
    match result {
        Err(NetlinkError::Refused { errno, .. })
            if [libc::ESRCH, libc::ENOENT, libc::ENODEV].contains(&errno) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// A table that was never used does not exist.
fn absent_is_empty<T>(result: Result<Vec<T>, NetlinkError>) -> Result<Vec<T>, NetlinkError> {
    match result {
        Err(NetlinkError::Refused { errno, .. })
            if [libc::ENOENT, libc::EAFNOSUPPORT, libc::EOPNOTSUPP].contains(&errno) =>
        {
            Ok(Vec::new())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_membership_is_by_prefix_and_family() {
        let v4: IpAddr = "10.1.2.3".parse().unwrap();
        let v6: IpAddr = "fd00::1".parse().unwrap();
        assert!(in_network(v4, "10.1.0.0".parse().unwrap(), 16));
        assert!(!in_network(v4, "10.2.0.0".parse().unwrap(), 16));
        assert!(in_network(v4, "0.0.0.0".parse().unwrap(), 0));
        assert!(in_network(v6, "fd00::".parse().unwrap(), 64));
        assert!(!in_network(v4, "::".parse().unwrap(), 0));
    }
}
