// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `rekey`: asks for it, and waits until it is done.

use std::collections::BTreeMap;
use std::process::ExitCode;

use swanherd_vici::types::{ListSas, Selector};
use swanherd_vici::{Client, Error, Event, IkeSa, Message};
use tokio::time::Instant;

use super::{OK, WRONG, configured, connect, fail, nothing_called, put, say, words};
use crate::cli::Rekey;

/// What tells how rekeyings went.
const EVENTS: [&str; 4] = ["ike-rekey", "child-rekey", "ike-updown", "child-updown"];

/// An SA that is to be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sa {
    Ike(u32),
    Child(u32),
}

/// The SAs that are still to be replaced, and how operators know them.
#[derive(Debug, Default)]
struct Pending {
    sas: BTreeMap<Sa, String>,
    /// Whether IKE SAs are made anew rather than rekeyed: the old one just goes then.
    reauth: bool,
    /// Connections of which a new IKE SA came up.
    renewed: BTreeMap<String, u32>,
    /// Those whose old IKE SA went before that.
    gone: BTreeMap<String, u32>,
}

/// How one went.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Replaced(String),
    Failed(String),
}

/// `swanherd rekey`
pub(crate) async fn rekey(args: Rekey) -> ExitCode {
    let mut client = match connect(&args.server).await {
        Ok(client) => client,
        Err(error) => return fail(&error),
    };
    match attempt(&mut client, &args).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => fail(&error),
    }
}

async fn attempt(client: &mut Client, args: &Rekey) -> Result<u8, Error> {
    // Before anything is asked for, so that nothing that comes of it is missed.
    client.subscribe(&EVENTS).await?;
    let sas = client.list_sas(&ListSas::default()).await?;
    let mut pending = Pending {
        sas: wanted(&args.name, args.children, &sas),
        reauth: args.reauth,
        ..Pending::default()
    };
    if pending.sas.is_empty() {
        let known = configured(client).await?;
        let exists = known
            .iter()
            .any(|(connection, child)| super::is_named(&args.name, connection, child));
        say(&if exists {
            format!("nothing of '{}' is up", args.name)
        } else {
            let definitions = client.definitions().await.unwrap_or_default();
            nothing_called(&args.name, &known, &definitions.refused)
        });
        return Ok(WRONG);
    }
    if args.reauth && pending.sas.keys().any(|sa| matches!(sa, Sa::Child(_))) {
        say("only a connection can be reauthenticated, no child");
        return Ok(super::USAGE);
    }
    let mut code = OK;
    for (sa, label) in pending.sas.clone() {
        let selector = match sa {
            Sa::Ike(id) => Selector {
                ike_id: Some(id),
                ..Selector::default()
            },
            Sa::Child(id) => Selector {
                child_id: Some(id),
                ..Selector::default()
            },
        };
        if let Err(error @ Error::Refused { .. }) = client.rekey(&selector, args.reauth).await {
            say(&format!("{label}: {}", words(&error)));
            pending.sas.remove(&sa);
            code = WRONG;
        }
    }
    let limit = (!args.timeout.is_zero()).then(|| Instant::now() + args.timeout);
    while !pending.is_done() {
        let Some(event) = next(client, limit).await? else {
            break;
        };
        for outcome in pending.note(&event) {
            match outcome {
                Outcome::Replaced(text) if args.quiet => drop(text),
                Outcome::Replaced(text) => put(&(text + "\n")),
                Outcome::Failed(text) => {
                    say(&text);
                    code = WRONG;
                }
            }
        }
    }
    if !pending.is_done() {
        code = WRONG;
        let troubles = client.last_errors().await.unwrap_or_default();
        for label in pending.labels() {
            let (connection, child) = label.split_once('/').unwrap_or((label, ""));
            let why = troubles
                .get(connection)
                .and_then(|troubles| troubles.last_error(child))
                .map_or_else(String::new, |error| {
                    format!("; last error, {} ago: {}", error.age(), error.text)
                });
            say(&format!(
                "{label}: not replaced within {}s{why}",
                args.timeout.as_secs()
            ));
        }
    }
    Ok(code)
}

