// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether an IKE_SA_INIT request suits a connection, before there is an IKE SA for it.

use swanherd_config::model::Connection;
use swanherd_ipsec::proposal::IkeSuite;
use swanherd_ipsec::{Proposal, ProtocolId, Transform};

use super::child_offer::{ChildPayloads, usable_ike_proposals};
use super::env::Env;
use super::proposal::{self, Chosen};
use crate::api::ConnectionRef;
use crate::wire::{KePayload, Message, NotifyPayload, NotifyType};

/// What to do about an IKE_SA_INIT request that is to be admitted.
pub(crate) enum Judgement {
    /// Set up an IKE SA.
    Accept(Box<Accepted>),
    /// Answer with an error and forget.
    Refuse(NotifyPayload, &'static str),
}

/// An IKE_SA_INIT request that suits a connection.
pub(crate) struct Accepted {
    pub(super) chosen: Chosen<IkeSuite>,
    pub(super) number: u8,
    pub(super) conn: ConnectionRef,
    pub(super) ke: KePayload,
    pub(super) nonce: Vec<u8>,
}

/// Judges an IKE_SA_INIT request by the connections that its addresses allow.
pub(crate) fn judge(env: &Env, conns: &[ConnectionRef], message: &Message) -> Judgement {
    let refuse = |kind, why| Judgement::Refuse(NotifyPayload::new(kind, Vec::new()), why);
    let parts = ChildPayloads::of(&message.payloads);
    let (Some(sa), Some(ke), Some(nonce)) = (parts.sa, parts.ke, parts.nonce) else {
        return refuse(NotifyType::InvalidSyntax, "it lacks SA, KE or nonce");
    };
    let theirs: Vec<_> = sa.proposals.iter().map(|p| p.proposal.clone()).collect();
    let prefer = env.settings.prefer_configured_proposals;
    let found = conns.iter().find_map(|conn| {
        let ours = usable_ike_proposals(env, &conn.proposals);
        Some((conn, proposal::select_ike(&ours, &theirs, prefer)?))
    });
    let Some((conn, chosen)) = found else {
        return refuse(
            NotifyType::NoProposalChosen,
            "no connection accepts one of its proposals",
        );
    };
    if chosen.suite.key_exchange != ke.method {
        let wanted = u16::from(chosen.suite.key_exchange).to_be_bytes().to_vec();
        return Judgement::Refuse(
            NotifyPayload::new(NotifyType::InvalidKePayload, wanted),
            "another key exchange is preferred",
        );
    }
    let number = sa.proposals.get(chosen.index).map_or(1, |p| p.number);
    Judgement::Accept(Box::new(Accepted {
        chosen,
        number,
        conn: conn.clone(),
        ke,
        nonce,
    }))
}

/// Whether a connection's proposals allow what IKE_SA_INIT agreed on.
pub(super) fn allows(conn: &Connection, suite: &IkeSuite) -> bool {
    let mut transforms = vec![
        Transform::Encryption {
            id: suite.encryption,
            key_bits: suite.key_bits,
        },
        Transform::Prf(suite.prf),
        Transform::KeyExchange(suite.key_exchange),
    ];
    transforms.extend(suite.integrity.map(Transform::Integrity));
    let agreed = Proposal {
        protocol: ProtocolId::Ike,
        transforms,
    };
    proposal::select_ike(&conn.proposals, std::slice::from_ref(&agreed), true).is_some()
}
