// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One CHILD SA: what was agreed, what is installed, and how it gets there and away again.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use swanherd_config::model::{Child, ChildMode, CopyDscp, IfId, MarkSpec};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{
    Direction, Lifetime, Mark, Mode, Op, PlaneError, PolicyAction, PolicySet, SaEntry, SaId,
    SaKeys, UdpEncap,
};
use swanherd_ipsec::proposal::ChildSuite;

use super::IkeSa;
use super::env::{Env, Slot};
use super::policies::Group;
use super::timers::Timer;
use crate::api::{
    ChildSaId, ChildSaInfo, ChildState, ConnectionRef, Event, IkeSaInfo, LogGroup, Now,
    PlaneAnswer, Token,
};
use crate::crypto::ChildKeys;

/// How long the peer has to delete a CHILD SA that it has replaced, or made in vain.
pub(crate) const PEER_DELETE_LIMIT: Duration = Duration::from_secs(60);

/// A CHILD SA.
#[derive(Debug)]
pub(crate) struct ChildSa {
    pub(crate) id: ChildSaId,
    pub(crate) conn: ConnectionRef,
    /// Place in the connection's children.
    pub(crate) index: usize,
    pub(crate) state: ChildState,
    pub(crate) group: Group,
    pub(crate) mode: Mode,
    pub(crate) local: IpAddr,
    pub(crate) remote: IpAddr,
    pub(crate) encap: Option<(u16, u16)>,
    /// 0 until allocated.
    pub(crate) spi_in: u32,
    /// 0 until the peer has told.
    pub(crate) spi_out: u32,
    pub(crate) suite: Option<ChildSuite>,
    pub(crate) local_ts: Vec<TrafficSelector>,
    pub(crate) remote_ts: Vec<TrafficSelector>,
    pub(crate) if_id: (u32, u32),
    pub(crate) mark_in: Option<Mark>,
    pub(crate) mark_out: Option<Mark>,
    pub(crate) installed: Option<Instant>,
    /// When it is to be rekeyed; `None` once that has begun.
    pub(crate) rekey_at: Option<Instant>,
    /// What [`Self::rekey_at`] was at first: listings go on showing it.
    pub(crate) rekey_planned: Option<Instant>,
    pub(crate) expires_at: Option<Instant>,
    /// Outbound SA that waits for the peer to be ready for it.
    pub(crate) pending_out: Option<Box<SaEntry>>,
    /// When to look whether the peer has deleted it, as it should have.
    pub(crate) check_at: Option<Instant>,
    /// Made by the peer in a collision that it lost; the peer is to delete it.
    pub(crate) redundant: bool,
    pub(crate) out_installed: bool,
    /// When the last of a replaced SA is removed.
    pub(crate) remove_at: Option<Instant>,
    /// The SA that this one replaces.
    pub(crate) replaces: Option<ChildSaId>,
    /// The SA that replaces this one.
    pub(crate) replaced_by: Option<ChildSaId>,
    /// Whether it was announced to the world as up.
    pub(crate) announced: bool,
    /// When unsuccessful rekeying is tried again.
    pub(crate) retry_at: Option<Instant>,
    /// The configured instead of the agreed selectors are offered in the next rekey.
    pub(crate) offer_configured: bool,
}

impl ChildSa {
    /// Its configuration.
    pub(crate) fn cfg(&self) -> &Child {
        self.conn
            .children
            .get(self.index)
            .expect("a child is made for an existing index of an immutable connection")
    }

    /// The inbound SA, once it has an SPI.
    pub(crate) fn inbound(&self) -> Option<SaId> {
        (self.spi_in != 0).then_some(SaId {
            spi: self.spi_in,
            dst: self.local,
        })
    }

    /// The outbound SA, once it has an SPI.
    pub(crate) fn outbound(&self) -> Option<SaId> {
        (self.spi_out != 0).then_some(SaId {
            spi: self.spi_out,
            dst: self.remote,
        })
    }

