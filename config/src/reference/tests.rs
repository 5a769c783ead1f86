// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::decode::{CHILD_KEYS, CONNECTION_KEYS, ROUND_KEYS};
use crate::diagnostic::{Diagnostic, Level};
use crate::files::MemoryFiles;
use crate::load::{AUTHORITY_KEYS, Loaded, POOL_KEYS, load_swanctl_from};
use crate::names::Names;
use crate::secret::{PASSPHRASE_KEYS, SHARED_KEYS};

/// Ed25519, subject `C=CH, O=Example, CN=gw`.
const CERTIFICATE: &[u8] = include_bytes!("../decode/gw.pem");

/// The file that has one option in the place where it belongs, and beside it a connection, a secret
/// and an authority that are in order.
fn file(section: &Section, setting: &str) -> String {
    let body = match section.path {
        "connections.<conn>" => format!("connections {{ t {{ {setting}\n }} }}"),
        "connections.<conn>.local<suffix>" => {
            format!("connections {{ t {{ local {{ {setting}\n }} }} }}")
        }
        // Nothing said about `auth` would leave preshared keys open to the peer.
        "connections.<conn>.remote<suffix>" if setting.starts_with("auth") => {
            format!("connections {{ t {{ remote {{ {setting}\n }} }} }}")
        }
        "connections.<conn>.remote<suffix>" => {
            format!("connections {{ t {{ remote {{ auth = pubkey\n {setting}\n }} }} }}")
        }
        "connections.<conn>.local<suffix>.cert<suffix>" => {
            let file = if ["file", "handle"]
                .iter()
                .any(|key| setting.starts_with(key))
            {
                ""
            } else {
                "file = /s/x509/gw.pem\n"
            };
            format!("connections {{ t {{ local {{ cert1 {{ {file}{setting}\n }} }} }} }}")
        }
        "connections.<conn>.children.<child>" => {
            format!("connections {{ t {{ children {{ net {{ {setting}\n }} }} }} }}")
        }
        "pools.<name>" => {
            let addrs = if setting.starts_with("addrs") {
                ""
            } else {
                "addrs = 10.9.0.0/24\n"
            };
            format!("pools {{ t {{ {addrs}{setting}\n }} }}")
        }
        "authorities.<name>" => {
            let cert = if ["cacert", "file", "handle"]
                .iter()
                .any(|key| setting.starts_with(key))
            {
                ""
            } else {
                "cacert = gw.pem\n"
            };
            format!("authorities {{ t {{ {cert}{setting}\n }} }}")
        }
        "directories" => String::new(),
        path => {
            let kind = path
                .trim_start_matches("secrets.")
                .trim_end_matches("<suffix>");
            let secret = if setting.starts_with("secret") {
                ""
            } else {
                "secret = k\n"
            };
            let other = match kind {
                "private" if !setting.starts_with("file") => "file = k.pem\n",
                "token" => "",
                _ => secret,
            };
            format!("secrets {{ {kind}-t {{ {other}{setting}\n }} }}")
        }
    };
    format!("{body}\nconnections {{ good {{ }} }}\n")
}

fn load(section: &Section, key: &str, setting: &str) -> Loaded {
    let mut files = MemoryFiles::new();
    files.insert("/s/swanctl.conf", file(section, setting).as_bytes());
    for directory in ["x509", "x509ca", "elsewhere"] {
        files.insert(format!("/s/{directory}/gw.pem"), CERTIFICATE);
    }
    files.insert("/s/pubkey/key.pem", "\x30\x00");
    if section.path == "directories" {
        files.insert(format!("/s/{key}/file"), "data");
    }
    load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &Names::builtin()).unwrap()
}

fn shown(loaded: &Loaded) -> String {
    loaded
        .all_diagnostics()
        .map(|d| d.render(false))
        .collect::<Vec<_>>()
        .join("\n")
}

/// The setting of a row, with names that stand for many made one of them.
fn setting(row: &Row, value: &str) -> (String, String) {
    let key = match row.key {
        "<number>" => "28672".to_owned(),
        key => key.replace("<suffix>", "-1"),
    };
    (key.clone(), format!("{key} = {value}"))
}

