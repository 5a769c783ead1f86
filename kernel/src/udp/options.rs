// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Socket options that the standard wrappers lack.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use socket2::Domain;

/// `linux/udp.h`.
const UDP_ENCAP: libc::c_int = 100;
const UDP_GRO: libc::c_int = 104;
const UDP_ENCAP_ESPINUDP: libc::c_int = 2;
/// `linux/in.h` and `linux/in6.h`.
const IP_XFRM_POLICY: libc::c_int = 17;
const IPV6_XFRM_POLICY: libc::c_int = 35;

/// Asks for the destination address and the traffic class of each datagram.
pub(super) fn receive_details(fd: RawFd, domain: Domain) -> io::Result<()> {
    if domain == Domain::IPV4 {
        set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, &1i32)?;
        set(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, &1i32)
    } else {
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, &1i32)?;
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, &1i32)
    }
}

/// Lets routers fragment what is too long for a path: IKE has no use for a refused datagram.
pub(super) fn fragment_if_needed(fd: RawFd, domain: Domain) -> io::Result<()> {
    if domain == Domain::IPV4 {
        set(
            fd,
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            &libc::IP_PMTUDISC_DONT,
        )
    } else {
        set(
            fd,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            &libc::IPV6_PMTUDISC_DONT,
        )
    }
}

/// Sets buffer sizes, past the host's limits if this process may.
pub(super) fn buffers(fd: RawFd, receive: usize, send: usize) -> io::Result<()> {
    for (size, forced, plain) in [
        (receive, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        (send, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        if size == 0 {
            continue;
        }
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        if set(fd, libc::SOL_SOCKET, forced, &size).is_err() {
            set(fd, libc::SOL_SOCKET, plain, &size)?;
        }
    }
    Ok(())
}

/// Hands ESP in UDP to the kernel's ESP.
pub(super) fn decapsulate_esp(fd: RawFd) -> io::Result<()> {
    set(fd, libc::IPPROTO_UDP, UDP_ENCAP, &UDP_ENCAP_ESPINUDP)
}

/// Delivers runs of equal datagrams of one sender as one.
pub(super) fn coalesce(fd: RawFd) -> io::Result<()> {
    set(fd, libc::IPPROTO_UDP, UDP_GRO, &1i32)
}

/// Installs per-socket policies that let everything pass in clear.
pub(super) fn bypass_policies(fd: RawFd, domain: Domain) -> io::Result<()> {
    let (level, name, family) = if domain == Domain::IPV4 {
        (libc::IPPROTO_IP, IP_XFRM_POLICY, libc::AF_INET)
    } else {
        (libc::IPPROTO_IPV6, IPV6_XFRM_POLICY, libc::AF_INET6)
    };
    for direction in [XFRM_POLICY_IN, XFRM_POLICY_OUT] {
        let policy = XfrmUserpolicyInfo {
            family: family as u16,
            dir: direction,
            ..XfrmUserpolicyInfo::default()
        };
        set(fd, level, name, &policy)?;
    }
    Ok(())
}

const XFRM_POLICY_IN: u8 = 0;
const XFRM_POLICY_OUT: u8 = 1;

/// `struct xfrm_userpolicy_info` of `linux/xfrm.h`, its nested structures flattened. The default
/// selects everything, has no limits (0 means none in a socket policy) and allows
/// (`XFRM_POLICY_ALLOW` is 0).
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct XfrmUserpolicyInfo {
    destination: [u32; 4],
    source: [u32; 4],
    destination_port: u16,
    destination_port_mask: u16,
    source_port: u16,
    source_port_mask: u16,
    family: u16,
    destination_prefix: u8,
    source_prefix: u8,
    protocol: u8,
    selector_padding: [u8; 3],
    interface: i32,
    user: u32,
    limits: [u64; 8],
    current: [u64; 4],
    priority: u32,
    index: u32,
    dir: u8,
    action: u8,
    flags: u8,
    share: u8,
}

/// Sets one option. `T` must be the C type of the option, without uninitialised padding that the
/// kernel would read.
fn set<T: Copy>(fd: RawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` is valid for reads of its own size for the whole call; the kernel copies it.
    let status = unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_has_the_size_that_the_kernel_checks() {
        assert_eq!(size_of::<XfrmUserpolicyInfo>(), 168);
        assert_eq!(std::mem::offset_of!(XfrmUserpolicyInfo, limits), 56);
        assert_eq!(std::mem::offset_of!(XfrmUserpolicyInfo, dir), 160);
    }
}
