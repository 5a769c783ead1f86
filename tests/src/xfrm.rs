// SPDX-License-Identifier: Apache-2.0 OR MIT
//! States and policies of a namespace as `ip xfrm` prints them, made comparable.

use crate::lab::Namespace;

/// The entries of `ip xfrm state` or `ip xfrm policy` (with more arguments perhaps), sorted,
/// without SPIs, keys, counters and times, and without what sockets are exempt from.
///
/// # Panics
/// When `ip` fails.
#[must_use]
pub fn xfrm(namespace: &Namespace, what: &str) -> Vec<String> {
    let text = namespace.ip(&format!("xfrm {what}"));
    let mut entries: Vec<String> = Vec::new();
    for line in text.lines() {
        if line.starts_with("src ") {
            entries.push(String::new());
        }
        if is_counter(line.trim()) {
            continue;
        }
        let words: Vec<&str> = line
            .split_whitespace()
            .map(|word| match word.strip_prefix("0x") {
                Some(hex) => match hex.len() {
                    8 => "SPI",
                    n if n > 16 => "KEY",
                    _ => word,
                },
                None => word,
            })
            .collect();
        if let Some(entry) = entries.last_mut() {
            entry.push_str(&words.join(" "));
            entry.push('\n');
        }
    }
    // Each daemon has its own sockets.
    entries.retain(|entry| !entry.contains("socket in") && !entry.contains("socket out"));
    entries.sort();
    entries
}

/// Whether a line says what has been seen, which is no property of the set-up.
fn is_counter(line: &str) -> bool {
    let bitmap = line
        .split_whitespace()
        .all(|word| word.len() == 8 && word.bytes().all(|b| b.is_ascii_hexdigit()));
    let begins = ["anti-replay", "lastused", "seq-hi"];
    bitmap || begins.iter().any(|word| line.starts_with(word))
}
