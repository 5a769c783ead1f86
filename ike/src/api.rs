// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What goes into an endpoint and what comes out.
//!
//! The calls of an endpoint fall into four classes, as in other sans-I/O protocol libraries:
//! getters (`&self`), `handle_*` (something happened: a datagram, a timer, an answer of the data
//! plane, a finished computation), commands (an operator or a policy wants something), and
//! `poll_*` (what to do next). After any call of the second or third class, drain
//! `poll_action` until it returns `None`, then arm a timer for `poll_timeout`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swanherd_config::model::Connection;
use swanherd_ipsec::plane::{Op, Outcome, PlaneError, PlaneEvent, SaId};
use swanherd_ipsec::proposal::{ChildSuite, IkeSuite};
use swanherd_ipsec::{Identity, TrafficSelector};

use crate::credentials::Credentials;

/// Both clocks at one moment: the monotonic one drives timers, the wall clock certificate validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Monotonic.
    pub instant: Instant,
    /// Seconds since the Unix epoch.
    pub unix: u64,
}

impl Now {
    /// The moment `by` later.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self {
            instant: self.instant + by,
            unix: self.unix + by.as_secs(),
        }
    }
}

/// A UDP datagram with an IKE message; the non-ESP marker of port 4500 is already stripped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Own address and port that it was sent to.
    pub local: SocketAddr,
    /// Peer's address and port that it came from.
    pub remote: SocketAddr,
    /// The IKE message.
    pub payload: Vec<u8>,
}

/// A datagram to send. The shell adds the non-ESP marker when `local` has the NAT-T port, or when
/// `remote` has a port other than 500.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Own address and port. An unspecified address leaves the choice to the kernel's routing.
    pub local: SocketAddr,
    /// Peer.
    pub remote: SocketAddr,
    /// The IKE message, or the single octet 0xff of a NAT keepalive (sent without marker).
    pub payload: Vec<u8>,
    /// DSCP for the IP header.
    pub dscp: u8,
    /// Whether this is a NAT keepalive rather than an IKE message.
    pub keepalive: bool,
}

/// Names an IKE SA for as long as the daemon runs: the `uniqueid` of VICI.
pub type IkeSaId = u32;
/// Names a CHILD SA for as long as the daemon runs: the `uniqueid` of VICI.
pub type ChildSaId = u32;
/// Correlates an [`Action`] with its answer.
pub type Token = u64;
/// Correlates a command with its [`Event::CommandDone`].
pub type CommandId = u64;

/// An address of this host that packets can be sent from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAddress {
    /// The address.
    pub addr: IpAddr,
    /// Names the link that has it.
    pub link: u32,
    /// Whether routes lead over that link to beyond what is directly connected to it.
    pub routed: bool,
}

/// Whatever changes an endpoint, as one value: what [`crate::endpoint::Endpoint::handle`] takes.
#[derive(Debug)]
pub enum Input {
    /// A datagram has arrived on an IKE port.
    Datagram(Datagram),
    /// Time has passed.
    Timeout,
    /// The data plane has answered [`Action::Plane`].
    Plane(Token, PlaneAnswer),
    /// The [`Job`] of [`Action::Compute`] is done.
    Computed(Token, Computed),
    /// The name of [`Action::Resolve`] has these addresses.
    Resolved(Token, Vec<IpAddr>),
    /// The source address that [`Action::Source`] asked for; `None` without a route.
    Source(Token, Option<IpAddr>),
    /// How long ago a packet was last seen on the SAs of [`Action::Usage`]; `None` if none ever was.
    Usage(Token, Option<Duration>),
    /// The data plane reports something on its own.
    PlaneEvent(PlaneEvent),
    /// All addresses of this host that packets can be sent from.
    Addresses(Vec<HostAddress>),
    /// The host refused to send this, because it is too long.
    TooLong(Transmit),
    /// Load a connection, or replace the one of that name.
    Load(ConnectionRef),
    /// Unload a connection.
    Unload(String),
    /// Replace all credentials.
    Credentials(Arc<Credentials>),
    /// Replace the settings.
    Settings(Box<Settings>),
    /// An operator wants something.
    Command(CommandId, Command),
    /// Nobody waits for that command any more.
    Cancel(CommandId),
    /// Delete everything and refuse what is new.
    Shutdown,
}

