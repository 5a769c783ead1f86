// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the kernel's policies with their owners.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::PlaneError;

use super::books::reqid_of;
use super::message::{PolicyClass, SeenPolicy};
use super::{XfrmPlane, plane_error};
use crate::audit::{ListedPolicy, Owner, Verdict};
use crate::reconcile::{Desired, Record};

impl XfrmPlane {
    pub(super) async fn list_policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        let seen = self
            .dump_policies()
            .await
            .map_err(|error| plane_error("list the policies", error))?;
        let books = self.shared.books();
        Ok(listed(&books.desired, books.journal.entries(), &seen))
    }
}

/// What a dump shows, with owners by what is wanted and by what is written in the ledger.
pub(super) fn listed(
    desired: &Desired,
    ledger: &BTreeSet<Record>,
    seen: &[SeenPolicy],
) -> Vec<ListedPolicy> {
    seen.iter()
        .map(|policy| ListedPolicy {
            index: policy.index,
            key: policy.key,
            priority: policy.priority,
            verdict: verdict(policy),
            owner: owner(desired, ledger, policy),
        })
        .collect()
}

fn verdict(policy: &SeenPolicy) -> Verdict {
    match policy.template {
        _ if policy.discards => Verdict::Discard,
        None => Verdict::Bypass,
        Some(template) => Verdict::Protect {
            mode: template.mode,
            reqid: template.reqid,
            endpoints: (template.src, template.dst),
        },
    }
}

fn owner(desired: &Desired, ledger: &BTreeSet<Record>, policy: &SeenPolicy) -> Owner {
    match policy.kind {
        PolicyClass::Socket => return Owner::Socket,
        PolicyClass::Bound | PolicyClass::Sub => return Owner::Alien,
        PolicyClass::Plain => {}
    }
    let wanted = desired.in_force(&policy.key);
    if wanted.is_some_and(|wanted| reqid_of(&wanted) == policy.reqid())
        && let Some(owner) = desired.owner(&policy.key)
    {
        return owner.clone();
    }
    let record = Record::Policy(policy.key, policy.reqid());
    if ledger.contains(&record) {
        Owner::Leftover
    } else {
        Owner::Alien
    }
}
