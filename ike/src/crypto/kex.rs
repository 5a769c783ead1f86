// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key exchange methods (RFC 7296 section 3.4, RFC 5903, RFC 8031).

use ring::agreement;
use swanherd_ipsec::Secret;
use swanherd_ipsec::registry::KeyExchangeId;

use super::{CryptoError, Rng};

/// A key exchange method.
pub trait KeyExchange: core::fmt::Debug + Send + Sync {
    /// Its name.
    fn id(&self) -> KeyExchangeId;

    /// Length of the public values on the wire, in octets.
    fn public_len(&self) -> usize;

    /// Makes a fresh private value.
    ///
    /// MODP groups draw it from `rng`. The library behind the elliptic curves accepts no foreign
    /// randomness and asks the operating system; nothing of the protocol's behaviour depends on it.
    ///
    /// # Errors
    /// [`CryptoError::Library`] without randomness.
    fn generate(&self, rng: &mut Rng) -> Result<KeyPair, CryptoError>;
}

/// A private value, and what becomes of it.
pub trait PrivateValue: Send {
    /// The shared secret with the peer's public value, which was checked for length only.
    ///
    /// # Errors
    /// [`CryptoError::BadPublicValue`].
    fn agree(self: Box<Self>, peer: &[u8]) -> Result<Secret, CryptoError>;

    /// The same value again, where tests explore what becomes of it in more than one way.
    #[cfg(test)]
    fn again(&self) -> Option<Box<dyn PrivateValue>> {
        None
    }
}

/// One side of a key exchange: a private value and its public value. It can be used once.
pub struct KeyPair {
    id: KeyExchangeId,
    public: Vec<u8>,
    private: Box<dyn PrivateValue>,
}

impl KeyPair {
    /// A pair for method `id`; for implementations of [`KeyExchange`].
    pub fn new(id: KeyExchangeId, public: Vec<u8>, private: Box<dyn PrivateValue>) -> Self {
        Self {
            id,
            public,
            private,
        }
    }

    /// The method.
    pub fn id(&self) -> KeyExchangeId {
        self.id
    }

    /// Key Exchange Data for the peer.
    pub fn public(&self) -> &[u8] {
        &self.public
    }

    /// The shared secret g^ir with the peer's Key Exchange Data.
    ///
    /// # Errors
    /// [`CryptoError::BadPublicValue`] if the peer's value is malformed, not on the curve, or of
    /// small order.
    pub fn agree(self, peer: &[u8]) -> Result<Secret, CryptoError> {
        if peer.len() != self.public.len() {
            return Err(CryptoError::BadPublicValue(self.id));
        }
        self.private.agree(peer)
    }
}

#[cfg(test)]
impl Clone for KeyPair {
    fn clone(&self) -> Self {
        Self {
            id: self.id,
            public: self.public.clone(),
            private: self
                .private
                .again()
                .expect("only fake key exchanges are explored"),
        }
    }
}

impl core::fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("KeyPair")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Curve25519 (RFC 8031).
pub static X25519: &dyn KeyExchange = &Curve {
    id: KeyExchangeId::Curve25519,
    algorithm: &agreement::X25519,
    public_len: 32,
    prefix: &[],
};

/// The 256-bit random ECP group (RFC 5903).
pub static ECP_256: &dyn KeyExchange = &Curve {
    id: KeyExchangeId::Ecp256,
    algorithm: &agreement::ECDH_P256,
    public_len: 64,
    prefix: UNCOMPRESSED,
};

/// The 384-bit random ECP group (RFC 5903).
pub static ECP_384: &dyn KeyExchange = &Curve {
    id: KeyExchangeId::Ecp384,
    algorithm: &agreement::ECDH_P384,
    public_len: 96,
    prefix: UNCOMPRESSED,
};

/// Begins an uncompressed point in SEC 1; IKE leaves it out.
const UNCOMPRESSED: &[u8] = &[4];

#[derive(Debug)]
struct Curve {
    id: KeyExchangeId,
    algorithm: &'static agreement::Algorithm,
    public_len: usize,
    prefix: &'static [u8],
}

impl KeyExchange for Curve {
    fn id(&self) -> KeyExchangeId {
        self.id
    }

    fn public_len(&self) -> usize {
        self.public_len
    }

