// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Security associations: one direction of ESP each.

use swanherd_ipsec::plane::{Lifetime, SaEntry};

use crate::PROTO_NONE;
use crate::replay::ReplayWindow;
use crate::suite::{ESP_HEADER, Geometry, IvKey, Suite, UnsupportedSuite};

/// Without extended sequence numbers a rekey is asked for once this many packets are sent: seven
/// eighths of the number space.
const SEQUENCE_SOFT_LIMIT: u64 = 7 << 29;

/// A limit in octets or packets that an SA reached. Reported once each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// A rekey is due.
    Soft,
    /// The SA has ended; it processes nothing any more.
    Hard,
}

/// Why a payload cannot be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// All sequence numbers are used; sealing on would void replay protection and, with an AEAD,
    /// confidentiality (RFC 4303 section 3.3.3).
    #[error("the sequence numbers of the SA are used up")]
    SequenceExhausted,
    /// A hard limit in octets or packets was reached before.
    #[error("the SA has reached its hard limit")]
    Expired,
    /// The buffer cannot hold the sealed packet.
    #[error("the buffer is too small for the sealed packet")]
    BufferTooSmall,
}

/// Why a packet cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Too short, or not a whole number of blocks.
    #[error("the packet's length is impossible for this SA")]
    Malformed,
    /// Sequence number seen before, or left of the window.
    #[error("the sequence number was seen before or is too old")]
    Replayed,
    /// Authentication failed.
    #[error("the packet failed authentication")]
    Forged,
    /// Authentic, but the padding leaves no payload.
    #[error("the padding leaves nothing of the packet")]
    BadPadding,
    /// A hard limit in octets or packets was reached before.
    #[error("the SA has reached its hard limit")]
    Expired,
    /// A dummy packet, to be dropped in silence (RFC 4303 section 2.6).
    #[error("a dummy packet")]
    Dummy,
}

/// Where the payload of an opened packet lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Offset of the first octet.
    pub start: usize,
    /// Offset past the last octet.
    pub end: usize,
    /// IP protocol of the payload.
    pub next_header: u8,
    /// Full sequence number.
    pub seq: u64,
}

/// Octets and packets processed, against the limits.
#[derive(Clone, Debug)]
struct Usage {
    bytes: u64,
    packets: u64,
    limits: Lifetime,
    soft_reported: bool,
    hard_reported: bool,
    pending: Option<Expiry>,
}

impl Usage {
    fn new(limits: Lifetime) -> Self {
        Self {
            bytes: 0,
            packets: 0,
            limits,
            soft_reported: false,
            hard_reported: false,
            pending: None,
        }
    }

    /// Whether another packet may be processed, as the kernel reckons: limits are compared with
    /// what has been processed before.
    #[inline]
    fn admit(&mut self) -> bool {
        let reached = |bytes: Option<u64>, packets: Option<u64>| {
            bytes.is_some_and(|limit| self.bytes >= limit)
                || packets.is_some_and(|limit| self.packets >= limit)
        };
        if reached(self.limits.hard_bytes, self.limits.hard_packets) {
            if !self.hard_reported {
                self.hard_reported = true;
                self.pending = Some(Expiry::Hard);
            }
            return false;
        }
        if reached(self.limits.soft_bytes, self.limits.soft_packets) {
            self.soften();
        }
        true
    }

    fn soften(&mut self) {
        if self.claim_soft() {
            self.pending.get_or_insert(Expiry::Soft);
        }
    }

    /// Whether nobody has reported a soft expiry before.
    fn claim_soft(&mut self) -> bool {
        !std::mem::replace(&mut self.soft_reported, true)
    }

    #[inline]
    fn charge(&mut self, payload: usize) {
        self.bytes += payload as u64;
        self.packets += 1;
    }
}

/// An outbound SA.
pub struct OutboundSa {
    spi: u32,
    suite: Suite,
    geometry: Geometry,
    iv_key: IvKey,
    esn: bool,
    seq: u64,
    usage: Usage,
}

