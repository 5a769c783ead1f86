// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A whole swanctl.conf with its credential directories.

use std::path::{Path, PathBuf};

use swanherd_ipsec::Secret;

use crate::decode::{Origin, decode_whole_connection};
use crate::diagnostic::{Diagnostic, Level, Report};
use crate::files::{Files, SystemFiles};
use crate::grammar::{Repeated, parse_file};
use crate::model::{Connection, SharedSecret};
use crate::names::Names;
use crate::secret::{Passphrase, decode_secrets};
use crate::tree::{Item, Tree, Value};

/// Everything that a swanctl.conf defines.
#[derive(Debug)]
pub struct Loaded {
    /// Connections in file order, each with its name; those in error are refused, the others hold.
    pub connections: Vec<(String, Result<Connection, Diagnostic>)>,
    /// Shared secrets.
    pub secrets: Vec<SharedSecret>,
    /// Passphrases of private keys.
    pub passphrases: Vec<Passphrase>,
    /// Certificates, by directory.
    pub certificates: Vec<Certificate>,
    /// Private keys, unencrypted.
    pub private_keys: Vec<PrivateKey>,
    /// Pools.
    pub pools: Vec<Pool>,
    /// Authorities.
    pub authorities: Vec<Authority>,
    /// Doubts, and errors about anything but connections.
    pub diagnostics: Vec<Diagnostic>,
    /// Configuration files that were read, in order.
    pub files: Vec<PathBuf>,
    /// Definitions that are begun twice.
    pub(crate) repeated_sections: Vec<Repeated>,
    /// What was read.
    pub(crate) tree: Tree,
}

/// A certificate, revocation list or public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// What it is, from its directory.
    pub kind: CertificateKind,
    /// Where it was.
    pub path: PathBuf,
    /// DER or PEM, as found.
    pub data: Vec<u8>,
}

/// What a credential directory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateKind {
    /// `x509`: end entities.
    EndEntity,
    /// `x509ca`: certification authorities.
    Authority,
}

/// A private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivateKey {
    /// Where it was.
    pub path: PathBuf,
    /// DER or PEM, as found.
    pub data: Secret,
}

/// `pools.<name>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Section name.
    pub name: String,
    /// `addrs`: a network or range.
    pub addrs: String,
    /// Other attributes with their values.
    pub attributes: Vec<(String, Vec<String>)>,
}

/// `authorities.<name>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// Section name.
    pub name: String,
    /// The CA certificate: contents.
    pub certificate: Vec<u8>,
    /// `crl_uris`.
    pub crl_uris: Vec<String>,
    /// `ocsp_uris`.
    pub ocsp_uris: Vec<String>,
    /// `cert_uri_base`.
    pub cert_uri_base: Option<String>,
}

const CERTIFICATE_DIRECTORIES: &[(&str, CertificateKind)] = &[
    ("x509", CertificateKind::EndEntity),
    ("x509ca", CertificateKind::Authority),
];
const KEY_DIRECTORIES: &[&str] = &["private", "rsa", "ecdsa", "pkcs8"];
/// Directories of which nothing is used, and what that means.
const UNUSED_DIRECTORIES: &[(&str, &str)] = &[
    ("x509ocsp", "OCSP is not supported"),
    (
        "x509crl",
        "revocation lists are not supported, so that a revoked certificate is accepted",
    ),
    ("x509aa", "attribute certificates are not supported"),
    ("x509ac", "attribute certificates are not supported"),
    (
        "pubkey",
        "a raw public key is trusted where `pubkeys` of a connection names it",
    ),
    ("pkcs12", "PKCS#12 containers are not supported"),
];
pub(crate) const POOL_KEYS: &[&str] = &[
    "addrs",
    "dns",
    "nbns",
    "dhcp",
    "netmask",
    "server",
    "subnet",
    "p_cscf",
    "split_include",
    "split_exclude",
];
pub(crate) const AUTHORITY_KEYS: &[&str] = &[
    "cacert",
    "file",
    "handle",
    "slot",
    "module",
    "crl_uris",
    "ocsp_uris",
    "cert_uri_base",
];
const TOP_SECTIONS: &[&str] = &["connections", "secrets", "pools", "authorities"];

/// Loads `path` from the system's files, with the system's names of protocols and services.
///
/// # Errors
/// If the file cannot be read or has a syntax error; then nothing of it is used.
pub fn load_swanctl(path: &Path) -> Result<Loaded, Diagnostic> {
    load_swanctl_from(path, &SystemFiles, &Names::system(&SystemFiles))
}

