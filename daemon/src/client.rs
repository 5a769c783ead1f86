// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `status`, `up` and `down`: the daemon's own VICI client. They work against charon too.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use swanherd_vici::installed::{Definitions, LastError};
use swanherd_vici::types::{Initiate, ListSas, LogLine, Selector};
use swanherd_vici::{ChildSa, Client, Error, IkeSa, Message};

use crate::cli::{Server, Status, UpDown};

/// Nothing that is asked here takes longer; `up` and `down` have a limit of their own.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Fine.
const OK: u8 = 0;
/// The thing asked about is wrong or down.
const WRONG: u8 = 1;

/// One configured child, or one that runs without being configured any more.
#[derive(Debug, Serialize)]
pub(crate) struct Tunnel {
    connection: String,
    child: String,
    /// `up`, `connecting`, `trap` (the first packet brings it up) or `down`.
    state: &'static str,
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
    /// Whether a trap is in force.
    trap: bool,
    /// Virtual addresses that the peer gave us.
    virtual_addresses: Vec<String>,
    /// Why the last attempt of the connection failed, if it failed after the present SA came up.
    last_error: Option<LastError>,
    /// Seconds until the next attempt to bring it up, if one is planned.
    next_attempt_seconds: Option<u64>,
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
#[derive(Debug, Default, Deserialize)]
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

/// What `list-conns` says of one connection, as far as it is needed here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ListedConnection {
    children: BTreeMap<String, ListedChild>,
}

/// One child of [`ListedConnection`].
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ListedChild {
    mode: String,
}

impl ListedChild {
    /// Whether it is negotiated at all, rather than a rule for traffic in clear.
    fn is_tunnel(&self) -> bool {
        !matches!(self.mode.as_str(), "PASS" | "DROP")
    }
}

/// `swanherd status`
pub(crate) async fn status(args: Status) -> ExitCode {
    match report(&args.server).await {
        Ok(report) => {
            let fine = |tunnel: &Tunnel| matches!(tunnel.state, "up" | "trap");
            let applied = |definitions: &Definitions| {
                definitions.error.is_none() && definitions.refused.is_empty()
            };
            let all_fine =
                report.tunnels.iter().all(fine) && report.definitions.as_ref().is_none_or(applied);
            if args.json {
                print_json(&report);
            } else {
                print_table(&report);
            }
            ExitCode::from(if all_fine { OK } else { WRONG })
        }
        Err(error) => fail(&error),
    }
}

/// `swanherd up`
pub(crate) async fn up(args: UpDown) -> ExitCode {
    each(&args, async |client, (connection, child), args| {
        let what = Initiate {
            child: Some(child.to_owned()),
            ike: Some(connection.to_owned()),
            timeout_ms: millis(args.timeout),
            log_level: Some(1),
        };
        match client.initiate(&what, |line| print_log(args, &line)).await {
            Err(Error::Refused { .. }) if is_up(client, connection, child).await => {
                put(&format!("{connection}/{child} is up\n"));
                Ok(())
            }
            other => other,
        }
    })
    .await
}

/// Whether a child carries packets.
async fn is_up(client: &mut Client, connection: &str, child: &str) -> bool {
    let filter = ListSas {
        ike: Some(connection.to_owned()),
        child: Some(child.to_owned()),
        ..ListSas::default()
    };
    let sas = client.list_sas(&filter).await.unwrap_or_default();
    tunnel(connection, child, true, &sas).state == "up"
}

/// `swanherd down`
pub(crate) async fn down(args: UpDown) -> ExitCode {
    each(&args, async |client, (connection, child), args| {
        let selector = Selector {
            ike: Some(connection.to_owned()),
            child: (!names_connection(args, connection)).then(|| child.to_owned()),
            ..Selector::default()
        };
        let gone = client
            .terminate(&selector, false, millis(args.timeout), |line| {
                print_log(args, &line)
            })
            .await;
        match gone {
            // Taking a connection down takes all its children down; the next one finds nothing.
            Err(Error::Refused { ref reply, .. }) if reply.str("matches") == Some("0") => Ok(()),
            other => other.map(drop),
        }
    })
    .await
}

fn names_connection(args: &UpDown, connection: &str) -> bool {
    args.name == connection
}

