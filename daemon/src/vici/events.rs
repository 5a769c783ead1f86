// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events that clients register for.

use swanherd_ike::api::{Event, IkeSaInfo, LogLine};
use swanherd_vici::Message;

use super::names;
use super::render::{Moment, child_sa, ike_name, ike_sa, ike_sa_with_children};
use crate::logging::group_name;

/// Events that happen by themselves.
pub(crate) const OF_ENGINE: [&str; 7] = [
    "log",
    "ike-updown",
    "ike-rekey",
    "ike-update",
    "child-updown",
    "child-rekey",
    "alert",
];

/// Events that are part of a command's answer.
const OF_COMMANDS: [&str; 10] = [
    "control-log",
    "list-sa",
    "list-policy",
    "list-conn",
    "list-cert",
    "list-authority",
    "list-installed-policy",
    "list-last-error",
    "refused-definition",
    "reconcile-finding",
];

/// Every event that a client may register for.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    OF_ENGINE.into_iter().chain(OF_COMMANDS)
}

/// Most detailed level that `log` carries.
const LOG_LEVEL: u8 = 1;

/// VICI's name of an event of the engine, if it has one.
pub(crate) fn name(event: &Event) -> Option<&'static str> {
    match event {
        Event::IkeUpDown { .. } => Some("ike-updown"),
        Event::IkeRekey { .. } => Some("ike-rekey"),
        Event::IkeUpdate { .. } => Some("ike-update"),
        Event::ChildUpDown { .. } => Some("child-updown"),
        Event::ChildRekey { .. } => Some("child-rekey"),
        Event::Alert { .. } => Some("alert"),
        Event::Log(line) if line.level <= LOG_LEVEL => Some("log"),
        _ => None,
    }
}

/// The message of an event that [`name`] has a name for.
pub(super) fn message(event: &Event, moment: Moment<'_>) -> Message {
    let named = |sa: &IkeSaInfo| Message::new().with_section(ike_name(sa), ike_sa(sa, moment));
    let mut out = Message::new();
    match event {
        Event::IkeUpDown { up, sa } => {
            out.push_flag("up", *up);
            out.push_section(ike_name(sa), ike_sa(sa, moment));
        }
        Event::IkeRekey { old, new } => {
            let both = Message::new()
                .with_section("old", ike_sa(old, moment))
                .with_section("new", ike_sa(new, moment));
            out.push_section(ike_name(old), both);
        }
        Event::IkeUpdate { sa, local, remote } => {
            out.push("local-host", names::host(local.ip()));
            out.push_display("local-port", local.port());
            out.push("remote-host", names::host(remote.ip()));
            out.push_display("remote-port", remote.port());
            out.push_section(ike_name(sa), ike_sa(sa, moment));
        }
        Event::ChildUpDown { up, sa } => {
            out.push_flag("up", *up);
            out.push_section(ike_name(sa), ike_sa_with_children(sa, moment, |_| true));
        }
        Event::ChildRekey { sa, old, new } => {
            let both = Message::new()
                .with_section("old", child_sa(old, moment))
                .with_section("new", child_sa(new, moment));
            // Unlike everywhere else, the section's name is the bare name of the child.
            let children = Message::new().with_section(names::printable(&old.name), both);
            out.push_section(
                ike_name(sa),
                ike_sa(sa, moment).with_section("child-sas", children),
            );
        }
        Event::Alert { kind, sa } => {
            out.push("type", kind);
            if let Some(sa) = sa {
                out.push_section("ike-sa", named(sa));
            }
        }
        Event::Log(line) => return log_line(line, true),
        _ => {}
    }
    out
}

/// A line of `control-log`, or of `log` if `thread` is wanted.
pub(super) fn log_line(line: &LogLine, thread: bool) -> Message {
    let mut out = Message::new();
    out.push("group", group_name(line.group));
    out.push_display("level", line.level);
    if thread {
        out.push("thread", "1");
    }
    if let Some((name, id)) = &line.ike_sa {
        out.push("ikesa-name", name);
        out.push_display("ikesa-uniqueid", id);
    }
    out.push("msg", &line.message);
    out
}
