// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The notifies of MOBIKE that carry addresses (RFC 4555 section 4).

use std::net::{IpAddr, SocketAddr};

use super::notify::{NotifyPayload, NotifyType};

impl NotifyPayload {
    /// ADDITIONAL_IP4_ADDRESS or ADDITIONAL_IP6_ADDRESS.
    pub fn additional_address(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(v4) => Self::new(NotifyType::AdditionalIp4Address, v4.octets().to_vec()),
            IpAddr::V6(v6) => Self::new(NotifyType::AdditionalIp6Address, v6.octets().to_vec()),
        }
    }

    /// The address, if it is one of those two and has an address that a packet can be sent to.
    pub fn as_additional_address(&self) -> Option<IpAddr> {
        let addr = match self.notify_type {
            NotifyType::AdditionalIp4Address => {
                IpAddr::from(<[u8; 4]>::try_from(self.data.as_slice()).ok()?)
            }
            NotifyType::AdditionalIp6Address => {
                IpAddr::from(<[u8; 16]>::try_from(self.data.as_slice()).ok()?)
            }
            _ => return None,
        };
        (!addr.is_unspecified() && !addr.is_multicast()).then_some(addr)
    }

    /// NO_NATS_ALLOWED of a message between these addresses of one family; with addresses of two
    /// families it matches no message.
    pub fn no_nats_allowed(source: SocketAddr, destination: SocketAddr) -> Self {
        let mut data = Vec::new();
        for addr in [source.ip(), destination.ip()] {
            match addr {
                IpAddr::V4(v4) => data.extend_from_slice(&v4.octets()),
                IpAddr::V6(v6) => data.extend_from_slice(&v6.octets()),
            }
        }
        for end in [source, destination] {
            data.extend_from_slice(&end.port().to_be_bytes());
        }
        Self::new(NotifyType::NoNatsAllowed, data)
    }

    /// Whether COOKIE2 has a length that it may have.
    pub fn is_cookie2(&self) -> bool {
        self.notify_type == NotifyType::Cookie2 && (8..=64).contains(&self.data.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additional_addresses_are_read_as_written() {
        for text in ["192.0.2.1", "2001:db8::1"] {
            let addr: IpAddr = text.parse().unwrap();
            let notify = NotifyPayload::additional_address(addr);
            assert_eq!(notify.as_additional_address(), Some(addr));
        }
    }

    #[test]
    fn what_is_no_address_to_send_to_is_no_additional_address() {
        let of = |notify_type, data: &[u8]| {
            NotifyPayload::new(notify_type, data.to_vec()).as_additional_address()
        };
        assert_eq!(of(NotifyType::AdditionalIp4Address, &[192, 0, 2]), None);
        assert_eq!(of(NotifyType::AdditionalIp4Address, &[0; 4]), None);
        assert_eq!(of(NotifyType::AdditionalIp4Address, &[224, 0, 0, 1]), None);
        assert_eq!(of(NotifyType::AdditionalIp6Address, &[1; 4]), None);
        assert_eq!(of(NotifyType::Cookie2, &[192, 0, 2, 1]), None);
    }

    #[test]
    fn no_nats_allowed_names_both_ends() {
        let notify = NotifyPayload::no_nats_allowed(
            "192.0.2.1:4500".parse().unwrap(),
            "198.51.100.1:500".parse().unwrap(),
        );
        assert_eq!(
            notify.data,
            [192, 0, 2, 1, 198, 51, 100, 1, 0x11, 0x94, 0x01, 0xf4]
        );
        let v6 = NotifyPayload::no_nats_allowed(
            "[2001:db8::1]:4500".parse().unwrap(),
            "[2001:db8::2]:4500".parse().unwrap(),
        );
        assert_eq!(v6.data.len(), 36);
    }
}
