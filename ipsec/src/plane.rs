// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What IKE asks of a data plane, and what a data plane tells IKE, as values.
//!
//! The model is RFC 4301's: a Security Association Database of one-way SAs, and a Security Policy
//! Database of ordered policies. A data plane may be the kernel's XFRM or userspace ESP; the
//! values are the same.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::registry::{EncryptionId, IntegrityId};
use crate::{Secret, TrafficSelector};

/// Direction of a policy or SA as Linux names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Direction {
    /// Towards this host.
    In,
    /// From this host to the peer.
    Out,
    /// Forwarded through this host after decapsulation.
    Fwd,
}

/// Encapsulation mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// The whole packet is carried (RFC 4301 section 4.1).
    Tunnel,
    /// The payload is carried.
    Transport,
    /// Bound end-to-end tunnel.
    Beet,
}

/// Names one SA of this host: SPI and destination are unique per protocol (RFC 4301 section 4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SaId {
    /// Security Parameters Index, host order.
    pub spi: u32,
    /// Destination address of the outer packets.
    pub dst: IpAddr,
}

/// Ports of UDP encapsulation (RFC 3948), in host order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpEncap {
    /// Source port of packets that this SA sends or receives.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
}

/// A mark and its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mark {
    /// Value, already masked.
    pub value: u32,
    /// Bits that count.
    pub mask: u32,
}

/// Whether the network device processes ESP instead of the kernel's own code.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum HwOffload {
    /// The kernel does everything.
    #[default]
    No,
    /// The device encrypts and decrypts; the kernel does the rest.
    Crypto,
    /// The device does everything, policies included.
    Packet,
    /// As much as the device can; without any support, the kernel does everything.
    Auto,
}

/// Limits of an SA. `None` means without limit. Soft limits ask for a rekey, hard limits end the SA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lifetime {
    /// Since installation.
    pub soft_time: Option<Duration>,
    /// Since installation.
    pub hard_time: Option<Duration>,
    /// Octets processed.
    pub soft_bytes: Option<u64>,
    /// Octets processed.
    pub hard_bytes: Option<u64>,
    /// Packets processed.
    pub soft_packets: Option<u64>,
    /// Packets processed.
    pub hard_packets: Option<u64>,
}

/// Cipher, integrity and their keys for one direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SaKeys {
    /// ESP cipher.
    pub encryption: EncryptionId,
    /// Key, for AEAD ciphers followed by the salt (RFC 4106, RFC 7634), as KEYMAT yields it.
    pub encryption_key: Secret,
    /// `None` with an AEAD.
    pub integrity: Option<(IntegrityId, Secret)>,
}

/// One SA to install: everything a data plane needs for one direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SaEntry {
    /// In or out.
    pub direction: Direction,
    /// SPI chosen by the receiver.
    pub spi: u32,
    /// Outer source.
    pub src: IpAddr,
    /// Outer destination.
    pub dst: IpAddr,
    /// Encapsulation mode.
    pub mode: Mode,
    /// Groups SAs and policies of one CHILD SA across rekeys. Never 0.
    pub reqid: u32,
    /// Algorithms and keys.
    pub keys: SaKeys,
    /// Extended sequence numbers.
    pub esn: bool,
    /// Anti-replay window in packets; 0 switches it off. Inbound only.
    pub replay_window: u32,
    /// UDP encapsulation, if NAT is in the way or it is forced.
    pub encap: Option<UdpEncap>,
    /// Limits.
    pub lifetime: Lifetime,
    /// Mark that packets must carry to match this SA.
    pub mark: Option<Mark>,
    /// Mark set on packets after processing.
    pub set_mark: Option<Mark>,
    /// XFRM interface; 0 is none.
    pub if_id: u32,
    /// For transport mode: the selector of the SA.
    pub selector: Option<(TrafficSelector, TrafficSelector)>,
    /// Whether the outer header copies DF.
    pub copy_df: bool,
    /// Whether ECN is propagated (RFC 6040).
    pub copy_ecn: bool,
    /// Whether DSCP is copied from inner to outer header on output.
    pub copy_dscp_out: bool,
    /// Whether DSCP is copied from outer to inner header on input.
    pub copy_dscp_in: bool,
    /// Whether a network device takes over.
    pub offload: HwOffload,
}

