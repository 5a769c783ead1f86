// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The UDP shell: datagrams between the sockets and the engine.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use swanherd_ike::api::{Datagram, Transmit};
use swanherd_ike::wire::{ExchangeType, PayloadType};
use swanherd_kernel::udp::{IkeSocket, NatTraversal, Outgoing};
use tokio::sync::mpsc;

use crate::engine::{DATAGRAM_QUEUE, Sender, Sent};

/// Room in the queue that first messages of handshakes leave to all others, so that a flood of them
/// costs no established SA an answer.
const RESERVED: usize = DATAGRAM_QUEUE / 4;

/// Datagrams that were dropped because the engine was behind.
pub(crate) static DROPPED: AtomicU32 = AtomicU32::new(0);

/// The two sockets of IKE (RFC 7296 section 2.23).
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    /// `charon.port`, 500 as a rule.
    pub(crate) ike: Arc<IkeSocket>,
    /// `charon.port_nat_t`, 4500 as a rule.
    pub(crate) nat_t: Arc<IkeSocket>,
}

impl Sender for Sockets {
    fn send(&self, transmit: &Transmit) -> Sent {
        let nat_t = transmit.local.port() == self.nat_t.port();
        let socket = if nat_t { &self.nat_t } else { &self.ike };
        let local = Some(transmit.local.ip()).filter(|addr| !addr.is_unspecified());
        let sent = if transmit.keepalive {
            socket.send_keepalive(local, transmit.remote, transmit.dscp)
        } else {
            socket.send(&Outgoing {
                local,
                remote: transmit.remote,
                payload: &transmit.payload,
                dscp: transmit.dscp,
                marker: nat_t,
            })
        };
        match sent {
            Ok(()) => Sent::Perhaps,
            Err(error) => {
                tracing::debug!(remote = %transmit.remote, %error, "datagram not sent");
                if swanherd_kernel::udp::is_too_long(&error) {
                    Sent::TooLong
                } else {
                    Sent::Perhaps
                }
            }
        }
    }
}

/// Reads the IKE port for as long as the daemon runs.
pub(crate) async fn read_ike(socket: Arc<IkeSocket>, engine: mpsc::Sender<Datagram>) {
    read(&socket, |local, remote, payload| {
        forward(&engine, local, remote, payload.to_vec());
    })
    .await;
}

/// Reads the NAT traversal port where the kernel takes ESP out of UDP, so that only IKE arrives.
pub(crate) async fn read_nat_t(socket: Arc<IkeSocket>, engine: mpsc::Sender<Datagram>) {
    read(&socket, |local, remote, payload| {
        if let NatTraversal::Ike(message) = NatTraversal::classify(payload) {
            forward(&engine, local, remote, message.to_vec());
        }
    })
    .await;
}

/// Gives the engine what a data plane found to be IKE.
pub(crate) fn forward(
    engine: &mpsc::Sender<Datagram>,
    local: SocketAddr,
    remote: SocketAddr,
    payload: Vec<u8>,
) {
    let refused = is_first(&payload) && engine.capacity() < RESERVED;
    if refused
        || engine
            .try_send(Datagram {
                local,
                remote,
                payload,
            })
            .is_err()
    {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether this is an IKE_SA_INIT request, which has no SPI of a responder yet.
pub(crate) fn is_first(payload: &[u8]) -> bool {
    payload.get(8..16) == Some(&[0; 8])
        && payload.get(18) == Some(&u8::from(ExchangeType::IkeSaInit))
}

/// Whether a first message looks like one that returns a cookie, which is the first payload of it
/// (RFC 7296 section 2.6).
pub(crate) fn brings_a_cookie(payload: &[u8]) -> bool {
    payload.get(16) == Some(&u8::from(PayloadType::Notify))
}

async fn read(socket: &IkeSocket, mut take: impl FnMut(SocketAddr, SocketAddr, &[u8])) {
    loop {
        match socket.recv().await {
            Ok(received) => take(received.local, received.remote, &received.payload),
            Err(error) => {
                // An ICMP error of some earlier datagram, or memory pressure: neither may end the
                // daemon, nor make it spin.
                tracing::debug!(port = socket.port(), %error, "receive failed");
                tokio::task::yield_now().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_messages_leave_a_part_of_the_queue_to_all_others() {
        let (sender, mut queue) = mpsc::channel(DATAGRAM_QUEUE);
        let addr: SocketAddr = "192.0.2.1:500".parse().unwrap();
        let mut first = vec![0; 28];
        first[18] = 34;
        let mut other = first.clone();
        other[8] = 1;
        for _ in 0..DATAGRAM_QUEUE {
            forward(&sender, addr, addr, first.clone());
        }
        assert_eq!(sender.capacity(), RESERVED - 1);
        for _ in 0..10 {
            forward(&sender, addr, addr, other.clone());
        }
        assert_eq!(sender.capacity(), RESERVED - 11);
        assert!(queue.try_recv().is_ok());
    }
}
