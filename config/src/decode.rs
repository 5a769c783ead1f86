// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Trees to typed connections: one decoder for files and for VICI messages.
//!
//! The two differ in three ways only, which [`Origin`] carries: a file writes lists as text with
//! commas, names certificate files instead of holding their contents, and knows where it stands.

mod auth;
mod child;

#[cfg(test)]
pub(crate) use auth::ROUND_KEYS;
#[cfg(test)]
pub(crate) use child::KEYS as CHILD_KEYS;
use std::path::Path;
use std::time::Duration;

use swanherd_ipsec::{Proposal, ProtocolId};

use crate::diagnostic::{Diagnostic, suggest};
use crate::dn;
use crate::files::Files;
use crate::identity::IdentityPattern;
use crate::model::{
    AuthMethod, AuthRound, CertSource, Childless, Connection, Fragmentation, IfId, IkeVersion,
    PubkeyConstraints, Revocation, SendCert, Unique,
};
use crate::names::Names;
use crate::proposal::{ProposalError, default_proposals, parse_proposal};
use crate::tree::{Entry, Item, Location, Tree, Value};
use crate::value;

/// Where a tree came from.
#[derive(Clone, Copy)]
pub enum Origin<'a> {
    /// A file: lists are text, certificates are files below this directory.
    File {
        /// The directory of swanctl.conf.
        dir: &'a Path,
        /// To read the certificates.
        files: &'a dyn Files,
    },
    /// A VICI message: lists are lists, certificates are contents.
    Message,
}

/// A decoded value with what is doubtful about it.
#[derive(Debug)]
pub struct Decoded<T> {
    /// The value.
    pub value: T,
    /// Doubts.
    pub warnings: Vec<Diagnostic>,
}

/// Why a connection is refused, and what else there is to say about it.
#[derive(Debug)]
pub struct Refusal {
    /// The first thing that is wrong with it, in the order in which strongSwan would find it.
    pub first: Diagnostic,
    /// Further errors, and doubts.
    pub others: Vec<Diagnostic>,
}

/// Errors of one connection that are kept. A file that has more of them is no file of tunnels.
const MAX_ERRORS: usize = 64;

pub(crate) const CONNECTION_KEYS: &[&str] = &[
    "version",
    "local_addrs",
    "remote_addrs",
    "local_port",
    "remote_port",
    "proposals",
    "vips",
    "aggressive",
    "pull",
    "dscp",
    "encap",
    "mobike",
    "dpd_delay",
    "dpd_timeout",
    "fragmentation",
    "childless",
    "send_certreq",
    "send_cert",
    "ocsp",
    "ppk_id",
    "ppk_required",
    "keyingtries",
    "unique",
    "reauth_time",
    "rekey_time",
    "over_time",
    "rand_time",
    "pools",
    "if_id_in",
    "if_id_out",
    "mediation",
    "mediated_by",
    "mediation_peer",
];

/// Decodes one connection.
///
/// # Errors
/// The first thing that is wrong with it, in the order in which strongSwan would find it.
pub fn decode_connection(
    name: &str,
    tree: &Tree,
    origin: Origin<'_>,
    names: &Names,
) -> Result<Decoded<Connection>, Diagnostic> {
    decode_whole_connection(name, tree, origin, names).map_err(|refusal| refusal.first)
}

/// Decodes one connection, and goes on after an error to find the others.
///
/// # Errors
/// Everything that is wrong with it.
pub fn decode_whole_connection(
    name: &str,
    tree: &Tree,
    origin: Origin<'_>,
    names: &Names,
) -> Result<Decoded<Connection>, Refusal> {
    let mut decoder = Decoder {
        origin,
        names,
        warnings: Vec::new(),
        errors: Vec::new(),
    };
    let path = format!("connections.{name}");
    let value = decoder.within(&path, |decoder| decoder.connection(name, tree));
    let warnings = decoder.warnings;
    let mut errors = decoder.errors.into_iter();
    match errors.next() {
        None => Ok(Decoded { value, warnings }),
        Some(first) => Err(Refusal {
            first,
            others: errors.chain(warnings).collect(),
        }),
    }
}

/// One option: its name and place, and its value.
#[derive(Clone, Copy)]
struct Opt<'a> {
    entry: &'a Entry,
}

