// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets: what a frame holds.

use crate::frame::MAX_FRAME;
use crate::message::{EncodeError, Message, ParseError, is_printable, put_name};

/// The first octet of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PacketType {
    /// A command and its arguments, from a client.
    Request = 0,
    /// The answer to a command.
    Response = 1,
    /// The answer to a command that the server does not have.
    CommandUnknown = 2,
    /// A client wants events of a name.
    EventRegister = 3,
    /// A client wants no more events of a name.
    EventUnregister = 4,
    /// The (un)registration was done.
    EventConfirm = 5,
    /// The server has no events of that name.
    EventUnknown = 6,
    /// An event.
    Event = 7,
}

impl PacketType {
    fn from_octet(octet: u8) -> Option<Self> {
        Some(match octet {
            0 => Self::Request,
            1 => Self::Response,
            2 => Self::CommandUnknown,
            3 => Self::EventRegister,
            4 => Self::EventUnregister,
            5 => Self::EventConfirm,
            6 => Self::EventUnknown,
            7 => Self::Event,
            _ => return None,
        })
    }

    const fn is_named(self) -> bool {
        matches!(
            self,
            Self::Request | Self::EventRegister | Self::EventUnregister | Self::Event
        )
    }
}

/// A packet with its header read and its message not yet, so that a server can answer a command
/// whose message is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawPacket<'a> {
    /// What it is.
    pub packet_type: PacketType,
    /// Name of the command or event; empty for packets without name.
    pub name: &'a str,
    /// The encoded message.
    pub body: &'a [u8],
}

impl<'a> RawPacket<'a> {
    /// Reads the header of a packet.
    ///
    /// # Errors
    /// If the packet is empty, of an unknown type, or its name is cut short or not printable.
    pub fn parse(octets: &'a [u8]) -> Result<Self, PacketError> {
        let (&first, rest) = octets.split_first().ok_or(PacketError::Empty)?;
        let packet_type = PacketType::from_octet(first).ok_or(PacketError::UnknownType(first))?;
        if !packet_type.is_named() {
            return Ok(Self {
                packet_type,
                name: "",
                body: rest,
            });
        }
        let (&len, rest) = rest.split_first().ok_or(PacketError::BadName)?;
        let (name, body) = rest
            .split_at_checked(usize::from(len))
            .ok_or(PacketError::BadName)?;
        if !is_printable(name) {
            return Err(PacketError::BadName);
        }
        let name = core::str::from_utf8(name).map_err(|_| PacketError::BadName)?;
        Ok(Self {
            packet_type,
            name,
            body,
        })
    }
}

/// A packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// See [`PacketType::Request`].
    Request(String, Message),
    /// See [`PacketType::Response`].
    Response(Message),
    /// See [`PacketType::CommandUnknown`].
    CommandUnknown,
    /// See [`PacketType::EventRegister`].
    EventRegister(String),
    /// See [`PacketType::EventUnregister`].
    EventUnregister(String),
    /// See [`PacketType::EventConfirm`].
    EventConfirm,
    /// See [`PacketType::EventUnknown`].
    EventUnknown,
    /// See [`PacketType::Event`].
    Event(String, Message),
}

impl Packet {
    /// Reads a packet.
    ///
    /// # Errors
    /// If the header or the message is broken, or octets follow where there is no message.
    pub fn parse(octets: &[u8]) -> Result<Self, PacketError> {
        let raw = RawPacket::parse(octets)?;
        let name = || raw.name.to_owned();
        let without_message = |packet: Self| {
            if raw.body.is_empty() {
                Ok(packet)
            } else {
                Err(PacketError::TrailingOctets)
            }
        };
        match raw.packet_type {
            PacketType::Request => Ok(Self::Request(name(), Message::parse(raw.body)?)),
            PacketType::Response => Ok(Self::Response(Message::parse(raw.body)?)),
            PacketType::Event => Ok(Self::Event(name(), Message::parse(raw.body)?)),
            PacketType::CommandUnknown => without_message(Self::CommandUnknown),
            PacketType::EventRegister => without_message(Self::EventRegister(name())),
            PacketType::EventUnregister => without_message(Self::EventUnregister(name())),
            PacketType::EventConfirm => without_message(Self::EventConfirm),
            PacketType::EventUnknown => without_message(Self::EventUnknown),
        }
    }

