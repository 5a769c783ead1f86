// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chooses the data plane, and opens it with the sockets that it needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use swanherd_config::settings::{DataPlaneChoice, Settings};
use swanherd_ike::api::{self, Datagram};
use swanherd_ipsec::plane::{Op, Outcome, PlaneError, PlaneEvent, SaCounters, SaId};
use swanherd_kernel::audit::{Audit, ListedPolicy};
use swanherd_kernel::select::{Selection, probe};
use swanherd_kernel::tun::{DEFAULT_MARK, TunConfig, TunPlane};
use swanherd_kernel::udp::{IkeSocket, SocketOptions};
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use swanherd_kernel::{Capabilities, DataPlane, EventCounts, PlaneKind};
use tokio::sync::mpsc;

use crate::paths;
use crate::shell::{self, Sockets};

/// Either data plane, with what the settings have to say about operations on it.
pub(crate) struct Plane {
    inner: AnyPlane,
    wishes: Wishes,
}

/// What of an operation is not wanted.
#[derive(Clone, Copy, Debug)]
struct Wishes {
    /// `charon.install_routes`.
    routes: bool,
    /// `charon.install_virtual_ip`.
    addresses: bool,
}

impl Wishes {
    fn from(settings: &Settings) -> Self {
        Self {
            routes: settings.install_routes,
            addresses: settings.install_virtual_ip,
        }
    }

    /// The operation as it is wanted; `None` if it is not.
    fn of(self, mut op: Op) -> Option<Op> {
        match &mut op {
            Op::InstallPolicies(policies) => policies.routes &= self.routes,
            Op::AddAddress { .. } | Op::RemoveAddress(_) if !self.addresses => return None,
            _ => {}
        }
        Some(op)
    }
}

/// Either data plane.
enum AnyPlane {
    Xfrm(XfrmPlane),
    Tun(Box<TunPlane>),
}

/// A data plane that is ready.
pub(crate) struct Opened {
    pub(crate) plane: Plane,
    pub(crate) events: mpsc::Receiver<PlaneEvent>,
    pub(crate) sockets: Sockets,
    /// Why this one, for the log.
    pub(crate) reason: String,
    /// Whether it can do UDP encapsulation only.
    pub(crate) force_encap: bool,
}

impl Plane {
    pub(crate) fn name(&self) -> &'static str {
        self.kind().name()
    }
}

/// Opens the plane that the settings ask for, or the best that this host has. What arrives on the
/// sockets goes to `engine`.
///
/// # Errors
/// For people: what this host lacks.
pub(crate) async fn open(
    settings: &Settings,
    engine: mpsc::Sender<Datagram>,
) -> Result<Opened, String> {
    match settings.dataplane {
        DataPlaneChoice::Xfrm => open_xfrm(settings, engine, "as configured".to_owned()).await,
        DataPlaneChoice::Tun => open_tun(settings, engine, "as configured".to_owned()).await,
        DataPlaneChoice::Auto => {
            let Selection { kind, reason } = probe().await;
            match kind {
                PlaneKind::Xfrm => open_xfrm(settings, engine, reason).await,
                PlaneKind::Tun => open_tun(settings, engine, reason).await,
            }
        }
    }
}

async fn open_xfrm(
    settings: &Settings,
    engine: mpsc::Sender<Datagram>,
    reason: String,
) -> Result<Opened, String> {
    let options = SocketOptions {
        bypass: true,
        send_buffer: IKE_SEND_BUFFER,
        ..SocketOptions::default()
    };
    let ike = bind(settings.port, &options)?;
    let nat_t = bind(
        settings.port_nat_t,
        &SocketOptions {
            decapsulate: true,
            ..options
        },
    )?;
    let (plane, events) = XfrmPlane::start(XfrmOptions {
        ledger: Some(paths::ledger(settings)),
        hash_thresholds: settings.spd_hash,
        ..XfrmOptions::default()
    })
    .await
    .map_err(|error| format!("cannot use the kernel's XFRM: {error}"))?;
    tokio::spawn(shell::read_ike(Arc::clone(&ike), engine.clone()));
    tokio::spawn(shell::read_nat_t(Arc::clone(&nat_t), engine));
    Ok(Opened {
        plane: Plane {
            inner: AnyPlane::Xfrm(plane),
            wishes: Wishes::from(settings),
        },
        events,
        sockets: Sockets { ike, nat_t },
        reason,
        force_encap: false,
    })
}

