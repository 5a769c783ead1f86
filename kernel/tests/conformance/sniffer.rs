// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sees every packet that arrives at a host's interface.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use super::bench::inner;
use super::packet::{Esp, Ip};

/// What arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The outer packet.
    pub(crate) outer: Ip,
    /// What it is.
    pub(crate) kind: Kind,
}

#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// ESP in UDP, with the packet inside.
    Esp(Esp, Ip),
    /// Something between the protected networks, unprotected.
    Clear,
}

impl Seen {
    /// SPI and inner packet.
    pub(crate) fn protected(self) -> (Esp, Ip) {
        match self.kind {
            Kind::Esp(esp, ip) => (esp, ip),
            Kind::Clear => panic!("in clear: {:?}", self.outer),
        }
    }
}

/// A packet socket.
pub(crate) struct Sniffer(OwnedFd);

impl Sniffer {
    /// Listens to `interface` of the namespace that this thread is in.
    #[allow(unsafe_code)]
    pub(crate) fn open(interface: &str) -> io::Result<Self> {
        let protocol = (libc::ETH_P_IP as u16).to_be();
        // SAFETY: no memory is passed.
        let fd = unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                protocol.into(),
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let name = std::ffi::CString::new(interface)?;
        // SAFETY: sockaddr_ll is plain data for which all zeroes is a valid value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        // SAFETY: `name` is a terminated string that lives through the call.
        address.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) } as i32;
        // SAFETY: `address` is a sockaddr_ll of the given length that lives through the call.
        let status = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(fd))
    }

    /// The next packet of interest from the other host, or `None` if none comes in time.
    pub(crate) async fn next(&self, patience: Duration) -> Option<Seen> {
        let end = Instant::now() + patience;
        loop {
            while let Some(packet) = self.receive() {
                if let Some(seen) = classify(&packet) {
                    return Some(seen);
                }
            }
            if Instant::now() >= end {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[allow(unsafe_code)]
    fn receive(&self) -> Option<Vec<u8>> {
        loop {
            let mut buffer = vec![0; 70_000];
            // SAFETY: sockaddr_ll is plain data for which all zeroes is a valid value.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            // SAFETY: buffer and address are writable for the lengths given.
            let received = unsafe {
                libc::recvfrom(
                    self.0.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                    (&raw mut from).cast(),
                    &raw mut length,
                )
            };
            buffer.truncate(usize::try_from(received).ok()?);
            if from.sll_pkttype != libc::PACKET_OUTGOING {
                return Some(buffer);
            }
        }
    }
}

fn classify(packet: &[u8]) -> Option<Seen> {
    let outer_packet = Ip::parse(packet)?;
    if let Some((.., data)) = outer_packet.udp()
        && let Some(esp) = Esp::open(data)
    {
        let inside = Ip::parse(&esp.payload)?;
        return Some(Seen {
            outer: outer_packet,
            kind: Kind::Esp(esp, inside),
        });
    }
    let between = [outer_packet.src, outer_packet.dst]
        .iter()
        .any(|addr| addr.octets()[..2] == inner(1).octets()[..2]);
    between.then_some(Seen {
        outer: outer_packet,
        kind: Kind::Clear,
    })
}
