// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file grammar that swanctl.conf and strongswan.conf share.
//!
//! Sections merge, later values replace earlier ones, `include` splices files into the enclosing
//! section, and `name : other.section { }` inherits what the section itself does not set. The
//! result is a [`Tree`] in which all of that has been carried out. Input may be hostile: size,
//! nesting, include depth and the work of inheritance are bounded.

mod inherit;
mod lexer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::diagnostic::Diagnostic;
use crate::files::{Files, MemoryFiles};
use crate::tree::{Location, Source, Tree, Value};

use lexer::{Lexer, Word};

/// Deepest nesting of sections.
const MAX_DEPTH: usize = 64;
/// Deepest nesting of includes.
const MAX_INCLUDE_DEPTH: usize = 16;
/// Most files of one configuration.
const MAX_FILES: usize = 65_536;
/// Most octets of all files together.
const MAX_TOTAL: usize = 64 << 20;
/// Longest section name.
const MAX_NAME: usize = 256;
/// Most warnings that are kept.
const MAX_WARNINGS: usize = 256;

/// What a configuration file, with its includes, says.
#[derive(Debug)]
pub struct Parsed {
    /// The tree, keys before sections, inheritance carried out.
    pub tree: Tree,
    /// The files that were read, in order.
    pub files: Vec<PathBuf>,
    /// What is probably not meant as written.
    pub warnings: Vec<Diagnostic>,
    /// Sections of `connections`, `secrets`, `pools` and `authorities` that are begun twice.
    pub repeated_sections: Vec<Repeated>,
}

/// A section that is begun a second time, which adds to the first.
#[derive(Debug)]
pub struct Repeated {
    /// Dotted path.
    pub path: String,
    /// Where it was begun first.
    pub first: Location,
    /// Where it was begun again.
    pub again: Location,
}

/// Sections whose sections are each a definition of its own.
const DEFINITIONS: &[&str] = &["connections", "secrets", "pools", "authorities"];

/// Reads a file and what it includes.
///
/// # Errors
/// If the file cannot be read, or any of the files has a syntax error.
pub fn parse_file(path: &Path, files: &dyn Files) -> Result<Parsed, Diagnostic> {
    let text = files.read(path).map_err(|error| {
        Diagnostic::error(
            "unreadable",
            format!("cannot read {}: {error}", path.display()),
        )
    })?;
    let mut parser = Parser::new(files);
    parser.file(path, text, ROOT, 0)?;
    parser.finish()
}

/// Parses text that stands for the file `name`; includes find nothing.
///
/// # Errors
/// On a syntax error.
pub fn parse_str(name: &str, text: &[u8]) -> Result<Parsed, Diagnostic> {
    let files = MemoryFiles::new();
    let mut parser = Parser::new(&files);
    parser.file(Path::new(name), text.to_vec(), ROOT, 0)?;
    parser.finish()
}

/// Index of a section in [`Parser::sections`].
type Index = usize;
const ROOT: Index = 0;

struct RawKey {
    name: String,
    location: Location,
    /// `None` is `key =`: hides an inherited value.
    value: Option<Value>,
}

#[derive(Default)]
struct RawSection {
    keys: Vec<RawKey>,
    key_index: BTreeMap<String, usize>,
    sections: Vec<(String, Location, Index)>,
    section_index: BTreeMap<String, Index>,
    /// Dotted paths.
    references: Vec<String>,
}

struct Parser<'a> {
    files: &'a dyn Files,
    sections: Vec<RawSection>,
    read: Vec<PathBuf>,
    total: usize,
    warnings: Vec<Diagnostic>,
    repeated: Vec<Repeated>,
}

impl<'a> Parser<'a> {
    fn new(files: &'a dyn Files) -> Self {
        Self {
            files,
            sections: vec![RawSection::default()],
            read: Vec::new(),
            total: 0,
            warnings: Vec::new(),
            repeated: Vec::new(),
        }
    }

    fn finish(self) -> Result<Parsed, Diagnostic> {
        let tree = inherit::resolve(&self.sections)?;
        Ok(Parsed {
            tree,
            files: self.read,
            warnings: self.warnings,
            repeated_sections: self.repeated,
        })
    }

