// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A conversation with the kernel through the `rtnetlink` crate: one request at a time, with a
//! time limit and the kernel's extended-ack text.
//!
//! The crate ends the stream of answers alike after an acknowledgement and after a lost
//! connection. So acknowledgements and ends of dumps are forwarded here, and their absence is an
//! error.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::StreamExt as _;
use netlink_packet_core::{
    ErrorMessage, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{AsyncSocket as _, SocketAddr};
use rtnetlink::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::netlink::{ANSWER_TIMEOUT, DUMP_ATTEMPTS, NetlinkError, extended_ack};

/// Requests after which a connection is replaced, so that its sequence numbers never overflow.
const MAX_REQUESTS: u32 = u32::MAX / 2;
/// Length of `struct nlmsghdr`.
const HEADER: usize = 16;

/// The connection. After a failure the next request opens a new one.
#[derive(Debug)]
pub(crate) struct Rtnl {
    session: Mutex<Option<Session>>,
    port: AtomicU32,
}

#[derive(Debug)]
struct Session {
    handle: Handle,
    /// What the kernel sends unasked: on this socket only the notice that answers were lost.
    strays:
        futures_channel::mpsc::UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>,
    task: JoinHandle<()>,
    requests: u32,
    port: u32,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Rtnl {
    /// Opens the connection. Needs a tokio runtime.
    pub(crate) fn open() -> io::Result<Self> {
        let session = Session::open()?;
        Ok(Self {
            port: AtomicU32::new(session.port),
            session: Mutex::new(Some(session)),
        })
    }

    /// The port number that the kernel's copies of our changes carry.
    pub(crate) fn port(&self) -> u32 {
        self.port.load(Ordering::Relaxed)
    }

    /// Executes a request that wants no answer but the acknowledgement.
    pub(crate) async fn command<F>(
        &self,
        request: impl FnOnce(&Handle) -> F,
    ) -> Result<(), NetlinkError>
    where
        F: Future<Output = Result<(), rtnetlink::Error>>,
    {
        self.run(|handle| {
            let request = request(&handle);
            async move { acknowledged(request.await) }
        })
        .await
    }

    /// Asks for one thing.
    pub(crate) async fn get(
        &self,
        message: RouteNetlinkMessage,
    ) -> Result<Option<RouteNetlinkMessage>, NetlinkError> {
        self.run(|mut handle| async move {
            let mut request = NetlinkMessage::from(message);
            request.header.flags = NLM_F_REQUEST;
            let mut answers = handle.request(request).map_err(failure)?;
            let answer = answers.next().await.ok_or(LOST)?;
            match answer.payload {
                NetlinkPayload::InnerMessage(inner) => Ok(Some(inner)),
                NetlinkPayload::Error(error) => refusal(&error).map(|()| None),
                _ => Err(LOST),
            }
        })
        .await
    }

    /// Dumps a table. A dump that the kernel marks as inconsistent is begun again.
    ///
    /// The crate's own requests for dumps hide the headers of the answers, and with them that
    /// mark; so this sends through its connection without them.
    pub(crate) async fn dump<T>(
        &self,
        message: &RouteNetlinkMessage,
        pick: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            let dumped = self
                .run(|handle| dump_once(handle, message.clone(), &pick))
                .await?;
            if let Some(found) = dumped {
                return Ok(found);
            }
        }
        Err(NetlinkError::Protocol(
            "the table changed during each attempt to list it",
        ))
    }

    async fn run<T, F>(&self, ask: impl FnOnce(Handle) -> F) -> Result<T, NetlinkError>
    where
        F: Future<Output = Result<T, NetlinkError>>,
    {
        let mut slot = self.session.lock().await;
        // Taken out: if this future is dropped half way, so is the connection, and answers that
        // are still under way reach nobody.
        let mut session = match slot.take() {
            Some(session) if session.requests < MAX_REQUESTS && !session.task.is_finished() => {
                session
            }
            _ => Session::open()?,
        };
        self.port.store(session.port, Ordering::Relaxed);
        session.requests += 1;
        let outcome = tokio::select! {
            biased;
            outcome = ask(session.handle.clone()) => outcome,
            () = session.overrun() => Err(NetlinkError::Protocol("the kernel dropped answers")),
            () = tokio::time::sleep(ANSWER_TIMEOUT) => {
                Err(NetlinkError::Protocol("no answer from the kernel"))
            }
        };
        if matches!(outcome, Ok(_) | Err(NetlinkError::Refused { .. })) {
            *slot = Some(session);
        }
        outcome
    }
}

impl Session {
    fn open() -> io::Result<Self> {
        let (mut connection, handle, strays) = rtnetlink::new_connection()?;
        connection.set_forward_ack(true);
        connection.set_forward_done(true);
        let socket = connection.socket_mut().socket_mut();
        socket.bind_auto()?;
        // Kernels before 4.12, and before 4.20, lack these. Texts are then missing, and dumps are
        // longer than needed.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_netlink_get_strict_chk(true);
        let mut address = SocketAddr::new(0, 0);
        socket.get_address(&mut address)?;
        Ok(Self {
            handle,
            strays,
            task: tokio::spawn(connection),
            requests: 0,
            port: address.port_number(),
        })
    }

    /// Waits until the kernel says that it dropped answers. Never returns otherwise.
    async fn overrun(&mut self) {
        while let Some((message, _)) = self.strays.next().await {
            if matches!(message.payload, NetlinkPayload::Overrun(_)) {
                return;
            }
        }
        // The connection is gone, which the stream of answers tells as well.
        std::future::pending().await
    }
}

const LOST: NetlinkError = NetlinkError::Protocol("the connection to the kernel ended");

/// `None` if the table changed meanwhile.
async fn dump_once<T>(
    mut handle: Handle,
    message: RouteNetlinkMessage,
    pick: &impl Fn(RouteNetlinkMessage) -> Option<T>,
) -> Result<Option<Vec<T>>, NetlinkError> {
    const INTERRUPTED: u16 = libc::NLM_F_DUMP_INTR as u16;
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut answers = handle.request(request).map_err(failure)?;
    let mut found = Vec::new();
    let mut interrupted = false;
    loop {
        let answer = answers.next().await.ok_or(LOST)?;
        interrupted |= answer.header.flags & INTERRUPTED != 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(inner) => found.extend(pick(inner)),
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(NetlinkError::Refused {
                    errno: done.code.saturating_neg(),
                    text: extended_ack(&done.extended_ack),
                });
            }
            NetlinkPayload::Done(_) => return Ok((!interrupted).then_some(found)),
            NetlinkPayload::Error(error) => {
                refusal(&error)?;
                return Err(LOST);
            }
            _ => {}
        }
    }
}

/// Tells an acknowledgement, which is forwarded as an error without a code, from the end of the
/// connection, which the crate takes for success.
fn acknowledged(result: Result<(), rtnetlink::Error>) -> Result<(), NetlinkError> {
    match result {
        Err(rtnetlink::Error::NetlinkError(error)) => refusal(&error),
        Err(error) => Err(failure(error)),
        Ok(()) => Err(LOST),
    }
}

fn failure(error: rtnetlink::Error) -> NetlinkError {
    match error {
        rtnetlink::Error::NetlinkError(error) => refusal(&error).err().unwrap_or(LOST),
        rtnetlink::Error::RequestFailed => LOST,
        _ => NetlinkError::Protocol("unexpected answer from the kernel"),
    }
}

fn refusal(error: &ErrorMessage) -> Result<(), NetlinkError> {
    if error.code.is_none() {
        return Ok(());
    }
    // The socket asks for errors that echo only the header of the request; attributes follow.
    Err(NetlinkError::Refused {
        errno: error.raw_code().saturating_neg(),
        text: error.header.get(HEADER..).and_then(extended_ack),
    })
}