/// What the endpoint wants done.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub enum Action {
    /// Send a datagram.
    Transmit(Transmit),
    /// Apply an operation to the data plane, in order; answer with `handle_plane`.
    Plane(Token, Op),
    /// Run an expensive computation anywhere; answer with `handle_computed`.
    Compute(Token, Job),
    /// Resolve a host name (of `local_addrs` or `remote_addrs`) and answer with `handle_resolved`.
    Resolve(Token, String),
    /// Find the source address that the host would use towards `remote`; answer with
    /// `handle_source`.
    Source(Token, IpAddr),
    /// Find out when these SAs last carried a packet; answer with `handle_usage`, but not before
    /// that is known.
    Usage(Token, Vec<SaId>),
    /// Something to tell the world.
    Event(Event),
}

/// An answer of the data plane to [`Action::Plane`].
pub type PlaneAnswer = Result<Outcome, PlaneError>;

/// What the world is told. Order is the order in which things happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// An IKE SA was established or went away. `up = false` is also raised for one that never
    /// was established.
    IkeUpDown {
        /// Established.
        up: bool,
        /// State at that moment, children included.
        sa: Box<IkeSaInfo>,
    },
    /// An IKE SA replaced another.
    IkeRekey {
        /// Before.
        old: Box<IkeSaInfo>,
        /// After.
        new: Box<IkeSaInfo>,
    },
    /// The addresses of an IKE SA are about to change.
    IkeUpdate {
        /// Before.
        sa: Box<IkeSaInfo>,
        /// New own address.
        local: SocketAddr,
        /// New peer address.
        remote: SocketAddr,
    },
    /// A CHILD SA was installed or went away (but not for rekeys).
    ChildUpDown {
        /// Installed.
        up: bool,
        /// Its IKE SA, holding only this child.
        sa: Box<IkeSaInfo>,
    },
    /// A CHILD SA replaced another.
    ChildRekey {
        /// Their IKE SA, without children.
        sa: Box<IkeSaInfo>,
        /// Before.
        old: Box<ChildSaInfo>,
        /// After.
        new: Box<ChildSaInfo>,
    },
    /// A line for the log, and for the clients that wait for `command`.
    Log(LogLine),
    /// Something that deserves an operator's attention; `kind` is VICI's alert type.
    Alert {
        /// VICI's name of the alert.
        kind: &'static str,
        /// The IKE SA, if there is one.
        sa: Option<Box<IkeSaInfo>>,
    },
    /// A command ended.
    CommandDone {
        /// Which.
        id: CommandId,
        /// How; the text is what the operator is shown.
        result: Result<(), String>,
    },
    /// An attempt failed or an SA was lost; what `status` and metrics show as the last error.
    Failure {
        /// Connection, if known by then.
        connection: Option<String>,
        /// Child of it, if it is not about the IKE SA.
        child: Option<String>,
        /// Why, as a metric label.
        reason: FailureReason,
        /// Why, for people.
        text: String,
    },
    /// When the next attempt to bring up a child is made has changed.
    NextAttempt {
        /// Connection.
        connection: String,
        /// Child.
        child: String,
        /// When; `None` if none is planned any more.
        at: Option<Instant>,
    },
    /// One of the per-connection counters went up.
    Counter {
        /// Connection, if known by then.
        connection: Option<String>,
        /// Which.
        counter: Counter,
    },
    /// An IKE SA, or one of its children, changed in a way that listings show.
    Changed(IkeSaId),
    /// An IKE SA is gone from listings.
    Gone(IkeSaId),
}

/// A log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Subsystem, as VICI names them.
    pub group: LogGroup,
    /// 0 is always shown; 1 is the default; 2 and above is detail.
    pub level: u8,
    /// IKE SA that it is about.
    pub ike_sa: Option<(String, IkeSaId)>,
    /// The text, in our own words.
    pub message: String,
}

/// Log groups of VICI that IKE speaks in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogGroup {
    /// IKE SA management across SAs.
    Mgr,
    /// IKE SA.
    Ike,
    /// CHILD SA.
    Chd,
    /// Configuration selection.
    Cfg,
    /// Data plane.
    Knl,
    /// Network.
    Net,
    /// Message encoding.
    Enc,
    /// Background work.
    Job,
    /// Certificates.
    Lib,
}

