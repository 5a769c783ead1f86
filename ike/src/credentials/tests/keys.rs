// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;

const RSA_PKCS1: &[u8] = include_bytes!("../testdata/rsa2048.pkcs1.pem");
const RSA_PKCS8: &[u8] = include_bytes!("../testdata/rsa2048.pkcs8.pem");
const P256_SEC1: &[u8] = include_bytes!("../testdata/p256.sec1.pem");
const P256_PKCS8: &[u8] = include_bytes!("../testdata/p256.pkcs8.pem");
const P384: &[u8] = include_bytes!("../testdata/p384.pkcs8.pem");
const ED25519: &[u8] = include_bytes!("../testdata/ed25519.pkcs8.pem");

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
            &include_bytes!("../testdata/p521.pkcs8.pem")[..],
            unsupported("an ECDSA P-521 key"),
        ),
        (
            include_bytes!("../testdata/ed448.pkcs8.pem"),
            unsupported("an Ed448 key"),
        ),
        (
            include_bytes!("../testdata/p256.nopublic.sec1.pem"),
            unsupported("an EC private key without its public key"),
        ),
        (
            include_bytes!("../testdata/encrypted.pem"),
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
    let small = PrivateKey::parse(include_bytes!("../testdata/rsa1024.pkcs1.pem"));
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
