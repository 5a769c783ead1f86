// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Paths to the peer: which there are when this host's addresses or routes have changed, and which
//! work when the peer does not answer (RFC 4555 sections 3.5 and 3.11).

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use swanherd_config::model::HostSpec;

use super::env::{Env, Request, Slot};
use super::exchange::Path;
use super::mobike::allows_local;
use super::{IkeSa, Task};
use crate::api::{FailureReason, IkeState, LogGroup, Now, Token};

/// The most addresses of a peer that are tried at once.
const MAX_PATHS: usize = 8;

/// Why paths are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Addresses or routes have changed.
    Roam,
    /// The peer does not answer.
    Probe,
    /// The peer does not want its address in use.
    Avoid,
}

/// An open question: which own address leads to each address of the peer.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Search {
    purpose: Purpose,
    left: VecDeque<IpAddr>,
    asked: Option<(Token, IpAddr)>,
    /// Own and peer's address.
    found: Vec<(IpAddr, IpAddr)>,
}

impl IkeSa {
    /// Addresses or routes of this host have changed.
    pub(crate) fn roam(&mut self, env: &mut Env, now: Now) {
        // What is being set up from an address that has gone cannot come to be.
        let gone = !env.hosts.is_empty() && !env.hosts.contains_key(&self.local.ip());
        if !self.dead
            && self.state == IkeState::Connecting
            && self.initiator
            && self.outbound.in_flight.is_some()
            && gone
        {
            let text = format!("this host has lost its address {}", self.local.ip());
            self.fail(env, now, FailureReason::Unreachable, text);
            return;
        }
        // One that is replaced may still have to bring the peer the news of that.
        let moves = matches!(
            self.state,
            IkeState::Established | IkeState::Rekeying | IkeState::Rekeyed
        );
        if !self.dead && moves {
            self.search(env, now, Purpose::Roam);
        }
    }

    /// The request in flight has not been answered for a while: sends it over all other paths as
    /// well. Whichever works will answer. The paths are looked for at the first time.
    pub(super) fn probe_other_paths(&mut self, env: &mut Env, now: Now, first: bool) {
        if !self.is_mobile() || !self.is_established() {
            return;
        }
        if first {
            self.search(env, now, Purpose::Probe);
            return;
        }
        for (local, remote) in self.mobility.probes.clone() {
            let path = self.between(local, remote);
            self.send_in_flight(env, now, path);
        }
    }

    /// The peer does not want to be reached at `remote`: tries its other addresses.
    pub(super) fn avoid(&mut self, env: &mut Env, now: Now, remote: IpAddr) {
        self.mobility.peer.retain(|addr| *addr != remote);
        self.search(env, now, Purpose::Avoid);
    }

    /// A response came over a path that is not the one in use: that one works.
    pub(super) fn heard_over(&mut self, env: &mut Env, now: Now, path: Path) {
        let probed = (path.0.ip(), path.1.ip());
        if self.mobility.leader && self.mobility.probes.contains(&probed) {
            self.move_to(env, now, path.0, path.1);
        }
    }

    fn search(&mut self, env: &mut Env, now: Now, purpose: Purpose) {
        // A search for a better place also finds what to probe.
        if purpose == Purpose::Probe && self.mobility.search.is_some() {
            return;
        }
        let mut left: VecDeque<IpAddr> = VecDeque::new();
        if purpose != Purpose::Avoid {
            left.push_back(self.remote.ip());
        }
        if self.is_mobile() {
            let others = self.mobility.peer.iter().copied();
            left.extend(others.filter(|addr| *addr != self.remote.ip()));
        }
        left.truncate(MAX_PATHS);
        self.mobility.search = Some(Search {
            purpose,
            left,
            asked: None,
            found: Vec::new(),
        });
        self.ask_next(env, now);
    }

    fn ask_next(&mut self, env: &mut Env, now: Now) {
        let Some(search) = self.mobility.search.as_mut() else {
            return;
        };
        if let Some(remote) = search.left.pop_front() {
            search.asked = Some((env.source(self.id, Slot::Path, remote), remote));
            return;
        }
        let (purpose, found) = (search.purpose, std::mem::take(&mut search.found));
        self.mobility.search = None;
        if self.dead {
            return;
        }
        match purpose {
            Purpose::Roam => self.choose_path(env, now, &found),
            Purpose::Probe => {
                let current = (self.local.ip(), self.remote.ip());
                let others = found.into_iter().filter_map(|(source, remote)| {
                    let path = (self.local_for(env, source)?, remote);
                    (path != current).then_some(path)
                });
                self.mobility.probes = others.collect();
                if self.outbound.in_flight.is_some() {
                    self.probe_other_paths(env, now, false);
                }
            }
            Purpose::Avoid => {
                let other = found
                    .iter()
                    .find_map(|(source, remote)| Some((self.local_for(env, *source)?, *remote)));
                if let Some((local, remote)) = other {
                    let (local, remote) = self.between(local, remote);
                    self.move_to(env, now, local, remote);
                }
            }
        }
    }