impl<'a> Opt<'a> {
    fn name(self) -> &'a str {
        &self.entry.name
    }

    /// The place of the value, or of the name.
    fn place(self) -> Option<&'a Location> {
        match &self.entry.item {
            Item::Value(value) => value.location().or(self.entry.location.as_ref()),
            _ => self.entry.location.as_ref(),
        }
    }

    fn invalid(self, message: impl Into<String>) -> Diagnostic {
        Diagnostic::error("invalid-value", message)
            .stock(format!(
                "invalid value for: {}, config discarded",
                self.name()
            ))
            .key(self.name())
            .at(self.place())
    }

    fn unknown(self, known: &[&str]) -> Diagnostic {
        Diagnostic::error(
            "unknown-option",
            format!("`{}` is no option here", self.name()),
        )
        .stock(format!("unknown option: {}, config discarded", self.name()))
        .key(self.name())
        .help_opt(suggest(self.name(), known.iter().copied()))
        .at(self.entry.location.as_ref())
    }

    /// What cannot work here is refused in words of our own, for the reference has none.
    fn unsupported(self, why: &str) -> Diagnostic {
        let value = match &self.entry.item {
            Item::Value(value) => value.text().map(excerpt),
            _ => None,
        };
        let message = match value {
            Some(value) => format!("`{} = {value}`: {why}", self.name()),
            None => format!("`{}`: {why}", self.name()),
        };
        Diagnostic::error("unsupported", message)
            .key(self.name())
            .at(self.place())
    }

    /// What is accepted and makes no difference.
    fn without_effect(self, why: &str) -> Diagnostic {
        Diagnostic::note(
            "no-effect",
            format!("`{}` has no effect: {why}", self.name()),
        )
        .key(self.name())
        .at(self.place())
    }

    fn doubt(self, code: &'static str, message: impl Into<String>) -> Diagnostic {
        Diagnostic::warning(code, message)
            .key(self.name())
            .at(self.place())
    }
}

struct Decoder<'a> {
    origin: Origin<'a>,
    names: &'a Names,
    warnings: Vec<Diagnostic>,
    errors: Vec<Diagnostic>,
}

