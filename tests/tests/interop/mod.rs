// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What has to hold between the daemon and its peer, whoever encrypts the packets.

use swanherd_tests::{Auth, Message, Node, Pair, Plane, Scenario, Suite};

/// A side of a [`Pair`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Left,
    Right,
}

use Side::{Left, Right};

impl Side {
    pub(crate) fn of(self, pair: &Pair) -> &Node {
        match self {
            Left => &pair.left,
            Right => &pair.right,
        }
    }
}

/// One tunnel, initiated by a side, with traffic both ways and the negotiated suite in the listing.
pub(crate) fn establishes(plane: Plane, suite: Suite, auth: Auth, initiator: Side) {
    let pair = Scenario {
        suite,
        auth,
        ..Scenario::new(plane)
    }
    .start();

    initiator.of(&pair).initiate("c");

    pair.assert_traffic_passes();
    let sas = pair.left.sas();
    assert_eq!(sas.len(), 1, "{sas:#?}");
    let (name, ike) = &sas[0];
    assert_eq!(name, "t");
    assert_eq!(ike.text("state"), "ESTABLISHED");
    assert_eq!(ike.text("initiator") == "yes", matches!(initiator, Left));
    assert_eq!(ike.text("local-id"), "gw1.example.org");
    assert_eq!(ike.text("remote-id"), "gw2.example.org");
    assert_eq!(words(ike), expected_words(suite.ike, true), "{ike:#?}");
    let children = pair.left.children("INSTALLED");
    assert_eq!(children.len(), 1, "{children:#?}");
    let child = &children[0];
    assert_eq!(words(child), expected_words(suite.esp, false), "{child:#?}");
    // Five echo requests and five answers on each of the two pings: 84 octets a packet.
    for key in ["bytes-in", "bytes-out"] {
        assert_eq!(child.number(key), 10 * 84, "{key} of {child:#?}");
    }
    for key in ["packets-in", "packets-out"] {
        assert_eq!(child.number(key), 10, "{key} of {child:#?}");
    }
}

/// Four megabytes of TCP in each direction. A volume rather than a time, since two gateways on one
/// slow processor may carry little for seconds and still be right.
pub(crate) fn carries_tcp(plane: Plane) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");

    for extra in ["--no-delay", "--reverse"] {
        let mut server = pair
            .right
            .namespace
            .command("iperf3")
            .args(["--server", "--one-off", "--bind", "10.2.0.1"])
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("iperf3 is installed");
        pair.right.wait_until("that iperf3 listens", 20, |n| {
            let listening = n.namespace.run("ss", ["-Htln", "sport = :5201"]);
            !listening.stdout.trim().is_empty()
        });
        let client = pair.left.namespace.run(
            "timeout",
            [
                "60", "iperf3", "--client", "10.2.0.1", "--bind", "10.1.0.1", "--bytes", "4M",
                "--json", extra,
            ],
        );
        let _ = server.kill();
        let _ = server.wait();

        assert!(client.ok(), "{client}\n{}", pair.logs());
    }
    // The listing may be a second behind, and more where two gateways share one slow processor.
    let begun = std::time::Instant::now();
    let listed = || pair.left.children("INSTALLED");
    while !listed()
        .iter()
        .any(|c| c.number("bytes-in") > 1_000_000 && c.number("bytes-out") > 1_000_000)
    {
        assert!(
            begun.elapsed().as_secs() < 20,
            "not a megabyte each way: {:?}\nthe kernel: {}\n{}",
            listed(),
            pair.left.namespace.ip("-s xfrm state"),
            pair.logs()
        );
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// A child is rekeyed by a side under traffic: other SPIs, and no ping is lost.
pub(crate) fn child_rekey_loses_nothing(plane: Plane, by: Side) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");
    pair.assert_traffic_passes();
    let before = pair.left.children("INSTALLED")[0].text("spi-in").to_owned();
    let pings = pair.pings(80);

    for _ in 0..3 {
        let _ = by
            .of(&pair)
            .swanctl(&["--rekey", "--child", "c"])
            .expect_ok();
        std::thread::sleep(std::time::Duration::from_secs(1));
    }

    let report = pings.finish();
    assert_eq!(
        report.received,
        report.sent,
        "{}\n{}",
        report.text,
        pair.logs()
    );
    for node in [&pair.left, &pair.right] {
        node.wait_until("one child after the rekeys", 10, |n| {
            n.children("INSTALLED").len() == 1 && n.sas()[0].1.sections("child-sas").len() == 1
        });
    }
    assert_ne!(pair.left.children("INSTALLED")[0].text("spi-in"), before);
    pair.assert_traffic_passes();
}

