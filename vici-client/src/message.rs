// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages: ordered trees of sections, lists and values.

use core::fmt;

use zeroize::Zeroize;

/// Deepest nesting of sections that [`Message::parse`] accepts. No command needs more than six.
pub const MAX_DEPTH: usize = 32;

const SECTION_START: u8 = 1;
const SECTION_END: u8 = 2;
const KEY_VALUE: u8 = 3;
const LIST_START: u8 = 4;
const LIST_ITEM: u8 = 5;
const LIST_END: u8 = 6;

/// One section's contents, in order. The root of every request, response and event is one.
///
/// Names may repeat; lookups return the first match. Values are octets: text by convention,
/// anything for certificates and keys.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Message {
    items: Vec<(String, Item)>,
}

/// What a name stands for.
#[derive(Clone, PartialEq, Eq)]
pub enum Item {
    /// A value.
    Value(Vec<u8>),
    /// A list of values.
    List(Vec<Vec<u8>>),
    /// A section.
    Section(Message),
}

impl Message {
    /// An empty message.
    pub const fn new() -> Self {
        Self { items: Vec::new() }
    }

    /// Adds a value, for chaining.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl AsRef<[u8]>) -> Self {
        self.push(name, value);
        self
    }

    /// Adds a list, for chaining.
    #[must_use]
    pub fn with_list<V: AsRef<[u8]>>(
        mut self,
        name: impl Into<String>,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        self.push_list(name, values);
        self
    }

    /// Adds a section, for chaining.
    #[must_use]
    pub fn with_section(mut self, name: impl Into<String>, section: Self) -> Self {
        self.push_section(name, section);
        self
    }

    /// Adds a value.
    pub fn push(&mut self, name: impl Into<String>, value: impl AsRef<[u8]>) {
        self.items
            .push((name.into(), Item::Value(value.as_ref().to_vec())));
    }

    /// Adds a value as its `Display` text.
    pub fn push_display(&mut self, name: impl Into<String>, value: impl fmt::Display) {
        self.items
            .push((name.into(), Item::Value(value.to_string().into_bytes())));
    }

    /// Adds `name=yes` if `value`, and nothing otherwise: how VICI answers say booleans.
    pub fn push_flag(&mut self, name: &str, value: bool) {
        if value {
            self.push(name, "yes");
        }
    }

    /// Adds a list.
    pub fn push_list<V: AsRef<[u8]>>(
        &mut self,
        name: impl Into<String>,
        values: impl IntoIterator<Item = V>,
    ) {
        let values = values
            .into_iter()
            .map(|value| value.as_ref().to_vec())
            .collect();
        self.items.push((name.into(), Item::List(values)));
    }

    /// Adds a section.
    pub fn push_section(&mut self, name: impl Into<String>, section: Self) {
        self.items.push((name.into(), Item::Section(section)));
    }

    /// Adds an item.
    pub fn push_item(&mut self, name: impl Into<String>, item: Item) {
        self.items.push((name.into(), item));
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Everything, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Item)> {
        self.items.iter().map(|(name, item)| (name.as_str(), item))
    }

    /// The first item of that name.
    pub fn get(&self, name: &str) -> Option<&Item> {
        self.items
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, item)| item)
    }

    /// The first value of that name.
    pub fn value(&self, name: &str) -> Option<&[u8]> {
        self.iter().find_map(|(n, item)| match item {
            Item::Value(value) if n == name => Some(value.as_slice()),
            _ => None,
        })
    }

    /// The first value of that name, if it is UTF-8.
    pub fn str(&self, name: &str) -> Option<&str> {
        core::str::from_utf8(self.value(name)?).ok()
    }

    /// The first list of that name.
    pub fn list(&self, name: &str) -> Option<&[Vec<u8>]> {
        self.iter().find_map(|(n, item)| match item {
            Item::List(values) if n == name => Some(values.as_slice()),
            _ => None,
        })
    }

    /// The first section of that name.
    pub fn section(&self, name: &str) -> Option<&Self> {
        self.iter().find_map(|(n, item)| match item {
            Item::Section(section) if n == name => Some(section),
            _ => None,
        })
    }

    /// The sections, in order.
    pub fn sections(&self) -> impl Iterator<Item = (&str, &Self)> {
        self.iter().filter_map(|(name, item)| match item {
            Item::Section(section) => Some((name, section)),
            _ => None,
        })
    }

    /// Reads a message from the octets that follow a packet's header.
    ///
    /// # Errors
    /// If an element is unknown, cut short, out of place, or names are not printable ASCII, or
    /// sections nest deeper than [`MAX_DEPTH`].
    pub fn parse(octets: &[u8]) -> Result<Self, ParseError> {
        let mut reader = Reader { octets };
        let root = reader.section(0)?;
        Ok(root)
    }

    /// Appends the encoding to `out`.
    ///
    /// # Errors
    /// If a name is too long or not printable ASCII, or a value is too long.
    pub fn encode_to(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        for (name, item) in &self.items {
            match item {
                Item::Value(value) => {
                    out.push(KEY_VALUE);
                    put_name(out, name)?;
                    put_value(out, name, value)?;
                }
                Item::List(values) => {
                    out.push(LIST_START);
                    put_name(out, name)?;
                    for value in values {
                        out.push(LIST_ITEM);
                        put_value(out, name, value)?;
                    }
                    out.push(LIST_END);
                }
                Item::Section(section) => {
                    out.push(SECTION_START);
                    put_name(out, name)?;
                    section.encode_to(out)?;
                    out.push(SECTION_END);
                }
            }
        }
        Ok(())
    }
}

