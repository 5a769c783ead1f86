// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An IKE message from anyone, and the contents of an Encrypted payload from a peer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swanherd_ike::wire::{Message, PayloadType, WireError, emit_payloads, parse_payloads};

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
        if let Some(wire) = written(message.emit()) {
            assert_eq!(Message::parse(&wire), Ok(message));
        }
    }
    if let [first, rest @ ..] = data
        && let Ok(payloads) = parse_payloads((*first).into(), rest)
    {
        let mut wire = Vec::new();
        if let Some(first) = written(emit_payloads(&payloads, PayloadType::None, &mut wire)) {
            assert_eq!(parse_payloads(first, &wire), Ok(payloads));
        }
    }
});
