// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recordings that are damaged or made up: their replay ends, with whatever verdict.
#![no_main]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use swanherd_config::files::MemoryFiles;
use swanherd_config::load::load_swanctl_from;
use swanherd_config::model::{Connection, SharedKind, SharedSecret};
use swanherd_config::names::Names;
use swanherd_ike::api::{Action, Command, Datagram, Input, Now, Selector, Settings};
use swanherd_ike::credentials::Credentials;
use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_ike::record::{Recorded, Replayer, Shown};
use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::{Op, Outcome};

const CONFIG: &str = "connections { peer {
    local_addrs = %LOCAL%
    remote_addrs = %REMOTE%
    proposals = aes128gcm16-prfsha256-x25519
    local { auth = psk
        id = %LOCAL% }
    remote { auth = psk
        id = %REMOTE% }
    children { net { esp_proposals = aes128gcm16
            local_ts = 10.0.0.0/8
            remote_ts = 10.0.0.0/8 } }
} }";

/// Changes per input; the rest of a longer one is left out.
const MAX_CHANGES: usize = 32;

/// What one of two endpoints records of a tunnel that comes up, is rekeyed, and goes down.
static SESSION: LazyLock<Vec<String>> = LazyLock::new(|| {
    let lines = Arc::new(Mutex::new(Vec::new()));
    Pair::new(&lines).session();
    let lines = lines.lock().expect("nobody panicked").clone();
    let replay = replay(lines.iter().map(String::as_str), false);
    assert_eq!(replay, Ok(true), "it replays as it is");
    lines
});

struct Pair {
    now: Now,
    hosts: [Recorded; 2],
    wire: VecDeque<(usize, Datagram)>,
    next_spi: u32,
}

fn connection(local: &str, remote: &str) -> Arc<Connection> {
    let text = CONFIG.replace("%LOCAL%", local).replace("%REMOTE%", remote);
    let mut files = MemoryFiles::new();
    files.insert("swanctl.conf", text.into_bytes());
    let path = std::path::Path::new("swanctl.conf");
    let loaded = load_swanctl_from(path, &files, &Names::builtin()).expect("it is well-formed");
    let (_, connection) = loaded.connections.into_iter().next().expect("there is one");
    Arc::new(connection.expect("it is valid"))
}

impl Pair {
    fn new(lines: &Arc<Mutex<Vec<String>>>) -> Self {
        let now = Now {
            instant: Instant::now(),
            unix: 1_800_000_000,
        };
        let mut credentials = Credentials::new();
        credentials.add_shared(SharedSecret {
            id: None,
            kind: SharedKind::Ike,
            secret: Secret::copy_of(b"secret"),
            owners: Vec::new(),
        });
        let credentials = Arc::new(credentials);
        let kept = Arc::clone(lines);
        let sink = move |line| {
            kept.lock().expect("nobody panicked").push(line);
            true
        };
        let endpoint = |seed| Endpoint::new(Settings::default(), Provider::fake(), [seed; 32]);
        let mut hosts = [
            Recorded::recording(endpoint(1), now, "a fuzz target", Box::new(sink)),
            Recorded::new(endpoint(2)),
        ];
        let addrs = ["192.0.2.1", "192.0.2.2"];
        for (host, own) in hosts.iter_mut().zip(0..) {
            host.handle(now, Input::Credentials(credentials.clone()));
            let connection = connection(addrs[own], addrs[1 - own]);
            host.handle(now, Input::Load(connection));
        }
        Self {
            now,
            hosts,
            wire: VecDeque::new(),
            next_spi: 0xc000_0000,
        }
    }

    fn session(&mut self) {
        self.command(Command::Initiate {
            connection: None,
            child: Some("net".to_owned()),
            respect_limits: false,
        });
        for child in [Some("net".to_owned()), None] {
            let ike = child.is_none().then(|| "peer".to_owned());
            let selector = Selector {
                ike,
                child,
                ..Selector::default()
            };
            let reauth = false;
            self.command(Command::Rekey { selector, reauth });
        }
        let selector = Selector {
            ike: Some("peer".to_owned()),
            ..Selector::default()
        };
        let force = false;
        self.command(Command::Terminate { selector, force });
        self.hosts[0].finish();
    }