    /// Whether packets are meant to pass through it.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.state, ChildState::Installed | ChildState::Rekeying)
    }

    /// For listings.
    pub(crate) fn info(&self) -> ChildSaInfo {
        ChildSaInfo {
            id: self.id,
            name: self.cfg().name.clone(),
            reqid: self.group.reqid,
            state: self.state,
            mode: self.mode,
            encap: self.encap.is_some(),
            inbound: self.inbound(),
            outbound: self.outbound(),
            suite: self.suite,
            if_id: self.if_id,
            mark_in: self.mark_in,
            mark_out: self.mark_out,
            local_ts: self.local_ts.clone(),
            remote_ts: self.remote_ts.clone(),
            installed: self.installed,
            rekey_at: self.rekey_planned,
            expires_at: self.expires_at,
        }
    }

    /// The next moment at which something is to be done.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let rekey = match self.state {
            ChildState::Installed => self.retry_at.or(self.rekey_at),
            _ => None,
        };
        let expire = match self.state {
            ChildState::Installed | ChildState::Rekeying | ChildState::Rekeyed => self.expires_at,
            _ => None,
        };
        [rekey, expire, self.check_at, self.remove_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn udp(&self, outbound: bool) -> Option<UdpEncap> {
        self.encap.map(|(local, remote)| {
            if outbound {
                UdpEncap {
                    src_port: local,
                    dst_port: remote,
                }
            } else {
                UdpEncap {
                    src_port: remote,
                    dst_port: local,
                }
            }
        })
    }

    fn entry(
        &self,
        direction: Direction,
        keys: SaKeys,
        lifetime: Lifetime,
        window: u32,
    ) -> SaEntry {
        let cfg = self.cfg();
        let outbound = direction == Direction::Out;
        let (spi, src, dst) = if outbound {
            (self.spi_out, self.local, self.remote)
        } else {
            (self.spi_in, self.remote, self.local)
        };
        let copy_out = matches!(cfg.copy_dscp, CopyDscp::Out | CopyDscp::Yes);
        let copy_in = matches!(cfg.copy_dscp, CopyDscp::In | CopyDscp::Yes);
        let fixed = |spec: &MarkSpec, same: Option<Mark>| match spec {
            MarkSpec::Mark(mark) => Some(*mark),
            MarkSpec::Same(mask) => same.map(|mark| Mark {
                value: mark.value & mask,
                mask: *mask,
            }),
            _ => None,
        };
        let selector = match (self.mode, self.local_ts.first(), self.remote_ts.first()) {
            (Mode::Transport, Some(local), Some(remote)) => Some((*local, *remote)),
            _ => None,
        };
        SaEntry {
            direction,
            spi,
            src,
            dst,
            mode: self.mode,
            reqid: self.group.reqid,
            keys,
            esn: self.suite.is_some_and(|suite| suite.esn),
            replay_window: if outbound { 0 } else { window },
            encap: self.udp(outbound),
            lifetime,
            mark: if outbound {
                self.mark_out
            } else {
                self.mark_in.filter(|_| cfg.mark_in_sa)
            },
            set_mark: if outbound {
                fixed(&cfg.set_mark_out, self.mark_out)
            } else {
                fixed(&cfg.set_mark_in, self.mark_in)
            },
            if_id: if outbound { self.if_id.1 } else { self.if_id.0 },
            selector,
            copy_df: cfg.copy_df,
            copy_ecn: cfg.copy_ecn,
            copy_dscp_out: copy_out,
            copy_dscp_in: copy_in,
            offload: cfg.hw_offload,
        }
    }

    /// The policies that it needs.
    pub(crate) fn policy_set(&self) -> PolicySet {
        let cfg = self.cfg();
        PolicySet {
            id: self.group.set,
            owner: format!("{}/{}", self.conn.name, cfg.name),
            local: self.local_ts.clone(),
            remote: self.remote_ts.clone(),
            action: PolicyAction::Protect {
                mode: self.mode,
                local: self.local,
                remote: self.remote,
                reqid: self.group.reqid,
                spi: 0,
            },
            priority: (cfg.priority != 0).then_some(cfg.priority),
            mark_in: self.mark_in,
            mark_out: self.mark_out,
            if_id_in: self.if_id.0,
            if_id_out: self.if_id.1,
            routes: self.if_id == (0, 0),
            trap: false,
            fwd_out: cfg.policies_fwd_out,
            offload: cfg.hw_offload,
        }
    }
}

