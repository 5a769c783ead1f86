// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The endpoint: every IKE SA of this host, and the door to them.
//!
//! ```text
//!   handle_datagram ─┐                       ┌─ IkeSa (per peer; consuming typestates)
//!   handle_timeout  ─┤   ┌──────────┐        ├─ IkeSa
//!   handle_plane    ─┼──►│ Endpoint │──spi──►├─ IkeSa ──┐
//!   handle_computed ─┤   └──────────┘        └─ ...     │ actions, requests
//!   command         ─┘        ▲                         ▼
//!                             └────── requests ────── Env ──► poll_action
//! ```
//!
//! The endpoint finds the IKE SA that an input is for and lets it work with the shared environment.
//! What an IKE SA wants of the endpoint (take over a rekeyed SA, run a uniqueness policy, bring a
//! child up again) it leaves there as a request, which is served before the call returns.

mod abandon;
mod acquire;
mod command;
pub(crate) mod connections;
mod farewell;
#[cfg(any(test, fuzzing))]
mod fuzzing;
pub(crate) mod half_open;
mod inbound;
pub(crate) mod keep;
mod load;
mod requests;
mod roaming;
#[cfg(test)]
pub(crate) mod tests;
mod throttle;
mod traps;
mod twins;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::PlaneEvent;

use self::command::Waiter;
use self::farewell::Farewells;
use self::keep::Keep;
use self::throttle::Throttle;
use self::traps::Traps;
use self::twins::Twins;
use crate::api::{
    Action, ChildSaId, CommandId, Event, FailureReason, IkeSaId, IkeSaInfo, IkeState, Input,
    LogGroup, Now, PlaneAnswer, Selector, Settings, Token,
};
use crate::compute::Computed;
use crate::credentials::Credentials;
use crate::crypto::Provider;
use crate::record::tape::Tape;
use crate::sa::env::{Env, Pending, PendingKind};
use crate::sa::{Answer, IkeSa, Task};

/// What a [`Selector`] selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    /// The IKE SA.
    pub ike: IkeSaId,
    /// The CHILD SA, if CHILD SAs are meant.
    pub child: Option<ChildSaId>,
}

/// All IKE SAs of one host. See the crate's documentation for how it is driven.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Endpoint {
    env: Env,
    sas: BTreeMap<IkeSaId, Box<IkeSa>>,
    /// When each IKE SA next wants to be called, as `deadlines` has it.
    armed: BTreeMap<IkeSaId, Instant>,
    deadlines: BTreeSet<(Instant, IkeSaId)>,
    /// IKE_SA_INIT requests that are or were answered, to recognise their retransmissions.
    init_requests: BTreeMap<(SocketAddr, u64), IkeSaId>,
    /// IKE SAs by connection, and where each stands there.
    by_connection: BTreeMap<String, BTreeSet<IkeSaId>>,
    connection_of: BTreeMap<IkeSaId, String>,
    /// IKE SAs that were worked on since the last settlement.
    touched: BTreeSet<IkeSaId>,
    waiters: BTreeMap<CommandId, Waiter>,
    /// Commands that have ended but for operations of the data plane, by the last of these.
    settling: VecDeque<(Token, CommandId, Result<(), String>)>,
    /// The last operation that the data plane has answered.
    answered: Token,
    keep: Keep,
    traps: Traps,
    twins: Twins,
    /// When an attempt to set up an SA of a connection last failed.
    failures: BTreeMap<String, Instant>,
    strangers: Strangers,
    throttle: Throttle,
    farewells: Farewells,
    stopping: bool,
}

/// Bounds what is logged because of messages that nobody vouches for.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
struct Strangers {
    since: Option<Instant>,
    lines: u32,
    suppressed: u32,
}

// Getters.
impl Endpoint {
    /// An endpoint without connections. All its randomness follows from `seed` (the private values
    /// of some key exchange methods excepted, see [`crate::crypto::KeyExchange::generate`]).
    pub fn new(settings: Settings, crypto: Provider, seed: [u8; 32]) -> Self {
        Self {
            env: Env::new(settings, crypto, seed),
            sas: BTreeMap::new(),
            armed: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            init_requests: BTreeMap::new(),
            by_connection: BTreeMap::new(),
            connection_of: BTreeMap::new(),
            touched: BTreeSet::new(),
            waiters: BTreeMap::new(),
            settling: VecDeque::new(),
            answered: 0,
            keep: Keep::default(),
            traps: Traps::default(),
            twins: Twins::default(),
            failures: BTreeMap::new(),
            strangers: Strangers::default(),
            throttle: Throttle::default(),
            farewells: Farewells::default(),
            stopping: false,
        }
    }

