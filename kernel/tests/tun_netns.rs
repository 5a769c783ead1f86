// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two TUN planes with fixed keys in two network namespaces: traffic through, counters, events,
//! and nothing left behind. Needs root; without it these tests say so and pass, since the same
//! checks then run where `cargo xtask test` is root.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Two namespaces joined by a veth pair, gone when dropped.
struct Lab {
    name: String,
}

const A: &str = "192.0.2.1";
const B: &str = "192.0.2.2";
const INNER_A: &str = "10.1.0.1";
const INNER_B: &str = "10.2.0.1";
const A6: &str = "2001:db8::1";
const B6: &str = "2001:db8::2";
const INNER_A6: &str = "fd00:1::1";
const INNER_B6: &str = "fd00:2::1";
const DATAGRAM: usize = 56;
const BLOCK: usize = 65_536;
const PATIENCE: Duration = Duration::from_secs(2);

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
        for (ns, outer, inner, outer6, inner6) in [
            (&a, A, INNER_A, A6, INNER_A6),
            (&b, B, INNER_B, B6, INNER_B6),
        ] {
            for command in [
                "link set lo up".to_owned(),
                format!("addr add {outer}/24 dev veth0"),
                format!("addr add {outer6}/64 dev veth0 nodad"),
                // Without link-local addresses nothing waits for their duplicate detection.
                "link set veth0 addrgenmode none".to_owned(),
                "link set veth0 up".to_owned(),
                format!("addr add {inner}/32 dev lo"),
                format!("addr add {inner6}/128 dev lo nodad"),
            ] {
                let mut words = vec!["ip", "-n", ns];
                words.extend(command.split(' '));
                run(&words);
            }
        }
        // The kernel drops what is sent before it has taken notice of the carrier.
        for ns in [&a, &b] {
            let up = || {
                let link = output(&["ip", "-n", ns, "link", "show", "veth0"]);
                String::from_utf8_lossy(&link.stdout).contains("state UP")
            };
            for _ in 0..1000 {
                if up() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(up(), "the link does not come up");
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

    /// Runs `work` on a thread inside the namespace of one side.
    fn enter<T: Send + 'static>(
        &self,
        side: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let path = format!("/run/netns/{}", self.ns(side));
        std::thread::spawn(move || {
            let ns = std::fs::File::open(path).unwrap();
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(ns.as_fd(), kind).unwrap();
            work()
        })
    }

    /// Sends `count` datagrams of [`DATAGRAM`] octets from a to b, each after the answer to the
    /// one before or [`PATIENCE`]; how many were answered.
    fn exchange(&self, count: u32) -> u32 {
        self.exchange_between(INNER_A, INNER_B, count)
    }

    fn exchange_between(&self, a: &'static str, b: &'static str, count: u32) -> u32 {
        let bound = |addr: &'static str| {
            move || {
                let socket = UdpSocket::bind((addr, 0)).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket
            }
        };
        let near = self.enter("a", bound(a)).join().unwrap();
        let far = self.enter("b", bound(b)).join().unwrap();
        let to = far.local_addr().unwrap();
        let echo = std::thread::spawn(move || {
            let mut buffer = [0; 2000];
            let mut answered = 0;
            while answered < count
                && let Ok((len, from)) = far.recv_from(&mut buffer)
            {
                far.send_to(&buffer[..len], from).unwrap();
                answered += 1;
            }
        });
        let mut buffer = [0; 2000];
        let mut answers = 0;
        for number in 0..count {
            near.send_to(&[number as u8; DATAGRAM], to).unwrap();
            if near.recv_from(&mut buffer).is_ok() {
                answers += 1;
            }
        }
        echo.join().unwrap();
        answers
    }

    /// Sends `blocks` blocks in one TCP stream from a to b; how many arrived unchanged.
    fn stream(&self, a: &'static str, b: &'static str, blocks: usize) -> usize {
        let block: Vec<u8> = (0..BLOCK).map(|i| (i % 251) as u8).collect();
        let expected = block.clone();
        let listener = self.enter("b", move || TcpListener::bind((b, 0)).unwrap());
        let listener = listener.join().unwrap();
        let to = listener.local_addr().unwrap();
        let receiver = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut received = vec![0; BLOCK];
            let mut whole = 0;
            while stream.read_exact(&mut received).is_ok() {
                whole += usize::from(received == expected);
            }
            whole
        });
        let sender = self.enter("a", move || {
            let mut stream = TcpStream::connect(to).unwrap();
            // From the inner address, which the preferred source of the route is.
            assert_eq!(stream.local_addr().unwrap().ip().to_string(), a);
            for _ in 0..blocks {
                stream.write_all(&block).unwrap();
            }
        });
        sender.join().unwrap();
        receiver.join().unwrap()
    }

    fn plane(&self, side: &str, suite: &str, options: &[&str]) -> Plane {
        let ends = [(A, "10.1.0.0/16"), (B, "10.2.0.0/16")];
        self.plane_between(side, ends, suite, options)
    }

    fn plane_between(
        &self,
        side: &str,
        [a, b]: [(&str, &str); 2],
        suite: &str,
        options: &[&str],
    ) -> Plane {
        let ((local, local_ts), (remote, remote_ts)) = if side == "a" { (a, b) } else { (b, a) };
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
fn datagrams_pass_with_every_suite_and_are_counted() {
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

        let answers = lab.exchange(5);

        let (a, b) = (a.stop(), b.stop());
        assert_eq!(answers, 5, "{suite}: {a}\n{b}");
        for (text, spi) in [(&a, "sa c000000b"), (&b, "sa c000000b")] {
            // Data with UDP and IP headers: the inner packet.
            assert_eq!(number(text, spi, "packets"), 5, "{suite}: {text}");
            assert_eq!(number(text, spi, "bytes"), 5 * 84, "{suite}: {text}");
        }
        // Router solicitations of the device itself match no policy.
        let dropped = |text: &str| text.contains("drops") && !text.contains("drops no_policy");
        assert!(!dropped(&a) && !dropped(&b), "{a}\n{b}");
    }
}

