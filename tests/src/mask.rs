// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes two listings of the same scenario comparable.

/// Replaces SPIs and times by placeholders: words of 8 or 16 hexadecimal digits, and numbers of
/// seconds.
#[must_use]
pub fn mask(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut word = String::new();
    for c in text.chars().chain(['\n']) {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        out.push_str(masked(&word));
        word.clear();
        out.push(c);
    }
    out.pop();
    out
}

/// As [`mask`], for `swanctl --list-sas` (also with `--raw`): the lifetimes of the raw form too.
#[must_use]
pub fn mask_sas(text: &str) -> String {
    const TIMES: [&str; 7] = [
        "established",
        "rekey-time",
        "reauth-time",
        "life-time",
        "install-time",
        "use-in",
        "use-out",
    ];
    let mut text = mask(text);
    for key in TIMES {
        let mut out = String::new();
        let mut rest = text.as_str();
        let key = format!("{key}=");
        while let Some(at) = rest.find(&key) {
            let (head, tail) = rest.split_at(at + key.len());
            out.push_str(head);
            out.push_str("TIME");
            rest = tail.trim_start_matches(|c: char| c.is_ascii_digit() || c == '-');
        }
        out.push_str(rest);
        text = out;
    }
    text
}

fn masked(word: &str) -> &str {
    let hex = word.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let seconds = word
        .strip_suffix('s')
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    match word.len() {
        8 | 16 if hex => "SPI",
        _ if seconds => "TIME",
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::{mask, mask_sas};

    #[test]
    fn masks_spis_and_times_but_no_addresses_or_counts() {
        let text = "t: #1, ESTABLISHED, IKEv2, 74494aaba391e1c3_i* 23cd98f4ca09ef37_r\n  \
                    @ 192.0.2.1[4500]\n  established 12s ago\n  in  f8595bc3,    252 bytes";

        assert_eq!(
            mask(text),
            "t: #1, ESTABLISHED, IKEv2, SPI_i* SPI_r\n  @ 192.0.2.1[4500]\n  established TIME ago\n  \
             in  SPI,    252 bytes"
        );
    }

    #[test]
    fn masks_times_of_the_raw_form() {
        assert_eq!(
            mask_sas("established=3 rekey-time=-13267 bytes-in=0}"),
            "established=TIME rekey-time=TIME bytes-in=0}"
        );
    }
}
