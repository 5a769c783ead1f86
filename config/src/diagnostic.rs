// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is wrong with a definition, where, and what to do about it.

use std::fmt;

use miette::{LabeledSpan, MietteError, MietteSpanContents, Severity, SourceSpan, SpanContents};
use serde::Serialize;

use crate::tree::Location;

/// An error, warning or note about configuration.
#[derive(Clone, Debug)]
pub struct Diagnostic(Box<Details>);

/// What a [`Diagnostic`] says.
#[derive(Clone, Debug)]
pub struct Details {
    /// Whether the thing is refused (error) or merely doubtful (warning).
    pub level: Level,
    /// Machine-readable class, such as `unknown-option`.
    pub code: &'static str,
    /// The text that strongSwan's VICI server would answer, where there is one.
    pub stock: Option<String>,
    /// What is wrong, in our words.
    pub message: String,
    /// Connection, secret or section that it is about, as a dotted path.
    pub path: String,
    /// The option.
    pub key: Option<String>,
    /// Where it stands.
    pub location: Option<Location>,
    /// What to do about it.
    pub help: Option<String>,
    excerpt: Option<Excerpt>,
}

/// Severity of a [`Diagnostic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The definition is refused.
    Error,
    /// The definition is used, but probably does not mean what was intended.
    Warning,
    /// The definition is used, and something in it makes no difference.
    Note,
}

/// The longest line that is shown.
const MAX_EXCERPT: usize = 1024;

#[derive(Clone, Debug)]
struct Excerpt {
    file: String,
    text: Vec<u8>,
    line: usize,
    offset: usize,
    len: usize,
}

impl std::ops::Deref for Diagnostic {
    type Target = Details;

    fn deref(&self) -> &Details {
        &self.0
    }
}

impl std::ops::DerefMut for Diagnostic {
    fn deref_mut(&mut self) -> &mut Details {
        &mut self.0
    }
}

impl Diagnostic {
    /// An error without a place yet; `code` names its kind for programs.
    pub fn error(code: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Details {
            level: Level::Error,
            code,
            stock: None,
            message: message.into(),
            path: String::new(),
            key: None,
            location: None,
            help: None,
            excerpt: None,
        }))
    }

    /// A warning without a place yet.
    pub fn warning(code: &'static str, message: impl Into<String>) -> Self {
        let mut warning = Self::error(code, message);
        warning.level = Level::Warning;
        warning
    }

    /// A note without a place yet.
    pub fn note(code: &'static str, message: impl Into<String>) -> Self {
        let mut note = Self::error(code, message);
        note.level = Level::Note;
        note
    }

    pub(crate) fn stock(mut self, text: impl Into<String>) -> Self {
        self.stock = Some(text.into());
        self
    }

    /// Names the option that it is about.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Names the section that it is about, dotted.
    #[must_use]
    pub fn path(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    /// All of it in one line, for logs: place, section, message and help.
    pub fn line(&self) -> String {
        match &self.help {
            Some(help) => format!("{self} ({help})"),
            None => self.to_string(),
        }
    }

    /// Puts an enclosing section before the path.
    pub(crate) fn prefix_path(mut self, prefix: &str) -> Self {
        self.path = if self.path.is_empty() {
            prefix.to_owned()
        } else {
            format!("{prefix}.{}", self.path)
        };
        self
    }

    /// Says what to do about it.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    pub(crate) fn help_opt(mut self, help: Option<String>) -> Self {
        if help.is_some() {
            self.help = help;
        }
        self
    }

    /// Sets the place, with the line as an excerpt.
    pub(crate) fn at(self, location: Option<&Location>) -> Self {
        let excerpt = location.and_then(|location| {
            let line = location.source.line(location.line)?;
            // A line of any length may be the place of any number of diagnostics.
            if line.len() > MAX_EXCERPT {
                return None;
            }
            let offset = usize::try_from(location.column).ok()?.saturating_sub(1);
            Some(Excerpt {
                file: location.source.name().to_owned(),
                text: line.to_vec(),
                line: usize::try_from(location.line).ok()?.saturating_sub(1),
                offset: offset.min(line.len()),
                len: usize::try_from(location.len)
                    .ok()?
                    .min(line.len().saturating_sub(offset)),
            })
        });
        let mut placed = self.at_secret(location);
        placed.excerpt = excerpt;
        placed
    }

    /// Sets the place without an excerpt, for lines that may hold a secret.
    pub(crate) fn at_secret(mut self, location: Option<&Location>) -> Self {
        self.location = location.cloned();
        self.excerpt = None;
        self
    }

    /// The text for a VICI reply: the stock one where there is one.
    pub fn vici_text(&self) -> &str {
        self.stock.as_deref().unwrap_or(&self.message)
    }

    /// The diagnostic as data.
    pub fn to_report(&self) -> Report {
        Report {
            level: self.level,
            code: self.code,
            message: self.message.clone(),
            stock: self.stock.clone(),
            path: (!self.path.is_empty()).then(|| self.path.clone()),
            key: self.key.clone(),
            file: self.location.as_ref().map(|l| l.source.name().to_owned()),
            line: self.location.as_ref().map(|l| l.line),
            column: self.location.as_ref().map(|l| l.column),
            help: self.help.clone(),
        }
    }

    /// The diagnostic for people, with the line that it is about.
    pub fn render(&self, colour: bool) -> String {
        let theme = if colour {
            miette::GraphicalTheme::unicode()
        } else {
            miette::GraphicalTheme::unicode_nocolor()
        };
        let mut out = String::new();
        let handler = miette::GraphicalReportHandler::new_themed(theme)
            .with_width(100)
            .with_links(false);
        if handler.render_report(&mut out, self).is_err() {
            out = self.to_string();
        }
        out
    }
}

