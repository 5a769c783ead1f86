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

/// Within the validity of what rcgen makes by default.
const NOW: u64 = 1_900_000_000;
const OCTETS: &[u8] = b"what the peer signs";

mod keys {
    use super::*;

    const RSA_PKCS1: &[u8] = include_bytes!("testdata/rsa2048.pkcs1.pem");
    const RSA_PKCS8: &[u8] = include_bytes!("testdata/rsa2048.pkcs8.pem");
    const P256_SEC1: &[u8] = include_bytes!("testdata/p256.sec1.pem");
    const P256_PKCS8: &[u8] = include_bytes!("testdata/p256.pkcs8.pem");
    const P384: &[u8] = include_bytes!("testdata/p384.pkcs8.pem");
    const ED25519: &[u8] = include_bytes!("testdata/ed25519.pkcs8.pem");

    #[test]
    fn every_container_yields_the_key_with_the_id_that_openssl_gives() {
        for (pem, name, bits, id) in [
            (
                RSA_PKCS1,
                "RSA",
                2048,
                "e52285db80b15ccb772724cfbcb44d30c32954f9",
            ),
            (
                RSA_PKCS8,
                "RSA",
                2048,
                "e52285db80b15ccb772724cfbcb44d30c32954f9",
            ),
            (
                P256_SEC1,
                "ECDSA",
                256,
                "4647dc7d9693b721c8cfa279b4e79094609f0d59",
            ),
            (
                P256_PKCS8,
                "ECDSA",
                256,
                "4647dc7d9693b721c8cfa279b4e79094609f0d59",
            ),
            (
                P384,
                "ECDSA",
                384,
                "161af8098832f17f72818307328576b51d86eee9",
            ),
            (
                ED25519,
                "ED25519",
                256,
                "4e05fb726bd9ba164fa3675893fd3bf300c50ea7",
            ),
        ] {
            let (_, der) = der::from_pem_or_der(pem).unwrap();
            for data in [pem, &der] {
                let data = match data.strip_prefix(b"-----BEGIN EC PARAMETERS") {
                    Some(_) => pem,
                    None => data,
                };

                let key = PrivateKey::parse(data).unwrap();

                assert_eq!(key.public().type_name(), name);
                assert_eq!(key.public().bits(), bits);
                assert_eq!(hex(&key.public().key_id()), id);
            }
        }
    }

    #[test]
    fn spki_hash_is_that_of_the_whole_structure() {
        let key = PrivateKey::parse(RSA_PKCS1).unwrap();

        assert_eq!(
            hex(&key.public().spki_hash()),
            "70cdc4c05e36ae3c8373e9c4f0ce0345840074c3"
        );
    }

    #[test]
    fn keys_beyond_this_build_are_named() {
        let unsupported = |what: &str| CredentialError::Unsupported(what.to_owned());
        for (pem, expected) in [
            (
                &include_bytes!("testdata/p521.pkcs8.pem")[..],
                unsupported("an ECDSA P-521 key"),
            ),
            (
                include_bytes!("testdata/ed448.pkcs8.pem"),
                unsupported("an Ed448 key"),
            ),
            (
                include_bytes!("testdata/p256.nopublic.sec1.pem"),
                unsupported("an EC private key without its public key"),
            ),
            (
                include_bytes!("testdata/encrypted.pem"),
                CredentialError::EncryptedKey,
            ),
            (b"", CredentialError::Malformed("private key")),
            (
                b"-----BEGIN PRIVATE KEY-----\n!",
                CredentialError::Malformed("private key"),
            ),
        ] {
            assert_eq!(PrivateKey::parse(pem).unwrap_err(), expected);
        }
        let small = PrivateKey::parse(include_bytes!("testdata/rsa1024.pkcs1.pem"));
        assert_eq!(
            small.unwrap_err(),
            CredentialError::BadKey("RSA", "TooSmall".to_owned())
        );
    }

