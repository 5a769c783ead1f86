// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel reports on its own: acquires, expiries, NAT mappings, and changes by others.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use netlink_packet_xfrm::{
    XFRM_MSG_ACQUIRE, XFRM_MSG_DELPOLICY, XFRM_MSG_DELSA, XFRM_MSG_EXPIRE, XFRM_MSG_FLUSHPOLICY,
    XFRM_MSG_FLUSHSA, XFRM_MSG_MAPPING, XFRM_MSG_MIGRATE, XFRM_MSG_NEWPOLICY, XFRM_MSG_NEWSA,
    XFRM_MSG_POLEXPIRE, XFRM_MSG_UPDPOLICY, XFRM_MSG_UPDSA, XFRMNLGRP_ACQUIRE, XFRMNLGRP_EXPIRE,
    XFRMNLGRP_MAPPING, XFRMNLGRP_MIGRATE, XFRMNLGRP_POLICY, XFRMNLGRP_SA,
};
use netlink_sys::Socket;
use portable_atomic::{AtomicBool, AtomicU64, Ordering};
use swanherd_ipsec::plane::{PlaneEvent, PolicySet, SaCounters, SaEntry, SaId};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::Instant;
use zeroize::Zeroize as _;

use super::Shared;
use super::message::Placeholder;
use crate::netlink;
use crate::plane::{AcquireCounts, EventCounts};
use crate::reconcile::{Record, WantedSa};
use crate::watch::Due;

mod acquires;
mod mend;
mod notice;

use acquires::{Acquires, Asked, Fate};
use notice::{Acquire, Subject};

/// Room for bursts; the kernel grants what its limits allow.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// How long the task rests after an error of the socket that it does not know.
const ERROR_PAUSE: Duration = Duration::from_millis(500);
/// Mappings remembered, so that each change is reported once and not with each packet.
const MAX_MAPPINGS: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Counts {
    overruns: AtomicU64,
    undelivered: AtomicU64,
    acquires_foreign: AtomicU64,
    acquires_without_selector: AtomicU64,
    acquires_coalesced: AtomicU64,
    acquires_dropped: AtomicU64,
    foreign_changes: AtomicU64,
    /// Acquires that were delivered a moment ago.
    asked: std::sync::Mutex<Acquires>,
    /// SAs that an audit found missing, for the event task to report.
    missing: std::sync::Mutex<BTreeSet<SaId>>,
    /// Held while operations are between the books and the kernel, and while both are compared:
    /// what is on its way to the kernel is not missing there.
    pub(super) installing: tokio::sync::Mutex<()>,
    /// Anything may have gone without a notice.
    unsure: AtomicBool,
    wake: tokio::sync::Notify,
}

impl Counts {
    pub(super) fn snapshot(&self) -> EventCounts {
        EventCounts {
            overruns: self.overruns.load(Ordering::Relaxed),
            undelivered: self.undelivered.load(Ordering::Relaxed),
            acquires: AcquireCounts {
                foreign: self.acquires_foreign.load(Ordering::Relaxed),
                without_selector: self.acquires_without_selector.load(Ordering::Relaxed),
                coalesced: self.acquires_coalesced.load(Ordering::Relaxed),
                dropped: self.acquires_dropped.load(Ordering::Relaxed),
            },
            foreign_changes: self.foreign_changes.load(Ordering::Relaxed),
            ..EventCounts::default()
        }
    }

    /// What wider policies, with other request ids, asked for on behalf of packets that take `set`
    /// from now on.
    pub(super) fn answer_acquires(&self, reqid: u32, set: &PolicySet) -> Vec<Placeholder> {
        lock(&self.asked).answer(reqid, set)
    }

    /// An SA with this request id, or a policy that asked for one, has gone: what comes next asks
    /// for another.
    pub(super) fn forget_acquires(&self, reqid: u32) {
        lock(&self.asked).forget_all(reqid);
    }
}

/// Opens the multicast socket. It must be bound before it joins: an unbound socket joins without
/// complaint and never receives.
pub(super) fn open_socket() -> io::Result<AsyncFd<Socket>> {
    let socket = netlink::open_socket(libc::NETLINK_XFRM as isize)?;
    netlink::enlarge_buffer(&socket, SOCKET_BUFFER);
    for group in [
        XFRMNLGRP_ACQUIRE,
        XFRMNLGRP_EXPIRE,
        XFRMNLGRP_SA,
        XFRMNLGRP_POLICY,
        XFRMNLGRP_MAPPING,
        XFRMNLGRP_MIGRATE,
    ] {
        socket.get_ref().add_membership(group)?;
    }
    Ok(socket)
}

