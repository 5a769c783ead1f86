// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One IKE SA and its children.
//!
//! An IKE SA does at most two things at a time, as its window size of 1 has it: an exchange that
//! it initiated (`active`) and a request of the peer's that it answers (`passive`). Each is a
//! value that is consumed by what happens next and yields its successor, so no half-changed state
//! survives an error. Whatever takes long leaves as an [`crate::api::Action`] with a token, and the
//! state that awaits the answer holds the token; an answer that no state awaits any more is
//! undone.

mod answer_child;
mod auth;
mod child;
mod child_offer;
mod collision;
mod create_child;
pub(crate) mod env;
mod exchange;
mod idle;
mod inbound;
mod informational;
pub(crate) mod initiator;
mod initiator_auth;
mod install;
pub(crate) mod judge;
mod lifecycle;
mod limits;
mod locate;
mod mobike;
pub(crate) mod mode;
pub(crate) mod narrow;
mod nat;
pub(crate) mod policies;
pub(crate) mod proposal;
mod protect;
mod redirect;
mod rekey;
mod reqids;
pub(crate) mod responder;
pub(crate) mod rivals;
mod roam;
mod standby;
mod tasks;
mod timers;
pub(crate) mod unique;
#[cfg(test)]
pub(crate) mod view;
mod virtual_ip;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use swanherd_config::identity::display_identity;
use swanherd_ipsec::Identity;
use swanherd_ipsec::proposal::IkeSuite;

use self::env::{Env, Slot};
use self::exchange::{Inbound, Outbound};
use self::mobike::Mobility;
use self::nat::Nat;
use self::protect::{Protection, Reassembly};
use self::timers::Timers;
use crate::api::{
    ChildSaId, ConnectionRef, Counter, Event, FailureReason, IkeSaId, IkeSaInfo, IkeState,
    LogGroup, LogLine, Now, PlaneAnswer, Token,
};
use crate::compute::Computed;
use crate::crypto::IkeKeys;
use crate::crypto::auth::HashId;

pub(crate) use self::child::ChildSa;
pub(crate) use self::exchange::Answered;
#[cfg(test)]
pub(crate) use self::exchange::Sealed;
pub(crate) use self::lifecycle::CLEANUP_LIMIT;
pub(crate) use self::redirect::Redirection;
pub(crate) use self::tasks::{Packet, Task};

/// An answer to an action.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Of the data plane.
    Plane(PlaneAnswer),
    /// Of a computation.
    Computed(Computed),
    /// Addresses of a name.
    Resolved(Vec<IpAddr>),
    /// A source address.
    Source(Option<IpAddr>),
    /// How long ago SAs were used.
    Usage(Option<Duration>),
}

/// What the peer can do, as it said.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerFeatures {
    /// IKEV2_FRAGMENTATION_SUPPORTED.
    pub(crate) fragmentation: bool,
    /// SIGNATURE_HASH_ALGORITHMS.
    pub(crate) hashes: Vec<HashId>,
    /// CHILDLESS_IKEV2_SUPPORTED.
    pub(crate) childless: bool,
    /// MOBIKE_SUPPORTED.
    pub(crate) mobike: bool,
    /// It names itself as one that knows strongSwan's private notifies.
    pub(crate) private_notifies: bool,
    /// ESP_TFC_PADDING_NOT_SUPPORTED is remembered per IKE SA; we never pad.
    pub(crate) no_tfc: bool,
}

/// The exchange that this side initiated, or prepares to.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Active {
    /// None.
    Idle,
    /// IKE_SA_INIT and IKE_AUTH.
    Initiating(Box<initiator::Initiating>),
    /// CREATE_CHILD_SA for a child.
    CreatingChild(Box<create_child::Creating>),
    /// CREATE_CHILD_SA for the IKE SA.
    Rekeying(Box<rekey::Rekeying>),
    /// INFORMATIONAL that deletes children.
    DeletingChild(ChildSaId),
    /// INFORMATIONAL that deletes the IKE SA.
    DeletingIke,
    /// An INFORMATIONAL that shows whether the peer lives.
    Probing,
    /// INFORMATIONAL with new addresses.
    Moving(Box<mobike::Moving>),
    /// INFORMATIONAL that shows whether the peer receives at its new address.
    Proving(Box<mobike::Proof>),
}

