// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The IKE header (RFC 7296 section 3.1).

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

/// Length of the IKE header in octets.
pub const HEADER_LEN: usize = 28;

/// Version octet of every message written: major 2, minor 0.
const VERSION: u8 = 0x20;

const FLAG_INITIATOR: u8 = 0x08;
const FLAG_VERSION: u8 = 0x10;
const FLAG_RESPONSE: u8 = 0x20;

swanherd_ipsec::open_registry! {
    /// Exchange types (RFC 7296 section 3.1).
    pub enum ExchangeType: u8 {
        IkeSaInit = 34, "IKE_SA_INIT";
        IkeAuth = 35, "IKE_AUTH";
        CreateChildSa = 36, "CREATE_CHILD_SA";
        Informational = 37, "INFORMATIONAL";
        IkeSessionResume = 38, "IKE_SESSION_RESUME";
        IkeIntermediate = 43, "IKE_INTERMEDIATE";
        IkeFollowupKe = 44, "IKE_FOLLOWUP_KE";
    }
}

/// Flags of the IKE header. Reserved bits are ignored on receipt and written as zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// The sender is the original initiator of the IKE SA.
    pub initiator: bool,
    /// The message is a response.
    pub response: bool,
    /// The sender could speak a higher major version.
    pub higher_version: bool,
}

impl Flags {
    /// From the octet on the wire.
    pub const fn from_octet(octet: u8) -> Self {
        Self {
            initiator: octet & FLAG_INITIATOR != 0,
            response: octet & FLAG_RESPONSE != 0,
            higher_version: octet & FLAG_VERSION != 0,
        }
    }

    /// To the octet on the wire.
    pub const fn octet(self) -> u8 {
        (if self.initiator { FLAG_INITIATOR } else { 0 })
            | (if self.response { FLAG_RESPONSE } else { 0 })
            | (if self.higher_version { FLAG_VERSION } else { 0 })
    }
}

/// What the IKE header says, without the lengths and types that follow from the payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// SPI of the original initiator.
    pub spi_i: u64,
    /// SPI of the original responder; zero in the first request.
    pub spi_r: u64,
    /// Kind of exchange.
    pub exchange: ExchangeType,
    /// Flags.
    pub flags: Flags,
    /// Message ID.
    pub message_id: u32,
}

impl Header {
    /// Reads the header alone, whatever follows it: enough to find the IKE SA.
    ///
    /// # Errors
    /// [`WireError::Truncated`] and [`WireError::MajorVersion`].
    pub fn parse(data: &[u8]) -> Result<Self, WireError> {
        Self::parse_raw(data).map(|(header, _, _)| header)
    }

    /// Reads the header with the first payload type and the length of the message.
    pub(super) fn parse_raw(data: &[u8]) -> Result<(Self, PayloadType, usize), WireError> {
        let Some(fixed) = data.get(..HEADER_LEN) else {
            return Err(WireError::Truncated {
                need: HEADER_LEN,
                have: data.len(),
            });
        };
        let mut reader = Reader::new(PayloadType::None, fixed);
        let cut_off = "header is cut off";
        let spi_i = u64::from_be_bytes(reader.array(cut_off)?);
        let spi_r = u64::from_be_bytes(reader.array(cut_off)?);
        let [next, version, exchange, flags] = reader.array(cut_off)?;
        let message_id = reader.u32(cut_off)?;
        let length = usize::try_from(reader.u32(cut_off)?).unwrap_or(usize::MAX);
        let header = Self {
            spi_i,
            spi_r,
            exchange: exchange.into(),
            flags: Flags::from_octet(flags),
            message_id,
        };
        let major = version >> 4;
        if major != VERSION >> 4 {
            return Err(WireError::MajorVersion { major, header });
        }
        Ok((header, next.into(), length))
    }

    /// Appends the header; `length` is that of the whole message.
    pub(super) fn emit(&self, first: PayloadType, length: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.spi_i.to_be_bytes());
        out.extend_from_slice(&self.spi_r.to_be_bytes());
        out.extend_from_slice(&[
            first.into(),
            VERSION,
            self.exchange.into(),
            self.flags.octet(),
        ]);
        out.extend_from_slice(&self.message_id.to_be_bytes());
        out.extend_from_slice(&length.to_be_bytes());
    }
}
