// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The gateway, its peers, and how a plan is carried out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use swanherd_config::model::Connection;
use swanherd_ike::api::{Command, Selector, Settings};
use swanherd_ike::credentials::Credentials;
use swanherd_ike::crypto::Provider;
use swanherd_ipsec::plane::PlaneEvent;

use super::plan::{Act, Deed, Plan, What, Who};
use super::sites::{self, SITES, Site};
use crate::config::psk;
use crate::net::Nat;
use crate::world::{World, number_from};

/// The gateway's place among the hosts.
pub(crate) const HUB: usize = 0;
/// Lines of history that a replay prints, unless `SWANHERD_FLEET_LINES` says otherwise.
const LINES: usize = 1000;
/// How long a NAT keeps a mapping that is not used.
const NAT_IDLE: Duration = Duration::from_secs(60);
/// How often each tunnel carries a packet.
const PACKETS: Duration = Duration::from_secs(10);

/// What is still to happen because of an act.
#[derive(Clone, Copy, Debug)]
enum After {
    Uncut {
        host: usize,
    },
    Unlink {
        host: usize,
    },
    Boot {
        host: usize,
    },
    Wake {
        host: usize,
        slept: Duration,
        stands_still: bool,
    },
    Load {
        at_hub: bool,
        site: usize,
    },
}

/// A gateway with peers.
pub(crate) struct Fleet {
    pub(crate) world: World,
    pub(crate) sites: Vec<Site>,
    credentials: Credentials,
    /// Which NAT of the network each NAT of the plan is.
    nats: BTreeMap<usize, usize>,
    agenda: BTreeMap<(Duration, u64), After>,
    order: u64,
    /// Children that an operator took down where they are started.
    taken_down: BTreeSet<(bool, usize, usize)>,
    unloaded: BTreeSet<(bool, usize)>,
    peace: bool,
}

impl Fleet {
    pub(crate) fn new(seed: u64, plan: &Plan, speaks: bool) -> Self {
        let mut world = World::empty(seed);
        let lines =
            number_from("SWANHERD_FLEET_LINES").map(|lines| usize::try_from(lines).unwrap());
        world
            .history
            .keep(if speaks { lines.unwrap_or(LINES) } else { 0 });
        world.keeps_events = false;
        world.traffic.interval = PACKETS;
        world.traffic.asks = true;
        let sites = sites::all(seed);
        let (settings, crypto) = (Settings::default(), Provider::fake());
        world.add_host("hub", "192.0.2.1", settings.clone(), crypto);
        let mut nats = BTreeMap::new();
        for (index, site) in sites.iter().enumerate() {
            let address = sites::address(index, site.nat);
            let host = world.add_host(&sites::name(index), &address, settings.clone(), crypto);
            let inside = world.host(host).addr;
            let Some(number) = site.nat else { continue };
            if let Some(known) = nats.get(&number) {
                let nat: &mut Nat = &mut world.net.nats[*known];
                nat.shelter(inside);
            } else {
                let outside = format!("203.0.113.{}", number + 1);
                let mut nat = Nat::new(inside, outside.parse().unwrap());
                nat.idle = NAT_IDLE;
                nats.insert(number, world.net.nats.len());
                world.net.nats.push(nat);
            }
        }
        let mut fleet = Self {
            world,
            sites,
            credentials: psk(),
            nats,
            agenda: BTreeMap::new(),
            order: 0,
            taken_down: BTreeSet::new(),
            unloaded: BTreeSet::new(),
            peace: false,
        };
        fleet.world.note(HUB, || format!("{plan:?}"));
        fleet.load_all(HUB);
        for site in 0..SITES {
            fleet.load_all(host_of(Who::Site(site)));
        }
        fleet.world.set_traffic(true);
        fleet
    }

    /// How many events have been told since each host's last restart.
    pub(crate) fn told(&self) -> u64 {
        let of = |told: crate::ledger::Told| {
            told.ike_ups
                + told.ike_downs
                + told.ike_rekeys
                + told.ike_updates
                + told.child_ups
                + told.child_downs
                + told.child_rekeys
        };
        self.world
            .hosts
            .iter()
            .map(|host| of(host.ledger.told))
            .sum()
    }

    /// Lets time pass until that long after the beginning.
    pub(crate) fn run_to(&mut self, end: Duration) {
        while let Some((&(at, order), &after)) = self.agenda.first_key_value() {
            if at > end {
                break;
            }
            self.agenda.remove(&(at, order));
            self.run_world_to(at);
            self.finish(after);
        }
        self.run_world_to(end);
    }

    fn run_world_to(&mut self, end: Duration) {
        let left = end.saturating_sub(self.world.elapsed());
        self.world.run_for(left);
    }

