// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hosts, a network between them, and time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_config::model::Connection;
use swanherd_ike::api::{
    Action, ChildSaInfo, Command, CommandId, Counter, Datagram, Event, HostAddress, IkeSaInfo,
    IkeState, Input, Job, Now, Selector, Settings, Token, Transmit,
};
use swanherd_ike::credentials::Credentials;
use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_ike::record::Recorded;
use swanherd_ipsec::plane::{Direction, Op, PlaneEvent, SaId};

use crate::history::{History, describe, describe_op};
use crate::ledger::Ledger;
use crate::net::{Conditions, Network, SimRng};
use crate::plane::FakePlane;
use crate::traffic::Traffic;

/// Happenings at one moment before it is called an endless loop.
const MAX_AT_ONCE: u32 = 20_000;
/// Wall clock at the start: 2027-01-15.
const START_UNIX: u64 = 1_800_000_000;

pub(crate) const ALICE: usize = 0;
pub(crate) const BOB: usize = 1;

/// Something that is due at some time.
pub(crate) enum Happening {
    Arrival(usize, Datagram),
    Plane(usize, Token, Op),
    Computed(usize, Token, Job),
    Resolved(usize, Token, Vec<IpAddr>),
    Source(usize, Token, Option<IpAddr>),
    Usage(usize, Token, Option<Duration>),
    Expire(usize, SaId, bool),
    Packets,
    PacketArrival {
        to: usize,
        /// Where it seems to come from, if it is encapsulated.
        from: Option<SocketAddr>,
        spi: u32,
        dst: IpAddr,
    },
}

/// How a host's clocks differ from the world's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    /// How long the monotonic clock has stood still.
    pub(crate) lag: Duration,
    /// Seconds that the wall clock is ahead.
    pub(crate) ahead: i64,
}

/// One host: an endpoint and what surrounds it.
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) addr: IpAddr,
    /// Further addresses.
    pub(crate) more: Vec<IpAddr>,
    /// What the host's routing names as source towards any peer of that family.
    pub(crate) source: Option<IpAddr>,
    pub(crate) endpoint: Recorded,
    pub(crate) plane: FakePlane,
    /// Everything told, with the time, if the world keeps it.
    pub(crate) events: Vec<(Instant, Event)>,
    /// What has been told so far, as one who listens understands it.
    pub(crate) ledger: Ledger,
    pub(crate) clock: Clock,
    /// It neither does nor receives anything.
    pub(crate) off: bool,
    /// What would have happened meanwhile.
    frozen: Vec<Happening>,
    /// When the endpoint next wants to be called, by the world's clock.
    armed: Option<Instant>,
    restarts: u32,
    /// How long the data plane takes, in milliseconds.
    pub(crate) plane_delay: RangeInclusive<u64>,
    plane_busy_until: Instant,
    /// Operations that it has not carried out yet.
    plane_waiting: u32,
    /// How long a computation takes, in milliseconds.
    pub(crate) compute_delay: RangeInclusive<u64>,
    next_command: CommandId,
}

impl Host {
    /// Whether it receives at `addr`.
    pub(crate) fn has(&self, addr: IpAddr) -> bool {
        self.addr == addr || self.more.contains(&addr)
    }

    /// The source address towards `remote`.
    fn source_for(&self, remote: IpAddr) -> Option<IpAddr> {
        let fits = |addr: &IpAddr| addr.is_ipv4() == remote.is_ipv4();
        let others = || self.more.iter().copied().find(fits);
        let source = self.source?;
        Some(source).filter(fits).or_else(others)
    }

    /// IKE SAs as listed.
    pub(crate) fn ike_sas(&self) -> Vec<IkeSaInfo> {
        self.endpoint.ike_sas().collect()
    }

    /// Children of all IKE SAs as listed.
    pub(crate) fn children(&self) -> Vec<ChildSaInfo> {
        self.ike_sas()
            .into_iter()
            .flat_map(|sa| sa.children.into_values())
            .collect()
    }

    /// IKE SAs in that state.
    pub(crate) fn count(&self, state: IkeState) -> usize {
        self.ike_sas().iter().filter(|sa| sa.state == state).count()
    }

    /// How often a counter went up.
    pub(crate) fn counted(&self, wanted: Counter) -> usize {
        let is =
            |event: &Event| matches!(event, Event::Counter { counter, .. } if *counter == wanted);
        self.events.iter().filter(|(_, event)| is(event)).count()
    }

