// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel as seen from outside, and other things that several tests need.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use std::time::{SystemTime, UNIX_EPOCH};

use swanherd_tests::{Message, Namespace, Node, Pings, Vici};

/// Whether to take the time for the large numbers.
pub(crate) fn long() -> bool {
    std::env::var_os("SWANHERD_LONG").is_some_and(|value| value != "0")
}

/// How often to do something: by default, and for a release.
pub(crate) fn times(default: u32, release: u32) -> u32 {
    if long() { release } else { default }
}

/// What `ip` shows of one namespace. Two views of the same set-up are equal: what counts or tells
/// the time is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View(BTreeMap<&'static str, Vec<String>>);

const LISTS: [(&str, &str); 8] = [
    ("states", "xfrm state"),
    ("policies", "xfrm policy"),
    ("rules", "rule"),
    ("IPv6 rules", "-6 rule"),
    ("routes", "route show table all"),
    ("IPv6 routes", "-6 route show table all"),
    ("addresses", "addr"),
    ("neighbours of no device", "neigh show nud permanent"),
];

impl View {
    pub(crate) fn of(namespace: &Namespace) -> Self {
        Self(
            LISTS
                .iter()
                .map(|(what, command)| (*what, entries(&namespace.ip(command))))
                .collect(),
        )
    }

    /// As [`View::of`], with SPIs, keys and request ids masked: what one tunnel has in common with
    /// its next incarnation.
    pub(crate) fn masked(namespace: &Namespace) -> Self {
        let mut view = Self::of(namespace);
        for what in ["states", "policies"] {
            if let Some(list) = view.0.get_mut(what) {
                list.iter_mut().for_each(|entry| *entry = mask(entry));
                list.sort();
            }
        }
        view
    }

    /// Without the policies of sockets, which live as long as the process that has the sockets.
    pub(crate) fn without_sockets(mut self) -> Self {
        if let Some(policies) = self.0.get_mut("policies") {
            policies.retain(|entry| !entry.contains("; socket "));
        }
        self
    }

    /// The entries of one list.
    pub(crate) fn list(&self, what: &str) -> &[String] {
        self.0.get(what).map(Vec::as_slice).unwrap_or_default()
    }

    /// Everything that is in only one of two views.
    pub(crate) fn difference(&self, after: &Self) -> String {
        let mut text = String::new();
        for (what, _) in LISTS {
            let (before, now) = (self.list(what), after.list(what));
            for (sign, entry) in only_in(before, now)
                .map(|entry| ('-', entry))
                .chain(only_in(now, before).map(|entry| ('+', entry)))
            {
                let _ = writeln!(text, "{sign} {what}: {entry}");
            }
        }
        text
    }
}

/// The entries of `a` that `b` has not, or not as often.
fn only_in<'a>(a: &'a [String], b: &'a [String]) -> impl Iterator<Item = &'a String> {
    let count = |list: &[String], entry: &String| list.iter().filter(|e| *e == entry).count();
    let mut seen: BTreeMap<&String, usize> = BTreeMap::new();
    a.iter().filter(move |entry| {
        let nth = seen.entry(entry).or_default();
        *nth += 1;
        *nth > count(b, entry)
    })
}

/// The entries of a listing, each in one string, sorted: lines that are indented belong to the one
/// above.
fn entries(text: &str) -> Vec<String> {
    let mut entries: Vec<String> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() || words[0] == "anti-replay" || words[0] == "lastused" {
            continue;
        }
        let indented = line.starts_with([' ', '\t']);
        match entries.last_mut() {
            Some(entry) if indented => {
                entry.push_str("; ");
                entry.push_str(&words.join(" "));
            }
            _ => entries.push(words.join(" ")),
        }
    }
    entries.sort();
    entries
}

