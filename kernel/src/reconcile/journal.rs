// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ledger of what we may have put into the kernel, kept in a file.
//!
//! The kernel does not say who installed a state or a policy, and SPIs, request ids and marks are
//! the operators' and the peers' to choose. So each installation is written down before it is
//! made and struck out after it is undone; after a crash the file says what is ours. It belongs
//! on a volatile file system: a reboot empties the kernel too. It holds no keys.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use swanherd_ipsec::plane::{Direction, Mark, SaId};

use super::PolicyKey;

/// Lines beyond this many times the live entries cause a rewrite.
const SLACK: usize = 4;
/// A file shorter than this is not worth rewriting.
const SMALL: usize = 1024;

/// One thing of ours in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Record {
    /// An ESP SA.
    Sa(SaId),
    /// A policy and the request id of its template, 0 without one.
    Policy(PolicyKey, u32),
    /// The hash thresholds of policies that were in force before we set ours.
    Thresholds(Thresholds),
}

/// From which lengths of prefixes on the kernel finds policies by hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Thresholds {
    pub(crate) v6: bool,
    pub(crate) local: u8,
    pub(crate) remote: u8,
}

/// The ledger. Without a file it lives as long as the process.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    entries: BTreeSet<Record>,
    file: Option<(PathBuf, File)>,
    lines: usize,
}

impl Journal {
    /// Reads the ledger that an earlier run left at `path`, or begins one. Missing folders are
    /// made.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut journal = Self {
            entries: Self::read(path)?,
            file: None,
            lines: 0,
        };
        journal.rewrite(path)?;
        Ok(journal)
    }

    /// Reads a ledger and leaves it as it is. One that does not exist has no entries.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read(path: &Path) -> io::Result<BTreeSet<Record>> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let mut entries = BTreeSet::new();
        for line in text.lines() {
            // A line cut short by a crash describes an installation that was not begun.
            match (line.get(..1), line.get(1..).and_then(decode)) {
                (Some("+"), Some(record)) => {
                    entries.insert(record);
                }
                (Some("-"), Some(record)) => {
                    entries.remove(&record);
                }
                _ => {}
            }
        }
        Ok(entries)
    }

    pub(crate) fn entries(&self) -> &BTreeSet<Record> {
        &self.entries
    }

    /// Writes down what is about to be installed.
    pub(crate) fn add(&mut self, record: Record) -> io::Result<()> {
        if self.entries.insert(record) {
            self.append('+', &record)?;
        }
        Ok(())
    }

    /// Strikes out what is gone.
    pub(crate) fn remove(&mut self, record: &Record) -> io::Result<()> {
        if self.entries.remove(record) {
            self.append('-', record)?;
        }
        Ok(())
    }

    /// Removes the file, if nothing is left to write down.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some((path, _)) if self.entries.is_empty() => std::fs::remove_file(path),
            file => {
                self.file = file;
                Ok(())
            }
        }
    }

    fn append(&mut self, sign: char, record: &Record) -> io::Result<()> {
        let Some((path, file)) = &mut self.file else {
            return Ok(());
        };
        file.write_all(format!("{sign}{}\n", encode(record)).as_bytes())?;
        self.lines += 1;
        if self.lines > SMALL && self.lines > SLACK * self.entries.len() {
            let path = path.clone();
            self.rewrite(&path)?;
        }
        Ok(())
    }

    fn rewrite(&mut self, path: &Path) -> io::Result<()> {
        let text: String = self
            .entries
            .iter()
            .map(|record| format!("+{}\n", encode(record)))
            .collect();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".new");
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, path)?;
        let file = OpenOptions::new().append(true).open(path)?;
        self.lines = self.entries.len();
        self.file = Some((path.to_owned(), file));
        Ok(())
    }
}

fn encode(record: &Record) -> String {
    match record {
        Record::Sa(id) => format!("sa {} {:08x}", id.dst, id.spi),
        Record::Thresholds(old) => {
            let version = if old.v6 { 6 } else { 4 };
            format!("hthresh{version} {} {}", old.local, old.remote)
        }
        Record::Policy(key, reqid) => {
            let direction = match key.direction {
                Direction::In => "in",
                Direction::Out => "out",
                Direction::Fwd => "fwd",
            };
            let mark = key.mark.unwrap_or(Mark { value: 0, mask: 0 });
            format!(
                "policy {direction} {} {} {} {} {} {} {} {} {} {} {} {} {reqid}",
                key.src.0,
                key.src.1,
                key.dst.0,
                key.dst.1,
                key.proto,
                key.sport.0,
                key.sport.1,
                key.dport.0,
                key.dport.1,
                mark.value,
                mark.mask,
                key.if_id,
            )
        }
    }
}

