// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traps and shunts: policies that stand on their own, until traffic asks for a CHILD SA.
//!
//! A trap is wanted from the moment at which it is asked for. It is installed as soon as its
//! addresses are known, and follows them when the network changes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use swanherd_config::model::{Child, ChildMode, Connection, HostSpec};
use swanherd_ipsec::plane::{Mode, Op, PolicyAction, PolicySet};

use super::Endpoint;
use crate::api::{
    Action, ConnectionRef, Counter, Event, FailureReason, LogGroup, Now, PlaneAnswer, Token,
};
use crate::sa::narrow::unspecified;
use crate::sa::policies::Group;
use crate::sa::{mode, narrow, unique};

/// How often the addresses of a trap are looked for that could not be found.
const RETRY: Duration = Duration::from_secs(60);

type Name = (String, String);

/// All traps and shunts that are wanted.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Traps {
    wanted: BTreeMap<Name, Trap>,
    /// What is being found out for which.
    jobs: BTreeMap<Token, Name>,
    /// Those whose addresses are not known, and when to look again.
    homeless: BTreeSet<Name>,
    retry_at: Option<Instant>,
}

/// One trap or shunt.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Trap {
    conn: ConnectionRef,
    index: usize,
    /// The peer's address, once found.
    remote: Option<IpAddr>,
    /// What is found out now.
    job: Option<Token>,
    /// What was last handed to the data plane.
    installed: Option<PolicySet>,
    /// The operation that does so, while it is not answered.
    op: Option<Token>,
    /// Why it is not installed.
    problem: Option<String>,
}

impl Trap {
    fn child(&self) -> Option<&Child> {
        self.conn.children.get(self.index)
    }
}

impl Traps {
    /// When to look for addresses again.
    pub(super) fn next(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Whether an answer is for a trap.
    pub(super) fn awaits(&self, token: Token) -> bool {
        self.jobs.contains_key(&token)
    }

    fn claim(&mut self, token: Token) -> Option<Name> {
        let name = self.jobs.remove(&token)?;
        let trap = self.wanted.get_mut(&name)?;
        if trap.job != Some(token) {
            return None;
        }
        trap.job = None;
        Some(name)
    }
}

/// Whether a child is negotiated at all, rather than a shunt.
pub(super) fn is_negotiated(child: &Child) -> bool {
    !matches!(child.mode, ChildMode::Pass | ChildMode::Drop)
}

/// Whether a connection names no peer that could be called; packets do, for traps.
pub(super) fn is_wildcard(conn: &Connection) -> bool {
    !conn
        .remote_addrs
        .iter()
        .any(|host| matches!(host, HostSpec::Addr(_) | HostSpec::Name(_)))
}

impl Endpoint {
    /// Installs the trap or shunt of a child, as soon as its addresses are known.
    /// False if it is wanted already.
    pub(super) fn install_trap(&mut self, now: Now, conn: &ConnectionRef, index: usize) -> bool {
        let Some(child) = conn.children.get(index) else {
            return false;
        };
        let name = (conn.name.clone(), child.name.clone());
        if self.traps.wanted.contains_key(&name) {
            return false;
        }
        let trap = Trap {
            conn: conn.clone(),
            index,
            remote: None,
            job: None,
            installed: None,
            op: None,
            problem: None,
        };
        self.traps.wanted.insert(name.clone(), trap);
        self.place_trap(&name);
        self.arm_traps(now);
        true
    }

    /// How the installation of a trap ended, if it has.
    pub(super) fn trap_outcome(&self, connection: &str, child: &str) -> Option<Result<(), String>> {
        let name = (connection.to_owned(), child.to_owned());
        let Some(trap) = self.traps.wanted.get(&name) else {
            return Some(Err("it was removed".to_owned()));
        };
        if trap.job.is_some() || trap.op.is_some() {
            return None;
        }
        if trap.installed.is_some() {
            return Some(Ok(()));
        }
        trap.problem.clone().map(Err)
    }