/// An IKE SA is rekeyed by a side under traffic: other SPIs, the same child, no ping lost; and the
/// new SA is a whole one, since it rekeys the child afterwards.
pub(crate) fn ike_rekey_loses_nothing(plane: Plane, by: Side) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");
    pair.assert_traffic_passes();
    let before = pair.left.sas()[0].1.text("initiator-spi").to_owned();
    let child = pair.left.children("INSTALLED")[0].text("spi-in").to_owned();
    let pings = pair.pings(60);

    let _ = by.of(&pair).swanctl(&["--rekey", "--ike", "t"]).expect_ok();
    pair.left
        .wait_until("another IKE SA with the child", 10, |n| {
            let sas = n.sas();
            sas.len() == 1
                && sas[0].1.text("state") == "ESTABLISHED"
                && sas[0].1.text("initiator-spi") != before
                && n.children("INSTALLED").len() == 1
        });
    assert_eq!(pair.left.children("INSTALLED")[0].text("spi-in"), child);
    let _ = by
        .of(&pair)
        .swanctl(&["--rekey", "--child", "c"])
        .expect_ok();
    pair.left.wait_until("another child", 10, |n| {
        n.children("INSTALLED")
            .iter()
            .any(|c| c.text("spi-in") != child)
    });

    let report = pings.finish();
    assert_eq!(
        report.received,
        report.sent,
        "{}\n{}",
        report.text,
        pair.logs()
    );
    assert_eq!(pair.right.sas().len(), 1);
    pair.assert_traffic_passes();
}

/// A side deletes the child: it is gone on both sides, the IKE SA stays and makes another.
pub(crate) fn child_is_deleted(plane: Plane, by: Side) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");

    let _ = by
        .of(&pair)
        .swanctl(&["--terminate", "--child", "c", "--timeout", "10"])
        .expect_ok();

    for node in [&pair.left, &pair.right] {
        node.wait_until("no child, but the IKE SA", 5, |n| {
            let sas = n.sas();
            sas.len() == 1 && sas[0].1.sections("child-sas").is_empty()
        });
    }
    pair.left.initiate("c");
    pair.assert_traffic_passes();
}

/// A side deletes the IKE SA: all is gone on both sides, and it can be made again.
pub(crate) fn ike_is_deleted(plane: Plane, by: Side) {
    let pair = Scenario::new(plane).start();
    pair.left.initiate("c");

    let _ = by
        .of(&pair)
        .swanctl(&["--terminate", "--ike", "t", "--timeout", "10"])
        .expect_ok();

    for node in [&pair.left, &pair.right] {
        node.wait_until("nothing", 5, |n| n.sas().is_empty());
    }
    by.of(&pair).initiate("c");
    pair.assert_traffic_passes();
}

/// A side notices that its peer is gone, and forgets the tunnel.
pub(crate) fn dead_peer_is_noticed(plane: Plane, by: Side) {
    let mut pair = Scenario {
        connection: "dpd_delay = 1s",
        settings: "  retransmit_tries = 2\n  retransmit_timeout = 1.0\n  retransmit_base = 1.2\n",
        ..Scenario::new(plane)
    }
    .start();
    pair.left.initiate("c");
    pair.assert_traffic_passes();

    match by {
        Left => pair.right.kill(),
        Right => pair.left.kill(),
    }

    by.of(&pair)
        .wait_until("nothing, for the peer is dead", 20, |n| n.sas().is_empty());
}

/// Questions whether the other side is alive are answered: an idle tunnel stays.
pub(crate) fn live_peer_is_kept(plane: Plane) {
    let pair = Scenario {
        connection: "dpd_delay = 1s",
        settings: "  retransmit_tries = 2\n  retransmit_timeout = 1.0\n  retransmit_base = 1.2\n",
        ..Scenario::new(plane)
    }
    .start();
    pair.left.initiate("c");
    let before = pair.left.sas()[0].1.text("initiator-spi").to_owned();

    std::thread::sleep(std::time::Duration::from_secs(6));

    for node in [&pair.left, &pair.right] {
        let sas = node.sas();
        assert_eq!(sas.len(), 1, "{sas:#?}\n{}", pair.logs());
        assert_eq!(sas[0].1.text("initiator-spi"), before);
    }
    pair.assert_traffic_passes();
}

