// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts policies back as soon as others have changed them, without waiting for the next audit.

use super::super::reconciling::seen_policies;
use super::super::{Shared, message, policies};
use crate::audit::{Difference, Object};
use crate::netlink::NetlinkError;
use crate::reconcile::{self, ActualSa, PolicyKey, SeenSas, WantedSa};

/// Installs again what is missing or changed; returns how much that was.
pub(super) async fn policies(shared: &Shared) -> Result<usize, NetlinkError> {
    let _quiet = shared.counts.installing.lock().await;
    let seen = policies::dump_policies(&shared.requests).await?;
    let keys: Vec<PolicyKey> = {
        let books = shared.books();
        // Only policies are compared: the SAs are taken to be there.
        let sas: SeenSas = books
            .desired
            .sas()
            .filter_map(|(id, sa)| match sa {
                WantedSa::Installed(entry) => Some((*id, entry)),
                WantedSa::Reserved => None,
            })
            .map(|(id, entry)| {
                let (src, reqid) = (entry.src, entry.reqid);
                (id, ActualSa { src, reqid })
            })
            .collect();
        let ledger = books.journal.entries();
        reconcile::audit(&books.desired, ledger, &sas, &seen_policies(&seen))
            .findings
            .into_iter()
            .filter_map(|finding| match (finding.object, finding.difference) {
                (Object::Policy(key), Difference::Missing | Difference::Changed) => Some(key),
                _ => None,
            })
            .collect()
    };
    let mut mended = 0;
    for key in keys {
        let in_force = shared.books().desired.in_force(&key);
        if let Some(wanted) = in_force {
            let request = message::install_policy(&key, &wanted, true);
            shared.requests.command(&request, 0).await?;
            mended += 1;
        }
    }
    Ok(mended)
}
