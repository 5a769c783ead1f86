// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One CHILD SA: what was agreed, what is installed, and how it gets there and away again.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use swanherd_config::model::{Child, CopyDscp};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{
    Direction, Lifetime, Mode, Op, PolicyAction, PolicySet, SaEntry, SaId, SaKeys, UdpEncap,
};
use swanherd_ipsec::proposal::ChildSuite;

use super::child_offer::ChildFailure;
use super::env::{Env, Slot};
use super::idle::Idle;
use super::mode;
use super::narrow::covers;
use super::policies::{Group, Traffic};
use super::standby::Sign;
use super::unique::{self, Tags};
use super::{IkeSa, Packet};
use crate::api::{ChildSaId, ChildSaInfo, ChildState, ConnectionRef, FailureReason, Token};
use crate::wire::NotifyType;

/// How long the peer has to delete a CHILD SA that it has replaced, or made in vain.
pub(crate) const PEER_DELETE_LIMIT: Duration = Duration::from_secs(60);

/// How long an expired CHILD SA waits for the outcome of its rekeying, and for the peer to delete
/// it if that is the peer's turn.
pub(crate) const EXPIRED_LIMIT: Duration = Duration::from_secs(10);

/// A CHILD SA.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct ChildSa {
    pub(crate) id: ChildSaId,
    pub(crate) conn: ConnectionRef,
    /// Place in the connection's children.
    pub(crate) index: usize,
    pub(crate) state: ChildState,
    pub(crate) group: Group,
    pub(crate) mode: Mode,
    /// The packet that asked for it.
    pub(crate) packet: Option<Packet>,
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
    pub(crate) tags: Tags,
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
    /// Lost a collision: the side that made it is to delete it.
    pub(crate) redundant: bool,
    pub(crate) out_installed: bool,
    /// When it is put to use that stands by, if the peer is not heard before.
    pub(crate) use_at: Option<Instant>,
    /// What of the peer's is enough to put it to use before.
    pub(crate) use_on: Sign,
    /// A hard limit was reached.
    pub(crate) expired: bool,
    /// Somebody on this side wants it down.
    pub(crate) taken_down: bool,
    /// The data plane refused to put it to use.
    pub(crate) refused: bool,
    /// When the last of a replaced SA is removed.
    pub(crate) remove_at: Option<Instant>,
    /// The SA that this one replaces.
    pub(crate) replaces: Option<ChildSaId>,
    /// The SA that replaces this one.
    pub(crate) replaced_by: Option<ChildSaId>,
    /// Whether it was announced to the world as up, and nothing else since then.
    pub(crate) announced: bool,
    /// The SA that this one has taken over from, as long as the world was not told.
    pub(crate) untold: Option<ChildSaId>,
    /// When unsuccessful rekeying is tried again.
    pub(crate) retry_at: Option<Instant>,
    /// The configured instead of the agreed selectors are offered in the next rekey.
    pub(crate) offer_configured: bool,
    /// Whether it is in use.
    pub(crate) idle: Idle,
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

    /// Whether its end is an event: the world knows it, or the one that it has taken over from.
    pub(crate) fn is_known(&self) -> bool {
        self.announced || self.untold.is_some()
    }

    /// Whether it will go on serving its purpose.
    pub(crate) fn is_lasting(&self) -> bool {
        self.is_live() && !self.redundant && !self.expired
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
            if_id: self.tags.if_id,
            mark_in: self.tags.mark_in,
            mark_out: self.tags.mark_out,
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
        let idle = self.idle.check_at.filter(|_| self.is_live());
        [
            rekey,
            expire,
            self.check_at,
            self.remove_at,
            self.use_at,
            idle,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// What it carries.
    pub(crate) fn traffic(&self) -> Traffic {
        (self.local_ts.clone(), self.remote_ts.clone())
    }

    /// The ports of UDP encapsulation in one direction.
    pub(crate) fn udp(&self, outbound: bool) -> Option<UdpEncap> {
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

    /// The SA of one direction.
    pub(crate) fn entry(
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
        // Transport mode needs it for what else is sent to the peer; BEET takes the inner addresses
        // from it.
        let selector = match (self.mode, self.local_ts.first(), self.remote_ts.first()) {
            (Mode::Transport | Mode::Beet, Some(local), Some(remote)) => Some((*local, *remote)),
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
                self.tags.mark_out
            } else {
                self.tags.mark_in.filter(|_| cfg.mark_in_sa)
            },
            set_mark: if outbound {
                unique::set_mark(&cfg.set_mark_out, self.tags.mark_out)
            } else {
                unique::set_mark(&cfg.set_mark_in, self.tags.mark_in)
            },
            if_id: if outbound {
                self.tags.if_id.1
            } else {
                self.tags.if_id.0
            },
            selector,
            copy_df: cfg.copy_df,
            copy_ecn: cfg.copy_ecn,
            copy_dscp_out: copy_out,
            copy_dscp_in: copy_in,
            offload: cfg.hw_offload,
        }
    }

    /// The policies that it needs. While its outbound SA is there, packets take that one and no
    /// other, so that two SAs side by side never share the traffic by chance.
    pub(crate) fn policy_set(&self) -> PolicySet {
        self.policy_set_for(if self.out_installed { self.spi_out } else { 0 })
    }

    /// The policies that it needs, bound to that outbound SA; 0 is none.
    pub(crate) fn policy_set_for(&self, spi: u32) -> PolicySet {
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
                spi,
            },
            priority: (cfg.priority != 0).then_some(cfg.priority),
            mark_in: self.tags.mark_in,
            mark_out: self.tags.mark_out,
            if_id_in: self.tags.if_id.0,
            if_id_out: self.tags.if_id.1,
            routes: self.tags.if_id.1 == 0,
            trap: false,
            fwd_out: cfg.policies_fwd_out,
            offload: cfg.hw_offload,
        }
    }
}

