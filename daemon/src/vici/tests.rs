// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server over a real socket. Where a test needs an engine that is slow, busy or silent, it
//! plays the engine itself.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use swanherd_ike::api::{
    ChildSaInfo, ChildState, Command, Event, IkeSaInfo, IkeState, LogGroup, LogLine,
};
use swanherd_ipsec::plane::{Mode, SaCounters, SaId};
use swanherd_ipsec::proposal::{ChildSuite, IkeSuite};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId, KeyExchangeId, PrfId};
use swanherd_ipsec::{Identity, TrafficSelector};
use swanherd_vici::types::{Initiate, ListSas, Selector};
use swanherd_vici::{Client, Error, FrameReader, Message, Packet};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::render::{Moment, ike_sa_with_children};
use super::{Options, Server, events};
use crate::control::{CommandReply, Control, Request, Snapshot};

#[test]
fn list_sa_has_the_keys_of_the_reference_in_its_order() {
    let sa = established();
    let counters = BTreeMap::new();
    let now = sa.established.unwrap();
    let moment = Moment {
        instant: now,
        unix: 1_000_000,
        counters: &counters,
    };

    let rendered = ike_sa_with_children(&sa, moment, |_| true);

    // What strongSwan 6.0.6 printed for this scenario.
    assert_eq!(
        Message::new().with_section("gw", rendered).to_string(),
        "gw {uniqueid=1 version=2 state=ESTABLISHED local-host=192.0.2.1 local-port=4500 \
         local-id=gw1.example.org remote-host=192.0.2.2 remote-port=4500 \
         remote-id=gw2.example.org initiator=yes initiator-spi=01454d0c06d6c748 \
         responder-spi=f4efa483691fe7a5 nat-remote=yes nat-any=yes encr-alg=AES_CBC \
         encr-keysize=128 integ-alg=HMAC_SHA2_256_128 prf-alg=PRF_HMAC_SHA2_256 \
         dh-group=CURVE_25519 established=0 rekey-time=13881 child-sas {net-1 {name=net \
         uniqueid=1 reqid=1 state=INSTALLED mode=TUNNEL protocol=ESP encap=yes spi-in=92587d4f \
         spi-out=8ec991cc encr-alg=AES_CBC encr-keysize=128 integ-alg=HMAC_SHA2_256_128 \
         bytes-in=0 packets-in=0 bytes-out=0 packets-out=0 rekey-time=3307 life-time=3960 \
         install-time=0 local-ts=[10.1.0.0/24] remote-ts=[10.2.0.0/24]} net2-2 {name=net2 \
         uniqueid=2 reqid=2 state=INSTALLED mode=TUNNEL protocol=ESP encap=yes spi-in=3378f9fa \
         spi-out=84e98ce2 encr-alg=AES_GCM_16 encr-keysize=128 dh-group=ECP_256 bytes-in=0 \
         packets-in=0 bytes-out=0 packets-out=0 rekey-time=3387 life-time=3960 install-time=0 \
         local-ts=[10.1.0.0/24[tcp]] remote-ts=[10.2.0.0/24[tcp/http]]}}}"
    );
}

#[test]
fn an_ike_sa_in_the_making_shows_what_is_known() {
    let sa = IkeSaInfo {
        connection: None,
        state: IkeState::Connecting,
        remote_id: Identity::any(),
        suite: None,
        established: None,
        nat_remote: false,
        spi_r: 0,
        tasks_active: vec!["IKE_VENDOR", "IKE_INIT"],
        children: BTreeMap::new(),
        ..established()
    };
    let counters = BTreeMap::new();
    let moment = Moment {
        instant: Instant::now(),
        unix: 0,
        counters: &counters,
    };

    assert_eq!(super::render::ike_name(&sa), "(unnamed)");
    assert_eq!(
        ike_sa_with_children(&sa, moment, |_| true).to_string(),
        "uniqueid=1 version=2 state=CONNECTING local-host=192.0.2.1 local-port=4500 \
         local-id=gw1.example.org remote-host=192.0.2.2 remote-port=4500 remote-id=%any \
         initiator=yes initiator-spi=01454d0c06d6c748 responder-spi=0000000000000000 \
         tasks-active=[IKE_VENDOR IKE_INIT] child-sas {}"
    );
}

