// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scripts that are told of children that come up and go down. Both daemons encrypt in user space.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use swanherd_tests::{Daemon, Pair, Plane, Scenario, subject};

/// Writes its environment to a file of its own, and says something.
const DUMP: &str = "#!/bin/sh
out=\"$1/$(date +%s%N).$PLUTO_VERB\"
env | grep ^PLUTO_ | sort > \"$out.part\"
mv \"$out.part\" \"$out\"
echo \"dumped $PLUTO_VERB\"
";

/// A pair whose left daemon runs scripts, and the folder that they write to.
fn start(
    left: Daemon,
    settings: &'static str,
    child: &str,
    changes: &[(&str, &str)],
) -> (Pair, PathBuf) {
    let pair = Scenario {
        left,
        right: Daemon::Charon,
        settings,
        ..Scenario::new(Plane::User)
    }
    .start();
    let folder = pair.lab.dir().join("dumps");
    fs::create_dir(&folder).expect("a folder for dumps");
    let script = pair.lab.dir().join("dump");
    fs::write(&script, DUMP).expect("a script");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("an executable script");
    for node in [&pair.left, &pair.right] {
        let file = node.swanctl_dir().join("swanctl.conf");
        let mut text = fs::read_to_string(&file).expect("it has definitions");
        for (from, to) in changes {
            text = text.replace(from, to);
        }
        if node.namespace.name() == pair.left.namespace.name() {
            let child = child
                .replace("DUMP", &script.display().to_string())
                .replace("FOLDER", &folder.display().to_string());
            text = text.replace("esp_proposals", &format!("{child}\n        esp_proposals"));
        }
        node.configure(&text);
        node.load();
    }
    (pair, folder)
}

/// The dumps of a folder in their order, each by variable.
fn dumps(folder: &Path) -> Vec<BTreeMap<String, String>> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end != "part"))
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| {
            let text = fs::read_to_string(file).expect("a dump");
            text.lines()
                .filter_map(|line| line.split_once('='))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect()
        })
        .collect()
}

fn await_dumps(pair: &Pair, folder: &Path, number: usize) -> Vec<BTreeMap<String, String>> {
    let begun = Instant::now();
    loop {
        let dumps = dumps(folder);
        if dumps.len() >= number {
            return dumps;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{number} scripts wanted: {dumps:#?}\n{}",
            pair.logs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn scripts_are_told_the_same_as_by_charon() {
    let changes = [
        (
            "10.1.0.0/24",
            "10.1.0.128/25, dynamic[icmp/2051], fd00:1::/64, 10.1.0.1-10.1.0.9[udp/100-200]",
        ),
        (
            "10.2.0.0/24",
            "10.2.0.128/25, dynamic[icmp/2051], fd00:2::/64, 10.2.0.1-10.2.0.9[udp/53]",
        ),
    ];
    let told = [subject(), Daemon::Charon].map(|left| {
        let (mut pair, folder) = start(
            left,
            "",
            "updown = DUMP FOLDER\n hostaccess = yes",
            &changes,
        );
        for (node, side) in [(&pair.left, 1), (&pair.right, 2)] {
            for address in [format!("10.{side}.0.129/32"), format!("fd00:{side}::1/128")] {
                node.namespace.ip(&format!("addr add {address} dev lo"));
            }
        }
        pair.left.initiate("c");
        let up = await_dumps(&pair, &folder, 1);
        // All of one child are there at once, or soon.
        std::thread::sleep(Duration::from_millis(500));
        let number = dumps(&folder).len();
        let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(dumps(&folder).len(), number, "a rekeying calls nothing");
        let _ = pair
            .left
            .swanctl(&["--terminate", "--ike", "t"])
            .expect_ok();
        let mut all = await_dumps(&pair, &folder, 2 * number);
        assert_eq!(all.len(), 2 * number, "{up:?}");
        assert!(
            pair.left.whole_log().contains("updown: dumped up-"),
            "{}",
            pair.logs()
        );
        pair.left.stop();
        // Their order is each daemon's own.
        all.sort();
        all
    });

    let [ours, charons] = told;
    assert!(ours.len() >= 4, "{ours:#?}");
    assert_eq!(ours, charons);
}

#[test]
fn scripts_run_to_their_limit_beside_ike_and_once_more_at_the_end() {
    if subject() == Daemon::Charon {
        return;
    }
    let child = "updown = \"[ $PLUTO_VERB = up-client ] && exec sleep 60; DUMP FOLDER; exit 3\"";
    let (mut pair, folder) = start(Daemon::Swanherd, "", child, &[]);
    fs::write(
        pair.left.settings(),
        fs::read_to_string(pair.left.settings())
            .expect("settings")
            .replace("swanherd {", "swanherd {\n  updown_timeout = 1s"),
    )
    .expect("settings");
    pair.left.stop();
    pair.left.start();
    pair.left.load();

    let begun = Instant::now();
    pair.left.initiate("c");
    assert!(begun.elapsed() < Duration::from_secs(5), "{}", pair.logs());
    pair.assert_traffic_passes();
    pair.left.wait_until("the script was killed", 10, |node| {
        node.whole_log()
            .contains("updown: the script was killed after 1")
    });
    let begun = Instant::now();
    pair.left.stop();

    assert!(begun.elapsed() < Duration::from_secs(5), "{}", pair.logs());
    let down = dumps(&folder);
    assert_eq!(down.len(), 1, "{}", pair.logs());
    assert_eq!(down[0]["PLUTO_VERB"], "down-client");
    let log = pair.left.whole_log();
    assert!(
        log.contains("updown: the script ended with status 3"),
        "{log}"
    );
}
