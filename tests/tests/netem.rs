// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tunnels whose SAs are rekeyed all the time, by both sides, over links that lose and delay.
//!
//! Each lost ping has to be one of those that the links are known to have lost, and no tunnel may
//! be down for a moment. Where so much is lost that an exchange may run out of retransmissions, the
//! tunnel that this costs has to come back by itself.
//!
//! `cargo xtask test --only kernel` runs it under User-mode Linux, with `--long` for five minutes
//! and thirty tunnels.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use swanherd_tests::{
    Class, Drops, Event, Events, Message, Netem, Node, Pings, Plane, Star, StarPlan,
};

/// Between two pings of a tunnel.
const INTERVAL: Duration = Duration::from_millis(200);
/// Retransmissions after 1.0, 1.8, 3.2, 5.8 and 10.5 s, and the end 18.9 s after the last.
const SETTINGS: &str =
    "  retransmit_timeout = 1.0\n  retransmit_base = 1.8\n  retransmit_tries = 5\n";
/// The longest that a gateway takes to notice that its peer is gone: the next probe is due, and is
/// sent six times.
const NOTICED: Duration = Duration::from_secs(10 + 42);
/// A peer that has given up an SA is not told of by anything but its silence; then a first attempt
/// has to succeed, whose exchanges may need all their retransmissions.
const BACK: Duration = Duration::from_secs(42);

#[test]
fn five_percent_lost() {
    let course = run("loss 5% delay 100ms 100ms");
    course.print("5 % lost, 100 ms of jitter");
    for tunnel in &course.tunnels {
        assert!(
            tunnel.outages.is_empty(),
            "{}: {:?}\n{}",
            tunnel.name,
            tunnel.outages,
            tunnel.logs.join("---\n")
        );
    }
    course.assert_explained();
}

#[test]
fn twenty_percent_lost() {
    let course = run("loss 20% delay 100ms 100ms");
    course.print("20 % lost, 100 ms of jitter");
    course.assert_explained();
}

/// What happened to all tunnels.
struct Course {
    tunnels: Vec<Tunnel>,
    took: Duration,
    /// Packets of IKE.
    ike: Class,
    counters: Vec<(&'static str, u64)>,
    /// Packets that the gateway's kernel dropped, by reason.
    kernel: String,
}

/// What happened to one tunnel.
struct Tunnel {
    name: String,
    sent: u32,
    received: u32,
    /// Packets of ESP that the links lost.
    dropped: u32,
    /// From the moment when one side gave it up until it was whole again.
    outages: Vec<Duration>,
    /// IKE SAs that the gateway has begun to establish.
    attempts: u64,
    /// Requests that nobody answered, by their last retransmission: what both sides say of them.
    unanswered: Vec<String>,
    /// What both sides have logged of it.
    logs: [String; 2],
    /// Packets that the peer's kernel dropped, by reason.
    kernel: String,
}

fn long() -> bool {
    std::env::var_os("SWANHERD_LONG").is_some_and(|value| value != "0")
}

fn run(quality: &str) -> Course {
    let (count, seconds) = if long() { (30, 300) } else { (6, 25) };
    let mut star = Star::start(&StarPlan {
        settings: SETTINGS,
        connection: "rekey_time = 10s\n    over_time = 120s\n    rand_time = 2s\n    \
                     dpd_delay = 10s",
        child: "rekey_time = 10s\n        life_time = 130s\n        rand_time = 2s",
        ..StarPlan::new(Plane::Kernel, count)
    });
    star.start_gateway();
    star.gateway.wait_until("all tunnels", 180, |node| {
        whole(node, &star.names).iter().all(|whole| *whole)
    });
    let links: Vec<[Netem; 2]> = star
        .responders
        .iter()
        .enumerate()
        .map(|(index, node)| {
            [
                Netem::on(&star.hub, &format!("r{index}"), quality),
                Netem::on(&node.namespace, "u0", quality),
            ]
        })
        .collect();
    let near_side = Side::watch(&star.gateway);
    let far_sides: Vec<Side> = star.responders.iter().map(Side::watch).collect();
    let before = counters(&star.gateway);
    let begun_before: Vec<u64> = star
        .names
        .iter()
        .map(|name| begun_by(&star, name))
        .collect();

    let begun = Instant::now();
    let near = star.near().to_string();
    let pings: Vec<Pings> = (0..star.names.len())
        .map(|index| {
            let far = star.far(index).to_string();
            Pings::every(INTERVAL, &star.gateway.namespace, &near, &far, seconds * 5)
        })
        .collect();
    let reports: Vec<_> = pings.into_iter().map(Pings::finish).collect();
    let took = begun.elapsed();
    let after = counters(&star.gateway);
    let dropped: Vec<u32> = links
        .iter()
        .map(|pair| pair.iter().map(|link| link.esp().dropped).sum())
        .collect();
    let ike = links.iter().flatten().fold(Class::default(), |sum, link| {
        let other = link.other();
        Class {
            sent: sum.sent + other.sent,
            dropped: sum.dropped + other.dropped,
        }
    });

    // Who is still on the way back has its time; then all are whole.
    let limit = NOTICED + BACK;
    star.gateway
        .wait_until("all tunnels again", limit.as_secs(), |node| {
            whole(node, &star.names).iter().all(|whole| *whole)
        });
    let near_log = star.gateway.whole_log();
    let tunnels = star
        .names
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let logs =
                [near_log.clone(), star.responders[index].whole_log()].map(|log| about(name, &log));
            Tunnel {
                name: name.clone(),
                sent: reports[index].sent,
                received: reports[index].received,
                dropped: dropped[index],
                outages: outages(name, [&near_side, &far_sides[index]]),
                attempts: begun_by(&star, name) - begun_before[index],
                unanswered: unanswered(&logs),
                logs,
                kernel: Drops::of(&star.responders[index].namespace).to_string(),
            }
        })
        .collect();
    Course {
        tunnels,
        took,
        ike,
        counters: after
            .into_iter()
            .zip(before)
            .map(|((name, after), (_, before))| (name, after - before))
            .collect(),
        kernel: Drops::of(&star.gateway.namespace).to_string(),
    }
}

