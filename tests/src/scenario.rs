// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two gateways and one tunnel between them.
//!
//! ```text
//!  10.1.0.1 (lo)  left  192.0.2.1 ---- u0 ---- 192.0.2.2  right  10.2.0.1 (lo)
//! ```

use std::path::PathBuf;

use crate::lab::Lab;
use crate::node::{Daemon, Node, Plane};
use crate::ping::Pings;
use crate::pki::Pki;

/// Proposals.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// Of the IKE SA.
    pub ike: &'static str,
    /// Of its children.
    pub esp: &'static str,
}

/// How both sides prove who they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// A secret that both know.
    Psk,
    /// Certificates with P-256 keys.
    Ecdsa,
    /// Certificates with RSA keys of 2048 bits.
    Rsa,
    /// Certificates with Ed25519 keys.
    Ed25519,
}

/// What two gateways are to do.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The daemon at the left: the one under test.
    pub left: Daemon,
    /// The daemon at the right.
    pub right: Daemon,
    /// Who encrypts, on both sides.
    pub plane: Plane,
    /// Proposals.
    pub suite: Suite,
    /// Authentication.
    pub auth: Auth,
    /// More settings in the section `charon` of both sides.
    pub settings: &'static str,
    /// More settings of the connection, on both sides.
    pub connection: &'static str,
    /// More settings of the child, on both sides.
    pub child: &'static str,
    /// Another build of swanherd than the one beside the running program.
    pub binary: Option<PathBuf>,
}

/// Two gateways, joined, started, configured.
#[derive(Debug)]
pub struct Pair {
    /// The one under test.
    pub left: Node,
    /// Its peer.
    pub right: Node,
    /// Their namespaces; last, since fields are dropped in order and daemons go before these.
    pub lab: Lab,
}

/// The daemon under test: swanherd, unless `SWANHERD_TEST_SUBJECT=charon`.
#[must_use]
pub fn subject() -> Daemon {
    chosen("SWANHERD_TEST_SUBJECT", Daemon::Swanherd)
}

/// Its peer: charon, unless `SWANHERD_TEST_PEER=swanherd`.
#[must_use]
pub fn peer() -> Daemon {
    chosen("SWANHERD_TEST_PEER", Daemon::Charon)
}

fn chosen(variable: &str, otherwise: Daemon) -> Daemon {
    match std::env::var(variable).as_deref() {
        Ok("charon") => Daemon::Charon,
        Ok("swanherd") => Daemon::Swanherd,
        Ok(other) => panic!("{variable}={other}: neither charon nor swanherd"),
        Err(_) => otherwise,
    }
}

impl Suite {
    /// AES-GCM and X25519.
    pub const GCM_X25519: Self = Self {
        ike: "aes128gcm16-prfsha256-x25519",
        esp: "aes128gcm16-x25519",
    };
    /// AES-CBC with HMAC-SHA256, and P-256.
    pub const CBC_P256: Self = Self {
        ike: "aes256-sha256-ecp256",
        esp: "aes256-sha256-ecp256",
    };
    /// AES-CBC with HMAC-SHA256, and MODP 2048.
    pub const CBC_MODP2048: Self = Self {
        ike: "aes128-sha256-modp2048",
        esp: "aes128-sha256-modp2048",
    };
    /// AES-256-GCM and P-256.
    pub const GCM256_P256: Self = Self {
        ike: "aes256gcm16-prfsha384-ecp256",
        esp: "aes256gcm16-ecp256",
    };
}

impl Scenario {
    /// Subject and peer with PSK, AES-GCM and X25519.
    #[must_use]
    pub fn new(plane: Plane) -> Self {
        Self {
            left: subject(),
            right: peer(),
            plane,
            suite: Suite::GCM_X25519,
            auth: Auth::Psk,
            settings: "",
            connection: "",
            child: "",
            binary: None,
        }
    }

