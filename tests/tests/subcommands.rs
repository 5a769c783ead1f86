// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every subcommand of stock `swanctl`, one after another, against charon and against ours: the same
//! output and the same exit status, in all three forms of output.

use std::fmt::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use swanherd_tests::{
    Auth, Daemon, Events, Output, Pair, Plane, Scenario, Suite, mask_sas, subject,
};

/// What is compared of a run.
#[derive(Clone, Copy)]
enum What {
    /// Everything.
    All,
    /// The last line, since the others are a log; and the exit status.
    Ending,
    /// The exit status.
    Status,
}

fn pairs() -> [Pair; 2] {
    [subject(), Daemon::Charon].map(|left| {
        Scenario {
            left,
            auth: Auth::Ecdsa,
            suite: Suite::CBC_P256,
            connection: "mobike = no",
            ..Scenario::new(Plane::User)
        }
        .start()
    })
}

fn shown(pair: &Pair, output: &Output, what: What) -> String {
    let text = match what {
        What::All => output.stdout.clone() + &output.stderr,
        What::Ending => output.stdout.lines().last().unwrap_or_default().to_owned(),
        What::Status => String::new(),
    };
    // What charon lists since 6.0.
    let text = text.replace(" local_port=500 remote_port=500", "");
    let folder = pair.left.swanctl_dir();
    let text = text.replace(&*folder.to_string_lossy(), "FOLDER");
    let text: Vec<String> = mask_sas(&text)
        .lines()
        .filter(|line| !line.contains("_port = 500"))
        .map(without_key)
        .collect();
    format!("{}\nstatus {}\n", text.join("\n"), output.status)
}

/// Messages without charon's names for its tasks.
fn without_tasks(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((head, tail)) = rest.split_once(" tasks-") {
        out += head;
        rest = tail.split_once(']').map_or("", |(_, rest)| rest);
    }
    out + rest
}

/// A line, without what is of one certificate alone: numbers, hashes and times.
fn without_key(line: &str) -> String {
    const OWN: [&str; 12] = [
        "serial:",
        "validity:",
        "not after",
        "authkeyId:",
        "subjkeyId:",
        "keyid:",
        "subjkey:",
        "established =",
        "rekey-time =",
        "life-time =",
        "install-time =",
        "use-",
    ];
    match OWN
        .iter()
        .find(|word| line.trim_start().starts_with(**word))
    {
        Some(word) => (*word).to_owned(),
        None => match line.split_once("data=") {
            Some((head, _)) => head.to_owned() + "data",
            None => line.to_owned(),
        },
    }
}

