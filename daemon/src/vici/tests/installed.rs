// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is in the data plane, with the test as the engine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use swanherd_ipsec::plane::{Direction, Mark, Mode, PolicyAction, PolicySet, SaId};
use swanherd_kernel::audit::{
    Audit, Difference, Finding, ListedPolicy, Object, Owner, Remedy, Verdict,
};
use swanherd_kernel::reconcile::PolicyKey;
use swanherd_vici::installed::{Masked, PolicyOwner};
use swanherd_vici::{Error, Message, Packet};

use super::{Fixture, request, snapshot};
use crate::audits::Report;
use crate::control::Request;
use crate::fake_plane::policies;

async fn list_policies(fixture: &Fixture, args: Message) -> Vec<String> {
    let mut client = fixture.client().await;
    let mut stream = client
        .stream("list-policies", "list-policy", args)
        .await
        .unwrap();
    let mut listed = Vec::new();
    while let Some(message) = stream.next().await.unwrap() {
        listed.push(message.to_string());
    }
    listed
}

#[tokio::test]
async fn list_policies_shows_the_traps_and_shunts_in_force() {
    let fixture = Fixture::start().await;
    let protect = PolicyAction::Protect {
        mode: Mode::Transport,
        local: "192.0.2.1".parse().unwrap(),
        remote: "192.0.2.2".parse().unwrap(),
        reqid: 5,
        spi: 0,
    };
    let named = |id, action, trap, owner: &str| {
        let set = PolicySet {
            owner: owner.to_owned(),
            ..policies(id, action, trap)
        };
        (id, Arc::new(set))
    };
    let mut published = snapshot();
    published.standing = Arc::new(BTreeMap::from([
        named(1, protect, true, "gw/net"),
        named(2, PolicyAction::Bypass, false, "gone/lan/printer"),
        named(3, PolicyAction::Discard, false, "gw/block"),
    ]));
    fixture.snapshot.store(Arc::new(published));
    let all = || {
        Message::new()
            .with("drop", "yes")
            .with("pass", "yes")
            .with("trap", "yes")
    };

    let everything = list_policies(&fixture, all()).await;
    let traps = list_policies(&fixture, Message::new().with("trap", "no")).await;
    let block = list_policies(&fixture, all().with("child", "block")).await;
    let others = list_policies(&fixture, all().with("ike", "other")).await;

    let selectors = "local-ts=[10.1.0.0/24] remote-ts=[10.2.0.0/24]";
    let trap = format!("gw/net {{child=net reqid=5 ike=gw mode=TRANSPORT {selectors}}}");
    let pass = format!("gone/lan/printer {{child=lan/printer ike=gone mode=PASS {selectors}}}");
    let drop_ = format!("gw/block {{child=block ike=gw mode=DROP {selectors}}}");
    assert_eq!(everything, [trap.clone(), pass, drop_.clone()]);
    assert_eq!(traps, [trap]);
    assert_eq!(block, [drop_]);
    assert!(others.is_empty());
    fixture.stop().await;
}

fn listed(index: u32) -> ListedPolicy {
    ListedPolicy {
        index,
        key: PolicyKey {
            direction: Direction::Fwd,
            src: ("10.1.0.0".parse().unwrap(), 24),
            dst: ("2001:db8::".parse().unwrap(), 32),
            proto: 6,
            sport: (0, 0),
            dport: (443, 0xffff),
            mark: Some(Mark {
                value: 0x2a,
                mask: 0xff,
            }),
            if_id: 3,
        },
        priority: 375_423,
        verdict: Verdict::Protect {
            mode: Mode::Tunnel,
            reqid: 7,
            endpoints: ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()),
        },
        owner: Owner::Child("gw/net".to_owned()),
    }
}

