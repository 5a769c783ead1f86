// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What all IKE SAs of an endpoint share, handed to each of them while it works.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use swanherd_ipsec::plane::{Op, Outcome, SaId};

use super::IkeSa;
use super::policies::PolicyBook;
use super::rivals::Rivals;
use super::standby::Standbys;
use crate::api::{
    Action, ChildSaId, Counter, Event, FailureReason, HostAddress, IkeSaId, LogGroup, LogLine,
    PlaneAnswer, Settings, Token,
};
use crate::compute::Job;
use crate::credentials::Credentials;
use crate::crypto::{Provider, Rng};
use crate::endpoint::connections::Connections;
use crate::endpoint::half_open::HalfOpen;
use crate::endpoint::keep::Cause;
use crate::wire::Gateway;

/// Length of nonces, which is at least half of the largest PRF key (RFC 7296 section 2.10).
const NONCE_LEN: usize = 32;

/// Which of the two things that an IKE SA may be doing waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// The exchange that this side initiated or prepares.
    Active,
    /// The peer's request that is being answered.
    Passive,
    /// A child outside of exchanges.
    Child(ChildSaId),
    /// The search for paths to the peer.
    Path,
    /// A child whose policies have been given to another.
    Unbound(ChildSaId),
}

/// What an answer is awaited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PendingKind {
    /// An SPI; if nobody wants it any more, it is given back.
    Spi {
        /// Its destination.
        dst: IpAddr,
    },
    /// Another operation of the data plane.
    Plane,
    /// A computation.
    Compute,
    /// Addresses of a name.
    Resolve(String),
    /// A source address.
    Source,
    /// When SAs were last used.
    Usage,
}

/// An [`Action`] that is to be answered.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// Whose.
    pub(crate) sa: IkeSaId,
    /// Which part of it.
    pub(crate) slot: Slot,
    /// What for.
    pub(crate) kind: PendingKind,
}

/// What an IKE SA wants of the endpoint.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Request {
    /// Take over the IKE SA that replaces another, or one that was set up for reauthentication.
    Adopt(Box<IkeSa>),
    /// It is established: run the uniqueness policy, tell who waits.
    Established(IkeSaId),
    /// A child is installed.
    ChildUp {
        /// Where.
        ike: IkeSaId,
        /// Connection.
        connection: String,
        /// Child.
        child: String,
    },
    /// A child could not be brought up.
    ChildFailed {
        /// Where.
        ike: IkeSaId,
        /// Connection.
        connection: String,
        /// Child.
        child: String,
        /// Why.
        reason: FailureReason,
        /// Why, for people.
        text: String,
        /// It was up before, and is to be up again whatever its actions say.
        insist: bool,
    },
    /// Bring up a child again after a loss; `after` lets something else happen first.
    Restart {
        /// Connection.
        connection: String,
        /// Child.
        child: String,
        /// Not before.
        after: Duration,
        /// Why.
        cause: Cause,
        /// Whether its actions, or whoever brought it up, want it to be up again. Those with a
        /// start action are brought up again in any case.
        insist: bool,
    },
    /// Install the trap of a child after a loss.
    Trap {
        /// Connection.
        connection: String,
        /// Child.
        child: String,
    },
    /// The peer authenticated as one that other IKE SAs are with; delete those.
    ReplaceOthers {
        /// The new one.
        keep: IkeSaId,
        /// It said INITIAL_CONTACT.
        initial_contact: bool,
    },
    /// See whether the peer of an IKE SA lives.
    Probe(IkeSaId),
    /// The outbound SA of a child has been put to use.
    InUse {
        /// Where.
        ike: IkeSaId,
        /// Which.
        child: ChildSaId,
    },
    /// An IKE SA has been replaced by reauthentication; delete it.
    FinishReauth {
        /// Which.
        old: IkeSaId,
    },
    /// Set up another IKE SA with these children, then delete this one.
    Reauthenticate {
        /// The old one.
        old: IkeSaId,
    },
    /// The peer sends this side to another gateway: set up what the old IKE SA was for there.
    Redirect {
        /// The old one.
        old: IkeSaId,
        /// Whom to go to.
        gateway: Gateway,
    },
}

/// A fault that tests give an endpoint.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Takes the highest of four nonces for the lowest.
    Nonces,
    /// Sends by a new CHILD SA before the peer has it.
    Hasty,
    /// Forgets the CHILD SA that the peer made in a collision when its own rekeying is refused.
    Forgetful,
}

