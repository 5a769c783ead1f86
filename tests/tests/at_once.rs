// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whoever is told that a tunnel is up may use it at once: nothing is lost in its first moments.
//! Both daemons are ours and encrypt in user space; `SWANHERD_LONG` makes more rounds.
//!
//! Not with `ping`, which waits for the last answer no longer than twice the slowest one took, and
//! so loses some on a busy machine.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::time::Duration;

use swanherd_tests::{Daemon, Namespace, Plane, Scenario};

/// Datagrams that each side sends.
const BURST: u32 = 5;
const INNER: [&str; 2] = ["10.1.0.1", "10.2.0.1"];
const PORT: u16 = 7000;
/// Far more than any datagram takes on its way.
const PATIENCE: Duration = Duration::from_secs(5);

#[test]
fn no_packet_is_lost_right_after_initiate() {
    let rounds: u32 = if std::env::var_os("SWANHERD_LONG").is_some() {
        2000
    } else {
        200
    };
    let pair = Scenario {
        left: Daemon::Swanherd,
        right: Daemon::Swanherd,
        ..Scenario::new(Plane::User)
    }
    .start();
    let nodes = [&pair.left, &pair.right];
    let sockets = [0, 1].map(|side| bind(&nodes[side].namespace, INNER[side]));

    for round in 0..rounds {
        let side = usize::from(round % 2 == 1);
        nodes[side].initiate("c");

        for from in [side, 1 - side] {
            for number in 0..BURST {
                let data = [round.to_be_bytes(), number.to_be_bytes()].concat();
                let to = (INNER[1 - from], PORT);
                let sent = sockets[from].send_to(&data, to);
                sent.expect("a datagram can be sent");
            }
        }

        for at in [0, 1] {
            for number in 0..BURST {
                let mut data = [0; 8];
                let received = sockets[at].recv_from(&mut data);
                let expected = [round.to_be_bytes(), number.to_be_bytes()].concat();
                assert!(
                    received.is_ok() && data == *expected,
                    "datagram {number} of round {round} at {at}: {received:?} {data:?}\n{}",
                    pair.logs()
                );
            }
        }
        let ended = nodes[side].swanctl(&["--terminate", "--ike", "t", "--timeout", "10"]);
        assert!(ended.ok(), "{ended}");
        nodes[1 - side].wait_until("the tunnel is gone", 5, |node| node.sas().is_empty());
    }
}

/// A socket in a namespace, where the thread that makes it goes for that.
fn bind(namespace: &Namespace, addr: &'static str) -> UdpSocket {
    let path = format!("/run/netns/{}", namespace.name());
    std::thread::spawn(move || {
        let there = File::open(path).expect("the namespace is there");
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(there.as_fd(), kind).expect("root may enter");
        let socket = UdpSocket::bind((addr, PORT)).expect("the address is the namespace's");
        socket
            .set_read_timeout(Some(PATIENCE))
            .expect("a socket has a timeout");
        socket
    })
    .join()
    .expect("the thread ends")
}
