// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE SAs and their children as message sections. Clients depend on the order of the keys.

use std::collections::BTreeMap;
use std::time::Instant;

use swanherd_config::identity::display_identity;
use swanherd_ike::api::{ChildSaInfo, ChildState, IkeSaInfo, IkeState};
use swanherd_ipsec::plane::{Mark, SaCounters, SaId};
use swanherd_vici::Message;

use super::names;

/// Children up to this number fit into one packet, however many selectors they have.
const FEW_CHILDREN: usize = 8;
/// Octets of children in one packet, which leaves room for their IKE SA.
const PART: usize = swanherd_vici::MAX_FRAME / 2;

/// Octets that the name of a child's section may take, and its element.
const MAX_NAME: usize = 260;

/// What ages and counters are taken from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment<'a> {
    /// Now.
    pub(super) instant: Instant,
    /// Now, in seconds since the epoch.
    pub(super) unix: u64,
    /// Counters of the data plane.
    pub(super) counters: &'a BTreeMap<SaId, SaCounters>,
}

/// Name of an IKE SA's section.
pub(super) fn ike_name(sa: &IkeSaInfo) -> String {
    names::printable(sa.connection.as_deref().unwrap_or(names::UNNAMED)).into_owned()
}

/// The keys of an IKE SA, without its children.
pub(super) fn ike_sa(sa: &IkeSaInfo, moment: Moment<'_>) -> Message {
    // Before the first exchange is over, nobody has said who they are.
    let identity = |identity| match sa.suite {
        Some(_) => display_identity(identity),
        None => "%any".to_owned(),
    };
    // An end that is behind a NAT need not be claimed to be.
    let nat = sa.nat_local || sa.nat_remote;
    let mut out = Message::new();
    out.push_display("uniqueid", sa.id);
    out.push("version", "2");
    out.push("state", names::ike_state(sa.state));
    out.push("local-host", names::host(sa.local.ip()));
    out.push_display("local-port", sa.local.port());
    out.push("local-id", identity(&sa.local_id));
    out.push("remote-host", names::host(sa.remote.ip()));
    out.push_display("remote-port", sa.remote.port());
    out.push("remote-id", identity(&sa.remote_id));
    out.push_flag("initiator", sa.initiator);
    out.push("initiator-spi", format!("{:016x}", sa.spi_i));
    out.push("responder-spi", format!("{:016x}", sa.spi_r));
    out.push_flag("nat-local", sa.nat_local);
    out.push_flag("nat-remote", sa.nat_remote);
    out.push_flag("nat-fake", sa.nat_fake && !nat);
    out.push_flag("nat-any", sa.nat_fake || nat);
    if let Some(suite) = sa.suite {
        out.push_display("encr-alg", suite.encryption);
        if let Some(bits) = suite.key_bits {
            out.push_display("encr-keysize", bits);
        }
        if let Some(integrity) = suite.integrity {
            out.push_display("integ-alg", integrity);
        }
        out.push_display("prf-alg", suite.prf);
        out.push_display("dh-group", suite.key_exchange);
    }
    if sa.state == IkeState::Established {
        if let Some(since) = sa.established {
            out.push_display("established", -until(since, moment.instant));
        }
        if let Some(at) = sa.rekey_at {
            out.push_display("rekey-time", until(at, moment.instant));
        }
        if let Some(at) = sa.reauth_at {
            out.push_display("reauth-time", until(at, moment.instant));
        }
    }
    if !sa.local_vips.is_empty() {
        out.push_list("local-vips", sa.local_vips.iter().map(ToString::to_string));
    }
    for (name, tasks) in [
        ("tasks-queued", &sa.tasks_queued),
        ("tasks-active", &sa.tasks_active),
        ("tasks-passive", &sa.tasks_passive),
    ] {
        if !tasks.is_empty() {
            out.push_list(name, tasks);
        }
    }
    out
}

/// An IKE SA with those of its children that `keep` wants. `child-sas` comes last and is there
/// even if empty: `swanctl` prints the SA when it meets it.
pub(super) fn ike_sa_with_children(
    sa: &IkeSaInfo,
    moment: Moment<'_>,
    keep: impl Fn(&ChildSaInfo) -> bool,
) -> Message {
    let mut children = Message::new();
    for child in sa.children.values().filter(|child| keep(child)) {
        children.push_section(child_section(child), child_sa(child, moment));
    }
    ike_sa(sa, moment).with_section("child-sas", children)
}

