// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use crate::files::MemoryFiles;
use crate::grammar::parse_str;

/// Ed25519, subject `C=CH, O=Example, CN=gw`.
const CERTIFICATE: &[u8] = include_bytes!("gw.pem");

fn decode(text: &str) -> Result<Decoded<Connection>, Diagnostic> {
    let parsed = parse_str("test.conf", text.as_bytes()).unwrap();
    let mut files = MemoryFiles::new();
    files.insert("/s/x509/gw.pem", CERTIFICATE);
    files.insert("/s/x509/bad.pem", "CERT");
    decode_connection(
        "c1",
        &parsed.tree,
        Origin::File {
            dir: Path::new("/s"),
            files: &files,
        },
        &Names::builtin(),
    )
}

#[test]
fn defaults_are_strongswans() {
    let connection = decode("children { net { } }").unwrap().value;
    assert_eq!(connection.rekey_time, Duration::from_secs(14_400));
    assert_eq!(connection.over_time, Duration::from_secs(1_440));
    assert_eq!(connection.rand_time, Duration::from_secs(1_440));
    let child = &connection.children[0];
    assert_eq!(child.rekey_time, Duration::from_secs(3_600));
    assert_eq!(child.life_time, Duration::from_secs(3_960));
    assert_eq!(child.rand_time, Duration::from_secs(360));
    assert_eq!(connection.local.len(), 1);
    assert_eq!(connection.remote[0].auth, AuthMethod::Any);
}

#[test]
fn reauthentication_switches_rekeying_off_unless_that_is_given() {
    let connection = decode("reauth_time = 1h").unwrap().value;
    assert_eq!(connection.rekey_time, Duration::ZERO);
    assert_eq!(connection.over_time, Duration::from_secs(360));
}

#[test]
fn limits_follow_from_each_other() {
    let child = decode("children { n { life_time = 11h\n rekey_packets = 1000\n rekey_bytes = 0xffffffffffffffff\n } }")
        .unwrap()
        .value
        .children
        .remove(0);
    assert_eq!(child.rekey_time, Duration::from_secs(36_000));
    assert_eq!((child.life_packets, child.rand_packets), (1100, 100));
    assert_eq!(child.life_bytes, u64::MAX);
}

#[test]
fn no_hard_limit_leaves_rekeying_as_it_is() {
    let child = decode("children { n { life_time = 0\n } }")
        .unwrap()
        .value
        .children
        .remove(0);
    assert_eq!(child.rekey_time, Duration::from_secs(3_600));
    assert_eq!(child.life_time, Duration::ZERO);
    assert_eq!(child.rand_time, Duration::ZERO);
}

#[test]
fn without_an_id_the_certificates_subject_is_the_identity() {
    let connection = decode("local { certs = gw.pem\n }").unwrap().value;
    let id = connection.local[0].id.as_ref().unwrap();
    assert_eq!(id.to_string(), "C=CH, O=Example, CN=gw");
}

#[test]
fn certificates_by_path_are_read_or_refused_with_the_stock_text() {
    let connection = decode("local { cert { file = /s/x509/gw.pem\n } }")
        .unwrap()
        .value;
    assert_eq!(
        connection.local[0].certs,
        [CertSource::Data(CERTIFICATE.to_vec())]
    );
    for file in ["/missing", "/s/x509/bad.pem"] {
        let error = decode(&format!("remote {{ cacert1 {{ file = {file}\n }} }}")).unwrap_err();
        assert_eq!(error.vici_text(), "unable to load certificate: cacert1");
    }
}

#[test]
fn switching_reauthentication_off_explicitly_warns_that_rekeying_goes_with_it() {
    let decoded = decode("reauth_time = 0").unwrap();
    assert_eq!(decoded.value.rekey_time, Duration::ZERO);
    assert_eq!(decoded.warnings[0].code, "never-rekeyed");
}

#[test]
fn every_error_of_a_connection_is_found_and_the_first_is_what_strongswan_would_find() {
    let parsed = parse_str(
        "test.conf",
        b"mobike = on
local {
 auth = pks
 id = a
}
children {
 net {
  rekeytime = 1h
  mode = x
  local_ts = 10.0.0.1/8
 }
}",
    )
    .unwrap();
    let refusal = decode_whole_connection("c1", &parsed.tree, Origin::Message, &Names::builtin())
        .unwrap_err();
    assert_eq!(refusal.first.key.as_deref(), Some("mobike"));
    let others: Vec<_> = refusal
        .others
        .iter()
        .map(|d| (d.path.as_str(), d.key.as_deref().unwrap_or_default()))
        .collect();
    assert_eq!(
        others,
        [
            ("connections.c1.local", "auth"),
            ("connections.c1.children.net", "rekeytime"),
            ("connections.c1.children.net", "mode"),
            ("connections.c1.children.net", "local_ts"),
        ]
    );
}

