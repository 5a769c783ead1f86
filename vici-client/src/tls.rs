// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VICI over TLS, with certificates on both sides.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::client::{Client, Error};

/// PEM files that say who is who.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Authorities that the daemon's certificate may come from.
    pub ca: PathBuf,
    /// Our certificate chain, leaf first.
    pub cert: PathBuf,
    /// Our private key.
    pub key: PathBuf,
}

impl Client {
    /// Connects to `tls://HOST:PORT`. The daemon's certificate has to be valid for `HOST`.
    ///
    /// # Errors
    /// If the address is none of this form, a file cannot be used, nobody listens there, or the
    /// daemon is not who it should be. Whether the daemon accepts our certificate shows with the
    /// first command.
    pub async fn connect_tls(uri: &str, tls: &Tls) -> Result<Self, Error> {
        let address = uri
            .strip_prefix("tls://")
            .ok_or_else(|| Error::Address(uri.to_owned()))?;
        let (host, _) = address
            .rsplit_once(':')
            .ok_or_else(|| Error::Address(uri.to_owned()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name =
            ServerName::try_from(host.to_owned()).map_err(|_| Error::Address(uri.to_owned()))?;
        let config = config(tls)?;
        let refused = |source| Error::Connect {
            uri: uri.to_owned(),
            source,
        };
        let stream = TcpStream::connect(address).await.map_err(refused)?;
        stream.set_nodelay(true).map_err(refused)?;
        let stream = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .map_err(refused)?;
        Ok(Self::over(stream))
    }
}

fn config(tls: &Tls) -> Result<ClientConfig, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&tls.ca)? {
        roots
            .add(certificate)
            .map_err(|error| unusable(&tls.ca, &error))?;
    }
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| unusable(&tls.key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Tls(error.to_string()))?
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates(&tls.cert)?, key)
        .map_err(|error| unusable(&tls.cert, &error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unusable(path, &error))?;
    if found.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(found)
}

fn unusable(path: &Path, error: &dyn Display) -> Error {
    Error::Tls(format!("{}: {error}", path.display()))
}
