// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Actions as a recording holds them: everything but keys.
//!
//! The structures are taken apart by name, so that nobody adds a field and forgets it here.

use std::time::Instant;

use serde_json::{Value, json};
use swanherd_ipsec::hex;

use crate::api::{Action, ChildSaInfo, Event, IkeSaInfo, LogLine, Transmit};

/// An action. Moments are nanoseconds since `origin`.
pub(super) fn action(action: &Action, origin: Instant) -> Value {
    match action {
        Action::Transmit(Transmit {
            local,
            remote,
            payload,
            dscp,
            keepalive,
        }) => json!({"transmit": {
            "local": local,
            "remote": remote,
            "payload": hex::encode(payload),
            "dscp": dscp,
            "keepalive": keepalive,
        }}),
        Action::Plane(token, op) => json!({"plane": {"token": token, "op": op}}),
        Action::Compute(token, job) => {
            json!({"compute": {"token": token, "job": format!("{job:?}")}})
        }
        Action::Resolve(token, name) => json!({"resolve": {"token": token, "name": name}}),
        Action::Source(token, remote) => json!({"source": {"token": token, "remote": remote}}),
        Action::Usage(token, sas) => json!({"usage": {"token": token, "sas": sas}}),
        Action::Event(told) => json!({"event": event(told, origin)}),
    }
}

fn event(event: &Event, origin: Instant) -> Value {
    let ike = |sa: &IkeSaInfo| ike_sa(sa, origin);
    let child = |sa: &ChildSaInfo| child_sa(sa, origin);
    match event {
        Event::IkeUpDown { up, sa } => json!({"ike_updown": {"up": up, "sa": ike(sa)}}),
        Event::IkeRekey { old, new } => json!({"ike_rekey": {"old": ike(old), "new": ike(new)}}),
        Event::IkeUpdate { sa, local, remote } => {
            json!({"ike_update": {"sa": ike(sa), "local": local, "remote": remote}})
        }
        Event::ChildUpDown { up, sa } => json!({"child_updown": {"up": up, "sa": ike(sa)}}),
        Event::ChildRekey { sa, old, new } => json!({"child_rekey": {
            "sa": ike(sa),
            "old": child(old),
            "new": child(new),
        }}),
        Event::Log(LogLine {
            group,
            level,
            ike_sa,
            message,
        }) => json!({"log": {
            "group": format!("{group:?}"),
            "level": level,
            "ike_sa": ike_sa,
            "message": message,
        }}),
        Event::Alert { kind, sa } => json!({"alert": {
            "kind": kind,
            "sa": sa.as_deref().map(ike),
        }}),
        Event::CommandDone { id, result } => json!({"command_done": {"id": id, "result": result}}),
        Event::Failure {
            connection,
            child,
            reason,
            text,
        } => json!({"failure": {
            "connection": connection,
            "child": child,
            "reason": format!("{reason:?}"),
            "text": text,
        }}),
        Event::NextAttempt {
            connection,
            child,
            at,
        } => json!({"next_attempt": {
            "connection": connection,
            "child": child,
            "at": nanos(*at, origin),
        }}),
        Event::Counter {
            connection,
            counter,
        } => json!({"counter": {
            "connection": connection,
            "counter": format!("{counter:?}"),
        }}),
        Event::Changed(id) => json!({"changed": id}),
        Event::Gone(id) => json!({"gone": id}),
    }
}

fn nanos(at: Option<Instant>, origin: Instant) -> Option<u64> {
    let since = at?.saturating_duration_since(origin);
    Some(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn ike_sa(sa: &IkeSaInfo, origin: Instant) -> Value {
    let IkeSaInfo {
        id,
        connection,
        state,
        local,
        remote,
        local_id,
        remote_id,
        initiator,
        spi_i,
        spi_r,
        nat_local,
        nat_remote,
        nat_fake,
        suite,
        local_vips,
        established,
        rekey_at,
        reauth_at,
        tasks_queued,
        tasks_active,
        tasks_passive,
        wanted,
        children,
    } = sa;
    let children: Vec<Value> = children
        .values()
        .map(|child| child_sa(child, origin))
        .collect();
    json!({
        "id": id,
        "connection": connection,
        "state": format!("{state:?}"),
        "local": local,
        "remote": remote,
        "local_id": local_id,
        "remote_id": remote_id,
        "initiator": initiator,
        "spi_i": format!("{spi_i:016x}"),
        "spi_r": format!("{spi_r:016x}"),
        "nat_local": nat_local,
        "nat_remote": nat_remote,
        "nat_fake": nat_fake,
        "suite": suite,
        "local_vips": local_vips,
        "established": nanos(*established, origin),
        "rekey_at": nanos(*rekey_at, origin),
        "reauth_at": nanos(*reauth_at, origin),
        "tasks_queued": tasks_queued,
        "tasks_active": tasks_active,
        "tasks_passive": tasks_passive,
        "wanted": wanted,
        "children": children,
    })
}

fn child_sa(sa: &ChildSaInfo, origin: Instant) -> Value {
    let ChildSaInfo {
        id,
        name,
        reqid,
        state,
        mode,
        encap,
        inbound,
        outbound,
        suite,
        if_id,
        mark_in,
        mark_out,
        local_ts,
        remote_ts,
        installed,
        rekey_at,
        expires_at,
    } = sa;
    json!({
        "id": id,
        "name": name,
        "reqid": reqid,
        "state": format!("{state:?}"),
        "mode": mode,
        "encap": encap,
        "inbound": inbound,
        "outbound": outbound,
        "suite": suite,
        "if_id": if_id,
        "mark_in": mark_in,
        "mark_out": mark_out,
        "local_ts": local_ts,
        "remote_ts": remote_ts,
        "installed": nanos(*installed, origin),
        "rekey_at": nanos(*rekey_at, origin),
        "expires_at": nanos(*expires_at, origin),
    })
}