    #[test]
    fn debug_output_shows_no_key() {
        let key = PrivateKey::parse(ED25519).unwrap();

        assert_eq!(
            format!("{key:?}"),
            "PrivateKey { type: \"ED25519\", bits: 256, .. }"
        );
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(data in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            proptest::prop_assert!(PrivateKey::parse(&data).is_err());
            proptest::prop_assert!(Certificate::parse(&data).is_err());
            proptest::prop_assert!(PublicKey::from_spki(&data).is_err());
        }

        #[test]
        fn flipped_bits_never_panic(at: proptest::sample::Index, flip in 1..=u8::MAX) {
            for pem in [RSA_PKCS8, P256_PKCS8, ED25519] {
                let (_, der) = der::from_pem_or_der(pem).unwrap();
                let mut der = der.to_vec();
                let at = at.index(der.len());
                der[at] ^= flip;
                let _ = PrivateKey::parse(&der);
            }
        }
    }
}

mod shared {
    use super::*;

    fn secret(id: &str, owners: &[&str]) -> SharedSecret {
        SharedSecret {
            id: Some(id.to_owned()),
            kind: SharedKind::Ike,
            secret: Secret::copy_of(id.as_bytes()),
            owners: owners
                .iter()
                .map(|owner| IdentityPattern::parse(owner).unwrap())
                .collect(),
        }
    }

    fn loaded(secrets: &[SharedSecret]) -> Credentials {
        let mut credentials = Credentials::new();
        for secret in secrets {
            credentials.add_shared(secret.clone());
        }
        credentials
    }

    fn ip(text: &str) -> Identity {
        Identity::from_ip(text.parse().unwrap())
    }

    fn found(credentials: &Credentials, local: &Identity, remote: &Identity) -> Option<String> {
        let found = credentials.shared_secret(SharedKind::Ike, local, remote)?;
        found.secret.id.clone()
    }

    #[test]
    fn the_pair_of_identities_decides() {
        let credentials = loaded(&[
            secret("wan1", &["192.0.2.1", "203.0.113.9"]),
            secret("wan2", &["192.0.2.2", "203.0.113.9"]),
        ]);
        let remote = ip("203.0.113.9");

        assert_eq!(
            found(&credentials, &ip("192.0.2.1"), &remote).as_deref(),
            Some("wan1")
        );
        assert_eq!(
            found(&credentials, &ip("192.0.2.2"), &remote).as_deref(),
            Some("wan2")
        );
    }

    #[test]
    fn an_exact_owner_beats_a_pattern_and_a_pattern_beats_none() {
        let credentials = loaded(&[
            secret("any", &[]),
            secret("pattern", &["*.example.org"]),
            secret("exact", &["b.example.org"]),
        ]);
        let local = Identity::fqdn("gw.example.net");

        for (remote, expected) in [
            ("b.example.org", "exact"),
            ("c.example.org", "pattern"),
            ("c.example.com", "any"),
        ] {
            assert_eq!(
                found(&credentials, &local, &Identity::fqdn(remote)).as_deref(),
                Some(expected)
            );
        }
    }

    #[test]
    fn several_without_owners_are_a_guess_that_is_told() {
        let credentials = loaded(&[secret("a", &[]), secret("b", &[]), secret("c", &[])]);
        let (local, remote) = (Identity::fqdn("a"), Identity::fqdn("b"));

        let found = credentials
            .shared_secret(SharedKind::Ike, &local, &remote)
            .unwrap();

        assert_eq!(found.secret.id.as_deref(), Some("a"));
        assert_eq!(found.candidates, 3);
    }

    #[test]
    fn a_name_that_looks_like_an_address_is_no_address() {
        let credentials = loaded(&[secret("name", &["@203.0.113.9"])]);

        assert_eq!(
            found(&credentials, &ip("192.0.2.1"), &ip("203.0.113.9")),
            None
        );
    }

