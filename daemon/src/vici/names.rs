// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What enumerations are called in VICI, and texts of values.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::LazyLock;

use swanherd_config::files::SystemFiles;
use swanherd_config::names::Names;
use swanherd_config::value::display_selector;
use swanherd_ike::api::{ChildState, Counter, Exchange, IkeState};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::Mode;

/// Protocols and services by name, as this host knows them.
pub(super) static NAMES: LazyLock<Names> = LazyLock::new(|| Names::system(&SystemFiles));

/// A traffic selector.
pub(super) fn selector(selector: &TrafficSelector) -> String {
    display_selector(selector, &NAMES)
}

/// Name of an IKE SA that no connection has been chosen for.
pub(super) const UNNAMED: &str = "(unnamed)";

/// Counters of `get-counters`, in the order of the answer.
pub(super) const COUNTERS: [(&str, Counter); 21] = [
    ("ike-rekey-init", Counter::IkeRekeyInit),
    ("ike-rekey-resp", Counter::IkeRekeyResp),
    ("child-rekey", Counter::ChildRekey),
    ("invalid", Counter::Invalid),
    ("invalid-spi", Counter::InvalidSpi),
    ("ike-init-in-req", message(Exchange::IkeSaInit, true, false)),
    ("ike-init-in-resp", message(Exchange::IkeSaInit, true, true)),
    (
        "ike-init-out-req",
        message(Exchange::IkeSaInit, false, false),
    ),
    (
        "ike-init-out-resp",
        message(Exchange::IkeSaInit, false, true),
    ),
    ("ike-auth-in-req", message(Exchange::IkeAuth, true, false)),
    ("ike-auth-in-resp", message(Exchange::IkeAuth, true, true)),
    ("ike-auth-out-req", message(Exchange::IkeAuth, false, false)),
    ("ike-auth-out-resp", message(Exchange::IkeAuth, false, true)),
    (
        "create-child-in-req",
        message(Exchange::CreateChildSa, true, false),
    ),
    (
        "create-child-in-resp",
        message(Exchange::CreateChildSa, true, true),
    ),
    (
        "create-child-out-req",
        message(Exchange::CreateChildSa, false, false),
    ),
    (
        "create-child-out-resp",
        message(Exchange::CreateChildSa, false, true),
    ),
    ("info-in-req", message(Exchange::Informational, true, false)),
    ("info-in-resp", message(Exchange::Informational, true, true)),
    (
        "info-out-req",
        message(Exchange::Informational, false, false),
    ),
    (
        "info-out-resp",
        message(Exchange::Informational, false, true),
    ),
];

const fn message(exchange: Exchange, inbound: bool, response: bool) -> Counter {
    Counter::Message {
        exchange,
        inbound,
        response,
    }
}

pub(super) const fn ike_state(state: IkeState) -> &'static str {
    match state {
        IkeState::Created => "CREATED",
        IkeState::Connecting => "CONNECTING",
        IkeState::Established => "ESTABLISHED",
        IkeState::Rekeying => "REKEYING",
        IkeState::Rekeyed => "REKEYED",
        IkeState::Deleting => "DELETING",
        IkeState::Destroying => "DESTROYING",
    }
}

pub(super) const fn child_state(state: ChildState) -> &'static str {
    match state {
        ChildState::Created => "CREATED",
        ChildState::Installing => "INSTALLING",
        ChildState::Installed => "INSTALLED",
        ChildState::Updating => "UPDATING",
        ChildState::Rekeying => "REKEYING",
        ChildState::Rekeyed => "REKEYED",
        ChildState::Deleting => "DELETING",
        ChildState::Deleted => "DELETED",
    }
}

pub(super) const fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Tunnel => "TUNNEL",
        Mode::Transport => "TRANSPORT",
        Mode::Beet => "BEET",
    }
}

/// An address, or `%any` if it is not known.
pub(super) fn host(addr: IpAddr) -> String {
    match addr {
        IpAddr::V4(v4) if v4.is_unspecified() => "%any".to_owned(),
        IpAddr::V6(v6) if v6.is_unspecified() => "%any6".to_owned(),
        known => known.to_string(),
    }
}

/// A name that the protocol can carry: connections read from files may be called anything.
pub(super) fn printable(name: &str) -> Cow<'_, str> {
    let fits = |c: char| c == ' ' || c.is_ascii_graphic();
    if name.len() <= 255 && name.chars().all(fits) {
        return Cow::Borrowed(name);
    }
    name.chars()
        .take(255)
        .map(|c| if fits(c) { c } else { '?' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_protocol_cannot_carry_are_replaced() {
        assert_eq!(printable("gw-1"), "gw-1");
        assert_eq!(printable("b\u{fc}ro\n"), "b?ro?");
        assert_eq!(printable(&"x".repeat(300)).len(), 255);
    }
}
