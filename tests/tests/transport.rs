// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moving hosts, NATs and narrow paths, with strongSwan at the other end: on the bare host, where
//! both encrypt in user space, and some of them under a kernel that has ESP.
//!
//! ```text
//!                   192.0.2.1 --a0-- 192.0.2.254
//!  10.1.0.1  mover                              mid  203.0.113.254 --f0-- 203.0.113.2  fixed 10.2.0.1
//!                198.51.100.1 --b0-- 198.51.100.254
//! ```

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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
    /// Of the connection, on each side.
    sides: [&'static str; 2],
    /// Of the mover's child.
    child: &'static str,
    /// The mover is at 192.168.7.2, behind a NAT.
    behind_nat: bool,
    /// The other one is known to it as 192.168.7.1, which forwards the ports of IKE.
    forwarded: bool,
    /// There is IPv6, too: 2001:db8:a::1 and 2001:db8:f::2.
    ipv6: bool,
    certificates: bool,
    /// What the mover calls the other one, if not by its address; names are known at the other one.
    remote: Option<&'static str>,
    /// More connections of the mover.
    more: &'static str,
}

/// Of both daemons.
fn plane() -> Plane {
    if std::env::var_os("SWANHERD_LAB").is_some() {
        Plane::Kernel
    } else {
        Plane::User
    }
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
            sides: [""; 2],
            child: "",
            behind_nat: false,
            forwarded: false,
            ipv6: false,
            certificates: false,
            remote: None,
            more: "",
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
        if self.forwarded {
            for port in ["500", "4500"] {
                let rule = format!(
                    "-t nat -A PREROUTING -i a0 -p udp --dport {port} -j DNAT --to 203.0.113.2"
                );
                iptables(&mid, &rule);
            }
        }
        let mover_addr = if self.ipv6 {
            add_ipv6(&left, &mid, &right);
            "%any"
        } else {
            mover_addr
        };
        left.ip("addr add 10.1.0.1/32 dev lo");
        right.ip("addr add 10.2.0.1/32 dev lo");
        let [mover_settings, fixed_settings] = self.settings;
        let mut mover = Node::new(&lab, &left, self.mover, plane(), mover_settings);
        let mut fixed = Node::new(&lab, &right, self.fixed, plane(), fixed_settings);
        let auth = if self.certificates {
            let pki = Pki::new(&lab.dir().join("pki"), "rsa", "2048");
            for (node, name) in [(&mover, "gw1"), (&fixed, "gw2")] {
                pki.issue(&format!("{name}.example.org"), &node.swanctl_dir());
            }
            "pubkey"
        } else {
            "psk"
        };
        let [left_extra, right_extra] = self
            .sides
            .map(|side| format!("{}\n    {side}", self.connection));
        let forwarded = self.forwarded.then_some("192.168.7.1");
        let remote = self.remote.or(forwarded).unwrap_or("203.0.113.2");
        let own = definitions("1", "2", remote, auth, [&left_extra, self.child]);
        mover.configure(&format!("{own}{}", self.more));
        mover.set_resolver("203.0.113.2");
        fixed.configure(&definitions("2", "1", mover_addr, auth, [&right_extra, ""]));
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
    iptables(mid, "-t nat -F POSTROUTING");
    let rule = format!("-t nat -A POSTROUTING -o f0 -p udp -j MASQUERADE --to-ports {ports}");
    iptables(mid, &rule);
}

fn iptables(namespace: &Namespace, args: &str) -> String {
    let done = namespace.run("iptables-legacy", args.split(' '));
    assert!(done.ok(), "{done}");
    done.stdout
}

fn add_ipv6(left: &Namespace, mid: &Namespace, right: &Namespace) {
    let sysctl = mid.run("sysctl", ["-qw", "net.ipv6.conf.all.forwarding=1"]);
    assert!(sysctl.ok(), "{sysctl}");
    for (end, dev, net, own) in [(left, "a0", "a", "1"), (right, "f0", "f", "2")] {
        // A router looks for neighbours from its link-local address.
        for prefix in [format!("2001:db8:{net}"), "fe80".to_owned()] {
            mid.ip(&format!("addr add {prefix}::fe/64 dev {dev} nodad"));
            end.ip(&format!("addr add {prefix}::{own}/64 dev {dev} nodad"));
        }
        end.ip(&format!(
            "route add default via 2001:db8:{net}::fe dev {dev}"
        ));
    }
}

