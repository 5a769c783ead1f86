// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which metrics there are, and their values.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use swanherd_config::model::ChildMode;
use swanherd_ike::api::{
    AcquireFate, ChildSaInfo, ChildState, Counter, DropReason, Exchange, FailureReason, IkeState,
};
use swanherd_kernel::PlaneKind;

use super::exposition::{Exposition, Family, Format, Kind};
use crate::audits::Kind as Finding;
use crate::control::{Definitions, Snapshot, Totals};
use crate::shell::DROPPED;
use crate::vici::{Clients, Dropped};

const STATES: [(IkeState, &str); 7] = [
    (IkeState::Created, "created"),
    (IkeState::Connecting, "connecting"),
    (IkeState::Established, "established"),
    (IkeState::Rekeying, "rekeying"),
    (IkeState::Rekeyed, "rekeyed"),
    (IkeState::Deleting, "deleting"),
    (IkeState::Destroying, "destroying"),
];

const FAILURES: [(FailureReason, &str); 19] = [
    (FailureReason::Timeout, "timeout"),
    (FailureReason::IkeProposalMismatch, "ike_proposal_mismatch"),
    (
        FailureReason::ChildProposalMismatch,
        "child_proposal_mismatch",
    ),
    (FailureReason::SelectorMismatch, "selector_mismatch"),
    (FailureReason::LocalAuthFailed, "local_auth_failed"),
    (FailureReason::PeerAuthFailed, "peer_auth_failed"),
    (FailureReason::NoConfig, "no_config"),
    (FailureReason::DataPlane, "data_plane"),
    (FailureReason::PeerMisbehaved, "peer_misbehaved"),
    (FailureReason::PeerError, "peer_error"),
    (FailureReason::PeerDeleted, "peer_deleted"),
    (FailureReason::LocalDeleted, "local_deleted"),
    (FailureReason::Expired, "expired"),
    (FailureReason::MissingCredentials, "missing_credentials"),
    (FailureReason::Unreachable, "unreachable"),
    (FailureReason::Unsupported, "unsupported"),
    (FailureReason::Resources, "resources"),
    (FailureReason::Replaced, "replaced"),
    (FailureReason::IdentityConflict, "identity_conflict"),
];

const DROPS: [(DropReason, &str); 6] = [
    (DropReason::Malformed, "malformed"),
    (DropReason::HalfOpenTotal, "half_open_total"),
    (DropReason::HalfOpenPerAddress, "half_open_per_address"),
    (DropReason::CookieDemanded, "cookie_demanded"),
    (DropReason::Version, "version"),
    (DropReason::NoConfig, "no_config"),
];

const ACQUIRES: [(AcquireFate, &str); 3] = [
    (AcquireFate::Started, "started"),
    (AcquireFate::Coalesced, "coalesced"),
    (AcquireFate::Ignored, "ignored"),
];

const EXCHANGES: [(Exchange, &str); 4] = [
    (Exchange::IkeSaInit, "ike_sa_init"),
    (Exchange::IkeAuth, "ike_auth"),
    (Exchange::CreateChildSa, "create_child_sa"),
    (Exchange::Informational, "informational"),
];

/// All metrics of `snapshot`, and of the kernel's XFRM statistics where there are any.
pub(super) fn collect(
    snapshot: &Snapshot,
    definitions: Option<&Definitions>,
    clients: &Clients,
    format: Format,
) -> String {
    let mut out = Exposition::new(format);
    let clock = Clock::now();
    process(&mut out, snapshot);
    if let Some(definitions) = definitions {
        of_definitions(&mut out, definitions);
    }
    of_clients(&mut out, clients);
    children(&mut out, snapshot, clock);
    ike_sas(&mut out, snapshot, clock);
    global_counters(&mut out, snapshot);
    connection_counters(&mut out, snapshot);
    let mut errors = out.family(
        "swanherd_connection_last_error_timestamp_seconds",
        Kind::Gauge,
        Some("seconds"),
        "When an attempt of the connection last failed, in seconds since the epoch.",
    );
    let mut last: BTreeMap<&String, u64> = BTreeMap::new();
    let of_children = snapshot
        .troubles
        .iter()
        .filter_map(|((connection, _), trouble)| Some((connection, trouble.error.as_ref()?.0)));
    let of_connections = snapshot
        .last_errors
        .iter()
        .map(|(name, (at, _))| (name, *at));
    for (connection, at) in of_connections.chain(of_children) {
        let latest = last.entry(connection).or_default();
        *latest = at.max(*latest);
    }
    for (connection, when) in last {
        errors.sample(&[("connection", connection)], when);
    }
    data_plane(&mut out, snapshot);
    kernel(&mut out);
    out.finish()
}

