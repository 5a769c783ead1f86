// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two daemons but for their sockets and data planes: what VICI clients, log and metrics tell of
//! the life of a tunnel.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};

use swanherd_vici::types::{Initiate, Selector};
use swanherd_vici::{Client, Message};
use tracing::field::{Field, Visit};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use super::*;
use crate::vici;

const ALICE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
const BOB: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
/// What Alice's datagrams come from.
const NAT: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
const EVENTS: [&str; 5] = [
    "ike-updown",
    "ike-rekey",
    "ike-update",
    "child-updown",
    "child-rekey",
];

#[tokio::test]
async fn events_come_once_and_in_order_and_no_rekey_is_an_outage() {
    let log = Log::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(log.clone()));
    let nat = Arc::new(AtomicU16::new(20_000));
    let (to_alice, at_alice) = mpsc::channel(64);
    let (to_bob, at_bob) = mpsc::channel(64);
    let wire = |engine| Wire {
        engine,
        nat: Arc::clone(&nat),
    };
    let mut alice = Daemon::start("to-bob", wire(to_bob), at_alice).await;
    let mut bob = Daemon::start("to-alice", wire(to_alice), at_bob).await;
    alice.load(ALICE, Some(BOB), "alice", "bob").await;
    bob.load(BOB, None, "bob", "alice").await;

    let up = Initiate {
        child: Some("net".to_owned()),
        timeout_ms: 10_000,
        ..Initiate::default()
    };
    alice.commands.initiate(&up, |_| ()).await.unwrap();
    let begins = ["ike-updown [1]: up", "child-updown [1]: net{1} up"];
    alice.expect(&begins).await;
    bob.expect(&begins).await;

    let watch = |control: &Control, connection: &'static str| {
        tokio::spawn(never_down(control.clone(), connection))
    };
    let watches = [
        watch(&alice.control, "to-bob"),
        watch(&bob.control, "to-alice"),
    ];
    for (who, what, told) in [
        (
            ALICE,
            CHILD,
            "child-rekey [1]: net{1} is replaced by net{2}",
        ),
        (BOB, CHILD, "child-rekey [1]: net{2} is replaced by net{3}"),
        (ALICE, IKE, "ike-rekey [1]: [1] is replaced by [2]"),
        (BOB, IKE, "ike-rekey [2]: [2] is replaced by [3]"),
        (BOB, CHILD, "child-rekey [3]: net{3} is replaced by net{4}"),
    ] {
        let teller = if who == ALICE { &mut alice } else { &mut bob };
        teller.rekey(what).await;
        alice.expect(&[told]).await;
        bob.expect(&[told]).await;
    }

    // The NAT forgets its mappings: Bob is told that Alice has moved, Alice cannot know.
    nat.store(30_000, Ordering::Relaxed);
    alice.rekey(CHILD).await;
    let rekeyed = "child-rekey [3]: net{4} is replaced by net{5}";
    alice.expect(&[rekeyed]).await;
    let moved = "ike-update [3]: from 127.0.0.2:4500 and 127.0.0.3:24500 to 127.0.0.2:4500 and \
                 127.0.0.3:34500";
    bob.expect(&[moved, rekeyed]).await;
    for watch in watches {
        watch.abort();
        if let Err(error) = watch.await {
            assert!(error.is_cancelled(), "{error}");
        }
    }

    let all = Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    };
    alice
        .commands
        .terminate(&all, false, 10_000, |_| ())
        .await
        .unwrap();
    let ends = ["ike-updown [3]: down", "child-updown [3]: net{5} down"];
    alice.expect(&ends).await;
    bob.expect(&ends).await;

    for daemon in [alice, bob] {
        let connection = daemon.connection;
        let told = daemon.stop().await;
        let logged = log.of(connection);
        let numbered = (1..).zip(&told).map(|(seq, told)| format!("{seq} {told}"));
        assert_eq!(logged, numbered.collect::<Vec<_>>());
    }
}

/// One child, or the IKE SA itself.
type What = bool;
const CHILD: What = true;
const IKE: What = false;

