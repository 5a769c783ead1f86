// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How what the kernel has differs from what is wanted, in values and in words.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use swanherd_ipsec::plane::{Direction, Mode, PolicyAction, SaId};

use super::{Desired, InForce, PolicyKey, Record, WantedSa};
use crate::audit::{Audit, Difference, Finding, Object, Owner, Remedy};

/// What a dump says of one SA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActualSa {
    pub(crate) src: IpAddr,
    pub(crate) reqid: u32,
}

/// What a dump says of one kernel policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActualPolicy {
    pub(crate) priority: u32,
    pub(crate) template: Option<ActualTemplate>,
    pub(crate) discards: bool,
}

/// The template of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActualTemplate {
    pub(crate) mode: Mode,
    pub(crate) reqid: u32,
    pub(crate) spi: u32,
    /// Outer source and destination; in transport mode the packets' own.
    pub(crate) endpoints: Option<(IpAddr, IpAddr)>,
}

/// The SAs of a dump.
pub(crate) type SeenSas = BTreeMap<SaId, ActualSa>;

/// The policies of a dump that might be ours.
pub(crate) type SeenPolicies = BTreeMap<PolicyKey, ActualPolicy>;

impl ActualPolicy {
    pub(crate) fn reqid(&self) -> u32 {
        self.template.map_or(0, |template| template.reqid)
    }

    /// What should be there for `wanted`.
    pub(crate) fn of(key: &PolicyKey, wanted: &InForce) -> Self {
        // Only outbound policies are bound to an SA.
        let outbound = key.direction == Direction::Out;
        Self {
            priority: wanted.priority,
            template: match wanted.action {
                PolicyAction::Protect {
                    mode,
                    local,
                    remote,
                    reqid,
                    spi,
                } => {
                    let endpoints = if outbound {
                        (local, remote)
                    } else {
                        (remote, local)
                    };
                    Some(ActualTemplate {
                        mode,
                        reqid,
                        spi: if outbound { spi } else { 0 },
                        endpoints: (mode != Mode::Transport).then_some(endpoints),
                    })
                }
                PolicyAction::Bypass | PolicyAction::Discard => None,
            },
            discards: wanted.action == PolicyAction::Discard,
        }
    }
}

impl fmt::Display for ActualPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.template {
            _ if self.discards => f.write_str("drop")?,
            None => f.write_str("let pass")?,
            Some(ActualTemplate {
                mode,
                reqid,
                spi,
                endpoints,
            }) => {
                let mode = match mode {
                    Mode::Tunnel => "tunnel",
                    Mode::Transport => "transport",
                    Mode::Beet => "beet",
                };
                write!(f, "protect in {mode} mode with reqid {reqid}")?;
                if spi != 0 {
                    write!(f, " and SPI {spi:08x}")?;
                }
                if let Some((src, dst)) = endpoints {
                    write!(f, " from {src} to {dst}")?;
                }
            }
        }
        write!(f, " at priority {}", self.priority)
    }
}

/// Compares what is wanted with what the kernel has. `ledger` is everything that we may have put
/// there. What others have is counted and not told one by one.
pub(crate) fn audit(
    desired: &Desired,
    ledger: &BTreeSet<Record>,
    sas: &SeenSas,
    policies: &SeenPolicies,
) -> Audit {
    let mut audit = Audit {
        sas: sas.len(),
        policies: policies.len(),
        ..Audit::default()
    };
    compare_sas(desired, ledger, sas, &mut audit);
    compare_policies(desired, ledger, policies, &mut audit);
    audit
}

fn compare_sas(desired: &Desired, ledger: &BTreeSet<Record>, sas: &SeenSas, audit: &mut Audit) {
    let mut owners = None;
    for (id, wanted) in desired.sas() {
        // A reservation ends by itself, and the SA of its name is installed all the same.
        let WantedSa::Installed(entry) = wanted else {
            continue;
        };
        let (difference, reason) = match sas.get(id) {
            None => (
                Difference::Missing,
                "it is not in the kernel any more".to_owned(),
            ),
            Some(actual) if (actual.src, actual.reqid) != (entry.src, entry.reqid) => (
                Difference::InTheWay,
                format!(
                    "in its place is another SA, from {} with reqid {}; ours is from {} with \
                     reqid {}",
                    actual.src, actual.reqid, entry.src, entry.reqid
                ),
            ),
            Some(_) => continue,
        };
        audit.findings.push(Finding {
            object: Object::Sa(*id),
            difference,
            owner: owners
                .get_or_insert_with(|| desired.owners_by_reqid())
                .get(&entry.reqid)
                .and_then(|owner| owner.name())
                .map(str::to_owned),
            reason,
            remedy: Remedy::None,
        });
    }
    for (id, actual) in sas {
        if desired.sa(*id).is_some() {
            continue;
        }
        if !ledger.contains(&Record::Sa(*id)) {
            audit.alien_sas += 1;
            continue;
        }
        audit.findings.push(Finding {
            object: Object::Sa(*id),
            difference: Difference::Unwanted,
            owner: None,
            reason: format!(
                "an SA from {} with reqid {} is in the kernel; an earlier run installed it, and \
                 no child needs it",
                actual.src, actual.reqid
            ),
            remedy: Remedy::None,
        });
    }
}

