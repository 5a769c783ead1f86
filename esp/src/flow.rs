// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What selectors look at: addresses, protocol and ports of an IP packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_ipsec::TrafficSelector;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DCCP: u8 = 33;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;
const MOBILITY: u8 = 135;
const UDP_LITE: u8 = 136;

/// Extension headers that are skipped before a packet is given up as having no ports.
pub(crate) const MAX_EXTENSION_HEADERS: usize = 8;

/// Addresses, protocol and ports of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Protocol above IP.
    pub protocol: u8,
    /// Source and destination port; for ICMP, ICMPv6 and MH both hold type and code. `None` if the
    /// protocol has none or a fragment hides them.
    pub ports: Option<(u16, u16)>,
}

impl Flow {
    /// Reads the headers of an IP packet. `None` if it is no complete IPv4 or IPv6 packet.
    pub fn of(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::of_v4(packet),
            6 => Self::of_v6(packet),
            _ => None,
        }
    }

    fn of_v4(packet: &[u8]) -> Option<Self> {
        let header = packet.first_chunk::<20>()?;
        let header_len = usize::from(header[0] & 0xf) * 4;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if header_len < 20 || total < header_len || total > packet.len() {
            return None;
        }
        let later_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
        let protocol = header[9];
        let payload = &packet[header_len..total];
        Some(Self {
            src: Ipv4Addr::new(header[12], header[13], header[14], header[15]).into(),
            dst: Ipv4Addr::new(header[16], header[17], header[18], header[19]).into(),
            protocol,
            ports: if later_fragment {
                None
            } else {
                ports(protocol, payload)
            },
        })
    }

    fn of_v6(packet: &[u8]) -> Option<Self> {
        let header = packet.first_chunk::<40>()?;
        let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
        let mut payload = packet.get(40..40 + length)?;
        let mut protocol = header[6];
        let mut later_fragment = false;
        for _ in 0..MAX_EXTENSION_HEADERS {
            let skip = match protocol {
                // hop-by-hop, routing, destination options
                0 | 43 | 60 => usize::from(*payload.get(1)?) * 8 + 8,
                44 => {
                    let fragment = payload.first_chunk::<8>()?;
                    later_fragment |= u16::from_be_bytes([fragment[2], fragment[3]]) >> 3 != 0;
                    8
                }
                _ => break,
            };
            protocol = *payload.first()?;
            payload = payload.get(skip..)?;
            if later_fragment {
                break;
            }
        }
        let address = |at: usize| {
            let octets: [u8; 16] = header[at..at + 16].try_into().ok()?;
            Some(IpAddr::V6(Ipv6Addr::from(octets)))
        };
        Some(Self {
            src: address(8)?,
            dst: address(24)?,
            protocol,
            ports: if later_fragment {
                None
            } else {
                ports(protocol, payload)
            },
        })
    }

    /// The flow of the answers.
    pub fn reversed(&self) -> Self {
        Self {
            src: self.dst,
            dst: self.src,
            protocol: self.protocol,
            ports: self.ports.map(|(src, dst)| (dst, src)),
        }
    }

    /// Whether this packet, sent from the side of `source` to that of `destination`, is selected.
    #[inline]
    pub fn is_selected(&self, source: &TrafficSelector, destination: &TrafficSelector) -> bool {
        self.side_matches(source, self.src, self.ports.map(|(src, _)| src))
            && self.side_matches(destination, self.dst, self.ports.map(|(_, dst)| dst))
    }

    #[inline]
    fn side_matches(&self, selector: &TrafficSelector, addr: IpAddr, port: Option<u16>) -> bool {
        let in_range = match (selector.start, selector.end, addr) {
            (IpAddr::V4(start), IpAddr::V4(end), IpAddr::V4(addr)) => start <= addr && addr <= end,
            (IpAddr::V6(start), IpAddr::V6(end), IpAddr::V6(addr)) => start <= addr && addr <= end,
            _ => false,
        };
        if !in_range || (selector.protocol != 0 && selector.protocol != self.protocol) {
            return false;
        }
        if selector.start_port == 0 && selector.end_port == u16::MAX {
            return true;
        }
        match port {
            // OPAQUE selects packets whose ports cannot be seen (RFC 4301 section 4.4.1.1).
            None => selector.is_opaque(),
            Some(port) => selector.start_port <= port && port <= selector.end_port,
        }
    }

    /// The selector of this packet's source side.
    pub fn source_selector(&self) -> TrafficSelector {
        self.selector(self.src, self.ports.map(|(src, _)| src))
    }

    /// The selector of this packet's destination side.
    pub fn destination_selector(&self) -> TrafficSelector {
        self.selector(self.dst, self.ports.map(|(_, dst)| dst))
    }

    fn selector(&self, addr: IpAddr, port: Option<u16>) -> TrafficSelector {
        let any = TrafficSelector::host(addr);
        TrafficSelector {
            protocol: self.protocol,
            start_port: port.unwrap_or(any.start_port),
            end_port: port.unwrap_or(any.end_port),
            ..any
        }
    }
}

