// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the control side and the packet threads of the TUN plane share.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use portable_atomic::AtomicU64;
use swanherd_esp::{Expiry, Flow, Fragments};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PlaneEvent, SaId};
use tokio::sync::mpsc;

use super::clear::Clear;
use super::deadlines::Deadlines;
use super::device::{Device, Waker, wait};
use super::revive::Losses;
use super::tables::{Tables, Template};
use crate::plane::{AcquireCounts, DropCounts};
use crate::udp::{IkeSocket, Received};

/// A template without SA raises an acquire at most this often, however many packets hit it, unless
/// the kernel says otherwise (`net.core.xfrm_acq_expires`, of which this is the default).
const ACQUIRE_INTERVAL: Duration = Duration::from_secs(30);

/// Events that may wait for a slow reader. Expiries come at most twice an SA, so only mapping
/// changes can be lost, which are reported again.
const BACKLOG: usize = 65_536;

/// How long a thread rests whose device cannot be read.
const FAILED_PAUSE_MS: i32 = 20;

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum DropReason {
    Malformed,
    NoPolicy,
    NoSa,
    Shunted,
    Expired,
    SendFailed,
    UnknownSpi,
    Replayed,
    Forged,
    DeviceRefused,
    IkeQueueFull,
    Looped,
}

/// A packet without an SA, which asked for one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    at: Instant,
    /// The packet, as selectors of this side and the peer's.
    pub(super) packet: (TrafficSelector, TrafficSelector),
}

/// How many reasons there are.
const DROP_REASONS: usize = DropReason::Looped as usize + 1;

pub(super) struct Shared {
    pub(super) device: Device,
    pub(super) socket: Arc<IkeSocket>,
    pub(super) waker: Waker,
    pub(super) clear: Clear,
    tables: RwLock<Tables>,
    events: mpsc::Sender<PlaneEvent>,
    ike: mpsc::Sender<Received>,
    backlog: Mutex<VecDeque<PlaneEvent>>,
    /// When templates asked for an SA; until they have one, or for a while.
    acquires: Mutex<BTreeMap<Template, Asked>>,
    acquire_interval: Duration,
    coalesced_acquires: AtomicU64,
    dropped_acquires: AtomicU64,
    /// Ports of fragments that leave, which any transmit thread may meet.
    fragments: Mutex<Fragments>,
    /// SAs at their hard limit, to be removed by whoever holds no lock.
    doomed: Mutex<Vec<SaId>>,
    any_doomed: AtomicBool,
    deadlines: Mutex<Deadlines>,
    drops: [AtomicU64; DROP_REASONS],
    stopping: AtomicBool,
    /// Where it is told that the device is gone.
    pub(super) losses: Losses,
}

impl Shared {
    pub(super) fn new(
        device: Device,
        socket: Arc<IkeSocket>,
        waker: Waker,
        clear: Clear,
        events: mpsc::Sender<PlaneEvent>,
        ike: mpsc::Sender<Received>,
    ) -> Self {
        Self {
            device,
            socket,
            waker,
            clear,
            tables: RwLock::default(),
            events,
            ike,
            backlog: Mutex::default(),
            acquires: Mutex::default(),
            acquire_interval: acquire_interval(),
            coalesced_acquires: AtomicU64::new(0),
            dropped_acquires: AtomicU64::new(0),
            fragments: Mutex::default(),
            doomed: Mutex::default(),
            any_doomed: AtomicBool::new(false),
            deadlines: Mutex::default(),
            drops: std::array::from_fn(|_| AtomicU64::new(0)),
            stopping: AtomicBool::new(false),
            losses: Losses::default(),
        }
    }

    pub(super) fn tables(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tables_mut(&self) -> RwLockWriteGuard<'_, Tables> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Ends the packet threads.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.waker.wake();
    }

    /// Seconds since the epoch.
    pub(super) fn now(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
    }

    pub(super) fn count(&self, reason: DropReason, packets: u64) {
        self.drops[reason as usize].fetch_add(packets, Ordering::Relaxed);
    }

    /// Dropped packets by reason.
    pub(super) fn drops(&self) -> DropCounts {
        let of = |reason: DropReason| self.drops[reason as usize].load(Ordering::Relaxed);
        DropCounts {
            malformed: of(DropReason::Malformed),
            no_policy: of(DropReason::NoPolicy),
            no_sa: of(DropReason::NoSa),
            shunted: of(DropReason::Shunted),
            expired: of(DropReason::Expired),
            send_failed: of(DropReason::SendFailed),
            unknown_spi: of(DropReason::UnknownSpi),
            replayed: of(DropReason::Replayed),
            forged: of(DropReason::Forged),
            device_refused: of(DropReason::DeviceRefused),
            ike_queue_full: of(DropReason::IkeQueueFull),
            looped: of(DropReason::Looped),
        }
    }

