// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where log lines go: the journal or standard error, and the files of `charon.filelog`.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use swanherd_ike::api::{LogGroup, LogLine};
use tracing_subscriber::EnvFilter;

/// Form of the lines on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// One `charon.filelog` section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileLog {
    /// File to append to; `stdout` and `stderr` are the streams.
    pub(crate) path: PathBuf,
    /// Level of groups that have none of their own; -1 is silent.
    pub(crate) default: i8,
    /// Levels by group name (`ike`, `chd`, …).
    pub(crate) groups: BTreeMap<String, i8>,
}

/// Starts the process-wide subscriber. `RUST_LOG` overrides the level.
///
/// Lines are written by a thread of their own, so that a reader of standard error that is stuck
/// costs lines, and never holds up IKE.
pub(crate) fn start(format: Format) -> Flusher {
    let (lines, queue) = sync_channel::<Line>(QUEUE);
    let flusher = Flusher(lines.clone());
    let lines = Lines(lines);
    let writer = std::thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || write(&queue));
    if let Err(error) = writer {
        // The queue is closed then, and lines are lost; the daemon works without them.
        crate::client::say(&format!("no log, because its thread cannot start: {error}"));
    }
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // The journal stamps lines itself.
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || lines.clone())
        // Or a reader that is gone, and a full disk, would end in a panic.
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    match (format, stamped) {
        (Format::Json, _) => builder.json().init(),
        (Format::Text, true) => builder.init(),
        (Format::Text, false) => builder.without_time().init(),
    }
    flusher
}

/// Lines that may wait for standard error.
const QUEUE: usize = 4096;
/// How long the end of the daemon waits for its last lines to be written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

enum Line {
    Text(Vec<u8>),
    /// Everything before it is written.
    Flush(SyncSender<()>),
}

/// The way of lines to standard error.
#[derive(Clone)]
struct Lines(SyncSender<Line>);

impl Write for Lines {
    /// Takes one whole line at a time, which is what the formatter writes.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.try_send(Line::Text(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes what is left, for a second at most, when it is dropped.
pub(crate) struct Flusher(SyncSender<Line>);

impl Drop for Flusher {
    fn drop(&mut self) {
        let (done, written) = sync_channel(1);
        if self.0.try_send(Line::Flush(done)).is_ok() {
            let _ = written.recv_timeout(FLUSH_LIMIT);
        }
    }
}

fn write(queue: &Receiver<Line>) {
    for line in queue {
        match line {
            // A reader that is gone is no reason to stop.
            Line::Text(text) => drop(std::io::stderr().write_all(&text)),
            Line::Flush(done) => drop(done.send(())),
        }
    }
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

/// Takes the lines of the IKE endpoint.
#[derive(Default)]
pub(crate) struct Sink {
    files: Vec<(FileLog, Box<dyn Write + Send>)>,
}

impl Sink {
    /// Opens the log files. One that cannot be opened is reported and left out.
    pub(crate) fn open(logs: Vec<FileLog>) -> Self {
        let open = |log: FileLog| {
            let file = || {
                OpenOptions::new()
                    .create(true)
                    .append(true)
                    .mode(0o640)
                    .open(&log.path)
            };
            let opened: std::io::Result<Box<dyn Write + Send>> = match log.path.to_str() {
                Some("stdout") => Ok(Box::new(std::io::stdout())),
                Some("stderr") => Ok(Box::new(std::io::stderr())),
                _ => file().map(|file| Box::new(file) as _),
            };
            match opened {
                Ok(writer) => Some((log, writer)),
                Err(error) => {
                    tracing::error!(path = %log.path.display(), %error, "cannot open log file");
                    None
                }
            }
        };
        Self {
            files: logs.into_iter().filter_map(open).collect(),
        }
    }

    /// Writes one line to every place that wants its level.
    pub(crate) fn write(&mut self, line: &LogLine) {
        let group = group_name(line.group);
        let (name, id) = match &line.ike_sa {
            Some((name, id)) => (name.as_str(), *id),
            None => ("", 0),
        };
        match line.level {
            0 | 1 if id == 0 => tracing::info!(group, "{}", line.message),
            0 | 1 => {
                tracing::info!(group, ike_sa = %format_args!("{name}[{id}]"), "{}", line.message)
            }
            2 => tracing::debug!(group, ike_sa = id, "{}", line.message),
            _ => tracing::trace!(group, ike_sa = id, "{}", line.message),
        }
        for (log, file) in &mut self.files {
            let wanted = log
                .groups
                .get(&group.to_ascii_lowercase())
                .unwrap_or(&log.default);
            if i16::from(line.level) > i16::from(*wanted) {
                continue;
            }
            let ike_sa = if id == 0 {
                String::new()
            } else {
                format!("<{name}|{id}> ")
            };
            // A full disk must not stop the gateway.
            let _ = writeln!(file, "[{group}] {ike_sa}{}", line.message);
        }
    }
}
