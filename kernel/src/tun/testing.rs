// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets for the tests of this plane.

use super::checksum::Sum;

pub(super) fn tcp_packet(v6: bool, seq: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut tcp = vec![0x04, 0xd2, 0x16, 0x2e];
    tcp.extend(seq.to_be_bytes());
    tcp.extend([0, 0, 0, 9, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    tcp.extend(payload);
    ip_packet(v6, 6, 16, tcp)
}

pub(super) fn udp_packet(payload: &[u8]) -> Vec<u8> {
    let mut udp = vec![0x04, 0xd2, 0x16, 0x2e];
    udp.extend(((payload.len() + 8) as u16).to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(payload);
    ip_packet(false, 17, 6, udp)
}

fn ip_packet(v6: bool, protocol: u8, field: usize, mut transport: Vec<u8>) -> Vec<u8> {
    let length = transport.len();
    let mut packet = if v6 {
        let mut ip = vec![0x60, 0, 0, 0];
        ip.extend((length as u16).to_be_bytes());
        ip.extend([protocol, 64]);
        ip.extend([0xfd; 16]);
        ip.extend([0xfe; 16]);
        ip
    } else {
        let mut ip = vec![0x45, 0];
        ip.extend((length as u16 + 20).to_be_bytes());
        ip.extend([0, 7, 0x40, 0, 64, protocol, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1]);
        let checksum = Sum::default().add(&ip).complete();
        ip[10..12].copy_from_slice(&checksum);
        ip
    };
    let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
    let sum = Sum::pseudo_header(addresses, protocol, length).add(&transport);
    transport[field..field + 2].copy_from_slice(&sum.complete());
    packet.extend(transport);
    packet
}

/// Whether lengths and checksums of a TCP or UDP packet are right.
pub(super) fn checksums_are_valid(packet: &[u8]) -> bool {
    let (protocol, ip_len, addresses, total) = if packet[0] >> 4 == 4 {
        if !Sum::default().add(&packet[..20]).is_valid() {
            return false;
        }
        let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
        (packet[9], 20, &packet[12..20], total)
    } else {
        let length = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
        (packet[6], 40, &packet[8..40], length + 40)
    };
    total == packet.len()
        && Sum::pseudo_header(addresses, protocol, packet.len() - ip_len)
            .add(&packet[ip_len..])
            .is_valid()
}
