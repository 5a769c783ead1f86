// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The TUN plane: ESP in UDP, processed in user space behind a TUN device.
//!
//! ```text
//!   applications                                              peers
//!       | routes of table 220                                   |
//!   TUN device --- transmit thread(s): segment, seal, batch --> NAT-T socket
//!   TUN device <-- join, check, open: receive thread ---------- NAT-T socket
//!                                          |  IKE, marker removed
//!                                          v
//!   control: apply, counters, tick      channel to the daemon
//! ```
//!
//! Packets move in batches both ways: the device hands over and takes up to 64 KiB of TCP or UDP
//! payload of one flow at once, and the socket sends and receives up to 64 datagrams in one call.
//! There is no queue in this process; when the threads cannot keep up, the kernel's bounded queues
//! in front of them fill and drop.
//!
//! Octets are counted as the kernel's XFRM counts them in tunnel mode: the inner IP packet, per
//! ESP packet. The conformance tests ask the same of both planes. What differs:
//!
//! - The device's MTU decides on the size of packets, so a datagram larger than that is cut before
//!   it is sealed; the kernel seals it whole and cuts the ESP packet. The outer header never forbids
//!   fragmentation, whatever the SA says: this process could not tell the sender what a router on
//!   the path says, while the device's MTU already tells it what fits most paths.
//! - Ranges that are no prefix, and ports that are no power of two, are compared as they are; the
//!   kernel compares what covers them.
//! - Packets that arrive in clear by another interface do not pass here, so that nobody asks
//!   whether they should have been protected. Strict reverse path filtering (`rp_filter`) stops
//!   them, as does a firewall.
//! - The device can be deleted, moved to another network namespace, or set down, by others. Beside
//!   each route into it stands one that makes its network unreachable, of a metric that counts only
//!   while the other is gone, so that nothing leaves in clear then. A device that is gone is made
//!   anew at once; one that is down stays down until it is set up again.
//!   A process that is killed leaves them standing: nothing leaves in clear until the next start,
//!   which removes them.
//! - Transport mode, BEET, marks, XFRM interfaces and ESP without UDP need the kernel's plane;
//!   [`DataPlane::capabilities`] says so before anything is negotiated.

mod checksum;
mod clear;
mod coalesce;
mod deadlines;
mod detour;
mod device;
mod ecn;
mod listing;
mod receive;
mod revive;
mod segment;
mod shared;
mod system;
mod tables;
#[cfg(test)]
mod testing;
mod transmit;
mod vnet;
mod watching;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use swanherd_esp::Spd;
use swanherd_ipsec::plane::{
    Direction, Mode, Op, Outcome, PlaneError, PlaneEvent, PolicyAction, PolicySet, SaCounters,
    SaEntry, SaId, UdpEncap,
};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;

use crate::audit::{Audit, ListedPolicy};
use crate::plane::{Capabilities, DataPlane, EventCounts, PlaneKind};
use crate::udp::{IkeSocket, Received};
use crate::watch;
use crate::xfrm::priority_between;
use clear::Clear;
use device::{Device, Waker};
use shared::Shared;
use system::System;
use tables::{Inbound, Outbound, Template};

/// Mark of our own packets unless configured otherwise.
pub const DEFAULT_MARK: u32 = 0xdc;

/// SPIs are drawn from this range, which is strongSwan's and clear of the reserved 0 to 255.
const SPI_FIRST: u32 = 0xc000_0000;
const SPI_COUNT: u32 = 0x1000_0000;
/// Attempts to draw a free SPI. With 2^28 of them the first nearly always is.
const SPI_ATTEMPTS: u32 = 64;

/// More pairs of selectors than this in one set of policies are a mistake or an attack.
const MAX_PAIRS: usize = 4096;

