// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MOBIKE (RFC 4555): an IKE SA whose ends move, and what they tell each other about it.
//!
//! The side that set up the first IKE SA of a series decides between which addresses packets
//! travel; here it is called the leader. The other side tells which addresses it has, and follows.
//! Neither follows anything but UPDATE_SA_ADDRESSES, so that any other message may be sent over
//! any path, to see whether that works.

use std::net::{IpAddr, SocketAddr};

use swanherd_config::model::{Connection, HostSpec};
use swanherd_ipsec::TrafficSelector;

use super::child_offer::notify;
use super::env::Env;
use super::exchange::Path;
use super::nat::{self, Nat};
use super::roam::Search;
use super::{Active, IkeSa, Task};
use crate::api::{Event, FailureReason, IkeState, LogGroup, Now};
use crate::wire::{ExchangeType, NotifyPayload, NotifyType, Payload};

/// The most addresses that are told, and remembered of a peer.
pub(super) const MAX_ADDRESSES: usize = 32;
/// The most addresses of a peer that are remembered as proven.
const MAX_PROVEN: usize = 8;
/// Length of COOKIE2.
const COOKIE: usize = 16;

/// What an IKE SA knows about where it may move to.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Mobility {
    /// Whether this side set up the first IKE SA of the series.
    pub(crate) leader: bool,
    /// Addresses that the peer has besides the one in use.
    pub(crate) peer: Vec<IpAddr>,
    /// Addresses of this side that the peer was told of last.
    pub(crate) told: Vec<IpAddr>,
    /// Goes up with each move: an answer to what was said before is void.
    epoch: u32,
    /// Addresses at which the peer has been proven to receive, the last ones.
    proven: Vec<IpAddr>,
    /// The children stay where they are until the peer's new address is proven.
    held: bool,
    /// How the peer sees this side: the hash of its last NAT_DETECTION_DESTINATION_IP.
    pub(crate) seen_as: Option<Vec<u8>>,
    /// Paths that the request in flight is sent over besides the one in use.
    pub(super) probes: Vec<(IpAddr, IpAddr)>,
    /// The question which paths there are, while it is open.
    pub(super) search: Option<Search>,
}

impl Mobility {
    /// What the IKE SA that replaces this one knows.
    pub(crate) fn inherit(&self) -> Self {
        Self {
            leader: self.leader,
            peer: self.peer.clone(),
            told: self.told.clone(),
            epoch: self.epoch,
            proven: self.proven.clone(),
            held: self.held,
            seen_as: self.seen_as.clone(),
            probes: Vec::new(),
            search: None,
        }
    }

    /// The request in flight is none any more.
    pub(crate) fn forget_probes(&mut self) {
        self.probes.clear();
    }

    /// Whether the children wait for a proof.
    pub(crate) fn holds_children(&self) -> bool {
        self.held
    }

    /// Notes that the peer receives at `addr`.
    pub(crate) fn prove(&mut self, addr: IpAddr) {
        self.proven.retain(|known| *known != addr);
        if self.proven.len() >= MAX_PROVEN {
            self.proven.remove(0);
        }
        self.proven.push(addr);
    }

    fn has_proven(&self, addr: IpAddr) -> bool {
        self.proven.contains(&addr)
    }
}

/// An address update or a list of addresses, under way.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Moving {
    epoch: u32,
    /// UPDATE_SA_ADDRESSES rather than a list alone.
    update: bool,
    cookie: Option<Vec<u8>>,
    remote: IpAddr,
}

/// A question whether the peer receives at an address.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Proof {
    cookie: Vec<u8>,
    remote: IpAddr,
}

/// What a request of the peer's says about addresses.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// For the response.
    pub(crate) response: Vec<Payload>,
    /// Where to move to, and what NATs are there, if the request told and they are acceptable.
    update: Option<(Path, Option<Nat>)>,
    /// The peer told its addresses.
    listed: bool,
}

impl IkeSa {
    /// Whether both sides want MOBIKE.
    pub(crate) fn is_mobile(&self) -> bool {
        self.peer.mobike && self.conn.as_ref().is_some_and(|conn| conn.mobike)
    }

    /// What an IKE_AUTH message says about MOBIKE: that it is wanted, and the own addresses.
    pub(crate) fn mobike_payloads(&mut self, env: &Env) -> Vec<Payload> {
        if !self.conn.as_ref().is_some_and(|conn| conn.mobike) {
            return Vec::new();
        }
        let mut payloads = vec![notify(NotifyType::MobikeSupported)];
        self.mobility.told = self.other_addresses(env);
        payloads.extend(self.told_addresses(false));
        payloads
    }