/// A peer that comes back without a memory replaces its old SA by the contact it makes.
pub(crate) fn restarted_peer_replaces_its_sa(plane: Plane) {
    let mut pair = Scenario::new(plane).start();
    pair.right.initiate("c");
    pair.assert_traffic_passes();

    pair.right.kill();
    pair.right.start();
    pair.right.load();
    pair.right.initiate("c");

    pair.left
        .wait_until("only the new SA", 10, |n| n.sas().len() == 1);
    pair.assert_traffic_passes();
}

fn words(sa: &Message) -> Vec<String> {
    [
        "encr-alg",
        "encr-keysize",
        "integ-alg",
        "prf-alg",
        "dh-group",
    ]
    .iter()
    .map(|key| sa.text(key).to_owned())
    .filter(|word| !word.is_empty())
    .collect()
}

/// What the listing says for a proposal; the first child has no key exchange of its own.
fn expected_words(proposal: &str, ike: bool) -> Vec<String> {
    let mut words = Vec::new();
    let mut integrity = None;
    for keyword in proposal.split('-') {
        words.extend(match keyword {
            "aes128gcm16" => vec!["AES_GCM_16", "128"],
            "aes256gcm16" => vec!["AES_GCM_16", "256"],
            "aes128" => vec!["AES_CBC", "128"],
            "aes256" => vec!["AES_CBC", "256"],
            "sha256" => {
                integrity = Some("PRF_HMAC_SHA2_256");
                vec!["HMAC_SHA2_256_128"]
            }
            "prfsha256" => vec!["PRF_HMAC_SHA2_256"],
            "prfsha384" => vec!["PRF_HMAC_SHA2_384"],
            "x25519" | "ecp256" | "modp2048" if !ike => vec![],
            "x25519" => vec!["CURVE_25519"],
            "ecp256" => vec!["ECP_256"],
            "modp2048" => vec!["MODP_2048"],
            other => panic!("keyword {other} has no translation here"),
        });
    }
    if let (true, Some(prf)) = (ike, integrity) {
        words.insert(words.len() - 1, prf);
    }
    words.into_iter().map(str::to_owned).collect()
}

/// The tests, for one plane.
macro_rules! suite {
    ($plane:expr) => {
        use swanherd_tests::{Auth, Suite};
        use $crate::interop::Side::{Left, Right};

        $crate::interop::cases! { $plane;
            psk_gcm_x25519_as_initiator = establishes(Suite::GCM_X25519, Auth::Psk, Left);
            psk_gcm_x25519_as_responder = establishes(Suite::GCM_X25519, Auth::Psk, Right);
            psk_gcm256_p256_as_initiator = establishes(Suite::GCM256_P256, Auth::Psk, Left);
            psk_gcm256_p256_as_responder = establishes(Suite::GCM256_P256, Auth::Psk, Right);
            psk_cbc_modp2048_as_initiator = establishes(Suite::CBC_MODP2048, Auth::Psk, Left);
            psk_cbc_modp2048_as_responder = establishes(Suite::CBC_MODP2048, Auth::Psk, Right);
            carries_tcp_both_ways = carries_tcp();
            own_child_rekey_loses_nothing = child_rekey_loses_nothing(Left);
            peers_child_rekey_loses_nothing = child_rekey_loses_nothing(Right);
            own_ike_rekey_loses_nothing = ike_rekey_loses_nothing(Left);
            peers_ike_rekey_loses_nothing = ike_rekey_loses_nothing(Right);
            own_child_delete = child_is_deleted(Left);
            peers_child_delete = child_is_deleted(Right);
            own_ike_delete = ike_is_deleted(Left);
            peers_ike_delete = ike_is_deleted(Right);
            notices_a_dead_peer = dead_peer_is_noticed(Left);
            is_noticed_when_dead = dead_peer_is_noticed(Right);
            keeps_a_live_peer = live_peer_is_kept();
            restarted_peer_replaces_its_sa = restarted_peer_replaces_its_sa();
        }
    };
}

macro_rules! cases {
    ($plane:expr; $($name:ident = $case:ident($($arg:expr),*);)+) => {
        $(
            #[test]
            fn $name() {
                $crate::interop::$case($plane, $($arg),*);
            }
        )+
    };
}

pub(crate) use {cases, suite};
