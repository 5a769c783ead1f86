// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `status`: what is configured and what runs, in one view.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use swanherd_vici::installed::{Definitions, LastError, Troubles};
use swanherd_vici::types::ListSas;
use swanherd_vici::{ChildSa, Error, IkeSa, Message};

use super::style::{Colour, colours};
use super::{
    OK, WRONG, configured, connect, fail, is_named, nothing_called, print_json, put, say, span,
};
use crate::cli::{Server, Status};

/// One configured child, or one that runs without being configured any more.
#[derive(Debug, Serialize)]
struct Tunnel {
    connection: String,
    child: String,
    state: State,
    configured: bool,
    ike_state: Option<String>,
    child_state: Option<String>,
    local: Option<String>,
    remote: Option<String>,
    local_id: Option<String>,
    remote_id: Option<String>,
    ike_suite: Option<String>,
    suite: Option<String>,
    bytes_in: u64,
    bytes_out: u64,
    packets_in: u64,
    packets_out: u64,
    /// Seconds since the CHILD SA was installed.
    installed_seconds: Option<i64>,
    /// Seconds until the CHILD SA is rekeyed, and until it ends.
    rekey_seconds: Option<i64>,
    life_seconds: Option<i64>,
    /// Seconds since the IKE SA was established.
    ike_established_seconds: Option<i64>,
    /// Seconds until the IKE SA is rekeyed, and until it is reauthenticated.
    ike_rekey_seconds: Option<i64>,
    ike_reauth_seconds: Option<i64>,
    /// Whether a trap is in force.
    trap: bool,
    /// Virtual addresses that the peer gave us.
    virtual_addresses: Vec<String>,
    /// Why the last attempt of the connection failed, if it failed after the present SA came up.
    last_error: Option<LastError>,
    /// Seconds until the next attempt to bring it up, if one is planned.
    next_attempt_seconds: Option<u64>,
}

/// How a tunnel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Up,
    Connecting,
    /// The first packet brings it up.
    Trap,
    Down,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Connecting => "connecting",
            Self::Trap => "trap",
            Self::Down => "down",
        }
    }

    fn colour(self) -> Colour {
        match self {
            Self::Up => Colour::Green,
            Self::Connecting | Self::Trap => Colour::Yellow,
            Self::Down => Colour::Red,
        }
    }
}

/// A rule for traffic in clear that is in force.
#[derive(Debug, Serialize)]
struct Shunt {
    connection: String,
    child: String,
    /// `pass` or `drop`.
    action: &'static str,
    local_ts: Vec<String>,
    remote_ts: Vec<String>,
}

/// One policy of `list-policies`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct StandingPolicy {
    child: String,
    ike: String,
    mode: String,
    local_ts: Vec<String>,
    remote_ts: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    daemon: String,
    version: String,
    dataplane: Option<String>,
    up: usize,
    tunnels: Vec<Tunnel>,
    shunts: Vec<Shunt>,
    /// How the daemon's file of definitions was applied; `None` of a charon.
    definitions: Option<Definitions>,
}

/// What a daemon has told.
#[derive(Debug, Default)]
struct Told {
    daemon: String,
    version: String,
    dataplane: Option<String>,
    /// (connection, child) of all that can be up or down.
    configured: Vec<(String, String)>,
    sas: Vec<IkeSa>,
    standing: Vec<StandingPolicy>,
    troubles: BTreeMap<String, Troubles>,
    definitions: Option<Definitions>,
}

/// `swanherd status`
pub(crate) async fn status(args: Status) -> ExitCode {
    let told = match ask(&args.server).await {
        Ok(told) => told,
        Err(error) => return fail(&error),
    };
    let report = report(&told, args.name.as_deref(), unix_now());
    if let Some(name) = &args.name
        && report.is_empty()
    {
        let refused = report.definitions.unwrap_or_default().refused;
        say(&nothing_called(name, &told.configured, &refused));
        return ExitCode::from(WRONG);
    }
    if args.json {
        print_json(&report);
    } else {
        put(&table(&report, colours()));
    }
    ExitCode::from(if report.is_fine() { OK } else { WRONG })
}

