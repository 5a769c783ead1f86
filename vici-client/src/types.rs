// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon answers, typed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::message::Message;

/// One IKE SA of `list-sas`. Times are in seconds, from or to the moment of the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct IkeSa {
    /// Name of the connection; `(unnamed)` before one is chosen.
    pub name: String,
    /// Unique id.
    pub uniqueid: u32,
    /// IKE version.
    pub version: u8,
    /// State, such as `ESTABLISHED`.
    pub state: String,
    /// Own address.
    pub local_host: String,
    /// Own port.
    pub local_port: u16,
    /// Own identity.
    pub local_id: String,
    /// Peer's address.
    pub remote_host: String,
    /// Peer's port.
    pub remote_port: u16,
    /// Peer's identity.
    pub remote_id: String,
    /// Whether the daemon initiated it.
    pub initiator: bool,
    /// Initiator's SPI in hexadecimal.
    pub initiator_spi: String,
    /// Responder's SPI in hexadecimal.
    pub responder_spi: String,
    /// The daemon is behind a NAT.
    pub nat_local: bool,
    /// The peer is behind a NAT.
    pub nat_remote: bool,
    /// NAT was claimed.
    pub nat_fake: bool,
    /// Cipher.
    pub encr_alg: Option<String>,
    /// Its key length in bits.
    pub encr_keysize: Option<u16>,
    /// Integrity algorithm; absent with an AEAD.
    pub integ_alg: Option<String>,
    /// PRF.
    pub prf_alg: Option<String>,
    /// Key exchange method.
    pub dh_group: Option<String>,
    /// Since when it is established.
    pub established: Option<i64>,
    /// Until it is rekeyed.
    pub rekey_time: Option<i64>,
    /// Until it is reauthenticated.
    pub reauth_time: Option<i64>,
    /// Virtual addresses of the daemon's side.
    pub local_vips: Vec<String>,
    /// Virtual addresses of the peer.
    pub remote_vips: Vec<String>,
    /// What waits to be done.
    pub tasks_queued: Vec<String>,
    /// Exchanges in flight.
    pub tasks_active: Vec<String>,
    /// Exchanges of the peer's.
    pub tasks_passive: Vec<String>,
    /// Children, in the daemon's order.
    #[serde(
        rename(deserialize = "child-sas"),
        deserialize_with = "crate::de::values_in_order"
    )]
    pub children: Vec<ChildSa>,
}

/// One CHILD SA of `list-sas`. Counters are those of this SA pair, since its installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct ChildSa {
    /// Name in the configuration.
    pub name: String,
    /// Unique id.
    pub uniqueid: u32,
    /// Request id.
    pub reqid: u32,
    /// State, such as `INSTALLED`.
    pub state: String,
    /// Mode, such as `TUNNEL`.
    pub mode: String,
    /// Protocol.
    pub protocol: Option<String>,
    /// UDP encapsulation.
    pub encap: bool,
    /// SPI of received packets in hexadecimal.
    pub spi_in: Option<String>,
    /// SPI of sent packets in hexadecimal.
    pub spi_out: Option<String>,
    /// Cipher.
    pub encr_alg: Option<String>,
    /// Its key length in bits.
    pub encr_keysize: Option<u16>,
    /// Integrity algorithm; absent with an AEAD.
    pub integ_alg: Option<String>,
    /// Key exchange method of its own.
    pub dh_group: Option<String>,
    /// Extended sequence numbers.
    pub esn: bool,
    /// Octets received.
    pub bytes_in: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Seconds since the last packet was received.
    pub use_in: Option<u64>,
    /// Octets sent.
    pub bytes_out: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Seconds since the last packet was sent.
    pub use_out: Option<u64>,
    /// Until it is rekeyed.
    pub rekey_time: Option<i64>,
    /// Until it ends.
    pub life_time: Option<i64>,
    /// Since it is installed.
    pub install_time: Option<i64>,
    /// Selectors of the daemon's side.
    pub local_ts: Vec<String>,
    /// Selectors of the peer's side.
    pub remote_ts: Vec<String>,
}

/// Answer of `version`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Version {
    /// Name of the daemon.
    pub daemon: String,
    /// The strongSwan release that it is, or that it is compatible with.
    pub version: String,
    /// Operating system.
    pub sysname: String,
    /// Kernel release.
    pub release: String,
    /// Machine.
    pub machine: String,
    /// Version of swanherd; absent from other daemons.
    pub swanherd: Option<String>,
}

/// Answer of `stats`, as far as it is the same for every daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Stats {
    /// Since when the daemon runs.
    pub uptime: Uptime,
    /// IKE SAs.
    pub ikesas: IkeSaStats,
    /// Jobs that wait for their time.
    pub scheduled: u32,
    /// Loaded plugins.
    pub plugins: Vec<String>,
}

/// `uptime` of [`Stats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Uptime {
    /// For how long, for people.
    pub running: String,
    /// Since when, in local time.
    pub since: String,
}

/// `ikesas` of [`Stats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct IkeSaStats {
    /// All.
    pub total: u32,
    /// Half-open.
    pub half_open: u32,
}

/// A line of `control-log` or `log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all(deserialize = "kebab-case"), default)]
pub struct LogLine {
    /// Subsystem, such as `IKE`.
    pub group: String,
    /// Level.
    pub level: u8,
    /// Connection of the IKE SA that it is about.
    pub ikesa_name: Option<String>,
    /// Unique id of the IKE SA.
    pub ikesa_uniqueid: Option<u32>,
    /// The text.
    pub msg: String,
}

/// Counters of `get-counters` by connection; the empty name holds the global ones.
pub type Counters = BTreeMap<String, BTreeMap<String, u64>>;

/// Arguments of `list-sas`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListSas {
    /// Only IKE SAs of this connection.
    pub ike: Option<String>,
    /// Only the IKE SA of this id.
    pub ike_id: Option<u32>,
    /// Only children of this name.
    pub child: Option<String>,
    /// Only the child of this id.
    pub child_id: Option<u32>,
}

/// Names SAs for `terminate` and `rekey`; at least one field must be given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// IKE SAs of this connection.
    pub ike: Option<String>,
    /// CHILD SAs of this name.
    pub child: Option<String>,
    /// The IKE SA of this id.
    pub ike_id: Option<u32>,
    /// The CHILD SA of this id.
    pub child_id: Option<u32>,
}

impl Selector {
    pub(crate) fn to_message(&self) -> Message {
        let mut message = Message::new();
        for (name, value) in [("child", &self.child), ("ike", &self.ike)] {
            if let Some(value) = value {
                message.push(name, value);
            }
        }
        for (name, value) in [("child-id", self.child_id), ("ike-id", self.ike_id)] {
            if let Some(value) = value {
                message.push_display(name, value);
            }
        }
        message
    }
}

/// Arguments of `initiate`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Initiate {
    /// Child to bring up.
    pub child: Option<String>,
    /// Connection to bring up, or that the child belongs to.
    pub ike: Option<String>,
    /// How long the daemon waits, in milliseconds: 0 for ever, negative not at all.
    pub timeout_ms: i64,
    /// Most detailed level of log lines wanted; 1 is usual.
    pub log_level: Option<i8>,
}

/// Answer of `terminate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct Terminated {
    /// SAs that matched.
    pub matches: u32,
    /// SAs that were taken down.
    pub terminated: u32,
}
