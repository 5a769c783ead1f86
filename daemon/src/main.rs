// SPDX-License-Identifier: Apache-2.0 OR MIT
//! swanherd: a VPN gateway daemon for Linux that takes the place of strongSwan's charon.
//!
//! [`run`] puts the daemon together; [`engine`] drives IKE; [`vici`] and [`metrics`] serve
//! operators; [`client`] and [`check`] are the other subcommands.

mod audits;
mod check;
mod cli;
mod client;
mod control;
mod credentials;
mod engine;
#[cfg(test)]
mod fake_plane;
mod fitting;
mod hub;
mod inspect;
mod installed;
mod loader;
mod logging;
mod metrics;
mod paths;
mod plane;
mod plane_task;
mod recording;
mod replay;
mod run;
mod shell;
mod tls;
mod totals;
mod updown;
mod vici;
mod workers;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    client::complete::answer_shell();
    let cli = cli::Cli::parse();
    if matches!(cli.command, cli::Command::UpdownHelper) {
        return updown::helper_main();
    }
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .clamp(1, 4);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            client::say(&format!("cannot start the runtime: {error}"));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        match cli.command {
            cli::Command::Run(args) => run::run(args).await,
            cli::Command::Check(args) => check::check(&args),
            cli::Command::Completions(args) => client::complete::completions(&args),
            cli::Command::Events(args) => client::events(args).await,
            cli::Command::List(args) => client::list(args).await,
            cli::Command::Rekey(args) => client::rekey(args).await,
            cli::Command::Status(args) => client::status(args).await,
            cli::Command::Up(args) => client::up(args).await,
            cli::Command::Down(args) => client::down(args).await,
            cli::Command::Policies(args) => inspect::policies(args).await,
            cli::Command::Reconcile(args) => inspect::reconcile(args).await,
            cli::Command::Replay(args) => replay::replay(&args),
            cli::Command::UpdownHelper => ExitCode::SUCCESS,
        }
    })
}
