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
use crate::vici::{Options, Server};

#[tokio::test]
async fn the_socket_has_its_permissions_and_goes_with_the_server() {
    let fixture = Fixture::start().await;
    let mode = std::fs::metadata(&fixture.path)
        .unwrap()
        .permissions()
        .mode();
    let second = Server::bind(&fixture.options()).await.unwrap_err();
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
        Server::bind(&at("file")).await.unwrap_err().kind(),
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
async fn an_oversize_length_closes_the_connection() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.writer
        .write_all(&524_289u32.to_be_bytes())
        .await
        .unwrap();
    assert_eq!(raw.receive_to_end().await, 0);
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
async fn events_reach_those_who_registered() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    client.subscribe(&["ike-updown", "log"]).await.unwrap();
    let tell = |event| fixture.events.send(Arc::new(event)).unwrap();

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
async fn a_client_that_does_not_read_events_is_dropped() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(b"\x03\x03log").await;
    assert_eq!(raw.receive().await, Packet::EventConfirm);
    let flood = "x".repeat(60_000);

    // Far more than the socket's and the server's buffers hold.
    for _ in 0..400 {
        // Nobody listens any more once the client was dropped.
        let _ = fixture.events.send(Arc::new(Event::Log(line(1, &flood))));
        tokio::task::yield_now().await;
    }

    let octets = raw.receive_to_end().await;
    assert!(octets < 12 * 1024 * 1024, "{octets}");
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
    fixture.events.send(Arc::new(down)).unwrap();
    let mut empty = snapshot();
    empty.ike_sas = Arc::default();
    fixture.snapshot.store(Arc::new(empty));

    assert_eq!(client.next_event().await.unwrap().name, "ike-updown");
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
