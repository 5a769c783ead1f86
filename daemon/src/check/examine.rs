// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be known of definitions once their certificates and keys are read, too.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use swanherd_config::Diagnostic;
use swanherd_config::check::{self, Definitions};
use swanherd_config::load::{CertificateKind, Loaded};
use swanherd_config::model::{AuthMethod, CertSource, ChildMode, Connection};
use swanherd_ike::credentials::{Certificate, PrivateKey};
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::proposal::Transform;
use swanherd_ipsec::registry::KeyExchangeId;
use swanherd_ipsec::{Proposal, ProtocolId};

/// Everything doubtful that the definitions and credentials show together.
pub(super) fn examine(loaded: &Loaded) -> Vec<Diagnostic> {
    let mut found = check::findings(loaded);
    let definitions = Definitions::new(loaded);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_secs());
    certificates(loaded, now, &mut found);
    let keys = keys(loaded, &mut found);
    modes(loaded, &definitions, &mut found);
    for connection in definitions.connections() {
        identity(&definitions, connection, &keys, &mut found);
        proposals(&definitions, connection, &mut found);
    }
    found
}

fn certificates(loaded: &Loaded, now: u64, found: &mut Vec<Diagnostic>) {
    for file in &loaded.certificates {
        let path = file.path.display();
        let certificate = match Certificate::parse(&file.data) {
            Ok(certificate) => certificate,
            Err(error) => {
                found.push(Diagnostic::error(
                    "unusable-credential",
                    format!("{path}: {error}"),
                ));
                continue;
            }
        };
        if file.kind == CertificateKind::Authority && !certificate.is_ca() {
            found.push(
                Diagnostic::error(
                    "unusable-credential",
                    format!("{path}: this is no certificate of an authority, and is not trusted"),
                )
                .help("certificates of gateways belong into x509"),
            );
        }
        if !certificate.valid_at(now) {
            let (from, _) = certificate.validity();
            let state = if now < from {
                "is not valid yet"
            } else {
                "has expired"
            };
            found.push(Diagnostic::warning(
                "certificate-validity",
                format!("{path}: the certificate {state}"),
            ));
        }
    }
}

/// The ids of the private keys.
fn keys(loaded: &Loaded, found: &mut Vec<Diagnostic>) -> BTreeSet<[u8; 20]> {
    let mut ids = BTreeSet::new();
    for file in &loaded.private_keys {
        match PrivateKey::parse(file.data.expose()) {
            Ok(key) => {
                ids.insert(key.public().key_id());
            }
            Err(error) => found.push(Diagnostic::error(
                "unusable-credential",
                format!("{}: {error}", file.path.display()),
            )),
        }
    }
    ids
}

fn modes(loaded: &Loaded, definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let secrets = definitions.files_with_secrets().into_iter().map(Path::new);
    let keys = loaded.private_keys.iter().map(|key| key.path.as_path());
    for path in secrets.chain(keys) {
        let open = std::fs::metadata(path)
            .is_ok_and(|metadata| metadata.permissions().mode() & 0o004 != 0);
        if open {
            found.push(
                Diagnostic::warning(
                    "file-mode",
                    format!("{} has secrets, and everybody can read it", path.display()),
                )
                .help("chmod o-r"),
            );
        }
    }
}

