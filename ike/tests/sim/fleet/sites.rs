// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who the peers are, and what is configured at both ends.

use std::time::Duration;

use swanherd_config::model::{Action, Child, Connection, HostSpec, Unique};

use crate::config::{child, pair, round};
use crate::net::SimRng;

/// How many peers the gateway has.
pub(crate) const SITES: usize = 30;

const START: Action = Action {
    trap: false,
    start: true,
};
const TRAP: Action = Action {
    trap: true,
    start: false,
};
const BOTH: Action = Action {
    trap: true,
    start: true,
};

/// One peer.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Which NAT it is behind.
    pub(crate) nat: Option<usize>,
    /// What the gateway has.
    pub(crate) hub: Connection,
    /// What the peer has.
    pub(crate) site: Connection,
}

impl Site {
    /// A child's definition at one end.
    pub(crate) fn child(&self, at_hub: bool, index: usize) -> &Child {
        let conn = if at_hub { &self.hub } else { &self.site };
        &conn.children[index]
    }

    pub(crate) fn children(&self) -> usize {
        self.hub.children.len()
    }
}

/// Name of a peer.
pub(crate) fn name(site: usize) -> String {
    format!("s{site:02}")
}

/// Name of the gateway's connection with a peer.
pub(crate) fn connection(site: usize) -> String {
    format!("site-{site:02}")
}

/// A peer's own address.
pub(crate) fn address(site: usize, nat: Option<usize>) -> String {
    match nat {
        Some(nat) => format!("172.16.{nat}.{}", site + 1),
        None => format!("198.51.100.{}", site + 1),
    }
}

/// All peers. Some of them share a NAT.
pub(crate) fn all(seed: u64) -> Vec<Site> {
    let mut rng = SimRng::new(seed ^ 0x0000_f1ee_7000_0000);
    (0..SITES).map(|index| one(&mut rng, index)).collect()
}

fn one(rng: &mut SimRng, index: usize) -> Site {
    let nat = rng.chance(350).then_some(index / 2);
    let children = 1 + usize::from(rng.chance(300));
    let (mut hub, mut site) = pair();
    hub.name = connection(index);
    site.name = "hub".to_owned();
    let id = format!("{}.example", name(index));
    hub.local = vec![round("local", hub.local[0].auth.clone(), "hub.example")];
    hub.remote = vec![round("remote", hub.remote[0].auth.clone(), &id)];
    site.local = vec![round("local", site.local[0].auth.clone(), &id)];
    site.remote = vec![round("remote", site.remote[0].auth.clone(), "hub.example")];
    site.remote_addrs = vec![HostSpec::Addr("192.0.2.1".parse().unwrap())];
    hub.remote_addrs = vec![match nat {
        Some(_) => HostSpec::Any(None),
        None => HostSpec::Addr(address(index, None).parse().unwrap()),
    }];

    for conn in [&mut hub, &mut site] {
        conn.keyingtries = 0;
        conn.unique = Unique::Replace;
        conn.dpd_delay = Duration::from_secs([10, 30, 30][rng.below(3)]);
        conn.rekey_time = Duration::from_secs(500 + rng.next() % 1000);
        conn.over_time = conn.rekey_time / 10;
        conn.rand_time = conn.over_time;
        if rng.chance(150) {
            conn.reauth_time = Duration::from_secs(700 + rng.next() % 800);
        }
    }
    // Nobody can call those behind a NAT.
    let starter = if nat.is_some() { 0 } else { rng.next() % 10 };
    let (hub_starts, site_starts) = (starter >= 6, starter <= 7);
    hub.children = (0..children)
        .map(|number| one_child(rng, index, number, true, hub_starts, nat.is_none()))
        .collect();
    site.children = (0..children)
        .map(|number| one_child(rng, index, number, false, site_starts, true))
        .collect();
    Site { nat, hub, site }
}

fn one_child(
    rng: &mut SimRng,
    site: usize,
    number: usize,
    at_hub: bool,
    starts: bool,
    may_call: bool,
) -> Child {
    let near = format!("10.0.{number}.0/24");
    let far = format!("10.{}.{number}.0/24", site + 1);
    let (local, remote) = if at_hub { (near, far) } else { (far, near) };
    let mut child = child(["net", "second"][number], &local, &remote);
    child.rekey_time = Duration::from_secs(200 + rng.next() % 400);
    child.life_time = child.rekey_time * 13 / 10;
    child.rand_time = child.rekey_time / 10;
    if rng.chance(200) {
        child.rekey_packets = 20;
        child.life_packets = 40;
        child.rand_packets = 5;
    }
    let any = [Action::default(), TRAP, START, BOTH];
    if starts {
        child.start_action = if rng.chance(200) { BOTH } else { START };
    } else if may_call && rng.chance(300) {
        child.start_action = TRAP;
    }
    if may_call {
        child.dpd_action = any[rng.below(4)];
        child.close_action = any[rng.below(4)];
    }
    child
}