#[test]
fn every_subcommand_ends_as_with_charon() {
    use What::{All, Ending, Status};
    let [ours, reference] = pairs();
    let mut wrong = String::new();
    let mut ran = 0;

    for (command, what) in [
        ("--version", All),
        ("--load-creds --noprompt", All),
        ("--load-creds --noprompt --clear", All),
        ("--load-authorities", All),
        ("--load-pools", All),
        ("--load-conns", All),
        ("--load-all --noprompt", All),
        ("--load-all --noprompt --clear", All),
        ("--load-nonsense", Status),
        ("--list-conns", All),
        ("--list-conns --raw", All),
        ("--list-conns --pretty", All),
        ("--list-certs", All),
        ("--list-certs --type x509", All),
        ("--list-certs --type x509_crl", All),
        ("--list-certs --flag ca", All),
        ("--list-certs --subject nobody.example.org", All),
        ("--list-algs", Status),
        ("--list-algs --raw", Status),
        ("--list-authorities", All),
        ("--list-authorities --raw", All),
        ("--list-pools", All),
        ("--list-pools --leases", All),
        ("--list-pools --raw", All),
        ("--list-pols", All),
        ("--list-pols --raw", All),
        ("--list-sas", All),
        ("--list-sas --raw", All),
        ("--initiate --child c --timeout 20", Ending),
        ("--initiate --child nobody", All),
        ("--list-sas --ike t", All),
        ("--list-sas --ike t --raw", All),
        ("--list-sas --ike t --pretty", All),
        ("--list-sas --ike nobody", All),
        ("--list-sas --child c", All),
        ("--list-sas --ike-id 1 --noblock", All),
        ("--rekey --ike nobody", All),
        ("--rekey --child c", All),
        ("--terminate --child nobody", All),
        ("--install --child nobody", All),
        ("--uninstall --child nobody", All),
        ("--redirect --ike t", Status),
        ("--flush-certs", All),
        ("--flush-certs --type x509", All),
        ("--reload-settings", All),
        ("--stats", Status),
        ("--stats --raw", Status),
        ("--version --daemon", Status),
        ("--counters --name nobody", All),
        ("--counters --reset", All),
        ("--counters --reset --all", All),
        ("--counters --all", All),
        ("--counters", All),
        ("--terminate --ike t", Ending),
        ("--terminate --ike t", Ending),
        ("--terminate --ike t --raw", Status),
        ("--list-sas", All),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let [ours, reference] =
            [&ours, &reference].map(|pair| shown(pair, &pair.left.swanctl(&arguments), what));
        if ours != reference {
            let _ = write!(
                wrong,
                "\nswanctl {command}\nours:\n{ours}charon:\n{reference}"
            );
        }
        ran += 1;
    }

    assert!(wrong.is_empty(), "{wrong}");
    assert!(ran > 50, "{ran}");
}

#[test]
fn monitor_sa_tells_what_it_tells_of_charon() {
    let told = pairs().map(|pair| {
        let monitor = Command::new("stdbuf")
            .args(["-oL", "swanctl", "--monitor-sa", "--raw", "--uri"])
            .arg(format!("unix://{}", pair.left.socket().display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("swanctl is installed");
        let mut monitor = monitor;
        std::thread::sleep(Duration::from_millis(500));
        pair.left.initiate("c");
        let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
        pair.left.wait_until("one child, the other", 15, |node| {
            let children = node.children("INSTALLED");
            children.len() == 1 && children[0].text("uniqueid") == "2"
        });
        let _ = pair
            .left
            .swanctl(&["--terminate", "--ike", "t"])
            .expect_ok();
        std::thread::sleep(Duration::from_millis(500));
        let _ = monitor.kill();
        let output = monitor.wait_with_output().expect("it has ended");
        without_tasks(&mask_sas(&String::from_utf8_lossy(&output.stdout)))
    });

    let [ours, reference] = told;
    assert!(reference.contains("child-updown event"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn events_of_a_whole_life_are_those_of_charon() {
    const EVENTS: [&str; 5] = [
        "ike-updown",
        "ike-rekey",
        "ike-update",
        "child-updown",
        "child-rekey",
    ];
    let told = pairs().map(|pair| {
        let events = Events::listen(&pair.left.socket(), &EVENTS).expect("events are known");
        pair.left.initiate("c");
        let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
        pair.left.wait_until("one child, the other", 15, |node| {
            let children = node.children("INSTALLED");
            children.len() == 1 && children[0].text("uniqueid") == "2"
        });
        let _ = pair.left.swanctl(&["--rekey", "--ike", "t"]).expect_ok();
        pair.left.wait_until("one IKE SA, the other", 15, |node| {
            let sas = node.sas();
            sas.len() == 1 && sas[0].1.text("uniqueid") == "2"
        });
        let _ = pair
            .left
            .swanctl(&["--terminate", "--ike", "t"])
            .expect_ok();
        std::thread::sleep(Duration::from_millis(500));
        let lines = events.so_far().into_iter().map(|event| {
            let said = format!("{} {:?}", event.name, event.message);
            without_tasks(&mask_sas(&said))
        });
        lines.collect::<Vec<_>>().join("\n")
    });

    let [ours, reference] = told;
    assert!(reference.contains("child-rekey"), "{reference}");
    assert_eq!(ours, reference);
}
