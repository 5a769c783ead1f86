// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where an IKE SA is to be set up: names of the peer's, and the own address and port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use swanherd_config::model::HostSpec;

use super::env::{Env, Slot};
use super::initiator::Initiating;
use super::{Active, IkeSa};
use crate::api::{FailureReason, LogGroup, Now};

/// The port of IKE (RFC 7296 section 2).
const IKE_PORT: u16 = 500;
/// The port of IKE and ESP behind NAT (RFC 7296 section 2.23).
const NAT_T_PORT: u16 = 4500;

impl IkeSa {
    /// Has a name of the peer's looked up, anew for each attempt.
    pub(super) fn look_up(&mut self, env: &mut Env, name: String, turn: usize) {
        let token = env.resolve(self.id, name.clone());
        self.active = Active::Initiating(Box::new(Initiating::PeerAddress { token, name, turn }));
    }

    /// A name has been looked up. One that cannot be resolved now may still be where it was.
    pub(super) fn looked_up(
        &mut self,
        env: &mut Env,
        now: Now,
        name: &str,
        turn: usize,
        found: &[IpAddr],
    ) {
        let own_v4 = self.conn.as_ref().and_then(|conn| {
            conn.local_addrs.iter().find_map(|host| match host {
                HostSpec::Addr(own) => Some(own.is_ipv4()),
                HostSpec::Any(family) => *family,
                _ => None,
            })
        });
        let known = if found.is_empty() {
            env.connections.last_known(name).to_vec()
        } else {
            found.to_vec()
        };
        if found.is_empty() && !known.is_empty() {
            self.log(
                env,
                LogGroup::Net,
                1,
                format!("{name} cannot be resolved; taking what it resolved to before"),
            );
        }
        let fitting: Vec<IpAddr> = known
            .into_iter()
            .filter(|addr| own_v4.is_none_or(|v4| v4 == addr.is_ipv4()))
            .collect();
        let turn = turn.checked_rem(fitting.len()).unwrap_or(0);
        match fitting.get(turn) {
            Some(addr) => self.peer_found(env, now, *addr),
            None => self.fail(
                env,
                now,
                FailureReason::Unreachable,
                format!("{name} has no usable address"),
            ),
        }
    }

    pub(super) fn peer_found(&mut self, env: &mut Env, now: Now, addr: IpAddr) {
        let Some(conn) = self.conn.clone() else {
            return;
        };
        // A peer that listens elsewhere than on port 500 expects the non-ESP marker, which only
        // the NAT-T socket speaks; and who speaks from there does not speak to port 500. The usual
        // ports stand for `charon.port` and `charon.port_nat_t`.
        let settings = &env.settings;
        let (own_port, port) = match (conn.local_port, conn.remote_port) {
            (IKE_PORT, IKE_PORT) => (settings.port, IKE_PORT),
            (port, IKE_PORT) if port == settings.port => (port, IKE_PORT),
            (_, IKE_PORT) => (settings.port_nat_t, NAT_T_PORT),
            (_, port) => (settings.port_nat_t, port),
        };
        self.remote = SocketAddr::new(addr, port);
        let mut fitting = conn.local_addrs.iter().filter_map(|host| match host {
            HostSpec::Addr(own) if own.is_ipv4() == addr.is_ipv4() => Some(*own),
            _ => None,
        });
        let present = fitting.clone().find(|own| env.hosts.contains_key(own));
        let own = present.or_else(|| fitting.next());
        let unspecified = if addr.is_ipv4() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED)
        } else {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED)
        };
        self.local = SocketAddr::new(own.unwrap_or(unspecified), own_port);
        if own.is_some() {
            self.begin_init(env, now);
        } else {
            let token = env.source(self.id, Slot::Active, addr);
            self.active = Active::Initiating(Box::new(Initiating::OwnAddress(token)));
        }
    }
}
