// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is in the data plane: `list-policies`, `list-installed-policies`, `reconcile`.

use swanherd_config::listing::mode_name;
use swanherd_config::model::{Child, ChildMode};
use swanherd_ipsec::plane::{PolicyAction, PolicySet};
use swanherd_vici::Message;
use swanherd_vici::de::parse_bool;
use swanherd_vici::installed::{InstalledPolicy, Masked};

use super::args::{failure, success, text};
use super::names;
use super::session::Emitter;
use crate::audits::Report;
use crate::control::{Control, Request, Snapshot};
use crate::installed::{finding, installed_policy};

/// So few that their names, however long, do not meet the limit of a frame.
const POLICIES_PER_EVENT: usize = 64;
const SHUTTING_DOWN: &str = "the daemon is shutting down";

/// `list-policies`: traps and shunts in force.
pub(super) async fn list_policies(control: &Control, args: &Message, emitter: &Emitter) -> Message {
    let wanted = |name| args.get(name).is_some();
    let (trap, pass, drop_) = (wanted("trap"), wanted("pass"), wanted("drop"));
    let snapshot = control.snapshot();
    let (ike, child) = (text(args, "ike"), text(args, "child"));
    for set in snapshot.standing.values() {
        let listed = match set.action {
            PolicyAction::Bypass => pass,
            PolicyAction::Discard => drop_,
            PolicyAction::Protect { .. } => trap,
        };
        let (connection, name) = owner(&snapshot, &set.owner);
        let named = ike.is_none_or(|ike| ike == connection) && child.is_none_or(|one| one == name);
        if !listed || !named {
            continue;
        }
        let section = policy(
            connection,
            name,
            set,
            definition(&snapshot, connection, name),
        );
        let event = Message::new().with_section(names::printable(&set.owner), section);
        emitter.emit("list-policy", event).await;
    }
    Message::new()
}

/// Connection and child of `connection/child`. Both may have a slash in their name, so what is
/// loaded decides.
fn owner<'a>(snapshot: &Snapshot, owner: &'a str) -> (&'a str, &'a str) {
    owner
        .match_indices('/')
        .map(|(at, _)| (&owner[..at], &owner[at + 1..]))
        .find(|(connection, child)| definition(snapshot, connection, child).is_some())
        .or_else(|| owner.split_once('/'))
        .unwrap_or((owner, ""))
}

fn definition<'a>(snapshot: &'a Snapshot, connection: &str, child: &str) -> Option<&'a Child> {
    let children = &snapshot.connections.get(connection)?.children;
    children.iter().find(|found| found.name == child)
}

fn policy(connection: &str, child: &str, set: &PolicySet, defined: Option<&Child>) -> Message {
    let mut out = Message::new();
    out.push("child", child);
    if let PolicyAction::Protect { reqid, .. } = set.action {
        out.push_display("reqid", reqid);
    }
    out.push("ike", connection);
    let proxy = defined.filter(|child| child.mode == ChildMode::TransportProxy);
    out.push(
        "mode",
        match (set.action, proxy) {
            (PolicyAction::Bypass, _) => mode_name(ChildMode::Pass),
            (PolicyAction::Discard, _) => mode_name(ChildMode::Drop),
            (PolicyAction::Protect { .. }, Some(child)) => mode_name(child.mode),
            (PolicyAction::Protect { mode, .. }, None) => names::mode(mode),
        },
    );
    out.push_list("local-ts", set.local.iter().map(names::selector));
    out.push_list("remote-ts", set.remote.iter().map(names::selector));
    out
}

/// `list-installed-policies`: every policy in force, with its owner.
pub(super) async fn list_installed(control: &Control, emitter: &Emitter) -> Message {
    if !emitter.wants("list-installed-policy") {
        return Message::new();
    }
    let policies = match control.ask(Request::Policies).await {
        Ok(Ok(policies)) => policies,
        Ok(Err(text)) => return failure(text),
        Err(_) => return failure(SHUTTING_DOWN),
    };
    for (number, chunk) in policies.chunks(POLICIES_PER_EVENT).enumerate() {
        let mut event = Message::new();
        for (place, policy) in chunk.iter().enumerate() {
            let number = number * POLICIES_PER_EVENT + place;
            event.push_section(number.to_string(), to_message(&installed_policy(policy)));
        }
        emitter.emit("list-installed-policy", event).await;
    }
    Message::new()
}

fn to_message(policy: &InstalledPolicy) -> Message {
    let mut out = Message::new();
    let masked = |of: Masked| {
        Message::new()
            .with("value", of.value.to_string())
            .with("mask", of.mask.to_string())
    };
    out.push_display("index", policy.index);
    out.push("dir", &policy.dir);
    out.push("src", &policy.src);
    out.push("dst", &policy.dst);
    if let Some(proto) = policy.proto {
        out.push_display("proto", proto);
    }
    for (name, port) in [("sport", policy.sport), ("dport", policy.dport)] {
        if let Some(port) = port {
            out.push_section(name, masked(port));
        }
    }
    out.push_display("priority", policy.priority);
    out.push("action", &policy.action);
    if let Some(mode) = &policy.mode {
        out.push("mode", mode);
    }
    if let Some(reqid) = policy.reqid {
        out.push_display("reqid", reqid);
    }
    for (name, addr) in [
        ("tunnel-src", &policy.tunnel_src),
        ("tunnel-dst", &policy.tunnel_dst),
    ] {
        if let Some(addr) = addr {
            out.push(name, addr);
        }
    }
    out.push_display("if-id", policy.if_id);
    if let Some(mark) = policy.mark {
        out.push_section("mark", masked(mark));
    }
    let mut owner = Message::new().with("kind", &policy.owner.kind);
    if let Some(name) = &policy.owner.name {
        owner.push("name", name);
    }
    out.push_section("owner", owner);
    out
}

/// `reconcile`: compares the data plane with what should be in it, and mends it.
pub(super) async fn reconcile(control: &Control, args: &Message, emitter: &Emitter) -> Message {
    // What cannot be understood counts as not given elsewhere; here that would change the kernel.
    let dry_run = match args.get("dry-run") {
        None => false,
        Some(_) => match args.str("dry-run").and_then(parse_bool) {
            Some(dry_run) => dry_run,
            None => return failure("invalid value for: dry-run"),
        },
    };
    let asked = control.ask(|reply| Request::Reconcile { dry_run, reply });
    let report = match asked.await {
        Ok(Ok(report)) => report,
        Ok(Err(text)) => return failure(text),
        Err(_) => return failure(SHUTTING_DOWN),
    };
    for (number, found) in report.audit.findings.iter().enumerate() {
        let found = finding(found);
        let mut section = Message::new();
        section.push("object", &found.object);
        section.push("what", &found.what);
        section.push("difference", &found.difference);
        if let Some(owner) = &found.owner {
            section.push("owner", owner);
        }
        section.push("reason", &found.reason);
        section.push("remedy", &found.remedy);
        if let Some(error) = &found.error {
            section.push("error", error);
        }
        let event = Message::new().with_section(number.to_string(), section);
        emitter.emit("reconcile-finding", event).await;
    }
    summary(&report)
}

fn summary(report: &Report) -> Message {
    let audit = &report.audit;
    let mut out = success();
    out.push_flag("dry-run", report.dry_run);
    out.push_display("at", report.at);
    out.push_display("took-us", report.took.as_micros());
    out.push_display("findings", audit.findings.len());
    out.push_display("sas", audit.sas);
    out.push_display("policies", audit.policies);
    out.push_display("alien-sas", audit.alien_sas);
    out.push_display("alien-policies", audit.alien_policies);
    out
}