    /// Addresses of this host that the peer may use, besides the one in use.
    pub(super) fn other_addresses(&self, env: &Env) -> Vec<IpAddr> {
        let Some(conn) = &self.conn else {
            return Vec::new();
        };
        env.hosts
            .keys()
            .copied()
            .filter(|addr| *addr != self.local.ip() && !self.vips.contains(addr))
            .filter(|addr| allows_local(conn, *addr))
            .take(MAX_ADDRESSES)
            .collect()
    }

    fn told_addresses(&self, even_none: bool) -> Vec<Payload> {
        let told = &self.mobility.told;
        if told.is_empty() && even_none {
            return vec![notify(NotifyType::NoAdditionalAddresses)];
        }
        told.iter()
            .map(|addr| Payload::Notify(NotifyPayload::additional_address(*addr)))
            .collect()
    }

    /// Takes the list of the peer's addresses out of a message; false if it has none.
    pub(crate) fn read_addresses(&mut self, env: &mut Env, payloads: &[Payload]) -> bool {
        let mut listed = false;
        let mut addrs = Vec::new();
        for payload in payloads {
            let Payload::Notify(notify) = payload else {
                continue;
            };
            match notify.notify_type {
                NotifyType::NoAdditionalAddresses => listed = true,
                NotifyType::AdditionalIp4Address | NotifyType::AdditionalIp6Address => {
                    listed = true;
                    if let Some(addr) = notify.as_additional_address()
                        && addrs.len() < MAX_ADDRESSES
                        && !addrs.contains(&addr)
                    {
                        addrs.push(addr);
                    }
                }
                _ => {}
            }
        }
        if listed {
            self.log(
                env,
                LogGroup::Ike,
                2,
                format!("the peer has the further addresses {addrs:?}"),
            );
            self.mobility.peer = addrs;
        }
        listed
    }

    fn nat_notifies(&self) -> Vec<Payload> {
        if !self.nat.supported {
            return Vec::new();
        }
        nat::notifies(
            self.spi_i,
            self.spi_r,
            self.local,
            self.remote,
            self.nat.fake,
        )
        .into()
    }

    /// Tells the peer the own addresses; the leader also where it is now.
    pub(crate) fn start_move(&mut self, env: &mut Env, now: Now, update: bool) {
        if !self.is_mobile() {
            return;
        }
        self.mobility.told = self.other_addresses(env);
        let remote = self.remote.ip();
        let mut payloads = Vec::new();
        let mut cookie = None;
        if update {
            self.log(
                env,
                LogGroup::Ike,
                1,
                format!("telling the peer to use {} - {}", self.local, self.remote),
            );
            payloads.push(notify(NotifyType::UpdateSaAddresses));
            payloads.extend(self.nat_notifies());
            if !self.mobility.has_proven(remote) {
                let octets = env.rng.bytes(COOKIE);
                let cookie2 = NotifyPayload::new(NotifyType::Cookie2, octets.clone());
                payloads.push(Payload::Notify(cookie2));
                cookie = Some(octets);
            }
        }
        payloads.extend(self.told_addresses(true));
        if self.send_request(env, now, ExchangeType::Informational, &payloads) {
            self.active = Active::Moving(Box::new(Moving {
                epoch: self.mobility.epoch,
                update,
                cookie,
                remote,
            }));
        }
    }

    /// The peer has answered [`Self::start_move`].
    pub(crate) fn move_answered(
        &mut self,
        env: &mut Env,
        now: Now,
        moving: &Moving,
        payloads: &[Payload],
        path: Path,
    ) {
        if !moving.update {
            return;
        }
        let has = |kind| {
            payloads
                .iter()
                .any(|p| matches!(p, Payload::Notify(notify) if notify.notify_type == kind))
        };
        if moving
            .cookie
            .as_ref()
            .is_some_and(|cookie| !returns(payloads, cookie))
        {
            self.wrong_cookie(env, now);
            return;
        }
        // Moved on meanwhile: what is true now will be told and answered next.
        if moving.epoch != self.mobility.epoch {
            return;
        }
        let refusal = [
            NotifyType::UnacceptableAddresses,
            NotifyType::UnexpectedNatDetected,
        ]
        .into_iter()
        .find(|kind| has(*kind));
        if let Some(kind) = refusal {
            self.log(
                env,
                LogGroup::Ike,
                0,
                format!(
                    "the peer refuses the addresses {} - {} with {kind}",
                    self.local, self.remote
                ),
            );
            self.avoid(env, now, moving.remote);
            return;
        }
        self.mobility.prove(moving.remote);
        self.mobility.held = false;
        if let Some(nat) = self.nats_of(payloads, path) {
            self.nat = nat;
            self.arm_keepalive(env, now);
        }
        self.mobility.seen_as = seen_as(payloads);
        self.move_children(env);
        self.changed(env);
    }

