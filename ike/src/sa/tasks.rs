// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an IKE SA still has to do, one exchange at a time.

use std::time::{Duration, Instant};

use swanherd_ipsec::{ProtocolId, TrafficSelector};

use super::answer_child::MAX_CHILDREN;
use super::env::{Env, Request};
use super::timers::Timer;
use super::{Active, IkeSa, Passive};
use crate::api::{ChildSaId, ConnectionRef, IkeState, Now};
use crate::wire::{DeletePayload, ExchangeType, Payload};

/// The most tasks that wait. Each child has at most a few; this bounds what a peer or a script
/// can pile up.
const MAX_QUEUE: usize = 2 * MAX_CHILDREN;

/// How long packets have to change over to other children.
const SWITCH: Duration = Duration::from_millis(500);

/// How long an own rekeying waits for a peer that keeps asking: one that is refused again and again
/// may need just that rekeying to learn what it lacks.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long the exchange of an own rekeying may take.
const EXCHANGE: Duration = Duration::from_secs(30);

/// The selectors of a packet: of this side and of the peer's.
pub(crate) type Packet = (TrafficSelector, TrafficSelector);

/// Something to do.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Bring up a child.
    CreateChild {
        /// Connection, which may be newer than the IKE SA's.
        conn: ConnectionRef,
        /// Place in its children.
        index: usize,
        /// The packet that asks for it.
        packet: Option<Packet>,
    },
    /// Replace a child.
    RekeyChild(ChildSaId),
    /// Delete a child.
    DeleteChild(ChildSaId),
    /// Delete the CHILD SA that the peer made for an SPI of ours which leads nowhere.
    DeleteSpi(u32),
    /// Replace the IKE SA.
    RekeyIke,
    /// Set up a new IKE SA in its place.
    ReauthIke,
    /// Delete the IKE SA.
    DeleteIke,
    /// See whether the peer lives.
    Probe,
    /// Tell the peer to use other addresses.
    Move,
    /// Tell the peer which addresses this side has.
    Announce,
    /// See whether the peer receives at its new address.
    Prove,
    /// Packets are to take the children of this IKE SA.
    Prefer,
    /// Packets are to take the children of this IKE SA, before the one goes that it takes over from.
    TakeOver,
    /// The IKE SA that this one takes over from can go.
    FinishReauth,
}

impl Task {
    /// VICI's name.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::CreateChild { .. } => "CHILD_CREATE",
            Self::RekeyChild(_) => "CHILD_REKEY",
            Self::DeleteChild(_) | Self::DeleteSpi(_) => "CHILD_DELETE",
            Self::RekeyIke => "IKE_REKEY",
            Self::ReauthIke => "IKE_REAUTH",
            Self::DeleteIke => "IKE_DELETE",
            Self::Probe => "IKE_DPD",
            Self::Move | Self::Announce | Self::Prove => "IKE_MOBIKE",
            Self::Prefer | Self::TakeOver | Self::FinishReauth => "IKE_REAUTH_COMPLETE",
        }
    }

    /// The child that it brings up: its connection and its place there.
    pub(crate) fn makes(&self) -> Option<(&ConnectionRef, usize)> {
        match self {
            Self::CreateChild { conn, index, .. } => Some((conn, *index)),
            _ => None,
        }
    }

    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::CreateChild { conn, index, .. },
                Self::CreateChild {
                    conn: other,
                    index: i,
                    ..
                },
            ) => conn.name == other.name && index == i,
            (Self::RekeyChild(a), Self::RekeyChild(b)) => a == b,
            (Self::DeleteSpi(a), Self::DeleteSpi(b)) => a == b,
            (Self::DeleteChild(a), Self::DeleteChild(b)) => a == b,
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }
}

impl IkeSa {
    /// Puts a task last in the queue, unless it is there. Deletions of children come before the
    /// IKE SA is replaced, which the peer may refuse until then.
    pub(crate) fn queue_task(&mut self, env: &mut Env, now: Now, task: Task) {
        self.enqueue(task);
        self.proceed(env, now);
    }

    /// As [`Self::queue_task`], but nothing is started yet.
    pub(crate) fn enqueue(&mut self, task: Task) {
        if self.dead || self.queue.iter().any(|queued| queued.same(&task)) {
            return;
        }
        if self.queue.len() >= MAX_QUEUE {
            return;
        }
        match task {
            Task::DeleteIke => self.queue.push_front(task),
            Task::DeleteChild(_) => {
                let replaces = |task: &Task| matches!(task, Task::RekeyIke);
                let place = self.queue.iter().position(replaces);
                self.queue.insert(place.unwrap_or(self.queue.len()), task);
            }
            _ => self.queue.push_back(task),
        }
    }

    /// As [`Self::enqueue`], but before all others, even if it is queued already.
    pub(crate) fn enqueue_first(&mut self, task: Task) {
        if self.dead || matches!(self.queue.front(), Some(Task::DeleteIke)) {
            return;
        }
        self.queue.retain(|queued| !queued.same(&task));
        if self.queue.len() < MAX_QUEUE {
            self.queue.push_front(task);
        }
    }

    /// Queues a task after a while.
    pub(crate) fn delay(&mut self, now: Now, wait: Duration, task: Task) {
        if self.delayed.len() >= MAX_QUEUE {
            return;
        }
        self.delayed.push((now.instant + wait, task));
        self.arm_delayed();
    }