    /// When [`Self::handle_timeout`] is to be called at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let sa = self.deadlines.first().map(|(at, _)| *at);
        [sa, self.keep.next(), self.traps.next(), self.twins.next()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.env.settings
    }

    /// The algorithms that may be used.
    pub fn crypto(&self) -> Provider {
        self.env.crypto
    }

    /// Whether the configuration names this address as one of a peer, or one has authenticated from
    /// there of late.
    pub fn knows_peer(&self, now: Now, addr: IpAddr) -> bool {
        self.env.connections.is_known_peer(addr)
            || self.env.half_open.is_familiar(now.instant, addr)
    }

    /// Whether a connection of that name is loaded.
    pub fn has_connection(&self, name: &str) -> bool {
        self.env.connections.get(name).is_some()
    }

    /// One IKE SA.
    pub fn ike_sa(&self, id: IkeSaId) -> Option<IkeSaInfo> {
        self.sas.get(&id).map(|sa| sa.info())
    }

    /// All IKE SAs, by id.
    pub fn ike_sas(&self) -> impl Iterator<Item = IkeSaInfo> {
        self.sas.values().map(|sa| sa.info())
    }

    /// How many IKE SAs that peers have begun are not established yet.
    pub fn half_open(&self) -> usize {
        self.env.half_open.total()
    }

    /// What `selector` selects, by id.
    pub fn matches(&self, selector: &Selector) -> Vec<Match> {
        let mut found = Vec::new();
        let ids: Vec<IkeSaId> = match (&selector.ike, selector.ike_id) {
            (_, Some(id)) => vec![id],
            (Some(name), None) => self.of_connection(name),
            (None, None) => self.sas.keys().copied().collect(),
        };
        for sa in ids.iter().filter_map(|id| self.sas.get(id)) {
            let name = sa.conn.as_ref().map(|conn| conn.name.as_str());
            if selector.ike_id.is_some_and(|id| id != sa.id)
                || selector.ike.as_deref().is_some_and(|ike| name != Some(ike))
            {
                continue;
            }
            if selector.child.is_none() && selector.child_id.is_none() {
                found.push(Match {
                    ike: sa.id,
                    child: None,
                });
                continue;
            }
            for child in sa.children.values() {
                let named = selector
                    .child
                    .as_ref()
                    .is_none_or(|name| *name == child.cfg().name);
                let numbered = selector.child_id.is_none_or(|id| id == child.id);
                if named && numbered && child.remove_at.is_none() {
                    found.push(Match {
                        ike: sa.id,
                        child: Some(child.id),
                    });
                }
            }
        }
        found
    }
}

// Something happened.
impl Endpoint {
    /// Time has passed. Calling early does no harm.
    pub fn handle_timeout(&mut self, now: Now) {
        while let Some(&(at, id)) = self.deadlines.first() {
            if at > now.instant {
                break;
            }
            self.with(id, |sa, env| sa.handle_timeout(env, now));
            // Whatever the SA says now, this deadline has been served.
            self.deadlines.remove(&(at, id));
            self.armed.remove(&id);
            self.settle(now);
        }
        self.serve_keep(now);
        self.serve_traps(now);
        self.serve_twins(now);
        self.settle(now);
    }

    /// The data plane has answered [`Action::Plane`].
    pub fn handle_plane(&mut self, now: Now, token: Token, answer: PlaneAnswer) {
        self.answered = self.answered.max(token);
        self.finish_settled();
        if self.traps.awaits(token) {
            self.trap_answer_plane(now, token, answer);
            self.settle(now);
            return;
        }
        let Some(pending) = self.env.pending.remove(&token) else {
            return;
        };
        self.answer(now, token, pending, Answer::Plane(answer));
    }

    /// A [`crate::compute::Job`] is done.
    pub fn handle_computed(&mut self, now: Now, token: Token, computed: Computed) {
        if let Some(pending) = self.env.pending.remove(&token) {
            self.answer(now, token, pending, Answer::Computed(computed));
        }
    }

