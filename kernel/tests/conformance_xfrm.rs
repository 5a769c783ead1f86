// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance tests on a kernel that has ESP (`cargo xtask test --only kernel`).
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use swanherd_ipsec::plane::PlaneEvent;
use swanherd_kernel::udp::{IkeSocket, SocketOptions};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use tokio::sync::mpsc::Receiver;

mod common;
#[macro_use]
mod conformance;

use conformance::bench::{Bed, PORT};

struct Xfrm;

impl Bed for Xfrm {
    type Plane = XfrmPlane;
    type Keep = IkeSocket;

    fn is_available() -> bool {
        common::kernel_has_esp()
    }

    async fn start() -> (XfrmPlane, Receiver<PlaneEvent>, IkeSocket) {
        let options = SocketOptions {
            decapsulate: true,
            bypass: true,
            ..SocketOptions::default()
        };
        let socket = IkeSocket::bind(None, PORT, &options).unwrap();
        let (plane, events) = XfrmPlane::start(XfrmOptions::default()).await.unwrap();
        (plane, events, socket)
    }
}

conformance!(Xfrm);

// A plane behind a device of its own does not see what comes in by others.
conformance! {
    Xfrm;
    inbound::clear_text_that_should_have_been_protected_is_not_delivered;
}
