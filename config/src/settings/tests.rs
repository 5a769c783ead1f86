// SPDX-License-Identifier: Apache-2.0 OR MIT

use proptest::prelude::*;

use super::reference::{CHARON, FIXED, OWN};
use super::*;
use crate::files::MemoryFiles;

/// `a.b.c = value` as nested sections.
fn nested(root: &str, key: &str, value: &str) -> String {
    let mut sections: Vec<_> = key.split('.').collect();
    let key = sections.pop().unwrap();
    let open: String = sections.iter().map(|name| format!("{name} {{ ")).collect();
    let close = "}".repeat(sections.len());
    format!("{root} {{ {open}{key} = \"{value}\" {close} }}")
}

#[test]
fn every_setting_of_the_reference_is_honoured_and_has_the_stated_default() {
    for (root, rows) in [("charon", CHARON), ("swanherd", OWN)] {
        for row in rows.iter().filter(|row| !row.default.is_empty()) {
            let text = nested(root, row.key, row.default);
            let (settings, warnings) = parse_settings(text.as_bytes()).unwrap();
            assert!(warnings.is_empty(), "{text}: {warnings:?}");
            assert_eq!(settings, Settings::default(), "{text}");
        }
    }
}

#[test]
fn a_setting_with_one_value_warns_of_any_other_and_says_why() {
    for row in FIXED {
        let text = nested("charon", row.key, row.default);
        let (settings, warnings) = parse_settings(text.as_bytes()).unwrap();
        assert!(warnings.is_empty(), "{text}: {warnings:?}");
        assert_eq!(settings, Settings::default(), "{text}");

        let text = nested("charon", row.key, "7");
        let (settings, warnings) = parse_settings(text.as_bytes()).unwrap();
        let [warning] = &warnings[..] else {
            panic!("{text}: {warnings:?}");
        };
        assert!(warning.message.contains(row.key), "{warning:?}");
        assert!(warning.message.ends_with(row.meaning), "{warning:?}");
        assert_eq!(settings, Settings::default(), "{text}");
    }
}

#[test]
fn the_documentation_has_the_reference() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/settings.md");
    let text = std::fs::read_to_string(page).unwrap();
    assert!(
        text.contains(&reference()),
        "put this into docs/settings.md:\n{}",
        reference()
    );
}

#[test]
fn values_reach_their_settings() {
    let text = b"charon {
        port = 5000
        retransmit_timeout = 0.5
        retransmit_base = 1.25
        dos_protection = no
        user = vpn
        install_virtual_ip = no
        filelog { main { path = /var/log/x.log
            default = 2
            ike = 3
            flush_line = yes
            append = no
            ike_name = no
            time_format = %b %e %T
            time_add_ms = yes
        }
        stderr { default = -1
        } }
        plugins { vici { socket = unix:///run/x.vici
        } }
    }
    charon-systemd { port_nat_t = 5001 }
    swanherd { dataplane = tun
        config = /etc/x.conf
        log { format = json }
        metrics { listen = off }
        reconcile_interval = 5m
        updown_timeout = 1m
        spd_hash = no
    }";
    let (settings, warnings) = parse_settings(text).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!((settings.port, settings.port_nat_t), (5000, 5001));
    assert_eq!(settings.ike.retransmit_timeout, Duration::from_millis(500));
    assert_eq!(settings.ike.retransmit_base_milli, 1250);
    assert_eq!(settings.ike.cookie_threshold, 0);
    assert_eq!(settings.user.as_deref(), Some("vpn"));
    assert_eq!(settings.filelogs[0].path, Path::new("/var/log/x.log"));
    assert_eq!(settings.filelogs[0].groups["ike"], 3);
    let main = &settings.filelogs[0];
    assert!(!main.append && !main.ike_name);
    assert_eq!(main.time_format.as_deref(), Some("%b %e %T"));
    assert_eq!(main.time_precision, TimePrecision::Milliseconds);
    assert_eq!(settings.filelogs[1].path, Path::new("stderr"));
    assert_eq!(settings.vici_socket, "unix:///run/x.vici");
    assert_eq!(settings.dataplane, DataPlaneChoice::Tun);
    assert_eq!(settings.log.format, LogFormat::Json);
    assert_eq!(settings.metrics.listen, None);
    assert_eq!(settings.reconcile_interval, Duration::from_secs(300));
    assert_eq!(settings.updown_timeout, Duration::from_secs(60));
    assert!(!settings.spd_hash && !settings.install_virtual_ip);
}

#[test]
fn a_charon_setting_that_is_not_honoured_is_one_warning() {
    let text = b"charon { threads = 8\n prot = 1\n load_modular = yes\n plugins { aes { load = yes\n } } }\npki { x = 1 }";
    let (_, warnings) = parse_settings(text).unwrap();
    let keys: Vec<_> = warnings.iter().map(|w| w.key.as_deref().unwrap()).collect();
    assert_eq!(keys, ["threads", "prot"]);
    assert_eq!(warnings[1].help.as_deref(), Some("did you mean `port`?"));
}