impl Report {
    fn is_fine(&self) -> bool {
        let applied = |definitions: &Definitions| {
            definitions.error.is_none() && definitions.refused.is_empty()
        };
        let fine = |tunnel: &Tunnel| matches!(tunnel.state, State::Up | State::Trap);
        self.tunnels.iter().all(fine) && self.definitions.as_ref().is_none_or(applied)
    }

    fn is_empty(&self) -> bool {
        self.tunnels.is_empty() && self.shunts.is_empty()
    }
}

/// The long listings come over connections of their own, so that the daemon and we read, write
/// and parse them side by side.
async fn ask(server: &Server) -> Result<Told, Error> {
    let listed = {
        let server = server.clone();
        tokio::spawn(async move { configured(&mut connect(&server).await?).await })
    };
    let sas = {
        let server = server.clone();
        tokio::spawn(async move {
            let mut client = connect(&server).await?;
            client.list_sas(&ListSas::default()).await
        })
    };
    let mut client = connect(server).await?;
    let version = client.version().await?;
    let stats = client.request("stats", Message::new()).await?;
    let all = ["trap", "pass", "drop"]
        .into_iter()
        .fold(Message::new(), |args, kind| args.with(kind, "yes"));
    let standing = client.list("list-policies", "list-policy", all).await?;
    let troubles = match client.last_errors().await {
        // charon does not tell.
        Err(Error::UnknownEvent(_)) => BTreeMap::new(),
        troubles => troubles?,
    };
    let definitions = match client.definitions().await {
        Err(Error::UnknownEvent(_)) => None,
        definitions => Some(definitions?),
    };
    // Neither is ever cancelled, and a panic of theirs is one of ours.
    let ended = |_| Error::Closed;
    Ok(Told {
        daemon: version.daemon,
        version: version.swanherd.unwrap_or(version.version),
        dataplane: stats.str("data-plane").map(str::to_owned),
        configured: listed.await.map_err(ended)??,
        sas: sas.await.map_err(ended)??,
        standing: standing.into_iter().map(|(_, policy)| policy).collect(),
        troubles,
        definitions,
    })
}

/// What runs of a connection.
#[derive(Default)]
struct Running<'a> {
    /// The newest IKE SA.
    newest: Option<&'a IkeSa>,
    /// The newest SA of each child that carries packets, which is the one that new ones take.
    children: BTreeMap<&'a str, (&'a IkeSa, &'a ChildSa)>,
}

/// By connection.
fn running(sas: &[IkeSa]) -> BTreeMap<&str, Running<'_>> {
    let carries =
        |sa: &&ChildSa| matches!(sa.state.as_str(), "INSTALLED" | "UPDATING" | "REKEYING");
    let mut found: BTreeMap<&str, Running<'_>> = BTreeMap::new();
    for sa in sas {
        let of_connection = found.entry(&sa.name).or_default();
        if of_connection
            .newest
            .is_none_or(|other| other.uniqueid < sa.uniqueid)
        {
            of_connection.newest = Some(sa);
        }
        for child in sa.children.iter().filter(carries) {
            let newest = of_connection
                .children
                .entry(&child.name)
                .or_insert((sa, child));
            if newest.1.uniqueid < child.uniqueid {
                *newest = (sa, child);
            }
        }
    }
    found
}

