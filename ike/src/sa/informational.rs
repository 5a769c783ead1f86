// SPDX-License-Identifier: Apache-2.0 OR MIT
//! INFORMATIONAL exchanges: deletion and liveness (RFC 7296 sections 1.4 and 2.4).

use std::collections::BTreeSet;

use swanherd_ipsec::ProtocolId;

use super::child::ChildSa;
use super::env::{Env, Slot};
use super::initiator_auth::auth_lifetime;
use super::lifecycle::{CLEANUP_LIMIT, DELETE_LIMIT};
use super::timers::Timer;
use super::{Active, IkeSa, Passive, Task};
use crate::api::{
    ChildSaId, ChildState, Counter, Event, FailureReason, IkeState, LogGroup, Now, Token,
};
use crate::wire::{DeletePayload, ExchangeType, NotifyType, Payload};

impl IkeSa {
    /// A request of the peer's.
    pub(crate) fn handle_informational(&mut self, env: &mut Env, now: Now, payloads: &[Payload]) {
        let mut answer = Vec::new();
        let mut delete_ike = false;
        let mut failure = None;
        for payload in payloads {
            match payload {
                Payload::Delete(DeletePayload::IkeSa) => delete_ike = true,
                Payload::Delete(DeletePayload::Child { protocol, spis })
                    if *protocol == ProtocolId::Esp =>
                {
                    for spi in spis {
                        if let Some(own) = self.peer_deletes_child(env, now, *spi) {
                            answer.push(own);
                        }
                    }
                }
                Payload::Notify(notify)
                    if notify.notify_type == NotifyType::AuthenticationFailed =>
                {
                    failure = Some(notify.notify_type);
                }
                Payload::Notify(notify)
                    if notify.notify_type == NotifyType::AuthLifetime
                        && self.initiator
                        && self.state == IkeState::Established =>
                {
                    if let Some(lifetime) = auth_lifetime(notify) {
                        self.limit_authentication(env, now, lifetime);
                    }
                }
                _ => {}
            }
        }
        let said = self.read_mobility(env, payloads);
        let redirect = self.redirect_of(payloads);
        let mut response = said.response.clone();
        if !answer.is_empty() {
            response.push(Payload::Delete(DeletePayload::Child {
                protocol: ProtocolId::Esp,
                spis: answer,
            }));
        }
        if delete_ike {
            if !self.lead_away(env) {
                self.confirm_ike_delete(env, now);
            }
            return;
        }
        self.send_response(env, now, &response);
        if let Some(kind) = failure {
            let reason = FailureReason::LocalAuthFailed;
            self.fail(env, now, reason, format!("the peer sent {kind}"));
        } else {
            self.follow(env, now, &said);
            if let Some(gateway) = redirect {
                self.redirected(env, now, gateway);
            }
        }
    }

    /// Leads packets to the CHILD SAs of another IKE SA that takes over from this one, as after a
    /// reauthentication. The peer receives by those of this one until it has our answer, which
    /// therefore waits for the data plane. False if there is nothing to wait for.
    fn lead_away(&mut self, env: &mut Env) -> bool {
        if self.rekey_twin.is_some() {
            // The children go on as they are.
            return false;
        }
        let led: Vec<ChildSaId> = self
            .children
            .values()
            .filter(|child| env.has_relief(child.group.set, child.id))
            .map(|child| child.id)
            .collect();
        let mut waiting = BTreeSet::new();
        for id in led {
            if let Some(op) = self.unbound(env, id) {
                waiting.insert(env.plane(self.id, Slot::Passive, op));
            }
        }
        if waiting.is_empty() {
            return false;
        }
        self.passive = Passive::Leaving(waiting);
        true
    }

    /// The data plane has led packets of a child to another one.
    pub(crate) fn led_away(
        &mut self,
        env: &mut Env,
        now: Now,
        mut waiting: BTreeSet<Token>,
        token: Token,
    ) {
        waiting.remove(&token);
        if waiting.is_empty() {
            self.confirm_ike_delete(env, now);
        } else {
            self.passive = Passive::Leaving(waiting);
        }
    }

    /// Answers the peer's deletion of this IKE SA, and ends it.
    pub(crate) fn confirm_ike_delete(&mut self, env: &mut Env, now: Now) {
        self.send_response(env, now, &[]);
        self.adopt_twin(env, now);
        self.peer_deletes_ike(env);
    }

