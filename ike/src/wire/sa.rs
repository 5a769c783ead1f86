// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Security Association payload (RFC 7296 section 3.3).

use swanherd_ipsec::{Proposal, Transform};

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

/// Proposals per payload.
const MAX_PROPOSALS: usize = 128;
/// Attributes per transform; only the key length is in use.
const MAX_ATTRIBUTES: usize = 16;

/// "Last Substruc" of a proposal that another follows.
const MORE_PROPOSALS: u8 = 2;
/// "Last Substruc" of a transform that another follows.
const MORE_TRANSFORMS: u8 = 3;

/// Attribute type of the key length.
const KEY_LENGTH: u16 = 14;
/// Attribute format bit: the value is in place of the length.
const FORMAT_TV: u16 = 0x8000;

const TYPE_ENCRYPTION: u8 = 1;
const TYPE_PRF: u8 = 2;
const TYPE_INTEGRITY: u8 = 3;
const TYPE_KEY_EXCHANGE: u8 = 4;
const TYPE_ESN: u8 = 5;
/// Type of the first additional key exchange (RFC 9370).
const TYPE_ADDITIONAL_KE_1: u8 = 6;
/// Type of the last.
const TYPE_ADDITIONAL_KE_7: u8 = 12;

/// What one side proposes, or what the other has chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaPayload {
    /// In order of preference. A response has one.
    pub proposals: Vec<SaProposal>,
}

/// A proposal with what only the wire needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaProposal {
    /// Proposal number, from 1; a response repeats that of the chosen one.
    pub number: u8,
    /// SPI of the sender: 4 octets for ESP and AH, 8 for the rekeying of an IKE SA, else none.
    pub spi: Vec<u8>,
    /// Protocol and transforms.
    pub proposal: Proposal,
}

impl SaProposal {
    /// The SPI, if it is one of a CHILD SA.
    pub fn child_spi(&self) -> Option<u32> {
        <[u8; 4]>::try_from(self.spi.as_slice())
            .ok()
            .map(u32::from_be_bytes)
    }

    /// The SPI, if it is one of an IKE SA.
    pub fn ike_spi(&self) -> Option<u64> {
        <[u8; 8]>::try_from(self.spi.as_slice())
            .ok()
            .map(u64::from_be_bytes)
    }

    fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [number, protocol, spi_len, transform_count] =
            reader.array::<4>("proposal is cut off")?;
        let spi = reader.take(spi_len.into(), "SPI is cut off")?.to_vec();
        let mut transforms = Vec::new();
        let mut more = transform_count > 0;
        while more {
            let [last, _] = reader.array::<2>("transform is cut off")?;
            let length = usize::from(reader.u16("transform is cut off")?);
            let Some(rest) = length.checked_sub(4) else {
                return Err(reader.malformed("transform is shorter than its header"));
            };
            transforms.push(parse_transform(reader.sub(rest, "transform is cut off")?)?);
            more = last == MORE_TRANSFORMS;
            if more != (transforms.len() < usize::from(transform_count)) {
                return Err(reader.malformed("number of transforms is wrong"));
            }
        }
        reader.finish("octets after the last transform")?;
        Ok(Self {
            number,
            spi,
            proposal: Proposal {
                protocol: protocol.into(),
                transforms,
            },
        })
    }

    fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let too_long = |what| WireError::TooLong {
            payload: PayloadType::Sa,
            what,
        };
        let transforms = &self.proposal.transforms;
        let spi_len = u8::try_from(self.spi.len()).map_err(|_| too_long("SPI"))?;
        let count = u8::try_from(transforms.len()).map_err(|_| too_long("list of transforms"))?;
        out.extend_from_slice(&[self.number, self.proposal.protocol.into(), spi_len, count]);
        out.extend_from_slice(&self.spi);
        for (index, transform) in transforms.iter().enumerate() {
            let last = if index + 1 == transforms.len() {
                0
            } else {
                MORE_TRANSFORMS
            };
            emit_transform(last, *transform, out)?;
        }
        Ok(())
    }
}

