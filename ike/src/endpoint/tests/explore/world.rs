// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One state of the explored space: two endpoints, their data planes, and what is in flight; and
//! all that can happen next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::{Direction, Op, SaId};
use swanherd_ipsec::proposal::IkeSuite;

use super::plane::FakePlane;
use super::scenario::{Budget, Deed, Scenario, Which};
use crate::api::{
    Action, Command, CommandId, Datagram, Event, IkeSaId, IkeState, Job, Now, Selector, Settings,
    Token, Transmit,
};
use crate::crypto::{IkeKeys, Provider};
use crate::endpoint::Endpoint;
use crate::endpoint::tests::harness;
use crate::sa::view::{View, open_as_peer};
use crate::sa::{Active, IkeSa};
use crate::wire::{
    DeletePayload, ExchangeType, Header, Message, NotifyPayload, NotifyType, Payload,
};

/// The sides, by index.
pub(super) const ALICE: usize = 0;
pub(super) const BOB: usize = 1;
const NAMES: [&str; 2] = ["alice", "bob"];

/// Something that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Happening {
    /// The scenario's n-th deed.
    Deed(usize),
    /// The n-th oldest datagram on its way to a host arrives.
    Deliver(usize, usize),
    /// It is lost.
    Lose(usize, usize),
    /// It arrives, and will arrive again.
    Double(usize, usize),
    /// A host's next timer fires.
    Tick(usize),
    /// A host's data plane carries out its next operation.
    Plane(usize),
    /// A host's n-th computation is done.
    Computed(usize, usize),
}

/// Something that happens, and how the dice fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Step {
    pub(super) what: Happening,
    /// A nonce that is drawn on this occasion is lower than all before rather than higher.
    pub(super) low: bool,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = |host: usize| if host == ALICE { 'A' } else { 'B' };
        match self.what {
            Happening::Deed(n) => write!(f, "c{n}")?,
            Happening::Deliver(to, n) => write!(f, "d{}{n}", host(to))?,
            Happening::Lose(to, n) => write!(f, "x{}{n}", host(to))?,
            Happening::Double(to, n) => write!(f, "2{}{n}", host(to))?,
            Happening::Tick(at) => write!(f, "t{}", host(at))?,
            Happening::Plane(at) => write!(f, "p{}", host(at))?,
            Happening::Computed(at, n) => write!(f, "j{}{n}", host(at))?,
        }
        if self.low { write!(f, "-") } else { Ok(()) }
    }
}

impl std::str::FromStr for Step {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is no step of a schedule");
        let (body, low) = match text.strip_suffix('-') {
            Some(body) => (body, true),
            None => (text, false),
        };
        let mut chars = body.chars();
        let kind = chars.next().ok_or_else(bad)?;
        if kind == 'c' {
            let n = chars.as_str().parse().map_err(|_| bad())?;
            let what = Happening::Deed(n);
            return Ok(Self { what, low });
        }
        let host = match chars.next() {
            Some('A') => ALICE,
            Some('B') => BOB,
            _ => return Err(bad()),
        };
        let number = chars.as_str().parse::<usize>();
        let what = match (kind, number) {
            ('t', _) if chars.as_str().is_empty() => Happening::Tick(host),
            ('p', _) if chars.as_str().is_empty() => Happening::Plane(host),
            ('d', Ok(n)) => Happening::Deliver(host, n),
            ('x', Ok(n)) => Happening::Lose(host, n),
            ('2', Ok(n)) => Happening::Double(host, n),
            ('j', Ok(n)) => Happening::Computed(host, n),
            _ => return Err(bad()),
        };
        Ok(Self { what, low })
    }
}

/// A datagram on its way.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) datagram: Datagram,
    pub(super) header: Header,
    /// What is in it.
    pub(super) content: View,
    pub(super) text: String,
}

/// Suite and keys of an IKE SA, and whether this side initiated it.
type Known = (IkeSuite, IkeKeys, bool);

