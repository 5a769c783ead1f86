// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The environment of a script. Names and forms are those of strongSwan's plugin `updown`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_config::identity::display_identity;
use swanherd_ike::api::{ChildSaInfo, IkeSaInfo};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::Mark;

/// Version of this interface.
const VERSION: &str = "1.1";
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// One call of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    /// `up-client` and the like.
    pub(super) verb: String,
    /// Variables in the order in which they were added.
    pub(super) variables: Vec<(String, String)>,
}

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    /// Whether the child came up.
    pub(super) up: bool,
    pub(super) sa: &'a IkeSaInfo,
    pub(super) child: &'a ChildSaInfo,
    /// Interface that has the local address.
    pub(super) interface: Option<&'a str>,
    /// `hostaccess`.
    pub(super) host_access: bool,
}

/// A call for each pair of selectors between which packets can flow.
pub(super) fn calls(subject: Subject<'_>) -> Vec<Call> {
    let child = subject.child;
    let mut calls = Vec::new();
    for local in &child.local_ts {
        for remote in &child.remote_ts {
            let family = local.start.is_ipv4() == remote.start.is_ipv4();
            let protocol =
                local.protocol == remote.protocol || local.protocol == 0 || remote.protocol == 0;
            if family && protocol {
                calls.push(call(subject, local, remote));
            }
        }
    }
    calls
}

fn call(subject: Subject<'_>, local: &TrafficSelector, remote: &TrafficSelector) -> Call {
    let Subject { sa, child, .. } = subject;
    let own = sa.local.ip();
    let verb = format!(
        "{}-{}{}",
        if subject.up { "up" } else { "down" },
        if local.start == own && local.end == own {
            "host"
        } else {
            "client"
        },
        if local.start.is_ipv6() { "-v6" } else { "" }
    );
    let (own_port, peer_port) = ports(local, remote);
    let mut variables = Variables(Vec::new());
    variables.set("VERSION", VERSION);
    variables.set("VERB", &verb);
    variables.set("CONNECTION", &child.name);
    variables.set("INTERFACE", subject.interface.unwrap_or("unknown"));
    variables.set("REQID", child.reqid);
    variables.set("PROTO", "esp");
    variables.set("UNIQUEID", sa.id);
    variables.set("ME", own);
    variables.set("MY_ID", display_identity(&sa.local_id));
    variables.set("MY_CLIENT", network(local));
    variables.set("MY_PORT", own_port);
    variables.set("MY_PROTOCOL", local.protocol);
    variables.set("PEER", sa.remote.ip());
    variables.set("PEER_ID", display_identity(&sa.remote_id));
    variables.set("PEER_CLIENT", network(remote));
    variables.set("PEER_PORT", peer_port);
    variables.set("PEER_PROTOCOL", remote.protocol);
    variables.set_addresses(&sa.local_vips);
    for (name, mark) in [("MARK_IN", child.mark_in), ("MARK_OUT", child.mark_out)] {
        if let Some(Mark { value, mask }) = mark {
            variables.set(name, format!("{value}/{mask:#010x}"));
        }
    }
    for (name, id) in [("IF_ID_IN", child.if_id.0), ("IF_ID_OUT", child.if_id.1)] {
        if id != 0 {
            variables.set(name, id);
        }
    }
    if child.encap {
        variables.set("UDP_ENC", sa.remote.port());
    }
    if subject.host_access {
        variables.set("HOST_ACCESS", 1);
    }
    Call {
        verb,
        variables: variables.0,
    }
}

struct Variables(Vec<(String, String)>);

impl Variables {
    fn set(&mut self, name: &str, value: impl ToString) {
        // No variable of an environment can hold a zero octet.
        let value = value.to_string().replace('\0', "?");
        self.0.push((format!("PLUTO_{name}"), value));
    }

    /// Virtual addresses: the first one, and each by its number within its family.
    fn set_addresses(&mut self, addresses: &[IpAddr]) {
        if let Some(first) = addresses.first() {
            self.set("MY_SOURCEIP", first);
        }
        for (family, version) in [
            (IpAddr::is_ipv4 as fn(&IpAddr) -> bool, 4),
            (IpAddr::is_ipv6, 6),
        ] {
            let of_family = addresses.iter().filter(|address| family(address));
            for (number, address) in (1..).zip(of_family) {
                self.set(&format!("MY_SOURCEIP{version}_{number}"), address);
            }
        }
    }
}

