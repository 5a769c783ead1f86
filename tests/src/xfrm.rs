// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a namespace's kernel has of IPsec: states and policies as `ip xfrm` prints them, made
//! comparable, and the packets that it has dropped.

use std::fmt;

use crate::lab::Namespace;

/// `/proc/net/xfrm_stat`: packets that a kernel has dropped, by reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops(Vec<(String, u32)>);

impl Drops {
    /// Those of a namespace up to now.
    ///
    /// # Panics
    /// When the kernel does not count them.
    #[must_use]
    pub fn of(namespace: &Namespace) -> Self {
        let text = namespace.run("cat", ["/proc/net/xfrm_stat"]).expect_ok();
        let counters = text.lines().filter_map(|line| {
            let (reason, count) = line.split_once(char::is_whitespace)?;
            Some((reason.to_owned(), count.trim().parse().ok()?))
        });
        Self(counters.collect())
    }

    /// How many for one reason, by the kernel's name.
    ///
    /// # Panics
    /// When the kernel has no such counter.
    #[must_use]
    pub fn number(&self, reason: &str) -> u32 {
        let found = self.0.iter().find(|(known, _)| known == reason);
        found.unwrap_or_else(|| panic!("no {reason} in {self:?}")).1
    }
}

impl fmt::Display for Drops {
    /// The counters that are not zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (reason, count) in self.0.iter().filter(|(_, count)| *count > 0) {
            write!(f, "{reason} {count} ")?;
        }
        Ok(())
    }
}

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
