// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Watches this host's links, addresses, routes and rules.
//!
//! Changes come in storms: a routing daemon that restarts makes a million of them. So nothing is
//! done for one change. They are counted and forgotten until the host is quiet for a moment, and
//! then everything that depends on them is evaluated once, from dumps. A lost notice costs no more
//! than that either.
//!
//! The `rtnetlink` crate can join these groups too, but it decodes every message and keeps them in
//! a queue without bound; here they are looked at in place, and only their headers.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use netlink_packet_core::NlasIterator;
use netlink_sys::Socket;
use swanherd_ipsec::plane::PlaneEvent;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::netlink::{self, Frame};
use crate::route::{OUR_PROTOCOL, TUNNEL_TABLE};

/// Nothing is evaluated before the host was quiet for so long,
const QUIET: Duration = Duration::from_millis(100);
/// or at the latest so long after the first change.
const LATEST: Duration = Duration::from_secs(1);
/// After an evaluation there is a rest of so many times what it took,
const REST: u32 = 9;
/// but not longer.
const MAX_REST: Duration = Duration::from_secs(5);
/// Evaluations in a row, all for changes to the tunnels' own table, before each further one is
/// put off: somebody undoes what we mend, or the other way round.
const PATIENT: u32 = 5;
/// For how long the first of them is put off; each further one twice as long,
const FIRST_TRUCE: Duration = Duration::from_secs(1);
/// but not longer.
const MAX_TRUCE: Duration = Duration::from_secs(128);
/// Changes are in a row that come so soon after an evaluation, or as soon as it was put off for.
const IN_A_ROW: Duration = Duration::from_secs(2);
/// How long the task rests after an error of the socket that it does not know.
const ERROR_PAUSE: Duration = Duration::from_millis(500);
/// Room for bursts; the kernel grants what its limits allow.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// Links whose state is remembered. Of further ones every notice counts as a change.
const MAX_LINKS: usize = 16_384;

/// What a plane does about changes.
pub(crate) trait Watcher: Send + Sync + 'static {
    /// Port numbers of our own requests: what they change is no news.
    fn own_ports(&self) -> Vec<u32>;

    /// A device has gone. Called at once.
    fn vanished(&self, interface: u32) -> impl Future<Output = ()> + Send;

    /// A device was set down. Called at once.
    fn set_down(&self, interface: u32) -> impl Future<Output = ()> + Send;

    /// Something has changed, and the host is quiet again. In a contest with another program,
    /// which was told of, that there is something to mend is no news.
    fn evaluate(&self, contest: bool) -> impl Future<Output = ()> + Send;
}

/// Opens the multicast socket. It must be bound before it joins: an unbound socket joins without
/// complaint and never receives.
pub(crate) fn open_socket() -> io::Result<AsyncFd<Socket>> {
    const GROUPS: [u32; 7] = [
        libc::RTNLGRP_LINK,
        libc::RTNLGRP_IPV4_IFADDR,
        libc::RTNLGRP_IPV6_IFADDR,
        libc::RTNLGRP_IPV4_ROUTE,
        libc::RTNLGRP_IPV6_ROUTE,
        libc::RTNLGRP_IPV4_RULE,
        libc::RTNLGRP_IPV6_RULE,
    ];
    let socket = netlink::open_socket(libc::NETLINK_ROUTE as isize)?;
    netlink::enlarge_buffer(&socket, SOCKET_BUFFER);
    for group in GROUPS {
        socket.get_ref().add_membership(group)?;
    }
    Ok(socket)
}

