// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many requests in one system call.
//!
//! The kernel handles the messages of one datagram in their order, and an error of one does not
//! keep it from the next. Each is acknowledged on its own.

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkSerializable};
use tokio::time::Instant;
use zeroize::{Zeroize as _, Zeroizing};

use super::{
    ANSWER_TIMEOUT, HEADER, NO_ANSWER, NetlinkError, Requester, encode, frames, read_verdict,
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
        state.begin(&self.port)?;
        let first = state.sequence.wrapping_add(1);
        for start in starts {
            state.sequence = state.sequence.wrapping_add(1);
            datagram[start + 8..start + 12].copy_from_slice(&state.sequence.to_ne_bytes());
            datagram[start + 12..start + HEADER].copy_from_slice(&self.port().to_ne_bytes());
        }
        state.send(datagram).await?;
        let mut open = answers.len();
        let mut partial: Vec<Vec<T>> = starts.iter().map(|_| Vec::new()).collect();
        let mut deadline = Instant::now() + ANSWER_TIMEOUT;
        while open > 0 {
            let received = state.receive(deadline).await?;
            let mut frames = frames(&state.buffer[..received]);
            for frame in &mut frames {
                // Answers to earlier requests, which nobody waits for, fall outside.
                let Ok(index) = usize::try_from(frame.sequence.wrapping_sub(first)) else {
                    continue;
                };
                let Some(answer @ None) = answers.get_mut(index) else {
                    continue;
                };
                deadline = Instant::now() + ANSWER_TIMEOUT;
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
            let whole = frames.is_whole();
            state.buffer[..received].zeroize();
            if !whole {
                return Err(NetlinkError::Protocol("malformed answer from the kernel"));
            }
        }
        state.unfinished = false;
        Ok(())
    }
}

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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use netlink_packet_xfrm::XfrmMessage;
    use netlink_packet_xfrm::policy::GetSpdInfoMessage;

    use super::super::scripted::{frame as framed, scripted, verdict};
    use super::*;

    const ANSWER: u16 = 0x24;

    fn frame(kind: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        framed(kind, 0, sequence, payload)
    }

    fn requests(count: usize) -> Vec<Request> {
        let message = XfrmMessage::GetSpdInfo(GetSpdInfoMessage::default());
        (0..count).map(|_| Request::new(&message, 0)).collect()
    }

    /// Sequence and port numbers of what arrived in one datagram.
    fn received(kernel: &UnixDatagram) -> Vec<(u32, u32)> {
        let mut buffer = vec![0; 128 * 1024];
        let length = kernel.recv(&mut buffer).unwrap();
        frames(&buffer[..length])
            .map(|frame| (frame.sequence, frame.port))
            .collect()
    }

    /// What each request came to: the payloads' first octets, or the errno.
    fn outcomes(results: Vec<Result<Vec<u8>, NetlinkError>>) -> Vec<Result<Vec<u8>, Option<i32>>> {
        results
            .into_iter()
            .map(|result| result.map_err(|error| error.errno()))
            .collect()
    }

    fn first(kind: u16, payload: &[u8]) -> Option<u8> {
        (kind == ANSWER).then(|| payload[0])
    }

    #[tokio::test]
    async fn answers_find_their_requests_in_any_order() {
        let (requester, kernel) = scripted(100);
        let script = tokio::task::spawn_blocking(move || {
            let seen = received(&kernel);
            // An answer to something earlier, two of the third, its verdict before the others'.
            kernel.send(&frame(ANSWER, 100, &[9; 4])).unwrap();
            let mut datagram = frame(ANSWER, 103, &[1; 4]);
            datagram.extend(frame(ANSWER, 103, &[2; 4]));
            datagram.extend(verdict(103, 0));
            kernel.send(&datagram).unwrap();
            kernel.send(&verdict(102, libc::EEXIST)).unwrap();
            // Once more: what is decided stays so.
            kernel.send(&verdict(102, 0)).unwrap();
            kernel.send(&verdict(101, 0)).unwrap();
            seen
        });

        let results = requester.batch(requests(3), first).await;

        assert_eq!(script.await.unwrap(), [(101, 77), (102, 77), (103, 77)]);
        assert_eq!(
            outcomes(results),
            [Ok(vec![]), Err(Some(libc::EEXIST)), Ok(vec![1, 2])]
        );
    }

    #[tokio::test]
    async fn sequence_numbers_wrap_within_a_batch() {
        let (requester, kernel) = scripted(u32::MAX - 2);
        let script = tokio::task::spawn_blocking(move || {
            let seen = received(&kernel);
            for (sequence, _) in &seen {
                kernel.send(&verdict(*sequence, 0)).unwrap();
            }
            seen
        });

        let results = requester.batch(requests(4), first).await;

        assert_eq!(outcomes(results), vec![Ok(vec![]); 4]);
        let seen: Vec<u32> = script.await.unwrap().iter().map(|(s, _)| *s).collect();
        assert_eq!(seen, [u32::MAX - 1, u32::MAX, 0, 1]);
    }

    #[tokio::test]
    async fn many_requests_go_in_several_calls() {
        let (requester, kernel) = scripted(0);
        let script = tokio::task::spawn_blocking(move || {
            let mut calls = Vec::new();
            for _ in 0..3 {
                let seen = received(&kernel);
                for (sequence, _) in &seen {
                    kernel.send(&verdict(*sequence, 0)).unwrap();
                }
                calls.push(seen.len());
            }
            calls
        });

        let results = requester.batch(requests(150), first).await;

        assert_eq!(script.await.unwrap(), [64, 64, 22]);
        assert!(results.iter().all(Result::is_ok));
        assert_eq!(results.len(), 150);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_without_an_answer_fail_and_the_answered_keep_theirs() {
        let (requester, kernel) = scripted(0);
        kernel.send(&verdict(1, 0)).unwrap();
        kernel.send(&verdict(3, libc::ESRCH)).unwrap();

        let results = outcomes(requester.batch(requests(3), first).await);

        assert_eq!(results, [Ok(vec![]), Err(None), Err(Some(libc::ESRCH))]);
    }
}