    #[test]
    fn owners_that_name_neither_side_do_not_fit() {
        let credentials = loaded(&[secret("other", &["x.example.org"])]);

        let found = found(&credentials, &Identity::fqdn("a"), &Identity::fqdn("b"));

        assert_eq!(found, None);
    }

    #[test]
    fn the_same_id_replaces_and_other_kinds_are_ignored() {
        let mut credentials = loaded(&[secret("a", &[]), secret("a", &["b"])]);
        assert_eq!(credentials.shared().len(), 1);
        assert!(credentials.remove_shared("a"));
        assert!(!credentials.remove_shared("a"));

        credentials.add_shared(SharedSecret {
            kind: SharedKind::Eap,
            ..secret("eap", &[])
        });

        let found = found(&credentials, &Identity::fqdn("a"), &Identity::fqdn("b"));
        assert_eq!(found, None);
    }
}

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

mod peer {
    use super::*;

    #[test]
    fn a_certificate_of_a_loaded_authority_is_believed() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let auth = peer.authenticates(&[ca.der()], round(), gw());

        let verified = auth.verify().unwrap();

        assert_eq!(verified.certificate.as_deref(), Some(&peer.certificate));
        assert_eq!(verified.scheme, SignatureScheme::Ecdsa(HashId::Sha2_256));
        assert_eq!(verified.authorities.len(), 1);
        assert_eq!(verified.authorities[0].der(), ca.der().as_ref());
    }

    #[test]
    fn a_received_intermediate_completes_the_path() {
        let ca = root("Root");
        let sub = intermediate("Sub", &ca);
        let peer = Peer::new(&leaf_params("gw.example.org"), &sub);
        let mut auth = peer.authenticates(&[ca.der()], round(), gw());
        let without = auth.verify();
        auth.certificates.push(sub.der().to_vec());

        let verified = auth.verify().unwrap();

        assert!(matches!(without, Err(PeerAuthError::Untrusted(_))));
        let links: Vec<_> = verified.authorities.iter().map(|link| link.der()).collect();
        assert_eq!(links, [sub.der().as_ref(), ca.der().as_ref()]);
    }

    #[test]
    fn a_loaded_intermediate_completes_the_path_but_is_no_anchor() {
        let ca = root("Root");
        let sub = intermediate("Sub", &ca);
        let peer = Peer::new(&leaf_params("gw.example.org"), &sub);

        let both = peer.authenticates(&[ca.der(), sub.der()], round(), gw());
        let only_sub = peer.authenticates(&[sub.der()], round(), gw());

        assert!(both.verify().is_ok());
        assert!(matches!(
            only_sub.verify(),
            Err(PeerAuthError::Untrusted(_))
        ));
    }

    #[test]
    fn an_unknown_authority_is_refused() {
        let (ca, other) = (root("Root"), root("Other"));
        let peer = Peer::new(&leaf_params("gw.example.org"), &other);

        let refused = peer.authenticates(&[ca.der()], round(), gw()).verify();

        assert_eq!(
            refused.unwrap_err(),
            PeerAuthError::Untrusted("no path to a loaded authority".to_owned())
        );
        let nothing_loaded = peer.authenticates(&[], round(), gw()).verify();
        assert_eq!(
            nothing_loaded.unwrap_err(),
            PeerAuthError::Untrusted("no certificate of an authority is loaded".to_owned())
        );
    }

    #[test]
    fn an_impostor_with_the_same_names_as_the_root_is_refused() {
        let (ca, impostor) = (root("Root"), root("Root"));
        let peer = Peer::new(&leaf_params("gw.example.org"), &impostor);
        let mut auth = peer.authenticates(&[ca.der()], round(), gw());
        auth.certificates.push(impostor.der().to_vec());

        assert!(matches!(auth.verify(), Err(PeerAuthError::Untrusted(_))));
    }

    #[test]
    fn the_identity_must_be_in_the_certificate() {
        let ca = root("Root");
        let mut params = leaf_params("gw.example.org");
        params
            .subject_alt_names
            .push(SanType::IpAddress("192.0.2.1".parse().unwrap()));
        params
            .subject_alt_names
            .push(SanType::Rfc822Name("op@example.org".try_into().unwrap()));
        let peer = Peer::new(&params, &ca);
        let key_id = Identity {
            id_type: IdType::KeyId,
            data: peer.certificate.public_key().key_id().to_vec(),
        };
        let mail = |text: &str| Identity {
            id_type: IdType::Rfc822Addr,
            data: text.as_bytes().to_vec(),
        };
        let verify = |identity: Identity| {
            peer.authenticates(&[ca.der()], round(), identity)
                .verify()
                .map(|_| ())
        };
        let addr: IpAddr = "192.0.2.1".parse().unwrap();

        for identity in [
            gw(),
            Identity::fqdn("GW.Example.ORG"),
            Identity::from_ip(addr),
            mail("op@example.org"),
            dn("C=CH, CN=gw.example.org"),
            key_id,
        ] {
            assert_eq!(verify(identity.clone()), Ok(()), "{identity:?}");
        }
        for identity in [
            Identity::fqdn("other.example.org"),
            // A name, though it reads like the address.
            Identity::fqdn("192.0.2.1"),
            Identity::from_ip("192.0.2.2".parse().unwrap()),
            mail("gw.example.org"),
            dn("CN=gw.example.org"),
            dn("C=CH, O=Example, CN=gw.example.org"),
        ] {
            assert_eq!(
                verify(identity),
                Err(PeerAuthError::Identity(
                    "C=CH, CN=gw.example.org, gw.example.org, 192.0.2.1, op@example.org".to_owned()
                ))
            );
        }
    }

    #[test]
    fn string_types_in_names_do_not_matter() {
        let ca = root("Root");
        for value in [
            DnValue::Utf8String("Gateway".to_owned()),
            DnValue::PrintableString("gateway".try_into().unwrap()),
        ] {
            let mut params = leaf_params("gw.example.org");
            params.distinguished_name.remove(DnType::CommonName);
            params.distinguished_name.push(DnType::CommonName, value);
            let peer = Peer::new(&params, &ca);

            let auth = peer.authenticates(&[ca.der()], round(), dn("C=CH, CN=Gateway"));

            assert!(auth.verify().is_ok());
        }
    }

    #[test]
    fn a_pinned_self_signed_certificate_is_believed_and_no_other() {
        let peer = Peer::self_signed(&leaf_params("gw.example.org"));
        let mut ca_like = leaf_params("gw.example.org");
        ca_like.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_like = Peer::self_signed(&ca_like);
        let pin = |peer: &Peer| AuthRound {
            certs: vec![peer.source()],
            ..round()
        };

        assert!(peer.authenticates(&[], pin(&peer), gw()).verify().is_ok());
        assert!(
            ca_like
                .authenticates(&[], pin(&ca_like), gw())
                .verify()
                .is_ok()
        );
        assert_eq!(
            peer.authenticates(&[], pin(&ca_like), gw())
                .verify()
                .unwrap_err(),
            PeerAuthError::NotPinned
        );
    }

    #[test]
    fn a_loaded_end_entity_certificate_is_trusted_as_it_is() {
        let peer = Peer::self_signed(&leaf_params("gw.example.org"));
        let mut auth = peer.authenticates(&[peer.certificate.der()], round(), gw());

        assert!(auth.verify().is_ok());
        auth.certificates.clear();
        assert!(auth.verify().is_ok(), "it need not be sent");
    }

    #[test]
    fn a_configured_raw_public_key_is_believed() {
        let peer = Peer::self_signed(&leaf_params("gw.example.org"));
        let spki = peer.key.public().spki().to_vec();
        let configured = AuthRound {
            pubkeys: vec![CertSource::Data(spki)],
            ..round()
        };
        let mut auth = peer.authenticates(&[], configured, Identity::fqdn("anything"));
        auth.certificates.clear();

        let verified = auth.verify().unwrap();

        assert!(verified.certificate.is_none());
    }

    #[test]
    fn validity_is_judged_by_the_given_clock() {
        let ca = root("Root");
        let mut params = leaf_params("gw.example.org");
        params.not_before = rcgen::date_time_ymd(2030, 1, 1);
        params.not_after = rcgen::date_time_ymd(2031, 1, 1);
        let peer = Peer::new(&params, &ca);
        let (from, to) = peer.certificate.validity();
        let verify = |unix, round: AuthRound| {
            let mut auth = peer.authenticates(&[ca.der()], round, gw());
            auth.unix = unix;
            auth.verify().map(|_| ())
        };
        let pinned = || AuthRound {
            certs: vec![peer.source()],
            ..round()
        };

        assert_eq!(verify(from, round()), Ok(()));
        assert_eq!(verify(from, pinned()), Ok(()));
        for unix in [from - 1, to + 1] {
            for round in [round(), pinned()] {
                assert!(matches!(
                    verify(unix, round),
                    Err(PeerAuthError::Validity(_))
                ));
            }
        }
    }

    #[test]
    fn an_expired_root_is_no_anchor() {
        let mut params = ca_params("Root");
        params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);

        let refused = peer.authenticates(&[ca.der()], round(), gw()).verify();

        assert_eq!(
            refused.unwrap_err(),
            PeerAuthError::Validity("C=CH, CN=Root".to_owned())
        );
    }

    #[test]
    fn extended_key_usages_for_ipsec_and_tls_are_accepted() {
        let ca = root("Root");
        let verify = |usages: &[Usage]| {
            let mut params = leaf_params("gw.example.org");
            params.extended_key_usages = usages.to_vec();
            let peer = Peer::new(&params, &ca);
            peer.authenticates(&[ca.der()], round(), gw())
                .verify()
                .map(|_| ())
        };
        let oid = |arcs: &[u64]| Usage::Other(arcs.to_vec());

        for usages in [
            &[][..],
            &[Usage::ServerAuth],
            &[Usage::ClientAuth],
            &[Usage::Any],
            &[oid(&[1, 3, 6, 1, 5, 5, 7, 3, 17])],
            &[oid(&[1, 3, 6, 1, 5, 5, 8, 2, 2])],
            &[Usage::CodeSigning, Usage::ServerAuth],
        ] {
            assert_eq!(verify(usages), Ok(()), "{usages:?}");
        }
        assert_eq!(
            verify(&[Usage::CodeSigning]),
            Err(PeerAuthError::Untrusted(
                "its extended key usage does not allow IPsec".to_owned()
            ))
        );
    }

    #[test]
    fn cacerts_restrict_the_anchors() {
        let (a, b) = (root("A"), root("B"));
        let peer = Peer::new(&leaf_params("gw.example.org"), &a);
        let with = |ca: &Ca| AuthRound {
            cacerts: vec![source(ca)],
            ..round()
        };
        let loaded = [a.der().as_ref(), b.der().as_ref()];

        assert!(peer.authenticates(&loaded, with(&a), gw()).verify().is_ok());
        assert!(matches!(
            peer.authenticates(&loaded, with(&b), gw()).verify(),
            Err(PeerAuthError::Untrusted(_))
        ));
    }

    #[test]
    fn ca_id_must_name_an_authority_of_the_path() {
        let ca = root("Root");
        let sub = intermediate("Sub", &ca);
        let peer = Peer::new(&leaf_params("gw.example.org"), &sub);
        let verify = |ca_id: &str| {
            let round = AuthRound {
                ca_id: Some(IdentityPattern::parse(ca_id).unwrap()),
                ..round()
            };
            peer.authenticates(&[ca.der(), sub.der()], round, gw())
                .verify()
                .map(|_| ())
        };

        assert_eq!(verify("C=CH, CN=Sub"), Ok(()));
        assert_eq!(verify("C=CH, CN=Root"), Ok(()));
        assert_eq!(verify("C=CH, CN=*"), Ok(()));
        assert!(matches!(
            verify("C=CH, CN=Other"),
            Err(PeerAuthError::Untrusted(_))
        ));
    }

    #[test]
    fn constraints_on_key_and_signature_are_enforced() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let verify = |constraints: PubkeyConstraints| {
            let round = AuthRound {
                auth: AuthMethod::Pubkey(constraints),
                ..round()
            };
            peer.authenticates(&[ca.der()], round, gw())
                .verify()
                .map(|_| ())
        };
        let none = PubkeyConstraints::default;
        let typed = |key_type| PubkeyConstraints {
            key_type: Some(key_type),
            ..none()
        };
        let sized = |bits| PubkeyConstraints {
            min_bits: Some(bits),
            ..none()
        };
        let hashed = |hash| PubkeyConstraints {
            hashes: vec![hash],
            ..none()
        };

        for fits in [
            typed(KeyType::Ecdsa),
            sized(256),
            hashed(SignatureHash::Sha256),
        ] {
            assert_eq!(verify(fits), Ok(()));
        }
        for unfit in [
            typed(KeyType::Rsa),
            sized(384),
            hashed(SignatureHash::Sha384),
        ] {
            assert!(matches!(verify(unfit), Err(PeerAuthError::Constraint(_))));
        }
    }

    #[test]
    fn demands_that_cannot_be_met_are_refused_and_not_ignored() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let refused = |round: AuthRound| {
            matches!(
                peer.authenticates(&[ca.der()], round, gw()).verify(),
                Err(PeerAuthError::Constraint(_))
            )
        };

        assert!(refused(AuthRound {
            revocation: Revocation::Strict,
            ..round()
        }));
        assert!(!refused(AuthRound {
            revocation: Revocation::IfUri,
            ..round()
        }));
        assert!(refused(AuthRound {
            groups: vec!["staff".to_owned()],
            ..round()
        }));
        assert!(refused(AuthRound {
            cert_policy: vec!["1.2.3".to_owned()],
            ..round()
        }));
        assert!(refused(AuthRound {
            auth: AuthMethod::Psk,
            ..round()
        }));
    }

    #[test]
    fn a_forged_signature_is_refused() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let mut auth = peer.authenticates(&[ca.der()], round(), gw());
        auth.octets.push(0);

        assert_eq!(
            auth.verify().unwrap_err(),
            PeerAuthError::Signature(SignatureError::Invalid)
        );
    }

    #[test]
    fn garbage_in_place_of_a_certificate_is_refused() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let mut auth = peer.authenticates(&[ca.der()], round(), gw());

        auth.certificates = vec![b"garbage".to_vec()];
        let garbage = auth.verify();
        auth.certificates.clear();
        let nothing = auth.verify();

        assert_eq!(
            garbage.unwrap_err(),
            PeerAuthError::Certificate("malformed X.509 certificate".to_owned())
        );
        assert_eq!(nothing.unwrap_err(), PeerAuthError::NoCertificate);
    }
}

