// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Going to another gateway when the peer says so (RFC 5685), as the side that set up the IKE SA.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::child_offer::notify;
use super::env::{Env, Request};
use super::initiator::AuthWait;
use super::{IkeSa, Task};
use crate::api::{FailureReason, IkeState, LogGroup, Now};
use crate::wire::{Gateway, Message, NotifyPayload, NotifyType, Payload};

/// The most redirects that are followed,
const MAX_REDIRECTS: usize = 5;
/// in this time (RFC 5685 section 3).
const PERIOD: Duration = Duration::from_secs(300);

/// Where an IKE SA was sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Redirection {
    /// Whom to go to instead of the configured peer.
    pub(crate) to: Option<Gateway>,
    /// Who sent us there.
    pub(crate) from: Option<IpAddr>,
    /// When it was redirected, of late.
    history: Vec<Instant>,
}

impl Redirection {
    /// Another redirect, by `from`; false if there have been too many.
    pub(crate) fn follow(&mut self, now: Instant, from: IpAddr, to: Gateway) -> bool {
        self.history
            .retain(|at| now.saturating_duration_since(*at) < PERIOD);
        if self.history.len() >= MAX_REDIRECTS {
            return false;
        }
        self.history.push(now);
        self.from = Some(from);
        self.to = Some(to);
        true
    }
}

impl IkeSa {
    /// What IKE_SA_INIT says about redirects.
    pub(super) fn redirect_offer(&self, env: &Env) -> Vec<Payload> {
        if !env.settings.follow_redirects {
            return Vec::new();
        }
        let from = self.redirection.from.map(|addr| {
            let from = NotifyPayload::redirected_from(&Gateway::Addr(addr));
            Payload::Notify(from)
        });
        from.into_iter()
            .chain([notify(NotifyType::RedirectSupported)])
            .collect()
    }

    /// Where an unauthenticated response to IKE_SA_INIT redirects to, if it comes from somebody
    /// who has seen the request.
    pub(super) fn redirect_in_init(
        &self,
        env: &Env,
        message: &Message,
        nonce: &[u8],
    ) -> Option<Gateway> {
        let redirect = message.notify(NotifyType::Redirect)?.as_redirect()?;
        let wanted = env.settings.follow_redirects && redirect.nonce == nonce;
        wanted.then_some(redirect.gateway)
    }

    /// Where an authenticated message redirects to.
    pub(super) fn redirect_of(&self, payloads: &[Payload]) -> Option<Gateway> {
        payloads.iter().find_map(|payload| match payload {
            Payload::Notify(notify) => Some(notify.as_redirect()?.gateway),
            _ => None,
        })
    }

    /// Starts over with another gateway than the one that was asked.
    pub(super) fn begin_elsewhere(&mut self, env: &mut Env, now: Now, gateway: Gateway) {
        let from = self.remote.ip();
        if !self.redirection.follow(now.instant, from, gateway.clone()) {
            self.fail(
                env,
                now,
                FailureReason::PeerMisbehaved,
                format!("{from} redirects to {gateway}, after too many redirects before"),
            );
            return;
        }
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!("{from} redirects to {gateway}"),
        );
        env.spis.remove(&self.spi_i);
        self.spi_i = 0;
        self.outbound.next_id = 0;
        self.go_to(env, now, gateway);
    }

    /// Finds the address of a gateway that this side was redirected to, and begins there.
    pub(super) fn go_to(&mut self, env: &mut Env, now: Now, gateway: Gateway) {
        match gateway {
            Gateway::Addr(addr) => self.peer_found(env, now, addr),
            Gateway::Name(name) => self.look_up(env, name, 0),
        }
    }

    /// An authenticated peer redirects in its response to IKE_AUTH: the IKE SA that it has is of no
    /// use, and is deleted.
    pub(super) fn redirected_in_auth(
        &mut self,
        env: &mut Env,
        now: Now,
        wait: &AuthWait,
        gateway: Gateway,
    ) {
        // What was to be made here is to be made there.
        if let Some(child) = wait.child.and_then(|id| self.children.get(&id)) {
            let task = Task::CreateChild {
                conn: child.conn.clone(),
                index: child.index,
                packet: child.packet,
            };
            self.enqueue_first(task);
        }
        self.drop_auth_child(env, wait);
        if !self.may_be_redirected(env) {
            let text = format!("the peer redirects to {gateway} although this is switched off");
            self.reject_peer(env, now, FailureReason::PeerMisbehaved, text);
            return;
        }
        // Nothing else is to be begun here.
        self.state = IkeState::Deleting;
        let old = self.id;
        env.request(Request::Redirect { old, gateway });
    }

    /// The peer sends this side away from an established IKE SA.
    pub(super) fn redirected(&mut self, env: &mut Env, _now: Now, gateway: Gateway) {
        if !self.may_be_redirected(env) || self.state != IkeState::Established {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("the peer's redirect to {gateway} is not followed"),
            );
            return;
        }
        let old = self.id;
        env.request(Request::Redirect { old, gateway });
    }

    fn may_be_redirected(&self, env: &Env) -> bool {
        // Gateways redirect clients, never the other way round (RFC 5685 section 2).
        let client = if self.announced {
            self.mobility.leader
        } else {
            self.initiator
        };
        env.settings.follow_redirects && client
    }
}
