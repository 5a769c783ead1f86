// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is set off in the explored space, and what may be left at the end.

use std::ops::RangeInclusive;

use swanherd_ipsec::registry::KeyExchangeId;

use super::plane::OpKind;
use super::world::{ALICE, BOB, PlaneFault};
use crate::endpoint::tests::harness;
use crate::sa::env::Mutant;
use crate::wire::{NoncePayload, Payload, SaPayload, SaProposal, TsPayload};

/// What an operator, a lifetime or a strange peer sets off, once, at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// Rekey.
    Rekey(Which),
    /// Delete.
    Terminate(Which),
    /// Bring up the other child.
    Initiate,
    /// The data plane refuses the next operation of this kind.
    Fail(OpKind),
    /// Ask for a rekey of a child that has been rekeyed, as no endpoint does.
    RekeyAgain,
    /// Delete a child that never was.
    DeleteUnknown,
}

/// Of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// The CHILD SA.
    Child,
    /// The IKE SA.
    Ike,
}

/// How often the network and the clocks may misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// Datagrams that are lost.
    pub(super) lost: u8,
    /// Datagrams that arrive twice.
    pub(super) doubled: u8,
    /// Timers that fire while something is under way, or before the other side's.
    pub(super) early: u8,
}

impl Budget {
    pub(super) const NONE: Self = Self::of(0, 0, 0);
    /// More than any schedule needs.
    pub(super) const ALL: Self = Self::of(u8::MAX, u8::MAX, u8::MAX);

    pub(super) const fn of(lost: u8, doubled: u8, early: u8) -> Self {
        Self {
            lost,
            doubled,
            early,
        }
    }
}

/// How many of each may be left.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) ike_sas: RangeInclusive<usize>,
    pub(super) children: RangeInclusive<usize>,
}

/// One exploration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub(super) budget: Budget,
    /// Beyond so many steps, nothing is lost and only one way is followed.
    pub(super) depth: usize,
}

impl Pass {
    const fn of(lost: u8, doubled: u8, early: u8, depth: usize) -> Self {
        Self {
            budget: Budget::of(lost, doubled, early),
            depth,
        }
    }
}

impl std::str::FromStr for Pass {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut numbers = text.split(',').map(str::parse::<u8>);
        let mut next = || numbers.next().unwrap_or(Ok(0));
        Ok(Self {
            budget: Budget::of(next()?, next()?, next()?),
            depth: usize::from(next()?),
        })
    }
}

/// Explorations in `cargo test`, in `cargo xtask test`, and with `--long`.
pub(super) type Passes = [&'static [Pass]; 3];

/// More steps than any way to the end has.
const WHOLE: usize = 200;

const TWO_DEEDS: Passes = [
    &[Pass::of(0, 0, 0, WHOLE)],
    &[Pass::of(2, 1, 0, WHOLE), Pass::of(1, 0, 1, WHOLE)],
    &[Pass::of(2, 1, 1, WHOLE), Pass::of(1, 1, 2, WHOLE)],
];
const THREE_DEEDS: Passes = [
    &[Pass::of(0, 0, 0, 8)],
    &[Pass::of(2, 0, 0, WHOLE), Pass::of(0, 1, 0, WHOLE)],
    &[Pass::of(2, 1, 0, WHOLE), Pass::of(1, 0, 1, WHOLE)],
];
const SLOW: Passes = [
    &[Pass::of(0, 0, 0, 8)],
    &[Pass::of(2, 0, 0, WHOLE)],
    &[Pass::of(2, 1, 0, WHOLE), Pass::of(1, 0, 1, WHOLE)],
];
/// For what has to be found.
const FIRST: Passes = [&[Pass::of(0, 0, 0, WHOLE)]; 3];

/// One part of the explored space.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) deeds: &'static [(usize, Deed)],
    /// Answers of data planes and computations arrive at any moment, rather than at once.
    pub(super) slow: bool,
    /// Key exchange methods of CHILD SAs.
    pub(super) methods: &'static [KeyExchangeId],
    /// At no moment may a packet of the child `net` be lost.
    pub(super) lossless: bool,
    pub(super) ends: Ends,
    pub(super) mutants: [Option<Mutant>; 2],
    pub(super) faults: [Option<PlaneFault>; 2],
    pub(super) passes: Passes,
}

/// What most have in common.
pub(super) const BASE: Scenario = Scenario {
    name: "",
    deeds: &[],
    slow: false,
    methods: &[],
    lossless: true,
    ends: Ends {
        ike_sas: 1..=1,
        children: 1..=1,
    },
    mutants: [None, None],
    faults: [None, None],
    passes: TWO_DEEDS,
};

