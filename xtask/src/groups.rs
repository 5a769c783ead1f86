// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cargo xtask test`: all tests, and what became of them.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};

use crate::kernels::Kernel;
use crate::shell::{
    Ended, Error, cache, cargo, command, in_ci, is_root, quiet, stopping, stream, target,
};
use crate::{lab, lint, mips, packages, shell};

/// Tests of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Formatting, clippy, licence headers, licences of dependencies
    Lint,
    /// Everything that runs in one process
    Unit,
    /// IKE endpoints in virtual time over simulated networks
    Sim,
    /// Collisions of IKE exchanges, in every order
    Explore,
    /// Property tests with many more cases than `unit` tries
    Model,
    /// Fuzz targets, a minute each
    Fuzz,
    /// Namespaces: strongSwan as peer, stock clients; ESP in user space
    Netns,
    /// The same under a kernel that has ESP, with more peers, and with faults
    Kernel,
    /// What needs a kernel of a distribution: xfrm interfaces, GRE, kernels old and new
    Vm,
    /// The demonstration: thirty tunnels
    Demo,
    /// Cross build for MIPS routers, tried under emulation
    Mips,
}

/// `cargo xtask test`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Only these groups, separated by commas
    #[arg(long, value_delimiter = ',')]
    only: Vec<Group>,
    /// How long each fuzz target runs
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u32,
    /// Also the group `mips`
    #[arg(long)]
    mips: bool,
    /// More seeds, more cases, ten minutes for each fuzz target
    #[arg(long)]
    long: bool,
    /// In `kernel`, only bad weather and strongSwan's scenarios, with the charon of this release of
    /// Debian as the peer (debootstrap)
    #[arg(long, value_name = "RELEASE")]
    charon: Option<String>,
}

/// `cargo xtask fuzz`
#[derive(Debug, Parser)]
pub(crate) struct FuzzArgs {
    /// How long each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// Runs the fuzz targets only.
pub(crate) fn fuzz(args: &FuzzArgs) -> Result<u8, Error> {
    test(&Args {
        only: vec![Group::Fuzz],
        fuzz_seconds: args.seconds,
        mips: false,
        long: false,
        charon: None,
    })
}

/// What became of a group.
#[derive(Debug)]
struct Report {
    group: &'static str,
    what: &'static str,
    took: Duration,
    passed: u32,
    failed: u32,
    /// What was not run, and why.
    skipped: Vec<String>,
    /// Names of what failed.
    failures: Vec<String>,
    /// What failed tests have printed.
    shown: Vec<String>,
}

/// Runs the groups.
pub(crate) fn test(args: &Args) -> Result<u8, Error> {
    let default = [
        Group::Lint,
        Group::Unit,
        Group::Sim,
        Group::Explore,
        Group::Model,
        Group::Netns,
        Group::Kernel,
        Group::Vm,
        Group::Demo,
        Group::Fuzz,
    ];
    let mut groups = if args.only.is_empty() {
        default.to_vec()
    } else {
        args.only.clone()
    };
    if args.mips && !groups.contains(&Group::Mips) {
        groups.push(Group::Mips);
    }
    let mut reports = Vec::new();
    for group in groups {
        if stopping() {
            break;
        }
        let mut report = Report::new(group);
        eprintln!("\n=== {}: {}", report.group, report.what);
        let begun = Instant::now();
        if let Err(error) = report.run(group, args) {
            eprintln!("xtask: {error}");
            report.fail(format!("{}: {error}", report.group));
        }
        report.took = begun.elapsed();
        reports.push(report);
    }
    swanherd_tests::sweep();
    print_table(&reports);
    let passed: u32 = reports.iter().map(|r| r.passed).sum();
    let mut failed: u32 = reports.iter().map(|r| r.failed).sum();
    if in_ci() {
        failed += reports
            .iter()
            .map(|r| u32::try_from(r.skipped.len()).unwrap_or(0))
            .sum::<u32>();
    }
    if stopping() {
        failed += 1;
    }
    println!("{passed} passed, {failed} failed");
    Ok(u8::from(failed > 0 || passed == 0))
}

/// How much of what failed tests of a group have printed is repeated at the end, where it is seen.
const REPEATED_LINES: usize = 80;

fn print_table(reports: &[Report]) {
    for r in reports.iter().filter(|r| !r.shown.is_empty()) {
        println!("\n=== failed in {}", r.group);
        for line in r.shown.iter().take(REPEATED_LINES) {
            println!("{line}");
        }
    }
    println!(
        "\n{:<8} {:<58} {:>7} {:>7} {:>7} {:>8}",
        "group", "what ran", "seconds", "passed", "failed", "skipped"
    );
    for r in reports {
        println!(
            "{:<8} {:<58} {:>7.0} {:>7} {:>7} {:>8}",
            r.group,
            r.what,
            r.took.as_secs_f32(),
            r.passed,
            r.failed,
            r.skipped.len()
        );
    }
    for r in reports {
        for name in &r.failures {
            println!("  failed in {}: {name}", r.group);
        }
        for why in &r.skipped {
            println!("  skipped in {}: {why}", r.group);
        }
    }
    println!();
}

impl Report {
    fn new(group: Group) -> Self {
        let (group, what) = match group {
            Group::Lint => ("lint", "rustfmt, clippy, SPDX headers, licences"),
            Group::Unit => ("unit", "tests of each crate"),
            Group::Sim => ("sim", "IKE in virtual time"),
            Group::Explore => ("explore", "collisions of IKE exchanges, in every order"),
            Group::Model => (
                "model",
                "tests of each library again, with 2000 cases a property",
            ),
            Group::Fuzz => ("fuzz", "fuzz targets with committed seeds"),
            Group::Netns => (
                "netns",
                "strongSwan, swanctl, Python vici; ESP in user space",
            ),
            Group::Kernel => (
                "kernel",
                "strongSwan, libreswan, OpenIKED, faults; User-mode Linux",
            ),
            Group::Vm => ("vm", "Debian's kernels 5.10, 6.1 and 6.12, emulated"),
            Group::Demo => ("demo", "cargo xtask demo --tunnels 30 --seconds 5 --json"),
            Group::Mips => ("mips", "static MIPS binary under qemu-user"),
        };
        Self {
            group,
            what,
            took: Duration::ZERO,
            passed: 0,
            failed: 0,
            skipped: Vec::new(),
            failures: Vec::new(),
            shown: Vec::new(),
        }
    }

