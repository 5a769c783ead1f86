// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The TUN device: one descriptor per queue, packets with offload headers.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicU32, Ordering};

/// `linux/if_tun.h`.
const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETOFFLOAD: u32 = 0x4004_54d0;
const TUNGETIFF: u32 = 0x4004_54d2;
const IFF_TUN: u16 = 0x0001;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;

/// On MIPS, PowerPC and SPARC the direction bits of ioctl numbers differ.
const IOW: u32 = if cfg!(any(
    target_arch = "mips",
    target_arch = "mips64",
    target_arch = "powerpc",
    target_arch = "powerpc64"
)) {
    0x8000_0000
} else {
    0x4000_0000
};
/// There too.
const IOR: u32 = 0xc000_0000 ^ IOW;

/// An open TUN device, gone when the last queue closes.
#[derive(Debug)]
pub(super) struct Device {
    queues: Vec<File>,
    /// Who waits for a queue that now leads to another device learns it here.
    renewals: Vec<Waker>,
    name: String,
    index: AtomicU32,
    joins_udp: bool,
}

impl Device {
    /// Creates the device. A `%d` in `name` becomes the first free number.
    pub(super) fn create(name: &str, queues: usize) -> io::Result<Self> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0']) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name:?} is not a device name"),
            ));
        }
        let multi = if queues > 1 { IFF_MULTI_QUEUE } else { 0 };
        let flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR | multi;
        let mut device = Self {
            queues: Vec::new(),
            renewals: Vec::new(),
            name: name.to_owned(),
            index: AtomicU32::new(0),
            joins_udp: false,
        };
        for _ in 0..queues.max(1) {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
                .open("/dev/net/tun")
                .map_err(|e| io::Error::new(e.kind(), format!("/dev/net/tun: {e}")))?;
            device.name = attach(file.as_raw_fd(), &device.name, flags)
                .map_err(|e| io::Error::new(e.kind(), format!("TUN device {name}: {e}")))?;
            device.joins_udp = enable_offloads(file.as_raw_fd())?;
            device.queues.push(file);
            device.renewals.push(Waker::new()?);
        }
        device.index = AtomicU32::new(index_of(&device.name)?);
        Ok(device)
    }

    /// The name that it got.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its interface index.
    pub(super) fn index(&self) -> u32 {
        self.index.load(Ordering::Relaxed)
    }

    /// Whether nobody has deleted it.
    pub(super) fn is_there(&self) -> bool {
        // SAFETY: ifreq is plain data for which all zeroes is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let number = TUNGETIFF & 0x3fff_ffff | IOR;
        // SAFETY: TUNGETIFF writes an ifreq, which `request` is.
        unsafe { libc::ioctl(self.fd(0), number as _, &raw mut request) == 0 }
    }

    /// Creates the device anew, as it was, and leads all descriptors to the new one. What is left
    /// of the old one goes once nobody waits for it any more.
    pub(super) fn renew(&self) -> io::Result<()> {
        let new = Self::create(&self.name, self.queues())?;
        for (old, new) in self.queues.iter().zip(&new.queues) {
            lead_to(old, new)?;
        }
        self.index.store(new.index(), Ordering::Relaxed);
        // A poll that has begun waits for what its descriptors named then.
        for waiting in &self.renewals {
            waiting.wake();
        }
        Ok(())
    }

    /// Becomes readable when the queue leads to another device.
    pub(super) fn renewal(&self, queue: usize) -> &Waker {
        &self.renewals[queue]
    }

    /// Whether it takes and gives runs of UDP datagrams (Linux 6.2).
    pub(super) fn joins_udp(&self) -> bool {
        self.joins_udp
    }

    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    pub(super) fn fd(&self, queue: usize) -> RawFd {
        self.queues[queue].as_raw_fd()
    }

    /// Removes the device. Its descriptors lead nowhere from then on. Nobody may wait for it.
    pub(super) fn close(&self) -> io::Result<()> {
        let nowhere = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        for queue in &self.queues {
            lead_to(queue, &nowhere)?;
        }
        Ok(())
    }

    /// Reads one packet with its offload header; `WouldBlock` if there is none.
    pub(super) fn read(&self, queue: usize, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.queues[queue]).read(buffer)
    }

    /// Writes one packet, offload header first.
    pub(super) fn write(&self, queue: usize, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        (&self.queues[queue]).write_vectored(parts)
    }
}

/// Lets the descriptor of one file name another one.
fn lead_to(file: &File, other: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open and ours. The one that is replaced stays valid for its
    // owner; what it named is closed.
    let status = unsafe { libc::dup3(other.as_raw_fd(), file.as_raw_fd(), libc::O_CLOEXEC) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn attach(fd: RawFd, name: &str, flags: u16) -> io::Result<String> {
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    let number = TUNSETIFF & 0x3fff_ffff | IOW;
    // SAFETY: TUNSETIFF reads and writes an ifreq, which `request` is.
    let status = unsafe { libc::ioctl(fd, number as _, &raw mut request) };
    if status < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(request
        .ifr_name
        .iter()
        .take_while(|octet| **octet != 0)
        .map(|octet| char::from(*octet as u8))
        .collect())
}

/// Asks for checksum and segmentation offload. Whether UDP is among it depends on the kernel.
fn enable_offloads(fd: RawFd) -> io::Result<bool> {
    let tcp = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    let number = TUNSETOFFLOAD & 0x3fff_ffff | IOW;
    for (offloads, udp) in [(tcp | TUN_F_USO4 | TUN_F_USO6, true), (tcp, false)] {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        if unsafe { libc::ioctl(fd, number as _, offloads) } == 0 {
            return Ok(udp);
        }
    }
    Err(io::Error::last_os_error())
}

fn index_of(name: &str) -> io::Result<u32> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: `name` is a terminated string that lives through the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// Wakes threads that wait in [`wait`], for good or until it is silenced.
#[derive(Debug)]
pub(super) struct Waker(File);

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    pub(super) fn wake(&self) {
        // An eventfd stays readable until it is read; a second write changes nothing.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Lets threads wait again.
    pub(super) fn silence(&self) {
        // Refused if nobody was to be woken.
        let _ = (&self.0).read(&mut [0; 8]);
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits until one of `fds` is ready for `events` (`POLLIN`, `POLLOUT`), at most `timeout_ms` if
/// that is not negative. Spurious returns are possible.
pub(super) fn wait<const N: usize>(fds: [RawFd; N], events: libc::c_short, timeout_ms: i32) {
    let mut polled = fds.map(|fd| libc::pollfd {
        fd,
        events,
        revents: 0,
    });
    // SAFETY: `polled` is an array of N pollfd that lives through the call. Negative descriptors
    // are ignored by poll.
    let status = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, timeout_ms) };
    if status < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
        // Only lack of memory is left; do not spin on it.
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