/// Operations of the data plane under way for a child.
#[derive(Debug)]
pub(crate) struct Installing {
    pub(crate) child: ChildSaId,
    waiting: BTreeSet<Token>,
    error: Option<PlaneError>,
}

impl Installing {
    /// Takes one answer; the outcome once all are there.
    pub(crate) fn answer(
        &mut self,
        token: Token,
        answer: PlaneAnswer,
    ) -> Option<Result<(), PlaneError>> {
        if !self.waiting.remove(&token) {
            return None;
        }
        if let Err(error) = answer {
            self.error.get_or_insert(error);
        }
        self.waiting
            .is_empty()
            .then(|| self.error.take().map_or(Ok(()), Err))
    }
}

/// Whether the outbound SA is installed together with the inbound one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outbound {
    /// Yes: the peer is ready.
    Now,
    /// No: the peer installs its inbound SA only when it has our response.
    Later,
}

impl IkeSa {
    /// Makes a child in state CREATED. With `replaces`, it inherits what a rekey keeps.
    pub(crate) fn new_child(
        &mut self,
        env: &mut Env,
        conn: &ConnectionRef,
        index: usize,
        replaces: Option<ChildSaId>,
    ) -> ChildSaId {
        let id = env.new_child_id();
        let cfg = conn
            .children
            .get(index)
            .expect("callers take the index from this connection");
        let old = replaces.and_then(|old| self.children.get(&old));
        let (group, if_id, mark_in, mark_out) = match old {
            Some(old) => {
                env.policies.join(old.group.set, id);
                (old.group, old.if_id, old.mark_in, old.mark_out)
            }
            None => {
                let group =
                    env.policies
                        .acquire(&conn.name, &cfg.name, &self.remote_id, cfg.reqid, id);
                let inherited = self.if_id(conn, env);
                let if_id = resolve_if_id(env, cfg.if_id_in, cfg.if_id_out, inherited);
                let (mark_in, mark_out) = resolve_marks(env, &cfg.mark_in, &cfg.mark_out);
                (group, if_id, mark_in, mark_out)
            }
        };
        let mode = match cfg.mode {
            ChildMode::Ipsec(mode) => mode,
            ChildMode::TransportProxy => Mode::Transport,
            ChildMode::Pass | ChildMode::Drop => Mode::Tunnel,
        };
        let child = ChildSa {
            id,
            conn: conn.clone(),
            index,
            state: ChildState::Created,
            group,
            mode,
            local: self.local.ip(),
            remote: self.remote.ip(),
            encap: None,
            spi_in: 0,
            spi_out: 0,
            suite: None,
            local_ts: Vec::new(),
            remote_ts: Vec::new(),
            if_id,
            mark_in,
            mark_out,
            installed: None,
            rekey_at: None,
            rekey_planned: None,
            expires_at: None,
            pending_out: None,
            check_at: None,
            redundant: false,
            out_installed: false,
            remove_at: None,
            replaces,
            replaced_by: None,
            announced: false,
            retry_at: None,
            offer_configured: false,
        };
        self.children.insert(id, child);
        id
    }

    fn if_id(&mut self, conn: &ConnectionRef, env: &mut Env) -> (u32, u32) {
        if let Some(ids) = self.if_id {
            return ids;
        }
        let ids = resolve_if_id(env, conn.if_id_in, conn.if_id_out, (0, 0));
        self.if_id = Some(ids);
        ids
    }

