// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Configuration payload (RFC 7296 section 3.15).

use core::fmt;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

/// Attributes per payload.
const MAX_ATTRIBUTES: usize = 256;

swanherd_ipsec::open_registry! {
    /// Kinds of configuration messages (RFC 7296 section 3.15).
    pub enum CfgType: u8 {
        Request = 1, "CPRQ";
        Reply = 2, "CPRP";
        Set = 3, "CPS";
        Ack = 4, "CPA";
    }
}

swanherd_ipsec::open_registry! {
    /// Configuration attributes (RFC 7296 section 3.15.1). The top bit on the wire is reserved.
    pub enum CpAttributeType: u16 {
        InternalIp4Address = 1, "ADDR";
        InternalIp4Netmask = 2, "MASK";
        InternalIp4Dns = 3, "DNS";
        InternalIp4Nbns = 4, "NBNS";
        InternalIp4Dhcp = 6, "DHCP";
        ApplicationVersion = 7, "VER";
        InternalIp6Address = 8, "ADDR6";
        InternalIp6Dns = 10, "DNS6";
        InternalIp6Dhcp = 12, "DHCP6";
        InternalIp4Subnet = 13, "SUBNET";
        SupportedAttributes = 14, "SUP";
        InternalIp6Subnet = 15, "SUBNET6";
        MipHomePrefix = 16, "HOMEPFX";
        InternalIp6Link = 17, "LINK6";
        InternalIp6Prefix = 18, "PREFIX6";
        InternalDnsDomain = 25, "DNSDOM";
        InternalDnssecTa = 26, "DNSSECTA";
    }
}

/// One attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpAttribute {
    /// What the value is; its number is below 32768.
    pub attribute_type: CpAttributeType,
    /// Value; empty in a request for any.
    pub value: Vec<u8>,
}

/// A request for, or an assignment of, addresses and other settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpPayload {
    /// Request, reply, set or acknowledgement.
    pub cfg_type: CfgType,
    /// In order of appearance.
    pub attributes: Vec<CpAttribute>,
}

impl CpPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [cfg_type, _, _, _] = reader.array::<4>("no configuration type")?;
        let mut attributes = Vec::new();
        while !reader.is_empty() {
            if attributes.len() == MAX_ATTRIBUTES {
                return Err(reader.too_many("attributes", MAX_ATTRIBUTES));
            }
            let attribute_type = reader.u16("attribute is cut off")? & 0x7fff;
            let length = usize::from(reader.u16("attribute is cut off")?);
            attributes.push(CpAttribute {
                attribute_type: attribute_type.into(),
                value: reader.take(length, "attribute is cut off")?.to_vec(),
            });
        }
        Ok(Self {
            cfg_type: cfg_type.into(),
            attributes,
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        out.extend_from_slice(&[self.cfg_type.into(), 0, 0, 0]);
        for attribute in &self.attributes {
            let Ok(length) = u16::try_from(attribute.value.len()) else {
                return Err(WireError::TooLong {
                    payload: PayloadType::Cp,
                    what: "attribute",
                });
            };
            out.extend_from_slice(&(u16::from(attribute.attribute_type) & 0x7fff).to_be_bytes());
            out.extend_from_slice(&length.to_be_bytes());
            out.extend_from_slice(&attribute.value);
        }
        Ok(())
    }
}

impl fmt::Display for CpPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.cfg_type)?;
        for (index, attribute) in self.attributes.iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(f, "{space}{}", attribute.attribute_type)?;
        }
        f.write_str(")")
    }
}