/// Own port and the peer's: 0 for any, `FIRST:LAST` for a range; or type and code of ICMP.
fn ports(local: &TrafficSelector, remote: &TrafficSelector) -> (String, String) {
    if matches!(local.protocol.max(remote.protocol), ICMP | ICMPV6) {
        let of = |selector: &TrafficSelector| {
            Some(selector.start_port).filter(|port| *port != 0 && !selector.is_opaque())
        };
        let message = of(local).or_else(|| of(remote)).unwrap_or(0);
        return ((message >> 8).to_string(), (message & 0xff).to_string());
    }
    (port(local), port(remote))
}

fn port(selector: &TrafficSelector) -> String {
    match (selector.start_port, selector.end_port) {
        (first, last) if first == last => first.to_string(),
        (0, u16::MAX) => "0".to_owned(),
        _ if selector.is_opaque() => "0".to_owned(),
        (first, last) => format!("{first}:{last}"),
    }
}

/// The smallest network that holds a range of addresses.
fn network(selector: &TrafficSelector) -> String {
    match (selector.start, selector.end) {
        (IpAddr::V4(start), IpAddr::V4(end)) => {
            let (start, end) = (start.to_bits(), end.to_bits());
            let prefix = (start ^ end).leading_zeros();
            let host = u32::MAX.checked_shr(prefix).unwrap_or(0);
            format!("{}/{prefix}", Ipv4Addr::from_bits(start & !host))
        }
        (start, end) => {
            let bits = |address| match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
                IpAddr::V6(v6) => v6.to_bits(),
            };
            let (start, end) = (bits(start), bits(end));
            let prefix = (start ^ end).leading_zeros();
            let host = u128::MAX.checked_shr(prefix).unwrap_or(0);
            format!("{}/{prefix}", Ipv6Addr::from_bits(start & !host))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{child_info, ike_info};
    use super::*;

    fn selector(start: &str, end: &str, protocol: u8, ports: (u16, u16)) -> TrafficSelector {
        TrafficSelector {
            protocol,
            start_port: ports.0,
            end_port: ports.1,
            start: start.parse().unwrap(),
            end: end.parse().unwrap(),
        }
    }

    fn net(start: &str, end: &str) -> TrafficSelector {
        selector(start, end, 0, (0, u16::MAX))
    }

    fn calls_of(up: bool, sa: &IkeSaInfo, child: &ChildSaInfo) -> Vec<Call> {
        calls(Subject {
            up,
            sa,
            child,
            interface: Some("eth0"),
            host_access: false,
        })
    }

    fn value<'a>(call: &'a Call, name: &str) -> Option<&'a str> {
        call.variables
            .iter()
            .find(|(key, _)| key.strip_prefix("PLUTO_") == Some(name))
            .map(|(_, value)| value.as_str())
    }

    #[test]
    fn everything_that_is_known_is_told_in_the_forms_of_strongswan() {
        let mut sa = ike_info();
        sa.local_vips = ["10.9.0.1", "fd09::1", "10.9.0.2"]
            .map(|address| address.parse().unwrap())
            .to_vec();
        let mut child = child_info();
        child.mark_in = Some(Mark {
            value: 42,
            mask: u32::MAX,
        });
        child.mark_out = Some(Mark {
            value: 42,
            mask: 0xff,
        });
        child.if_id = (31, 32);
        child.encap = true;

        let calls = calls(Subject {
            up: true,
            sa: &sa,
            child: &child,
            interface: None,
            host_access: true,
        });

        let [call] = &calls[..] else {
            panic!("{calls:?}");
        };
        let told: Vec<_> = call
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        assert_eq!(
            told,
            [
                "PLUTO_VERSION=1.1",
                "PLUTO_VERB=up-client",
                "PLUTO_CONNECTION=net",
                "PLUTO_INTERFACE=unknown",
                "PLUTO_REQID=5",
                "PLUTO_PROTO=esp",
                "PLUTO_UNIQUEID=3",
                "PLUTO_ME=192.0.2.1",
                "PLUTO_MY_ID=gw1.example.org",
                "PLUTO_MY_CLIENT=10.1.0.0/24",
                "PLUTO_MY_PORT=0",
                "PLUTO_MY_PROTOCOL=0",
                "PLUTO_PEER=192.0.2.2",
                "PLUTO_PEER_ID=gw2.example.org",
                "PLUTO_PEER_CLIENT=10.2.0.0/24",
                "PLUTO_PEER_PORT=0",
                "PLUTO_PEER_PROTOCOL=0",
                "PLUTO_MY_SOURCEIP=10.9.0.1",
                "PLUTO_MY_SOURCEIP4_1=10.9.0.1",
                "PLUTO_MY_SOURCEIP4_2=10.9.0.2",
                "PLUTO_MY_SOURCEIP6_1=fd09::1",
                "PLUTO_MARK_IN=42/0xffffffff",
                "PLUTO_MARK_OUT=42/0x000000ff",
                "PLUTO_IF_ID_IN=31",
                "PLUTO_IF_ID_OUT=32",
                "PLUTO_UDP_ENC=4500",
                "PLUTO_HOST_ACCESS=1",
            ]
        );
    }

    #[test]
    fn selectors_pair_within_families_and_protocols() {
        let sa = ike_info();
        let mut child = child_info();
        child.local_ts = vec![
            net("10.1.0.0", "10.1.0.255"),
            net("fd00:1::", "fd00:1::ffff:ffff:ffff:ffff"),
            selector("192.0.2.1", "192.0.2.1", 6, (443, 443)),
        ];
        child.remote_ts = vec![
            selector("10.2.0.1", "10.2.0.1", 17, (0, u16::MAX)),
            net("fd00:2::", "fd00:2::ffff:ffff:ffff:ffff"),
            selector("10.2.0.2", "10.2.0.2", 6, (0, u16::MAX)),
        ];

        let seen: Vec<_> = calls_of(false, &sa, &child)
            .iter()
            .map(|call| {
                let of = |name| value(call, name).unwrap_or_default().to_owned();
                format!("{} {} {}", call.verb, of("MY_CLIENT"), of("PEER_CLIENT"))
            })
            .collect();

        assert_eq!(
            seen,
            [
                "down-client 10.1.0.0/24 10.2.0.1/32",
                "down-client 10.1.0.0/24 10.2.0.2/32",
                "down-client-v6 fd00:1::/64 fd00:2::/64",
                "down-host 192.0.2.1/32 10.2.0.2/32",
            ]
        );
    }

    #[test]
    fn ports_ranges_and_icmp_are_what_scripts_expect() {
        let sa = ike_info();
        let any = (0, u16::MAX);
        for (protocol, local, remote, expected) in [
            (6, (443, 443), any, ("443", "0")),
            (17, (100, 200), (53, 53), ("100:200", "53")),
            (1, (0x0803, 0x0803), (0x0803, 0x0803), ("8", "3")),
            (1, any, any, ("0", "0")),
            (58, any, (0x8000, 0x80ff), ("128", "0")),
            (132, (u16::MAX, 0), any, ("0", "0")),
        ] {
            let mut child = child_info();
            child.local_ts = vec![selector("10.1.0.5", "10.1.0.9", protocol, local)];
            child.remote_ts = vec![selector("10.2.0.3", "10.2.0.20", protocol, remote)];

            let call = &calls_of(true, &sa, &child)[0];

            let found = (value(call, "MY_PORT"), value(call, "PEER_PORT"));
            assert_eq!(found, (Some(expected.0), Some(expected.1)));
            assert_eq!(value(call, "MY_CLIENT"), Some("10.1.0.0/28"));
            assert_eq!(value(call, "PEER_CLIENT"), Some("10.2.0.0/27"));
        }
    }

    #[test]
    fn what_is_everything_is_the_network_of_length_zero() {
        assert_eq!(network(&TrafficSelector::any_v4()), "0.0.0.0/0");
        assert_eq!(network(&TrafficSelector::any_v6()), "::/0");
    }
}
