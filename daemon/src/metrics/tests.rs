// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use swanherd_config::decode::{Origin, decode_connection};
use swanherd_config::names::Names;
use swanherd_config::tree::Tree;
use swanherd_ike::api::{Counter, Exchange, FailureReason};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use super::collect::collect;
use super::exposition::Format;
use super::{Options, Server, Tls};
use crate::audits::{Last, Summary};
use crate::control::{Control, Definitions, Request, Snapshot, Totals};
use crate::vici::Clients;

/// What a scraper gets.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    collect(snapshot, None, &Clients::default(), Format::OpenMetrics)
}

#[test]
fn every_configured_child_is_there_even_if_it_is_down() {
    let text = collect(&snapshot(), None, &Clients::default(), Format::OpenMetrics);

    for line in [
        "swanherd_child_up{connection=\"gw\",child=\"net\"} 0",
        "swanherd_child_bytes_total{connection=\"gw\",child=\"net\",direction=\"in\"} 18446744073709551615",
        "swanherd_child_bytes_total{connection=\"gw\",child=\"net\",direction=\"out\"} 7",
        "swanherd_child_packets_total{connection=\"gw\",child=\"net\",direction=\"out\"} 0",
        "swanherd_child_bytes_total{connection=\"gone\",child=\"old\",direction=\"in\"} 3",
        "swanherd_ike_up{connection=\"gw\"} 0",
        "swanherd_ike_sas{state=\"established\"} 0",
        "swanherd_ike_half_open_sas 2",
        "swanherd_ike_messages_total{exchange=\"ike_auth\",direction=\"in\",kind=\"response\"} 5",
        "swanherd_failures_total{reason=\"timeout\"} 4",
        "swanherd_acquires_total{outcome=\"coalesced\"} 9",
        "swanherd_connection_acquires_total{connection=\"gw\",outcome=\"coalesced\"} 8",
        "swanherd_connection_acquires_total{connection=\"gw\",outcome=\"started\"} 0",
        "swanherd_connection_failures_total{connection=\"gw\",reason=\"timeout\"} 3",
        "swanherd_connection_failures_total{connection=\"gw\",reason=\"peer_auth_failed\"} 0",
        "swanherd_connection_last_error_timestamp_seconds{connection=\"gw\"} 1700000000",
        "process_start_time_seconds 1600000000",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    // A shunt has nothing that could be up.
    assert!(!text.contains("child=\"block\""));
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn definitions_that_were_refused_are_counted() {
    let definitions = Definitions {
        at: 1_700_000_001,
        loaded: 2,
        refused: BTreeMap::from([("wrong".to_owned(), "why".to_owned())]),
        ..Definitions::default()
    };
    let has = |definitions: &Definitions, line: &str| {
        let text = collect(
            &snapshot(),
            Some(definitions),
            &Clients::default(),
            Format::OpenMetrics,
        );
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    };
    has(&definitions, "swanherd_definitions{state=\"loaded\"} 2");
    has(&definitions, "swanherd_definitions{state=\"refused\"} 1");
    has(&definitions, "swanherd_definitions_last_apply_ok 1");
    has(
        &definitions,
        "swanherd_definitions_last_apply_timestamp_seconds 1700000001",
    );
    let broken = Definitions {
        error: Some("no file".to_owned()),
        ..definitions
    };
    has(&broken, "swanherd_definitions_last_apply_ok 0");
}

#[test]
fn every_sample_belongs_to_the_family_above_it() {
    for format in [Format::OpenMetrics, Format::Text] {
        let text = collect(&snapshot(), None, &Clients::default(), format);
        let mut family = String::new();
        let mut families = BTreeSet::new();
        let mut samples = BTreeSet::new();
        for line in text.lines() {
            let mut words = line.split(' ');
            match (words.next(), words.next()) {
                (Some("#"), Some("HELP")) => {
                    words.next().unwrap().clone_into(&mut family);
                    assert!(families.insert(family.clone()), "{family} twice");
                }
                (Some("#"), _) => {}
                (Some(sample), Some(value)) => {
                    assert!(sample.starts_with(&family), "{line} in {family}");
                    assert!(samples.insert(sample.to_owned()), "{sample} twice");
                    assert!(value.parse::<f64>().unwrap() >= 0.0);
                }
                _ => panic!("{line}"),
            }
        }
    }
}

#[test]
fn audits_and_events_of_the_data_plane_are_counted() {
    let mut snapshot = snapshot();
    let nothing_yet = collect(&snapshot, None, &Clients::default(), Format::OpenMetrics);
    snapshot.audits = Arc::new(Summary {
        last: Some(Last {
            at: 1_700_000_001,
            took: Duration::from_micros(1500),
            present: [10, 15],
            alien: [1, 2],
            stale: [0, 3],
        }),
        findings: BTreeMap::from([
            (("policy", "unwanted", "failed"), 3),
            (("route", "missing", "installed"), 4),
        ]),
        completed: 5,
        failed: 6,
    });
    snapshot.plane_events.overruns = 7;
    snapshot.plane_events.undelivered = 11;
    snapshot.plane_events.acquires.coalesced = 8;
    snapshot.plane_events.foreign_changes = 9;
    snapshot.data_plane = "tun";
    snapshot.plane_events.drops.no_sa = 10;
    let text = collect(&snapshot, None, &Clients::default(), Format::OpenMetrics);

    for line in [
        "swanherd_reconcile_findings_total{object=\"policy\",difference=\"unwanted\",remedy=\"failed\"} 3",
        "swanherd_reconcile_findings_total{object=\"route\",difference=\"missing\",remedy=\"installed\"} 4",
        "swanherd_reconcile_findings_total{object=\"sa\",difference=\"missing\",remedy=\"renegotiated\"} 0",
        "swanherd_reconcile_audits_total{outcome=\"completed\"} 5",
        "swanherd_reconcile_audits_total{outcome=\"failed\"} 6",
        "swanherd_reconcile_last_timestamp_seconds 1700000001",
        "swanherd_reconcile_duration_seconds 0.001500",
        "swanherd_reconcile_present{object=\"policy\"} 15",
        "swanherd_reconcile_alien{object=\"sa\"} 1",
        "swanherd_reconcile_stale{object=\"policy\"} 3",
        "swanherd_plane_event_overruns_total 7",
        "swanherd_plane_events_undelivered_total 11",
        "swanherd_plane_acquires_total{reason=\"coalesced\"} 8",
        "swanherd_plane_foreign_changes_total 9",
        "swanherd_plane_dropped_packets_total{reason=\"no_sa\"} 10",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(!nothing_yet.contains("swanherd_reconcile_last"));
    assert!(nothing_yet.contains("swanherd_reconcile_audits_total{outcome=\"failed\"} 0\n"));
}

#[tokio::test]
async fn endpoints_answer_what_was_asked() {
    let fixture = Fixture::start().await;

    let metrics = fixture.get("GET", "/metrics", "").await;
    assert!(metrics.starts_with("HTTP/1.1 200 "), "{metrics}");
    assert!(metrics.contains("content-type: application/openmetrics-text; version=1.0.0;"));
    assert!(metrics.ends_with("# EOF\n"));
    let plain = fixture
        .get("GET", "/metrics", "Accept: text/plain\r\n")
        .await;
    assert!(plain.contains("content-type: text/plain; version=0.0.4;"));
    assert!(
        fixture
            .get("GET", "/healthz", "")
            .await
            .ends_with("\r\n\r\nok\n")
    );
    assert!(
        fixture
            .get("GET", "/", "")
            .await
            .starts_with("HTTP/1.1 404 ")
    );
    assert!(
        fixture
            .get("POST", "/metrics", "")
            .await
            .starts_with("HTTP/1.1 405 ")
    );
    fixture.stop().await;
}

#[tokio::test]
async fn health_fails_when_the_engine_hangs_or_is_gone() {
    let mut fixture = Fixture::start().await;
    let mut old = snapshot();
    old.at = Instant::now()
        .checked_sub(Duration::from_secs(3600))
        .unwrap_or(old.at);
    let hanging = old.at.elapsed() > Duration::from_secs(3000);
    fixture.control.snapshot.store(Arc::new(old));
    let silent = fixture.get("GET", "/healthz", "").await;
    fixture.requests.close();
    let closed = fixture.get("GET", "/healthz", "").await;

    // A machine that booted within the hour has no moment that long ago.
    assert!(!hanging || silent.starts_with("HTTP/1.1 503 "), "{silent}");
    assert!(closed.starts_with("HTTP/1.1 503 ") && closed.ends_with("shutting down\n"));
    fixture.stop().await;
}

#[tokio::test]
async fn without_tls_only_the_loopback_is_served() {
    let wide = Options {
        listen: "0.0.0.0:0".parse().unwrap(),
        tls: None,
    };
    let error = Server::bind(&wide).await.err().unwrap();
    assert!(error.to_string().contains("need TLS"), "{error}");

    let missing = Options {
        listen: "127.0.0.1:0".parse().unwrap(),
        tls: Some(Tls {
            certs: "/nonexistent/c.pem".into(),
            key: "/nonexistent/k.pem".into(),
        }),
    };
    let error = Server::bind(&missing).await.err().unwrap();
    assert!(
        error.to_string().starts_with("/nonexistent/c.pem: "),
        "{error}"
    );
}

#[tokio::test]
async fn with_tls_scrapers_are_served_and_plain_text_is_not() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (certs, key) = (dir.path().join("c.pem"), dir.path().join("k.pem"));
    std::fs::write(&certs, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let fixture = Fixture::with(Some(Tls { certs, key })).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(fixture.addr).await.unwrap();

    let stream = connector.connect("localhost".try_into().unwrap(), stream);
    let encrypted = exchange(stream.await.unwrap(), "GET", "/healthz", "").await;
    let stream = TcpStream::connect(fixture.addr).await.unwrap();
    let plain = exchange(stream, "GET", "/healthz", "").await;

    assert!(encrypted.starts_with("HTTP/1.1 200 "), "{encrypted}");
    assert!(!plain.contains("HTTP"), "{plain}");
    fixture.stop().await;
}

struct Fixture {
    addr: SocketAddr,
    control: Control,
    requests: mpsc::Receiver<Request>,
    stop: oneshot::Sender<()>,
    server: tokio::task::JoinHandle<()>,
}

impl Fixture {
    async fn start() -> Self {
        Self::with(None).await
    }

    async fn with(tls: Option<Tls>) -> Self {
        let (sender, requests) = mpsc::channel(1);
        let control = Control::new(snapshot(), sender);
        let options = Options {
            listen: "127.0.0.1:0".parse().unwrap(),
            tls,
        };
        let server = Server::bind(&options).await.unwrap();
        let addr = server.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = tokio::spawn(server.run(control.clone(), async {
            let _ = stopped.await;
        }));
        Self {
            addr,
            control,
            requests,
            stop,
            server,
        }
    }

    async fn get(&self, method: &str, path: &str, headers: &str) -> String {
        let stream = TcpStream::connect(self.addr).await.unwrap();
        exchange(stream, method, path, headers).await
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.server.await.unwrap();
    }
}

/// Sends a request and returns all that comes back.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    method: &str,
    path: &str,
    headers: &str,
) -> String {
    let request =
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    // A server that speaks something else may hang up with octets unread.
    let _ = stream.read_to_end(&mut response).await;
    String::from_utf8_lossy(&response).into_owned()
}

fn snapshot() -> Snapshot {
    let mut shunt = Tree::new();
    shunt.push_value("mode", "drop");
    let mut children = Tree::new();
    children
        .push_section("net", Tree::new())
        .push_section("block", shunt);
    let mut definition = Tree::new();
    definition.push_section("children", children);
    let connection = decode_connection("gw", &definition, Origin::Message, &Names::builtin())
        .unwrap()
        .value;
    let of = |bytes_in, bytes_out| Totals {
        bytes_in,
        bytes_out,
        ..Totals::default()
    };
    let timeout = Counter::Failure(FailureReason::Timeout);
    let coalesced = Counter::Acquire(swanherd_ike::api::AcquireFate::Coalesced);
    let auth = Counter::Message {
        exchange: Exchange::IkeAuth,
        inbound: true,
        response: true,
    };
    Snapshot {
        at: Instant::now(),
        started: (Instant::now(), 1_600_000_000),
        connections: Arc::new(BTreeMap::from([("gw".to_owned(), Arc::new(connection))])),
        ike_sas: Arc::default(),
        sa_counters: Arc::default(),
        totals: Arc::new(BTreeMap::from([
            (("gw".to_owned(), "net".to_owned()), of(u64::MAX, 7)),
            (("gone".to_owned(), "old".to_owned()), of(3, 0)),
        ])),
        counters: Arc::new(BTreeMap::from([
            (
                String::new(),
                BTreeMap::from([(timeout, 4), (auth, 5), (coalesced, 9)]),
            ),
            (
                "gw".to_owned(),
                BTreeMap::from([(timeout, 3), (coalesced, 8)]),
            ),
        ])),
        troubles: Arc::default(),
        last_errors: Arc::new(BTreeMap::from([(
            "gw".to_owned(),
            (1_700_000_000, "no answer".to_owned()),
        )])),
        credentials: Arc::default(),
        half_open: 2,
        data_plane: "xfrm",
        standing: Arc::default(),
        audits: Arc::default(),
        plane_events: swanherd_kernel::EventCounts::default(),
    }
}
