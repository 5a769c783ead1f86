// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The operators' notation for identities, and matching.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;

use crate::dn;

/// Match quality of an equal identity.
pub const MATCH_EXACT: u8 = 20;
/// Match quality of `%any`.
pub const MATCH_ANY: u8 = 1;
/// Match quality of a network, range or regular expression.
const MATCH_SET: u8 = 13;

/// An identity as configured: concrete, or with wildcards.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdentityPattern {
    text: String,
    identity: Identity,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
enum Kind {
    Concrete,
    Any,
    /// A domain name or mailbox with a leading `*`.
    Suffix,
    /// A distinguished name with attributes `*`.
    NameWildcards,
    /// A network or range.
    Addresses,
    /// A regular expression.
    Regex,
}

/// Why a text is not an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an identity: {reason}")]
pub struct IdentityError {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Prefixes and the types they select.
const PREFIXES: &[(&str, IdType)] = &[
    ("ipv4", IdType::Ipv4Addr),
    ("ipv6", IdType::Ipv6Addr),
    ("ipv4net", IdType::Ipv4AddrSubnet),
    ("ipv6net", IdType::Ipv6AddrSubnet),
    ("ipv4range", IdType::Ipv4AddrRange),
    ("ipv6range", IdType::Ipv6AddrRange),
    ("rfc822", IdType::Rfc822Addr),
    ("email", IdType::Rfc822Addr),
    ("userfqdn", IdType::Rfc822Addr),
    ("fqdn", IdType::Fqdn),
    ("dns", IdType::Fqdn),
    ("asn1dn", IdType::DerAsn1Dn),
    ("asn1gn", IdType::DerAsn1Gn),
    ("keyid", IdType::KeyId),
];

/// Tag of uniformResourceIdentifier in a GeneralName (RFC 5280 section 4.2.1.6).
const GENERAL_NAME_URI: u8 = 0x86;

impl IdentityPattern {
    /// `%any`.
    pub fn any() -> Self {
        Self {
            text: "%any".to_owned(),
            identity: Identity::any(),
            kind: Kind::Any,
        }
    }

    /// Reads the notation of swanctl.conf: `gw.example.org`, `@gw`, `op@example.org`,
    /// `C=CH, CN=gw`, `192.0.2.1`, `@#deadbeef`, `%any`, or with a type prefix such as `keyid:`.
    ///
    /// # Errors
    /// If a prefix is given and the rest does not suit it, or the text is too long.
    pub fn parse(text: &str) -> Result<Self, IdentityError> {
        let fail = |reason: &str| IdentityError {
            text: text.chars().take(80).collect(),
            reason: reason.to_owned(),
        };
        if text.len() > 4096 {
            return Err(fail("it is longer than 4096 octets"));
        }
        if matches!(
            text,
            "" | "%any" | "%any6" | "*" | "0.0.0.0" | "::" | "0::0"
        ) {
            return Ok(Self::any());
        }
        if let Some((id_type, rest)) = prefixed(text) {
            return Self::typed(id_type, rest).map_err(|reason| fail(&reason));
        }
        if let Some(rest) = text.strip_prefix("uri:") {
            let mut data = vec![GENERAL_NAME_URI];
            let Ok(len) = u8::try_from(rest.len()) else {
                return Err(fail("it is longer than 255 octets"));
            };
            if len >= 0x80 {
                data.push(0x81);
            }
            data.push(len);
            data.extend_from_slice(rest.as_bytes());
            return Ok(Self::concrete(IdType::DerAsn1Gn, data));
        }
        if text.starts_with("xmppaddr:") {
            return Err(fail("IKEv2 has no such identity type"));
        }
        if text.contains('=') {
            return Ok(match dn::encode(text) {
                Ok(der) => Self::new(IdType::DerAsn1Dn, der),
                Err(_) => Self::concrete(IdType::KeyId, text.as_bytes().to_vec()),
            });
        }
        if let Some(hex) = text.strip_prefix("@#") {
            let data = decode_hex(hex).ok_or_else(|| fail("`@#` wants hex digits"))?;
            return Ok(Self::concrete(IdType::KeyId, data));
        }
        if let Some(mailbox) = text.strip_prefix("@@") {
            return Ok(Self::new(IdType::Rfc822Addr, mailbox.as_bytes().to_vec()));
        }
        if let Some(name) = text.strip_prefix('@') {
            return Ok(Self::new(IdType::Fqdn, name.as_bytes().to_vec()));
        }
        if text.contains('@') {
            return Ok(Self::new(IdType::Rfc822Addr, text.as_bytes().to_vec()));
        }
        if let Some((id_type, data)) = addresses(text) {
            return Ok(Self::new(id_type, data));
        }
        if text.contains(':') {
            return Ok(Self::concrete(IdType::KeyId, text.as_bytes().to_vec()));
        }
        Ok(Self::new(IdType::Fqdn, text.as_bytes().to_vec()))
    }

