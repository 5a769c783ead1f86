// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Security Policy Database (RFC 4301 section 4.4.1): finds the policy of a packet.
//!
//! Each pair of selectors is filed under the lengths and bits of the smallest prefixes that cover
//! its addresses (tuple space search). A look-up probes one ordered map per *combination of
//! lengths* in use, which real configurations have few of, so thousands of tunnels cost what one
//! does. Prefixes only file; ranges, protocols and ports are compared afterwards.

use std::collections::BTreeMap;
use std::net::IpAddr;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};

use crate::Flow;

/// What the database says of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The set that decided.
    pub set: u32,
    /// Its action.
    pub action: PolicyAction,
}

/// All policies of a host.
#[derive(Clone, Debug, Default)]
pub struct Spd {
    sets: BTreeMap<u32, Installed>,
    entries: BTreeMap<Tuple, Vec<Entry>>,
    /// Combinations of lengths in use, with the number of entries under each.
    shapes: BTreeMap<Shape, usize>,
    next_serial: u64,
    bypasses: usize,
}

#[derive(Clone, Debug)]
struct Installed {
    set: PolicySet,
    /// Order of installation, which replacing does not change.
    serial: u64,
}

/// Family and lengths of the covering prefixes of local and remote addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    v6: bool,
    local_len: u8,
    remote_len: u8,
}

/// A shape with the bits of both prefixes, the rest cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tuple {
    shape: Shape,
    local: u128,
    remote: u128,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    priority: u32,
    /// Of equal priorities the older decides.
    serial: u64,
    set: u32,
    action: PolicyAction,
    local: TrafficSelector,
    remote: TrafficSelector,
}

impl Spd {
    /// Installs a set, or replaces the one of the same id. `priority` tells the priority of each
    /// pair of selectors, local and remote; lower ones decide first.
    pub fn insert(
        &mut self,
        set: PolicySet,
        priority: impl Fn(&TrafficSelector, &TrafficSelector) -> u32,
    ) {
        let replaced = self.sets.get(&set.id).map(|installed| installed.serial);
        self.remove(set.id);
        let serial = replaced.unwrap_or(self.next_serial);
        self.next_serial = self.next_serial.max(serial + 1);
        for (local, remote) in pairs(&set) {
            let Some(tuple) = Tuple::of(local, remote) else {
                continue;
            };
            let mut entry = Entry {
                priority: priority(local, remote),
                serial,
                set: set.id,
                action: set.action,
                local: *local,
                remote: *remote,
            };
            let entries = self.entries.entry(tuple).or_default();
            let twin = entries.iter().position(|other| {
                other.priority == entry.priority && other.selects_the_same(local, remote)
            });
            // A second policy for the very same packets takes the place of the first while it
            // lasts.
            let at = match twin {
                Some(at) => {
                    entry.serial = entries[at].serial;
                    at
                }
                None => entries.partition_point(|e| e.rank() <= entry.rank()),
            };
            entries.insert(at, entry);
            *self.shapes.entry(tuple.shape).or_default() += 1;
        }
        self.bypasses += usize::from(set.action == PolicyAction::Bypass);
        self.sets.insert(set.id, Installed { set, serial });
    }

    /// Removes a set by id and returns it.
    pub fn remove(&mut self, id: u32) -> Option<PolicySet> {
        let set = self.sets.remove(&id)?.set;
        self.bypasses -= usize::from(set.action == PolicyAction::Bypass);
        for (local, remote) in pairs(&set) {
            let Some(tuple) = Tuple::of(local, remote) else {
                continue;
            };
            let Some(entries) = self.entries.get_mut(&tuple) else {
                continue;
            };
            let before = entries.len();
            entries.retain(|entry| entry.set != id);
            let removed = before - entries.len();
            if entries.is_empty() {
                self.entries.remove(&tuple);
            }
            if let Some(count) = self.shapes.get_mut(&tuple.shape) {
                *count -= removed;
                if *count == 0 {
                    self.shapes.remove(&tuple.shape);
                }
            }
        }
        Some(set)
    }

    /// The set of this id.
    pub fn get(&self, id: u32) -> Option<&PolicySet> {
        self.sets.get(&id).map(|installed| &installed.set)
    }

    /// All sets by id.
    pub fn sets(&self) -> impl Iterator<Item = &PolicySet> {
        self.sets.values().map(|installed| &installed.set)
    }

    /// How many sets let packets pass in clear.
    pub fn bypasses(&self) -> usize {
        self.bypasses
    }

