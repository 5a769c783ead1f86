// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A gateway and many responders, each with one tunnel to it.
//!
//! ```text
//!                     hub (bridge)
//!   gateway --- g --- |          | --- r0 --- branch-01: 10.101.0.1
//!   10.100.0.1        |          | --- r1 --- branch-02: 10.101.1.1 ...
//! ```

use std::net::Ipv4Addr;
use std::path::Path;

use crate::lab::{Lab, Namespace};
use crate::node::{Daemon, Node, Plane};
use crate::scenario::{peer, subject};

const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const GATEWAY_INNER: Ipv4Addr = Ipv4Addr::new(10, 100, 0, 1);

/// Namespaces and daemons; the tunnels have `start_action = start` at the gateway.
#[derive(Debug)]
pub struct Star {
    /// The middle.
    pub gateway: Node,
    /// The ends, in the order of their names.
    pub responders: Vec<Node>,
    /// Names of the connections, in the same order.
    pub names: Vec<String>,
    /// What joins them: an end is plugged into its device `r0`, `r1`, ...
    pub hub: Namespace,
    // Last, since fields are dropped in order, and daemons end before their namespaces.
    _lab: Lab,
}

/// What a [`Star`] is made of.
#[derive(Clone, Copy, Debug)]
pub struct StarPlan<'a> {
    /// The daemon in the middle.
    pub gateway: Daemon,
    /// The daemons at the ends.
    pub responders: Daemon,
    /// Who encrypts, everywhere.
    pub plane: Plane,
    /// How many ends.
    pub count: u16,
    /// The build of swanherd to run, if not [`crate::swanherd_binary`].
    pub binary: Option<&'a Path>,
    /// More settings in the section `charon` of all.
    pub settings: &'a str,
    /// More settings of each connection, on both sides.
    pub connection: &'a str,
    /// More settings of each child, on both sides.
    pub child: &'a str,
}

impl StarPlan<'_> {
    /// The subject in the middle, with as many of its peers.
    #[must_use]
    pub fn new(plane: Plane, count: u16) -> Self {
        Self {
            gateway: subject(),
            responders: peer(),
            plane,
            count,
            binary: None,
            settings: "",
            connection: "",
            child: "",
        }
    }
}

impl Star {
    /// Makes the namespaces and the files of all daemons, and starts the responders.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn start(plan: &StarPlan<'_>) -> Self {
        let mut lab = Lab::new();
        let hub = lab.namespace("hub");
        hub.ip("link add hub type bridge");
        hub.ip("link set hub up");
        let gateway = join(&mut lab, &hub, "gateway", "g", GATEWAY, GATEWAY_INNER);
        let mut gateway = Node::new(&lab, &gateway, plan.gateway, plan.plane, plan.settings);
        let names: Vec<String> = (1..=plan.count).map(|i| format!("branch-{i:02}")).collect();
        let (mut connections, mut secrets) = (String::new(), String::new());
        let mut responders = Vec::new();
        for (index, name) in (0..plan.count).zip(&names) {
            let dev = format!("r{index}");
            let namespace = join(&mut lab, &hub, name, &dev, outer(index), inner(index));
            let node = Node::new(&lab, &namespace, plan.responders, plan.plane, plan.settings);
            node.configure(&format!(
                "connections {{\n{}}}\nsecrets {{\n{}}}\n",
                connection(plan, name, index, false),
                secret(name)
            ));
            connections += &connection(plan, name, index, true);
            secrets += &secret(name);
            responders.push(node);
        }
        gateway.configure(&format!(
            "connections {{\n{connections}}}\nsecrets {{\n{secrets}}}\n"
        ));
        if let Some(path) = plan.binary {
            gateway.set_binary(path);
            responders.iter_mut().for_each(|node| node.set_binary(path));
        }
        responders.iter_mut().for_each(Node::spawn);
        responders.iter_mut().for_each(ready);
        Self {
            gateway,
            responders,
            names,
            hub,
            _lab: lab,
        }
    }

    /// Starts the gateway, which initiates all tunnels.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start_gateway(&mut self) {
        self.gateway.spawn();
        ready(&mut self.gateway);
    }

    /// The gateway's inner address.
    #[must_use]
    pub fn near(&self) -> Ipv4Addr {
        GATEWAY_INNER
    }

    /// The inner address of a responder.
    ///
    /// # Panics
    /// When there are not that many.
    #[must_use]
    pub fn far(&self, index: usize) -> Ipv4Addr {
        inner(u16::try_from(index).expect("a star has at most 65535 ends"))
    }
}

/// Ours loads its definitions at its start; charon is told to.
fn ready(node: &mut Node) {
    node.await_ready();
    if node.daemon == Daemon::Charon {
        node.load();
    }
}

fn join(
    lab: &mut Lab,
    hub: &Namespace,
    name: &str,
    dev: &str,
    outer: Ipv4Addr,
    inner: Ipv4Addr,
) -> Namespace {
    let namespace = lab.namespace(name);
    lab.link((&namespace, "u0", &format!("{outer}/16")), (hub, dev, ""));
    hub.ip(&format!("link set {dev} master hub"));
    namespace.ip(&format!("addr add {inner}/32 dev lo"));
    namespace
}

fn outer(index: u16) -> Ipv4Addr {
    let [high, low] = (index % 250 + 1 + index / 250 * 256).to_be_bytes();
    Ipv4Addr::new(198, 18, high + 1, low)
}

fn inner(index: u16) -> Ipv4Addr {
    let [high, low] = index.to_be_bytes();
    Ipv4Addr::new(10, 101 + high, low, 1)
}

fn connection(plan: &StarPlan<'_>, name: &str, index: u16, gateway: bool) -> String {
    let (outer, [a, b, c, _]) = (outer(index), inner(index).octets());
    let branch = (
        outer,
        format!("{name}.example.org"),
        format!("{a}.{b}.{c}.0/24"),
    );
    let hub = (
        GATEWAY,
        "gateway.example.org".to_owned(),
        "10.100.0.0/24".to_owned(),
    );
    let (own, other, action) = if gateway {
        (hub, branch, "start")
    } else {
        (branch, hub, "none")
    };
    format!(
        "  {name} {{
    version = 2
    local_addrs = {}
    remote_addrs = {}
    proposals = aes128gcm16-prfsha256-x25519
    {}
    local {{
      auth = psk
      id = {}
    }}
    remote {{
      auth = psk
      id = {}
    }}
    children {{
      net {{
        local_ts = {}
        remote_ts = {}
        esp_proposals = aes128gcm16-x25519
        start_action = {action}
        {}
      }}
    }}
  }}\n",
        own.0, other.0, plan.connection, own.1, other.1, own.2, other.2, plan.child
    )
}

fn secret(name: &str) -> String {
    format!(
        "  ike-{name} {{
    id-1 = gateway.example.org
    id-2 = {name}.example.org
    secret = \"for the laboratory of {name}\"
  }}\n"
    )
}
