// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether a peer is who it says: certificate path, identity, constraints and signature.

use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use swanherd_config::model::{self, AuthRound, PubkeyConstraints, Revocation, SignatureHash};
use swanherd_ipsec::Identity;

use super::certificate::public_key_of;
use super::{Certificate, Credentials, PublicKey};
use crate::crypto::auth::{SignatureError, SignatureScheme, hash_id, verify_signature};
use crate::wire::AuthMethod;

/// Everything needed to verify a peer's signature. Expensive to verify; see
/// [`crate::compute::Job::Verify`].
#[derive(Clone)]
pub struct PeerAuth {
    /// Trust anchors and pinned certificates.
    pub credentials: Arc<Credentials>,
    /// The remote round whose constraints apply.
    pub round: AuthRound,
    /// The peer's IDi or IDr. That the round's `id` admits it is for the caller to check.
    pub identity: Identity,
    /// X.509 certificates of the peer's CERT payloads (encoding 4), as received.
    pub certificates: Vec<Vec<u8>>,
    /// Method of the peer's AUTH payload.
    pub method: AuthMethod,
    /// Data of the peer's AUTH payload.
    pub auth: Vec<u8>,
    /// What the peer should have signed, from [`crate::crypto::auth::signed_octets`].
    pub octets: Vec<u8>,
    /// Seconds since the epoch, for validity.
    pub unix: u64,
}

/// A peer that has proven its identity.
#[derive(Clone, Debug)]
pub struct VerifiedPeer {
    /// Its certificate; `None` if its raw public key is configured.
    pub certificate: Option<Arc<Certificate>>,
    /// Its public key.
    pub key: PublicKey,
    /// How it signed.
    pub scheme: SignatureScheme,
    /// Authorities from its issuer up to the trust anchor. Empty if the certificate itself is
    /// trusted.
    pub authorities: Vec<Arc<Certificate>>,
}

/// Why a peer is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerAuthError {
    /// It sent no certificate, and none is loaded for its identity.
    #[error("no certificate for the peer's identity was received or is loaded")]
    NoCertificate,
    /// Its certificate is for somebody else.
    #[error("the peer's certificate does not contain its identity; it is for: {0}")]
    Identity(String),
    /// Its certificate cannot be read.
    #[error("the peer's certificate cannot be used: {0}")]
    Certificate(String),
    /// The configuration accepts certain certificates only, and this is none of them.
    #[error("the peer's certificate is not one of those configured")]
    NotPinned,
    /// It is outside its validity.
    #[error("the certificate of {0} is expired or not yet valid")]
    Validity(String),
    /// No path to a trust anchor.
    #[error("the peer's certificate is not trusted: {0}")]
    Untrusted(String),
    /// A constraint of the configuration is not met.
    #[error("constraint not met: {0}")]
    Constraint(String),
    /// The signature.
    #[error(transparent)]
    Signature(#[from] SignatureError),
    /// Any of these, as a recording tells it.
    #[error("{0}")]
    Recorded(String),
}

