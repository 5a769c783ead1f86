// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A gateway and thirty peers for an hour, during which anything may happen at any time.
//!
//! A seed decides who the peers are ([`sites`]), what happens when ([`plan`]), and what the network
//! does to each datagram. All the while nothing may be told wrong, left in a data plane or pile up
//! ([`watch`]); and once there is peace again both ends of each tunnel agree, and what is to be up
//! is up within the time that back-off and liveness checks allow for.
//!
//! There are few seeds, and ten thousand with `SWANHERD_LONG=1`. `SWANHERD_FLEET=first..end`
//! chooses the seeds, so that a long run can be had in slices, `SWANHERD_SEED=n` one, and
//! `SWANHERD_FLEET_ACTS=3,17` leaves only those of its acts.

mod acts;
mod plan;
mod sites;
mod watch;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use self::acts::Fleet;
use self::plan::Plan;
use crate::world::number_from;

/// How many seeds there are if nobody says otherwise.
const SEEDS: u64 = 30;
/// How many there are in a long run.
const MANY_SEEDS: u64 = 10_000;
/// Until then anything happens; from then on nothing does.
pub(crate) const PEACE: Duration = Duration::from_secs(2700);
/// An hour.
pub(crate) const END: Duration = Duration::from_secs(3600);
/// How often everything is looked at.
const LOOK: Duration = Duration::from_secs(20);
/// Runs that the search for a smaller schedule may take.
const SMALLER: usize = 80;

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    steps: u64,
    told: u64,
}

#[test]
fn a_fleet_survives_an_hour_of_anything() {
    if let Some(seed) = number_from("SWANHERD_SEED") {
        let plan = Plan::of(seed).only(chosen_acts().as_ref());
        run(seed, &plan, true);
        return;
    }
    let seeds = seeds();
    let began = wall_clock();
    let next = Mutex::new(seeds.clone());
    let total = Mutex::new(Outcome::default());
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::panic::set_hook(Box::new(|_| {}));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(seed) = next.lock().unwrap().next() else {
                        return;
                    };
                    match quietly(seed, &Plan::of(seed)) {
                        Ok(outcome) => {
                            let mut total = total.lock().unwrap();
                            total.steps += outcome.steps;
                            total.told += outcome.told;
                        }
                        Err(why) => {
                            say(&format!("seed {seed}: {why}"));
                            failed.lock().unwrap().push((seed, why));
                        }
                    }
                }
            });
        }
    });
    let _ = std::panic::take_hook();
    let took = (wall_clock() - began).as_secs_f64();
    let hours = (seeds.end - seeds.start) as f64;
    let total = total.into_inner().unwrap();
    say(&format!(
        "fleet: seeds {}..{}, {hours} virtual hours in {took:.1} s: {:.2} hours/s, {:.0} steps/s, \
         {} events told, {threads} threads",
        seeds.start,
        seeds.end,
        hours / took,
        total.steps as f64 / took,
        total.told,
    ));
    let mut failed = failed.into_inner().unwrap();
    failed.sort();
    let Some((seed, why)) = failed.first() else {
        return;
    };
    let seed = *seed;
    let acts = smaller(seed, why);
    let list: Vec<String> = acts.iter().map(ToString::to_string).collect();
    let list = list.join(",");
    say(&format!(
        "seed {seed}: {why}\nreplay it with what is left of its schedule:\n\
         SWANHERD_SEED={seed} SWANHERD_FLEET_ACTS={list} cargo test -p swanherd-ike --test sim \
         a_fleet_survives\nor as it was, without SWANHERD_FLEET_ACTS"
    ));
    run(seed, &Plan::of(seed).only(Some(&acts)), true);
    panic!(
        "seeds {:?} fail",
        failed.iter().map(|(seed, _)| seed).collect::<Vec<_>>()
    );
}

/// One run; it panics if anything is wrong.
fn run(seed: u64, plan: &Plan, speaks: bool) -> Outcome {
    let mut fleet = Fleet::new(seed, plan, speaks);
    let mut look = LOOK;
    for act in &plan.acts {
        while look < act.at {
            fleet.run_to(look);
            fleet.look();
            look += LOOK;
        }
        fleet.run_to(act.at);
        fleet.act(act);
    }
    while look < END {
        fleet.run_to(look);
        if look >= PEACE {
            fleet.make_peace();
        }
        fleet.look();
        look += LOOK;
    }
    fleet.run_to(END);
    fleet.settle();
    Outcome {
        steps: fleet.world.steps,
        told: fleet.told(),
    }
}

/// One run; what is wrong comes back.
fn quietly(seed: u64, plan: &Plan) -> Result<Outcome, String> {
    catch_unwind(AssertUnwindSafe(|| run(seed, plan, false))).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_else(|| "panic".to_owned())
    })
}

/// The acts of a failing seed without those that are not needed for it to fail.
fn smaller(seed: u64, why: &str) -> BTreeSet<usize> {
    let same = |without: &BTreeSet<usize>| {
        let plan = Plan::of(seed).only(Some(without));
        quietly(seed, &plan).is_err_and(|other| kind(&other) == kind(why))
    };
    let mut acts: Vec<usize> = Plan::of(seed).acts.iter().map(|act| act.number).collect();
    let mut parts = 2;
    let mut part = 0;
    std::panic::set_hook(Box::new(|_| {}));
    for _ in 0..SMALLER {
        let size = acts.len().div_ceil(parts).max(1);
        let without: BTreeSet<usize> = acts
            .iter()
            .enumerate()
            .filter(|(index, _)| index / size != part)
            .map(|(_, act)| *act)
            .collect();
        if without.len() < acts.len() && same(&without) {
            acts = without.into_iter().collect();
            (parts, part) = ((parts - 1).max(2), 0);
            continue;
        }
        part += 1;
        if part >= parts {
            if size == 1 {
                break;
            }
            (parts, part) = (parts * 2, 0);
        }
    }
    let _ = std::panic::take_hook();
    acts.into_iter().collect()
}

/// What two messages have in common that are about the same mistake of different SAs.
fn kind(why: &str) -> String {
    let (_, what) = why.split_once(' ').unwrap_or(("", why));
    what.chars().filter(|c| c.is_alphabetic()).collect()
}

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SWANHERD_FLEET") else {
        let long = std::env::var_os("SWANHERD_LONG").is_some_and(|value| value != "0");
        return 0..if long { MANY_SEEDS } else { SEEDS };
    };
    let (first, end) = text.split_once("..").unwrap_or(("0", &text));
    let number = |text: &str| {
        text.parse()
            .unwrap_or_else(|error| panic!("SWANHERD_FLEET={text}: {error}"))
    };
    number(first)..number(end)
}

fn chosen_acts() -> Option<BTreeSet<usize>> {
    let text = std::env::var("SWANHERD_FLEET_ACTS").ok()?;
    let numbers = text.split(',').filter(|number| !number.is_empty());
    Some(numbers.map(|number| number.parse().unwrap()).collect())
}

#[expect(
    clippy::disallowed_methods,
    reason = "to measure how fast the simulator is"
)]
fn wall_clock() -> std::time::Instant {
    std::time::Instant::now()
}

/// To standard error, which the harness of tests would keep back otherwise.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
