// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The operators' notation for identities, and matching.

use swanherd_ipsec::Identity;

/// An identity as configured: concrete, or with wildcards.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdentityPattern {
    text: String,
    identity: Identity,
}

impl IdentityPattern {
    /// `%any`.
    pub fn any() -> Self {
        Self {
            text: "%any".to_owned(),
            identity: Identity::any(),
        }
    }
}
