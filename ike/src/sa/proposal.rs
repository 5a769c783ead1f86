// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Choosing a suite from two sides' proposals (RFC 7296 section 3.3.6).
//!
//! The key length is part of a cipher (RFC 7296 section 3.3.5): AES without the attribute matches
//! nothing. Transforms that are not understood are passed over; a transform *type* that is not
//! understood makes its proposal unusable. Integrity `NONE` next to an AEAD cipher means the same
//! as no integrity transform (RFC 5282 section 8).

use swanherd_ipsec::proposal::{ChildSuite, IkeSuite, Proposal, ProtocolId, Transform};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

/// Integrity algorithm 0.
const INTEGRITY_NONE: IntegrityId = IntegrityId::Unknown(0);

/// What was agreed: the place of the chosen proposal in the peer's list, the suite, and the
/// proposal that says so to the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen<S> {
    /// Index into the peer's proposals.
    pub(crate) index: usize,
    /// The suite.
    pub(crate) suite: S,
    /// The chosen transforms only.
    pub(crate) reply: Proposal,
}

/// Whether key exchange takes part in the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyExchangeRule {
    /// IKE_AUTH: the CHILD SA has none of its own, whatever is offered.
    Ignore,
    /// CREATE_CHILD_SA.
    Negotiate,
}

/// Chooses the suite of an IKE SA. `prefer_ours` lets the order of `ours` decide, else the peer's.
pub(crate) fn select_ike(
    ours: &[Proposal],
    theirs: &[Proposal],
    prefer_ours: bool,
) -> Option<Chosen<IkeSuite>> {
    pick(ours, theirs, prefer_ours, |index, a, b| {
        if a.protocol != ProtocolId::Ike || b.protocol != ProtocolId::Ike {
            return None;
        }
        let parts = agree(a, b, KeyExchangeRule::Negotiate, prefer_ours)?;
        let (encryption, key_bits) = parts.encryption?;
        Some(Chosen {
            index,
            suite: IkeSuite {
                encryption,
                key_bits,
                integrity: parts.integrity,
                prf: parts.prf?,
                key_exchange: parts.key_exchange?,
            },
            reply: parts.reply(ProtocolId::Ike),
        })
    })
}

/// Chooses the suite of a CHILD SA.
pub(crate) fn select_child(
    ours: &[Proposal],
    theirs: &[Proposal],
    rule: KeyExchangeRule,
    prefer_ours: bool,
) -> Option<Chosen<ChildSuite>> {
    pick(ours, theirs, prefer_ours, |index, a, b| {
        if a.protocol != ProtocolId::Esp || b.protocol != ProtocolId::Esp {
            return None;
        }
        let parts = agree(a, b, rule, prefer_ours)?;
        let (encryption, key_bits) = parts.encryption?;
        Some(Chosen {
            index,
            suite: ChildSuite {
                encryption,
                key_bits,
                integrity: parts.integrity,
                key_exchange: parts.key_exchange,
                esn: parts.esn.unwrap_or(false),
            },
            reply: parts.reply(ProtocolId::Esp),
        })
    })
}

/// The proposals as offered in IKE_AUTH: without key exchange (RFC 7296 section 1.2).
pub(crate) fn without_key_exchange(proposals: &[Proposal]) -> Vec<Proposal> {
    let mut out: Vec<Proposal> = Vec::new();
    for proposal in proposals {
        let stripped = Proposal {
            protocol: proposal.protocol,
            transforms: proposal
                .transforms
                .iter()
                .copied()
                .filter(|t| {
                    !matches!(
                        t,
                        Transform::KeyExchange(_) | Transform::AdditionalKeyExchange { .. }
                    )
                })
                .collect(),
        };
        if !out.contains(&stripped) {
            out.push(stripped);
        }
    }
    out
}

/// Every key exchange method of `proposals`, most preferred first, `NONE` excluded.
pub(crate) fn key_exchanges(proposals: &[Proposal]) -> Vec<KeyExchangeId> {
    let mut out = Vec::new();
    for transform in proposals.iter().flat_map(|p| &p.transforms) {
        if let Transform::KeyExchange(id) = transform
            && *id != KeyExchangeId::None
            && !out.contains(id)
        {
            out.push(*id);
        }
    }
    out
}

