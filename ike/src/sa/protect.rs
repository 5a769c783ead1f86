// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Protected messages: sealing, opening, fragments (RFC 7296 section 3.14, RFC 7383).

use std::collections::BTreeMap;

use swanherd_ipsec::proposal::IkeSuite;

use crate::crypto::{CryptoError, IkeKeys, Opener, Rng, Sealer};
use crate::record::tape::Tape;
use crate::wire::{
    HEADER_LEN, Header, Message, Payload, PayloadType, SkPayload, SkfPayload, WireError,
    emit_payloads, parse_payloads,
};

/// Generic payload header, and for SKF the fragment numbers.
const SK_OVERHEAD: usize = HEADER_LEN + 4;
const SKF_OVERHEAD: usize = SK_OVERHEAD + 4;
/// Fragments that a message may have. More than `max_packet` at the smallest sensible size.
const MAX_FRAGMENTS: u16 = 255;

/// Why a message could not be protected or opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtectError {
    #[error(transparent)]
    Crypto(#[from] CryptoError),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Keys of both directions.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Protection {
    sealer: Sealer,
    opener: Opener,
}

impl Protection {
    /// For the original initiator, or the responder.
    pub(crate) fn new(
        suite: &IkeSuite,
        keys: &IkeKeys,
        initiator: bool,
    ) -> Result<Self, CryptoError> {
        let towards_responder = (&keys.ei, &keys.ai);
        let towards_initiator = (&keys.er, &keys.ar);
        let (out, inward) = if initiator {
            (towards_responder, towards_initiator)
        } else {
            (towards_initiator, towards_responder)
        };
        Ok(Self {
            sealer: Sealer::new(suite, out.0, out.1)?,
            opener: Opener::new(suite, inward.0, inward.1)?,
        })
    }

    /// The datagrams of a message. With `max_len`, one that would be longer goes in fragments of
    /// at most that many octets.
    pub(crate) fn seal(
        &mut self,
        header: &Header,
        payloads: &[Payload],
        max_len: Option<usize>,
        rng: &mut Rng,
    ) -> Result<Vec<Vec<u8>>, ProtectError> {
        let mut plain = Vec::new();
        let first = emit_payloads(payloads, PayloadType::None, &mut plain)?;
        let whole = SK_OVERHEAD + self.sealer.sealed_len(plain.len());
        let Some(max_len) = max_len.filter(|max| whole > *max) else {
            return Ok(vec![self.seal_one(header, plain, rng, |body| {
                Payload::Sk(SkPayload { first, body })
            })?]);
        };
        let room = self
            .sealer
            .max_plaintext_len(max_len.saturating_sub(SKF_OVERHEAD))
            .max(1);
        let total = u16::try_from(plain.len().div_ceil(room))
            .ok()
            .filter(|total| *total <= MAX_FRAGMENTS)
            .ok_or(WireError::TooLong {
                payload: PayloadType::Skf,
                what: "message",
            })?;
        let mut out = Vec::with_capacity(usize::from(total));
        for (number, chunk) in (1..=total).zip(plain.chunks(room)) {
            let first = if number == 1 {
                first
            } else {
                PayloadType::None
            };
            out.push(self.seal_one(header, chunk.to_vec(), rng, |body| {
                Payload::Skf(SkfPayload {
                    first,
                    number,
                    total,
                    body,
                })
            })?);
        }
        Ok(out)
    }