    /// The source address towards one of the peer's addresses is known.
    pub(crate) fn path_answer(
        &mut self,
        env: &mut Env,
        now: Now,
        token: Token,
        source: Option<IpAddr>,
    ) {
        let Some(search) = self.mobility.search.as_mut() else {
            return;
        };
        let Some((_, remote)) = search.asked.take_if(|(asked, _)| *asked == token) else {
            return;
        };
        if let Some(source) = source {
            search.found.push((source, remote));
        }
        self.ask_next(env, now);
    }

    /// Stays if it can, else moves to the first path that there is.
    fn choose_path(&mut self, env: &mut Env, now: Now, found: &[(IpAddr, IpAddr)]) {
        let current = found.iter().find(|(_, remote)| *remote == self.remote.ip());
        if current.is_some_and(|(source, _)| self.can_stay(env, *source)) {
            if self.is_mobile() && self.other_addresses(env) != self.mobility.told {
                self.enqueue(Task::Announce);
                self.proceed(env, now);
            }
            return;
        }
        let chosen = found
            .iter()
            .find_map(|(source, remote)| Some((self.local_for(env, *source)?, *remote)));
        let Some((local, remote)) = chosen else {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!(
                    "there is no way to {} any more; waiting for one",
                    self.remote.ip()
                ),
            );
            return;
        };
        if !self.is_mobile() {
            self.set_up_anew(env, local);
            return;
        }
        let (local, remote) = if self.mobility.leader {
            self.between(local, remote)
        } else {
            // Where the peer is, only the peer decides.
            (SocketAddr::new(local, self.local.port()), self.remote)
        };
        if (local, remote) != (self.local, self.remote) {
            self.move_to(env, now, local, remote);
        }
    }

    /// Whether the own address in use still serves, although the host would use `source` now.
    fn can_stay(&self, env: &Env, source: IpAddr) -> bool {
        let own = self.local.ip();
        if source == own {
            return true;
        }
        // Nobody told which addresses there are, or ours is not among them.
        let Some(host) = env.hosts.get(&own) else {
            return false;
        };
        let pinned = self
            .conn
            .as_ref()
            .is_some_and(|conn| conn.local_addrs.contains(&HostSpec::Addr(own)));
        let link = env.hosts.get(&source).map(|other| other.link);
        // The other side chose the address that it reaches us at.
        let chosen = self.is_mobile() && !self.mobility.leader || !self.initiator;
        pinned || chosen || host.routed || link == Some(host.link)
    }

    /// The own address to use where the host would use `source`; `None` if the connection allows
    /// none that there is.
    fn local_for(&self, env: &Env, source: IpAddr) -> Option<IpAddr> {
        let conn = self.conn.as_ref()?;
        if self.vips.contains(&source) {
            return None;
        }
        if allows_local(conn, source) {
            return Some(source);
        }
        conn.local_addrs.iter().find_map(|spec| match spec {
            HostSpec::Addr(own) if own.is_ipv4() == source.is_ipv4() => {
                env.hosts.contains_key(own).then_some(*own)
            }
            _ => None,
        })
    }

    /// The ports between two addresses, which are those in use unless the peer's address differs.
    fn between(&self, local: IpAddr, remote: IpAddr) -> Path {
        let own = SocketAddr::new(local, self.local.port());
        if remote == self.remote.ip() {
            return (own, self.remote);
        }
        let port = match self.conn.as_ref().map_or(500, |conn| conn.remote_port) {
            500 if self.nat.supported => 4500,
            port => port,
        };
        (own, SocketAddr::new(remote, port))
    }

    /// Without MOBIKE an IKE SA cannot move: another one takes over from it.
    fn set_up_anew(&mut self, env: &mut Env, local: IpAddr) {
        if self.state != IkeState::Established || !self.initiator {
            return;
        }
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "{} serves no longer and the peer does without MOBIKE; setting up an IKE_SA from \
                 {local}",
                self.local.ip()
            ),
        );
        env.request(Request::Reauthenticate { old: self.id });
    }
}
