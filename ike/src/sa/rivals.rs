// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several IKE SAs with one pair of identities: which of them may be, and whether two hosts fight
//! for an identity that both claim.
//!
//! A peer that restarts, or moves, has one IKE SA too many for a moment, and the new one replaces
//! the old one. Two hosts with one identity replace each other for ever. What tells them apart is
//! that a host which was replaced is still there: it answers when its IKE SA is deleted. When that
//! has happened twice in a short time, nobody replaces a live holder any more.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use swanherd_config::identity::display_identity;
use swanherd_config::model::{Connection, Unique};
use swanherd_ipsec::Identity;

use super::IkeSa;
use super::auth::AuthFailure;
use super::env::{Env, Request};
use crate::api::{Event, FailureReason, IkeSaId, LogGroup, Now};

/// How many replaced holders that were alive make a conflict.
const PROOFS: usize = 2;
/// Within which time.
const WINDOW: Duration = Duration::from_secs(600);
/// How long a conflict is remembered after it was last seen.
const MEMORY: Duration = Duration::from_secs(600);

/// This side's identity and the peer's.
pub(crate) type Key = (Identity, Identity);

/// An established IKE SA.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    /// Where the peer is.
    pub(crate) remote: SocketAddr,
    /// Connection.
    pub(crate) connection: String,
}

/// All established IKE SAs, by identities.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Rivals {
    holders: BTreeMap<Key, BTreeMap<IkeSaId, Holder>>,
    contests: BTreeMap<Key, Contest>,
}

/// A contest for an identity.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Contest {
    /// When holders were replaced that were alive.
    proofs: VecDeque<Instant>,
    /// The conflict is over then, unless it is seen again.
    until: Option<Instant>,
}

impl Rivals {
    /// An IKE SA is established, or its peer has moved.
    pub(crate) fn hold(&mut self, key: Key, id: IkeSaId, holder: Holder) {
        self.holders.entry(key).or_default().insert(id, holder);
    }

    /// An IKE SA is gone.
    pub(crate) fn release(&mut self, key: &Key, id: IkeSaId) {
        if let Some(holders) = self.holders.get_mut(key) {
            holders.remove(&id);
            if holders.is_empty() {
                self.holders.remove(key);
            }
        }
    }

    /// The IKE SAs with these identities, but for `id`.
    pub(crate) fn others(
        &self,
        key: &Key,
        id: IkeSaId,
    ) -> impl Iterator<Item = (IkeSaId, &Holder)> {
        let holders = self.holders.get(key).into_iter().flatten();
        holders
            .filter(move |(other, _)| **other != id)
            .map(|(other, holder)| (*other, holder))
    }

    /// Whether two hosts are known to fight for an identity.
    fn is_contested(&self, key: &Key, now: Instant) -> bool {
        let until = self.contests.get(key).and_then(|contest| contest.until);
        until.is_some_and(|until| now < until)
    }

    /// The conflict is still there.
    fn seen(&mut self, key: &Key, now: Instant) {
        if let Some(contest) = self.contests.get_mut(key) {
            contest.until = Some(now + MEMORY);
        }
    }

    /// A holder was replaced, and was alive. True if that shows a conflict which was not known.
    fn proved(&mut self, key: Key, now: Instant) -> bool {
        let recent = |at: Instant| now.saturating_duration_since(at) < WINDOW;
        self.contests.retain(|_, contest| {
            contest.until.is_some_and(|until| now < until)
                || contest.proofs.back().is_some_and(|at| recent(*at))
        });
        let contest = self.contests.entry(key).or_default();
        contest.proofs.retain(|at| recent(*at));
        contest.proofs.push_back(now);
        if contest.proofs.len() < PROOFS {
            return false;
        }
        contest.proofs.clear();
        contest.until.replace(now + MEMORY).is_none()
    }
}

impl IkeSa {
    /// Own and peer's identity.
    pub(crate) fn identities(&self) -> Key {
        (self.local_id.clone(), self.remote_id.clone())
    }

    /// Notes where the peer of an established IKE SA is.
    pub(crate) fn hold_identity(&self, env: &mut Env) {
        if self.established.is_some()
            && let Some(conn) = &self.conn
        {
            let holder = Holder {
                remote: self.remote,
                connection: conn.name.clone(),
            };
            env.rivals.hold(self.identities(), self.id, holder);
        }
    }

    /// Whether a peer that has authenticated itself may have another IKE SA beside those that it
    /// has, or in their place.
    ///
    /// # Errors
    /// If the connection's policy, or a conflict of two hosts, is against it.
    pub(super) fn admit_rival(
        &self,
        env: &mut Env,
        now: Now,
        conn: &Connection,
        initial_contact: bool,
    ) -> Result<(), AuthFailure> {
        let key = self.identities();
        let elsewhere = env
            .rivals
            .others(&key, self.id)
            .find(|(_, holder)| holder.remote != self.remote)
            .map(|(id, holder)| (id, holder.remote));
        // One from the same place is about to take over from itself.
        let Some((holder, remote)) = elsewhere else {
            return Ok(());
        };
        if conn.unique != Unique::Never && env.rivals.is_contested(&key, now.instant) {
            env.rivals.seen(&key, now.instant);
            env.request(Request::Probe(holder));
            return Err((
                FailureReason::IdentityConflict,
                conflict(&self.remote_id, remote, self.remote),
            ));
        }
        if conn.unique == Unique::Keep && !initial_contact {
            env.event(Event::Alert {
                kind: "unique-keep",
                sa: Some(Box::new(self.info_without_children())),
            });
            let text = "another IKE_SA with the same peer is kept instead".to_owned();
            return Err((FailureReason::LocalDeleted, text));
        }
        Ok(())
    }

    /// The peer of an IKE SA that was replaced by one from elsewhere has answered.
    pub(super) fn is_alive_after_all(&mut self, env: &mut Env, now: Now) {
        let Some(rival) = self.dispossessed_by.take() else {
            return;
        };
        if !env.rivals.proved(self.identities(), now.instant) {
            return;
        }
        let text = conflict(&self.remote_id, rival, self.remote);
        self.log(env, LogGroup::Cfg, 0, text.clone());
        env.event(Event::Alert {
            kind: "identity-conflict",
            sa: Some(Box::new(self.info_without_children())),
        });
        let reason = FailureReason::IdentityConflict;
        env.count(self.connection_name(), crate::api::Counter::Failure(reason));
        env.event(Event::Failure {
            connection: self.connection_name(),
            child: None,
            reason,
            text,
        });
    }
}

fn conflict(id: &Identity, holder: SocketAddr, other: SocketAddr) -> String {
    format!(
        "two hosts claim to be {}: {holder} is kept for as long as it lives, {other} is not",
        display_identity(id)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_live_holders_that_were_replaced_within_minutes_are_a_conflict() {
        #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let key = || (Identity::any(), Identity::any());
        let mut rivals = Rivals::default();

        assert!(!rivals.proved(key(), at(0)));
        // Too long ago to belong together.
        assert!(!rivals.proved(key(), at(700)));
        assert!(!rivals.is_contested(&key(), at(700)));
        assert!(rivals.proved(key(), at(800)));
        assert!(rivals.is_contested(&key(), at(1_399)));
        rivals.seen(&key(), at(1_399));
        assert!(rivals.is_contested(&key(), at(1_500)));
        assert!(!rivals.is_contested(&key(), at(2_000)));
    }
}
