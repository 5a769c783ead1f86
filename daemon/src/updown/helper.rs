// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The process that runs scripts. It reads orders from its standard input and writes what became
//! of them to its standard output, one JSON value on each line.
//!
//! Scripts of one lane run one after another in the order of their orders, those of different lanes
//! side by side. Each has a process group of its own, which is killed when its time is up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};

/// Scripts at a time.
const WORKERS: usize = 8;
/// How soon the end of a script is seen that leaves others behind with its output open.
const TICK: Duration = Duration::from_millis(20);
/// Output of one script that is kept.
const MAX_OUTPUT: usize = 16 * 1024;

/// What the daemon wants.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    /// Run a script.
    Run(Job),
    /// Finish what was ordered, within so many milliseconds.
    End(u64),
}

/// A script to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    /// What it must not overtake, nor be overtaken by.
    pub(super) lane: String,
    /// For the log: connection, IKE SA, child and verb.
    pub(super) about: About,
    /// For the shell.
    pub(super) command: String,
    /// Its whole environment.
    pub(super) variables: Vec<(String, String)>,
    /// Milliseconds that it may take.
    pub(super) limit_ms: u64,
}

/// What a script is about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) connection: String,
    pub(super) ike_sa: u32,
    pub(super) child: String,
    pub(super) verb: String,
}

/// What became of an order.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Answer {
    /// A script ended.
    Ran(Ran),
    /// So many were not run, or not to their end, because there was no time left.
    Abandoned(usize),
}

/// How a script ended.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ran {
    pub(super) about: About,
    /// What it said.
    pub(super) output: Vec<String>,
    pub(super) end: End,
    /// Milliseconds that it took.
    pub(super) took_ms: u64,
}

/// The end of a script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum End {
    /// By itself, with this status.
    Exit(i32),
    /// Of this signal.
    Signal(i32),
    /// It was killed because its time was up.
    Late,
    /// It could not be started.
    Failed(String),
}

/// `swanherd updown-helper`
pub(crate) fn main() -> ExitCode {
    let queue = Queue::default();
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                while let Some(job) = queue.take() {
                    let ran = queue.run(&job);
                    queue.done(&job.lane);
                    answer(&Answer::Ran(ran));
                }
            });
        }
        let grace = read_orders(io::stdin().lock(), &queue);
        let abandoned = queue.close(grace);
        if abandoned > 0 {
            answer(&Answer::Abandoned(abandoned));
        }
    });
    ExitCode::SUCCESS
}

/// Queues what is ordered until there is nothing more; returns the time that is left for it.
///
/// A daemon that died leaves none: what runs may end, the rest would be about SAs of nobody's.
fn read_orders(input: impl io::BufRead, queue: &Queue) -> Option<Duration> {
    for line in input.lines() {
        match serde_json::from_str(&line.ok()?) {
            Ok(Order::Run(job)) => queue.push(job),
            Ok(Order::End(ms)) => return Some(Duration::from_millis(ms)),
            Err(_) => return None,
        }
    }
    None
}

fn answer(answer: &Answer) {
    let Ok(text) = serde_json::to_string(answer) else {
        return;
    };
    // Nobody listening is the end of it.
    let _ = io::stdout().lock().write_all((text + "\n").as_bytes());
}

