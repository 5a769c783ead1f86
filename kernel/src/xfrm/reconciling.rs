// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the kernel equal to what is wanted: at start, on demand, and every now and then.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_ipsec::plane::{Mark, Mode, PlaneError, SaId};

use super::books::{Books, reqid_of};
use super::message::{self, PolicyClass, SeenPolicy, SeenSa};
use super::{XfrmPlane, absent_is_fine, event, plane_error};
use crate::audit::{Audit, Difference, Finding, Object, Remedy};
use crate::netlink::{NetlinkError, Request};
use crate::reconcile::{
    self, ActualPolicy, ActualSa, ActualTemplate, Desired, Record, SeenPolicies, SeenSas,
};

impl XfrmPlane {
    pub(super) async fn reconcile_with_kernel(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        let mut routes = self.routes.lock().await;
        let fail = |error| plane_error("reconcile with the kernel", error);
        let sas = self.shared.dump_sas().await.map_err(fail)?;
        let policies = self.dump_policies().await.map_err(fail)?;
        let mut audit = {
            let books = self.shared.books();
            let mut audit = compare(&books.desired, books.journal.entries(), &sas, &policies);
            audit.findings.extend(still_refused(&books, &policies));
            audit
        };
        let policies = seen_policies(&policies);
        if dry_run {
            let differing = routes.audit(&self.shared.router, true).await;
            audit.findings.extend(differing.map_err(fail)?);
            return Ok(audit);
        }
        let lost = self.mend(&mut audit, &sas).await;
        let names: BTreeSet<SaId> = sas.iter().map(|sa| sa.id).collect();
        self.strike_out_absent(&audit, &names, &policies);
        self.shared.books().contested = audit
            .findings
            .iter()
            .filter_map(|finding| match (finding.object, finding.difference) {
                (Object::Policy(key), Difference::InTheWay) => Some(key),
                _ => None,
            })
            .collect();
        event::report_missing(&self.shared, &lost);
        let mended = routes.audit(&self.shared.router, false).await;
        audit.findings.extend(mended.map_err(fail)?);
        Ok(audit)
    }

    /// Does what each finding calls for. One that fails does not keep the others from it. SAs that
    /// have to be negotiated anew are returned.
    async fn mend(&self, audit: &mut Audit, sas: &[SeenSa]) -> Vec<SaId> {
        let marks: BTreeMap<SaId, Option<Mark>> = sas.iter().map(|sa| (sa.id, sa.mark)).collect();
        let mut lost = Vec::new();
        let mut requests = Vec::new();
        let mut waiting = Vec::new();
        for finding in &mut audit.findings {
            let (request, done) = match (finding.object, finding.difference) {
                (Object::Sa(id), Difference::Missing | Difference::InTheWay) => {
                    lost.push(id);
                    finding.remedy = Remedy::Renegotiated;
                    continue;
                }
                (Object::Sa(id), _) => {
                    let mark = marks.get(&id).copied().flatten();
                    let removal = Request::new(&message::remove_sa(id, mark), 0);
                    (removal, Remedy::Removed)
                }
                (Object::Policy(key), Difference::Missing | Difference::Changed) => {
                    let in_force = self.shared.books().desired.in_force(&key);
                    let Some(wanted) = in_force else {
                        continue;
                    };
                    let again = message::install_policy(&key, &wanted, true);
                    (Request::new(&again, 0), Remedy::Installed)
                }
                (Object::Policy(key), Difference::Unwanted) => {
                    let removal = Request::new(&message::remove_policy(&key), 0);
                    (removal, Remedy::Removed)
                }
                // Someone else's stays; the finding says what it is.
                (Object::Policy(_), Difference::InTheWay)
                | (Object::Route(_) | Object::Rule { .. } | Object::Address(_), _) => continue,
            };
            requests.push(request);
            waiting.push((finding, done));
        }
        let answers = self
            .shared
            .requests
            .batch(requests, |_, _| None::<()>)
            .await;
        for ((finding, done), answer) in waiting.into_iter().zip(answers) {
            let answer = answer.map(|_| ());
            finding.remedy = match done {
                Remedy::Removed => remedy(done, absent_is_fine(answer)),
                done => remedy(done, answer),
            };
        }
        lost
    }

