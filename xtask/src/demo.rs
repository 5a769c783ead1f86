// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cargo xtask demo`: a gateway with many tunnels, in namespaces.
//!
//! ```text
//!                     hub (bridge)
//!   gateway --- g --- |          | --- r1 --- responder 1: 10.101.0.0/24
//!   10.100.0.1        |          | --- r2 --- responder 2: 10.101.1.0/24 ...
//! ```

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::net::Ipv4Addr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use serde::Serialize;
use swanherd_tests::{Daemon, Lab, Message, Namespace, Node, Plane, Vici};

use crate::groups::executables;
use crate::packages;
use crate::shell::{Error, cargo, is_root, quiet, stopping};
use crate::traffic::Flow;

const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const GATEWAY_INNER: Ipv4Addr = Ipv4Addr::new(10, 100, 0, 1);

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
    /// Cargo profile of the daemon
    #[arg(long, default_value = "release")]
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
    let built: Vec<(String, PathBuf)> = executables(&quiet(build)?);
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

/// Namespaces and daemons. Fields are dropped in order: daemons end before their namespaces.
struct Stage {
    gateway: Node,
    responders: Vec<Node>,
    names: Vec<String>,
    _lab: Lab,
}

impl Stage {
    fn set(args: &Args) -> Self {
        let count = args.tunnels;
        eprintln!("making {} namespaces", count + 2);
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
        let mut lab = Lab::new();
        let hub = lab.namespace("hub");
        hub.ip("link add hub type bridge");
        hub.ip("link set hub up");
        let gateway = join(&mut lab, &hub, "gateway", "g", GATEWAY, GATEWAY_INNER);
        let mut gateway = Node::new(&lab, &gateway, daemon, plane, "");
        let names: Vec<String> = (1..=count).map(|i| format!("branch-{i:02}")).collect();
        let mut definitions = (String::from("connections {\n"), String::from("secrets {\n"));
        let mut responders = Vec::new();
        for (index, name) in (0..count).zip(&names) {
            let namespace = join(
                &mut lab,
                &hub,
                name,
                &format!("r{index}"),
                outer(index),
                inner(index),
            );
            let node = Node::new(&lab, &namespace, daemon, plane, "");
            node.configure(&format!(
                "connections {{\n{}}}\nsecrets {{\n{}}}\n",
                connection(name, index, false),
                secret(name)
            ));
            definitions.0 += &connection(name, index, true);
            definitions.1 += &secret(name);
            responders.push(node);
        }
        gateway.configure(&format!("{}}}\n{}}}\n", definitions.0, definitions.1));
        eprintln!("starting {} daemons", count + 1);
        for node in &mut responders {
            start(node);
        }
        for node in &mut responders {
            node.await_ready();
            if args.charon {
                node.load();
            }
        }
        start(&mut gateway);
        gateway.await_ready();
        if args.charon {
            gateway.load();
        }
        Self {
            gateway,
            responders,
            names,
            _lab: lab,
        }
    }

    /// Waits for the tunnels, then sends; the octets that arrived (there, back) for each tunnel.
    fn run(&mut self, args: &Args, begun: Instant) -> Result<Option<Vec<(u64, u64)>>, Error> {
        let total = self.names.len();
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
                    self.gateway.log()
                );
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let flows: Vec<Option<Flow>> = self
            .responders
            .iter()
            .zip(0..)
            .map(|(responder, index)| {
                let from = (&self.gateway.namespace, GATEWAY_INNER);
                let to = (&responder.namespace, inner(index));
                Flow::start(from, to, args.mbit)
                    .inspect_err(|e| {
                        eprintln!("{}: no traffic: {e}", self.names[usize::from(index)])
                    })
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
        let sas = Vici::connect(&self.gateway.socket())?.list_sas()?;
        Ok(self
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
                    .or(ike.first().copied())
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
        if self.gateway.daemon == Daemon::Charon {
            return "charon's".into();
        }
        let output = self.gateway.swanherd(&["status", "--json"]);
        serde_json::from_str::<serde_json::Value>(&output.stdout)
            .ok()
            .and_then(|status| Some(status.get("dataplane")?.as_str()?.to_owned()))
            .unwrap_or_else(|| "unknown".into())
    }

    fn hold(&self) {
        let name = self.gateway.namespace.name();
        let directory = self.gateway.swanctl_dir();
        let folder = directory.parent().unwrap_or(&directory).display();
        let vici = format!("unix://{}", self.gateway.socket().display());
        let mut text = format!(
            "\nEverything stays up until Ctrl-C. Look at it from another terminal:\n\n  \
             swanctl --list-sas --uri {vici}\n  swanctl --log --uri {vici}\n  ip netns exec {name} ip addr\n"
        );
        if self.gateway.daemon == Daemon::Swanherd {
            let daemon = self.gateway.binary();
            let daemon = daemon.display();
            let _ = write!(
                text,
                "  {daemon} status --uri {vici}\n  {daemon} down {first} --uri {vici}\n  \
                 {daemon} up {first} --uri {vici}\n",
                first = self.names[0],
            );
        }
        let _ = write!(
            text,
            "  ip netns exec {name} ping -I {GATEWAY_INNER} {}\n  less {folder}/swanctl/swanctl.conf\n  \
             tail -f {folder}/log\n",
            inner(0)
        );
        eprintln!("{text}");
        while !stopping() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn start(node: &mut Node) {
    if let Some(path) = DAEMON.get() {
        node.set_binary(path);
    }
    node.spawn();
}

fn join(
    lab: &mut Lab,
    hub: &Namespace,
    name: &str,
    dev: &str,
    outer: Ipv4Addr,
    inner: Ipv4Addr,
) -> Namespace {
    let namespace = lab.namespace(name);
    lab.link((&namespace, "u0", &format!("{outer}/16")), (hub, dev, ""));
    hub.ip(&format!("link set {dev} master hub"));
    namespace.ip(&format!("addr add {inner}/32 dev lo"));
    namespace
}

fn outer(index: u16) -> Ipv4Addr {
    let [high, low] = (index % 250 + 1 + index / 250 * 256).to_be_bytes();
    Ipv4Addr::new(198, 18, high + 1, low)
}

fn inner(index: u16) -> Ipv4Addr {
    let [high, low] = index.to_be_bytes();
    Ipv4Addr::new(10, 101 + high, low, 1)
}

fn connection(name: &str, index: u16, gateway: bool) -> String {
    let (outer, [a, b, c, _]) = (outer(index), inner(index).octets());
    let branch = (
        outer,
        format!("{name}.example.org"),
        format!("{a}.{b}.{c}.0/24"),
    );
    let hub = (
        GATEWAY,
        "gateway.example.org".to_owned(),
        "10.100.0.0/24".to_owned(),
    );
    let (own, other, action) = if gateway {
        (hub, branch, "start")
    } else {
        (branch, hub, "none")
    };
    format!(
        "  {name} {{
    version = 2
    local_addrs = {}
    remote_addrs = {}
    proposals = aes128gcm16-prfsha256-x25519
    local {{
      auth = psk
      id = {}
    }}
    remote {{
      auth = psk
      id = {}
    }}
    children {{
      net {{
        local_ts = {}
        remote_ts = {}
        esp_proposals = aes128gcm16-x25519
        start_action = {action}
      }}
    }}
  }}\n",
        own.0, other.0, own.1, other.1, own.2, other.2
    )
}

fn secret(name: &str) -> String {
    format!(
        "  ike-{name} {{
    id-1 = gateway.example.org
    id-2 = {name}.example.org
    secret = \"for the demonstration of {name}\"
  }}\n"
    )
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