/// Calls `act` for every configured child that `args.name` names.
async fn each(
    args: &UpDown,
    act: impl AsyncFn(&mut Client, (&str, &str), &UpDown) -> Result<(), Error>,
) -> ExitCode {
    let mut client = match connect(&args.server).await {
        Ok(client) => client,
        Err(error) => return fail(&error),
    };
    let children = match configured(&mut client).await {
        Ok(children) => children,
        Err(error) => return fail(&error),
    };
    let wanted: Vec<_> = children
        .iter()
        .filter(|(connection, child)| {
            args.name == *connection
                || args.name == *child
                || args.name.split_once('/') == Some((connection, child))
        })
        .collect();
    if wanted.is_empty() {
        let connection = args.name.split('/').next().unwrap_or_default();
        // Of charon, nothing is known of that.
        let definitions = client.definitions().await.unwrap_or_default();
        if let Some(reason) = definitions.refused.get(connection) {
            say(&format!("{connection}: refused: {reason}"));
            return ExitCode::from(WRONG);
        }
        let known: Vec<_> = children
            .iter()
            .map(|(connection, child)| format!("{connection}/{child}"))
            .collect();
        say(&format!(
            "nothing is called '{}'; there is: {}",
            args.name,
            if known.is_empty() {
                "nothing".to_owned()
            } else {
                known.join(", ")
            }
        ));
        return ExitCode::from(WRONG);
    }
    client.set_timeout(None);
    let mut code = OK;
    for (connection, child) in wanted {
        if let Err(error) = act(&mut client, (connection, child), args).await {
            let reason = match &error {
                Error::Refused { reply, .. } => reply.str("reason"),
                _ => None,
            };
            let mut text = error.to_string();
            if let Some(reason) = reason
                && !text.contains(reason)
            {
                text = format!("{text}: {reason}");
            }
            say(&format!("{connection}/{child}: {text}"));
            code = WRONG;
        }
    }
    ExitCode::from(code)
}

pub(crate) async fn connect(server: &Server) -> Result<Client, Error> {
    let uri = server
        .uri
        .clone()
        .unwrap_or_else(crate::paths::default_vici_uri);
    let mut client = Client::connect(&uri).await?;
    client.set_timeout(Some(ANSWER_LIMIT));
    Ok(client)
}

/// (connection, child) of everything loaded that can be up or down.
async fn configured(client: &mut Client) -> Result<Vec<(String, String)>, Error> {
    let connections: Vec<(String, ListedConnection)> = client
        .list("list-conns", "list-conn", Message::new())
        .await?;
    Ok(connections
        .into_iter()
        .flat_map(|(name, listed)| {
            let tunnels = listed
                .children
                .into_iter()
                .filter(|(_, child)| child.is_tunnel());
            tunnels.map(move |(child, _)| (name.clone(), child))
        })
        .collect())
}

