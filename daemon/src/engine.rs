// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The task that owns the IKE endpoint: inputs in, actions out.
//!
//! ```text
//!   UDP 500/4500 ──datagrams──▶┐                      ┌──▶ UDP (best effort)
//!   plane task ──answers──────▶│                      ├──▶ plane task, in order
//!   plane ──events────────────▶│  Engine { Endpoint } ├──▶ workers (crypto), resolver, routes
//!   workers ──results─────────▶│                      ├──▶ snapshot (ArcSwap), events (hub)
//!   VICI, CLI, loader ─requests▶┘                     └──▶ answers of requests
//! ```
//!
//! Everything that could block runs elsewhere and comes back as an input, so one slow peer, lookup
//! or kernel cannot hold up another. Readers see the snapshot that was published before the event
//! or answer that made them look.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use swanherd_config::model::Connection;
use swanherd_ike::api::{
    Action, CommandId, Computed, Counter, Datagram, Event, HostAddress, IkeSaId, IkeSaInfo, Input,
    Now, Settings, Token, Transmit,
};
use swanherd_ike::record::Recorded;
use swanherd_ipsec::plane::{Op, PlaneError, PlaneEvent, PolicySet, SaCounters, SaId};
use swanherd_kernel::DataPlane;
use swanherd_kernel::audit::Audit;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::audits::Audits;
use crate::control::{Control, CredentialNames, Request, Snapshot, Trouble};
use crate::credentials::{CredentialStore, read_certificates};
use crate::fitting;
use crate::plane_task::{self, Applied, Standing};
use crate::totals::Accounting;
use crate::updown::Scripts;
use crate::workers::Workers;

mod backlog;
mod commands;
mod lookups;

use commands::Waiting;
use lookups::Lookups;

/// Datagrams that may wait for the engine. A burst beyond it is dropped, as the network would.
pub(crate) const DATAGRAM_QUEUE: usize = 8192;
/// Requests of VICI clients and the loader that may wait; clients beyond it wait in turn.
pub(crate) const REQUEST_QUEUE: usize = 256;
/// How far what is published may lag where nobody was told of a change or waits for it. Counters go
/// up with every datagram, and half-open SAs come with every handshake; publishing each step of
/// a flood would cost more than IKE itself.
const PUBLISH_DELAY: Duration = Duration::from_millis(20);
/// How long a polite shutdown may take.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// How long operations that still wait then may take.
const PLANE_GRACE: Duration = Duration::from_secs(3);

/// Sends what the endpoint transmits. Sending is best effort: IKE retransmits.
pub(crate) trait Sender: Send + Sync + 'static {
    /// Sends one datagram.
    fn send(&self, transmit: &Transmit) -> Sent;
}

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is on its way, or lost.
    Perhaps,
    /// It is too long for the path, as the host knows it (EMSGSIZE).
    TooLong,
}

/// What comes back from work that ran elsewhere.
enum Answer {
    Plane(Applied),
    Computed(Token, Computed),
    Resolved(Token, Vec<IpAddr>),
    Source(Token, Option<IpAddr>),
    /// `None` if the host could not be asked.
    Addresses(Option<Vec<HostAddress>>),
    Counters(Option<BTreeMap<SaId, SaCounters>>),
    Audit(Duration, Result<Audit, PlaneError>),
}

/// What the engine is built from.
pub(crate) struct Parts<P, S> {
    pub(crate) endpoint: Recorded,
    pub(crate) plane: Arc<P>,
    pub(crate) plane_events: mpsc::Receiver<PlaneEvent>,
    pub(crate) sender: S,
    pub(crate) datagrams: mpsc::Receiver<Datagram>,
    pub(crate) counters_interval: Duration,
    /// How often the data plane is audited; zero is only on demand.
    pub(crate) reconcile_interval: Duration,
    pub(crate) reload_settings: Box<dyn FnMut() -> Result<Settings, String> + Send>,
}