/// An engine with its VICI server, somebody who listens, and somebody who commands.
struct Daemon {
    connection: &'static str,
    control: Control,
    commands: Client,
    listener: Client,
    told: Vec<String>,
    stop: [oneshot::Sender<()>; 2],
    tasks: [JoinHandle<()>; 2],
    _events: mpsc::Sender<PlaneEvent>,
    _dir: tempfile::TempDir,
}

impl Daemon {
    async fn start(
        connection: &'static str,
        sender: Wire,
        datagrams: mpsc::Receiver<Datagram>,
    ) -> Self {
        let (events, plane_events) = mpsc::channel(1);
        let seed = [u8::try_from(connection.len()).unwrap(); 32];
        let (engine, control) = Engine::new(Parts {
            endpoint: Recorded::new(Endpoint::new(Settings::default(), Provider::ring(), seed)),
            plane: Arc::new(FakePlane::default()),
            plane_events,
            sender,
            datagrams,
            counters_interval: Duration::from_secs(1),
            reconcile_interval: Duration::ZERO,
            reload_settings: Box::new(|| Ok(Settings::default())),
        });
        let dir = tempfile::tempdir().unwrap();
        let uri = format!("unix://{}", dir.path().join("vici").display());
        let options = vici::Options {
            uri: uri.clone(),
            ..vici::Options::default()
        };
        let server = vici::Server::bind(&options).await.unwrap();
        let (stop_engine, engine_stopped) = oneshot::channel();
        let (stop_server, server_stopped) = oneshot::channel();
        let engine = tokio::spawn(engine.run(async {
            let _ = engine_stopped.await;
        }));
        let server = tokio::spawn(server.run(control.clone(), async {
            let _ = server_stopped.await;
        }));
        let commands = Client::connect(&uri).await.unwrap();
        let mut listener = Client::connect(&uri).await.unwrap();
        listener.subscribe(&EVENTS).await.unwrap();
        Self {
            connection,
            control,
            commands,
            listener,
            told: Vec::new(),
            stop: [stop_engine, stop_server],
            tasks: [engine, server],
            _events: events,
            _dir: dir,
        }
    }

    /// Loads the tunnel between `own` and `peer`.
    async fn load(&mut self, local: IpAddr, remote: Option<IpAddr>, own: &str, peer: &str) {
        let round = |id: &str| Message::new().with("auth", "psk").with("id", id);
        let net = |own: &str| format!("10.{}.0.0/16", own.len());
        let child = Message::new()
            .with_list("local_ts", [net(own)])
            .with_list("remote_ts", [net(peer)]);
        let mut connection = Message::new()
            .with("version", "2")
            .with("mobike", "no")
            .with_list("local_addrs", [local.to_string()])
            .with_section("local", round(own))
            .with_section("remote", round(peer))
            .with_section("children", Message::new().with_section("net", child));
        if let Some(remote) = remote {
            connection = connection.with_list("remote_addrs", [remote.to_string()]);
        }
        let commands = &mut self.commands;
        commands
            .load_shared("psk", "IKE", b"correct horse", &[])
            .await
            .unwrap();
        commands
            .load_conn(self.connection, connection)
            .await
            .unwrap();
    }

    async fn rekey(&mut self, what: What) {
        let selector = if what == CHILD {
            Selector {
                child: Some("net".to_owned()),
                ..Selector::default()
            }
        } else {
            Selector {
                ike: Some(self.connection.to_owned()),
                ..Selector::default()
            }
        };
        // One that was replaced a moment ago matches as well.
        assert_ne!(self.commands.rekey(&selector, false).await.unwrap(), 0);
    }

    /// The next events are these.
    async fn expect(&mut self, wanted: &[&str]) {
        for wanted in wanted {
            let event = tokio::time::timeout(Duration::from_secs(10), self.listener.next_event());
            let event = event.await.expect(wanted).unwrap();
            let text = text(&event.name, &event.message, self.connection);
            assert_eq!(text, *wanted, "{}", self.connection);
            self.told.push(text);
        }
    }

    /// Ends it, and has all that it told.
    async fn stop(mut self) -> Vec<String> {
        for stop in self.stop {
            stop.send(()).unwrap();
        }
        // Whatever came besides what was waited for.
        if let Ok(event) = self.listener.next_event().await {
            let text = text(&event.name, &event.message, self.connection);
            panic!("{}: {text}", self.connection);
        }
        for task in self.tasks {
            task.await.unwrap();
        }
        self.told
    }
}

