// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cargo xtask bench kernel`: the time to install, list and remove many CHILD SAs in the kernel,
//! ours and charon's (kernel-netlink) in turn, under User-mode Linux.
//!
//! One IKE SA with as many children as asked for, from the same definitions for both, to the same
//! peer (charon). The kernel's part is the processor time that a daemon spends in system calls on
//! netlink sockets, since the kernel serves a request within them; a small library that is
//! preloaded counts it, the same for both. The plane alone, without IKE, is measured beside it.

use std::fmt::Write as _;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Parser;
use serde::Serialize;
use swanherd_tests::{Daemon, Lab, Message, Node, Pair, Plane, Scenario};

use crate::groups::executables;
use crate::shell::{Error, cache, cargo, is_root, quiet, stopping, workspace};
use crate::{lab, packages};

/// `cargo xtask bench kernel`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Pairs of runs: one of ours and one of charon's each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pairs: u16,
    /// Children
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    children: u16,
    /// The result as JSON on standard output
    #[arg(long)]
    json: bool,
    /// In the guest
    #[arg(long, hide = true)]
    here: bool,
}

/// One step of one run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Step {
    wall_ms: f64,
    /// Processor time of the daemon, the kernel's for it included.
    cpu_ms: f64,
    /// What of it the kernel took for netlink requests.
    kernel_ms: f64,
    /// System calls on netlink sockets.
    calls: f64,
}

/// What one daemon did.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Run {
    install: Step,
    list: Step,
    remove: Step,
}

