// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets made and taken apart by hand. The cipher is none, so that what is inside can be seen.

use std::net::Ipv4Addr;

use ring::hmac;
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::SaKeys;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

/// IPv4 in ESP.
pub(crate) const IPV4: u8 = 4;
pub(crate) const UDP: u8 = 17;
/// Octets of IP and UDP headers.
pub(crate) const HEADERS: usize = 28;

const MAC_KEY: [u8; 32] = [0x4b; 32];
const ICV: usize = 16;

/// Keys of an SA whose packets anyone can read and we can write.
pub(crate) fn keys() -> SaKeys {
    SaKeys {
        encryption: EncryptionId::Null,
        encryption_key: Secret::new(Vec::new()),
        integrity: Some((IntegrityId::HmacSha2_256_128, Secret::new(MAC_KEY.to_vec()))),
    }
}

/// An ESP packet to be.
#[derive(Clone, Debug)]
pub(crate) struct Esp {
    pub(crate) spi: u32,
    /// Its upper half is authenticated if `esn`.
    pub(crate) seq: u64,
    pub(crate) esn: bool,
    pub(crate) payload: Vec<u8>,
    /// What the trailer says of the padding, where that is not the truth.
    pub(crate) pad_len: Option<u8>,
    pub(crate) next_header: u8,
}

impl Esp {
    /// A tunnelled IPv4 packet.
    pub(crate) fn new(spi: u32, seq: u64, payload: Vec<u8>) -> Self {
        Self {
            spi,
            seq,
            esn: false,
            payload,
            pad_len: None,
            next_header: IPV4,
        }
    }

    /// The packet.
    pub(crate) fn seal(&self) -> Vec<u8> {
        let mut packet = self.spi.to_be_bytes().to_vec();
        packet.extend((self.seq as u32).to_be_bytes());
        packet.extend(&self.payload);
        let padding = (self.payload.len() + 2).next_multiple_of(4) - self.payload.len() - 2;
        packet.extend((1..).take(padding));
        packet.push(self.pad_len.unwrap_or(padding as u8));
        packet.push(self.next_header);
        let tag = authenticate(&packet, self.esn.then_some((self.seq >> 32) as u32));
        packet.extend(tag);
        packet
    }

    /// Takes an authentic packet apart. `None` if it is not one of [`keys`].
    pub(crate) fn open(packet: &[u8]) -> Option<Self> {
        let (body, icv) = packet.split_at(packet.len().checked_sub(ICV)?);
        if authenticate(body, None) != icv {
            return None;
        }
        let (head, rest) = body.split_first_chunk::<8>()?;
        let [payload @ .., pad_len, next_header] = rest else {
            return None;
        };
        let payload = payload.len().checked_sub((*pad_len).into())?;
        Some(Self {
            spi: u32::from_be_bytes(head[..4].try_into().ok()?),
            seq: u32::from_be_bytes(head[4..].try_into().ok()?).into(),
            esn: false,
            payload: rest[..payload].to_vec(),
            pad_len: Some(*pad_len),
            next_header: *next_header,
        })
    }
}

fn authenticate(packet: &[u8], high: Option<u32>) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, &MAC_KEY);
    let mut context = hmac::Context::with_key(&key);
    context.update(packet);
    if let Some(high) = high {
        context.update(&high.to_be_bytes());
    }
    context.sign().as_ref()[..ICV].to_vec()
}

/// An IPv4 packet, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ip {
    pub(crate) tos: u8,
    pub(crate) dont_fragment: bool,
    pub(crate) protocol: u8,
    pub(crate) src: Ipv4Addr,
    pub(crate) dst: Ipv4Addr,
    pub(crate) payload: Vec<u8>,
}

impl Ip {
    /// The packet.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut packet = vec![0x45, self.tos];
        packet.extend((self.payload.len() as u16 + 20).to_be_bytes());
        packet.extend([0, 1, if self.dont_fragment { 0x40 } else { 0 }, 0]);
        packet.extend([64, self.protocol, 0, 0]);
        packet.extend(self.src.octets());
        packet.extend(self.dst.octets());
        let checksum = checksum(&packet);
        packet[10..12].copy_from_slice(&checksum);
        packet.extend(&self.payload);
        packet
    }

    /// Takes a packet apart. `None` if it is no IPv4 packet.
    pub(crate) fn parse(packet: &[u8]) -> Option<Self> {
        let header = packet.first_chunk::<20>()?;
        if header[0] != 0x45 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        Some(Self {
            tos: header[1],
            dont_fragment: header[6] & 0x40 != 0,
            protocol: header[9],
            src: Ipv4Addr::new(header[12], header[13], header[14], header[15]),
            dst: Ipv4Addr::new(header[16], header[17], header[18], header[19]),
            payload: packet.get(20..total)?.to_vec(),
        })
    }

    /// Ports and payload, if it is a whole UDP datagram.
    pub(crate) fn udp(&self) -> Option<(u16, u16, &[u8])> {
        let (header, payload) = self.payload.split_first_chunk::<8>()?;
        (self.protocol == UDP).then(|| {
            (
                u16::from_be_bytes([header[0], header[1]]),
                u16::from_be_bytes([header[2], header[3]]),
                payload,
            )
        })
    }
}

/// A UDP datagram in an IPv4 packet.
pub(crate) fn udp(src: (Ipv4Addr, u16), dst: (Ipv4Addr, u16), data: &[u8]) -> Ip {
    let mut payload = src.1.to_be_bytes().to_vec();
    payload.extend(dst.1.to_be_bytes());
    payload.extend((data.len() as u16 + 8).to_be_bytes());
    // No checksum, which IPv4 allows.
    payload.extend([0, 0]);
    payload.extend(data);
    Ip {
        tos: 0,
        dont_fragment: true,
        protocol: UDP,
        src: src.0,
        dst: dst.0,
        payload,
    }
}

fn checksum(header: &[u8]) -> [u8; 2] {
    let mut sum: u32 = header
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}
