// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a kernel, a busy machine and a full buffer may do to a request.

use std::time::Duration;

use netlink_packet_xfrm::XfrmMessage;
use netlink_packet_xfrm::policy::GetSpdInfoMessage;

use super::scripted::{FIRST_PORT, frame, requester, verdict};
use super::*;

const ANSWER: u16 = 0x24;
const DONE: u16 = libc::NLMSG_DONE as u16;
const MULTI: u16 = 0x2;
const INTERRUPTED: u16 = 0x10;

fn message() -> XfrmMessage {
    XfrmMessage::GetSpdInfo(GetSpdInfoMessage::default())
}

fn first(kind: u16, payload: &[u8]) -> Option<u8> {
    (kind == ANSWER).then(|| payload[0])
}

fn part(sequence: u32, value: u8) -> Vec<u8> {
    frame(ANSWER, MULTI, sequence, &[value; 4])
}

fn done(sequence: u32) -> Vec<u8> {
    frame(DONE, MULTI, sequence, &0i32.to_ne_bytes())
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
    let datagram = frame(2, 0x300, 7, &payload);

    let (Progress::Done(Err(error)), _, _) = read(&datagram) else {
        panic!("an error frame ends the exchange");
    };

    assert_eq!(error.errno(), Some(libc::ENOSYS));
    assert!(error.to_string().starts_with("no cake. ("), "{error}");
}

#[test]
fn answers_to_an_earlier_request_are_ignored() {
    let mut datagram = frame(0x13, 0, 6, &[]);
    datagram.extend(frame(2, 0, 6, &(-1i32).to_ne_bytes()));
    datagram.extend(frame(0x14, 0, 7, &[]));

    let (progress, answers, _) = read(&datagram);

    assert!(matches!(progress, Progress::More));
    assert_eq!(answers, [0x14]);
}

#[test]
fn an_interrupted_dump_is_noticed() {
    let mut datagram = frame(0x10, INTERRUPTED, 7, &[]);
    datagram.extend(frame(3, 0x2, 7, &0i32.to_ne_bytes()));

    let (progress, answers, interrupted) = read(&datagram);

    assert!(matches!(progress, Progress::Done(Ok(()))));
    assert_eq!(answers, [0x10]);
    assert!(interrupted);
}

#[tokio::test(start_paused = true)]
async fn a_kernel_that_says_nothing_fails_one_request_and_not_the_next() {
    let (requester, kernel) = requester(0, 2);
    let begun = Instant::now();

    let failed = requester.command(&message(), 0).await;

    assert!(
        matches!(failed, Err(NetlinkError::Protocol(_))),
        "{failed:?}"
    );
    assert_eq!(begun.elapsed(), ANSWER_TIMEOUT);
    assert_eq!(kernel.request(0), (1, FIRST_PORT));
    // Now it comes, too late and on a socket that nobody reads any more.
    let _ = kernel.sockets[0].send(&verdict(1, libc::EPERM));
    kernel.answer(1, &verdict(2, 0));
    requester.command(&message(), 0).await.unwrap();
    assert_eq!(kernel.request(1), (2, FIRST_PORT + 1));
    assert_eq!(requester.port(), FIRST_PORT + 1);
}

