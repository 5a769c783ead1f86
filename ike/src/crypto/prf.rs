// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pseudorandom functions, and the derivation of all keys (RFC 7296 sections 2.13 to 2.18).

use ring::hmac;
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::SaKeys;
use swanherd_ipsec::proposal::{ChildSuite, IkeSuite};
use swanherd_ipsec::registry::PrfId;

use super::{CryptoError, lengths};

/// A pseudorandom function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prf {
    id: PrfId,
}

impl Prf {
    /// The function of that name.
    ///
    /// # Errors
    /// [`CryptoError::UnsupportedPrf`].
    pub fn new(id: PrfId) -> Result<Self, CryptoError> {
        algorithm(id).ok_or(CryptoError::UnsupportedPrf(id))?;
        Ok(Self { id })
    }

    /// Its name.
    pub fn id(self) -> PrfId {
        self.id
    }

    /// Length of its output, which is also its preferred key length, in octets.
    pub fn len(self) -> usize {
        self.algorithm().digest_algorithm().output_len()
    }

    /// Never: every function yields at least one octet.
    pub fn is_empty(self) -> bool {
        false
    }

    /// prf(key, data), where the data is the concatenation of `parts`.
    pub fn compute(self, key: &[u8], parts: &[&[u8]]) -> Secret {
        let key = hmac::Key::new(self.algorithm(), key);
        let mut context = hmac::Context::with_key(&key);
        for part in parts {
            context.update(part);
        }
        Secret::copy_of(context.sign().as_ref())
    }

    /// prf+(key, seed), `len` octets of it (RFC 7296 section 2.13).
    ///
    /// # Errors
    /// [`CryptoError::KeyMaterialLength`] if more than 255 blocks are needed.
    pub fn expand(self, key: &[u8], seed: &[&[u8]], len: usize) -> Result<Secret, CryptoError> {
        let key = hmac::Key::new(self.algorithm(), key);
        // One allocation, so that no copy of the key material is left behind by growing.
        let mut out = Vec::with_capacity(len + self.len());
        let mut block = Secret::default();
        for counter in 1..=u8::MAX {
            if out.len() >= len {
                break;
            }
            let mut context = hmac::Context::with_key(&key);
            context.update(block.expose());
            for part in seed {
                context.update(part);
            }
            context.update(&[counter]);
            block = Secret::copy_of(context.sign().as_ref());
            let take = block.len().min(len - out.len());
            out.extend_from_slice(&block.expose()[..take]);
        }
        let complete = out.len() >= len;
        let out = Secret::new(out);
        complete
            .then_some(out)
            .ok_or(CryptoError::KeyMaterialLength)
    }

    fn algorithm(self) -> hmac::Algorithm {
        algorithm(self.id).expect("`new` accepts only functions that `algorithm` knows")
    }
}

/// The seven secrets of an IKE SA (RFC 7296 section 2.14). With an AEAD cipher `ai` and `ar` are
/// empty, and `ei` and `er` end in the salt (RFC 5282 section 7.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IkeKeys {
    /// SK_d: derives the keys of children and of the next IKE SA.
    pub d: Secret,
    /// SK_ai: integrity, initiator to responder.
    pub ai: Secret,
    /// SK_ar: integrity, responder to initiator.
    pub ar: Secret,
    /// SK_ei: encryption, initiator to responder.
    pub ei: Secret,
    /// SK_er: encryption, responder to initiator.
    pub er: Secret,
    /// SK_pi: AUTH of the initiator.
    pub pi: Secret,
    /// SK_pr: AUTH of the responder.
    pub pr: Secret,
}

impl IkeKeys {
    /// Keys of the first IKE SA. SPIs are in host order; `ni` and `nr` are the nonces' data.
    ///
    /// # Errors
    /// If the suite names an algorithm that is not supported.
    pub fn initial(
        suite: &IkeSuite,
        shared: &Secret,
        ni: &[u8],
        nr: &[u8],
        spi_i: u64,
        spi_r: u64,
    ) -> Result<Self, CryptoError> {
        let prf = Prf::new(suite.prf)?;
        let skeyseed = prf.compute(&[ni, nr].concat(), &[shared.expose()]);
        Self::from_skeyseed(suite, &skeyseed, ni, nr, spi_i, spi_r)
    }

