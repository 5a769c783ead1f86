// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files as people write them, with mistakes as people make them: reading never panics, and what
//! is read is whole or says what is wrong with it.

#![allow(
    clippy::unwrap_used,
    reason = "a test that fails to read its own data must panic"
)]

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use swanherd_config::check::findings;
use swanherd_config::diagnostic::Level;
use swanherd_config::files::MemoryFiles;
use swanherd_config::grammar::parse_str;
use swanherd_config::listing::list_conn;
use swanherd_config::load::{load_swanctl_from, render, report};
use swanherd_config::names::Names;

/// The corpus, and the seeds of the fuzzer.
static FILES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    for dir in ["tests/corpus", "../fuzz/seeds/settings_grammar"] {
        for entry in std::fs::read_dir(root.join(dir)).unwrap() {
            let path = entry.unwrap().path();
            if !path.to_str().unwrap().ends_with(".stock.txt") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
});

/// A mistake. Numbers choose the place, modulo what there is.
#[derive(Clone, Debug)]
enum Mistake {
    /// Octets are lost.
    Lose(usize, usize),
    /// An octet is another one.
    Change(usize, u8),
    /// Something is typed.
    Type(usize, &'static str),
    /// A line stands twice.
    Repeat(usize),
    /// Two lines are exchanged.
    Exchange(usize, usize),
    /// The file is cut off.
    Cut(usize),
}

const TYPED: &[&str] = &[
    "{",
    "}",
    "\"",
    "#",
    "=",
    " = ",
    ":",
    ",",
    "\n",
    "\\",
    "include *\n",
    "0x",
    "0s",
    "%any",
    "/33",
    "@",
    "*",
    "-",
    "s ",
    "99999999999999999999",
    "connections {",
    "\u{feff}",
    " : conn-defaults ",
    "no",
    "\nversion = 1\n",
    "[",
    "^(",
    "ü",
];

fn mistake() -> impl Strategy<Value = Mistake> {
    let at = any::<usize>;
    prop_oneof![
        (at(), 1..40usize).prop_map(|(at, len)| Mistake::Lose(at, len)),
        (at(), any::<u8>()).prop_map(|(at, octet)| Mistake::Change(at, octet)),
        (at(), proptest::sample::select(TYPED)).prop_map(|(at, text)| Mistake::Type(at, text)),
        at().prop_map(Mistake::Repeat),
        (at(), at()).prop_map(|(a, b)| Mistake::Exchange(a, b)),
        at().prop_map(Mistake::Cut),
    ]
}

fn make(text: &mut Vec<u8>, mistake: &Mistake) {
    let place = |at: usize, text: &[u8]| at % (text.len() + 1);
    let mut lines: Vec<Vec<u8>> = text.split(|o| *o == b'\n').map(<[u8]>::to_vec).collect();
    let count = lines.len();
    match *mistake {
        Mistake::Lose(at, len) => {
            let at = place(at, text);
            let end = (at + len).min(text.len());
            text.drain(at..end);
            return;
        }
        Mistake::Change(at, octet) => {
            let at = place(at, text);
            if let Some(changed) = text.get_mut(at) {
                *changed = octet;
            }
            return;
        }
        Mistake::Type(at, typed) => {
            let at = place(at, text);
            text.splice(at..at, typed.bytes());
            return;
        }
        Mistake::Cut(at) => {
            text.truncate(place(at, text));
            return;
        }
        Mistake::Repeat(at) => {
            let line = lines[at % count].clone();
            lines.insert(at % count, line);
        }
        Mistake::Exchange(a, b) => lines.swap(a % count, b % count),
    }
    *text = lines.join(&b'\n');
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_file_with_mistakes_is_read_whole_or_says_what_is_wrong(
        file in any::<usize>(),
        mistakes in proptest::collection::vec(mistake(), 0..6),
    ) {
        let mut text = FILES[file % FILES.len()].clone();
        for mistake in &mistakes {
            make(&mut text, mistake);
        }
        let names = Names::builtin();
        let mut files = MemoryFiles::new();
        files.insert("/s/swanctl.conf", text.as_slice());
        let loaded = load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &names);
        let found = loaded.as_ref().map(findings).unwrap_or_default();
        // What is shown to people and programs can always be shown.
        render(&loaded, &found, false);
        serde_json::to_string(&report(&loaded, &found)).unwrap();

        // Nothing is lost on the way from the file: whatever it defines is either whole, or an
        // error that tells which it is and where.
        let Ok(parsed) = parse_str("/s/swanctl.conf", &text) else {
            return Ok(());
        };
        let Ok(loaded) = loaded else {
            // Includes of a file by itself go too deep.
            prop_assert!(text.windows(7).any(|w| w == b"include"));
            return Ok(());
        };
        let includes = text.windows(7).any(|w| w == b"include");
        let defined: Vec<&str> = parsed
            .tree
            .section("connections")
            .into_iter()
            .flat_map(|connections| connections.sections())
            .map(|(entry, _)| entry.name.as_str())
            .collect();
        let got: Vec<&str> = loaded.connections.iter().map(|(name, _)| name.as_str()).collect();
        prop_assert!(includes || got == defined, "{got:?} {defined:?}");
        for (name, connection) in &loaded.connections {
            match connection {
                Ok(connection) => {
                    prop_assert_eq!(&connection.name, name);
                    prop_assert!(!connection.local.is_empty() && !connection.remote.is_empty());
                    prop_assert!(!connection.proposals.is_empty());
                    list_conn(connection, &names);
                }
                Err(error) => {
                    prop_assert_eq!(error.level, Level::Error);
                    let path = format!("connections.{name}");
                    prop_assert!(error.path.starts_with(&path), "{error}");
                    prop_assert!(error.location.is_some(), "{error}");
                }
            }
        }
    }
}
