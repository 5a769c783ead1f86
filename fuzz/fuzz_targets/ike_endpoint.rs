// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An endpoint against a peer that has authenticated itself and then sends anything at all.
#![no_main]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use swanherd_config::files::MemoryFiles;
use swanherd_config::load::load_swanctl_from;
use swanherd_config::model::{Connection, SharedKind, SharedSecret};
use swanherd_config::names::Names;
use swanherd_ike::api::{Action, Command, Datagram, IkeState, Now, Selector, Settings, Token};
use swanherd_ike::credentials::Credentials;
use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_ike::wire::{ExchangeType, Message};
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
    children {
        net { esp_proposals = aes128gcm16, aes128gcm16-x25519
            local_ts = 10.0.0.0/8, fd00::/8
            remote_ts = 10.0.0.0/8, fd00::/8 }
        second { esp_proposals = aes128gcm16-ecp256
            local_ts = 172.16.0.0/12
            remote_ts = 172.16.0.0/12 }
    }
} }";

/// Steps per input; the rest of a longer one is left out, so that none takes seconds.
const MAX_STEPS: usize = 64;
/// What a data plane may be asked to hold for one peer.
const MAX_SAS: usize = 4096;

struct Host {
    endpoint: Endpoint,
    next_spi: u32,
    sas: usize,
}

struct Pair {
    now: Now,
    hosts: [Host; 2],
    wire: VecDeque<(usize, Datagram)>,
    /// Message id of the last request that the victim sent.
    last_request: u32,
}

const PEER: usize = 0;
const VICTIM: usize = 1;

fn connection(local: &str, remote: &str) -> Arc<Connection> {
    let text = CONFIG.replace("%LOCAL%", local).replace("%REMOTE%", remote);
    let mut files = MemoryFiles::new();
    files.insert("swanctl.conf", text.into_bytes());
    let path = std::path::Path::new("swanctl.conf");
    let loaded = load_swanctl_from(path, &files, &Names::builtin()).expect("it is well-formed");
    let (_, connection) = loaded.connections.into_iter().next().expect("there is one");
    Arc::new(connection.expect("it is valid"))
}

static CONNECTIONS: LazyLock<[Arc<Connection>; 2]> = LazyLock::new(|| {
    [
        connection("192.0.2.1", "192.0.2.2"),
        connection("192.0.2.2", "192.0.2.1"),
    ]
});

impl Pair {
    /// Both established, over a network that loses nothing.
    fn new() -> Self {
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
        let hosts = [PEER, VICTIM].map(|host| {
            let seed = [u8::try_from(host).expect("there are two"); 32];
            let mut endpoint = Endpoint::new(Settings::default(), Provider::fake(), seed);
            endpoint.set_credentials(credentials.clone());
            endpoint.load_connection(now, CONNECTIONS[host].clone());
            Host {
                endpoint,
                next_spi: 0xc000_0000,
                sas: 0,
            }
        });
        let mut pair = Self {
            now,
            hosts,
            wire: VecDeque::new(),
            last_request: 0,
        };
        let command = Command::Initiate {
            connection: None,
            child: Some("net".to_owned()),
            respect_limits: false,
        };
        pair.hosts[PEER].endpoint.command(now, 1, command);
        pair.settle();
        assert_eq!(pair.state(), Some(IkeState::Established));
        pair
    }

    fn state(&self) -> Option<IkeState> {
        self.hosts[PEER]
            .endpoint
            .ike_sas()
            .next()
            .map(|sa| sa.state)
    }

    /// Lets everything happen that needs no time.
    fn settle(&mut self) {
        // Two endpoints that keep each other busy for ever would be a bug as well.
        for _ in 0..10_000 {
            self.drain(PEER);
            self.drain(VICTIM);
            let Some((host, datagram)) = self.wire.pop_front() else {
                return;
            };
            self.hosts[host]
                .endpoint
                .handle_datagram(self.now, datagram);
        }
        panic!("never at rest");
    }

