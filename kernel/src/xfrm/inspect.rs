// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A look at the kernel without a plane, for tools that run where no daemon does. Nothing is
//! written, neither to the kernel nor to the ledger.

use std::path::Path;

use swanherd_ipsec::plane::PlaneError;

use super::books::ledger_here;
use super::policies::dump_policies;
use super::states::dump_sas;
use super::{listing, plane_error, reconciling};
use crate::audit::{Audit, ListedPolicy};
use crate::netlink::{NetlinkError, Requester};
use crate::reconcile::{Desired, Journal};

/// What [`inspect`] saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// Every policy. Owners are told as far as the ledger knows them.
    pub policies: Vec<ListedPolicy>,
    /// What the next start would remove: nothing is wanted while no daemon runs.
    pub audit: Audit,
}

/// Reads the kernel's SAs and policies, and the ledger that is kept as
/// [`XfrmOptions::ledger`](super::XfrmOptions::ledger) says. Needs a tokio runtime and
/// `CAP_NET_ADMIN`.
///
/// # Errors
/// If the kernel or the ledger cannot be read.
pub async fn inspect(ledger: &Path) -> Result<Inspection, PlaneError> {
    let fail = |error| plane_error("look at the kernel", error);
    let path = ledger_here(ledger);
    let ledger = Journal::read(&path).map_err(|error| PlaneError {
        op: format!("read the ledger {}", path.display()),
        reason: error.to_string(),
        errno: error.raw_os_error(),
    })?;
    let requests = Requester::open(libc::NETLINK_XFRM as isize)
        .map_err(|error| fail(NetlinkError::Io(error)))?;
    let sas = dump_sas(&requests).await.map_err(fail)?;
    let policies = dump_policies(&requests).await.map_err(fail)?;
    let nothing = Desired::default();
    Ok(Inspection {
        audit: reconciling::compare(&nothing, &ledger, &sas, &policies),
        policies: listing::listed(&nothing, &ledger, &policies),
    })
}