    /// Keys of an IKE SA that replaces another (RFC 7296 section 2.18). `old_prf` and `old_d` are
    /// of the IKE SA being replaced; SPIs and nonces are those of the CREATE_CHILD_SA exchange.
    ///
    /// # Errors
    /// If the suite names an algorithm that is not supported.
    #[expect(
        clippy::too_many_arguments,
        reason = "the inputs of RFC 7296 section 2.18"
    )]
    pub fn rekeyed(
        suite: &IkeSuite,
        old_prf: PrfId,
        old_d: &Secret,
        shared: &Secret,
        ni: &[u8],
        nr: &[u8],
        spi_i: u64,
        spi_r: u64,
    ) -> Result<Self, CryptoError> {
        let skeyseed = Prf::new(old_prf)?.compute(old_d.expose(), &[shared.expose(), ni, nr]);
        Self::from_skeyseed(suite, &skeyseed, ni, nr, spi_i, spi_r)
    }

    fn from_skeyseed(
        suite: &IkeSuite,
        skeyseed: &Secret,
        ni: &[u8],
        nr: &[u8],
        spi_i: u64,
        spi_r: u64,
    ) -> Result<Self, CryptoError> {
        let prf = Prf::new(suite.prf)?;
        let encryption = lengths::encryption_keymat_len(suite.encryption, suite.key_bits).ok_or(
            CryptoError::UnsupportedEncryption(suite.encryption, suite.key_bits),
        )?;
        let integrity = lengths::suite_integrity_len(suite.encryption, suite.integrity)?;
        let total = 3 * prf.len() + 2 * integrity + 2 * encryption;
        let material = prf.expand(
            skeyseed.expose(),
            &[ni, nr, &spi_i.to_be_bytes(), &spi_r.to_be_bytes()],
            total,
        )?;
        let mut cut = Cutter(material.expose());
        Ok(Self {
            d: cut.take(prf.len()),
            ai: cut.take(integrity),
            ar: cut.take(integrity),
            ei: cut.take(encryption),
            er: cut.take(encryption),
            pi: cut.take(prf.len()),
            pr: cut.take(prf.len()),
        })
    }
}

/// The keys of both directions of a CHILD SA (RFC 7296 section 2.17).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildKeys {
    /// For packets from the initiator of the exchange that created the CHILD SA.
    pub initiator: SaKeys,
    /// For packets from its responder.
    pub responder: SaKeys,
}

impl ChildKeys {
    /// Derives KEYMAT. `shared` is the key exchange of the CHILD SA's own, if it had one; the
    /// nonces are those of the exchange that created it.
    ///
    /// # Errors
    /// If a suite names an algorithm that is not supported.
    pub fn derive(
        ike_prf: PrfId,
        sk_d: &Secret,
        suite: &ChildSuite,
        shared: Option<&Secret>,
        ni: &[u8],
        nr: &[u8],
    ) -> Result<Self, CryptoError> {
        let encryption = lengths::encryption_keymat_len(suite.encryption, suite.key_bits).ok_or(
            CryptoError::UnsupportedEncryption(suite.encryption, suite.key_bits),
        )?;
        let integrity = lengths::suite_integrity_len(suite.encryption, suite.integrity)?;
        let shared = shared.map_or(&[][..], Secret::expose);
        let material = Prf::new(ike_prf)?.expand(
            sk_d.expose(),
            &[shared, ni, nr],
            2 * (encryption + integrity),
        )?;
        let mut cut = Cutter(material.expose());
        let mut direction = || SaKeys {
            encryption: suite.encryption,
            encryption_key: cut.take(encryption),
            integrity: suite.integrity.map(|id| (id, cut.take(integrity))),
        };
        Ok(Self {
            initiator: direction(),
            responder: direction(),
        })
    }
}

/// Cuts secrets off the front of key material.
struct Cutter<'a>(&'a [u8]);

impl Cutter<'_> {
    fn take(&mut self, len: usize) -> Secret {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        Secret::copy_of(head)
    }
}

