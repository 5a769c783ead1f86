// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the kernel find our policies by hash.
//!
//! Policies whose prefixes are shorter than the thresholds, which are 32 and 128 bits unless set,
//! stand in lists: each removal searches them, and on kernels before 5.0 each packet's lookup does
//! as well. So the thresholds follow the lengths in use. Each change makes the kernel sort all
//! policies anew; it is made some time after the first policy of a new length, not with each.
//!
//! Thresholds that someone else has set are left alone. Those that were in force before ours are
//! in the ledger, and put back at the end or by the next run.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use netlink_packet_xfrm::XfrmMessage;
use netlink_packet_xfrm::policy::{GetSpdInfoMessage, NewSpdInfoMessage, SpdHThresh, SpdInfoAttrs};
use tokio::sync::Notify;

use super::Shared;
use super::message::attributes;
use crate::netlink::NetlinkError;
use crate::reconcile::{Record, Shape, Shapes, Thresholds};

/// How long changes are gathered before the thresholds follow.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Sorting so many policies anew is no work.
const FEW: usize = 1000;
/// Lengths of each side that are considered, so that no configuration makes this slow.
const CANDIDATES: usize = 16;
/// So much more policies than at the last choice make another one worth a look.
const GROWTH: usize = 4;

/// Watches over the thresholds.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    wake: Notify,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Thresholds in force, IPv4's first; `None` where they are not ours to set.
    current: [Option<Thresholds>; 2],
    /// Those before ours.
    original: [Option<Thresholds>; 2],
    /// The shapes of the last choice, and how many policies there were.
    seen: Vec<Shape>,
    count: usize,
}

