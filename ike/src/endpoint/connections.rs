// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loaded connections, and which of them fits a peer.
//!
//! Two questions are asked on the hot path: which connections may an IKE_SA_INIT request from
//! this address be for, and which one, once the peer has named its identity. Both are answered
//! from indices, so that ten thousand connections cost no more than ten.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use swanherd_config::identity::{IdentityPattern, identity_key};
use swanherd_config::model::{Connection, HostSpec, IkeVersion};
use swanherd_ipsec::{Identity, Proposal, TrafficSelector};

use crate::api::ConnectionRef;

/// Position in load order.
type Order = u64;
/// Number of a group.
type GroupId = u64;

/// All loaded connections with their indices.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Connections {
    next_order: Order,
    by_name: BTreeMap<String, Order>,
    by_order: BTreeMap<Order, ConnectionRef>,
    /// Connections that have a child of this name.
    by_child: BTreeMap<String, BTreeSet<Order>>,
    /// Connections that name this peer address.
    by_remote: BTreeMap<IpAddr, BTreeSet<Order>>,
    /// Connections that name a peer by this name.
    by_host: BTreeMap<String, BTreeSet<Order>>,
    groups: Groups,
    /// Connections that name exactly this peer identity, by its key.
    by_remote_id: BTreeMap<Identity, BTreeSet<Order>>,
    /// Connections with a pattern for the peer's identity, or none, by each peer address.
    open_ids: BTreeMap<IpAddr, BTreeSet<Order>>,
    /// The same, where the peer's address is open, too.
    open_ids_of_group: BTreeMap<GroupId, BTreeSet<Order>>,
    /// What names in `remote_addrs` last resolved to.
    resolved: BTreeMap<String, Vec<IpAddr>>,
    /// The names that resolved to an address.
    resolved_to: BTreeMap<IpAddr, BTreeSet<String>>,
}

/// Connections with peer addresses that are not single ones, those alike in everything that
/// IKE_SA_INIT looks at being one group.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
struct Groups {
    next: GroupId,
    ids: BTreeMap<GroupKey, GroupId>,
    members: BTreeMap<GroupId, BTreeSet<Order>>,
    /// Groups that may be for any address.
    wide: BTreeSet<GroupId>,
    /// Groups that are for networks alone, by prefix length and network.
    networks: BTreeMap<u8, BTreeMap<IpAddr, BTreeSet<GroupId>>>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(test, derive(Clone))]
struct GroupKey {
    local_addrs: Vec<HostSpec>,
    /// Those that are no single address. All names are one: who has a name that resolved to the
    /// peer's address is found by that.
    open: Vec<HostSpec>,
    version: IkeVersion,
    proposals: Vec<Proposal>,
}

impl Groups {
    fn insert(&mut self, connection: &Connection, order: Order) -> Option<GroupId> {
        let key = group_key(connection)?;
        let networks = networks(&key);
        let group = *self.ids.entry(key).or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let members = self.members.entry(group).or_default();
        if members.is_empty() {
            match networks {
                None => {
                    self.wide.insert(group);
                }
                Some(networks) => {
                    for (network, len) in networks {
                        let of_length = self.networks.entry(len).or_default();
                        of_length.entry(network).or_default().insert(group);
                    }
                }
            }
        }
        members.insert(order);
        Some(group)
    }

    fn remove(&mut self, connection: &Connection, order: Order) -> Option<GroupId> {
        let key = group_key(connection)?;
        let group = *self.ids.get(&key)?;
        drop_from(&mut self.members, &group, order);
        if !self.members.contains_key(&group) {
            self.wide.remove(&group);
            for (network, len) in networks(&key).unwrap_or_default() {
                if let Some(of_length) = self.networks.get_mut(&len) {
                    drop_from(of_length, &network, group);
                    if of_length.is_empty() {
                        self.networks.remove(&len);
                    }
                }
            }
            self.ids.remove(&key);
        }
        Some(group)
    }

    /// Groups that may be for this peer address.
    fn of(&self, remote: IpAddr) -> impl Iterator<Item = GroupId> {
        let in_networks = self.networks.iter().filter_map(move |(len, of_length)| {
            of_length.get(&TrafficSelector::network(remote, *len)?.start)
        });
        self.wide.iter().chain(in_networks.flatten()).copied()
    }

    /// The first connection of each.
    fn first_of(&self, remote: IpAddr) -> impl Iterator<Item = Order> {
        self.of(remote)
            .filter_map(|group| self.members.get(&group)?.first().copied())
    }
}

impl Connections {
    /// Adds or replaces. Returns the one replaced.
    pub(crate) fn insert(&mut self, connection: ConnectionRef) -> Option<ConnectionRef> {
        let order = match self.by_name.get(&connection.name) {
            Some(order) => *order,
            None => {
                self.next_order += 1;
                self.next_order
            }
        };
        let old = self.by_order.remove(&order);
        if let Some(old) = &old {
            self.unindex(order, old);
        }
        self.index(order, &connection);
        self.by_name.insert(connection.name.clone(), order);
        self.by_order.insert(order, connection);
        old
    }

