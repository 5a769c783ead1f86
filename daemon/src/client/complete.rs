// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion in shells. The shell calls the program itself, which knows its options and asks the
//! daemon for names.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Command, CommandFactory as _};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::Shells;

use super::{OK, WRONG, configured, connect, put, say};
use crate::cli::{Cli, Completions, Server};

/// Set to the name of the shell by its part of the completion.
const VARIABLE: &str = "COMPLETE";
/// Somebody waits with a finger on the key.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers a shell that wants completions, and ends; returns where none does.
pub(crate) fn answer_shell() {
    clap_complete::CompleteEnv::with_factory(command)
        .var(VARIABLE)
        .complete();
}

/// `swanherd completions`
pub(crate) fn completions(args: &Completions) -> ExitCode {
    let mut script = Vec::new();
    let written = match Shells::builtins().completer(args.shell.name()) {
        Some(shell) => {
            shell.write_registration(VARIABLE, "swanherd", "swanherd", "swanherd", &mut script)
        }
        None => Err(std::io::ErrorKind::Unsupported.into()),
    };
    match written {
        Ok(()) => {
            put(&String::from_utf8_lossy(&script));
            ExitCode::from(OK)
        }
        Err(error) => {
            say(&format!(
                "no completions for {}: {error}",
                args.shell.name()
            ));
            ExitCode::from(WRONG)
        }
    }
}

/// The command line, with what completes names.
fn command() -> Command {
    Cli::command().mut_subcommands(|subcommand| {
        let takes_name = subcommand
            .get_arguments()
            .any(|argument| argument.get_id() == "name");
        if takes_name {
            subcommand.mut_arg("name", |argument| {
                argument.add(ArgValueCompleter::new(names))
            })
        } else {
            subcommand
        }
    })
}

/// Names that begin like what is typed.
fn names(begun: &OsStr) -> Vec<CompletionCandidate> {
    let Some(begun) = begun.to_str() else {
        return Vec::new();
    };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    else {
        return Vec::new();
    };
    let server = Server {
        uri: uri(std::env::args_os()),
        ..Server::default()
    };
    let asked = async {
        let mut client = connect(&server).await?;
        configured(&mut client).await
    };
    let known = runtime.block_on(async { tokio::time::timeout(PATIENCE, asked).await });
    // A shell has no use for the reason.
    let known = known.map_or_else(|_| Vec::new(), Result::unwrap_or_default);
    let fitting = candidates(&known, begun);
    fitting.into_iter().map(CompletionCandidate::new).collect()
}

/// Connections first; children once a connection is begun, or alone where nothing else fits.
fn candidates(known: &[(String, String)], begun: &str) -> Vec<String> {
    let paths = || {
        known
            .iter()
            .map(|(connection, child)| format!("{connection}/{child}"))
    };
    let fitting = |names: &mut dyn Iterator<Item = String>| -> BTreeSet<String> {
        names.filter(|name| name.starts_with(begun)).collect()
    };
    let mut found = fitting(&mut known.iter().map(|(connection, _)| connection.clone()));
    if found.len() <= 1 {
        found.extend(fitting(&mut paths()));
    }
    if found.is_empty() {
        found = fitting(&mut known.iter().map(|(_, child)| child.clone()));
    }
    found.into_iter().collect()
}

/// The daemon that the half-finished command line names.
fn uri(mut words: impl Iterator<Item = OsString>) -> Option<String> {
    while let Some(word) = words.next() {
        let word = word.into_string().ok()?;
        if word == "--uri" {
            return words.next()?.into_string().ok();
        }
        if let Some(uri) = word.strip_prefix("--uri=") {
            return Some(uri.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Vec<(String, String)> {
        [("berlin", "net"), ("berlin", "voip"), ("bonn", "net")]
            .map(|(connection, child)| (connection.to_owned(), child.to_owned()))
            .to_vec()
    }

    #[test]
    fn connections_complete_before_their_children() {
        assert_eq!(candidates(&known(), ""), ["berlin", "bonn"]);
        assert_eq!(
            candidates(&known(), "be"),
            ["berlin", "berlin/net", "berlin/voip"]
        );
        assert_eq!(candidates(&known(), "berlin/v"), ["berlin/voip"]);
        assert_eq!(candidates(&known(), "vo"), ["voip"]);
        assert!(candidates(&known(), "x").is_empty());
    }

    #[test]
    fn the_daemon_that_is_named_is_asked() {
        let of = |words: &[&str]| uri(words.iter().map(OsString::from));

        assert_eq!(
            of(&["swanherd", "up", "--uri", "/a"]),
            Some("/a".to_owned())
        );
        assert_eq!(
            of(&["swanherd", "--uri=unix:///b"]),
            Some("unix:///b".to_owned())
        );
        assert_eq!(of(&["swanherd", "up", "x"]), None);
    }

    #[test]
    fn every_name_completes() {
        let command = command();
        for name in ["down", "list", "rekey", "status", "up"] {
            let subcommand = command.find_subcommand(name).unwrap();
            let argument = subcommand
                .get_arguments()
                .find(|argument| argument.get_id() == "name")
                .unwrap();
            assert!(argument.get::<ArgValueCompleter>().is_some(), "{name}");
        }
    }

    #[test]
    fn each_shell_is_told_to_ask_the_program() {
        for shell in ["bash", "fish", "zsh"] {
            let mut script = Vec::new();
            Shells::builtins()
                .completer(shell)
                .unwrap()
                .write_registration(VARIABLE, "swanherd", "swanherd", "swanherd", &mut script)
                .unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains(VARIABLE), "{script}");
            assert!(script.contains("swanherd"), "{script}");
        }
    }
}