impl PeerAuth {
    /// Verifies.
    ///
    /// # Errors
    /// The reason that the best candidate was refused.
    pub fn verify(&self) -> Result<VerifiedPeer, PeerAuthError> {
        let mut refused = None;
        for candidate in self.candidates()? {
            match self.verify_candidate(candidate) {
                Ok(verified) => return Ok(verified),
                // The first candidate is the one that the peer meant.
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
        Err(refused.unwrap_or(PeerAuthError::NoCertificate))
    }

    /// Whom the peer may be: received certificates first, then what is configured and loaded.
    fn candidates(&self) -> Result<Vec<Candidate>, PeerAuthError> {
        let received = self.received();
        let pinned = self.pinned()?;
        let loaded = self.credentials.certificates();
        let mut candidates: Vec<Candidate> = Vec::new();
        let all = received.iter().flatten().chain(&pinned).chain(loaded);
        for certificate in all {
            let known = candidates
                .iter()
                .any(|known| known.certificate.as_ref() == Some(certificate));
            if !known && certificate.has_identity(&self.identity) {
                candidates.push(Candidate {
                    key: certificate.public_key().clone(),
                    certificate: Some(certificate.clone()),
                });
            }
        }
        for source in &self.round.pubkeys {
            let key = public_key_of(source)
                .map_err(|error| PeerAuthError::Certificate(error.to_string()))?;
            candidates.push(Candidate {
                key,
                certificate: None,
            });
        }
        candidates.truncate(MAX_CANDIDATES);
        if candidates.is_empty() {
            return Err(match received.into_iter().next() {
                None => PeerAuthError::NoCertificate,
                Some(Ok(first)) => PeerAuthError::Identity(first.describe_names()),
                Some(Err(reason)) => PeerAuthError::Certificate(reason),
            });
        }
        Ok(candidates)
    }

    fn received(&self) -> Vec<Result<Arc<Certificate>, String>> {
        self.certificates
            .iter()
            .take(MAX_RECEIVED)
            .map(|der| {
                Certificate::parse(der)
                    .map(Arc::new)
                    .map_err(|error| error.to_string())
            })
            .collect()
    }

    fn pinned(&self) -> Result<Vec<Arc<Certificate>>, PeerAuthError> {
        self.round
            .certs
            .iter()
            .map(|source| {
                self.credentials
                    .resolve(source)
                    .map_err(|error| PeerAuthError::Certificate(error.to_string()))
            })
            .collect()
    }

    fn verify_candidate(&self, candidate: Candidate) -> Result<VerifiedPeer, PeerAuthError> {
        let constraints = self.constraints()?;
        key_satisfies(&candidate.key, constraints)?;
        let authorities = match &candidate.certificate {
            Some(certificate) => self.trust(certificate)?,
            None => Vec::new(),
        };
        let scheme = verify_signature(self.method, &candidate.key, &self.octets, &self.auth)?;
        let hashes = &constraints.hashes;
        let hash_fits =
            hashes.is_empty() || hashes.iter().any(|&hash| hash_id(hash) == scheme.hash());
        let padding_fits = !constraints.rsa_pss || !matches!(scheme, SignatureScheme::RsaPkcs1(_));
        if !hash_fits || !padding_fits {
            return Err(PeerAuthError::Constraint(format!(
                "the peer signed with {}, but {} is required",
                scheme.name(),
                constraints.text
            )));
        }
        Ok(VerifiedPeer {
            certificate: candidate.certificate,
            key: candidate.key,
            scheme,
            authorities,
        })
    }

    fn constraints(&self) -> Result<&PubkeyConstraints, PeerAuthError> {
        static NONE: PubkeyConstraints = PubkeyConstraints {
            text: String::new(),
            key_type: None,
            min_bits: None,
            hashes: Vec::new(),
            rsa_pss: false,
            ike_only: false,
        };
        if !self.round.groups.is_empty() {
            return Err(PeerAuthError::Constraint(
                "`groups` is configured, but nothing can prove a membership".to_owned(),
            ));
        }
        match &self.round.auth {
            model::AuthMethod::Pubkey(constraints) => Ok(constraints),
            model::AuthMethod::Any => Ok(&NONE),
            model::AuthMethod::Psk => Err(PeerAuthError::Constraint(
                "the peer must authenticate with a pre-shared key".to_owned(),
            )),
            model::AuthMethod::Eap(text) => Err(PeerAuthError::Constraint(format!(
                "the peer must authenticate with {text}"
            ))),
        }
    }

    /// Why to trust a certificate: the authorities above it, none if it is trusted as it is.
    fn trust(&self, leaf: &Arc<Certificate>) -> Result<Vec<Arc<Certificate>>, PeerAuthError> {
        let pinned = self.pinned()?;
        if !pinned.is_empty() && !pinned.contains(leaf) {
            return Err(PeerAuthError::NotPinned);
        }
        let authorities_constrained = !self.round.cacerts.is_empty()
            || self.round.ca_id.is_some()
            || !self.round.cert_policy.is_empty();
        let loaded = self.credentials.find_certificate(leaf.der()).is_some();
        let trusted_as_is = !pinned.is_empty() || (loaded && !leaf.is_ca());
        let path = if trusted_as_is && !authorities_constrained {
            if !leaf.valid_at(self.unix) {
                return Err(PeerAuthError::Validity(leaf.describe_names()));
            }
            Vec::new()
        } else {
            self.path(leaf)?
        };
        self.strength(&path)?;
        self.revocation(leaf, &path)?;
        self.policies(leaf, &path)?;
        Ok(path)
    }

    /// Builds and verifies a path to a trust anchor (RFC 5280 section 6).
    fn path(&self, leaf: &Certificate) -> Result<Vec<Arc<Certificate>>, PeerAuthError> {
        let untrusted = |reason: &str| PeerAuthError::Untrusted(reason.to_owned());
        let accepted: Vec<_> = if self.round.cacerts.is_empty() {
            let loaded = self.credentials.certificates().iter().cloned();
            loaded
                .filter(|certificate| certificate.is_ca() && certificate.is_self_issued())
                .collect()
        } else {
            self.round
                .cacerts
                .iter()
                .map(|source| self.credentials.resolve(source))
                .collect::<Result<_, _>>()
                .map_err(|error| PeerAuthError::Certificate(error.to_string()))?
        };
        if accepted.is_empty() {
            return Err(untrusted("no certificate of an authority is loaded"));
        }
        let (valid, expired): (Vec<_>, Vec<_>) = accepted
            .into_iter()
            .partition(|certificate| certificate.valid_at(self.unix));
        if let (true, Some(expired)) = (valid.is_empty(), expired.first()) {
            return Err(PeerAuthError::Validity(expired.describe_names()));
        }
        let valid_der: Vec<_> = valid
            .iter()
            .map(|certificate| CertificateDer::from(certificate.der()))
            .collect();
        let anchors: Vec<TrustAnchor<'_>> = valid_der
            .iter()
            .filter_map(|der| webpki::anchor_from_trusted_cert(der).ok())
            .collect();

        let received: Vec<_> = self.received().into_iter().flatten().collect();
        let loaded = self.credentials.certificates().iter().cloned();
        let intermediates: Vec<_> = received
            .into_iter()
            .chain(loaded)
            .filter(|certificate| certificate.is_ca() && !certificate.is_self_issued())
            .collect();
        let intermediates_der: Vec<_> = intermediates
            .iter()
            .map(|certificate| CertificateDer::from(certificate.der()))
            .collect();

        // What a path consists of, from the leaf's issuer to the anchor.
        let links = |path: &webpki::VerifiedPath<'_>| {
            let mut links: Vec<Arc<Certificate>> = path
                .intermediate_certificates()
                .filter_map(|link| {
                    let der = link.der();
                    intermediates
                        .iter()
                        .find(|known| known.der() == der.as_ref())
                })
                .cloned()
                .collect();
            let anchor = path.anchor();
            links.extend(valid.iter().find(|known| is_anchor(known, anchor)).cloned());
            links
        };
        let admitted = |path: &webpki::VerifiedPath<'_>| {
            let Some(ca_id) = &self.round.ca_id else {
                return Ok(());
            };
            if links(path)
                .iter()
                .any(|link| ca_id.matches(&link.subject()).is_some())
            {
                Ok(())
            } else {
                Err(webpki::Error::UnknownIssuer)
            }
        };

        let der = CertificateDer::from(leaf.der());
        let end_entity =
            webpki::EndEntityCert::try_from(&der).map_err(|error| untrusted(&describe(&error)))?;
        let path = end_entity
            .verify_for_usage(
                &path_algorithms(self.constraints()?),
                &anchors,
                &intermediates_der,
                UnixTime::since_unix_epoch(Duration::from_secs(self.unix)),
                IpsecUsage,
                None,
                Some(&admitted),
            )
            .map_err(|error| match error {
                webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. } => {
                    PeerAuthError::Validity(leaf.describe_names())
                }
                error => untrusted(&describe(&error)),
            })?;
        Ok(links(&path))
    }

    /// Keys of authorities must be as strong as the peer's must, type by type.
    fn strength(&self, path: &[Arc<Certificate>]) -> Result<(), PeerAuthError> {
        let constraints = self.constraints()?;
        let (Some(least), false) = (constraints.min_bits, constraints.ike_only) else {
            return Ok(());
        };
        let weak = path.iter().find(|link| {
            let key = link.public_key();
            constraints.key_type == Some(key.key_type()) && key.bits() < least
        });
        let Some(weak) = weak else { return Ok(()) };
        Err(PeerAuthError::Constraint(format!(
            "the key of {} has {} bits, but {} is required",
            weak.describe_names(),
            weak.public_key().bits(),
            constraints.text
        )))
    }

    fn revocation(
        &self,
        leaf: &Certificate,
        path: &[Arc<Certificate>],
    ) -> Result<(), PeerAuthError> {
        let names_uri = leaf.names_revocation_uri()
            || path
                .iter()
                .any(|link| !link.is_self_issued() && link.names_revocation_uri());
        match self.round.revocation {
            Revocation::Relaxed => Ok(()),
            Revocation::IfUri if !names_uri => Ok(()),
            Revocation::IfUri | Revocation::Strict => Err(PeerAuthError::Constraint(
                "`revocation` demands a certificate status, which cannot be obtained".to_owned(),
            )),
        }
    }

    /// One of the demanded policies must hold from the leaf up to below the anchor.
    fn policies(&self, leaf: &Certificate, path: &[Arc<Certificate>]) -> Result<(), PeerAuthError> {
        let demanded = &self.round.cert_policy;
        let below_anchor = path.split_last().map_or(&[][..], |(_, below)| below);
        let holds = |policy: &String| {
            leaf.policies().contains(policy)
                && below_anchor.iter().all(|link| {
                    let policies = link.policies();
                    policies.contains(policy) || policies.iter().any(|held| held == ANY_POLICY)
                })
        };
        if demanded.is_empty() || demanded.iter().any(holds) {
            return Ok(());
        }
        Err(PeerAuthError::Constraint(format!(
            "certificate policy {} is required",
            demanded.join(" or ")
        )))
    }
}

