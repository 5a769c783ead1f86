// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a data plane says of itself: the policies that are there and whose they are, and how what
//! is there differs from what should be.

use std::net::IpAddr;

use swanherd_ipsec::plane::{Mode, SaId};

use crate::reconcile::PolicyKey;

/// Whose a policy is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A CHILD SA's, as `connection/child`.
    Child(String),
    /// A trap's, as `connection/child`.
    Trap(String),
    /// A shunt's, as `connection/child`.
    Shunt(String),
    /// Ours, and wanted no more: an earlier run left it.
    Leftover,
    /// A socket's own (`IP_XFRM_POLICY`), ours or another process's.
    Socket,
    /// Someone else's.
    Alien,
}

impl Owner {
    /// The kind, as in JSON: `child`, `trap`, `shunt`, `leftover`, `socket` or `alien`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Child(_) => "child",
            Self::Trap(_) => "trap",
            Self::Shunt(_) => "shunt",
            Self::Leftover => "leftover",
            Self::Socket => "socket",
            Self::Alien => "alien",
        }
    }

    /// `connection/child`, if it is one of ours.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Child(name) | Self::Trap(name) | Self::Shunt(name) => Some(name),
            Self::Leftover | Self::Socket | Self::Alien => None,
        }
    }
}

/// What a listed policy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Protect with ESP (or what else the template says).
    Protect {
        /// Encapsulation mode.
        mode: Mode,
        /// Request id of the template.
        reqid: u32,
        /// Outer addresses, source first; unspecified ones are left to the packets.
        endpoints: (IpAddr, IpAddr),
    },
    /// Let pass in clear.
    Bypass,
    /// Drop.
    Discard,
}

/// One policy that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPolicy {
    /// The kernel's index of it (`xfrm_userpolicy_info.index`); 0 in a plane without.
    pub index: u32,
    /// Direction, selector, mark and interface.
    pub key: PolicyKey,
    /// Lower ones are consulted first.
    pub priority: u32,
    /// What it does.
    pub verdict: Verdict,
    /// Whose it is.
    pub owner: Owner,
}

/// A thing that a [`Finding`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// An SA.
    Sa(SaId),
    /// A policy.
    Policy(PolicyKey),
    /// A route in the tunnels' table, by destination and length of its prefix.
    Route((IpAddr, u8)),
    /// The rule that consults the tunnels' table; whether it is IPv6's.
    Rule {
        /// IPv6.
        v6: bool,
    },
    /// A virtual address.
    Address(IpAddr),
}

/// How a thing differs from what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// Wanted and not there.
    Missing,
    /// Ours, there, and not wanted.
    Unwanted,
    /// There, but not as it should be.
    Changed,
    /// Someone else's where we want ours.
    InTheWay,
}

/// What was done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Nothing: it was only asked what would be.
    None,
    /// Installed again.
    Installed,
    /// Removed.
    Removed,
    /// Reported as expired, so that a new SA is negotiated: an SA whose sequence numbers are lost
    /// must not be installed again under the same key.
    Renegotiated,
    /// The kernel refused, for this reason.
    Failed(String),
}

/// One difference between what is there and what should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub object: Object,
    /// How it differs.
    pub difference: Difference,
    /// `connection/child`, where that is known.
    pub owner: Option<String>,
    /// In words, for people: what is there and what should be.
    pub reason: String,
    /// What was done about it.
    pub remedy: Remedy,
}

/// Outcome of comparing a data plane with what is wanted of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Every difference.
    pub findings: Vec<Finding>,
    /// SAs that are there, ours and others'.
    pub sas: usize,
    /// Policies that are there, ours and others', without those of sockets.
    pub policies: usize,
    /// SAs of others, which are never touched.
    pub alien_sas: usize,
    /// Policies of others, which are never touched.
    pub alien_policies: usize,
}

impl Audit {
    /// Whether there is exactly what is wanted of us; what others have does not count.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}