    /// What the NAT detection of a message says, if it takes part.
    fn nats_of(&self, payloads: &[Payload], (local, remote): Path) -> Option<Nat> {
        let found = nat::detect(payloads, self.spi_i, self.spi_r, local, remote);
        found.supported.then_some(Nat {
            fake: self.nat.fake,
            ..found
        })
    }

    fn wrong_cookie(&mut self, env: &mut Env, now: Now) {
        self.fail(
            env,
            now,
            FailureReason::PeerMisbehaved,
            "the peer's answer does not return COOKIE2".to_owned(),
        );
    }

    /// Asks the peer at its present address for a proof that it is there.
    pub(crate) fn start_proof(&mut self, env: &mut Env, now: Now) {
        let remote = self.remote.ip();
        if self.mobility.has_proven(remote) {
            self.mobility.held = false;
            self.move_children(env);
            return;
        }
        let cookie = env.rng.bytes(COOKIE);
        let cookie2 = NotifyPayload::new(NotifyType::Cookie2, cookie.clone());
        let payloads = [Payload::Notify(cookie2)];
        if self.send_request(env, now, ExchangeType::Informational, &payloads) {
            self.active = Active::Proving(Box::new(Proof { cookie, remote }));
        }
    }

    /// The peer has answered [`Self::start_proof`].
    pub(crate) fn proof_answered(
        &mut self,
        env: &mut Env,
        now: Now,
        proof: &Proof,
        payloads: &[Payload],
    ) {
        if !returns(payloads, &proof.cookie) {
            self.wrong_cookie(env, now);
            return;
        }
        if proof.remote != self.remote.ip() {
            self.enqueue_first(Task::Prove);
            return;
        }
        self.mobility.prove(proof.remote);
        self.mobility.held = false;
        self.move_children(env);
        self.changed(env);
    }

    /// What goes into a question whether the peer lives: whoever is behind a NAT learns from the
    /// answer whether its mapping is still the same (RFC 4555 section 3.8).
    pub(crate) fn probe_payloads(&self) -> Vec<Payload> {
        if self.is_mobile() && self.mobility.leader && self.nat.local {
            self.nat_notifies()
        } else {
            Vec::new()
        }
    }

    /// The peer lives.
    pub(crate) fn probe_answered(&mut self, env: &mut Env, now: Now, payloads: &[Payload]) {
        if !self.is_mobile() || !self.mobility.leader {
            return;
        }
        let seen_as = seen_as(payloads);
        if seen_as.is_none() || seen_as == self.mobility.seen_as {
            return;
        }
        self.mobility.seen_as = seen_as;
        self.log(
            env,
            LogGroup::Ike,
            1,
            "the peer sees this side at another address or port than before",
        );
        self.queue_move(env, now);
    }

    /// Tells the peer of a move, or of new addresses, before anything else.
    pub(super) fn queue_move(&mut self, env: &mut Env, now: Now) {
        let task = if self.mobility.leader {
            Task::Move
        } else {
            Task::Announce
        };
        self.enqueue_first(task);
        self.proceed(env, now);
    }

    /// Reads what a request of the peer's says about addresses.
    pub(crate) fn read_mobility(&mut self, env: &mut Env, payloads: &[Payload]) -> Said {
        let mut said = Said::default();
        let Some(path) = self.inbound.path else {
            return said;
        };
        for payload in payloads {
            if let Payload::Notify(notify) = payload
                && notify.is_cookie2()
            {
                said.response.push(payload.clone());
            }
        }
        if !self.is_mobile() {
            return said;
        }
        let find = |kind| {
            payloads.iter().find_map(|payload| match payload {
                Payload::Notify(notify) if notify.notify_type == kind => Some(notify),
                _ => None,
            })
        };
        let (local, remote) = path;
        if find(NotifyType::NatDetectionSourceIp).is_some() && self.nat.supported {
            let ours = nat::notifies(self.spi_i, self.spi_r, local, remote, self.nat.fake);
            said.response.extend(ours);
        }
        if find(NotifyType::UpdateSaAddresses).is_some() {
            let allowed = self
                .conn
                .as_ref()
                .is_some_and(|conn| allows_local(conn, local.ip()));
            let expected = NotifyPayload::no_nats_allowed(remote, local);
            let natted =
                find(NotifyType::NoNatsAllowed).is_some_and(|notify| notify.data != expected.data);
            let refusal = if natted {
                Some(NotifyType::UnexpectedNatDetected)
            } else if !allowed {
                Some(NotifyType::UnacceptableAddresses)
            } else {
                None
            };
            if let Some(kind) = refusal {
                self.log(
                    env,
                    LogGroup::Ike,
                    1,
                    format!("the peer's move to {remote} - {local} is refused with {kind}"),
                );
                said.response.push(notify(kind));
                return said;
            }
            said.update = Some((path, self.nats_of(payloads, path)));
        }
        said.listed = self.read_addresses(env, payloads);
        said
    }

