// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reserves SPIs; installs, moves and removes SAs.

use std::collections::BTreeSet;
use std::net::IpAddr;

use swanherd_ipsec::plane::{
    Direction, HwOffload, Mark, Outcome, PlaneError, SaEntry, SaId, UdpEncap,
};

use super::message::{self, CarriedState, Placeholder, SaOptions, SeenSa};
use super::offload::Device;
use super::operation::{Answer, Pending, Planned};
use super::{Shared, XfrmPlane, absent_is_fine, plane_error};
use crate::netlink::{NetlinkError, Request, Requester};
use crate::reconcile::{Record, WantedSa};

/// SPIs that we hand out, the range that strongSwan uses as well.
const SPI_FIRST: u32 = 0xc000_0000;
const SPI_COUNT: u32 = 0x1000_0000;
/// How often another SPI is tried when one is taken.
const SPI_ATTEMPTS: u32 = 16;

/// An SA that was sent to the kernel.
pub(super) struct PendingSa {
    entry: Box<SaEntry>,
    /// What was wanted under its name before.
    before: Option<WantedSa>,
    /// One of its name may be in the kernel from us.
    known: bool,
    device: Option<Device>,
}

impl XfrmPlane {
    pub(super) fn plan_spi(
        &self,
        src: IpAddr,
        dst: IpAddr,
        reqid: u32,
    ) -> Result<Planned, PlaneError> {
        let id = self
            .shared
            .choose_spi(dst)
            .map_err(|error| plane_error(reserve_op(dst), error))?;
        let request = message::alloc_spi(src, id, reqid, self.shared.features.sa_dir);
        let pending = Pending::Spi { src, id, reqid };
        Ok(Planned::one(Request::new(&request, 0), pending))
    }

    pub(super) async fn finish_spi(
        &self,
        src: IpAddr,
        mut id: SaId,
        reqid: u32,
        mut answer: Answer,
    ) -> Result<Outcome, PlaneError> {
        let shared = &self.shared;
        let dst = id.dst;
        let fail = |error| plane_error(reserve_op(dst), error);
        for _ in 0..SPI_ATTEMPTS {
            match &answer {
                // Someone else has it.
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                _ => break,
            }
            shared.give_back_spi(id);
            id = shared.choose_spi(dst).map_err(fail)?;
            let request = message::alloc_spi(src, id, reqid, shared.features.sa_dir);
            answer = shared
                .requests
                .request(&request, 0, |_, payload| SeenSa::parse(payload))
                .await;
        }
        let seen = match answer {
            Ok(mut seen) => seen.pop(),
            Err(error) => {
                match error {
                    NetlinkError::Refused { .. } => shared.give_back_spi(id),
                    // It may be there; an audit finds out.
                    _ => {
                        shared.books().desired.forget_sa(id);
                    }
                }
                return Err(fail(error));
            }
        };
        match seen {
            Some(sa) if sa.id == id => Ok(Outcome::Spi(id.spi)),
            _ => {
                shared.books().desired.forget_sa(id);
                Err(fail(NetlinkError::Protocol("another SPI in the answer")))
            }
        }
    }

