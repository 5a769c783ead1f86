// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The programs that people have: stock `swanctl`, strongSwan's Python module, scrapers; and ours.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use swanherd_tests::{
    Auth, Daemon, Lab, Message, Node, Output, Pair, Plane, Scenario, Suite, mask_sas, peer, subject,
};

fn pair(left: Daemon) -> Pair {
    Scenario {
        left,
        ..Scenario::new(Plane::User)
    }
    .start()
}

/// What ours and charon answer in the same scenario, times and SPIs masked.
fn both(scenario: impl Fn(Daemon) -> Pair, ask: impl Fn(&Pair) -> Output) -> [String; 2] {
    [subject(), Daemon::Charon].map(|daemon| {
        let pair = scenario(daemon);
        let output = ask(&pair);
        // charon lists ports since 6.0; 5.9.8 of this Debian does not, yet.
        let stdout = output.stdout.replace(" local_port=500 remote_port=500", "");
        let stdout = stdout.replace(" local_port=500, remote_port=500,", "");
        format!(
            "{}{}status {}\n",
            mask_sas(&stdout),
            mask_sas(&output.stderr),
            output.status
        )
    })
}

fn up(daemon: Daemon) -> Pair {
    let pair = pair(daemon);
    pair.left.initiate("c");
    pair.assert_traffic_passes();
    pair
}

fn with_certificates(daemon: Daemon) -> Pair {
    let pair = Scenario {
        left: daemon,
        auth: Auth::Ecdsa,
        suite: Suite::CBC_P256,
        ..Scenario::new(Plane::User)
    }
    .start();
    pair.left.initiate("c");
    pair
}

