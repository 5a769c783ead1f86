// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that change SAs: `initiate`, `terminate`, `rekey`, `install`, `uninstall`.

use std::time::Duration;

use swanherd_config::model::Child;
use swanherd_ike::api::{Command, LogGroup, LogLine};
use swanherd_vici::Message;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::args::{failure, flag, integer, selector, success, text};
use super::events::log_line;
use super::session::{Emitter, unix_now};
use crate::control::{CommandReply, Control, Snapshot};

/// Log lines on their way to a client. More are lost rather than held up.
const LOG_QUEUE: usize = 512;
const SHUTTING_DOWN: &str = "the daemon is shutting down";

/// How long a command is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// Not at all.
    No,
    /// Until it is done.
    ForEver,
    /// Until it is done, or so many milliseconds have passed.
    Millis(u64),
}

impl Wait {
    fn of(args: &Message) -> Self {
        match integer(args, "timeout").unwrap_or(0) {
            0 => Self::ForEver,
            millis => u64::try_from(millis).map_or(Self::No, Self::Millis),
        }
    }
}

/// `initiate`.
pub(super) async fn initiate(control: Control, args: &Message, emitter: Emitter) -> Message {
    let (ike, child) = (text(args, "ike"), text(args, "child"));
    let (kind, name) = match (ike, child) {
        (_, Some(child)) => ("CHILD_SA", child),
        (Some(ike), None) => ("IKE_SA", ike),
        (None, None) => return failure("missing configuration name"),
    };
    let snapshot = control.snapshot();
    let Some(connection) = find_connection(&snapshot, ike, child) else {
        return failure(format!("{kind} config '{name}' not found"));
    };
    drop(snapshot);
    let wait = Wait::of(args);
    let begun = unix_now();
    let command = Command::Initiate {
        connection: Some(connection.clone()),
        child: child.map(str::to_owned),
        respect_limits: flag(args, "init-limits"),
    };
    match execute(&control, command, wait, args, &emitter).await {
        // The endpoint speaks VICI's words, which leave out why.
        Ended::Done(reply) => match reply.result {
            Ok(()) => success(),
            Err(text)
                if let Some(answer) =
                    with_reason(&text, &format!("establishing {kind} '{name}' failed")) =>
            {
                answer
            }
            Err(text) => match control.snapshot().last_error(&connection, child) {
                Some((at, reason)) if *at >= begun => failure(text).with("reason", reason),
                _ => failure(text),
            },
        },
        Ended::NotWaited => success(),
        Ended::TimedOut(millis) => {
            failure(format!("{kind} '{name}' not established after {millis}ms"))
        }
        Ended::ShuttingDown => failure(SHUTTING_DOWN),
    }
}

/// `terminate`.
pub(super) async fn terminate(control: Control, args: &Message, emitter: Emitter) -> Message {
    let Some(selector) = selector(args) else {
        return failure("missing terminate selector");
    };
    // What is only on its way, or waits for its next attempt, is taken down as well.
    let count = || {
        let snapshot = control.snapshot();
        snapshot.matches(&selector).len() + snapshot.attempts(&selector)
    };
    let matches = count();
    let answer = |terminated: usize| {
        let text = match (terminated, matches) {
            (_, 0) => "no matching SAs to terminate found",
            (terminated, matches) if terminated >= matches => "",
            (_, 1) => "terminating SA failed",
            _ => "not all matching SAs could be terminated",
        };
        let mut out = Message::new();
        out.push("success", if text.is_empty() { "yes" } else { "no" });
        out.push_display("matches", matches);
        out.push_display("terminated", terminated);
        if !text.is_empty() {
            out.push("errmsg", text);
        }
        out
    };
    if matches == 0 {
        return answer(0);
    }
    let command = |force| Command::Terminate {
        selector: selector.clone(),
        force,
    };
    let wait = Wait::of(args);
    let force = flag(args, "force");
    // Forced with a timeout means politely at first.
    let first = force && !matches!(wait, Wait::Millis(_));
    let mut ended = execute(&control, command(first), wait, args, &emitter).await;
    if force && matches!(ended, Ended::TimedOut(_)) {
        ended = execute(&control, command(true), Wait::ForEver, args, &emitter).await;
    }
    match ended {
        Ended::Done(reply) => {
            let ended = if reply.result.is_ok() {
                reply.matches.max(reply.terminated)
            } else {
                reply.terminated
            };
            // Those that ended between our look and the command are as gone as the others.
            let vanished = matches.saturating_sub(reply.matches as usize);
            answer((ended as usize + vanished).min(matches))
        }
        Ended::NotWaited => answer(matches),
        Ended::TimedOut(_) => answer(matches.saturating_sub(count())),
        Ended::ShuttingDown => failure(SHUTTING_DOWN),
    }
}

/// `rekey`: only starts it.
pub(super) async fn rekey(control: Control, args: &Message, emitter: Emitter) -> Message {
    let Some(selector) = selector(args) else {
        return failure("missing rekey selector");
    };
    let command = Command::Rekey {
        selector,
        reauth: flag(args, "reauth"),
    };
    // Starting it takes no time, and tells which SAs can be rekeyed at all.
    let matches = match execute(&control, command, Wait::ForEver, args, &emitter).await {
        Ended::Done(reply) => reply.terminated,
        Ended::NotWaited | Ended::TimedOut(_) => 0,
        Ended::ShuttingDown => return failure(SHUTTING_DOWN),
    };
    let mut out = Message::new();
    out.push("success", if matches > 0 { "yes" } else { "no" });
    out.push_display("matches", matches);
    if matches == 0 {
        out.push("errmsg", "no matching SAs to rekey found");
    }
    out
}

