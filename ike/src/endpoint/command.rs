// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What operators ask for, and who waits for what. Error texts are those of VICI.

use std::net::IpAddr;
use std::time::Duration;

use super::{Endpoint, has_child, is_making_child};
use crate::api::{
    ChildSaId, Command, CommandId, ConnectionRef, Event, FailureReason, IkeSaId, IkeState,
    LogGroup, Now, Selector,
};
use crate::sa::{IkeSa, Redirection, Task};

/// A command that has not ended.
#[derive(Clone, Debug)]
pub(super) enum Waiter {
    /// For an IKE SA, or a child of it.
    Up {
        ike: IkeSaId,
        connection: String,
        child: Option<String>,
    },
    /// For an IKE SA, or a child of it, to be gone.
    Down {
        ike: IkeSaId,
        child: Option<ChildSaId>,
    },
    /// For a trap or shunt to be installed.
    Trap {
        connection: String,
        child: String,
        /// It goes again if it cannot be installed.
        made: bool,
    },
}

impl Endpoint {
    /// Carries out a command. It ends, now or later, in [`Event::CommandDone`] with this id.
    pub fn command(&mut self, now: Now, id: CommandId, command: Command) {
        let result = match command {
            Command::Initiate {
                connection,
                child,
                respect_limits,
            } => self.initiate_command(now, id, connection, child, respect_limits),
            Command::Terminate { selector, force } => {
                self.terminate_command(now, id, &selector, force)
            }
            Command::Abandon { selector } => {
                self.abandon(now, &selector);
                self.done_when_settled(id, Ok(()));
                Ok(Progress::Waiting)
            }
            Command::Install { connection, child } => {
                self.install_command(now, id, connection.as_deref(), child)
            }
            Command::Uninstall { connection, child } => {
                match self.uninstall_command(connection.as_deref(), &child) {
                    Ok(()) => {
                        self.done_when_settled(id, Ok(()));
                        Ok(Progress::Waiting)
                    }
                    Err(text) => Err(text),
                }
            }
            Command::Rekey { selector, reauth } => self
                .rekey_command(now, &selector, reauth)
                .map(|()| Progress::Done),
        };
        match result {
            Ok(Progress::Done) => self.done(id, Ok(())),
            Ok(Progress::Waiting) => {}
            Err(text) => self.done(id, Err(text)),
        }
        self.settle(now);
    }

    /// Nobody waits for a command any more. What it set off goes on.
    pub fn cancel(&mut self, id: CommandId) {
        self.waiters.remove(&id);
    }

    fn done(&mut self, id: CommandId, result: Result<(), String>) {
        self.waiters.remove(&id);
        self.event(Event::CommandDone { id, result });
    }

    /// As [`Self::done`], once the data plane has carried out what it was told by now.
    fn done_when_settled(&mut self, id: CommandId, result: Result<(), String>) {
        self.waiters.remove(&id);
        self.settling.push_back((self.env.issued, id, result));
        self.finish_settled();
    }

    /// Ends the commands whose last operation of the data plane has been answered.
    pub(super) fn finish_settled(&mut self) {
        while let Some((token, _, _)) = self.settling.front() {
            if *token > self.answered {
                return;
            }
            if let Some((_, id, result)) = self.settling.pop_front() {
                self.done(id, result);
            }
        }
    }

    fn initiate_command(
        &mut self,
        now: Now,
        id: CommandId,
        connection: Option<String>,
        child: Option<String>,
        respect_limits: bool,
    ) -> Result<Progress, String> {
        let conn = self.find_config(connection.as_deref(), child.as_deref())?;
        let limit = self.env.settings.init_limit_half_open as usize;
        if respect_limits && limit != 0 && self.env.half_open.total() >= limit {
            let name = child.as_deref().unwrap_or(&conn.name);
            let kind = if child.is_some() {
                "CHILD_SA"
            } else {
                "IKE_SA"
            };
            return Err(format!(
                "establishing {kind} '{name}' not possible at the moment due to limits"
            ));
        }
        if let Some(name) = &child
            && conn
                .children
                .iter()
                .any(|c| c.name == *name && !super::traps::is_negotiated(c))
        {
            return Err(failed_text(Some(name), &conn.name));
        }
        // This is the next attempt for that child, and says nothing about others.
        if let Some(child) = &child {
            self.keep.forget(&conn.name, Some(child));
        }
        let ike = match self.start(now, &conn, child.as_deref()) {
            Started::On(ike) => ike,
            Started::Already => {
                if let Some(name) = &child {
                    self.env.log(
                        LogGroup::Ike,
                        1,
                        format!("not establishing CHILD_SA {name} due to existing duplicate"),
                    );
                    return Err(failed_text(Some(name), &conn.name));
                }
                return Ok(Progress::Done);
            }
            Started::Refused => return Err(failed_text(child.as_deref(), &conn.name)),
        };
        self.waiters.insert(
            id,
            Waiter::Up {
                ike,
                connection: conn.name.clone(),
                child,
            },
        );
        Ok(Progress::Waiting)
    }

