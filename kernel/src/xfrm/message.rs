// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to the kernel's XFRM, and what its answers and dumps say.

use std::fmt;
use std::net::IpAddr;

use netlink_packet_core::{NetlinkSerializable, NlasIterator};
use netlink_packet_xfrm::policy::{
    DelGetMessage as PolicyIdMessage, ModifyMessage as PolicyMessage,
};
use netlink_packet_xfrm::state::{
    AllocSpiMessage, DelGetMessage as SaIdMessage, GetDumpMessage, ModifyMessage as SaMessage,
};
use netlink_packet_xfrm::{
    Address, EncapTmpl, IPPROTO_ESP, Id, LifetimeConfig, Mark as MarkAttr, ReplayEsn,
    UDP_ENCAP_ESPINUDP, UserOffloadDev, UserPolicyId, UserPolicyInfo, UserSaId, UserSaInfo,
    UserSpiInfo, UserTemplate, XFRM_INF, XFRM_MODE_BEET, XFRM_MODE_TRANSPORT, XFRM_MODE_TUNNEL,
    XFRM_OFFLOAD_INBOUND, XFRM_OFFLOAD_IPV6, XFRM_POLICY_ALLOW, XFRM_POLICY_BLOCK, XFRM_POLICY_FWD,
    XFRM_POLICY_IN, XFRM_POLICY_OUT, XFRM_SA_XFLAG_DONT_ENCAP_DSCP, XFRM_STATE_AF_UNSPEC,
    XFRM_STATE_DECAP_DSCP, XFRM_STATE_ESN, XFRM_STATE_NOECN, XFRM_STATE_NOPMTUDISC,
    XFRM_USER_POLICY_INFO_LEN, XFRM_USER_SA_INFO_LEN, XFRMA_IF_ID, XFRMA_LASTUSED, XFRMA_LTIME_VAL,
    XFRMA_MARK, XFRMA_OFFLOAD_DEV, XFRMA_POLICY_TYPE, XFRMA_REPLAY_ESN_VAL, XFRMA_REPLAY_VAL,
    XFRMA_SEC_CTX, XFRMA_TMPL, XfrmAttrs, XfrmMessage,
};
use swanherd_ipsec::plane::{
    Direction, Lifetime, Mark, Mode, PolicyAction, SaCounters, SaEntry, SaId,
};

use super::algorithm::{self, AlgorithmError};
use super::attribute::{SaDirection, XFRM_OFFLOAD_PACKET};
use super::selector::{address, family, host_selector};
use crate::reconcile::{InForce, PolicyKey};

/// A request that holds keys. It erases them when it goes, and it cannot be printed.
pub(super) struct KeyedMessage(XfrmMessage);

impl NetlinkSerializable for KeyedMessage {
    fn message_type(&self) -> u16 {
        self.0.message_type()
    }

    fn buffer_len(&self) -> usize {
        NetlinkSerializable::buffer_len(&self.0)
    }

    fn serialize(&self, buffer: &mut [u8]) {
        self.0.serialize(buffer);
    }
}

impl Drop for KeyedMessage {
    fn drop(&mut self) {
        if let XfrmMessage::AddSa(message) | XfrmMessage::UpdateSa(message) = &mut self.0 {
            algorithm::erase_keys(&mut message.nlas);
        }
    }
}

/// Counters and sequence numbers that an SA takes along when it is installed anew.
#[derive(Clone, Debug, Default)]
pub(super) struct CarriedState {
    attributes: Vec<XfrmAttrs>,
}

/// What an SA is installed with besides its entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SaOptions {
    /// The kernel knows directions of SAs, and is strict about what goes with each.
    pub(super) sa_dir: bool,
    /// Index of the interface that takes over, and whether it does all.
    pub(super) offload: Option<(u32, bool)>,
}