#[test]
fn list_sas_equals_charons() {
    let [ours, reference] = both(up, |pair| pair.left.swanctl(&["--list-sas"]));

    assert!(reference.contains("ESTABLISHED"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_sas_as_a_responder_equals_charons() {
    let responder = |daemon| {
        let pair = pair(daemon);
        pair.right.initiate("c");
        pair.assert_traffic_passes();
        pair
    };

    let [ours, reference] = both(responder, |pair| pair.left.swanctl(&["--list-sas"]));

    assert!(reference.contains("ESTABLISHED"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_sas_raw_equals_charons() {
    let [ours, reference] = both(up, |pair| pair.left.swanctl(&["--list-sas", "--raw"]));

    assert!(reference.contains("state=ESTABLISHED"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_sas_with_certificates_equals_charons() {
    let [ours, reference] = both(with_certificates, |pair| pair.left.swanctl(&["--list-sas"]));

    assert!(reference.contains("ESTABLISHED"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_conns_equals_charons() {
    let [ours, reference] = both(pair, |pair| pair.left.swanctl(&["--list-conns"]));

    assert!(reference.contains("gw1.example.org"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_conns_raw_with_certificates_equals_charons() {
    let [ours, reference] = both(with_certificates, |pair| {
        pair.left.swanctl(&["--list-conns", "--raw"])
    });

    assert!(reference.contains("gw1.example.org"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn list_pols_equals_charons() {
    let trapped = |daemon| {
        Scenario {
            left: daemon,
            child: "start_action = trap",
            ..Scenario::new(Plane::User)
        }
        .start()
    };

    let [ours, reference] = both(trapped, |pair| pair.left.swanctl(&["--list-pols"]));

    assert!(reference.contains("c, TUNNEL"), "{reference}");
    assert_eq!(ours, reference);
}

/// A trap, and shunts of both kinds.
const STANDING: &str = "start_action = trap
      }
      lan {
        local_ts = 10.1.0.0/24
        remote_ts = 10.1.0.0/24
        mode = pass
        start_action = trap
      }
      block {
        local_ts = 10.1.0.0/24[tcp]
        remote_ts = 10.9.0.0/16[tcp/25]
        mode = drop
        start_action = trap";

#[test]
fn list_pols_with_shunts_equals_charons() {
    let standing = |daemon| {
        Scenario {
            left: daemon,
            child: STANDING,
            ..Scenario::new(Plane::User)
        }
        .start()
    };

    for args in [
        &["--list-pols"][..],
        &["--list-pols", "--drop"],
        &["--list-pols", "--pass", "--child", "lan"],
    ] {
        let [ours, reference] = both(standing, |pair| pair.left.swanctl(args));

        assert!(reference.contains("local"), "{reference}");
        assert_eq!(ours, reference, "{args:?}");
    }
}

#[test]
fn load_all_says_what_it_loaded() {
    let [ours, reference] = both(pair, |pair| {
        pair.left.swanctl(&["--load-all", "--noprompt"])
    });

    assert!(
        reference.contains("successfully loaded 1 connections, 0 unloaded"),
        "{reference}"
    );
    assert_eq!(ours, reference);
}

#[test]
fn load_conns_unloads_what_is_gone_from_the_file() {
    let emptied = |pair: &Pair| {
        pair.left.configure("connections {\n}\n");
        let _ = pair.left.swanctl(&["--load-conns"]).expect_ok();
        pair.left.swanctl(&["--list-conns"])
    };

    let [ours, reference] = both(pair, emptied);

    assert!(!reference.contains("gw1.example.org"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn commands_end_as_charons_do() {
    for arguments in [
        &["--initiate", "--child", "c"][..],
        &["--initiate", "--child", "nobody"],
        &["--terminate", "--ike", "t"],
        &["--terminate", "--child", "c"],
        &["--terminate", "--ike", "nobody"],
        &["--rekey", "--child", "c"],
        &["--rekey", "--ike", "t"],
        &["--rekey", "--ike", "nobody"],
    ] {
        // Only the last line is a matter of the protocol; what is logged before is our own.
        let ending = |pair: &Pair| {
            let mut output = pair.left.swanctl(arguments);
            let last = output.stdout.lines().last().unwrap_or_default().to_owned();
            output.stdout = last + "\n";
            output
        };
        let scenario = if arguments[0] == "--initiate" {
            pair
        } else {
            up
        };

        let [ours, reference] = both(scenario, ending);

        assert_eq!(ours, reference, "swanctl {arguments:?}");
    }
}

#[test]
fn initiate_and_terminate_show_what_happens() {
    let pair = pair(subject());

    let initiate = pair
        .left
        .swanctl(&["--initiate", "--child", "c"])
        .expect_ok();
    let terminate = pair
        .left
        .swanctl(&["--terminate", "--ike", "t"])
        .expect_ok();

    for word in [
        "[IKE]",
        "IKE_SA t[1] is established between 192.0.2.1[gw1.example.org]",
        "CHILD_SA c{1} is established",
    ] {
        assert!(initiate.contains(word), "no {word} in\n{initiate}");
    }
    for word in ["[IKE]", "deleting IKE_SA t[1]", "IKE_SA is deleted"] {
        assert!(terminate.contains(word), "no {word} in\n{terminate}");
    }
}

#[test]
fn stats_and_version_can_be_read() {
    let pair = up(subject());

    let stats = pair.left.swanctl(&["--stats"]).expect_ok();
    let version = pair.left.swanctl(&["--version", "--daemon"]).expect_ok();

    for word in [
        "uptime: ",
        "worker threads: ",
        "job queues: ",
        "IKE_SAs: 1 total, 0 half-open",
    ] {
        assert!(stats.contains(word), "no {word} in\n{stats}");
    }
    assert!(!stats.contains("(null)"), "{stats}");
    assert!(version.contains("Linux"), "{version}");
    assert!(!version.contains("(null)"), "{version}");
}

#[test]
fn counters_have_the_names_and_values_of_charons() {
    // charon tells peers that speak MOBIKE about its addresses when its routes change.
    let up = |daemon| {
        let pair = Scenario {
            left: daemon,
            connection: "mobike = no",
            ..Scenario::new(Plane::User)
        }
        .start();
        pair.left.initiate("c");
        pair
    };

    let [ours, reference] = both(up, |pair| pair.left.swanctl(&["--counters"]));
    assert!(reference.contains("ike-init-out-req"), "{reference}");
    assert_eq!(ours, reference);

    let [ours, reference] = both(up, |pair| pair.left.swanctl(&["--counters", "--name", "t"]));
    assert_eq!(ours, reference);
}

#[test]
fn log_follows_what_happens() {
    let pair = pair(subject());
    let mut log = Command::new("stdbuf")
        .args(["-oL", "swanctl", "--log", "--uri"])
        .arg(format!("unix://{}", pair.left.socket().display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("swanctl is installed");
    std::thread::sleep(Duration::from_millis(500));

    pair.left.initiate("c");

    std::thread::sleep(Duration::from_millis(500));
    let _ = log.kill();
    let output = log.wait_with_output().expect("it has ended");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("[IKE] IKE_SA t[1] is established"), "{text}");
}

#[test]
fn status_is_answered_while_eight_initiates_wait_for_a_dead_peer() {
    if subject() == Daemon::Charon {
        // charon answers none of it, which is why this test exists.
        return;
    }
    let mut pair = pair(subject());
    pair.right.kill();
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            Command::new("swanctl")
                .args(["--initiate", "--child", "c", "--uri"])
                .arg(format!("unix://{}", pair.left.socket().display()))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("swanctl is installed")
        })
        .collect();
    std::thread::sleep(Duration::from_secs(1));

    let mut times = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        let listed = pair.left.swanctl(&["--list-sas"]);
        times.push(begun.elapsed());
        assert!(
            listed.ok() && listed.stdout.contains("CONNECTING"),
            "{listed}"
        );
    }

    for mut child in waiting {
        assert!(
            matches!(child.try_wait(), Ok(None)),
            "an initiate has given up already"
        );
        let _ = child.kill();
        let _ = child.wait();
    }
    // The best of five, for the machine may be busy with other tests; the rest must not hang either.
    let best = times.iter().min().copied().unwrap_or_default();
    assert!(best < Duration::from_millis(100), "{times:?}");
    assert!(
        times.iter().all(|time| *time < Duration::from_secs(1)),
        "{times:?}"
    );
}

#[test]
fn an_initiate_gives_up_when_its_time_is_up() {
    if subject() == Daemon::Charon {
        return;
    }
    let mut pair = pair(subject());
    pair.right.kill();

    let begun = Instant::now();
    let output = pair
        .left
        .swanctl(&["--initiate", "--child", "c", "--timeout", "2"]);

    assert!(!output.ok(), "{output}");
    assert!(
        output
            .stderr
            .contains("CHILD_SA 'c' not established after 2000ms"),
        "{output}"
    );
    assert!(begun.elapsed() < Duration::from_secs(4), "{output}");
}

#[test]
fn python_module_sees_what_it_sees_of_charon() {
    let [ours, reference] = both(pair, |pair| python(pair, "client.py"));

    assert!(reference.contains("CommandException"), "{reference}");
    assert_eq!(ours, reference);
}

#[test]
fn exporters_find_what_they_find_at_charon() {
    let [ours, reference] = both(with_certificates, |pair| python(pair, "exporter.py"));

    for part in [
        "ike t established number",
        "cert CA X509 True",
        "stats ikesas",
    ] {
        assert!(reference.contains(part), "no {part} in\n{reference}");
    }
    // charon keeps the certificates that peers have sent.
    let reference = reference.replace("cert NONE X509 True None\n", "");
    assert_eq!(ours, reference);
}

/// Runs a script with strongSwan's Python module.
fn python(pair: &Pair, script: &str) -> Output {
    let python = std::env::var("SWANHERD_VICI_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = format!("{}/python/{script}", env!("CARGO_MANIFEST_DIR"));
    let socket = pair.left.socket();
    let output = pair.left.tool(
        &python,
        &[&script, &socket.to_string_lossy()],
        Duration::from_secs(60),
    );
    assert!(output.ok(), "{output}\n{}", pair.logs());
    output
}

#[test]
fn metrics_outlive_rekeys() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = up(subject());
    // The node listens on 127.0.0.1 of its own namespace.
    let scrape = |path: &'static str| {
        pair.left.namespace.enter(move || {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 9814));
            let mut stream = TcpStream::connect(address).expect("metrics are served");
            let request =
                format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            stream
                .write_all(request.as_bytes())
                .expect("a request is read");
            let mut answer = String::new();
            stream
                .read_to_string(&mut answer)
                .expect("an answer is text");
            answer
        })
    };
    let bytes = |text: &str| -> f64 {
        text.lines()
            .filter(|line| {
                !line.starts_with('#') && line.contains("bytes") && line.contains("\"c\"")
            })
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    };
    // Counters are read once a second.
    std::thread::sleep(Duration::from_secs(2));
    let before = scrape("/metrics");
    assert!(before.starts_with("HTTP/1.1 200"), "{before}");
    assert!(before.contains("application/openmetrics-text"), "{before}");
    assert!(before.trim_end().ends_with("# EOF"), "{before}");
    assert!(bytes(&before) >= 20.0 * 84.0, "{before}");

    let old = pair.left.children("INSTALLED")[0].text("spi-in").to_owned();
    let _ = pair.left.swanctl(&["--rekey", "--child", "c"]).expect_ok();
    pair.left.wait_until("another child, alone", 10, |n| {
        let children = n
            .sas()
            .iter()
            .map(|(_, ike)| ike.sections("child-sas").len())
            .sum::<usize>();
        children == 1
            && n.children("INSTALLED")
                .iter()
                .any(|c| c.text("spi-in") != old)
    });
    pair.assert_traffic_passes();
    std::thread::sleep(Duration::from_secs(2));

    let after = scrape("/metrics");
    assert!(
        bytes(&after) >= 40.0 * 84.0,
        "before:\n{before}\nafter:\n{after}"
    );
    assert!(scrape("/healthz").starts_with("HTTP/1.1 200"));
    assert!(scrape("/nothing").starts_with("HTTP/1.1 404"));
}

#[test]
fn own_commands_work_and_tell_by_their_status() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = pair(subject());
    let status = |args: &[&str]| pair.left.swanherd(args).status;
    let uri = format!("unix://{}", pair.left.socket().display());

    assert_eq!(status(&["status", "--uri", &uri]), 1, "nothing is up");
    assert_eq!(status(&["up", "t/c", "--uri", &uri]), 0);
    assert_eq!(status(&["status", "--uri", &uri]), 0, "all is up");
    let json = pair.left.swanherd(&["status", "--json", "--uri", &uri]);
    assert!(
        json.stdout
            .replace(' ', "")
            .contains("\"dataplane\":\"tun\""),
        "{json}"
    );
    assert_eq!(status(&["status", "t", "--uri", &uri]), 0);
    assert_eq!(status(&["status", "nobody", "--uri", &uri]), 1);
    pair.assert_traffic_passes();
    for (what, replaced) in [
        (&["c"][..], "t/c: #1 replaced by #2"),
        (&["t", "--children"], "t/c: #2 replaced by #3"),
        (&["t"], "t: #1 replaced by #2"),
        (&["t", "--reauth"], "t: #2 replaced by #3"),
    ] {
        let args = [&["rekey"], what, &["--uri", &uri]].concat();
        let rekeyed = pair.left.swanherd(&args);
        assert_eq!(rekeyed.status, 0, "{rekeyed}\n{}", pair.logs());
        assert!(rekeyed.stdout.contains(replaced), "{rekeyed}");
    }
    for (what, seen) in [
        ("conns", "10.1.0.0/24 === 10.2.0.0/24"),
        ("sas", "INSTALLED, TUNNEL"),
        ("policies", "child t/c"),
    ] {
        let listed = pair.left.swanherd(&["list", what, "--uri", &uri]);
        assert_eq!(listed.status, 0, "{listed}");
        assert!(listed.stdout.contains(seen), "{listed}");
        let json = pair.left.swanherd(&["list", what, "--json", "--uri", &uri]);
        assert!(json.stdout.starts_with(['[', '{']), "{json}");
    }
    let names = pair
        .left
        .swanherd(&["list", "conns", "--names", "--uri", &uri]);
    assert_eq!(names.stdout, "t\nt/c\n");
    assert_eq!(status(&["down", "t/c", "--uri", &uri]), 0);
    assert_eq!(status(&["rekey", "t/c", "--uri", &uri]), 1, "it is down");
    assert_eq!(status(&["up", "nobody", "--uri", &uri]), 1);
    assert_eq!(status(&["up"]), 2, "wrong usage");
    assert_eq!(status(&["status", "--uri", "nonsense"]), 2, "wrong usage");
    assert_eq!(status(&["status", "--uri", "unix:///nowhere"]), 1);
}

#[test]
fn events_are_told_as_lines_until_the_daemon_goes() {
    if subject() == Daemon::Charon {
        return;
    }
    let mut pair = pair(subject());
    let uri = format!("unix://{}", pair.left.socket().display());
    let mut events = pair
        .left
        .namespace
        .command(&pair.left.binary().to_string_lossy())
        .args(["events", "--uri", &uri])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the client can be started");
    let mut lines = BufReader::new(events.stdout.take().expect("a pipe")).lines();
    let mut next = || lines.next().map(|line| line.expect("a line"));

    let connected = next().unwrap_or_default();
    assert_eq!(pair.left.swanherd(&["up", "c", "--uri", &uri]).status, 0);
    let told = [next(), next()].map(Option::unwrap_or_default);
    pair.left.stop();
    let rest: Vec<String> = std::iter::from_fn(next).collect();
    let ended = events.wait().expect("the end of the client");

    assert!(connected.contains("\"event\":\"connected\",\"daemon\":\"swanherd "));
    for (line, event) in told.iter().zip(["ike-updown", "child-updown"]) {
        assert!(line.contains(&format!("\"event\":\"{event}\"")), "{line}");
        assert!(line.contains("\"up\":\"yes\""), "{line}");
    }
    assert!(told[1].starts_with("{\"seq\":3,\"at\":\"20"), "{told:?}");
    assert!(
        rest.iter()
            .any(|line| line.contains("\"event\":\"child-updown\"")),
        "{rest:?}"
    );
    assert_eq!(ended.code(), Some(1));
}

#[test]
fn names_of_the_running_daemon_complete_in_bash() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = pair(subject());
    let binary = pair.left.binary();
    let script = format!(
        "PATH={}:$PATH; source <(swanherd completions bash)
complete_words() {{
  COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; COMPREPLY=()
  _clap_complete_swanherd swanherd \"${{COMP_WORDS[COMP_CWORD]}}\" \"\"
  echo \"${{COMPREPLY[*]}}\"
}}
complete_words swanherd up --uri {} t
complete_words swanherd rek",
        binary.parent().expect("a folder").display(),
        pair.left.socket().display()
    );

    let said = pair.left.namespace.run("bash", ["-c", &script]);

    assert_eq!(said.stdout, "t t/c\nrekey\n", "{said}");
}

#[test]
fn check_points_at_the_error() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = pair(subject());
    let path = pair.left.swanctl_dir().join("swanctl.conf");
    let path = path.to_string_lossy();
    assert_eq!(pair.left.swanherd(&["check", &path]).status, 0);

    pair.left
        .configure("connections {\n  t {\n    lokal_addrs = 192.0.2.1\n  }\n}\n");
    let wrong = pair.left.swanherd(&["check", &path]);

    assert_eq!(wrong.status, 1, "{wrong}");
    let said = format!("{}{}", wrong.stdout, wrong.stderr);
    for word in ["swanctl.conf", "3", "lokal_addrs", "local_addrs"] {
        assert!(said.contains(word), "no {word} in\n{said}");
    }
}

#[test]
fn a_broken_file_changes_nothing_that_is_loaded() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = up(subject());
    let conns = || pair.left.vici().request("get-conns", &Message::default());
    let before = conns().expect("get-conns is answered");

    pair.left
        .configure("connections {\n  t {\n    version = 2\n");
    pair.left.reload();
    std::thread::sleep(Duration::from_secs(1));

    assert_eq!(conns().expect("get-conns is answered"), before);
    assert_eq!(
        pair.left.children("INSTALLED").len(),
        1,
        "{}",
        pair.left.log()
    );
    pair.assert_traffic_passes();
}

#[test]
fn policies_are_told_by_their_owner_with_a_daemon_and_without() {
    if subject() == Daemon::Charon {
        return;
    }
    let mut pair = Scenario {
        child: "start_action = trap",
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    let left = pair.left.namespace.clone();
    let alien = "src 10.5.0.0/24 dst 10.6.0.0/24 dir out";
    left.ip(&format!("xfrm policy add {alien} action block"));
    let uri = format!("unix://{}", pair.left.socket().display());
    let settings = pair.left.swanctl_dir().with_file_name("strongswan.conf");
    let binary = pair.left.binary();
    // Where no daemon answers, the kernel of the namespace is looked at.
    let inside = |command: &str| {
        left.run(
            "env",
            [
                format!("STRONGSWAN_CONF={}", settings.display()),
                binary.display().to_string(),
                command.to_owned(),
            ],
        )
    };
    let rows = |output: &Output, owner: &str| {
        let ends = |line: &&str| line.trim_end().ends_with(owner);
        output.stdout.lines().filter(ends).count()
    };

    let running = pair.left.swanherd(&["policies", "--uri", &uri]);
    let json = pair.left.swanherd(&["policies", "--json", "--uri", &uri]);
    left.ip("xfrm policy delete src 10.1.0.0/24 dst 10.2.0.0/24 dir out");
    let mended = pair.left.swanherd(&["reconcile", "--uri", &uri]);
    let clean = pair
        .left
        .swanherd(&["reconcile", "--dry-run", "--uri", &uri]);
    let put_back = pair.left.swanherd(&["policies", "--uri", &uri]);
    pair.left.kill();
    let dead = inside("policies");
    let leftovers = inside("reconcile");
    pair.left.start();
    pair.left.load();
    let again = pair.left.swanherd(&["policies", "--uri", &uri]);
    let nobody = pair
        .left
        .swanherd(&["policies", "--uri", "unix:///nowhere"]);

    assert_eq!(rows(&running, "trap t/c"), 3, "{running}");
    assert_eq!(rows(&running, "alien"), 1, "{running}");
    assert!(rows(&running, "socket") >= 4, "{running}");
    let json = json.stdout.replace([' ', '\n'], "");
    assert!(json.starts_with("{\"source\":\"daemon\","), "{json}");
    assert!(
        json.contains("\"owner\":{\"kind\":\"trap\",\"name\":\"t/c\"}"),
        "{json}"
    );
    assert_eq!((mended.status, clean.status), (0, 0), "{mended}{clean}");
    assert!(clean.stdout.contains("nothing differs"), "{clean}");
    assert_eq!(rows(&put_back, "trap t/c"), 3, "{put_back}");
    assert_eq!(rows(&dead, "leftover"), 3, "{dead}");
    assert_eq!(rows(&dead, "alien"), 1, "{dead}");
    assert_eq!(leftovers.status, 1, "{leftovers}");
    assert!(
        leftovers.stdout.contains("3 differences, 0 mended, 3 left"),
        "{leftovers}"
    );
    assert_eq!(rows(&again, "trap t/c"), 3, "{again}");
    assert_eq!(rows(&again, "leftover"), 0, "{again}");
    assert_eq!(rows(&again, "alien"), 1, "{again}");
    assert_eq!(nobody.status, 1, "a daemon that is named has to answer");
    pair.left.stop();
    assert_eq!(left.ip("xfrm policy").matches("dst").count(), 1);
}

#[test]
fn status_shows_what_waits_and_what_passes() {
    if subject() == Daemon::Charon {
        return;
    }
    let pair = Scenario {
        child: STANDING,
        ..Scenario::new(Plane::User)
    }
    .start();
    let uri = format!("unix://{}", pair.left.socket().display());

    let waiting = pair.left.swanherd(&["status", "--uri", &uri]);
    let policies = pair.left.swanctl(&["--list-pols"]).expect_ok();
    let json = pair.left.swanherd(&["status", "--json", "--uri", &uri]);

    assert_eq!(waiting.status, 0, "{waiting}");
    assert!(
        waiting
            .stdout
            .contains("t/lan: pass 10.1.0.0/24 === 10.1.0.0/24\n"),
        "{waiting}"
    );
    assert!(
        waiting
            .stdout
            .contains("t/block: drop 10.1.0.0/24[tcp] === 10.9.0.0/16[tcp/smtp]\n"),
        "{waiting}"
    );
    assert!(
        waiting.stdout.contains("0 of 1 up, 1 waits for traffic;"),
        "{waiting}"
    );
    assert!(policies.contains("t/lan, PASS"), "{policies}");
    let json = json.stdout.replace([' ', '\n'], "");
    assert!(json.contains("\"state\":\"trap\""), "{json}");
    assert!(json.contains("\"action\":\"pass\""), "{json}");
}

/// Ours uses the kernel, and asks it for what no virtual device offers.
#[test]
fn the_words_of_the_kernel_reach_the_operator() {
    if subject() == Daemon::Charon {
        return;
    }
    let mut lab = Lab::new();
    let [left, right] = ["left", "right"].map(|name| lab.namespace(name));
    lab.link(
        (&left, "u0", "192.0.2.1/24"),
        (&right, "u0", "192.0.2.2/24"),
    );
    left.ip("addr add 10.1.0.1/32 dev lo");
    right.ip("addr add 10.2.0.1/32 dev lo");
    let mut left = Node::new(&lab, &left, Daemon::Swanherd, Plane::Kernel, "");
    let mut right = Node::new(&lab, &right, peer(), Plane::User, "");
    let definition = |own: u8, other: u8| {
        format!(
            "connections {{ t {{
  local_addrs = 192.0.2.{own}
  remote_addrs = 192.0.2.{other}
  encap = yes
  local {{ auth = psk
    id = gw{own}.example.org
  }}
  remote {{ auth = psk
    id = gw{other}.example.org
  }}
  children {{ c {{
    local_ts = 10.{own}.0.0/24
    remote_ts = 10.{other}.0.0/24
    hw_offload = {}
  }} }}
}} }}
secrets {{ ike-1 {{
  secret = \"a secret for the laboratory\"
}} }}
",
            if own == 1 { "crypto" } else { "no" }
        )
    };
    left.configure(&definition(1, 2));
    right.configure(&definition(2, 1));
    for node in [&mut left, &mut right] {
        node.start();
        node.load();
    }
    let uri = format!("unix://{}", left.socket().display());

    let up = left.swanherd(&["up", "c", "--uri", &uri]);
    let status = left.swanherd(&["status", "--uri", &uri]);

    assert_eq!(up.status, 1, "{up}");
    let said = up.stderr.trim_end();
    let reason = said.split_once("failed: ").map_or("", |(_, reason)| reason);
    assert!(reason.contains("install SA"), "{up}\n{}", left.log());
    // The extended-ack text, which says more than the errno in parentheses behind it.
    assert!(
        ["not found", "offload", "support"]
            .iter()
            .any(|words| reason.contains(words)),
        "{up}"
    );
    assert!(left.log().contains(reason), "{reason}\n{}", left.log());
    assert!(status.stdout.contains(reason), "{status}");
}
