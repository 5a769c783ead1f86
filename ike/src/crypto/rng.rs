// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The generator that every random value of the protocol comes from.

use rand_chacha::ChaCha20Rng;
use rand_core::{Rng as _, SeedableRng as _};

use crate::record::tape::Tape;

/// A ChaCha20 generator. The shell seeds it from the operating system, a simulation from a number.
#[cfg_attr(test, derive(Clone))]
pub struct Rng {
    generator: ChaCha20Rng,
    tape: Tape,
}

impl Rng {
    /// A generator whose whole output follows from `seed`.
    pub fn new(seed: [u8; 32]) -> Self {
        Self {
            generator: ChaCha20Rng::from_seed(seed),
            tape: Tape::default(),
        }
    }

    /// A seed for another generator, such as that of a [`crate::compute::Job`], or another secret:
    /// it is never recorded.
    pub fn seed(&mut self) -> [u8; 32] {
        self.tape.secret(|| {
            let mut seed = [0; 32];
            self.generator.fill_bytes(&mut seed);
            seed
        })
    }

    /// Fills `out`.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.tape.random(out, |out| self.generator.fill_bytes(out));
    }

    /// `len` random octets.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(&mut out);
        out
    }

    /// A random number.
    pub fn u64(&mut self) -> u64 {
        let mut octets = [0; 8];
        self.fill(&mut octets);
        u64::from_le_bytes(octets)
    }

    /// A random number below `bound`, or 0 if `bound` is 0. For jitter, not for keys: the bias is
    /// up to `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.u64().checked_rem(bound).unwrap_or(0)
    }

    /// An IKE SPI; never 0, which means "not chosen yet" on the wire.
    pub fn spi(&mut self) -> u64 {
        loop {
            let spi = self.u64();
            if spi != 0 {
                return spi;
            }
        }
    }

    /// What records or replays this generator, and all that depends on secrets.
    pub(crate) fn tape(&self) -> &Tape {
        &self.tape
    }

    /// Has what this generator gives recorded or replayed from now on.
    pub(crate) fn attach(&mut self, tape: Tape) {
        self.tape = tape;
    }
}

impl core::fmt::Debug for Rng {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Rng")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_output() {
        let (mut a, mut b) = (Rng::new([7; 32]), Rng::new([7; 32]));

        assert_eq!(a.bytes(100), b.bytes(100));
        assert_eq!(a.seed(), b.seed());
    }

    #[test]
    fn below_stays_below() {
        let mut rng = Rng::new([1; 32]);

        assert!((0..1000).all(|_| rng.below(7) < 7));
        assert_eq!(rng.below(0), 0);
    }
}
