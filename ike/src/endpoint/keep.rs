// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeping children up: new attempts with back-off, traps, traffic that asks for a child.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use swanherd_config::model::{Child, ChildMode, HostSpec};
use swanherd_ipsec::plane::{Op, PolicyAction, PolicySet};

use super::Endpoint;
use super::command::Started;
use crate::api::{Action, ConnectionRef, LogGroup, Now, Token};
use crate::sa::{narrow, policies::Group, unique};

/// The first wait between attempts; it doubles with each.
const FIRST_BACKOFF: Duration = Duration::from_secs(5);
/// The longest wait between attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// Children that are to be brought up again.
#[derive(Debug, Default)]
pub(super) struct Keep {
    /// By connection and child.
    attempts: BTreeMap<String, BTreeMap<String, Attempt>>,
    /// When they are due.
    due: BTreeSet<(Instant, String, String)>,
    /// Consecutive failures by connection, for the choice of the next address.
    turns: BTreeMap<String, u32>,
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    at: Option<Instant>,
    failures: u32,
}

impl Keep {
    /// When the next attempt is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _, _)| *at)
    }

    /// Which address of a connection is next.
    pub(super) fn attempt(&self, connection: &str) -> u32 {
        self.turns.get(connection).copied().unwrap_or(0)
    }

    /// No attempt is to be made any more.
    pub(super) fn clear(&mut self) {
        self.attempts.clear();
        self.due.clear();
    }

    /// As [`Self::clear`], for one connection, or one child of it.
    pub(super) fn forget(&mut self, connection: &str, child: Option<&str>) {
        match child {
            Some(child) => self.succeeded(connection, child),
            None => {
                for (child, attempt) in self.attempts.remove(connection).unwrap_or_default() {
                    if let Some(at) = attempt.at {
                        self.due.remove(&(at, connection.to_owned(), child));
                    }
                }
            }
        }
    }

    /// A child is up.
    pub(super) fn succeeded(&mut self, connection: &str, child: &str) {
        let Some(children) = self.attempts.get_mut(connection) else {
            return;
        };
        if let Some(Attempt { at: Some(at), .. }) = children.remove(child) {
            self.due
                .remove(&(at, connection.to_owned(), child.to_owned()));
        }
        if children.is_empty() {
            self.attempts.remove(connection);
        }
    }

    /// An IKE SA of a connection could not be set up.
    pub(super) fn turn(&mut self, connection: &str) {
        let turn = self.turns.entry(connection.to_owned()).or_default();
        *turn = turn.wrapping_add(1);
    }

    fn failures(&self, connection: &str, child: &str) -> u32 {
        self.attempts
            .get(connection)
            .and_then(|children| children.get(child))
            .map_or(0, |attempt| attempt.failures)
    }

    fn plan(&mut self, connection: &str, child: &str, at: Instant, failures: u32) {
        self.succeeded(connection, child);
        let at_key = (at, connection.to_owned(), child.to_owned());
        self.due.insert(at_key);
        let attempt = Attempt {
            at: Some(at),
            failures,
        };
        self.attempts
            .entry(connection.to_owned())
            .or_default()
            .insert(child.to_owned(), attempt);
    }

    /// The next attempt that is due; it stays on record until it succeeds or is forgotten.
    fn take_due(&mut self, now: Instant) -> Option<(String, String)> {
        let first = self.due.first().filter(|(at, _, _)| *at <= now)?.clone();
        self.due.remove(&first);
        let (_, connection, child) = first;
        if let Some(attempt) = self
            .attempts
            .get_mut(&connection)
            .and_then(|children| children.get_mut(&child))
        {
            attempt.at = None;
        }
        Some((connection, child))
    }
}

/// A trap whose addresses are still being found.
#[derive(Clone, Debug)]
pub(super) struct TrapJob {
    conn: ConnectionRef,
    index: usize,
    remote: Option<IpAddr>,
}

/// Whether a child is negotiated at all, rather than a shunt.
pub(super) fn is_negotiated(child: &Child) -> bool {
    !matches!(child.mode, ChildMode::Pass | ChildMode::Drop)
}

