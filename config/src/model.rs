// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Typed, validated tunnel definitions: what `connections.<conn>` means once it has been read.
//!
//! Option names follow swanctl.conf. A value of these types is complete: defaults are applied and
//! every option that is stored has a meaning. Times are whole seconds as operators write them.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
pub use swanherd_ipsec::plane::HwOffload;
use swanherd_ipsec::plane::{Mark, Mode};
use swanherd_ipsec::{Proposal, Secret, TrafficSelector};

use crate::identity::IdentityPattern;

/// One connection: how to negotiate an IKE SA with a peer, and the children to run over it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Section name.
    pub name: String,
    /// `version`.
    pub version: IkeVersion,
    /// `local_addrs`. Empty is `%any`.
    pub local_addrs: Vec<HostSpec>,
    /// `remote_addrs`. Empty is `%any`.
    pub remote_addrs: Vec<HostSpec>,
    /// `local_port`.
    pub local_port: u16,
    /// `remote_port`.
    pub remote_port: u16,
    /// `proposals`: what to offer and accept for the IKE SA, in order of preference.
    pub proposals: Vec<Proposal>,
    /// `vips`: virtual addresses to request.
    pub vips: Vec<IpAddr>,
    /// `dscp` of IKE packets.
    pub dscp: u8,
    /// `encap`: force UDP encapsulation.
    pub encap: bool,
    /// `mobike`.
    pub mobike: bool,
    /// `dpd_delay`; zero is off.
    pub dpd_delay: Duration,
    /// `dpd_timeout` (IKEv1 only, kept for listings).
    pub dpd_timeout: Duration,
    /// `fragmentation`.
    pub fragmentation: Fragmentation,
    /// `childless`.
    pub childless: Childless,
    /// `send_certreq`.
    pub send_certreq: bool,
    /// `send_cert`.
    pub send_cert: SendCert,
    /// `ppk_id`.
    pub ppk_id: Option<IdentityPattern>,
    /// `ppk_required`.
    pub ppk_required: bool,
    /// `keyingtries`; zero is for ever.
    pub keyingtries: u32,
    /// `unique`.
    pub unique: Unique,
    /// `reauth_time`; zero is off.
    pub reauth_time: Duration,
    /// `rekey_time`; zero is off.
    pub rekey_time: Duration,
    /// `over_time`.
    pub over_time: Duration,
    /// `rand_time`.
    pub rand_time: Duration,
    /// `pools`.
    pub pools: Vec<String>,
    /// `if_id_in`.
    pub if_id_in: IfId,
    /// `if_id_out`.
    pub if_id_out: IfId,
    /// The `local*` round. Never empty.
    pub local: Vec<AuthRound>,
    /// The `remote*` round. Never empty.
    pub remote: Vec<AuthRound>,
    /// `children`, in file order.
    pub children: Vec<Child>,
}

/// `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum IkeVersion {
    /// Accepts either, initiates IKEv2. Printed as `IKEv1/2`.
    Any,
    /// IKEv1 only: never negotiates. The decoder refuses it; recordings may have it.
    V1,
    /// IKEv2 only.
    V2,
}

/// An entry of `local_addrs` or `remote_addrs`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HostSpec {
    /// One address.
    Addr(IpAddr),
    /// A network: matches, but is not initiated to.
    Network(IpAddr, u8),
    /// A range, inclusive: matches, but is not initiated to.
    Range(IpAddr, IpAddr),
    /// A DNS name, resolved at each attempt.
    Name(String),
    /// `%any`, `%any4`, `%any6`: matches everything (of one family if `Some(is_v4)`).
    Any(Option<bool>),
}

/// `fragmentation` (RFC 7383).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fragmentation {
    /// Announce and use if the peer announces it too.
    Yes,
    /// Announce, but do not send fragments.
    Accept,
    /// Send fragments without announcement.
    Force,
    /// Neither announce nor send.
    No,
}

/// `childless` (RFC 6023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Childless {
    /// As responder only.
    Allow,
    /// As initiator too, if the peer supports it.
    Prefer,
    /// Refuse peers that do not support it.
    Force,
    /// Never.
    Never,
}

/// `send_cert`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SendCert {
    /// Always.
    Always,
    /// Never.
    Never,
    /// If a certificate request was received.
    IfAsked,
}

