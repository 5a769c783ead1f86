// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Traffic Selector payloads (RFC 7296 section 3.13).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use swanherd_ipsec::TrafficSelector;

use super::error::WireError;
use super::payload::PayloadType;
use super::reader::Reader;

const TS_IPV4_ADDR_RANGE: u8 = 7;
const TS_IPV6_ADDR_RANGE: u8 = 8;

/// Traffic selectors. Those of types other than the two address ranges (Fibre Channel, security
/// labels) cannot be agreed to and are left out on receipt; at least one selector that is
/// understood must remain for a CHILD SA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TsPayload(pub Vec<TrafficSelector>);

impl TsPayload {
    pub(super) fn parse(mut reader: Reader<'_>) -> Result<Self, WireError> {
        let [count, _, _, _] = reader.array::<4>("no number of selectors")?;
        let mut selectors = Vec::new();
        for _ in 0..count {
            let [ts_type, protocol] = reader.array::<2>("selector is cut off")?;
            let length = usize::from(reader.u16("selector is cut off")?);
            let Some(rest) = length.checked_sub(4) else {
                return Err(reader.malformed("selector is shorter than its header"));
            };
            let mut fields = reader.sub(rest, "selector is cut off")?;
            let v4 = match ts_type {
                TS_IPV4_ADDR_RANGE => true,
                TS_IPV6_ADDR_RANGE => false,
                _ => continue,
            };
            let start_port = fields.u16("selector without ports")?;
            let end_port = fields.u16("selector without ports")?;
            let mut address = || -> Result<IpAddr, WireError> {
                Ok(if v4 {
                    Ipv4Addr::from(fields.array::<4>("selector without addresses")?).into()
                } else {
                    Ipv6Addr::from(fields.array::<16>("selector without addresses")?).into()
                })
            };
            let start = address()?;
            let end = address()?;
            fields.finish("selector is longer than its type")?;
            if start > end {
                return Err(reader.malformed("selector ends before it starts"));
            }
            selectors.push(TrafficSelector {
                protocol,
                start_port,
                end_port,
                start,
                end,
            });
        }
        reader.finish("octets after the last selector")?;
        Ok(Self(selectors))
    }

    pub(super) fn emit(&self, payload: PayloadType, out: &mut Vec<u8>) -> Result<(), WireError> {
        let Ok(count) = u8::try_from(self.0.len()) else {
            return Err(WireError::TooLong {
                payload,
                what: "list of selectors",
            });
        };
        out.extend_from_slice(&[count, 0, 0, 0]);
        for selector in &self.0 {
            let (ts_type, length) = match (selector.start, selector.end) {
                (IpAddr::V4(_), IpAddr::V4(_)) => (TS_IPV4_ADDR_RANGE, 16_u16),
                (IpAddr::V6(_), IpAddr::V6(_)) => (TS_IPV6_ADDR_RANGE, 40),
                _ => {
                    return Err(WireError::Malformed {
                        payload,
                        what: "selector with addresses of two families",
                    });
                }
            };
            out.extend_from_slice(&[ts_type, selector.protocol]);
            out.extend_from_slice(&length.to_be_bytes());
            out.extend_from_slice(&selector.start_port.to_be_bytes());
            out.extend_from_slice(&selector.end_port.to_be_bytes());
            for address in [selector.start, selector.end] {
                match address {
                    IpAddr::V4(v4) => out.extend_from_slice(&v4.octets()),
                    IpAddr::V6(v6) => out.extend_from_slice(&v6.octets()),
                }
            }
        }
        Ok(())
    }
}
