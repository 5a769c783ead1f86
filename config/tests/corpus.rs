// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every file of the corpus gives what strongSwan 5.9.8 gave, or deviates for a stated reason.
//!
//! `corpus/NAME.conf` is the input, `corpus/NAME.stock.txt` what the stock tools said to it.
//! `docs/deviations.md` has the reasons for people; the table here is checked against it.

#![allow(
    clippy::unwrap_used,
    reason = "a test that fails to read its own data must panic"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use swanherd_config::diagnostic::Level;
use swanherd_config::files::SystemFiles;
use swanherd_config::listing::list_conn;
use swanherd_config::load::{Loaded, load_swanctl_from};
use swanherd_config::names::Names;
use swanherd_config::tree::Item;
use swanherd_config::{Diagnostic, Tree};

/// How an outcome differs from the stock one.
enum Deviation {
    /// The connection loads although stock refused it; this part of the listing proves it.
    Loads(&'static str),
    /// The connection is refused with this text although stock loaded it.
    Refused(&'static str),
    /// Stock loaded something else than was written; the listing has this instead.
    Lists(&'static str),
    /// The outcome is the same, with a warning of this code that stock does not give.
    Warns(&'static str),
}

use Deviation::{Lists, Loads, Refused, Warns};

const DEVIATIONS: &[(&str, Deviation)] = &[
    ("k18_tfc_mtu", Warns("unsupported")),
    ("k20_hw_packet", Loads("mode=TUNNEL")),
    (
        "m09_version3",
        Refused("invalid value for: version, config discarded"),
    ),
    ("m16_remote_range", Warns("repeated-key")),
    ("m23_dup_remote", Warns("repeated-key")),
    ("p01_value_spaces_unquoted", Warns("blanks-collapsed")),
    ("p03_hash_unquoted_in_secret", Warns("comment-in-value")),
    ("p15_dup_key_last_wins", Warns("repeated-key")),
    ("p20_bom", Loads("remote_addrs=[203.0.113.9]")),
    ("p24_section_name_200", Lists("remote_addrs=[203.0.113.9]")),
    ("s01_hex_odd", Warns("hex")),
    ("s11_idlist", Warns("identity")),
    ("s15_dup", Warns("repeated-key")),
    ("t10_hostbits", Warns("host-bits")),
    ("x09_mlkem", Loads("mode=TUNNEL")),
    ("y05_nointeg", Warns("insecure")),
];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn cases() -> Vec<String> {
    let mut cases: Vec<String> = std::fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "conf")
        })
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    cases.sort();
    cases
}

fn load(case: &str) -> Result<Loaded, Diagnostic> {
    let path = directory().join(format!("{case}.conf"));
    load_swanctl_from(&path, &SystemFiles, &Names::builtin())
}

/// What an outcome consists of.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    /// Line of the syntax error, 0 if not given; `None` if the file is read.
    syntax_error: Option<u32>,
    /// Names of connections, with the text of the refusal.
    connections: Vec<(String, Result<(), String>)>,
    /// `list-conn` events.
    listings: BTreeSet<String>,
    secrets: Vec<String>,
    ignored_secrets: Vec<String>,
    missing_includes: usize,
}

fn stock(case: &str) -> Outcome {
    let text = std::fs::read_to_string(directory().join(format!("{case}.stock.txt"))).unwrap();
    let quoted = |line: &str| line.split('\'').nth(1).unwrap().to_owned();
    let mut outcome = Outcome::default();
    let mut section = "";
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("## ") {
            section = name;
        } else if line.starts_with("loaded connection ") {
            outcome.connections.push((quoted(line), Ok(())));
        } else if line.starts_with("loading connection ") {
            let (_, reason) = line.split_once(" failed: ").unwrap();
            outcome
                .connections
                .push((quoted(line), Err(reason.to_owned())));
        } else if line.starts_with("list-conn event ") {
            outcome.listings.insert(line.to_owned());
        } else if line.starts_with("loaded ike secret ") {
            outcome.secrets.push(quoted(line));
        } else if line.starts_with("missing secret in ")
            || line.starts_with("ignoring unsupported secret ")
        {
            outcome.ignored_secrets.push(quoted(line));
        } else if line.contains("syntax error") {
            let number = line.split(':').nth(1).and_then(|n| n.parse().ok());
            outcome.syntax_error = Some(number.unwrap_or(0));
        } else if section == "load-creds"
            && (line.starts_with("expanding file pattern ")
                || line.starts_with("no files found matching "))
        {
            outcome.missing_includes += 1;
        }
    }
    outcome
}

