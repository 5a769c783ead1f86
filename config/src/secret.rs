// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared secrets: `secrets` sections and VICI `load-shared` messages.

use swanherd_ipsec::Secret;
use zeroize::Zeroize as _;

use crate::diagnostic::{Diagnostic, suggest};
use crate::identity::{IdentityPattern, decode_hex};
use crate::model::{SharedKind, SharedSecret};
use crate::tree::{Entry, Item, Tree, Value};

/// Section prefixes in the order in which they are tried.
const SHARED: &[(&str, SharedKind)] = &[
    ("eap", SharedKind::Eap),
    ("xauth", SharedKind::Eap),
    ("ntlm", SharedKind::Ntlm),
    ("ike", SharedKind::Ike),
    ("ppk", SharedKind::Ppk),
];
/// Prefixes of passphrases, and the directories that their files are in.
const KEYS: &[&str] = &["private", "rsa", "ecdsa", "pkcs8", "pkcs12"];

/// Options of a shared secret; `id` may have anything behind it.
pub(crate) const SHARED_KEYS: &[&str] = &["secret", "id"];
/// Options of a passphrase.
pub(crate) const PASSPHRASE_KEYS: &[&str] = &["file", "secret"];

/// A passphrase for a file with a private key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passphrase {
    /// Directory below that of swanctl.conf.
    pub directory: &'static str,
    /// Name of the file in it.
    pub file: String,
    /// The passphrase.
    pub secret: Secret,
}

/// What `secrets` holds.
#[derive(Debug, Default)]
pub(crate) struct Secrets {
    pub(crate) shared: Vec<SharedSecret>,
    pub(crate) passphrases: Vec<Passphrase>,
}

/// Decodes the section `secrets`. What is wrong with one entry does not affect the others.
pub(crate) fn decode_secrets(tree: &Tree, diagnostics: &mut Vec<Diagnostic>) -> Secrets {
    let mut secrets = Secrets::default();
    for (entry, section) in tree.sections() {
        let before = diagnostics.len();
        if let Err(error) = one(entry, section, &mut secrets, diagnostics) {
            diagnostics.push(error);
        }
        for diagnostic in diagnostics.iter_mut().skip(before) {
            diagnostic.path = format!("secrets.{}", entry.name);
        }
    }
    secrets
}

fn one(
    entry: &Entry,
    section: &Tree,
    secrets: &mut Secrets,
    diagnostics: &mut Vec<Diagnostic>,
) -> Result<(), Diagnostic> {
    let lower = entry.name.to_ascii_lowercase();
    let here = entry.location.as_ref();
    if let Some((_, kind)) = SHARED.iter().find(|(prefix, _)| lower.starts_with(prefix)) {
        let Some(value) = section.value("secret").filter(|v| !v.octets().is_empty()) else {
            return Err(Diagnostic::warning(
                "missing-secret",
                format!("`{}` has no secret and is ignored", entry.name),
            )
            .key("secret")
            .at_secret(here));
        };
        let secret = octets(value, diagnostics)?;
        let mut owners = Vec::new();
        for entry in section.entries() {
            if let Item::Value(value) = &entry.item
                && entry.name.starts_with("id")
            {
                owners.push(owner(&entry.name, value, diagnostics)?);
            } else if entry.name != "secret" {
                diagnostics.push(unknown(entry, SHARED_KEYS));
            }
        }
        let without = match kind {
            SharedKind::Ike => None,
            SharedKind::Eap => Some("EAP and XAuth are not supported"),
            SharedKind::Ntlm => Some("EAP is not supported"),
            SharedKind::Ppk => Some("post-quantum preshared keys are not supported"),
        };
        if let Some(why) = without {
            diagnostics.push(without_effect(entry, why));
        }
        secrets.shared.push(SharedSecret {
            id: Some(entry.name.clone()),
            kind: *kind,
            secret,
            owners,
        });
        return Ok(());
    }
    if let Some(directory) = KEYS.iter().find(|prefix| lower.starts_with(**prefix)) {
        let file = section.value("file").and_then(Value::text);
        let (Some(file), Some(secret)) = (file, section.value("secret")) else {
            return Err(Diagnostic::warning(
                "missing-secret",
                format!("`{}` lacks `file` or `secret` and is ignored", entry.name),
            )
            .at_secret(here));
        };
        for entry in section.entries() {
            if !PASSPHRASE_KEYS.contains(&entry.name.as_str()) {
                diagnostics.push(unknown(entry, PASSPHRASE_KEYS));
            }
        }
        diagnostics.push(without_effect(
            entry,
            "encrypted keys are not supported, and others need no passphrase",
        ));
        secrets.passphrases.push(Passphrase {
            directory,
            file: file.to_owned(),
            secret: octets(secret, diagnostics)?,
        });
        return Ok(());
    }
    if lower.starts_with("token") {
        return Err(Diagnostic::warning(
            "unsupported",
            format!(
                "`{}` is ignored: PKCS#11 tokens are not supported",
                entry.name
            ),
        )
        .at_secret(here));
    }
    Err(Diagnostic::warning(
        "unknown-section",
        format!("`{}` is no kind of secret and is ignored", entry.name),
    )
    .help("the name must begin with ike, eap, xauth, ntlm, ppk, private, rsa, ecdsa, pkcs8, pkcs12 or token")
    .at_secret(here))
}