impl Endpoint {
    /// Plans another attempt to bring up a child.
    pub(super) fn plan_restart(
        &mut self,
        now: Now,
        connection: &str,
        child: &str,
        after: Duration,
        failed: bool,
    ) {
        if self.stopping {
            return;
        }
        let Some(conn) = self.env.connections.get(connection).cloned() else {
            return;
        };
        if !conn
            .children
            .iter()
            .any(|c| c.name == child && is_negotiated(c))
        {
            return;
        }
        let failures = self.keep.failures(connection, child) + u32::from(failed);
        if failed && conn.keyingtries != 0 && failures >= conn.keyingtries {
            self.keep.forget(connection, Some(child));
            self.env.log(
                LogGroup::Ike,
                0,
                format!(
                    "giving up on {connection}/{child} after {failures} attempts (keyingtries)"
                ),
            );
            return;
        }
        let backoff = if failures == 0 {
            Duration::ZERO
        } else {
            FIRST_BACKOFF
                .saturating_mul(1 << (failures - 1).min(10))
                .min(MAX_BACKOFF)
        };
        let millis = u64::try_from(backoff.as_millis()).unwrap_or(u64::MAX);
        let jitter = Duration::from_millis(self.env.rng.below(millis / 5 + 1));
        let wait = after + backoff + jitter;
        if failures > 0 {
            self.env.log(
                LogGroup::Ike,
                1,
                format!(
                    "next attempt to establish {connection}/{child} in {} s",
                    wait.as_secs()
                ),
            );
        }
        self.keep
            .plan(connection, child, now.instant + wait, failures);
    }

    /// Makes the attempts that are due.
    pub(super) fn serve_keep(&mut self, now: Now) {
        while let Some((connection, child)) = self.keep.take_due(now.instant) {
            self.bring_up(now, &connection, &child);
        }
    }

    /// Brings up a child unless it is up or on its way.
    pub(super) fn bring_up(&mut self, now: Now, connection: &str, child: &str) {
        let Some(conn) = self.env.connections.get(connection).cloned() else {
            return;
        };
        // Even where IKE SAs are not shared, one child is enough.
        let there = self.of_connection(connection).into_iter().any(|id| {
            self.sas.get(&id).is_some_and(|sa| {
                !sa.dead && (super::has_child(sa, child) || super::is_making_child(sa, child))
            })
        });
        if there && !self.env.settings.reuse_ikesa {
            return;
        }
        match self.start(now, &conn, Some(child)) {
            Started::On(_) => {}
            Started::Already | Started::Refused => self.keep.succeeded(connection, child),
        }
    }

    /// Installs the trap of a child, once its addresses are known.
    pub(super) fn install_trap(&mut self, conn: &ConnectionRef, index: usize) {
        let Some(child) = conn.children.get(index) else {
            return;
        };
        if self.env.policies.trap_of(&conn.name, &child.name).is_some() {
            return;
        }
        let remote = conn.remote_addrs.iter().find_map(|host| match host {
            HostSpec::Addr(addr) => Some(Ok(*addr)),
            HostSpec::Name(name) => Some(Err(name.clone())),
            _ => None,
        });
        let job = TrapJob {
            conn: conn.clone(),
            index,
            remote: None,
        };
        match remote {
            _ if !is_negotiated(child) => self.install_shunt(conn, index),
            Some(Ok(addr)) => self.trap_resolved(job, &[addr]),
            Some(Err(name)) => {
                let token = self.env.new_token();
                self.env.actions.push_back(Action::Resolve(token, name));
                self.await_trap(token, job);
            }
            None => self.env.log(
                LogGroup::Cfg,
                0,
                format!(
                    "trap for {}/{} is not installed: the peer's address is unknown",
                    conn.name, child.name
                ),
            ),
        }
    }

    fn await_trap(&mut self, token: Token, job: TrapJob) {
        self.traps.insert(token, job);
    }