    /// A name has been resolved; no address means that it has none.
    pub fn handle_resolved(&mut self, now: Now, token: Token, addrs: Vec<IpAddr>) {
        if self.traps.awaits(token) {
            self.trap_answer_resolved(now, token, &addrs);
            self.settle(now);
            return;
        }
        let Some(pending) = self.env.pending.remove(&token) else {
            return;
        };
        if let PendingKind::Resolve(name) = &pending.kind
            && !addrs.is_empty()
        {
            self.env.connections.learn(name, &addrs);
        }
        self.answer(now, token, pending, Answer::Resolved(addrs));
    }

    /// The source address has been found, or there is no route.
    pub fn handle_source(&mut self, now: Now, token: Token, source: Option<IpAddr>) {
        if self.traps.awaits(token) {
            self.trap_answer_sourced(now, token, source);
            self.settle(now);
            return;
        }
        if let Some(pending) = self.env.pending.remove(&token) {
            self.answer(now, token, pending, Answer::Source(source));
        }
    }

    /// It is known when the SAs of [`Action::Usage`] last carried a packet.
    pub fn handle_usage(&mut self, now: Now, token: Token, ago: Option<Duration>) {
        if let Some(pending) = self.env.pending.remove(&token) {
            self.answer(now, token, pending, Answer::Usage(ago));
        }
    }

    /// The data plane reports something on its own.
    pub fn handle_plane_event(&mut self, now: Now, event: PlaneEvent) {
        match event {
            PlaneEvent::Acquire {
                reqid,
                local,
                remote,
            } => self.acquired(now, reqid, local, remote),
            PlaneEvent::Expire { id, hard } => {
                if let Some(&(ike, child)) = self.env.by_sa.get(&id) {
                    self.with(ike, |sa, env| {
                        if hard {
                            sa.sa_expired(env, now, child, id);
                        } else {
                            sa.rekey_child(env, now, child);
                        }
                    });
                }
            }
            PlaneEvent::MappingChange { id, addr, port } => {
                if let Some(&(ike, _)) = self.env.by_sa.get(&id) {
                    let remote = SocketAddr::new(addr, port);
                    self.with(ike, |sa, env| sa.mapping_changed(env, now, remote));
                }
            }
            PlaneEvent::NetworkChanged => self.keep.network_changed(now.instant),
        }
        self.settle(now);
    }
}

// All that changes an endpoint.
impl Endpoint {
    /// Takes an input of any kind.
    pub fn handle(&mut self, now: Now, input: Input) {
        match input {
            Input::Datagram(datagram) => self.handle_datagram(now, datagram),
            Input::Timeout => self.handle_timeout(now),
            Input::Plane(token, answer) => self.handle_plane(now, token, answer),
            Input::Computed(token, computed) => self.handle_computed(now, token, computed),
            Input::Resolved(token, addrs) => self.handle_resolved(now, token, addrs),
            Input::Source(token, addr) => self.handle_source(now, token, addr),
            Input::Usage(token, ago) => self.handle_usage(now, token, ago),
            Input::PlaneEvent(event) => self.handle_plane_event(now, event),
            Input::Addresses(addresses) => self.handle_addresses(now, &addresses),
            Input::TooLong(transmit) => self.handle_too_long(now, &transmit),
            Input::Load(connection) => self.load_connection(now, connection),
            Input::Unload(name) => {
                self.unload_connection(now, &name);
            }
            Input::Credentials(credentials) => self.set_credentials(credentials),
            Input::Settings(settings) => self.set_settings(*settings),
            Input::Command(id, command) => self.command(now, id, command),
            Input::Cancel(id) => self.cancel(id),
            Input::Shutdown => self.shutdown(now),
        }
    }
}

// Commands; the others are in `command` and `load`.
impl Endpoint {
    /// Replaces all credentials. Negotiations under way go on with those that they have seen.
    pub fn set_credentials(&mut self, credentials: Arc<Credentials>) {
        self.env.credentials = credentials;
    }

    /// Replaces the settings; what is under way keeps what it has been started with.
    pub fn set_settings(&mut self, settings: Settings) {
        self.env.settings = settings;
    }

    /// Deletes everything, telling the peers. New handshakes are refused from now on. The
    /// endpoint is empty when [`Self::ike_sas`] is, which takes at most two seconds.
    pub fn shutdown(&mut self, now: Now) {
        self.stopping = true;
        self.keep.clear();
        self.remove_traps();
        let ids: Vec<IkeSaId> = self.sas.keys().copied().collect();
        for id in ids {
            self.with(id, |sa, env| {
                if matches!(sa.state, IkeState::Created | IkeState::Connecting) {
                    sa.end(env, FailureReason::LocalDeleted, "shutting down".to_owned());
                } else {
                    sa.delete_at_once(env, now, Duration::from_secs(2));
                }
            });
        }
        self.settle(now);
    }
}

