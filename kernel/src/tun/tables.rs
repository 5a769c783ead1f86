// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The SAD and SPD of the TUN plane, shared by its control side and its packet threads.
//!
//! Packet threads hold the tables' lock for reading while they look up, and an SA's own lock while
//! they process a batch for it. The control side takes the write lock for the moment of a change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swanherd_esp::{InboundSa, OutboundSa, Spd, UnsupportedSuite};
use swanherd_ipsec::plane::{SaCounters, SaEntry, SaId, UdpEncap};

use super::ecn::ClassRules;

/// Everything that is installed.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) spd: Spd,
    /// By SPI: this plane hands each SPI out once, whatever the address.
    inbound: BTreeMap<u32, Arc<Inbound>>,
    outbound: BTreeMap<SaId, Arc<Outbound>>,
    /// Outbound SAs of each request id, newest last.
    by_reqid: BTreeMap<u32, Vec<SaId>>,
    reserved: BTreeSet<u32>,
}

pub(super) struct Inbound {
    pub(super) reqid: u32,
    pub(super) class: ClassRules,
    state: Mutex<InboundState>,
}

pub(super) struct InboundState {
    pub(super) id: SaId,
    pub(super) sa: InboundSa,
    /// Where packets are expected from.
    pub(super) peer: SocketAddr,
    /// The last other source that was reported.
    pub(super) reported: Option<SocketAddr>,
    pub(super) last_used: u64,
}

pub(super) struct Outbound {
    pub(super) reqid: u32,
    pub(super) class: ClassRules,
    state: Mutex<OutboundState>,
}

pub(super) struct OutboundState {
    pub(super) id: SaId,
    pub(super) sa: OutboundSa,
    pub(super) local: IpAddr,
    pub(super) peer: SocketAddr,
    pub(super) last_used: u64,
}

impl Inbound {
    pub(super) fn new(entry: &SaEntry, encap: UdpEncap) -> Result<Self, UnsupportedSuite> {
        Ok(Self {
            reqid: entry.reqid,
            class: ClassRules::of(entry),
            state: Mutex::new(InboundState {
                id: entry.id(),
                sa: InboundSa::new(entry)?,
                peer: SocketAddr::new(entry.src, encap.src_port),
                reported: None,
                last_used: 0,
            }),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, InboundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbound {
    pub(super) fn new(
        entry: &SaEntry,
        encap: UdpEncap,
        iv_seed: &[u8; 16],
    ) -> Result<Self, UnsupportedSuite> {
        Ok(Self {
            reqid: entry.reqid,
            class: ClassRules::of(entry),
            state: Mutex::new(OutboundState {
                id: entry.id(),
                sa: OutboundSa::new(entry, iv_seed)?,
                local: entry.src,
                peer: SocketAddr::new(entry.dst, encap.dst_port),
                last_used: 0,
            }),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, OutboundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InboundState {
    fn counters(&self) -> (SaId, SaCounters) {
        let counters = SaCounters {
            bytes: self.sa.bytes(),
            packets: self.sa.packets(),
            last_used: self.last_used,
            replay_drops: self.sa.replay_drops(),
            integrity_drops: self.sa.integrity_drops(),
        };
        (self.id, counters)
    }
}

impl OutboundState {
    fn counters(&self) -> (SaId, SaCounters) {
        let counters = SaCounters {
            bytes: self.sa.bytes(),
            packets: self.sa.packets(),
            last_used: self.last_used,
            ..SaCounters::default()
        };
        (self.id, counters)
    }
}

impl Tables {
    pub(super) fn inbound(&self, spi: u32) -> Option<&Arc<Inbound>> {
        self.inbound.get(&spi)
    }

    /// The SA that a policy with this request id sends through: the one it names, else the newest.
    pub(super) fn outbound(&self, reqid: u32, spi: u32, peer: IpAddr) -> Option<&Arc<Outbound>> {
        if spi != 0
            && let Some(named) = self.outbound.get(&SaId { spi, dst: peer })
        {
            return Some(named);
        }
        let newest = self.by_reqid.get(&reqid)?.last()?;
        self.outbound.get(newest)
    }

    pub(super) fn is_free(&self, spi: u32) -> bool {
        !self.reserved.contains(&spi) && !self.inbound.contains_key(&spi)
    }

    pub(super) fn reserve(&mut self, spi: u32) {
        self.reserved.insert(spi);
    }

    pub(super) fn has_inbound(&self, spi: u32) -> bool {
        self.inbound.contains_key(&spi)
    }

    pub(super) fn has_outbound(&self, id: SaId) -> bool {
        self.outbound.contains_key(&id)
    }

    pub(super) fn insert_inbound(&mut self, spi: u32, sa: Inbound) {
        self.reserved.remove(&spi);
        self.inbound.insert(spi, Arc::new(sa));
    }

    pub(super) fn insert_outbound(&mut self, id: SaId, sa: Outbound) {
        self.by_reqid.entry(sa.reqid).or_default().push(id);
        self.outbound.insert(id, Arc::new(sa));
    }

    /// Removes an SA or a reservation. Whether something was there.
    pub(super) fn remove(&mut self, id: SaId) -> bool {
        if let Some(sa) = self.outbound.remove(&id) {
            self.forget_reqid(sa.reqid, id);
            return true;
        }
        if self.inbound_is(id) {
            self.inbound.remove(&id.spi);
            return true;
        }
        self.reserved.remove(&id.spi)
    }

    /// Moves an SA to other addresses. `false` if it is not there.
    pub(super) fn relocate(&mut self, id: SaId, src: IpAddr, dst: IpAddr, encap: UdpEncap) -> bool {
        let moved = SaId { spi: id.spi, dst };
        if let Some(sa) = self.outbound.remove(&id) {
            {
                let mut state = sa.state();
                state.id = moved;
                state.local = src;
                state.peer = SocketAddr::new(dst, encap.dst_port);
            }
            if let Some(ids) = self.by_reqid.get_mut(&sa.reqid) {
                for known in ids.iter_mut().filter(|known| **known == id) {
                    *known = moved;
                }
            }
            self.outbound.insert(moved, sa);
            return true;
        }
        if self.inbound_is(id)
            && let Some(sa) = self.inbound.get(&id.spi)
        {
            let mut state = sa.state();
            state.id = moved;
            state.peer = SocketAddr::new(src, encap.src_port);
            state.reported = None;
            return true;
        }
        false
    }

    /// Counters of every SA.
    pub(super) fn counters(&self) -> BTreeMap<SaId, SaCounters> {
        let outbound = self.outbound.values().map(|sa| sa.state().counters());
        let inbound = self.inbound.values().map(|sa| sa.state().counters());
        outbound.chain(inbound).collect()
    }

    /// Counters of one SA.
    pub(super) fn counters_of(&self, id: SaId) -> Option<SaCounters> {
        if let Some(sa) = self.outbound.get(&id) {
            return Some(sa.state().counters().1);
        }
        let (found, counters) = self.inbound.get(&id.spi)?.state().counters();
        (found == id).then_some(counters)
    }

    fn inbound_is(&self, id: SaId) -> bool {
        self.inbound
            .get(&id.spi)
            .is_some_and(|sa| sa.state().id == id)
    }

    fn forget_reqid(&mut self, reqid: u32, id: SaId) {
        if let Some(ids) = self.by_reqid.get_mut(&reqid) {
            ids.retain(|known| *known != id);
            if ids.is_empty() {
                self.by_reqid.remove(&reqid);
            }
        }
    }
}
