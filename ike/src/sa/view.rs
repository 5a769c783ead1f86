// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an IKE SA is like, for tests that explore states and have to know when two are alike.
//!
//! Names that differ from path to path (SPIs, ids, nonces, moments) are marked as such, so that
//! the reader can put others in their place. What cannot influence what happens next is left out.

use std::time::Instant;

use swanherd_ipsec::proposal::IkeSuite;

use super::answer_child::Answering;
use super::child_offer::ChildPayloads;
use super::create_child::{self, Creating};
use super::install::Installing;
use super::protect::Protection;
use super::rekey::{self, Rekeying};
use super::standby::Sign;
use super::{Active, ChildSa, IkeSa, Passive, Task};
use crate::api::{ChildSaId, IkeSaId};
use crate::crypto::IkeKeys;
use crate::record::tape::Tape;
use crate::wire::{Payload, SkPayload};

/// A piece of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Piece {
    /// Means what it says.
    Word(u64),
    /// SPI of an ESP SA; 0 is none.
    Esp(u32),
    /// SPI of an IKE SA; 0 is none.
    Spi(u64),
    /// Id of an IKE SA at this host.
    Sa(IkeSaId),
    /// Id of a CHILD SA at this host.
    Child(ChildSaId),
    /// A nonce, as far as it matters for comparisons.
    Nonce(u64),
    /// A moment.
    At(Instant),
}

/// A list of pieces that is being written.
#[derive(Clone, Debug, Default)]
pub(crate) struct View(pub(crate) Vec<Piece>);

impl View {
    /// Adds a number.
    pub(crate) fn word(&mut self, word: impl Into<u64>) {
        self.0.push(Piece::Word(word.into()));
    }

    /// Adds a number.
    pub(crate) fn count(&mut self, count: usize) {
        self.word(count as u64);
    }

    /// Adds a text.
    pub(crate) fn text(&mut self, text: &str) {
        // FNV-1a: equal texts on equal paths are all that is asked for.
        let hash = text
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, octet| {
                (hash ^ u64::from(octet)).wrapping_mul(0x0100_0000_01b3)
            });
        self.word(hash);
    }

    /// Adds the SPI of an ESP SA.
    pub(crate) fn esp(&mut self, spi: u32) {
        self.0.push(Piece::Esp(spi));
    }

    /// Adds the SPI of an IKE SA.
    pub(crate) fn spi(&mut self, spi: u64) {
        self.0.push(Piece::Spi(spi));
    }

    /// Adds a nonce.
    pub(crate) fn nonce(&mut self, nonce: &[u8]) {
        let lead = nonce.first_chunk::<8>().copied().unwrap_or_default();
        self.0.push(Piece::Nonce(u64::from_be_bytes(lead)));
    }

    fn sa(&mut self, id: Option<IkeSaId>) {
        self.0.push(Piece::Sa(id.unwrap_or(0)));
    }

    /// Adds a CHILD SA's id.
    pub(crate) fn child(&mut self, id: Option<ChildSaId>) {
        self.0.push(Piece::Child(id.unwrap_or(0)));
    }

    /// Adds a moment, if there is one.
    pub(crate) fn at(&mut self, at: Option<Instant>) {
        match at {
            Some(at) => self.0.push(Piece::At(at)),
            None => self.word(0_u8),
        }
    }
}

/// The payloads of a message that was sent by the side with these keys.
pub(crate) fn open_as_peer(
    suite: &IkeSuite,
    keys: &IkeKeys,
    initiator: bool,
    raw: &[u8],
    sk: &SkPayload,
) -> Option<Vec<Payload>> {
    let peer = Protection::new(suite, keys, !initiator).ok()?;
    peer.open(raw, sk, &Tape::default()).ok()
}

impl IkeSa {
    /// Everything that decides what this IKE SA does next.
    pub(crate) fn view(&self, out: &mut View) {
        out.sa(Some(self.id));
        out.spi(self.spi_i);
        out.spi(self.spi_r);
        out.word(self.state as u8);
        for flag in [
            self.initiator,
            self.redundant,
            self.dead,
            self.announced,
            self.retry_of.is_some(),
            self.replaced,
            self.restores,
            self.first_child.is_some(),
        ] {
            out.word(flag);
        }
        out.sa(self.successor);
        out.sa(self.supersedes);
        out.word(self.tries);
        out.count(self.reborn.len());
        // The id of the next request is compared with what the peer expects by the reader.
        out.word(self.outbound.in_flight.is_some());
        if let Some(flight) = &self.outbound.in_flight {
            out.word(u8::from(flight.exchange));
            out.word(flight.tries);
        }
        out.word(self.inbound.processing.is_some());
        out.at(self.inbound.unsettled);
        out.at(self.patience);
        self.view_active(out);
        self.view_passive(out);
        match &self.rekey_twin {
            None => out.word(0_u8),
            Some(twin) => {
                out.nonce(&twin.nonce);
                twin.sa.view(out);
            }
        }
        out.count(self.queue.len());
        for task in &self.queue {
            view_task(task, out);
        }
        out.count(self.delayed.len());
        for (at, task) in &self.delayed {
            out.at(Some(*at));
            view_task(task, out);
        }
        for timer in self.timers.all() {
            out.at(timer);
        }
        out.count(self.children.len());
        for child in self.children.values() {
            child.view(out);
        }
    }

