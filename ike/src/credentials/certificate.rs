// SPDX-License-Identifier: Apache-2.0 OR MIT
//! X.509 certificates, as far as IKE looks into them.

use core::fmt::Write as _;

use der::{Decode as _, Encode as _};
use swanherd_config::identity::{display_identity, same_identity};
use swanherd_config::model::CertSource;
use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;
use x509_cert::ext::pkix::name::{DistributionPointName, GeneralName};
use x509_cert::ext::pkix::{
    AuthorityInfoAccessSyntax, AuthorityKeyIdentifier, BasicConstraints, CertificatePolicies,
    CrlDistributionPoints, ExtendedKeyUsage, SubjectAltName, SubjectKeyIdentifier,
};

use super::der::from_pem_or_der;
use super::{CredentialError, PublicKey};

/// An X.509 certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificate {
    der: Vec<u8>,
    subject: Vec<u8>,
    issuer: Vec<u8>,
    serial: Vec<u8>,
    not_before: u64,
    not_after: u64,
    public_key: PublicKey,
    is_ca: bool,
    alternative_names: Vec<Identity>,
    subject_key_id: Option<Vec<u8>>,
    authority_key_id: Option<Vec<u8>>,
    extended_key_usage: Vec<String>,
    policies: Vec<String>,
    names_revocation_uri: bool,
}

impl Certificate {
    /// Reads a certificate from DER or PEM (the first one in the file).
    ///
    /// # Errors
    /// If it is malformed, or its key is of a type that is not supported.
    pub fn parse(data: &[u8]) -> Result<Self, CredentialError> {
        let malformed = |_| CredentialError::Malformed("X.509 certificate");
        let (label, der) =
            from_pem_or_der(data).ok_or(CredentialError::Malformed("X.509 certificate"))?;
        if let Some(label) = label
            && !matches!(label.as_str(), "CERTIFICATE" | "X509 CERTIFICATE")
        {
            return Err(CredentialError::Malformed("X.509 certificate"));
        }
        let parsed = x509_cert::Certificate::from_der(&der).map_err(malformed)?;
        let tbs = parsed.tbs_certificate();
        let spki = tbs.subject_public_key_info().to_der().map_err(malformed)?;
        let is_ca = extension::<BasicConstraints>(tbs)?.is_some_and(|basic| basic.ca);
        let alternative_names = extension::<SubjectAltName>(tbs)?
            .map(|names| names.0.iter().filter_map(identity_of).collect())
            .unwrap_or_default();
        let subject_key_id =
            extension::<SubjectKeyIdentifier>(tbs)?.map(|id| id.0.into_bytes().into_vec());
        let authority_key_id = extension::<AuthorityKeyIdentifier>(tbs)?
            .and_then(|id| id.key_identifier)
            .map(|id| id.into_bytes().into_vec());
        let extended_key_usage = extension::<ExtendedKeyUsage>(tbs)?
            .map(|usages| usages.0.iter().map(ToString::to_string).collect())
            .unwrap_or_default();
        let policies = extension::<CertificatePolicies>(tbs)?
            .map(|policies| {
                policies
                    .0
                    .iter()
                    .map(|policy| policy.policy_identifier.to_string())
                    .collect()
            })
            .unwrap_or_default();
        let has_crl_uri = extension::<CrlDistributionPoints>(tbs)?.is_some_and(|points| {
            points.0.iter().any(|point| {
                matches!(
                    &point.distribution_point,
                    Some(DistributionPointName::FullName(names))
                        if names.iter().any(|name| {
                            matches!(name, GeneralName::UniformResourceIdentifier(_))
                        })
                )
            })
        });
        let has_ocsp_uri = extension::<AuthorityInfoAccessSyntax>(tbs)?.is_some_and(|access| {
            access
                .0
                .iter()
                .any(|entry| entry.access_method.to_string() == OCSP)
        });
        Ok(Self {
            subject: tbs.subject().to_der().map_err(malformed)?,
            issuer: tbs.issuer().to_der().map_err(malformed)?,
            serial: tbs.serial_number().as_bytes().to_vec(),
            not_before: tbs.validity().not_before.to_unix_duration().as_secs(),
            not_after: tbs.validity().not_after.to_unix_duration().as_secs(),
            public_key: PublicKey::from_spki(&spki)?,
            is_ca,
            alternative_names,
            subject_key_id,
            authority_key_id,
            extended_key_usage,
            policies,
            names_revocation_uri: has_crl_uri || has_ocsp_uri,
            der: der.to_vec(),
        })
    }

    /// The certificate, DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Subject, as an identity.
    pub fn subject(&self) -> Identity {
        dn(&self.subject)
    }

    /// Issuer, as an identity.
    pub fn issuer(&self) -> Identity {
        dn(&self.issuer)
    }

    /// subjectAltNames that IKE has identity types for.
    pub fn alternative_names(&self) -> &[Identity] {
        &self.alternative_names
    }

