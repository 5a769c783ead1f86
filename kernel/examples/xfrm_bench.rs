// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XFRM plane alone: how long it takes to install, list and remove the SAs and policies of many
//! CHILD SAs, without IKE. Never for real traffic: the keys are public.
//!
//! `xfrm_bench COUNT LOCAL REMOTE LEDGER`
//!
//! Prints one line with milliseconds and this process's processor time for each step:
//! `install MS CPU_MS list MS CPU_MS remove MS CPU_MS`. The kernel's share is in the processor
//! time, since it serves a netlink request in the context of the process that sends it.

mod children;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use swanherd_ipsec::plane::{Op, Outcome, PlaneError, SaId};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};

type Error = Box<dyn std::error::Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xfrm_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [count, local, remote, ledger] = args.as_slice() else {
        return Err("usage: xfrm_bench COUNT LOCAL REMOTE LEDGER".into());
    };
    let (count, local, remote): (u32, IpAddr, IpAddr) =
        (count.parse()?, local.parse()?, remote.parse()?);
    let options = XfrmOptions {
        ledger: Some(PathBuf::from(ledger)),
        ..XfrmOptions::default()
    };
    let (plane, _events) = XfrmPlane::start(options).await?;

    let clock = Clock::start();
    let mut inbound = Vec::new();
    // What the daemon asks for: a reservation while it negotiates, then one batch for each child.
    for child in 0..count {
        let reserve = Op::AllocSpi {
            src: remote,
            dst: local,
            reqid: child + 1,
        };
        let Outcome::Spi(spi) = plane.apply(reserve).await? else {
            return Err("no SPI in the answer".into());
        };
        inbound.push(spi);
        let mut ops = Vec::from(children::sas(child, spi, local, remote));
        ops.push(children::policies(child, local, remote));
        expect_done(plane.apply_all(ops).await)?;
    }
    let installed = clock.stop()?;

    let clock = Clock::start();
    let listed = plane.counters().await?.len();
    let list = clock.stop()?;
    if listed != inbound.len() * 2 {
        return Err(format!("{listed} SAs are listed").into());
    }

    let clock = Clock::start();
    let removals = (0..count).zip(&inbound).flat_map(|(child, spi)| {
        [
            Op::RemovePolicies(child + 1),
            Op::RemoveSa(SaId {
                spi: *spi,
                dst: local,
            }),
            Op::RemoveSa(SaId {
                spi: children::outbound(child),
                dst: remote,
            }),
        ]
    });
    expect_done(plane.apply_all(removals.collect()).await)?;
    let removed = clock.stop()?;

    plane.shutdown().await;
    println!("install {installed} list {list} remove {removed}");
    Ok(())
}

fn expect_done(answers: Vec<Result<Outcome, PlaneError>>) -> Result<(), PlaneError> {
    answers.into_iter().try_for_each(|answer| answer.map(drop))
}

/// Time since a moment, on the wall and of this process.
struct Clock(Instant, Duration);

impl Clock {
    fn start() -> Self {
        Self(Instant::now(), processor_time())
    }

    fn stop(self) -> Result<String, Error> {
        let spent = processor_time()
            .checked_sub(self.1)
            .ok_or("the clock went backwards")?;
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(format!(
            "{:.3} {:.3}",
            millis(self.0.elapsed()),
            millis(spent)
        ))
    }
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let secs = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(secs, nanos)
}
