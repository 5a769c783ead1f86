// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serde over messages: sections are structs and maps, lists are sequences, values are text,
//! numbers, booleans (`yes`, `no`) or octets.

use serde::Deserialize;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use crate::message::{Item, Message};

/// Reads a typed value from a message.
///
/// # Errors
/// If a value does not have the type that `T` asks for, or something `T` needs is missing.
pub fn from_message<T: DeserializeOwned>(message: &Message) -> Result<T, Error> {
    T::deserialize(SectionReader(message))
}

/// Why a message does not fit a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl serde::de::Error for Error {
    fn custom<T: core::fmt::Display>(text: T) -> Self {
        Self(text.to_string())
    }
}

/// Booleans as servers and operators write them.
pub fn parse_bool(text: &str) -> Option<bool> {
    let is = |words: &[&str]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is(&["yes", "true", "enabled", "1"]) {
        Some(true)
    } else if is(&["no", "false", "disabled", "0"]) {
        Some(false)
    } else {
        None
    }
}

struct SectionReader<'a>(&'a Message);

impl<'de> Deserializer<'de> for SectionReader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let entries = self
            .0
            .iter()
            .map(|(name, item)| (name.to_owned(), ItemReader(item)));
        visitor.visit_map(MapDeserializer::new(entries))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

#[derive(Clone, Copy)]
struct ItemReader<'a>(&'a Item);

impl<'de> IntoDeserializer<'de, Error> for ItemReader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! value_methods {
    ($($method:ident)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0 {
                Item::Value(value) => ValueReader(value).$method(visitor),
                Item::List(_) => Err(Error::custom("a list where a value is expected")),
                Item::Section(_) => Err(Error::custom("a section where a value is expected")),
            }
        }
    )+};
}

impl<'de> Deserializer<'de> for ItemReader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Item::Value(value) => ValueReader(value).deserialize_any(visitor),
            Item::List(values) => {
                let values = values.iter().map(|value| ValueReader(value));
                visitor.visit_seq(SeqDeserializer::new(values))
            }
            Item::Section(section) => SectionReader(section).deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    value_methods! {
        deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_f32
        deserialize_f64 deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Item::Value(value) => ValueReader(value).deserialize_enum(name, variants, visitor),
            _ => Err(Error::custom("a list or section where a value is expected")),
        }
    }

    forward_to_deserialize_any! {
        char unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[derive(Clone, Copy)]
struct ValueReader<'a>(&'a [u8]);

impl ValueReader<'_> {
    fn text(&self) -> Result<&str, Error> {
        core::str::from_utf8(self.0).map_err(|_| Error::custom("a value that is not text"))
    }
}

impl<'de> IntoDeserializer<'de, Error> for ValueReader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! number_methods {
    ($($method:ident $visit:ident)+) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            let text = self.text()?;
            let number = text
                .parse()
                .map_err(|_| Error::custom(format_args!("'{text}' is not such a number")))?;
            visitor.$visit(number)
        }
    )+};
}

impl<'de> Deserializer<'de> for ValueReader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match core::str::from_utf8(self.0) {
            Ok(text) => visitor.visit_str(text),
            Err(_) => visitor.visit_bytes(self.0),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let text = self.text()?;
        let value = parse_bool(text)
            .ok_or_else(|| Error::custom(format_args!("'{text}' is neither yes nor no")))?;
        visitor.visit_bool(value)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bytes(self.0)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_byte_buf(self.0.to_vec())
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_enum(self.text()?.into_deserializer())
    }

    number_methods! {
        deserialize_i8 visit_i8 deserialize_i16 visit_i16 deserialize_i32 visit_i32
        deserialize_i64 visit_i64 deserialize_u8 visit_u8 deserialize_u16 visit_u16
        deserialize_u32 visit_u32 deserialize_u64 visit_u64 deserialize_f32 visit_f32
        deserialize_f64 visit_f64
    }

    forward_to_deserialize_any! {
        char str string unit unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// A map's values in order, each with its key in `name`: for `child-sas` and the like, where the
/// section's name carries nothing that its contents do not.
pub(crate) fn values_in_order<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Values<T>(core::marker::PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Values<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            f.write_str("a section")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Vec<T>, A::Error> {
            let mut values = Vec::new();
            while let Some((_, value)) = map.next_entry::<String, T>()? {
                values.push(value);
            }
            Ok(values)
        }
    }

    deserializer.deserialize_map(Values(core::marker::PhantomData))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(rename_all = "kebab-case")]
    struct Sample {
        local_port: u16,
        #[serde(default)]
        initiator: bool,
        #[serde(default)]
        encap: bool,
        rekey_time: Option<i64>,
        missing: Option<u32>,
        local_ts: Vec<String>,
        inner: BTreeMap<String, String>,
    }

    fn sample() -> Message {
        Message::new()
            .with("local-port", "4500")
            .with("initiator", "yes")
            .with("rekey-time", "-3")
            .with_list("local-ts", ["10.0.0.0/8"])
            .with_section("inner", Message::new().with("a", "b"))
            .with("unheard-of", "ignored")
    }

    #[test]
    fn structs_take_what_they_know() {
        let read: Sample = from_message(&sample()).unwrap();

        assert_eq!(
            read,
            Sample {
                local_port: 4500,
                initiator: true,
                encap: false,
                rekey_time: Some(-3),
                missing: None,
                local_ts: vec!["10.0.0.0/8".into()],
                inner: BTreeMap::from([("a".into(), "b".into())]),
            }
        );
    }

    #[test]
    fn wrong_types_are_errors() {
        let number = Message::new().with("local-port", "70000");
        let kind = Message::new().with_list("local-port", ["1"]);
        assert!(from_message::<Sample>(&number).is_err());
        assert!(from_message::<Sample>(&kind).is_err());
    }
}
