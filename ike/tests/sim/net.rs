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

/// A NAT with one host behind it. The inside reaches everything; the outside what answers to it,
/// or is forwarded.
#[derive(Clone, Debug)]
pub(crate) struct Nat {
    pub(crate) inside: IpAddr,
    pub(crate) outside: IpAddr,
    mappings: BTreeMap<u16, u16>,
    next_port: u16,
}

impl Nat {
    pub(crate) fn new(inside: IpAddr, outside: IpAddr) -> Self {
        Self {
            inside,
            outside,
            mappings: BTreeMap::new(),
            next_port: 20_000,
        }
    }

    /// One that forwards the ports of IKE to the inside.
    pub(crate) fn forwarding(inside: IpAddr, outside: IpAddr) -> Self {
        let mut nat = Self::new(inside, outside);
        nat.mappings = BTreeMap::from([(500, 500), (4500, 4500)]);
        nat
    }

    /// Forgets all mappings: what the host sends from now on comes from other ports.
    pub(crate) fn rebind(&mut self) {
        self.mappings.clear();
    }

    /// The port that the outside sees for an inside port.
    pub(crate) fn outside_port(&mut self, inside: u16) -> u16 {
        let next = &mut self.next_port;
        *self.mappings.entry(inside).or_insert_with(|| {
            *next += 1;
            *next
        })
    }

    fn inside_port(&self, outside: u16) -> Option<u16> {
        self.mappings
            .iter()
            .find(|(_, port)| **port == outside)
            .map(|(inside, _)| *inside)
    }

    /// Source and destination as they leave, or `None` if there is no mapping.
    pub(crate) fn translate(
        &mut self,
        mut source: SocketAddr,
        mut destination: SocketAddr,
    ) -> Option<(SocketAddr, SocketAddr)> {
        if source.ip() == self.inside {
            source = SocketAddr::new(self.outside, self.outside_port(source.port()));
        }
        if destination.ip() == self.inside {
            // Nobody outside can address the inside.
            return None;
        }
        if destination.ip() == self.outside {
            let port = self.inside_port(destination.port())?;
            destination = SocketAddr::new(self.inside, port);
        }
        Some((source, destination))
    }
}

/// The network between all hosts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Network {
    pub(crate) conditions: Conditions,
    pub(crate) nat: Option<Nat>,
    /// Another one, for another host.
    pub(crate) other_nat: Option<Nat>,
    /// Nothing gets through.
    pub(crate) cut: bool,
    /// Nothing gets through from and to these addresses.
    pub(crate) dead: BTreeSet<IpAddr>,
    /// IPv4 packets longer than this are refused where they are sent, and the sender is told.
    pub(crate) link_mtu: Option<usize>,
    /// What names stand for, and how long it takes to find out. Others are those of hosts.
    pub(crate) names: BTreeMap<String, (Duration, Vec<IpAddr>)>,
}
