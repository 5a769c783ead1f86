// SPDX-License-Identifier: Apache-2.0 OR MIT
//! UDP sockets for IKE and for ESP in UDP (RFC 7296 section 2.23, RFC 3948).
//!
//! An [`IkeSocket`] is one port on IPv4 and IPv6. It tells to which local address a datagram was
//! sent, sends from a chosen one, and can carry the socket options that each data plane needs:
//! a mark by which our own packets escape the policy routes, the kernel's UDP decapsulation, or
//! per-socket IPsec bypass policies.
//!
//! A socket registers with the runtime only when [`IkeSocket::recv`] is first awaited. A socket
//! that the TUN plane reads from its own thread therefore wakes nobody else.

mod message;
mod options;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;

pub(crate) use message::{ReceivedMeta, SendGroup, receive, send_group};

/// The four zero octets that tell IKE from ESP on the NAT traversal port (RFC 3948 section 2.2).
pub const NON_ESP_MARKER: [u8; 4] = [0; 4];

/// Datagrams that one wake-up may queue before the reader gets its turn.
const RECEIVE_BURST: usize = 64;

/// How to set up a socket.
#[derive(Clone, Debug)]
pub struct SocketOptions {
    /// Mark on every packet sent (`SO_MARK`), so that routing rules can tell them apart.
    pub mark: Option<u32>,
    /// Let the kernel decapsulate ESP in UDP (`UDP_ENCAP`); for the XFRM plane's NAT-T port.
    pub decapsulate: bool,
    /// Exempt this socket from IPsec policies (`IP_XFRM_POLICY`), both directions.
    pub bypass: bool,
    /// Receive batches of equal datagrams at once (`UDP_GRO`). Both readers split them.
    pub gro: bool,
    /// Receive buffer in octets, beyond the host's limit if privileges allow. 0 keeps the default.
    pub receive_buffer: usize,
    /// Send buffer in octets. 0 keeps the default.
    pub send_buffer: usize,
    /// Bind this network device only (`SO_BINDTODEVICE`).
    pub device: Option<String>,
}

impl SocketOptions {
    /// What the TUN plane's NAT-T socket wants: batches, room for some of them, and `mark` by which
    /// its own packets escape the routes into the tunnels.
    pub fn for_tun_plane(mark: u32) -> Self {
        Self {
            mark: Some(mark),
            gro: true,
            receive_buffer: 4 << 20,
            send_buffer: 1 << 20,
            ..Self::default()
        }
    }
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self {
            mark: None,
            decapsulate: false,
            bypass: false,
            gro: false,
            receive_buffer: 1 << 20,
            send_buffer: 0,
            device: None,
        }
    }
}

/// A datagram that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Own address and port that it was sent to.
    pub local: SocketAddr,
    /// The sender.
    pub remote: SocketAddr,
    /// UDP payload, a non-ESP marker still in front if the sender put one there.
    pub payload: Bytes,
}

/// A datagram to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing<'a> {
    /// Own address to send from; `None` leaves it to routing.
    pub local: Option<IpAddr>,
    /// Where to.
    pub remote: SocketAddr,
    /// Payload without marker.
    pub payload: &'a [u8],
    /// Differentiated services code point, 0 to 63.
    pub dscp: u8,
    /// Whether the non-ESP marker goes in front: IKE on the NAT traversal port.
    pub marker: bool,
}

