// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From the peers to the TUN device: open, check, join, write.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use bytes::Bytes;
use swanherd_esp::{
    Flow, Fragments, OpenError, Opened, PROTO_IPV4, PROTO_IPV6, Protection, spi_of,
};
use swanherd_ipsec::plane::PlaneEvent;

use super::coalesce::{Coalescer, Sink};
use super::device::wait;
use super::shared::{DropReason, Shared};
use super::tables::Inbound;
use crate::udp::{NatTraversal, Received, ReceivedMeta, receive};

/// What one receive call may yield.
const BATCH: usize = 64 * 1024;
/// Datagrams of peers that send them one by one gather in here before they are joined.
const BUFFER: usize = 4 * BATCH;

/// The loop of the receiving thread. Ends when the plane shuts down.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut receiver = Receiver {
        shared: Arc::clone(shared),
        coalescer: Coalescer::new(shared.device.joins_udp()),
        opened: Vec::with_capacity(128),
        fragments: Fragments::default(),
        run_spi: None,
    };
    let mut buffer = vec![0; BUFFER];
    let mut legs = shared.socket.legs();
    // A negative descriptor is one that poll ignores.
    let fds = [
        legs.next().unwrap_or(-1),
        legs.next().unwrap_or(-1),
        shared.waker.fd(),
    ];
    let port = shared.socket.port();
    while !shared.is_stopping() {
        wait(fds, libc::POLLIN, -1);
        for fd in shared.socket.legs() {
            receiver.drain(fd, port, &mut buffer);
            if shared.is_stopping() {
                return;
            }
        }
        shared.reap();
    }
}

struct Receiver {
    shared: Arc<Shared>,
    coalescer: Coalescer,
    /// Payloads of the ESP packets opened last, scratch.
    opened: Vec<Range<usize>>,
    /// Ports of inner packets that come in fragments.
    fragments: Fragments,
    /// The SA that the coalescer's run came by.
    run_spi: Option<u32>,
}