/// One side.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) endpoint: Rc<Endpoint>,
    pub(super) plane: Rc<FakePlane>,
    /// Operations that the data plane has still to carry out.
    pub(super) ops: VecDeque<(Token, Op)>,
    pub(super) jobs: Vec<(Token, Job)>,
    /// Deeds by command, and whether they have ended.
    pub(super) commands: BTreeMap<CommandId, bool>,
    /// SPIs that could be received by at some time.
    pub(super) received_by: Rc<BTreeSet<u32>>,
    /// How often children were said to be up, and down.
    pub(super) told: (u32, u32),
    /// How often the child `net` was said to be down.
    pub(super) outages: u32,
    /// Nobody waits for the end of an IKE SA any more that the peer may still have.
    pub(super) gave_up: bool,
    /// The IKE SA for whose end nobody waits any more.
    impatient: Option<IkeSaId>,
    /// The last response for each IKE SA, by its SPIs.
    pub(super) answered: BTreeMap<(u64, u64), Rc<Packet>>,
    /// Keys of all IKE SAs that there ever were.
    keys: Rc<BTreeMap<(u64, u64), Known>>,
}

impl Host {
    /// Whether the data plane has still to carry out the removal of an SA.
    pub(super) fn removes(&self, id: SaId) -> bool {
        let removal = |(_, op): &(Token, Op)| matches!(op, Op::RemoveSa(sa) if *sa == id);
        self.ops.iter().any(removal)
    }
}

/// What sides have said in some message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) temporary_failure: bool,
    pub(super) child_sa_not_found: bool,
    pub(super) other_refusal: bool,
}

impl Said {
    pub(super) const ALL: Self = Self {
        temporary_failure: true,
        child_sa_not_found: true,
        other_refusal: true,
    };

    pub(super) fn include(&mut self, other: Self) {
        self.temporary_failure |= other.temporary_failure;
        self.child_sa_not_found |= other.child_sa_not_found;
        self.other_refusal |= other.other_refusal;
    }

    fn hear(&mut self, payloads: &[Payload]) {
        for payload in payloads {
            let Payload::Notify(notify) = payload else {
                continue;
            };
            match notify.notify_type {
                NotifyType::TemporaryFailure => self.temporary_failure = true,
                NotifyType::ChildSaNotFound => self.child_sa_not_found = true,
                other if other.is_error() => self.other_refusal = true,
                _ => {}
            }
        }
    }
}

/// A state.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) scenario: &'static Scenario,
    pub(super) hosts: [Host; 2],
    pub(super) now: Now,
    /// On the way to each host, oldest first.
    pub(super) wire: [Vec<Rc<Packet>>; 2],
    /// Deeds that are done.
    pub(super) done: Vec<bool>,
    /// What may still go wrong.
    pub(super) left: Budget,
    /// What was said on the way here.
    pub(super) said: Said,
    nonces: u64,
    /// What was said and done, if anybody wants to know.
    pub(super) story: Option<Vec<String>>,
}

