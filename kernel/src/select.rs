// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds out which data plane this host can run, by trying.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use swanherd_ipsec::Secret;
use swanherd_ipsec::plane::{Direction, Lifetime, PlaneError, SaEntry, SaKeys};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

use crate::plane::PlaneKind;
use crate::xfrm;

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The plane to use.
    pub kind: PlaneKind,
    /// Why, for one line of the log.
    pub reason: String,
}

/// The probe's SA is between documentation addresses (RFC 5737), so no packet meets it, and ends
/// by itself should this process die before removing it.
const PROBE_ADDRESSES: [Ipv4Addr; 2] = [
    Ipv4Addr::new(203, 0, 113, 253),
    Ipv4Addr::new(203, 0, 113, 254),
];
const PROBE_SPI: u32 = 0x7377_686e;
const PROBE_LIFETIME: Duration = Duration::from_secs(5);

/// Installs a throw-away ESP SA in the kernel and removes it again. The kernel's XFRM if that
/// works, else ESP in user space. Needs a tokio runtime.
pub async fn probe() -> Selection {
    let gcm = SaKeys {
        encryption: EncryptionId::AesGcm16,
        encryption_key: Secret::new(vec![0; 20]),
        integrity: None,
    };
    let cbc = SaKeys {
        encryption: EncryptionId::AesCbc,
        encryption_key: Secret::new(vec![0; 16]),
        integrity: Some((IntegrityId::HmacSha2_256_128, Secret::new(vec![0; 32]))),
    };
    let mut refusal = String::new();
    for keys in [gcm, cbc] {
        let name = keys.encryption;
        match xfrm::try_sa(&probe_sa(keys)).await {
            Ok(()) => {
                return Selection {
                    kind: PlaneKind::Xfrm,
                    reason: format!("the kernel takes ESP SAs with {name}"),
                };
            }
            // The first refusal may only mean that one cipher is missing; the last one tells
            // more.
            Err(PlaneError { reason, .. }) => refusal = reason,
        }
    }
    Selection {
        kind: PlaneKind::Tun,
        reason: format!("the kernel takes no ESP SAs: {refusal}"),
    }
}

fn probe_sa(keys: SaKeys) -> SaEntry {
    let [src, dst] = PROBE_ADDRESSES.map(IpAddr::V4);
    SaEntry {
        lifetime: Lifetime {
            hard_time: Some(PROBE_LIFETIME),
            ..Lifetime::default()
        },
        ..SaEntry::tunnel(Direction::Out, PROBE_SPI, [src, dst], u32::MAX, keys)
    }
}