impl Zeroize for Message {
    fn zeroize(&mut self) {
        for (_, item) in &mut self.items {
            match item {
                Item::Value(value) => value.zeroize(),
                Item::List(values) => values.zeroize(),
                Item::Section(section) => section.zeroize(),
            }
        }
        self.items.clear();
    }
}

/// As `swanctl --raw` prints it, without the surrounding braces of the root.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, item)) in self.iter().enumerate() {
            if index > 0 {
                f.write_str(" ")?;
            }
            match item {
                Item::Value(value) => write!(f, "{name}={}", Text(value))?,
                Item::List(values) => {
                    write!(f, "{name}=[")?;
                    for (index, value) in values.iter().enumerate() {
                        let space = if index > 0 { " " } else { "" };
                        write!(f, "{space}{}", Text(value))?;
                    }
                    f.write_str("]")?;
                }
                Item::Section(section) => write!(f, "{name} {{{section}}}")?,
            }
        }
        Ok(())
    }
}

/// Names and lengths only: values may be secrets.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.items.iter().map(|(name, item)| (name, item)))
            .finish()
    }
}

/// Lengths only: values may be secrets.
impl fmt::Debug for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => write!(f, "{} octets", value.len()),
            Self::List(values) => write!(f, "{} items", values.len()),
            Self::Section(section) => section.fmt(f),
        }
    }
}

/// Why octets are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The octets end inside an element.
    #[error("message ends inside an element")]
    Truncated,
    /// The octets end inside a section or list.
    #[error("message ends inside a section or list")]
    Unclosed,
    /// An element type that does not exist.
    #[error("unknown element type {0}")]
    UnknownElement(u8),
    /// An element where it may not stand, such as a section inside a list.
    #[error("element type {0} out of place")]
    OutOfPlace(u8),
    /// A name with octets other than printable ASCII.
    #[error("name is not printable ASCII")]
    UnprintableName,
    /// Sections nest deeper than [`MAX_DEPTH`].
    #[error("sections nest deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

/// Why a message or packet cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A name of more than 255 octets.
    #[error("name of {0} octets is too long")]
    NameTooLong(usize),
    /// A name with octets other than printable ASCII.
    #[error("name {0:?} is not printable ASCII")]
    UnprintableName(String),
    /// A value of more than 65,535 octets.
    #[error("value of '{name}' has {len} octets, more than 65535")]
    ValueTooLong {
        /// Name of the value or its list.
        name: String,
        /// Length in octets.
        len: usize,
    },
    /// The packet exceeds [`crate::MAX_FRAME`].
    #[error("packet of {0} octets is too long")]
    PacketTooLong(usize),
}

pub(crate) fn is_printable(octets: &[u8]) -> bool {
    octets.iter().all(|octet| (0x20..0x7f).contains(octet))
}

pub(crate) fn put_name(out: &mut Vec<u8>, name: &str) -> Result<(), EncodeError> {
    let len = u8::try_from(name.len()).map_err(|_| EncodeError::NameTooLong(name.len()))?;
    if !is_printable(name.as_bytes()) {
        return Err(EncodeError::UnprintableName(name.to_owned()));
    }
    out.push(len);
    out.extend_from_slice(name.as_bytes());
    Ok(())
}

