// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole messages.

use core::fmt;

use super::error::WireError;
use super::header::{HEADER_LEN, Header};
use super::notify::{NotifyPayload, NotifyType};
use super::payload::{Payload, PayloadType, emit_payloads, parse_chain};

/// An IKE message: its header and its payloads. A message as received has a closed
/// [`Payload::Sk`] or [`Payload::Skf`] as its last payload, if it has one; a message whose SK
/// payload was opened holds what was inside instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The header.
    pub header: Header,
    /// In order of appearance.
    pub payloads: Vec<Payload>,
}

impl Message {
    /// Reads a message as received.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if octets are missing, [`WireError::MajorVersion`] for another
    /// version, and the others if what is there is wrong.
    pub fn parse(data: &[u8]) -> Result<Self, WireError> {
        let (header, first, length) = Header::parse_raw(data)?;
        if length > data.len() {
            return Err(WireError::Truncated {
                need: length,
                have: data.len(),
            });
        }
        let Some(chain) = data.get(HEADER_LEN..).filter(|_| length == data.len()) else {
            return Err(WireError::Malformed {
                payload: PayloadType::None,
                what: "length is less than the datagram's",
            });
        };
        let payloads = parse_chain(first, chain)?;
        Ok(Self { header, payloads })
    }

    /// Writes the message as it is; an SK or SKF payload must be sealed already and come last.
    ///
    /// # Errors
    /// [`WireError::TooLong`]; [`WireError::Malformed`] if something follows an SK or SKF payload.
    pub fn emit(&self) -> Result<Vec<u8>, WireError> {
        let closed = |payload: &Payload| matches!(payload, Payload::Sk(_) | Payload::Skf(_));
        if let [before @ .., _] = self.payloads.as_slice()
            && before.iter().any(closed)
        {
            return Err(WireError::Malformed {
                payload: PayloadType::Sk,
                what: "encrypted payload is not the last",
            });
        }
        let mut out = Vec::with_capacity(512);
        let first = self
            .payloads
            .first()
            .map_or(PayloadType::None, Payload::payload_type);
        self.header.emit(first, 0, &mut out);
        emit_payloads(&self.payloads, PayloadType::None, &mut out)?;
        write_length(&mut out)?;
        Ok(out)
    }

    /// The first notify of a type.
    pub fn notify(&self, notify_type: NotifyType) -> Option<&NotifyPayload> {
        self.notifies()
            .find(|notify| notify.notify_type == notify_type)
    }

    /// All notifies.
    pub fn notifies(&self) -> impl Iterator<Item = &NotifyPayload> {
        self.payloads.iter().filter_map(|payload| match payload {
            Payload::Notify(notify) => Some(notify),
            _ => None,
        })
    }

    /// See [`super::unsupported_critical`].
    pub fn unsupported_critical(&self) -> Option<u8> {
        super::unsupported_critical(&self.payloads)
    }
}

/// Fills in the Length field of a complete message.
pub(super) fn write_length(message: &mut [u8]) -> Result<(), WireError> {
    let Ok(length) = u32::try_from(message.len()) else {
        return Err(WireError::TooLong {
            payload: PayloadType::None,
            what: "message",
        });
    };
    if let Some(field) = message.get_mut(HEADER_LEN - 4..HEADER_LEN) {
        field.copy_from_slice(&length.to_be_bytes());
    }
    Ok(())
}

/// One line, as a protocol analyser would put it:
/// `IKE_SA_INIT request 0 [ SA KE No N(NATD_S_IP) N(NATD_D_IP) ]`.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.header.flags.response {
            "response"
        } else {
            "request"
        };
        write!(
            f,
            "{} {kind} {} [",
            self.header.exchange, self.header.message_id
        )?;
        for payload in &self.payloads {
            write!(f, " {payload}")?;
        }
        f.write_str(" ]")
    }
}
