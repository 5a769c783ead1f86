// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::net::IpAddr;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, DnValue,
    ExtendedKeyUsagePurpose as Usage, IsCa, KeyPair, SanType,
};
use swanherd_config::identity::{IdentityPattern, same_identity};
use swanherd_config::model::{AuthMethod, KeyType, PubkeyConstraints, Revocation, SignatureHash};
use swanherd_ipsec::Secret;
use swanherd_ipsec::identity::IdType;

use super::*;
use crate::crypto::auth::{ANNOUNCED_HASHES, HashId, SignatureError, SignatureScheme, SigningPlan};
use crate::crypto::test_util::hex;

mod keys;
mod local;
mod peer;
mod shared;

/// Within the validity of what rcgen makes by default.
const NOW: u64 = 1_900_000_000;
const OCTETS: &[u8] = b"what the peer signs";

type Ca = CertifiedIssuer<'static, KeyPair>;

fn name(params: &mut CertificateParams, cn: &str) {
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CountryName, "CH");
    params
        .distinguished_name
        .push(DnType::CommonName, cn.to_owned());
}

fn ca_params(cn: &str) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    name(&mut params, cn);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

fn root(cn: &str) -> Ca {
    CertifiedIssuer::self_signed(ca_params(cn), KeyPair::generate().unwrap()).unwrap()
}

fn intermediate(cn: &str, issuer: &Ca) -> Ca {
    CertifiedIssuer::signed_by(ca_params(cn), KeyPair::generate().unwrap(), issuer).unwrap()
}

fn leaf_params(host: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
    name(&mut params, host);
    params
}

/// A peer with a certificate.
struct Peer {
    certificate: Certificate,
    key: PrivateKey,
}

impl Peer {
    fn new(params: &CertificateParams, issuer: &Ca) -> Self {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, issuer).unwrap();
        Self::from_parts(certificate.der(), &key)
    }

    fn self_signed(params: &CertificateParams) -> Self {
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        Self::from_parts(certificate.der(), &key)
    }

    fn from_parts(der: &[u8], key: &KeyPair) -> Self {
        Self {
            certificate: Certificate::parse(der).unwrap(),
            key: PrivateKey::parse(key.serialized_der()).unwrap(),
        }
    }

    fn source(&self) -> CertSource {
        CertSource::Data(self.certificate.der().to_vec())
    }

    fn authenticates(&self, trusted: &[&[u8]], round: AuthRound, identity: Identity) -> PeerAuth {
        let mut credentials = Credentials::new();
        for der in trusted {
            credentials.add_certificate(Certificate::parse(der).unwrap());
        }
        let plan = SigningPlan::choose(
            self.key.public(),
            ANNOUNCED_HASHES,
            &PubkeyConstraints::default(),
        )
        .unwrap();
        PeerAuth {
            credentials: Arc::new(credentials),
            round,
            identity,
            certificates: vec![self.certificate.der().to_vec()],
            method: plan.method,
            auth: plan.sign(&self.key, OCTETS).unwrap(),
            octets: OCTETS.to_vec(),
            unix: NOW,
        }
    }
}

fn round() -> AuthRound {
    AuthRound {
        section: "remote".to_owned(),
        round: 0,
        auth: AuthMethod::Pubkey(PubkeyConstraints::default()),
        id: None,
        certs: Vec::new(),
        cacerts: Vec::new(),
        pubkeys: Vec::new(),
        ca_id: None,
        eap_id: None,
        groups: Vec::new(),
        cert_policy: Vec::new(),
        revocation: Revocation::Relaxed,
    }
}

fn source(ca: &Ca) -> CertSource {
    CertSource::Data(ca.der().to_vec())
}

fn gw() -> Identity {
    Identity::fqdn("gw.example.org")
}

fn dn(text: &str) -> Identity {
    IdentityPattern::parse(text).unwrap().identity().unwrap()
}