/// A request of the peer's that is being worked on.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Passive {
    /// None.
    Idle,
    /// IKE_SA_INIT and IKE_AUTH.
    Responding(Box<responder::Responding>),
    /// CREATE_CHILD_SA for a child.
    CreatingChild(Box<answer_child::Answering>),
    /// CREATE_CHILD_SA for the IKE SA.
    Rekeying(Box<rekey::Answering>),
    /// CREATE_CHILD_SA to rekey a child, which waits until this side has deleted that.
    Postponed(Vec<crate::wire::Payload>),
    /// The deletion of this IKE SA, while packets are led to another one.
    Leaving(BTreeSet<Token>),
}

/// An IKE SA.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct IkeSa {
    pub(crate) id: IkeSaId,
    /// Whether this side is the original initiator.
    pub(crate) initiator: bool,
    pub(crate) state: IkeState,
    pub(crate) conn: Option<ConnectionRef>,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) local_id: Identity,
    pub(crate) remote_id: Identity,
    pub(crate) spi_i: u64,
    pub(crate) spi_r: u64,
    pub(crate) nat: Nat,
    pub(crate) mobility: Mobility,
    pub(crate) redirection: Redirection,
    /// The longest IP packet, where longer ones seem to get lost.
    pub(crate) packet: Option<u32>,
    /// The code point of what is sent before it is known which connection this is for.
    pub(crate) dscp: u8,
    pub(crate) suite: Option<IkeSuite>,
    pub(crate) keys: Option<IkeKeys>,
    pub(crate) protection: Option<Protection>,
    pub(crate) peer: PeerFeatures,
    pub(crate) timers: Timers,
    pub(crate) outbound: Outbound,
    pub(crate) inbound: Inbound,
    pub(crate) reassembly: Reassembly,
    pub(crate) active: Active,
    pub(crate) passive: Passive,
    pub(crate) queue: VecDeque<Task>,
    pub(crate) children: BTreeMap<ChildSaId, ChildSa>,
    /// When it was begun.
    pub(crate) created: Instant,
    pub(crate) established: Option<Instant>,
    pub(crate) last_inbound: Instant,
    pub(crate) last_outbound: Instant,
    /// Virtual addresses that the peer gave to this side.
    pub(crate) vips: Vec<IpAddr>,
    /// Virtual addresses of the IKE SA that this one is to take over from.
    pub(crate) former_vips: Vec<IpAddr>,
    /// The peer's address, if the connection leaves that open and a packet named it.
    pub(crate) target: Option<IpAddr>,
    /// Interface ids of the connection, once drawn.
    pub(crate) if_id: Option<(u32, u32)>,
    /// Whether it counts as half open.
    pub(crate) half_open: bool,
    /// Within what time after it is established the peer wants this side to authenticate again.
    pub(crate) auth_lifetime: Option<Duration>,
    /// When it ends unless the two sides authenticate themselves again, whoever rekeys it.
    pub(crate) authenticate_by: Option<Instant>,
    /// The IKE SA that this one is to take over from by reauthentication.
    pub(crate) supersedes: Option<IkeSaId>,
    /// Its first children were up before, on an IKE SA that it replaces, and are to be up again
    /// whatever their actions say.
    pub(crate) restores: bool,
    /// Children to bring up over another IKE SA once this one is gone, as it is broken before that
    /// is made.
    pub(crate) reborn: Vec<(ConnectionRef, usize)>,
    /// The IKE SA that was made by a rekey of this one and waits for the outcome of a collision.
    pub(crate) rekey_twin: Option<Box<rekey::Twin>>,
    /// The IKE SA that has replaced this one.
    pub(crate) successor: Option<IkeSaId>,
    /// Another IKE SA with the same peer takes its place.
    pub(crate) replaced: bool,
    /// Where the peer is that has taken its identity, as long as nothing was heard of its own.
    pub(crate) dispossessed_by: Option<SocketAddr>,
    /// Whether it goes without a word, because it lost a rekey collision.
    pub(crate) redundant: bool,
    /// Source and SPI of the IKE_SA_INIT request that made it.
    pub(crate) init_key: Option<(SocketAddr, u64)>,
    /// Why it ended.
    pub(crate) failure: Option<(FailureReason, String)>,
    /// Whether the endpoint may remove it.
    pub(crate) dead: bool,
    /// Whether the world knows that it is up.
    pub(crate) announced: bool,
    /// The child that the request in flight is for, to be tried again if the peer is busy.
    pub(crate) retry_of: Option<(ConnectionRef, usize, Option<Packet>)>,
    /// The child that is negotiated along with the IKE SA, until that is established.
    pub(crate) first_child: Option<(ConnectionRef, usize, Option<Packet>)>,
    /// How many sequences of retransmissions of `keyingtries` are used up.
    pub(crate) tries: u32,
    /// Tasks that wait for a while before they are queued.
    pub(crate) delayed: Vec<(Instant, Task)>,
    /// Until then a queued rekeying waits for the peer to know the outcome of its own.
    pub(crate) patience: Option<Instant>,
    /// How many attempts came before, for the choice of the address.
    pub(crate) attempt: u32,
}

