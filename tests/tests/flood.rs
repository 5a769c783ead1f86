// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Thirty peers return to a gateway that is being flooded: first messages with forged sources,
//! every fourth in the name of one of the peers. All of them are up in their normal time, and the
//! gateway has its memory back afterwards.
//!
//! ```text
//!   gateway 198.18.0.1 --- hub --- peers 198.18.1.1 to .30 (one daemon)
//!                           |
//!                        attacker, where answers to forged sources end
//! ```

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};
use swanherd_tests::{Daemon, Lab, Message, Namespace, Node, Plane};

const PEERS: u8 = 30;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const MESSAGES: u32 = 100_000;
/// Messages per second.
const RATE: u32 = 10_000;

#[test]
fn thirty_peers_return_through_a_flood_and_its_memory_is_given_back() {
    let mut lab = Lab::new();
    let hub = lab.namespace("hub");
    hub.ip("link add hub type bridge");
    hub.ip("link set hub up");
    let gateway = join(&mut lab, &hub, "gateway", "198.18.0.1/16");
    let peers = join(&mut lab, &hub, "peers", "198.18.1.1/16");
    let attacker = join(&mut lab, &hub, "attacker", "198.18.0.66/16");
    for index in 2..=PEERS {
        peers.ip(&format!("addr add 198.18.1.{index}/16 dev u0"));
    }
    gateway.ip("route add default via 198.18.0.66");
    let mut gateway = Node::new(&lab, &gateway, Daemon::Swanherd, Plane::User, "");
    let mut peers = Node::new(&lab, &peers, Daemon::Swanherd, Plane::User, "");
    configure(&gateway, &peers);
    gateway.start();

    // The first time is to warm up, the second to measure.
    return_of_all(&mut peers);
    let usual = return_of_all(&mut peers);
    settle(&gateway);
    let before = resident(&gateway);

    let heard = datagrams(&gateway);
    let flood = Flood::start(&attacker, MESSAGES);
    flood.wait_until_sent(MESSAGES / 10);
    let flooded = return_of_all(&mut peers);
    let (sent, lasted) = flood.end();
    let heard = datagrams(&gateway) - heard;
    settle(&gateway);
    let after = resident(&gateway);

    eprintln!(
        "{PEERS} peers: {usual:?} usually, {flooded:?} in a flood of {sent} messages in \
         {lasted:?}; {before} KiB before, {after} KiB after"
    );
    // What the gateway gets no time to read, its kernel drops.
    assert!(
        sent == MESSAGES && heard > u64::from(sent) * 9 / 10,
        "{heard} of {sent} arrived"
    );
    // One lost message would cost the four seconds of a first retransmission.
    assert!(
        flooded < usual * 2 + Duration::from_secs(3),
        "{flooded:?} instead of {usual:?}\n{}",
        gateway.log()
    );
    assert!(
        after * 100 <= before * 105,
        "{after} KiB after {before} KiB"
    );
    assert_eq!(gateway.sas().len(), usize::from(PEERS));
}

fn join(lab: &mut Lab, hub: &Namespace, name: &str, address: &str) -> Namespace {
    let namespace = lab.namespace(name);
    let dev = format!("to-{name}");
    lab.link((&namespace, "u0", address), (hub, &dev, ""));
    hub.ip(&format!("link set {dev} master hub"));
    namespace
}

fn configure(gateway: &Node, peers: &Node) {
    let mut files = [String::new(), String::new()];
    for index in 1..=PEERS {
        for (own, file) in files.iter_mut().enumerate() {
            let gateway = ("198.18.0.1".to_owned(), "gateway.example.org".to_owned());
            let peer = (
                format!("198.18.1.{index}"),
                format!("peer{index}.example.org"),
            );
            let nets = ("10.100.0.0/24".to_owned(), format!("10.101.{index}.0/24"));
            let (local, remote, nets, start) = match own {
                0 => (gateway, peer, nets, "none"),
                _ => (peer, gateway, (nets.1, nets.0), "start"),
            };
            let _ = writeln!(
                file,
                "  peer{index} {{
    version = 2
    local_addrs = {}
    remote_addrs = {}
    proposals = aes128gcm16-prfsha256-x25519
    local {{\n      auth = psk\n      id = {}\n    }}
    remote {{\n      auth = psk\n      id = {}\n    }}
    children {{
      net {{
        local_ts = {}
        remote_ts = {}
        esp_proposals = aes128gcm16
        start_action = {start}
      }}
    }}
  }}",
                local.0, remote.0, local.1, remote.1, nets.0, nets.1
            );
        }
    }
    // For anybody from anywhere, or the forged messages would be refused without ado.
    files[0].push_str(
        "  anyone {
    version = 2
    local_addrs = 198.18.0.1
    remote_addrs = %any
    proposals = aes128gcm16-prfsha256-x25519
    local {\n      auth = psk\n      id = gateway.example.org\n    }
    remote {\n      auth = psk\n      id = anyone.example.org\n    }
    children {\n      net {\n        esp_proposals = aes128gcm16\n      }\n    }
  }\n",
    );
    for (node, connections) in [gateway, peers].into_iter().zip(files) {
        node.configure(&format!(
            "connections {{\n{connections}}}\nsecrets {{\n  ike {{\n    \
             secret = \"for the laboratory\"\n  }}\n}}\n"
        ));
    }
}

