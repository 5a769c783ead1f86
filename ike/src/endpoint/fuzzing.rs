// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What tests and fuzz targets need to play a peer that has keys and no manners.

use super::Endpoint;
use crate::api::IkeSaId;
use crate::wire::{ExchangeType, PayloadType};

impl Endpoint {
    /// A protected message of an IKE SA with any octets inside. The id of a request is the next
    /// one, so that the peer takes it for new; a response has the id that is given.
    pub fn seal_octets(
        &mut self,
        id: IkeSaId,
        exchange: ExchangeType,
        response: Option<u32>,
        first: PayloadType,
        octets: &[u8],
    ) -> Option<Vec<u8>> {
        let sa = self.sas.get_mut(&id)?;
        let message_id = response.unwrap_or(sa.outbound.next_id);
        let header = sa.header(exchange, message_id, response.is_some());
        let protection = sa.protection.as_mut()?;
        let message = protection
            .seal_octets(&header, first, octets.to_vec(), &mut self.env.rng)
            .ok()?;
        if response.is_none() {
            sa.outbound.next_id = message_id.wrapping_add(1);
        }
        Some(message)
    }
}
