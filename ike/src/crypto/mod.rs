// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cryptography of IKEv2.
//!
//! [`Provider`] says which algorithms there are. What is cheap (PRF, SK payloads) is called
//! directly: [`Prf`], [`IkeKeys`], [`ChildKeys`], [`Sealer`], [`Opener`]. What is expensive (key
//! exchange, signatures, paths) goes through [`crate::compute::Job`].

pub mod auth;
mod error;
pub mod hash;
pub mod kex;
pub mod lengths;
mod modp;
mod prf;
mod rng;
mod sk;
#[cfg(test)]
pub(crate) mod test_util;

pub use error::CryptoError;
pub use hash::CookieJar;
pub use kex::{KeyExchange, KeyPair};
pub use prf::{ChildKeys, IkeKeys, Prf};
pub use rng::Rng;
pub use sk::{Opener, Sealer};

use swanherd_ipsec::Transform;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

/// The algorithms that an endpoint may use. Plain values; cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Provider {
    /// Name, for logs.
    pub name: &'static str,
    /// Key exchange methods.
    pub key_exchanges: &'static [&'static dyn KeyExchange],
}

impl Provider {
    /// ring, and the RustCrypto crates for what ring lacks.
    pub const fn ring() -> Self {
        Self {
            name: "ring",
            key_exchanges: RING_KEY_EXCHANGES,
        }
    }

    /// For fuzzers and simulations: key exchanges are instant and reproducible, and protect
    /// nothing. Everything else is real.
    pub const fn fake() -> Self {
        Self {
            name: "fake",
            key_exchanges: FAKE_KEY_EXCHANGES,
        }
    }

    /// The key exchange method of that name.
    ///
    /// # Errors
    /// [`CryptoError::UnsupportedKeyExchange`].
    pub fn key_exchange(&self, id: KeyExchangeId) -> Result<&'static dyn KeyExchange, CryptoError> {
        self.key_exchanges
            .iter()
            .copied()
            .find(|method| method.id() == id)
            .ok_or(CryptoError::UnsupportedKeyExchange(id))
    }

    /// Whether IKE itself can use this transform in an IKE proposal. (What a CHILD SA can use is
    /// the data plane's business, key exchanges excepted.)
    pub fn supports(&self, transform: Transform) -> bool {
        match transform {
            Transform::Encryption { id, key_bits } => sk::supports_encryption(id, key_bits),
            Transform::Prf(id) => Prf::new(id).is_ok(),
            Transform::Integrity(id) => sk::supports_integrity(id),
            Transform::KeyExchange(id) => self.key_exchange(id).is_ok(),
            Transform::Esn(_)
            | Transform::AdditionalKeyExchange { .. }
            | Transform::Unknown { .. } => false,
        }
    }

    /// Every transform that [`Self::supports`] accepts, for listings.
    pub fn transforms(&self) -> Vec<Transform> {
        let encryption = EncryptionId::KNOWN.iter().flat_map(|&id| {
            [None, Some(128), Some(192), Some(256)]
                .into_iter()
                .map(move |key_bits| Transform::Encryption { id, key_bits })
        });
        encryption
            .chain(PrfId::KNOWN.iter().map(|&id| Transform::Prf(id)))
            .chain(
                IntegrityId::KNOWN
                    .iter()
                    .map(|&id| Transform::Integrity(id)),
            )
            .chain(
                self.key_exchanges
                    .iter()
                    .map(|method| Transform::KeyExchange(method.id())),
            )
            .filter(|&transform| self.supports(transform))
            .collect()
    }
}

static RING_KEY_EXCHANGES: &[&dyn KeyExchange] = &[
    kex::X25519,
    kex::ECP_256,
    kex::ECP_384,
    modp::MODP_2048,
    modp::MODP_3072,
    modp::MODP_4096,
];

static FAKE_KEY_EXCHANGES: &[&dyn KeyExchange] = &[
    &kex::FakeKeyExchange(KeyExchangeId::Curve25519, 32),
    &kex::FakeKeyExchange(KeyExchangeId::Ecp256, 64),
    &kex::FakeKeyExchange(KeyExchangeId::Ecp384, 96),
    &kex::FakeKeyExchange(KeyExchangeId::Modp2048, 256),
    &kex::FakeKeyExchange(KeyExchangeId::Modp3072, 384),
    &kex::FakeKeyExchange(KeyExchangeId::Modp4096, 512),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ring_supports_is_what_it_says() {
        let provider = Provider::ring();
        let gcm = |bits| Transform::Encryption {
            id: EncryptionId::AesGcm16,
            key_bits: Some(bits),
        };

        assert!(provider.supports(gcm(128)) && provider.supports(gcm(256)));
        assert!(!provider.supports(gcm(192)));
        assert!(provider.supports(Transform::Encryption {
            id: EncryptionId::AesCbc,
            key_bits: Some(192)
        }));
        assert!(!provider.supports(Transform::Encryption {
            id: EncryptionId::AesCbc,
            key_bits: None
        }));
        assert!(provider.supports(Transform::Encryption {
            id: EncryptionId::ChaCha20Poly1305,
            key_bits: None
        }));
        assert!(!provider.supports(Transform::Encryption {
            id: EncryptionId::Null,
            key_bits: None
        }));
        assert!(provider.supports(Transform::KeyExchange(KeyExchangeId::Modp4096)));
        assert!(!provider.supports(Transform::KeyExchange(KeyExchangeId::Modp1024)));
        assert!(!provider.supports(Transform::KeyExchange(KeyExchangeId::None)));
        assert!(!provider.supports(Transform::Prf(PrfId::HmacMd5)));
        assert!(!provider.supports(Transform::Integrity(IntegrityId::HmacMd5_96)));
        let listed = provider.transforms();
        assert!(listed.contains(&gcm(256)));
        assert!(listed.iter().all(|&transform| provider.supports(transform)));
    }
}
