// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `/metrics` for Prometheus and `/healthz` for whoever watches over processes.
//!
//! Both read the published snapshot only, so a scrape costs IKE nothing and is answered whatever
//! IKE does. Off the loopback the endpoint speaks TLS or not at all.

mod collect;
mod exposition;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use swanherd_config::settings::Settings;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use self::exposition::Format;
use crate::control::Control;

/// Scrapers at a time; more wait.
const MAX_CLIENTS: usize = 64;
/// A handshake, or a request's head, that takes longer ends the connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// A connection that lives longer is closed; scrapers reconnect.
const MAX_AGE: Duration = Duration::from_secs(600);
/// The engine publishes at least once per counter interval. Without news for so long it hangs.
const MAX_SILENCE: Duration = Duration::from_secs(120);

/// How to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Address and port.
    pub(crate) listen: SocketAddr,
    /// Certificate chain and private key (PEM files); required unless `listen` is a loopback
    /// address.
    pub(crate) tls: Option<Tls>,
}

/// Files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tls {
    /// Certificate chain, leaf first.
    pub(crate) certs: PathBuf,
    /// Private key.
    pub(crate) key: PathBuf,
}

/// Serves metrics as the settings say, until `stop` fires. `None` if they are off.
///
/// # Errors
/// For people: why the endpoint cannot be served.
pub(crate) async fn start(
    settings: &Settings,
    control: Control,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<Option<JoinHandle<()>>, String> {
    let Some(listen) = settings.metrics.listen else {
        return Ok(None);
    };
    let options = Options {
        listen,
        tls: tls_of(settings),
    };
    let server = Server::bind(&options)
        .await
        .map_err(|error| format!("cannot serve metrics on {listen}: {error}"))?;
    tracing::info!(%listen, tls = server.tls.is_some(), "serving /metrics and /healthz");
    Ok(Some(tokio::spawn(server.run(control, stop))))
}

/// Reads the files that TLS would need, without serving anything.
///
/// # Errors
/// For people: which file cannot be used.
pub(crate) fn check(settings: &Settings) -> Result<(), String> {
    match tls_of(settings) {
        Some(tls) if settings.metrics.listen.is_some() => acceptor(&tls)
            .map(drop)
            .map_err(|error| format!("metrics cannot be served: {error}")),
        _ => Ok(()),
    }
}

fn tls_of(settings: &Settings) -> Option<Tls> {
    let metrics = &settings.metrics;
    let (certs, key) = metrics.tls_cert.clone().zip(metrics.tls_key.clone())?;
    Some(Tls { certs, key })
}

/// A bound endpoint, served by [`Server::run`].
pub(crate) struct Server {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

impl Server {
    /// Binds the endpoint.
    ///
    /// # Errors
    /// If the address is not a loopback address and there is no TLS, the files for TLS cannot be
    /// used, or the system refuses.
    pub(crate) async fn bind(options: &Options) -> io::Result<Self> {
        let tls = options.tls.as_ref().map(acceptor).transpose()?;
        if tls.is_none() && !options.listen.ip().is_loopback() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "metrics on {} need TLS, because other hosts can reach that address",
                    options.listen
                ),
            ));
        }
        let listener = TcpListener::bind(options.listen).await?;
        Ok(Self { listener, tls })
    }

    /// The address that was bound, with the port that the system chose if none was asked for.
    ///
    /// # Errors
    /// If the system cannot tell.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests bind port 0"))]
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` fires.
    pub(crate) async fn run(self, control: Control, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let mut clients = JoinSet::new();
        let limit = Arc::new(Semaphore::new(MAX_CLIENTS));
        loop {
            while clients.try_join_next().is_some() {}
            let accept = async {
                let Ok(permit) = Arc::clone(&limit).acquire_owned().await else {
                    // The semaphore is never closed.
                    std::future::pending().await
                };
                (self.listener.accept().await, permit)
            };
            let (accepted, permit) = tokio::select! {
                () = &mut stop => return,
                accepted = accept => accepted,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a scraper");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (tls, control) = (self.tls.clone(), control.clone());
            clients.spawn(async move {
                let served = async {
                    match tls {
                        None => serve(stream, control).await,
                        Some(tls) => match tokio::time::timeout(PATIENCE, tls.accept(stream)).await
                        {
                            Ok(Ok(stream)) => serve(stream, control).await,
                            Ok(Err(error)) => tracing::debug!(%error, "scraper's TLS failed"),
                            Err(_) => tracing::debug!("scraper's TLS took too long"),
                        },
                    }
                };
                if tokio::time::timeout(MAX_AGE, served).await.is_err() {
                    tracing::debug!("scraper's connection closed for its age");
                }
                drop(permit);
            });
        }
    }
}

fn acceptor(tls: &Tls) -> io::Result<TlsAcceptor> {
    crate::tls::acceptor(&tls.certs, &tls.key, None)
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, control: Control) {
    let service = hyper::service::service_fn(|request| {
        let response = respond(&request, &control);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "scraper's connection failed");
    }
}

fn respond(request: &Request<Incoming>, control: &Control) -> Response<Full<Bytes>> {
    let text = "text/plain; charset=utf-8";
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = answer(
            StatusCode::METHOD_NOT_ALLOWED,
            text,
            "only GET\n".to_owned(),
        );
        response
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match request.uri().path() {
        "/metrics" => {
            let accept = request
                .headers()
                .get(ACCEPT)
                .and_then(|value| value.to_str().ok());
            let format = Format::negotiate(accept);
            let body = collect::collect(
                &control.snapshot(),
                control.definitions().as_deref(),
                &control.clients,
                format,
            );
            answer(StatusCode::OK, format.content_type(), body)
        }
        "/healthz" => match health(control) {
            Ok(()) => answer(StatusCode::OK, text, "ok\n".to_owned()),
            Err(why) => answer(StatusCode::SERVICE_UNAVAILABLE, text, format!("{why}\n")),
        },
        _ => answer(
            StatusCode::NOT_FOUND,
            text,
            "/metrics or /healthz\n".to_owned(),
        ),
    }
}

fn health(control: &Control) -> Result<(), &'static str> {
    if control.requests.is_closed() {
        return Err("shutting down");
    }
    if control.snapshot().at.elapsed() > MAX_SILENCE {
        return Err("the engine or the data plane hangs");
    }
    Ok(())
}

fn answer(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
pub(crate) mod tests;
