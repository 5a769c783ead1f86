// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `swanherd { }`: everything in it must be known and valid.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::reference::OWN;
use super::{DataPlaneChoice, LogFormat, Settings, ViciTlsSettings};
use crate::diagnostic::{Diagnostic, suggest};
use crate::tree::{Entry, Item, Tree, Value};
use crate::value;

pub(super) fn apply(settings: &mut Settings, section: &Tree) -> Result<(), Diagnostic> {
    let mut vici = ViciTls::default();
    walk(settings, &mut vici, section, "")?;
    check_metrics(settings, section)?;
    settings.vici_tls = vici.whole(section)?;
    Ok(())
}

/// What was said of `vici`.
#[derive(Default)]
struct ViciTls {
    listen: Option<SocketAddr>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
}

impl ViciTls {
    /// Whoever reaches VICI rules the daemon, so that there is no half of it.
    fn whole(self, section: &Tree) -> Result<Option<ViciTlsSettings>, Diagnostic> {
        let Some(listen) = self.listen else {
            return Ok(None);
        };
        let (Some(cert), Some(key), Some(client_ca)) = (self.cert, self.key, self.client_ca) else {
            let message = "VICI over TLS needs `tls_cert`, `tls_key` and `tls_client_ca`";
            return Err(Diagnostic::error("invalid-value", message)
                .path("swanherd")
                .key("vici.tls_listen")
                .at(section.path("vici.tls_listen").and_then(Value::location)));
        };
        Ok(Some(ViciTlsSettings {
            listen,
            cert,
            key,
            client_ca,
        }))
    }
}

/// What no setting of `metrics` can tell on its own.
fn check_metrics(settings: &Settings, section: &Tree) -> Result<(), Diagnostic> {
    let metrics = &settings.metrics;
    let key = |name: &str| section.path(name).and_then(Value::location);
    let wrong = |name: &str, message: &str| {
        Diagnostic::error("invalid-value", message)
            .path("swanherd")
            .key(name)
            .at(key(name))
    };
    if metrics.tls_cert.is_some() != metrics.tls_key.is_some() {
        let name = if metrics.tls_key.is_some() {
            "metrics.tls_key"
        } else {
            "metrics.tls_cert"
        };
        return Err(wrong(name, "TLS needs both `tls_cert` and `tls_key`"));
    }
    match metrics.listen {
        Some(address) if !address.ip().is_loopback() && metrics.tls_cert.is_none() => Err(wrong(
            "metrics.listen",
            "other hosts can reach this address, so it needs TLS",
        )
        .help("set `tls_cert` and `tls_key`, or listen on a loopback address")),
        _ => Ok(()),
    }
}

fn walk(
    settings: &mut Settings,
    vici: &mut ViciTls,
    section: &Tree,
    path: &str,
) -> Result<(), Diagnostic> {
    for entry in section.entries() {
        let key = if path.is_empty() {
            entry.name.clone()
        } else {
            format!("{path}.{}", entry.name)
        };
        match &entry.item {
            Item::Value(value) => set(settings, vici, &key, entry, value)?,
            Item::Section(section) => {
                let prefix = format!("{key}.");
                if !OWN.iter().any(|row| row.key.starts_with(&prefix)) {
                    return Err(unknown(&key, entry));
                }
                walk(settings, vici, section, &key)?;
            }
            Item::List(_) => return Err(unknown(&key, entry)),
        }
    }
    Ok(())
}

fn unknown(key: &str, entry: &Entry) -> Diagnostic {
    let sections = OWN
        .iter()
        .filter_map(|row| Some(row.key.split_once('.')?.0));
    let known = OWN.iter().map(|row| row.key).chain(sections);
    Diagnostic::error("unknown-setting", format!("there is no setting `{key}`"))
        .path("swanherd")
        .key(key)
        .help_opt(suggest(key, known))
        .at(entry.location.as_ref())
}

