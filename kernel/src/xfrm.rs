// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data plane that programs the kernel's XFRM.
//!
//! ```text
//!   apply, counters, reconcile ──► Requester (XFRM)  ──► kernel
//!                              └─► Router (rtnetlink) ─► kernel
//!   PlaneEvent channel ◄── event task ◄── multicast socket (XFRM) ◄── kernel
//! ```
//!
//! What should be in the kernel is written to the books before the kernel is asked; operations
//! run one after the other.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swanherd_ipsec::plane::{
    Mark, Op, Outcome, PlaneError, PlaneEvent, PolicyAction, PolicySet, SaCounters, SaEntry, SaId,
    UdpEncap,
};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::audit::{Audit, ListedPolicy};
use crate::netlink::{NetlinkError, Requester};
use crate::plane::{DataPlane, EventCounts, PlaneKind};
use crate::reconcile::{Change, Claims, Desired, InForce, Journal, Record, WantedSa};
use crate::route::Router;
use crate::route_table::RouteTable;

mod algorithm;
mod claims;
mod event;
mod inspect;
mod listing;
mod message;
mod reconciling;
mod selector;

pub(crate) use claims::{claims, owner};
pub use inspect::{Inspection, inspect};
pub(crate) use selector::covering_prefix;

use message::{CarriedState, SeenPolicy, SeenSa};

/// How an [`XfrmPlane`] is set up.
#[derive(Clone, Debug)]
pub struct XfrmOptions {
    /// Where to keep the list of what is installed, so that a crash leaves nothing behind. Best on
    /// a file system that a reboot empties, `/run/swanherd/xfrm.ledger` for instance. The number
    /// of the network namespace is appended, as each has its own SAs and policies. `None`:
    /// leftovers of a crash are not recognised.
    pub ledger: Option<PathBuf>,
    /// How many events may wait for the daemon.
    pub event_queue: usize,
}

impl Default for XfrmOptions {
    fn default() -> Self {
        Self {
            ledger: None,
            event_queue: 1024,
        }
    }
}

/// The kernel's XFRM as a data plane.
#[derive(Debug)]
pub struct XfrmPlane {
    shared: Arc<Shared>,
    /// Held while an operation runs, so that operations keep their order.
    routes: tokio::sync::Mutex<RouteTable>,
    events: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    requests: Requester,
    router: Router,
    books: Mutex<Books>,
    counts: event::Counts,
}

/// What should be in the kernel, and what may be there from us.
#[derive(Debug)]
struct Books {
    desired: Desired,
    journal: Journal,
}

impl XfrmPlane {
    /// Opens the sockets, removes what an earlier run left in the kernel, and begins to listen.
    /// Needs a tokio runtime and `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// If the kernel has no XFRM, permission is missing, or the ledger cannot be written.
    pub async fn start(options: XfrmOptions) -> io::Result<(Self, mpsc::Receiver<PlaneEvent>)> {
        let journal = match &options.ledger {
            Some(path) => open_journal(path)?,
            None => Journal::default(),
        };
        let shared = Arc::new(Shared {
            requests: Requester::open(libc::NETLINK_XFRM as isize)?,
            router: Router::open()?,
            books: Mutex::new(Books {
                desired: Desired::default(),
                journal,
            }),
            counts: event::Counts::default(),
        });
        let (sender, receiver) = mpsc::channel(options.event_queue.max(1));
        let socket = event::open_socket()?;
        let events = tokio::spawn(event::run(Arc::clone(&shared), socket, sender));
        let plane = Self {
            shared,
            routes: tokio::sync::Mutex::default(),
            events,
        };
        let leftovers = plane.reconcile(false).await.map_err(io::Error::other)?;
        reconciling::report_leftovers(&leftovers);
        Ok((plane, receiver))
    }

    /// Lookups of routes and addresses.
    pub fn router(&self) -> &Router {
        &self.shared.router
    }

    async fn alloc_spi(
        &self,
        src: std::net::IpAddr,
        dst: std::net::IpAddr,
        reqid: u32,
    ) -> Result<Outcome, PlaneError> {
        let fail = |error| plane_error(format_args!("reserve an SPI at {dst}"), error);
        let answers = self
            .shared
            .requests
            .request(&message::alloc_spi(src, dst, reqid), 0, |_, payload| {
                SeenSa::parse(payload)
            })
            .await
            .map_err(fail)?;
        let Some(sa) = answers.first() else {
            return Err(fail(NetlinkError::Protocol("no SPI in the answer")));
        };
        let mut books = self.shared.books();
        books.record(Record::Sa(sa.id));
        books.desired.want_sa(sa.id, WantedSa::Reserved);
        Ok(Outcome::Spi(sa.id.spi))
    }

