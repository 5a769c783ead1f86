// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's IPsec notices, read in place: `netlink-packet-xfrm` drops the attributes behind
//! expiries and mappings, which tell apart SAs that differ only in mark or interface.

use std::net::IpAddr;

use netlink_packet_xfrm::{
    AF_INET, AF_INET6, IPPROTO_ESP, Selector, UserAcquire, UserExpire, UserMapping, UserSaId,
    UserTemplate, XFRM_POLICY_OUT, XFRM_USER_ACQUIRE_LEN, XFRM_USER_EXPIRE_LEN,
    XFRM_USER_MAPPING_LEN, XFRMA_IF_ID, XFRMA_MARK, XFRMA_TMPL,
};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::{Mark, SaEntry, SaId};

use super::super::message::{Placeholder, attributes, read_mark};
use super::super::selector::address;

/// A packet met an outbound policy without an SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Acquire {
    /// What the kernel has in place of the SA for now.
    pub(super) placeholder: Placeholder,
    /// The packet, as selectors of this side and the peer's; `None` if the kernel did not say.
    pub(super) packet: Option<(TrafficSelector, TrafficSelector)>,
}

impl Acquire {
    /// `None` if the notice is malformed or about another direction.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let acquire = UserAcquire::parse(payload).ok()?;
        if acquire.policy.direction != XFRM_POLICY_OUT {
            return None;
        }
        let template = attributes(payload, XFRM_USER_ACQUIRE_LEN)
            .find(|(kind, _)| *kind == XFRMA_TMPL)
            .and_then(|(_, value)| UserTemplate::parse(value).ok())?;
        let mark = attributes(payload, XFRM_USER_ACQUIRE_LEN)
            .find(|(kind, _)| *kind == XFRMA_MARK)
            .and_then(|(_, value)| read_mark(value));
        let selector = &acquire.selector;
        let known = [AF_INET, AF_INET6].contains(&selector.family)
            && (selector.prefixlen_s, selector.prefixlen_d) != (0, 0);
        Some(Self {
            placeholder: Placeholder {
                reqid: template.reqid,
                seq: acquire.seq,
                src: address(template.family, &acquire.saddr),
                dst: address(template.family, &acquire.id.daddr),
                mark,
            },
            packet: known.then(|| packet_selectors(selector)),
        })
    }
}

/// An SA that a notice is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) id: SaId,
    mark: Option<Mark>,
    if_id: Option<u32>,
}

impl Subject {
    /// `None` if it is not an SA of ESP.
    fn new(proto: u8, id: SaId, rest: &[u8]) -> Option<Self> {
        if proto != IPPROTO_ESP {
            return None;
        }
        let mut subject = Self {
            id,
            mark: None,
            if_id: None,
        };
        for (kind, value) in attributes(rest, 0) {
            match kind {
                XFRMA_MARK => subject.mark = read_mark(value),
                XFRMA_IF_ID => subject.if_id = value.first_chunk().copied().map(u32::from_ne_bytes),
                _ => {}
            }
        }
        Some(subject)
    }

    /// Whether it may be this SA. Older kernels do not say everything.
    pub(super) fn is(&self, entry: &SaEntry) -> bool {
        self.mark.is_none_or(|mark| entry.mark == Some(mark))
            && self.if_id.is_none_or(|if_id| entry.if_id == if_id)
    }
}

/// A limit of an SA was reached: which SA, and whether the limit is hard.
pub(super) fn read_expire(payload: &[u8]) -> Option<(Subject, bool)> {
    let expire = UserExpire::parse(payload).ok()?;
    let state = &expire.state;
    let id = SaId {
        spi: state.id.spi,
        dst: address(state.family, &state.id.daddr),
    };
    let rest = payload.get(XFRM_USER_EXPIRE_LEN..).unwrap_or_default();
    Some((Subject::new(state.id.proto, id, rest)?, expire.hard != 0))
}

/// Packets of an SA come from elsewhere: which SA, and from where.
pub(super) fn read_mapping(payload: &[u8]) -> Option<(Subject, (IpAddr, u16))> {
    let mapping = UserMapping::parse(payload).ok()?;
    let rest = payload.get(XFRM_USER_MAPPING_LEN..).unwrap_or_default();
    let subject = Subject::new(mapping.id.proto, sa_id(&mapping.id), rest)?;
    let addr = address(mapping.id.family, &mapping.new_saddr);
    Some((subject, (addr, mapping.new_sport)))
}

/// An SA was deleted.
pub(super) fn read_deletion(payload: &[u8]) -> Option<Subject> {
    let id = UserSaId::parse(payload).ok()?;
    // What follows is the SA as it was, in an attribute.
    Subject::new(id.proto, sa_id(&id), &[])
}