impl Receiver {
    /// Handles what waits on one socket.
    fn drain(&mut self, fd: RawFd, port: u16, buffer: &mut [u8]) {
        let mut at = 0;
        while !self.shared.is_stopping() {
            match receive(fd, &mut buffer[at..at + BATCH], port) {
                Ok(meta) => {
                    self.handle(buffer, at, &meta);
                    at += meta.len;
                    if at + BATCH > buffer.len() {
                        self.flush(buffer);
                        at = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::debug!(%error, "receiving on the NAT-T port");
                    // One error must not keep a processor busy if it stays.
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    break;
                }
            }
        }
        self.flush(buffer);
    }

    fn flush(&mut self, buffer: &mut [u8]) {
        self.run_spi = None;
        self.coalescer.flush(
            buffer,
            &mut DeviceSink {
                shared: &self.shared,
            },
        );
    }

    /// Handles one batch, which lies at `at`.
    fn handle(&mut self, buffer: &mut [u8], at: usize, meta: &ReceivedMeta) {
        let shared = Arc::clone(&self.shared);
        let mut datagrams = Datagrams::new(at, meta);
        while let Some(range) = datagrams.next() {
            match NatTraversal::classify(&buffer[range.clone()]) {
                NatTraversal::Keepalive => {}
                NatTraversal::Malformed => shared.count(DropReason::Malformed, 1),
                NatTraversal::Ike(message) => shared.deliver_ike(Received {
                    local: meta.local,
                    remote: meta.remote,
                    payload: Bytes::copy_from_slice(message),
                }),
                NatTraversal::Esp(packet) => {
                    let spi = spi_of(packet).unwrap_or(0);
                    let sa = shared.tables().inbound(spi).map(Arc::clone);
                    match sa {
                        Some(sa) => {
                            let by = self.open_run(buffer, meta, &sa, spi, range, &mut datagrams);
                            self.pass_on(buffer, meta, &sa, spi, &by);
                        }
                        None => shared.count(DropReason::UnknownSpi, 1),
                    }
                }
            }
        }
    }

    /// Opens the packet at `range` and those after it that are of the same SA.
    fn open_run(
        &mut self,
        buffer: &mut [u8],
        meta: &ReceivedMeta,
        sa: &Inbound,
        spi: u32,
        mut range: Range<usize>,
        datagrams: &mut Datagrams,
    ) -> Protection {
        let shared = &self.shared;
        let mut state = sa.state();
        let protection = state.protection(sa.reqid);
        // An SA is named by SPI and destination.
        if meta.local.ip() != state.id.dst {
            shared.count(DropReason::UnknownSpi, 1);
            return protection;
        }
        let mut authentic = false;
        let mut used = false;
        loop {
            let start = range.start;
            match state.sa.open(&mut buffer[range]) {
                Ok(opened) => {
                    authentic = true;
                    used = true;
                    match opened.next_header {
                        PROTO_IPV4 | PROTO_IPV6 => self.opened.push(place(&opened, start)),
                        _ => shared.count(DropReason::Malformed, 1),
                    }
                }
                Err(OpenError::Dummy) => authentic = true,
                Err(OpenError::Replayed) => shared.count(DropReason::Replayed, 1),
                Err(OpenError::Forged) => shared.count(DropReason::Forged, 1),
                Err(OpenError::Expired) => shared.count(DropReason::Expired, 1),
                Err(OpenError::Malformed | OpenError::BadPadding) => {
                    shared.count(DropReason::Malformed, 1);
                }
            }
            match datagrams.peek() {
                Some(next) if spi_of(&buffer[next.clone()]) == Some(spi) && next.len() > 8 => {
                    range = next;
                    datagrams.advance();
                }
                _ => break,
            }
        }
        if used {
            state.last_used = shared.now();
        }
        if authentic {
            let unexpected = meta.remote != state.peer && state.reported != Some(meta.remote);
            if unexpected && report_mapping(shared, &state.id, meta.remote) {
                state.reported = Some(meta.remote);
            }
        }
        if let Some(expiry) = state.sa.take_expiry() {
            shared.expired(state.id, expiry);
        }
        protection
    }

    /// Checks what was opened against policy and hands it to the device.
    fn pass_on(
        &mut self,
        buffer: &mut [u8],
        meta: &ReceivedMeta,
        sa: &Inbound,
        spi: u32,
        by: &Protection,
    ) {
        if self.run_spi != Some(spi) {
            // No run across SAs: a packet that continues one is not checked again, so all of it
            // must have come by the same SA.
            self.flush(buffer);
            self.run_spi = Some(spi);
        }
        let shared = &self.shared;
        let tables = shared.tables();
        let mut sink = DeviceSink { shared };
        for range in self.opened.drain(..) {
            sa.class
                .apply_to_inner(&mut buffer[range.clone()], meta.tos);
            let fragments = &mut self.fragments;
            let admitted = self.coalescer.push(buffer, range, &mut sink, |packet| {
                Flow::of(packet).is_some_and(|flow| {
                    let flow = fragments.complete(packet, flow);
                    tables.spd.admits_inbound(by, &flow)
                })
            });
            if !admitted {
                shared.count(DropReason::NoPolicy, 1);
            }
        }
    }
}

fn place(opened: &Opened, start: usize) -> Range<usize> {
    start + opened.start..start + opened.end
}

fn report_mapping(shared: &Shared, id: &swanherd_ipsec::plane::SaId, from: SocketAddr) -> bool {
    shared.report(PlaneEvent::MappingChange {
        id: *id,
        addr: from.ip(),
        port: from.port(),
    })
}

/// The datagrams of one received batch, as ranges.
struct Datagrams {
    at: usize,
    end: usize,
    segment: usize,
}

impl Datagrams {
    fn new(at: usize, meta: &ReceivedMeta) -> Self {
        Self {
            at,
            end: at + meta.len,
            segment: meta.segment.max(1),
        }
    }

    fn peek(&self) -> Option<Range<usize>> {
        (self.at < self.end).then(|| self.at..self.end.min(self.at + self.segment))
    }

    fn advance(&mut self) {
        self.at += self.segment;
    }

    fn next(&mut self) -> Option<Range<usize>> {
        let range = self.peek()?;
        self.advance();
        Some(range)
    }
}

struct DeviceSink<'a> {
    shared: &'a Shared,
}

impl Sink for DeviceSink<'_> {
    fn write(&mut self, parts: &[IoSlice<'_>]) {
        if self.shared.device.write(0, parts).is_err() {
            self.shared.count(DropReason::DeviceRefused, 1);
        }
    }
}
