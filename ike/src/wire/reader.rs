// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cursor over the body of one payload.

use super::error::WireError;
use super::payload::PayloadType;

/// Reads big-endian fields; every failure names the payload that it happened in.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    payload: PayloadType,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) const fn new(payload: PayloadType, data: &'a [u8]) -> Self {
        Self {
            payload,
            rest: data,
        }
    }

    /// An error about this payload.
    pub(super) const fn malformed(&self, what: &'static str) -> WireError {
        WireError::Malformed {
            payload: self.payload,
            what,
        }
    }

    pub(super) const fn too_many(&self, what: &'static str, limit: usize) -> WireError {
        WireError::TooMany {
            payload: self.payload,
            what,
            limit,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) const fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Everything that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    pub(super) fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let Some((head, tail)) = self.rest.split_at_checked(len) else {
            return Err(self.malformed(what));
        };
        self.rest = tail;
        Ok(head)
    }

    /// The next `len` octets as a reader of their own.
    pub(super) fn sub(&mut self, len: usize, what: &'static str) -> Result<Self, WireError> {
        Ok(Self::new(self.payload, self.take(len, what)?))
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], WireError> {
        let Some((head, tail)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.malformed(what));
        };
        self.rest = tail;
        Ok(*head)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        self.array::<1>(what).map(|[octet]| octet)
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, WireError> {
        self.array(what).map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(u32::from_be_bytes)
    }

    /// Succeeds if nothing is left.
    pub(super) const fn finish(self, what: &'static str) -> Result<(), WireError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.malformed(what))
        }
    }
}
