// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic that asks for a CHILD SA.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use swanherd_ipsec::TrafficSelector;

use super::traps::{is_negotiated, is_wildcard};
use super::{Endpoint, is_making_child};
use crate::api::{AcquireFate, ConnectionRef, Counter, IkeSaId, LogGroup, Now};
use crate::sa::{IkeSa, Packet, Task, narrow};

/// After a failure, traffic does not set off another attempt for this long.
const HOLD_OFF: Duration = Duration::from_secs(1);

impl Endpoint {
    /// A packet hit a policy for which there is no SA. However many do, each child is negotiated
    /// once at a time.
    pub(super) fn acquired(
        &mut self,
        now: Now,
        reqid: u32,
        local: TrafficSelector,
        remote: TrafficSelector,
    ) {
        let owner = self.env.policies.owner(reqid);
        let Some((connection, child)) = owner.filter(|_| reqid != 0 && !self.stopping) else {
            self.count_acquire(None, AcquireFate::Ignored);
            return;
        };
        let fate = self.acquire_for(now, &connection, &child, (local, remote));
        self.count_acquire(Some(connection.clone()), fate);
        let level = match fate {
            AcquireFate::Started => 1,
            AcquireFate::Coalesced | AcquireFate::Ignored => 2,
        };
        let what = match fate {
            AcquireFate::Started => "wants a CHILD_SA",
            AcquireFate::Coalesced => "wants a CHILD_SA that is there or on its way",
            AcquireFate::Ignored => "cannot be served",
        };
        self.env.log(
            LogGroup::Knl,
            level,
            format!(
                "traffic {} === {} for {connection}/{child} (reqid {reqid}) {what}",
                narrow::describe(&[local]),
                narrow::describe(&[remote])
            ),
        );
    }

    fn acquire_for(
        &mut self,
        now: Now,
        connection: &str,
        child: &str,
        packet: Packet,
    ) -> AcquireFate {
        let Some(conn) = self.env.connections.get(connection).cloned() else {
            return AcquireFate::Ignored;
        };
        let index = conn.children.iter().position(|c| c.name == child);
        let Some(index) =
            index.filter(|index| conn.children.get(*index).is_some_and(is_negotiated))
        else {
            return AcquireFate::Ignored;
        };
        let single = |ts: &TrafficSelector| ts.start == ts.end && !ts.start.is_unspecified();
        let told = single(&packet.0) && single(&packet.1);
        let wildcard = is_wildcard(&conn);
        if wildcard && !told {
            return AcquireFate::Ignored;
        }
        let peer = wildcard.then_some(packet.1.start);
        // With virtual addresses the packet does not have its source yet.
        let packet = (told && conn.vips.is_empty()).then_some(packet);
        let there = self.of_connection(connection).into_iter().any(|id| {
            self.sas
                .get(&id)
                .is_some_and(|sa| is_with(sa, peer) && serves(sa, child, packet))
        });
        if there || self.holds_off(now.instant, connection) {
            return AcquireFate::Coalesced;
        }
        self.keep.unplan(connection, child);
        self.negotiate(now, &conn, index, packet, peer);
        AcquireFate::Started
    }

    /// Negotiates a child because of a packet, with the peer that the packet names if the
    /// connection names none.
    fn negotiate(
        &mut self,
        now: Now,
        conn: &ConnectionRef,
        index: usize,
        packet: Option<Packet>,
        peer: Option<IpAddr>,
    ) -> IkeSaId {
        let task = Task::CreateChild {
            conn: conn.clone(),
            index,
            packet,
        };
        if let Some(ike) = self.usable_sa(&conn.name, peer) {
            self.with(ike, |sa, env| sa.queue_task(env, now, task));
            return ike;
        }
        self.initiate(now, conn, vec![task], None, peer)
    }

    fn count_acquire(&mut self, connection: Option<String>, fate: AcquireFate) {
        self.env.count(connection, Counter::Acquire(fate));
    }

    /// An attempt has failed.
    pub(super) fn note_failure(&mut self, now: Instant, connection: &str) {
        self.failures
            .retain(|_, at| now.saturating_duration_since(*at) < HOLD_OFF);
        self.failures.insert(connection.to_owned(), now);
    }

    fn holds_off(&self, now: Instant, connection: &str) -> bool {
        self.failures
            .get(connection)
            .is_some_and(|at| now.saturating_duration_since(*at) < HOLD_OFF)
    }
}

/// Whether an IKE SA is with that peer, if one is named.
pub(super) fn is_with(sa: &IkeSa, peer: Option<IpAddr>) -> bool {
    !sa.dead && peer.is_none_or(|peer| sa.remote.ip() == peer || sa.target == Some(peer))
}

/// Whether an IKE SA has, or is making, a child of that name that carries the packet.
fn serves(sa: &IkeSa, child: &str, packet: Option<Packet>) -> bool {
    let ending = |id| {
        sa.queue
            .iter()
            .any(|task| matches!(task, Task::DeleteChild(queued) if *queued == id))
    };
    is_making_child(sa, child)
        || sa.children.values().any(|c| {
            c.cfg().name == child
                && c.is_lasting()
                && !ending(c.id)
                && packet.is_none_or(|(local, remote)| {
                    narrow::covers(&c.local_ts, &[local]) && narrow::covers(&c.remote_ts, &[remote])
                })
        })
}
