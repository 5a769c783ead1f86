// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loaded connections, and which of them fits a peer.
//!
//! Two questions are asked on the hot path: which connections may an IKE_SA_INIT request from
//! this address be for, and which one, once the peer has named its identity. Both are answered
//! from indices, so that ten thousand connections cost no more than ten.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use swanherd_config::identity::IdentityPattern;
use swanherd_config::model::{Connection, HostSpec, IkeVersion};
use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;

use crate::api::ConnectionRef;

/// Position in load order.
type Order = u64;

/// All loaded connections with their indices.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Connections {
    next_order: Order,
    by_name: BTreeMap<String, Order>,
    by_order: BTreeMap<Order, ConnectionRef>,
    /// Connections that name this peer address.
    by_remote: BTreeMap<IpAddr, BTreeSet<Order>>,
    /// Connections with peer addresses that are not single ones, those alike in everything that
    /// IKE_SA_INIT looks at being one group.
    open_groups: BTreeMap<String, BTreeSet<Order>>,
    /// Connections that name exactly this peer identity.
    by_remote_id: BTreeMap<Identity, BTreeSet<Order>>,
    /// Connections with a pattern for the peer's identity, or none.
    open_ids: BTreeSet<Order>,
    /// What names in `remote_addrs` last resolved to.
    resolved: BTreeMap<String, Vec<IpAddr>>,
    /// The addresses in `resolved`, and how many names resolved to each.
    resolved_addrs: BTreeMap<IpAddr, u32>,
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
        for host in &connection.remote_addrs {
            if let HostSpec::Addr(addr) = host {
                self.by_remote.entry(*addr).or_default().insert(order);
            }
        }
        if is_open(&connection) {
            let group = group_of(&connection);
            self.open_groups.entry(group).or_default().insert(order);
        }
        match remote_id(&connection).and_then(index_key) {
            Some(id) => {
                self.by_remote_id.entry(id).or_default().insert(order);
            }
            None => {
                self.open_ids.insert(order);
            }
        }
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

    /// Remembers what a name resolved to, for matching requests from there.
    pub(crate) fn learn(&mut self, name: &str, addrs: &[IpAddr]) {
        let addrs = addrs.to_vec();
        for addr in &addrs {
            *self.resolved_addrs.entry(*addr).or_default() += 1;
        }
        let before = self.resolved.insert(name.to_owned(), addrs);
        for addr in before.unwrap_or_default() {
            if let Some(names) = self.resolved_addrs.get_mut(&addr) {
                *names -= 1;
                if *names == 0 {
                    self.resolved_addrs.remove(&addr);
                }
            }
        }
    }

    /// What a name last resolved to.
    pub(crate) fn last_known(&self, name: &str) -> &[IpAddr] {
        self.resolved.get(name).map_or(&[], Vec::as_slice)
    }

    /// Whether the configuration names `remote` as a peer.
    pub(crate) fn is_known_peer(&self, remote: IpAddr) -> bool {
        self.by_remote.contains_key(&remote) || self.resolved_addrs.contains_key(&remote)
    }

    /// Connections that a request between these addresses may be for, best match first. Of those
    /// that IKE_SA_INIT cannot tell apart only the first is given.
    pub(crate) fn for_addresses(&self, local: IpAddr, remote: IpAddr) -> Vec<ConnectionRef> {
        let concrete = self.by_remote.get(&remote).into_iter().flatten();
        let open = self.open_groups.values().filter_map(BTreeSet::first);
        let mut found: Vec<(u32, Order)> = concrete
            .chain(open)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .filter_map(|order| {
                let connection = self.by_order.get(order)?;
                Some((self.address_match(connection, local, remote)?, *order))
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
        let named = folded(remote_id).and_then(|key| self.by_remote_id.get(&key));
        let mut found: Vec<(u32, u32, Order)> = named
            .into_iter()
            .flatten()
            .chain(&self.open_ids)
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

    /// How well both addresses fit, or `None`.
    fn address_match(&self, connection: &Connection, local: IpAddr, remote: IpAddr) -> Option<u32> {
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
                    let ts = swanherd_ipsec::TrafficSelector::network(*net, *len)?;
                    ts.contains(&swanherd_ipsec::TrafficSelector::host(addr))
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

    fn unindex(&mut self, order: Order, connection: &Connection) {
        for host in &connection.remote_addrs {
            if let HostSpec::Addr(addr) = host {
                drop_from(&mut self.by_remote, addr, order);
            }
        }
        drop_from(&mut self.open_groups, &group_of(connection), order);
        if let Some(id) = remote_id(connection).and_then(index_key) {
            drop_from(&mut self.by_remote_id, &id, order);
        }
        self.open_ids.remove(&order);
    }
}

/// Whether `connection`'s rounds allow these identities, and how well.
pub(crate) fn identity_match(
    connection: &Connection,
    local_id: Option<&Identity>,
    remote: &Identity,
) -> Option<u32> {
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

/// The key under which a pattern is found that matches one identity only.
fn index_key(pattern: &IdentityPattern) -> Option<Identity> {
    folded(&pattern.identity()?)
}

/// An identity of a type in which equality is that of octets once case is folded. The others
/// (distinguished names above all) compare by rules that no index follows.
fn folded(id: &Identity) -> Option<Identity> {
    match id.id_type {
        IdType::Fqdn | IdType::Rfc822Addr => Some(Identity {
            id_type: id.id_type,
            data: id.data.to_ascii_lowercase(),
        }),
        IdType::Ipv4Addr | IdType::Ipv6Addr | IdType::KeyId => Some(id.clone()),
        _ => None,
    }
}

fn remote_id(connection: &Connection) -> Option<&IdentityPattern> {
    connection.remote.first()?.id.as_ref()
}

fn is_open(connection: &Connection) -> bool {
    connection.remote_addrs.is_empty()
        || connection
            .remote_addrs
            .iter()
            .any(|host| !matches!(host, HostSpec::Addr(_)))
}

fn group_of(connection: &Connection) -> String {
    let open: Vec<&HostSpec> = connection
        .remote_addrs
        .iter()
        .filter(|host| !matches!(host, HostSpec::Addr(_)))
        .collect();
    format!(
        "{:?} {:?} {:?} {:?}",
        connection.local_addrs, open, connection.version, connection.proposals
    )
}

fn drop_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<Order>>, key: &K, order: Order) {
    if let Some(set) = index.get_mut(key) {
        set.remove(&order);
        if set.is_empty() {
            index.remove(key);
        }
    }
}
