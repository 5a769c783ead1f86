// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Traffic selectors of a child: resolving `dynamic`, narrowing (RFC 7296 section 2.9).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_config::model::SelectorSpec;
use swanherd_ipsec::TrafficSelector;

/// The most selectors that are carried on, which is what one TS payload holds.
const MAX_SELECTORS: usize = 255;

/// The configured selectors of one side, `dynamic` standing for each of `hosts`; an unspecified
/// address stands for its whole family.
pub(crate) fn resolve(specs: &[SelectorSpec], hosts: &[IpAddr]) -> Vec<TrafficSelector> {
    let dynamic = SelectorSpec::Dynamic {
        protocol: 0,
        start_port: 0,
        end_port: u16::MAX,
    };
    let specs = if specs.is_empty() {
        std::slice::from_ref(&dynamic)
    } else {
        specs
    };
    let mut out = Vec::new();
    for spec in specs {
        match *spec {
            SelectorSpec::Fixed(ts) => push_unless_covered(&mut out, ts),
            SelectorSpec::Dynamic {
                protocol,
                start_port,
                end_port,
            } => {
                for host in hosts {
                    let ts = TrafficSelector {
                        protocol,
                        start_port,
                        end_port,
                        ..any_or(*host)
                    };
                    push_unless_covered(&mut out, ts);
                }
            }
        }
    }
    out
}

/// The unspecified address of a family.
pub(crate) fn unspecified(v4: bool) -> IpAddr {
    if v4 {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    } else {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    }
}

/// A host, or every host of the family if it is not known which.
fn any_or(host: IpAddr) -> TrafficSelector {
    match host {
        IpAddr::V4(addr) if addr.is_unspecified() => TrafficSelector::any_v4(),
        IpAddr::V6(addr) if addr.is_unspecified() => TrafficSelector::any_v6(),
        host => TrafficSelector::host(host),
    }
}

/// What both sides select, in the order of `ours`, without selectors that another one covers.
pub(crate) fn narrow(ours: &[TrafficSelector], theirs: &[TrafficSelector]) -> Vec<TrafficSelector> {
    let mut out = Vec::new();
    for a in ours {
        for b in theirs {
            if let Some(both) = a.intersection(b) {
                push_unless_covered(&mut out, both);
            }
        }
    }
    out
}

/// Whether every selector of `inner` lies within one of `outer`.
pub(crate) fn covers(outer: &[TrafficSelector], inner: &[TrafficSelector]) -> bool {
    inner.iter().all(|i| outer.iter().any(|o| o.contains(i)))
}

/// For transport mode through a NAT: the peer spoke of addresses as it sees them; here they are
/// `real` (RFC 7296 section 2.23.1).
pub(crate) fn substitute(selectors: &[TrafficSelector], real: IpAddr) -> Vec<TrafficSelector> {
    let mut out = Vec::new();
    for ts in selectors {
        let ts = if ts.start == ts.end && ts.start.is_ipv4() == real.is_ipv4() {
            TrafficSelector {
                start: real,
                end: real,
                ..*ts
            }
        } else {
            *ts
        };
        push_unless_covered(&mut out, ts);
    }
    out
}

/// `10.0.0.0/24 192.0.2.1/32[17/53]` for logs.
pub(crate) fn describe(selectors: &[TrafficSelector]) -> String {
    selectors
        .iter()
        .map(|ts| {
            let net = match ts.prefix_len() {
                Some(len) => format!("{}/{len}", ts.start),
                None => format!("{}..{}", ts.start, ts.end),
            };
            let any_port = ts.start_port == 0 && ts.end_port == u16::MAX;
            match (ts.protocol, any_port) {
                (0, true) => net,
                (p, true) => format!("{net}[{p}]"),
                (p, false) if ts.is_opaque() => format!("{net}[{p}/OPAQUE]"),
                (p, false) if ts.start_port == ts.end_port => {
                    format!("{net}[{p}/{}]", ts.start_port)
                }
                (p, false) => format!("{net}[{p}/{}-{}]", ts.start_port, ts.end_port),
            }
        })
        .collect::<Vec<_>>()
        .join(" ")
}

fn push_unless_covered(out: &mut Vec<TrafficSelector>, ts: TrafficSelector) {
    if out.len() >= MAX_SELECTORS || out.iter().any(|o| o.contains(&ts)) {
        return;
    }
    out.retain(|o| !ts.contains(o));
    out.push(ts);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str, len: u8) -> TrafficSelector {
        TrafficSelector::network(text.parse().unwrap(), len).unwrap()
    }

    #[test]
    fn narrowing_keeps_what_both_sides_allow() {
        let ours = [net("10.0.0.0", 8), net("192.0.2.0", 24)];
        let theirs = [net("10.1.0.0", 16), net("0.0.0.0", 0)];

        assert_eq!(
            narrow(&ours, &theirs),
            vec![net("10.0.0.0", 8), net("192.0.2.0", 24)]
        );
        assert_eq!(narrow(&ours[..1], &theirs[..1]), vec![net("10.1.0.0", 16)]);
        assert!(narrow(&ours[1..], &theirs[..1]).is_empty());
    }

    #[test]
    fn dynamic_stands_for_the_host() {
        let host: IpAddr = "192.0.2.7".parse().unwrap();

        assert_eq!(resolve(&[], &[host]), vec![TrafficSelector::host(host)]);
    }
}
