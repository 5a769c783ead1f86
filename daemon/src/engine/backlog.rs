// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What becomes of datagrams that come faster than they can be worked on, and of the memory that
//! they took.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use swanherd_ike::api::Datagram;
use swanherd_kernel::{DataPlane, memory};
use tokio::sync::mpsc;

use super::{DATAGRAM_QUEUE, Engine, Sender, now};
use crate::shell::{DROPPED, brings_a_cookie, is_first};

/// From that many waiting datagrams on, strangers who only begin have to try again.
pub(super) const BACKLOG: usize = DATAGRAM_QUEUE / 16;

impl<P: DataPlane + 'static, S: Sender> Engine<P, S> {
    /// The datagram to work on, if not all are passed over.
    pub(super) fn triage(&mut self, next: Datagram) -> Option<Datagram> {
        self.swollen |= self.datagrams.len() >= BACKLOG;
        let endpoint = &self.endpoint;
        let known = |addr| endpoint.knows_peer(now(), addr);
        let (datagram, passed_over) = first_of_importance(next, &mut self.datagrams, known);
        DROPPED.fetch_add(passed_over, Ordering::Relaxed);
        datagram
    }

    /// After a flood, once nothing is left of it, has the allocator return what it keeps.
    pub(super) fn give_memory_back(&mut self) {
        if self.swollen && self.datagrams.is_empty() && self.endpoint.half_open() == 0 {
            self.swollen = false;
            // It looks at all memory that was freed.
            tokio::task::spawn_blocking(memory::give_back);
        }
    }
}

/// The first datagram, of `next` and those that wait, that is worth work while there is a backlog,
/// and how many were passed over. First messages of strangers are not, unless they return a cookie:
/// passing them over costs next to nothing, so that those of peers come to their turn.
fn first_of_importance(
    next: Datagram,
    waiting: &mut mpsc::Receiver<Datagram>,
    known: impl Fn(IpAddr) -> bool,
) -> (Option<Datagram>, u32) {
    let mut next = Some(next);
    let mut passed_over = 0;
    while let Some(datagram) = next {
        let payload = &datagram.payload;
        if waiting.len() < BACKLOG
            || !is_first(payload)
            || brings_a_cookie(payload)
            || known(datagram.remote.ip())
        {
            return (Some(datagram), passed_over);
        }
        passed_over += 1;
        next = waiting.try_recv().ok();
    }
    (None, passed_over)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The beginning of an IKE_SA_INIT request; the first payload is of that type.
    fn first(remote: [u8; 4], payload: u8) -> Datagram {
        let mut message = vec![0; 28];
        (message[16], message[18]) = (payload, 34);
        Datagram {
            local: "192.0.2.1:500".parse().unwrap(),
            remote: (remote, 500).into(),
            payload: message,
        }
    }

    #[test]
    fn a_backlog_is_passed_over_but_for_peers_cookies_and_ike_sas() {
        let (sender, mut waiting) = mpsc::channel(DATAGRAM_QUEUE);
        let stranger = first([203, 0, 113, 66], 33);
        let cookie = first([203, 0, 113, 67], 41);
        let peer = first([192, 0, 2, 2], 33);
        let mut of_ike_sa = first([203, 0, 113, 68], 46);
        of_ike_sa.payload[8] = 1;
        for other in [&cookie, &peer, &of_ike_sa] {
            for _ in 0..300 {
                sender.try_send(stranger.clone()).unwrap();
            }
            sender.try_send(other.clone()).unwrap();
        }
        for _ in 0..BACKLOG + 10 {
            sender.try_send(stranger.clone()).unwrap();
        }
        let known = |addr: IpAddr| addr == peer.remote.ip();

        let mut take = |expected: &Datagram| {
            let next = waiting.try_recv().unwrap();
            let (taken, passed_over) = first_of_importance(next, &mut waiting, known);
            assert_eq!(taken.unwrap().remote, expected.remote);
            passed_over
        };
        assert_eq!(take(&cookie), 300);
        assert_eq!(take(&peer), 300);
        assert_eq!(take(&of_ike_sa), 300);
        // Nobody has to wait for ever.
        assert_eq!(take(&stranger), 10);
        assert_eq!(take(&stranger), 0);
    }
}
