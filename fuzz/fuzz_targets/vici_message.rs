// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VICI packet from a client, without its length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swanherd_vici::{Packet, RawPacket};

fuzz_target!(|data: &[u8]| {
    let Ok(raw) = RawPacket::parse(data) else {
        assert!(Packet::parse(data).is_err());
        return;
    };
    let Ok(packet) = Packet::parse(data) else {
        return;
    };
    assert_eq!(packet.packet_type(), raw.packet_type);
    // What was read can be written, and means the same.
    let frame = packet.to_frame().expect("what was read fits");
    assert_eq!(Packet::parse(&frame[4..]).as_ref(), Ok(&packet));
});
