// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From the TUN device to the peers: segment, seal, send in batches.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;
use std::{io, ops::Range};

use swanherd_esp::{Expiry, Flow, PROTO_IPV4, PROTO_IPV6, SealError};
use swanherd_ipsec::plane::PolicyAction;

use super::clear::{Clear, Loops};
use super::device::wait;
use super::segment::Superpacket;
use super::shared::{DropReason, Shared};
use super::tables::{Outbound, Template};
use super::vnet::{VNET_LEN, Vnet};
use crate::udp::{SendGroup, send_group};

/// Room for two superpackets with what ESP adds.
const BATCH: usize = 160 * 1024;
/// A batch this full is sent without looking for more packets.
const BATCH_HIGH: usize = 48 * 1024;
/// Limits of one UDP segmentation offload call: datagrams, and octets with IP and UDP headers.
const GROUP_SEGMENTS: usize = 64;
const GROUP_OCTETS: usize = 65_400;
/// How long a full send buffer may hold up the thread before packets are dropped.
const SEND_PATIENCE_MS: i32 = 50;

/// The loop of one thread. Ends when the plane shuts down.
pub(super) fn run(shared: &Arc<Shared>, queue: usize) {
    let mut transmitter = Transmitter {
        shared: Arc::clone(shared),
        batch: Batch::new(),
        loops: Loops::new(Instant::now()),
    };
    let mut buffer = vec![0; VNET_LEN + usize::from(u16::MAX) + 1];
    let renewal = shared.device.renewal(queue);
    while !shared.is_stopping() {
        wait(
            [shared.device.fd(queue), renewal.fd(), shared.waker.fd()],
            libc::POLLIN,
            -1,
        );
        let mut woken_by_packet = false;
        loop {
            match shared.device.read(queue, &mut buffer) {
                Ok(len) => {
                    woken_by_packet = true;
                    transmitter.handle(&buffer[..len]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    // Somebody deleted the device; polls return at once until there is a new one.
                    shared.device_failed(&error);
                    break;
                }
            }
            if shared.is_stopping() {
                return;
            }
        }
        if !woken_by_packet {
            renewal.silence();
        }
        transmitter.flush();
        shared.reap();
    }
}

struct Transmitter {
    shared: Arc<Shared>,
    batch: Batch,
    loops: Loops,
}

impl Transmitter {
    fn handle(&mut self, frame: &[u8]) {
        let shared = Arc::clone(&self.shared);
        let Some((header, packet)) = frame.split_first_chunk::<VNET_LEN>() else {
            return;
        };
        let parsed = Vnet::parse(header).and_then(|vnet| {
            let flow = shared.flow_of(packet)?;
            Some((Superpacket::new(&vnet, packet)?, flow))
        });
        let Some((superpacket, flow)) = parsed else {
            shared.count(DropReason::Malformed, 1);
            return;
        };
        match shared.route(&flow) {
            Way::Protected(sa) => self.seal(&shared, &sa, &superpacket, packet),
            Way::Clear => self.pass(&shared, &superpacket, &flow),
            Way::Nowhere => {}
        }
        if self.batch.used >= BATCH_HIGH {
            self.batch.send(&shared);
        }
    }

    fn seal(
        &mut self,
        shared: &Shared,
        sa: &Outbound,
        superpacket: &Superpacket<'_>,
        packet: &[u8],
    ) {
        let next_header = if packet[0] >> 4 == 4 {
            PROTO_IPV4
        } else {
            PROTO_IPV6
        };
        let tos = sa.class.outer(packet);
        let now = shared.now();
        let mut state = sa.state();
        let to = Target {
            local: state.local,
            peer: state.peer,
            tos,
        };
        let header_len = state.sa.header_len();
        for index in 0..superpacket.segments() {
            let inner = superpacket.segment_len(index);
            let sealed = state.sa.sealed_len(inner);
            if self.batch.used + sealed > self.batch.octets.len() {
                self.batch.send(shared);
            }
            let used = self.batch.used;
            let Some(room) = self.batch.octets.get_mut(used..used + sealed) else {
                shared.count(DropReason::Malformed, 1);
                return;
            };
            superpacket.write_segment(index, &mut room[header_len..header_len + inner]);
            match state.sa.seal(room, inner, next_header) {
                Ok(len) => {
                    state.last_used = now;
                    self.batch.push(to, len);
                }
                Err(SealError::Expired | SealError::SequenceExhausted) => {
                    shared.count(DropReason::Expired, (superpacket.segments() - index) as u64);
                    break;
                }
                Err(SealError::BufferTooSmall) => {
                    shared.count(DropReason::Malformed, 1);
                    break;
                }
            }
        }
        if let Some(expiry) = state.sa.take_expiry() {
            if expiry == Expiry::Soft {
                sa.set_dying();
            }
            shared.expired(state.id, expiry);
        }
    }

    /// Sends a packet past the tunnels.
    fn pass(&mut self, shared: &Shared, superpacket: &Superpacket<'_>, flow: &Flow) {
        // Behind the batch there is always room for a packet.
        if self.batch.used + usize::from(u16::MAX) > self.batch.octets.len() {
            self.batch.send(shared);
        }
        let room = &mut self.batch.octets[self.batch.used..];
        for index in 0..superpacket.segments() {
            let Some(packet) = room.get_mut(..superpacket.segment_len(index)) else {
                shared.count(DropReason::Malformed, 1);
                return;
            };
            superpacket.write_segment(index, packet);
            if self.loops.has(packet, Instant::now()) {
                shared.count(DropReason::Looped, 1);
                return;
            }
            if let Err(error) = shared.clear.send(flow.dst, packet) {
                tracing::debug!(%error, dst = %flow.dst, "a packet in clear is not sent");
                shared.count(DropReason::SendFailed, 1);
            }
        }
    }

    fn flush(&mut self) {
        self.batch.send(&self.shared);
    }
}

/// How a packet leaves.
enum Way {
    Protected(Arc<Outbound>),
    Clear,
    Nowhere,
}

impl Shared {
    /// How a packet leaves. What has no SA is counted, and may raise an acquire.
    fn route(&self, flow: &Flow) -> Way {
        let tables = self.tables();
        let action = tables.spd.lookup(flow).map(|verdict| verdict.action);
        match action {
            Some(PolicyAction::Protect {
                remote, reqid, spi, ..
            }) => {
                let template = Template { reqid, remote };
                let sa = tables.outbound(&template, spi).map(Arc::clone);
                drop(tables);
                sa.map_or_else(
                    || {
                        self.count(DropReason::NoSa, 1);
                        self.acquire(template, flow);
                        Way::Nowhere
                    },
                    Way::Protected,
                )
            }
            Some(PolicyAction::Discard) => {
                self.count(DropReason::Shunted, 1);
                Way::Nowhere
            }
            Some(PolicyAction::Bypass) | None if Clear::may_pass(flow) => Way::Clear,
            Some(PolicyAction::Bypass) | None => {
                self.count(DropReason::NoPolicy, 1);
                Way::Nowhere
            }
        }
    }
}

/// Where a sealed packet goes. Packets share a system call only if all of this is equal.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Target {
    local: IpAddr,
    peer: SocketAddr,
    tos: u8,
}