/// `unique`: what to do about a second IKE SA with the same peer identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unique {
    /// Never replace, not even on INITIAL_CONTACT.
    Never,
    /// Replace on INITIAL_CONTACT only.
    No,
    /// Replace the old one.
    Replace,
    /// Keep the old one and refuse the new.
    Keep,
}

/// `if_id_in`, `if_id_out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IfId {
    /// None (0).
    None,
    /// Fixed.
    Id(u32),
    /// `%unique`: one fresh id per CHILD SA (per IKE SA at connection level).
    Unique,
    /// `%unique-dir`: one fresh id per direction.
    UniqueDir,
}

/// `mark_in`, `mark_out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MarkSpec {
    /// None.
    None,
    /// Value and mask.
    Mark(Mark),
    /// `%unique`, with a mask.
    Unique(u32),
    /// `%unique-dir`, with a mask.
    UniqueDir(u32),
    /// `%same` (for `set_mark_*` only), with a mask.
    Same(u32),
}

/// One `local*` or `remote*` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthRound {
    /// Section name.
    pub section: String,
    /// `round`.
    pub round: u32,
    /// `auth`.
    pub auth: AuthMethod,
    /// `id`. `None` is not given: on the local side the certificate's subject or the address.
    pub id: Option<IdentityPattern>,
    /// `certs` and `cert*` sections: DER, contents not names.
    pub certs: Vec<CertSource>,
    /// `cacerts` and `cacert*` sections.
    pub cacerts: Vec<CertSource>,
    /// `pubkeys`.
    pub pubkeys: Vec<CertSource>,
    /// `ca_id`.
    pub ca_id: Option<IdentityPattern>,
    /// `eap_id`.
    pub eap_id: Option<IdentityPattern>,
    /// `groups`.
    pub groups: Vec<String>,
    /// `cert_policy`.
    pub cert_policy: Vec<String>,
    /// `revocation`.
    pub revocation: Revocation,
}

/// Where a certificate or public key comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CertSource {
    /// The file's contents or an inline value (DER or PEM as found).
    Data(#[serde(with = "swanherd_ipsec::hex")] Vec<u8>),
    /// A path that the daemon reads itself (`cert*.file`).
    File(String),
}

/// `auth`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AuthMethod {
    /// `psk`.
    Psk,
    /// `pubkey`, or a key type with constraints.
    Pubkey(PubkeyConstraints),
    /// `eap` and friends: never negotiates. The decoder refuses it; recordings may have it.
    Eap(String),
    /// Nothing given on the remote side: any method is accepted.
    Any,
}

/// Constraints in `auth`, such as `rsa-2048-sha256` or `ike:ecdsa-sha384`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PubkeyConstraints {
    /// The keyword as written, for listings and error texts.
    pub text: String,
    /// Restrict to one key type: `rsa`, `ecdsa`, `ed25519`, `ed448`.
    pub key_type: Option<KeyType>,
    /// Minimum key size in bits.
    pub min_bits: Option<u16>,
    /// Hashes allowed in signatures, in order; empty allows all.
    pub hashes: Vec<SignatureHash>,
    /// RSA signatures in IKE must be RSASSA-PSS: `rsa/pss`.
    pub rsa_pss: bool,
    /// The constraints hold for the IKE signature only, not within the certificate path: `ike:`.
    pub ike_only: bool,
}

/// Type of a public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeyType {
    /// RSA.
    Rsa,
    /// ECDSA.
    Ecdsa,
    /// Ed25519.
    Ed25519,
    /// Ed448.
    Ed448,
}

/// Hash of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SignatureHash {
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
    /// Built into the scheme (EdDSA).
    Identity,
}

/// `revocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Revocation {
    /// A valid CRL or OCSP answer is required.
    Strict,
    /// Required if the certificate names a URI.
    IfUri,
    /// Fails only if known to be revoked.
    Relaxed,
}

