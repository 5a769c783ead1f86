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
    use swanherd_ipsec::plane::Mark;

    use super::*;

    fn set(local: &[&str], remote: &[&str], mode: Mode) -> PolicySet {
        let networks = |list: &[&str]| {
            list.iter()
                .map(|text| TrafficSelector::network(text.parse().unwrap(), 24).unwrap())
                .collect()
        };
        PolicySet::new(
            1,
            "conn/child".to_owned(),
            networks(local),
            networks(remote),
            PolicyAction::Protect {
                mode,
                local: "192.0.2.1".parse().unwrap(),
                remote: "192.0.2.2".parse().unwrap(),
                reqid: 3,
                spi: 0,
            },
        )
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

    /// A claim in the words of `ip xfrm policy`, outbound first, then inbound, then forwarded.
    fn shown(set: &PolicySet) -> Vec<String> {
        let claims = claims(set).unwrap();
        let mut lines: Vec<(u8, String)> = claims
            .iter()
            .map(|(key, claim)| {
                let order = match key.direction {
                    Direction::Out => 0,
                    Direction::In => 1,
                    Direction::Fwd => 2,
                };
                let tmpl = match claim.action {
                    PolicyAction::Protect { .. } => "tmpl",
                    PolicyAction::Bypass => "allow",
                    PolicyAction::Discard => "block",
                };
                (order, format!("{key} priority {} {tmpl}", claim.priority))
            })
            .collect();
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// `NETWORK/LENGTH`, then protocol and ports if any.
    fn selector(text: &str) -> TrafficSelector {
        let mut words = text.split(' ');
        let (addr, len) = words.next().unwrap().split_once('/').unwrap();
        let mut ts = TrafficSelector::network(addr.parse().unwrap(), len.parse().unwrap()).unwrap();
        if let Some(protocol) = words.next() {
            ts.protocol = protocol.parse().unwrap();
        }
        if let Some((first, last)) = words.next().and_then(|ports| ports.split_once('-')) {
            (ts.start_port, ts.end_port) = (first.parse().unwrap(), last.parse().unwrap());
        }
        ts
    }

    fn charons(local: &[&str], remote: &[&str], adjust: impl Fn(&mut PolicySet)) -> Vec<String> {
        let mut set = PolicySet {
            local: local.iter().map(|text| selector(text)).collect(),
            remote: remote.iter().map(|text| selector(text)).collect(),
            ..set(&[], &[], Mode::Tunnel)
        };
        adjust(&mut set);
        shown(&set)
    }

    // Each list is what charon 5.9.8 had installed for the same child (`ip xfrm policy`).
    #[test]
    fn the_policies_of_a_set_are_charons() {
        assert_eq!(
            charons(&["10.1.1.0/24"], &["10.2.1.0/24"], |set| set.fwd_out = true),
            [
                "out 10.1.1.0/24 10.2.1.0/24 priority 375423 tmpl",
                "in 10.2.1.0/24 10.1.1.0/24 priority 375423 tmpl",
                "fwd 10.1.1.0/24 10.2.1.0/24 priority 375424 allow",
                "fwd 10.2.1.0/24 10.1.1.0/24 priority 375423 tmpl",
            ]
        );
        let mark = |value| Some(Mark { value, mask: 0xff });
        assert_eq!(
            charons(&["10.1.2.0/24"], &["10.2.2.0/24"], |set| {
                set.fwd_out = true;
                (set.mark_in, set.mark_out) = (mark(0x10), mark(0x20));
            }),
            [
                "out 10.1.2.0/24 10.2.2.0/24 mark 0x20/0xff priority 375423 tmpl",
                "in 10.2.2.0/24 10.1.2.0/24 mark 0x10/0xff priority 375423 tmpl",
                "fwd 10.1.2.0/24 10.2.2.0/24 mark 0x20/0xff priority 375424 allow",
                "fwd 10.2.2.0/24 10.1.2.0/24 mark 0x10/0xff priority 375423 tmpl",
            ]
        );
        assert_eq!(
            charons(
                &["10.1.3.0/24 6 80-80"],
                &["10.2.3.0/24 6 1000-1023"],
                |_| {}
            ),
            [
                "out 10.1.3.0/24 10.2.3.0/24 proto 6 sport 80/0xffff dport 992/0xffe0 priority 375059 tmpl",
                "in 10.2.3.0/24 10.1.3.0/24 proto 6 sport 992/0xffe0 dport 80/0xffff priority 375059 tmpl",
                "fwd 10.2.3.0/24 10.1.3.0/24 proto 6 sport 992/0xffe0 dport 80/0xffff priority 375059 tmpl",
            ]
        );
        assert_eq!(
            charons(&["10.1.4.0/24 17"], &["10.2.4.0/24 17"], |_| {})[0],
            "out 10.1.4.0/24 10.2.4.0/24 proto 17 priority 375167 tmpl"
        );
        assert_eq!(
            charons(
                &["10.1.16.0/24 1 2048-2048"],
                &["10.2.16.0/24 1 2048-2048"],
                |_| {}
            )[1],
            "in 10.2.16.0/24 10.1.16.0/24 proto 1 sport 8/0xffff priority 375103 tmpl"
        );
        assert_eq!(
            charons(
                &["192.0.2.1/32 17 1000-1000"],
                &["192.0.2.2/32 17"],
                |set| {
                    if let PolicyAction::Protect { mode, .. } = &mut set.action {
                        *mode = Mode::Transport;
                    }
                }
            ),
            [
                "out 192.0.2.1/32 192.0.2.2/32 proto 17 sport 1000/0xffff priority 366911 tmpl",
                "in 192.0.2.2/32 192.0.2.1/32 proto 17 dport 1000/0xffff priority 366911 tmpl",
            ]
        );
    }

    #[test]
    fn policies_for_everything_and_for_ipv6_are_charons() {
        assert_eq!(
            charons(&["0.0.0.0/0"], &["0.0.0.0/0"], |set| {
                (set.if_id_in, set.if_id_out) = (7, 7);
            })[0],
            "out 0.0.0.0/0 0.0.0.0/0 if_id 7 priority 399999 tmpl"
        );
        assert_eq!(
            charons(&["::/0"], &["::/0"], |set| {
                (set.if_id_in, set.if_id_out) = (8, 9);
            }),
            [
                "out ::/0 ::/0 if_id 9 priority 399999 tmpl",
                "in ::/0 ::/0 if_id 8 priority 399999 tmpl",
                "fwd ::/0 ::/0 if_id 8 priority 399999 tmpl",
            ]
        );
        assert_eq!(
            charons(&["fd00:1::/64"], &["fd00:2::/48"], |_| {})[0],
            "out fd00:1::/64 fd00:2::/48 priority 342655 tmpl"
        );
        assert_eq!(
            charons(&["fd00:5::/64"], &["fd00:6::/64"], |set| set.fwd_out = true),
            [
                "out fd00:5::/64 fd00:6::/64 priority 334463 tmpl",
                "in fd00:6::/64 fd00:5::/64 priority 334463 tmpl",
                "fwd fd00:5::/64 fd00:6::/64 priority 334464 allow",
                "fwd fd00:6::/64 fd00:5::/64 priority 334463 tmpl",
            ]
        );
        // Several networks of both families.
        assert_eq!(
            charons(
                &["10.1.10.0/24", "10.1.11.0/24", "fd00:3::/64"],
                &["10.2.10.0/24", "fd00:4::/64"],
                |_| {}
            )[..3],
            [
                "out 10.1.10.0/24 10.2.10.0/24 priority 375423 tmpl",
                "out 10.1.11.0/24 10.2.10.0/24 priority 375423 tmpl",
                "out fd00:3::/64 fd00:4::/64 priority 334463 tmpl",
            ]
        );
    }

    #[test]
    fn traps_shunts_and_fixed_priorities_are_charons() {
        assert_eq!(
            charons(&["10.1.9.0/24"], &["10.2.9.0/24"], |set| set.trap = true),
            [
                "out 10.1.9.0/24 10.2.9.0/24 priority 375424 tmpl",
                "in 10.2.9.0/24 10.1.9.0/24 priority 375424 tmpl",
                "fwd 10.2.9.0/24 10.1.9.0/24 priority 375424 tmpl",
            ]
        );
        assert_eq!(
            charons(&["10.1.17.0/24"], &["10.2.17.0/24"], |set| {
                set.action = PolicyAction::Bypass;
            }),
            [
                "out 10.1.17.0/24 10.2.17.0/24 priority 175423 allow",
                "in 10.2.17.0/24 10.1.17.0/24 priority 175423 allow",
                "fwd 10.2.17.0/24 10.1.17.0/24 priority 175423 allow",
            ]
        );
        assert_eq!(
            charons(&["10.1.18.0/24 6 22-22"], &["10.2.18.0/24"], |set| {
                set.action = PolicyAction::Discard;
            }),
            [
                "out 10.1.18.0/24 10.2.18.0/24 proto 6 sport 22/0xffff priority 575103 block",
                "in 10.2.18.0/24 10.1.18.0/24 proto 6 dport 22/0xffff priority 575103 block",
                "fwd 10.2.18.0/24 10.1.18.0/24 proto 6 dport 22/0xffff priority 575103 block",
            ]
        );
        assert!(
            charons(&["10.1.8.0/24"], &["10.2.8.0/24"], |set| {
                set.priority = Some(1234);
            })
            .iter()
            .all(|line| line.ends_with("priority 1234 tmpl"))
        );
    }
}
