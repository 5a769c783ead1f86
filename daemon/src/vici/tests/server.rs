// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets, packets, order, and clients that misbehave.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_ike::api::Event;
use swanherd_vici::types::ListSas;
use swanherd_vici::{Client, Message, Packet};
use tokio::io::AsyncWriteExt as _;

use super::{Fixture, control, established, line, request, snapshot};
use crate::control::Request;
use crate::vici::{Dropped, Options, Server};

async fn until(condition: impl Fn() -> bool) {
    for _ in 0..5000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it did not happen");
}

#[tokio::test]
async fn the_socket_has_its_permissions_and_goes_with_the_server() {
    let fixture = Fixture::start().await;
    let mode = std::fs::metadata(&fixture.path)
        .unwrap()
        .permissions()
        .mode();
    let second = Server::bind(&fixture.options()).await.err().unwrap();
    let path = fixture.path.clone();
    fixture.stop().await;

    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(second.kind(), std::io::ErrorKind::AddrInUse);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_another_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| Options {
        uri: format!("unix://{}", dir.path().join(name).display()),
        ..Options::default()
    };
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("stale")).unwrap());
    std::fs::write(dir.path().join("file"), "x").unwrap();

    assert!(Server::bind(&at("stale")).await.is_ok());
    assert_eq!(
        Server::bind(&at("file")).await.err().unwrap().kind(),
        std::io::ErrorKind::AlreadyExists
    );
    assert!(
        Server::bind(&Options {
            uri: "vsock://1".into(),
            ..Options::default()
        })
        .await
        .is_err()
    );
}

#[tokio::test]
async fn broken_packets_are_ignored_and_unknown_commands_are_answered() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;

    raw.send(b"\x09").await;
    raw.send(b"").await;
    raw.send(b"\x01").await;
    raw.send(b"\x00\xff").await;
    raw.send(b"\x00\x08nonsense").await;
    assert_eq!(raw.receive().await, Packet::CommandUnknown);
    raw.send(b"\x00\x05stats\x03\x05broken").await;
    assert_eq!(
        raw.receive().await,
        Packet::Response(
            Message::new()
                .with("success", "no")
                .with("errmsg", "parsing request failed")
        )
    );
    raw.send(b"\x03\x04nope").await;
    raw.send(b"\x04\x03log").await;
    raw.send(b"\x03\x03log").await;
    raw.send(b"\x04\x03log").await;
    let answers = [
        raw.receive().await,
        raw.receive().await,
        raw.receive().await,
        raw.receive().await,
    ];
    assert_eq!(
        answers,
        [
            Packet::EventUnknown,
            Packet::EventUnknown,
            Packet::EventConfirm,
            Packet::EventConfirm
        ]
    );
    fixture.stop().await;
}

#[tokio::test]
async fn an_oversize_packet_is_answered_in_its_turn_and_is_the_last() {
    let mut fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(&request("reload-settings")).await;
    let engine = async {
        let Request::ReloadSettings(first) = fixture.next_request().await else {
            panic!()
        };
        first.send(Ok(())).unwrap();
    };
    let more = async {
        raw.send(&vec![0; 600_000]).await;
        raw.send(&request("version")).await;
    };
    tokio::join!(engine, more);

    let answers = [raw.receive().await, raw.receive().await];

    assert_eq!(
        answers,
        [
            Packet::Response(Message::new().with("success", "yes")),
            Packet::Response(Message::new().with("success", "no").with(
                "errmsg",
                "packet of 600000 octets exceeds the limit of 524288"
            )),
        ]
    );
    assert_eq!(raw.receive_to_end().await, 0);
    drop(raw);
    until(|| fixture.clients.dropped(Dropped::TooLong) == 1).await;

    // One who only promises is answered as well.
    let mut raw = fixture.raw().await;
    raw.writer.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    assert!(matches!(raw.receive().await, Packet::Response(_)));
    fixture.stop().await;
}