struct Group {
    to: Target,
    octets: Range<usize>,
    segment: usize,
    count: usize,
}

/// Sealed packets that wait to be sent, back to back.
struct Batch {
    octets: Box<[u8]>,
    used: usize,
    groups: Vec<Group>,
}

impl Batch {
    fn new() -> Self {
        Self {
            octets: vec![0; BATCH].into_boxed_slice(),
            used: 0,
            groups: Vec::with_capacity(64),
        }
    }

    /// Takes up the packet of `len` octets that was written at `used`.
    fn push(&mut self, to: Target, len: usize) {
        let start = self.used;
        self.used += len;
        if let Some(last) = self.groups.last_mut() {
            let short = last.octets.len() % last.segment != 0;
            if last.to == to
                && !short
                && len <= last.segment
                && last.count < GROUP_SEGMENTS
                && last.octets.len() + len <= GROUP_OCTETS
            {
                last.octets.end += len;
                last.count += 1;
                return;
            }
        }
        self.groups.push(Group {
            to,
            octets: start..self.used,
            segment: len,
            count: 1,
        });
    }

    fn send(&mut self, shared: &Shared) {
        for group in &self.groups {
            let data = &self.octets[group.octets.clone()];
            let outcome = shared
                .socket
                .fd_for(group.to.peer.ip())
                .and_then(|fd| send_patiently(fd, &group.to, data, group.segment));
            if outcome.is_err() {
                shared.count(DropReason::SendFailed, group.count as u64);
            }
        }
        self.groups.clear();
        self.used = 0;
    }
}

/// Sends a group; where segmentation offload is impossible (no such offload, or the path's MTU is
/// below the segment), packet by packet.
fn send_patiently(fd: i32, to: &Target, data: &[u8], segment: usize) -> io::Result<()> {
    let group = SendGroup {
        local: Some(to.local),
        remote: to.peer,
        data,
        segment,
        tos: to.tos,
    };
    let error = loop {
        match send_group(fd, &group) {
            Ok(()) => return Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => {
                    let began = Instant::now();
                    wait([fd], libc::POLLOUT, SEND_PATIENCE_MS);
                    if began.elapsed().as_millis() >= SEND_PATIENCE_MS as u128 {
                        return Err(error);
                    }
                }
                _ => break error,
            },
        }
    };
    let splittable = matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EMSGSIZE | libc::EIO | libc::EOPNOTSUPP)
    );
    if data.len() <= segment || !splittable {
        return Err(error);
    }
    let mut outcome = Ok(());
    for packet in data.chunks(segment) {
        if let Err(error) = send_patiently(fd, to, packet, packet.len()) {
            outcome = Err(error);
        }
    }
    outcome
}
