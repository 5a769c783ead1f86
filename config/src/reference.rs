// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every option of swanctl.conf that strongSwan has, and what becomes of it here.
//!
//! `docs/swanctl.md` is generated from these tables. The tests hold them against the decoder: no
//! option is known to the one and not to the other, and each is treated as its row says.

mod tables;

use std::fmt::Write as _;

pub use tables::SECTIONS;

/// Options that stand in one place.
#[derive(Debug)]
pub struct Section {
    /// Where they stand, such as `connections.<conn>`.
    pub path: &'static str,
    /// What is to be known of all of them.
    pub text: &'static str,
    /// The options.
    pub rows: &'static [Row],
}

/// One option.
#[derive(Debug)]
pub struct Row {
    /// Its name.
    pub key: &'static str,
    /// What it takes.
    pub kind: &'static str,
    /// The value that holds without it; empty is none.
    pub default: &'static str,
    /// What it is for.
    pub meaning: &'static str,
    /// What becomes of it, for values of different fates.
    pub cases: &'static [Case],
}

/// What becomes of a value.
#[derive(Debug)]
pub struct Case {
    /// A value that is not the default.
    pub value: &'static str,
    /// Its fate.
    pub status: Status,
}

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It does what it does in strongSwan.
    Supported,
    /// It is accepted, with a note, and makes no difference, because.
    NoEffect(&'static str),
    /// It is accepted, with a warning: the tunnel works, but differently, because.
    Warned(&'static str),
    /// Whatever has it is refused, with an error, because.
    Refused(&'static str),
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Supported => "supported",
            Self::NoEffect(_) => "no effect",
            Self::Warned(_) => "warning",
            Self::Refused(_) => "refused",
        }
    }

    fn why(self) -> Option<&'static str> {
        match self {
            Self::Supported => None,
            Self::NoEffect(why) | Self::Warned(why) | Self::Refused(why) => Some(why),
        }
    }
}

/// The tables as Markdown.
pub fn markdown() -> String {
    let mut text = String::new();
    for section in SECTIONS {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "## `{}`\n\n{}\n\n| Option | Value | Default | Meaning | Here |\n|---|---|---|---|---|\n",
            section.path, section.text
        );
        for row in section.rows {
            let default = if row.default.is_empty() {
                String::new()
            } else {
                format!("`{}`", row.default)
            };
            let _ = writeln!(
                text,
                "| `{}` | {} | {default} | {} | {} |",
                row.key,
                row.kind.replace('|', "\\|"),
                row.meaning,
                fates(row)
            );
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn fates(row: &Row) -> String {
    let single = row.cases.len() == 1;
    row.cases
        .iter()
        .map(|case| {
            let mut fate = String::new();
            if !single {
                fate.push_str(&format!("`{}`: ", case.value.replace('|', "\\|")));
            }
            let word = case.status.word();
            match case.status.why() {
                None => fate.push_str(word),
                Some(why) => fate.push_str(&format!("**{word}**: {why}")),
            }
            fate
        })
        .collect::<Vec<_>>()
        .join("; ")
}

#[cfg(test)]
mod tests;
