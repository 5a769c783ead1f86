// SPDX-License-Identifier: Apache-2.0 OR MIT
//! IKE_SA_INIT and IKE_AUTH: what comes up, and what must not.

use std::time::Duration;

use swanherd_config::model::{AuthMethod, CertSource, Connection, HostSpec, PubkeyConstraints};
use swanherd_ike::api::{ChildState, Command, Counter, FailureReason, IkeState, Settings};
use swanherd_ike::credentials::{Certificate, Credentials, PrivateKey};
use swanherd_ike::crypto::Provider;
use swanherd_ike::wire::{Message, NotifyType, Payload};
use swanherd_ipsec::registry::KeyExchangeId;

use crate::config::{
    child, esp_proposal, ike_proposal, ike_proposal_cbc, network, pair, psk, psk_of,
};
use crate::plane::OpKind;
use crate::world::{ALICE, BOB, World};

/// Both sides loaded, nothing started.
pub(crate) fn ready(world: &mut World, (alice, bob): (Connection, Connection)) {
    world.load(ALICE, &psk(), alice);
    world.load(BOB, &psk(), bob);
}

/// Both sides up.
pub(crate) fn established(seed: u64) -> World {
    established_with(World::new(seed), pair())
}

pub(crate) fn established_with(mut world: World, connections: (Connection, Connection)) -> World {
    ready(&mut world, connections);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(1);
    world
}

#[test]
fn a_pre_shared_key_brings_up_a_tunnel() {
    let world = established(1);

    let sas = world.host(ALICE).ike_sas();
    assert_eq!(sas.len(), 1);
    assert!(sas[0].initiator);
    assert_eq!(sas[0].connection.as_deref(), Some("to-bob"));
    let theirs = world.host(BOB).ike_sas();
    assert!(!theirs[0].initiator);
    assert_eq!(theirs[0].suite, sas[0].suite);
    assert_eq!(theirs[0].remote_id, sas[0].local_id);
    let children = world.host(BOB).children();
    assert_eq!(children[0].state, ChildState::Installed);
    assert_eq!(children[0].local_ts, [network("10.2.0.0/16")]);
    assert_eq!(children[0].remote_ts, [network("10.1.0.0/16")]);
    assert!(!children[0].encap);
}

#[test]
fn real_key_exchanges_and_ciphers_of_both_kinds_work() {
    for proposal in [
        ike_proposal_cbc(),
        ike_proposal(&[KeyExchangeId::Ecp256]),
        ike_proposal(&[KeyExchangeId::Modp2048]),
    ] {
        let mut connections = pair();
        connections.0.proposals = vec![proposal.clone()];
        connections.1.proposals = vec![proposal];
        let world = World::with(2, Settings::default(), Provider::ring());
        established_with(world, connections);
    }
}

#[test]
fn the_responder_can_initiate_too() {
    let mut world = World::new(3);
    ready(&mut world, pair());
    let command = world.initiate(BOB, "net");
    assert_eq!(world.finish(BOB, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(1);
}

#[test]
fn both_sides_may_initiate_at_the_same_moment() {
    let mut world = World::new(4);
    ready(&mut world, pair());
    let commands = (world.initiate(ALICE, "net"), world.initiate(BOB, "net"));
    assert_eq!(world.finish(ALICE, commands.0), Ok(()));
    assert_eq!(world.finish(BOB, commands.1), Ok(()));
    world.run_for(Duration::from_secs(30));
    let children = world.host(ALICE).children().len();
    world.assert_in_sync(children);
}

#[test]
fn a_wrong_pre_shared_key_is_refused_and_leaves_nothing() {
    let mut world = World::new(5);
    let (alice, bob) = pair();
    world.load(ALICE, &psk_of(b"right"), alice);
    world.load(BOB, &psk_of(b"wrong"), bob);

    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(60));

    world.assert_all_clean();
    let failed = Counter::Failure(FailureReason::LocalAuthFailed);
    assert!(world.host(ALICE).counted(failed) > 0);
    let failed = Counter::Failure(FailureReason::PeerAuthFailed);
    assert!(world.host(BOB).counted(failed) > 0);
}

#[test]
fn an_unexpected_identity_is_refused() {
    let mut world = World::new(6);
    let (alice, mut bob) = pair();
    bob.remote = vec![crate::config::round(
        "remote",
        AuthMethod::Psk,
        "mallory.example",
    )];
    world.load(ALICE, &psk(), alice);
    world.load(BOB, &psk(), bob);

    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(60));
    world.assert_all_clean();
}