/// Reserves the inbound SPI `id`. With `sa_dir` the reservation has a direction, which the kernel
/// compares with that of the SA that replaces it.
pub(super) fn alloc_spi(src: IpAddr, id: SaId, reqid: u32, sa_dir: bool) -> XfrmMessage {
    let direction = sa_dir.then(|| SaDirection::In.into());
    XfrmMessage::AllocSpi(AllocSpiMessage {
        spi_info: spi_info(src, id, reqid, 0),
        nlas: direction.into_iter().collect(),
    })
}

/// Reserves an SPI with an interface id, which is in the answer of a kernel that knows them.
pub(super) fn probe_if_id(id: SaId) -> XfrmMessage {
    XfrmMessage::AllocSpi(AllocSpiMessage {
        spi_info: spi_info(id.dst, id, 0, 0),
        nlas: vec![XfrmAttrs::IfId(1)],
    })
}

/// Gives the SPI `id` to the placeholder that the kernel made when it asked for an SA: only by an
/// SPI can it be removed.
pub(super) fn name_placeholder(placeholder: &Placeholder, id: SaId) -> XfrmMessage {
    XfrmMessage::AllocSpi(AllocSpiMessage {
        spi_info: spi_info(placeholder.src, id, placeholder.reqid, placeholder.seq),
        nlas: placeholder.mark.map(mark).into_iter().collect(),
    })
}

/// What the kernel has in place of an SA that it has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placeholder {
    /// Request id of the policy that a packet met.
    pub(super) reqid: u32,
    /// Number of the question.
    pub(super) seq: u32,
    /// Outer source; unspecified if the policy does not say.
    pub(super) src: IpAddr,
    /// The peer.
    pub(super) dst: IpAddr,
    /// Mark of the policy.
    pub(super) mark: Option<Mark>,
}

fn spi_info(src: IpAddr, id: SaId, reqid: u32, seq: u32) -> UserSpiInfo {
    UserSpiInfo {
        info: UserSaInfo {
            id: Id {
                daddr: Address::from_ip(&id.dst),
                spi: 0,
                proto: IPPROTO_ESP,
            },
            saddr: Address::from_ip(&src),
            seq,
            reqid,
            family: family(id.dst),
            mode: XFRM_MODE_TUNNEL,
            ..UserSaInfo::default()
        },
        min: id.spi,
        max: id.spi,
    }
}

/// Whether an answer that describes an SA has an interface id.
pub(super) fn has_if_id(payload: &[u8]) -> bool {
    attributes(payload, XFRM_USER_SA_INFO_LEN).any(|(kind, _)| kind == XFRMA_IF_ID)
}

/// A harmless request that a kernel which knows directions of SAs refuses with `ERANGE`: it names
/// a direction that does not exist, and an SA that does not exist.
pub(super) fn probe_sa_dir() -> XfrmMessage {
    let nowhere = SaId {
        spi: 1,
        dst: std::net::Ipv4Addr::UNSPECIFIED.into(),
    };
    let mut message = sa_id_message(nowhere, None);
    message.nlas.push(SaDirection::Other(u8::MAX).into());
    XfrmMessage::DeleteSa(message)
}

