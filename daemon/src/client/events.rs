// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `events`: what happens, as it happens, one JSON object on each line.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use swanherd_vici::{Client, Error, Event, Message};

use super::{OK, connect, fail, say};
use crate::cli::{EventName, Events};

/// How long to wait before a daemon that went away is looked for again.
const PAUSE: Duration = Duration::from_secs(1);

/// One line.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// Counts lines from 1 on.
    seq: u64,
    /// When it was read, in UTC.
    at: String,
    event: &'a str,
    #[serde(flatten)]
    body: Body<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Body<'a> {
    /// What VICI says.
    Message(&'a Message),
    /// Who will tell.
    Daemon(&'a str),
    /// How many events went by unread.
    Lost(u64),
}

/// Numbers lines and writes them, until nobody reads them any more.
struct Writer {
    written: u64,
}

impl Writer {
    /// Whether anybody still reads.
    fn write(&mut self, event: &str, body: Body<'_>) -> bool {
        self.written += 1;
        let line = line(self.written, Timestamp::now(), event, body);
        let mut out = std::io::stdout().lock();
        out.write_all(line.as_bytes())
            .and_then(|()| out.flush())
            .is_ok()
    }
}

fn line(seq: u64, at: Timestamp, event: &str, body: Body<'_>) -> String {
    let line = Line {
        seq,
        at: format!("{at:.3}"),
        event,
        body,
    };
    // Strings and numbers have no way to fail.
    serde_json::to_string(&line).unwrap_or_default() + "\n"
}

/// `swanherd events`
pub(crate) async fn events(args: Events) -> ExitCode {
    let mut writer = Writer { written: 0 };
    loop {
        let ended = match follow(&args, &mut writer).await {
            Ok(()) => return ExitCode::from(OK),
            Err(error) => error,
        };
        let again = args.reconnect && !matches!(ended, Error::Address(_) | Error::UnknownEvent(_));
        if !again {
            return fail(&ended);
        }
        if !matches!(ended, Error::Connect { .. }) {
            say(&format!("{ended}; waiting for the daemon"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Until nobody reads any more, or the daemon goes.
async fn follow(args: &Events, writer: &mut Writer) -> Result<(), Error> {
    let mut client = connect(&args.server).await?;
    let version = client.version().await?;
    subscribe(&mut client, &args.only).await?;
    let daemon = format!(
        "{} {}",
        version.daemon,
        version.swanherd.unwrap_or(version.version)
    );
    if !writer.write("connected", Body::Daemon(&daemon)) {
        return Ok(());
    }
    let mut lost = 0;
    loop {
        let Event { name, message } = client.next_event().await?;
        if client.lost_events() > lost {
            let more = client.lost_events() - lost;
            lost = client.lost_events();
            writer.write("lost", Body::Lost(more));
        }
        if !writer.write(&name, Body::Message(&message)) {
            return Ok(());
        }
    }
}

/// Asks for the events that are named, or for all that the daemon has but for its log.
async fn subscribe(client: &mut Client, only: &[EventName]) -> Result<(), Error> {
    if !only.is_empty() {
        let names: Vec<_> = only.iter().map(|event| event.name()).collect();
        return client.subscribe(&names).await;
    }
    for event in EventName::ALL {
        match client.subscribe(&[event.name()]).await {
            // Releases of charon before 6.0.3 have no alerts.
            Ok(()) | Err(Error::UnknownEvent(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_number_time_name_and_message() {
        let at = Timestamp::from_millisecond(1_796_079_600_250).unwrap();
        let message = Message::new()
            .with("up", "yes")
            .with_section("site", Message::new().with("uniqueid", "3"));

        assert_eq!(
            line(7, at, "ike-updown", Body::Message(&message)),
            "{\"seq\":7,\"at\":\"2026-11-30T23:00:00.250Z\",\"event\":\"ike-updown\",\
             \"message\":{\"up\":\"yes\",\"site\":{\"uniqueid\":\"3\"}}}\n"
        );
        assert_eq!(
            line(1, at, "connected", Body::Daemon("swanherd 0.1.0")),
            "{\"seq\":1,\"at\":\"2026-11-30T23:00:00.250Z\",\"event\":\"connected\",\
             \"daemon\":\"swanherd 0.1.0\"}\n"
        );
    }
}
