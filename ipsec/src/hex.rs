// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Octets as hexadecimal digits, for serde: `#[serde(with = "swanherd_ipsec::hex")]`.

use serde::{Deserialize as _, Deserializer, Serializer};

/// The digits of these octets, two for each.
pub fn encode(octets: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = octets
        .iter()
        .flat_map(|octet| [octet >> 4, octet & 15])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]));
    digits.collect()
}

/// The octets of these digits; `None` if there is an odd number of them or something else.
pub fn decode(digits: &str) -> Option<Vec<u8>> {
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else {
        return None;
    };
    let nibble = |digit: u8| char::from(digit).to_digit(16);
    let octet = |[high, low]: &[u8; 2]| u8::try_from(nibble(*high)? << 4 | nibble(*low)?).ok();
    pairs.iter().map(octet).collect()
}

/// For serde.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<S: Serializer>(octets: impl AsRef<[u8]>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&encode(octets.as_ref()))
}

/// For serde.
///
/// # Errors
/// If it is no text of hexadecimal digits.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<'_, str>::deserialize(from)?;
    decode(&text).ok_or_else(|| serde::de::Error::custom("not hexadecimal"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octets_survive_and_nonsense_is_refused() {
        let all: Vec<u8> = (0..=255).collect();

        assert_eq!(decode(&encode(&all)), Some(all));
        assert_eq!(encode(&[0x0a, 0xf0]), "0af0");
        assert_eq!(decode("0AF0"), Some(vec![0x0a, 0xf0]));
        for bad in ["a", "0g", "äb", "+1"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
