// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Algorithms that are better not used (RFC 8221, RFC 8247).

use swanherd_ipsec::Proposal;
use swanherd_ipsec::proposal::Transform;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

use super::Definitions;
use crate::diagnostic::Diagnostic;
use crate::model::ChildMode;

/// Names of weak algorithms in a set of proposals.
fn weak_in(proposals: &[Proposal]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = proposals
        .iter()
        .flat_map(|proposal| &proposal.transforms)
        .filter_map(|transform| match transform {
            Transform::Encryption { id, .. } => match id {
                EncryptionId::Null => Some("null encryption"),
                EncryptionId::TripleDes => Some("3DES"),
                EncryptionId::Blowfish => Some("Blowfish"),
                EncryptionId::Unknown(2) => Some("DES"),
                EncryptionId::Unknown(6) => Some("CAST"),
                _ => None,
            },
            Transform::Integrity(IntegrityId::HmacMd5_96 | IntegrityId::HmacMd5_128)
            | Transform::Prf(PrfId::HmacMd5) => Some("MD5"),
            Transform::KeyExchange(id) | Transform::AdditionalKeyExchange { id, .. } => match id {
                KeyExchangeId::Modp768 => Some("modp768"),
                KeyExchangeId::Modp1024 => Some("modp1024"),
                KeyExchangeId::Modp1536 => Some("modp1536"),
                KeyExchangeId::Modp1024s160 => Some("modp1024s160"),
                KeyExchangeId::Ecp192 => Some("ecp192"),
                _ => None,
            },
            _ => None,
        })
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn finding(weak: &[&str]) -> Diagnostic {
    Diagnostic::warning(
        "weak",
        format!(
            "the proposals have algorithms that are weak: {}",
            weak.join(", ")
        ),
    )
    .help("offer stronger ones first, and drop these once the peer can do better")
}

pub(super) fn weak(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for connection in definitions.connections() {
        let weak = weak_in(&connection.proposals);
        if !weak.is_empty() {
            found.push(definitions.about(finding(&weak), connection, &[], Some("proposals")));
        }
    }
    for (connection, child) in definitions.children() {
        let weak = weak_in(&child.proposals);
        if !weak.is_empty() {
            let sections = ["children", child.name.as_str()];
            found.push(definitions.about(
                finding(&weak),
                connection,
                &sections,
                Some("esp_proposals"),
            ));
        }
    }
}

pub(super) fn without_key_exchange(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for (connection, child) in definitions.children() {
        let sections = ["children", child.name.as_str()];
        let has = child.proposals.iter().any(|proposal| {
            proposal.transforms.iter().any(|transform| {
                matches!(transform, Transform::KeyExchange(id) if *id != KeyExchangeId::None)
            })
        });
        if !has
            && matches!(child.mode, ChildMode::Ipsec(_))
            && definitions.is_set(connection, &sections, "esp_proposals")
        {
            let finding = Diagnostic::note(
                "no-pfs",
                "no proposal has a key exchange: whoever gets the keys of the IKE SA has those of every child",
            )
            .help("add one to each proposal, such as `-x25519`");
            found.push(definitions.about(finding, connection, &sections, Some("esp_proposals")));
        }
    }
}
