// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::fs;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};
use swanherd_config::diagnostic::Level;
use swanherd_config::load_swanctl;

use super::*;

struct Dir(tempfile::TempDir);

impl Dir {
    fn new(config: &str) -> Self {
        let dir = Self(tempfile::tempdir().unwrap());
        dir.write("swanctl.conf", config);
        dir
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn found(&self) -> Vec<(Level, &'static str, String)> {
        let loaded = load_swanctl(&self.path("swanctl.conf")).unwrap();
        examine(&loaded)
            .into_iter()
            .map(|d| (d.level, d.code, d.to_string()))
            .collect()
    }

    fn codes(&self) -> Vec<&'static str> {
        self.found().into_iter().map(|(_, code, _)| code).collect()
    }
}

/// A certificate and its key, both PEM.
fn certified(name: &str, change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    change(&mut params);
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

const CONFIG: &str = "connections { a { local { certs = gw.pem\n id = gw.example.org\n } } }\n";

#[test]
fn a_certificate_that_fits_its_key_and_identity_is_fine() {
    let (certificate, key) = certified("gw.example.org", |_| ());
    let dir = Dir::new(CONFIG);
    dir.write("x509/gw.pem", &certificate);
    dir.write("private/gw.pem", &key);
    assert_eq!(dir.found(), []);
}

#[test]
fn a_certificate_without_key_or_of_another_name_is_told() {
    let (certificate, _) = certified("other.example.org", |_| ());
    let dir = Dir::new(CONFIG);
    dir.write("x509/gw.pem", &certificate);
    assert_eq!(dir.codes(), ["no-private-key", "id-not-in-certificate"]);
    let found = dir.found();
    assert!(found[0].2.contains("swanctl.conf:1:"), "{found:?}");
    assert!(found[1].2.contains("other.example.org"), "{found:?}");
}

#[test]
fn times_of_certificates_are_looked_at() {
    let dir = Dir::new("");
    let (expired, _) = certified("a", |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    let (future, _) = certified("b", |params| {
        params.not_before = date_time_ymd(2400, 1, 1);
        params.not_after = date_time_ymd(2401, 1, 1);
    });
    dir.write("x509/a.pem", &expired);
    dir.write("x509/b.pem", &future);
    let found = dir.found();
    assert_eq!(
        dir.codes(),
        ["certificate-validity", "certificate-validity"]
    );
    assert!(found[0].2.contains("has expired"), "{found:?}");
    assert!(found[1].2.contains("not valid yet"), "{found:?}");
}

#[test]
fn what_is_no_credential_is_an_error() {
    let (leaf, _) = certified("a", |_| ());
    let (authority, _) = certified("b", |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    let dir = Dir::new("");
    dir.write("x509ca/ca.pem", &authority);
    assert_eq!(dir.found(), []);
    dir.write("x509ca/leaf.pem", &leaf);
    dir.write("private/bad.pem", "no key");
    let found = dir.found();
    assert_eq!(dir.codes(), ["unusable-credential", "unusable-credential"]);
    assert!(found.iter().all(|(level, ..)| *level == Level::Error));
}

#[test]
fn secrets_that_everybody_can_read_are_told() {
    let dir = Dir::new("secrets { ike-a { id = a\n secret = a-long-secret\n } }\n");
    assert!(!dir.codes().contains(&"file-mode"));
    let path = dir.path("swanctl.conf");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(dir.codes().contains(&"file-mode"));
}

#[test]
fn proposals_that_cannot_be_agreed_upon_are_an_error_if_there_is_no_other() {
    for (proposals, expected) in [
        ("aes128-sha256-x25519", None),
        ("aes128-sha256-ecp521", Some(Level::Error)),
        ("aes128-sha256-ecp521-x25519", None),
        (
            "aes128-sha256-ecp521, aes128-sha256-x25519",
            Some(Level::Warning),
        ),
        ("aes128-sha256-x25519-ke1_mlkem768", Some(Level::Error)),
        ("camellia128-sha256-x25519", Some(Level::Error)),
    ] {
        let dir = Dir::new(&format!(
            "connections {{ a {{ proposals = {proposals}\n }} }}\n"
        ));
        let found = dir.found();
        let level = found
            .iter()
            .find(|(_, code, _)| *code == "impossible-proposal")
            .map(|(level, ..)| *level);
        assert_eq!(level, expected, "{proposals}: {found:?}");
    }
    let dir =
        Dir::new("connections { a { children { n { esp_proposals = aes128gcm16-ecp521\n } } } }\n");
    assert_eq!(dir.codes(), ["impossible-proposal"]);
}