    pub(super) async fn plan_sa(&self, entry: Box<SaEntry>) -> Result<Planned, PlaneError> {
        let id = entry.id();
        let refuse = |reason: String, errno| PlaneError {
            op: install_op(id),
            reason,
            errno,
        };
        // The marks of older kernels are set as a whole, and on what leaves.
        let sets_bits = entry
            .set_mark
            .is_some_and(|set| set.mask != u32::MAX || entry.direction == Direction::In);
        if entry.if_id != 0 || sets_bits {
            let known = self.shared.expect_if_ids().await;
            known.map_err(|reason| refuse(reason, None))?;
        }
        let device = self
            .shared
            .offload
            .device(&self.shared.router, &entry)
            .await
            .map_err(|reason| refuse(reason, None))?;
        let options = self.options(device.as_ref());
        let mut books = self.shared.books();
        let update = match books.desired.sa(id) {
            None => false,
            Some(WantedSa::Reserved) => true,
            Some(WantedSa::Installed(other)) => {
                let owners = books.desired.owners_by_reqid();
                let owner = owners.get(&other.reqid).and_then(|owner| owner.name());
                let owner = owner.unwrap_or("another SA");
                return Err(refuse(
                    format!(
                        "the SPI is in use by {owner} (reqid {}, from {})",
                        other.reqid, other.src
                    ),
                    Some(libc::EEXIST),
                ));
            }
        };
        let request = message::install_sa(&entry, update, CarriedState::default(), options)
            .map_err(|error| refuse(error.to_string(), None))?;
        let known = books.journal.entries().contains(&Record::Sa(id));
        books.record(Record::Sa(id));
        let before = books
            .desired
            .want_sa(id, WantedSa::Installed(entry.clone()));
        drop(books);
        let pending = PendingSa {
            entry,
            before,
            known,
            device,
        };
        Ok(Planned::one(
            Request::new(&request, 0),
            Pending::Sa(Box::new(pending)),
        ))
    }

    pub(super) async fn finish_sa(
        &self,
        pending: PendingSa,
        answer: Answer,
    ) -> Result<Outcome, PlaneError> {
        let id = pending.entry.id();
        let first = answer.map(|_| ());
        let Err(error) = self.settle_sa(&pending, first).await else {
            return Ok(Outcome::Done);
        };
        let mut books = self.shared.books();
        match pending.before {
            Some(before) => {
                books.desired.want_sa(id, before);
            }
            None => {
                books.desired.forget_sa(id);
                books.strike_out(&Record::Sa(id));
            }
        }
        Err(PlaneError {
            op: install_op(id),
            ..error
        })
    }

