// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When two states are alike: what is arbitrary in them (SPIs, ids, nonces, message ids, moments)
//! is replaced by what matters of it (which are equal, which is lower, which comes first).

use std::collections::BTreeMap;
use std::time::Instant;

use swanherd_ipsec::plane::Direction;

use super::plane::bound_to;
use super::world::{ALICE, BOB, Packet, World};
use crate::crypto::hash::sha1;
use crate::sa::view::{Piece, View};

/// States with the same key are taken for one.
pub(super) type Key = [u8; 20];

/// Names in order of their first appearance.
#[derive(Default)]
struct Names(BTreeMap<(u8, u64), u64>);

impl Names {
    fn of(&mut self, kind: u8, name: u64) -> u64 {
        let next = self.0.len() as u64 + 1;
        *self.0.entry((kind, name)).or_insert(next)
    }
}

impl World {
    /// What the future of this state depends on.
    pub(super) fn key(&self) -> Key {
        let mut view = View::default();
        let mut ends = Vec::new();
        for host in [ALICE, BOB] {
            self.view_host(host, &mut view);
            ends.push(view.0.len());
        }
        for done in &self.done {
            view.word(*done);
        }
        view.word(self.left.lost);
        view.word(self.left.doubled);
        view.word(self.left.early);
        for to in [ALICE, BOB] {
            view.count(self.wire[to].len());
            // Their order does not matter, as any of them may arrive first.
            let mut packets: Vec<View> = self.wire[to]
                .iter()
                .map(|packet| {
                    let mut view = View::default();
                    self.view_packet(to, packet, &mut view);
                    view
                })
                .collect();
            packets.sort_by_cached_key(blank);
            for packet in packets {
                view.count(packet.0.len());
                view.0.extend(packet.0);
            }
        }
        let ends = (ends[ALICE], ends[BOB]);
        self.hashed(&view, ends)
    }

    fn hashed(&self, view: &View, ends: (usize, usize)) -> Key {
        let mut moments: Vec<Instant> = vec![self.now.instant];
        let mut nonces = Vec::new();
        for piece in &view.0 {
            match piece {
                Piece::At(at) => moments.push(*at),
                Piece::Nonce(nonce) => nonces.push(*nonce),
                _ => {}
            }
        }
        moments.sort_unstable();
        moments.dedup();
        nonces.sort_unstable();
        nonces.dedup();
        let mut names = Names::default();
        let mut octets = Vec::with_capacity(view.0.len() * 3);
        for (n, piece) in view.0.iter().enumerate() {
            // Ids of IKE SAs and children are each host's own.
            let host = u8::from(n >= ends.0);
            let (kind, value) = match *piece {
                Piece::Word(word) => (0, word),
                Piece::Esp(0) | Piece::Spi(0) | Piece::Sa(0) | Piece::Child(0) => (1, 0),
                Piece::Esp(spi) => (2, names.of(2, u64::from(spi))),
                Piece::Spi(spi) => (3, names.of(3, spi)),
                Piece::Sa(id) => (4, names.of(4 + host, u64::from(id))),
                Piece::Child(id) => (6, names.of(6 + host, u64::from(id))),
                Piece::Nonce(nonce) => (8, nonces.partition_point(|other| *other < nonce) as u64),
                Piece::At(at) => (9, moments.partition_point(|other| *other < at) as u64),
            };
            octets.push(kind);
            match u8::try_from(value) {
                Ok(small) if small < u8::MAX => octets.push(small),
                _ => {
                    octets.push(u8::MAX);
                    octets.extend_from_slice(&value.to_le_bytes());
                }
            }
        }
        sha1(&octets)
    }

