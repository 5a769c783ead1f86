// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Proposals (RFC 7296 section 3.3): sets of transforms on offer, and what was chosen.

use serde::{Deserialize, Serialize};

use crate::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

crate::open_registry! {
    /// Security protocol identifiers (RFC 7296 section 3.3.1).
    pub enum ProtocolId: u8 {
        Ike = 1, "IKE";
        Ah = 2, "AH";
        Esp = 3, "ESP";
    }
}

/// One transform of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Transform {
    /// Type 1. `key_bits` is the Key Length attribute; `None` for ciphers of one size.
    Encryption {
        /// The cipher.
        id: EncryptionId,
        /// Key length in bits, without the salt of an AEAD.
        key_bits: Option<u16>,
    },
    /// Type 2.
    Prf(PrfId),
    /// Type 3.
    Integrity(IntegrityId),
    /// Type 4. [`KeyExchangeId::None`] in an ESP proposal makes the key exchange optional.
    KeyExchange(KeyExchangeId),
    /// Type 5: `true` is extended sequence numbers, `false` is none.
    Esn(bool),
    /// Types 6 to 12 (RFC 9370): additional key exchange 1 to 7.
    AdditionalKeyExchange {
        /// 1 to 7.
        index: u8,
        /// The method.
        id: KeyExchangeId,
    },
    /// A transform type or attribute that is not understood; it can never be chosen.
    Unknown {
        /// Transform Type.
        transform_type: u8,
        /// Transform ID.
        id: u16,
    },
}

/// A set of transforms on offer for one protocol. Within one type, any of the listed transforms
/// may be chosen, the first being preferred.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Proposal {
    /// What it protects.
    pub protocol: ProtocolId,
    /// In order of preference within each type.
    pub transforms: Vec<Transform>,
}

/// The algorithms agreed for an IKE SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IkeSuite {
    /// Cipher of the SK payload.
    pub encryption: EncryptionId,
    /// Key length in bits, if the cipher has several.
    pub key_bits: Option<u16>,
    /// `None` with an AEAD cipher.
    pub integrity: Option<IntegrityId>,
    /// PRF of the key derivation and AUTH.
    pub prf: PrfId,
    /// Key exchange method.
    pub key_exchange: KeyExchangeId,
}

/// The algorithms agreed for a CHILD SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildSuite {
    /// ESP cipher.
    pub encryption: EncryptionId,
    /// Key length in bits, if the cipher has several.
    pub key_bits: Option<u16>,
    /// `None` with an AEAD cipher.
    pub integrity: Option<IntegrityId>,
    /// `None` where the CHILD SA has no key exchange of its own (always in IKE_AUTH).
    pub key_exchange: Option<KeyExchangeId>,
    /// Extended sequence numbers (RFC 4303 section 2.2.1).
    pub esn: bool,
}