    fn generate(&self, _rng: &mut Rng) -> Result<KeyPair, CryptoError> {
        let random = ring::rand::SystemRandom::new();
        let key = agreement::EphemeralPrivateKey::generate(self.algorithm, &random)
            .map_err(|_| CryptoError::Library)?;
        let public = key.compute_public_key().map_err(|_| CryptoError::Library)?;
        let public = public
            .as_ref()
            .strip_prefix(self.prefix)
            .ok_or(CryptoError::Library)?
            .to_vec();
        let private = CurvePrivate {
            id: self.id,
            algorithm: self.algorithm,
            prefix: self.prefix,
            key,
        };
        Ok(KeyPair::new(self.id, public, Box::new(private)))
    }
}

struct CurvePrivate {
    id: KeyExchangeId,
    algorithm: &'static agreement::Algorithm,
    prefix: &'static [u8],
    key: agreement::EphemeralPrivateKey,
}

impl PrivateValue for CurvePrivate {
    fn agree(self: Box<Self>, peer: &[u8]) -> Result<Secret, CryptoError> {
        let peer = agreement::UnparsedPublicKey::new(self.algorithm, [self.prefix, peer].concat());
        // ring checks that the point is on the curve, and refuses an all-zero X25519 result. The
        // shared secret of the ECP groups is the x coordinate only, as RFC 5903 section 7 asks.
        agreement::agree_ephemeral(self.key, &peer, Secret::copy_of)
            .map_err(|_| CryptoError::BadPublicValue(self.id))
    }
}

/// A method for fuzzers and simulations: instant, reproducible from its random seed, and worthless
/// as protection. It stands in for a real method under that method's name and public length.
#[derive(Debug)]
pub struct FakeKeyExchange(pub KeyExchangeId, pub usize);

impl KeyExchange for FakeKeyExchange {
    fn id(&self) -> KeyExchangeId {
        self.0
    }

    fn public_len(&self) -> usize {
        self.1
    }

    fn generate(&self, rng: &mut Rng) -> Result<KeyPair, CryptoError> {
        let public = rng.bytes(self.1);
        let private = FakePrivate(public.clone());
        Ok(KeyPair::new(self.0, public, Box::new(private)))
    }
}

struct FakePrivate(Vec<u8>);

impl PrivateValue for FakePrivate {
    fn agree(self: Box<Self>, peer: &[u8]) -> Result<Secret, CryptoError> {
        Ok(Secret::new(
            self.0.iter().zip(peer).map(|(a, b)| a ^ b).collect(),
        ))
    }

    #[cfg(test)]
    fn again(&self) -> Option<Box<dyn PrivateValue>> {
        Some(Box::new(Self(self.0.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_every_method_agree() {
        let fake = FakeKeyExchange(KeyExchangeId::Curve25519, 32);
        let real = super::super::Provider::ring().key_exchanges;
        let methods = real.iter().copied().chain([&fake as &dyn KeyExchange]);
        let mut rng = Rng::new([3; 32]);

        for method in methods {
            let a = method.generate(&mut rng).unwrap();
            let b = method.generate(&mut rng).unwrap();
            let (public_a, public_b) = (a.public().to_vec(), b.public().to_vec());

            assert_eq!(public_a.len(), method.public_len(), "{method:?}");
            assert_ne!(public_a, public_b, "{method:?}");
            let (secret_a, secret_b) = (a.agree(&public_b).unwrap(), b.agree(&public_a).unwrap());
            assert_eq!(secret_a, secret_b, "{method:?}");
            assert!(!secret_a.is_empty());
        }
    }

    #[test]
    fn public_values_of_the_wrong_length_are_refused() {
        let mut rng = Rng::new([3; 32]);

        for method in super::super::Provider::ring().key_exchanges {
            let pair = method.generate(&mut rng).unwrap();
            let mut peer = pair.public().to_vec();
            peer.push(0);

            assert_eq!(
                pair.agree(&peer),
                Err(CryptoError::BadPublicValue(method.id()))
            );
        }
    }

    #[test]
    fn values_of_small_order_and_off_the_curve_are_refused() {
        let mut rng = Rng::new([3; 32]);

        for method in super::super::Provider::ring().key_exchanges {
            for filler in [0x00, 0xff] {
                let pair = method.generate(&mut rng).unwrap();
                let peer = vec![filler; method.public_len()];
                // 0xff.. is a legal, if odd, X25519 value: its top bit is ignored, and
                // 2^255 - 1 reduces to 18.
                if method.id() == KeyExchangeId::Curve25519 && filler == 0xff {
                    continue;
                }

                assert_eq!(
                    pair.agree(&peer),
                    Err(CryptoError::BadPublicValue(method.id())),
                    "{method:?} {filler}"
                );
            }
        }
    }
}
