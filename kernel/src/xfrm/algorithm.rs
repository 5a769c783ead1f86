// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE's algorithm numbers as the kernel's crypto names.

use netlink_packet_xfrm::{Alg, AlgAead, AlgAuth, XfrmAttrs};
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::SaKeys;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

/// Why keys cannot be handed to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AlgorithmError {
    /// The kernel has no such cipher for ESP.
    #[error("the kernel has no ESP cipher {0}")]
    Cipher(EncryptionId),
    /// The kernel has no such MAC for ESP.
    #[error("the kernel has no ESP integrity algorithm {0}")]
    Integrity(IntegrityId),
    /// A cipher without authentication and no MAC beside it.
    #[error("{0} needs an integrity algorithm")]
    Unauthenticated(EncryptionId),
}

/// The attributes that give the kernel algorithms and keys. They hold copies of the keys: erase
/// them with [`erase_keys`] after use.
pub(super) fn attributes(keys: &SaKeys) -> Result<Vec<XfrmAttrs>, AlgorithmError> {
    if let Some((name, icv_bits)) = aead(keys.encryption) {
        return Ok(vec![XfrmAttrs::EncryptionAlgAead(AlgAead {
            alg_name: padded(name),
            alg_key_len: bits(&keys.encryption_key),
            alg_icv_len: icv_bits,
            alg_key: keys.encryption_key.expose().to_vec(),
        })]);
    }
    let cipher = cipher(keys.encryption).ok_or(AlgorithmError::Cipher(keys.encryption))?;
    let (integrity, key) = keys
        .integrity
        .as_ref()
        .ok_or(AlgorithmError::Unauthenticated(keys.encryption))?;
    let (mac, icv_bits) = mac(*integrity).ok_or(AlgorithmError::Integrity(*integrity))?;
    Ok(vec![
        XfrmAttrs::EncryptionAlg(Alg {
            alg_name: padded(cipher),
            alg_key_len: bits(&keys.encryption_key),
            alg_key: keys.encryption_key.expose().to_vec(),
        }),
        XfrmAttrs::AuthenticationAlgTrunc(AlgAuth {
            alg_name: padded(mac),
            alg_key_len: bits(key),
            alg_trunc_len: icv_bits,
            alg_key: key.expose().to_vec(),
        }),
    ])
}

/// Overwrites every key in `attributes`.
pub(super) fn erase_keys(attributes: &mut [XfrmAttrs]) {
    use zeroize::Zeroize as _;
    for attribute in attributes {
        match attribute {
            XfrmAttrs::EncryptionAlgAead(alg) => alg.alg_key.zeroize(),
            XfrmAttrs::EncryptionAlg(alg) | XfrmAttrs::AuthenticationAlg(alg) => {
                alg.alg_key.zeroize();
            }
            XfrmAttrs::AuthenticationAlgTrunc(alg) => alg.alg_key.zeroize(),
            _ => {}
        }
    }
}

/// Kernel name and ICV length in bits.
fn aead(cipher: EncryptionId) -> Option<(&'static str, u32)> {
    Some(match cipher {
        EncryptionId::AesCcm8 => ("rfc4309(ccm(aes))", 64),
        EncryptionId::AesCcm12 => ("rfc4309(ccm(aes))", 96),
        EncryptionId::AesCcm16 => ("rfc4309(ccm(aes))", 128),
        EncryptionId::AesGcm8 => ("rfc4106(gcm(aes))", 64),
        EncryptionId::AesGcm12 => ("rfc4106(gcm(aes))", 96),
        EncryptionId::AesGcm16 => ("rfc4106(gcm(aes))", 128),
        EncryptionId::NullAesGmac => ("rfc4543(gcm(aes))", 128),
        EncryptionId::ChaCha20Poly1305 => ("rfc7539esp(chacha20,poly1305)", 128),
        _ => return None,
    })
}

