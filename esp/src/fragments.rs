// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Remembers the ports of fragmented packets.
//!
//! Only the first fragment shows ports, yet the others belong to the same packet, and the policy
//! that decides on one must decide on all of them. Fragments come in order from whoever cut them
//! nearby; one that overtakes the first has no ports.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use crate::Flow;

/// Packets that may be in fragments at the same time.
const CAPACITY: usize = 256;

/// Ports of the packets whose fragments were seen last.
#[derive(Debug, Default)]
pub struct Fragments {
    known: BTreeMap<Key, (u16, u16)>,
    order: VecDeque<Key>,
}

/// What all fragments of a packet have in common (RFC 791 section 3.2, RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    id: u32,
}

impl Fragments {
    /// The flow of a packet of which `flow` is what its own headers show.
    #[inline]
    pub fn complete(&mut self, packet: &[u8], flow: Flow) -> Flow {
        match fragment(packet) {
            None => flow,
            Some(fragment) => self.of_fragment(fragment, flow),
        }
    }

    fn of_fragment(&mut self, fragment: Fragment, flow: Flow) -> Flow {
        let key = Key {
            src: flow.src,
            dst: flow.dst,
            protocol: flow.protocol,
            id: fragment.id,
        };
        if !fragment.first {
            return Flow {
                ports: self.known.get(&key).copied(),
                ..flow
            };
        }
        if let Some(ports) = flow.ports
            && self.known.insert(key, ports).is_none()
        {
            self.order.push_back(key);
            if self.order.len() > CAPACITY
                && let Some(oldest) = self.order.pop_front()
            {
                self.known.remove(&oldest);
            }
        }
        flow
    }
}

/// Whether `packet` is part of a larger one.
pub fn is_fragment(packet: &[u8]) -> bool {
    fragment(packet).is_some()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fragment {
    id: u32,
    first: bool,
}

/// `None` for a whole packet, and for what is too short to tell.
fn fragment(packet: &[u8]) -> Option<Fragment> {
    match packet.first()? >> 4 {
        4 => {
            let field = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]);
            // More fragments, or an offset.
            (field & 0x3fff != 0).then_some(Fragment {
                id: u16::from_be_bytes([packet[4], packet[5]]).into(),
                first: field & 0x1fff == 0,
            })
        }
        6 => {
            let mut header = *packet.get(6)?;
            let mut rest = packet.get(40..)?;
            // As many as a flow is read behind.
            for _ in 0..crate::flow::MAX_EXTENSION_HEADERS {
                match header {
                    0 | 43 | 60 => {
                        header = *rest.first()?;
                        rest = rest.get(usize::from(*rest.get(1)?) * 8 + 8..)?;
                    }
                    44 => {
                        let fields = rest.first_chunk::<8>()?;
                        let field = u16::from_be_bytes([fields[2], fields[3]]);
                        // An atomic fragment (RFC 6946) is a whole packet.
                        return (field & 0xfff9 != 0).then_some(Fragment {
                            id: u32::from_be_bytes([fields[4], fields[5], fields[6], fields[7]]),
                            first: field & 0xfff8 == 0,
                        });
                    }
                    _ => return None,
                }
            }
            None
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A UDP fragment at `offset`, which is counted in units of eight octets.
    fn v4(id: u16, offset: u16, more: bool) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 28];
        packet.extend(id.to_be_bytes());
        packet.extend((offset | u16::from(more) << 13).to_be_bytes());
        packet.extend([64, 17, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1]);
        packet.extend([0x13, 0x88, 0, 53, 0, 8, 0, 0]);
        packet
    }

    fn v6(id: u32, offset: u16, more: bool) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 16, 44, 64];
        packet.extend([0xfd; 16]);
        packet.extend([0xfe; 16]);
        packet.extend([17, 0]);
        packet.extend((offset << 3 | u16::from(more)).to_be_bytes());
        packet.extend(id.to_be_bytes());
        packet.extend([0x13, 0x88, 0, 53, 0, 8, 0, 0]);
        packet
    }

    fn ports(fragments: &mut Fragments, packet: &[u8]) -> Option<(u16, u16)> {
        let flow = Flow::of(packet).unwrap();
        fragments.complete(packet, flow).ports
    }

    #[test]
    fn later_fragments_have_the_ports_of_the_first() {
        let mut fragments = Fragments::default();
        let known = Some((5000, 53));
        for [first, later, last, other] in [
            [
                v4(1, 0, true),
                v4(1, 8, true),
                v4(1, 16, false),
                v4(2, 8, false),
            ],
            [
                v6(1, 0, true),
                v6(1, 8, true),
                v6(1, 16, false),
                v6(2, 8, false),
            ],
        ] {
            assert_eq!(ports(&mut fragments, &later), None);
            assert_eq!(ports(&mut fragments, &first), known);
            assert_eq!(ports(&mut fragments, &later), known);
            assert_eq!(ports(&mut fragments, &last), known);
            assert_eq!(ports(&mut fragments, &other), None);
        }
    }

    #[test]
    fn whole_packets_are_not_remembered() {
        let mut fragments = Fragments::default();
        for packet in [v4(1, 0, false), v6(1, 0, false)] {
            assert_eq!(ports(&mut fragments, &packet), Some((5000, 53)));
        }
        assert!(fragments.known.is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let mut fragments = Fragments::default();
        for id in 0..10_000 {
            ports(&mut fragments, &v6(id, 0, true));
            ports(&mut fragments, &v6(id, 0, true));
        }
        assert_eq!(fragments.known.len(), CAPACITY);
        assert_eq!(fragments.order.len(), CAPACITY);
        assert_eq!(
            ports(&mut fragments, &v6(9_999, 8, false)),
            Some((5000, 53))
        );
    }
}
