// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Protection of SK and SKF payloads (RFC 7296 section 3.14, RFC 5282, RFC 7634).
//!
//! The additional data `aad` of both directions is the message from the first octet of the IKE
//! header up to the last octet before the initialization vector: the generic header of the SK
//! payload, or for SKF the fragment numbers, included. Lengths in those headers must already be
//! final; [`Sealer::sealed_len`] tells them.

use aes::cipher::{Array, BlockModeDecrypt as _, BlockModeEncrypt as _, KeyIvInit as _};
use ring::{aead, hmac};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};
use swanherd_ipsec::{Secret, proposal::IkeSuite};

use super::{CryptoError, Rng, lengths};

/// Protects payloads of one direction.
#[cfg_attr(test, derive(Clone))]
pub struct Sealer {
    cipher: Cipher,
    /// Explicit vector of the next message. Only AEADs use it, which must never repeat one.
    next_iv: Option<u64>,
}

impl Sealer {
    /// A sealer with the keys of one direction: SK_ei and SK_ai, or SK_er and SK_ar.
    ///
    /// # Errors
    /// If the suite is not supported or the keys do not fit it.
    pub fn new(
        suite: &IkeSuite,
        encryption: &Secret,
        integrity: &Secret,
    ) -> Result<Self, CryptoError> {
        Ok(Self {
            cipher: Cipher::new(suite, encryption, integrity)?,
            next_iv: Some(0),
        })
    }

    /// Length of vector, ciphertext and check value for that much plaintext, in octets.
    pub fn sealed_len(&self, plaintext_len: usize) -> usize {
        let (iv, block, icv) = self.cipher.geometry();
        iv + (plaintext_len + 1).next_multiple_of(block) + icv
    }

    /// How much plaintext fits into `sealed_len` octets: the inverse of [`Self::sealed_len`], for
    /// fragmentation. 0 if nothing fits.
    pub fn max_plaintext_len(&self, sealed_len: usize) -> usize {
        let (iv, block, icv) = self.cipher.geometry();
        let room = sealed_len.saturating_sub(iv + icv);
        (room - room % block).saturating_sub(1)
    }

    /// Pads and encrypts `plaintext`, the inner payloads. Returns vector, ciphertext and check
    /// value, which follow `aad` in the message.
    ///
    /// # Errors
    /// [`CryptoError::Exhausted`] after 2^64 messages.
    pub fn seal(
        &mut self,
        aad: &[u8],
        mut plaintext: Vec<u8>,
        rng: &mut Rng,
    ) -> Result<Vec<u8>, CryptoError> {
        let (iv_len, block, icv_len) = self.cipher.geometry();
        let padded = (plaintext.len() + 1).next_multiple_of(block);
        let pad_len = padded - plaintext.len() - 1;
        plaintext.resize(padded - 1, 0);
        plaintext.push(u8::try_from(pad_len).expect("padding is shorter than a block of 16"));

        let mut out = Vec::with_capacity(iv_len + padded + icv_len);
        match &self.cipher {
            Cipher::Aead { key, salt } => {
                let counter = self.next_iv.ok_or(CryptoError::Exhausted)?;
                self.next_iv = counter.checked_add(1);
                let iv = counter.to_be_bytes();
                let tag = key
                    .seal_in_place_separate_tag(
                        nonce(*salt, iv),
                        aead::Aad::from(aad),
                        &mut plaintext,
                    )
                    .map_err(|_| CryptoError::Library)?;
                out.extend_from_slice(&iv);
                out.append(&mut plaintext);
                out.extend_from_slice(tag.as_ref());
            }
            Cipher::Cbc { key, mac, icv_len } => {
                let mut iv = [0; BLOCK];
                rng.fill(&mut iv);
                cbc_encrypt(key.expose(), &iv, &mut plaintext)?;
                out.extend_from_slice(&iv);
                out.append(&mut plaintext);
                let mut context = hmac::Context::with_key(mac);
                context.update(aad);
                context.update(&out);
                out.extend_from_slice(&context.sign().as_ref()[..*icv_len]);
            }
        }
        Ok(out)
    }
}

