// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `list-certs`.

use swanherd_config::identity::IdentityPattern;
use swanherd_ipsec::Identity;
use swanherd_ipsec::identity::IdType;
use swanherd_vici::Message;

use super::args::text;
use super::session::Emitter;
use crate::control::{CertInfo, Control};

/// `list-certs`. A type or flag that does not exist lists nothing.
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
        "ANY" | "X509" => (true, flag),
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
        let name = subject_of(&cert.der).map(|der| Identity {
            id_type: IdType::DerAsn1Dn,
            data: der.to_vec(),
        });
        name.is_some_and(|name| pattern.matches(&name).is_some())
    });
    kind && flagged && named
}

/// The subject of a certificate in DER (RFC 5280 section 4.1), with its own header.
fn subject_of(cert: &[u8]) -> Option<&[u8]> {
    const SEQUENCE: u8 = 0x30;
    const VERSION: u8 = 0xa0;
    let (SEQUENCE, cert, _) = element(cert)? else {
        return None;
    };
    let (SEQUENCE, mut tbs, _) = element(cert)? else {
        return None;
    };
    if let (VERSION, _, rest) = element(tbs)? {
        tbs = rest;
    }
    // Serial number, signature algorithm, issuer, validity.
    for _ in 0..4 {
        tbs = element(tbs)?.2;
    }
    let rest = element(tbs)?.2;
    tbs.get(..tbs.len() - rest.len())
}

/// Tag and contents of the first element, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut len = usize::from(first);
    if len >= 0x80 {
        let octets = len & 0x7f;
        if octets == 0 || octets > 4 {
            return None;
        }
        let (digits, after) = rest.split_at_checked(octets)?;
        len = digits
            .iter()
            .fold(0, |len, &digit| len << 8 | usize::from(digit));
        rest = after;
    }
    let (contents, after) = rest.split_at_checked(len)?;
    Some((tag, contents, after))
}