    /// Goes on from the kernel's answer to the first attempt.
    async fn settle_sa(
        &self,
        pending: &PendingSa,
        first: Result<(), NetlinkError>,
    ) -> Result<(), PlaneError> {
        let entry = &pending.entry;
        let fail = |error| plane_error("install an SA", error);
        let mut device = pending.device.as_ref();
        let mut outcome = first;
        if let (Err(error), Some(refusing)) = (&outcome, device)
            && entry.offload == HwOffload::Auto
            && !matches!(error.errno(), Some(libc::EEXIST | libc::ESRCH))
        {
            self.shared.offload.falls_back(refusing, &error.to_string());
            device = None;
            let update = pending.before.is_some();
            outcome = self
                .send_sa(entry, update, CarriedState::default(), None)
                .await?;
        }
        match outcome {
            // The reservation has timed out in the kernel.
            Err(error) if pending.before.is_some() && error.errno() == Some(libc::ESRCH) => self
                .send_sa(entry, false, CarriedState::default(), device)
                .await?
                .map_err(fail)?,
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                if !pending.known {
                    return Err(self.describe_obstacle(entry).await);
                }
                self.delete_sa(entry.id(), entry.mark).await.map_err(fail)?;
                self.send_sa(entry, false, CarriedState::default(), device)
                    .await?
                    .map_err(fail)?;
            }
            outcome => outcome.map_err(fail)?,
        }
        match device {
            Some(device) => self.check_offload(entry, device).await,
            None => Ok(()),
        }
    }

    /// Without saying so, the kernel installs an SA that asks for crypto offload in software if
    /// the device cannot do it.
    async fn check_offload(&self, entry: &SaEntry, device: &Device) -> Result<(), PlaneError> {
        self.shared.offload.uses(device);
        let Some(seen) = self.get_sa(entry.id(), entry.mark).await else {
            return Ok(());
        };
        let reason = match seen.offload {
            None => format!("{device} does not take over ESP"),
            Some(offload) if device.packet && !offload.packet => {
                format!("{device} or this kernel takes over encryption only")
            }
            Some(_) => return Ok(()),
        };
        if entry.offload == HwOffload::Auto {
            self.shared.offload.falls_back(device, &reason);
            return Ok(());
        }
        let fail = |error| plane_error("install an SA", error);
        self.delete_sa(entry.id(), entry.mark).await.map_err(fail)?;
        Err(PlaneError {
            op: String::new(),
            reason,
            errno: Some(libc::EOPNOTSUPP),
        })
    }

    /// Says what stands where `entry` should: an SA that is not ours.
    async fn describe_obstacle(&self, entry: &SaEntry) -> PlaneError {
        let what = self.get_sa(entry.id(), entry.mark).await.map_or_else(
            || "someone else has an SA of this SPI".to_owned(),
            |sa| {
                format!(
                    "someone else has installed an SA of this SPI, from {} with reqid {}",
                    sa.src, sa.reqid
                )
            },
        );
        PlaneError {
            op: String::new(),
            reason: what,
            errno: Some(libc::EEXIST),
        }
    }

    async fn send_sa(
        &self,
        entry: &SaEntry,
        update: bool,
        carried: CarriedState,
        device: Option<&Device>,
    ) -> Result<Result<(), NetlinkError>, PlaneError> {
        let options = self.options(device);
        let request =
            message::install_sa(entry, update, carried, options).map_err(|error| PlaneError {
                op: "install an SA".to_owned(),
                reason: error.to_string(),
                errno: None,
            })?;
        Ok(self.shared.requests.command(&request, 0).await)
    }

    /// Installs an SA at its new place, with a device as far as there is one that takes it.
    async fn send_moved(
        &self,
        moved: &SaEntry,
        carried: &CarriedState,
        device: Option<&Device>,
    ) -> Result<Result<(), NetlinkError>, PlaneError> {
        let sent = self.send_sa(moved, false, carried.clone(), device).await?;
        match (&sent, device) {
            (Ok(()), Some(device)) => self.shared.offload.uses(device),
            (Err(error), Some(refusing))
                if moved.offload == HwOffload::Auto && error.errno() != Some(libc::EEXIST) =>
            {
                self.shared.offload.falls_back(refusing, &error.to_string());
                return self.send_sa(moved, false, carried.clone(), None).await;
            }
            _ => {}
        }
        Ok(sent)
    }

    fn options(&self, device: Option<&Device>) -> SaOptions {
        SaOptions {
            sa_dir: self.shared.features.sa_dir,
            offload: device.map(|device| (device.index, device.packet)),
        }
    }

    pub(super) async fn update_sa(
        &self,
        id: SaId,
        src: IpAddr,
        dst: IpAddr,
        encap: Option<UdpEncap>,
    ) -> Result<Outcome, PlaneError> {
        let op = format!("move SA {:08x} from {} to {dst}", id.spi, id.dst);
        let refuse = |reason: String, errno| PlaneError {
            op: op.clone(),
            reason,
            errno,
        };
        let fail = |error| plane_error(&op, error);
        let entry = match self.shared.books().desired.sa(id) {
            Some(WantedSa::Installed(entry)) => entry.clone(),
            Some(WantedSa::Reserved) | None => {
                return Err(refuse(
                    "no such SA is installed".to_owned(),
                    Some(libc::ESRCH),
                ));
            }
        };
        let moved = SaEntry {
            src,
            dst,
            encap,
            ..(*entry).clone()
        };
        if moved == *entry {
            return Ok(Outcome::Done);
        }
        let device = self
            .shared
            .offload
            .device(&self.shared.router, &moved)
            .await
            .map_err(|reason| refuse(reason, None))?;
        let same_place = moved.src == entry.src && moved.dst == entry.dst;
        if same_place && moved.encap.is_some() && entry.encap.is_some() {
            // Only ports differ: the kernel changes those in place, and so nothing is offered to a
            // device a second time.
            self.send_sa(&moved, true, CarriedState::default(), None)
                .await?
                .map_err(fail)?;
            self.shared
                .books()
                .desired
                .want_sa(id, WantedSa::Installed(Box::new(moved)));
            return Ok(Outcome::Done);
        }
        if moved.id() != id && self.shared.books().desired.sa(moved.id()).is_some() {
            return Err(refuse(
                "an SA of the same SPI is there already".to_owned(),
                Some(libc::EEXIST),
            ));
        }

        let carried = self
            .shared
            .requests
            .request(&message::get_sa(id, entry.mark), 0, |_, payload| {
                CarriedState::parse(payload)
            })
            .await
            .map_err(fail)?
            .pop()
            .ok_or_else(|| fail(NetlinkError::Protocol("the SA is missing in the answer")))?;
        {
            let mut books = self.shared.books();
            books.record(Record::Sa(moved.id()));
            books.desired.forget_sa(id);
            books
                .desired
                .want_sa(moved.id(), WantedSa::Installed(Box::new(moved.clone())));
        }
        let removed = self.delete_sa(id, entry.mark).await;
        let result = match removed {
            Ok(()) => self.send_moved(&moved, &carried, device.as_ref()).await?,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            // The old SA is better than none.
            let restored = self.send_sa(&entry, false, carried, None).await?;
            let there = match &restored {
                Ok(()) => true,
                // It could not be removed.
                Err(error) => error.errno() == Some(libc::EEXIST),
            };
            let mut books = self.shared.books();
            books.desired.forget_sa(moved.id());
            if moved.id() != id {
                books.strike_out(&Record::Sa(moved.id()));
            }
            if there {
                books.record(Record::Sa(id));
                books.desired.want_sa(id, WantedSa::Installed(entry));
            }
            return Err(fail(error));
        }
        Ok(Outcome::Done)
    }

    pub(super) fn plan_sa_removal(&self, id: SaId) -> Planned {
        let wanted = self.shared.books().desired.forget_sa(id);
        let mark = match wanted {
            Some(WantedSa::Installed(entry)) => {
                self.shared.counts.forget_acquires(entry.reqid);
                entry.mark
            }
            Some(WantedSa::Reserved) => None,
            // Not ours, or gone already.
            None => return Planned::answered(Ok(Outcome::Done)),
        };
        let request = message::remove_sa(id, mark);
        Planned::one(Request::new(&request, 0), Pending::SaRemoval(id))
    }

    pub(super) fn finish_sa_removal(
        &self,
        id: SaId,
        answer: Answer,
    ) -> Result<Outcome, PlaneError> {
        absent_is_fine(answer.map(|_| ())).map_err(|error| {
            plane_error(
                format_args!("remove SA {:08x} to {}", id.spi, id.dst),
                error,
            )
        })?;
        self.shared.sa_is_gone(id);
        Ok(Outcome::Done)
    }

    /// Removes an SA from the kernel and strikes it out, unless another of its name is wanted.
    pub(super) async fn delete_sa(&self, id: SaId, mark: Option<Mark>) -> Result<(), NetlinkError> {
        absent_is_fine(
            self.shared
                .requests
                .command(&message::remove_sa(id, mark), 0)
                .await,
        )?;
        self.shared.sa_is_gone(id);
        Ok(())
    }

    pub(super) async fn get_sa(&self, id: SaId, mark: Option<Mark>) -> Option<SeenSa> {
        self.shared
            .requests
            .request(&message::get_sa(id, mark), 0, |_, payload| {
                SeenSa::parse(payload)
            })
            .await
            .ok()?
            .pop()
    }
}

