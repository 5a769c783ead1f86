// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contents of AUTH payloads (RFC 7296 section 2.15, RFC 4754, RFC 7427, RFC 8420).

use ring::signature as rs;
use swanherd_config::model::{KeyType, PubkeyConstraints, SignatureHash};
use swanherd_ipsec::Secret;

use super::Prf;
use crate::credentials::{Curve, PrivateKey, PublicKey};
use crate::wire::AuthMethod;

swanherd_ipsec::open_registry! {
    /// Hash algorithms of SIGNATURE_HASH_ALGORITHMS (RFC 7427 section 4, RFC 8420).
    pub enum HashId: u16 {
        Sha1 = 1, "SHA1";
        Sha2_256 = 2, "SHA2_256";
        Sha2_384 = 3, "SHA2_384";
        Sha2_512 = 4, "SHA2_512";
        Identity = 5, "IDENTITY";
    }
}

/// What to announce in SIGNATURE_HASH_ALGORITHMS.
pub const ANNOUNCED_HASHES: &[HashId] = &[
    HashId::Sha2_256,
    HashId::Sha2_384,
    HashId::Sha2_512,
    HashId::Identity,
];

/// The octets that AUTH authenticates: `message | nonce | prf(sk_p, id)` (RFC 7296 section 2.15).
///
/// For the initiator's AUTH: its first IKE_SA_INIT request that was answered, the responder's
/// nonce, SK_pi and the IDi payload without its generic header; for the responder's the other way
/// round.
pub fn signed_octets(prf: Prf, message: &[u8], nonce: &[u8], sk_p: &Secret, id: &[u8]) -> Vec<u8> {
    let maced_id = prf.compute(sk_p.expose(), &[id]);
    [message, nonce, maced_id.expose()].concat()
}

/// AUTH data with a pre-shared key.
pub fn shared_key(prf: Prf, psk: &Secret, octets: &[u8]) -> Vec<u8> {
    let key = prf.compute(psk.expose(), &[b"Key Pad for IKEv2"]);
    prf.compute(key.expose(), &[octets]).expose().to_vec()
}

/// Whether `auth` is right for a pre-shared key. Constant time.
pub fn verify_shared_key(prf: Prf, psk: &Secret, octets: &[u8], auth: &[u8]) -> bool {
    Secret::new(shared_key(prf, psk, octets)) == Secret::copy_of(auth)
}

/// Why signing or verifying failed, in words for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// The peer announced no hash that this key can sign with.
    #[error("no signature scheme of this {0} key is acceptable to the peer and the configuration")]
    NoScheme(&'static str),
    /// The peer only knows the methods before RFC 7427, and ours cannot do that for this key.
    #[error(
        "the peer does not support RFC 7427 signatures, and {0} signatures without them are not \
         supported"
    )]
    NeedsDigitalSignature(&'static str),
    /// The authentication method is unknown or not for signatures.
    #[error("authentication method {0} is not supported")]
    UnsupportedMethod(AuthMethod),
    /// The AlgorithmIdentifier is unknown.
    #[error("signature algorithm identifier {0} is not supported")]
    UnsupportedAlgorithm(String),
    /// The AUTH data is malformed.
    #[error("the signature is malformed")]
    Malformed,
    /// The scheme is for another kind of key.
    #[error("a signature by {scheme} does not fit the certificate's {key} key")]
    WrongKey {
        /// Scheme of the signature.
        scheme: &'static str,
        /// Type of the key.
        key: &'static str,
    },
    /// The signature is wrong.
    #[error("the signature does not verify")]
    Invalid,
    /// The library failed to sign.
    #[error("signing failed")]
    Library,
    /// Any of these, as a recording tells it.
    #[error("{0}")]
    Recorded(String),
}

/// A signature scheme, by what it does to the octets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum SignatureScheme {
    /// RSASSA-PKCS1-v1_5.
    RsaPkcs1(HashId),
    /// RSASSA-PSS, salt as long as the hash.
    RsaPss(HashId),
    /// ECDSA.
    Ecdsa(HashId),
    /// Ed25519.
    Ed25519,
}

