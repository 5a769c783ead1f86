// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two hosts with a plane each, and what to install in them.

use std::net::IpAddr;
use std::time::Duration;

use swanherd_ipsec::plane::{
    Direction, Mode, Op, Outcome, PlaneEvent, PolicyAction, PolicySet, SaEntry, SaKeys,
};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};
use swanherd_ipsec::{Secret, TrafficSelector};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::xfrm::{XfrmOptions, XfrmPlane};
use tokio::sync::mpsc::Receiver;

use crate::common::{INNER, Lab, OUTER};

pub(crate) struct Suite {
    pub(crate) encryption: EncryptionId,
    pub(crate) key_len: usize,
    pub(crate) integrity: Option<(IntegrityId, usize)>,
}

pub(crate) const GCM: Suite = Suite {
    encryption: EncryptionId::AesGcm16,
    key_len: 20,
    integrity: None,
};

/// Two hosts with a plane each.
pub(crate) struct Hosts {
    pub(crate) lab: Lab,
    pub(crate) planes: [XfrmPlane; 2],
    pub(crate) events: [Receiver<PlaneEvent>; 2],
}

impl Hosts {
    pub(crate) async fn start() -> Self {
        assert!(
            crate::common::kernel_has_esp(),
            "cargo xtask test --only kernel boots a kernel for this"
        );
        let lab = Lab::pair();
        let (a, a_events) = start_plane(&lab, 0, XfrmOptions::default()).await;
        let (b, b_events) = start_plane(&lab, 1, XfrmOptions::default()).await;
        Self {
            lab,
            planes: [a, b],
            events: [a_events, b_events],
        }
    }

    /// Installs SAs both ways and policies; returns the SAs, towards host 1 first. `adjust` may
    /// change each SA before it is installed.
    pub(crate) async fn connect(
        &self,
        suite: &Suite,
        adjust: impl Fn(&mut SaEntry),
    ) -> [SaEntry; 2] {
        self.connect_with(suite, adjust, |_, _| {}).await
    }

    /// [`Hosts::connect`]; `adjust_set` may change the policies of each side.
    pub(crate) async fn connect_with(
        &self,
        suite: &Suite,
        adjust: impl Fn(&mut SaEntry),
        adjust_set: impl Fn(usize, &mut PolicySet),
    ) -> [SaEntry; 2] {
        let spis = [
            alloc_spi(&self.planes[0], 0).await,
            alloc_spi(&self.planes[1], 1).await,
        ];
        let mut forth = entry(suite, outer(0), outer(1), spis[1]);
        let mut back = entry(suite, outer(1), outer(0), spis[0]);
        for (side, plane) in self.planes.iter().enumerate() {
            for sa in [&forth, &back] {
                let direction = if sa.dst == outer(side) {
                    Direction::In
                } else {
                    Direction::Out
                };
                let mut sa = SaEntry {
                    direction,
                    ..sa.clone()
                };
                adjust(&mut sa);
                done(plane.apply(Op::InstallSa(Box::new(sa))).await);
            }
            let spi = if side == 0 { forth.spi } else { back.spi };
            let mut set = policies(side, spi);
            adjust_set(side, &mut set);
            done(plane.apply(Op::InstallPolicies(Box::new(set))).await);
        }
        adjust(&mut forth);
        adjust(&mut back);
        [forth, back]
    }

    pub(crate) async fn shutdown(&self) {
        for plane in &self.planes {
            plane.shutdown().await;
        }
    }
}

pub(crate) async fn start_plane(
    lab: &Lab,
    side: usize,
    options: XfrmOptions,
) -> (XfrmPlane, Receiver<PlaneEvent>) {
    lab.within(side, XfrmPlane::start(options)).await.unwrap()
}

pub(crate) fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn outer(side: usize) -> IpAddr {
    addr(OUTER[side])
}

pub(crate) fn done(outcome: Result<Outcome, swanherd_ipsec::plane::PlaneError>) {
    assert_eq!(outcome, Ok(Outcome::Done));
}

pub(crate) async fn alloc_spi(plane: &XfrmPlane, side: usize) -> u32 {
    let op = Op::AllocSpi {
        src: outer(1 - side),
        dst: outer(side),
        reqid: 1,
    };
    match plane.apply(op).await.unwrap() {
        Outcome::Spi(spi) => spi,
        Outcome::Done => panic!("an SPI was asked for"),
    }
}

pub(crate) fn entry(suite: &Suite, src: IpAddr, dst: IpAddr, spi: u32) -> SaEntry {
    let last = u8::try_from(spi & 0xff).unwrap();
    SaEntry {
        replay_window: 32,
        ..SaEntry::tunnel(
            Direction::Out,
            spi,
            [src, dst],
            1,
            SaKeys {
                encryption: suite.encryption,
                encryption_key: Secret::new((0..suite.key_len).map(|i| i as u8 ^ last).collect()),
                integrity: suite
                    .integrity
                    .map(|(id, len)| (id, Secret::new(vec![last; len]))),
            },
        )
    }
}

pub(crate) fn policies(side: usize, spi: u32) -> PolicySet {
    let network = |side: usize| TrafficSelector::network(INNER[side].parse().unwrap(), 24).unwrap();
    PolicySet::new(
        1,
        "lab/tunnel".to_owned(),
        vec![network(side)],
        vec![network(1 - side)],
        PolicyAction::Protect {
            mode: Mode::Tunnel,
            local: outer(side),
            remote: outer(1 - side),
            reqid: 1,
            spi,
        },
    )
}

pub(crate) async fn next_event(events: &mut Receiver<PlaneEvent>) -> PlaneEvent {
    tokio::time::timeout(Duration::from_secs(20), events.recv())
        .await
        .expect("an event within 20 s")
        .expect("the plane is alive")
}
