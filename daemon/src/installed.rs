// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listed policies and findings in the form that VICI, JSON and tables share.

use swanherd_ipsec::plane::{Direction, Mode};
use swanherd_kernel::audit::{Finding, ListedPolicy, Remedy, Verdict};
use swanherd_vici::installed::{self, InstalledPolicy, Masked, PolicyOwner};

use crate::audits::{difference_name, object_name, object_text, remedy_name};

/// A policy of a data plane.
pub(crate) fn installed_policy(listed: &ListedPolicy) -> InstalledPolicy {
    let key = &listed.key;
    let port = |(port, mask): (u16, u16)| {
        (mask != 0).then(|| Masked {
            value: u32::from(port),
            mask: u32::from(mask),
        })
    };
    let mut policy = InstalledPolicy {
        index: listed.index,
        dir: direction(key.direction).to_owned(),
        src: format!("{}/{}", key.src.0, key.src.1),
        dst: format!("{}/{}", key.dst.0, key.dst.1),
        proto: (key.proto != 0).then_some(key.proto),
        sport: port(key.sport),
        dport: port(key.dport),
        priority: listed.priority,
        if_id: key.if_id,
        mark: key.mark.map(|mark| Masked {
            value: mark.value,
            mask: mark.mask,
        }),
        owner: PolicyOwner {
            kind: listed.owner.kind().to_owned(),
            name: listed.owner.name().map(str::to_owned),
        },
        ..InstalledPolicy::default()
    };
    match listed.verdict {
        Verdict::Bypass => "pass".clone_into(&mut policy.action),
        Verdict::Discard => "drop".clone_into(&mut policy.action),
        Verdict::Protect {
            mode,
            reqid,
            endpoints: (src, dst),
        } => {
            "protect".clone_into(&mut policy.action);
            policy.mode = Some(mode_name(mode).to_owned());
            policy.reqid = Some(reqid);
            policy.tunnel_src = Some(src.to_string());
            policy.tunnel_dst = Some(dst.to_string());
        }
    }
    policy
}

/// A finding of an audit.
pub(crate) fn finding(found: &Finding) -> installed::Finding {
    installed::Finding {
        object: object_name(&found.object).to_owned(),
        what: object_text(&found.object),
        difference: difference_name(found.difference).to_owned(),
        owner: found.owner.clone(),
        reason: found.reason.clone(),
        remedy: remedy_name(&found.remedy).to_owned(),
        error: match &found.remedy {
            Remedy::Failed(error) => Some(error.clone()),
            _ => None,
        },
    }
}

const fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::In => "in",
        Direction::Out => "out",
        Direction::Fwd => "fwd",
    }
}

const fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Tunnel => "tunnel",
        Mode::Transport => "transport",
        Mode::Beet => "beet",
    }
}
