// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where packets would go and which addresses this host has, asked of the kernel over rtnetlink.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{NetlinkError, Requester};

/// The routing table that tunnels' routes go into, and the priority of the rule that consults it.
/// Both as strongSwan's defaults.
pub const TUNNEL_TABLE: u8 = 220;

/// The route protocol that marks routes and rules as ours, so that a later run recognises what an
/// earlier one left behind.
pub const OUR_PROTOCOL: u8 = 220;

/// A socket to ask for and change routes.
#[derive(Debug)]
pub struct Router {
    socket: Requester,
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
    /// Opens the socket. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the kernel gives no netlink socket.
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            socket: Requester::open(libc::NETLINK_ROUTE as isize)?,
        })
    }

    /// The route to `remote` without regard to [`TUNNEL_TABLE`], which may send the peer's own
    /// network through its tunnel. `None` if there is no route.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn next_hop(&self, remote: IpAddr) -> Result<Option<NextHop>, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(remote);
        message.header.destination_prefix_length = full_prefix(remote);
        message.header.flags = RouteFlags::LookupTable;
        message
            .attributes
            .push(RouteAttribute::Destination(remote.into()));
        let answer = self
            .socket
            .request(&RouteNetlinkMessage::GetRoute(message), 0, parse_route)
            .await;
        let route = match answer {
            Ok(mut routes) => routes.pop(),
            Err(NetlinkError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        match route {
            Some(route) if table_of(&route) == u32::from(TUNNEL_TABLE) => {
                self.next_hop_by_dump(remote).await
            }
            Some(route) if is_usable(&route) => Ok(next_hop_of(&route)),
            Some(_) | None => Ok(None),
        }
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
        self.socket
            .dump(
                &RouteNetlinkMessage::GetAddress(AddressMessage::default()),
                |kind, payload| match parse(kind, payload)? {
                    RouteNetlinkMessage::NewAddress(message) => local_address(&message),
                    _ => None,
                },
            )
            .await
    }

    /// Adds or replaces a route in [`TUNNEL_TABLE`], marked as ours.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn install(
        &self,
        destination: (IpAddr, u8),
        route: TunnelRoute,
    ) -> Result<(), NetlinkError> {
        self.socket
            .command(
                &RouteNetlinkMessage::NewRoute(tunnel_route(destination, Some(route))),
                NLM_F_CREATE | NLM_F_REPLACE,
            )
            .await
    }

    /// Removes our route to `destination` from [`TUNNEL_TABLE`]; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove(&self, destination: (IpAddr, u8)) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.socket
                .command(
                    &RouteNetlinkMessage::DelRoute(tunnel_route(destination, None)),
                    0,
                )
                .await,
        )
    }

    /// Installs the rule that consults [`TUNNEL_TABLE`], marked as ours. `false` if such a rule
    /// is there already.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn install_rule(&self, family: AddressFamily) -> Result<bool, NetlinkError> {
        let rule = RouteNetlinkMessage::NewRule(tunnel_rule(family));
        match self.socket.command(&rule, NLM_F_CREATE | NLM_F_EXCL).await {
            Ok(()) => Ok(true),
            Err(NetlinkError::Refused { errno, .. }) if errno == libc::EEXIST => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes our rule for [`TUNNEL_TABLE`]; one that is not there is fine.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_rule(&self, family: AddressFamily) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.socket
                .command(&RouteNetlinkMessage::DelRule(tunnel_rule(family)), 0)
                .await,
        )
    }

    /// Destinations of all routes in [`TUNNEL_TABLE`] that carry our mark.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub async fn our_routes(&self) -> Result<Vec<(IpAddr, u8)>, NetlinkError> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let routes = self.routes(family).await?;
            found.extend(routes.iter().filter_map(|route| {
                let ours = table_of(route) == u32::from(TUNNEL_TABLE)
                    && route.header.protocol == RouteProtocol::from(OUR_PROTOCOL);
                ours.then(|| destination_of(route)).flatten()
            }));
        }
        Ok(found)
    }

    async fn routes(&self, family: AddressFamily) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        self.socket
            .dump(&RouteNetlinkMessage::GetRoute(message), parse_route)
            .await
    }

    /// The longest matching route outside [`TUNNEL_TABLE`], for when that table hides it.
    async fn next_hop_by_dump(&self, remote: IpAddr) -> Result<Option<NextHop>, NetlinkError> {
        let routes = self.routes(family(remote)).await?;
        let best = routes
            .iter()
            .filter(|route| table_of(route) != u32::from(TUNNEL_TABLE) && is_usable(route))
            .filter_map(|route| {
                let (network, prefix_len) = destination_of(route)?;
                in_network(remote, network, prefix_len).then_some((prefix_len, route))
            })
            // Of equally long prefixes the one with the lowest metric wins, and the first of those.
            .min_by_key(|(prefix_len, route)| (u8::MAX - prefix_len, metric_of(route)));
        let Some(mut hop) = best.and_then(|(_, route)| next_hop_of(route)) else {
            return Ok(None);
        };
        if hop.source.is_none() {
            let addresses = self.local_addresses().await?;
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
        Ok(Some(hop))
    }
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

fn parse(kind: u16, payload: &[u8]) -> Option<RouteNetlinkMessage> {
    let mut header = NetlinkHeader::default();
    header.message_type = kind;
    RouteNetlinkMessage::deserialize(&header, payload).ok()
}

fn parse_route(kind: u16, payload: &[u8]) -> Option<RouteMessage> {
    match parse(kind, payload)? {
        RouteNetlinkMessage::NewRoute(route) => Some(route),
        _ => None,
    }
}

fn local_address(message: &AddressMessage) -> Option<LocalAddress> {
    use netlink_packet_route::address::AddressHeaderFlags;
    let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| {
        message.attributes.iter().find_map(wanted)
    };
    // On point-to-point links ADDRESS is the other end and LOCAL is ours.
    let addr = find(|a| match a {
        AddressAttribute::Local(addr) => Some(*addr),
        _ => None,
    })
    .or_else(|| {
        find(|a| match a {
            AddressAttribute::Address(addr) => Some(*addr),
            _ => None,
        })
    })?;
    let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Dadfailed;
    let reachable = !addr.is_loopback()
        && message.header.scope != AddressScope::Link
        && message.header.scope != AddressScope::Host
        && !message.header.flags.intersects(unusable);
    reachable.then_some(LocalAddress {
        addr,
        prefix_len: message.header.prefix_len,
        interface: message.header.index,
    })
}

fn is_usable(route: &RouteMessage) -> bool {
    matches!(route.header.kind, RouteType::Unicast | RouteType::Local)
}

fn table_of(route: &RouteMessage) -> u32 {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        })
        .unwrap_or_else(|| route.header.table.into())
}

