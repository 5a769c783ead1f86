// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one host has told, held against what may be told: each SA comes up once, is replaced or
//! goes down once, and nothing is heard of it afterwards.
//!
//! ```text
//!             up                      rekey to another
//!   unknown ──────► up ───────────────────────────────► over
//!      │             │ ▲                                 ▲
//!      │             └─┘ update                          │
//!      │ rekey from another ──► up ──── down ────────────┤
//!      └───────────────────── down (never was up) ───────┘
//! ```

use std::collections::{BTreeMap, BTreeSet};

use swanherd_ike::api::{
    ChildSaId, ChildSaInfo, ChildState, CommandId, Event, IkeSaId, IkeSaInfo, IkeState,
};

/// An IKE SA that is up in the eyes of the world.
#[derive(Clone, Debug)]
struct Ike {
    connection: Option<String>,
    /// What it was called before rekeys, oldest first.
    chain: Vec<IkeSaId>,
}

/// A CHILD SA that is up in the eyes of the world.
#[derive(Clone, Debug)]
struct Child {
    ike: IkeSaId,
    name: String,
}

/// How many of each happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    pub(crate) ike_ups: u64,
    pub(crate) ike_downs: u64,
    pub(crate) ike_rekeys: u64,
    pub(crate) ike_updates: u64,
    pub(crate) child_ups: u64,
    pub(crate) child_downs: u64,
    pub(crate) child_rekeys: u64,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    ikes: BTreeMap<IkeSaId, Ike>,
    children: BTreeMap<ChildSaId, Child>,
    /// Ids are not used again; what is over stays over.
    ikes_over: BTreeSet<IkeSaId>,
    children_over: BTreeSet<ChildSaId>,
    /// IKE SAs that went down, until their children have as well.
    closing: BTreeSet<IkeSaId>,
    /// IKE SAs that are gone from listings.
    gone: BTreeSet<IkeSaId>,
    commands: BTreeSet<CommandId>,
    pub(crate) told: Told,
}

impl Ledger {
    /// A command was given.
    pub(crate) fn asked(&mut self, id: CommandId) {
        self.commands.insert(id);
    }

    /// Nobody waits for a command any more.
    pub(crate) fn cancelled(&mut self, id: CommandId) {
        self.commands.remove(&id);
    }

    /// Commands without an answer.
    pub(crate) fn unanswered(&self) -> &BTreeSet<CommandId> {
        &self.commands
    }

    /// How many children are up in the eyes of the world.
    pub(crate) fn children_up(&self, connection: &str, child: &str) -> usize {
        self.children
            .values()
            .filter(|known| {
                known.name == child
                    && self
                        .ikes
                        .get(&known.ike)
                        .is_some_and(|ike| ike.connection.as_deref() == Some(connection))
            })
            .count()
    }

