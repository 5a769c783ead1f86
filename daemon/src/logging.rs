// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where log lines go: the journal or standard error, and the files of `charon.filelog`.
//!
//! Each of the two has a thread of its own with a bounded queue, so that a reader of standard
//! error that is stuck, or a slow disk, costs lines, and never holds up IKE.

mod files;
mod told;

use std::fmt::Write as _;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, SystemTime};

use swanherd_config::settings::{FileLog, LogFormat};
use swanherd_ike::api::{LogGroup, LogLine};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer};

use files::{Files, Record};
pub(crate) use told::write_event;

/// Starts the process-wide subscriber. `RUST_LOG` overrides the level of standard error.
pub(crate) fn start(format: LogFormat) -> Flusher {
    let (lines, queue) = sync_channel(QUEUE);
    spawn("log", move || write_lines(&queue));
    let (records, queue) = sync_channel(QUEUE);
    spawn("log-files", move || write_records(&queue));
    let flusher = Flusher {
        lines: lines.clone(),
        records: RECORDS.get_or_init(|| records).clone(),
    };

    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = Lines(lines);
    let stderr = tracing_subscriber::fmt::layer()
        .with_writer(move || lines.clone())
        // Or a reader that is gone, and a full disk, would end in a panic.
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    // The journal stamps lines itself.
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    let stderr = match (format, stamped) {
        (LogFormat::Json, _) => stderr.json().with_filter(filter).boxed(),
        (LogFormat::Text, true) => stderr.with_filter(filter).boxed(),
        (LogFormat::Text, false) => stderr.without_time().with_filter(filter).boxed(),
    };
    let ours =
        filter_fn(|event| event.target().starts_with("swanherd") && *event.level() <= Level::INFO);
    tracing_subscriber::registry()
        .with(stderr)
        .with(DaemonLines.with_filter(ours))
        .init();
    flusher
}

/// Writes to these files from now on. Those that were open are opened again, so that one that
/// was moved away is begun anew. What cannot be opened is told, and left out.
pub(crate) fn configure(logs: Vec<FileLog>) {
    if let Some(records) = RECORDS.get() {
        // Waits for room: what the operator asked for must not be lost among lines.
        let _ = records.send(ToFiles::Configure(logs));
    }
}

/// Writes one line of the IKE endpoint to every place that wants its level.
pub(crate) fn write(line: &LogLine) {
    let group = group_name(line.group);
    let ike_sa = line.ike_sa.as_ref().filter(|(_, id)| *id != 0);
    match (line.level, ike_sa) {
        (0 | 1, None) => tracing::info!(group, "{}", line.message),
        (0 | 1, Some((name, id))) => {
            tracing::info!(group, ike_sa = %format_args!("{name}[{id}]"), "{}", line.message);
        }
        (2, ike_sa) => {
            tracing::debug!(group, ike_sa = ike_sa.map(|(_, id)| id), "{}", line.message);
        }
        (_, ike_sa) => {
            tracing::trace!(group, ike_sa = ike_sa.map(|(_, id)| id), "{}", line.message);
        }
    }
    record(
        group,
        i8::try_from(line.level).unwrap_or(i8::MAX),
        ike_sa,
        || line.message.clone(),
    );
}

/// Name of a group as VICI and log files write it.
pub(crate) const fn group_name(group: LogGroup) -> &'static str {
    match group {
        LogGroup::Mgr => "MGR",
        LogGroup::Ike => "IKE",
        LogGroup::Chd => "CHD",
        LogGroup::Cfg => "CFG",
        LogGroup::Knl => "KNL",
        LogGroup::Net => "NET",
        LogGroup::Enc => "ENC",
        LogGroup::Job => "JOB",
        LogGroup::Lib => "LIB",
    }
}

/// Lines that may wait for standard error, and records that may wait for the files.
const QUEUE: usize = 4096;
/// How long the end of the daemon waits for its last lines to be written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The way to the thread that writes files.
static RECORDS: OnceLock<SyncSender<ToFiles>> = OnceLock::new();

enum ToStderr {
    Line(Vec<u8>),
    /// Everything before it is written.
    Flush(SyncSender<()>),
}

enum ToFiles {
    Record(Record),
    Configure(Vec<FileLog>),
    /// Everything before it is written.
    Flush(SyncSender<()>),
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    if let Err(error) = thread {
        // The queue is closed then, and lines are lost; the daemon works without them.
        crate::client::say(&format!("no log, because its thread cannot start: {error}"));
    }
}

fn write_lines(queue: &Receiver<ToStderr>) {
    for line in queue {
        match line {
            // A reader that is gone is no reason to stop.
            ToStderr::Line(text) => drop(std::io::stderr().write_all(&text)),
            ToStderr::Flush(done) => drop(done.send(())),
        }
    }
}

fn write_records(queue: &Receiver<ToFiles>) {
    let mut files = Files::default();
    for item in queue {
        match item {
            ToFiles::Record(record) => files.write(&record),
            ToFiles::Configure(logs) => {
                for (log, error) in files.configure(logs) {
                    tracing::error!(path = %log.path.display(), %error, "cannot open log file");
                }
            }
            ToFiles::Flush(done) => drop(done.send(())),
        }
    }
}

fn record(
    group: &'static str,
    level: i8,
    ike_sa: Option<&(String, u32)>,
    message: impl FnOnce() -> String,
) {
    let Some(records) = RECORDS.get().filter(|_| files::wanted(level)) else {
        return;
    };
    let _ = records.try_send(ToFiles::Record(Record {
        at: SystemTime::now(),
        group,
        level,
        ike_sa: ike_sa.cloned(),
        message: message(),
    }));
}

/// The way of lines to standard error.
#[derive(Clone)]
struct Lines(SyncSender<ToStderr>);

impl Write for Lines {
    /// Takes one whole line at a time, which is what the formatter writes.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.try_send(ToStderr::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes what is left, for a second at most, when it is dropped.
pub(crate) struct Flusher {
    lines: SyncSender<ToStderr>,
    records: SyncSender<ToFiles>,
}

impl Drop for Flusher {
    fn drop(&mut self) {
        let (done, lines) = sync_channel(1);
        let lines_follow = self.lines.try_send(ToStderr::Flush(done)).is_ok();
        let (done, records) = sync_channel(1);
        let records_follow = self.records.try_send(ToFiles::Flush(done)).is_ok();
        if lines_follow {
            let _ = lines.recv_timeout(FLUSH_LIMIT);
        }
        if records_follow {
            let _ = records.recv_timeout(FLUSH_LIMIT);
        }
    }
}

/// Brings the lines of the daemon and its data plane, which are not an IKE endpoint's, to the
/// files: in strongSwan's groups `DMN` and `KNL`.
struct DaemonLines;

impl<S: Subscriber> Layer<S> for DaemonLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        // These come by `write`.
        if metadata.fields().field("group").is_some() {
            return;
        }
        let group = if metadata.target().starts_with("swanherd_kernel") {
            "KNL"
        } else {
            "DMN"
        };
        let level = i8::from(*metadata.level() == Level::INFO);
        record(group, level, None, || {
            let mut text = Text::default();
            event.record(&mut text);
            text.message + &text.fields
        });
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
