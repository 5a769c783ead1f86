// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that end.

use std::ffi::OsStr;
use std::fmt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a command said and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// The command line, for messages.
    pub command: String,
    /// Exit status; -1 when a signal ended it, 124 when its time was up.
    pub status: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Output {
    /// Whether it ended with status 0.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.status == 0
    }

    /// Standard output, or a panic that shows everything when the command failed.
    ///
    /// # Panics
    /// When the status is not 0.
    #[must_use]
    pub fn expect_ok(self) -> String {
        assert!(self.ok(), "{self}");
        self.stdout
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "$ {}", self.command)?;
        write!(f, "{}{}", self.stdout, self.stderr)?;
        write!(
            f,
            "(status {}, {:.1} s)",
            self.status,
            self.took.as_secs_f32()
        )
    }
}

/// Runs a command and waits for it, for a minute at the most.
///
/// # Panics
/// When the program cannot be started at all.
pub fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(program);
    command.args(args);
    run_command(command, Duration::from_secs(60))
}

/// Runs a command that must succeed; its standard output.
///
/// # Panics
/// When it fails.
pub fn run_ok<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> String {
    run(program, args).expect_ok()
}

pub(crate) fn run_command(mut command: Command, limit: Duration) -> Output {
    let line = describe(&command);
    let begun = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("cannot start `{line}`: {e}"));
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let mut nap = Duration::from_millis(1);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status.code().unwrap_or(-1),
            Ok(None) if begun.elapsed() > limit => {
                let _ = child.kill();
                let _ = child.wait();
                break 124;
            }
            Ok(None) => std::thread::sleep(nap),
            Err(e) => panic!("waiting for `{line}`: {e}"),
        }
        nap = (nap * 2).min(Duration::from_millis(20));
    };
    Output {
        command: line,
        status,
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
        took: begun.elapsed(),
    }
}

fn drain(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}