/// See the module's text.
pub(crate) struct Engine<P, S> {
    endpoint: Recorded,
    plane: Arc<P>,
    plane_events: mpsc::Receiver<PlaneEvent>,
    plane_ops: mpsc::Sender<(Token, Op)>,
    plane_task: JoinHandle<()>,
    /// Traps and shunts in force.
    standing: Arc<BTreeMap<u32, Arc<PolicySet>>>,
    audits: Audits,
    reconcile_interval: Duration,
    /// One listing of policies is made at a time.
    listings: Arc<tokio::sync::Semaphore>,
    sender: S,
    datagrams: mpsc::Receiver<Datagram>,
    /// Whether there has been a backlog of datagrams.
    swollen: bool,
    requests: mpsc::Receiver<Request>,
    answers_in: mpsc::UnboundedSender<Answer>,
    answers: mpsc::UnboundedReceiver<Answer>,
    workers: Workers,
    lookups: Lookups,
    control: Control,
    credentials: CredentialStore,
    connections: Arc<BTreeMap<String, Arc<Connection>>>,
    ike_sas: Arc<BTreeMap<IkeSaId, Arc<IkeSaInfo>>>,
    dirty: BTreeSet<IkeSaId>,
    /// Whether more than `dirty` and `counted` tell has changed since the last publication.
    behind: bool,
    accounting: Accounting,
    counters: BTreeMap<String, BTreeMap<Counter, u64>>,
    /// Whether `counters` are ahead of what is published.
    counted: bool,
    published_counters: Arc<BTreeMap<String, BTreeMap<Counter, u64>>>,
    published: Instant,
    last_errors: Arc<BTreeMap<String, (u64, String)>>,
    troubles: Arc<BTreeMap<(String, String), Trouble>>,
    credential_names: Arc<CredentialNames>,
    waiting: Vec<Waiting>,
    /// How many events about SAs clients have been told.
    told: u64,
    next_command: CommandId,
    started: (Instant, u64),
    counters_interval: Duration,
    counters_running: bool,
    counters_waiters: Vec<oneshot::Sender<()>>,
    /// Who wants to know when SAs were last used, as of the next dump.
    usage_waiters: Vec<(Token, Vec<SaId>)>,
    reload_settings: Box<dyn FnMut() -> Result<Settings, String> + Send>,
    scripts: Scripts,
}

