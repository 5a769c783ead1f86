// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cargo xtask demo`: a gateway with many tunnels, in namespaces, and traffic through each.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use serde::Serialize;
use swanherd_tests::{Daemon, Message, Plane, Star, StarPlan, Vici};

use crate::groups::executables;
use crate::shell::{Error, cargo, is_root, stopping};
use crate::traffic::Flow;
use crate::{packages, shell};

/// `cargo xtask demo`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// How many tunnels
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=1000))]
    tunnels: u16,
    /// How long traffic flows
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// Mbit/s offered in each direction of each tunnel; 0 is as fast as it goes
    #[arg(long, default_value_t = 10)]
    mbit: u32,
    /// The result as JSON on standard output
    #[arg(long)]
    json: bool,
    /// Keep everything up until Ctrl-C, and say how to look at it
    #[arg(long)]
    hold: bool,
    /// Who encrypts
    #[arg(long, value_enum, default_value_t = DataPlane::Auto)]
    dataplane: DataPlane,
    /// Cargo profile of the daemon: `release` takes longer to build and carries more
    #[arg(long, default_value = "dev")]
    profile: String,
    /// Run strongSwan's charon as the gateway and as the responders instead
    #[arg(long)]
    charon: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DataPlane {
    /// The kernel if it has ESP, else the daemon
    Auto,
    /// The kernel
    Xfrm,
    /// The daemon
    Tun,
}

#[derive(Debug, Serialize)]
struct Summary {
    tunnels: usize,
    up: usize,
    dataplane: String,
    per_tunnel: Vec<Tunnel>,
}

#[derive(Clone, Debug, Serialize)]
struct Tunnel {
    name: String,
    state: String,
    bytes_in: u64,
    bytes_out: u64,
    #[serde(skip)]
    suite: String,
}

/// Runs the demonstration; 0 only when every tunnel is up and has carried traffic both ways.
pub(crate) fn demo(args: &Args) -> Result<u8, Error> {
    if !is_root() {
        return Err(
            "namespaces need root: try `sudo -E env PATH=\"$PATH\" cargo xtask demo`".into(),
        );
    }
    packages::install(packages::NETWORK)?;
    if args.charon {
        packages::install(packages::STRONGSWAN)?;
    } else {
        build(&args.profile)?;
    }
    // The laboratory panics where a test would fail; it is taken down while that unwinds.
    catch_unwind(AssertUnwindSafe(|| show(args)))
        .unwrap_or_else(|_| Err("the laboratory failed".into()))
}

fn build(profile: &str) -> Result<(), Error> {
    if std::env::var_os("SWANHERD_BIN").is_some() {
        return Ok(());
    }
    eprintln!("building the daemon (profile {profile})");
    let mut build = cargo([
        "build",
        "-p",
        "swanherd",
        "--bin",
        "swanherd",
        "--profile",
        profile,
    ]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let built: Vec<(String, PathBuf)> = executables(&shell::build(build)?);
    let (_, path) = built
        .into_iter()
        .next_back()
        .ok_or("cargo built no daemon")?;
    DAEMON.get_or_init(|| path);
    Ok(())
}

static DAEMON: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

fn show(args: &Args) -> Result<u8, Error> {
    let begun = Instant::now();
    let mut stage = Stage::set(args);
    let carried = stage.run(args, begun)?;
    let Some(carried) = carried else {
        eprintln!("stopped");
        return Ok(130);
    };
    let tunnels = stage.tunnels()?;
    let up = tunnels.iter().filter(|t| t.state == "INSTALLED").count();
    let both_ways = tunnels
        .iter()
        .zip(&carried)
        .filter(|(t, (there, back))| t.bytes_in > 0 && t.bytes_out > 0 && *there > 0 && *back > 0)
        .count();
    let total = usize::from(args.tunnels);
    let summary = Summary {
        tunnels: total,
        up,
        dataplane: stage.data_plane(),
        per_tunnel: tunnels,
    };
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
    } else {
        println!(
            "{up} of {total} tunnels are up, {both_ways} carried traffic both ways; data plane: {}",
            summary.dataplane
        );
    }
    if args.hold {
        stage.hold();
    }
    Ok(u8::from(up != total || both_ways != total))
}