    async fn install_sa(&self, entry: Box<SaEntry>) -> Result<Outcome, PlaneError> {
        let id = entry.id();
        let (before, known) = {
            let mut books = self.shared.books();
            let known = books.journal.entries().contains(&Record::Sa(id));
            books.record(Record::Sa(id));
            let before = books
                .desired
                .want_sa(id, WantedSa::Installed(entry.clone()));
            (before, known)
        };
        let result = self.put_sa(&entry, before.is_some(), known).await;
        if let Err(error) = result {
            let mut books = self.shared.books();
            match before {
                Some(before) => {
                    books.desired.want_sa(id, before);
                }
                None => {
                    books.desired.forget_sa(id);
                    books.strike_out(&Record::Sa(id));
                }
            }
            return Err(PlaneError {
                op: format!("install SA {:08x} to {}", id.spi, id.dst),
                ..error
            });
        }
        Ok(Outcome::Done)
    }

    /// Puts one SA into the kernel. `known`: one of this name may be there from us.
    async fn put_sa(&self, entry: &SaEntry, update: bool, known: bool) -> Result<(), PlaneError> {
        let fail = |error| plane_error("install an SA", error);
        match self.send_sa(entry, update, CarriedState::default()).await? {
            // The reservation has timed out in the kernel.
            Err(error) if update && error.errno() == Some(libc::ESRCH) => self
                .send_sa(entry, false, CarriedState::default())
                .await?
                .map_err(fail),
            Err(error) if known && error.errno() == Some(libc::EEXIST) => {
                self.delete_sa(entry.id(), entry.mark).await.map_err(fail)?;
                self.send_sa(entry, false, CarriedState::default())
                    .await?
                    .map_err(fail)
            }
            result => result.map_err(fail),
        }
    }

    async fn send_sa(
        &self,
        entry: &SaEntry,
        update: bool,
        carried: CarriedState,
    ) -> Result<Result<(), NetlinkError>, PlaneError> {
        let request = message::install_sa(entry, update, carried).map_err(|error| PlaneError {
            op: "install an SA".to_owned(),
            reason: error.to_string(),
            errno: None,
        })?;
        Ok(self.shared.requests.command(&request, 0).await)
    }

    async fn update_sa(
        &self,
        id: SaId,
        src: std::net::IpAddr,
        dst: std::net::IpAddr,
        encap: Option<UdpEncap>,
    ) -> Result<Outcome, PlaneError> {
        let op = format!("move SA {:08x} from {} to {dst}", id.spi, id.dst);
        let fail = |error| plane_error(&op, error);
        let entry = match self.shared.books().desired.sa(id) {
            Some(WantedSa::Installed(entry)) => entry.clone(),
            Some(WantedSa::Reserved) | None => {
                return Err(PlaneError {
                    op,
                    reason: "no such SA is installed".to_owned(),
                    errno: None,
                });
            }
        };
        let moved = SaEntry {
            src,
            dst,
            encap,
            ..(*entry).clone()
        };
        if moved == *entry {
            return Ok(Outcome::Done);
        }
        let same_place = moved.src == entry.src && moved.dst == entry.dst;
        if same_place && moved.encap.is_some() && entry.encap.is_some() {
            // Only ports differ: the kernel changes those in place.
            self.send_sa(&moved, true, CarriedState::default())
                .await?
                .map_err(fail)?;
            self.shared
                .books()
                .desired
                .want_sa(id, WantedSa::Installed(Box::new(moved)));
            return Ok(Outcome::Done);
        }

        let carried = self
            .shared
            .requests
            .request(&message::get_sa(id, entry.mark), 0, |_, payload| {
                CarriedState::parse(payload)
            })
            .await
            .map_err(fail)?
            .pop()
            .ok_or_else(|| fail(NetlinkError::Protocol("the SA is missing in the answer")))?;
        {
            let mut books = self.shared.books();
            books.record(Record::Sa(moved.id()));
            books.desired.forget_sa(id);
            books
                .desired
                .want_sa(moved.id(), WantedSa::Installed(Box::new(moved.clone())));
        }
        self.delete_sa(id, entry.mark).await.map_err(fail)?;
        let result = self.send_sa(&moved, false, carried.clone()).await?;
        if let Err(error) = result {
            // The old SA is better than none.
            let restored = self.send_sa(&entry, false, carried).await?;
            let mut books = self.shared.books();
            books.desired.forget_sa(moved.id());
            books.strike_out(&Record::Sa(moved.id()));
            if restored.is_ok() {
                books.record(Record::Sa(id));
                books.desired.want_sa(id, WantedSa::Installed(entry));
            }
            return Err(fail(error));
        }
        Ok(Outcome::Done)
    }

