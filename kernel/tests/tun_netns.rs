// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two TUN planes with fixed keys in two network namespaces: traffic through, counters, events,
//! and nothing left behind. Needs root; without it these tests say so and pass, since the same
//! checks then run where `cargo xtask test` is root.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two namespaces joined by a veth pair, gone when dropped.
struct Lab {
    name: String,
}

const A: &str = "192.0.2.1";
const B: &str = "192.0.2.2";
const INNER_A: &str = "10.1.0.1";
const INNER_B: &str = "10.2.0.1";

impl Lab {
    /// `None` without the privileges for it.
    fn new() -> Option<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root for network namespaces");
            return None;
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let lab = Self {
            name: format!("tun{}-{serial}", std::process::id()),
        };
        let (a, b) = (lab.ns("a"), lab.ns("b"));
        run(&["ip", "netns", "add", &a]);
        run(&["ip", "netns", "add", &b]);
        run(&[
            "ip", "link", "add", "veth0", "netns", &a, "type", "veth", "peer", "name", "veth0",
            "netns", &b,
        ]);
        for (ns, outer, inner) in [(&a, A, INNER_A), (&b, B, INNER_B)] {
            for command in [
                "link set lo up".to_owned(),
                format!("addr add {outer}/24 dev veth0"),
                "link set veth0 up".to_owned(),
                format!("addr add {inner}/32 dev lo"),
            ] {
                let mut words = vec!["ip", "-n", ns];
                words.extend(command.split(' '));
                run(&words);
            }
        }
        Some(lab)
    }

    fn ns(&self, side: &str) -> String {
        format!("{}-{side}", self.name)
    }

    fn exec(&self, side: &str, words: &[&str]) -> Output {
        let ns = self.ns(side);
        let mut all = vec!["ip", "netns", "exec", &ns];
        all.extend(words);
        output(&all)
    }

    fn ping(&self, count: u32) -> String {
        let count = count.to_string();
        let words = ["ping", "-n", "-c", &count, "-i", "0.02", "-W", "2", INNER_B];
        let out = self.exec("a", &words);
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn plane(&self, side: &str, suite: &str, options: &[&str]) -> Plane {
        let (local, remote, local_ts, remote_ts) = if side == "a" {
            (A, B, "10.1.0.0/16", "10.2.0.0/16")
        } else {
            (B, A, "10.2.0.0/16", "10.1.0.0/16")
        };
        let mut child = Command::new("ip")
            .args(["netns", "exec", &self.ns(side)])
            .arg(example())
            .args([side, local, remote, local_ts, remote_ts, suite])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert!(line.starts_with("ready "), "{side}: {line:?}");
        Plane { child, stdout }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip")
                .args(["netns", "del", &self.ns(side)])
                .status();
        }
    }
}

struct Plane {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Plane {
    /// Ends the plane and returns all that it printed after `ready`.
    fn stop(mut self) -> String {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
        rest
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The example beside this test's executable; cargo builds examples along with tests.
fn example() -> std::path::PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    profile.join("examples").join("tun_static")
}

fn output(words: &[&str]) -> Output {
    Command::new(words[0]).args(&words[1..]).output().unwrap()
}

fn run(words: &[&str]) {
    let out = output(words);
    assert!(
        out.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// The number after `key` in the line that starts with `line`.
fn number(text: &str, line: &str, key: &str) -> u64 {
    text.lines()
        .find(|l| l.starts_with(line))
        .and_then(|l| l.split(' ').skip_while(|word| *word != key).nth(1))
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("no {key} of {line:?} in {text:?}"))
}

#[test]
fn pings_pass_with_every_suite_and_are_counted() {
    let Some(lab) = Lab::new() else { return };
    for (suite, esn) in [
        ("aes128gcm", false),
        ("aes256gcm", true),
        ("chacha20", false),
        ("aes128cbc-sha1", true),
        ("aes256cbc-sha256", false),
        ("null-sha256", false),
    ] {
        let options: &[&str] = if esn { &["esn=1"] } else { &[] };
        let a = lab.plane("a", suite, options);
        let b = lab.plane("b", suite, options);

        let ping = lab.ping(5);

        let (a, b) = (a.stop(), b.stop());
        assert!(
            ping.contains(" 0% packet loss"),
            "{suite}: {ping}\n{a}\n{b}"
        );
        for (text, spi) in [(&a, "sa c000000b"), (&b, "sa c000000b")] {
            // 56 octets of data, ICMP and IP headers: the inner packet.
            assert_eq!(number(text, spi, "packets"), 5, "{suite}: {text}");
            assert_eq!(number(text, spi, "bytes"), 5 * 84, "{suite}: {text}");
        }
        // Router solicitations of the device itself match no policy.
        let dropped = |text: &str| text.contains("drops") && !text.contains("drops no-policy");
        assert!(!dropped(&a) && !dropped(&b), "{a}\n{b}");
    }
}

#[test]
fn tcp_streams_pass_whole_and_in_superpackets() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &[]);
    let b = lab.plane("b", "aes128gcm", &[]);
    let server = Command::new("ip")
        .args(["netns", "exec", &lab.ns("b"), "iperf3", "-s", "-1"])
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut server) = server else {
        panic!("iperf3 is needed");
    };
    std::thread::sleep(std::time::Duration::from_millis(300));