async fn open_tun(
    settings: &Settings,
    engine: mpsc::Sender<Datagram>,
    reason: String,
) -> Result<Opened, String> {
    let config = TunConfig {
        device: settings.tun.device.clone(),
        mtu: settings.tun.mtu,
        mark: DEFAULT_MARK,
        workers: settings.tun.workers,
    };
    let options = SocketOptions {
        mark: Some(config.mark),
        send_buffer: IKE_SEND_BUFFER,
        ..SocketOptions::default()
    };
    let ike = bind(settings.port, &options)?;
    let fast = SocketOptions {
        gro: true,
        receive_buffer: FAST_PATH_BUFFER,
        send_buffer: FAST_PATH_BUFFER,
        ..options
    };
    let nat_t = bind(settings.port_nat_t, &fast)?;
    let (plane, events, mut messages) = TunPlane::start(Arc::clone(&nat_t), &config)
        .await
        .map_err(|error| format!("cannot run ESP in user space: {error}"))?;
    tokio::spawn(shell::read_ike(Arc::clone(&ike), engine.clone()));
    tokio::spawn(async move {
        while let Some(message) = messages.recv().await {
            shell::forward(
                &engine,
                message.local,
                message.remote,
                message.payload.to_vec(),
            );
        }
    });
    Ok(Opened {
        plane: Plane {
            inner: AnyPlane::Tun(Box::new(plane)),
            wishes: Wishes::from(settings),
        },
        events,
        sockets: Sockets { ike, nat_t },
        reason,
        force_encap: true,
    })
}

/// Replies to addresses that nobody answers for wait for ARP in the send buffer; a flood of them
/// must leave room for peers that exist.
const IKE_SEND_BUFFER: usize = 4 << 20;
/// Room for the bursts that segmentation offload makes, well below what would be felt as delay.
const FAST_PATH_BUFFER: usize = 4 << 20;

fn bind(port: u16, options: &SocketOptions) -> Result<Arc<IkeSocket>, String> {
    IkeSocket::bind(None, port, options)
        .map(Arc::new)
        .map_err(|error| format!("cannot open UDP port {port}: {error}"))
}

impl DataPlane for Plane {
    fn kind(&self) -> PlaneKind {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.kind(),
            AnyPlane::Tun(plane) => plane.kind(),
        }
    }

    fn capabilities(&self) -> Capabilities {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.capabilities(),
            AnyPlane::Tun(plane) => plane.capabilities(),
        }
    }

    async fn apply(&self, op: Op) -> Result<Outcome, PlaneError> {
        let Some(op) = self.wishes.of(op) else {
            return Ok(Outcome::Done);
        };
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.apply(op).await,
            AnyPlane::Tun(plane) => plane.apply(op).await,
        }
    }

    async fn apply_all(&self, ops: Vec<Op>) -> Vec<Result<Outcome, PlaneError>> {
        let mut skipped = Vec::new();
        let mut wanted = Vec::with_capacity(ops.len());
        for (index, op) in ops.into_iter().enumerate() {
            match self.wishes.of(op) {
                Some(op) => wanted.push(op),
                None => skipped.push(index),
            }
        }
        let mut answers = match &self.inner {
            AnyPlane::Xfrm(plane) => plane.apply_all(wanted).await,
            AnyPlane::Tun(plane) => plane.apply_all(wanted).await,
        };
        for index in skipped {
            answers.insert(index, Ok(Outcome::Done));
        }
        answers
    }

    async fn reconcile(&self, dry_run: bool) -> Result<Audit, PlaneError> {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.reconcile(dry_run).await,
            AnyPlane::Tun(plane) => plane.reconcile(dry_run).await,
        }
    }

    async fn policies(&self) -> Result<Vec<ListedPolicy>, PlaneError> {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.policies().await,
            AnyPlane::Tun(plane) => plane.policies().await,
        }
    }

    fn event_counts(&self) -> EventCounts {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.event_counts(),
            AnyPlane::Tun(plane) => plane.event_counts(),
        }
    }

    async fn counters(&self) -> Result<BTreeMap<SaId, SaCounters>, PlaneError> {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.counters().await,
            AnyPlane::Tun(plane) => plane.counters().await,
        }
    }

    async fn counters_of(&self, id: SaId) -> Option<SaCounters> {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.counters_of(id).await,
            AnyPlane::Tun(plane) => plane.counters_of(id).await,
        }
    }

    async fn shutdown(&self) {
        match &self.inner {
            AnyPlane::Xfrm(plane) => plane.shutdown().await,
            AnyPlane::Tun(plane) => plane.shutdown().await,
        }
    }
}

