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

use swanherd_ipsec::plane::{Op, Outcome, PlaneError, PlaneEvent, SaCounters, SaId};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::audit::{Audit, ListedPolicy};
use crate::netlink::{NetlinkError, Requester};
use crate::plane::{DataPlane, EventCounts, PlaneKind};
use crate::reconcile::WantedSa;
use crate::route::Router;
use crate::route_table::RouteTable;
use crate::watch;

mod algorithm;
mod attribute;
mod books;
mod claims;
mod event;
mod inspect;
mod listing;
mod message;
mod offload;
mod operation;
mod policies;
mod reconciling;
mod selector;
mod states;
mod thresholds;
mod watching;

pub(crate) use claims::{claims, owner};
pub use inspect::{Inspection, inspect};
pub(crate) use selector::{covering_prefix, priority_between};
pub(crate) use states::try_sa;

use books::Books;
use offload::Offload;

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
    /// Whether the kernel's hash thresholds of policies follow the prefixes in use, so that
    /// policies are found and removed in the same time however many there are. What was in force
    /// before is put back at the end.
    pub hash_thresholds: bool,
}

impl Default for XfrmOptions {
    fn default() -> Self {
        Self {
            ledger: None,
            event_queue: 1024,
            hash_thresholds: true,
        }
    }
}

/// The kernel's XFRM as a data plane.
#[derive(Debug)]
pub struct XfrmPlane {
    shared: Arc<Shared>,
    /// Held while an operation runs, so that operations keep their order.
    routes: Arc<tokio::sync::Mutex<RouteTable>>,
    events: JoinHandle<()>,
    /// Follows this host's network.
    watch: JoinHandle<()>,
    /// Follows the prefixes in use, if it may.
    thresholds: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    requests: Requester,
    router: Router,
    books: Mutex<Books>,
    counts: event::Counts,
    features: Features,
    /// The kernel knows interface ids, and masks of the marks that SAs set (Linux 4.19); found out
    /// when first asked for.
    if_ids: tokio::sync::OnceCell<bool>,
    offload: Offload,
    thresholds: thresholds::Keeper,
}

/// What this kernel can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Features {
    /// SAs have directions (Linux 6.10).
    sa_dir: bool,
}

impl XfrmPlane {
    /// Opens the sockets, removes what an earlier run left in the kernel, and begins to listen.
    /// Needs a tokio runtime and `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// If the kernel has no XFRM, permission is missing, or the ledger cannot be written.
    pub async fn start(options: XfrmOptions) -> io::Result<(Self, mpsc::Receiver<PlaneEvent>)> {
        let books = Books::open(options.ledger.as_deref())?;
        let requests = Requester::open(libc::NETLINK_XFRM as isize)?;
        let features = probe(&requests).await.map_err(io::Error::other)?;
        let shared = Arc::new(Shared {
            requests,
            router: Router::open()?,
            books: Mutex::new(books),
            counts: event::Counts::default(),
            features,
            if_ids: tokio::sync::OnceCell::new(),
            offload: Offload::default(),
            thresholds: thresholds::Keeper::default(),
        });
        let (sender, receiver) = mpsc::channel(options.event_queue.max(1));
        let socket = event::open_socket()?;
        let routes = Arc::<tokio::sync::Mutex<RouteTable>>::default();
        let adapter = watching::Adapter {
            shared: Arc::clone(&shared),
            routes: Arc::clone(&routes),
        };
        let left = shared.books().addresses();
        routes.lock().await.take_for_ours(left);
        let changes = watch::open_socket()?;
        let watch = tokio::spawn(watch::run(changes, adapter, sender.clone()));
        let events = tokio::spawn(event::run(Arc::clone(&shared), socket, sender));
        let mut plane = Self {
            shared,
            routes,
            events,
            watch,
            thresholds: None,
        };
        let reqids = plane.shared.books().reqids_of_policies();
        let leftovers = plane.reconcile(false).await.map_err(io::Error::other)?;
        // Those policies may have asked for SAs, and what comes next has the same request ids: the
        // kernel would not ask again for a while.
        if let Err(error) = plane.shared.remove_placeholders(&reqids).await {
            tracing::warn!(%error, "cannot end what the kernel waits for since an earlier run");
        }
        reconciling::report_leftovers(&leftovers);
        plane.shared.books().strike_out_addresses();
        thresholds::begin(&plane.shared).await;
        if options.hash_thresholds {
            plane.thresholds = Some(tokio::spawn(thresholds::run(Arc::clone(&plane.shared))));
        }
        Ok((plane, receiver))
    }