fn mask(entry: &str) -> String {
    let mut out: Vec<&str> = Vec::new();
    for word in entry.split(' ') {
        let hex = word.strip_prefix("0x").map_or(0, |hex| hex.len());
        out.push(match out.last() {
            Some(&"reqid") => "N",
            _ if hex == 8 || hex == 10 => "SPI",
            _ if hex > 16 => "KEY",
            _ => word,
        });
    }
    out.join(" ")
}

/// Asserts that two views are the same, and shows what is not.
pub(crate) fn assert_same(what: &str, before: &View, after: &View, node: &Node) {
    assert!(
        before == after,
        "{what}: - before, + after\n{}\n{}",
        before.difference(after),
        node.log()
    );
}

/// Memory that a node's daemon has, in kB.
pub(crate) fn resident(node: &Node) -> u64 {
    status(node, "VmRSS:")
}

fn status(node: &Node, key: &str) -> u64 {
    let pid = node.pid().expect("the daemon runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_default()
}

/// Initiates a child of a connection; the error message, if that fails.
pub(crate) fn initiate(vici: &mut Vici, connection: &str, child: &str) -> Result<(), String> {
    let message = Message::new(&[("ike", connection), ("child", child), ("timeout", "15000")]);
    command(vici, "initiate", &message)
}

/// Terminates an IKE SA and waits until it is gone; the error message, if that fails.
pub(crate) fn terminate(vici: &mut Vici, connection: &str) -> Result<(), String> {
    let message = Message::new(&[("ike", connection), ("timeout", "15000")]);
    command(vici, "terminate", &message)
}

pub(crate) fn command(vici: &mut Vici, name: &str, message: &Message) -> Result<(), String> {
    let answer = vici
        .request(name, message)
        .map_err(|error| error.to_string())?;
    match answer.text("success") {
        "yes" => Ok(()),
        _ => Err(answer.text("errmsg").to_owned()),
    }
}

/// Numbers that look random and are the same for the same seed (splitmix64).
pub(crate) struct Dice(u64);

impl Dice {
    /// With the seed in `SWANHERD_SEED`, else with a new one; prints it.
    pub(crate) fn new() -> Self {
        let given = std::env::var("SWANHERD_SEED").ok();
        let seed = given.map_or_else(
            || {
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(1, |since| u64::from(since.subsec_nanos()))
            },
            |seed| seed.parse().expect("SWANHERD_SEED is a number"),
        );
        eprintln!("SWANHERD_SEED={seed}");
        Self(seed)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}

/// Installs an SA and policies that are nobody's here: IPv4 and IPv6.
pub(crate) fn install_aliens(namespace: &Namespace) {
    let key = "0x000102030405060708090a0b0c0d0e0f10111213";
    for (a, b, net_a, net_b) in [
        (
            "203.0.113.1",
            "203.0.113.2",
            "172.20.0.0/16",
            "172.21.0.0/16",
        ),
        ("2001:db8:77::1", "2001:db8:77::2", "fd20::/64", "fd21::/64"),
    ] {
        namespace.ip(&format!(
            "xfrm state add src {a} dst {b} proto esp spi 0x1234 reqid 77 mode tunnel \
             aead rfc4106(gcm(aes)) {key} 128"
        ));
        for direction in ["out", "fwd"] {
            namespace.ip(&format!(
                "xfrm policy add src {net_a} dst {net_b} dir {direction} priority 1234 \
                 tmpl src {a} dst {b} proto esp reqid 77 mode tunnel"
            ));
        }
        namespace.ip(&format!(
            "xfrm policy add src {net_b} dst {net_a} dir in priority 4321 action block"
        ));
    }
}

/// Waits until echo requests are answered, for `seconds` at the most.
pub(crate) fn assert_reachable(node: &Node, from: &str, to: &str, seconds: u32) {
    let mut text = String::new();
    for _ in 0..seconds {
        // Two seconds of patience with each at the most.
        let report = Pings::start(&node.namespace, from, to, 2).finish();
        if report.received == report.sent {
            return;
        }
        text = report.text;
    }
    panic!("{text}\n{}", node.log());
}