#[test]
fn an_invalid_charon_value_is_a_warning_and_keeps_the_default() {
    let text = b"charon { port = x\n retransmit_base = 0.5\n plugins { vici { socket = tcp://192.0.2.1:1 } } }";
    let (settings, warnings) = parse_settings(text).unwrap();
    assert_eq!(warnings.len(), 3);
    assert_eq!(settings, Settings::default());
}

#[test]
fn an_own_setting_that_is_unknown_or_invalid_is_an_error_with_its_place() {
    for (text, line, help) in [
        (
            "swanherd {\n dataplan = tun\n}",
            2,
            Some("did you mean `dataplane`?"),
        ),
        (
            "swanherd {\n metrcis { }\n}",
            2,
            Some("did you mean `metrics`?"),
        ),
        (
            "swanherd {\n metrics {\n lissten = off\n}\n}",
            3,
            Some("did you mean `metrics.listen`?"),
        ),
        ("swanherd { dataplane = fast\n}", 1, None),
        ("swanherd { tun { mtu = 100\n} }", 1, None),
        ("swanherd { reconcile_interval = 1s\n}", 1, None),
        ("swanherd { updown_timeout = 0\n}", 1, None),
        ("swanherd { spd_hash = 32\n}", 1, None),
    ] {
        let error = parse_settings(text.as_bytes()).unwrap_err();
        assert_eq!(error.location.as_ref().unwrap().line, line, "{text}");
        if help.is_some() {
            assert_eq!(error.help.as_deref(), help, "{text}");
        }
    }
}

#[test]
fn vici_may_listen_on_the_loopback() {
    let text = b"charon { plugins { vici { socket = tcp://[::1]:4502\n } } }";
    let (settings, warnings) = parse_settings(text).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(settings.vici_socket, "tcp://[::1]:4502");
}

#[test]
fn vici_over_tls_is_whole_or_not_at_all() {
    let parse =
        |text: &str| parse_settings(format!("swanherd {{ vici {{ {text}\n}} }}").as_bytes());
    let files = "tls_cert = /c.pem\n tls_key = /k.pem\n tls_client_ca = /ca.pem";

    let whole = parse(&format!("tls_listen = [::]:4503\n {files}")).unwrap();
    let off = parse(files).unwrap();
    let half = parse("tls_listen = [::]:4503\n tls_cert = /c.pem\n tls_key = /k.pem").unwrap_err();
    let relative = parse("tls_key = k.pem").unwrap_err();
    let name = parse("tls_listen = gw:4503").unwrap_err();

    let tls = whole.0.vici_tls.unwrap();
    assert_eq!(tls.listen, "[::]:4503".parse().unwrap());
    assert_eq!(tls.client_ca, Path::new("/ca.pem"));
    assert_eq!(off.0.vici_tls, None);
    assert!(half.message.contains("tls_client_ca") && half.location.is_some());
    assert!(relative.message.contains("absolute"));
    assert!(name.message.contains("ADDRESS:PORT"));
}

#[test]
fn metrics_off_the_loopback_need_tls() {
    let parse =
        |text: &str| parse_settings(format!("swanherd {{ metrics {{ {text}\n}} }}").as_bytes());

    let open = parse("listen = 192.0.2.1:80").unwrap_err();
    let half = parse("tls_key = /etc/k.pem").unwrap_err();
    let tls =
        parse("listen = 192.0.2.1:80\n tls_cert = /etc/c.pem\n tls_key = /etc/k.pem").unwrap();

    assert!(open.message.contains("TLS") && open.location.is_some());
    assert!(half.message.contains("both"));
    assert_eq!(
        tls.0.metrics.tls_key.as_deref(),
        Some(Path::new("/etc/k.pem"))
    );
}

#[test]
fn the_default_file_may_be_missing_and_no_other() {
    let files = MemoryFiles::new();
    let (settings, _) = load_settings_from(Path::new(DEFAULT_STRONGSWAN_CONF), &files).unwrap();
    assert_eq!(settings, Settings::default());
    assert!(load_settings_from(Path::new("/x.conf"), &files).is_err());
}

#[test]
fn the_environment_decides_where_the_files_are() {
    assert_eq!(strongswan_conf(None), Path::new("/etc/strongswan.conf"));
    assert_eq!(
        strongswan_conf(Some("".into())),
        Path::new("/etc/strongswan.conf")
    );
    assert_eq!(strongswan_conf(Some("/x".into())), Path::new("/x"));
    assert_eq!(swanctl_conf(None), Path::new("/etc/swanctl/swanctl.conf"));
    assert_eq!(
        swanctl_conf(Some("/x".into())),
        Path::new("/x/swanctl.conf")
    );
}

proptest! {
    #[test]
    fn any_value_is_taken_or_refused(row in 0..CHARON.len() + OWN.len(), value in "[ -~&&[^\"\\\\]]{0,12}") {
        let (root, row) = match CHARON.get(row) {
            Some(row) => ("charon", row),
            None => ("swanherd", &OWN[row - CHARON.len()]),
        };
        let _ = parse_settings(nested(root, row.key, &value).as_bytes());
    }
}
