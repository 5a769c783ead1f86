// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Audits of the data plane: who waits for one, what they found, and what is said about it.
//!
//! One runs at a time. Whoever asks while one runs gets the next, because the running one may have
//! looked before the asker's change; all who ask for the same share it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use swanherd_ike::api::{LogGroup, LogLine};
use swanherd_ipsec::plane::PlaneError;
use swanherd_kernel::audit::{Audit, Difference, Finding, Object, Remedy};
use tokio::sync::oneshot;

/// Lines that one audit may write. The rest is told as a number: ten thousand lines at once would
/// push everything else out of the queues of those who read the log.
const MAX_LINES: usize = 200;

/// Object, difference and remedy of a [`Finding`], by [`object_name`] and the like.
pub(crate) type Kind = (&'static str, &'static str, &'static str);

/// One audit.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// When it ended, in seconds since the epoch.
    pub(crate) at: u64,
    /// How long it took.
    pub(crate) took: Duration,
    /// Whether it only looked.
    pub(crate) dry_run: bool,
    /// What it found.
    pub(crate) audit: Audit,
}

/// Answer to someone who asked for an audit.
pub(crate) type Reply = oneshot::Sender<Result<Arc<Report>, String>>;

/// What is published of the audits that mend; those that only look are their asker's business.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    /// The last one that came to an end.
    pub(crate) last: Option<Last>,
    /// Findings of all so far, by kind.
    pub(crate) findings: BTreeMap<Kind, u64>,
    /// Audits that came to an end.
    pub(crate) completed: u64,
    /// Audits that did not, because the data plane could not be read.
    pub(crate) failed: u64,
}

/// What is published of one audit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Last {
    /// When it ended, in seconds since the epoch.
    pub(crate) at: u64,
    /// How long it took.
    pub(crate) took: Duration,
    /// SAs and policies that are there, everybody's.
    pub(crate) present: [usize; 2],
    /// SAs and policies of others.
    pub(crate) alien: [usize; 2],
    /// SAs and policies of ours that are not wanted and could not be removed.
    pub(crate) stale: [usize; 2],
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Audits {
    waiting: Vec<(bool, Option<Reply>)>,
    /// Whether one runs, and those who get its result.
    running: Option<(bool, Vec<Reply>)>,
    summary: Arc<Summary>,
    /// What the last one left undone, and how many aliens it saw: news is what differs from it.
    told: Told,
}

/// What was said last.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    left: Vec<Finding>,
    alien: [usize; 2],
    failure: Option<String>,
}

impl Audits {
    /// An audit is due. If one is waited for anyway, that is it.
    pub(crate) fn due(&mut self) {
        if !self.waiting.iter().any(|(dry_run, _)| !dry_run) {
            self.waiting.push((false, None));
        }
    }

    /// Somebody wants one.
    pub(crate) fn ask(&mut self, dry_run: bool, reply: Reply) {
        self.waiting.push((dry_run, Some(reply)));
    }

    /// What to begin with now, if anything: whether it only looks.
    pub(crate) fn begin(&mut self) -> Option<bool> {
        // A client that left needs none.
        self.waiting
            .retain(|(_, reply)| reply.as_ref().is_none_or(|reply| !reply.is_closed()));
        if self.running.is_some() {
            return None;
        }
        let (dry_run, _) = *self.waiting.first()?;
        let (now, later) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition::<Vec<_>, _>(|(other, _)| *other == dry_run);
        self.waiting = later;
        let replies = now.into_iter().filter_map(|(_, reply)| reply).collect();
        self.running = Some((dry_run, replies));
        Some(dry_run)
    }

