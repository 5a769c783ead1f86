// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cargo xtask bench tun`: the TUN plane against charon's kernel-libipsec, run by run in turn.
//!
//! Both pairs of gateways are up all the time, each in its own two namespaces, and take turns
//! at carrying one TCP stream. What else runs on the machine then hits both alike, so the ratio
//! of each pair of runs says more than either figure.

use std::fs;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::Serialize;
use swanherd_tests::{Auth, Daemon, Lab, Namespace, Pair, Plane, Scenario, Suite};

use crate::groups::executables;
use crate::packages;
use crate::shell::{Error, cargo, is_root, quiet, stopping};

const NEAR: &str = "10.1.0.1";
const FAR: &str = "10.2.0.1";

/// What the comparison has to show: this many times charon's throughput, at this part of its
/// processor time per octet.
const LEAST_THROUGHPUT: f64 = 2.0;
const MOST_CPU: f64 = 0.5;

/// `cargo xtask bench tun`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Pairs of runs: one of ours and one of charon's each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pairs: u16,
    /// Length of a run
    #[arg(long, default_value_t = 4)]
    seconds: u16,
    /// ESP suite of all four gateways
    #[arg(long, value_enum, default_value_t = EspSuite::Aes128gcm16)]
    suite: EspSuite,
    /// Our plane alone, with fixed keys and without IKE
    #[arg(long)]
    static_keys: bool,
    /// Seconds of a flood of 64-octet datagrams after the runs; 0 leaves it out
    #[arg(long, default_value_t = 2)]
    flood: u16,
    /// The result as JSON on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EspSuite {
    Aes128gcm16,
    Aes256gcm16,
    Chacha20poly1305,
    Aes256Sha256,
}

impl EspSuite {
    fn scenario(self) -> Suite {
        let esp = match self {
            Self::Aes128gcm16 => "aes128gcm16",
            Self::Aes256gcm16 => "aes256gcm16",
            Self::Chacha20poly1305 => "chacha20poly1305",
            Self::Aes256Sha256 => "aes256-sha256",
        };
        Suite {
            ike: "aes128gcm16-prfsha256-x25519",
            esp,
        }
    }

    /// The name that the example `tun_static` knows it by.
    fn static_name(self) -> &'static str {
        match self {
            Self::Aes128gcm16 => "aes128gcm",
            Self::Aes256gcm16 => "aes256gcm",
            Self::Chacha20poly1305 => "chacha20",
            Self::Aes256Sha256 => "aes256cbc-sha256",
        }
    }
}

/// One run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Run {
    mbit: f64,
    /// Processor time of the sending and of the receiving daemon per octet of TCP payload.
    send_ns_per_byte: f64,
    receive_ns_per_byte: f64,
    retransmits: u64,
}

impl Run {
    fn cpu(&self) -> f64 {
        self.send_ns_per_byte + self.receive_ns_per_byte
    }
}

/// What a flood did.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Flood {
    offered_pps: f64,
    delivered_pps: f64,
    /// How much the peak of the sending daemon's memory grew.
    memory_growth_kb: u64,
}

#[derive(Debug, Serialize)]
struct Figures {
    runs: Vec<Run>,
    flood: Option<Flood>,
    peak_memory_kb: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    suite: String,
    seconds: u16,
    ours: Figures,
    charon: Figures,
    /// Medians of the ratios of each pair of runs, ours over charon's.
    throughput_ratio: f64,
    cpu_ratio: f64,
    passed: bool,
}

/// Runs the comparison; 0 only when the bar is met.
pub(crate) fn bench(args: &Args) -> Result<u8, Error> {
    if !is_root() {
        return Err("namespaces need root".into());
    }
    packages::install(packages::NETWORK)?;
    packages::install(packages::STRONGSWAN)?;
    let binary = if args.static_keys {
        build(&["-p", "swanherd-kernel", "--example", "tun_static"])?
    } else if let Some(path) = std::env::var_os("SWANHERD_BIN") {
        path.into()
    } else {
        build(&["-p", "swanherd", "--bin", "swanherd"])?
    };
    // The laboratory panics where a test would fail; it is taken down while that unwinds.
    catch_unwind(AssertUnwindSafe(|| compare(args, &binary)))
        .unwrap_or_else(|_| Err("the laboratory failed".into()))
}

fn build(what: &[&str]) -> Result<PathBuf, Error> {
    eprintln!("building {} (profile release)", what[what.len() - 1]);
    let mut build = cargo(["build", "--release"]);
    build.args(what);
    build.args(["--message-format", "json-render-diagnostics"]);
    let (_, path) = executables(&quiet(build)?)
        .into_iter()
        .next_back()
        .ok_or("cargo built no executable")?;
    Ok(path)
}

