// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Delete payload (RFC 7296 section 3.11).

use swanherd_ipsec::ProtocolId;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

/// What the sender has deleted or is about to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeletePayload {
    /// The IKE SA that carries the message, and all of its CHILD SAs.
    IkeSa,
    /// CHILD SAs.
    Child {
        /// ESP or AH.
        protocol: ProtocolId,
        /// SPIs that the sender would expect in inbound packets.
        spis: Vec<u32>,
    },
}

impl DeletePayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [protocol, spi_len] = reader.array::<2>("no protocol or SPI size")?;
        let count = usize::from(reader.u16("no number of SPIs")?);
        match ProtocolId::from(protocol) {
            ProtocolId::Ike => {
                if spi_len != 0 || count != 0 || !reader.is_empty() {
                    return Err(reader.malformed("SPI in the deletion of an IKE SA"));
                }
                Ok(Self::IkeSa)
            }
            protocol @ (ProtocolId::Esp | ProtocolId::Ah) => {
                if spi_len != 4 {
                    return Err(reader.malformed("SPI of a CHILD SA does not have 4 octets"));
                }
                if count * 4 != reader.remaining() {
                    return Err(reader.malformed("number of SPIs contradicts the length"));
                }
                let mut spis = Vec::with_capacity(count);
                while !reader.is_empty() {
                    spis.push(reader.u32("SPI is cut off")?);
                }
                Ok(Self::Child { protocol, spis })
            }
            ProtocolId::Unknown(_) => Err(reader.malformed("unknown protocol")),
        }
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        match self {
            Self::IkeSa => out.extend_from_slice(&[ProtocolId::Ike.into(), 0, 0, 0]),
            Self::Child { protocol, spis } => {
                let Ok(count) = u16::try_from(spis.len()) else {
                    return Err(WireError::TooLong {
                        payload: PayloadType::Delete,
                        what: "list of SPIs",
                    });
                };
                out.extend_from_slice(&[(*protocol).into(), 4]);
                out.extend_from_slice(&count.to_be_bytes());
                for spi in spis {
                    out.extend_from_slice(&spi.to_be_bytes());
                }
            }
        }
        Ok(())
    }
}
