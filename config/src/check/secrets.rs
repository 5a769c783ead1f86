// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which preshared key is for whom.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_ipsec::Identity;

use super::Definitions;
use crate::diagnostic::Diagnostic;
use crate::identity::{IdentityPattern, identity_key};
use crate::model::{AuthMethod, AuthRound, HostSpec, SharedKind, SharedSecret};

/// Fewer octets can be guessed by whoever has seen a handshake.
const SHORT: usize = 8;

fn keys<'a>(definitions: &Definitions<'a>) -> impl Iterator<Item = (&'a str, &'a SharedSecret)> {
    definitions
        .loaded
        .secrets
        .iter()
        .filter(|secret| secret.kind == SharedKind::Ike)
        .filter_map(|secret| Some((secret.id.as_deref()?, secret)))
}

pub(super) fn ambiguous(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut by_owners: BTreeMap<Vec<Result<Identity, String>>, (&str, &SharedSecret)> =
        BTreeMap::new();
    for (id, secret) in keys(definitions) {
        let mut owners: Vec<_> = secret
            .owners
            .iter()
            .map(|owner| owner.index_key().ok_or_else(|| owner.to_string()))
            .collect();
        owners.sort();
        owners.dedup();
        let ownerless = owners.is_empty();
        match by_owners.get(&owners) {
            None => {
                by_owners.insert(owners, (id, secret));
            }
            Some((first, other)) if other.secret != secret.secret => {
                let text = if ownerless {
                    format!(
                        "neither this key nor `{first}` has an `id`: which one a peer means is a guess"
                    )
                } else {
                    format!(
                        "`{first}` has the same owners and another key: which one a peer means is a guess"
                    )
                };
                let finding = Diagnostic::warning("ambiguous-secret", text)
                    .help("name the identities of both sides, each with a key of its own that begins with `id`");
                found.push(definitions.about_secret(finding, id));
            }
            Some(_) => {}
        }
    }
}

pub(super) fn short(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for (id, secret) in keys(definitions) {
        let len = secret.secret.expose().len();
        if len < SHORT {
            let finding = Diagnostic::warning(
                "short-secret",
                format!("the key has {len} octets only, which can be guessed"),
            )
            .key("secret")
            .help("a key that begins with `0x` or `0s` is hex or base64; write it in other words if it is meant as text");
            found.push(definitions.about_secret(finding, id));
        }
    }
}

/// The identity that a round goes by, if it is known beforehand.
fn identity(round: Option<&AuthRound>, addrs: &[HostSpec]) -> Option<Identity> {
    match round.and_then(|round| round.id.as_ref()) {
        Some(id) => id.index_key(),
        None => match addrs {
            [HostSpec::Addr(addr)] => Some(identity_key(&Identity::from_ip(*addr))),
            _ => None,
        },
    }
}

pub(super) fn missing(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut owners = BTreeSet::new();
    let mut count = 0;
    for (_, secret) in keys(definitions) {
        count += 1;
        for owner in &secret.owners {
            match owner.index_key() {
                Some(key) => owners.insert(key),
                // Who fits a pattern is known when a peer comes.
                None => return,
            };
        }
        if secret.owners.is_empty() {
            return;
        }
    }
    for connection in definitions.connections() {
        let (local, remote) = (connection.local.first(), connection.remote.first());
        let psk = |round: Option<&AuthRound>| round.is_some_and(|r| r.auth == AuthMethod::Psk);
        if !psk(local) && !psk(remote) {
            continue;
        }
        let ids = [
            identity(local, &connection.local_addrs),
            identity(remote, &connection.remote_addrs),
        ];
        let unknown = ids.iter().any(Option::is_none) && count > 0;
        if unknown || ids.iter().flatten().any(|id| owners.contains(id)) {
            continue;
        }
        let finding = Diagnostic::warning(
            "no-secret",
            "no preshared key in `secrets` is for these identities",
        )
        .help("add a section `ike-...` with `secret` and an `id-...` for each side, unless a VICI client loads the key");
        let side = if psk(local) { local } else { remote };
        let section = side.map_or("", |round| round.section.as_str());
        found.push(definitions.about(finding, connection, &[section], Some("auth")));
    }
}

pub(super) fn unused(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut ids = BTreeSet::new();
    for connection in definitions.connections() {
        for (round, addrs) in [
            (connection.local.first(), &connection.local_addrs),
            (connection.remote.first(), &connection.remote_addrs),
        ] {
            match identity(round, addrs) {
                Some(id) => {
                    ids.insert(id);
                }
                // Anybody may come.
                None => return,
            }
        }
    }
    for (id, secret) in keys(definitions) {
        let owners: Option<Vec<Identity>> = secret
            .owners
            .iter()
            .map(IdentityPattern::index_key)
            .collect();
        if owners.is_some_and(|owners| {
            !owners.is_empty() && !owners.iter().any(|owner| ids.contains(owner))
        }) {
            let finding = Diagnostic::note(
                "unused-secret",
                "no connection has an identity that owns this key",
            );
            found.push(definitions.about_secret(finding, id));
        }
    }
}
