// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands, and how they end with us.

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGINT, SIGTERM};

/// What went wrong, for people.
pub(crate) type Error = Box<dyn std::error::Error>;

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes Ctrl-C and SIGTERM a flag, so that everything we started can be taken down.
pub(crate) fn catch_signals() {
    let flag = STOP.get_or_init(Default::default);
    for signal in [SIGINT, SIGTERM] {
        // A second one, while the first is being obeyed, ends us at once.
        let _ = signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(flag));
        let _ = signal_hook::flag::register(signal, Arc::clone(flag));
    }
}

/// Whether somebody wants us to end.
pub(crate) fn stopping() -> bool {
    STOP.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Whether this is continuous integration, where nothing may be skipped.
pub(crate) fn in_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

/// Whether we are root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The folder of the workspace.
pub(crate) fn workspace() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(PathBuf::from).unwrap_or_default()
}

/// Cargo's target folder.
pub(crate) fn target() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    workspace().join(target)
}

/// Where labs keep kernels, tools and output.
pub(crate) fn cache() -> Result<PathBuf, Error> {
    let cache = target().join("lab");
    std::fs::create_dir_all(&cache)?;
    Ok(cache)
}

/// `cargo` with arguments, in the workspace.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(workspace());
    // Set for us by the cargo that runs us; they must not leak into builds that we start.
    for (name, _) in env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Exit status; -1 after a signal.
    pub(crate) status: i32,
    /// Whether we ended it because its time was up.
    pub(crate) late: bool,
    /// How long it ran.
    pub(crate) took: Duration,
}

impl Ended {
    pub(crate) fn ok(&self) -> bool {
        self.status == 0 && !self.late
    }
}

/// Runs a command, shows both of its outputs line by line, and gives each line to `line`.
/// The command and all that it starts are ended when its time is up, or when we are told to stop.
pub(crate) fn stream(
    mut command: Command,
    limit: Duration,
    mut line: impl FnMut(&str),
) -> Result<Ended, Error> {
    let begun = Instant::now();
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| format!("cannot start {name}: {e}"))?;
    let (sender, lines) = std::sync::mpsc::channel();
    forward(child.stdout.take(), sender.clone());
    forward(child.stderr.take(), sender);
    let mut late = false;
    let mut asked: Option<Instant> = None;
    let status = loop {
        while let Ok(text) = lines.recv_timeout(Duration::from_millis(50)) {
            eprintln!("{text}");
            line(&text);
        }
        if let Some(status) = child.try_wait()? {
            break status.code().unwrap_or(-1);
        }
        late |= begun.elapsed() > limit;
        if !(late || stopping()) {
            continue;
        }
        end_group(&child, &mut asked);
    };
    // What is still in the pipes; something that outlives the command may hold them open.
    while let Ok(text) = lines.recv_timeout(Duration::from_millis(200)) {
        eprintln!("{text}");
        line(&text);
    }
    if late {
        eprintln!("xtask: ended {name} after {} s", limit.as_secs());
    }
    Ok(Ended {
        status,
        late,
        took: begun.elapsed(),
    })
}

/// Asks the process group of a child to end, and ends it five seconds later.
fn end_group(child: &Child, asked: &mut Option<Instant>) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let signal = match asked {
        None => Some(Signal::TERM),
        Some(since) if since.elapsed() > Duration::from_secs(5) => Some(Signal::KILL),
        Some(_) => None,
    };
    if let (Some(group), Some(signal)) = (group, signal) {
        asked.get_or_insert_with(Instant::now);
        let _ = kill_process_group(group, signal);
    }
}

/// Runs a command whose output is the user's, and takes all that it has started down with us; its
/// exit status, -1 after a signal.
pub(crate) fn run(mut command: Command) -> Result<i32, Error> {
    let mut child = command.stdin(Stdio::null()).process_group(0).spawn()?;
    let mut asked = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code().unwrap_or(-1));
        }
        if stopping() {
            end_group(&child, &mut asked);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a command that must succeed; nothing but its failure is shown.
pub(crate) fn quiet(mut command: Command) -> Result<String, Error> {
    command.stderr(Stdio::piped());
    capture(command)
}

/// Runs a build that must succeed, and shows its progress; its standard output.
pub(crate) fn build(mut command: Command) -> Result<String, Error> {
    command.stderr(Stdio::inherit());
    capture(command)
}

fn capture(mut command: Command) -> Result<String, Error> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start {}: {e}", command.get_program().display()))?;
    let (stdout, stderr) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stopping() {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    if status.success() {
        return Ok(text(stdout));
    }
    // Messages of cargo are for programs; people have seen its standard error already.
    let shown: String = text(stdout)
        .lines()
        .filter(|l| !l.starts_with('{'))
        .collect();
    Err(format!("{command:?} failed:\n{shown}{}", text(stderr)).into())
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

/// A command with arguments.
pub(crate) fn command<S: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

fn forward(
    pipe: Option<impl std::io::Read + Send + 'static>,
    sender: std::sync::mpsc::Sender<String>,
) {
    let Some(pipe) = pipe else { return };
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            if sender
                .send(String::from_utf8_lossy(&line).into_owned())
                .is_err()
            {
                break;
            }
        }
    });
}