impl IkeSa {
    /// A new IKE SA in state CREATED.
    pub(crate) fn new(
        id: IkeSaId,
        initiator: bool,
        local: SocketAddr,
        remote: SocketAddr,
        now: Now,
    ) -> Self {
        Self {
            id,
            initiator,
            state: IkeState::Created,
            conn: None,
            local,
            remote,
            local_id: Identity::any(),
            remote_id: Identity::any(),
            spi_i: 0,
            spi_r: 0,
            nat: Nat::default(),
            mobility: Mobility::default(),
            redirection: Redirection::default(),
            packet: None,
            dscp: 0,
            suite: None,
            keys: None,
            protection: None,
            peer: PeerFeatures::default(),
            timers: Timers::default(),
            outbound: Outbound::default(),
            inbound: Inbound::default(),
            reassembly: Reassembly::default(),
            active: Active::Idle,
            passive: Passive::Idle,
            queue: VecDeque::new(),
            children: BTreeMap::new(),
            created: now.instant,
            established: None,
            last_inbound: now.instant,
            last_outbound: now.instant,
            vips: Vec::new(),
            former_vips: Vec::new(),
            target: None,
            if_id: None,
            half_open: false,
            auth_lifetime: None,
            authenticate_by: None,
            supersedes: None,
            restores: false,
            reborn: Vec::new(),
            rekey_twin: None,
            successor: None,
            replaced: false,
            dispossessed_by: None,
            redundant: false,
            init_key: None,
            failure: None,
            dead: false,
            announced: false,
            retry_of: None,
            first_child: None,
            tries: 0,
            delayed: Vec::new(),
            patience: None,
            attempt: 0,
        }
    }

    /// The SPI that this side chose.
    pub(crate) fn own_spi(&self) -> u64 {
        if self.initiator {
            self.spi_i
        } else {
            self.spi_r
        }
    }

    /// Whether children can be negotiated.
    pub(crate) fn is_established(&self) -> bool {
        matches!(self.state, IkeState::Established | IkeState::Rekeying)
    }

    /// Whether this side is still setting it up.
    pub(crate) fn is_connecting(&self) -> bool {
        self.initiator && matches!(self.state, IkeState::Created | IkeState::Connecting)
    }