fn set(
    settings: &mut Settings,
    vici: &mut ViciTls,
    key: &str,
    entry: &Entry,
    value: &Value,
) -> Result<(), Diagnostic> {
    let text = value.text().unwrap_or_default();
    let invalid = |expected: &str| {
        Diagnostic::error("invalid-value", format!("`{text}` is not {expected}"))
            .path("swanherd")
            .key(key)
            .at(value.location())
    };
    match key {
        "config" => {
            if !text.starts_with('/') {
                return Err(invalid("an absolute path"));
            }
            settings.config = Some(PathBuf::from(text));
        }
        "run_dir" => {
            if !text.starts_with('/') {
                return Err(invalid("an absolute path"));
            }
            settings.run_dir = PathBuf::from(text);
        }
        "dataplane" => {
            settings.dataplane = match text {
                "auto" => DataPlaneChoice::Auto,
                "xfrm" => DataPlaneChoice::Xfrm,
                "tun" => DataPlaneChoice::Tun,
                _ => return Err(invalid("auto, xfrm or tun")),
            };
        }
        "counters_interval" => {
            settings.counters_interval = value::time(text)
                .filter(|time| (1..=3600).contains(&time.as_secs()))
                .map(|time| Duration::from_secs(time.as_secs()))
                .ok_or_else(|| invalid("a time from 1s to 1h"))?;
        }
        "reconcile_interval" => {
            settings.reconcile_interval = value::time(text)
                .filter(|time| time.is_zero() || (5..=86_400).contains(&time.as_secs()))
                .ok_or_else(|| invalid("0, or a time from 5s to 1d"))?;
        }
        "updown_timeout" => {
            settings.updown_timeout = value::time(text)
                .filter(|time| (1..=600).contains(&time.as_secs()))
                .ok_or_else(|| invalid("a time from 1s to 10m"))?;
        }
        "spd_hash" => {
            settings.spd_hash = match text {
                "auto" => true,
                "no" => false,
                _ => return Err(invalid("auto or no")),
            };
        }
        "log.format" => {
            settings.log.format = match text {
                "text" => LogFormat::Text,
                "json" => LogFormat::Json,
                _ => return Err(invalid("text or json")),
            };
        }
        "metrics.listen" => {
            settings.metrics.listen = if text == "off" {
                None
            } else {
                let address = text.parse::<SocketAddr>();
                Some(address.map_err(|_| invalid("ADDRESS:PORT or off"))?)
            };
        }
        "vici.tls_listen" => {
            vici.listen = if text == "off" {
                None
            } else {
                let address = text.parse::<SocketAddr>();
                Some(address.map_err(|_| invalid("ADDRESS:PORT or off"))?)
            };
        }
        "vici.tls_cert" | "vici.tls_key" | "vici.tls_client_ca" => {
            if !text.starts_with('/') {
                return Err(invalid("an absolute path"));
            }
            let path = Some(PathBuf::from(text));
            match key {
                "vici.tls_cert" => vici.cert = path,
                "vici.tls_key" => vici.key = path,
                _ => vici.client_ca = path,
            }
        }
        "metrics.tls_cert" | "metrics.tls_key" => {
            if !text.starts_with('/') {
                return Err(invalid("an absolute path"));
            }
            let path = Some(PathBuf::from(text));
            if key == "metrics.tls_cert" {
                settings.metrics.tls_cert = path;
            } else {
                settings.metrics.tls_key = path;
            }
        }
        "tun.device" => {
            // IFNAMSIZ is 16 with the terminator.
            let fits = !text.is_empty()
                && text.len() <= 15
                && text
                    .bytes()
                    .all(|octet| octet.is_ascii_alphanumeric() || b"-_.%".contains(&octet));
            if !fits {
                return Err(invalid("the name of a network device"));
            }
            text.clone_into(&mut settings.tun.device);
        }
        "tun.mtu" => {
            settings.tun.mtu = value::number32(text)
                .filter(|mtu| (1280..=65_535).contains(mtu))
                .ok_or_else(|| invalid("an MTU from 1280 to 65535"))?;
        }
        "tun.workers" => {
            settings.tun.workers = value::number(text)
                .and_then(|workers| usize::try_from(workers).ok())
                .filter(|workers| (1..=256).contains(workers))
                .ok_or_else(|| invalid("a number from 1 to 256"))?;
        }
        _ => return Err(unknown(key, entry)),
    }
    Ok(())
}