/// Puts together what `name` names, or everything. Linear in what there is, but for look-ups.
fn report(told: &Told, name: Option<&str>, now: u64) -> Report {
    let wanted =
        |connection: &str, child: &str| name.is_none_or(|name| is_named(name, connection, child));
    let running = running(&told.sas);
    let nothing = Running::default();
    let of = |connection: &str| running.get(connection).unwrap_or(&nothing);

    let listed: BTreeSet<(&str, &str)> = told
        .configured
        .iter()
        .map(|(connection, child)| (connection.as_str(), child.as_str()))
        .collect();
    let mut tunnels: Vec<Tunnel> = told
        .configured
        .iter()
        .filter(|(connection, child)| wanted(connection, child))
        .map(|(connection, child)| tunnel(connection, child, true, of(connection)))
        .collect();
    let unlisted: BTreeSet<(&str, &str)> = told
        .sas
        .iter()
        .flat_map(|sa| {
            let children = sa.children.iter();
            children.map(|child| (sa.name.as_str(), child.name.as_str()))
        })
        .filter(|key| !listed.contains(key) && wanted(key.0, key.1))
        .collect();
    tunnels.extend(
        unlisted
            .into_iter()
            .map(|(connection, child)| tunnel(connection, child, false, of(connection))),
    );

    let mut traps: BTreeSet<(&str, &str)> = BTreeSet::new();
    let mut shunts = Vec::new();
    for policy in &told.standing {
        let action = match policy.mode.as_str() {
            "PASS" => "pass",
            "DROP" => "drop",
            _ => {
                traps.insert((&policy.ike, &policy.child));
                continue;
            }
        };
        if wanted(&policy.ike, &policy.child) {
            shunts.push(Shunt {
                connection: policy.ike.clone(),
                child: policy.child.clone(),
                action,
                local_ts: policy.local_ts.clone(),
                remote_ts: policy.remote_ts.clone(),
            });
        }
    }
    for tunnel in &mut tunnels {
        tunnel.trap = traps.contains(&(tunnel.connection.as_str(), tunnel.child.as_str()));
        if tunnel.trap && tunnel.state == State::Down {
            tunnel.state = State::Trap;
        }
        if let Some(troubles) = told.troubles.get(&tunnel.connection) {
            tunnel.next_attempt_seconds = troubles.next_attempt(&tunnel.child);
            tunnel.last_error = troubles.last_error(&tunnel.child).filter(|error| {
                // An SA that came up since shows that it is over.
                let age = i64::try_from(now.saturating_sub(error.at)).unwrap_or(i64::MAX);
                let installed = tunnel.installed_seconds.unwrap_or(i64::MAX);
                tunnel.state != State::Up || age < installed
            });
        }
    }
    let mut definitions = told.definitions.clone();
    if let (Some(name), Some(definitions)) = (name, &mut definitions) {
        let connection = name.split('/').next().unwrap_or_default();
        definitions
            .refused
            .retain(|refused, _| refused == connection);
    }
    Report {
        daemon: told.daemon.clone(),
        version: told.version.clone(),
        dataplane: told.dataplane.clone(),
        up: tunnels.iter().filter(|t| t.state == State::Up).count(),
        tunnels,
        shunts,
        definitions,
    }
}

/// Whether a child carries packets.
pub(super) fn is_up(connection: &str, child: &str, sas: &[IkeSa]) -> bool {
    running(sas)
        .get(connection)
        .is_some_and(|of| of.children.contains_key(child))
}

fn tunnel(connection: &str, child: &str, configured: bool, running: &Running<'_>) -> Tunnel {
    let installed = running.children.get(child).copied();
    let ike = installed.map(|(sa, _)| sa).or(running.newest);
    let one = installed.map(|(_, one)| one);
    Tunnel {
        connection: connection.to_owned(),
        child: child.to_owned(),
        state: match (one, ike) {
            (Some(_), _) => State::Up,
            (None, Some(sa)) if matches!(sa.state.as_str(), "CREATED" | "CONNECTING") => {
                State::Connecting
            }
            (None, _) => State::Down,
        },
        configured,
        ike_state: ike.map(|sa| sa.state.clone()),
        child_state: one.map(|one| one.state.clone()),
        local: ike.map(|sa| endpoint(&sa.local_host, sa.local_port)),
        remote: ike.map(|sa| endpoint(&sa.remote_host, sa.remote_port)),
        local_id: ike.map(|sa| sa.local_id.clone()),
        remote_id: ike.map(|sa| sa.remote_id.clone()),
        ike_suite: ike.and_then(ike_suite),
        suite: one.and_then(child_suite),
        bytes_in: one.map_or(0, |one| one.bytes_in),
        bytes_out: one.map_or(0, |one| one.bytes_out),
        packets_in: one.map_or(0, |one| one.packets_in),
        packets_out: one.map_or(0, |one| one.packets_out),
        installed_seconds: one.and_then(|one| one.install_time),
        rekey_seconds: one.and_then(|one| one.rekey_time),
        life_seconds: one.and_then(|one| one.life_time),
        ike_established_seconds: ike.and_then(|sa| sa.established),
        ike_rekey_seconds: ike.and_then(|sa| sa.rekey_time),
        ike_reauth_seconds: ike.and_then(|sa| sa.reauth_time),
        trap: false,
        virtual_addresses: ike.map_or_else(Vec::new, |sa| sa.local_vips.clone()),
        last_error: None,
        next_attempt_seconds: None,
    }
}

