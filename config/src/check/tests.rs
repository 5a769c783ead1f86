// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::diagnostic::Level;
use crate::files::MemoryFiles;
use crate::load::{load_swanctl_from, report};
use crate::names::Names;

/// The codes of everything that is said about a file.
fn codes(text: &str) -> Vec<(Level, &'static str)> {
    let mut files = MemoryFiles::new();
    files.insert("/s/swanctl.conf", text.as_bytes());
    match load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &Names::builtin()) {
        Ok(loaded) => loaded
            .all_diagnostics()
            .chain(&findings(&loaded))
            .map(|d| (d.level, d.code))
            .collect(),
        Err(error) => vec![(error.level, error.code)],
    }
}

fn has(text: &str, code: &str) -> bool {
    codes(text).iter().any(|(_, found)| *found == code)
}

fn page() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/check.md");
    std::fs::read_to_string(page).unwrap()
}

/// Every Rust file below a directory.
fn sources(dir: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_stem().is_some_and(|stem| stem != "tests")
        {
            found.push(std::fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn every_code_is_listed_used_and_documented() {
    assert!(CODES.is_sorted());
    let listed: BTreeSet<&str> = CODES.iter().copied().collect();
    assert_eq!(listed.len(), CODES.len());

    let page = page();
    let documented: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'))
        .collect();
    assert_eq!(documented, listed);

    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("../daemon/src"), &mut files);
    let mut used = BTreeSet::new();
    for text in &files {
        for call in [
            "Diagnostic::error(",
            "Diagnostic::warning(",
            "Diagnostic::note(",
            ".doubt(",
            "fail(",
        ] {
            for (at, _) in text.match_indices(call) {
                let argument = text[at + call.len()..].trim_start();
                if let Some((code, _)) = argument
                    .strip_prefix('"')
                    .and_then(|rest| rest.split_once('"'))
                    && code.bytes().all(|o| o.is_ascii_lowercase() || o == b'-')
                {
                    used.insert(code);
                }
            }
        }
    }
    // `fail` of other functions takes a message.
    used.retain(|code| listed.contains(code) || code.contains('-'));
    assert_eq!(used, listed);
}

#[test]
fn the_examples_of_the_documentation_give_their_code() {
    let page = page();
    let mut tried = 0;
    for section in page.split("\n### `").skip(1) {
        let (code, text) = section.split_once('`').unwrap();
        let Some((_, example)) = text.split_once("```conf\n") else {
            continue;
        };
        let (example, _) = example.split_once("```").unwrap();
        assert!(
            has(example, code),
            "{code}: {example}\n{:?}",
            codes(example)
        );
        tried += 1;
    }
    assert!(tried >= 30, "{tried}");
}

#[test]
fn a_file_that_is_in_order_gives_no_finding() {
    let text = "connections {
  a { version = 2\n local_addrs = 192.0.2.1\n remote_addrs = 203.0.113.9
    local { auth = psk\n id = gw.example.org\n }
    remote { auth = psk\n id = a.example.org\n }
    children { a { local_ts = 10.0.0.0/16\n remote_ts = 10.1.0.0/16\n esp_proposals = aes256gcm16-x25519\n start_action = trap\n } } }
  b { version = 2\n local_addrs = 192.0.2.1\n remote_addrs = b.example.org
    local { auth = psk\n id = gw.example.org\n }
    remote { auth = psk\n id = b.example.org\n }
    children { b { local_ts = 10.0.0.0/16\n remote_ts = 10.2.0.0/16\n start_action = start\n } } } }
secrets {
  ike-a { id-1 = gw.example.org\n id-2 = a.example.org\n secret = a-long-secret\n }
  ike-b { id-1 = gw.example.org\n id-2 = b.example.org\n secret = another-long-secret\n } }\n";
    assert_eq!(codes(text), []);
}

#[test]
fn what_tells_children_apart_is_respected() {
    let file = |a: &str, b: &str| {
        format!(
            "connections {{ a {{ children {{ x {{ local_ts = 10.0.0.0/16\n remote_ts = 10.1.0.0/16\n {a}\n }} }} }}
             b {{ children {{ y {{ local_ts = 10.0.0.0/16\n remote_ts = 10.1.0.0/16\n {b}\n }} }} }} }}"
        )
    };
    assert!(has(&file("", ""), "same-selectors"));
    assert!(has(&file("if_id_in = 1", "if_id_in = 1"), "same-selectors"));
    for (a, b) in [
        ("if_id_in = 1", "if_id_in = 2"),
        ("mark_in = 1", ""),
        ("if_id_out = %unique", "if_id_out = %unique"),
        ("policies = no", ""),
        ("mode = pass", ""),
    ] {
        assert!(!has(&file(a, b), "same-selectors"), "{a} {b}");
    }
}

#[test]
fn findings_name_the_place_of_the_option() {
    let mut files = MemoryFiles::new();
    files.insert(
        "/s/swanctl.conf",
        "connections {\n a {\n  children {\n   n {\n    rekey_time = 1h\n    life_time = 50m\n   }\n  }\n }\n}\n",
    );
    let loaded =
        load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &Names::builtin()).unwrap();
    let found = findings(&loaded);
    let finding = found
        .iter()
        .find(|d| d.code == "expires-before-rekey")
        .unwrap();
    assert_eq!(finding.path, "connections.a.children.n");
    assert_eq!(finding.key.as_deref(), Some("life_time"));
    assert_eq!(finding.location.as_ref().unwrap().line, 6);
}

#[test]
fn the_findings_of_one_rule_are_bounded_and_their_number_is_told() {
    let mut text = String::from("connections {\n");
    for n in 0..1000 {
        text.push_str(&format!(
            "c{n} {{ over_time = 0\n remote_addrs = h{n}\n }}\n"
        ));
    }
    text.push_str("}\n");
    let found = codes(&text);
    let of = |code: &str| found.iter().filter(|(_, c)| *c == code).count();
    assert_eq!(of("no-margin"), MAX_FINDINGS);
    assert_eq!(of("more"), 1);
}

#[test]
fn a_secret_is_shown_by_no_finding() {
    let mut files = MemoryFiles::new();
    files.insert(
        "/s/swanctl.conf",
        "secrets {\n ike-a { secret = hush\n }\n ike-a { secret = hush2\n }\n ike-b { sercet = hush3\n secret = hush4\n } }\n",
    );
    let loaded = load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &Names::builtin());
    let report = serde_json::to_string(&report(&loaded, &[])).unwrap();
    let loaded = loaded.unwrap();
    assert!(loaded.all_diagnostics().count() >= 2);
    let shown: String = loaded
        .all_diagnostics()
        .chain(&findings(&loaded))
        .map(|d| d.render(false))
        .collect();
    assert!(
        !shown.contains("hush") && !report.contains("hush"),
        "{shown}"
    );
}