/// Installs `entry`; with `update`, over a reserved SPI or an SA of the same name.
pub(super) fn install_sa(
    entry: &SaEntry,
    update: bool,
    carried: CarriedState,
    options: SaOptions,
) -> Result<KeyedMessage, AlgorithmError> {
    let outbound = entry.direction == Direction::Out;
    // Without a direction, the kernel ignores what does not apply.
    let may_out = !options.sa_dir || outbound;
    let mut flags = 0;
    // In the other modes an SA carries packets of the family of its selector alone.
    if entry.mode == Mode::Tunnel {
        flags |= XFRM_STATE_AF_UNSPEC;
    }
    for (wanted, flag) in [
        (!entry.copy_ecn, XFRM_STATE_NOECN),
        (!entry.copy_df && may_out, XFRM_STATE_NOPMTUDISC),
        (entry.copy_dscp_in && !outbound, XFRM_STATE_DECAP_DSCP),
        (entry.esn, XFRM_STATE_ESN),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    let window = match entry.direction {
        Direction::Out => 0,
        Direction::In | Direction::Fwd => entry.replay_window,
    };
    let mut info = UserSaInfo {
        id: Id {
            daddr: Address::from_ip(&entry.dst),
            spi: entry.spi,
            proto: IPPROTO_ESP,
        },
        saddr: Address::from_ip(&entry.src),
        lifetime_cfg: lifetime(&entry.lifetime),
        reqid: entry.reqid,
        family: family(entry.dst),
        mode: mode(entry.mode),
        flags,
        ..UserSaInfo::default()
    };
    if let Some((local, remote)) = entry.selector.filter(|_| entry.mode != Mode::Tunnel) {
        info.selector = match entry.direction {
            Direction::Out => host_selector(&local, &remote),
            Direction::In | Direction::Fwd => host_selector(&remote, &local),
        };
    }

    let mut nlas = algorithm::attributes(&entry.keys)?;
    if carried.attributes.is_empty() {
        match replay_window(entry.esn, window) {
            Window::Plain(window) => info.replay_window = window,
            Window::Extended(window) => {
                // The kernel refuses ESN without a window; with one, if it knows that the SA is
                // outbound.
                let window = if outbound && options.sa_dir {
                    0
                } else {
                    window
                };
                let words = window.div_ceil(32);
                nlas.push(XfrmAttrs::ReplayStateEsn(ReplayEsn {
                    bmp_len: words,
                    oseq: 0,
                    seq: 0,
                    oseq_hi: 0,
                    seq_hi: 0,
                    replay_window: window,
                    bmp: vec![0; words as usize],
                }));
            }
        }
    } else {
        if let Window::Plain(window) = replay_window(entry.esn, window) {
            info.replay_window = window;
        }
        nlas.extend(carried.attributes);
    }
    if let Some(encap) = entry.encap {
        nlas.push(XfrmAttrs::EncapsulationTemplate(EncapTmpl {
            encap_type: UDP_ENCAP_ESPINUDP,
            encap_sport: encap.src_port,
            encap_dport: encap.dst_port,
            encap_oa: Address::default(),
        }));
    }
    nlas.extend(entry.mark.map(mark));
    if let Some(set) = entry.set_mark {
        nlas.push(XfrmAttrs::MarkVal(set.value));
        nlas.push(XfrmAttrs::MarkMask(set.mask));
    }
    if entry.if_id != 0 {
        nlas.push(XfrmAttrs::IfId(entry.if_id));
    }
    if let Some((interface, packet)) = options.offload {
        let mut flags = 0;
        for (set, flag) in [
            (entry.dst.is_ipv6(), XFRM_OFFLOAD_IPV6),
            (!outbound, XFRM_OFFLOAD_INBOUND),
            (packet, XFRM_OFFLOAD_PACKET),
        ] {
            if set {
                flags |= flag;
            }
        }
        nlas.push(offload_device(interface, flags));
    }
    if options.sa_dir {
        let direction = if outbound {
            SaDirection::Out
        } else {
            SaDirection::In
        };
        nlas.push(direction.into());
    }
    if !entry.copy_dscp_out && may_out {
        nlas.push(XfrmAttrs::ExtraFlags(XFRM_SA_XFLAG_DONT_ENCAP_DSCP));
    }
    let message = SaMessage {
        user_sa_info: info,
        nlas,
    };
    Ok(KeyedMessage(if update {
        XfrmMessage::UpdateSa(message)
    } else {
        XfrmMessage::AddSa(message)
    }))
}

/// Removes an SA or a reserved SPI. The kernel finds an SA with a mark only by that mark.
pub(super) fn remove_sa(id: SaId, sa_mark: Option<Mark>) -> XfrmMessage {
    XfrmMessage::DeleteSa(sa_id_message(id, sa_mark))
}

/// Asks for one SA.
pub(super) fn get_sa(id: SaId, sa_mark: Option<Mark>) -> XfrmMessage {
    XfrmMessage::GetSa(sa_id_message(id, sa_mark))
}

/// Asks for all SAs.
pub(super) fn dump_sas() -> XfrmMessage {
    XfrmMessage::GetDumpSa(GetDumpMessage::default())
}

/// Asks for all policies.
pub(super) fn dump_policies() -> XfrmMessage {
    XfrmMessage::GetPolicy(PolicyIdMessage::default())
}

/// Installs the policy `key`; with `update`, over one with the same key.
pub(super) fn install_policy(key: &PolicyKey, policy: &InForce, update: bool) -> XfrmMessage {
    let info = UserPolicyInfo {
        selector: key.selector(),
        priority: policy.priority,
        direction: direction(key.direction),
        action: match policy.action {
            PolicyAction::Protect { .. } | PolicyAction::Bypass => XFRM_POLICY_ALLOW,
            PolicyAction::Discard => XFRM_POLICY_BLOCK,
        },
        ..UserPolicyInfo::default()
    };
    let mut nlas = Vec::new();
    if let PolicyAction::Protect {
        mode: protect,
        local,
        remote,
        reqid,
        spi,
    } = policy.action
    {
        let outbound = key.direction == Direction::Out;
        let (src, dst) = if outbound {
            (local, remote)
        } else {
            (remote, local)
        };
        let mut template = UserTemplate {
            reqid,
            mode: mode(protect),
            family: family(dst),
            ..UserTemplate::default()
        };
        template.id.proto = IPPROTO_ESP;
        if outbound {
            template.id.spi = spi;
        }
        // In transport mode the packets' own addresses are the SA's.
        if protect != Mode::Transport {
            template.saddr = Address::from_ip(&src);
            template.id.daddr = Address::from_ip(&dst);
        }
        nlas.push(XfrmAttrs::Template(vec![template]));
    }
    nlas.extend(key_attributes(key));
    nlas.extend(
        policy
            .device
            .map(|interface| offload_device(interface, XFRM_OFFLOAD_PACKET)),
    );
    let message = PolicyMessage {
        user_policy_info: info,
        nlas,
    };
    if update {
        XfrmMessage::UpdatePolicy(message)
    } else {
        XfrmMessage::AddPolicy(message)
    }
}

/// Removes the policy `key`.
pub(super) fn remove_policy(key: &PolicyKey) -> XfrmMessage {
    XfrmMessage::DeletePolicy(policy_id_message(key))
}

/// Asks for the policy `key`.
pub(super) fn get_policy(key: &PolicyKey) -> XfrmMessage {
    XfrmMessage::GetPolicy(policy_id_message(key))
}

/// An SA as a dump or an answer shows it. Keys are not read.
#[derive(Clone, Debug)]
pub(super) struct SeenSa {
    /// Its name.
    pub(super) id: SaId,
    /// Transform protocol; ESP is 50.
    pub(super) proto: u8,
    /// Its mark.
    pub(super) mark: Option<Mark>,
    /// Its request id.
    pub(super) reqid: u32,
    /// Number of the question that it is the answer to, or waits for the answer to.
    pub(super) seq: u32,
    /// Source address of the outer packets.
    pub(super) src: IpAddr,
    /// The device that processes it.
    pub(super) offload: Option<SeenOffload>,
    /// When it was installed, in seconds since the epoch.
    pub(super) added: u64,
    /// Counters.
    pub(super) counters: SaCounters,
}

/// `struct xfrm_user_offload` of an SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeenOffload {
    /// Interface index of the device.
    pub(super) interface: u32,
    /// It does everything, policies included. Kernels before 6.2 do not know that, and some take
    /// the wish for it as one for encryption.
    pub(super) packet: bool,
}

