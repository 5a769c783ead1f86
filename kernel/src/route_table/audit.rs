// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the kernel's routes, rules and addresses with what tunnels need, and mends them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;

use super::demand::World;
use super::{Installed, Network, RouteTable};
use crate::audit::{Difference, Finding, Object, Remedy};
use crate::netlink::NetlinkError;
use crate::route::{OUR_PROTOCOL, Router, SeenRoute, TunnelRoute};

const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

impl RouteTable {
    /// Compares what is there with what is wanted and, unless `dry_run`, mends it: routes are made
    /// that could not be made before, changed where the way to a peer or an own address changed,
    /// put back where they were removed; what is ours and not wanted goes. What others have is
    /// never touched.
    ///
    /// # Errors
    /// If the kernel cannot be asked. A remedy that fails is told in its finding.
    pub async fn audit(
        &mut self,
        router: &Router,
        dry_run: bool,
    ) -> Result<Vec<Finding>, NetlinkError> {
        let mut world = World::default();
        let mut findings = Vec::new();
        // Addresses first: routes may name them as their source.
        if self
            .audit_addresses(router, &mut world, &mut findings, dry_run)
            .await?
        {
            world = World::default();
        }
        let wanted = self.all_wanted(router, &mut world).await?;
        for family in FAMILIES {
            self.audit_rule(router, family, &wanted, &mut findings, dry_run)
                .await?;
        }
        let mut seen = BTreeMap::<Network, Vec<SeenRoute>>::new();
        let mut guards = BTreeSet::new();
        for family in FAMILIES {
            for route in router.tunnel_routes(family).await? {
                if route.guard {
                    guards.insert(route.network);
                } else {
                    seen.entry(route.network).or_default().push(route);
                }
            }
        }
        self.audit_guards(router, &wanted, &guards, &mut findings, dry_run)
            .await;
        self.audit_routes(router, &wanted, &seen, &mut findings, dry_run)
            .await;
        Ok(findings)
    }

    /// Every route that can be made at this moment.
    async fn all_wanted(
        &self,
        router: &Router,
        world: &mut World,
    ) -> Result<BTreeMap<Network, TunnelRoute>, NetlinkError> {
        let mut wanted = BTreeMap::new();
        for network in self.owners.keys() {
            if let Some(route) = self.wanted(router, world, *network).await? {
                wanted.insert(*network, route);
            }
        }
        Ok(wanted)
    }

    /// Whether addresses were changed.
    async fn audit_addresses(
        &mut self,
        router: &Router,
        world: &mut World,
        findings: &mut Vec<Finding>,
        dry_run: bool,
    ) -> Result<bool, NetlinkError> {
        let present = world.addresses(router).await?;
        let missing = self.addresses.missing(present);
        let unwanted = self.addresses.unwanted(present);
        let differ = !missing.is_empty() || !unwanted.is_empty();
        for (addr, interface) in missing {
            let remedy = if dry_run {
                Remedy::None
            } else {
                remedy(Remedy::Installed, router.add_address(addr, interface).await)
            };
            let reason = "a virtual address is gone".to_owned();
            findings.push(finding(
                Object::Address(addr),
                Difference::Missing,
                None,
                reason,
                remedy,
            ));
        }
        for (addr, interface) in unwanted {
            let remedy = if dry_run {
                Remedy::None
            } else {
                remedy(
                    Remedy::Removed,
                    router.remove_address(addr, interface).await,
                )
            };
            let reason = "a virtual address that no SA uses".to_owned();
            findings.push(finding(
                Object::Address(addr),
                Difference::Unwanted,
                None,
                reason,
                remedy,
            ));
        }
        if !dry_run {
            self.addresses.nothing_left();
        }
        Ok(differ && !dry_run)
    }