fn decode(line: &str) -> Option<Record> {
    let mut words = line.split(' ');
    let record = match words.next()? {
        "sa" => {
            let dst: IpAddr = words.next()?.parse().ok()?;
            let spi = words.next().filter(|spi| spi.len() == 8)?;
            let spi = u32::from_str_radix(spi, 16).ok()?;
            Record::Sa(SaId { spi, dst })
        }
        kind @ ("hthresh4" | "hthresh6") => Record::Thresholds(Thresholds {
            v6: kind == "hthresh6",
            local: next(&mut words)?,
            remote: next(&mut words)?,
        }),
        "policy" => {
            let direction = match words.next()? {
                "in" => Direction::In,
                "out" => Direction::Out,
                "fwd" => Direction::Fwd,
                _ => return None,
            };
            let src = (next(&mut words)?, next(&mut words)?);
            let dst = (next(&mut words)?, next(&mut words)?);
            let proto = next(&mut words)?;
            let sport = (next(&mut words)?, next(&mut words)?);
            let dport = (next(&mut words)?, next(&mut words)?);
            let (value, mask) = (next(&mut words)?, next(&mut words)?);
            let key = PolicyKey {
                direction,
                src,
                dst,
                proto,
                sport,
                dport,
                mark: ((value, mask) != (0, 0)).then_some(Mark { value, mask }),
                if_id: next(&mut words)?,
            };
            Record::Policy(key, next(&mut words)?)
        }
        _ => return None,
    };
    words.next().is_none().then_some(record)
}

fn next<T: std::str::FromStr>(words: &mut std::str::Split<'_, char>) -> Option<T> {
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sa(spi: u32) -> Record {
        Record::Sa(SaId {
            spi,
            dst: "192.0.2.1".parse().unwrap(),
        })
    }

    #[test]
    fn a_later_run_finds_what_was_not_struck_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/on/demand/ledger");
        let mut journal = Journal::open(&path).unwrap();
        journal.add(sa(1)).unwrap();
        journal.add(sa(2)).unwrap();
        journal.remove(&sa(1)).unwrap();
        drop(journal);

        let mut journal = Journal::open(&path).unwrap();

        assert_eq!(journal.entries(), &BTreeSet::from([sa(2)]));
        journal.remove(&sa(2)).unwrap();
        journal.close().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_torn_last_line_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        std::fs::write(&path, "+sa 192.0.2.1 00000001\n+sa 192.0.2.1 000000").unwrap();

        let journal = Journal::open(&path).unwrap();

        assert_eq!(journal.entries(), &BTreeSet::from([sa(1)]));
    }

    #[test]
    fn the_file_does_not_grow_with_the_number_of_operations() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut journal = Journal::open(&path).unwrap();
        for spi in 0..10_000 {
            journal.add(sa(spi)).unwrap();
            journal.remove(&sa(spi)).unwrap();
        }
        assert!(std::fs::metadata(&path).unwrap().len() < 64 * 1024);
    }

    fn addr() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|b| std::net::Ipv4Addr::from_bits(b).into()),
            any::<u128>().prop_map(|b| std::net::Ipv6Addr::from_bits(b).into())
        ]
    }

    fn record() -> impl Strategy<Value = Record> {
        let direction = prop_oneof![
            Just(Direction::In),
            Just(Direction::Out),
            Just(Direction::Fwd)
        ];
        let key = (
            direction,
            (addr(), any::<u8>()),
            (addr(), any::<u8>()),
            any::<u8>(),
            any::<(u16, u16)>(),
            any::<(u16, u16)>(),
            proptest::option::of((1u32.., any::<u32>())),
            any::<u32>(),
        );
        let policy = (key, any::<u32>()).prop_map(|(k, reqid)| {
            let (direction, src, dst, proto, sport, dport, mark, if_id) = k;
            let mark = mark.map(|(value, mask)| Mark { value, mask });
            Record::Policy(
                PolicyKey {
                    direction,
                    src,
                    dst,
                    proto,
                    sport,
                    dport,
                    mark,
                    if_id,
                },
                reqid,
            )
        });
        let sa = (any::<u32>(), addr()).prop_map(|(spi, dst)| Record::Sa(SaId { spi, dst }));
        let thresholds = any::<(bool, u8, u8)>()
            .prop_map(|(v6, local, remote)| Record::Thresholds(Thresholds { v6, local, remote }));
        prop_oneof![sa, policy, thresholds]
    }

    proptest! {
        #[test]
        fn a_record_survives_its_line(record in record()) {
            prop_assert_eq!(decode(&encode(&record)), Some(record));
        }

        #[test]
        fn no_line_makes_the_reader_panic(line in ".*") {
            let _ = decode(&line);
        }
    }
}
