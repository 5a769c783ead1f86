// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Distinguished names between their text form and DER (X.501 Name, RFC 5280 section 4.1.2.4).

/// Attribute types: keyword (several may map to one type; the first is printed), DER of the OID's
/// contents, and whether values are IA5String rather than PrintableString.
const ATTRIBUTES: &[(&str, &[u8], bool)] = &[
    ("CN", &[0x55, 4, 3], false),
    ("SN", &[0x55, 4, 4], false),
    ("serialNumber", &[0x55, 4, 5], false),
    ("C", &[0x55, 4, 6], false),
    ("L", &[0x55, 4, 7], false),
    ("ST", &[0x55, 4, 8], false),
    ("STREET", &[0x55, 4, 9], false),
    ("O", &[0x55, 4, 10], false),
    ("OU", &[0x55, 4, 11], false),
    ("T", &[0x55, 4, 12], false),
    ("D", &[0x55, 4, 13], false),
    ("postalCode", &[0x55, 4, 17], false),
    ("N", &[0x55, 4, 41], false),
    ("G", &[0x55, 4, 42], false),
    ("I", &[0x55, 4, 43], false),
    ("ID", &[0x55, 4, 45], false),
    ("dnQualifier", &[0x55, 4, 46], false),
    ("pseudonym", &[0x55, 4, 65], false),
    ("E", &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], true),
    (
        "Email",
        &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1],
        true,
    ),
    (
        "emailAddress",
        &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1],
        true,
    ),
    (
        "unstructuredName",
        &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 2],
        false,
    ),
    (
        "unstructuredAddress",
        &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 8],
        false,
    ),
    ("UA", &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 8], false),
    ("UN", &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 2], false),
    (
        "UID",
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1],
        false,
    ),
    (
        "DC",
        &[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25],
        true,
    ),
    (
        "employeeNumber",
        &[0x60, 0x86, 0x48, 1, 0x86, 0xf8, 0x42, 3, 1, 3],
        false,
    ),
    (
        "EN",
        &[0x60, 0x86, 0x48, 1, 0x86, 0xf8, 0x42, 3, 1, 3],
        false,
    ),
];

/// Attribute types that are printed, but not read.
const PRINTED_ONLY: &[(&str, &[u8])] = &[("role", &[0x55, 4, 72])];

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OID: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;

/// One attribute: type (contents of the OID), string tag, value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attribute<'a> {
    pub(crate) oid: &'a [u8],
    pub(crate) tag: u8,
    pub(crate) value: &'a [u8],
    /// Whether it shares its RelativeDistinguishedName with the attribute before it.
    pub(crate) joined: bool,
}

impl Attribute<'_> {
    /// Equality of names: the string type does not count, and neither does case in string types
    /// that are compared so (RFC 5280 section 7.1, as strongSwan does).
    pub(crate) fn same(&self, other: &Self) -> bool {
        let caseless = |tag| matches!(tag, PRINTABLE_STRING | IA5_STRING);
        self.oid == other.oid
            && self.joined == other.joined
            && if caseless(self.tag) || caseless(other.tag) {
                self.value.eq_ignore_ascii_case(other.value)
            } else {
                self.value == other.value
            }
    }
}

/// Reads one DER element: tag, contents, rest. Definite lengths below 2^24 only.
pub(crate) fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81..=0x83 => {
            let (octets, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            let len = octets
                .iter()
                .fold(0, |len, &octet| len << 8 | usize::from(octet));
            (len, rest)
        }
        _ => return None,
    };
    let (contents, rest) = rest.split_at_checked(len)?;
    Some((tag, contents, rest))
}

fn write_element(out: &mut Vec<u8>, tag: u8, contents: &[u8]) {
    out.push(tag);
    let len = contents.len();
    if len < 0x80 {
        out.extend(u8::try_from(len));
    } else {
        let octets = len.to_be_bytes();
        let skip = octets.iter().take_while(|&&octet| octet == 0).count();
        let octets = &octets[skip..];
        out.push(0x80 | u8::try_from(octets.len()).unwrap_or(0));
        out.extend_from_slice(octets);
    }
    out.extend_from_slice(contents);
}

