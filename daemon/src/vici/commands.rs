// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every command, by name.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use swanherd_config::listing::list_conn;
use swanherd_vici::Message;
use zeroize::Zeroizing;

use super::args::{failure, id, outcome, success, text};
use super::names::{NAMES, printable};
use super::render::{Moment, ike_name, ike_sa_in_parts};
use super::session::{Emitter, Reply, unix_now};
use super::{absent, catalogue, certs, control as sas, installed, load, stats};
use crate::control::{Control, Request};

/// How long `list-sas` waits for fresh counters; older ones are good enough after that.
const COUNTERS_WAIT: Duration = Duration::from_millis(50);

/// Starts a command; `None` if there is none of that name. Dropping the reply cancels it.
pub(super) fn start(
    name: &str,
    control: &Control,
    args: Zeroizing<Message>,
    emitter: Emitter,
) -> Option<Reply> {
    let control = control.clone();
    Some(match name {
        "version" => ready(stats::version()),
        "stats" => ready(stats::stats(&control.snapshot())),
        "get-algorithms" => ready(stats::algorithms()),
        "get-counters" => ready(stats::counters(&control.snapshot(), &args)),
        "reset-counters" => Box::pin(async move { stats::reset_counters(&control, &args).await }),
        "reload-settings" => Box::pin(async move {
            match control.ask(Request::ReloadSettings).await {
                Ok(result) => outcome(result),
                Err(error) => failure(error.to_string()),
            }
        }),

        "initiate" => Box::pin(async move { sas::initiate(control, &args, emitter).await }),
        "terminate" => Box::pin(async move { sas::terminate(control, &args, emitter).await }),
        "rekey" => Box::pin(async move { sas::rekey(control, &args, emitter).await }),
        "redirect" => ready(absent::redirect(&control, &args)),
        "install" => Box::pin(async move { sas::install(control, &args, emitter).await }),
        "uninstall" => Box::pin(async move { sas::uninstall(control, &args, emitter).await }),

        "list-sas" => Box::pin(async move { list_sas(control, &args, emitter).await }),
        "list-policies" => {
            Box::pin(async move { installed::list_policies(&control, &args, &emitter).await })
        }
        "list-installed-policies" => {
            Box::pin(async move { installed::list_installed(&control, &emitter).await })
        }
        "list-commands" => ready(catalogue::list()),
        "list-last-errors" => Box::pin(async move { list_last_errors(&control, &emitter).await }),
        "list-refused-definitions" => {
            Box::pin(async move { list_refused_definitions(&control, &emitter).await })
        }
        "reconcile" => {
            Box::pin(async move { installed::reconcile(&control, &args, &emitter).await })
        }
        "list-conns" => Box::pin(async move { list_conns(control, &args, emitter).await }),
        "list-certs" => Box::pin(async move { certs::list(control, &args, emitter).await }),
        "list-authorities" => ready(Message::new()),
        "get-conns" => {
            let snapshot = control.snapshot();
            ready(Message::new().with_list("conns", snapshot.connections.keys()))
        }
        "get-authorities" => ready(Message::new().with_list("authorities", [""; 0])),
        "get-pools" => ready(Message::new()),
        "get-keys" => ready(Message::new().with_list("keys", &control.snapshot().credentials.keys)),
        "get-shared" => {
            ready(Message::new().with_list("keys", &control.snapshot().credentials.shared))
        }

        "load-conn" => Box::pin(async move { load::load_conn(&control, &args).await }),
        "unload-conn" => Box::pin(async move { load::unload_conn(&control, &args).await }),
        "load-shared" => Box::pin(async move { load::load_shared(&control, &args).await }),
        "unload-shared" => Box::pin(async move { load::unload_shared(&control, &args).await }),
        "load-key" => Box::pin(async move { load::load_key(&control, &args).await }),
        "unload-key" => Box::pin(async move { load::unload_key(&control, &args).await }),
        "load-cert" => Box::pin(async move { load::load_cert(&control, &args).await }),
        "load-token" => ready(absent::load_token(&args)),
        "load-pool" => ready(absent::load_pool(&args)),
        "unload-pool" => ready(absent::unload_pool(&args)),
        "load-authority" => ready(load::load_authority(&args)),
        "unload-authority" => ready(load::unload_authority(&args)),
        "clear-creds" => {
            Box::pin(async move { done(control.ask(Request::ClearCredentials).await) })
        }
        "flush-certs" => Box::pin(async move {
            match certs::flushed(&args) {
                Ok(()) => done(control.ask(Request::FlushCerts).await),
                Err(refusal) => refusal,
            }
        }),
        _ => return None,
    })
}