    /// Makes the namespaces, starts both daemons and loads their definitions.
    ///
    /// # Panics
    /// When anything of that fails.
    #[must_use]
    pub fn start(&self) -> Pair {
        let mut pair = self.prepare();
        pair.left.spawn();
        pair.right.spawn();
        pair.left.await_ready();
        pair.right.await_ready();
        pair.left.load();
        pair.right.load();
        pair
    }

    fn prepare(&self) -> Pair {
        let mut lab = Lab::new();
        let left = lab.namespace("left");
        let right = lab.namespace("right");
        lab.link(
            (&left, "u0", "192.0.2.1/24"),
            (&right, "u0", "192.0.2.2/24"),
        );
        left.ip("addr add 10.1.0.1/32 dev lo");
        right.ip("addr add 10.2.0.1/32 dev lo");
        let mut left = Node::new(&lab, &left, self.left, self.plane, self.settings);
        let mut right = Node::new(&lab, &right, self.right, self.plane, self.settings);
        if let Some(binary) = &self.binary {
            left.set_binary(binary);
            right.set_binary(binary);
        }
        let pki = match self.auth {
            Auth::Psk => None,
            Auth::Ecdsa => Some(("ecdsa", "256")),
            Auth::Rsa => Some(("rsa", "2048")),
            Auth::Ed25519 => Some(("ed25519", "")),
        }
        .map(|(kind, size)| Pki::new(&lab.dir().join("pki"), kind, size));
        for (node, [own, other]) in [(&left, ["1", "2"]), (&right, ["2", "1"])] {
            if let Some(pki) = &pki {
                pki.issue(&format!("gw{own}.example.org"), &node.swanctl_dir());
            }
            node.configure(&definitions(
                own,
                other,
                self.suite,
                self.auth,
                self.connection,
                self.child,
            ));
        }
        Pair { left, right, lab }
    }
}

impl Pair {
    /// Pings from the left inner address to the right one, 20 a second.
    #[must_use]
    pub fn pings(&self, count: u32) -> Pings {
        Pings::start(&self.left.namespace, "10.1.0.1", "10.2.0.1", count)
    }

    /// Asserts that pings pass in both directions.
    ///
    /// # Panics
    /// When one is lost; shows both logs.
    pub fn assert_traffic_passes(&self) {
        let there = self.pings(5);
        let back = Pings::start(&self.right.namespace, "10.2.0.1", "10.1.0.1", 5);
        for report in [there.finish(), back.finish()] {
            assert_eq!(
                (report.sent, report.received),
                (5, 5),
                "{}\n{}",
                report.text,
                self.logs()
            );
        }
    }

    /// Both logs, for messages.
    #[must_use]
    pub fn logs(&self) -> String {
        format!(
            "--- left\n{}--- right\n{}",
            self.left.log(),
            self.right.log()
        )
    }
}

/// `swanctl.conf` of a side, `"1"` or `"2"`.
pub(crate) fn definitions(
    own: &str,
    other: &str,
    Suite { ike, esp }: Suite,
    auth: Auth,
    connection: &str,
    child: &str,
) -> String {
    let (auth, certs) = match auth {
        Auth::Psk => ("psk", String::new()),
        Auth::Ecdsa | Auth::Rsa | Auth::Ed25519 => {
            ("pubkey", format!("\n      certs = gw{own}.example.org.crt"))
        }
    };
    format!(
        r#"connections {{
  t {{
    version = 2
    local_addrs = 192.0.2.{own}
    remote_addrs = 192.0.2.{other}
    proposals = {ike}
    {connection}
    local {{
      auth = {auth}
      id = gw{own}.example.org{certs}
    }}
    remote {{
      auth = {auth}
      id = gw{other}.example.org
    }}
    children {{
      c {{
        local_ts = 10.{own}.0.0/24
        remote_ts = 10.{other}.0.0/24
        esp_proposals = {esp}
        {child}
      }}
    }}
  }}
}}
secrets {{
  ike-1 {{
    id-1 = gw1.example.org
    id-2 = gw2.example.org
    secret = "a secret for the laboratory"
  }}
}}
"#
    )
}
