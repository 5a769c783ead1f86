// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A netlink socket with one request in flight at a time.
//!
//! Requests carry key material and dumps return it, so buffers are erased and nothing here ever
//! prints a message. Refusals keep the kernel's extended-ack text, which names the attribute or
//! algorithm that it did not like; general netlink clients drop it.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkSerializable, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;
use tokio::time::Instant;
use zeroize::{Zeroize as _, Zeroizing};

mod batch;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;

pub(crate) use batch::Request;

/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;
/// The kernel's dumps fill at most this much per read.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// How often a dump that changes under the reader is begun again.
pub(crate) const DUMP_ATTEMPTS: u32 = 8;
/// The kernel answers within the system call; an answer this late was lost.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a netlink request failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket failed.
    #[error("netlink socket: {0}")]
    Io(#[from] io::Error),
    /// The kernel refused.
    #[error("{}", refusal(*.errno, .text.as_deref()))]
    Refused {
        /// The (positive) errno.
        errno: i32,
        /// The extended-ack text, if the kernel gave one.
        text: Option<String>,
    },
    /// The answer did not come or did not parse.
    #[error("netlink: {0}")]
    Protocol(&'static str),
}

impl NetlinkError {
    /// The errno, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io(error) => error.raw_os_error(),
            Self::Refused { errno, .. } => Some(*errno),
            Self::Protocol(_) => None,
        }
    }
}

/// A socket for requests. It never joins a multicast group: echoes of our own changes would be
/// taken for answers.
#[derive(Debug)]
pub(crate) struct Requester {
    state: Mutex<State>,
    port: AtomicU32,
}

#[derive(Debug)]
struct State {
    source: Source,
    socket: AsyncFd<Socket>,
    sequence: u32,
    buffer: Vec<u8>,
    /// An earlier exchange was abandoned half way (its caller went away); its answers may still
    /// arrive, and a half-read dump would make the next one fail.
    unfinished: bool,
}

/// Where sockets come from.
#[derive(Debug)]
enum Source {
    /// The kernel, by netlink family.
    Kernel(isize),
    /// A test that plays the kernel.
    #[cfg(test)]
    Script(scripted::Script),
}

impl Source {
    /// A socket and its port number.
    fn open(&mut self) -> io::Result<(AsyncFd<Socket>, u32)> {
        match self {
            Self::Kernel(protocol) => {
                let socket = open_socket(*protocol)?;
                let port = port_of(&socket)?;
                Ok((socket, port))
            }
            #[cfg(test)]
            Self::Script(script) => script.open(),
        }
    }

    /// An error that a test wants instead of the next datagram.
    fn fault(&mut self) -> io::Result<()> {
        match self {
            Self::Kernel(_) => Ok(()),
            #[cfg(test)]
            Self::Script(script) => script.fault(),
        }
    }
}

impl State {
    /// Readies the socket for an exchange.
    fn begin(&mut self, port: &AtomicU32) -> io::Result<()> {
        if self.unfinished {
            let (socket, number) = self.source.open()?;
            self.socket = socket;
            port.store(number, Ordering::Relaxed);
        }
        self.unfinished = true;
        Ok(())
    }

    async fn send(&self, datagram: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.socket.writable().await?;
            match ready.try_io(|socket| socket.get_ref().send(datagram, 0)) {
                Ok(sent) => return sent.map(|_| ()),
                Err(_would_block) => {}
            }
        }
    }

    /// Receives a datagram into the buffer.
    async fn receive(&mut self, deadline: Instant) -> Result<usize, NetlinkError> {
        self.source.fault()?;
        let received =
            tokio::time::timeout_at(deadline, receive(&self.socket, &mut self.buffer)).await;
        received.map_err(|_| NO_ANSWER)?.map_err(NetlinkError::Io)
    }
}

const NO_ANSWER: NetlinkError = NetlinkError::Protocol("no answer from the kernel");

