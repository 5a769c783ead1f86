// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An IKE message from anyone, and the contents of an Encrypted payload from a peer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swanherd_ike::wire::{
    Message, NotifyPayload, Payload, PayloadType, WireError, emit_payloads, parse_payloads,
};

/// What notifies say beyond their type is read as written, too.
fn look_into(payloads: &[Payload]) {
    for payload in payloads {
        let Payload::Notify(notify) = payload else {
            continue;
        };
        if let Some(addr) = notify.as_additional_address() {
            let again = NotifyPayload::additional_address(addr);
            assert_eq!(again.data, notify.data);
        }
        if let Some(redirect) = notify.as_redirect() {
            let again = NotifyPayload::redirect(&redirect);
            assert_eq!(again.data, notify.data);
        }
    }
}

/// What was read can be written, but for transforms with attributes that nobody understands.
fn written<T>(result: Result<T, WireError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(WireError::Malformed {
            payload: PayloadType::Sa,
            ..
        }) => None,
        Err(error) => panic!("what was read cannot be written: {error}"),
    }
}

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = Message::parse(data) {
        let _ = message.to_string();
        look_into(&message.payloads);
        if let Some(wire) = written(message.emit()) {
            assert_eq!(Message::parse(&wire), Ok(message));
        }
    }
    if let [first, rest @ ..] = data
        && let Ok(payloads) = parse_payloads((*first).into(), rest)
    {
        look_into(&payloads);
        let mut wire = Vec::new();
        if let Some(first) = written(emit_payloads(&payloads, PayloadType::None, &mut wire)) {
            assert_eq!(parse_payloads(first, &wire), Ok(payloads));
        }
    }
});
