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