    /// What it is.
    pub fn packet_type(&self) -> PacketType {
        match self {
            Self::Request(..) => PacketType::Request,
            Self::Response(_) => PacketType::Response,
            Self::CommandUnknown => PacketType::CommandUnknown,
            Self::EventRegister(_) => PacketType::EventRegister,
            Self::EventUnregister(_) => PacketType::EventUnregister,
            Self::EventConfirm => PacketType::EventConfirm,
            Self::EventUnknown => PacketType::EventUnknown,
            Self::Event(..) => PacketType::Event,
        }
    }

    /// Encodes the packet with the length in front: what goes onto the socket.
    ///
    /// # Errors
    /// If a name or value does not fit, or the packet is longer than [`MAX_FRAME`].
    pub fn to_frame(&self) -> Result<Vec<u8>, EncodeError> {
        let mut out = vec![0, 0, 0, 0, self.packet_type() as u8];
        match self {
            Self::Request(name, message) | Self::Event(name, message) => {
                put_name(&mut out, name)?;
                message.encode_to(&mut out)?;
            }
            Self::Response(message) => message.encode_to(&mut out)?,
            Self::EventRegister(name) | Self::EventUnregister(name) => put_name(&mut out, name)?,
            Self::CommandUnknown | Self::EventConfirm | Self::EventUnknown => {}
        }
        let len = out.len() - 4;
        if len > MAX_FRAME {
            return Err(EncodeError::PacketTooLong(len));
        }
        let header = u32::try_from(len).map_err(|_| EncodeError::PacketTooLong(len))?;
        out[..4].copy_from_slice(&header.to_be_bytes());
        Ok(out)
    }
}

/// Why a frame is not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Nothing in the frame.
    #[error("empty packet")]
    Empty,
    /// A type that does not exist.
    #[error("unknown packet type {0}")]
    UnknownType(u8),
    /// The name is cut short or not printable.
    #[error("broken name")]
    BadName,
    /// Octets after a packet that has no message.
    #[error("octets after the end of the packet")]
    TrailingOctets,
    /// The message is broken.
    #[error(transparent)]
    Message(#[from] ParseError),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all() -> Vec<Packet> {
        let message = Message::new().with("a", "b");
        vec![
            Packet::Request("version".into(), message.clone()),
            Packet::Response(message.clone()),
            Packet::CommandUnknown,
            Packet::EventRegister("log".into()),
            Packet::EventUnregister("log".into()),
            Packet::EventConfirm,
            Packet::EventUnknown,
            Packet::Event("log".into(), message),
        ]
    }

    #[test]
    fn every_packet_survives_a_round_trip() {
        for packet in all() {
            let frame = packet.to_frame().unwrap();
            let len = u32::from_be_bytes(frame[..4].try_into().unwrap());
            assert_eq!(len as usize, frame.len() - 4);
            assert_eq!(Packet::parse(&frame[4..]), Ok(packet));
        }
    }

    #[test]
    fn broken_headers_are_told_apart() {
        assert_eq!(RawPacket::parse(b""), Err(PacketError::Empty));
        assert_eq!(RawPacket::parse(b"\x09"), Err(PacketError::UnknownType(9)));
        assert_eq!(RawPacket::parse(b"\x00"), Err(PacketError::BadName));
        assert_eq!(RawPacket::parse(b"\x00\x05ab"), Err(PacketError::BadName));
        assert_eq!(RawPacket::parse(b"\x03\x01\xff"), Err(PacketError::BadName));
        assert_eq!(Packet::parse(b"\x05x"), Err(PacketError::TrailingOctets));
    }

    #[test]
    fn packets_beyond_the_frame_limit_are_refused() {
        let mut message = Message::new();
        for index in 0..9 {
            message.push(format!("v{index}"), vec![b'x'; 65_000]);
        }
        assert!(matches!(
            Packet::Response(message).to_frame(),
            Err(EncodeError::PacketTooLong(_))
        ));
    }

    proptest! {
        #[test]
        fn parsing_never_panics(octets in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Packet::parse(&octets);
        }
    }
}