impl OutboundSa {
    /// Builds the SA from its entry. `iv_seed` is fresh randomness of which nothing else is made.
    ///
    /// # Errors
    /// If the algorithms or key lengths are not supported.
    pub fn new(entry: &SaEntry, iv_seed: &[u8; 16]) -> Result<Self, UnsupportedSuite> {
        let suite = Suite::new(&entry.keys)?;
        Ok(Self {
            spi: entry.spi,
            geometry: suite.geometry(),
            suite,
            iv_key: IvKey::new(iv_seed),
            esn: entry.esn,
            seq: 0,
            usage: Usage::new(entry.lifetime),
        })
    }

    /// The SPI.
    pub fn spi(&self) -> u32 {
        self.spi
    }

    /// Octets in front of the payload: ESP header and initialisation vector.
    #[inline]
    pub fn header_len(&self) -> usize {
        ESP_HEADER + self.geometry.iv
    }

    /// Size of the ESP packet that carries `payload` octets.
    #[inline]
    pub fn sealed_len(&self, payload: usize) -> usize {
        ESP_HEADER
            + self.geometry.iv
            + (payload + 2).next_multiple_of(self.geometry.align)
            + self.geometry.icv
    }

    /// Seals in place. The payload of `payload` octets lies at [`header_len`](Self::header_len) in
    /// `buffer`; what is around it is overwritten. Returns the size of the packet, which starts at
    /// the front of `buffer`.
    ///
    /// # Errors
    /// See [`SealError`]. No sequence number is used up then.
    #[inline]
    pub fn seal(
        &mut self,
        buffer: &mut [u8],
        payload: usize,
        next_header: u8,
    ) -> Result<usize, SealError> {
        if !self.usage.admit() {
            return Err(SealError::Expired);
        }
        let seq = self
            .seq
            .checked_add(1)
            .filter(|seq| self.esn || *seq <= u64::from(u32::MAX))
            .ok_or(SealError::SequenceExhausted)?;
        let sealed = self.sealed_len(payload);
        let packet = buffer.get_mut(..sealed).ok_or(SealError::BufferTooSmall)?;

        packet[..4].copy_from_slice(&self.spi.to_be_bytes());
        packet[4..8].copy_from_slice(&(seq as u32).to_be_bytes());
        let trailer = self.header_len() + payload;
        let end = sealed - self.geometry.icv;
        let padding = end - trailer - 2;
        for (index, octet) in packet[trailer..trailer + padding].iter_mut().enumerate() {
            *octet = index as u8 + 1;
        }
        packet[end - 2] = padding as u8;
        packet[end - 1] = next_header;

        self.suite.seal(packet, seq, self.esn, &self.iv_key);
        self.seq = seq;
        self.usage.charge(payload);
        if !self.esn && seq >= SEQUENCE_SOFT_LIMIT {
            self.usage.soften();
        }
        Ok(sealed)
    }

    /// The last sequence number used; 0 before the first packet.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Payload octets sealed.
    pub fn bytes(&self) -> u64 {
        self.usage.bytes
    }

    /// Packets sealed.
    pub fn packets(&self) -> u64 {
        self.usage.packets
    }

    /// A limit that was reached since the last call.
    #[inline]
    pub fn take_expiry(&mut self) -> Option<Expiry> {
        self.usage.pending.take()
    }

    /// To be called when a soft limit that the caller keeps, one in time, is reached. Whether it is
    /// to be reported: one soft expiry is all that an SA has, by whatever limit comes first.
    pub fn soften(&mut self) -> bool {
        self.usage.claim_soft()
    }

    /// Whether a soft limit was reached.
    #[inline]
    pub fn is_dying(&self) -> bool {
        self.usage.soft_reported
    }
}