    /// The audit that was begun is over. Returns what to log, and the answers to give once the
    /// outcome is published.
    pub(crate) fn finish(
        &mut self,
        at: u64,
        took: Duration,
        outcome: Result<Audit, PlaneError>,
    ) -> (Vec<LogLine>, Answers) {
        let (dry_run, replies) = self.running.take().unwrap_or_default();
        match outcome {
            Ok(audit) => {
                let lines = if dry_run {
                    Vec::new()
                } else {
                    self.note(at, took, &audit)
                };
                let report = Arc::new(Report {
                    at,
                    took,
                    dry_run,
                    audit,
                });
                (lines, Answers(replies, Ok(report)))
            }
            Err(error) => {
                let text = error.to_string();
                let mut lines = Vec::new();
                if !dry_run {
                    Arc::make_mut(&mut self.summary).failed += 1;
                    if self.told.failure.as_ref() != Some(&text) {
                        lines.push(line(0, format!("the data plane cannot be audited: {text}")));
                        self.told.failure = Some(text.clone());
                    }
                }
                (lines, Answers(replies, Err(text)))
            }
        }
    }

    /// What is published.
    pub(crate) fn summary(&self) -> Arc<Summary> {
        Arc::clone(&self.summary)
    }

    fn note(&mut self, at: u64, took: Duration, audit: &Audit) -> Vec<LogLine> {
        let summary = Arc::make_mut(&mut self.summary);
        summary.completed += 1;
        for finding in &audit.findings {
            *summary.findings.entry(kind(finding)).or_default() += 1;
        }
        let stale = |wanted: fn(&Object) -> bool| {
            let of_ours = |found: &&Finding| found.difference == Difference::Unwanted;
            let left = |found: &&Finding| {
                matches!(found.remedy, Remedy::Failed(_) | Remedy::None) && wanted(&found.object)
            };
            audit.findings.iter().filter(of_ours).filter(left).count()
        };
        summary.last = Some(Last {
            at,
            took,
            present: [audit.sas, audit.policies],
            alien: [audit.alien_sas, audit.alien_policies],
            stale: [
                stale(|object| matches!(object, Object::Sa(_))),
                stale(|object| matches!(object, Object::Policy(_))),
            ],
        });
        self.tell(audit)
    }

    /// Each finding that is news, and one line that sums up if there is any.
    fn tell(&mut self, audit: &Audit) -> Vec<LogLine> {
        let left: Vec<Finding> = audit
            .findings
            .iter()
            .filter(|found| matches!(found.remedy, Remedy::Failed(_) | Remedy::None))
            .cloned()
            .collect();
        let told = std::mem::replace(
            &mut self.told,
            Told {
                left,
                alien: [audit.alien_sas, audit.alien_policies],
                failure: None,
            },
        );
        let news: Vec<&Finding> = audit
            .findings
            .iter()
            .filter(|found| !told.left.contains(found))
            .collect();
        if news.is_empty() && self.told == told {
            return Vec::new();
        }
        let mut lines: Vec<LogLine> = news
            .iter()
            .take(MAX_LINES)
            .map(|found| line(level(found), sentence(found)))
            .collect();
        if let Some(more) = news.len().checked_sub(MAX_LINES).filter(|more| *more > 0) {
            lines.push(line(0, format!("… and {more} more differences")));
        }
        let level = u8::from(audit.is_clean());
        lines.push(line(level, sum_up(audit)));
        lines
    }
}

/// Answers that are ready.
#[derive(Debug)]
pub(crate) struct Answers(Vec<Reply>, Result<Arc<Report>, String>);

impl Answers {
    /// Gives them.
    pub(crate) fn give(self) {
        for reply in self.0 {
            // A client that left does not need to know.
            let _ = reply.send(self.1.clone());
        }
    }
}

fn line(level: u8, message: String) -> LogLine {
    LogLine {
        group: LogGroup::Knl,
        level,
        ike_sa: None,
        message,
    }
}

/// What an operator has to do something about, or would not expect, comes first.
fn level(found: &Finding) -> u8 {
    match (&found.remedy, found.difference) {
        (Remedy::Failed(_) | Remedy::None, _) => 0,
        (_, Difference::Missing | Difference::Changed | Difference::InTheWay) => 0,
        // Tidying up after an earlier run is what audits are for.
        (_, Difference::Unwanted) => 1,
    }
}

