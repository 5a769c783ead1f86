// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel reports on its own: acquires, expiries, NAT mappings, and changes by others.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use netlink_packet_xfrm::{
    Selector, UserAcquire, UserExpire, UserMapping, UserSaId, UserTemplate, XFRM_MSG_ACQUIRE,
    XFRM_MSG_DELPOLICY, XFRM_MSG_DELSA, XFRM_MSG_EXPIRE, XFRM_MSG_FLUSHPOLICY, XFRM_MSG_FLUSHSA,
    XFRM_MSG_MAPPING, XFRM_MSG_NEWPOLICY, XFRM_MSG_NEWSA, XFRM_MSG_UPDPOLICY, XFRM_MSG_UPDSA,
    XFRM_POLICY_OUT, XFRM_USER_ACQUIRE_LEN, XFRMA_TMPL, XFRMNLGRP_ACQUIRE, XFRMNLGRP_EXPIRE,
    XFRMNLGRP_MAPPING, XFRMNLGRP_POLICY, XFRMNLGRP_SA,
};
use netlink_sys::Socket;
use portable_atomic::{AtomicBool, AtomicU64, Ordering};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PlaneEvent, SaCounters, SaEntry, SaId};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use zeroize::Zeroize as _;

use super::Shared;
use super::message::attributes;
use super::selector::address;
use crate::netlink;
use crate::plane::{AcquireCounts, EventCounts};
use crate::reconcile::{Record, WantedSa};

/// Room for bursts; the kernel grants what its limits allow.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// How long the task rests after an error of the socket that it does not know.
const ERROR_PAUSE: Duration = Duration::from_millis(500);
/// Mappings remembered, so that each change is reported once and not with each packet.
const MAX_MAPPINGS: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Counts {
    overruns: AtomicU64,
    foreign_acquires: AtomicU64,
    foreign_changes: AtomicU64,
    /// SAs that an audit found missing, for the event task to report.
    missing: std::sync::Mutex<BTreeSet<SaId>>,
    /// Any of our SAs may be gone.
    suspect: AtomicBool,
    /// Held while operations are between the books and the kernel, and while both are compared:
    /// what is on its way to the kernel is not missing there.
    pub(super) installing: tokio::sync::Mutex<()>,
    wake: tokio::sync::Notify,
}

impl Counts {
    pub(super) fn snapshot(&self) -> EventCounts {
        EventCounts {
            overruns: self.overruns.load(Ordering::Relaxed),
            acquires: AcquireCounts {
                foreign: self.foreign_acquires.load(Ordering::Relaxed),
                ..AcquireCounts::default()
            },
            foreign_changes: self.foreign_changes.load(Ordering::Relaxed),
        }
    }
}