    /// Removes by name.
    pub(crate) fn remove(&mut self, name: &str) -> Option<ConnectionRef> {
        let order = self.by_name.remove(name)?;
        let old = self.by_order.remove(&order)?;
        self.unindex(order, &old);
        Some(old)
    }

    /// By name.
    pub(crate) fn get(&self, name: &str) -> Option<&ConnectionRef> {
        self.by_order.get(self.by_name.get(name)?)
    }

    /// In load order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ConnectionRef> {
        self.by_order.values()
    }

    /// The first connection in load order that has a child of this name.
    pub(crate) fn with_child(&self, child: &str) -> Option<&ConnectionRef> {
        self.by_order.get(self.by_child.get(child)?.first()?)
    }

    /// Remembers what a name resolved to, for matching requests from there.
    pub(crate) fn learn(&mut self, name: &str, addrs: &[IpAddr]) {
        let before = self.resolved.insert(name.to_owned(), addrs.to_vec());
        for addr in before.unwrap_or_default() {
            if let Some(names) = self.resolved_to.get_mut(&addr) {
                names.remove(name);
                if names.is_empty() {
                    self.resolved_to.remove(&addr);
                }
            }
        }
        for addr in addrs {
            let names = self.resolved_to.entry(*addr).or_default();
            names.insert(name.to_owned());
        }
    }

    /// What a name last resolved to.
    pub(crate) fn last_known(&self, name: &str) -> &[IpAddr] {
        self.resolved.get(name).map_or(&[], Vec::as_slice)
    }

    /// Whether the configuration names `remote` as a peer.
    pub(crate) fn is_known_peer(&self, remote: IpAddr) -> bool {
        self.by_remote.contains_key(&remote) || self.resolved_to.contains_key(&remote)
    }

    /// Connections that a request between these addresses may be for, best match first. Of those
    /// that IKE_SA_INIT cannot tell apart only the first is given.
    pub(crate) fn for_addresses(&self, local: IpAddr, remote: IpAddr) -> Vec<ConnectionRef> {
        let mut found: Vec<(u32, Order)> = self
            .of_address(remote)
            .chain(self.groups.first_of(remote))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .filter_map(|order| {
                let connection = self.by_order.get(&order)?;
                Some((self.address_match(connection, local, remote)?, order))
            })
            .collect();
        found.sort_by_key(|(score, order)| (u32::MAX - score, *order));
        found
            .into_iter()
            .filter_map(|(_, order)| self.by_order.get(&order).cloned())
            .collect()
    }

    /// Connections for a peer that named itself `remote_id`, and that asked for `local_id` if it
    /// asked; best match first.
    pub(crate) fn for_identities(
        &self,
        local: IpAddr,
        remote: IpAddr,
        local_id: Option<&Identity>,
        remote_id: &Identity,
    ) -> Vec<ConnectionRef> {
        let named = self.by_remote_id.get(&identity_key(remote_id));
        let of_groups = self
            .groups
            .of(remote)
            .filter_map(|group| self.open_ids_of_group.get(&group));
        let mut found: Vec<(u32, u32, Order)> = named
            .into_iter()
            .chain(self.open_ids.get(&remote))
            .chain(of_groups)
            .flatten()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .filter_map(|order| {
                let connection = self.by_order.get(order)?;
                let ids = identity_match(connection, local_id, remote_id)?;
                Some((ids, self.address_match(connection, local, remote)?, *order))
            })
            .collect();
        found.sort_by_key(|(ids, addresses, order)| (u32::MAX - ids, u32::MAX - addresses, *order));
        found
            .into_iter()
            .filter_map(|(_, _, order)| self.by_order.get(&order).cloned())
            .collect()
    }

    /// Connections that name a peer address, or a name that resolved to it.
    fn of_address(&self, remote: IpAddr) -> impl Iterator<Item = Order> {
        let by_name = self
            .resolved_to
            .get(&remote)
            .into_iter()
            .flatten()
            .filter_map(|name| self.by_host.get(name));
        self.by_remote
            .get(&remote)
            .into_iter()
            .chain(by_name)
            .flatten()
            .copied()
    }

    /// How well both addresses fit, or `None`.
    fn address_match(&self, connection: &Connection, local: IpAddr, remote: IpAddr) -> Option<u32> {
        #[cfg(test)]
        LOOKED_AT.set(LOOKED_AT.get() + 1);
        if connection.version == IkeVersion::V1 {
            return None;
        }
        let local = self.host_match(&connection.local_addrs, local)?;
        let remote = self.host_match(&connection.remote_addrs, remote)?;
        Some(local + remote)
    }

    fn host_match(&self, specs: &[HostSpec], addr: IpAddr) -> Option<u32> {
        if specs.is_empty() {
            return Some(1);
        }
        specs
            .iter()
            .filter_map(|spec| match spec {
                HostSpec::Addr(a) => (*a == addr).then_some(1000),
                HostSpec::Network(net, len) => {
                    let ts = TrafficSelector::network(*net, *len)?;
                    ts.contains(&TrafficSelector::host(addr))
                        .then_some(100 + u32::from(*len))
                }
                HostSpec::Range(from, to) => {
                    (from.is_ipv4() == addr.is_ipv4() && *from <= addr && addr <= *to)
                        .then_some(100)
                }
                HostSpec::Name(name) => match self.resolved.get(name) {
                    Some(addrs) if addrs.contains(&addr) => Some(1000),
                    // A name that changed its address since it was last looked up may still be
                    // this peer; identity and authentication decide.
                    _ => Some(2),
                },
                HostSpec::Any(None) => Some(1),
                HostSpec::Any(Some(v4)) => (*v4 == addr.is_ipv4()).then_some(2),
            })
            .max()
    }

    fn index(&mut self, order: Order, connection: &Connection) {
        for child in &connection.children {
            add_to(&mut self.by_child, &child.name, order);
        }
        let key = remote_id(connection).and_then(IdentityPattern::index_key);
        for host in &connection.remote_addrs {
            match host {
                HostSpec::Addr(addr) => {
                    add_to(&mut self.by_remote, addr, order);
                    if key.is_none() {
                        add_to(&mut self.open_ids, addr, order);
                    }
                }
                HostSpec::Name(name) => add_to(&mut self.by_host, name, order),
                HostSpec::Network(..) | HostSpec::Range(..) | HostSpec::Any(_) => {}
            }
        }
        let group = self.groups.insert(connection, order);
        match (key, group) {
            (Some(key), _) => add_to(&mut self.by_remote_id, &key, order),
            (None, Some(group)) => add_to(&mut self.open_ids_of_group, &group, order),
            (None, None) => {}
        }
    }

    fn unindex(&mut self, order: Order, connection: &Connection) {
        for child in &connection.children {
            drop_from(&mut self.by_child, &child.name, order);
        }
        for host in &connection.remote_addrs {
            match host {
                HostSpec::Addr(addr) => {
                    drop_from(&mut self.by_remote, addr, order);
                    drop_from(&mut self.open_ids, addr, order);
                }
                HostSpec::Name(name) => drop_from(&mut self.by_host, name, order),
                HostSpec::Network(..) | HostSpec::Range(..) | HostSpec::Any(_) => {}
            }
        }
        if let Some(group) = self.groups.remove(connection, order) {
            drop_from(&mut self.open_ids_of_group, &group, order);
        }
        if let Some(id) = remote_id(connection).and_then(IdentityPattern::index_key) {
            drop_from(&mut self.by_remote_id, &id, order);
        }
    }
}