    /// After a reconciliation, strikes out what is neither wanted nor there.
    fn strike_out_absent(&self, audit: &Audit, sas: &BTreeSet<SaId>, policies: &SeenPolicies) {
        let removed: BTreeSet<Object> = audit
            .findings
            .iter()
            .filter(|finding| finding.remedy == Remedy::Removed)
            .map(|finding| finding.object)
            .collect();
        let mut books = self.shared.books();
        let gone: Vec<Record> = books
            .journal
            .entries()
            .iter()
            .filter(|record| match record {
                Record::Sa(id) => {
                    let there = sas.contains(id) && !removed.contains(&Object::Sa(*id));
                    books.desired.sa(*id).is_none() && !there
                }
                Record::Policy(key, reqid) => {
                    let wanted = books.desired.in_force(key).map(|policy| reqid_of(&policy));
                    let there = policies
                        .get(key)
                        .is_some_and(|actual| actual.reqid() == *reqid)
                        && !removed.contains(&Object::Policy(*key));
                    // What is wanted under the same key has taken its place.
                    wanted != Some(*reqid) && (wanted.is_some() || !there)
                }
                Record::Thresholds(_) | Record::Address(_) => false,
            })
            .copied()
            .collect();
        for record in gone {
            books.strike_out(&record);
        }
    }
}

/// Traps and shunts that are not in force. What stood in the way of one may have gone since; it is
/// tried again by who asked for it.
fn still_refused(books: &Books, policies: &[SeenPolicy]) -> Vec<Finding> {
    let mut findings: Vec<Finding> = books.refused.values().cloned().collect();
    for finding in &mut findings {
        let free = !policies.iter().any(|policy| {
            policy.kind == PolicyClass::Plain && Object::Policy(policy.key) == finding.object
        });
        if free {
            finding.difference = Difference::Missing;
            finding.reason =
                "what stood in its place has gone; it is tried again within a minute".to_owned();
        }
    }
    findings
}

/// Tells what an earlier run had left and the first audit removed.
pub(super) fn report_leftovers(audit: &Audit) {
    let removed = |of: fn(&Object) -> bool| {
        audit
            .findings
            .iter()
            .filter(|finding| finding.remedy == Remedy::Removed && of(&finding.object))
            .count()
    };
    let sas = removed(|object| matches!(object, Object::Sa(_)));
    let policies = removed(|object| matches!(object, Object::Policy(_)));
    if sas + policies > 0 {
        tracing::info!(
            sas,
            policies,
            "removed what an earlier run left in the kernel"
        );
    }
    for finding in &audit.findings {
        if let Remedy::Failed(error) = &finding.remedy {
            tracing::warn!(object = ?finding.object, %error,
                "cannot remove what an earlier run left in the kernel");
        }
    }
}

fn remedy(done: Remedy, result: Result<(), NetlinkError>) -> Remedy {
    match result {
        Ok(()) => done,
        Err(error) => Remedy::Failed(error.to_string()),
    }
}

/// Compares what is wanted with dumps.
pub(super) fn compare(
    desired: &Desired,
    ledger: &BTreeSet<Record>,
    sas: &[SeenSa],
    policies: &[SeenPolicy],
) -> Audit {
    let mut audit = reconcile::audit(desired, ledger, &seen_sas(sas), &seen_policies(policies));
    let others = policies
        .iter()
        .filter(|policy| matches!(policy.kind, PolicyClass::Bound | PolicyClass::Sub))
        .count();
    audit.policies += others;
    audit.alien_policies += others;
    audit
}

fn seen_sas(dump: &[SeenSa]) -> SeenSas {
    let actual = |sa: &SeenSa| ActualSa {
        src: sa.src,
        reqid: sa.reqid,
    };
    dump.iter().map(|sa| (sa.id, actual(sa))).collect()
}

/// The policies that might be ours. What belongs to sockets is theirs, and sub-policies and
/// policies bound to an interface or a user are never ours.
pub(super) fn seen_policies(dump: &[SeenPolicy]) -> SeenPolicies {
    dump.iter()
        .filter(|policy| policy.kind == PolicyClass::Plain)
        .map(|policy| (policy.key, actual(policy)))
        .collect()
}

/// A policy as it is compared with what is wanted.
pub(super) fn actual(policy: &SeenPolicy) -> ActualPolicy {
    ActualPolicy {
        priority: policy.priority,
        template: policy.template.map(|template| ActualTemplate {
            mode: template.mode,
            reqid: template.reqid,
            spi: template.spi,
            endpoints: (template.mode != Mode::Transport).then_some((template.src, template.dst)),
        }),
        discards: policy.discards,
    }
}
