// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The hosts: one or two with a plane, and a scripted one.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{
    Direction, Mode, Op, Outcome, PlaneError, PlaneEvent, PolicyAction, PolicySet, SaCounters,
    SaEntry, SaId, UdpEncap,
};
use swanherd_kernel::DataPlane;
use tokio::sync::mpsc::Receiver;

use super::packet::{Esp, Ip, keys};
use super::sniffer::{Seen, Sniffer};
use crate::common::{INNER, Lab, OUTER};

/// The port of NAT traversal.
pub(crate) const PORT: u16 = 4500;
/// How long something that must happen may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for something that must not happen.
pub(crate) const QUIET: Duration = Duration::from_millis(150);

/// SPIs of the SAs that most tests use: towards the host, and away from it.
pub(crate) const SPI_IN: u32 = 0xc000_0011;
pub(crate) const SPI_OUT: u32 = 0xc000_0022;

/// How to have a plane of one kind.
pub(crate) trait Bed {
    type Plane: DataPlane;
    /// What must live as long as the plane.
    type Keep;

    /// Whether this can be tried here.
    fn is_available() -> bool;

    /// Starts a plane in the namespace that this thread is in.
    async fn start() -> (Self::Plane, Receiver<PlaneEvent>, Self::Keep);
}

pub(crate) fn outer(side: usize) -> IpAddr {
    OUTER[side].parse().unwrap()
}

pub(crate) fn inner(side: usize) -> Ipv4Addr {
    INNER[side].parse().unwrap()
}

pub(crate) fn network(text: &str, len: u8) -> TrafficSelector {
    TrafficSelector::network(text.parse().unwrap(), len).unwrap()
}

/// One UDP port of `network`.
pub(crate) fn udp_port(network: TrafficSelector, port: u16) -> TrafficSelector {
    TrafficSelector {
        protocol: super::packet::UDP,
        start_port: port,
        end_port: port,
        ..network
    }
}

/// A host with a plane.
pub(crate) struct Host<B: Bed> {
    pub(crate) plane: B::Plane,
    pub(crate) events: Receiver<PlaneEvent>,
    _keep: B::Keep,
}

impl<B: Bed> Host<B> {
    pub(crate) async fn start(lab: &Lab, side: usize) -> Self {
        let (plane, events, keep) = lab.within(side, B::start()).await;
        Self {
            plane,
            events,
            _keep: keep,
        }
    }

    pub(crate) async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        self.plane.apply(op).await
    }

    pub(crate) async fn done(&self, op: Op) {
        let name = op.name();
        assert_eq!(self.apply(op).await, Ok(Outcome::Done), "{name}");
    }

    pub(crate) async fn install(&self, entry: SaEntry) {
        self.done(Op::InstallSa(Box::new(entry))).await;
    }

    pub(crate) async fn remove(&self, id: SaId) {
        self.done(Op::RemoveSa(id)).await;
    }

    /// Puts an SA in the place of one with the same name.
    pub(crate) async fn reinstall(&self, entry: SaEntry) {
        self.remove(entry.id()).await;
        self.install(entry).await;
    }

    pub(crate) async fn install_set(&self, set: PolicySet) {
        self.done(Op::InstallPolicies(Box::new(set))).await;
    }

    pub(crate) async fn counters(&self, id: SaId) -> SaCounters {
        let all = self.plane.counters().await.unwrap();
        let counters = *all
            .get(&id)
            .unwrap_or_else(|| panic!("no {id:?} in {all:?}"));
        assert_eq!(self.plane.counters_of(id).await, Some(counters));
        counters
    }

    /// Waits until the counters of an SA are as `wanted`.
    pub(crate) async fn until(&self, id: SaId, wanted: impl Fn(&SaCounters) -> bool) -> SaCounters {
        let end = Instant::now() + PATIENCE;
        loop {
            let counters = self.counters(id).await;
            if wanted(&counters) {
                return counters;
            }
            assert!(Instant::now() < end, "{counters:?}");
            pause().await;
        }
    }

    /// The next event but for those of the host's network, which the tests themselves change.
    pub(crate) async fn event(&mut self) -> PlaneEvent {
        let next = async {
            loop {
                match self.events.recv().await.expect("the plane is alive") {
                    PlaneEvent::NetworkChanged => {}
                    event => return event,
                }
            }
        };
        tokio::time::timeout(PATIENCE, next)
            .await
            .expect("an event in time")
    }

    /// The events of a while, but for those of the host's network.
    pub(crate) async fn events_of(&mut self, while_: Duration) -> Vec<PlaneEvent> {
        let mut events = Vec::new();
        let end = tokio::time::Instant::now() + while_;
        while let Ok(Some(event)) = tokio::time::timeout_at(end, self.events.recv()).await {
            if event != PlaneEvent::NetworkChanged {
                events.push(event);
            }
        }
        events
    }
}

pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

/// A host with a plane, side 0, and a scripted one, side 1.
pub(crate) struct Bench<B: Bed> {
    pub(crate) lab: Lab,
    pub(crate) host: Host<B>,
    pub(crate) sniffer: Sniffer,
    peer: UdpSocket,
}

impl<B: Bed> Bench<B> {
    /// Hosts that would reach each other's inner networks in clear, if they were let.
    pub(crate) async fn start() -> Self {
        let lab = lab();
        lab.ip(1, "route add local 10.2.0.0/16 dev lo");
        let host = Host::start(&lab, 0).await;
        let sniffer = lab
            .within(1, async { Sniffer::open("veth").unwrap() })
            .await;
        let peer = bind(&lab, 1, (OUTER[1], PORT)).await;
        Self {
            lab,
            host,
            sniffer,
            peer,
        }
    }

    /// The same, with an SA each way and their policies.
    pub(crate) async fn connected() -> Self {
        let bench = Self::start().await;
        bench.host.install(sa_in()).await;
        bench.host.install(sa_out()).await;
        bench.host.install_set(child(1)).await;
        bench
    }

    /// Sends an ESP packet to the host.
    pub(crate) fn inject(&self, esp: &Esp) {
        self.inject_raw(&esp.seal());
    }

    pub(crate) fn inject_raw(&self, packet: &[u8]) {
        self.peer.send_to(packet, (OUTER[0], PORT)).unwrap();
    }

    /// The socket that [`Bench::inject`] sends through.
    pub(crate) fn peer(&self) -> &UdpSocket {
        &self.peer
    }

    /// A UDP socket of the host's inner address.
    pub(crate) async fn listen(&self, port: u16) -> UdpSocket {
        bind(&self.lab, 0, (INNER[0], port)).await
    }

    /// Sends a datagram from `src` of the host.
    pub(crate) async fn send_from(&self, src: (Ipv4Addr, u16), dst: (Ipv4Addr, u16), data: &[u8]) {
        let socket = bind(&self.lab, 0, (&src.0.to_string(), src.1)).await;
        // The kernel's plane tells the sender what it stops.
        let _ = socket.send_to(data, dst);
    }

    /// Sends a datagram of `len` octets from the host's inner address to port `dst.1` of `dst.0`.
    pub(crate) async fn send(&self, dst: (&str, u16), len: usize) {
        let dst = (dst.0.parse().unwrap(), dst.1);
        self.send_from((inner(0), 5000), dst, &vec![0x61; len])
            .await;
    }

    /// Sends a datagram and tells what arrives.
    pub(crate) async fn probe(&self, dst: (&str, u16)) -> Option<Seen> {
        self.send(dst, 20).await;
        let port = dst.1;
        let dst: Ipv4Addr = dst.0.parse().unwrap();
        let seen = self.sniffer.next(PATIENCE).await?;
        let (to, ip) = match &seen.kind {
            super::sniffer::Kind::Esp(_, ip) => (ip.dst, ip),
            super::sniffer::Kind::Clear => (seen.outer.dst, &seen.outer),
        };
        assert_eq!((to, ip.udp().map(|udp| udp.1)), (dst, Some(port)));
        Some(seen)
    }

