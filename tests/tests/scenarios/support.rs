// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gateways, what they are told, and what they show.

use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Lab, Namespace, Netem, Node, Pings, Plane, peer, subject};

/// Retransmissions after 0.5, 0.7 and 1.0 s, and the end 1.4 s after the last: 3.5 s in all.
pub(crate) const HASTY: &str =
    "  retransmit_timeout = 0.5\n  retransmit_base = 1.4\n  retransmit_tries = 3\n";

/// A connection as one side has it.
#[derive(Clone, Debug)]
pub(crate) struct Side<'a> {
    /// Its name.
    pub(crate) name: &'a str,
    /// `local_addrs`, then `remote_addrs`.
    pub(crate) addresses: [&'a str; 2],
    /// Identities, own first.
    pub(crate) ids: [&'a str; 2],
    /// How both prove who they are: the value of `auth`.
    pub(crate) auth: &'a str,
    /// More settings.
    pub(crate) connection: &'a str,
    /// Names and settings of children.
    pub(crate) children: &'a [(&'a str, &'a str)],
}

impl Side<'_> {
    /// Its `swanctl.conf`, with more sections.
    pub(crate) fn with(&self, more: &str) -> String {
        let Self {
            name,
            addresses: [local, remote],
            ids: [own, other],
            auth,
            connection,
            children,
        } = self;
        let children: String = children
            .iter()
            .map(|(name, settings)| {
                format!("{name} {{\n esp_proposals = aes128gcm16-x25519\n {settings}\n }}\n")
            })
            .collect();
        let certs = if *auth == "pubkey" {
            format!("certs = {own}.crt")
        } else {
            String::new()
        };
        format!(
            "connections {{
  {name} {{
    version = 2
    local_addrs = {local}
    remote_addrs = {remote}
    proposals = aes128gcm16-prfsha256-x25519
    {connection}
    local {{
      auth = {auth}
      id = {own}
      {certs}
    }}
    remote {{
      auth = {auth}
      id = {other}
    }}
    children {{
{children}    }}
  }}
}}
secrets {{
  ike-1 {{
    secret = \"a secret for the laboratory\"
  }}
}}
{more}"
        )
    }

    /// Its `swanctl.conf`.
    pub(crate) fn conf(&self) -> String {
        self.with("")
    }
}

/// Names of the gateways, in the manner of the scenarios.
pub(crate) const MOON: &str = "moon.example.org";
pub(crate) const SUN: &str = "sun.example.org";
pub(crate) const ALICE: &str = "alice.example.org";
pub(crate) const VENUS: &str = "venus.example.org";

/// The child of a gateway that is the first of two.
pub(crate) const NET: &str = "local_ts = 10.1.0.0/16\n remote_ts = 10.2.0.0/16";
/// The same, of the second.
pub(crate) const NET_BACK: &str = "local_ts = 10.2.0.0/16\n remote_ts = 10.1.0.0/16";

/// Two gateways on one link, each with a network behind it.
///
/// ```text
///  10.1.0.1 (lo)  moon  192.0.2.1 ---- u0 ---- 192.0.2.2  sun  10.2.0.1 (lo)
/// ```
pub(crate) struct Nets {
    /// The subject.
    pub(crate) moon: Node,
    /// Its peer.
    pub(crate) sun: Node,
    // Last, since fields are dropped in order, and daemons end before their namespaces.
    _lab: Lab,
}

impl Nets {
    /// Starts both, with settings for the section `charon`; nothing is configured.
    pub(crate) fn start(settings: &str) -> Self {
        let mut lab = Lab::new();
        let moon = lab.namespace("moon");
        let sun = lab.namespace("sun");
        lab.link((&moon, "u0", "192.0.2.1/24"), (&sun, "u0", "192.0.2.2/24"));
        moon.ip("addr add 10.1.0.1/32 dev lo");
        sun.ip("addr add 10.2.0.1/32 dev lo");
        let mut moon = node(&lab, &moon, subject(), settings);
        let mut sun = node(&lab, &sun, peer(), settings);
        start(&mut [&mut moon, &mut sun]);
        Self {
            moon,
            sun,
            _lab: lab,
        }
    }

