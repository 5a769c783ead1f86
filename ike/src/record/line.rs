// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines of a recording.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::input::InputRecord;
use super::tape::Draw;
use crate::api::Settings;

/// Version of the format.
pub(super) const VERSION: u32 = 1;
/// The longest time that a recording may speak of. Longer ones would overflow clocks.
const LONGEST: Duration = Duration::from_secs(50 * 365 * 86_400);

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// The first one.
    Recording(Header),
    /// An input.
    In {
        /// Nanoseconds since the start of the recording, of the monotonic clock.
        at: u64,
        /// Wall clock, in seconds since the epoch.
        unix: u64,
        /// What it was.
        #[serde(flatten)]
        input: InputRecord,
    },
    /// What chance gave and secrets led to during the input before.
    Drew(Draw),
    /// An action.
    Did(Value),
    /// The recording was ended, rather than broken off.
    End(End),
}

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    /// Of the format.
    pub(super) version: u32,
    /// Program and version that recorded.
    pub(super) program: String,
    /// When it began, in seconds since the epoch.
    pub(super) unix: u64,
    /// Name of the cryptography.
    pub(super) crypto: String,
    /// Settings at the start.
    pub(super) settings: Settings,
}

/// How a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum End {
    /// The program ended.
    Stopped,
}

impl Line {
    /// Reads a line that anybody may have written.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if let Some(long) = longest(&value).filter(|long| *long > LONGEST.as_secs()) {
            return Err(format!("a time of {long} seconds is too long"));
        }
        let line = serde_json::from_value(value).map_err(|error| error.to_string())?;
        match &line {
            Self::In { at, unix, .. }
                if *at > u64::try_from(LONGEST.as_nanos()).unwrap_or(u64::MAX)
                    || *unix > 1 << 40 =>
            {
                Err("the time is out of range".to_owned())
            }
            _ => Ok(line),
        }
    }
}

/// The longest duration in a value, in seconds.
fn longest(value: &Value) -> Option<u64> {
    match value {
        Value::Object(fields) => {
            let own = fields.get("secs").and_then(Value::as_u64);
            fields.values().filter_map(longest).chain(own).max()
        }
        Value::Array(items) => items.iter().filter_map(longest).max(),
        _ => None,
    }
}
