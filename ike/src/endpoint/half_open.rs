// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Defence of the first exchange: half-open accounting, cookies, limits (RFC 7296 section 2.6).
//!
//! Two groups of peers are told apart. *Known* are the addresses that the configuration names, that
//! its names resolve to, or that a peer authenticated from not long ago; everybody else is a
//! stranger. Limits hold for strangers. A known peer is never refused for what others do, since
//! after an outage all of them return at once; but an address is easily forged, so whoever profits
//! from being known beyond a limit has to return a cookie first. Cookies cost no memory, and are
//! never withheld from a known address.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::api::{DropReason, Settings};
use crate::crypto::{CookieJar, Rng};

/// How long one cookie secret is used for new cookies; it is accepted for as long again.
const COOKIE_SECRET_LIFE: Duration = Duration::from_secs(10);
/// How long cookies stay in demand after the number of half-open SAs has dropped again, so that a
/// peer that was asked for one is not asked twice.
const COOKIE_COOL_DOWN: Duration = Duration::from_secs(10);

/// The most half-open SAs of strangers, whatever the settings say.
const MAX_HALF_OPEN: usize = 20_000;
/// From so many half-open SAs of one known address on, cookies are demanded of it.
const COOKIES_OF_KNOWN: u32 = 64;
/// The most half-open SAs of one known address, behind which may be many sites. Nearly all of them
/// returned a cookie, so they are not forged.
const MAX_OF_KNOWN: u32 = 1024;
/// How many addresses are remembered that peers authenticated from, and for how long.
const MAX_FAMILIAR: usize = 16_384;
const FAMILIAR_LIFE: Duration = Duration::from_secs(24 * 3600);

/// What to do about an IKE_SA_INIT request for which no SA exists yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Go on.
    Admit {
        /// The peer has proven by a cookie that it is where it claims to be.
        proven: bool,
    },
    /// Answer with a cookie and forget it.
    DemandCookie,
    /// Drop it.
    Drop(DropReason),
}

/// An IKE_SA_INIT request as far as its admission depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Applicant<'a> {
    /// Where it comes from, or claims to.
    pub(crate) source: SocketAddr,
    /// Initiator's SPI.
    pub(crate) spi_i: u64,
    /// Initiator's nonce.
    pub(crate) nonce: &'a [u8],
    /// The cookie that it returns.
    pub(crate) cookie: Option<&'a [u8]>,
    /// Whether the configuration names its address.
    pub(crate) configured: bool,
}

