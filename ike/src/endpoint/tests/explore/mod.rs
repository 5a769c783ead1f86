// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints, explored: every order in which datagrams arrive, are lost or doubled, timers
//! fire and data planes answer, for every collision of exchanges.
//!
//! `cargo xtask test --only explore` goes as deep as continuous integration does and prints what
//! it has seen; plain `cargo test` looks at the first steps only. A violation prints the schedule
//! that leads to it and the command that follows it step by step. `docs/testing.md` says what
//! is covered and what is not.

mod alike;
mod check;
#[allow(dead_code, reason = "the simulation needs more of it")]
#[path = "../../../../tests/sim/plane.rs"]
mod plane;
mod scenario;
mod schedules;
mod search;
mod world;

use std::collections::VecDeque;
use std::sync::Mutex;

use self::scenario::{Budget, COLLISIONS, FAULTY, Pass, Scenario};
use self::search::{Report, Violation, explore, replay};
use self::world::{Said, Step, World};

/// How far this run goes.
fn level() -> usize {
    match std::env::var("SWANHERD_EXPLORE").as_deref() {
        Ok("long") => 2,
        Ok("ci") => 1,
        _ => 0,
    }
}

/// Explores all scenarios, on as many threads as there are processors.
fn explore_all(scenarios: &'static [Scenario]) -> Vec<(&'static Scenario, Report)> {
    let wanted = std::env::var("SWANHERD_SCENARIO").ok();
    let wanted = |scenario: &&Scenario| wanted.as_deref().is_none_or(|name| name == scenario.name);
    let deeper: Option<Pass> = std::env::var("SWANHERD_PASS").ok().map(|text| {
        text.parse()
            .expect("SWANHERD_PASS is LOST,DOUBLED,EARLY,DEPTH")
    });
    let passes = |scenario: &'static Scenario| match deeper {
        Some(pass) => vec![(scenario, pass)],
        None => scenario.passes[level()]
            .iter()
            .map(|pass| (scenario, *pass))
            .collect(),
    };
    let queue: VecDeque<(&Scenario, Pass)> =
        scenarios.iter().filter(wanted).flat_map(passes).collect();
    let queue = Mutex::new(queue);
    let reports = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((scenario, pass)) = queue.lock().unwrap().pop_front() else {
                        return;
                    };
                    let report = explore(scenario, pass);
                    print_report(scenario, pass, &report);
                    reports.lock().unwrap().push((scenario, report));
                }
            });
        }
    });
    reports.into_inner().unwrap()
}

fn print_report(scenario: &Scenario, pass: Pass, report: &Report) {
    let seconds = report.took.as_secs_f64();
    let rate = f64::from(u32::try_from(report.transitions).unwrap_or(u32::MAX)) / seconds;
    let Budget {
        lost,
        doubled,
        early,
    } = pass.budget;
    let extent = if report.cut == 0 {
        "whole,".to_owned()
    } else {
        format!("{} cut,", report.cut)
    };
    println!(
        "{:<36} {lost} lost {doubled} doubled {early} early, depth {:>2}: {:>8} states {:>9} \
         transitions {:>6} ends {extent:>12} {seconds:6.1} s {rate:6.0}/s{}",
        scenario.name,
        report.depth,
        report.states,
        report.transitions,
        report.ends,
        if report.violation.is_some() {
            "  VIOLATION"
        } else {
            ""
        }
    );
}

fn written(schedule: &[Step]) -> String {
    let steps: Vec<String> = schedule.iter().map(ToString::to_string).collect();
    steps.join(" ")
}

/// What happens in a schedule, in words.
fn story(scenario: &'static Scenario, schedule: &[Step]) -> (Vec<String>, Option<String>) {
    let mut world = World::new(scenario, Budget::ALL);
    world.story = Some(Vec::new());
    let outcome = replay(&mut world, schedule);
    let story = world.story.take().unwrap_or_default();
    (story, outcome.err().map(|(_, what)| what))
}

fn command(scenario: &Scenario, schedule: &[Step]) -> String {
    format!(
        "SWANHERD_SCHEDULE='{}: {}' cargo test -p swanherd-ike --lib \
         explore::a_schedule_is_followed -- --nocapture",
        scenario.name,
        written(schedule)
    )
}

fn print_violation(scenario: &'static Scenario, violation: &Violation) {
    let (story, _) = story(scenario, &violation.schedule);
    println!("\n{}: {}", scenario.name, violation.what);
    for line in story {
        println!("    {line}");
    }
    println!("{}\n", command(scenario, &violation.schedule));
}

/// The scenario and the steps of `NAME: STEPS`.
fn parse(text: &str) -> Result<(&'static Scenario, Vec<Step>), String> {
    let (name, steps) = text.split_once(':').ok_or("it is not NAME: STEPS")?;
    let mut scenarios = COLLISIONS.iter().chain(FAULTY);
    let scenario = scenarios
        .find(|scenario| scenario.name == name)
        .ok_or_else(|| format!("no scenario is called {name:?}"))?;
    let steps: Result<Vec<Step>, String> = steps.split_whitespace().map(str::parse).collect();
    Ok((scenario, steps?))
}

/// Follows a schedule of regression tests.
fn follow(schedule: &str) -> Result<(), String> {
    let (scenario, steps) = parse(schedule)?;
    let mut world = World::new(scenario, Budget::ALL);
    replay(&mut world, &steps).map_err(|(step, what)| format!("after {step} steps: {what}"))
}

#[test]
fn every_collision_ends_well_in_every_order() {
    let reports = explore_all(COLLISIONS);
    let states: usize = reports.iter().map(|(_, report)| report.states).sum();
    let transitions: u64 = reports.iter().map(|(_, report)| report.transitions).sum();
    println!("{states} states, {transitions} transitions in all");
    let mut violated = Vec::new();
    for (scenario, report) in &reports {
        if let Some(violation) = &report.violation {
            print_violation(scenario, violation);
            violated.push(scenario.name);
        }
        let idle = report.violation.is_none() && report.states <= 10;
        assert!(!idle, "{} explores nothing", scenario.name);
    }
    assert!(violated.is_empty(), "violated: {violated:?}");
    if std::env::var_os("SWANHERD_SCENARIO").is_none() {
        let mut said = Said::default();
        for (_, report) in &reports {
            said.include(report.said);
        }
        assert_eq!(said, Said::ALL, "some refusals were never seen");
    }
}

#[test]
fn faults_of_endpoints_and_data_planes_are_found() {
    for (scenario, report) in explore_all(FAULTY) {
        let violation = report.violation.unwrap_or_else(|| {
            panic!(
                "{}: nothing was found in {} states",
                scenario.name, report.states
            )
        });
        let (_, again) = story(scenario, &violation.schedule);
        assert_eq!(again.as_ref(), Some(&violation.what), "{}", scenario.name);
        println!(
            "{}: {}",
            violation.what,
            command(scenario, &violation.schedule)
        );
    }
}

/// The command that a violation prints runs this with a schedule.
#[test]
fn a_schedule_is_followed() {
    let text = std::env::var("SWANHERD_SCHEDULE")
        .unwrap_or_else(|_| "child-child: c0- c1 dB0 dA0- dA0 dB0".to_owned());
    let (scenario, steps) = parse(&text).expect("it is as printed");
    let (story, outcome) = story(scenario, &steps);
    for line in story {
        println!("{line}");
    }
    assert_eq!(outcome, None);
}