impl SignatureScheme {
    /// Name, for logs and listings.
    pub fn name(self) -> &'static str {
        use HashId as H;
        match self {
            Self::RsaPkcs1(H::Sha1) => "RSA_EMSA_PKCS1_SHA1",
            Self::RsaPkcs1(H::Sha2_256) => "RSA_EMSA_PKCS1_SHA2_256",
            Self::RsaPkcs1(H::Sha2_384) => "RSA_EMSA_PKCS1_SHA2_384",
            Self::RsaPkcs1(H::Sha2_512) => "RSA_EMSA_PKCS1_SHA2_512",
            Self::RsaPkcs1(_) => "RSA_EMSA_PKCS1",
            Self::RsaPss(H::Sha2_256) => "RSA_EMSA_PSS_SHA2_256",
            Self::RsaPss(H::Sha2_384) => "RSA_EMSA_PSS_SHA2_384",
            Self::RsaPss(H::Sha2_512) => "RSA_EMSA_PSS_SHA2_512",
            Self::RsaPss(_) => "RSA_EMSA_PSS",
            Self::Ecdsa(H::Sha2_256) => "ECDSA_WITH_SHA256",
            Self::Ecdsa(H::Sha2_384) => "ECDSA_WITH_SHA384",
            Self::Ecdsa(_) => "ECDSA",
            Self::Ed25519 => "ED25519",
        }
    }

    /// Its hash.
    pub fn hash(self) -> HashId {
        match self {
            Self::RsaPkcs1(hash) | Self::RsaPss(hash) | Self::Ecdsa(hash) => hash,
            Self::Ed25519 => HashId::Identity,
        }
    }
}

/// How to sign for a certain peer: the scheme, and the authentication method that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SigningPlan {
    /// What goes into the AUTH payload's method field.
    pub method: AuthMethod,
    /// What to compute.
    pub scheme: SignatureScheme,
}

impl SigningPlan {
    /// Chooses how to sign. `peer_hashes` is what the peer announced in
    /// SIGNATURE_HASH_ALGORITHMS, empty if it sent none; `constraints` is of the local round.
    ///
    /// # Errors
    /// If the key, the peer and the configuration have nothing in common.
    pub fn choose(
        key: &PublicKey,
        peer_hashes: &[HashId],
        constraints: &PubkeyConstraints,
    ) -> Result<Self, SignatureError> {
        let allowed = |hash: HashId| {
            constraints.hashes.is_empty()
                || hash == HashId::Identity
                || constraints.hashes.iter().any(|&h| hash_id(h) == hash)
        };
        let candidates: &[SignatureScheme] = match (key.key_type(), key.curve()) {
            (KeyType::Rsa, _) if constraints.rsa_pss => &[
                SignatureScheme::RsaPss(HashId::Sha2_256),
                SignatureScheme::RsaPss(HashId::Sha2_384),
                SignatureScheme::RsaPss(HashId::Sha2_512),
            ],
            (KeyType::Rsa, _) => &[
                SignatureScheme::RsaPkcs1(HashId::Sha2_256),
                SignatureScheme::RsaPkcs1(HashId::Sha2_384),
                SignatureScheme::RsaPkcs1(HashId::Sha2_512),
            ],
            (KeyType::Ecdsa, Some(Curve::P256)) => &[SignatureScheme::Ecdsa(HashId::Sha2_256)],
            (KeyType::Ecdsa, Some(Curve::P384)) => &[SignatureScheme::Ecdsa(HashId::Sha2_384)],
            (KeyType::Ed25519, _) => &[SignatureScheme::Ed25519],
            _ => &[],
        };
        let name = key.type_name();
        if peer_hashes.is_empty() {
            let method = match candidates {
                [SignatureScheme::Ecdsa(HashId::Sha2_256)] => AuthMethod::Ecdsa256,
                [SignatureScheme::Ecdsa(HashId::Sha2_384)] => AuthMethod::Ecdsa384,
                _ => return Err(SignatureError::NeedsDigitalSignature(name)),
            };
            return Ok(Self {
                method,
                scheme: candidates[0],
            });
        }
        // The configured order of hashes decides, else ours.
        let rank = |scheme: &SignatureScheme| {
            constraints
                .hashes
                .iter()
                .position(|&hash| hash_id(hash) == scheme.hash())
        };
        let scheme = candidates
            .iter()
            .filter(|scheme| peer_hashes.contains(&scheme.hash()) && allowed(scheme.hash()))
            .min_by_key(|scheme| rank(scheme))
            .ok_or(SignatureError::NoScheme(name))?;
        Ok(Self {
            method: AuthMethod::DigitalSignature,
            scheme: *scheme,
        })
    }

    /// AUTH data: signs `octets`. Expensive with RSA.
    ///
    /// # Errors
    /// [`SignatureError::WrongKey`] if the plan was made for another key.
    pub fn sign(&self, key: &PrivateKey, octets: &[u8]) -> Result<Vec<u8>, SignatureError> {
        let signature = key.sign(self.scheme, octets)?;
        match self.method {
            AuthMethod::DigitalSignature => {
                let identifier = algorithm_identifier(self.scheme, true)
                    .ok_or_else(|| SignatureError::NoScheme(key.public().type_name()))?;
                let len = u8::try_from(identifier.len()).map_err(|_| SignatureError::Library)?;
                Ok([&[len][..], &identifier, &signature].concat())
            }
            AuthMethod::Ecdsa256 => raw_from_der(&signature, 32),
            AuthMethod::Ecdsa384 => raw_from_der(&signature, 48),
            _ => Ok(signature),
        }
    }
}

