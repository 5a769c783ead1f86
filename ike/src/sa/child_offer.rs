// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Negotiating a child: what is offered, what is answered, what is accepted (RFC 7296 sections
//! 1.2, 1.3.1 and 2.9). The same for IKE_AUTH and CREATE_CHILD_SA.

use swanherd_config::model::Child;
use swanherd_ipsec::plane::Mode;
use swanherd_ipsec::proposal::ChildSuite;
use swanherd_ipsec::{Proposal, ProtocolId, TrafficSelector};

use super::IkeSa;
use super::env::Env;
use super::proposal::{self, Chosen, KeyExchangeRule};
use super::{mode, narrow};
use crate::api::{ChildSaId, ConnectionRef, Event, FailureReason, LogGroup};
use crate::wire::{
    KePayload, NotifyPayload, NotifyType, Payload, SaPayload, SaProposal, TsPayload,
};

/// The payloads of one message that a child is negotiated with.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChildPayloads {
    pub(crate) sa: Option<SaPayload>,
    pub(crate) ts_i: Option<Vec<TrafficSelector>>,
    pub(crate) ts_r: Option<Vec<TrafficSelector>>,
    pub(crate) nonce: Option<Vec<u8>>,
    pub(crate) ke: Option<KePayload>,
    /// USE_TRANSPORT_MODE.
    pub(crate) transport: bool,
    /// The private notify for BEET mode.
    pub(crate) beet: bool,
    /// SPI of a REKEY_SA notify for a CHILD SA.
    pub(crate) rekeys: Option<u32>,
    /// The first error notify.
    pub(crate) error: Option<(NotifyType, Vec<u8>)>,
}