/// The same in as many messages as it takes for each to fit into a packet, all of which have the
/// keys of the IKE SA: a peer may have set up more children than one packet holds.
pub(super) fn ike_sa_in_parts(
    sa: &IkeSaInfo,
    moment: Moment<'_>,
    keep: impl Fn(&ChildSaInfo) -> bool,
) -> Vec<Message> {
    if sa.children.len() <= FEW_CHILDREN {
        return vec![ike_sa_with_children(sa, moment, keep)];
    }
    let head = ike_sa(sa, moment);
    let mut parts = Vec::new();
    let (mut children, mut octets) = (Message::new(), 0);
    let mut encoded = Vec::new();
    for child in sa.children.values().filter(|child| keep(child)) {
        let section = child_sa(child, moment);
        encoded.clear();
        // One that cannot be encoded is told when it is sent.
        let _ = section.encode_to(&mut encoded);
        let len = encoded.len() + MAX_NAME;
        if octets + len > PART && !children.is_empty() {
            let full = std::mem::take(&mut children);
            parts.push(head.clone().with_section("child-sas", full));
            octets = 0;
        }
        octets += len;
        children.push_section(child_section(child), section);
    }
    parts.push(head.with_section("child-sas", children));
    parts
}

/// Name of a child's section, unique within its IKE SA.
fn child_section(child: &ChildSaInfo) -> String {
    // The name is cut so that the id always fits.
    let name: String = names::printable(&child.name).chars().take(240).collect();
    format!("{name}-{}", child.id)
}

/// The keys of a CHILD SA.
pub(super) fn child_sa(child: &ChildSaInfo, moment: Moment<'_>) -> Message {
    let mut out = Message::new();
    out.push("name", &child.name);
    out.push_display("uniqueid", child.id);
    out.push_display("reqid", child.reqid);
    out.push("state", names::child_state(child.state));
    out.push("mode", names::mode(child.mode));
    let has_sas = matches!(
        child.state,
        ChildState::Installed
            | ChildState::Rekeying
            | ChildState::Rekeyed
            | ChildState::Deleting
            | ChildState::Deleted
    );
    if has_sas {
        push_sas(&mut out, child, moment);
    }
    out.push_list("local-ts", child.local_ts.iter().map(names::selector));
    out.push_list("remote-ts", child.remote_ts.iter().map(names::selector));
    out
}

fn push_sas(out: &mut Message, child: &ChildSaInfo, moment: Moment<'_>) {
    out.push("protocol", "ESP");
    out.push_flag("encap", child.encap);
    for (name, id) in [("spi-in", child.inbound), ("spi-out", child.outbound)] {
        if let Some(id) = id {
            out.push(name, format!("{:08x}", id.spi));
        }
    }
    push_mark(out, ["mark-in", "mark-mask-in"], child.mark_in);
    push_mark(out, ["mark-out", "mark-mask-out"], child.mark_out);
    for (name, id) in [("if-id-in", child.if_id.0), ("if-id-out", child.if_id.1)] {
        if id != 0 {
            out.push(name, format!("{id:08x}"));
        }
    }
    if let Some(suite) = child.suite {
        out.push_display("encr-alg", suite.encryption);
        if let Some(bits) = suite.key_bits {
            out.push_display("encr-keysize", bits);
        }
        if let Some(integrity) = suite.integrity {
            out.push_display("integ-alg", integrity);
        }
        if let Some(group) = suite.key_exchange {
            out.push_display("dh-group", group);
        }
        if suite.esn {
            out.push("esn", "1");
        }
    }
    push_counters(
        out,
        ["bytes-in", "packets-in", "use-in"],
        child.inbound,
        moment,
    );
    push_counters(
        out,
        ["bytes-out", "packets-out", "use-out"],
        child.outbound,
        moment,
    );
    if let Some(at) = child.rekey_at {
        out.push_display("rekey-time", until(at, moment.instant));
    }
    if let Some(at) = child.expires_at {
        out.push_display("life-time", until(at, moment.instant));
    }
    let installed = child.installed.unwrap_or(moment.instant);
    out.push_display("install-time", -until(installed, moment.instant));
}

fn push_mark(out: &mut Message, [value, mask]: [&str; 2], mark: Option<Mark>) {
    let Some(mark) = mark else { return };
    out.push(value, format!("{:08x}", mark.value));
    if mark.mask != u32::MAX {
        out.push(mask, format!("{:08x}", mark.mask));
    }
}

fn push_counters(
    out: &mut Message,
    [bytes, packets, used]: [&str; 3],
    id: Option<SaId>,
    moment: Moment<'_>,
) {
    let found = id.and_then(|id| moment.counters.get(&id));
    let counters = found.copied().unwrap_or_default();
    out.push_display(bytes, counters.bytes);
    out.push_display(packets, counters.packets);
    if counters.last_used != 0 {
        out.push_display(used, moment.unix.saturating_sub(counters.last_used));
    }
}

/// Seconds from `now` to `then`; negative if it is past. What has begun counts, so that age and
/// remaining time add up to the whole.
fn until(then: Instant, now: Instant) -> i64 {
    let whole = |seconds| i64::try_from(seconds).unwrap_or(i64::MAX);
    match then.checked_duration_since(now) {
        Some(left) => whole(left.as_secs()) + i64::from(left.subsec_nanos() > 0),
        None => -whole(now.duration_since(then).as_secs()),
    }
}
