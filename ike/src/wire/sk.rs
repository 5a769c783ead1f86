// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Encrypted and Authenticated payload (RFC 7296 section 3.14).

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

/// An Encrypted payload that is still closed. It is always the last of its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkPayload {
    /// Type of the first payload inside; for [`super::parse_payloads`].
    pub first: PayloadType,
    /// IV, ciphertext and ICV.
    pub body: Vec<u8>,
}

impl SkPayload {
    /// The associated data: everything from the IKE header to the generic header of this payload,
    /// both included (RFC 5282 section 5.1). `message` is the one that this payload was read from.
    pub fn aad<'a>(&self, message: &'a [u8]) -> &'a [u8] {
        before_body(message, &self.body)
    }

    pub(super) fn parse(first: PayloadType, mut reader: Reader<'_>) -> Result<Self, WireError> {
        if reader.is_empty() {
            return Err(reader.malformed("encrypted payload is empty"));
        }
        Ok(Self {
            first,
            body: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.body);
    }
}

/// What comes before `body`, which is the end of `message`.
pub(super) fn before_body<'a>(message: &'a [u8], body: &[u8]) -> &'a [u8] {
    let end = message.len().saturating_sub(body.len());
    message.get(..end).unwrap_or_default()
}
