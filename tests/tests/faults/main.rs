// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel looks like after things went wrong: cycles, crashes, storms, other processes
//! that interfere, names that are taken.
//!
//! Nearly all of it needs a kernel with ESP: `cargo xtask test --only kernel` runs it under
//! User-mode Linux. The tests of `user_plane` need none. `SWANHERD_LONG=1` gives the numbers that
//! a release is judged by, `SWANHERD_SEED=N` repeats a run.

mod bypass;
mod churn;
mod conflicts;
mod crash;
mod cycles;
mod foreign;
mod support;
mod traps;
mod user_plane;