fn sum_up(audit: &Audit) -> String {
    let mut counts: BTreeMap<Kind, usize> = BTreeMap::new();
    for finding in &audit.findings {
        *counts.entry(kind(finding)).or_default() += 1;
    }
    let mut text = if counts.is_empty() {
        "audit of the data plane: as it should be".to_owned()
    } else {
        "audit of the data plane: ".to_owned()
    };
    for (index, ((object, difference, remedy), count)) in counts.into_iter().enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        let difference = difference.replace('_', " ");
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}{count} {object} {difference} ({remedy})");
    }
    let _ = write!(
        text,
        "; alien: {} SA{}, {} polic{}",
        audit.alien_sas,
        if audit.alien_sas == 1 { "" } else { "s" },
        audit.alien_policies,
        if audit.alien_policies == 1 {
            "y"
        } else {
            "ies"
        },
    );
    text
}

/// A finding in words.
pub(crate) fn sentence(found: &Finding) -> String {
    let mut text = object_text(&found.object);
    // Writing to a string cannot fail.
    if let Some(owner) = &found.owner {
        let _ = write!(text, " of {owner}");
    }
    let _ = write!(text, ": {}; ", found.reason);
    match &found.remedy {
        Remedy::None => text.push_str("left as it is"),
        Remedy::Installed => text.push_str("installed again"),
        Remedy::Removed => text.push_str("removed"),
        Remedy::Renegotiated => text.push_str("to be negotiated again"),
        Remedy::Failed(reason) => {
            let _ = write!(text, "cannot be mended: {reason}");
        }
    }
    text
}

/// An object as people name it.
pub(crate) fn object_text(object: &Object) -> String {
    match object {
        Object::Sa(id) => format!("SA {:08x} to {}", id.spi, id.dst),
        Object::Policy(key) => format!("policy {key}"),
        Object::Route((destination, length)) => format!("route to {destination}/{length}"),
        Object::Rule { v6: false } => "the IPv4 rule of the tunnels' routes".to_owned(),
        Object::Rule { v6: true } => "the IPv6 rule of the tunnels' routes".to_owned(),
        Object::Address(addr) => format!("virtual address {addr}"),
    }
}

fn kind(found: &Finding) -> Kind {
    (
        object_name(&found.object),
        difference_name(found.difference),
        remedy_name(&found.remedy),
    )
}

/// An object in metrics and JSON.
pub(crate) const fn object_name(object: &Object) -> &'static str {
    match object {
        Object::Sa(_) => "sa",
        Object::Policy(_) => "policy",
        Object::Route(_) => "route",
        Object::Rule { .. } => "rule",
        Object::Address(_) => "address",
    }
}

/// A difference in metrics and JSON.
pub(crate) const fn difference_name(difference: Difference) -> &'static str {
    match difference {
        Difference::Missing => "missing",
        Difference::Unwanted => "unwanted",
        Difference::Changed => "changed",
        Difference::InTheWay => "in_the_way",
    }
}

