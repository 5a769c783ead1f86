// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `version`, `stats`, `get-algorithms` and counters: facts about the daemon itself.

use std::collections::BTreeMap;

use swanherd_ike::api::Counter;
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::Transform;
use swanherd_vici::Message;

use super::args::{failure, flag, success, text};
use super::names;
use crate::control::{Control, Request, Snapshot};

/// The strongSwan release whose VICI this is. Scripts test it for features.
const COMPATIBLE_VERSION: &str = "6.0.6";

/// `version`.
pub(super) fn version() -> Message {
    let system = rustix::system::uname();
    let text = |text: &core::ffi::CStr| text.to_string_lossy().into_owned();
    Message::new()
        .with("daemon", "swanherd")
        .with("version", COMPATIBLE_VERSION)
        .with("sysname", text(system.sysname()))
        .with("release", text(system.release()))
        .with("machine", text(system.machine()))
        .with("swanherd", env!("CARGO_PKG_VERSION"))
}

/// `stats`. There are no worker threads per job here, but clients need the keys.
pub(super) fn stats(snapshot: &Snapshot) -> Message {
    let (instant, unix) = snapshot.started;
    let uptime = Message::new()
        .with("running", running(instant.elapsed().as_secs()))
        .with("since", local_time(unix));
    let priorities = || {
        ["critical", "high", "medium", "low"]
            .into_iter()
            .fold(Message::new(), |out, name| out.with(name, "0"))
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .to_string();
    let workers = Message::new()
        .with("total", &threads)
        .with("idle", &threads)
        .with_section("active", priorities());
    let ike_sas = Message::new()
        .with("total", snapshot.ike_sas.len().to_string())
        .with("half-open", snapshot.half_open.to_string());
    Message::new()
        .with_section("uptime", uptime)
        .with_section("workers", workers)
        .with_section("queues", priorities())
        .with("scheduled", scheduled(snapshot).to_string())
        .with_section("ikesas", ike_sas)
        .with("data-plane", snapshot.data_plane)
        .with_list(
            "plugins",
            [
                "swanherd",
                snapshot.data_plane,
                Provider::ring().name,
                "vici",
            ],
        )
}

/// Rekeyings, reauthentications and ends of life that are due one day.
fn scheduled(snapshot: &Snapshot) -> usize {
    let sas = snapshot.ike_sas.values();
    sas.map(|sa| {
        let children = sa.children.values();
        let of_children = children
            .map(|child| {
                usize::from(child.rekey_at.is_some()) + usize::from(child.expires_at.is_some())
            })
            .sum::<usize>();
        usize::from(sa.rekey_at.is_some()) + usize::from(sa.reauth_at.is_some()) + of_children
    })
    .sum()
}

/// `3 minutes`: a number and a unit. A unit is used from more than two of it on.
fn running(seconds: u64) -> String {
    let (number, unit) = match seconds {
        0..=120 => (seconds, "second"),
        121..=7200 => (seconds / 60, "minute"),
        7201..=172_800 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {unit}{plural}")
}

/// `Nov 30 16:17:31 2026`, in the time zone of the host.
#[allow(unsafe_code)]
fn local_time(unix: u64) -> String {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let Ok(time) = libc::time_t::try_from(unix) else {
        return String::new();
    };
    // SAFETY: `tm` is a plain C struct for which all zeroes is a valid value.
    let mut tm: libc::tm = unsafe { core::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right type; this process never changes its
    // environment, which is what `localtime_r` reads the zone from.
    let converted = unsafe { libc::localtime_r(&raw const time, &raw mut tm) };
    let month = usize::try_from(tm.tm_mon)
        .ok()
        .and_then(|month| MONTHS.get(month));
    let (false, Some(month)) = (converted.is_null(), month) else {
        return String::new();
    };
    format!(
        "{month} {:02} {:02}:{:02}:{:02} {}",
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec,
        tm.tm_year + 1900
    )
}

/// `get-algorithms`.
pub(super) fn algorithms() -> Message {
    let provider = Provider::ring();
    let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for transform in provider.transforms() {
        let (section, name) = match transform {
            Transform::Encryption { id, .. } if id.is_aead() => ("aead", id.to_string()),
            Transform::Encryption { id, .. } => ("encryption", id.to_string()),
            Transform::Integrity(id) => ("integrity", id.to_string()),
            Transform::Prf(id) => ("prf", id.to_string()),
            Transform::KeyExchange(id) => ("ke", id.to_string()),
            Transform::Esn(_)
            | Transform::AdditionalKeyExchange { .. }
            | Transform::Unknown { .. } => continue,
        };
        let names = sections.entry(section).or_default();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let hashes = [
        "HASH_SHA1",
        "HASH_SHA2_256",
        "HASH_SHA2_384",
        "HASH_SHA2_512",
        "HASH_IDENTITY",
    ];
    sections.insert("hasher", hashes.map(str::to_owned).to_vec());
    sections.insert("rng", vec!["RNG_STRONG".to_owned()]);
    sections.insert("nonce-gen", vec!["NONCE_GEN".to_owned()]);
    let order = [
        "encryption",
        "integrity",
        "aead",
        "hasher",
        "prf",
        "xof",
        "kdf",
        "drbg",
        "ke",
        "rng",
        "nonce-gen",
    ];
    order.into_iter().fold(Message::new(), |out, section| {
        let names = sections.remove(section).unwrap_or_default();
        let listed = names
            .into_iter()
            .fold(Message::new(), |list, name| list.with(name, provider.name));
        out.with_section(section, listed)
    })
}

/// `get-counters`.
pub(super) fn counters(snapshot: &Snapshot, args: &Message) -> Message {
    let one = |counters: &BTreeMap<Counter, u64>| {
        names::COUNTERS
            .iter()
            .fold(Message::new(), |out, (name, counter)| {
                out.with(
                    *name,
                    counters.get(counter).copied().unwrap_or(0).to_string(),
                )
            })
    };
    let mut section = Message::new();
    if flag(args, "all") {
        for (name, counters) in snapshot
            .counters
            .iter()
            .filter(|(name, _)| !name.is_empty())
        {
            section.push_section(names::printable(name), one(counters));
        }
    } else {
        let name = text(args, "name").unwrap_or_default();
        match snapshot.counters.get(name) {
            Some(counters) => section.push_section(names::printable(name), one(counters)),
            None if name.is_empty() => section.push_section("", one(&BTreeMap::new())),
            None => {
                return Message::new()
                    .with_section("counters", Message::new())
                    .with("success", "no")
                    .with("errmsg", "no counters found for this connection");
            }
        }
    }
    Message::new()
        .with_section("counters", section)
        .with("success", "yes")
}

/// `reset-counters`.
pub(super) async fn reset_counters(control: &Control, args: &Message) -> Message {
    let all = flag(args, "all");
    let name = text(args, "name").unwrap_or_default().to_owned();
    let scope = if all { None } else { Some(name) };
    match control
        .ask(|reply| Request::ResetCounters(scope, reply))
        .await
    {
        // What has counted nothing is as good as reset.
        Ok(_) => success(),
        Err(error) => failure(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_time_changes_its_unit_after_two_of_the_next() {
        for (seconds, text) in [
            (0, "0 seconds"),
            (1, "1 second"),
            (120, "120 seconds"),
            (121, "2 minutes"),
            (7200, "120 minutes"),
            (7201, "2 hours"),
            (172_800, "48 hours"),
            (172_801, "2 days"),
        ] {
            assert_eq!(running(seconds), text);
        }
    }

    #[test]
    fn start_time_has_the_form_that_exporters_parse() {
        let text = local_time(1_796_055_451);
        let fields: Vec<&str> = text.split([' ', ':']).collect();
        assert_eq!(fields.len(), 6, "{text}");
        assert_eq!(fields[5], "2026");
    }

    #[test]
    fn algorithms_are_listed_by_kind_without_repetition() {
        let listed = algorithms();
        assert_eq!(
            listed.section("aead").unwrap().str("AES_GCM_16"),
            Some("ring")
        );
        assert_eq!(
            listed.section("ke").unwrap().str("CURVE_25519"),
            Some("ring")
        );
        for (_, section) in listed.sections() {
            let names: Vec<&str> = section.iter().map(|(name, _)| name).collect();
            let distinct: std::collections::BTreeSet<&str> = names.iter().copied().collect();
            assert_eq!(names.len(), distinct.len());
        }
    }
}
