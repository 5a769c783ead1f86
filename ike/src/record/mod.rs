// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recordings: everything that went into an endpoint and what came out of it, as lines of text,
//! and their replay.
//!
//! An endpoint is deterministic but for chance and secrets. A recording holds every input, what
//! chance gave, what came over the border to the secrets (see [`tape`]), and every action; so a
//! [`Replayer`] can run the same endpoint again, without any secret, and compare. What a recording
//! never holds: pre-shared keys, private keys, secrets of key exchanges and what is derived from
//! them, keys of IKE and ESP. `docs/recording.md` describes the format.

mod input;
mod line;
mod listing;
mod render;
mod replay;
pub(crate) mod tape;
#[cfg(test)]
mod tests;

pub use replay::{Difference, ReplayError, Replayer, Shown, Summary};

use std::ops::Deref;
use std::time::Instant;

use self::input::InputRecord;
use self::line::{End, Header, Line, VERSION};
use self::tape::Tape;
use crate::api::{Action, Input, Now};
use crate::endpoint::Endpoint;

/// Takes a line of a recording, without its line feed. Returns whether it wants more.
pub type Sink = Box<dyn FnMut(String) -> bool + Send>;

/// An endpoint whose inputs and actions can be recorded. All inputs go through
/// [`Self::handle`], so that none is missed.
#[derive(Debug)]
pub struct Recorded {
    endpoint: Endpoint,
    recorder: Option<Recorder>,
}

impl Recorded {
    /// An endpoint that is not recorded.
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            recorder: None,
        }
    }

    /// An endpoint that is recorded from now on; it must not have been used yet. `program` names
    /// the program and its version.
    pub fn recording(mut endpoint: Endpoint, now: Now, program: &str, sink: Sink) -> Self {
        let tape = Tape::recording();
        endpoint.attach(tape.clone());
        let mut recorder = Recorder {
            origin: now.instant,
            tape,
            sink,
        };
        let header = Line::Recording(Header {
            version: VERSION,
            program: program.to_owned(),
            unix: now.unix,
            crypto: endpoint.crypto().name.to_owned(),
            settings: endpoint.settings().clone(),
        });
        let wanted = recorder.write(&header);
        let mut recorded = Self {
            endpoint,
            recorder: Some(recorder),
        };
        if !wanted {
            recorded.detach();
        }
        recorded
    }

    /// Hands an input to the endpoint.
    pub fn handle(&mut self, now: Now, input: Input) {
        let Some(recorder) = self.recorder.as_mut() else {
            self.endpoint.handle(now, input);
            return;
        };
        let at = now.instant.saturating_duration_since(recorder.origin);
        let line = Line::In {
            at: u64::try_from(at.as_nanos()).unwrap_or(u64::MAX),
            unix: now.unix,
            input: InputRecord::of(&input),
        };
        // Written first, so that an input that ends the program is the last in the recording.
        let mut wanted = recorder.write(&line);
        self.endpoint.handle(now, input);
        for draw in recorder.tape.take() {
            wanted = wanted && recorder.write(&Line::Drew(draw));
        }
        if !wanted {
            self.detach();
        }
    }

    /// See [`Endpoint::poll_action`].
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.endpoint.poll_action()?;
        if let Some(recorder) = self.recorder.as_mut() {
            let line = Line::Did(render::action(&action, recorder.origin));
            if !recorder.write(&line) {
                self.detach();
            }
        }
        Some(action)
    }

    /// Ends the recording, if there is one.
    pub fn finish(&mut self) {
        if let Some(recorder) = self.recorder.as_mut() {
            recorder.write(&Line::End(End::Stopped));
            self.detach();
        }
    }

    fn detach(&mut self) {
        self.recorder = None;
        self.endpoint.attach(Tape::default());
    }
}

/// Getters; what changes the endpoint must come through [`Recorded::handle`].
impl Deref for Recorded {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

struct Recorder {
    origin: Instant,
    tape: Tape,
    sink: Sink,
}

impl Recorder {
    fn write(&mut self, line: &Line) -> bool {
        // What is recorded has text for keys, so that there is nothing that JSON lacks.
        serde_json::to_string(line).is_ok_and(|text| (self.sink)(text))
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}