    /// The pattern that matches exactly this identity; `%any` for [`Identity::any`].
    pub fn exact(identity: Identity) -> Self {
        let kind = if identity.is_any() {
            Kind::Any
        } else {
            Kind::Concrete
        };
        Self {
            text: display_identity(&identity),
            identity,
            kind,
        }
    }

    fn typed(id_type: IdType, rest: &str) -> Result<Self, String> {
        if let Some(hex) = rest.strip_prefix('#') {
            let data = decode_hex(hex).ok_or("`#` wants hex digits")?;
            if id_type == IdType::DerAsn1Dn && dn::attributes(&data).is_none() {
                return Err("the octets are not the DER of a name".to_owned());
            }
            return Ok(Self::concrete(id_type, data));
        }
        match id_type {
            IdType::Ipv4Addr
            | IdType::Ipv6Addr
            | IdType::Ipv4AddrSubnet
            | IdType::Ipv6AddrSubnet
            | IdType::Ipv4AddrRange
            | IdType::Ipv6AddrRange => match addresses(rest) {
                Some((found, data)) if found == id_type => Ok(Self::new(id_type, data)),
                _ => Err(format!("`{rest}` does not suit the prefix")),
            },
            IdType::DerAsn1Dn => Ok(Self::new(id_type, dn::encode(rest)?)),
            IdType::KeyId | IdType::DerAsn1Gn => {
                Ok(Self::concrete(id_type, rest.as_bytes().to_vec()))
            }
            _ => Ok(Self::new(id_type, rest.as_bytes().to_vec())),
        }
    }

    fn concrete(id_type: IdType, data: Vec<u8>) -> Self {
        Self::exact(Identity { id_type, data })
    }

    fn new(id_type: IdType, data: Vec<u8>) -> Self {
        let kind = match id_type {
            IdType::Fqdn | IdType::Rfc822Addr if data.starts_with(b"^") && data.ends_with(b"$") => {
                Kind::Regex
            }
            IdType::Fqdn | IdType::Rfc822Addr if data.starts_with(b"*") => Kind::Suffix,
            IdType::DerAsn1Dn => {
                let wild = dn::attributes(&data)
                    .is_some_and(|attributes| attributes.iter().any(|a| a.value == b"*"));
                if wild {
                    Kind::NameWildcards
                } else {
                    Kind::Concrete
                }
            }
            IdType::Ipv4AddrSubnet
            | IdType::Ipv6AddrSubnet
            | IdType::Ipv4AddrRange
            | IdType::Ipv6AddrRange => Kind::Addresses,
            _ => Kind::Concrete,
        };
        Self {
            kind,
            ..Self::concrete(id_type, data)
        }
    }

    /// Whether this is `%any`.
    pub fn is_any(&self) -> bool {
        self.kind == Kind::Any
    }

    /// The identity, unless this is a pattern. A network or range counts as one: it can be sent.
    pub fn identity(&self) -> Option<Identity> {
        matches!(self.kind, Kind::Concrete | Kind::Addresses).then(|| self.identity.clone())
    }

    /// The type of the identities that match; `None` for `%any`.
    pub fn id_type(&self) -> Option<IdType> {
        (!self.is_any()).then_some(self.identity.id_type)
    }