    /// Whether the data plane has done all that it was told.
    pub(crate) fn plane_is_idle(&self) -> bool {
        self.plane_waiting == 0
    }

    /// How a command ended, if it did.
    pub(crate) fn result(&self, command: CommandId) -> Option<Result<(), String>> {
        self.events.iter().find_map(|(_, event)| match event {
            Event::CommandDone { id, result } if *id == command => Some(result.clone()),
            _ => None,
        })
    }
}

/// A recording.
pub(crate) type Lines = Arc<std::sync::Mutex<Vec<String>>>;

/// Decides about one datagram.
type Filter = Box<dyn FnMut(&Transmit) -> bool>;

/// Everything.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) now: Now,
    pub(crate) net: Network,
    pub(crate) hosts: Vec<Host>,
    pub(crate) traffic: Traffic,
    pub(crate) rng: SimRng,
    queue: BTreeMap<(Instant, u64), Happening>,
    order: u64,
    /// The hosts by the time at which their endpoints want to be called.
    timers: BTreeSet<(Instant, usize)>,
    at_once: (Instant, u32),
    pub(crate) history: History,
    /// Whether hosts keep the events that they tell.
    pub(crate) keeps_events: bool,
    /// How much has happened.
    pub(crate) steps: u64,
    start: Instant,
    /// Sees every datagram that is sent; drops it by answering `false`.
    pub(crate) filter: Option<Filter>,
    /// Datagrams that were sent, if they are kept.
    pub(crate) tape: Option<Vec<Transmit>>,
}

