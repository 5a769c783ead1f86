// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MODP groups 14 to 16 (RFC 3526), in constant time.
//!
//! All three moduli are safe primes, so that a peer's value y with 1 < y < p - 1 generates a
//! subgroup of order q or 2q, and no more has to be checked (RFC 6989 section 2.1). Private
//! exponents have twice the bits of the group's strength, as RFC 3526 section 8 allows; full
//! length exponents would be eight times slower and no stronger.

use std::sync::LazyLock;

use crypto_bigint::modular::{FixedMontyForm, FixedMontyParams};
use crypto_bigint::{Odd, U320, U2048, U3072, U4096};
use swanherd_ipsec::Secret;
use swanherd_ipsec::registry::KeyExchangeId;
use zeroize::Zeroize as _;

use super::kex::PrivateValue;
use super::{CryptoError, KeyExchange, KeyPair, Rng};

/// The 2048-bit group.
pub(crate) static MODP_2048: &dyn KeyExchange = &Modp2048;
/// The 3072-bit group.
pub(crate) static MODP_3072: &dyn KeyExchange = &Modp3072;
/// The 4096-bit group.
pub(crate) static MODP_4096: &dyn KeyExchange = &Modp4096;

macro_rules! modp_group {
    ($name:ident, $id:ident, $uint:ty, $octets:literal, $exponent_bits:literal, $prime:expr) => {
        #[derive(Clone, Copy, Debug)]
        struct $name;

        impl $name {
            fn params() -> &'static FixedMontyParams<{ <$uint>::LIMBS }> {
                static PARAMS: LazyLock<FixedMontyParams<{ <$uint>::LIMBS }>> =
                    LazyLock::new(|| {
                        let prime = Odd::new(<$uint>::from_be_hex($prime));
                        FixedMontyParams::new_vartime(prime.expect("the group's prime is odd"))
                    });
                &PARAMS
            }

            /// base ^ exponent mod p, with leading zeros kept.
            fn power(base: &$uint, exponent: &Secret) -> Secret {
                let mut exponent = U320::from_be_slice(exponent.expose());
                let base = FixedMontyForm::new(base, Self::params());
                let mut power = base.pow_bounded_exp(&exponent, $exponent_bits).retrieve();
                let mut octets = power.to_be_bytes();
                let secret = Secret::copy_of(octets.as_ref());
                exponent.zeroize();
                power.zeroize();
                octets.as_mut().zeroize();
                secret
            }
        }

        impl KeyExchange for $name {
            fn id(&self) -> KeyExchangeId {
                KeyExchangeId::$id
            }

            fn public_len(&self) -> usize {
                $octets
            }

            fn generate(&self, rng: &mut Rng) -> Result<KeyPair, CryptoError> {
                let mut exponent = vec![0; EXPONENT_OCTETS];
                rng.fill(&mut exponent[EXPONENT_OCTETS - $exponent_bits / 8..]);
                let exponent = Secret::new(exponent);
                let public = Self::power(&<$uint>::from_u8(2), &exponent);
                let private = Box::new(Private {
                    group: *self,
                    exponent,
                });
                Ok(KeyPair::new(self.id(), public.expose().to_vec(), private))
            }
        }

        impl PrivateValue for Private<$name> {
            fn agree(self: Box<Self>, peer: &[u8]) -> Result<Secret, CryptoError> {
                let bad = CryptoError::BadPublicValue(self.group.id());
                if peer.len() != $octets {
                    return Err(bad);
                }
                let peer = <$uint>::from_be_slice(peer);
                let one = <$uint>::ONE;
                let last = $name::params().modulus().as_ref().wrapping_sub(&one);
                if peer <= one || peer >= last {
                    return Err(bad);
                }
                Ok($name::power(&peer, &self.exponent))
            }
        }
    };
}

struct Private<Group> {
    group: Group,
    exponent: Secret,
}

/// Room for the longest exponent.
const EXPONENT_OCTETS: usize = 40;

modp_group!(Modp2048, Modp2048, U2048, 256, 256, PRIME_2048);
modp_group!(Modp3072, Modp3072, U3072, 384, 288, PRIME_3072);
modp_group!(Modp4096, Modp4096, U4096, 512, 320, PRIME_4096);

const PRIME_2048: &str = "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A0879\
     8E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B\
     0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA4836\
     1C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804\
     F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6\
     955817183995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF";
const PRIME_3072: &str = "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A0879\
     8E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B\
     0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA4836\
     1C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804\
     F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6\
     955817183995497CEA956AE515D2261898FA051015728E5A8AAAC42DAD33170D04507A33A85521ABDF1CBA64\
     ECFB850458DBEF0A8AEA71575D060C7DB3970F85A6E1E4C7ABF5AE8CDB0933D71E8C94E04A25619DCEE3D226\
     1AD2EE6BF12FFA06D98A0864D87602733EC86A64521F2B18177B200CBBE117577A615D6C770988C0BAD946E2\
     08E24FA074E5AB3143DB5BFCE0FD108E4B82D120A93AD2CAFFFFFFFFFFFFFFFF";