    fn view_host(&self, host: usize, view: &mut View) {
        let state = &self.hosts[host];
        let endpoint = &state.endpoint;
        view.count(endpoint.sas.len());
        for sa in endpoint.sas.values() {
            sa.view(view);
            self.view_ids(host, sa, view);
        }
        endpoint.keep.view(view);
        view.at(endpoint.twins.next());
        view.at(endpoint.traps.next());
        for waiter in endpoint.waiters.values() {
            view.text(&format!("{waiter:?}"));
        }
        view.count(endpoint.settling.len());
        view.count(state.ops.len());
        for (_, op) in &state.ops {
            view_op(op, view);
        }
        view.count(state.jobs.len());
        for (_, job) in &state.jobs {
            view.text(&format!("{job:?}"));
        }
        for ended in state.commands.values() {
            view.word(*ended);
        }
        view.word(state.told.0);
        view.word(state.told.1);
        view.word(state.outages);
        view.word(state.gave_up);
        let plane = &state.plane;
        view.count(plane.reserved.len());
        for id in &plane.reserved {
            view.esp(id.spi);
        }
        view.count(plane.sas.len());
        for (id, (_, entry)) in &plane.sas {
            view.esp(id.spi);
            view.word(entry.direction == Direction::Out);
        }
        view.count(plane.policies.len());
        for set in plane.policies.values() {
            view.esp(bound_to(set).map_or(0, |id| id.spi));
        }
        for (kind, left) in &plane.failing {
            view.word(*kind as u8);
            view.word(*left);
        }
    }

    /// What is asked next, and what was answered last, as far as the peer can still ask for it.
    fn view_ids(&self, host: usize, sa: &crate::sa::IkeSa, view: &mut View) {
        let spis = (sa.spi_i, sa.spi_r);
        let peer = &self.hosts[1 - host].endpoint;
        let other = peer
            .sas
            .values()
            .find(|other| (other.spi_i, other.spi_r) == spis);
        let ahead = other.map_or(0, |other| {
            sa.outbound.next_id.wrapping_sub(other.inbound.expected_id)
        });
        view.word(ahead);
        let last = sa.inbound.expected_id.wrapping_sub(1);
        let awaited = other
            .and_then(|other| other.outbound.in_flight.as_ref())
            .is_some_and(|flight| flight.message_id == last);
        let on_its_way = self.wire[host].iter().any(|packet| {
            let header = &packet.header;
            (header.spi_i, header.spi_r) == spis
                && header.message_id == last
                && !header.flags.response
        });
        if !(awaited || on_its_way) {
            return;
        }
        if let Some(answer) = self.hosts[host].answered.get(&spis) {
            view.word(1_u8);
            view.0.extend_from_slice(&answer.content.0);
        }
    }

    fn view_packet(&self, to: usize, packet: &Packet, view: &mut View) {
        let header = &packet.header;
        view.spi(header.spi_i);
        view.spi(header.spi_r);
        view.word(u8::from(header.exchange));
        view.word(header.flags.response);
        view.word(header.flags.initiator);
        let receiver = self.hosts[to]
            .endpoint
            .sas
            .values()
            .find(|sa| (sa.spi_i, sa.spi_r) == (header.spi_i, header.spi_r));
        // Only its distance from what is awaited matters.
        let awaited = match receiver {
            None => 0,
            Some(sa) if header.flags.response => sa.outbound.next_id,
            Some(sa) => sa.inbound.expected_id,
        };
        view.word(if receiver.is_some() {
            header.message_id.wrapping_sub(awaited)
        } else {
            0
        });
        view.0.extend_from_slice(&packet.content.0);
    }
}

/// A view without names, for sorting.
fn blank(view: &View) -> Vec<Piece> {
    let piece = |piece: &Piece| match piece {
        Piece::Word(word) => Piece::Word(*word),
        Piece::Esp(_) => Piece::Esp(1),
        Piece::Spi(_) => Piece::Spi(1),
        Piece::Sa(_) => Piece::Sa(1),
        Piece::Child(_) => Piece::Child(1),
        Piece::Nonce(_) => Piece::Nonce(1),
        Piece::At(at) => Piece::At(*at),
    };
    view.0.iter().map(piece).collect()
}

fn view_op(op: &swanherd_ipsec::plane::Op, view: &mut View) {
    use swanherd_ipsec::plane::Op;
    match op {
        Op::AllocSpi { .. } => view.word(1_u8),
        Op::InstallSa(entry) => {
            view.word(2_u8);
            view.esp(entry.spi);
        }
        Op::RemoveSa(id) => {
            view.word(3_u8);
            view.esp(id.spi);
        }
        Op::InstallPolicies(set) => {
            view.word(4_u8);
            view.esp(bound_to(set).map_or(0, |id| id.spi));
        }
        Op::RemovePolicies(_) => view.word(5_u8),
        other => view.text(&format!("{other:?}")),
    }
}
