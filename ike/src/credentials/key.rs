// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Public and private keys.

use ring::signature as rs;
use swanherd_config::model::KeyType;

use super::CredentialError;
use super::der::{bit_string, der_value, from_pem_or_der};
use crate::crypto::auth::{HashId, SignatureError, SignatureScheme};
use crate::crypto::hash::sha1;

/// Curve of an ECDSA key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Curve {
    /// NIST P-256, secp256r1.
    P256,
    /// NIST P-384, secp384r1.
    P384,
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    key_type: KeyType,
    curve: Option<Curve>,
    bits: u16,
    key: Vec<u8>,
    spki: Vec<u8>,
}

impl PublicKey {
    /// Reads a DER SubjectPublicKeyInfo.
    ///
    /// # Errors
    /// If it is malformed, or the key's type or curve is not supported.
    pub fn from_spki(spki: &[u8]) -> Result<Self, CredentialError> {
        let malformed = || CredentialError::Malformed("public key");
        let (content, rest) = der_value(spki, 0x30).ok_or_else(malformed)?;
        let (algorithm, key) = der_value(content, 0x30).ok_or_else(malformed)?;
        let (oid, parameters) = der_value(algorithm, 0x06).ok_or_else(malformed)?;
        let (key, trailing) = bit_string(key).ok_or_else(malformed)?;
        if !rest.is_empty() || !trailing.is_empty() {
            return Err(malformed());
        }
        let (key_type, curve) = algorithm_of(oid, parameters)?;
        let bits = match (key_type, curve) {
            (KeyType::Rsa, _) => rsa_bits(key).ok_or_else(malformed)?,
            (_, Some(Curve::P384)) => 384,
            _ => 256,
        };
        Ok(Self {
            key_type,
            curve,
            bits,
            key: key.to_vec(),
            spki: spki.to_vec(),
        })
    }

    /// Its type.
    pub fn key_type(&self) -> KeyType {
        self.key_type
    }

    /// The type's name, as VICI writes it.
    pub fn type_name(&self) -> &'static str {
        match self.key_type {
            KeyType::Rsa => "RSA",
            KeyType::Ecdsa => "ECDSA",
            KeyType::Ed25519 => "ED25519",
            KeyType::Ed448 => "ED448",
        }
    }

    /// Its curve, if it is an ECDSA key.
    pub fn curve(&self) -> Option<Curve> {
        self.curve
    }

    /// Its size in bits, as strength is usually quoted: the modulus or the field.
    pub fn bits(&self) -> u16 {
        self.bits
    }

    /// Contents of subjectPublicKey.
    pub fn key_octets(&self) -> &[u8] {
        &self.key
    }

    /// DER SubjectPublicKeyInfo.
    pub fn spki(&self) -> &[u8] {
        &self.spki
    }

    /// SHA-1 of subjectPublicKey: the id by which VICI names keys, and the subjectKeyIdentifier
    /// that most authorities write.
    pub fn key_id(&self) -> [u8; 20] {
        sha1(&self.key)
    }

    /// SHA-1 of SubjectPublicKeyInfo: what certificate requests name authorities by.
    pub fn spki_hash(&self) -> [u8; 20] {
        sha1(&self.spki)
    }
}

/// A private key, and its public key.
pub struct PrivateKey {
    public: PublicKey,
    secret: KeyPair,
}

enum KeyPair {
    Rsa(Box<rs::RsaKeyPair>),
    Ecdsa(Box<rs::EcdsaKeyPair>),
    Ed25519(Box<rs::Ed25519KeyPair>),
    /// Stands in for a key that is elsewhere.
    Absent,
}

impl PrivateKey {
    /// Reads PKCS#8, PKCS#1 or SEC 1, in DER or PEM.
    ///
    /// # Errors
    /// If it is malformed, encrypted, or of a type or size that is not supported.
    pub fn parse(data: &[u8]) -> Result<Self, CredentialError> {
        let malformed = || CredentialError::Malformed("private key");
        let (label, der) = from_pem_or_der(data).ok_or_else(malformed)?;
        match label.as_deref() {
            Some("ENCRYPTED PRIVATE KEY") => return Err(CredentialError::EncryptedKey),
            Some("OPENSSH PRIVATE KEY") => {
                return Err(CredentialError::Unsupported(
                    "the OpenSSH key format".to_owned(),
                ));
            }
            _ => {}
        }
        let (content, _) = der_value(&der, 0x30).ok_or_else(malformed)?;
        let (version, body) = der_value(content, 0x02).ok_or_else(malformed)?;
        if let Some((algorithm, rest)) = der_value(body, 0x30) {
            // PKCS#8: version, AlgorithmIdentifier, OCTET STRING.
            let (oid, parameters) = der_value(algorithm, 0x06).ok_or_else(malformed)?;
            let (key, _) = der_value(rest, 0x04).ok_or_else(malformed)?;
            return match algorithm_of(oid, parameters)? {
                (KeyType::Rsa, _) => Self::rsa(key),
                (_, Some(curve)) => Self::ecdsa(key, Some(curve)),
                _ => {
                    let (seed, _) = der_value(key, 0x04).ok_or_else(malformed)?;
                    Self::ed25519(seed)
                }
            };
        }
        // SEC 1 has version 1 and then an OCTET STRING; PKCS#1 version 0 and then INTEGERs.
        if version == [1] && der_value(body, 0x04).is_some() {
            return Self::ecdsa(&der, None);
        }
        if der_value(body, 0x02).is_some() {
            return Self::rsa(&der);
        }
        Err(malformed())
    }