    /// By which SA a datagram leaves; `None`: in clear.
    pub(crate) async fn leaves_by(&self, dst: (&str, u16)) -> Option<u32> {
        let seen = self.probe(dst).await.expect("a packet");
        match seen.kind {
            super::sniffer::Kind::Esp(esp, _) => Some(esp.spi),
            super::sniffer::Kind::Clear => None,
        }
    }

    /// Sends a datagram, which must not leave.
    pub(crate) async fn is_stopped(&self, dst: (&str, u16)) -> bool {
        self.send(dst, 20).await;
        self.sniffer.next(QUIET).await.is_none()
    }
}

/// Two hosts that reach each other's inner networks in clear.
pub(crate) fn lab() -> Lab {
    let lab = Lab::pair();
    lab.ip(0, "route add 10.2.0.0/16 via 192.0.2.2 src 10.1.0.1");
    lab.ip(1, "route add 10.1.0.0/16 via 192.0.2.1 src 10.2.0.1");
    lab
}

/// A socket in the namespace of `side`.
pub(crate) async fn bind(lab: &Lab, side: usize, addr: (&str, u16)) -> UdpSocket {
    let end = Instant::now() + PATIENCE;
    loop {
        match lab.within(side, async { UdpSocket::bind(addr) }).await {
            Ok(socket) => {
                socket.set_nonblocking(true).unwrap();
                return socket;
            }
            // A process that another test has just forked holds a socket that was closed here,
            // until it runs its program.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < end => {
                pause().await;
            }
            Err(error) => panic!("{addr:?}: {error}"),
        }
    }
}

/// What a socket receives next, or `None` if nothing comes in time.
pub(crate) async fn receive(
    socket: &UdpSocket,
    patience: Duration,
) -> Option<(Vec<u8>, SocketAddr)> {
    let end = Instant::now() + patience;
    let mut buffer = vec![0; 70_000];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((len, from)) => {
                buffer.truncate(len);
                return Some((buffer, from));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Of a datagram sent before.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => panic!("{error}"),
        }
        if Instant::now() >= end {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// An SA from host `from` to the other, as the side `at` installs it.
pub(crate) fn sa(spi: u32, from: usize, at: usize) -> SaEntry {
    SaEntry {
        replay_window: 32,
        encap: Some(UdpEncap {
            src_port: PORT,
            dst_port: PORT,
        }),
        ..SaEntry::tunnel(
            if from == at {
                Direction::Out
            } else {
                Direction::In
            },
            spi,
            [outer(from), outer(1 - from)],
            1,
            keys(),
        )
    }
}

/// The SA from the scripted host.
pub(crate) fn sa_in() -> SaEntry {
    sa(SPI_IN, 1, 0)
}

/// The SA to the scripted host.
pub(crate) fn sa_out() -> SaEntry {
    sa(SPI_OUT, 0, 0)
}

/// Policies of a child between the inner networks, as `side` has them.
pub(crate) fn child_of(side: usize, id: u32) -> PolicySet {
    let networks = ["10.1.0.0", "10.2.0.0"];
    PolicySet::new(
        id,
        format!("lab/{id}"),
        vec![network(networks[side], 24)],
        vec![network(networks[1 - side], 24)],
        protect(side, 1),
    )
}

pub(crate) fn child(id: u32) -> PolicySet {
    child_of(0, id)
}

/// A child's policies for another remote network.
pub(crate) fn child_to(id: u32, reqid: u32, remote: TrafficSelector) -> PolicySet {
    PolicySet {
        remote: vec![remote],
        action: protect(0, reqid),
        ..child(id)
    }
}

pub(crate) fn shunt(id: u32, action: PolicyAction, remote: TrafficSelector) -> PolicySet {
    PolicySet {
        remote: vec![remote],
        action,
        ..child(id)
    }
}

pub(crate) fn protect(side: usize, reqid: u32) -> PolicyAction {
    PolicyAction::Protect {
        mode: Mode::Tunnel,
        local: outer(side),
        remote: outer(1 - side),
        reqid,
        spi: 0,
    }
}

/// A datagram from the scripted host's inner address to port `port` of the host's.
pub(crate) fn datagram(port: u16, data: &[u8]) -> Ip {
    super::packet::udp((inner(1), 6000), (inner(0), port), data)
}