#[test]
fn counters_and_ages_are_those_of_the_moment() {
    let mut sa = established();
    let child = sa.children.get_mut(&1).unwrap();
    child.state = ChildState::Deleted;
    let counters = BTreeMap::from([(
        child.inbound.unwrap(),
        SaCounters {
            bytes: 84,
            packets: 1,
            last_used: 999_990,
            ..SaCounters::default()
        },
    )]);
    let later = sa.established.unwrap() + Duration::from_secs(4000);
    let moment = Moment {
        instant: later,
        unix: 1_000_000,
        counters: &counters,
    };

    let rendered = ike_sa_with_children(&sa, moment, |child| child.id == 1);

    let child = rendered
        .section("child-sas")
        .unwrap()
        .section("net-1")
        .unwrap();
    let seen = |key| child.str(key);
    assert_eq!(seen("bytes-in"), Some("84"));
    assert_eq!(seen("use-in"), Some("10"));
    assert_eq!(seen("use-out"), None);
    assert_eq!(seen("install-time"), Some("4000"));
    assert_eq!(seen("rekey-time"), Some("-693"));
    assert_eq!(rendered.section("child-sas").unwrap().sections().count(), 1);
}

#[test]
fn events_have_the_form_of_the_reference() {
    let sa = Box::new(IkeSaInfo {
        children: BTreeMap::new(),
        ..established()
    });
    let child = Box::new(established().children.remove(&1).unwrap());
    let counters = BTreeMap::new();
    let moment = Moment {
        instant: sa.established.unwrap(),
        unix: 0,
        counters: &counters,
    };
    let render = |event: &Event| events::message(event, moment);

    let up = render(&Event::IkeUpDown {
        up: true,
        sa: sa.clone(),
    });
    let down = render(&Event::IkeUpDown {
        up: false,
        sa: sa.clone(),
    });
    let rekeyed = render(&Event::ChildRekey {
        sa: sa.clone(),
        old: child.clone(),
        new: Box::new(ChildSaInfo { id: 4, ..*child }),
    });
    let replaced = render(&Event::IkeRekey {
        old: sa.clone(),
        new: sa.clone(),
    });
    let moved = render(&Event::IkeUpdate {
        sa: sa.clone(),
        local: addr("192.0.2.1:4500"),
        remote: addr("192.0.2.9:1024"),
    });
    let alert = render(&Event::Alert {
        kind: "ts-mismatch",
        sa: Some(sa),
    });

    assert!(up.to_string().starts_with("up=yes gw {uniqueid=1 "));
    assert!(up.section("gw").unwrap().section("child-sas").is_none());
    assert!(down.to_string().starts_with("gw {uniqueid=1 "));
    let both = rekeyed
        .section("gw")
        .unwrap()
        .section("child-sas")
        .unwrap()
        .section("net")
        .unwrap();
    assert_eq!(both.section("old").unwrap().str("uniqueid"), Some("1"));
    assert_eq!(both.section("new").unwrap().str("uniqueid"), Some("4"));
    assert!(replaced.section("gw").unwrap().section("new").is_some());
    assert!(moved.to_string().starts_with(
        "local-host=192.0.2.1 local-port=4500 remote-host=192.0.2.9 remote-port=1024 gw {"
    ));
    assert!(
        alert
            .to_string()
            .starts_with("type=ts-mismatch ike-sa {gw {uniqueid=1 ")
    );
}

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
async fn list_sas_without_registration_answers_empty() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(&request("list-sas")).await;
    assert_eq!(raw.receive().await, Packet::Response(Message::new()));
    fixture.stop().await;
}

#[tokio::test]
async fn list_sas_filters() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut listed = async |filter: ListSas| client.list_sas(&filter).await.unwrap();

    let other = listed(ListSas {
        ike: Some("other".into()),
        ..ListSas::default()
    })
    .await;
    let child = listed(ListSas {
        child: Some("net2".into()),
        ..ListSas::default()
    })
    .await;
    let id = listed(ListSas {
        ike_id: Some(7),
        ..ListSas::default()
    })
    .await;

    assert!(other.is_empty() && id.is_empty());
    assert_eq!(child[0].children.len(), 1);
    assert_eq!(child[0].children[0].name, "net2");
    fixture.stop().await;
}