    fn run(&mut self, group: Group, args: &Args) -> Result<(), Error> {
        let needs_root = match group {
            Group::Lint
            | Group::Unit
            | Group::Sim
            | Group::Explore
            | Group::Model
            | Group::Fuzz => false,
            Group::Netns | Group::Kernel | Group::Vm | Group::Demo | Group::Mips => true,
        };
        if needs_root && !is_root() {
            self.skipped.push(format!("{} needs root", self.group));
            return Ok(());
        }
        packages::install(packages::COMPILERS)?;
        match group {
            Group::Lint => self.lint(),
            Group::Unit => self.unit(),
            Group::Sim => self.sim(args),
            Group::Explore => self.explore(args),
            Group::Model => self.model(args),
            Group::Fuzz => self.fuzz(args),
            Group::Netns => self.netns(),
            Group::Kernel => self.kernel(args),
            Group::Vm => self.vm(),
            Group::Demo => self.demo(),
            Group::Mips => self.mips(),
        }
    }

    fn lint(&mut self) -> Result<(), Error> {
        let clippy = [
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ];
        self.check("rustfmt", cargo(["fmt", "--all", "--check"]), 120)?;
        let fuzz = ["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"];
        self.check("rustfmt of the fuzz targets", cargo(fuzz), 120)?;
        self.check("clippy", cargo(clippy), 1200)?;
        // Targets that plain `cargo test` leaves out are left out of "all", too.
        let beds = "clippy -p swanherd-kernel --test xfrm_kernel --test conformance_xfrm";
        let beds = beds.split(' ').chain(["--locked", "--", "-D", "warnings"]);
        self.check("clippy of tests for the labs", cargo(beds), 600)?;
        self.found("SPDX headers", lint::headers());
        self.found("licences", lint::licences());
        Ok(())
    }

    fn unit(&mut self) -> Result<(), Error> {
        let mut all = cargo(["test", "--workspace", "--locked", "--no-fail-fast"]);
        all.args(["--exclude", "swanherd-tests", "--exclude", "swanherd-ike"]);
        self.libtest(all, 1200)?;
        self.libtest(
            cargo([
                "test",
                "-p",
                "swanherd-tests",
                "-p",
                "swanherd-ike",
                "--locked",
                "--lib",
            ]),
            600,
        )
    }

