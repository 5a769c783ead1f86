// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moving hosts, NATs and narrow paths, with strongSwan at the other end, on the bare host.
//!
//! ```text
//!                   192.0.2.1 --a0-- 192.0.2.254
//!  10.1.0.1  mover                              mid  203.0.113.254 --f0-- 203.0.113.2  fixed 10.2.0.1
//!                198.51.100.1 --b0-- 198.51.100.254
//! ```

use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Lab, Namespace, Node, Pings, Pki, Plane};

/// Settings of both daemons: peers that do not answer are noticed soon.
const IMPATIENT: &str =
    "  retransmit_timeout = 1.0\n  retransmit_base = 1.3\n  retransmit_tries = 8\n";

/// Two gateways with a router between them.
struct Site {
    mover: Node,
    fixed: Node,
    mid: Namespace,
    _lab: Lab,
}

/// What differs between the tests.
struct Wish {
    mover: Daemon,
    fixed: Daemon,
    /// Settings in `charon { }` of each.
    settings: [&'static str; 2],
    /// Of the connection, on both sides.
    connection: &'static str,
    /// The mover is at 192.168.7.2, behind a NAT.
    behind_nat: bool,
    certificates: bool,
}

impl Wish {
    fn new(mover: Daemon) -> Self {
        Self {
            mover,
            fixed: match mover {
                Daemon::Swanherd => Daemon::Charon,
                Daemon::Charon => Daemon::Swanherd,
            },
            settings: [IMPATIENT; 2],
            connection: "dpd_delay = 2s",
            behind_nat: false,
            certificates: false,
        }
    }