/// Opens payloads of one direction.
#[cfg_attr(test, derive(Clone))]
pub struct Opener {
    cipher: Cipher,
}

impl Opener {
    /// An opener with the keys of one direction: SK_er and SK_ar, or SK_ei and SK_ai.
    ///
    /// # Errors
    /// If the suite is not supported or the keys do not fit it.
    pub fn new(
        suite: &IkeSuite,
        encryption: &Secret,
        integrity: &Secret,
    ) -> Result<Self, CryptoError> {
        Ok(Self {
            cipher: Cipher::new(suite, encryption, integrity)?,
        })
    }

    /// Checks and decrypts `body`: vector, ciphertext and check value. Returns the inner payloads
    /// without padding.
    ///
    /// # Errors
    /// [`CryptoError::Integrity`] or [`CryptoError::MalformedPayload`]; in both cases nothing about
    /// the plaintext is revealed, and the message is to be dropped silently.
    pub fn open(&self, aad: &[u8], body: &[u8]) -> Result<Vec<u8>, CryptoError> {
        let (iv_len, block, icv_len) = self.cipher.geometry();
        let Some(text_len) = body.len().checked_sub(iv_len + icv_len) else {
            return Err(CryptoError::MalformedPayload);
        };
        if text_len == 0 || text_len % block != 0 {
            return Err(CryptoError::MalformedPayload);
        }
        let (iv, rest) = body.split_at(iv_len);
        let mut plaintext;
        match &self.cipher {
            Cipher::Aead { key, salt } => {
                let iv = <[u8; 8]>::try_from(iv).map_err(|_| CryptoError::MalformedPayload)?;
                plaintext = rest.to_vec();
                key.open_in_place(nonce(*salt, iv), aead::Aad::from(aad), &mut plaintext)
                    .map_err(|_| CryptoError::Integrity)?;
                plaintext.truncate(text_len);
            }
            Cipher::Cbc { key, mac, .. } => {
                let (authentic, icv) = body.split_at(iv_len + text_len);
                let mut context = hmac::Context::with_key(mac);
                context.update(aad);
                context.update(authentic);
                let expected = context.sign();
                let equal = subtle::ConstantTimeEq::ct_eq(&expected.as_ref()[..icv_len], icv);
                if !bool::from(equal) {
                    return Err(CryptoError::Integrity);
                }
                let iv = <[u8; BLOCK]>::try_from(iv).map_err(|_| CryptoError::MalformedPayload)?;
                plaintext = rest[..text_len].to_vec();
                cbc_decrypt(key.expose(), &iv, &mut plaintext)?;
            }
        }
        let pad_len = usize::from(plaintext.pop().ok_or(CryptoError::MalformedPayload)?);
        let len = plaintext
            .len()
            .checked_sub(pad_len)
            .ok_or(CryptoError::MalformedPayload)?;
        plaintext.truncate(len);
        Ok(plaintext)
    }
}

impl core::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Sealer")
            .field("next_iv", &self.next_iv)
            .finish_non_exhaustive()
    }
}

impl core::fmt::Debug for Opener {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Opener").finish_non_exhaustive()
    }
}

/// Whether this build can protect SK payloads with that cipher.
pub(crate) fn supports_encryption(id: EncryptionId, bits: Option<u16>) -> bool {
    lengths::key_len(id, bits).is_some()
        && (id == EncryptionId::AesCbc || aead_algorithm(id, bits).is_some())
}

/// Whether this build can protect SK payloads with that MAC.
pub(crate) fn supports_integrity(id: IntegrityId) -> bool {
    mac_algorithm(id).is_some()
}

const BLOCK: usize = 16;

#[cfg_attr(test, derive(Clone))]
enum Cipher {
    Aead {
        key: Box<aead::LessSafeKey>,
        salt: [u8; 4],
    },
    Cbc {
        key: Secret,
        mac: hmac::Key,
        icv_len: usize,
    },
}

