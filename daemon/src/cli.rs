// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// A VPN gateway daemon for Linux: IKEv2, drop-in for strongSwan's charon.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
Exit status: 0 fine; 1 the thing asked about is wrong or down; 2 wrong usage.

Files: SWANCTL_DIR/swanctl.conf (default /etc/swanctl/swanctl.conf) defines tunnels,
STRONGSWAN_CONF (default /etc/strongswan.conf) holds settings in charon {} and swanherd {}.
Stock swanctl works against a running daemon."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon in the foreground
    Run(Run),
    /// Check tunnel definitions and settings; needs no daemon and no privileges
    Check(Check),
    /// Show every configured tunnel, and whether it is up
    Status(Status),
    /// Bring up a child (or all children of a connection) and wait for it
    Up(UpDown),
    /// Take down a child (or a whole connection) and wait for it
    Down(UpDown),
    /// List every IPsec policy in force, and whose it is; works without a daemon, too
    Policies(Policies),
    /// Compare the data plane with what should be in it, and mend it
    #[command(after_help = "\
Exit status: 0 if all is as it should be, or was mended; 1 if a difference is left.

Without a daemon, shows what an earlier run left in the kernel, and leaves it there: the next start
removes it.")]
    Reconcile(Reconcile),
    /// Run a recording of `run --record` again, and compare; needs no daemon and no secrets
    #[command(after_help = "\
Exit status: 0 if the daemon would do the same again; 1 if not, with the first difference; 2 if the
file is no recording that this version can read.")]
    Replay(Replay),
}

/// `run`
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Settings file [default: $STRONGSWAN_CONF or /etc/strongswan.conf]
    #[arg(long, value_name = "FILE")]
    pub(crate) settings: Option<PathBuf>,
    /// Tunnel definitions [default: $SWANCTL_DIR/swanctl.conf or /etc/swanctl/swanctl.conf]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Record all that IKE is told and does, without secrets, for `replay`
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Size at which a recording ends
    #[arg(long, value_name = "MIB", default_value = "256", requires = "record")]
    pub(crate) record_limit: u32,
}

/// `replay`
#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// The recording
    pub(crate) file: PathBuf,
    /// Show what happens, one line each
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Stop so many seconds after its start
    #[arg(long, value_name = "SECONDS", value_parser = crate::replay::until)]
    pub(crate) until: Option<Duration>,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `check`
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// swanctl.conf, or the directory that holds it [default: as for run]
    pub(crate) path: Option<PathBuf>,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How to reach the daemon.
#[derive(Debug, Args)]
pub(crate) struct Server {
    /// VICI socket of the daemon [default: charon.plugins.vici.socket, or
    /// unix:///var/run/charon.vici]
    #[arg(long, value_name = "URI")]
    pub(crate) uri: Option<String>,
}

/// `status`
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `up`, `down`
#[derive(Debug, Args)]
pub(crate) struct UpDown {
    /// CONNECTION, CHILD or CONNECTION/CHILD
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) server: Server,
    /// Give up after so many seconds; 0 waits for ever
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,
    /// Say nothing but errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// `policies`
#[derive(Debug, Args)]
pub(crate) struct Policies {
    #[command(flatten)]
    pub(crate) server: Server,
    /// List as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `reconcile`
#[derive(Debug, Args)]
pub(crate) struct Reconcile {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Change nothing
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn seconds(text: &str) -> Result<Duration, std::num::ParseIntError> {
    text.parse().map(Duration::from_secs)
}