impl Decoder<'_> {
    /// Decodes what stands in a section: what there is to say about it names that section.
    fn within<T>(&mut self, section: &str, decode: impl FnOnce(&mut Self) -> T) -> T {
        let (warnings, errors) = (self.warnings.len(), self.errors.len());
        let value = decode(self);
        for (all, before) in [(&mut self.warnings, warnings), (&mut self.errors, errors)] {
            for diagnostic in all.split_off(before) {
                all.push(diagnostic.prefix_path(section));
            }
        }
        value
    }

    /// Keeps an error, so that decoding can go on and find the next.
    fn keep(&mut self, result: Result<(), Diagnostic>) {
        if let Err(error) = result
            && self.errors.len() < MAX_ERRORS
        {
            self.errors.push(error);
        }
    }

    /// Warns of an option that is read and listed, and has no effect.
    fn inert(&mut self, option: Opt<'_>, set: bool, consequence: &str) {
        if set {
            let message = format!("{} is not supported yet: {consequence}", option.name());
            self.warnings.push(option.doubt("unsupported", message));
        }
    }

    /// The text of a key/value; lists and unprintable octets are refused as strongSwan does.
    fn text<'t>(&self, option: Opt<'t>, known: &[&str]) -> Result<&'t str, Diagnostic> {
        let Item::Value(value) = &option.entry.item else {
            return Err(option.unknown(known).help("this option takes no list"));
        };
        printable(value).ok_or_else(|| {
            option
                .invalid(format!(
                    "`{}` has characters other than printable ASCII",
                    option.name()
                ))
                .help("write a name with other characters in its encoded form, such as `asn1dn:#30...`")
        })
    }

    fn parse<T>(
        &self,
        option: Opt<'_>,
        known: &[&str],
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, Diagnostic> {
        let text = self.text(option, known)?;
        parse(text).ok_or_else(|| {
            option
                .invalid(format!("`{text}` is not {expected}"))
                .help(format!("`{}` takes {expected}", option.name()))
        })
    }

    fn choice<T: Copy>(
        &self,
        option: Opt<'_>,
        known: &[&str],
        choices: &[(&str, T)],
    ) -> Result<T, Diagnostic> {
        let text = self.text(option, known)?;
        choices
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(text))
            .map(|(_, value)| *value)
            .ok_or_else(|| {
                let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
                option
                    .invalid(format!("`{text}` is not one of {}", words.join(", ")))
                    .help_opt(suggest(text, words))
            })
    }

    fn boolean(&self, option: Opt<'_>, known: &[&str]) -> Result<bool, Diagnostic> {
        self.parse(option, known, "yes or no", value::boolean)
    }

    fn time(&self, option: Opt<'_>, known: &[&str]) -> Result<Duration, Diagnostic> {
        self.parse(
            option,
            known,
            "a time such as 30, 30s, 5m, 4h or 1d",
            value::time,
        )
    }

    fn number(&self, option: Opt<'_>, known: &[&str]) -> Result<u32, Diagnostic> {
        self.parse(option, known, "a number", value::number32)
    }

    fn if_id(&self, option: Opt<'_>, known: &[&str]) -> Result<IfId, Diagnostic> {
        self.parse(
            option,
            known,
            "an interface id, %unique or %unique-dir",
            value::if_id,
        )
    }

    fn identity(&mut self, option: Opt<'_>, known: &[&str]) -> Result<IdentityPattern, Diagnostic> {
        let text = self.text(option, known)?;
        let identity =
            IdentityPattern::parse(text).map_err(|error| option.invalid(error.to_string()))?;
        if let Some(error) = identity.regex_error() {
            return Err(option.invalid(format!("the regular expression is invalid: {error}")));
        }
        if text.contains('=')
            && identity.id_type() == Some(swanherd_ipsec::identity::IdType::KeyId)
            && !text.starts_with("keyid:")
        {
            self.warnings.push(
                option
                    .doubt(
                        "identity",
                        format!("`{text}` is no distinguished name and is taken as a key id"),
                    )
                    .help("write `keyid:` before it if that is meant"),
            );
        }
        Ok(identity)
    }

    /// The items of a list option, as texts.
    fn list<'t>(&self, option: Opt<'t>, known: &[&str]) -> Result<Vec<&'t str>, Diagnostic> {
        self.values(option, known)?
            .into_iter()
            .map(|item| {
                std::str::from_utf8(item)
                    .ok()
                    .filter(|text| is_printable(text))
                    .ok_or_else(|| {
                        option.invalid(format!(
                            "an item of `{}` has characters other than printable ASCII",
                            option.name()
                        ))
                    })
            })
            .collect()
    }

    /// The items of a list option, as octets.
    fn values<'t>(&self, option: Opt<'t>, known: &[&str]) -> Result<Vec<&'t [u8]>, Diagnostic> {
        match (&option.entry.item, self.origin) {
            (Item::List(items), _) => Ok(items.iter().map(Value::octets).collect()),
            (Item::Value(value), Origin::File { .. }) => Ok(value
                .octets()
                .split(|octet| *octet == b',')
                .map(<[u8]>::trim_ascii)
                .filter(|item| !item.is_empty())
                .collect()),
            _ => Err(option.unknown(known).help("this option takes a list")),
        }
    }

    fn proposals(
        &self,
        option: Opt<'_>,
        known: &[&str],
        protocol: ProtocolId,
    ) -> Result<Vec<Proposal>, Diagnostic> {
        let mut proposals = Vec::new();
        for text in self.list(option, known)? {
            if text == "default" {
                proposals.extend(default_proposals(protocol));
                continue;
            }
            let mut proposal = parse_proposal(protocol, text).map_err(|error| {
                let suggestion = match &error {
                    ProposalError::Unknown { suggestion, .. } => suggestion.clone(),
                    ProposalError::Unusable(_) => None,
                };
                option
                    .invalid(format!("the proposal `{text}` is not usable: {error}"))
                    .help_opt(suggestion)
            })?;
            proposal.transforms.shrink_to_fit();
            proposals.push(proposal);
        }
        Ok(proposals)
    }

    fn items<T>(
        &self,
        option: Opt<'_>,
        known: &[&str],
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, Diagnostic> {
        self.list(option, known)?
            .into_iter()
            .map(|text| {
                parse(text).ok_or_else(|| option.invalid(format!("`{text}` is not {expected}")))
            })
            .collect()
    }

    fn connection_option(
        &mut self,
        option: Opt<'_>,
        connection: &mut Connection,
        times: &mut Times,
    ) -> Result<(), Diagnostic> {
        const KEYS: &[&str] = CONNECTION_KEYS;
        match option.name() {
            "version" => {
                connection.version = self.parse(option, KEYS, "0, 1 or 2", |text| {
                    Some(match value::number(text)? {
                        0 => IkeVersion::Any,
                        1 => IkeVersion::V1,
                        2 => IkeVersion::V2,
                        _ => return None,
                    })
                })?;
                if connection.version == IkeVersion::V1 {
                    return Err(option
                        .unsupported("IKEv1 is not supported")
                        .help("have the peer use IKEv2, and leave `version` out or set it to 2"));
                }
            }
            "local_addrs" => {
                connection.local_addrs = self.items(
                    option,
                    KEYS,
                    "an address, network, range or name",
                    value::host,
                )?;
            }
            "remote_addrs" => {
                connection.remote_addrs = self.items(
                    option,
                    KEYS,
                    "an address, network, range or name",
                    value::host,
                )?;
            }
            "local_port" => {
                connection.local_port = self.parse(option, KEYS, "a port", value::number16)?;
            }
            "remote_port" => {
                connection.remote_port = self.parse(option, KEYS, "a port", value::number16)?;
            }
            "proposals" => {
                connection.proposals = self.proposals(option, KEYS, ProtocolId::Ike)?;
            }
            "vips" => {
                connection.vips = self.items(option, KEYS, "an address", value::virtual_ip)?;
            }
            "aggressive" | "pull" => {
                self.boolean(option, KEYS)?;
                self.warnings.push(option.without_effect("it is of IKEv1"));
            }
            "dscp" => {
                connection.dscp = self.parse(option, KEYS, "six binary digits", value::dscp)?;
            }
            "encap" => connection.encap = self.boolean(option, KEYS)?,
            "mobike" => connection.mobike = self.boolean(option, KEYS)?,
            "dpd_delay" => connection.dpd_delay = self.time(option, KEYS)?,
            "dpd_timeout" => {
                connection.dpd_timeout = self.time(option, KEYS)?;
                self.warnings.push(option.without_effect(
                    "it is of IKEv1; in IKEv2 the retransmissions of a liveness check decide",
                ));
            }
            "fragmentation" => {
                connection.fragmentation = self.choice(
                    option,
                    KEYS,
                    &[
                        ("yes", Fragmentation::Yes),
                        ("accept", Fragmentation::Accept),
                        ("force", Fragmentation::Force),
                        ("no", Fragmentation::No),
                    ],
                )?;
            }
            "childless" => {
                connection.childless = self.choice(
                    option,
                    KEYS,
                    &[
                        ("allow", Childless::Allow),
                        ("prefer", Childless::Prefer),
                        ("never", Childless::Never),
                        ("force", Childless::Force),
                    ],
                )?;
            }
            "send_certreq" => connection.send_certreq = self.boolean(option, KEYS)?,
            "send_cert" => {
                connection.send_cert = self.choice(
                    option,
                    KEYS,
                    &[
                        ("always", SendCert::Always),
                        ("never", SendCert::Never),
                        ("ifasked", SendCert::IfAsked),
                    ],
                )?;
            }
            "ocsp" => {
                let requested = self.choice(
                    option,
                    KEYS,
                    &[
                        ("reply", Some(false)),
                        ("request", Some(true)),
                        ("both", Some(true)),
                        ("never", None),
                    ],
                )?;
                match requested {
                    Some(true) => self.warnings.push(option.doubt(
                        "unsupported",
                        "OCSP within IKE is not supported; nothing is requested",
                    )),
                    Some(false) => self.warnings.push(option.without_effect(
                        "OCSP within IKE is not supported; no request is answered",
                    )),
                    None => {}
                }
            }
            "ppk_id" => {
                connection.ppk_id = Some(self.identity(option, KEYS)?);
                self.inert(option, true, "post-quantum preshared keys are not used");
            }
            "ppk_required" => {
                connection.ppk_required = self.boolean(option, KEYS)?;
                if connection.ppk_required {
                    return Err(option
                        .unsupported("post-quantum preshared keys are not supported")
                        .help("without it the connection works, but without such a key"));
                }
            }
            "keyingtries" => connection.keyingtries = self.number(option, KEYS)?,
            "unique" => {
                connection.unique = self.choice(
                    option,
                    KEYS,
                    &[
                        ("never", Unique::Never),
                        ("no", Unique::No),
                        ("keep", Unique::Keep),
                        ("replace", Unique::Replace),
                    ],
                )?;
            }
            "reauth_time" => times.reauth = Some(self.time(option, KEYS)?),
            "rekey_time" => times.rekey = Some(self.time(option, KEYS)?),
            "over_time" => times.over = Some(self.time(option, KEYS)?),
            "rand_time" => times.rand = Some(self.time(option, KEYS)?),
            "pools" => {
                connection.pools = self
                    .list(option, KEYS)?
                    .into_iter()
                    .map(str::to_owned)
                    .collect();
                let set = !connection.pools.is_empty();
                self.inert(option, set, "no addresses are handed out");
            }
            "if_id_in" => connection.if_id_in = self.if_id(option, KEYS)?,
            "if_id_out" => connection.if_id_out = self.if_id(option, KEYS)?,
            "mediation" if !self.boolean(option, KEYS)? => {}
            "mediation" | "mediated_by" | "mediation_peer" => {
                return Err(option.unsupported("the mediation extension is not supported"));
            }
            _ => return Err(option.unknown(KEYS)),
        }
        Ok(())
    }

    fn connection(&mut self, name: &str, tree: &Tree) -> Connection {
        let mut connection = blank(name);
        let mut times = Times::default();
        for option in options(tree) {
            let result = self.connection_option(option, &mut connection, &mut times);
            self.keep(result);
        }
        if times.reauth == Some(Duration::ZERO) && times.rekey.is_none() {
            self.warnings.push(
                Diagnostic::warning(
                    "never-rekeyed",
                    "`reauth_time = 0` without `rekey_time` switches both off",
                )
                .key("reauth_time")
                .help("leave `reauth_time` out to have the default, rekeying every 4 hours"),
            );
        }
        (
            connection.reauth_time,
            connection.rekey_time,
            connection.over_time,
            connection.rand_time,
        ) = times.complete();
        if connection.proposals.is_empty() {
            connection.proposals = default_proposals(ProtocolId::Ike);
        }
        for (entry, section) in tree.sections() {
            let lower = entry.name.to_ascii_lowercase();
            if lower == "children" {
                self.within("children", |decoder| {
                    decoder.children(&mut connection, section)
                });
            } else if lower.starts_with("local") || lower.starts_with("remote") {
                let local = lower.starts_with("local");
                let round = self.within(&entry.name, |decoder| {
                    decoder.auth_round(&entry.name, section, local)
                });
                let rounds = if local {
                    &mut connection.local
                } else {
                    &mut connection.remote
                };
                rounds.push(round);
                if rounds.len() == 2 {
                    self.keep(Err(Diagnostic::error(
                        "unsupported",
                        format!(
                            "`{}`: more than one round of authentication is not supported",
                            entry.name
                        ),
                    )
                    .key(&entry.name)
                    .at(entry.location.as_ref())));
                }
            } else {
                self.keep(Err(Diagnostic::error(
                    "unknown-section",
                    format!("`{}` is no section of a connection", entry.name),
                )
                .stock(format!("invalid section: {}", entry.name))
                .key(&entry.name)
                .help_opt(suggest(&entry.name, ["local", "remote", "children"]))
                .at(entry.location.as_ref())));
            }
        }
        if connection.local.is_empty() {
            connection.local.push(blank_round("local", true));
        }
        if connection.remote.is_empty() {
            connection.remote.push(blank_round("remote", false));
        }
        // Ten thousand of them are held for as long as the daemon runs, and lists of one entry
        // begin with room for four.
        connection.local_addrs.shrink_to_fit();
        connection.remote_addrs.shrink_to_fit();
        connection.proposals.shrink_to_fit();
        connection.local.shrink_to_fit();
        connection.remote.shrink_to_fit();
        connection.children.shrink_to_fit();
        connection
    }

    fn children(&mut self, connection: &mut Connection, tree: &Tree) {
        for option in options(tree) {
            self.keep(Err(option
                .unknown(&[])
                .help("`children` holds sections, one for each child")));
        }
        for (entry, section) in tree.sections() {
            let child = self.within(&entry.name, |decoder| decoder.child(&entry.name, section));
            connection.children.push(child);
        }
    }

    /// A certificate or key: its contents, or in a file the name of its file or its hex or base64.
    fn credential(
        &self,
        option: Opt<'_>,
        item: &[u8],
        subdirectory: &str,
    ) -> Result<CertSource, Diagnostic> {
        let Origin::File { dir, files } = self.origin else {
            check(option, item)?;
            return Ok(CertSource::Data(item.to_vec()));
        };
        let name =
            std::str::from_utf8(item).map_err(|_| option.invalid("a file name is not UTF-8"))?;
        if let Some(data) = crate::secret::inline(name) {
            let data = data.map_err(|reason| option.invalid(format!("`{name}`: {reason}")))?;
            check(option, &data)?;
            return Ok(CertSource::Data(data));
        }
        // An absolute path replaces the directory, as with swanctl.
        let path = dir.join(subdirectory).join(name);
        let data = files
            .read(&path)
            .map_err(|error| option.invalid(format!("cannot read {}: {error}", path.display())))?;
        check(option, &data)?;
        Ok(CertSource::Data(data))
    }
}

