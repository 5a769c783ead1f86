// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where log lines go: the journal or standard error, and the files of `charon.filelog`.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

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
pub(crate) fn start(format: Format) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // The journal stamps lines itself.
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Or a reader that is gone, and a full disk, would end in a panic.
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    match (format, stamped) {
        (Format::Json, _) => builder.json().init(),
        (Format::Text, true) => builder.init(),
        (Format::Text, false) => builder.without_time().init(),
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
