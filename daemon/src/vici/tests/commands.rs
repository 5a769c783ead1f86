// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands, with the test as the engine.

use std::net::Ipv4Addr;
use std::sync::Arc;

use swanherd_ike::api::Command;
use swanherd_ipsec::TrafficSelector;
use swanherd_vici::types::{Initiate, ListSas, Selector};
use swanherd_vici::{Error, Message, Packet};

use super::{Fixture, done, established, line, request, snapshot};
use crate::control::Request;

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
async fn an_ike_sa_with_more_children_than_a_packet_holds_hides_nothing() {
    let fixture = Fixture::start().await;
    // As a peer may set them up that has as many selectors as one payload carries.
    let mut snapshot = snapshot();
    let mut sa = established();
    let selectors = (0..255_u8).map(|last| TrafficSelector {
        protocol: 6,
        start_port: 10_000,
        end_port: 60_000,
        ..TrafficSelector::host(Ipv4Addr::new(198, 51, 100, last).into())
    });
    let mut child = sa.children[&1].clone();
    child.local_ts = selectors.collect();
    sa.children.clear();
    for id in 1..=100 {
        child.id = id;
        sa.children.insert(id, child.clone());
    }
    let other = swanherd_ike::api::IkeSaInfo {
        id: sa.id + 1,
        ..established()
    };
    let all = [sa, other].map(|sa| (sa.id, Arc::new(sa)));
    snapshot.ike_sas = Arc::new(all.into());
    fixture.snapshot.store(Arc::new(snapshot));
    let mut client = fixture.client().await;

    let sas = client.list_sas(&ListSas::default()).await.unwrap();

    let children: Vec<usize> = sas.iter().map(|sa| sa.children.len()).collect();
    assert_eq!(children, [100, 2]);
    assert_eq!(sas[0].children[99].local_ts.len(), 255);
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
async fn initiate_that_fails_says_why_and_so_does_the_list_of_errors() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let what = Initiate {
        child: Some("net".into()),
        ike: Some("gw".into()),
        timeout_ms: 0,
        log_level: None,
    };
    let reason = "install SA c0000001 to 192.0.2.1: Requested type not found";
    let fail = async |fixture: &mut Fixture, at: u64| {
        let Request::Command { reply, .. } = fixture.next_request().await else {
            panic!()
        };
        let mut published = snapshot();
        published.last_errors = Arc::new(std::collections::BTreeMap::from([(
            "gw".to_owned(),
            (at, reason.to_owned()),
        )]));
        fixture.snapshot.store(Arc::new(published));
        reply.send(done(Err("failed".into()), 0, 0)).unwrap();
    };

    let (earlier, ()) = tokio::join!(client.initiate(&what, drop), fail(&mut fixture, 1));
    let future = u64::MAX / 2;
    let (now, ()) = tokio::join!(client.initiate(&what, drop), fail(&mut fixture, future));
    let errors = client.last_errors().await.unwrap();

    let reason_of = |answer| match answer {
        Err(Error::Refused { reply, .. }) => reply.str("reason").map(str::to_owned),
        other => panic!("{other:?}"),
    };
    assert_eq!(reason_of(earlier), None, "that was before");
    assert_eq!(reason_of(now).as_deref(), Some(reason));
    assert_eq!(errors["gw"].text, reason);
    assert_eq!(errors["gw"].at, future);
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

    let nobody = Selector {
        ike_id: Some(9),
        ..gw.clone()
    };
    let engine = async {
        // Two match, and one of them is not established.
        for (result, matches, begun) in [
            (Ok(()), 2, 1),
            (Err("no matching SAs to rekey found".into()), 1, 0),
            (Ok(()), 0, 0),
        ] {
            let Request::Command { command, reply, .. } = fixture.next_request().await else {
                panic!()
            };
            let Command::Rekey { reauth, .. } = command else {
                panic!()
            };
            assert_eq!(reauth, begun == 1);
            reply.send(done(result, matches, begun)).unwrap();
        }
    };
    let rekeys = async {
        let matches = client.rekey(&gw, true).await.unwrap();
        let connecting = client.rekey(&gw, false).await.unwrap_err();
        let none = client.rekey(&nobody, false).await.unwrap_err();
        (matches, connecting, none)
    };
    let ((matches, connecting, none), ()) = tokio::join!(rekeys, engine);

    assert_eq!(matches, 1);
    assert_eq!(connecting.to_string(), "no matching SAs to rekey found");
    assert_eq!(none.to_string(), "no matching SAs to rekey found");
    fixture.stop().await;
}

#[tokio::test]
async fn what_is_not_supported_is_refused_in_words() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let pool = Message::new().with("addrs", "10.0.0.0/24");
    let to = |gateway: &str| Message::new().with("gateway", gateway);
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
            "redirect",
            Message::new().with("gateway", "C=CH, CN=gw"),
            "unsupported gateway identity",
        ),
        (
            "redirect",
            to("gw.example.org").with("peer-ip", "everywhere"),
            "invalid peer IP selector",
        ),
        (
            "redirect",
            to("gw.example.org").with("peer-id", "xmppaddr:a@b"),
            "invalid peer identity selector",
        ),
        (
            "redirect",
            to("gw.example.org"),
            "missing redirect selector",
        ),
        (
            "redirect",
            to("192.0.2.9").with("peer-ip", "192.0.2.128/25"),
            "no matching SAs to redirect found",
        ),
        (
            "redirect",
            to("192.0.2.9").with("peer-id", "*.example.com"),
            "no matching SAs to redirect found",
        ),
        (
            "redirect",
            to("2001:db8::9")
                .with("peer-ip", "192.0.2.0-192.0.2.7")
                .with("peer-id", "*.example.org")
                .with("ike", "gw"),
            "redirection of peers is not supported",
        ),
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
async fn install_and_uninstall_ask_the_endpoint() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    for command in ["install", "uninstall"] {
        let engine = async {
            let Request::Command { command, reply, .. } = fixture.next_request().await else {
                panic!()
            };
            let (Command::Install { child, .. } | Command::Uninstall { child, .. }) = command
            else {
                panic!("{command:?}")
            };
            assert_eq!(child, "net");
            let why = "installing policy 'net' failed: not today".to_owned();
            reply.send(done(Err(why), 0, 0)).unwrap();
        };
        let args = Message::new().with("child", "net");
        let (answer, ()) = tokio::join!(client.request(command, args), engine);
        let answer = answer.unwrap();
        assert_eq!(
            answer.to_string(),
            "success=no errmsg=installing policy 'net' failed reason=not today"
        );
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