    fn warn(&mut self, warning: Diagnostic) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(warning);
        }
    }

    /// Parses one file into the section `base`.
    fn file(
        &mut self,
        path: &Path,
        text: Vec<u8>,
        base: Index,
        include_depth: usize,
    ) -> Result<(), Diagnostic> {
        self.total = self.total.saturating_add(text.len());
        self.read.push(path.to_owned());
        if self.total > MAX_TOTAL || self.read.len() > MAX_FILES {
            return Err(Diagnostic::error(
                "too-large",
                format!("the configuration has more than {MAX_FILES} files or {MAX_TOTAL} octets"),
            ));
        }
        let source = Source::new(path.display().to_string(), text);
        let mut lexer = Lexer::new(Arc::clone(&source));
        if lexer.skip_byte_order_mark() {
            let place = lexer.location(0, 3);
            self.warn(
                Diagnostic::warning("byte-order-mark", "the file begins with a byte order mark")
                    .at(Some(&place))
                    .help("it is skipped; strongSwan takes it for a part of the first name and ignores that section. Save the file without it"),
            );
        }
        let mut open: Vec<(Index, Location)> = Vec::new();
        loop {
            lexer.skip_space();
            let current = open.last().map_or(base, |(index, _)| *index);
            match lexer.peek() {
                None => {
                    let Some((_, opened)) = open.last() else {
                        return Ok(());
                    };
                    return Err(syntax("the file ends inside a section", opened)
                        .help("the section that is opened here lacks its `}`"));
                }
                Some(b'}') => {
                    if open.pop().is_none() {
                        return Err(syntax("`}` closes no section", &lexer.here(1)));
                    }
                    lexer.bump();
                }
                Some(_) => self.statement(&mut lexer, path, current, &mut open, include_depth)?,
            }
        }
    }

    /// One statement that begins with a name.
    fn statement(
        &mut self,
        lexer: &mut Lexer,
        path: &Path,
        current: Index,
        open: &mut Vec<(Index, Location)>,
        include_depth: usize,
    ) -> Result<(), Diagnostic> {
        let Some((name, place)) = lexer.name() else {
            return Err(unexpected(lexer, "a name"));
        };
        if name == "include" && lexer.at_include_pattern() {
            return self.include(lexer, path, current, include_depth);
        }
        if name.len() > MAX_NAME {
            return Err(syntax(
                &format!("names have at most {MAX_NAME} octets"),
                &place,
            ));
        }
        lexer.skip_blanks();
        if lexer.peek() == Some(b'=') {
            lexer.bump();
            return self.assignment(lexer, current, name, place);
        }
        lexer.skip_space();
        let references = match lexer.peek() {
            Some(b':') => {
                lexer.bump();
                references(lexer)?
            }
            _ => Vec::new(),
        };
        if lexer.peek() != Some(b'{') {
            return Err(unexpected(lexer, "`=`, `{` or `:`"));
        }
        lexer.bump();
        if open.len() >= MAX_DEPTH {
            return Err(syntax(
                &format!("sections nest at most {MAX_DEPTH} deep"),
                &place,
            ));
        }
        let index = self.section(current, name, place.clone());
        for reference in references {
            if !self.sections[index].references.contains(&reference) {
                self.sections[index].references.push(reference);
            }
        }
        open.push((index, place));
        Ok(())
    }

    /// Finds or makes a section.
    fn section(&mut self, parent: Index, name: String, place: Location) -> Index {
        if let Some(&index) = self.sections[parent].section_index.get(&name) {
            self.again(parent, index, &name, place);
            return index;
        }
        let index = self.sections.len();
        self.sections.push(RawSection::default());
        let parent = &mut self.sections[parent];
        parent.section_index.insert(name.clone(), index);
        parent.sections.push((name, place, index));
        index
    }

    /// Remembers that a definition is begun again.
    fn again(&mut self, parent: Index, index: Index, name: &str, place: Location) {
        let of_root = |(_, _, index): &&(String, Location, Index)| *index == parent;
        let Some((kind, ..)) = self.sections[ROOT].sections.iter().find(of_root) else {
            return;
        };
        if !DEFINITIONS.contains(&kind.as_str()) || self.repeated.len() >= MAX_WARNINGS {
            return;
        }
        let path = format!("{kind}.{name}");
        let begun = &self.sections[parent].sections;
        if let Some((_, first, _)) = begun.iter().find(|(_, _, known)| *known == index) {
            self.repeated.push(Repeated {
                path,
                first: first.clone(),
                again: place,
            });
        }
    }

    fn assignment(
        &mut self,
        lexer: &mut Lexer,
        current: Index,
        name: String,
        place: Location,
    ) -> Result<(), Diagnostic> {
        let value = match lexer.value()? {
            None => None,
            Some(Word {
                octets,
                location,
                comment_glued,
                blanks_collapsed,
            }) => {
                if let Some(glued) = comment_glued {
                    self.warn(
                        Diagnostic::warning(
                            "comment-in-value",
                            format!(
                                "the value of `{name}` ends at the `#`, which begins a comment"
                            ),
                        )
                        .key(&name)
                        .at_secret(Some(&glued))
                        .help("write the value in double quotes if the `#` belongs to it"),
                    );
                }
                if blanks_collapsed {
                    self.warn(
                        Diagnostic::warning(
                            "blanks-collapsed",
                            format!("several blanks in the value of `{name}` count as one"),
                        )
                        .key(&name)
                        .at_secret(Some(&location))
                        .help("write the value in double quotes to keep them"),
                    );
                }
                Some(Value::at(octets, Some(location)))
            }
        };
        let section = &mut self.sections[current];
        let key = RawKey {
            name,
            location: place,
            value,
        };
        let Some(&slot) = section.key_index.get(&key.name) else {
            section
                .key_index
                .insert(key.name.clone(), section.keys.len());
            section.keys.push(key);
            return Ok(());
        };
        let earlier = &section.keys[slot];
        let warning = Arc::ptr_eq(&earlier.location.source, &key.location.source).then(|| {
            Diagnostic::warning(
                "repeated-key",
                format!(
                    "`{}` is set again; the value of line {} is lost",
                    key.name, earlier.location.line
                ),
            )
            .key(&key.name)
            .at_secret(Some(&key.location))
            .help("the later one counts")
        });
        section.keys[slot] = key;
        if let Some(warning) = warning {
            self.warn(warning);
        }
        Ok(())
    }

    fn include(
        &mut self,
        lexer: &mut Lexer,
        path: &Path,
        current: Index,
        include_depth: usize,
    ) -> Result<(), Diagnostic> {
        let (pattern, place) = lexer.include_pattern()?;
        if include_depth >= MAX_INCLUDE_DEPTH {
            return Err(syntax(
                &format!("files include each other more than {MAX_INCLUDE_DEPTH} deep"),
                &place,
            )
            .help("does a file include itself?"));
        }
        let pattern = if Path::new(&pattern).is_absolute() {
            pattern
        } else {
            let dir = path.parent().unwrap_or_else(|| Path::new(""));
            // The directory is literal, whatever characters its name has.
            let dir = glob::Pattern::escape(&dir.display().to_string());
            match dir.as_str() {
                "" => pattern,
                dir => format!("{}/{pattern}", dir.trim_end_matches('/')),
            }
        };
        let found = match self.files.glob(&pattern) {
            Ok(found) => found,
            Err(reason) => {
                self.warn(
                    Diagnostic::warning(
                        "include",
                        format!("the include pattern `{pattern}` cannot be expanded: {reason}"),
                    )
                    .at(Some(&place)),
                );
                return Ok(());
            }
        };
        if found.is_empty() {
            let literal = !pattern.contains(['*', '?', '[']);
            let dir = Path::new(&pattern)
                .parent()
                .unwrap_or_else(|| Path::new(""));
            let dir_missing = !dir.as_os_str().is_empty() && !self.files.is_dir(dir);
            if literal || dir_missing {
                self.warn(
                    Diagnostic::warning("include", format!("no file matches `{pattern}`"))
                        .at(Some(&place)),
                );
            }
        }
        for file in found {
            match self.files.read(&file) {
                Ok(text) => self.file(&file, text, current, include_depth + 1)?,
                Err(error) => self.warn(
                    Diagnostic::warning(
                        "include",
                        format!("{} is left out: {error}", file.display()),
                    )
                    .at(Some(&place)),
                ),
            }
        }
        Ok(())
    }
}