impl World {
    /// Alice and Bob with their tunnel up, nothing under way.
    pub(super) fn new(scenario: &'static Scenario, budget: Budget) -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "any origin of virtual time will do, and std has no other way to make one"
        )]
        let origin = Instant::now();
        let host = |seed: u8| {
            let mut endpoint = Endpoint::new(Settings::default(), Provider::fake(), [seed; 32]);
            endpoint.set_credentials(harness::psk_credentials("secret"));
            Host {
                endpoint: Rc::new(endpoint),
                plane: Rc::new(FakePlane::new(0xc000_0000 + 0x0100_0000 * u32::from(seed))),
                ops: VecDeque::new(),
                jobs: Vec::new(),
                commands: BTreeMap::new(),
                received_by: Rc::default(),
                told: (0, 0),
                outages: 0,
                gave_up: false,
                impatient: None,
                answered: BTreeMap::new(),
                keys: Rc::default(),
            }
        };
        let mut world = Self {
            scenario,
            hosts: [host(1), host(2)],
            now: Now {
                instant: origin,
                unix: 1_800_000_000,
            },
            wire: [Vec::new(), Vec::new()],
            done: vec![false; scenario.deeds.len()],
            left: budget,
            said: Said::default(),
            nonces: 0,
            story: None,
        };
        let connections = [harness::alice(), harness::bob()];
        for (host, mut conn) in connections.into_iter().enumerate() {
            conn.rekey_time = Duration::ZERO;
            let other = ["10.3.0.0/16", "10.4.0.0/16"];
            conn.children
                .push(harness::child("other", other[host], other[1 - host]));
            for child in &mut conn.children {
                child.rekey_time = Duration::ZERO;
                child.life_time = Duration::ZERO;
                child.proposals = vec![harness::esp_proposal(scenario.methods)];
            }
            let now = world.now;
            let endpoint = Rc::make_mut(&mut world.hosts[host].endpoint);
            endpoint.load_connection(now, Arc::new(conn));
            world.collect(host);
        }
        world.command(ALICE, harness::initiate("gw", "net"));
        world
            .settle(200, |_| Ok(false))
            .expect("an undisturbed handshake ends");
        world.left = budget;
        world.said = Said::default();
        for host in &mut world.hosts {
            assert_eq!(host.told, (1, 0), "the tunnel is up");
            host.told = (0, 0);
            host.commands.clear();
        }
        for (host, mutant) in [ALICE, BOB].into_iter().zip(scenario.mutants) {
            Rc::make_mut(&mut world.hosts[host].endpoint).env.mutant = mutant;
        }
        world
    }

    /// What can happen next.
    pub(super) fn possible(&self) -> Vec<Happening> {
        let mut found = Vec::new();
        let distinct = |host: usize| {
            let wire = &self.wire[host];
            (0..wire.len()).filter(move |&n| {
                let this = &wire[n].datagram.payload;
                wire[..n]
                    .iter()
                    .all(|other| other.datagram.payload != *this)
            })
        };
        for host in [ALICE, BOB] {
            found.extend(distinct(host).map(|n| Happening::Deliver(host, n)));
            if !self.hosts[host].ops.is_empty() {
                found.push(Happening::Plane(host));
            }
            let jobs = self.hosts[host].jobs.len();
            found.extend((0..jobs).map(|n| Happening::Computed(host, n)));
        }
        // Of deeds that are alike, the first is done first.
        let deeds = self.scenario.deeds;
        for n in 0..deeds.len() {
            let twin = (0..n).any(|m| !self.done[m] && deeds[m] == deeds[n]);
            if !self.done[n] && !twin && self.can_do(n) {
                found.push(Happening::Deed(n));
            }
        }
        let quiet = self.is_quiet();
        // Seconds do not pass while a data plane or a computation is at work.
        let working = |host: &Host| !(host.ops.is_empty() && host.jobs.is_empty());
        let idle = !self.hosts.iter().any(working);
        let due = |host: usize| Some((self.hosts[host].endpoint.poll_timeout()?, host));
        let first = [ALICE, BOB].into_iter().filter_map(due).min();
        for (at, host) in [ALICE, BOB].into_iter().filter_map(due) {
            let Some((next, turn)) = first else {
                continue;
            };
            let free = quiet && turn == host;
            // No host sleeps for longer than it was to wait anyway.
            let wait = |at: Instant| at.saturating_duration_since(self.now.instant);
            let bearable = turn == host || wait(at) <= 2 * wait(next);
            if free || (self.left.early > 0 && bearable && idle) {
                found.push(Happening::Tick(host));
            }
        }
        for host in [ALICE, BOB] {
            if self.left.lost > 0 {
                found.extend(distinct(host).map(|n| Happening::Lose(host, n)));
            }
            if self.left.doubled > 0 {
                found.extend(distinct(host).map(|n| Happening::Double(host, n)));
            }
        }
        found
    }

    /// Whether nothing is under way, so that only time can change anything.
    pub(super) fn is_quiet(&self) -> bool {
        self.wire.iter().all(Vec::is_empty)
            && self
                .hosts
                .iter()
                .all(|host| host.ops.is_empty() && host.jobs.is_empty())
    }

    /// Whether nothing will ever happen by itself again.
    pub(super) fn is_over(&self) -> bool {
        let timers = |host: &Host| host.endpoint.poll_timeout().is_some();
        self.is_quiet() && !self.hosts.iter().any(timers)
    }

    /// Lets something happen. False if it is not possible now. Tells whether dice were thrown.
    pub(super) fn step(&mut self, step: Step) -> Option<bool> {
        if !self.possible().contains(&step.what) {
            return None;
        }
        Some(self.happen(step))
    }

    /// As [`Self::step`], for what is known to be possible.
    pub(super) fn happen(&mut self, step: Step) -> bool {
        let middle = 1_u64 << 62;
        let lead = if step.low {
            middle - self.nonces - 1
        } else {
            middle + self.nonces + 1
        };
        if self.story.is_some() {
            let text = self.describe(step.what);
            self.note(format!("[{step}] {text}"));
        }
        let now = self.now;
        match step.what {
            Happening::Deed(n) => {
                self.done[n] = true;
                let (host, deed) = self.scenario.deeds[n];
                self.with(host, lead, |_, _| {});
                self.perform(host, deed);
            }
            Happening::Deliver(to, n) => {
                let packet = self.wire[to].remove(n);
                self.arrive(to, lead, &packet);
            }
            Happening::Lose(to, n) => {
                self.wire[to].remove(n);
                self.left.lost -= 1;
            }
            Happening::Double(to, n) => {
                let packet = self.wire[to][n].clone();
                self.left.doubled -= 1;
                self.arrive(to, lead, &packet);
            }
            Happening::Tick(host) => {
                let other = self.hosts[1 - host].endpoint.poll_timeout();
                let due = self.hosts[host].endpoint.poll_timeout();
                let due = due.expect("a timer that fires is armed");
                let in_turn = other.is_none_or(|other| (due, host) < (other, 1 - host));
                if !(self.is_quiet() && in_turn) {
                    self.left.early -= 1;
                }
                self.now.instant = self.now.instant.max(due);
                let now = self.now;
                self.with(host, lead, |endpoint, _| endpoint.handle_timeout(now));
            }
            Happening::Plane(host) => {
                let (token, op) = self.hosts[host]
                    .ops
                    .pop_front()
                    .expect("an operation waits");
                let answer = self.apply(host, op);
                self.with(host, lead, |endpoint, _| {
                    endpoint.handle_plane(now, token, answer);
                });
            }
            Happening::Computed(host, n) => {
                let (token, job) = self.hosts[host].jobs.remove(n);
                self.with(host, lead, |endpoint, _| {
                    endpoint.handle_computed(now, token, job.run());
                });
            }
        }
        let mut threw = false;
        for host in &mut self.hosts {
            if host.endpoint.env.nonces > 0 {
                let env = &mut Rc::make_mut(&mut host.endpoint).env;
                self.nonces += u64::from(env.nonces);
                env.nonces = 0;
                env.nonce_lead = None;
                threw = true;
            }
        }
        threw
    }

    /// Delivers everything in order and lets time pass until nothing happens any more. `check`
    /// looks at each state, and says if there is no need to go on.
    ///
    /// # Errors
    /// If rest does not come to pass within so many steps, or `check` fails.
    pub(super) fn settle(
        &mut self,
        limit: usize,
        mut check: impl FnMut(&Self) -> Result<bool, String>,
    ) -> Result<(), String> {
        self.left = Budget::NONE;
        for _ in 0..limit {
            let Some(what) = self
                .possible()
                .into_iter()
                .find(|what| !matches!(what, Happening::Deed(_)))
            else {
                return Ok(());
            };
            self.happen(Step { what, low: false });
            if check(self)? {
                return Ok(());
            }
        }
        Err(format!("no rest after {limit} more steps without loss"))
    }

    fn arrive(&mut self, to: usize, lead: u64, packet: &Packet) {
        let now = self.now;
        let datagram = packet.datagram.clone();
        self.with(to, lead, |endpoint, _| {
            endpoint.handle_datagram(now, datagram)
        });
    }

    /// Lets an endpoint work, and sees to what it wants done.
    fn with(&mut self, host: usize, lead: u64, work: impl FnOnce(&mut Endpoint, Now)) {
        let now = self.now;
        let endpoint = Rc::make_mut(&mut self.hosts[host].endpoint);
        endpoint.env.nonce_lead = Some(lead.to_be_bytes());
        work(endpoint, now);
        self.collect(host);
    }

    fn command(&mut self, host: usize, command: Command) {
        let now = self.now;
        let state = &mut self.hosts[host];
        let id = CommandId::try_from(state.commands.len() + 1).expect("there are few");
        state.commands.insert(id, false);
        Rc::make_mut(&mut state.endpoint).command(now, id, command);
        self.collect(host);
    }

    /// Whether a deed makes sense now.
    fn can_do(&self, n: usize) -> bool {
        let (host, deed) = self.scenario.deeds[n];
        match deed {
            Deed::RekeyAgain => self.hosts[host].endpoint.sas.values().any(|sa| {
                let mut children = sa.children.values();
                is_free(sa) && children.any(|child| child.replaced_by.is_some())
            }),
            Deed::DeleteUnknown => self.hosts[host].endpoint.sas.values().any(|sa| is_free(sa)),
            _ => true,
        }
    }

    fn perform(&mut self, host: usize, deed: Deed) {
        let child = |name: &str| Selector {
            ike: Some("gw".to_owned()),
            child: Some(name.to_owned()),
            ..Selector::default()
        };
        let ike = Selector {
            ike: Some("gw".to_owned()),
            ..Selector::default()
        };
        match deed {
            Deed::Rekey(which) => {
                let selector = match which {
                    Which::Child => child("net"),
                    Which::Ike => ike,
                };
                let reauth = false;
                self.command(host, Command::Rekey { selector, reauth });
            }
            Deed::Terminate(which) => {
                let selector = match which {
                    Which::Child => child("net"),
                    Which::Ike => ike,
                };
                let force = false;
                self.command(host, Command::Terminate { selector, force });
            }
            Deed::Initiate => self.command(host, harness::initiate("gw", "other")),
            Deed::Fail(kind) => {
                let plane = Rc::make_mut(&mut self.hosts[host].plane);
                plane.failing.push((kind, 1));
            }
            Deed::RekeyAgain => self.send_of_own_accord(host, |spi_old| {
                let mut payloads = vec![Payload::Notify(NotifyPayload::for_child(
                    NotifyType::RekeySa,
                    swanherd_ipsec::ProtocolId::Esp,
                    spi_old,
                ))];
                payloads.extend(super::scenario::any_child_offer());
                (ExchangeType::CreateChildSa, payloads)
            }),
            Deed::DeleteUnknown => self.send_of_own_accord(host, |_| {
                let delete = Payload::Delete(DeletePayload::Child {
                    protocol: swanherd_ipsec::ProtocolId::Esp,
                    spis: vec![0xdead_beef],
                });
                (ExchangeType::Informational, vec![delete])
            }),
        }
    }

    /// A request that no endpoint makes by itself, in the name of the oldest child.
    fn send_of_own_accord(
        &mut self,
        host: usize,
        make: impl FnOnce(u32) -> (ExchangeType, Vec<Payload>),
    ) {
        let now = self.now;
        let endpoint = Rc::make_mut(&mut self.hosts[host].endpoint);
        let replaced = |sa: &IkeSa| {
            let child = sa
                .children
                .values()
                .find(|child| child.replaced_by.is_some());
            child.map(|child| child.spi_in)
        };
        let free = endpoint.sas.values().filter(|sa| is_free(sa));
        let sender = free.max_by_key(|sa| replaced(sa).is_some()).map(|sa| sa.id);
        let Some(id) = sender else {
            return;
        };
        endpoint.with(id, |sa, env| {
            let (exchange, payloads) = make(replaced(sa).unwrap_or(0));
            sa.send_request(env, now, exchange, &payloads);
            // What comes back is of no interest.
            sa.active = Active::Probing;
        });
        endpoint.settle(now);
        self.collect(host);
    }

    fn apply(&mut self, host: usize, op: Op) -> crate::api::PlaneAnswer {
        let state = &mut self.hosts[host];
        if self.scenario.faults[host].is_some_and(|fault| fault.swallows(&op)) {
            return Ok(swanherd_ipsec::plane::Outcome::Done);
        }
        if let Op::InstallSa(entry) = &op
            && entry.direction == Direction::In
        {
            Rc::make_mut(&mut state.received_by).insert(entry.spi);
        }
        let text = self.story.is_some().then(|| format!("{op:?}"));
        let answer = Rc::make_mut(&mut state.plane).apply(op);
        if let Some(mut text) = text {
            text.truncate(text.find(" {").unwrap_or(text.len()));
            let text = format!("{} plane: {text}: {answer:?}", NAMES[host]);
            self.note(text);
        }
        answer
    }

    /// Does what an endpoint wants done, or leaves it for later steps.
    fn collect(&mut self, host: usize) {
        self.note_keys(host);
        while let Some(action) = self.next_action(host) {
            match action {
                Action::Transmit(transmit) => self.transmit(host, transmit),
                Action::Plane(token, op) if self.scenario.slow => {
                    self.hosts[host].ops.push_back((token, op));
                }
                Action::Plane(token, op) => {
                    let answer = self.apply(host, op);
                    let now = self.now;
                    let endpoint = Rc::make_mut(&mut self.hosts[host].endpoint);
                    endpoint.handle_plane(now, token, answer);
                }
                Action::Compute(token, job) if self.scenario.slow => {
                    self.hosts[host].jobs.push((token, job));
                }
                Action::Compute(token, job) => {
                    let now = self.now;
                    let endpoint = Rc::make_mut(&mut self.hosts[host].endpoint);
                    endpoint.handle_computed(now, token, job.run());
                }
                Action::Usage(..) => unreachable!("no inactivity is configured"),
                Action::Resolve(..) => unreachable!("no names are configured"),
                Action::Source(token, _) => {
                    let now = self.now;
                    let own = own_address(host);
                    let endpoint = Rc::make_mut(&mut self.hosts[host].endpoint);
                    endpoint.handle_source(now, token, Some(own));
                }
                Action::Event(event) => self.heard(host, &event),
            }
        }
        self.note_keys(host);
    }

    fn next_action(&mut self, host: usize) -> Option<Action> {
        let endpoint = &mut self.hosts[host].endpoint;
        if endpoint.env.actions.is_empty() {
            return None;
        }
        Rc::make_mut(endpoint).poll_action()
    }

    fn heard(&mut self, host: usize, event: &Event) {
        let state = &mut self.hosts[host];
        match event {
            Event::CommandDone { id, result } => {
                state.commands.insert(*id, true);
                let text = format!("{} command ended: {result:?}", NAMES[host]);
                self.note(text);
            }
            Event::ChildUpDown { up: true, .. } => state.told.0 += 1,
            Event::ChildUpDown { up: false, sa } => {
                state.told.1 += 1;
                let net = sa.children.values().any(|child| child.name == "net");
                state.outages += u32::from(net);
            }
            Event::IkeUpDown { up: false, sa } => {
                // One that has been replaced is not told of.
                state.gave_up |= state.impatient == Some(sa.id);
            }
            Event::Log(line) => {
                if line
                    .message
                    .ends_with("did not confirm the deletion in time")
                {
                    state.impatient = line.ike_sa.as_ref().map(|(_, id)| *id);
                }
                if self.story.is_some() && line.level <= 1 {
                    let text = format!("{} {}", NAMES[host], line.message);
                    self.note(text);
                }
            }
            _ => {}
        }
    }

    fn note_keys(&mut self, host: usize) {
        let state = &mut self.hosts[host];
        for sa in state.endpoint.sas.values() {
            let spis = (sa.spi_i, sa.spi_r);
            if let (Some(suite), Some(keys)) = (&sa.suite, &sa.keys)
                && !state.keys.contains_key(&spis)
            {
                let known = (*suite, keys.clone(), sa.initiator);
                Rc::make_mut(&mut state.keys).insert(spis, known);
            }
        }
    }

    fn transmit(&mut self, host: usize, transmit: Transmit) {
        let message = Message::parse(&transmit.payload).expect("endpoints send messages");
        let header = message.header;
        let payloads = self.open(host, &transmit.payload, message);
        self.said.hear(&payloads);
        let mut content = View::default();
        view_payloads(&payloads, &mut content);
        let text = if self.story.is_some() {
            Message { header, payloads }.to_string()
        } else {
            String::new()
        };
        let (own, peer) = (own_address(host), own_address(1 - host));
        let packet = Rc::new(Packet {
            datagram: Datagram {
                local: (peer, transmit.remote.port()).into(),
                remote: (own, transmit.local.port()).into(),
                payload: transmit.payload,
            },
            header,
            content,
            text,
        });
        if header.flags.response {
            let spis = (header.spi_i, header.spi_r);
            self.hosts[host].answered.insert(spis, packet.clone());
        }
        if self.story.is_some() {
            let text = format!("{} -> {}", NAMES[host], packet.text);
            self.note(text);
        }
        self.wire[1 - host].push(packet);
    }

    /// The payloads of a message that this host has sent.
    fn open(&self, host: usize, raw: &[u8], message: Message) -> Vec<Payload> {
        let spis = (message.header.spi_i, message.header.spi_r);
        let Some(Payload::Sk(sk)) = message.payloads.last() else {
            return message.payloads;
        };
        let Some((suite, keys, initiator)) = self.hosts[host].keys.get(&spis) else {
            return message.payloads;
        };
        open_as_peer(suite, keys, *initiator, raw, sk).unwrap_or(message.payloads)
    }

    fn describe(&self, what: Happening) -> String {
        let packet = |to: usize, n: usize| {
            let text = self.wire[to].get(n).map(|packet| packet.text.clone());
            format!("{} for {}", text.unwrap_or_default(), NAMES[to])
        };
        match what {
            Happening::Deed(n) => {
                let (host, deed) = self.scenario.deeds[n];
                format!("{}: {deed:?}", NAMES[host])
            }
            Happening::Deliver(to, n) => format!("arrives: {}", packet(to, n)),
            Happening::Lose(to, n) => format!("is lost: {}", packet(to, n)),
            Happening::Double(to, n) => format!("arrives, and will again: {}", packet(to, n)),
            Happening::Tick(host) => format!("time passes at {}", NAMES[host]),
            Happening::Plane(host) => format!("data plane of {}", NAMES[host]),
            Happening::Computed(host, n) => format!("computation {n} of {}", NAMES[host]),
        }
    }

    pub(super) fn note(&mut self, text: String) {
        if let Some(story) = &mut self.story {
            story.push(text);
        }
    }

    /// Established IKE SAs of a host.
    pub(super) fn established(&self, host: usize) -> impl Iterator<Item = &IkeSa> {
        let sas = self.hosts[host].endpoint.sas.values().map(|sa| &**sa);
        sas.filter(|sa| sa.state == IkeState::Established)
    }
}

