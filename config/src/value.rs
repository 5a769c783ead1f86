// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers, times, marks, addresses and traffic selectors as options write them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::Mark;

use crate::model::{Action, HostSpec, IfId, MarkSpec, SelectorSpec};
use crate::names::Names;

const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;

/// `yes true enabled 1` and `no false disabled 0`, in any case.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    let is = |words: [&str; 4]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    if is(["yes", "true", "enabled", "1"]) {
        Some(true)
    } else if is(["no", "false", "disabled", "0"]) {
        Some(false)
    } else {
        None
    }
}

/// Decimal, `0x` hexadecimal, or octal with a leading 0.
pub(crate) fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    if digits.is_empty() || !digits.bytes().all(|octet| octet.is_ascii_alphanumeric()) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

pub(crate) fn number32(text: &str) -> Option<u32> {
    u32::try_from(number(text)?).ok()
}

pub(crate) fn number16(text: &str) -> Option<u16> {
    u16::try_from(number(text)?).ok()
}

/// Seconds, or with a suffix `s m h d`; at most 2^32 - 1 seconds.
pub(crate) fn time(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (digits, factor) = match text.as_bytes().last()? {
        b's' | b'S' => (&text[..text.len() - 1], 1),
        b'm' | b'M' => (&text[..text.len() - 1], 60),
        b'h' | b'H' => (&text[..text.len() - 1], 3600),
        b'd' | b'D' if !hexadecimal(text) => (&text[..text.len() - 1], 86_400),
        _ => (text, 1),
    };
    let seconds = number(digits)?.checked_mul(factor)?;
    u32::try_from(seconds).ok()?;
    Some(Duration::from_secs(seconds))
}

fn hexadecimal(text: &str) -> bool {
    text.starts_with("0x") || text.starts_with("0X")
}

/// Octets, or with a suffix `k m g` (powers of 1024); saturates.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    Some(number(digits)?.saturating_mul(1 << shift))
}

/// Binary digits of a DSCP.
pub(crate) fn dscp(text: &str) -> Option<u8> {
    let value = u32::from_str_radix(text.trim(), 2).ok()?;
    u8::try_from(value & 0x3f).ok()
}

/// `mark_in` and its kin.
pub(crate) fn mark(text: &str) -> Option<MarkSpec> {
    let (value, mask) = match text.split_once('/') {
        Some((value, mask)) => (value.trim(), number32(mask)?),
        None => (text.trim(), u32::MAX),
    };
    Some(match value {
        "%unique" => MarkSpec::Unique(mask),
        "%unique-dir" => MarkSpec::UniqueDir(mask),
        "%same" => MarkSpec::Same(mask),
        _ => {
            let value = number32(value)? & mask;
            // Value and mask 0 is how "none" is written.
            if value == 0 && (mask == 0 || mask == u32::MAX) {
                MarkSpec::None
            } else {
                MarkSpec::Mark(Mark { value, mask })
            }
        }
    })
}

/// `if_id_in` and its kin.
pub(crate) fn if_id(text: &str) -> Option<IfId> {
    Some(match text.trim() {
        "%unique" => IfId::Unique,
        "%unique-dir" => IfId::UniqueDir,
        other => match number32(other)? {
            0 => IfId::None,
            id => IfId::Id(id),
        },
    })
}

/// `start_action` and `close_action`; `trap|start` is both.
pub(crate) fn action(text: &str) -> Option<Action> {
    let mut action = Action::default();
    for word in text.split('|') {
        match word.trim().to_ascii_lowercase().as_str() {
            "start" | "restart" => action.start = true,
            "trap" | "route" => action.trap = true,
            "none" | "clear" => {}
            _ => return None,
        }
    }
    Some(action)
}

/// An entry of `local_addrs` or `remote_addrs`.
pub(crate) fn host(text: &str) -> Option<HostSpec> {
    match text {
        "%any" => return Some(HostSpec::Any(None)),
        "%any4" | "0.0.0.0" => return Some(HostSpec::Any(Some(true))),
        "%any6" | "::" => return Some(HostSpec::Any(Some(false))),
        _ => {}
    }
    if let Ok(address) = text.parse() {
        return Some(HostSpec::Addr(address));
    }
    if let Some((address, prefix)) = text.split_once('/') {
        let address: IpAddr = address.parse().ok()?;
        let prefix: u8 = prefix.parse().ok()?;
        TrafficSelector::network(address, prefix)?;
        return Some(HostSpec::Network(address, prefix));
    }
    if let Some((first, last)) = text.split_once('-')
        && let (Ok(first), Ok(last)) = (first.trim().parse(), last.trim().parse())
    {
        let (first, last): (IpAddr, IpAddr) = (first, last);
        return (first.is_ipv4() == last.is_ipv4() && first <= last)
            .then_some(HostSpec::Range(first, last));
    }
    let plausible = !text.is_empty()
        && text.len() <= 253
        && text
            .bytes()
            .all(|octet| octet.is_ascii_alphanumeric() || b".-_".contains(&octet))
        // All digits and dots would be a mistyped address.
        && !text
            .bytes()
            .all(|octet| octet.is_ascii_digit() || octet == b'.');
    plausible.then(|| HostSpec::Name(text.to_owned()))
}

