// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which kernel policies a set of policies is.

use swanherd_ipsec::plane::{Direction, Mode, PolicyAction, PolicySet};

use super::selector;
use crate::audit::Owner;
use crate::reconcile::{Claim, Claims, PolicyKey};

/// More pairs of selectors than this in one set of policies are a mistake or an attack.
const MAX_PAIRS: usize = 4096;

/// The kernel policies of a set: the product of its selectors, in the directions that it needs.
pub(crate) fn claims(set: &PolicySet) -> Result<Claims, String> {
    if set.local.len().saturating_mul(set.remote.len()) > MAX_PAIRS {
        return Err(format!("more than {MAX_PAIRS} pairs of selectors"));
    }
    let forwards = !matches!(
        set.action,
        PolicyAction::Protect {
            mode: Mode::Transport,
            ..
        }
    );
    let owner = owner(set);
    let mut claims = Claims::new();
    for local in &set.local {
        for remote in &set.remote {
            let matching = local.start.is_ipv4() == remote.start.is_ipv4()
                && (local.protocol == 0
                    || remote.protocol == 0
                    || local.protocol == remote.protocol);
            if !matching {
                continue;
            }
            let outbound = selector::selector(local, remote).map_err(|e| e.to_string())?;
            let inbound = selector::selector(remote, local).map_err(|e| e.to_string())?;
            let computed = |selector, trap| {
                set.priority
                    .unwrap_or_else(|| selector::priority(&set.action, selector, trap))
            };
            let mut add = |direction, selector, mark, if_id, action, priority| {
                let key = PolicyKey::new(direction, selector, mark, if_id);
                claims.entry(key).or_insert_with(|| Claim {
                    owner: owner.clone(),
                    action,
                    priority,
                    device: None,
                });
            };
            let (action, priority) = (set.action, computed(&outbound, set.trap));
            let (out, into) = ((set.mark_out, set.if_id_out), (set.mark_in, set.if_id_in));
            add(Direction::Out, &outbound, out.0, out.1, action, priority);
            add(Direction::In, &inbound, into.0, into.1, action, priority);
            if forwards {
                add(Direction::Fwd, &inbound, into.0, into.1, action, priority);
            }
            if forwards && set.fwd_out {
                // What is forwarded into the tunnel is protected by the outbound policy later; it
                // only must not be stopped before. As strongSwan does, it comes behind the
                // policies of packets from the tunnel.
                let action = match set.action {
                    PolicyAction::Protect { .. } => PolicyAction::Bypass,
                    action => action,
                };
                let priority = computed(&outbound, true);
                add(Direction::Fwd, &outbound, out.0, out.1, action, priority);
            }
        }
    }
    if claims.is_empty() {
        return Err("no local selector goes with a remote one".to_owned());
    }
    Ok(claims)
}

/// Whose a set is.
pub(crate) fn owner(set: &PolicySet) -> Owner {
    let name = set.owner.clone();
    match set.action {
        PolicyAction::Protect { .. } if set.trap => Owner::Trap(name),
        PolicyAction::Protect { .. } => Owner::Child(name),
        PolicyAction::Bypass | PolicyAction::Discard => Owner::Shunt(name),
    }
}

#[cfg(test)]
mod tests {
    use swanherd_ipsec::TrafficSelector;
    use swanherd_ipsec::plane::{HwOffload, Mark};

    use super::*;

    fn set(local: &[&str], remote: &[&str], mode: Mode) -> PolicySet {
        let networks = |list: &[&str]| {
            list.iter()
                .map(|text| TrafficSelector::network(text.parse().unwrap(), 24).unwrap())
                .collect()
        };
        PolicySet {
            id: 1,
            owner: "conn/child".to_owned(),
            local: networks(local),
            remote: networks(remote),
            action: PolicyAction::Protect {
                mode,
                local: "192.0.2.1".parse().unwrap(),
                remote: "192.0.2.2".parse().unwrap(),
                reqid: 3,
                spi: 0,
            },
            priority: None,
            mark_in: None,
            mark_out: None,
            if_id_in: 0,
            if_id_out: 0,
            routes: true,
            trap: false,
            fwd_out: false,
            offload: HwOffload::No,
        }
    }

    #[test]
    fn a_tunnel_gets_the_product_of_its_selectors_in_three_directions() {
        let claims = claims(&set(
            &["10.1.0.0", "10.3.0.0"],
            &["10.2.0.0", "10.4.0.0"],
            Mode::Tunnel,
        ))
        .unwrap();
        assert_eq!(claims.len(), 12);
        assert!(claims.values().all(|claim| claim.priority == 375_423));
    }

    #[test]
    fn transport_mode_does_not_forward() {
        let claims = claims(&set(&["10.1.0.0"], &["10.2.0.0"], Mode::Transport)).unwrap();
        let directions: Vec<Direction> = claims.keys().map(|key| key.direction).collect();
        assert_eq!(directions, [Direction::In, Direction::Out]);
    }

    #[test]
    fn directions_have_their_own_marks_and_interfaces() {
        let mut set = set(&["10.1.0.0"], &["10.2.0.0"], Mode::Tunnel);
        set.if_id_in = 5;
        set.if_id_out = 6;
        set.mark_out = Some(Mark {
            value: 7,
            mask: u32::MAX,
        });
        for (key, _) in claims(&set).unwrap() {
            if key.direction == Direction::Out {
                assert_eq!((key.if_id, key.mark), (6, set.mark_out));
            } else {
                assert_eq!((key.if_id, key.mark), (5, None));
            }
        }
    }

    #[test]
    fn selectors_of_different_families_are_not_paired() {
        let mut mixed = set(&["10.1.0.0"], &["10.2.0.0"], Mode::Tunnel);
        mixed
            .local
            .push(TrafficSelector::network("fd00::".parse().unwrap(), 64).unwrap());
        assert_eq!(claims(&mixed).unwrap().len(), 3);
        mixed.local.remove(0);
        assert!(claims(&mixed).is_err());
    }
}
