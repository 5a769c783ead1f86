// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine with an endpoint that nobody talks to, and a data plane that plays along.

mod pair;

use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_kernel::audit::{Audit, Difference, Finding, Object, Remedy};
use swanherd_kernel::audit::{ListedPolicy, Owner, Verdict};
use tokio::sync::oneshot;

use swanherd_ike::api::Command;

use super::*;
use crate::fake_plane::FakePlane;
use crate::hub::Kinds;

struct Silent;

impl Sender for Silent {
    fn send(&self, _: &Transmit) -> Sent {
        Sent::Perhaps
    }
}

struct Fixture {
    plane: Arc<FakePlane>,
    control: Control,
    stop: oneshot::Sender<()>,
    engine: JoinHandle<()>,
    _events: mpsc::Sender<PlaneEvent>,
    _datagrams: mpsc::Sender<Datagram>,
}

impl Fixture {
    fn start(plane: FakePlane, reconcile_interval: Duration) -> Self {
        let plane = Arc::new(plane);
        let (engine, control, (events, datagram_sender)) =
            engine(Arc::clone(&plane), reconcile_interval);
        let (stop, stopped) = oneshot::channel();
        let engine = tokio::spawn(engine.run(async {
            let _ = stopped.await;
        }));
        Self {
            plane,
            control,
            stop,
            engine,
            _events: events,
            _datagrams: datagram_sender,
        }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.engine.await.unwrap();
    }
}

type Sources = (mpsc::Sender<PlaneEvent>, mpsc::Sender<Datagram>);

/// An engine that does not run yet.
fn engine(
    plane: Arc<FakePlane>,
    reconcile_interval: Duration,
) -> (Engine<FakePlane, Silent>, Control, Sources) {
    let (events, plane_events) = mpsc::channel(1);
    let (datagram_sender, datagrams) = mpsc::channel(1);
    let (engine, control) = Engine::new(Parts {
        endpoint: Recorded::new(Endpoint::new(
            Settings::default(),
            Provider::ring(),
            [7; 32],
        )),
        plane,
        plane_events,
        sender: Silent,
        datagrams,
        counters_interval: Duration::from_secs(1),
        reconcile_interval,
        reload_settings: Box::new(|| Ok(Settings::default())),
    });
    (engine, control, (events, datagram_sender))
}

