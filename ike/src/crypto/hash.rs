// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hashes that stand on the wire: NAT detection and cookies.

use std::net::SocketAddr;

use ring::{digest, hmac};

/// SHA-1 over SPIs, address and port, as NAT_DETECTION_SOURCE_IP and NAT_DETECTION_DESTINATION_IP
/// carry it (RFC 7296 section 2.23). SPIs are in host order.
pub fn nat_detection(spi_i: u64, spi_r: u64, addr: SocketAddr) -> [u8; 20] {
    let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    context.update(&spi_i.to_be_bytes());
    context.update(&spi_r.to_be_bytes());
    match addr {
        SocketAddr::V4(v4) => context.update(&v4.ip().octets()),
        SocketAddr::V6(v6) => context.update(&v6.ip().octets()),
    }
    context.update(&addr.port().to_be_bytes());
    let mut out = [0; 20];
    out.copy_from_slice(context.finish().as_ref());
    out
}

/// SHA-1, for key ids and certificate requests.
pub fn sha1(data: &[u8]) -> [u8; 20] {
    let mut out = [0; 20];
    out.copy_from_slice(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, data).as_ref());
    out
}

/// Makes and checks cookies without state per peer (RFC 7296 section 2.6). The secret is replaced
/// with [`CookieJar::rotate`]; cookies of the secret before are still accepted.
#[cfg_attr(test, derive(Clone))]
pub struct CookieJar {
    version: u8,
    current: hmac::Key,
    previous: Option<hmac::Key>,
}

impl CookieJar {
    /// A jar with a first secret.
    pub fn new(secret: [u8; 32]) -> Self {
        Self {
            version: 0,
            current: hmac::Key::new(hmac::HMAC_SHA256, &secret),
            previous: None,
        }
    }

    /// Replaces the secret.
    pub fn rotate(&mut self, secret: [u8; 32]) {
        let new = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        self.previous = Some(core::mem::replace(&mut self.current, new));
        self.version = self.version.wrapping_add(1);
    }

    /// The cookie for an IKE_SA_INIT request with this nonce, source and initiator SPI: the number
    /// of the secret and a 32 octet HMAC.
    pub fn cookie(&self, nonce: &[u8], source: SocketAddr, spi_i: u64) -> Vec<u8> {
        let mut out = vec![self.version];
        out.extend_from_slice(
            hmac::sign(
                &self.current,
                &Self::input(self.version, nonce, source, spi_i),
            )
            .as_ref(),
        );
        out
    }

    /// Whether `cookie` is one that this jar gave for the same values.
    pub fn verify(&self, cookie: &[u8], nonce: &[u8], source: SocketAddr, spi_i: u64) -> bool {
        let Some((&version, tag)) = cookie.split_first() else {
            return false;
        };
        let key = if version == self.version {
            &self.current
        } else if version == self.version.wrapping_sub(1)
            && let Some(previous) = &self.previous
        {
            previous
        } else {
            return false;
        };
        hmac::verify(key, &Self::input(version, nonce, source, spi_i), tag).is_ok()
    }

    fn input(version: u8, nonce: &[u8], source: SocketAddr, spi_i: u64) -> Vec<u8> {
        let mut input = vec![version];
        match source {
            SocketAddr::V4(v4) => input.extend_from_slice(&v4.ip().octets()),
            SocketAddr::V6(v6) => input.extend_from_slice(&v6.ip().octets()),
        }
        input.extend_from_slice(&source.port().to_be_bytes());
        input.extend_from_slice(&spi_i.to_be_bytes());
        input.extend_from_slice(nonce);
        input
    }
}

impl core::fmt::Debug for CookieJar {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CookieJar")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> SocketAddr {
        "192.0.2.7:500".parse().unwrap()
    }

    #[test]
    fn a_cookie_is_good_for_its_own_request_only() {
        let jar = CookieJar::new([1; 32]);
        let cookie = jar.cookie(b"nonce", source(), 5);

        assert!(jar.verify(&cookie, b"nonce", source(), 5));
        assert!(!jar.verify(&cookie, b"other", source(), 5));
        assert!(!jar.verify(&cookie, b"nonce", "192.0.2.8:500".parse().unwrap(), 5));
        assert!(!jar.verify(&cookie, b"nonce", source(), 6));
        assert!(!jar.verify(&[], b"nonce", source(), 5));
    }

    #[test]
    fn a_cookie_survives_one_rotation() {
        let mut jar = CookieJar::new([1; 32]);
        let cookie = jar.cookie(b"nonce", source(), 5);

        jar.rotate([2; 32]);
        assert!(jar.verify(&cookie, b"nonce", source(), 5));
        jar.rotate([3; 32]);
        assert!(!jar.verify(&cookie, b"nonce", source(), 5));
    }

    #[test]
    fn nat_detection_covers_spis_address_and_port() {
        // SHA-1 of 0000000000000001 0000000000000002 c0000207 01f4.
        let expected = sha1(&[
            0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 192, 0, 2, 7, 0x01, 0xf4,
        ]);

        assert_eq!(nat_detection(1, 2, source()), expected);
        assert_ne!(nat_detection(1, 0, source()), expected);
    }
}