    fn peer_deletes_ike(&mut self, env: &mut Env) {
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("{} deleted the IKE_SA", self.peer_text()),
        );
        let queued = self
            .queue
            .iter()
            .any(|task| matches!(task, Task::DeleteIke));
        let ours = queued
            || matches!(self.active, Active::DeletingIke) && self.state == IkeState::Deleting;
        let reason = if ours {
            FailureReason::LocalDeleted
        } else {
            FailureReason::PeerDeleted
        };
        // What has another one in its place is no loss.
        let identities = self.identities();
        let alone = env.rivals.others(&identities, self.id).next().is_none();
        let was_up = self.is_established() && !self.redundant && !self.replaced;
        if was_up && alone && !ours {
            self.lost_to_peer(env, None, "the peer deleted the IKE_SA");
        }
        self.end(env, reason, "the peer deleted the IKE_SA".to_owned());
    }

    /// The peer has taken down what was up: that is why it is down.
    fn lost_to_peer(&self, env: &mut Env, child: Option<String>, text: &str) {
        let reason = FailureReason::PeerDeleted;
        env.count(self.connection_name(), Counter::Failure(reason));
        env.event(Event::Failure {
            connection: self.connection_name(),
            child,
            reason,
            text: text.to_owned(),
        });
    }

    /// The peer deletes the CHILD SA that it receives on `spi`. Returns our SPI for the answer.
    fn peer_deletes_child(&mut self, env: &mut Env, now: Now, spi: u32) -> Option<u32> {
        let found = self
            .children
            .values()
            .find(|child| child.spi_out == spi && child.state != ChildState::Deleted);
        let Some(child) = found else {
            self.log(
                env,
                LogGroup::Chd,
                1,
                format!("the peer deletes a CHILD_SA with SPI {spi:08x}, which does not exist"),
            );
            if let Active::CreatingChild(creating) = &mut self.active {
                creating.doom(spi);
            }
            return None;
        };
        let (id, own, state) = (child.id, child.spi_in, child.state);
        let (successor, name) = (child.replaced_by, child.cfg().name.clone());
        let close = child.cfg().close_action;
        if matches!(self.active, Active::DeletingChild(deleting) if deleting == id) {
            // Both sides delete it; each answers without SPI (RFC 7296 section 1.4.1).
            return None;
        }
        self.log(
            env,
            LogGroup::Chd,
            1,
            format!("the peer deletes CHILD_SA {name}{{{id}}} with SPI {spi:08x}"),
        );
        if state == ChildState::Created || state == ChildState::Installing {
            // It is undone as soon as it is there.
            if let Active::CreatingChild(creating) = &mut self.active
                && creating.child() == Some(id)
            {
                creating.doom(spi);
            }
            return Some(own);
        }
        // Our own rekeying is under way, and the peer's is done: the peer's takes over.
        let successor = successor.or_else(|| self.collision_successor(env, id));
        if let Some(successor) = successor {
            self.install_outbound(env, successor);
            self.retire_child(env, now, id);
            return Some(own);
        }
        // The peer could not use what it had agreed to, and has the SA from before.
        if self.return_to_predecessor(env, now, id) {
            return Some(own);
        }
        let known = self.children.get(&id).is_some_and(ChildSa::is_known);
        let closed = self.close_child(env, id);
        if let Some(closed) = closed.filter(|closed| known || closed.redundant) {
            let again = self
                .children
                .values()
                .any(|other| other.is_live() && other.cfg().name == name);
            if known && !again && !closed.taken_down {
                self.lost_to_peer(env, Some(name), "the peer deleted the CHILD_SA");
            }
            self.make_good(env, &closed, Some(close));
        }
        Some(own)
    }

    /// Deletes a child at both ends.
    pub(crate) fn start_child_delete(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        if matches!(child.state, ChildState::Deleting | ChildState::Deleted) {
            return;
        }
        if child.spi_in == 0 || child.installed.is_none() {
            self.close_child(env, id);
            return;
        }
        child.state = ChildState::Deleting;
        self.tell_successor(env, id);
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        let (spi, name) = (child.spi_in, child.cfg().name.clone());
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!("deleting CHILD_SA {name}{{{id}}} with SPI {spi:08x}"),
        );
        let delete = Payload::Delete(DeletePayload::Child {
            protocol: ProtocolId::Esp,
            spis: vec![spi],
        });
        if self.send_request(env, now, ExchangeType::Informational, &[delete]) {
            self.active = Active::DeletingChild(id);
        }
        self.changed(env);
    }

    /// The peer has confirmed that a child is deleted.
    pub(crate) fn child_delete_answered(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        _payloads: &[Payload],
    ) {
        let Some(child) = self.children.get(&id) else {
            return;
        };
        if let Some(successor) = child.replaced_by {
            self.install_outbound(env, successor);
            self.retire_child(env, now, id);
            return;
        }
        if let Some(closed) = self.close_child(env, id) {
            self.make_good(env, &closed, None);
        }
    }

    /// Deletes the IKE SA at both ends.
    pub(crate) fn start_ike_delete(&mut self, env: &mut Env, now: Now) {
        self.log(
            env,
            LogGroup::Ike,
            1,
            format!(
                "deleting IKE_SA {}[{}] with {}",
                self.connection_name().unwrap_or_default(),
                self.id,
                self.peer_text()
            ),
        );
        let delete = Payload::Delete(DeletePayload::IkeSa);
        if !self.send_request(env, now, ExchangeType::Informational, &[delete]) {
            return;
        }
        self.active = Active::DeletingIke;
        if self.state != IkeState::Rekeyed {
            self.state = IkeState::Deleting;
        }
        self.queue.clear();
        // Nobody waits for the end of an SA that is replaced, but a peer that misses it keeps it.
        if self.state != IkeState::Rekeyed && !self.redundant {
            let limit = if self.replaced {
                CLEANUP_LIMIT
            } else {
                DELETE_LIMIT
            };
            self.timers.set(Timer::Delete, now.instant + limit);
        }
        self.changed(env);
    }

    /// The peer has confirmed that the IKE SA is deleted.
    pub(crate) fn ike_delete_answered(&mut self, env: &mut Env, now: Now) {
        self.is_alive_after_all(env, now);
        self.log(env, LogGroup::Ike, 1, "IKE_SA is deleted");
        self.end(env, FailureReason::LocalDeleted, "deleted".to_owned());
    }
}