/// Shared by all IKE SAs of an endpoint.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Env {
    pub(crate) settings: Settings,
    pub(crate) crypto: Provider,
    pub(crate) rng: Rng,
    pub(crate) credentials: Arc<Credentials>,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) pending: BTreeMap<Token, Pending>,
    pub(crate) requests: VecDeque<Request>,
    pub(crate) connections: Connections,
    pub(crate) policies: PolicyBook,
    /// CHILD SAs that wait for others to go.
    pub(crate) standbys: Standbys,
    /// Interface ids of connections, drawn for their traps.
    pub(crate) trap_if_ids: BTreeMap<String, (u32, u32)>,
    pub(crate) half_open: HalfOpen,
    /// Own SPIs.
    pub(crate) spis: BTreeMap<u64, IkeSaId>,
    /// Inbound and outbound SAs of children.
    pub(crate) by_sa: BTreeMap<SaId, (IkeSaId, ChildSaId)>,
    /// Established IKE SAs by own and peer's identity.
    pub(crate) rivals: Rivals,
    /// Addresses of this host that can be used; none if nobody told.
    pub(crate) hosts: BTreeMap<IpAddr, HostAddress>,
    /// Virtual addresses that peers are given.
    #[cfg(test)]
    pub(crate) given: Option<Vec<IpAddr>>,
    /// Where peers are sent in IKE_AUTH.
    #[cfg(test)]
    pub(crate) redirects: Option<Gateway>,
    /// What the next nonces begin with.
    #[cfg(test)]
    pub(crate) nonce_lead: Option<[u8; 8]>,
    /// How many nonces have begun with it.
    #[cfg(test)]
    pub(crate) nonces: u32,
    /// A fault of this endpoint, to see that it is found.
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
    /// The last operation that the data plane was given.
    pub(crate) issued: Token,
    next_token: Token,
    next_ike: IkeSaId,
    next_child: ChildSaId,
    next_unique: u32,
}

impl Env {
    pub(crate) fn new(settings: Settings, crypto: Provider, seed: [u8; 32]) -> Self {
        let mut rng = Rng::new(seed);
        let half_open = HalfOpen::new(&mut rng);
        let policies = PolicyBook::new(settings.reqid_base);
        Self {
            settings,
            crypto,
            rng,
            credentials: Arc::new(Credentials::default()),
            actions: VecDeque::new(),
            pending: BTreeMap::new(),
            requests: VecDeque::new(),
            connections: Connections::default(),
            policies,
            standbys: Standbys::default(),
            trap_if_ids: BTreeMap::new(),
            half_open,
            spis: BTreeMap::new(),
            by_sa: BTreeMap::new(),
            rivals: Rivals::default(),
            hosts: BTreeMap::new(),
            #[cfg(test)]
            given: None,
            #[cfg(test)]
            redirects: None,
            #[cfg(test)]
            nonce_lead: None,
            #[cfg(test)]
            nonces: 0,
            #[cfg(test)]
            mutant: None,
            issued: 0,
            next_token: 0,
            next_ike: 0,
            next_child: 0,
            next_unique: 0,
        }
    }

    pub(crate) fn new_ike_id(&mut self) -> IkeSaId {
        self.next_ike = self.next_ike.wrapping_add(1).max(1);
        self.next_ike
    }

    pub(crate) fn new_child_id(&mut self) -> ChildSaId {
        self.next_child = self.next_child.wrapping_add(1).max(1);
        self.next_child
    }

    /// A fresh value for `%unique` marks and interface ids.
    pub(crate) fn new_unique(&mut self) -> u32 {
        self.next_unique = self.next_unique.wrapping_add(1).max(1);
        self.next_unique
    }

    /// An own SPI that is not in use; it is taken by `sa` at once, so that a message that uses it
    /// is never early.
    pub(crate) fn new_spi(&mut self, sa: IkeSaId) -> u64 {
        loop {
            let spi = self.rng.spi();
            if let std::collections::btree_map::Entry::Vacant(entry) = self.spis.entry(spi) {
                entry.insert(sa);
                return spi;
            }
        }
    }

    /// A nonce for an exchange.
    pub(crate) fn nonce(&mut self) -> Vec<u8> {
        #[cfg_attr(not(test), expect(unused_mut, reason = "tests decide which is lower"))]
        let mut nonce = self.rng.bytes(NONCE_LEN);
        #[cfg(test)]
        if let Some(lead) = self.nonce_lead {
            nonce[..lead.len()].copy_from_slice(&lead);
            self.nonces += 1;
        }
        nonce
    }