#[test]
fn ipv6_passes_over_ipv6_and_over_ipv4() {
    let Some(lab) = Lab::new() else { return };
    for outer in [[A6, B6], [A, B]] {
        let ends = [(outer[0], "fd00:1::/32"), (outer[1], "fd00:2::/32")];
        let a = lab.plane_between("a", ends, "aes256gcm", &[]);
        let b = lab.plane_between("b", ends, "aes256gcm", &[]);

        let answers = lab.exchange_between(INNER_A6, INNER_B6, 5);
        let whole = lab.stream(INNER_A6, INNER_B6, 100);

        let (a, b) = (a.stop(), b.stop());
        assert_eq!((answers, whole), (5, 100), "{outer:?}\n{a}\n{b}");
    }
}

#[test]
fn a_tcp_stream_passes_whole() {
    const BLOCKS: usize = 800;
    let Some(lab) = Lab::new() else { return };
    // One end sends with two threads, on a device with as many queues.
    let a = lab.plane("a", "aes128gcm", &["workers=2"]);
    let b = lab.plane("b", "aes128gcm", &[]);

    let whole = lab.stream(INNER_A, INNER_B, BLOCKS);

    let (a, b) = (a.stop(), b.stop());
    assert_eq!(whole, BLOCKS, "{a}\n{b}");
    assert!(number(&a, "sa c000000b", "bytes") > (BLOCKS * BLOCK) as u64);
    assert_eq!(number(&b, "sa c000000b", "integrity"), 0, "{b}");
}

#[test]
fn a_trap_raises_one_acquire_however_many_packets_hit_it() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &["trap=1"]);

    let sent = lab.enter("a", || {
        let socket = UdpSocket::bind((INNER_A, 0)).unwrap();
        for _ in 0..5 {
            socket.send_to(b"hello", (INNER_B, 9)).unwrap();
        }
    });
    sent.join().unwrap();
    std::thread::sleep(Duration::from_secs(1));

    let a = a.stop();
    let acquires = a.matches("event Acquire").count();
    assert_eq!(acquires, 1, "{a}");
    assert!(a.contains("10.2.0.1") && a.contains("reqid: 1"), "{a}");
    assert_eq!(number(&a, "drops no_sa", "no_sa"), 5, "{a}");
}

#[test]
fn packet_limits_expire_softly_then_end_the_sa() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &["soft_packets=3", "hard_packets=6"]);
    let b = lab.plane("b", "aes128gcm", &[]);

    // The last one, refused, waits in vain for its answer.
    let answers = lab.exchange(7);

    let (a, b) = (a.stop(), b.stop());
    assert_eq!(answers, 6, "{a}\n{b}");
    let id = "SaId { spi: 3221225483, dst: 192.0.2.2 }";
    assert_eq!(a.matches(&format!("{id}, hard: false")).count(), 1, "{a}");
    assert_eq!(a.matches(&format!("{id}, hard: true")).count(), 1, "{a}");
    assert_eq!(number(&b, "sa c000000b", "packets"), 6, "{b}");
}

