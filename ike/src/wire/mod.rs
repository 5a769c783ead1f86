// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wire format of IKEv2: octets to typed payloads and back (RFC 7296 section 3, RFC 7383).
//!
//! Reading is in two steps, because the contents of an Encrypted payload can only be read once
//! the cryptographic layer has opened it: [`Message::parse`] reads the header and what is in clear
//! and keeps the body of an [`sk::SkPayload`] or [`skf::SkfPayload`] as it is;
//! [`parse_payloads`] reads what came out of it. Writing mirrors this: [`emit_payloads`] writes
//! what goes into it, and [`Message::emit`] the message around it.
//!
//! Everything received is hostile. No input panics; memory is bounded by a small multiple of the
//! input's length, and the number of payloads, proposals, transforms and attributes is limited.

pub mod auth;
pub mod cert;
pub mod certreq;
pub mod cp;
pub mod delete;
pub mod eap;
pub mod error;
pub mod header;
pub mod id;
pub mod ke;
pub mod message;
mod mobike;
pub mod nonce;
pub mod notify;
pub mod payload;
mod reader;
mod redirect;
pub mod sa;
pub mod sk;
pub mod skf;
pub mod ts;
pub mod unknown;
pub mod vendor;

#[cfg(test)]
mod tests;

pub use auth::{AuthMethod, AuthPayload};
pub use cert::{CertEncoding, CertPayload};
pub use certreq::CertReqPayload;
pub use cp::{CfgType, CpAttribute, CpAttributeType, CpPayload};
pub use delete::DeletePayload;
pub use eap::{EapCode, EapPayload};
pub use error::WireError;
pub use header::{ExchangeType, Flags, HEADER_LEN, Header};
pub use ke::KePayload;
pub use message::Message;
pub use nonce::NoncePayload;
pub use notify::{NotifyPayload, NotifyType};
pub use payload::{Payload, PayloadType, emit_payloads, parse_payloads, unsupported_critical};
pub use redirect::{Gateway, Redirect};
pub use sa::{SaPayload, SaProposal};
pub use sk::SkPayload;
pub use skf::SkfPayload;
pub use ts::TsPayload;
pub use unknown::UnknownPayload;
pub use vendor::{STRONGSWAN, VendorPayload};
