// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is doubtful about definitions that are each in order: rules that look at several of them,
//! or at whether one can ever do what it says.
//!
//! None of this keeps anything from loading, so only `swanherd check` says it.

mod peers;
mod secrets;
mod selectors;
mod suites;
mod times;

use std::collections::{BTreeMap, BTreeSet};

use crate::diagnostic::Diagnostic;
use crate::load::Loaded;
use crate::model::{Child, Connection};
use crate::names::Names;
use crate::tree::{Item, Location, Tree};

/// Findings of one rule that are kept.
const MAX_FINDINGS: usize = 100;

/// Every code of a diagnostic, sorted. `docs/check.md` explains each.
pub const CODES: &[&str] = &[
    "ambiguous-secret",
    "blanks-collapsed",
    "byte-order-mark",
    "cannot-initiate",
    "certificate-validity",
    "comment-in-value",
    "encrypted-key",
    "expires-before-rekey",
    "file-mode",
    "hex",
    "host-bits",
    "id-not-in-certificate",
    "identity",
    "impossible-proposal",
    "include",
    "insecure",
    "invalid-value",
    "missing-secret",
    "more",
    "name-too-long",
    "never-rekeyed",
    "no-effect",
    "no-margin",
    "no-pfs",
    "no-private-key",
    "no-secret",
    "not-honoured",
    "overlapping-selectors",
    "repeated-key",
    "repeated-section",
    "same-child-name",
    "same-peer",
    "same-reqid",
    "same-selectors",
    "short-secret",
    "syntax",
    "too-large",
    "unknown-option",
    "unknown-section",
    "unknown-setting",
    "unreadable",
    "unsupported",
    "unusable-credential",
    "unused-secret",
    "weak",
];

/// Everything doubtful about the definitions that load.
pub fn findings(loaded: &Loaded) -> Vec<Diagnostic> {
    let definitions = Definitions::new(loaded);
    let mut found = Vec::new();
    for rule in [
        repeated_sections,
        selectors::same,
        selectors::overlapping,
        selectors::reqids,
        peers::same,
        peers::cannot_initiate,
        peers::child_names,
        peers::long_names,
        peers::address_like,
        secrets::ambiguous,
        secrets::short,
        secrets::missing,
        secrets::unused,
        suites::weak,
        suites::without_key_exchange,
        times::children,
        times::connections,
    ] {
        let before = found.len();
        rule(&definitions, &mut found);
        let more = (found.len() - before).saturating_sub(MAX_FINDINGS);
        if more > 0 {
            found.truncate(before + MAX_FINDINGS);
            let code = found[before].code;
            found.push(Diagnostic::note(
                "more",
                format!("{more} more findings `{code}` are not shown"),
            ));
        }
    }
    found
}

/// The definitions that load, with their places.
pub struct Definitions<'a> {
    loaded: &'a Loaded,
    names: Names,
    sections: BTreeMap<&'a str, (Option<&'a Location>, &'a Tree)>,
}

impl<'a> Definitions<'a> {
    /// Those of `loaded`.
    pub fn new(loaded: &'a Loaded) -> Self {
        let sections = loaded
            .tree
            .section("connections")
            .into_iter()
            .flat_map(Tree::sections)
            .map(|(entry, tree)| (entry.name.as_str(), (entry.location.as_ref(), tree)))
            .collect();
        Self {
            loaded,
            names: Names::builtin(),
            sections,
        }
    }

    /// The connections that load.
    pub fn connections(&self) -> impl Iterator<Item = &'a Connection> {
        self.loaded
            .connections
            .iter()
            .filter_map(|(_, connection)| connection.as_ref().ok())
    }

    /// Their children.
    pub fn children(&self) -> impl Iterator<Item = (&'a Connection, &'a Child)> {
        self.connections().flat_map(|connection| {
            connection
                .children
                .iter()
                .map(move |child| (connection, child))
        })
    }

    /// Puts a finding in the place of a connection's option, or of the section where it would be.
    pub fn about(
        &self,
        finding: Diagnostic,
        connection: &Connection,
        sections: &[&str],
        key: Option<&str>,
    ) -> Diagnostic {
        let mut path = format!("connections.{}", connection.name);
        let (mut place, mut tree) = match self.sections.get(connection.name.as_str()) {
            Some((place, tree)) => (*place, Some(*tree)),
            None => (None, None),
        };
        for section in sections {
            path.push('.');
            path.push_str(section);
            let entry = tree.and_then(|tree| {
                let mut entries = tree.sections();
                entries.find(|(entry, _)| entry.name == **section)
            });
            place = entry
                .and_then(|(entry, _)| entry.location.as_ref())
                .or(place);
            tree = entry.map(|(_, tree)| tree);
        }
        let mut finding = finding.path(path);
        if let Some(key) = key {
            finding = finding.key(key);
            if let Some(Item::Value(value)) = tree.and_then(|tree| tree.get(key)) {
                place = value.location().or(place);
            }
        }
        finding.at(place)
    }

    /// Whether the file sets an option of a connection.
    pub fn is_set(&self, connection: &Connection, sections: &[&str], key: &str) -> bool {
        let tree = self
            .sections
            .get(connection.name.as_str())
            .map(|(_, tree)| *tree);
        sections
            .iter()
            .try_fold(tree, |tree, section| Some(tree?.section(section)))
            .flatten()
            .is_some_and(|tree| tree.get(key).is_some())
    }

    /// The files that have secrets in them.
    pub fn files_with_secrets(&self) -> BTreeSet<&'a str> {
        self.loaded
            .tree
            .section("secrets")
            .into_iter()
            .flat_map(Tree::sections)
            .filter_map(|(entry, _)| Some(entry.location.as_ref()?.source.name()))
            .collect()
    }

    /// Puts a finding in the place of a secret.
    fn about_secret(&self, finding: Diagnostic, id: &str) -> Diagnostic {
        let place = self.loaded.tree.section("secrets").and_then(|secrets| {
            let mut entries = secrets.sections();
            entries
                .find(|(entry, _)| entry.name == id)
                .and_then(|(entry, _)| entry.location.as_ref())
        });
        finding.path(format!("secrets.{id}")).at_secret(place)
    }
}

/// `a`, or `a, b and 3 others`.
fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let count = names.len();
    let shown: Vec<String> = names.take(3).map(|name| format!("`{name}`")).collect();
    let text = shown.join(", ");
    match count.saturating_sub(3) {
        0 => text,
        1 => format!("{text} and one other"),
        more => format!("{text} and {more} others"),
    }
}

fn repeated_sections(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for repeated in &definitions.loaded.repeated_sections {
        let finding = Diagnostic::warning(
            "repeated-section",
            format!(
                "this section was begun in {}; what is in both is one definition",
                repeated.first
            ),
        )
        .path(&repeated.path)
        .help("give one of them another name if they are two");
        // The secret may stand in the same line.
        found.push(if repeated.path.starts_with("secrets.") {
            finding.at_secret(Some(&repeated.again))
        } else {
            finding.at(Some(&repeated.again))
        });
    }
}

#[cfg(test)]
mod tests;
