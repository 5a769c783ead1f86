// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loaded credentials: what VICI clients and the file loader put in, as one value for the endpoint.

use std::sync::Arc;

use swanherd_config::model::{AuthRound, CertSource, Connection, SharedSecret};
use swanherd_ike::credentials::{Certificate, CredentialError, Credentials, PrivateKey};

use crate::control::{CertInfo, CredentialNames};

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct CredentialStore {
    loaded: Credentials,
}

impl CredentialStore {
    /// Adds or replaces a shared secret.
    pub(crate) fn load_shared(&mut self, secret: SharedSecret) {
        // With an id it replaces the one before. Without, it is still not another one.
        if secret.id.is_none() && self.loaded.shared().any(|known| *known == secret) {
            return;
        }
        self.loaded.add_shared(secret);
    }

    /// Removes a shared secret.
    pub(crate) fn unload_shared(&mut self, id: &str) {
        self.loaded.remove_shared(id);
    }

    /// Adds a private key and returns its id in hexadecimal.
    pub(crate) fn load_key(&mut self, key: PrivateKey) -> String {
        hex(&self.loaded.add_key(key))
    }

    /// Removes a private key by its id in hexadecimal. Returns whether there was one.
    pub(crate) fn unload_key(&mut self, id: &str) -> bool {
        let found = self
            .loaded
            .keys()
            .map(|(key, _)| *key)
            .find(|key| hex(key) == id);
        found.is_some_and(|key| self.loaded.remove_key(&key))
    }

    /// Adds a certificate; with `ca` it must be one of an authority.
    ///
    /// # Errors
    /// In VICI's words.
    pub(crate) fn load_cert(&mut self, data: &[u8], ca: bool) -> Result<(), String> {
        let certificate = Certificate::parse(data).map_err(|error| match error {
            CredentialError::Malformed(_) => "parsing X509 certificate failed".to_owned(),
            other => format!("parsing X509 certificate failed: {other}"),
        })?;
        if ca && !certificate.is_ca() {
            return Err("ca certificate lacks CA basic constraint, rejected".to_owned());
        }
        self.loaded.add_certificate(certificate);
        Ok(())
    }

    /// What clients may know.
    pub(crate) fn names(&self) -> CredentialNames {
        CredentialNames {
            keys: self.loaded.keys().map(|(id, _)| hex(id)).collect(),
            shared: self
                .loaded
                .shared()
                .filter_map(|secret| secret.id.clone())
                .collect(),
            certs: self
                .loaded
                .certificates()
                .iter()
                .map(|certificate| CertInfo {
                    der: certificate.der().into(),
                    is_ca: certificate.is_ca(),
                    has_key: self.loaded.has_key(certificate),
                })
                .collect(),
        }
    }

    /// The value that the endpoint uses until the next change.
    pub(crate) fn build(&self) -> Arc<Credentials> {
        Arc::new(self.loaded.clone())
    }
}

/// Reads the certificates that a connection names by path, so that the endpoint needs no files.
///
/// # Errors
/// Naming the path that cannot be read.
pub(crate) fn read_certificates(connection: &mut Connection) -> Result<(), String> {
    let rounds = connection.local.iter_mut().chain(&mut connection.remote);
    for source in rounds.flat_map(sources) {
        if let CertSource::File(path) = source {
            let data =
                std::fs::read(&*path).map_err(|error| format!("cannot read {path}: {error}"))?;
            *source = CertSource::Data(data);
        }
    }
    Ok(())
}

fn sources(round: &mut AuthRound) -> impl Iterator<Item = &mut CertSource> {
    round
        .certs
        .iter_mut()
        .chain(&mut round.cacerts)
        .chain(&mut round.pubkeys)
}

fn hex(octets: &[u8]) -> String {
    octets.iter().map(|octet| format!("{octet:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use swanherd_config::model::SharedKind;
    use swanherd_ipsec::Secret;

    use super::*;

    #[test]
    fn the_same_secret_without_an_id_is_kept_once() {
        let secret = |text: &[u8]| SharedSecret {
            id: None,
            kind: SharedKind::Ike,
            secret: Secret::copy_of(text),
            owners: Vec::new(),
        };
        let mut store = CredentialStore::default();
        for text in [b"one", b"two", b"one", b"two"] {
            store.load_shared(secret(text));
        }
        assert_eq!(store.loaded.shared().len(), 2);
        assert_eq!(store.names().shared, [""; 0]);
    }
}