    /// A message with any octets inside.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn seal_octets(
        &mut self,
        header: &Header,
        first: PayloadType,
        octets: Vec<u8>,
        rng: &mut Rng,
    ) -> Result<Vec<u8>, ProtectError> {
        self.seal_one(header, octets, rng, |body| {
            Payload::Sk(SkPayload { first, body })
        })
    }

    fn seal_one(
        &mut self,
        header: &Header,
        plain: Vec<u8>,
        rng: &mut Rng,
        wrap: impl FnOnce(Vec<u8>) -> Payload,
    ) -> Result<Vec<u8>, ProtectError> {
        let room = self.sealer.sealed_len(plain.len());
        let mut message = Message {
            header: *header,
            payloads: vec![wrap(vec![0; room])],
        }
        .emit()?;
        let at = message.len().saturating_sub(room);
        let (aad, _) = message.split_at(at);
        let tape = rng.tape().clone();
        let sealed = tape.seal(plain, |plain| self.sealer.seal(aad, plain, rng))?;
        message.truncate(at);
        message.extend_from_slice(&sealed);
        Ok(message)
    }

    /// The inner payloads of an SK payload that is the last of `raw`.
    pub(crate) fn open(
        &self,
        raw: &[u8],
        sk: &SkPayload,
        tape: &Tape,
    ) -> Result<Vec<Payload>, ProtectError> {
        let plain = tape.open(|| self.opener.open(sk.aad(raw), &sk.body))?;
        Ok(parse_payloads(sk.first, &plain)?)
    }

    /// The content of one fragment.
    pub(crate) fn open_fragment(
        &self,
        raw: &[u8],
        skf: &SkfPayload,
        tape: &Tape,
    ) -> Result<Vec<u8>, CryptoError> {
        tape.open(|| self.opener.open(skf.aad(raw), &skf.body))
    }
}

/// Fragments as they come in: of one request and of one response, as the windows have it. Only
/// authenticated ones get here, so memory is spent on two messages of an authenticated peer.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Reassembly {
    request: Option<Partial>,
    response: Option<Partial>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Partial {
    message_id: u32,
    total: u16,
    first: PayloadType,
    size: usize,
    parts: BTreeMap<u16, Vec<u8>>,
}

impl Reassembly {
    /// Whether a fragment would change nothing, so that it need not even be opened.
    pub(crate) fn has(&self, header: &Header, skf: &SkfPayload) -> bool {
        let partial = if header.flags.response {
            &self.response
        } else {
            &self.request
        };
        partial.as_ref().is_some_and(|partial| {
            partial.message_id == header.message_id
                && (skf.total < partial.total
                    || (skf.total == partial.total && partial.parts.contains_key(&skf.number)))
        })
    }

    /// Takes a fragment; the inner payloads once the message is complete.
    pub(crate) fn add(
        &mut self,
        header: &Header,
        skf: &SkfPayload,
        content: Vec<u8>,
        max_size: usize,
    ) -> Result<Option<Vec<Payload>>, WireError> {
        if skf.total > MAX_FRAGMENTS {
            return Err(WireError::TooMany {
                payload: PayloadType::Skf,
                what: "fragments",
                limit: usize::from(MAX_FRAGMENTS),
            });
        }
        if self.has(header, skf) {
            return Ok(None);
        }
        let slot = if header.flags.response {
            &mut self.response
        } else {
            &mut self.request
        };
        // A larger total means that the sender fragments anew, to smaller pieces; a smaller one
        // is a leftover of before (RFC 7383 section 2.6).
        let mut current = slot
            .take()
            .filter(|current| current.message_id == header.message_id && current.total == skf.total)
            .unwrap_or_else(|| Partial {
                message_id: header.message_id,
                total: skf.total,
                first: PayloadType::None,
                size: 0,
                parts: BTreeMap::new(),
            });
        current.size += content.len();
        if current.size > max_size {
            return Err(WireError::TooLong {
                payload: PayloadType::Skf,
                what: "reassembled message",
            });
        }
        if skf.number == 1 {
            current.first = skf.first;
        }
        current.parts.insert(skf.number, content);
        if current.parts.len() < usize::from(current.total) {
            *slot = Some(current);
            return Ok(None);
        }
        let whole: Vec<u8> = current.parts.values().flatten().copied().collect();
        parse_payloads(current.first, &whole).map(Some)
    }
}

/// Sizes of IP packets to fall back to, for a path that loses longer ones: what every IPv6 path
/// carries, and what every IPv4 host accepts (RFC 7383 section 2.5.1).
const FALLBACKS: [(u32, bool); 2] = [(1280, false), (576, true)];

