// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Round trips of every payload, and hostile input.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::collection::vec;
use proptest::prelude::*;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Identity, Proposal, ProtocolId, TrafficSelector, Transform};

use super::*;

fn octets(max: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..max)
}

fn transform() -> impl Strategy<Value = Transform> {
    prop_oneof![
        (any::<u16>(), any::<Option<u16>>()).prop_map(|(id, key_bits)| Transform::Encryption {
            id: id.into(),
            key_bits
        }),
        any::<u16>().prop_map(|id| Transform::Prf(id.into())),
        any::<u16>().prop_map(|id| Transform::Integrity(id.into())),
        any::<u16>().prop_map(|id| Transform::KeyExchange(id.into())),
        any::<bool>().prop_map(Transform::Esn),
        (1..=7_u8, any::<u16>()).prop_map(|(index, id)| Transform::AdditionalKeyExchange {
            index,
            id: id.into()
        }),
        (13..=255_u8, any::<u16>())
            .prop_map(|(transform_type, id)| Transform::Unknown { transform_type, id }),
    ]
}

fn sa() -> impl Strategy<Value = SaPayload> {
    let proposal = (any::<u8>(), any::<u8>(), octets(9), vec(transform(), 0..12)).prop_map(
        |(number, protocol, spi, transforms)| SaProposal {
            number,
            spi,
            proposal: Proposal {
                protocol: protocol.into(),
                transforms,
            },
        },
    );
    vec(proposal, 1..5).prop_map(|proposals| SaPayload { proposals })
}

fn selector() -> impl Strategy<Value = TrafficSelector> {
    let v4 = (any::<u32>(), any::<u32>()).prop_map(|(a, b)| {
        let at = |bits| IpAddr::V4(Ipv4Addr::from_bits(bits));
        (at(a.min(b)), at(a.max(b)))
    });
    let v6 = (any::<u128>(), any::<u128>()).prop_map(|(a, b)| {
        let at = |bits| IpAddr::V6(Ipv6Addr::from_bits(bits));
        (at(a.min(b)), at(a.max(b)))
    });
    (any::<(u8, u16, u16)>(), prop_oneof![v4, v6]).prop_map(
        |((protocol, start_port, end_port), (start, end))| TrafficSelector {
            protocol,
            start_port,
            end_port,
            start,
            end,
        },
    )
}

fn identity() -> impl Strategy<Value = Identity> {
    (any::<u8>(), octets(80)).prop_map(|(id_type, data)| Identity {
        id_type: id_type.into(),
        data,
    })
}

fn delete() -> impl Strategy<Value = DeletePayload> {
    prop_oneof![
        Just(DeletePayload::IkeSa),
        (any::<bool>(), vec(any::<u32>(), 0..20)).prop_map(|(ah, spis)| DeletePayload::Child {
            protocol: if ah { ProtocolId::Ah } else { ProtocolId::Esp },
            spis,
        }),
    ]
}

