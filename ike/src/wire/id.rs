// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Identification payloads (RFC 7296 section 3.5). Their value is an [`Identity`].

use swanherd_ipsec::Identity;

use super::error::WireError;
use super::reader::Reader;

pub(super) fn parse(mut reader: Reader<'_>) -> Result<Identity, WireError> {
    let [id_type, _, _, _] = reader.array::<4>("no identification type")?;
    Ok(Identity {
        id_type: id_type.into(),
        data: reader.rest().to_vec(),
    })
}

pub(super) fn emit(identity: &Identity, out: &mut Vec<u8>) {
    out.extend_from_slice(&[identity.id_type.into(), 0, 0, 0]);
    out.extend_from_slice(&identity.data);
}

/// The body of an Identification payload: the octets that enter the computation of AUTH as
/// RestOfInitIDPayload or RestOfRespIDPayload (RFC 7296 section 2.15).
pub fn body(identity: &Identity) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + identity.data.len());
    emit(identity, &mut out);
    out
}