/// Loads `path` from `files`.
///
/// # Errors
/// If the file cannot be read or has a syntax error; then nothing of it is used.
pub fn load_swanctl_from(
    path: &Path,
    files: &dyn Files,
    names: &Names,
) -> Result<Loaded, Diagnostic> {
    let parsed = parse_file(path, files)?;
    let dir = path.parent().unwrap_or_else(|| Path::new(""));
    let mut loaded = Loaded {
        connections: Vec::new(),
        secrets: Vec::new(),
        passphrases: Vec::new(),
        certificates: Vec::new(),
        private_keys: Vec::new(),
        pools: Vec::new(),
        authorities: Vec::new(),
        diagnostics: parsed.warnings,
        files: parsed.files,
        repeated_sections: parsed.repeated_sections,
        tree: Tree::new(),
    };
    loaded.misspelt_sections(&parsed.tree);
    loaded.credentials(dir, files);
    if let Some(secrets) = parsed.tree.section("secrets") {
        let secrets = decode_secrets(secrets, &mut loaded.diagnostics);
        loaded.secrets = secrets.shared;
        loaded.passphrases = secrets.passphrases;
    }
    if let Some(authorities) = parsed.tree.section("authorities") {
        loaded.authorities(authorities, dir, files);
    }
    if let Some(pools) = parsed.tree.section("pools") {
        loaded.pools(pools);
    }
    if let Some(connections) = parsed.tree.section("connections") {
        for (entry, section) in connections.sections() {
            let origin = Origin::File { dir, files };
            let connection = match decode_whole_connection(&entry.name, section, origin, names) {
                Ok(decoded) => {
                    loaded.diagnostics.extend(decoded.warnings);
                    Ok(decoded.value)
                }
                Err(refusal) => {
                    loaded.diagnostics.extend(refusal.others);
                    Err(refusal.first)
                }
            };
            loaded.connections.push((entry.name.clone(), connection));
        }
    }
    loaded.tree = parsed.tree;
    Ok(loaded)
}

impl Loaded {
    /// Every diagnostic: those of refused connections first.
    pub fn all_diagnostics(&self) -> impl Iterator<Item = &Diagnostic> {
        self.connections
            .iter()
            .filter_map(|(_, connection)| connection.as_ref().err())
            .chain(&self.diagnostics)
    }

    /// Whether anything is in error.
    pub fn has_errors(&self) -> bool {
        self.all_diagnostics()
            .any(|diagnostic| diagnostic.level == Level::Error)
    }

    /// Warns of a top-level section whose name is nearly a known one: unknown ones are templates
    /// and mean nothing by themselves.
    fn misspelt_sections(&mut self, tree: &Tree) {
        for (entry, _) in tree.sections() {
            if TOP_SECTIONS.contains(&entry.name.as_str()) {
                continue;
            }
            if let Some(suggestion) =
                crate::diagnostic::suggest(&entry.name, TOP_SECTIONS.iter().copied())
            {
                self.diagnostics.push(
                    Diagnostic::warning(
                        "unknown-section",
                        format!("the section `{}` means nothing by itself", entry.name),
                    )
                    .key(&entry.name)
                    .help(suggestion)
                    .at_secret(entry.location.as_ref()),
                );
            }
        }
    }

    fn credentials(&mut self, dir: &Path, files: &dyn Files) {
        for (directory, kind) in CERTIFICATE_DIRECTORIES {
            for (path, data) in self.directory(&dir.join(directory), files) {
                self.certificates.push(Certificate {
                    kind: *kind,
                    path,
                    data,
                });
            }
        }
        for directory in KEY_DIRECTORIES {
            for (path, data) in self.directory(&dir.join(directory), files) {
                let data = Secret::new(data);
                if is_encrypted(data.expose()) {
                    self.diagnostics.push(
                        Diagnostic::error(
                            "encrypted-key",
                            format!("{} is encrypted, which is not supported", path.display()),
                        )
                        .help("decrypt it, for example with `openssl pkey -in FILE -out FILE`, and protect it by its file mode"),
                    );
                    continue;
                }
                self.private_keys.push(PrivateKey { path, data });
            }
        }
        for (directory, consequence) in UNUSED_DIRECTORIES {
            let unused = dir.join(directory);
            if files.list(&unused).is_ok_and(|found| !found.is_empty()) {
                self.diagnostics.push(
                    Diagnostic::warning(
                        "unsupported",
                        format!(
                            "the files in {} are not used: {consequence}",
                            unused.display()
                        ),
                    )
                    .key(*directory),
                );
            }
        }
    }

