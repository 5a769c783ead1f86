// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections and credentials for the tests.

use std::net::IpAddr;
use std::time::Duration;

use swanherd_config::identity::IdentityPattern;
use swanherd_config::model::{
    Action, AuthMethod, AuthRound, Child, ChildMode, Childless, Connection, CopyDscp,
    Fragmentation, HostSpec, HwOffload, IfId, IkeVersion, MarkSpec, Revocation, SelectorSpec,
    SendCert, SharedKind, SharedSecret, Unique,
};
use swanherd_ike::credentials::Credentials;
use swanherd_ipsec::plane::Mode;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Proposal, ProtocolId, Secret, TrafficSelector, Transform};

const ZERO: Duration = Duration::ZERO;

/// An IKE proposal with AES-GCM and these key exchanges.
pub(crate) fn ike_proposal(methods: &[KeyExchangeId]) -> Proposal {
    let mut transforms = vec![
        Transform::Encryption {
            id: EncryptionId::AesGcm16,
            key_bits: Some(128),
        },
        Transform::Prf(PrfId::HmacSha2_256),
    ];
    transforms.extend(methods.iter().map(|id| Transform::KeyExchange(*id)));
    Proposal {
        protocol: ProtocolId::Ike,
        transforms,
    }
}

/// An IKE proposal with AES-CBC, HMAC-SHA-256 and X25519.
pub(crate) fn ike_proposal_cbc() -> Proposal {
    Proposal {
        protocol: ProtocolId::Ike,
        transforms: vec![
            Transform::Encryption {
                id: EncryptionId::AesCbc,
                key_bits: Some(256),
            },
            Transform::Integrity(IntegrityId::HmacSha2_256_128),
            Transform::Prf(PrfId::HmacSha2_256),
            Transform::KeyExchange(KeyExchangeId::Curve25519),
        ],
    }
}

/// An ESP proposal with AES-GCM and these key exchanges.
pub(crate) fn esp_proposal(methods: &[KeyExchangeId]) -> Proposal {
    let mut transforms = vec![Transform::Encryption {
        id: EncryptionId::AesGcm16,
        key_bits: Some(128),
    }];
    transforms.extend(methods.iter().map(|id| Transform::KeyExchange(*id)));
    transforms.push(Transform::Esn(false));
    Proposal {
        protocol: ProtocolId::Esp,
        transforms,
    }
}

pub(crate) fn network(text: &str) -> TrafficSelector {
    let (addr, len) = text.split_once('/').unwrap();
    TrafficSelector::network(addr.parse().unwrap(), len.parse().unwrap()).unwrap()
}

/// A child with everything that starts or ends things by itself switched off.
pub(crate) fn child(name: &str, local: &str, remote: &str) -> Child {
    Child {
        name: name.to_owned(),
        proposals: vec![esp_proposal(&[])],
        local_ts: vec![SelectorSpec::Fixed(network(local))],
        remote_ts: vec![SelectorSpec::Fixed(network(remote))],
        rekey_time: ZERO,
        life_time: ZERO,
        rand_time: ZERO,
        rekey_bytes: 0,
        life_bytes: 0,
        rand_bytes: 0,
        rekey_packets: 0,
        life_packets: 0,
        rand_packets: 0,
        updown: None,
        hostaccess: false,
        mode: ChildMode::Ipsec(Mode::Tunnel),
        policies: true,
        policies_fwd_out: false,
        dpd_action: Action::default(),
        start_action: Action::default(),
        close_action: Action::default(),
        inactivity: ZERO,
        reqid: 0,
        priority: 0,
        interface: None,
        mark_in: MarkSpec::None,
        mark_in_sa: false,
        mark_out: MarkSpec::None,
        set_mark_in: MarkSpec::None,
        set_mark_out: MarkSpec::None,
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        label: None,
        tfc_padding: Some(0),
        replay_window: None,
        hw_offload: HwOffload::No,
        copy_df: true,
        copy_ecn: true,
        copy_dscp: CopyDscp::Out,
    }
}

/// A round with an identity such as `alice.example`.
pub(crate) fn round(section: &str, auth: AuthMethod, id: &str) -> AuthRound {
    AuthRound {
        section: section.to_owned(),
        round: 0,
        auth,
        id: Some(IdentityPattern::parse(id).unwrap()),
        certs: Vec::new(),
        cacerts: Vec::new(),
        pubkeys: Vec::new(),
        ca_id: None,
        eap_id: None,
        groups: Vec::new(),
        cert_policy: Vec::new(),
        revocation: Revocation::Relaxed,
    }
}

fn connection(name: &str, ids: (&str, &str), remote: HostSpec, child: Child) -> Connection {
    Connection {
        name: name.to_owned(),
        version: IkeVersion::V2,
        local_addrs: Vec::new(),
        remote_addrs: vec![remote],
        local_port: 500,
        remote_port: 500,
        proposals: vec![ike_proposal(&[KeyExchangeId::Curve25519])],
        vips: Vec::new(),
        dscp: 0,
        encap: false,
        mobike: true,
        dpd_delay: ZERO,
        dpd_timeout: ZERO,
        fragmentation: Fragmentation::Yes,
        childless: Childless::Allow,
        send_certreq: true,
        send_cert: SendCert::IfAsked,
        ppk_id: None,
        ppk_required: false,
        keyingtries: 1,
        unique: Unique::No,
        reauth_time: ZERO,
        rekey_time: ZERO,
        over_time: Duration::from_secs(360),
        rand_time: ZERO,
        pools: Vec::new(),
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        local: vec![round("local", AuthMethod::Psk, ids.0)],
        remote: vec![round("remote", AuthMethod::Psk, ids.1)],
        children: vec![child],
    }
}

/// Alice's and Bob's sides of one connection with a pre-shared key and a child `net`.
pub(crate) fn pair() -> (Connection, Connection) {
    let addr = |text: &str| HostSpec::Addr(text.parse::<IpAddr>().unwrap());
    (
        connection(
            "to-bob",
            ("alice.example", "bob.example"),
            addr("198.51.100.1"),
            child("net", "10.1.0.0/16", "10.2.0.0/16"),
        ),
        connection(
            "to-alice",
            ("bob.example", "alice.example"),
            addr("192.0.2.1"),
            child("net", "10.2.0.0/16", "10.1.0.0/16"),
        ),
    )
}

/// One pre-shared key for everyone.
pub(crate) fn psk() -> Credentials {
    psk_of(b"correct horse battery staple")
}

pub(crate) fn psk_of(key: &[u8]) -> Credentials {
    let mut credentials = Credentials::new();
    credentials.add_shared(SharedSecret {
        id: None,
        kind: SharedKind::Ike,
        secret: Secret::copy_of(key),
        owners: Vec::new(),
    });
    credentials
}
