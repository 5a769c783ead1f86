// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets for an inbound ESP SA: from anyone, damaged on the way, and sent twice.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};

use libfuzzer_sys::fuzz_target;
use swanherd_esp::{Flow, InboundSa, OpenError, OutboundSa, PROTO_IPV4};
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::{Direction, SaEntry, SaKeys};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

/// Cipher, octets of its key, and integrity with the octets of its key.
const SUITES: [(EncryptionId, usize, Option<(IntegrityId, usize)>); 4] = [
    (EncryptionId::AesGcm16, 20, None),
    (EncryptionId::ChaCha20Poly1305, 36, None),
    (
        EncryptionId::AesCbc,
        16,
        Some((IntegrityId::HmacSha2_256_128, 32)),
    ),
    (
        EncryptionId::AesCbc,
        32,
        Some((IntegrityId::HmacSha1_96, 20)),
    ),
];

const WINDOWS: [u32; 4] = [32, 64, 1, 2048];

/// Steps per input; the rest of a longer one is left out, so that none takes seconds.
const MAX_STEPS: usize = 1024;

fn entry(choice: u8, direction: Direction) -> SaEntry {
    let (encryption, key_len, integrity) = SUITES[usize::from(choice & 3)];
    let addr = |last| IpAddr::V4(Ipv4Addr::new(192, 0, 2, last));
    SaEntry {
        esn: choice & 4 != 0,
        replay_window: WINDOWS[usize::from(choice >> 3 & 3)],
        ..SaEntry::tunnel(
            direction,
            0xc000_0001,
            [addr(1), addr(2)],
            1,
            SaKeys {
                encryption,
                encryption_key: Secret::new(vec![0x11; key_len]),
                integrity: integrity.map(|(id, len)| (id, Secret::new(vec![0x22; len]))),
            },
        )
    }
}

fn seal(sa: &mut OutboundSa, payload: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; sa.sealed_len(payload.len())];
    let start = sa.header_len();
    buffer[start..start + payload.len()].copy_from_slice(payload);
    let len = sa
        .seal(&mut buffer, payload.len(), PROTO_IPV4)
        .expect("there is room and no limit");
    buffer.truncate(len);
    buffer
}

fuzz_target!(|data: &[u8]| {
    let _ = Flow::of(data);
    let Some((choice, mut rest)) = data.split_first() else {
        return;
    };
    let mut out = OutboundSa::new(&entry(*choice, Direction::Out), &[7; 16]).expect("supported");
    let mut inward = InboundSa::new(&entry(*choice, Direction::In)).expect("supported");

    // Each step is an operation, a length and that many octets.
    for _ in 0..MAX_STEPS {
        let [op, len, tail @ ..] = rest else {
            return;
        };
        let (octets, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        match op & 3 {
            // From anyone: nobody makes an authentic packet without the key.
            0 => {
                assert!(inward.open(&mut octets.to_vec()).is_err());
            }
            // Nothing is no payload.
            1 if octets.is_empty() => {
                let mut packet = seal(&mut out, octets);
                assert_eq!(inward.open(&mut packet), Err(OpenError::BadPadding));
            }
            // In order: arrives once, with what was sent.
            1 => {
                let sealed = seal(&mut out, octets);
                let mut packet = sealed.clone();
                let opened = inward.open(&mut packet).expect("authentic and new");
                assert_eq!(&packet[opened.start..opened.end], octets);
                assert_eq!(opened.next_header, PROTO_IPV4);
                assert_eq!(opened.seq, out.seq());
                assert_eq!(inward.open(&mut sealed.clone()), Err(OpenError::Replayed));
            }
            // Damaged on the way.
            2 => {
                let mut packet = seal(&mut out, octets);
                let at = usize::from(*op) % packet.len();
                packet[at] ^= 1 + (op >> 2);
                // The SPI has chosen the SA before; with an AEAD it is authenticated, too.
                assert!(inward.open(&mut packet).is_err());
            }
            // Lost on the way.
            _ => {
                seal(&mut out, octets);
            }
        }
    }
});