/// A remedy in metrics and JSON.
pub(crate) const fn remedy_name(remedy: &Remedy) -> &'static str {
    match remedy {
        Remedy::None => "none",
        Remedy::Installed => "installed",
        Remedy::Removed => "removed",
        Remedy::Renegotiated => "renegotiated",
        Remedy::Failed(_) => "failed",
    }
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::plane::SaId;

    use super::*;

    fn finding(spi: u32, difference: Difference, remedy: Remedy) -> Finding {
        Finding {
            object: Object::Sa(SaId {
                spi,
                dst: "192.0.2.1".parse().unwrap(),
            }),
            difference,
            owner: Some("gw/net".to_owned()),
            reason: "is not there".to_owned(),
            remedy,
        }
    }

    fn audit(findings: Vec<Finding>) -> Audit {
        Audit {
            findings,
            sas: 4,
            policies: 3,
            alien_sas: 1,
            alien_policies: 2,
        }
    }

    fn run(audits: &mut Audits, outcome: Result<Audit, PlaneError>) -> Vec<String> {
        audits.due();
        assert_eq!(audits.begin(), Some(false));
        let (lines, answers) = audits.finish(7, Duration::from_millis(3), outcome);
        answers.give();
        lines.into_iter().map(|line| line.message).collect()
    }

    #[test]
    fn one_runs_at_a_time_and_all_of_a_kind_share_it() {
        let mut audits = Audits::default();
        audits.due();
        audits.due();
        assert_eq!(audits.begin(), Some(false));
        let (first, mut of_first) = oneshot::channel();
        let (second, mut of_second) = oneshot::channel();
        let (dry, mut of_dry) = oneshot::channel();
        audits.ask(false, first);
        audits.ask(true, dry);
        audits.ask(false, second);
        assert_eq!(audits.begin(), None, "one is running");

        audits
            .finish(1, Duration::ZERO, Ok(Audit::default()))
            .1
            .give();
        assert!(of_first.try_recv().is_err(), "it began before they asked");
        assert_eq!(audits.begin(), Some(false));
        audits
            .finish(2, Duration::ZERO, Ok(Audit::default()))
            .1
            .give();
        assert_eq!(of_first.try_recv().unwrap().unwrap().at, 2);
        assert_eq!(of_second.try_recv().unwrap().unwrap().at, 2);

        assert_eq!(audits.begin(), Some(true));
        audits
            .finish(3, Duration::ZERO, Ok(Audit::default()))
            .1
            .give();
        assert!(of_dry.try_recv().unwrap().unwrap().dry_run);
        assert_eq!(audits.begin(), None);
        assert_eq!(audits.summary().completed, 2, "looking is not counted");
    }

    #[test]
    fn nothing_is_run_for_a_client_that_left() {
        let mut audits = Audits::default();
        let (reply, answer) = oneshot::channel();
        audits.ask(true, reply);
        drop(answer);
        assert_eq!(audits.begin(), None);
    }

    #[test]
    fn each_finding_is_told_once_and_summed_up() {
        let mut audits = Audits::default();
        let missing = finding(1, Difference::Missing, Remedy::Renegotiated);
        let stuck = finding(2, Difference::Unwanted, Remedy::Failed("busy".to_owned()));

        let first = run(&mut audits, Ok(audit(vec![missing, stuck.clone()])));
        let again = run(&mut audits, Ok(audit(vec![stuck])));
        let stale = audits.summary().last.clone().unwrap().stale;
        let mended = run(&mut audits, Ok(audit(Vec::new())));
        let quiet = run(&mut audits, Ok(audit(Vec::new())));

        assert_eq!(
            first,
            [
                "SA 00000001 to 192.0.2.1 of gw/net: is not there; to be negotiated again",
                "SA 00000002 to 192.0.2.1 of gw/net: is not there; cannot be mended: busy",
                "audit of the data plane: 1 sa missing (renegotiated), 1 sa unwanted (failed); \
                 alien: 1 SA, 2 policies",
            ]
        );
        assert!(again.is_empty(), "{again:?}");
        assert_eq!(stale, [1, 0]);
        assert_eq!(
            mended,
            ["audit of the data plane: as it should be; alien: 1 SA, 2 policies"]
        );
        assert!(quiet.is_empty(), "{quiet:?}");
        let summary = audits.summary();
        assert_eq!(summary.findings[&("sa", "missing", "renegotiated")], 1);
        assert_eq!(summary.findings[&("sa", "unwanted", "failed")], 2);
        assert_eq!(summary.completed, 4);
    }

    #[test]
    fn a_flood_of_findings_is_cut() {
        let mut audits = Audits::default();
        let many = (0..10_000)
            .map(|spi| finding(spi, Difference::Unwanted, Remedy::Removed))
            .collect();

        let lines = run(&mut audits, Ok(audit(many)));

        assert_eq!(lines.len(), MAX_LINES + 2);
        assert_eq!(lines[MAX_LINES], "… and 9800 more differences");
    }

    #[test]
    fn a_failure_is_told_once_until_it_is_over() {
        let mut audits = Audits::default();
        let failure = || {
            Err(PlaneError {
                op: "list the SAs".to_owned(),
                reason: "no buffer space".to_owned(),
                errno: None,
            })
        };

        let first = run(&mut audits, failure());
        let second = run(&mut audits, failure());
        let over = run(&mut audits, Ok(Audit::default()));

        assert_eq!(
            first,
            ["the data plane cannot be audited: list the SAs: no buffer space"]
        );
        assert!(second.is_empty());
        assert_eq!(over.len(), 1, "{over:?}");
        assert_eq!(audits.summary().failed, 2);
    }
}
