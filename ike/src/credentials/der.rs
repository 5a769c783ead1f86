// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Just enough DER to take keys apart without copying them, and PEM around it.

/// Splits the value with `tag` off the front of `input`: its content, and what follows. Only
/// definite, minimal lengths.
pub(crate) fn der_value(input: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = input.split_first()?;
    if first != tag {
        return None;
    }
    let (&len, rest) = rest.split_first()?;
    let (len, rest) = match len {
        0..=0x7f => (usize::from(len), rest),
        0x81..=0x83 => {
            let (octets, rest) = rest.split_at_checked(usize::from(len & 0x7f))?;
            let len = octets
                .iter()
                .fold(0, |len, &octet| len << 8 | usize::from(octet));
            let minimal = octets[0] != 0 && len >= 0x80;
            (minimal.then_some(len)?, rest)
        }
        _ => return None,
    };
    rest.split_at_checked(len)
}

/// The content of a BIT STRING of whole octets.
pub(crate) fn bit_string(input: &[u8]) -> Option<(&[u8], &[u8])> {
    let (content, rest) = der_value(input, 0x03)?;
    Some((content.strip_prefix(&[0])?, rest))
}

/// DER from DER or PEM. For PEM the label and the contents of the first block; for DER no label.
/// `None` if a PEM block is malformed.
pub(crate) fn from_pem_or_der(
    data: &[u8],
) -> Option<(Option<String>, zeroize::Zeroizing<Vec<u8>>)> {
    const BEGIN: &[u8] = b"-----BEGIN ";
    let Some(start) = data.windows(BEGIN.len()).position(|window| window == BEGIN) else {
        return Some((None, zeroize::Zeroizing::new(data.to_vec())));
    };
    // `openssl ecparam` writes a block of parameters before the key.
    let block = &data[start..];
    let end = end_of_block(block)?;
    if block.starts_with(b"-----BEGIN EC PARAMETERS") {
        return from_pem_or_der(&block[end..]);
    }
    let (label, der) = pem_rfc7468::decode_vec(&block[..end]).ok()?;
    Some((Some(label.to_owned()), zeroize::Zeroizing::new(der)))
}

/// Where the PEM block at the start of `block` ends, behind its last line.
fn end_of_block(block: &[u8]) -> Option<usize> {
    const END: &[u8] = b"-----END ";
    const DASHES: &[u8] = b"-----";
    let end = block.windows(END.len()).position(|window| window == END)? + END.len();
    let dashes = block[end..]
        .windows(DASHES.len())
        .position(|window| window == DASHES)?;
    Some(end + dashes + DASHES.len())
}
