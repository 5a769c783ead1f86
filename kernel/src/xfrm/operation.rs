// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes operations in order, and sends what they ask of the kernel in as few calls as possible.
//!
//! An operation is planned (the books are changed, its requests built), sent together with its
//! neighbours, and finished with the kernel's answers. Operations go together as long as none
//! touches what another one of them has touched: the plan of one must not build on what the
//! kernel may yet refuse.

use std::collections::BTreeSet;

use swanherd_ipsec::plane::{Op, Outcome, PlaneError, SaId};

use super::message::SeenSa;
use super::policies::PendingPolicies;
use super::states::PendingSa;
use super::{XfrmPlane, plane_error};
use crate::netlink::{NetlinkError, Request};
use crate::reconcile::{Change, Claims, PolicyKey, Record};
use crate::route_table::RouteTable;

/// Requests that are collected before they are sent. The books run ahead of the kernel by so much.
const MAX_REQUESTS: usize = 512;

/// What the kernel says to one request; an SA, if it was asked for an SPI.
pub(super) type Answer = Result<Vec<SeenSa>, NetlinkError>;

/// An operation whose requests are built.
pub(super) struct Planned {
    pub(super) requests: Vec<Request>,
    pub(super) pending: Pending,
}

/// What is needed to finish an operation.
pub(super) enum Pending {
    Answered(Result<Outcome, PlaneError>),
    Spi {
        src: std::net::IpAddr,
        id: SaId,
        reqid: u32,
    },
    Sa(Box<PendingSa>),
    SaRemoval(SaId),
    Policies(Box<PendingPolicies>),
    PolicyRemoval(Vec<Change>),
}

impl Planned {
    pub(super) fn one(request: Request, pending: Pending) -> Self {
        Self {
            requests: vec![request],
            pending,
        }
    }

    pub(super) fn answered(outcome: Result<Outcome, PlaneError>) -> Self {
        Self {
            requests: Vec::new(),
            pending: Pending::Answered(outcome),
        }
    }
}

/// A thing that an operation changes.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Touched {
    Sa(SaId),
    Set(u32),
    Policy(PolicyKey),
}

/// Operations that go together.
#[derive(Default)]
struct Batch {
    requests: Vec<Request>,
    /// How many of the requests are each operation's.
    pending: Vec<(usize, Pending)>,
    touched: BTreeSet<Touched>,
}

impl Batch {
    fn meets(&self, touched: &[Touched]) -> bool {
        touched.iter().any(|thing| self.touched.contains(thing))
    }

    fn add(&mut self, planned: Planned, touched: Vec<Touched>) {
        self.pending.push((planned.requests.len(), planned.pending));
        self.requests.extend(planned.requests);
        self.touched.extend(touched);
    }
}

impl XfrmPlane {
    /// Applies operations in order, and answers each.
    pub(super) async fn run(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        let mut routes = self.routes.lock().await;
        let _installing = self.shared.counts.installing.lock().await;
        let mut outcomes = Vec::with_capacity(ops.len());
        let mut batch = Batch::default();
        for op in ops {
            // The interface may be looked up, and what the policies are depends on it.
            let claims = match &op {
                Op::InstallPolicies(set) => match self.claims_of(set).await {
                    Ok(claims) => claims,
                    Err(error) => {
                        batch.add(Planned::answered(Err(error)), Vec::new());
                        continue;
                    }
                },
                _ => Claims::new(),
            };
            let alone = matches!(
                op,
                Op::UpdateSa { .. } | Op::AddAddress { .. } | Op::RemoveAddress(_)
            );
            let touched = self.touched(&op, &claims);
            if alone || batch.meets(&touched) || batch.requests.len() >= MAX_REQUESTS {
                let batch = std::mem::take(&mut batch);
                outcomes.extend(self.exchange(&mut routes, batch).await);
                // The kernel answers within the call, so that nothing else would ever get its turn.
                tokio::task::yield_now().await;
            }
            let planned = self.plan(&mut routes, op, claims).await;
            batch.add(planned, touched);
        }
        outcomes.extend(self.exchange(&mut routes, batch).await);
        outcomes
    }