    /// The data plane has the policies of a trap or shunt, or not.
    pub(super) fn trap_answer_plane(&mut self, now: Now, token: Token, answer: PlaneAnswer) {
        let Some(name) = self.traps.jobs.remove(&token) else {
            return;
        };
        let Some(trap) = self.traps.wanted.get_mut(&name) else {
            return;
        };
        if trap.op != Some(token) {
            return;
        }
        trap.op = None;
        let Err(error) = answer else {
            trap.problem = None;
            if trap.child().is_some_and(|child| !is_negotiated(child)) {
                self.traps.homeless.remove(&name);
            }
            return;
        };
        trap.installed = None;
        let text = error.to_string();
        let told = trap.problem.as_ref() == Some(&text);
        self.trap_fails(&name, &text);
        if !told {
            let reason = FailureReason::DataPlane;
            self.env
                .count(Some(name.0.clone()), Counter::Failure(reason));
            self.env.event(Event::Failure {
                connection: Some(name.0),
                child: Some(name.1),
                reason,
                text,
            });
        }
        self.arm_traps(now);
    }

    /// Installs a trap or shunt, or finds out what is missing for it.
    fn place_trap(&mut self, name: &Name) {
        let Some(trap) = self.traps.wanted.get(name) else {
            return;
        };
        let Some(child) = trap.child() else {
            return;
        };
        let (conn, index) = (trap.conn.clone(), trap.index);
        let action = match child.mode {
            ChildMode::Pass => Some(PolicyAction::Bypass),
            ChildMode::Drop => Some(PolicyAction::Discard),
            ChildMode::Ipsec(_) | ChildMode::TransportProxy => None,
        };
        if let Some(action) = action {
            let group = self.env.policies.shunt(&name.0, &name.1);
            let any = unspecified(true);
            self.install_set(name, group, action, any, any);
            return;
        }
        let target = conn.remote_addrs.iter().find_map(|host| match host {
            HostSpec::Addr(addr) => Some(Ok(*addr)),
            HostSpec::Name(name) => Some(Err(name.clone())),
            _ => None,
        });
        match target {
            Some(Ok(addr)) => self.trap_resolved(name, &[addr]),
            Some(Err(host)) => {
                let token = self.env.new_token();
                self.env.actions.push_back(Action::Resolve(token, host));
                self.await_trap(token, name);
            }
            None => {
                let mode = conn.children.get(index).map(|child| child.mode);
                if !matches!(
                    mode,
                    Some(ChildMode::Ipsec(Mode::Transport) | ChildMode::TransportProxy)
                ) {
                    self.trap_fails(
                        name,
                        "the peer's address is unknown, without which only transport mode can do",
                    );
                    return;
                }
                let v4 = family(&conn, index);
                if let Some(trap) = self.traps.wanted.get_mut(name) {
                    trap.remote = Some(unspecified(v4));
                }
                let own = own_address(&conn, v4).unwrap_or_else(|| unspecified(v4));
                self.trap_placed(name, Some(own));
            }
        }
    }

    fn await_trap(&mut self, token: Token, name: &Name) {
        if let Some(trap) = self.traps.wanted.get_mut(name) {
            if let Some(old) = trap.job.replace(token) {
                self.traps.jobs.remove(&old);
            }
            self.traps.jobs.insert(token, name.clone());
        }
    }

    /// The peer's name has been resolved.
    pub(super) fn trap_answer_resolved(&mut self, now: Now, token: Token, addrs: &[IpAddr]) {
        if let Some(name) = self.traps.claim(token) {
            let host = self.traps.wanted.get(&name).and_then(|trap| {
                trap.conn.remote_addrs.iter().find_map(|host| match host {
                    HostSpec::Name(name) => Some(name.clone()),
                    _ => None,
                })
            });
            if let Some(host) = host
                && !addrs.is_empty()
            {
                self.env.connections.learn(&host, addrs);
            }
            self.trap_resolved(&name, addrs);
            self.arm_traps(now);
        }
    }

    fn trap_resolved(&mut self, name: &Name, addrs: &[IpAddr]) {
        let Some(trap) = self.traps.wanted.get_mut(name) else {
            return;
        };
        let fitting = addrs.iter().find(|addr| {
            let own = &trap.conn.local_addrs;
            own.is_empty()
                || own.iter().any(|host| match host {
                    HostSpec::Addr(own) => own.is_ipv4() == addr.is_ipv4(),
                    HostSpec::Any(Some(v4)) => *v4 == addr.is_ipv4(),
                    _ => true,
                })
        });
        let Some(&remote) = fitting else {
            self.trap_fails(name, "the peer's name has no usable address");
            return;
        };
        trap.remote = Some(remote);
        match own_address(&trap.conn, remote.is_ipv4()) {
            Some(own) => self.trap_placed(name, Some(own)),
            None => {
                let token = self.env.new_token();
                self.env.actions.push_back(Action::Source(token, remote));
                self.await_trap(token, name);
            }
        }
    }

