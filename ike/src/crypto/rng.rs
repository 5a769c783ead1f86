// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The generator that every random value of the protocol comes from.

use rand_chacha::ChaCha20Rng;
use rand_core::{Rng as _, SeedableRng as _};

/// A ChaCha20 generator. The shell seeds it from the operating system, a simulation from a number.
pub struct Rng(ChaCha20Rng);

impl Rng {
    /// A generator whose whole output follows from `seed`.
    pub fn new(seed: [u8; 32]) -> Self {
        Self(ChaCha20Rng::from_seed(seed))
    }

    /// A seed for another generator, such as that of a [`crate::compute::Job`].
    pub fn seed(&mut self) -> [u8; 32] {
        let mut seed = [0; 32];
        self.fill(&mut seed);
        seed
    }

    /// Fills `out`.
    pub fn fill(&mut self, out: &mut [u8]) {
        self.0.fill_bytes(out);
    }

    /// `len` random octets.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(&mut out);
        out
    }

    /// A random number.
    pub fn u64(&mut self) -> u64 {
        self.0.next_u64()
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