/// `install`: the trap of a child, or its policies if it is a shunt.
pub(super) async fn install(control: Control, args: &Message, emitter: Emitter) -> Message {
    let Some(name) = text(args, "child") else {
        return failure("missing configuration name");
    };
    let Some(connection) = find_connection(&control.snapshot(), text(args, "ike"), Some(name))
    else {
        return failure("configuration name not found");
    };
    let command = Command::Install {
        connection: Some(connection),
        child: name.to_owned(),
    };
    at_once(&control, command, name, args, &emitter).await
}

/// `uninstall`: undoes [`install`], and what `start_action = trap` has installed.
pub(super) async fn uninstall(control: Control, args: &Message, emitter: Emitter) -> Message {
    let Some(name) = text(args, "child") else {
        return failure("missing configuration name");
    };
    if find_connection(&control.snapshot(), text(args, "ike"), Some(name)).is_none() {
        return failure(format!("policy '{name}' not found"));
    }
    let command = Command::Uninstall {
        connection: text(args, "ike").map(str::to_owned),
        child: name.to_owned(),
    };
    at_once(&control, command, name, args, &emitter).await
}

/// The refusal of a text that has VICI's words, which clients may look for, and more behind them.
fn with_reason(text: &str, words: &str) -> Option<Message> {
    let reason = text.strip_prefix(words)?.strip_prefix(": ")?;
    Some(failure(words).with("reason", reason))
}

/// Runs a command about the policies of the child `name`, which waits for no peer.
async fn at_once(
    control: &Control,
    command: Command,
    name: &str,
    args: &Message,
    emitter: &Emitter,
) -> Message {
    match execute(control, command, Wait::ForEver, args, emitter).await {
        Ended::Done(reply) => match reply.result {
            Ok(()) => success(),
            Err(text) => with_reason(&text, &format!("installing policy '{name}' failed"))
                .unwrap_or_else(|| failure(text)),
        },
        Ended::NotWaited | Ended::TimedOut(_) => success(),
        Ended::ShuttingDown => failure(SHUTTING_DOWN),
    }
}

/// The connection that is meant: the first that has the child, or the one of that name if it has.
fn find_connection(snapshot: &Snapshot, ike: Option<&str>, child: Option<&str>) -> Option<String> {
    let has_child =
        |children: &[Child]| child.is_none_or(|name| children.iter().any(|c| c.name == name));
    snapshot
        .connections
        .values()
        .find(|one| ike.is_none_or(|name| one.name == name) && has_child(&one.children))
        .map(|one| one.name.clone())
}

enum Ended {
    Done(CommandReply),
    NotWaited,
    TimedOut(u64),
    ShuttingDown,
}

/// Runs a command and passes on its log lines. What it has started goes on when nobody waits for it
/// any more, be it for the timeout or because the client left.
async fn execute(
    control: &Control,
    command: Command,
    wait: Wait,
    args: &Message,
    emitter: &Emitter,
) -> Ended {
    let logged = wait != Wait::No && emitter.wants("control-log");
    let (log, mut lines) = match logged {
        true => {
            let (sender, receiver) = mpsc::channel(LOG_QUEUE);
            (Some(sender), Some(receiver))
        }
        false => (None, None),
    };
    let Ok(mut pending) = control.command(command, log).await else {
        return Ended::ShuttingDown;
    };
    let level = integer(args, "loglevel").unwrap_or(1);
    let limit = match wait {
        Wait::No => return Ended::NotWaited,
        Wait::ForEver => None,
        Wait::Millis(millis) => Instant::now().checked_add(Duration::from_millis(millis)),
    };
    loop {
        tokio::select! {
            biased;
            Some(line) = next_line(&mut lines) => send_line(emitter, &line, level).await,
            answer = pending.answer() => {
                // The engine sends lines before the answer.
                while let Some(Ok(line)) = lines.as_mut().map(mpsc::Receiver::try_recv) {
                    send_line(emitter, &line, level).await;
                }
                let Ok(answer) = answer else { return Ended::ShuttingDown };
                if answer.lost_lines > 0 {
                    let line = LogLine {
                        group: LogGroup::Job,
                        level: 0,
                        ike_sa: None,
                        message: format!(
                            "{} lines are missing here, because they were not read in time",
                            answer.lost_lines
                        ),
                    };
                    send_line(emitter, &line, level.max(0)).await;
                }
                return Ended::Done(answer);
            }
            () = sleep_until(limit) => {
                let Wait::Millis(millis) = wait else { return Ended::NotWaited };
                return Ended::TimedOut(millis);
            }
        }
    }
}

async fn next_line(lines: &mut Option<mpsc::Receiver<LogLine>>) -> Option<LogLine> {
    match lines {
        Some(lines) => lines.recv().await,
        None => None,
    }
}

async fn send_line(emitter: &Emitter, line: &LogLine, level: i64) {
    if i64::from(line.level) <= level {
        emitter.emit("control-log", log_line(line, false)).await;
    }
}

async fn sleep_until(limit: Option<Instant>) {
    match limit {
        Some(limit) => tokio::time::sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
