// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connected socket of either kind.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use super::clients::Peer;

/// See the module's text. A clone is the same socket: whoever does not read can still watch for
/// the other end to leave.
#[derive(Clone, Debug)]
pub(super) enum Socket {
    Unix(Arc<UnixStream>),
    Tcp(Arc<TcpStream>),
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(Arc::new(stream))
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(Arc::new(stream))
    }
}

impl Socket {
    /// Returns when the other end has left, also while octets wait to be read.
    pub(super) async fn left(&self) {
        // A closed reading side is part of this interest, and waiting octets are not.
        let ready = match self {
            Self::Unix(stream) => stream.ready(Interest::PRIORITY).await,
            Self::Tcp(stream) => stream.ready(Interest::PRIORITY).await,
        };
        if ready.is_ok_and(|ready| !ready.is_read_closed()) {
            // Urgent data, which means nothing here.
            std::future::pending().await
        }
    }

    /// Who the other end is.
    pub(super) fn peer(&self) -> Peer {
        match self {
            Self::Unix(stream) => {
                stream
                    .peer_cred()
                    .map_or(Peer::Unknown, |credentials| Peer::Process {
                        uid: credentials.uid(),
                        pid: credentials.pid().filter(|&pid| pid != 0),
                    })
            }
            Self::Tcp(stream) => stream.peer_addr().map_or(Peer::Unknown, Peer::Address),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(match &*self {
                Self::Unix(stream) => stream.poll_read_ready(cx),
                Self::Tcp(stream) => stream.poll_read_ready(cx),
            })?;
            let read = match &*self {
                Self::Unix(stream) => stream.try_read(buf.initialize_unfilled()),
                Self::Tcp(stream) => stream.try_read(buf.initialize_unfilled()),
            };
            match read {
                Ok(count) => {
                    buf.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(match &*self {
                Self::Unix(stream) => stream.poll_write_ready(cx),
                Self::Tcp(stream) => stream.poll_write_ready(cx),
            })?;
            let written = match &*self {
                Self::Unix(stream) => stream.try_write(buf),
                Self::Tcp(stream) => stream.try_write(buf),
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match &*self {
            Self::Unix(stream) => SockRef::from(&**stream).shutdown(Shutdown::Write),
            Self::Tcp(stream) => SockRef::from(&**stream).shutdown(Shutdown::Write),
        })
    }
}
