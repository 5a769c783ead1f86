// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A data plane that keeps its SAs in a map and writes down what was asked of it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::{
    Direction, Op, Outcome, PlaneError, PolicyAction, PolicySet, SaCounters, SaEntry, SaId, SaKeys,
};
use swanherd_ipsec::registry::EncryptionId;
use swanherd_kernel::audit::{Audit, ListedPolicy};
use swanherd_kernel::{DataPlane, EventCounts, PlaneKind};

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct FakePlane {
    state: Mutex<State>,
    /// Permits to apply a batch; without it, all are applied at once.
    pub(crate) gate: Option<tokio::sync::Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    sas: BTreeMap<SaId, u64>,
    /// SPIs given out, by request id.
    spis: BTreeMap<u32, u32>,
    batches: Vec<usize>,
    dumps: usize,
    single: usize,
    audits: Vec<bool>,
    findings: Audit,
    policies: Vec<ListedPolicy>,
}

impl FakePlane {
    /// One that applies nothing before its gate has permits.
    pub(crate) fn gated() -> Self {
        Self {
            gate: Some(tokio::sync::Semaphore::new(0)),
            ..Self::default()
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sizes of the batches so far.
    pub(crate) fn batches(&self) -> Vec<usize> {
        self.state().batches.clone()
    }

    /// How many dumps of counters and how many counters of single SAs were asked for.
    pub(crate) fn asked(&self) -> (usize, usize) {
        let state = self.state();
        (state.dumps, state.single)
    }

    /// Whether each audit so far was a dry run.
    pub(crate) fn audits(&self) -> Vec<bool> {
        self.state().audits.clone()
    }

    /// What audits find from now on.
    pub(crate) fn find(&self, audit: Audit) {
        self.state().findings = audit;
    }

    /// What is listed from now on.
    pub(crate) fn list(&self, policies: Vec<ListedPolicy>) {
        self.state().policies = policies;
    }
}

impl DataPlane for FakePlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Xfrm
    }

    async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        let mut answers = self.apply_all(vec![op]).await;
        answers.remove(0)
    }

    async fn apply_all(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        let mut state = self.state();
        state.batches.push(ops.len());
        ops.into_iter()
            .map(|op| match op {
                Op::InstallSa(entry) => {
                    state.sas.insert(entry.id(), 0);
                    Ok(Outcome::Done)
                }
                Op::RemoveSa(id) => {
                    state.sas.remove(&id);
                    Ok(Outcome::Done)
                }
                Op::InstallPolicies(set) if set.local.is_empty() => Err(PlaneError {
                    op: "install policies".to_owned(),
                    reason: "there are none".to_owned(),
                    errno: None,
                }),
                Op::AllocSpi { reqid, .. } => {
                    // The first of a request id is that number.
                    let before = state.spis.entry(reqid).or_default();
                    let spi = reqid + (*before << 16);
                    *before += 1;
                    Ok(Outcome::Spi(spi))
                }
                _ => Ok(Outcome::Done),
            })
            .collect()
    }

    async fn reconcile(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        let mut state = self.state();
        state.audits.push(dry_run);
        Ok(state.findings.clone())
    }

    async fn policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        Ok(self.state().policies.clone())
    }

    fn event_counts(&self) -> EventCounts {
        EventCounts {
            overruns: 3,
            ..EventCounts::default()
        }
    }

    async fn counters(&self) -> Result<BTreeMap<SaId, SaCounters>, PlaneError> {
        let mut state = self.state();
        state.dumps += 1;
        Ok(state.sas.keys().map(|id| (*id, counters(*id))).collect())
    }

    async fn counters_of(&self, id: SaId) -> Option<SaCounters> {
        let mut state = self.state();
        state.single += 1;
        state.sas.contains_key(&id).then(|| counters(id))
    }

    async fn shutdown(&self) {
        self.state().sas.clear();
    }
}

/// What the fake says of each SA.
pub(crate) fn counters(id: SaId) -> SaCounters {
    SaCounters {
        bytes: u64::from(id.spi) * 100,
        packets: u64::from(id.spi),
        ..SaCounters::default()
    }
}

/// An SA of this SPI.
pub(crate) fn sa(spi: u32) -> SaEntry {
    SaEntry {
        replay_window: 32,
        ..SaEntry::tunnel(
            Direction::In,
            spi,
            ["192.0.2.2".parse().unwrap(), "192.0.2.1".parse().unwrap()],
            1,
            SaKeys {
                encryption: EncryptionId::AesGcm16,
                encryption_key: Secret::new(vec![0; 20]),
                integrity: None,
            },
        )
    }
}

/// A set of policies of this id. The fake refuses one without selectors.
pub(crate) fn policies(id: u32, action: PolicyAction, trap: bool) -> PolicySet {
    let network =
        |text: &str| swanherd_ipsec::TrafficSelector::network(text.parse().unwrap(), 24).unwrap();
    PolicySet {
        routes: false,
        trap,
        ..PolicySet::new(
            id,
            "gw/net".to_owned(),
            vec![network("10.1.0.0")],
            vec![network("10.2.0.0")],
            action,
        )
    }
}
