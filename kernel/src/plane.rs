// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The interface that every data plane offers to the daemon.

use std::collections::BTreeMap;

use swanherd_ipsec::plane::{Op, Outcome, PlaneError, SaCounters, SaId};

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

/// A data plane. One task calls [`DataPlane::apply`], so that operations keep their order; any task
/// may read counters. Events arrive on the channel that the constructor of a plane returns next to
/// it (`tokio::sync::mpsc::Receiver<swanherd_ipsec::plane::PlaneEvent>`, bounded).
pub trait DataPlane: Send + Sync {
    /// Which one this is.
    fn kind(&self) -> PlaneKind;

    /// Applies one operation.
    ///
    /// # Errors
    /// The plane's or the kernel's refusal; nothing of the operation is left behind then.
    fn apply(&self, op: Op) -> impl Future<Output = Result<Outcome, PlaneError>> + Send;

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
