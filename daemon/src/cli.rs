// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// A VPN gateway daemon for Linux: IKEv2, drop-in for strongSwan's charon.
#[derive(Debug, Parser)]
#[command(
    name = "swanherd",
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
    /// Print what a shell needs to complete this program's options and the daemon's names
    #[command(after_help = "\
Installs with, for one of the three:
  swanherd completions bash > /usr/share/bash-completion/completions/swanherd
  swanherd completions zsh > /usr/share/zsh/vendor-completions/_swanherd
  swanherd completions fish > /usr/share/fish/vendor_completions.d/swanherd.fish")]
    Completions(Completions),
    /// Tell what happens as it happens, one JSON object on each line
    Events(Events),
    /// List certificates, connections, SAs, policies or pools
    List(List),
    /// Show every configured tunnel, and whether it is up
    #[command(after_help = "\
Exit status: 0 if every tunnel that is shown is up or waits for traffic; 1 if one is down, a
definition was refused, the file of definitions was not applied, or nothing has that name.")]
    Status(Status),
    /// Bring up a child (or all children of a connection) and wait for it
    Up(UpDown),
    /// Take down a child (or a whole connection) and wait for it
    Down(UpDown),
    /// Replace the keys of a connection or a child, and wait until that is done
    #[command(after_help = "\
Exit status: 0 if every SA that is meant was replaced; 1 if one was not, or nothing of that name
is up; 2 if a child was to be reauthenticated.")]
    Rekey(Rekey),
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
    /// Run scripts that the daemon orders
    #[command(hide = true)]
    UpdownHelper,
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
    #[arg(long, value_name = "SECONDS", value_parser = until)]
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
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Server {
    /// VICI socket of the daemon [default: charon.plugins.vici.socket, or
    /// unix:///var/run/charon.vici]
    #[arg(long, value_name = "URI", value_parser = address)]
    pub(crate) uri: Option<String>,
    /// Authorities of the daemon's certificate, where the URI is tls://HOST:PORT
    #[arg(long, value_name = "FILE", requires_all = ["tls_cert", "tls_key"])]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Certificate to show to the daemon
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of that certificate
    #[arg(long, value_name = "FILE", requires = "tls_ca")]
    pub(crate) tls_key: Option<PathBuf>,
}

/// `status`
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Only this CONNECTION, CHILD or CONNECTION/CHILD
    pub(crate) name: Option<String>,
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

/// `rekey`
#[derive(Debug, Args)]
pub(crate) struct Rekey {
    /// CONNECTION, for its IKE_SA; CHILD or CONNECTION/CHILD, for its CHILD_SA
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) server: Server,
    /// The children of the connection instead of its IKE_SA
    #[arg(long)]
    pub(crate) children: bool,
    /// Make the IKE_SA anew, with authentication
    #[arg(long, conflicts_with = "children")]
    pub(crate) reauth: bool,
    /// Give up after so many seconds; 0 waits for ever
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,
    /// Say nothing but errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// `list`
#[derive(Debug, Args)]
pub(crate) struct List {
    /// What to list
    pub(crate) what: Listed,
    /// Only the connection or pool of this name
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) server: Server,
    /// Of connections only names, their own and CONNECTION/CHILD, one on each line
    #[arg(long, conflicts_with = "json")]
    pub(crate) names: bool,
    /// List as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `list` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Listed {
    /// Certificates
    Certs,
    /// Connections, as they are configured
    Conns,
    /// IPsec policies in force; the same as `policies`
    Policies,
    /// Pools of virtual addresses
    Pools,
    /// IKE_SAs and CHILD_SAs
    Sas,
}

/// `events`
#[derive(Debug, Args)]
pub(crate) struct Events {
    #[command(flatten)]
    pub(crate) server: Server,
    /// Only these events; may be repeated [default: all but log]
    #[arg(long, value_name = "EVENT", value_delimiter = ',')]
    pub(crate) only: Vec<EventName>,
    /// Wait for the daemon where there is none, and when it goes away
    #[arg(long)]
    pub(crate) reconnect: bool,
}

/// Events of VICI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EventName {
    /// Something that deserves attention
    Alert,
    /// A CHILD_SA was replaced
    ChildRekey,
    /// A CHILD_SA came up or went down
    ChildUpdown,
    /// An IKE_SA was replaced
    IkeRekey,
    /// The addresses of an IKE_SA changed
    IkeUpdate,
    /// An IKE_SA came up or went down
    IkeUpdown,
    /// A line of the log
    Log,
}

impl EventName {
    /// What is told unless something else is asked for.
    pub(crate) const ALL: [Self; 6] = [
        Self::IkeUpdown,
        Self::IkeRekey,
        Self::IkeUpdate,
        Self::ChildUpdown,
        Self::ChildRekey,
        Self::Alert,
    ];

    /// VICI's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alert => "alert",
            Self::ChildRekey => "child-rekey",
            Self::ChildUpdown => "child-updown",
            Self::IkeRekey => "ike-rekey",
            Self::IkeUpdate => "ike-update",
            Self::IkeUpdown => "ike-updown",
            Self::Log => "log",
        }
    }
}

/// `completions`
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Shell
    pub(crate) shell: Shell,
}

/// Shells that complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// GNU Bash
    Bash,
    /// fish
    Fish,
    /// zsh
    Zsh,
}

impl Shell {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Fish => "fish",
            Self::Zsh => "zsh",
        }
    }
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

fn until(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// What can be connected to, as far as its form tells.
fn address(text: &str) -> Result<String, String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    let host = ["tcp://", "tls://"]
        .iter()
        .find_map(|scheme| text.strip_prefix(scheme));
    let fits = match host {
        Some(host) => host
            .rsplit_once(':')
            .is_some_and(|(name, port)| !name.is_empty() && port.parse::<u16>().is_ok()),
        None => path.starts_with('/'),
    };
    if fits {
        Ok(text.to_owned())
    } else {
        Err("none of unix://PATH, tcp://HOST:PORT and tls://HOST:PORT".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn addresses_have_a_form() {
        for good in [
            "/run/x",
            "unix:///run/x",
            "tcp://[::1]:4502",
            "tls://gw:4502",
        ] {
            assert!(address(good).is_ok(), "{good}");
        }
        for bad in [
            "nonsense",
            "",
            "unix://run/x",
            "tcp://gw",
            "tcp://:1",
            "tcp://gw:99999",
        ] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn wrong_usage_ends_with_two() {
        for words in [
            &["status", "--uri", "nonsense"][..],
            &["up"],
            &["list", "nonsense"],
            &["rekey", "x", "--children", "--reauth"],
            &["events", "--only", "nonsense"],
        ] {
            let words = ["swanherd"].iter().chain(words);
            let error = Cli::try_parse_from(words).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }
}