impl Cipher {
    fn new(suite: &IkeSuite, encryption: &Secret, integrity: &Secret) -> Result<Self, CryptoError> {
        let unsupported = CryptoError::UnsupportedEncryption(suite.encryption, suite.key_bits);
        let keymat_len = lengths::encryption_keymat_len(suite.encryption, suite.key_bits)
            .ok_or_else(|| unsupported.clone())?;
        let integrity_len = lengths::suite_integrity_len(suite.encryption, suite.integrity)?;
        if encryption.len() != keymat_len || integrity.len() != integrity_len {
            return Err(CryptoError::KeyLength);
        }
        if let Some(algorithm) = aead_algorithm(suite.encryption, suite.key_bits) {
            let (key, salt) = encryption
                .expose()
                .split_last_chunk()
                .ok_or(CryptoError::KeyLength)?;
            let key = aead::UnboundKey::new(algorithm, key).map_err(|_| CryptoError::KeyLength)?;
            return Ok(Self::Aead {
                key: Box::new(aead::LessSafeKey::new(key)),
                salt: *salt,
            });
        }
        if suite.encryption != EncryptionId::AesCbc {
            return Err(unsupported);
        }
        let no_mac = CryptoError::UnsupportedIntegrity(suite.integrity);
        let id = suite.integrity.ok_or_else(|| no_mac.clone())?;
        let algorithm = mac_algorithm(id).ok_or_else(|| no_mac.clone())?;
        Ok(Self::Cbc {
            key: encryption.clone(),
            mac: hmac::Key::new(algorithm, integrity.expose()),
            icv_len: lengths::icv_len(suite.encryption, suite.integrity).ok_or(no_mac)?,
        })
    }

    /// Lengths of vector, block and check value.
    fn geometry(&self) -> (usize, usize, usize) {
        match self {
            Self::Aead { .. } => (8, 1, 16),
            Self::Cbc { icv_len, .. } => (BLOCK, BLOCK, *icv_len),
        }
    }
}

fn aead_algorithm(id: EncryptionId, bits: Option<u16>) -> Option<&'static aead::Algorithm> {
    match (id, bits) {
        (EncryptionId::AesGcm16, Some(128)) => Some(&aead::AES_128_GCM),
        (EncryptionId::AesGcm16, Some(256)) => Some(&aead::AES_256_GCM),
        (EncryptionId::ChaCha20Poly1305, None | Some(256)) => Some(&aead::CHACHA20_POLY1305),
        _ => None,
    }
}

fn mac_algorithm(id: IntegrityId) -> Option<hmac::Algorithm> {
    match id {
        IntegrityId::HmacSha1_96 => Some(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY),
        IntegrityId::HmacSha2_256_128 => Some(hmac::HMAC_SHA256),
        IntegrityId::HmacSha2_384_192 => Some(hmac::HMAC_SHA384),
        IntegrityId::HmacSha2_512_256 => Some(hmac::HMAC_SHA512),
        _ => None,
    }
}

fn nonce(salt: [u8; 4], iv: [u8; 8]) -> aead::Nonce {
    let mut nonce = [0; 12];
    nonce[..4].copy_from_slice(&salt);
    nonce[4..].copy_from_slice(&iv);
    aead::Nonce::assume_unique_for_key(nonce)
}

/// Encrypts whole blocks in place.
fn cbc_encrypt(key: &[u8], iv: &[u8; BLOCK], data: &mut [u8]) -> Result<(), CryptoError> {
    macro_rules! run {
        ($aes:ty) => {{
            let mut cipher = cbc::Encryptor::<$aes>::new_from_slices(key, iv)
                .map_err(|_| CryptoError::KeyLength)?;
            let (blocks, _) = Array::slice_as_chunks_mut(data);
            cipher.encrypt_blocks(blocks);
        }};
    }
    match key.len() {
        16 => run!(aes::Aes128),
        24 => run!(aes::Aes192),
        _ => run!(aes::Aes256),
    }
    Ok(())
}

