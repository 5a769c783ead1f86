// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cuts what a TUN device hands over, up to 64 KiB at once, into packets that fit its MTU.

use super::checksum::Sum;
use super::vnet::{Gso, Vnet};

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// A packet as it came from the device, with what is needed to take it apart.
#[derive(Debug)]
pub(super) struct Superpacket<'a> {
    packet: &'a [u8],
    kind: Kind,
    /// Octets of IP header, and of IP and transport headers.
    ip_len: usize,
    header_len: usize,
    gso_size: usize,
    segments: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One packet, complete.
    Whole,
    /// One packet whose checksum at this offset covers what follows this start.
    Unsummed {
        start: usize,
        field: usize,
    },
    Tcp,
    Udp,
}

impl<'a> Superpacket<'a> {
    /// Understands `packet`. `None` if header and packet contradict each other.
    pub(super) fn new(vnet: &Vnet, packet: &'a [u8]) -> Option<Self> {
        let whole = |kind| Self {
            packet,
            kind,
            ip_len: 0,
            header_len: packet.len(),
            gso_size: 1,
            segments: 1,
        };
        let kind = match (vnet.gso, vnet.checksum) {
            (Gso::None, None) => return Some(whole(Kind::Whole)),
            (Gso::None, Some(checksum)) => {
                let field = checksum.start + checksum.offset;
                return (field + 2 <= packet.len()).then(|| {
                    whole(Kind::Unsummed {
                        start: checksum.start,
                        field,
                    })
                });
            }
            (Gso::Tcp, Some(_)) => Kind::Tcp,
            (Gso::Udp, Some(_)) => Kind::Udp,
            (Gso::Tcp | Gso::Udp, None) => return None,
        };
        // For GSO the checksum starts at the transport header; `header_len` may be a guess.
        let ip_len = vnet.checksum?.start;
        let least = if packet.first()? >> 4 == 4 { 20 } else { 40 };
        let transport = packet.get(ip_len..)?;
        let transport_len = match kind {
            Kind::Tcp => usize::from(*transport.get(12)? >> 4) * 4,
            _ => 8,
        };
        if ip_len < least || (kind == Kind::Tcp && transport_len < 20) || vnet.gso_size == 0 {
            return None;
        }
        let header_len = ip_len + transport_len;
        let payload = packet.len().checked_sub(header_len)?;
        Some(Self {
            packet,
            kind,
            ip_len,
            header_len,
            gso_size: vnet.gso_size,
            segments: payload.div_ceil(vnet.gso_size).max(1),
        })
    }

    /// How many packets this becomes.
    pub(super) fn segments(&self) -> usize {
        self.segments
    }

    /// Length of packet `index`.
    #[inline]
    pub(super) fn segment_len(&self, index: usize) -> usize {
        if self.segments == 1 {
            return self.packet.len();
        }
        let start = self.header_len + index * self.gso_size;
        self.header_len + self.gso_size.min(self.packet.len() - start)
    }

    /// Writes packet `index` to `out`, which has its length.
    #[inline]
    pub(super) fn write_segment(&self, index: usize, out: &mut [u8]) {
        match self.kind {
            Kind::Whole => out.copy_from_slice(self.packet),
            Kind::Unsummed { start, field } => {
                out.copy_from_slice(self.packet);
                // The field holds the sum of the pseudo-header, which is summed with the rest.
                let mut checksum = Sum::default().add(&out[start..]).complete();
                if checksum == [0, 0] && self.is_udp() {
                    checksum = [0xff, 0xff];
                }
                out[field..field + 2].copy_from_slice(&checksum);
            }
            Kind::Tcp | Kind::Udp => self.write_cut(index, out),
        }
    }