    /// What it is to make: connections and places of children there.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = (&ConnectionRef, usize)> {
        let tasks = self.queue.iter().chain(self.delayed.iter().map(|d| &d.1));
        let first = self
            .first_child
            .iter()
            .map(|(conn, index, _)| (conn, *index));
        first.chain(tasks.filter_map(Task::makes))
    }

    /// Whether there is a child to set it up for.
    pub(crate) fn has_purpose(&self) -> bool {
        self.wanted().next().is_some()
    }

    /// Whether it is to be deleted.
    pub(crate) fn is_leaving(&self) -> bool {
        let tasks = self.queue.iter().chain(self.delayed.iter().map(|(_, t)| t));
        tasks
            .into_iter()
            .any(|task| matches!(task, Task::DeleteIke))
    }

    /// The next moment at which [`Self::handle_timeout`] has something to do.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        if self.dead { None } else { self.timers.next() }
    }

    /// The connection's name, or `None` before one is chosen.
    pub(crate) fn connection_name(&self) -> Option<String> {
        self.conn.as_ref().map(|conn| conn.name.clone())
    }

    /// For listings.
    pub(crate) fn info(&self) -> IkeSaInfo {
        let mut info = self.info_without_children();
        info.children = self
            .children
            .iter()
            .map(|(id, child)| (*id, child.info()))
            .collect();
        info
    }

    /// For events about the IKE SA alone.
    pub(crate) fn info_without_children(&self) -> IkeSaInfo {
        let established = self.state == IkeState::Established;
        IkeSaInfo {
            id: self.id,
            connection: self.connection_name(),
            state: self.state,
            local: self.local,
            remote: self.remote,
            local_id: self.local_id.clone(),
            remote_id: self.remote_id.clone(),
            initiator: self.initiator,
            spi_i: self.spi_i,
            spi_r: self.spi_r,
            nat_local: self.nat.local,
            nat_remote: self.nat.remote,
            nat_fake: self.nat.fake,
            suite: self.suite,
            local_vips: self.vips.clone(),
            established: self.established,
            rekey_at: self
                .timers
                .get(timers::Timer::Rekey)
                .filter(|_| established),
            reauth_at: self
                .timers
                .get(timers::Timer::Reauth)
                .filter(|_| established),
            tasks_queued: self.queue.iter().map(Task::name).collect(),
            tasks_active: self.active_tasks(),
            tasks_passive: self.passive_tasks(),
            wanted: self
                .wanted()
                .filter_map(|(conn, index)| Some(conn.children.get(index)?.name.clone()))
                .collect(),
            children: BTreeMap::new(),
        }
    }

    fn active_tasks(&self) -> Vec<&'static str> {
        match &self.active {
            Active::Idle => Vec::new(),
            Active::Initiating(_) => vec!["IKE_INIT", "IKE_NATD", "IKE_AUTH", "CHILD_CREATE"],
            Active::CreatingChild(creating) if creating.is_rekey() => vec!["CHILD_REKEY"],
            Active::CreatingChild(_) => vec!["CHILD_CREATE"],
            Active::Rekeying(_) => vec!["IKE_REKEY"],
            Active::DeletingChild(_) => vec!["CHILD_DELETE"],
            Active::DeletingIke => vec!["IKE_DELETE"],
            Active::Probing => vec!["IKE_DPD"],
            Active::Moving(_) | Active::Proving(_) => vec!["IKE_MOBIKE"],
        }
    }

    fn passive_tasks(&self) -> Vec<&'static str> {
        match &self.passive {
            Passive::Idle => Vec::new(),
            Passive::Responding(_) => vec!["IKE_INIT", "IKE_NATD", "IKE_AUTH", "CHILD_CREATE"],
            Passive::CreatingChild(answering) if answering.is_rekey() => vec!["CHILD_REKEY"],
            Passive::CreatingChild(_) => vec!["CHILD_CREATE"],
            Passive::Rekeying(_) => vec!["IKE_REKEY"],
            Passive::Postponed(_) => vec!["CHILD_REKEY"],
            Passive::Leaving(_) => vec!["IKE_DELETE"],
        }
    }

    /// Hands the answer to an action to what awaits it. Returns the answer if nothing does.
    pub(crate) fn handle_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        slot: Slot,
        token: Token,
        answer: Answer,
    ) -> Option<Answer> {
        if self.dead {
            return Some(answer);
        }
        let left = match slot {
            Slot::Active => match std::mem::replace(&mut self.active, Active::Idle) {
                Active::Initiating(state) => {
                    self.initiating_answer(env, now, *state, token, answer)
                }
                Active::CreatingChild(state) => {
                    self.creating_answer(env, now, *state, token, answer)
                }
                Active::Rekeying(state) => self.rekeying_answer(env, now, *state, token, answer),
                other => {
                    self.active = other;
                    Some(answer)
                }
            },
            Slot::Passive => match std::mem::replace(&mut self.passive, Passive::Idle) {
                Passive::Responding(state) => {
                    self.responding_answer(env, now, *state, token, answer)
                }
                Passive::CreatingChild(state) => {
                    self.answering_answer(env, now, *state, token, answer)
                }
                Passive::Rekeying(state) => {
                    self.rekey_answering_answer(env, now, *state, token, answer)
                }
                Passive::Leaving(waiting) => {
                    self.led_away(env, now, waiting, token);
                    None
                }
                Passive::Idle => Some(answer),
                Passive::Postponed(payloads) => {
                    self.passive = Passive::Postponed(payloads);
                    Some(answer)
                }
            },
            Slot::Child(id) => self.child_answer(env, now, id, answer),
            Slot::Path => {
                if let Answer::Source(source) = answer {
                    self.path_answer(env, now, token, source);
                }
                None
            }
            Slot::Unbound(id) => {
                self.enqueue(Task::DeleteChild(id));
                None
            }
        };
        self.proceed(env, now);
        left
    }

    /// An operation for a child outside of exchanges was answered.
    fn child_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        answer: Answer,
    ) -> Option<Answer> {
        let error = match answer {
            Answer::Plane(Err(error)) => error,
            Answer::Usage(ago) => {
                self.usage_told(env, now, id, ago);
                return None;
            }
            _ => return None,
        };
        let child = self.children.get_mut(&id)?;
        child.refused = true;
        let (connection, name) = (child.conn.name.clone(), child.cfg().name.clone());
        self.log(
            env,
            LogGroup::Knl,
            0,
            format!("CHILD_SA {name}{{{id}}} could not be put to use: {error}"),
        );
        let reason = FailureReason::DataPlane;
        env.count(Some(connection.clone()), Counter::Failure(reason));
        env.event(Event::Failure {
            connection: Some(connection),
            child: Some(name),
            reason,
            text: error.to_string(),
        });
        self.unbind_policies(env, id);
        self.queue_task(env, now, Task::DeleteChild(id));
        None
    }

    /// Logs something about this IKE SA.
    pub(crate) fn log(
        &self,
        env: &mut Env,
        group: LogGroup,
        level: u8,
        message: impl Into<String>,
    ) {
        let name = self
            .connection_name()
            .unwrap_or_else(|| "(unnamed)".to_owned());
        env.event(Event::Log(LogLine {
            group,
            level,
            ike_sa: Some((name, self.id)),
            message: message.into(),
        }));
    }

    /// Tells that listings show something else now.
    pub(crate) fn changed(&self, env: &mut Env) {
        env.event(Event::Changed(self.id));
    }

    /// `192.0.2.1[gw.example.org]` of the peer, for logs.
    pub(crate) fn peer_text(&self) -> String {
        format!(
            "{}[{}]",
            self.remote.ip(),
            display_identity(&self.remote_id)
        )
    }
}
