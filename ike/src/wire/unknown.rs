// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Payloads that this build does not know (RFC 7296 section 2.5).

/// A payload of a type without a meaning here. If it is critical, the message must be refused;
/// else it is skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPayload {
    /// Its type.
    pub payload_type: u8,
    /// Whether the sender insists on it being understood.
    pub critical: bool,
    /// Its body.
    pub data: Vec<u8>,
}
