// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Installs, replaces and removes sets of policies.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::{HwOffload, Outcome, PlaneError, PolicyAction, PolicySet};

use super::books::reqid_of;
use super::message::{self, SeenPolicy};
use super::operation::{Answer, Pending, Planned};
use super::reconciling::actual;
use super::{XfrmPlane, absent_is_fine, claims, plane_error};
use crate::audit::{Difference, Finding, Object, Remedy};
use crate::netlink::{NetlinkError, Request, Requester};
use crate::reconcile::{ActualPolicy, Change, Claim, Claims, Record};
use crate::route_table::RouteTable;

/// A set of policies that was sent to the kernel.
pub(super) struct PendingPolicies {
    set: Box<PolicySet>,
    /// What the set had before.
    old: Claims,
    changes: Vec<Change>,
    /// Whether each change was in the ledger already: what is there may be ours.
    known: Vec<bool>,
}

impl XfrmPlane {
    /// The kernel policies that a set is.
    pub(super) async fn claims_of(&self, set: &PolicySet) -> Result<Claims, PlaneError> {
        let refuse = |reason: String| PlaneError {
            op: install_op(set),
            reason,
            errno: None,
        };
        if set.if_id_in != 0 || set.if_id_out != 0 {
            self.shared.expect_if_ids().await.map_err(refuse)?;
        }
        let mut claims = claims(set).map_err(refuse)?;
        if let (HwOffload::Packet, PolicyAction::Protect { local, .. }) = (set.offload, set.action)
        {
            let device = self
                .shared
                .offload
                .device_of(&self.shared.router, local)
                .await
                .map_err(refuse)?;
            for (key, claim) in &mut claims {
                // The kernel itself forwards, after the device has decrypted.
                if key.direction != swanherd_ipsec::plane::Direction::Fwd {
                    claim.device = Some(device.index);
                }
            }
        }
        Ok(claims)
    }

    pub(super) fn plan_policies(
        &self,
        set: Box<PolicySet>,
        claims: Claims,
    ) -> Result<Planned, PlaneError> {
        let mut books = self.shared.books();
        let (old, changes) = books
            .desired
            .claim(set.id, claims)
            .map_err(|error| PlaneError {
                op: install_op(&set),
                reason: error.to_string(),
                errno: Some(libc::EEXIST),
            })?;
        let changes = books.without_contested(changes);
        let known = changes
            .iter()
            .map(|change| {
                let Some(after) = change.after else {
                    return true;
                };
                let record = Record::Policy(change.key, reqid_of(&after));
                let known = books.journal.entries().contains(&record);
                books.record(record);
                known
            })
            .collect();
        drop(books);
        let requests = changes.iter().map(request).collect();
        let pending = PendingPolicies {
            set,
            old,
            changes,
            known,
        };
        Ok(Planned {
            requests,
            pending: Pending::Policies(Box::new(pending)),
        })
    }

    pub(super) async fn finish_policies(
        &self,
        routes: &mut RouteTable,
        pending: PendingPolicies,
        answers: Vec<Answer>,
    ) -> Result<Outcome, PlaneError> {
        let PendingPolicies {
            set,
            old,
            changes,
            known,
        } = pending;
        let mut made = Vec::with_capacity(changes.len());
        let mut refusal = None;
        for ((change, known), answer) in changes.iter().zip(known).zip(answers) {
            let outcome = match answer {
                Ok(_) => Ok(()),
                Err(error) => self.settle_policy(change, known, error).await,
            };
            match outcome {
                Ok(()) => made.push(*change),
                Err(error) => refusal = refusal.or(Some((change.key, error))),
            }
        }
        if let Some((key, error)) = refusal {
            self.shared.books().desired.restore(set.id, old);
            for change in made.iter().rev() {
                let undo = Change {
                    key: change.key,
                    before: change.after,
                    after: change.before,
                };
                if let Err(error) = self.change_policy(&undo).await {
                    tracing::warn!(policy = %change.key, %error, "cannot undo a change");
                }
            }
            let reason = format!("{key}: {}", error.reason);
            let mut books = self.shared.books();
            books.strike_out_changes(&changes);
            if set.trap || !matches!(set.action, PolicyAction::Protect { .. }) {
                let finding = Finding {
                    object: Object::Policy(key),
                    difference: Difference::InTheWay,
                    owner: Some(set.owner.clone()),
                    reason: error.reason,
                    remedy: Remedy::None,
                };
                books.refused.insert(set.id, finding);
            }
            return Err(PlaneError {
                op: install_op(&set),
                reason,
                errno: error.errno,
            });
        }
        {
            let mut books = self.shared.books();
            books.strike_out_changes(&changes);
            books.refused.remove(&set.id);
        }
        self.shared.thresholds.wake();
        self.end_acquires(&set).await;
        for ((addr, len), error) in routes.install(&self.shared.router, &set).await {
            tracing::warn!(owner = %set.owner, route = %format_args!("{addr}/{len}"), %error,
                "cannot install a route");
        }
        Ok(Outcome::Done)
    }