/// The attributes of a Name. `None` if it is malformed.
pub(crate) fn attributes(der: &[u8]) -> Option<Vec<Attribute<'_>>> {
    let (SEQUENCE, mut name, []) = element(der)? else {
        return None;
    };
    let mut found = Vec::new();
    while !name.is_empty() {
        let (SET, mut set, rest) = element(name)? else {
            return None;
        };
        name = rest;
        let mut joined = false;
        while !set.is_empty() {
            let (SEQUENCE, attribute, rest) = element(set)? else {
                return None;
            };
            set = rest;
            let (OID, oid, value) = element(attribute)? else {
                return None;
            };
            let (tag, value, []) = element(value)? else {
                return None;
            };
            found.push(Attribute {
                oid,
                tag,
                value,
                joined,
            });
            joined = true;
        }
    }
    Some(found)
}

/// `C=CH, O=Example, CN=gw` or `/C=CH/O=Example/CN=gw` as DER. The error says what is wrong.
pub(crate) fn encode(text: &str) -> Result<Vec<u8>, String> {
    let (separator, text) = match text.trim().strip_prefix('/') {
        Some(rest) => ('/', rest),
        None => (',', text),
    };
    let mut name = Vec::new();
    let parts: Vec<_> = text.split(separator).collect();
    for (index, part) in parts.iter().enumerate() {
        if index + 1 == parts.len() && index > 0 && part.trim().is_empty() {
            break;
        }
        let (keyword, value) = part
            .split_once('=')
            .ok_or_else(|| format!("`{}` is not of the form TYPE=value", part.trim()))?;
        let (keyword, value) = (keyword.trim(), value.trim());
        let (_, oid, ia5) = ATTRIBUTES
            .iter()
            .find(|(known, _, _)| known.eq_ignore_ascii_case(keyword))
            .ok_or_else(|| format!("`{keyword}` is not a known attribute type"))?;
        let tag = if *ia5 && value.is_ascii() {
            IA5_STRING
        } else if value.bytes().all(is_printable) {
            PRINTABLE_STRING
        } else {
            UTF8_STRING
        };
        let mut attribute = Vec::new();
        write_element(&mut attribute, OID, oid);
        write_element(&mut attribute, tag, value.as_bytes());
        let mut set = Vec::new();
        write_element(&mut set, SEQUENCE, &attribute);
        write_element(&mut name, SET, &set);
    }
    if name.is_empty() {
        return Err("the name has no attributes".to_owned());
    }
    let mut der = Vec::new();
    write_element(&mut der, SEQUENCE, &name);
    Ok(der)
}

/// The text form, as strongSwan prints it: `C=CH, O=Example, CN=gw`.
pub(crate) fn display(der: &[u8]) -> Option<String> {
    let mut text = String::new();
    for attribute in attributes(der)? {
        if !text.is_empty() {
            text.push_str(if attribute.joined { " + " } else { ", " });
        }
        let printed = ATTRIBUTES
            .iter()
            .map(|(keyword, oid, _)| (*keyword, *oid))
            .chain(PRINTED_ONLY.iter().copied())
            .find(|(_, oid)| *oid == attribute.oid);
        match printed {
            Some((keyword, _)) => text.push_str(keyword),
            None => text.push_str(&display_oid(attribute.oid)),
        }
        text.push('=');
        text.extend(attribute.value.iter().map(|&octet| {
            if octet.is_ascii_graphic() || octet == b' ' {
                char::from(octet)
            } else {
                '?'
            }
        }));
    }
    Some(text)
}

