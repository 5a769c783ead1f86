// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children that claim the same traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use swanherd_ipsec::TrafficSelector;

use super::{Definitions, MAX_FINDINGS, listed};
use crate::diagnostic::Diagnostic;
use crate::model::{Child, ChildMode, Connection, IfId, MarkSpec, SelectorSpec};
use crate::value::display_selector_spec;

/// Comparisons of selectors that are made before giving up.
const MAX_COMPARISONS: usize = 2_000_000;

/// One policy that a child has installed when it is up.
struct Claim<'a> {
    connection: &'a Connection,
    child: &'a Child,
    local: TrafficSelector,
    remote: TrafficSelector,
}

/// What keeps policies apart even if their selectors are equal.
type Realm = ([u32; 2], [(u32, u32); 2]);

fn realm(connection: &Connection, child: &Child) -> Option<Realm> {
    let if_id = |own: IfId, inherited: IfId| match (own, inherited) {
        (IfId::None, IfId::None) => Some(0),
        (IfId::None, IfId::Id(id)) | (IfId::Id(id), _) => Some(id),
        _ => None,
    };
    let mark = |mark: MarkSpec| match mark {
        MarkSpec::None => Some((0, 0)),
        MarkSpec::Mark(mark) => Some((mark.value, mark.mask)),
        _ => None,
    };
    Some((
        [
            if_id(child.if_id_in, connection.if_id_in)?,
            if_id(child.if_id_out, connection.if_id_out)?,
        ],
        [mark(child.mark_in)?, mark(child.mark_out)?],
    ))
}

fn claims<'a>(definitions: &Definitions<'a>) -> BTreeMap<Realm, Vec<Claim<'a>>> {
    let mut claims: BTreeMap<Realm, Vec<Claim<'a>>> = BTreeMap::new();
    for (connection, child) in definitions.children() {
        if !child.policies || !matches!(child.mode, ChildMode::Ipsec(_)) {
            continue;
        }
        // Whatever is unique for each SA collides with nothing.
        let Some(realm) = realm(connection, child) else {
            continue;
        };
        for local in &child.local_ts {
            for remote in &child.remote_ts {
                if let (SelectorSpec::Fixed(local), SelectorSpec::Fixed(remote)) = (local, remote)
                    && local.start.is_ipv4() == remote.start.is_ipv4()
                {
                    claims.entry(realm).or_default().push(Claim {
                        connection,
                        child,
                        local: *local,
                        remote: *remote,
                    });
                }
            }
        }
    }
    claims
}

type Key = (IpAddr, IpAddr, u8, u16, u16);

fn key(ts: &TrafficSelector) -> Key {
    (ts.start, ts.end, ts.protocol, ts.start_port, ts.end_port)
}

fn shown(
    definitions: &Definitions<'_>,
    local: &TrafficSelector,
    remote: &TrafficSelector,
) -> String {
    let text =
        |ts: &TrafficSelector| display_selector_spec(&SelectorSpec::Fixed(*ts), &definitions.names);
    format!("{} === {}", text(local), text(remote))
}

fn overlap(a: &TrafficSelector, b: &TrafficSelector) -> bool {
    a.start <= b.end
        && b.start <= a.end
        && (a.protocol == 0 || b.protocol == 0 || a.protocol == b.protocol)
        && a.start_port <= b.end_port
        && b.start_port <= a.end_port
}

pub(super) fn same(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for claims in claims(definitions).values() {
        let mut alike: BTreeMap<(Key, Key), Vec<&Claim<'_>>> = BTreeMap::new();
        for claim in claims {
            alike
                .entry((key(&claim.local), key(&claim.remote)))
                .or_default()
                .push(claim);
        }
        for claims in alike.values() {
            let first = claims[0];
            let others: Vec<&&Claim<'_>> = claims
                .iter()
                .filter(|claim| claim.connection.name != first.connection.name)
                .collect();
            let Some(second) = others.first() else {
                continue;
            };
            let names: BTreeSet<&str> = others
                .iter()
                .map(|claim| claim.connection.name.as_str())
                .collect();
            let finding = Diagnostic::warning(
                "same-selectors",
                format!(
                    "`{}` has the selectors {} of {}, too: packets go through whichever came up last",
                    first.connection.name,
                    shown(definitions, &first.local, &first.remote),
                    listed(names.into_iter().collect::<Vec<_>>().into_iter()),
                ),
            )
            .help("tell them apart by selectors, marks or interface ids");
            found.push(definitions.about(
                finding,
                second.connection,
                &["children", &second.child.name],
                Some("remote_ts"),
            ));
        }
    }
}

pub(super) fn overlapping(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut comparisons = 0;
    for claims in claims(definitions).values_mut() {
        claims.sort_by_key(|claim| claim.remote.start);
        let mut open: Vec<&Claim<'_>> = Vec::new();
        for claim in claims.iter() {
            open.retain(|other| other.remote.end >= claim.remote.start);
            comparisons += open.len();
            // A file in which everything overlaps is said to be so often enough.
            if comparisons > MAX_COMPARISONS || found.len() > 2 * MAX_FINDINGS {
                return;
            }
            for other in &open {
                let equal = key(&other.local) == key(&claim.local)
                    && key(&other.remote) == key(&claim.remote);
                if !equal
                    && other.connection.name != claim.connection.name
                    && overlap(&other.local, &claim.local)
                    && overlap(&other.remote, &claim.remote)
                {
                    let finding = Diagnostic::note(
                        "overlapping-selectors",
                        format!(
                            "{} overlaps {} of `{}`: the narrower one wins where both are up",
                            shown(definitions, &claim.local, &claim.remote),
                            shown(definitions, &other.local, &other.remote),
                            other.connection.name
                        ),
                    );
                    found.push(definitions.about(
                        finding,
                        claim.connection,
                        &["children", &claim.child.name],
                        Some("remote_ts"),
                    ));
                }
            }
            open.push(claim);
        }
    }
}

pub(super) fn reqids(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    let mut seen: BTreeMap<u32, &str> = BTreeMap::new();
    for (connection, child) in definitions.children() {
        if child.reqid == 0 {
            continue;
        }
        match seen.get(&child.reqid) {
            None => {
                seen.insert(child.reqid, &connection.name);
            }
            Some(other) => {
                let finding = Diagnostic::warning(
                    "same-reqid",
                    format!(
                        "`{other}` has the request id {} too: the kernel cannot tell the SAs of both apart",
                        child.reqid
                    ),
                );
                found.push(definitions.about(
                    finding,
                    connection,
                    &["children", &child.name],
                    Some("reqid"),
                ));
            }
        }
    }
}
