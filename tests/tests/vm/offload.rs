// SPDX-License-Identifier: Apache-2.0 OR MIT
//! ESP that a network device takes over. The device is Linux's netdevsim, which keeps the SAs that
//! it is given and counts the packets that are left to it, but neither encrypts nor sends them. So
//! the peer is reached through another device, where the kernel does the work itself.

use swanherd_tests::{Daemon, Lab, Message, Namespace, Node, xfrm};

use super::{
    End, assert_audit_is_clean, assert_pings, child_sa, connection, initiate, remains, start,
};

/// How `ip` shows what has taken over an SA.
const OFFLOADED: &str = "crypto offload parameters: dev eth0";
const FALLBACK: &str = "the kernel itself processes ESP here";
/// netdevsim's number of the device.
const NUMBER: &str = "7";

/// Loads the module that `cargo xtask test --only vm` builds for one of the kernels.
fn load_netdevsim() {
    let module = std::env::var_os("SWANHERD_NETDEVSIM").expect("no netdevsim for this kernel");
    // What it needs, and what the kernel needs to leave anything to a device.
    for needed in ["psample", "udp_tunnel", "esp4_offload", "esp6_offload"] {
        let _ = swanherd_tests::run("modprobe", [needed]);
    }
    let inserted = swanherd_tests::run("insmod", [module]);
    assert!(
        inserted.ok() || inserted.to_string().contains("File exists"),
        "{inserted}"
    );
}

/// Tells netdevsim to make a device in a namespace, or to take it away again.
fn netdevsim(namespace: &Namespace, file: &str, what: &str) {
    let write = format!("echo '{what}' >/sys/bus/netdevsim/{file}");
    let _ = namespace.run("sh", ["-c", &write]).expect_ok();
}

/// What the device says: how many SAs it has, and how many packets were left to it.
fn taken_over(namespace: &Namespace) -> (u32, u32) {
    let file = format!("/sys/kernel/debug/netdevsim/netdevsim{NUMBER}/ports/0/ipsec");
    // Outside of the namespace's own view of /sys.
    let text = std::fs::read_to_string(&file)
        .unwrap_or_else(|_| namespace.run("cat", [&file]).expect_ok());
    let number = |key: &str| {
        text.split_whitespace()
            .find_map(|word| word.strip_prefix(key))
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("no {key} in {text}"))
    };
    (number("count="), number("tx="))
}

/// The states of a namespace that are offloaded, and those that are not.
fn states(namespace: &Namespace) -> [usize; 2] {
    let (offloaded, others): (Vec<_>, Vec<_>) = xfrm(namespace, "state")
        .into_iter()
        .partition(|state| state.contains(OFFLOADED));
    [offloaded.len(), others.len()]
}

/// Has the child rekeyed, and waits until the new SAs alone are left.
fn rekey(node: &Node, child: &str, expected: [usize; 2]) {
    let before = child_sa(node, child).map(|sa| sa.number("uniqueid"));
    let arguments = Message::new(&[("child", child)]);
    let answer = node.vici().request("rekey", &arguments);
    assert!(
        answer.as_ref().is_ok_and(|m| m.text("success") == "yes"),
        "{answer:?}\n{}",
        node.log()
    );
    node.wait_until("the rekeyed child alone", 60, |n| {
        let now = child_sa(n, child).map(|sa| sa.number("uniqueid"));
        now.is_some() && now != before && states(&n.namespace) == expected
    });
}

