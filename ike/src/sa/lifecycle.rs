// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How an IKE SA becomes established, what its timers do, and how it ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::child::EXPIRED_LIMIT;
use super::env::{Env, Request};
use super::timers::Timer;
use super::{Active, IkeSa, Passive, Task};
use crate::api::{
    Action, ChildSaId, ChildState, ConnectionRef, Counter, Event, FailureReason, IkeState,
    LogGroup, Now, Transmit,
};
use crate::endpoint::keep::Cause;
use crate::wire::{ExchangeType, NotifyPayload, NotifyType, Payload};

/// How long after a failed reauthentication it is tried again.
const REAUTH_RETRY: Duration = Duration::from_secs(30);

/// How long a peer has to confirm that an IKE SA is deleted, beyond which nobody waits.
pub(crate) const DELETE_LIMIT: Duration = Duration::from_secs(10);
/// The same for one that another has replaced: nobody waits, but a peer that misses it keeps it.
pub(crate) const CLEANUP_LIMIT: Duration = Duration::from_secs(60);

impl IkeSa {
    /// Both sides are authenticated.
    pub(crate) fn establish(&mut self, env: &mut Env, now: Now) {
        self.set_established(env, now);
        self.mobility.leader = self.initiator;
        self.mobility.prove(self.remote.ip());
        let line = format!(
            "IKE_SA {}[{}] is established between {}[{}] and {}",
            self.connection_name().unwrap_or_default(),
            self.id,
            self.local.ip(),
            swanherd_config::identity::display_identity(&self.local_id),
            self.peer_text()
        );
        self.log(env, LogGroup::Ike, 0, line);
        self.announced = true;
        let sa = Box::new(self.info_without_children());
        env.event(Event::IkeUpDown { up: true, sa });
        env.request(Request::Established(self.id));
        self.changed(env);
    }

    /// Enters ESTABLISHED with all its timers, without telling.
    pub(crate) fn set_established(&mut self, env: &mut Env, now: Now) {
        self.state = IkeState::Established;
        self.established = Some(now.instant);
        self.last_inbound = now.instant;
        self.no_longer_half_open(env);
        env.half_open.authenticated(now.instant, self.remote.ip());
        self.timers.stop(Timer::HalfOpen);
        self.hold_identity(env);
        let Some(conn) = self.conn.clone() else {
            return;
        };
        // At most half of the time is left to chance, or it would be rekeyed all the time.
        let mut jittered = |time: Duration| {
            let range = conn.rand_time.min(time / 2);
            let range = u64::try_from(range.as_millis()).unwrap_or(u64::MAX);
            let jitter = Duration::from_millis(env.rng.below(range.saturating_add(1)));
            now.instant + time.saturating_sub(jitter).max(Duration::from_secs(1))
        };
        let rekey = (!conn.rekey_time.is_zero()).then(|| jittered(conn.rekey_time));
        // The initiator is to be first, which knows how to reach its peer.
        let late = (!self.initiator).then(|| conn.reauth_time + conn.over_time / 2);
        let reauth = (!conn.reauth_time.is_zero())
            .then(|| late.map_or_else(|| jittered(conn.reauth_time), |late| now.instant + late));
        let longest = match (conn.rekey_time, conn.reauth_time) {
            (a, b) if a.is_zero() => b,
            (a, b) if b.is_zero() => a,
            (a, b) => a.min(b),
        };
        self.timers.put(Timer::Rekey, rekey);
        self.timers.put(Timer::Reauth, reauth);
        let hard = (!longest.is_zero()).then(|| now.instant + longest + conn.over_time);
        self.timers.put(Timer::HardLifetime, hard);
        self.authenticate_by =
            (!conn.reauth_time.is_zero()).then(|| now.instant + conn.reauth_time + conn.over_time);
        if let Some(lifetime) = self.auth_lifetime {
            self.limit_authentication(env, now, lifetime);
        }
        let dpd = (!conn.dpd_delay.is_zero()).then(|| now.instant + conn.dpd_delay);
        self.timers.put(Timer::Dpd, dpd);
        self.arm_keepalive(env, now);
    }

