// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands of operators: given to the endpoint, and waited for.

use std::collections::BTreeSet;

use swanherd_ike::api::{Command, CommandId, IkeSaId, Input, LogLine};
use swanherd_kernel::DataPlane;
use tokio::sync::{mpsc, oneshot};

use super::{Engine, Sender, now};
use crate::control::CommandReply;

/// A request that waits for one or more endpoint commands (`terminate` of several matches).
pub(super) struct Waiting {
    pub(super) reply: oneshot::Sender<CommandReply>,
    pub(super) log: Option<mpsc::Sender<LogLine>>,
    /// IKE SAs and connection whose log lines belong to it.
    pub(super) ike_sas: BTreeSet<IkeSaId>,
    pub(super) connection: Option<String>,
    pub(super) matches: u32,
    pub(super) open: BTreeSet<CommandId>,
    pub(super) done: u32,
    pub(super) failure: Option<String>,
    /// Log lines that did not fit into `log`.
    pub(super) lost_lines: u32,
}

impl<P: DataPlane + 'static, S: Sender> Engine<P, S> {
    pub(super) fn handle_command(
        &mut self,
        command: Command,
        log: Option<mpsc::Sender<LogLine>>,
        reply: oneshot::Sender<CommandReply>,
    ) {
        if self.is_behind() {
            self.publish();
        }
        let snapshot = self.control.snapshot();
        let mut attempts = 0_u32;
        let (commands, connection, matches) = match command {
            Command::Abandon { selector } => {
                let matches = snapshot.attempts(&selector);
                attempts = u32::try_from(matches).unwrap_or(u32::MAX);
                (vec![Command::Abandon { selector }], None, Vec::new())
            }
            Command::Install {
                ref connection,
                ref child,
            }
            | Command::Uninstall {
                ref connection,
                ref child,
            } => {
                let name = connection
                    .clone()
                    .or_else(|| self.connection_of(Some(child)));
                (vec![command], name, Vec::new())
            }
            Command::Initiate {
                connection,
                child,
                respect_limits,
            } => {
                let name = connection
                    .clone()
                    .or_else(|| self.connection_of(child.as_deref()));
                (
                    vec![Command::Initiate {
                        connection,
                        child,
                        respect_limits,
                    }],
                    name,
                    Vec::new(),
                )
            }
            Command::Terminate { selector, force } => {
                let matches = snapshot.matches(&selector);
                let mut each: Vec<Command> = matches
                    .iter()
                    .map(|found| Command::Terminate {
                        selector: found.selector(),
                        force,
                    })
                    .collect();
                // First of all, lest the end of one attempt be the beginning of another.
                let planned = snapshot.attempts(&selector);
                if planned > 0 {
                    attempts = u32::try_from(planned).unwrap_or(u32::MAX);
                    each.insert(0, Command::Abandon { selector });
                }
                (each, None, matches)
            }
            Command::Rekey { selector, reauth } => {
                let matches = snapshot.matches(&selector);
                let each = matches
                    .iter()
                    .map(|found| Command::Rekey {
                        selector: found.selector(),
                        reauth,
                    })
                    .collect();
                (each, None, matches)
            }
        };
        let first = self.next_command;
        self.next_command += commands.len() as u64;
        self.waiting.push(Waiting {
            reply,
            log,
            ike_sas: matches.iter().map(|found| found.ike).collect(),
            connection,
            matches: u32::try_from(matches.len())
                .unwrap_or(u32::MAX)
                .saturating_add(attempts),
            open: (first..self.next_command).collect(),
            done: 0,
            failure: None,
            lost_lines: 0,
        });
        for (id, command) in (first..).zip(commands) {
            self.endpoint.handle(now(), Input::Command(id, command));
        }
        self.finish_commands();
        // Those who gave up while the command was on its way have rung already.
        self.drop_abandoned();
    }

    fn connection_of(&self, child: Option<&str>) -> Option<String> {
        let child = child?;
        self.connections
            .values()
            .find(|connection| connection.children.iter().any(|found| found.name == child))
            .map(|connection| connection.name.clone())
    }

    pub(super) fn finish_commands(&mut self) {
        let (done, open): (Vec<_>, Vec<_>) = self
            .waiting
            .drain(..)
            .partition(|waiting| waiting.open.is_empty());
        self.waiting = open;
        for waiting in done {
            let _ = waiting.reply.send(CommandReply {
                result: waiting.failure.map_or(Ok(()), Err),
                matches: waiting.matches,
                terminated: waiting.done,
                lost_lines: waiting.lost_lines,
            });
        }
    }

    /// Cancels what nobody waits for any more.
    pub(super) fn drop_abandoned(&mut self) {
        let (gone, open): (Vec<_>, Vec<_>) = self
            .waiting
            .drain(..)
            .partition(|waiting| waiting.reply.is_closed());
        self.waiting = open;
        for id in gone.into_iter().flat_map(|waiting| waiting.open) {
            self.endpoint.handle(now(), Input::Cancel(id));
        }
    }
}