    let client = lab.exec("a", &["iperf3", "-c", INNER_B, "-n", "50M", "-J"]);
    let _ = server.kill();
    let _ = server.wait();

    let (a, b) = (a.stop(), b.stop());
    let report = String::from_utf8_lossy(&client.stdout);
    assert!(client.status.success(), "{report}\n{a}\n{b}");
    let sent = number(&a, "sa c000000b", "bytes");
    // What iperf3 has in its socket when it ends is not delivered.
    assert!(sent > 40 << 20, "{a}");
    assert_eq!(number(&b, "sa c000000b", "integrity"), 0);
}

#[test]
fn a_trap_raises_one_acquire_however_many_packets_hit_it() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &["trap=1"]);

    let _ = lab.exec("a", &["ping", "-c", "5", "-i", "0.02", "-W", "1", INNER_B]);

    let a = a.stop();
    let acquires = a.matches("event Acquire").count();
    assert_eq!(acquires, 1, "{a}");
    assert!(a.contains("10.2.0.1") && a.contains("reqid: 1"), "{a}");
    assert_eq!(number(&a, "drops no-sa", "no-sa"), 5, "{a}");
}

#[test]
fn packet_limits_expire_softly_then_end_the_sa() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &["soft_packets=3", "hard_packets=6"]);
    let b = lab.plane("b", "aes128gcm", &[]);

    let ping = lab.ping(10);

    let (a, b) = (a.stop(), b.stop());
    assert!(ping.contains("6 received"), "{ping}");
    let id = "SaId { spi: 3221225483, dst: 192.0.2.2 }";
    assert_eq!(a.matches(&format!("{id}, hard: false")).count(), 1, "{a}");
    assert_eq!(a.matches(&format!("{id}, hard: true")).count(), 1, "{a}");
    assert_eq!(number(&b, "sa c000000b", "packets"), 6, "{b}");
}

#[test]
fn nothing_is_left_behind() {
    let Some(lab) = Lab::new() else { return };
    let state = || {
        ["link", "rule", "route show table all", "-6 rule"]
            .map(|what| {
                let mut words = vec!["ip"];
                words.extend(what.split(' '));
                String::from_utf8_lossy(&lab.exec("a", &words).stdout).into_owned()
            })
            .join("\n")
    };
    let before = state();
    let a = lab.plane("a", "aes128gcm", &[]);
    let during = state();
    assert!(
        during.contains("10.2.0.0/16 dev ipsec0 table 220"),
        "{during}"
    );
    assert!(
        during.contains("not from all fwmark 0xdc lookup 220"),
        "{during}"
    );
    assert!(during.contains("src 10.1.0.1"), "{during}");

    a.stop();

    // Counters of neighbour states may differ; links, rules and routes may not.
    assert_eq!(state(), before);
}