#[tokio::test]
async fn initiate_streams_the_log_before_the_answer() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let engine = async {
        let Request::Command {
            command,
            log,
            reply,
        } = fixture.next_request().await
        else {
            panic!()
        };
        let Command::Initiate {
            connection,
            child,
            respect_limits,
        } = command
        else {
            panic!()
        };
        assert_eq!(
            (connection.as_deref(), child.as_deref()),
            (Some("gw"), Some("net"))
        );
        assert!(!respect_limits);
        let log = log.unwrap();
        for (level, text) in [(0, "initiating"), (2, "too detailed"), (1, "established")] {
            log.send(line(level, text)).await.unwrap();
        }
        reply.send(done(Ok(()), 0, 0)).unwrap();
    };
    let mut lines = Vec::new();
    let what = Initiate {
        child: Some("net".into()),
        ..Initiate::default()
    };

    let (result, ()) = tokio::join!(client.initiate(&what, |line| lines.push(line)), engine);

    result.unwrap();
    let texts: Vec<&str> = lines.iter().map(|line| line.msg.as_str()).collect();
    assert_eq!(texts, ["initiating", "established"]);
    assert_eq!(lines[0].ikesa_uniqueid, Some(1));
    assert_eq!(lines[0].group, "IKE");
    fixture.stop().await;
}

#[tokio::test]
async fn initiate_that_fails_or_takes_too_long_says_so() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut initiate = async |what: Initiate| match client.initiate(&what, drop).await {
        Err(Error::Refused { text, .. }) => text,
        other => format!("{other:?}"),
    };
    let named = |child: &str, ike: Option<&str>, timeout_ms| Initiate {
        child: (!child.is_empty()).then(|| child.to_owned()),
        ike: ike.map(str::to_owned),
        timeout_ms,
        log_level: None,
    };

    assert_eq!(
        initiate(named("", None, 0)).await,
        "missing configuration name"
    );
    assert_eq!(
        initiate(named("zz", None, 0)).await,
        "CHILD_SA config 'zz' not found"
    );
    assert_eq!(
        initiate(named("net", Some("zz"), 0)).await,
        "CHILD_SA config 'net' not found"
    );
    assert_eq!(
        initiate(named("", Some("zz"), 0)).await,
        "IKE_SA config 'zz' not found"
    );
    assert_eq!(
        initiate(named("net", None, 20)).await,
        "CHILD_SA 'net' not established after 20ms"
    );
    assert!(matches!(
        fixture.next_request().await,
        Request::Command { .. }
    ));
    let engine = async {
        let Request::Command { reply, .. } = fixture.next_request().await else {
            panic!()
        };
        reply
            .send(done(Err("establishing IKE_SA 'gw' failed".into()), 0, 0))
            .unwrap();
    };
    let (text, ()) = tokio::join!(initiate(named("", Some("gw"), 0)), engine);
    assert_eq!(text, "establishing IKE_SA 'gw' failed");
    assert_eq!(initiate(named("net", None, -1)).await, "Ok(())");
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
async fn terminate_counts_what_matched_and_what_went() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let net = Selector {
        child: Some("net".into()),
        ..Selector::default()
    };
    let none = Selector {
        ike: Some("zz".into()),
        ..Selector::default()
    };

    let missing = client
        .terminate(&Selector::default(), false, 0, drop)
        .await
        .unwrap_err();
    let unmatched = client.terminate(&none, false, 0, drop).await.unwrap_err();
    let engine = async {
        let Request::Command { command, reply, .. } = fixture.next_request().await else {
            panic!()
        };
        assert!(matches!(command, Command::Terminate { force: false, .. }));
        reply.send(done(Ok(()), 1, 1)).unwrap();
    };
    let (ended, ()) = tokio::join!(client.terminate(&net, false, 0, drop), engine);

    assert_eq!(missing.to_string(), "missing terminate selector");
    let Error::Refused { text, reply } = unmatched else {
        panic!()
    };
    assert_eq!(text, "no matching SAs to terminate found");
    assert_eq!(
        reply.to_string(),
        "success=no matches=0 terminated=0 errmsg=no matching SAs to terminate found"
    );
    let ended = ended.unwrap();
    assert_eq!((ended.matches, ended.terminated), (1, 1));
    fixture.stop().await;
}

