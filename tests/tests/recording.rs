// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sessions with charon, recorded, and replayed to the same actions; and a recording has none of
//! the secrets that charon's log tells. Both daemons encrypt in user space.

use std::fs;
use std::time::Duration;

use swanherd_tests::{Auth, Daemon, Node, Pair, Plane, Scenario, Suite};

/// Starts two gateways: the left one records, the right one logs every secret.
fn recorded(scenario: &Scenario) -> Pair {
    let mut pair = scenario.start();
    pair.left.stop();
    pair.left.set_record(true);
    pair.left.start();
    pair.right.stop();
    let settings = fs::read_to_string(pair.right.settings()).expect("it has settings");
    let loud = settings.replace(
        "default = 1\n",
        "default = 1\n      ike = 4\n      chd = 4\n",
    );
    assert_ne!(loud, settings);
    fs::write(pair.right.settings(), loud).expect("settings can be written");
    pair.right.start();
    pair.right.load();
    pair
}

/// Whether there is one tunnel, and nothing under way. charon loses its way when a child is deleted
/// while a collision of its rekeys is settled.
fn is_at_rest(node: &Node) -> bool {
    let sas = node.sas();
    let [(_, ike)] = sas.as_slice() else {
        return false;
    };
    let busy = ["tasks-active", "tasks-queued", "tasks-passive"];
    ike.sections("child-sas").len() == 1
        && node.children("INSTALLED").len() == 1
        && busy.iter().all(|tasks| ike.get(tasks).is_none())
}

/// Rekeys of both kinds from both sides, at the same time too, liveness checks, and deletes.
fn session(pair: &mut Pair) {
    pair.left.initiate("c");
    pair.assert_traffic_passes();
    for (left, right) in [
        (&["--rekey", "--child", "c"][..], None),
        (&["--rekey", "--ike", "t"], None),
        (
            &["--rekey", "--child", "c"],
            Some(["--rekey", "--child", "c"]),
        ),
        (&["--rekey", "--ike", "t"], Some(["--rekey", "--ike", "t"])),
    ] {
        std::thread::scope(|scope| {
            let (near, far) = (&pair.left, &pair.right);
            // Which of the two is refused for the other's sake is up to the daemons.
            let other = right.map(|args| scope.spawn(move || far.swanctl(&args)));
            let _ = near.swanctl(left);
            if let Some(other) = other {
                let _ = other.join();
            }
        });
        for node in [&pair.left, &pair.right] {
            node.wait_until("one tunnel is left, and all is done", 20, is_at_rest);
        }
        pair.assert_traffic_passes();
    }
    // A few liveness checks.
    std::thread::sleep(Duration::from_millis(2500));
    let _ = pair
        .right
        .swanctl(&["--terminate", "--child", "c"])
        .expect_ok();
    let _ = pair
        .left
        .swanctl(&["--terminate", "--ike", "t"])
        .expect_ok();
    pair.left.initiate("c");
    pair.left.stop();
}