/// Counters of VICI's `get-counters`, and the reasons that metrics label failures with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Counter {
    /// `ike-rekey-init`
    IkeRekeyInit,
    /// `ike-rekey-resp`
    IkeRekeyResp,
    /// `child-rekey`
    ChildRekey,
    /// `invalid`: a message with invalid types, lengths or syntax.
    Invalid,
    /// `invalid-spi`: a message for an IKE SPI that does not exist.
    InvalidSpi,
    /// `ike-init-in-req` and the like: exchange, direction and kind of a message.
    Message {
        /// IKE_SA_INIT, IKE_AUTH, CREATE_CHILD_SA or INFORMATIONAL.
        exchange: Exchange,
        /// Received rather than sent.
        inbound: bool,
        /// Response rather than request.
        response: bool,
    },
    /// Retransmission of a request of ours.
    Retransmit,
    /// A request of the peer's was received again and answered again.
    RetransmitReceived,
    /// The peer did not answer; all retransmissions are used up.
    PeerTimeout,
    /// An attempt failed or an SA was lost, by reason.
    Failure(FailureReason),
    /// A message was dropped before an SA existed for it.
    Dropped(DropReason),
    /// An answer without an SA was due and not sent, because too many were.
    AnswerWithheld,
    /// A packet asked for a CHILD SA.
    Acquire(AcquireFate),
}

/// What became of a packet's wish for a CHILD SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AcquireFate {
    /// A negotiation was started.
    Started,
    /// The CHILD SA was there, or being negotiated, or could not be had a moment ago.
    Coalesced,
    /// Nobody knows the policy, or the packet does not tell what is needed to serve it.
    Ignored,
}

/// Exchanges (RFC 7296).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Exchange {
    /// IKE_SA_INIT
    IkeSaInit,
    /// IKE_AUTH
    IkeAuth,
    /// CREATE_CHILD_SA
    CreateChildSa,
    /// INFORMATIONAL
    Informational,
}

/// Why an SA was not established or was lost: the `reason` label of metrics and the last error in
/// `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureReason {
    /// No answer.
    Timeout,
    /// NO_PROPOSAL_CHOSEN for the IKE SA.
    IkeProposalMismatch,
    /// NO_PROPOSAL_CHOSEN for a CHILD SA.
    ChildProposalMismatch,
    /// TS_UNACCEPTABLE.
    SelectorMismatch,
    /// AUTHENTICATION_FAILED from the peer: it does not accept us.
    LocalAuthFailed,
    /// The peer's AUTH, identity or certificate was not acceptable.
    PeerAuthFailed,
    /// No connection matches the peer's request.
    NoConfig,
    /// The data plane refused.
    DataPlane,
    /// The peer broke the protocol.
    PeerMisbehaved,
    /// The peer answered with an error notify not listed here.
    PeerError,
    /// The peer deleted it.
    PeerDeleted,
    /// An operator or a reload ended it.
    LocalDeleted,
    /// A hard lifetime was reached.
    Expired,
    /// No secret, certificate or key to authenticate with.
    MissingCredentials,
    /// A name could not be resolved, or no route leads to the peer.
    Unreachable,
    /// The peer or we do not support something that is needed.
    Unsupported,
    /// Limits of this host.
    Resources,
    /// Another IKE SA with the same peer took its place.
    Replaced,
    /// Two hosts claim one identity.
    IdentityConflict,
}

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// Not an IKE message.
    Malformed,
    /// Half-open limit of all peers.
    HalfOpenTotal,
    /// Half-open limit of one address.
    HalfOpenPerAddress,
    /// A cookie was demanded.
    CookieDemanded,
    /// IKEv1 or a version above 2.
    Version,
    /// IKE_SA_INIT that no connection accepts.
    NoConfig,
}

/// State of an IKE SA as VICI names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum IkeState {
    /// `CREATED`
    Created,
    /// `CONNECTING`
    Connecting,
    /// `ESTABLISHED`
    Established,
    /// `REKEYING`
    Rekeying,
    /// `REKEYED`
    Rekeyed,
    /// `DELETING`
    Deleting,
    /// `DESTROYING`
    Destroying,
}

/// State of a CHILD SA as VICI names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChildState {
    /// `CREATED`
    Created,
    /// `INSTALLING`
    Installing,
    /// `INSTALLED`
    Installed,
    /// `UPDATING`
    Updating,
    /// `REKEYING`
    Rekeying,
    /// `REKEYED`
    Rekeyed,
    /// `DELETING`
    Deleting,
    /// `DELETED`
    Deleted,
}