/// The proposals with `first` moved to the front of the key exchange methods, so that a retry
/// offers the same but prefers what the peer asked for.
pub(crate) fn promote_key_exchange(proposals: &[Proposal], first: KeyExchangeId) -> Vec<Proposal> {
    let has = |p: &Proposal| p.transforms.contains(&Transform::KeyExchange(first));
    let mut out: Vec<Proposal> = proposals.iter().filter(|p| has(p)).cloned().collect();
    for proposal in &mut out {
        proposal.transforms.sort_by_key(|t| match t {
            Transform::KeyExchange(id) => (kind(t), u8::from(*id != first)),
            _ => (kind(t), 0),
        });
    }
    out.extend(proposals.iter().filter(|p| !has(p)).cloned());
    out
}

/// `AES_CBC-256/HMAC_SHA2_256_128/...` for logs.
pub(crate) fn describe(proposals: &[Proposal]) -> String {
    proposals
        .iter()
        .map(|p| {
            let names: Vec<String> = p
                .transforms
                .iter()
                .map(|t| match t {
                    Transform::Encryption {
                        id,
                        key_bits: Some(bits),
                    } => format!("{id}_{bits}"),
                    Transform::Encryption { id, key_bits: None } => id.to_string(),
                    Transform::Prf(id) => id.to_string(),
                    Transform::Integrity(id) => id.to_string(),
                    Transform::KeyExchange(id) => id.to_string(),
                    Transform::Esn(true) => "EXT_SEQ".to_owned(),
                    Transform::Esn(false) => "NO_EXT_SEQ".to_owned(),
                    Transform::AdditionalKeyExchange { index, id } => format!("KE{index}_{id}"),
                    Transform::Unknown { transform_type, id } => {
                        format!("({transform_type}:{id})")
                    }
                })
                .collect();
            format!("{}:{}", p.protocol, names.join("/"))
        })
        .collect::<Vec<_>>()
        .join(", ")
}

fn pick<S>(
    ours: &[Proposal],
    theirs: &[Proposal],
    prefer_ours: bool,
    try_pair: impl Fn(usize, &Proposal, &Proposal) -> Option<Chosen<S>>,
) -> Option<Chosen<S>> {
    if prefer_ours {
        ours.iter().find_map(|a| {
            theirs
                .iter()
                .enumerate()
                .find_map(|(i, b)| try_pair(i, a, b))
        })
    } else {
        theirs
            .iter()
            .enumerate()
            .find_map(|(i, b)| ours.iter().find_map(|a| try_pair(i, a, b)))
    }
}

/// The transforms agreed between two proposals.
#[derive(Clone, Copy)]
struct Parts {
    encryption: Option<(EncryptionId, Option<u16>)>,
    prf: Option<PrfId>,
    integrity: Option<IntegrityId>,
    integrity_none: bool,
    key_exchange: Option<KeyExchangeId>,
    key_exchange_none: bool,
    esn: Option<bool>,
}

impl Parts {
    fn reply(&self, protocol: ProtocolId) -> Proposal {
        let mut transforms = Vec::new();
        if let Some((id, key_bits)) = self.encryption {
            transforms.push(Transform::Encryption { id, key_bits });
        }
        if let Some(id) = self.integrity {
            transforms.push(Transform::Integrity(id));
        } else if self.integrity_none {
            transforms.push(Transform::Integrity(INTEGRITY_NONE));
        }
        if let Some(id) = self.prf {
            transforms.push(Transform::Prf(id));
        }
        if let Some(id) = self.key_exchange {
            transforms.push(Transform::KeyExchange(id));
        } else if self.key_exchange_none {
            transforms.push(Transform::KeyExchange(KeyExchangeId::None));
        }
        if let Some(esn) = self.esn {
            transforms.push(Transform::Esn(esn));
        }
        Proposal {
            protocol,
            transforms,
        }
    }
}

fn kind(transform: &Transform) -> u8 {
    match transform {
        Transform::Encryption { .. } => 1,
        Transform::Prf(_) => 2,
        Transform::Integrity(_) => 3,
        Transform::KeyExchange(_) => 4,
        Transform::Esn(_) => 5,
        Transform::AdditionalKeyExchange { index, .. } => 5 + index,
        Transform::Unknown { transform_type, .. } => *transform_type,
    }
}