    /// What moon and sun have in common with the usual connection between networks.
    pub(crate) fn sides<'a>(
        connection: [&'a str; 2],
        children: [&'a [(&'a str, &'a str)]; 2],
    ) -> [Side<'a>; 2] {
        [
            Side {
                name: "gw-gw",
                addresses: ["192.0.2.1", "192.0.2.2"],
                ids: [MOON, SUN],
                auth: "psk",
                connection: connection[0],
                children: children[0],
            },
            Side {
                name: "gw-gw",
                addresses: ["192.0.2.2", "192.0.2.1"],
                ids: [SUN, MOON],
                auth: "psk",
                connection: connection[1],
                children: children[1],
            },
        ]
    }

    /// Starts both with the usual connection: settings of it and of its child `net-net`, for moon
    /// and for sun.
    pub(crate) fn with(settings: &str, connection: [&str; 2], child: [&str; 2]) -> Self {
        let nets = Self::start(settings);
        let children = [
            format!("{NET}\n {}", child[0]),
            format!("{NET_BACK}\n {}", child[1]),
        ];
        let children = children
            .each_ref()
            .map(|settings| [("net-net", settings.as_str())]);
        let [moon, sun] = Self::sides(connection, [&children[0], &children[1]]);
        // Who is to answer comes first.
        nets.sun.configure(&sun.conf());
        nets.sun.load();
        nets.moon.configure(&moon.conf());
        nets.moon.load();
        nets
    }

    /// Cuts the link between them for anything but ARP, until it is dropped.
    pub(crate) fn cut(&self) -> [Netem; 2] {
        [&self.moon, &self.sun].map(|node| Netem::on(&node.namespace, "u0", "loss 100%"))
    }

    /// Asserts that pings pass in both directions.
    pub(crate) fn assert_traffic_passes(&self) {
        assert_pings(&self.moon, "10.1.0.1", "10.2.0.1");
        assert_pings(&self.sun, "10.2.0.1", "10.1.0.1");
    }

    /// Asserts that the networks cannot reach each other.
    pub(crate) fn assert_no_traffic(&self) {
        let report = Pings::start(&self.moon.namespace, "10.1.0.1", "10.2.0.1", 2).finish();
        assert_eq!(report.received, 0, "{}\n{}", report.text, self.moon.log());
    }
}

/// A daemon for the kernel's ESP.
pub(crate) fn node(lab: &Lab, namespace: &Namespace, daemon: Daemon, settings: &str) -> Node {
    Node::new(lab, namespace, daemon, Plane::Kernel, settings)
}

/// Starts daemons side by side.
pub(crate) fn start(nodes: &mut [&mut Node]) {
    nodes.iter_mut().for_each(|node| node.spawn());
    nodes.iter_mut().for_each(|node| node.await_ready());
}

/// Asserts that all of some pings are answered.
pub(crate) fn assert_pings(node: &Node, from: &str, to: &str) {
    let report = Pings::start(&node.namespace, from, to, 3).finish();
    assert_eq!(
        (report.sent, report.received),
        (3, 3),
        "{}\n{}",
        report.text,
        node.log()
    );
}

/// Waits until something answers pings, however long a busy host takes for what it needs.
pub(crate) fn assert_reaches(node: &Node, from: &str, to: &str) {
    let begun = Instant::now();
    loop {
        let report = Pings::start(&node.namespace, from, to, 10).finish();
        if report.received > 0 {
            return;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{}\n{:#?}\n{}",
            report.text,
            [xfrm(node, "state"), xfrm(node, "policy")],
            node.log()
        );
    }
}

/// Waits until `swanctl --list-sas --raw` has patterns in this order; what it printed.
pub(crate) fn lists(node: &Node, patterns: &[&str], seconds: u64) -> String {
    let begun = Instant::now();
    loop {
        let text = node.swanctl(&["--list-sas", "--raw"]).expect_ok();
        let mut rest = text.as_str();
        let missing = patterns
            .iter()
            .find(|pattern| match rest.split_once(**pattern) {
                Some((_, after)) => {
                    rest = after;
                    false
                }
                None => true,
            });
        let Some(missing) = missing else {
            return text;
        };
        assert!(
            begun.elapsed() < Duration::from_secs(seconds),
            "{}: not within {seconds} s: {missing} of {patterns:#?} in\n{text}\n{}",
            node.namespace.name(),
            node.log()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until a daemon has no SA.
pub(crate) fn lists_nothing(node: &Node, seconds: u64) {
    node.wait_until("no SA", seconds, |node| node.sas().is_empty());
}

/// The IKE SA of a connection, by a key that tells it from others.
pub(crate) fn ike_spi(node: &Node) -> String {
    let sas = node.sas();
    assert_eq!(sas.len(), 1, "{sas:?}\n{}", node.log());
    sas[0].1.text("initiator-spi").to_owned()
}

/// The only child that is installed, by its inbound SPI.
pub(crate) fn child_spi(node: &Node) -> String {
    let children = node.children("INSTALLED");
    assert_eq!(children.len(), 1, "{children:?}\n{}", node.log());
    children[0].text("spi-in").to_owned()
}

/// `ip xfrm state` or `ip xfrm policy` of a node, without the policies of its sockets.
pub(crate) fn xfrm(node: &Node, what: &str) -> Vec<String> {
    swanherd_tests::xfrm(&node.namespace, what)
}

/// Asserts how many states and policies a node's kernel has.
pub(crate) fn assert_kernel_has(node: &Node, states: usize, policies: usize) {
    let has = [xfrm(node, "state"), xfrm(node, "policy")];
    assert_eq!(
        [has[0].len(), has[1].len()],
        [states, policies],
        "{has:#?}\n{}",
        node.log()
    );
}

/// Runs `iptables` in a namespace.
pub(crate) fn iptables(namespace: &Namespace, args: &str) {
    let _ = namespace
        .run("iptables-legacy", args.split_whitespace())
        .expect_ok();
}
