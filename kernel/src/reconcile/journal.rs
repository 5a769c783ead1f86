// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ledger of what we may have put into the kernel, kept in a file.
//!
//! The kernel does not say who installed a state or a policy, and SPIs, request ids and marks are
//! the operators' and the peers' to choose. So each installation is written down before it is
//! made and struck out after it is undone; after a crash the file says what is ours. It belongs
//! on a volatile file system: a reboot empties the kernel too. It holds no keys.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use swanherd_ipsec::plane::{Direction, Mark, SaId};

use super::PolicyKey;

/// Lines beyond this many times the live entries cause a rewrite.
const SLACK: usize = 4;
/// A file shorter than this is not worth rewriting.
const SMALL: usize = 1024;
/// After a failure, so many changes go by at most until the file is tried again.
const RETRY: usize = 4096;

/// Far beyond what hundreds of thousands of entries need.
const MAX_SIZE: u64 = 64 << 20;
/// How often, and how long after each other, the lock of another process is tried.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// One thing of ours in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Record {
    /// An ESP SA.
    Sa(SaId),
    /// A policy and the request id of its template, 0 without one.
    Policy(PolicyKey, u32),
    /// The hash thresholds of policies that were in force before we set ours.
    Thresholds(Thresholds),
    /// A virtual address, on whichever interface.
    Address(IpAddr),
}

/// From which lengths of prefixes on the kernel finds policies by hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Thresholds {
    pub(crate) v6: bool,
    pub(crate) local: u8,
    pub(crate) remote: u8,
}

/// The ledger. Without a path it lives as long as the process.
///
/// A file that cannot be written, on a full disk for instance, keeps nothing from being installed.
/// The failure is told once, and the file is written whole again as soon as that works.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    entries: BTreeSet<Record>,
    path: Option<PathBuf>,
    /// Locked as long as the ledger is ours. Not the ledger itself, which is replaced at times.
    lock: Option<File>,
    /// `None`: the last write failed, and what the file says is out of date.
    file: Option<File>,
    lines: usize,
    /// Changes since the last write that failed.
    missed: usize,
}

impl Journal {
    /// Reads the ledger that an earlier run left at `path`, or begins one. Missing folders are
    /// made.
    ///
    /// # Errors
    /// If the file cannot be read: what is ours would stay in the kernel for good. If the folder
    /// cannot be made, or it is no folder. If another process has the ledger: what that one has
    /// installed would be taken for leftovers.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let lock = lock(path)?;
        let mut journal = Self {
            entries: Self::read(path)?,
            path: Some(path.to_owned()),
            lock,
            ..Self::default()
        };
        match journal.rewrite() {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!(path = %path.display(), %error, "cannot write the ledger yet");
            }
            result => result?,
        }
        Ok(journal)
    }

    /// Reads a ledger and leaves it as it is. One that does not exist has no entries.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn read(path: &Path) -> io::Result<BTreeSet<Record>> {
        let content = match read_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            content => content?,
        };
        let mut entries = BTreeSet::new();
        for line in content.split_inclusive(|octet| *octet == b'\n') {
            // A line cut short by a crash describes an installation that was not begun, or
            // something that is gone; what is left of it may look like another record.
            let Some(line) = line
                .strip_suffix(b"\n")
                .and_then(|line| std::str::from_utf8(line).ok())
            else {
                continue;
            };
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
    ///
    /// # Errors
    /// If the file cannot be written; told for the first failure in a row.
    pub(crate) fn add(&mut self, record: Record) -> io::Result<()> {
        if self.entries.insert(record) {
            self.append('+', &record)?;
        }
        Ok(())
    }

    /// Strikes out what is gone.
    ///
    /// # Errors
    /// As [`Journal::add`].
    pub(crate) fn remove(&mut self, record: &Record) -> io::Result<()> {
        if self.entries.remove(record) {
            self.append('-', record)?;
        }
        Ok(())
    }

    /// Removes the file, if nothing is left to write down.
    ///
    /// # Errors
    /// If it cannot be removed, or what is left cannot be written.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        if self.entries.is_empty() {
            self.file = None;
            if self.lock.take().is_some() {
                // An empty file that stays does no harm.
                let _ = std::fs::remove_file(lock_path(path));
            }
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        } else if self.file.is_none() {
            self.rewrite()
        } else {
            Ok(())
        }
    }

    /// Lets another process have the ledger. Nothing may be installed afterwards.
    pub(crate) fn unlock(&mut self) {
        self.lock = None;
    }

    fn append(&mut self, sign: char, record: &Record) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            if self.path.is_some() {
                self.try_again();
            }
            return Ok(());
        };
        if let Err(error) = file.write_all(format!("{sign}{}\n", encode(record)).as_bytes()) {
            // Part of the line may have been written; nothing may be appended to that.
            self.file = None;
            self.missed = 0;
            return Err(error);
        }
        self.lines += 1;
        if self.lines > SMALL && self.lines > SLACK * self.entries.len() {
            self.rewrite()?;
        }
        Ok(())
    }

    /// Writes the whole file after a failure: soon, and then ever less often.
    fn try_again(&mut self) {
        self.missed += 1;
        let due = self.missed.is_power_of_two() || self.missed.is_multiple_of(RETRY);
        if due && self.rewrite().is_ok() {
            tracing::info!("the ledger of installed SAs and policies is written again");
        }
    }

    fn rewrite(&mut self) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        self.file = None;
        let text: String = self
            .entries
            .iter()
            .map(|record| format!("+{}\n", encode(record)))
            .collect();
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".new");
        let written = std::fs::write(&temporary, text)
            .and_then(|()| std::fs::rename(&temporary, path))
            .and_then(|()| OpenOptions::new().append(true).open(path));
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        self.file = Some(written?);
        self.lines = self.entries.len();
        self.missed = 0;
        Ok(())
    }
}