/// Whether `connection`'s rounds allow these identities, and how well.
pub(crate) fn identity_match(
    connection: &Connection,
    local_id: Option<&Identity>,
    remote: &Identity,
) -> Option<u32> {
    #[cfg(test)]
    LOOKED_AT.set(LOOKED_AT.get() + 1);
    let local_score = match (
        local_id,
        connection.local.first().and_then(|r| r.id.as_ref()),
    ) {
        (None, _) | (_, None) => 1,
        (Some(asked), Some(pattern)) => score(pattern, asked)?,
    };
    let remote_score = match remote_id(connection) {
        None => 1,
        Some(pattern) => score(pattern, remote)?,
    };
    Some(local_score + remote_score)
}

fn score(pattern: &IdentityPattern, id: &Identity) -> Option<u32> {
    pattern.matches(id).map(u32::from)
}

fn remote_id(connection: &Connection) -> Option<&IdentityPattern> {
    connection.remote.first()?.id.as_ref()
}

/// `None` if the connection names its peer's addresses one by one.
fn group_key(connection: &Connection) -> Option<GroupKey> {
    let mut open: Vec<HostSpec> = connection
        .remote_addrs
        .iter()
        .filter(|host| !matches!(host, HostSpec::Addr(_)))
        .map(|host| match host {
            HostSpec::Name(_) => HostSpec::Name(String::new()),
            other => other.clone(),
        })
        .collect();
    if open.is_empty() && !connection.remote_addrs.is_empty() {
        return None;
    }
    open.sort();
    open.dedup();
    Some(GroupKey {
        local_addrs: connection.local_addrs.clone(),
        open,
        version: connection.version,
        proposals: connection.proposals.clone(),
    })
}

/// The networks of a group that is for nothing else.
fn networks(key: &GroupKey) -> Option<Vec<(IpAddr, u8)>> {
    if key.open.is_empty() {
        return None;
    }
    key.open
        .iter()
        .map(|host| match host {
            HostSpec::Network(net, len) => {
                Some((TrafficSelector::network(*net, *len)?.start, *len))
            }
            _ => None,
        })
        .collect()
}

fn add_to<K: Ord + Clone, V: Ord>(index: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: V) {
    match index.get_mut(key) {
        Some(set) => {
            set.insert(value);
        }
        None => {
            index.insert(key.clone(), BTreeSet::from([value]));
        }
    }
}

fn drop_from<K: Ord, V: Ord>(index: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: V) {
    if let Some(set) = index.get_mut(key) {
        set.remove(&value);
        if set.is_empty() {
            index.remove(key);
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How often this thread compared a connection with a peer.
    static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests;
