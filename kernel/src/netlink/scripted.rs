// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A requester whose kernel is a test, and what the kernel may do to it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};

use netlink_sys::Socket;
use tokio::io::unix::AsyncFd;

use super::{HEADER, Requester, Source};

/// The port number of the first socket; later ones have the next numbers.
pub(super) const FIRST_PORT: u32 = 77;

/// Hands out sockets that were made beforehand, and errors instead of datagrams.
#[derive(Debug)]
pub(super) struct Script {
    sockets: VecDeque<UnixDatagram>,
    port: u32,
    faults: Arc<Mutex<VecDeque<Option<i32>>>>,
}

impl Script {
    #[allow(unsafe_code)]
    pub(super) fn open(&mut self) -> io::Result<(AsyncFd<Socket>, u32)> {
        let socket = self
            .sockets
            .pop_front()
            .ok_or(io::ErrorKind::NotConnected)?;
        socket.set_nonblocking(true)?;
        let descriptor = OwnedFd::from(socket).into_raw_fd();
        // SAFETY: the descriptor was just given up by its owner.
        let socket = unsafe { Socket::from_raw_fd(descriptor) };
        self.port += 1;
        // SAFETY: `Socket` owns its descriptor and gives the same one until it is dropped.
        let socket = unsafe { AsyncFd::register(socket) }.map_err(|error| error.into_parts().1)?;
        Ok((socket, self.port - 1))
    }

    pub(super) fn fault(&mut self) -> io::Result<()> {
        match self.faults.lock().unwrap().pop_front().flatten() {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}

/// The kernel's side.
pub(super) struct Kernel {
    /// One for each time that the requester opens a socket.
    pub(super) sockets: Vec<UnixDatagram>,
    /// What each reading of a datagram meets: an error, or nothing in its way.
    pub(super) faults: Arc<Mutex<VecDeque<Option<i32>>>>,
}

impl Kernel {
    /// Sequence and port number of the next request on a socket.
    pub(super) fn request(&self, socket: usize) -> (u32, u32) {
        let mut buffer = vec![0; 64 * 1024];
        let length = self.sockets[socket].recv(&mut buffer).unwrap();
        let frame = super::frames(&buffer[..length]).next().unwrap();
        (frame.sequence, frame.port)
    }

    pub(super) fn answer(&self, socket: usize, datagram: &[u8]) {
        self.sockets[socket].send(datagram).unwrap();
    }
}

/// A requester that may open so many sockets.
pub(super) fn requester(sequence: u32, sockets: usize) -> (Requester, Kernel) {
    let mut ours = VecDeque::new();
    let mut kernels = Vec::new();
    for _ in 0..sockets {
        let (one, other) = UnixDatagram::pair().unwrap();
        ours.push_back(one);
        kernels.push(other);
    }
    let faults = Arc::default();
    let script = Script {
        sockets: ours,
        port: FIRST_PORT,
        faults: Arc::clone(&faults),
    };
    let requester = Requester::from_source(Source::Script(script), sequence).unwrap();
    let kernel = Kernel {
        sockets: kernels,
        faults,
    };
    (requester, kernel)
}

/// A requester with one socket.
pub(super) fn scripted(sequence: u32) -> (Requester, UnixDatagram) {
    let (requester, mut kernel) = requester(sequence, 1);
    (requester, kernel.sockets.remove(0))
}

pub(super) fn frame(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + payload.len()).unwrap();
    let mut octets = length.to_ne_bytes().to_vec();
    octets.extend(kind.to_ne_bytes());
    octets.extend(flags.to_ne_bytes());
    octets.extend(sequence.to_ne_bytes());
    octets.extend([0; 4]);
    octets.extend(payload);
    octets.resize(octets.len().next_multiple_of(4), 0);
    octets
}

/// An acknowledgement, or a refusal.
pub(super) fn verdict(sequence: u32, errno: i32) -> Vec<u8> {
    let mut payload = (-errno).to_ne_bytes().to_vec();
    payload.extend([0; HEADER]);
    frame(libc::NLMSG_ERROR as u16, 0, sequence, &payload)
}