    /// Ends all that is still wrong. From now on nothing happens but what must.
    pub(crate) fn make_peace(&mut self) {
        if std::mem::replace(&mut self.peace, true) {
            return;
        }
        self.world.note(HUB, || "peace".to_owned());
        for (_, after) in std::mem::take(&mut self.agenda) {
            self.finish(after);
        }
        for host in &mut self.world.hosts {
            host.plane.failing.clear();
        }
        let hosts = [true, false].map(|at_hub| (0..SITES).map(move |site| (at_hub, site)));
        for (at_hub, site) in hosts.into_iter().flatten() {
            for child in 0..self.sites[site].children() {
                if self.taken_down.remove(&(at_hub, site, child)) {
                    self.initiate(at_hub, site, What::Child(child));
                }
            }
        }
    }

    /// Whether one end's definition has a child brought up by itself.
    pub(crate) fn starts(&self, at_hub: bool, site: usize, child: usize) -> bool {
        self.sites[site].child(at_hub, child).start_action.start
    }

    pub(crate) fn act(&mut self, act: &Act) {
        let number = act.number;
        self.world
            .note(HUB, || format!("act {number}: {:?}", act.what));
        match &act.what {
            Deed::Cut {
                who,
                mute,
                deaf,
                lasts,
            } => {
                let host = host_of(*who);
                if *mute {
                    self.world.net.mute.insert(host);
                }
                if *deaf {
                    self.world.net.deaf.insert(host);
                }
                self.later(*lasts, After::Uncut { host });
            }
            Deed::Link {
                site,
                conditions,
                lasts,
            } => {
                let host = host_of(Who::Site(*site));
                self.world.net.links.insert(host, conditions.clone());
                self.later(*lasts, After::Unlink { host });
            }
            Deed::Rebind { site } => {
                if let Some(nat) = self.sites[*site].nat.and_then(|nat| self.nats.get(&nat)) {
                    self.world.net.nats[*nat].rebind();
                }
            }
            Deed::Crash { who, lasts } => {
                let host = host_of(*who);
                if !self.world.host(host).off {
                    self.world.freeze(host);
                    self.later(*lasts, After::Boot { host });
                }
            }
            Deed::Reboot { who } => {
                let host = host_of(*who);
                if !self.world.host(host).off {
                    self.world.shutdown(host);
                    let soon = self.world.elapsed() + Duration::from_secs(3);
                    self.run_to(soon);
                    self.check_over(host);
                    self.finish(After::Boot { host });
                }
            }
            Deed::Sleep {
                who,
                lasts,
                stands_still,
            } => {
                let host = host_of(*who);
                if !self.world.host(host).off {
                    self.world.freeze(host);
                    let after = After::Wake {
                        host,
                        slept: *lasts,
                        stands_still: *stands_still,
                    };
                    self.later(*lasts, after);
                }
            }
            Deed::SetClock { who, ahead } => self.world.set_wall_clock(host_of(*who), *ahead),
            Deed::Fault { who, kind, count } => {
                self.world.hosts[host_of(*who)].plane.failing = vec![(*kind, *count)];
            }
            Deed::NetworkChanged { who } => {
                let host = host_of(*who);
                if !self.world.host(host).off {
                    self.world.plane_event(host, PlaneEvent::NetworkChanged);
                }
            }
            Deed::Initiate { who, site, what } => {
                let at_hub = *who == Who::Hub;
                self.initiate(at_hub, *site, *what);
            }
            Deed::Terminate {
                who,
                site,
                what,
                force,
            } => self.terminate(*who == Who::Hub, *site, *what, *force),
            Deed::Rekey {
                who,
                site,
                what,
                reauth,
            } => {
                let at_hub = *who == Who::Hub;
                let selector = self.selector(at_hub, *site, *what);
                let reauth = *reauth;
                self.command(at_hub, *site, Command::Rekey { selector, reauth });
            }
            Deed::Install { who, site, child } => {
                let at_hub = *who == Who::Hub;
                let (connection, child) = self.names(at_hub, *site, *child);
                let connection = Some(connection);
                self.command(at_hub, *site, Command::Install { connection, child });
            }
            Deed::Uninstall { who, site, child } => {
                let at_hub = *who == Who::Hub;
                let (connection, child) = self.names(at_hub, *site, *child);
                let connection = Some(connection);
                self.command(at_hub, *site, Command::Uninstall { connection, child });
            }
            Deed::Reload { who, site, longer } => {
                let at_hub = *who == Who::Hub;
                let definition = self.definition(at_hub, *site);
                definition.children[0].rekey_time += Duration::from_secs(*longer);
                if !self.unloaded.contains(&(at_hub, *site)) {
                    self.finish(After::Load {
                        at_hub,
                        site: *site,
                    });
                }
            }
            Deed::Unload { who, site, lasts } => {
                let (at_hub, site) = (*who == Who::Hub, *site);
                let host = end_of(at_hub, site);
                if !self.world.host(host).off && self.unloaded.insert((at_hub, site)) {
                    let name = self.definition(at_hub, site).name.clone();
                    self.world.unload(host, &name);
                    self.later(*lasts, After::Load { at_hub, site });
                }
            }
        }
    }

