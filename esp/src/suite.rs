// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cipher suites: AEAD from ring, AES-CBC from RustCrypto, HMAC from ring.

use aes::cipher::{
    BlockCipherEncrypt as _, BlockModeDecrypt as _, BlockModeEncrypt as _, InnerIvInit as _,
    KeyInit,
};
use aes::{Aes128Dec, Aes128Enc, Aes192Dec, Aes192Enc, Aes256Dec, Aes256Enc, Block};
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hmac;
use swanherd_ipsec::plane::SaKeys;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

/// SPI and sequence number.
pub(crate) const ESP_HEADER: usize = 8;

/// Octets of salt at the end of an AEAD key (RFC 4106 section 8.1, RFC 7634 section 2).
const SALT_LEN: usize = 4;

/// A combination of algorithms or a key length that this crate cannot do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "ESP suite {encryption} with a key of {key_len} octets and integrity {integrity} is not supported"
)]
pub struct UnsupportedSuite {
    /// The cipher asked for.
    pub encryption: EncryptionId,
    /// Octets of its key, a salt included.
    pub key_len: usize,
    /// The integrity algorithm asked for, or `none`.
    pub integrity: String,
}

/// Whether SAs can have this cipher, with keys of `key_bits` (without the salt of an AEAD; `None`
/// for ciphers of one size).
pub fn supports_cipher(id: EncryptionId, key_bits: Option<u16>) -> bool {
    matches!(
        (id, key_bits),
        (EncryptionId::AesGcm16, Some(128 | 256))
            | (EncryptionId::ChaCha20Poly1305, None | Some(256))
            | (EncryptionId::AesCbc, Some(128 | 192 | 256))
            | (EncryptionId::Null, None)
    )
}

/// Whether SAs can have this integrity algorithm.
pub fn supports_integrity(id: IntegrityId) -> bool {
    mac_of(id).is_some()
}

/// The algorithm, octets of its key, and octets of the integrity check value.
fn mac_of(id: IntegrityId) -> Option<(hmac::Algorithm, usize, usize)> {
    Some(match id {
        IntegrityId::HmacSha1_96 => (hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, 20, 12),
        IntegrityId::HmacSha2_256_96 => (hmac::HMAC_SHA256, 32, 12),
        IntegrityId::HmacSha2_256_128 => (hmac::HMAC_SHA256, 32, 16),
        IntegrityId::HmacSha2_384_192 => (hmac::HMAC_SHA384, 48, 24),
        IntegrityId::HmacSha2_512_256 => (hmac::HMAC_SHA512, 64, 32),
        _ => return None,
    })
}

/// Sizes that follow from the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Explicit initialisation vector.
    pub(crate) iv: usize,
    /// Payload, padding and trailer fill a multiple of this.
    pub(crate) align: usize,
    /// Integrity check value.
    pub(crate) icv: usize,
}

/// Keyed algorithms of one SA.
pub(crate) enum Suite {
    Aead {
        key: Box<LessSafeKey>,
        salt: [u8; SALT_LEN],
    },
    Mac {
        cipher: Cipher,
        key: Box<hmac::Key>,
        icv: usize,
    },
}

pub(crate) enum Cipher {
    Null,
    Aes128(Box<(Aes128Enc, Aes128Dec)>),
    Aes192(Box<(Aes192Enc, Aes192Dec)>),
    Aes256(Box<(Aes256Enc, Aes256Dec)>),
}

/// The packet failed authentication.
pub(crate) struct Forged;

impl Suite {
    pub(crate) fn new(keys: &SaKeys) -> Result<Self, UnsupportedSuite> {
        let key = keys.encryption_key.expose();
        let unsupported = || UnsupportedSuite {
            encryption: keys.encryption,
            key_len: key.len(),
            integrity: keys
                .integrity
                .as_ref()
                .map_or_else(|| "none".to_owned(), |(id, _)| id.to_string()),
        };
        match &keys.integrity {
            None => Self::aead(keys.encryption, key),
            Some((id, mac_key)) => Self::mac(keys.encryption, key, *id, mac_key.expose()),
        }
        .ok_or_else(unsupported)
    }

