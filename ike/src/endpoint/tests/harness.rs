// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two endpoints, a network, two data planes, and a clock that only tests move.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_config::identity::IdentityPattern;
use swanherd_config::model::{
    Action as ChildAction, AuthMethod, AuthRound, Child, ChildMode, Childless, Connection,
    CopyDscp, Fragmentation, HostSpec, HwOffload, IfId, IkeVersion, MarkSpec, Revocation,
    SelectorSpec, SendCert, SharedKind, SharedSecret, Unique,
};
use swanherd_ipsec::plane::{Direction, Mode, Op, Outcome, PlaneError, SaEntry, SaId};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Proposal, ProtocolId, Secret, TrafficSelector, Transform};

use crate::api::{
    Action, ChildSaInfo, Command, CommandId, Datagram, Event, IkeSaInfo, Now, Selector, Settings,
};
use crate::credentials::Credentials;
use crate::crypto::Provider;
use crate::endpoint::Endpoint;

pub(super) const ALICE: &str = "192.0.2.1";
pub(super) const BOB: &str = "192.0.2.2";

/// A data plane that does everything at once, and remembers.
#[derive(Debug, Default)]
pub(super) struct Plane {
    next_spi: u32,
    pub(super) reserved: BTreeMap<SaId, ()>,
    pub(super) sas: BTreeMap<SaId, SaEntry>,
    pub(super) policies: BTreeMap<u32, swanherd_ipsec::plane::PolicySet>,
    /// Virtual addresses, once for each addition.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) refuse_addresses: bool,
    /// How many of the next installations to refuse.
    pub(super) refuse: u32,
}

impl Plane {
    fn apply(&mut self, op: Op) -> Result<Outcome, PlaneError> {
        match op {
            Op::AllocSpi { dst, .. } => {
                self.next_spi += 1;
                let spi = 0xc000_0000 + self.next_spi;
                self.reserved.insert(SaId { spi, dst }, ());
                Ok(Outcome::Spi(spi))
            }
            Op::InstallSa(entry) => {
                if self.refuse > 0 {
                    self.refuse -= 1;
                    return Err(PlaneError {
                        op: "install".to_owned(),
                        reason: "refused by the test".to_owned(),
                        errno: Some(22),
                    });
                }
                self.reserved.remove(&entry.id());
                self.sas.insert(entry.id(), *entry);
                Ok(Outcome::Done)
            }
            Op::UpdateSa {
                id,
                src,
                dst,
                encap,
            } => {
                if let Some(mut entry) = self.sas.remove(&id) {
                    entry.src = src;
                    entry.dst = dst;
                    entry.encap = encap;
                    self.sas.insert(entry.id(), entry);
                }
                Ok(Outcome::Done)
            }
            Op::RemoveSa(id) => {
                self.reserved.remove(&id);
                self.sas.remove(&id);
                Ok(Outcome::Done)
            }
            Op::InstallPolicies(set) => {
                self.policies.insert(set.id, *set);
                Ok(Outcome::Done)
            }
            Op::RemovePolicies(id) => {
                self.policies.remove(&id);
                Ok(Outcome::Done)
            }
            Op::AddAddress { .. } if self.refuse_addresses => Err(PlaneError {
                op: "add virtual address".to_owned(),
                reason: "no such interface".to_owned(),
                errno: Some(19),
            }),
            Op::AddAddress { addr, .. } => {
                self.addresses.push(addr);
                Ok(Outcome::Done)
            }
            Op::RemoveAddress(addr) => {
                if let Some(at) = self.addresses.iter().position(|known| *known == addr) {
                    self.addresses.remove(at);
                }
                Ok(Outcome::Done)
            }
        }
    }

    pub(super) fn outbound(&self) -> Vec<&SaEntry> {
        self.sas
            .values()
            .filter(|sa| sa.direction == Direction::Out)
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reserved.is_empty()
            && self.sas.is_empty()
            && self.policies.is_empty()
            && self.addresses.is_empty()
    }
}

/// One side.
pub(super) struct Host {
    pub(super) endpoint: Endpoint,
    pub(super) plane: Plane,
    pub(super) addr: IpAddr,
    pub(super) events: Vec<Event>,
    next_command: CommandId,
}

impl Host {
    pub(super) fn sas(&self) -> Vec<IkeSaInfo> {
        self.endpoint.ike_sas().collect()
    }