/// Takes the peers away without a word, has them return, and tells how long that took them all.
fn return_of_all(peers: &mut Node) -> Duration {
    peers.kill();
    peers.start();
    let begun = Instant::now();
    peers.wait_until("all tunnels are up", 30, |node| {
        node.children("INSTALLED").len() == usize::from(PEERS)
    });
    begun.elapsed()
}

/// How many datagrams the sockets of a namespace have received.
fn datagrams(node: &Node) -> u64 {
    let snmp = node.namespace.run("cat", ["/proc/net/snmp"]).stdout;
    let mut lines = snmp.lines().filter(|line| line.starts_with("Udp: "));
    let names = lines.next().expect("the kernel counts");
    let values = lines.next().expect("the kernel counts");
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs
        .find(|(name, _)| *name == "InDatagrams")
        .expect("the kernel counts datagrams");
    value.parse().expect("it is a number")
}

/// Waits until nothing is half open any more.
fn settle(gateway: &Node) {
    gateway.wait_until("nothing is half open", 60, |node| {
        let stats = node.vici().request("stats", &Message::default());
        let stats = stats.expect("stats are answered");
        stats.text("ikesas.half-open") == "0" && node.sas().len() == usize::from(PEERS)
    });
}

/// Resident memory in KiB, once it has stopped to shrink.
fn resident(node: &Node) -> u64 {
    let now = || {
        let pid = node.pid().expect("it runs");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it has a status");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("it has memory");
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        digits.parse::<u64>().expect("a number")
    };
    let mut least = now();
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(100));
        let next = now();
        if next < least {
            least = next;
            since = Instant::now();
        }
    }
    now()
}

/// Sends forged first messages from a thread.
struct Flood {
    sent: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Flood {
    fn start(from: &Namespace, messages: u32) -> Self {
        let socket = from.enter(|| {
            // A raw socket of this protocol takes whole IP packets.
            socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW))
                .expect("root may forge")
        });
        let sent = Arc::new(AtomicU32::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (count, stopped) = (Arc::clone(&sent), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            let mut random = Random(0x5eed);
            for number in 0..messages {
                let due = begun + Duration::from_secs(1) * number / RATE;
                if let Some(wait) = due.checked_duration_since(Instant::now()) {
                    std::thread::sleep(wait);
                }
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let source = match number % 4 {
                    0 => Ipv4Addr::new(198, 18, 1, 1 + random.octet() % PEERS),
                    _ => Ipv4Addr::new(11, random.octet(), random.octet(), random.octet()),
                };
                let packet = forged(source, &mut random);
                let to = SocketAddrV4::new(GATEWAY, 0);
                // The queue of the device may be full.
                while sendto(&socket, &packet, SendFlags::empty(), &to).is_err() {
                    assert!(
                        begun.elapsed() < Duration::from_secs(60),
                        "nothing goes out"
                    );
                    std::thread::yield_now();
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
            begun.elapsed()
        });
        Self { sent, stop, thread }
    }

    fn wait_until_sent(&self, messages: u32) {
        while self.sent.load(Ordering::Relaxed) < messages && !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets it finish; how many messages it were, and how long it took.
    fn end(self) -> (u32, Duration) {
        let lasted = self.thread.join().expect("the flood ends by itself");
        self.stop.store(true, Ordering::Relaxed);
        (self.sent.load(Ordering::Relaxed), lasted)
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }

    fn octet(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}

/// An IP packet with a first message that the gateway accepts.
fn forged(source: Ipv4Addr, random: &mut Random) -> Vec<u8> {
    let octets = |random: &mut Random| -> Vec<u8> {
        (0..4).flat_map(|_| random.next().to_be_bytes()).collect()
    };
    let payload = |next: u8, body: &[u8]| {
        let len = u16::try_from(4 + body.len()).expect("it is short");
        [&[next, 0][..], &len.to_be_bytes(), body].concat()
    };
    // ENCR AES_GCM_16 with 128 bits, PRF HMAC_SHA2_256, KE CURVE_25519.
    let transforms = [
        &[3, 0, 0, 12, 1, 0, 0, 20, 0x80, 14, 0, 128][..],
        &[3, 0, 0, 8, 2, 0, 0, 5],
        &[0, 0, 0, 8, 4, 0, 0, 31],
    ]
    .concat();
    let proposal = [&[0, 0, 0, 36, 1, 1, 0, 3][..], &transforms].concat();
    let key = [&[0, 31, 0, 0][..], &octets(random)].concat();
    let payloads = [
        payload(34, &proposal),
        payload(40, &key),
        payload(0, &octets(random)),
    ]
    .concat();
    let len = u32::try_from(28 + payloads.len()).expect("it is short");
    let ike = [
        &(random.next() | 1).to_be_bytes()[..],
        &[0; 8],
        &[33, 0x20, 34, 0x08],
        &[0; 4],
        &len.to_be_bytes(),
        &payloads,
    ]
    .concat();
    let udp_len = u16::try_from(8 + ike.len()).expect("it is short");
    // Without a checksum of UDP, which IPv4 permits; the kernel fills in that of IP and the length.
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
    packet.extend_from_slice(&source.octets());
    packet.extend_from_slice(&GATEWAY.octets());
    for field in [500, 500, udp_len, 0] {
        packet.extend_from_slice(&field.to_be_bytes());
    }
    packet.extend_from_slice(&ike);
    packet
}