    fn sim(&mut self, args: &Args) -> Result<(), Error> {
        let mut sim = cargo([
            "test",
            "-p",
            "swanherd-ike",
            "--locked",
            "--no-fail-fast",
            "--test",
            "*",
        ]);
        if args.long {
            sim.args(["--profile", "sim"])
                .env("SWANHERD_SIM_SEEDS", "20000")
                .env("SWANHERD_LONG", "1");
        }
        self.libtest(sim, if args.long { 21_600 } else { 1200 })
    }

    /// With an optimised endpoint: it takes a million steps.
    fn explore(&mut self, args: &Args) -> Result<(), Error> {
        let mut explore = cargo([
            "test",
            "-p",
            "swanherd-ike",
            "--locked",
            "--lib",
            "--config",
            "profile.dev.package.swanherd-ike.opt-level=2",
            "endpoint::tests::explore",
            "--",
            "--show-output",
        ]);
        explore.env("SWANHERD_EXPLORE", if args.long { "long" } else { "ci" });
        self.libtest(explore, if args.long { 7200 } else { 900 })
    }

    /// The number of cases is all that differs: property tests stand beside the others.
    fn model(&mut self, args: &Args) -> Result<(), Error> {
        let mut model = cargo(["test", "--locked", "--no-fail-fast", "--lib"]);
        for package in ["ipsec", "config", "ike", "esp", "kernel", "vici"] {
            model.args(["-p", &format!("swanherd-{package}")]);
        }
        model.env("PROPTEST_CASES", if args.long { "50000" } else { "2000" });
        self.libtest(model, if args.long { 7200 } else { 900 })
    }

    fn fuzz(&mut self, args: &Args) -> Result<(), Error> {
        let seconds = if args.long {
            args.fuzz_seconds.max(600)
        } else {
            args.fuzz_seconds
        };
        let binaries = build_fuzz_targets()?;
        if binaries.is_empty() {
            return Err("there are no fuzz targets".into());
        }
        let fuzz = shell::workspace().join("fuzz");
        let crashes = cache()?.join("fuzz");
        // Two at a time: what developers and continuous integration have is two cores.
        for pair in binaries.chunks(2) {
            let results: Vec<(String, Result<bool, String>)> = std::thread::scope(|scope| {
                let running: Vec<_> = pair
                    .iter()
                    .map(|binary| {
                        let (fuzz, crashes) = (&fuzz, &crashes);
                        scope.spawn(move || {
                            let name = file_name(binary);
                            let ran = fuzz_target(binary, &name, fuzz, crashes, seconds)
                                .map_err(|e| e.to_string());
                            (name, ran)
                        })
                    })
                    .collect();
                running
                    .into_iter()
                    .filter_map(|thread| thread.join().ok())
                    .collect()
            });
            for (name, ran) in results {
                match ran {
                    Ok(true) => self.passed += 1,
                    Ok(false) => self.fail(format!("fuzz target {name}")),
                    Err(error) => self.fail(format!("fuzz target {name}: {error}")),
                }
            }
        }
        Ok(())
    }

    fn netns(&mut self) -> Result<(), Error> {
        packages::install(packages::NETWORK)?;
        packages::install(packages::STRONGSWAN)?;
        let python = python_with_vici()?;
        shell::build(cargo(["build", "-p", "swanherd", "--locked"]))?;
        for binary in test_binaries("swanherd-tests", NETNS_TESTS)? {
            let mut tests = Command::new(&binary);
            tests
                .arg("--test-threads=2")
                .env("SWANHERD_VICI_PYTHON", &python);
            // The other faults need ESP in the kernel.
            if file_name(&binary).starts_with("faults") {
                tests.arg("user_plane");
            }
            self.libtest(tests, 1200)?;
        }
        Ok(())
    }

