// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic class octets across the tunnel: DSCP as configured, ECN as the kernel's ESP does it, by
//! RFC 3168 section 9.1.1 (full functionality).

use swanherd_ipsec::plane::SaEntry;

use super::checksum::Sum;

const ECN: u8 = 0b11;
const CONGESTION_EXPERIENCED: u8 = 0b11;
const ECN_CAPABLE: u8 = 0b10;

/// Which bits an SA takes over from header to header.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassRules {
    ecn: bool,
    dscp_out: bool,
    dscp_in: bool,
}

impl ClassRules {
    pub(super) fn of(entry: &SaEntry) -> Self {
        Self {
            ecn: entry.copy_ecn,
            dscp_out: entry.copy_dscp_out,
            dscp_in: entry.copy_dscp_in,
        }
    }

    /// The traffic class of the outer header around `inner`.
    #[inline]
    pub(super) fn outer(self, inner: &[u8]) -> u8 {
        let class = traffic_class(inner);
        let dscp = if self.dscp_out { class & !ECN } else { 0 };
        let ecn = match class & ECN {
            _ if !self.ecn => 0,
            // Congestion before the tunnel is in the inner header already.
            CONGESTION_EXPERIENCED => ECN_CAPABLE,
            ecn => ecn,
        };
        dscp | ecn
    }

    /// Carries the outer traffic class over into `inner`. A mark of congestion is lost on a packet
    /// whose sender would not understand it.
    #[inline]
    pub(super) fn apply_to_inner(self, inner: &mut [u8], outer: u8) {
        let class = traffic_class(inner);
        let mut wanted = class;
        if self.dscp_in {
            wanted = wanted & ECN | outer & !ECN;
        }
        if self.ecn && outer & ECN == CONGESTION_EXPERIENCED && class & ECN != 0 {
            wanted |= CONGESTION_EXPERIENCED;
        }
        if wanted != class {
            set_traffic_class(inner, wanted);
        }
    }
}

fn traffic_class(packet: &[u8]) -> u8 {
    match packet {
        [first, class, ..] if first >> 4 == 4 => *class,
        [first, second, ..] => first << 4 | second >> 4,
        _ => 0,
    }
}

fn set_traffic_class(packet: &mut [u8], class: u8) {
    match packet {
        [first, octet, ..] if *first >> 4 == 4 => {
            *octet = class;
            let header_len = usize::from(packet[0] & 0xf) * 4;
            if let Some(header) = packet.get_mut(..header_len)
                && header_len >= 20
            {
                header[10..12].fill(0);
                let checksum = Sum::default().add(header).complete();
                header[10..12].copy_from_slice(&checksum);
            }
        }
        [first, second, ..] => {
            *first = *first & 0xf0 | class >> 4;
            *second = *second & 0x0f | class << 4;
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{checksums_are_valid, tcp_packet};
    use super::*;

    const ECN_ONLY: ClassRules = ClassRules {
        ecn: true,
        dscp_out: false,
        dscp_in: false,
    };

    #[test]
    fn congestion_marks_reach_the_inner_header() {
        for v6 in [false, true] {
            let mut packet = tcp_packet(v6, 1, 0x10, b"x");
            set_traffic_class(&mut packet, 0b1011_1010);
            ECN_ONLY.apply_to_inner(&mut packet, 0b11);
            assert_eq!(traffic_class(&packet), 0b1011_1011);
            assert!(checksums_are_valid(&packet));
            assert_eq!(ECN_ONLY.outer(&packet), 0b10);
        }
    }

    #[test]
    fn congestion_marks_are_not_for_packets_without_ecn() {
        let mut packet = tcp_packet(false, 1, 0x10, b"x");
        let before = packet.clone();
        for outer in [0b11, 0b10] {
            ECN_ONLY.apply_to_inner(&mut packet, outer);
            assert_eq!(packet, before);
        }
    }

    #[test]
    fn dscp_is_copied_only_where_asked() {
        let rules = ClassRules {
            ecn: false,
            dscp_out: true,
            dscp_in: true,
        };
        let mut packet = tcp_packet(true, 1, 0x10, b"x");
        rules.apply_to_inner(&mut packet, 0b1011_1011);
        assert_eq!(traffic_class(&packet), 0b1011_1000);
        assert_eq!(rules.outer(&packet), 0b1011_1000);
    }
}