/// The next event, unless the time is up.
async fn next(client: &mut Client, limit: Option<Instant>) -> Result<Option<Event>, Error> {
    match limit {
        None => client.next_event().await.map(Some),
        Some(limit) => match tokio::time::timeout_at(limit, client.next_event()).await {
            Ok(event) => event.map(Some),
            Err(_) => Ok(None),
        },
    }
}

/// The SAs that a name means: the IKE SA of a connection, or all its children if `children`, else
/// the children of that name.
fn wanted(name: &str, children: bool, sas: &[IkeSa]) -> BTreeMap<Sa, String> {
    let is_connection = sas.iter().any(|sa| sa.name == name);
    let mut found = BTreeMap::new();
    for sa in sas.iter().filter(|sa| sa.state == "ESTABLISHED") {
        if is_connection && !children {
            if sa.name == name {
                found.insert(Sa::Ike(sa.uniqueid), sa.name.clone());
            }
            continue;
        }
        for child in sa.children.iter().filter(|one| one.state == "INSTALLED") {
            let named = if is_connection {
                sa.name == name
            } else {
                super::is_named(name, &sa.name, &child.name)
            };
            if named {
                let label = format!("{}/{}", sa.name, child.name);
                found.insert(Sa::Child(child.uniqueid), label);
            }
        }
    }
    found
}

impl Pending {
    fn is_done(&self) -> bool {
        self.sas.is_empty() && self.gone.is_empty()
    }

    fn labels(&self) -> impl Iterator<Item = &str> {
        let gone = self.gone.keys().map(String::as_str);
        self.sas.values().map(String::as_str).chain(gone)
    }

    /// What an event says of what is pending.
    fn note(&mut self, event: &Event) -> Vec<Outcome> {
        let message = &event.message;
        let up = message.str("up") == Some("yes");
        let mut outcomes = Vec::new();
        for (connection, section) in message.sections() {
            match event.name.as_str() {
                "ike-rekey" => outcomes.extend(self.replaced(section, Sa::Ike)),
                "child-rekey" => {
                    let children = section.section("child-sas");
                    for (_, both) in children.into_iter().flat_map(Message::sections) {
                        outcomes.extend(self.replaced(both, Sa::Child));
                    }
                }
                "ike-updown" => {
                    if let Some(id) = id(section) {
                        outcomes.extend(self.ike_updown(connection, id, up));
                    }
                }
                "child-updown" if !up => {
                    let children = section.section("child-sas");
                    for (_, child) in children.into_iter().flat_map(Message::sections) {
                        let label = id(child).and_then(|id| self.sas.remove(&Sa::Child(id)));
                        outcomes.extend(label.map(went_down));
                    }
                }
                _ => {}
            }
        }
        outcomes
    }

    fn replaced(&mut self, both: &Message, of: fn(u32) -> Sa) -> Option<Outcome> {
        let (old, new) = (both.section("old")?, both.section("new")?);
        let (old, new) = (id(old)?, id(new)?);
        let label = self.sas.remove(&of(old))?;
        Some(replacement(&label, old, new))
    }

    fn ike_updown(&mut self, connection: &str, id: u32, up: bool) -> Option<Outcome> {
        if up {
            return match self.gone.remove(connection) {
                Some(old) => Some(replacement(connection, old, id)),
                None => {
                    self.renewed.insert(connection.to_owned(), id);
                    None
                }
            };
        }
        let label = self.sas.remove(&Sa::Ike(id))?;
        if !self.reauth {
            return Some(went_down(label));
        }
        match self.renewed.get(&label) {
            Some(&new) => Some(replacement(&label, id, new)),
            None => {
                self.gone.insert(label, id);
                None
            }
        }
    }
}

fn replacement(label: &str, old: u32, new: u32) -> Outcome {
    Outcome::Replaced(format!("{label}: #{old} replaced by #{new}"))
}

fn went_down(label: String) -> Outcome {
    Outcome::Failed(format!("{label}: it went down instead of being replaced"))
}