/// Refuses what is not a certificate where one is due. Public keys are checked where they are used.
fn check(option: Opt<'_>, data: &[u8]) -> Result<(), Diagnostic> {
    if option.name() != "pubkeys" && dn::certificate_subject(data).is_none() {
        return Err(option.invalid("this is not an X.509 certificate in DER or PEM"));
    }
    Ok(())
}

fn options(tree: &Tree) -> impl Iterator<Item = Opt<'_>> {
    tree.entries()
        .iter()
        .filter(|entry| !matches!(entry.item, Item::Section(_)))
        .map(|entry| Opt { entry })
}

fn printable(value: &Value) -> Option<&str> {
    value.text().filter(|text| is_printable(text))
}

fn is_printable(text: &str) -> bool {
    text.bytes().all(|octet| (0x20..0x7f).contains(&octet))
}

/// The IKE SA's times as given.
#[derive(Clone, Copy, Default)]
struct Times {
    reauth: Option<Duration>,
    rekey: Option<Duration>,
    over: Option<Duration>,
    rand: Option<Duration>,
}

impl Times {
    /// With their defaults: reauthentication, rekeying, margin, jitter.
    fn complete(self) -> (Duration, Duration, Duration, Duration) {
        let rekey = self.rekey.unwrap_or_else(|| match self.reauth {
            // Given at all, even as zero.
            Some(_) => Duration::ZERO,
            None => Duration::from_secs(4 * 3600),
        });
        let reauth = self.reauth.unwrap_or(Duration::ZERO);
        let longest = reauth.max(rekey);
        let over = self
            .over
            .unwrap_or_else(|| Duration::from_secs(longest.as_secs() / 10));
        let rand = self
            .rand
            .unwrap_or_else(|| over.min(Duration::from_secs(longest.as_secs() / 2)));
        (reauth, rekey, over, rand)
    }
}