impl core::fmt::Debug for PeerAuth {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PeerAuth")
            .field("identity", &self.identity)
            .field("certificates", &self.certificates.len())
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

/// A public key that may be the peer's.
struct Candidate {
    key: PublicKey,
    certificate: Option<Arc<Certificate>>,
}

/// A hostile peer can make us parse this many certificates,
const MAX_RECEIVED: usize = 16;
/// and verify this many paths and signatures.
const MAX_CANDIDATES: usize = 4;

const ANY_POLICY: &str = "2.5.29.32.0";

fn key_satisfies(key: &PublicKey, constraints: &PubkeyConstraints) -> Result<(), PeerAuthError> {
    let type_fits = constraints
        .key_type
        .is_none_or(|wanted| wanted == key.key_type());
    let size_fits = constraints.min_bits.is_none_or(|least| key.bits() >= least);
    if type_fits && size_fits {
        return Ok(());
    }
    Err(PeerAuthError::Constraint(format!(
        "the peer has a {} key of {} bits, but {} is required",
        key.type_name(),
        key.bits(),
        constraints.text
    )))
}

/// The signature algorithms that certificates of a path may be signed with.
fn path_algorithms(
    constraints: &PubkeyConstraints,
) -> Vec<&'static dyn SignatureVerificationAlgorithm> {
    use webpki::ring as algorithms;
    if constraints.ike_only || constraints.hashes.is_empty() {
        return webpki::ALL_VERIFICATION_ALGS.to_vec();
    }
    let mut admitted = Vec::new();
    for hash in &constraints.hashes {
        let of_hash: &[&'static dyn SignatureVerificationAlgorithm] = match hash {
            SignatureHash::Sha1 => &[],
            SignatureHash::Sha256 => &[
                algorithms::ECDSA_P256_SHA256,
                algorithms::ECDSA_P384_SHA256,
                algorithms::RSA_PKCS1_2048_8192_SHA256,
                algorithms::RSA_PKCS1_2048_8192_SHA256_ABSENT_PARAMS,
                algorithms::RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
            ],
            SignatureHash::Sha384 => &[
                algorithms::ECDSA_P256_SHA384,
                algorithms::ECDSA_P384_SHA384,
                algorithms::RSA_PKCS1_2048_8192_SHA384,
                algorithms::RSA_PKCS1_2048_8192_SHA384_ABSENT_PARAMS,
                algorithms::RSA_PSS_2048_8192_SHA384_LEGACY_KEY,
            ],
            SignatureHash::Sha512 => &[
                algorithms::RSA_PKCS1_2048_8192_SHA512,
                algorithms::RSA_PKCS1_2048_8192_SHA512_ABSENT_PARAMS,
                algorithms::RSA_PSS_2048_8192_SHA512_LEGACY_KEY,
            ],
            SignatureHash::Identity => &[algorithms::ED25519],
        };
        admitted.extend_from_slice(of_hash);
    }
    admitted
}

