// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Proposal keywords (`aes256gcm16-prfsha384-x25519`) and the default proposals.

use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Proposal, ProtocolId, Transform};

use crate::diagnostic::suggest;

/// Why a text is not a proposal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// A keyword is not known.
    #[error("`{keyword}` is not an algorithm keyword")]
    Unknown {
        /// The keyword.
        keyword: String,
        /// A known one that is near.
        suggestion: Option<String>,
    },
    /// The keywords do not make a usable proposal.
    #[error("{0}")]
    Unusable(&'static str),
}

const ENCRYPTION: &[(&str, EncryptionId, Option<u16>)] = {
    use EncryptionId as E;
    &[
        ("null", E::Null, None),
        ("3des", E::TripleDes, None),
        ("des", E::Unknown(2), None),
        ("cast128", E::Unknown(6), Some(128)),
        ("blowfish", E::Blowfish, Some(128)),
        ("blowfish128", E::Blowfish, Some(128)),
        ("blowfish192", E::Blowfish, Some(192)),
        ("blowfish256", E::Blowfish, Some(256)),
        ("serpent", E::Unknown(1026), Some(128)),
        ("serpent128", E::Unknown(1026), Some(128)),
        ("serpent192", E::Unknown(1026), Some(192)),
        ("serpent256", E::Unknown(1026), Some(256)),
        ("twofish", E::Unknown(1027), Some(128)),
        ("twofish128", E::Unknown(1027), Some(128)),
        ("twofish192", E::Unknown(1027), Some(192)),
        ("twofish256", E::Unknown(1027), Some(256)),
        ("chacha20poly1305", E::ChaCha20Poly1305, None),
        ("chacha20poly1305compat", E::ChaCha20Poly1305, Some(256)),
    ]
};

/// With the PRF that follows from it in a proposal without one.
const INTEGRITY: &[(&str, IntegrityId, Option<PrfId>)] = {
    use IntegrityId as I;
    &[
        ("md5", I::HmacMd5_96, Some(PrfId::HmacMd5)),
        ("md5_128", I::HmacMd5_128, Some(PrfId::HmacMd5)),
        ("sha", I::HmacSha1_96, Some(PrfId::HmacSha1)),
        ("sha1", I::HmacSha1_96, Some(PrfId::HmacSha1)),
        ("sha1_160", I::HmacSha1_160, Some(PrfId::HmacSha1)),
        ("sha256", I::HmacSha2_256_128, Some(PrfId::HmacSha2_256)),
        ("sha2_256", I::HmacSha2_256_128, Some(PrfId::HmacSha2_256)),
        ("sha256_96", I::HmacSha2_256_96, None),
        ("sha2_256_96", I::HmacSha2_256_96, None),
        ("sha384", I::HmacSha2_384_192, Some(PrfId::HmacSha2_384)),
        ("sha2_384", I::HmacSha2_384_192, Some(PrfId::HmacSha2_384)),
        ("sha512", I::HmacSha2_512_256, Some(PrfId::HmacSha2_512)),
        ("sha2_512", I::HmacSha2_512_256, Some(PrfId::HmacSha2_512)),
        ("aesxcbc", I::AesXcbc96, Some(PrfId::Aes128Xcbc)),
        ("aescmac", I::AesCmac96, Some(PrfId::Aes128Cmac)),
    ]
};

const PRF: &[(&str, PrfId)] = &[
    ("prfmd5", PrfId::HmacMd5),
    ("prfsha1", PrfId::HmacSha1),
    ("prfsha256", PrfId::HmacSha2_256),
    ("prfsha384", PrfId::HmacSha2_384),
    ("prfsha512", PrfId::HmacSha2_512),
    ("prfaesxcbc", PrfId::Aes128Xcbc),
    ("prfaescmac", PrfId::Aes128Cmac),
];

const KEY_EXCHANGE: &[(&str, KeyExchangeId)] = {
    use KeyExchangeId as K;
    &[
        ("none", K::None),
        ("modpnone", K::None),
        ("modp768", K::Modp768),
        ("modp1024", K::Modp1024),
        ("modp1536", K::Modp1536),
        ("modp2048", K::Modp2048),
        ("modp3072", K::Modp3072),
        ("modp4096", K::Modp4096),
        ("modp6144", K::Modp6144),
        ("modp8192", K::Modp8192),
        ("modp1024s160", K::Modp1024s160),
        ("modp2048s224", K::Modp2048s224),
        ("modp2048s256", K::Modp2048s256),
        ("ecp192", K::Ecp192),
        ("ecp224", K::Ecp224),
        ("ecp256", K::Ecp256),
        ("ecp384", K::Ecp384),
        ("ecp521", K::Ecp521),
        ("ecp224bp", K::Ecp224Bp),
        ("ecp256bp", K::Ecp256Bp),
        ("ecp384bp", K::Ecp384Bp),
        ("ecp512bp", K::Ecp512Bp),
        ("curve25519", K::Curve25519),
        ("x25519", K::Curve25519),
        ("curve448", K::Curve448),
        ("x448", K::Curve448),
        ("mlkem512", K::MlKem512),
        ("mlkem768", K::MlKem768),
        ("mlkem1024", K::MlKem1024),
    ]
};