    /// Queues the delayed tasks that are due.
    pub(crate) fn serve_delayed(&mut self, now: Now) {
        let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.delayed)
            .into_iter()
            .partition(|(at, _)| *at <= now.instant);
        self.delayed = later;
        for (_, task) in due {
            self.enqueue(task);
        }
        self.settle(now);
        self.arm_delayed();
    }

    /// The peer has had the time to ask again, if it has, or has asked for long enough.
    fn settle(&mut self, now: Now) {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now.instant);
        if due(self.inbound.unsettled) || due(self.patience) {
            self.inbound.unsettled = None;
        }
        if !self.holds_a_task() {
            self.patience = None;
        }
    }

    fn holds_a_task(&self) -> bool {
        self.queue.iter().any(|task| self.is_premature(task))
    }

    fn arm_delayed(&mut self) {
        let settled = [self.inbound.unsettled, self.patience]
            .into_iter()
            .flatten();
        let settled = settled.min().filter(|_| self.holds_a_task());
        let next = self.delayed.iter().map(|(at, _)| *at).chain(settled).min();
        self.timers.put(Timer::Retry, next);
    }

    /// Whether a task had better wait: a rekeying that begins before the peer knows the outcome of
    /// its own exchange is a collision to the peer. RFC 7296 section 2.25 has rules for those, but
    /// charon loses CHILD SAs in two of them: when its rekeying of a child, which collided with
    /// ours, ends after the IKE SA was replaced, the new child goes with the old IKE SA; and when
    /// its request is refused after ours for the same child has been accepted, it does not send by
    /// the new one.
    fn is_premature(&self, task: &Task) -> bool {
        let Some(settled) = self.inbound.unsettled else {
            return false;
        };
        let can_wait = |end: Option<Instant>| end.is_none_or(|end| end >= settled + EXCHANGE);
        match task {
            Task::RekeyIke => can_wait(self.timers.get(Timer::HardLifetime)),
            Task::RekeyChild(id) => self.children.get(id).is_some_and(|child| {
                // How long bytes and packets will last, nobody knows.
                let cfg = child.cfg();
                cfg.rekey_bytes == 0 && cfg.rekey_packets == 0 && can_wait(child.expires_at)
            }),
            _ => false,
        }
    }

    /// Starts the next task if nothing is under way.
    pub(crate) fn proceed(&mut self, env: &mut Env, now: Now) {
        self.settle(now);
        self.answer_postponed(env, now);
        while !self.dead
            && self.outbound.in_flight.is_none()
            && matches!(self.active, Active::Idle)
            // What is queued is for the successor, if there is one in a moment.
            && !matches!(self.passive, Passive::Rekeying(_))
            && matches!(self.state, IkeState::Established | IkeState::Rekeyed)
        {
            let next = self.queue.iter().position(|task| !self.is_premature(task));
            let Some(next) = next else {
                if self.holds_a_task() {
                    self.patience.get_or_insert(now.instant + PATIENCE);
                }
                self.arm_delayed();
                return;
            };
            // One that the peer is being answered about is there in a moment, or gone.
            if let Some(Task::DeleteChild(id)) = self.queue.get(next)
                && self.answers_creation_of(*id)
            {
                return;
            }
            let Some(task) = self.queue.remove(next) else {
                return;
            };
            match task {
                Task::CreateChild {
                    conn,
                    index,
                    packet,
                } => self.start_child(env, now, &conn, index, packet),
                Task::RekeyChild(id) => self.start_child_rekey(env, now, id),
                Task::DeleteChild(id) => self.start_child_delete(env, now, id),
                Task::DeleteSpi(spi) => {
                    let delete = Payload::Delete(DeletePayload::Child {
                        protocol: ProtocolId::Esp,
                        spis: vec![spi],
                    });
                    if self.send_request(env, now, ExchangeType::Informational, &[delete]) {
                        self.active = Active::Probing;
                    }
                }
                Task::RekeyIke => self.start_rekey(env, now),
                Task::ReauthIke => env.request(Request::Reauthenticate { old: self.id }),
                Task::DeleteIke => self.start_ike_delete(env, now),
                Task::Move => self.start_move(env, now, true),
                Task::Announce => self.start_move(env, now, false),
                Task::Prove => self.start_proof(env, now),
                Task::Probe => {
                    let payloads = self.probe_payloads();
                    if self.send_request(env, now, ExchangeType::Informational, &payloads) {
                        self.active = Active::Probing;
                    }
                }
                Task::Prefer => self.take_precedence(env),
                Task::TakeOver => {
                    self.take_precedence(env);
                    self.delay(now, SWITCH, Task::FinishReauth);
                }
                Task::FinishReauth => {
                    // A child that the peer had no time for is made before.
                    let makes = |task: &Task| matches!(task, Task::CreateChild { .. });
                    if self.delayed.iter().any(|(_, task)| makes(task)) {
                        self.delay(now, Duration::from_secs(1), Task::FinishReauth);
                        continue;
                    }
                    self.restores = false;
                    if let Some(old) = self.supersedes.take() {
                        env.request(Request::FinishReauth { old });
                    }
                }
            }
        }
    }
}