/// What a datagram on the NAT traversal port is (RFC 3948 section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NatTraversal<'a> {
    /// One octet 0xff that keeps a NAT mapping alive.
    Keepalive,
    /// An IKE message, marker removed.
    Ike(&'a [u8]),
    /// An ESP packet.
    Esp(&'a [u8]),
    /// Too short for any of them.
    Malformed,
}

impl<'a> NatTraversal<'a> {
    /// Tells what `payload` is, by its first four octets.
    pub fn classify(payload: &'a [u8]) -> Self {
        match payload {
            [0xff] => Self::Keepalive,
            [0, 0, 0, 0, ike @ ..] => Self::Ike(ike),
            // SPI, sequence number, and at least one octet.
            esp if esp.len() > 8 => Self::Esp(esp),
            _ => Self::Malformed,
        }
    }
}

/// One UDP port on IPv4 and, where the host has it, IPv6.
#[derive(Debug)]
pub struct IkeSocket {
    v4: Option<Leg>,
    v6: Option<Leg>,
    port: u16,
    queue: Mutex<VecDeque<Received>>,
}

impl IkeSocket {
    /// Binds `port` (0: the system picks one) on `addr`, or on every address of both families.
    ///
    /// # Errors
    /// Those of the system calls, with the failing step named. A host without IPv6 is no error
    /// unless `addr` is an IPv6 address.
    pub fn bind(addr: Option<IpAddr>, port: u16, options: &SocketOptions) -> io::Result<Self> {
        let (v4, v6) = match addr {
            Some(addr @ IpAddr::V4(_)) => (Some(Leg::bind(addr, port, options)?), None),
            Some(addr @ IpAddr::V6(_)) => (None, Some(Leg::bind(addr, port, options)?)),
            None => {
                let v4 = Leg::bind(Ipv4Addr::UNSPECIFIED.into(), port, options)?;
                let v6 = match Leg::bind(Ipv6Addr::UNSPECIFIED.into(), v4.port, options) {
                    Ok(leg) => Some(leg),
                    Err(error) if lacks_ipv6(&error) => None,
                    Err(error) => return Err(error),
                };
                (Some(v4), v6)
            }
        };
        let port = v4.as_ref().or(v6.as_ref()).map_or(port, |leg| leg.port);
        Ok(Self {
            v4,
            v6,
            port,
            queue: Mutex::default(),
        })
    }

    /// The bound port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The next datagram. Cancel safe.
    ///
    /// # Errors
    /// Those of `recvmsg`. An error concerns one attempt; the socket stays usable.
    ///
    /// # Panics
    /// Outside of a runtime with I/O enabled.
    pub async fn recv(&self) -> io::Result<Received> {
        loop {
            if let Some(received) = self.queued() {
                return Ok(received);
            }
            match (&self.v4, &self.v6) {
                (Some(v4), Some(v6)) => tokio::select! {
                    filled = v4.fill(&self.queue) => filled?,
                    filled = v6.fill(&self.queue) => filled?,
                },
                (Some(leg), None) | (None, Some(leg)) => leg.fill(&self.queue).await?,
                (None, None) => return Err(io::Error::from(io::ErrorKind::NotConnected)),
            }
        }
    }

    /// Sends one datagram without waiting.
    ///
    /// # Errors
    /// Those of `sendmsg`; `WouldBlock` if the send buffer is full (the caller's protocol
    /// retransmits), `AddrNotAvailable` if no socket of that family is open.
    pub fn send(&self, out: &Outgoing<'_>) -> io::Result<()> {
        let fd = self.fd_for(out.remote.ip())?;
        message::send(fd, out)
    }

    /// Sends a NAT keepalive (RFC 3948 section 2.3).
    ///
    /// # Errors
    /// As [`IkeSocket::send`].
    pub fn send_keepalive(
        &self,
        local: Option<IpAddr>,
        remote: SocketAddr,
        dscp: u8,
    ) -> io::Result<()> {
        self.send(&Outgoing {
            local,
            remote,
            payload: &[0xff],
            dscp,
            marker: false,
        })
    }

    /// The descriptors, for a thread that reads them itself: port-sharing legs, IPv4 first.
    pub(crate) fn legs(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.v4.iter().chain(&self.v6).map(|leg| leg.fd())
    }

    /// The descriptor that sends to `remote`.
    pub(crate) fn fd_for(&self, remote: IpAddr) -> io::Result<RawFd> {
        let leg = if remote.is_ipv4() { &self.v4 } else { &self.v6 };
        leg.as_ref()
            .map(Leg::fd)
            .ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))
    }

    fn queued(&self) -> Option<Received> {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    }
}