/// AES and Camellia keywords: family, key length, mode with length of the ICV.
fn block_cipher(keyword: &str) -> Option<(EncryptionId, Option<u16>)> {
    use EncryptionId as E;
    let (aes, rest) = match keyword.strip_prefix("aes") {
        Some(rest) => (true, rest),
        None => (false, keyword.strip_prefix("camellia")?),
    };
    let (bits, mode) = ["128", "192", "256"]
        .into_iter()
        .zip([128, 192, 256])
        .find_map(|(text, bits)| Some((bits, rest.strip_prefix(text)?)))
        // Without a key length there is the plain cipher only.
        .or_else(|| rest.is_empty().then_some((128, rest)))?;
    let id = match (aes, mode) {
        (true, "") => E::AesCbc,
        (true, "ctr") => E::AesCtr,
        (true, "gcm8" | "gcm64") => E::AesGcm8,
        (true, "gcm12" | "gcm96") => E::AesGcm12,
        (true, "gcm" | "gcm16" | "gcm128") => E::AesGcm16,
        (true, "ccm8" | "ccm64") => E::AesCcm8,
        (true, "ccm12" | "ccm96") => E::AesCcm12,
        (true, "ccm16" | "ccm128") => E::AesCcm16,
        (true, "gmac") => E::NullAesGmac,
        (false, "") => E::CamelliaCbc,
        (false, "ctr") => E::CamelliaCtr,
        (false, "ccm8" | "ccm64") => E::CamelliaCcm8,
        (false, "ccm12" | "ccm96") => E::CamelliaCcm12,
        (false, "ccm16" | "ccm128") => E::CamelliaCcm16,
        _ => return None,
    };
    Some((id, Some(bits)))
}

fn find<T: Copy>(table: &[(&str, T)], keyword: &str) -> Option<T> {
    table
        .iter()
        .find(|(known, _)| *known == keyword)
        .map(|(_, value)| *value)
}

fn transform(keyword: &str) -> Option<(Transform, Option<PrfId>)> {
    if let Some((id, key_bits)) = block_cipher(keyword).or_else(|| {
        ENCRYPTION
            .iter()
            .find(|(known, _, _)| *known == keyword)
            .map(|(_, id, bits)| (*id, *bits))
    }) {
        return Some((Transform::Encryption { id, key_bits }, None));
    }
    if let Some((_, id, prf)) = INTEGRITY.iter().find(|(known, _, _)| *known == keyword) {
        return Some((Transform::Integrity(*id), *prf));
    }
    let other = if let Some(id) = find(PRF, keyword) {
        Transform::Prf(id)
    } else if let Some(id) = find(KEY_EXCHANGE, keyword) {
        Transform::KeyExchange(id)
    } else {
        match keyword {
            "esn" => Transform::Esn(true),
            "noesn" => Transform::Esn(false),
            _ => {
                let (index, method) = keyword.strip_prefix("ke")?.split_once('_')?;
                let index = index.parse().ok().filter(|index| (1..=7).contains(index))?;
                Transform::AdditionalKeyExchange {
                    index,
                    id: find(KEY_EXCHANGE, method)?,
                }
            }
        }
    };
    Some((other, None))
}

