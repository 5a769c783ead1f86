// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of our own on the sources: headers, licences.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::shell::{Error, cargo, command, quiet, workspace};

const HEADER: &str = "SPDX-License-Identifier: Apache-2.0 OR MIT";

/// Every source file says under which licence it is.
pub(crate) fn headers() -> Result<(), Error> {
    let root = workspace();
    let mut list = command(
        "git",
        [
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
    );
    list.current_dir(&root);
    let without: Vec<String> = quiet(list)?
        .split('\0')
        .filter(|path| is_source(&root, path))
        .filter(|path| {
            fs::read(root.join(path)).is_ok_and(|bytes| {
                let head = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
                !head.lines().take(2).any(|line| line.ends_with(HEADER))
            })
        })
        .map(str::to_owned)
        .collect();
    if without.is_empty() {
        return Ok(());
    }
    Err(format!(
        "without the line `{HEADER}` at the top:\n  {}",
        without.join("\n  ")
    )
    .into())
}

fn is_source(root: &Path, path: &str) -> bool {
    let file = root.join(path);
    match file.extension().and_then(|e| e.to_str()) {
        Some("rs" | "sh" | "py") => true,
        Some(_) => false,
        None => fs::read(file).is_ok_and(|bytes| bytes.starts_with(b"#!")),
    }
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
}

/// Every dependency has a licence that `deny.toml` allows, and comes from the registry.
pub(crate) fn licences() -> Result<(), Error> {
    let allowed = allowed_licences(&fs::read_to_string(workspace().join("deny.toml"))?)?;
    let text = quiet(cargo(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Metadata = serde_json::from_str(&text)?;
    let mut wrong = BTreeSet::new();
    for package in &metadata.packages {
        let named = format!("{} {}", package.name, package.version);
        match &package.license {
            Some(licence) if permitted(licence, &allowed) => {}
            Some(licence) => {
                wrong.insert(format!("{named}: {licence}"));
            }
            None => {
                wrong.insert(format!("{named}: names no licence"));
            }
        }
        if package
            .source
            .as_deref()
            .is_some_and(|source| !source.starts_with("registry+"))
        {
            wrong.insert(format!("{named}: is not from the registry"));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = wrong.into_iter().collect();
    Err(format!("not allowed by deny.toml:\n  {}", list.join("\n  ")).into())
}

/// The list `allow` of the table `[licenses]`; the file stays readable for cargo-deny.
fn allowed_licences(deny: &str) -> Result<BTreeSet<String>, Error> {
    let table = deny
        .split("[licenses]")
        .nth(1)
        .ok_or("deny.toml has no [licenses]")?;
    let list = table
        .split_once("allow = [")
        .and_then(|(_, rest)| rest.split_once(']'))
        .ok_or("deny.toml allows no licences")?
        .0;
    Ok(list
        .split('"')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect())
}

/// Whether an SPDX expression can be satisfied: one alternative of `OR` of which every part of
/// `AND` is allowed. Parentheses bind as in SPDX.
fn permitted(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let value = any_of(&mut words, allowed);
    value && words.peek().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut value = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        value |= all_of(words, allowed);
    }
    value
}

fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut value = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        value &= one(words, allowed);
    }
    value
}

fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let value = any_of(words, allowed);
            words.next_if_eq(&")").is_some() && value
        }
        Some(licence) => {
            let exception = words.next_if_eq(&"WITH").and_then(|_| words.next());
            allowed.contains(licence)
                || exception.is_some_and(|e| allowed.contains(&format!("{licence} WITH {e}")))
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{allowed_licences, permitted};

    #[test]
    fn understands_licence_expressions() {
        let allowed =
            allowed_licences("[licenses]\nallow = [\n \"MIT\",\n \"Apache-2.0\", \"ISC\"]\n")
                .expect("a list");

        for fine in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "GPL-2.0 OR MIT",
            "ISC AND (Apache-2.0 OR GPL-3.0)",
        ] {
            assert!(permitted(fine, &allowed), "{fine}");
        }
        for wrong in [
            "GPL-2.0",
            "MIT AND GPL-2.0",
            "(MIT OR ISC) AND Zlib",
            "",
            "MIT )",
        ] {
            assert!(!permitted(wrong, &allowed), "{wrong}");
        }
    }
}