/// `ref1, ref2.sub` up to the `{`.
fn references(lexer: &mut Lexer) -> Result<Vec<String>, Diagnostic> {
    let mut found = Vec::new();
    loop {
        let mut dotted = String::new();
        lexer.skip_space();
        loop {
            let Some((name, _)) = lexer.name() else {
                return Err(unexpected(lexer, "the name of a section"));
            };
            dotted.push_str(&name);
            if lexer.peek() != Some(b'.') {
                break;
            }
            lexer.bump();
            dotted.push('.');
        }
        found.push(dotted);
        lexer.skip_space();
        if lexer.peek() != Some(b',') {
            return Ok(found);
        }
        lexer.bump();
    }
}

fn syntax(message: &str, place: &Location) -> Diagnostic {
    Diagnostic::error("syntax", message).at_secret(Some(place))
}

fn unexpected(lexer: &Lexer, expected: &str) -> Diagnostic {
    let place = lexer.here(1);
    match lexer.peek() {
        None => syntax(
            &format!("the file ends where {expected} is expected"),
            &place,
        ),
        Some(b'\n' | b'\r') => syntax(
            &format!("the line ends where {expected} is expected"),
            &place,
        ),
        Some(octet) => {
            let error = syntax(
                &format!(
                    "`{}` stands where {expected} is expected",
                    octet.escape_ascii()
                ),
                &place,
            );
            match octet {
                b'.' => error.help(
                    "a dot separates section names in references; it cannot be part of a name",
                ),
                b':' => error.help("a colon precedes references; it cannot be part of a name"),
                b'}' | b'"' => {
                    error.help("values that hold `#`, `}` or `\"` must be written in double quotes")
                }
                _ => error,
            }
        }
    }
}

#[cfg(test)]
mod tests;