async fn report(server: &Server) -> Result<Report, Error> {
    let mut client = connect(server).await?;
    let version = client.version().await?;
    let stats = client.request("stats", Message::new()).await?;
    let configured = configured(&mut client).await?;
    let sas = client.list_sas(&ListSas::default()).await?;
    let standing = standing(&mut client).await?;
    let errors = match client.last_errors().await {
        // charon does not tell.
        Err(Error::UnknownEvent(_)) => BTreeMap::new(),
        errors => errors?,
    };
    let definitions = match client.definitions().await {
        Err(Error::UnknownEvent(_)) => None,
        definitions => Some(definitions?),
    };
    let mut tunnels: Vec<_> = configured
        .iter()
        .map(|(connection, child)| tunnel(connection, child, true, &sas))
        .collect();
    for sa in &sas {
        for child in &sa.children {
            let key = (sa.name.clone(), child.name.clone());
            let listed = tunnels
                .iter()
                .any(|t| t.connection == key.0 && t.child == key.1);
            if !listed {
                tunnels.push(tunnel(&key.0, &key.1, false, &sas));
            }
        }
    }
    let mut shunts = Vec::new();
    for policy in standing {
        let action = match policy.mode.as_str() {
            "PASS" => "pass",
            "DROP" => "drop",
            _ => {
                let trapped = tunnels
                    .iter_mut()
                    .find(|t| t.connection == policy.ike && t.child == policy.child);
                if let Some(tunnel) = trapped {
                    tunnel.trap = true;
                    if tunnel.state == "down" {
                        tunnel.state = "trap";
                    }
                }
                continue;
            }
        };
        shunts.push(Shunt {
            connection: policy.ike,
            child: policy.child,
            action,
            local_ts: policy.local_ts,
            remote_ts: policy.remote_ts,
        });
    }
    for tunnel in &mut tunnels {
        let Some(troubles) = errors.get(&tunnel.connection) else {
            continue;
        };
        tunnel.next_attempt_seconds = troubles.next_attempt(&tunnel.child);
        tunnel.last_error = troubles.last_error(&tunnel.child).filter(|error| {
            // An SA that came up since shows that it is over.
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let age = now.map_or(0, |now| now.as_secs()).saturating_sub(error.at);
            let installed = tunnel.installed_seconds.unwrap_or(i64::MAX);
            tunnel.state != "up" || i64::try_from(age).unwrap_or(i64::MAX) < installed
        });
    }
    Ok(Report {
        daemon: version.daemon,
        version: version.swanherd.unwrap_or(version.version),
        dataplane: stats.str("data-plane").map(str::to_owned),
        up: tunnels.iter().filter(|tunnel| tunnel.state == "up").count(),
        tunnels,
        shunts,
        definitions,
    })
}

/// Traps and shunts in force.
async fn standing(client: &mut Client) -> Result<Vec<StandingPolicy>, Error> {
    let all = ["trap", "pass", "drop"]
        .into_iter()
        .fold(Message::new(), |args, kind| args.with(kind, "yes"));
    let listed = client.list("list-policies", "list-policy", all).await?;
    Ok(listed.into_iter().map(|(_, policy)| policy).collect())
}

fn tunnel(connection: &str, child: &str, configured: bool, sas: &[IkeSa]) -> Tunnel {
    let carries =
        |sa: &&ChildSa| matches!(sa.state.as_str(), "INSTALLED" | "UPDATING" | "REKEYING");
    let named = || sas.iter().filter(|sa| sa.name == connection);
    // The newest of several, which is the one that carries new packets.
    let installed = named()
        .flat_map(|sa| sa.children.iter().map(move |one| (sa, one)))
        .filter(|(_, one)| one.name == child && carries(one))
        .max_by_key(|(_, one)| one.uniqueid);
    let ike = installed
        .map(|(sa, _)| sa)
        .or_else(|| named().max_by_key(|sa| sa.uniqueid));
    let one = installed.map(|(_, one)| one);
    Tunnel {
        connection: connection.to_owned(),
        child: child.to_owned(),
        state: match (one, ike) {
            (Some(_), _) => "up",
            (None, Some(sa)) if matches!(sa.state.as_str(), "CREATED" | "CONNECTING") => {
                "connecting"
            }
            (None, _) => "down",
        },
        configured,
        ike_state: ike.map(|sa| sa.state.clone()),
        child_state: one.map(|one| one.state.clone()),
        local: ike.map(|sa| endpoint(&sa.local_host, sa.local_port)),
        remote: ike.map(|sa| endpoint(&sa.remote_host, sa.remote_port)),
        local_id: ike.map(|sa| sa.local_id.clone()),
        remote_id: ike.map(|sa| sa.remote_id.clone()),
        ike_suite: ike.and_then(|sa| {
            let parts = [
                cipher(sa.encr_alg.as_deref(), sa.encr_keysize),
                sa.integ_alg.clone(),
                sa.prf_alg.clone(),
                sa.dh_group.clone(),
            ];
            suite(parts)
        }),
        suite: one.and_then(|one| {
            let parts = [
                cipher(one.encr_alg.as_deref(), one.encr_keysize),
                one.integ_alg.clone(),
                one.dh_group.clone(),
                None,
            ];
            suite(parts)
        }),
        bytes_in: one.map_or(0, |one| one.bytes_in),
        bytes_out: one.map_or(0, |one| one.bytes_out),
        packets_in: one.map_or(0, |one| one.packets_in),
        packets_out: one.map_or(0, |one| one.packets_out),
        installed_seconds: one.and_then(|one| one.install_time),
        trap: false,
        virtual_addresses: ike.map_or_else(Vec::new, |sa| sa.local_vips.clone()),
        last_error: None,
        next_attempt_seconds: None,
    }
}