const CHILD: Deed = Deed::Rekey(Which::Child);
const IKE: Deed = Deed::Rekey(Which::Ike);
const NO_CHILD: Deed = Deed::Terminate(Which::Child);
const NO_IKE: Deed = Deed::Terminate(Which::Ike);

/// With the other child.
const TWO: Ends = Ends {
    ike_sas: 1..=1,
    children: 2..=2,
};
/// The child may be gone.
const MAYBE: Ends = Ends {
    ike_sas: 1..=1,
    children: 0..=1,
};
/// Everything may be gone.
const NOTHING: Ends = Ends {
    ike_sas: 0..=1,
    children: 0..=1,
};

/// The collisions of RFC 7296 sections 2.8 and 2.25.
pub(super) static COLLISIONS: &[Scenario] = &[
    Scenario {
        name: "child-child",
        deeds: &[(ALICE, CHILD), (BOB, CHILD)],
        ..BASE
    },
    Scenario {
        name: "child-child-slow",
        deeds: &[(ALICE, CHILD), (BOB, CHILD)],
        slow: true,
        passes: SLOW,
        ..BASE
    },
    Scenario {
        name: "child-child-pfs-slow",
        deeds: &[(ALICE, CHILD), (BOB, CHILD)],
        slow: true,
        passes: SLOW,
        methods: &[KeyExchangeId::Ecp256],
        ..BASE
    },
    Scenario {
        name: "ike-ike",
        deeds: &[(ALICE, IKE), (BOB, IKE)],
        ..BASE
    },
    Scenario {
        name: "ike-ike-slow",
        deeds: &[(ALICE, IKE), (BOB, IKE)],
        slow: true,
        passes: SLOW,
        ..BASE
    },
    Scenario {
        name: "ike-child",
        deeds: &[(ALICE, IKE), (BOB, CHILD)],
        ..BASE
    },
    Scenario {
        name: "ike-child-slow",
        deeds: &[(ALICE, IKE), (BOB, CHILD)],
        slow: true,
        passes: SLOW,
        ..BASE
    },
    Scenario {
        name: "ike-and-child-of-one-side",
        deeds: &[(BOB, IKE), (BOB, CHILD), (ALICE, CHILD)],
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "rekey-against-delete-of-child",
        deeds: &[(ALICE, CHILD), (BOB, NO_CHILD)],
        lossless: false,
        ends: MAYBE,
        ..BASE
    },
    Scenario {
        name: "rekey-against-delete-of-child-slow",
        deeds: &[(ALICE, CHILD), (BOB, NO_CHILD)],
        slow: true,
        passes: SLOW,
        lossless: false,
        ends: MAYBE,
        ..BASE
    },
    Scenario {
        name: "both-rekey-one-deletes-child",
        deeds: &[(ALICE, CHILD), (BOB, CHILD), (ALICE, NO_CHILD)],
        lossless: false,
        ends: MAYBE,
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "both-delete-child",
        deeds: &[(ALICE, NO_CHILD), (BOB, NO_CHILD)],
        lossless: false,
        ends: Ends {
            ike_sas: 1..=1,
            children: 0..=0,
        },
        ..BASE
    },
    Scenario {
        name: "rekey-against-delete-of-ike",
        deeds: &[(ALICE, IKE), (BOB, NO_IKE)],
        lossless: false,
        ends: NOTHING,
        ..BASE
    },
    Scenario {
        name: "rekey-against-delete-of-ike-slow",
        deeds: &[(ALICE, IKE), (BOB, NO_IKE)],
        slow: true,
        passes: SLOW,
        lossless: false,
        ends: NOTHING,
        ..BASE
    },
    Scenario {
        name: "child-rekey-against-delete-of-ike",
        deeds: &[(ALICE, CHILD), (BOB, NO_IKE)],
        lossless: false,
        ends: NOTHING,
        ..BASE
    },
    Scenario {
        name: "ike-rekey-against-delete-of-child",
        deeds: &[(ALICE, IKE), (BOB, NO_CHILD)],
        lossless: false,
        ends: MAYBE,
        ..BASE
    },
    Scenario {
        name: "child-rekey-against-new-child",
        deeds: &[(ALICE, CHILD), (BOB, Deed::Initiate)],
        ends: TWO,
        ..BASE
    },
    Scenario {
        name: "ike-rekey-against-new-child",
        deeds: &[(ALICE, IKE), (BOB, Deed::Initiate)],
        ends: TWO,
        ..BASE
    },
    Scenario {
        name: "ike-rekey-against-new-child-slow",
        deeds: &[(ALICE, IKE), (BOB, Deed::Initiate)],
        slow: true,
        passes: SLOW,
        ends: TWO,
        ..BASE
    },
    Scenario {
        name: "both-make-the-same-child",
        deeds: &[(ALICE, Deed::Initiate), (BOB, Deed::Initiate)],
        ends: TWO,
        ..BASE
    },
    Scenario {
        name: "both-make-the-same-child-slow",
        deeds: &[(ALICE, Deed::Initiate), (BOB, Deed::Initiate)],
        slow: true,
        passes: SLOW,
        ends: TWO,
        ..BASE
    },
    Scenario {
        name: "own-rekey-refused",
        deeds: &[
            (ALICE, CHILD),
            (BOB, CHILD),
            (BOB, Deed::Fail(OpKind::AllocSpi)),
        ],
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "own-rekey-cannot-be-installed",
        deeds: &[
            (ALICE, CHILD),
            (BOB, CHILD),
            (ALICE, Deed::Fail(OpKind::InstallSa)),
        ],
        lossless: false,
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "child-twice-and-once",
        deeds: &[(ALICE, CHILD), (ALICE, CHILD), (BOB, CHILD)],
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "peer-rekeys-a-child-again",
        deeds: &[(ALICE, CHILD), (BOB, CHILD), (BOB, Deed::RekeyAgain)],
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "ike-twice-and-once",
        deeds: &[(ALICE, IKE), (ALICE, IKE), (BOB, IKE)],
        passes: THREE_DEEDS,
        ..BASE
    },
    Scenario {
        name: "both-delete-ike",
        deeds: &[(ALICE, NO_IKE), (BOB, NO_IKE)],
        lossless: false,
        ends: NOTHING,
        ..BASE
    },
    Scenario {
        name: "delete-of-ike-against-new-child",
        deeds: &[(ALICE, NO_IKE), (BOB, Deed::Initiate)],
        lossless: false,
        ends: NOTHING,
        ..BASE
    },
    Scenario {
        name: "peer-deletes-what-never-was",
        deeds: &[(ALICE, CHILD), (BOB, CHILD), (BOB, Deed::DeleteUnknown)],
        passes: THREE_DEEDS,
        ..BASE
    },
];

