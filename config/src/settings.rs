// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's settings: `charon { }` as far as it is honoured, and `swanherd { }`.
//!
//! The file is strongSwan's (`strongswan.conf`), so that one daemon can be swapped for the other.
//! A setting of `charon` that is not honoured is a warning; an unknown setting of `swanherd` is an
//! error. `charon-systemd` overrides `charon`, as it does for strongSwan's daemon of that name;
//! sections of other programs are skipped.

mod charon;
mod own;
mod reference;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::diagnostic::Diagnostic;
use crate::files::{Files, SystemFiles};
use crate::grammar::{Parsed, parse_file, parse_str};
use crate::tree::Tree;

pub use reference::reference;

/// Default of `STRONGSWAN_CONF`.
pub const DEFAULT_STRONGSWAN_CONF: &str = "/etc/strongswan.conf";
/// Default of `SWANCTL_DIR`.
pub const DEFAULT_SWANCTL_DIR: &str = "/etc/swanctl";

/// The settings file, given the environment variable `STRONGSWAN_CONF`.
pub fn strongswan_conf(variable: Option<OsString>) -> PathBuf {
    variable
        .filter(|value| !value.is_empty())
        .map_or_else(|| DEFAULT_STRONGSWAN_CONF.into(), PathBuf::from)
}

/// The file with the tunnel definitions, given the environment variable `SWANCTL_DIR`.
pub fn swanctl_conf(variable: Option<OsString>) -> PathBuf {
    variable
        .filter(|value| !value.is_empty())
        .map_or_else(|| DEFAULT_SWANCTL_DIR.into(), PathBuf::from)
        .join("swanctl.conf")
}

/// What the daemon runs by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `charon.port`: UDP port of IKE.
    pub port: u16,
    /// `charon.port_nat_t`: UDP port of IKE and ESP behind NAT.
    pub port_nat_t: u16,
    /// Of the IKE endpoint.
    pub ike: IkeSettings,
    /// `charon.plugins.vici.socket`: a URI, `unix://PATH`.
    pub vici_socket: String,
    /// `swanherd.vici`: VICI over TLS; `None` is off.
    pub vici_tls: Option<ViciTlsSettings>,
    /// `charon.user`: owner of the VICI socket.
    pub user: Option<String>,
    /// `charon.group`: group of the VICI socket.
    pub group: Option<String>,
    /// `charon.filelog`: log files.
    pub filelogs: Vec<FileLog>,
    /// `charon.install_routes`: whether to install routes for remote selectors.
    pub install_routes: bool,
    /// `charon.install_virtual_ip`: whether virtual addresses are added to an interface.
    pub install_virtual_ip: bool,
    /// `swanherd.config`: the tunnel definitions, if not those of `SWANCTL_DIR`.
    pub config: Option<PathBuf>,
    /// `swanherd.run_dir`: where what must survive a crash, but not a reboot, is kept.
    pub run_dir: PathBuf,
    /// `swanherd.dataplane`.
    pub dataplane: DataPlaneChoice,
    /// `swanherd.counters_interval`: how often the SAs' counters are read.
    pub counters_interval: Duration,
    /// `swanherd.reconcile_interval`: how often the data plane is audited; zero is only on demand.
    pub reconcile_interval: Duration,
    /// `swanherd.updown_timeout`: how long a script of a child may run.
    pub updown_timeout: Duration,
    /// `swanherd.spd_hash`: whether the kernel's hash thresholds of policies follow the prefixes
    /// in use.
    pub spd_hash: bool,
    /// `swanherd.log`.
    pub log: LogSettings,
    /// `swanherd.metrics`.
    pub metrics: MetricsSettings,
    /// `swanherd.tun`.
    pub tun: TunSettings,
}

