// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections as VICI's `list-conns` reports them: same keys, same order.

use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;
use swanherd_ipsec::plane::Mode;

use crate::dn;
use crate::identity::display_identity;
use crate::model::{
    Action, AuthMethod, AuthRound, CertSource, Child, ChildMode, Connection, HostSpec, IkeVersion,
    Revocation, Unique,
};
use crate::names::Names;
use crate::tree::Tree;
use crate::value::{display_host, display_selector_spec};

/// The contents of a `list-conn` event: one section with the connection's name.
pub fn list_conn(connection: &Connection, names: &Names) -> Tree {
    let mut tree = Tree::new();
    tree.push_section(&connection.name, body(connection, names));
    tree
}

/// `none`, `trap`, `start` or `trap | start`, as VICI prints flags.
pub fn action_name(action: Action) -> &'static str {
    match (action.trap, action.start) {
        (false, false) => "none",
        (true, false) => "trap",
        (false, true) => "start",
        (true, true) => "trap | start",
    }
}

/// VICI's name of a child's mode: `TUNNEL`, `TRANSPORT`, `BEET`, `PASS`, `DROP`.
pub fn mode_name(mode: ChildMode) -> &'static str {
    match mode {
        ChildMode::Ipsec(Mode::Tunnel) => "TUNNEL",
        ChildMode::Ipsec(Mode::Transport) => "TRANSPORT",
        ChildMode::TransportProxy => "TRANSPORT_PROXY",
        ChildMode::Ipsec(Mode::Beet) => "BEET",
        ChildMode::Pass => "PASS",
        ChildMode::Drop => "DROP",
    }
}

fn body(connection: &Connection, names: &Names) -> Tree {
    let mut tree = Tree::new();
    tree.push_list("local_addrs", hosts(&connection.local_addrs))
        .push_list("remote_addrs", hosts(&connection.remote_addrs))
        .push_value("local_port", connection.local_port.to_string())
        .push_value("remote_port", connection.remote_port.to_string())
        .push_value(
            "version",
            match connection.version {
                IkeVersion::Any => "IKEv1/2",
                IkeVersion::V1 => "IKEv1",
                IkeVersion::V2 => "IKEv2",
            },
        )
        .push_value("reauth_time", connection.reauth_time.as_secs().to_string())
        .push_value("rekey_time", connection.rekey_time.as_secs().to_string())
        .push_value(
            "unique",
            match connection.unique {
                Unique::Never => "UNIQUE_NEVER",
                Unique::No => "UNIQUE_NO",
                Unique::Replace => "UNIQUE_REPLACE",
                Unique::Keep => "UNIQUE_KEEP",
            },
        );
    for (key, time) in [
        ("dpd_delay", connection.dpd_delay),
        ("dpd_timeout", connection.dpd_timeout),
    ] {
        if !time.is_zero() {
            tree.push_value(key, time.as_secs().to_string());
        }
    }
    if let Some(id) = &connection.ppk_id {
        tree.push_value("ppk_id", id.to_string());
    }
    if connection.ppk_required {
        tree.push_value("ppk_required", "yes");
    }
    for (side, rounds) in [("local", &connection.local), ("remote", &connection.remote)] {
        for (index, round) in rounds.iter().enumerate() {
            tree.push_section(format!("{side}-{}", index + 1), auth(round));
        }
    }
    let mut children = Tree::new();
    for child in &connection.children {
        children.push_section(&child.name, self::child(child, names));
    }
    tree.push_section("children", children);
    tree
}

fn hosts(hosts: &[HostSpec]) -> Vec<String> {
    if hosts.is_empty() {
        return vec!["%any".to_owned()];
    }
    hosts.iter().map(display_host).collect()
}

/// The rules with a single value stand in the reverse of the usual order of their options.
fn auth(round: &AuthRound) -> Tree {
    let mut tree = Tree::new();
    match round.revocation {
        Revocation::Strict => {
            tree.push_value("revocation", "GOOD");
        }
        Revocation::IfUri => {
            tree.push_value("revocation", "SKIPPED");
        }
        Revocation::Relaxed => {}
    }
    for (key, id) in [
        ("eap_id", &round.eap_id),
        ("ca_id", &round.ca_id),
        ("id", &round.id),
    ] {
        if let Some(id) = id {
            tree.push_value(key, id.to_string());
        }
    }
    match &round.auth {
        AuthMethod::Psk => {
            tree.push_value("class", "pre-shared key");
        }
        // An empty text is the default, which is not a rule and not listed.
        AuthMethod::Pubkey(constraints) if !constraints.text.is_empty() => {
            tree.push_value("class", "public key");
        }
        AuthMethod::Eap(text) => eap(&mut tree, text),
        AuthMethod::Pubkey(_) | AuthMethod::Any => {}
    }
    tree.push_list("groups", round.groups.clone())
        .push_list("cert_policy", round.cert_policy.clone())
        .push_list("certs", subjects(&round.certs))
        .push_list("cacerts", subjects(&round.cacerts));
    tree
}

fn eap(tree: &mut Tree, text: &str) {
    let (family, method) = text.split_once('-').unwrap_or((text, ""));
    if family.eq_ignore_ascii_case("xauth") {
        tree.push_value("class", "XAuth");
        if !method.is_empty() {
            tree.push_value("xauth", method);
        }
        return;
    }
    let mut words = method.split([':', '-']);
    let kind = words.next().unwrap_or_default();
    if let (Ok(number), Some(Ok(vendor))) =
        (kind.parse::<u32>(), words.next().map(str::parse::<u32>))
    {
        tree.push_value("eap-vendor", vendor.to_string())
            .push_value("eap-type", format!("({number})"));
    } else if let Ok(number) = kind.parse::<u32>() {
        tree.push_value("eap-type", format!("({number})"));
    } else if EAP_METHODS
        .iter()
        .any(|known| known.eq_ignore_ascii_case(kind))
    {
        tree.push_value("eap-type", format!("EAP_{}", kind.to_ascii_uppercase()));
    }
    tree.push_value("class", "EAP");
}

/// Methods that `eap-` may name.
const EAP_METHODS: &[&str] = &[
    "aka", "dynamic", "gtc", "md5", "mschapv2", "peap", "radius", "sim", "tls", "tnc", "ttls",
];

fn subjects(certificates: &[CertSource]) -> Vec<String> {
    certificates
        .iter()
        .filter_map(|certificate| match certificate {
            CertSource::Data(data) => {
                let name = dn::certificate_subject(data)?;
                Some(display_identity(&Identity {
                    id_type: IdType::DerAsn1Dn,
                    data: name,
                }))
            }
            CertSource::File(_) => None,
        })
        .collect()
}

fn child(child: &Child, names: &Names) -> Tree {
    let selectors = |specs: &[_]| -> Vec<String> {
        specs
            .iter()
            .map(|spec| display_selector_spec(spec, names))
            .collect()
    };
    let mut tree = Tree::new();
    tree.push_value("mode", mode_name(child.mode))
        .push_value("rekey_time", child.rekey_time.as_secs().to_string())
        .push_value("rekey_bytes", child.rekey_bytes.to_string())
        .push_value("rekey_packets", child.rekey_packets.to_string())
        .push_value("dpd_action", action_name(child.dpd_action))
        .push_value("close_action", action_name(child.close_action))
        .push_list("local-ts", selectors(&child.local_ts))
        .push_list("remote-ts", selectors(&child.remote_ts));
    if let Some(interface) = &child.interface {
        tree.push_value("interface", interface.as_str());
    }
    if child.priority != 0 {
        tree.push_value("priority", child.priority.to_string());
    }
    tree
}
