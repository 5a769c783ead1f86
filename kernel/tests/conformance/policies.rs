// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which policy decides on a packet that goes out.

use swanherd_ipsec::plane::{Op, PlaneEvent, PolicyAction, PolicySet, SaEntry};

use super::bench::{
    Bed, Bench, QUIET, SPI_OUT, child, child_to, inner, network, protect, sa, sa_in, sa_out, shunt,
    udp_port,
};
use super::sniffer::Kind;

const OTHER: u32 = 0xc000_0033;
const TO: (&str, u16) = ("10.2.0.1", 7000);

fn other_sa(reqid: u32) -> SaEntry {
    SaEntry {
        reqid,
        ..sa(OTHER, 0, 0)
    }
}

fn wide() -> PolicySet {
    child_to(1, 1, network("10.2.0.0", 16))
}

/// The wide tunnel with its SA.
async fn wide_bench<B: Bed>() -> Bench<B> {
    let bench = Bench::<B>::start().await;
    bench.host.install(sa_in()).await;
    bench.host.install(sa_out()).await;
    bench.host.install_set(wide()).await;
    bench
}

pub(crate) async fn a_policy_without_sa_lets_nothing_out<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    bench.host.install_set(child(1)).await;

    assert!(bench.is_stopped(TO).await);

    assert!(matches!(
        bench.host.event().await,
        PlaneEvent::Acquire { reqid: 1, .. }
    ));
    bench.host.done(Op::RemovePolicies(1)).await;
    assert_eq!(bench.leaves_by(TO).await, None);
}

pub(crate) async fn narrower_selectors_win<B: Bed>() {
    let bench = wide_bench::<B>().await;
    bench.host.install(other_sa(2)).await;
    let narrow = child_to(2, 2, network("10.2.3.0", 24));
    bench.host.install_set(narrow).await;

    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(("10.2.3.4", 7000)).await, Some(OTHER));

    bench.host.done(Op::RemovePolicies(2)).await;
    assert_eq!(bench.leaves_by(("10.2.3.4", 7000)).await, Some(SPI_OUT));
}

pub(crate) async fn protocol_and_ports_select<B: Bed>() {
    let bench = Bench::<B>::start().await;
    bench.host.install(sa_out()).await;
    bench.host.install(other_sa(2)).await;
    let to_port = |port| udp_port(network("10.2.0.0", 24), port);
    let several = PolicySet {
        remote: vec![to_port(7001), to_port(7002), network("10.2.9.0", 24)],
        ..child(1)
    };
    bench.host.install_set(several).await;
    let from_port = PolicySet {
        local: vec![udp_port(network("10.1.0.0", 24), 5000)],
        ..child_to(2, 2, udp_port(network("10.2.0.0", 24), 7003))
    };
    bench.host.install_set(from_port).await;

    assert_eq!(bench.leaves_by(("10.2.0.1", 7001)).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(("10.2.0.1", 7002)).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(("10.2.9.1", 7004)).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(("10.2.0.1", 7003)).await, Some(OTHER));
    assert_eq!(bench.leaves_by(("10.2.0.1", 7004)).await, None);
    bench
        .send_from((inner(0), 5001), (inner(1), 7003), b"from another port")
        .await;
    let seen = bench.sniffer.next(super::bench::PATIENCE).await.unwrap();
    assert!(matches!(seen.kind, Kind::Clear));
}

pub(crate) async fn bypass_and_discard_go_by_priority<B: Bed>() {
    let bench = wide_bench::<B>().await;
    let (bypassed, discarded) = (network("10.2.5.0", 24), network("10.2.6.0", 24));
    let (to_bypassed, to_discarded) = (("10.2.5.1", 7000), ("10.2.6.1", 7000));

    // Computed priorities: a bypass comes before tunnels, a drop behind them.
    bench
        .host
        .install_set(shunt(5, PolicyAction::Bypass, bypassed))
        .await;
    bench
        .host
        .install_set(shunt(6, PolicyAction::Discard, discarded))
        .await;
    assert_eq!(bench.leaves_by(to_bypassed).await, None);
    assert_eq!(bench.leaves_by(to_discarded).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));

    // Fixed ones: the other way round.
    let fixed = |set: PolicySet, priority| PolicySet {
        priority: Some(priority),
        ..set
    };
    let bypass = shunt(5, PolicyAction::Bypass, bypassed);
    bench.host.install_set(fixed(bypass, 900_000)).await;
    let discard = shunt(6, PolicyAction::Discard, discarded);
    bench.host.install_set(fixed(discard, 100)).await;
    assert_eq!(bench.leaves_by(to_bypassed).await, Some(SPI_OUT));
    assert!(bench.is_stopped(to_discarded).await);

    // A drop is over a bypass, and goes.
    let over = shunt(7, PolicyAction::Discard, bypassed);
    bench.host.install_set(fixed(over, 50)).await;
    assert!(bench.is_stopped(to_bypassed).await);
    bench.host.done(Op::RemovePolicies(7)).await;
    bench.host.done(Op::RemovePolicies(6)).await;
    assert_eq!(bench.leaves_by(to_bypassed).await, Some(SPI_OUT));
    assert_eq!(bench.leaves_by(to_discarded).await, Some(SPI_OUT));
}