/// What `look` finds, once it does.
async fn until<T>(look: impl Fn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it never came");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A connection with nothing but a shunt.
fn connection() -> Connection {
    use swanherd_config::tree::{Tree, Value};
    let mut block = Tree::new();
    block
        .push_value("mode", "drop")
        .push_list("local_ts", [Value::new("10.1.0.0/24")])
        .push_list("remote_ts", [Value::new("10.2.0.0/24")])
        .push_value("start_action", "trap");
    let mut children = Tree::new();
    children.push_section("block", block);
    let mut definition = Tree::new();
    definition.push_section("children", children);
    let names = swanherd_config::names::Names::builtin();
    let origin = swanherd_config::decode::Origin::Message;
    swanherd_config::decode::decode_connection("gw", &definition, origin, &names)
        .unwrap()
        .value
}

fn left_behind() -> Audit {
    Audit {
        findings: vec![Finding {
            object: Object::Address("10.0.0.1".parse().unwrap()),
            difference: Difference::Unwanted,
            owner: None,
            reason: "an earlier run left it".to_owned(),
            remedy: Remedy::Removed,
        }],
        alien_policies: 3,
        ..Audit::default()
    }
}

#[tokio::test]
async fn the_data_plane_is_audited_at_start_and_in_intervals() {
    let plane = FakePlane::default();
    plane.find(left_behind());
    let fixture = Fixture::start(plane, Duration::from_millis(20));
    let events = fixture.control.events(Kinds::ALL);

    let audits = until(|| {
        let audits = fixture.control.snapshot().audits.clone();
        (audits.completed >= 3).then_some(audits)
    })
    .await;

    assert_eq!(audits.last.as_ref().unwrap().alien, [0, 3]);
    assert_eq!(
        audits.findings[&("address", "unwanted", "removed")],
        audits.completed
    );
    assert!(fixture.plane.audits().iter().all(|dry_run| !dry_run));
    let mut lines = Vec::new();
    while let Some(event) = events.try_next() {
        if let Event::Log(line) = &*event {
            lines.push(line.message.clone());
        }
    }
    let told = "virtual address 10.0.0.1: an earlier run left it; removed";
    assert!(lines.iter().any(|line| line == told), "{lines:?}");
    fixture.stop().await;
}

#[tokio::test]
async fn without_an_interval_only_those_who_ask_have_it_audited() {
    let fixture = Fixture::start(FakePlane::default(), Duration::ZERO);
    // A request is answered after whatever was due at the start.
    fixture.control.ask(Request::RefreshCounters).await.unwrap();
    assert!(fixture.plane.audits().is_empty());

    let ask = |dry_run| {
        let control = fixture.control.clone();
        async move {
            control
                .ask(|reply| Request::Reconcile { dry_run, reply })
                .await
                .unwrap()
                .unwrap()
        }
    };
    assert!(ask(true).await.dry_run);
    assert!(!ask(false).await.dry_run);

    assert_eq!(fixture.plane.audits(), [true, false]);
    assert_eq!(fixture.control.snapshot().audits.completed, 1);
    fixture.stop().await;
}

#[tokio::test]
async fn policies_and_counts_come_from_the_data_plane() {
    let policy = ListedPolicy {
        index: 9,
        key: swanherd_kernel::reconcile::PolicyKey {
            direction: swanherd_ipsec::plane::Direction::In,
            src: ("10.1.0.0".parse().unwrap(), 24),
            dst: ("10.2.0.0".parse().unwrap(), 24),
            proto: 0,
            sport: (0, 0),
            dport: (0, 0),
            mark: None,
            if_id: 0,
        },
        priority: 1,
        verdict: Verdict::Discard,
        owner: Owner::Alien,
    };
    let plane = FakePlane::default();
    plane.list(vec![policy.clone()]);
    let fixture = Fixture::start(plane, Duration::ZERO);

    let listed = fixture.control.ask(Request::Policies).await.unwrap();

    assert_eq!(listed.unwrap(), [policy]);
    assert_eq!(fixture.control.snapshot().plane_events.overruns, 3);
    fixture.stop().await;
}

#[tokio::test]
async fn a_connection_from_a_port_that_nobody_listens_on_is_refused() {
    let fixture = Fixture::start(FakePlane::default(), Duration::ZERO);
    let load = |local_port| {
        let connection = Connection {
            local_port,
            ..connection()
        };
        let control = fixture.control.clone();
        async move {
            let load = |reply| Request::LoadConnection(Box::new(connection), reply);
            control.ask(load).await.unwrap()
        }
    };
    assert_eq!(load(4500).await, Ok(()));
    assert_eq!(
        load(5000).await.unwrap_err(),
        "gw: local_port = 5000 is neither charon.port (500) nor charon.port_nat_t (4500), the \
         ports that this daemon has"
    );
    fixture.stop().await;
}

#[tokio::test]
async fn shunts_of_a_loaded_connection_stand_until_it_is_unloaded() {
    let connection = connection();
    let fixture = Fixture::start(FakePlane::default(), Duration::ZERO);
    let standing = || {
        let snapshot = fixture.control.snapshot();
        let owners = snapshot.standing.values().map(|set| set.owner.clone());
        owners.collect::<Vec<_>>()
    };

    let load = |reply| Request::LoadConnection(Box::new(connection), reply);
    fixture.control.ask(load).await.unwrap().unwrap();
    let loaded = until(|| Some(standing()).filter(|owners| !owners.is_empty())).await;
    let unload = |reply| Request::UnloadConnection("gw".to_owned(), reply);
    fixture.control.ask(unload).await.unwrap().unwrap();
    until(|| standing().is_empty().then_some(())).await;

    assert_eq!(loaded, ["gw/block"]);
    fixture.stop().await;
}

#[tokio::test]
async fn what_became_of_the_file_of_definitions_is_published() {
    let fixture = Fixture::start(FakePlane::default(), Duration::ZERO);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("swanctl.conf");
    let mut loader = crate::loader::Loader::new(path.clone(), fixture.control.clone());
    let shunt = "children { c { mode = pass\n local_ts = 10.1.0.0/16\n remote_ts = 10.1.0.0/16 } }";
    std::fs::write(
        &path,
        format!("connections {{ good {{ {shunt} }}\n wrong {{ remot_ts = x }} }}"),
    )
    .unwrap();

    assert!(loader.apply().await.is_ok());
    let first = fixture.control.definitions().unwrap();
    assert_eq!((first.loaded, &first.error), (1, &None));
    let reason = &first.refused["wrong"];
    assert!(reason.contains("swanctl.conf:4:"), "{reason}");
    assert!(reason.contains("remot_ts"), "{reason}");

    // A file that is broken as a whole changes nothing of what is loaded, and is told of.
    std::fs::write(&path, "connections {").unwrap();
    assert!(loader.apply().await.is_err());
    let broken = fixture.control.definitions().unwrap();
    assert_eq!((broken.loaded, &broken.refused), (1, &first.refused));
    assert!(broken.error.as_ref().unwrap().contains("swanctl.conf"));

    std::fs::write(&path, format!("connections {{ good {{ {shunt} }} }}")).unwrap();
    assert!(loader.apply().await.is_ok());
    let mended = fixture.control.definitions().unwrap();
    assert_eq!((mended.loaded, mended.refused.len()), (1, 0));
    assert_eq!(mended.error, None);
    fixture.stop().await;
}

/// A connection to a peer that never answers.
fn silent_peer() -> Connection {
    use swanherd_config::tree::{Tree, Value};
    let mut auth = Tree::new();
    auth.push_value("auth", "psk").push_value("id", "gw");
    let mut net = Tree::new();
    net.push_list("remote_ts", [Value::new("10.2.0.0/24")]);
    let mut children = Tree::new();
    children.push_section("net", net);
    let mut definition = Tree::new();
    definition
        .push_list("local_addrs", [Value::new("192.0.2.1")])
        .push_list("remote_addrs", [Value::new("192.0.2.2")])
        .push_section("local", auth.clone())
        .push_section("remote", auth)
        .push_section("children", children);
    let names = swanherd_config::names::Names::builtin();
    let origin = swanherd_config::decode::Origin::Message;
    swanherd_config::decode::decode_connection("gw", &definition, origin, &names)
        .unwrap()
        .value
}

#[tokio::test]
async fn a_command_that_nobody_waits_for_any_more_is_forgotten_at_once() {
    let plane = Arc::new(FakePlane::default());
    let (mut engine, control, _sources) = engine(plane, Duration::ZERO);
    engine.load_connection(silent_peer()).unwrap();
    let initiate = || Command::Initiate {
        connection: Some("gw".into()),
        child: Some("net".into()),
        respect_limits: false,
    };

    // Given up on its way to the engine.
    drop(control.command(initiate(), None).await.unwrap());
    let request = engine.requests.recv().await.unwrap();
    engine.handle_request(request);
    assert!(engine.waiting.is_empty());

    // Given up while it waits for the peer: the engine is woken rather than left to look.
    let pending = control.command(initiate(), None).await.unwrap();
    let request = engine.requests.recv().await.unwrap();
    engine.handle_request(request);
    engine.drain();
    assert_eq!(engine.waiting.len(), 1);
    let mut rings = std::pin::pin!(control.abandoned.notified());
    // That of the first one is still due.
    rings.as_mut().await;
    drop(pending);
    tokio::time::timeout(Duration::from_secs(1), control.abandoned.notified())
        .await
        .unwrap();
    engine.drop_abandoned();
    assert!(engine.waiting.is_empty());
}
