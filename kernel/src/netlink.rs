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
use zeroize::{Zeroize as _, Zeroizing};

mod batch;

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
    protocol: isize,
    socket: AsyncFd<Socket>,
    sequence: u32,
    buffer: Vec<u8>,
    /// An earlier exchange was abandoned half way (its caller went away); its answers may still
    /// arrive, and a half-read dump would make the next one fail.
    unfinished: bool,
}

impl Requester {
    /// Opens a socket of one netlink family, `libc::NETLINK_XFRM` for instance. Needs a tokio
    /// runtime.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let socket = open_socket(protocol)?;
        Ok(Self {
            port: AtomicU32::new(port_of(&socket)?),
            state: Mutex::new(State {
                protocol,
                socket,
                sequence: 0,
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

    /// Dumps a table. A dump that the kernel marks as inconsistent is begun again.
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
            let (answers, interrupted) = self.exchange(request, &parse).await?;
            if !interrupted {
                return Ok(answers);
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
        if state.unfinished {
            state.socket = open_socket(state.protocol)?;
            self.port.store(port_of(&state.socket)?, Ordering::Relaxed);
        }
        state.unfinished = true;
        state.sequence = state.sequence.wrapping_add(1);
        request[8..12].copy_from_slice(&state.sequence.to_ne_bytes());
        request[12..HEADER].copy_from_slice(&self.port().to_ne_bytes());

        loop {
            let mut ready = state.socket.writable().await?;
            match ready.try_io(|socket| socket.get_ref().send(&request, 0)) {
                Ok(sent) => {
                    sent?;
                    break;
                }
                Err(_would_block) => {}
            }
        }
        drop(request);

        let mut answers = Vec::new();
        let mut interrupted = false;
        loop {
            let received =
                tokio::time::timeout(ANSWER_TIMEOUT, receive(&state.socket, &mut state.buffer))
                    .await
                    .map_err(|_| NetlinkError::Protocol("no answer from the kernel"))??;
            let verdict = read_answers(
                &state.buffer[..received],
                state.sequence,
                parse,
                &mut answers,
                &mut interrupted,
            );
            state.buffer[..received].zeroize();
            match verdict {
                Progress::More => {}
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
pub(crate) fn frames(mut datagram: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    std::iter::from_fn(move || {
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
        datagram = datagram
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
        Some(frame)
    })
}

enum Progress {
    More,
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
    for frame in frames(datagram) {
        if frame.sequence != sequence {
            continue;
        }
        *interrupted |= frame.flags & libc::NLM_F_DUMP_INTR as u16 != 0;
        match frame.kind {
            NOOP => {}
            DONE | ERROR => return Progress::Done(read_verdict(&frame)),
            kind => answers.extend(parse(kind, frame.payload)),
        }
    }
    Progress::More
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

#[cfg(test)]
mod tests {
    use super::*;

    fn frame_bytes(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + payload.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn read(datagram: &[u8]) -> (Progress, Vec<u16>, bool) {
        let mut answers = Vec::new();
        let mut interrupted = false;
        let progress = read_answers(
            datagram,
            7,
            &|kind, _: &[u8]| Some(kind),
            &mut answers,
            &mut interrupted,
        );
        (progress, answers, interrupted)
    }

    #[test]
    fn refusal_carries_the_extended_ack_text() {
        let mut payload = (-libc::ENOSYS).to_ne_bytes().to_vec();
        payload.extend([0; HEADER]);
        payload.extend(13u16.to_ne_bytes());
        payload.extend(1u16.to_ne_bytes());
        payload.extend(b"no cake.\0");
        let datagram = frame_bytes(2, 0x300, 7, &payload);

        let (Progress::Done(Err(error)), _, _) = read(&datagram) else {
            panic!("an error frame ends the exchange");
        };

        assert_eq!(error.errno(), Some(libc::ENOSYS));
        assert!(error.to_string().starts_with("no cake. ("), "{error}");
    }

    #[test]
    fn answers_to_an_earlier_request_are_ignored() {
        let mut datagram = frame_bytes(0x13, 0, 6, &[]);
        datagram.extend(frame_bytes(2, 0, 6, &(-1i32).to_ne_bytes()));
        datagram.extend(frame_bytes(0x14, 0, 7, &[]));

        let (progress, answers, _) = read(&datagram);

        assert!(matches!(progress, Progress::More));
        assert_eq!(answers, [0x14]);
    }

    #[test]
    fn an_interrupted_dump_is_noticed() {
        let mut datagram = frame_bytes(0x10, 0x10, 7, &[]);
        datagram.extend(frame_bytes(3, 0x2, 7, &0i32.to_ne_bytes()));

        let (progress, answers, interrupted) = read(&datagram);

        assert!(matches!(progress, Progress::Done(Ok(()))));
        assert_eq!(answers, [0x10]);
        assert!(interrupted);
    }

    proptest::proptest! {
        #[test]
        fn no_datagram_makes_the_reader_panic(datagram in proptest::collection::vec(0u8.., 0..200)) {
            let _ = read(&datagram);
        }
    }
}