fn unknown(entry: &Entry, known: &[&str]) -> Diagnostic {
    Diagnostic::warning(
        "unknown-option",
        format!("`{}` is no option here and is ignored", entry.name),
    )
    .key(&entry.name)
    .help_opt(suggest(&entry.name, known.iter().copied()))
    .at_secret(entry.location.as_ref())
}

fn without_effect(entry: &Entry, why: &str) -> Diagnostic {
    Diagnostic::note(
        "no-effect",
        format!("`{}` has no effect: {why}", entry.name),
    )
    .key(&entry.name)
    .at_secret(entry.location.as_ref())
}

fn owner(
    key: &str,
    value: &Value,
    diagnostics: &mut Vec<Diagnostic>,
) -> Result<IdentityPattern, Diagnostic> {
    let fail = |message: String| {
        Diagnostic::error("invalid-value", message)
            .key(key)
            .at_secret(value.location())
    };
    let text = value
        .text()
        .ok_or_else(|| fail("the identity is not UTF-8".to_owned()))?;
    let identity = IdentityPattern::parse(text).map_err(|error| fail(error.to_string()))?;
    if text.contains(',') && !text.contains('=') {
        diagnostics.push(
            Diagnostic::warning(
                "identity",
                format!("`{text}` is one identity with a comma in it, not a list"),
            )
            .key(key)
            .help("give each identity its own key: id-1, id-2")
            .at_secret(value.location()),
        );
    }
    Ok(identity)
}

fn octets(value: &Value, diagnostics: &mut Vec<Diagnostic>) -> Result<Secret, Diagnostic> {
    let Some(text) = value.text() else {
        return Ok(Secret::copy_of(value.octets()));
    };
    match inline(text) {
        None => Ok(Secret::copy_of(value.octets())),
        Some(Ok(octets)) => {
            if octets.is_empty() {
                return Err(
                    Diagnostic::error("invalid-value", "the secret has no octets")
                        .key("secret")
                        .at_secret(value.location()),
                );
            }
            if text[..2].eq_ignore_ascii_case("0x") && text.len() % 2 == 1 {
                diagnostics.push(
                    Diagnostic::warning("hex", "the secret has an odd number of hex digits")
                        .key("secret")
                        .help("it is read as if a 0 stood before the first digit")
                        .at_secret(value.location()),
                );
            }
            Ok(Secret::new(octets))
        }
        Some(Err(reason)) => Err(Diagnostic::error("invalid-value", reason)
            .key("secret")
            .help("write the secret in double quotes after another character if its first two characters belong to it")
            .at_secret(value.location())),
    }
}

/// `0x...` (hex) and `0s...` (base64) as octets; `None` for any other text.
pub(crate) fn inline(text: &str) -> Option<Result<Vec<u8>, &'static str>> {
    let prefix = text.get(..2)?;
    let rest = &text[2..];
    if prefix.eq_ignore_ascii_case("0x") {
        return Some(decode_hex(rest).ok_or("hex digits are expected after 0x"));
    }
    if prefix.eq_ignore_ascii_case("0s") {
        return Some(decode_base64(rest).ok_or("base64 is expected after 0s"));
    }
    None
}

pub(crate) fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let mut out = Vec::with_capacity(digits.len() / 4 * 3 + 3);
    let (mut bits, mut held) = (0u32, 0);
    for octet in digits.bytes() {
        let digit = match octet {
            b'A'..=b'Z' => octet - b'A',
            b'a'..=b'z' => octet - b'a' + 26,
            b'0'..=b'9' => octet - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => {
                out.zeroize();
                return None;
            }
        };
        bits = bits << 6 | u32::from(digit);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push(u8::try_from(bits >> held & 0xff).unwrap_or(0));
        }
    }
    Some(out)
}

