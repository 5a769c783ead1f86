// SPDX-License-Identifier: Apache-2.0 OR MIT
//! REDIRECT and REDIRECTED_FROM (RFC 5685 section 8).

use core::fmt;
use std::net::IpAddr;

use super::notify::{NotifyPayload, NotifyType};
use super::payload::PayloadType;
use super::reader::Reader;

const IPV4: u8 = 1;
const IPV6: u8 = 2;
const FQDN: u8 = 3;
/// The longest name that DNS has.
const MAX_NAME: usize = 253;

/// How a gateway is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// By its address.
    Addr(IpAddr),
    /// By its host name: letters, digits, hyphens, underscores and dots.
    Name(String),
}

impl Gateway {
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let [kind, len] = reader.array::<2>("no gateway").ok()?;
        let identity = reader.take(len.into(), "gateway is cut off").ok()?;
        match kind {
            IPV4 => Some(Self::Addr(<[u8; 4]>::try_from(identity).ok()?.into())),
            IPV6 => Some(Self::Addr(<[u8; 16]>::try_from(identity).ok()?.into())),
            FQDN => {
                let name = core::str::from_utf8(identity).ok()?;
                let sound = !name.is_empty()
                    && name.len() <= MAX_NAME
                    && name
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
                sound.then(|| Self::Name(name.to_owned()))
            }
            _ => None,
        }
    }

    fn write(&self) -> Vec<u8> {
        let (kind, identity) = match self {
            Self::Addr(IpAddr::V4(v4)) => (IPV4, v4.octets().to_vec()),
            Self::Addr(IpAddr::V6(v6)) => (IPV6, v6.octets().to_vec()),
            Self::Name(name) => (FQDN, name.as_bytes().to_vec()),
        };
        // Names that can be read are shorter than this; a longer one would be cut.
        let len = u8::try_from(identity.len()).unwrap_or(u8::MAX);
        let mut out = vec![kind, len];
        out.extend(identity.into_iter().take(usize::from(len)));
        out
    }
}

impl fmt::Display for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addr(addr) => addr.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// What REDIRECT says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// Whom to go to.
    pub gateway: Gateway,
    /// In IKE_SA_INIT the initiator's nonce, so that only who saw the request can redirect it.
    /// Empty elsewhere.
    pub nonce: Vec<u8>,
}

impl NotifyPayload {
    /// REDIRECT.
    pub fn redirect(redirect: &Redirect) -> Self {
        let mut data = redirect.gateway.write();
        data.extend_from_slice(&redirect.nonce);
        Self::new(NotifyType::Redirect, data)
    }

    /// What it says if it is a REDIRECT to a gateway that can be named.
    pub fn as_redirect(&self) -> Option<Redirect> {
        if self.notify_type != NotifyType::Redirect {
            return None;
        }
        let mut reader = Reader::new(PayloadType::Notify, &self.data);
        Some(Redirect {
            gateway: Gateway::read(&mut reader)?,
            nonce: reader.rest().to_vec(),
        })
    }

    /// REDIRECTED_FROM.
    pub fn redirected_from(gateway: &Gateway) -> Self {
        Self::new(NotifyType::RedirectedFrom, gateway.write())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_is_read_as_written() {
        let gateways = [
            Gateway::Addr("192.0.2.7".parse().unwrap()),
            Gateway::Addr("2001:db8::7".parse().unwrap()),
            Gateway::Name("gw7.example.org".to_owned()),
        ];
        for gateway in gateways {
            for nonce in [Vec::new(), vec![7; 32]] {
                let redirect = Redirect {
                    gateway: gateway.clone(),
                    nonce,
                };
                let notify = NotifyPayload::redirect(&redirect);
                assert_eq!(notify.as_redirect(), Some(redirect));
            }
        }
    }

    #[test]
    fn what_names_no_gateway_is_no_redirect() {
        for data in [
            &[][..],
            &[1],
            &[1, 4, 192, 0, 2],
            &[1, 3, 192, 0, 2],
            &[2, 4, 192, 0, 2, 1],
            &[3, 0],
            &[3, 3, b'a', b'/', b'b'],
            &[3, 2, 0xff, 0xfe],
            &[9, 1, 0],
        ] {
            let notify = NotifyPayload::new(NotifyType::Redirect, data.to_vec());
            assert_eq!(notify.as_redirect(), None, "{data:?}");
        }
    }
}