// What to do.
impl Endpoint {
    /// The next thing to do. Call until there is nothing more, after each call that may have
    /// changed something.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.env.actions.pop_front()
    }
}

impl Endpoint {
    /// The keys of all IKE SAs.
    #[cfg(test)]
    pub(crate) fn secrets(&self) -> Vec<Vec<u8>> {
        let keys = self.sas.values().filter_map(|sa| sa.keys.as_ref());
        keys.flat_map(|keys| {
            [
                &keys.d, &keys.ai, &keys.ar, &keys.ei, &keys.er, &keys.pi, &keys.pr,
            ]
        })
        .map(|key| key.expose().to_vec())
        .collect()
    }

    /// Has chance and what depends on secrets recorded, or replayed.
    pub(crate) fn attach(&mut self, tape: Tape) {
        self.env.rng.attach(tape);
    }

    /// Lets an IKE SA work. Does nothing if there is none of that id.
    fn with<R>(&mut self, id: IkeSaId, work: impl FnOnce(&mut IkeSa, &mut Env) -> R) -> Option<R> {
        let sa = self.sas.get_mut(&id)?;
        self.touched.insert(id);
        Some(work(sa, &mut self.env))
    }

    fn answer(&mut self, now: Now, token: Token, pending: Pending, answer: Answer) {
        let left = match self.sas.get_mut(&pending.sa) {
            Some(sa) => {
                self.touched.insert(pending.sa);
                sa.handle_answer(&mut self.env, now, pending.slot, token, answer)
            }
            None => Some(answer),
        };
        if let Some(Answer::Plane(answer)) = left {
            self.env.discard(&pending, &answer);
        }
        self.settle(now);
    }

    /// Serves requests, removes what is dead, arms timers. Every public call ends with it.
    fn settle(&mut self, now: Now) {
        loop {
            while let Some(request) = self.env.requests.pop_front() {
                self.serve(now, request);
            }
            let touched = std::mem::take(&mut self.touched);
            for id in touched {
                let Some(sa) = self.sas.get(&id) else {
                    continue;
                };
                if sa.dead {
                    self.reap(now, id);
                    continue;
                }
                let name = sa.connection_name();
                let next = sa.next_timeout();
                self.index_connection(id, name);
                let before = self.armed.get(&id).copied();
                if before != next {
                    if let Some(before) = before {
                        self.deadlines.remove(&(before, id));
                        self.armed.remove(&id);
                    }
                    if let Some(next) = next {
                        self.deadlines.insert((next, id));
                        self.armed.insert(id, next);
                    }
                }
            }
            if self.env.requests.is_empty() && self.touched.is_empty() {
                for news in self.keep.news() {
                    self.event(news);
                }
                if !self.waiters.is_empty() {
                    self.check_down();
                    self.check_traps();
                }
                return;
            }
        }
    }

    /// Notes which connection an IKE SA belongs to.
    fn index_connection(&mut self, id: IkeSaId, name: Option<String>) {
        if self.connection_of.get(&id) == name.as_ref() {
            return;
        }
        if let Some(old) = self.connection_of.remove(&id)
            && let Some(set) = self.by_connection.get_mut(&old)
        {
            set.remove(&id);
            if set.is_empty() {
                self.by_connection.remove(&old);
            }
        }
        if let Some(name) = name {
            self.by_connection
                .entry(name.clone())
                .or_default()
                .insert(id);
            self.connection_of.insert(id, name);
        }
    }

    /// The IKE SAs of a connection.
    fn of_connection(&self, name: &str) -> Vec<IkeSaId> {
        let set = self.by_connection.get(name);
        set.into_iter().flatten().copied().collect()
    }

    /// Adds an IKE SA.
    fn adopt(&mut self, sa: Box<IkeSa>) {
        self.index_connection(sa.id, sa.connection_name());
        self.touched.insert(sa.id);
        self.sas.insert(sa.id, sa);
    }