    fn install_command(
        &mut self,
        now: Now,
        id: CommandId,
        connection: Option<&str>,
        child: String,
    ) -> Result<Progress, String> {
        let conn = self.find_config(connection, Some(&child))?;
        let index = conn.children.iter().position(|c| c.name == child);
        let Some(index) = index else {
            return Err("configuration name not found".to_owned());
        };
        let made = self.install_trap(now, &conn, index);
        let connection = conn.name.clone();
        self.waiters.insert(
            id,
            Waiter::Trap {
                connection,
                child,
                made,
            },
        );
        Ok(Progress::Waiting)
    }

    /// Ends the commands that wait for traps of which is known now how they fared.
    pub(super) fn check_traps(&mut self) {
        let ended: Vec<_> = self
            .waiters
            .iter()
            .filter_map(|(id, waiter)| match waiter {
                Waiter::Trap {
                    connection,
                    child,
                    made,
                } => {
                    let outcome = self.trap_outcome(connection, child)?;
                    Some((*id, connection.clone(), child.clone(), *made, outcome))
                }
                Waiter::Up { .. } | Waiter::Down { .. } => None,
            })
            .collect();
        for (id, connection, child, made, outcome) in ended {
            let result = outcome.map_err(|why| {
                if made {
                    self.remove_trap(&connection, &child);
                }
                format!("installing policy '{child}' failed: {why}")
            });
            self.done(id, result);
        }
    }

    fn uninstall_command(&mut self, connection: Option<&str>, child: &str) -> Result<(), String> {
        let names: Vec<String> = match connection {
            Some(name) => vec![name.to_owned()],
            None => self
                .env
                .connections
                .iter()
                .map(|c| c.name.clone())
                .collect(),
        };
        if names.iter().any(|name| self.remove_trap(name, child)) {
            Ok(())
        } else {
            Err(format!("policy '{child}' not found"))
        }
    }

    fn find_config(
        &self,
        connection: Option<&str>,
        child: Option<&str>,
    ) -> Result<ConnectionRef, String> {
        let connections = &self.env.connections;
        match (connection, child) {
            (None, None) => Err("missing configuration name".to_owned()),
            (Some(name), None) => connections
                .get(name)
                .cloned()
                .ok_or_else(|| format!("IKE_SA config '{name}' not found")),
            (connection, Some(child)) => match connection {
                Some(name) => connections
                    .get(name)
                    .filter(|conn| conn.children.iter().any(|c| c.name == child)),
                None => connections.with_child(child),
            }
            .cloned()
            .ok_or_else(|| format!("CHILD_SA config '{child}' not found")),
        }
    }

    /// Sets off what brings up a child, or an IKE SA. Everybody who wants the same child shares
    /// one attempt.
    pub(super) fn start(&mut self, now: Now, conn: &ConnectionRef, child: Option<&str>) -> Started {
        if self.stopping {
            return Started::Refused;
        }
        let index = match child {
            Some(name) => match conn.children.iter().position(|c| c.name == name) {
                Some(index) => Some(index),
                None => return Started::Refused,
            },
            None => None,
        };
        if let Some(ike) = self.usable_sa(&conn.name, None) {
            let Some(sa) = self.sas.get(&ike) else {
                return Started::Refused;
            };
            let Some((name, index)) = child.zip(index) else {
                return if sa.is_established() {
                    Started::Already
                } else {
                    Started::On(ike)
                };
            };
            if has_child(sa, name) {
                return Started::Already;
            }
            if !is_making_child(sa, name) {
                let conn = conn.clone();
                self.with(ike, |sa, env| {
                    let task = Task::CreateChild {
                        conn,
                        index,
                        packet: None,
                    };
                    sa.queue_task(env, now, task);
                });
            }
            return Started::On(ike);
        }
        let tasks = tasks(conn, index);
        Started::On(self.initiate(now, conn, tasks, None, None))
    }