    fn start(self) -> Site {
        let mut lab = Lab::new();
        let (left, mid, right) = (
            lab.namespace("mover"),
            lab.namespace("mid"),
            lab.namespace("fixed"),
        );
        let sysctl = mid.run("sysctl", ["-qw", "net.ipv4.ip_forward=1"]);
        assert!(sysctl.ok(), "{sysctl}");
        lab.link(
            (&right, "f0", "203.0.113.2/24"),
            (&mid, "f0", "203.0.113.254/24"),
        );
        right.ip("route add default via 203.0.113.254");
        let mover_addr = if self.behind_nat {
            lab.link(
                (&left, "a0", "192.168.7.2/24"),
                (&mid, "a0", "192.168.7.1/24"),
            );
            left.ip("route add default via 192.168.7.1");
            masquerade(&mid, "20000-20999");
            "%any"
        } else {
            lab.link(
                (&left, "a0", "192.0.2.1/24"),
                (&mid, "a0", "192.0.2.254/24"),
            );
            lab.link(
                (&left, "b0", "198.51.100.1/24"),
                (&mid, "b0", "198.51.100.254/24"),
            );
            left.ip("route add default via 192.0.2.254 metric 100");
            left.ip("route add default via 198.51.100.254 metric 200");
            "192.0.2.1"
        };
        left.ip("addr add 10.1.0.1/32 dev lo");
        right.ip("addr add 10.2.0.1/32 dev lo");
        let [mover_settings, fixed_settings] = self.settings;
        let mut mover = Node::new(&lab, &left, self.mover, Plane::User, mover_settings);
        let mut fixed = Node::new(&lab, &right, self.fixed, Plane::User, fixed_settings);
        let auth = if self.certificates {
            let pki = Pki::new(&lab.dir().join("pki"), "rsa", "2048");
            for (node, name) in [(&mover, "gw1"), (&fixed, "gw2")] {
                pki.issue(&format!("{name}.example.org"), &node.swanctl_dir());
            }
            "pubkey"
        } else {
            "psk"
        };
        let extra = self.connection;
        mover.configure(&definitions("1", "2", "203.0.113.2", auth, extra));
        fixed.configure(&definitions("2", "1", mover_addr, auth, extra));
        mover.spawn();
        fixed.spawn();
        mover.await_ready();
        fixed.await_ready();
        mover.load();
        fixed.load();
        Site {
            mover,
            fixed,
            mid,
            _lab: lab,
        }
    }
}

fn masquerade(mid: &Namespace, ports: &str) {
    for args in [
        vec!["-t", "nat", "-F"],
        vec![
            "-t",
            "nat",
            "-A",
            "POSTROUTING",
            "-o",
            "f0",
            "-p",
            "udp",
            "-j",
            "MASQUERADE",
            "--to-ports",
            ports,
        ],
    ] {
        let done = mid.run("iptables-legacy", args);
        assert!(done.ok(), "{done}");
    }
}

fn definitions(own: &str, other: &str, remote: &str, auth: &str, connection: &str) -> String {
    let certs = if auth == "pubkey" {
        format!("certs = gw{own}.example.org.crt")
    } else {
        String::new()
    };
    format!(
        r#"connections {{
  t {{
    version = 2
    remote_addrs = {remote}
    proposals = aes128gcm16-prfsha256-x25519
    {connection}
    local {{
      auth = {auth}
      id = gw{own}.example.org
      {certs}
    }}
    remote {{
      auth = {auth}
      id = gw{other}.example.org
    }}
    children {{
      c {{
        local_ts = 10.{own}.0.0/24
        remote_ts = 10.{other}.0.0/24
        esp_proposals = aes128gcm16
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

impl Site {
    fn logs(&self) -> String {
        format!(
            "--- mover\n{}--- fixed\n{}",
            self.mover.log(),
            self.fixed.log()
        )
    }

    /// Pings pass both ways, at once.
    #[track_caller]
    fn assert_traffic_passes(&self) {
        let there = Pings::start(&self.mover.namespace, "10.1.0.1", "10.2.0.1", 5);
        let back = Pings::start(&self.fixed.namespace, "10.2.0.1", "10.1.0.1", 5);
        for report in [there.finish(), back.finish()] {
            let counts = (report.sent, report.received);
            assert_eq!(counts, (5, 5), "{}\n{}", report.text, self.logs());
        }
    }

    /// Waits until an echo comes back.
    #[track_caller]
    fn await_traffic(&self, limit: Duration) {
        let begun = Instant::now();
        loop {
            let report = Pings::start(&self.mover.namespace, "10.1.0.1", "10.2.0.1", 1).finish();
            if report.received == 1 {
                return;
            }
            assert!(begun.elapsed() < limit, "no traffic\n{}", self.logs());
        }
    }

    /// The only IKE SA of both has these SPIs.
    fn spis(&self) -> Vec<String> {
        let sas = self.mover.sas();
        assert_eq!(sas.len(), 1, "{sas:#?}\n{}", self.logs());
        let spi = |key| sas[0].1.text(key).to_owned();
        vec![spi("initiator-spi"), spi("responder-spi")]
    }
}

/// The uplink in use goes away; the IKE SA moves to the other one, and back again later.
fn roams(mover: Daemon, mover_initiates: bool) {
    let site = Wish::new(mover).start();
    let initiator = if mover_initiates {
        &site.mover
    } else {
        &site.fixed
    };
    initiator.initiate("c");
    site.assert_traffic_passes();
    let before = site.spis();

    for (dead, alive, addr) in [("a0", "b0", "198.51.100.1"), ("b0", "a0", "192.0.2.1")] {
        site.mover.namespace.ip(&format!("link set {dead} down"));
        site.fixed.wait_until("the other address", 20, |fixed| {
            fixed
                .sas()
                .iter()
                .any(|(_, ike)| ike.text("remote-host") == addr)
        });
        site.await_traffic(Duration::from_secs(10));
        site.assert_traffic_passes();
        assert_eq!(site.spis(), before, "{}", site.logs());

        // It is there again, with its route, and is not used for that.
        site.mover.namespace.ip(&format!("link set {dead} up"));
        let (gateway, metric) = if dead == "a0" {
            ("192.0.2.254", 300)
        } else {
            ("198.51.100.254", 200)
        };
        let route = format!("route add default via {gateway} dev {dead} metric {metric}");
        site.mover.namespace.ip(&route);
        let _ = alive;
    }
}

#[test]
fn we_roam_and_charon_follows() {
    roams(Daemon::Swanherd, true);
}

#[test]
fn charon_roams_and_we_follow() {
    roams(Daemon::Charon, true);
}

#[test]
fn we_roam_as_the_responder_and_charon_follows() {
    roams(Daemon::Swanherd, false);
}

#[test]
fn charon_roams_as_the_responder_and_we_follow() {
    roams(Daemon::Charon, false);
}

/// The NAT forgets its mapping and takes another port, under traffic.
fn is_rebound(mover: Daemon, connection: &'static str) {
    let site = Wish {
        connection,
        behind_nat: true,
        ..Wish::new(mover)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    let before = site.spis();
    let port = |site: &Site| {
        let sas = site.fixed.sas();
        sas[0].1.text("remote-port").parse::<u16>().expect("a port")
    };
    assert!((20_000..21_000).contains(&port(&site)), "{}", site.logs());

    masquerade(&site.mid, "30000-30999");
    // An address that goes takes its mappings along.
    site.mid.ip("addr del 203.0.113.254/24 dev f0");
    site.mid.ip("addr add 203.0.113.254/24 dev f0");

    site.await_traffic(Duration::from_secs(20));
    site.assert_traffic_passes();
    assert!((30_000..31_000).contains(&port(&site)), "{}", site.logs());
    assert_eq!(site.spis(), before, "{}", site.logs());
}

#[test]
fn our_nat_mapping_changes_and_charon_follows() {
    is_rebound(Daemon::Swanherd, "dpd_delay = 2s");
}

#[test]
fn charons_nat_mapping_changes_and_we_follow() {
    is_rebound(Daemon::Charon, "dpd_delay = 2s");
}

#[test]
fn our_nat_mapping_changes_without_mobike_and_charon_follows() {
    is_rebound(Daemon::Swanherd, "dpd_delay = 2s\n    mobike = no");
}

#[test]
fn charons_nat_mapping_changes_without_mobike_and_we_follow() {
    is_rebound(Daemon::Charon, "dpd_delay = 2s\n    mobike = no");
}

/// The path carries packets of 600 octets, and no fragments of longer ones.
fn narrow(mover: Daemon) {
    let small = "  retransmit_timeout = 1.0\n  retransmit_base = 1.3\n  retransmit_tries = 8\n  \
                 fragment_size = 500\n";
    let settings = match mover {
        Daemon::Swanherd => [IMPATIENT, small],
        Daemon::Charon => [small, IMPATIENT],
    };
    let site = Wish {
        settings,
        certificates: true,
        ..Wish::new(mover)
    }
    .start();
    for link in ["a0", "f0"] {
        site.mid.ip(&format!("link set {link} mtu 600"));
    }
    let done = site
        .mid
        .run("iptables-legacy", ["-A", "FORWARD", "-f", "-j", "DROP"]);
    assert!(done.ok(), "{done}");

    site.mover.initiate("c");

    site.assert_traffic_passes();
}

#[test]
fn our_fragments_become_small_enough_for_the_path_to_charon() {
    narrow(Daemon::Swanherd);
}

#[test]
fn our_answers_become_small_enough_for_the_path_to_charon() {
    narrow(Daemon::Charon);
}
