// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Internet checksum (RFC 1071).
//!
//! Sums are kept in the byte order of the host: the one's complement sum of swapped words is the
//! swapped sum, so results are stored with `to_ne_bytes` and nothing is swapped per word.

/// A sum that has not been folded to 16 bits yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(u64);

impl Sum {
    /// Adds octets. Each call but the last must add an even number.
    #[inline]
    pub(super) fn add(self, octets: &[u8]) -> Self {
        let mut lanes = [0u64; 8];
        let (blocks, rest) = octets.as_chunks::<32>();
        for block in blocks {
            // Fixed trip counts, so that this becomes vector code.
            let (words, _) = block.as_chunks::<4>();
            for (lane, word) in lanes.iter_mut().zip(words) {
                *lane += u64::from(u32::from_ne_bytes(*word));
            }
        }
        let mut sum = lanes.iter().sum::<u64>();
        let (words, tail) = rest.as_chunks::<2>();
        for word in words {
            sum += u64::from(u16::from_ne_bytes(*word));
        }
        if let [last] = tail {
            sum += u64::from(u16::from_ne_bytes([*last, 0]));
        }
        // A packet is far too short for these additions to overflow.
        Self(self.0 + sum)
    }

    /// Adds one 16-bit field in network order of `value`.
    #[inline]
    pub(super) fn add_word(self, value: u16) -> Self {
        Self(self.0 + u64::from(value.to_be()))
    }

    /// The pseudo-header of TCP and UDP: addresses as they lie in the packet, then protocol and
    /// length.
    #[inline]
    pub(super) fn pseudo_header(addresses: &[u8], protocol: u8, length: usize) -> Self {
        Self::default()
            .add(addresses)
            .add_word(u16::from(protocol))
            .add_word((length >> 16) as u16)
            .add_word(length as u16)
    }

    /// Folded to 16 bits, not complemented: what a field for partial checksums holds.
    #[inline]
    pub(super) fn partial(self) -> [u8; 2] {
        let mut sum = self.0;
        sum = (sum & 0xffff_ffff) + (sum >> 32);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        (sum as u16).to_ne_bytes()
    }

    /// The checksum that makes what was summed valid.
    #[inline]
    pub(super) fn complete(self) -> [u8; 2] {
        let [a, b] = self.partial();
        [!a, !b]
    }

    /// Whether what was summed, its checksum field included, is valid.
    #[inline]
    pub(super) fn is_valid(self) -> bool {
        self.partial() == [0xff, 0xff]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 1071 word by word.
    fn plain(octets: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in octets.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(octets in proptest::collection::vec(any::<u8>(), 0..2000)) {
            prop_assert_eq!(u16::from_be_bytes(Sum::default().add(&octets).complete()), plain(&octets));
        }
    }

    #[test]
    fn a_header_with_its_checksum_is_valid() {
        let mut header = [
            0x45, 0, 0, 28, 0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1,
        ];
        assert!(!Sum::default().add(&header).is_valid());
        let checksum = Sum::default().add(&header).complete();
        header[10..12].copy_from_slice(&checksum);
        assert!(Sum::default().add(&header).is_valid());
    }
}
