// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic selectors as the kernel's selectors, and the priority of a policy.
//!
//! The kernel matches an address prefix, a protocol, and ports under a bit mask. Ranges that are
//! neither become the smallest prefix or mask that covers them, as strongSwan does; the peer's
//! own policy still refuses what was not negotiated.

use std::net::IpAddr;

use netlink_packet_xfrm::{AF_INET, AF_INET6, Address, Selector};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{PolicyAction, PolicySet};

/// Why two traffic selectors make no kernel selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SelectorError {
    /// One side is IPv4, the other IPv6.
    #[error("selectors of both sides are of different address families")]
    Families,
    /// Each side names another protocol.
    #[error("selectors of both sides name the protocols {0} and {1}")]
    Protocols(u8, u8),
    /// The kernel cannot match packets whose ports are hidden.
    #[error("OPAQUE ports cannot be expressed in a kernel selector")]
    Opaque,
}

/// The kernel's selector for packets from `src` to `dst`.
pub(super) fn selector(
    src: &TrafficSelector,
    dst: &TrafficSelector,
) -> Result<Selector, SelectorError> {
    if src.start.is_ipv4() != dst.start.is_ipv4() {
        return Err(SelectorError::Families);
    }
    if src.is_opaque() || dst.is_opaque() {
        return Err(SelectorError::Opaque);
    }
    let proto = match (src.protocol, dst.protocol) {
        (0, proto) | (proto, 0) => proto,
        (a, b) if a == b => a,
        (a, b) => return Err(SelectorError::Protocols(a, b)),
    };
    let (saddr, prefixlen_s) = covering_prefix(src);
    let (daddr, prefixlen_d) = covering_prefix(dst);
    let (mut sport, mut sport_mask) = covering_mask(src);
    let (mut dport, mut dport_mask) = covering_mask(dst);
    if proto == libc::IPPROTO_ICMP as u8 || proto == libc::IPPROTO_ICMPV6 as u8 {
        // Either side may carry type and code; the kernel wants the type as source port and the
        // code as destination port. A code of 0 is not told from "any code".
        let [icmp_type, code] = sport.max(dport).to_be_bytes();
        let whole = |value: u8| if value == 0 { 0 } else { u16::MAX };
        (sport, sport_mask) = (icmp_type.into(), whole(icmp_type));
        (dport, dport_mask) = (code.into(), whole(code));
    }
    Ok(Selector {
        daddr: Address::from_ip(&daddr),
        saddr: Address::from_ip(&saddr),
        dport,
        dport_mask,
        sport,
        sport_mask,
        family: family(src.start),
        prefixlen_d,
        prefixlen_s,
        proto,
        ifindex: 0,
        user: 0,
    })
}

/// The selector of an SA in transport mode: addresses only, so that one SA may serve several
/// policies between the two hosts.
pub(super) fn host_selector(src: &TrafficSelector, dst: &TrafficSelector) -> Selector {
    let (saddr, prefixlen_s) = covering_prefix(src);
    let (daddr, prefixlen_d) = covering_prefix(dst);
    Selector {
        saddr: Address::from_ip(&saddr),
        daddr: Address::from_ip(&daddr),
        prefixlen_s,
        prefixlen_d,
        family: family(src.start),
        ..Selector::default()
    }
}

/// The address family as the kernel's structures have it.
pub(super) fn family(addr: IpAddr) -> u16 {
    if addr.is_ipv4() { AF_INET } else { AF_INET6 }
}

/// An address of a kernel structure, whose family stands elsewhere.
pub(super) fn address(family: u16, addr: &Address) -> IpAddr {
    if family == AF_INET {
        addr.to_ipv4().into()
    } else {
        addr.to_ipv6().into()
    }
}

/// The priority that strongSwan gives a policy, so that policies of both interleave as operators
/// expect: a base by what the policy does, less for the more specific selector; a trap comes just
/// behind the policy of the SA that it raises. Lower wins.
pub(super) fn priority(action: &PolicyAction, selector: &Selector, trap: bool) -> u32 {
    let base = match action {
        PolicyAction::Bypass => 200_000,
        PolicyAction::Protect { .. } => 400_000,
        PolicyAction::Discard => 600_000,
    };
    let prefixes = u32::from(selector.prefixlen_s) + u32::from(selector.prefixlen_d);
    let port_bits = selector.sport_mask.count_ones() + selector.dport_mask.count_ones();
    base - 512 * prefixes - 256 * u32::from(selector.proto != 0) - 4 * port_bits - u32::from(!trap)
}