pub(crate) async fn shunts_of_one_port_leave_the_rest_alone<B: Bed>() {
    let bench = wide_bench::<B>().await;
    let port = |port| udp_port(network("10.2.0.0", 16), port);
    bench
        .host
        .install_set(shunt(5, PolicyAction::Bypass, port(53)))
        .await;
    let discard = PolicySet {
        priority: Some(7),
        ..shunt(6, PolicyAction::Discard, port(54))
    };
    bench.host.install_set(discard).await;
    // The same network as the tunnel's, for other hosts of this side.
    let bypass = PolicySet {
        local: vec![network("10.3.0.0", 24)],
        ..shunt(7, PolicyAction::Bypass, network("10.2.0.0", 16))
    };
    bench.host.install_set(bypass).await;

    assert_eq!(bench.leaves_by(("10.2.0.1", 53)).await, None);
    assert!(bench.is_stopped(("10.2.0.1", 54)).await);
    assert_eq!(bench.leaves_by(("10.2.0.1", 55)).await, Some(SPI_OUT));
    bench.lab.ip(0, "addr add 10.3.0.1/24 dev lo");
    bench
        .send_from(("10.3.0.1".parse().unwrap(), 5000), (inner(1), 55), b"x")
        .await;
    let seen = bench.sniffer.next(super::bench::PATIENCE).await.unwrap();
    assert!(matches!(seen.kind, Kind::Clear));
    assert_eq!(seen.outer.src.to_string(), "10.3.0.1");
    assert_eq!(bench.leaves_by(("10.2.0.1", 55)).await, Some(SPI_OUT));
}

pub(crate) async fn equal_priorities_go_by_age<B: Bed>() {
    let bench = Bench::<B>::start().await;
    bench.host.install(sa_out()).await;
    bench.host.install(other_sa(2)).await;
    let fixed = |set: PolicySet| PolicySet {
        priority: Some(1000),
        ..set
    };
    let older = fixed(child_to(9, 1, network("10.2.0.0", 16)));
    let newer = fixed(child_to(2, 2, network("10.2.3.0", 24)));
    bench.host.install_set(older).await;
    bench.host.install_set(newer.clone()).await;

    assert_eq!(bench.leaves_by(("10.2.3.4", 7000)).await, Some(SPI_OUT));
    // Replacing does not make it older.
    bench.host.install_set(newer).await;
    assert_eq!(bench.leaves_by(("10.2.3.4", 7000)).await, Some(SPI_OUT));
    bench.host.done(Op::RemovePolicies(9)).await;
    assert_eq!(bench.leaves_by(("10.2.3.4", 7000)).await, Some(OTHER));
}

pub(crate) async fn conflicting_policies_are_refused<B: Bed>() {
    let bench = Bench::<B>::connected().await;
    bench.host.install(other_sa(2)).await;
    let conflicting = PolicySet {
        action: protect(0, 2),
        ..child(2)
    };

    let refusal = bench
        .host
        .apply(Op::InstallPolicies(Box::new(conflicting.clone())))
        .await
        .unwrap_err();

    let text = refusal.to_string();
    assert!(text.contains("lab/2") && text.contains("lab/1"), "{text}");
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    bench.host.done(Op::RemovePolicies(2)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    // Once the first is gone, it may.
    bench.host.done(Op::RemovePolicies(1)).await;
    bench.host.install_set(conflicting).await;
    assert_eq!(bench.leaves_by(TO).await, Some(OTHER));
}

pub(crate) async fn a_policy_bound_to_an_spi_sends_through_no_other_sa<B: Bed>() {
    let mut bench = Bench::<B>::start().await;
    bench.host.install(sa_out()).await;
    bench.host.install(other_sa(1)).await;
    let bound = |spi| {
        let mut set = child(1);
        if let PolicyAction::Protect { spi: named, .. } = &mut set.action {
            *named = spi;
        }
        set
    };

    bench.host.install_set(bound(SPI_OUT)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    bench.host.install_set(bound(OTHER)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(OTHER));
    bench.host.remove(other_sa(1).id()).await;
    assert!(bench.is_stopped(TO).await);
    assert!(matches!(
        bench.host.event().await,
        PlaneEvent::Acquire { reqid: 1, .. }
    ));
    bench.host.install_set(bound(0)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
}

pub(crate) async fn templates_name_the_peer_of_their_sas<B: Bed>() {
    let bench = Bench::<B>::start().await;
    bench.host.install(sa_out()).await;
    let mut elsewhere = child(1);
    if let PolicyAction::Protect { remote, .. } = &mut elsewhere.action {
        *remote = "192.0.2.99".parse().unwrap();
    }

    bench.host.install_set(elsewhere).await;
    assert!(bench.is_stopped(TO).await);
    bench.host.install_set(child(1)).await;
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
}

pub(crate) async fn what_no_policy_selects_goes_in_clear<B: Bed>() {
    let mut bench = Bench::<B>::connected().await;
    bench.lab.ip(0, "addr add 10.3.0.1/24 dev lo");

    bench
        .send_from(("10.3.0.1".parse().unwrap(), 5000), (inner(1), 7000), b"x")
        .await;
    let seen = bench.sniffer.next(super::bench::PATIENCE).await.unwrap();

    assert!(matches!(seen.kind, Kind::Clear));
    assert_eq!(seen.outer.src.to_string(), "10.3.0.1");
    assert_eq!(bench.leaves_by(TO).await, Some(SPI_OUT));
    assert_eq!(bench.host.events_of(QUIET).await, []);
}