    /// The only IKE SA.
    pub(super) fn sa(&self) -> IkeSaInfo {
        let mut sas = self.sas();
        assert_eq!(sas.len(), 1, "{sas:#?}");
        sas.remove(0)
    }

    /// The children that carry packets.
    pub(super) fn live(&self) -> Vec<ChildSaInfo> {
        use crate::api::ChildState;
        self.sas()
            .into_iter()
            .flat_map(|sa| sa.children.into_values())
            .filter(|child| child.state == ChildState::Installed)
            .collect()
    }

    pub(super) fn done(&self, id: CommandId) -> Option<Result<(), String>> {
        self.events.iter().find_map(|event| match event {
            Event::CommandDone { id: done, result } if *done == id => Some(result.clone()),
            _ => None,
        })
    }

    pub(super) fn logs(&self) -> Vec<String> {
        self.events
            .iter()
            .filter_map(|event| match event {
                Event::Log(line) => Some(line.message.clone()),
                _ => None,
            })
            .collect()
    }

    /// The events that VICI clients see, abbreviated.
    pub(super) fn story(&self) -> Vec<String> {
        self.events
            .iter()
            .filter_map(|event| match event {
                Event::IkeUpDown { up, .. } => {
                    Some(format!("ike {}", if *up { "up" } else { "down" }))
                }
                Event::ChildUpDown { up, .. } => {
                    Some(format!("child {}", if *up { "up" } else { "down" }))
                }
                Event::ChildRekey { .. } => Some("child rekey".to_owned()),
                Event::IkeRekey { .. } => Some("ike rekey".to_owned()),
                _ => None,
            })
            .collect()
    }
}

/// What the network does to a datagram.
pub(super) type Filter = Box<dyn FnMut(bool, &Datagram) -> bool>;

/// Both sides.
pub(super) struct Pair {
    pub(super) alice: Host,
    pub(super) bob: Host,
    pub(super) now: Now,
    wire: VecDeque<(bool, Datagram)>,
    /// Says whether a datagram arrives; true is towards bob.
    pub(super) filter: Filter,
    pub(super) sent: usize,
}

impl Pair {
    pub(super) fn new() -> Self {
        Self::with(Settings::default(), Settings::default())
    }

    pub(super) fn with(alice: Settings, bob: Settings) -> Self {
        #[expect(clippy::disallowed_methods, reason = "virtual time needs some origin")]
        let origin = Instant::now();
        let host = |settings, addr: &str, seed| Host {
            endpoint: Endpoint::new(settings, Provider::fake(), [seed; 32]),
            plane: Plane::default(),
            addr: addr.parse().unwrap(),
            events: Vec::new(),
            next_command: 1,
        };
        let mut pair = Self {
            alice: host(alice, ALICE, 1),
            bob: host(bob, BOB, 2),
            now: Now {
                instant: origin,
                unix: 1_800_000_000,
            },
            wire: VecDeque::new(),
            filter: Box::new(|_, _| true),
            sent: 0,
        };
        let credentials = psk_credentials("a secret of both");
        pair.alice.endpoint.set_credentials(credentials.clone());
        pair.bob.endpoint.set_credentials(credentials);
        pair
    }

    pub(super) fn load(&mut self, alice: Connection, bob: Connection) {
        self.alice
            .endpoint
            .load_connection(self.now, Arc::new(alice));
        self.bob.endpoint.load_connection(self.now, Arc::new(bob));
        self.drive();
    }

    pub(super) fn command(&mut self, on_alice: bool, command: Command) -> CommandId {
        let now = self.now;
        let host = if on_alice {
            &mut self.alice
        } else {
            &mut self.bob
        };
        let id = host.next_command;
        host.next_command += 1;
        host.endpoint.command(now, id, command);
        id
    }

    /// Brings up `child` of `connection` from alice and lets everything happen.
    pub(super) fn initiate(&mut self, connection: &str, child: &str) -> CommandId {
        let id = self.command(true, initiate(connection, child));
        self.drive();
        id
    }

    /// Executes actions and delivers datagrams until nothing moves, without time passing.
    pub(super) fn drive(&mut self) {
        for _ in 0..100_000 {
            let worked = self.work(true) | self.work(false);
            let Some((to_bob, datagram)) = self.wire.pop_front() else {
                if worked {
                    continue;
                }
                return;
            };
            if (self.filter)(to_bob, &datagram) {
                let host = if to_bob {
                    &mut self.bob
                } else {
                    &mut self.alice
                };
                host.endpoint.handle_datagram(self.now, datagram);
            }
        }
        panic!("the endpoints never come to rest");
    }