impl SaPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let mut proposals = Vec::new();
        loop {
            if proposals.len() == MAX_PROPOSALS {
                return Err(reader.too_many("proposals", MAX_PROPOSALS));
            }
            let [last, _] = reader.array::<2>("proposal is cut off")?;
            let length = usize::from(reader.u16("proposal is cut off")?);
            let Some(rest) = length.checked_sub(4) else {
                return Err(reader.malformed("proposal is shorter than its header"));
            };
            proposals.push(SaProposal::parse(reader.sub(rest, "proposal is cut off")?)?);
            if last != MORE_PROPOSALS {
                break;
            }
        }
        reader.finish("octets after the last proposal")?;
        Ok(Self { proposals })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        for (index, proposal) in self.proposals.iter().enumerate() {
            let last = if index + 1 == self.proposals.len() {
                0
            } else {
                MORE_PROPOSALS
            };
            let start = out.len();
            out.extend_from_slice(&[last, 0, 0, 0]);
            proposal.emit(out)?;
            let Ok(length) = u16::try_from(out.len() - start) else {
                return Err(WireError::TooLong {
                    payload: PayloadType::Sa,
                    what: "proposal",
                });
            };
            if let Some(field) = out.get_mut(start + 2..start + 4) {
                field.copy_from_slice(&length.to_be_bytes());
            }
        }
        Ok(())
    }
}

/// Reads a transform after its "Last Substruc" and length. One with an attribute that does not
/// belong there becomes [`Transform::Unknown`], so that it is never chosen
/// (RFC 7296 section 3.3.6).
fn parse_transform(mut reader: Reader<'_>) -> Result<Transform, WireError> {
    let [transform_type, _] = reader.array::<2>("transform is cut off")?;
    let id = reader.u16("transform is cut off")?;
    let mut key_bits = None;
    let mut understood = true;
    let mut attributes = 0;
    while !reader.is_empty() {
        if attributes == MAX_ATTRIBUTES {
            return Err(reader.too_many("attributes of a transform", MAX_ATTRIBUTES));
        }
        attributes += 1;
        let attribute_type = reader.u16("attribute is cut off")?;
        let value = reader.u16("attribute is cut off")?;
        if attribute_type == KEY_LENGTH | FORMAT_TV && key_bits.is_none() {
            key_bits = Some(value);
            continue;
        }
        understood = false;
        if attribute_type & FORMAT_TV == 0 {
            reader.take(value.into(), "attribute is cut off")?;
        }
    }
    if !understood || (key_bits.is_some() && transform_type != TYPE_ENCRYPTION) {
        return Ok(Transform::Unknown { transform_type, id });
    }
    Ok(transform_of(transform_type, id, key_bits))
}

/// The transform with at most a key length as attribute.
fn transform_of(transform_type: u8, id: u16, key_bits: Option<u16>) -> Transform {
    match (transform_type, id) {
        (TYPE_ENCRYPTION, _) => Transform::Encryption {
            id: id.into(),
            key_bits,
        },
        (TYPE_PRF, _) => Transform::Prf(id.into()),
        (TYPE_INTEGRITY, _) => Transform::Integrity(id.into()),
        (TYPE_KEY_EXCHANGE, _) => Transform::KeyExchange(id.into()),
        (TYPE_ESN, 0) => Transform::Esn(false),
        (TYPE_ESN, 1) => Transform::Esn(true),
        (TYPE_ADDITIONAL_KE_1..=TYPE_ADDITIONAL_KE_7, _) => Transform::AdditionalKeyExchange {
            index: transform_type - (TYPE_ADDITIONAL_KE_1 - 1),
            id: id.into(),
        },
        _ => Transform::Unknown { transform_type, id },
    }
}

fn emit_transform(last: u8, transform: Transform, out: &mut Vec<u8>) -> Result<(), WireError> {
    let (transform_type, id, key_bits) = match transform {
        Transform::Encryption { id, key_bits } => (TYPE_ENCRYPTION, u16::from(id), key_bits),
        Transform::Prf(id) => (TYPE_PRF, id.into(), None),
        Transform::Integrity(id) => (TYPE_INTEGRITY, id.into(), None),
        Transform::KeyExchange(id) => (TYPE_KEY_EXCHANGE, id.into(), None),
        Transform::Esn(esn) => (TYPE_ESN, u16::from(esn), None),
        Transform::AdditionalKeyExchange { index, id } => (
            index.saturating_add(TYPE_ADDITIONAL_KE_1 - 1),
            id.into(),
            None,
        ),
        Transform::Unknown { transform_type, id } => {
            // Without the attribute that made it unknown it would be read as a known one.
            if transform_of(transform_type, id, None) != transform {
                return Err(WireError::Malformed {
                    payload: PayloadType::Sa,
                    what: "transform with attributes that are not understood",
                });
            }
            (transform_type, id, None)
        }
    };
    let length: u8 = if key_bits.is_some() { 12 } else { 8 };
    out.extend_from_slice(&[last, 0, 0, length, transform_type, 0]);
    out.extend_from_slice(&id.to_be_bytes());
    if let Some(bits) = key_bits {
        out.extend_from_slice(&(KEY_LENGTH | FORMAT_TV).to_be_bytes());
        out.extend_from_slice(&bits.to_be_bytes());
    }
    Ok(())
}