fn id(section: &Message) -> Option<u32> {
    section.str("uniqueid")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use swanherd_vici::ChildSa;

    use super::*;

    fn sas() -> Vec<IkeSa> {
        let child = |name: &str, id: u32, state: &str| ChildSa {
            name: name.to_owned(),
            uniqueid: id,
            state: state.to_owned(),
            ..ChildSa::default()
        };
        let ike = |name: &str, id: u32, state: &str, children: Vec<ChildSa>| IkeSa {
            name: name.to_owned(),
            uniqueid: id,
            state: state.to_owned(),
            children,
            ..IkeSa::default()
        };
        vec![
            ike(
                "a",
                1,
                "ESTABLISHED",
                vec![child("x", 1, "INSTALLED"), child("y", 2, "REKEYED")],
            ),
            ike("a", 2, "DELETING", vec![child("x", 3, "INSTALLED")]),
            ike("b", 3, "ESTABLISHED", vec![child("x", 4, "INSTALLED")]),
        ]
    }

    #[test]
    fn a_name_means_a_connection_before_it_means_children() {
        let found = |name: &str, children| {
            wanted(name, children, &sas())
                .into_keys()
                .collect::<Vec<_>>()
        };

        assert_eq!(found("a", false), [Sa::Ike(1)]);
        assert_eq!(found("a", true), [Sa::Child(1)]);
        assert_eq!(found("x", false), [Sa::Child(1), Sa::Child(4)]);
        assert_eq!(found("b/x", false), [Sa::Child(4)]);
        assert_eq!(found("c", false), []);
    }

    fn pending(sa: Sa, label: &str, reauth: bool) -> Pending {
        Pending {
            sas: BTreeMap::from([(sa, label.to_owned())]),
            reauth,
            ..Pending::default()
        }
    }

    fn event(name: &str, message: Message) -> Event {
        Event {
            name: name.to_owned(),
            message,
        }
    }

    fn numbered(id: u32) -> Message {
        Message::new().with("uniqueid", id.to_string())
    }

    fn both(old: u32, new: u32) -> Message {
        Message::new()
            .with_section("old", numbered(old))
            .with_section("new", numbered(new))
    }

    #[test]
    fn a_replacement_is_the_end_of_it() {
        let mut ike = pending(Sa::Ike(1), "a", false);
        let other = event("ike-rekey", Message::new().with_section("a", both(7, 8)));
        let own = event("ike-rekey", Message::new().with_section("a", both(1, 9)));
        let mut child = pending(Sa::Child(4), "a/x", false);
        let children = Message::new().with_section("x", both(4, 5));
        let section = numbered(1).with_section("child-sas", children);
        let rekeyed = event("child-rekey", Message::new().with_section("a", section));

        assert_eq!(ike.note(&other), []);
        assert!(!ike.is_done());
        assert_eq!(
            ike.note(&own),
            [Outcome::Replaced("a: #1 replaced by #9".to_owned())]
        );
        assert!(ike.is_done());
        assert_eq!(
            child.note(&rekeyed),
            [Outcome::Replaced("a/x: #4 replaced by #5".to_owned())]
        );
    }

    #[test]
    fn a_reauthentication_is_over_when_the_new_one_is_up_and_the_old_one_gone() {
        let up = event(
            "ike-updown",
            Message::new()
                .with("up", "yes")
                .with_section("a", numbered(2)),
        );
        let down = event("ike-updown", Message::new().with_section("a", numbered(1)));
        let done = [Outcome::Replaced("a: #1 replaced by #2".to_owned())];

        for (first, second) in [(&up, &down), (&down, &up)] {
            let mut pending = pending(Sa::Ike(1), "a", true);
            assert_eq!(pending.note(first), []);
            assert!(!pending.is_done());
            assert_eq!(pending.note(second), done);
            assert!(pending.is_done());
        }
        let mut rekeying = pending(Sa::Ike(1), "a", false);
        assert!(matches!(rekeying.note(&down)[..], [Outcome::Failed(_)]));
    }
}