fn cipher(cipher: EncryptionId) -> Option<&'static str> {
    Some(match cipher {
        EncryptionId::TripleDes => "cbc(des3_ede)",
        EncryptionId::Blowfish => "cbc(blowfish)",
        EncryptionId::Null => "ecb(cipher_null)",
        EncryptionId::AesCbc => "cbc(aes)",
        EncryptionId::AesCtr => "rfc3686(ctr(aes))",
        EncryptionId::CamelliaCbc => "cbc(camellia)",
        _ => return None,
    })
}

/// Kernel name and length in bits to which the MAC is cut.
fn mac(integrity: IntegrityId) -> Option<(&'static str, u32)> {
    Some(match integrity {
        IntegrityId::HmacMd5_96 => ("hmac(md5)", 96),
        IntegrityId::HmacMd5_128 => ("hmac(md5)", 128),
        IntegrityId::HmacSha1_96 => ("hmac(sha1)", 96),
        IntegrityId::HmacSha1_160 => ("hmac(sha1)", 160),
        IntegrityId::AesXcbc96 => ("xcbc(aes)", 96),
        IntegrityId::AesCmac96 => ("cmac(aes)", 96),
        IntegrityId::HmacSha2_256_96 => ("hmac(sha256)", 96),
        IntegrityId::HmacSha2_256_128 => ("hmac(sha256)", 128),
        IntegrityId::HmacSha2_384_192 => ("hmac(sha384)", 192),
        IntegrityId::HmacSha2_512_256 => ("hmac(sha512)", 256),
        IntegrityId::Unknown(_) => return None,
    })
}

fn bits(key: &Secret) -> u32 {
    u32::try_from(key.len() * 8).unwrap_or(u32::MAX)
}

fn padded(name: &str) -> [u8; 64] {
    let mut field = [0; 64];
    field[..name.len()].copy_from_slice(name.as_bytes());
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(encryption: EncryptionId, integrity: Option<IntegrityId>) -> SaKeys {
        SaKeys {
            encryption,
            encryption_key: Secret::new(vec![7; 20]),
            integrity: integrity.map(|id| (id, Secret::new(vec![9; 32]))),
        }
    }

    #[test]
    fn gcm_takes_key_and_salt_in_one_attribute() {
        let attributes = attributes(&keys(EncryptionId::AesGcm16, None)).unwrap();

        let [XfrmAttrs::EncryptionAlgAead(alg)] = attributes.as_slice() else {
            panic!("one AEAD attribute");
        };
        assert!(alg.alg_name.starts_with(b"rfc4106(gcm(aes))\0"));
        assert_eq!((alg.alg_key_len, alg.alg_icv_len), (160, 128));
    }

    #[test]
    fn a_mac_is_cut_to_the_negotiated_length() {
        let attributes = attributes(&keys(
            EncryptionId::AesCbc,
            Some(IntegrityId::HmacSha2_256_128),
        ))
        .unwrap();

        let [_, XfrmAttrs::AuthenticationAlgTrunc(alg)] = attributes.as_slice() else {
            panic!("cipher and MAC");
        };
        assert_eq!((alg.alg_key_len, alg.alg_trunc_len), (256, 128));
    }

    #[test]
    fn a_cipher_without_mac_is_refused() {
        assert_eq!(
            attributes(&keys(EncryptionId::AesCbc, None)),
            Err(AlgorithmError::Unauthenticated(EncryptionId::AesCbc))
        );
    }

    #[test]
    fn erasing_leaves_no_key() {
        let mut attributes =
            attributes(&keys(EncryptionId::AesCbc, Some(IntegrityId::HmacSha1_96))).unwrap();

        erase_keys(&mut attributes);

        for attribute in &attributes {
            match attribute {
                XfrmAttrs::EncryptionAlg(alg) => assert!(alg.alg_key.is_empty()),
                XfrmAttrs::AuthenticationAlgTrunc(alg) => assert!(alg.alg_key.is_empty()),
                other => panic!(
                    "unexpected attribute of kind {:?}",
                    std::mem::discriminant(other)
                ),
            }
        }
    }
}
