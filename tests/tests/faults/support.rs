// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel as seen from outside, and other things that several tests need.

use std::collections::BTreeMap;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use swanherd_tests::{Daemon, Drops, Message, Namespace, Node, Pair, Pings, Vici};

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
    ("routes", "-4 route show table all"),
    ("IPv6 routes", "-6 route show table all"),
    ("addresses", "addr"),
    ("neighbours of no device", "neigh show nud permanent"),
];

impl View {
    pub(crate) fn of(namespace: &Namespace) -> Self {
        Self(
            LISTS
                .iter()
                .map(|(what, command)| (*what, entries(what, &namespace.ip(command))))
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
                text.push_str(&format!("{sign} {what}: {entry}\n"));
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
fn entries(what: &str, text: &str) -> Vec<String> {
    let mut entries: Vec<String> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line
            .split_whitespace()
            .map(|word| {
                if word.starts_with("fe80::") {
                    "fe80::N"
                } else {
                    word
                }
            })
            .collect();
        if words.is_empty() || words[0] == "anti-replay" || words[0] == "lastused" {
            continue;
        }
        // A device that was made again has another number.
        let numbered = what == "addresses" && line.starts_with(|c: char| c.is_ascii_digit());
        let words = &words[usize::from(numbered)..];
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

/// Asserts that the daemon finds nothing to mend; charon does not look.
pub(crate) fn assert_audit_is_clean(node: &Node) {
    if node.daemon == Daemon::Swanherd {
        let audit = node.swanherd(&["reconcile", "--dry-run", "--json"]);
        assert!(audit.ok(), "{audit}\n{}", node.log());
    }
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

/// Processor time that a node's daemon has used, in the kernel and outside.
pub(crate) fn processor_time(node: &Node) -> Duration {
    let pid = node.pid().expect("the daemon runs");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program, in parentheses, may hold spaces; times are the 14th and 15th field.
    let fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    let ticks: u64 = fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
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
        _ => Err(format!(
            "{}: {}",
            answer.text("errmsg"),
            answer.text("reason")
        )),
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
    let drops = Drops::of(&node.namespace);
    panic!(
        "{text}\n{:#?}\n{drops}\n{}",
        View::of(&node.namespace),
        node.log()
    );
}

/// Sends a signal to a node's daemon.
pub(crate) fn signal(node: &Node, signal: Signal) {
    let pid = node
        .pid()
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw)
        .expect("the daemon runs");
    let _ = kill_process(pid, signal);
}

/// How many requests for an SA were one with another: in the kernel plane and in the IKE endpoint.
pub(crate) fn coalesced(node: &Node) -> u64 {
    metric(node, "swanherd_plane_acquires_total{reason=\"coalesced\"} ")
        + metric(node, "swanherd_acquires_total{outcome=\"coalesced\"} ")
}

/// The value of the series that a line of `/metrics` begins with.
fn metric(node: &Node, series: &str) -> u64 {
    let text = node.namespace.enter(|| {
        let mut text = String::new();
        let got = TcpStream::connect(("127.0.0.1", 9814)).and_then(|mut stream| {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: l\r\nConnection: close\r\n\r\n")?;
            stream.read_to_string(&mut text)
        });
        got.map(|_| text).unwrap_or_else(|error| error.to_string())
    });
    text.lines()
        .find_map(|line| line.strip_prefix(series))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or_else(|| panic!("no series {series}in\n{text}"))
}

/// A gateway with one connection `t` to another.
pub(crate) struct Site<'a> {
    /// Own outer address.
    pub(crate) own: &'a str,
    /// The peer's.
    pub(crate) other: &'a str,
    /// `1` and `2`, own first: `gw1.example.org` is the identity of 1.
    pub(crate) names: [&'a str; 2],
    /// Name, own and the peer's network of each child.
    pub(crate) children: Vec<(String, String, String)>,
    /// More settings of each child.
    pub(crate) child: &'a str,
}

impl Site<'_> {
    /// Its `swanctl.conf`.
    pub(crate) fn definitions(&self) -> String {
        let Self {
            own,
            other,
            names: [us, them],
            child,
            ..
        } = self;
        let children: String = self
            .children
            .iter()
            .map(|(name, local, remote)| {
                format!(
                    "{name} {{\n local_ts = {local}\n remote_ts = {remote}\n \
                     esp_proposals = aes128gcm16\n {child}\n }}\n"
                )
            })
            .collect();
        format!(
            "connections {{
  t {{
    version = 2
    local_addrs = {own}
    remote_addrs = {other}
    proposals = aes128gcm16-prfsha256-x25519
    local {{
      auth = psk
      id = gw{us}.example.org
    }}
    remote {{
      auth = psk
      id = gw{them}.example.org
    }}
    children {{
{children}    }}
  }}
}}
secrets {{
  ike-1 {{
    id-1 = gw1.example.org
    id-2 = gw2.example.org
    secret = \"a secret for the laboratory\"
  }}
}}
"
        )
    }
}

/// Tells both gateways of a pair where the other one is, so that none has to ask.
pub(crate) fn meet_without_solicitation(pair: &Pair, addresses: [&str; 2]) {
    let nodes = [&pair.left, &pair.right];
    for (node, (peer, address)) in nodes
        .iter()
        .zip([(&pair.right, addresses[1]), (&pair.left, addresses[0])])
    {
        let link = peer.namespace.ip("link show dev u0");
        let mac = link
            .split_whitespace()
            .skip_while(|word| *word != "link/ether")
            .nth(1)
            .expect("a virtual Ethernet device has an address");
        node.namespace.ip(&format!(
            "neigh replace {address} lladdr {mac} dev u0 nud permanent"
        ));
    }
}
