// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which shared secret belongs to a pair of identities.

use std::collections::{BTreeMap, BTreeSet};

use swanherd_config::identity::{IdentityPattern, MATCH_ANY, MATCH_EXACT, identity_key};
use swanherd_config::model::{SharedKind, SharedSecret};
use swanherd_ipsec::Identity;

/// Position in the order of loading.
type Order = u64;

/// How many secrets that fit equally well are compared with the one chosen.
const MAX_EQUAL: usize = 16;

/// All shared secrets, indexed by their owners, so that ten thousand cost no more than ten.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedSecrets {
    next: Order,
    by_order: BTreeMap<Order, SharedSecret>,
    by_id: BTreeMap<String, Order>,
    /// By each owner that is one identity.
    by_owner: BTreeMap<(SharedKind, Identity), BTreeSet<Order>>,
    /// Those without owners, or with one that is a pattern.
    open: BTreeMap<SharedKind, BTreeSet<Order>>,
}

impl SharedSecrets {
    /// Adds one; it replaces another with the same id.
    pub(super) fn add(&mut self, secret: SharedSecret) {
        self.next += 1;
        let order = self.next;
        if let Some(id) = &secret.id {
            self.remove(id);
            self.by_id.insert(id.clone(), order);
        }
        let mut open = secret.owners.is_empty();
        for owner in &secret.owners {
            match owner.index_key() {
                Some(key) => {
                    let owned = self.by_owner.entry((secret.kind, key)).or_default();
                    owned.insert(order);
                }
                None => open = true,
            }
        }
        if open {
            self.open.entry(secret.kind).or_default().insert(order);
        }
        self.by_order.insert(order, secret);
    }

    /// Removes one by its id. Returns whether there was one.
    pub(super) fn remove(&mut self, id: &str) -> bool {
        let Some(order) = self.by_id.remove(id) else {
            return false;
        };
        let Some(secret) = self.by_order.remove(&order) else {
            return false;
        };
        for key in secret.owners.iter().filter_map(IdentityPattern::index_key) {
            let key = (secret.kind, key);
            if let Some(owned) = self.by_owner.get_mut(&key) {
                owned.remove(&order);
                if owned.is_empty() {
                    self.by_owner.remove(&key);
                }
            }
        }
        if let Some(open) = self.open.get_mut(&secret.kind) {
            open.remove(&order);
        }
        true
    }

    /// All, in the order of loading.
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &SharedSecret> {
        self.by_order.values()
    }

    /// The secret that fits best, ranked as strongSwan does: by how exactly an owner names the
    /// remote identity, then by how exactly one names the local identity. A secret without owners
    /// belongs to anybody (`%any`); one whose owners name neither side does not fit.
    pub(super) fn best_match(
        &self,
        kind: SharedKind,
        local: &Identity,
        remote: &Identity,
    ) -> Option<SharedMatch<'_>> {
        let owned = |identity: &Identity| self.by_owner.get(&(kind, identity_key(identity)));
        let open = self.open.get(&kind).into_iter().flatten();
        let mut best = Best::default();
        for order in owned(remote).into_iter().flatten().chain(open) {
            if let Some(secret) = self.by_order.get(order)
                && let Some(fit) = fit(&secret.owners, local, remote)
            {
                best.consider(fit, *order);
            }
        }
        // Secrets that name the local side alone come in only where none knows the remote side;
        // they are all alike, and may be all that there are.
        if best.fit.0 == 0 {
            let fitting = owned(local).into_iter().flatten().filter(|order| {
                let secret = self.by_order.get(order);
                secret.and_then(|secret| fit(&secret.owners, local, remote))
                    == Some((0, MATCH_EXACT))
            });
            for order in fitting.take(1 + MAX_EQUAL) {
                best.consider((0, MATCH_EXACT), *order);
            }
        }
        let mut equal = best
            .orders
            .iter()
            .filter_map(|order| self.by_order.get(order));
        let secret = equal.next()?;
        let different = equal
            .take(MAX_EQUAL)
            .filter(|other| other.secret != secret.secret)
            .count();
        Some(SharedMatch {
            secret,
            candidates: 1 + different,
        })
    }
}

/// The secrets that fit best so far, in the order of loading.
#[derive(Default)]
struct Best {
    fit: (u8, u8),
    orders: BTreeSet<Order>,
}

impl Best {
    fn consider(&mut self, fit: (u8, u8), order: Order) {
        if fit > self.fit {
            self.fit = fit;
            self.orders.clear();
        }
        if fit == self.fit {
            self.orders.insert(order);
        }
    }
}

/// A shared secret found for a pair of identities.
#[derive(Clone, Copy, Debug)]
pub struct SharedMatch<'a> {
    /// The secret.
    pub secret: &'a SharedSecret,
    /// How many different secrets fit equally well, of the first few. If more than one, the choice (the one loaded
    /// first) is a guess, and the operator should be told to add owners.
    pub candidates: usize,
}

/// How exactly owners name the remote and the local side.
pub(super) fn fit(
    owners: &[IdentityPattern],
    local: &Identity,
    remote: &Identity,
) -> Option<(u8, u8)> {
    #[cfg(test)]
    LOOKED_AT.set(LOOKED_AT.get() + 1);
    if owners.is_empty() {
        return Some((MATCH_ANY, MATCH_ANY));
    }
    let best = |identity: &Identity| {
        owners
            .iter()
            .filter_map(|owner| owner.matches(identity))
            .max()
            .unwrap_or(0)
    };
    let fit = (best(remote), best(local));
    (fit != (0, 0)).then_some(fit)
}

#[cfg(test)]
thread_local! {
    /// How often this thread compared a secret's owners with a pair of identities.
    pub(super) static LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