    /// Whether this endpoint has that fault.
    #[cfg(test)]
    pub(crate) fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// A token that no action has yet.
    pub(crate) fn new_token(&mut self) -> Token {
        self.next_token += 1;
        self.next_token
    }

    /// Asks the data plane for something and awaits the answer.
    pub(crate) fn plane(&mut self, sa: IkeSaId, slot: Slot, op: Op) -> Token {
        let token = self.new_token();
        let kind = match &op {
            Op::AllocSpi { dst, .. } => PendingKind::Spi { dst: *dst },
            _ => PendingKind::Plane,
        };
        self.pending.insert(token, Pending { sa, slot, kind });
        self.issue(token, op);
        token
    }

    /// Hands an operation to the data plane, which answers in this order.
    pub(crate) fn issue(&mut self, token: Token, op: Op) {
        self.issued = token;
        self.actions.push_back(Action::Plane(token, op));
    }

    /// Asks the data plane for something that cannot fail in a way that matters here.
    pub(crate) fn plane_forget(&mut self, op: Op) {
        let token = self.new_token();
        self.issue(token, op);
    }

    /// Has something computed and awaits the result.
    pub(crate) fn compute(&mut self, sa: IkeSaId, slot: Slot, job: Job) -> Token {
        let token = self.new_token();
        let kind = PendingKind::Compute;
        self.pending.insert(token, Pending { sa, slot, kind });
        self.actions.push_back(Action::Compute(token, job));
        token
    }

    /// Has a name resolved.
    pub(crate) fn resolve(&mut self, sa: IkeSaId, name: String) -> Token {
        let token = self.new_token();
        let kind = PendingKind::Resolve(name.clone());
        let slot = Slot::Active;
        self.pending.insert(token, Pending { sa, slot, kind });
        self.actions.push_back(Action::Resolve(token, name));
        token
    }

    /// Has the source address towards `remote` found.
    pub(crate) fn source(&mut self, sa: IkeSaId, slot: Slot, remote: IpAddr) -> Token {
        let token = self.new_token();
        let kind = PendingKind::Source;
        self.pending.insert(token, Pending { sa, slot, kind });
        self.actions.push_back(Action::Source(token, remote));
        token
    }

    /// Has found out when a child's SAs were last used. Replaces an earlier question.
    pub(crate) fn usage(&mut self, sa: IkeSaId, child: ChildSaId, sas: Vec<SaId>) {
        let (slot, kind) = (Slot::Child(child), PendingKind::Usage);
        self.pending
            .retain(|_, other| other.slot != slot || other.kind != kind);
        let token = self.new_token();
        self.pending.insert(token, Pending { sa, slot, kind });
        self.actions.push_back(Action::Usage(token, sas));
    }

    /// The children of `old` are `new`'s: what is awaited for them is awaited by that.
    pub(crate) fn hand_over(&mut self, old: IkeSaId, new: IkeSaId) {
        for pending in self.pending.values_mut() {
            if pending.sa == old && matches!(pending.slot, Slot::Child(_) | Slot::Unbound(_)) {
                pending.sa = new;
            }
        }
    }

    /// Gives back what an answer brought that nobody wants any more.
    pub(crate) fn discard(&mut self, pending: &Pending, answer: &PlaneAnswer) {
        if let (PendingKind::Spi { dst }, Ok(Outcome::Spi(spi))) = (&pending.kind, answer) {
            let id = SaId {
                spi: *spi,
                dst: *dst,
            };
            self.plane_forget(Op::RemoveSa(id));
        }
    }

    pub(crate) fn event(&mut self, event: Event) {
        self.actions.push_back(Action::Event(event));
    }

    pub(crate) fn request(&mut self, request: Request) {
        self.requests.push_back(request);
    }

    pub(crate) fn count(&mut self, connection: Option<String>, counter: Counter) {
        self.event(Event::Counter {
            connection,
            counter,
        });
    }

    /// Logs something that is not about one IKE SA.
    pub(crate) fn log(&mut self, group: LogGroup, level: u8, message: impl Into<String>) {
        self.event(Event::Log(LogLine {
            group,
            level,
            ike_sa: None,
            message: message.into(),
        }));
    }
}

impl std::fmt::Debug for Env {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Env")
            .field("pending", &self.pending.len())
            .field("actions", &self.actions.len())
            .finish_non_exhaustive()
    }
}