    async fn remove_sa(&self, id: SaId) -> Result<Outcome, PlaneError> {
        let wanted = self.shared.books().desired.forget_sa(id);
        let mark = match wanted {
            Some(WantedSa::Installed(entry)) => entry.mark,
            Some(WantedSa::Reserved) => None,
            // Not ours, or gone already.
            None => return Ok(Outcome::Done),
        };
        self.delete_sa(id, mark).await.map_err(|error| {
            plane_error(
                format_args!("remove SA {:08x} to {}", id.spi, id.dst),
                error,
            )
        })?;
        Ok(Outcome::Done)
    }

    /// Removes an SA from the kernel and strikes it out, unless another of its name is wanted.
    async fn delete_sa(&self, id: SaId, mark: Option<Mark>) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.shared
                .requests
                .command(&message::remove_sa(id, mark), 0)
                .await,
        )?;
        let mut books = self.shared.books();
        if books.desired.sa(id).is_none() {
            books.strike_out(&Record::Sa(id));
        }
        Ok(())
    }

    async fn install_policies(
        &self,
        routes: &mut RouteTable,
        set: &PolicySet,
    ) -> Result<Outcome, PlaneError> {
        let refuse = |reason: String| PlaneError {
            op: format!("install policies of {}", set.owner),
            reason,
            errno: None,
        };
        let claims = claims(set).map_err(refuse)?;
        let (old, changes) = {
            let mut books = self.shared.books();
            let planned = books
                .desired
                .claim(set.id, claims)
                .map_err(|error| refuse(error.to_string()))?;
            for change in &planned.1 {
                if let Some(after) = change.after {
                    books.record(Record::Policy(change.key, reqid_of(&after)));
                }
            }
            planned
        };
        for (done, change) in changes.iter().enumerate() {
            let Err(error) = self.change_policy(change).await else {
                continue;
            };
            self.shared.books().desired.restore(set.id, old);
            for change in changes[..done].iter().rev() {
                let undo = Change {
                    key: change.key,
                    before: change.after,
                    after: change.before,
                };
                if let Err(error) = self.change_policy(&undo).await {
                    tracing::warn!(policy = %change.key, %error, "cannot undo a change");
                }
            }
            self.shared.strike_out_changes(&changes);
            return Err(PlaneError {
                op: format!("install policies of {}", set.owner),
                reason: format!("{}: {}", change.key, error.reason),
                errno: error.errno,
            });
        }
        self.shared.strike_out_changes(&changes);
        for ((addr, len), error) in routes.install(&self.shared.router, set).await {
            tracing::warn!(owner = %set.owner, route = %format_args!("{addr}/{len}"), %error,
                "cannot install a route");
        }
        Ok(Outcome::Done)
    }

    async fn remove_policies(
        &self,
        routes: &mut RouteTable,
        id: u32,
    ) -> Result<Outcome, PlaneError> {
        routes.remove(&self.shared.router, id).await;
        // A set without claims conflicts with nothing.
        let changes = self
            .shared
            .books()
            .desired
            .claim(id, Claims::new())
            .map(|(_, changes)| changes)
            .unwrap_or_default();
        let mut failure = None;
        let mut done = Vec::with_capacity(changes.len());
        for change in changes {
            match self.change_policy(&change).await {
                Ok(()) => done.push(change),
                Err(error) => failure = Some(error),
            }
        }
        self.shared.strike_out_changes(&done);
        failure.map_or(Ok(Outcome::Done), Err)
    }

    async fn change_policy(&self, change: &Change) -> Result<(), PlaneError> {
        let key = &change.key;
        let requests = &self.shared.requests;
        let Some(after) = change.after else {
            let removed = requests.command(&message::remove_policy(key), 0).await;
            return absent_is_fine(removed)
                .map_err(|error| plane_error(format_args!("remove policy {key}"), error));
        };
        let update = change.before.is_some();
        let request = message::install_policy(key, &after.action, after.priority, update);
        let fail = |error| plane_error(format_args!("install policy {key}"), error);
        match requests.command(&request, 0).await {
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                let present = requests
                    .request(&message::get_policy(key), 0, |_, payload| {
                        SeenPolicy::parse(payload)
                    })
                    .await
                    .map_err(fail)?
                    .pop();
                let reqid = present.map_or(0, |policy| policy.reqid());
                let record = Record::Policy(*key, reqid);
                let ours = reqid != reqid_of(&after)
                    && self.shared.books().journal.entries().contains(&record);
                if !ours {
                    return Err(PlaneError {
                        op: format!("install policy {key}"),
                        reason: format!(
                            "someone else has installed the same policy (reqid {reqid})"
                        ),
                        errno: Some(libc::EEXIST),
                    });
                }
                let request = message::install_policy(key, &after.action, after.priority, true);
                requests.command(&request, 0).await.map_err(fail)
            }
            result => result.map_err(fail),
        }
    }

    async fn dump_sas(&self) -> Result<Vec<SeenSa>, NetlinkError> {
        self.shared.dump_sas().await
    }

    async fn dump_policies(&self) -> Result<Vec<SeenPolicy>, NetlinkError> {
        dump_policies(&self.shared.requests).await
    }
}