fn is_anchor(certificate: &Certificate, anchor: &TrustAnchor<'_>) -> bool {
    let subject =
        super::der_value(&certificate.subject().data, 0x30).map(|(name, _)| name.to_vec());
    let spki = super::der_value(certificate.public_key().spki(), 0x30).map(|(key, _)| key);
    subject.as_deref() == Some(anchor.subject.as_ref())
        && spki == Some(anchor.subject_public_key_info.as_ref())
}

/// Extended key usages that a peer's certificate may have, if it restricts them at all. RFC 4945
/// section 5.1.3.12 advises against any, but authorities write TLS and the retired IPsec usages.
struct IpsecUsage;

impl webpki::ExtendedKeyUsageValidator for IpsecUsage {
    fn validate(&self, usages: webpki::KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let mut restricted = false;
        for usage in usages {
            let usage = usage?.to_decoded_oid();
            if ACCEPTED_USAGES.contains(&usage.as_slice()) {
                return Ok(());
            }
            restricted = true;
        }
        if restricted {
            return Err(webpki::Error::RequiredEkuNotFoundContext(
                webpki::RequiredEkuNotFoundContext {
                    required: webpki::KeyUsage::required(IPSEC_IKE),
                    present: Vec::new(),
                },
            ));
        }
        Ok(())
    }
}