    fn touched(&self, op: &Op, claims: &Claims) -> Vec<Touched> {
        let books = self.shared.books();
        let set = |id: u32| {
            let old = books.desired.keys_of(id).map(Touched::Policy);
            std::iter::once(Touched::Set(id)).chain(old)
        };
        match op {
            Op::AllocSpi { .. } | Op::AddAddress { .. } | Op::RemoveAddress(_) => Vec::new(),
            Op::InstallSa(entry) => vec![Touched::Sa(entry.id())],
            Op::UpdateSa { id, .. } | Op::RemoveSa(id) => vec![Touched::Sa(*id)],
            Op::InstallPolicies(policies) => set(policies.id)
                .chain(claims.keys().copied().map(Touched::Policy))
                .collect(),
            Op::RemovePolicies(id) => set(*id).collect(),
        }
    }

    async fn plan(&self, routes: &mut RouteTable, op: Op, claims: Claims) -> Planned {
        match op {
            Op::AllocSpi { src, dst, reqid } => self
                .plan_spi(src, dst, reqid)
                .unwrap_or_else(|error| Planned::answered(Err(error))),
            Op::InstallSa(entry) => self
                .plan_sa(entry)
                .await
                .unwrap_or_else(|error| Planned::answered(Err(error))),
            Op::UpdateSa {
                id,
                src,
                dst,
                encap,
            } => Planned::answered(self.update_sa(id, src, dst, encap).await),
            Op::RemoveSa(id) => self.plan_sa_removal(id),
            Op::InstallPolicies(set) => self
                .plan_policies(set, claims)
                .unwrap_or_else(|error| Planned::answered(Err(error))),
            Op::RemovePolicies(id) => {
                routes.remove(&self.shared.router, id).await;
                self.plan_policy_removal(id)
            }
            Op::AddAddress { addr, local } => {
                let record = || self.shared.books().record(Record::Address(addr));
                let added = routes
                    .add_address(&self.shared.router, addr, local, record)
                    .await;
                let op = format_args!("add virtual address {addr}");
                let refused = |error| plane_error(op, error);
                Planned::answered(added.map(|()| Outcome::Done).map_err(refused))
            }
            Op::RemoveAddress(addr) => {
                let removed = routes.remove_address(&self.shared.router, addr).await;
                if removed.is_ok() && !routes.has_address(addr) {
                    self.shared.books().strike_out(&Record::Address(addr));
                }
                let op = format_args!("remove virtual address {addr}");
                let refused = |error| plane_error(op, error);
                Planned::answered(removed.map(|()| Outcome::Done).map_err(refused))
            }
        }
    }

    /// Sends what was collected, and finishes each operation.
    async fn exchange(
        &self,
        routes: &mut RouteTable,
        batch: Batch,
    ) -> Vec<Result<Outcome, PlaneError>> {
        let answers = self
            .shared
            .requests
            .batch(batch.requests, |_, payload| SeenSa::parse(payload))
            .await;
        let mut answers = answers.into_iter();
        let mut outcomes = Vec::with_capacity(batch.pending.len());
        for (count, pending) in batch.pending {
            let own: Vec<Answer> = answers.by_ref().take(count).collect();
            outcomes.push(self.finish(routes, pending, own).await);
        }
        outcomes
    }

    async fn finish(
        &self,
        routes: &mut RouteTable,
        pending: Pending,
        mut answers: Vec<Answer>,
    ) -> Result<Outcome, PlaneError> {
        let mut answer = || {
            answers
                .pop()
                .unwrap_or(Err(NetlinkError::Protocol("no answer from the kernel")))
        };
        match pending {
            Pending::Answered(outcome) => outcome,
            Pending::Spi { src, id, reqid } => self.finish_spi(src, id, reqid, answer()).await,
            Pending::Sa(pending) => self.finish_sa(*pending, answer()).await,
            Pending::SaRemoval(id) => self.finish_sa_removal(id, answer()),
            Pending::Policies(pending) => self.finish_policies(routes, *pending, answers).await,
            Pending::PolicyRemoval(changes) => self.finish_policy_removal(changes, answers).await,
        }
    }
}
