// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Nonce payload (RFC 7296 section 3.9).

use super::error::WireError;
use super::reader::Reader;

/// Shortest nonce (RFC 7296 section 3.9).
const MIN_LEN: usize = 16;
/// Longest nonce (RFC 7296 section 3.9).
const MAX_LEN: usize = 256;

/// A nonce of 16 to 256 octets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoncePayload(Vec<u8>);

impl NoncePayload {
    /// A nonce, or `None` if it has fewer than 16 or more than 256 octets.
    pub fn new(octets: Vec<u8>) -> Option<Self> {
        (MIN_LEN..=MAX_LEN)
            .contains(&octets.len())
            .then_some(Self(octets))
    }

    /// The octets.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// The octets.
    pub fn into_vec(self) -> Vec<u8> {
        self.0
    }

    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let error = reader.malformed("nonce is not 16 to 256 octets long");
        if !(MIN_LEN..=MAX_LEN).contains(&reader.remaining()) {
            return Err(error);
        }
        Ok(Self(reader.rest().to_vec()))
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
}