    /// How well `identity` matches: [`MATCH_EXACT`] if equal, less the wider the pattern is,
    /// [`MATCH_ANY`] for `%any`, `None` if it does not.
    pub fn matches(&self, identity: &Identity) -> Option<u8> {
        if self.is_any() {
            return Some(MATCH_ANY);
        }
        if same_identity(&self.identity, identity) {
            return Some(MATCH_EXACT);
        }
        match self.kind {
            Kind::Any | Kind::Concrete => None,
            Kind::Suffix => {
                let suffix = self.identity.data.get(1..)?;
                (identity.id_type == self.identity.id_type
                    && identity.data.len() >= suffix.len()
                    && identity.data[identity.data.len() - suffix.len()..]
                        .eq_ignore_ascii_case(suffix))
                .then_some(MATCH_EXACT - 1)
            }
            Kind::NameWildcards => match_name(&self.identity, identity),
            Kind::Addresses => {
                let address = identity.as_ip()?;
                let (first, last) = address_bounds(&self.identity)?;
                (first.is_ipv4() == address.is_ipv4() && first <= address && address <= last)
                    .then_some(MATCH_SET)
            }
            Kind::Regex => {
                let text = std::str::from_utf8(&identity.data).ok()?;
                let expression = std::str::from_utf8(&self.identity.data).ok()?;
                let regex = regex_lite::RegexBuilder::new(expression)
                    .case_insensitive(true)
                    .size_limit(1 << 16)
                    .build()
                    .ok()?;
                (identity.id_type == self.identity.id_type && regex.is_match(text))
                    .then_some(MATCH_SET)
            }
        }
    }

    /// What to file the pattern under in an index; `None` if it matches more than one identity.
    /// Whatever it matches has this [`identity_key`], though not all that have it match.
    pub fn index_key(&self) -> Option<Identity> {
        (self.kind == Kind::Concrete).then(|| identity_key(&self.identity))
    }

    /// The regular expression's error, if this is one that cannot be compiled.
    pub(crate) fn regex_error(&self) -> Option<String> {
        if self.kind != Kind::Regex {
            return None;
        }
        let expression = std::str::from_utf8(&self.identity.data).ok()?;
        regex_lite::RegexBuilder::new(expression)
            .size_limit(1 << 16)
            .build()
            .err()
            .map(|error| error.to_string())
    }
}

impl fmt::Display for IdentityPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Equality as peers mean it: names of domains and mailboxes without case, distinguished names
/// attribute by attribute without regard to string types.
pub fn same_identity(a: &Identity, b: &Identity) -> bool {
    if a.id_type != b.id_type {
        return false;
    }
    match a.id_type {
        IdType::Fqdn | IdType::Rfc822Addr => a.data.eq_ignore_ascii_case(&b.data),
        IdType::DerAsn1Dn if a.data != b.data => {
            match (dn::attributes(&a.data), dn::attributes(&b.data)) {
                (Some(a), Some(b)) => {
                    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.same(b))
                }
                _ => false,
            }
        }
        _ => a.data == b.data,
    }
}

/// What to look an identity up under in an index: identities that are the
/// [same](same_identity) have the same key.
pub fn identity_key(identity: &Identity) -> Identity {
    let data = match identity.id_type {
        IdType::Fqdn | IdType::Rfc822Addr => identity.data.to_ascii_lowercase(),
        IdType::DerAsn1Dn => match dn::attributes(&identity.data) {
            Some(attributes) => {
                let mut data = Vec::with_capacity(identity.data.len());
                for attribute in attributes {
                    for part in [attribute.oid, attribute.value] {
                        data.extend_from_slice(&part.len().to_be_bytes());
                        // Whether case counts is a matter of both names' string types.
                        data.extend(part.iter().map(u8::to_ascii_lowercase));
                    }
                    data.push(u8::from(attribute.joined));
                }
                data
            }
            None => identity.data.clone(),
        },
        _ => identity.data.clone(),
    };
    Identity {
        id_type: identity.id_type,
        data,
    }
}

