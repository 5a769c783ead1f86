// SPDX-License-Identifier: Apache-2.0 OR MIT

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
        assert!(verify(unfit).is_err());
    }
}

#[test]
fn hashes_bind_the_path_too_unless_they_are_for_ike_only() {
    let mut params = ca_params("Root");
    params.key_usages = Vec::new();
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let ca = CertifiedIssuer::self_signed(params, key).unwrap();
    let peer = Peer::new(&leaf_params("gw.example.org"), &ca);
    let verify = |hashes: &[SignatureHash], ike_only| {
        let round = AuthRound {
            auth: AuthMethod::Pubkey(PubkeyConstraints {
                hashes: hashes.to_vec(),
                ike_only,
                ..PubkeyConstraints::default()
            }),
            ..round()
        };
        peer.authenticates(&[ca.der()], round, gw()).verify()
    };
    let both = [SignatureHash::Sha256, SignatureHash::Sha384];

    // The authority signs with SHA-384, the peer with SHA-256.
    assert!(verify(&both, false).is_ok());
    assert!(verify(&both[..1], true).is_ok());
    assert!(matches!(
        verify(&both[..1], false),
        Err(PeerAuthError::Untrusted(_))
    ));
}

#[test]
fn pss_is_demanded_of_rsa_keys_only() {
    let pem = include_str!("../testdata/rsa2048.pkcs8.pem");
    let rsa_key = KeyPair::from_pem(pem).unwrap();
    let params = leaf_params("gw.example.org");
    let certificate = params.self_signed(&rsa_key).unwrap();
    let rsa = Peer::from_parts(certificate.der(), &rsa_key);
    let ecdsa = Peer::self_signed(&params);
    let demand_pss = |peer: &Peer| AuthRound {
        certs: vec![peer.source()],
        auth: AuthMethod::Pubkey(PubkeyConstraints {
            rsa_pss: true,
            ..PubkeyConstraints::default()
        }),
        ..round()
    };

    let pkcs1 = rsa.authenticates(&[], demand_pss(&rsa), gw()).verify();
    let other = ecdsa.authenticates(&[], demand_pss(&ecdsa), gw()).verify();

    assert!(matches!(pkcs1, Err(PeerAuthError::Constraint(_))));
    assert!(other.is_ok());
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
