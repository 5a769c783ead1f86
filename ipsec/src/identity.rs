// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE identities (RFC 7296 section 3.5) as they stand on the wire.
//!
//! Reading the operators' notation (`@gw.example.org`, `C=CH, CN=gw`, `192.0.2.1`) and matching
//! patterns such as `*.example.org` is the configuration's business; this type is the value that
//! both sides exchange and that secrets and certificates are looked up by.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

crate::open_registry! {
    /// Identification types (RFC 7296 section 3.5).
    pub enum IdType: u8 {
        Ipv4Addr = 1, "ID_IPV4_ADDR";
        Fqdn = 2, "ID_FQDN";
        Rfc822Addr = 3, "ID_RFC822_ADDR";
        Ipv4AddrSubnet = 4, "ID_IPV4_ADDR_SUBNET";
        Ipv6Addr = 5, "ID_IPV6_ADDR";
        Ipv6AddrSubnet = 6, "ID_IPV6_ADDR_SUBNET";
        Ipv4AddrRange = 7, "ID_IPV4_ADDR_RANGE";
        Ipv6AddrRange = 8, "ID_IPV6_ADDR_RANGE";
        DerAsn1Dn = 9, "ID_DER_ASN1_DN";
        DerAsn1Gn = 10, "ID_DER_ASN1_GN";
        KeyId = 11, "ID_KEY_ID";
    }
}

/// An identity: its type and its octets. An identity with type 0 is "any" (`%any`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// What the octets mean.
    pub id_type: IdType,
    /// The Identification Data.
    #[serde(with = "crate::hex")]
    pub data: Vec<u8>,
}

impl Identity {
    /// `%any`: matches every identity.
    pub const fn any() -> Self {
        Self {
            id_type: IdType::Unknown(0),
            data: Vec::new(),
        }
    }

    /// Whether this is `%any`.
    pub fn is_any(&self) -> bool {
        self.id_type == IdType::Unknown(0)
    }

    /// The identity of an address.
    pub fn from_ip(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(v4) => Self {
                id_type: IdType::Ipv4Addr,
                data: v4.octets().to_vec(),
            },
            IpAddr::V6(v6) => Self {
                id_type: IdType::Ipv6Addr,
                data: v6.octets().to_vec(),
            },
        }
    }

    /// A fully qualified domain name.
    pub fn fqdn(name: &str) -> Self {
        Self {
            id_type: IdType::Fqdn,
            data: name.as_bytes().to_vec(),
        }
    }

    /// The address, if this is an address identity of the right length.
    pub fn as_ip(&self) -> Option<IpAddr> {
        match self.id_type {
            IdType::Ipv4Addr => {
                Some(Ipv4Addr::from(<[u8; 4]>::try_from(self.data.as_slice()).ok()?).into())
            }
            IdType::Ipv6Addr => {
                Some(Ipv6Addr::from(<[u8; 16]>::try_from(self.data.as_slice()).ok()?).into())
            }
            _ => None,
        }
    }
}