#[test]
fn proposals_without_overlap_are_refused_with_a_reason() {
    let mut world = World::new(7);
    let (alice, mut bob) = pair();
    bob.proposals = vec![ike_proposal_cbc()];
    world.load(ALICE, &psk(), alice);
    world.load(BOB, &psk(), bob);

    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(60));

    world.assert_all_clean();
    let failed = Counter::Failure(FailureReason::IkeProposalMismatch);
    assert!(world.host(ALICE).counted(failed) > 0);
}

#[test]
fn selectors_without_overlap_leave_an_ike_sa_without_child() {
    let mut world = World::new(8);
    let (alice, mut bob) = pair();
    bob.children = vec![child("net", "10.9.0.0/16", "10.8.0.0/16")];
    world.load(ALICE, &psk(), alice);
    world.load(BOB, &psk(), bob);

    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(5));

    world.assert_in_sync(0);
    let failed = Counter::Failure(FailureReason::SelectorMismatch);
    assert!(world.host(ALICE).counted(failed) > 0);
}

#[test]
fn selectors_are_narrowed_to_what_both_want() {
    let mut connections = pair();
    connections.0.children = vec![child("net", "10.0.0.0/8", "10.0.0.0/8")];
    let world = established_with(World::new(9), connections);
    let children = world.host(ALICE).children();
    assert_eq!(children[0].local_ts, [network("10.1.0.0/16")]);
    assert_eq!(children[0].remote_ts, [network("10.2.0.0/16")]);
}

#[test]
fn a_wrong_guess_of_the_key_exchange_is_corrected() {
    let mut connections = pair();
    connections.0.proposals = vec![ike_proposal(&[
        KeyExchangeId::Curve25519,
        KeyExchangeId::Ecp256,
    ])];
    connections.1.proposals = vec![ike_proposal(&[KeyExchangeId::Ecp256])];
    let mut world = World::new(10);
    world.tape = Some(Vec::new());

    let world = established_with(world, connections);

    let suite = world.host(ALICE).ike_sas()[0].suite.unwrap();
    assert_eq!(suite.key_exchange, KeyExchangeId::Ecp256);
    assert_eq!(sent_notifies(&world, NotifyType::InvalidKePayload), 1);
}

/// How many datagrams carried a notify in clear.
pub(crate) fn sent_notifies(world: &World, notify_type: NotifyType) -> usize {
    let tape = world.tape.as_ref().unwrap();
    tape.iter()
        .filter_map(|transmit| Message::parse(&transmit.payload).ok())
        .filter(|message| message.notify(notify_type).is_some())
        .count()
}

#[test]
fn a_cookie_is_demanded_under_load_and_returned() {
    let settings = Settings {
        cookie_threshold: 1,
        cookie_threshold_ip: 1,
        ..Settings::default()
    };
    let mut world = World::with(11, settings.clone(), Provider::fake());
    world.tape = Some(Vec::new());
    let dead_ends: Vec<_> = ["192.0.2.7", "192.0.2.8"]
        .into_iter()
        .map(|addr| world.add_host("other", addr, settings.clone(), Provider::fake()))
        .collect();
    let (alice, mut bob) = pair();
    bob.remote_addrs = vec![HostSpec::Any(None)];
    world.load(BOB, &psk(), bob);
    // Others that begin and never go on.
    world.filter = Some(Box::new(|transmit| {
        let dead_end =
            ["192.0.2.7", "192.0.2.8"].contains(&transmit.local.ip().to_string().as_str());
        let first = Message::parse(&transmit.payload).is_ok_and(|m| m.header.message_id == 0);
        !dead_end || first
    }));
    for host in dead_ends {
        world.load(host, &psk(), alice.clone());
        world.initiate(host, "net");
    }
    world.run_for(Duration::from_secs(1));
    assert!(world.host(BOB).endpoint.half_open() >= 1);

    world.load(ALICE, &psk(), alice);
    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));

    assert!(
        sent_notifies(&world, NotifyType::Cookie) >= 2,
        "demanded and returned"
    );
    world.run_for(Duration::from_secs(300));
    assert_eq!(world.host(BOB).endpoint.half_open(), 0);
    assert_eq!(world.host(BOB).count(IkeState::Established), 1);
}

#[test]
fn a_name_is_resolved_before_the_first_message() {
    let mut connections = pair();
    connections.0.remote_addrs = vec![HostSpec::Name("bob.example".to_owned())];
    established_with(World::new(12), connections);
}

#[test]
fn a_name_that_does_not_resolve_is_reported() {
    let mut world = World::new(13);
    let (mut alice, _) = pair();
    alice.remote_addrs = vec![HostSpec::Name("nobody.invalid".to_owned())];
    world.load(ALICE, &psk(), alice);
    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(5));
    world.assert_clean(ALICE);
}

