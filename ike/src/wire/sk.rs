// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Encrypted and Authenticated payload (RFC 7296 section 3.14, RFC 5282) and the layout of
//! messages that end in one.
//!
//! Sealing: [`SkLayout::lay_out`] writes the whole message with room for the IV and the ICV; the
//! cryptographic layer then fills the IV in, encrypts the plaintext in place and writes the ICV,
//! through [`SkDraft::parts`]. An AEAD authenticates `aad` and the ciphertext; a MAC authenticates
//! everything before the ICV, [`SkDraft::authenticated`].
//!
//! Opening: [`SkPayload::aad`] and [`SkLayout::split`] give the parts of a received message, and
//! [`strip_padding`] what was inside.

use std::ops::Range;

use super::error::WireError;
use super::header::{HEADER_LEN, Header};
use super::message::write_length;
use super::payload::{GENERIC_LEN, Payload, PayloadType, emit_payloads};
use super::reader::Reader;
use super::skf;

/// An Encrypted payload that is still closed. It is always the last of its message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkPayload {
    /// Type of the first payload inside; for [`super::parse_payloads`].
    pub first: PayloadType,
    /// IV, ciphertext and ICV.
    pub body: Vec<u8>,
}

impl SkPayload {
    /// The associated data: everything from the IKE header to the generic header of this payload,
    /// both included (RFC 5282 section 5.1). `message` is the one that this payload was read from.
    pub fn aad<'a>(&self, message: &'a [u8]) -> &'a [u8] {
        before_body(message, &self.body)
    }

    pub(super) fn parse(first: PayloadType, mut reader: Reader<'_>) -> Result<Self, WireError> {
        if reader.is_empty() {
            return Err(reader.malformed("encrypted payload is empty"));
        }
        Ok(Self {
            first,
            body: reader.rest().to_vec(),
        })
    }

    pub(super) fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.body);
    }
}

/// What comes before `body`, which is the end of `message`.
pub(super) fn before_body<'a>(message: &'a [u8], body: &[u8]) -> &'a [u8] {
    let end = message.len().saturating_sub(body.len());
    message.get(..end).unwrap_or_default()
}

/// Sizes, in octets, that a cipher suite imposes on the Encrypted payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkLayout {
    /// Initialization vector: 16 for CBC, 8 for AES-GCM and ChaCha20-Poly1305.
    pub iv: usize,
    /// Plaintext, padding and pad length together are a multiple of this: 16 for CBC, 1 or 4 for
    /// AEADs.
    pub block: usize,
    /// Integrity checksum.
    pub icv: usize,
}

impl SkLayout {
    /// Lays out a message: `outside` in clear, then an SK payload with `inside`.
    ///
    /// # Errors
    /// [`WireError::TooLong`].
    pub fn lay_out(
        &self,
        header: &Header,
        outside: &[Payload],
        inside: &[Payload],
    ) -> Result<SkDraft, WireError> {
        let mut plaintext = Vec::with_capacity(256);
        let first_inside = emit_payloads(inside, PayloadType::None, &mut plaintext)?;
        let mut message = Vec::with_capacity(HEADER_LEN + 64 + plaintext.len());
        header.emit(PayloadType::None, 0, &mut message);
        let first = emit_payloads(outside, PayloadType::Sk, &mut message)?;
        set_first(&mut message, first);
        self.seal_room(message, first_inside, &[], &plaintext)
    }

    /// Lays out a message as fragments (RFC 7383) of at most `max_len` octets each, IKE header
    /// included. If one fragment is enough, a plain SK payload is laid out instead.
    ///
    /// # Errors
    /// [`WireError::TooLong`], also when `max_len` leaves no room for content.
    pub fn lay_out_fragments(
        &self,
        header: &Header,
        inside: &[Payload],
        max_len: usize,
    ) -> Result<Vec<SkDraft>, WireError> {
        let mut plaintext = Vec::with_capacity(256);
        let first_inside = emit_payloads(inside, PayloadType::None, &mut plaintext)?;
        let mut prefix = Vec::with_capacity(HEADER_LEN);

        let fixed = HEADER_LEN + GENERIC_LEN + self.iv + self.icv;
        if fixed + plaintext.len() + self.trailer(plaintext.len()) <= max_len {
            header.emit(PayloadType::Sk, 0, &mut prefix);
            return Ok(vec![self.seal_room(prefix, first_inside, &[], &plaintext)?]);
        }

        let too_long = WireError::TooLong {
            payload: PayloadType::Skf,
            what: "message",
        };
        // The pad length octet always takes one; padding fills up to a block.
        let room = max_len.saturating_sub(fixed + skf::FIELDS_LEN);
        let room = (room - room % self.block.max(1)).saturating_sub(1);
        if room == 0 {
            return Err(too_long);
        }
        let chunks = plaintext.chunks(room);
        let Ok(total) = u16::try_from(chunks.len()) else {
            return Err(too_long);
        };
        header.emit(PayloadType::Skf, 0, &mut prefix);
        (1..=total)
            .zip(chunks)
            .map(|(number, chunk)| {
                // Only the first fragment names the first payload inside (RFC 7383 section 2.5).
                let first = if number == 1 {
                    first_inside
                } else {
                    PayloadType::None
                };
                let fields = skf::fields(number, total);
                self.seal_room(prefix.clone(), first, &fields, chunk)
            })
            .collect()
    }

