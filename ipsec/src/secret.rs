// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key material that erases itself, never prints itself, and compares in constant time.

use subtle::ConstantTimeEq as _;
use zeroize::{Zeroize as _, ZeroizeOnDrop};

/// Secret octets: a pre-shared key, a session key, an intermediate value of a key exchange.
#[derive(Clone, Default, ZeroizeOnDrop)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Takes ownership of `octets`; the caller keeps no copy.
    pub fn new(octets: Vec<u8>) -> Self {
        Self(octets)
    }

    /// Copies `octets`, which the caller must erase itself.
    pub fn copy_of(octets: &[u8]) -> Self {
        Self(octets.to_vec())
    }

    /// The octets, for handing to a cipher, a MAC or the kernel. Never log them.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// Length in octets.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no octets.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Erases the octets now, leaving an empty secret.
    pub fn clear(&mut self) {
        self.0.zeroize();
    }
}

impl PartialEq for Secret {
    /// Constant time in the contents; the length is not secret.
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && bool::from(self.0.ct_eq(&other.0))
    }
}

impl Eq for Secret {}

/// Writes the length and nothing else, so that whatever has a secret in it can be recorded.
impl serde::Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{} secret octets", self.0.len()))
    }
}

impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Secret({} octets)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_no_octet() {
        assert_eq!(
            format!("{:?}", Secret::copy_of(b"hunter2")),
            "Secret(7 octets)"
        );
    }

    #[test]
    fn equality_is_by_content() {
        assert_eq!(Secret::copy_of(b"a"), Secret::copy_of(b"a"));
        assert_ne!(Secret::copy_of(b"a"), Secret::copy_of(b"b"));
        assert_ne!(Secret::copy_of(b"a"), Secret::copy_of(b"ab"));
    }
}