    async fn audit_rule(
        &mut self,
        router: &Router,
        family: AddressFamily,
        wanted: &BTreeMap<Network, TunnelRoute>,
        findings: &mut Vec<Finding>,
        dry_run: bool,
    ) -> Result<(), NetlinkError> {
        let v6 = family == AddressFamily::Inet6;
        let code = u8::from(family);
        let needed = self.rules.contains(&code) || wanted.keys().any(|(a, _)| a.is_ipv6() == v6);
        let seen = router.rules(family).await?;
        let serves = seen.iter().any(|rule| rule.except == self.way.mark());
        if needed && !serves {
            let remedy = if dry_run {
                Remedy::None
            } else {
                self.rules.remove(&code);
                remedy(Remedy::Installed, self.put_rule(router, family).await)
            };
            let reason = "the rule that consults the tunnels' routes is gone".to_owned();
            findings.push(finding(
                Object::Rule { v6 },
                Difference::Missing,
                None,
                reason,
                remedy,
            ));
        }
        for rule in seen.iter().filter(|rule| rule.protocol == OUR_PROTOCOL) {
            if needed && rule.except == self.way.mark() {
                // Left by an earlier run, and wanted again.
                self.rules.insert(code);
                continue;
            }
            let remedy = if dry_run {
                Remedy::None
            } else {
                remedy(
                    Remedy::Removed,
                    router.remove_rule(family, rule.except).await,
                )
            };
            let reason = "a rule of ours that no tunnel needs".to_owned();
            findings.push(finding(
                Object::Rule { v6 },
                Difference::Unwanted,
                None,
                reason,
                remedy,
            ));
        }
        Ok(())
    }

    async fn audit_guards(
        &self,
        router: &Router,
        wanted: &BTreeMap<Network, TunnelRoute>,
        seen: &BTreeSet<Network>,
        findings: &mut Vec<Finding>,
        dry_run: bool,
    ) {
        let wanted: BTreeSet<Network> = wanted
            .iter()
            .filter(|(_, route)| self.way.guards(**route))
            .map(|(network, _)| *network)
            .collect();
        for network in wanted.symmetric_difference(seen) {
            let (difference, reason, done) = if wanted.contains(network) {
                (
                    Difference::Missing,
                    "the route that stops packets while the device is away is gone",
                    Remedy::Installed,
                )
            } else {
                (
                    Difference::Unwanted,
                    "no tunnel wants a route that stops packets",
                    Remedy::Removed,
                )
            };
            let remedy = if dry_run {
                Remedy::None
            } else if difference == Difference::Missing {
                remedy(done, router.install_guard(*network).await)
            } else {
                remedy(done, router.remove_guard(*network).await)
            };
            findings.push(Finding {
                owner: self.owner_of(network),
                ..finding(
                    Object::Route(*network),
                    difference,
                    None,
                    reason.to_owned(),
                    remedy,
                )
            });
        }
    }