    fn view_active(&self, out: &mut View) {
        match &self.active {
            Active::Idle => out.word(0_u8),
            Active::Initiating(_) => out.word(1_u8),
            Active::CreatingChild(creating) => match &**creating {
                Creating::Preparation {
                    negotiation,
                    spi,
                    value,
                    pair,
                } => {
                    out.word(2_u8);
                    negotiation.view(out);
                    out.word(spi.is_some());
                    out.word(value.is_some());
                    out.word(pair.is_some());
                }
                Creating::Response { negotiation, pair } => {
                    out.word(3_u8);
                    negotiation.view(out);
                    out.word(pair.is_some());
                }
                Creating::SharedSecret {
                    negotiation,
                    nonce_r,
                    ..
                } => {
                    out.word(4_u8);
                    negotiation.view(out);
                    out.nonce(nonce_r);
                }
                Creating::Installation {
                    installing,
                    negotiation,
                    nonce_r,
                } => {
                    out.word(5_u8);
                    installing.view(out);
                    negotiation.view(out);
                    out.nonce(nonce_r);
                }
                Creating::Rival {
                    negotiation,
                    nonce_r,
                } => {
                    out.word(6_u8);
                    negotiation.view(out);
                    out.nonce(nonce_r);
                }
            },
            Active::Rekeying(rekeying) => match &**rekeying {
                Rekeying::PrivateValue { negotiation, .. } => {
                    out.word(7_u8);
                    negotiation.view(out);
                }
                Rekeying::Response { negotiation, .. } => {
                    out.word(8_u8);
                    negotiation.view(out);
                }
                Rekeying::SharedSecret {
                    negotiation,
                    spi_r,
                    nonce_r,
                    ..
                } => {
                    out.word(9_u8);
                    negotiation.view(out);
                    out.spi(*spi_r);
                    out.nonce(nonce_r);
                }
                Rekeying::Rival {
                    negotiation,
                    new,
                    nonce_r,
                } => {
                    out.word(10_u8);
                    negotiation.view(out);
                    new.view(out);
                    out.nonce(nonce_r);
                }
            },
            Active::DeletingChild(id) => {
                out.word(11_u8);
                out.child(Some(*id));
            }
            Active::DeletingIke => out.word(12_u8),
            other => out.text(&format!("{other:?}")),
        }
    }

    fn view_passive(&self, out: &mut View) {
        match &self.passive {
            Passive::Idle => out.word(0_u8),
            Passive::Responding(_) => out.word(1_u8),
            Passive::CreatingChild(answering) => {
                let draft = answering.draft();
                match &**answering {
                    Answering::Preparation(_) => out.word(2_u8),
                    Answering::Installation { installing, .. } => {
                        out.word(3_u8);
                        installing.view(out);
                    }
                }
                out.child(Some(draft.child));
                out.child(draft.rekeys);
                out.word(draft.spi.is_some());
                out.word(draft.secret.is_some());
                out.word(draft.exchanged.is_some());
                out.nonce(&draft.nonce_i);
                out.nonce(&draft.nonce_r);
            }
            Passive::Rekeying(answering) => {
                out.word(4_u8);
                out.spi(answering.spi_i);
                out.spi(answering.spi_r);
                out.nonce(&answering.nonce_i);
                out.nonce(&answering.nonce_r);
            }
            Passive::Postponed(payloads) => {
                out.word(6_u8);
                out.esp(ChildPayloads::of(payloads).rekeys.unwrap_or_default());
            }
            Passive::Leaving(waiting) => {
                out.word(5_u8);
                out.count(waiting.len());
            }
        }
    }
}

impl create_child::Negotiation {
    fn view(&self, out: &mut View) {
        out.child(Some(self.child));
        out.child(self.rekeys);
        out.word(self.method.map_or(0, u16::from));
        out.word(self.restarts);
        out.nonce(&self.nonce);
        match &self.collision {
            None => out.word(0_u8),
            Some((theirs, nonce)) => {
                out.child(Some(*theirs));
                out.nonce(nonce);
            }
        }
        out.count(self.doomed.len());
        for spi in &self.doomed {
            out.esp(*spi);
        }
    }
}

impl rekey::Negotiation {
    fn view(&self, out: &mut View) {
        out.spi(self.spi);
        out.nonce(&self.nonce);
        out.word(u16::from(self.method));
        out.word(self.restarts);
    }
}

impl Installing {
    fn view(&self, out: &mut View) {
        out.child(Some(self.child));
        out.count(self.waiting.len());
    }
}

impl ChildSa {
    fn view(&self, out: &mut View) {
        out.child(Some(self.id));
        out.count(self.index);
        out.word(self.state as u8);
        out.word(self.group.reqid);
        out.esp(self.spi_in);
        out.esp(self.spi_out);
        for flag in [
            self.installed.is_some(),
            self.pending_out.is_some(),
            self.redundant,
            self.out_installed,
            self.expired,
            self.taken_down,
            self.refused,
            self.use_on == Sign::Request,
            self.announced,
            self.offer_configured,
        ] {
            out.word(flag);
        }
        for at in [
            self.rekey_at,
            self.expires_at,
            self.check_at,
            self.use_at,
            self.remove_at,
            self.retry_at,
        ] {
            out.at(at);
        }
        out.child(self.replaces);
        out.child(self.replaced_by);
        out.child(self.untold);
    }
}

fn view_task(task: &Task, out: &mut View) {
    out.text(task.name());
    match task {
        Task::CreateChild { index, packet, .. } => {
            out.count(*index);
            out.word(packet.is_some());
        }
        Task::RekeyChild(id) => out.child(Some(*id)),
        Task::DeleteChild(id) => {
            out.word(1_u8);
            out.child(Some(*id));
        }
        Task::DeleteSpi(spi) => {
            out.word(2_u8);
            out.esp(*spi);
        }
        _ => {}
    }
}
