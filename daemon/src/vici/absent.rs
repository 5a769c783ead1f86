// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands of features that are not there: redirecting peers, address pools, tokens. They look at
//! their arguments as charon does, so that a mistake is told from a lack.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_config::identity::IdentityPattern;
use swanherd_ike::api::Selector;
use swanherd_vici::{Item, Message};

use super::args::{failure, id, success, text};
use crate::control::Control;

/// `redirect`: this side follows redirects and sends none (RFC 5685).
pub(super) fn redirect(control: &Control, args: &Message) -> Message {
    let Some(gateway) = text(args, "gateway") else {
        return failure("missing target gateway");
    };
    if !is_gateway(gateway) {
        return failure("unsupported gateway identity");
    }
    let peer_ip = match text(args, "peer-ip").map(range) {
        Some(None) => return failure("invalid peer IP selector"),
        found => found.flatten(),
    };
    let peer_id = match text(args, "peer-id").map(IdentityPattern::parse) {
        Some(Err(_)) => return failure("invalid peer identity selector"),
        found => found.and_then(Result::ok),
    };
    let selector = Selector {
        ike: text(args, "ike").map(str::to_owned),
        ike_id: id(args, "ike-id"),
        ..Selector::default()
    };
    if selector == Selector::default() && peer_ip.is_none() && peer_id.is_none() {
        return failure("missing redirect selector");
    }
    let snapshot = control.snapshot();
    let matches = snapshot.matches(&selector).into_iter().filter(|found| {
        snapshot.ike_sas.get(&found.ike).is_some_and(|sa| {
            peer_ip.is_none_or(|(first, last)| {
                let addr = sa.remote.ip();
                addr.is_ipv4() == first.is_ipv4() && (first..=last).contains(&addr)
            }) && peer_id
                .as_ref()
                .is_none_or(|pattern| pattern.matches(&sa.remote_id).is_some())
        })
    });
    let matches = matches.count();
    let text = match matches {
        0 => "no matching SAs to redirect found",
        _ => "redirection of peers is not supported",
    };
    let mut out = Message::new();
    out.push("success", "no");
    out.push_display("matches", matches);
    out.push("errmsg", text);
    out
}

/// Whether a peer could be sent there: an address or a domain name.
fn is_gateway(text: &str) -> bool {
    use swanherd_ipsec::identity::IdType;
    let pattern = IdentityPattern::parse(text).ok();
    pattern
        .and_then(|pattern| pattern.id_type())
        .is_some_and(|kind| matches!(kind, IdType::Ipv4Addr | IdType::Ipv6Addr | IdType::Fqdn))
}

/// `load-token`: there is no support for PKCS#11.
pub(super) fn load_token(args: &Message) -> Message {
    match text(args, "handle") {
        None => failure("keyid missing"),
        Some(_) => failure("loading private key from token failed")
            .with("reason", "PKCS#11 tokens are not supported"),
    }
}

/// `load-pool`: there are no address pools. A pool with a mistake is refused for its mistake.
pub(super) fn load_pool(args: &Message) -> Message {
    let mut first = None;
    for (name, item) in args.iter() {
        let Item::Section(pool) = item else {
            return failure("parsing request failed");
        };
        if let Err(text) = check_pool(name, pool) {
            return failure(text);
        }
        first = first.or(Some(name));
    }
    match first {
        None => success(),
        Some(name) => failure(format!(
            "pool '{name}': virtual address pools are not supported"
        )),
    }
}

/// What the values of a pool's attribute are.
#[derive(Clone, Copy)]
enum Attribute {
    /// Addresses.
    Address,
    /// Subnets.
    Subnet,
    /// Whatever the number of a configuration attribute stands for.
    Any,
}

fn check_pool(name: &str, pool: &Message) -> Result<(), String> {
    let mut addrs = None;
    for (key, item) in pool.iter() {
        match item {
            Item::Value(value) if key == "addrs" => {
                if addrs.is_some() {
                    return Err("multiple addrs defined".to_owned());
                }
                let text = core::str::from_utf8(value).unwrap_or_default();
                if range(text).is_none() {
                    return Err(format!("invalid addrs value: {text}"));
                }
                addrs = Some(());
            }
            Item::List(values) => {
                let kind = attribute(key).ok_or_else(|| format!("invalid attribute: {key}"))?;
                let fits = |value: &Vec<u8>| {
                    core::str::from_utf8(value).is_ok_and(|text| match kind {
                        Attribute::Address => text.parse::<IpAddr>().is_ok(),
                        Attribute::Subnet => text.contains('/') && range(text).is_some(),
                        Attribute::Any => !text.is_empty(),
                    })
                };
                if !values.iter().all(fits) {
                    return Err(format!("invalid attribute value for {key}"));
                }
            }
            Item::Value(_) => return Err(format!("invalid attribute: {key}")),
            Item::Section(_) => return Err("parsing request failed".to_owned()),
        }
    }
    addrs.ok_or_else(|| format!("missing addrs for pool '{name}'"))
}