    /// Asks for the inbound SPI of a child.
    pub(crate) fn alloc_spi(&self, env: &mut Env, id: ChildSaId, slot: Slot) -> Option<Token> {
        let child = self.children.get(&id)?;
        Some(env.plane(
            self.id,
            slot,
            Op::AllocSpi {
                src: child.remote,
                dst: child.local,
                reqid: child.group.reqid,
            },
        ))
    }

    /// Installs what was agreed. `initiated` is whether this side initiated the exchange.
    #[expect(
        clippy::too_many_arguments,
        reason = "everything that an installation rests on"
    )]
    pub(crate) fn install_child(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        keys: ChildKeys,
        initiated: bool,
        outbound: Outbound,
        slot: Slot,
    ) -> Installing {
        let mut installing = Installing {
            child: id,
            waiting: BTreeSet::new(),
            error: None,
        };
        let encap = self
            .nat
            .any()
            .then_some((self.local.port(), self.remote.port()));
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let Some(child) = self.children.get_mut(&id) else {
            return installing;
        };
        child.state = ChildState::Installing;
        child.encap = encap;
        child.local = local;
        child.remote = remote;

        let cfg = child.cfg().clone();
        let window = cfg.replay_window.unwrap_or(env.settings.replay_window);
        let below = |env: &mut Env, time: Duration| {
            let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            Duration::from_millis(env.rng.below(millis.saturating_add(1)))
        };
        let jitter = below(env, cfg.rand_time);
        child.rekey_at = (!cfg.rekey_time.is_zero()).then(|| {
            now.instant
                + cfg
                    .rekey_time
                    .saturating_sub(jitter)
                    .max(Duration::from_secs(1))
        });
        child.rekey_planned = child.rekey_at;
        child.expires_at = (!cfg.life_time.is_zero()).then(|| now.instant + cfg.life_time);
        let soft = |env: &mut Env, at: u64, random: u64| {
            let random = env.rng.below(random.saturating_add(1));
            (at != 0).then(|| at.saturating_sub(random).max(1))
        };
        let lifetime = Lifetime {
            soft_time: None,
            hard_time: (!cfg.life_time.is_zero()).then_some(cfg.life_time),
            soft_bytes: soft(env, cfg.rekey_bytes, cfg.rand_bytes),
            hard_bytes: (cfg.life_bytes != 0).then_some(cfg.life_bytes),
            soft_packets: soft(env, cfg.rekey_packets, cfg.rand_packets),
            hard_packets: (cfg.life_packets != 0).then_some(cfg.life_packets),
        };
        let (keys_out, keys_in) = if initiated {
            (keys.initiator, keys.responder)
        } else {
            (keys.responder, keys.initiator)
        };
        let inbound = child.entry(Direction::In, keys_in, lifetime, window);
        let out = Box::new(child.entry(Direction::Out, keys_out, lifetime, window));
        let policies = cfg.policies.then(|| child.policy_set());

        let owner = (self.id, id);
        if let Some(sa) = child.inbound() {
            env.by_sa.insert(sa, owner);
        }
        let mut wait = |token| {
            installing.waiting.insert(token);
        };
        wait(env.plane(self.id, slot, Op::InstallSa(Box::new(inbound))));
        match outbound {
            Outbound::Now => {
                child.out_installed = true;
                if let Some(sa) = child.outbound() {
                    env.by_sa.insert(sa, owner);
                }
                wait(env.plane(self.id, slot, Op::InstallSa(out)));
            }
            Outbound::Later => {
                child.pending_out = Some(out);
            }
        }
        if let Some(policies) = policies
            && let Some(op) = env.policies.want(id, policies)
        {
            wait(env.plane(self.id, slot, op));
        }
        installing
    }

    /// Installs the outbound SA that was held back.
    pub(crate) fn install_outbound(&mut self, env: &mut Env, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        let Some(entry) = child.pending_out.take() else {
            return;
        };
        child.out_installed = true;
        if let Some(sa) = child.outbound() {
            env.by_sa.insert(sa, (self.id, id));
        }
        env.plane(self.id, Slot::Child(id), Op::InstallSa(entry));
    }

    /// A child is installed. `announce` tells the world at once; one that a rekey made is told of
    /// with [`Self::announce_rekey`].
    pub(crate) fn child_installed(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        announce: bool,
    ) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.state = ChildState::Installed;
        child.installed = Some(now.instant);
        let line = format!(
            "CHILD_SA {}{{{}}} is established with SPIs {:08x}_i {:08x}_o and TS {} === {}{}",
            child.cfg().name,
            id,
            child.spi_in,
            child.spi_out,
            super::narrow::describe(&child.local_ts),
            super::narrow::describe(&child.remote_ts),
            if child.encap.is_some() {
                ", in UDP"
            } else {
                ""
            },
        );
        let (connection, name) = (child.conn.name.clone(), child.cfg().name.clone());
        if announce {
            child.announced = true;
        }
        self.log(env, LogGroup::Ike, 0, line);
        if announce {
            let sa = Box::new(self.info_with_child(id));
            env.event(Event::ChildUpDown { up: true, sa });
            env.request(super::env::Request::ChildUp {
                ike: self.id,
                connection,
                child: name,
            });
        }
        self.arm_children(now);
        self.changed(env);
    }

    /// `new` takes over from `old` in the eyes of the world. Once per `old`.
    pub(crate) fn announce_rekey(&mut self, env: &mut Env, old: ChildSaId, new: ChildSaId) {
        let Some(child) = self.children.get_mut(&new) else {
            return;
        };
        child.announced = true;
        let new_info = Box::new(child.info());
        let connection = child.conn.name.clone();
        let Some(old) = self.children.get_mut(&old) else {
            return;
        };
        old.replaced_by = Some(new);
        old.announced = false;
        old.retry_at = None;
        let old_info = Box::new(old.info());
        let sa = Box::new(self.info_without_children());
        env.event(Event::ChildRekey {
            sa,
            old: old_info,
            new: new_info,
        });
        env.count(Some(connection), crate::api::Counter::ChildRekey);
        self.changed(env);
    }

    /// Removes everything of a child from the data plane and from the listings.
    pub(crate) fn remove_child(&mut self, env: &mut Env, id: ChildSaId) -> Option<ChildSa> {
        let child = self.children.remove(&id)?;
        for sa in [child.inbound(), child.outbound()].into_iter().flatten() {
            if env.by_sa.get(&sa) == Some(&(self.id, id)) {
                env.by_sa.remove(&sa);
            }
        }
        if let Some(sa) = child.inbound() {
            env.plane_forget(Op::RemoveSa(sa));
        }
        if child.out_installed
            && let Some(sa) = child.outbound()
        {
            env.plane_forget(Op::RemoveSa(sa));
        }
        if let Some(op) = env.policies.release(child.group.set, id) {
            env.plane_forget(op);
        }
        if let Some(old) = child.replaces.and_then(|old| self.children.get_mut(&old))
            && old.replaced_by == Some(id)
        {
            old.replaced_by = None;
        }
        self.changed(env);
        Some(child)
    }

    /// Ends a child for good: as [`Self::remove_child`], and the world is told if it knew it.
    pub(crate) fn close_child(&mut self, env: &mut Env, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        if child.announced {
            child.announced = false;
            if child.state != ChildState::Deleted {
                child.state = ChildState::Deleted;
            }
            let sa = Box::new(self.info_with_child(id));
            env.event(Event::ChildUpDown { up: false, sa });
        }
        self.remove_child(env, id);
    }

    /// A replaced child is deleted at both ends: its outbound SA goes at once, its inbound SA after
    /// a delay that lets packets in flight arrive.
    pub(crate) fn retire_child(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let delay = env.settings.delete_rekeyed_delay;
        if delay.is_zero() {
            self.remove_child(env, id);
            return;
        }
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.state = ChildState::Deleted;
        child.announced = false;
        child.rekey_at = None;
        child.remove_at = Some(now.instant + delay);
        child.pending_out = None;
        child.check_at = None;
        if std::mem::take(&mut child.out_installed)
            && let Some(sa) = child.outbound()
        {
            env.by_sa.remove(&sa);
            env.plane_forget(Op::RemoveSa(sa));
        }
        self.arm_children(now);
        self.changed(env);
    }

    /// Arms the timer that serves all children.
    pub(crate) fn arm_children(&mut self, now: Now) {
        let next = self
            .children
            .values()
            .filter_map(ChildSa::next_deadline)
            .min()
            .map(|at| at.max(now.instant));
        self.timers.put(Timer::Child, next);
    }

    /// Listing of this IKE SA with one child.
    pub(crate) fn info_with_child(&self, id: ChildSaId) -> IkeSaInfo {
        let mut info = self.info_without_children();
        if let Some(child) = self.children.get(&id) {
            info.children.insert(id, child.info());
        }
        info
    }

    /// Moves the SAs of all children to this IKE SA's present addresses.
    pub(crate) fn move_children(&mut self, env: &mut Env) {
        let encap = self
            .nat
            .any()
            .then_some((self.local.port(), self.remote.port()));
        let (local, remote) = (self.local.ip(), self.remote.ip());
        let ids: Vec<ChildSaId> = self.children.keys().copied().collect();
        for id in ids {
            let owner = (self.id, id);
            let Some(child) = self.children.get_mut(&id) else {
                continue;
            };
            if child.local == local && child.remote == remote && child.encap == encap {
                continue;
            }
            let (old_in, old_out) = (child.inbound(), child.outbound());
            child.local = local;
            child.remote = remote;
            child.encap = encap;
            if child.installed.is_none() {
                continue;
            }
            let (udp_in, udp_out) = (child.udp(false), child.udp(true));
            let mut update = |sa: Option<SaId>, new: Option<SaId>, src, dst, encap| {
                let (Some(sa), Some(new)) = (sa, new) else {
                    return;
                };
                if env.by_sa.remove(&sa).is_some() {
                    env.by_sa.insert(new, owner);
                }
                env.plane_forget(Op::UpdateSa {
                    id: sa,
                    src,
                    dst,
                    encap,
                });
            };
            update(old_in, child.inbound(), remote, local, udp_in);
            if child.out_installed {
                update(old_out, child.outbound(), local, remote, udp_out);
            }
            if let Some(pending) = child.pending_out.as_mut() {
                pending.src = local;
                pending.dst = remote;
                pending.encap = udp_out;
            }
            if child.cfg().policies && child.state != ChildState::Deleted {
                let set = child.policy_set();
                if let Some(op) = env.policies.want(id, set) {
                    env.plane_forget(op);
                }
            }
        }
    }
}