fn compare(args: &Args, binary: &Path) -> Result<u8, Error> {
    eprintln!("starting the gateways");
    let ours = if args.static_keys {
        Bed::with_fixed_keys(binary, args.suite)?
    } else {
        Bed::with_daemons(Daemon::Swanherd, Some(binary), args.suite)?
    };
    let charon = Bed::with_daemons(Daemon::Charon, None, args.suite)?;
    let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
    for pair in 1..=args.pairs {
        for (bed, runs) in [&ours, &charon].into_iter().zip(&mut runs) {
            if stopping() {
                eprintln!("stopped");
                return Ok(130);
            }
            let run = bed.stream(args.seconds)?;
            eprintln!(
                "{pair:2} {:8} {:7.0} Mbit/s  {:5.2} + {:5.2} ns/octet  {:6} retransmits",
                bed.name, run.mbit, run.send_ns_per_byte, run.receive_ns_per_byte, run.retransmits
            );
            runs.push(run);
        }
    }
    let [our_runs, charon_runs] = runs;
    let ratios = |of: fn(&Run) -> f64| {
        let each = our_runs.iter().zip(&charon_runs);
        median(each.map(|(a, b)| of(a) / of(b)).collect())
    };
    let (throughput_ratio, cpu_ratio) = (ratios(|run| run.mbit), ratios(Run::cpu));
    let mut figures = Vec::new();
    for (bed, runs) in [(&ours, our_runs), (&charon, charon_runs)] {
        let flood = match args.flood {
            0 => None,
            seconds => Some(bed.flood(seconds)?),
        };
        figures.push(Figures {
            runs,
            flood,
            peak_memory_kb: bed.pids.map(peak_memory).into_iter().max().unwrap_or(0),
        });
    }
    let (Some(charon), Some(ours)) = (figures.pop(), figures.pop()) else {
        return Err("there are two sets of figures".into());
    };
    let report = Report {
        suite: args.suite.scenario().esp.to_owned(),
        seconds: args.seconds,
        ours,
        charon,
        throughput_ratio,
        cpu_ratio,
        passed: throughput_ratio >= LEAST_THROUGHPUT && cpu_ratio <= MOST_CPU,
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(u8::from(!report.passed))
}

fn print(report: &Report) {
    println!(
        "\nOne TCP stream, {}, {} s a run; median [least .. most] of {} runs each, in turn\n",
        report.suite,
        report.seconds,
        report.ours.runs.len()
    );
    println!(
        "{:24} {:>26} {:>26}",
        "", "swanherd", "charon (kernel-libipsec)"
    );
    let row = |name: &str, of: fn(&Run) -> f64, digits: usize| {
        let cell = |figures: &Figures| {
            let values: Vec<f64> = figures.runs.iter().map(of).collect();
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            format!(
                "{:.digits$} [{least:.digits$} .. {most:.digits$}]",
                median(values)
            )
        };
        println!(
            "{name:24} {:>26} {:>26}",
            cell(&report.ours),
            cell(&report.charon)
        );
    };
    row("Mbit/s", |run| run.mbit, 0);
    row("sender ns/octet", |run| run.send_ns_per_byte, 2);
    row("receiver ns/octet", |run| run.receive_ns_per_byte, 2);
    row("both ns/octet", Run::cpu, 2);
    row("retransmits", |run| run.retransmits as f64, 0);
    if let (Some(ours), Some(charon)) = (&report.ours.flood, &report.charon.flood) {
        let cells = |name: &str, a: String, b: String| println!("{name:24} {a:>26} {b:>26}");
        let pps = |flood: &Flood| {
            let kilo = |pps: f64| pps / 1000.0;
            format!(
                "{:.0} of {:.0}",
                kilo(flood.delivered_pps),
                kilo(flood.offered_pps)
            )
        };
        cells("flood, 64 octets, kpps", pps(ours), pps(charon));
        cells(
            "memory in flood, MB",
            format!("+{:.1}", ours.memory_growth_kb as f64 / 1024.0),
            format!("+{:.1}", charon.memory_growth_kb as f64 / 1024.0),
        );
    }
    let memory = |figures: &Figures| format!("{:.1}", figures.peak_memory_kb as f64 / 1024.0);
    println!(
        "{:24} {:>26} {:>26}",
        "peak memory, MB",
        memory(&report.ours),
        memory(&report.charon)
    );
    println!(
        "\nMedian of paired ratios: throughput {:.2} times charon's (at least {LEAST_THROUGHPUT}), \
         processor time per octet {:.3} of charon's (at most {MOST_CPU}): {}",
        report.throughput_ratio,
        report.cpu_ratio,
        if report.passed { "met" } else { "NOT met" }
    );
}

/// Two gateways of one kind and their namespaces.
struct Bed {
    name: &'static str,
    near: Namespace,
    far: Namespace,
    /// The sending and the receiving daemon.
    pids: [u32; 2],
    _gateways: Gateways,
}

/// What ends the gateways when dropped.
enum Gateways {
    Daemons { _pair: Box<Pair> },
    // Fields are dropped in order: the processes before their namespaces.
    Fixed { _processes: [Process; 2], _lab: Lab },
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Bed {
    fn with_daemons(daemon: Daemon, binary: Option<&Path>, suite: EspSuite) -> Result<Self, Error> {
        let pair = Scenario {
            left: daemon,
            right: daemon,
            auth: Auth::Psk,
            suite: suite.scenario(),
            binary: binary.map(Path::to_owned),
            ..Scenario::new(Plane::User)
        }
        .start();
        pair.left.initiate("c");
        let pids = [pair.left.pid(), pair.right.pid()];
        let [Some(near), Some(far)] = pids else {
            return Err("a daemon has ended".into());
        };
        Ok(Self {
            name: match daemon {
                Daemon::Swanherd => "swanherd",
                Daemon::Charon => "charon",
            },
            near: pair.left.namespace.clone(),
            far: pair.right.namespace.clone(),
            pids: [daemon_of(near), daemon_of(far)],
            _gateways: Gateways::Daemons {
                _pair: Box::new(pair),
            },
        })
    }

    fn with_fixed_keys(binary: &Path, suite: EspSuite) -> Result<Self, Error> {
        let mut lab = Lab::new();
        let (near, far) = (lab.namespace("near"), lab.namespace("far"));
        lab.link((&near, "u0", "192.0.2.1/24"), (&far, "u0", "192.0.2.2/24"));
        near.ip(&format!("addr add {NEAR}/32 dev lo"));
        far.ip(&format!("addr add {FAR}/32 dev lo"));
        let start = |namespace: &Namespace, side: &str, words: [&str; 4]| {
            let mut child = namespace
                .command(&binary.to_string_lossy())
                .arg(side)
                .args(words)
                .arg(suite.static_name())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let mut ready = String::new();
            if let Some(stdout) = child.stdout.take() {
                BufReader::new(stdout).read_line(&mut ready)?;
            }
            let child = Process(child);
            if ready.starts_with("ready") {
                Ok(child)
            } else {
                Err(Error::from("the plane does not start"))
            }
        };
        let networks = ("10.1.0.0/24", "10.2.0.0/24");
        let a = start(
            &near,
            "a",
            ["192.0.2.1", "192.0.2.2", networks.0, networks.1],
        )?;
        let b = start(
            &far,
            "b",
            ["192.0.2.2", "192.0.2.1", networks.1, networks.0],
        )?;
        Ok(Self {
            name: "swanherd",
            near,
            far,
            pids: [daemon_of(a.0.id()), daemon_of(b.0.id())],
            _gateways: Gateways::Fixed {
                _processes: [a, b],
                _lab: lab,
            },
        })
    }

    fn stream(&self, seconds: u16) -> Result<Run, Error> {
        let before = self.pids.map(cpu_ns);
        let report = self.iperf(&["-t", &seconds.to_string()])?;
        let after = self.pids.map(cpu_ns);
        let end = &report["end"];
        let figure = |side: &str, name: &str| end[side][name].as_f64().unwrap_or(0.0);
        let octets = figure("sum_received", "bytes");
        if octets == 0.0 {
            return Err(format!("{}: iperf3 carried nothing: {report}", self.name).into());
        }
        let per_octet = |index: usize| (after[index] - before[index]) as f64 / octets;
        Ok(Run {
            mbit: figure("sum_received", "bits_per_second") / 1e6,
            send_ns_per_byte: per_octet(0),
            receive_ns_per_byte: per_octet(1),
            retransmits: end["sum_sent"]["retransmits"].as_u64().unwrap_or(0),
        })
    }

    fn flood(&self, seconds: u16) -> Result<Flood, Error> {
        let before = peak_memory(self.pids[0]);
        let report = self.iperf(&["-u", "-b", "0", "-l", "64", "-t", &seconds.to_string()])?;
        let sum = &report["end"]["sum"];
        let figure = |name: &str| sum[name].as_f64().unwrap_or(0.0);
        let offered_pps = figure("packets") / f64::from(seconds);
        Ok(Flood {
            offered_pps,
            delivered_pps: offered_pps * (1.0 - figure("lost_percent") / 100.0),
            memory_growth_kb: peak_memory(self.pids[0]).saturating_sub(before),
        })
    }

    fn iperf(&self, args: &[&str]) -> Result<serde_json::Value, Error> {
        let mut server = self.far.command("iperf3");
        server.args(["-s", "-1", "-B", FAR]);
        let _server = Process(spawn_silently(&mut server)?);
        std::thread::sleep(Duration::from_millis(300));
        let mut client = vec!["-J", "-c", FAR, "-B", NEAR];
        client.extend(args);
        let output = self.near.run("iperf3", client);
        Ok(serde_json::from_str(&output.expect_ok())?)
    }
}

fn spawn_silently(command: &mut Command) -> Result<Child, Error> {
    Ok(command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?)
}

/// The process that does the work: `ip netns exec` and what follows it become it by exec, but a
/// shell may stand in between.
fn daemon_of(pid: u32) -> u32 {
    let children = format!("/proc/{pid}/task/{pid}/children");
    fs::read_to_string(children)
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .map_or(pid, daemon_of)
}

/// Processor time of a process so far, user and system.
fn cpu_ns(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold spaces; utime and stime are fields 14 and 15.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    ticks * 1_000_000_000 / rustix::param::clock_ticks_per_second()
}

/// Peak of a process's resident memory in KiB.
fn peak_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|value| value.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else if middle == 0 {
        0.0
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}