/// The beginning of a value, for messages.
fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A connection with every default, and no children.
fn blank(name: &str) -> Connection {
    Connection {
        name: name.to_owned(),
        version: IkeVersion::Any,
        local_addrs: Vec::new(),
        remote_addrs: Vec::new(),
        local_port: 500,
        remote_port: 500,
        proposals: Vec::new(),
        vips: Vec::new(),
        dscp: 0,
        encap: false,
        mobike: true,
        dpd_delay: Duration::ZERO,
        dpd_timeout: Duration::ZERO,
        fragmentation: Fragmentation::Yes,
        childless: Childless::Allow,
        send_certreq: true,
        send_cert: SendCert::IfAsked,
        ppk_id: None,
        ppk_required: false,
        keyingtries: 1,
        unique: Unique::No,
        reauth_time: Duration::ZERO,
        rekey_time: Duration::ZERO,
        over_time: Duration::ZERO,
        rand_time: Duration::ZERO,
        pools: Vec::new(),
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        local: Vec::new(),
        remote: Vec::new(),
        children: Vec::new(),
    }
}

fn blank_round(section: &str, local: bool) -> AuthRound {
    AuthRound {
        section: section.to_owned(),
        round: 0,
        auth: if local {
            AuthMethod::Pubkey(PubkeyConstraints::default())
        } else {
            AuthMethod::Any
        },
        id: None,
        certs: Vec::new(),
        cacerts: Vec::new(),
        pubkeys: Vec::new(),
        ca_id: None,
        eap_id: None,
        groups: Vec::new(),
        cert_policy: Vec::new(),
        revocation: Revocation::Relaxed,
    }
}

#[cfg(test)]
mod tests;