#[test]
fn what_a_device_drops_when_it_goes_is_negotiated_anew() {
    load_netdevsim();
    let mut lab = Lab::new();
    let [gateway, peer] = ["gw", "peer"].map(|name| lab.namespace(name));
    lab.link(
        (&gateway, "u0", "198.51.100.1/24"),
        (&peer, "u0", "198.51.100.2/24"),
    );
    gateway.ip("addr add 10.1.0.1/32 dev lo");
    gateway.ip("addr add 10.1.1.1/32 dev lo");
    peer.ip("addr add 10.2.0.1/32 dev lo");
    peer.ip("route add 192.0.2.1/32 via 198.51.100.1");
    let before = remains(&gateway);
    netdevsim(&gateway, "new_device", &format!("{NUMBER} 1"));
    gateway.ip("link set eth0 up");
    gateway.ip("addr add 192.0.2.1/32 dev eth0");

    let child = |name: &str, own: &str, other: &str, more: &str| {
        format!(
            "      {name} {{
        local_ts = {own}
        remote_ts = {other}
        esp_proposals = aes128gcm16-x25519
        {more}
      }}\n"
        )
    };
    let [one, two, three] = ["10.1.0.1/32", "10.1.1.1/32", "10.1.2.1/32"];
    let far = "10.2.0.1/32";
    // The device knows nothing but AES-GCM.
    let other = "esp_proposals = aes128-sha256-x25519";
    let children = [
        child("auto", one, far, "hw_offload = auto\n start_action = start"),
        child("crypto", two, far, "hw_offload = crypto"),
        child("packet", three, far, "hw_offload = packet"),
        child("other", three, far, "hw_offload = auto")
            .replace("esp_proposals = aes128gcm16-x25519", other),
    ];
    let (gw_end, peer_end) = (
        End {
            address: "192.0.2.1",
            id: "gw",
        },
        End {
            address: "198.51.100.2",
            id: "peer",
        },
    );
    let every = [one, two, three].join(",");
    let peer = start(
        &lab,
        &peer,
        Daemon::Swanherd,
        &[connection(
            "to-gw",
            &peer_end,
            &gw_end,
            &child("gw", far, &every, "").replace(
                "aes128gcm16-x25519",
                "aes128gcm16-x25519,aes128-sha256-x25519",
            ),
        )],
    );
    let mut gw = start(
        &lab,
        &gateway,
        Daemon::Swanherd,
        &[connection(
            "to-peer",
            &gw_end,
            &peer_end,
            &children.concat(),
        )],
    );

    // The device takes over what it can.
    gw.wait_until("the child that starts by itself", 60, |n| {
        child_sa(n, "auto").is_some()
    });
    initiate(&gw, "crypto", &peer);
    assert_eq!(states(&gateway), [4, 0], "{}", gw.log());
    assert_eq!(taken_over(&gateway), (4, 0));
    assert_pings((&gw, "10.1.0.1"), "10.2.0.1", &peer);
    assert_pings((&peer, "10.2.0.1"), "10.1.1.1", &gw);
    assert!(!gw.log().contains(FALLBACK), "{}", gw.log());

    // Packets that leave through the device are left to it.
    gateway.ip("neigh add 198.51.100.2 lladdr 02:00:00:00:00:02 dev eth0");
    gateway.ip("route add 198.51.100.2/32 dev eth0");
    let lost = gateway.run("ping", ["-c2", "-i.2", "-W1", "-I10.1.0.1", "10.2.0.1"]);
    assert!(!lost.ok(), "{lost}");
    assert_eq!(taken_over(&gateway), (4, 2));
    gateway.ip("route del 198.51.100.2/32 dev eth0");
    assert_pings((&gw, "10.1.0.1"), "10.2.0.1", &peer);

    // What the device cannot is refused, or done without it.
    for (child, reason) in [
        ("packet", "Unrecognized flags in offload request"),
        ("other", FALLBACK),
    ] {
        let arguments = Message::new(&[("child", child), ("timeout", "-1")]);
        let _ = gw.vici().request("initiate", &arguments);
        gw.wait_until(reason, 60, |n| n.log().contains(reason));
    }
    gw.wait_until("a child in software", 60, |n| {
        child_sa(n, "other").is_some()
    });
    assert!(child_sa(&gw, "packet").is_none(), "{}", gw.log());
    assert_eq!(states(&gateway), [4, 2], "{}", gw.log());
    let arguments = Message::new(&[("child", "other")]);
    let _ = gw.vici().request("terminate", &arguments);

    // The device has the new SAs and not the old ones any more.
    rekey(&gw, "auto", [4, 0]);
    assert_eq!(taken_over(&gateway).0, 4);

    // Set down, the kernel drops what the device had, and says nothing.
    let gone: Vec<u64> = gw
        .children("INSTALLED")
        .iter()
        .map(|c| c.number("uniqueid"))
        .collect();
    gateway.ip("link set eth0 down");
    gateway.ip("link set eth0 up");
    gw.wait_until("both children anew", 60, |n| {
        let installed = n.children("INSTALLED");
        let old = |child: &Message| gone.contains(&child.number("uniqueid"));
        installed.len() == 2 && !installed.iter().any(old) && states(&n.namespace) == [4, 0]
    });
    assert_pings((&gw, "10.1.0.1"), "10.2.0.1", &peer);
    assert_pings((&peer, "10.2.0.1"), "10.1.1.1", &gw);
    assert_eq!(taken_over(&gateway).0, 4);
    assert_audit_is_clean(&gw);

    // The device goes, and its address moves to another one that cannot what it could.
    netdevsim(&gateway, "del_device", NUMBER);
    gateway.ip("addr add 192.0.2.1/32 dev u0");
    gw.wait_until("SAs without the device", 90, |n| {
        states(&n.namespace) == [0, 2] && child_sa(n, "auto").is_some()
    });
    assert_pings((&gw, "10.1.0.1"), "10.2.0.1", &peer);
    assert!(child_sa(&gw, "crypto").is_none(), "{}", gw.log());
    let refused = "with 192.0.2.1 does not take over ESP";
    gw.wait_until(refused, 60, |n| n.log().contains(refused));
    assert_audit_is_clean(&gw);
    rekey(&gw, "auto", [0, 2]);
    assert_pings((&peer, "10.2.0.1"), "10.1.0.1", &gw);
    // Once for each device; the log has what the file has and what was printed.
    let told = format!("[KNL] hw_offload = auto: {FALLBACK}");
    assert_eq!(gw.log().matches(&told).count(), 2, "{}", gw.log());

    gw.stop();
    gateway.ip("addr del 192.0.2.1/32 dev u0");
    assert_eq!(remains(&gateway), before, "{}", gw.log());
}
