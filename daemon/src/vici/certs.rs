// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `list-certs`.

use swanherd_config::certificate_subject;
use swanherd_config::identity::IdentityPattern;
use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;
use swanherd_vici::Message;

use super::args::{failure, text};
use super::session::Emitter;
use crate::control::{CertInfo, Control};

/// `list-certs`. A type that does not exist lists nothing, and so does a flag beside type `X509`;
/// beside `ANY` flags do not matter.
pub(super) async fn list(control: Control, args: &Message, emitter: Emitter) -> Message {
    let kind = text(args, "type").unwrap_or("ANY").to_ascii_uppercase();
    let flag = text(args, "flag").unwrap_or("ANY").to_ascii_uppercase();
    let subject = text(args, "subject").map(IdentityPattern::parse);
    let Ok(subject) = subject.transpose() else {
        return Message::new();
    };
    let snapshot = control.snapshot();
    for cert in &snapshot.credentials.certs {
        if is_listed(cert, &kind, &flag, subject.as_ref()) {
            let mut out = Message::new();
            out.push("type", "X509");
            out.push("flag", if cert.is_ca { "CA" } else { "NONE" });
            out.push_flag("has_privkey", cert.has_key);
            out.push("data", &cert.der);
            emitter.emit("list-cert", out).await;
        }
    }
    Message::new()
}

fn is_listed(cert: &CertInfo, kind: &str, flag: &str, subject: Option<&IdentityPattern>) -> bool {
    let (kind, flag) = match kind {
        "ANY" => (true, "ANY"),
        "X509" => (true, flag),
        "X509CA" => (true, "CA"),
        _ => (false, flag),
    };
    let flagged = match flag {
        "ANY" => true,
        "CA" => cert.is_ca,
        "NONE" => !cert.is_ca,
        _ => false,
    };
    let named = subject.is_none_or(|pattern| {
        let name = certificate_subject(&cert.der).map(|data| Identity {
            id_type: IdType::DerAsn1Dn,
            data,
        });
        name.is_some_and(|name| pattern.matches(&name).is_some())
    });
    kind && flagged && named
}

/// Whether `flush-certs` names a type of certificates, if it names one.
///
/// # Errors
/// What to answer otherwise.
pub(super) fn flushed(args: &Message) -> Result<(), Message> {
    const TYPES: [&str; 6] = [
        "ANY",
        "X509",
        "X509_AC",
        "X509_CRL",
        "OCSP_RESPONSE",
        "PUBKEY",
    ];
    match text(args, "type") {
        Some(kind) if !TYPES.iter().any(|known| known.eq_ignore_ascii_case(kind)) => {
            Err(failure(format!("invalid certificate type '{kind}'")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cert(name: &str, is_ca: bool) -> CertInfo {
        let mut params = rcgen::CertificateParams::default();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().unwrap();
        let der = params.self_signed(&key).unwrap().der().to_vec();
        CertInfo {
            der: der.into(),
            is_ca,
            has_key: false,
        }
    }

    #[test]
    fn types_flags_and_subjects_select() {
        let (ca, leaf) = (cert("ca", true), cert("gw", false));
        let subject = IdentityPattern::parse("CN=gw").unwrap();
        let wild = IdentityPattern::parse("CN=*").unwrap();

        for (kind, flag, subject, expected) in [
            ("ANY", "ANY", None, (true, true)),
            ("ANY", "NONE", None, (true, true)),
            ("X509", "CA", None, (true, false)),
            ("X509", "NONE", None, (false, true)),
            ("X509CA", "ANY", None, (true, false)),
            ("X509_CRL", "ANY", None, (false, false)),
            ("X509", "NONSENSE", None, (false, false)),
            ("ANY", "ANY", Some(&subject), (false, true)),
            ("ANY", "ANY", Some(&wild), (true, true)),
        ] {
            let listed = |cert| is_listed(cert, kind, flag, subject);
            assert_eq!((listed(&ca), listed(&leaf)), expected, "{kind} {flag}");
        }
    }
}