    fn reap(&mut self, now: Now, id: IkeSaId) {
        let Some(mut sa) = self.sas.remove(&id) else {
            return;
        };
        // One that never got beyond IKE_SA_INIT is no loss, and strangers can make many.
        let concluded = sa.established.is_some() || sa.inbound.expected_id > 1;
        if let Some(last) = sa.inbound.last.take().filter(|_| concluded) {
            self.farewells.remember(now.instant, sa.own_spi(), last);
        }
        self.index_connection(id, None);
        if let Some(successor) = sa.successor {
            self.twins.follow(id, successor);
        }
        if let Some(at) = self.armed.remove(&id) {
            self.deadlines.remove(&(at, id));
        }
        if self.env.spis.get(&sa.own_spi()) == Some(&id) {
            self.env.spis.remove(&sa.own_spi());
        }
        if !sa.initiator {
            let key = sa.init_key;
            if let Some(key) = key
                && self.init_requests.get(&key) == Some(&id)
            {
                self.init_requests.remove(&key);
            }
        }
        self.env.rivals.release(&sa.identities(), id);
        if !sa.announced
            && sa.initiator
            && let Some(conn) = &sa.conn
        {
            self.note_failure(now.instant, &conn.name);
            self.keep.turn(&conn.name, sa.attempt);
        }
        self.taken_over(now, &sa);
        self.ike_is_gone(&sa);
        if !sa.announced && !sa.initiator && !self.stopping {
            self.env.log(
                LogGroup::Mgr,
                2,
                format!("half-open IKE_SA [{id}] is removed"),
            );
        }
    }

    /// The IKE SA that a child of `connection` would be negotiated over, with `peer` if the
    /// connection leaves that open.
    fn usable_sa(&self, connection: &str, peer: Option<IpAddr>) -> Option<IkeSaId> {
        if !self.env.settings.reuse_ikesa {
            return None;
        }
        self.by_connection
            .get(connection)?
            .iter()
            .filter_map(|id| self.sas.get(id))
            .filter(|sa| {
                matches!(
                    sa.state,
                    IkeState::Created
                        | IkeState::Connecting
                        | IkeState::Established
                        | IkeState::Rekeying
                ) && (sa.initiator || sa.is_established())
                    && acquire::is_with(sa, peer)
                    && !sa.queue.iter().any(|task| matches!(task, Task::DeleteIke))
            })
            .max_by_key(|sa| (sa.is_established(), sa.id))
            .map(|sa| sa.id)
    }

    /// Logs something about a message that nobody vouches for: at most ten lines per second.
    fn log_stranger(
        &mut self,
        now: Now,
        group: LogGroup,
        level: u8,
        message: impl FnOnce() -> String,
    ) {
        const LINES: u32 = 10;
        let strangers = &mut self.strangers;
        let fresh = strangers.since.is_none_or(|since| {
            now.instant.saturating_duration_since(since) >= Duration::from_secs(1)
        });
        if fresh {
            strangers.since = Some(now.instant);
            strangers.lines = 0;
            let suppressed = std::mem::take(&mut strangers.suppressed);
            if suppressed > 0 {
                let text =
                    format!("{suppressed} lines about messages of strangers were suppressed");
                self.env.log(LogGroup::Net, 1, text);
            }
        }
        if self.strangers.lines >= LINES {
            self.strangers.suppressed = self.strangers.suppressed.saturating_add(1);
            return;
        }
        self.strangers.lines += 1;
        self.env.log(group, level, message());
    }

    fn event(&mut self, event: Event) {
        self.env.event(event);
    }
}

/// Whether an IKE SA has a live child of that name, or is making one.
fn has_child(sa: &IkeSa, name: &str) -> bool {
    let ending = |id| {
        sa.queue
            .iter()
            .any(|task| matches!(task, Task::DeleteChild(queued) if *queued == id))
    };
    sa.children
        .values()
        .any(|child| child.cfg().name == name && child.is_lasting() && !ending(child.id))
}

fn is_making_child(sa: &IkeSa, name: &str) -> bool {
    let queued = sa.queue.iter().any(|task| match task {
        Task::CreateChild { conn, index, .. } => conn
            .children
            .get(*index)
            .is_some_and(|child| child.name == name),
        _ => false,
    });
    queued
        || sa.children.values().any(|child| {
            use crate::api::ChildState;
            child.cfg().name == name
                && matches!(child.state, ChildState::Created | ChildState::Installing)
                && child.replaces.is_none()
                && !child.taken_down
        })
}