pub(super) fn endpoint(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// The algorithms of an IKE SA.
pub(super) fn ike_suite(sa: &IkeSa) -> Option<String> {
    suite([
        cipher(sa.encr_alg.as_deref(), sa.encr_keysize),
        sa.integ_alg.clone(),
        sa.prf_alg.clone(),
        sa.dh_group.clone(),
    ])
}

/// The algorithms of a CHILD SA.
pub(super) fn child_suite(sa: &ChildSa) -> Option<String> {
    suite([
        cipher(sa.encr_alg.as_deref(), sa.encr_keysize),
        sa.integ_alg.clone(),
        sa.dh_group.clone(),
        None,
    ])
}

fn cipher(name: Option<&str>, bits: Option<u16>) -> Option<String> {
    let name = name?;
    Some(bits.map_or_else(|| name.to_owned(), |bits| format!("{name}-{bits}")))
}

fn suite(parts: [Option<String>; 4]) -> Option<String> {
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("/"))
}

fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_secs())
}

fn table(report: &Report, coloured: bool) -> String {
    let width = |of: fn(&Tunnel) -> usize, least: usize| {
        report.tunnels.iter().map(of).max().unwrap_or(0).max(least)
    };
    let name = width(|t| t.connection.len() + 1 + t.child.len(), 6);
    let peer = width(|t| t.remote.as_ref().map_or(1, String::len), 4);
    let cipher = width(|t| t.suite.as_ref().map_or(1, String::len), 5);
    let mut text = format!(
        "{:name$}  {:10}  {:peer$}  {:cipher$}  {:>14}  {:>14}  {:>8}  {:>8}  {:>8}  {:>9}\n",
        "TUNNEL",
        "STATE",
        "PEER",
        "SUITE",
        "BYTES IN",
        "BYTES OUT",
        "UP FOR",
        "REKEY IN",
        "IKE FOR",
        "IKE REKEY"
    );
    for t in &report.tunnels {
        // A reauthentication makes new keys, too.
        let ike_rekey = match (t.ike_rekey_seconds, t.ike_reauth_seconds) {
            (Some(rekey), Some(reauth)) => Some(rekey.min(reauth)),
            (rekey, reauth) => rekey.or(reauth),
        };
        // Escape sequences have no width, so they go around what is padded already.
        let state = format!("{:10}", t.state.name());
        text += &format!(
            "{:name$}  {}  {:peer$}  {:cipher$}  {:>14}  {:>14}  {:>8}  {:>8}  {:>8}  {:>9}\n",
            format!("{}/{}", t.connection, t.child),
            t.state.colour().paint(&state, coloured),
            t.remote.as_deref().unwrap_or("-"),
            t.suite.as_deref().unwrap_or("-"),
            t.bytes_in,
            t.bytes_out,
            seconds(t.installed_seconds),
            seconds(t.rekey_seconds),
            seconds(t.ike_established_seconds),
            seconds(ike_rekey),
        );
    }
    // Both are the connection's, which may have many children.
    let mut told = BTreeSet::new();
    for t in &report.tunnels {
        let name = &t.connection;
        let addresses = t.virtual_addresses.join(", ");
        if !addresses.is_empty() && told.insert((name, addresses.clone())) {
            text += &format!("{name}: virtual address {addresses}\n");
        }
        let line = trouble(t);
        if !line.is_empty() && told.insert((name, line.clone())) {
            text += &format!("{name}/{}: {line}\n", t.child);
        }
    }
    for shunt in &report.shunts {
        text += &format!(
            "{}/{}: {} {} === {}\n",
            shunt.connection,
            shunt.child,
            shunt.action,
            shunt.local_ts.join(" "),
            shunt.remote_ts.join(" ")
        );
    }
    if let Some(definitions) = &report.definitions {
        for (name, reason) in &definitions.refused {
            text += &format!("{name}: refused: {reason}\n");
        }
        if let Some(error) = &definitions.error {
            text += &format!("{} not applied: {error}\n", definitions.file);
        }
    }
    let waiting = report.tunnels.iter().filter(|t| t.state == State::Trap);
    let waiting = match waiting.count() {
        0 => String::new(),
        1 => ", 1 waits for traffic".to_owned(),
        many => format!(", {many} wait for traffic"),
    };
    text += &format!(
        "{} of {} up{waiting}; {} {}{}\n",
        report.up,
        report.tunnels.len(),
        report.daemon,
        report.version,
        report
            .dataplane
            .as_ref()
            .map_or_else(String::new, |name| format!(", {name} data plane"))
    );
    text
}