#[tokio::test]
async fn requests_written_back_to_back_are_answered_in_order() {
    let mut fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(&request("reload-settings")).await;
    raw.send(&request("get-keys")).await;
    raw.send(&request("reload-settings")).await;

    let Request::ReloadSettings(first) = fixture.next_request().await else {
        panic!()
    };
    // The later requests wait for the first.
    assert!(fixture.requests.try_recv().is_err());
    first.send(Err("reloading 'x' failed".into())).unwrap();
    let refused = Message::new()
        .with("success", "no")
        .with("errmsg", "reloading 'x' failed");
    assert_eq!(raw.receive().await, Packet::Response(refused));
    assert_eq!(
        raw.receive().await,
        Packet::Response(Message::new().with_list("keys", [""; 0]))
    );
    let Request::ReloadSettings(second) = fixture.next_request().await else {
        panic!()
    };
    second.send(Ok(())).unwrap();
    assert_eq!(
        raw.receive().await,
        Packet::Response(Message::new().with("success", "yes"))
    );
    fixture.stop().await;
}

#[tokio::test]
async fn listings_are_answered_while_the_engine_is_silent_and_clients_wait_for_it() {
    let fixture = Fixture::start().await;
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let mut raw = fixture.raw().await;
        raw.send(&request("reload-settings")).await;
        waiting.push(raw);
    }
    let mut client = fixture.client().await;
    let started = Instant::now();

    let sas = client.list_sas(&ListSas::default()).await.unwrap();
    let stats = client.stats().await.unwrap();

    assert!(
        started.elapsed() < Duration::from_millis(100),
        "{:?}",
        started.elapsed()
    );
    assert_eq!((sas.len(), stats.ikesas.total), (1, 1));
    assert_eq!(sas[0].children.len(), 2);
    fixture.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_command() {
    let mut fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    let args = Message::new().with("child", "net");
    raw.send(&Packet::Request("initiate".into(), args).to_frame().unwrap()[4..])
        .await;
    let Request::Command { mut reply, .. } = fixture.next_request().await else {
        panic!()
    };

    drop(raw);

    tokio::time::timeout(Duration::from_secs(1), reply.closed())
        .await
        .unwrap();
    fixture.stop().await;
}

