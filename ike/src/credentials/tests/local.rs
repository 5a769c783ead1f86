// SPDX-License-Identifier: Apache-2.0 OR MIT

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
