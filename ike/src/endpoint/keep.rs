// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeping children up: new attempts with back-off, for as long as the configuration wants them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Endpoint;
use super::command::Started;
use super::traps::is_negotiated;
use crate::api::{Event, LogGroup, Now};
#[cfg(test)]
use crate::sa::view::View;

/// The first wait between attempts; it doubles with each.
const FIRST_BACKOFF: Duration = Duration::from_secs(5);
/// The longest wait between attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// A child that was up for less is as good as one that did not come up.
const STABLE: Duration = Duration::from_secs(60);
/// How long the network is given to settle after a change.
const NETWORK_SETTLES: Duration = Duration::from_millis(500);
/// How often changes of the network are looked at, however many there are.
const NETWORK_INTERVAL: Duration = Duration::from_secs(2);

/// Children that are to be brought up again.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Keep {
    /// By connection and child.
    attempts: BTreeMap<String, BTreeMap<String, Attempt>>,
    /// When they are due.
    due: BTreeSet<(Instant, String, String)>,
    /// Consecutive failures by connection, for the choice of the next address.
    turns: BTreeMap<String, u32>,
    /// When to see what a change of the network means.
    network_at: Option<Instant>,
    /// When that was last seen to.
    network_seen: Option<Instant>,
    /// What the world has not been told yet of the next attempts.
    news: Vec<Event>,
}

/// One child that was lost, or could not be brought up.
#[derive(Clone, Copy, Debug, Default)]
struct Attempt {
    /// When the next attempt is due.
    at: Option<Instant>,
    failures: u32,
    /// The last one failed because no way led to the peer.
    unreachable: bool,
    /// Since when it is up again.
    up: Option<Instant>,
}

/// Why an attempt is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The child was lost.
    Lost,
    /// Its lifetime was over.
    Expired,
    /// An attempt failed.
    Failed,
    /// An attempt failed before anybody was called.
    Unreachable,
}

impl Keep {
    /// When the next attempt is due.
    pub(super) fn next(&self) -> Option<Instant> {
        let due = self.due.first().map(|(at, _, _)| *at);
        [due, self.network_at].into_iter().flatten().min()
    }

    /// Everything that decides what is brought up next.
    #[cfg(test)]
    pub(super) fn view(&self, out: &mut View) {
        for (at, connection, child) in &self.due {
            out.at(Some(*at));
            out.text(connection);
            out.text(child);
        }
        for (connection, children) in &self.attempts {
            out.text(connection);
            for (child, attempt) in children {
                out.text(child);
                out.at(attempt.at);
                out.word(attempt.failures);
                out.word(attempt.unreachable);
                out.word(attempt.up.is_some());
            }
        }
        out.at(self.network_at);
    }

    /// Which address of a connection is next.
    pub(super) fn attempt(&self, connection: &str) -> u32 {
        self.turns.get(connection).copied().unwrap_or(0)
    }

    /// No attempt is to be made any more.
    pub(super) fn clear(&mut self) {
        let connections: Vec<String> = self.attempts.keys().cloned().collect();
        for connection in connections {
            self.forget(&connection, None);
        }
        self.network_at = None;
    }

    /// As [`Self::clear`], for one connection, or one child of it.
    pub(super) fn forget(&mut self, connection: &str, child: Option<&str>) {
        let children: Vec<String> = match child {
            Some(child) => vec![child.to_owned()],
            None => {
                let children = self.attempts.get(connection);
                children
                    .into_iter()
                    .flatten()
                    .map(|c| c.0.clone())
                    .collect()
            }
        };
        for child in children {
            self.unplan(connection, &child);
            if let Some(children) = self.attempts.get_mut(connection) {
                children.remove(&child);
                if children.is_empty() {
                    self.attempts.remove(connection);
                }
            }
        }
    }

    /// A child is up. What came before is remembered, in case it does not stay so.
    pub(super) fn succeeded(&mut self, connection: &str, child: &str, now: Instant) {
        self.unplan(connection, child);
        if let Some(attempt) = self.get_mut(connection, child) {
            attempt.up.get_or_insert(now);
            attempt.unreachable = false;
        }
    }

    /// Whether a child is to be brought up again, and is not up yet.
    pub(super) fn wants(&self, connection: &str, child: &str) -> bool {
        self.last(connection, child)
            .is_some_and(|attempt| attempt.up.is_none())
    }

    /// Children of `connection` that wait for their next attempt.
    pub(super) fn waiting(&self, connection: &str) -> Vec<String> {
        let children = self.attempts.get(connection).into_iter().flatten();
        children
            .filter(|(_, attempt)| attempt.at.is_some())
            .map(|(child, _)| child.clone())
            .collect()
    }

    /// An IKE SA of a connection could not be set up at the address whose turn it was.
    pub(super) fn turn(&mut self, connection: &str, tried: u32) {
        self.turns
            .insert(connection.to_owned(), tried.wrapping_add(1));
    }

    /// Addresses or routes have changed. Changes come in crowds, and are looked at together.
    pub(super) fn network_changed(&mut self, now: Instant) {
        let again = self.network_seen.map(|seen| seen + NETWORK_INTERVAL);
        let due = (now + NETWORK_SETTLES).max(again.unwrap_or(now));
        self.network_at.get_or_insert(due);
    }

