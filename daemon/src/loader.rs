// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Applies a swanctl.conf to the running daemon, at start and at reload.
//!
//! A reload is a difference: unchanged connections are not touched, those that left the file are
//! unloaded, and one that is in error now keeps running as it was loaded before. What VICI clients
//! loaded is theirs and stays. A file that cannot be read or parsed changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use swanherd_config::load::{CertificateKind, Loaded};
use swanherd_config::{Diagnostic, load_swanctl};
use swanherd_ike::credentials::PrivateKey;

use crate::control::{Control, Definitions, Request, ShuttingDown};

/// What the loader itself has loaded so far.
#[derive(Debug)]
pub(crate) struct Loader {
    path: PathBuf,
    control: Control,
    connections: BTreeSet<String>,
    shared: BTreeSet<String>,
    keys: BTreeSet<String>,
    refused: BTreeMap<String, String>,
}

/// How an application went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// Connections that are loaded from the file now.
    pub(crate) loaded: usize,
    /// Connections that were refused, and why.
    pub(crate) refused: BTreeMap<String, String>,
    /// Connections that left the file.
    pub(crate) unloaded: usize,
}

/// Why nothing was applied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// The file is missing or has a syntax error.
    #[error("{}", .0.line())]
    File(Box<Diagnostic>),
    /// The daemon is going down.
    #[error(transparent)]
    ShuttingDown(#[from] ShuttingDown),
}

impl Loader {
    /// A loader that has loaded nothing yet.
    pub(crate) fn new(path: PathBuf, control: Control) -> Self {
        Self {
            path,
            control,
            connections: BTreeSet::new(),
            shared: BTreeSet::new(),
            keys: BTreeSet::new(),
            refused: BTreeMap::new(),
        }
    }

    /// The file that is applied.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file, applies the difference, and publishes how that went.
    ///
    /// # Errors
    /// If the file cannot be used as a whole; then nothing changed.
    pub(crate) async fn apply(&mut self) -> Result<Summary, LoadError> {
        let result = self.read_and_apply().await;
        let error = match &result {
            Ok(summary) => {
                self.refused.clone_from(&summary.refused);
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.control.publish_definitions(Definitions {
            file: self.path.display().to_string(),
            at: now.map_or(0, |now| now.as_secs()),
            error,
            loaded: self.connections.len(),
            refused: self.refused.clone(),
        });
        result
    }

    async fn read_and_apply(&mut self) -> Result<Summary, LoadError> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || load_swanctl(&path)).await;
        let loaded = read
            .map_err(|_| LoadError::from(ShuttingDown))?
            .map_err(|error| LoadError::File(Box::new(error)))?;
        for diagnostic in loaded.all_diagnostics() {
            match diagnostic.level {
                swanherd_config::diagnostic::Level::Error => {
                    tracing::error!("{}", diagnostic.line());
                }
                swanherd_config::diagnostic::Level::Warning => {
                    tracing::warn!("{}", diagnostic.line());
                }
                swanherd_config::diagnostic::Level::Note => {
                    tracing::info!("{}", diagnostic.line());
                }
            }
        }
        self.apply_credentials(&loaded).await?;
        self.apply_connections(loaded).await
    }

    async fn apply_credentials(&mut self, loaded: &Loaded) -> Result<(), ShuttingDown> {
        for certificate in &loaded.certificates {
            let ca = match certificate.kind {
                CertificateKind::Authority => true,
                CertificateKind::EndEntity => false,
            };
            let data = certificate.data.clone();
            let result = self
                .control
                .ask(|reply| Request::LoadCert { data, ca, reply })
                .await?;
            if let Err(error) = result {
                tracing::error!(path = %certificate.path.display(), %error, "certificate refused");
            }
        }
        let mut keys = BTreeSet::new();
        for key in &loaded.private_keys {
            match PrivateKey::parse(key.data.expose()) {
                Ok(key) => {
                    let load = self.control.ask(|reply| Request::LoadKey(key, reply));
                    keys.insert(load.await?);
                }
                Err(error) => {
                    tracing::error!(path = %key.path.display(), %error, "private key refused");
                }
            }
        }
        let mut shared = BTreeSet::new();
        for secret in &loaded.secrets {
            shared.extend(secret.id.clone());
            let secret = secret.clone();
            // The engine accepts every secret that the decoder lets through.
            let _ = self
                .control
                .ask(|reply| Request::LoadShared(secret, reply))
                .await?;
        }
        for gone in std::mem::replace(&mut self.keys, keys).difference(&self.keys) {
            let _ = self
                .control
                .ask(|reply| Request::UnloadKey(gone.clone(), reply))
                .await?;
        }
        for gone in std::mem::replace(&mut self.shared, shared).difference(&self.shared) {
            let _ = self
                .control
                .ask(|reply| Request::UnloadShared(gone.clone(), reply))
                .await?;
        }
        Ok(())
    }

    async fn apply_connections(&mut self, loaded: Loaded) -> Result<Summary, LoadError> {
        let mut summary = Summary::default();
        let mut present = BTreeSet::new();
        for (name, connection) in loaded.connections {
            present.insert(name.clone());
            let connection = match connection {
                Ok(connection) => Box::new(connection),
                // It was logged with the other diagnostics.
                Err(error) => {
                    summary.refused.insert(name, error.line());
                    continue;
                }
            };
            match self
                .control
                .ask(|reply| Request::LoadConnection(connection, reply))
                .await?
            {
                Ok(()) => {
                    summary.loaded += 1;
                    self.connections.insert(name);
                }
                Err(error) => {
                    tracing::error!(connection = %name, %error, "connection refused");
                    summary.refused.insert(name, error);
                }
            }
        }
        let gone: Vec<_> = self.connections.difference(&present).cloned().collect();
        for name in gone {
            self.connections.remove(&name);
            summary.unloaded += 1;
            // Already unloaded by a VICI client is fine.
            let _ = self
                .control
                .ask(|reply| Request::UnloadConnection(name, reply))
                .await?;
        }
        Ok(summary)
    }
}
