// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many requests in one system call.
//!
//! The kernel handles the messages of one datagram in their order, and an error of one does not
//! keep it from the next. Each is acknowledged on its own.

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkSerializable};
use zeroize::{Zeroize as _, Zeroizing};

use super::{
    ANSWER_TIMEOUT, HEADER, NetlinkError, Requester, encode, frames, open_socket, port_of,
    read_verdict, receive,
};

/// More at once would fill the socket's receive buffer with acknowledgements.
const MAX_MESSAGES: usize = 64;
/// Well below what the kernel takes in one message.
const MAX_OCTETS: usize = 64 * 1024;

/// A request that is ready to be sent.
pub(crate) struct Request(Zeroizing<Vec<u8>>);

impl Request {
    /// Serialises `message`; `flags` are added to REQUEST and ACK.
    pub(crate) fn new<M: NetlinkSerializable>(message: &M, flags: u16) -> Self {
        Self(encode(message, NLM_F_REQUEST | NLM_F_ACK | flags))
    }
}

/// What is known of one request's outcome.
type Answer<T> = Option<Result<Vec<T>, NetlinkError>>;

impl Requester {
    /// Sends requests in order and collects what `parse` makes of the answers to each, or why it
    /// was refused. The results are as many as the requests, and in their order.
    pub(crate) async fn batch<T: Send>(
        &self,
        requests: Vec<Request>,
        parse: impl Fn(u16, &[u8]) -> Option<T> + Send + Sync,
    ) -> Vec<Result<Vec<T>, NetlinkError>> {
        let mut results = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter().peekable();
        while requests.peek().is_some() {
            let mut datagram = Zeroizing::new(Vec::with_capacity(MAX_OCTETS));
            let mut starts = Vec::new();
            while let Some(Request(request)) = requests.next_if(|Request(next)| {
                starts.is_empty()
                    || starts.len() < MAX_MESSAGES && datagram.len() + next.len() <= MAX_OCTETS
            }) {
                starts.push(datagram.len());
                datagram.extend_from_slice(&request);
                let aligned = datagram.len().next_multiple_of(4);
                datagram.resize(aligned, 0);
            }
            let mut answers: Vec<Answer<T>> = starts.iter().map(|_| None).collect();
            let failure = self
                .exchange_batch(&mut datagram, &starts, &parse, &mut answers)
                .await
                .err();
            results.extend(answers.into_iter().map(|answer| {
                answer.unwrap_or_else(|| Err(failure.as_ref().map_or(NO_ANSWER, again)))
            }));
        }
        results
    }

    async fn exchange_batch<T: Send>(
        &self,
        datagram: &mut [u8],
        starts: &[usize],
        parse: &(impl Fn(u16, &[u8]) -> Option<T> + Send + Sync),
        answers: &mut [Answer<T>],
    ) -> Result<(), NetlinkError> {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        if state.unfinished {
            state.socket = open_socket(state.protocol)?;
            self.port.store(
                port_of(&state.socket)?,
                std::sync::atomic::Ordering::Relaxed,
            );
        }
        state.unfinished = true;
        let first = state.sequence.wrapping_add(1);
        for start in starts {
            state.sequence = state.sequence.wrapping_add(1);
            datagram[start + 8..start + 12].copy_from_slice(&state.sequence.to_ne_bytes());
            datagram[start + 12..start + HEADER].copy_from_slice(&self.port().to_ne_bytes());
        }
        loop {
            let mut ready = state.socket.writable().await?;
            match ready.try_io(|socket| socket.get_ref().send(datagram, 0)) {
                Ok(sent) => {
                    sent?;
                    break;
                }
                Err(_would_block) => {}
            }
        }
        let mut open = answers.len();
        let mut partial: Vec<Vec<T>> = starts.iter().map(|_| Vec::new()).collect();
        while open > 0 {
            let received =
                tokio::time::timeout(ANSWER_TIMEOUT, receive(&state.socket, &mut state.buffer))
                    .await
                    .map_err(|_| NO_ANSWER)??;
            for frame in frames(&state.buffer[..received]) {
                // Answers to earlier requests, which nobody waits for, fall outside.
                let Ok(index) = usize::try_from(frame.sequence.wrapping_sub(first)) else {
                    continue;
                };
                let Some(answer @ None) = answers.get_mut(index) else {
                    continue;
                };
                match i32::from(frame.kind) {
                    libc::NLMSG_NOOP => {}
                    libc::NLMSG_ERROR | libc::NLMSG_DONE => {
                        let payloads = std::mem::take(&mut partial[index]);
                        *answer = Some(read_verdict(&frame).map(|()| payloads));
                        open -= 1;
                    }
                    _ => partial[index].extend(parse(frame.kind, frame.payload)),
                }
            }
            state.buffer[..received].zeroize();
        }
        state.unfinished = false;
        Ok(())
    }
}

const NO_ANSWER: NetlinkError = NetlinkError::Protocol("no answer from the kernel");

/// One failure of the socket is that of each request without an answer.
fn again(error: &NetlinkError) -> NetlinkError {
    match error {
        NetlinkError::Io(error) => NetlinkError::Io(error.raw_os_error().map_or_else(
            || std::io::Error::new(error.kind(), error.to_string()),
            std::io::Error::from_raw_os_error,
        )),
        NetlinkError::Refused { errno, text } => NetlinkError::Refused {
            errno: *errno,
            text: text.clone(),
        },
        NetlinkError::Protocol(what) => NetlinkError::Protocol(what),
    }
}