    fn directory(&mut self, dir: &Path, files: &dyn Files) -> Vec<(PathBuf, Vec<u8>)> {
        let unreadable = |path: &Path, error: std::io::Error| {
            Diagnostic::error(
                "unreadable",
                format!("cannot read {}: {error}", path.display()),
            )
        };
        let paths = match files.list(dir) {
            Ok(paths) => paths,
            Err(error) => {
                self.diagnostics.push(unreadable(dir, error));
                return Vec::new();
            }
        };
        let mut found = Vec::new();
        for path in paths {
            match files.read(&path) {
                Ok(data) => found.push((path, data)),
                Err(error) => self.diagnostics.push(unreadable(&path, error)),
            }
        }
        found
    }

    fn pools(&mut self, tree: &Tree) {
        for (entry, section) in tree.sections() {
            let Some(addrs) = section.value("addrs").and_then(Value::text) else {
                self.diagnostics.push(
                    Diagnostic::error("invalid-value", "the pool has no `addrs`")
                        .stock(format!("missing addrs for pool '{}'", entry.name))
                        .path(format!("pools.{}", entry.name))
                        .at(entry.location.as_ref()),
                );
                continue;
            };
            self.diagnostics.push(
                Diagnostic::warning(
                    "unsupported",
                    "address pools are not supported: no address is handed out",
                )
                .path(format!("pools.{}", entry.name))
                .key(&entry.name)
                .at(entry.location.as_ref()),
            );
            let mut attributes = Vec::new();
            for attribute in section.entries() {
                let Item::Value(value) = &attribute.item else {
                    continue;
                };
                let name = attribute.name.as_str();
                if name == "addrs" {
                    continue;
                }
                if !POOL_KEYS.contains(&name) && name.parse::<u16>().is_err() {
                    self.diagnostics.push(
                        Diagnostic::warning(
                            "unknown-option",
                            format!("`{name}` is no attribute of a pool"),
                        )
                        .stock(format!("invalid attribute: {name}"))
                        .path(format!("pools.{}", entry.name))
                        .key(name)
                        .help_opt(crate::diagnostic::suggest(name, POOL_KEYS.iter().copied()))
                        .at(attribute.location.as_ref()),
                    );
                }
                attributes.push((name.to_owned(), split(value)));
            }
            self.pools.push(Pool {
                name: entry.name.clone(),
                addrs: addrs.to_owned(),
                attributes,
            });
        }
    }

    fn authorities(&mut self, tree: &Tree, dir: &Path, files: &dyn Files) {
        for (entry, section) in tree.sections() {
            let path = format!("authorities.{}", entry.name);
            match authority(&entry.name, section, dir, files) {
                Ok((source, authority)) => {
                    for (key, consequence) in [
                        ("crl_uris", "no revocation list is fetched"),
                        ("ocsp_uris", "no OCSP server is asked"),
                        ("cert_uri_base", "certificates are sent whole"),
                    ] {
                        if let Some(Item::Value(value)) = section.get(key)
                            && !value.octets().is_empty()
                        {
                            self.diagnostics.push(
                                Diagnostic::warning(
                                    "unsupported",
                                    format!("`{key}` is not supported yet: {consequence}"),
                                )
                                .path(&path)
                                .key(key)
                                .at(value.location()),
                            );
                        }
                    }
                    for key in ["slot", "module"] {
                        if let Some(Item::Value(value)) = section.get(key) {
                            self.diagnostics.push(
                                Diagnostic::note(
                                    "no-effect",
                                    format!(
                                        "`{key}` has no effect: PKCS#11 tokens are not supported"
                                    ),
                                )
                                .path(&path)
                                .key(key)
                                .at(value.location()),
                            );
                        }
                    }
                    // What is in x509ca is trusted already.
                    if !self.certificates.iter().any(|known| known.path == source) {
                        self.certificates.push(Certificate {
                            kind: CertificateKind::Authority,
                            path: source,
                            data: authority.certificate.clone(),
                        });
                    }
                    self.authorities.push(authority);
                }
                Err(error) => {
                    let place = error.location.clone().or_else(|| entry.location.clone());
                    self.diagnostics.push(error.path(path).at(place.as_ref()));
                }
            }
        }
    }
}

