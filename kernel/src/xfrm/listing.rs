// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the kernel's policies with their owners.

use swanherd_ipsec::plane::PlaneError;

use super::message::{PolicyClass, SeenPolicy};
use super::{Books, XfrmPlane, plane_error, reqid_of};
use crate::audit::{ListedPolicy, Owner, Verdict};
use crate::reconcile::Record;

impl XfrmPlane {
    pub(super) async fn list_policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        let seen = self
            .dump_policies()
            .await
            .map_err(|error| plane_error("list the policies", error))?;
        let books = self.shared.books();
        Ok(seen
            .into_iter()
            .map(|policy| ListedPolicy {
                index: policy.index,
                key: policy.key,
                priority: policy.priority,
                verdict: verdict(&policy),
                owner: owner(&books, &policy),
            })
            .collect())
    }
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

fn owner(books: &Books, policy: &SeenPolicy) -> Owner {
    match policy.kind {
        PolicyClass::Socket => return Owner::Socket,
        PolicyClass::Bound | PolicyClass::Sub => return Owner::Alien,
        PolicyClass::Plain => {}
    }
    let wanted = books.desired.in_force(&policy.key);
    if wanted.is_some_and(|wanted| reqid_of(&wanted) == policy.reqid())
        && let Some(owner) = books.desired.owner(&policy.key)
    {
        return owner.clone();
    }
    let record = Record::Policy(policy.key, policy.reqid());
    if books.journal.entries().contains(&record) {
        Owner::Leftover
    } else {
        Owner::Alien
    }
}
