// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One numbered line for each event about SAs, in the order in which VICI clients are told.

use swanherd_ike::api::{ChildSaInfo, Event, IkeSaInfo, LogGroup};

use super::{group_name, record};

/// Level of these lines in log files.
const LEVEL: i8 = 1;

/// Writes the line of an event about SAs; `seq` is its number since the daemon started. Others
/// have no line.
pub(crate) fn write_event(seq: u64, name: &'static str, event: &Event) {
    let Some(Line { group, sa, text }) = line(event) else {
        return;
    };
    let group = group_name(group);
    let connection = sa.connection.clone().unwrap_or_default();
    let id = sa.id;
    tracing::info!(
        group,
        ike_sa = %format_args!("{connection}[{id}]"),
        seq,
        event = name,
        "{text}"
    );
    record(group, LEVEL, Some(&(connection, id)), || {
        format!("event {seq} {name}: {text}")
    });
}

/// What a line says.
#[derive(Debug)]
struct Line<'a> {
    group: LogGroup,
    sa: &'a IkeSaInfo,
    text: String,
}

fn line(event: &Event) -> Option<Line<'_>> {
    let (group, sa, text) = match event {
        Event::IkeUpDown { up, sa } => (LogGroup::Ike, sa, up_or_down(*up).to_owned()),
        Event::IkeRekey { old, new } => {
            let text = format!("[{}] is replaced by [{}]", old.id, new.id);
            (LogGroup::Ike, old, text)
        }
        Event::IkeUpdate { sa, local, remote } => {
            let text = format!(
                "from {} and {} to {local} and {remote}",
                sa.local, sa.remote
            );
            (LogGroup::Ike, sa, text)
        }
        Event::ChildUpDown { up, sa } => {
            let children: Vec<String> = sa.children.values().map(child).collect();
            let text = format!("{} {}", children.join(" "), up_or_down(*up));
            (LogGroup::Chd, sa, text)
        }
        Event::ChildRekey { sa, old, new } => {
            let text = format!("{} is replaced by {}", child(old), child(new));
            (LogGroup::Chd, sa, text)
        }
        Event::CommandDone { .. }
        | Event::Changed(_)
        | Event::Gone(_)
        | Event::Log(_)
        | Event::Alert { .. }
        | Event::Failure { .. }
        | Event::NextAttempt { .. }
        | Event::Counter { .. } => return None,
    };
    Some(Line { group, sa, text })
}

fn up_or_down(up: bool) -> &'static str {
    if up { "up" } else { "down" }
}

fn child(child: &ChildSaInfo) -> String {
    format!("{}{{{}}}", child.name, child.id)
}
