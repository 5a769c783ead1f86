// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files of `charon.filelog`, in the form that readers of strongSwan's logs expect:
//! `TIME THREAD[GROUP] <connection|id> message`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicI8, Ordering};
use std::time::SystemTime;

use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};
use swanherd_config::settings::{FileLog, TimePrecision};

/// One line for the files, before anyone knows which of them want it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// When it happened.
    pub(super) at: SystemTime,
    /// Group in upper case, as lines name it.
    pub(super) group: &'static str,
    /// 0 is always shown to those who do not silence the group.
    pub(super) level: i8,
    /// Connection and unique id.
    pub(super) ike_sa: Option<(String, u32)>,
    /// The text. Line breaks in it are kept from looking like further records.
    pub(super) message: String,
}

/// Highest level that any file wants of any group. Saves making records that nobody reads.
static WANTED: AtomicI8 = AtomicI8::new(-1);

/// Whether some file may want a record of this level.
pub(super) fn wanted(level: i8) -> bool {
    level <= WANTED.load(Ordering::Relaxed)
}

/// The open files. They belong to the thread that writes lines.
#[derive(Default)]
pub(super) struct Files(Vec<(FileLog, Target)>);

enum Target {
    Stdout,
    Stderr,
    File(File),
}

impl Files {
    /// Closes what is open and opens `logs`: a file that was moved away is begun anew. Answers
    /// with what could not be opened, and is left out.
    pub(super) fn configure(&mut self, logs: Vec<FileLog>) -> Vec<(FileLog, io::Error)> {
        let mut failed = Vec::new();
        // What stays open anyway is not truncated again.
        let before = std::mem::take(&mut self.0);
        for log in logs {
            let again = before.iter().any(|(known, _)| known.path == log.path);
            match Target::open(&log, again) {
                Ok(target) => self.0.push((log, target)),
                Err(error) => failed.push((log, error)),
            }
        }
        let levels = self.0.iter().flat_map(|(log, _)| {
            let of_groups = log.groups.values().copied();
            of_groups.chain([log.default])
        });
        WANTED.store(levels.max().unwrap_or(-1), Ordering::Relaxed);
        failed
    }

    /// Writes one record to every file that wants it. A full disk must not stop the gateway.
    pub(super) fn write(&mut self, record: &Record) {
        for (log, target) in &mut self.0 {
            let group = record.group.to_ascii_lowercase();
            let wanted = log.groups.get(&group).unwrap_or(&log.default);
            if record.level <= *wanted {
                let line = line(log, record, &TimeZone::system());
                let _ = match target {
                    Target::Stdout => io::stdout().write_all(line.as_bytes()),
                    Target::Stderr => io::stderr().write_all(line.as_bytes()),
                    Target::File(file) => file.write_all(line.as_bytes()),
                };
            }
        }
    }
}

impl Target {
    fn open(log: &FileLog, again: bool) -> io::Result<Self> {
        match log.path.to_str() {
            Some("stdout") => return Ok(Self::Stdout),
            Some("stderr") => return Ok(Self::Stderr),
            _ => {}
        }
        // Always in append mode, so that a file which another program truncates has no hole.
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o640)
            .open(&log.path)?;
        if !log.append && !again && file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        Ok(Self::File(file))
    }
}

fn line(log: &FileLog, record: &Record, zone: &TimeZone) -> String {
    let mut line = time(log, record.at, zone);
    if !line.is_empty() {
        line.push(' ');
    }
    // Readers of strongSwan's logs expect the number of a thread here.
    line.push_str("00[");
    line.push_str(record.group);
    line.push_str("] ");
    if let Some((name, id)) = record.ike_sa.as_ref().filter(|_| log.ike_name) {
        line.push_str(&format!("<{name}|{id}> "));
    }
    // A peer's identity, or a file name, may hold any character.
    line.extend(
        record
            .message
            .trim_end()
            .chars()
            .map(|c| if c.is_control() && c != '\t' { ' ' } else { c }),
    );
    line.push('\n');
    line
}