impl SaEntry {
    /// A tunnel-mode SA from `src` to `dst` with everything optional left out: no limits, no
    /// encapsulation, no marks, no replay protection; DF and ECN are copied, and DSCP outwards.
    pub fn tunnel(
        direction: Direction,
        spi: u32,
        [src, dst]: [IpAddr; 2],
        reqid: u32,
        keys: SaKeys,
    ) -> Self {
        Self {
            direction,
            spi,
            src,
            dst,
            mode: Mode::Tunnel,
            reqid,
            keys,
            esn: false,
            replay_window: 0,
            encap: None,
            lifetime: Lifetime::default(),
            mark: None,
            set_mark: None,
            if_id: 0,
            selector: None,
            copy_df: true,
            copy_ecn: true,
            copy_dscp_out: true,
            copy_dscp_in: false,
            offload: HwOffload::No,
        }
    }

    /// The name of this SA.
    pub fn id(&self) -> SaId {
        SaId {
            spi: self.spi,
            dst: self.dst,
        }
    }
}

/// What a policy does with the packets that it selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum PolicyAction {
    /// Protect by SAs with this template.
    Protect {
        /// Encapsulation mode.
        mode: Mode,
        /// Outer address of this host (for policies with tunnel mode).
        local: IpAddr,
        /// Outer address of the peer.
        remote: IpAddr,
        /// Request id shared with the SAs.
        reqid: u32,
        /// SPI of the outbound SA to bind to, or 0 for any with this reqid.
        spi: u32,
    },
    /// Let pass in clear.
    Bypass,
    /// Drop.
    Discard,
}

/// The policies of one CHILD SA, trap or shunt: the product of `local` and `remote` selectors, in
/// the directions that its action needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicySet {
    /// Who owns it; unique among installed sets. Rekeying keeps it.
    pub id: u32,
    /// `connection/child`, for listings and the reconciler's reports.
    pub owner: String,
    /// Selectors of this side.
    pub local: Vec<TrafficSelector>,
    /// Selectors of the peer's side.
    pub remote: Vec<TrafficSelector>,
    /// What to do.
    pub action: PolicyAction,
    /// Fixed priority, or `None` to compute one from the selectors as strongSwan does.
    pub priority: Option<u32>,
    /// Mark on inbound policies.
    pub mark_in: Option<Mark>,
    /// Mark on outbound policies.
    pub mark_out: Option<Mark>,
    /// XFRM interface of inbound policies; 0 is none.
    pub if_id_in: u32,
    /// XFRM interface of outbound policies; 0 is none.
    pub if_id_out: u32,
    /// Whether routes may be installed for the remote selectors.
    pub routes: bool,
    /// A trap: packets that match without an SA raise [`PlaneEvent::Acquire`].
    pub trap: bool,
    /// Whether forwarded packets towards the peer get a policy in direction fwd of their own, for
    /// hosts where a wider drop policy would stop them (`policies_fwd_out`).
    pub fwd_out: bool,
    /// Whether a network device takes over; policies are offloaded with [`HwOffload::Packet`] only.
    pub offload: HwOffload,
}

impl PolicySet {
    /// A set with everything optional left out: computed priority, no marks, no interface, no trap;
    /// routes are installed.
    pub fn new(
        id: u32,
        owner: String,
        local: Vec<TrafficSelector>,
        remote: Vec<TrafficSelector>,
        action: PolicyAction,
    ) -> Self {
        Self {
            id,
            owner,
            local,
            remote,
            action,
            priority: None,
            mark_in: None,
            mark_out: None,
            if_id_in: 0,
            if_id_out: 0,
            routes: true,
            trap: false,
            fwd_out: false,
            offload: HwOffload::No,
        }
    }
}

