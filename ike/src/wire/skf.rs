// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Encrypted and Authenticated Fragment payload (RFC 7383 section 2.5). Its body is sealed
//! and opened as that of the SK payload is, see [`super::sk`].

use core::fmt;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;
use super::sk::before_body;

/// One fragment of an Encrypted payload, still closed. It is always the last of its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkfPayload {
    /// In fragment 1, the type of the first payload inside of the whole; else `None`.
    pub first: PayloadType,
    /// Fragment Number, from 1 to `total`.
    pub number: u16,
    /// Total Fragments, at least 1.
    pub total: u16,
    /// IV, ciphertext and ICV.
    pub body: Vec<u8>,
}

impl SkfPayload {
    /// The associated data: everything before the IV, Fragment Number and Total Fragments
    /// included. `message` is the one that this payload was read from.
    pub fn aad<'a>(&self, message: &'a [u8]) -> &'a [u8] {
        before_body(message, &self.body)
    }

    pub(super) fn parse(first: PayloadType, mut reader: Reader<'_>) -> Result<Self, WireError> {
        let number = reader.u16("no fragment number")?;
        let total = reader.u16("no number of fragments")?;
        if number == 0 || number > total {
            return Err(reader.malformed("fragment number is out of range"));
        }
        if reader.is_empty() {
            return Err(reader.malformed("fragment is empty"));
        }
        Ok(Self {
            first,
            number,
            total,
            body: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.number.to_be_bytes());
        out.extend_from_slice(&self.total.to_be_bytes());
        out.extend_from_slice(&self.body);
    }
}

impl fmt::Display for SkfPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SKF({}/{})", self.number, self.total)
    }
}
