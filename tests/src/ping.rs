// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Echo requests, counted.

use std::process::{Child, Stdio};
use std::time::Duration;

use crate::lab::Namespace;

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PingReport {
    /// Requests sent.
    pub sent: u32,
    /// Answers received, without duplicates.
    pub received: u32,
    /// What `ping` printed.
    pub text: String,
}

/// A running `ping`.
#[derive(Debug)]
pub struct Pings(Option<Child>);

impl Pings {
    /// Sends `count` requests, 20 a second, from an address in a namespace.
    ///
    /// # Panics
    /// When `ping` cannot be started.
    #[must_use]
    pub fn start(namespace: &Namespace, from: &str, to: &str, count: u32) -> Self {
        Self::every(Duration::from_millis(50), namespace, from, to, count)
    }

    /// As [`Pings::start`], one in each `interval`.
    ///
    /// # Panics
    /// When `ping` cannot be started.
    #[must_use]
    pub fn every(
        interval: Duration,
        namespace: &Namespace,
        from: &str,
        to: &str,
        count: u32,
    ) -> Self {
        let child = namespace
            .command("ping")
            .args([
                "-i",
                &interval.as_secs_f32().to_string(),
                "-W",
                "2",
                "-c",
                &count.to_string(),
                "-I",
                from,
                to,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("ping is installed");
        Self(Some(child))
    }

    /// Waits for the last answer.
    ///
    /// # Panics
    /// When `ping` printed no summary.
    #[must_use]
    pub fn finish(mut self) -> PingReport {
        let child = self.0.take().expect("taken only here and on drop");
        let output = child.wait_with_output().expect("a child can be waited for");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let counts = text
            .lines()
            .find(|line| line.contains("packets transmitted"))
            .unwrap_or_else(|| panic!("no summary of ping: {text}"));
        let mut numbers = counts.split(',').filter_map(|part| {
            part.split_whitespace()
                .find_map(|word| word.parse::<u32>().ok())
        });
        let sent = numbers.next().expect("ping prints how many it sent");
        let received = numbers.next().expect("ping prints how many came back");
        PingReport {
            sent,
            received,
            text,
        }
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
