// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Payloads that nobody has heard of.

use std::net::UdpSocket;
use std::time::Duration;

use crate::support::{HASTY, Nets, lists_nothing};

/// A payload of a type that no RFC has given out.
const UNKNOWN: u8 = 201;
const CRITICAL: u8 = 0x80;

/// A first message with a payload that must be understood is refused, and the refusal names it; one
/// that may be passed over is. A connection comes up besides.
#[test]
fn critical_extension() {
    let nets = Nets::with(HASTY, ["", ""], ["", ""]);
    let socket = nets
        .sun
        .namespace
        .enter(|| UdpSocket::bind(("192.0.2.2", 0)).expect("a port"));
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .expect("a socket may wait");
    let exchange = |flags: u8, spi: u64| {
        let message = first_message(flags, spi);
        socket
            .send_to(&message, ("192.0.2.1", 500))
            .expect("it is sent");
        let mut answer = vec![0; 4096];
        let length = socket
            .recv(&mut answer)
            .unwrap_or_else(|error| panic!("{error}\n{}", nets.moon.log()));
        answer.truncate(length);
        assert_eq!(answer[..8], spi.to_be_bytes(), "the same initiator");
        answer
    };

    let refusal = exchange(CRITICAL, 0x1122_3344_5566_7788);

    // IKE_SA_INIT, a response; a notification of type 1 that holds the type of the payload, and
    // nothing else.
    assert_eq!(refusal[16], 41, "{refusal:02x?}");
    assert_eq!(refusal[18..20], [34, 0x20], "{refusal:02x?}");
    assert_eq!(refusal[28..], [0, 0, 0, 9, 0, 0, 0, 1, UNKNOWN]);
    lists_nothing(&nets.moon, 5);

    let answer = exchange(0, 0x1122_3344_5566_7799);

    assert_eq!(answer[16], 33, "{answer:02x?}");
    nets.moon.initiate("net-net");
    nets.assert_traffic_passes();
}

/// A first message that could be agreed to, and a payload before what that takes.
fn first_message(flags: u8, spi: u64) -> Vec<u8> {
    let payload = |next: u8, flags: u8, body: &[u8]| {
        let len = u16::try_from(4 + body.len()).expect("it is short");
        [&[next, flags][..], &len.to_be_bytes(), body].concat()
    };
    // ENCR AES_GCM_16 with 128 bits, PRF HMAC_SHA2_256, KE CURVE_25519.
    let proposal = [
        &[0, 0, 0, 36, 1, 1, 0, 3][..],
        &[3, 0, 0, 12, 1, 0, 0, 20, 0x80, 14, 0, 128],
        &[3, 0, 0, 8, 2, 0, 0, 5],
        &[0, 0, 0, 8, 4, 0, 0, 31],
    ]
    .concat();
    let payloads = [
        payload(33, flags, b"what is this"),
        payload(34, 0, &proposal),
        payload(40, 0, &[&[0, 31, 0, 0][..], &[9; 32]].concat()),
        payload(0, 0, &[7; 32]),
    ]
    .concat();
    let len = u32::try_from(28 + payloads.len()).expect("it is short");
    [
        &spi.to_be_bytes()[..],
        &[0; 8],
        &[UNKNOWN, 0x20, 34, 0x08],
        &[0; 4],
        &len.to_be_bytes(),
        &payloads,
    ]
    .concat()
}