fn metric_of(route: &RouteMessage) -> u32 {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Priority(metric) => Some(*metric),
            _ => None,
        })
        .unwrap_or(0)
}

fn destination_of(route: &RouteMessage) -> Option<(IpAddr, u8)> {
    let addr = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(addr) => ip(addr),
            _ => None,
        });
    let addr = match (addr, route.header.address_family) {
        (Some(addr), _) => addr,
        (None, AddressFamily::Inet) => IpAddr::from([0; 4]),
        (None, AddressFamily::Inet6) => IpAddr::from([0; 16]),
        (None, _) => return None,
    };
    Some((addr, route.header.destination_prefix_length))
}

fn next_hop_of(route: &RouteMessage) -> Option<NextHop> {
    let mut interface = None;
    let mut gateway = None;
    let mut source = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => interface = Some(*index),
            RouteAttribute::Gateway(addr) => gateway = ip(addr),
            RouteAttribute::PrefSource(addr) => source = ip(addr),
            RouteAttribute::MultiPath(hops) if interface.is_none() => {
                if let Some(hop) = hops.first() {
                    interface = Some(hop.interface_index);
                    gateway = hop.attributes.iter().find_map(|attribute| match attribute {
                        RouteAttribute::Gateway(addr) => ip(addr),
                        _ => None,
                    });
                }
            }
            _ => {}
        }
    }
    Some(NextHop {
        interface: interface?,
        gateway,
        source,
    })
}

fn ip(addr: &RouteAddress) -> Option<IpAddr> {
    match addr {
        RouteAddress::Inet(addr) => Some((*addr).into()),
        RouteAddress::Inet6(addr) => Some((*addr).into()),
        _ => None,
    }
}

fn tunnel_route((network, prefix_len): (IpAddr, u8), route: Option<TunnelRoute>) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(network);
    message.header.destination_prefix_length = prefix_len;
    message.header.table = TUNNEL_TABLE;
    message.header.protocol = RouteProtocol::from(OUR_PROTOCOL);
    // Deleting with the widest scope and no type matches whatever is there.
    message.header.scope = if route.is_some() {
        RouteScope::Universe
    } else {
        RouteScope::NoWhere
    };
    message.header.kind = match route {
        Some(TunnelRoute::Via { .. }) => RouteType::Unicast,
        Some(TunnelRoute::Throw) => RouteType::Throw,
        None => RouteType::Unspec,
    };
    if prefix_len > 0 {
        message
            .attributes
            .push(RouteAttribute::Destination(network.into()));
    }
    if let Some(TunnelRoute::Via {
        interface,
        gateway,
        source,
    }) = route
    {
        message.attributes.push(RouteAttribute::Oif(interface));
        if let Some(gateway) = gateway {
            message
                .attributes
                .push(RouteAttribute::Gateway(gateway.into()));
        }
        if let Some(source) = source {
            message
                .attributes
                .push(RouteAttribute::PrefSource(source.into()));
        }
    }
    message
}

fn tunnel_rule(family: AddressFamily) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family;
    message.header.table = RouteHeader::RT_TABLE_UNSPEC;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Table(TUNNEL_TABLE.into()),
        RuleAttribute::Priority(TUNNEL_TABLE.into()),
        RuleAttribute::Protocol(RouteProtocol::from(OUR_PROTOCOL)),
    ];
    message
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

    #[test]
    fn a_multipath_route_yields_its_first_hop() {
        use netlink_packet_route::route::RouteNextHop;
        let mut hop = RouteNextHop::default();
        hop.interface_index = 4;
        hop.attributes = vec![RouteAttribute::Gateway(
            "192.0.2.9".parse::<IpAddr>().unwrap().into(),
        )];
        let mut route = RouteMessage::default();
        route.attributes = vec![RouteAttribute::MultiPath(vec![hop])];

        let found = next_hop_of(&route).unwrap();

        assert_eq!(found.interface, 4);
        assert_eq!(found.gateway, Some("192.0.2.9".parse().unwrap()));
    }
}
