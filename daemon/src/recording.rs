// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `swanherd run --record`: the file that a recording goes to.
//!
//! Lines are written by a thread of their own, so that a slow disk holds up nobody. A recording with
//! a gap could not be replayed; so when the file is full, or the disk too slow, the recording ends,
//! with one line in the log, and the daemon goes on.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;

use swanherd_ike::record::Sink;

/// Lines that may wait to be written.
const QUEUE: usize = 65_536;

/// A recording that is being written.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    writer: JoinHandle<()>,
}

impl Recording {
    /// Begins a file, for its owner only. A file that is there already, such as that of the run
    /// before, is kept with `.old` at the end of its name. `limit` is the most that is written, in
    /// octets.
    ///
    /// # Errors
    /// Naming what cannot be written.
    pub(crate) fn begin(path: &Path, limit: u64) -> Result<(Self, Sink), String> {
        let failed = |what: &str, error: std::io::Error| format!("cannot {what}: {error}");
        if path.exists() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, &old)
                .map_err(|error| failed(&format!("rename {}", path.display()), error))?;
        }
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| failed(&format!("record to {}", path.display()), error))?;
        let (sender, lines) = sync_channel(QUEUE);
        let name = path.display().to_string();
        let writer = std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || write(&name, file, &lines))
            .map_err(|error| failed("start the recorder", error))?;
        let name = path.display().to_string();
        let mut written = 0_u64;
        let sink = move |line: String| {
            written = written.saturating_add(line.len() as u64 + 1);
            if written > limit {
                tracing::warn!(
                    path = %name,
                    limit,
                    "the recording has reached its limit and ends here"
                );
                return false;
            }
            match sender.try_send(line) {
                Ok(()) => true,
                Err(TrySendError::Full(_)) => {
                    tracing::warn!(
                        path = %name,
                        "the recording ends here: its file cannot be written fast enough"
                    );
                    false
                }
                // The writer has said why.
                Err(TrySendError::Disconnected(_)) => false,
            }
        };
        let recording = Self {
            path: path.to_owned(),
            writer,
        };
        Ok((recording, Box::new(sink)))
    }

    /// Waits until everything is written; the sink must be gone by then.
    pub(crate) fn close(self) {
        if self.writer.join().is_err() {
            tracing::error!(path = %self.path.display(), "the recorder died");
        }
    }
}

fn write(path: &str, file: File, lines: &Receiver<String>) {
    let mut out = BufWriter::with_capacity(64 * 1024, file);
    loop {
        // What has been written should be in the file as soon as there is time for it, since a
        // crash is what it may be wanted for.
        let next = match lines.try_recv() {
            Err(TryRecvError::Empty) => match out.flush() {
                Ok(()) => lines.recv().map_err(|_| TryRecvError::Disconnected),
                Err(error) => return complain(path, &error),
            },
            other => other,
        };
        let Ok(line) = next else {
            break;
        };
        let written = out
            .write_all(line.as_bytes())
            .and_then(|()| out.write_all(b"\n"));
        if let Err(error) = written {
            return complain(path, &error);
        }
    }
    if let Err(error) = out.flush() {
        complain(path, &error);
    }
}

fn complain(path: &str, error: &std::io::Error) {
    tracing::warn!(path, %error, "the recording ends here");
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn lines_arrive_in_a_private_file_and_the_one_before_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recording");
        for line in ["first", "second"] {
            let (recording, mut sink) = Recording::begin(&path, 1000).unwrap();
            assert!(sink(line.to_owned()));
            drop(sink);
            recording.close();
        }

        assert_eq!(std::fs::read_to_string(&path).unwrap(), "second\n");
        let old = folder.path().join("recording.old");
        assert_eq!(std::fs::read_to_string(old).unwrap(), "first\n");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_recording_ends_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recording");
        let (recording, mut sink) = Recording::begin(&path, 10).unwrap();

        assert!(sink("1234".to_owned()));
        assert!(sink("1234".to_owned()));
        assert!(!sink("1".to_owned()));
        drop(sink);
        recording.close();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1234\n1234\n");
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = Recording::begin(Path::new("/nowhere/at/all"), 10)
            .err()
            .unwrap();

        assert!(error.contains("/nowhere/at/all"), "{error}");
    }
}