    fn kernel(&mut self, args: &Args) -> Result<(), Error> {
        packages::install(packages::STRONGSWAN)?;
        let peers = lab::peers()?;
        shell::build(cargo(["build", "-p", "swanherd", "--locked"]))?;
        let charon = args.charon.as_deref().map(lab::charon).transpose()?;
        let binaries = if charon.is_some() {
            test_binaries("swanherd-tests", &["netem", "scenarios"])?
        } else {
            let names = [
                "kernel",
                "faults",
                "netem",
                "scenarios",
                "compare",
                "peers",
                "transport",
            ];
            let mut binaries = test_binaries("swanherd-tests", &names)?;
            let own = ["xfrm_kernel", "conformance_xfrm"];
            binaries.extend(test_binaries("swanherd-kernel", &own)?);
            binaries
        };
        let seconds = if args.long { 7200 } else { 1200 };
        let mut guests = Vec::new();
        for binary in binaries {
            let mut tests = lab::uml(1024, seconds)?;
            tests
                .env("SWANHERD_LAB", "uml")
                .env("SWANHERD_PEERS", &peers);
            if args.long {
                tests.env("SWANHERD_LONG", "1");
            }
            if let Some(root) = &charon {
                tests.env("SWANHERD_CHARON_ROOT", root);
            }
            tests
                .arg(&binary)
                .args(["--test-threads=1", "--color=never"]);
            if file_name(&binary).starts_with("faults") {
                tests.args(["--skip", "user_plane"]);
            }
            // What changes addresses of states in the kernel; the rest is about IKE.
            if file_name(&binary).starts_with("transport") {
                tests.args(["we_roam_and", "charon_roams_and", "nat_mapping_changes_and"]);
            }
            guests.push((String::new(), tests));
        }
        self.libtests(guests, u64::from(seconds) + 60)
    }

    fn vm(&mut self) -> Result<(), Error> {
        packages::install(packages::STRONGSWAN)?;
        shell::build(cargo(["build", "-p", "swanherd", "--locked"]))?;
        let binaries = test_binaries("swanherd-tests", &["vm"])?;
        let mut guests = Vec::new();
        for kernel in Kernel::ALL {
            for binary in &binaries {
                let mut tests = lab::vm(kernel, 1, 1024, 900)?;
                tests.env("SWANHERD_LAB", "vm");
                if kernel == OFFLOADING {
                    tests.env(lab::NETDEVSIM, kernel.netdevsim()?);
                }
                tests
                    .arg(binary)
                    .args(["--test-threads=1", "--color=never"]);
                if kernel != OFFLOADING {
                    tests.args(["--skip", "offload::"]);
                }
                guests.push((format!("Linux {}", kernel.name()), tests));
            }
        }
        self.libtests(guests, 960)
    }

    fn demo(&mut self) -> Result<(), Error> {
        let own = std::env::current_exe()?;
        let mut demo = Command::new(own);
        demo.args([
            "demo",
            "--tunnels",
            "30",
            "--seconds",
            "5",
            "--json",
            "--profile",
            "dev",
        ]);
        self.check("thirty tunnels carry traffic both ways", demo, 300)
    }

    fn mips(&mut self) -> Result<(), Error> {
        for (what, outcome) in mips::checks()? {
            self.found(&what, outcome);
        }
        Ok(())
    }

    /// A command that passes as a whole, or fails.
    fn check(&mut self, what: &str, command: Command, seconds: u64) -> Result<(), Error> {
        let ended = stream(command, Duration::from_secs(seconds), |_| ())?;
        if ended.ok() {
            self.passed += 1;
        } else {
            self.fail(format!(
                "{what} (status {}, {:.0} s)",
                ended.status,
                ended.took.as_secs_f32()
            ));
        }
        Ok(())
    }

    fn found(&mut self, what: &str, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.passed += 1,
            Err(error) => {
                eprintln!("xtask: {what}: {error}");
                self.fail(what.to_owned());
            }
        }
    }

    /// A command that runs Rust tests: counts what each of its binaries reports.
    fn libtest(&mut self, command: Command, seconds: u64) -> Result<(), Error> {
        self.libtests(vec![(String::new(), command)], seconds)
    }

    /// As [`Report::libtest`], for several commands with a name to tell them apart by, two at a
    /// time: what developers and continuous integration have is two cores.
    fn libtests(&mut self, commands: Vec<(String, Command)>, seconds: u64) -> Result<(), Error> {
        let limit = Duration::from_secs(seconds);
        let waiting = Mutex::new(VecDeque::from(commands));
        let next = || waiting.lock().ok().and_then(|mut queue| queue.pop_front());
        let work = || {
            let mut done = Vec::new();
            while let Some((name, command)) = next() {
                let mut tally = Tally::default();
                let ended = stream(command, limit, |line| tally.line(line));
                done.push((name, tally, ended.map_err(|e| e.to_string())));
            }
            done
        };
        let done = std::thread::scope(|scope| {
            let other = scope.spawn(work);
            let mut done = work();
            done.extend(other.join().unwrap_or_default());
            done
        });
        for (name, tally, ended) in done {
            match ended {
                Ok(ended) => self.count(&name, tally, &ended),
                Err(error) => self.fail(format!("{name}: {error}")),
            }
        }
        Ok(())
    }

