// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Payloads in general: their types, their generic header and their chains (RFC 7296 section 3.2).

use core::fmt;

use swanherd_ipsec::Identity;

use super::auth::AuthPayload;
use super::cert::CertPayload;
use super::certreq::CertReqPayload;
use super::cp::CpPayload;
use super::delete::DeletePayload;
use super::eap::EapPayload;
use super::error::WireError;
use super::id;
use super::ke::KePayload;
use super::nonce::NoncePayload;
use super::notify::NotifyPayload;
use super::reader::Reader;
use super::sa::SaPayload;
use super::sk::SkPayload;
use super::skf::SkfPayload;
use super::ts::TsPayload;
use super::unknown::UnknownPayload;
use super::vendor::VendorPayload;

/// Payloads per chain. Certificate chains, certificate requests, vendor IDs and the notifies of
/// multihomed peers stay far below this.
pub const MAX_PAYLOADS: usize = 128;

/// Length of the generic payload header in octets.
pub(super) const GENERIC_LEN: usize = 4;

const CRITICAL: u8 = 0x80;

swanherd_ipsec::open_registry! {
    /// Payload types (RFC 7296 section 3.2).
    pub enum PayloadType: u8 {
        None = 0, "message";
        Sa = 33, "SA";
        Ke = 34, "KE";
        IdI = 35, "IDi";
        IdR = 36, "IDr";
        Cert = 37, "CERT";
        CertReq = 38, "CERTREQ";
        Auth = 39, "AUTH";
        Nonce = 40, "No";
        Notify = 41, "N";
        Delete = 42, "D";
        Vendor = 43, "V";
        TsI = 44, "TSi";
        TsR = 45, "TSr";
        Sk = 46, "SK";
        Cp = 47, "CP";
        Eap = 48, "EAP";
        Skf = 53, "SKF";
    }
}

/// A payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Security Association.
    Sa(SaPayload),
    /// Key Exchange.
    Ke(KePayload),
    /// Identification of the initiator.
    IdI(Identity),
    /// Identification of the responder.
    IdR(Identity),
    /// Certificate.
    Cert(CertPayload),
    /// Certificate Request.
    CertReq(CertReqPayload),
    /// Authentication.
    Auth(AuthPayload),
    /// Nonce.
    Nonce(NoncePayload),
    /// Notify.
    Notify(NotifyPayload),
    /// Delete.
    Delete(DeletePayload),
    /// Vendor ID.
    Vendor(VendorPayload),
    /// Traffic selectors of the initiator.
    TsI(TsPayload),
    /// Traffic selectors of the responder.
    TsR(TsPayload),
    /// Encrypted and Authenticated, still closed.
    Sk(SkPayload),
    /// Encrypted and Authenticated Fragment, still closed.
    Skf(SkfPayload),
    /// Configuration.
    Cp(CpPayload),
    /// Extensible Authentication.
    Eap(EapPayload),
    /// One that this build does not know.
    Unknown(UnknownPayload),
}

impl Payload {
    /// Its type.
    pub fn payload_type(&self) -> PayloadType {
        match self {
            Self::Sa(_) => PayloadType::Sa,
            Self::Ke(_) => PayloadType::Ke,
            Self::IdI(_) => PayloadType::IdI,
            Self::IdR(_) => PayloadType::IdR,
            Self::Cert(_) => PayloadType::Cert,
            Self::CertReq(_) => PayloadType::CertReq,
            Self::Auth(_) => PayloadType::Auth,
            Self::Nonce(_) => PayloadType::Nonce,
            Self::Notify(_) => PayloadType::Notify,
            Self::Delete(_) => PayloadType::Delete,
            Self::Vendor(_) => PayloadType::Vendor,
            Self::TsI(_) => PayloadType::TsI,
            Self::TsR(_) => PayloadType::TsR,
            Self::Sk(_) => PayloadType::Sk,
            Self::Skf(_) => PayloadType::Skf,
            Self::Cp(_) => PayloadType::Cp,
            Self::Eap(_) => PayloadType::Eap,
            Self::Unknown(unknown) => PayloadType::Unknown(unknown.payload_type),
        }
    }

    /// Reads the body of a payload; `next` is the Next Payload field of its generic header,
    /// which means the first inner payload for SK and SKF.
    fn parse(
        payload_type: PayloadType,
        next: PayloadType,
        critical: bool,
        body: &[u8],
    ) -> Result<Self, WireError> {
        let reader = Reader::new(payload_type, body);
        Ok(match payload_type {
            PayloadType::Sa => Self::Sa(SaPayload::parse(reader)?),
            PayloadType::Ke => Self::Ke(KePayload::parse(reader)?),
            PayloadType::IdI => Self::IdI(id::parse(reader)?),
            PayloadType::IdR => Self::IdR(id::parse(reader)?),
            PayloadType::Cert => Self::Cert(CertPayload::parse(reader)?),
            PayloadType::CertReq => Self::CertReq(CertReqPayload::parse(reader)?),
            PayloadType::Auth => Self::Auth(AuthPayload::parse(reader)?),
            PayloadType::Nonce => Self::Nonce(NoncePayload::parse(reader)?),
            PayloadType::Notify => Self::Notify(NotifyPayload::parse(reader)?),
            PayloadType::Delete => Self::Delete(DeletePayload::parse(reader)?),
            PayloadType::Vendor => Self::Vendor(VendorPayload::parse(reader)),
            PayloadType::TsI => Self::TsI(TsPayload::parse(reader)?),
            PayloadType::TsR => Self::TsR(TsPayload::parse(reader)?),
            PayloadType::Sk => Self::Sk(SkPayload::parse(next, reader)?),
            PayloadType::Skf => Self::Skf(SkfPayload::parse(next, reader)?),
            PayloadType::Cp => Self::Cp(CpPayload::parse(reader)?),
            PayloadType::Eap => Self::Eap(EapPayload::parse(reader)?),
            PayloadType::None | PayloadType::Unknown(_) => Self::Unknown(UnknownPayload {
                payload_type: payload_type.into(),
                critical,
                data: body.to_vec(),
            }),
        })
    }