impl Course {
    fn print(&self, what: &str) {
        let sum = |number: fn(&Tunnel) -> u32| self.tunnels.iter().map(number).sum::<u32>();
        let (sent, lost, dropped) = (
            sum(|t| t.sent),
            sum(|t| t.sent - t.received),
            sum(|t| t.dropped),
        );
        eprintln!(
            "{what}: {} tunnels, {:.0} s; pings sent {sent}, lost {lost}, of which the links \
             dropped {dropped}",
            self.tunnels.len(),
            self.took.as_secs_f32(),
        );
        eprintln!(
            "  IKE packets {}, {} of them dropped; at the gateway: {}",
            self.ike.sent + self.ike.dropped,
            self.ike.dropped,
            self.counters
                .iter()
                .map(|(name, count)| format!("{name} {count}"))
                .collect::<Vec<_>>()
                .join(", ")
        );
        eprintln!("  the gateway's kernel dropped {}", self.kernel);
        let eventful = |t: &&Tunnel| !t.outages.is_empty() || t.sent - t.received != t.dropped;
        for tunnel in self.tunnels.iter().filter(eventful) {
            eprintln!(
                "  {}: lost {}, dropped {}, by the peer's kernel {}; down for {:.1?}, attempts {}\n    {}",
                tunnel.name,
                tunnel.sent - tunnel.received,
                tunnel.dropped,
                tunnel.kernel,
                tunnel.outages,
                tunnel.attempts,
                tunnel.unanswered.join("\n    ")
            );
        }
    }

    /// Each lost ping is one that the links dropped on its way there or back, or one of the time
    /// when a side had no SA. That time begins when a request has got no answer, and ends with the
    /// first attempt, unless that has got none itself.
    fn assert_explained(&self) {
        for tunnel in &self.tunnels {
            let show = || {
                let Tunnel {
                    dropped,
                    outages,
                    attempts,
                    unanswered,
                    logs: [near, far],
                    kernel,
                    ..
                } = tunnel;
                format!(
                    "dropped {dropped}, {outages:?}, {attempts} attempts, {unanswered:#?}\n\
                     the kernels dropped {} and {kernel}\n{near}--- {}\n{far}",
                    self.kernel, tunnel.name
                )
            };
            let lost = tunnel.sent - tunnel.received;
            let down: Duration = tunnel.outages.iter().sum();
            let during = u32::try_from(down.as_millis().div_ceil(INTERVAL.as_millis()))
                .unwrap_or(u32::MAX)
                .saturating_add(u32::try_from(tunnel.outages.len()).unwrap_or(u32::MAX));
            // While a side has no SA, what the links drop may be lost in any case.
            let least = if tunnel.outages.is_empty() {
                tunnel.dropped
            } else {
                0
            };
            assert!(
                (least..=tunnel.dropped.saturating_add(during)).contains(&lost),
                "{}: lost {lost}\n{}",
                tunnel.name,
                show()
            );
            assert!(
                tunnel.outages.len() <= tunnel.unanswered.len(),
                "{}: an outage without a cause\n{}",
                tunnel.name,
                show()
            );
            assert!(
                tunnel.attempts <= tunnel.unanswered.len() as u64,
                "{}: more attempts than causes\n{}",
                tunnel.name,
                show()
            );
            for outage in &tunnel.outages {
                assert!(
                    *outage < NOTICED + BACK,
                    "{}: {outage:?}\n{}",
                    tunnel.name,
                    show()
                );
            }
        }
    }
}