    fn work(&mut self, on_alice: bool) -> bool {
        let now = self.now;
        let host = if on_alice {
            &mut self.alice
        } else {
            &mut self.bob
        };
        let mut worked = false;
        while let Some(action) = host.endpoint.poll_action() {
            worked = true;
            match action {
                Action::Transmit(transmit) => {
                    self.sent += 1;
                    let mut from = transmit.local;
                    if from.ip().is_unspecified() {
                        from.set_ip(host.addr);
                    }
                    if !transmit.keepalive {
                        let datagram = Datagram {
                            local: transmit.remote,
                            remote: from,
                            payload: transmit.payload,
                        };
                        self.wire.push_back((on_alice, datagram));
                    }
                }
                Action::Plane(token, op) => {
                    let answer = host.plane.apply(op);
                    host.endpoint.handle_plane(now, token, answer);
                }
                Action::Compute(token, job) => {
                    let computed = job.run();
                    host.endpoint.handle_computed(now, token, computed);
                }
                Action::Resolve(token, _) => {
                    host.endpoint
                        .handle_resolved(now, token, vec![BOB.parse().unwrap()]);
                }
                Action::Source(token, _) => {
                    let addr = host.addr;
                    host.endpoint.handle_source(now, token, Some(addr));
                }
                Action::Usage(token, _) => host.endpoint.handle_usage(now, token, None),
                Action::Event(event) => host.events.push(event),
            }
        }
        worked
    }

    /// Lets time pass, serving every deadline on the way.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now.after(time);
        self.drive();
        loop {
            let next = [
                self.alice.endpoint.poll_timeout(),
                self.bob.endpoint.poll_timeout(),
            ]
            .into_iter()
            .flatten()
            .min()
            .filter(|at| *at <= end.instant);
            let Some(next) = next else {
                break;
            };
            let step = next.saturating_duration_since(self.now.instant);
            self.now = self.now.after(step.max(Duration::from_micros(1)));
            self.alice.endpoint.handle_timeout(self.now);
            self.bob.endpoint.handle_timeout(self.now);
            self.drive();
        }
        self.now = end;
        self.drive();
    }
}

pub(super) fn initiate(connection: &str, child: &str) -> Command {
    Command::Initiate {
        connection: Some(connection.to_owned()),
        child: Some(child.to_owned()),
        respect_limits: false,
    }
}

pub(crate) fn psk_credentials(secret: &str) -> Arc<Credentials> {
    let mut credentials = Credentials::new();
    credentials.add_shared(SharedSecret {
        id: Some("psk".to_owned()),
        kind: SharedKind::Ike,
        secret: Secret::copy_of(secret.as_bytes()),
        owners: Vec::new(),
    });
    Arc::new(credentials)
}

pub(super) fn ike_proposal(methods: &[KeyExchangeId]) -> Proposal {
    let mut transforms = vec![
        Transform::Encryption {
            id: EncryptionId::AesCbc,
            key_bits: Some(128),
        },
        Transform::Integrity(IntegrityId::HmacSha2_256_128),
        Transform::Prf(PrfId::HmacSha2_256),
    ];
    transforms.extend(methods.iter().map(|id| Transform::KeyExchange(*id)));
    Proposal {
        protocol: ProtocolId::Ike,
        transforms,
    }
}

pub(super) fn esp_proposal(methods: &[KeyExchangeId]) -> Proposal {
    let mut transforms = vec![
        Transform::Encryption {
            id: EncryptionId::AesGcm16,
            key_bits: Some(128),
        },
        Transform::Esn(false),
    ];
    transforms.extend(methods.iter().map(|id| Transform::KeyExchange(*id)));
    Proposal {
        protocol: ProtocolId::Esp,
        transforms,
    }
}

pub(super) fn net(text: &str) -> SelectorSpec {
    let (addr, len) = text.split_once('/').unwrap();
    let ts = TrafficSelector::network(addr.parse().unwrap(), len.parse().unwrap()).unwrap();
    SelectorSpec::Fixed(ts)
}

