// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What should be in the kernel, and the ledger of what may be there from us.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use swanherd_ipsec::plane::{PolicyAction, SaId};

use crate::audit::Finding;
use crate::reconcile::{Change, Desired, InForce, Journal, PolicyKey, Record, WantedSa};

/// What should be in the kernel, and what may be there from us.
#[derive(Debug, Default)]
pub(super) struct Books {
    pub(super) desired: Desired,
    pub(super) journal: Journal,
    /// Policies in whose place an audit has found someone else's.
    pub(super) contested: BTreeSet<PolicyKey>,
    /// Traps and shunts, by set, that the kernel did not take: they are wanted as long as their
    /// definitions are, and each audit says so.
    pub(super) refused: BTreeMap<u32, Finding>,
}

impl Books {
    /// Opens the ledger at `path`, of this network namespace. Without a path it lives as long as
    /// the process.
    ///
    /// # Errors
    /// If the ledger cannot be read or written.
    pub(super) fn open(path: Option<&Path>) -> io::Result<Self> {
        let journal = path.map(open_journal).transpose()?.unwrap_or_default();
        Ok(Self {
            journal,
            ..Self::default()
        })
    }

    /// Writes down what is about to be installed.
    pub(super) fn record(&mut self, record: Record) {
        if let Err(error) = self.journal.add(record) {
            tracing::warn!(%error, "cannot write the ledger of installed SAs and policies");
        }
    }

    /// Writes down an SPI that the kernel is about to be asked for; `false` if it is one of ours.
    pub(super) fn reserve(&mut self, id: SaId) -> bool {
        let record = Record::Sa(id);
        if self.desired.sa(id).is_some() || self.journal.entries().contains(&record) {
            return false;
        }
        self.record(record);
        self.desired.want_sa(id, WantedSa::Reserved);
        true
    }

    /// Strikes out what is gone.
    pub(super) fn strike_out(&mut self, record: &Record) {
        if let Err(error) = self.journal.remove(record) {
            tracing::warn!(%error, "cannot write the ledger of installed SAs and policies");
        }
    }

    /// The changes that are ours to make: what stands in place of a policy of ours is not removed
    /// and not changed with it.
    pub(super) fn without_contested(&mut self, mut changes: Vec<Change>) -> Vec<Change> {
        if self.contested.is_empty() {
            return changes;
        }
        changes.retain_mut(|change| {
            if !self.contested.contains(&change.key) {
                return true;
            }
            if change.after.is_none() {
                self.contested.remove(&change.key);
                if let Some(before) = change.before {
                    self.strike_out(&Record::Policy(change.key, reqid_of(&before)));
                }
                return false;
            }
            // As if ours had never been there: the kernel refuses while someone else's is.
            change.before = None;
            true
        });
        changes
    }

    /// Virtual addresses that may be there from us.
    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        let addresses = self.journal.entries().iter().map(|record| match record {
            Record::Address(addr) => Some(*addr),
            Record::Sa(_) | Record::Policy(..) | Record::Thresholds(_) => None,
        });
        addresses.flatten().collect()
    }

    /// Request ids of policies that may be there from us.
    pub(super) fn reqids_of_policies(&self) -> BTreeSet<u32> {
        let reqids = self.journal.entries().iter().map(|record| match record {
            Record::Policy(_, reqid) => Some(*reqid),
            Record::Sa(_) | Record::Thresholds(_) | Record::Address(_) => None,
        });
        reqids.flatten().filter(|reqid| *reqid != 0).collect()
    }

    /// Strikes out all virtual addresses, when none is there any more.
    pub(super) fn strike_out_addresses(&mut self) {
        for addr in self.addresses() {
            self.strike_out(&Record::Address(addr));
        }
    }

    /// Strikes out policies that are no longer in force after `changes` were made.
    pub(super) fn strike_out_changes<'a>(&mut self, changes: impl IntoIterator<Item = &'a Change>) {
        for change in changes {
            let in_force = self.desired.in_force(&change.key).map(|p| reqid_of(&p));
            for side in [change.before, change.after].into_iter().flatten() {
                let reqid = reqid_of(&side);
                if in_force != Some(reqid) {
                    self.strike_out(&Record::Policy(change.key, reqid));
                }
            }
        }
    }
}

/// Request id of a policy's template, 0 without one.
pub(super) fn reqid_of(policy: &InForce) -> u32 {
    match policy.action {
        PolicyAction::Protect { reqid, .. } => reqid,
        PolicyAction::Bypass | PolicyAction::Discard => 0,
    }
}

/// The ledger of this network namespace, given the path that all have in common.
pub(super) fn ledger_here(path: &Path) -> PathBuf {
    use std::os::unix::fs::MetadataExt as _;
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")
        .or_else(|_| std::fs::metadata("/proc/self/ns/net"))
        .map_or(0, |namespace| namespace.ino());
    let mut path = path.as_os_str().to_owned();
    path.push(format!(".{namespace}"));
    path.into()
}

/// Opens the ledger of this network namespace.
fn open_journal(path: &Path) -> io::Result<Journal> {
    let path = ledger_here(path);
    Journal::open(&path).map_err(|error| {
        let path = path.display();
        io::Error::new(
            error.kind(),
            format!("cannot keep the ledger {path}: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_spi_is_in_the_ledger_before_the_kernel_is_asked_and_is_reserved_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut books = Books::open(Some(&path)).unwrap();
        let id = SaId {
            spi: 0xc000_0001,
            dst: "192.0.2.1".parse().unwrap(),
        };

        assert!(books.reserve(id));
        assert!(!books.reserve(id));

        let left = Journal::read(&ledger_here(&path)).unwrap();
        assert_eq!(left, [Record::Sa(id)].into());
        // Another one that a crash has left is not handed out either.
        let left = SaId {
            spi: 0xc000_0002,
            ..id
        };
        books.record(Record::Sa(left));
        assert!(!books.reserve(left));
    }
}
