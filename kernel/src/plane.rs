// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The interface that every data plane offers to the daemon.

use std::collections::BTreeMap;

use swanherd_ipsec::plane::{Op, Outcome, PlaneError, SaCounters, SaId};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

use crate::audit::{Audit, ListedPolicy};

/// Which implementation a data plane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// The kernel's XFRM.
    Xfrm,
    /// Userspace ESP over TUN.
    Tun,
}

impl PlaneKind {
    /// The name in logs, metrics and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Xfrm => "xfrm",
            Self::Tun => "tun",
        }
    }
}

/// Numbers for the operator about what a plane saw besides the events that it delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// How often the kernel said that it dropped events because we read too slowly.
    pub overruns: u64,
    /// Events for which the daemon had no room. What they said is told later, if still true.
    pub undelivered: u64,
    /// Acquires that were not delivered, by reason.
    pub acquires: AcquireCounts,
    /// Changes of SAs and policies by other processes.
    pub foreign_changes: u64,
    /// Packets that the plane itself dropped. Those of the kernel's XFRM are not among them; it
    /// counts them in `/proc/net/xfrm_stat`.
    pub drops: DropCounts,
}

/// Packets that asked for an SA and raised no event, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcquireCounts {
    /// The policy is not ours.
    pub foreign: u64,
    /// The kernel did not say which packet asked.
    pub without_selector: u64,
    /// The same policy has asked already and is not answered yet.
    pub coalesced: u64,
    /// Too many policies asked at once.
    pub dropped: u64,
}

/// Packets that a plane in user space dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropCounts {
    /// No packet, or not a tunnelled one.
    pub malformed: u64,
    /// Outbound and meant for the link itself, or inbound by an SA and not as a policy asks.
    pub no_policy: u64,
    /// A policy asks for an SA that is not there (yet).
    pub no_sa: u64,
    /// A policy discards them.
    pub shunted: u64,
    /// Their SA has reached a hard limit.
    pub expired: u64,
    /// The network did not take them.
    pub send_failed: u64,
    /// No SA has their SPI and destination.
    pub unknown_spi: u64,
    /// Seen before, or too old.
    pub replayed: u64,
    /// Authentication failed.
    pub forged: u64,
    /// The TUN device did not take them.
    pub device_refused: u64,
    /// IKE messages that came faster than they were read.
    pub ike_queue_full: u64,
    /// Sent in clear, and routed back into the TUN device by a route that is not ours.
    pub looped: u64,
}

impl DropCounts {
    /// Names of the reasons, with their counts. The names are stable.
    pub const fn by_reason(&self) -> [(&'static str, u64); 12] {
        [
            ("malformed", self.malformed),
            ("no_policy", self.no_policy),
            ("no_sa", self.no_sa),
            ("shunted", self.shunted),
            ("expired", self.expired),
            ("send_failed", self.send_failed),
            ("unknown_spi", self.unknown_spi),
            ("replayed", self.replayed),
            ("forged", self.forged),
            ("device_refused", self.device_refused),
            ("ike_queue_full", self.ike_queue_full),
            ("looped", self.looped),
        ]
    }
}

/// What a data plane can do beyond tunnels with UDP encapsulation, so that nothing is negotiated
/// that it would refuse.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Transport mode and BEET.
    pub host_modes: bool,
    /// Marks on policies and SAs.
    pub marks: bool,
    /// XFRM interfaces.
    pub interfaces: bool,
    /// Whether SAs can have a cipher, with keys of so many bits.
    pub cipher: fn(EncryptionId, Option<u16>) -> bool,
    /// Whether SAs can have an integrity algorithm.
    pub integrity: fn(IntegrityId) -> bool,
}

impl Capabilities {
    /// Nothing is refused beforehand.
    pub const EVERYTHING: Self = Self {
        host_modes: true,
        marks: true,
        interfaces: true,
        cipher: |_, _| true,
        integrity: |_| true,
    };
}

/// A data plane. One task calls [`DataPlane::apply`], so that operations keep their order; any task
/// may read counters. Events arrive on the channel that the constructor of a plane returns next to
/// it (`tokio::sync::mpsc::Receiver<swanherd_ipsec::plane::PlaneEvent>`, bounded).
pub trait DataPlane: Send + Sync {
    /// Which one this is.
    fn kind(&self) -> PlaneKind;

    /// What it can do.
    fn capabilities(&self) -> Capabilities {
        Capabilities::EVERYTHING
    }

    /// Applies one operation.
    ///
    /// # Errors
    /// The plane's or the kernel's refusal; nothing of the operation is left behind then.
    fn apply(&self, op: Op) -> impl Future<Output = Result<Outcome, PlaneError>> + Send;

    /// Applies operations in order, and answers each: the answers are as many as the operations
    /// and in their order. One that is refused does not keep the later ones from being tried.
    fn apply_all(
        &self,
        ops: Vec<Op>,
    ) -> impl Future<Output = Vec<Result<Outcome, PlaneError>>> + Send;

    /// Compares what is there with what is wanted and, unless `dry_run`, mends it: what is missing
    /// or changed is installed again, what is ours and not wanted is removed. A missing SA is
    /// reported as hard expired instead, because its sequence numbers are lost and using one twice
    /// under the same key would break the cipher. What others have is never touched.
    ///
    /// # Errors
    /// If what is there cannot be listed. A remedy that fails is told in its finding.
    fn reconcile(&self, dry_run: bool) -> impl Future<Output = Result<Audit, PlaneError>> + Send;

    /// Every policy that is in force, in the order in which the plane keeps them, with its owner.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    fn policies(&self) -> impl Future<Output = Result<Vec<ListedPolicy>, PlaneError>> + Send;

    /// What happened besides the events that were delivered.
    fn event_counts(&self) -> EventCounts;

    /// Counters of every SA that this plane holds for us, from one dump.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    fn counters(
        &self,
    ) -> impl Future<Output = Result<BTreeMap<SaId, SaCounters>, PlaneError>> + Send;

    /// Counters of one SA, or `None` if it is not there. Asked just before an SA is removed.
    fn counters_of(&self, id: SaId) -> impl Future<Output = Option<SaCounters>> + Send;

    /// Removes everything that this plane installed: SAs, policies, routes, rules, devices.
    fn shutdown(&self) -> impl Future<Output = ()> + Send;
}
