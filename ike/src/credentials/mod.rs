// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Secrets, keys and certificates that an endpoint authenticates with.
//!
//! [`Credentials`] is a value: the daemon clones it, changes the clone, and shares it behind an
//! `Arc`, so that a negotiation in progress sees one consistent set.

mod certificate;
mod der;
mod key;
mod peer;
mod shared;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use swanherd_config::model::{AuthRound, CertSource, SharedKind, SharedSecret};
use swanherd_ipsec::Identity;

pub use certificate::Certificate;
pub(crate) use der::der_value;
pub use key::{Curve, PrivateKey, PublicKey};
pub use peer::{PeerAuth, PeerAuthError, VerifiedPeer};
pub use shared::SharedMatch;
use shared::SharedSecrets;

/// Why a credential cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// It is neither DER nor PEM of what it should be.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// The key must be decrypted by whoever loads it.
    #[error("the private key is encrypted")]
    EncryptedKey,
    /// It is well-formed, but beyond this build.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// The library refuses the key (type, reason), such as for its size.
    #[error("unusable {0} key: {1}")]
    BadKey(&'static str, String),
    /// Nothing to authenticate with.
    #[error("{0}")]
    Missing(String),
}

/// Everything loaded: shared secrets, private keys, certificates and trust anchors.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    shared: SharedSecrets,
    keys: BTreeMap<[u8; 20], Arc<PrivateKey>>,
    certificates: Vec<Arc<Certificate>>,
}

/// What to authenticate ourselves with.
#[derive(Clone, Debug)]
pub struct LocalCredential {
    /// Our certificate, the first CERT payload; `None` where only a key is configured.
    pub certificate: Option<Arc<Certificate>>,
    /// Its private key.
    pub key: Arc<PrivateKey>,
    /// Intermediates to send after it, from the leaf upwards, without the root.
    pub chain: Vec<Arc<Certificate>>,
}

// Loading and listing.
impl Credentials {
    /// Nothing loaded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a shared secret; one with an id replaces another with the same id.
    pub fn add_shared(&mut self, secret: SharedSecret) {
        self.shared.add(secret);
    }

    /// Removes a shared secret by id. Returns whether there was one.
    pub fn remove_shared(&mut self, id: &str) -> bool {
        self.shared.remove(id)
    }

    /// Every shared secret, in the order of loading.
    pub fn shared(&self) -> impl ExactSizeIterator<Item = &SharedSecret> {
        self.shared.iter()
    }

    /// Adds a private key. Returns its id, the SHA-1 of its subjectPublicKey.
    pub fn add_key(&mut self, key: PrivateKey) -> [u8; 20] {
        let id = key.public().key_id();
        self.keys.insert(id, Arc::new(key));
        id
    }

    /// Removes a private key. Returns whether there was one.
    pub fn remove_key(&mut self, id: &[u8; 20]) -> bool {
        self.keys.remove(id).is_some()
    }

    /// Every private key by id.
    pub fn keys(&self) -> impl Iterator<Item = (&[u8; 20], &Arc<PrivateKey>)> {
        self.keys.iter()
    }

    /// Adds a certificate. One of an authority (basicConstraints) becomes a trust anchor; one of
    /// an end entity is trusted as it is, as if pinned. Adding one twice changes nothing.
    pub fn add_certificate(&mut self, certificate: Certificate) -> Arc<Certificate> {
        if let Some(known) = self.find_certificate(certificate.der()) {
            return known.clone();
        }
        let certificate = Arc::new(certificate);
        self.certificates.push(certificate.clone());
        certificate
    }

    /// Every certificate, in the order of loading.
    pub fn certificates(&self) -> &[Arc<Certificate>] {
        &self.certificates
    }

    /// Whether the private key of a certificate is loaded.
    pub fn has_key(&self, certificate: &Certificate) -> bool {
        self.keys.contains_key(&certificate.public_key().key_id())
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn find_certificate(&self, der: &[u8]) -> Option<&Arc<Certificate>> {
        self.certificates.iter().find(|known| known.der() == der)
    }
}

// What IKE asks.
impl Credentials {
    /// The shared secret of that kind that fits both identities best.
    pub fn shared_secret(
        &self,
        kind: SharedKind,
        local: &Identity,
        remote: &Identity,
    ) -> Option<SharedMatch<'_>> {
        self.shared.best_match(kind, local, remote)
    }

    /// The identity to use for a local round that configures none: the subject of its first
    /// certificate. `None` leaves the choice of the own address.
    pub fn default_identity(&self, round: &AuthRound) -> Option<Identity> {
        let first = round.certs.first()?;
        Some(self.resolve(first).ok()?.subject())
    }

