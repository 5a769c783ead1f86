// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server over a real socket. Where a test needs an engine that is slow, busy or silent, it
//! plays the engine itself.

mod commands;
mod installed;
mod render;
mod server;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use swanherd_ike::api::{ChildSaInfo, ChildState, IkeSaInfo, IkeState, LogGroup, LogLine};
use swanherd_ipsec::plane::{Mode, SaId};
use swanherd_ipsec::proposal::{ChildSuite, IkeSuite};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Identity, TrafficSelector};
use swanherd_vici::{Client, FrameReader, Message, Packet};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

use super::{Options, Server};
use crate::control::{CommandReply, Control, Request, Snapshot};
use crate::hub::Hub;

struct Fixture {
    dir: tempfile::TempDir,
    path: std::path::PathBuf,
    requests: mpsc::Receiver<Request>,
    events: Hub,
    clients: Arc<super::Clients>,
    snapshot: Arc<ArcSwap<Snapshot>>,
    stop: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
}

impl Fixture {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vici");
        let (control, requests) = control();
        let (events, snapshot) = (control.events.clone(), Arc::clone(&control.snapshot));
        let clients = Arc::clone(&control.clients);
        let options = Options {
            uri: format!("unix://{}", path.display()),
            ..Options::default()
        };
        let server = Server::bind(&options).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(server.run(control, async {
            let _ = stopped.await;
        }));
        Self {
            dir,
            path,
            requests,
            events,
            clients,
            snapshot,
            stop,
            server,
        }
    }

    fn options(&self) -> Options {
        Options {
            uri: format!("unix://{}", self.path.display()),
            ..Options::default()
        }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.options().uri).await.unwrap()
    }

    async fn raw(&self) -> Raw {
        let (reader, writer) = UnixStream::connect(&self.path).await.unwrap().into_split();
        Raw {
            reader: FrameReader::new(reader),
            writer,
        }
    }

    /// The next request that is not about counters, which listings ask for and do without.
    async fn next_request(&mut self) -> Request {
        loop {
            let next = tokio::time::timeout(Duration::from_secs(5), self.requests.recv());
            match next.await.unwrap().unwrap() {
                Request::RefreshCounters(_) => {}
                other => return other,
            }
        }
    }

    /// As if the engine had taken down all SAs.
    fn take_down(&self) {
        let mut empty = snapshot();
        empty.ike_sas = Arc::default();
        self.snapshot.store(Arc::new(empty));
    }

    async fn stop(self) {
        self.take_down();
        self.stop.send(()).unwrap();
        self.server.await.unwrap();
        drop(self.dir);
    }
}

/// The daemon as the server sees it, and the engine's end of it.
fn control() -> (Control, mpsc::Receiver<Request>) {
    let (requests, receiver) = mpsc::channel(64);
    let control = Control::new(snapshot(), requests);
    (control, receiver)
}

