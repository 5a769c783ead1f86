// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `charon { }`: strongSwan's settings that are honoured here. Nothing in it is fatal: a file
//! written for strongSwan must not keep this daemon from starting.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::reference::{CHARON, FIXED};
use super::{FileLog, Settings, TimePrecision};
use crate::diagnostic::{Diagnostic, suggest};
use crate::tree::{Entry, Item, Tree, Value};
use crate::value;

/// Log groups of strongSwan.
const GROUPS: &[&str] = &[
    "dmn", "mgr", "ike", "chd", "job", "wch", "cfg", "knl", "net", "asn", "enc", "tnc", "imc",
    "imv", "pts", "tls", "app", "esp", "lib",
];
/// Keys of plugin management. There are no plugins here, and distributions write these by dozens.
const PLUGIN_MANAGEMENT: &[&str] = &["load", "load_modular"];

pub(super) fn apply(
    settings: &mut Settings,
    section: &Tree,
    name: &str,
    warnings: &mut Vec<Diagnostic>,
) {
    walk(settings, section, name, "", warnings);
}

fn walk(
    settings: &mut Settings,
    section: &Tree,
    root: &str,
    path: &str,
    warnings: &mut Vec<Diagnostic>,
) {
    for entry in section.entries() {
        let key = if path.is_empty() {
            entry.name.clone()
        } else {
            format!("{path}.{}", entry.name)
        };
        match &entry.item {
            Item::Section(logs) if key == "filelog" => {
                settings.filelogs.clear();
                for (entry, log) in logs.sections() {
                    let log = filelog(&entry.name, log, root, warnings);
                    settings.filelogs.push(log);
                }
            }
            Item::Section(section) => walk(settings, section, root, &key, warnings),
            Item::Value(value) => {
                if let Err(warning) = set(settings, &key, entry, value) {
                    warnings.push(warning.path(root));
                }
            }
            Item::List(_) => {}
        }
    }
}

fn set(settings: &mut Settings, key: &str, entry: &Entry, value: &Value) -> Result<(), Diagnostic> {
    let text = value.text().unwrap_or_default();
    let invalid = |expected: &str| {
        Diagnostic::warning(
            "invalid-value",
            format!("`{text}` is not {expected}; `{key}` keeps its default"),
        )
        .key(key)
        .at(value.location())
    };
    let number = || value::number32(text).ok_or_else(|| invalid("a number"));
    let port = || value::number16(text).ok_or_else(|| invalid("a port"));
    let boolean = || value::boolean(text).ok_or_else(|| invalid("yes or no"));
    let time = || seconds(text).ok_or_else(|| invalid("a time"));
    let ike = &mut settings.ike;
    match key {
        "port" => settings.port = port()?,
        "port_nat_t" => settings.port_nat_t = port()?,
        "retransmit_tries" => ike.retransmit_tries = number()?,
        "retransmit_timeout" => {
            ike.retransmit_timeout = time().and_then(|time| {
                (!time.is_zero())
                    .then_some(time)
                    .ok_or_else(|| invalid("a time above zero"))
            })?;
        }
        "retransmit_base" => {
            ike.retransmit_base_milli = text
                .parse::<f64>()
                .ok()
                .filter(|base| (1.0..=1000.0).contains(base))
                .map(thousandths)
                .ok_or_else(|| invalid("a factor from 1 to 1000"))?;
        }
        "retransmit_jitter" => {
            ike.retransmit_jitter = number()
                .ok()
                .filter(|percent| *percent <= 20)
                .ok_or_else(|| invalid("a percentage up to 20"))?;
        }
        "retransmit_limit" => ike.retransmit_limit = time()?,
        "half_open_timeout" => ike.half_open_timeout = time()?,
        "cookie_threshold" => ike.cookie_threshold = number()?,
        "cookie_threshold_ip" => ike.cookie_threshold_ip = number()?,
        "block_threshold" => ike.block_threshold = number()?,
        "dos_protection" => {
            if !boolean()? {
                ike.cookie_threshold = 0;
                ike.cookie_threshold_ip = 0;
                ike.block_threshold = 0;
            }
        }
        "init_limit_half_open" => ike.init_limit_half_open = number()?,
        "ikesa_limit" => ike.ikesa_limit = number()?,
        "keep_alive" => ike.keep_alive = time()?,
        "fragment_size" => ike.fragment_size = number()?,
        "max_packet" => ike.max_packet = number()?,
        "delete_rekeyed_delay" => ike.delete_rekeyed_delay = time()?,
        "reuse_ikesa" => ike.reuse_ikesa = boolean()?,
        "close_ike_on_child_failure" => ike.close_ike_on_child_failure = boolean()?,
        "make_before_break" => ike.make_before_break = boolean()?,
        "prefer_configured_proposals" => ike.prefer_configured_proposals = boolean()?,
        "signature_authentication" => ike.signature_authentication = boolean()?,
        "rsa_pss" => ike.rsa_pss = boolean()?,
        "replay_window" => ike.replay_window = number()?,
        "reqid_base" => ike.reqid_base = number()?,
        "follow_redirects" => ike.follow_redirects = boolean()?,
        "install_routes" => settings.install_routes = boolean()?,
        "install_virtual_ip" => settings.install_virtual_ip = boolean()?,
        "user" => settings.user = Some(text.to_owned()),
        "group" => settings.group = Some(text.to_owned()),
        "plugins.vici.socket" => {
            let tcp = text
                .strip_prefix("tcp://")
                .map(str::parse::<std::net::SocketAddr>);
            // VICI knows no passwords: who reaches it rules the daemon.
            let local = matches!(tcp, Some(Ok(address)) if address.ip().is_loopback());
            if !text.starts_with("unix://") && !local {
                return Err(invalid(
                    "unix://PATH, or tcp://ADDRESS:PORT with a loopback address",
                ));
            }
            text.clone_into(&mut settings.vici_socket);
        }
        _ if PLUGIN_MANAGEMENT.contains(&entry.name.as_str()) => {}
        _ if let Some(row) = FIXED.iter().find(|row| row.key == key) => {
            let same = text == row.default
                || value::boolean(text).is_some_and(|is| value::boolean(row.default) == Some(is));
            if !same {
                return Err(Diagnostic::warning(
                    "not-honoured",
                    format!(
                        "the setting `{key} = {text}` is not honoured: {}",
                        row.meaning
                    ),
                )
                .key(key)
                .at(value.location()));
            }
        }
        _ => {
            return Err(Diagnostic::warning(
                "not-honoured",
                format!("the setting `{key}` is not honoured"),
            )
            .key(key)
            .help_opt(suggest(key, CHARON.iter().map(|row| row.key)))
            .at(entry.location.as_ref()));
        }
    }
    Ok(())
}