#[test]
fn every_option_has_the_fate_that_its_row_says() {
    for section in SECTIONS {
        for row in section.rows {
            assert!(!row.cases.is_empty(), "{}.{}", section.path, row.key);
            for case in row.cases {
                let (key, setting) = setting(row, case.value);
                let loaded = load(section, &key, &setting);
                let what = format!(
                    "{}: {setting} should be {:?}\n{}",
                    section.path,
                    case.status,
                    shown(&loaded)
                );
                // Raw keys lie in a directory that has its own row.
                let found: Vec<&Diagnostic> = loaded
                    .all_diagnostics()
                    .filter(|d| section.path == "directories" || d.key.as_deref() != Some("pubkey"))
                    .collect();
                let levels: Vec<Level> = found.iter().map(|d| d.level).collect();
                let about = |d: &Diagnostic| {
                    d.key.as_deref() == Some(key.as_str())
                        || d.key.as_deref() == Some("t")
                        || d.path.ends_with("-t")
                        || d.path == "pools.t"
                };
                match case.status {
                    Status::Supported => assert!(
                        found.iter().all(|d| section.path == "directories"
                            && (d.key.as_deref() == Some("pubkey") || d.level == Level::Note)),
                        "{what}"
                    ),
                    Status::NoEffect(_) => {
                        assert_eq!(levels, [Level::Note], "{what}");
                        assert_eq!(found[0].code, "no-effect", "{what}");
                        assert!(about(found[0]), "{what}");
                    }
                    Status::Warned(_) => {
                        assert!(levels.iter().all(|l| *l == Level::Warning), "{what}");
                        let ours: Vec<_> = found.iter().filter(|d| about(d)).collect();
                        assert_eq!(ours.len(), 1, "{what}");
                        assert_eq!(ours[0].code, "unsupported", "{what}");
                    }
                    Status::Refused(_) => {
                        let errors: Vec<_> =
                            found.iter().filter(|d| d.level == Level::Error).collect();
                        assert_eq!(errors.len(), 1, "{what}");
                        let error = errors[0];
                        assert_eq!(error.code, "unsupported", "{what}");
                        assert!(error.location.is_some(), "{what}");
                        assert!(
                            about(error) || section.path.ends_with("cert<suffix>"),
                            "{what}"
                        );
                    }
                }
                // Whatever becomes of it, nothing else is lost.
                let refused: Vec<_> = loaded
                    .connections
                    .iter()
                    .filter(|(_, connection)| connection.is_err())
                    .map(|(name, _)| name.as_str())
                    .collect();
                let expected: &[&str] = match case.status {
                    Status::Refused(_) if section.path.starts_with("connections") => &["t"],
                    _ => &[],
                };
                assert_eq!(refused, expected, "{what}");
                assert!(
                    loaded.connections.iter().any(|(name, _)| name == "good"),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_supported_option_changes_what_is_loaded() {
    for section in SECTIONS {
        if section.path == "directories" {
            continue;
        }
        for row in section.rows {
            for case in row.cases {
                if case.status != Status::Supported {
                    continue;
                }
                let (key, setting) = setting(row, case.value);
                let with = load(section, &key, &setting);
                // Some options are the one thing without which a section is nothing.
                let needed = ["file", "secret", "cacert", "addrs"].contains(&row.key);
                let without = if needed && !section.path.starts_with("connections") {
                    load(&SECTIONS[0], &key, "")
                } else if section.path.ends_with("cert<suffix>") {
                    load(&SECTIONS[1], &key, "")
                } else {
                    load(section, &key, "")
                };
                let what = format!("{}: {setting}", section.path);
                let model = |loaded: &Loaded| {
                    format!(
                        "{:?} {:?} {:?} {:?}",
                        loaded
                            .connections
                            .iter()
                            .map(|(name, c)| (name, c.as_ref().ok()))
                            .collect::<Vec<_>>(),
                        loaded
                            .secrets
                            .iter()
                            .map(|s| (s.secret.expose().to_vec(), &s.owners))
                            .collect::<Vec<_>>(),
                        loaded.authorities,
                        loaded.pools,
                    )
                };
                // The models are too long to be shown.
                assert!(model(&with) != model(&without), "{what}");
            }
        }
    }
}

#[test]
fn the_tables_and_the_decoder_know_the_same_options() {
    let rows = |path: &str| -> BTreeSet<String> {
        SECTIONS
            .iter()
            .filter(|section| section.path == path)
            .flat_map(|section| section.rows)
            .map(|row| row.key.trim_end_matches("<suffix>").to_owned())
            .filter(|key| key != "<number>")
            .collect()
    };
    for (path, keys) in [
        ("connections.<conn>", CONNECTION_KEYS),
        ("connections.<conn>.local<suffix>", ROUND_KEYS),
        ("connections.<conn>.remote<suffix>", ROUND_KEYS),
        ("connections.<conn>.children.<child>", CHILD_KEYS),
        ("secrets.ike<suffix>", SHARED_KEYS),
        ("secrets.private<suffix>", PASSPHRASE_KEYS),
        ("pools.<name>", POOL_KEYS),
        ("authorities.<name>", AUTHORITY_KEYS),
    ] {
        let keys: BTreeSet<String> = keys.iter().map(|&key| key.to_owned()).collect();
        assert_eq!(rows(path), keys, "{path}");
    }
}

#[test]
fn a_second_round_is_refused_with_its_place_and_the_others_load() {
    let mut files = MemoryFiles::new();
    files.insert(
        "/s/swanctl.conf",
        "connections {\n t {\n  local-1 { }\n  local-2 { }\n }\n good { }\n}\n",
    );
    let loaded =
        load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &Names::builtin()).unwrap();
    let error = loaded.connections[0].1.as_ref().unwrap_err();
    assert_eq!(error.code, "unsupported");
    assert_eq!(error.location.as_ref().unwrap().line, 4);
    assert!(error.message.contains("local-2"), "{error}");
    assert!(loaded.connections[1].1.is_ok());
}

#[test]
fn the_documentation_has_the_tables() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/swanctl.md");
    let text = std::fs::read_to_string(&page).unwrap();
    if !text.contains(&markdown()) {
        if std::env::var_os("SWANHERD_UPDATE_DOCS").is_some() {
            let head = text.split("\n## ").next().unwrap();
            std::fs::write(&page, format!("{}\n\n{}", head.trim_end(), markdown())).unwrap();
            return;
        }
        panic!("docs/swanctl.md is not what the tables say; SWANHERD_UPDATE_DOCS=1 writes it anew");
    }
}
