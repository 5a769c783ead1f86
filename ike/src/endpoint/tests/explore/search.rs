// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Goes through all states that can be reached within so many steps, depth first; and makes the
//! schedule that leads to a violation as short as it finds it.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::alike::Key;
use super::scenario::{Pass, Scenario};
use super::world::{Happening, Said, Step, World};

/// Steps without loss within which everything has to come to rest.
const REST: usize = 600;

/// What an exploration has seen.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) states: usize,
    pub(super) transitions: u64,
    /// States in which nothing moves any more.
    pub(super) ends: u64,
    /// States at the greatest depth, from where only one way was followed.
    pub(super) cut: u64,
    /// The greatest depth.
    pub(super) depth: usize,
    /// What was said in some of them.
    pub(super) said: Said,
    pub(super) took: Duration,
    pub(super) violation: Option<Violation>,
}

/// What should not be, and how to get there.
#[derive(Clone, Debug)]
pub(super) struct Violation {
    pub(super) schedule: Vec<Step>,
    pub(super) what: String,
}

struct Search {
    limit: usize,
    /// The least depth at which each state was seen, and whether all that can follow was, too.
    seen: BTreeMap<Key, (u8, bool)>,
    /// States from where all comes to rest that was looked at.
    settled: BTreeSet<Key>,
    path: Vec<Step>,
    report: Report,
}

/// Explores a scenario up to that depth, or to the first violation.
pub(super) fn explore(scenario: &'static Scenario, pass: Pass) -> Report {
    #[expect(clippy::disallowed_methods, reason = "the rate of a search is told")]
    let begun = Instant::now();
    let world = World::new(scenario, pass.budget);
    let mut search = Search {
        limit: pass.depth,
        seen: BTreeMap::new(),
        settled: BTreeSet::new(),
        path: Vec::new(),
        report: Report::default(),
    };
    search.seen.insert(world.key(), (0, false));
    if let Err(what) = search.visit(&world) {
        let violation = Violation {
            schedule: search.path.clone(),
            what,
        };
        search.report.violation = Some(shortened(scenario, pass, violation));
    }
    let mut report = search.report;
    report.states = search.seen.len();
    #[expect(clippy::disallowed_methods, reason = "the rate of a search is told")]
    let took = begun.elapsed();
    report.took = took;
    report
}

impl Search {
    /// True if nothing that can follow was cut off.
    fn visit(&mut self, world: &World) -> Result<bool, String> {
        let depth = self.path.len();
        self.report.depth = self.report.depth.max(depth);
        if world.is_over() {
            self.report.ends += 1;
            world.check_at_rest()?;
        }
        if depth == self.limit {
            self.report.cut += 1;
            guarded(|| self.settle(world))?;
            return Ok(false);
        }
        let mut whole = true;
        for what in world.possible() {
            let (threw, seen) = self.follow(world, Step { what, low: false })?;
            whole &= seen;
            if threw {
                whole &= self.follow(world, Step { what, low: true })?.1;
            }
        }
        Ok(whole)
    }

    /// Follows the one way on which nothing is lost, as far as it is new.
    fn settle(&mut self, world: &World) -> Result<(), String> {
        let mut world = world.clone();
        let mut own = BTreeSet::new();
        let mut known = false;
        world.settle(REST, |world| {
            world.check_always()?;
            let key = world.key();
            known = self.settled.contains(&key);
            own.insert(key);
            Ok(known)
        })?;
        if !known {
            world.check_at_rest()?;
        }
        self.settled.extend(own);
        Ok(())
    }

    /// Whether dice were thrown, and whether nothing that can follow was cut off.
    fn follow(&mut self, world: &World, step: Step) -> Result<(bool, bool), String> {
        self.path.push(step);
        self.report.transitions += 1;
        let mut next = world.clone();
        let mut threw = false;
        guarded(|| {
            threw = next.happen(step);
            next.check_always()
        })?;
        self.report.said.include(next.said);
        let depth = u8::try_from(self.path.len()).unwrap_or(u8::MAX);
        let key = next.key();
        let whole = match self.seen.get(&key) {
            Some((least, whole)) if *whole || *least <= depth => *whole,
            _ => {
                self.seen.insert(key, (depth, false));
                let whole = self.visit(&next)?;
                self.seen.insert(key, (depth, whole));
                whole
            }
        };
        self.path.pop();
        Ok((threw, whole))
    }
}

/// A panic is a violation, too.
fn guarded(work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("without a text");
        Err(format!("panic: {text}"))
    })
}

/// What following a schedule and then letting things settle leads to.
///
/// # Errors
/// With the violation and the number of steps that it took.
pub(super) fn replay(world: &mut World, schedule: &[Step]) -> Result<(), (usize, String)> {
    for (n, step) in schedule.iter().enumerate() {
        let outcome = guarded(|| match world.step(*step) {
            Some(_) => world.check_always(),
            None => Err(format!("{step} is not possible")),
        });
        outcome.map_err(|what| (n + 1, what))?;
    }
    let settled = guarded(|| {
        world.note("[from here on nothing is lost]".to_owned());
        world.settle(REST, |world| world.check_always().map(|()| false))?;
        world.check_at_rest()
    });
    settled.map_err(|what| (schedule.len(), what))
}

/// Leaves out what is not needed for the violation, whichever it is then.
fn shortened(scenario: &'static Scenario, pass: Pass, mut found: Violation) -> Violation {
    let start = World::new(scenario, pass.budget);
    let attempt = |schedule: Vec<Step>| -> Option<Violation> {
        let mut world = start.clone();
        match replay(&mut world, &schedule) {
            Err((_, what)) if what.ends_with("is not possible") => None,
            Err((steps, what)) => Some(Violation {
                schedule: schedule.get(..steps)?.to_vec(),
                what,
            }),
            Ok(()) => None,
        }
    };
    loop {
        let before = found.schedule.len();
        for width in [8, 4, 3, 2, 1] {
            let mut at = 0;
            while at + width <= found.schedule.len() {
                let mut shorter = found.schedule.clone();
                shorter.drain(at..at + width);
                match attempt(shorter) {
                    Some(better) => found = better,
                    None => at += 1,
                }
            }
        }
        // Fewer low nonces, and later datagrams before earlier ones only where it matters.
        for at in 0..found.schedule.len() {
            let mut simpler = found.schedule.clone();
            if let Some(step) = simpler.get_mut(at) {
                step.low = false;
                if let Happening::Deliver(_, n) = &mut step.what {
                    *n = 0;
                }
            }
            if simpler != found.schedule
                && let Some(better) = attempt(simpler)
            {
                found = better;
            }
        }
        if found.schedule.len() >= before {
            return found;
        }
    }
}
