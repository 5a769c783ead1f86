// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loading and unloading connections, and their start actions.

use swanherd_config::model::{Child, Connection};

use super::Endpoint;
use super::traps::is_negotiated;
use crate::api::{ConnectionRef, IkeSaId, LogGroup, Now};
use crate::sa::Task;

impl Endpoint {
    /// Loads a connection, or replaces the one of that name. What is unchanged is left alone: an
    /// identical definition does nothing, and where only children differ, only those are started
    /// or stopped. SAs that are up keep the definition that they were made by.
    pub fn load_connection(&mut self, now: Now, connection: ConnectionRef) {
        let old = self.env.connections.get(&connection.name).cloned();
        if let Some(old) = &old
            && **old == *connection
        {
            return;
        }
        if let Some(old) = &old {
            self.env.policies.unconfigure(old);
        }
        self.env.policies.configure(&connection);
        self.env.connections.insert(connection.clone());
        match &old {
            None => {
                self.env.log(
                    LogGroup::Cfg,
                    1,
                    format!("added connection {}", connection.name),
                );
                for index in 0..connection.children.len() {
                    self.start_action(now, &connection, index);
                }
            }
            Some(old) => {
                self.env.log(
                    LogGroup::Cfg,
                    1,
                    format!("replaced connection {}", connection.name),
                );
                let same_ike = same_but_children(old, &connection);
                let kept = |child: &Child, others: &Connection| {
                    same_ike && others.children.iter().any(|other| other == child)
                };
                for child in &old.children {
                    if !kept(child, &connection) {
                        self.undo_start_action(now, old, child);
                    }
                }
                for (index, child) in connection.children.iter().enumerate() {
                    if !kept(child, old) {
                        self.start_action(now, &connection, index);
                    }
                }
            }
        }
        self.settle(now);
    }

    /// Unloads a connection and undoes its start actions. SAs of children without start action
    /// stay up. False if no connection has that name.
    pub fn unload_connection(&mut self, now: Now, name: &str) -> bool {
        let Some(old) = self.env.connections.remove(name) else {
            return false;
        };
        self.env
            .log(LogGroup::Cfg, 1, format!("removed connection {name}"));
        for child in &old.children {
            self.undo_start_action(now, &old, child);
        }
        self.env.policies.forget(&old);
        // What is still being set up has nothing to be set up for.
        let connecting: Vec<IkeSaId> = self
            .of_connection(name)
            .iter()
            .filter_map(|id| self.sas.get(id))
            .filter(|sa| {
                sa.initiator
                    && !sa.is_established()
                    && sa.children.values().all(|child| child.installed.is_none())
            })
            .map(|sa| sa.id)
            .collect();
        for id in connecting {
            self.with(id, |sa, env| {
                let reason = crate::api::FailureReason::LocalDeleted;
                sa.end(env, reason, "the connection was unloaded".to_owned());
            });
        }
        self.settle(now);
        true
    }

    fn start_action(&mut self, now: Now, conn: &ConnectionRef, index: usize) {
        let Some(child) = conn.children.get(index) else {
            return;
        };
        if child.start_action.trap {
            self.install_trap(now, conn, index);
        }
        if child.start_action.start {
            if is_negotiated(child) {
                self.bring_up(now, &conn.name, &child.name);
            } else {
                self.install_trap(now, conn, index);
            }
        }
    }

    fn undo_start_action(&mut self, now: Now, conn: &Connection, child: &Child) {
        self.remove_trap(&conn.name, &child.name);
        self.keep.forget(&conn.name, Some(&child.name));
        if !child.start_action.start {
            return;
        }
        for id in self.of_connection(&conn.name) {
            self.with(id, |sa, env| {
                let ours = sa.conn.as_ref().is_some_and(|c| c.name == conn.name);
                if !ours {
                    return;
                }
                sa.queue.retain(|task| match task {
                    Task::CreateChild { conn, index, .. } => conn
                        .children
                        .get(*index)
                        .is_none_or(|queued| queued.name != child.name),
                    _ => true,
                });
                let named: Vec<_> = sa
                    .children
                    .values()
                    .filter(|c| c.cfg().name == child.name && c.remove_at.is_none())
                    .map(|c| c.id)
                    .collect();
                if named.is_empty() {
                    return;
                }
                let others = sa.children.len() > named.len() || !sa.queue.is_empty();
                if others || !sa.is_established() {
                    for id in named {
                        sa.take_down(env, now, id);
                    }
                } else {
                    sa.queue_task(env, now, Task::DeleteIke);
                }
            });
        }
    }
}

/// Whether two definitions differ in their children at most.
fn same_but_children(a: &Connection, b: &Connection) -> bool {
    let bare = |conn: &Connection| Connection {
        children: Vec::new(),
        ..conn.clone()
    };
    bare(a) == bare(b)
}
