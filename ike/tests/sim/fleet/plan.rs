// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What happens when.

use std::collections::BTreeSet;
use std::time::Duration;

use super::PEACE;
use super::sites::SITES;
use crate::net::{Conditions, SimRng};
use crate::plane::OpKind;

/// How many things happen in an hour.
const ACTS: usize = 300;

/// Whom something happens to: the gateway, or a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    Hub,
    Site(usize),
}

/// Which SAs a command is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Ike,
    /// By its place in the definition; one that has less has another one at that place.
    Child(usize),
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) struct Act {
    /// Its place in the whole plan.
    pub(crate) number: usize,
    pub(crate) at: Duration,
    pub(crate) what: Deed,
}

/// See [`Act`].
#[derive(Clone, Debug)]
pub(crate) enum Deed {
    /// What it sends, or what is sent to it, is lost for a while.
    Cut {
        who: Who,
        mute: bool,
        deaf: bool,
        lasts: Duration,
    },
    /// The link of a peer is bad for a while.
    Link {
        site: usize,
        conditions: Conditions,
        lasts: Duration,
    },
    /// A NAT forgets its mappings.
    Rebind {
        site: usize,
    },
    /// It is gone without a word, and comes back without memory.
    Crash {
        who: Who,
        lasts: Duration,
    },
    /// It ends politely and starts again.
    Reboot {
        who: Who,
    },
    /// It sleeps; its monotonic clock may stand still meanwhile.
    Sleep {
        who: Who,
        lasts: Duration,
        stands_still: bool,
    },
    /// Somebody sets the wall clock.
    SetClock {
        who: Who,
        ahead: i64,
    },
    /// Its data plane refuses some operations.
    Fault {
        who: Who,
        kind: OpKind,
        count: u32,
    },
    /// Addresses or routes of the host change.
    NetworkChanged {
        who: Who,
    },
    Initiate {
        who: Who,
        site: usize,
        what: What,
    },
    Terminate {
        who: Who,
        site: usize,
        what: What,
        force: bool,
    },
    Rekey {
        who: Who,
        site: usize,
        what: What,
        reauth: bool,
    },
    Install {
        who: Who,
        site: usize,
        child: usize,
    },
    Uninstall {
        who: Who,
        site: usize,
        child: usize,
    },
    /// A definition is loaded that differs a bit.
    Reload {
        who: Who,
        site: usize,
        longer: u64,
    },
    /// A definition is unloaded, and loaded again later.
    Unload {
        who: Who,
        site: usize,
        lasts: Duration,
    },
}

/// Everything that happens in a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) acts: Vec<Act>,
}

impl Plan {
    pub(crate) fn of(seed: u64) -> Self {
        let mut rng = SimRng::new(seed ^ 0x0091_a700_0000_0000);
        let span = u64::try_from(PEACE.as_millis()).unwrap();
        let mut times: Vec<u64> = (0..ACTS).map(|_| rng.next() % span).collect();
        times.sort_unstable();
        let acts = times.into_iter().enumerate().map(|(number, at)| Act {
            number,
            at: Duration::from_millis(at),
            what: deed(&mut rng),
        });
        Self {
            acts: acts.collect(),
        }
    }

    /// Only those acts, if any are named.
    pub(crate) fn only(mut self, acts: Option<&BTreeSet<usize>>) -> Self {
        if let Some(acts) = acts {
            self.acts.retain(|act| acts.contains(&act.number));
        }
        self
    }
}

fn deed(rng: &mut SimRng) -> Deed {
    let site = rng.below(SITES);
    let who = Who::Site(site);
    // What happens to the gateway happens to all.
    let anyone = if rng.chance(60) { Who::Hub } else { who };
    let either = if rng.chance(500) { Who::Hub } else { who };
    let what = match rng.below(3) {
        0 => What::Ike,
        number => What::Child(number - 1),
    };
    let child = rng.below(2);
    let lasts = rng.seconds([5, 60, 400]);
    match rng.below(100) {
        0..12 => {
            let both = rng.chance(600);
            let mute = rng.chance(500);
            Deed::Cut {
                who: anyone,
                mute: both || mute,
                deaf: both || !mute,
                lasts,
            }
        }
        12..24 => {
            let conditions = Conditions {
                delay: 5..=[20, 200, 2000][rng.below(3)],
                loss: [20, 100, 300, 500][rng.below(4)],
                duplication: [0, 50, 300][rng.below(3)],
                mtu: 1500,
            };
            Deed::Link {
                site,
                conditions,
                lasts,
            }
        }
        24..32 => Deed::Rebind { site },
        32..38 => Deed::Crash { who: anyone, lasts },
        38..40 => Deed::Reboot { who: anyone },
        40..44 => Deed::Sleep {
            who: anyone,
            lasts,
            stands_still: rng.chance(500),
        },
        44..48 => {
            let ahead = [-86_400, -300, -10, 0, 10, 300, 86_400][rng.below(7)];
            Deed::SetClock { who: anyone, ahead }
        }
        48..54 => {
            let kinds = [OpKind::AllocSpi, OpKind::InstallSa, OpKind::InstallPolicies];
            Deed::Fault {
                who: either,
                kind: kinds[rng.below(3)],
                count: 1 + u32::try_from(rng.below(4)).unwrap(),
            }
        }
        54..57 => Deed::NetworkChanged { who: either },
        57..67 => Deed::Initiate {
            who: either,
            site,
            what,
        },
        67..73 => Deed::Terminate {
            who: either,
            site,
            what,
            force: rng.chance(200),
        },
        73..89 => Deed::Rekey {
            who: either,
            site,
            what,
            reauth: rng.chance(300),
        },
        89..91 => Deed::Install {
            who: either,
            site,
            child,
        },
        91..93 => Deed::Uninstall {
            who: either,
            site,
            child,
        },
        93..97 => Deed::Reload {
            who: either,
            site,
            longer: rng.next() % 30,
        },
        _ => Deed::Unload {
            who: either,
            site,
            lasts,
        },
    }
}