    async fn audit_routes(
        &mut self,
        router: &Router,
        wanted: &BTreeMap<Network, TunnelRoute>,
        seen: &BTreeMap<Network, Vec<SeenRoute>>,
        findings: &mut Vec<Finding>,
        dry_run: bool,
    ) {
        let networks: BTreeSet<Network> = wanted.keys().chain(seen.keys()).copied().collect();
        for network in networks {
            let there = seen.get(&network).map_or(&[][..], Vec::as_slice);
            let ours = there.iter().find(|route| route.protocol == OUR_PROTOCOL);
            let alien = there.iter().find(|route| route.protocol != OUR_PROTOCOL);
            let (difference, reason) = match (wanted.get(&network), ours) {
                (Some(wanted), Some(ours)) if self.serves(network, *wanted, ours.route) => continue,
                (Some(wanted), Some(ours)) => (
                    Difference::Changed,
                    format!(
                        "there is {}, wanted is {}",
                        text(ours.route),
                        text(Some(*wanted))
                    ),
                ),
                (Some(_), None) => match alien {
                    Some(alien) => (
                        Difference::InTheWay,
                        format!(
                            "someone else has a route there in the tunnels' table (protocol {})",
                            alien.protocol
                        ),
                    ),
                    None => (
                        Difference::Missing,
                        format!("wanted is {}", text(wanted.get(&network).copied())),
                    ),
                },
                (None, Some(ours)) => (
                    Difference::Unwanted,
                    format!("no tunnel wants {}", text(ours.route)),
                ),
                (None, None) => continue,
            };
            let remedy = match (difference, wanted.get(&network)) {
                _ if dry_run => Remedy::None,
                (Difference::InTheWay, _) => Remedy::None,
                (Difference::Unwanted, _) | (_, None) => {
                    remedy(Remedy::Removed, self.take_out(router, network).await)
                }
                (_, Some(route)) => {
                    let put = self.put(router, network, *route).await;
                    if put.is_err() && ours.is_none() {
                        self.installed.remove(&network);
                    }
                    remedy(Remedy::Installed, put)
                }
            };
            findings.push(Finding {
                owner: self.owner_of(&network),
                ..finding(Object::Route(network), difference, None, reason, remedy)
            });
        }
        if !dry_run {
            // What is neither wanted nor there is not installed any more.
            self.installed
                .retain(|network, _| wanted.contains_key(network));
        }
    }

    /// Whether a route of ours does what is wanted. If it does, it is known to be installed.
    fn serves(&mut self, network: Network, wanted: TunnelRoute, seen: Option<TunnelRoute>) -> bool {
        let Some(seen) = seen else {
            return false;
        };
        let as_installed = self
            .installed
            .get(&network)
            .is_some_and(|installed| installed.wanted == wanted && installed.actual == seen);
        if !as_installed && seen == wanted {
            let actual = seen;
            self.installed.insert(network, Installed { wanted, actual });
            return true;
        }
        as_installed
    }

    /// Audits because this host's network changed. A remedy that failed in the same way before is
    /// not told again, nor is what is mended in a contest with another program.
    pub(crate) async fn mend(
        &mut self,
        router: &Router,
        contest: bool,
    ) -> Result<(), NetlinkError> {
        let known = std::mem::take(&mut self.refused);
        let findings = self.audit(router, false).await?;
        let mut mended = 0;
        for finding in &findings {
            let object = finding.object;
            let Remedy::Failed(error) = &finding.remedy else {
                mended += usize::from(finding.remedy != Remedy::None);
                tracing::debug!(
                    ?object,
                    reason = finding.reason,
                    "the host's network changed"
                );
                continue;
            };
            if let Object::Route(network) = object {
                self.refused.insert(network, error.clone());
                if known.get(&network) == Some(error) {
                    continue;
                }
            }
            let owner = finding.owner.as_deref().unwrap_or_default();
            tracing::warn!(?object, owner, %error, "cannot change a route");
        }
        if mended > 0 && !contest {
            tracing::info!(mended, "adapted routes of tunnels to this host's network");
        }
        Ok(())
    }
}

fn text(route: Option<TunnelRoute>) -> String {
    let name = |what: &str, addr: Option<IpAddr>| {
        addr.map_or_else(String::new, |addr| format!(" {what} {addr}"))
    };
    match route {
        Some(TunnelRoute::Via {
            interface,
            gateway,
            source,
        }) => format!(
            "a route through interface {interface}{}{}",
            name("via", gateway),
            name("src", source)
        ),
        Some(TunnelRoute::Throw) => "a throw route".to_owned(),
        None => "a route of another kind".to_owned(),
    }
}

fn finding(
    object: Object,
    difference: Difference,
    owner: Option<String>,
    reason: String,
    remedy: Remedy,
) -> Finding {
    Finding {
        object,
        difference,
        owner,
        reason,
        remedy,
    }
}

fn remedy(done: Remedy, result: Result<(), NetlinkError>) -> Remedy {
    match result {
        Ok(()) => done,
        Err(error) => Remedy::Failed(error.to_string()),
    }
}