fn put_value(out: &mut Vec<u8>, name: &str, value: &[u8]) -> Result<(), EncodeError> {
    let len = u16::try_from(value.len()).map_err(|_| EncodeError::ValueTooLong {
        name: name.to_owned(),
        len: value.len(),
    })?;
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(value);
    Ok(())
}

struct Reader<'a> {
    octets: &'a [u8],
}

impl<'a> Reader<'a> {
    fn section(&mut self, depth: usize) -> Result<Message, ParseError> {
        if depth > MAX_DEPTH {
            return Err(ParseError::TooDeep);
        }
        let mut message = Message::new();
        loop {
            if self.octets.is_empty() {
                return if depth == 0 {
                    Ok(message)
                } else {
                    Err(ParseError::Unclosed)
                };
            }
            match self.octet()? {
                SECTION_START => {
                    let name = self.name()?;
                    message
                        .items
                        .push((name, Item::Section(self.section(depth + 1)?)));
                }
                SECTION_END if depth > 0 => return Ok(message),
                KEY_VALUE => {
                    let name = self.name()?;
                    message
                        .items
                        .push((name, Item::Value(self.value()?.to_vec())));
                }
                LIST_START => {
                    let name = self.name()?;
                    message.items.push((name, Item::List(self.list()?)));
                }
                other @ (SECTION_END | LIST_ITEM | LIST_END) => {
                    return Err(ParseError::OutOfPlace(other));
                }
                other => return Err(ParseError::UnknownElement(other)),
            }
        }
    }

    fn list(&mut self) -> Result<Vec<Vec<u8>>, ParseError> {
        let mut values = Vec::new();
        loop {
            if self.octets.is_empty() {
                return Err(ParseError::Unclosed);
            }
            match self.octet()? {
                LIST_ITEM => values.push(self.value()?.to_vec()),
                LIST_END => return Ok(values),
                other @ (SECTION_START | SECTION_END | KEY_VALUE | LIST_START) => {
                    return Err(ParseError::OutOfPlace(other));
                }
                other => return Err(ParseError::UnknownElement(other)),
            }
        }
    }

    fn octet(&mut self) -> Result<u8, ParseError> {
        let (&first, rest) = self.octets.split_first().ok_or(ParseError::Truncated)?;
        self.octets = rest;
        Ok(first)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ParseError> {
        let (head, rest) = self
            .octets
            .split_at_checked(len)
            .ok_or(ParseError::Truncated)?;
        self.octets = rest;
        Ok(head)
    }

    fn name(&mut self) -> Result<String, ParseError> {
        let len = usize::from(self.octet()?);
        let octets = self.take(len)?;
        if !is_printable(octets) {
            return Err(ParseError::UnprintableName);
        }
        Ok(octets.iter().copied().map(char::from).collect())
    }

    fn value(&mut self) -> Result<&'a [u8], ParseError> {
        let (high, low) = (self.octet()?, self.octet()?);
        self.take(usize::from(u16::from_be_bytes([high, low])))
    }
}