/// The priority of the policy between two traffic selectors of `set`, also where the kernel could
/// not match what they select.
pub(crate) fn priority_between(
    set: &PolicySet,
    local: &TrafficSelector,
    remote: &TrafficSelector,
) -> u32 {
    if let Some(fixed) = set.priority {
        return fixed;
    }
    // Hidden ports are as specific as a port.
    let shown = |ts: &TrafficSelector| TrafficSelector {
        end_port: if ts.is_opaque() {
            ts.start_port
        } else {
            ts.end_port
        },
        ..*ts
    };
    // What is left makes a policy that selects nothing.
    selector(&shown(local), &shown(remote)).map_or(u32::MAX, |selector| {
        priority(&set.action, &selector, set.trap)
    })
}

/// The smallest network that holds all addresses of `ts`.
pub(crate) fn covering_prefix(ts: &TrafficSelector) -> (IpAddr, u8) {
    match (ts.start, ts.end) {
        (IpAddr::V4(start), IpAddr::V4(end)) => {
            let len = (start.to_bits() ^ end.to_bits()).leading_zeros();
            let host = u32::MAX.checked_shr(len).unwrap_or(0);
            (
                std::net::Ipv4Addr::from_bits(start.to_bits() & !host).into(),
                len as u8,
            )
        }
        (IpAddr::V6(start), IpAddr::V6(end)) => {
            let len = (start.to_bits() ^ end.to_bits()).leading_zeros();
            let host = u128::MAX.checked_shr(len).unwrap_or(0);
            (
                std::net::Ipv6Addr::from_bits(start.to_bits() & !host).into(),
                len as u8,
            )
        }
        // A selector never mixes families; if it did, nothing but its first address would match.
        (start, _) => (start, if start.is_ipv4() { 32 } else { 128 }),
    }
}