/// The part of the settings that IKE needs.
pub(crate) fn ike_settings(settings: &Settings, given: Given) -> api::Settings {
    let from = &settings.ike;
    api::Settings {
        port: given.port,
        port_nat_t: given.port_nat_t,
        retransmit_tries: from.retransmit_tries,
        retransmit_timeout: from.retransmit_timeout,
        retransmit_base_milli: from.retransmit_base_milli,
        retransmit_jitter: from.retransmit_jitter,
        retransmit_limit: from.retransmit_limit,
        half_open_timeout: from.half_open_timeout,
        cookie_threshold: from.cookie_threshold,
        cookie_threshold_ip: from.cookie_threshold_ip,
        block_threshold: from.block_threshold,
        init_limit_half_open: from.init_limit_half_open,
        ikesa_limit: from.ikesa_limit,
        keep_alive: from.keep_alive,
        fragment_size: from.fragment_size,
        max_packet: from.max_packet,
        delete_rekeyed_delay: from.delete_rekeyed_delay,
        reuse_ikesa: from.reuse_ikesa,
        close_ike_on_child_failure: from.close_ike_on_child_failure,
        make_before_break: from.make_before_break,
        prefer_configured_proposals: from.prefer_configured_proposals,
        signature_authentication: from.signature_authentication,
        rsa_pss: from.rsa_pss,
        replay_window: from.replay_window,
        reqid_base: from.reqid_base,
        follow_redirects: from.follow_redirects,
        force_encap: given.force_encap,
    }
}

/// What of IKE's settings the data plane and its sockets decide, for as long as they are open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    /// The ports that are bound, whatever was asked for.
    port: u16,
    port_nat_t: u16,
    /// Whether the plane can do UDP encapsulation only.
    force_encap: bool,
}

impl Opened {
    /// See [`Given`].
    pub(crate) fn given(&self) -> Given {
        Given {
            port: self.sockets.ike.port(),
            port_nat_t: self.sockets.nat_t.port(),
            force_encap: self.force_encap,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_and_virtual_addresses_can_be_switched_off() {
        let set = crate::fake_plane::policies(1, swanherd_ipsec::plane::PolicyAction::Bypass, true);
        let install = || {
            Op::InstallPolicies(Box::new(swanherd_ipsec::plane::PolicySet {
                routes: true,
                ..set.clone()
            }))
        };
        let add = || Op::AddAddress {
            addr: "10.99.0.1".parse().unwrap(),
            local: "192.0.2.1".parse().unwrap(),
        };
        let remove = || Op::RemoveAddress("10.99.0.1".parse().unwrap());
        let off = Wishes {
            routes: false,
            addresses: false,
        };
        let on = Wishes::from(&Settings::default());

        assert_eq!(on.of(install()), Some(install()));
        assert_eq!(on.of(add()), Some(add()));
        assert_eq!(on.of(remove()), Some(remove()));
        assert_eq!(off.of(install()), Some(Op::InstallPolicies(Box::new(set))));
        assert_eq!((off.of(add()), off.of(remove())), (None, None));
    }
}
