// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic selectors (RFC 7296 section 3.13, RFC 4301 section 4.4.1.1).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// A range of addresses, one protocol or all, and a range of ports.
///
/// For ICMP, ICMPv6 and MH the port fields hold type and code as RFC 7296 section 3.13.1 packs
/// them. The port range 65535 to 0 means OPAQUE (RFC 4301 section 4.4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TrafficSelector {
    /// IP protocol; 0 is any.
    pub protocol: u8,
    /// First port, or type and code.
    pub start_port: u16,
    /// Last port, or type and code.
    pub end_port: u16,
    /// First address. Same family as `end`.
    pub start: IpAddr,
    /// Last address, not before `start`.
    pub end: IpAddr,
}

impl TrafficSelector {
    /// All traffic of one address family.
    pub const fn any_v4() -> Self {
        Self {
            protocol: 0,
            start_port: 0,
            end_port: u16::MAX,
            start: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            end: IpAddr::V4(Ipv4Addr::BROADCAST),
        }
    }

    /// All IPv6 traffic.
    pub const fn any_v6() -> Self {
        Self {
            protocol: 0,
            start_port: 0,
            end_port: u16::MAX,
            start: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            end: IpAddr::V6(Ipv6Addr::from_bits(u128::MAX)),
        }
    }

    /// All traffic of one host.
    pub const fn host(addr: IpAddr) -> Self {
        Self {
            protocol: 0,
            start_port: 0,
            end_port: u16::MAX,
            start: addr,
            end: addr,
        }
    }

    /// All traffic of one network; bits beyond `prefix_len` are cleared.
    /// `None` if `prefix_len` is too long for the family.
    pub fn network(addr: IpAddr, prefix_len: u8) -> Option<Self> {
        let (start, end) = match addr {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(u32::from(prefix_len)).unwrap_or(0);
                if prefix_len > 32 {
                    return None;
                }
                let bits = v4.to_bits() & !host;
                (
                    Ipv4Addr::from_bits(bits).into(),
                    Ipv4Addr::from_bits(bits | host).into(),
                )
            }
            IpAddr::V6(v6) => {
                let host = u128::MAX.checked_shr(u32::from(prefix_len)).unwrap_or(0);
                if prefix_len > 128 {
                    return None;
                }
                let bits = v6.to_bits() & !host;
                (
                    Ipv6Addr::from_bits(bits).into(),
                    Ipv6Addr::from_bits(bits | host).into(),
                )
            }
        };
        Some(Self {
            protocol: 0,
            start_port: 0,
            end_port: u16::MAX,
            start,
            end,
        })
    }

    /// The prefix length, if the addresses are exactly one network.
    pub fn prefix_len(&self) -> Option<u8> {
        let (start, end, width) = match (self.start, self.end) {
            (IpAddr::V4(s), IpAddr::V4(e)) => {
                (u128::from(s.to_bits()), u128::from(e.to_bits()), 32)
            }
            (IpAddr::V6(s), IpAddr::V6(e)) => (s.to_bits(), e.to_bits(), 128),
            _ => return None,
        };
        let differing = start ^ end;
        let host_bits = 128 - differing.leading_zeros();
        let mask = if host_bits == 128 {
            u128::MAX
        } else {
            (1u128 << host_bits) - 1
        };
        (differing == mask && start & mask == 0)
            .then(|| u8::try_from(width - host_bits).unwrap_or(0))
    }

    /// Whether the port range means OPAQUE.
    pub const fn is_opaque(&self) -> bool {
        self.start_port == u16::MAX && self.end_port == 0
    }

    /// Whether every packet that `other` selects is selected by `self`.
    pub fn contains(&self, other: &Self) -> bool {
        self.intersection(other).is_some_and(|both| both == *other)
    }

    /// What both select (RFC 7296 section 2.9, narrowing), or `None` if that is nothing.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.start.is_ipv4() != other.start.is_ipv4() {
            return None;
        }
        let protocol = match (self.protocol, other.protocol) {
            (0, p) | (p, 0) => p,
            (a, b) if a == b => a,
            _ => return None,
        };
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        if start > end {
            return None;
        }
        let any_port = |ts: &Self| ts.start_port == 0 && ts.end_port == u16::MAX;
        let (start_port, end_port) = if any_port(self) {
            (other.start_port, other.end_port)
        } else if any_port(other) {
            (self.start_port, self.end_port)
        } else if self.is_opaque() || other.is_opaque() {
            if self.is_opaque() && other.is_opaque() {
                (u16::MAX, 0)
            } else {
                return None;
            }
        } else {
            let ports = (
                self.start_port.max(other.start_port),
                self.end_port.min(other.end_port),
            );
            if ports.0 > ports.1 {
                return None;
            }
            ports
        };
        Some(Self {
            protocol,
            start_port,
            end_port,
            start,
            end,
        })
    }
}
