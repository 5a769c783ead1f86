// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Joins consecutive segments of one flow into one packet of up to 64 KiB for the TUN device, as
//! generic receive offload does. Payloads are not copied: the device gathers them from where they
//! were decrypted.

use std::io::IoSlice;
use std::ops::Range;

use super::checksum::Sum;
use super::vnet::{Gso, PartialChecksum, VNET_LEN, Vnet};

const TCP: u8 = 6;
const UDP: u8 = 17;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// Most segments in one packet; the kernel takes no more UDP datagrams than this.
const MAX_SEGMENTS: usize = 64;

/// Where joined packets go.
pub(super) trait Sink {
    /// Writes one packet, its offload header in front.
    fn write(&mut self, parts: &[IoSlice<'_>]);
}

/// The run of segments that is being joined. Between calls it refers into the caller's buffer,
/// which must stay as it is until [`Coalescer::flush`].
#[derive(Debug)]
pub(super) struct Coalescer {
    run: Option<Run>,
    payloads: Vec<Range<usize>>,
    /// Whether the device takes joined UDP datagrams.
    join_udp: bool,
}

#[derive(Debug)]
struct Run {
    first: Segment,
    payload: usize,
    pushed: bool,
    /// A short segment ends a run.
    open: bool,
}

/// A packet that can be part of a run.
#[derive(Clone, Debug)]
struct Segment {
    start: usize,
    protocol: u8,
    v6: bool,
    ip_len: usize,
    header_len: usize,
    payload: Range<usize>,
    seq: u32,
    push: bool,
}

impl Coalescer {
    pub(super) fn new(join_udp: bool) -> Self {
        Self {
            run: None,
            payloads: Vec::with_capacity(MAX_SEGMENTS),
            join_udp,
        }
    }

    /// Takes the packet at `range`. `admit` is asked whether it may pass, unless it continues a
    /// run, whose addresses and ports passed before. `false` if it was not admitted.
    #[inline]
    pub(super) fn push(
        &mut self,
        buffer: &mut [u8],
        range: Range<usize>,
        sink: &mut impl Sink,
        admit: impl FnOnce(&[u8]) -> bool,
    ) -> bool {
        let segment = Segment::parse(buffer, range.clone(), self.join_udp);
        if let (Some(run), Some(segment)) = (&mut self.run, &segment)
            && self.payloads.len() < MAX_SEGMENTS
            && run.accepts(buffer, segment, self.payloads.len())
        {
            run.payload += segment.payload.len();
            run.pushed |= segment.push;
            run.open = segment.payload.len() == run.first.payload.len() && !segment.push;
            self.payloads.push(segment.payload.clone());
            return true;
        }
        self.flush(buffer, sink);
        if !admit(&buffer[range.clone()]) {
            return false;
        }
        match segment {
            Some(segment) if !segment.push || segment.protocol == UDP => {
                self.payloads.push(segment.payload.clone());
                self.run = Some(Run {
                    payload: segment.payload.len(),
                    pushed: false,
                    open: true,
                    first: segment,
                });
            }
            _ => sink.write(&[IoSlice::new(&Vnet::PLAIN), IoSlice::new(&buffer[range])]),
        }
        true
    }

    /// Writes out what is held.
    #[inline]
    pub(super) fn flush(&mut self, buffer: &mut [u8], sink: &mut impl Sink) {
        let Some(run) = self.run.take() else {
            return;
        };
        let vnet = if self.payloads.len() > 1 {
            run.patch_headers(buffer).emit(run.first.v6)
        } else {
            Vnet::PLAIN
        };
        let first = &run.first;
        const EMPTY: &[u8] = &[];
        let mut parts = [IoSlice::new(EMPTY); MAX_SEGMENTS + 2];
        parts[0] = IoSlice::new(&vnet[..VNET_LEN]);
        parts[1] = IoSlice::new(&buffer[first.start..first.start + first.header_len]);
        for (part, payload) in parts[2..].iter_mut().zip(&self.payloads) {
            *part = IoSlice::new(&buffer[payload.clone()]);
        }
        sink.write(&parts[..2 + self.payloads.len()]);
        self.payloads.clear();
    }
}

impl Run {
    /// Whether `segment` follows what is held, as if cut from one packet.
    #[inline]
    fn accepts(&self, buffer: &[u8], segment: &Segment, count: usize) -> bool {
        let first = &self.first;
        let ip_payload_limit = usize::from(u16::MAX) - if first.v6 { 0 } else { first.ip_len };
        if !self.open
            || segment.protocol != first.protocol
            || segment.v6 != first.v6
            || segment.header_len != first.header_len
            || segment.payload.len() > first.payload.len()
            || first.header_len - first.ip_len + self.payload + segment.payload.len()
                > ip_payload_limit
            || (first.protocol == TCP && segment.seq != first.seq.wrapping_add(self.payload as u32))
        {
            return false;
        }
        let header = |s: &Segment| &buffer[s.start..s.start + s.header_len];
        let (a, b) = (header(first), header(segment));
        let same = |range: Range<usize>| a[range.clone()] == b[range];
        let same_ip = if first.v6 {
            // All but the length.
            same(0..4) && same(6..40)
        } else {
            let id = |h: &[u8]| u16::from_be_bytes([h[4], h[5]]);
            let dont_fragment = a[6] & 0x40 != 0;
            same(0..2)
                && same(6..10)
                && same(12..20)
                && (dont_fragment || id(b) == id(a).wrapping_add(count as u16))
        };
        let t = first.ip_len;
        same_ip
            && same(t..t + 4)
            && (first.protocol == UDP
                || (same(t + 8..t + 13)
                    && a[t + 13] & !PSH == b[t + 13] & !PSH
                    && same(t + 14..t + 16)
                    && same(t + 18..first.header_len)))
    }

    /// Makes the first packet's headers those of the joined packet.
    fn patch_headers(&self, buffer: &mut [u8]) -> Vnet {
        let first = &self.first;
        let headers = &mut buffer[first.start..first.start + first.header_len];
        let (ip, transport) = headers.split_at_mut(first.ip_len);
        let transport_len = transport.len() + self.payload;
        let addresses = if first.v6 {
            ip[4..6].copy_from_slice(&(transport_len as u16).to_be_bytes());
            8..40
        } else {
            let total = (first.ip_len + transport_len) as u16;
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = Sum::default().add(ip).complete();
            ip[10..12].copy_from_slice(&checksum);
            12..20
        };
        let (gso, field) = if first.protocol == TCP {
            if self.pushed {
                transport[13] |= PSH;
            }
            (Gso::Tcp, 16)
        } else {
            transport[4..6].copy_from_slice(&(transport_len as u16).to_be_bytes());
            (Gso::Udp, 6)
        };
        let pseudo = Sum::pseudo_header(&ip[addresses], first.protocol, transport_len);
        transport[field..field + 2].copy_from_slice(&pseudo.partial());
        Vnet {
            gso,
            gso_size: first.payload.len(),
            header_len: first.header_len,
            checksum: Some(PartialChecksum {
                start: first.ip_len,
                offset: field,
            }),
        }
    }
}

impl Segment {
    /// Reads a packet that may join a run: TCP data or a UDP datagram, whole, without options that
    /// a joined packet could not carry, and with valid checksums, since joining replaces them.
    #[inline]
    fn parse(buffer: &[u8], range: Range<usize>, join_udp: bool) -> Option<Self> {
        let packet = &buffer[range.clone()];
        let v6 = match packet.first()? {
            0x45 => false,
            first if first >> 4 == 6 => true,
            _ => return None,
        };
        let (protocol, ip_len, addresses) = if v6 {
            let ip = packet.first_chunk::<40>()?;
            if usize::from(u16::from_be_bytes([ip[4], ip[5]])) + 40 != packet.len() {
                return None;
            }
            (ip[6], 40, &packet[8..40])
        } else {
            let ip = packet.first_chunk::<20>()?;
            let fragmented = u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0;
            if usize::from(u16::from_be_bytes([ip[2], ip[3]])) != packet.len()
                || fragmented
                || !Sum::default().add(ip).is_valid()
            {
                return None;
            }
            (ip[9], 20, &packet[12..20])
        };
        let transport = &packet[ip_len..];
        let (transport_len, seq, push) = match protocol {
            TCP => {
                let tcp = transport.first_chunk::<20>()?;
                let flags = tcp[13];
                if flags & !PSH != ACK {
                    return None;
                }
                let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
                (usize::from(tcp[12] >> 4) * 4, seq, flags & PSH != 0)
            }
            UDP if join_udp => {
                let udp = transport.first_chunk::<8>()?;
                let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
                // A zero checksum means that there is none.
                if length != transport.len() || udp[6..] == [0, 0] {
                    return None;
                }
                (8, 0, false)
            }
            _ => return None,
        };
        if transport_len < 8 || (protocol == TCP && transport_len < 20) {
            return None;
        }
        if transport.len() <= transport_len
            || !Sum::pseudo_header(addresses, protocol, transport.len())
                .add(transport)
                .is_valid()
        {
            return None;
        }
        let header_len = ip_len + transport_len;
        Some(Self {
            start: range.start,
            protocol,
            v6,
            ip_len,
            header_len,
            payload: range.start + header_len..range.end,
            seq,
            push,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::segment::Superpacket;
    use super::super::testing::{tcp_packet, udp_packet};
    use super::*;

    #[derive(Default)]
    struct Written(Vec<Vec<u8>>);

    impl Sink for Written {
        fn write(&mut self, parts: &[IoSlice<'_>]) {
            self.0
                .push(parts.iter().flat_map(|part| part.to_vec()).collect());
        }
    }

    /// Lays packets out with gaps, as decrypted ones are, and joins them.
    fn join(packets: &[Vec<u8>]) -> (Vec<Vec<u8>>, usize) {
        let mut buffer = Vec::new();
        let mut ranges = Vec::new();
        for packet in packets {
            buffer.extend([0xee; 16]);
            ranges.push(buffer.len()..buffer.len() + packet.len());
            buffer.extend(packet);
        }
        let mut written = Written::default();
        let mut coalescer = Coalescer::new(true);
        let mut asked = 0;
        for range in ranges {
            coalescer.push(&mut buffer, range, &mut written, |_| {
                asked += 1;
                true
            });
        }
        coalescer.flush(&mut buffer, &mut written);
        (written.0, asked)
    }

    /// Cuts what was written for the device, as the kernel would.
    fn cut(written: &[Vec<u8>]) -> Vec<Vec<u8>> {
        written
            .iter()
            .flat_map(|packet| {
                let vnet = Vnet::parse(packet.first_chunk().unwrap()).unwrap();
                let superpacket = Superpacket::new(&vnet, &packet[VNET_LEN..]).unwrap();
                (0..superpacket.segments())
                    .map(|index| {
                        let mut out = vec![0; superpacket.segment_len(index)];
                        superpacket.write_segment(index, &mut out);
                        out
                    })
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    fn stream(v6: bool, sizes: &[usize]) -> Vec<Vec<u8>> {
        let mut seq = u32::MAX - 3000;
        sizes
            .iter()
            .enumerate()
            .map(|(index, size)| {
                let push = if index + 1 == sizes.len() { PSH } else { 0 };
                let packet = tcp_packet(v6, seq, ACK | push, &vec![index as u8; *size]);
                seq = seq.wrapping_add(*size as u32);
                packet
            })
            .collect()
    }

    #[test]
    fn a_run_of_segments_becomes_one_packet_and_is_checked_once() {
        for v6 in [false, true] {
            let mut sizes = vec![1340; 40];
            sizes.push(77);
            let packets = stream(v6, &sizes);
            let (written, asked) = join(&packets);
            assert_eq!((written.len(), asked), (1, 1));
            assert_eq!(cut(&written).len(), 41);
        }
    }

    #[test]
    fn datagrams_of_equal_size_join() {
        let packets = vec![
            udp_packet(&[7; 64]),
            udp_packet(&[8; 64]),
            udp_packet(&[9; 10]),
        ];
        let (written, _) = join(&packets);
        assert_eq!(written.len(), 1);
        let payloads = |packets: &[Vec<u8>]| -> Vec<Vec<u8>> {
            packets.iter().map(|packet| packet[28..].to_vec()).collect()
        };
        assert_eq!(payloads(&cut(&written)), payloads(&packets));
    }

    #[test]
    fn a_corrupt_checksum_stays_visible() {
        let mut packets = stream(false, &[1000, 1000, 1000]);
        packets[1][60] ^= 1;
        let (written, _) = join(&packets);
        assert_eq!(written.len(), 3);
        assert_eq!(written[1][VNET_LEN..], packets[1]);
    }

    #[test]
    fn nothing_joins_past_the_longest_packet() {
        let (written, _) = join(&stream(false, &[1400; 60]));
        assert!(
            written
                .iter()
                .all(|packet| packet.len() <= VNET_LEN + 65_535)
        );
        assert_eq!(cut(&written).len(), 60);
    }

    #[test]
    fn what_is_not_admitted_is_not_written() {
        let packets = stream(false, &[100]);
        let mut buffer = packets[0].clone();
        let mut written = Written::default();
        let mut coalescer = Coalescer::new(true);
        let range = 0..buffer.len();
        assert!(!coalescer.push(&mut buffer, range, &mut written, |_| false));
        coalescer.flush(&mut buffer, &mut written);
        assert!(written.0.is_empty());
    }

    fn tcp_of(packet: &[u8]) -> (u32, Vec<u8>) {
        let tcp = &packet[20..];
        (
            u32::from_be_bytes(tcp[4..8].try_into().unwrap()),
            tcp[20..].to_vec(),
        )
    }

    proptest! {
        #[test]
        fn every_octet_arrives_once_and_in_order(
            steps in proptest::collection::vec((1usize..1400, 0u8..6), 1..80),
        ) {
            let mut seq = 5u32;
            let packets: Vec<_> = steps
                .iter()
                .map(|(size, kind)| {
                    // Mostly one size; now and then another, a push, a gap.
                    let size = if *kind < 4 { 1000 } else { *size };
                    if *kind == 5 {
                        seq = seq.wrapping_add(17);
                    }
                    let flags = if *kind == 4 { ACK | PSH } else { ACK };
                    let packet = tcp_packet(false, seq, flags, &vec![*kind; size]);
                    seq = seq.wrapping_add(size as u32);
                    packet
                })
                .collect();
            let (written, _) = join(&packets);
            let got: Vec<_> = cut(&written).iter().map(|p| tcp_of(p)).collect();
            let sent: Vec<_> = packets.iter().map(|p| tcp_of(p)).collect();
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn any_octets_are_survived(
            packets in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 0..8),
        ) {
            let (written, asked) = join(&packets);
            prop_assert_eq!(written.len(), packets.len());
            prop_assert_eq!(asked, packets.len());
        }
    }
}