    /// Lookups of routes and addresses.
    pub fn router(&self) -> &Router {
        &self.shared.router
    }

    fn stop(&self) {
        self.events.abort();
        self.watch.abort();
        if let Some(task) = &self.thresholds {
            task.abort();
        }
    }
}

impl DataPlane for XfrmPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Xfrm
    }

    async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        let what = op.name();
        self.run(vec![op]).await.pop().unwrap_or_else(|| {
            Err(PlaneError {
                op: what.to_owned(),
                reason: "no answer".to_owned(),
                errno: None,
            })
        })
    }

    async fn apply_all(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        self.run(ops).await
    }

    async fn reconcile(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        self.reconcile_with_kernel(dry_run).await
    }

    async fn policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        self.list_policies().await
    }

    fn event_counts(&self) -> EventCounts {
        self.shared.counts.snapshot()
    }

    async fn counters(&self) -> Result<BTreeMap<SaId, SaCounters>, PlaneError> {
        let seen = self
            .shared
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
        self.get_sa(id, mark).await.map(|sa| sa.counters)
    }

    async fn shutdown(&self) {
        self.stop();
        let ops: Vec<Op> = {
            let books = self.shared.books();
            let sets = books.desired.sets().map(Op::RemovePolicies);
            let sas = books.desired.sas().map(|(id, _)| Op::RemoveSa(*id));
            sets.chain(sas).collect()
        };
        for outcome in self.run(ops).await {
            if let Err(error) = outcome {
                tracing::warn!(%error, "shutting down");
            }
        }
        self.routes.lock().await.clear(&self.shared.router).await;
        self.shared.books().strike_out_addresses();
        thresholds::end(&self.shared).await;
        if let Err(error) = self.shared.books().journal.close() {
            tracing::warn!(%error, "cannot remove the ledger of installed SAs and policies");
        }
    }
}

impl Drop for XfrmPlane {
    fn drop(&mut self) {
        self.stop();
        // The tasks that were told to stop may hold the books for a while yet.
        self.shared.books().journal.unlock();
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // A panic elsewhere leaves the books complete: no operation on them stops half way.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Older kernels ignore what they do not know, and what was meant for one interface would
    /// apply to all of this host.
    async fn expect_if_ids(&self) -> Result<(), String> {
        let known = self.if_ids.get_or_try_init(|| async {
            let parse = |_: u16, payload: &[u8]| {
                message::SeenSa::parse(payload)?;
                Some(message::has_if_id(payload))
            };
            let id = self.choose_spi(std::net::Ipv4Addr::LOCALHOST.into())?;
            let request = message::probe_if_id(id);
            let answers = self.requests.request(&request, 0, parse).await;
            let removal = message::remove_sa(id, None);
            absent_is_fine(self.requests.command(&removal, 0).await)?;
            self.give_back_spi(id);
            let known = answers?.pop();
            known.ok_or(NetlinkError::Protocol("no SPI in the answer"))
        });
        match known.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(
                "this kernel has no interface ids, and no SAs that set marks of what arrives or parts \
                 of marks (Linux 4.19 and later have)"
                    .into(),
            ),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Finds out what the kernel can.
async fn probe(requests: &Requester) -> Result<Features, NetlinkError> {
    match requests.command(&message::probe_sa_dir(), 0).await {
        Err(error @ (NetlinkError::Io(_) | NetlinkError::Protocol(_))) => Err(error),
        Err(NetlinkError::Refused { errno, .. }) if errno == libc::EPERM => {
            Err(NetlinkError::Io(io::Error::from_raw_os_error(errno)))
        }
        refused => Ok(Features {
            sa_dir: refused.is_err_and(|error| error.errno() == Some(libc::ERANGE)),
        }),
    }
}

fn plane_error(op: impl std::fmt::Display, error: NetlinkError) -> PlaneError {
    PlaneError {
        op: op.to_string(),
        errno: error.errno(),
        reason: error.to_string(),
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