/// Whether this side can prove who it says it is.
fn identity(
    definitions: &Definitions<'_>,
    connection: &Connection,
    keys: &BTreeSet<[u8; 20]>,
    found: &mut Vec<Diagnostic>,
) {
    let Some(round) = connection.local.first() else {
        return;
    };
    if !matches!(round.auth, AuthMethod::Pubkey(_)) {
        return;
    }
    // What is no certificate was refused before.
    let certificates: Vec<Certificate> = round
        .certs
        .iter()
        .filter_map(|source| match source {
            CertSource::Data(data) => Certificate::parse(data).ok(),
            CertSource::File(_) => None,
        })
        .collect();
    if certificates.is_empty() {
        return;
    }
    let about = |finding: Diagnostic, key: &str| {
        definitions.about(finding, connection, &[&round.section], Some(key))
    };
    if !certificates
        .iter()
        .any(|certificate| keys.contains(&certificate.public_key().key_id()))
    {
        found.push(about(
            Diagnostic::warning(
                "no-private-key",
                "no private key belongs to any of these certificates",
            )
            .help("put it into `private`, unless a VICI client loads it"),
            "certs",
        ));
    }
    if let Some(identity) = round.id.as_ref().and_then(|id| id.identity())
        && !certificates
            .iter()
            .any(|certificate| certificate.has_identity(&identity))
    {
        let names: Vec<String> = certificates
            .iter()
            .map(Certificate::describe_names)
            .collect();
        found.push(about(
            Diagnostic::warning(
                "id-not-in-certificate",
                format!(
                    "the certificate is not of this identity, so that peers will refuse it; it is of {}",
                    names.join(" and ")
                ),
            ),
            "id",
        ));
    }
}

fn proposals(definitions: &Definitions<'_>, connection: &Connection, found: &mut Vec<Diagnostic>) {
    let mut judge = |proposals: &[Proposal], sections: &[&str], key: &str| {
        if !definitions.is_set(connection, sections, key) {
            return;
        }
        let lacking: Vec<String> = proposals.iter().filter_map(lacks).collect();
        let finding = match (lacking.first(), lacking.len() == proposals.len()) {
            (None, _) => return,
            (Some(what), true) => Diagnostic::error(
                "impossible-proposal",
                format!("no proposal can be agreed upon: {what} is not supported"),
            ),
            (Some(what), false) => Diagnostic::warning(
                "impossible-proposal",
                format!(
                    "{} of {} proposals cannot be agreed upon: {what} is not supported",
                    lacking.len(),
                    proposals.len()
                ),
            ),
        };
        found.push(definitions.about(finding, connection, sections, Some(key)));
    };
    judge(&connection.proposals, &[], "proposals");
    for child in &connection.children {
        if matches!(child.mode, ChildMode::Ipsec(_) | ChildMode::TransportProxy) {
            judge(
                &child.proposals,
                &["children", &child.name],
                "esp_proposals",
            );
        }
    }
}

/// The part of a proposal of which nothing is supported.
fn lacks(proposal: &Proposal) -> Option<String> {
    let provider = Provider::ring();
    let mut parts: BTreeMap<(u8, u8), Vec<Transform>> = BTreeMap::new();
    for transform in &proposal.transforms {
        let part = match transform {
            // What ESP can encrypt with is the plane's business, which is known when it is there.
            Transform::Encryption { .. } | Transform::Prf(_) | Transform::Integrity(_)
                if proposal.protocol != ProtocolId::Ike =>
            {
                continue;
            }
            Transform::Encryption { .. } => (1, 0),
            Transform::Prf(_) => (2, 0),
            Transform::Integrity(_) => (3, 0),
            Transform::KeyExchange(_) => (4, 0),
            Transform::AdditionalKeyExchange { index, .. } => (6, *index),
            // Every plane has both, and what is unknown is never configured.
            Transform::Esn(_) | Transform::Unknown { .. } => continue,
        };
        parts.entry(part).or_default().push(*transform);
    }
    let supported = |transform: &Transform| {
        matches!(
            transform,
            Transform::KeyExchange(KeyExchangeId::None)
                | Transform::AdditionalKeyExchange {
                    id: KeyExchangeId::None,
                    ..
                }
        ) || provider.supports(*transform)
    };
    let part = parts
        .values()
        .find(|transforms| !transforms.iter().any(supported))?;
    let names: Vec<String> = part.iter().map(name).collect();
    Some(names.join(", "))
}

fn name(transform: &Transform) -> String {
    match transform {
        Transform::Encryption {
            id,
            key_bits: Some(bits),
        } => format!("{id}-{bits}"),
        Transform::Encryption { id, key_bits: None } => id.to_string(),
        Transform::Prf(id) => id.to_string(),
        Transform::Integrity(id) => id.to_string(),
        Transform::KeyExchange(id) | Transform::AdditionalKeyExchange { id, .. } => id.to_string(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests;
