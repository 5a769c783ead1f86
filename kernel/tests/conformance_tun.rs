// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance tests on ESP in user space. Needs root; without it these tests say so and pass,
//! since they run where `cargo xtask test` is root.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::sync::Arc;

use swanherd_ipsec::plane::PlaneEvent;
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::tun::{DEFAULT_MARK, TunConfig, TunPlane};
use swanherd_kernel::udp::{IkeSocket, Received, SocketOptions};
use tokio::sync::mpsc::Receiver;

mod common;
#[macro_use]
mod conformance;

use conformance::bench::{Bed, PORT};

struct Tun;

impl Bed for Tun {
    type Plane = TunPlane;
    type Keep = Receiver<Received>;

    fn is_available() -> bool {
        common::may_use_namespaces()
    }

    async fn start() -> (TunPlane, Receiver<PlaneEvent>, Receiver<Received>) {
        let options = SocketOptions::for_tun_plane(DEFAULT_MARK);
        let socket = Arc::new(IkeSocket::bind(None, PORT, &options).unwrap());
        TunPlane::start(socket, &TunConfig::default())
            .await
            .unwrap()
    }
}

conformance!(Tun);

#[test]
fn packets_that_a_route_of_others_leads_back_end() {
    if !Tun::is_available() {
        return;
    }
    common::block_on(async {
        let lab = common::Lab::pair();
        let host = conformance::bench::Host::<Tun>::start(&lab, 0).await;
        lab.ip(
            0,
            &format!("route add 198.51.100.0/24 dev {}", host.plane.device()),
        );

        let socket = conformance::bench::bind(&lab, 0, ("192.0.2.1", 5000)).await;
        socket
            .send_to(b"round and round", "198.51.100.1:7")
            .unwrap();

        let end = std::time::Instant::now() + conformance::bench::PATIENCE;
        while host.plane.event_counts().drops.looped == 0 {
            assert!(
                std::time::Instant::now() < end,
                "{:?}",
                host.plane.event_counts()
            );
            conformance::bench::pause().await;
        }
        assert_eq!(host.plane.event_counts().drops.looped, 1);
        host.plane.shutdown().await;
    });
}