/// A client that sends what it likes.
struct Raw {
    reader: FrameReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Raw {
    async fn send(&mut self, packet: &[u8]) {
        let len = u32::try_from(packet.len()).unwrap();
        self.writer.write_all(&len.to_be_bytes()).await.unwrap();
        self.writer.write_all(packet).await.unwrap();
    }

    async fn receive(&mut self) -> Packet {
        let next = tokio::time::timeout(Duration::from_secs(5), self.reader.next());
        Packet::parse(&next.await.unwrap().unwrap().unwrap()).unwrap()
    }

    /// Octets of frames until the server closes.
    async fn receive_to_end(&mut self) -> usize {
        let mut octets = 0;
        // The server may reset rather than close, because it left octets unread.
        while let Ok(Some(frame)) = self.reader.next().await {
            octets += frame.len();
        }
        octets
    }
}

fn request(name: &str) -> Vec<u8> {
    Packet::Request(name.into(), Message::new())
        .to_frame()
        .unwrap()[4..]
        .to_vec()
}

fn line(level: u8, text: &str) -> LogLine {
    LogLine {
        group: LogGroup::Ike,
        level,
        ike_sa: Some(("gw".into(), 1)),
        message: text.into(),
    }
}

fn done(result: Result<(), String>, matches: u32, terminated: u32) -> CommandReply {
    CommandReply {
        result,
        matches,
        terminated,
        lost_lines: 0,
    }
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn snapshot() -> Snapshot {
    let definition = Message::new()
        .with_list("local_addrs", ["192.0.2.1"])
        .with_list("remote_addrs", ["192.0.2.2"])
        .with("version", "2")
        .with("dpd_delay", "2s")
        .with_section("local", psk("gw1.example.org"))
        .with_section("remote", psk("gw2.example.org"))
        .with_section(
            "children",
            Message::new()
                .with_section("net", child("10.1.0.0/24", "10.2.0.0/24"))
                .with_section("net2", child("10.1.0.0/24[tcp]", "10.2.0.0/24[tcp]"))
                .with_section(
                    "block",
                    child("10.9.0.0/16", "10.8.0.0/16")
                        .with("mode", "drop")
                        .with("start_action", "trap"),
                ),
        );
    let connection = swanherd_config::decode::decode_connection(
        "gw",
        &super::load::to_tree(&definition),
        swanherd_config::decode::Origin::Message,
        &super::names::NAMES,
    )
    .unwrap()
    .value;
    Snapshot {
        at: Instant::now(),
        started: (Instant::now(), 0),
        connections: Arc::new(BTreeMap::from([("gw".to_owned(), Arc::new(connection))])),
        ike_sas: Arc::new(BTreeMap::from([(1, Arc::new(established()))])),
        sa_counters: Arc::default(),
        totals: Arc::default(),
        counters: Arc::default(),
        last_errors: Arc::default(),
        troubles: Arc::default(),
        credentials: Arc::default(),
        half_open: 0,
        data_plane: "tun",
        standing: Arc::default(),
        audits: Arc::default(),
        plane_events: swanherd_kernel::EventCounts::default(),
    }
}

fn psk(id: &str) -> Message {
    Message::new().with("auth", "psk").with("id", id)
}

fn child(local: &str, remote: &str) -> Message {
    Message::new()
        .with_list("local_ts", [local])
        .with_list("remote_ts", [remote])
}

/// The IKE SA of the reference's sample.
fn established() -> IkeSaInfo {
    let now = Instant::now();
    let local: std::net::IpAddr = "192.0.2.1".parse().unwrap();
    let remote: std::net::IpAddr = "192.0.2.2".parse().unwrap();
    let network = |text: &str| TrafficSelector::network(text.parse().unwrap(), 24).unwrap();
    let net = ChildSaInfo {
        id: 1,
        name: "net".into(),
        reqid: 1,
        state: ChildState::Installed,
        mode: Mode::Tunnel,
        encap: true,
        inbound: Some(SaId {
            spi: 0x9258_7d4f,
            dst: local,
        }),
        outbound: Some(SaId {
            spi: 0x8ec9_91cc,
            dst: remote,
        }),
        suite: Some(ChildSuite {
            encryption: EncryptionId::AesCbc,
            key_bits: Some(128),
            integrity: Some(IntegrityId::HmacSha2_256_128),
            key_exchange: None,
            esn: false,
        }),
        if_id: (0, 0),
        mark_in: None,
        mark_out: None,
        local_ts: vec![network("10.1.0.0")],
        remote_ts: vec![network("10.2.0.0")],
        installed: Some(now),
        rekey_at: Some(now + Duration::from_secs(3307)),
        expires_at: Some(now + Duration::from_secs(3960)),
    };
    let tcp = |text, port: Option<u16>| TrafficSelector {
        protocol: 6,
        start_port: port.unwrap_or(0),
        end_port: port.unwrap_or(u16::MAX),
        ..network(text)
    };
    let net2 = ChildSaInfo {
        id: 2,
        name: "net2".into(),
        reqid: 2,
        inbound: Some(SaId {
            spi: 0x3378_f9fa,
            dst: local,
        }),
        outbound: Some(SaId {
            spi: 0x84e9_8ce2,
            dst: remote,
        }),
        suite: Some(ChildSuite {
            encryption: EncryptionId::AesGcm16,
            key_bits: Some(128),
            integrity: None,
            key_exchange: Some(KeyExchangeId::Ecp256),
            esn: false,
        }),
        local_ts: vec![tcp("10.1.0.0", None)],
        remote_ts: vec![tcp("10.2.0.0", Some(80))],
        rekey_at: Some(now + Duration::from_secs(3387)),
        ..net
    };
    IkeSaInfo {
        id: 1,
        connection: Some("gw".into()),
        state: IkeState::Established,
        local: addr("192.0.2.1:4500"),
        remote: addr("192.0.2.2:4500"),
        local_id: Identity::fqdn("gw1.example.org"),
        remote_id: Identity::fqdn("gw2.example.org"),
        initiator: true,
        spi_i: 0x0145_4d0c_06d6_c748,
        spi_r: 0xf4ef_a483_691f_e7a5,
        nat_local: false,
        nat_remote: true,
        nat_fake: false,
        suite: Some(IkeSuite {
            encryption: EncryptionId::AesCbc,
            key_bits: Some(128),
            integrity: Some(IntegrityId::HmacSha2_256_128),
            prf: PrfId::HmacSha2_256,
            key_exchange: KeyExchangeId::Curve25519,
        }),
        local_vips: Vec::new(),
        established: Some(now),
        rekey_at: Some(now + Duration::from_secs(13_881)),
        reauth_at: None,
        tasks_queued: Vec::new(),
        tasks_active: Vec::new(),
        tasks_passive: Vec::new(),
        wanted: Vec::new(),
        children: BTreeMap::from([(1, net), (2, net2)]),
    }
}
