// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE SAs whose ends move: changes of this host's addresses and routes, messages that are too
//! long for a path, and gateways that send this side elsewhere.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Endpoint;
use crate::api::{HostAddress, IkeSaId, LogGroup, Now, Transmit};
use crate::sa::Task;
use crate::wire::{Gateway, Header};

/// The most addresses of this host that are looked at.
const MAX_HOSTS: usize = 1024;
/// How long an IKE SA that was redirected may take to be deleted.
const FAREWELL: Duration = Duration::from_secs(10);

impl Endpoint {
    /// Tells all addresses of this host that packets can be sent from: at the start, and after
    /// each change. An endpoint that is never told takes what [`crate::api::Action::Source`] finds.
    pub fn handle_addresses(&mut self, now: Now, addresses: &[HostAddress]) {
        let hosts: BTreeMap<_, _> = addresses
            .iter()
            .take(MAX_HOSTS)
            .map(|host| (host.addr, *host))
            .collect();
        if hosts != self.env.hosts {
            self.env.hosts = hosts;
            self.keep.network_changed(now.instant);
        }
        self.settle(now);
    }

    /// The host refused to send this, because it is too long (EMSGSIZE). What can be fragmented is
    /// sent again in smaller pieces.
    pub fn handle_too_long(&mut self, now: Now, transmit: &Transmit) {
        let Ok(header) = Header::parse(&transmit.payload) else {
            return;
        };
        let own = if header.flags.initiator {
            header.spi_i
        } else {
            header.spi_r
        };
        if let Some(&id) = self.env.spis.get(&own) {
            self.with(id, |sa, env| sa.too_long(env, now, &header));
        }
        self.settle(now);
    }

    /// Looks at the paths of all IKE SAs after a change.
    pub(super) fn review_paths(&mut self, now: Now) {
        let ids: Vec<IkeSaId> = self.sas.keys().copied().collect();
        for id in ids {
            self.with(id, |sa, env| sa.roam(env, now));
        }
    }

    /// Sets up at `gateway` what `old` was for. An established IKE SA stays until that is done.
    pub(super) fn redirect(&mut self, now: Now, old: IkeSaId, gateway: Gateway) {
        let Some(sa) = self.sas.get(&old) else {
            return;
        };
        let Some(conn) = sa.conn.clone() else {
            return;
        };
        let from = sa.remote.ip();
        let mut redirection = sa.redirection.clone();
        let peer = sa.peer_text();
        let established = sa.announced;
        if !redirection.follow(now.instant, from, gateway.clone()) {
            let text = format!("{peer} redirects to {gateway}, after too many redirects before");
            self.env.log(LogGroup::Ike, 0, text);
            if !established {
                self.with(old, |sa, env| sa.delete_at_once(env, now, FAREWELL));
            }
            return;
        }
        let text = format!("{peer} redirects IKE_SA {}[{old}] to {gateway}", conn.name);
        self.env.log(LogGroup::Ike, 0, text);
        if established {
            let live = sa.children.values().filter(|child| child.is_live());
            let mut children: Vec<usize> = live
                .filter(|child| child.conn.name == conn.name)
                .map(|child| child.index)
                .collect();
            children.sort_unstable();
            children.dedup();
            let tasks = super::command::tasks(&conn, children);
            self.initiate_to(now, &conn, tasks, Some(old), None, redirection);
            return;
        }
        let wanted = |task: &Task| matches!(task, Task::CreateChild { .. });
        let tasks: Vec<Task> = sa
            .queue
            .iter()
            .filter(|task| wanted(task))
            .cloned()
            .collect();
        let supersedes = sa.supersedes;
        let new = self.initiate_to(now, &conn, tasks, supersedes, None, redirection);
        self.wait_elsewhere(old, new);
        self.with(old, |sa, env| {
            sa.supersedes = None;
            sa.delete_at_once(env, now, FAREWELL);
        });
    }
}