/// Any payload that may be inside an Encrypted payload.
fn payload() -> impl Strategy<Value = Payload> {
    let simple = prop_oneof![
        (any::<u16>(), octets(600)).prop_map(|(method, data)| Payload::Ke(KePayload {
            method: method.into(),
            data
        })),
        identity().prop_map(Payload::IdI),
        identity().prop_map(Payload::IdR),
        (any::<u8>(), octets(900)).prop_map(|(encoding, data)| Payload::Cert(CertPayload {
            encoding: encoding.into(),
            data
        })),
        (any::<u8>(), octets(90)).prop_map(|(encoding, authorities)| Payload::CertReq(
            CertReqPayload {
                encoding: encoding.into(),
                authorities
            }
        )),
        (any::<u8>(), octets(300)).prop_map(|(method, data)| Payload::Auth(AuthPayload {
            method: method.into(),
            data
        })),
        vec(any::<u8>(), 16..=256)
            .prop_map(|data| Payload::Nonce(NoncePayload::new(data).unwrap())),
        octets(40).prop_map(|data| Payload::Vendor(VendorPayload(data))),
    ];
    let structured = prop_oneof![
        sa().prop_map(Payload::Sa),
        (0..=3_u8, any::<u16>(), octets(9), octets(70)).prop_map(
            |(protocol, notify_type, spi, data)| Payload::Notify(NotifyPayload {
                protocol: (protocol != 0).then(|| protocol.into()),
                spi,
                notify_type: notify_type.into(),
                data
            })
        ),
        delete().prop_map(Payload::Delete),
        vec(selector(), 0..9).prop_map(|ts| Payload::TsI(TsPayload(ts))),
        vec(selector(), 0..9).prop_map(|ts| Payload::TsR(TsPayload(ts))),
        (any::<u8>(), vec((0..0x8000_u16, octets(20)), 0..9)).prop_map(|(cfg_type, attributes)| {
            Payload::Cp(CpPayload {
                cfg_type: cfg_type.into(),
                attributes: attributes
                    .into_iter()
                    .map(|(attribute_type, value)| CpAttribute {
                        attribute_type: attribute_type.into(),
                        value,
                    })
                    .collect(),
            })
        }),
        (any::<(u8, u8)>(), octets(60)).prop_map(|((code, identifier), data)| Payload::Eap(
            EapPayload {
                code: code.into(),
                identifier,
                data
            }
        )),
        (100..=255_u8, any::<bool>(), octets(60)).prop_map(|(payload_type, critical, data)| {
            Payload::Unknown(UnknownPayload {
                payload_type,
                critical,
                data,
            })
        }),
    ];
    prop_oneof![simple, structured]
}