    fn count(&mut self, name: &str, tally: Tally, ended: &Ended) {
        let named = |what: &str| match name {
            "" => what.to_owned(),
            name => format!("{name}: {what}"),
        };
        self.passed += tally.passed;
        for failure in &tally.failures {
            self.fail(named(failure));
        }
        for _ in tally.failures.len()..tally.failed as usize {
            self.fail(named("a test without a name"));
        }
        self.skipped.extend(tally.ignored);
        self.shown.extend(tally.shown);
        // A build that failed, a crash, a limit of time: no test has failed, yet all is not well.
        if !ended.ok() && tally.failed == 0 {
            let after = if ended.late { ", its time was up" } else { "" };
            self.fail(named(&format!(
                "the run ended with status {}{after}",
                ended.status
            )));
        }
    }

    fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }
}

/// Counts in the output of Rust's test harness.
#[derive(Debug, Default)]
struct Tally {
    passed: u32,
    failed: u32,
    failures: Vec<String>,
    ignored: Vec<String>,
    /// What failed tests have printed.
    shown: Vec<String>,
    showing: bool,
    /// What follows is what tests that passed have printed.
    of_successes: bool,
    /// Where the failures of the binary that runs begin: another may have a test of the same name.
    binary: usize,
}

impl Tally {
    fn line(&mut self, line: &str) {
        // A guest's console ends lines in its own way, and its kernel may write into them.
        let line = line.trim_end();
        match line {
            // What tests that passed have printed is shown, too, with --show-output.
            "successes:" => self.of_successes = true,
            "failures:" => {
                self.showing = false;
                self.of_successes = false;
            }
            _ if line.starts_with("running ") => {
                self.binary = self.failures.len();
                self.of_successes = false;
            }
            _ => {}
        }
        if let Some(name) = section(line).filter(|_| !self.of_successes) {
            self.showing = true;
            self.failure(name);
        }
        if self.showing {
            self.shown.push(line.to_owned());
        }
        if let Some(summary) = line.strip_prefix("test result: ") {
            self.passed += number_before(summary, " passed");
            self.failed += number_before(summary, " failed");
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failure(name);
            } else if let Some((name, why)) = test.split_once(" ... ignored") {
                let why = why.trim_start_matches(", ");
                self.ignored.push(format!(
                    "{name}: {}",
                    if why.is_empty() { "ignored" } else { why }
                ));
            }
        }
    }

    fn failure(&mut self, name: &str) {
        if !self.failures[self.binary..].iter().any(|n| n == name) {
            self.failures.push(name.to_owned());
        }
    }
}