/// Verifies AUTH data with the peer's public key. Returns the scheme used.
///
/// # Errors
/// If the signature is wrong, or the method, scheme or key is not supported.
pub fn verify_signature(
    method: AuthMethod,
    key: &PublicKey,
    octets: &[u8],
    auth: &[u8],
) -> Result<SignatureScheme, SignatureError> {
    let (scheme, fixed, signature) = match method {
        AuthMethod::RsaSignature => (SignatureScheme::RsaPkcs1(HashId::Sha1), false, auth),
        AuthMethod::Ecdsa256 => (SignatureScheme::Ecdsa(HashId::Sha2_256), true, auth),
        AuthMethod::Ecdsa384 => (SignatureScheme::Ecdsa(HashId::Sha2_384), true, auth),
        AuthMethod::DigitalSignature => {
            let (&len, rest) = auth.split_first().ok_or(SignatureError::Malformed)?;
            let (identifier, signature) = rest
                .split_at_checked(usize::from(len))
                .ok_or(SignatureError::Malformed)?;
            (scheme_of(identifier)?, false, signature)
        }
        _ => return Err(SignatureError::UnsupportedMethod(method)),
    };
    let wrong_key = SignatureError::WrongKey {
        scheme: scheme.name(),
        key: key.type_name(),
    };
    use HashId as H;
    use SignatureScheme as S;
    let algorithm: &dyn rs::VerificationAlgorithm = match (scheme, key.key_type(), key.curve()) {
        // Methods before RFC 7427 fix curve and hash together.
        (S::Ecdsa(H::Sha2_256), KeyType::Ecdsa, Some(Curve::P256)) if fixed => {
            &rs::ECDSA_P256_SHA256_FIXED
        }
        (S::Ecdsa(H::Sha2_384), KeyType::Ecdsa, Some(Curve::P384)) if fixed => {
            &rs::ECDSA_P384_SHA384_FIXED
        }
        (S::Ecdsa(H::Sha2_256), KeyType::Ecdsa, Some(Curve::P256)) if !fixed => {
            &rs::ECDSA_P256_SHA256_ASN1
        }
        (S::Ecdsa(H::Sha2_384), KeyType::Ecdsa, Some(Curve::P256)) if !fixed => {
            &rs::ECDSA_P256_SHA384_ASN1
        }
        (S::Ecdsa(H::Sha2_256), KeyType::Ecdsa, Some(Curve::P384)) if !fixed => {
            &rs::ECDSA_P384_SHA256_ASN1
        }
        (S::Ecdsa(H::Sha2_384), KeyType::Ecdsa, Some(Curve::P384)) if !fixed => {
            &rs::ECDSA_P384_SHA384_ASN1
        }
        (S::RsaPkcs1(H::Sha1), KeyType::Rsa, _) => {
            &rs::RSA_PKCS1_2048_8192_SHA1_FOR_LEGACY_USE_ONLY
        }
        (S::RsaPkcs1(H::Sha2_256), KeyType::Rsa, _) => &rs::RSA_PKCS1_2048_8192_SHA256,
        (S::RsaPkcs1(H::Sha2_384), KeyType::Rsa, _) => &rs::RSA_PKCS1_2048_8192_SHA384,
        (S::RsaPkcs1(H::Sha2_512), KeyType::Rsa, _) => &rs::RSA_PKCS1_2048_8192_SHA512,
        (S::RsaPss(H::Sha2_256), KeyType::Rsa, _) => &rs::RSA_PSS_2048_8192_SHA256,
        (S::RsaPss(H::Sha2_384), KeyType::Rsa, _) => &rs::RSA_PSS_2048_8192_SHA384,
        (S::RsaPss(H::Sha2_512), KeyType::Rsa, _) => &rs::RSA_PSS_2048_8192_SHA512,
        (S::Ed25519, KeyType::Ed25519, _) => &rs::ED25519,
        _ => return Err(wrong_key),
    };
    rs::UnparsedPublicKey::new(algorithm, key.key_octets())
        .verify(octets, signature)
        .map_err(|_| SignatureError::Invalid)?;
    Ok(scheme)
}

/// The registry's number of a configured hash.
pub fn hash_id(hash: SignatureHash) -> HashId {
    match hash {
        SignatureHash::Sha1 => HashId::Sha1,
        SignatureHash::Sha256 => HashId::Sha2_256,
        SignatureHash::Sha384 => HashId::Sha2_384,
        SignatureHash::Sha512 => HashId::Sha2_512,
        SignatureHash::Identity => HashId::Identity,
    }
}