fn agree(
    ours: &Proposal,
    theirs: &Proposal,
    rule: KeyExchangeRule,
    prefer_ours: bool,
) -> Option<Parts> {
    // A type beyond those of the two protocols, or an additional key exchange without a way out,
    // is something the peer insists on and this side does not have.
    for index in 1..=7_u8 {
        let mut methods = theirs.transforms.iter().filter_map(|t| match t {
            Transform::AdditionalKeyExchange { index: i, id } if *i == index => Some(*id),
            _ => None,
        });
        let mut seen = false;
        if !methods
            .by_ref()
            .inspect(|_| seen = true)
            .any(|id| id == KeyExchangeId::None)
            && seen
        {
            return None;
        }
    }
    if theirs
        .transforms
        .iter()
        .any(|t| matches!(t, Transform::Unknown { transform_type, .. } if !(1..=12).contains(transform_type)))
    {
        return None;
    }

    let encryptions = common(ours, theirs, prefer_ours, |t| match *t {
        Transform::Encryption { id, key_bits } => Some((id, normal_key_bits(id, key_bits))),
        _ => None,
    });
    encryptions
        .into_iter()
        .find_map(|cipher| agree_with(ours, theirs, rule, prefer_ours, cipher))
}

fn agree_with(
    ours: &Proposal,
    theirs: &Proposal,
    rule: KeyExchangeRule,
    prefer_ours: bool,
    (cipher, key_bits): (EncryptionId, Option<u16>),
) -> Option<Parts> {
    let integrity_of = |t: &Transform| match *t {
        Transform::Integrity(id) => Some(id),
        _ => None,
    };
    let their_integrity_none = theirs
        .transforms
        .contains(&Transform::Integrity(INTEGRITY_NONE));
    let integrity = if cipher.is_aead() {
        None
    } else {
        Some(
            common(ours, theirs, prefer_ours, integrity_of)
                .into_iter()
                .find(|id| *id != INTEGRITY_NONE)?,
        )
    };

    let prf = common(ours, theirs, prefer_ours, |t| match *t {
        Transform::Prf(id) => Some(id),
        _ => None,
    })
    .first()
    .copied();
    if theirs.protocol == ProtocolId::Ike && prf.is_none() {
        return None;
    }

    let methods_of = |p: &Proposal| -> Vec<KeyExchangeId> {
        p.transforms
            .iter()
            .filter_map(|t| match *t {
                Transform::KeyExchange(id) => Some(id),
                _ => None,
            })
            .collect()
    };
    let (our_methods, their_methods) = (methods_of(ours), methods_of(theirs));
    let optional =
        |methods: &[KeyExchangeId]| methods.is_empty() || methods.contains(&KeyExchangeId::None);
    let key_exchange = match rule {
        KeyExchangeRule::Ignore => None,
        KeyExchangeRule::Negotiate => {
            let shared = common(ours, theirs, prefer_ours, |t| match *t {
                Transform::KeyExchange(id) => Some(id),
                _ => None,
            });
            match shared.first().copied() {
                Some(KeyExchangeId::None) => None,
                Some(id) => Some(id),
                None if optional(&our_methods) && optional(&their_methods) => None,
                None => return None,
            }
        }
    };

    let esn_of = |t: &Transform| match *t {
        Transform::Esn(esn) => Some(esn),
        _ => None,
    };
    let esn = if theirs.protocol == ProtocolId::Esp {
        let offered = |p: &Proposal| p.transforms.iter().filter_map(esn_of).next().is_some();
        match common(ours, theirs, prefer_ours, esn_of).first() {
            Some(esn) => Some(*esn),
            None if !offered(theirs)
                && !ours.transforms.contains(&Transform::Esn(false))
                && offered(ours) =>
            {
                return None;
            }
            None if !offered(theirs) => None,
            // The peer names its choices and this side is silent, which means "none".
            None if !offered(ours) && theirs.transforms.contains(&Transform::Esn(false)) => {
                Some(false)
            }
            None => return None,
        }
    } else {
        None
    };

    // As the peer wrote the cipher, so that it recognises its own transform in the answer.
    let key_bits_as_offered = theirs
        .transforms
        .iter()
        .find_map(|t| match *t {
            Transform::Encryption { id, key_bits: bits }
                if id == cipher && normal_key_bits(id, bits) == key_bits =>
            {
                Some(bits)
            }
            _ => None,
        })
        .unwrap_or(key_bits);

    Some(Parts {
        encryption: Some((cipher, key_bits_as_offered)),
        prf,
        integrity,
        integrity_none: cipher.is_aead() && their_integrity_none,
        key_exchange,
        key_exchange_none: rule == KeyExchangeRule::Negotiate
            && their_methods.contains(&KeyExchangeId::None),
        esn,
    })
}