struct Stage(Star);

impl Stage {
    fn set(args: &Args) -> Self {
        eprintln!(
            "making {} namespaces, starting as many daemons",
            args.tunnels + 1
        );
        let daemon = if args.charon {
            Daemon::Charon
        } else {
            Daemon::Swanherd
        };
        let plane = match args.dataplane {
            DataPlane::Auto => Plane::Auto,
            DataPlane::Xfrm => Plane::Kernel,
            DataPlane::Tun => Plane::User,
        };
        let mut star = Star::start(&StarPlan {
            gateway: daemon,
            responders: daemon,
            binary: DAEMON.get().map(PathBuf::as_path),
            ..StarPlan::new(plane, args.tunnels)
        });
        star.start_gateway();
        Self(star)
    }

    /// Waits for the tunnels, then sends; the octets that arrived (there, back) for each tunnel.
    fn run(&mut self, args: &Args, begun: Instant) -> Result<Option<Vec<(u64, u64)>>, Error> {
        let total = self.0.names.len();
        let limit = Duration::from_secs(30 + u64::from(args.tunnels));
        loop {
            let up = self
                .tunnels()?
                .iter()
                .filter(|t| t.state == "INSTALLED")
                .count();
            if up == total {
                eprintln!(
                    "{up} tunnels are up, {:.1} s after the start",
                    begun.elapsed().as_secs_f32()
                );
                break;
            }
            if stopping() {
                return Ok(None);
            }
            if begun.elapsed() > limit {
                eprintln!(
                    "only {up} of {total} tunnels came up\n{}",
                    self.0.gateway.log()
                );
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let flows: Vec<Option<Flow>> = self
            .0
            .responders
            .iter()
            .enumerate()
            .map(|(index, responder)| {
                let from = (&self.0.gateway.namespace, self.0.near());
                let to = (&responder.namespace, self.0.far(index));
                Flow::start(from, to, args.mbit)
                    .inspect_err(|e| eprintln!("{}: no traffic: {e}", self.0.names[index]))
                    .ok()
            })
            .collect();
        let ends = Instant::now() + Duration::from_secs(args.seconds.into());
        let mut before = (Instant::now(), self.tunnels()?);
        while !stopping() && Instant::now() < ends {
            let nap = ends
                .saturating_duration_since(Instant::now())
                .min(Duration::from_secs(1));
            std::thread::sleep(nap);
            let now = (Instant::now(), self.tunnels()?);
            report(&before, &now, args.json);
            before = now;
        }
        let carried = flows
            .into_iter()
            .map(|flow| flow.map_or((0, 0), Flow::finish))
            .collect();
        Ok((!stopping()).then_some(carried))
    }

    /// The tunnels as the gateway lists them, in the order of their names.
    fn tunnels(&self) -> Result<Vec<Tunnel>, Error> {
        let sas = Vici::connect(&self.0.gateway.socket())?.list_sas()?;
        Ok(self
            .0
            .names
            .iter()
            .map(|name| {
                let ike: Vec<&Message> = sas
                    .iter()
                    .filter(|(n, _)| n == name)
                    .map(|(_, sa)| sa)
                    .collect();
                let children = ike.iter().flat_map(|sa| sa.sections("child-sas"));
                let child = children
                    .map(|(_, c)| c)
                    .max_by_key(|c| c.text("state") == "INSTALLED");
                let state = child
                    .or_else(|| ike.first().copied())
                    .map_or("DOWN", |sa| sa.text("state"));
                Tunnel {
                    name: name.clone(),
                    state: state.to_owned(),
                    bytes_in: child.map_or(0, |c| c.number("bytes-in")),
                    bytes_out: child.map_or(0, |c| c.number("bytes-out")),
                    suite: suite(ike.first().copied(), child),
                }
            })
            .collect())
    }

    fn data_plane(&self) -> String {
        if self.0.gateway.daemon == Daemon::Charon {
            return "charon's".into();
        }
        let output = self.0.gateway.swanherd(&["status", "--json"]);
        serde_json::from_str::<serde_json::Value>(&output.stdout)
            .ok()
            .and_then(|status| Some(status.get("dataplane")?.as_str()?.to_owned()))
            .unwrap_or_else(|| "unknown".into())
    }

    fn hold(&self) {
        let name = self.0.gateway.namespace.name();
        let directory = self.0.gateway.swanctl_dir();
        let folder = directory.parent().unwrap_or(&directory).display();
        let vici = format!("unix://{}", self.0.gateway.socket().display());
        let mut text = format!(
            "\nEverything stays up until Ctrl-C. Look at it from another terminal:\n\n  \
             swanctl --list-sas --uri {vici}\n  swanctl --log --uri {vici}\n  ip netns exec {name} ip addr\n"
        );
        if self.0.gateway.daemon == Daemon::Swanherd {
            let daemon = self.0.gateway.binary();
            let daemon = daemon.display();
            let _ = write!(
                text,
                "  {daemon} status --uri {vici}\n  {daemon} down {first} --uri {vici}\n  \
                 {daemon} up {first} --uri {vici}\n",
                first = self.0.names[0],
            );
        }
        let _ = write!(
            text,
            "  ip netns exec {name} ping -I {} {}\n  less {folder}/swanctl/swanctl.conf\n  \
             tail -f {folder}/log\n",
            self.0.near(),
            self.0.far(0)
        );
        eprintln!("{text}");
        while !stopping() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn suite(ike: Option<&Message>, child: Option<&Message>) -> String {
    let words = |sa: Option<&Message>, keys: &[&str]| {
        let words = keys
            .iter()
            .filter_map(|key| Some(sa?.text(key)).filter(|word| !word.is_empty()));
        words.collect::<Vec<_>>().join("-")
    };
    let exchange = words(ike, &["dh-group"]);
    format!(
        "{} {exchange}",
        words(child, &["encr-alg", "encr-keysize", "integ-alg"])
    )
}

type Sample = (Instant, Vec<Tunnel>);

/// The live table; one line of totals where nobody looks at a terminal.
fn report(before: &Sample, now: &Sample, json: bool) {
    let seconds = (now.0 - before.0).as_secs_f64();
    let rate = |old: u64, new: u64| new.saturating_sub(old) as f64 * 8e-6 / seconds;
    let up = now.1.iter().filter(|t| t.state == "INSTALLED").count();
    let mut table = String::new();
    let (mut sum_in, mut sum_out) = (0.0, 0.0);
    for (old, new) in before.1.iter().zip(&now.1) {
        let (rate_in, rate_out) = (
            rate(old.bytes_in, new.bytes_in),
            rate(old.bytes_out, new.bytes_out),
        );
        sum_in += rate_in;
        sum_out += rate_out;
        let _ = writeln!(
            table,
            "{:<12} {:<10} {:<30} {rate_in:>9.1} {rate_out:>9.1}",
            new.name, new.state, new.suite
        );
    }
    let totals = format!(
        "{up} of {} up {:>36} {sum_in:>9.1} {sum_out:>9.1}",
        now.1.len(),
        "Mbit/s in all, in and out:"
    );
    if std::io::stderr().is_terminal() && !json {
        eprintln!(
            "\x1b[H\x1b[2J{:<12} {:<10} {:<30} {:>9} {:>9}\n{table}{totals}",
            "tunnel", "state", "suite", "Mbit/s in", "out"
        );
    } else {
        eprintln!("{totals}");
    }
}