impl<P: DataPlane + 'static, S: Sender> Engine<P, S> {
    /// Builds the engine and the handle to it. Call [`Engine::run`] on a task of its own.
    pub(crate) fn new(parts: Parts<P, S>) -> (Self, Control) {
        let now = now();
        let (request_sender, requests) = mpsc::channel(REQUEST_QUEUE);
        let (answers_in, answers) = mpsc::unbounded_channel();
        let applied = answers_in.clone();
        let (plane_ops, plane_task) = plane_task::spawn(Arc::clone(&parts.plane), move |one| {
            // The engine is gone only when the daemon ends.
            let _ = applied.send(Answer::Plane(one));
        });
        let snapshot = Snapshot {
            at: now.instant,
            started: (now.instant, now.unix),
            connections: Arc::default(),
            ike_sas: Arc::default(),
            sa_counters: Arc::default(),
            totals: Arc::default(),
            counters: Arc::default(),
            last_errors: Arc::default(),
            troubles: Arc::default(),
            credentials: Arc::default(),
            half_open: 0,
            data_plane: parts.plane.kind().name(),
            standing: Arc::default(),
            audits: Arc::default(),
            plane_events: parts.plane.event_counts(),
        };
        let control = Control::new(snapshot, request_sender);
        let engine = Self {
            endpoint: parts.endpoint,
            plane: parts.plane,
            plane_events: parts.plane_events,
            plane_ops,
            plane_task,
            standing: Arc::default(),
            audits: Audits::default(),
            reconcile_interval: parts.reconcile_interval,
            listings: Arc::new(tokio::sync::Semaphore::new(1)),
            sender: parts.sender,
            datagrams: parts.datagrams,
            swollen: false,
            requests,
            answers_in,
            answers,
            workers: Workers::new(),
            lookups: Lookups::default(),
            control: control.clone(),
            credentials: CredentialStore::default(),
            connections: Arc::default(),
            ike_sas: Arc::default(),
            dirty: BTreeSet::new(),
            behind: false,
            accounting: Accounting::default(),
            counters: BTreeMap::new(),
            counted: false,
            published_counters: Arc::default(),
            published: now.instant,
            last_errors: Arc::default(),
            troubles: Arc::default(),
            credential_names: Arc::default(),
            waiting: Vec::new(),
            told: 0,
            next_command: 1,
            started: (now.instant, now.unix),
            counters_interval: parts.counters_interval,
            counters_running: false,
            counters_waiters: Vec::new(),
            usage_waiters: Vec::new(),
            reload_settings: parts.reload_settings,
            scripts: Scripts::default(),
        };
        (engine, control)
    }

    /// Has these scripts told of children that come up and go down.
    pub(crate) fn set_scripts(&mut self, scripts: Scripts) {
        self.scripts = scripts;
    }

    /// Runs until `stop` fires, then deletes every SA politely, within a few seconds, and clears
    /// the data plane.
    pub(crate) async fn run(mut self, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let mut counters = tokio::time::interval(self.counters_interval);
        counters.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first one is due at once.
        let mut audits = (!self.reconcile_interval.is_zero()).then(|| {
            let mut due = tokio::time::interval(self.reconcile_interval);
            due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            due
        });
        let mut deadline: Option<Instant> = None;
        let abandoned = Arc::clone(&self.control.abandoned);
        self.list_addresses();
        loop {
            self.drain();
            if deadline.is_some() && self.ike_sas.is_empty() {
                break;
            }
            if deadline.is_some_and(|end| Instant::now() >= end) {
                break;
            }
            let mut timeout = self.next_timeout(deadline);
            // Looked at here, because the selection below never gets to its clock while a queue is
            // never empty, as in a flood.
            if Instant::now() >= timeout {
                self.endpoint.handle(now(), Input::Timeout);
                self.drain();
                timeout = self.next_timeout(deadline);
            }
            tokio::select! {
                biased;
                () = &mut stop, if deadline.is_none() => {
                    self.requests.close();
                    deadline = Some(Instant::now() + SHUTDOWN_GRACE);
                    self.endpoint.handle(now(), Input::Shutdown);
                }
                () = abandoned.notified() => self.drop_abandoned(),
                _ = counters.tick() => {
                    self.start_counters();
                    self.give_memory_back();
                }
                () = tick(&mut audits), if deadline.is_none() => {
                    self.audits.due();
                    self.start_audit();
                }
                Some(answer) = self.answers.recv() => self.handle_answer(answer),
                Some(event) = self.plane_events.recv() => {
                    if event == PlaneEvent::NetworkChanged {
                        self.list_addresses();
                    }
                    self.endpoint.handle(now(), Input::PlaneEvent(event));
                }
                Some(request) = self.requests.recv() => self.handle_request(request),
                Some(datagram) = self.datagrams.recv() => {
                    if let Some(datagram) = self.triage(datagram) {
                        self.endpoint.handle(now(), Input::Datagram(datagram));
                    }
                }
                () = tokio::time::sleep_until(timeout.into()) => {}
            }
        }
        self.drain();
        self.endpoint.finish();
        drop(self.plane_ops);
        // What still waits must not be installed after everything was removed.
        if tokio::time::timeout(PLANE_GRACE, &mut self.plane_task)
            .await
            .is_err()
        {
            self.plane_task.abort();
        }
        self.plane.shutdown().await;
    }

    /// When to wake up without input.
    fn next_timeout(&self, deadline: Option<Instant>) -> Instant {
        let idle = Instant::now() + Duration::from_secs(3600);
        let publication = self.is_behind().then(|| self.published + PUBLISH_DELAY);
        [self.endpoint.poll_timeout(), deadline, publication]
            .into_iter()
            .flatten()
            .fold(idle, Instant::min)
    }

    fn handle_answer(&mut self, answer: Answer) {
        match answer {
            Answer::Plane(applied) => self.handle_applied(applied),
            Answer::Computed(token, computed) => {
                self.endpoint
                    .handle(now(), Input::Computed(token, computed));
            }
            Answer::Resolved(token, addrs) => {
                self.endpoint.handle(now(), Input::Resolved(token, addrs));
            }
            Answer::Source(token, addr) => {
                self.endpoint.handle(now(), Input::Source(token, addr));
            }
            Answer::Addresses(found) => self.addresses_listed(found),
            Answer::Counters(dump) => {
                self.counters_running = false;
                if let Some(dump) = dump {
                    self.accounting.update(dump, Instant::now());
                    self.tell_usage();
                }
                // Without an answer they ask again.
                self.usage_waiters.clear();
                self.publish();
                for waiter in self.counters_waiters.drain(..) {
                    // A client that left does not need to know.
                    let _ = waiter.send(());
                }
            }
            Answer::Audit(took, outcome) => {
                let (lines, answers) = self.audits.finish(now().unix, took, outcome);
                self.publish();
                for line in lines {
                    self.tell(Event::Log(line));
                }
                answers.give();
                self.start_audit();
            }
        }
    }

    fn handle_applied(&mut self, applied: Applied) {
        if let Some((id, counters)) = applied.last {
            self.accounting.removed(id, counters);
            self.behind = true;
        }
        match applied.standing {
            Some(Standing::Installed(set)) => {
                Arc::make_mut(&mut self.standing).insert(set.id, Arc::from(set));
                self.behind = true;
            }
            Some(Standing::Removed(id)) if self.standing.contains_key(&id) => {
                Arc::make_mut(&mut self.standing).remove(&id);
                self.behind = true;
            }
            Some(Standing::Removed(_)) | None => {}
        }
        self.endpoint
            .handle(now(), Input::Plane(applied.token, applied.answer));
    }

    fn handle_request(&mut self, request: Request) {
        match request {
            Request::LoadConnection(connection, reply) => {
                let _ = reply.send(self.load_connection(*connection));
            }
            Request::UnloadConnection(name, reply) => {
                let known = self.endpoint.has_connection(&name);
                self.endpoint.handle(now(), Input::Unload(name.clone()));
                self.drain();
                Arc::make_mut(&mut self.last_errors).remove(&name);
                Arc::make_mut(&mut self.troubles).retain(|(connection, _), _| *connection != name);
                Arc::make_mut(&mut self.connections).remove(&name);
                self.publish();
                let _ = reply.send(if known {
                    Ok(())
                } else {
                    Err(format!("unload: connection '{name}' not found"))
                });
            }
            Request::LoadShared(secret, reply) => {
                self.credentials.load_shared(secret);
                self.credentials_changed();
                let _ = reply.send(Ok(()));
            }
            Request::UnloadShared(id, reply) => {
                self.credentials.unload_shared(&id);
                self.credentials_changed();
                let _ = reply.send(Ok(()));
            }
            Request::LoadKey(key, reply) => {
                let result = self.credentials.load_key(key);
                self.credentials_changed();
                let _ = reply.send(result);
            }
            Request::UnloadKey(id, reply) => {
                let known = self.credentials.unload_key(&id);
                self.credentials_changed();
                let _ = reply.send(if known {
                    Ok(())
                } else {
                    Err("key not found".to_owned())
                });
            }
            Request::LoadCert { data, ca, reply } => {
                let result = self.credentials.load_cert(&data, ca);
                self.credentials_changed();
                let _ = reply.send(result);
            }
            Request::ClearCredentials(reply) => {
                self.credentials = CredentialStore::default();
                self.credentials_changed();
                let _ = reply.send(());
            }
            // Certificates of peers live with their SA and are not kept elsewhere.
            Request::FlushCerts(reply) => {
                let _ = reply.send(());
            }
            Request::ReloadSettings(reply) => {
                let result = (self.reload_settings)();
                let _ = reply.send(result.map(|settings| {
                    let settings = Input::Settings(Box::new(settings));
                    self.endpoint.handle(now(), settings);
                }));
            }
            Request::Command {
                command,
                log,
                reply,
            } => self.handle_command(command, log, reply),
            Request::ResetCounters(name, reply) => {
                let _ = reply.send(self.reset_counters(name));
            }
            Request::RefreshCounters(reply) => {
                self.counters_waiters.push(reply);
                self.start_counters();
            }
            Request::Reconcile { dry_run, reply } => {
                self.audits.ask(dry_run, reply);
                self.start_audit();
            }
            Request::Policies(reply) => self.list_policies(reply),
        }
    }

    /// Loading a definition that is loaded already touches nothing.
    fn load_connection(&mut self, mut connection: Connection) -> Result<(), String> {
        read_certificates(&mut connection)?;
        fitting::fit(&mut connection, &self.plane.capabilities())?;
        fitting::fit_ports(&connection, self.endpoint.settings())?;
        if self
            .connections
            .get(&connection.name)
            .is_some_and(|known| **known == connection)
        {
            return Ok(());
        }
        let connection = Arc::new(connection);
        Arc::make_mut(&mut self.connections)
            .insert(connection.name.clone(), Arc::clone(&connection));
        self.endpoint.handle(now(), Input::Load(connection));
        self.publish();
        Ok(())
    }

    fn reset_counters(&mut self, name: Option<String>) -> Result<(), String> {
        match name {
            Some(name) => {
                self.counters
                    .remove(&name)
                    .ok_or("no counters found for this connection")?;
            }
            None => self.counters.retain(|name, _| name.is_empty()),
        }
        self.counted = true;
        self.publish();
        Ok(())
    }

    fn credentials_changed(&mut self) {
        self.credential_names = Arc::new(self.credentials.names());
        self.endpoint
            .handle(now(), Input::Credentials(self.credentials.build()));
        self.publish();
    }

    /// Carries out what the endpoint wants until it wants nothing more, then tells the world.
    fn drain(&mut self) {
        let mut events = Vec::new();
        let mut finished = Vec::new();
        while let Some(action) = self.endpoint.poll_action() {
            match action {
                Action::Transmit(transmit) => {
                    if self.sender.send(&transmit) == Sent::TooLong {
                        self.endpoint.handle(now(), Input::TooLong(transmit));
                    }
                }
                Action::Plane(token, op) => self.apply(token, op),
                Action::Compute(token, job) => {
                    let answers = self.answers_in.clone();
                    self.workers.submit(job, move |computed| {
                        // The engine is gone only when the daemon ends.
                        let _ = answers.send(Answer::Computed(token, computed));
                    });
                }
                Action::Resolve(token, name) => self.resolve(token, name),
                Action::Source(token, remote) => self.find_source(token, remote),
                Action::Usage(token, sas) => {
                    self.usage_waiters.push((token, sas));
                    self.start_counters();
                }
                Action::Event(Event::CommandDone { id, result }) => finished.push((id, result)),
                Action::Event(event) => {
                    self.note(&event);
                    events.push(event);
                }
            }
        }
        let urgent = !finished.is_empty() || events.iter().any(announces);
        if self.is_behind() && (urgent || self.published.elapsed() >= PUBLISH_DELAY) {
            self.publish();
        }
        for event in events {
            self.tell(event);
        }
        for (id, result) in finished {
            if let Some(waiting) = self.waiting.iter_mut().find(|one| one.open.contains(&id)) {
                waiting.open.remove(&id);
                match result {
                    Ok(()) => waiting.done += 1,
                    Err(text) => waiting.failure = Some(text),
                }
            }
        }
        self.finish_commands();
    }

    fn apply(&mut self, token: Token, op: Op) {
        if let Op::UpdateSa { id, dst, .. } = &op {
            self.accounting.moved(
                *id,
                SaId {
                    spi: id.spi,
                    dst: *dst,
                },
            );
        }
        if let Err(refused) = self.plane_ops.try_send((token, op)) {
            let (token, op) = match refused {
                mpsc::error::TrySendError::Full(both) | mpsc::error::TrySendError::Closed(both) => {
                    both
                }
            };
            let error = PlaneError {
                op: op.name().to_owned(),
                reason: "too many operations wait for the data plane".to_owned(),
                errno: None,
            };
            let _ = self.answers_in.send(Answer::Plane(Applied {
                token,
                answer: Err(error),
                last: None,
                standing: None,
            }));
        }
    }

    /// Keeps what listings, metrics and `status` need of an event.
    fn note(&mut self, event: &Event) {
        self.scripts.note(event, &self.connections);
        match event {
            Event::Changed(id) | Event::Gone(id) => {
                self.dirty.insert(*id);
            }
            Event::Counter {
                connection,
                counter,
            } => {
                count(&mut self.counters, "", *counter);
                if let Some(name) = connection {
                    count(&mut self.counters, name, *counter);
                }
                self.counted = true;
            }
            Event::Failure {
                connection: Some(name),
                child,
                text,
                ..
            } => {
                let error = (now().unix, text.clone());
                match child {
                    Some(child) => self.trouble(name, child).error = Some(error),
                    None => {
                        Arc::make_mut(&mut self.last_errors).insert(name.clone(), error);
                    }
                }
                self.behind = true;
            }
            Event::NextAttempt {
                connection,
                child,
                at,
            } => {
                self.trouble(connection, child).next_attempt = *at;
                self.behind = true;
            }
            _ => {}
        }
    }

    fn trouble(&mut self, connection: &str, child: &str) -> &mut Trouble {
        Arc::make_mut(&mut self.troubles)
            .entry((connection.to_owned(), child.to_owned()))
            .or_default()
    }

    /// Whether something has changed since the last publication.
    fn is_behind(&self) -> bool {
        self.behind || self.counted || !self.dirty.is_empty()
    }

    fn publish(&mut self) {
        self.behind = false;
        self.published = Instant::now();
        if std::mem::take(&mut self.counted) {
            self.published_counters = Arc::new(self.counters.clone());
        }
        if !self.dirty.is_empty() {
            let ike_sas = Arc::make_mut(&mut self.ike_sas);
            for id in std::mem::take(&mut self.dirty) {
                match self.endpoint.ike_sa(id) {
                    Some(info) => {
                        self.accounting.learn(&info);
                        ike_sas.insert(id, Arc::new(info));
                    }
                    None => {
                        ike_sas.remove(&id);
                    }
                }
            }
        }
        self.control.snapshot.store(Arc::new(Snapshot {
            at: self.published,
            started: self.started,
            connections: Arc::clone(&self.connections),
            ike_sas: Arc::clone(&self.ike_sas),
            sa_counters: self.accounting.current(),
            totals: self.accounting.totals(),
            counters: Arc::clone(&self.published_counters),
            last_errors: Arc::clone(&self.last_errors),
            troubles: Arc::clone(&self.troubles),
            credentials: Arc::clone(&self.credential_names),
            half_open: self.endpoint.half_open(),
            data_plane: self.plane.kind().name(),
            standing: Arc::clone(&self.standing),
            audits: self.audits.summary(),
            plane_events: self.plane.event_counts(),
        }));
    }

    fn tell(&mut self, event: Event) {
        if let Event::Log(line) = &event {
            crate::logging::write(line);
            for waiting in &mut self.waiting {
                let concerns = match &line.ike_sa {
                    Some((name, id)) => {
                        waiting.ike_sas.contains(id) || waiting.connection.as_ref() == Some(name)
                    }
                    None => false,
                };
                if let (true, Some(log)) = (concerns, &waiting.log) {
                    // A client that does not read its log loses lines, never holds up IKE.
                    if log.try_send(line.clone()).is_err() {
                        waiting.lost_lines = waiting.lost_lines.saturating_add(1);
                    }
                }
            }
        }
        if let Some(name) = crate::vici::event_name(&event).filter(|_| announces(&event)) {
            self.told += 1;
            crate::logging::write_event(self.told, name, &event);
        }
        self.control.events.send(event);
    }
}

/// Whether clients are told of this, and may look at what is published because of it.
fn announces(event: &Event) -> bool {
    matches!(
        event,
        Event::IkeUpDown { .. }
            | Event::IkeRekey { .. }
            | Event::IkeUpdate { .. }
            | Event::ChildUpDown { .. }
            | Event::ChildRekey { .. }
    )
}

fn count(counters: &mut BTreeMap<String, BTreeMap<Counter, u64>>, name: &str, counter: Counter) {
    // Looked up first: this runs for every message, and the name is nearly always there.
    if !counters.contains_key(name) {
        counters.insert(name.to_owned(), BTreeMap::new());
    }
    if let Some(of_name) = counters.get_mut(name) {
        *of_name.entry(counter).or_default() += 1;
    }
}

/// The next tick; never, if there is nothing that ticks.
async fn tick(interval: &mut Option<tokio::time::Interval>) {
    match interval {
        Some(interval) => drop(interval.tick().await),
        None => std::future::pending().await,
    }
}

pub(crate) fn now() -> Now {
    let unix = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    Now {
        instant: Instant::now(),
        unix,
    }
}

#[cfg(test)]
mod tests;