fn endpoint(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

fn cipher(name: Option<&str>, bits: Option<u16>) -> Option<String> {
    let name = name?;
    Some(bits.map_or_else(|| name.to_owned(), |bits| format!("{name}-{bits}")))
}

fn suite(parts: [Option<String>; 4]) -> Option<String> {
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("/"))
}

fn millis(limit: Duration) -> i64 {
    i64::try_from(limit.as_millis()).unwrap_or(i64::MAX)
}

fn print_log(args: &UpDown, line: &LogLine) {
    if !args.quiet {
        put(&format!("[{}] {}\n", line.group, line.msg));
    }
}

pub(crate) fn print_json(report: &impl Serialize) {
    match serde_json::to_string_pretty(report) {
        Ok(text) => put(&(text + "\n")),
        Err(error) => say(&format!("cannot print the report: {error}")),
    }
}

fn print_table(report: &Report) {
    let width = |of: fn(&Tunnel) -> usize, least: usize| {
        report.tunnels.iter().map(of).max().unwrap_or(0).max(least)
    };
    let name = width(|t| t.connection.len() + 1 + t.child.len(), 6);
    let peer = width(|t| t.remote.as_ref().map_or(1, String::len), 4);
    let cipher = width(|t| t.suite.as_ref().map_or(1, String::len), 5);
    put(&format!(
        "{:name$}  {:10}  {:peer$}  {:cipher$}  {:>14}  {:>14}  {:>8}\n",
        "TUNNEL", "STATE", "PEER", "SUITE", "BYTES IN", "BYTES OUT", "UP FOR"
    ));
    for t in &report.tunnels {
        put(&format!(
            "{:name$}  {:10}  {:peer$}  {:cipher$}  {:>14}  {:>14}  {:>8}\n",
            format!("{}/{}", t.connection, t.child),
            t.state,
            t.remote.as_deref().unwrap_or("-"),
            t.suite.as_deref().unwrap_or("-"),
            t.bytes_in,
            t.bytes_out,
            t.installed_seconds
                .map_or_else(|| "-".to_owned(), |seconds| format!("{seconds}s")),
        ));
    }
    // Both are the connection's, which may have many children.
    let mut told = BTreeSet::new();
    for t in &report.tunnels {
        let name = &t.connection;
        let addresses = t.virtual_addresses.join(", ");
        if !addresses.is_empty() && told.insert((name, addresses.clone())) {
            put(&format!("{name}: virtual address {addresses}\n"));
        }
        let line = trouble(t);
        if !line.is_empty() && told.insert((name, line.clone())) {
            put(&format!("{name}/{}: {line}\n", t.child));
        }
    }
    for shunt in &report.shunts {
        put(&format!(
            "{}/{}: {} {} === {}\n",
            shunt.connection,
            shunt.child,
            shunt.action,
            shunt.local_ts.join(" "),
            shunt.remote_ts.join(" ")
        ));
    }
    if let Some(definitions) = &report.definitions {
        for (name, reason) in &definitions.refused {
            put(&format!("{name}: refused: {reason}\n"));
        }
        if let Some(error) = &definitions.error {
            put(&format!("{} not applied: {error}\n", definitions.file));
        }
    }
    let waiting = report.tunnels.iter().filter(|t| t.state == "trap").count();
    let waiting = match waiting {
        0 => String::new(),
        1 => ", 1 waits for traffic".to_owned(),
        many => format!(", {many} wait for traffic"),
    };
    put(&format!(
        "{} of {} up{waiting}; {} {}{}\n",
        report.up,
        report.tunnels.len(),
        report.daemon,
        report.version,
        report
            .dataplane
            .as_ref()
            .map_or_else(String::new, |name| format!(", {name} data plane"))
    ));
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

/// Standard output that may be a closed pipe.
pub(crate) fn put(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Standard error.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "swanherd: {text}");
}

fn fail(error: &Error) -> ExitCode {
    say(&error.to_string());
    ExitCode::from(WRONG)
}