impl SeenOffload {
    fn read(value: &[u8]) -> Option<Self> {
        let (interface, rest) = value.split_first_chunk()?;
        Some(Self {
            interface: u32::from_ne_bytes(*interface),
            packet: rest.first()? & XFRM_OFFLOAD_PACKET != 0,
        })
    }
}

impl SeenSa {
    /// Reads `struct xfrm_usersa_info` and the attributes behind it.
    pub(super) fn parse(payload: &[u8]) -> Option<Self> {
        let info = UserSaInfo::parse(payload).ok()?;
        let mut seen_mark = None;
        let mut last_used = None;
        let mut offload = None;
        for attribute in attributes(payload, XFRM_USER_SA_INFO_LEN) {
            match attribute.0 {
                XFRMA_MARK => seen_mark = read_mark(attribute.1),
                XFRMA_OFFLOAD_DEV => offload = SeenOffload::read(attribute.1),
                XFRMA_LASTUSED => {
                    last_used = attribute.1.first_chunk().copied().map(u64::from_ne_bytes);
                }
                _ => {}
            }
        }
        Some(Self {
            id: SaId {
                spi: info.id.spi,
                dst: address(info.family, &info.id.daddr),
            },
            proto: info.id.proto,
            mark: seen_mark,
            reqid: info.reqid,
            seq: info.seq,
            src: address(info.family, &info.saddr),
            offload,
            added: info.lifetime_cur.add_time,
            counters: SaCounters {
                bytes: info.lifetime_cur.bytes,
                packets: info.lifetime_cur.packets,
                last_used: last_used.unwrap_or(info.lifetime_cur.use_time),
                replay_drops: u64::from(info.stats.replay) + u64::from(info.stats.replay_window),
                integrity_drops: info.stats.integrity_failed.into(),
            },
        })
    }
}