    /// Makes a new IKE SA and starts to set it up, with `peer` if the connection leaves that open.
    pub(super) fn initiate(
        &mut self,
        now: Now,
        conn: &ConnectionRef,
        tasks: Vec<Task>,
        supersedes: Option<IkeSaId>,
        peer: Option<IpAddr>,
    ) -> IkeSaId {
        self.initiate_to(now, conn, tasks, supersedes, peer, Redirection::default())
    }

    /// As [`Self::initiate`], perhaps with another gateway than the configured one.
    pub(super) fn initiate_to(
        &mut self,
        now: Now,
        conn: &ConnectionRef,
        tasks: Vec<Task>,
        supersedes: Option<IkeSaId>,
        peer: Option<IpAddr>,
        redirection: Redirection,
    ) -> IkeSaId {
        let id = self.env.new_ike_id();
        let unspecified = std::net::SocketAddr::from(([0, 0, 0, 0], conn.local_port));
        let nowhere = std::net::SocketAddr::from(([0, 0, 0, 0], conn.remote_port));
        let mut sa = Box::new(IkeSa::new(id, true, unspecified, nowhere, now));
        sa.supersedes = supersedes;
        sa.restores = supersedes.is_some();
        sa.attempt = self.keep.attempt(&conn.name);
        sa.target = peer;
        if let Some(old) = supersedes.and_then(|old| self.sas.get(&old)) {
            sa.if_id = old.if_id;
            sa.former_vips.clone_from(&old.vips);
            sa.target = sa.target.or(old.target);
        }
        sa.redirection = redirection;
        sa.initiate(&mut self.env, now, conn, tasks);
        self.adopt(sa);
        id
    }

    fn terminate_command(
        &mut self,
        now: Now,
        id: CommandId,
        selector: &Selector,
        force: bool,
    ) -> Result<Progress, String> {
        if *selector == Selector::default() {
            return Err("missing terminate selector".to_owned());
        }
        let abandoned = self.abandon(now, selector);
        let matches = self.matches(selector);
        let Some(&first) = matches.first() else {
            if abandoned {
                self.done_when_settled(id, Ok(()));
                return Ok(Progress::Waiting);
            }
            return Err("no matching SAs to terminate found".to_owned());
        };
        for found in &matches {
            if let Some(name) = self.sas.get(&found.ike).and_then(|sa| sa.connection_name()) {
                let child = found.child.and_then(|id| {
                    let sa = self.sas.get(&found.ike)?;
                    Some(sa.children.get(&id)?.cfg().name.clone())
                });
                self.keep.forget(&name, child.as_deref());
            }
            self.with(found.ike, |sa, env| match found.child {
                // The only one that it is set up for.
                Some(child) if sa.is_connecting() && sa.wanted().count() <= 1 => {
                    sa.take_down(env, now, child);
                    sa.farewell(env, now);
                    sa.end(env, FailureReason::LocalDeleted, "terminated".to_owned());
                }
                Some(child) => sa.take_down(env, now, child),
                None if force || matches!(sa.state, IkeState::Created | IkeState::Connecting) => {
                    sa.farewell(env, now);
                    sa.end(env, FailureReason::LocalDeleted, "terminated".to_owned());
                }
                None => {
                    sa.bound_delete(now, Duration::from_secs(15));
                    sa.queue_task(env, now, Task::DeleteIke);
                }
            });
        }
        // One command usually names one SA; if it names several, the first stands for all.
        self.waiters.insert(
            id,
            Waiter::Down {
                ike: first.ike,
                child: first.child,
            },
        );
        Ok(Progress::Waiting)
    }

    fn rekey_command(&mut self, now: Now, selector: &Selector, reauth: bool) -> Result<(), String> {
        if *selector == Selector::default() {
            return Err("missing rekey selector".to_owned());
        }
        let matches: Vec<_> = self
            .matches(selector)
            .into_iter()
            .filter(|found| {
                self.sas
                    .get(&found.ike)
                    .is_some_and(|sa| sa.is_established())
            })
            .collect();
        if matches.is_empty() {
            return Err("no matching SAs to rekey found".to_owned());
        }
        for found in matches {
            self.with(found.ike, |sa, env| match found.child {
                Some(child) => sa.rekey_child(env, now, child),
                None if reauth => sa.queue_task(env, now, Task::ReauthIke),
                None => sa.queue_task(env, now, Task::RekeyIke),
            });
        }
        Ok(())
    }