    fn aead(id: EncryptionId, key: &[u8]) -> Option<Self> {
        let (key, salt) = key.split_last_chunk::<SALT_LEN>()?;
        let algorithm = match (id, key.len()) {
            (EncryptionId::AesGcm16, 16) => &aead::AES_128_GCM,
            (EncryptionId::AesGcm16, 32) => &aead::AES_256_GCM,
            (EncryptionId::ChaCha20Poly1305, 32) => &aead::CHACHA20_POLY1305,
            _ => return None,
        };
        let key = UnboundKey::new(algorithm, key).ok()?;
        Some(Self::Aead {
            key: Box::new(LessSafeKey::new(key)),
            salt: *salt,
        })
    }

    fn mac(
        encryption: EncryptionId,
        key: &[u8],
        integrity: IntegrityId,
        mac_key: &[u8],
    ) -> Option<Self> {
        let cipher = match (encryption, key.len()) {
            (EncryptionId::Null, 0) => Cipher::Null,
            (EncryptionId::AesCbc, 16) => Cipher::Aes128(pair(key)?),
            (EncryptionId::AesCbc, 24) => Cipher::Aes192(pair(key)?),
            (EncryptionId::AesCbc, 32) => Cipher::Aes256(pair(key)?),
            _ => return None,
        };
        let (algorithm, key_len, icv) = mac_of(integrity)?;
        (mac_key.len() == key_len).then(|| Self::Mac {
            cipher,
            key: Box::new(hmac::Key::new(algorithm, mac_key)),
            icv,
        })
    }

    pub(crate) fn geometry(&self) -> Geometry {
        match self {
            Self::Aead { .. } => Geometry {
                iv: 8,
                align: 4,
                icv: aead::MAX_TAG_LEN,
            },
            Self::Mac {
                cipher: Cipher::Null,
                icv,
                ..
            } => Geometry {
                iv: 0,
                align: 4,
                icv: *icv,
            },
            Self::Mac { icv, .. } => Geometry {
                iv: 16,
                align: 16,
                icv: *icv,
            },
        }
    }

    /// Encrypts and authenticates `packet` in place. SPI and low sequence number are written; the
    /// body sits between IV and ICV, of which both are filled in here. `iv_key` makes the
    /// unpredictable IVs that CBC needs (RFC 3602 section 3).
    ///
    /// `esn` says whether the high half of `seq` is authenticated.
    pub(crate) fn seal(&self, packet: &mut [u8], seq: u64, esn: bool, iv_key: &IvKey) {
        let geometry = self.geometry();
        let body_end = packet.len() - geometry.icv;
        let (body, icv) = packet.split_at_mut(body_end);
        match self {
            Self::Aead { key, salt } => {
                let (aad, aad_len) = additional_data(body, seq, esn);
                // The sequence number never repeats under one key, so neither does this IV.
                let iv = seq.to_be_bytes();
                body[ESP_HEADER..ESP_HEADER + 8].copy_from_slice(&iv);
                let tag = key
                    .seal_in_place_separate_tag(
                        nonce(salt, iv),
                        Aad::from(&aad[..aad_len]),
                        &mut body[ESP_HEADER + 8..],
                    )
                    .expect("an IP packet is shorter than the limits of these ciphers");
                icv.copy_from_slice(tag.as_ref());
            }
            Self::Mac { cipher, key, .. } => {
                if geometry.iv > 0 {
                    let iv = iv_key.iv(seq);
                    body[ESP_HEADER..ESP_HEADER + 16].copy_from_slice(&iv);
                    cipher.encrypt(&iv, &mut body[ESP_HEADER + 16..]);
                }
                let tag = authenticate(key, body, seq, esn);
                icv.copy_from_slice(&tag.as_ref()[..icv.len()]);
            }
        }
    }

