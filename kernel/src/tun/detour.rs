// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When packets of a bypass policy may be routed around the TUN device.
//!
//! A route knows destinations only, a policy more. Where some packet to the same destination is to
//! be protected or dropped, all of them must pass the policies in the device.

use std::net::IpAddr;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};

use crate::xfrm::priority_between;

/// Whether whatever goes to the remote networks of `bypass` goes in clear, for all that `others`
/// say.
pub(super) fn is_for_all<'a>(
    bypass: &PolicySet,
    mut others: impl Iterator<Item = &'a PolicySet>,
) -> bool {
    let everything =
        |ts: &TrafficSelector| ts.protocol == 0 && ts.start_port == 0 && ts.end_port == u16::MAX;
    if !bypass.local.iter().chain(&bypass.remote).all(everything) {
        return false;
    }
    others.all(|other| {
        other.action == PolicyAction::Bypass
            || bypass
                .remote
                .iter()
                .all(|network| decides_to(bypass, network, other))
    })
}

/// Whether `bypass` decides on all packets to `network` on which `other` would else.
fn decides_to(bypass: &PolicySet, network: &TrafficSelector, other: &PolicySet) -> bool {
    let reaching = other.remote.iter().filter(|remote| meet(remote, network));
    reaching
        .flat_map(|remote| other.local.iter().map(move |local| (local, remote)))
        .all(|(local, remote)| {
            let theirs = priority_between(other, local, remote);
            bypass.local.iter().any(|source| {
                holds(source, local) && priority_between(bypass, source, network) < theirs
            })
        })
}

fn meet(a: &TrafficSelector, b: &TrafficSelector) -> bool {
    same_family(a, b) && a.start <= b.end && b.start <= a.end
}

fn holds(outer: &TrafficSelector, inner: &TrafficSelector) -> bool {
    same_family(outer, inner) && outer.start <= inner.start && inner.end <= outer.end
}

fn same_family(a: &TrafficSelector, b: &TrafficSelector) -> bool {
    a.start.is_ipv4() == b.start.is_ipv4()
}

/// A set whose routes lead into the device, with `source` as their preferred source: the address
/// that packets of this host would have without tunnels.
pub(super) fn through_device(bypass: &PolicySet, source: Option<IpAddr>) -> PolicySet {
    PolicySet {
        action: PolicyAction::Discard,
        local: source.map_or_else(
            || bypass.local.clone(),
            |source| vec![TrafficSelector::host(source)],
        ),
        ..bypass.clone()
    }
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::plane::Mode;

    use super::*;

    fn set(action: PolicyAction, local: &str, remote: &str) -> PolicySet {
        let network = |text: &str| {
            let (addr, len) = text.split_once('/').unwrap();
            TrafficSelector::network(addr.parse().unwrap(), len.parse().unwrap()).unwrap()
        };
        PolicySet::new(
            1,
            "c/c".to_owned(),
            vec![network(local)],
            vec![network(remote)],
            action,
        )
    }

    fn tunnel(local: &str, remote: &str) -> PolicySet {
        let protect = PolicyAction::Protect {
            mode: Mode::Tunnel,
            local: "192.0.2.1".parse().unwrap(),
            remote: "192.0.2.2".parse().unwrap(),
            reqid: 1,
            spi: 0,
        };
        set(protect, local, remote)
    }

    #[test]
    fn a_bypass_leads_around_only_if_nothing_to_its_networks_is_protected() {
        let lan = set(PolicyAction::Bypass, "10.1.0.0/16", "10.1.0.0/16");
        let decides = |others: &[PolicySet]| is_for_all(&lan, others.iter());
        assert!(decides(&[]));
        assert!(decides(&[tunnel("10.1.0.0/16", "10.2.0.0/16")]));
        assert!(decides(&[tunnel("10.1.0.0/24", "0.0.0.0/0")]));
        assert!(decides(&[set(
            PolicyAction::Bypass,
            "0.0.0.0/0",
            "0.0.0.0/0"
        )]));
        assert!(decides(&[tunnel("fd00::/8", "::/0")]));
        // Another source, or a policy that comes first.
        assert!(!decides(&[tunnel("10.0.0.0/8", "0.0.0.0/0")]));
        assert!(!decides(&[
            tunnel("10.1.0.0/24", "0.0.0.0/0"),
            tunnel("10.9.0.0/24", "10.1.2.0/24")
        ]));
        let first = PolicySet {
            priority: Some(1),
            ..tunnel("10.1.0.0/16", "10.0.0.0/8")
        };
        assert!(!decides(&[first]));
    }

    #[test]
    fn a_bypass_of_one_protocol_leads_nowhere() {
        let mut bypass = set(PolicyAction::Bypass, "0.0.0.0/0", "10.2.0.0/16");
        bypass.remote[0].protocol = 6;
        assert!(!is_for_all(&bypass, [].iter()));
    }
}
