// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tunnel, transport and BEET mode: what is asked for, what is answered, and for which traffic.

use std::net::IpAddr;

use swanherd_config::model::{Child, ChildMode, Connection};
use swanherd_ipsec::TrafficSelector;
use swanherd_ipsec::plane::Mode;

use super::child_offer::notify;
use super::narrow;
use crate::wire::{NotifyType, Payload, STRONGSWAN, VendorPayload};

/// The mode that a child asks for.
pub(crate) fn configured(child: &Child) -> Mode {
    match child.mode {
        ChildMode::Ipsec(mode) => mode,
        ChildMode::TransportProxy => Mode::Transport,
        ChildMode::Pass | ChildMode::Drop => Mode::Tunnel,
    }
}

/// Whether transport mode carries what others send by proxy, so that its selectors need not be the
/// two hosts.
pub(super) fn is_proxy(child: &Child) -> bool {
    child.mode == ChildMode::TransportProxy
}

/// The notify that asks for a mode, or confirms it. That for BEET is not registered.
pub(super) fn notify_of(mode: Mode) -> Option<Payload> {
    match mode {
        Mode::Tunnel => None,
        Mode::Transport => Some(notify(NotifyType::UseTransportMode)),
        Mode::Beet => Some(notify(NotifyType::UseBeetMode)),
    }
}

/// By which the peer knows that this side means the private notify for BEET.
pub(super) fn vendor_id(conn: &Connection) -> Option<Payload> {
    let beet = conn
        .children
        .iter()
        .any(|child| child.mode == ChildMode::Ipsec(Mode::Beet));
    beet.then(|| Payload::Vendor(VendorPayload(STRONGSWAN.to_vec())))
}

/// The mode in which a child can answer what the peer asks for, or `None` if it is not negotiated.
pub(super) fn answered(child: &Child, transport: bool, beet: bool) -> Option<Mode> {
    let asked = match child.mode {
        ChildMode::Pass | ChildMode::Drop => return None,
        ChildMode::Ipsec(Mode::Tunnel) => true,
        ChildMode::Ipsec(Mode::Transport) | ChildMode::TransportProxy => transport,
        ChildMode::Ipsec(Mode::Beet) => beet,
    };
    Some(if asked {
        configured(child)
    } else {
        Mode::Tunnel
    })
}

/// The selectors to offer. Transport mode is between the two hosts, and peers refuse more than
/// these; a range that holds them stands for them.
pub(super) fn offered(
    child: &Child,
    local_ts: Vec<TrafficSelector>,
    remote_ts: Vec<TrafficSelector>,
    local: IpAddr,
    remote: IpAddr,
) -> (Vec<TrafficSelector>, Vec<TrafficSelector>) {
    if child.mode != ChildMode::Ipsec(Mode::Transport) {
        return (local_ts, remote_ts);
    }
    let hosts = [local, remote].map(TrafficSelector::host);
    let narrowed = (
        narrow::narrow(&local_ts, &hosts[..1]),
        narrow::narrow(&remote_ts, &hosts[1..]),
    );
    if narrowed.0.is_empty() || narrowed.1.is_empty() {
        (local_ts, remote_ts)
    } else {
        narrowed
    }
}

/// Whether a mode can carry what was agreed: transport and BEET mode only what is between two
/// hosts.
pub(super) fn fits(
    child: &Child,
    mode: Mode,
    local_ts: &[TrafficSelector],
    remote_ts: &[TrafficSelector],
) -> bool {
    let one_host = |selectors: &[TrafficSelector]| {
        let host = selectors.first().map(|ts| ts.start);
        selectors
            .iter()
            .all(|ts| ts.start == ts.end && Some(ts.start) == host)
    };
    mode == Mode::Tunnel || is_proxy(child) || (one_host(local_ts) && one_host(remote_ts))
}
