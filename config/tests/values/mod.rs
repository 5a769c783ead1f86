// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Values that listings do not show.

use std::time::Duration;

use swanherd_config::model::{
    Action, Child, ChildMode, Connection, CopyDscp, HwOffload, IfId, MarkSpec,
};
use swanherd_ipsec::Transform;
use swanherd_ipsec::plane::Mark;
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};

use super::load;

fn connection(case: &str) -> Connection {
    let mut loaded = load(case).unwrap();
    loaded.connections.remove(0).1.unwrap()
}

fn child(case: &str) -> Child {
    connection(case).children.remove(0)
}

fn secret(case: &str) -> Vec<u8> {
    load(case).unwrap().secrets[0].secret.expose().to_vec()
}

#[test]
fn options_of_children_have_their_values() {
    assert_eq!(
        child("k00_mark").mark_in,
        MarkSpec::Mark(Mark {
            value: 0x2a,
            mask: 0xff
        })
    );
    assert_eq!(
        child("k01_mark_dec").mark_out,
        MarkSpec::Mark(Mark {
            value: 42,
            mask: u32::MAX
        })
    );
    assert_eq!(child("k02_mark_unique").mark_in, MarkSpec::Unique(u32::MAX));
    let both = Action {
        trap: true,
        start: true,
    };
    assert_eq!(child("k03_start_trapstart").start_action, both);
    assert!(child("k05_start_restart").start_action.start);
    assert_eq!(child("k09_mode_pass").mode, ChildMode::Pass);
    let bytes = child("k11_bytes");
    assert_eq!(
        (bytes.rekey_bytes, bytes.life_bytes, bytes.rand_bytes),
        (102_400_000, 112_640_000, 10_240_000)
    );
    assert_eq!(child("k15_reqid").reqid, 7);
    assert_eq!(child("k16_replay0").replay_window, Some(0));
    assert_eq!(child("k17_replaybig").replay_window, Some(4096));
    assert_eq!(child("k18_tfc_mtu").tfc_padding, None);
    assert_eq!(child("k19_hw_yes").hw_offload, HwOffload::Crypto);
    assert_eq!(child("k20_hw_packet").hw_offload, HwOffload::Packet);
    assert_eq!(child("k22_setmark").set_mark_out, MarkSpec::Same(u32::MAX));
    assert_eq!(child("k23_copydscp").copy_dscp, CopyDscp::Out);
    assert_eq!(
        child("k24_updown").updown.as_deref(),
        Some("/bin/true %any x")
    );
    assert_eq!(child("k25_if_same").if_id_out, IfId::UniqueDir);
    assert_eq!(child("k26_inact").inactivity, Duration::from_secs(1800));
}

#[test]
fn options_of_connections_have_their_values() {
    assert_eq!(connection("m12_keytries0").keyingtries, 0);
    assert_eq!(connection("m13_ifid_hex").if_id_in, IfId::Id(0x2a));
    assert_eq!(connection("m14_ifid_unique").if_id_in, IfId::Unique);
    for case in ["m18_bool_true", "m19_bool_1", "m20_bool_enabled"] {
        assert!(connection(case).mobike, "{case}");
    }
    assert!(connection("m21_encap").encap);
    assert_eq!(connection("m22_dscp").dscp, 46);
    assert!(!connection("p15_dup_key_last_wins").mobike);
    assert!(!connection("p16_inherit_ref").mobike);
    let rekey = connection("m00_time_m");
    assert_eq!(rekey.over_time, Duration::from_secs(396));
}

#[test]
fn secrets_have_their_octets() {
    for (case, octets) in [
        ("p03_hash_unquoted_in_secret", b"abc".as_slice()),
        ("p05_quoted_hash_brace_escape", b"a#b}c\"d\\e"),
        ("s00_hex", &[1, 2, 255]),
        ("s01_hex_odd", &[1, 2]),
        ("s03_b64", b"ABC"),
        ("s05_HEX", b"A"),
        ("s08_spaces", b"two words"),
        ("s09_quoted", b" lead and trail "),
        ("s15_dup", b"two"),
        ("s16_number", b"12345"),
    ] {
        assert_eq!(secret(case), octets, "{case}");
    }
    let owners = |case| -> Vec<String> {
        load(case).unwrap().secrets[0]
            .owners
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    assert_eq!(owners("s10_ids"), ["gw.example.org", "peer.example.org"]);
    assert_eq!(owners("s11_idlist"), ["a.example.org,b.example.org"]);
    assert!(owners("s12_underscore").is_empty());
}

#[test]
fn proposals_have_their_transforms() {
    let aes = |id, bits| Transform::Encryption {
        id,
        key_bits: Some(bits),
    };
    let ike = |case| connection(case).proposals.remove(0).transforms;
    assert_eq!(
        ike("x03_gcm_sha"),
        [
            aes(EncryptionId::AesGcm16, 256),
            Transform::KeyExchange(KeyExchangeId::Ecp256),
            Transform::Prf(PrfId::HmacSha2_256)
        ]
    );
    assert_eq!(
        ike("x04_cbc"),
        [
            aes(EncryptionId::AesCbc, 256),
            Transform::Integrity(IntegrityId::HmacSha2_256_128),
            Transform::KeyExchange(KeyExchangeId::Modp2048),
            Transform::Prf(PrfId::HmacSha2_256)
        ]
    );
    assert!(ike("x14_aesxcbc").contains(&Transform::Prf(PrfId::Aes128Xcbc)));
    assert_eq!(connection("x07_list_default").proposals.len(), 3);
    assert_eq!(connection("p27_empty_value").proposals.len(), 2);
    let esp = |case| child(case).proposals.remove(0).transforms;
    assert_eq!(
        esp("y01_gcm"),
        [aes(EncryptionId::AesGcm16, 128), Transform::Esn(false)]
    );
    assert_eq!(
        esp("y13_prf"),
        [aes(EncryptionId::AesGcm16, 256), Transform::Esn(false)]
    );
    assert!(esp("y12_none").contains(&Transform::KeyExchange(KeyExchangeId::None)));
    assert!(esp("y08_sha256_96").contains(&Transform::Integrity(IntegrityId::HmacSha2_256_96)));
}