/// A way to look at a run.
type Figure = (&'static str, fn(&Run) -> f64);

const FIGURES: [Figure; 12] = [
    ("install, wall ms", |run| run.install.wall_ms),
    ("  processor ms", |run| run.install.cpu_ms),
    ("  of it kernel", |run| run.install.kernel_ms),
    ("  netlink calls", |run| run.install.calls),
    ("list, wall ms", |run| run.list.wall_ms),
    ("  processor ms", |run| run.list.cpu_ms),
    ("  of it kernel", |run| run.list.kernel_ms),
    ("  netlink calls", |run| run.list.calls),
    ("remove, wall ms", |run| run.remove.wall_ms),
    ("  processor ms", |run| run.remove.cpu_ms),
    ("  of it kernel", |run| run.remove.kernel_ms),
    ("  netlink calls", |run| run.remove.calls),
];

#[derive(Debug, Serialize)]
struct Report {
    children: u16,
    ours: Vec<Run>,
    charon: Vec<Run>,
    /// Our plane without IKE; what the kernel takes is not counted there.
    plane: Vec<Run>,
}

/// Runs the comparison: outside, builds and starts the guest; inside, measures.
pub(crate) fn bench(args: &Args) -> Result<u8, Error> {
    if !is_root() {
        return Err("namespaces need root".into());
    }
    packages::install(packages::STRONGSWAN)?;
    let program = |variable: &str, what: &[&str]| match std::env::var_os(variable) {
        Some(path) => Ok(PathBuf::from(path)),
        None => build(what),
    };
    let daemon = program("SWANHERD_BIN", &["-p", "swanherd", "--bin", "swanherd"])?;
    let plane = program(
        "SWANHERD_XFRM_BENCH",
        &["-p", "swanherd-kernel", "--example", "xfrm_bench"],
    )?;
    if args.here {
        // The laboratory panics where a test would fail; it is taken down while that unwinds.
        return catch_unwind(AssertUnwindSafe(|| compare(args, &daemon, &plane)))
            .unwrap_or_else(|_| Err("the laboratory failed".into()));
    }
    let library = build_library()?;
    let mut guest = lab::uml(1024, 3600)?;
    guest
        .env("SWANHERD_BIN", daemon)
        .env("SWANHERD_XFRM_BENCH", plane)
        .arg("env")
        .arg(format!("LD_PRELOAD={}", library.display()))
        .arg(format!("NETLINK_TIME={COUNTERS}"))
        .arg("NETLINK_TIME_OF=swanherd charon")
        .arg(std::env::current_exe()?)
        .args(["bench", "kernel", "--here"])
        .args(["--pairs", &args.pairs.to_string()])
        .args(["--children", &args.children.to_string()]);
    if args.json {
        guest.arg("--json");
    }
    let status = guest.status()?;
    Ok(u8::from(!status.success()))
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

/// Builds the library that counts time on netlink sockets.
fn build_library() -> Result<PathBuf, Error> {
    packages::install(packages::COMPILERS)?;
    let library = cache()?.join("netlink-time.so");
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-O2", "-o"])
        .arg(&library)
        .arg(workspace().join("xtask/lab/netlink-time.c"))
        .arg("-ldl");
    quiet(compiler)?;
    Ok(library)
}

fn compare(args: &Args, binary: &Path, plane: &Path) -> Result<u8, Error> {
    let mut report = Report {
        children: args.children,
        ours: Vec::new(),
        charon: Vec::new(),
        plane: Vec::new(),
    };
    for pair in 1..=args.pairs {
        // Who comes first changes from pair to pair.
        let mut turns = [Daemon::Swanherd, Daemon::Charon];
        if pair % 2 == 0 {
            turns.reverse();
        }
        for daemon in turns {
            if stopping() {
                return Ok(130);
            }
            let run = with_daemon(daemon, binary, args.children)?;
            show(pair, &format!("{daemon:?}"), &run);
            match daemon {
                Daemon::Swanherd => report.ours.push(run),
                Daemon::Charon => report.charon.push(run),
            }
        }
        let run = with_plane_alone(plane, args.children)?;
        show(pair, "plane", &run);
        report.plane.push(run);
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    Ok(0)
}

fn show(pair: u16, who: &str, run: &Run) {
    let step = |step: &Step| {
        format!(
            "{:.0} ({:.0}, {:.0})",
            step.wall_ms, step.cpu_ms, step.kernel_ms
        )
    };
    eprintln!(
        "{pair:2} {who:9} install {}  list {}  remove {} ms",
        step(&run.install),
        step(&run.list),
        step(&run.remove)
    );
}

fn print(report: &Report) {
    println!(
        "\n{} CHILD SAs of one IKE SA; median [least .. most] of {} runs each, in turn, and the \
         median of each pair's ratio\n",
        report.children,
        report.ours.len()
    );
    println!(
        "{:28} {:>24} {:>24} {:>7} {:>24}",
        "", "swanherd", "charon", "ratio", "plane alone"
    );
    for (name, of) in FIGURES {
        let cell = |runs: &[Run]| {
            let values: Vec<f64> = runs.iter().map(of).collect();
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(0.0, f64::max);
            format!("{:.0} [{least:.0} .. {most:.0}]", median(values))
        };
        let ratios = report.ours.iter().zip(&report.charon);
        let ratio = median(ratios.map(|(a, b)| of(a) / of(b).max(1e-3)).collect());
        println!(
            "{name:28} {:>24} {:>24} {ratio:>7.2} {:>24}",
            cell(&report.ours),
            cell(&report.charon),
            if name.starts_with("  of it") || name.starts_with("  netlink") {
                String::new()
            } else {
                cell(&report.plane)
            }
        );
    }
}

/// Installs, lists and removes the children of one IKE SA with a daemon.
fn with_daemon(daemon: Daemon, binary: &Path, children: u16) -> Result<Run, Error> {
    let pair = Scenario {
        left: daemon,
        right: Daemon::Charon,
        binary: Some(binary.to_owned()),
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    for (node, own, other) in [(&pair.left, "1", "2"), (&pair.right, "2", "1")] {
        node.configure(&definitions(own, other, children));
        node.load();
    }
    let left = &pair.left;
    let mut vici = left.vici();

    let clock = Clock::start(left)?;
    for child in 0..children {
        let name = format!("c{child}");
        let initiate = Message::new(&[("ike", "t"), ("child", &name), ("timeout", "15000")]);
        let answer = vici.request("initiate", &initiate)?;
        if answer.text("success") != "yes" {
            let error = answer.text("errmsg");
            return Err(format!("{name}: {error}\n{}", left.log()).into());
        }
    }
    let install = clock.stop(left)?;
    let (states, policies) = in_kernel(&pair);
    let wanted = usize::from(children);
    if (states, policies) != (2 * wanted, 3 * wanted) {
        return Err(format!("{states} states and {policies} policies").into());
    }

    let clock = Clock::start(left)?;
    let sas = vici.list_sas()?;
    let list = clock.stop(left)?;
    let listed: usize = sas
        .iter()
        .map(|(_, ike)| ike.sections("child-sas").len())
        .sum();
    if listed != usize::from(children) {
        return Err(format!("{listed} children are listed").into());
    }

    let clock = Clock::start(left)?;
    let terminate = Message::new(&[("ike", "t"), ("timeout", "60000")]);
    let answer = vici.request("terminate", &terminate)?;
    if answer.text("success") != "yes" {
        return Err(answer.text("errmsg").into());
    }
    while in_kernel(&pair) != (0, 0) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let remove = clock.stop(left)?;
    Ok(Run {
        install,
        list,
        remove,
    })
}

/// How many states and policies there are, without those of sockets.
fn in_kernel(pair: &Pair) -> (usize, usize) {
    let numbers = |what: &str| -> Vec<usize> {
        let text = pair.left.namespace.ip(&format!("xfrm {what} count"));
        text.split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect()
    };
    // `SAD count N`; `SPD IN N OUT N FWD N` and then what sockets have.
    let states = numbers("state").first().copied().unwrap_or(0);
    let policies = numbers("policy").iter().take(3).sum();
    (states, policies)
}

/// Runs the plane without IKE in a namespace of its own.
fn with_plane_alone(program: &Path, children: u16) -> Result<Run, Error> {
    let mut lab = Lab::new();
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.link((&near, "u0", "192.0.2.1/24"), (&far, "u0", "192.0.2.2/24"));
    near.ip("addr add 10.1.0.1/32 dev lo");
    let ledger = lab.dir().join("ledger");
    let mut command: Command = near.command(&program.to_string_lossy());
    command
        .args([&children.to_string(), "192.0.2.1", "192.0.2.2"])
        .arg(ledger);
    let text = quiet(command)?;
    let figures: Vec<f64> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [install, install_cpu, list, list_cpu, remove, remove_cpu] = figures[..] else {
        return Err(format!("the plane says {text}").into());
    };
    let step = |wall_ms, cpu_ms| Step {
        wall_ms,
        cpu_ms,
        ..Step::default()
    };
    Ok(Run {
        install: step(install, install_cpu),
        list: step(list, list_cpu),
        remove: step(remove, remove_cpu),
    })
}

/// Where the counters of processes are, in the guest's memory.
const COUNTERS: &str = "/tmp/netlink-time";

/// A moment, and what a daemon had used by then.
struct Clock(Instant, Used);

/// What a daemon has used since it began.
#[derive(Clone, Copy)]
struct Used {
    ticks: u64,
    calls: u64,
    nanoseconds: u64,
}

impl Clock {
    fn start(node: &Node) -> Result<Self, Error> {
        let used = Used::by(node)?;
        Ok(Self(Instant::now(), used))
    }

    fn stop(self, node: &Node) -> Result<Step, Error> {
        let wall = self.0.elapsed();
        let (before, after) = (self.1, Used::by(node)?);
        let ticks_per_ms = rustix::param::clock_ticks_per_second() as f64 / 1e3;
        let more = |of: fn(&Used) -> u64| of(&after).saturating_sub(of(&before)) as f64;
        Ok(Step {
            wall_ms: wall.as_secs_f64() * 1e3,
            cpu_ms: more(|used| used.ticks) / ticks_per_ms,
            kernel_ms: more(|used| used.nanoseconds) / 1e6,
            calls: more(|used| used.calls),
        })
    }
}

impl Used {
    fn by(node: &Node) -> Result<Self, Error> {
        let pid = node.pid().ok_or("the daemon has ended")?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name in parentheses may hold spaces; utime and stime are fields 14 and 15. In the
        // guest they are not told apart.
        let times = stat.rsplit(')').next().unwrap_or_default();
        let ticks = times
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        let counters = fs::read(format!("{COUNTERS}.{pid}"))?;
        let counter = |index: usize| {
            let bytes = counters.get(index * 8..index * 8 + 8)?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        let (Some(calls), Some(nanoseconds)) = (counter(0), counter(1)) else {
            return Err("the counters of netlink calls are missing".into());
        };
        Ok(Self {
            ticks,
            calls,
            nanoseconds,
        })
    }
}

/// One connection with children `c0`, `c1`, ...: 10.1.0.0/24 to 10.2.0.0/24, 10.2.1.0/24, ...
fn definitions(own: &str, other: &str, count: u16) -> String {
    let mut children = String::new();
    for child in 0..count {
        let remote = format!("10.{}.{}.0/24", child / 250 + 2, child % 250);
        let near = "10.1.0.0/24";
        let (local, remote) = match own {
            "1" => (near, remote.as_str()),
            _ => (remote.as_str(), near),
        };
        let _ = writeln!(
            children,
            "      c{child} {{\n        local_ts = {local}\n        remote_ts = {remote}\n        \
             esp_proposals = aes128gcm16\n      }}"
        );
    }
    format!(
        "connections {{
  t {{
    version = 2
    local_addrs = 192.0.2.{own}
    remote_addrs = 192.0.2.{other}
    proposals = aes128gcm16-prfsha256-x25519
    local {{
      auth = psk
      id = gw{own}.example.org
    }}
    remote {{
      auth = psk
      id = gw{other}.example.org
    }}
    children {{
{children}    }}
  }}
}}
secrets {{
  ike-1 {{
    id-1 = gw1.example.org
    id-2 = gw2.example.org
    secret = \"a secret for the laboratory\"
  }}
}}
"
    )
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ if middle == 0 => 0.0,
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}