impl IkeSa {
    /// Makes a child in state CREATED. With `replaces`, it inherits what a rekey keeps.
    ///
    /// # Errors
    /// If its configured request id is in use.
    pub(crate) fn new_child(
        &mut self,
        env: &mut Env,
        conn: &ConnectionRef,
        index: usize,
        replaces: Option<ChildSaId>,
    ) -> Result<ChildSaId, ChildFailure> {
        let id = env.new_child_id();
        let cfg = conn
            .children
            .get(index)
            .expect("callers take the index from this connection");
        let old = replaces.and_then(|old| self.children.get(&old));
        let (group, tags) = match old {
            Some(old) => {
                env.policies.join(old.group.set, id);
                (old.group, old.tags)
            }
            None => {
                let peer = &self.remote_id;
                let group = env
                    .policies
                    .acquire(&conn.name, &cfg.name, peer, cfg.reqid, id);
                let group = group.map_err(|taken| reqid_taken(&taken))?;
                let inherited = self.if_id(conn, env);
                (group, unique::tags(env, cfg, inherited, group.set))
            }
        };
        let mode = mode::configured(cfg);
        let child = ChildSa {
            id,
            conn: conn.clone(),
            index,
            state: ChildState::Created,
            group,
            mode,
            packet: None,
            local: self.local.ip(),
            remote: self.remote.ip(),
            encap: None,
            spi_in: 0,
            spi_out: 0,
            suite: None,
            local_ts: Vec::new(),
            remote_ts: Vec::new(),
            tags,
            installed: None,
            rekey_at: None,
            rekey_planned: None,
            expires_at: None,
            pending_out: None,
            check_at: None,
            redundant: false,
            out_installed: false,
            use_at: None,
            use_on: Sign::Message,
            expired: false,
            taken_down: false,
            refused: false,
            remove_at: None,
            replaces,
            replaced_by: None,
            announced: false,
            untold: None,
            retry_at: None,
            offer_configured: false,
            idle: Idle::default(),
        };
        self.children.insert(id, child);
        Ok(id)
    }

    /// The peer's identity and the traffic of a child are agreed: decides with which others it
    /// shares request id and policies.
    pub(crate) fn settle_group(
        &mut self,
        env: &mut Env,
        id: ChildSaId,
    ) -> Result<(), ChildFailure> {
        let Some(child) = self.children.get(&id) else {
            return Ok(());
        };
        let (set, traffic) = (child.group.set, child.traffic());
        if child.replaces.is_some() {
            env.policies.joined(set, id, traffic);
            return Ok(());
        }
        let (conn, cfg) = (child.conn.clone(), child.cfg().clone());
        let unserved = child.packet.is_some_and(|(local, remote)| {
            !covers(&traffic.0, &[local]) || !covers(&traffic.1, &[remote])
        });
        if unserved
            && env
                .policies
                .is_carried(&conn.name, &cfg.name, &self.remote_id, id, &traffic)
        {
            return Err(ChildFailure::new(
                FailureReason::SelectorMismatch,
                NotifyType::TsUnacceptable,
                "the peer has nothing for the traffic that asked but what there is already",
            ));
        }
        let group = env
            .policies
            .settle(set, &self.remote_id, cfg.reqid, id, traffic)
            .map_err(|taken| reqid_taken(&taken))?;
        if group.set == set {
            return Ok(());
        }
        let inherited = self.if_id(&conn, env);
        let tags = unique::tags(env, &cfg, inherited, group.set);
        if let Some(child) = self.children.get_mut(&id) {
            child.group = group;
            child.tags = tags;
        }
        Ok(())
    }

    fn if_id(&mut self, conn: &ConnectionRef, env: &mut Env) -> (u32, u32) {
        if let Some(ids) = self.if_id {
            return ids;
        }
        // What this side initiates is what its traps stand for.
        if let Some(ids) = env.trap_if_ids.get(&conn.name).filter(|_| self.initiator) {
            self.if_id = Some(*ids);
            return *ids;
        }
        let ids = unique::connection_if_id(env, conn);
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
}

fn reqid_taken(taken: &super::policies::ReqidTaken) -> ChildFailure {
    ChildFailure::new(
        FailureReason::Resources,
        NotifyType::NoProposalChosen,
        taken.to_string(),
    )
}