fn algorithm(id: PrfId) -> Option<hmac::Algorithm> {
    Some(match id {
        PrfId::HmacSha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
        PrfId::HmacSha2_256 => hmac::HMAC_SHA256,
        PrfId::HmacSha2_384 => hmac::HMAC_SHA384,
        PrfId::HmacSha2_512 => hmac::HMAC_SHA512,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::test_util::{hex, unhex};
    use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId};

    // Expected values were computed with another implementation of HMAC (Python's), from the
    // formulas of RFC 7296.

    fn nonces() -> (Vec<u8>, Vec<u8>) {
        ((0x10..0x30).collect(), (0x40..0x60).collect())
    }

    fn shared() -> Secret {
        Secret::new((0x80..0xa0).collect())
    }

    fn suite(
        encryption: EncryptionId,
        bits: u16,
        integrity: Option<IntegrityId>,
        prf: PrfId,
    ) -> IkeSuite {
        IkeSuite {
            encryption,
            key_bits: Some(bits),
            integrity,
            prf,
            key_exchange: KeyExchangeId::Curve25519,
        }
    }

    fn initial(suite: &IkeSuite) -> IkeKeys {
        let (ni, nr) = nonces();
        IkeKeys::initial(
            suite,
            &shared(),
            &ni,
            &nr,
            0x0102_0304_0506_0708,
            0x1112_1314_1516_1718,
        )
        .unwrap()
    }

    fn all(keys: &IkeKeys) -> Vec<u8> {
        [
            &keys.d, &keys.ai, &keys.ar, &keys.ei, &keys.er, &keys.pi, &keys.pr,
        ]
        .into_iter()
        .flat_map(|key| key.expose().to_vec())
        .collect()
    }

    fn digest(data: &[u8]) -> String {
        hex(ring::digest::digest(&ring::digest::SHA256, data).as_ref())
    }

    const CBC: (EncryptionId, u16, Option<IntegrityId>, PrfId) = (
        EncryptionId::AesCbc,
        256,
        Some(IntegrityId::HmacSha2_256_128),
        PrfId::HmacSha2_256,
    );

    #[test]
    fn hmac_sha256_equals_rfc_4231_case_2() {
        let prf = Prf::new(PrfId::HmacSha2_256).unwrap();

        let output = prf.compute(b"Jefe", &[b"what do ya want ", b"for nothing?"]);

        assert_eq!(
            hex(output.expose()),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn keys_of_the_first_ike_sa_are_those_of_rfc_7296() {
        let keys = initial(&suite(CBC.0, CBC.1, CBC.2, CBC.3));

        assert_eq!(
            hex(keys.d.expose()),
            "c722ec79f3a6f0fdf87e7d7286473ceedfc74bf31ac7839e19182a1423795f9e"
        );
        assert_eq!(
            hex(keys.ei.expose()),
            "010462b0dd90c5a9331cde56e9c2c7bab1558566bee0337afcf43c5d50b22276"
        );
        assert_eq!(
            hex(keys.pr.expose()),
            "e65667302cf21036f38897f1978b6ee3a95285135855d319981f0cdb08ef494c"
        );
        assert_eq!(
            digest(&all(&keys)),
            "1d7c561956aa2bd9191f3f7ae3e4f7269171538738bd6b58183372ee4a06c53e"
        );
    }

    #[test]
    fn an_aead_has_a_salt_and_no_integrity_keys() {
        let keys = initial(&suite(
            EncryptionId::AesGcm16,
            256,
            None,
            PrfId::HmacSha2_384,
        ));

        assert!(keys.ai.is_empty() && keys.ar.is_empty());
        assert_eq!(keys.d.len(), 48);
        assert_eq!(
            hex(keys.er.expose()),
            "32ccab714343df2da1cadd48b005b9373da4cd78f91a4f179d0d09c08d7d5893f79722be"
        );
        assert_eq!(
            digest(&all(&keys)),
            "66290544d0b8b97f3323795d3f399c6a0335e9206c0dbdfbd7fccd82c0f6c680"
        );
    }

    #[test]
    fn sha1_suites_derive() {
        let keys = initial(&suite(
            EncryptionId::AesCbc,
            128,
            Some(IntegrityId::HmacSha1_96),
            PrfId::HmacSha1,
        ));

        assert_eq!(
            digest(&all(&keys)),
            "bd32bd62510e86b283128ef869a154e6818329e65a7de35af9dd313de0b523ff"
        );
    }

    #[test]
    fn keys_of_a_rekeyed_ike_sa_follow_from_the_old_sk_d() {
        let suite = suite(CBC.0, CBC.1, CBC.2, CBC.3);
        let old = initial(&suite);
        let (ni, nr) = nonces();

        let keys = IkeKeys::rekeyed(
            &suite,
            PrfId::HmacSha2_256,
            &old.d,
            &shared(),
            &ni,
            &nr,
            0x0102_0304_0506_0708,
            0x1112_1314_1516_1718,
        )
        .unwrap();

        assert_eq!(
            digest(&all(&keys)),
            "af700a33aa2f982dab443accbede4964b7bde24fb6caa438c43282b4cc78fd90"
        );
    }

    #[test]
    fn child_keys_go_to_the_right_directions() {
        let d = initial(&suite(CBC.0, CBC.1, CBC.2, CBC.3)).d;
        let (ni, nr) = nonces();
        let child = ChildSuite {
            encryption: EncryptionId::AesCbc,
            key_bits: Some(128),
            integrity: Some(IntegrityId::HmacSha1_96),
            key_exchange: None,
            esn: false,
        };
        let expected = unhex(
            "805d03c6852b82de66e86f2407798f6c03e6364920e12105b1e0bd6f25bd8c0a76d7646a\
             381dab8cf3ec2a1ec97174f639109469d17a39b6c8f99eb39aaabf7f12a8648ec9f39988",
        );

        let keys = ChildKeys::derive(PrfId::HmacSha2_256, &d, &child, None, &ni, &nr).unwrap();

        assert_eq!(keys.initiator.encryption_key.expose(), &expected[..16]);
        assert_eq!(
            keys.initiator.integrity,
            Some((IntegrityId::HmacSha1_96, Secret::copy_of(&expected[16..36])))
        );
        assert_eq!(keys.responder.encryption_key.expose(), &expected[36..52]);
        assert_eq!(
            keys.responder.integrity,
            Some((IntegrityId::HmacSha1_96, Secret::copy_of(&expected[52..])))
        );
    }

    #[test]
    fn a_key_exchange_of_its_own_enters_the_child_keys() {
        let d = initial(&suite(CBC.0, CBC.1, CBC.2, CBC.3)).d;
        let (ni, nr) = nonces();
        let child = ChildSuite {
            encryption: EncryptionId::AesGcm16,
            key_bits: Some(256),
            integrity: None,
            key_exchange: Some(KeyExchangeId::Curve25519),
            esn: true,
        };
        let expected = unhex(
            "15cc50d91d39839a17098f7d4d7dd7bf0a07e0962ad469248ceecd33bad73cbd0a35bfb2\
             5052052e9cee17cc1f486f7022b168b0d2f0a78b9d4b2f0a802b21787d76ea8e8d99c1a6",
        );

        let keys =
            ChildKeys::derive(PrfId::HmacSha2_256, &d, &child, Some(&shared()), &ni, &nr).unwrap();

        assert_eq!(keys.initiator.encryption_key.expose(), &expected[..36]);
        assert_eq!(keys.responder.encryption_key.expose(), &expected[36..]);
        assert_eq!(keys.initiator.integrity, None);
    }

    #[test]
    fn expansion_stops_where_the_counter_ends() {
        let prf = Prf::new(PrfId::HmacSha1).unwrap();

        assert_eq!(prf.expand(b"k", &[b"s"], 255 * 20).unwrap().len(), 5100);
        assert_eq!(
            prf.expand(b"k", &[b"s"], 255 * 20 + 1),
            Err(CryptoError::KeyMaterialLength)
        );
    }

    #[test]
    fn unsupported_algorithms_are_named() {
        assert_eq!(
            Prf::new(PrfId::Aes128Xcbc),
            Err(CryptoError::UnsupportedPrf(PrfId::Aes128Xcbc))
        );
        let (ni, nr) = nonces();
        let odd = suite(EncryptionId::AesCbc, 100, CBC.2, CBC.3);
        assert_eq!(
            IkeKeys::initial(&odd, &shared(), &ni, &nr, 1, 2),
            Err(CryptoError::UnsupportedEncryption(
                EncryptionId::AesCbc,
                Some(100)
            ))
        );
        let without_mac = suite(EncryptionId::AesCbc, 128, None, CBC.3);
        assert_eq!(
            IkeKeys::initial(&without_mac, &shared(), &ni, &nr, 1, 2),
            Err(CryptoError::UnsupportedIntegrity(None))
        );
    }
}