    fn later(&mut self, lasts: Duration, after: After) {
        self.order += 1;
        let at = self.world.elapsed() + lasts;
        self.agenda.insert((at, self.order), after);
    }

    fn finish(&mut self, after: After) {
        match after {
            After::Uncut { host } => {
                self.world.net.mute.remove(&host);
                self.world.net.deaf.remove(&host);
            }
            After::Unlink { host } => {
                self.world.net.links.remove(&host);
            }
            After::Boot { host } => {
                self.world
                    .restart(host, Settings::default(), Provider::fake());
                self.load_all(host);
            }
            After::Wake {
                host,
                slept,
                stands_still,
            } => {
                self.world.thaw(host, slept, stands_still);
                self.load_missing(host);
            }
            After::Load { at_hub, site } => {
                self.unloaded.remove(&(at_hub, site));
                let host = end_of(at_hub, site);
                // One that is off gets its definitions when it is on again.
                if !self.world.host(host).off {
                    self.load(at_hub, site);
                }
            }
        }
    }

    fn load_all(&mut self, host: usize) {
        if host != HUB {
            return self.load(false, host - 1);
        }
        for site in 0..SITES {
            self.load(true, site);
        }
    }

    /// Loads what was to be loaded while the host was asleep.
    fn load_missing(&mut self, host: usize) {
        for site in 0..SITES {
            for at_hub in [true, false] {
                let name = self.definition(at_hub, site).name.clone();
                let there = || self.world.host(host).endpoint.has_connection(&name);
                if end_of(at_hub, site) == host && !there() {
                    self.load(at_hub, site);
                }
            }
        }
    }

    fn load(&mut self, at_hub: bool, site: usize) {
        if self.unloaded.contains(&(at_hub, site)) {
            return;
        }
        let definition = self.definition(at_hub, site).clone();
        let host = end_of(at_hub, site);
        self.world.load(host, &self.credentials.clone(), definition);
    }

    fn definition(&mut self, at_hub: bool, site: usize) -> &mut Connection {
        let site = &mut self.sites[site];
        if at_hub {
            &mut site.hub
        } else {
            &mut site.site
        }
    }

    fn initiate(&mut self, at_hub: bool, site: usize, what: What) {
        let Selector { ike, child, .. } = self.selector(at_hub, site, what);
        let connection = match &ike {
            Some(_) => ike,
            None => Some(self.definition(at_hub, site).name.clone()),
        };
        let command = Command::Initiate {
            connection,
            child,
            respect_limits: false,
        };
        self.command(at_hub, site, command);
    }

    fn terminate(&mut self, at_hub: bool, site: usize, what: What, force: bool) {
        let selector = self.selector(at_hub, site, what);
        if !self.command(at_hub, site, Command::Terminate { selector, force }) {
            return;
        }
        for child in 0..self.sites[site].children() {
            let meant = match what {
                What::Ike => true,
                What::Child(number) => self.place(site, number) == child,
            };
            if meant && self.starts(at_hub, site, child) {
                self.taken_down.insert((at_hub, site, child));
            }
        }
    }

    /// Whether the host is there to be told.
    fn command(&mut self, at_hub: bool, site: usize, command: Command) -> bool {
        let host = end_of(at_hub, site);
        let on = !self.world.host(host).off;
        if on {
            self.world.command(host, command);
        }
        on
    }

    fn selector(&mut self, at_hub: bool, site: usize, what: What) -> Selector {
        let ike = Some(self.definition(at_hub, site).name.clone());
        let child = match what {
            What::Ike => None,
            What::Child(number) => Some(self.names(at_hub, site, number).1),
        };
        Selector {
            ike,
            child,
            ..Selector::default()
        }
    }

    fn names(&mut self, at_hub: bool, site: usize, child: usize) -> (String, String) {
        let place = self.place(site, child);
        let definition = self.definition(at_hub, site);
        (
            definition.name.clone(),
            definition.children[place].name.clone(),
        )
    }

    fn place(&self, site: usize, child: usize) -> usize {
        child % self.sites[site].children()
    }
}

fn host_of(who: Who) -> usize {
    match who {
        Who::Hub => HUB,
        Who::Site(site) => site + 1,
    }
}

/// The host at one end of the tunnels with a peer.
pub(crate) fn end_of(at_hub: bool, site: usize) -> usize {
    if at_hub { HUB } else { site + 1 }
}