/// Every scheme whose AlgorithmIdentifier is understood.
const IDENTIFIED: &[SignatureScheme] = &[
    SignatureScheme::RsaPkcs1(HashId::Sha2_256),
    SignatureScheme::RsaPkcs1(HashId::Sha2_384),
    SignatureScheme::RsaPkcs1(HashId::Sha2_512),
    SignatureScheme::RsaPss(HashId::Sha2_256),
    SignatureScheme::RsaPss(HashId::Sha2_384),
    SignatureScheme::RsaPss(HashId::Sha2_512),
    SignatureScheme::Ecdsa(HashId::Sha2_256),
    SignatureScheme::Ecdsa(HashId::Sha2_384),
    SignatureScheme::Ed25519,
];

fn scheme_of(identifier: &[u8]) -> Result<SignatureScheme, SignatureError> {
    IDENTIFIED
        .iter()
        .copied()
        .find(|&scheme| {
            [true, false].into_iter().any(|null| {
                algorithm_identifier(scheme, null).is_some_and(|known| known == identifier)
            })
        })
        .ok_or_else(|| {
            let hex = identifier.iter().map(|octet| format!("{octet:02x}"));
            SignatureError::UnsupportedAlgorithm(hex.collect())
        })
}

/// The DER AlgorithmIdentifier (RFC 7427 appendix A). `null` is whether absent parameters are
/// written as NULL, which RFC 4055 wants for RSA and its hashes, and some peers leave out.
fn algorithm_identifier(scheme: SignatureScheme, null: bool) -> Option<Vec<u8>> {
    const PKCS1: [u8; 8] = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
    let oid_pkcs1 = |last: u8| tlv(0x06, &[&PKCS1, &[last]]);
    let null: &[u8] = if null { &[0x05, 0x00] } else { &[] };
    let identifier = match scheme {
        SignatureScheme::RsaPkcs1(hash) => {
            let last = match hash {
                HashId::Sha2_256 => 11,
                HashId::Sha2_384 => 12,
                HashId::Sha2_512 => 13,
                _ => return None,
            };
            tlv(0x30, &[&oid_pkcs1(last), null])
        }
        SignatureScheme::RsaPss(hash) => {
            let (last, salt) = match hash {
                HashId::Sha2_256 => (1, 32),
                HashId::Sha2_384 => (2, 48),
                HashId::Sha2_512 => (3, 64),
                _ => return None,
            };
            let nist_hash = [0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, last];
            let hash = tlv(0x30, &[&tlv(0x06, &[&nist_hash]), null]);
            let mask = tlv(0x30, &[&oid_pkcs1(8), &hash]);
            let parameters = tlv(
                0x30,
                &[
                    &tlv(0xa0, &[&hash]),
                    &tlv(0xa1, &[&mask]),
                    &tlv(0xa2, &[&tlv(0x02, &[&[salt]])]),
                ],
            );
            tlv(0x30, &[&oid_pkcs1(10), &parameters])
        }
        SignatureScheme::Ecdsa(hash) => {
            let last = match hash {
                HashId::Sha2_256 => 2,
                HashId::Sha2_384 => 3,
                _ => return None,
            };
            let oid = [0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, last];
            tlv(0x30, &[&tlv(0x06, &[&oid])])
        }
        SignatureScheme::Ed25519 => tlv(0x30, &[&tlv(0x06, &[&[0x2b, 0x65, 0x70]])]),
    };
    Some(identifier)
}

/// A DER value shorter than 128 octets.
fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let len = u8::try_from(content.len()).expect("algorithm identifiers are short");
    [&[tag, len][..], &content].concat()
}

/// Turns an ECDSA-Sig-Value into r | s of `width` octets each (RFC 4754 section 7).
fn raw_from_der(signature: &[u8], width: usize) -> Result<Vec<u8>, SignatureError> {
    use crate::credentials::der_value;
    let mut out = vec![0; 2 * width];
    let (content, _) = der_value(signature, 0x30).ok_or(SignatureError::Library)?;
    let (r, rest) = der_value(content, 0x02).ok_or(SignatureError::Library)?;
    let (s, _) = der_value(rest, 0x02).ok_or(SignatureError::Library)?;
    for (integer, end) in [(r, width), (s, 2 * width)] {
        let integer = integer.strip_prefix(&[0]).unwrap_or(integer);
        let start = end
            .checked_sub(integer.len())
            .filter(|&start| start >= end - width)
            .ok_or(SignatureError::Library)?;
        out[start..end].copy_from_slice(integer);
    }
    Ok(out)
}

#[cfg(test)]
#[path = "auth_tests.rs"]
mod tests;