    fn drain(&mut self, host: usize) {
        while let Some(action) = self.hosts[host].endpoint.poll_action() {
            match action {
                Action::Transmit(transmit) => {
                    if transmit.keepalive {
                        continue;
                    }
                    if host == VICTIM
                        && let Ok(message) = Message::parse(&transmit.payload)
                        && !message.header.flags.response
                    {
                        self.last_request = message.header.message_id;
                    }
                    let datagram = Datagram {
                        local: transmit.remote,
                        remote: transmit.local,
                        payload: transmit.payload,
                    };
                    self.wire.push_back((1 - host, datagram));
                }
                Action::Plane(token, op) => self.plane(host, token, &op),
                Action::Compute(token, job) => {
                    let endpoint = &mut self.hosts[host].endpoint;
                    endpoint.handle_computed(self.now, token, job.run());
                }
                Action::Resolve(token, _) => {
                    let endpoint = &mut self.hosts[host].endpoint;
                    endpoint.handle_resolved(self.now, token, Vec::new());
                }
                Action::Source(token, _) => {
                    let endpoint = &mut self.hosts[host].endpoint;
                    endpoint.handle_source(self.now, token, None);
                }
                Action::Usage(token, _) => {
                    let endpoint = &mut self.hosts[host].endpoint;
                    endpoint.handle_usage(self.now, token, None);
                }
                Action::Event(_) => {}
            }
        }
    }

    fn plane(&mut self, host: usize, token: Token, op: &Op) {
        let state = &mut self.hosts[host];
        let outcome = match op {
            Op::AllocSpi { .. } => {
                state.next_spi += 1;
                Outcome::Spi(state.next_spi)
            }
            Op::InstallSa(_) => {
                state.sas += 1;
                assert!(state.sas < MAX_SAS, "SAs without bound");
                Outcome::Done
            }
            Op::RemoveSa(_) => {
                state.sas = state.sas.saturating_sub(1);
                Outcome::Done
            }
            _ => Outcome::Done,
        };
        state.endpoint.handle_plane(self.now, token, Ok(outcome));
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now.instant + time;
        for _ in 0..10_000 {
            let due = self
                .hosts
                .iter()
                .filter_map(|host| host.endpoint.poll_timeout())
                .min();
            let Some(due) = due.filter(|due| *due <= end) else {
                break;
            };
            self.now.instant = self.now.instant.max(due);
            for host in &mut self.hosts {
                host.endpoint.handle_timeout(self.now);
            }
            self.settle();
        }
        self.now.instant = end;
    }
}

fuzz_target!(|data: &[u8]| {
    let mut pair = Pair::new();
    let mut rest = data;
    // Each step is an operation, the type of the first payload, a length of two octets, and that
    // many octets.
    for _ in 0..MAX_STEPS {
        let [op, first, high, low, tail @ ..] = rest else {
            break;
        };
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        let (octets, tail) = tail.split_at(len.min(tail.len()));
        rest = tail;
        let exchange = match op & 3 {
            0 => ExchangeType::CreateChildSa,
            1 => ExchangeType::Informational,
            2 => ExchangeType::IkeAuth,
            _ => ExchangeType::from(op >> 2),
        };
        let Some(id) = pair.hosts[PEER].endpoint.ike_sas().last().map(|sa| sa.id) else {
            return;
        };
        let mut response = None;
        match op >> 2 & 7 {
            // Have the victim ask for something, and answer that.
            1 | 2 => {
                let selector = Selector {
                    child: (op >> 2 & 7 == 1).then(|| "net".to_owned()),
                    ..Selector::default()
                };
                let reauth = false;
                let endpoint = &mut pair.hosts[VICTIM].endpoint;
                endpoint.command(pair.now, 2, Command::Rekey { selector, reauth });
                pair.drain(VICTIM);
                // The honest part of the peer never sees it.
                pair.wire.clear();
                response = Some(pair.last_request);
            }
            3 => pair.pass(Duration::from_secs(u64::from(*first))),
            _ => {}
        }
        let peer = &mut pair.hosts[PEER].endpoint;
        let message = peer.seal_octets(id, exchange, response, (*first).into(), octets);
        let Some(payload) = message else {
            return;
        };
        let sa = peer.ike_sa(id).expect("it was there before");
        let datagram = Datagram {
            local: sa.remote,
            remote: sa.local,
            payload,
        };
        pair.wire.push_back((VICTIM, datagram));
        pair.settle();
    }
    pair.pass(Duration::from_secs(400));
});