#[tokio::test]
async fn what_a_client_asks_for_right_before_it_leaves_is_done() {
    let mut fixture = Fixture::start().await;
    // Whether its end is seen at once is a matter of chance.
    for _ in 0..50 {
        let mut raw = fixture.raw().await;
        let args = Message::new().with("child", "net").with("timeout", "-1");
        raw.send(&Packet::Request("initiate".into(), args).to_frame().unwrap()[4..])
            .await;
        drop(raw);

        let request = fixture.next_request().await;
        assert!(matches!(request, Request::Command { .. }), "{request:?}");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn events_reach_those_who_registered() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    client.subscribe(&["ike-updown", "log"]).await.unwrap();
    let tell = |event| fixture.events.send(event);

    tell(Event::Log(line(2, "detail")));
    tell(Event::Changed(1));
    tell(Event::Log(line(1, "hello")));
    tell(Event::ChildUpDown {
        up: true,
        sa: Box::new(established()),
    });
    tell(Event::IkeUpDown {
        up: true,
        sa: Box::new(established()),
    });

    let log = client.next_event().await.unwrap();
    assert_eq!(
        log.message.to_string(),
        "group=IKE level=1 thread=1 ikesa-name=gw ikesa-uniqueid=1 msg=hello"
    );
    let up = client.next_event().await.unwrap();
    assert_eq!(up.name, "ike-updown");
    // Commands still work in between.
    assert_eq!(client.version().await.unwrap().daemon, "swanherd");
    fixture.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_command_however_much_it_has_sent() {
    let mut fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    let args = Message::new().with("child", "net");
    raw.send(&Packet::Request("initiate".into(), args).to_frame().unwrap()[4..])
        .await;
    let Request::Command { mut reply, .. } = fixture.next_request().await else {
        panic!()
    };
    // More than the server takes in, so that the end is behind octets that nobody reads.
    let more = request("version").len() + 4;
    let mut sent = 0;
    while let Ok(()) =
        tokio::time::timeout(Duration::from_millis(200), raw.send(&request("version"))).await
    {
        sent += more;
        assert!(sent < 64 * 1024 * 1024);
    }
    assert!(!reply.is_closed());

    drop(raw);

    tokio::time::timeout(Duration::from_secs(1), reply.closed())
        .await
        .unwrap();
    until(|| fixture.clients.connected() == 0).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_client_that_reads_is_told_of_a_burst_whole() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(b"\x03\x0aike-updown").await;
    assert_eq!(raw.receive().await, Packet::EventConfirm);

    // Without a pause, as when thousands of SAs end in one turn of the engine, and among far more
    // that the client has not asked for.
    for id in 0..20_000 {
        fixture.events.send(Event::IkeUpDown {
            up: false,
            sa: Box::new(swanherd_ike::api::IkeSaInfo {
                id,
                ..established()
            }),
        });
        for _ in 0..5 {
            fixture.events.send(Event::Changed(id));
            fixture.events.send(Event::Log(line(1, "going down")));
        }
    }

    for id in 0..20_000_u32 {
        let Packet::Event(name, message) = raw.receive().await else {
            panic!()
        };
        let sa = message.section("gw").unwrap();
        assert_eq!(
            (name.as_str(), sa.str("uniqueid")),
            ("ike-updown", Some(id.to_string().as_str()))
        );
    }
    assert_eq!(fixture.clients.dropped(Dropped::Stalled), 0);
    assert_eq!(fixture.clients.dropped(Dropped::Backlog), 0);
    fixture.stop().await;
}

#[tokio::test]
async fn hundreds_of_clients_are_served_and_more_are_turned_away() {
    let fixture = Fixture::start().await;
    let mut clients = Vec::new();
    for _ in 0..512 {
        let mut client = fixture.client().await;
        client.set_timeout(Some(Duration::from_secs(5)));
        clients.push(client);
    }
    for client in &mut clients {
        assert_eq!(client.version().await.unwrap().daemon, "swanherd");
    }
    assert_eq!(fixture.clients.connected(), 512);

    let mut refused = fixture.client().await;
    assert!(refused.version().await.is_err());
    assert_eq!(fixture.clients.dropped(Dropped::TooMany), 1);
    drop(clients.pop());
    until(|| fixture.clients.connected() == 511).await;
    let mut next = fixture.client().await;
    assert!(next.version().await.is_ok());
    assert_eq!(fixture.clients.served(), 513);
    drop((clients, next));
    fixture.stop().await;
}

#[tokio::test]
async fn an_event_that_is_too_long_ends_the_command() {
    let fixture = Fixture::start().await;
    let mut long = snapshot();
    let mut sa = established();
    let child = sa.children.get_mut(&1).unwrap();
    child.local_ts = vec![child.local_ts[0]; 40_000];
    long.ike_sas = Arc::new([(1, Arc::new(sa))].into());
    fixture.snapshot.store(Arc::new(long));
    let mut client = fixture.client().await;

    let mut stream = client
        .stream("list-sas", "list-sa", Message::new())
        .await
        .unwrap();
    assert_eq!(stream.next().await.unwrap(), None);
    assert_eq!(
        stream.into_response().str("errmsg"),
        Some("the answer is too long")
    );
    assert!(client.version().await.is_ok());
    fixture.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_events_is_dropped() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(b"\x03\x03log").await;
    assert_eq!(raw.receive().await, Packet::EventConfirm);
    let flood = "x".repeat(60_000);

    // Far more than the socket's and the server's buffers hold.
    for _ in 0..400 {
        fixture.events.send(Event::Log(line(1, &flood)));
        tokio::task::yield_now().await;
    }

    until(|| fixture.clients.dropped(Dropped::Stalled) == 1).await;
    let octets = raw.receive_to_end().await;
    assert!(octets < 2 * 1024 * 1024, "{octets}");

    // So much at once that it cannot be kept.
    let mut raw = fixture.raw().await;
    raw.send(b"\x03\x03log").await;
    assert_eq!(raw.receive().await, Packet::EventConfirm);
    for _ in 0..2300 {
        fixture.events.send(Event::Log(line(1, &flood)));
    }
    until(|| fixture.clients.dropped(Dropped::Backlog) == 1).await;
    assert_eq!(raw.receive_to_end().await, 0);
    fixture.stop().await;
}

#[tokio::test]
async fn whoever_watches_sees_sas_go_down_with_the_daemon() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    client.subscribe(&["ike-updown"]).await.unwrap();

    fixture.stop.send(()).unwrap();
    while fixture.path.exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let down = Event::IkeUpDown {
        up: false,
        sa: Box::new(established()),
    };
    for _ in 0..2000 {
        fixture.events.send(down.clone());
    }
    let mut empty = snapshot();
    empty.ike_sas = Arc::default();
    fixture.snapshot.store(Arc::new(empty));

    for _ in 0..2000 {
        assert_eq!(client.next_event().await.unwrap().name, "ike-updown");
    }
    fixture.server.await.unwrap();
    assert!(client.next_event().await.is_err());
}

#[tokio::test]
async fn tcp_serves_as_well() {
    let options = Options {
        uri: "tcp://127.0.0.1:0".into(),
        ..Options::default()
    };
    let server = Server::bind(&options).await.unwrap();
    let address = server.tcp_address().unwrap();
    let (control, _requests) = control();
    let server = tokio::spawn(server.run(control, std::future::pending()));

    let mut client = Client::connect(&format!("tcp://{address}")).await.unwrap();

    assert_eq!(client.stats().await.unwrap().ikesas.total, 1);
    server.abort();
}

/// An authority, and what it has issued, as PEM files.
struct Authority {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), certificate.pem()).unwrap();
        Self {
            dir,
            issuer: rcgen::Issuer::new(params, key),
        }
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Issues a certificate for a name, and returns the files of it and its key.
    fn issue(&self, name: &str) -> (std::path::PathBuf, std::path::PathBuf) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = (
            self.file(&format!("{name}.pem")),
            self.file(&format!("{name}.key")),
        );
        std::fs::write(&files.0, certificate.pem()).unwrap();
        std::fs::write(&files.1, key.serialize_pem()).unwrap();
        files
    }

    fn client(&self, name: &str) -> swanherd_vici::Tls {
        let (cert, key) = self.issue(name);
        let ca = self.file("ca.pem");
        swanherd_vici::Tls { ca, cert, key }
    }
}