/// Smallest MTU that IPv6 allows.
const MIN_MTU: u32 = 1280;
const MAX_MTU: u32 = 65_000;
/// What one segmentation offload call of the socket can carry, and what ESP adds to a packet at
/// most with the suites in use (CBC with SHA-512).
const SOCKET_BATCH: u32 = 65_400;
const ESP_OVERHEAD: u32 = 8 + 16 + 17 + 32;

const EVENT_QUEUE: usize = 4096;
const IKE_QUEUE: usize = 4096;
const TICK: Duration = Duration::from_millis(200);

/// How to set up the plane.
#[derive(Clone, Debug)]
pub struct TunConfig {
    /// Device name; `%d` becomes the first free number.
    pub device: String,
    /// MTU of the device. 1400 leaves room for ESP in UDP within 1500.
    pub mtu: u32,
    /// The mark that the NAT-T socket (and the daemon's other sockets) set on what they send.
    pub mark: u32,
    /// Transmit threads. More than one makes a multi-queue device.
    pub workers: usize,
}

impl Default for TunConfig {
    fn default() -> Self {
        Self {
            device: "ipsec%d".to_owned(),
            mtu: 1400,
            mark: DEFAULT_MARK,
            workers: 1,
        }
    }
}

/// Userspace ESP behind a TUN device. See the [module](self) for how packets move.
pub struct TunPlane {
    shared: Arc<Shared>,
    system: Arc<Mutex<System>>,
    threads: std::sync::Mutex<Vec<JoinHandle<()>>>,
    ticker: AbortHandle,
    /// Follows this host's network.
    watch: AbortHandle,
    /// Replaces a device that somebody deletes.
    reviver: AbortHandle,
}

