// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which shared secret belongs to a pair of identities.

use swanherd_config::identity::IdentityPattern;
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

/// The secret that fits best. Owners of a secret fit if they name the remote identity, the local
/// identity, or both; naming both is best, then the remote, then the local, and within that the
/// more exact pattern. A secret without owners fits any pair, worst of all. A secret whose owners
/// name neither does not fit.
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

/// How well owners fit: whether the remote side is named, whether the local side is, and how
/// exactly.
fn fit(
    owners: &[IdentityPattern],
    local: &Identity,
    remote: &Identity,
) -> Option<(bool, bool, u32)> {
    if owners.is_empty() {
        return Some((false, false, 0));
    }
    let best = |identity: &Identity| {
        owners
            .iter()
            .filter_map(|owner| owner.matches(identity))
            .max()
    };
    match (best(remote), best(local)) {
        (None, None) => None,
        (remote, local) => Some((
            remote.is_some(),
            local.is_some(),
            u32::from(remote.unwrap_or(0)) + u32::from(local.unwrap_or(0)),
        )),
    }
}
