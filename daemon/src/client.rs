// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's own VICI client. What it does works against charon, too.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use swanherd_vici::types::{Initiate, ListSas, LogLine, Selector};
use swanherd_vici::{Client, Error, Message};

use crate::cli::{Server, UpDown};

pub(crate) mod complete;
mod events;
mod list;
mod rekey;
mod status;
pub(crate) mod style;

pub(crate) use events::events;
pub(crate) use list::list;
pub(crate) use rekey::rekey;
pub(crate) use status::status;

/// Nothing that is asked here takes longer; `up` and `down` have a limit of their own.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Fine.
const OK: u8 = 0;
/// The thing asked about is wrong or down.
const WRONG: u8 = 1;
/// Wrong usage.
const USAGE: u8 = 2;

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
    status::is_up(connection, child, &sas)
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
        .filter(|(connection, child)| is_named(&args.name, connection, child))
        .collect();
    if wanted.is_empty() {
        // Of charon, nothing is known of that.
        let definitions = client.definitions().await.unwrap_or_default();
        say(&nothing_called(&args.name, &children, &definitions.refused));
        return ExitCode::from(WRONG);
    }
    client.set_timeout(None);
    let mut code = OK;
    for (connection, child) in wanted {
        if let Err(error) = act(&mut client, (connection, child), args).await {
            say(&format!("{connection}/{child}: {}", words(&error)));
            code = WRONG;
        }
    }
    ExitCode::from(code)
}

/// Whether `name` is that of a connection, of a child, or `CONNECTION/CHILD`.
fn is_named(name: &str, connection: &str, child: &str) -> bool {
    name == connection || name == child || name.split_once('/') == Some((connection, child))
}

/// Why `name` finds nothing.
fn nothing_called(
    name: &str,
    known: &[(String, String)],
    refused: &BTreeMap<String, String>,
) -> String {
    /// More names than that help nobody.
    const SHOWN: usize = 10;
    let connection = name.split('/').next().unwrap_or_default();
    if let Some(reason) = refused.get(connection) {
        return format!("{connection}: refused: {reason}");
    }
    let mut names: Vec<_> = known
        .iter()
        .take(SHOWN)
        .map(|(connection, child)| format!("{connection}/{child}"))
        .collect();
    match known.len() {
        0 => names.push("nothing".to_owned()),
        more if more > SHOWN => names.push(format!("{} more", more - SHOWN)),
        _ => {}
    }
    format!("nothing is called '{name}'; there is: {}", names.join(", "))
}

/// The daemon's words, and the reason if it gives one beside them.
fn words(error: &Error) -> String {
    let text = error.to_string();
    match error {
        Error::Refused { reply, .. } => match reply.str("reason") {
            Some(reason) if !text.contains(reason) => format!("{text}: {reason}"),
            _ => text,
        },
        _ => text,
    }
}

/// A time span in one unit, such as `5m`.
fn span(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Certificates for TLS, if they were given.
fn tls(server: &Server) -> Option<swanherd_vici::Tls> {
    Some(swanherd_vici::Tls {
        ca: server.tls_ca.clone()?,
        cert: server.tls_cert.clone()?,
        key: server.tls_key.clone()?,
    })
}

pub(crate) async fn connect(server: &Server) -> Result<Client, Error> {
    let uri = server
        .uri
        .clone()
        .unwrap_or_else(crate::paths::default_vici_uri);
    let mut client = match tls(server) {
        Some(tls) => Client::connect_tls(&uri, &tls).await?,
        None => Client::connect(&uri).await?,
    };
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

/// Standard output that may be a closed pipe.
pub(crate) fn put(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Standard error.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "swanherd: {text}");
}

fn fail(error: &Error) -> ExitCode {
    say(&words(error));
    ExitCode::from(match error {
        Error::Address(_) => USAGE,
        _ => WRONG,
    })
}