#[test]
fn the_errors_of_a_connection_are_bounded() {
    let text = (0..10_000)
        .map(|n| format!("x{n} = 1\n"))
        .collect::<String>();
    let parsed = parse_str("test.conf", text.as_bytes()).unwrap();
    let refusal = decode_whole_connection("c1", &parsed.tree, Origin::Message, &Names::builtin())
        .unwrap_err();
    assert_eq!(refusal.others.len() + 1, MAX_ERRORS);
}

#[test]
fn certificates_are_read_from_their_directory() {
    let connection = decode("local { certs = gw.pem\n pubkeys = 0x3000\n }")
        .unwrap()
        .value;
    assert_eq!(
        connection.local[0].certs,
        [CertSource::Data(CERTIFICATE.to_vec())]
    );
    assert_eq!(
        connection.local[0].pubkeys,
        [CertSource::Data(vec![0x30, 0])]
    );
    let listed = crate::listing::list_conn(&connection, &Names::builtin());
    let Some(Item::List(certs)) = listed
        .section("c1")
        .and_then(|connection| connection.section("local-1"))
        .and_then(|round| round.get("certs"))
    else {
        panic!("certs are listed");
    };
    assert_eq!(certs[0].text(), Some("C=CH, O=Example, CN=gw"));
    let error = decode("local { certs = bad.pem\n }").unwrap_err();
    assert!(
        error.message.contains("not an X.509 certificate"),
        "{error}"
    );
    let error = decode("local { certs = missing.pem\n }").unwrap_err();
    assert_eq!(error.path, "connections.c1.local");
    assert!(error.message.contains("/s/x509/missing.pem"));
}

#[test]
fn errors_have_the_stock_text_the_place_and_a_suggestion() {
    let error = decode("version = 2\nchildren {\n net {\n  rekeytime = 1h\n }\n}").unwrap_err();
    assert_eq!(
        error.vici_text(),
        "unknown option: rekeytime, config discarded"
    );
    assert_eq!(error.path, "connections.c1.children.net");
    let place = error.location.as_ref().unwrap();
    assert_eq!((place.line, place.column), (4, 3));
    assert_eq!(error.help.as_deref(), Some("did you mean `rekey_time`?"));
    let shown = error.render(false);
    assert!(shown.contains("test.conf:4:3"), "{shown}");
    assert!(shown.contains("rekeytime = 1h"), "{shown}");
}

#[test]
fn stock_texts_are_exact() {
    for (text, stock) in [
        ("mobike = on", "invalid value for: mobike, config discarded"),
        ("fooo = 1", "unknown option: fooo, config discarded"),
        ("kids { }", "invalid section: kids"),
        ("children { n { x { } } }", "invalid section: x"),
        ("local { cert1 { } }", "handle or file path missing: cert1"),
        (
            "local { cert1 { file = a\n handle = b\n } }",
            "handle and file path given: cert1",
        ),
        (
            "children { n { start_action = route-start\n } }",
            "invalid value for: start_action, config discarded",
        ),
        (
            "local { auth = pks\n }",
            "invalid value for: auth, config discarded",
        ),
        (
            "local { id = \"C=CH, O=B\u{fc}ro\"\n }",
            "invalid value for: id, config discarded",
        ),
    ] {
        assert_eq!(decode(text).unwrap_err().vici_text(), stock, "{text}");
    }
}

#[test]
fn in_messages_lists_are_lists_and_certificates_are_contents() {
    let names = Names::builtin();
    let mut local = Tree::new();
    local.push_list("certs", [Value::new(CERTIFICATE)]);
    let mut message = Tree::new();
    message
        .push_list("proposals", ["aes128-sha256-x25519"])
        .push_section("local", local);
    let connection = decode_connection("c1", &message, Origin::Message, &names)
        .unwrap()
        .value;
    assert_eq!(connection.proposals.len(), 1);
    assert_eq!(
        connection.local[0].certs,
        [CertSource::Data(CERTIFICATE.to_vec())]
    );

    let mut message = Tree::new();
    message.push_value("proposals", "default");
    let error = decode_connection("c1", &message, Origin::Message, &names).unwrap_err();
    assert_eq!(
        error.vici_text(),
        "unknown option: proposals, config discarded"
    );

    let mut message = Tree::new();
    message.push_list("version", ["2"]);
    let error = decode_connection("c1", &message, Origin::Message, &names).unwrap_err();
    assert_eq!(
        error.vici_text(),
        "unknown option: version, config discarded"
    );
}