#[test]
fn time_limits_expire_without_traffic() {
    let Some(lab) = Lab::new() else { return };
    let a = lab.plane("a", "aes128gcm", &["soft_seconds=1", "hard_seconds=2"]);

    std::thread::sleep(Duration::from_secs(4));

    let a = a.stop();
    assert_eq!(a.matches("hard: false").count(), 2, "{a}");
    assert_eq!(a.matches("hard: true").count(), 2, "{a}");
    assert!(!a.contains("\nsa "), "no SA is left: {a}");
}

/// Frames to the inner addresses of b that come to its Ethernet link in clear.
struct Clear {
    seen: Arc<AtomicU32>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Clear {
    fn watch(lab: &Lab) -> Self {
        let socket = lab.enter("b", || {
            let all = i32::from((libc::ETH_P_ALL as u16).to_be());
            let (domain, kind) = (socket2::Domain::PACKET, socket2::Type::RAW);
            let socket = socket2::Socket::new(domain, kind, Some(all.into())).unwrap();
            let timeout = Some(Duration::from_millis(50));
            socket.set_read_timeout(timeout).unwrap();
            socket
        });
        let mut socket = socket.join().unwrap();
        let (seen, ended) = (
            Arc::new(AtomicU32::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (count, end) = (Arc::clone(&seen), Arc::clone(&ended));
        let (v4, v6) = (INNER_B.parse().unwrap(), INNER_B6.parse().unwrap());
        let (v4, v6): (std::net::Ipv4Addr, std::net::Ipv6Addr) = (v4, v6);
        let thread = std::thread::spawn(move || {
            let mut frame = [0; 4096];
            while !end.load(Ordering::Relaxed) {
                let len = socket.read(&mut frame).unwrap_or(0);
                // Those of the TUN device have no Ethernet header.
                let in_clear = match frame[..len].get(12..14) {
                    Some([0x08, 0x00]) => frame[30..34] == v4.octets(),
                    Some([0x86, 0xdd]) => frame[38..54] == v6.octets(),
                    _ => false,
                };
                count.fetch_add(u32::from(in_clear), Ordering::Relaxed);
            }
        });
        Self {
            seen,
            ended,
            thread: Some(thread),
        }
    }

    fn seen(&self) -> u32 {
        self.seen.load(Ordering::Relaxed)
    }
}

impl Drop for Clear {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

/// A client in a that sends all the time, and what a server in b answers it.
struct Chatter {
    sent: Arc<AtomicU32>,
    answered: Arc<AtomicU32>,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Chatter {
    fn start(lab: &Lab, a: &'static str, b: &'static str) -> Self {
        let bound = |addr: &'static str| {
            move || {
                let socket = UdpSocket::bind((addr, 0)).unwrap();
                let timeout = Some(Duration::from_millis(2));
                socket.set_read_timeout(timeout).unwrap();
                socket
            }
        };
        let near = lab.enter("a", bound(a)).join().unwrap();
        let far = lab.enter("b", bound(b)).join().unwrap();
        let to = far.local_addr().unwrap();
        let (sent, answered) = (Arc::default(), Arc::default());
        let ended = Arc::new(AtomicBool::new(false));
        let mut chatter = Self {
            sent: Arc::clone(&sent),
            answered: Arc::clone(&answered),
            ended: Arc::clone(&ended),
            threads: Vec::new(),
        };
        let end = Arc::clone(&ended);
        chatter.threads.push(std::thread::spawn(move || {
            let mut buffer = [0; 2000];
            while !end.load(Ordering::Relaxed) {
                if let Ok((len, from)) = far.recv_from(&mut buffer) {
                    let _ = far.send_to(&buffer[..len], from);
                }
            }
        }));
        chatter.threads.push(std::thread::spawn(move || {
            let mut buffer = [0; 2000];
            while !ended.load(Ordering::Relaxed) {
                // Refused while there is no way.
                let _ = near.send_to(&[7; DATAGRAM], to);
                sent.fetch_add(1, Ordering::Relaxed);
                if near.recv_from(&mut buffer).is_ok() {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
        chatter
    }

    /// How long it takes until ten more are answered.
    fn resumes(&self) -> Duration {
        let begun = Instant::now();
        let enough = self.answered.load(Ordering::Relaxed) + 10;
        until("answers", || {
            self.answered.load(Ordering::Relaxed) >= enough
        });
        begun.elapsed()
    }

    /// Waits until so many more were sent, answered or not.
    fn goes_on(&self, count: u32) {
        let enough = self.sent.load(Ordering::Relaxed) + count;
        until("datagrams", || self.sent.load(Ordering::Relaxed) >= enough);
    }
}

impl Drop for Chatter {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < 10 * PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_device_that_others_take_away_is_made_anew_and_nothing_leaves_in_clear() {
    let Some(lab) = Lab::new() else { return };
    let ns = lab.ns("a");
    let ip = |words: &str| {
        let mut all = vec!["ip", "-n", &ns];
        all.extend(words.split(' '));
        run(&all);
    };
    // Neighbours are asked for from link-local addresses where the packet's own is another link's.
    ip("addr add fe80::1/64 dev veth0 nodad");
    run(&[
        "ip",
        "-n",
        &lab.ns("b"),
        "addr",
        "add",
        "fe80::2/64",
        "dev",
        "veth0",
        "nodad",
    ]);
    // Without a tunnel, packets would get through as well.
    ip("route add 10.2.0.0/16 via 192.0.2.2");
    ip("-6 route add fd00:2::/32 via 2001:db8::2");
    for (ends, inner, workers) in [
        (
            [(A, "10.1.0.0/16"), (B, "10.2.0.0/16")],
            [INNER_A, INNER_B],
            "workers=1",
        ),
        (
            [(A, "fd00:1::/32"), (B, "fd00:2::/32")],
            [INNER_A6, INNER_B6],
            "workers=2",
        ),
    ] {
        let clear = Clear::watch(&lab);
        let chatter = Chatter::start(&lab, inner[0], inner[1]);
        until("packets in clear", || clear.seen() > 0);
        drop(chatter);
        let b = lab.plane_between("b", ends, "aes128gcm", &[]);
        let a = lab.plane_between("a", ends, "aes128gcm", &[workers]);
        let chatter = Chatter::start(&lab, inner[0], inner[1]);
        chatter.resumes();
        let before = clear.seen();

        for _ in 0..3 {
            ip("link del ipsec0");
            let took = chatter.resumes();
            println!("{workers}: traffic resumed {took:?} after the deletion");
            assert!(took < PATIENCE, "{took:?}");
        }
        ip("link set ipsec0 down");
        chatter.goes_on(50);
        ip("link set ipsec0 up");
        let took = chatter.resumes();
        println!("{workers}: traffic resumed {took:?} after the link came up");
        assert!(took < PATIENCE, "{took:?}");
        ip(&format!(
            "link set ipsec0 netns {} name moved0",
            lab.ns("b")
        ));
        let took = chatter.resumes();
        println!("{workers}: traffic resumed {took:?} after the device had moved");
        assert!(took < PATIENCE, "{took:?}");
        let is_in_b = || {
            lab.exec("b", &["ip", "link", "show", "moved0"])
                .status
                .success()
        };
        until("the end of the device that moved", || !is_in_b());

        // No device can be made while another one has its name.
        for words in [
            "link set ipsec0 down",
            "link set ipsec0 name away0",
            "link add ipsec0 type veth peer name other0",
            "link del away0",
        ] {
            ip(words);
        }
        chatter.goes_on(50);
        ip("link del ipsec0");
        let took = chatter.resumes();
        println!("{workers}: traffic resumed {took:?} after the name was free");
        assert!(took < PATIENCE, "{took:?}");

        assert_eq!(clear.seen(), before, "packets left in clear");
        let link = lab.exec("a", &["ip", "link", "show", "ipsec0"]).stdout;
        let link = String::from_utf8_lossy(&link).into_owned();
        assert!(link.contains("mtu 1400"), "{link}");
        // What stops packets goes with the plane, also when the device cannot take routes.
        ip("link set ipsec0 down");
        drop(chatter);
        a.stop();
        b.stop();
        for family in ["-4", "-6"] {
            let left = lab
                .exec("a", &["ip", family, "route", "show", "table", "220"])
                .stdout;
            assert_eq!(String::from_utf8_lossy(&left), "");
        }
    }
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
            .map(|text| {
                // Link-local addresses take their time to become usable.
                let stable = text.lines().filter(|line| !line.contains("fe80:"));
                stable.collect::<Vec<_>>().join("\n")
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

    assert_eq!(state(), before);
}