/// The test whose output begins after this line.
fn section(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

fn number_before(text: &str, word: &str) -> u32 {
    text.split_once(word)
        .and_then(|(head, _)| {
            head.rsplit(|c: char| !c.is_ascii_digit())
                .next()?
                .parse()
                .ok()
        })
        .unwrap_or(0)
}

/// Builds integration tests of a package; their binaries, in the order of the names.
fn test_binaries(package: &str, names: &[&str]) -> Result<Vec<PathBuf>, Error> {
    let mut build = cargo(["test", "-p", package, "--locked", "--no-run"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    for name in names {
        build.args(["--test", name]);
    }
    let built = executables(&shell::build(build)?);
    names
        .iter()
        .map(|name| {
            built
                .iter()
                .find(|(target, _)| target == name)
                .map(|(_, path)| path.clone())
                .ok_or_else(|| format!("cargo built no test {name}").into())
        })
        .collect()
}

/// Names and paths of executables in cargo's JSON messages.
pub(crate) fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| {
            let path = message.get("executable")?.as_str()?.into();
            Some((
                message.get("target")?.get("name")?.as_str()?.to_owned(),
                path,
            ))
        })
        .collect()
}

/// Builds the fuzz targets with coverage and address sanitizer, without cargo-fuzz and on the
/// stable toolchain: the flags are those that cargo-fuzz gives.
fn build_fuzz_targets() -> Result<Vec<PathBuf>, Error> {
    let host = quiet(command("rustc", ["-vV"]))?
        .lines()
        .find_map(|line| line.strip_prefix("host: ").map(str::to_owned))
        .ok_or("rustc names no host")?;
    let mut build = cargo([
        "build",
        "--manifest-path",
        "fuzz/Cargo.toml",
        "--release",
        "--bins",
    ]);
    build.args([
        "--target",
        &host,
        "--message-format",
        "json-render-diagnostics",
    ]);
    build.arg("--target-dir").arg(target().join("fuzz"));
    build.env("RUSTC_BOOTSTRAP", "1").env(
        "RUSTFLAGS",
        "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
         -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
         -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
         -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
         -Zsanitizer=address -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks --cfg fuzzing",
    );
    eprintln!("xtask: building the fuzz targets");
    Ok(executables(&shell::build(build)?)
        .into_iter()
        .map(|(_, path)| path)
        .collect())
}

/// The kernel under which ESP is offloaded: the one that this machine's own compiler builds modules
/// for.
const OFFLOADING: Kernel = Kernel::V6_1;

/// Tests in namespaces that need no kernel but this one.
const NETNS_TESTS: &[&str] = &[
    "netns",
    "transport",
    "at_once",
    "clients",
    "differential",
    "faults",
    "flood",
    "recording",
    "lifecycles",
    "storm",
    "subcommands",
    "updown",
];

/// Up to here fuzzing is a test; beyond, it is a search.
const SHORT_FUZZ_SECONDS: u32 = 60;

fn fuzz_target(
    binary: &Path,
    name: &str,
    fuzz: &Path,
    crashes: &Path,
    seconds: u32,
) -> Result<bool, Error> {
    let found = crashes.join("corpus").join(name);
    let artifacts = crashes.join("crashes").join(name);
    std::fs::create_dir_all(&found)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut run = Command::new(binary);
    run.arg(&found);
    for seeds in ["seeds", "corpus"] {
        let seeds = fuzz.join(seeds).join(name);
        if seeds.is_dir() {
            run.arg(seeds);
        }
    }
    // A minute is to give the same verdict on the same code; new ground is for longer runs.
    if seconds <= SHORT_FUZZ_SECONDS {
        run.arg("-seed=1");
    }
    run.arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([
            "-timeout=10",
            "-rss_limit_mb=1024",
            "-max_len=4096",
            "-verbosity=0",
        ])
        .args(["-print_final_stats=1"])
        .current_dir(crashes);
    let ended = stream(run, Duration::from_secs(u64::from(seconds) + 120), |_| ())?;
    Ok(ended.ok())
}

fn file_name(path: &Path) -> String {
    path.file_stem()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// A Python that has strongSwan's own VICI client.
fn python_with_vici() -> Result<PathBuf, Error> {
    let venv = cache()?.join("venv");
    let python = venv.join("bin/python");
    let works = || {
        let mut check = Command::new(&python);
        check.args(["-c", "import vici"]);
        quiet(check).is_ok()
    };
    if works() {
        return Ok(python);
    }
    packages::install(&["python3", "python3-venv"])?;
    let mut make = command("/usr/bin/python3", ["-m", "venv", "--clear"]);
    make.arg(&venv);
    quiet(make)?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "vici==6.0.3"]);
    quiet(install)?;
    Ok(python)
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn counts_what_the_harness_reports() {
        let mut tally = Tally::default();

        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED\r",
            "test a::d ... ignored, needs a moon",
            "test a::e ... [ 12.3] a word of the kernel",
            "FAILED",
            "successes:",
            "---- a::b stdout ----",
            "a moon",
            "successes:",
            "    a::b",
            "failures:",
            "---- a::c stdout ----\r",
            "no moon",
            "---- a::e stdout ----",
            "no sun",
            "failures:",
            "    a::c",
            "test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out",
            "running 13 tests",
            "test a::c ... FAILED",
            "test result: FAILED. 12 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            tally.line(line);
        }

        assert_eq!((tally.passed, tally.failed), (13, 3));
        assert_eq!(tally.failures, ["a::c", "a::e", "a::c"]);
        let shown = [
            "---- a::c stdout ----",
            "no moon",
            "---- a::e stdout ----",
            "no sun",
        ];
        assert_eq!(tally.shown, shown);
        assert_eq!(tally.ignored, ["a::d: needs a moon"]);
    }
}