fn ports(protocol: u8, payload: &[u8]) -> Option<(u16, u16)> {
    match protocol {
        TCP | UDP | DCCP | SCTP | UDP_LITE => {
            let head = payload.first_chunk::<4>()?;
            Some((
                u16::from_be_bytes([head[0], head[1]]),
                u16::from_be_bytes([head[2], head[3]]),
            ))
        }
        ICMP | ICMPV6 => {
            let head = payload.first_chunk::<2>()?;
            let packed = u16::from_be_bytes(*head);
            Some((packed, packed))
        }
        MOBILITY => {
            let kind = u16::from(*payload.get(2)?) << 8;
            Some((kind, kind))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn udp_v4() -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 28, 0, 0, 0, 0, 64, UDP, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1,
        ];
        packet.extend([0x13, 0x88, 0, 53, 0, 8, 0, 0]);
        packet
    }

    #[test]
    fn reads_addresses_and_ports() {
        let flow = Flow::of(&udp_v4()).unwrap();
        assert_eq!(flow.src, "10.1.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(flow.dst, "10.2.0.1".parse::<IpAddr>().unwrap());
        assert_eq!((flow.protocol, flow.ports), (UDP, Some((5000, 53))));
    }

    #[test]
    fn a_later_fragment_has_no_ports_and_matches_no_port_selector() {
        let mut packet = udp_v4();
        packet[7] = 1;
        let flow = Flow::of(&packet).unwrap();
        assert_eq!(flow.ports, None);
        let any = TrafficSelector::any_v4();
        let dns = TrafficSelector {
            start_port: 53,
            end_port: 53,
            protocol: UDP,
            ..any
        };
        let opaque = TrafficSelector {
            start_port: u16::MAX,
            end_port: 0,
            ..any
        };
        assert!(flow.is_selected(&any, &any));
        assert!(flow.is_selected(&any, &opaque));
        assert!(!flow.is_selected(&any, &dns));
    }

    #[test]
    fn skips_extension_headers() {
        let mut packet = vec![0x60, 0, 0, 0, 0, 16, 0, 64];
        packet.extend([0; 32]);
        packet.extend([UDP, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 8, 0, 0]);
        let flow = Flow::of(&packet).unwrap();
        assert_eq!((flow.protocol, flow.ports), (UDP, Some((1, 2))));
    }

    #[test]
    fn refuses_lengths_that_lie() {
        let mut packet = udp_v4();
        packet[3] = 29;
        assert_eq!(Flow::of(&packet), None);
        packet[3] = 19;
        assert_eq!(Flow::of(&packet), None);
    }

    proptest! {
        #[test]
        fn any_octets_are_survived(octets in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(flow) = Flow::of(&octets) {
                let (src, dst) = (flow.source_selector(), flow.destination_selector());
                prop_assert!(flow.is_selected(&src, &dst));
            }
        }
    }
}