fn authority(
    name: &str,
    section: &Tree,
    dir: &Path,
    files: &dyn Files,
) -> Result<(PathBuf, Authority), Diagnostic> {
    for entry in section.entries() {
        if !AUTHORITY_KEYS.contains(&entry.name.as_str()) {
            return Err(Diagnostic::error(
                "unknown-option",
                format!("`{}` is no option here", entry.name),
            )
            .stock(format!(
                "unknown option: {}, authority discarded",
                entry.name
            ))
            .key(&entry.name)
            .help_opt(crate::diagnostic::suggest(
                &entry.name,
                AUTHORITY_KEYS.iter().copied(),
            ))
            .at(entry.location.as_ref()));
        }
    }
    let text = |key| section.value(key).and_then(Value::text);
    let path = match (text("cacert"), text("file")) {
        (Some(file), _) => dir.join("x509ca").join(file),
        (None, Some(file)) => PathBuf::from(file),
        (None, None) if section.value("handle").is_some() => {
            return Err(Diagnostic::error(
                "unsupported",
                "certificates on PKCS#11 tokens are not supported",
            )
            .key("handle")
            .at(section.value("handle").and_then(Value::location)));
        }
        (None, None) => {
            return Err(
                Diagnostic::error("invalid-value", "the authority has no certificate")
                    .stock(format!("CA certificate missing: {name}")),
            );
        }
    };
    let certificate = files.read(&path).map_err(|error| {
        Diagnostic::error(
            "unreadable",
            format!("cannot read {}: {error}", path.display()),
        )
    })?;
    let list = |key| section.value(key).map(split).unwrap_or_default();
    let authority = Authority {
        name: name.to_owned(),
        certificate,
        crl_uris: list("crl_uris"),
        ocsp_uris: list("ocsp_uris"),
        cert_uri_base: text("cert_uri_base").map(str::to_owned),
    };
    Ok((path, authority))
}

fn split(value: &Value) -> Vec<String> {
    value
        .text()
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Whether a PEM private key is encrypted, in either of the two ways.
fn is_encrypted(pem: &[u8]) -> bool {
    let has = |needle: &[u8]| pem.windows(needle.len()).any(|window| window == needle);
    has(b"-----BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED")
}

/// The outcome of checking a file, as data.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CheckReport {
    /// Nothing is in error.
    pub ok: bool,
    /// Connections that would load.
    pub connections: Vec<String>,
    /// Connections that would be refused.
    pub refused: Vec<String>,
    /// Number of shared secrets.
    pub secrets: usize,
    /// Files that were read.
    pub files: Vec<String>,
    /// Errors, warnings and notes.
    pub diagnostics: Vec<Report>,
}

/// The outcome of [`load_swanctl`], as data, with what else was found.
pub fn report(loaded: &Result<Loaded, Diagnostic>, findings: &[Diagnostic]) -> CheckReport {
    match loaded {
        Ok(loaded) => {
            let names = |good: bool| {
                loaded
                    .connections
                    .iter()
                    .filter(|(_, connection)| connection.is_ok() == good)
                    .map(|(name, _)| name.clone())
                    .collect()
            };
            CheckReport {
                ok: !loaded.has_errors()
                    && !findings.iter().any(|found| found.level == Level::Error),
                connections: names(true),
                refused: names(false),
                secrets: loaded.secrets.len(),
                files: loaded
                    .files
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect(),
                diagnostics: loaded
                    .all_diagnostics()
                    .chain(findings)
                    .map(Diagnostic::to_report)
                    .collect(),
            }
        }
        Err(error) => CheckReport {
            ok: false,
            connections: Vec::new(),
            refused: Vec::new(),
            secrets: 0,
            files: Vec::new(),
            diagnostics: vec![error.to_report()],
        },
    }
}

/// The same, for people.
pub fn render(
    loaded: &Result<Loaded, Diagnostic>,
    findings: &[Diagnostic],
    colour: bool,
) -> String {
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return error.render(colour),
    };
    let mut text = String::new();
    let mut counts = [0; 3];
    for diagnostic in loaded.all_diagnostics().chain(findings) {
        text.push_str(&diagnostic.render(colour));
        text.push('\n');
        counts[match diagnostic.level {
            Level::Error => 0,
            Level::Warning => 1,
            Level::Note => 2,
        }] += 1;
    }
    let good = loaded.connections.iter().filter(|(_, c)| c.is_ok()).count();
    text.push_str(&format!(
        "{good} of {} connections are good; {} secrets, {} certificates, {} private keys; {} files read\n{} errors, {} warnings, {} notes\n",
        loaded.connections.len(),
        loaded.secrets.len(),
        loaded.certificates.len(),
        loaded.private_keys.len(),
        loaded.files.len(),
        counts[0],
        counts[1],
        counts[2],
    ));
    text
}
