// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtual addresses of this side: asking for them in IKE_AUTH, having them as long as the IKE SA
//! or its successors last (RFC 7296 sections 2.19 and 3.15).

use std::net::IpAddr;

use swanherd_config::model::{Child, Connection, SelectorSpec};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::Op;

use super::env::{Env, Slot};
use super::{IkeSa, narrow};
use crate::api::{ChildSaId, ConnectionRef, LogGroup, Token};
use crate::wire::{CfgType, CpAttribute, CpAttributeType, CpPayload, Payload};

/// The most addresses that are asked for or taken.
const MAX_ADDRESSES: usize = 8;

impl IkeSa {
    /// What to ask for, if the connection wants virtual addresses: those that the IKE SA had which
    /// this one is to take over from, or what is configured.
    pub(super) fn address_request(&self, conn: &Connection) -> Option<Payload> {
        if conn.vips.is_empty() {
            return None;
        }
        let attributes = conn
            .vips
            .iter()
            .take(MAX_ADDRESSES)
            .map(|wanted| {
                let had = self
                    .former_vips
                    .iter()
                    .find(|had| had.is_ipv4() == wanted.is_ipv4());
                let wanted = if wanted.is_unspecified() {
                    had.unwrap_or(wanted)
                } else {
                    wanted
                };
                attribute(*wanted)
            })
            .collect();
        Some(Payload::Cp(CpPayload {
            cfg_type: CfgType::Request,
            attributes,
        }))
    }

    /// Takes the addresses that the peer gives; false if some were asked for and none is given.
    pub(super) fn take_addresses(
        &mut self,
        env: &mut Env,
        conn: &ConnectionRef,
        payloads: &[Payload],
    ) -> bool {
        if conn.vips.is_empty() {
            return true;
        }
        let wanted = |v4| conn.vips.iter().filter(|vip| vip.is_ipv4() == v4).count();
        let mut room = [wanted(true), wanted(false)];
        for addr in replied(payloads) {
            let room = &mut room[usize::from(!addr.is_ipv4())];
            if *room == 0 || self.vips.contains(&addr) || self.vips.len() >= MAX_ADDRESSES {
                continue;
            }
            if !is_usable(addr) {
                let text = format!("the peer gave {addr}, which no host can have");
                self.log(env, LogGroup::Cfg, 0, text);
                continue;
            }
            *room -= 1;
            self.vips.push(addr);
            self.log(env, LogGroup::Cfg, 1, format!("virtual address {addr}"));
        }
        !self.vips.is_empty()
    }

    /// Has the virtual addresses put in place. The answers go to `slot`, or to nobody.
    pub(super) fn add_addresses(&self, env: &mut Env, slot: Option<Slot>) -> Vec<Token> {
        let local = self.local.ip();
        let mut tokens = Vec::new();
        for addr in self.vips.iter().copied() {
            let op = Op::AddAddress { addr, local };
            match slot {
                Some(slot) => tokens.push(env.plane(self.id, slot, op)),
                None => env.plane_forget(op),
            }
        }
        tokens
    }

    /// The virtual addresses are known now: `dynamic` in what a child offered stands for them.
    pub(super) fn follow_addresses(&mut self, id: ChildSaId) {
        let Some(child) = self.children.get(&id) else {
            return;
        };
        if self.vips.is_empty() || !is_dynamic(child.cfg()) {
            return;
        }
        let own = self.own_selectors(&child.conn, child.cfg());
        if let Some(child) = self.children.get_mut(&id) {
            child.local_ts = own;
        }
    }

    /// Gives the virtual addresses back.
    pub(super) fn remove_addresses(&mut self, env: &mut Env) {
        for addr in std::mem::take(&mut self.vips) {
            env.plane_forget(Op::RemoveAddress(addr));
        }
    }

    /// Whether a child stands for virtual addresses that the peer has not given.
    pub(super) fn lacks_addresses(&self, conn: &Connection, child: &Child) -> bool {
        self.initiator && !conn.vips.is_empty() && self.vips.is_empty() && is_dynamic(child)
    }

    /// The hosts that `dynamic` stands for on this side; unspecified ones are not known yet.
    pub(super) fn own_hosts(&self, conn: &Connection) -> Vec<IpAddr> {
        if !self.vips.is_empty() {
            return self.vips.clone();
        }
        if !conn.vips.is_empty() && self.initiator && !self.is_established() {
            return conn
                .vips
                .iter()
                .map(|vip| narrow::unspecified(vip.is_ipv4()))
                .collect();
        }
        vec![self.local.ip()]
    }

    /// This side's selectors of a child.
    pub(super) fn own_selectors(&self, conn: &Connection, child: &Child) -> Vec<TrafficSelector> {
        narrow::resolve(&child.local_ts, &self.own_hosts(conn))
    }
}

/// Whether a child's selectors follow the virtual addresses.
fn is_dynamic(child: &Child) -> bool {
    child
        .local_ts
        .iter()
        .any(|spec| matches!(spec, SelectorSpec::Dynamic { .. }))
}

/// Whether a peer asks for addresses.
pub(super) fn asks_for_addresses(payloads: &[Payload]) -> bool {
    payloads.iter().any(|payload| match payload {
        Payload::Cp(cp) if cp.cfg_type == CfgType::Request => cp.attributes.iter().any(|a| {
            matches!(
                a.attribute_type,
                CpAttributeType::InternalIp4Address | CpAttributeType::InternalIp6Address
            )
        }),
        _ => false,
    })
}

fn attribute(addr: IpAddr) -> CpAttribute {
    let given = !addr.is_unspecified();
    match addr {
        IpAddr::V4(v4) => CpAttribute {
            attribute_type: CpAttributeType::InternalIp4Address,
            value: if given {
                v4.octets().to_vec()
            } else {
                Vec::new()
            },
        },
        IpAddr::V6(v6) => CpAttribute {
            attribute_type: CpAttributeType::InternalIp6Address,
            value: if given {
                let mut value = v6.octets().to_vec();
                value.push(128);
                value
            } else {
                Vec::new()
            },
        },
    }
}

fn replied(payloads: &[Payload]) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for payload in payloads {
        let Payload::Cp(cp) = payload else {
            continue;
        };
        if cp.cfg_type != CfgType::Reply {
            continue;
        }
        for attribute in &cp.attributes {
            let value = attribute.value.as_slice();
            let addr = match attribute.attribute_type {
                CpAttributeType::InternalIp4Address => {
                    <[u8; 4]>::try_from(value).ok().map(IpAddr::from)
                }
                // An address and the length of its prefix; some leave that off.
                CpAttributeType::InternalIp6Address => value
                    .get(..16)
                    .and_then(|octets| <[u8; 16]>::try_from(octets).ok())
                    .map(IpAddr::from),
                _ => None,
            };
            found.extend(addr);
        }
    }
    found
}

fn is_usable(addr: IpAddr) -> bool {
    let broadcast = matches!(addr, IpAddr::V4(v4) if v4.is_broadcast());
    !(addr.is_unspecified() || addr.is_loopback() || addr.is_multicast() || broadcast)
}

/// The answer of a responder that gives these addresses.
#[cfg(test)]
pub(super) fn reply(addrs: &[IpAddr]) -> Payload {
    Payload::Cp(CpPayload {
        cfg_type: CfgType::Reply,
        attributes: addrs.iter().copied().map(attribute).collect(),
    })
}