/// Settings of the IKE endpoint, named after their keys in `charon`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each is described in the reference, by its name"
)]
pub struct IkeSettings {
    pub retransmit_tries: u32,
    pub retransmit_timeout: Duration,
    /// `retransmit_base`, in thousandths.
    pub retransmit_base_milli: u32,
    /// In percent.
    pub retransmit_jitter: u32,
    pub retransmit_limit: Duration,
    pub half_open_timeout: Duration,
    pub cookie_threshold: u32,
    pub cookie_threshold_ip: u32,
    pub block_threshold: u32,
    pub init_limit_half_open: u32,
    pub ikesa_limit: u32,
    pub keep_alive: Duration,
    pub fragment_size: u32,
    pub max_packet: u32,
    pub delete_rekeyed_delay: Duration,
    pub reuse_ikesa: bool,
    pub close_ike_on_child_failure: bool,
    pub make_before_break: bool,
    pub prefer_configured_proposals: bool,
    pub signature_authentication: bool,
    pub rsa_pss: bool,
    pub replay_window: u32,
    pub reqid_base: u32,
    pub follow_redirects: bool,
}

/// One section of `charon.filelog`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLog {
    /// `path`, or the section's name; `stdout` and `stderr` are the standard streams.
    pub path: PathBuf,
    /// `default`: level of groups that have none of their own; -1 is silent.
    pub default: i8,
    /// Levels by group (`ike`, `chd`, ...).
    pub groups: BTreeMap<String, i8>,
    /// `append`: whether what the file holds at start is kept.
    pub append: bool,
    /// `ike_name`: whether lines name the connection and unique id of their IKE SA.
    pub ike_name: bool,
    /// `time_format`: as for `strftime(3)`; empty is no time, `None` the form of RFC 3339.
    pub time_format: Option<String>,
    /// `time_precision`, or `time_add_ms`.
    pub time_precision: TimePrecision,
}

/// `time_precision` of a log file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimePrecision {
    /// None given.
    #[default]
    Seconds,
    /// `ms`
    Milliseconds,
    /// `us`
    Microseconds,
}

/// `swanherd.dataplane`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPlaneChoice {
    /// The kernel's if it can do ESP, else the userspace one.
    Auto,
    /// The kernel's XFRM.
    Xfrm,
    /// Userspace ESP behind a TUN device.
    Tun,
}

/// `swanherd.log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// `format`.
    pub format: LogFormat,
}

/// `swanherd.log.format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `swanherd.metrics`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsSettings {
    /// `listen`: address and port; `None` is off. Off the loopback, both files are given.
    pub listen: Option<SocketAddr>,
    /// `tls_cert`: PEM file with the certificate chain. Given if and only if `tls_key` is.
    pub tls_cert: Option<PathBuf>,
    /// `tls_key`: PEM file with the private key.
    pub tls_key: Option<PathBuf>,
}

/// `swanherd.vici`: all or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViciTlsSettings {
    /// `tls_listen`: address and port.
    pub listen: SocketAddr,
    /// `tls_cert`: PEM file with the certificate chain.
    pub cert: PathBuf,
    /// `tls_key`: PEM file with the private key.
    pub key: PathBuf,
    /// `tls_client_ca`: PEM file with the authorities that clients' certificates may come from.
    pub client_ca: PathBuf,
}

/// `swanherd.tun`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunSettings {
    /// `device`: its name; `%d` takes the first free number.
    pub device: String,
    /// `mtu` of the device.
    pub mtu: u32,
    /// `workers`: transmit threads.
    pub workers: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            port: 500,
            port_nat_t: 4500,
            ike: IkeSettings::default(),
            vici_socket: "unix:///var/run/charon.vici".to_owned(),
            vici_tls: None,
            user: None,
            group: None,
            filelogs: Vec::new(),
            install_routes: true,
            install_virtual_ip: true,
            config: None,
            run_dir: PathBuf::from("/run/swanherd"),
            dataplane: DataPlaneChoice::Auto,
            counters_interval: Duration::from_secs(1),
            reconcile_interval: Duration::from_secs(60),
            updown_timeout: Duration::from_secs(10),
            spd_hash: true,
            log: LogSettings {
                format: LogFormat::Text,
            },
            metrics: MetricsSettings {
                listen: Some(SocketAddr::from(([127, 0, 0, 1], 9814))),
                tls_cert: None,
                tls_key: None,
            },
            tun: TunSettings {
                device: "ipsec%d".to_owned(),
                mtu: 1400,
                workers: 1,
            },
        }
    }
}