/// Whether an IKE SA may send a request.
fn is_free(sa: &IkeSa) -> bool {
    sa.is_established() && matches!(sa.active, Active::Idle) && sa.outbound.in_flight.is_none()
}

/// Address of a host.
pub(super) fn own_address(host: usize) -> IpAddr {
    let text = [harness::ALICE, harness::BOB][host];
    text.parse().expect("it is a constant")
}

/// A fault of a data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlaneFault {
    /// Says that it has removed SAs, and keeps them.
    KeepsSas,
    /// Says that it has installed inbound SAs, and has not.
    LacksInbound,
}

impl PlaneFault {
    fn swallows(self, op: &Op) -> bool {
        match self {
            Self::KeepsSas => matches!(op, Op::RemoveSa(_)),
            Self::LacksInbound => {
                matches!(op, Op::InstallSa(entry) if entry.direction == Direction::In)
            }
        }
    }
}

fn view_payloads(payloads: &[Payload], out: &mut View) {
    for payload in payloads {
        match payload {
            Payload::Sa(sa) => {
                out.word(1_u8);
                for proposal in &sa.proposals {
                    match proposal.spi.as_slice() {
                        [] => out.word(0_u8),
                        &[a, b, c, d] => out.esp(u32::from_be_bytes([a, b, c, d])),
                        other => {
                            let spi = other.first_chunk::<8>().copied().unwrap_or_default();
                            out.spi(u64::from_be_bytes(spi));
                        }
                    }
                    out.text(&format!("{:?}", proposal.proposal));
                }
            }
            Payload::Nonce(nonce) => {
                out.word(2_u8);
                out.nonce(nonce.as_slice());
            }
            Payload::Ke(ke) => {
                out.word(3_u8);
                out.word(u16::from(ke.method));
            }
            Payload::Delete(DeletePayload::Child { spis, .. }) => {
                out.word(4_u8);
                for spi in spis {
                    out.esp(*spi);
                }
            }
            Payload::Notify(notify) => {
                out.word(5_u8);
                out.word(u16::from(notify.notify_type));
                match notify.spi.first_chunk::<4>() {
                    Some(spi) => out.esp(u32::from_be_bytes(*spi)),
                    None => out.word(0_u8),
                }
                out.text(&format!("{:?}", notify.data));
            }
            other => out.text(&format!("{other:?}")),
        }
    }
}