/// A value for people: as text if printable, else in hexadecimal.
struct Text<'a>(&'a [u8]);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match core::str::from_utf8(self.0) {
            Ok(text)
                if !text
                    .chars()
                    .any(|c| c.is_control() && c != '\n' && c != '\t') =>
            {
                f.write_str(text)
            }
            _ => {
                f.write_str("0x")?;
                self.0.iter().try_for_each(|octet| write!(f, "{octet:02x}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Message {
        Message::new().with("key1", "value1").with_section(
            "section1",
            Message::new()
                .with_section("sub-section", Message::new().with("key2", "value2"))
                .with_list("list1", ["item1", "item2"]),
        )
    }

    fn encoded(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.encode_to(&mut out).unwrap();
        out
    }

    #[test]
    fn encoding_has_the_documented_octets() {
        let expected = b"\x03\x04key1\x00\x06value1\
            \x01\x08section1\
            \x01\x0bsub-section\x03\x04key2\x00\x06value2\x02\
            \x04\x05list1\x05\x00\x05item1\x05\x00\x05item2\x06\
            \x02";

        assert_eq!(encoded(&sample()), expected);
        assert_eq!(Message::parse(expected), Ok(sample()));
    }

    #[test]
    fn display_reads_like_raw_output_of_swanctl() {
        assert_eq!(
            sample().to_string(),
            "key1=value1 section1 {sub-section {key2=value2} list1=[item1 item2]}"
        );
    }

    #[test]
    fn debug_output_shows_no_value() {
        assert!(!format!("{:?}", sample()).contains("value1"));
    }

    #[test]
    fn lookups_take_the_first_match_of_the_kind() {
        let message = Message::new()
            .with_list("a", ["x"])
            .with("a", "1")
            .with("a", "2");

        assert_eq!(message.str("a"), Some("1"));
        assert_eq!(message.list("a"), Some([b"x".to_vec()].as_slice()));
        assert_eq!(message.section("a"), None);
    }

    #[test]
    fn misplaced_elements_are_refused() {
        let cases: [(&[u8], ParseError); 9] = [
            (b"\x02", ParseError::OutOfPlace(SECTION_END)),
            (b"\x05\x00\x00", ParseError::OutOfPlace(LIST_ITEM)),
            (b"\x06", ParseError::OutOfPlace(LIST_END)),
            (
                b"\x04\x01a\x03\x01b\x00\x00",
                ParseError::OutOfPlace(KEY_VALUE),
            ),
            (b"\x01\x01a", ParseError::Unclosed),
            (b"\x04\x01a\x05\x00\x00", ParseError::Unclosed),
            (b"\x03\x01a\x00\x05abc", ParseError::Truncated),
            (b"\x03\x01\x0a\x00\x00", ParseError::UnprintableName),
            (b"\x07", ParseError::UnknownElement(7)),
        ];
        for (octets, error) in cases {
            assert_eq!(Message::parse(octets), Err(error), "{octets:?}");
        }
    }

    #[test]
    fn nesting_is_limited() {
        let nested = |depth: usize| {
            let mut octets = b"\x01\x01s".repeat(depth);
            octets.extend(vec![SECTION_END; depth]);
            octets
        };

        assert!(Message::parse(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(
            Message::parse(&nested(MAX_DEPTH + 1)),
            Err(ParseError::TooDeep)
        );
        assert_eq!(Message::parse(&nested(100_000)), Err(ParseError::TooDeep));
    }

    #[test]
    fn names_and_values_that_do_not_fit_are_refused() {
        let mut out = Vec::new();
        let long_name = Message::new().with("n".repeat(256), "");
        let long_value = Message::new().with("v", vec![0; 65_536]);
        let newline = Message::new().with("a\nb", "");

        assert_eq!(
            long_name.encode_to(&mut out),
            Err(EncodeError::NameTooLong(256))
        );
        assert!(matches!(
            long_value.encode_to(&mut out),
            Err(EncodeError::ValueTooLong { len: 65_536, .. })
        ));
        assert!(matches!(
            newline.encode_to(&mut out),
            Err(EncodeError::UnprintableName(_))
        ));
    }

    #[test]
    fn zeroize_leaves_nothing() {
        let mut message = sample();
        message.zeroize();
        assert!(message.is_empty());
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let value = || prop::collection::vec(any::<u8>(), 0..40);
        let leaf = prop_oneof![
            value().prop_map(Item::Value),
            prop::collection::vec(value(), 0..4).prop_map(Item::List),
        ];
        let item = leaf.prop_recursive(4, 32, 5, |inner| {
            prop::collection::vec(("[ -~]{0,12}", inner), 0..5)
                .prop_map(|items| Item::Section(Message { items }))
        });
        prop::collection::vec(("[ -~]{0,12}", item), 0..6).prop_map(|items| Message { items })
    }

    proptest! {
        #[test]
        fn messages_survive_a_round_trip(message in any_message()) {
            prop_assert_eq!(Message::parse(&encoded(&message)), Ok(message));
        }

        #[test]
        fn what_parses_encodes_to_the_same_octets(octets in prop::collection::vec(0u8..8, 0..64)) {
            if let Ok(message) = Message::parse(&octets) {
                prop_assert_eq!(encoded(&message), octets);
            }
        }

        #[test]
        fn cutting_a_message_never_panics(message in any_message(), cut in 0usize..200) {
            let octets = encoded(&message);
            let _ = Message::parse(&octets[..cut.min(octets.len())]);
        }
    }
}