/// Reads a file of sensible size, and nothing that one may wait for.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.len() > MAX_SIZE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "this is no ledger: not a file, or too large",
        ));
    }
    let mut content = Vec::new();
    file.take(MAX_SIZE).read_to_end(&mut content)?;
    Ok(content)
}

/// Locks the ledger at `path` for this process. Where files cannot be made for lack of space there
/// is no lock.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = match File::create(lock_path(path)) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(None),
        file => file?,
    };
    // A predecessor may be on its way out still.
    for _ in 0..LOCK_ATTEMPTS {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::WouldBlock,
        "another daemon has it; two daemons need a swanherd.run_dir each",
    ))
}

fn lock_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

fn encode(record: &Record) -> String {
    match record {
        Record::Sa(id) => format!("sa {} {:08x}", id.dst, id.spi),
        Record::Address(addr) => format!("address {addr}"),
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
        "address" => Record::Address(next(&mut words)?),
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
    fn a_ledger_that_another_has_is_not_opened_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut first = Journal::open(&path).unwrap();
        first.add(sa(1)).unwrap();

        let refused = Journal::open(&path).unwrap_err();

        assert!(refused.to_string().contains("another daemon"), "{refused}");
        drop(first);
        assert_eq!(
            Journal::open(&path).unwrap().entries(),
            &BTreeSet::from([sa(1)])
        );
    }

    #[test]
    fn what_is_no_ledger_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        File::create(&path).unwrap().set_len(MAX_SIZE + 1).unwrap();
        assert!(Journal::open(&path).is_err());
        assert!(Journal::open(folder.path()).is_err());
        assert!(Journal::read(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn a_torn_last_line_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        std::fs::write(&path, "+sa 192.0.2.1 00000001\n+sa 192.0.2.1 000000").unwrap();

        let mut journal = Journal::open(&path).unwrap();

        assert_eq!(journal.entries(), &BTreeSet::from([sa(1)]));
        // What comes next is not appended to the remains.
        journal.add(sa(2)).unwrap();
        assert_eq!(Journal::read(&path).unwrap(), [sa(1), sa(2)].into());
    }

    #[test]
    fn octets_that_are_no_text_spoil_their_line_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        std::fs::write(
            &path,
            b"+sa 192.0.2.1 00000001\n\xff\xfe\0\n+sa 192.0.2.1 00000002\n",
        )
        .unwrap();
        let journal = Journal::open(&path).unwrap();
        assert_eq!(journal.entries(), &[sa(1), sa(2)].into());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        std::fs::create_dir(&path).unwrap();
        assert!(Journal::open(&path).is_err());
    }

    #[test]
    fn a_full_disk_is_told_once_and_the_file_is_whole_again_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut journal = Journal::open(&path).unwrap();
        journal.add(sa(1)).unwrap();
        journal.file = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        // No file may take the place of a folder that is not empty.
        let place = folder.path().join("occupied");
        std::fs::create_dir(&place).unwrap();
        std::fs::write(place.join("file"), "").unwrap();
        journal.path = Some(place);

        let told: Vec<bool> = (2..100).map(|spi| journal.add(sa(spi)).is_err()).collect();
        assert_eq!(told.iter().filter(|told| **told).count(), 1);
        assert!(told[0]);

        journal.path = Some(path.clone());
        for spi in 100..200 {
            journal.add(sa(spi)).unwrap();
        }
        assert_eq!(&Journal::read(&path).unwrap(), journal.entries());
        assert_eq!(journal.entries().len(), 199);
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
        let address = addr().prop_map(Record::Address);
        prop_oneof![sa, policy, thresholds, address]
    }

    proptest! {
        /// A crash in the middle of a write leaves what was before that write, and nothing else.
        #[test]
        fn a_file_cut_anywhere_says_what_an_earlier_moment_did(
            steps in proptest::collection::vec((any::<bool>(), 0usize..4), 0..12),
            records in proptest::collection::vec(record(), 4),
            cut in any::<proptest::sample::Index>(),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("ledger");
            let mut journal = Journal::open(&path).unwrap();
            let mut moments = vec![BTreeSet::new()];
            for (add, which) in steps {
                if add {
                    journal.add(records[which]).unwrap();
                } else {
                    journal.remove(&records[which]).unwrap();
                }
                moments.push(journal.entries().clone());
            }
            let mut content = std::fs::read(&path).unwrap();
            content.truncate(cut.index(content.len() + 1));
            std::fs::write(&path, content).unwrap();
            let read = Journal::read(&path).unwrap();
            prop_assert!(moments.contains(&read), "{read:?}");
        }

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