/// A [`Diagnostic`] as data, for JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Error, warning or note.
    pub level: Level,
    /// Machine-readable class.
    pub code: &'static str,
    /// What is wrong.
    pub message: String,
    /// The text of strongSwan's VICI server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stock: Option<String>,
    /// Connection, secret or section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Option.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// File.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Column, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write!(f, "{location}: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for Diagnostic {}

impl miette::Diagnostic for Diagnostic {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.code))
    }

    fn severity(&self) -> Option<Severity> {
        Some(match self.level {
            Level::Error => Severity::Error,
            Level::Warning => Severity::Warning,
            Level::Note => Severity::Advice,
        })
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help
            .as_ref()
            .map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn miette::SourceCode> {
        self.excerpt
            .as_ref()
            .map(|excerpt| excerpt as &dyn miette::SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let excerpt = self.excerpt.as_ref()?;
        let label = LabeledSpan::new(Some("here".to_owned()), excerpt.offset, excerpt.len);
        Some(Box::new(std::iter::once(label)))
    }
}

impl miette::SourceCode for Excerpt {
    fn read_span<'a>(
        &'a self,
        _span: &SourceSpan,
        _before: usize,
        _after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        Ok(Box::new(MietteSpanContents::new_named(
            self.file.clone(),
            &self.text,
            SourceSpan::new(0.into(), self.text.len()),
            self.line,
            0,
            1,
        )))
    }
}

/// `did you mean` for `word`, if one of `known` is near.
pub(crate) fn suggest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    if word.len() > 64 {
        return None;
    }
    let limit = (word.len() / 3).clamp(1, 3);
    known
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, candidate)| format!("did you mean `{candidate}`?"))
}

/// Levenshtein distance with adjacent transpositions, in octets.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, &x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, &y) in b.iter().enumerate() {
            let mut best = (last[j] + usize::from(x != y))
                .min(last[j + 1] + 1)
                .min(row[j] + 1);
            if i > 0 && j > 0 && x == b[j - 1] && a[i - 1] == y {
                best = best.min(before_last[j - 1] + 1);
            }
            row.push(best);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_word_is_suggested_and_a_far_one_is_not() {
        let known = ["rekey_time", "reauth_time", "mobike"];
        assert_eq!(
            suggest("rekeytime", known).as_deref(),
            Some("did you mean `rekey_time`?")
        );
        assert_eq!(
            suggest("mboike", known).as_deref(),
            Some("did you mean `mobike`?")
        );
        assert_eq!(suggest("banana", known), None);
    }
}
