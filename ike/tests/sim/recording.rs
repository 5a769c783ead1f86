// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recordings of simulated sessions, replayed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use swanherd_ike::api::{Command, Selector, Settings};
use swanherd_ike::crypto::Provider;
use swanherd_ike::record::{ReplayError, Replayer, Shown, Summary};

use crate::config::{ike_proposal_cbc, pair, psk_of};
use crate::handshake::ready;
use crate::net::{Conditions, SimRng};
use crate::world::{ALICE, BOB, Lines, World, for_seeds};

fn origin() -> Instant {
    #[allow(clippy::disallowed_methods, reason = "any origin will do")]
    Instant::now()
}

/// Replays, and shows what happens.
fn replay(lines: &[String]) -> Result<(Summary, Vec<Shown>), ReplayError> {
    let (first, rest) = lines.split_first().unwrap();
    let mut replayer = Replayer::new(first, origin())?;
    let mut shown = Vec::new();
    for line in rest {
        replayer.feed(line, Some(&mut |what| shown.push(what)))?;
    }
    Ok((replayer.finish(), shown))
}

fn end(world: &mut World, host: usize, lines: &Lines) -> Vec<String> {
    world.hosts[host].endpoint.finish();
    std::mem::take(&mut *lines.lock().unwrap())
}

fn of_ike() -> Selector {
    Selector {
        ike: Some("to-bob".to_owned()),
        ..Selector::default()
    }
}

fn of_child() -> Selector {
    Selector {
        child: Some("net".to_owned()),
        ..Selector::default()
    }
}

/// A session with rekeys from both sides, at the same time too, through a bad network.
fn session(seed: u64) -> [Vec<String>; 2] {
    let crypto = if seed.is_multiple_of(2) {
        Provider::fake()
    } else {
        Provider::ring()
    };
    let mut world = World::with(seed, Settings::default(), crypto).conditions(Conditions {
        delay: 5..=80,
        loss: 50,
        duplication: 50,
        ..Conditions::default()
    });
    let recordings = [world.record(ALICE), world.record(BOB)];
    let mut connections = pair();
    if seed.is_multiple_of(3) {
        connections.0.proposals = vec![ike_proposal_cbc()];
        connections.1.proposals = vec![ike_proposal_cbc()];
    }
    connections.0.dpd_delay = Duration::from_secs(20);
    connections.0.children[0].inactivity = Duration::from_secs(8);
    ready(&mut world, connections);
    let command = world.initiate(ALICE, "net");
    let _ = world.finish(ALICE, command);
    let mut rng = SimRng::new(seed);
    for _ in 0..12 {
        let selector = if rng.chance(500) {
            of_ike()
        } else {
            of_child()
        };
        let both = rng.chance(500);
        let reauth = rng.chance(100);
        let rekey = Command::Rekey { selector, reauth };
        world.command(ALICE, rekey.clone());
        if both {
            let rekey = match rekey {
                Command::Rekey {
                    mut selector,
                    reauth,
                } => {
                    selector.ike = selector.ike.map(|_| "to-alice".to_owned());
                    Command::Rekey { selector, reauth }
                }
                other => other,
            };
            world.command(BOB, rekey);
        }
        world.run_for(Duration::from_millis(rng.next() % 15_000));
    }
    world.terminate(BOB, of_child());
    world.run_for(Duration::from_secs(30));
    world.shutdown(ALICE);
    world.run_for(Duration::from_secs(30));
    let [alice, bob] = recordings;
    [end(&mut world, ALICE, &alice), end(&mut world, BOB, &bob)]
}

#[test]
fn sessions_with_rekeys_collisions_and_deletes_replay_to_the_same_actions() {
    let idle = AtomicUsize::new(0);
    for_seeds(24, |seed| {
        for lines in session(seed) {
            let told = lines.iter().filter(|line| line.contains("\"usage\""));
            idle.fetch_add(told.count(), Ordering::Relaxed);
            let (summary, _) = replay(&lines).unwrap_or_else(|error| panic!("{error}"));
            assert!(summary.complete && summary.inputs > 20 && summary.actions > 50);
        }
    });
    assert!(idle.into_inner() > 0, "nothing was idle");
}

#[test]
fn a_listing_shows_what_is_inside_of_protected_messages() {
    let [alice, _] = session(2);
    let (_, shown) = replay(&alice).unwrap();
    let has = |start: &str, part: &str| {
        shown
            .iter()
            .any(|line| line.text.starts_with(start) && line.text.contains(part))
    };
    let all: Vec<_> = shown.iter().map(|line| line.text.as_str()).collect();

    assert!(has("> ", "IKE_SA_INIT request 0 [ SA KE No"), "{all:#?}");
    assert!(has("< ", "IKE_SA_INIT response 0 [ SA KE No"), "{all:#?}");
    assert!(has("> ", "IKE_AUTH request 1 [ IDi"), "{all:#?}");
    assert!(has("< ", "IKE_AUTH response 1 [ IDr AUTH"), "{all:#?}");
    assert!(has("> ", "CREATE_CHILD_SA request"), "{all:#?}");
    assert!(has("  -> plane", "install SA"), "{all:#?}");
    assert!(has("  child-rekey", "net{"), "{all:#?}");
    assert!(shown.is_sorted_by_key(|line| line.at));
}