#[tokio::test]
async fn forced_terminate_with_a_timeout_asks_politely_first() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let gw = Selector {
        ike: Some("gw".into()),
        ..Selector::default()
    };
    let engine = async {
        let Request::Command {
            command,
            reply: _kept,
            ..
        } = fixture.next_request().await
        else {
            panic!()
        };
        assert!(matches!(command, Command::Terminate { force: false, .. }));
        let Request::Command { command, reply, .. } = fixture.next_request().await else {
            panic!()
        };
        assert!(matches!(command, Command::Terminate { force: true, .. }));
        reply.send(done(Ok(()), 1, 1)).unwrap();
    };

    let (ended, ()) = tokio::join!(client.terminate(&gw, true, 20, drop), engine);

    assert_eq!(ended.unwrap().terminated, 1);
    fixture.stop().await;
}

#[tokio::test]
async fn rekey_only_starts_it() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let gw = Selector {
        ike_id: Some(1),
        ..Selector::default()
    };

    let matches = client.rekey(&gw, true).await.unwrap();
    let Request::Command { command, .. } = fixture.next_request().await else {
        panic!()
    };
    let none = client
        .rekey(
            &Selector {
                ike_id: Some(9),
                ..gw
            },
            false,
        )
        .await
        .unwrap_err();

    assert_eq!(matches, 1);
    assert!(matches!(command, Command::Rekey { reauth: true, .. }));
    assert_eq!(none.to_string(), "no matching SAs to rekey found");
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
async fn what_is_not_supported_is_refused_in_words() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let pool = Message::new().with("addrs", "10.0.0.0/24");
    let cases = [
        (
            "load-pool",
            Message::new().with_section("p", Message::new()),
            "missing addrs for pool 'p'",
        ),
        (
            "load-pool",
            Message::new().with_section("p", pool),
            "pool 'p': virtual address pools are not supported",
        ),
        (
            "unload-pool",
            Message::new().with("name", "p"),
            "p not found",
        ),
        (
            "load-authority",
            Message::new().with_section("a", Message::new()),
            "CA certificate missing: a",
        ),
        (
            "unload-authority",
            Message::new(),
            "unload: missing authority name",
        ),
        ("load-token", Message::new(), "keyid missing"),
        (
            "load-key",
            Message::new().with("type", "foo"),
            "invalid key type: foo",
        ),
        (
            "load-cert",
            Message::new().with("type", "zz"),
            "invalid certificate type 'zz'",
        ),
        (
            "load-shared",
            Message::new().with("type", "IKE"),
            "shared key data missing",
        ),
        (
            "unload-conn",
            Message::new(),
            "unload: missing connection name",
        ),
        (
            "install",
            Message::new().with("child", "zz"),
            "configuration name not found",
        ),
        (
            "uninstall",
            Message::new().with("child", "zz"),
            "policy 'zz' not found",
        ),
        ("redirect", Message::new(), "missing target gateway"),
        (
            "get-counters",
            Message::new().with("name", "zz"),
            "no counters found for this connection",
        ),
    ];
    for (command, args, text) in cases {
        let error = client.call(command, args).await.unwrap_err();
        assert_eq!(error.to_string(), text, "{command}");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn load_conn_applies_all_or_nothing() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let good = Message::new().with_list("remote_addrs", ["192.0.2.2"]);
    let bad = Message::new().with("mobike", "perhaps");
    let both = Message::new()
        .with_section("good", good.clone())
        .with_section("bad", bad);

    let refused = client.call("load-conn", both).await.unwrap_err();
    let nothing = fixture.requests.try_recv().is_err();
    let engine = async {
        let Request::LoadConnection(connection, reply) = fixture.next_request().await else {
            panic!()
        };
        reply.send(Ok(())).unwrap();
        connection.name
    };
    let (loaded, name) = tokio::join!(client.load_conn("good", good), engine);

    assert_eq!(
        refused.to_string(),
        "invalid value for: mobike, config discarded"
    );
    assert!(nothing);
    loaded.unwrap();
    assert_eq!(name, "good");
    fixture.stop().await;
}