/// The next smaller size of IP packets than `packet`, if there is one.
pub(crate) fn smaller_packet(packet: u32, v4: bool) -> Option<u32> {
    // Zero is the smallest already.
    FALLBACKS
        .into_iter()
        .filter(|(_, only_v4)| v4 || !only_v4)
        .map(|(size, _)| size)
        .find(|size| *size < packet)
}

/// The longest IKE message that fits into an IP packet of `packet` octets.
pub(crate) fn max_message_len(packet: u32, v4: bool, marker: bool) -> usize {
    let overhead = if v4 { 20 } else { 40 } + 8 + if marker { 4 } else { 0 };
    let packet = if packet == 0 {
        if v4 { 576 } else { 1280 }
    } else {
        usize::try_from(packet).unwrap_or(usize::MAX)
    };
    packet.saturating_sub(overhead).max(128)
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::Secret;
    use swanherd_ipsec::registry::{EncryptionId, KeyExchangeId, PrfId};

    use super::*;
    use crate::wire::{ExchangeType, Flags, NotifyPayload, NotifyType};

    fn pair() -> (Protection, Protection) {
        let suite = IkeSuite {
            encryption: EncryptionId::AesGcm16,
            key_bits: Some(128),
            integrity: None,
            prf: PrfId::HmacSha2_256,
            key_exchange: KeyExchangeId::Curve25519,
        };
        let keys =
            IkeKeys::initial(&suite, &Secret::copy_of(&[7; 32]), &[1; 32], &[2; 32], 3, 4).unwrap();
        (
            Protection::new(&suite, &keys, true).unwrap(),
            Protection::new(&suite, &keys, false).unwrap(),
        )
    }

    #[test]
    fn a_long_message_travels_in_fragments_that_arrive_in_any_order() {
        let (mut alice, bob) = pair();
        let mut rng = Rng::new([1; 32]);
        let header = Header {
            spi_i: 3,
            spi_r: 4,
            exchange: ExchangeType::IkeAuth,
            flags: Flags {
                initiator: true,
                ..Flags::default()
            },
            message_id: 1,
        };
        let payloads = vec![Payload::Notify(NotifyPayload::new(
            NotifyType::InitialContact,
            vec![9; 3000],
        ))];

        let mut fragments = alice.seal(&header, &payloads, Some(500), &mut rng).unwrap();
        assert!(fragments.len() > 6);
        assert!(fragments.iter().all(|f| f.len() <= 500));
        fragments.reverse();

        let mut reassembly = Reassembly::default();
        let mut whole = None;
        for raw in &fragments {
            let message = Message::parse(raw).unwrap();
            let Some(Payload::Skf(skf)) = message.payloads.last() else {
                panic!("not a fragment");
            };
            let content = bob.open_fragment(raw, skf, &Tape::default()).unwrap();
            assert_eq!(whole, None);
            whole = reassembly
                .add(&message.header, skf, content, 10_000)
                .unwrap();
        }
        assert_eq!(whole, Some(payloads));
    }

    /// Opens `raw` and adds it.
    fn take(
        reassembly: &mut Reassembly,
        by: &Protection,
        raw: &[u8],
    ) -> Result<Option<Vec<Payload>>, WireError> {
        let message = Message::parse(raw).unwrap();
        let Some(Payload::Skf(skf)) = message.payloads.last() else {
            panic!("not a fragment");
        };
        let content = by.open_fragment(raw, skf, &Tape::default()).unwrap();
        reassembly.add(&message.header, skf, content, 10_000)
    }

    fn long_message(response: bool) -> (Header, Vec<Payload>) {
        let header = Header {
            spi_i: 3,
            spi_r: 4,
            exchange: ExchangeType::IkeAuth,
            flags: Flags {
                initiator: true,
                response,
                ..Flags::default()
            },
            message_id: 1,
        };
        let notify = NotifyPayload::new(NotifyType::InitialContact, vec![9; 3000]);
        (header, vec![Payload::Notify(notify)])
    }

    #[test]
    fn requests_and_responses_in_fragments_do_not_disturb_each_other() {
        let (mut alice, bob) = pair();
        let mut rng = Rng::new([1; 32]);
        let mut seal = |response| {
            let (header, payloads) = long_message(response);
            alice.seal(&header, &payloads, Some(500), &mut rng).unwrap()
        };
        let (requests, responses) = (seal(false), seal(true));

        let mut reassembly = Reassembly::default();
        let mut complete = 0;
        for (request, response) in requests.iter().zip(&responses) {
            complete += usize::from(take(&mut reassembly, &bob, request).unwrap().is_some());
            complete += usize::from(take(&mut reassembly, &bob, response).unwrap().is_some());
        }

        assert_eq!(complete, 2);
    }

    #[test]
    fn smaller_fragments_of_the_same_message_replace_larger_ones_and_not_the_other_way() {
        let (mut alice, bob) = pair();
        let mut rng = Rng::new([1; 32]);
        let (header, payloads) = long_message(false);
        let large = alice
            .seal(&header, &payloads, Some(1200), &mut rng)
            .unwrap();
        let small = alice.seal(&header, &payloads, Some(500), &mut rng).unwrap();
        let mut reassembly = Reassembly::default();

        assert_eq!(take(&mut reassembly, &bob, &large[0]), Ok(None));
        let (last, rest) = small.split_last().unwrap();
        for raw in rest {
            assert_eq!(take(&mut reassembly, &bob, raw), Ok(None));
            // Leftovers and copies change nothing.
            assert_eq!(take(&mut reassembly, &bob, &large[1]), Ok(None));
            assert_eq!(take(&mut reassembly, &bob, raw), Ok(None));
        }
        assert_eq!(take(&mut reassembly, &bob, last), Ok(Some(payloads)));
    }

    #[test]
    fn many_small_fragments_are_put_together_and_copies_cost_nothing() {
        let (mut alice, bob) = pair();
        let (header, payloads) = long_message(true);
        let mut rng = Rng::new([1; 32]);
        let fragments = alice.seal(&header, &payloads, Some(128), &mut rng).unwrap();
        assert!(fragments.len() >= 32, "{}", fragments.len());
        let mut reassembly = Reassembly::default();
        for _ in 0..100 {
            assert_eq!(take(&mut reassembly, &bob, &fragments[0]), Ok(None));
        }
        assert_eq!(reassembly.response.as_ref().unwrap().parts.len(), 1);
        let rest = &fragments[1..];
        let results: Vec<_> = rest
            .iter()
            .filter_map(|raw| take(&mut reassembly, &bob, raw).unwrap())
            .collect();
        assert_eq!(results, [payloads]);
        assert!(reassembly.response.is_none());
    }

    #[test]
    fn packets_become_smaller_down_to_what_every_path_carries() {
        assert_eq!(smaller_packet(1500, true), Some(1280));
        assert_eq!(smaller_packet(1280, true), Some(576));
        assert_eq!(smaller_packet(576, true), None);
        assert_eq!(smaller_packet(0, true), None);
        assert_eq!(smaller_packet(1500, false), Some(1280));
        assert_eq!(smaller_packet(1280, false), None);
    }

    #[test]
    fn reassembly_is_bounded() {
        let (mut alice, bob) = pair();
        let mut rng = Rng::new([1; 32]);
        let header = Header {
            spi_i: 3,
            spi_r: 4,
            exchange: ExchangeType::IkeAuth,
            flags: Flags::default(),
            message_id: 1,
        };
        let notify = NotifyPayload::new(NotifyType::InitialContact, vec![9; 3000]);
        let fragments = alice
            .seal(&header, &[Payload::Notify(notify)], Some(500), &mut rng)
            .unwrap();

        let mut reassembly = Reassembly::default();
        let results: Vec<bool> = fragments
            .iter()
            .map(|raw| {
                let message = Message::parse(raw).unwrap();
                let Some(Payload::Skf(skf)) = message.payloads.last() else {
                    panic!("not a fragment");
                };
                let content = bob.open_fragment(raw, skf, &Tape::default()).unwrap();
                reassembly.add(&message.header, skf, content, 1000).is_ok()
            })
            .collect();
        assert!(results.contains(&false));
    }
}
