// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernels with ESP: User-mode Linux in seconds, Debian's own kernel under an emulator for the rest.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use clap::{Parser, ValueEnum};

use crate::kernels::Kernel;
use crate::shell::{Error, cache, is_root, workspace};
use crate::{packages, shell};

/// The variable that names the module netdevsim.
pub(crate) const NETDEVSIM: &str = "SWANHERD_NETDEVSIM";

/// Under which kernel.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Bed {
    /// User-mode Linux: ready in four seconds, programs run at full speed
    Uml,
    /// Debian's cloud kernel under QEMU without KVM: SMP, BTF, kprobes; programs run 20 times slower
    Vm,
}

/// `cargo xtask lab`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Under which kernel
    bed: Bed,
    /// Memory of the guest in MiB
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Time for all of it, in seconds
    #[arg(long, default_value_t = 600)]
    seconds: u32,
    /// Debian's kernel of this version (vm)
    #[arg(long, default_value = "6.1")]
    kernel: Kernel,
    /// CPUs of the guest (vm)
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Also build netdevsim, a device that ESP can be offloaded to; the module is
    /// $SWANHERD_NETDEVSIM (vm)
    #[arg(long)]
    netdevsim: bool,
    /// What to run; $OUT is a folder that outlives the guest
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs a command under another kernel, with its output as ours.
pub(crate) fn lab(args: &Args) -> Result<u8, Error> {
    let mut guest = match args.bed {
        Bed::Uml => uml(args.memory, args.seconds)?,
        Bed::Vm => vm(args.kernel, args.cpus, args.memory, args.seconds)?,
    };
    if args.netdevsim {
        guest.env(NETDEVSIM, args.kernel.netdevsim()?);
    }
    guest.args(&args.command);
    Ok(u8::try_from(shell::run(guest)?).unwrap_or(125))
}

/// The beginning of a command line that runs the rest of it under User-mode Linux.
pub(crate) fn uml(memory: u32, seconds: u32) -> Result<Command, Error> {
    check_root()?;
    packages::install(packages::NETWORK)?;
    packages::install(packages::UML)?;
    let mut command = Command::new(workspace().join("xtask/lab/uml-run"));
    command.args(["-m", &format!("{memory}M"), "-t", &seconds.to_string()]);
    command.env("OUT", out()?);
    Ok(command)
}

/// The folder with unpacked IKE daemons of other makes.
pub(crate) fn peers() -> Result<PathBuf, Error> {
    packages::install(packages::PEER_LIBRARIES)?;
    let folder = cache()?.join("peers");
    fs::create_dir_all(&folder)?;
    for package in packages::PEERS {
        packages::unpack(package, &folder.join(package))?;
    }
    Ok(folder)
}

/// A tree with charon of another release of Debian, and nothing of this machine in it.
pub(crate) fn charon(release: &str) -> Result<PathBuf, Error> {
    check_root()?;
    packages::install(packages::DEBOOTSTRAP)?;
    let root = cache()?.join(format!("charon-{release}"));
    packages::bootstrap(release, packages::CHARON, &root)?;
    Ok(root)
}

/// As [`uml`], under one of Debian's kernels in an emulator.
pub(crate) fn vm(kernel: Kernel, cpus: u32, memory: u32, seconds: u32) -> Result<Command, Error> {
    check_root()?;
    packages::install(packages::NETWORK)?;
    packages::install(packages::VM)?;
    let kernel = kernel.unpacked()?;
    let mut command = Command::new(workspace().join("xtask/lab/vm-run"));
    command.args(["-c", &cpus.to_string(), "-m", &memory.to_string()]);
    command.args(["-t", &seconds.to_string()]).arg(kernel);
    command.env("OUT", out()?);
    Ok(command)
}

fn check_root() -> Result<(), Error> {
    if is_root() {
        Ok(())
    } else {
        Err("labs share this machine's files: run as root".into())
    }
}

fn out() -> Result<PathBuf, Error> {
    let out = cache()?.join("out");
    fs::create_dir_all(&out)?;
    Ok(out)
}
