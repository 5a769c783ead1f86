// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon is killed at points nobody chose, and the next one finds the kernel as it was left.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use swanherd_tests::{Daemon, Message, Node, Pair, Plane, Scenario, subject};

use crate::support::{
    Dice, Site, View, assert_audit_is_clean, assert_reachable, assert_same, command, initiate,
    install_aliens, signal, terminate, times,
};

/// What the daemon is about when it is killed.
#[derive(Clone, Copy, Debug)]
enum Work {
    Establish,
    RekeyChild,
    RekeyIke,
    Terminate,
}

impl Work {
    const ALL: [Self; 4] = [
        Self::Establish,
        Self::RekeyChild,
        Self::RekeyIke,
        Self::Terminate,
    ];

    /// Asks for it and waits until it is done, if that is ever.
    fn run(self, node: &Node) -> Result<(), String> {
        let mut vici = node.vici();
        match self {
            Self::Establish => initiate(&mut vici, "t", "c"),
            Self::RekeyChild => command(&mut vici, "rekey", &Message::new(&[("child", "c")])),
            Self::RekeyIke => command(&mut vici, "rekey", &Message::new(&[("ike", "t")])),
            Self::Terminate => terminate(&mut vici, "t"),
        }
    }
}

#[test]
fn killed_anywhere_it_finds_what_it_left_and_nothing_else() {
    if subject() == Daemon::Charon {
        // charon leaves its states behind; nothing to measure against.
        return;
    }
    let mut dice = Dice::new();
    let mut pair = Scenario {
        // A peer that never learned who began an IKE SA forgets it by time alone.
        settings: "  half_open_timeout = 5\n",
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    pair.left.stop();
    install_aliens(&pair.left.namespace);
    let pristine = View::of(&pair.left.namespace);
    pair.left.start();
    let begun = Instant::now();
    assert_eq!(Work::Establish.run(&pair.left), Ok(()));
    // Half as long again, since what follows the answer may be cut short too.
    let span = u64::try_from(begun.elapsed().as_micros() * 3 / 2).unwrap_or(u64::MAX);

    for point in 0..times(10, 50) {
        let work = Work::ALL[usize::try_from(dice.below(4)).unwrap_or(0)];
        let delay = Duration::from_micros(dice.below(span));
        let with = format!("point {point}: {work:?} for {delay:?}");
        eprintln!("{with}");
        if matches!(work, Work::Establish) {
            let gone = Work::Terminate.run(&pair.left);
            assert_eq!(gone, Ok(()), "{with}\n{}", pair.left.log());
        }

        kill_during(&mut pair.left, delay, move |node| {
            let _ = work.run(node);
        });
        pair.left.start();

        let found = View::of(&pair.left.namespace).without_sockets();
        assert_same(&with, &pristine, &found, &pair.left);
        assert_audit_is_clean(&pair.left);
        pair.left.initiate("c");
        assert_reachable(&pair.left, "10.1.0.1", "10.2.0.1", 5);
        assert_audit_is_clean(&pair.left);
    }

    assert_ends_clean(&mut pair, &pristine);
}

/// Lets `work` run, and kills the daemon after `delay`.
fn kill_during(node: &mut Node, delay: Duration, work: impl FnOnce(&Node) + Send) {
    std::thread::scope(|scope| {
        let node = &*node;
        let working = scope.spawn(move || work(node));
        std::thread::sleep(delay);
        signal(node, Signal::KILL);
        let _ = working.join();
    });
    node.kill();
}

fn assert_ends_clean(pair: &mut Pair, pristine: &View) {
    pair.right
        .wait_until("that the peer has but the last IKE SA", 10, |peer| {
            peer.sas().len() == 1
        });
    pair.left.stop();
    let after = View::of(&pair.left.namespace);
    assert_same("a daemon that ended", pristine, &after, &pair.left);
}

/// Children of the large connection.
const CHILDREN: u16 = 150;

#[test]
fn killed_with_three_hundred_sas_it_clears_them_at_its_start() {
    if subject() == Daemon::Charon {
        return;
    }
    let mut dice = Dice::new();
    let mut pair = Scenario::new(Plane::Kernel).start();
    for (node, own, other) in [(&pair.left, "1", "2"), (&pair.right, "2", "1")] {
        node.configure(&many_children(own, other));
        node.load();
    }
    pair.left.stop();
    install_aliens(&pair.left.namespace);
    let pristine = View::of(&pair.left.namespace);
    let aliens = pristine.list("states").len();
    pair.left.start();
    let begun = Instant::now();
    initiate_all(&pair.left);
    let whole = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let states = View::of(&pair.left.namespace).list("states").len();
    assert_eq!(states, aliens + 2 * usize::from(CHILDREN));

    // With all of them, then somewhere on the way there.
    for round in 0..times(2, 8) {
        if round == 0 {
            pair.left.kill();
        } else {
            let delay = Duration::from_micros(dice.below(whole));
            eprintln!("round {round}: {delay:?} of {whole} us");
            kill_during(&mut pair.left, delay, initiate_all);
        }
        let left = View::of(&pair.left.namespace).list("states").len() - aliens;
        let begun = Instant::now();
        pair.left.start();
        eprintln!(
            "{left} states left behind; ready after {:?}",
            begun.elapsed()
        );

        let found = View::of(&pair.left.namespace).without_sockets();
        assert_same("after the start", &pristine, &found, &pair.left);
        assert_audit_is_clean(&pair.left);
    }
    let mut vici = pair.left.vici();
    assert_eq!(initiate(&mut vici, "t", "c0"), Ok(()));
    assert_reachable(&pair.left, "10.1.0.1", "10.2.0.1", 5);
    assert_ends_clean(&mut pair, &pristine);
}

fn initiate_all(node: &Node) {
    let mut vici = node.vici();
    for child in 0..CHILDREN {
        if initiate(&mut vici, "t", &format!("c{child}")).is_err() {
            // Killed; whoever counts on all of them looks at the kernel.
            return;
        }
    }
}

/// One connection with children `c0`, `c1`, ...: 10.1.0.0/24 to 10.2.0.0/24, 10.2.1.0/24, ...
fn many_children(own: &str, other: &str) -> String {
    let children = (0..CHILDREN).map(|child| {
        // The left side has one network, the right side many.
        let net = |side: &str| {
            let third = if side == "1" { 0 } else { child };
            format!("10.{side}.{third}.0/24")
        };
        (format!("c{child}"), net(own), net(other))
    });
    Site {
        own: &format!("192.0.2.{own}"),
        other: &format!("192.0.2.{other}"),
        names: [own, other],
        children: children.collect(),
        child: "",
    }
    .definitions()
}
