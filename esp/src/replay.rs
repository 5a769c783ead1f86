// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The anti-replay window (RFC 4303 section 3.4.3 and appendix A).

/// Largest window that can be asked for, in packets: 128 KiB of bitmap.
pub const MAX_WINDOW: u32 = 1 << 20;

/// Window used to infer the high half of an extended sequence number when replay checks are off.
const INFERENCE_WINDOW: u64 = 1024;

/// Remembers which of the last `size` sequence numbers have been seen.
///
/// The bitmap is a ring of words with one word to spare, so that advancing clears whole words
/// instead of shifting (RFC 6479).
#[derive(Clone, Debug)]
pub struct ReplayWindow {
    words: Box<[u64]>,
    size: u64,
    top: u64,
}

impl ReplayWindow {
    /// A window over `size` packets; 0 switches replay checks off. Sizes above [`MAX_WINDOW`] are
    /// cut to it.
    pub fn new(size: u32) -> Self {
        let size = size.min(MAX_WINDOW);
        let words = (size as usize).div_ceil(64) + 1;
        Self {
            words: vec![0; words.next_power_of_two()].into_boxed_slice(),
            size: u64::from(size),
            top: 0,
        }
    }

    /// Packets in the window; 0 if replay checks are off.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The highest sequence number that was committed; 0 before the first.
    pub fn top(&self) -> u64 {
        self.top
    }

    /// The full sequence number that the low half `low` stands for (RFC 4303 appendix A2.2), or
    /// `None` if it would be past 2^64.
    pub fn infer(&self, low: u32) -> Option<u64> {
        let window = if self.size == 0 {
            INFERENCE_WINDOW
        } else {
            self.size
        };
        // `low` in the 2^32 block that puts it nearest above the window's bottom.
        let bottom = self.top.saturating_sub(window - 1);
        let candidate = (bottom & !0xffff_ffff) | u64::from(low);
        if candidate >= bottom {
            Some(candidate)
        } else {
            candidate.checked_add(1 << 32)
        }
    }

    /// Whether `seq` is new. To be asked before authentication; changes nothing.
    pub fn is_fresh(&self, seq: u64) -> bool {
        if self.size == 0 || seq > self.top {
            return true;
        }
        self.top - seq < self.size && self.words[self.word(seq)] & bit(seq) == 0
    }

    /// Records `seq`, which [`is_fresh`](Self::is_fresh) allowed and which is authentic.
    pub fn commit(&mut self, seq: u64) {
        if seq > self.top {
            let words = self.words.len() as u64;
            let steps = (seq / 64 - self.top / 64).min(words);
            for step in 0..steps {
                let word = self.word(seq - step * 64);
                self.words[word] = 0;
            }
            self.top = seq;
        } else if self.top - seq >= self.size {
            return;
        }
        let word = self.word(seq);
        self.words[word] |= bit(seq);
    }

    fn word(&self, seq: u64) -> usize {
        // The length is a power of two; the mask keeps the index inside.
        (seq / 64) as usize & (self.words.len() - 1)
    }
}

const fn bit(seq: u64) -> u64 {
    1 << (seq % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// What the window must do, stated as plainly as possible.
    struct Model {
        seen: BTreeSet<u64>,
        top: u64,
        size: u64,
    }

    impl Model {
        fn accepts(&mut self, seq: u64) -> bool {
            let fresh = seq > self.top || (self.top - seq < self.size && !self.seen.contains(&seq));
            if fresh {
                self.seen.insert(seq);
                self.top = self.top.max(seq);
            }
            fresh
        }
    }

    proptest! {
        #[test]
        fn accepts_what_the_model_accepts(
            size in 1u32..300,
            steps in proptest::collection::vec((any::<bool>(), 0u64..400), 1..400),
        ) {
            let mut window = ReplayWindow::new(size);
            let mut model = Model { seen: BTreeSet::new(), top: 0, size: u64::from(size) };
            for (forward, distance) in steps {
                let seq = if forward {
                    model.top + distance
                } else {
                    model.top.saturating_sub(distance)
                };
                let seq = seq.max(1);
                let fresh = window.is_fresh(seq);
                prop_assert_eq!(fresh, model.accepts(seq), "{}", seq);
                if fresh {
                    window.commit(seq);
                }
            }
        }

        #[test]
        fn infers_any_number_near_the_top(top in 1u64..u64::MAX / 2, back in 0u64..64, ahead in 0u64..1 << 31) {
            let mut window = ReplayWindow::new(64);
            window.commit(top);
            let behind = top.saturating_sub(back).max(1);
            prop_assert_eq!(window.infer(behind as u32), Some(behind));
            prop_assert_eq!(window.infer((top + ahead) as u32), Some(top + ahead));
        }
    }

    #[test]
    fn a_window_of_zero_accepts_everything() {
        let mut window = ReplayWindow::new(0);
        window.commit(7);
        assert!(window.is_fresh(7));
        assert!(window.is_fresh(1));
    }

    #[test]
    fn the_end_of_the_number_space_does_not_wrap() {
        let mut window = ReplayWindow::new(64);
        window.commit(u64::MAX);
        assert_eq!(window.infer(u32::MAX), Some(u64::MAX));
        assert_eq!(window.infer(1), None);
    }
}
