// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use crate::crypto::test_util::hex;
use swanherd_ipsec::registry::PrfId;

const RSA: &[u8] = include_bytes!("../credentials/testdata/rsa2048.pkcs1.pem");
const P256: &[u8] = include_bytes!("../credentials/testdata/p256.sec1.pem");
const P384: &[u8] = include_bytes!("../credentials/testdata/p384.pkcs8.pem");
const ED25519: &[u8] = include_bytes!("../credentials/testdata/ed25519.pkcs8.pem");

/// What OpenSSL signed for the fixtures.
const MESSAGE: &[u8] = b"to be signed";

fn key(pem: &[u8]) -> PrivateKey {
    PrivateKey::parse(pem).unwrap()
}

fn plan(pem: &[u8], peer_hashes: &[HashId]) -> Result<SigningPlan, SignatureError> {
    SigningPlan::choose(
        key(pem).public(),
        peer_hashes,
        &PubkeyConstraints::default(),
    )
}

#[test]
fn pre_shared_key_auth_equals_the_formula() {
    // Computed with Python's HMAC.
    let prf = Prf::new(PrfId::HmacSha2_256).unwrap();
    let psk = Secret::copy_of(b"secret");

    let auth = shared_key(prf, &psk, b"octets");

    assert_eq!(
        hex(&auth),
        "93d6b432e988c4c184f49457ef7ddfef938f1179de4120120d1cc523b368d33b"
    );
    assert!(verify_shared_key(prf, &psk, b"octets", &auth));
    assert!(!verify_shared_key(prf, &psk, b"octet", &auth));
    assert!(!verify_shared_key(
        prf,
        &Secret::copy_of(b"other"),
        b"octets",
        &auth
    ));
    assert!(!verify_shared_key(prf, &psk, b"octets", &auth[..31]));
}

#[test]
fn signed_octets_are_message_nonce_and_maced_identity() {
    let prf = Prf::new(PrfId::HmacSha2_256).unwrap();
    let sk_p = Secret::copy_of(b"sk_p");

    let octets = signed_octets(prf, b"message", b"nonce", &sk_p, b"id");

    assert_eq!(&octets[..12], b"messagenonce");
    assert_eq!(&octets[12..], prf.compute(b"sk_p", &[b"id"]).expose());
}

#[test]
fn every_key_type_signs_and_verifies_with_rfc_7427() {
    for pem in [RSA, P256, P384, ED25519] {
        let key = key(pem);
        let plan = plan(pem, ANNOUNCED_HASHES).unwrap();

        let auth = plan.sign(&key, MESSAGE).unwrap();

        assert_eq!(plan.method, AuthMethod::DigitalSignature);
        assert_eq!(
            verify_signature(plan.method, key.public(), MESSAGE, &auth),
            Ok(plan.scheme)
        );
        assert_eq!(
            verify_signature(plan.method, key.public(), b"other", &auth),
            Err(SignatureError::Invalid)
        );
    }
}

#[test]
fn ecdsa_signs_and_verifies_with_the_methods_of_rfc_4754() {
    for (pem, method, len) in [
        (P256, AuthMethod::Ecdsa256, 64),
        (P384, AuthMethod::Ecdsa384, 96),
    ] {
        let key = key(pem);
        let plan = plan(pem, &[]).unwrap();
        assert_eq!(plan.method, method);
        // Often enough to meet integers with leading zeros and with a sign octet.
        for round in 0..64u8 {
            let auth = plan.sign(&key, &[round]).unwrap();

            assert_eq!(auth.len(), len);
            assert_eq!(
                verify_signature(method, key.public(), &[round], &auth),
                Ok(plan.scheme)
            );
        }
    }
}

#[test]
fn signatures_of_openssl_verify() {
    let rsa = key(RSA);
    let sha1 = include_bytes!("../credentials/testdata/rsa2048.sha1.sig");
    let sha256 = include_bytes!("../credentials/testdata/rsa2048.sha256.sig");
    let pss = include_bytes!("../credentials/testdata/rsa2048.pss384.sig");
    let ecdsa = include_bytes!("../credentials/testdata/p256.sha384.sig");
    let digital = |scheme, null, signature: &[u8]| {
        let identifier = algorithm_identifier(scheme, null).unwrap();
        let len = u8::try_from(identifier.len()).unwrap();
        [&[len][..], &identifier, signature].concat()
    };

    assert_eq!(
        verify_signature(AuthMethod::RsaSignature, rsa.public(), MESSAGE, sha1),
        Ok(SignatureScheme::RsaPkcs1(HashId::Sha1))
    );
    for (scheme, signature) in [
        (SignatureScheme::RsaPkcs1(HashId::Sha2_256), &sha256[..]),
        (SignatureScheme::RsaPss(HashId::Sha2_384), &pss[..]),
    ] {
        for null in [true, false] {
            let auth = digital(scheme, null, signature);
            let verified =
                verify_signature(AuthMethod::DigitalSignature, rsa.public(), MESSAGE, &auth);
            assert_eq!(verified, Ok(scheme));
        }
    }
    let scheme = SignatureScheme::Ecdsa(HashId::Sha2_384);
    let auth = digital(scheme, true, ecdsa);
    assert_eq!(
        verify_signature(
            AuthMethod::DigitalSignature,
            key(P256).public(),
            MESSAGE,
            &auth
        ),
        Ok(scheme)
    );
}

