// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Vendor ID payload (RFC 7296 section 3.12).

use super::reader::Reader;

/// A constant by which an implementation makes itself known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VendorPayload(pub Vec<u8>);

impl VendorPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Self {
        Self(reader.rest().to_vec())
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
}