fn definitions(own: &str, other: &str, remote: &str, auth: &str, extra: [&str; 2]) -> String {
    let [connection, child] = extra;
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

    let uplinks = [
        ("a0", "192.0.2.1", "192.0.2.254", 300),
        ("b0", "198.51.100.1", "198.51.100.254", 200),
    ];
    for (dead, alive) in [(0, 1), (1, 0)] {
        let (dev, addr, gateway, metric) = uplinks[dead];
        let namespace = &site.mover.namespace;
        namespace.ip(&format!("link set {dev} down"));
        // Asking for routes with a mark, charon is told that this address still serves.
        if mover == Daemon::Charon {
            namespace.ip(&format!("addr del {addr}/24 dev {dev}"));
        }
        let now = uplinks[alive].1;
        site.fixed.wait_until("the other address", 20, |fixed| {
            fixed
                .sas()
                .iter()
                .any(|(_, ike)| ike.text("remote-host") == now)
        });
        site.await_traffic(Duration::from_secs(10));
        site.assert_traffic_passes();
        assert_eq!(site.spis(), before, "{}", site.logs());

        // It is there again, with its route, and is not used for that.
        if mover == Daemon::Charon {
            namespace.ip(&format!("addr add {addr}/24 dev {dev}"));
        }
        namespace.ip(&format!("link set {dev} up"));
        let route = format!("route add default via {gateway} dev {dev} metric {metric}");
        namespace.ip(&route);
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
    // charon rekeys a child whose addresses it cannot change.
    for node in [&site.mover, &site.fixed] {
        node.wait_until("one child", 20, |node| {
            let sas = node.sas();
            sas.len() == 1 && sas[0].1.sections("child-sas").len() == 1
        });
    }
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

/// Both are behind NATs, the mover's forgets its mapping.
fn is_rebound_with_two_nats(mover: Daemon) {
    let site = Wish {
        behind_nat: true,
        forwarded: true,
        ..Wish::new(mover)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    for node in [&site.mover, &site.fixed] {
        let sas = node.sas();
        assert_eq!(sas[0].1.text("nat-local"), "yes", "{}", site.logs());
    }
    let before = site.spis();
    if mover == Daemon::Charon {
        // It learns its mapping from its first liveness check.
        site.fixed.wait_until("a liveness check", 20, |fixed| {
            let log = fixed.log();
            log.lines().any(|line| {
                line.contains("sending INFORMATIONAL response") && line.contains("NATD")
            })
        });
    }

    masquerade(&site.mid, "30000-30999");
    site.mid.ip("addr del 203.0.113.254/24 dev f0");
    site.mid.ip("addr add 203.0.113.254/24 dev f0");

    site.await_traffic(Duration::from_secs(20));
    site.assert_traffic_passes();
    assert_eq!(site.spis(), before, "{}", site.logs());
}

#[test]
fn our_nat_mapping_changes_while_charon_is_behind_a_nat_too() {
    is_rebound_with_two_nats(Daemon::Swanherd);
}

#[test]
fn charons_nat_mapping_changes_while_we_are_behind_a_nat_too() {
    is_rebound_with_two_nats(Daemon::Charon);
}

/// Whether charon can reach us through a NAT that forgets idle mappings, after a while of silence.
fn is_reached_after_silence(settings: &'static str) -> bool {
    let site = Wish {
        settings: [settings, IMPATIENT],
        connection: "dpd_delay = 0s",
        behind_nat: true,
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    for timeout in ["udp_timeout", "udp_timeout_stream"] {
        let setting = format!("net.netfilter.nf_conntrack_{timeout}=2");
        let sysctl = site.mid.run("sysctl", ["-qw", &setting]);
        assert!(sysctl.ok(), "{sysctl}");
    }
    site.mover.initiate("c");
    std::thread::sleep(Duration::from_secs(5));
    let pings = Pings::start(&site.fixed.namespace, "10.2.0.1", "10.1.0.1", 2);
    pings.finish().received == 2
}

#[test]
fn our_keepalives_keep_the_mapping_of_an_idle_tunnel_open() {
    assert!(is_reached_after_silence("  keep_alive = 1s\n"));
    assert!(!is_reached_after_silence("  keep_alive = 0s\n"));
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
    iptables(&site.mid, "-A FORWARD -f -j DROP");

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

/// With short fragments, certificates, and these values of `fragmentation`; what charon says.
fn log_of_fragmentation(ours: &'static str, charons: &'static str) -> String {
    let short = "  fragment_size = 600\n";
    let site = Wish {
        settings: [short, short],
        certificates: true,
        sides: [ours, charons],
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    site.fixed.log()
}

/// What charon logs of a fragment that came, and of a message that it fragments.
const CAME: &str = "received fragment #1 of ";
const WENT: &str = "splitting IKE message ";

#[test]
fn who_only_accepts_fragments_gets_them_from_charon_and_sends_none() {
    let log = log_of_fragmentation("fragmentation = accept", "fragmentation = yes");
    assert!(!log.contains(CAME) && log.contains(WENT), "{log}");
    let log = log_of_fragmentation("fragmentation = yes", "fragmentation = accept");
    assert!(log.contains(CAME) && !log.contains(WENT), "{log}");
}

#[test]
fn fragments_are_forced_upon_charon_and_by_charon_upon_us() {
    let log = log_of_fragmentation("fragmentation = force", "fragmentation = no");
    assert!(log.contains(CAME) && !log.contains(WENT), "{log}");
    let log = log_of_fragmentation("fragmentation = no", "fragmentation = force");
    assert!(!log.contains(CAME) && log.contains(WENT), "{log}");
}

#[test]
fn without_fragmentation_messages_go_in_one_piece() {
    let log = log_of_fragmentation("fragmentation = no", "fragmentation = yes");
    assert!(!log.contains(CAME) && !log.contains(WENT), "{log}");
}

const OTHER_PORTS: &str = "  port = 1500\n  port_nat_t = 1501\n";

#[test]
fn charon_is_reached_at_other_ports() {
    let site = Wish {
        settings: [IMPATIENT, OTHER_PORTS],
        sides: ["remote_port = 1501", ""],
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    assert_eq!(site.mover.sas()[0].1.text("remote-port"), "1501");
}

#[test]
fn charon_reaches_us_at_other_ports() {
    let site = Wish {
        settings: [IMPATIENT, OTHER_PORTS],
        sides: ["local_port = 4500\n    remote_port = 1501", ""],
        ..Wish::new(Daemon::Charon)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    assert_eq!(site.fixed.sas()[0].1.text("local-port"), "1501");
}

#[test]
fn all_addresses_of_a_peer_are_tried_in_turn() {
    let quick = "  retransmit_timeout = 0.5\n  retransmit_base = 1.0\n  retransmit_tries = 1\n";
    let site = Wish {
        settings: [quick, IMPATIENT],
        sides: ["keyingtries = 0", ""],
        remote: Some("203.0.113.250, 203.0.113.251, 203.0.113.2"),
        child: "start_action = start",
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    site.mover.wait_until("the third address", 60, |mover| {
        mover.children("INSTALLED").len() == 1
    });
    site.assert_traffic_passes();
}

#[test]
fn charon_redirects_us_to_another_gateway() {
    let site = Wish::new(Daemon::Swanherd).start();
    site.fixed.namespace.ip("addr add 203.0.113.3/24 dev f0");
    site.mover.initiate("c");
    site.assert_traffic_passes();

    let args = ["--redirect", "--ike", "t", "--gateway", "203.0.113.3"];
    let _ = site.fixed.swanctl(&args).expect_ok();

    site.mover.wait_until("the other gateway", 20, |mover| {
        let sas = mover.sas();
        sas.len() == 1 && sas[0].1.text("remote-host") == "203.0.113.3"
    });
    site.await_traffic(Duration::from_secs(5));
    site.assert_traffic_passes();
}

/// What we send as IKE has the code point that the connection wants, in either role.
fn has_its_code_point(mover: Daemon) {
    let site = Wish {
        connection: "dpd_delay = 2s\n    dscp = 101110",
        ..Wish::new(mover)
    }
    .start();
    let own = if mover == Daemon::Swanherd {
        "a0"
    } else {
        "f0"
    };
    for class in [" -m dscp --dscp 46", ""] {
        let rule = format!("-A FORWARD -i {own} -p udp{class} -j ACCEPT");
        iptables(&site.mid, &rule);
    }
    site.mover.initiate("c");
    std::thread::sleep(Duration::from_secs(3));
    let counted = iptables(&site.mid, "-L FORWARD -v -x -n");
    let packets: Vec<u32> = counted
        .lines()
        .skip(2)
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect();
    let [marked, others] = packets[..] else {
        panic!("{counted}");
    };
    assert!(marked >= 3 && others == 0, "{counted}\n{}", site.logs());
}

#[test]
fn our_messages_have_their_code_point() {
    has_its_code_point(Daemon::Swanherd);
}

#[test]
fn our_answers_have_their_code_point() {
    has_its_code_point(Daemon::Charon);
}

fn over_ipv6(mover: Daemon) {
    let site = Wish {
        ipv6: true,
        remote: Some("2001:db8:f::2"),
        ..Wish::new(mover)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    let sas = site.fixed.sas();
    assert_eq!(sas[0].1.text("remote-host"), "2001:db8:a::1");
}

#[test]
fn we_reach_charon_over_ipv6() {
    over_ipv6(Daemon::Swanherd);
}

#[test]
fn charon_reaches_us_over_ipv6() {
    over_ipv6(Daemon::Charon);
}

#[test]
fn we_roam_from_ipv4_to_ipv6_and_charon_follows() {
    let site = Wish {
        ipv6: true,
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    site.mover.initiate("c");
    site.assert_traffic_passes();
    let before = site.spis();
    for dev in ["a0", "b0"] {
        site.mover.namespace.ip(&format!("-4 addr flush dev {dev}"));
    }
    site.fixed.wait_until("the address of IPv6", 20, |fixed| {
        let sas = fixed.sas();
        sas.iter()
            .any(|(_, ike)| ike.text("remote-host") == "2001:db8:a::1")
    });
    site.await_traffic(Duration::from_secs(10));
    site.assert_traffic_passes();
    assert_eq!(site.spis(), before, "{}", site.logs());
}

/// Answers for every name with one address. While that is 0.0.0.0, with silence.
struct Names(Arc<AtomicU32>);

impl Names {
    fn start(namespace: &Namespace) -> Self {
        let socket =
            namespace.enter(|| UdpSocket::bind("203.0.113.2:53").expect("nobody else has it"));
        let addr = Arc::new(AtomicU32::new(0));
        let shared = Arc::downgrade(&addr);
        socket
            .set_read_timeout(Some(Duration::from_millis(200)))
            .expect("a socket may be impatient");
        std::thread::spawn(move || {
            let mut buffer = [0; 512];
            while let Some(addr) = shared.upgrade() {
                let Ok((len, client)) = socket.recv_from(&mut buffer) else {
                    continue;
                };
                let addr = Ipv4Addr::from(addr.load(Ordering::Relaxed));
                if !addr.is_unspecified() {
                    let _ = socket.send_to(&answer(&buffer[..len], addr), client);
                }
            }
        });
        Self(addr)
    }

    fn set(&self, addr: &str) {
        let addr: Ipv4Addr = addr.parse().expect("an address");
        self.0.store(addr.to_bits(), Ordering::Relaxed);
    }
}

/// A DNS answer to a query with one question (RFC 1035): one A record, or none of another type.
fn answer(query: &[u8], addr: Ipv4Addr) -> Vec<u8> {
    let end = query[12..].iter().position(|octet| *octet == 0);
    let name_end = 12 + end.expect("a name ends") + 1;
    let question = &query[12..name_end + 4];
    let asks_for_a = question[question.len() - 4..] == [0, 1, 0, 1];
    let mut out = query[..2].to_vec();
    out.extend([0x81, 0x80, 0, 1, 0, u8::from(asks_for_a), 0, 0, 0, 0]);
    out.extend(question);
    if asks_for_a {
        out.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        out.extend(addr.octets());
    }
    out
}

const KEPT_UP: &str = "keyingtries = 0\n    dpd_delay = 2s";

#[test]
fn a_name_that_changes_is_followed_at_the_next_attempt() {
    let quick = "  retransmit_timeout = 0.5\n  retransmit_base = 1.0\n  retransmit_tries = 2\n";
    let site = Wish {
        settings: [quick, IMPATIENT],
        connection: KEPT_UP,
        remote: Some("gw.example.org"),
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    let names = Names::start(&site.fixed.namespace);
    names.set("203.0.113.250");
    let tried = site
        .mover
        .swanctl(&["--initiate", "--child", "c", "--timeout", "10"]);
    assert!(!tried.ok(), "nobody is there");

    names.set("203.0.113.2");
    site.mover.initiate("c");
    site.assert_traffic_passes();
}

#[test]
fn a_resolver_that_does_not_answer_holds_up_nobody() {
    // Every lookup takes the resolver ten seconds.
    let more = "connections {\n  slow {\n    version = 2\n    remote_addrs = slow.example.org\n    \
                keyingtries = 0\n    local {\n      auth = psk\n    }\n    remote {\n      \
                auth = psk\n    }\n    children {\n      slow {\n        start_action = start\n        \
                remote_ts = 10.77.0.0/16\n      }\n    }\n  }\n}\n";
    let mut site = Wish {
        more,
        ..Wish::new(Daemon::Swanherd)
    }
    .start();
    let _names = Names::start(&site.fixed.namespace);

    let begun = Instant::now();
    site.mover.initiate("c");
    assert!(begun.elapsed() < Duration::from_secs(5), "{}", site.logs());
    site.assert_traffic_passes();

    let begun = Instant::now();
    site.mover.stop();
    assert!(begun.elapsed() < Duration::from_secs(8), "{}", site.logs());
}