#[test]
fn a_dead_peer_uses_up_the_retransmissions() {
    let mut world = World::new(14);
    ready(&mut world, pair());
    world.net.cut = true;
    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());

    // 4 s, 1.8 times that, and so on: 165 s with the default five retransmissions.
    let elapsed = world.elapsed().as_secs();
    assert!((160..170).contains(&elapsed), "{elapsed} s");
    assert_eq!(world.host(ALICE).counted(Counter::Retransmit), 5);
    assert_eq!(world.host(ALICE).counted(Counter::PeerTimeout), 1);
    world.assert_all_clean();
}

#[test]
fn a_failing_data_plane_leaves_nothing_behind() {
    for (host, kind) in [
        (ALICE, OpKind::AllocSpi),
        (ALICE, OpKind::InstallSa),
        (ALICE, OpKind::InstallPolicies),
        (BOB, OpKind::AllocSpi),
        (BOB, OpKind::InstallSa),
        (BOB, OpKind::InstallPolicies),
    ] {
        let mut world = World::new(15);
        ready(&mut world, pair());
        world.hosts[host].plane.failing.push((kind, 1));
        let command = world.initiate(ALICE, "net");
        assert!(world.finish(ALICE, command).is_err(), "{host} {kind:?}");
        world.run_for(Duration::from_secs(5));
        let children = world.host(ALICE).children().len() + world.host(BOB).children().len();
        assert_eq!(children, 0, "{host} {kind:?}");
        world.assert_nothing_leaked(ALICE);
        world.assert_nothing_leaked(BOB);

        // The next attempt comes up.
        let command = world.initiate(ALICE, "net");
        assert_eq!(world.finish(ALICE, command), Ok(()), "{host} {kind:?}");
        world.run_for(Duration::from_secs(5));
        world.assert_in_sync(1);
    }
}

#[test]
fn a_second_child_is_added_to_the_ike_sa() {
    let mut connections = pair();
    let methods = [KeyExchangeId::Ecp256];
    for (conn, local, remote) in [
        (&mut connections.0, "10.3.0.0/16", "10.4.0.0/16"),
        (&mut connections.1, "10.4.0.0/16", "10.3.0.0/16"),
    ] {
        let mut second = child("second", local, remote);
        second.proposals = vec![esp_proposal(&methods)];
        conn.children.push(second);
    }
    let mut world = established_with(World::new(16), connections);

    let command = world.initiate(ALICE, "second");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));

    world.assert_in_sync(2);
    assert_eq!(world.host(ALICE).ike_sas().len(), 1);
    let children = world.host(BOB).children();
    let second = children
        .iter()
        .find(|child| child.name == "second")
        .unwrap();
    assert_eq!(
        second.suite.unwrap().key_exchange,
        Some(KeyExchangeId::Ecp256)
    );
}

#[test]
fn an_ike_sa_may_be_initiated_without_children() {
    let mut connections = pair();
    for conn in [&mut connections.0, &mut connections.1] {
        conn.childless = swanherd_config::model::Childless::Prefer;
        conn.children.clear();
    }
    let mut world = World::new(17);
    ready(&mut world, connections);
    let command = world.command(
        ALICE,
        Command::Initiate {
            connection: Some("to-bob".to_owned()),
            child: None,
            respect_limits: false,
        },
    );
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));
    world.assert_in_sync(0);
}

#[test]
fn a_first_child_may_come_after_the_ike_sa() {
    use swanherd_config::model::Childless;
    for childless in [Childless::Prefer, Childless::Force] {
        let mut connections = pair();
        for conn in [&mut connections.0, &mut connections.1] {
            conn.childless = childless;
            conn.children[0].proposals = vec![esp_proposal(&[KeyExchangeId::Ecp256])];
        }
        let world = established_with(World::new(18), connections);

        // With an exchange of its own it has a key exchange of its own.
        let children = world.host(BOB).children();
        assert_eq!(children.len(), 1);
        assert!(children[0].suite.unwrap().key_exchange.is_some());
    }
}

#[test]
fn who_insists_on_children_and_who_insists_on_none_leave_nothing_of_each_other() {
    use swanherd_config::model::Childless;
    for childless in [
        [Childless::Force, Childless::Never],
        [Childless::Never, Childless::Force],
        [Childless::Allow, Childless::Force],
    ] {
        let mut connections = pair();
        connections.0.childless = childless[0];
        connections.1.childless = childless[1];
        let mut world = World::new(19);
        ready(&mut world, connections);

        let command = world.initiate(ALICE, "net");

        assert!(world.finish(ALICE, command).is_err(), "{childless:?}");
        // What is half open at the responder ends with its time.
        world.run_for(Duration::from_secs(60));
        for host in [ALICE, BOB] {
            assert!(world.host(host).ike_sas().is_empty(), "{childless:?}");
            world.assert_nothing_leaked(host);
        }
    }
}