impl Default for IkeSettings {
    fn default() -> Self {
        Self {
            retransmit_tries: 5,
            retransmit_timeout: Duration::from_secs(4),
            retransmit_base_milli: 1800,
            retransmit_jitter: 0,
            retransmit_limit: Duration::ZERO,
            half_open_timeout: Duration::from_secs(30),
            cookie_threshold: 30,
            cookie_threshold_ip: 3,
            block_threshold: 5,
            init_limit_half_open: 4096,
            ikesa_limit: 0,
            keep_alive: Duration::from_secs(20),
            fragment_size: 1280,
            max_packet: 10_000,
            delete_rekeyed_delay: Duration::from_secs(5),
            reuse_ikesa: true,
            close_ike_on_child_failure: false,
            make_before_break: true,
            prefer_configured_proposals: true,
            signature_authentication: true,
            rsa_pss: false,
            replay_window: 32,
            reqid_base: 1,
            follow_redirects: true,
        }
    }
}

/// Reads the settings from the system's files, with warnings. If `path` is the default and does
/// not exist, every setting has its default.
///
/// # Errors
/// If the file cannot be read, has a syntax error, or a setting of `swanherd` is wrong.
pub fn load_settings(path: &Path) -> Result<(Settings, Vec<Diagnostic>), Diagnostic> {
    load_settings_from(path, &SystemFiles)
}

/// Reads the settings from `files`; as [`load_settings`].
///
/// # Errors
/// If the file cannot be read, has a syntax error, or a setting of `swanherd` is wrong.
pub fn load_settings_from(
    path: &Path,
    files: &dyn Files,
) -> Result<(Settings, Vec<Diagnostic>), Diagnostic> {
    if path == Path::new(DEFAULT_STRONGSWAN_CONF)
        && files
            .read(path)
            .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    {
        return Ok((Settings::default(), Vec::new()));
    }
    from_parsed(parse_file(path, files)?)
}

/// Reads the settings from text.
///
/// # Errors
/// If the text has a syntax error, or a setting of `swanherd` is wrong.
pub fn parse_settings(text: &[u8]) -> Result<(Settings, Vec<Diagnostic>), Diagnostic> {
    from_parsed(parse_str("strongswan.conf", text)?)
}

fn from_parsed(parsed: Parsed) -> Result<(Settings, Vec<Diagnostic>), Diagnostic> {
    let mut settings = Settings::default();
    let mut warnings = parsed.warnings;
    for name in ["charon", "charon-systemd"] {
        if let Some(section) = parsed.tree.section(name) {
            charon::apply(&mut settings, section, name, &mut warnings);
        }
    }
    if let Some(section) = parsed.tree.section("swanherd") {
        own::apply(&mut settings, section)?;
    }
    misspelt(&parsed.tree, &mut warnings);
    Ok((settings, warnings))
}

fn misspelt(tree: &Tree, warnings: &mut Vec<Diagnostic>) {
    for (entry, _) in tree.sections() {
        if ["swanherd", "charon", "charon-systemd"].contains(&entry.name.as_str()) {
            continue;
        }
        if let Some(suggestion) = crate::diagnostic::suggest(&entry.name, ["swanherd", "charon"]) {
            warnings.push(
                Diagnostic::warning(
                    "unknown-section",
                    format!("the section `{}` is of no program known here", entry.name),
                )
                .key(&entry.name)
                .help(suggestion)
                .at(entry.location.as_ref()),
            );
        }
    }
}

#[cfg(test)]
mod tests;