/// Half-open IKE SAs of the responder side.
#[cfg_attr(test, derive(Clone))]
pub(crate) struct HalfOpen {
    total: usize,
    /// By address.
    per_address: BTreeMap<IpAddr, u32>,
    /// By IPv6 network of 64 bits, which one stranger may have for himself.
    per_network: BTreeMap<IpAddr, u32>,
    familiar: BTreeMap<IpAddr, Instant>,
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
            per_network: BTreeMap::new(),
            familiar: BTreeMap::new(),
            jar: CookieJar::new(rng.seed()),
            jar_since: None,
            cookies_until: None,
        }
    }

    /// How many there are.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// How many come from `addr`.
    pub(crate) fn of(&self, addr: IpAddr) -> u32 {
        self.per_address.get(&addr).copied().unwrap_or(0)
    }

    /// Counts one from `addr`.
    pub(crate) fn add(&mut self, addr: IpAddr) {
        self.total += 1;
        *self.per_address.entry(addr).or_default() += 1;
        if addr.is_ipv6() {
            *self.per_network.entry(origin(addr)).or_default() += 1;
        }
    }

    /// One from `addr` is established or gone.
    pub(crate) fn remove(&mut self, addr: IpAddr) {
        self.total = self.total.saturating_sub(1);
        uncount(&mut self.per_address, addr);
        if addr.is_ipv6() {
            uncount(&mut self.per_network, origin(addr));
        }
    }

    /// A peer has authenticated from `addr`, which is known from now on.
    pub(crate) fn authenticated(&mut self, now: Instant, addr: IpAddr) {
        if self.familiar.len() >= MAX_FAMILIAR && !self.familiar.contains_key(&addr) {
            self.familiar
                .retain(|_, at| now.saturating_duration_since(*at) < FAMILIAR_LIFE);
            if self.familiar.len() >= MAX_FAMILIAR {
                return;
            }
        }
        self.familiar.insert(addr, now);
    }

    /// Whether a peer has authenticated from there not long ago.
    pub(crate) fn is_familiar(&self, now: Instant, addr: IpAddr) -> bool {
        self.familiar
            .get(&addr)
            .is_some_and(|at| now.saturating_duration_since(*at) < FAMILIAR_LIFE)
    }

    /// Whether a request may go on.
    pub(crate) fn admit(
        &mut self,
        settings: &Settings,
        rng: &mut Rng,
        now: Instant,
        applicant: &Applicant<'_>,
    ) -> Admission {
        self.rotate(rng, now);
        let addr = applicant.source.ip();
        let known = applicant.configured || self.is_familiar(now, addr);
        let of_address = self.per_address.get(&addr).copied().unwrap_or(0);
        let of_origin = match addr {
            IpAddr::V4(_) => of_address,
            IpAddr::V6(_) => self.per_network.get(&origin(addr)).copied().unwrap_or(0),
        };
        let over = |limit: u32, count: usize| limit > 0 && count >= limit as usize;

        let full = over(settings.init_limit_half_open, self.total) || self.total >= MAX_HALF_OPEN;
        if full && !known {
            return Admission::Drop(DropReason::HalfOpenTotal);
        }
        let blocked = over(settings.block_threshold, of_origin as usize);
        let cookie_total = over(settings.cookie_threshold, self.total);
        if cookie_total {
            self.cookies_until = Some(now + COOKIE_COOL_DOWN);
        }
        let wanted = cookie_total
            || over(settings.cookie_threshold_ip, of_origin as usize)
            || self.cookies_until.is_some_and(|until| now < until)
            || (known && (full || blocked || of_address >= COOKIES_OF_KNOWN));
        let proven = applicant.cookie.is_some_and(|cookie| {
            let Applicant {
                nonce,
                source,
                spi_i,
                ..
            } = *applicant;
            rng.tape()
                .cookie_is_right(|| self.jar.verify(cookie, nonce, source, spi_i))
        });
        if wanted && !proven {
            return Admission::DemandCookie;
        }
        if (blocked && !known) || of_address >= MAX_OF_KNOWN {
            return Admission::Drop(DropReason::HalfOpenPerAddress);
        }
        Admission::Admit { proven }
    }

    /// The cookie to demand.
    pub(crate) fn cookie(&self, rng: &Rng, applicant: &Applicant<'_>) -> Vec<u8> {
        rng.tape().cookie(|| {
            self.jar
                .cookie(applicant.nonce, applicant.source, applicant.spi_i)
        })
    }

    fn rotate(&mut self, rng: &mut Rng, now: Instant) {
        let Some(since) = self.jar_since else {
            self.jar_since = Some(now);
            return;
        };
        let age = now.saturating_duration_since(since);
        if age < COOKIE_SECRET_LIFE {
            return;
        }
        self.jar.rotate(rng.seed());
        if age >= 2 * COOKIE_SECRET_LIFE {
            // Nobody asked for a while: the secret before has had its grace, too.
            self.jar.rotate(rng.seed());
        }
        self.jar_since = Some(now);
    }
}

/// What limits of "one address" count by: the address, or its IPv6 network of 64 bits.
pub(crate) fn origin(addr: IpAddr) -> IpAddr {
    match addr {
        IpAddr::V4(_) => addr,
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
    }
}

