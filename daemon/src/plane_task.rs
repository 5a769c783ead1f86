// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The task that applies operations to the data plane: in order, and as many at a time as wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use swanherd_ike::api::{PlaneAnswer, Token};
use swanherd_ipsec::plane::{Op, PolicyAction, PolicySet, SaCounters, SaId};
use swanherd_kernel::DataPlane;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Operations that may wait for the data plane; beyond it they fail as a busy kernel would.
const QUEUE: usize = 65_536;
/// Operations that are handed over together. More would keep those who wait for an early one
/// waiting for the late ones.
const BATCH: usize = 256;
/// So many counters or fewer are asked for one by one.
const FEW: usize = 8;
/// How many SAs in a dump cost as much as asking for one.
const DUMPED_AS_CHEAPLY: usize = 16;

/// One operation was applied or refused.
#[derive(Debug)]
pub(crate) struct Applied {
    /// Which.
    pub(crate) token: Token,
    /// How it went.
    pub(crate) answer: PlaneAnswer,
    /// The last counters of an SA that was removed, so that totals lose nothing to a rekey.
    pub(crate) last: Option<(SaId, SaCounters)>,
    /// What became of traps and shunts.
    pub(crate) standing: Option<Standing>,
}

/// A change of the policies that stand without an SA: traps and shunts.
#[derive(Debug)]
pub(crate) enum Standing {
    /// This trap or shunt is in force.
    Installed(Box<PolicySet>),
    /// Whatever had this id is in force no more.
    Removed(u32),
}

/// Starts the task. It ends after the sender that is returned was dropped and what waits has been
/// applied; `answer` is called for each operation, in order.
pub(crate) fn spawn<P: DataPlane + 'static>(
    plane: Arc<P>,
    answer: impl Fn(Applied) + Send + 'static,
) -> (mpsc::Sender<(Token, Op)>, JoinHandle<()>) {
    let (sender, mut queue) = mpsc::channel::<(Token, Op)>(QUEUE);
    let mut books = PlaneTask {
        plane,
        installed: BTreeSet::new(),
    };
    let task = tokio::spawn(async move {
        let mut batch = Vec::with_capacity(BATCH);
        while queue.recv_many(&mut batch, BATCH).await > 0 {
            // Counters are read before the first removal of a row of them. An installation in
            // between ends the row, so that they are not read long before the removal.
            let mut rest = std::mem::take(&mut batch);
            while let Some((_, first)) = rest.first() {
                let removes = removes(first);
                let end = rest
                    .iter()
                    .position(|(_, op)| self::removes(op) != removes)
                    .unwrap_or(rest.len());
                let later = rest.split_off(end);
                for applied in books.apply(std::mem::replace(&mut rest, later)).await {
                    answer(applied);
                }
            }
            batch = rest;
        }
    });
    (sender, task)
}

fn removes(op: &Op) -> bool {
    matches!(
        op,
        Op::RemoveSa(_) | Op::RemovePolicies(_) | Op::RemoveAddress(_)
    )
}

struct PlaneTask<P> {
    plane: Arc<P>,
    /// The SAs that are there, to tell them from mere reservations and to know how many a dump has.
    installed: BTreeSet<SaId>,
}

impl<P: DataPlane> PlaneTask<P> {
    /// Applies operations that all remove something, or none of which does.
    async fn apply(&mut self, batch: Vec<(Token, Op)>) -> Vec<Applied> {
        let (tokens, ops): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let leaving: Vec<SaId> = ops
            .iter()
            .filter_map(|op| match op {
                Op::RemoveSa(id) => self.installed.contains(id).then_some(*id),
                _ => None,
            })
            .collect();
        let mut last = self.counters_of(&leaving).await;
        let notes: Vec<Note> = ops.iter().map(Note::of).collect();
        let answers = self.plane.apply_all(ops).await;
        let noted = tokens.into_iter().zip(notes).zip(answers);
        noted
            .map(|((token, note), answer)| {
                let mut applied = Applied {
                    token,
                    answer,
                    last: None,
                    standing: None,
                };
                if let Note::RemoveSa(id) = note {
                    applied.last = last.remove(&id).map(|counters| (id, counters));
                }
                if applied.answer.is_ok() {
                    applied.standing = self.note(note);
                }
                applied
            })
            .collect()
    }

    fn note(&mut self, note: Note) -> Option<Standing> {
        match note {
            Note::Nothing => {}
            Note::InstallSa(id) => {
                self.installed.insert(id);
            }
            Note::UpdateSa(from, to) => {
                if self.installed.remove(&from) {
                    self.installed.insert(to);
                }
            }
            Note::RemoveSa(id) => {
                self.installed.remove(&id);
            }
            Note::Standing(standing) => return Some(standing),
        }
        None
    }

    /// Counters of SAs that are about to be removed: of each, or of all at once if they are a good
    /// part of those that are there.
    async fn counters_of(&self, ids: &[SaId]) -> BTreeMap<SaId, SaCounters> {
        let many =
            ids.len() > FEW && ids.len().saturating_mul(DUMPED_AS_CHEAPLY) >= self.installed.len();
        if many && let Ok(dump) = self.plane.counters().await {
            return dump;
        }
        let mut found = BTreeMap::new();
        for id in ids {
            if let Some(counters) = self.plane.counters_of(*id).await {
                found.insert(*id, counters);
            }
        }
        found
    }
}

/// What of an operation is remembered until it is answered.
enum Note {
    Nothing,
    InstallSa(SaId),
    UpdateSa(SaId, SaId),
    RemoveSa(SaId),
    Standing(Standing),
}

impl Note {
    fn of(op: &Op) -> Self {
        match op {
            Op::InstallSa(entry) => Self::InstallSa(entry.id()),
            Op::UpdateSa { id, dst, .. } => Self::UpdateSa(
                *id,
                SaId {
                    spi: id.spi,
                    dst: *dst,
                },
            ),
            Op::RemoveSa(id) => Self::RemoveSa(*id),
            Op::InstallPolicies(set) => {
                let stands = set.trap || !matches!(set.action, PolicyAction::Protect { .. });
                Self::Standing(match stands {
                    true => Standing::Installed(set.clone()),
                    // The id may have been a trap's.
                    false => Standing::Removed(set.id),
                })
            }
            Op::RemovePolicies(id) => Self::Standing(Standing::Removed(*id)),
            Op::AllocSpi { .. } | Op::AddAddress { .. } | Op::RemoveAddress(_) => Self::Nothing,
        }
    }
}

#[cfg(test)]
mod tests;