/// Reads one proposal for IKE or ESP.
///
/// # Errors
/// If a keyword is unknown, or what the keywords say together cannot work.
pub fn parse_proposal(protocol: ProtocolId, text: &str) -> Result<Proposal, ProposalError> {
    let mut transforms = Vec::new();
    let mut derived = Vec::new();
    for keyword in text.split('-').filter(|keyword| !keyword.is_empty()) {
        let (transform, prf) = transform(keyword).ok_or_else(|| ProposalError::Unknown {
            keyword: keyword.chars().take(64).collect(),
            suggestion: suggest_keyword(keyword),
        })?;
        if !transforms.contains(&transform) {
            transforms.push(transform);
        }
        if let Some(prf) = prf.map(Transform::Prf)
            && !derived.contains(&prf)
        {
            derived.push(prf);
        }
    }
    let has = |wanted: fn(&Transform) -> bool| transforms.iter().any(wanted);
    let has_prf = has(|t| matches!(t, Transform::Prf(_)));
    let has_esn = has(|t| matches!(t, Transform::Esn(_)));
    let aead = has(|t| matches!(t, Transform::Encryption { id, .. } if id.is_aead()));
    let plain = has(|t| matches!(t, Transform::Encryption { id, .. } if !id.is_aead()));
    if !aead && !plain {
        return Err(ProposalError::Unusable("there is no encryption algorithm"));
    }
    if aead && plain {
        return Err(ProposalError::Unusable(
            "ciphers that authenticate (GCM, CCM, ChaCha20) and ciphers that do not are mixed; write two proposals, separated by a comma",
        ));
    }
    if protocol == ProtocolId::Ike {
        if !has_prf {
            transforms.append(&mut derived);
        }
        transforms.retain(|t| {
            !matches!(
                t,
                Transform::KeyExchange(KeyExchangeId::None) | Transform::Esn(_)
            )
        });
    } else {
        transforms.retain(|t| !matches!(t, Transform::Prf(_)));
        if !has_esn {
            transforms.push(Transform::Esn(false));
        }
    }
    if aead {
        transforms.retain(|t| !matches!(t, Transform::Integrity(_)));
    }
    let proposal = Proposal {
        protocol,
        transforms,
    };
    if protocol == ProtocolId::Ike {
        check_ike(&proposal, aead)?;
    }
    Ok(proposal)
}

fn check_ike(proposal: &Proposal, aead: bool) -> Result<(), ProposalError> {
    let has = |wanted: fn(&Transform) -> bool| proposal.transforms.iter().any(wanted);
    if !has(|t| matches!(t, Transform::Prf(_))) {
        return Err(ProposalError::Unusable(
            "there is no pseudorandom function; add one such as `prfsha256`",
        ));
    }
    if !aead && !has(|t| matches!(t, Transform::Integrity(_))) {
        return Err(ProposalError::Unusable(
            "there is no integrity algorithm; add one such as `sha256`",
        ));
    }
    if !has(|t| matches!(t, Transform::KeyExchange(_))) {
        return Err(ProposalError::Unusable(
            "there is no key exchange method; add one such as `x25519`",
        ));
    }
    Ok(())
}

/// Whether an ESP proposal would encrypt without protecting integrity.
pub(crate) fn lacks_integrity(proposal: &Proposal) -> bool {
    !proposal.transforms.iter().any(|t| match t {
        Transform::Encryption { id, .. } => id.is_aead(),
        Transform::Integrity(_) => true,
        _ => false,
    })
}

fn suggest_keyword(keyword: &str) -> Option<String> {
    let lower = keyword.to_ascii_lowercase();
    if lower != keyword && transform(&lower).is_some() {
        return Some(format!("keywords are written in lower case: `{lower}`"));
    }
    let trimmed = keyword.trim_end_matches('!');
    if trimmed != keyword && transform(trimmed).is_some() {
        return Some("the `!` of ipsec.conf is not needed: proposals are always strict".to_owned());
    }
    if keyword.contains(['/', ',', ' ', '_']) {
        return Some(
            "algorithms of a proposal are joined by `-`, proposals are separated by `,`".to_owned(),
        );
    }
    let common = ["aes128", "aes192", "aes256", "aes128gcm16", "aes256gcm16"];
    suggest(
        keyword,
        common
            .into_iter()
            .chain(ENCRYPTION.iter().map(|(known, _, _)| *known))
            .chain(INTEGRITY.iter().map(|(known, _, _)| *known))
            .chain(PRF.iter().map(|(known, _)| *known))
            .chain(KEY_EXCHANGE.iter().map(|(known, _)| *known)),
    )
}