impl TunPlane {
    /// Creates the device, its rules and threads. The plane reads `socket`, the NAT traversal
    /// port, from now on; others may still send through it.
    ///
    /// Returns the plane, its events, and the IKE messages that arrive on `socket`, their non-ESP
    /// marker removed.
    ///
    /// # Errors
    /// If the device cannot be made, which takes `CAP_NET_ADMIN` and `/dev/net/tun`, or the host
    /// refuses link settings or rules. Nothing is left behind then.
    pub async fn start(
        socket: Arc<IkeSocket>,
        config: &TunConfig,
    ) -> io::Result<(Self, mpsc::Receiver<PlaneEvent>, mpsc::Receiver<Received>)> {
        if !(MIN_MTU..=MAX_MTU).contains(&config.mtu) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "MTU {} of the TUN device is not within {MIN_MTU} to {MAX_MTU}",
                    config.mtu
                ),
            ));
        }
        let clear = Clear::open(config.mark)?;
        let waker = Waker::new()?;
        let device = Device::create(&config.device, config.workers.clamp(1, 64))?;
        let batch = SOCKET_BATCH / (config.mtu + ESP_OVERHEAD);
        let gso_max_size = (batch.max(1) * (config.mtu - 60)).clamp(16_000, 65_000);
        let mut system = System::open(device.index(), config.mtu, gso_max_size, config.mark)?;
        if let Err(error) = system.start().await {
            system.shutdown().await;
            return Err(io::Error::other(error));
        }

        let changes = watch::open_socket()?;
        let (events, event_receiver) = mpsc::channel(EVENT_QUEUE);
        let (ike, ike_receiver) = mpsc::channel(IKE_QUEUE);
        tracing::info!(
            device = device.name(),
            mtu = config.mtu,
            joins_udp = device.joins_udp(),
            "TUN plane runs"
        );
        let told = events.clone();
        let shared = Arc::new(Shared::new(device, socket, waker, clear, events, ike));
        let adapter = watching::Adapter {
            router: system.router(),
            system: Arc::new(Mutex::new(system)),
            shared: Arc::downgrade(&shared),
        };
        let system = Arc::clone(&adapter.system);
        let reviver = revive::run(Arc::clone(&shared), Arc::clone(&system));
        let watch = tokio::spawn(watch::run(changes, adapter, told));
        let mut plane = Self {
            ticker: tokio::spawn(tick(Arc::downgrade(&shared))).abort_handle(),
            watch: watch.abort_handle(),
            reviver: tokio::spawn(reviver).abort_handle(),
            shared,
            system,
            threads: std::sync::Mutex::default(),
        };
        if let Err(error) = plane.spawn_threads() {
            plane.shutdown().await;
            return Err(error);
        }
        Ok((plane, event_receiver, ike_receiver))
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.shared.device.name()
    }

    fn spawn_threads(&mut self) -> io::Result<()> {
        let threads = self
            .threads
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for queue in 0..self.shared.device.queues() {
            let shared = Arc::clone(&self.shared);
            threads.push(
                std::thread::Builder::new()
                    .name(format!("tun-send-{queue}"))
                    .spawn(move || transmit::run(&shared, queue))?,
            );
        }
        let shared = Arc::clone(&self.shared);
        threads.push(
            std::thread::Builder::new()
                .name("tun-receive".to_owned())
                .spawn(move || receive::run(&shared))?,
        );
        Ok(())
    }

    fn alloc_spi(&self) -> Result<Outcome, PlaneError> {
        for _ in 0..SPI_ATTEMPTS {
            let spi = SPI_FIRST + u32::from_ne_bytes(random()?) % SPI_COUNT;
            let mut tables = self.shared.tables_mut();
            if tables.is_free(spi) {
                tables.reserve(spi);
                return Ok(Outcome::Spi(spi));
            }
        }
        Err(refused("allocate an SPI", "no free SPI was found"))
    }

    fn install_sa(&self, entry: &SaEntry) -> Result<Outcome, PlaneError> {
        let what = || format!("install SA {:08x} to {}", entry.spi, entry.dst);
        let Some(encap) = entry.encap else {
            return Err(refused(
                &what(),
                "this plane carries ESP only inside UDP; force encapsulation",
            ));
        };
        if entry.mode != Mode::Tunnel {
            return Err(refused(&what(), "this plane does tunnel mode only"));
        }
        if entry.if_id != 0 || entry.mark.is_some() || entry.set_mark.is_some() {
            return Err(refused(
                &what(),
                "this plane knows neither marks nor XFRM interfaces",
            ));
        }
        let id = entry.id();
        let taken = || refused(&what(), "an SA of this SPI is installed already");
        match entry.direction {
            Direction::In => {
                let sa =
                    Inbound::new(entry, encap).map_err(|e| refused(&what(), &e.to_string()))?;
                let mut tables = self.shared.tables_mut();
                if tables.has_inbound(entry.spi) {
                    return Err(taken());
                }
                tables.insert_inbound(entry.spi, sa);
            }
            Direction::Out => {
                let sa = Outbound::new(entry, encap, &random()?)
                    .map_err(|e| refused(&what(), &e.to_string()))?;
                let mut tables = self.shared.tables_mut();
                if tables.has_outbound(id) {
                    return Err(taken());
                }
                tables.insert_outbound(id, sa);
                drop(tables);
                let template = Template {
                    reqid: entry.reqid,
                    remote: entry.dst,
                };
                self.shared.forget_acquires(|asked, _| *asked == template);
            }
            Direction::Fwd => return Err(refused(&what(), "SAs have no forward direction")),
        }
        let limits = &entry.lifetime;
        self.shared
            .deadlines()
            .arm(id, Instant::now(), limits.soft_time, limits.hard_time);
        Ok(Outcome::Done)
    }

    fn update_sa(
        &self,
        id: SaId,
        src: IpAddr,
        dst: IpAddr,
        encap: Option<UdpEncap>,
    ) -> Result<Outcome, PlaneError> {
        let what = format!("update SA {:08x} to {}", id.spi, id.dst);
        let Some(encap) = encap else {
            return Err(refused(&what, "this plane carries ESP only inside UDP"));
        };
        if !self.shared.tables_mut().relocate(id, src, dst, encap) {
            return Err(PlaneError {
                errno: Some(libc::ESRCH),
                ..refused(&what, "no such SA")
            });
        }
        let moved = SaId { spi: id.spi, dst };
        self.shared.deadlines().rename(id, moved);
        Ok(Outcome::Done)
    }

    async fn install_policies(&self, set: PolicySet) -> Result<Outcome, PlaneError> {
        let what = format!("install policies of {}", set.owner);
        if let PolicyAction::Protect { mode, .. } = set.action
            && mode != Mode::Tunnel
        {
            return Err(refused(&what, "this plane does tunnel mode only"));
        }
        if set.if_id_in != 0
            || set.if_id_out != 0
            || set.mark_in.is_some()
            || set.mark_out.is_some()
        {
            return Err(refused(
                &what,
                "this plane knows neither marks nor XFRM interfaces",
            ));
        }
        if set.local.len().saturating_mul(set.remote.len()) > MAX_PAIRS {
            let reason = format!("more than {MAX_PAIRS} pairs of selectors");
            return Err(refused(&what, &reason));
        }
        if !Spd::selects_anything(&set) {
            return Err(refused(&what, "no local selector goes with a remote one"));
        }
        let mut system = self.system.lock().await;
        let old = {
            let tables = self.shared.tables();
            if let Some((other, local, remote)) = tables.spd.conflict(&set) {
                let reason = format!(
                    "the policy between {}-{} and {}-{} belongs to {}; this plane knows neither \
                     if_id nor marks to tell them apart, the kernel's does",
                    local.start, local.end, remote.start, remote.end, other.owner
                );
                return Err(refused(&what, &reason));
            }
            tables.spd.get(set.id).cloned()
        };
        let others = self.route_relevant(set.id, set.action);
        system
            .install(&set, old.as_ref(), &others)
            .await
            .map_err(|e| refused(&what, &e.to_string()))?;
        self.insert_policies(set);
        Ok(Outcome::Done)
    }

    /// The other sets, as far as the routes of a set with `action` and theirs depend on each other:
    /// without a bypass anywhere, they do not.
    fn route_relevant(&self, id: u32, action: PolicyAction) -> Vec<PolicySet> {
        let tables = self.shared.tables();
        let bypass = |action: PolicyAction| action == PolicyAction::Bypass;
        if !bypass(action) && tables.spd.bypasses() == 0 {
            return Vec::new();
        }
        let others = tables.spd.sets().filter(|set| set.id != id);
        others.cloned().collect()
    }

    fn insert_policies(&self, set: PolicySet) {
        let ranked = set.clone();
        let rank = |local: &_, remote: &_| priority_between(&ranked, local, remote);
        self.shared.tables_mut().spd.insert(set, rank);
        let set = &ranked;
        if let PolicyAction::Protect { reqid, remote, .. } = set.action {
            // The packets of a wider policy that takes others besides are answered, too, though no
            // SA of that policy came of it.
            let takes = |(from, to): (
                swanherd_ipsec::TrafficSelector,
                swanherd_ipsec::TrafficSelector,
            )| {
                set.local.iter().any(|ts| ts.contains(&from))
                    && set.remote.iter().any(|ts| ts.contains(&to))
            };
            self.shared.forget_acquires(|template, asked| {
                template.reqid == reqid
                    || !set.trap && template.remote == remote && takes(asked.packet)
            });
        }
    }

    async fn remove_policies(&self, id: u32) -> Result<Outcome, PlaneError> {
        let mut system = self.system.lock().await;
        let removed = self.shared.tables_mut().spd.remove(id);
        if let Some(set) = removed {
            if let PolicyAction::Protect { reqid, .. } = set.action {
                self.shared
                    .forget_acquires(|template, _| template.reqid == reqid);
            }
            let others = self.route_relevant(id, set.action);
            system.remove(&set, &others).await;
        }
        Ok(Outcome::Done)
    }
}