fn match_name(pattern: &Identity, identity: &Identity) -> Option<u8> {
    if identity.id_type != IdType::DerAsn1Dn {
        return None;
    }
    let pattern = dn::attributes(&pattern.data)?;
    let name = dn::attributes(&identity.data)?;
    if pattern.len() != name.len() {
        return None;
    }
    let mut quality = MATCH_EXACT;
    for (wanted, found) in pattern.iter().zip(&name) {
        if wanted.value == b"*" {
            if wanted.oid != found.oid || wanted.joined != found.joined {
                return None;
            }
            quality = quality.saturating_sub(1).max(MATCH_SET + 1);
        } else if !wanted.same(found) {
            return None;
        }
    }
    Some(quality)
}

/// An identity as strongSwan prints it.
pub fn display_identity(identity: &Identity) -> String {
    let data = identity.data.as_slice();
    match identity.id_type {
        IdType::Unknown(0) => "%any".to_owned(),
        IdType::Ipv4Addr | IdType::Ipv6Addr => identity
            .as_ip()
            .map_or_else(|| hex(data), |address| address.to_string()),
        IdType::Ipv4AddrSubnet | IdType::Ipv6AddrSubnet => {
            let (first, mask) = data.split_at(data.len() / 2);
            let prefix: u32 = mask.iter().map(|octet| octet.leading_ones()).sum();
            match ip(first) {
                Some(address) => format!("{address}/{prefix}"),
                None => hex(data),
            }
        }
        IdType::Ipv4AddrRange | IdType::Ipv6AddrRange => match address_bounds(identity) {
            Some((first, last)) => format!("{first}-{last}"),
            None => hex(data),
        },
        IdType::DerAsn1Dn => dn::display(data).unwrap_or_else(|| hex(data)),
        IdType::DerAsn1Gn => match dn::element(data) {
            Some((GENERAL_NAME_URI, uri, [])) => format!("uri:{}", printable_or_hex(uri)),
            _ => "(ASN.1 general name)".to_owned(),
        },
        // Twenty octets are taken for the hash of a key.
        IdType::KeyId if data.len() == 20 => hex(data),
        IdType::Fqdn | IdType::Rfc822Addr | IdType::KeyId => printable_or_hex(data),
        IdType::Unknown(_) => hex(data),
    }
}

fn printable_or_hex(data: &[u8]) -> String {
    match std::str::from_utf8(data) {
        Ok(text) if !text.is_empty() && text.bytes().all(|o| (0x20..0x7f).contains(&o)) => {
            text.to_owned()
        }
        _ => hex(data),
    }
}

fn hex(data: &[u8]) -> String {
    data.iter()
        .map(|octet| format!("{octet:02x}"))
        .collect::<Vec<_>>()
        .join(":")
}

/// `type:rest` or `{N}:rest`.
fn prefixed(text: &str) -> Option<(IdType, &str)> {
    let (prefix, rest) = text.split_once(':')?;
    if let Some(number) = prefix
        .strip_prefix('{')
        .and_then(|prefix| prefix.strip_suffix('}'))
    {
        return Some((IdType::from(number.parse::<u8>().ok()?), rest));
    }
    let (_, id_type) = PREFIXES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(prefix))?;
    Some((*id_type, rest))
}