impl CarriedState {
    /// Sequence numbers, window and lifetime counters of an SA as GETSA shows it. The outbound
    /// number skips ahead: packets may leave between the question and the removal, and no number
    /// may be used twice with one key.
    pub(super) fn parse(payload: &[u8]) -> Option<Self> {
        const SKIP: u32 = 1 << 16;
        let info = UserSaInfo::parse(payload).ok()?;
        let mut carried = vec![XfrmAttrs::LifetimeBytes(info.lifetime_cur)];
        for (kind, value) in attributes(payload, XFRM_USER_SA_INFO_LEN) {
            match kind {
                XFRMA_REPLAY_VAL => {
                    let mut replay = netlink_packet_xfrm::Replay::parse(value).ok()?;
                    if replay.oseq != 0 {
                        replay.oseq = replay.oseq.saturating_add(SKIP);
                    }
                    carried.push(XfrmAttrs::ReplayState(replay));
                }
                XFRMA_REPLAY_ESN_VAL => {
                    let mut replay = ReplayEsn::parse(value).ok()?;
                    if (replay.oseq, replay.oseq_hi) != (0, 0) {
                        let (oseq, carry) = replay.oseq.overflowing_add(SKIP);
                        replay.oseq = oseq;
                        replay.oseq_hi = replay.oseq_hi.saturating_add(carry.into());
                    }
                    carried.push(XfrmAttrs::ReplayStateEsn(replay));
                }
                XFRMA_LTIME_VAL => {}
                _ => {}
            }
        }
        Some(Self {
            attributes: carried,
        })
    }
}

/// A policy as a dump or an answer shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SeenPolicy {
    /// The kernel's number of it.
    pub(super) index: u32,
    /// Its key, as far as we tell policies apart.
    pub(super) key: PolicyKey,
    /// Which kind of policy it is.
    pub(super) kind: PolicyClass,
    /// Its priority.
    pub(super) priority: u32,
    /// The first template, if there is one.
    pub(super) template: Option<SeenTemplate>,
    /// Whether it drops.
    pub(super) discards: bool,
}