fn filelog(name: &str, section: &Tree, root: &str, warnings: &mut Vec<Diagnostic>) -> FileLog {
    let mut log = FileLog {
        path: PathBuf::from(name),
        default: 1,
        groups: BTreeMap::new(),
        append: true,
        ike_name: true,
        time_format: None,
        time_precision: TimePrecision::Seconds,
    };
    for entry in section.entries() {
        let key = format!("filelog.{name}.{}", entry.name);
        let Item::Value(value) = &entry.item else {
            continue;
        };
        let text = value.text().unwrap_or_default();
        let level = || {
            text.parse::<i8>()
                .ok()
                .filter(|level| (-1..=4).contains(level))
        };
        let warning = match entry.name.as_str() {
            "path" => {
                log.path = PathBuf::from(text);
                continue;
            }
            "default" => match level() {
                Some(level) => {
                    log.default = level;
                    continue;
                }
                None => format!("`{text}` is no level from -1 to 4; `{key}` keeps its default"),
            },
            "append" => match value::boolean(text) {
                Some(append) => {
                    log.append = append;
                    continue;
                }
                None => format!("`{text}` is not yes or no; `{key}` keeps its default"),
            },
            "ike_name" => match value::boolean(text) {
                Some(ike_name) => {
                    log.ike_name = ike_name;
                    continue;
                }
                None => format!("`{text}` is not yes or no; `{key}` keeps its default"),
            },
            "time_format" => {
                log.time_format = Some(text.to_owned());
                continue;
            }
            "time_add_ms" => match value::boolean(text) {
                Some(true) => {
                    log.time_precision = TimePrecision::Milliseconds;
                    continue;
                }
                Some(false) => continue,
                None => format!("`{text}` is not yes or no; `{key}` keeps its default"),
            },
            "time_precision" => match text {
                "ms" => {
                    log.time_precision = TimePrecision::Milliseconds;
                    continue;
                }
                "us" => {
                    log.time_precision = TimePrecision::Microseconds;
                    continue;
                }
                "" => continue,
                _ => format!("`{text}` is neither ms nor us; `{key}` keeps its default"),
            },
            // Lines are always flushed one by one, and name no level.
            "flush_line" | "log_level" => continue,
            group if GROUPS.contains(&group) => match level() {
                Some(level) => {
                    log.groups.insert(group.to_owned(), level);
                    continue;
                }
                None => format!("`{text}` is no level from -1 to 4; `{key}` is ignored"),
            },
            _ => format!("the setting `{key}` is not honoured"),
        };
        warnings.push(
            Diagnostic::warning("not-honoured", warning)
                .key(key)
                .path(root)
                .at(entry.location.as_ref()),
        );
    }
    log
}

/// Seconds with a fraction, or a time with a suffix.
fn seconds(text: &str) -> Option<Duration> {
    if let Some(time) = value::time(text) {
        return Some(time);
    }
    let seconds: f64 = text.strip_suffix('s').unwrap_or(text).parse().ok()?;
    (0.0..=4_294_967_295.0)
        .contains(&seconds)
        .then(|| Duration::from_secs_f64(seconds))
}

/// A factor of at most 1000 as thousandths.
fn thousandths(factor: f64) -> u32 {
    let duration = Duration::from_secs_f64(factor);
    u32::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}
