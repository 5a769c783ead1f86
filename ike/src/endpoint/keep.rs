// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeping children up: new attempts with back-off.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Endpoint;
use super::command::Started;
use super::traps::is_negotiated;
use crate::api::{LogGroup, Now};

/// The first wait between attempts; it doubles with each.
const FIRST_BACKOFF: Duration = Duration::from_secs(5);
/// The longest wait between attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// How long the network is given to settle after a change.
const NETWORK_SETTLES: Duration = Duration::from_millis(500);
/// How often changes of the network are looked at, however many there are.
const NETWORK_INTERVAL: Duration = Duration::from_secs(2);

/// Children that are to be brought up again.
#[derive(Debug, Default)]
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
}

#[derive(Clone, Copy, Debug, Default)]
struct Attempt {
    at: Option<Instant>,
    failures: u32,
    /// How many of the failures count for `keyingtries`: those where a peer was called.
    tries: u32,
    /// The last one failed because no way led to the peer.
    unreachable: bool,
}

/// Why an attempt is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The child was lost.
    Lost,
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

    /// Which address of a connection is next.
    pub(super) fn attempt(&self, connection: &str) -> u32 {
        self.turns.get(connection).copied().unwrap_or(0)
    }

    /// No attempt is to be made any more.
    pub(super) fn clear(&mut self) {
        self.attempts.clear();
        self.due.clear();
        self.network_at = None;
    }

    /// As [`Self::clear`], for one connection, or one child of it.
    pub(super) fn forget(&mut self, connection: &str, child: Option<&str>) {
        match child {
            Some(child) => self.succeeded(connection, child),
            None => {
                for (child, attempt) in self.attempts.remove(connection).unwrap_or_default() {
                    if let Some(at) = attempt.at {
                        self.due.remove(&(at, connection.to_owned(), child));
                    }
                }
            }
        }
    }

    /// A child is up.
    pub(super) fn succeeded(&mut self, connection: &str, child: &str) {
        let Some(children) = self.attempts.get_mut(connection) else {
            return;
        };
        if let Some(Attempt { at: Some(at), .. }) = children.remove(child) {
            self.due
                .remove(&(at, connection.to_owned(), child.to_owned()));
        }
        if children.is_empty() {
            self.attempts.remove(connection);
        }
    }

    /// An IKE SA of a connection could not be set up.
    pub(super) fn turn(&mut self, connection: &str) {
        let turn = self.turns.entry(connection.to_owned()).or_default();
        *turn = turn.wrapping_add(1);
    }

    /// Addresses or routes have changed. Changes come in crowds, and are looked at together.
    pub(super) fn network_changed(&mut self, now: Instant) {
        let again = self.network_seen.map(|seen| seen + NETWORK_INTERVAL);
        let due = (now + NETWORK_SETTLES).max(again.unwrap_or(now));
        self.network_at.get_or_insert(due);
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
        for (connection, children) in &mut self.attempts {
            for (child, attempt) in children {
                if let Some(at) = attempt.at.filter(|at| attempt.unreachable && *at > now) {
                    let key = (at, connection.clone(), child.clone());
                    self.due.remove(&key);
                    self.due.insert((now, key.1, key.2));
                    attempt.at = Some(now);
                }
            }
        }
    }

    fn last(&self, connection: &str, child: &str) -> Attempt {
        self.attempts
            .get(connection)
            .and_then(|children| children.get(child))
            .copied()
            .unwrap_or_default()
    }

    fn plan(&mut self, connection: &str, child: &str, at: Instant, attempt: Attempt) {
        self.succeeded(connection, child);
        let at_key = (at, connection.to_owned(), child.to_owned());
        self.due.insert(at_key);
        let attempt = Attempt {
            at: Some(at),
            ..attempt
        };
        self.attempts
            .entry(connection.to_owned())
            .or_default()
            .insert(child.to_owned(), attempt);
    }

    /// The next attempt that is due; it stays on record until it succeeds or is forgotten.
    fn take_due(&mut self, now: Instant) -> Option<(String, String)> {
        let first = self.due.first().filter(|(at, _, _)| *at <= now)?.clone();
        self.due.remove(&first);
        let (_, connection, child) = first;
        if let Some(attempt) = self
            .attempts
            .get_mut(&connection)
            .and_then(|children| children.get_mut(&child))
        {
            attempt.at = None;
        }
        Some((connection, child))
    }
}

impl Endpoint {
    /// Plans another attempt to bring up a child.
    pub(super) fn plan_restart(
        &mut self,
        now: Now,
        connection: &str,
        child: &str,
        after: Duration,
        cause: Cause,
    ) {
        if self.stopping {
            return;
        }
        let Some(conn) = self.env.connections.get(connection).cloned() else {
            return;
        };
        if !conn
            .children
            .iter()
            .any(|c| c.name == child && is_negotiated(c))
        {
            return;
        }
        let last = self.keep.last(connection, child);
        let failures = last.failures + u32::from(cause != Cause::Lost);
        let tries = last.tries + u32::from(cause == Cause::Failed);
        if cause == Cause::Failed && conn.keyingtries != 0 && tries >= conn.keyingtries {
            self.keep.forget(connection, Some(child));
            self.env.log(
                LogGroup::Ike,
                0,
                format!("giving up on {connection}/{child} after {tries} attempts (keyingtries)"),
            );
            return;
        }
        let backoff = if failures == 0 {
            Duration::ZERO
        } else {
            FIRST_BACKOFF
                .saturating_mul(1 << (failures - 1).min(10))
                .min(MAX_BACKOFF)
        };
        let millis = u64::try_from(backoff.as_millis()).unwrap_or(u64::MAX);
        let jitter = Duration::from_millis(self.env.rng.below(millis / 5 + 1));
        let wait = after + backoff + jitter;
        if failures > 0 {
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
            at: None,
            failures,
            tries,
            unreachable: cause == Cause::Unreachable,
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
            Started::Already | Started::Refused => self.keep.succeeded(connection, child),
        }
    }
}