    /// Serial number, big-endian.
    pub fn serial(&self) -> &[u8] {
        &self.serial
    }

    /// Validity in seconds since the epoch, first and last.
    pub fn validity(&self) -> (u64, u64) {
        (self.not_before, self.not_after)
    }

    /// Whether `unix`, seconds since the epoch, lies within its validity.
    pub fn valid_at(&self, unix: u64) -> bool {
        (self.not_before..=self.not_after).contains(&unix)
    }

    /// Its public key.
    pub fn public_key(&self) -> &PublicKey {
        &self.public_key
    }

    /// Whether it is of an authority (basicConstraints).
    pub fn is_ca(&self) -> bool {
        self.is_ca
    }

    /// Whether subject and issuer are the same.
    pub fn is_self_issued(&self) -> bool {
        self.subject == self.issuer
    }

    /// subjectKeyIdentifier.
    pub fn subject_key_id(&self) -> Option<&[u8]> {
        self.subject_key_id.as_deref()
    }

    /// keyIdentifier of authorityKeyIdentifier.
    pub fn authority_key_id(&self) -> Option<&[u8]> {
        self.authority_key_id.as_deref()
    }

    /// Extended key usages, as dotted object identifiers.
    pub fn extended_key_usage(&self) -> &[String] {
        &self.extended_key_usage
    }

    /// Certificate policies, as dotted object identifiers.
    pub fn policies(&self) -> &[String] {
        &self.policies
    }

    /// Whether it says where to ask for its revocation.
    pub fn names_revocation_uri(&self) -> bool {
        self.names_revocation_uri
    }

    /// Whether this certificate is for `identity`: a distinguished name equal to the subject, a
    /// key id equal to the subjectKeyIdentifier, or a subjectAltName of the same type and value.
    pub fn has_identity(&self, identity: &Identity) -> bool {
        match identity.id_type {
            IdType::DerAsn1Dn if same_identity(&self.subject(), identity) => true,
            IdType::KeyId => {
                self.subject_key_id.as_deref() == Some(&identity.data)
                    || self.public_key.key_id() == identity.data.as_slice()
            }
            _ => self
                .alternative_names
                .iter()
                .any(|name| same_identity(name, identity)),
        }
    }

    /// Whether this is, by names and key ids, the issuer of `other`. The signature is not checked.
    pub fn issued(&self, other: &Self) -> bool {
        let key_ids_fit = match (&self.subject_key_id, &other.authority_key_id) {
            (Some(subject), Some(authority)) => subject == authority,
            _ => true,
        };
        same_identity(&self.subject(), &other.issuer()) && key_ids_fit
    }

    /// The names it is for, for error messages.
    pub fn describe_names(&self) -> String {
        let mut out = display_identity(&self.subject());
        for name in &self.alternative_names {
            let _ = write!(out, ", {}", display_identity(name));
        }
        out
    }
}

impl core::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Certificate({})", display_identity(&self.subject()))
    }
}

/// The public key of a `pubkeys` entry: a SubjectPublicKeyInfo, PEM or DER.
pub(crate) fn public_key_of(source: &CertSource) -> Result<PublicKey, CredentialError> {
    let CertSource::Data(data) = source else {
        return Err(CredentialError::Missing(
            "the public key's file was not read".to_owned(),
        ));
    };
    let (_, der) = from_pem_or_der(data).ok_or(CredentialError::Malformed("public key"))?;
    PublicKey::from_spki(&der)
}

const OCSP: &str = "1.3.6.1.5.5.7.48.1";

fn extension<'a, T: der::Decode<'a, Error = der::Error> + der::oid::AssociatedOid>(
    tbs: &'a x509_cert::TbsCertificate,
) -> Result<Option<T>, CredentialError> {
    match tbs.get_extension::<T>() {
        Ok(found) => Ok(found.map(|(_, value)| value)),
        Err(_) => Err(CredentialError::Malformed("X.509 certificate extension")),
    }
}

fn dn(der: &[u8]) -> Identity {
    Identity {
        id_type: IdType::DerAsn1Dn,
        data: der.to_vec(),
    }
}

fn identity_of(name: &GeneralName) -> Option<Identity> {
    let (id_type, data) = match name {
        GeneralName::DnsName(name) => (IdType::Fqdn, name.as_bytes().to_vec()),
        GeneralName::Rfc822Name(name) => (IdType::Rfc822Addr, name.as_bytes().to_vec()),
        GeneralName::DirectoryName(name) => (IdType::DerAsn1Dn, name.to_der().ok()?),
        GeneralName::IpAddress(octets) => match octets.as_bytes().len() {
            4 => (IdType::Ipv4Addr, octets.as_bytes().to_vec()),
            16 => (IdType::Ipv6Addr, octets.as_bytes().to_vec()),
            _ => return None,
        },
        _ => return None,
    };
    Some(Identity { id_type, data })
}