/// One IKE SA as listings show it. Moments are monotonic; the reader turns them into ages.
#[derive(Clone, Debug)]
pub struct IkeSaInfo {
    /// `uniqueid`.
    pub id: IkeSaId,
    /// Connection; `None` until one is chosen.
    pub connection: Option<String>,
    /// State.
    pub state: IkeState,
    /// Own address and port.
    pub local: SocketAddr,
    /// Peer's address and port.
    pub remote: SocketAddr,
    /// Own identity, once known.
    pub local_id: Identity,
    /// Peer's identity, once known.
    pub remote_id: Identity,
    /// Whether this side initiated.
    pub initiator: bool,
    /// Initiator's SPI.
    pub spi_i: u64,
    /// Responder's SPI.
    pub spi_r: u64,
    /// This side is behind a NAT.
    pub nat_local: bool,
    /// The peer is behind a NAT.
    pub nat_remote: bool,
    /// NAT was claimed to force encapsulation.
    pub nat_fake: bool,
    /// Algorithms, once agreed.
    pub suite: Option<IkeSuite>,
    /// Virtual addresses that the peer gave to this side (RFC 7296 section 3.15).
    pub local_vips: Vec<IpAddr>,
    /// When it was established.
    pub established: Option<Instant>,
    /// When it will be rekeyed.
    pub rekey_at: Option<Instant>,
    /// When it will be reauthenticated.
    pub reauth_at: Option<Instant>,
    /// VICI's names of what waits to be done.
    pub tasks_queued: Vec<&'static str>,
    /// VICI's names of the exchange in flight.
    pub tasks_active: Vec<&'static str>,
    /// VICI's names of what the peer has started.
    pub tasks_passive: Vec<&'static str>,
    /// Names of the children that are to be made, the one that is being made along with the IKE SA
    /// included.
    pub wanted: Vec<String>,
    /// Children, by id.
    pub children: BTreeMap<ChildSaId, ChildSaInfo>,
}

/// One CHILD SA as listings show it.
#[derive(Clone, Debug)]
pub struct ChildSaInfo {
    /// `uniqueid`.
    pub id: ChildSaId,
    /// Child's name in the configuration.
    pub name: String,
    /// Request id.
    pub reqid: u32,
    /// State.
    pub state: ChildState,
    /// Mode.
    pub mode: swanherd_ipsec::plane::Mode,
    /// UDP encapsulation.
    pub encap: bool,
    /// Inbound SA, once its SPI is allocated.
    pub inbound: Option<SaId>,
    /// Outbound SA, once the peer's SPI is known.
    pub outbound: Option<SaId>,
    /// Algorithms, once agreed.
    pub suite: Option<ChildSuite>,
    /// XFRM interface ids.
    pub if_id: (u32, u32),
    /// Marks.
    pub mark_in: Option<swanherd_ipsec::plane::Mark>,
    /// Marks.
    pub mark_out: Option<swanherd_ipsec::plane::Mark>,
    /// Agreed selectors of this side.
    pub local_ts: Vec<TrafficSelector>,
    /// Agreed selectors of the peer.
    pub remote_ts: Vec<TrafficSelector>,
    /// When it was installed.
    pub installed: Option<Instant>,
    /// When it will be rekeyed.
    pub rekey_at: Option<Instant>,
    /// When it ends.
    pub expires_at: Option<Instant>,
}