/// One child: the selectors and suites of a CHILD SA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Child {
    /// Section name.
    pub name: String,
    /// `esp_proposals`.
    pub proposals: Vec<Proposal>,
    /// `local_ts`.
    pub local_ts: Vec<SelectorSpec>,
    /// `remote_ts`.
    pub remote_ts: Vec<SelectorSpec>,
    /// `rekey_time`; zero is off.
    pub rekey_time: Duration,
    /// `life_time`; zero is without limit.
    pub life_time: Duration,
    /// `rand_time`.
    pub rand_time: Duration,
    /// `rekey_bytes`; zero is off.
    pub rekey_bytes: u64,
    /// `life_bytes`; zero is without limit.
    pub life_bytes: u64,
    /// `rand_bytes`.
    pub rand_bytes: u64,
    /// `rekey_packets`; zero is off.
    pub rekey_packets: u64,
    /// `life_packets`; zero is without limit.
    pub life_packets: u64,
    /// `rand_packets`.
    pub rand_packets: u64,
    /// `updown`.
    pub updown: Option<String>,
    /// `hostaccess`.
    pub hostaccess: bool,
    /// `mode`.
    pub mode: ChildMode,
    /// `policies`.
    pub policies: bool,
    /// `policies_fwd_out`.
    pub policies_fwd_out: bool,
    /// `dpd_action`.
    pub dpd_action: Action,
    /// `start_action`.
    pub start_action: Action,
    /// `close_action`.
    pub close_action: Action,
    /// `inactivity`; zero is off.
    pub inactivity: Duration,
    /// `reqid`; zero is allocated.
    pub reqid: u32,
    /// `priority`; zero is computed.
    pub priority: u32,
    /// `interface`.
    pub interface: Option<String>,
    /// `mark_in`.
    pub mark_in: MarkSpec,
    /// `mark_in_sa`.
    pub mark_in_sa: bool,
    /// `mark_out`.
    pub mark_out: MarkSpec,
    /// `set_mark_in`.
    pub set_mark_in: MarkSpec,
    /// `set_mark_out`.
    pub set_mark_out: MarkSpec,
    /// `if_id_in`; [`IfId::None`] means the connection's.
    pub if_id_in: IfId,
    /// `if_id_out`; [`IfId::None`] means the connection's.
    pub if_id_out: IfId,
    /// `label`.
    pub label: Option<String>,
    /// `tfc_padding`; `None` is `mtu`.
    pub tfc_padding: Option<u32>,
    /// `replay_window`; `None` takes the daemon's setting.
    pub replay_window: Option<u32>,
    /// `hw_offload`.
    pub hw_offload: HwOffload,
    /// `copy_df`.
    pub copy_df: bool,
    /// `copy_ecn`.
    pub copy_ecn: bool,
    /// `copy_dscp`.
    pub copy_dscp: CopyDscp,
}

/// A traffic selector as configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SelectorSpec {
    /// Fixed.
    Fixed(TrafficSelector),
    /// `dynamic`: the host's or peer's outer or virtual address, with protocol and ports.
    Dynamic {
        /// IP protocol; 0 is any.
        protocol: u8,
        /// First port.
        start_port: u16,
        /// Last port.
        end_port: u16,
    },
}

/// `mode` of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChildMode {
    /// Negotiated, with this encapsulation.
    Ipsec(Mode),
    /// Transport mode with the proxy hack for address translation.
    TransportProxy,
    /// `pass`: a shunt that lets traffic through.
    Pass,
    /// `drop`: a shunt that discards.
    Drop,
}

/// `start_action`, `dpd_action`, `close_action`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// Install a trap policy.
    pub trap: bool,
    /// Negotiate at once.
    pub start: bool,
}

/// `copy_dscp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyDscp {
    /// Inner to outer only.
    Out,
    /// Outer to inner only.
    In,
    /// Both ways.
    Yes,
    /// Neither way.
    No,
}

/// A shared secret (`secrets.ike*` or VICI `load-shared`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSecret {
    /// Section name, or the `id` of `load-shared`. `None` is anonymous.
    pub id: Option<String>,
    /// What it is for.
    pub kind: SharedKind,
    /// The octets.
    pub secret: Secret,
    /// Identities that it belongs to; empty is any.
    pub owners: Vec<IdentityPattern>,
}

/// Kind of a shared secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SharedKind {
    /// IKE pre-shared key.
    Ike,
    /// EAP or XAuth password.
    Eap,
    /// NT hash.
    Ntlm,
    /// Post-quantum pre-shared key (RFC 8784).
    Ppk,
}