/// What waits and what runs.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Lanes with work or with a script that runs.
    lanes: BTreeMap<String, VecDeque<Job>>,
    /// Those of them in which none runs.
    ready: VecDeque<String>,
    /// Leaders of process groups that are not reaped yet.
    running: BTreeSet<i32>,
    busy: usize,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        let mut state = self.lock();
        if !state.lanes.contains_key(&job.lane) {
            state.ready.push_back(job.lane.clone());
        }
        state
            .lanes
            .entry(job.lane.clone())
            .or_default()
            .push_back(job);
        self.changed.notify_all();
    }

    /// The next job, once there is one; `None` if there will be none.
    fn take(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(lane) = state.ready.pop_front() {
                if let Some(job) = state.lanes.get_mut(&lane).and_then(VecDeque::pop_front) {
                    state.busy += 1;
                    return Some(job);
                }
                state.lanes.remove(&lane);
            } else if state.closed && state.busy == 0 {
                return None;
            } else {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// The job that ran in a lane has ended.
    fn done(&self, lane: &str) {
        let mut state = self.lock();
        state.busy -= 1;
        if state.lanes.get(lane).is_some_and(|jobs| !jobs.is_empty()) {
            state.ready.push_back(lane.to_owned());
        } else {
            state.lanes.remove(lane);
        }
        self.changed.notify_all();
    }

    /// Nothing more comes. Waits for the rest if there is time for it, and returns how many jobs
    /// were cut off.
    fn close(&self, grace: Option<Duration>) -> usize {
        let mut state = self.lock();
        state.closed = true;
        self.changed.notify_all();
        let Some(grace) = grace else {
            return state.drop_waiting();
        };
        let end = Instant::now() + grace;
        while !state.lanes.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waiting = state.drop_waiting();
                let cut = state.running.len();
                for leader in &state.running {
                    kill(*leader);
                }
                self.changed.notify_all();
                return waiting + cut;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        0
    }

    /// Runs a script and waits for its end.
    fn run(&self, job: &Job) -> Ran {
        let begun = Instant::now();
        let mut output = Vec::new();
        let end = match self.spawn_and_wait(job, begun, &mut output) {
            Ok(end) => end,
            Err(error) => End::Failed(error.to_string()),
        };
        Ran {
            about: job.about.clone(),
            output: lines(&output),
            end,
            took_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn spawn_and_wait(&self, job: &Job, begun: Instant, output: &mut Vec<u8>) -> io::Result<End> {
        let (mut reader, writer) = io::pipe()?;
        fcntl_setfl(&reader, OFlags::NONBLOCK)?;
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", &job.command])
            .env_clear()
            .envs(job.variables.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        let mut child = {
            // Whoever kills what runs has to know of it.
            let mut state = self.lock();
            let child = command.spawn()?;
            state.running.insert(leader(&child));
            child
        };
        // It holds the other ends of the pipe, which would never be closed.
        drop(command);
        let limit = Duration::from_millis(job.limit_ms);
        let mut open = true;
        let mut late = false;
        let status = loop {
            if open {
                open = wait_and_read(&mut reader, output, TICK)?;
            } else {
                std::thread::sleep(TICK);
            }
            if let Some(status) = self.reap(&mut child)? {
                break status;
            }
            if !late && begun.elapsed() >= limit {
                late = true;
                kill(leader(&child));
            }
        };
        if open {
            // What it said last.
            wait_and_read(&mut reader, output, Duration::ZERO)?;
        }
        Ok(match (late, status.code(), status.signal()) {
            (true, _, _) => End::Late,
            (false, Some(code), _) => End::Exit(code),
            (false, None, signal) => End::Signal(signal.unwrap_or(0)),
        })
    }

    /// Its status if it has ended. From then on its number may be another's.
    fn reap(&self, child: &mut Child) -> io::Result<Option<ExitStatus>> {
        let mut state = self.lock();
        let status = child.try_wait()?;
        if status.is_some() {
            state.running.remove(&leader(child));
        }
        Ok(status)
    }
}

impl State {
    /// Drops what does not run yet; returns how much it was.
    fn drop_waiting(&mut self) -> usize {
        let waiting = self.lanes.values().map(VecDeque::len).sum();
        for jobs in self.lanes.values_mut() {
            jobs.clear();
        }
        waiting
    }
}

fn leader(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap_or(0)
}

/// Kills a process group.
fn kill(leader: i32) {
    if let Some(group) = Pid::from_raw(leader) {
        // It may just have ended.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Reads what comes within `limit`; `false` if nothing more will come.
fn wait_and_read(
    reader: &mut PipeReader,
    output: &mut Vec<u8>,
    limit: Duration,
) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).unwrap_or_default();
    match poll(&mut [PollFd::new(&*reader, PollFlags::IN)], Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let mut piece = [0; 4096];
    loop {
        match reader.read(&mut piece) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                let room = MAX_OUTPUT.saturating_sub(output.len());
                output.extend_from_slice(&piece[..length.min(room)]);
                if room == 0 {
                    // Somebody who never stops talking must not keep the clock from being seen.
                    return Ok(true);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// As lines, without what would disturb a log.
fn lines(output: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(output);
    text.lines()
        .map(|line| line.replace(|c: char| c.is_control() && c != '\t', "?"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(lane: &str, command: &str) -> Job {
        Job {
            lane: lane.to_owned(),
            about: About {
                verb: "up-client".to_owned(),
                ..About::default()
            },
            command: command.to_owned(),
            variables: vec![
                ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
                ("PLUTO_VERB".to_owned(), "up-client".to_owned()),
            ],
            limit_ms: 20_000,
        }
    }

    fn run(job: &Job) -> Ran {
        Queue::default().run(job)
    }

    #[test]
    fn a_script_has_its_environment_and_no_other_and_says_what_it_says() {
        let ran = run(&job(
            "a",
            "echo \"$PLUTO_VERB ${HOME-nowhere}\"; echo wrong >&2; cat; exit 3",
        ));

        assert_eq!(ran.output, ["up-client nowhere", "wrong"]);
        assert_eq!(ran.end, End::Exit(3));
    }

    #[test]
    fn a_script_that_takes_too_long_is_killed_with_all_that_it_started() {
        let begun = Instant::now();
        let mut slow = job("a", "echo begun; sleep 60 & sleep 60");
        slow.limit_ms = 200;

        let ran = run(&slow);

        assert_eq!((ran.end, ran.output), (End::Late, vec!["begun".to_owned()]));
        assert!(begun.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn what_a_script_leaves_running_does_not_hold_it_up() {
        let begun = Instant::now();

        let ran = run(&job("a", "sleep 30 & echo $!"));

        assert_eq!(ran.end, End::Exit(0));
        assert!(begun.elapsed() < Duration::from_secs(20));
        let left = ran.output[0].parse().ok().and_then(Pid::from_raw).unwrap();
        rustix::process::kill_process(left, Signal::KILL).unwrap();
    }

    #[test]
    fn much_output_is_cut_and_control_characters_are_replaced() {
        let ran = run(&job("a", "printf 'a\\033b\\n'; yes | head -c 1000000"));

        assert_eq!(ran.output[0], "a?b");
        assert_eq!(ran.end, End::Exit(0));
        let length: usize = ran.output.iter().map(|line| line.len() + 1).sum();
        assert!(length <= MAX_OUTPUT + 1, "{length}");
    }

    /// Takes jobs as the workers do, and tells the order in which they began.
    #[test]
    fn a_lane_keeps_its_order_and_others_go_past_it() {
        let queue = Queue::default();
        for (lane, command) in [("a", "1"), ("a", "2"), ("b", "3")] {
            queue.push(job(lane, command));
        }

        let first = queue.take().unwrap();
        let second = queue.take().unwrap();
        assert_eq!(
            (first.command.as_str(), second.command.as_str()),
            ("1", "3")
        );
        assert!(queue.lock().ready.is_empty());
        queue.done(&second.lane);
        queue.done(&first.lane);
        let third = queue.take().unwrap();
        assert_eq!(third.command, "2");
        queue.done(&third.lane);
        assert_eq!(queue.close(Some(Duration::from_secs(1))), 0);
        assert!(queue.take().is_none());
    }

    #[test]
    fn at_the_end_what_has_time_is_run_and_the_rest_is_cut_off() {
        let queue = Queue::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(job) = queue.take() {
                    let _ = queue.run(&job);
                    queue.done(&job.lane);
                }
            });
            queue.push(job("a", "sleep 60"));
            queue.push(job("a", "sleep 60"));
            while queue.lock().running.is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let begun = Instant::now();
            assert_eq!(queue.close(Some(Duration::from_millis(200))), 2);
            assert!(begun.elapsed() < Duration::from_secs(20));
        });
    }

    #[test]
    fn a_daemon_that_died_wants_nothing_more() {
        let queue = Queue::default();
        let order = serde_json::to_string(&Order::Run(job("a", "true"))).unwrap();
        let input = format!("{order}\n{order}\n");

        let grace = read_orders(input.as_bytes(), &queue);

        assert_eq!(grace, None);
        assert_eq!(queue.close(grace), 2);
        assert!(queue.take().is_none());
        let end = serde_json::to_string(&Order::End(500)).unwrap() + "\n";
        let grace = read_orders(end.as_bytes(), &queue);
        assert_eq!(grace, Some(Duration::from_millis(500)));
    }
}