/// id-kp-ipsecIKE (RFC 4945).
const IPSEC_IKE: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x11];

const ACCEPTED_USAGES: &[&[usize]] = &[
    // serverAuth, clientAuth
    &[1, 3, 6, 1, 5, 5, 7, 3, 1],
    &[1, 3, 6, 1, 5, 5, 7, 3, 2],
    // ipsecEndSystem, ipsecTunnel, ipsecUser
    &[1, 3, 6, 1, 5, 5, 7, 3, 5],
    &[1, 3, 6, 1, 5, 5, 7, 3, 6],
    &[1, 3, 6, 1, 5, 5, 7, 3, 7],
    // ipsecIKE, iKEIntermediate
    &[1, 3, 6, 1, 5, 5, 7, 3, 17],
    &[1, 3, 6, 1, 5, 5, 8, 2, 2],
    // anyExtendedKeyUsage
    &[2, 5, 29, 37, 0],
];

/// The verifier's reasons in words.
fn describe(error: &webpki::Error) -> String {
    match error {
        webpki::Error::UnknownIssuer => "no path to a loaded authority".to_owned(),
        webpki::Error::CaUsedAsEndEntity => {
            "it is the certificate of an authority; configure it with `certs` to pin it".to_owned()
        }
        webpki::Error::RequiredEkuNotFoundContext(_) => {
            "its extended key usage does not allow IPsec".to_owned()
        }
        error => error.to_string(),
    }
}
