// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What IKE SAs want of the endpoint.

use std::collections::BTreeSet;
use std::time::Duration;

use swanherd_config::model::Childless;

use super::Endpoint;
use super::keep::Cause;
use crate::api::{Counter, Event, FailureReason, IkeSaId, IkeState, LogGroup, Now};
use crate::sa::env::Request;
use crate::sa::{CLEANUP_LIMIT, IkeSa, Task};

/// How long a peer has to delete an IKE SA that it has replaced by another one.
const REAUTHENTICATION: Duration = Duration::from_secs(10);

impl Endpoint {
    pub(super) fn serve(&mut self, now: Now, request: Request) {
        match request {
            Request::Adopt(sa) => self.adopt(sa),
            Request::Established(id) => {
                let name = self.sas.get(&id).and_then(|sa| sa.connection_name());
                if let Some(name) = name {
                    self.is_up(id, &name, None);
                    self.look_for_twins(now, id);
                }
            }
            Request::ChildUp {
                ike,
                connection,
                child,
            } => {
                self.keep.succeeded(&connection, &child, now.instant);
                self.is_up(ike, &connection, Some(&child));
            }
            Request::ChildFailed {
                ike,
                connection,
                child,
                reason,
                text,
                insist,
            } => {
                // What is wrong on this side, the operator can mend at once.
                let ours = matches!(
                    reason,
                    FailureReason::DataPlane
                        | FailureReason::Resources
                        | FailureReason::Unsupported
                );
                self.is_failed(ike, &child, ours.then_some(&*text));
                self.note_failure(now.instant, &connection);
                if reason != FailureReason::LocalDeleted {
                    let after = Duration::ZERO;
                    self.plan_restart(now, &connection, &child, after, Cause::Failed, insist);
                }
            }
            Request::Restart {
                connection,
                child,
                after,
                cause,
                insist,
            } => {
                // Another IKE SA may have it, as after two that were set up at once.
                let there = self.of_connection(&connection).into_iter().any(|id| {
                    let sa = self.sas.get(&id);
                    sa.is_some_and(|sa| !sa.dead && super::has_child(sa, &child))
                });
                if !there {
                    self.plan_restart(now, &connection, &child, after, cause, insist);
                }
            }
            Request::Trap { connection, child } => {
                let found = self.env.connections.get(&connection).and_then(|conn| {
                    let index = conn.children.iter().position(|c| c.name == child)?;
                    Some((conn.clone(), index))
                });
                if let Some((conn, index)) = found {
                    self.install_trap(now, &conn, index);
                }
            }
            Request::ReplaceOthers {
                keep,
                initial_contact,
            } => self.replace_others(now, keep, initial_contact),
            Request::Probe(id) => {
                self.with(id, |sa, env| sa.probe_if_quiet(env, now));
            }
            Request::InUse { ike, child } => {
                self.with(ike, |sa, _| sa.in_use(child));
            }
            Request::Reauthenticate { old } => self.reauthenticate(now, old),
            Request::Redirect { old, gateway } => self.redirect(now, old, gateway),
            Request::FinishReauth { old } => {
                // It may have been rekeyed meanwhile.
                let successor = self.sas.get(&old).and_then(|sa| sa.successor);
                self.with(successor.unwrap_or(old), |sa, env| {
                    sa.replaced = true;
                    sa.bound_delete(now, 2 * CLEANUP_LIMIT);
                    sa.queue_task(env, now, Task::DeleteIke);
                });
            }
        }
    }

    /// Deletes the other IKE SAs with the same pair of identities.
    fn replace_others(&mut self, now: Now, keep: IkeSaId, initial_contact: bool) {
        let Some(sa) = self.sas.get(&keep) else {
            return;
        };
        let Some(conn) = sa.conn.clone() else {
            return;
        };
        let (peer, remote) = (sa.peer_text(), sa.remote);
        let others: Vec<IkeSaId> = self
            .env
            .rivals
            .others(&sa.identities(), keep)
            .filter(|(_, other)| initial_contact || other.connection == conn.name)
            .map(|(id, _)| id)
            .collect();
        for id in others {
            let (Some(sa), Some(other)) = (self.sas.get(&keep), self.sas.get(&id)) else {
                continue;
            };
            if other.is_leaving() || matches!(other.state, IkeState::Rekeyed | IkeState::Deleting) {
                continue;
            }
            // What both sides have set up at once is settled by both in the same way. The peer may
            // know nothing of this one, though.
            if super::twins::are_twins(sa, other) {
                self.with(id, |sa, env| sa.queue_task(env, now, Task::Probe));
                continue;
            }
            let why = if initial_contact {
                "the peer has lost it (INITIAL_CONTACT)"
            } else {
                "of the uniqueness policy"
            };
            let info = Some(Box::new(other.info()));
            let moved = other.remote != remote;
            self.env.log(
                LogGroup::Ike,
                0,
                format!("IKE_SA [{id}] with {peer} is deleted because {why}"),
            );
            self.event(Event::Alert {
                kind: "unique-replace",
                sa: info,
            });
            if initial_contact || moved {
                let replaced = Counter::Failure(FailureReason::Replaced);
                self.env.count(Some(conn.name.clone()), replaced);
            }
            self.with(id, |sa, env| {
                sa.replaced = true;
                match (initial_contact, moved) {
                    (true, false) => {
                        let text = "replaced by a new IKE_SA of the peer".to_owned();
                        sa.end(env, FailureReason::Replaced, text);
                    }
                    // It need not be the same host.
                    (true, true) => sa.dispossess(env, now, remote),
                    (false, true) => {
                        sa.dispossessed_by = Some(remote);
                        sa.delete_at_once(env, now, Duration::from_secs(15));
                    }
                    // The peer is likely to reauthenticate, and deletes it itself.
                    (false, false) => sa.delay(now, REAUTHENTICATION, Task::DeleteIke),
                }
            });
        }
    }