fn uncount(counts: &mut BTreeMap<IpAddr, u32>, addr: IpAddr) {
    if let Some(count) = counts.get_mut(&addr) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&addr);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADMITTED: Admission = Admission::Admit { proven: false };
    const PROVEN: Admission = Admission::Admit { proven: true };

    struct Gate {
        half_open: HalfOpen,
        rng: Rng,
        now: Instant,
        settings: Settings,
    }

    impl Gate {
        fn new(settings: Settings) -> Self {
            #[expect(clippy::disallowed_methods, reason = "a test needs some origin")]
            let now = Instant::now();
            let mut rng = Rng::new([3; 32]);
            Self {
                half_open: HalfOpen::new(&mut rng),
                rng,
                now,
                settings,
            }
        }

        fn ask(&mut self, applicant: &Applicant<'_>) -> Admission {
            self.half_open
                .admit(&self.settings, &mut self.rng, self.now, applicant)
        }

        /// Asks again with the cookie that was demanded.
        fn ask_with_cookie(&mut self, applicant: &Applicant<'_>) -> Admission {
            let cookie = self.half_open.cookie(&self.rng, applicant);
            self.ask(&Applicant {
                cookie: Some(&cookie),
                ..*applicant
            })
        }

        fn fill(&mut self, count: u32, addr: &str) {
            for _ in 0..count {
                self.half_open.add(addr.parse().unwrap());
            }
        }
    }

    fn stranger(source: &str) -> Applicant<'static> {
        Applicant {
            source: source.parse().unwrap(),
            spi_i: 7,
            nonce: b"nonce",
            cookie: None,
            configured: false,
        }
    }

    fn peer(source: &str) -> Applicant<'static> {
        Applicant {
            configured: true,
            ..stranger(source)
        }
    }

    fn without_cookies() -> Settings {
        Settings {
            cookie_threshold: 0,
            cookie_threshold_ip: 0,
            ..Settings::default()
        }
    }

    #[test]
    fn strangers_are_blocked_and_configured_peers_prove_their_address_instead() {
        let mut gate = Gate::new(without_cookies());
        gate.fill(gate.settings.block_threshold, "192.0.2.1");

        assert_eq!(
            gate.ask(&stranger("192.0.2.1:500")),
            Admission::Drop(DropReason::HalfOpenPerAddress)
        );
        assert_eq!(gate.ask(&peer("192.0.2.1:500")), Admission::DemandCookie);
        assert_eq!(gate.ask_with_cookie(&peer("192.0.2.1:500")), PROVEN);
    }

    #[test]
    fn a_full_table_refuses_strangers_and_admits_configured_peers_with_a_cookie() {
        let mut gate = Gate::new(Settings {
            init_limit_half_open: 40,
            ..Settings::default()
        });
        for index in 0..40 {
            gate.fill(1, &format!("198.51.100.{index}"));
        }

        let refused = Admission::Drop(DropReason::HalfOpenTotal);
        assert_eq!(gate.ask(&stranger("192.0.2.1:500")), refused);
        assert_eq!(gate.ask_with_cookie(&stranger("192.0.2.1:500")), refused);
        assert_eq!(gate.ask(&peer("192.0.2.1:500")), Admission::DemandCookie);
        assert_eq!(gate.ask_with_cookie(&peer("192.0.2.1:500")), PROVEN);
    }

    #[test]
    fn one_who_forges_a_configured_address_keeps_nobody_out() {
        for settings in [Settings::default(), without_cookies()] {
            let mut gate = Gate::new(settings);
            let mut kept = 0;
            for spi_i in 0..10_000 {
                let forged = Applicant {
                    spi_i,
                    ..peer("192.0.2.1:500")
                };
                if gate.ask(&forged) == ADMITTED {
                    gate.fill(1, "192.0.2.1");
                    kept += 1;
                }
            }

            assert!(kept <= COOKIES_OF_KNOWN, "{kept} SAs are kept");
            assert_eq!(gate.ask_with_cookie(&peer("192.0.2.1:500")), PROVEN);
        }
    }

    #[test]
    fn one_configured_address_cannot_have_all_the_memory() {
        let mut gate = Gate::new(Settings::default());
        let mut kept = 0;
        while gate.ask_with_cookie(&peer("192.0.2.1:500")) == PROVEN {
            gate.fill(1, "192.0.2.1");
            kept += 1;
        }

        assert_eq!(kept, MAX_OF_KNOWN);
    }

    #[test]
    fn an_ipv6_stranger_is_his_network_of_64_bits() {
        let mut gate = Gate::new(without_cookies());
        for host in 1..=gate.settings.block_threshold {
            gate.fill(1, &format!("2001:db8:1:2::{host:x}"));
        }

        let refused = Admission::Drop(DropReason::HalfOpenPerAddress);
        assert_eq!(gate.ask(&stranger("[2001:db8:1:2:ffff::1]:500")), refused);
        assert_eq!(gate.ask(&stranger("[2001:db8:1:3::1]:500")), ADMITTED);
        assert_eq!(
            gate.ask_with_cookie(&peer("[2001:db8:1:2::99]:500")),
            PROVEN
        );
        for host in 1..=gate.settings.block_threshold {
            let addr: IpAddr = format!("2001:db8:1:2::{host:x}").parse().unwrap();
            gate.half_open.remove(addr);
        }
        assert_eq!(gate.ask(&stranger("[2001:db8:1:2:ffff::1]:500")), ADMITTED);
        assert!(gate.half_open.per_address.is_empty() && gate.half_open.per_network.is_empty());
    }

    #[test]
    fn whoever_authenticated_from_an_address_is_known_there_for_a_day() {
        let mut gate = Gate::new(without_cookies());
        let addr: IpAddr = "192.0.2.1".parse().unwrap();
        gate.half_open.authenticated(gate.now, addr);
        gate.fill(gate.settings.block_threshold, "192.0.2.1");

        assert_eq!(gate.ask_with_cookie(&stranger("192.0.2.1:500")), PROVEN);
        gate.now += FAMILIAR_LIFE;
        assert_eq!(
            gate.ask_with_cookie(&stranger("192.0.2.1:500")),
            Admission::Drop(DropReason::HalfOpenPerAddress)
        );
    }

    #[test]
    fn remembered_addresses_are_bounded_and_make_room_when_old() {
        let mut gate = Gate::new(Settings::default());
        let addr = |index: usize| IpAddr::from(u32::try_from(index).unwrap().to_be_bytes());
        for index in 0..MAX_FAMILIAR + 100 {
            gate.half_open.authenticated(gate.now, addr(index));
        }
        assert_eq!(gate.half_open.familiar.len(), MAX_FAMILIAR);
        gate.now += FAMILIAR_LIFE;
        gate.half_open
            .authenticated(gate.now, addr(MAX_FAMILIAR + 100));
        assert_eq!(gate.half_open.familiar.len(), 1);
    }

    #[test]
    fn a_cookie_opens_the_door_only_for_its_own_source() {
        let mut gate = Gate::new(Settings {
            cookie_threshold: 1,
            ..Settings::default()
        });
        gate.fill(1, "198.51.100.1");
        let cookie = gate.half_open.cookie(&gate.rng, &stranger("192.0.2.1:500"));
        let with_cookie = |source| Applicant {
            cookie: Some(&cookie),
            ..stranger(source)
        };

        assert_eq!(
            gate.ask(&stranger("192.0.2.1:500")),
            Admission::DemandCookie
        );
        assert_eq!(gate.ask(&with_cookie("192.0.2.1:500")), PROVEN);
        assert_eq!(
            gate.ask(&with_cookie("192.0.2.2:500")),
            Admission::DemandCookie
        );
    }

    #[test]
    fn a_cookie_is_good_for_one_to_two_lives_of_a_secret_and_no_longer() {
        let mut gate = Gate::new(Settings {
            cookie_threshold: 1,
            ..Settings::default()
        });
        gate.fill(1, "198.51.100.1");
        assert_eq!(
            gate.ask(&stranger("192.0.2.1:500")),
            Admission::DemandCookie
        );
        let cookie = gate.half_open.cookie(&gate.rng, &stranger("192.0.2.1:500"));
        let again = Applicant {
            cookie: Some(&cookie),
            ..stranger("192.0.2.1:500")
        };

        gate.now += COOKIE_SECRET_LIFE;
        assert_eq!(gate.ask(&again), PROVEN);
        gate.now += COOKIE_SECRET_LIFE;
        assert_eq!(gate.ask(&again), Admission::DemandCookie);

        // The same if nobody asks in between.
        let cookie = gate.half_open.cookie(&gate.rng, &stranger("192.0.2.1:500"));
        let again = Applicant {
            cookie: Some(&cookie),
            ..stranger("192.0.2.1:500")
        };
        gate.now += 100 * COOKIE_SECRET_LIFE;
        assert_eq!(gate.ask(&again), Admission::DemandCookie);
    }
}
