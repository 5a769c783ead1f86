// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packets through the tunnels.

use std::net::SocketAddr;
use std::time::Duration;

use swanherd_ipsec::plane::{PlaneEvent, PolicyAction, PolicySet, SaId};

use crate::world::{Happening, World};

/// Traffic through the tunnels, in both directions, and how much of it arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traffic {
    on: bool,
    /// Time between the packets of one tunnel.
    pub(crate) interval: Duration,
    /// Whether traps ask for SAs, and NATs treat packets as they treat IKE.
    pub(crate) asks: bool,
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    /// No SA to send with.
    pub(crate) blocked: u64,
    /// No SA to receive with.
    pub(crate) refused: u64,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            on: false,
            interval: Duration::from_millis(50),
            asks: false,
            sent: 0,
            arrived: 0,
            blocked: 0,
            refused: 0,
        }
    }
}

impl World {
    /// Starts or stops the traffic through all tunnels.
    pub(crate) fn set_traffic(&mut self, on: bool) {
        if on && !self.traffic.on {
            self.schedule(self.now.instant, Happening::Packets);
        }
        self.traffic.on = on;
    }

    /// One packet through every tunnel of every host. Packets are not lost to the network: what
    /// is measured is whether both sides have the SAs for them.
    pub(crate) fn packets(&mut self) {
        if !self.traffic.on {
            return;
        }
        let now = self.now.instant;
        for host in 0..self.hosts.len() {
            if self.hosts[host].off {
                continue;
            }
            let plane = &self.hosts[host].plane;
            let outbound: Vec<_> = plane
                .policies
                .values()
                .filter(|policy| !policy.trap)
                .map(|policy| plane.outbound(policy))
                .map(|sa| sa.map(|sa| (sa.id(), sa.src, sa.encap)))
                .collect();
            if self.traffic.asks {
                self.spring_traps(host);
            }
            for sa in outbound {
                self.traffic.sent += 1;
                let Some((id, src, encap)) = sa else {
                    self.traffic.blocked += 1;
                    self.note(host, || "no SA to send a packet with".to_owned());
                    continue;
                };
                self.carry(host, id);
                let dead = &self.net.dead;
                if dead.contains(&id.dst) || dead.contains(&src) {
                    continue;
                }
                let ports = encap.map_or((0, 0), |udp| (udp.src_port, udp.dst_port));
                let ends = (
                    SocketAddr::new(src, ports.0),
                    SocketAddr::new(id.dst, ports.1),
                );
                let elapsed = self.elapsed();
                let route = if encap.is_some() && self.traffic.asks {
                    self.net.translate(ends.0, ends.1, elapsed)
                } else {
                    let inside = self.net.inside_of(id.dst);
                    Some((ends.0, SocketAddr::new(inside, ends.1.port())))
                };
                let Some((from, target)) = route else {
                    continue;
                };
                let Some(to) = self.host_at(target.ip()) else {
                    continue;
                };
                if self.traffic.asks && self.net.is_cut(host, to) {
                    continue;
                }
                let from = encap.map(|_| from).filter(|_| self.traffic.asks);
                let delay = *self.net.between(host, Some(to)).delay.start();
                let arrival = Happening::PacketArrival {
                    to,
                    from,
                    spi: id.spi,
                    dst: target.ip(),
                };
                self.schedule(now + Duration::from_millis(delay), arrival);
            }
        }
        self.schedule(now + self.traffic.interval, Happening::Packets);
    }

    /// A packet with ESP has come to a host.
    pub(crate) fn packet_arrives(&mut self, to: usize, from: Option<SocketAddr>, id: SaId) {
        let Some(sa) = self.hosts[to].plane.inbound(id.spi, id.dst) else {
            self.traffic.refused += 1;
            let spi = id.spi;
            self.note(to, || format!("no SA for a packet with SPI {spi:08x}"));
            return;
        };
        self.traffic.arrived += 1;
        let known = sa.encap.map(|udp| SocketAddr::new(sa.src, udp.src_port));
        self.carry(to, id);
        if let (Some(from), Some(known)) = (from, known)
            && from != known
        {
            let (addr, port) = (from.ip(), from.port());
            self.plane_event(to, PlaneEvent::MappingChange { id, addr, port });
        }
    }

    /// Counts a packet, and tells the endpoint of limits that it reaches.
    fn carry(&mut self, host: usize, id: SaId) {
        let now = self.now.instant;
        self.hosts[host].plane.used.insert(id, now);
        for hard in self.hosts[host].plane.carry(id) {
            self.plane_event(host, PlaneEvent::Expire { id, hard });
        }
    }

    /// Packets for which there is a trap, and no SA.
    fn spring_traps(&mut self, host: usize) {
        let plane = &self.hosts[host].plane;
        let sprung: Vec<PlaneEvent> = plane
            .policies
            .values()
            .filter(|policy| policy.trap && plane.outbound(policy).is_none())
            .filter_map(acquire)
            .collect();
        for event in sprung {
            self.plane_event(host, event);
        }
    }
}

fn acquire(policy: &PolicySet) -> Option<PlaneEvent> {
    let PolicyAction::Protect { reqid, .. } = policy.action else {
        return None;
    };
    Some(PlaneEvent::Acquire {
        reqid,
        local: *policy.local.first()?,
        remote: *policy.remote.first()?,
    })
}