    /// A stand-in for the private key of `public`, for replays: it cannot sign.
    pub(crate) fn stand_in(public: PublicKey) -> Self {
        Self {
            public,
            secret: KeyPair::Absent,
        }
    }

    /// Its public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Signs `message`. ECDSA signatures are ASN.1. Expensive with RSA.
    ///
    /// # Errors
    /// If the scheme does not fit the key.
    pub fn sign(&self, scheme: SignatureScheme, message: &[u8]) -> Result<Vec<u8>, SignatureError> {
        use HashId as H;
        use SignatureScheme as S;
        let random = ring::rand::SystemRandom::new();
        let encoding: &dyn rs::RsaEncoding = match (&self.secret, scheme, self.public.curve) {
            (KeyPair::Rsa(_), S::RsaPkcs1(H::Sha2_256), _) => &rs::RSA_PKCS1_SHA256,
            (KeyPair::Rsa(_), S::RsaPkcs1(H::Sha2_384), _) => &rs::RSA_PKCS1_SHA384,
            (KeyPair::Rsa(_), S::RsaPkcs1(H::Sha2_512), _) => &rs::RSA_PKCS1_SHA512,
            (KeyPair::Rsa(_), S::RsaPss(H::Sha2_256), _) => &rs::RSA_PSS_SHA256,
            (KeyPair::Rsa(_), S::RsaPss(H::Sha2_384), _) => &rs::RSA_PSS_SHA384,
            (KeyPair::Rsa(_), S::RsaPss(H::Sha2_512), _) => &rs::RSA_PSS_SHA512,
            (KeyPair::Ecdsa(key), S::Ecdsa(H::Sha2_256), Some(Curve::P256))
            | (KeyPair::Ecdsa(key), S::Ecdsa(H::Sha2_384), Some(Curve::P384)) => {
                let signature = key
                    .sign(&random, message)
                    .map_err(|_| SignatureError::Library)?;
                return Ok(signature.as_ref().to_vec());
            }
            (KeyPair::Ed25519(key), S::Ed25519, _) => {
                return Ok(key.sign(message).as_ref().to_vec());
            }
            _ => {
                return Err(SignatureError::WrongKey {
                    scheme: scheme.name(),
                    key: self.public.type_name(),
                });
            }
        };
        let KeyPair::Rsa(key) = &self.secret else {
            return Err(SignatureError::Library);
        };
        let mut signature = vec![0; key.public().modulus_len()];
        key.sign(encoding, &random, message, &mut signature)
            .map_err(|_| SignatureError::Library)?;
        Ok(signature)
    }

    fn rsa(der: &[u8]) -> Result<Self, CredentialError> {
        let key = rs::RsaKeyPair::from_der(der)
            .map_err(|error| CredentialError::BadKey("RSA", error.to_string()))?;
        let spki = spki(RSA_ENCRYPTION, &[0x05, 0x00], key.public().as_ref());
        Ok(Self {
            public: PublicKey::from_spki(&spki)?,
            secret: KeyPair::Rsa(Box::new(key)),
        })
    }