/// An inbound SA.
pub struct InboundSa {
    spi: u32,
    suite: Suite,
    geometry: Geometry,
    esn: bool,
    window: ReplayWindow,
    usage: Usage,
    replay_drops: u64,
    integrity_drops: u64,
}

impl InboundSa {
    /// Builds the SA from its entry.
    ///
    /// # Errors
    /// If the algorithms or key lengths are not supported.
    pub fn new(entry: &SaEntry) -> Result<Self, UnsupportedSuite> {
        let suite = Suite::new(&entry.keys)?;
        Ok(Self {
            spi: entry.spi,
            geometry: suite.geometry(),
            suite,
            esn: entry.esn,
            window: ReplayWindow::new(entry.replay_window),
            usage: Usage::new(entry.lifetime),
            replay_drops: 0,
            integrity_drops: 0,
        })
    }

    /// The SPI.
    pub fn spi(&self) -> u32 {
        self.spi
    }

    /// Verifies and decrypts `packet`, an ESP packet from its SPI to its ICV, in place.
    ///
    /// # Errors
    /// See [`OpenError`]. The contents of `packet` are undefined then. As in Linux, only packets
    /// that are opened move the replay window and are counted; dummies and garbage do neither.
    #[inline]
    pub fn open(&mut self, packet: &mut [u8]) -> Result<Opened, OpenError> {
        let start = ESP_HEADER + self.geometry.iv;
        let body = packet
            .len()
            .checked_sub(start + self.geometry.icv)
            .ok_or(OpenError::Malformed)?;
        let low = packet[4..]
            .first_chunk()
            .map_or(0, |low| u32::from_be_bytes(*low));
        let seq = if self.esn {
            self.window.infer(low).ok_or(OpenError::Replayed)?
        } else {
            u64::from(low)
        };
        if self.window.size() > 0 {
            // Number 0 is never sent (RFC 4303 section 3.3.3); nor can it be a replay.
            if seq == 0 {
                return Err(OpenError::Malformed);
            }
            if !self.window.is_fresh(seq) {
                self.replay_drops += 1;
                return Err(OpenError::Replayed);
            }
        }
        if !self.usage.admit() {
            return Err(OpenError::Expired);
        }
        let whole = body >= 2 && body % self.geometry.align == 0;
        if !whole || self.suite.open(packet, seq, self.esn).is_err() {
            self.integrity_drops += 1;
            return Err(OpenError::Forged);
        }

        let trailer = start + body;
        let (padding, next_header) = (usize::from(packet[trailer - 2]), packet[trailer - 1]);
        let payload = (body - 2)
            .checked_sub(padding)
            .filter(|payload| *payload > 0)
            .ok_or(OpenError::BadPadding)?;
        if next_header == PROTO_NONE {
            return Err(OpenError::Dummy);
        }
        self.window.commit(seq);
        self.usage.charge(payload);
        Ok(Opened {
            start,
            end: start + payload,
            next_header,
            seq,
        })
    }

    /// Payload octets opened.
    pub fn bytes(&self) -> u64 {
        self.usage.bytes
    }

    /// Packets opened.
    pub fn packets(&self) -> u64 {
        self.usage.packets
    }

    /// Packets dropped as replays.
    pub fn replay_drops(&self) -> u64 {
        self.replay_drops
    }

    /// Packets dropped because authentication failed.
    pub fn integrity_drops(&self) -> u64 {
        self.integrity_drops
    }

    /// A limit that was reached since the last call.
    #[inline]
    pub fn take_expiry(&mut self) -> Option<Expiry> {
        self.usage.pending.take()
    }

    /// To be called when a soft limit that the caller keeps, one in time, is reached. Whether it is
    /// to be reported: one soft expiry is all that an SA has, by whatever limit comes first.
    pub fn soften(&mut self) -> bool {
        self.usage.claim_soft()
    }

    /// Whether a soft limit was reached.
    #[inline]
    pub fn is_dying(&self) -> bool {
        self.usage.soft_reported
    }
}

#[cfg(test)]
mod tests;
