// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the policies of many CHILD SAs cost each packet: how long this host takes to send one, with
//! the plane's hash thresholds and with the kernel's own. Never for real traffic: the keys are
//! public.
//!
//! `unshare --net lookup_bench COUNT...`
//!
//! Prints a line for each count and choice of thresholds, in nanoseconds a packet, median of seven
//! runs [least .. most]: for packets that belong to no child, which no policy may match, and for
//! those of the child that was installed last, ESP included (`-` where the kernel has none).
//! Whatever is sent ends in a dummy device.

mod children;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::{Op, Outcome};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};

type Error = Box<dyn std::error::Error>;

const LOCAL: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const STRANGER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);
/// An address inside of this end's network.
const INSIDE: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

const RUNS: usize = 7;
const RUN: Duration = Duration::from_millis(100);
/// Packets between two looks at the clock.
const BATCH: u32 = 20;
/// So long after the last policy the thresholds have followed.
const SETTLED: Duration = Duration::from_millis(1500);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lookup_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let counts = std::env::args()
        .skip(1)
        .map(|count| count.parse())
        .collect::<Result<Vec<u32>, _>>()?;
    if counts.is_empty() {
        return Err("usage: unshare --net lookup_bench COUNT...".into());
    }
    make_network()?;
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    println!("Linux {}", release.trim());
    println!("children  thresholds  packets of no child          packets of the last child");
    for count in counts {
        for thresholds in [false, true] {
            let [none, last] = measure(count, thresholds).await?;
            let show =
                |time: Option<Spread>| time.map_or_else(|| "-".to_owned(), |time| time.to_string());
            let whose = if thresholds { "ours" } else { "kernel's" };
            println!("{count:8}  {whose:10}  {:27}  {}", show(none), show(last));
        }
    }
    Ok(())
}

/// A device that sends all it is given nowhere, in a namespace that has nothing yet.
fn make_network() -> Result<(), Error> {
    let up = Command::new("ip")
        .args(["-o", "link", "show", "up"])
        .output()?;
    let loopback = |line: &str| line.contains("LOOPBACK");
    if !String::from_utf8_lossy(&up.stdout).lines().all(loopback) {
        return Err("this namespace has a network: run under unshare --net".into());
    }
    for command in [
        "link set lo up".to_owned(),
        format!("addr add {INSIDE}/32 dev lo"),
        "link add nowhere type dummy".to_owned(),
        format!("addr add {LOCAL}/24 dev nowhere"),
        "link set nowhere up".to_owned(),
        format!("route add default via {PEER}"),
    ] {
        let status = Command::new("ip").args(command.split(' ')).status()?;
        if !status.success() {
            return Err(format!("ip {command} has failed").into());
        }
    }
    Ok(())
}

/// The cost of packets of no child, and of those of the last one.
async fn measure(count: u32, hash_thresholds: bool) -> Result<[Option<Spread>; 2], Error> {
    let (local, remote) = (IpAddr::from(LOCAL), IpAddr::from(PEER));
    let options = XfrmOptions {
        hash_thresholds,
        ..XfrmOptions::default()
    };
    let (plane, _events) = XfrmPlane::start(options).await?;
    for child in 0..count {
        plane
            .apply(children::policies(child, local, remote))
            .await?;
    }
    let mut last = None;
    if let Some(child) = count.checked_sub(1) {
        let reserve = Op::AllocSpi {
            src: remote,
            dst: local,
            reqid: child + 1,
        };
        let Outcome::Spi(spi) = plane.apply(reserve).await? else {
            return Err("no SPI in the answer".into());
        };
        let sas = Vec::from(children::sas(child, spi, local, remote));
        if plane.apply_all(sas).await.iter().all(Result::is_ok) {
            last = Some(children::network(child));
        }
    }
    tokio::time::sleep(SETTLED).await;
    let times = [
        Some(send(LOCAL, STRANGER)?),
        last.map(|network| send(INSIDE, Ipv4Addr::from_bits(network.to_bits() + 9)))
            .transpose()?,
    ];
    plane.shutdown().await;
    Ok(times)
}

/// Sends with one socket to one address.
fn send(from: Ipv4Addr, to: Ipv4Addr) -> Result<Spread, Error> {
    let socket = UdpSocket::bind((from, 0))?;
    let mut times = Vec::with_capacity(RUNS);
    // The first run fills caches, and does not count.
    for run in 0..=RUNS {
        let begun = Instant::now();
        let mut sent = 0;
        while begun.elapsed() < RUN {
            for _ in 0..BATCH {
                socket.send_to(&[0; 64], (to, 9))?;
            }
            sent += BATCH;
        }
        if run > 0 {
            times.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(sent));
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(Spread {
        median: times[RUNS / 2],
        least: times[0],
        most: times[RUNS - 1],
    })
}

/// Nanoseconds of several runs.
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.0} [{:.0} .. {:.0}]", self.median, self.least, self.most);
        f.pad(&text)
    }
}