const PRIME_4096: &str = "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A0879\
     8E3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B\
     0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA4836\
     1C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804\
     F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6\
     955817183995497CEA956AE515D2261898FA051015728E5A8AAAC42DAD33170D04507A33A85521ABDF1CBA64\
     ECFB850458DBEF0A8AEA71575D060C7DB3970F85A6E1E4C7ABF5AE8CDB0933D71E8C94E04A25619DCEE3D226\
     1AD2EE6BF12FFA06D98A0864D87602733EC86A64521F2B18177B200CBBE117577A615D6C770988C0BAD946E2\
     08E24FA074E5AB3143DB5BFCE0FD108E4B82D120A92108011A723C12A787E6D788719A10BDBA5B2699C32718\
     6AF4E23C1A946834B6150BDA2583E9CA2AD44CE8DBBBC2DB04DE8EF92E8EFC141FBECAA6287C59474E6BC05D\
     99B2964FA090C3A2233BA186515BE7ED1F612970CEE2D7AFB81BDD762170481CD0069127D5B05AA993B4EA98\
     8D8FDDC186FFB7DC90A6C08F4DF435C934063199FFFFFFFFFFFFFFFF";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::test_util::hex;

    #[test]
    fn primes_have_the_shape_of_rfc_3526() {
        // 2^n - 2^(n-64) - 1 + 2^64 * (floor(2^(n-130) * pi) + k): the outer 64 bits are ones, and
        // the bits below them are those of pi.
        for prime in [PRIME_2048, PRIME_3072, PRIME_4096] {
            assert!(prime.starts_with("FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD1"));
            assert!(prime.ends_with("FFFFFFFFFFFFFFFF"));
        }
        assert!(PRIME_2048.ends_with("15728E5A8AACAA68FFFFFFFFFFFFFFFF"));
        assert!(PRIME_3072.ends_with("4B82D120A93AD2CAFFFFFFFFFFFFFFFF"));
        assert!(PRIME_4096.ends_with("4DF435C934063199FFFFFFFFFFFFFFFF"));
    }

    #[test]
    fn degenerate_values_are_refused() {
        let p = U2048::from_be_hex(PRIME_2048);
        let one = U2048::ONE;
        let mut rng = Rng::new([9; 32]);

        for bad in [U2048::ZERO, one, p.wrapping_sub(&one), p, U2048::MAX] {
            let pair = MODP_2048.generate(&mut rng).unwrap();
            assert_eq!(
                pair.agree(bad.to_be_bytes().as_ref()),
                Err(CryptoError::BadPublicValue(KeyExchangeId::Modp2048))
            );
        }
        for good in [U2048::from_u8(2), p.wrapping_sub(&U2048::from_u8(2))] {
            let pair = MODP_2048.generate(&mut rng).unwrap();
            assert!(pair.agree(good.to_be_bytes().as_ref()).is_ok());
        }
    }

    #[test]
    fn powers_equal_those_of_plain_arithmetic() {
        // 2^7 needs no reduction, so the public value of the exponent 7 is 128.
        let mut exponent = vec![0; EXPONENT_OCTETS];
        exponent[EXPONENT_OCTETS - 1] = 7;

        let power = Modp3072::power(&U3072::from_u8(2), &Secret::new(exponent));

        assert_eq!(power.len(), 384);
        assert_eq!(power.expose()[383], 128);
        assert!(power.expose()[..383].iter().all(|&octet| octet == 0));
    }

    #[test]
    fn values_equal_those_of_another_implementation() {
        // Of x = a5a5.. and y = 5a5a.., computed with Python: SHA-256 of 2^x and of 2^(xy).
        fn digest(secret: &[u8]) -> String {
            hex(ring::digest::digest(&ring::digest::SHA256, secret).as_ref())
        }
        fn exponent(filler: u8, octets: usize) -> Secret {
            let mut exponent = vec![0; EXPONENT_OCTETS];
            exponent[EXPONENT_OCTETS - octets..].fill(filler);
            Secret::new(exponent)
        }
        macro_rules! check {
            ($group:ident, $uint:ty, $octets:literal, $public:literal, $shared:literal) => {
                let public = $group::power(&<$uint>::from_u8(2), &exponent(0xa5, $octets));
                let peer = $group::power(&<$uint>::from_u8(2), &exponent(0x5a, $octets));
                let private = Box::new(Private {
                    group: $group,
                    exponent: exponent(0xa5, $octets),
                });
                let shared = private.agree(peer.expose()).unwrap();
                assert_eq!(digest(public.expose()), $public);
                assert_eq!(digest(shared.expose()), $shared);
            };
        }
        check!(
            Modp2048,
            U2048,
            32,
            "f764393624d4f7f9a297f5d1672c9fdc02198d4acdbf446066dac10a01cb75b6",
            "e4a107347a9dd9c6728a30a562701c08969db7fe4b546c9c31d9d9611aab6d74"
        );
        check!(
            Modp3072,
            U3072,
            36,
            "f90d57aa286e1214f18f471ead3dea8b6eb0d6f7666b545a4810aa41b876f9bd",
            "661848518a96a8b71d2e0f2d29a8b6056faa8a035d5f4c5f11a16cae04f091cb"
        );
        check!(
            Modp4096,
            U4096,
            40,
            "95d06011e4d9686a32b326a03e273b9dcb20e44867aaa1fb6b3f97b9b2997598",
            "08c0e4a60e5675e61167d3baba960d5dd0626947b196a69efd6e79b1a7da1b35"
        );
    }
}