impl DataPlane for TunPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Tun
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            host_modes: false,
            marks: false,
            interfaces: false,
            cipher: swanherd_esp::supports_cipher,
            integrity: swanherd_esp::supports_integrity,
        }
    }

    async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        match op {
            Op::AllocSpi { .. } => self.alloc_spi(),
            Op::InstallSa(entry) => self.install_sa(&entry),
            Op::UpdateSa {
                id,
                src,
                dst,
                encap,
            } => self.update_sa(id, src, dst, encap),
            Op::RemoveSa(id) => {
                if self.shared.tables_mut().remove(id) {
                    self.shared.deadlines().disarm(id);
                }
                Ok(Outcome::Done)
            }
            Op::InstallPolicies(set) => self.install_policies(*set).await,
            Op::RemovePolicies(id) => self.remove_policies(id).await,
            Op::AddAddress { addr, local } => {
                let added = self.system.lock().await.add_address(addr, local).await;
                let what = format!("add virtual address {addr}");
                added.map_err(|e| refused(&what, &e.to_string()))?;
                Ok(Outcome::Done)
            }
            Op::RemoveAddress(addr) => {
                let removed = self.system.lock().await.remove_address(addr).await;
                let what = format!("remove virtual address {addr}");
                removed.map_err(|e| refused(&what, &e.to_string()))?;
                Ok(Outcome::Done)
            }
        }
    }

    async fn apply_all(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            outcomes.push(self.apply(op).await);
        }
        outcomes
    }

    /// The SAs and policies are this process's own, so that they never differ from what is wanted.
    /// Routes, rules and virtual addresses are the kernel's.
    async fn reconcile(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        let findings = self.system.lock().await.audit(dry_run).await;
        let tables = self.shared.tables();
        Ok(Audit {
            findings: findings.map_err(|e| refused("audit the routes", &e.to_string()))?,
            sas: tables.sas(),
            policies: listing::policies(&tables.spd).len(),
            ..Audit::default()
        })
    }

    async fn policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        Ok(listing::policies(&self.shared.tables().spd))
    }

    fn event_counts(&self) -> EventCounts {
        EventCounts {
            acquires: self.shared.acquire_counts(),
            drops: self.shared.drops(),
            ..EventCounts::default()
        }
    }

    async fn counters(&self) -> Result<BTreeMap<SaId, SaCounters>, PlaneError> {
        Ok(self.shared.tables().counters())
    }

    async fn counters_of(&self, id: SaId) -> Option<SaCounters> {
        self.shared.tables().counters_of(id)
    }

    async fn shutdown(&self) {
        self.ticker.abort();
        self.watch.abort();
        self.reviver.abort();
        self.shared.stop();
        let threads = std::mem::take(
            &mut *self
                .threads
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        let joined = tokio::task::spawn_blocking(|| {
            for thread in threads {
                if thread.join().is_err() {
                    tracing::error!("a packet thread of the TUN plane had panicked");
                }
            }
        });
        let _ = joined.await;
        // Held to the end, so that no device is made after it.
        let mut system = self.system.lock().await;
        system.shutdown().await;
        if let Err(error) = self.shared.device.close() {
            tracing::warn!(%error, device = self.shared.device.name(), "TUN device stays behind");
        }
        *self.shared.tables_mut() = tables::Tables::default();
    }
}

impl Drop for TunPlane {
    fn drop(&mut self) {
        self.ticker.abort();
        self.watch.abort();
        self.reviver.abort();
        self.shared.stop();
    }
}

async fn tick(shared: std::sync::Weak<Shared>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        shared.tick();
    }
}

fn random<const N: usize>() -> Result<[u8; N], PlaneError> {
    let mut octets = [0; N];
    getrandom::fill(&mut octets).map_err(|e| refused("draw a random number", &e.to_string()))?;
    Ok(octets)
}

fn refused(op: &str, reason: &str) -> PlaneError {
    PlaneError {
        op: op.to_owned(),
        reason: reason.to_owned(),
        errno: None,
    }
}