/// Decodes a VICI `load-shared` message.
///
/// # Errors
/// With the text that strongSwan answers.
pub fn decode_shared(message: &Tree) -> Result<SharedSecret, Diagnostic> {
    let fail = |text: String| Diagnostic::error("invalid-value", text.clone()).stock(text);
    let text = |key| message.value(key).and_then(Value::text);
    let kind = text("type").ok_or_else(|| fail("shared key type missing".to_owned()))?;
    let kind = match kind.to_ascii_lowercase().as_str() {
        "ike" => SharedKind::Ike,
        "eap" | "xauth" => SharedKind::Eap,
        "ntlm" => SharedKind::Ntlm,
        "ppk" => SharedKind::Ppk,
        _ => return Err(fail(format!("invalid shared key type: {kind}"))),
    };
    let data = message
        .value("data")
        .filter(|data| !data.octets().is_empty())
        .ok_or_else(|| fail("shared key data missing".to_owned()))?;
    let mut owners = Vec::new();
    if let Some(Item::List(items)) = message.get("owners") {
        for item in items {
            let owner = item
                .text()
                .and_then(|text| IdentityPattern::parse(text).ok())
                .ok_or_else(|| fail("parsing shared key owners failed".to_owned()))?;
            owners.push(owner);
        }
    }
    Ok(SharedSecret {
        id: text("id").map(str::to_owned),
        kind,
        secret: Secret::copy_of(data.octets()),
        owners,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::parse_str;

    fn decode(text: &str) -> (Secrets, Vec<Diagnostic>) {
        let parsed = parse_str("t", text.as_bytes()).unwrap();
        let mut diagnostics = Vec::new();
        let secrets = decode_secrets(&parsed.tree, &mut diagnostics);
        (secrets, diagnostics)
    }

    fn secret(text: &str) -> Vec<u8> {
        let (secrets, _) = decode(&format!("ike-a {{ secret = {text}\n }}"));
        secrets.shared[0].secret.expose().to_vec()
    }

    #[test]
    fn secrets_are_text_hex_or_base64() {
        assert_eq!(secret("two words"), b"two words");
        assert_eq!(secret("\" lead \""), b" lead ");
        assert_eq!(secret("0x0102ff"), [1, 2, 255]);
        assert_eq!(secret("0x102"), [1, 2]);
        assert_eq!(secret("0X41"), b"A");
        assert_eq!(secret("0sQUJD"), b"ABC");
        assert_eq!(secret("0sQUI="), b"AB");
        assert_eq!(secret("12345"), b"12345");
    }

    #[test]
    fn owners_are_the_keys_that_begin_with_id() {
        let (secrets, diagnostics) =
            decode("ike-a { id-1 = a.example.org\n id-2 = b@example.org\n secret = k\n }");
        let owners: Vec<_> = secrets.shared[0]
            .owners
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(owners, ["a.example.org", "b@example.org"]);
        assert!(diagnostics.is_empty());
    }

    #[test]
    fn what_is_missing_or_unknown_is_ignored_with_a_warning() {
        for text in [
            "ike-a { id = x\n }",
            "ike-a { secret =\n }",
            "psk-a { secret = k\n }",
            "token-a { pin = 1\n }",
        ] {
            let (secrets, diagnostics) = decode(text);
            assert!(secrets.shared.is_empty(), "{text}");
            assert_eq!(diagnostics.len(), 1, "{text}");
        }
    }

    #[test]
    fn broken_encodings_are_errors_that_do_not_show_the_secret() {
        let (secrets, diagnostics) = decode("ike-a { secret = 0xhunter2\n }");
        assert!(secrets.shared.is_empty());
        assert!(!diagnostics[0].render(false).contains("hunter2"));
        assert_eq!(diagnostics[0].location.as_ref().unwrap().line, 1);
    }

    #[test]
    fn load_shared_messages_are_decoded_or_refused_with_the_stock_text() {
        let mut message = Tree::new();
        assert_eq!(
            decode_shared(&message).unwrap_err().vici_text(),
            "shared key type missing"
        );
        message.push_value("type", "ike");
        assert_eq!(
            decode_shared(&message).unwrap_err().vici_text(),
            "shared key data missing"
        );
        message
            .push_value("data", "k")
            .push_list("owners", ["a", "C=CH"]);
        let shared = decode_shared(&message).unwrap();
        assert_eq!(shared.kind, SharedKind::Ike);
        assert_eq!(shared.owners.len(), 2);
    }
}
