// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that load and unload definitions and credentials.

use swanherd_config::decode::{Origin, decode_connection};
use swanherd_config::diagnostic::Diagnostic;
use swanherd_config::secret::decode_shared;
use swanherd_config::tree::{Item as TreeItem, Tree, Value};
use swanherd_ike::credentials::PrivateKey;
use swanherd_vici::{Item, Message};

use super::args::{failure, outcome, success, text};
use super::names::NAMES;
use crate::control::{Control, Request};

/// A message as a tree, which the configuration reads.
pub(super) fn to_tree(message: &Message) -> Tree {
    let mut tree = Tree::new();
    for (name, item) in message.iter() {
        match item {
            Item::Value(value) => tree.push_value(name, Value::new(value.clone())),
            Item::List(values) => tree.push_list(name, values.iter().cloned().map(Value::new)),
            Item::Section(section) => tree.push_section(name, to_tree(section)),
        };
    }
    tree
}

/// A tree as a message: listings of the configuration.
pub(super) fn to_message(tree: &Tree) -> Message {
    let mut message = Message::new();
    for entry in tree.entries() {
        let name = super::names::printable(&entry.name);
        match &entry.item {
            TreeItem::Value(value) => message.push(name, value.octets()),
            TreeItem::List(values) => message.push_list(name, values.iter().map(Value::octets)),
            TreeItem::Section(section) => message.push_section(name, to_message(section)),
        }
    }
    message
}

/// `load-conn`. Nothing of the message is applied if anything in it is wrong.
pub(super) async fn load_conn(control: &Control, args: &Message) -> Message {
    let mut connections = Vec::new();
    for (name, item) in args.iter() {
        let Item::Section(section) = item else {
            return failure("parsing request failed");
        };
        // Nobody could name it to unload it.
        if name.is_empty() {
            return failure("parsing request failed");
        }
        match decode_connection(name, &to_tree(section), Origin::Message, &NAMES) {
            Ok(decoded) => {
                for doubt in decoded.warnings {
                    tracing::warn!(connection = name, "{}", doubt.message);
                }
                connections.push(decoded.value);
            }
            Err(error) => {
                tracing::warn!(connection = name, "load-conn refused: {}", error.message);
                return refused(&error);
            }
        }
    }
    for connection in connections {
        let loaded = control
            .ask(|reply| Request::LoadConnection(Box::new(connection), reply))
            .await;
        match loaded {
            Ok(Ok(())) => {}
            Ok(Err(text)) => return failure(text),
            Err(error) => return failure(error.to_string()),
        }
    }
    success()
}

/// `unload-conn`.
pub(super) async fn unload_conn(control: &Control, args: &Message) -> Message {
    let Some(name) = text(args, "name").map(str::to_owned) else {
        return failure("unload: missing connection name");
    };
    ask(control, |reply| Request::UnloadConnection(name, reply)).await
}

/// `load-shared`.
pub(super) async fn load_shared(control: &Control, args: &Message) -> Message {
    let shared = match decode_shared(&to_tree(args)) {
        Ok(shared) => shared,
        Err(error) => return refused(&error),
    };
    ask(control, |reply| Request::LoadShared(shared, reply)).await
}

/// `unload-shared`.
pub(super) async fn unload_shared(control: &Control, args: &Message) -> Message {
    let Some(id) = text(args, "id").map(str::to_owned) else {
        return failure("unique identifier missing");
    };
    ask(control, |reply| Request::UnloadShared(id, reply)).await
}

