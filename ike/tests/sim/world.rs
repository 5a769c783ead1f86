// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hosts, a network between them, and time.

use std::collections::{BTreeMap, VecDeque};
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
use swanherd_ike::wire::Message;
use swanherd_ipsec::plane::{Direction, Op, PlaneEvent, SaId};

use crate::net::{Conditions, Network, SimRng};
use crate::plane::FakePlane;

/// Lines of history that a failing test prints.
const HISTORY: usize = 400;
/// Happenings at one moment before it is called an endless loop.
const MAX_AT_ONCE: u32 = 20_000;
/// Wall clock at the start: 2027-01-15.
const START_UNIX: u64 = 1_800_000_000;
/// Time between packets of the traffic.
const PACKET_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) const ALICE: usize = 0;
pub(crate) const BOB: usize = 1;

/// Something that is due at some time.
enum Happening {
    Arrival(usize, Datagram),
    Plane(usize, Token, Op),
    Computed(usize, Token, Job),
    Resolved(usize, Token, Vec<IpAddr>),
    Source(usize, Token, Option<IpAddr>),
    Usage(usize, Token, Option<Duration>),
    Expire(usize, SaId, bool),
    Packets,
    PacketArrival { to: usize, spi: u32, dst: IpAddr },
}

/// One host: an endpoint and what surrounds it.
pub(crate) struct Host {
    pub(crate) name: &'static str,
    pub(crate) addr: IpAddr,
    /// Further addresses.
    pub(crate) more: Vec<IpAddr>,
    /// What the host's routing names as source towards any peer of that family.
    pub(crate) source: Option<IpAddr>,
    pub(crate) endpoint: Recorded,
    pub(crate) plane: FakePlane,
    /// Everything told, with the time.
    pub(crate) events: Vec<(Instant, Event)>,
    /// How long the data plane takes, in milliseconds.
    pub(crate) plane_delay: RangeInclusive<u64>,
    plane_busy_until: Instant,
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

    /// How a command ended, if it did.
    pub(crate) fn result(&self, command: CommandId) -> Option<Result<(), String>> {
        self.events.iter().find_map(|(_, event)| match event {
            Event::CommandDone { id, result } if *id == command => Some(result.clone()),
            _ => None,
        })
    }
}

/// Traffic through the tunnels, in both directions, and how much of it arrived.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    /// No SA to send with.
    pub(crate) blocked: u64,
    /// No SA to receive with.
    pub(crate) refused: u64,
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
    traffic_on: bool,
    rng: SimRng,
    queue: BTreeMap<(Instant, u64), Happening>,
    order: u64,
    at_once: (Instant, u32),
    history: VecDeque<String>,
    start: Instant,
    /// Sees every datagram that is sent; drops it by answering `false`.
    pub(crate) filter: Option<Filter>,
    /// Datagrams that were sent, if they are kept.
    pub(crate) tape: Option<Vec<Transmit>>,
}

impl World {
    /// Two hosts, Alice at 192.0.2.1 and Bob at 198.51.100.1, with default settings and a fake
    /// key exchange.
    pub(crate) fn new(seed: u64) -> Self {
        Self::with(seed, Settings::default(), Provider::fake())
    }