    /// An installed set that selects the very packets that `set` selects, for SAs of another
    /// request id, and the pair of selectors in question. No packet could tell the two apart.
    pub fn conflict(
        &self,
        set: &PolicySet,
    ) -> Option<(&PolicySet, TrafficSelector, TrafficSelector)> {
        let wanted = reqid(set)?;
        pairs(set).find_map(|(local, remote)| {
            let entries = self.entries.get(&Tuple::of(local, remote)?)?;
            let other = entries.iter().find(|entry| {
                entry.set != set.id
                    && entry.selects_the_same(local, remote)
                    && matches!(entry.action, PolicyAction::Protect { reqid, .. } if reqid != wanted)
            })?;
            Some((self.get(other.set)?, *local, *remote))
        })
    }

    /// Whether a set selects anything at all: one whose selectors are of different address
    /// families, side against side, does not.
    pub fn selects_anything(set: &PolicySet) -> bool {
        pairs(set).any(|(local, remote)| Tuple::of(local, remote).is_some())
    }

    /// The policy of an outbound packet, or `None` if no policy selects it. For an inbound packet
    /// ask with its flow [reversed](Flow::reversed).
    pub fn lookup(&self, flow: &Flow) -> Option<Verdict> {
        let (local, remote) = (bits(flow.src), bits(flow.dst));
        let v6 = flow.src.is_ipv6();
        let mut best: Option<&Entry> = None;
        for shape in self.shapes.keys().filter(|shape| shape.v6 == v6) {
            let tuple = Tuple {
                shape: *shape,
                local: local & mask(v6, shape.local_len),
                remote: remote & mask(v6, shape.remote_len),
            };
            let Some(entries) = self.entries.get(&tuple) else {
                continue;
            };
            // In order of rank: the first that selects the packet is the best of this tuple.
            let found = entries
                .iter()
                .find(|entry| flow.is_selected(&entry.local, &entry.remote));
            if let Some(found) = found
                && best.is_none_or(|best| found.rank() < best.rank())
            {
                best = Some(found);
            }
        }
        best.map(|entry| Verdict {
            set: entry.set,
            action: entry.action,
        })
    }

    /// Whether a packet that `sa` protected may come in (RFC 4301 section 5.2, step 4): the policy
    /// that decides on it asks for protection by such an SA.
    pub fn admits_inbound(&self, sa: &Protection, flow: &Flow) -> bool {
        let Some(verdict) = self.lookup(&flow.reversed()) else {
            return false;
        };
        let PolicyAction::Protect {
            local,
            remote,
            reqid,
            ..
        } = verdict.action
        else {
            return false;
        };
        (reqid == 0 || reqid == sa.reqid) && local == sa.local && remote == sa.remote
    }
}

/// By what an inbound packet was protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Request id of the SA.
    pub reqid: u32,
    /// Outer destination.
    pub local: IpAddr,
    /// Outer source.
    pub remote: IpAddr,
}

impl Entry {
    /// Lower ones decide first.
    fn rank(&self) -> (u32, u64) {
        (self.priority, self.serial)
    }

    fn selects_the_same(&self, local: &TrafficSelector, remote: &TrafficSelector) -> bool {
        self.local == *local && self.remote == *remote
    }
}

impl Tuple {
    /// `None` if the selectors are of different families: they select nothing.
    fn of(local: &TrafficSelector, remote: &TrafficSelector) -> Option<Self> {
        let v6 = local.start.is_ipv6();
        if [local.end, remote.start, remote.end]
            .iter()
            .any(|addr| addr.is_ipv6() != v6)
        {
            return None;
        }
        let local_len = covering(v6, local.start, local.end);
        let remote_len = covering(v6, remote.start, remote.end);
        Some(Self {
            shape: Shape {
                v6,
                local_len,
                remote_len,
            },
            local: bits(local.start) & mask(v6, local_len),
            remote: bits(remote.start) & mask(v6, remote_len),
        })
    }
}

fn pairs(set: &PolicySet) -> impl Iterator<Item = (&TrafficSelector, &TrafficSelector)> {
    set.local
        .iter()
        .flat_map(|local| set.remote.iter().map(move |remote| (local, remote)))
}

fn reqid(set: &PolicySet) -> Option<u32> {
    match set.action {
        PolicyAction::Protect { reqid, .. } => Some(reqid),
        PolicyAction::Bypass | PolicyAction::Discard => None,
    }
}

/// Address bits, left-aligned for neither family: IPv4 sits in the low 32.
fn bits(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => u128::from(addr.to_bits()),
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

/// Length of the longest prefix that covers both addresses.
fn covering(v6: bool, start: IpAddr, end: IpAddr) -> u8 {
    let common = (bits(start) ^ bits(end)).leading_zeros() as u8;
    if v6 { common } else { common - 96 }
}

fn mask(v6: bool, len: u8) -> u128 {
    let width = if v6 { 128 } else { 32 };
    u128::MAX.checked_shl(width - u32::from(len)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
