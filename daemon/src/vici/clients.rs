// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is connected, in numbers, and why clients had to be dropped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portable_atomic::AtomicU64;

/// Why the server ended a connection that its client had not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// There were too many clients already.
    TooMany,
    /// It took nothing for too long.
    Stalled,
    /// More events waited for it than are kept.
    Backlog,
    /// It sent a packet that is longer than the protocol allows.
    TooLong,
    /// The connection failed, or ended inside a packet.
    Broken,
    /// TLS could not be agreed on, or its certificate is not good enough.
    Tls,
}

impl Dropped {
    /// Every reason, with its name as a metric label.
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::TooMany, "too_many"),
        (Self::Stalled, "stalled"),
        (Self::Backlog, "backlog"),
        (Self::TooLong, "too_long"),
        (Self::Broken, "broken"),
        (Self::Tls, "tls"),
    ];
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    connected: AtomicUsize,
    served: AtomicU64,
    dropped: [AtomicU64; Dropped::ALL.len()],
}

impl Clients {
    /// How many are connected.
    pub(crate) fn connected(&self) -> usize {
        self.connected.load(Ordering::Relaxed)
    }

    /// How many there were so far.
    pub(crate) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// How many were dropped for `reason`.
    pub(crate) fn dropped(&self, reason: Dropped) -> u64 {
        self.dropped[reason as usize].load(Ordering::Relaxed)
    }

    pub(super) fn drop_one(&self, reason: Dropped) {
        self.dropped[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one as connected until the answer is dropped.
    pub(super) fn arrive(self: &Arc<Self>) -> Connected {
        self.connected.fetch_add(1, Ordering::Relaxed);
        self.served.fetch_add(1, Ordering::Relaxed);
        Connected(Arc::clone(self))
    }
}

/// One client that is connected.
#[derive(Debug)]
pub(super) struct Connected(Arc<Clients>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connected.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who a client is, as far as the system can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process of this host.
    Process {
        /// Its user.
        uid: u32,
        /// Its id, if it is in a PID namespace that we see.
        pid: Option<i32>,
    },
    /// Somebody at an address.
    Address(std::net::SocketAddr),
    /// Nothing is known.
    Unknown,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process {
                uid,
                pid: Some(pid),
            } => write!(f, "process {pid} of uid {uid}"),
            Self::Process { uid, pid: None } => write!(f, "a process of uid {uid}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}