    /// From a SEC 1 ECPrivateKey; `curve` is what the structure around it says.
    fn ecdsa(der: &[u8], curve: Option<Curve>) -> Result<Self, CredentialError> {
        let malformed = || CredentialError::Malformed("EC private key");
        let (content, _) = der_value(der, 0x30).ok_or_else(malformed)?;
        let (_, rest) = der_value(content, 0x02).ok_or_else(malformed)?;
        let (secret, mut rest) = der_value(rest, 0x04).ok_or_else(malformed)?;
        let mut curve = curve;
        if let Some((parameters, after)) = der_value(rest, 0xa0) {
            rest = after;
            curve = Some(curve_of(parameters)?);
        }
        let curve = curve.ok_or_else(malformed)?;
        let (wrapped, _) = der_value(rest, 0xa1).ok_or_else(|| {
            CredentialError::Unsupported("an EC private key without its public key".to_owned())
        })?;
        let (point, _) = bit_string(wrapped).ok_or_else(malformed)?;
        let (algorithm, curve_oid, len) = match curve {
            Curve::P256 => (&rs::ECDSA_P256_SHA256_ASN1_SIGNING, OID_P256, 32),
            Curve::P384 => (&rs::ECDSA_P384_SHA384_ASN1_SIGNING, OID_P384, 48),
        };
        // Some tools drop leading zeros.
        let mut padded = zeroize::Zeroizing::new(vec![0; len]);
        let start = len
            .checked_sub(secret.len())
            .ok_or(CredentialError::Malformed("EC private key"))?;
        padded[start..].copy_from_slice(secret);
        let random = ring::rand::SystemRandom::new();
        let key =
            rs::EcdsaKeyPair::from_private_key_and_public_key(algorithm, &padded, point, &random)
                .map_err(|error| CredentialError::BadKey("ECDSA", error.to_string()))?;
        let spki = spki(EC_PUBLIC_KEY, &tlv(0x06, curve_oid), point);
        Ok(Self {
            public: PublicKey::from_spki(&spki)?,
            secret: KeyPair::Ecdsa(Box::new(key)),
        })
    }

    fn ed25519(seed: &[u8]) -> Result<Self, CredentialError> {
        let key = rs::Ed25519KeyPair::from_seed_unchecked(seed)
            .map_err(|error| CredentialError::BadKey("Ed25519", error.to_string()))?;
        let spki = spki(OID_ED25519, &[], rs::KeyPair::public_key(&key).as_ref());
        Ok(Self {
            public: PublicKey::from_spki(&spki)?,
            secret: KeyPair::Ed25519(Box::new(key)),
        })
    }
}

impl core::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PrivateKey")
            .field("type", &self.public.type_name())
            .field("bits", &self.public.bits)
            .finish_non_exhaustive()
    }
}

const RSA_ENCRYPTION: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
const RSASSA_PSS: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0a];
const EC_PUBLIC_KEY: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const OID_P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
const OID_P384: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x22];
const OID_P521: &[u8] = &[0x2b, 0x81, 0x04, 0x00, 0x23];
const OID_ED25519: &[u8] = &[0x2b, 0x65, 0x70];
const OID_ED448: &[u8] = &[0x2b, 0x65, 0x71];

fn algorithm_of(
    oid: &[u8],
    parameters: &[u8],
) -> Result<(KeyType, Option<Curve>), CredentialError> {
    match oid {
        RSA_ENCRYPTION => Ok((KeyType::Rsa, None)),
        EC_PUBLIC_KEY => Ok((KeyType::Ecdsa, Some(curve_of(parameters)?))),
        OID_ED25519 => Ok((KeyType::Ed25519, None)),
        OID_ED448 => Err(CredentialError::Unsupported("an Ed448 key".to_owned())),
        RSASSA_PSS => Err(CredentialError::Unsupported(
            "an RSA key restricted to PSS".to_owned(),
        )),
        _ => Err(CredentialError::Unsupported(
            "a key of unknown type".to_owned(),
        )),
    }
}

fn curve_of(parameters: &[u8]) -> Result<Curve, CredentialError> {
    match der_value(parameters, 0x06) {
        Some((OID_P256, _)) => Ok(Curve::P256),
        Some((OID_P384, _)) => Ok(Curve::P384),
        Some((OID_P521, _)) => Err(CredentialError::Unsupported(
            "an ECDSA P-521 key".to_owned(),
        )),
        _ => Err(CredentialError::Unsupported(
            "an ECDSA key on another curve than P-256 and P-384".to_owned(),
        )),
    }
}

/// Size of the modulus of an RSAPublicKey.
fn rsa_bits(key: &[u8]) -> Option<u16> {
    let (content, _) = der_value(key, 0x30)?;
    let (modulus, _) = der_value(content, 0x02)?;
    let modulus = modulus.strip_prefix(&[0]).unwrap_or(modulus);
    let first = modulus.first()?;
    u16::try_from(modulus.len() * 8)
        .ok()?
        .checked_sub(u16::try_from(first.leading_zeros()).ok()?)
}

fn spki(oid: &[u8], parameters: &[u8], key: &[u8]) -> Vec<u8> {
    let algorithm = tlv(0x30, &[&tlv(0x06, oid), parameters].concat());
    tlv(
        0x30,
        &[algorithm, tlv(0x03, &[&[0], key].concat())].concat(),
    )
}

/// A DER value.
fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    let len = content.len().to_be_bytes();
    let significant = &len[len.iter().take_while(|&&octet| octet == 0).count()..];
    match significant {
        [] => out.push(0),
        [short @ ..=0x7f] => out.push(*short),
        long => {
            out.push(0x80 | u8::try_from(long.len()).expect("a usize has few octets"));
            out.extend_from_slice(long);
        }
    }
    out.extend_from_slice(content);
    out
}
