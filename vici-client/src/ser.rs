// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages for serde: sections are maps in their order, lists are sequences, and values are text,
//! in which octets that are no UTF-8 are replaced.

use serde::ser::{Serialize, SerializeMap as _, Serializer};

use crate::message::{Item, Message};

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, item) in self.iter() {
            // Of a name that is repeated, all readers see the first.
            if self
                .get(name)
                .is_some_and(|first| core::ptr::eq(first, item))
            {
                map.serialize_entry(name, item)?;
            }
        }
        map.end()
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Value(value) => serializer.serialize_str(&String::from_utf8_lossy(value)),
            Self::List(values) => {
                serializer.collect_seq(values.iter().map(|value| String::from_utf8_lossy(value)))
            }
            Self::Section(section) => section.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_order_and_drop_repetitions() {
        let message = Message::new()
            .with("up", "yes")
            .with_section(
                "b",
                Message::new()
                    .with_list("ts", ["10.1.0.0/24", "10.2.0.0/24"])
                    .with("raw", [b'a', 0xff]),
            )
            .with("a", "1")
            .with("up", "no");

        assert_eq!(
            serde_json::to_string(&message).unwrap(),
            "{\"up\":\"yes\",\"b\":{\"ts\":[\"10.1.0.0/24\",\"10.2.0.0/24\"],\"raw\":\"a\u{fffd}\"},\"a\":\"1\"}"
        );
    }
}
