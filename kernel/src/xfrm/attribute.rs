// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the kernel's `linux/xfrm.h` has and `netlink-packet-xfrm` has not yet, in that crate's
//! form.

use netlink_packet_core::{
    DecodeError, DefaultNla, ErrorContext as _, Nla, NlaBuffer, Parseable, parse_u8,
};
use netlink_packet_xfrm::XfrmAttrs;

/// Direction of an SA, since Linux 6.10.
pub(super) const XFRMA_SA_DIR: u16 = 33;

/// The device handles policies and headers as well, since Linux 6.2 (XFRMA_OFFLOAD_DEV).
pub(super) const XFRM_OFFLOAD_PACKET: u8 = 4;

const XFRM_SA_DIR_IN: u8 = 1;
const XFRM_SA_DIR_OUT: u8 = 2;

/// Value of `XFRMA_SA_DIR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SaDirection {
    In,
    Out,
    /// A value that the kernel refuses.
    Other(u8),
}

impl From<SaDirection> for u8 {
    fn from(direction: SaDirection) -> Self {
        match direction {
            SaDirection::In => XFRM_SA_DIR_IN,
            SaDirection::Out => XFRM_SA_DIR_OUT,
            SaDirection::Other(value) => value,
        }
    }
}

impl From<u8> for SaDirection {
    fn from(value: u8) -> Self {
        match value {
            XFRM_SA_DIR_IN => Self::In,
            XFRM_SA_DIR_OUT => Self::Out,
            other => Self::Other(other),
        }
    }
}

impl Nla for SaDirection {
    fn value_len(&self) -> usize {
        size_of::<u8>()
    }

    fn kind(&self) -> u16 {
        XFRMA_SA_DIR
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        buffer[0] = (*self).into();
    }
}

impl<'a, T: AsRef<[u8]> + ?Sized> Parseable<NlaBuffer<&'a T>> for SaDirection {
    fn parse(buf: &NlaBuffer<&'a T>) -> Result<Self, DecodeError> {
        let value = parse_u8(buf.value()).context("invalid XFRMA_SA_DIR")?;
        Ok(value.into())
    }
}

/// The crate sends what it does not know as it is.
impl From<SaDirection> for XfrmAttrs {
    fn from(direction: SaDirection) -> Self {
        Self::Other(DefaultNla::new(XFRMA_SA_DIR, vec![direction.into()]))
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable as _;

    use super::*;

    /// Length 5, type 33, value, padding.
    const OUT: [u8; 8] = [5, 0, 33, 0, 2, 0, 0, 0];

    #[test]
    #[cfg(target_endian = "little")]
    fn a_direction_is_emitted_as_the_kernel_reads_it() {
        let mut buffer = [0xff; 8];
        SaDirection::Out.emit(&mut buffer);
        assert_eq!(buffer[..5], OUT[..5]);
        let mut other = [0; 8];
        XfrmAttrs::from(SaDirection::Out).emit(&mut other);
        assert_eq!(other, OUT);
    }

    #[test]
    fn a_direction_survives_its_attribute() {
        for direction in [SaDirection::In, SaDirection::Out, SaDirection::Other(9)] {
            let mut buffer = [0; 8];
            direction.emit(&mut buffer);
            let parsed = SaDirection::parse(&NlaBuffer::new_checked(&buffer[..]).unwrap());
            assert_eq!(parsed.unwrap(), direction);
        }
    }

    #[test]
    fn an_empty_attribute_is_an_error() {
        let empty = DefaultNla::new(XFRMA_SA_DIR, Vec::new());
        let mut buffer = [0; 4];
        empty.emit(&mut buffer);
        assert!(SaDirection::parse(&NlaBuffer::new_checked(&buffer[..]).unwrap()).is_err());
    }
}
