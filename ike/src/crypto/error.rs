// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Why a cryptographic operation failed. No variant carries key material.

use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

/// Why a cryptographic operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum CryptoError {
    /// This build has no such cipher or key length.
    #[error("encryption algorithm {0} with key length {1:?} is not supported")]
    UnsupportedEncryption(EncryptionId, Option<u16>),
    /// This build has no such MAC, or the cipher needs one and has none, or has one too many.
    #[error("integrity algorithm {0:?} is not usable with this cipher")]
    UnsupportedIntegrity(Option<IntegrityId>),
    /// This build has no such PRF.
    #[error("pseudorandom function {0} is not supported")]
    UnsupportedPrf(PrfId),
    /// This build has no such key exchange method.
    #[error("key exchange method {0} is not supported")]
    UnsupportedKeyExchange(KeyExchangeId),
    /// A key has the wrong length for its algorithm.
    #[error("a key has the wrong length for its algorithm")]
    KeyLength,
    /// The peer's key exchange value is malformed, or one of those that leak the private value.
    #[error("the peer's public value for {0} is not acceptable")]
    BadPublicValue(KeyExchangeId),
    /// A protected payload is too short, not a multiple of the block size, or its padding lies.
    #[error("the protected payload is malformed")]
    MalformedPayload,
    /// The integrity check value is wrong.
    #[error("integrity check failed")]
    Integrity,
    /// A key has protected as many messages as it may.
    #[error("the key is used up")]
    Exhausted,
    /// More key material was asked for than the PRF yields (255 blocks).
    #[error("too much key material was asked for")]
    KeyMaterialLength,
    /// The library failed without a reason, or had no randomness.
    #[error("the cryptographic library failed")]
    Library,
}
