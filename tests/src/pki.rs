// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A certificate authority for one lab, made with strongSwan's own `pki`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process::run_ok;

/// A certificate authority, and the folder with what it issued.
#[derive(Debug)]
pub struct Pki {
    dir: PathBuf,
    kind: [&'static str; 2],
}

impl Pki {
    /// A new authority with a key of a type and size that `pki --gen` knows; size `""` for types
    /// that have but one.
    ///
    /// # Panics
    /// When `pki` fails.
    #[must_use]
    pub fn new(dir: &Path, kind: &'static str, size: &'static str) -> Self {
        fs::create_dir_all(dir).expect("a folder for certificates");
        let pki = Self {
            dir: dir.to_owned(),
            kind: [kind, size],
        };
        pki.key("ca");
        let key = pki.path("ca.key");
        pki.save(
            "ca.crt",
            &[
                "--self",
                "--ca",
                "--lifetime",
                "30",
                "--type",
                "priv",
                "--in",
                &key,
                "--dn",
                "C=CH, O=swanherd, CN=Test CA",
                "--outform",
                "pem",
            ],
        );
        pki
    }

    /// Issues a certificate for a host name, and installs it, its key and the authority's
    /// certificate in the folders of a `swanctl` directory.
    ///
    /// # Panics
    /// When `pki` fails.
    pub fn issue(&self, host: &str, swanctl: &Path) {
        self.key(host);
        let (key, ca_key, ca) = (
            self.path(&format!("{host}.key")),
            self.path("ca.key"),
            self.path("ca.crt"),
        );
        let certificate = format!("{host}.crt");
        self.save(
            &certificate,
            &[
                "--issue",
                "--lifetime",
                "29",
                "--type",
                "priv",
                "--in",
                &key,
                "--cacert",
                &ca,
                "--cakey",
                &ca_key,
                "--dn",
                &format!("C=CH, O=swanherd, CN={host}"),
                "--san",
                host,
                "--outform",
                "pem",
            ],
        );
        for (folder, file) in [
            ("x509ca", "ca.crt"),
            ("x509", &certificate),
            ("private", &format!("{host}.key")),
        ] {
            let folder = swanctl.join(folder);
            fs::create_dir_all(&folder).expect("a folder for credentials");
            fs::copy(self.dir.join(file), folder.join(file)).expect("a copy of a credential");
        }
    }

    /// A file of the authority's folder: `ca.crt`, `ca.key`, `HOST.crt` or `HOST.key`, as PEM.
    ///
    /// # Panics
    /// When there is none of that name.
    #[must_use]
    pub fn pem(&self, file: &str) -> String {
        fs::read_to_string(self.dir.join(file)).expect("a file of the authority")
    }

    fn key(&self, name: &str) {
        let [kind, size] = self.kind;
        let mut args = vec!["--gen", "--type", kind, "--outform", "pem"];
        if !size.is_empty() {
            args.extend(["--size", size]);
        }
        self.save(&format!("{name}.key"), &args);
    }

    fn save(&self, file: &str, args: &[&str]) {
        fs::write(self.dir.join(file), run_ok("pki", args)).expect("a certificate can be written");
    }

    fn path(&self, file: &str) -> String {
        self.dir.join(file).to_string_lossy().into_owned()
    }
}
