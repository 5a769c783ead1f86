// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists the policies of the TUN plane as the kernel's would be.

use swanherd_esp::Spd;
use swanherd_ipsec::plane::{Direction, PolicyAction};

use crate::audit::{ListedPolicy, Verdict};
use crate::xfrm::{claims, owner};

/// The policies of every set, in the order of the sets.
pub(super) fn policies(spd: &Spd) -> Vec<ListedPolicy> {
    let mut listed = Vec::new();
    for set in spd.sets() {
        // A set that makes no policies selects nothing.
        for (key, claim) in claims(set).unwrap_or_default() {
            let verdict = match claim.action {
                PolicyAction::Bypass => Verdict::Bypass,
                PolicyAction::Discard => Verdict::Discard,
                PolicyAction::Protect {
                    mode,
                    local,
                    remote,
                    reqid,
                    ..
                } => Verdict::Protect {
                    mode,
                    reqid,
                    endpoints: match key.direction {
                        Direction::Out => (local, remote),
                        Direction::In | Direction::Fwd => (remote, local),
                    },
                },
            };
            listed.push(ListedPolicy {
                index: 0,
                key,
                priority: claim.priority,
                verdict,
                owner: owner(set),
            });
        }
    }
    listed
}