    pub(super) fn deliver_ike(&self, received: Received) {
        if self.ike.try_send(received).is_err() {
            self.count(DropReason::IkeQueueFull, 1);
        }
    }

    /// Reports an event now, or later if the reader is slow. `false` if it had to be dropped.
    pub(super) fn report(&self, event: PlaneEvent) -> bool {
        let mut backlog = lock(&self.backlog);
        if backlog.is_empty() {
            let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) else {
                return true;
            };
            backlog.push_back(event);
            return true;
        }
        if backlog.len() >= BACKLOG {
            return false;
        }
        backlog.push_back(event);
        true
    }

    /// The device cannot be read, because it was deleted, or for a moment. Slows the caller down,
    /// whose polls return at once.
    pub(super) fn device_failed(&self, error: &std::io::Error) {
        tracing::trace!(%error, "reading the TUN device");
        self.losses.look();
        wait([self.waker.fd()], libc::POLLIN, FAILED_PAUSE_MS);
    }

    /// A limit in octets or packets was reached. Called with an SA's lock held, so a hard expiry is
    /// only noted; [`reap`](Self::reap) carries it out.
    pub(super) fn expired(&self, id: SaId, expiry: Expiry) {
        match expiry {
            Expiry::Soft => {
                self.report(PlaneEvent::Expire { id, hard: false });
            }
            Expiry::Hard => {
                lock(&self.doomed).push(id);
                self.any_doomed.store(true, Ordering::Release);
            }
        }
    }

    /// Removes the SAs that reached a hard limit.
    pub(super) fn reap(&self) {
        if !self.any_doomed.load(Ordering::Acquire)
            || !self.any_doomed.swap(false, Ordering::AcqRel)
        {
            return;
        }
        let doomed = std::mem::take(&mut *lock(&self.doomed));
        for id in doomed {
            let removed = self.tables_mut().remove(id);
            if removed {
                self.deadlines().disarm(id);
                self.report(PlaneEvent::Expire { id, hard: true });
            }
        }
    }

    /// A packet hit a policy without SA. Acquires that the reader has no room for are dropped: the
    /// next packet raises another.
    pub(super) fn acquire(&self, template: Template, flow: &Flow) {
        let now = Instant::now();
        let mut acquires = lock(&self.acquires);
        if acquires
            .get(&template)
            .is_some_and(|last| now.duration_since(last.at) < self.acquire_interval)
        {
            self.coalesced_acquires.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (local, remote) = (flow.source_selector(), flow.destination_selector());
        let event = PlaneEvent::Acquire {
            reqid: template.reqid,
            local,
            remote,
        };
        if self.events.try_send(event).is_ok() {
            let asked = Asked {
                at: now,
                packet: (local, remote),
            };
            acquires.insert(template, asked);
        } else {
            self.dropped_acquires.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Templates have an SA, or are gone: their next packet without one asks again.
    pub(super) fn forget_acquires(&self, answered: impl Fn(&Template, &Asked) -> bool) {
        lock(&self.acquires).retain(|template, asked| !answered(template, asked));
    }

    /// Acquires that were not reported.
    pub(super) fn acquire_counts(&self) -> AcquireCounts {
        AcquireCounts {
            coalesced: self.coalesced_acquires.load(Ordering::Relaxed),
            dropped: self.dropped_acquires.load(Ordering::Relaxed),
            ..AcquireCounts::default()
        }
    }

    /// The flow of a packet that leaves: a fragment has the ports of its first one.
    pub(super) fn flow_of(&self, packet: &[u8]) -> Option<Flow> {
        let flow = Flow::of(packet)?;
        if flow.ports.is_some() && !swanherd_esp::fragments::is_fragment(packet) {
            return Some(flow);
        }
        Some(lock(&self.fragments).complete(packet, flow))
    }

    /// The time limits of SAs.
    pub(super) fn deadlines(&self) -> MutexGuard<'_, Deadlines> {
        lock(&self.deadlines)
    }

    /// Reports what time has brought, and what waited for the reader.
    pub(super) fn tick(&self) {
        let now = Instant::now();
        loop {
            let Some(due) = self.deadlines().pop(now) else {
                break;
            };
            if due.hard {
                lock(&self.doomed).push(due.id);
                self.any_doomed.store(true, Ordering::Release);
            } else if self.tables().soften(due.id) {
                self.report(PlaneEvent::Expire {
                    id: due.id,
                    hard: false,
                });
            }
        }
        self.reap();
        let mut backlog = lock(&self.backlog);
        while let Some(event) = backlog.pop_front() {
            if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
                backlog.push_front(event);
                break;
            }
        }
    }
}

fn acquire_interval() -> Duration {
    std::fs::read_to_string("/proc/sys/net/core/xfrm_acq_expires")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|seconds| *seconds > 0)
        .map_or(ACQUIRE_INTERVAL, Duration::from_secs)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
