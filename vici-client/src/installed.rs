// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What swanherd tells of its data plane beyond strongSwan's VICI: the policies in force, and how
//! what is there differs from what should be.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::client::{Client, Error, check};
use crate::de::from_message;
use crate::message::Message;

/// One policy that is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct InstalledPolicy {
    /// The kernel's number of it; 0 in a data plane that has none.
    pub index: u32,
    /// `in`, `out` or `fwd`.
    pub dir: String,
    /// Source network.
    pub src: String,
    /// Destination network.
    pub dst: String,
    /// IP protocol; `None` is any.
    pub proto: Option<u8>,
    /// Source port, or ICMP type; `None` is any.
    pub sport: Option<Masked>,
    /// Destination port, or ICMP code; `None` is any.
    pub dport: Option<Masked>,
    /// Lower ones are consulted first.
    pub priority: u32,
    /// `protect`, `pass` or `drop`.
    pub action: String,
    /// `tunnel`, `transport` or `beet`, of those that protect.
    pub mode: Option<String>,
    /// Request id, of those that protect.
    pub reqid: Option<u32>,
    /// Outer source, of those that protect.
    pub tunnel_src: Option<String>,
    /// Outer destination, of those that protect.
    pub tunnel_dst: Option<String>,
    /// XFRM interface; 0 is none.
    pub if_id: u32,
    /// Mark that packets must carry.
    pub mark: Option<Masked>,
    /// Whose it is.
    pub owner: PolicyOwner,
}

/// A value and the bits of it that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Masked {
    /// Value.
    pub value: u32,
    /// Bits that count.
    pub mask: u32,
}

/// Whose a policy is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct PolicyOwner {
    /// `child`, `trap`, `shunt`, `leftover`, `socket` or `alien`.
    pub kind: String,
    /// `CONNECTION/CHILD`, of the first three.
    pub name: Option<String>,
}

/// How one thing differs from what it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Finding {
    /// `sa`, `policy`, `route`, `rule` or `address`.
    pub object: String,
    /// Which one, in words.
    pub what: String,
    /// `missing`, `unwanted`, `changed` or `in_the_way`.
    pub difference: String,
    /// `CONNECTION/CHILD`, if that is known.
    pub owner: Option<String>,
    /// What is there, and what should be.
    pub reason: String,
    /// `none`, `installed`, `removed`, `renegotiated` or `failed`.
    pub remedy: String,
    /// Why, if it failed.
    pub error: Option<String>,
}

/// Outcome of `reconcile`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct Reconciled {
    /// Whether nothing was changed because that was asked for.
    pub dry_run: bool,
    /// When it ended, in seconds since the epoch.
    pub at: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
    /// SAs that are there, everybody's.
    pub sas: u64,
    /// Policies that are there, everybody's but those of sockets.
    pub policies: u64,
    /// SAs of others.
    pub alien_sas: u64,
    /// Policies of others.
    pub alien_policies: u64,
    /// Every difference.
    #[serde(skip_deserializing)]
    pub findings: Vec<Finding>,
}

/// How the daemon's file of definitions was applied last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Definitions {
    /// The file.
    pub file: String,
    /// When it was read, in seconds since the epoch.
    pub at: u64,
    /// Connections of the file that are loaded.
    pub loaded: u64,
    /// Why nothing was applied.
    pub error: Option<String>,
    /// Connections of the file that were refused, and why.
    #[serde(skip_deserializing)]
    pub refused: BTreeMap<String, String>,
}

/// A connection that was refused.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Refused {
    reason: String,
}

/// Why the last attempt of a connection failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct LastError {
    /// When, in seconds since the epoch.
    pub at: u64,
    /// Why.
    pub text: String,
}

/// What troubles a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Troubles {
    /// When an IKE SA of it failed last, in seconds since the epoch; 0 if none did.
    pub at: u64,
    /// Why.
    pub text: String,
    /// What troubles its children, by name.
    pub children: BTreeMap<String, ChildTrouble>,
}