fn ready(answer: Message) -> Reply {
    Box::pin(std::future::ready(answer))
}

fn done(result: Result<(), crate::control::ShuttingDown>) -> Message {
    match result {
        Ok(()) => success(),
        Err(error) => failure(error.to_string()),
    }
}

async fn list_sas(control: Control, args: &Message, emitter: Emitter) -> Message {
    if !emitter.wants("list-sa") {
        return Message::new();
    }
    // A plane that is slow, or an engine that is busy, only makes the counters older.
    let _ = tokio::time::timeout(COUNTERS_WAIT, control.ask(Request::RefreshCounters)).await;
    let snapshot = control.snapshot();
    let moment = Moment {
        instant: Instant::now(),
        unix: unix_now(),
        counters: &snapshot.sa_counters,
    };
    let (ike, child) = (text(args, "ike"), text(args, "child"));
    let (ike_id, child_id) = (id(args, "ike-id"), id(args, "child-id"));
    for sa in snapshot.ike_sas.values() {
        let named = ike.is_none_or(|name| sa.connection.as_deref() == Some(name));
        if !named || ike_id.is_some_and(|id| id != sa.id) {
            continue;
        }
        let parts = ike_sa_in_parts(sa, moment, |one| {
            child.is_none_or(|name| one.name == name) && child_id.is_none_or(|id| id == one.id)
        });
        for section in parts {
            let event = Message::new().with_section(ike_name(sa), section);
            emitter.emit("list-sa", event).await;
        }
    }
    Message::new()
}

/// Why connections and their children failed last, and when the next attempts are made.
async fn list_last_errors(control: &Control, emitter: &Emitter) -> Message {
    let snapshot = control.snapshot();
    let mut names: BTreeSet<&String> = snapshot.last_errors.keys().collect();
    names.extend(snapshot.troubles.keys().map(|(connection, _)| connection));
    let now = Instant::now();
    let with_error = |section: Message, error: Option<&(u64, String)>| match error {
        Some((at, text)) => section.with("at", at.to_string()).with("text", text),
        None => section,
    };
    for name in names {
        let mut children = Message::new();
        let of_connection = snapshot
            .troubles
            .range((name.clone(), String::new())..)
            .take_while(|((connection, _), _)| connection == name);
        for ((_, child), trouble) in of_connection {
            let mut section = with_error(Message::new(), trouble.error.as_ref());
            if let Some(at) = trouble.next_attempt {
                let left = at.saturating_duration_since(now).as_millis().div_ceil(1000);
                section.push_display("next-attempt", left);
            }
            if trouble.error.is_some() || trouble.next_attempt.is_some() {
                children.push_section(printable(child), section);
            }
        }
        let section = with_error(Message::new(), snapshot.last_errors.get(name))
            .with_section("children", children);
        let event = Message::new().with_section(printable(name), section);
        emitter.emit("list-last-error", event).await;
    }
    Message::new()
}

/// What the file of definitions has that is not loaded.
async fn list_refused_definitions(control: &Control, emitter: &Emitter) -> Message {
    let Some(definitions) = control.definitions() else {
        return Message::new();
    };
    for (connection, reason) in &definitions.refused {
        let section = Message::new().with("reason", reason);
        let event = Message::new().with_section(printable(connection), section);
        emitter.emit("refused-definition", event).await;
    }
    let mut answer = Message::new()
        .with("file", &definitions.file)
        .with("at", definitions.at.to_string())
        .with("loaded", definitions.loaded.to_string())
        .with("refused", definitions.refused.len().to_string());
    if let Some(error) = &definitions.error {
        answer.push("error", error);
    }
    answer
}

async fn list_conns(control: Control, args: &Message, emitter: Emitter) -> Message {
    let ike = text(args, "ike");
    let snapshot = control.snapshot();
    for connection in snapshot.connections.values() {
        if ike.is_none_or(|name| name == connection.name) {
            let listed = load::to_message(&list_conn(connection, &NAMES));
            emitter.emit("list-conn", listed).await;
        }
    }
    Message::new()
}
