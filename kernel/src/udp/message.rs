// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `sendmsg` and `recvmsg` with the control messages that choose and tell addresses, and batches.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::RawFd;

use socket2::SockAddr;

use super::{NON_ESP_MARKER, Outgoing};

/// `linux/udp.h`.
const UDP_SEGMENT: libc::c_int = 103;
const UDP_GRO: libc::c_int = 104;

/// Where a received batch came from and how to take it apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceivedMeta {
    /// Octets received.
    pub(crate) len: usize,
    /// Octets of each datagram but the last; equals `len` for a single one.
    pub(crate) segment: usize,
    /// Destination.
    pub(crate) local: SocketAddr,
    /// Source.
    pub(crate) remote: SocketAddr,
    /// The traffic class octet of the IP header: DSCP and ECN.
    pub(crate) tos: u8,
}

impl ReceivedMeta {
    /// The datagrams in `buffer`. One that is empty yields one empty datagram.
    pub(crate) fn split<'a>(&self, buffer: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let filled = buffer.get(..self.len).unwrap_or(buffer);
        let empty = filled.is_empty().then_some(filled);
        filled.chunks(self.segment.max(1)).chain(empty)
    }
}

/// Datagrams of equal size (the last may be shorter) that one system call sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendGroup<'a> {
    /// Own address.
    pub(crate) local: Option<IpAddr>,
    /// Destination.
    pub(crate) remote: SocketAddr,
    /// The datagrams, one after the other.
    pub(crate) data: &'a [u8],
    /// Size of each; not below `data.len()` for a single datagram.
    pub(crate) segment: usize,
    /// The whole traffic class octet: DSCP and ECN.
    pub(crate) tos: u8,
}

/// Sends one datagram.
pub(super) fn send(fd: RawFd, out: &Outgoing<'_>) -> io::Result<()> {
    let mut control = Control::new();
    control.push_source(out.local, out.remote);
    control.push_tos((out.dscp & 0x3f) << 2, out.remote);
    let marker: &[u8] = if out.marker { &NON_ESP_MARKER } else { &[] };
    send_parts(fd, out.remote, [marker, out.payload], &control)
}

/// Sends a group of datagrams in one call.
pub(crate) fn send_group(fd: RawFd, group: &SendGroup<'_>) -> io::Result<()> {
    let mut control = Control::new();
    control.push_source(group.local, group.remote);
    control.push_tos(group.tos, group.remote);
    if group.segment < group.data.len() {
        let segment = u16::try_from(group.segment).unwrap_or(u16::MAX);
        control.push(libc::IPPROTO_UDP, UDP_SEGMENT, &segment.to_ne_bytes());
    }
    send_parts(fd, group.remote, [group.data, &[]], &control)
}

fn send_parts(
    fd: RawFd,
    remote: SocketAddr,
    parts: [&[u8]; 2],
    control: &Control,
) -> io::Result<()> {
    let address = SockAddr::from(remote);
    let mut iov = parts.map(|part| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    });
    // SAFETY: msghdr is plain data for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_name = address.as_ptr().cast_mut().cast();
    header.msg_namelen = address.len();
    header.msg_iov = iov.as_mut_ptr();
    header.msg_iovlen = iov.len() as _;
    if control.len > 0 {
        header.msg_control = control.octets.as_ptr().cast_mut().cast();
        header.msg_controllen = control.len as _;
    }
    // SAFETY: every pointer in `header` names memory that lives to the end of this function, and
    // sendmsg writes to none of it.
    let sent = unsafe { libc::sendmsg(fd, &raw const header, libc::MSG_DONTWAIT) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Receives what one call yields without waiting. `port` is the local port, which the kernel does
/// not tell again.
pub(crate) fn receive(fd: RawFd, buffer: &mut [u8], port: u16) -> io::Result<ReceivedMeta> {
    let mut control = Control::new();
    let mut name = MaybeUninit::<libc::sockaddr_storage>::zeroed();
    let mut iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: msghdr is plain data for which all zeroes is a valid value.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_name = name.as_mut_ptr().cast();
    header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.octets.as_mut_ptr().cast();
    header.msg_controllen = control.octets.len() as _;
    // SAFETY: every pointer in `header` names writable memory of the given length that lives to
    // the end of this function.
    let received = unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_DONTWAIT) };
    let Ok(len) = usize::try_from(received) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: zeroed before the call, and plain data; the kernel filled what it names.
    let name = unsafe { name.assume_init() };
    let remote = socket_address(&name)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "address family of sender"))?;
    let mut meta = ReceivedMeta {
        len,
        segment: len,
        local: match remote {
            SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port),
            SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
        },
        remote,
        tos: 0,
    };
    // SAFETY: the kernel left well-formed control messages within msg_controllen.
    let mut cursor = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !cursor.is_null() {
        // SAFETY: not null, so it names a complete header inside `control`.
        let (level, kind, data) = unsafe {
            (
                (*cursor).cmsg_level,
                (*cursor).cmsg_type,
                libc::CMSG_DATA(cursor),
            )
        };
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: the kernel stores an in_pktinfo under this type; alignment is not
                // guaranteed, hence the unaligned read.
                let info = unsafe { data.cast::<libc::in_pktinfo>().read_unaligned() };
                let addr = Ipv4Addr::from_bits(u32::from_be(info.ipi_addr.s_addr));
                meta.local.set_ip(addr.into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: as above, with in6_pktinfo.
                let info = unsafe { data.cast::<libc::in6_pktinfo>().read_unaligned() };
                meta.local
                    .set_ip(Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                // SAFETY: the kernel stores one octet under this type.
                meta.tos = unsafe { data.read() };
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                // SAFETY: the kernel stores an int under this type.
                meta.tos = unsafe { data.cast::<libc::c_int>().read_unaligned() } as u8;
            }
            (libc::IPPROTO_UDP, UDP_GRO) => {
                // SAFETY: the kernel stores an int under this type.
                let segment = unsafe { data.cast::<libc::c_int>().read_unaligned() };
                if let Ok(segment) = usize::try_from(segment)
                    && segment > 0
                {
                    meta.segment = segment;
                }
            }
            _ => {}
        }
        // SAFETY: `cursor` is a header of this message.
        cursor = unsafe { libc::CMSG_NXTHDR(&raw const header, cursor) };
    }
    Ok(meta)
}

