// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The developer's one door: `cargo xtask demo|test|lab|man|mips|bench`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench_kernel;
mod bench_tun;
mod demo;
mod groups;
mod kernels;
mod lab;
mod lint;
mod man;
mod mips;
mod packages;
mod shell;
mod traffic;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Many CHILD SAs in the kernel, beside charon's kernel-netlink, under User-mode Linux (root)
    Kernel(bench_kernel::Args),
    /// The TUN plane against charon's kernel-libipsec, run by run in turn (root)
    Tun(bench_tun::Args),
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Measurements against charon
    #[command(subcommand)]
    Bench(Bench),
    /// A gateway with many tunnels, traffic through each, and a live table (root)
    Demo(demo::Args),
    /// All tests, in groups, and a table of what ran (root for the groups that need it)
    Test(groups::Args),
    /// The fuzz targets, all of them
    Fuzz(groups::FuzzArgs),
    /// Runs a command under a kernel that has ESP (root)
    Lab(lab::Args),
    /// Writes the manual pages of the command line
    Man(man::Args),
    /// Builds the daemon for MIPS routers and tries it under emulation (root)
    Mips(mips::Args),
}

fn main() -> ExitCode {
    shell::catch_signals();
    let outcome = match Cli::parse().task {
        Task::Bench(Bench::Kernel(args)) => bench_kernel::bench(&args),
        Task::Bench(Bench::Tun(args)) => bench_tun::bench(&args),
        Task::Demo(args) => demo::demo(&args),
        Task::Test(args) => groups::test(&args),
        Task::Fuzz(args) => groups::fuzz(&args),
        Task::Lab(args) => lab::lab(&args),
        Task::Man(args) => man::man(&args),
        Task::Mips(args) => mips::mips(&args),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}