    pub(super) fn trap_resolved(&mut self, mut job: TrapJob, addrs: &[IpAddr]) {
        let Some(&remote) = addrs.first() else {
            self.env.log(
                LogGroup::Cfg,
                0,
                format!(
                    "trap for {} is not installed: the peer's name has no address",
                    job.conn.name
                ),
            );
            return;
        };
        job.remote = Some(remote);
        let own = job.conn.local_addrs.iter().find_map(|host| match host {
            HostSpec::Addr(own) if own.is_ipv4() == remote.is_ipv4() => Some(*own),
            _ => None,
        });
        match own {
            Some(own) => self.trap_sourced(job, Some(own)),
            None => {
                let token = self.env.new_token();
                self.env.actions.push_back(Action::Source(token, remote));
                self.await_trap(token, job);
            }
        }
    }

    pub(super) fn trap_sourced(&mut self, job: TrapJob, source: Option<IpAddr>) {
        let current = super::connections::is_current(&self.env.connections, &job.conn);
        let (Some(child), Some(remote), true) =
            (job.conn.children.get(job.index), job.remote, current)
        else {
            return;
        };
        let local = match (source, remote) {
            (Some(source), _) => source,
            (None, IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (None, IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let mode = match child.mode {
            ChildMode::Ipsec(mode) => mode,
            ChildMode::TransportProxy => swanherd_ipsec::plane::Mode::Transport,
            ChildMode::Pass | ChildMode::Drop => return,
        };
        let group = self
            .env
            .policies
            .trap(&job.conn.name, &child.name, child.reqid);
        let group = match group {
            Ok(group) => group,
            Err(taken) => {
                let text = format!(
                    "trap for {}/{} is not installed: {taken}",
                    job.conn.name, child.name
                );
                self.env.log(LogGroup::Cfg, 0, text);
                return;
            }
        };
        let action = PolicyAction::Protect {
            mode,
            local,
            remote,
            reqid: group.reqid,
            spi: 0,
        };
        let (conn, index) = (job.conn.clone(), job.index);
        self.install_set(&conn, index, group, action, local, remote);
    }

    /// A child with mode `pass` or `drop` is nothing but policies.
    fn install_shunt(&mut self, conn: &ConnectionRef, index: usize) {
        let Some(child) = conn.children.get(index) else {
            return;
        };
        let action = match child.mode {
            ChildMode::Pass => PolicyAction::Bypass,
            ChildMode::Drop => PolicyAction::Discard,
            _ => return,
        };
        let group = self.env.policies.shunt(&conn.name, &child.name);
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        self.install_set(conn, index, group, action, any, any);
    }

    fn install_set(
        &mut self,
        conn: &ConnectionRef,
        index: usize,
        group: Group,
        action: PolicyAction,
        local: IpAddr,
        remote: IpAddr,
    ) {
        let Some(child) = conn.children.get(index) else {
            return;
        };
        let inherited = unique::connection_if_id(&mut self.env, conn);
        let tags = unique::tags(&mut self.env, child, inherited, group.set);
        let (if_id_in, if_id_out) = tags.if_id;
        let trap = matches!(action, PolicyAction::Protect { .. });
        let set = PolicySet {
            id: group.set,
            owner: format!("{}/{}", conn.name, child.name),
            local: narrow::resolve(&child.local_ts, local),
            remote: narrow::resolve(&child.remote_ts, remote),
            action,
            priority: (child.priority != 0).then_some(child.priority),
            mark_in: tags.mark_in,
            mark_out: tags.mark_out,
            if_id_in,
            if_id_out,
            routes: if_id_out == 0 && trap,
            trap,
            fwd_out: child.policies_fwd_out,
            offload: child.hw_offload,
        };
        let line = format!(
            "{} policies for {}/{}: {} === {}",
            if trap { "trap" } else { "shunt" },
            conn.name,
            child.name,
            narrow::describe(&set.local),
            narrow::describe(&set.remote)
        );
        self.env.log(LogGroup::Cfg, 1, line);
        self.env.plane_forget(Op::InstallPolicies(Box::new(set)));
    }

    /// Removes the trap of a child.
    pub(super) fn remove_trap(&mut self, connection: &str, child: &str) {
        if let Some(op) = self.env.policies.untrap(connection, child) {
            self.env.plane_forget(op);
        }
    }

    /// Removes all traps.
    pub(super) fn remove_traps(&mut self) {
        self.traps.clear();
        for op in self.env.policies.untrap_all() {
            self.env.plane_forget(op);
        }
    }
}