/// Delivers events until nobody listens any more.
pub(super) async fn run(
    shared: Arc<Shared>,
    socket: AsyncFd<Socket>,
    sender: mpsc::Sender<PlaneEvent>,
) {
    if let Err(error) = drop_echoes(&socket, shared.requests.port()) {
        // They are read and recognised then.
        tracing::debug!(%error, "cannot leave out the echoes of our own changes");
    }
    let mut buffer = vec![0; 64 * 1024];
    let mut reader = Reader {
        shared: &shared,
        sender: &sender,
        mappings: BTreeMap::new(),
        suspect: Suspect::default(),
        due: Due::default(),
        behind: false,
    };
    while !sender.is_closed() {
        let received = tokio::select! {
            // First, so that a storm cannot put it off.
            biased;
            () = reader.due.wait() => {
                let begun = Instant::now();
                let suspect = std::mem::take(&mut reader.suspect);
                reader.due.done(begun, begun);
                if check(&shared, &sender, suspect).await.is_err() {
                    return;
                }
                reader.due.rest(begun, Instant::now());
                continue;
            }
            () = shared.counts.wake.notified() => {
                let missing = std::mem::take(&mut *lock(&shared.counts.missing));
                if deliver_expired(&sender, missing, |id| forget(&shared, id)).await.is_err() {
                    return;
                }
                if shared.counts.unsure.swap(false, Ordering::Relaxed) {
                    reader.suspect(|suspect| (suspect.sas, suspect.policies) = (true, true));
                }
                continue;
            }
            room = sender.reserve(), if reader.behind => {
                drop(room);
                // What was not delivered is found by comparing.
                reader.behind = false;
                reader.suspect(|suspect| suspect.sas = true);
                continue;
            }
            received = netlink::receive(&socket, &mut buffer) => received,
        };
        match received {
            Ok(length) => {
                for frame in netlink::frames(&buffer[..length]) {
                    reader.read(&frame);
                }
                // Multicast copies of new SAs carry keys.
                buffer[..length].zeroize();
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                shared.counts.overruns.fetch_add(1, Ordering::Relaxed);
                reader.suspect(|suspect| (suspect.sas, suspect.policies) = (true, true));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the kernel's IPsec events");
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}

/// Has the kernel leave out the copies of changes that we make ourselves: thousands of SAs installed
/// at once would fill the socket's buffer with them.
fn drop_echoes(socket: &AsyncFd<Socket>, own_port: u32) -> io::Result<()> {
    /// `nlmsg_pid` in the header, which is in host order; the filter loads in network order.
    const PORT_OFFSET: u32 = 12;
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let own = u32::from_be_bytes(own_port.to_ne_bytes());
    let program = [
        socket2::SockFilter::new(LOAD, 0, 0, PORT_OFFSET),
        socket2::SockFilter::new(EQUAL, 0, 1, own),
        socket2::SockFilter::new(RETURN, 0, 0, 0),
        socket2::SockFilter::new(RETURN, 0, 0, u32::MAX),
    ];
    socket2::SockRef::from(socket.get_ref()).attach_filter(&program)
}

/// Lets the event task report SAs that are gone.
pub(super) fn report_missing(shared: &Shared, missing: &[SaId]) {
    if !missing.is_empty() {
        lock(&shared.counts.missing).extend(missing);
        shared.counts.wake.notify_one();
    }
}

/// Lets the event task compare everything with the kernel, which has dropped SAs or policies
/// without saying so.
pub(super) fn compare_all(shared: &Shared) {
    shared.counts.unsure.store(true, Ordering::Relaxed);
    shared.counts.wake.notify_one();
}

/// What may no longer be in the kernel as the books say.
#[derive(Clone, Copy, Debug, Default)]
struct Suspect {
    sas: bool,
    policies: bool,
}

/// Turns notices into events.
struct Reader<'a> {
    shared: &'a Shared,
    sender: &'a mpsc::Sender<PlaneEvent>,
    /// Where packets of SAs come from, as last told.
    mappings: BTreeMap<SaId, (IpAddr, u16)>,
    suspect: Suspect,
    /// When what is suspect is compared with the kernel.
    due: Due,
    /// An event found no room.
    behind: bool,
}

impl<'a> Reader<'a> {
    fn read(&mut self, frame: &netlink::Frame<'_>) {
        match frame.kind {
            XFRM_MSG_ACQUIRE => {
                if let Some(acquire) = Acquire::read(frame.payload) {
                    self.acquire(&acquire);
                }
            }
            XFRM_MSG_EXPIRE => {
                if let Some((subject, hard)) = notice::read_expire(frame.payload) {
                    self.expire(&subject, hard);
                }
            }
            XFRM_MSG_MAPPING => {
                if let Some((subject, from)) = notice::read_mapping(frame.payload) {
                    self.mapping(&subject, from);
                }
            }
            // The kernel has ended a policy: ours have no limits, so somebody made it do so.
            XFRM_MSG_POLEXPIRE => self.suspect(|suspect| suspect.policies = true),
            // Copies of our own changes carry the port number that we put into the requests.
            _ if frame.port == self.shared.requests.port() => {}
            XFRM_MSG_NEWSA | XFRM_MSG_UPDSA | XFRM_MSG_DELSA | XFRM_MSG_FLUSHSA
            | XFRM_MSG_NEWPOLICY | XFRM_MSG_UPDPOLICY | XFRM_MSG_DELPOLICY
            | XFRM_MSG_FLUSHPOLICY | XFRM_MSG_MIGRATE => self.foreign_change(frame),
            _ => {}
        }
    }

    fn acquire(&mut self, acquire: &Acquire) {
        let counts = &self.shared.counts;
        let placeholder = acquire.placeholder;
        let reqid = placeholder.reqid;
        if !self.shared.books().desired.knows_reqid(reqid) {
            count(&counts.acquires_foreign);
            return;
        }
        let Some((local, remote)) = acquire.packet else {
            count(&counts.acquires_without_selector);
            return;
        };
        let asked = Asked {
            placeholder,
            packet: (local, remote),
            at: Instant::now(),
        };
        let fate = lock(&counts.asked).judge(asked);
        match fate {
            Fate::Coalesced => count(&counts.acquires_coalesced),
            Fate::TooMany => count(&counts.acquires_dropped),
            Fate::Deliver => {
                let event = PlaneEvent::Acquire {
                    reqid,
                    local,
                    remote,
                };
                // The kernel asks again as long as there is traffic.
                if self.sender.try_send(event).is_err() {
                    count(&counts.acquires_dropped);
                    lock(&counts.asked).forget(&placeholder);
                }
            }
        }
    }

    fn expire(&mut self, subject: &Subject, hard: bool) {
        let id = subject.id;
        match self.shared.books().desired.sa(id) {
            Some(WantedSa::Installed(entry)) if subject.is(entry) => {}
            // A reservation that times out is nobody's loss: installing over it makes a new SA.
            Some(WantedSa::Reserved) => {}
            Some(WantedSa::Installed(_)) | None => return,
        }
        let Some(room) = self.room() else {
            return;
        };
        let installed = if hard {
            forget(self.shared, id)
        } else {
            let books = self.shared.books();
            matches!(books.desired.sa(id), Some(WantedSa::Installed(_)))
        };
        if installed {
            room.send(PlaneEvent::Expire { id, hard });
        }
    }

    fn mapping(&mut self, subject: &Subject, from: (IpAddr, u16)) {
        let id = subject.id;
        let (addr, port) = from;
        match self.shared.books().desired.sa(id) {
            Some(WantedSa::Installed(entry)) if subject.is(entry) => {}
            Some(_) | None => return,
        }
        if self.mappings.get(&id) == Some(&from) {
            return;
        }
        // The kernel tells of it with each packet.
        let Some(room) = self.room() else {
            return;
        };
        room.send(PlaneEvent::MappingChange { id, addr, port });
        if self.mappings.len() >= MAX_MAPPINGS {
            self.mappings.clear();
        }
        self.mappings.insert(id, from);
    }

    /// Another process has changed something. Whatever is ours among it is mended.
    fn foreign_change(&mut self, frame: &netlink::Frame<'_>) {
        count(&self.shared.counts.foreign_changes);
        match frame.kind {
            XFRM_MSG_DELSA => {
                let Some(subject) = notice::read_deletion(frame.payload) else {
                    return;
                };
                let id = subject.id;
                let known = matches!(
                    self.shared.books().desired.sa(id),
                    Some(WantedSa::Installed(_))
                );
                if !known {
                    return;
                }
                tracing::warn!(spi = %format_args!("{:08x}", id.spi), dst = %id.dst,
                    "another process deleted an SA of ours");
                // It may have been one with another mark.
                self.suspect(|suspect| suspect.sas = true);
            }
            XFRM_MSG_FLUSHSA => {
                tracing::warn!("another process flushed the kernel's SAs");
                self.suspect(|suspect| suspect.sas = true);
            }
            XFRM_MSG_FLUSHPOLICY => {
                tracing::warn!("another process flushed the kernel's policies");
                self.suspect(|suspect| suspect.policies = true);
            }
            XFRM_MSG_MIGRATE => {
                tracing::warn!("another process moved SAs and policies to other addresses");
                self.suspect(|suspect| (suspect.sas, suspect.policies) = (true, true));
            }
            XFRM_MSG_NEWPOLICY | XFRM_MSG_UPDPOLICY | XFRM_MSG_DELPOLICY => {
                self.suspect(|suspect| suspect.policies = true);
            }
            _ => {}
        }
    }

    fn suspect(&mut self, what: impl FnOnce(&mut Suspect)) {
        what(&mut self.suspect);
        self.due.note(Instant::now());
    }

    /// Room for an event. Without any, the daemon is told later what is still true then.
    fn room(&mut self) -> Option<mpsc::Permit<'a, PlaneEvent>> {
        let sender = self.sender;
        let room = sender.try_reserve();
        if room.is_err() {
            count(&self.shared.counts.undelivered);
            self.behind = true;
        }
        room.ok()
    }
}

struct Closed;

/// Compares the kernel with the books.
async fn check(
    shared: &Shared,
    sender: &mpsc::Sender<PlaneEvent>,
    suspect: Suspect,
) -> Result<(), Closed> {
    if suspect.policies {
        match mend::policies(shared).await {
            Ok(0) => {}
            Ok(mended) => tracing::warn!(mended, "put back policies that others had changed"),
            Err(error) => tracing::warn!(%error, "cannot compare the policies with the kernel's"),
        }
    }
    if suspect.sas {
        resync(shared, sender).await?;
    }
    Ok(())
}

/// Reports each SA that is gone, or beyond a soft limit.
async fn resync(shared: &Shared, sender: &mpsc::Sender<PlaneEvent>) -> Result<(), Closed> {
    let quiet = shared.counts.installing.lock().await;
    let seen = match shared.dump_sas().await {
        Ok(seen) => seen,
        Err(error) => {
            drop(quiet);
            tracing::warn!(%error, "events were lost and the SAs cannot be listed");
            tokio::time::sleep(ERROR_PAUSE).await;
            return Ok(());
        }
    };
    let present: BTreeMap<SaId, SaCounters> = seen.iter().map(|sa| (sa.id, sa.counters)).collect();
    let ages: BTreeMap<SaId, u64> = seen.iter().map(|sa| (sa.id, sa.added)).collect();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let mut gone = BTreeSet::new();
    let mut soft = Vec::new();
    for (id, wanted) in shared.books().desired.sas() {
        let WantedSa::Installed(entry) = wanted else {
            continue;
        };
        match present.get(id) {
            None => {
                gone.insert(*id);
            }
            Some(counters) => {
                let age = now.saturating_sub(ages.get(id).copied().unwrap_or(now));
                if beyond_soft_limit(entry, counters, age) {
                    soft.push(*id);
                }
            }
        }
    }
    gone.retain(|id| forget(shared, *id));
    drop(quiet);
    deliver_expired(sender, gone, |_| true).await?;
    for id in soft {
        let event = PlaneEvent::Expire { id, hard: false };
        sender.send(event).await.map_err(|_| Closed)?;
    }
    Ok(())
}

/// Takes an SA out of the books; whether it was there and more than a reservation.
fn forget(shared: &Shared, id: SaId) -> bool {
    let mut books = shared.books();
    let known = books.desired.forget_sa(id);
    books.strike_out(&Record::Sa(id));
    let Some(WantedSa::Installed(entry)) = known else {
        return false;
    };
    shared.counts.forget_acquires(entry.reqid);
    true
}

/// Reports SAs as hard expired, as soon as there is room, if `still` says so then.
async fn deliver_expired(
    sender: &mpsc::Sender<PlaneEvent>,
    gone: BTreeSet<SaId>,
    still: impl Fn(SaId) -> bool,
) -> Result<(), Closed> {
    for id in gone {
        let room = sender.reserve().await.map_err(|_| Closed)?;
        if still(id) {
            room.send(PlaneEvent::Expire { id, hard: true });
        }
    }
    Ok(())
}

fn beyond_soft_limit(entry: &SaEntry, counters: &SaCounters, age: u64) -> bool {
    let limits = &entry.lifetime;
    limits
        .soft_bytes
        .is_some_and(|limit| counters.bytes >= limit)
        || limits
            .soft_packets
            .is_some_and(|limit| counters.packets >= limit)
        || limits
            .soft_time
            .is_some_and(|limit| age >= limit.as_secs().max(1))
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
