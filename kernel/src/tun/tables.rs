// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The SAD and SPD of the TUN plane, shared by its control side and its packet threads.
//!
//! Packet threads hold the tables' lock for reading while they look up, and an SA's own lock while
//! they process a batch for it. The control side takes the write lock for the moment of a change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swanherd_esp::{InboundSa, OutboundSa, Protection, Spd, UnsupportedSuite};
use swanherd_ipsec::plane::{SaCounters, SaEntry, SaId, UdpEncap};

use super::ecn::ClassRules;

/// Everything that is installed.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) spd: Spd,
    /// By SPI: this plane hands each SPI out once, whatever the address.
    inbound: BTreeMap<u32, Arc<Inbound>>,
    outbound: BTreeMap<SaId, Arc<Outbound>>,
    /// SPIs of outbound SAs by what templates ask for, newest last.
    by_template: BTreeMap<Template, Vec<u32>>,
    reserved: BTreeSet<u32>,
}

/// What the template of a policy asks of an outbound SA, its SPI aside. The kernel does not look at
/// the SA's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Template {
    pub(super) reqid: u32,
    pub(super) remote: IpAddr,
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
    /// Past a soft limit; others are preferred.
    dying: AtomicBool,
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
            dying: AtomicBool::new(false),
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

    /// To be called when a soft limit was reached.
    pub(super) fn set_dying(&self) {
        self.dying.store(true, Ordering::Relaxed);
    }
}

impl InboundState {
    /// By what this SA's packets are protected.
    pub(super) fn protection(&self, reqid: u32) -> Protection {
        Protection {
            reqid,
            local: self.id.dst,
            remote: self.peer.ip(),
        }
    }

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
    fn template(&self, reqid: u32) -> Template {
        Template {
            reqid,
            remote: self.id.dst,
        }
    }

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

    /// The SA that a policy with this template sends through. One that names an SPI has no other;
    /// else, as the kernel chooses, those past a soft limit come last, and newer before older ones.
    pub(super) fn outbound(&self, template: &Template, spi: u32) -> Option<&Arc<Outbound>> {
        let spis = self.by_template.get(template)?;
        let sa = |spi: &u32| {
            self.outbound.get(&SaId {
                spi: *spi,
                dst: template.remote,
            })
        };
        if spi != 0 {
            return spis.contains(&spi).then(|| sa(&spi)).flatten();
        }
        let mut newest = spis.iter().rev().filter_map(sa);
        newest
            .clone()
            .find(|sa| !sa.dying.load(Ordering::Relaxed))
            .or_else(|| newest.next())
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
        let template = sa.state().template(sa.reqid);
        self.by_template.entry(template).or_default().push(id.spi);
        self.outbound.insert(id, Arc::new(sa));
    }

    /// Removes an SA or a reservation. Whether something was there.
    pub(super) fn remove(&mut self, id: SaId) -> bool {
        if let Some(sa) = self.outbound.remove(&id) {
            let template = sa.state().template(sa.reqid);
            self.forget_template(&template, id.spi);
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
            let (before, after) = {
                let mut state = sa.state();
                let before = state.template(sa.reqid);
                state.id = moved;
                state.local = src;
                state.peer = SocketAddr::new(dst, encap.dst_port);
                (before, state.template(sa.reqid))
            };
            if before != after {
                self.forget_template(&before, id.spi);
                self.by_template.entry(after).or_default().push(id.spi);
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

    /// Notes that an SA has reached its soft limit in time. Whether that is to be reported.
    pub(super) fn soften(&self, id: SaId) -> bool {
        if let Some(sa) = self.outbound.get(&id) {
            sa.set_dying();
            return sa.state().sa.soften();
        }
        self.inbound.get(&id.spi).is_some_and(|sa| {
            let mut state = sa.state();
            state.id == id && state.sa.soften()
        })
    }

    /// How many SAs there are.
    pub(super) fn sas(&self) -> usize {
        self.inbound.len() + self.outbound.len()
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

    fn forget_template(&mut self, template: &Template, spi: u32) {
        if let Some(spis) = self.by_template.get_mut(template) {
            spis.retain(|known| *known != spi);
            if spis.is_empty() {
                self.by_template.remove(template);
            }
        }
    }
}
