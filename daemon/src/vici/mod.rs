// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The VICI server: what `swanctl`, exporters and our own command line talk to.
//!
//! ```text
//!   listeners ─accept──▶ session task per client
//!                          │  frames in ──▶ inbox ──▶ one command at a time ──▶ Control
//!                          │  events (hub), if registered ─ ──┐
//!                          └─ frames out ◀── bounded buffer ◀─────┴── stream and response
//! ```
//!
//! Commands of one client run strictly one after another, those of different clients
//! independently. Listings read the published snapshot, so they are answered whatever IKE does.
//! A client that does not read is dropped; one that leaves takes its waiting command with it.

mod absent;
mod args;
mod catalogue;
mod certs;
mod clients;
mod commands;
mod control;
mod events;
mod installed;
mod load;
mod names;
mod owner;
mod render;
mod session;
mod socket;
mod stats;

use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, SockAddr, Type};
use swanherd_config::settings::{Settings, ViciTlsSettings};
use swanherd_ike::credentials::Certificate;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::control::Control;
pub(crate) use clients::{Clients, Dropped};
pub(crate) use events::{OF_ENGINE, name as event_name};
use session::Client;
use socket::Socket;

/// Connections that may wait for `accept`.
const BACKLOG: i32 = 1024;
/// Clients at a time; more are turned away.
const MAX_CLIENTS: usize = 512;

/// How long TLS may take to be agreed on.
const TLS_PATIENCE: Duration = Duration::from_secs(10);

/// How long clients are served after the end was announced, while there are SAs.
const FAREWELL: Duration = Duration::from_secs(6);
/// How often to look for SAs.
const FAREWELL_STEP: Duration = Duration::from_millis(20);
/// How long clients have to take the last events.
const LAST_EVENTS: Duration = Duration::from_secs(3);

/// How to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// `charon.plugins.vici.socket`: `unix://PATH` or `tcp://HOST:PORT`.
    pub(crate) uri: String,
    /// Permissions of a Unix socket.
    pub(crate) mode: u32,
    /// `charon.user`, `charon.group`: who owns a Unix socket. `None` leaves it to the process.
    pub(crate) owner: (Option<String>, Option<String>),
}

impl Default for Options {
    fn default() -> Self {
        Self {
            uri: swanherd_vici::client::DEFAULT_URI.to_owned(),
            mode: 0o660,
            owner: (None, None),
        }
    }
}

/// A bound socket. Clients can connect from here on and are served by [`Server::run`].
pub(crate) struct Server {
    listener: Listener,
    tls: Option<(TcpListener, TlsAcceptor)>,
}

#[derive(Debug)]
enum Listener {
    Unix {
        listener: UnixListener,
        path: PathBuf,
    },
    Tcp(TcpListener),
}