impl World {
    /// Nobody, with default settings.
    pub(crate) fn empty(seed: u64) -> Self {
        #[allow(
            clippy::disallowed_methods,
            reason = "any origin of virtual time will do, and std has no other way to make one"
        )]
        let start = Instant::now();
        Self {
            seed,
            now: Now {
                instant: start,
                unix: START_UNIX,
            },
            net: Network::default(),
            hosts: Vec::new(),
            traffic: Traffic::default(),
            rng: SimRng::new(seed),
            queue: BTreeMap::new(),
            order: 0,
            timers: BTreeSet::new(),
            at_once: (start, 0),
            history: History::default(),
            keeps_events: true,
            steps: 0,
            start,
            filter: None,
            tape: None,
        }
    }

    /// Two hosts, Alice at 192.0.2.1 and Bob at 198.51.100.1, with default settings and a fake
    /// key exchange.
    pub(crate) fn new(seed: u64) -> Self {
        Self::with(seed, Settings::default(), Provider::fake())
    }

    pub(crate) fn with(seed: u64, settings: Settings, crypto: Provider) -> Self {
        let mut world = Self::empty(seed);
        world.add_host("alice", "192.0.2.1", settings.clone(), crypto);
        world.add_host("bob", "198.51.100.1", settings, crypto);
        world
    }

    pub(crate) fn add_host(
        &mut self,
        name: &str,
        addr: &str,
        settings: Settings,
        crypto: Provider,
    ) -> usize {
        let seed = self.rng.seed();
        let index = self.hosts.len();
        let first_spi = first_spi(index, 0);
        self.hosts.push(Host {
            name: name.to_owned(),
            addr: addr.parse().unwrap(),
            more: Vec::new(),
            source: Some(addr.parse().unwrap()),
            endpoint: Recorded::new(Endpoint::new(settings, crypto, seed)),
            plane: FakePlane::new(first_spi),
            events: Vec::new(),
            ledger: Ledger::default(),
            clock: Clock::default(),
            off: false,
            frozen: Vec::new(),
            armed: None,
            restarts: 0,
            plane_delay: 0..=2,
            plane_busy_until: self.now.instant,
            plane_waiting: 0,
            compute_delay: 0..=5,
            next_command: 0,
        });
        index
    }

    /// Has everything recorded that a host's endpoint is told and does, from the beginning.
    pub(crate) fn record(&mut self, host: usize) -> Lines {
        let seed = self.rng.seed();
        let lines = Lines::default();
        let kept = Arc::clone(&lines);
        let sink = move |line: String| {
            kept.lock().unwrap().push(line);
            true
        };
        let endpoint = &self.hosts[host].endpoint;
        assert_eq!(endpoint.poll_timeout(), None, "it has been used already");
        let endpoint = Endpoint::new(endpoint.settings().clone(), endpoint.crypto(), seed);
        self.hosts[host].endpoint =
            Recorded::recording(endpoint, self.now, "a test", Box::new(sink));
        lines
    }

    /// Forgets everything that a host's endpoint and data plane knew, as after a crash.
    pub(crate) fn restart(&mut self, host: usize, settings: Settings, crypto: Provider) {
        let seed = self.rng.seed();
        self.note(host, || "restarts".to_owned());
        let fresh = &mut self.hosts[host];
        fresh.restarts += 1;
        fresh.endpoint = Recorded::new(Endpoint::new(settings, crypto, seed));
        fresh.plane = FakePlane::new(first_spi(host, fresh.restarts));
        fresh.events.clear();
        fresh.ledger = Ledger::default();
        fresh.frozen.clear();
        fresh.plane_waiting = 0;
        fresh.off = false;
        self.queue.retain(|_, happening| match happening {
            Happening::Plane(at, ..)
            | Happening::Computed(at, ..)
            | Happening::Resolved(at, ..)
            | Happening::Source(at, ..)
            | Happening::Usage(at, ..)
            | Happening::Expire(at, ..) => *at != host,
            Happening::Arrival(..) | Happening::Packets | Happening::PacketArrival { .. } => true,
        });
        self.arm(host);
    }

    /// A host goes to sleep, or crashes; what of it wakes again is decided then.
    pub(crate) fn freeze(&mut self, host: usize) {
        self.note(host, || "stops".to_owned());
        self.hosts[host].off = true;
        self.arm(host);
    }

    /// A host wakes up after `slept`. Its monotonic clock may have stood still meanwhile.
    pub(crate) fn thaw(&mut self, host: usize, slept: Duration, stood_still: bool) {
        self.note(host, || format!("wakes up, stood still: {stood_still}"));
        let sleeper = &mut self.hosts[host];
        sleeper.off = false;
        if stood_still {
            sleeper.clock.lag += slept;
        }
        for happening in std::mem::take(&mut sleeper.frozen) {
            self.schedule(self.now.instant, happening);
        }
        self.arm(host);
    }

    /// A host's wall clock is set. The kernel counts the lifetimes of SAs by it.
    pub(crate) fn set_wall_clock(&mut self, host: usize, ahead: i64) {
        self.note(host, || format!("has its clock set to {ahead} s ahead"));
        self.hosts[host].clock.ahead = ahead;
        let now = self.kernel_time(host);
        for (id, hard) in self.hosts[host].plane.overdue(now) {
            self.schedule(self.now.instant, Happening::Expire(host, id, hard));
        }
    }

    /// What a host's own clocks show.
    pub(crate) fn at(&self, host: usize) -> Now {
        let clock = self.hosts[host].clock;
        Now {
            instant: self.now.instant - clock.lag,
            unix: self.now.unix.saturating_add_signed(clock.ahead),
        }
    }

    /// What the lifetimes of a host's SAs are counted by.
    fn kernel_time(&self, host: usize) -> i128 {
        let elapsed = i128::try_from(self.elapsed().as_nanos()).unwrap();
        elapsed + i128::from(self.hosts[host].clock.ahead) * 1_000_000_000
    }

    pub(crate) fn conditions(mut self, conditions: Conditions) -> Self {
        self.net.conditions = conditions;
        self
    }

    pub(crate) fn host(&self, host: usize) -> &Host {
        &self.hosts[host]
    }

    /// Loads credentials and a connection.
    pub(crate) fn load(&mut self, host: usize, credentials: &Credentials, connection: Connection) {
        let now = self.at(host);
        let endpoint = &mut self.hosts[host].endpoint;
        endpoint.handle(now, Input::Credentials(Arc::new(credentials.clone())));
        endpoint.handle(now, Input::Load(Arc::new(connection)));
        self.drain(host);
    }

    pub(crate) fn unload(&mut self, host: usize, connection: &str) {
        let now = self.at(host);
        self.note(host, || format!("unloads {connection}"));
        let endpoint = &mut self.hosts[host].endpoint;
        assert!(endpoint.has_connection(connection));
        endpoint.handle(now, Input::Unload(connection.to_owned()));
        self.drain(host);
    }

    pub(crate) fn command(&mut self, host: usize, command: Command) -> CommandId {
        let now = self.at(host);
        self.note(host, || format!("command {command:?}"));
        let host_state = &mut self.hosts[host];
        host_state.next_command += 1;
        let id = host_state.next_command;
        host_state.ledger.asked(id);
        host_state.endpoint.handle(now, Input::Command(id, command));
        self.drain(host);
        id
    }

    /// Nobody waits for a command any more.
    pub(crate) fn cancel(&mut self, host: usize, command: CommandId) {
        let now = self.at(host);
        let state = &mut self.hosts[host];
        state.endpoint.handle(now, Input::Cancel(command));
        state.ledger.cancelled(command);
        self.drain(host);
    }

    pub(crate) fn initiate(&mut self, host: usize, child: &str) -> CommandId {
        self.command(
            host,
            Command::Initiate {
                connection: None,
                child: Some(child.to_owned()),
                respect_limits: false,
            },
        )
    }

    pub(crate) fn terminate(&mut self, host: usize, selector: Selector) -> CommandId {
        let force = false;
        self.command(host, Command::Terminate { selector, force })
    }

    pub(crate) fn rekey(&mut self, host: usize, selector: Selector) -> CommandId {
        let reauth = false;
        self.command(host, Command::Rekey { selector, reauth })
    }

    pub(crate) fn shutdown(&mut self, host: usize) {
        let now = self.at(host);
        self.note(host, || "shuts down".to_owned());
        self.hosts[host].endpoint.handle(now, Input::Shutdown);
        self.drain(host);
    }

    /// A host has these addresses from now on, the first being what it sends from, and notices.
    pub(crate) fn set_addresses(&mut self, host: usize, addrs: &[&str]) {
        let now = self.at(host);
        let addrs: Vec<IpAddr> = addrs.iter().map(|addr| addr.parse().unwrap()).collect();
        self.note(host, || format!("has the addresses {addrs:?}"));
        let told: Vec<HostAddress> = (1..)
            .zip(&addrs)
            .map(|(link, addr)| HostAddress {
                addr: *addr,
                link,
                routed: true,
            })
            .collect();
        let state = &mut self.hosts[host];
        state.source = addrs.first().copied();
        if let Some((first, more)) = addrs.split_first() {
            state.addr = *first;
            state.more = more.to_vec();
        }
        state.endpoint.handle(now, Input::Addresses(told));
        state
            .endpoint
            .handle(now, Input::PlaneEvent(PlaneEvent::NetworkChanged));
        self.drain(host);
    }

    pub(crate) fn plane_event(&mut self, host: usize, event: PlaneEvent) {
        let now = self.at(host);
        self.note(host, || format!("plane event {event:?}"));
        self.hosts[host]
            .endpoint
            .handle(now, Input::PlaneEvent(event));
        self.drain(host);
    }

    /// Hands a datagram to a host at once, whoever made it.
    pub(crate) fn inject(&mut self, host: usize, datagram: Datagram) {
        let now = self.at(host);
        self.hosts[host]
            .endpoint
            .handle(now, Input::Datagram(datagram));
        self.drain(host);
    }

    /// Lets time pass until `done`, but no longer than `limit`; whether it came to be.
    pub(crate) fn run_until(
        &mut self,
        limit: Duration,
        mut done: impl FnMut(&Self) -> bool,
    ) -> bool {
        let end = self.now.instant + limit;
        for host in 0..self.hosts.len() {
            self.arm(host);
        }
        loop {
            if done(self) {
                return true;
            }
            if !self.step(end) {
                return false;
            }
        }
    }

    /// Lets time pass.
    pub(crate) fn run_for(&mut self, time: Duration) {
        self.run_until(time, |_| false);
    }

    /// Lets time pass until a command has ended, and returns how.
    pub(crate) fn finish(&mut self, host: usize, command: CommandId) -> Result<(), String> {
        let limit = Duration::from_secs(1200);
        if !self.run_until(limit, |world| world.host(host).result(command).is_some()) {
            panic!("command {command} of {} never ended", self.host(host).name);
        }
        self.host(host).result(command).unwrap()
    }

    /// The next thing that happens, if it does before `end`; else time is `end`.
    fn step(&mut self, end: Instant) -> bool {
        let timer = self.timers.first().copied();
        let queued = self.queue.first_key_value().map(|((at, _), _)| *at);
        let next = match (queued, timer) {
            (Some(at), Some((timer, _))) => at.min(timer),
            (Some(at), None) => at,
            (None, Some((timer, _))) => timer,
            (None, None) => {
                self.advance(end);
                return false;
            }
        };
        if next > end {
            self.advance(end);
            return false;
        }
        self.advance(next);
        self.steps += 1;
        if queued.is_some_and(|at| at <= next) {
            let (_, happening) = self.queue.pop_first().unwrap();
            self.happen(happening);
        } else if let Some((_, host)) = timer {
            let now = self.at(host);
            self.hosts[host].endpoint.handle(now, Input::Timeout);
            self.drain(host);
        }
        true
    }

    /// Notes when a host's endpoint next wants to be called.
    fn arm(&mut self, host: usize) {
        let state = &mut self.hosts[host];
        let next = state
            .endpoint
            .poll_timeout()
            .filter(|_| !state.off)
            .map(|at| at + state.clock.lag);
        if next != state.armed {
            if let Some(before) = state.armed {
                self.timers.remove(&(before, host));
            }
            state.armed = next;
            self.timers.extend(next.map(|at| (at, host)));
        }
    }

    fn advance(&mut self, to: Instant) {
        if to > self.now.instant {
            self.now.instant = to;
            self.now.unix = START_UNIX + (to - self.start).as_secs();
        }
        if self.at_once.0 == self.now.instant {
            self.at_once.1 += 1;
            assert!(self.at_once.1 < MAX_AT_ONCE, "time stands still");
        } else {
            self.at_once = (self.now.instant, 0);
        }
    }

    fn happen(&mut self, happening: Happening) {
        let host = match &happening {
            Happening::Arrival(host, _)
            | Happening::PacketArrival { to: host, .. }
            | Happening::Plane(host, ..)
            | Happening::Computed(host, ..)
            | Happening::Resolved(host, ..)
            | Happening::Source(host, ..)
            | Happening::Usage(host, ..)
            | Happening::Expire(host, ..) => *host,
            Happening::Packets => return self.packets(),
        };
        if self.hosts[host].off {
            match happening {
                Happening::Arrival(..) | Happening::PacketArrival { .. } | Happening::Packets => {}
                other => self.hosts[host].frozen.push(other),
            }
            return;
        }
        let now = self.at(host);
        match happening {
            Happening::Arrival(_, datagram) => {
                self.note(host, || {
                    format!("<- {} {}", datagram.remote, describe(&datagram.payload))
                });
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Datagram(datagram));
            }
            Happening::Plane(_, token, op) => self.operate(host, token, op),
            Happening::Computed(_, token, job) => {
                let endpoint = &mut self.hosts[host].endpoint;
                endpoint.handle(now, Input::Computed(token, job.run()));
            }
            Happening::Resolved(_, token, addrs) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Resolved(token, addrs));
            }
            Happening::Source(_, token, addr) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Source(token, addr));
            }
            Happening::Usage(_, token, ago) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Usage(token, ago));
            }
            Happening::Expire(_, id, hard) => return self.expire(host, id, hard),
            Happening::PacketArrival { from, spi, dst, .. } => {
                return self.packet_arrives(host, from, SaId { spi, dst });
            }
            Happening::Packets => {}
        }
        self.drain(host);
    }

    fn operate(&mut self, host: usize, token: Token, op: Op) {
        let expiry = match &op {
            Op::InstallSa(entry) => Some((entry.id(), entry.lifetime)),
            _ => None,
        };
        let text = self.history.is_on().then(|| describe_op(&op));
        let kernel_now = self.kernel_time(host);
        self.hosts[host].plane_waiting -= 1;
        let answer = self.hosts[host].plane.apply(op);
        if let Some(text) = text {
            self.note(host, || format!("plane: {text}: {answer:?}"));
        }
        if let (Some((id, lifetime)), Ok(_)) = (expiry, &answer) {
            for (after, hard) in [(lifetime.soft_time, false), (lifetime.hard_time, true)] {
                let Some(after) = after else { continue };
                let due = kernel_now + i128::try_from(after.as_nanos()).unwrap();
                self.hosts[host].plane.ends.insert((id, hard), due);
                let due = self.now.instant + after;
                self.schedule(due, Happening::Expire(host, id, hard));
            }
        }
        let now = self.at(host);
        self.hosts[host]
            .endpoint
            .handle(now, Input::Plane(token, answer));
    }

    /// A lifetime of an SA may be over.
    fn expire(&mut self, host: usize, id: SaId, hard: bool) {
        let now = self.kernel_time(host);
        let plane = &mut self.hosts[host].plane;
        let Some(&due) = plane.ends.get(&(id, hard)) else {
            return;
        };
        if due > now {
            // The clock was set back.
            let wait = Duration::from_nanos(u64::try_from(due - now).unwrap());
            return self.schedule(self.now.instant + wait, Happening::Expire(host, id, hard));
        }
        plane.ends.remove(&(id, hard));
        if hard {
            plane.expire(id);
        }
        self.plane_event(host, PlaneEvent::Expire { id, hard });
    }

    /// Does what the endpoint wants done.
    pub(crate) fn drain(&mut self, host: usize) {
        while let Some(action) = self.hosts[host].endpoint.poll_action() {
            let now = self.now.instant;
            match action {
                Action::Transmit(transmit) => self.transmit(host, transmit),
                Action::Plane(token, op) => {
                    let state = &mut self.hosts[host];
                    let due = now + self.rng.millis(&state.plane_delay);
                    // The data plane applies operations in order.
                    state.plane_waiting += 1;
                    state.plane_busy_until = state.plane_busy_until.max(due);
                    let due = state.plane_busy_until;
                    self.schedule(due, Happening::Plane(host, token, op));
                }
                Action::Compute(token, job) => {
                    let due = now + self.rng.millis(&self.hosts[host].compute_delay);
                    self.schedule(due, Happening::Computed(host, token, job));
                }
                Action::Resolve(token, name) if self.net.names.contains_key(&name) => {
                    let (delay, addrs) = self.net.names[&name].clone();
                    self.schedule(now + delay, Happening::Resolved(host, token, addrs));
                }
                Action::Resolve(token, name) => {
                    let wanted = name.strip_suffix(".example");
                    let addrs = self
                        .hosts
                        .iter()
                        .filter(|host| Some(&*host.name) == wanted)
                        .map(|host| host.addr)
                        .collect();
                    let due = now + Duration::from_millis(20);
                    self.schedule(due, Happening::Resolved(host, token, addrs));
                }
                Action::Source(token, remote) => {
                    let addr = self.hosts[host].source_for(remote);
                    self.schedule(now, Happening::Source(host, token, addr));
                }
                Action::Usage(token, sas) => {
                    let used = &self.hosts[host].plane.used;
                    let last = sas.iter().filter_map(|id| used.get(id)).max();
                    let ago = last.map(|at| now.saturating_duration_since(*at));
                    self.schedule(now, Happening::Usage(host, token, ago));
                }
                Action::Event(event) => self.told(host, event),
            }
        }
        self.arm(host);
    }

    fn told(&mut self, host: usize, event: Event) {
        if self.history.is_on() {
            match &event {
                Event::Log(line) => self.note(host, || {
                    let sa = line.ike_sa.as_ref();
                    let sa = sa.map_or_else(String::new, |(name, id)| format!(" {name}[{id}]"));
                    format!("{:?}{}{sa}: {}", line.group, line.level, line.message)
                }),
                Event::CommandDone { id, result } => {
                    self.note(host, || format!("command {id} ended: {result:?}"));
                }
                _ => {}
            }
        }
        let state = &mut self.hosts[host];
        if let Err(wrong) = state.ledger.take(&event) {
            panic!("{} tells nonsense: {wrong}", state.name);
        }
        if self.keeps_events {
            state.events.push((self.now.instant, event));
        }
    }

    fn transmit(&mut self, host: usize, transmit: Transmit) {
        if let Some(tape) = &mut self.tape {
            tape.push(transmit.clone());
        }
        let own = &self.hosts[host];
        let ip = if transmit.local.ip().is_unspecified() {
            own.addr
        } else {
            transmit.local.ip()
        };
        // An address that has just gone may still be in use for a moment.
        let gone = self.net.dead.contains(&ip);
        assert!(
            own.has(ip) || gone,
            "{} sends from the foreign address {ip}",
            own.name
        );
        let source = SocketAddr::new(ip, transmit.local.port());
        let mut fate = "";
        let passes = self.filter.as_mut().is_none_or(|filter| filter(&transmit));
        let packet_len = transmit.payload.len() + 28 + 4;
        if self.net.link_mtu.is_some_and(|mtu| packet_len > mtu) {
            let now = self.at(host);
            self.note(host, || {
                let text = describe(&transmit.payload);
                format!("-x {} {text} (refused)", transmit.remote)
            });
            self.hosts[host]
                .endpoint
                .handle(now, Input::TooLong(transmit));
            return;
        }
        let dead = &self.net.dead;
        if dead.contains(&ip) || dead.contains(&transmit.remote.ip()) {
            fate = " (dead)";
        } else if !passes {
            fate = " (filtered)";
        } else if self.net.cut {
            fate = " (cut)";
        }
        let elapsed = self.elapsed();
        let route = self.net.translate(source, transmit.remote, elapsed);
        let to = route.and_then(|(_, local)| self.host_at(local.ip()));
        let conditions = self.net.between(host, to);
        if fate.is_empty() {
            if packet_len > conditions.mtu {
                fate = " (too long)";
            } else if self.rng.chance(conditions.loss) {
                fate = " (lost)";
            } else if to.is_some_and(|to| self.net.is_cut(host, to)) {
                fate = " (cut off)";
            } else if to.is_none() {
                fate = " (to nobody)";
            }
        }
        let copies = 1 + u32::from(self.rng.chance(conditions.duplication));
        let delay = conditions.delay.clone();
        self.note(host, || {
            let text = if transmit.keepalive {
                "keepalive".to_owned()
            } else {
                describe(&transmit.payload)
            };
            format!("-> {} {text}{fate}", transmit.remote)
        });
        let (Some((remote, local)), Some(to)) = (route, to) else {
            return;
        };
        if !fate.is_empty() || transmit.keepalive {
            return;
        }
        for _ in 0..copies {
            let due = self.now.instant + self.rng.millis(&delay);
            let datagram = Datagram {
                local,
                remote,
                payload: transmit.payload.clone(),
            };
            self.schedule(due, Happening::Arrival(to, datagram));
        }
    }

    /// The host with that address.
    pub(crate) fn host_at(&self, addr: IpAddr) -> Option<usize> {
        self.hosts.iter().position(|host| host.has(addr))
    }

    pub(crate) fn schedule(&mut self, due: Instant, happening: Happening) {
        self.order += 1;
        self.queue.insert((due, self.order), happening);
    }

    /// Where the first NAT lets the outside reach a port inside.
    pub(crate) fn way_in(&mut self, inside: IpAddr, port: u16) -> SocketAddr {
        let now = self.elapsed();
        let nat = &mut self.net.nats[0];
        let port = nat.outside_port(SocketAddr::new(inside, port), now);
        SocketAddr::new(nat.outside, port)
    }

    /// Writes a line of history.
    pub(crate) fn note(&mut self, host: usize, text: impl FnOnce() -> String) {
        if self.history.is_on() {
            let at = self.elapsed();
            self.history.add(at, &self.hosts[host].name, &text());
        }
    }

    /// Seconds since the world began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.now.instant - self.start
    }

    /// SPIs of a host's inbound SAs.
    pub(crate) fn inbound_spis(&self, host: usize) -> Vec<u32> {
        let plane = &self.host(host).plane;
        plane.of(Direction::In).map(|sa| sa.spi).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() && self.history.is_on() {
            self.history.print();
            eprintln!("this was seed {0}: SWANHERD_SEED={0}", self.seed);
        }
    }
}

/// Where a host's SPIs begin: they differ between hosts, and from those before a restart.
fn first_spi(host: usize, restarts: u32) -> u32 {
    let host = u32::try_from(host).unwrap();
    0xc000_0000 + 0x0100_0000 * (host % 32) + 0x0002_0000 * (restarts % 128)
}

/// Runs a test for many seeds, or for `SWANHERD_SEED` only. `SWANHERD_SIM_SEEDS` is how many there
/// are where the default is a thousand.
pub(crate) fn for_seeds(count: u64, test: impl Fn(u64) + Sync) {
    if let Some(seed) = number_from("SWANHERD_SEED") {
        return test(seed);
    }
    let count =
        number_from("SWANHERD_SIM_SEEDS").map_or(count, |many| (count * many).div_ceil(1000));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for first in 0..threads {
            let test = &test;
            scope.spawn(move || {
                for seed in (first..count).step_by(usize::try_from(threads).unwrap()) {
                    test(seed);
                }
            });
        }
    });
}

pub(crate) fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|error| panic!("{variable}={text}: {error}")))
}
