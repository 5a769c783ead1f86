// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated network: delay, loss, duplication, reordering, MTU, and a NAT.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

/// A small generator (SplitMix64): the same numbers on every platform, for ever.
#[derive(Clone, Debug)]
pub(crate) struct SimRng(u64);

impl SimRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// True in `permille` of 1000 cases.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.next() % 1000 < permille
    }

    /// One of `count` numbers from zero.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % count as u64).unwrap()
    }

    /// A time up to one of several limits.
    pub(crate) fn seconds(&mut self, limits: [u64; 3]) -> Duration {
        let limit = limits[self.below(3)];
        Duration::from_millis(self.next() % (limit * 1000))
    }

    pub(crate) fn millis(&mut self, range: &RangeInclusive<u64>) -> Duration {
        let width = range.end() - range.start() + 1;
        Duration::from_millis(range.start() + self.next() % width)
    }

    pub(crate) fn seed(&mut self) -> [u8; 32] {
        let mut out = [0; 32];
        for chunk in out.chunks_exact_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes());
        }
        out
    }
}

/// How the network treats datagrams. Reordering follows from a delay that varies.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    /// One way, in milliseconds.
    pub(crate) delay: RangeInclusive<u64>,
    /// Of 1000.
    pub(crate) loss: u64,
    /// Of 1000.
    pub(crate) duplication: u64,
    /// Of the IPv4 packet; larger ones are lost.
    pub(crate) mtu: usize,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            delay: 10..=10,
            loss: 0,
            duplication: 0,
            mtu: 1500,
        }
    }
}

impl Conditions {
    /// A bad day.
    pub(crate) fn rough(loss: u64) -> Self {
        Self {
            delay: 5..=250,
            loss,
            duplication: 50,
            mtu: 1500,
        }
    }
}

/// A NAT with hosts behind it. The inside reaches everything; the outside what answers to it, or
/// is forwarded.
#[derive(Clone, Debug)]
pub(crate) struct Nat {
    inside: BTreeSet<IpAddr>,
    pub(crate) outside: IpAddr,
    /// Inside and outside ports, and when they were last used from the inside.
    mappings: BTreeMap<SocketAddr, (u16, Duration)>,
    next_port: u16,
    /// How long an unused mapping lasts.
    pub(crate) idle: Duration,
}

impl Nat {
    pub(crate) fn new(inside: IpAddr, outside: IpAddr) -> Self {
        Self {
            inside: BTreeSet::from([inside]),
            outside,
            mappings: BTreeMap::new(),
            next_port: 20_000,
            idle: Duration::MAX,
        }
    }

    /// One that forwards the ports of IKE to the inside.
    pub(crate) fn forwarding(inside: IpAddr, outside: IpAddr) -> Self {
        let mut nat = Self::new(inside, outside);
        nat.mappings = [500, 4500]
            .map(|port| (SocketAddr::new(inside, port), (port, Duration::ZERO)))
            .into();
        nat
    }

    /// Another host behind it.
    pub(crate) fn shelter(&mut self, inside: IpAddr) {
        self.inside.insert(inside);
    }

    /// Forgets all mappings: what the hosts send from now on comes from other ports.
    pub(crate) fn rebind(&mut self) {
        self.mappings.clear();
    }

    /// The port that the outside sees for an inside port.
    pub(crate) fn outside_port(&mut self, inside: SocketAddr, now: Duration) -> u16 {
        let mapping = self.mappings.entry(inside).or_insert((0, now));
        if mapping.0 == 0 || now.saturating_sub(mapping.1) > self.idle {
            self.next_port = self.next_port.checked_add(1).unwrap_or(20_001);
            mapping.0 = self.next_port;
        }
        mapping.1 = now;
        mapping.0
    }

    fn inside_of(&self, outside: u16, now: Duration) -> Option<SocketAddr> {
        self.mappings
            .iter()
            .find(|(_, (port, used))| *port == outside && now.saturating_sub(*used) <= self.idle)
            .map(|(inside, _)| *inside)
    }
}

/// The network between all hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) conditions: Conditions,
    /// Those of one host's link, where they differ.
    pub(crate) links: BTreeMap<usize, Conditions>,
    pub(crate) nats: Vec<Nat>,
    /// Nothing gets through.
    pub(crate) cut: bool,
    /// Nothing gets through from and to these addresses.
    pub(crate) dead: BTreeSet<IpAddr>,
    /// IPv4 packets longer than this are refused where they are sent, and the sender is told.
    pub(crate) link_mtu: Option<usize>,
    /// What names stand for, and how long it takes to find out. Others are those of hosts.
    pub(crate) names: BTreeMap<String, (Duration, Vec<IpAddr>)>,
    /// Nothing gets to these hosts.
    pub(crate) deaf: BTreeSet<usize>,
    /// Nothing gets away from these hosts.
    pub(crate) mute: BTreeSet<usize>,
}

impl Network {
    /// How datagrams between two hosts are treated.
    pub(crate) fn between(&self, from: usize, to: Option<usize>) -> &Conditions {
        let link = |host| self.links.get(&host);
        link(from).or_else(|| link(to?)).unwrap_or(&self.conditions)
    }

    /// Whether nothing gets from one host to the other.
    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut || self.mute.contains(&from) || self.deaf.contains(&to)
    }

    /// Source and destination as they arrive, or `None` if nobody is there.
    pub(crate) fn translate(
        &mut self,
        mut source: SocketAddr,
        mut destination: SocketAddr,
        now: Duration,
    ) -> Option<(SocketAddr, SocketAddr)> {
        for nat in &mut self.nats {
            // Nobody outside can address the inside.
            if nat.inside.contains(&destination.ip()) {
                return None;
            }
            if nat.inside.contains(&source.ip()) {
                source = SocketAddr::new(nat.outside, nat.outside_port(source, now));
            }
        }
        if let Some(nat) = self.nats.iter().find(|nat| nat.outside == destination.ip()) {
            destination = nat.inside_of(destination.port(), now)?;
        }
        Some((source, destination))
    }

    /// Who is behind an address, if that is the address of a NAT with one host behind it.
    pub(crate) fn inside_of(&self, addr: IpAddr) -> IpAddr {
        let nat = self.nats.iter().find(|nat| nat.outside == addr);
        nat.and_then(|nat| nat.inside.first().copied())
            .unwrap_or(addr)
    }
}
