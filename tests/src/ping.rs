// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Echo requests, counted.
//!
//! Not by ping(8): it waits for its last answer no longer than for two round trips, which is less
//! than a moment in which a busy host runs something else.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, bind, connect, ipproto, recv, sendto,
};

use crate::lab::Namespace;

/// How long the last answers may take.
const LINGER: Duration = Duration::from_secs(2);
/// As much as ping(8) sends by default.
const PAYLOAD: usize = 56;

static IDENTIFIERS: AtomicU16 = AtomicU16::new(1);

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PingReport {
    /// Requests sent.
    pub sent: u32,
    /// Answers received, without duplicates.
    pub received: u32,
    /// The same for people: which requests had no answer, when they were sent, and what the kernel
    /// said of those that it refused to send.
    pub text: String,
}

/// Requests on their way.
#[derive(Debug)]
pub struct Pings {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<PingReport>>,
}

impl Pings {
    /// Sends `count` requests, 20 a second, from an address in a namespace.
    ///
    /// # Panics
    /// When it has no such address.
    #[must_use]
    pub fn start(namespace: &Namespace, from: &str, to: &str, count: u32) -> Self {
        Self::every(Duration::from_millis(50), namespace, from, to, count)
    }

    /// As [`Pings::start`], one in each `interval`.
    ///
    /// # Panics
    /// When the namespace has no such address.
    #[must_use]
    pub fn every(
        interval: Duration,
        namespace: &Namespace,
        from: &str,
        to: &str,
        count: u32,
    ) -> Self {
        let from: IpAddr = from.parse().expect("an address to send from");
        let to: IpAddr = to.parse().expect("an address to send to");
        let socket = namespace.enter(move || raw_socket(from));
        let stop = Arc::new(AtomicBool::new(false));
        let course = Course {
            socket,
            from,
            to,
            identifier: IDENTIFIERS.fetch_add(1, Ordering::Relaxed),
            interval,
            count,
            stop: Arc::clone(&stop),
        };
        Self {
            stop,
            thread: Some(std::thread::spawn(move || course.run())),
        }
    }

    /// Waits for the last answer.
    ///
    /// # Panics
    /// When the socket failed.
    #[must_use]
    pub fn finish(mut self) -> PingReport {
        let thread = self.thread.take().expect("taken only here and on drop");
        thread
            .join()
            .unwrap_or_else(|e| std::panic::resume_unwind(e))
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn raw_socket(from: IpAddr) -> OwnedFd {
    let (family, protocol) = match from {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    let socket = rustix::net::socket(family, SocketType::RAW, Some(protocol))
        .expect("root may have raw sockets");
    bind(&socket, &SocketAddr::new(from, 0))
        .unwrap_or_else(|e| panic!("cannot send from {from}: {e}"));
    socket
}

/// What a thread of requests needs.
struct Course {
    socket: OwnedFd,
    from: IpAddr,
    to: IpAddr,
    identifier: u16,
    interval: Duration,
    count: u32,
    stop: Arc<AtomicBool>,
}

impl Course {
    fn run(self) -> PingReport {
        let begun = Instant::now();
        let mut answered = BTreeSet::new();
        let mut sent = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let index = u32::try_from(sent.len()).expect("a few thousand");
            let due = begun + self.interval * index;
            if index == self.count {
                let last = sent.last().map_or(begun, |(at, _): &(Instant, _)| *at);
                if answered.len() == sent.len() || last.elapsed() >= LINGER {
                    break;
                }
                self.receive(last + LINGER, &mut answered);
            } else if Instant::now() < due {
                self.receive(due, &mut answered);
            } else {
                let request = self.request(index);
                let to = SocketAddr::new(self.to, 0);
                let outcome = sendto(&self.socket, &request, SendFlags::DONTWAIT, &to);
                sent.push((Instant::now(), outcome.err()));
            }
        }
        let mut text = format!(
            "{} -> {}: {} sent, {} answered",
            self.from,
            self.to,
            sent.len(),
            answered.len()
        );
        for (index, (at, error)) in (0..).zip(&sent) {
            if !answered.contains(&index) {
                let after = at.duration_since(begun).as_secs_f32();
                text += &format!("\nno answer to {index}, sent after {after:.3} s");
                if let Some(error) = error {
                    text += &format!(": {error}");
                }
            }
        }
        PingReport {
            sent: u32::try_from(sent.len()).expect("as many as asked for"),
            received: u32::try_from(answered.len()).expect("no more than were sent"),
            text,
        }
    }

    /// Notes answers until an instant, or until one has come.
    fn receive(&self, until: Instant, answered: &mut BTreeSet<u32>) {
        // Zero would mean to wait for ever.
        let wait = until
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(1), Duration::from_millis(100));
        set_socket_timeout(&self.socket, Timeout::Recv, Some(wait)).expect("a time to wait");
        let mut buffer = [0; 2048];
        // An error is the end of the wait, or one that an ICMP message has reported for a request.
        let Ok((length, _)) = recv(&self.socket, &mut buffer, RecvFlags::empty()) else {
            return;
        };
        let Some(index) = self.answer(&buffer[..length]) else {
            return;
        };
        // Raw sockets have a copy of each answer that comes to the namespace, so that those of
        // many would fill the buffers of each. From now on it is for those of one peer; not before,
        // when there may be no route yet.
        if answered.is_empty() {
            let _ = connect(&self.socket, &SocketAddr::new(self.to, 0));
        }
        let _ = answered.insert(index);
    }

    /// The index of the request that a message answers.
    fn answer(&self, packet: &[u8]) -> Option<u32> {
        let (message, reply) = match self.to {
            // A raw socket gives the IPv4 header, too.
            IpAddr::V4(_) => (packet.get(usize::from(packet.first()? & 0xf) * 4..)?, 0),
            IpAddr::V6(_) => (packet, 129),
        };
        let ours =
            *message.first()? == reply && message.get(4..6)? == self.identifier.to_be_bytes();
        let index = u32::from_be_bytes(message.get(8..12)?.try_into().ok()?);
        (ours && index < self.count).then_some(index)
    }

    /// An echo request (RFC 792, RFC 4443 section 4.1). The sequence number has 16 bits, so that
    /// the index is in the data.
    fn request(&self, index: u32) -> Vec<u8> {
        let kind = match self.to {
            IpAddr::V4(_) => 8,
            IpAddr::V6(_) => 128,
        };
        let mut message = vec![kind, 0, 0, 0];
        message.extend(self.identifier.to_be_bytes());
        message.extend(&index.to_be_bytes()[2..]);
        message.extend(index.to_be_bytes());
        message.resize(8 + PAYLOAD, 0);
        // The kernel fills in that of ICMPv6, which covers addresses.
        if self.to.is_ipv4() {
            let sum: u32 = message
                .chunks(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let folded = (folded & 0xffff) + (folded >> 16);
            let checksum = !u16::try_from(folded).expect("folded twice");
            message[2..4].copy_from_slice(&checksum.to_be_bytes());
        }
        message
    }
}