impl Shared {
    /// Chooses an SPI that may be free at `dst`, and writes it down: were the kernel to choose, a
    /// crash before its answer would leave a reservation that no ledger has.
    pub(super) fn choose_spi(&self, dst: IpAddr) -> Result<SaId, NetlinkError> {
        for _ in 0..SPI_ATTEMPTS {
            let mut octets = [0; 4];
            getrandom::fill(&mut octets)
                .map_err(|error| NetlinkError::Io(std::io::Error::other(error)))?;
            let spi = SPI_FIRST + u32::from_ne_bytes(octets) % SPI_COUNT;
            let id = SaId { spi, dst };
            if self.books().reserve(id) {
                return Ok(id);
            }
        }
        Err(NetlinkError::Protocol("no free SPI was found"))
    }

    /// An SPI that was chosen is not reserved, or not any more.
    pub(super) fn give_back_spi(&self, id: SaId) {
        let mut books = self.books();
        books.desired.forget_sa(id);
        books.strike_out(&Record::Sa(id));
    }

    /// Removes the kernel's placeholder of an SA, in case it is there still: as long as it is, the
    /// kernel does not ask again.
    pub(super) async fn remove_placeholder(
        &self,
        placeholder: &Placeholder,
    ) -> Result<(), NetlinkError> {
        let id = self.choose_spi(placeholder.dst)?;
        let named = message::name_placeholder(placeholder, id);
        let parse = |_: u16, payload: &[u8]| SeenSa::parse(payload);
        match self.requests.request(&named, 0, parse).await {
            Ok(_) => {
                let removal = message::remove_sa(id, placeholder.mark);
                absent_is_fine(self.requests.command(&removal, 0).await)?;
                self.give_back_spi(id);
                Ok(())
            }
            Err(error) => {
                self.give_back_spi(id);
                Err(error)
            }
        }
    }

