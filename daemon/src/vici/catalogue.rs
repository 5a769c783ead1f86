// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The names of all commands and events: `list-commands`.

use swanherd_vici::Message;

use super::events;

/// Every command, in the order of the alphabet.
const COMMANDS: [&str; 41] = [
    "clear-creds",
    "flush-certs",
    "get-algorithms",
    "get-authorities",
    "get-conns",
    "get-counters",
    "get-keys",
    "get-pools",
    "get-shared",
    "initiate",
    "install",
    "list-authorities",
    "list-certs",
    "list-commands",
    "list-conns",
    "list-installed-policies",
    "list-last-errors",
    "list-policies",
    "list-refused-definitions",
    "list-sas",
    "load-authority",
    "load-cert",
    "load-conn",
    "load-key",
    "load-pool",
    "load-shared",
    "load-token",
    "reconcile",
    "redirect",
    "rekey",
    "reload-settings",
    "reset-counters",
    "stats",
    "terminate",
    "uninstall",
    "unload-authority",
    "unload-conn",
    "unload-key",
    "unload-pool",
    "unload-shared",
    "version",
];

/// `list-commands`.
pub(super) fn list() -> Message {
    Message::new()
        .with_list("commands", COMMANDS)
        .with_list("events", events::known())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_is_listed_is_what_there_is() {
        let source = include_str!("commands.rs");
        let dispatch = source.split_once("Some(match name {").unwrap().1;
        let dispatch = dispatch.split_once("_ => return None").unwrap().0;
        let known: BTreeSet<&str> = dispatch
            .lines()
            .filter_map(|line| line.trim().strip_prefix('"')?.split_once("\" =>"))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(known, BTreeSet::from(COMMANDS));
        assert!(COMMANDS.is_sorted());
    }

    #[test]
    fn every_command_and_event_is_documented() {
        let docs = include_str!("../../../docs/vici.md");
        let missing: Vec<_> = COMMANDS
            .into_iter()
            .chain(events::known())
            .filter(|name| !docs.contains(&format!("`{name}`")))
            .collect();
        assert_eq!(missing, [""; 0]);
    }
}