    /// Appends the body.
    fn emit_body(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        match self {
            Self::Sa(sa) => sa.emit(out)?,
            Self::Ke(ke) => ke.emit(out),
            Self::IdI(identity) | Self::IdR(identity) => id::emit(identity, out),
            Self::Cert(cert) => cert.emit(out),
            Self::CertReq(certreq) => certreq.emit(out),
            Self::Auth(auth) => auth.emit(out),
            Self::Nonce(nonce) => nonce.emit(out),
            Self::Notify(notify) => notify.emit(out)?,
            Self::Delete(delete) => delete.emit(out)?,
            Self::Vendor(vendor) => vendor.emit(out),
            Self::TsI(ts) => ts.emit(PayloadType::TsI, out)?,
            Self::TsR(ts) => ts.emit(PayloadType::TsR, out)?,
            Self::Sk(sk) => sk.emit(out),
            Self::Skf(skf) => skf.emit(out),
            Self::Cp(cp) => cp.emit(out)?,
            Self::Eap(eap) => eap.emit(out)?,
            Self::Unknown(unknown) => out.extend_from_slice(&unknown.data),
        }
        Ok(())
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Notify(notify) => notify.fmt(f),
            Self::Cp(cp) => cp.fmt(f),
            Self::Eap(eap) => eap.fmt(f),
            Self::Skf(skf) => skf.fmt(f),
            other => other.payload_type().fmt(f),
        }
    }
}

/// Reads a chain of payloads whose first has type `first`: the contents of an opened SK payload,
/// without padding. An SK or SKF payload cannot be in there.
///
/// # Errors
/// Any of [`WireError`] but `MajorVersion`.
pub fn parse_payloads(first: PayloadType, data: &[u8]) -> Result<Vec<Payload>, WireError> {
    let payloads = parse_chain(first, data)?;
    if payloads
        .iter()
        .any(|payload| matches!(payload, Payload::Sk(_) | Payload::Skf(_)))
    {
        return Err(WireError::Malformed {
            payload: PayloadType::Sk,
            what: "encrypted payload inside an encrypted payload",
        });
    }
    Ok(payloads)
}

/// Reads a chain in which SK or SKF may come last.
pub(super) fn parse_chain(first: PayloadType, data: &[u8]) -> Result<Vec<Payload>, WireError> {
    let mut payloads = Vec::new();
    let mut current = first;
    let mut message = Reader::new(PayloadType::None, data);
    while current != PayloadType::None {
        if payloads.len() == MAX_PAYLOADS {
            return Err(message.too_many("payloads", MAX_PAYLOADS));
        }
        let [next, flags, l0, l1] = message.array::<GENERIC_LEN>("payload header is cut off")?;
        let next = PayloadType::from(next);
        let Some(body_len) = usize::from(u16::from_be_bytes([l0, l1])).checked_sub(GENERIC_LEN)
        else {
            return Err(WireError::Malformed {
                payload: current,
                what: "length is less than that of the payload header",
            });
        };
        let Ok(body) = message.take(body_len, "payload is cut off") else {
            return Err(WireError::Malformed {
                payload: current,
                what: "length is more than what is left",
            });
        };
        payloads.push(Payload::parse(current, next, flags & CRITICAL != 0, body)?);
        // The Next Payload field of these names what is inside of them; nothing follows
        // (RFC 7296 section 3.14).
        if matches!(current, PayloadType::Sk | PayloadType::Skf) {
            break;
        }
        current = next;
    }
    message.finish("octets after the last payload")?;
    Ok(payloads)
}

/// Writes a chain of payloads; returns the type of the first. The last one's Next Payload field
/// is `after`, unless it is SK or SKF.
///
/// # Errors
/// [`WireError::TooLong`].
pub fn emit_payloads(
    payloads: &[Payload],
    after: PayloadType,
    out: &mut Vec<u8>,
) -> Result<PayloadType, WireError> {
    for (index, payload) in payloads.iter().enumerate() {
        let next = match payload {
            Payload::Sk(sk) => sk.first,
            Payload::Skf(skf) => skf.first,
            _ => payloads.get(index + 1).map_or(after, Payload::payload_type),
        };
        let critical = match payload {
            Payload::Unknown(unknown) if unknown.critical => CRITICAL,
            _ => 0,
        };
        let start = out.len();
        out.extend_from_slice(&[next.into(), critical, 0, 0]);
        payload.emit_body(out)?;
        let Ok(length) = u16::try_from(out.len() - start) else {
            return Err(WireError::TooLong {
                payload: payload.payload_type(),
                what: "payload",
            });
        };
        if let Some(field) = out.get_mut(start + 2..start + GENERIC_LEN) {
            field.copy_from_slice(&length.to_be_bytes());
        }
    }
    Ok(payloads.first().map_or(after, Payload::payload_type))
}

/// The type of the first payload that is marked critical and not known: the message must be
/// refused with UNSUPPORTED_CRITICAL_PAYLOAD and this as its data (RFC 7296 section 2.5).
pub fn unsupported_critical(payloads: &[Payload]) -> Option<u8> {
    payloads.iter().find_map(|payload| match payload {
        Payload::Unknown(unknown) if unknown.critical => Some(unknown.payload_type),
        _ => None,
    })
}