#[tokio::test(start_paused = true)]
async fn answers_for_others_do_not_prolong_the_wait() {
    let (requester, kernel) = requester(0, 1);
    let begun = Instant::now();
    let chatter = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let _ = kernel.sockets[0].send(&verdict(4711, 0));
        }
    };

    let message = message();
    let failed = tokio::select! {
        failed = requester.command(&message, 0) => failed,
        () = chatter => unreachable!("it never ends"),
    };

    assert!(failed.is_err());
    assert!(begun.elapsed() <= ANSWER_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_is_waited_for() {
    let (requester, kernel) = requester(0, 1);
    let late = async {
        tokio::time::sleep(ANSWER_TIMEOUT - Duration::from_secs(1)).await;
        kernel.answer(0, &verdict(1, libc::EEXIST));
    };

    let message = message();
    let (answer, ()) = tokio::join!(requester.command(&message, 0), late);

    assert_eq!(answer.unwrap_err().errno(), Some(libc::EEXIST));
}

#[tokio::test]
async fn answers_of_an_abandoned_request_reach_nobody() {
    let (requester, kernel) = requester(0, 2);
    let message = message();
    {
        let abandoned = requester.command(&message, 0);
        tokio::select! {
            biased;
            _ = abandoned => unreachable!("nobody answers"),
            () = tokio::time::sleep(Duration::from_millis(10)) => {}
        }
    }
    kernel.answer(0, &verdict(1, libc::EPERM));
    kernel.answer(1, &verdict(2, 0));

    requester.command(&message, 0).await.unwrap();
}

#[tokio::test]
async fn duplicates_and_answers_out_of_order_are_told_apart_by_sequence() {
    let (requester, kernel) = requester(9, 1);
    kernel.answer(0, &verdict(9, libc::EPERM));
    kernel.answer(0, &verdict(11, libc::EBUSY));
    kernel.answer(0, &verdict(10, 0));
    kernel.answer(0, &verdict(10, libc::EIO));

    requester.command(&message(), 0).await.unwrap();

    kernel.answer(0, &verdict(11, libc::EEXIST));
    let second = requester.command(&message(), 0).await;
    assert_eq!(second.unwrap_err().errno(), Some(libc::EEXIST));
}

#[tokio::test]
async fn sequence_numbers_wrap() {
    let (requester, kernel) = requester(u32::MAX - 1, 1);
    for sequence in [u32::MAX, 0, 1] {
        kernel.answer(0, &verdict(sequence, 0));
        requester.command(&message(), 0).await.unwrap();
        assert_eq!(kernel.request(0).0, sequence);
    }
}

#[tokio::test]
async fn a_truncated_answer_fails_at_once_and_the_next_request_works() {
    let (requester, kernel) = requester(0, 3);
    let mut cut = part(1, 5);
    cut.truncate(cut.len() - 3);
    kernel.answer(0, &cut);
    assert!(requester.dump(&message(), first).await.is_err());

    // Longer than anything that the kernel sends.
    kernel.answer(1, &vec![0; RECEIVE_BUFFER + 1]);
    assert!(requester.dump(&message(), first).await.is_err());

    kernel.answer(2, &part(3, 5));
    kernel.answer(2, &done(3));
    assert_eq!(requester.dump(&message(), first).await.unwrap(), [5]);
}

#[tokio::test]
async fn a_dump_that_changes_under_the_reader_is_begun_again() {
    let (requester, kernel) = requester(0, 1);
    kernel.answer(0, &part(1, 1));
    kernel.answer(0, &frame(ANSWER, MULTI | INTERRUPTED, 1, &[2; 4]));
    kernel.answer(0, &done(1));
    kernel.answer(0, &part(2, 3));
    kernel.answer(0, &done(2));

    assert_eq!(requester.dump(&message(), first).await.unwrap(), [3]);
}

#[tokio::test]
async fn a_table_that_never_holds_still_is_given_up() {
    let (requester, kernel) = requester(0, 1);
    for attempt in 1..=DUMP_ATTEMPTS {
        kernel.answer(0, &frame(DONE, MULTI | INTERRUPTED, attempt, &[0; 4]));
    }

    let given_up = requester.dump(&message(), first).await.unwrap_err();

    assert!(given_up.to_string().contains("changed during each attempt"));
    kernel.answer(0, &verdict(DUMP_ATTEMPTS + 1, 0));
    requester.command(&message(), 0).await.unwrap();
}

#[tokio::test]
async fn a_dump_whose_parts_were_dropped_is_begun_again_on_a_new_socket() {
    let (requester, kernel) = requester(0, 2);
    kernel.answer(0, &part(1, 1));
    kernel
        .faults
        .lock()
        .unwrap()
        .extend([None, Some(libc::ENOBUFS)]);
    kernel.answer(1, &part(2, 1));
    kernel.answer(1, &part(2, 2));
    kernel.answer(1, &done(2));

    assert_eq!(requester.dump(&message(), first).await.unwrap(), [1, 2]);
    assert_eq!(requester.port(), FIRST_PORT + 1);
}

#[tokio::test]
async fn a_dump_that_ends_in_an_error_is_an_error() {
    let (requester, kernel) = requester(0, 1);
    kernel.answer(0, &part(1, 1));
    kernel.answer(0, &frame(DONE, MULTI, 1, &(-libc::EINVAL).to_ne_bytes()));

    let error = requester.dump(&message(), first).await.unwrap_err();

    assert_eq!(error.errno(), Some(libc::EINVAL));
}

proptest::proptest! {
    #[test]
    fn no_datagram_makes_the_reader_panic(datagram in proptest::collection::vec(0u8.., 0..200)) {
        let _ = read(&datagram);
    }

    #[test]
    fn no_message_makes_the_reader_panic(
        kind in 0u16..40,
        flags in 0u16..0x400,
        payload in proptest::collection::vec(0u8.., 0..100),
    ) {
        let _ = read(&frame(kind, flags, 7, &payload));
    }
}