impl Server {
    /// Binds the socket. A socket file that nobody listens on is replaced.
    ///
    /// # Errors
    /// If the URI is not understood, another daemon answers there, or the system refuses.
    pub(crate) async fn bind(options: &Options) -> io::Result<Self> {
        let listener = if let Some(path) = options.uri.strip_prefix("unix://") {
            bind_unix(Path::new(path), options)?
        } else if let Some(address) = options.uri.strip_prefix("tcp://") {
            let listener = TcpListener::bind(address).await?;
            if !listener.local_addr()?.ip().is_loopback() {
                tracing::warn!(uri = %options.uri, "VICI has no access control, and this address can be reached from other hosts");
            }
            Listener::Tcp(listener)
        } else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "'{}' is neither unix://PATH nor tcp://HOST:PORT",
                    options.uri
                ),
            ));
        };
        Ok(Self {
            listener,
            tls: None,
        })
    }

    /// Serves over TLS as well, to clients that have a certificate of the right authority.
    ///
    /// # Errors
    /// If a file cannot be used, or the system refuses the address.
    pub(crate) async fn add_tls(&mut self, settings: &ViciTlsSettings) -> io::Result<()> {
        let acceptor = tls_acceptor(settings)?;
        let listener = TcpListener::bind(settings.listen).await?;
        self.tls = Some((listener, acceptor));
        Ok(())
    }

    #[cfg(test)]
    fn tls_address(&self) -> Option<std::net::SocketAddr> {
        self.tls.as_ref()?.0.local_addr().ok()
    }

    #[cfg(test)]
    fn tcp_address(&self) -> Option<std::net::SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix { .. } => None,
        }
    }

    /// Serves clients until `stop` fires. From then on nobody can connect; those who are connected
    /// see the SAs go down before they are dropped.
    pub(crate) async fn run(self, control: Control, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let mut sessions = JoinSet::new();
        let limit = Arc::new(Semaphore::new(MAX_CLIENTS));
        let (closing, closed) = watch::channel(false);
        loop {
            while sessions.try_join_next().is_some() {}
            let stream = tokio::select! {
                () = &mut stop => break,
                stream = self.listener.accept() => stream.map(|stream| (stream, None)),
                stream = accept_tls(&self.tls) => stream,
            };
            let (socket, tls) = match stream {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, most likely: give others time to return some.
                    tracing::warn!(%error, "cannot accept a VICI client");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let name = socket.peer().to_string();
            let Ok(permit) = Arc::clone(&limit).try_acquire_owned() else {
                // Closed at once, so that the client fails rather than hangs.
                control.clients.drop_one(Dropped::TooMany);
                tracing::warn!(
                    client = %name,
                    limit = MAX_CLIENTS,
                    "too many VICI clients, one is turned away"
                );
                continue;
            };
            let client = Client {
                socket: socket.clone(),
                name,
                closing: closed.clone(),
            };
            let connected = control.clients.arrive();
            let control = control.clone();
            sessions.spawn(async move {
                match tls {
                    None => session::serve(socket, client, control).await,
                    Some(tls) => serve_tls(&tls, socket, client, control).await,
                }
                drop((permit, connected));
            });
        }
        drop((self.listener, self.tls));
        // Those who watch are told of every SA that goes down with the daemon.
        let ended = async {
            while !control.snapshot().ike_sas.is_empty() {
                tokio::time::sleep(FAREWELL_STEP).await;
            }
        };
        // The engine does not wait for peers any longer than that either.
        let _ = tokio::time::timeout(FAREWELL, ended).await;
        // The last events were told before the state that we have seen was published, or right
        // after.
        tokio::time::sleep(FAREWELL_STEP).await;
        let _ = closing.send(true);
        let taken = async { while sessions.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(LAST_EVENTS, taken).await;
    }
}

/// Reads the files that TLS needs, without serving anything.
///
/// # Errors
/// For people: which file cannot be used.
pub(crate) fn check(settings: &Settings) -> Result<(), String> {
    match &settings.vici_tls {
        Some(tls) => tls_acceptor(tls)
            .map(drop)
            .map_err(|error| format!("VICI cannot be served over TLS: {error}")),
        None => Ok(()),
    }
}

fn tls_acceptor(settings: &ViciTlsSettings) -> io::Result<TlsAcceptor> {
    crate::tls::acceptor(&settings.cert, &settings.key, Some(&settings.client_ca))
}

async fn accept_tls(
    tls: &Option<(TcpListener, TlsAcceptor)>,
) -> io::Result<(Socket, Option<TlsAcceptor>)> {
    let Some((listener, acceptor)) = tls else {
        return std::future::pending().await;
    };
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream.into(), Some(acceptor.clone())))
}

/// Agrees on TLS with a client, and serves it under the name that its certificate has.
async fn serve_tls(tls: &TlsAcceptor, socket: Socket, mut client: Client, control: Control) {
    let handshake = tokio::time::timeout(TLS_PATIENCE, tls.accept(socket)).await;
    let failure = match handshake {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates();
            if let Some([leaf, ..]) = certificates
                && let Ok(certificate) = Certificate::parse(leaf)
            {
                client.name = format!("{}, {}", client.name, certificate.describe_names());
            }
            return session::serve(stream, client, control).await;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("it took longer than {} seconds", TLS_PATIENCE.as_secs()),
    };
    control.clients.drop_one(Dropped::Tls);
    tracing::warn!(client = %client.name, "VICI client dropped: no TLS: {failure}");
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, .. } = self {
            // Already gone is fine.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Listener {
    async fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Unix { listener, .. } => Ok(listener.accept().await?.0.into()),
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
        }
    }
}

/// Binds beside `path`, sets the permissions, and moves the socket into place, so that it never
/// exists with wider permissions and a stale file never gets in the way.
fn bind_unix(path: &Path, options: &Options) -> io::Result<Listener> {
    let (uid, gid) = owner::ids(&options.owner)?;
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} exists and is not a socket", path.display()),
            ));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another daemon answers on {}", path.display()),
            ));
        }
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = PathBuf::from(temporary);
    // A leftover of a process with our id that was killed right here.
    let _ = std::fs::remove_file(&temporary);
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(&temporary)?)?;
    let in_place =
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(options.mode))
            .and_then(|()| give_to(&temporary, (uid, gid), options))
            .and_then(|()| socket.listen(BACKLOG))
            .and_then(|()| std::fs::rename(&temporary, path));
    if let Err(error) = in_place {
        // The error at hand is the one to report.
        let _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    Ok(Listener::Unix {
        listener: UnixListener::from_std(socket.into())?,
        path: path.to_owned(),
    })
}

/// # Errors
/// If the system refuses: the text names the settings that asked for it.
fn give_to(
    path: &Path,
    (uid, gid): (Option<u32>, Option<u32>),
    options: &Options,
) -> io::Result<()> {
    chown(path, uid, gid).map_err(|error| {
        let (user, group) = &options.owner;
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let owner = format!("{}:{}", name(user), name(group));
        io::Error::new(
            error.kind(),
            format!(
                "the socket cannot be given to '{owner}' (charon.user, charon.group), which needs \
                 CAP_CHOWN: {error}"
            ),
        )
    })
}

#[cfg(test)]
mod tests;
