// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Octets to names, values and include patterns, with places.

use std::sync::Arc;

use zeroize::Zeroize as _;

use crate::diagnostic::Diagnostic;
use crate::tree::{Location, Source};

/// A value as written.
pub(super) struct Word {
    pub(super) octets: Vec<u8>,
    pub(super) location: Location,
    /// A `#` follows an unquoted word without a blank.
    pub(super) comment_glued: Option<Location>,
    /// Several blanks between words became one.
    pub(super) blanks_collapsed: bool,
}

pub(super) struct Lexer {
    source: Arc<Source>,
    position: usize,
}

impl Lexer {
    pub(super) fn new(source: Arc<Source>) -> Self {
        Self {
            source,
            position: 0,
        }
    }

    /// Skips a UTF-8 byte order mark and says whether there was one.
    pub(super) fn skip_byte_order_mark(&mut self) -> bool {
        let found = self.source.text().starts_with(b"\xef\xbb\xbf");
        if found {
            self.position = 3;
        }
        found
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.source.text().get(self.position).copied()
    }

    pub(super) fn bump(&mut self) {
        self.position += 1;
    }

    /// The place of the octets from `start` to `end`.
    pub(super) fn location(&self, start: usize, end: usize) -> Location {
        let (line, column) = self.source.line_and_column(start);
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Location {
            source: Arc::clone(&self.source),
            line: number(line),
            column: number(column),
            len: number(end - start),
        }
    }

    /// The place of the next `len` octets.
    pub(super) fn here(&self, len: usize) -> Location {
        self.location(self.position, self.position + len)
    }

    /// Skips blanks, but no line ends.
    pub(super) fn skip_blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r')) {
            self.bump();
        }
    }

    /// Skips blanks, line ends and comments.
    pub(super) fn skip_space(&mut self) {
        loop {
            match self.peek() {
                Some(b' ' | b'\t' | b'\r' | b'\n') => self.bump(),
                Some(b'#') => {
                    while self.peek().is_some_and(|octet| octet != b'\n') {
                        self.bump();
                    }
                }
                _ => return,
            }
        }
    }

    /// A key or section name. `None` if there is none, or it is not UTF-8.
    pub(super) fn name(&mut self) -> Option<(String, Location)> {
        let start = self.position;
        let rest = &self.source.text()[start..];
        let len = rest
            .iter()
            .position(|octet| b".,:{}=\"# \t\r\n".contains(octet))
            .unwrap_or(rest.len());
        let name = std::str::from_utf8(&rest[..len]).ok()?;
        if name.is_empty() {
            return None;
        }
        let name = name.to_owned();
        self.position += len;
        Some((name, self.location(start, start + len)))
    }

    /// After the word `include`: whether a pattern follows, rather than `=`.
    pub(super) fn at_include_pattern(&self) -> bool {
        let rest = &self.source.text()[self.position..];
        let mut blanks = rest
            .iter()
            .skip_while(|octet| matches!(octet, b' ' | b'\t'));
        matches!(rest.first(), Some(b' ' | b'\t')) && blanks.next() != Some(&b'=')
    }

    /// The pattern of an include statement.
    pub(super) fn include_pattern(&mut self) -> Result<(String, Location), Diagnostic> {
        self.skip_blanks();
        let start = self.position;
        let octets = if self.peek() == Some(b'"') {
            self.quoted()?
        } else {
            let mut octets = Vec::new();
            while let Some(octet) = self.peek() {
                match octet {
                    b'\\' => {
                        self.bump();
                        match self.peek() {
                            None | Some(b'\n') => break,
                            Some(escaped) => octets.push(escaped),
                        }
                    }
                    b'"' | b'#' | b'}' | b' ' | b'\t' | b'\r' | b'\n' => break,
                    _ => octets.push(octet),
                }
                self.bump();
            }
            octets
        };
        let place = self.location(start, self.position);
        match String::from_utf8(octets) {
            Ok(pattern) if !pattern.is_empty() => Ok((pattern, place)),
            Ok(_) => Err(super::syntax("`include` lacks a file name", &place)),
            Err(_) => Err(super::syntax("the include pattern is not UTF-8", &place)),
        }
    }

    /// What follows `=`: words and quoted strings, joined by single blanks. `None` if nothing.
    pub(super) fn value(&mut self) -> Result<Option<Word>, Diagnostic> {
        let mut octets: Option<Vec<u8>> = None;
        let mut start = self.position;
        let mut end = start;
        let mut comment_glued = None;
        let mut blanks_collapsed = false;
        loop {
            let before = self.position;
            self.skip_blanks();
            let blanks = self.position - before;
            let word_start = self.position;
            let mut word = match self.peek() {
                None | Some(b'\n' | b'#' | b'}') => break,
                Some(b'"') => self.quoted()?,
                Some(_) => {
                    let rest = &self.source.text()[word_start..];
                    let len = rest
                        .iter()
                        .position(|octet| b" \t\r\n#}\"".contains(octet))
                        .unwrap_or(rest.len());
                    self.position += len;
                    if self.peek() == Some(b'#') {
                        comment_glued = Some(self.here(1));
                    }
                    rest[..len].to_vec()
                }
            };
            end = self.position;
            match &mut octets {
                None => {
                    start = word_start;
                    octets = Some(word);
                }
                Some(octets) => {
                    blanks_collapsed |= blanks > 1;
                    octets.push(b' ');
                    octets.extend_from_slice(&word);
                    word.zeroize();
                }
            }
        }
        Ok(octets.map(|octets| Word {
            octets,
            location: self.location(start, end),
            comment_glued,
            blanks_collapsed,
        }))
    }

    /// A quoted string; stands at the opening quote.
    fn quoted(&mut self) -> Result<Vec<u8>, Diagnostic> {
        let opening = self.here(1);
        self.bump();
        let mut octets = Vec::new();
        loop {
            let octet = self.peek();
            self.bump();
            match octet {
                None => {
                    self.position = self.source.text().len();
                    return Err(super::syntax(
                        "the string that begins here lacks its closing quote",
                        &opening,
                    ));
                }
                Some(b'"') => return Ok(octets),
                Some(b'\\') => {
                    let escaped = self.peek();
                    self.bump();
                    match escaped {
                        None => self.position = self.source.text().len(),
                        Some(b'n') => octets.push(b'\n'),
                        Some(b'r') => octets.push(b'\r'),
                        Some(b't') => octets.push(b'\t'),
                        Some(b'\n') => {}
                        Some(b'\r') if self.peek() == Some(b'\n') => self.bump(),
                        Some(other) => octets.push(other),
                    }
                }
                Some(other) => octets.push(other),
            }
        }
    }
}
