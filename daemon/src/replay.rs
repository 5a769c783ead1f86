// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `swanherd replay`: runs a recording again and compares.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use serde_json::json;
use swanherd_ike::record::{ReplayError, Replayer, Shown, Summary};

use crate::cli::Replay;
use crate::client::say;

/// `EX_USAGE` of this program: the file is no recording.
const NO_RECORDING: u8 = 2;
/// The longest line that is read.
const LONGEST_LINE: u64 = 16 * 1024 * 1024;

/// Runs it. The exit status is 0 if everything was equal, 1 if not, and 2 if the file cannot be
/// read.
pub(crate) fn replay(args: &Replay) -> ExitCode {
    let mut out = std::io::stdout().lock();
    let outcome = run(args, &mut |shown: Shown| {
        // A reader that has gone has seen enough.
        let _ = writeln!(out, "{:12.6} {}", shown.at.as_secs_f64(), shown.text);
    });
    drop(out);
    report(args, &outcome)
}

/// What became of a replay.
#[derive(Debug)]
struct Replayed {
    program: String,
    began: u64,
    summary: Summary,
    /// Whether it was stopped at the moment asked for.
    stopped: bool,
}

#[derive(Debug)]
enum Failure {
    /// The file cannot be read.
    File(String),
    Replay(ReplayError),
}

fn run(args: &Replay, show: &mut dyn FnMut(Shown)) -> Result<Replayed, Failure> {
    let mut lines = Lines::open(&args.file).map_err(Failure::File)?;
    let first = lines.next().map_err(Failure::File)?.unwrap_or_default();
    let mut replayer = Replayer::new(&first, Instant::now()).map_err(Failure::Replay)?;
    let mut stopped = false;
    while let Some(line) = lines.next().map_err(Failure::File)? {
        if args
            .until
            .is_some_and(|until| replayer.next_is_after(&line, until))
        {
            stopped = true;
            break;
        }
        let shown = args.verbose.then_some(&mut *show as &mut dyn FnMut(Shown));
        match replayer.feed(&line, shown) {
            // A program that was killed may have written half a line.
            Err(ReplayError::Malformed { .. }) if lines.is_cut_off() => break,
            fed => fed.map_err(Failure::Replay)?,
        }
    }
    Ok(Replayed {
        program: replayer.program().to_owned(),
        began: replayer.began(),
        summary: replayer.finish(),
        stopped,
    })
}

fn report(args: &Replay, outcome: &Result<Replayed, Failure>) -> ExitCode {
    let (value, text, code) = match outcome {
        Ok(replayed) => {
            let summary = &replayed.summary;
            let end = match (replayed.stopped, summary.complete) {
                (true, _) => "stopped as asked",
                (false, true) => "complete",
                (false, false) => "broken off",
            };
            let value = json!({
                "equal": true,
                "inputs": summary.inputs,
                "actions": summary.actions,
                "seconds": summary.lasted.as_secs_f64(),
                "end": end,
                "program": replayed.program,
                "began": replayed.began,
            });
            let text = format!(
                "equal: {} inputs led to the same {} actions in {:.1} s ({end}; recorded by {})",
                summary.inputs,
                summary.actions,
                summary.lasted.as_secs_f64(),
                replayed.program
            );
            (value, text, ExitCode::SUCCESS)
        }
        Err(Failure::Replay(ReplayError::Different(difference))) => {
            let value = json!({
                "equal": false,
                "line": difference.line,
                "seconds": difference.at.as_secs_f64(),
                "recorded": difference.recorded,
                "replayed": difference.replayed,
            });
            (
                value,
                format!("different at {difference}"),
                ExitCode::FAILURE,
            )
        }
        Err(Failure::Replay(error)) => no_recording(error.to_string()),
        Err(Failure::File(error)) => no_recording(error.clone()),
    };
    // The verdict is what was asked for; only what went wrong belongs on standard error.
    if args.json {
        let _ = writeln!(std::io::stdout(), "{value}");
    } else if code == ExitCode::SUCCESS {
        let _ = writeln!(std::io::stdout(), "{text}");
    } else {
        say(&text);
    }
    code
}

fn no_recording(error: String) -> (serde_json::Value, String, ExitCode) {
    let value = json!({"error": error});
    (value, error, ExitCode::from(NO_RECORDING))
}

/// Lines of a file.
struct Lines {
    file: BufReader<File>,
    name: String,
    cut_off: bool,
}

impl Lines {
    fn open(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|error| format!("cannot read {name}: {error}"))?;
        Ok(Self {
            file: BufReader::new(file),
            name,
            cut_off: false,
        })
    }

    fn next(&mut self) -> Result<Option<String>, String> {
        let mut line = Vec::new();
        let read = (&mut self.file)
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)
            .map_err(|error| format!("cannot read {}: {error}", self.name))?;
        if read == 0 {
            return Ok(None);
        }
        if line.pop_if(|last| *last == b'\n').is_none() {
            if read as u64 == LONGEST_LINE {
                return Err(format!("{}: a line is too long", self.name));
            }
            self.cut_off = true;
        }
        String::from_utf8(line)
            .map(Some)
            .map_err(|_| format!("{} is not text", self.name))
    }

    /// Whether the last line had no end.
    fn is_cut_off(&self) -> bool {
        self.cut_off
    }
}