mod local {
    use super::*;

    fn loaded(peer: Peer, certificates: &[&[u8]]) -> Credentials {
        let mut credentials = Credentials::new();
        credentials.add_key(peer.key);
        for der in certificates {
            credentials.add_certificate(Certificate::parse(der).unwrap());
        }
        credentials
    }

    #[test]
    fn the_configured_certificate_is_used_with_its_chain() {
        let ca = root("Root");
        let sub = intermediate("Sub", &ca);
        let peer = Peer::new(&leaf_params("gw.example.org"), &sub);
        let round = AuthRound {
            certs: vec![peer.source()],
            ..round()
        };
        let der = peer.certificate.der().to_vec();
        let credentials = loaded(peer, &[ca.der(), sub.der()]);

        let local = credentials
            .local(&round, &credentials.default_identity(&round).unwrap(), &[])
            .unwrap();

        assert_eq!(local.certificate.unwrap().der(), der);
        let chain: Vec<_> = local.chain.iter().map(|link| link.der()).collect();
        assert_eq!(chain, [sub.der().as_ref()]);
        let identity = credentials.default_identity(&round).unwrap();
        assert!(same_identity(&identity, &dn("C=CH, CN=gw.example.org")));
    }

    #[test]
    fn without_configuration_the_identity_finds_the_certificate() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let der = peer.certificate.der().to_vec();
        let credentials = loaded(peer, &[ca.der(), &der]);

