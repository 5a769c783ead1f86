// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments of commands, read the lenient way that clients rely on: what cannot be understood
//! counts as not given.

use swanherd_ike::api::Selector;
use swanherd_vici::Message;
use swanherd_vici::de::parse_bool;

/// A text; empty counts as not given. One that is not UTF-8 was given, but is the name of nothing.
pub(super) fn text<'a>(args: &'a Message, name: &str) -> Option<&'a str> {
    let value = args.value(name).filter(|value| !value.is_empty())?;
    Some(core::str::from_utf8(value).unwrap_or("\u{fffd}"))
}

/// A boolean.
pub(super) fn flag(args: &Message, name: &str) -> bool {
    args.str(name).and_then(parse_bool).unwrap_or(false)
}

/// An integer as C's `strtol` with base 0 reads it: decimal, `0x` hexadecimal or `0` octal.
pub(super) fn integer(args: &Message, name: &str) -> Option<i64> {
    let text = args.str(name)?.trim_start();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (radix, digits) = match digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
    {
        Some(hex) => (16, hex),
        None if digits.len() > 1 && digits.starts_with('0') => (8, digits),
        None => (10, digits),
    };
    // `from_str_radix` would take a second sign.
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let value = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -value } else { value })
}

/// A unique id.
pub(super) fn id(args: &Message, name: &str) -> Option<u32> {
    integer(args, name)
        .and_then(|value| u32::try_from(value).ok())
        .filter(|&value| value != 0)
}

/// The SAs that `terminate` and `rekey` are about; `None` if nothing was said.
pub(super) fn selector(args: &Message) -> Option<Selector> {
    let selector = Selector {
        ike: text(args, "ike").map(str::to_owned),
        child: text(args, "child").map(str::to_owned),
        ike_id: id(args, "ike-id"),
        child_id: id(args, "child-id"),
    };
    (selector != Selector::default()).then_some(selector)
}

/// `success=yes`.
pub(super) fn success() -> Message {
    Message::new().with("success", "yes")
}

/// `success=no` and why.
pub(super) fn failure(text: impl AsRef<str>) -> Message {
    Message::new()
        .with("success", "no")
        .with("errmsg", text.as_ref())
}

/// `success`, and why not.
pub(super) fn outcome(result: Result<(), String>) -> Message {
    match result {
        Ok(()) => success(),
        Err(text) => failure(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_like_strtol_reads_them() {
        for (text, value) in [
            ("5000", Some(5000)),
            ("-1", Some(-1)),
            ("0x10", Some(16)),
            ("010", Some(8)),
            ("0", Some(0)),
            ("", None),
            ("5s", None),
            ("--5", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(
                integer(&Message::new().with("n", text), "n"),
                value,
                "{text}"
            );
        }
    }

    #[test]
    fn a_selector_needs_something() {
        assert_eq!(
            selector(&Message::new().with("force", "yes").with("ike", "")),
            None
        );
        assert_eq!(
            selector(&Message::new().with("child-id", "7")),
            Some(Selector {
                child_id: Some(7),
                ..Selector::default()
            })
        );
    }
}