    /// The own address towards the peer has been found, or not.
    pub(super) fn trap_answer_sourced(&mut self, now: Now, token: Token, source: Option<IpAddr>) {
        if let Some(name) = self.traps.claim(token) {
            self.trap_placed(&name, source);
            self.arm_traps(now);
        }
    }

    fn trap_placed(&mut self, name: &Name, source: Option<IpAddr>) {
        let Some(trap) = self.traps.wanted.get(name) else {
            return;
        };
        let (Some(child), Some(remote)) = (trap.child(), trap.remote) else {
            return;
        };
        let mode = mode::configured(child);
        // Without an own address the trap still keeps traffic from leaving in clear.
        let local = source.unwrap_or_else(|| unspecified(remote.is_ipv4()));
        let group = match self.env.policies.trap(&name.0, &name.1, child.reqid) {
            Ok(group) => group,
            Err(taken) => {
                self.trap_fails(name, &taken.to_string());
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
        if source.is_some() {
            self.traps.homeless.remove(name);
        } else {
            self.traps.homeless.insert(name.clone());
        }
        self.install_set(name, group, action, local, remote);
    }

    fn trap_fails(&mut self, name: &Name, why: &str) {
        let (connection, child) = name;
        if let Some(trap) = self.traps.wanted.get_mut(name) {
            trap.problem = Some(why.to_owned());
        }
        // Once, rather than at each attempt.
        let level = u8::from(!self.traps.homeless.insert(name.clone()));
        self.env.log(
            LogGroup::Cfg,
            level,
            format!("trap for {connection}/{child} is not installed: {why}"),
        );
    }

    fn install_set(
        &mut self,
        name: &Name,
        group: Group,
        action: PolicyAction,
        local: IpAddr,
        remote: IpAddr,
    ) {
        let Some(trap) = self.traps.wanted.get(name) else {
            return;
        };
        let (conn, Some(child)) = (trap.conn.clone(), trap.child().cloned()) else {
            return;
        };
        let inherited = self.trap_if_id(&conn);
        let tags = unique::tags(&mut self.env, &child, inherited, group.set);
        let trap = matches!(action, PolicyAction::Protect { .. });
        // Virtual addresses are not known before there is an IKE SA.
        let own: Vec<IpAddr> = if conn.vips.is_empty() || !trap {
            vec![local]
        } else {
            let families = conn.vips.iter().map(|vip| unspecified(vip.is_ipv4()));
            families.collect()
        };
        let set = PolicySet {
            priority: (child.priority != 0).then_some(child.priority),
            mark_in: tags.mark_in,
            mark_out: tags.mark_out,
            if_id_in: tags.if_id.0,
            if_id_out: tags.if_id.1,
            // A shunt lets traffic take the way that it would have without tunnels.,
            routes: tags.if_id.1 == 0,
            trap,
            fwd_out: child.policies_fwd_out,
            offload: child.hw_offload,
            ..PolicySet::new(
                group.set,
                format!("{}/{}", conn.name, child.name),
                narrow::resolve(&child.local_ts, &own),
                narrow::resolve(&child.remote_ts, &[remote]),
                action,
            )
        };
        let traffic = (set.local.clone(), set.remote.clone());
        self.env.policies.trap_waits_for(&name.0, &name.1, traffic);
        let Some(entry) = self.traps.wanted.get_mut(name) else {
            return;
        };
        if entry.installed.as_ref() == Some(&set) {
            return;
        }
        entry.installed = Some(set.clone());
        let token = self.env.new_token();
        if let Some(old) = entry.op.replace(token) {
            self.traps.jobs.remove(&old);
        }
        self.traps.jobs.insert(token, name.clone());
        let line = format!(
            "{} policies for {}/{}: {} === {}",
            if trap { "trap" } else { "shunt" },
            conn.name,
            child.name,
            narrow::describe(&set.local),
            narrow::describe(&set.remote)
        );
        self.env.log(LogGroup::Cfg, 1, line);
        let op = Op::InstallPolicies(Box::new(set));
        self.env.issue(token, op);
    }

    /// Interface ids of a connection for its traps: what is drawn once stays.
    fn trap_if_id(&mut self, conn: &Connection) -> (u32, u32) {
        if let Some(ids) = self.env.trap_if_ids.get(&conn.name) {
            return *ids;
        }
        let ids = unique::connection_if_id(&mut self.env, conn);
        if unique::draws_if_id(conn) {
            self.env.trap_if_ids.insert(conn.name.clone(), ids);
        }
        ids
    }

    /// Looks for what is not known, and whether what is known still holds.
    pub(super) fn review_traps(&mut self, now: Now) {
        let names: Vec<Name> = self
            .traps
            .wanted
            .iter()
            .filter(|(name, trap)| {
                let own = trap
                    .remote
                    .and_then(|remote| own_address(&trap.conn, remote.is_ipv4()));
                let settled = own.is_some() && trap.installed.is_some();
                let shunt = trap.child().is_some_and(|child| !is_negotiated(child));
                self.traps.homeless.contains(*name) || !(settled || shunt)
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            self.place_trap(&name);
        }
        self.arm_traps(now);
    }

    /// Looks again for addresses that could not be found.
    pub(super) fn serve_traps(&mut self, now: Now) {
        if self.traps.retry_at.is_some_and(|at| at <= now.instant) {
            self.traps.retry_at = None;
            let names: Vec<Name> = self.traps.homeless.iter().cloned().collect();
            for name in names {
                self.place_trap(&name);
            }
            self.arm_traps(now);
        }
    }

    fn arm_traps(&mut self, now: Now) {
        if self.traps.homeless.is_empty() {
            self.traps.retry_at = None;
        } else if self.traps.retry_at.is_none() {
            self.traps.retry_at = Some(now.instant + RETRY);
        }
    }

    /// Removes the trap or shunt of a child. False if there is none.
    pub(super) fn remove_trap(&mut self, connection: &str, child: &str) -> bool {
        let name = (connection.to_owned(), child.to_owned());
        let Some(trap) = self.traps.wanted.remove(&name) else {
            return false;
        };
        for token in [trap.job, trap.op].into_iter().flatten() {
            self.traps.jobs.remove(&token);
        }
        self.traps.homeless.remove(&name);
        let op = self.env.policies.untrap(connection, child);
        if trap.installed.is_some()
            && let Some(op) = op
        {
            self.env.plane_forget(op);
        }
        let others = self.traps.wanted.keys().any(|(conn, _)| conn == connection);
        if !others {
            self.env.trap_if_ids.remove(connection);
        }
        true
    }

    /// Removes all traps and shunts.
    pub(super) fn remove_traps(&mut self) {
        let names: Vec<Name> = self.traps.wanted.keys().cloned().collect();
        for (connection, child) in names {
            self.remove_trap(&connection, &child);
        }
    }
}

/// The address of a family that is configured as this side's.
fn own_address(conn: &Connection, v4: bool) -> Option<IpAddr> {
    conn.local_addrs.iter().find_map(|host| match host {
        HostSpec::Addr(own) if own.is_ipv4() == v4 => Some(*own),
        _ => None,
    })
}

/// Whether a child without a peer's address speaks IPv4.
fn family(conn: &Connection, index: usize) -> bool {
    use swanherd_config::model::SelectorSpec;
    let fixed = conn.children.get(index).and_then(|child| {
        let selectors = child.remote_ts.iter().chain(&child.local_ts);
        selectors.into_iter().find_map(|spec| match spec {
            SelectorSpec::Fixed(ts) => Some(ts.start.is_ipv4()),
            SelectorSpec::Dynamic { .. } => None,
        })
    });
    let hosts = conn.local_addrs.iter().chain(&conn.remote_addrs);
    let named = hosts.into_iter().find_map(|host| match host {
        HostSpec::Addr(addr) | HostSpec::Network(addr, _) | HostSpec::Range(addr, _) => {
            Some(addr.is_ipv4())
        }
        HostSpec::Any(family) => *family,
        HostSpec::Name(_) => None,
    });
    fixed.or(named).unwrap_or(true)
}