    /// A child, or an IKE SA, is up.
    pub(super) fn is_up(&mut self, ike: IkeSaId, connection: &str, child: Option<&str>) {
        let done: Vec<CommandId> = self
            .waiters
            .iter()
            .filter(|(_, waiter)| match waiter {
                Waiter::Up {
                    ike: wanted_ike,
                    connection: wanted,
                    child: wanted_child,
                } => match (wanted_child, child) {
                    (Some(wanted_child), Some(child)) => {
                        wanted == connection && wanted_child == child
                    }
                    (None, None) => *wanted_ike == ike,
                    _ => false,
                },
                Waiter::Down { .. } | Waiter::Trap { .. } => false,
            })
            .map(|(id, _)| *id)
            .collect();
        for id in done {
            self.done(id, Ok(()));
        }
    }

    /// A child cannot be brought up.
    pub(super) fn is_failed(&mut self, ike: IkeSaId, child: &str, why: Option<&str>) {
        let failed: Vec<(CommandId, String)> = self
            .waiters
            .iter()
            .filter_map(|(id, waiter)| match waiter {
                Waiter::Up {
                    ike: wanted_ike,
                    connection,
                    child: Some(wanted),
                } if *wanted_ike == ike && wanted == child => {
                    let text = failed_text(Some(wanted), connection);
                    Some((
                        *id,
                        why.map_or_else(|| text.clone(), |why| format!("{text}: {why}")),
                    ))
                }
                _ => None,
            })
            .collect();
        for (id, text) in failed {
            self.done(id, Err(text));
        }
    }

    /// An IKE SA is gone; whoever waits for something of it learns so.
    pub(super) fn ike_is_gone(&mut self, sa: &IkeSa) {
        let successor = sa.successor;
        let mut ended = Vec::new();
        for (id, waiter) in &mut self.waiters {
            match waiter {
                Waiter::Up {
                    ike,
                    connection,
                    child,
                } if *ike == sa.id => match successor {
                    Some(new) => *ike = new,
                    None => ended.push((*id, Err(failed_text(child.as_deref(), connection)))),
                },
                Waiter::Down { ike, child } if *ike == sa.id => match (successor, &child) {
                    (Some(new), Some(_)) => *ike = new,
                    _ => ended.push((*id, Ok(()))),
                },
                _ => {}
            }
        }
        for (id, result) in ended {
            match result {
                Ok(()) => self.done_when_settled(id, Ok(())),
                Err(text) => self.done(id, Err(text)),
            }
        }
    }

    /// Those who wait for what `old` was to bring up wait for `new`.
    pub(super) fn wait_elsewhere(&mut self, old: IkeSaId, new: IkeSaId) {
        for waiter in self.waiters.values_mut() {
            if let Waiter::Up { ike, .. } = waiter
                && *ike == old
            {
                *ike = new;
            }
        }
    }

    /// Ends the commands that wait for children which are gone.
    pub(super) fn check_down(&mut self) {
        let ended: Vec<CommandId> = self
            .waiters
            .iter()
            .filter(|(_, waiter)| match waiter {
                Waiter::Down {
                    ike,
                    child: Some(child),
                } => self.sas.get(ike).is_none_or(|sa| {
                    sa.children
                        .get(child)
                        .is_none_or(|child| child.remove_at.is_some())
                }),
                Waiter::Down { ike, child: None } => !self.sas.contains_key(ike),
                Waiter::Up { .. } | Waiter::Trap { .. } => false,
            })
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.done_when_settled(id, Ok(()));
        }
    }
}

/// Whether a command has ended with the call that brought it.
enum Progress {
    Done,
    Waiting,
}

/// The tasks that bring up these children.
pub(super) fn tasks(conn: &ConnectionRef, children: impl IntoIterator<Item = usize>) -> Vec<Task> {
    let task = |index| Task::CreateChild {
        conn: conn.clone(),
        index,
        packet: None,
    };
    children.into_iter().map(task).collect()
}

/// What came of an attempt to start something.
pub(super) enum Started {
    /// It is under way on this IKE SA.
    On(IkeSaId),
    /// It is up already.
    Already,
    /// It cannot be.
    Refused,
}

fn failed_text(child: Option<&str>, connection: &str) -> String {
    match child {
        Some(child) => format!("establishing CHILD_SA '{child}' failed"),
        None => format!("establishing IKE_SA '{connection}' failed"),
    }
}