impl Requester {
    /// Opens a socket of one netlink family, `libc::NETLINK_XFRM` for instance. Needs a tokio
    /// runtime.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        Self::from_source(Source::Kernel(protocol), 0)
    }

    fn from_source(mut source: Source, sequence: u32) -> io::Result<Self> {
        let (socket, port) = source.open()?;
        Ok(Self {
            port: AtomicU32::new(port),
            state: Mutex::new(State {
                source,
                socket,
                sequence,
                buffer: vec![0; RECEIVE_BUFFER],
                unfinished: false,
            }),
        })
    }

    /// The port number that the kernel's copies of our changes carry.
    pub(crate) fn port(&self) -> u32 {
        self.port.load(Ordering::Relaxed)
    }

    /// Sends `message` and collects what `parse` makes of the answers until the acknowledgement.
    /// `flags` are added to REQUEST and ACK.
    pub(crate) async fn request<M, T>(
        &self,
        message: &M,
        flags: u16,
        parse: impl Fn(u16, &[u8]) -> Option<T> + Send + Sync,
    ) -> Result<Vec<T>, NetlinkError>
    where
        M: NetlinkSerializable + Sync,
        T: Send,
    {
        let request = encode(message, NLM_F_REQUEST | NLM_F_ACK | flags);
        self.exchange(request, &parse)
            .await
            .map(|(answers, _)| answers)
    }

    /// Sends `message`, which wants no answer but the acknowledgement.
    pub(crate) async fn command<M: NetlinkSerializable + Sync>(
        &self,
        message: &M,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        self.request(message, flags, |_, _| None::<()>)
            .await
            .map(|_| ())
    }

    /// Dumps a table. A dump that the kernel marks as inconsistent, or whose parts it had to drop,
    /// is begun again.
    pub(crate) async fn dump<M, T>(
        &self,
        message: &M,
        parse: impl Fn(u16, &[u8]) -> Option<T> + Send + Sync,
    ) -> Result<Vec<T>, NetlinkError>
    where
        M: NetlinkSerializable + Sync,
        T: Send,
    {
        for _ in 0..DUMP_ATTEMPTS {
            let request = encode(message, NLM_F_REQUEST | NLM_F_DUMP);
            match self.exchange(request, &parse).await {
                Ok((answers, false)) => return Ok(answers),
                Ok((_, true)) => {}
                Err(error) if error.errno() == Some(libc::ENOBUFS) => {}
                Err(error) => return Err(error),
            }
        }
        Err(NetlinkError::Protocol(
            "the table changed during each attempt to list it",
        ))
    }

    async fn exchange<T: Send>(
        &self,
        mut request: Zeroizing<Vec<u8>>,
        parse: &(impl Fn(u16, &[u8]) -> Option<T> + Send + Sync),
    ) -> Result<(Vec<T>, bool), NetlinkError> {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        state.begin(&self.port)?;
        state.sequence = state.sequence.wrapping_add(1);
        request[8..12].copy_from_slice(&state.sequence.to_ne_bytes());
        request[12..HEADER].copy_from_slice(&self.port().to_ne_bytes());

        state.send(&request).await?;
        drop(request);

        let mut answers = Vec::new();
        let mut interrupted = false;
        let mut deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let received = state.receive(deadline).await?;
            let progress = read_answers(
                &state.buffer[..received],
                state.sequence,
                parse,
                &mut answers,
                &mut interrupted,
            );
            state.buffer[..received].zeroize();
            match progress {
                // Answers to others do not keep this one waiting.
                Progress::Nothing => {}
                Progress::More => deadline = Instant::now() + ANSWER_TIMEOUT,
                Progress::Malformed => {
                    return Err(NetlinkError::Protocol("malformed answer from the kernel"));
                }
                Progress::Done(result) => {
                    state.unfinished = false;
                    result?;
                    return Ok((answers, interrupted));
                }
            }
        }
    }
}

/// Opens a bound, non-blocking socket that reports extended acks.
#[allow(unsafe_code)]
pub(crate) fn open_socket(protocol: isize) -> io::Result<AsyncFd<Socket>> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    // Kernels before 4.12 have neither; texts are then missing, nothing else.
    let _ = socket.set_ext_ack(true);
    let _ = socket.set_cap_ack(true);
    socket.set_non_blocking(true)?;
    // SAFETY: `Socket` owns its descriptor and gives the same one until it is dropped.
    unsafe { AsyncFd::register(socket) }.map_err(|error| error.into_parts().1)
}

/// Asks for room for bursts of events. Without the privilege the system's limit applies.
pub(crate) fn enlarge_buffer(socket: &AsyncFd<Socket>, octets: usize) {
    let forced = rustix::net::sockopt::set_socket_recv_buffer_size_force(socket.get_ref(), octets);
    if forced.is_err() {
        // Overruns are noticed, so that a small buffer costs time only.
        let _ = socket.get_ref().set_rx_buf_sz(octets);
    }
}

fn port_of(socket: &AsyncFd<Socket>) -> io::Result<u32> {
    let mut address = SocketAddr::new(0, 0);
    socket.get_ref().get_address(&mut address)?;
    Ok(address.port_number())
}

/// Receives one datagram. A datagram longer than `buffer` is an error, never silently cut.
pub(crate) async fn receive(socket: &AsyncFd<Socket>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        let mut ready = socket.readable().await?;
        let outcome = ready.try_io(|socket| {
            rustix::net::recv(
                socket.get_ref(),
                &mut *buffer,
                rustix::net::RecvFlags::TRUNC,
            )
            .map_err(io::Error::from)
        });
        match outcome {
            Ok(Ok((filled, full))) if full > filled => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "netlink message longer than the receive buffer",
                ));
            }
            Ok(Ok((filled, _))) => return Ok(filled),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

/// One netlink message of a datagram.
pub(crate) struct Frame<'a> {
    /// `nlmsg_type`.
    pub(crate) kind: u16,
    /// `nlmsg_flags`.
    pub(crate) flags: u16,
    /// `nlmsg_seq`.
    pub(crate) sequence: u32,
    /// `nlmsg_pid`: in multicast copies what the request had there; some tools send 0.
    pub(crate) port: u32,
    /// What follows the header.
    pub(crate) payload: &'a [u8],
}