impl Keeper {
    /// Tells that policies have changed.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts back what an earlier run had changed, and learns what is in force.
pub(super) async fn begin(shared: &Shared) {
    let recorded: Vec<Thresholds> = {
        let books = shared.books();
        let thresholds = |record: &Record| match record {
            Record::Thresholds(old) => Some(*old),
            _ => None,
        };
        books
            .journal
            .entries()
            .iter()
            .filter_map(thresholds)
            .collect()
    };
    for old in recorded {
        put_back(shared, old).await;
    }
    let current = match get(shared).await {
        Ok(current) => current,
        Err(error) => {
            tracing::debug!(%error, "cannot read the hash thresholds of policies");
            return;
        }
    };
    for (place, found) in current.into_iter().enumerate() {
        let Some(found) = found else {
            continue;
        };
        let whole = width(found.v6);
        if (found.local, found.remote) == (whole, whole) {
            shared.thresholds.state().current[place] = Some(found);
        } else {
            tracing::info!(
                v6 = found.v6,
                local = found.local,
                remote = found.remote,
                "someone has set hash thresholds of policies; they stay"
            );
        }
    }
}

/// Follows the policies until the task is ended.
pub(super) async fn run(shared: Arc<Shared>) {
    loop {
        shared.thresholds.wake.notified().await;
        // As long as there are few policies it costs nothing to follow at once, and thousands that
        // come in one go are hashed from the beginning.
        let count: usize = shared.books().desired.shapes().values().sum();
        if count > FEW {
            tokio::time::sleep(DEBOUNCE).await;
        }
        follow(&shared).await;
    }
}

/// Puts back what was in force before ours.
pub(super) async fn end(shared: &Shared) {
    let original = std::mem::take(&mut shared.thresholds.state().original);
    for old in original.into_iter().flatten() {
        put_back(shared, old).await;
    }
}

async fn put_back(shared: &Shared, old: Thresholds) {
    match set(shared, old).await {
        Ok(()) => shared.books().strike_out(&Record::Thresholds(old)),
        Err(error) => tracing::warn!(%error, "cannot put back the hash thresholds of policies"),
    }
}

async fn follow(shared: &Shared) {
    let wanted = {
        let books = shared.books();
        let shapes = books.desired.shapes();
        let count = shapes.values().sum();
        let mut state = shared.thresholds.state();
        let same = shapes.keys().eq(&state.seen);
        if same && count < state.count.saturating_mul(GROWTH) {
            return;
        }
        state.seen = shapes.keys().copied().collect();
        state.count = count;
        [choose(shapes, false), choose(shapes, true)]
    };
    for (place, wanted) in wanted.into_iter().enumerate() {
        let current = shared.thresholds.state().current[place];
        let (Some(current), Some(wanted)) = (current, wanted) else {
            continue;
        };
        if current == wanted {
            continue;
        }
        let first = shared.thresholds.state().original[place].is_none();
        if first {
            shared.books().record(Record::Thresholds(current));
        }
        match set(shared, wanted).await {
            Ok(()) => {
                tracing::debug!(
                    v6 = wanted.v6,
                    local = wanted.local,
                    remote = wanted.remote,
                    "hash thresholds of policies follow the prefixes in use"
                );
                let mut state = shared.thresholds.state();
                state.current[place] = Some(wanted);
                state.original[place].get_or_insert(current);
            }
            Err(error) => {
                tracing::info!(%error, "the kernel keeps its hash thresholds of policies");
                shared.thresholds.state().current[place] = None;
                if first {
                    shared.books().strike_out(&Record::Thresholds(current));
                }
            }
        }
    }
}

/// The thresholds with which a removal has to look at the fewest policies, or `None` if no policy
/// gains from any.
fn choose(shapes: &Shapes, v6: bool) -> Option<Thresholds> {
    let shapes: Vec<(&Shape, usize)> = shapes
        .iter()
        .filter(|(shape, _)| shape.v6 == v6)
        .map(|(shape, count)| (shape, *count))
        .collect();
    let locals = most_used(shapes.iter().map(|(shape, count)| (shape.local, *count)));
    let remotes = most_used(shapes.iter().map(|(shape, count)| (shape.remote, *count)));
    let pairs = locals
        .iter()
        .flat_map(|local| remotes.iter().map(move |remote| (*local, *remote)));
    pairs
        .filter(|(local, remote)| local + remote > 0)
        .map(|(local, remote)| {
            let hashed: usize = shapes
                .iter()
                .filter(|(shape, _)| shape.local >= local && shape.remote >= remote)
                .map(|(_, count)| count)
                .sum();
            let listed: usize = shapes.iter().map(|(_, count)| count).sum::<usize>() - hashed;
            // Few bits make few chains. More than 20 bits tell all policies apart.
            let chain = hashed >> u32::from(local.saturating_add(remote)).min(20);
            (hashed, listed + chain, local, remote)
        })
        .filter(|(hashed, ..)| *hashed > 0)
        .min_by_key(|(_, cost, local, remote)| {
            (
                *cost,
                std::cmp::Reverse(u16::from(*local) + u16::from(*remote)),
            )
        })
        .map(|(_, _, local, remote)| Thresholds { v6, local, remote })
}

fn most_used(lengths: impl Iterator<Item = (u8, usize)>) -> Vec<u8> {
    let mut counts = std::collections::BTreeMap::<u8, usize>::new();
    for (length, count) in lengths {
        *counts.entry(length).or_default() += count;
    }
    let mut counts: Vec<(u8, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.truncate(CANDIDATES);
    counts.into_iter().map(|(length, _)| length).collect()
}

const fn width(v6: bool) -> u8 {
    if v6 { 128 } else { 32 }
}

async fn set(shared: &Shared, wanted: Thresholds) -> Result<(), NetlinkError> {
    let value = SpdHThresh {
        lbits: wanted.local,
        rbits: wanted.remote,
    };
    let attribute = if wanted.v6 {
        SpdInfoAttrs::SpdIpv6HThresh(value)
    } else {
        SpdInfoAttrs::SpdIpv4HThresh(value)
    };
    let message = XfrmMessage::NewSpdInfo(NewSpdInfoMessage {
        flags: 0,
        nlas: vec![attribute],
    });
    shared.requests.command(&message, 0).await
}

/// The thresholds in force. Kernels before 3.18 have none.
async fn get(shared: &Shared) -> Result<[Option<Thresholds>; 2], NetlinkError> {
    let message = XfrmMessage::GetSpdInfo(GetSpdInfoMessage::default());
    let parse = |_: u16, payload: &[u8]| {
        let mut found = [None; 2];
        for (kind, value) in attributes(payload, size_of::<u32>()) {
            let v6 = match kind {
                netlink_packet_xfrm::XFRMA_SPD_IPV4_HTHRESH => false,
                netlink_packet_xfrm::XFRMA_SPD_IPV6_HTHRESH => true,
                _ => continue,
            };
            let [local, remote, ..] = *value else {
                continue;
            };
            found[usize::from(v6)] = Some(Thresholds { v6, local, remote });
        }
        Some(found)
    };
    let mut answers = shared.requests.request(&message, 0, parse).await?;
    Ok(answers.pop().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(shapes: &[(u8, u8, usize)], v6: bool) -> Option<(u8, u8)> {
        let shapes = shapes
            .iter()
            .map(|&(local, remote, count)| (Shape { v6, local, remote }, count))
            .collect();
        choose(&shapes, v6).map(|chosen| (chosen.local, chosen.remote))
    }

    #[test]
    fn the_lengths_in_use_become_the_thresholds() {
        assert_eq!(chosen(&[(16, 24, 3000)], false), Some((16, 24)));
        assert_eq!(chosen(&[(24, 24, 9), (16, 24, 9)], false), Some((16, 24)));
        assert_eq!(chosen(&[(32, 32, 9)], false), Some((32, 32)));
        assert_eq!(chosen(&[(64, 56, 9)], true), Some((64, 56)));
    }

    #[test]
    fn a_few_wide_policies_do_not_spoil_the_hash_of_many() {
        // All traffic through one tunnel, beside a thousand networks.
        assert_eq!(chosen(&[(0, 0, 3), (16, 24, 3000)], false), Some((16, 24)));
    }

    #[test]
    fn one_side_is_enough_to_tell_policies_apart() {
        assert_eq!(chosen(&[(0, 24, 3000)], false), Some((0, 24)));
    }

    #[test]
    fn policies_for_everything_gain_nothing() {
        assert_eq!(chosen(&[(0, 0, 3000)], false), None);
        assert_eq!(chosen(&[], false), None);
    }

    #[test]
    fn the_families_do_not_mix() {
        let shape = |v6, length| Shape {
            v6,
            local: length,
            remote: length,
        };
        let shapes = [(shape(false, 24), 3), (shape(true, 64), 3)].into();
        let lengths = |v6| choose(&shapes, v6).map(|t| (t.local, t.remote));
        assert_eq!(
            (lengths(false), lengths(true)),
            (Some((24, 24)), Some((64, 64)))
        );
    }

    #[test]
    fn every_length_at_once_is_decided_quickly() {
        let all: Vec<(u8, u8, usize)> = (0..=128)
            .flat_map(|local| (0..=128).map(move |remote| (local, remote, 1)))
            .collect();
        let begun = std::time::Instant::now();
        assert!(chosen(&all, true).is_some());
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}
