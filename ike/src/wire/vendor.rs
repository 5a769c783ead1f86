// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Vendor ID payload (RFC 7296 section 3.12).

use super::reader::Reader;

/// A constant by which an implementation makes itself known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VendorPayload(pub Vec<u8>);

/// By which implementations that speak strongSwan's private notifies know each other: the MD5 hash
/// of its name.
pub const STRONGSWAN: [u8; 16] = [
    0x88, 0x2f, 0xe5, 0x6d, 0x6f, 0xd2, 0x0d, 0xbc, 0x22, 0x51, 0x61, 0x3b, 0x2e, 0xbe, 0x5b, 0xeb,
];

impl VendorPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Self {
        Self(reader.rest().to_vec())
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
}
