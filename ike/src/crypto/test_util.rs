// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Hexadecimal for tests.

pub(crate) fn hex(data: &[u8]) -> String {
    data.iter().map(|octet| format!("{octet:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| u8::try_from(c.to_digit(16).unwrap()).unwrap())
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}