/// Settings of an endpoint, with strongSwan's defaults; but half-open SAs are limited.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// `charon.port`.
    pub port: u16,
    /// `charon.port_nat_t`.
    pub port_nat_t: u16,
    /// `charon.retransmit_tries`.
    pub retransmit_tries: u32,
    /// `charon.retransmit_timeout`.
    pub retransmit_timeout: Duration,
    /// `charon.retransmit_base`, in thousandths.
    pub retransmit_base_milli: u32,
    /// `charon.retransmit_jitter`, in percent.
    pub retransmit_jitter: u32,
    /// `charon.retransmit_limit`; zero is none.
    pub retransmit_limit: Duration,
    /// `charon.half_open_timeout`.
    pub half_open_timeout: Duration,
    /// `charon.cookie_threshold`; zero is never.
    pub cookie_threshold: u32,
    /// `charon.cookie_threshold_ip`; zero is never.
    pub cookie_threshold_ip: u32,
    /// `charon.block_threshold`; zero is never. Configured peers return a cookie instead.
    pub block_threshold: u32,
    /// `charon.init_limit_half_open`; zero is none. Configured peers return a cookie instead.
    pub init_limit_half_open: u32,
    /// `charon.ikesa_limit`; zero is none.
    pub ikesa_limit: u32,
    /// `charon.keep_alive`; zero is off.
    pub keep_alive: Duration,
    /// `charon.fragment_size`, of the IP packet.
    pub fragment_size: u32,
    /// `charon.max_packet`.
    pub max_packet: u32,
    /// `charon.delete_rekeyed_delay`.
    pub delete_rekeyed_delay: Duration,
    /// `charon.reuse_ikesa`.
    pub reuse_ikesa: bool,
    /// `charon.close_ike_on_child_failure`.
    pub close_ike_on_child_failure: bool,
    /// `charon.make_before_break`.
    pub make_before_break: bool,
    /// `charon.prefer_configured_proposals`.
    pub prefer_configured_proposals: bool,
    /// `charon.signature_authentication` (RFC 7427).
    pub signature_authentication: bool,
    /// `charon.rsa_pss`.
    pub rsa_pss: bool,
    /// `charon.replay_window`.
    pub replay_window: u32,
    /// `charon.reqid_base`.
    pub reqid_base: u32,
    /// `charon.follow_redirects` (RFC 5685).
    pub follow_redirects: bool,
    /// The data plane can only do UDP encapsulation, so NAT is claimed to every peer.
    pub force_encap: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            port: 500,
            port_nat_t: 4500,
            retransmit_tries: 5,
            retransmit_timeout: Duration::from_secs(4),
            retransmit_base_milli: 1800,
            retransmit_jitter: 0,
            retransmit_limit: Duration::ZERO,
            half_open_timeout: Duration::from_secs(30),
            cookie_threshold: 30,
            cookie_threshold_ip: 3,
            block_threshold: 5,
            init_limit_half_open: 4096,
            ikesa_limit: 0,
            keep_alive: Duration::from_secs(20),
            fragment_size: 1280,
            max_packet: 10_000,
            delete_rekeyed_delay: Duration::from_secs(5),
            reuse_ikesa: true,
            close_ike_on_child_failure: false,
            make_before_break: true,
            prefer_configured_proposals: true,
            signature_authentication: true,
            rsa_pss: false,
            replay_window: 32,
            reqid_base: 1,
            follow_redirects: true,
            force_encap: false,
        }
    }
}

/// What an operator asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Bring up a child, or an IKE SA without children.
    Initiate {
        /// Connection; `None` takes the first that has such a child.
        connection: Option<String>,
        /// Child.
        child: Option<String>,
        /// Refuse when the half-open limits are reached.
        respect_limits: bool,
    },
    /// Take down what matches.
    Terminate {
        /// What.
        selector: Selector,
        /// Do not wait for the peer's answer to the delete of an IKE SA.
        force: bool,
    },
    /// Give up the attempts to bring up what matches by name; what is up stays. Never fails.
    Abandon {
        /// What.
        selector: Selector,
    },
    /// Install the trap of a child, or its policies if it is a shunt.
    Install {
        /// Connection; `None` takes the first that has such a child.
        connection: Option<String>,
        /// Child.
        child: String,
    },
    /// Remove the trap or shunt of a child.
    Uninstall {
        /// Connection; `None` takes the first whose child of that name has one.
        connection: Option<String>,
        /// Child.
        child: String,
    },
    /// Rekey what matches.
    Rekey {
        /// What.
        selector: Selector,
        /// Reauthenticate rather than rekey.
        reauth: bool,
    },
}

/// Names SAs by configuration names or ids; what is `None` does not restrict. If `child` or
/// `child_id` is given, CHILD SAs are meant, else IKE SAs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selector {
    /// Connection name.
    pub ike: Option<String>,
    /// Child name.
    pub child: Option<String>,
    /// IKE SA.
    pub ike_id: Option<IkeSaId>,
    /// CHILD SA.
    pub child_id: Option<ChildSaId>,
}

/// A shared definition; endpoints keep old ones alive for SAs that still use them.
pub type ConnectionRef = Arc<Connection>;

pub use crate::compute::{Computed, Job};