fn compare_policies(
    desired: &Desired,
    ledger: &BTreeSet<Record>,
    policies: &SeenPolicies,
    audit: &mut Audit,
) {
    for (key, in_force) in desired.policies() {
        let wanted = ActualPolicy::of(&key, &in_force);
        let (difference, reason) = match policies.get(&key) {
            None => (
                Difference::Missing,
                format!("it is not in the kernel; it should {wanted}"),
            ),
            Some(actual) if *actual == wanted => continue,
            Some(actual) => {
                let theirs = actual.reqid() != 0
                    && actual.reqid() != wanted.reqid()
                    && !ledger.contains(&Record::Policy(key, actual.reqid()));
                if theirs {
                    let reason = format!(
                        "someone else's policy with the same selector is in its place, to \
                         {actual}; ours should {wanted}"
                    );
                    (Difference::InTheWay, reason)
                } else {
                    let reason = format!("it says to {actual}; it should {wanted}");
                    (Difference::Changed, reason)
                }
            }
        };
        audit.findings.push(Finding {
            object: Object::Policy(key),
            difference,
            owner: desired.owner(&key).and_then(Owner::name).map(str::to_owned),
            reason,
            remedy: Remedy::None,
        });
    }
    for (key, actual) in policies {
        if desired.in_force(key).is_some() {
            continue;
        }
        if !ledger.contains(&Record::Policy(*key, actual.reqid())) {
            audit.alien_policies += 1;
            continue;
        }
        audit.findings.push(Finding {
            object: Object::Policy(*key),
            difference: Difference::Unwanted,
            owner: None,
            reason: format!(
                "a policy to {actual} is in the kernel; an earlier run installed it, and no \
                 child, trap or shunt needs it"
            ),
            remedy: Remedy::None,
        });
    }
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::Secret;
    use swanherd_ipsec::plane::{SaEntry, SaKeys};
    use swanherd_ipsec::registry::EncryptionId;

    use super::super::Claim;
    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn id(spi: u32) -> SaId {
        SaId {
            spi,
            dst: addr("192.0.2.1"),
        }
    }

    fn installed(spi: u32) -> WantedSa {
        WantedSa::Installed(Box::new(SaEntry {
            replay_window: 32,
            ..SaEntry::tunnel(
                Direction::In,
                spi,
                [addr("192.0.2.2"), addr("192.0.2.1")],
                7,
                SaKeys {
                    encryption: EncryptionId::AesGcm16,
                    encryption_key: Secret::new(vec![0; 20]),
                    integrity: None,
                },
            )
        }))
    }

    fn key(network: &str) -> PolicyKey {
        PolicyKey {
            direction: Direction::Out,
            src: (addr("10.1.0.0"), 24),
            dst: (addr(network), 24),
            proto: 0,
            sport: (0, 0),
            dport: (0, 0),
            mark: None,
            if_id: 0,
        }
    }

    fn claim(reqid: u32, priority: u32) -> Claim {
        Claim {
            owner: Owner::Child("conn/child".to_owned()),
            action: PolicyAction::Protect {
                mode: Mode::Tunnel,
                local: addr("192.0.2.1"),
                remote: addr("192.0.2.2"),
                reqid,
                spi: 0,
            },
            priority,
            device: None,
        }
    }

    fn actual(reqid: u32, priority: u32) -> ActualPolicy {
        ActualPolicy {
            priority,
            template: Some(ActualTemplate {
                mode: Mode::Tunnel,
                reqid,
                spi: 0,
                endpoints: Some((addr("192.0.2.1"), addr("192.0.2.2"))),
            }),
            discards: false,
        }
    }

    fn of(audit: &Audit) -> Vec<(Object, Difference, Option<&str>)> {
        audit
            .findings
            .iter()
            .map(|finding| {
                let owner = finding.owner.as_deref();
                (finding.object, finding.difference, owner)
            })
            .collect()
    }

    #[test]
    fn missing_unwanted_changed_and_alien_are_told_apart() {
        let mut desired = Desired::default();
        desired.want_sa(id(1), installed(1));
        desired.want_sa(id(2), installed(2));
        desired.want_sa(id(5), installed(5));
        desired.want_sa(id(6), WantedSa::Reserved);
        let networks = ["10.2.0.0", "10.3.0.0", "10.6.0.0"];
        let claims = networks.map(|network| (key(network), claim(7, 100)));
        desired.claim(1, claims.into()).unwrap();
        let ledger = [
            Record::Sa(id(1)),
            Record::Sa(id(3)),
            Record::Policy(key("10.4.0.0"), 7),
        ]
        .into();
        let sa = |reqid| ActualSa {
            src: addr("192.0.2.2"),
            reqid,
        };
        let sas = [
            (id(1), sa(7)),
            (id(3), sa(7)),
            (id(4), sa(9)),
            (id(5), sa(8)),
        ]
        .into();
        let policies = [
            (key("10.3.0.0"), actual(7, 5)),
            (key("10.4.0.0"), actual(7, 100)),
            (key("10.5.0.0"), actual(9, 100)),
            (key("10.6.0.0"), actual(9, 100)),
        ]
        .into();

        let audit = audit(&desired, &ledger, &sas, &policies);

        let owner = Some("conn/child");
        assert_eq!(
            of(&audit),
            [
                (Object::Sa(id(2)), Difference::Missing, owner),
                (Object::Sa(id(5)), Difference::InTheWay, owner),
                (Object::Sa(id(3)), Difference::Unwanted, None),
                (Object::Policy(key("10.2.0.0")), Difference::Missing, owner),
                (Object::Policy(key("10.3.0.0")), Difference::Changed, owner),
                (Object::Policy(key("10.6.0.0")), Difference::InTheWay, owner),
                (Object::Policy(key("10.4.0.0")), Difference::Unwanted, None),
            ]
        );
        assert_eq!((audit.sas, audit.policies), (4, 4));
        assert_eq!((audit.alien_sas, audit.alien_policies), (1, 1));
        let words = &audit.findings[4].reason;
        assert!(words.contains("at priority 5; it should"), "{words}");
    }
}
