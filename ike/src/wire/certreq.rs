// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Certificate Request payload (RFC 7296 section 3.7).

use super::cert::CertEncoding;
use super::error::WireError;
use super::reader::Reader;

/// Length of the SHA-1 hash of a trust anchor's SubjectPublicKeyInfo.
const KEY_HASH_LEN: usize = 20;

/// A wish for certificates of certain authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertReqPayload {
    /// Kind of certificate.
    pub encoding: CertEncoding,
    /// Certification Authority: for X.509, the concatenated SHA-1 hashes of the trust anchors'
    /// SubjectPublicKeyInfo. Empty means any.
    pub authorities: Vec<u8>,
}

impl CertReqPayload {
    /// The hashes, one by one; octets that do not make a whole hash are left out.
    pub fn key_hashes(&self) -> impl Iterator<Item = &[u8; KEY_HASH_LEN]> {
        self.authorities.as_chunks::<KEY_HASH_LEN>().0.iter()
    }

    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        Ok(Self {
            encoding: reader.u8("no certificate encoding")?.into(),
            authorities: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.push(self.encoding.into());
        out.extend_from_slice(&self.authorities);
    }
}