    /// Packets that met a wider policy, of another request id, take these policies from now on. What
    /// that policy asked for is answered, though no SA of its own came of it: the kernel would wait
    /// for one, and not ask for what else the wider policy is for.
    async fn end_acquires(&self, set: &PolicySet) {
        let PolicyAction::Protect { reqid, .. } = set.action else {
            return;
        };
        if set.trap {
            return;
        }
        for placeholder in self.shared.counts.answer_acquires(reqid, set) {
            if let Err(error) = self.shared.remove_placeholder(&placeholder).await {
                tracing::debug!(%error, reqid = placeholder.reqid,
                    "cannot end what the kernel waits for");
            }
        }
    }

    pub(super) fn plan_policy_removal(&self, id: u32) -> Planned {
        // A set without claims conflicts with nothing.
        let mut books = self.shared.books();
        books.refused.remove(&id);
        let (old, changes) = books.desired.claim(id, Claims::new()).unwrap_or_default();
        let reqids: BTreeSet<u32> = old.values().filter_map(Claim::reqid).collect();
        for reqid in reqids {
            self.shared.counts.forget_acquires(reqid);
        }
        let changes = books.without_contested(changes);
        drop(books);
        Planned {
            requests: changes.iter().map(request).collect(),
            pending: Pending::PolicyRemoval(changes),
        }
    }

    pub(super) async fn finish_policy_removal(
        &self,
        changes: Vec<Change>,
        answers: Vec<Answer>,
    ) -> Result<Outcome, PlaneError> {
        let mut failure = None;
        let mut done = Vec::with_capacity(changes.len());
        for (change, answer) in changes.into_iter().zip(answers) {
            let outcome = match answer {
                Ok(_) => Ok(()),
                Err(error) => self.settle_policy(&change, true, error).await,
            };
            match outcome {
                Ok(()) => done.push(change),
                Err(error) => failure = Some(error),
            }
        }
        self.shared.books().strike_out_changes(&done);
        self.shared.thresholds.wake();
        failure.map_or(Ok(Outcome::Done), Err)
    }

    async fn change_policy(&self, change: &Change) -> Result<(), PlaneError> {
        let mut answers = self
            .shared
            .requests
            .batch(vec![request(change)], |_, _| None::<()>)
            .await;
        match answers.pop() {
            Some(Err(error)) => self.settle_policy(change, true, error).await,
            Some(Ok(_)) | None => Ok(()),
        }
    }

    /// Goes on from the kernel's refusal of a change. `known`: the ledger had it before it was
    /// written down for this change.
    async fn settle_policy(
        &self,
        change: &Change,
        known: bool,
        error: NetlinkError,
    ) -> Result<(), PlaneError> {
        let key = &change.key;
        let Some(after) = change.after else {
            return absent_is_fine(Err(error))
                .map_err(|error| plane_error(format_args!("remove policy {key}"), error));
        };
        let fail = |error| plane_error(format_args!("install policy {key}"), error);
        if error.errno() != Some(libc::EEXIST) {
            return Err(fail(error));
        }
        let present = self
            .shared
            .requests
            .request(&message::get_policy(key), 0, |_, payload| {
                SeenPolicy::parse(payload)
            })
            .await
            .map_err(fail)?
            .pop();
        let reqid = present.as_ref().map_or(0, SeenPolicy::reqid);
        let record = Record::Policy(*key, reqid);
        let ours = if reqid == reqid_of(&after) {
            known
        } else {
            self.shared.books().journal.entries().contains(&record)
        };
        // Nobody can tell it from ours, whose ledger may have been lost, and it does what is asked.
        let same = present
            .as_ref()
            .is_some_and(|policy| actual(policy) == ActualPolicy::of(key, &after));
        if !ours && same {
            tracing::info!(policy = %key, "took over a policy that was there as it should be");
            return Ok(());
        }
        if !ours {
            return Err(PlaneError {
                op: format!("install policy {key}"),
                reason: format!(
                    "someone else has installed the same policy ({})",
                    present.map_or_else(|| "gone since".to_owned(), |policy| policy.to_string())
                ),
                errno: Some(libc::EEXIST),
            });
        }
        let request = message::install_policy(key, &after, true);
        self.shared
            .requests
            .command(&request, 0)
            .await
            .map_err(fail)
    }

    pub(super) async fn dump_policies(&self) -> Result<Vec<SeenPolicy>, NetlinkError> {
        dump_policies(&self.shared.requests).await
    }
}

/// Every policy of the kernel, of every kind.
pub(super) async fn dump_policies(requests: &Requester) -> Result<Vec<SeenPolicy>, NetlinkError> {
    requests
        .dump(&message::dump_policies(), |_, payload| {
            SeenPolicy::parse(payload)
        })
        .await
}

fn request(change: &Change) -> Request {
    match change.after {
        None => Request::new(&message::remove_policy(&change.key), 0),
        Some(after) => {
            let update = change.before.is_some();
            Request::new(&message::install_policy(&change.key, &after, update), 0)
        }
    }
}

fn install_op(set: &PolicySet) -> String {
    format!("install policies of {}", set.owner)
}