    pub(crate) fn with(seed: u64, settings: Settings, crypto: Provider) -> Self {
        #[allow(
            clippy::disallowed_methods,
            reason = "any origin of virtual time will do, and std has no other way to make one"
        )]
        let start = Instant::now();
        let mut world = Self {
            seed,
            now: Now {
                instant: start,
                unix: START_UNIX,
            },
            net: Network::default(),
            hosts: Vec::new(),
            traffic: Traffic::default(),
            traffic_on: false,
            rng: SimRng::new(seed),
            queue: BTreeMap::new(),
            order: 0,
            at_once: (start, 0),
            history: VecDeque::new(),
            start,
            filter: None,
            tape: None,
        };
        world.add_host("alice", "192.0.2.1", settings.clone(), crypto);
        world.add_host("bob", "198.51.100.1", settings, crypto);
        world
    }

    pub(crate) fn add_host(
        &mut self,
        name: &'static str,
        addr: &str,
        settings: Settings,
        crypto: Provider,
    ) -> usize {
        let seed = self.rng.seed();
        let index = self.hosts.len();
        let first_spi = 0xc000_0000 + 0x0100_0000 * u32::try_from(index).unwrap();
        self.hosts.push(Host {
            name,
            addr: addr.parse().unwrap(),
            more: Vec::new(),
            source: Some(addr.parse().unwrap()),
            endpoint: Recorded::new(Endpoint::new(settings, crypto, seed)),
            plane: FakePlane::new(first_spi),
            events: Vec::new(),
            plane_delay: 0..=2,
            plane_busy_until: self.now.instant,
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
        let first_spi = 0xd000_0000 + 0x0100_0000 * u32::try_from(host).unwrap();
        self.note(host, "restarts");
        let fresh = &mut self.hosts[host];
        fresh.endpoint = Recorded::new(Endpoint::new(settings, crypto, seed));
        fresh.plane = FakePlane::new(first_spi);
        fresh.events.clear();
        self.queue.retain(|_, happening| match happening {
            Happening::Plane(at, ..)
            | Happening::Computed(at, ..)
            | Happening::Resolved(at, ..)
            | Happening::Source(at, ..)
            | Happening::Usage(at, ..)
            | Happening::Expire(at, ..) => *at != host,
            Happening::Arrival(..) | Happening::Packets | Happening::PacketArrival { .. } => true,
        });
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
        let now = self.now;
        let endpoint = &mut self.hosts[host].endpoint;
        endpoint.handle(now, Input::Credentials(Arc::new(credentials.clone())));
        endpoint.handle(now, Input::Load(Arc::new(connection)));
        self.drain(host);
    }

    pub(crate) fn unload(&mut self, host: usize, connection: &str) {
        let now = self.now;
        let endpoint = &mut self.hosts[host].endpoint;
        assert!(endpoint.has_connection(connection));
        endpoint.handle(now, Input::Unload(connection.to_owned()));
        self.drain(host);
    }

    pub(crate) fn command(&mut self, host: usize, command: Command) -> CommandId {
        let now = self.now;
        self.note(host, &format!("command {command:?}"));
        let host_state = &mut self.hosts[host];
        host_state.next_command += 1;
        let id = host_state.next_command;
        host_state.endpoint.handle(now, Input::Command(id, command));
        self.drain(host);
        id
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
        let now = self.now;
        self.note(host, "shuts down");
        self.hosts[host].endpoint.handle(now, Input::Shutdown);
        self.drain(host);
    }

    /// A host has these addresses from now on, the first being what it sends from, and notices.
    pub(crate) fn set_addresses(&mut self, host: usize, addrs: &[&str]) {
        let now = self.now;
        let addrs: Vec<IpAddr> = addrs.iter().map(|addr| addr.parse().unwrap()).collect();
        self.note(host, &format!("has the addresses {addrs:?}"));
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
        let now = self.now;
        self.note(host, &format!("plane event {event:?}"));
        self.hosts[host]
            .endpoint
            .handle(now, Input::PlaneEvent(event));
        self.drain(host);
    }

    /// Hands a datagram to a host at once, whoever made it.
    pub(crate) fn inject(&mut self, host: usize, datagram: Datagram) {
        let now = self.now;
        self.hosts[host]
            .endpoint
            .handle(now, Input::Datagram(datagram));
        self.drain(host);
    }

    /// Starts or stops the traffic through all tunnels.
    pub(crate) fn set_traffic(&mut self, on: bool) {
        if on && !self.traffic_on {
            self.schedule(self.now.instant, Happening::Packets);
        }
        self.traffic_on = on;
    }

    /// Lets time pass until `done`, but no longer than `limit`; whether it came to be.
    pub(crate) fn run_until(
        &mut self,
        limit: Duration,
        mut done: impl FnMut(&Self) -> bool,
    ) -> bool {
        let end = self.now.instant + limit;
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
        let timer = (0..self.hosts.len())
            .filter_map(|host| Some((self.hosts[host].endpoint.poll_timeout()?, host)))
            .min();
        let queued = self.queue.keys().next().map(|(at, _)| *at);
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
        if queued.is_some_and(|at| at <= next) {
            let (_, happening) = self.queue.pop_first().unwrap();
            self.happen(happening);
        } else if let Some((_, host)) = timer {
            let now = self.now;
            self.hosts[host].endpoint.handle(now, Input::Timeout);
            self.drain(host);
        }
        true
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
        let now = self.now;
        let host = match happening {
            Happening::Arrival(host, datagram) => {
                self.note(host, &format!("<- {}", describe(&datagram.payload)));
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Datagram(datagram));
                host
            }
            Happening::Plane(host, token, op) => {
                let expiry = match &op {
                    Op::InstallSa(entry) => Some((entry.id(), entry.lifetime)),
                    _ => None,
                };
                let text = describe_op(&op);
                let answer = self.hosts[host].plane.apply(op);
                self.note(host, &format!("plane: {text}: {answer:?}"));
                if let (Some((id, lifetime)), Ok(_)) = (expiry, &answer) {
                    for (after, hard) in [(lifetime.soft_time, false), (lifetime.hard_time, true)] {
                        if let Some(after) = after {
                            let due = now.instant + after;
                            self.schedule(due, Happening::Expire(host, id, hard));
                        }
                    }
                }
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Plane(token, answer));
                host
            }
            Happening::Computed(host, token, job) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Computed(token, job.run()));
                host
            }
            Happening::Resolved(host, token, addrs) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Resolved(token, addrs));
                host
            }
            Happening::Source(host, token, addr) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Source(token, addr));
                host
            }
            Happening::Usage(host, token, ago) => {
                self.hosts[host]
                    .endpoint
                    .handle(now, Input::Usage(token, ago));
                host
            }
            Happening::Expire(host, id, hard) => {
                let plane = &mut self.hosts[host].plane;
                if !plane.sas.contains_key(&id) {
                    return;
                }
                if hard {
                    plane.expire(id);
                }
                return self.plane_event(host, PlaneEvent::Expire { id, hard });
            }
            Happening::Packets => return self.packets(),
            Happening::PacketArrival { to, spi, dst } => {
                if self.hosts[to].plane.inbound(spi, dst).is_some() {
                    self.traffic.arrived += 1;
                    self.carry(to, SaId { spi, dst });
                } else {
                    self.traffic.refused += 1;
                    self.note(to, &format!("no SA for a packet with SPI {spi:08x}"));
                }
                return;
            }
        };
        self.drain(host);
    }

    /// Does what the endpoint wants done.
    fn drain(&mut self, host: usize) {
        while let Some(action) = self.hosts[host].endpoint.poll_action() {
            let now = self.now.instant;
            match action {
                Action::Transmit(transmit) => self.transmit(host, transmit),
                Action::Plane(token, op) => {
                    let state = &mut self.hosts[host];
                    let due = now + self.rng.millis(&state.plane_delay);
                    // The data plane applies operations in order.
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
                        .filter(|host| Some(host.name) == wanted)
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
                Action::Event(event) => {
                    match &event {
                        Event::Log(line) => {
                            let text = format!("{:?}{}: {}", line.group, line.level, line.message);
                            self.note(host, &text);
                        }
                        Event::CommandDone { id, result } => {
                            self.note(host, &format!("command {id} ended: {result:?}"));
                        }
                        _ => {}
                    }
                    self.hosts[host].events.push((now, event));
                }
            }
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
        let text = if transmit.keepalive {
            "keepalive".to_owned()
        } else {
            describe(&transmit.payload)
        };
        let mut fate = "";
        let passes = self.filter.as_mut().is_none_or(|filter| filter(&transmit));
        let packet_len = transmit.payload.len() + 28 + 4;
        if self.net.link_mtu.is_some_and(|mtu| packet_len > mtu) {
            let now = self.now;
            self.note(host, &format!("-x {} {text} (refused)", transmit.remote));
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
        } else if packet_len > self.net.conditions.mtu {
            fate = " (too long)";
        } else if self.rng.chance(self.net.conditions.loss) {
            fate = " (lost)";
        }
        let mut nats = self.net.nat.iter_mut().chain(&mut self.net.other_nat);
        let route = nats.try_fold((source, transmit.remote), |(source, destination), nat| {
            nat.translate(source, destination)
        });
        self.note(host, &format!("-> {} {text}{fate}", transmit.remote));
        let Some((remote, local)) = route.filter(|_| fate.is_empty() && !transmit.keepalive) else {
            return;
        };
        let Some(to) = self.hosts.iter().position(|host| host.has(local.ip())) else {
            return;
        };
        let copies = 1 + u32::from(self.rng.chance(self.net.conditions.duplication));
        for _ in 0..copies {
            let due = self.now.instant + self.rng.millis(&self.net.conditions.delay);
            let datagram = Datagram {
                local,
                remote,
                payload: transmit.payload.clone(),
            };
            self.schedule(due, Happening::Arrival(to, datagram));
        }
    }

    /// Counts a packet, and tells the endpoint of limits that it reaches.
    fn carry(&mut self, host: usize, id: SaId) {
        let now = self.now.instant;
        self.hosts[host].plane.used.insert(id, now);
        for hard in self.hosts[host].plane.carry(id) {
            self.plane_event(host, PlaneEvent::Expire { id, hard });
        }
    }

    /// One packet through every tunnel of every host. Packets are not lost to the network: what
    /// is measured is whether both sides have the SAs for them.
    fn packets(&mut self) {
        if !self.traffic_on {
            return;
        }
        let now = self.now.instant;
        let delay = Duration::from_millis(*self.net.conditions.delay.start());
        for host in 0..self.hosts.len() {
            let plane = &self.hosts[host].plane;
            let outbound: Vec<Option<(u32, IpAddr)>> = plane
                .policies
                .values()
                .filter(|policy| !policy.trap)
                .map(|policy| plane.outbound(policy).map(|sa| (sa.spi, sa.dst)))
                .collect();
            for sa in outbound {
                self.traffic.sent += 1;
                let Some((spi, dst)) = sa else {
                    self.traffic.blocked += 1;
                    self.note(host, "no SA to send a packet with");
                    continue;
                };
                let sas = &self.hosts[host].plane.sas;
                let src = sas.get(&SaId { spi, dst }).map(|(_, sa)| sa.src);
                self.carry(host, SaId { spi, dst });
                let dead = &self.net.dead;
                if dead.contains(&dst) || src.is_some_and(|src| dead.contains(&src)) {
                    continue;
                }
                let mut nats = self.net.nat.iter().chain(&self.net.other_nat);
                let dst = nats
                    .find(|nat| nat.outside == dst)
                    .map_or(dst, |nat| nat.inside);
                if let Some(to) = self.hosts.iter().position(|host| host.has(dst)) {
                    self.schedule(now + delay, Happening::PacketArrival { to, spi, dst });
                }
            }
        }
        self.schedule(now + PACKET_INTERVAL, Happening::Packets);
    }

    fn schedule(&mut self, due: Instant, happening: Happening) {
        self.order += 1;
        self.queue.insert((due, self.order), happening);
    }

    fn note(&mut self, host: usize, text: &str) {
        let at = (self.now.instant - self.start).as_secs_f64();
        let name = self.hosts[host].name;
        self.history.push_back(format!("{at:10.3} {name:6} {text}"));
        if self.history.len() > HISTORY {
            self.history.pop_front();
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
        if std::thread::panicking() {
            for line in &self.history {
                eprintln!("{line}");
            }
            eprintln!("this was seed {0}: SWANHERD_SEED={0}", self.seed);
        }
    }
}

fn describe(payload: &[u8]) -> String {
    Message::parse(payload).map_or_else(
        |error| format!("{} octets: {error}", payload.len()),
        |message| message.to_string(),
    )
}

fn describe_op(op: &Op) -> String {
    match op {
        Op::InstallSa(entry) => {
            let SaId { spi, dst } = entry.id();
            let reqid = entry.reqid;
            format!(
                "install {:?} SA {spi:08x} to {dst} reqid {reqid}",
                entry.direction
            )
        }
        Op::RemoveSa(id) => format!("remove SA {:08x} to {}", id.spi, id.dst),
        Op::InstallPolicies(set) => format!("install policies {} of {}", set.id, set.owner),
        other => format!("{other:?}"),
    }
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

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|error| panic!("{variable}={text}: {error}")))
}
