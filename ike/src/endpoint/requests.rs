// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What IKE SAs want of the endpoint.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Endpoint;
use super::keep::Cause;
use crate::api::{Event, FailureReason, IkeSaId, LogGroup, Now};
use crate::sa::Task;
use crate::sa::env::Request;

impl Endpoint {
    pub(super) fn serve(&mut self, now: Now, request: Request) {
        match request {
            Request::Adopt(sa) => self.adopt(sa),
            Request::Established(id) => {
                let name = self.sas.get(&id).and_then(|sa| sa.connection_name());
                if let Some(name) = name {
                    self.is_up(id, &name, None);
                }
            }
            Request::ChildUp {
                ike,
                connection,
                child,
            } => {
                self.keep.succeeded(&connection, &child);
                self.is_up(ike, &connection, Some(&child));
            }
            Request::ChildFailed {
                ike,
                connection,
                child,
                reason,
                text,
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
                let keep = self.env.connections.get(&connection).is_some_and(|conn| {
                    conn.children
                        .iter()
                        .any(|c| c.name == child && c.start_action.start)
                });
                if keep && reason != FailureReason::LocalDeleted {
                    self.plan_restart(now, &connection, &child, Duration::ZERO, Cause::Failed);
                }
            }
            Request::Restart {
                connection,
                child,
                after,
                cause,
            } => {
                if cause != Cause::Lost {
                    self.keep.turn(&connection);
                }
                self.plan_restart(now, &connection, &child, after, cause);
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
            Request::InUse { ike, child } => {
                self.with(ike, |sa, _| sa.in_use(child));
            }
            Request::Reauthenticate { old } => self.reauthenticate(now, old),
            Request::Redirect { old, gateway } => self.redirect(now, old, gateway),
            Request::FinishReauth { old } => {
                self.with(old, |sa, env| {
                    sa.bound_delete(now, Duration::from_secs(15));
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
        let key = (sa.local_id.clone(), sa.remote_id.clone());
        let peer = sa.peer_text();
        let others: Vec<IkeSaId> = self
            .env
            .by_identities
            .get(&key)
            .into_iter()
            .flatten()
            .copied()
            .filter(|id| *id != keep)
            .collect();
        for id in others {
            let why = if initial_contact {
                "the peer has lost it (INITIAL_CONTACT)"
            } else {
                "of the uniqueness policy"
            };
            self.env.log(
                LogGroup::Ike,
                0,
                format!("IKE_SA [{id}] with {peer} is deleted because {why}"),
            );
            if let Some(sa) = self.sas.get(&id) {
                let sa = Some(Box::new(sa.info()));
                self.event(Event::Alert {
                    kind: "unique-replace",
                    sa,
                });
            }
            self.with(id, |sa, env| {
                if initial_contact {
                    let text = "replaced by a new IKE_SA of the peer".to_owned();
                    sa.end(env, FailureReason::LocalDeleted, text);
                } else {
                    sa.delete_at_once(env, now, Duration::from_secs(15));
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
            sa.delete_at_once(env, now, Duration::from_secs(15));
        });
        for name in names {
            self.plan_restart(now, &conn.name, &name, Duration::from_secs(1), Cause::Lost);
        }
    }
}

fn is_reachable(host: &swanherd_config::model::HostSpec) -> bool {
    use swanherd_config::model::HostSpec;
    matches!(host, HostSpec::Addr(_) | HostSpec::Name(_))
}
