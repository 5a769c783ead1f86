// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Security Policy Database (RFC 4301 section 4.4.1): finds the policy of a packet.
//!
//! Each pair of selectors is filed under the lengths and bits of the smallest prefixes that cover
//! its addresses (tuple space search). A look-up probes one ordered map per *combination of
//! lengths* in use, which real configurations have few of, so thousands of tunnels cost what one
//! does. Prefixes only file; ranges, protocols and ports are compared afterwards.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};

use crate::Flow;

/// Classes of computed priorities, lower wins. They are strongSwan's: shunts before children,
/// children before traps.
const BASE_SHUNT: u32 = 200_000;
const BASE_CHILD: u32 = 400_000;
const BASE_TRAP: u32 = 600_000;

/// What the database says of an outbound packet.
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
    sets: BTreeMap<u32, PolicySet>,
    outbound: BTreeMap<Tuple, Vec<Entry>>,
    /// Combinations of lengths in use, with the number of entries under each.
    shapes: BTreeMap<Shape, usize>,
    by_reqid: BTreeMap<u32, Vec<u32>>,
    generation: u64,
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
    set: u32,
    action: PolicyAction,
    local: TrafficSelector,
    remote: TrafficSelector,
}

impl Spd {
    /// Installs a set, or replaces the one of the same id.
    pub fn insert(&mut self, set: PolicySet) {
        self.remove(set.id);
        for (local, remote) in pairs(&set) {
            let Some(tuple) = Tuple::of(local, remote) else {
                continue;
            };
            let entry = Entry {
                priority: priority(&set, local, remote),
                set: set.id,
                action: set.action,
                local: *local,
                remote: *remote,
            };
            let entries = self.outbound.entry(tuple).or_default();
            let at =
                entries.partition_point(|e| (e.priority, e.set) <= (entry.priority, entry.set));
            entries.insert(at, entry);
            *self.shapes.entry(tuple.shape).or_default() += 1;
        }
        if let Some(reqid) = reqid(&set) {
            self.by_reqid.entry(reqid).or_default().push(set.id);
        }
        self.sets.insert(set.id, set);
        self.generation += 1;
    }

    /// Removes a set by id and returns it.
    pub fn remove(&mut self, id: u32) -> Option<PolicySet> {
        let set = self.sets.remove(&id)?;
        for (local, remote) in pairs(&set) {
            let Some(tuple) = Tuple::of(local, remote) else {
                continue;
            };
            let Some(entries) = self.outbound.get_mut(&tuple) else {
                continue;
            };
            let before = entries.len();
            entries.retain(|entry| entry.set != id);
            let removed = before - entries.len();
            if entries.is_empty() {
                self.outbound.remove(&tuple);
            }
            if let Some(count) = self.shapes.get_mut(&tuple.shape) {
                *count -= removed;
                if *count == 0 {
                    self.shapes.remove(&tuple.shape);
                }
            }
        }
        if let Some(reqid) = reqid(&set)
            && let Some(ids) = self.by_reqid.get_mut(&reqid)
        {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_reqid.remove(&reqid);
            }
        }
        self.generation += 1;
        Some(set)
    }

    /// Changes whenever the answer to some [`lookup`](Self::lookup) may, so that callers can keep
    /// answers.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The set of this id.
    pub fn get(&self, id: u32) -> Option<&PolicySet> {
        self.sets.get(&id)
    }

    /// All sets by id.
    pub fn sets(&self) -> impl Iterator<Item = &PolicySet> {
        self.sets.values()
    }

    /// The policy of an outbound packet, or `None` if no policy selects it.
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
            let Some(entries) = self.outbound.get(&tuple) else {
                continue;
            };
            // Sorted by priority: the first that selects the packet is the best of this tuple.
            let found = entries
                .iter()
                .find(|entry| flow.is_selected(&entry.local, &entry.remote));
            if let Some(found) = found
                && best.is_none_or(|best| (found.priority, found.set) < (best.priority, best.set))
            {
                best = Some(found);
            }
        }
        best.map(|entry| Verdict {
            set: entry.set,
            action: entry.action,
        })
    }

    /// Whether a packet that an SA of `reqid` protected may come in (RFC 4301 section 5.2,
    /// step 4). Traps do not count: they say what may be negotiated, not what was.
    pub fn admits_inbound(&self, reqid: u32, flow: &Flow) -> bool {
        let Some(ids) = self.by_reqid.get(&reqid) else {
            return false;
        };
        ids.iter()
            .filter_map(|id| self.sets.get(id))
            .filter(|set| !set.trap)
            .flat_map(pairs)
            .any(|(local, remote)| flow.is_selected(remote, local))
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

/// The priority of one pair of selectors: that of the set, or one computed as strongSwan does, so
/// that narrower selectors win within a class.
pub fn priority(set: &PolicySet, local: &TrafficSelector, remote: &TrafficSelector) -> u32 {
    if let Some(priority) = set.priority {
        return priority;
    }
    let base = match set.action {
        PolicyAction::Bypass | PolicyAction::Discard => BASE_SHUNT,
        PolicyAction::Protect { .. } if set.trap => BASE_TRAP,
        PolicyAction::Protect { .. } => BASE_CHILD,
    };
    let v6 = local.start.is_ipv6();
    let narrowness = [local, remote].map(|ts| {
        let prefix = u32::from(covering(v6, ts.start, ts.end));
        let ports = if ts.is_opaque() {
            16
        } else {
            port_bits(ts.start_port..=ts.end_port)
        };
        prefix * 256 + ports * 2
    });
    let protocol = if local.protocol.max(remote.protocol) == 0 {
        0
    } else {
        128
    };
    base - narrowness.iter().sum::<u32>() - protocol
}

fn port_bits(range: RangeInclusive<u16>) -> u32 {
    (range.start() ^ range.end()).leading_zeros()
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