    /// Sets up an IKE SA that takes over from `old`.
    fn reauthenticate(&mut self, now: Now, old: IkeSaId) {
        let Some(sa) = self.sas.get(&old) else {
            return;
        };
        let Some(conn) = sa.conn.clone() else {
            return;
        };
        // The peer has to reauthenticate if it is the one that can be reached only by its will.
        if !sa.initiator && conn.remote_addrs.iter().all(|host| !is_reachable(host)) {
            self.env.log(
                LogGroup::Ike,
                1,
                format!("IKE_SA [{old}] is left to its initiator to reauthenticate"),
            );
            return;
        }
        let identities = sa.identities();
        let younger = self.env.rivals.others(&identities, old);
        let younger = younger
            .filter_map(|(id, _)| self.sas.get(&id))
            .find(|other| {
                other.is_established()
                    && other.connection_name() == sa.connection_name()
                    && other.remote.ip() == sa.remote.ip()
                    && other.established > sa.established
            });
        if let Some(younger) = younger {
            let line = format!(
                "IKE_SA [{old}] is not reauthenticated: [{}] has come after it",
                younger.id
            );
            self.env.log(LogGroup::Ike, 1, line);
            return;
        }
        let conn = self
            .env
            .connections
            .get(&conn.name)
            .cloned()
            .unwrap_or(conn);
        let names: BTreeSet<String> = sa
            .children
            .values()
            .filter(|child| child.is_live())
            .map(|child| child.cfg().name.clone())
            .collect();
        let children: Vec<usize> = conn
            .children
            .iter()
            .enumerate()
            .filter(|(_, child)| names.contains(&child.name))
            .map(|(index, _)| index)
            .collect();
        if children.is_empty() && conn.childless == Childless::Never {
            self.env.log(
                LogGroup::Ike,
                1,
                format!("IKE_SA [{old}] has no child to reauthenticate for"),
            );
            return;
        }
        self.env.log(
            LogGroup::Ike,
            0,
            format!("reauthenticating IKE_SA {}[{old}]", conn.name),
        );
        if self.env.settings.make_before_break {
            let tasks = super::command::tasks(&conn, children);
            self.initiate(now, &conn, tasks, Some(old), None);
            return;
        }
        self.with(old, |sa, env| {
            sa.reborn = children.into_iter().map(|i| (conn.clone(), i)).collect();
            sa.delete_at_once(env, now, Duration::from_secs(15));
        });
    }

    /// An IKE SA is gone: what was to take over from it, or from which it was to, goes on.
    pub(super) fn taken_over(&mut self, now: Now, sa: &IkeSa) {
        // Whoever sent us elsewhere keeps us until we get there.
        if let Some(old) = sa.supersedes.filter(|_| sa.redirection.to.is_none()) {
            self.with(old, |sa, env| sa.retry_reauth(env, now));
        }
        let Some(conn) = &sa.conn else {
            return;
        };
        for id in self.of_connection(&conn.name) {
            self.with(id, |other, _| {
                if other.supersedes == Some(sa.id) {
                    other.supersedes = sa.successor;
                }
            });
        }
        // The definition may be another one by now, or gone.
        let current = self.env.connections.get(&conn.name).cloned();
        let Some(current) = current.filter(|_| !sa.reborn.is_empty() && !self.stopping) else {
            return;
        };
        let named = |name: &str| current.children.iter().position(|c| c.name == name);
        let children: Vec<usize> = sa
            .reborn
            .iter()
            .filter_map(|(conn, index)| named(&conn.children.get(*index)?.name))
            .collect();
        if children.is_empty() {
            return;
        }
        let tasks = super::command::tasks(&current, children);
        let id = self.initiate(now, &current, tasks, None, sa.target);
        self.with(id, |new, _| {
            new.restores = true;
            new.if_id = sa.if_id;
            new.former_vips.clone_from(&sa.vips);
        });
    }
}

fn is_reachable(host: &swanherd_config::model::HostSpec) -> bool {
    use swanherd_config::model::HostSpec;
    matches!(host, HostSpec::Addr(_) | HostSpec::Name(_))
}