fn resolve_if_id(env: &mut Env, id_in: IfId, id_out: IfId, inherited: (u32, u32)) -> (u32, u32) {
    let mut shared = None;
    let mut one = |env: &mut Env, spec: IfId, inherited: u32| match spec {
        IfId::None => inherited,
        IfId::Id(id) => id,
        IfId::Unique => *shared.get_or_insert_with(|| env.new_unique()),
        IfId::UniqueDir => env.new_unique(),
    };
    (one(env, id_in, inherited.0), one(env, id_out, inherited.1))
}

fn resolve_marks(
    env: &mut Env,
    mark_in: &MarkSpec,
    mark_out: &MarkSpec,
) -> (Option<Mark>, Option<Mark>) {
    let mut shared = None;
    let mut one = |env: &mut Env, spec: &MarkSpec| match *spec {
        MarkSpec::None | MarkSpec::Same(_) => None,
        MarkSpec::Mark(mark) => Some(mark),
        MarkSpec::Unique(mask) => {
            let value = *shared.get_or_insert_with(|| env.new_unique());
            Some(Mark {
                value: value & mask,
                mask,
            })
        }
        MarkSpec::UniqueDir(mask) => Some(Mark {
            value: env.new_unique() & mask,
            mask,
        }),
    };
    (one(env, mark_in), one(env, mark_out))
}
