// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance tests on ESP in user space. Needs root; without it these tests say so and pass,
//! since they run where `cargo xtask test` is root.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::sync::Arc;

use swanherd_ipsec::plane::PlaneEvent;
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