    /// Verifies `packet` and decrypts its body in place. The caller has checked that IV, ICV and a
    /// body of whole blocks fit.
    pub(crate) fn open(&self, packet: &mut [u8], seq: u64, esn: bool) -> Result<(), Forged> {
        let geometry = self.geometry();
        let body_end = packet.len() - geometry.icv;
        let (body, icv) = packet.split_at_mut(body_end);
        match self {
            Self::Aead { key, salt } => {
                let (aad, aad_len) = additional_data(body, seq, esn);
                let (head, text) = body.split_at_mut(ESP_HEADER + 8);
                let iv = head.last_chunk::<8>().copied().ok_or(Forged)?;
                let tag = aead::Tag::try_from(&*icv).map_err(|_| Forged)?;
                key.open_in_place_separate_tag(
                    nonce(salt, iv),
                    Aad::from(&aad[..aad_len]),
                    tag,
                    text,
                    0..,
                )
                .map_err(|_| Forged)?;
            }
            Self::Mac { cipher, key, .. } => {
                let tag = authenticate(key, body, seq, esn);
                let equal = subtle::ConstantTimeEq::ct_eq(&tag.as_ref()[..icv.len()], &*icv);
                if !bool::from(equal) {
                    return Err(Forged);
                }
                let (head, text) = body.split_at_mut(ESP_HEADER + geometry.iv);
                if let Some(iv) = head[ESP_HEADER..].first_chunk::<16>() {
                    cipher.decrypt(iv, text);
                }
            }
        }
        Ok(())
    }
}

impl Cipher {
    fn encrypt(&self, iv: &[u8; 16], text: &mut [u8]) {
        let (blocks, _) = Block::slice_as_chunks_mut(text);
        let iv = &(*iv).into();
        match self {
            Self::Null => {}
            Self::Aes128(keys) => {
                cbc::Encryptor::inner_iv_init(&keys.0, iv).encrypt_blocks(blocks);
            }
            Self::Aes192(keys) => {
                cbc::Encryptor::inner_iv_init(&keys.0, iv).encrypt_blocks(blocks);
            }
            Self::Aes256(keys) => {
                cbc::Encryptor::inner_iv_init(&keys.0, iv).encrypt_blocks(blocks);
            }
        }
    }

    fn decrypt(&self, iv: &[u8; 16], text: &mut [u8]) {
        let (blocks, _) = Block::slice_as_chunks_mut(text);
        let iv = &(*iv).into();
        match self {
            Self::Null => {}
            Self::Aes128(keys) => {
                cbc::Decryptor::inner_iv_init(&keys.1, iv).decrypt_blocks(blocks);
            }
            Self::Aes192(keys) => {
                cbc::Decryptor::inner_iv_init(&keys.1, iv).decrypt_blocks(blocks);
            }
            Self::Aes256(keys) => {
                cbc::Decryptor::inner_iv_init(&keys.1, iv).decrypt_blocks(blocks);
            }
        }
    }
}

/// Makes IVs that nobody without the seed can predict and that do not repeat.
pub(crate) struct IvKey(Box<Aes128Enc>);

impl IvKey {
    pub(crate) fn new(seed: &[u8; 16]) -> Self {
        Self(Box::new(Aes128Enc::new(&(*seed).into())))
    }

    fn iv(&self, seq: u64) -> [u8; 16] {
        let mut block: Block = u128::from(seq).to_be_bytes().into();
        self.0.encrypt_block(&mut block);
        block.into()
    }
}

fn pair<E: KeyInit, D: KeyInit>(key: &[u8]) -> Option<Box<(E, D)>> {
    Some(Box::new((
        E::new_from_slice(key).ok()?,
        D::new_from_slice(key).ok()?,
    )))
}

fn nonce(salt: &[u8; SALT_LEN], iv: [u8; 8]) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..SALT_LEN].copy_from_slice(salt);
    nonce[SALT_LEN..].copy_from_slice(&iv);
    Nonce::assume_unique_for_key(nonce)
}

/// SPI and sequence number, with ESN the whole 64 bits (RFC 4106 section 5).
fn additional_data(packet: &[u8], seq: u64, esn: bool) -> ([u8; 12], usize) {
    let mut aad = [0; 12];
    if esn {
        aad[..4].copy_from_slice(&packet[..4]);
        aad[4..].copy_from_slice(&seq.to_be_bytes());
        (aad, 12)
    } else {
        aad[..8].copy_from_slice(&packet[..8]);
        (aad, 8)
    }
}

/// The MAC over the packet, with ESN followed by the implicit high half (RFC 4303 section 2.2.1).
fn authenticate(key: &hmac::Key, packet: &[u8], seq: u64, esn: bool) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(packet);
    if esn {
        context.update(&((seq >> 32) as u32).to_be_bytes());
    }
    context.sign()
}
