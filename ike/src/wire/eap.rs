// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The EAP payload (RFC 7296 section 3.16, RFC 3748 section 4).

use core::fmt;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

swanherd_ipsec::open_registry! {
    /// EAP codes (RFC 3748 section 4).
    pub enum EapCode: u8 {
        Request = 1, "REQ";
        Response = 2, "RES";
        Success = 3, "SUCC";
        Failure = 4, "FAIL";
    }
}

/// An EAP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EapPayload {
    /// Kind of packet.
    pub code: EapCode,
    /// Matches responses to requests.
    pub identifier: u8,
    /// Type and type data of requests and responses; empty for the others.
    pub data: Vec<u8>,
}

impl EapPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let announced = reader.remaining();
        let [code, identifier] = reader.array::<2>("EAP packet is cut off")?;
        if usize::from(reader.u16("EAP packet is cut off")?) != announced {
            return Err(reader.malformed("length of the EAP packet contradicts the payload's"));
        }
        Ok(Self {
            code: code.into(),
            identifier,
            data: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let Ok(length) = u16::try_from(4 + self.data.len()) else {
            return Err(WireError::TooLong {
                payload: PayloadType::Eap,
                what: "EAP packet",
            });
        };
        out.extend_from_slice(&[self.code.into(), self.identifier]);
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(&self.data);
        Ok(())
    }
}

impl fmt::Display for EapPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.data.first() {
            Some(eap_type) => write!(f, "EAP/{}/{eap_type}", self.code),
            None => write!(f, "EAP/{}", self.code),
        }
    }
}
