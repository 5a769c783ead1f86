// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one handle that the VICI server, the metrics endpoint and the file loader drive the daemon by.
//!
//! Reading is lock-free and never waits on IKE: [`Control::snapshot`] returns what the engine last
//! published. Everything else is a message to the engine with an answer channel; dropping the
//! answer channel cancels the command.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, ArcSwapOption};
use swanherd_config::model::{Connection, SharedSecret};
use swanherd_ike::api::{ChildSaId, Command, Counter, IkeSaId, IkeSaInfo, LogLine, Selector};
use swanherd_ike::credentials::PrivateKey;
use swanherd_ipsec::plane::{PolicySet, SaCounters, SaId};
use swanherd_kernel::EventCounts;
use swanherd_kernel::audit::ListedPolicy;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::audits;
use crate::hub::{Hub, Kinds, Subscription};
use crate::vici::Clients;

/// What the engine publishes after each batch of changes.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    /// When it was published.
    pub(crate) at: Instant,
    /// When the daemon started, monotonic and seconds since the epoch.
    pub(crate) started: (Instant, u64),
    /// Loaded connections, by name.
    pub(crate) connections: Arc<BTreeMap<String, Arc<Connection>>>,
    /// IKE SAs, by id.
    pub(crate) ike_sas: Arc<BTreeMap<IkeSaId, Arc<IkeSaInfo>>>,
    /// Counters of the data plane at its last dump.
    pub(crate) sa_counters: Arc<BTreeMap<SaId, SaCounters>>,
    /// Monotonic octets and packets per (connection, child) that survive rekeys.
    pub(crate) totals: Arc<BTreeMap<(String, String), Totals>>,
    /// IKE counters per connection; the empty name holds the global ones.
    pub(crate) counters: Arc<BTreeMap<String, BTreeMap<Counter, u64>>>,
    /// Last failure of an IKE SA per connection, with the seconds since the epoch.
    pub(crate) last_errors: Arc<BTreeMap<String, (u64, String)>>,
    /// What troubles children, by connection and child.
    pub(crate) troubles: Arc<BTreeMap<(String, String), Trouble>>,
    /// Names of loaded credentials.
    pub(crate) credentials: Arc<CredentialNames>,
    /// Number of half-open IKE SAs.
    pub(crate) half_open: usize,
    /// Name of the data plane.
    pub(crate) data_plane: &'static str,
    /// Traps and shunts in force, by the id of their set.
    pub(crate) standing: Arc<BTreeMap<u32, Arc<PolicySet>>>,
    /// What the audits of the data plane found.
    pub(crate) audits: Arc<audits::Summary>,
    /// What the data plane saw besides the events that it delivered.
    pub(crate) plane_events: EventCounts,
}

/// How the file of definitions was applied last, at start or at a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Definitions {
    /// The file.
    pub(crate) file: String,
    /// Seconds since the epoch.
    pub(crate) at: u64,
    /// Why nothing was applied: the file is missing, or has a syntax error.
    pub(crate) error: Option<String>,
    /// Connections that are loaded from the file.
    pub(crate) loaded: usize,
    /// Connections of the file that were refused, and why.
    pub(crate) refused: BTreeMap<String, String>,
}

/// What troubles a child.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// Why it failed last, with the seconds since the epoch.
    pub(crate) error: Option<(u64, String)>,
    /// When the next attempt to bring it up is made.
    pub(crate) next_attempt: Option<Instant>,
}

/// Answer to someone who asked for the policies that are in force.
pub(crate) type PoliciesReply = oneshot::Sender<Result<Vec<ListedPolicy>, String>>;

/// Octets and packets summed over all SA generations of one child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Octets received.
    pub(crate) bytes_in: u64,
    /// Octets sent.
    pub(crate) bytes_out: u64,
    /// Packets received.
    pub(crate) packets_in: u64,
    /// Packets sent.
    pub(crate) packets_out: u64,
}

/// What `get-keys`, `get-shared` and `list-certs` may tell.
#[derive(Clone, Debug, Default)]
pub(crate) struct CredentialNames {
    /// Key ids (hex SHA-1 of the public key), as `load-key` returned them.
    pub(crate) keys: Vec<String>,
    /// Ids of shared secrets.
    pub(crate) shared: Vec<String>,
    /// Certificates: DER and whether they are trust anchors and have a private key here.
    pub(crate) certs: Vec<CertInfo>,
}