/// Both clocks at one moment.
#[derive(Clone, Copy)]
struct Clock {
    instant: Instant,
    unix: u64,
}

impl Clock {
    fn now() -> Self {
        Self {
            instant: Instant::now(),
            unix: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }

    /// A past moment in seconds since the epoch.
    fn unix(self, then: Instant) -> u64 {
        self.unix
            .saturating_sub(self.instant.saturating_duration_since(then).as_secs())
    }
}

fn process(out: &mut Exposition, snapshot: &Snapshot) {
    out.family(
        "swanherd_build",
        Kind::Info,
        None,
        "Version and data plane of the daemon.",
    )
    .sample(
        &[
            ("version", env!("CARGO_PKG_VERSION")),
            ("data_plane", snapshot.data_plane),
            ("arch", std::env::consts::ARCH),
        ],
        1,
    );
    out.family(
        "process_start_time_seconds",
        Kind::Gauge,
        Some("seconds"),
        "When the daemon started, in seconds since the epoch.",
    )
    .sample(&[], snapshot.started.1);
}

fn of_definitions(out: &mut Exposition, definitions: &Definitions) {
    out.family(
        "swanherd_definitions",
        Kind::Gauge,
        None,
        "Connections of the file of definitions, by what became of them.",
    )
    .sample(&[("state", "loaded")], definitions.loaded)
    .sample(&[("state", "refused")], definitions.refused.len());
    out.family(
        "swanherd_definitions_last_apply_ok",
        Kind::Gauge,
        None,
        "Whether the file of definitions could be used when it was read last.",
    )
    .sample(&[], u64::from(definitions.error.is_none()));
    out.family(
        "swanherd_definitions_last_apply_timestamp_seconds",
        Kind::Gauge,
        Some("seconds"),
        "When the file of definitions was read last, in seconds since the epoch.",
    )
    .sample(&[], definitions.at);
}

fn of_clients(out: &mut Exposition, clients: &Clients) {
    out.family(
        "swanherd_vici_clients",
        Kind::Gauge,
        None,
        "VICI clients that are connected.",
    )
    .sample(&[], clients.connected());
    out.family(
        "swanherd_vici_clients_served",
        Kind::Counter,
        None,
        "VICI clients that have connected so far.",
    )
    .sample(&[], clients.served());
    let mut dropped = out.family(
        "swanherd_vici_clients_dropped",
        Kind::Counter,
        None,
        "VICI clients whose connection the daemon ended, by reason.",
    );
    for (reason, name) in Dropped::ALL {
        dropped.sample(&[("reason", name)], clients.dropped(reason));
    }
}

/// (connection, child) with the SAs of it that carry traffic.
type Children<'a> = BTreeMap<(&'a str, &'a str), Vec<&'a ChildSaInfo>>;

fn children(out: &mut Exposition, snapshot: &Snapshot, clock: Clock) {
    let mut known: Children<'_> = BTreeMap::new();
    for connection in snapshot.connections.values() {
        for child in &connection.children {
            // Shunts have no SAs that could be up.
            if !matches!(child.mode, ChildMode::Pass | ChildMode::Drop) {
                known.entry((&connection.name, &child.name)).or_default();
            }
        }
    }
    for sa in snapshot.ike_sas.values() {
        let Some(connection) = &sa.connection else {
            continue;
        };
        for child in sa.children.values().filter(|child| is_up(child.state)) {
            known
                .entry((connection, &child.name))
                .or_default()
                .push(child);
        }
    }
    let mut up = out.family(
        "swanherd_child_up",
        Kind::Gauge,
        None,
        "Whether the child has a CHILD_SA that carries traffic.",
    );
    for ((connection, child), sas) in &known {
        up.sample(
            &[("connection", connection), ("child", child)],
            u8::from(!sas.is_empty()),
        );
    }
    let mut installed = out.family(
        "swanherd_child_installed_timestamp_seconds",
        Kind::Gauge,
        Some("seconds"),
        "When the newest CHILD_SA of the child was installed, in seconds since the epoch.",
    );
    for ((connection, child), sas) in &known {
        if let Some(newest) = sas.iter().filter_map(|sa| sa.installed).max() {
            let labels = [("connection", *connection), ("child", *child)];
            installed.sample(&labels, clock.unix(newest));
        }
    }
    // A child that was unloaded keeps its totals, so that no counter vanishes before its end is
    // scraped.
    let counted = snapshot
        .totals
        .keys()
        .map(|(connection, child)| (&**connection, &**child));
    let all: BTreeSet<(&str, &str)> = known.keys().copied().chain(counted).collect();
    let totals = |(connection, child): (&str, &str)| {
        let key = (connection.to_owned(), child.to_owned());
        snapshot.totals.get(&key).copied().unwrap_or_default()
    };
    both_ways(
        out.family(
            "swanherd_child_bytes",
            Kind::Counter,
            Some("bytes"),
            "Octets that the child carried, over all its CHILD_SAs.",
        ),
        &all,
        |key| {
            let Totals {
                bytes_in,
                bytes_out,
                ..
            } = totals(key);
            [bytes_in, bytes_out]
        },
    );
    both_ways(
        out.family(
            "swanherd_child_packets",
            Kind::Counter,
            None,
            "Packets that the child carried, over all its CHILD_SAs.",
        ),
        &all,
        |key| {
            let Totals {
                packets_in,
                packets_out,
                ..
            } = totals(key);
            [packets_in, packets_out]
        },
    );
}

fn both_ways(
    mut family: Family<'_>,
    children: &BTreeSet<(&str, &str)>,
    values: impl Fn((&str, &str)) -> [u64; 2],
) {
    for &(connection, child) in children {
        for (direction, value) in ["in", "out"].into_iter().zip(values((connection, child))) {
            let labels = [
                ("connection", connection),
                ("child", child),
                ("direction", direction),
            ];
            family.sample(&labels, value);
        }
    }
}

fn is_up(state: ChildState) -> bool {
    matches!(
        state,
        ChildState::Installed | ChildState::Updating | ChildState::Rekeying
    )
}

fn ike_sas(out: &mut Exposition, snapshot: &Snapshot, clock: Clock) {
    let mut sas = out.family("swanherd_ike_sas", Kind::Gauge, None, "IKE_SAs by state.");
    for (state, name) in STATES {
        let count = snapshot
            .ike_sas
            .values()
            .filter(|sa| sa.state == state)
            .count();
        sas.sample(&[("state", name)], count);
    }
    out.family(
        "swanherd_ike_half_open_sas",
        Kind::Gauge,
        None,
        "IKE_SAs that a peer started and that are not authenticated yet.",
    )
    .sample(&[], snapshot.half_open);
    let mut newest: BTreeMap<&str, Option<Instant>> = snapshot
        .connections
        .keys()
        .map(|name| (name.as_str(), None))
        .collect();
    for sa in snapshot.ike_sas.values() {
        let up = matches!(sa.state, IkeState::Established | IkeState::Rekeying);
        if let (Some(connection), true) = (&sa.connection, up) {
            let entry = newest.entry(connection).or_default();
            *entry = (*entry).max(sa.established);
        }
    }
    let mut up = out.family(
        "swanherd_ike_up",
        Kind::Gauge,
        None,
        "Whether the connection has an established IKE_SA.",
    );
    for (connection, since) in &newest {
        up.sample(&[("connection", connection)], u8::from(since.is_some()));
    }
    let mut established = out.family(
        "swanherd_ike_established_timestamp_seconds",
        Kind::Gauge,
        Some("seconds"),
        "When the newest IKE_SA of the connection was established, in seconds since the epoch.",
    );
    for (connection, since) in newest {
        if let Some(since) = since {
            established.sample(&[("connection", connection)], clock.unix(since));
        }
    }
}

/// Counters of the whole daemon: what cannot be told to belong to a connection is in here only.
fn global_counters(out: &mut Exposition, snapshot: &Snapshot) {
    let empty = BTreeMap::new();
    let global = snapshot.counters.get("").unwrap_or(&empty);
    let value = |counter: Counter| global.get(&counter).copied().unwrap_or(0);
    let mut messages = out.family(
        "swanherd_ike_messages",
        Kind::Counter,
        None,
        "IKE messages, retransmissions not counted.",
    );
    for (exchange, name) in EXCHANGES {
        for (inbound, direction) in [(true, "in"), (false, "out")] {
            for (response, kind) in [(false, "request"), (true, "response")] {
                let labels = [("exchange", name), ("direction", direction), ("kind", kind)];
                let counter = Counter::Message {
                    exchange,
                    inbound,
                    response,
                };
                messages.sample(&labels, value(counter));
            }
        }
    }
    out.family(
        "swanherd_ike_invalid_messages",
        Kind::Counter,
        None,
        "IKE messages that were not valid, or were for an IKE_SA that does not exist.",
    )
    .sample(&[("reason", "invalid")], value(Counter::Invalid))
    .sample(&[("reason", "unknown_spi")], value(Counter::InvalidSpi));
    let mut dropped = out.family(
        "swanherd_ike_dropped",
        Kind::Counter,
        None,
        "IKE messages that were dropped before there was an IKE_SA.",
    );
    for (reason, name) in DROPS {
        dropped.sample(&[("reason", name)], value(Counter::Dropped(reason)));
    }
    let behind = DROPPED.load(Ordering::Relaxed);
    dropped.sample(&[("reason", "overload")], u64::from(behind));
    out.family(
        "swanherd_ike_answers_withheld",
        Kind::Counter,
        None,
        "Answers without an IKE_SA that were due and not sent, because too many were.",
    )
    .sample(&[], value(Counter::AnswerWithheld));
    let mut acquires = out.family(
        "swanherd_acquires",
        Kind::Counter,
        None,
        "Packets that asked for a CHILD_SA, by what became of it.",
    );
    for (fate, name) in ACQUIRES {
        acquires.sample(&[("outcome", name)], value(Counter::Acquire(fate)));
    }
    let mut failures = out.family(
        "swanherd_failures",
        Kind::Counter,
        None,
        "Attempts that failed and SAs that were lost.",
    );
    for (reason, name) in FAILURES {
        failures.sample(&[("reason", name)], value(Counter::Failure(reason)));
    }
}

fn connection_counters(out: &mut Exposition, snapshot: &Snapshot) {
    // Configured connections are there from the start, so that the first failure is a rise from 0
    // that a rate can see.
    let empty = BTreeMap::new();
    let mut known: BTreeMap<&str, &BTreeMap<Counter, u64>> = snapshot
        .connections
        .keys()
        .map(|name| (name.as_str(), &empty))
        .collect();
    let counted = snapshot
        .counters
        .iter()
        .filter(|(name, _)| !name.is_empty());
    known.extend(counted.map(|(name, counters)| (name.as_str(), counters)));
    let value = |counters: &BTreeMap<Counter, u64>, counter: Counter| {
        counters.get(&counter).copied().unwrap_or(0)
    };

    let mut failures = out.family(
        "swanherd_connection_failures",
        Kind::Counter,
        None,
        "Attempts of the connection that failed and SAs of it that were lost.",
    );
    for (connection, counters) in &known {
        for (reason, name) in FAILURES {
            let count = value(counters, Counter::Failure(reason));
            failures.sample(&[("connection", connection), ("reason", name)], count);
        }
    }
    let mut rekeys = out.family(
        "swanherd_connection_rekeys",
        Kind::Counter,
        None,
        "Rekeyings that were completed.",
    );
    for (connection, counters) in &known {
        for (counter, sa, initiator) in [
            (Counter::IkeRekeyInit, "ike", "local"),
            (Counter::IkeRekeyResp, "ike", "remote"),
            (Counter::ChildRekey, "child", "any"),
        ] {
            let labels = [
                ("connection", *connection),
                ("sa", sa),
                ("initiator", initiator),
            ];
            rekeys.sample(&labels, value(counters, counter));
        }
    }
    let mut retransmissions = out.family(
        "swanherd_connection_retransmissions",
        Kind::Counter,
        None,
        "Requests that were sent again, and requests of the peer that were received again.",
    );
    for (connection, counters) in &known {
        for (counter, direction) in [
            (Counter::Retransmit, "out"),
            (Counter::RetransmitReceived, "in"),
        ] {
            let labels = [("connection", *connection), ("direction", direction)];
            retransmissions.sample(&labels, value(counters, counter));
        }
    }
    let mut acquires = out.family(
        "swanherd_connection_acquires",
        Kind::Counter,
        None,
        "Packets that asked for a CHILD_SA of the connection, by what became of it.",
    );
    for (connection, counters) in &known {
        for (fate, name) in ACQUIRES {
            let labels = [("connection", *connection), ("outcome", name)];
            acquires.sample(&labels, value(counters, Counter::Acquire(fate)));
        }
    }
    let mut timeouts = out.family(
        "swanherd_connection_peer_timeouts",
        Kind::Counter,
        None,
        "Requests that the peer never answered.",
    );
    for (connection, counters) in &known {
        let count = value(counters, Counter::PeerTimeout);
        timeouts.sample(&[("connection", connection)], count);
    }
}

/// Kinds of findings that are there from the start, so that the first of each is a rise from 0 that
/// a rate can see.
const FINDINGS: [Finding; 13] = [
    ("sa", "missing", "renegotiated"),
    ("sa", "unwanted", "removed"),
    ("sa", "unwanted", "failed"),
    ("policy", "missing", "installed"),
    ("policy", "changed", "installed"),
    ("policy", "unwanted", "removed"),
    ("policy", "unwanted", "failed"),
    ("policy", "in_the_way", "none"),
    ("route", "missing", "installed"),
    ("route", "unwanted", "removed"),
    ("rule", "missing", "installed"),
    ("address", "missing", "installed"),
    ("address", "unwanted", "removed"),
];

/// What audits found in the data plane, and what it saw besides the events that IKE gets.
fn data_plane(out: &mut Exposition, snapshot: &Snapshot) {
    let audits = &*snapshot.audits;
    let mut findings: BTreeMap<Finding, u64> = FINDINGS.into_iter().map(|kind| (kind, 0)).collect();
    findings.extend(audits.findings.iter().map(|(kind, count)| (*kind, *count)));
    let mut family = out.family(
        "swanherd_reconcile_findings",
        Kind::Counter,
        None,
        "Differences between the data plane and what should be in it, by what was done about them.",
    );
    for ((object, difference, remedy), count) in findings {
        let labels = [
            ("object", object),
            ("difference", difference),
            ("remedy", remedy),
        ];
        family.sample(&labels, count);
    }
    out.family(
        "swanherd_reconcile_audits",
        Kind::Counter,
        None,
        "Comparisons of the data plane with what should be in it.",
    )
    .sample(&[("outcome", "completed")], audits.completed)
    .sample(&[("outcome", "failed")], audits.failed);
    if let Some(last) = &audits.last {
        out.family(
            "swanherd_reconcile_last_timestamp_seconds",
            Kind::Gauge,
            Some("seconds"),
            "When the last comparison was completed, in seconds since the epoch.",
        )
        .sample(&[], last.at);
        out.family(
            "swanherd_reconcile_duration_seconds",
            Kind::Gauge,
            Some("seconds"),
            "How long the last comparison took.",
        )
        .sample(&[], format_args!("{:.6}", last.took.as_secs_f64()));
        for (name, help, counts) in [
            (
                "swanherd_reconcile_present",
                "SAs and policies in the data plane at the last comparison, those of others included.",
                last.present,
            ),
            (
                "swanherd_reconcile_alien",
                "SAs and policies of others at the last comparison. They are never touched.",
                last.alien,
            ),
            (
                "swanherd_reconcile_stale",
                "SAs and policies of ours that are not wanted and could not be removed.",
                last.stale,
            ),
        ] {
            let mut family = out.family(name, Kind::Gauge, None, help);
            for (object, count) in ["sa", "policy"].into_iter().zip(counts) {
                family.sample(&[("object", object)], count);
            }
        }
    }
    let events = &snapshot.plane_events;
    out.family(
        "swanherd_plane_event_overruns",
        Kind::Counter,
        None,
        "How often the kernel dropped events because they were read too slowly. What was lost is found by comparison.",
    )
    .sample(&[], events.overruns);
    out.family(
        "swanherd_plane_events_undelivered",
        Kind::Counter,
        None,
        "Events of the data plane that had to wait because IKE had no room for them.",
    )
    .sample(&[], events.undelivered);
    out.family(
        "swanherd_plane_foreign_changes",
        Kind::Counter,
        None,
        "Changes of SAs and policies by other processes.",
    )
    .sample(&[], events.foreign_changes);
    let acquires = &events.acquires;
    let mut family = out.family(
        "swanherd_plane_acquires",
        Kind::Counter,
        None,
        "Packets that asked for an SA and began no negotiation, by reason.",
    );
    for (reason, count) in [
        ("foreign", acquires.foreign),
        ("without_selector", acquires.without_selector),
        ("coalesced", acquires.coalesced),
        ("dropped", acquires.dropped),
    ] {
        family.sample(&[("reason", reason)], count);
    }
    if snapshot.data_plane == PlaneKind::Tun.name() {
        let mut family = out.family(
            "swanherd_plane_dropped_packets",
            Kind::Counter,
            None,
            "Packets that ESP in user space dropped, by reason.",
        );
        for (reason, count) in events.drops.by_reason() {
            family.sample(&[("reason", reason)], count);
        }
    }
    let standing = snapshot.standing.values();
    let traps = standing.filter(|set| set.trap).count();
    let mut family = out.family(
        "swanherd_standing_policies",
        Kind::Gauge,
        None,
        "Traps and shunts in force.",
    );
    family
        .sample(&[("kind", "trap")], traps)
        .sample(&[("kind", "shunt")], snapshot.standing.len() - traps);
}

/// The kernel's counters of packets that IPsec dropped. Absent where the kernel has none.
fn kernel(out: &mut Exposition) {
    let Ok(text) = std::fs::read_to_string("/proc/net/xfrm_stat") else {
        return;
    };
    let mut family = out.family(
        "swanherd_xfrm_stat",
        Kind::Counter,
        None,
        "Counters of /proc/net/xfrm_stat: packets that the kernel's IPsec dropped, by cause.",
    );
    for (name, value) in xfrm_stat(&text) {
        family.sample(&[("counter", name)], value);
    }
}

/// Lines of a name and a number; others are skipped.
fn xfrm_stat(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?, words.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xfrm_statistics_are_names_and_numbers() {
        let text = "XfrmInError             \t0\nXfrmInNoStates          \t12\nnonsense\n";
        let read: Vec<_> = xfrm_stat(text).collect();
        assert_eq!(read, [("XfrmInError", 0), ("XfrmInNoStates", 12)]);
    }
}