        let local = credentials.local(&round(), &gw(), &[]).unwrap();
        let unknown = credentials.local(&round(), &Identity::fqdn("other"), &[]);

        assert_eq!(local.certificate.unwrap().der(), der);
        assert!(matches!(unknown, Err(CredentialError::Missing(_))));
        assert_eq!(credentials.default_identity(&round()), None);
    }

    #[test]
    fn the_peers_certificate_request_decides_between_two() {
        let (a, b) = (root("A"), root("B"));
        let of_a = Peer::new(&leaf_params("gw.example.org"), &a);
        let of_b = Peer::new(&leaf_params("gw.example.org"), &b);
        let (der_a, der_b) = (
            of_a.certificate.der().to_vec(),
            of_b.certificate.der().to_vec(),
        );
        let configured = AuthRound {
            certs: vec![of_a.source(), of_b.source()],
            ..round()
        };
        let mut credentials = loaded(of_a, &[a.der(), b.der(), &der_a, &der_b]);
        credentials.add_key(of_b.key);
        let hash = |ca: &Ca| {
            Certificate::parse(ca.der())
                .unwrap()
                .public_key()
                .spki_hash()
        };

        for round in [configured, round()] {
            for (requested, expected) in [
                (vec![], &der_a),
                (vec![[0; 20]], &der_a),
                (vec![hash(&a)], &der_a),
                (vec![[0; 20], hash(&b)], &der_b),
            ] {
                let local = credentials.local(&round, &gw(), &requested).unwrap();

                assert_eq!(local.certificate.unwrap().der(), expected);
            }
        }
    }

    #[test]
    fn a_certificate_without_its_key_is_of_no_use() {
        let ca = root("Root");
        let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
        let round = AuthRound {
            certs: vec![peer.source()],
            ..round()
        };

        let missing = Credentials::new().local(&round, &gw(), &[]);

        assert_eq!(
            missing.unwrap_err(),
            CredentialError::Missing(
                "no private key is loaded for the configured certificate".to_owned()
            )
        );
    }

    #[test]
    fn certificate_requests_name_the_authorities() {
        let (a, b) = (root("A"), root("B"));
        let mut credentials = Credentials::new();
        credentials.add_certificate(Certificate::parse(a.der()).unwrap());
        credentials.add_certificate(Certificate::parse(b.der()).unwrap());
        credentials.add_certificate(Certificate::parse(b.der()).unwrap());
        let of_a = Certificate::parse(a.der())
            .unwrap()
            .public_key()
            .spki_hash();
        let constrained = AuthRound {
            cacerts: vec![source(&a)],
            ..round()
        };

        assert_eq!(credentials.certificates().len(), 2);
        assert_eq!(credentials.certificate_requests(None).len(), 2);
        assert_eq!(credentials.certificate_requests(Some(&constrained)), [of_a]);
    }

    #[test]
    fn keys_are_listed_and_removed_by_id() {
        let peer = Peer::self_signed(&leaf_params("gw.example.org"));
        let certificate = peer.certificate.clone();
        let mut credentials = Credentials::new();
        let id = credentials.add_key(peer.key);

        assert!(credentials.has_key(&certificate));
        assert_eq!(
            credentials.keys().map(|(id, _)| *id).collect::<Vec<_>>(),
            [id]
        );
        assert!(credentials.remove_key(&id));
        assert!(!credentials.remove_key(&id));
        assert!(!credentials.has_key(&certificate));
    }
}
