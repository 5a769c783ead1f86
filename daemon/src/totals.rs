// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Octets and packets per configured child, summed over every SA that ever carried them.
//!
//! A data plane counts per SA, and an SA lives for minutes. Here the counters of successive SAs
//! are folded into totals that never go down: not at a rekey, a reauthentication or a reconnect.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use swanherd_ike::api::IkeSaInfo;
use swanherd_ipsec::plane::{SaCounters, SaId};

use crate::control::Totals;

/// (connection, child).
type Key = (String, String);

#[derive(Clone, Debug)]
struct Owner {
    key: Key,
    inbound: bool,
}

/// Dumps after which the counters of a removed SA are forgotten. Listings show an SA for a few
/// seconds after a rekey has replaced it, and should not show it as unused.
const REMEMBERED: u8 = 10;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Accounting {
    owners: BTreeMap<SaId, Owner>,
    /// What of each SA is already in the totals.
    folded: BTreeMap<SaId, SaCounters>,
    current: Arc<BTreeMap<SaId, SaCounters>>,
    /// Last counters of SAs that are gone, and for how many dumps they are still shown.
    retired: BTreeMap<SaId, (SaCounters, u8)>,
    totals: Arc<BTreeMap<Key, Totals>>,
    /// The dump that first showed the last packet of each SA. Kernels before 6.2 do not tell.
    used: BTreeMap<SaId, Instant>,
}

impl Accounting {
    /// Learns which SAs belong to which child.
    pub(crate) fn learn(&mut self, sa: &IkeSaInfo) {
        let Some(connection) = &sa.connection else {
            return;
        };
        for child in sa.children.values() {
            let key = (connection.clone(), child.name.clone());
            for (id, inbound) in [(child.inbound, true), (child.outbound, false)] {
                if let Some(id) = id {
                    self.owners.insert(
                        id,
                        Owner {
                            key: key.clone(),
                            inbound,
                        },
                    );
                }
            }
        }
    }

    /// Takes in a dump of all SAs.
    pub(crate) fn update(&mut self, mut dump: BTreeMap<SaId, SaCounters>, at: Instant) {
        for (&id, &counters) in &dump {
            let before = self.current.get(&id).map_or(0, |before| before.packets);
            if counters.packets > before {
                self.used.insert(id, at);
            }
            self.fold(id, counters);
        }
        self.retired.retain(|_, (_, dumps)| {
            *dumps = dumps.saturating_sub(1);
            *dumps > 0
        });
        for (&id, &(last, _)) in &self.retired {
            dump.entry(id).or_insert(last);
        }
        self.used.retain(|id, _| dump.contains_key(id));
        self.current = Arc::new(dump);
    }

    /// When the youngest packet on any of these SAs was noticed.
    pub(crate) fn last_used(&self, sas: &[SaId]) -> Option<Instant> {
        sas.iter().filter_map(|id| self.used.get(id)).copied().max()
    }

    /// Takes in the last counters of an SA that is being removed.
    pub(crate) fn removed(&mut self, id: SaId, last: SaCounters) {
        self.fold(id, last);
        self.owners.remove(&id);
        self.folded.remove(&id);
        self.retired.insert(id, (last, REMEMBERED));
        Arc::make_mut(&mut self.current).insert(id, last);
    }

    /// An SA got another outer address and keeps its counters.
    pub(crate) fn moved(&mut self, from: SaId, to: SaId) {
        if from == to {
            return;
        }
        if let Some(owner) = self.owners.remove(&from) {
            self.owners.insert(to, owner);
        }
        if let Some(folded) = self.folded.remove(&from) {
            self.folded.insert(to, folded);
        }
        if let Some(used) = self.used.remove(&from) {
            self.used.insert(to, used);
        }
    }

    /// The last dump, with the last counters of SAs that are gone since a moment.
    pub(crate) fn current(&self) -> Arc<BTreeMap<SaId, SaCounters>> {
        Arc::clone(&self.current)
    }

    /// The totals.
    pub(crate) fn totals(&self) -> Arc<BTreeMap<Key, Totals>> {
        Arc::clone(&self.totals)
    }

