// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which shared secret belongs to a pair of identities.

use swanherd_config::identity::{IdentityPattern, MATCH_ANY};
use swanherd_config::model::{SharedKind, SharedSecret};
use swanherd_ipsec::Identity;

/// A shared secret found for a pair of identities.
#[derive(Clone, Copy, Debug)]
pub struct SharedMatch<'a> {
    /// The secret.
    pub secret: &'a SharedSecret,
    /// How many different secrets fit equally well. If more than one, the choice (the one loaded
    /// first) is a guess, and the operator should be told to add owners.
    pub candidates: usize,
}

/// The secret that fits best, ranked as strongSwan does: by how exactly an owner names the remote
/// identity, then by how exactly one names the local identity. A secret without owners belongs to
/// anybody (`%any`); one whose owners name neither side does not fit.
pub(super) fn best_match<'a>(
    secrets: &'a [SharedSecret],
    kind: SharedKind,
    local: &Identity,
    remote: &Identity,
) -> Option<SharedMatch<'a>> {
    let scored = |secret: &'a SharedSecret| {
        (secret.kind == kind)
            .then(|| fit(&secret.owners, local, remote))
            .flatten()
            .map(|fit| (fit, secret))
    };
    let best = secrets
        .iter()
        .filter_map(scored)
        .map(|(fit, _)| fit)
        .max()?;
    let mut equal = secrets
        .iter()
        .filter_map(scored)
        .filter(|(fit, _)| *fit == best)
        .map(|(_, secret)| secret);
    let secret = equal.next()?;
    let different = equal.filter(|other| other.secret != secret.secret).count();
    Some(SharedMatch {
        secret,
        candidates: 1 + different,
    })
}

/// How exactly owners name the remote and the local side.
fn fit(owners: &[IdentityPattern], local: &Identity, remote: &Identity) -> Option<(u8, u8)> {
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