    /// Splits the body of a received SK or SKF payload.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if it is too short or not a whole number of blocks.
    pub fn split<'a>(&self, body: &'a mut [u8]) -> Result<SkParts<'a>, WireError> {
        let malformed = |what| WireError::Malformed {
            payload: PayloadType::Sk,
            what,
        };
        let Some((iv, rest)) = body.split_at_mut_checked(self.iv) else {
            return Err(malformed("no room for the IV"));
        };
        let Some((ciphertext, icv)) = rest
            .len()
            .checked_sub(self.icv)
            .and_then(|len| rest.split_at_mut_checked(len))
        else {
            return Err(malformed("no room for the ICV"));
        };
        if ciphertext.is_empty() || ciphertext.len() % self.block.max(1) != 0 {
            return Err(malformed("ciphertext is not a whole number of blocks"));
        }
        Ok(SkParts {
            iv,
            ciphertext,
            icv,
        })
    }

    /// Octets of padding and pad length after `len` octets of plaintext.
    fn trailer(&self, len: usize) -> usize {
        let block = self.block.max(1);
        (len + 1).next_multiple_of(block) - len
    }

    /// Appends an SK or SKF payload with room for IV and ICV to `message`.
    fn seal_room(
        &self,
        mut message: Vec<u8>,
        first: PayloadType,
        fields: &[u8],
        plaintext: &[u8],
    ) -> Result<SkDraft, WireError> {
        let trailer = self.trailer(plaintext.len());
        let too_long = |what| WireError::TooLong {
            payload: PayloadType::Sk,
            what,
        };
        let padding = u8::try_from(trailer - 1).map_err(|_| too_long("padding"))?;
        let length =
            GENERIC_LEN + fields.len() + self.iv + plaintext.len() + trailer + self.icv;
        let length = u16::try_from(length).map_err(|_| too_long("payload"))?;

        message.extend_from_slice(&[first.into(), 0]);
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(fields);
        let iv = message.len()..message.len() + self.iv;
        message.resize(iv.end, 0);
        message.extend_from_slice(plaintext);
        message.resize(message.len() + usize::from(padding), 0);
        message.push(padding);
        let plaintext = iv.end..message.len();
        message.resize(plaintext.end + self.icv, 0);
        write_length(&mut message)?;
        Ok(SkDraft {
            message,
            iv,
            plaintext,
        })
    }
}

fn set_first(message: &mut [u8], first: PayloadType) {
    const NEXT_PAYLOAD: usize = 16;
    if let Some(field) = message.get_mut(NEXT_PAYLOAD) {
        *field = first.into();
    }
}

/// The parts of a received SK or SKF body.
#[derive(Debug, PartialEq, Eq)]
pub struct SkParts<'a> {
    /// Initialization vector.
    pub iv: &'a [u8],
    /// To be decrypted in place.
    pub ciphertext: &'a mut [u8],
    /// To be compared in constant time.
    pub icv: &'a [u8],
}

/// A complete message that is yet to be encrypted and authenticated in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkDraft {
    message: Vec<u8>,
    iv: Range<usize>,
    plaintext: Range<usize>,
}

/// The parts of a [`SkDraft`], in the order in which they stand in the message without gaps.
#[derive(Debug, PartialEq, Eq)]
pub struct SkDraftParts<'a> {
    /// Associated data of an AEAD.
    pub aad: &'a [u8],
    /// To be filled in; all zero so far.
    pub iv: &'a mut [u8],
    /// Payloads, padding and pad length; to be encrypted in place.
    pub plaintext: &'a mut [u8],
    /// To be filled in; all zero so far.
    pub icv: &'a mut [u8],
}

impl SkDraft {
    /// The parts to work on.
    pub fn parts(&mut self) -> SkDraftParts<'_> {
        let (rest, icv) = self.message.split_at_mut(self.plaintext.end);
        let (rest, plaintext) = rest.split_at_mut(self.plaintext.start);
        let (aad, iv) = rest.split_at_mut(self.iv.start);
        SkDraftParts {
            aad,
            iv,
            plaintext,
            icv,
        }
    }

    /// For an integrity algorithm apart from the cipher: what it covers (everything before the
    /// ICV, RFC 7296 section 3.14), and where its result goes. To be used after encryption.
    pub fn authenticated(&mut self) -> (&[u8], &mut [u8]) {
        let (covered, icv) = self.message.split_at_mut(self.plaintext.end);
        (covered, icv)
    }

    /// The message; to be called when it is sealed.
    pub fn into_message(self) -> Vec<u8> {
        self.message
    }
}

/// What is left of a decrypted body when padding and pad length are taken off. The contents of
/// the padding may be anything (RFC 7296 section 3.14).
///
/// # Errors
/// [`WireError::Malformed`] if the pad length is more than there is.
pub fn strip_padding(plaintext: &[u8]) -> Result<&[u8], WireError> {
    let stripped = plaintext.split_last().and_then(|(padding, rest)| {
        let len = rest.len().checked_sub(usize::from(*padding))?;
        rest.get(..len)
    });
    stripped.ok_or(WireError::Malformed {
        payload: PayloadType::Sk,
        what: "pad length is more than there is",
    })
}