    /// Removes placeholders of SAs with these request ids.
    pub(super) async fn remove_placeholders(
        &self,
        reqids: &BTreeSet<u32>,
    ) -> Result<(), NetlinkError> {
        if reqids.is_empty() {
            return Ok(());
        }
        for sa in dump_all(&self.requests).await? {
            if sa.id.spi == 0 && reqids.contains(&sa.reqid) {
                let placeholder = Placeholder {
                    reqid: sa.reqid,
                    seq: sa.seq,
                    src: sa.src,
                    dst: sa.id.dst,
                    mark: sa.mark,
                };
                self.remove_placeholder(&placeholder).await?;
            }
        }
        Ok(())
    }

    fn sa_is_gone(&self, id: SaId) {
        let mut books = self.books();
        if books.desired.sa(id).is_none() {
            books.strike_out(&Record::Sa(id));
        }
    }

    pub(super) async fn dump_sas(&self) -> Result<Vec<SeenSa>, NetlinkError> {
        dump_sas(&self.requests).await
    }
}

/// Every ESP SA of the kernel, without placeholders.
pub(super) async fn dump_sas(requests: &Requester) -> Result<Vec<SeenSa>, NetlinkError> {
    let mut seen = dump_all(requests).await?;
    seen.retain(|sa| sa.id.spi != 0);
    Ok(seen)
}

/// Every ESP SA of the kernel. Those without an SPI are waiting for one to be negotiated.
async fn dump_all(requests: &Requester) -> Result<Vec<SeenSa>, NetlinkError> {
    let mut seen = requests
        .dump(&message::dump_sas(), |_, payload| SeenSa::parse(payload))
        .await?;
    seen.retain(|sa| sa.proto == netlink_packet_xfrm::IPPROTO_ESP);
    Ok(seen)
}

fn reserve_op(dst: IpAddr) -> String {
    format!("reserve an SPI at {dst}")
}

fn install_op(id: SaId) -> String {
    format!("install SA {:08x} to {}", id.spi, id.dst)
}

/// Installs `entry` and removes it again, to see whether the kernel takes it.
///
/// # Errors
/// The kernel's refusal.
pub(crate) async fn try_sa(entry: &SaEntry) -> Result<(), PlaneError> {
    let fail = |error| plane_error("try an SA", error);
    let requests = Requester::open(libc::NETLINK_XFRM as isize)
        .map_err(|error| fail(NetlinkError::Io(error)))?;
    let options = SaOptions::default();
    let install =
        message::install_sa(entry, false, CarriedState::default(), options).map_err(|error| {
            PlaneError {
                op: "try an SA".to_owned(),
                reason: error.to_string(),
                errno: None,
            }
        })?;
    match requests.command(&install, 0).await {
        // From a probe that was interrupted.
        Err(error) if error.errno() == Some(libc::EEXIST) => {}
        result => result.map_err(fail)?,
    }
    let remove = message::remove_sa(entry.id(), entry.mark);
    absent_is_fine(requests.command(&remove, 0).await).map_err(fail)
}
