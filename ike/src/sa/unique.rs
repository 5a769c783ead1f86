// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Marks and interface ids of a child, as configured or drawn.

use swanherd_config::model::{Child, Connection, IfId, MarkSpec};
use swanherd_ipsec::plane::Mark;

use super::env::Env;

/// Marks and interface ids, inbound and outbound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tags {
    pub(crate) if_id: (u32, u32),
    pub(crate) mark_in: Option<Mark>,
    pub(crate) mark_out: Option<Mark>,
}

/// The interface ids of a connection, `%unique` drawn.
pub(crate) fn connection_if_id(env: &mut Env, conn: &Connection) -> (u32, u32) {
    let mut drawn = (None, None);
    if_id(env, conn.if_id_in, conn.if_id_out, (0, 0), &mut drawn)
}

/// Whether an interface id of a connection is drawn.
pub(crate) fn draws_if_id(conn: &Connection) -> bool {
    let drawn = |id| matches!(id, IfId::Unique | IfId::UniqueDir);
    drawn(conn.if_id_in) || drawn(conn.if_id_out)
}

/// Marks and interface ids of a child of the policy set `set`. What is drawn for it, or was, is the
/// same as long as the set has an owner. `inherited` are the interface ids of the connection.
pub(crate) fn tags(env: &mut Env, child: &Child, inherited: (u32, u32), set: u32) -> Tags {
    let mut uniques = env.policies.uniques(set).copied().unwrap_or_default();
    let tags = Tags {
        if_id: if_id(
            env,
            child.if_id_in,
            child.if_id_out,
            inherited,
            &mut uniques.if_id,
        ),
        mark_in: None,
        mark_out: None,
    };
    let (mark_in, mark_out) = marks(env, &child.mark_in, &child.mark_out, &mut uniques.mark);
    if let Some(stored) = env.policies.uniques(set) {
        *stored = uniques;
    }
    Tags {
        mark_in,
        mark_out,
        ..tags
    }
}

/// The mark that an SA sets, `same` being the one of its policies.
pub(crate) fn set_mark(spec: &MarkSpec, same: Option<Mark>) -> Option<Mark> {
    match *spec {
        MarkSpec::Mark(mark) => Some(mark),
        MarkSpec::Same(mask) => same.map(|mark| Mark {
            value: mark.value & mask,
            mask,
        }),
        MarkSpec::None | MarkSpec::Unique(_) | MarkSpec::UniqueDir(_) => None,
    }
}

fn if_id(
    env: &mut Env,
    id_in: IfId,
    id_out: IfId,
    inherited: (u32, u32),
    drawn: &mut (Option<u32>, Option<u32>),
) -> (u32, u32) {
    let wanted = (
        kind(
            matches!(id_in, IfId::Unique),
            matches!(id_in, IfId::UniqueDir),
        ),
        kind(
            matches!(id_out, IfId::Unique),
            matches!(id_out, IfId::UniqueDir),
        ),
    );
    draw(env, wanted, drawn);
    let one = |spec, inherited, drawn: Option<u32>| match spec {
        IfId::None => inherited,
        IfId::Id(id) => id,
        IfId::Unique | IfId::UniqueDir => drawn.unwrap_or(0),
    };
    (
        one(id_in, inherited.0, drawn.0),
        one(id_out, inherited.1, drawn.1),
    )
}

fn marks(
    env: &mut Env,
    mark_in: &MarkSpec,
    mark_out: &MarkSpec,
    drawn: &mut (Option<u32>, Option<u32>),
) -> (Option<Mark>, Option<Mark>) {
    let of = |spec: &MarkSpec| {
        kind(
            matches!(spec, MarkSpec::Unique(_)),
            matches!(spec, MarkSpec::UniqueDir(_)),
        )
    };
    draw(env, (of(mark_in), of(mark_out)), drawn);
    let one = |spec: &MarkSpec, drawn: Option<u32>| match *spec {
        MarkSpec::None | MarkSpec::Same(_) => None,
        MarkSpec::Mark(mark) => Some(mark),
        MarkSpec::Unique(mask) | MarkSpec::UniqueDir(mask) => Some(Mark {
            value: scatter(drawn.unwrap_or(0), mask),
            mask,
        }),
    };
    (one(mark_in, drawn.0), one(mark_out, drawn.1))
}

/// How a value is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Draw {
    /// Not at all.
    No,
    /// One for both directions.
    Shared,
    /// One for this direction.
    Own,
}

fn kind(shared: bool, own: bool) -> Draw {
    match (shared, own) {
        (true, _) => Draw::Shared,
        (_, true) => Draw::Own,
        _ => Draw::No,
    }
}

fn draw(env: &mut Env, wanted: (Draw, Draw), drawn: &mut (Option<u32>, Option<u32>)) {
    if wanted == (Draw::Shared, Draw::Shared) {
        if drawn.0.is_none() || drawn.0 != drawn.1 {
            let value = Some(env.new_unique());
            *drawn = (value, value);
        }
        return;
    }
    for (wanted, drawn) in [(wanted.0, &mut drawn.0), (wanted.1, &mut drawn.1)] {
        if wanted != Draw::No && drawn.is_none() {
            *drawn = Some(env.new_unique());
        }
    }
}

/// Puts the bits of `value` where `mask` has ones, lowest first, so that values which differ stay
/// different under a mask. That changes nothing under the usual masks from bit 0 up.
fn scatter(value: u32, mask: u32) -> u32 {
    let mut bits = value;
    let mut out = 0;
    for place in (0..32).filter(|place| mask >> place & 1 == 1) {
        out |= (bits & 1) << place;
        bits >>= 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawn_value_fits_its_mask() {
        assert_eq!(scatter(0x1234, u32::MAX), 0x1234);
        assert_eq!(scatter(0x1234, 0xff), 0x34);
        assert_eq!(scatter(0x0034, 0xff00), 0x3400);
        assert_eq!(scatter(5, 0x8001_0001), 0x8000_0001);
    }
}
