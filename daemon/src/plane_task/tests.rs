// SPDX-License-Identifier: Apache-2.0 OR MIT

use swanherd_ipsec::plane::{Mode, Outcome};

use super::*;
use crate::fake_plane::{FakePlane, counters, policies, sa};

/// Queues all of `ops` before the plane gets to any, and returns what was answered.
async fn run(plane: &Arc<FakePlane>, ops: Vec<Op>) -> Vec<Applied> {
    let (answers, mut answered) = mpsc::unbounded_channel();
    let (sender, task) = spawn(Arc::clone(plane), move |applied| {
        answers.send(applied).unwrap();
    });
    let count = ops.len();
    for (token, op) in (0..).zip(ops) {
        sender.send((token, op)).await.unwrap();
    }
    if let Some(gate) = &plane.gate {
        gate.add_permits(count);
    }
    drop(sender);
    task.await.unwrap();
    let mut all = Vec::new();
    while let Some(applied) = answered.recv().await {
        all.push(applied);
    }
    all
}

fn gated() -> Arc<FakePlane> {
    Arc::new(FakePlane::gated())
}

fn install(spis: std::ops::Range<u32>) -> impl Iterator<Item = Op> {
    spis.map(|spi| Op::InstallSa(Box::new(sa(spi))))
}

fn remove(spis: std::ops::Range<u32>) -> impl Iterator<Item = Op> {
    spis.map(|spi| Op::RemoveSa(sa(spi).id()))
}

#[tokio::test]
async fn what_waits_is_handed_over_together_and_answered_in_order() {
    let plane = gated();

    let applied = run(&plane, install(1..601).collect()).await;

    let tokens: Vec<Token> = applied.iter().map(|one| one.token).collect();
    assert_eq!(tokens, (0..600).collect::<Vec<_>>());
    assert!(applied.iter().all(|one| one.answer == Ok(Outcome::Done)));
    let batches = plane.batches();
    assert_eq!(batches.iter().sum::<usize>(), 600);
    assert!(batches.iter().all(|size| *size <= BATCH), "{batches:?}");
    assert!(batches.len() <= 4, "{batches:?}");
}

#[tokio::test]
async fn the_last_counters_of_each_removed_sa_are_told() {
    let plane = gated();
    let ops = install(1..4).chain(remove(1..3)).chain(remove(9..10));

    let applied = run(&plane, ops.collect()).await;

    let last: Vec<_> = applied.iter().filter_map(|one| one.last).collect();
    let expected = [1, 2].map(|spi| (sa(spi).id(), counters(sa(spi).id())));
    assert_eq!(last, expected);
    // Nothing is asked about an SPI that was only reserved.
    assert_eq!(plane.asked(), (0, 2));
}

#[tokio::test]
async fn many_removals_cost_a_dump() {
    let plane = gated();
    let ops = install(1..101).chain(remove(1..101));

    let applied = run(&plane, ops.collect()).await;

    let last = applied.iter().filter_map(|one| one.last);
    assert_eq!(
        last.collect::<Vec<_>>(),
        (1..101)
            .map(|spi| (sa(spi).id(), counters(sa(spi).id())))
            .collect::<Vec<_>>()
    );
    // The runtime may have let the plane in between while the operations were queued.
    let (dumps, single) = plane.asked();
    assert!(dumps <= 2 && single == 0, "{dumps} {single}");
}

#[tokio::test]
async fn a_few_removals_of_very_many_cost_no_dump() {
    let plane = gated();
    let ops = install(1..1001).chain(remove(1..11));

    let _ = run(&plane, ops.collect()).await;

    assert_eq!(plane.asked(), (0, 10));
}

#[tokio::test]
async fn an_sa_that_was_moved_is_found_under_its_new_address() {
    let plane = gated();
    let moved = SaId {
        dst: "192.0.2.77".parse().unwrap(),
        ..sa(1).id()
    };
    let update = Op::UpdateSa {
        id: sa(1).id(),
        src: "192.0.2.2".parse().unwrap(),
        dst: moved.dst,
        encap: None,
    };
    let ops = install(1..2).chain([update, Op::RemoveSa(moved)]);

    let _ = run(&plane, ops.collect()).await;

    assert_eq!(plane.asked(), (0, 1));
}

#[tokio::test]
async fn traps_and_shunts_stand_from_success_to_removal() {
    let plane = gated();
    let protect = PolicyAction::Protect {
        mode: Mode::Tunnel,
        local: "192.0.2.1".parse().unwrap(),
        remote: "192.0.2.2".parse().unwrap(),
        reqid: 1,
        spi: 0,
    };
    let refused = PolicySet {
        local: Vec::new(),
        ..policies(4, PolicyAction::Discard, false)
    };
    let sets = [
        policies(1, protect, true),
        policies(2, PolicyAction::Bypass, false),
        policies(3, protect, false),
        refused,
    ];
    let ops = sets
        .into_iter()
        .map(|set| Op::InstallPolicies(Box::new(set)))
        .chain([Op::RemovePolicies(1)]);

    let applied = run(&plane, ops.collect()).await;

    let standing = applied.iter().map(|one| match &one.standing {
        Some(Standing::Installed(set)) => format!("+{}", set.id),
        Some(Standing::Removed(id)) => format!("-{id}"),
        None => String::new(),
    });
    assert_eq!(standing.collect::<Vec<_>>(), ["+1", "+2", "-3", "", "-1"]);
}
