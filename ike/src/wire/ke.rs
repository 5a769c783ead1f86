// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Key Exchange payload (RFC 7296 section 3.4).

use swanherd_ipsec::registry::KeyExchangeId;

use super::error::WireError;
use super::reader::Reader;

/// A public value of a key exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KePayload {
    /// Key exchange method.
    pub method: KeyExchangeId,
    /// Key Exchange Data. Whether its length fits the method is for the cryptography to say.
    pub data: Vec<u8>,
}

impl KePayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let method = reader.u16("no key exchange method")?.into();
        reader.u16("no reserved field")?;
        Ok(Self {
            method,
            data: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&u16::from(self.method).to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&self.data);
    }
}