fn attribute(key: &str) -> Option<Attribute> {
    match key.to_ascii_lowercase().as_str() {
        "address" | "dns" | "nbns" | "dhcp" | "netmask" | "server" | "p_cscf" => {
            Some(Attribute::Address)
        }
        "subnet" | "split_include" | "split_exclude" => Some(Attribute::Subnet),
        number => number.parse::<u16>().ok().map(|_| Attribute::Any),
    }
}

/// `unload-pool`.
pub(super) fn unload_pool(args: &Message) -> Message {
    match text(args, "name") {
        None => failure("missing pool name to unload"),
        Some(name) => failure(format!("{name} not found")),
    }
}

/// An address, a subnet, or a range `FROM-TO`, as its first and last address.
fn range(text: &str) -> Option<(IpAddr, IpAddr)> {
    if let Some((first, last)) = text.split_once('-') {
        let (first, last): (IpAddr, IpAddr) =
            (first.trim().parse().ok()?, last.trim().parse().ok()?);
        return (first.is_ipv4() == last.is_ipv4() && first <= last).then_some((first, last));
    }
    let Some((addr, len)) = text.split_once('/') else {
        let addr = text.parse().ok()?;
        return Some((addr, addr));
    };
    let len: u32 = len.parse().ok()?;
    match addr.parse().ok()? {
        IpAddr::V4(addr) if len <= 32 => {
            let hosts = u32::MAX.checked_shr(len).unwrap_or(0);
            let first = addr.to_bits() & !hosts;
            Some((
                Ipv4Addr::from_bits(first).into(),
                Ipv4Addr::from_bits(first | hosts).into(),
            ))
        }
        IpAddr::V6(addr) if len <= 128 => {
            let hosts = u128::MAX.checked_shr(len).unwrap_or(0);
            let first = addr.to_bits() & !hosts;
            Some((
                Ipv6Addr::from_bits(first).into(),
                Ipv6Addr::from_bits(first | hosts).into(),
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_three_notations() {
        let ends = |first: &str, last: &str| Some((first.parse().unwrap(), last.parse().unwrap()));
        for (text, expected) in [
            ("192.0.2.1", ends("192.0.2.1", "192.0.2.1")),
            ("192.0.2.9/24", ends("192.0.2.0", "192.0.2.255")),
            ("0.0.0.0/0", ends("0.0.0.0", "255.255.255.255")),
            ("192.0.2.1/32", ends("192.0.2.1", "192.0.2.1")),
            ("192.0.2.1-192.0.2.9", ends("192.0.2.1", "192.0.2.9")),
            (
                "2001:db8::/64",
                ends("2001:db8::", "2001:db8::ffff:ffff:ffff:ffff"),
            ),
            ("192.0.2.9-192.0.2.1", None),
            ("192.0.2.1-2001:db8::1", None),
            ("192.0.2.1/33", None),
            ("gw.example.org", None),
            ("", None),
        ] {
            assert_eq!(range(text), expected, "{text}");
        }
    }

    #[test]
    fn pools_are_refused_for_what_is_wrong_with_them() {
        let pool = |pool: Message| {
            let good = Message::new().with("addrs", "10.3.0.0/24");
            let args = Message::new()
                .with_section("good", good)
                .with_section("p", pool);
            load_pool(&args).str("errmsg").unwrap().to_owned()
        };
        let addrs = || Message::new().with("addrs", "10.3.1.1-10.3.1.9");
        for (section, text) in [
            (
                addrs()
                    .with_list("dns", ["10.3.0.1"])
                    .with_list("25", ["x"]),
                "pool 'good': virtual address pools are not supported",
            ),
            (Message::new(), "missing addrs for pool 'p'"),
            (
                addrs().with("addrs", "10.4.0.0/16"),
                "multiple addrs defined",
            ),
            (
                Message::new().with("addrs", "10.3.0.0/99"),
                "invalid addrs value: 10.3.0.0/99",
            ),
            (
                addrs().with_list("colour", ["red"]),
                "invalid attribute: colour",
            ),
            (addrs().with("dns", "10.3.0.1"), "invalid attribute: dns"),
            (
                addrs().with_list("dns", ["10.3.0.1", "x"]),
                "invalid attribute value for dns",
            ),
            (
                addrs().with_list("subnet", ["10.3.0.1"]),
                "invalid attribute value for subnet",
            ),
        ] {
            assert_eq!(pool(section), text);
        }
        assert_eq!(load_pool(&Message::new()).str("success"), Some("yes"));
    }
}
