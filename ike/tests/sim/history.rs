// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What happened last, for the one who looks into a failure.

use std::collections::VecDeque;
use std::time::Duration;

use swanherd_ike::wire::Message;
use swanherd_ipsec::plane::{Op, SaId};

/// Lines that a failing test prints.
const LINES: usize = 400;

/// The last lines of what happened in a world.
#[derive(Debug)]
pub(crate) struct History {
    lines: VecDeque<String>,
    /// How many are kept; none is off, as formatting them takes longer than what they tell of.
    keep: usize,
}

impl Default for History {
    fn default() -> Self {
        Self {
            lines: VecDeque::new(),
            keep: LINES,
        }
    }
}

impl History {
    /// Keeps so many lines from now on.
    pub(crate) fn keep(&mut self, lines: usize) {
        self.keep = lines;
    }

    pub(crate) fn is_on(&self) -> bool {
        self.keep > 0
    }

    pub(crate) fn add(&mut self, at: Duration, host: &str, text: &str) {
        let at = at.as_secs_f64();
        self.lines.push_back(format!("{at:10.3} {host:6} {text}"));
        if self.lines.len() > self.keep {
            self.lines.pop_front();
        }
    }

    pub(crate) fn print(&self) {
        for line in &self.lines {
            eprintln!("{line}");
        }
    }
}

/// An IKE message in one line.
pub(crate) fn describe(payload: &[u8]) -> String {
    Message::parse(payload).map_or_else(
        |error| format!("{} octets: {error}", payload.len()),
        |message| message.to_string(),
    )
}

/// An operation of the data plane in one line.
pub(crate) fn describe_op(op: &Op) -> String {
    match op {
        Op::InstallSa(entry) => {
            let SaId { spi, dst } = entry.id();
            let reqid = entry.reqid;
            format!(
                "install {:?} SA {spi:08x} to {dst} reqid {reqid}",
                entry.direction
            )
        }
        Op::RemoveSa(id) => format!("remove SA {:08x} to {}", id.spi, id.dst),
        Op::InstallPolicies(set) => format!("install policies {} of {}", set.id, set.owner),
        other => format!("{other:?}"),
    }
}