/// A traffic selector. The second part is a remark if the text does not say quite what it means.
pub(crate) fn selector(text: &str, names: &Names) -> Option<(SelectorSpec, Option<String>)> {
    let (addresses, protocol, ports) = match text.split_once('[') {
        Some((addresses, rest)) => {
            let inner = rest.trim_end().strip_suffix(']')?;
            let (protocol, ports) = inner.split_once('/').unwrap_or((inner, ""));
            let protocol = self::protocol(protocol, names)?;
            (
                addresses.trim(),
                protocol,
                port_range(ports, protocol, names)?,
            )
        }
        None => (text.trim(), 0, (0, u16::MAX)),
    };
    if addresses == "dynamic" {
        let spec = SelectorSpec::Dynamic {
            protocol,
            start_port: ports.0,
            end_port: ports.1,
        };
        return Some((spec, None));
    }
    let mut remark = None;
    let mut selector = if let Some((first, last)) = addresses.split_once('-') {
        let (first, last): (IpAddr, IpAddr) =
            (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first.is_ipv4() != last.is_ipv4() || first > last {
            return None;
        }
        TrafficSelector {
            start: first,
            end: last,
            ..TrafficSelector::any_v4()
        }
    } else if let Some((address, prefix)) = addresses.split_once('/') {
        let address: IpAddr = address.parse().ok()?;
        let network = TrafficSelector::network(address, prefix.parse().ok()?)?;
        if network.start != address {
            remark = Some(format!(
                "{addresses} has bits beyond its prefix; it means {}/{prefix}",
                network.start
            ));
        }
        network
    } else {
        TrafficSelector::host(addresses.parse().ok()?)
    };
    selector.protocol = protocol;
    (selector.start_port, selector.end_port) = ports;
    Some((SelectorSpec::Fixed(selector), remark))
}

fn protocol(text: &str, names: &Names) -> Option<u8> {
    if text.is_empty() || text == "any" {
        return Some(0);
    }
    names
        .protocol(text)
        .or_else(|| u8::try_from(number(text)?).ok())
}

fn port_range(text: &str, protocol: u8, names: &Names) -> Option<(u16, u16)> {
    let (first, last) = if text.is_empty() || text == "any" {
        return Some((0, u16::MAX));
    } else if text == "opaque" {
        return Some((u16::MAX, 0));
    } else if let Some(port) = names.port(text) {
        (port, port)
    } else if let Some((first, last)) = text.split_once('-') {
        (number16(first)?, number16(last)?)
    } else {
        let port = number16(text)?;
        (port, port)
    };
    if first > last {
        return None;
    }
    if matches!(protocol, ICMP | ICMP_V6) {
        // A number that fits one octet is a type; larger ones are type and code.
        let packed = |n: u16| if n < 256 { n << 8 } else { n };
        return Some((packed(first), packed(last)));
    }
    Some((first, last))
}

/// A traffic selector as VICI prints it.
pub fn display_selector(selector: &TrafficSelector, names: &Names) -> String {
    let mut text = match selector.prefix_len() {
        Some(prefix) => format!("{}/{prefix}", selector.start),
        None => format!("{}..{}", selector.start, selector.end),
    };
    text.push_str(&display_suffix(
        selector.protocol,
        selector.start_port,
        selector.end_port,
        names,
    ));
    text
}

/// A configured selector as VICI prints it.
pub fn display_selector_spec(spec: &SelectorSpec, names: &Names) -> String {
    match spec {
        SelectorSpec::Fixed(selector) => display_selector(selector, names),
        SelectorSpec::Dynamic {
            protocol,
            start_port,
            end_port,
        } => format!(
            "dynamic{}",
            display_suffix(*protocol, *start_port, *end_port, names)
        ),
    }
}

fn display_suffix(protocol: u8, start: u16, end: u16, names: &Names) -> String {
    let any_port = start == 0 && end == u16::MAX;
    if protocol == 0 && any_port {
        return String::new();
    }
    let mut text = String::from("[");
    match names.protocol_name(protocol) {
        Some(name) if protocol != 0 => text.push_str(name),
        _ => text.push_str(&protocol.to_string()),
    }
    if !any_port {
        text.push('/');
        let icmp = matches!(protocol, ICMP | ICMP_V6);
        let port = |port: u16| {
            if icmp {
                match (port >> 8, port & 0xff) {
                    (kind, 0) => kind.to_string(),
                    (kind, code) => format!("{kind}({code})"),
                }
            } else {
                port.to_string()
            }
        };
        if start == u16::MAX && end == 0 {
            text.push_str("OPAQUE");
        } else if start == end {
            match names.service(protocol, start) {
                Some(name) if !icmp => text.push_str(name),
                _ => text.push_str(&port(start)),
            }
        } else {
            text.push_str(&format!("{}-{}", port(start), port(end)));
        }
    }
    text.push(']');
    text
}

/// An entry of `local_addrs` as VICI prints it.
pub(crate) fn display_host(host: &HostSpec) -> String {
    match host {
        HostSpec::Addr(address) => address.to_string(),
        HostSpec::Network(address, prefix) => format!("{address}/{prefix}"),
        HostSpec::Range(first, last) => format!("{first}-{last}"),
        HostSpec::Name(name) => name.clone(),
        HostSpec::Any(None) => "%any".to_owned(),
        HostSpec::Any(Some(true)) => "%any4".to_owned(),
        HostSpec::Any(Some(false)) => "%any6".to_owned(),
    }
}

/// `vips`: an address; the unspecified ones ask for any.
pub(crate) fn virtual_ip(text: &str) -> Option<IpAddr> {
    match text {
        "%any" | "%any4" => Some(Ipv4Addr::UNSPECIFIED.into()),
        "%any6" => Some(Ipv6Addr::UNSPECIFIED.into()),
        _ => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_have_the_bases_of_c() {
        assert_eq!(number("42"), Some(42));
        assert_eq!(number("0x2a"), Some(42));
        assert_eq!(number("052"), Some(42));
        assert_eq!(number("0"), Some(0));
        for text in ["", "0x", "-1", "+1", "4 2", "x", "08"] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn times_and_sizes_have_suffixes() {
        assert_eq!(time("66m"), Some(Duration::from_secs(3960)));
        assert_eq!(time("1 h"), Some(Duration::from_secs(3600)));
        assert_eq!(time("2D"), Some(Duration::from_secs(172_800)));
        assert_eq!(bytes("100000K"), Some(102_400_000));
        assert_eq!(bytes("1G"), Some(1 << 30));
        for text in ["500ms", "1w", "", "h", "99999999d"] {
            assert_eq!(time(text), None, "{text}");
        }
        assert_eq!(bytes("500B"), None);
    }

    #[test]
    fn hosts_are_told_apart() {
        assert_eq!(host("%any"), Some(HostSpec::Any(None)));
        assert_eq!(
            host("gw.example.org"),
            Some(HostSpec::Name("gw.example.org".into()))
        );
        assert!(matches!(
            host("192.0.2.0/24"),
            Some(HostSpec::Network(_, 24))
        ));
        assert!(matches!(
            host("192.0.2.1-192.0.2.9"),
            Some(HostSpec::Range(..))
        ));
        for text in [
            "192.0.2.300",
            "192.0.2.0/33",
            "a b",
            "192.0.2.9-192.0.2.1",
            "",
        ] {
            assert_eq!(host(text), None, "{text}");
        }
    }

    #[test]
    fn selectors_print_as_strongswan_prints_them() {
        let names = Names::builtin();
        for (text, shown) in [
            ("192.0.2.77/24", "192.0.2.0/24"),
            ("192.0.2.1", "192.0.2.1/32"),
            ("192.0.2.10-192.0.2.20", "192.0.2.10..192.0.2.20"),
            ("dynamic[tcp/443]", "dynamic[tcp/https]"),
            ("dynamic[udp/l2f]", "dynamic[udp/l2f]"),
            ("192.0.2.0/24[/53]", "192.0.2.0/24[0/domain]"),
            ("192.0.2.0/24[any/53]", "192.0.2.0/24[0/domain]"),
            ("192.0.2.0/24[gre]", "192.0.2.0/24[gre]"),
            ("192.0.2.1/32[17/opaque]", "192.0.2.1/32[udp/OPAQUE]"),
            ("192.0.2.0/24[icmp/2048]", "192.0.2.0/24[icmp/8]"),
            ("192.0.2.0/24[icmp/8]", "192.0.2.0/24[icmp/8]"),
            (
                "192.0.2.0/24[udp/1024-65535]",
                "192.0.2.0/24[udp/1024-65535]",
            ),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("::/0", "::/0"),
        ] {
            let (spec, _) = selector(text, &names).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(display_selector_spec(&spec, &names), shown, "{text}");
        }
        for text in [
            "%dynamic",
            "192.0.2.0/24[tcp/70000]",
            "dynamic[tcp/443",
            "x",
            "192.0.2.0/33",
            "192.0.2.0/24[tcp/9-3]",
        ] {
            assert!(selector(text, &names).is_none(), "{text}");
        }
    }

    #[test]
    fn actions_have_several_names_and_may_be_combined() {
        let both = |trap, start| Some(Action { trap, start });
        for (text, expected) in [
            ("none", both(false, false)),
            ("clear", both(false, false)),
            ("trap", both(true, false)),
            ("route", both(true, false)),
            ("start", both(false, true)),
            ("restart", both(false, true)),
            ("Restart", both(false, true)),
            ("trap|start", both(true, true)),
            ("start | route", both(true, true)),
            ("", None),
            ("hold", None),
            ("trap,start", None),
        ] {
            assert_eq!(action(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_read_or_refused(text in "\\PC{0,24}") {
            let names = Names::builtin();
            let _ = (boolean(&text), number(&text), time(&text), bytes(&text), dscp(&text));
            let _ = (mark(&text), if_id(&text), action(&text), host(&text), virtual_ip(&text));
            if let Some((spec, _)) = selector(&text, &names) {
                prop_assert!(!display_selector_spec(&spec, &names).is_empty());
            }
        }
    }
}
