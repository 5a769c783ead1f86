// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whose an SA is, when two want the same.

use swanherd_ipsec::plane::{Direction, Op, PlaneEvent, SaEntry};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::audit::{Difference, Object, Remedy};

use crate::common::block_on;
use crate::hosts::{GCM, Hosts, done, entry, next_event, outer};

/// `ip` arguments for an SA of someone else towards host 1.
fn alien(spi: u32, reqid: u32) -> String {
    format!(
        "xfrm state add src 192.0.2.9 dst 192.0.2.2 proto esp spi {spi:#x} reqid {reqid} \
         mode tunnel enc cbc(aes) 0x00112233445566778899aabbccddeeff \
         auth-trunc hmac(sha256) 0x00112233445566778899aabbccddeeff 128"
    )
}

fn outbound(spi: u32) -> Op {
    Op::InstallSa(Box::new(SaEntry {
        direction: Direction::Out,
        ..entry(&GCM, outer(0), outer(1), spi)
    }))
}

#[test]
fn an_spi_that_someone_else_has_is_refused_by_name_and_left_alone() {
    block_on(async {
        let hosts = Hosts::start().await;
        hosts.lab.ip(0, &alien(0xc123_4567, 4711));

        let refused = hosts.planes[0]
            .apply(outbound(0xc123_4567))
            .await
            .unwrap_err();

        assert_eq!(refused.errno, Some(libc::EEXIST));
        assert!(
            refused
                .to_string()
                .contains("from 192.0.2.9 with reqid 4711"),
            "{refused}"
        );
        let states = hosts.lab.ip(0, "xfrm state");
        assert!(states.contains("reqid 4711"), "{states}");
        // Later attempts still know that it is not ours.
        hosts.planes[0]
            .apply(outbound(0xc123_4567))
            .await
            .unwrap_err();
        hosts.shutdown().await;
        assert_eq!(hosts.lab.xfrm_entries(0), (1, 0));
    });
}

#[test]
fn an_spi_that_another_child_has_is_refused_by_name() {
    block_on(async {
        let hosts = Hosts::start().await;
        let [forth, _] = hosts.connect(&GCM, |_| {}).await;
        let mut other = entry(&GCM, outer(0), outer(1), forth.spi);
        other.reqid = 2;

        let refused = hosts.planes[0]
            .apply(Op::InstallSa(Box::new(other)))
            .await
            .unwrap_err();

        assert!(refused.reason.contains("lab/tunnel"), "{refused}");
        assert!(hosts.lab.ping(0, 1));
    });
}

#[test]
fn an_sa_in_our_place_is_reported_and_ours_is_negotiated_anew() {
    block_on(async {
        let mut hosts = Hosts::start().await;
        let [forth, _] = hosts.connect(&GCM, |_| {}).await;
        // Both steps within one call, so that the audit sees the result first.
        let spi = forth.spi;
        hosts.lab.ip(
            0,
            &format!("xfrm state delete src 192.0.2.1 dst 192.0.2.2 proto esp spi {spi:#x}"),
        );
        hosts.lab.ip(0, &alien(spi, 4711));

        let audit = hosts.planes[0].reconcile(false).await.unwrap();

        // Whoever notices first, the event task or the audit: the loss is reported once.
        for finding in &audit.findings {
            assert_eq!(finding.object, Object::Sa(forth.id()));
            assert_eq!(finding.difference, Difference::InTheWay, "{finding:?}");
            assert_eq!(finding.remedy, Remedy::Renegotiated);
            assert!(finding.reason.contains("reqid 4711"), "{finding:?}");
        }
        assert_eq!(
            next_event(&mut hosts.events[0]).await,
            PlaneEvent::Expire {
                id: forth.id(),
                hard: true
            }
        );
        done(hosts.planes[0].apply(Op::RemoveSa(forth.id())).await);
        let states = hosts.lab.ip(0, "xfrm state");
        assert!(states.contains("reqid 4711"), "{states}");
    });
}