#[test]
fn neither_secret_nor_key_is_in_a_recording() {
    let secret = b"the secret of both of them";
    let mut world = World::with(77, Settings::default(), Provider::ring());
    let lines = world.record(ALICE);
    let (alice, bob) = pair();
    world.load(ALICE, &psk_of(secret), alice);
    world.load(BOB, &psk_of(secret), bob);
    let mut secrets = vec![secret.to_vec()];
    let command = world.initiate(ALICE, "net");
    world.finish(ALICE, command).unwrap();
    for selector in [of_child(), of_ike(), of_child()] {
        for (_, entry) in world.host(ALICE).plane.sas.values() {
            secrets.push(entry.keys.encryption_key.expose().to_vec());
            let integrity = entry.keys.integrity.iter();
            secrets.extend(integrity.map(|(_, key)| key.expose().to_vec()));
        }
        let command = world.rekey(ALICE, selector);
        world.finish(ALICE, command).unwrap();
        world.run_for(Duration::from_secs(10));
    }
    let lines = end(&mut world, ALICE, &lines);
    let text = lines.join("\n");

    assert!(secrets.len() >= 6);
    for secret in secrets.iter().filter(|secret| !secret.is_empty()) {
        // Any 12 octets of it would tell too much.
        for part in secret.windows(12) {
            let hex = swanherd_ipsec::hex::encode(part);
            assert!(!text.contains(&hex), "{hex} is in the recording");
            assert!(!contains(text.as_bytes(), part));
        }
    }
    // The search finds what is there.
    let nonce = text.split("{\"drew\":{\"random\":\"").nth(2).unwrap();
    assert!(text.matches(&nonce[..16]).count() > 1);
    replay(&lines).unwrap();
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[test]
fn a_replay_names_the_first_difference() {
    let [alice, _] = session(4);
    let at = alice
        .iter()
        .position(|line| line.contains("\"ike_updown\":"))
        .unwrap();

    let mut changed = alice.clone();
    changed[at] = changed[at].replacen("\"up\":true", "\"up\":false", 1);
    let Err(ReplayError::Different(difference)) = replay(&changed) else {
        panic!("no difference");
    };
    assert_eq!(difference.line, at + 1);
    assert!(difference.recorded.contains("\"up\":false"));
    assert!(difference.replayed.contains("\"up\":true"));

    // An action that is missing is seen at the next one.
    let mut changed = alice.clone();
    changed.remove(at);
    assert!(matches!(replay(&changed), Err(ReplayError::Different(_))));

    // So is chance that was not asked for, or differs.
    let drawn = alice
        .iter()
        .position(|line| line.contains("\"sealed\":{"))
        .unwrap();
    let mut changed = alice.clone();
    changed.remove(drawn);
    assert!(matches!(replay(&changed), Err(ReplayError::Different(_))));
    let mut changed = alice.clone();
    changed.insert(drawn, alice[drawn].clone());
    assert!(matches!(replay(&changed), Err(ReplayError::Different(_))));

    // And a recording that breaks off is equal as far as it goes.
    for len in [2, drawn, at, alice.len() - 1] {
        let (summary, _) = replay(&alice[..len]).unwrap();
        assert!(!summary.complete);
    }
}

#[test]
fn what_is_no_recording_is_refused() {
    let refused = |line: &str| Replayer::new(line, origin()).unwrap_err();
    assert!(matches!(refused(""), ReplayError::NotARecording(_)));
    assert!(matches!(refused("{}"), ReplayError::NotARecording(_)));
    let newer = "{\"recording\":{\"version\":99,\"else\":1}}";
    assert_eq!(refused(newer), ReplayError::Version(99));

    let [alice, _] = session(6);
    let mut replayer = Replayer::new(&alice[0], origin()).unwrap();
    let mut refused = |line: &str| replayer.feed(line, None).unwrap_err().to_string();
    assert!(refused("nonsense").starts_with("line 2: "));
    assert!(refused("{\"drew\":\"secret\"}").contains("without an input"));
    assert!(refused(&alice[0]).contains("another recording"));
    let long = "{\"in\":{\"at\":18446744073709551615,\"unix\":1,\"timeout\":{}}}";
    assert!(refused(long).contains("out of range"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Lines that are left out, swapped or damaged lead to an error or a difference, never to a
    /// panic.
    #[test]
    fn damaged_recordings_end_in_an_error(
        seed in 0_u64..6,
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0_u8..4, any::<u8>()), 1..6),
    ) {
        use std::cell::RefCell;
        use std::collections::BTreeMap;
        thread_local! {
            static SESSIONS: RefCell<BTreeMap<u64, Vec<String>>> = const { RefCell::new(BTreeMap::new()) };
        }
        let mut lines = SESSIONS.with_borrow_mut(|known| {
            known
                .entry(seed)
                .or_insert_with(|| session(seed).into_iter().next().unwrap())
                .clone()
        });
        for (line, place, how, octet) in cuts {
            let line = line.index(lines.len());
            match how {
                0 => {
                    lines.remove(line);
                }
                1 => {
                    let other = place.index(lines.len());
                    lines.swap(line, other);
                }
                2 => {
                    // Another digit or letter: what JSON still is.
                    let place = place.index(lines[line].len());
                    let mut text = lines[line].clone().into_bytes();
                    text[place] = b"0123456789abcdef"[usize::from(octet % 16)];
                    lines[line] = String::from_utf8_lossy(&text).into_owned();
                }
                _ => {
                    // Another number.
                    let numbers: Vec<_> = lines[line]
                        .match_indices(|c: char| c.is_ascii_digit())
                        .map(|(at, _)| at)
                        .collect();
                    if let Some(at) = numbers.get(place.index(numbers.len().max(1))) {
                        lines[line].replace_range(*at..=*at, "99999999");
                    }
                }
            }
        }
        let _ = replay(&lines);
    }
}