    /// Does what a request said about addresses, once it is answered.
    pub(crate) fn follow(&mut self, env: &mut Env, now: Now, said: &Said) {
        let moves = matches!(
            self.state,
            IkeState::Established | IkeState::Rekeying | IkeState::Rekeyed
        );
        if self.dead || !moves {
            return;
        }
        if let Some(((local, remote), nat)) = said.update {
            if let Some(nat) = nat {
                self.nat = nat;
            }
            if (local, remote) != (self.local, self.remote) {
                self.log(
                    env,
                    LogGroup::Ike,
                    0,
                    format!("the peer moves from {} to {remote}", self.remote),
                );
                self.mobility.epoch = self.mobility.epoch.wrapping_add(1);
                self.relocate(env, now, local, remote);
                self.relaunch(env, now);
            }
            self.arm_keepalive(env, now);
            self.mobility.held = !self.mobility.has_proven(remote.ip());
            if self.mobility.held && self.state != IkeState::Rekeyed {
                self.enqueue_first(Task::Prove);
            }
            self.move_children(env);
            self.changed(env);
            return;
        }
        // The peer cannot lead, and shows by where it writes from where it can be reached.
        if said.listed
            && self.mobility.leader
            && let Some((local, remote)) = self.inbound.path
            && remote != self.remote
        {
            self.move_to(env, now, local, remote);
        }
    }

    /// The leader moves to other addresses.
    pub(super) fn move_to(
        &mut self,
        env: &mut Env,
        now: Now,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        self.log(
            env,
            LogGroup::Ike,
            0,
            format!(
                "moving from {} - {} to {local} - {remote}",
                self.local, self.remote
            ),
        );
        self.mobility.epoch = self.mobility.epoch.wrapping_add(1);
        self.relocate(env, now, local, remote);
        self.mobility.held = self.is_mobile() && !self.mobility.has_proven(remote.ip());
        self.move_children(env);
        self.relaunch(env, now);
        self.queue_move(env, now);
    }

    /// Uses other addresses from now on, and tells the world before.
    pub(super) fn relocate(
        &mut self,
        env: &mut Env,
        now: Now,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        // Of one that is replaced the world has heard the last, and of one that is being set up
        // nothing yet.
        if self.announced && self.state != IkeState::Rekeyed && !self.redundant {
            let sa = Box::new(self.info_without_children());
            env.event(Event::IkeUpdate { sa, local, remote });
        }
        if (local.ip(), remote.ip()) != (self.local.ip(), self.remote.ip()) {
            self.packet = None;
        }
        self.local = local;
        self.remote = remote;
        self.arm_keepalive(env, now);
        self.changed(env);
    }
}

/// Whether a message returns COOKIE2 as it was sent.
fn returns(payloads: &[Payload], cookie: &[u8]) -> bool {
    payloads.iter().any(|payload| {
        matches!(payload, Payload::Notify(notify)
            if notify.notify_type == NotifyType::Cookie2 && notify.data == cookie)
    })
}

/// How the sender of a message sees this side.
pub(super) fn seen_as(payloads: &[Payload]) -> Option<Vec<u8>> {
    payloads.iter().find_map(|payload| match payload {
        Payload::Notify(notify) if notify.notify_type == NotifyType::NatDetectionDestinationIp => {
            Some(notify.data.clone())
        }
        _ => None,
    })
}

/// Whether `local_addrs` of a connection lets `addr` be used.
pub(super) fn allows_local(conn: &Connection, addr: IpAddr) -> bool {
    conn.local_addrs.is_empty()
        || conn.local_addrs.iter().any(|spec| match spec {
            HostSpec::Addr(own) => *own == addr,
            HostSpec::Network(net, len) => TrafficSelector::network(*net, *len)
                .is_some_and(|net| net.contains(&TrafficSelector::host(addr))),
            HostSpec::Range(from, to) => {
                from.is_ipv4() == addr.is_ipv4() && (*from..=*to).contains(&addr)
            }
            HostSpec::Any(v4) => v4.is_none_or(|v4| v4 == addr.is_ipv4()),
            // What a name of this host stands for is not looked up.
            HostSpec::Name(_) => true,
        })
}