/// One request to a data plane. Requests are applied in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Op {
    /// Reserve an inbound SPI. Answered by [`Outcome::Spi`].
    AllocSpi {
        /// Peer's outer address.
        src: IpAddr,
        /// Own outer address.
        dst: IpAddr,
        /// Request id.
        reqid: u32,
    },
    /// Install an SA. An inbound SA replaces the reservation of its SPI.
    InstallSa(Box<SaEntry>),
    /// Move an installed SA to other outer addresses or ports (NAT mapping change, MOBIKE).
    UpdateSa {
        /// Which.
        id: SaId,
        /// New source.
        src: IpAddr,
        /// New destination.
        dst: IpAddr,
        /// New ports.
        encap: Option<UdpEncap>,
    },
    /// Remove an SA, or a reserved SPI. Removing what is not there succeeds.
    RemoveSa(SaId),
    /// Install a set of policies, or replace the set of the same id.
    InstallPolicies(Box<PolicySet>),
    /// Remove a set of policies by id. Removing what is not there succeeds.
    RemovePolicies(u32),
    /// Add a virtual IP address (RFC 7296 section 3.15) to the interface that has `local`. Each
    /// addition needs its own removal; the address goes with the last one. An address that was
    /// there before is left alone by both.
    AddAddress {
        /// The virtual address.
        addr: IpAddr,
        /// An address of the interface.
        local: IpAddr,
    },
    /// Take back one [`Op::AddAddress`]. Removing what is not there succeeds.
    RemoveAddress(IpAddr),
}

impl Op {
    /// What the operation is called in errors and logs.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllocSpi { .. } => "allocate SPI",
            Self::InstallSa(_) => "install SA",
            Self::UpdateSa { .. } => "update SA",
            Self::RemoveSa(_) => "remove SA",
            Self::InstallPolicies(_) => "install policies",
            Self::RemovePolicies(_) => "remove policies",
            Self::AddAddress { .. } => "add virtual address",
            Self::RemoveAddress(_) => "remove virtual address",
        }
    }
}

/// A successful answer to an [`Op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The reserved SPI.
    Spi(u32),
    /// Done.
    Done,
}

/// Why a data plane refused an [`Op`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{op}: {reason}")]
pub struct PlaneError {
    /// What was tried, for people.
    pub op: String,
    /// The kernel's or plane's reason, with the extended-ack text where there is one.
    pub reason: String,
    /// The errno, if the kernel gave one.
    pub errno: Option<i32>,
}

/// What a data plane reports on its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlaneEvent {
    /// A packet hit a trap or a policy without SA.
    Acquire {
        /// Request id of the policy.
        reqid: u32,
        /// Selector of the packet on this side.
        local: TrafficSelector,
        /// Selector of the packet on the peer's side.
        remote: TrafficSelector,
    },
    /// A limit of an SA was reached. After a hard expiry the plane has removed the SA.
    Expire {
        /// Which.
        id: SaId,
        /// Hard or soft.
        hard: bool,
    },
    /// Packets of an inbound SA with UDP encapsulation come from a new address or port.
    MappingChange {
        /// The inbound SA.
        id: SaId,
        /// New source address.
        addr: IpAddr,
        /// New source port.
        port: u16,
    },
    /// Addresses, links or routes of this host have changed. Many changes may make one event.
    NetworkChanged,
}

/// Counters of one SA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaCounters {
    /// Octets, as the kernel counts them.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Seconds since the epoch of the last use; 0 if never.
    pub last_used: u64,
    /// Packets dropped because the sequence number was seen before or too old.
    pub replay_drops: u64,
    /// Packets dropped because authentication failed.
    pub integrity_drops: u64,
}