/// The IKE SAs of a node: those that it had, and what it has told of them since.
struct Side {
    at_first: Vec<(String, Message)>,
    events: Events,
}

impl Side {
    fn watch(node: &Node) -> Self {
        let events = Events::listen(&node.socket(), &["ike-updown", "ike-rekey"])
            .expect("a daemon that tells of its SAs");
        Self {
            at_first: node.sas(),
            events,
        }
    }
}

/// How long a tunnel was not whole, each time: a side had no IKE SA, by what both sides tell.
fn outages(name: &str, sides: [&Side; 2]) -> Vec<Duration> {
    // By their ids, for there may be several, and charon tells of the end of some that it has
    // replaced.
    let mut sas = sides.map(|side| -> BTreeSet<String> {
        let own = side.at_first.iter().filter(|(sa, _)| sa == name);
        own.map(|(_, sa)| sa.text("uniqueid").to_owned()).collect()
    });
    let told = sides.map(|side| side.events.so_far());
    let mut all: Vec<(usize, &Event)> = (0..)
        .zip(&told)
        .flat_map(|(side, events)| events.iter().map(move |event| (side, event)))
        .filter(|(_, event)| event.message.get(name).is_some())
        .collect();
    all.sort_by_key(|(_, event)| event.at);
    let mut outages = Vec::new();
    let mut begun: Option<Instant> = None;
    for (side, event) in all {
        let id = |path: &str| event.message.text(&format!("{name}.{path}")).to_owned();
        if event.name == "ike-rekey" {
            let _ = sas[side].remove(&id("old.uniqueid"));
            let _ = sas[side].insert(id("new.uniqueid"));
        } else if event.message.text("up") == "yes" {
            let _ = sas[side].insert(id("uniqueid"));
        } else {
            let _ = sas[side].remove(&id("uniqueid"));
        }
        let whole = sas.iter().all(|ids| !ids.is_empty());
        match begun {
            None if !whole => begun = Some(event.at),
            Some(begin) if whole => {
                outages.push(event.at - begin);
                begun = None;
            }
            None | Some(_) => {}
        }
    }
    outages.extend(begun.map(|begin| begin.elapsed()));
    outages
}

/// What a log says of a tunnel.
fn about(name: &str, log: &str) -> String {
    let of_it = format!("<{name}|");
    log.lines()
        .filter(|line| line.contains(&of_it))
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// What logs say of requests that got no answer.
fn unanswered(logs: &[String]) -> Vec<String> {
    logs.iter()
        .flat_map(|log| log.lines())
        .filter(|line| line.contains("giving up after") || line.contains("gave no answer to"))
        .map(str::to_owned)
        .collect()
}

/// Whether each tunnel has a child that carries traffic.
fn whole(node: &Node, names: &[String]) -> Vec<bool> {
    let sas = node.sas();
    names
        .iter()
        .map(|name| {
            sas.iter()
                .filter(|(sa, _)| sa == name)
                .flat_map(|(_, ike)| ike.sections("child-sas"))
                .any(|(_, child)| ["INSTALLED", "REKEYING"].contains(&child.text("state")))
        })
        .collect()
}

/// How many IKE SAs of a tunnel the gateway has begun to establish, ever.
fn begun_by(star: &Star, name: &str) -> u64 {
    count(&star.gateway, name, "ike-init-out-req")
}

/// What the gateway has counted, as `swanctl --counters` has it.
fn counters(node: &Node) -> Vec<(&'static str, u64)> {
    ["ike-rekey-init", "ike-rekey-resp", "child-rekey"]
        .map(|counter| (counter, count(node, "", counter)))
        .to_vec()
}

fn count(node: &Node, connection: &str, counter: &str) -> u64 {
    let request = Message::new(&[("name", connection)]);
    node.vici()
        .request("get-counters", &request)
        .expect("counters")
        .sections("counters")
        .iter()
        .map(|(_, counters)| counters.number(counter))
        .sum()
}