    fn write_cut(&self, index: usize, out: &mut [u8]) {
        let start = self.header_len + index * self.gso_size;
        let payload = &self.packet[start..start + out.len() - self.header_len];
        let (header, body) = out.split_at_mut(self.header_len);
        header.copy_from_slice(&self.packet[..self.header_len]);
        body.copy_from_slice(payload);

        let (ip, transport) = header.split_at_mut(self.ip_len);
        let transport_len = transport.len() + body.len();
        let addresses = if ip[0] >> 4 == 4 {
            let total = (self.ip_len + transport_len) as u16;
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            let id = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(index as u16);
            ip[4..6].copy_from_slice(&id.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = Sum::default().add(ip).complete();
            ip[10..12].copy_from_slice(&checksum);
            12..20
        } else {
            let length = (self.ip_len - 40 + transport_len) as u16;
            ip[4..6].copy_from_slice(&length.to_be_bytes());
            8..40
        };
        let (protocol, field) = match self.kind {
            Kind::Tcp => {
                let offset = (index * self.gso_size) as u32;
                let seq =
                    u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
                transport[4..8].copy_from_slice(&seq.wrapping_add(offset).to_be_bytes());
                if index + 1 < self.segments {
                    transport[13] &= !(FIN | PSH);
                }
                if index > 0 {
                    transport[13] &= !CWR;
                }
                (TCP, 16)
            }
            _ => {
                transport[4..6].copy_from_slice(&(transport_len as u16).to_be_bytes());
                (UDP, 6)
            }
        };
        transport[field..field + 2].fill(0);
        // TCP header and UDP header have even lengths, as adding in parts requires.
        let sum = Sum::pseudo_header(&ip[addresses], protocol, transport_len)
            .add(transport)
            .add(body);
        let mut checksum = sum.complete();
        if checksum == [0, 0] && protocol == UDP {
            checksum = [0xff, 0xff];
        }
        transport[field..field + 2].copy_from_slice(&checksum);
    }

    fn is_udp(&self) -> bool {
        match self.packet[0] >> 4 {
            4 => self.packet.get(9) == Some(&UDP),
            _ => self.packet.get(6) == Some(&UDP),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::{checksums_are_valid, tcp_packet, udp_packet};
    use super::super::vnet::PartialChecksum;
    use super::*;

    fn vnet(gso: Gso, gso_size: usize, ip_len: usize, offset: usize) -> Vnet {
        Vnet {
            gso,
            gso_size,
            header_len: 0,
            checksum: Some(PartialChecksum {
                start: ip_len,
                offset,
            }),
        }
    }

    fn cut(vnet: &Vnet, packet: &[u8]) -> Vec<Vec<u8>> {
        let superpacket = Superpacket::new(vnet, packet).unwrap();
        (0..superpacket.segments())
            .map(|index| {
                let mut out = vec![0; superpacket.segment_len(index)];
                superpacket.write_segment(index, &mut out);
                out
            })
            .collect()
    }

    proptest! {
        #[test]
        fn tcp_segments_are_valid_and_carry_the_payload(
            payload in proptest::collection::vec(any::<u8>(), 1..5000),
            gso_size in 500usize..1500,
            v6 in any::<bool>(),
        ) {
            let packet = tcp_packet(v6, 1000, FIN | PSH | CWR | 0x10, &payload);
            let ip_len = if v6 { 40 } else { 20 };
            let segments = cut(&vnet(Gso::Tcp, gso_size, ip_len, 16), &packet);

            prop_assert_eq!(segments.len(), payload.len().div_ceil(gso_size));
            let mut joined = Vec::new();
            for (index, segment) in segments.iter().enumerate() {
                prop_assert!(checksums_are_valid(segment));
                let tcp = &segment[ip_len..];
                let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
                prop_assert_eq!(seq as usize, 1000 + joined.len());
                prop_assert_eq!(tcp[13] & CWR != 0, index == 0);
                prop_assert_eq!(tcp[13] & FIN != 0, index + 1 == segments.len());
                joined.extend_from_slice(&tcp[20..]);
            }
            prop_assert_eq!(joined, payload);
        }

        #[test]
        fn udp_datagrams_are_valid_and_carry_the_payload(
            payload in proptest::collection::vec(any::<u8>(), 1..5000),
            gso_size in 500usize..1500,
        ) {
            let packet = udp_packet(&payload);
            let datagrams = cut(&vnet(Gso::Udp, gso_size, 20, 6), &packet);
            let mut joined = Vec::new();
            for datagram in &datagrams {
                prop_assert!(checksums_are_valid(datagram));
                joined.extend_from_slice(&datagram[28..]);
            }
            prop_assert_eq!(joined, payload);
        }

        #[test]
        fn contradictory_headers_are_survived(
            header in any::<[u8; 10]>(),
            packet in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let Some(vnet) = Vnet::parse(&header) else { return Ok(()) };
            let Some(superpacket) = Superpacket::new(&vnet, &packet) else { return Ok(()) };
            for index in 0..superpacket.segments() {
                let mut out = vec![0; superpacket.segment_len(index)];
                superpacket.write_segment(index, &mut out);
            }
        }
    }

    #[test]
    fn a_partial_checksum_is_completed() {
        let mut packet = tcp_packet(false, 1, 0x10, b"abc");
        let sum = Sum::pseudo_header(&packet[12..20], TCP, packet.len() - 20).partial();
        packet[36..38].copy_from_slice(&sum);
        let segments = cut(&vnet(Gso::None, 0, 20, 16), &packet);
        assert_eq!(segments.len(), 1);
        assert!(checksums_are_valid(&segments[0]));
    }
}