/// The socket of one address family.
#[derive(Debug)]
struct Leg {
    socket: Socket,
    port: u16,
    /// A second descriptor of the socket, registered with the runtime of the first reader.
    registered: OnceLock<UdpSocket>,
}

impl Leg {
    fn bind(addr: IpAddr, port: u16, options: &SocketOptions) -> io::Result<Self> {
        let step = |what: &str, error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("{what} for UDP {}: {error}", SocketAddr::new(addr, port)),
            )
        };
        let domain = if addr.is_ipv4() {
            Domain::IPV4
        } else {
            Domain::IPV6
        };
        // The socket error passes unchanged: its errno tells a host without IPv6.
        let socket = Socket::new(domain, Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        if addr.is_ipv6() {
            socket
                .set_only_v6(true)
                .map_err(|e| step("IPV6_V6ONLY", e))?;
        }
        if let Some(device) = &options.device {
            socket
                .bind_device(Some(device.as_bytes()))
                .map_err(|e| step("SO_BINDTODEVICE", e))?;
        }
        if let Some(mark) = options.mark {
            socket.set_mark(mark).map_err(|e| step("SO_MARK", e))?;
        }
        let fd = socket.as_raw_fd();
        options::receive_details(fd, domain).map_err(|e| step("IP_PKTINFO", e))?;
        options::fragment_if_needed(fd, domain).map_err(|e| step("IP_MTU_DISCOVER", e))?;
        options::buffers(fd, options.receive_buffer, options.send_buffer)
            .map_err(|e| step("SO_RCVBUF", e))?;
        if options.bypass {
            options::bypass_policies(fd, domain).map_err(|e| step("IP_XFRM_POLICY", e))?;
        }
        if options.decapsulate {
            options::decapsulate_esp(fd).map_err(|e| step("UDP_ENCAP", e))?;
        }
        if options.gro {
            // Kernels before 5.0 lack it; the readers cope with single datagrams.
            let _ = options::coalesce(fd);
        }
        socket
            .bind(&SocketAddr::new(addr, port).into())
            .map_err(|e| {
                // Kept as the raw error where the family is the problem.
                if lacks_ipv6(&e) { e } else { step("bind", e) }
            })?;
        let port = socket
            .local_addr()?
            .as_socket()
            .map_or(port, |bound| bound.port());
        Ok(Self {
            socket,
            port,
            registered: OnceLock::new(),
        })
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Waits until something arrived and queues what is there.
    async fn fill(&self, queue: &Mutex<VecDeque<Received>>) -> io::Result<()> {
        let registered = self.register()?;
        loop {
            registered.readable().await?;
            let mut buffer = vec![0; usize::from(u16::MAX)];
            let mut queued = 0;
            while queued < RECEIVE_BURST {
                let one = || receive(self.fd(), &mut buffer, self.port);
                let meta = match registered.try_io(Interest::READABLE, one) {
                    Ok(meta) => meta,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                };
                let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                for datagram in meta.split(&buffer) {
                    queue.push_back(Received {
                        local: meta.local,
                        remote: meta.remote,
                        payload: Bytes::copy_from_slice(datagram),
                    });
                    queued += 1;
                }
            }
            if queued > 0 {
                return Ok(());
            }
        }
    }

    fn register(&self) -> io::Result<&UdpSocket> {
        if let Some(registered) = self.registered.get() {
            return Ok(registered);
        }
        let registered = UdpSocket::from_std(self.socket.try_clone()?.into())?;
        // Of two racing first readers one registration is dropped, which undoes it.
        Ok(self.registered.get_or_init(|| registered))
    }
}

/// Whether a datagram was refused for its length, which a path of the host's does not carry.
pub fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

fn lacks_ipv6(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT)
    )
}

#[cfg(test)]
mod tests;
