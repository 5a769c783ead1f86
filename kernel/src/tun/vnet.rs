// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header that `IFF_VNET_HDR` puts in front of packets (`linux/virtio_net.h`).

/// Octets of the header.
pub(super) const VNET_LEN: usize = 10;

const FLAG_NEEDS_CSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// What the payload is to be cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gso {
    /// One packet, as it is.
    None,
    /// TCP segments, over IPv4 or IPv6.
    Tcp,
    /// UDP datagrams.
    Udp,
}

/// A partial checksum: the field holds the sum of the pseudo-header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartialChecksum {
    /// Where summing starts.
    pub(super) start: usize,
    /// The field, counted from `start`.
    pub(super) offset: usize,
}

/// The decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vnet {
    pub(super) gso: Gso,
    /// Payload octets of each segment.
    pub(super) gso_size: usize,
    /// Octets of all headers in front of the payload.
    pub(super) header_len: usize,
    pub(super) checksum: Option<PartialChecksum>,
}

impl Vnet {
    /// The header of a packet that is complete as it is.
    pub(super) const PLAIN: [u8; VNET_LEN] = [0; VNET_LEN];

    /// Decodes a header that the kernel wrote. `None` for kinds of offload that nobody asked for.
    pub(super) fn parse(header: &[u8; VNET_LEN]) -> Option<Self> {
        let word = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
        let gso = match header[1] & !GSO_ECN {
            GSO_NONE => Gso::None,
            GSO_TCPV4 | GSO_TCPV6 => Gso::Tcp,
            GSO_UDP_L4 => Gso::Udp,
            _ => return None,
        };
        Some(Self {
            gso,
            gso_size: word(4),
            header_len: word(2),
            checksum: (header[0] & FLAG_NEEDS_CSUM != 0).then(|| PartialChecksum {
                start: word(6),
                offset: word(8),
            }),
        })
    }

    /// Encodes the header of a packet whose transport checksum is partial.
    pub(super) fn emit(&self, v6: bool) -> [u8; VNET_LEN] {
        let mut header = [0; VNET_LEN];
        header[1] = match (self.gso, v6) {
            (Gso::None, _) => GSO_NONE,
            (Gso::Tcp, false) => GSO_TCPV4,
            (Gso::Tcp, true) => GSO_TCPV6,
            (Gso::Udp, _) => GSO_UDP_L4,
        };
        header[2..4].copy_from_slice(&(self.header_len as u16).to_ne_bytes());
        header[4..6].copy_from_slice(&(self.gso_size as u16).to_ne_bytes());
        if let Some(checksum) = self.checksum {
            header[0] = FLAG_NEEDS_CSUM;
            header[6..8].copy_from_slice(&(checksum.start as u16).to_ne_bytes());
            header[8..10].copy_from_slice(&(checksum.offset as u16).to_ne_bytes());
        }
        header
    }
}