async fn dump_policies(requests: &Requester) -> Result<Vec<SeenPolicy>, NetlinkError> {
    requests
        .dump(&message::dump_policies(), |_, payload| {
            SeenPolicy::parse(payload)
        })
        .await
}

async fn dump_sas(requests: &Requester) -> Result<Vec<SeenSa>, NetlinkError> {
    let mut seen = requests
        .dump(&message::dump_sas(), |_, payload| SeenSa::parse(payload))
        .await?;
    seen.retain(|sa| sa.proto == netlink_packet_xfrm::IPPROTO_ESP && sa.id.spi != 0);
    Ok(seen)
}

/// The ledger of this network namespace, given the path that all have in common.
fn ledger_here(path: &std::path::Path) -> PathBuf {
    use std::os::unix::fs::MetadataExt as _;
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")
        .or_else(|_| std::fs::metadata("/proc/self/ns/net"))
        .map_or(0, |namespace| namespace.ino());
    let mut path = path.as_os_str().to_owned();
    path.push(format!(".{namespace}"));
    path.into()
}

/// Opens the ledger of this network namespace.
fn open_journal(path: &std::path::Path) -> io::Result<Journal> {
    let path = ledger_here(path);
    Journal::open(&path).map_err(|error| {
        let path = path.display();
        io::Error::new(
            error.kind(),
            format!("cannot keep the ledger {path}: {error}"),
        )
    })
}

/// Installs `entry` and removes it again, to see whether the kernel takes it.
///
/// # Errors
/// The kernel's refusal.
pub(crate) async fn try_sa(entry: &SaEntry) -> Result<(), PlaneError> {
    let fail = |error| plane_error("try an SA", error);
    let requests = Requester::open(libc::NETLINK_XFRM as isize)
        .map_err(|error| fail(NetlinkError::Io(error)))?;
    let install = message::install_sa(entry, false, CarriedState::default())
        .map_err(|error| unsupported("try an SA", &error))?;
    match requests.command(&install, 0).await {
        // From a probe that was interrupted.
        Err(error) if error.errno() == Some(libc::EEXIST) => {}
        result => result.map_err(fail)?,
    }
    let remove = message::remove_sa(entry.id(), entry.mark);
    absent_is_fine(requests.command(&remove, 0).await).map_err(fail)
}