fn ours(loaded: &Result<Loaded, Diagnostic>, stock: &Outcome) -> Outcome {
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            assert_eq!(error.code, "syntax");
            let line = error.location.as_ref().unwrap().line;
            return Outcome {
                // Stock does not say where a missing brace was opened.
                syntax_error: Some(if stock.syntax_error == Some(0) {
                    0
                } else {
                    line
                }),
                ..Outcome::default()
            };
        }
    };
    let names = Names::builtin();
    Outcome {
        syntax_error: None,
        connections: loaded
            .connections
            .iter()
            .map(|(name, connection)| {
                let result = connection
                    .as_ref()
                    .map(|_| ())
                    .map_err(|error| error.vici_text().to_owned());
                (name.clone(), result)
            })
            .collect(),
        listings: loaded
            .connections
            .iter()
            .filter_map(|(_, connection)| connection.as_ref().ok())
            .map(|connection| format!("list-conn event {}", show(&list_conn(connection, &names))))
            .collect(),
        secrets: loaded
            .secrets
            .iter()
            .map(|secret| secret.id.clone().unwrap())
            .collect(),
        ignored_secrets: loaded
            .diagnostics
            .iter()
            .filter(|d| d.code == "missing-secret" || d.path.starts_with("secrets.psk"))
            .map(|d| d.path.strip_prefix("secrets.").unwrap().to_owned())
            .collect(),
        missing_includes: loaded
            .diagnostics
            .iter()
            .filter(|d| d.code == "include")
            .count(),
    }
}

/// As `swanctl --raw` prints a message, without the keys that 5.9.8 did not have yet.
fn show(tree: &Tree) -> String {
    let mut parts = Vec::new();
    for entry in tree.entries() {
        match &entry.item {
            Item::Value(_)
                if ["local_port", "remote_port", "dpd_timeout"].contains(&&*entry.name) => {}
            Item::Value(value) => parts.push(format!("{}={}", entry.name, value.text().unwrap())),
            Item::List(items) => {
                let items: Vec<_> = items.iter().map(|item| item.text().unwrap()).collect();
                parts.push(format!("{}=[{}]", entry.name, items.join(" ")));
            }
            Item::Section(section) => parts.push(format!("{} {}", entry.name, show(section))),
        }
    }
    format!("{{{}}}", parts.join(" "))
}

#[test]
fn every_case_gives_the_stock_outcome_or_its_stated_deviation() {
    let cases = cases();
    assert_eq!(cases.len(), 161);
    for case in &cases {
        let stock = stock(case);
        let loaded = load(case);
        let mut ours = ours(&loaded, &stock);
        let deviation = DEVIATIONS
            .iter()
            .find(|(name, _)| name == case)
            .map(|(_, deviation)| deviation);
        let warnings: BTreeSet<_> = loaded
            .iter()
            .flat_map(|loaded| &loaded.diagnostics)
            .filter(|d| d.level == Level::Warning)
            .map(|d| d.code)
            .filter(|code| !["include", "missing-secret", "unknown-section"].contains(code))
            .collect();
        let mut expected_warnings = BTreeSet::new();
        match deviation {
            None => {}
            Some(Warns(code)) => {
                expected_warnings.insert(*code);
            }
            Some(Loads(part)) => {
                assert!(ours.listings.iter().all(|l| l.contains(part)), "{case}");
                assert!(stock.listings.is_empty(), "{case}");
                assert_eq!(ours.connections, [("c1".to_owned(), Ok(()))], "{case}");
                ours.listings.clear();
                ours.connections.clone_from(&stock.connections);
                if case == "p20_bom" {
                    expected_warnings.insert("byte-order-mark");
                }
            }
            Some(Refused(text)) => {
                assert_eq!(ours.connections[0].1, Err((*text).to_owned()), "{case}");
                assert_eq!(stock.connections[0].1, Ok(()), "{case}");
                ours.connections.clone_from(&stock.connections);
                ours.listings.clone_from(&stock.listings);
            }
            Some(Lists(part)) => {
                assert!(ours.listings.iter().all(|l| l.contains(part)), "{case}");
                assert!(!stock.listings.iter().any(|l| l.contains(part)), "{case}");
                ours.listings.clone_from(&stock.listings);
            }
        }
        assert_eq!(ours, stock, "{case}");
        assert_eq!(warnings, expected_warnings, "{case}");
    }
}

#[test]
fn every_deviation_is_a_case_and_has_its_reason_in_the_documentation() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/deviations.md");
    let text = std::fs::read_to_string(page).unwrap();
    let cases = cases();
    for (case, _) in DEVIATIONS {
        assert!(cases.iter().any(|known| known == case), "{case}");
        assert!(text.contains(&format!("`{case}`")), "{case}");
    }
}

mod values;
