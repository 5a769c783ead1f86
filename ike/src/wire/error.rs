// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be wrong with a message.

use super::header::Header;
use super::notify::NotifyType;
use super::payload::PayloadType;

/// Why octets are not a message, or a message cannot be octets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Fewer octets than the header has, or than it announces. Not worth an answer: the rest may
    /// have been lost on the way.
    #[error("truncated: {have} of {need} octets")]
    Truncated {
        /// Octets that are needed.
        need: usize,
        /// Octets that are there.
        have: usize,
    },
    /// The major version is not 2. The header, as far as it is common to all versions, is kept
    /// for an INVALID_MAJOR_VERSION answer (RFC 7296 section 2.5).
    #[error("major version {major} is not supported")]
    MajorVersion {
        /// What the peer speaks.
        major: u8,
        /// Its header.
        header: Header,
    },
    /// A field or length contradicts the specification: INVALID_SYNTAX.
    #[error("{payload}: {what}")]
    Malformed {
        /// Where; [`PayloadType::None`] is the message itself.
        payload: PayloadType,
        /// What is wrong, for people.
        what: &'static str,
    },
    /// More of something than a sane peer sends: INVALID_SYNTAX.
    #[error("{payload}: more than {limit} {what}")]
    TooMany {
        /// Where; [`PayloadType::None`] is the message itself.
        payload: PayloadType,
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A value to write does not fit its length field.
    #[error("{payload}: {what} is too long to write")]
    TooLong {
        /// Where.
        payload: PayloadType,
        /// Which value.
        what: &'static str,
    },
}

impl WireError {
    /// The error notify for the peer, or `None` if no answer is due (RFC 7296 section 2.21).
    pub const fn notify(&self) -> Option<NotifyType> {
        match self {
            Self::Truncated { .. } | Self::TooLong { .. } => None,
            Self::MajorVersion { .. } => Some(NotifyType::InvalidMajorVersion),
            Self::Malformed { .. } | Self::TooMany { .. } => Some(NotifyType::InvalidSyntax),
        }
    }
}
