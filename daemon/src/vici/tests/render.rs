// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listings and events against what strongSwan printed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use swanherd_ike::api::{ChildSaInfo, ChildState, Event, IkeSaInfo, IkeState};
use swanherd_ipsec::Identity;
use swanherd_ipsec::plane::SaCounters;
use swanherd_vici::Message;

use super::{addr, established};
use crate::vici::events;
use crate::vici::render::{Moment, ike_name, ike_sa_with_children};

#[test]
fn list_sa_has_the_keys_of_the_reference_in_its_order() {
    let sa = established();
    let counters = BTreeMap::new();
    let now = sa.established.unwrap();
    let moment = Moment {
        instant: now,
        unix: 1_000_000,
        counters: &counters,
    };

    let rendered = ike_sa_with_children(&sa, moment, |_| true);

    // What strongSwan 6.0.6 printed for this scenario.
    assert_eq!(
        Message::new().with_section("gw", rendered).to_string(),
        "gw {uniqueid=1 version=2 state=ESTABLISHED local-host=192.0.2.1 local-port=4500 \
         local-id=gw1.example.org remote-host=192.0.2.2 remote-port=4500 \
         remote-id=gw2.example.org initiator=yes initiator-spi=01454d0c06d6c748 \
         responder-spi=f4efa483691fe7a5 nat-remote=yes nat-any=yes encr-alg=AES_CBC \
         encr-keysize=128 integ-alg=HMAC_SHA2_256_128 prf-alg=PRF_HMAC_SHA2_256 \
         dh-group=CURVE_25519 established=0 rekey-time=13881 child-sas {net-1 {name=net \
         uniqueid=1 reqid=1 state=INSTALLED mode=TUNNEL protocol=ESP encap=yes spi-in=92587d4f \
         spi-out=8ec991cc encr-alg=AES_CBC encr-keysize=128 integ-alg=HMAC_SHA2_256_128 \
         bytes-in=0 packets-in=0 bytes-out=0 packets-out=0 rekey-time=3307 life-time=3960 \
         install-time=0 local-ts=[10.1.0.0/24] remote-ts=[10.2.0.0/24]} net2-2 {name=net2 \
         uniqueid=2 reqid=2 state=INSTALLED mode=TUNNEL protocol=ESP encap=yes spi-in=3378f9fa \
         spi-out=84e98ce2 encr-alg=AES_GCM_16 encr-keysize=128 dh-group=ECP_256 bytes-in=0 \
         packets-in=0 bytes-out=0 packets-out=0 rekey-time=3387 life-time=3960 install-time=0 \
         local-ts=[10.1.0.0/24[tcp]] remote-ts=[10.2.0.0/24[tcp/http]]}}}"
    );
}

#[test]
fn an_ike_sa_in_the_making_shows_what_is_known() {
    let sa = IkeSaInfo {
        connection: None,
        state: IkeState::Connecting,
        remote_id: Identity::any(),
        suite: None,
        established: None,
        nat_remote: false,
        nat_fake: true,
        spi_r: 0,
        tasks_active: vec!["IKE_VENDOR", "IKE_INIT"],
        children: BTreeMap::new(),
        ..established()
    };
    let counters = BTreeMap::new();
    let moment = Moment {
        instant: Instant::now(),
        unix: 0,
        counters: &counters,
    };

    assert_eq!(ike_name(&sa), "(unnamed)");
    assert_eq!(
        ike_sa_with_children(&sa, moment, |_| true).to_string(),
        "uniqueid=1 version=2 state=CONNECTING local-host=192.0.2.1 local-port=4500 \
         local-id=%any remote-host=192.0.2.2 remote-port=4500 remote-id=%any initiator=yes \
         initiator-spi=01454d0c06d6c748 responder-spi=0000000000000000 nat-fake=yes nat-any=yes \
         tasks-active=[IKE_VENDOR IKE_INIT] child-sas {}"
    );
}

#[test]
fn counters_and_ages_are_those_of_the_moment() {
    let mut sa = established();
    let child = sa.children.get_mut(&1).unwrap();
    child.state = ChildState::Deleted;
    let counters = BTreeMap::from([(
        child.inbound.unwrap(),
        SaCounters {
            bytes: 84,
            packets: 1,
            last_used: 999_990,
            ..SaCounters::default()
        },
    )]);
    let later = sa.established.unwrap() + Duration::from_millis(4_000_500);
    let moment = Moment {
        instant: later,
        unix: 1_000_000,
        counters: &counters,
    };

    let rendered = ike_sa_with_children(&sa, moment, |child| child.id == 1);

    let child = rendered
        .section("child-sas")
        .unwrap()
        .section("net-1")
        .unwrap();
    let seen = |key| child.str(key);
    assert_eq!(seen("bytes-in"), Some("84"));
    assert_eq!(seen("use-in"), Some("10"));
    assert_eq!(seen("use-out"), None);
    assert_eq!(seen("install-time"), Some("4000"));
    assert_eq!(seen("rekey-time"), Some("-693"));
    assert_eq!(rendered.section("child-sas").unwrap().sections().count(), 1);
}

#[test]
fn events_have_the_form_of_the_reference() {
    let sa = Box::new(IkeSaInfo {
        children: BTreeMap::new(),
        ..established()
    });
    let child = Box::new(established().children.remove(&1).unwrap());
    let counters = BTreeMap::new();
    let moment = Moment {
        instant: sa.established.unwrap(),
        unix: 0,
        counters: &counters,
    };
    let render = |event: &Event| events::message(event, moment);

    let up = render(&Event::IkeUpDown {
        up: true,
        sa: sa.clone(),
    });
    let down = render(&Event::IkeUpDown {
        up: false,
        sa: sa.clone(),
    });
    let rekeyed = render(&Event::ChildRekey {
        sa: sa.clone(),
        old: child.clone(),
        new: Box::new(ChildSaInfo { id: 4, ..*child }),
    });
    let replaced = render(&Event::IkeRekey {
        old: sa.clone(),
        new: sa.clone(),
    });
    let moved = render(&Event::IkeUpdate {
        sa: sa.clone(),
        local: addr("192.0.2.1:4500"),
        remote: addr("192.0.2.9:1024"),
    });
    let alert = render(&Event::Alert {
        kind: "ts-mismatch",
        sa: Some(sa),
    });

    assert!(up.to_string().starts_with("up=yes gw {uniqueid=1 "));
    assert!(up.section("gw").unwrap().section("child-sas").is_none());
    assert!(down.to_string().starts_with("gw {uniqueid=1 "));
    let both = rekeyed
        .section("gw")
        .unwrap()
        .section("child-sas")
        .unwrap()
        .section("net")
        .unwrap();
    assert_eq!(both.section("old").unwrap().str("uniqueid"), Some("1"));
    assert_eq!(both.section("new").unwrap().str("uniqueid"), Some("4"));
    assert!(replaced.section("gw").unwrap().section("new").is_some());
    assert!(moved.to_string().starts_with(
        "local-host=192.0.2.1 local-port=4500 remote-host=192.0.2.9 remote-port=1024 gw {"
    ));
    assert!(
        alert
            .to_string()
            .starts_with("type=ts-mismatch ike-sa {gw {uniqueid=1 ")
    );
}