/// Decrypts whole blocks in place.
fn cbc_decrypt(key: &[u8], iv: &[u8; BLOCK], data: &mut [u8]) -> Result<(), CryptoError> {
    macro_rules! run {
        ($aes:ty) => {{
            let mut cipher = cbc::Decryptor::<$aes>::new_from_slices(key, iv)
                .map_err(|_| CryptoError::KeyLength)?;
            let (blocks, _) = Array::slice_as_chunks_mut(data);
            cipher.decrypt_blocks(blocks);
        }};
    }
    match key.len() {
        16 => run!(aes::Aes128),
        24 => run!(aes::Aes192),
        _ => run!(aes::Aes256),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::Rng;
    use crate::crypto::test_util::{hex, unhex};
    use proptest::prelude::*;
    use swanherd_ipsec::registry::{KeyExchangeId, PrfId};

    const SUITES: &[(EncryptionId, Option<u16>, Option<IntegrityId>)] = &[
        (EncryptionId::AesGcm16, Some(128), None),
        (EncryptionId::AesGcm16, Some(256), None),
        (EncryptionId::ChaCha20Poly1305, None, None),
        (
            EncryptionId::AesCbc,
            Some(128),
            Some(IntegrityId::HmacSha1_96),
        ),
        (
            EncryptionId::AesCbc,
            Some(192),
            Some(IntegrityId::HmacSha2_256_128),
        ),
        (
            EncryptionId::AesCbc,
            Some(256),
            Some(IntegrityId::HmacSha2_384_192),
        ),
        (
            EncryptionId::AesCbc,
            Some(256),
            Some(IntegrityId::HmacSha2_512_256),
        ),
    ];

    fn suite(
        (encryption, key_bits, integrity): (EncryptionId, Option<u16>, Option<IntegrityId>),
    ) -> IkeSuite {
        IkeSuite {
            encryption,
            key_bits,
            integrity,
            prf: PrfId::HmacSha2_256,
            key_exchange: KeyExchangeId::Curve25519,
        }
    }

    fn pair(suite: &IkeSuite) -> (Sealer, Opener) {
        let len = lengths::encryption_keymat_len(suite.encryption, suite.key_bits).unwrap();
        let encryption = Secret::new(vec![0x42; len]);
        let len = lengths::suite_integrity_len(suite.encryption, suite.integrity).unwrap();
        let integrity = Secret::new(vec![0x23; len]);
        (
            Sealer::new(suite, &encryption, &integrity).unwrap(),
            Opener::new(suite, &encryption, &integrity).unwrap(),
        )
    }

    proptest! {
        #[test]
        fn what_is_sealed_opens(
            suite_index in 0..SUITES.len(),
            aad in proptest::collection::vec(any::<u8>(), 0..64),
            plaintext in proptest::collection::vec(any::<u8>(), 0..200),
            seed: [u8; 32],
        ) {
            let (mut sealer, opener) = pair(&suite(SUITES[suite_index]));
            let mut rng = Rng::new(seed);

            let sealed = sealer.seal(&aad, plaintext.clone(), &mut rng).unwrap();

            prop_assert_eq!(sealed.len(), sealer.sealed_len(plaintext.len()));
            prop_assert!(sealer.max_plaintext_len(sealed.len()) >= plaintext.len());
            prop_assert_eq!(opener.open(&aad, &sealed), Ok(plaintext));
        }

        #[test]
        fn what_was_tampered_with_does_not_open(
            suite_index in 0..SUITES.len(),
            plaintext in proptest::collection::vec(any::<u8>(), 0..50),
            at: proptest::sample::Index,
            flip in 1..=u8::MAX,
        ) {
            let (mut sealer, opener) = pair(&suite(SUITES[suite_index]));
            let aad = [7; 32];
            let sealed = sealer.seal(&aad, plaintext, &mut Rng::new([1; 32])).unwrap();
            let mut message = [&aad[..], &sealed].concat();
            let at = at.index(message.len());
            message[at] ^= flip;
            let (aad, body) = message.split_at(aad.len());

            prop_assert_eq!(opener.open(aad, body), Err(CryptoError::Integrity));
        }

        #[test]
        fn garbage_never_panics(
            suite_index in 0..SUITES.len(),
            body in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let (_, opener) = pair(&suite(SUITES[suite_index]));

            prop_assert!(opener.open(&[], &body).is_err());
        }

        #[test]
        fn the_largest_plaintext_for_a_size_fits(
            suite_index in 0..SUITES.len(),
            size in 100..1500usize,
        ) {
            let (sealer, _) = pair(&suite(SUITES[suite_index]));

            let most = sealer.max_plaintext_len(size);

            prop_assert!(sealer.sealed_len(most) <= size);
            prop_assert!(sealer.sealed_len(most + 1) > size);
        }
    }

    #[test]
    fn an_aead_never_repeats_a_vector() {
        let (mut sealer, _) = pair(&suite(SUITES[0]));
        let mut rng = Rng::new([1; 32]);

        let first = sealer.seal(b"", vec![1], &mut rng).unwrap();
        let second = sealer.seal(b"", vec![1], &mut rng).unwrap();
        sealer.next_iv = Some(u64::MAX);
        let last = sealer.seal(b"", vec![1], &mut rng);

        assert_ne!(first[..8], second[..8]);
        assert!(last.is_ok());
        assert_eq!(
            sealer.seal(b"", vec![1], &mut rng),
            Err(CryptoError::Exhausted)
        );
    }

    #[test]
    fn chacha20_poly1305_equals_rfc_7634_appendix_b() {
        let key: Vec<u8> = (0x80..0xa0).chain(0xa0..0xa4).collect();
        let suite = suite(SUITES[2]);
        let opener = Opener::new(&suite, &Secret::new(key), &Secret::default()).unwrap();
        let aad = unhex("c0c1c2c3c4c5c6c7d0d1d2d3d4d5d6d72e202500000000090000004529000029");
        let body = unhex(
            "1011121314151617 61039470 1f8d017f 7c129248 89
             6b71bfe2 5236efd7 cdc67066 906315b2",
        );

        let plaintext = opener.open(&aad, &body).unwrap();

        assert_eq!(hex(&plaintext), "0000000c000040010000000a");
    }

    #[test]
    fn aes_cbc_equals_sp_800_38a() {
        // F.2.1, F.2.3 and F.2.5, the first two blocks.
        let iv: [u8; 16] = core::array::from_fn(|i| u8::try_from(i).unwrap());
        let plaintext = unhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        let cases = [
            (
                "2b7e151628aed2a6abf7158809cf4f3c",
                "7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2",
            ),
            (
                "8e73b0f7da0e6452c810f32b809079e562f8ead2522c6b7b",
                "4f021db243bc633d7178183a9fa071e8b4d9ada9ad7dedf4e5e738763f69145a",
            ),
            (
                "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
                "f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d",
            ),
        ];
        for (key, ciphertext) in cases {
            let mut data = plaintext.clone();
            cbc_encrypt(&unhex(key), &iv, &mut data).unwrap();
            assert_eq!(hex(&data), ciphertext);
            cbc_decrypt(&unhex(key), &iv, &mut data).unwrap();
            assert_eq!(data, plaintext);
        }
    }

    #[test]
    fn the_mac_covers_header_vector_and_ciphertext_only() {
        let suite = suite(SUITES[3]);
        let (mut sealer, _) = pair(&suite);

        let sealed = sealer
            .seal(b"header", b"inner".to_vec(), &mut Rng::new([1; 32]))
            .unwrap();

        let (authentic, icv) = sealed.split_at(sealed.len() - 12);
        let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, &[0x23; 20]);
        let tag = hmac::sign(&key, &[b"header", authentic].concat());
        assert_eq!(icv, &tag.as_ref()[..12]);
    }

    #[test]
    fn padding_longer_than_the_payload_is_refused() {
        let suite = suite(SUITES[0]);
        let (_, opener) = pair(&suite);
        let key = aead::UnboundKey::new(&aead::AES_128_GCM, &[0x42; 16]).unwrap();
        let mut body = vec![0, 0, 5];
        aead::LessSafeKey::new(key)
            .seal_in_place_append_tag(nonce([0x42; 4], [0; 8]), aead::Aad::empty(), &mut body)
            .unwrap();

        let opened = opener.open(&[], &[&[0; 8][..], &body].concat());

        assert_eq!(opened, Err(CryptoError::MalformedPayload));
    }

    #[test]
    fn keys_that_do_not_fit_are_refused() {
        let suite = suite(SUITES[0]);

        let sealer = Sealer::new(&suite, &Secret::new(vec![0; 16]), &Secret::default());

        assert_eq!(sealer.err(), Some(CryptoError::KeyLength));
    }
}