/// A certificate authority, and a certificate with its key for a name.
struct Pki {
    authority: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

impl Pki {
    fn new() -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "Authority");
        params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        let key = rcgen::KeyPair::generate().unwrap();
        Self {
            authority: rcgen::CertifiedIssuer::self_signed(params, key).unwrap(),
        }
    }

    /// Credentials of `name`, and its certificate.
    fn credentials(
        &self,
        name: &str,
        algorithm: &'static rcgen::SignatureAlgorithm,
    ) -> (Credentials, CertSource) {
        let key = rcgen::KeyPair::generate_for(algorithm).unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.authority).unwrap();

        let mut credentials = Credentials::new();
        credentials.add_certificate(Certificate::parse(self.authority.der()).unwrap());
        credentials.add_certificate(Certificate::parse(certificate.der()).unwrap());
        credentials.add_key(PrivateKey::parse(&key.serialize_der()).unwrap());
        (credentials, CertSource::Data(certificate.der().to_vec()))
    }
}

fn pubkey_pair() -> (Connection, Connection) {
    let (mut alice, mut bob) = pair();
    for conn in [&mut alice, &mut bob] {
        for round in conn.local.iter_mut().chain(&mut conn.remote) {
            round.auth = AuthMethod::Pubkey(PubkeyConstraints::default());
        }
    }
    (alice, bob)
}

#[test]
fn certificates_authenticate_both_sides() {
    let pki = Pki::new();
    for algorithm in [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
    ] {
        let (mut alice, mut bob) = pubkey_pair();
        let (alice_credentials, alice_cert) = pki.credentials("alice.example", algorithm);
        let (bob_credentials, bob_cert) = pki.credentials("bob.example", algorithm);
        alice.local[0].certs = vec![alice_cert];
        bob.local[0].certs = vec![bob_cert];
        let mut world = World::with(18, Settings::default(), Provider::ring());
        world.load(ALICE, &alice_credentials, alice);
        world.load(BOB, &bob_credentials, bob);

        let command = world.initiate(ALICE, "net");
        assert_eq!(world.finish(ALICE, command), Ok(()));
        world.run_for(Duration::from_secs(1));
        world.assert_in_sync(1);
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused() {
    let (mut alice, mut bob) = pubkey_pair();
    let algorithm = &rcgen::PKCS_ECDSA_P256_SHA256;
    let (alice_credentials, alice_cert) = Pki::new().credentials("alice.example", algorithm);
    let (bob_credentials, bob_cert) = Pki::new().credentials("bob.example", algorithm);
    alice.local[0].certs = vec![alice_cert];
    bob.local[0].certs = vec![bob_cert];
    let mut world = World::new(19);
    world.load(ALICE, &alice_credentials, alice);
    world.load(BOB, &bob_credentials, bob);

    let command = world.initiate(ALICE, "net");
    assert!(world.finish(ALICE, command).is_err());
    world.run_for(Duration::from_secs(60));
    world.assert_all_clean();
}

#[test]
fn a_long_certificate_travels_in_fragments() {
    let pki = Pki::new();
    let algorithm = &rcgen::PKCS_ECDSA_P256_SHA256;
    let (mut alice, mut bob) = pubkey_pair();
    let (alice_credentials, alice_cert) = pki.credentials("alice.example", algorithm);
    let (bob_credentials, bob_cert) = pki.credentials("bob.example", algorithm);
    alice.local[0].certs = vec![alice_cert];
    bob.local[0].certs = vec![bob_cert];
    let settings = Settings {
        fragment_size: 576,
        ..Settings::default()
    };
    let mut world = World::with(20, settings, Provider::fake());
    world.net.conditions.mtu = 576;
    world.tape = Some(Vec::new());
    world.load(ALICE, &alice_credentials, alice);
    world.load(BOB, &bob_credentials, bob);

    let command = world.initiate(ALICE, "net");
    assert_eq!(world.finish(ALICE, command), Ok(()));
    world.run_for(Duration::from_secs(1));

    world.assert_in_sync(1);
    let fragments = world
        .tape
        .as_ref()
        .unwrap()
        .iter()
        .filter_map(|transmit| Message::parse(&transmit.payload).ok())
        .filter(|message| matches!(message.payloads.last(), Some(Payload::Skf(_))))
        .count();
    assert!(fragments >= 4, "{fragments} fragments");
}