/// ChaCha20 has one key size (RFC 7634 section 2), which some peers name nevertheless.
fn normal_key_bits(id: EncryptionId, key_bits: Option<u16>) -> Option<u16> {
    match (id, key_bits) {
        (EncryptionId::ChaCha20Poly1305, Some(256)) => None,
        (_, bits) => bits,
    }
}

fn common<T: PartialEq>(
    ours: &Proposal,
    theirs: &Proposal,
    prefer_ours: bool,
    part: impl Fn(&Transform) -> Option<T>,
) -> Vec<T> {
    let (first, second) = if prefer_ours {
        (ours, theirs)
    } else {
        (theirs, ours)
    };
    let others: Vec<T> = second.transforms.iter().filter_map(&part).collect();
    first
        .transforms
        .iter()
        .filter_map(&part)
        .filter(|t| others.contains(t))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AES128: Transform = Transform::Encryption {
        id: EncryptionId::AesCbc,
        key_bits: Some(128),
    };
    const GCM256: Transform = Transform::Encryption {
        id: EncryptionId::AesGcm16,
        key_bits: Some(256),
    };

    fn esp(transforms: &[Transform]) -> Proposal {
        Proposal {
            protocol: ProtocolId::Esp,
            transforms: transforms.to_vec(),
        }
    }

    #[test]
    fn integrity_none_beside_an_aead_cipher_is_accepted_and_echoed() {
        let ours = [esp(&[GCM256, Transform::Esn(false)])];
        let theirs = [esp(&[
            GCM256,
            Transform::Integrity(INTEGRITY_NONE),
            Transform::Esn(false),
        ])];

        let chosen = select_child(&ours, &theirs, KeyExchangeRule::Ignore, true).unwrap();

        assert_eq!(chosen.suite.integrity, None);
        assert!(
            chosen
                .reply
                .transforms
                .contains(&Transform::Integrity(INTEGRITY_NONE))
        );
    }

    #[test]
    fn a_cipher_without_its_key_length_is_not_chosen() {
        let ours = [esp(&[
            AES128,
            Transform::Integrity(IntegrityId::HmacSha1_96),
        ])];
        let theirs = [esp(&[
            Transform::Encryption {
                id: EncryptionId::AesCbc,
                key_bits: None,
            },
            Transform::Integrity(IntegrityId::HmacSha1_96),
        ])];

        assert_eq!(
            select_child(&ours, &theirs, KeyExchangeRule::Ignore, true),
            None
        );
    }

    #[test]
    fn an_unknown_algorithm_is_passed_over_but_an_unknown_type_spoils_its_proposal() {
        let ours = [esp(&[GCM256])];
        let mut offer = vec![
            Transform::Unknown {
                transform_type: 1,
                id: 99,
            },
            GCM256,
        ];
        assert!(select_child(&ours, &[esp(&offer)], KeyExchangeRule::Ignore, true).is_some());

        offer.push(Transform::Unknown {
            transform_type: 200,
            id: 1,
        });
        assert_eq!(
            select_child(&ours, &[esp(&offer)], KeyExchangeRule::Ignore, true),
            None
        );
    }

    #[test]
    fn key_exchange_is_required_unless_both_sides_make_it_optional() {
        let x25519 = Transform::KeyExchange(KeyExchangeId::Curve25519);
        let none = Transform::KeyExchange(KeyExchangeId::None);
        let negotiate = |a: &[Transform], b: &[Transform]| {
            select_child(&[esp(a)], &[esp(b)], KeyExchangeRule::Negotiate, true)
                .map(|c| c.suite.key_exchange)
        };

        assert_eq!(negotiate(&[GCM256, x25519], &[GCM256]), None);
        assert_eq!(negotiate(&[GCM256, x25519, none], &[GCM256]), Some(None));
        assert_eq!(
            negotiate(&[GCM256, x25519, none], &[GCM256, x25519]),
            Some(Some(KeyExchangeId::Curve25519))
        );
    }
}