#[tokio::test]
async fn very_many_installed_policies_are_listed_whole() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let alien = ListedPolicy {
        verdict: Verdict::Discard,
        owner: Owner::Alien,
        ..listed(9)
    };
    let engine = async {
        let Request::Policies(reply) = fixture.next_request().await else {
            panic!()
        };
        let policies = (0..30_000).map(listed).chain([alien]).collect();
        reply.send(Ok(policies)).unwrap();
    };

    let (answer, ()) = tokio::join!(client.installed_policies(), engine);
    let policies = answer.unwrap();

    assert_eq!(policies.len(), 30_001);
    let last_of_ours = &policies[29_999];
    assert_eq!(last_of_ours.index, 29_999);
    assert_eq!(
        (last_of_ours.dir.as_str(), last_of_ours.proto),
        ("fwd", Some(6))
    );
    assert_eq!(last_of_ours.sport, None);
    assert_eq!(
        last_of_ours.dport,
        Some(Masked {
            value: 443,
            mask: 0xffff
        })
    );
    assert_eq!(last_of_ours.mark.unwrap().value, 0x2a);
    assert_eq!(last_of_ours.if_id, 3);
    assert_eq!(last_of_ours.tunnel_dst.as_deref(), Some("192.0.2.2"));
    assert_eq!(
        last_of_ours.owner,
        PolicyOwner {
            kind: "child".to_owned(),
            name: Some("gw/net".to_owned())
        }
    );
    let alien = &policies[30_000];
    assert_eq!((alien.action.as_str(), alien.reqid), ("drop", None));
    assert_eq!(alien.owner.name, None);
    fixture.stop().await;
}

#[tokio::test]
async fn reconcile_tells_each_difference_and_then_the_sum() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let found = |remedy| Finding {
        object: Object::Sa(SaId {
            spi: 0xc000_0001,
            dst: "192.0.2.1".parse().unwrap(),
        }),
        difference: Difference::Unwanted,
        owner: None,
        reason: "an earlier run left it".to_owned(),
        remedy,
    };
    let report = Report {
        at: 1_700_000_000,
        took: Duration::from_micros(1500),
        dry_run: true,
        audit: Audit {
            findings: vec![found(Remedy::None), found(Remedy::Failed("busy".into()))],
            sas: 4,
            policies: 6,
            alien_sas: 1,
            alien_policies: 2,
        },
    };
    let engine = async {
        let Request::Reconcile {
            dry_run: true,
            reply,
        } = fixture.next_request().await
        else {
            panic!()
        };
        reply.send(Ok(Arc::new(report))).unwrap();
    };

    let (answer, ()) = tokio::join!(client.reconcile(true), engine);
    let reconciled = answer.unwrap();

    assert!(reconciled.dry_run);
    assert_eq!((reconciled.at, reconciled.took_us), (1_700_000_000, 1500));
    assert_eq!((reconciled.sas, reconciled.policies), (4, 6));
    assert_eq!((reconciled.alien_sas, reconciled.alien_policies), (1, 2));
    assert_eq!(reconciled.findings.len(), 2);
    let failed = &reconciled.findings[1];
    assert_eq!(failed.what, "SA c0000001 to 192.0.2.1");
    assert_eq!(
        (failed.object.as_str(), failed.difference.as_str()),
        ("sa", "unwanted")
    );
    assert_eq!(failed.remedy, "failed");
    assert_eq!(failed.error.as_deref(), Some("busy"));
    fixture.stop().await;
}

#[tokio::test]
async fn nothing_is_mended_for_a_dry_run_that_cannot_be_understood() {
    let fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    for args in [
        Message::new().with("dry-run", "treu"),
        Message::new().with_list("dry-run", ["yes"]),
        Message::new().with_section("dry-run", Message::new()),
    ] {
        // The fixture's engine answers nothing: to be asked would hang.
        let reply = client.request("reconcile", args).await.unwrap();
        assert_eq!(reply.str("success"), Some("no"), "{reply:?}");
        assert_eq!(reply.str("errmsg"), Some("invalid value for: dry-run"));
    }
    fixture.stop().await;
}

#[tokio::test]
async fn a_data_plane_that_cannot_be_read_is_told_in_its_own_words() {
    let mut fixture = Fixture::start().await;
    let mut client = fixture.client().await;
    let engine = async {
        for _ in 0..2 {
            match fixture.next_request().await {
                Request::Policies(reply) => reply.send(Err("no buffer space".into())).unwrap(),
                Request::Reconcile { reply, .. } => {
                    reply.send(Err("no buffer space".into())).unwrap();
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let asked = async {
        (
            client.installed_policies().await.err(),
            client.reconcile(false).await.err(),
        )
    };

    let (errors, ()) = tokio::join!(asked, engine);

    for error in [errors.0, errors.1] {
        let Some(Error::Refused { text, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(text, "no buffer space");
    }
    fixture.stop().await;
}

#[tokio::test]
async fn nobody_is_bothered_for_a_client_that_did_not_register() {
    let fixture = Fixture::start().await;
    let mut raw = fixture.raw().await;
    raw.send(&request("list-installed-policies")).await;
    assert_eq!(raw.receive().await, Packet::Response(Message::new()));
    fixture.stop().await;
}
