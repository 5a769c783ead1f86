// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defence of the first exchange: half-open accounting, cookies, limits (RFC 7296 section 2.6).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::api::{DropReason, Settings};
use crate::crypto::{CookieJar, Rng};

/// How long one cookie secret is used for new cookies; it is accepted for as long again.
const COOKIE_SECRET_LIFE: Duration = Duration::from_secs(10);
/// How long cookies stay in demand after the number of half-open SAs has dropped again, so that a
/// peer that was asked for one is not asked twice.
const COOKIE_COOL_DOWN: Duration = Duration::from_secs(10);

/// The most half-open SAs of peers that the configuration does not name, whatever the settings say.
const MAX_HALF_OPEN: usize = 20_000;

/// What to do about an IKE_SA_INIT request for which no SA exists yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Go on.
    Admit,
    /// Answer with a cookie and forget it.
    DemandCookie,
    /// Drop it.
    Drop(DropReason),
}

/// Half-open IKE SAs of the responder side.
pub(crate) struct HalfOpen {
    total: usize,
    per_address: BTreeMap<IpAddr, u32>,
    jar: CookieJar,
    jar_since: Option<Instant>,
    cookies_until: Option<Instant>,
}

impl HalfOpen {
    /// Nothing is half open; the first cookie secret comes from `rng`.
    pub(crate) fn new(rng: &mut Rng) -> Self {
        Self {
            total: 0,
            per_address: BTreeMap::new(),
            jar: CookieJar::new(rng.seed()),
            jar_since: None,
            cookies_until: None,
        }
    }

    /// How many there are.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Counts one from `addr`.
    pub(crate) fn add(&mut self, addr: IpAddr) {
        self.total += 1;
        *self.per_address.entry(addr).or_default() += 1;
    }

    /// One from `addr` is established or gone.
    pub(crate) fn remove(&mut self, addr: IpAddr) {
        self.total = self.total.saturating_sub(1);
        if let Some(count) = self.per_address.get_mut(&addr) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.per_address.remove(&addr);
            }
        }
    }

    /// Whether a request from `source` may go on. `known_peer` is an address that the
    /// configuration names; the block threshold never applies to it, lest a mass outage lock out
    /// the very peers that are to return.
    #[expect(
        clippy::too_many_arguments,
        reason = "everything that the decision rests on"
    )]
    pub(crate) fn admit(
        &mut self,
        settings: &Settings,
        rng: &mut Rng,
        now: Instant,
        source: SocketAddr,
        spi_i: u64,
        nonce: &[u8],
        cookie: Option<&[u8]>,
        known_peer: bool,
    ) -> Admission {
        self.rotate(rng, now);
        let here = self.per_address.get(&source.ip()).copied().unwrap_or(0);
        let over = |limit: u32, count: usize| limit > 0 && count >= limit as usize;

        let full = over(settings.init_limit_half_open, self.total) || self.total >= MAX_HALF_OPEN;
        if full && !known_peer {
            return Admission::Drop(DropReason::HalfOpenTotal);
        }
        let cookie_total = over(settings.cookie_threshold, self.total);
        if cookie_total {
            self.cookies_until = Some(now + COOKIE_COOL_DOWN);
        }
        let wanted = cookie_total
            || over(settings.cookie_threshold_ip, here as usize)
            || self.cookies_until.is_some_and(|until| now < until);
        if wanted {
            let valid = cookie.is_some_and(|cookie| self.jar.verify(cookie, nonce, source, spi_i));
            if !valid {
                return Admission::DemandCookie;
            }
        }
        if !known_peer && over(settings.block_threshold, here as usize) {
            return Admission::Drop(DropReason::HalfOpenPerAddress);
        }
        Admission::Admit
    }

    /// The cookie to demand.
    pub(crate) fn cookie(&self, nonce: &[u8], source: SocketAddr, spi_i: u64) -> Vec<u8> {
        self.jar.cookie(nonce, source, spi_i)
    }

    fn rotate(&mut self, rng: &mut Rng, now: Instant) {
        match self.jar_since {
            Some(since) if now.saturating_duration_since(since) < COOKIE_SECRET_LIFE => {}
            Some(_) => {
                self.jar.rotate(rng.seed());
                self.jar_since = Some(now);
            }
            None => self.jar_since = Some(now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_peers_are_never_blocked_but_strangers_are() {
        #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
        let now = Instant::now();
        let mut rng = Rng::new([3; 32]);
        let mut half_open = HalfOpen::new(&mut rng);
        let source: SocketAddr = "192.0.2.1:500".parse().unwrap();
        let settings = Settings {
            cookie_threshold: 0,
            cookie_threshold_ip: 0,
            ..Settings::default()
        };
        for _ in 0..settings.block_threshold {
            half_open.add(source.ip());
        }
        let mut ask =
            |known| half_open.admit(&settings, &mut rng, now, source, 1, b"n", None, known);

        assert_eq!(ask(false), Admission::Drop(DropReason::HalfOpenPerAddress));
        assert_eq!(ask(true), Admission::Admit);
    }

    #[test]
    fn a_cookie_opens_the_door_only_for_its_own_source() {
        #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
        let now = Instant::now();
        let mut rng = Rng::new([4; 32]);
        let mut half_open = HalfOpen::new(&mut rng);
        let source: SocketAddr = "192.0.2.1:500".parse().unwrap();
        let other: SocketAddr = "192.0.2.2:500".parse().unwrap();
        let settings = Settings {
            cookie_threshold: 1,
            ..Settings::default()
        };
        half_open.add("198.51.100.1".parse().unwrap());
        let cookie = half_open.cookie(b"nonce", source, 7);
        let mut ask = |from, cookie| {
            half_open.admit(&settings, &mut rng, now, from, 7, b"nonce", cookie, false)
        };

        assert_eq!(ask(source, None), Admission::DemandCookie);
        assert_eq!(ask(source, Some(&cookie[..])), Admission::Admit);
        assert_eq!(ask(other, Some(&cookie[..])), Admission::DemandCookie);
    }
}
