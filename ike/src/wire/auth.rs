// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Authentication payload (RFC 7296 section 3.8).

use super::error::WireError;
use super::reader::Reader;

swanherd_ipsec::open_registry! {
    /// Authentication methods (RFC 7296 section 3.8, RFC 4754, RFC 7427, RFC 7619).
    pub enum AuthMethod: u8 {
        RsaSignature = 1, "RSA_SIGNATURE";
        SharedKey = 2, "PRE_SHARED_KEY";
        DssSignature = 3, "DSS_SIGNATURE";
        Ecdsa256 = 9, "ECDSA_256";
        Ecdsa384 = 10, "ECDSA_384";
        Ecdsa521 = 11, "ECDSA_521";
        GenericSecurePassword = 12, "GENERIC_SECURE_PASSWORD";
        Null = 13, "NULL_AUTH";
        DigitalSignature = 14, "DIGITAL_SIGNATURE";
    }
}

/// Proof of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthPayload {
    /// How.
    pub method: AuthMethod,
    /// Authentication Data; for [`AuthMethod::DigitalSignature`] this starts with the algorithm
    /// identifier of RFC 7427.
    pub data: Vec<u8>,
}

impl AuthPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [method, _, _, _] = reader.array::<4>("no authentication method")?;
        Ok(Self {
            method: method.into(),
            data: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.method.into(), 0, 0, 0]);
        out.extend_from_slice(&self.data);
    }
}