/// The smallest value and mask that cover all ports of `ts`.
fn covering_mask(ts: &TrafficSelector) -> (u16, u16) {
    let len = (ts.start_port ^ ts.end_port).leading_zeros();
    let mask = !u16::MAX.checked_shr(len).unwrap_or(0);
    (ts.start_port & mask, mask)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PROTECT: PolicyAction = PolicyAction::Protect {
        mode: swanherd_ipsec::plane::Mode::Tunnel,
        local: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        remote: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        reqid: 1,
        spi: 0,
    };

    fn ts(network: &str, protocol: u8, ports: (u16, u16)) -> TrafficSelector {
        let (addr, len) = network.split_once('/').unwrap();
        let mut ts = TrafficSelector::network(addr.parse().unwrap(), len.parse().unwrap()).unwrap();
        ts.protocol = protocol;
        (ts.start_port, ts.end_port) = ports;
        ts
    }

    fn any(network: &str) -> TrafficSelector {
        ts(network, 0, (0, u16::MAX))
    }

    fn priority_of(
        action: &PolicyAction,
        src: TrafficSelector,
        dst: TrafficSelector,
        trap: bool,
    ) -> u32 {
        priority(action, &selector(&src, &dst).unwrap(), trap)
    }

    // The numbers are what charon 5.9.8 installs for the same selectors.
    #[test]
    fn priorities_equal_charons() {
        let all = (0, u16::MAX);
        assert_eq!(
            priority_of(&PROTECT, any("10.1.0.0/24"), any("10.2.0.0/24"), false),
            375_423
        );
        assert_eq!(
            priority_of(&PROTECT, any("10.1.0.0/24"), any("10.2.0.0/24"), true),
            375_424
        );
        assert_eq!(
            priority_of(&PROTECT, any("10.1.1.1/32"), any("10.2.1.1/32"), true),
            367_232
        );
        assert_eq!(
            priority_of(&PROTECT, any("0.0.0.0/0"), any("0.0.0.0/0"), true),
            400_000
        );
        assert_eq!(
            priority_of(&PROTECT, any("fd00:1::/64"), any("fd00:2::/64"), true),
            334_464
        );
        assert_eq!(
            priority_of(
                &PROTECT,
                ts("10.1.2.0/24", 6, all),
                ts("10.2.2.0/24", 6, (80, 80)),
                true
            ),
            375_104
        );
        assert_eq!(
            priority_of(
                &PROTECT,
                ts("10.1.3.0/24", 17, (1000, 1010)),
                ts("10.2.0.0/16", 17, all),
                true
            ),
            379_220
        );
        assert_eq!(
            priority_of(
                &PROTECT,
                ts("10.1.10.0/24", 1, (2048, 2048)),
                ts("10.2.10.0/24", 1, (2048, 2048)),
                true
            ),
            375_104
        );
        assert_eq!(
            priority_of(
                &PROTECT,
                ts("192.0.2.1/32", 6, all),
                ts("192.0.2.2/32", 6, all),
                false
            ),
            366_975
        );
        assert_eq!(
            priority_of(
                &PolicyAction::Bypass,
                any("10.1.20.0/24"),
                any("10.2.20.0/24"),
                false
            ),
            175_423
        );
        assert_eq!(
            priority_of(
                &PolicyAction::Bypass,
                ts("0.0.0.0/0", 6, (22, 22)),
                ts("0.0.0.0/0", 6, all),
                false
            ),
            199_679
        );
        assert_eq!(
            priority_of(
                &PolicyAction::Discard,
                any("10.1.21.0/24"),
                any("10.2.21.0/24"),
                false
            ),
            575_423
        );
    }

    #[test]
    fn an_address_range_becomes_its_covering_network() {
        let range = TrafficSelector {
            start: "10.1.11.5".parse().unwrap(),
            end: "10.1.11.20".parse().unwrap(),
            ..any("10.1.11.0/24")
        };
        assert_eq!(covering_prefix(&range), ("10.1.11.0".parse().unwrap(), 27));
    }

    #[test]
    fn icmp_type_goes_where_the_kernel_looks_for_it() {
        let echo = |net| ts(net, 1, (2048, 2048));
        let sel = selector(&echo("10.1.0.0/24"), &echo("10.2.0.0/24")).unwrap();
        assert_eq!((sel.sport, sel.sport_mask), (8, u16::MAX));
        assert_eq!((sel.dport, sel.dport_mask), (0, 0));
    }

    #[test]
    fn selectors_that_fit_no_packet_are_refused() {
        assert_eq!(
            selector(&any("10.0.0.0/8"), &any("fd00::/8")),
            Err(SelectorError::Families)
        );
        let all = (0, u16::MAX);
        assert_eq!(
            selector(&ts("10.0.0.0/8", 6, all), &ts("11.0.0.0/8", 17, all)),
            Err(SelectorError::Protocols(6, 17))
        );
        assert_eq!(
            selector(&ts("10.0.0.0/8", 6, (u16::MAX, 0)), &any("11.0.0.0/8")),
            Err(SelectorError::Opaque)
        );
    }

    proptest! {
        #[test]
        fn a_port_mask_covers_its_range(a: u16, b: u16, probe: u16) {
            let (start, end) = (a.min(b), a.max(b));
            let (value, mask) = covering_mask(&ts("10.0.0.0/8", 6, (start, end)));
            if (start..=end).contains(&probe) {
                prop_assert_eq!(probe & mask, value);
            }
        }

        #[test]
        fn a_prefix_covers_its_range(a: u32, b: u32, probe: u32) {
            let (start, end) = (a.min(b), a.max(b));
            let ts = TrafficSelector {
                start: std::net::Ipv4Addr::from_bits(start).into(),
                end: std::net::Ipv4Addr::from_bits(end).into(),
                ..TrafficSelector::any_v4()
            };
            let (network, len) = covering_prefix(&ts);
            if (start..=end).contains(&probe) {
                let probe = std::net::Ipv4Addr::from_bits(probe).into();
                prop_assert!(crate::route::in_network(probe, network, len));
            }
        }
    }
}