/// The time as `time_format` wants it; in the form of RFC 3339 without one, and where it is no
/// format.
fn time(log: &FileLog, at: SystemTime, zone: &TimeZone) -> String {
    let Ok(at) = Timestamp::try_from(at) else {
        return String::new();
    };
    let at = at.to_zoned_datetime(zone.clone());
    let fraction = at.subsec_nanosecond();
    let fraction = match log.time_precision {
        TimePrecision::Seconds => String::new(),
        TimePrecision::Milliseconds => format!(".{:03}", fraction / 1_000_000),
        TimePrecision::Microseconds => format!(".{:06}", fraction / 1_000),
    };
    let formatted = |format: &str, at: &ZonedDateTime| jiff::fmt::strtime::format(format, at).ok();
    match log.time_format.as_deref() {
        Some("") => String::new(),
        Some(format) if let Some(time) = formatted(format, &at) => time + &fraction,
        _ => {
            let time = formatted("%Y-%m-%dT%H:%M:%S", &at).unwrap_or_default();
            let offset = formatted("%:z", &at).unwrap_or_default();
            time + &fraction + &offset
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn log(path: &Path) -> FileLog {
        FileLog {
            path: path.to_owned(),
            default: 1,
            groups: BTreeMap::from([("ike".to_owned(), 2), ("enc".to_owned(), -1)]),
            append: true,
            ike_name: true,
            time_format: None,
            time_precision: TimePrecision::Seconds,
        }
    }

    fn record(group: &'static str, level: i8, message: &str) -> Record {
        Record {
            at: SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789),
            group,
            level,
            ike_sa: Some(("branch".to_owned(), 3)),
            message: message.to_owned(),
        }
    }

    fn line_with(change: impl FnOnce(&mut FileLog)) -> String {
        let mut log = log(Path::new("x"));
        change(&mut log);
        line(&log, &record("IKE", 1, "hello\n"), &TimeZone::UTC)
    }

    #[test]
    fn lines_have_time_group_and_ike_sa() {
        assert_eq!(
            line_with(|_| {}),
            "2023-11-14T22:13:20+00:00 00[IKE] <branch|3> hello\n"
        );
        assert_eq!(
            line_with(|log| {
                log.time_format = Some("%b %e %T".to_owned());
                log.time_precision = TimePrecision::Milliseconds;
                log.ike_name = false;
            }),
            "Nov 14 22:13:20.123 00[IKE] hello\n"
        );
        assert_eq!(
            line_with(|log| {
                log.time_format = Some(String::new());
                log.time_precision = TimePrecision::Microseconds;
            }),
            "00[IKE] <branch|3> hello\n"
        );
    }

    #[test]
    fn a_format_that_is_none_leaves_the_usual_time() {
        assert_eq!(
            line_with(|log| {
                log.time_format = Some("%!".to_owned());
                log.time_precision = TimePrecision::Microseconds;
            }),
            "2023-11-14T22:13:20.123456+00:00 00[IKE] <branch|3> hello\n"
        );
    }

    #[test]
    fn a_message_stays_one_line() {
        let forged = record("IKE", 1, "id 'x\n00[IKE] all is well'");
        let line = line(&log(Path::new("x")), &forged, &TimeZone::UTC);
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn files_take_what_their_levels_want_and_are_begun_anew_when_moved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.log");
        let mut files = Files::default();
        let missing = log(Path::new("/nonexistent/b.log"));
        let failed = files.configure(vec![log(&path), missing]);
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].0.path, Path::new("/nonexistent/b.log"));
        for (group, level) in [("IKE", 2), ("IKE", 3), ("ENC", 0), ("CHD", 1), ("CHD", 2)] {
            files.write(&record(group, level, &format!("{group}{level}")));
        }
        let moved = folder.path().join("a.log.1");
        std::fs::rename(&path, &moved).unwrap();
        assert!(files.configure(vec![log(&path)]).is_empty());
        files.write(&record("IKE", 0, "new"));

        let old = std::fs::read_to_string(&moved).unwrap();
        let messages = |text: &str| -> Vec<String> {
            let last = |line: &str| line.rsplit(' ').next().unwrap_or_default().to_owned();
            text.lines().map(last).collect()
        };
        assert_eq!(messages(&old), ["IKE2", "CHD1"]);
        let new = std::fs::read_to_string(&path).unwrap();
        assert_eq!(messages(&new), ["new"]);
    }

    #[test]
    fn a_file_without_append_is_emptied_at_start_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.log");
        std::fs::write(&path, "old\n").unwrap();
        let once = FileLog {
            append: false,
            ..log(&path)
        };
        let mut files = Files::default();
        assert!(files.configure(vec![once.clone()]).is_empty());
        files.write(&record("IKE", 0, "new"));
        assert!(files.configure(vec![once]).is_empty());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("new\n") && !text.contains("old"), "{text}");
    }
}