/// Whether a policy may be one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyClass {
    /// An ordinary one.
    Plain,
    /// Bound to an interface, a user or a security context, which ours never are: it differs from
    /// one of ours with the same key.
    Bound,
    /// A socket's own.
    Socket,
    /// A sub-policy (`XFRM_POLICY_TYPE_SUB`), which is consulted besides the others.
    Sub,
}

/// Template of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeenTemplate {
    pub(super) mode: Mode,
    pub(super) reqid: u32,
    pub(super) spi: u32,
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
}

impl SeenPolicy {
    /// Reads `struct xfrm_userpolicy_info` and the attributes behind it.
    pub(super) fn parse(payload: &[u8]) -> Option<Self> {
        /// `XFRM_POLICY_TYPE_SUB`
        const SUB: u8 = 1;
        let info = UserPolicyInfo::parse(payload).ok()?;
        let mut seen_mark = None;
        let mut if_id = 0;
        let mut template = None;
        let mut bound = info.selector.ifindex != 0 || info.selector.user != 0;
        let mut sub = false;
        for (kind, value) in attributes(payload, XFRM_USER_POLICY_INFO_LEN) {
            match kind {
                XFRMA_MARK => seen_mark = read_mark(value),
                XFRMA_IF_ID => {
                    if_id = value.first_chunk().copied().map_or(0, u32::from_ne_bytes);
                }
                XFRMA_TMPL => template = UserTemplate::parse(value).ok(),
                XFRMA_SEC_CTX => bound = true,
                XFRMA_POLICY_TYPE => sub = value.first() == Some(&SUB),
                _ => {}
            }
        }
        // Policies of sockets have directions of their own behind the three common ones.
        let kind = match info.direction {
            _ if sub => PolicyClass::Sub,
            SOCKET_DIRECTIONS.. => PolicyClass::Socket,
            _ if bound => PolicyClass::Bound,
            _ => PolicyClass::Plain,
        };
        let direction = match info.direction % SOCKET_DIRECTIONS {
            XFRM_POLICY_IN => Direction::In,
            XFRM_POLICY_OUT => Direction::Out,
            _ => Direction::Fwd,
        };
        Some(Self {
            index: info.index,
            key: PolicyKey::new(direction, &info.selector, seen_mark, if_id),
            kind,
            priority: info.priority,
            template: template.map(|template| SeenTemplate {
                mode: match template.mode {
                    XFRM_MODE_TRANSPORT => Mode::Transport,
                    XFRM_MODE_BEET => Mode::Beet,
                    _ => Mode::Tunnel,
                },
                reqid: template.reqid,
                spi: template.id.spi,
                src: address(template.family, &template.saddr),
                dst: address(template.family, &template.id.daddr),
            }),
            discards: info.action == XFRM_POLICY_BLOCK,
        })
    }

    /// Request id of the template, 0 without one.
    pub(super) fn reqid(&self) -> u32 {
        self.template.map_or(0, |template| template.reqid)
    }
}

impl fmt::Display for SeenPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.template {
            _ if self.discards => f.write_str("dropping")?,
            None => f.write_str("passing")?,
            Some(template) => write!(
                f,
                "with reqid {}, from {} to {}",
                template.reqid, template.src, template.dst
            )?,
        }
        write!(f, ", at priority {}", self.priority)
    }
}

/// `XFRM_POLICY_MAX`: policies of sockets have their directions from here on.
const SOCKET_DIRECTIONS: u8 = 3;

/// The attributes behind a fixed structure of `offset` octets.
pub(super) fn attributes(payload: &[u8], offset: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let payload = payload.get(offset..).unwrap_or_default();
    NlasIterator::new(payload).map_while(|attribute| {
        let attribute = attribute.ok()?;
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        let octets = attribute.into_inner();
        Some((kind, octets.get(4..length).unwrap_or_default()))
    })
}