/// Opens the multicast socket. It must be bound before it joins: an unbound socket joins without
/// complaint and never receives.
pub(super) fn open_socket() -> io::Result<AsyncFd<Socket>> {
    let socket = netlink::open_socket(libc::NETLINK_XFRM as isize)?;
    let forced =
        rustix::net::sockopt::set_socket_recv_buffer_size_force(socket.get_ref(), SOCKET_BUFFER);
    if forced.is_err() {
        // Without the privilege the system's limit applies; overruns are noticed anyway.
        let _ = socket.get_ref().set_rx_buf_sz(SOCKET_BUFFER);
    }
    for group in [
        XFRMNLGRP_ACQUIRE,
        XFRMNLGRP_EXPIRE,
        XFRMNLGRP_SA,
        XFRMNLGRP_POLICY,
        XFRMNLGRP_MAPPING,
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
    let mut mappings = BTreeMap::new();
    loop {
        let received = tokio::select! {
            received = netlink::receive(&socket, &mut buffer) => received,
            () = shared.counts.wake.notified() => {
                let missing = std::mem::take(&mut *lock(&shared.counts.missing));
                let gone = forget(&shared, missing);
                if deliver_expired(&sender, gone).await.is_err() {
                    return;
                }
                let suspect = shared.counts.suspect.swap(false, Ordering::Relaxed);
                if suspect && resync(&shared, &sender).await.is_err() {
                    return;
                }
                continue;
            }
        };
        match received {
            Ok(length) => {
                let mut events = Vec::new();
                for frame in netlink::frames(&buffer[..length]) {
                    events.extend(read_event(&shared, &frame, &mut mappings));
                }
                // Multicast copies of new SAs carry keys.
                buffer[..length].zeroize();
                for event in events {
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                shared.counts.overruns.fetch_add(1, Ordering::Relaxed);
                if resync(&shared, &sender).await.is_err() {
                    return;
                }
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

struct Closed;

/// After lost events: reports each SA that is gone, or beyond a soft limit.
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
    let gone = forget(shared, gone);
    drop(quiet);
    deliver_expired(sender, gone).await?;
    for id in soft {
        let event = PlaneEvent::Expire { id, hard: false };
        sender.send(event).await.map_err(|_| Closed)?;
    }
    Ok(())
}

/// Takes SAs out of the books; those that were more than reservations.
fn forget(shared: &Shared, gone: BTreeSet<SaId>) -> Vec<SaId> {
    let mut books = shared.books();
    gone.into_iter()
        .filter(|id| {
            let known = books.desired.forget_sa(*id);
            books.strike_out(&Record::Sa(*id));
            matches!(known, Some(WantedSa::Installed(_)))
        })
        .collect()
}

async fn deliver_expired(sender: &mpsc::Sender<PlaneEvent>, gone: Vec<SaId>) -> Result<(), Closed> {
    for id in gone {
        let event = PlaneEvent::Expire { id, hard: true };
        sender.send(event).await.map_err(|_| Closed)?;
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

fn read_event(
    shared: &Shared,
    frame: &netlink::Frame<'_>,
    mappings: &mut BTreeMap<SaId, (IpAddr, u16)>,
) -> Option<PlaneEvent> {
    match frame.kind {
        XFRM_MSG_ACQUIRE => {
            let (reqid, local, remote) = read_acquire(frame.payload)?;
            if !shared.books().desired.knows_reqid(reqid) {
                shared
                    .counts
                    .foreign_acquires
                    .fetch_add(1, Ordering::Relaxed);
                return None;
            }
            Some(PlaneEvent::Acquire {
                reqid,
                local,
                remote,
            })
        }
        XFRM_MSG_EXPIRE => {
            let expire = UserExpire::parse(frame.payload).ok()?;
            read_expire(shared, &expire)
        }
        XFRM_MSG_MAPPING => {
            let mapping = UserMapping::parse(frame.payload).ok()?;
            let id = sa_id(&mapping.id);
            let addr = address(mapping.id.family, &mapping.new_saddr);
            let port = mapping.new_sport;
            shared.books().desired.sa(id)?;
            if mappings.len() >= MAX_MAPPINGS {
                mappings.clear();
            }
            (mappings.insert(id, (addr, port)) != Some((addr, port)))
                .then_some(PlaneEvent::MappingChange { id, addr, port })
        }
        XFRM_MSG_NEWSA | XFRM_MSG_UPDSA | XFRM_MSG_DELSA | XFRM_MSG_FLUSHSA
        | XFRM_MSG_NEWPOLICY | XFRM_MSG_UPDPOLICY | XFRM_MSG_DELPOLICY | XFRM_MSG_FLUSHPOLICY => {
            read_change(shared, frame)
        }
        _ => None,
    }
}

fn read_expire(shared: &Shared, expire: &UserExpire) -> Option<PlaneEvent> {
    let id = SaId {
        spi: expire.state.id.spi,
        dst: address(expire.state.family, &expire.state.id.daddr),
    };
    let hard = expire.hard != 0;
    let mut books = shared.books();
    let installed = matches!(books.desired.sa(id)?, WantedSa::Installed(_));
    if hard {
        books.desired.forget_sa(id);
        books.strike_out(&Record::Sa(id));
    }
    // A reservation that times out is nobody's loss: installing over it makes a new SA.
    installed.then_some(PlaneEvent::Expire { id, hard })
}

/// Counts changes by other processes, and notices when one of our SAs is deleted.
fn read_change(shared: &Shared, frame: &netlink::Frame<'_>) -> Option<PlaneEvent> {
    // Copies of our own changes carry the port number that we put into the requests.
    if frame.port == shared.requests.port() {
        return None;
    }
    shared
        .counts
        .foreign_changes
        .fetch_add(1, Ordering::Relaxed);
    match frame.kind {
        XFRM_MSG_DELSA => {
            let id = sa_id(&UserSaId::parse(frame.payload).ok()?);
            let mut books = shared.books();
            let WantedSa::Installed(_) = books.desired.sa(id)? else {
                return None;
            };
            books.desired.forget_sa(id);
            books.strike_out(&Record::Sa(id));
            tracing::warn!(spi = %format_args!("{:08x}", id.spi), dst = %id.dst,
                "another process deleted an SA of ours");
            Some(PlaneEvent::Expire { id, hard: true })
        }
        XFRM_MSG_FLUSHSA | XFRM_MSG_FLUSHPOLICY => {
            tracing::warn!("another process flushed the kernel's IPsec tables");
            if frame.kind == XFRM_MSG_FLUSHSA {
                shared.counts.suspect.store(true, Ordering::Relaxed);
                shared.counts.wake.notify_one();
            }
            None
        }
        _ => None,
    }
}

/// Request id and the packet's selectors, of an acquire for an outbound policy.
fn read_acquire(payload: &[u8]) -> Option<(u32, TrafficSelector, TrafficSelector)> {
    let acquire = UserAcquire::parse(payload).ok()?;
    if acquire.policy.direction != XFRM_POLICY_OUT {
        return None;
    }
    let template = attributes(payload, XFRM_USER_ACQUIRE_LEN)
        .find(|(kind, _)| *kind == XFRMA_TMPL)
        .and_then(|(_, value)| UserTemplate::parse(value).ok())?;
    let (local, remote) = packet_selectors(&acquire.selector);
    Some((template.reqid, local, remote))
}

/// The selector of a packet as a pair of traffic selectors: source first.
fn packet_selectors(selector: &Selector) -> (TrafficSelector, TrafficSelector) {
    let ports = |port: u16, mask: u16| {
        if mask == 0 {
            (0, u16::MAX)
        } else {
            (port & mask, port | !mask)
        }
    };
    let icmp =
        selector.proto == libc::IPPROTO_ICMP as u8 || selector.proto == libc::IPPROTO_ICMPV6 as u8;
    let (source, destination) = if icmp && selector.sport_mask != 0 {
        let type_and_code = selector.sport << 8 | selector.dport & 0xff;
        (
            (type_and_code, type_and_code),
            (type_and_code, type_and_code),
        )
    } else {
        (
            ports(selector.sport, selector.sport_mask),
            ports(selector.dport, selector.dport_mask),
        )
    };
    let side = |addr, prefix_len, (start_port, end_port)| {
        let addr = address(selector.family, addr);
        TrafficSelector {
            protocol: selector.proto,
            start_port,
            end_port,
            ..TrafficSelector::network(addr, prefix_len)
                .unwrap_or_else(|| TrafficSelector::host(addr))
        }
    };
    (
        side(&selector.saddr, selector.prefixlen_s, source),
        side(&selector.daddr, selector.prefixlen_d, destination),
    )
}

fn sa_id(id: &UserSaId) -> SaId {
    SaId {
        spi: id.spi,
        dst: address(id.family, &id.daddr),
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