    /// What the world is to be told.
    pub(super) fn news(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.news)
    }

    fn network_is_due(&mut self, now: Instant) -> bool {
        let due = self.network_at.is_some_and(|at| at <= now);
        if due {
            self.network_at = None;
            self.network_seen = Some(now);
        }
        due
    }

    /// What waits for a way to its peer need not wait any longer.
    fn wake_unreachable(&mut self, now: Instant) {
        let waiting: Vec<(String, String, Attempt)> = self
            .attempts
            .iter()
            .flat_map(|(connection, children)| {
                children
                    .iter()
                    .filter(|(_, attempt)| {
                        attempt.unreachable && attempt.at.is_some_and(|at| at > now)
                    })
                    .map(|(child, attempt)| (connection.clone(), child.clone(), *attempt))
            })
            .collect();
        for (connection, child, attempt) in waiting {
            self.plan(&connection, &child, now, attempt);
        }
    }

    fn last(&self, connection: &str, child: &str) -> Option<Attempt> {
        self.attempts.get(connection)?.get(child).copied()
    }

    fn get_mut(&mut self, connection: &str, child: &str) -> Option<&mut Attempt> {
        self.attempts.get_mut(connection)?.get_mut(child)
    }

    fn plan(&mut self, connection: &str, child: &str, at: Instant, attempt: Attempt) {
        let before = self.last(connection, child).and_then(|attempt| attempt.at);
        if let Some(before) = before {
            self.due
                .remove(&(before, connection.to_owned(), child.to_owned()));
        }
        self.due
            .insert((at, connection.to_owned(), child.to_owned()));
        let attempt = Attempt {
            at: Some(at),
            up: None,
            ..attempt
        };
        self.attempts
            .entry(connection.to_owned())
            .or_default()
            .insert(child.to_owned(), attempt);
        self.tell(connection, child, Some(at));
    }

    /// No attempt is planned any more: one is made now, or needs not be made.
    pub(super) fn unplan(&mut self, connection: &str, child: &str) {
        let planned = self
            .get_mut(connection, child)
            .and_then(|attempt| attempt.at.take());
        if let Some(at) = planned {
            self.due
                .remove(&(at, connection.to_owned(), child.to_owned()));
            self.tell(connection, child, None);
        }
    }

    fn tell(&mut self, connection: &str, child: &str, at: Option<Instant>) {
        self.news.push(Event::NextAttempt {
            connection: connection.to_owned(),
            child: child.to_owned(),
            at,
        });
    }

    /// The next attempt that is due; it stays on record until it succeeds or is forgotten.
    fn take_due(&mut self, now: Instant) -> Option<(String, String)> {
        let (_, connection, child) = self.due.first().filter(|(at, _, _)| *at <= now)?.clone();
        self.unplan(&connection, &child);
        Some((connection, child))
    }
}

impl Endpoint {
    /// Plans another attempt to bring up a child, if the configuration wants it up: because
    /// `insist`, because of its start action, or because it has been planned before and has not
    /// succeeded. `after` lets something else happen first.
    pub(super) fn plan_restart(
        &mut self,
        now: Now,
        connection: &str,
        child: &str,
        after: Duration,
        cause: Cause,
        insist: bool,
    ) {
        if self.stopping {
            return;
        }
        let found = self.env.connections.get(connection).and_then(|conn| {
            let mut children = conn.children.iter();
            children.find(|c| c.name == child && is_negotiated(c))
        });
        let Some(cfg) = found else {
            return;
        };
        if !(insist || cfg.start_action.start || self.keep.wants(connection, child)) {
            return;
        }
        let last = self.keep.last(connection, child).unwrap_or_default();
        let failed = match (cause, last.up) {
            (Cause::Failed | Cause::Unreachable, _) => true,
            (Cause::Lost, Some(up)) => now.instant.saturating_duration_since(up) < STABLE,
            (Cause::Expired, _) | (Cause::Lost, None) => false,
        };
        let lasted = last.up.is_some() && !failed;
        let before = if lasted { 0 } else { last.failures };
        let failures = before.saturating_add(u32::from(failed));
        let backoff = if failed {
            FIRST_BACKOFF
                .saturating_mul(1 << (failures - 1).min(10))
                .min(MAX_BACKOFF)
        } else {
            Duration::ZERO
        };
        let millis = u64::try_from(backoff.as_millis()).unwrap_or(u64::MAX);
        let jitter = Duration::from_millis(self.env.rng.below(millis / 5 + 1));
        let wait = after + backoff + jitter;
        if failed {
            self.env.log(
                LogGroup::Ike,
                1,
                format!(
                    "next attempt to establish {connection}/{child} in {} s",
                    wait.as_secs()
                ),
            );
        }
        let attempt = Attempt {
            failures,
            unreachable: cause == Cause::Unreachable,
            ..Attempt::default()
        };
        self.keep
            .plan(connection, child, now.instant + wait, attempt);
    }

    /// Makes the attempts that are due.
    pub(super) fn serve_keep(&mut self, now: Now) {
        if self.keep.network_is_due(now.instant) {
            self.review_traps(now);
            self.review_paths(now);
            self.keep.wake_unreachable(now.instant);
        }
        while let Some((connection, child)) = self.keep.take_due(now.instant) {
            self.bring_up(now, &connection, &child);
        }
    }

    /// Brings up a child unless it is up or on its way.
    pub(super) fn bring_up(&mut self, now: Now, connection: &str, child: &str) {
        let Some(conn) = self.env.connections.get(connection).cloned() else {
            return;
        };
        // Even where IKE SAs are not shared, one child is enough.
        let there = self.of_connection(connection).into_iter().any(|id| {
            self.sas.get(&id).is_some_and(|sa| {
                !sa.dead && (super::has_child(sa, child) || super::is_making_child(sa, child))
            })
        });
        if there && !self.env.settings.reuse_ikesa {
            return;
        }
        match self.start(now, &conn, Some(child)) {
            Started::On(_) => {}
            Started::Already => self.keep.succeeded(connection, child, now.instant),
            Started::Refused => self.keep.forget(connection, Some(child)),
        }
    }
}