/// A span, or a dash. What is overdue is due now.
pub(super) fn seconds(number: Option<i64>) -> String {
    number.map_or_else(
        || "-".to_owned(),
        |number| span(u64::try_from(number).unwrap_or(0)),
    )
}

/// Why a tunnel failed last, and when it is tried again.
fn trouble(tunnel: &Tunnel) -> String {
    let error = tunnel
        .last_error
        .as_ref()
        .map(|error| format!("{} ago: {}", error.age(), error.text));
    let next = tunnel
        .next_attempt_seconds
        .map(|seconds| format!("next attempt in {seconds}s"));
    let parts: Vec<_> = error.into_iter().chain(next).collect();
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use swanherd_vici::installed::ChildTrouble;

    use super::*;

    fn child(name: &str, id: u32, state: &str) -> ChildSa {
        ChildSa {
            name: name.to_owned(),
            uniqueid: id,
            state: state.to_owned(),
            install_time: Some(90),
            rekey_time: Some(3000),
            ..ChildSa::default()
        }
    }

    fn ike(name: &str, id: u32, state: &str, children: Vec<ChildSa>) -> IkeSa {
        IkeSa {
            name: name.to_owned(),
            uniqueid: id,
            state: state.to_owned(),
            remote_host: "192.0.2.2".to_owned(),
            remote_port: 4500,
            established: (state == "ESTABLISHED").then_some(7300),
            rekey_time: Some(11_000),
            reauth_time: Some(9000),
            children,
            ..IkeSa::default()
        }
    }

    fn told(configured: &[(&str, &str)], sas: Vec<IkeSa>) -> Told {
        Told {
            daemon: "swanherd".to_owned(),
            version: "1".to_owned(),
            configured: configured
                .iter()
                .map(|(connection, child)| ((*connection).to_owned(), (*child).to_owned()))
                .collect(),
            sas,
            ..Told::default()
        }
    }

    #[test]
    fn the_newest_child_that_carries_packets_is_shown() {
        let told = told(
            &[("a", "x"), ("a", "y"), ("b", "x")],
            vec![
                ike(
                    "a",
                    3,
                    "ESTABLISHED",
                    vec![child("x", 7, "REKEYED"), child("x", 5, "INSTALLED")],
                ),
                ike("a", 2, "DELETING", vec![child("x", 4, "INSTALLED")]),
                ike("b", 9, "CONNECTING", Vec::new()),
                ike("gone", 1, "ESTABLISHED", vec![child("z", 1, "INSTALLED")]),
            ],
        );

        let report = report(&told, None, 0);

        let seen: Vec<_> = report
            .tunnels
            .iter()
            .map(|t| {
                (
                    t.connection.as_str(),
                    t.child.as_str(),
                    t.state,
                    t.configured,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("a", "x", State::Up, true),
                ("a", "y", State::Down, true),
                ("b", "x", State::Connecting, true),
                ("gone", "z", State::Up, false),
            ]
        );
        assert_eq!(report.tunnels[0].ike_state.as_deref(), Some("ESTABLISHED"));
        assert_eq!(report.up, 2);
    }

    #[test]
    fn a_name_selects_and_what_is_refused_goes_with_its_connection() {
        let mut told = told(&[("a", "x"), ("a", "y"), ("b", "x")], Vec::new());
        told.definitions = Some(Definitions {
            refused: [("a", "no"), ("c", "no")]
                .map(|(name, why)| (name.to_owned(), why.to_owned()))
                .into(),
            ..Definitions::default()
        });
        let of = |name: &str| {
            let report = report(&told, Some(name), 0);
            let names: Vec<_> = report
                .tunnels
                .iter()
                .map(|t| format!("{}/{}", t.connection, t.child))
                .collect();
            let refused: Vec<_> = report.definitions.unwrap().refused.into_keys().collect();
            (names.join(" "), refused.join(" "))
        };

        assert_eq!(of("a"), ("a/x a/y".to_owned(), "a".to_owned()));
        assert_eq!(of("x"), ("a/x b/x".to_owned(), String::new()));
        assert_eq!(of("b/x"), ("b/x".to_owned(), String::new()));
        assert_eq!(of("c"), (String::new(), "c".to_owned()));
    }

    #[test]
    fn an_error_is_shown_until_the_tunnel_has_come_up_since() {
        let mut told = told(
            &[("a", "x"), ("b", "x")],
            vec![ike("a", 1, "ESTABLISHED", vec![child("x", 1, "INSTALLED")])],
        );
        let troubled = |at: u64| Troubles {
            at,
            text: "no answer".to_owned(),
            children: BTreeMap::from([(
                "x".to_owned(),
                ChildTrouble {
                    next_attempt: Some(5),
                    ..ChildTrouble::default()
                },
            )]),
        };
        // Up for 90 seconds.
        let now = 10_000;
        told.troubles = BTreeMap::from([
            ("a".to_owned(), troubled(now - 100)),
            ("b".to_owned(), troubled(now - 100)),
        ]);
        let old = report(&told, None, now);
        told.troubles.insert("a".to_owned(), troubled(now - 80));
        let young = report(&told, None, now);

        assert_eq!(old.tunnels[0].last_error, None);
        assert!(young.tunnels[0].last_error.is_some());
        assert!(old.tunnels[1].last_error.is_some());
        assert_eq!(old.tunnels[1].next_attempt_seconds, Some(5));
    }

    #[test]
    fn the_table_shows_ages_and_rekeyings() {
        let mut told = told(
            &[("site", "net"), ("site", "other")],
            vec![ike(
                "site",
                1,
                "ESTABLISHED",
                vec![child("net", 1, "INSTALLED")],
            )],
        );
        told.standing = vec![StandingPolicy {
            child: "other".to_owned(),
            ike: "site".to_owned(),
            mode: "TUNNEL".to_owned(),
            ..StandingPolicy::default()
        }];

        let report = report(&told, None, 0);

        assert_eq!(
            table(&report, false),
            "\
TUNNEL      STATE       PEER            SUITE        BYTES IN       BYTES OUT    UP FOR  REKEY IN   IKE FOR  IKE REKEY
site/net    up          192.0.2.2:4500  -                   0               0       90s       50m        2h         2h
site/other  trap        192.0.2.2:4500  -                   0               0         -         -        2h         2h
1 of 2 up, 1 waits for traffic; swanherd 1
"
        );
        assert!(table(&report, true).contains("\u{1b}[32mup        \u{1b}[0m"));
    }

    /// A measure against quadratic searches, with room for a slow and busy machine.
    #[test]
    fn ten_thousand_tunnels_are_put_together_in_no_time() {
        let names: Vec<_> = (0..10_000).map(|n| format!("site-{n}")).collect();
        let configured: Vec<_> = names.iter().map(|name| (name.as_str(), "net")).collect();
        let sas = (0u32..)
            .zip(&names)
            .map(|(id, name)| ike(name, id, "ESTABLISHED", vec![child("net", id, "INSTALLED")]))
            .collect();
        let mut told = told(&configured, sas);
        told.standing = names
            .iter()
            .map(|name| StandingPolicy {
                child: "net".to_owned(),
                ike: name.clone(),
                mode: "TUNNEL".to_owned(),
                ..StandingPolicy::default()
            })
            .collect();

        let took = (0..3)
            .map(|_| {
                let begun = Instant::now();
                let report = report(&told, None, 0);
                assert_eq!((report.up, report.tunnels.len()), (10_000, 10_000));
                assert!(report.tunnels.iter().all(|tunnel| tunnel.trap));
                begun.elapsed()
            })
            .min()
            .unwrap();

        // 10^8 comparisons of strings would take many seconds in a build for tests.
        assert!(took < Duration::from_millis(800), "{took:?}");
    }
}
