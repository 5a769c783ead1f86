// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where files come from: the system, or memory (tests, fuzzing, `check` of text).

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// The largest file that is read.
pub const MAX_FILE: u64 = 64 << 20;

/// Read access to files.
pub trait Files {
    /// The contents of a regular file of at most [`MAX_FILE`] octets.
    ///
    /// # Errors
    /// If it cannot be read, is not a regular file, or is too large.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// The files that match a shell pattern, sorted.
    ///
    /// # Errors
    /// The text says why the pattern is invalid.
    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String>;

    /// The regular files of a directory, sorted; none if it does not exist.
    ///
    /// # Errors
    /// If the directory exists but cannot be read.
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>>;

    /// Whether this is a directory.
    fn is_dir(&self, path: &Path) -> bool;
}

const GLOB_OPTIONS: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// The files of the system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

impl Files for SystemFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        // The size may grow while reading, so it is limited here too.
        let mut contents = Vec::new();
        std::fs::File::open(path)?
            .take(MAX_FILE + 1)
            .read_to_end(&mut contents)?;
        if contents.len() as u64 > MAX_FILE {
            return Err(io::Error::other("larger than 64 MiB"));
        }
        Ok(contents)
    }

    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String> {
        let paths = glob::glob_with(pattern, GLOB_OPTIONS).map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for path in paths {
            found.push(path.map_err(|error| error.to_string())?);
        }
        found.sort();
        Ok(found)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.is_file() {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    }

    fn is_dir(&self, path: &Path) -> bool {
        path.is_dir()
    }
}

/// Files in memory, by path.
#[derive(Clone, Debug, Default)]
pub struct MemoryFiles(BTreeMap<PathBuf, Vec<u8>>);

impl MemoryFiles {
    /// No files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a file.
    pub fn insert(&mut self, path: impl Into<PathBuf>, contents: impl Into<Vec<u8>>) -> &mut Self {
        self.0.insert(path.into(), contents.into());
        self
    }
}

impl Files for MemoryFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0
            .get(path)
            .cloned()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    fn glob(&self, pattern: &str) -> Result<Vec<PathBuf>, String> {
        let pattern = glob::Pattern::new(pattern).map_err(|error| error.to_string())?;
        Ok(self
            .0
            .keys()
            .filter(|path| pattern.matches_path_with(path, GLOB_OPTIONS))
            .cloned()
            .collect())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(self
            .0
            .keys()
            .filter(|path| path.parent() == Some(dir))
            .cloned()
            .collect())
    }

    fn is_dir(&self, path: &Path) -> bool {
        self.0
            .keys()
            .any(|file| file.ancestors().skip(1).any(|dir| dir == path))
    }
}