fn replays(auth: Auth, suite: Suite) {
    let mut pair = recorded(&Scenario {
        left: Daemon::Swanherd,
        right: Daemon::Charon,
        auth,
        suite,
        connection: "dpd_delay = 1s",
        settings: "  delete_rekeyed_delay = 1\n",
        ..Scenario::new(Plane::User)
    });
    session(&mut pair);
    let file = pair.left.recording();
    let path = file.to_str().expect("it is text");

    let replayed = pair.left.swanherd(&["replay", path]);
    assert!(replayed.ok(), "{replayed}\n{}", pair.logs());
    assert!(replayed.stdout.contains("complete"), "{replayed}");
    let replayed = pair.left.swanherd(&["replay", "--json", path]);
    assert!(replayed.stdout.contains("\"equal\":true"), "{replayed}");
    let listed = pair.left.swanherd(&["replay", "--verbose", path]);
    for part in [
        "> 192.0.2.1:500 to 192.0.2.2:500: IKE_SA_INIT request 0 [ SA KE No",
        "IKE_AUTH request 1 [ IDi",
        "CREATE_CHILD_SA request",
        "INFORMATIONAL request",
        "  child-rekey t[",
        "  ike-rekey t[",
    ] {
        assert!(listed.stdout.contains(part), "{part} is not in\n{listed}");
    }

    let recording = fs::read_to_string(&file).expect("a recording is text");
    let log = whole_log(&pair);
    let secrets = secrets_of_log(&log);
    // How many SAs it takes to settle what both sides rekey at once is up to the daemons. Of each
    // IKE_SA there are SKEYSEED, SK_d and the keys and secrets of both directions; of each CHILD_SA
    // the keys of both.
    let made = |what: [&str; 2]| {
        let tells = |line: &&str| what.iter().all(|word| line.contains(word));
        log.lines().filter(tells).count()
    };
    let ike_sas =
        made(["IKE_SA t[", "established between"]) + made(["IKE_SA t[", "rekeyed between"]);
    let children = made(["CHILD_SA c{", "established with SPIs"]);
    assert!(
        ike_sas >= 4 && children >= 4,
        "{ike_sas} IKE_SAs, {children} CHILD_SAs"
    );
    let least = 6 * ike_sas + 2 * children;
    assert!(
        secrets.len() >= least,
        "{} secrets, not {least}",
        secrets.len()
    );
    for secret in &secrets {
        let hex: String = secret.iter().map(|octet| format!("{octet:02x}")).collect();
        assert!(!recording.contains(&hex), "{hex} is in the recording");
    }
    assert!(!recording.contains("a secret for the laboratory"));

    // A changed recording is not equal.
    let other = file.with_extension("other");
    let changed = recording.replacen("\"ike_updown\":{\"sa\"", "\"ike_updown\":{\"as\"", 1);
    assert_ne!(changed, recording);
    fs::write(&other, changed).expect("a file can be written");
    let replayed = pair
        .left
        .swanherd(&["replay", "--json", other.to_str().expect("it is text")]);
    assert!(
        !replayed.ok() && replayed.stdout.contains("\"equal\":false"),
        "{replayed}"
    );
    assert!(replayed.stdout.contains("\"recorded\":"), "{replayed}");
}

#[test]
fn a_session_with_a_pre_shared_key_replays_and_holds_no_secret() {
    replays(Auth::Psk, Suite::CBC_P256);
}

#[test]
fn a_session_with_certificates_replays_and_holds_no_secret() {
    replays(Auth::Ecdsa, Suite::GCM_X25519);
}

fn whole_log(pair: &Pair) -> String {
    let log = pair.right.settings().with_file_name("log");
    let octets = fs::read(log).expect("charon has a log");
    String::from_utf8_lossy(&octets).into_owned()
}

/// The octets of every dump that charon calls a secret or a key: lines such as
/// `05[IKE] Sk_d secret => 32 bytes @ 0x7f...` and the dump that follows.
fn secrets_of_log(log: &str) -> Vec<Vec<u8>> {
    let mut secrets = Vec::new();
    let mut lines = log.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((what, rest)) = line.split_once(" => ") else {
            continue;
        };
        let named = ["secret", "SKEYSEED", "key"]
            .iter()
            .any(|word| what.contains(word));
        let Some(len) = rest
            .split_once(" bytes @")
            .and_then(|(len, _)| len.parse::<usize>().ok())
        else {
            continue;
        };
        let mut octets = Vec::new();
        while octets.len() < len {
            let Some(dump) = lines.next().and_then(|line| line.split_once(": ")) else {
                break;
            };
            octets.extend(
                dump.1
                    .split_whitespace()
                    .take(16.min(len - octets.len()))
                    .filter_map(|pair| u8::from_str_radix(pair, 16).ok()),
            );
        }
        // Public values are called keys, too, and are there; as is AUTH data, which is called after
        // the secret that it is made with.
        let told = what.contains("public") || what.contains("AUTH = ");
        if named && !told && octets.len() == len && len >= 16 {
            secrets.push(octets);
        }
    }
    secrets
}