impl ChildPayloads {
    pub(crate) fn of(payloads: &[Payload]) -> Self {
        let mut out = Self::default();
        for payload in payloads {
            match payload {
                Payload::Sa(sa) => out.sa = Some(sa.clone()),
                Payload::TsI(TsPayload(ts)) => out.ts_i = Some(ts.clone()),
                Payload::TsR(TsPayload(ts)) => out.ts_r = Some(ts.clone()),
                Payload::Nonce(nonce) => out.nonce = Some(nonce.as_slice().to_vec()),
                Payload::Ke(ke) => out.ke = Some(ke.clone()),
                Payload::Notify(notify) => match notify.notify_type {
                    NotifyType::UseTransportMode => out.transport = true,
                    NotifyType::UseBeetMode => out.beet = true,
                    NotifyType::RekeySa => out.rekeys = notify.child_spi(),
                    kind if kind.is_error() && out.error.is_none() => {
                        out.error = Some((kind, notify.data.clone()));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        out
    }
}

/// Why a child did not come to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChildFailure {
    /// For metrics.
    pub(crate) reason: FailureReason,
    /// The notify to send, if this side is to say so.
    pub(crate) notify: NotifyType,
    /// For people.
    pub(crate) text: String,
}

impl ChildFailure {
    pub(crate) fn new(reason: FailureReason, notify: NotifyType, text: impl Into<String>) -> Self {
        Self {
            reason,
            notify,
            text: text.into(),
        }
    }

    /// What an error notify of the peer's means.
    pub(crate) fn from_notify(kind: NotifyType) -> Self {
        let reason = match kind {
            NotifyType::NoProposalChosen | NotifyType::InvalidKePayload => {
                FailureReason::ChildProposalMismatch
            }
            NotifyType::TsUnacceptable | NotifyType::SinglePairRequired => {
                FailureReason::SelectorMismatch
            }
            _ => FailureReason::PeerError,
        };
        Self::new(reason, kind, format!("the peer answered {kind}"))
    }
}

/// What this side, as responder of an exchange, agrees to.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Selected {
    /// Place in the connection's children.
    pub(crate) index: usize,
    pub(crate) chosen: Chosen<ChildSuite>,
    pub(crate) number: u8,
    pub(crate) spi_out: u32,
    pub(crate) local_ts: Vec<TrafficSelector>,
    pub(crate) remote_ts: Vec<TrafficSelector>,
    pub(crate) mode: Mode,
}

impl IkeSa {
    /// What this side offers for a child that has its SPI: SA, TSi, TSr and notifies.
    pub(crate) fn offer_child(
        &mut self,
        env: &mut Env,
        id: ChildSaId,
        proposals: &[Proposal],
    ) -> Vec<Payload> {
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let own = self
            .children
            .get(&id)
            .map(|child| self.own_selectors(&child.conn, child.cfg()))
            .unwrap_or_default();
        let old_ts = self
            .children
            .get(&id)
            .and_then(|child| child.replaces)
            .and_then(|old| self.children.get(&old))
            .filter(|old| !old.offer_configured)
            .map(|old| (old.local_ts.clone(), old.remote_ts.clone()));
        let Some(child) = self.children.get_mut(&id) else {
            return Vec::new();
        };
        let cfg = child.cfg();
        let (local_ts, remote_ts) = old_ts.unwrap_or_else(|| {
            let remote_ts = narrow::resolve(&cfg.remote_ts, &[remote]);
            mode::offered(cfg, own, remote_ts, local, remote)
        });
        // What asks for the SA goes first (RFC 7296 section 2.9), if the configuration has it.
        let (mut local_ts, mut remote_ts) = (local_ts, remote_ts);
        if let Some((local, remote)) = child.packet
            && narrow::covers(&local_ts, &[local])
            && narrow::covers(&remote_ts, &[remote])
        {
            for (selectors, first) in [(&mut local_ts, local), (&mut remote_ts, remote)] {
                selectors.retain(|selector| *selector != first);
                selectors.insert(0, first);
            }
        }
        child.local_ts.clone_from(&local_ts);
        child.remote_ts.clone_from(&remote_ts);
        let spi = child.spi_in.to_be_bytes().to_vec();
        let mut payloads = Vec::new();
        payloads.extend(mode::notify_of(child.mode));
        payloads.push(notify(NotifyType::EspTfcPaddingNotSupported));
        payloads.push(notify(NotifyType::NonFirstFragmentsAlso));
        payloads.push(Payload::Sa(SaPayload {
            proposals: (1..)
                .zip(proposals)
                .map(|(number, proposal)| SaProposal {
                    number,
                    spi: spi.clone(),
                    proposal: proposal.clone(),
                })
                .collect(),
        }));
        self.log(
            env,
            LogGroup::Chd,
            2,
            format!(
                "offering TS {} === {}",
                narrow::describe(&local_ts),
                narrow::describe(&remote_ts)
            ),
        );
        payloads.push(Payload::TsI(TsPayload(local_ts)));
        payloads.push(Payload::TsR(TsPayload(remote_ts)));
        payloads
    }

    /// Takes over what the peer answered to an offer.
    pub(crate) fn accept_child(
        &mut self,
        env: &mut Env,
        id: ChildSaId,
        proposals: &[Proposal],
        rule: KeyExchangeRule,
        answer: &ChildPayloads,
    ) -> Result<ChildSuite, ChildFailure> {
        let invalid = |text: &str| {
            ChildFailure::new(
                FailureReason::PeerMisbehaved,
                NotifyType::InvalidSyntax,
                text,
            )
        };
        if let Some((kind, _)) = &answer.error
            && answer.sa.is_none()
        {
            return Err(ChildFailure::from_notify(*kind));
        }
        let (Some(sa), Some(ts_i), Some(ts_r)) = (&answer.sa, &answer.ts_i, &answer.ts_r) else {
            return Err(invalid("the peer's answer lacks SA or traffic selectors"));
        };
        let [theirs] = sa.proposals.as_slice() else {
            return Err(invalid("the peer's answer does not have one proposal"));
        };
        let spi_out = theirs.child_spi().filter(|spi| *spi != 0);
        let spi_out = spi_out.ok_or_else(|| invalid("the peer's answer has no SPI"))?;
        let chosen = proposal::select_child(
            proposals,
            std::slice::from_ref(&theirs.proposal),
            rule,
            true,
        )
        .ok_or_else(|| invalid("the peer chose what was not offered"))?;
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let Some(child) = self.children.get_mut(&id) else {
            return Err(invalid("the CHILD_SA is gone"));
        };
        let mut ts_i = ts_i.clone();
        let mut ts_r = ts_r.clone();
        let nat = self.nat.any() && !mode::is_proxy(child.cfg());
        if child.mode == Mode::Transport && answer.transport && nat {
            ts_i = narrow::substitute(&ts_i, local);
            ts_r = narrow::substitute(&ts_r, remote);
        }
        let local_ts = narrow::narrow(&child.local_ts, &ts_i);
        let remote_ts = narrow::narrow(&child.remote_ts, &ts_r);
        if local_ts.is_empty() || remote_ts.is_empty() {
            return Err(ChildFailure::new(
                FailureReason::SelectorMismatch,
                NotifyType::TsUnacceptable,
                "the peer's traffic selectors are outside of those offered",
            ));
        }
        let narrowed = !narrow::covers(&local_ts, &child.local_ts)
            || !narrow::covers(&remote_ts, &child.remote_ts);
        let confirmed = match child.mode {
            Mode::Transport => answer.transport,
            Mode::Beet => answer.beet && self.peer.private_notifies,
            Mode::Tunnel => true,
        };
        let refused = if !confirmed {
            let wanted = child.mode;
            child.mode = Mode::Tunnel;
            Some(wanted)
        } else if mode::fits(child.cfg(), child.mode, &local_ts, &remote_ts) {
            None
        } else {
            return Err(ChildFailure::new(
                FailureReason::SelectorMismatch,
                NotifyType::TsUnacceptable,
                format!(
                    "the peer wants {:?} mode for {} === {}, which are not two hosts",
                    child.mode,
                    narrow::describe(&local_ts),
                    narrow::describe(&remote_ts)
                ),
            ));
        };
        child.local_ts = local_ts;
        child.remote_ts = remote_ts;
        child.spi_out = spi_out;
        child.suite = Some(chosen.suite);
        if let Some(wanted) = refused {
            let text = format!("the peer does not confirm {wanted:?} mode, tunnel mode is used");
            self.log(env, LogGroup::Chd, 1, text);
        }
        if narrowed {
            env.event(Event::Alert {
                kind: "ts-narrowed",
                sa: Some(Box::new(self.info_without_children())),
            });
        }
        Ok(chosen.suite)
    }

    /// Chooses a child and its parameters for what the peer offers. `only` restricts to one child,
    /// as a rekey does.
    pub(crate) fn select_child(
        &self,
        env: &mut Env,
        conn: &ConnectionRef,
        only: Option<usize>,
        rule: KeyExchangeRule,
        offer: &ChildPayloads,
    ) -> Result<Selected, ChildFailure> {
        let invalid = |text: &str| {
            ChildFailure::new(
                FailureReason::PeerMisbehaved,
                NotifyType::InvalidSyntax,
                text,
            )
        };
        let (Some(sa), Some(ts_i), Some(ts_r)) = (&offer.sa, &offer.ts_i, &offer.ts_r) else {
            return Err(invalid("the peer's request lacks SA or traffic selectors"));
        };
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let mut fitting: Vec<Fitting> = Vec::new();
        for (index, child) in conn.children.iter().enumerate() {
            if only.is_some_and(|only| only != index) {
                continue;
            }
            let beet = offer.beet && self.peer.private_notifies;
            let Some(mut mode) = mode::answered(child, offer.transport, beet) else {
                continue;
            };
            let (mut theirs_remote, mut theirs_local) = (ts_i.clone(), ts_r.clone());
            if mode == Mode::Transport && self.nat.any() && !mode::is_proxy(child) {
                theirs_remote = narrow::substitute(&theirs_remote, remote);
                theirs_local = narrow::substitute(&theirs_local, local);
            }
            let local_ts = narrow::narrow(&self.own_selectors(conn, child), &theirs_local);
            let remote_ts = narrow::narrow(
                &narrow::resolve(&child.remote_ts, &[remote]),
                &theirs_remote,
            );
            if local_ts.is_empty() || remote_ts.is_empty() {
                continue;
            }
            if !mode::fits(child, mode, &local_ts, &remote_ts) {
                // As between other hosts than these two, only tunnel mode can carry it.
                mode = Mode::Tunnel;
            }
            let whole = narrow::covers(&local_ts, &theirs_local)
                && narrow::covers(&remote_ts, &theirs_remote);
            // The first selectors may be those of the packet that asks for the SA, which has to
            // be able to carry it (RFC 7296 section 2.9).
            let first = |offered: &[TrafficSelector], agreed: &[TrafficSelector]| {
                offered
                    .first()
                    .is_none_or(|first| narrow::covers(agreed, &[*first]))
            };
            let misses = !first(&theirs_local, &local_ts) || !first(&theirs_remote, &remote_ts);
            fitting.push(Fitting {
                narrowed: !whole,
                misses,
                index,
                local_ts,
                remote_ts,
                mode,
            });
        }
        if fitting.is_empty() {
            env.event(Event::Alert {
                kind: "ts-mismatch",
                sa: Some(Box::new(self.info_without_children())),
            });
            return Err(ChildFailure::new(
                FailureReason::SelectorMismatch,
                NotifyType::TsUnacceptable,
                format!(
                    "no child of {} allows {} === {}",
                    conn.name,
                    narrow::describe(ts_r),
                    narrow::describe(ts_i)
                ),
            ));
        }
        fitting.sort_by_key(|fit| (fit.narrowed, fit.misses, fit.index));
        let theirs: Vec<Proposal> = sa.proposals.iter().map(|p| p.proposal.clone()).collect();
        for fit in fitting {
            let Some(child) = conn.children.get(fit.index) else {
                continue;
            };
            let ours = usable_child_proposals(env, child);
            let prefer = env.settings.prefer_configured_proposals;
            let Some(chosen) = proposal::select_child(&ours, &theirs, rule, prefer) else {
                continue;
            };
            let Some(offered) = sa.proposals.get(chosen.index) else {
                continue;
            };
            let spi_out = offered.child_spi().filter(|spi| *spi != 0);
            let spi_out = spi_out.ok_or_else(|| invalid("a proposal of the peer has no SPI"))?;
            return Ok(Selected {
                index: fit.index,
                number: offered.number,
                spi_out,
                chosen,
                local_ts: fit.local_ts,
                remote_ts: fit.remote_ts,
                mode: fit.mode,
            });
        }
        env.event(Event::Alert {
            kind: "proposal-mismatch-child",
            sa: Some(Box::new(self.info_without_children())),
        });
        self.log(
            env,
            LogGroup::Cfg,
            1,
            format!("the peer offers {}", proposal::describe(&theirs)),
        );
        Err(ChildFailure::new(
            FailureReason::ChildProposalMismatch,
            NotifyType::NoProposalChosen,
            "none of the peer's proposals for the CHILD_SA is acceptable",
        ))
    }

    /// Puts what was selected into a child that has been made for it.
    pub(crate) fn apply_selected(&mut self, id: ChildSaId, selected: &Selected) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.suite = Some(selected.chosen.suite);
        child.spi_out = selected.spi_out;
        child.local_ts.clone_from(&selected.local_ts);
        child.remote_ts.clone_from(&selected.remote_ts);
        child.mode = selected.mode;
    }

    /// This side's answer for a child that has its SPI: SA, TSi, TSr and notifies.
    pub(crate) fn answer_child(&self, id: ChildSaId, selected: &Selected) -> Vec<Payload> {
        let Some(child) = self.children.get(&id) else {
            return Vec::new();
        };
        let mut payloads = Vec::new();
        payloads.extend(mode::notify_of(selected.mode));
        payloads.push(notify(NotifyType::EspTfcPaddingNotSupported));
        payloads.push(notify(NotifyType::NonFirstFragmentsAlso));
        payloads.push(Payload::Sa(SaPayload {
            proposals: vec![SaProposal {
                number: selected.number,
                spi: child.spi_in.to_be_bytes().to_vec(),
                proposal: selected.chosen.reply.clone(),
            }],
        }));
        payloads.push(Payload::TsI(TsPayload(selected.remote_ts.clone())));
        payloads.push(Payload::TsR(TsPayload(selected.local_ts.clone())));
        payloads
    }
}

/// The proposals of a child without key exchanges that this build lacks.
pub(crate) fn usable_child_proposals(env: &Env, child: &Child) -> Vec<Proposal> {
    use swanherd_ipsec::Transform;
    use swanherd_ipsec::registry::KeyExchangeId;
    child
        .proposals
        .iter()
        .filter(|proposal| proposal.protocol == ProtocolId::Esp)
        .filter_map(|proposal| {
            let is_ke = |t: &Transform| matches!(t, Transform::KeyExchange(_));
            let transforms: Vec<Transform> = proposal
                .transforms
                .iter()
                .copied()
                .filter(|t| match t {
                    Transform::KeyExchange(KeyExchangeId::None) => true,
                    t @ Transform::KeyExchange(_) => env.crypto.supports(*t),
                    Transform::AdditionalKeyExchange { .. } => false,
                    _ => true,
                })
                .collect();
            // A proposal that wants a key exchange must not turn into one without.
            let lost = proposal.transforms.iter().any(is_ke) && !transforms.iter().any(is_ke);
            (!lost).then_some(Proposal {
                protocol: proposal.protocol,
                transforms,
            })
        })
        .collect()
}

/// The proposals of a connection as far as this build can carry them out.
pub(crate) fn usable_ike_proposals(env: &Env, proposals: &[Proposal]) -> Vec<Proposal> {
    use swanherd_ipsec::Transform;
    proposals
        .iter()
        .filter(|proposal| proposal.protocol == ProtocolId::Ike)
        .filter_map(|proposal| {
            let transforms: Vec<Transform> = proposal
                .transforms
                .iter()
                .copied()
                .filter(|t| env.crypto.supports(*t))
                .collect();
            let has = |test: fn(&Transform) -> bool| transforms.iter().any(test);
            let complete = has(|t| matches!(t, Transform::Encryption { .. }))
                && has(|t| matches!(t, Transform::Prf(_)))
                && has(|t| matches!(t, Transform::KeyExchange(_)));
            complete.then_some(Proposal {
                protocol: proposal.protocol,
                transforms,
            })
        })
        .collect()
}

/// A child whose selectors meet those of the peer's offer.
struct Fitting {
    /// Less than the peer wants.
    narrowed: bool,
    /// Without what the peer wants first.
    misses: bool,
    index: usize,
    local_ts: Vec<TrafficSelector>,
    remote_ts: Vec<TrafficSelector>,
    mode: Mode,
}

/// A notify without data.
pub(crate) fn notify(kind: NotifyType) -> Payload {
    Payload::Notify(NotifyPayload::new(kind, Vec::new()))
}