    /// Certificate and key for a local round. `identity` is the IDi or IDr that we send;
    /// `requested` the hashes of the peer's CERTREQ payloads, which only steer the choice where
    /// the round configures no certificate.
    ///
    /// # Errors
    /// [`CredentialError::Missing`] says what is not loaded.
    pub fn local(
        &self,
        round: &AuthRound,
        identity: &Identity,
        requested: &[[u8; 20]],
    ) -> Result<LocalCredential, CredentialError> {
        let configured: Vec<_> = round
            .certs
            .iter()
            .map(|source| self.resolve(source))
            .collect::<Result<_, _>>()?;
        let with_key = |certificate: Arc<Certificate>| {
            let key = self.keys.get(&certificate.public_key().key_id())?.clone();
            let mut chain = self.authorities_of(&certificate);
            let asked = chain
                .iter()
                .any(|link| requested.contains(&link.public_key().spki_hash()));
            chain.retain(|link| !link.is_self_issued());
            let credential = LocalCredential {
                certificate: Some(certificate),
                key,
                chain,
            };
            Some((asked, credential))
        };
        if !configured.is_empty() {
            return first_asked(configured.into_iter().filter_map(with_key)).ok_or_else(|| {
                CredentialError::Missing(
                    "no private key is loaded for the configured certificate".to_owned(),
                )
            });
        }
        let fitting = self
            .certificates
            .iter()
            .filter(|certificate| certificate.has_identity(identity))
            .cloned()
            .filter_map(with_key);
        if let Some(credential) = first_asked(fitting) {
            return Ok(credential);
        }
        for source in &round.pubkeys {
            let public = certificate::public_key_of(source)?;
            if let Some(key) = self.keys.get(&public.key_id()) {
                return Ok(LocalCredential {
                    certificate: None,
                    key: key.clone(),
                    chain: Vec::new(),
                });
            }
        }
        Err(CredentialError::Missing(
            "no certificate with a private key is loaded for the local identity".to_owned(),
        ))
    }

    /// SHA-1 hashes of the authorities that a remote round accepts, for our CERTREQ: the round's
    /// own, or else all.
    pub fn certificate_requests(&self, round: Option<&AuthRound>) -> Vec<[u8; 20]> {
        let of_round: Vec<_> = round
            .into_iter()
            .flat_map(|round| &round.cacerts)
            .filter_map(|source| self.resolve(source).ok())
            .collect();
        let authorities = if of_round.is_empty() {
            &self.certificates
        } else {
            &of_round
        };
        let mut hashes: Vec<_> = authorities
            .iter()
            .filter(|certificate| certificate.is_ca())
            .map(|certificate| certificate.public_key().spki_hash())
            .collect();
        hashes.sort_unstable();
        hashes.dedup();
        hashes
    }

    /// The certificate that a configuration names.
    pub(crate) fn resolve(&self, source: &CertSource) -> Result<Arc<Certificate>, CredentialError> {
        let CertSource::Data(data) = source else {
            return Err(CredentialError::Missing(
                "the certificate's file was not read".to_owned(),
            ));
        };
        let certificate = Certificate::parse(data)?;
        Ok(self
            .find_certificate(certificate.der())
            .cloned()
            .unwrap_or_else(|| Arc::new(certificate)))
    }

    /// The authorities above a certificate as far as they are loaded, from its issuer upwards.
    fn authorities_of(&self, leaf: &Arc<Certificate>) -> Vec<Arc<Certificate>> {
        let mut path: Vec<Arc<Certificate>> = Vec::new();
        while path.len() < MAX_CHAIN {
            let last = path.last().unwrap_or(leaf);
            if last.is_self_issued() {
                break;
            }
            let issuer = self.certificates.iter().find(|candidate| {
                candidate.is_ca() && candidate.issued(last) && !path.contains(candidate)
            });
            let Some(issuer) = issuer else { break };
            path.push(issuer.clone());
        }
        path
    }
}

/// Longest path of authorities: as many intermediates as the verifier accepts, and a root.
const MAX_CHAIN: usize = 7;

/// The first credential that the peer asked for; else the first.
fn first_asked(
    credentials: impl Iterator<Item = (bool, LocalCredential)>,
) -> Option<LocalCredential> {
    let mut first = None;
    for (asked, credential) in credentials {
        if asked {
            return Some(credential);
        }
        first.get_or_insert(credential);
    }
    first
}