/// One loaded certificate.
#[derive(Clone, Debug)]
pub(crate) struct CertInfo {
    /// DER.
    pub(crate) der: Arc<[u8]>,
    /// A CA certificate.
    pub(crate) is_ca: bool,
    /// Its private key is loaded.
    pub(crate) has_key: bool,
}

/// How a command went; `matches` and `terminated` are for `terminate` and `rekey`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommandReply {
    /// Success, or what the operator is shown.
    pub(crate) result: Result<(), String>,
    /// SAs that matched.
    pub(crate) matches: u32,
    /// SAs that were taken down.
    pub(crate) terminated: u32,
    /// Log lines that the one who waits did not take in time.
    pub(crate) lost_lines: u32,
}

/// A request to the engine.
#[derive(Debug)]
pub(crate) enum Request {
    /// Load or replace a connection.
    LoadConnection(Box<Connection>, oneshot::Sender<Result<(), String>>),
    /// Unload a connection.
    UnloadConnection(String, oneshot::Sender<Result<(), String>>),
    /// Load or replace a shared secret.
    LoadShared(SharedSecret, oneshot::Sender<Result<(), String>>),
    /// Unload a shared secret by id. Unknown ids succeed.
    UnloadShared(String, oneshot::Sender<Result<(), String>>),
    /// Load a private key. Answers with its id.
    LoadKey(PrivateKey, oneshot::Sender<String>),
    /// Unload a private key by id.
    UnloadKey(String, oneshot::Sender<Result<(), String>>),
    /// Load a certificate (PEM or DER); `ca` if it was loaded as a CA certificate.
    LoadCert {
        /// PEM or DER.
        data: Vec<u8>,
        /// Loaded as a CA certificate.
        ca: bool,
        /// Answer.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Forget all credentials.
    ClearCredentials(oneshot::Sender<()>),
    /// Forget certificates that were received from peers.
    FlushCerts(oneshot::Sender<()>),
    /// Read strongswan.conf again.
    ReloadSettings(oneshot::Sender<Result<(), String>>),
    /// Run a command. Log lines of the IKE SAs concerned go to `log`; a full queue drops lines,
    /// a closed `reply` cancels.
    Command {
        /// What.
        command: Command,
        /// Where log lines go.
        log: Option<mpsc::Sender<LogLine>>,
        /// Answer.
        reply: oneshot::Sender<CommandReply>,
    },
    /// Reset the counters of one connection, or of all.
    ResetCounters(Option<String>, oneshot::Sender<Result<(), String>>),
    /// Refresh `sa_counters` and `totals` from the data plane now.
    RefreshCounters(oneshot::Sender<()>),
    /// Compare the data plane with what is wanted of it, and mend it.
    Reconcile {
        /// Only compare.
        dry_run: bool,
        /// Answer.
        reply: audits::Reply,
    },
    /// List every policy that is in force.
    Policies(PoliciesReply),
}

/// See the module's text. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub(crate) snapshot: Arc<ArcSwap<Snapshot>>,
    pub(crate) requests: mpsc::Sender<Request>,
    pub(crate) events: Hub,
    /// Rings when somebody no longer waits for a command.
    pub(crate) abandoned: Arc<Notify>,
    /// Who is connected to the VICI server, in numbers.
    pub(crate) clients: Arc<Clients>,
    definitions: Arc<ArcSwapOption<Definitions>>,
}

impl Control {
    /// A handle to the engine that publishes `snapshot` and takes `requests`.
    pub(crate) fn new(snapshot: Snapshot, requests: mpsc::Sender<Request>) -> Self {
        Self {
            snapshot: Arc::new(ArcSwap::from_pointee(snapshot)),
            requests,
            events: Hub::default(),
            abandoned: Arc::default(),
            clients: Arc::default(),
            definitions: Arc::default(),
        }
    }

    /// How the file of definitions was applied; `None` before that.
    pub(crate) fn definitions(&self) -> Option<Arc<Definitions>> {
        self.definitions.load_full()
    }

    /// Tells everybody how the file of definitions was applied.
    pub(crate) fn publish_definitions(&self, definitions: Definitions) {
        self.definitions.store(Some(Arc::new(definitions)));
    }

    /// What the engine last published.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// All events of these kinds from now on.
    pub(crate) fn events(&self, kinds: Kinds) -> Subscription {
        self.events.subscribe(kinds)
    }