/// Splits a datagram into messages; stops at the first malformed one.
pub(crate) fn frames(datagram: &[u8]) -> Frames<'_> {
    Frames { rest: datagram }
}

/// The messages of a datagram.
pub(crate) struct Frames<'a> {
    rest: &'a [u8],
}

impl Frames<'_> {
    /// Whether all was read: what is left after the last message is malformed.
    pub(crate) fn is_whole(&self) -> bool {
        self.rest.is_empty()
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;

    fn next(&mut self) -> Option<Frame<'a>> {
        let datagram = self.rest;
        let header = datagram.first_chunk::<HEADER>()?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
        let length = usize::try_from(length).ok()?;
        if length < HEADER || length > datagram.len() {
            return None;
        }
        let frame = Frame {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: u32::from_ne_bytes([header[8], header[9], header[10], header[11]]),
            port: u32::from_ne_bytes([header[12], header[13], header[14], header[15]]),
            payload: &datagram[HEADER..length],
        };
        self.rest = datagram
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
        Some(frame)
    }
}

enum Progress {
    /// Nothing of this exchange.
    Nothing,
    More,
    Malformed,
    Done(Result<(), NetlinkError>),
}

fn read_answers<T>(
    datagram: &[u8],
    sequence: u32,
    parse: &impl Fn(u16, &[u8]) -> Option<T>,
    answers: &mut Vec<T>,
    interrupted: &mut bool,
) -> Progress {
    const NOOP: u16 = libc::NLMSG_NOOP as u16;
    const ERROR: u16 = libc::NLMSG_ERROR as u16;
    const DONE: u16 = libc::NLMSG_DONE as u16;
    let mut progress = Progress::Nothing;
    let mut frames = frames(datagram);
    for frame in &mut frames {
        if frame.sequence != sequence {
            continue;
        }
        *interrupted |= frame.flags & libc::NLM_F_DUMP_INTR as u16 != 0;
        progress = Progress::More;
        match frame.kind {
            NOOP => {}
            DONE | ERROR => return Progress::Done(read_verdict(&frame)),
            kind => answers.extend(parse(kind, frame.payload)),
        }
    }
    if frames.is_whole() {
        progress
    } else {
        Progress::Malformed
    }
}

/// Reads `struct nlmsgerr` or the end of a dump: an errno and, behind it, extended-ack attributes.
fn read_verdict(frame: &Frame<'_>) -> Result<(), NetlinkError> {
    /// `NLM_F_CAPPED`: the request is not echoed behind its header.
    const CAPPED: u16 = 0x100;
    /// `NLM_F_ACK_TLVS`: attributes follow.
    const ACK_TLVS: u16 = 0x200;
    let Some(code) = frame.payload.first_chunk::<4>() else {
        return Ok(());
    };
    let code = i32::from_ne_bytes(*code);
    if code >= 0 {
        return Ok(());
    }
    let mut text = None;
    if frame.flags & ACK_TLVS != 0 {
        let offset = if i32::from(frame.kind) == libc::NLMSG_DONE {
            4
        } else if frame.flags & CAPPED != 0 {
            4 + HEADER
        } else {
            let echoed = frame
                .payload
                .get(4..8)
                .map_or(0, |l| u32::from_ne_bytes([l[0], l[1], l[2], l[3]]));
            4 + usize::try_from(echoed).unwrap_or(0).next_multiple_of(4)
        };
        text = frame.payload.get(offset..).and_then(extended_ack);
    }
    Err(NetlinkError::Refused {
        errno: code.saturating_neg(),
        text,
    })
}

/// The text among the attributes that follow an error (`NLMSGERR_ATTR_MSG`).
pub(crate) fn extended_ack(attributes: &[u8]) -> Option<String> {
    const NLMSGERR_ATTR_MSG: u16 = 1;
    NlasIterator::new(attributes)
        .flatten()
        .find(|attribute| attribute.kind() == NLMSGERR_ATTR_MSG)
        .map(|attribute| {
            String::from_utf8_lossy(attribute.value())
                .trim_end_matches('\0')
                .to_owned()
        })
}

/// Serialises a request; sequence and port number are filled in when it is sent.
fn encode<M: NetlinkSerializable>(message: &M, flags: u16) -> Zeroizing<Vec<u8>> {
    let length = HEADER + message.buffer_len();
    let mut request = Zeroizing::new(vec![0; length]);
    request[..4].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    request[4..6].copy_from_slice(&message.message_type().to_ne_bytes());
    request[6..8].copy_from_slice(&flags.to_ne_bytes());
    message.serialize(&mut request[HEADER..]);
    request
}

fn refusal(errno: i32, text: Option<&str>) -> String {
    let errno = io::Error::from_raw_os_error(errno);
    text.map_or_else(|| errno.to_string(), |text| format!("{text} ({errno})"))
}