impl DataPlane for XfrmPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Xfrm
    }

    async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        let mut routes = self.routes.lock().await;
        match op {
            Op::AllocSpi { src, dst, reqid } => self.alloc_spi(src, dst, reqid).await,
            Op::InstallSa(entry) => self.install_sa(entry).await,
            Op::UpdateSa {
                id,
                src,
                dst,
                encap,
            } => self.update_sa(id, src, dst, encap).await,
            Op::RemoveSa(id) => self.remove_sa(id).await,
            Op::InstallPolicies(set) => self.install_policies(&mut routes, &set).await,
            Op::RemovePolicies(id) => self.remove_policies(&mut routes, id).await,
            op @ (Op::AddAddress { .. } | Op::RemoveAddress(_)) => Err(PlaneError {
                op: op.name().to_owned(),
                reason: "virtual addresses are not handled".to_owned(),
                errno: None,
            }),
        }
    }

    async fn apply_all(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            outcomes.push(self.apply(op).await);
        }
        outcomes
    }

    async fn reconcile(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        XfrmPlane::reconcile_with_kernel(self, dry_run).await
    }

    async fn policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        self.list_policies().await
    }

    fn event_counts(&self) -> EventCounts {
        self.shared.counts.snapshot()
    }

    async fn counters(&self) -> Result<BTreeMap<SaId, SaCounters>, PlaneError> {
        let seen = self
            .dump_sas()
            .await
            .map_err(|error| plane_error("list the SAs", error))?;
        let books = self.shared.books();
        Ok(seen
            .into_iter()
            .filter(|sa| matches!(books.desired.sa(sa.id), Some(WantedSa::Installed(_))))
            .map(|sa| (sa.id, sa.counters))
            .collect())
    }

    async fn counters_of(&self, id: SaId) -> Option<SaCounters> {
        let mark = match self.shared.books().desired.sa(id)? {
            WantedSa::Installed(entry) => entry.mark,
            WantedSa::Reserved => return None,
        };
        self.shared
            .requests
            .request(&message::get_sa(id, mark), 0, |_, payload| {
                SeenSa::parse(payload)
            })
            .await
            .ok()?
            .pop()
            .map(|sa| sa.counters)
    }

    async fn shutdown(&self) {
        let mut routes = self.routes.lock().await;
        self.events.abort();
        let (sets, sas) = {
            let books = self.shared.books();
            let sets: Vec<u32> = books.desired.sets().collect();
            let sas: Vec<SaId> = books.desired.sas().map(|(id, _)| *id).collect();
            (sets, sas)
        };
        for id in sets {
            if let Err(error) = self.remove_policies(&mut routes, id).await {
                tracing::warn!(%error, "shutting down");
            }
        }
        for id in sas {
            if let Err(error) = self.remove_sa(id).await {
                tracing::warn!(%error, "shutting down");
            }
        }
        routes.clear(&self.shared.router).await;
        if let Err(error) = self.shared.books().journal.close() {
            tracing::warn!(%error, "cannot remove the ledger of installed SAs and policies");
        }
    }
}

impl Drop for XfrmPlane {
    fn drop(&mut self) {
        self.events.abort();
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // A panic elsewhere leaves the books complete: no operation on them stops half way.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn dump_sas(&self) -> Result<Vec<SeenSa>, NetlinkError> {
        dump_sas(&self.requests).await
    }

    /// Strikes out policies that are no longer in force after `changes` were made.
    fn strike_out_changes(&self, changes: &[Change]) {
        let mut books = self.books();
        for change in changes {
            let in_force = books.desired.in_force(&change.key).map(|p| reqid_of(&p));
            for side in [change.before, change.after].into_iter().flatten() {
                let reqid = reqid_of(&side);
                if in_force != Some(reqid) {
                    books.strike_out(&Record::Policy(change.key, reqid));
                }
            }
        }
    }
}

impl Books {
    /// Writes down what is about to be installed.
    fn record(&mut self, record: Record) {
        if let Err(error) = self.journal.add(record) {
            tracing::warn!(%error, "cannot write the ledger of installed SAs and policies");
        }
    }

    fn strike_out(&mut self, record: &Record) {
        if let Err(error) = self.journal.remove(record) {
            tracing::warn!(%error, "cannot write the ledger of installed SAs and policies");
        }
    }
}

fn reqid_of(policy: &InForce) -> u32 {
    match policy.action {
        PolicyAction::Protect { reqid, .. } => reqid,
        PolicyAction::Bypass | PolicyAction::Discard => 0,
    }
}

fn plane_error(op: impl std::fmt::Display, error: NetlinkError) -> PlaneError {
    PlaneError {
        op: op.to_string(),
        errno: error.errno(),
        reason: error.to_string(),
    }
}

fn unsupported(op: &str, error: &algorithm::AlgorithmError) -> PlaneError {
    PlaneError {
        op: op.to_owned(),
        reason: error.to_string(),
        errno: None,
    }
}

fn absent_is_fine(result: Result<(), NetlinkError>) -> Result<(), NetlinkError> {
    match result {
        Err(NetlinkError::Refused { errno, .. })
            if errno == libc::ESRCH || errno == libc::ENOENT =>
        {
            Ok(())
        }
        other => other,
    }
}