/// What troubles a child.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ChildTrouble {
    /// When it failed last, in seconds since the epoch; 0 if it did not.
    pub at: u64,
    /// Why.
    pub text: String,
    /// Seconds until the next attempt to bring it up.
    pub next_attempt: Option<u64>,
}

impl Troubles {
    /// Why `child` is down: its own last error, or the one of its IKE SA if that is younger.
    pub fn last_error(&self, child: &str) -> Option<LastError> {
        let own = self.children.get(child).map(|one| (one.at, &one.text));
        let (at, text) = [Some((self.at, &self.text)), own]
            .into_iter()
            .flatten()
            .filter(|(at, _)| *at != 0)
            .max_by_key(|(at, _)| *at)?;
        Some(LastError {
            at,
            text: text.clone(),
        })
    }

    /// Seconds until the next attempt to bring up `child`, if one is planned.
    pub fn next_attempt(&self, child: &str) -> Option<u64> {
        self.children.get(child)?.next_attempt
    }
}

impl LastError {
    /// How long ago that was by the clock of this host, such as `5m`.
    pub fn age(&self) -> String {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        match now.saturating_sub(self.at) {
            seconds @ 0..=119 => format!("{seconds}s"),
            seconds @ 120..=7199 => format!("{}m", seconds / 60),
            seconds @ 7200..=172_799 => format!("{}h", seconds / 3600),
            seconds => format!("{}d", seconds / 86_400),
        }
    }
}

impl Client {
    /// `list-last-errors`: the last errors of each connection that had one, or of its children, and
    /// when the next attempts are made. Of swanherd only.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::UnknownEvent`] from other daemons.
    pub async fn last_errors(&mut self) -> Result<BTreeMap<String, Troubles>, Error> {
        let listed = self
            .list("list-last-errors", "list-last-error", Message::new())
            .await?;
        Ok(listed.into_iter().collect())
    }

    /// `list-refused-definitions`: how the file of definitions was applied. Of swanherd only.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::UnknownEvent`] from other daemons.
    pub async fn definitions(&mut self) -> Result<Definitions, Error> {
        let mut stream = self
            .stream(
                "list-refused-definitions",
                "refused-definition",
                Message::new(),
            )
            .await?;
        let mut refused = BTreeMap::new();
        while let Some(message) = stream.next().await? {
            for (name, section) in message.sections() {
                let one: Refused = from_message(section)?;
                refused.insert(name.to_owned(), one.reason);
            }
        }
        let mut definitions: Definitions = from_message(&check(stream.into_response())?)?;
        definitions.refused = refused;
        Ok(definitions)
    }

    /// `list-installed-policies`: every policy in force. Of swanherd only.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::UnknownEvent`] from other daemons.
    pub async fn installed_policies(&mut self) -> Result<Vec<InstalledPolicy>, Error> {
        let mut stream = self
            .stream(
                "list-installed-policies",
                "list-installed-policy",
                Message::new(),
            )
            .await?;
        let mut found = Vec::new();
        while let Some(message) = stream.next().await? {
            for (_, section) in message.sections() {
                found.push(from_message(section)?);
            }
        }
        // An answer with an error came in place of the rest.
        check(stream.into_response())?;
        Ok(found)
    }

    /// `reconcile`: compares the data plane with what should be in it, and mends it unless
    /// `dry_run`. Of swanherd only.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::UnknownEvent`] from other daemons.
    pub async fn reconcile(&mut self, dry_run: bool) -> Result<Reconciled, Error> {
        let mut args = Message::new();
        args.push_flag("dry-run", dry_run);
        let mut stream = self.stream("reconcile", "reconcile-finding", args).await?;
        let mut findings = Vec::new();
        while let Some(message) = stream.next().await? {
            for (_, section) in message.sections() {
                findings.push(from_message(section)?);
            }
        }
        let mut outcome: Reconciled = from_message(&check(stream.into_response())?)?;
        outcome.findings = findings;
        Ok(outcome)
    }
}
