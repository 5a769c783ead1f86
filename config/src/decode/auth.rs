// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `local*` and `remote*` sections.

use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;

use super::{Decoder, Opt, Origin, blank_round, options};
use crate::diagnostic::{Diagnostic, suggest};
use crate::dn;
use crate::files::{Files as _, SystemFiles};
use crate::identity::IdentityPattern;
use crate::model::{
    AuthMethod, AuthRound, CertSource, KeyType, PubkeyConstraints, Revocation, SignatureHash,
};
use crate::tree::{Entry, Item, Tree};

pub(crate) const ROUND_KEYS: &[&str] = &[
    "round",
    "auth",
    "id",
    "certs",
    "pubkeys",
    "eap_id",
    "aaa_id",
    "xauth_id",
    "cert_policy",
    "groups",
    "cacerts",
    "ca_id",
    "revocation",
];

impl Decoder<'_> {
    pub(super) fn auth_round(&mut self, section: &str, tree: &Tree, local: bool) -> AuthRound {
        let mut round = blank_round(section, local);
        for option in options(tree) {
            let result = self.round_option(option, &mut round, local);
            self.keep(result);
        }
        for (entry, sub) in tree.sections() {
            let result = self.certificate_section(entry, sub, &mut round);
            self.keep(result);
        }
        for option in options(tree) {
            let result = self.constraint(option, &round, local);
            self.keep(result);
        }
        if round.id.is_none() {
            self.identity_of_certificate(&mut round);
        }
        round
    }

    fn round_option(
        &mut self,
        option: Opt<'_>,
        round: &mut AuthRound,
        local: bool,
    ) -> Result<(), Diagnostic> {
        const KEYS: &[&str] = ROUND_KEYS;
        match option.name() {
            "round" => {
                round.round = self.number(option, KEYS)?;
                self.warnings
                    .push(option.without_effect("there is one round of authentication only"));
            }
            "auth" => {
                let text = self.text(option, KEYS)?;
                round.auth =
                    auth_method(text).map_err(|reason| auth_error(option, text, &reason))?;
                if matches!(round.auth, AuthMethod::Eap(_)) {
                    return Err(option
                        .unsupported("authentication by EAP or XAuth is not supported")
                        .help("use `pubkey` or `psk`"));
                }
            }
            "id" => round.id = Some(self.identity(option, KEYS)?),
            "ca_id" => round.ca_id = Some(self.identity(option, KEYS)?),
            "eap_id" | "aaa_id" | "xauth_id" => {
                let identity = self.identity(option, KEYS)?;
                if option.name() == "eap_id" {
                    round.eap_id = Some(identity);
                }
                self.warnings
                    .push(option.without_effect("EAP and XAuth are not supported"));
            }
            "certs" => self.credentials(option, KEYS, "x509", &mut round.certs)?,
            "cacerts" => self.credentials(option, KEYS, "x509ca", &mut round.cacerts)?,
            "pubkeys" => self.credentials(option, KEYS, "pubkey", &mut round.pubkeys)?,
            "groups" => round.groups = self.owned(option, KEYS)?,
            "cert_policy" => {
                round.cert_policy = self.items(option, KEYS, "an object identifier", |text| {
                    (text.contains('.')
                        && text
                            .split('.')
                            .all(|arc| !arc.is_empty() && arc.bytes().all(|o| o.is_ascii_digit())))
                    .then(|| text.to_owned())
                })?;
            }
            "revocation" => {
                round.revocation = self.choice(
                    option,
                    KEYS,
                    &[
                        ("strict", Revocation::Strict),
                        ("ifuri", Revocation::IfUri),
                        ("relaxed", Revocation::Relaxed),
                    ],
                )?;
            }
            _ => return Err(option.unknown(KEYS)),
        }
        if local
            && matches!(
                option.name(),
                "groups" | "cacerts" | "ca_id" | "cert_policy" | "revocation"
            )
        {
            self.warnings
                .push(option.without_effect("it restricts the peer's side, `remote`"));
        }
        Ok(())
    }

    /// Demands on the peer that nothing here can prove. They are judged once `auth` is known, which
    /// may stand behind them.
    fn constraint(
        &mut self,
        option: Opt<'_>,
        round: &AuthRound,
        local: bool,
    ) -> Result<(), Diagnostic> {
        let set = match option.name() {
            "groups" => !round.groups.is_empty(),
            "revocation" => round.revocation != Revocation::Relaxed,
            _ => false,
        };
        if local || !set {
            return Ok(());
        }
        if option.name() == "groups" {
            return Err(option.unsupported("nothing here can prove that a peer belongs to a group"));
        }
        if round.auth == AuthMethod::Psk {
            self.warnings
                .push(option.without_effect("the peer shows no certificate"));
            return Ok(());
        }
        if round.revocation == Revocation::IfUri {
            self.warnings.push(option.doubt(
                "unsupported",
                "no certificate status can be obtained: certificates that name a revocation list or OCSP server are refused",
            ));
            return Ok(());
        }
        if round.auth == AuthMethod::Any {
            self.warnings.push(option.doubt(
                "unsupported",
                "no certificate status can be obtained: every certificate is refused, so that the peer can authenticate by a preshared key only",
            ));
            return Ok(());
        }
        Err(option
            .unsupported(
                "no certificate status can be obtained, so that every certificate would be refused",
            )
            .help("`relaxed` accepts certificates whose status is not known"))
    }

    /// `cert*` and `cacert*`.
    fn certificate_section(
        &mut self,
        entry: &Entry,
        sub: &Tree,
        round: &mut AuthRound,
    ) -> Result<(), Diagnostic> {
        let lower = entry.name.to_ascii_lowercase();
        let certs = if lower.starts_with("cert") {
            &mut round.certs
        } else if lower.starts_with("cacert") {
            &mut round.cacerts
        } else {
            return Err(Diagnostic::error(
                "unknown-section",
                format!("`{}` is no section here", entry.name),
            )
            .stock(format!("invalid section: {}", entry.name))
            .key(&entry.name)
            .help_opt(suggest(&entry.name, ["cert", "cacert"]))
            .at(entry.location.as_ref()));
        };
        let fail = |code, message: String, stock: &str| {
            Diagnostic::error(code, message)
                .stock(format!("{stock}: {}", entry.name))
                .key(&entry.name)
                .at(entry.location.as_ref())
        };
        let (mut file, mut handle) = (None, false);
        for option in options(sub) {
            let known = &["file", "handle", "slot", "module"];
            match option.name() {
                "file" => file = Some(self.text(option, known)?.to_owned()),
                "handle" => handle = true,
                "slot" | "module" => self
                    .warnings
                    .push(option.without_effect("PKCS#11 tokens are not supported")),
                _ => return Err(option.unknown(known)),
            }
        }
        match (file, handle) {
            (None, false) => {
                return Err(fail(
                    "invalid-value",
                    "neither `file` nor `handle` is given".to_owned(),
                    "handle or file path missing",
                ));
            }
            (Some(_), true) => {
                return Err(fail(
                    "invalid-value",
                    "both `file` and `handle` are given".to_owned(),
                    "handle and file path given",
                ));
            }
            (None, true) => {
                return Err(fail(
                    "unsupported",
                    "certificates on PKCS#11 tokens are not supported".to_owned(),
                    "unable to load certificate",
                ));
            }
            (Some(file), false) => {
                let data = match self.origin {
                    Origin::File { files, .. } => files.read(file.as_ref()),
                    Origin::Message => SystemFiles.read(file.as_ref()),
                };
                match data {
                    Ok(data) if dn::certificate_subject(&data).is_some() => {
                        certs.push(CertSource::Data(data));
                    }
                    Ok(_) => {
                        return Err(fail(
                            "invalid-value",
                            format!("{file} is not an X.509 certificate"),
                            "unable to load certificate",
                        ));
                    }
                    Err(error) => {
                        return Err(fail(
                            "unreadable",
                            format!("cannot read {file}: {error}"),
                            "unable to load certificate",
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Without `id`, the subject of the first certificate is the identity.
    fn identity_of_certificate(&mut self, round: &mut AuthRound) {
        let subjects: Vec<_> = round
            .certs
            .iter()
            .filter_map(|certificate| match certificate {
                CertSource::Data(data) => dn::certificate_subject(data),
                CertSource::File(_) => None,
            })
            .collect();
        let Some(first) = subjects.first() else {
            return;
        };
        let identity = IdentityPattern::exact(Identity {
            id_type: IdType::DerAsn1Dn,
            data: first.clone(),
        });
        if subjects.iter().any(|subject| subject != first) {
            self.warnings.push(
                Diagnostic::warning(
                    "identity",
                    format!("without `id` only the first certificate's subject counts: {identity}"),
                )
                .key("certs")
                .help("give `id`, or one section for each certificate"),
            );
        }
        round.id = Some(identity);
    }

    fn credentials(
        &self,
        option: Opt<'_>,
        known: &[&str],
        subdirectory: &str,
        into: &mut Vec<CertSource>,
    ) -> Result<(), Diagnostic> {
        for item in self.values(option, known)? {
            into.push(self.credential(option, item, subdirectory)?);
        }
        Ok(())
    }

    pub(super) fn owned(&self, option: Opt<'_>, known: &[&str]) -> Result<Vec<String>, Diagnostic> {
        Ok(self
            .list(option, known)?
            .into_iter()
            .map(str::to_owned)
            .collect())
    }
}

fn auth_error(option: Opt<'_>, text: &str, reason: &str) -> Diagnostic {
    let words = ["psk", "pubkey", "eap", "xauth", "rsa", "ecdsa", "ed25519"];
    debug_assert!(matches!(option.entry.item, Item::Value(_)));
    option
        .invalid(format!("`{text}` is no authentication method: {reason}"))
        .help_opt(suggest(text, words))
}

/// `psk`, `pubkey`, `eap...`, `xauth...`, or a key type with constraints.
fn auth_method(text: &str) -> Result<AuthMethod, String> {
    let lower = text.to_ascii_lowercase();
    if lower == "psk" {
        return Ok(AuthMethod::Psk);
    }
    if lower.starts_with("eap") || lower.starts_with("xauth") {
        return Ok(AuthMethod::Eap(text.to_owned()));
    }
    let mut constraints = PubkeyConstraints {
        text: text.to_owned(),
        ..PubkeyConstraints::default()
    };
    // Without a prefix the constraints hold for certificates and, by default, for IKE too; with
    // `ike:` they hold for IKE only.
    let body = text.strip_prefix("ike:").unwrap_or(text);
    constraints.ike_only = text.starts_with("ike:");
    let mut words = body.split('-');
    let first = words.next().unwrap_or_default();
    constraints.rsa_pss = first == "rsa/pss";
    constraints.key_type = match first {
        "pubkey" => None,
        "rsa" | "rsa/pss" => Some(KeyType::Rsa),
        "ecdsa" => Some(KeyType::Ecdsa),
        "ed25519" => Some(KeyType::Ed25519),
        "ed448" => Some(KeyType::Ed448),
        "bliss" => return Err("BLISS is not supported".to_owned()),
        other => return Err(format!("`{other}` is not known")),
    };
    for word in words {
        let hash = match word {
            "sha1" => SignatureHash::Sha1,
            "sha256" | "sha2_256" => SignatureHash::Sha256,
            "sha384" | "sha2_384" => SignatureHash::Sha384,
            "sha512" | "sha2_512" => SignatureHash::Sha512,
            "identity" => SignatureHash::Identity,
            // A further key type widens the constraint to any.
            "pubkey" | "rsa" | "rsa/pss" | "ecdsa" | "ed25519" | "ed448" => {
                constraints.key_type = None;
                constraints.rsa_pss |= word == "rsa/pss";
                continue;
            }
            bits => {
                let bits = bits
                    .parse::<u16>()
                    .map_err(|_| format!("`{bits}` is neither a hash nor a key size"))?;
                constraints.min_bits = Some(bits);
                continue;
            }
        };
        if !constraints.hashes.contains(&hash) {
            constraints.hashes.push(hash);
        }
    }
    Ok(AuthMethod::Pubkey(constraints))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constraints(text: &str) -> PubkeyConstraints {
        let Ok(AuthMethod::Pubkey(constraints)) = auth_method(text) else {
            panic!("{text}");
        };
        constraints
    }

    #[test]
    fn constraints_are_read() {
        let rsa = constraints("rsa-2048-sha256-sha384");
        assert_eq!(rsa.key_type, Some(KeyType::Rsa));
        assert_eq!(rsa.min_bits, Some(2048));
        assert_eq!(rsa.hashes, [SignatureHash::Sha256, SignatureHash::Sha384]);
        assert_eq!(
            constraints("ike:pubkey-sha384").hashes,
            [SignatureHash::Sha384]
        );
        assert!(constraints("ike:pubkey-sha384").ike_only);
        assert!(constraints("rsa/pss-sha256").rsa_pss);
        assert!(!rsa.rsa_pss && !rsa.ike_only);
        assert_eq!(
            constraints("pubkey"),
            PubkeyConstraints {
                text: "pubkey".into(),
                ..Default::default()
            }
        );
    }

    #[test]
    fn unknown_methods_are_refused() {
        for text in ["", "pks", "rsa-foo", "sha256"] {
            assert!(auth_method(text).is_err(), "{text}");
        }
    }
}
