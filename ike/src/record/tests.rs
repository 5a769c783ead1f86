// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What only a look inside of an endpoint can tell: that none of its keys is recorded.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use swanherd_ipsec::plane::{Op, Outcome};
use swanherd_ipsec::{Secret, hex};

use super::Recorded;
use crate::api::{Action, Command, Computed, Datagram, Input, Now, Selector, Settings};
use crate::crypto::Provider;
use crate::endpoint::Endpoint;
use crate::endpoint::tests::{alice, bob, psk_credentials};

const PSK: &str = "a pre-shared key of both sides";

/// Two endpoints that do everything at once, and whatever should stay secret.
struct Two {
    hosts: [Recorded; 2],
    wire: VecDeque<(usize, Datagram)>,
    now: Now,
    next_spi: u32,
    secrets: Vec<Vec<u8>>,
}

impl Two {
    fn command(&mut self, command: Command) {
        self.hosts[0].handle(self.now, Input::Command(1, command));
        self.drive();
        for host in &self.hosts {
            self.secrets.extend(host.secrets());
        }
    }

    fn drive(&mut self) {
        loop {
            let mut idle = true;
            for host in 0..2 {
                while let Some(action) = self.hosts[host].poll_action() {
                    idle = false;
                    if let Some(input) = self.act(host, action) {
                        self.hosts[host].handle(self.now, input);
                    }
                }
            }
            match self.wire.pop_front() {
                Some((to, datagram)) => {
                    self.hosts[to].handle(self.now, Input::Datagram(datagram));
                }
                None if idle => return,
                None => {}
            }
        }
    }

    fn act(&mut self, host: usize, action: Action) -> Option<Input> {
        Some(match action {
            Action::Transmit(transmit) => {
                let datagram = Datagram {
                    local: transmit.remote,
                    remote: transmit.local,
                    payload: transmit.payload,
                };
                self.wire.push_back((1 - host, datagram));
                return None;
            }
            Action::Plane(token, op) => Input::Plane(token, Ok(self.apply(op))),
            Action::Compute(token, job) => {
                let computed = job.run();
                if let Computed::Agreed(Ok(shared)) | Computed::Responded(Ok((_, shared))) =
                    &computed
                {
                    self.secrets.push(shared.expose().to_vec());
                }
                Input::Computed(token, computed)
            }
            Action::Resolve(token, _) => Input::Resolved(token, Vec::new()),
            Action::Source(token, _) => Input::Source(
                token,
                Some(["192.0.2.1", "192.0.2.2"][host].parse().unwrap()),
            ),
            Action::Usage(token, _) => Input::Usage(token, None),
            Action::Event(_) => return None,
        })
    }

    fn apply(&mut self, op: Op) -> Outcome {
        match op {
            Op::AllocSpi { .. } => {
                self.next_spi += 1;
                Outcome::Spi(self.next_spi)
            }
            Op::InstallSa(entry) => {
                let keys = &entry.keys;
                self.secrets.push(keys.encryption_key.expose().to_vec());
                let integrity = keys.integrity.iter();
                self.secrets
                    .extend(integrity.map(|(_, key)| key.expose().to_vec()));
                Outcome::Done
            }
            _ => Outcome::Done,
        }
    }
}

#[test]
fn no_secret_of_an_endpoint_is_in_its_recording() {
    #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
    let now = Now {
        instant: Instant::now(),
        unix: 1_800_000_000,
    };
    let lines: [Arc<Mutex<Vec<String>>>; 2] = Default::default();
    let host = |index: usize| {
        let seed = [u8::try_from(index).unwrap() + 1; 32];
        let endpoint = Endpoint::new(Settings::default(), Provider::ring(), seed);
        let kept = Arc::clone(&lines[index]);
        let sink = move |line| {
            kept.lock().unwrap().push(line);
            true
        };
        Recorded::recording(endpoint, now, "a test", Box::new(sink))
    };
    let mut two = Two {
        hosts: [host(0), host(1)],
        wire: VecDeque::new(),
        now,
        next_spi: 0xc000_0000,
        secrets: vec![PSK.as_bytes().to_vec()],
    };
    for (host, connection) in [(0, alice()), (1, bob())] {
        two.hosts[host].handle(now, Input::Credentials(psk_credentials(PSK)));
        two.hosts[host].handle(now, Input::Load(Arc::new(connection)));
    }
    two.command(Command::Initiate {
        connection: Some("gw".to_owned()),
        child: Some("net".to_owned()),
        respect_limits: false,
    });
    for child in [Some("net".to_owned()), None, Some("net".to_owned())] {
        let ike = child.is_none().then(|| "gw".to_owned());
        let selector = Selector {
            ike,
            child,
            ..Selector::default()
        };
        let reauth = false;
        two.command(Command::Rekey { selector, reauth });
    }
    for host in &mut two.hosts {
        host.finish();
    }

    // Two handshakes' and two rekeys' secrets of both sides, and keys.
    assert!(two.secrets.len() > 40, "{}", two.secrets.len());
    for lines in &lines {
        let text = lines.lock().unwrap().join("\n");
        assert!(text.contains("\"child_rekey\"") && text.contains("\"ike_rekey\""));
        for secret in two.secrets.iter().filter(|secret| !secret.is_empty()) {
            let len = secret.len().min(16);
            for part in [&secret[..len], &secret[secret.len() - len..]] {
                assert!(!text.contains(&hex::encode(part)), "{}", hex::encode(part));
            }
        }
        assert!(!text.contains(PSK));
    }
}

#[test]
fn a_secret_is_written_as_its_length() {
    let text = serde_json::to_string(&Secret::copy_of(b"hunter2")).unwrap();

    assert_eq!(text, "\"7 secret octets\"");
}
