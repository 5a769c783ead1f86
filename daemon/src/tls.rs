// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS for what the daemon serves.

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Serves with a certificate chain, leaf first, and its private key; with `client_ca`, only to
/// clients that have a certificate of one of these authorities. All are PEM files.
///
/// # Errors
/// Naming the file that cannot be used.
pub(crate) fn acceptor(
    certs: &Path,
    key: &Path,
    client_ca: Option<&Path>,
) -> io::Result<TlsAcceptor> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates(certs)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, &error))?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|error| unusable(path, &error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(
                verifier.build().map_err(|error| unusable(path, &error))?,
            )
        }
    };
    let config = builder
        .with_single_cert(chain, private)
        .map_err(|error| unusable(certs, &error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unusable(path, &error))?;
    if found.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(found)
}

fn unusable(path: &Path, error: &dyn Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{}: {error}", path.display()),
    )
}
