// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tree that settings files and VICI messages have in common: sections, keys, lists.
//!
//! A tree read from a file knows where each part stood; one built from a message does not. Values
//! are octets, because VICI carries certificates, and erase themselves, because they may be
//! secrets.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

/// A file that was read.
pub struct Source {
    name: String,
    text: Zeroizing<Vec<u8>>,
    line_starts: Vec<usize>,
}

impl Source {
    /// A source with the name that diagnostics print.
    pub fn new(name: impl Into<String>, text: Vec<u8>) -> Arc<Self> {
        let ends = text
            .iter()
            .enumerate()
            .filter(|(_, octet)| **octet == b'\n');
        let line_starts = std::iter::once(0)
            .chain(ends.map(|(index, _)| index + 1))
            .collect();
        Arc::new(Self {
            name: name.into(),
            text: Zeroizing::new(text),
            line_starts,
        })
    }

    /// The name that diagnostics print, usually a path.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The contents.
    pub(crate) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Line and column, both from 1, of an offset.
    pub(crate) fn line_and_column(&self, offset: usize) -> (usize, usize) {
        let line = self.line_starts.partition_point(|&start| start <= offset);
        (line, offset - self.line_starts[line - 1] + 1)
    }

    /// One line, counted from 1, without its terminator.
    pub(crate) fn line(&self, number: u32) -> Option<&[u8]> {
        let index = usize::try_from(number.checked_sub(1)?).ok()?;
        let start = *self.line_starts.get(index)?;
        let line = match self.line_starts.get(index + 1) {
            Some(next) => &self.text[start..next - 1],
            None => &self.text[start..],
        };
        Some(line.strip_suffix(b"\r").unwrap_or(line))
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({})", self.name)
    }
}

/// Where something stands: file, line and column (both from 1, columns in octets), length in octets.
#[derive(Clone, Debug)]
pub struct Location {
    /// The file.
    pub source: Arc<Source>,
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1, in octets.
    pub column: u32,
    /// Length in octets.
    pub len: u32,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.source.name(), self.line, self.column)
    }
}

/// The octets of a value, and where it stood. Equality is by content.
#[derive(Clone)]
pub struct Value {
    /// Shared, because inheritance repeats values.
    octets: Arc<Zeroizing<Vec<u8>>>,
    location: Option<Location>,
}

impl Value {
    /// A value without a place.
    pub fn new(octets: impl Into<Vec<u8>>) -> Self {
        Self {
            octets: Arc::new(Zeroizing::new(octets.into())),
            location: None,
        }
    }

    pub(crate) fn at(octets: Vec<u8>, location: Option<Location>) -> Self {
        Self {
            octets: Arc::new(Zeroizing::new(octets)),
            location,
        }
    }

    /// The octets.
    pub fn octets(&self) -> &[u8] {
        &self.octets
    }

    /// The text, if it is UTF-8.
    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.octets).ok()
    }

    /// Where it stood.
    pub fn location(&self) -> Option<&Location> {
        self.location.as_ref()
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.octets == other.octets
    }
}

impl Eq for Value {}

impl fmt::Debug for Value {
    /// The octets may be a secret: shows their number only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Value({} octets)", self.octets.len())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::new(text.into_bytes())
    }
}

/// What a section contains under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// `key = value`.
    Value(Value),
    /// A list; arises from messages only, files hold lists as text with commas.
    List(Vec<Value>),
    /// A section.
    Section(Tree),
}

/// A named item. Equality ignores places.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Key or section name.
    pub name: String,
    /// Where the name stood.
    pub location: Option<Location>,
    /// What it names.
    pub item: Item,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.item == other.item
    }
}

impl Eq for Entry {}

/// A section's contents, in order. The root of a file or message is one too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    entries: Vec<Entry>,
}

impl Tree {
    /// An empty section.
    pub const fn new() -> Self {
        Self {
            entries: Vec::new(),
        }
    }

    /// The entries, in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Appends an entry. Names are not checked for duplicates; look-ups find the first.
    pub fn push(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    fn push_item(&mut self, name: impl Into<String>, item: Item) {
        self.entries.push(Entry {
            name: name.into(),
            location: None,
            item,
        });
    }

    /// Appends `name = value`.
    pub fn push_value(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.push_item(name, Item::Value(value.into()));
        self
    }

    /// Appends a list.
    pub fn push_list<V: Into<Value>>(
        &mut self,
        name: impl Into<String>,
        items: impl IntoIterator<Item = V>,
    ) -> &mut Self {
        self.push_item(
            name,
            Item::List(items.into_iter().map(Into::into).collect()),
        );
        self
    }

    /// Appends a section.
    pub fn push_section(&mut self, name: impl Into<String>, section: Self) -> &mut Self {
        self.push_item(name, Item::Section(section));
        self
    }

    /// The first item of that name.
    pub fn get(&self, name: &str) -> Option<&Item> {
        self.entries
            .iter()
            .find(|entry| entry.name == name)
            .map(|entry| &entry.item)
    }

    /// The first value of that name.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.entries.iter().find_map(|entry| match &entry.item {
            Item::Value(value) if entry.name == name => Some(value),
            _ => None,
        })
    }

    /// The first section of that name.
    pub fn section(&self, name: &str) -> Option<&Self> {
        self.entries.iter().find_map(|entry| match &entry.item {
            Item::Section(section) if entry.name == name => Some(section),
            _ => None,
        })
    }

    /// The sections with their entries, in order.
    pub fn sections(&self) -> impl Iterator<Item = (&Entry, &Self)> {
        self.entries.iter().filter_map(|entry| match &entry.item {
            Item::Section(section) => Some((entry, section)),
            _ => None,
        })
    }

    /// Follows a dotted path of sections to a value.
    pub fn path(&self, dotted: &str) -> Option<&Value> {
        let (sections, key) = dotted.rsplit_once('.').unwrap_or(("", dotted));
        sections
            .split('.')
            .filter(|name| !name.is_empty())
            .try_fold(self, |section, name| section.section(name))?
            .value(key)
    }

    /// Writes the tree in the file grammar; parsing that gives an equal tree. Lists become text
    /// with commas.
    pub fn to_config(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out, 0);
        // A name may begin with what would be taken for a byte order mark at the start of a file.
        if out.starts_with(b"\xef\xbb\xbf") {
            out.insert(0, b'\n');
        }
        out
    }

    fn write(&self, out: &mut Vec<u8>, depth: usize) {
        for entry in &self.entries {
            out.resize(out.len() + depth * 2, b' ');
            out.extend_from_slice(entry.name.as_bytes());
            match &entry.item {
                Item::Value(value) => {
                    out.extend_from_slice(b" = ");
                    quote(out, value.octets());
                    out.push(b'\n');
                }
                Item::List(items) => {
                    out.extend_from_slice(b" = ");
                    let joined = items
                        .iter()
                        .map(|item| item.octets())
                        .collect::<Vec<_>>()
                        .join(&b',');
                    quote(out, &joined);
                    out.push(b'\n');
                }
                Item::Section(section) => {
                    // With a space, `include {` would name files.
                    if entry.name != "include" {
                        out.push(b' ');
                    }
                    out.extend_from_slice(b"{\n");
                    section.write(out, depth + 1);
                    out.resize(out.len() + depth * 2, b' ');
                    out.extend_from_slice(b"}\n");
                }
            }
        }
    }
}

fn quote(out: &mut Vec<u8>, octets: &[u8]) {
    out.push(b'"');
    for &octet in octets {
        match octet {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', octet]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            _ => out.push(octet),
        }
    }
    out.push(b'"');
}
