// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long keys, salts, vectors and check values are. Shared by IKE and the data planes.

use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

use super::CryptoError;

/// Length of the key without salt in octets, or `None` if the cipher is unknown or has no key of
/// that length. `bits` is the Key Length attribute.
pub fn key_len(id: EncryptionId, bits: Option<u16>) -> Option<usize> {
    use EncryptionId as E;
    match (id, bits) {
        (
            E::AesCbc
            | E::AesCtr
            | E::AesCcm8
            | E::AesCcm12
            | E::AesCcm16
            | E::AesGcm8
            | E::AesGcm12
            | E::AesGcm16
            | E::NullAesGmac
            | E::CamelliaCbc
            | E::CamelliaCtr
            | E::CamelliaCcm8
            | E::CamelliaCcm12
            | E::CamelliaCcm16,
            Some(bits @ (128 | 192 | 256)),
        ) => Some(usize::from(bits / 8)),
        (E::ChaCha20Poly1305, None | Some(256)) => Some(32),
        (E::TripleDes, None | Some(192)) => Some(24),
        (E::Null, None | Some(0)) => Some(0),
        _ => None,
    }
}

/// Length of the salt that follows the key in KEYMAT, in octets.
pub fn salt_len(id: EncryptionId) -> usize {
    use EncryptionId as E;
    match id {
        E::AesCcm8
        | E::AesCcm12
        | E::AesCcm16
        | E::CamelliaCcm8
        | E::CamelliaCcm12
        | E::CamelliaCcm16 => 3,
        E::AesCtr
        | E::CamelliaCtr
        | E::AesGcm8
        | E::AesGcm12
        | E::AesGcm16
        | E::NullAesGmac
        | E::ChaCha20Poly1305 => 4,
        _ => 0,
    }
}

/// Length of key and salt together, in octets.
pub fn encryption_keymat_len(id: EncryptionId, bits: Option<u16>) -> Option<usize> {
    Some(key_len(id, bits)? + salt_len(id))
}

/// Length of the explicit initialization vector in a packet, in octets; `None` if unknown.
pub fn iv_len(id: EncryptionId) -> Option<usize> {
    use EncryptionId as E;
    match id {
        E::AesCbc | E::CamelliaCbc => Some(16),
        E::TripleDes => Some(8),
        E::Null => Some(0),
        _ if salt_len(id) > 0 => Some(8),
        _ => None,
    }
}

/// Length of the key of an integrity algorithm in octets; `None` if unknown.
pub fn integrity_key_len(id: IntegrityId) -> Option<usize> {
    use IntegrityId as I;
    Some(match id {
        I::HmacMd5_96 | I::HmacMd5_128 | I::AesXcbc96 | I::AesCmac96 => 16,
        I::HmacSha1_96 | I::HmacSha1_160 => 20,
        I::HmacSha2_256_128 | I::HmacSha2_256_96 => 32,
        I::HmacSha2_384_192 => 48,
        I::HmacSha2_512_256 => 64,
        I::Unknown(_) => return None,
    })
}

/// Length of the check value in octets: of the AEAD, or else of the integrity algorithm.
pub fn icv_len(encryption: EncryptionId, integrity: Option<IntegrityId>) -> Option<usize> {
    use EncryptionId as E;
    use IntegrityId as I;
    match encryption {
        E::AesGcm8 | E::AesCcm8 | E::CamelliaCcm8 => return Some(8),
        E::AesGcm12 | E::AesCcm12 | E::CamelliaCcm12 => return Some(12),
        _ if encryption.is_aead() => return Some(16),
        _ => {}
    }
    match integrity? {
        I::HmacMd5_96 | I::HmacSha1_96 | I::AesXcbc96 | I::AesCmac96 | I::HmacSha2_256_96 => {
            Some(12)
        }
        I::HmacMd5_128 | I::HmacSha2_256_128 => Some(16),
        I::HmacSha1_160 => Some(20),
        I::HmacSha2_384_192 => Some(24),
        I::HmacSha2_512_256 => Some(32),
        I::Unknown(_) => None,
    }
}

/// Length of the integrity key that goes with a cipher: none with an AEAD, one otherwise.
pub(crate) fn suite_integrity_len(
    encryption: EncryptionId,
    integrity: Option<IntegrityId>,
) -> Result<usize, CryptoError> {
    match integrity {
        None if encryption.is_aead() => Ok(0),
        Some(id) if !encryption.is_aead() => {
            integrity_key_len(id).ok_or(CryptoError::UnsupportedIntegrity(integrity))
        }
        _ => Err(CryptoError::UnsupportedIntegrity(integrity)),
    }
}
