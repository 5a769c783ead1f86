// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two IKE SAs where one is meant, because both sides have set one up at once. Both sides choose
//! the same to stay, by its SPIs; the other's children are made on it before that goes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use swanherd_config::model::Unique;

use super::{Endpoint, has_child};
use crate::api::{IkeSaId, IkeState, LogGroup, Now};
use crate::sa::{IkeSa, Task};

/// How long the side that has initiated the redundant IKE SA waits before it gives it up: what both
/// sides have begun comes to its end first, and a peer with a policy of its own has carried it out.
const OWN: Duration = Duration::from_secs(2);
/// How long the other side waits for that.
const PEERS: Duration = Duration::from_secs(10);

/// Redundant IKE SAs.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Twins {
    /// When to give up which, for which.
    due: BTreeSet<(Instant, IkeSaId, IkeSaId)>,
}

impl Twins {
    /// When the next one is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _, _)| *at)
    }

    /// An IKE SA is gone, and another one has taken its place.
    pub(super) fn follow(&mut self, old: IkeSaId, new: IkeSaId) {
        let present = |id| if id == old { new } else { id };
        let due = std::mem::take(&mut self.due).into_iter();
        self.due = due
            .map(|(at, redundant, kept)| (at, present(redundant), present(kept)))
            .collect();
    }
}

impl Endpoint {
    /// An IKE SA is established: is there another one that both sides set up at the same time?
    pub(super) fn look_for_twins(&mut self, now: Now, id: IkeSaId) {
        let Some(sa) = self.sas.get(&id) else {
            return;
        };
        let others: Vec<IkeSaId> = self
            .env
            .rivals
            .others(&sa.identities(), id)
            .map(|(other, _)| other)
            .collect();
        let mut prefer = Vec::new();
        for other in others {
            let Some(twin) = self.sas.get(&other).filter(|other| are_twins(sa, other)) else {
                continue;
            };
            let spis = |sa: &IkeSa| (sa.spi_i, sa.spi_r);
            let (redundant, kept) = if spis(sa) < spis(twin) {
                (sa, twin)
            } else {
                (twin, sa)
            };
            let wait = if redundant.initiator { OWN } else { PEERS };
            if kept.initiator {
                prefer.push(kept.id);
            }
            self.twins
                .due
                .insert((now.instant + wait, redundant.id, kept.id));
            let line = format!(
                "both sides have set up an IKE_SA at once; [{}] will be given up for [{}]",
                redundant.id, kept.id
            );
            self.env.log(LogGroup::Ike, 1, line);
        }
        for id in prefer {
            // The peer is about to give the other one up; packets are on the safe way by then.
            self.with(id, |sa, _| sa.delay(now, OWN / 2, Task::Prefer));
        }
    }

    /// Gives up the redundant IKE SAs whose time has come.
    pub(super) fn serve_twins(&mut self, now: Now) {
        while let Some(&due) = self.twins.due.first() {
            let (at, redundant, kept) = due;
            if at > now.instant {
                return;
            }
            self.twins.due.remove(&due);
            let current = |id: IkeSaId| self.sas.get(&id).and_then(|sa| sa.successor).unwrap_or(id);
            self.give_up(now, current(redundant), current(kept));
        }
    }

    fn give_up(&mut self, now: Now, redundant: IkeSaId, kept: IkeSaId) {
        let (Some(old), Some(new)) = (self.sas.get(&redundant), self.sas.get(&kept)) else {
            return;
        };
        let lasts = |sa: &IkeSa| sa.is_established() && !sa.is_leaving();
        if !lasts(old) || !lasts(new) {
            return;
        }
        if new.supersedes.is_some() {
            self.twins.due.insert((now.instant + OWN, redundant, kept));
            return;
        }
        // Where the peer has chosen otherwise, there is nothing left to choose.
        let Some(conn) = new.conn.clone() else {
            return;
        };
        let conn = self
            .env
            .connections
            .get(&conn.name)
            .cloned()
            .unwrap_or(conn);
        let missing: Vec<usize> = old
            .children
            .values()
            .filter(|child| child.is_lasting() && !child.taken_down)
            .map(|child| child.cfg().name.clone())
            .filter(|name| !has_child(new, name))
            .filter_map(|name| conn.children.iter().position(|child| child.name == name))
            .collect();
        let mut tasks = super::command::tasks(&conn, missing);
        self.with(redundant, |sa, _| {
            sa.replaced = true;
            let queued = std::mem::take(&mut sa.queue);
            let (makes, rest) = queued
                .into_iter()
                .partition(|task| matches!(task, Task::CreateChild { .. }));
            sa.queue = rest;
            tasks.extend(makes);
        });
        self.with(kept, |sa, env| {
            sa.supersedes = Some(redundant);
            sa.restores = true;
            for task in tasks {
                sa.enqueue(task);
            }
            // The peer's answer shows that it has what is put to use then.
            sa.enqueue(Task::Probe);
            sa.enqueue(Task::TakeOver);
            sa.proceed(env, now);
        });
    }
}

/// Whether two IKE SAs with the same identities are for the same purpose, and each side has set up
/// one while the other one was being set up.
pub(super) fn are_twins(a: &IkeSa, b: &IkeSa) -> bool {
    let (Some(conn), Some(other)) = (&a.conn, &b.conn) else {
        return false;
    };
    let overlap = |a: &IkeSa, b: &IkeSa| b.established.is_some_and(|end| a.created <= end);
    let states = [a.state, b.state];
    a.initiator != b.initiator
        && conn.name == other.name
        && conn.unique != Unique::Never
        && a.remote.ip() == b.remote.ip()
        && states
            .iter()
            .all(|state| matches!(state, IkeState::Established | IkeState::Rekeying))
        && overlap(a, b)
        && overlap(b, a)
}