/// The way from one engine to the other, with a NAT before Alice that maps each of her ports to
/// one that is higher by a number.
struct Wire {
    engine: mpsc::Sender<Datagram>,
    nat: Arc<AtomicU16>,
}

impl Sender for Wire {
    fn send(&self, transmit: &Transmit) -> Sent {
        if transmit.keepalive {
            return Sent::Perhaps;
        }
        let (mut remote, mut local) = (transmit.local, transmit.remote);
        let above = self.nat.load(Ordering::Relaxed);
        if remote.ip() == ALICE {
            remote = SocketAddr::new(NAT, remote.port() + above);
        } else {
            local = SocketAddr::new(ALICE, local.port() % 10_000);
        }
        let payload = transmit.payload.clone();
        // What comes before there is anybody to receive it is lost, as everywhere.
        let _ = self.engine.try_send(Datagram {
            local,
            remote,
            payload,
        });
        Sent::Perhaps
    }
}

/// An event as a line of the log tells it.
fn text(name: &str, message: &Message, connection: &str) -> String {
    let sa = message.section(connection).unwrap();
    let of = |section: &Message| section.str("uniqueid").unwrap().to_owned();
    let state = || match message.str("up") {
        Some("yes") => "up",
        _ => "down",
    };
    let ends = |section: &Message| {
        let end = |which: &str| {
            let of = |what: &str| section.str(&format!("{which}-{what}")).unwrap();
            format!("{}:{}", of("host"), of("port"))
        };
        format!("{} and {}", end("local"), end("remote"))
    };
    let (id, text) = match name {
        "ike-updown" => (of(sa), state().to_owned()),
        "ike-rekey" => {
            let [old, new] = ["old", "new"].map(|which| of(sa.section(which).unwrap()));
            (old.clone(), format!("[{old}] is replaced by [{new}]"))
        }
        "ike-update" => (of(sa), format!("from {} to {}", ends(sa), ends(message))),
        _ => {
            let children: Vec<_> = sa.section("child-sas").unwrap().sections().collect();
            let [(name_of_section, child)] = children[..] else {
                panic!("{message}");
            };
            let text = if name == "child-updown" {
                let name = child.str("name").unwrap();
                format!("{name}{{{}}} {}", of(child), state())
            } else {
                let [old, new] = ["old", "new"].map(|which| of(child.section(which).unwrap()));
                let name = name_of_section;
                format!("{name}{{{old}}} is replaced by {name}{{{new}}}")
            };
            (of(sa), text)
        }
    };
    format!("{name} [{id}]: {text}")
}

/// Looks at the metrics again and again: at all times the tunnel is up, and nothing has failed.
async fn never_down(control: Control, connection: &'static str) {
    let wanted = [
        format!("swanherd_ike_up{{connection=\"{connection}\"}} 1"),
        format!("swanherd_child_up{{connection=\"{connection}\",child=\"net\"}} 1"),
    ];
    loop {
        let text = crate::metrics::tests::text(&control.snapshot());
        for wanted in &wanted {
            assert!(text.lines().any(|line| line == wanted), "{wanted}\n{text}");
        }
        for line in text.lines().filter(|line| line.contains("failures_total")) {
            assert!(line.ends_with(" 0"), "{line}");
        }
        tokio::task::yield_now().await;
    }
}

/// The numbered lines of the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, String)>>>);

impl Log {
    /// Those about a connection.
    fn of(&self, connection: &str) -> Vec<String> {
        let lines = self.0.lock().unwrap();
        let own = lines.iter().filter(|(of, _)| of == connection);
        own.map(|(_, line)| line.clone()).collect()
    }
}

impl<S: tracing::Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().fields().field("seq").is_none() {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (connection, id) = fields.of("ike_sa").split_once('[').unwrap();
        let [seq, name, text] = ["seq", "event", "message"].map(|field| fields.of(field));
        let line = format!("{seq} {name} [{id}: {text}");
        self.0.lock().unwrap().push((connection.to_owned(), line));
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Fields {
    fn of(&self, name: &str) -> &str {
        &self.0[name]
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let mut text = String::new();
        write!(text, "{value:?}").unwrap();
        self.0.insert(field.name(), text);
    }
}
