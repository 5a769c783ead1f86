// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Running a recording again.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::line::{End, Header, Line, VERSION};
use super::listing::Listing;
use super::render;
use super::tape::{Draw, Tape};
use crate::api::{Input, Now};
use crate::crypto::Provider;
use crate::endpoint::Endpoint;

/// Where a replay and its recording part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Line of the recording, from 1.
    pub line: usize,
    /// Time since its start.
    pub at: Duration,
    /// What was recorded.
    pub recorded: String,
    /// What happened now.
    pub replayed: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "line {}, {:.6} s after the start:",
            self.line,
            self.at.as_secs_f64()
        )?;
        writeln!(f, "  recorded: {}", self.recorded)?;
        write!(f, "  replayed: {}", self.replayed)
    }
}

/// Why a recording cannot be replayed to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// It is none.
    #[error("not a recording: {0}")]
    NotARecording(String),
    /// It has a format that this build does not read.
    #[error("the recording has format {0}, this program reads format {VERSION}")]
    Version(u32),
    /// A line cannot be understood.
    #[error("line {line}: {reason}")]
    Malformed {
        /// Which, from 1.
        line: usize,
        /// Why.
        reason: String,
    },
    /// The endpoint does something else now.
    #[error("{0}")]
    Different(Box<Difference>),
}

/// What was replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Inputs.
    pub inputs: u64,
    /// Actions, all of them equal.
    pub actions: u64,
    /// Time from the start of the recording to its last input.
    pub lasted: Duration,
    /// Whether the recording was ended, rather than broken off.
    pub complete: bool,
}

/// Something for the reader of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Time since the start of the recording.
    pub at: Duration,
    /// What, in one line.
    pub text: String,
}

/// Runs a recording again, line by line.
#[derive(Debug)]
pub struct Replayer {
    endpoint: Endpoint,
    tape: Tape,
    origin: Instant,
    program: String,
    unix: u64,
    line: usize,
    at: Duration,
    /// An input, until all that was drawn for it has been read.
    pending: Option<(Now, Input)>,
    draws: Vec<Draw>,
    listing: Listing,
    summary: Summary,
}

impl Replayer {
    /// Begins with the first line. `origin` is any moment; it stands for the recording's start.
    ///
    /// # Errors
    /// [`ReplayError::NotARecording`], [`ReplayError::Version`].
    pub fn new(first: &str, origin: Instant) -> Result<Self, ReplayError> {
        let header = Self::header(first)?;
        let provider = match header.crypto.as_str() {
            "fake" => Provider::fake(),
            _ => Provider::ring(),
        };
        let mut endpoint = Endpoint::new(header.settings, provider, [0; 32]);
        let tape = Tape::replaying();
        endpoint.attach(tape.clone());
        Ok(Self {
            endpoint,
            tape,
            origin,
            program: header.program,
            unix: header.unix,
            line: 1,
            at: Duration::ZERO,
            pending: None,
            draws: Vec::new(),
            listing: Listing::default(),
            summary: Summary::default(),
        })
    }

    /// Program and version that recorded.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// When the recording began, in seconds since the epoch.
    pub fn began(&self) -> u64 {
        self.unix
    }

    /// Takes the next line. `show` is told what happens, if it is given.
    ///
    /// # Errors
    /// [`ReplayError::Malformed`], [`ReplayError::Different`]; the replay has ended then.
    pub fn feed(
        &mut self,
        text: &str,
        show: Option<&mut dyn FnMut(Shown)>,
    ) -> Result<(), ReplayError> {
        self.line += 1;
        let malformed = |line, reason| ReplayError::Malformed { line, reason };
        if self.summary.complete {
            let reason = "something follows the end".to_owned();
            return Err(malformed(self.line, reason));
        }
        let line = Line::parse(text).map_err(|reason| malformed(self.line, reason))?;
        match line {
            Line::Recording(_) => Err(malformed(
                self.line,
                "another recording begins here".to_owned(),
            )),
            Line::In { at, unix, input } => {
                self.run(show)?;
                let at = Duration::from_nanos(at);
                if at < self.at {
                    let reason = "time runs backwards".to_owned();
                    return Err(malformed(self.line, reason));
                }
                self.at = at;
                let input = input
                    .restore()
                    .map_err(|reason| malformed(self.line, reason))?;
                let now = Now {
                    instant: self.origin + at,
                    unix,
                };
                self.pending = Some((now, input));
                Ok(())
            }
            Line::Drew(draw) => {
                if self.pending.is_none() {
                    let reason = "nothing can be drawn without an input".to_owned();
                    return Err(malformed(self.line, reason));
                }
                self.draws.push(draw);
                Ok(())
            }
            Line::Did(recorded) => self.compare(&recorded, show),
            Line::End(End::Stopped) => {
                self.run(show)?;
                self.summary.complete = true;
                self.nothing_left()
            }
        }
    }