/// How the kernel is told of the anti-replay window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Window {
    /// Up to 32 packets, in the base structure.
    Plain(u8),
    /// In an attribute of its own, a power of two.
    Extended(u32),
}

fn replay_window(esn: bool, window: u32) -> Window {
    match u8::try_from(window) {
        Ok(window @ 0..=32) if !esn => Window::Plain(window),
        // The kernel finds a packet's bit by its number modulo the window, and begins to count
        // below zero, at 2^32 - 1: with a window that does not divide 2^32 the bit of the first
        // packet, and with ESN those around each 2^32nd, are looked for where they are not, and
        // duplicates pass.
        _ => Window::Extended(window.clamp(1, MAX_WINDOW).next_power_of_two()),
    }
}

/// The kernel's bitmap holds 128 words of 32 bits.
const MAX_WINDOW: u32 = 4096;

fn lifetime(lifetime: &Lifetime) -> LifetimeConfig {
    let seconds = |time: Option<std::time::Duration>| time.map_or(0, |t| t.as_secs().max(1));
    LifetimeConfig {
        soft_byte_limit: lifetime.soft_bytes.unwrap_or(XFRM_INF),
        hard_byte_limit: lifetime.hard_bytes.unwrap_or(XFRM_INF),
        soft_packet_limit: lifetime.soft_packets.unwrap_or(XFRM_INF),
        hard_packet_limit: lifetime.hard_packets.unwrap_or(XFRM_INF),
        soft_add_expires_seconds: seconds(lifetime.soft_time),
        hard_add_expires_seconds: seconds(lifetime.hard_time),
        soft_use_expires_seconds: 0,
        hard_use_expires_seconds: 0,
    }
}

fn sa_id_message(id: SaId, sa_mark: Option<Mark>) -> SaIdMessage {
    SaIdMessage {
        user_sa_id: UserSaId {
            daddr: Address::from_ip(&id.dst),
            spi: id.spi,
            family: family(id.dst),
            proto: IPPROTO_ESP,
        },
        nlas: sa_mark.map(mark).into_iter().collect(),
    }
}

fn policy_id_message(key: &PolicyKey) -> PolicyIdMessage {
    PolicyIdMessage {
        user_policy_id: UserPolicyId {
            selector: key.selector(),
            index: 0,
            direction: direction(key.direction),
        },
        nlas: key_attributes(key).collect(),
    }
}

fn key_attributes(key: &PolicyKey) -> impl Iterator<Item = XfrmAttrs> {
    let if_id = (key.if_id != 0).then_some(XfrmAttrs::IfId(key.if_id));
    key.mark.map(mark).into_iter().chain(if_id)
}

fn offload_device(interface: u32, flags: u8) -> XfrmAttrs {
    XfrmAttrs::OffloadDevice(UserOffloadDev {
        ifindex: interface.cast_signed(),
        flags,
    })
}

fn mark(mark: Mark) -> XfrmAttrs {
    XfrmAttrs::Mark(MarkAttr {
        value: mark.value,
        mask: mark.mask,
    })
}

pub(super) fn read_mark(value: &[u8]) -> Option<Mark> {
    let mark = MarkAttr::parse(value).ok()?;
    ((mark.value, mark.mask) != (0, 0)).then_some(Mark {
        value: mark.value,
        mask: mark.mask,
    })
}

fn mode(mode: Mode) -> u8 {
    match mode {
        Mode::Tunnel => XFRM_MODE_TUNNEL,
        Mode::Transport => XFRM_MODE_TRANSPORT,
        Mode::Beet => XFRM_MODE_BEET,
    }
}

fn direction(direction: Direction) -> u8 {
    match direction {
        Direction::In => XFRM_POLICY_IN,
        Direction::Out => XFRM_POLICY_OUT,
        Direction::Fwd => XFRM_POLICY_FWD,
    }
}

#[cfg(test)]
mod tests;
