// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets that were routed to the TUN device and go out in clear: those of a bypass policy, and
//! those that no policy selects, which the kernel's IPsec lets pass as well.
//!
//! They leave by raw sockets with the mark that escapes the tunnels' routing table.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use swanherd_esp::Flow;

/// `IPPROTO_RAW`: what is sent brings its own IP header.
const RAW: i32 = 255;

/// Sends whole IP packets around the tunnels.
#[derive(Debug)]
pub(super) struct Clear {
    v4: Socket,
    v6: Option<Socket>,
}

impl Clear {
    /// Opens the sockets; a host without IPv6 has one.
    pub(super) fn open(mark: u32) -> io::Result<Self> {
        let open = |domain| {
            let kind = Type::RAW.nonblocking();
            let socket = Socket::new(domain, kind, Some(Protocol::from(RAW)))?;
            socket.set_mark(mark)?;
            Ok(socket)
        };
        Ok(Self {
            v4: open(Domain::IPV4).map_err(|e: io::Error| {
                io::Error::new(e.kind(), format!("raw socket for packets in clear: {e}"))
            })?,
            v6: open(Domain::IPV6).ok(),
        })
    }

    /// Whether a packet may go on to the network that the host would send it to without tunnels.
    /// What is meant for the link is not: the link is the TUN device.
    pub(super) fn may_pass(flow: &Flow) -> bool {
        match flow.dst {
            IpAddr::V4(dst) => {
                !(dst.is_multicast()
                    || dst.is_broadcast()
                    || dst.is_link_local()
                    || dst.is_loopback()
                    || dst.is_unspecified())
            }
            IpAddr::V6(dst) => {
                !(dst.is_multicast()
                    || dst.is_unicast_link_local()
                    || dst.is_loopback()
                    || dst.is_unspecified())
            }
        }
    }

    /// Sends `packet` to its destination.
    pub(super) fn send(&self, dst: IpAddr, packet: &[u8]) -> io::Result<()> {
        let socket = if dst.is_ipv4() {
            &self.v4
        } else {
            let missing = || io::Error::from(io::ErrorKind::AddrNotAvailable);
            self.v6.as_ref().ok_or_else(missing)?
        };
        let to = SockAddr::from(SocketAddr::new(dst, 0));
        // SAFETY: packet and address live through the call, which reads as much as is told.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                libc::MSG_DONTWAIT,
                to.as_ptr().cast(),
                to.len(),
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Finds packets that come back: with a route of the host's own into the device, what is sent in
/// clear arrives here again, for ever.
#[derive(Debug)]
pub(super) struct Loops {
    /// How often each packet passed in this period, by a hash of all its octets.
    passed: BTreeMap<u64, u8>,
    began: Instant,
}

/// As many passes of one packet in one [`PERIOD`] as a packet has hops at most.
const MAX_PASSES: u8 = u8::MAX;
const PERIOD: Duration = Duration::from_secs(1);
/// Packets that are told apart in a period. Those of a loop are among the first, again and again.
const MAX_PACKETS: usize = 4096;

impl Loops {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            passed: BTreeMap::new(),
            began: now,
        }
    }

    /// Whether `packet`, which is to pass, has passed too often.
    pub(super) fn has(&mut self, packet: &[u8], now: Instant) -> bool {
        if now.saturating_duration_since(self.began) >= PERIOD {
            *self = Self::new(now);
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(packet);
        let hash = hasher.finish();
        if self.passed.len() >= MAX_PACKETS && !self.passed.contains_key(&hash) {
            return false;
        }
        let passes = self.passed.entry(hash).or_default();
        if *passes == MAX_PASSES {
            return true;
        }
        *passes += 1;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_that_comes_back_for_ever_is_stopped_and_no_other() {
        let start = Instant::now();
        let mut loops = Loops::new(start);
        let passes = (0..10_000).filter(|_| !loops.has(b"round", start)).count();
        assert_eq!(passes, usize::from(MAX_PASSES));
        for number in 0..10_000u32 {
            assert!(!loops.has(&number.to_be_bytes(), start));
        }
        assert_eq!(loops.passed.len(), MAX_PACKETS);
        assert!(!loops.has(b"round", start + PERIOD));
    }

    #[test]
    fn what_is_meant_for_the_link_stays() {
        let to = |dst: &str| Flow {
            src: dst.parse().unwrap(),
            dst: dst.parse().unwrap(),
            protocol: 17,
            ports: None,
        };
        for dst in ["10.2.0.1", "192.0.2.1", "fd00::1", "2001:db8::1"] {
            assert!(Clear::may_pass(&to(dst)), "{dst}");
        }
        for dst in [
            "224.0.0.1",
            "255.255.255.255",
            "169.254.0.1",
            "127.0.0.1",
            "ff02::2",
            "fe80::1",
            "::1",
        ] {
            assert!(!Clear::may_pass(&to(dst)), "{dst}");
        }
    }
}