fn closed() -> impl Strategy<Value = Payload> {
    let body = || vec(any::<u8>(), 1..300);
    prop_oneof![
        (any::<u8>(), body()).prop_map(|(first, body)| Payload::Sk(SkPayload {
            first: first.into(),
            body
        })),
        (any::<u8>(), 1..20_u16, 0..20_u16, body()).prop_map(|(first, number, more, body)| {
            Payload::Skf(SkfPayload {
                first: first.into(),
                number,
                total: number + more,
                body,
            })
        }),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    (any::<(u64, u64, u8, u32)>(), any::<(bool, bool, bool)>()).prop_map(
        |((spi_i, spi_r, exchange, message_id), (initiator, response, higher_version))| Header {
            spi_i,
            spi_r,
            exchange: exchange.into(),
            flags: Flags {
                initiator,
                response,
                higher_version,
            },
            message_id,
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    (
        header(),
        vec(payload(), 0..6),
        proptest::option::of(closed()),
    )
        .prop_map(|(header, mut payloads, closed)| {
            payloads.extend(closed);
            Message { header, payloads }
        })
}

proptest! {
    #[test]
    fn every_message_survives_a_round_trip(message in message()) {
        let wire = message.emit().unwrap();
        prop_assert_eq!(Message::parse(&wire), Ok(message));
    }

    #[test]
    fn every_chain_survives_a_round_trip(payloads in vec(payload(), 0..8)) {
        let mut wire = Vec::new();
        let first = emit_payloads(&payloads, PayloadType::None, &mut wire).unwrap();
        prop_assert_eq!(parse_payloads(first, &wire), Ok(payloads));
    }

    #[test]
    fn a_cut_message_is_truncated(message in message(), cut in 1..2000_usize) {
        let wire = message.emit().unwrap();
        let have = wire.len().saturating_sub(cut);
        let truncated = matches!(Message::parse(&wire[..have]), Err(WireError::Truncated { .. }));
        prop_assert!(truncated);
    }

    #[test]
    fn a_damaged_message_is_read_or_refused(
        message in message(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut wire = message.emit().unwrap();
        for (index, octet) in damage {
            *index.get_mut(&mut wire) = octet;
        }
        // What is read can be written, and means the same afterwards; what would not is not
        // written.
        if let Ok(read) = Message::parse(&wire)
            && let Ok(again) = read.emit()
        {
            prop_assert_eq!(Message::parse(&again), Ok(read));
        }
    }

    #[test]
    fn noise_is_read_or_refused(first in any::<u8>(), noise in octets(400)) {
        let _ = Message::parse(&noise);
        if let Ok(payloads) = parse_payloads(first.into(), &noise) {
            prop_assert!(payloads.len() <= payload::MAX_PAYLOADS);
        }
    }

    #[test]
    fn associated_data_ends_where_the_body_starts(
        header in header(),
        outside in vec(payload(), 0..3),
        closed in closed(),
    ) {
        let mut payloads = outside;
        payloads.push(closed);
        let wire = Message { header, payloads }.emit().unwrap();
        let aad_and_body = match Message::parse(&wire).unwrap().payloads.pop() {
            Some(Payload::Sk(sk)) => [sk.aad(&wire), &sk.body].concat(),
            Some(Payload::Skf(skf)) => [skf.aad(&wire), &skf.body].concat(),
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        };
        prop_assert_eq!(aad_and_body, wire);
    }
}

const INIT: Header = Header {
    spi_i: 0x0102_0304_0506_0708,
    spi_r: 0,
    exchange: ExchangeType::IkeSaInit,
    flags: Flags {
        initiator: true,
        response: false,
        higher_version: false,
    },
    message_id: 0,
};

fn init_request() -> Message {
    let transforms = vec![
        Transform::Encryption {
            id: EncryptionId::AesCbc,
            key_bits: Some(128),
        },
        Transform::Integrity(IntegrityId::HmacSha2_256_128),
        Transform::Prf(PrfId::HmacSha2_256),
        Transform::KeyExchange(KeyExchangeId::Curve25519),
    ];
    let proposal = SaProposal {
        number: 1,
        spi: Vec::new(),
        proposal: Proposal {
            protocol: ProtocolId::Ike,
            transforms,
        },
    };
    let natd = |notify_type| Payload::Notify(NotifyPayload::new(notify_type, vec![7; 20]));
    Message {
        header: INIT,
        payloads: vec![
            Payload::Sa(SaPayload {
                proposals: vec![proposal],
            }),
            Payload::Ke(KePayload {
                method: KeyExchangeId::Curve25519,
                data: vec![9; 32],
            }),
            Payload::Nonce(NoncePayload::new(vec![3; 32]).unwrap()),
            natd(NotifyType::NatDetectionSourceIp),
            natd(NotifyType::NatDetectionDestinationIp),
        ],
    }
}

#[test]
fn a_message_reads_like_in_a_protocol_analyser() {
    let line = init_request().to_string();
    assert_eq!(
        line,
        "IKE_SA_INIT request 0 [ SA KE No N(NATD_S_IP) N(NATD_D_IP) ]"
    );
}

#[test]
fn the_octets_are_those_of_the_specification() {
    let mut message = init_request();
    message.payloads.truncate(1);
    let wire = message.emit().unwrap();
    let header = [
        1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 33, 0x20, 34, 0x08, 0, 0, 0, 0, 0, 0, 0, 76,
    ];
    let sa = [
        0, 0, 0, 48, // generic header
        0, 0, 0, 44, 1, 1, 0, 4, // proposal 1, IKE, four transforms
        3, 0, 0, 12, 1, 0, 0, 12, 0x80, 14, 0, 128, // AES-CBC-128
        3, 0, 0, 8, 3, 0, 0, 12, // HMAC-SHA2-256-128
        3, 0, 0, 8, 2, 0, 0, 5, // PRF-HMAC-SHA2-256
        0, 0, 0, 8, 4, 0, 0, 31, // Curve25519
    ];
    assert_eq!(wire, [header.as_slice(), &sa].concat());
}

#[test]
fn another_major_version_is_told_apart_with_its_header() {
    let mut wire = init_request().emit().unwrap();
    wire[17] = 0x10;
    let error = Message::parse(&wire).unwrap_err();
    assert_eq!(
        error,
        WireError::MajorVersion {
            major: 1,
            header: INIT
        }
    );
    assert_eq!(error.notify(), Some(NotifyType::InvalidMajorVersion));
}

#[test]
fn a_higher_minor_version_is_accepted() {
    let mut wire = init_request().emit().unwrap();
    wire[17] = 0x2f;
    assert_eq!(Message::parse(&wire), Ok(init_request()));
}

#[test]
fn a_malformed_payload_is_invalid_syntax() {
    let mut wire = init_request().emit().unwrap();
    let last_payload = wire.len() - 28;
    wire[last_payload + 3] = 3;
    let error = Message::parse(&wire).unwrap_err();
    assert_eq!(error.notify(), Some(NotifyType::InvalidSyntax));
}

#[test]
fn an_unknown_critical_payload_is_reported_and_an_uncritical_one_is_not() {
    let unknown = |critical| {
        Payload::Unknown(UnknownPayload {
            payload_type: 200,
            critical,
            data: vec![1],
        })
    };
    assert_eq!(unsupported_critical(&[unknown(false)]), None);
    assert_eq!(
        unsupported_critical(&[unknown(false), unknown(true)]),
        Some(200)
    );
}

#[test]
fn the_critical_bit_of_a_known_payload_is_ignored() {
    let mut wire = init_request().emit().unwrap();
    wire[HEADER_LEN + 1] = 0x80;
    assert_eq!(Message::parse(&wire), Ok(init_request()));
}

#[test]
fn an_encrypted_payload_inside_another_is_refused() {
    let sk = Payload::Sk(SkPayload {
        first: PayloadType::None,
        body: vec![0; 40],
    });
    let mut wire = Vec::new();
    let first = emit_payloads(&[sk], PayloadType::None, &mut wire).unwrap();
    assert!(parse_payloads(first, &wire).is_err());
}

#[test]
fn octets_after_an_encrypted_payload_are_refused() {
    let sk = Payload::Sk(SkPayload {
        first: PayloadType::None,
        body: vec![0; 40],
    });
    let mut wire = Message {
        header: INIT,
        payloads: vec![sk],
    }
    .emit()
    .unwrap();
    wire.extend_from_slice(&[0, 0, 0, 4]);
    message::write_length(&mut wire).unwrap();
    assert!(Message::parse(&wire).is_err());
}

#[test]
fn too_many_payloads_are_refused() {
    let payloads = vec![Payload::Vendor(VendorPayload(Vec::new())); payload::MAX_PAYLOADS + 1];
    let wire = Message {
        header: INIT,
        payloads,
    }
    .emit()
    .unwrap();
    assert!(matches!(
        Message::parse(&wire),
        Err(WireError::TooMany { .. })
    ));
}

#[test]
fn a_transform_with_an_unknown_attribute_can_not_be_chosen() {
    let mut message = init_request();
    message.payloads.truncate(1);
    let mut wire = message.emit().unwrap();
    // The attribute type of the key length becomes one that nobody knows.
    wire[49] = 99;
    let Payload::Sa(sa) = Message::parse(&wire).unwrap().payloads.remove(0) else {
        panic!("not an SA payload");
    };
    assert_eq!(
        sa.proposals[0].proposal.transforms[0],
        Transform::Unknown {
            transform_type: 1,
            id: 12
        }
    );
    message.payloads = vec![Payload::Sa(sa)];
    assert!(matches!(message.emit(), Err(WireError::Malformed { .. })));
}

#[test]
fn a_selector_of_an_unknown_type_is_left_out() {
    let known = TsPayload(vec![TrafficSelector::any_v4()]);
    let mut wire = Vec::new();
    emit_payloads(&[Payload::TsI(known.clone())], PayloadType::None, &mut wire).unwrap();
    wire[4] = 2;
    wire.extend_from_slice(&[10, 0, 0, 8, 0, 4, 0x61, 0x62]);
    wire[3] += 8;
    assert_eq!(
        parse_payloads(PayloadType::TsI, &wire),
        Ok(vec![Payload::TsI(known)])
    );
}

#[test]
fn a_payload_that_does_not_fit_is_not_written() {
    let cert = CertPayload {
        encoding: CertEncoding::X509Signature,
        data: vec![0; 65_535],
    };
    let message = Message {
        header: INIT,
        payloads: vec![Payload::Cert(cert)],
    };
    assert!(matches!(message.emit(), Err(WireError::TooLong { .. })));
}

#[test]
fn certificate_authorities_are_told_apart() {
    let certreq = CertReqPayload {
        encoding: CertEncoding::X509Signature,
        authorities: [[1_u8; 20], [2; 20]].concat(),
    };
    let hashes: Vec<_> = certreq.key_hashes().collect();
    assert_eq!(hashes, [&[1_u8; 20], &[2; 20]]);
}