/// The selector of a packet as a pair of traffic selectors: source first.
fn packet_selectors(selector: &Selector) -> (TrafficSelector, TrafficSelector) {
    let ports = |port: u16, mask: u16| {
        if mask == 0 {
            (0, u16::MAX)
        } else {
            (port & mask, port | !mask)
        }
    };
    let icmp =
        selector.proto == libc::IPPROTO_ICMP as u8 || selector.proto == libc::IPPROTO_ICMPV6 as u8;
    let (source, destination) = if icmp && selector.sport_mask != 0 {
        let type_and_code = selector.sport << 8 | selector.dport & 0xff;
        (
            (type_and_code, type_and_code),
            (type_and_code, type_and_code),
        )
    } else {
        (
            ports(selector.sport, selector.sport_mask),
            ports(selector.dport, selector.dport_mask),
        )
    };
    let side = |addr, prefix_len, (start_port, end_port)| {
        let addr = address(selector.family, addr);
        TrafficSelector {
            protocol: selector.proto,
            start_port,
            end_port,
            ..TrafficSelector::network(addr, prefix_len)
                .unwrap_or_else(|| TrafficSelector::host(addr))
        }
    };
    (
        side(&selector.saddr, selector.prefixlen_s, source),
        side(&selector.daddr, selector.prefixlen_d, destination),
    )
}

fn sa_id(id: &UserSaId) -> SaId {
    SaId {
        spi: id.spi,
        dst: address(id.family, &id.daddr),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len())
            .unwrap()
            .to_ne_bytes()
            .to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes
    }

    fn expire(proto: u8, hard: u8, attributes: &[u8]) -> Vec<u8> {
        let mut payload = vec![0; XFRM_USER_EXPIRE_LEN];
        // struct xfrm_usersa_info: a selector of 56 octets, then struct xfrm_id.
        payload[56..60].copy_from_slice(&[192, 0, 2, 1]);
        payload[72..76].copy_from_slice(&7u32.to_be_bytes());
        payload[76] = proto;
        // After addresses, lifetimes and statistics: sequence number, request id, family.
        payload[212..214].copy_from_slice(&AF_INET.to_ne_bytes());
        payload[224] = hard;
        payload.extend(attributes);
        payload
    }

    #[test]
    fn an_expiry_tells_sas_of_different_marks_and_interfaces_apart() {
        let mut mark = 5u32.to_ne_bytes().to_vec();
        mark.extend(u32::MAX.to_ne_bytes());
        let mut attributes = attribute(XFRMA_MARK, &mark);
        attributes.extend(attribute(XFRMA_IF_ID, &9u32.to_ne_bytes()));

        let (subject, hard) = read_expire(&expire(IPPROTO_ESP, 1, &attributes)).unwrap();

        assert!(hard);
        assert_eq!(subject.id.spi, 7);
        assert_eq!(subject.id.dst, "192.0.2.1".parse::<IpAddr>().unwrap());
        assert_eq!(subject.mark.unwrap().value, 5);
        assert_eq!(subject.if_id, Some(9));
        assert!(read_expire(&expire(51, 1, &[])).is_none(), "AH is not ours");
    }

    #[test]
    fn an_acquire_may_lack_its_selector() {
        let mut payload = vec![0; XFRM_USER_ACQUIRE_LEN];
        let mut template = vec![0; 64];
        template[24..26].copy_from_slice(&AF_INET.to_ne_bytes());
        template[44..48].copy_from_slice(&3u32.to_ne_bytes());
        payload.extend(attribute(XFRMA_TMPL, &template));
        // The direction of the policy.
        payload[96 + 160] = XFRM_POLICY_OUT;

        let acquire = Acquire::read(&payload).unwrap();

        assert_eq!(acquire.placeholder.reqid, 3);
        assert_eq!(acquire.packet, None);
    }

    proptest! {
        #[test]
        fn no_notice_makes_the_reader_panic(payload in proptest::collection::vec(0u8.., 0..700)) {
            let _ = Acquire::read(&payload);
            let _ = read_expire(&payload);
            let _ = read_mapping(&payload);
            let _ = read_deletion(&payload);
        }

        #[test]
        fn no_attribute_makes_the_reader_panic(rest in proptest::collection::vec(0u8.., 0..100)) {
            let mut payload = vec![0; XFRM_USER_ACQUIRE_LEN];
            payload.extend(rest);
            let _ = Acquire::read(&payload);
            let _ = read_expire(&payload);
        }
    }
}