/// Room for the control messages of one call, aligned as `cmsghdr` must be.
#[repr(C, align(8))]
struct Control {
    octets: [u8; 160],
    len: usize,
}

impl Control {
    const fn new() -> Self {
        Self {
            octets: [0; 160],
            len: 0,
        }
    }

    fn push_source(&mut self, local: Option<IpAddr>, remote: SocketAddr) {
        match (local, remote) {
            (Some(IpAddr::V4(addr)), SocketAddr::V4(_)) if !addr.is_unspecified() => {
                // interface index, source, unused destination
                let mut info = [0; 12];
                info[4..8].copy_from_slice(&addr.octets());
                self.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
            }
            (Some(IpAddr::V6(addr)), SocketAddr::V6(to)) if !addr.is_unspecified() => {
                let mut info = [0; 20];
                info[..16].copy_from_slice(&addr.octets());
                info[16..].copy_from_slice(&to.scope_id().to_ne_bytes());
                self.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
            _ => {}
        }
    }

    fn push_tos(&mut self, tos: u8, remote: SocketAddr) {
        if tos == 0 {
            return;
        }
        let value = i32::from(tos).to_ne_bytes();
        match remote {
            SocketAddr::V4(_) => self.push(libc::IPPROTO_IP, libc::IP_TOS, &value),
            SocketAddr::V6(_) => self.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &value),
        }
    }

    fn push(&mut self, level: libc::c_int, kind: libc::c_int, data: &[u8]) {
        let len = data.len() as libc::c_uint;
        // SAFETY: pure arithmetic on a length.
        let (space, total) = unsafe { (libc::CMSG_SPACE(len), libc::CMSG_LEN(len)) };
        let end = self.len + space as usize;
        assert!(
            end <= self.octets.len(),
            "room is reckoned for all control messages of a call"
        );
        // SAFETY: `octets` is aligned to 8 and CMSG_SPACE keeps each next header aligned; the
        // assertion above keeps header and data inside `octets`.
        unsafe {
            let header = self
                .octets
                .as_mut_ptr()
                .add(self.len)
                .cast::<libc::cmsghdr>();
            (*header).cmsg_level = level;
            (*header).cmsg_type = kind;
            (*header).cmsg_len = total as _;
            std::ptr::copy_nonoverlapping(data.as_ptr(), libc::CMSG_DATA(header), data.len());
        }
        self.len = end;
    }
}

fn socket_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that this is a sockaddr_in, which fits in the storage.
            let v4 = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let addr = Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::new(addr.into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: likewise for sockaddr_in6.
            let v6 = unsafe { &*std::ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            Some(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(v6.sin6_addr.s6_addr),
                u16::from_be(v6.sin6_port),
                u32::from_be(v6.sin6_flowinfo),
                v6.sin6_scope_id,
            )))
        }
        _ => None,
    }
}