/// The Name of the subject of a certificate in DER or PEM. `None` if it is not one.
pub fn certificate_subject(data: &[u8]) -> Option<Vec<u8>> {
    let der = pem_contents(data);
    let der = der.as_deref().unwrap_or(data);
    let (SEQUENCE, certificate, []) = element(der)? else {
        return None;
    };
    let (SEQUENCE, mut fields, _) = element(certificate)? else {
        return None;
    };
    // version (optional), serialNumber, signature, issuer, validity; then the subject.
    if fields.first() == Some(&0xa0) {
        (_, _, fields) = element(fields)?;
    }
    for tag in [0x02, SEQUENCE, SEQUENCE, SEQUENCE] {
        let (found, _, rest) = element(fields)?;
        if found != tag {
            return None;
        }
        fields = rest;
    }
    let (SEQUENCE, _, rest) = element(fields)? else {
        return None;
    };
    let subject = &fields[..fields.len() - rest.len()];
    attributes(subject)?;
    Some(subject.to_vec())
}

/// The contents of the first PEM block.
fn pem_contents(data: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(data).ok()?;
    let (_, rest) = text.split_once("-----BEGIN ")?;
    let (_, rest) = rest.split_once("-----")?;
    let (body, _) = rest.split_once("-----END ")?;
    let body: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    crate::secret::decode_base64(&body)
}

/// Characters of PrintableString.
fn is_printable(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b" '()+,-./:=?".contains(&octet)
}

fn display_oid(oid: &[u8]) -> String {
    let mut arcs: Vec<u64> = Vec::new();
    let mut arc = 0u64;
    for &octet in oid {
        arc = arc.checked_mul(128).map_or(0, |arc| arc) | u64::from(octet & 0x7f);
        if octet & 0x80 == 0 {
            arcs.push(arc);
            arc = 0;
        }
    }
    let mut text = String::new();
    for (index, arc) in arcs.into_iter().enumerate() {
        if index == 0 {
            let top = (arc / 40).min(2);
            text.push_str(&format!("{top}.{}", arc - top * 40));
        } else {
            text.push_str(&format!(".{arc}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_is_encoded_with_the_string_types_of_certificates() {
        let der = encode("C=CH, E=op@example.org, CN=*.example.org").unwrap();
        let attributes = attributes(&der).unwrap();
        let tags: Vec<_> = attributes.iter().map(|a| a.tag).collect();
        assert_eq!(tags, [PRINTABLE_STRING, IA5_STRING, UTF8_STRING]);
        assert_eq!(
            encode("C=CH").unwrap(),
            [
                0x30, 0x0d, 0x31, 0x0b, 0x30, 0x09, 0x06, 0x03, 0x55, 0x04, 0x06, 0x13, 0x02, 0x43,
                0x48
            ]
        );
    }

    #[test]
    fn unknown_attribute_types_and_empty_parts_are_refused() {
        assert!(encode("X Y=CH").is_err());
        assert!(encode("CN").is_err());
        assert!(encode("2.5.4.3=x").is_err());
        assert!(encode("CN=a,,O=b").is_err());
        assert!(encode("CN=a, O=b,").is_ok());
    }

    #[test]
    fn what_is_not_ascii_or_not_known_is_still_printed() {
        let der = [
            0x30, 0x0f, 0x31, 0x0d, 0x30, 0x0b, 0x06, 0x04, 0x2a, 0x03, 0x04, 0x05, 0x0c, 0x03,
            0xc3, 0xbc, 0x78,
        ];
        assert_eq!(display(&der).unwrap(), "1.2.3.4.5=??x");
    }

    #[test]
    fn long_values_get_long_lengths() {
        let text = format!("CN={}", "x".repeat(300));
        assert_eq!(display(&encode(&text).unwrap()).unwrap(), text);
    }

    proptest! {
        #[test]
        fn text_survives_the_round_trip(
            parts in proptest::collection::vec(("C|O|OU|CN|DC|E|UID", "[a-zA-Z0-9.*@]{1,12}"), 1..5)
        ) {
            let text = parts.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(", ");
            prop_assert_eq!(display(&encode(&text).unwrap()).unwrap(), text);
        }

        #[test]
        fn arbitrary_octets_do_not_panic(der in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = display(&der);
        }
    }
}