/// `load-key`.
pub(super) async fn load_key(control: &Control, args: &Message) -> Message {
    let Some(kind) = text(args, "type") else {
        return failure("key type missing");
    };
    let printed = kind.to_ascii_uppercase();
    if !["ANY", "RSA", "ECDSA", "ED25519", "ED448"].contains(&printed.as_str()) {
        return failure(format!("invalid key type: {kind}"));
    }
    let Some(data) = args.value("data").filter(|data| !data.is_empty()) else {
        return failure("key data missing");
    };
    let refuse = |reason: String| {
        failure(format!("parsing {printed} private key failed")).with("reason", reason)
    };
    let key = match PrivateKey::parse(data) {
        Ok(key) => key,
        Err(error) => return refuse(error.to_string()),
    };
    let found = key.public().type_name();
    if printed != "ANY" && printed != found {
        return refuse(format!("it is a key of type {found}"));
    }
    match control.ask(|reply| Request::LoadKey(key, reply)).await {
        Ok(id) => success().with("id", id),
        Err(error) => failure(error.to_string()),
    }
}

/// `unload-key`.
pub(super) async fn unload_key(control: &Control, args: &Message) -> Message {
    let Some(id) = text(args, "id").map(str::to_owned) else {
        return failure("key id missing");
    };
    ask(control, |reply| Request::UnloadKey(id, reply)).await
}

/// `load-cert`.
pub(super) async fn load_cert(control: &Control, args: &Message) -> Message {
    let Some(kind) = text(args, "type") else {
        return failure("certificate type missing");
    };
    let flag = text(args, "flag").unwrap_or("NONE");
    let ca = match flag.to_ascii_uppercase().as_str() {
        "NONE" => false,
        "CA" => true,
        "AA" | "OCSP" => {
            return failure(format!("certificates with flag {flag} are not supported"));
        }
        _ => return failure(format!("invalid certificate flag '{flag}'")),
    };
    let ca = match kind.to_ascii_lowercase().as_str() {
        "x509" => ca,
        "x509ca" => true,
        "x509_ac" | "x509ac" | "x509aa" | "x509ocsp" | "x509_crl" | "x509crl" | "pubkey" => {
            return failure(format!("certificates of type {kind} are not supported"));
        }
        _ => return failure(format!("invalid certificate type '{kind}'")),
    };
    let Some(data) = args
        .value("data")
        .filter(|data| !data.is_empty())
        .map(<[u8]>::to_vec)
    else {
        return failure("certificate data missing");
    };
    match control
        .ask(|reply| Request::LoadCert { data, ca, reply })
        .await
    {
        Ok(Ok(())) => success(),
        Ok(Err(reason)) if reason.contains("basic constraint") => {
            failure("ca certificate lacks CA basic constraint, rejected")
        }
        Ok(Err(reason)) => failure("parsing X509 certificate failed").with("reason", reason),
        Err(error) => failure(error.to_string()),
    }
}

/// `load-authority`: there are no authorities with URIs of their own.
pub(super) fn load_authority(args: &Message) -> Message {
    let Some((name, authority)) = args.sections().next() else {
        return if args.is_empty() {
            success()
        } else {
            failure("parsing request failed")
        };
    };
    let has_certificate = ["cacert", "file", "handle"]
        .iter()
        .any(|key| authority.value(key).is_some());
    if has_certificate {
        failure(format!(
            "authority '{name}': authorities are not supported; install the CA certificate in x509ca"
        ))
    } else {
        failure(format!("CA certificate missing: {name}"))
    }
}

/// `unload-authority`.
pub(super) fn unload_authority(args: &Message) -> Message {
    match text(args, "name") {
        None => failure("unload: missing authority name"),
        Some(name) => failure(format!("unload: authority '{name}' not found")),
    }
}

/// The text that clients know, and what it is about in more words.
fn refused(error: &Diagnostic) -> Message {
    let answer = failure(error.vici_text());
    if error.vici_text() == error.message {
        answer
    } else {
        answer.with("reason", &error.message)
    }
}

/// Sends a request whose answer is success or a text.
pub(super) async fn ask(
    control: &Control,
    request: impl FnOnce(tokio::sync::oneshot::Sender<Result<(), String>>) -> Request,
) -> Message {
    match control.ask(request).await {
        Ok(result) => outcome(result),
        Err(error) => failure(error.to_string()),
    }
}