/// An address, a network or a range with the identity type that it makes.
fn addresses(text: &str) -> Option<(IdType, Vec<u8>)> {
    if let Some((first, last)) = text.split_once('-') {
        let (first, last): (IpAddr, IpAddr) = (first.parse().ok()?, last.parse().ok()?);
        let id_type = match (first, last) {
            (IpAddr::V4(_), IpAddr::V4(_)) => IdType::Ipv4AddrRange,
            (IpAddr::V6(_), IpAddr::V6(_)) => IdType::Ipv6AddrRange,
            _ => return None,
        };
        return (first <= last).then(|| (id_type, [octets(first), octets(last)].concat()));
    }
    if let Some((address, prefix)) = text.split_once('/') {
        let address: IpAddr = address.parse().ok()?;
        let prefix: u8 = prefix.parse().ok()?;
        let network = swanherd_ipsec::TrafficSelector::network(address, prefix)?;
        let mask = match address {
            IpAddr::V4(_) => octets(
                Ipv4Addr::from_bits(!u32::MAX.checked_shr(prefix.into()).unwrap_or(0)).into(),
            ),
            IpAddr::V6(_) => octets(
                Ipv6Addr::from_bits(!u128::MAX.checked_shr(prefix.into()).unwrap_or(0)).into(),
            ),
        };
        let id_type = if address.is_ipv4() {
            IdType::Ipv4AddrSubnet
        } else {
            IdType::Ipv6AddrSubnet
        };
        return Some((id_type, [octets(network.start), mask].concat()));
    }
    let address: IpAddr = text.parse().ok()?;
    let identity = Identity::from_ip(address);
    Some((identity.id_type, identity.data))
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn ip(octets: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(octets) {
        return Some(v4.into());
    }
    Some(<[u8; 16]>::try_from(octets).ok()?.into())
}

/// First and last address of a network or range identity.
fn address_bounds(identity: &Identity) -> Option<(IpAddr, IpAddr)> {
    let (first, second) = identity.data.split_at(identity.data.len() / 2);
    match identity.id_type {
        IdType::Ipv4AddrRange | IdType::Ipv6AddrRange => Some((ip(first)?, ip(second)?)),
        IdType::Ipv4AddrSubnet | IdType::Ipv6AddrSubnet => {
            let last: Vec<u8> = first
                .iter()
                .zip(second)
                .map(|(octet, mask)| octet | !mask)
                .collect();
            Some((ip(first)?, ip(&last)?))
        }
        _ => None,
    }
}

/// Hex digits, with or without colons.
pub(crate) fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|octet| *octet != b':')
        .map(|octet| {
            char::from(octet)
                .to_digit(16)
                .and_then(|digit| u8::try_from(digit).ok())
        })
        .collect::<Option<_>>()?;
    // As elsewhere in strongSwan's notations, an odd number of digits has an implied leading zero.
    let (head, pairs) = digits.split_at(digits.len() % 2);
    let mut data = head.to_vec();
    data.extend(pairs.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]));
    Some(data)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> IdentityPattern {
        IdentityPattern::parse(text).unwrap()
    }

    fn id(text: &str) -> Identity {
        parse(text).identity().unwrap()
    }

    #[test]
    fn the_type_follows_from_the_notation() {
        for (text, id_type, shown) in [
            ("gw.example.org", IdType::Fqdn, "gw.example.org"),
            ("@gw", IdType::Fqdn, "gw"),
            ("@203.0.113.9", IdType::Fqdn, "203.0.113.9"),
            ("op@example.org", IdType::Rfc822Addr, "op@example.org"),
            ("@@op", IdType::Rfc822Addr, "op"),
            ("@#deadbeef", IdType::KeyId, "de:ad:be:ef"),
            ("192.0.2.1", IdType::Ipv4Addr, "192.0.2.1"),
            ("2001:db8::1", IdType::Ipv6Addr, "2001:db8::1"),
            ("192.0.2.7/24", IdType::Ipv4AddrSubnet, "192.0.2.0/24"),
            (
                "192.0.2.1-192.0.2.9",
                IdType::Ipv4AddrRange,
                "192.0.2.1-192.0.2.9",
            ),
            ("C=CH, CN=gw", IdType::DerAsn1Dn, "C=CH, CN=gw"),
            ("/C=CH/CN=gw", IdType::DerAsn1Dn, "C=CH, CN=gw"),
            ("a:b", IdType::KeyId, "a:b"),
            ("keyid:branch", IdType::KeyId, "branch"),
            ("{11}:#c0000201", IdType::KeyId, "c0:00:02:01"),
            ("dns:x", IdType::Fqdn, "x"),
            ("nonsense=x", IdType::KeyId, "nonsense=x"),
        ] {
            let pattern = parse(text);
            assert_eq!(pattern.id_type(), Some(id_type), "{text}");
            assert_eq!(pattern.to_string(), shown, "{text}");
        }
        for text in ["", "%any", "*", "0.0.0.0", "::"] {
            assert!(parse(text).is_any(), "{text}");
        }
    }

    #[test]
    fn texts_that_do_not_suit_their_prefix_are_refused() {
        for text in [
            "ipv4:x",
            "ipv6:192.0.2.1",
            "keyid:#xyz",
            "asn1dn:#00",
            "asn1dn:x",
            "xmppaddr:a",
        ] {
            assert!(IdentityPattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn exact_beats_wildcard_beats_any() {
        let identity = id("gw7.example.org");
        let exact = parse("GW7.example.org").matches(&identity).unwrap();
        let wildcard = parse("*.example.org").matches(&identity).unwrap();
        let regex = parse("fqdn:^gw[0-9]+\\.example\\.org$")
            .matches(&identity)
            .unwrap();
        let any = IdentityPattern::any().matches(&identity).unwrap();
        assert!(exact > wildcard && wildcard > any && regex > any);
        assert_eq!(parse("*.example.com").matches(&identity), None);
        assert_eq!(parse("fqdn:^gw$").matches(&identity), None);
    }

    #[test]
    fn names_match_by_attribute_whatever_their_string_type() {
        let printable = id("C=CH, O=Example, CN=gw");
        let mut utf8 = printable.clone();
        for octet in &mut utf8.data {
            if *octet == 0x13 {
                *octet = 0x0c;
            }
        }
        assert_ne!(printable, utf8);
        assert_eq!(
            parse("C=CH, O=Example, CN=gw").matches(&utf8),
            Some(MATCH_EXACT)
        );
        let one = parse("C=CH, O=Example, CN=*").matches(&utf8).unwrap();
        let two = parse("C=CH, O=*, CN=*").matches(&utf8).unwrap();
        assert!(one > two);
        assert_eq!(parse("C=CH, CN=*").matches(&utf8), None);
        assert_eq!(parse("C=DE, O=*, CN=*").matches(&utf8), None);
    }

    #[test]
    fn networks_and_ranges_match_their_addresses() {
        let identity = id("192.0.2.7");
        assert!(parse("192.0.2.0/24").matches(&identity).is_some());
        assert!(parse("192.0.2.1-192.0.2.9").matches(&identity).is_some());
        assert!(parse("192.0.2.8/29").matches(&identity).is_none());
        assert!(parse("2001:db8::/32").matches(&identity).is_none());
    }

    proptest! {
        #[test]
        fn a_concrete_identity_matches_itself(text in "\\PC{0,40}") {
            if let Ok(pattern) = IdentityPattern::parse(&text)
                && let Some(identity) = pattern.identity()
            {
                prop_assert_eq!(pattern.matches(&identity), Some(MATCH_EXACT));
            }
        }

        #[test]
        fn what_a_pattern_matches_has_its_key(
            one in "C=CH, CN=[aB*]{1,2}|[aB]@[aB]|[aB*]{1,2}|@#0[0-3]|192\\.0\\.2\\.[12]",
            other in "C=CH, CN=[AbB]{1,2}|[Ab]@[aB]|[Ab]{1,2}|@#0[0-3]|192\\.0\\.2\\.[12]",
            utf8 in any::<bool>(),
        ) {
            let mut identity = id(&other);
            if utf8 && identity.id_type == IdType::DerAsn1Dn {
                for octet in &mut identity.data {
                    if *octet == 0x13 {
                        *octet = 0x0c;
                    }
                }
            }
            let pattern = parse(&one);
            if pattern.matches(&identity).is_some()
                && let Some(key) = pattern.index_key()
            {
                prop_assert_eq!(key, identity_key(&identity));
            }
        }

        #[test]
        fn printed_names_and_addresses_read_back(
            text in "[a-z]{1,8}(\\.[a-z]{1,8}){0,2}|[a-z]{1,5}@[a-z]{1,5}|10\\.[1-9]\\.[1-9]\\.[1-9](/8)?|C=CH, CN=[a-z*]{1,5}"
        ) {
            let pattern = parse(&text);
            prop_assert_eq!(parse(&pattern.to_string()), pattern);
        }

        #[test]
        fn any_identity_can_be_printed(id_type in any::<u8>(), data in proptest::collection::vec(any::<u8>(), 0..40)) {
            let identity = Identity { id_type: id_type.into(), data };
            let shown = display_identity(&identity);
            prop_assert!(shown.len() <= 4096);
            let _ = parse("C=*, CN=*").matches(&identity);
        }
    }
}