#[tokio::test]
async fn list_conns_shows_what_was_loaded() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let mut stream = client
        .stream("list-conns", "list-conn", Message::new())
        .await
        .unwrap();

    let listed = stream.next().await.unwrap().unwrap();

    // What strongSwan 6.0.6 printed for this definition.
    assert_eq!(
        listed.to_string(),
        "gw {local_addrs=[192.0.2.1] remote_addrs=[192.0.2.2] local_port=500 remote_port=500 \
         version=IKEv2 reauth_time=0 rekey_time=14400 unique=UNIQUE_NO dpd_delay=2 \
         local-1 {id=gw1.example.org class=pre-shared key groups=[] cert_policy=[] certs=[] \
         cacerts=[]} remote-1 {id=gw2.example.org class=pre-shared key groups=[] cert_policy=[] \
         certs=[] cacerts=[]} children {net {mode=TUNNEL rekey_time=3600 rekey_bytes=0 \
         rekey_packets=0 dpd_action=none close_action=none local-ts=[10.1.0.0/24] \
         remote-ts=[10.2.0.0/24]} net2 {mode=TUNNEL rekey_time=3600 rekey_bytes=0 \
         rekey_packets=0 dpd_action=none close_action=none local-ts=[10.1.0.0/24[tcp]] \
         remote-ts=[10.2.0.0/24[tcp]]} block {mode=DROP rekey_time=3600 rekey_bytes=0 \
         rekey_packets=0 dpd_action=none close_action=none local-ts=[10.9.0.0/16] \
         remote-ts=[10.8.0.0/16]}}}"
    );
    assert!(stream.next().await.unwrap().is_none());
    fixture.stop().await;
}

#[tokio::test]
async fn list_policies_shows_traps_and_shunts() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let args = || {
        Message::new()
            .with("drop", "yes")
            .with("pass", "yes")
            .with("trap", "yes")
    };
    let mut stream = client
        .stream("list-policies", "list-policy", args())
        .await
        .unwrap();

    let listed = stream.next().await.unwrap().unwrap();

    assert_eq!(
        listed.to_string(),
        "gw/block {child=block ike=gw mode=DROP local-ts=[10.9.0.0/16] remote-ts=[10.8.0.0/16]}"
    );
    assert!(stream.next().await.unwrap().is_none());
    fixture.stop().await;
}

struct Fixture {
    dir: tempfile::TempDir,
    path: std::path::PathBuf,
    requests: mpsc::Receiver<Request>,
    events: broadcast::Sender<Arc<Event>>,
    stop: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
}

impl Fixture {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vici");
        let (sender, requests) = mpsc::channel(64);
        let (events, _) = broadcast::channel(1024);
        let control = Control {
            snapshot: Arc::new(ArcSwap::from_pointee(snapshot())),
            requests: sender,
            events: events.clone(),
        };
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

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.server.await.unwrap();
        drop(self.dir);
    }
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
        connections: BTreeMap::from([("gw".to_owned(), Arc::new(connection))]),
        ike_sas: BTreeMap::from([(1, Arc::new(established()))]),
        sa_counters: Arc::default(),
        totals: Arc::default(),
        counters: Arc::default(),
        last_errors: Arc::default(),
        credentials: Arc::default(),
        half_open: 0,
        data_plane: "tun",
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
        ..net.clone()
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
        established: Some(now),
        rekey_at: Some(now + Duration::from_secs(13_881)),
        reauth_at: None,
        tasks_queued: Vec::new(),
        tasks_active: Vec::new(),
        tasks_passive: Vec::new(),
        children: BTreeMap::from([(1, net), (2, net2)]),
    }
}