    /// Gives a command to the engine. Log lines of the IKE SAs concerned go to `log`.
    ///
    /// # Errors
    /// If the daemon is shutting down.
    pub(crate) async fn command(
        &self,
        command: Command,
        log: Option<mpsc::Sender<LogLine>>,
    ) -> Result<Pending, ShuttingDown> {
        let (reply, answer) = oneshot::channel();
        let request = Request::Command {
            command,
            log,
            reply,
        };
        // Made first: a command that is queued and then given up is withdrawn as well.
        let pending = Pending {
            answer,
            abandoned: Arc::clone(&self.abandoned),
        };
        self.requests
            .send(request)
            .await
            .map_err(|_| ShuttingDown)?;
        Ok(pending)
    }

    /// Sends a request built around an answer channel and waits for the answer.
    ///
    /// # Errors
    /// If the daemon is shutting down.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, ShuttingDown> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            .map_err(|_| ShuttingDown)?;
        answer.await.map_err(|_| ShuttingDown)
    }
}

/// The answer to a command. The engine learns at once when it is dropped.
#[derive(Debug)]
pub(crate) struct Pending {
    answer: oneshot::Receiver<CommandReply>,
    abandoned: Arc<Notify>,
}

impl Pending {
    /// The answer. Cancelling this future loses nothing.
    ///
    /// # Errors
    /// If the daemon is shutting down.
    pub(crate) async fn answer(&mut self) -> Result<CommandReply, ShuttingDown> {
        (&mut self.answer).await.map_err(|_| ShuttingDown)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.answer.close();
        self.abandoned.notify_one();
    }
}

/// The engine does not answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the daemon is shutting down")]
pub(crate) struct ShuttingDown;

/// What a `terminate` or `rekey` selector hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// IKE SA.
    pub(crate) ike: IkeSaId,
    /// CHILD SA, if children were meant.
    pub(crate) child: Option<ChildSaId>,
}

impl Match {
    /// A selector that names just this.
    pub(crate) fn selector(&self) -> Selector {
        Selector {
            ike_id: Some(self.ike),
            child_id: self.child,
            ..Selector::default()
        }
    }
}

impl Snapshot {
    /// Why the connection, or that child of it, failed last, with the seconds since the epoch.
    pub(crate) fn last_error(
        &self,
        connection: &str,
        child: Option<&str>,
    ) -> Option<&(u64, String)> {
        let of_child = child.and_then(|child| {
            let key = (connection.to_owned(), child.to_owned());
            self.troubles.get(&key)?.error.as_ref()
        });
        [self.last_errors.get(connection), of_child]
            .into_iter()
            .flatten()
            .max_by_key(|(at, _)| *at)
    }

    /// How many attempts to bring up children `selector` names by name: planned ones, and those
    /// under way for which there is no CHILD SA yet.
    pub(crate) fn attempts(&self, selector: &Selector) -> usize {
        if selector.child_id.is_some() {
            return 0;
        }
        let fits = |want: &Option<String>, name: &str| want.as_deref().is_none_or(|w| w == name);
        let planned = self
            .troubles
            .iter()
            .filter(|((connection, child), trouble)| {
                selector.ike_id.is_none()
                    && trouble.next_attempt.is_some()
                    && fits(&selector.ike, connection)
                    && fits(&selector.child, child)
            });
        let Some(child) = &selector.child else {
            return planned.count();
        };
        let connecting = self.ike_sas.values().filter(|sa| {
            selector.ike_id.is_none_or(|id| id == sa.id)
                && fits(&selector.ike, sa.connection.as_deref().unwrap_or_default())
                && sa.wanted.contains(child)
                && !sa.children.values().any(|one| one.name == *child)
        });
        planned.count() + connecting.count()
    }

    /// SAs that `selector` names.
    pub(crate) fn matches(&self, selector: &Selector) -> Vec<Match> {
        let wants_child = selector.child.is_some() || selector.child_id.is_some();
        let mut found = Vec::new();
        for (&ike, info) in self.ike_sas.iter() {
            let name_fits = |want: &Option<String>| want.is_none() || *want == info.connection;
            if !name_fits(&selector.ike) || selector.ike_id.is_some_and(|id| id != ike) {
                continue;
            }
            if !wants_child {
                found.push(Match { ike, child: None });
                continue;
            }
            for (&child, child_info) in &info.children {
                let name = selector
                    .child
                    .as_ref()
                    .is_none_or(|name| *name == child_info.name);
                if name && selector.child_id.is_none_or(|id| id == child) {
                    found.push(Match {
                        ike,
                        child: Some(child),
                    });
                }
            }
        }
        found
    }
}