#[tokio::test]
async fn tls_serves_those_whose_certificate_is_of_the_right_authority() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        uri: format!("unix://{}", dir.path().join("vici").display()),
        ..Options::default()
    };
    let (cert, key) = ours.issue("127.0.0.1");
    let settings = swanherd_config::settings::ViciTlsSettings {
        listen: "127.0.0.1:0".parse().unwrap(),
        cert,
        key,
        client_ca: ours.file("ca.pem"),
    };
    let mut server = Server::bind(&options).await.unwrap();
    server.add_tls(&settings).await.unwrap();
    let uri = format!("tls://{}", server.tls_address().unwrap());
    let (control, _requests) = control();
    let (events, clients) = (control.events.clone(), Arc::clone(&control.clients));
    let server = tokio::spawn(server.run(control, std::future::pending()));

    // Both sockets at once, and more than fits into what TLS and the socket buffer.
    let mut local = Client::connect(&options.uri).await.unwrap();
    let mut operator = Client::connect_tls(&uri, &ours.client("ops"))
        .await
        .unwrap();
    operator.subscribe(&["log"]).await.unwrap();
    for number in 0..2000 {
        let text = format!("{number} {}", "x".repeat(1000));
        events.send(Event::Log(line(1, &text)));
    }
    assert_eq!(operator.stats().await.unwrap().ikesas.total, 1);
    assert_eq!(local.stats().await.unwrap().ikesas.total, 1);
    for number in 0..2000 {
        let event = operator.next_event().await.unwrap();
        let text = event.message.str("msg").unwrap();
        assert!(text.starts_with(&format!("{number} ")), "{text}");
    }
    drop(operator);
    until(|| clients.connected() == 1).await;

    // A certificate of somebody else.
    let mut stranger = theirs.client("ops");
    stranger.ca = ours.file("ca.pem");
    let refused = match Client::connect_tls(&uri, &stranger).await {
        Ok(mut client) => client.version().await.map(drop),
        Err(error) => Err(error),
    };
    assert!(refused.is_err());
    until(|| clients.dropped(Dropped::Tls) == 1).await;

    // None at all.
    let mut roots = rustls::RootCertStore::empty();
    let pem = std::fs::read(ours.file("ca.pem")).unwrap();
    let ca =
        <rustls_pki_types::CertificateDer<'_> as rustls_pki_types::pem::PemObject>::from_pem_slice(
            &pem,
        );
    roots.add(ca.unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = tokio::net::TcpStream::connect(uri.strip_prefix("tls://").unwrap())
        .await
        .unwrap();
    let name = rustls_pki_types::ServerName::try_from("127.0.0.1").unwrap();
    let refused = match connector.connect(name, stream).await {
        Ok(stream) => Client::over(stream).version().await.is_err(),
        Err(_) => true,
    };
    assert!(refused);
    until(|| clients.dropped(Dropped::Tls) == 2).await;

    // No TLS.
    let plain = uri.replace("tls://", "tcp://");
    let mut plain = Client::connect(&plain).await.unwrap();
    assert!(plain.version().await.is_err());
    until(|| clients.dropped(Dropped::Tls) == 3).await;

    // A client that does not know the daemon, and URIs that are none.
    let unknown = Client::connect_tls(&uri, &theirs.client("ops")).await;
    assert!(matches!(unknown, Err(swanherd_vici::Error::Connect { .. })));
    let files = ours.client("more");
    for wrong in ["tcp://127.0.0.1:1", "tls://127.0.0.1", "tls://:1"] {
        let error = Client::connect_tls(wrong, &files).await.unwrap_err();
        assert!(matches!(error, swanherd_vici::Error::Address(_)), "{wrong}");
    }
    assert!(matches!(
        Client::connect(&uri).await,
        Err(swanherd_vici::Error::Tls(_))
    ));
    server.abort();
}

#[tokio::test]
async fn files_that_tls_cannot_use_are_named() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("127.0.0.1");
    std::fs::write(authority.file("empty.pem"), "").unwrap();
    let good = swanherd_config::settings::ViciTlsSettings {
        listen: "127.0.0.1:0".parse().unwrap(),
        cert,
        key,
        client_ca: authority.file("ca.pem"),
    };
    let check = |vici_tls| {
        crate::vici::check(&swanherd_config::settings::Settings {
            vici_tls: Some(vici_tls),
            ..swanherd_config::settings::Settings::default()
        })
    };

    assert_eq!(check(good.clone()), Ok(()));
    for (name, settings) in [
        (
            "nothing.key",
            swanherd_config::settings::ViciTlsSettings {
                key: authority.file("nothing.key"),
                ..good.clone()
            },
        ),
        (
            "empty.pem",
            swanherd_config::settings::ViciTlsSettings {
                client_ca: authority.file("empty.pem"),
                ..good
            },
        ),
    ] {
        let error = check(settings).unwrap_err();
        assert!(error.contains(name), "{error}");
    }
}