    /// Takes in an event; an error says what is wrong with it.
    pub(crate) fn take(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::IkeUpDown { up: true, sa } => {
                self.told.ike_ups += 1;
                self.ike_begins(sa, Vec::new())
            }
            Event::IkeUpDown { up: false, sa } => {
                self.told.ike_downs += 1;
                if !sa.children.is_empty() {
                    return Err(format!("IKE_SA [{}] goes down with children", sa.id));
                }
                self.ike_ends(sa.id, true).map(|_| ())
            }
            Event::IkeRekey { old, new } => {
                self.told.ike_rekeys += 1;
                if old.connection != new.connection {
                    return Err(format!(
                        "the connection of [{}] changed with a rekey",
                        old.id
                    ));
                }
                let Some(ike) = self.ike_ends(old.id, false)? else {
                    return Err(format!("IKE_SA [{}] is rekeyed but was not up", old.id));
                };
                let mut chain = ike.chain;
                chain.push(old.id);
                self.ike_begins(new, chain)?;
                for child in self.children.values_mut().filter(|c| c.ike == old.id) {
                    child.ike = new.id;
                }
                Ok(())
            }
            Event::IkeUpdate { sa, local, remote } => {
                self.told.ike_updates += 1;
                if (sa.local, sa.remote) == (*local, *remote) {
                    return Err(format!("IKE_SA [{}] moves to where it is", sa.id));
                }
                self.ike_is_up(sa.id, "moves")
            }
            Event::ChildUpDown { up: true, sa } => {
                self.told.child_ups += 1;
                self.ike_is_up(sa.id, "gets a child")?;
                let child = only_child(sa)?;
                self.child_begins(sa.id, child)
            }
            Event::ChildUpDown { up: false, sa } => {
                self.told.child_downs += 1;
                let child = only_child(sa)?;
                self.child_ends(sa.id, child, "goes down")?;
                if self.closing.contains(&sa.id) && self.children_of(sa.id) == 0 {
                    self.closing.remove(&sa.id);
                }
                Ok(())
            }
            Event::ChildRekey { sa, old, new } => {
                self.told.child_rekeys += 1;
                self.ike_is_up(sa.id, "has a child rekeyed")?;
                if old.name != new.name {
                    return Err(format!("child {{{}}} got another name", old.id));
                }
                self.child_ends(sa.id, old, "is rekeyed")?;
                self.child_begins(sa.id, new)
            }
            Event::CommandDone { id, .. } => {
                if self.commands.remove(id) {
                    Ok(())
                } else {
                    Err(format!("command {id} ended without being under way"))
                }
            }
            Event::Changed(id) if self.gone.contains(id) => {
                Err(format!("IKE_SA [{id}] changes after it is gone"))
            }
            Event::Gone(id) => {
                if self.gone.contains(id) {
                    return Err(format!("IKE_SA [{id}] is gone twice"));
                }
                self.gone.insert(*id);
                if self.ikes.contains_key(id) {
                    return Err(format!(
                        "IKE_SA [{id}] is gone and was never said to be down"
                    ));
                }
                let left = self.children_of(*id);
                if left > 0 {
                    return Err(format!(
                        "IKE_SA [{id}] is gone, {left} of its children are up"
                    ));
                }
                Ok(())
            }
            Event::Changed(_)
            | Event::Log(_)
            | Event::Alert { .. }
            | Event::Failure { .. }
            | Event::NextAttempt { .. }
            | Event::Counter { .. } => Ok(()),
        }
    }

    /// What is up in the eyes of the world exists.
    pub(crate) fn check_listed(&self, sas: &[IkeSaInfo]) -> Result<(), String> {
        let listed: BTreeMap<IkeSaId, &IkeSaInfo> = sas.iter().map(|sa| (sa.id, sa)).collect();
        for (id, ike) in &self.ikes {
            if !listed.contains_key(id) {
                return Err(format!(
                    "IKE_SA {:?}[{id}], once {:?}, is said to be up but does not exist",
                    ike.connection, ike.chain
                ));
            }
        }
        for (id, child) in &self.children {
            let there = listed
                .get(&child.ike)
                .and_then(|sa| sa.children.get(id))
                .is_some_and(|info| info.name == child.name && info.installed.is_some());
            if !there {
                return Err(format!(
                    "CHILD_SA {}{{{id}}} of [{}] is said to be up but is not there",
                    child.name, child.ike
                ));
            }
        }
        Ok(())
    }

    /// What exists has been told of; holds when nothing is under way.
    pub(crate) fn check_told(&self, sas: &[IkeSaInfo]) -> Result<(), String> {
        self.check_listed(sas)?;
        for sa in sas {
            if sa.state == IkeState::Established && !self.ikes.contains_key(&sa.id) {
                return Err(format!("IKE_SA [{}] is up and nobody was told", sa.id));
            }
            for child in sa.children.values() {
                if child.state == ChildState::Installed && !self.children.contains_key(&child.id) {
                    return Err(format!(
                        "CHILD_SA {{{}}} is up and nobody was told",
                        child.id
                    ));
                }
            }
        }
        Ok(())
    }

    /// Everything that was up is over.
    pub(crate) fn check_over(&self) -> Result<(), String> {
        if self.ikes.is_empty() && self.children.is_empty() {
            return Ok(());
        }
        Err(format!(
            "never said to be down: {:?} {:?}",
            self.ikes, self.children
        ))
    }

    fn ike_begins(&mut self, sa: &IkeSaInfo, chain: Vec<IkeSaId>) -> Result<(), String> {
        if self.ikes.contains_key(&sa.id) || self.ikes_over.contains(&sa.id) {
            return Err(format!("IKE_SA [{}] comes up again", sa.id));
        }
        let connection = sa.connection.clone();
        self.ikes.insert(sa.id, Ike { connection, chain });
        Ok(())
    }

    /// `down` allows for one that never was up.
    fn ike_ends(&mut self, id: IkeSaId, down: bool) -> Result<Option<Ike>, String> {
        if self.ikes_over.contains(&id) {
            return Err(format!("IKE_SA [{id}] ends again"));
        }
        self.ikes_over.insert(id);
        if down {
            self.closing.insert(id);
        }
        Ok(self.ikes.remove(&id))
    }

    fn ike_is_up(&self, id: IkeSaId, what: &str) -> Result<(), String> {
        if self.ikes.contains_key(&id) {
            return Ok(());
        }
        let over = if self.ikes_over.contains(&id) {
            "over"
        } else {
            "not up"
        };
        Err(format!("IKE_SA [{id}] {what} but is {over}"))
    }

    fn child_begins(&mut self, ike: IkeSaId, child: &ChildSaInfo) -> Result<(), String> {
        let id = child.id;
        if self.children.contains_key(&id) || self.children_over.contains(&id) {
            return Err(format!("CHILD_SA {{{id}}} comes up again"));
        }
        if child.inbound.is_none() || child.outbound.is_none() {
            return Err(format!("CHILD_SA {{{id}}} comes up without SPIs"));
        }
        let name = child.name.clone();
        self.children.insert(id, Child { ike, name });
        Ok(())
    }

    fn child_ends(&mut self, ike: IkeSaId, child: &ChildSaInfo, what: &str) -> Result<(), String> {
        let id = child.id;
        let over = self.children_over.contains(&id);
        let Some(known) = self.children.remove(&id) else {
            let how = if over { "over" } else { "not up" };
            return Err(format!("CHILD_SA {{{id}}} {what} but is {how}"));
        };
        self.children_over.insert(id);
        if known.ike != ike || known.name != child.name {
            return Err(format!(
                "CHILD_SA {{{id}}} {what} as {} of [{ike}], but is {} of [{}]",
                child.name, known.name, known.ike
            ));
        }
        Ok(())
    }

    fn children_of(&self, ike: IkeSaId) -> usize {
        self.children.values().filter(|c| c.ike == ike).count()
    }
}

fn only_child(sa: &IkeSaInfo) -> Result<&ChildSaInfo, String> {
    let mut children = sa.children.values();
    match (children.next(), children.next()) {
        (Some(child), None) => Ok(child),
        _ => Err(format!(
            "an event about a child of [{}] names {}",
            sa.id,
            sa.children.len()
        )),
    }
}
