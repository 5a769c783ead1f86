// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that cannot be told apart, reached or named.

use std::collections::BTreeMap;
use std::net::IpAddr;

use swanherd_ipsec::identity::IdType;

use super::{Definitions, listed};
use crate::diagnostic::Diagnostic;
use crate::identity::IdentityPattern;
use crate::model::{ChildMode, Connection, HostSpec};

/// The longest name in a VICI message.
const MAX_VICI_NAME: usize = 255;

pub(super) fn same(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let text = |id: Option<&IdentityPattern>| id.map(ToString::to_string).unwrap_or_default();
    let mut seen: BTreeMap<_, &Connection> = BTreeMap::new();
    for connection in definitions.connections() {
        let local = connection.local.first();
        let remote = connection.remote.first();
        let key = (
            &connection.local_addrs,
            &connection.remote_addrs,
            text(local.and_then(|round| round.id.as_ref())),
            text(remote.and_then(|round| round.id.as_ref())),
            &connection.proposals,
        );
        match seen.get(&key) {
            None => {
                seen.insert(key, connection);
            }
            Some(first) => {
                let finding = Diagnostic::warning(
                    "same-peer",
                    format!(
                        "addresses, identities and proposals are those of `{}`: what the peer initiates is taken for that one",
                        first.name
                    ),
                )
                .help("make the children of both children of one connection, or set `id` in `remote`");
                found.push(definitions.about(finding, connection, &[], None));
            }
        }
    }
}

pub(super) fn cannot_initiate(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for (connection, child) in definitions.children() {
        let reachable = connection
            .remote_addrs
            .iter()
            .any(|host| matches!(host, HostSpec::Addr(_) | HostSpec::Name(_)));
        if reachable || matches!(child.mode, ChildMode::Pass | ChildMode::Drop) {
            continue;
        }
        for (key, action) in [
            ("start_action", child.start_action),
            ("dpd_action", child.dpd_action),
            ("close_action", child.close_action),
        ] {
            if action.start || action.trap {
                let finding = Diagnostic::warning(
                    "cannot-initiate",
                    format!("`{key}` wants this side to initiate, but `remote_addrs` has no address to initiate to"),
                )
                .help("name the peer's address in `remote_addrs`, or leave initiating to the peer");
                found.push(definitions.about(
                    finding,
                    connection,
                    &["children", &child.name],
                    Some(key),
                ));
            }
        }
    }
}

pub(super) fn child_names(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut by_name: BTreeMap<&str, Vec<&Connection>> = BTreeMap::new();
    for (connection, child) in definitions.children() {
        by_name.entry(&child.name).or_default().push(connection);
    }
    for (name, connections) in by_name {
        let [first, second, ..] = connections.as_slice() else {
            continue;
        };
        let finding = Diagnostic::note(
            "same-child-name",
            format!(
                "the child `{name}` is in {}: commands that name no connection mean that of `{}`",
                listed(
                    connections
                        .iter()
                        .map(|connection| connection.name.as_str())
                ),
                first.name
            ),
        );
        found.push(definitions.about(finding, second, &["children", name], None));
    }
}

pub(super) fn long_names(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let finding = |name: &str| {
        Diagnostic::warning(
            "name-too-long",
            format!(
                "the name has {} octets, and VICI clients can name no more than {MAX_VICI_NAME}",
                name.len()
            ),
        )
    };
    for connection in definitions.connections() {
        if connection.name.len() > MAX_VICI_NAME {
            found.push(definitions.about(finding(&connection.name), connection, &[], None));
        }
    }
    for (connection, child) in definitions.children() {
        if child.name.len() > MAX_VICI_NAME {
            let sections = ["children", child.name.as_str()];
            found.push(definitions.about(finding(&child.name), connection, &sections, None));
        }
    }
}

/// `@192.0.2.1` is a name, which the identity 192.0.2.1 of a peer does not match.
pub(super) fn address_like(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for connection in definitions.connections() {
        for round in connection.local.iter().chain(&connection.remote) {
            let Some(id) = &round.id else { continue };
            let text = id.to_string();
            if id.id_type() == Some(IdType::Fqdn) && text.parse::<IpAddr>().is_ok() {
                let finding = Diagnostic::warning(
                    "identity",
                    format!("`{text}` is taken as a domain name, not as an address"),
                )
                .help("leave out the `@` if the peer's identity is its address");
                let section = round.section.as_str();
                found.push(definitions.about(finding, connection, &[section], Some("id")));
            }
        }
    }
}