/// What `default` stands for: strongSwan's defaults without the algorithms that are not
/// implemented here, in its order.
pub fn default_proposals(protocol: ProtocolId) -> Vec<Proposal> {
    let aes = |id, bits: &[u16]| -> Vec<Transform> {
        bits.iter()
            .map(|&bits| Transform::Encryption {
                id,
                key_bits: Some(bits),
            })
            .collect()
    };
    let cbc = aes(EncryptionId::AesCbc, &[128, 192, 256]);
    let mut aead = aes(EncryptionId::AesGcm16, &[128, 256]);
    let integrity = [
        IntegrityId::HmacSha2_256_128,
        IntegrityId::HmacSha2_384_192,
        IntegrityId::HmacSha2_512_256,
        IntegrityId::HmacSha1_96,
    ]
    .map(Transform::Integrity);
    let prf = [
        PrfId::HmacSha2_256,
        PrfId::HmacSha2_384,
        PrfId::HmacSha2_512,
        PrfId::HmacSha1,
    ]
    .map(Transform::Prf);
    let key_exchange = [
        KeyExchangeId::Ecp256,
        KeyExchangeId::Ecp384,
        KeyExchangeId::Curve25519,
        KeyExchangeId::Modp3072,
        KeyExchangeId::Modp4096,
        KeyExchangeId::Modp2048,
    ]
    .map(Transform::KeyExchange);
    let proposal = |parts: &[&[Transform]]| Proposal {
        protocol,
        transforms: parts.concat(),
    };
    if protocol == ProtocolId::Ike {
        aead.push(Transform::Encryption {
            id: EncryptionId::ChaCha20Poly1305,
            key_bits: None,
        });
        return vec![
            proposal(&[&cbc, &integrity, &prf, &key_exchange]),
            proposal(&[&aead, &prf, &key_exchange]),
        ];
    }
    let tail = [
        Transform::KeyExchange(KeyExchangeId::None),
        Transform::Esn(false),
    ];
    vec![
        proposal(&[&aead, &key_exchange, &tail]),
        proposal(&[&cbc, &integrity, &key_exchange, &tail]),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ike(text: &str) -> Result<Proposal, ProposalError> {
        parse_proposal(ProtocolId::Ike, text)
    }

    #[test]
    fn the_prf_follows_from_the_integrity_algorithm() {
        assert_eq!(
            ike("aes256gcm16-sha384-ecp384").unwrap().transforms,
            [
                Transform::Encryption {
                    id: EncryptionId::AesGcm16,
                    key_bits: Some(256)
                },
                Transform::KeyExchange(KeyExchangeId::Ecp384),
                Transform::Prf(PrfId::HmacSha2_384),
            ]
        );
    }

    #[test]
    fn esp_has_no_prf_and_no_extended_numbers_unless_asked() {
        assert_eq!(
            parse_proposal(ProtocolId::Esp, "aes128gcm16-prfsha256-none")
                .unwrap()
                .transforms,
            [
                Transform::Encryption {
                    id: EncryptionId::AesGcm16,
                    key_bits: Some(128)
                },
                Transform::KeyExchange(KeyExchangeId::None),
                Transform::Esn(false),
            ]
        );
        let esn = parse_proposal(ProtocolId::Esp, "aes128-sha256-esn-noesn").unwrap();
        assert!(esn.transforms.contains(&Transform::Esn(true)));
        assert!(esn.transforms.contains(&Transform::Esn(false)));
    }

    #[test]
    fn proposals_that_cannot_work_are_refused() {
        for text in [
            "aes128gcm16-modp2048",
            "aes256-sha256",
            "sha256-modp2048",
            "aes256gcm16-aes256-sha256-ecp256",
            "aes256-sha256-none",
        ] {
            assert!(
                matches!(ike(text), Err(ProposalError::Unusable(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn unknown_keywords_are_refused_with_a_suggestion() {
        for (text, part) in [
            ("AES256-SHA256-MODP2048", "lower case"),
            ("aes256-sha256-modp2048!", "`!`"),
            ("aes256/sha256/modp2048", "joined by"),
            ("aes256-sha265-modp2048", "`sha256`"),
        ] {
            let Err(ProposalError::Unknown { suggestion, .. }) = ike(text) else {
                panic!("{text}");
            };
            assert!(suggestion.unwrap().contains(part), "{text}");
        }
    }

    #[test]
    fn additional_key_exchanges_are_read() {
        let proposal = ike("aes256-sha256-x25519-ke1_mlkem768-ke1_none").unwrap();
        assert!(
            proposal
                .transforms
                .contains(&Transform::AdditionalKeyExchange {
                    index: 1,
                    id: KeyExchangeId::MlKem768
                })
        );
        assert!(ike("aes256-sha256-x25519-ke8_mlkem768").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "([a-z0-9_!]{1,8}|aes256|sha256|x25519|-){0,10}") {
            for protocol in [ProtocolId::Ike, ProtocolId::Esp] {
                if let Ok(proposal) = parse_proposal(protocol, &text) {
                    prop_assert!(!proposal.transforms.is_empty());
                }
            }
        }
    }
}