/// Watches until nobody listens to `events` any more.
pub(crate) async fn run(
    socket: AsyncFd<Socket>,
    watcher: impl Watcher,
    events: mpsc::Sender<PlaneEvent>,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut links = Links::default();
    let mut due = Due::default();
    while !events.is_closed() {
        let received = tokio::select! {
            // First, so that a storm cannot put it off.
            biased;
            () = due.wait() => {
                let begun = Instant::now();
                watcher.evaluate(due.contest.rounds >= PATIENT).await;
                let host = due.done(begun, Instant::now());
                if host && events.try_send(PlaneEvent::NetworkChanged).is_err() {
                    // The daemon is behind; it is told later.
                    due.host_changed(Instant::now());
                }
                continue;
            }
            received = netlink::receive(&socket, &mut buffer) => received,
        };
        let now = Instant::now();
        match received {
            Ok(length) => {
                let own = watcher.own_ports();
                for frame in netlink::frames(&buffer[..length]) {
                    let change = if own.contains(&frame.port) && frame.port != 0 {
                        Change::None
                    } else {
                        links.read(&frame)
                    };
                    match change {
                        Change::None => {}
                        Change::Tunnels => due.tunnels_changed(now),
                        Change::Host => due.host_changed(now),
                        Change::Down(interface) => {
                            due.host_changed(now);
                            watcher.set_down(interface).await;
                        }
                        Change::Vanished(interface) => {
                            due.host_changed(now);
                            watcher.vanished(interface).await;
                        }
                    }
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                tracing::debug!("notices of network changes were lost; everything is evaluated");
                links = Links::default();
                due.host_changed(now);
                // Whichever device has gone, nobody will say so.
                watcher.vanished(ANY_INTERFACE).await;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the kernel's notices of network changes");
                due.host_changed(now);
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}

/// Given to [`Watcher::vanished`] if it is unknown which device has gone, or whether one has.
pub(crate) const ANY_INTERFACE: u32 = 0;

/// When to evaluate: not with each change, but when they end or have gone on for long enough.
#[derive(Debug, Default)]
pub(crate) struct Due {
    /// First and latest change since the last evaluation.
    changed: Option<(Instant, Instant)>,
    /// Whether more has changed than what is ours.
    host: bool,
    /// Whether something of the tunnels' table has changed.
    tunnels: bool,
    /// No evaluation before this.
    not_before: Option<Instant>,
    contest: Contest,
}

/// A contest with another program for what is in the tunnels' table.
#[derive(Debug, Default)]
struct Contest {
    /// Evaluations in a row.
    rounds: u32,
    /// How long the next one is put off for.
    truce: Duration,
    /// Until when.
    until: Option<Instant>,
}

impl Contest {
    /// An evaluation for changes that began at `changed` has ended.
    fn round(&mut self, changed: Instant, ended: Instant) {
        let again = |until| changed <= until + self.truce.max(IN_A_ROW);
        self.rounds = if self.until.is_some_and(again) {
            self.rounds.saturating_add(1)
        } else {
            0
        };
        self.truce = match self.rounds.checked_sub(PATIENT) {
            None => Duration::ZERO,
            Some(doublings) => 2u32
                .checked_pow(doublings)
                .and_then(|times| FIRST_TRUCE.checked_mul(times))
                .map_or(MAX_TRUCE, |truce| truce.min(MAX_TRUCE)),
        };
        self.until = Some(ended + self.truce);
        if self.rounds == PATIENT {
            tracing::warn!(
                "another program keeps changing the routes or the rule of the tunnels; \
                 they are mended less and less often"
            );
        }
    }
}

impl Due {
    /// Something has changed.
    pub(crate) fn note(&mut self, now: Instant) {
        let (_, last) = self.changed.get_or_insert((now, now));
        *last = now;
    }

    fn host_changed(&mut self, now: Instant) {
        self.note(now);
        self.host = true;
    }

    fn tunnels_changed(&mut self, now: Instant) {
        self.note(now);
        self.tunnels = true;
    }

    fn at(&self) -> Option<Instant> {
        let (first, last) = self.changed?;
        let at = (last + QUIET).min(first + LATEST);
        // What the host's network asks for is never put off by a contest.
        let truce = self.contest.until.filter(|_| self.tunnels && !self.host);
        let earliest = self.not_before.max(truce);
        Some(earliest.map_or(at, |earliest| at.max(earliest)))
    }

    pub(crate) async fn wait(&self) {
        match self.at() {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// After an evaluation: whether the host's network had changed.
    pub(crate) fn done(&mut self, begun: Instant, now: Instant) -> bool {
        let changed = self.changed.take();
        self.rest(begun, now);
        let host = std::mem::take(&mut self.host);
        if std::mem::take(&mut self.tunnels)
            && !host
            && let Some((first, _)) = changed
        {
            self.contest.round(first, now);
        }
        host
    }

    /// Lets no evaluation follow on this one too soon.
    pub(crate) fn rest(&mut self, begun: Instant, now: Instant) {
        self.not_before = Some(now + ((now - begun) * REST).min(MAX_REST));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Nothing that matters here.
    None,
    /// Only something of the tunnels' table.
    Tunnels,
    /// An address, link, route or rule.
    Host,
    /// A device was set down.
    Down(u32),
    /// A device has gone.
    Vanished(u32),
}

/// What is remembered of links: notices of them come for many reasons, of which few matter.
#[derive(Debug, Default)]
struct Links {
    flags: BTreeMap<u32, u32>,
}

impl Links {
    fn read(&mut self, frame: &Frame<'_>) -> Change {
        match frame.kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => self.read_link(frame),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => read_address(frame.payload),
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => read_route(frame.payload),
            libc::RTM_NEWRULE | libc::RTM_DELRULE => match frame.payload.get(4) {
                Some(&TUNNEL_TABLE) => Change::Tunnels,
                _ => Change::Host,
            },
            _ => Change::None,
        }
    }

    /// Reads `struct ifinfomsg`.
    fn read_link(&mut self, frame: &Frame<'_>) -> Change {
        const MATTERS: u32 = (libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_LOWER_UP) as u32;
        let word = |at: usize| {
            let octets = frame.payload.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_ne_bytes(octets))
        };
        // Bridges tell of their ports under a family of their own.
        if frame.payload.first() != Some(&(libc::AF_UNSPEC as u8)) {
            return Change::None;
        }
        let (Some(index), Some(flags)) = (word(4), word(8)) else {
            return Change::None;
        };
        if frame.kind == libc::RTM_DELLINK {
            self.flags.remove(&index);
            return Change::Vanished(index);
        }
        const UP: u32 = libc::IFF_UP as u32;
        let flags = flags & MATTERS;
        let before = self.flags.get(&index).copied();
        if before == Some(flags) {
            return Change::None;
        }
        if self.flags.len() < MAX_LINKS || before.is_some() {
            self.flags.insert(index, flags);
        }
        if flags & UP == 0 && before.is_none_or(|before| before & UP != 0) {
            Change::Down(index)
        } else {
            Change::Host
        }
    }
}

/// Reads the attributes behind `struct ifaddrmsg`: virtual addresses bear our mark. For IPv6 the
/// kernel does not say who has changed one.
fn read_address(payload: &[u8]) -> Change {
    const HEADER: usize = 8;
    const IFA_PROTO: u16 = 11;
    let attributes = payload.get(HEADER..).unwrap_or_default();
    let ours = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .any(|attribute| {
            attribute.kind() == IFA_PROTO && attribute.value().first() == Some(&OUR_PROTOCOL)
        });
    if ours { Change::Tunnels } else { Change::Host }
}

/// Reads `struct rtmsg`.
fn read_route(payload: &[u8]) -> Change {
    /// A copy of a route that the kernel made for one destination.
    const RTM_F_CLONED: u32 = 0x200;
    let Some(header) = payload.first_chunk::<12>() else {
        return Change::None;
    };
    let flags = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
    if flags & RTM_F_CLONED != 0 {
        return Change::None;
    }
    match header[4] {
        TUNNEL_TABLE => Change::Tunnels,
        // These come and go with addresses, also with those that we add; those have notices.
        libc::RT_TABLE_LOCAL => Change::None,
        _ => Change::Host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(kind: u16, index: u32, flags: u32) -> Vec<u8> {
        let mut message = 32u32.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend([0; 10]);
        message.extend([0; 4]);
        message.extend(index.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 4]);
        message
    }

    fn read(links: &mut Links, message: &[u8]) -> Change {
        links.read(&netlink::frames(message).next().unwrap())
    }

    #[test]
    fn a_link_matters_when_it_comes_goes_or_changes_its_state() {
        const UP: u32 = libc::IFF_UP as u32;
        const PROMISC: u32 = libc::IFF_PROMISC as u32;
        let mut links = Links::default();
        let news = |links: &mut Links, flags| read(links, &link(libc::RTM_NEWLINK, 5, flags));

        assert_eq!(news(&mut links, UP), Change::Host);
        assert_eq!(news(&mut links, UP | PROMISC), Change::None);
        assert_eq!(news(&mut links, 0), Change::Down(5));
        assert_eq!(news(&mut links, UP), Change::Host);
        // What it was before may be unknown.
        let down = link(libc::RTM_NEWLINK, 6, 0);
        assert_eq!(read(&mut links, &down), Change::Down(6));
        let gone = link(libc::RTM_DELLINK, 5, 0);
        assert_eq!(read(&mut links, &gone), Change::Vanished(5));
    }

    #[test]
    fn virtual_addresses_are_told_from_the_hosts_by_our_mark() {
        let mut address = vec![0; 8];
        assert_eq!(read_address(&address), Change::Host);
        address.extend([5, 0, 11, 0, OUR_PROTOCOL, 0, 0, 0]);
        // The length and kind are in host order.
        address[8..10].copy_from_slice(&5u16.to_ne_bytes());
        address[10..12].copy_from_slice(&11u16.to_ne_bytes());
        assert_eq!(read_address(&address), Change::Tunnels);
        assert_eq!(read_address(&address[..5]), Change::Host);
    }

    #[test]
    fn routes_of_the_tunnels_table_are_told_from_the_hosts() {
        let mut route = [0; 12];
        route[4] = TUNNEL_TABLE;
        assert_eq!(read_route(&route), Change::Tunnels);
        route[4] = libc::RT_TABLE_LOCAL;
        assert_eq!(read_route(&route), Change::None);
        route[4] = libc::RT_TABLE_MAIN;
        assert_eq!(read_route(&route), Change::Host);
        route[8..].copy_from_slice(&0x200u32.to_ne_bytes());
        assert_eq!(read_route(&route), Change::None);
        assert_eq!(read_route(&route[..5]), Change::None);
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_evaluated_when_they_end_and_at_the_latest_after_a_second() {
        let start = Instant::now();
        let mut due = Due::default();
        assert_eq!(due.at(), None);

        due.host_changed(start);
        assert_eq!(due.at(), Some(start + QUIET));
        for step in 0..200 {
            due.note(start + Duration::from_millis(step * 10));
        }
        assert_eq!(due.at(), Some(start + LATEST));

        due.wait().await;
        assert_eq!(Instant::now(), start + LATEST);
        assert!(due.done(Instant::now(), Instant::now()));
        assert_eq!(due.at(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_evaluation_that_takes_long_is_followed_by_a_longer_rest() {
        let begun = Instant::now();
        let mut due = Due::default();
        for (took, rest) in [(100, 900), (500, 4500), (10_000, 5000)] {
            let ended = begun + Duration::from_millis(took);
            due.note(begun);
            assert!(!due.done(begun, ended));

            due.note(ended);

            assert_eq!(due.at(), Some(ended + Duration::from_millis(rest)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_contest_for_the_tunnels_table_calms_down_and_holds_nothing_else_up() {
        let mut due = Due::default();
        let mut rests = Vec::new();
        for _ in 0..PATIENT + 12 {
            let changed = Instant::now();
            due.tunnels_changed(changed);
            due.wait().await;
            rests.push((Instant::now() - changed).as_secs());
            due.done(Instant::now(), Instant::now());
        }
        // The first ones come as soon as it is quiet.
        let (first, later) = rests.split_at(PATIENT as usize + 1);
        assert!(first.iter().all(|rest| *rest == 0), "{rests:?}");
        assert_eq!(later, [1, 2, 4, 8, 16, 32, 64, 128, 128, 128, 128]);

        let changed = Instant::now();
        due.tunnels_changed(changed);
        due.host_changed(changed);
        assert_eq!(due.at(), Some(changed + QUIET));
        due.done(changed, changed);

        // When both have rested for long, the contest is over.
        tokio::time::sleep(3 * MAX_TRUCE).await;
        let changed = Instant::now();
        due.tunnels_changed(changed);
        assert_eq!(due.at(), Some(changed + QUIET));
        due.wait().await;
        due.done(Instant::now(), Instant::now());
        due.tunnels_changed(Instant::now());
        assert_eq!(due.at(), Some(Instant::now() + QUIET));
    }

    #[test]
    fn two_programs_that_undo_each_others_routes_do_so_a_few_times() {
        in_namespace(async {
            let socket = open_socket().unwrap();
            let router = crate::route::Router::open().unwrap();
            let counter = Counter::default();
            let (sender, _events) = mpsc::channel(8);
            let task = tokio::spawn(run(socket, counter.clone(), sender));
            let network = ("10.9.8.0".parse().unwrap(), 24);
            let begun = Instant::now();
            // Each evaluation is answered at once.
            let mut answered = 0;
            while begun.elapsed() < Duration::from_secs(4) {
                if counter.0.lock().unwrap().0 >= answered {
                    let throw = crate::route::TunnelRoute::Throw;
                    router.install(network, throw).await.unwrap();
                    router.remove(network).await.unwrap();
                    answered += 1;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let evaluations = counter.0.lock().unwrap().0;
            assert!((2..=9).contains(&evaluations), "{evaluations}");
            task.abort();
        });
    }

    /// Counts what it is told to do.
    #[derive(Clone, Default)]
    struct Counter(std::sync::Arc<std::sync::Mutex<(usize, Vec<u32>)>>);

    impl Watcher for Counter {
        fn own_ports(&self) -> Vec<u32> {
            Vec::new()
        }

        async fn vanished(&self, interface: u32) {
            self.0.lock().unwrap().1.push(interface);
        }

        async fn set_down(&self, _interface: u32) {}

        async fn evaluate(&self, _contest: bool) {
            self.0.lock().unwrap().0 += 1;
        }
    }

    /// Runs in a network namespace that goes with its thread.
    fn in_namespace(test: impl Future<Output = ()> + Send) {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root for a network namespace");
            return;
        }
        let runtime = || {
            // Its own namespace, of which nothing else knows.
            let flags = rustix::thread::UnshareFlags::NEWNET;
            #[allow(unsafe_code)]
            // SAFETY: only the network namespace of this thread is left, no memory or descriptor.
            unsafe { rustix::thread::unshare_unsafe(flags) }.unwrap();
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(test);
        };
        std::thread::scope(|scope| scope.spawn(runtime).join()).unwrap();
    }

    #[test]
    fn lost_notices_cause_one_evaluation_and_no_spin() {
        in_namespace(async {
            let socket = open_socket().unwrap();
            rustix::net::sockopt::set_socket_recv_buffer_size(socket.get_ref(), 4096).unwrap();
            let router = crate::route::Router::open().unwrap();
            // Nobody reads the notices of these.
            for last in 1..200u8 {
                let addr = std::net::Ipv4Addr::new(10, 9, 8, last).into();
                router.add_address(addr, 1).await.unwrap();
            }
            let counter = Counter::default();
            let (sender, mut events) = mpsc::channel(8);
            let task = tokio::spawn(run(socket, counter.clone(), sender));

            assert_eq!(events.recv().await, Some(PlaneEvent::NetworkChanged));

            // Quiet again: nothing more happens.
            tokio::time::sleep(QUIET * 3).await;
            let (evaluations, vanished) = counter.0.lock().unwrap().clone();
            assert_eq!(evaluations, 1);
            assert_eq!(vanished, [ANY_INTERFACE]);
            assert!(events.try_recv().is_err());
            task.abort();
        });
    }

    #[test]
    fn a_vanished_device_is_told_at_once() {
        in_namespace(async {
            let socket = open_socket().unwrap();
            let counter = Counter::default();
            let (sender, _events) = mpsc::channel(8);
            let task = tokio::spawn(run(socket, counter.clone(), sender));
            let ip = |arguments: &str| {
                let arguments = arguments.split_whitespace();
                let status = std::process::Command::new("ip").args(arguments).status();
                assert!(status.unwrap().success());
            };
            ip("link add v0 type veth peer name v1");
            ip("link del v0");
            let begun = Instant::now();
            while counter.0.lock().unwrap().1.len() < 2 {
                assert!(begun.elapsed() < Duration::from_secs(20));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(!counter.0.lock().unwrap().1.contains(&ANY_INTERFACE));
            task.abort();
        });
    }

    proptest::proptest! {
        #[test]
        fn no_notice_makes_the_reader_panic(
            kind in 0u16..100,
            payload in proptest::collection::vec(0u8.., 0..40),
        ) {
            let frame = Frame { kind, flags: 0, sequence: 0, port: 0, payload: &payload };
            let _ = Links::default().read(&frame);
        }
    }
}