    /// Whether a line is an input that came later than `at` after the start.
    pub fn next_is_after(&self, text: &str, at: Duration) -> bool {
        matches!(Line::parse(text), Ok(Line::In { at: next, .. }) if Duration::from_nanos(next) > at)
    }

    /// Ends the replay. Of a recording that was broken off, what the last input led to is not
    /// compared: some of it may be missing.
    pub fn finish(mut self) -> Summary {
        self.summary.lasted = self.at;
        self.summary
    }

    fn header(first: &str) -> Result<Header, ReplayError> {
        // A newer format may have other fields, but has its number in the same place.
        let value: Value = serde_json::from_str(first)
            .map_err(|error| ReplayError::NotARecording(error.to_string()))?;
        let version = value
            .pointer("/recording/version")
            .and_then(Value::as_u64)
            .ok_or_else(|| {
                ReplayError::NotARecording("the first line lacks a version".to_owned())
            })?;
        if version != u64::from(VERSION) {
            let version = u32::try_from(version).unwrap_or(u32::MAX);
            return Err(ReplayError::Version(version));
        }
        match Line::parse(first).map_err(ReplayError::NotARecording)? {
            Line::Recording(header) => Ok(header),
            _ => Err(ReplayError::NotARecording(
                "the first line is no header".to_owned(),
            )),
        }
    }

    /// Runs the input that waits.
    fn run(&mut self, show: Option<&mut dyn FnMut(Shown)>) -> Result<(), ReplayError> {
        let Some((now, input)) = self.pending.take() else {
            return Ok(());
        };
        let draws = std::mem::take(&mut self.draws);
        if let Some(show) = show {
            let text = self.listing.input(&input, &draws);
            self.show(show, text);
        }
        self.tape.give(draws);
        self.endpoint.handle(now, input);
        self.summary.inputs += 1;
        self.tape
            .finish()
            .map_err(|replayed| self.different("this input took its course".to_owned(), replayed))
    }

    fn compare(
        &mut self,
        recorded: &Value,
        mut show: Option<&mut dyn FnMut(Shown)>,
    ) -> Result<(), ReplayError> {
        self.run(
            show.as_mut()
                .map(|show| &mut **show as &mut dyn FnMut(Shown)),
        )?;
        let Some(action) = self.endpoint.poll_action() else {
            return Err(self.different(recorded.to_string(), "nothing".to_owned()));
        };
        let replayed = render::action(&action, self.origin);
        if replayed != *recorded {
            return Err(self.different(recorded.to_string(), replayed.to_string()));
        }
        self.summary.actions += 1;
        if let (Some(show), Some(text)) = (show, self.listing.action(&action)) {
            self.show(show, text);
        }
        Ok(())
    }

    fn nothing_left(&mut self) -> Result<(), ReplayError> {
        match self.endpoint.poll_action() {
            Some(action) => {
                let replayed = render::action(&action, self.origin).to_string();
                Err(self.different("nothing".to_owned(), replayed))
            }
            None => Ok(()),
        }
    }

    fn show(&self, show: &mut dyn FnMut(Shown), text: String) {
        show(Shown { at: self.at, text });
    }

    fn different(&self, recorded: String, replayed: String) -> ReplayError {
        ReplayError::Different(Box::new(Difference {
            line: self.line,
            at: self.at,
            recorded: shortened(recorded),
            replayed: shortened(replayed),
        }))
    }
}

/// Bounds what is printed of one action.
fn shortened(text: String) -> String {
    const MOST: usize = 8000;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => {
            let mut short = text[..at].to_owned();
            let _ = write!(short, "... ({} more octets)", text.len() - at);
            short
        }
        None => text,
    }
}