fn round(section: &str, id: &str, auth: AuthMethod) -> AuthRound {
    AuthRound {
        section: section.to_owned(),
        round: 0,
        auth,
        id: Some(IdentityPattern::parse(id).unwrap()),
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

pub(super) fn child(name: &str, local: &str, remote: &str) -> Child {
    Child {
        name: name.to_owned(),
        proposals: vec![esp_proposal(&[])],
        local_ts: vec![net(local)],
        remote_ts: vec![net(remote)],
        rekey_time: Duration::from_secs(3600),
        life_time: Duration::from_secs(3960),
        rand_time: Duration::ZERO,
        rekey_bytes: 0,
        life_bytes: 0,
        rand_bytes: 0,
        rekey_packets: 0,
        life_packets: 0,
        rand_packets: 0,
        updown: None,
        hostaccess: false,
        mode: ChildMode::Ipsec(Mode::Tunnel),
        policies: true,
        policies_fwd_out: false,
        dpd_action: ChildAction::default(),
        start_action: ChildAction::default(),
        close_action: ChildAction::default(),
        inactivity: Duration::ZERO,
        reqid: 0,
        priority: 0,
        interface: None,
        mark_in: MarkSpec::None,
        mark_in_sa: false,
        mark_out: MarkSpec::None,
        set_mark_in: MarkSpec::None,
        set_mark_out: MarkSpec::None,
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        label: None,
        tfc_padding: Some(0),
        replay_window: None,
        hw_offload: HwOffload::No,
        copy_df: true,
        copy_ecn: true,
        copy_dscp: CopyDscp::Out,
    }
}

/// A connection from `local` to `remote`, named after nothing but "gw", with one child "net".
pub(super) fn connection(local: &str, remote: &str, local_id: &str, remote_id: &str) -> Connection {
    Connection {
        name: "gw".to_owned(),
        version: IkeVersion::V2,
        local_addrs: vec![HostSpec::Addr(local.parse().unwrap())],
        remote_addrs: vec![HostSpec::Addr(remote.parse().unwrap())],
        local_port: 500,
        remote_port: 500,
        proposals: vec![ike_proposal(&[KeyExchangeId::Curve25519])],
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
        rekey_time: Duration::from_secs(4 * 3600),
        over_time: Duration::from_secs(1440),
        rand_time: Duration::ZERO,
        pools: Vec::new(),
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        local: vec![round("local", local_id, AuthMethod::Psk)],
        remote: vec![round("remote", remote_id, AuthMethod::Psk)],
        children: Vec::new(),
    }
}

/// What alice is configured with.
pub(crate) fn alice() -> Connection {
    Connection {
        children: vec![child("net", "10.1.0.0/16", "10.2.0.0/16")],
        ..connection(ALICE, BOB, "alice.example", "bob.example")
    }
}

/// What bob is configured with.
pub(crate) fn bob() -> Connection {
    Connection {
        children: vec![child("net", "10.2.0.0/16", "10.1.0.0/16")],
        ..connection(BOB, ALICE, "bob.example", "alice.example")
    }
}

/// Both connected, with their child up.
pub(super) fn connected() -> Pair {
    let mut pair = Pair::new();
    pair.load(alice(), bob());
    let id = pair.initiate("gw", "net");
    assert_eq!(
        pair.alice.done(id),
        Some(Ok(())),
        "{:#?}",
        pair.alice.logs()
    );
    pair
}

/// Whether the outbound SAs of one side are the inbound SAs of the other, with equal keys.
pub(super) fn assert_tunnel(pair: &Pair) {
    for (from, to) in [(&pair.alice, &pair.bob), (&pair.bob, &pair.alice)] {
        let outbound = from.plane.outbound();
        assert!(!outbound.is_empty(), "no outbound SA");
        for out in outbound {
            let inbound = to
                .plane
                .sas
                .get(&out.id())
                .unwrap_or_else(|| panic!("{:08x} leads nowhere", out.spi));
            assert_eq!(inbound.direction, Direction::In);
            assert_eq!(inbound.keys, out.keys);
        }
    }
}

/// Rekeys on one side what the selector names; nothing is delivered yet.
pub(super) fn rekey(pair: &mut Pair, on_alice: bool, child: bool) {
    let selector = Selector {
        ike: Some("gw".to_owned()),
        child: child.then(|| "net".to_owned()),
        ..Selector::default()
    };
    let command = Command::Rekey {
        selector,
        reauth: false,
    };
    pair.command(on_alice, command);
}