#[test]
fn algorithm_identifiers_equal_rfc_7427_appendix_a() {
    let identifier = |scheme| hex(&algorithm_identifier(scheme, true).unwrap());

    assert_eq!(
        identifier(SignatureScheme::RsaPkcs1(HashId::Sha2_256)),
        "300d06092a864886f70d01010b0500"
    );
    assert_eq!(
        identifier(SignatureScheme::RsaPss(HashId::Sha2_256)),
        "304106092a864886f70d01010a3034a00f300d06096086480165030402010500\
         a11c301a06092a864886f70d010108300d06096086480165030402010500a203020120"
    );
    assert_eq!(
        identifier(SignatureScheme::Ecdsa(HashId::Sha2_256)),
        "300a06082a8648ce3d040302"
    );
    assert_eq!(identifier(SignatureScheme::Ed25519), "300506032b6570");
}

#[test]
fn rsa_signs_with_pss_where_that_is_configured() {
    let rsa = key(RSA);
    let constraints = PubkeyConstraints {
        rsa_pss: true,
        ..PubkeyConstraints::default()
    };
    for hash in [HashId::Sha2_256, HashId::Sha2_384, HashId::Sha2_512] {
        let plan = SigningPlan::choose(rsa.public(), &[hash], &constraints).unwrap();

        let auth = plan.sign(&rsa, MESSAGE).unwrap();

        assert_eq!(plan.scheme, SignatureScheme::RsaPss(hash));
        assert_eq!(
            verify_signature(plan.method, rsa.public(), MESSAGE, &auth),
            Ok(plan.scheme)
        );
    }
}

#[test]
fn the_peers_hashes_and_the_configuration_decide() {
    let constrained = |hashes: &[SignatureHash]| PubkeyConstraints {
        hashes: hashes.to_vec(),
        ..PubkeyConstraints::default()
    };
    let rsa = key(RSA);
    let choose = |peer: &[HashId], hashes: &[SignatureHash]| {
        SigningPlan::choose(rsa.public(), peer, &constrained(hashes)).map(|plan| plan.scheme)
    };

    assert_eq!(
        choose(&[HashId::Sha2_512], &[]),
        Ok(SignatureScheme::RsaPkcs1(HashId::Sha2_512))
    );
    assert_eq!(
        choose(
            ANNOUNCED_HASHES,
            &[SignatureHash::Sha384, SignatureHash::Sha256]
        ),
        Ok(SignatureScheme::RsaPkcs1(HashId::Sha2_384))
    );
    assert_eq!(
        choose(&[HashId::Sha2_256], &[SignatureHash::Sha512]),
        Err(SignatureError::NoScheme("RSA"))
    );
    assert_eq!(
        choose(&[], &[]),
        Err(SignatureError::NeedsDigitalSignature("RSA"))
    );
    assert_eq!(
        plan(ED25519, &[HashId::Sha2_256]),
        Err(SignatureError::NoScheme("ED25519"))
    );
}

#[test]
fn malformed_auth_data_is_refused() {
    let public = key(RSA).public().clone();
    let verify = |method, auth: &[u8]| verify_signature(method, &public, MESSAGE, auth);

    assert_eq!(
        verify(AuthMethod::DigitalSignature, &[]),
        Err(SignatureError::Malformed)
    );
    assert_eq!(
        verify(AuthMethod::DigitalSignature, &[200, 1, 2]),
        Err(SignatureError::Malformed)
    );
    assert_eq!(
        verify(AuthMethod::DigitalSignature, &[1, 0x30, 1, 2]),
        Err(SignatureError::UnsupportedAlgorithm("30".to_owned()))
    );
    assert_eq!(
        verify(AuthMethod::SharedKey, &[1]),
        Err(SignatureError::UnsupportedMethod(AuthMethod::SharedKey))
    );
    assert_eq!(
        verify(AuthMethod::Ecdsa256, &[0; 64]),
        Err(SignatureError::WrongKey {
            scheme: "ECDSA_WITH_SHA256",
            key: "RSA"
        })
    );
    assert_eq!(
        verify(AuthMethod::RsaSignature, &[0; 256]),
        Err(SignatureError::Invalid)
    );
}