    fn fold(&mut self, id: SaId, now: SaCounters) {
        let Some(owner) = self.owners.get(&id) else {
            return;
        };
        let before = self.folded.insert(id, now).unwrap_or_default();
        // An SA that was moved by removing and adding it starts again at zero.
        let grown = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let bytes = grown(now.bytes, before.bytes);
        let packets = grown(now.packets, before.packets);
        if bytes == 0 && packets == 0 {
            return;
        }
        let totals = Arc::make_mut(&mut self.totals)
            .entry(owner.key.clone())
            .or_default();
        if owner.inbound {
            totals.bytes_in = totals.bytes_in.saturating_add(bytes);
            totals.packets_in = totals.packets_in.saturating_add(packets);
        } else {
            totals.bytes_out = totals.bytes_out.saturating_add(bytes);
            totals.packets_out = totals.packets_out.saturating_add(packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sa(spi: u32) -> SaId {
        SaId {
            spi,
            dst: "192.0.2.1".parse().unwrap(),
        }
    }

    fn update(accounting: &mut Accounting, dump: &[(SaId, SaCounters)]) {
        accounting.update(dump.iter().copied().collect(), Instant::now());
    }

    fn counted(bytes: u64, packets: u64) -> SaCounters {
        SaCounters {
            bytes,
            packets,
            ..SaCounters::default()
        }
    }

    fn owned(spi: u32) -> (SaId, Owner) {
        (
            sa(spi),
            Owner {
                key: ("gw".into(), "net".into()),
                inbound: true,
            },
        )
    }

    fn total(accounting: &Accounting) -> Totals {
        accounting.totals()[&("gw".to_owned(), "net".to_owned())]
    }

    #[test]
    fn totals_survive_a_rekey() {
        let mut accounting = Accounting::default();
        accounting.owners.extend([owned(1)]);
        update(&mut accounting, &[(sa(1), counted(100, 1))]);
        accounting.owners.extend([owned(2)]);
        update(
            &mut accounting,
            &[(sa(1), counted(150, 2)), (sa(2), counted(10, 1))],
        );
        accounting.removed(sa(1), counted(160, 3));
        update(&mut accounting, &[(sa(2), counted(30, 2))]);
        assert_eq!(
            total(&accounting),
            Totals {
                bytes_in: 190,
                packets_in: 5,
                ..Totals::default()
            }
        );
    }

    #[test]
    fn a_spi_used_again_counts_from_zero() {
        let mut accounting = Accounting::default();
        accounting.owners.extend([owned(1)]);
        accounting.removed(sa(1), counted(100, 1));
        accounting.owners.extend([owned(1)]);
        update(&mut accounting, &[(sa(1), counted(100, 1))]);
        assert_eq!(total(&accounting).bytes_in, 200);
    }

    #[test]
    fn a_moved_sa_is_not_counted_twice() {
        let mut accounting = Accounting::default();
        accounting.owners.extend([owned(1)]);
        update(&mut accounting, &[(sa(1), counted(100, 1))]);
        let moved = SaId {
            spi: 1,
            dst: "192.0.2.9".parse().unwrap(),
        };
        accounting.moved(sa(1), moved);
        update(&mut accounting, &[(moved, counted(120, 2))]);
        assert_eq!(total(&accounting).bytes_in, 120);
    }

    #[test]
    fn a_removed_sa_keeps_its_counters_for_a_while() {
        let mut accounting = Accounting::default();
        accounting.owners.extend([owned(1)]);
        accounting.removed(sa(1), counted(100, 1));
        update(&mut accounting, &[]);
        assert_eq!(accounting.current()[&sa(1)].bytes, 100);
        for _ in 0..REMEMBERED {
            update(&mut accounting, &[]);
        }
        assert!(accounting.current().is_empty());
        assert_eq!(total(&accounting).bytes_in, 100);
    }

    #[test]
    fn an_sa_of_nobody_is_ignored() {
        let mut accounting = Accounting::default();
        update(&mut accounting, &[(sa(7), counted(100, 1))]);
        assert!(accounting.totals().is_empty());
    }

    #[test]
    fn the_dump_that_shows_another_packet_is_when_an_sa_was_used() {
        let mut accounting = Accounting::default();
        let start = Instant::now();
        let at = |seconds| start + std::time::Duration::from_secs(seconds);
        let dump = |accounting: &mut Accounting, seconds, packets: [u64; 2]| {
            let [one, two] = packets.map(|packets| counted(100 * packets, packets));
            accounting.update(BTreeMap::from([(sa(1), one), (sa(2), two)]), at(seconds));
        };
        dump(&mut accounting, 1, [0, 0]);
        assert_eq!(accounting.last_used(&[sa(1), sa(2)]), None);
        dump(&mut accounting, 2, [3, 0]);
        dump(&mut accounting, 3, [3, 1]);
        dump(&mut accounting, 4, [3, 1]);
        assert_eq!(accounting.last_used(&[sa(1)]), Some(at(2)));
        assert_eq!(accounting.last_used(&[sa(1), sa(2)]), Some(at(3)));
        // A mobile peer keeps what it has.
        let moved = SaId {
            spi: 1,
            dst: "192.0.2.9".parse().unwrap(),
        };
        accounting.moved(sa(1), moved);
        assert_eq!(accounting.last_used(&[moved]), Some(at(2)));
        assert_eq!(accounting.last_used(&[sa(1)]), None);
        accounting.update(BTreeMap::from([(sa(2), counted(100, 1))]), at(5));
        assert_eq!(accounting.last_used(&[moved]), None);
    }
}