    /// A command, all that follows from it at once, and a while.
    fn command(&mut self, command: Command) {
        let now = self.now;
        self.hosts[0].handle(now, Input::Command(1, command));
        self.settle();
        self.now.instant += Duration::from_secs(10);
        for host in 0..2 {
            let now = self.now;
            self.hosts[host].handle(now, Input::Timeout);
        }
        self.settle();
    }

    fn settle(&mut self) {
        loop {
            for host in 0..2 {
                while let Some(action) = self.hosts[host].poll_action() {
                    self.act(host, action);
                }
            }
            let Some((host, datagram)) = self.wire.pop_front() else {
                return;
            };
            self.hosts[host].handle(self.now, Input::Datagram(datagram));
        }
    }

    fn act(&mut self, host: usize, action: Action) {
        let input = match action {
            Action::Transmit(transmit) => {
                let datagram = Datagram {
                    local: transmit.remote,
                    remote: transmit.local,
                    payload: transmit.payload,
                };
                self.wire.push_back((1 - host, datagram));
                return;
            }
            Action::Plane(token, Op::AllocSpi { .. }) => {
                self.next_spi += 1;
                Input::Plane(token, Ok(Outcome::Spi(self.next_spi)))
            }
            Action::Plane(token, _) => Input::Plane(token, Ok(Outcome::Done)),
            Action::Compute(token, job) => Input::Computed(token, job.run()),
            Action::Resolve(token, _) => Input::Resolved(token, Vec::new()),
            Action::Source(token, _) => Input::Source(token, None),
            Action::Usage(token, _) => Input::Usage(token, None),
            Action::Event(_) => return,
        };
        self.hosts[host].handle(self.now, input);
    }
}

/// Whether the recording was complete, if all that happened was as recorded.
fn replay<'a>(mut lines: impl Iterator<Item = &'a str>, listed: bool) -> Result<bool, String> {
    let first = lines.next().unwrap_or_default();
    let mut replayer = Replayer::new(first, Instant::now()).map_err(|e| e.to_string())?;
    let mut octets = 0;
    for line in lines {
        let _ = replayer.next_is_after(line, Duration::from_secs(1));
        let mut show = |shown: Shown| octets += shown.text.len();
        let shown = listed.then_some(&mut show as &mut dyn FnMut(Shown));
        replayer.feed(line, shown).map_err(|e| e.to_string())?;
    }
    Ok(replayer.finish().complete)
}

/// The session with changes of six octets each: what is done to which line, and where in it.
fn changed(data: &[u8]) -> Vec<String> {
    let mut lines = SESSION.clone();
    for change in data.chunks_exact(6).take(MAX_CHANGES) {
        let [op, a, b, c, d, octet] = *change else {
            break;
        };
        if lines.is_empty() {
            break;
        }
        let line = usize::from(u16::from_be_bytes([a, b])) % lines.len();
        let place = usize::from(u16::from_be_bytes([c, d]));
        // All of it is ASCII.
        let within = place % lines[line].len().max(1);
        match op % 6 {
            0 => {
                lines.remove(line);
            }
            1 => lines.insert(line, lines[line].clone()),
            2 => {
                let other = place % lines.len();
                lines.swap(line, other);
            }
            3 if octet.is_ascii() && within < lines[line].len() => {
                let text = char::from(octet).to_string();
                lines[line].replace_range(within..=within, &text);
            }
            4 => lines[line].truncate(within),
            _ => {
                // The beginning of one and the end of another.
                let other = usize::from(octet) % lines.len();
                let tail = lines[other].get(within..).unwrap_or_default().to_owned();
                lines[line].truncate(within);
                lines[line].push_str(&tail);
            }
        }
    }
    lines
}

fuzz_target!(|data: &[u8]| {
    let Some((how, rest)) = data.split_first() else {
        return;
    };
    let listed = how & 2 != 0;
    if how & 1 == 0 {
        let text = String::from_utf8_lossy(rest);
        let _ = replay(text.lines(), listed);
    } else {
        let lines = changed(rest);
        let _ = replay(lines.iter().map(String::as_str), listed);
    }
});