/// Endpoints and data planes with faults, each of which must be found.
pub(super) static FAULTY: &[Scenario] = &[
    Scenario {
        name: "peer-that-misjudges-nonces",
        deeds: &[(ALICE, CHILD), (BOB, CHILD)],
        mutants: [None, Some(Mutant::Nonces)],
        passes: FIRST,
        ..BASE
    },
    Scenario {
        name: "endpoint-that-sends-too-early",
        deeds: &[(ALICE, CHILD)],
        mutants: [None, Some(Mutant::Hasty)],
        passes: FIRST,
        ..BASE
    },
    Scenario {
        name: "endpoint-that-forgets-the-other-rekey",
        // It matters once its own has failed.
        deeds: &[
            (ALICE, CHILD),
            (BOB, CHILD),
            (BOB, Deed::Fail(OpKind::AllocSpi)),
        ],
        mutants: [Some(Mutant::Forgetful), None],
        passes: FIRST,
        ..BASE
    },
    Scenario {
        name: "data-plane-that-keeps-what-is-removed",
        deeds: &[(ALICE, CHILD)],
        faults: [Some(PlaneFault::KeepsSas), None],
        passes: FIRST,
        ..BASE
    },
    Scenario {
        name: "data-plane-without-inbound-sas",
        deeds: &[(ALICE, CHILD)],
        faults: [None, Some(PlaneFault::LacksInbound)],
        passes: FIRST,
        ..BASE
    },
];

/// What a request for a child consists of that the peer would accept.
pub(super) fn any_child_offer() -> Vec<Payload> {
    let proposal = SaProposal {
        number: 1,
        spi: 0xdead_be01_u32.to_be_bytes().to_vec(),
        proposal: harness::esp_proposal(&[]),
    };
    let sa = SaPayload {
        proposals: vec![proposal],
    };
    let nonce = NoncePayload::new(vec![0x55; 32]).expect("32 octets are a nonce");
    let net = |text: &str| {
        let (addr, len) = text.split_once('/').expect("a constant network");
        let addr = addr.parse().expect("a constant network");
        let len = len.parse().expect("a constant network");
        swanherd_ipsec::TrafficSelector::network(addr, len).expect("a constant network")
    };
    vec![
        Payload::Sa(sa),
        Payload::Nonce(nonce),
        Payload::TsI(TsPayload(vec![net("10.2.0.0/16")])),
        Payload::TsR(TsPayload(vec![net("10.1.0.0/16")])),
    ]
}
