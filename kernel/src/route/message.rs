// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Routes, rules and addresses as rtnetlink messages.

use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressProtocol,
    AddressScope, CacheInfo,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage};

use super::{LocalAddress, NextHop, OUR_PROTOCOL, TUNNEL_TABLE, TunnelRoute, family, full_prefix};

/// A route that is in [`TUNNEL_TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenRoute {
    /// Destination network and the length of its prefix.
    pub(crate) network: (IpAddr, u8),
    /// What it does; `None` if it is of a kind that we never install.
    pub(crate) route: Option<TunnelRoute>,
    /// Who installed it.
    pub(crate) protocol: u8,
    /// Whether it is one of [`Router::install_guard`](super::Router::install_guard).
    pub(crate) guard: bool,
}

impl SeenRoute {
    /// `None` if the route is in another table.
    pub(super) fn read(route: &RouteMessage) -> Option<Self> {
        if table_of(route) != u32::from(TUNNEL_TABLE) {
            return None;
        }
        Some(Self {
            network: destination_of(route)?,
            route: match route.header.kind {
                RouteType::Unicast => next_hop_of(route).map(|hop| TunnelRoute::Via {
                    interface: hop.interface,
                    gateway: hop.gateway,
                    source: hop.source,
                }),
                RouteType::Throw => Some(TunnelRoute::Throw),
                _ => None,
            },
            protocol: route.header.protocol.into(),
            guard: route.header.kind == RouteType::Unreachable
                && metric_of(route) == GUARD_METRIC
                && u8::from(route.header.protocol) == OUR_PROTOCOL,
        })
    }
}

/// Of the route that counts only while there is no other to its destination.
const GUARD_METRIC: u32 = u32::MAX;

/// The route that stops packets to `network` while there is no other.
pub(super) fn guard_route(network: (IpAddr, u8)) -> RouteMessage {
    let mut message = tunnel_route(network, Some(TunnelRoute::Throw));
    message.header.kind = RouteType::Unreachable;
    message
        .attributes
        .push(RouteAttribute::Priority(GUARD_METRIC));
    message
}

/// A rule that consults [`TUNNEL_TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenRule {
    /// Who installed it.
    pub(crate) protocol: u8,
    /// The mark of packets that it does not apply to.
    pub(crate) except: Option<u32>,
}

pub(super) fn seen_rule(rule: &RuleMessage) -> Option<SeenRule> {
    let mut table = u32::from(rule.header.table);
    let mut priority = 0;
    let mut protocol = 0;
    let mut mark = None;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::Protocol(number) => protocol = u8::from(*number),
            RuleAttribute::FwMark(number) => mark = Some(*number),
            _ => {}
        }
    }
    let inverted = rule.header.flags.contains(RuleFlags::Invert);
    let consults = table == u32::from(TUNNEL_TABLE)
        && priority == u32::from(TUNNEL_TABLE)
        && rule.header.action == RuleAction::ToTable;
    consults.then_some(SeenRule {
        protocol,
        except: mark.filter(|_| inverted),
    })
}

pub(super) fn local_address(message: &AddressMessage) -> Option<LocalAddress> {
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
        ours: message.attributes.iter().any(|attribute| {
            *attribute == AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL))
        }),
    })
}

/// A host address with our mark.
pub(super) fn virtual_address(addr: IpAddr, interface: u32) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(addr);
    message.header.prefix_len = full_prefix(addr);
    message.header.index = interface;
    message.attributes = vec![
        AddressAttribute::Local(addr),
        AddressAttribute::Address(addr),
        AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL)),
    ];
    if addr.is_ipv6() {
        // A host address needs no route to its own prefix.
        let flags = AddressFlags::Nodad | AddressFlags::Noprefixroute;
        message.attributes.push(AddressAttribute::Flags(flags));
        message.header.flags = AddressHeaderFlags::Nodad;
        let mut times = CacheInfo::default();
        times.ifa_valid = u32::MAX;
        message.attributes.push(AddressAttribute::CacheInfo(times));
    }
    message
}

pub(super) fn is_usable(route: &RouteMessage) -> bool {
    matches!(route.header.kind, RouteType::Unicast | RouteType::Local)
}

pub(super) fn table_of(route: &RouteMessage) -> u32 {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        })
        .unwrap_or_else(|| route.header.table.into())
}

pub(super) fn metric_of(route: &RouteMessage) -> u32 {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Priority(metric) => Some(*metric),
            _ => None,
        })
        .unwrap_or(0)
}

pub(super) fn destination_of(route: &RouteMessage) -> Option<(IpAddr, u8)> {
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

pub(super) fn next_hop_of(route: &RouteMessage) -> Option<NextHop> {
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

pub(super) fn tunnel_route(
    (network, prefix_len): (IpAddr, u8),
    route: Option<TunnelRoute>,
) -> RouteMessage {
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

/// The rule that consults [`TUNNEL_TABLE`]; with `except`, for all packets but those with that mark.
pub(super) fn tunnel_rule(family: AddressFamily, except: Option<u32>) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family;
    message.header.table = RouteHeader::RT_TABLE_UNSPEC;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Table(TUNNEL_TABLE.into()),
        RuleAttribute::Priority(TUNNEL_TABLE.into()),
        RuleAttribute::Protocol(RouteProtocol::from(OUR_PROTOCOL)),
    ];
    if let Some(mark) = except {
        message.header.flags = RuleFlags::Invert;
        message.attributes.push(RuleAttribute::FwMark(mark));
        message.attributes.push(RuleAttribute::FwMask(u32::MAX));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

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