    /// The responder wants to see this side's authentication again within `lifetime` (RFC 4478).
    pub(crate) fn limit_authentication(&mut self, env: &mut Env, now: Now, lifetime: Duration) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        // Early enough, but not so early that it would happen all the time.
        let margin = conn.over_time.min(lifetime / 4).max(lifetime / 20);
        let range = u64::try_from(margin.as_millis()).unwrap_or(u64::MAX);
        let jitter = Duration::from_millis(env.rng.below(range.saturating_add(1)) / 2);
        let due = now.instant + (lifetime - margin - jitter).max(Duration::from_secs(1));
        let planned = self.timers.get(Timer::Reauth);
        if planned.is_none_or(|planned| due < planned) {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!(
                    "the peer wants reauthentication within {} s, which is begun in {} s",
                    lifetime.as_secs(),
                    (due - now.instant).as_secs()
                ),
            );
            self.timers.set(Timer::Reauth, due);
        }
        let hard = now.instant + lifetime.max(Duration::from_secs(10));
        let earliest = |end: Option<Instant>| end.map_or(hard, |end| end.min(hard));
        self.authenticate_by = Some(earliest(self.authenticate_by));
        let end = self.timers.get(Timer::HardLifetime);
        self.timers.set(Timer::HardLifetime, earliest(end));
    }

    /// No longer counts as half open.
    pub(crate) fn no_longer_half_open(&mut self, env: &mut Env) {
        if std::mem::take(&mut self.half_open) {
            env.half_open.remove(self.remote.ip());
        }
    }

    /// Arms NAT keepalives if this side is behind a NAT (RFC 3948 section 4).
    pub(crate) fn arm_keepalive(&mut self, env: &Env, now: Now) {
        let due = (self.nat.local && !env.settings.keep_alive.is_zero())
            .then(|| now.instant + env.settings.keep_alive);
        self.timers.put(Timer::Keepalive, due);
    }

    /// Time has passed.
    pub(crate) fn handle_timeout(&mut self, env: &mut Env, now: Now) {
        if self.dead {
            return;
        }
        if self.timers.take_due(Timer::Delete, now.instant) {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("{} did not confirm the deletion in time", self.remote),
            );
            self.end(env, FailureReason::LocalDeleted, String::new());
            return;
        }
        if self.timers.take_due(Timer::HalfOpen, now.instant) {
            env.event(Event::Alert {
                kind: "half-open-timeout",
                sa: Some(Box::new(self.info_without_children())),
            });
            let text = format!("{} did not complete the handshake in time", self.remote);
            self.fail(env, now, FailureReason::Timeout, text);
            return;
        }
        if self.timers.take_due(Timer::HardLifetime, now.instant) {
            env.event(Event::Alert {
                kind: "ike-sa-expired",
                sa: Some(Box::new(self.info_without_children())),
            });
            self.expire(env, now);
            return;
        }
        if self.timers.take_due(Timer::Passive, now.instant) {
            self.abandon_request(env, now, "answering takes too long");
        }
        if self.timers.take_due(Timer::Retransmit, now.instant) {
            self.retransmit(env, now);
            if self.dead {
                return;
            }
        }
        if self.timers.take_due(Timer::Keepalive, now.instant) {
            self.keepalive(env, now);
        }
        if self.timers.take_due(Timer::Dpd, now.instant) {
            self.check_liveness(env, now);
        }
        if self.timers.take_due(Timer::Rekey, now.instant) && self.state == IkeState::Established {
            self.queue_task(env, now, Task::RekeyIke);
        }
        if self.timers.take_due(Timer::Reauth, now.instant) && self.state == IkeState::Established {
            self.queue_task(env, now, Task::ReauthIke);
        }
        if self.timers.take_due(Timer::Child, now.instant) {
            self.check_children(env, now);
        }
        if self.timers.take_due(Timer::Retry, now.instant) {
            self.serve_delayed(now);
        }
        self.proceed(env, now);
    }

    /// Deletes this IKE SA whatever else is under way; after `limit` nobody waits for the peer.
    pub(crate) fn delete_at_once(&mut self, env: &mut Env, now: Now, limit: Duration) {
        if self.dead {
            return;
        }
        if matches!(self.active, Active::DeletingIke) {
            // It may be under way with more time than that.
            let end = now.instant + limit;
            if self.timers.get(Timer::Delete).is_none_or(|at| at > end) {
                self.timers.set(Timer::Delete, end);
            }
            return;
        }
        self.cancel_active(env);
        // Or there would be a successor that nobody deletes.
        self.abandon_request(env, now, "the IKE_SA is being deleted");
        // That the peer deletes it may have waited for that answer.
        if self.dead {
            return;
        }
        self.start_ike_delete(env, now);
        self.bound_delete(now, limit);
    }

    /// The peer's identity has been claimed from elsewhere, by one who knows of no other IKE SA. The
    /// children go at once; whether their peer is still there is seen by its answer.
    pub(crate) fn dispossess(&mut self, env: &mut Env, now: Now, by: std::net::SocketAddr) {
        self.request_restarts(env, FailureReason::Replaced, None);
        self.cancel_active(env);
        self.cancel_passive(env);
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            self.close_child(env, id);
        }
        self.dispossessed_by = Some(by);
        self.delete_at_once(env, now, Duration::from_secs(15));
    }

    /// Sees whether the peer lives, unless it was heard just now.
    pub(crate) fn probe_if_quiet(&mut self, env: &mut Env, now: Now) {
        const RECENT: Duration = Duration::from_secs(10);
        if now.instant.saturating_duration_since(self.last_inbound) >= RECENT {
            self.queue_task(env, now, Task::Probe);
        }
    }

    /// Ends this IKE SA after `limit` at the latest.
    pub(crate) fn bound_delete(&mut self, now: Now, limit: Duration) {
        if !self.dead {
            self.timers.set(Timer::Delete, now.instant + limit);
        }
    }

    /// The data plane sees the peer's packets come from elsewhere.
    pub(crate) fn mapping_changed(
        &mut self,
        env: &mut Env,
        now: Now,
        remote: std::net::SocketAddr,
    ) {
        // Who is behind a NAT stays; see `learn_addresses`.
        let follows = self.nat.remote && !self.nat.local;
        if !follows || self.remote == remote || !self.is_established() {
            return;
        }
        self.log(
            env,
            LogGroup::Knl,
            1,
            format!(
                "the peer's NAT mapping changed from {} to {remote}",
                self.remote
            ),
        );
        self.relocate(env, now, self.local, remote);
        self.move_children(env);
    }

    /// The IKE SA that was to take over by reauthentication did not come to be.
    pub(crate) fn retry_reauth(&mut self, env: &mut Env, now: Now) {
        if self.state == IkeState::Established {
            self.log(
                env,
                LogGroup::Ike,
                0,
                "reauthentication failed, it is tried again",
            );
            // While the lifetime allows.
            let end = self.timers.get(Timer::HardLifetime);
            let left = end.map(|end| end.saturating_duration_since(now.instant) / 3);
            let wait = left.map_or(REAUTH_RETRY, |left| left.min(REAUTH_RETRY));
            self.timers.set(
                Timer::Reauth,
                now.instant + wait.max(Duration::from_secs(1)),
            );
        }
    }

    fn keepalive(&mut self, env: &mut Env, now: Now) {
        let interval = env.settings.keep_alive;
        let quiet = now.instant.saturating_duration_since(self.last_outbound);
        if quiet >= interval {
            self.last_outbound = now.instant;
            env.actions.push_back(Action::Transmit(Transmit {
                local: self.local,
                remote: self.remote,
                payload: vec![0xff],
                dscp: self.conn.as_ref().map_or(0, |conn| conn.dscp),
                keepalive: true,
            }));
        }
        let due = self.last_outbound + interval;
        self.timers.set(Timer::Keepalive, due);
    }

    fn check_liveness(&mut self, env: &mut Env, now: Now) {
        let Some(delay) = self.conn.as_ref().map(|conn| conn.dpd_delay) else {
            return;
        };
        if delay.is_zero() {
            return;
        }
        let quiet = now.instant.saturating_duration_since(self.last_inbound);
        let idle = matches!(self.active, Active::Idle) && self.queue.is_empty();
        if quiet < delay {
            self.timers.set(Timer::Dpd, self.last_inbound + delay);
        } else {
            // A request that is in flight shows as well as a probe whether the peer lives.
            if idle && self.is_established() {
                self.queue_task(env, now, Task::Probe);
            }
            self.timers.set(Timer::Dpd, now.instant + delay);
        }
    }

    /// What is due of the children.
    fn check_children(&mut self, env: &mut Env, now: Now) {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now.instant);
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            let Some(child) = self.children.get(&id) else {
                continue;
            };
            if due(child.remove_at) {
                self.remove_child(env, id);
                continue;
            }
            if due(child.use_at) {
                self.install_outbound(env, id);
                continue;
            }
            let live = matches!(
                child.state,
                ChildState::Installed | ChildState::Rekeying | ChildState::Rekeyed
            );
            if live && due(child.expires_at) {
                self.child_expired(env, now, id);
                continue;
            }
            let (check, rekey) = (
                due(child.check_at),
                child.state == ChildState::Installed && due(child.retry_at.or(child.rekey_at)),
            );
            if check {
                self.check_peer_deletes(env, now, id);
            }
            if rekey {
                self.rekey_child(env, now, id);
            }
            let idle = |child: &super::ChildSa| child.is_live() && due(child.idle.check_at);
            if self.children.get(&id).is_some_and(idle) {
                self.check_idleness(env, now, id);
            }
        }
        self.arm_children(now);
    }

    /// The peer should have deleted a child by now, but has not.
    fn check_peer_deletes(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let settling = self.rekey_of_is_open(id);
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.check_at = None;
        if matches!(child.state, ChildState::Deleting | ChildState::Deleted) {
            return;
        }
        if child.expired {
            child.check_at = Some(now.instant + EXPIRED_LIMIT);
        }
        if child.expired && settling {
            return;
        }
        // Nothing needs one any more that was replaced by what is gone itself.
        let orphan = child.state == ChildState::Rekeyed && child.replaced_by.is_none();
        child.expired |= orphan;
        if child.redundant || child.expired {
            self.queue_task(env, now, Task::DeleteChild(id));
            return;
        }
        // Either the peer keeps a replaced SA for as long as it lasts, or it never learned that
        // its rekeying had succeeded. Rekeying the successor shows which: a peer that has none
        // says so.
        if child.state == ChildState::Rekeyed
            && let Some(successor) = child.replaced_by
        {
            self.rekey_child(env, now, successor);
        }
    }

    /// The data plane has ended an SA of a child that reached a hard limit.
    pub(crate) fn sa_expired(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        sa: swanherd_ipsec::plane::SaId,
    ) {
        let outbound = self.children.get(&id).and_then(|child| child.outbound());
        if outbound == Some(sa) {
            self.unbind_policies(env, id);
        }
        self.child_expired(env, now, id);
    }

    /// A child reached the end of its lifetime.
    pub(crate) fn child_expired(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.expires_at = None;
        // Both of its SAs expire, and the time is up here as well.
        if child.expired || matches!(child.state, ChildState::Deleting | ChildState::Deleted) {
            return;
        }
        child.expired = true;
        child.check_at = Some(now.instant + EXPIRED_LIMIT);
        let (name, successor) = (child.cfg().name.clone(), child.replaced_by);
        self.log(
            env,
            LogGroup::Chd,
            1,
            format!("CHILD_SA {name}{{{id}}} has reached the end of its lifetime"),
        );
        // One that is replaced is deleted by the side whose turn it is, and one that is being
        // replaced once that is decided (RFC 7296 section 2.8.1).
        let settling = self.rekey_of_is_open(id);
        let successor = successor.or_else(|| self.rival_of(id));
        if let Some(successor) = successor {
            self.install_outbound(env, successor);
        }
        if settling || successor.is_some() {
            self.arm_children(now);
            return;
        }
        self.queue_task(env, now, Task::DeleteChild(id));
    }

    /// Whether either side's rekeying of a child is under way.
    pub(super) fn rekey_of_is_open(&self, id: ChildSaId) -> bool {
        let ours = matches!(&self.active, Active::CreatingChild(creating)
            if creating.negotiation().rekeys == Some(id));
        ours || self.answers_rekey_of(Some(id))
    }

    /// Somebody on this side wants a child down.
    pub(crate) fn take_down(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let Some(wanted) = self.children.get(&id) else {
            return;
        };
        let (conn, index) = (wanted.conn.name.clone(), wanted.index);
        for child in self.children.values_mut() {
            // What goes anyway must not bring it back.
            let leftover = child.redundant || child.replaced_by.is_some();
            let kin = child.conn.name == conn && child.index == index;
            child.taken_down |= child.id == id || (kin && leftover);
        }
        self.queue_task(env, now, Task::DeleteChild(id));
    }

    /// A child is to be rekeyed now, unless that is under way.
    pub(crate) fn rekey_child(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.rekey_at = None;
        child.retry_at = None;
        if child.state != ChildState::Installed || child.replaced_by.is_some() || child.redundant {
            return;
        }
        self.queue_task(env, now, Task::RekeyChild(id));
    }

    fn abandon_request(&mut self, env: &mut Env, now: Now, why: &str) {
        if self.inbound.processing.is_none() {
            return;
        }
        if matches!(self.passive, Passive::Leaving(_)) {
            // Packets may be lost if the data plane is that slow, but the peer's will is done.
            self.passive = Passive::Idle;
            self.confirm_ike_delete(env, now);
            return;
        }
        self.log(
            env,
            LogGroup::Job,
            1,
            format!("the peer's request is refused: {why}"),
        );
        self.cancel_passive(env);
        let notify = NotifyPayload::new(NotifyType::TemporaryFailure, Vec::new());
        self.refuse(env, now, notify);
        self.rival_answered(env, now);
        self.rival_child_answered(env, now);
    }

    /// Forgets what was being answered, and removes a child that was being made for it.
    pub(crate) fn cancel_passive(&mut self, env: &mut Env) {
        let child = match std::mem::replace(&mut self.passive, Passive::Idle) {
            Passive::Idle | Passive::Postponed(_) | Passive::Leaving(_) => None,
            Passive::Responding(state) => state.child(),
            Passive::CreatingChild(state) => state.child(),
            Passive::Rekeying(state) => {
                state.release(env);
                None
            }
        };
        if let Some(id) = child {
            self.close_child(env, id);
        }
    }

    /// Forgets the exchange under way.
    pub(crate) fn cancel_active(&mut self, env: &mut Env) {
        self.landed();
        let child = match std::mem::replace(&mut self.active, Active::Idle) {
            Active::Initiating(state) => state.child(),
            Active::CreatingChild(state) => state.child(),
            Active::Rekeying(state) => {
                state.release(env);
                None
            }
            _ => None,
        };
        if let Some(id) = child {
            self.close_child(env, id);
        }
    }

    /// The lifetime of the IKE SA is over.
    fn expire(&mut self, env: &mut Env, now: Now) {
        self.log(
            env,
            LogGroup::Ike,
            1,
            "IKE_SA has reached the end of its lifetime",
        );
        self.failure = Some((
            FailureReason::Expired,
            "the lifetime of the IKE_SA is over".to_owned(),
        ));
        let attempted = self.attempted();
        self.farewell(env, now);
        if let Some(((conn, index), _)) = attempted {
            let packet = None;
            self.enqueue(Task::CreateChild {
                conn,
                index,
                packet,
            });
        }
        let text = "the lifetime of the IKE_SA is over".to_owned();
        self.fail(env, now, FailureReason::Expired, text);
    }

    /// Tells the peer once that the IKE SA is deleted, without waiting for an answer.
    pub(crate) fn farewell(&mut self, env: &mut Env, now: Now) {
        if self.protection.is_none() || self.state == IkeState::Connecting {
            return;
        }
        self.cancel_active(env);
        let delete = Payload::Delete(crate::wire::DeletePayload::IkeSa);
        self.send_request(env, now, ExchangeType::Informational, &[delete]);
    }

    /// The peer does not answer.
    pub(crate) fn peer_timed_out(&mut self, env: &mut Env, now: Now, text: String) {
        if matches!(self.state, IkeState::Deleting | IkeState::Rekeyed) || self.redundant {
            self.end(env, FailureReason::LocalDeleted, text);
            return;
        }
        let tries = self.conn.as_ref().map_or(1, |conn| conn.keyingtries);
        let connecting = self.initiator && self.state == IkeState::Connecting;
        if connecting && (tries == 0 || self.tries + 1 < tries) {
            self.start_over(env, now, text);
            return;
        }
        self.fail(env, now, FailureReason::Timeout, text);
    }

    /// Another sequence of retransmissions (`keyingtries`), to the peer's next address.
    fn start_over(&mut self, env: &mut Env, now: Now, text: String) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("the peer does not answer, trying again: {text}"),
        );
        let reason = FailureReason::Timeout;
        env.count(Some(conn.name.clone()), Counter::Failure(reason));
        env.event(Event::Failure {
            connection: Some(conn.name.clone()),
            child: None,
            reason,
            text,
        });
        self.cancel_active(env);
        let first = self.first_child.take().map(|(conn, index, packet)| {
            let task = Task::CreateChild {
                conn,
                index,
                packet,
            };
            (task, self.queue.drain(..).collect::<Vec<_>>())
        });
        let tasks = match first {
            Some((first, rest)) => std::iter::once(first).chain(rest).collect(),
            None => self.queue.drain(..).collect(),
        };
        env.spis.remove(&self.spi_i);
        let mut fresh = Box::new(Self::new(self.id, true, self.local, self.remote, now));
        fresh.supersedes = self.supersedes.take();
        fresh.restores = self.restores;
        fresh.target = self.target;
        fresh.if_id = self.if_id;
        fresh.former_vips = std::mem::take(&mut self.former_vips);
        fresh.attempt = self.attempt.wrapping_add(1);
        fresh.tries = self.tries.saturating_add(1);
        *self = *fresh;
        self.initiate(env, now, &conn, tasks);
        self.changed(env);
    }

    /// Ends because something went wrong.
    pub(crate) fn fail(&mut self, env: &mut Env, _now: Now, reason: FailureReason, text: String) {
        if self.dead {
            return;
        }
        let what = if self.announced {
            "is lost"
        } else {
            "could not be established"
        };
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "IKE_SA {}[{}] with {} {what}: {text}",
                self.connection_name()
                    .unwrap_or_else(|| "(unnamed)".to_owned()),
                self.id,
                self.peer_text()
            ),
        );
        env.count(self.connection_name(), Counter::Failure(reason));
        env.event(Event::Failure {
            connection: self.connection_name(),
            child: None,
            reason,
            text: text.clone(),
        });
        self.end(env, reason, text);
    }

    /// Ends. Children go with it; what the configuration wants to happen then is set off.
    pub(crate) fn end(&mut self, env: &mut Env, reason: FailureReason, text: String) {
        if self.dead {
            return;
        }
        self.dead = true;
        let ends = matches!(
            reason,
            FailureReason::LocalDeleted | FailureReason::PeerDeleted
        );
        let reason = if self.replaced && ends {
            FailureReason::Replaced
        } else {
            reason
        };
        self.failure.get_or_insert((reason, text));
        self.no_longer_half_open(env);
        self.landed();
        self.timers.clear();
        let attempted = self.attempted();
        self.cancel_active(env);
        self.cancel_passive(env);
        if let Some(twin) = self.rekey_twin.take() {
            env.spis.remove(&twin.sa.own_spi());
        }
        self.request_restarts(env, reason, attempted);
        // A replaced IKE SA goes silently: its successor speaks for the children.
        if self.state != IkeState::Rekeyed && !self.redundant {
            let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
            for id in ids {
                self.tell_rekey(env, id);
            }
            self.state = IkeState::Deleting;
            let sa = Box::new(self.info_without_children());
            env.event(Event::IkeUpDown { up: false, sa });
        }
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            self.close_child(env, id);
        }
        self.remove_addresses(env);
        self.state = IkeState::Destroying;
        env.event(Event::Gone(self.id));
    }

    /// The child that is being made, and whether there was one.
    fn attempted(&self) -> Option<((ConnectionRef, usize), bool)> {
        let Active::CreatingChild(state) = &self.active else {
            return None;
        };
        // A rekeying is all there is of a child that the peer has deleted meanwhile.
        let there = |old: ChildSaId| self.children.contains_key(&old);
        if state.rekeys().is_some_and(there) {
            return None;
        }
        let child = self.children.get(&state.child()?)?;
        let place = (child.conn.clone(), child.index);
        (!child.taken_down).then_some((place, state.is_rekey()))
    }

    /// Asks for what `dpd_action`, `close_action` and `start_action` say about what is lost with the
    /// IKE SA, and what was to be made over it. `attempted` is the child that was being negotiated.
    fn request_restarts(
        &self,
        env: &mut Env,
        reason: FailureReason,
        attempted: Option<((ConnectionRef, usize), bool)>,
    ) {
        if self.state == IkeState::Rekeyed || self.redundant {
            return;
        }
        if reason == FailureReason::LocalDeleted {
            return;
        }
        // What was up, by connection and name; `false` if it was only on its way.
        let mut lost: BTreeMap<(String, usize), (ConnectionRef, bool)> = BTreeMap::new();
        for child in self.children.values() {
            // What has expired would have been replaced once the peer had agreed to its end.
            let ending = child.state == ChildState::Deleting && (child.expired || child.redundant);
            if (child.is_live() || ending) && !child.taken_down {
                let key = (child.conn.name.clone(), child.index);
                lost.insert(key, (child.conn.clone(), true));
            }
        }
        let wanted = self
            .wanted()
            .map(|(conn, index)| ((conn.clone(), index), false));
        for ((conn, index), had) in wanted.chain(attempted) {
            let key = (conn.name.clone(), index);
            lost.entry(key).or_insert((conn, had));
        }
        // Where both sides bring it up again, they should not do so at the same moment.
        let after = match reason {
            FailureReason::PeerDeleted if !self.initiator => 1_000 + env.rng.below(1_000),
            // The IKE SA that replaces it may bring the children along.
            FailureReason::Replaced => 2_000 + env.rng.below(1_000),
            _ => 0,
        };
        for ((connection, index), (conn, had)) in lost {
            let Some(cfg) = conn.children.get(index) else {
                continue;
            };
            let action = match reason {
                FailureReason::PeerDeleted => cfg.close_action,
                FailureReason::Replaced => swanherd_config::model::Action::default(),
                _ => cfg.dpd_action,
            };
            env.request(Request::Restart {
                connection: connection.clone(),
                child: cfg.name.clone(),
                after: Duration::from_millis(after),
                cause: match reason {
                    FailureReason::Expired => Cause::Expired,
                    _ if self.announced => Cause::Lost,
                    FailureReason::Unreachable => Cause::Unreachable,
                    _ => Cause::Failed,
                },
                insist: action.start && had || self.restores,
            });
            if had && action.trap {
                env.request(Request::Trap {
                    connection,
                    child: cfg.name.clone(),
                });
            }
        }
    }
}
