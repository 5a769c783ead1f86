// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An asynchronous client.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use zeroize::Zeroizing;

use crate::de::{self, from_message};
use crate::frame::{FrameError, FrameReader};
use crate::message::{EncodeError, Message};
use crate::packet::{Packet, PacketError};
use crate::types::{
    Counters, IkeSa, Initiate, ListSas, LogLine, Selector, Stats, Terminated, Version,
};

/// Where charon and its tools meet unless told otherwise.
pub const DEFAULT_URI: &str = "unix:///var/run/charon.vici";

/// Events that are kept while nobody asks for them; older ones are dropped and counted.
const MAX_EVENTS: usize = 4096;

trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// A connection to a daemon. Commands run one at a time, which the borrow checker enforces.
///
/// A command whose future is dropped before it is done, or that runs into the timeout, leaves an
/// answer on its way; the connection refuses further commands with [`Error::Interrupted`].
pub struct Client {
    reader: FrameReader<ReadHalf<Box<dyn Transport>>>,
    writer: WriteHalf<Box<dyn Transport>>,
    subscribed: Vec<String>,
    events: VecDeque<Event>,
    lost_events: u64,
    timeout: Option<Duration>,
    busy: bool,
}

impl core::fmt::Debug for Client {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Client")
            .field("subscribed", &self.subscribed)
            .finish_non_exhaustive()
    }
}

/// An event of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its name.
    pub name: String,
    /// What it says.
    pub message: Message,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection could be made.
    #[error("cannot connect to {uri}: {source}")]
    Connect {
        /// Where to.
        uri: String,
        /// Why.
        source: io::Error,
    },
    /// The URI is none of `unix://PATH`, `tcp://HOST:PORT`, `tls://HOST:PORT` or an absolute path.
    #[error("'{0}' is not a VICI address (unix://PATH, tcp://HOST:PORT or tls://HOST:PORT)")]
    Address(String),
    /// TLS cannot be spoken: a file that it needs is missing or of no use.
    #[error("no TLS: {0}")]
    Tls(String),
    /// The connection broke.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The daemon closed the connection.
    #[error("the daemon closed the connection")]
    Closed,
    /// The daemon sent something that is no packet.
    #[error("broken packet from the daemon: {0}")]
    Packet(#[from] PacketError),
    /// The request cannot be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The daemon does not have the command.
    #[error("the daemon does not know the command '{0}'")]
    UnknownCommand(String),
    /// The daemon does not have the event.
    #[error("the daemon does not know the event '{0}'")]
    UnknownEvent(String),
    /// The daemon refused: `success=no`.
    #[error("{text}")]
    Refused {
        /// The daemon's words.
        text: String,
        /// The whole answer.
        reply: Message,
    },
    /// The daemon did not answer in time.
    #[error("the daemon did not answer in {0:?}")]
    Timeout(Duration),
    /// An earlier command was abandoned half-way.
    #[error("an earlier command on this connection was interrupted")]
    Interrupted,
    /// The daemon sent a packet of the wrong type.
    #[error("unexpected packet from the daemon")]
    Unexpected,
    /// The answer does not have the expected form.
    #[error("unexpected answer from the daemon: {0}")]
    Decode(#[from] de::Error),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Frame(FrameError::Io(error))
    }
}

impl Client {
    /// Connects to `unix://PATH`, an absolute path, or `tcp://HOST:PORT`.
    ///
    /// # Errors
    /// If the address is none of these, or nobody listens there.
    pub async fn connect(uri: &str) -> Result<Self, Error> {
        let refused = |source| Error::Connect {
            uri: uri.to_owned(),
            source,
        };
        let path = uri
            .strip_prefix("unix://")
            .or_else(|| uri.starts_with('/').then_some(uri));
        if let Some(path) = path {
            return Ok(Self::over(
                UnixStream::connect(path).await.map_err(refused)?,
            ));
        }
        if uri.starts_with("tls://") {
            return Err(Error::Tls(
                "it needs a certificate and key, and the authority of the daemon's".to_owned(),
            ));
        }
        let Some(address) = uri.strip_prefix("tcp://") else {
            return Err(Error::Address(uri.to_owned()));
        };
        let stream = TcpStream::connect(address).await.map_err(refused)?;
        stream.set_nodelay(true).map_err(refused)?;
        Ok(Self::over(stream))
    }

    /// Speaks over an existing byte stream.
    pub fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let stream: Box<dyn Transport> = Box::new(stream);
        let (reader, writer) = tokio::io::split(stream);
        Self {
            reader: FrameReader::new(reader),
            writer,
            subscribed: Vec::new(),
            events: VecDeque::new(),
            lost_events: 0,
            timeout: None,
            busy: false,
        }
    }

    /// Limits how long the daemon may be silent within a command; `None` waits for ever.
    pub fn set_timeout(&mut self, limit: Option<Duration>) {
        self.timeout = limit;
    }

    /// Events that were dropped because nobody took them.
    pub fn lost_events(&self) -> u64 {
        self.lost_events
    }

    /// Sends a command and waits for the answer, which may well say `success=no`.
    ///
    /// # Errors
    /// If the connection fails or the daemon does not know the command.
    pub async fn request(&mut self, command: &str, args: Message) -> Result<Message, Error> {
        self.begin()?;
        self.send_request(command, args).await?;
        loop {
            match self.receive().await? {
                Packet::Event(name, message) => self.keep(name, message),
                other => {
                    self.busy = false;
                    return response(command, other);
                }
            }
        }
    }

    /// Sends a command and turns `success=no` into an error.
    ///
    /// # Errors
    /// If the connection fails, or the daemon does not know the command or refuses.
    pub async fn call(&mut self, command: &str, args: Message) -> Result<Message, Error> {
        check(self.request(command, args).await?)
    }

    /// Starts a command that answers with events of the name `event` before its response.
    ///
    /// # Errors
    /// If the connection fails or the daemon does not know the event.
    pub async fn stream(
        &mut self,
        command: &str,
        event: &str,
        args: Message,
    ) -> Result<Stream<'_>, Error> {
        self.begin()?;
        self.register(event, true).await?;
        self.send_request(command, args).await?;
        Ok(Stream {
            client: self,
            command: command.to_owned(),
            event: event.to_owned(),
            response: None,
        })
    }

    /// Asks for events, to be had from [`Client::next_event`].
    ///
    /// # Errors
    /// If the connection fails or the daemon does not know one of the events; those before it
    /// stay subscribed.
    pub async fn subscribe(&mut self, events: &[&str]) -> Result<(), Error> {
        for &event in events {
            if self.subscribed.iter().any(|name| name == event) {
                continue;
            }
            self.begin()?;
            let registered = self.register(event, true).await;
            self.busy = matches!(registered, Err(Error::Timeout(_)));
            registered?;
            self.subscribed.push(event.to_owned());
        }
        Ok(())
    }

    /// The next event of a subscription. Cancelling this future loses nothing.
    ///
    /// # Errors
    /// If the connection fails or ends.
    pub async fn next_event(&mut self) -> Result<Event, Error> {
        if self.busy {
            return Err(Error::Interrupted);
        }
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let frame = self.reader.next().await?.ok_or(Error::Closed)?;
            match Packet::parse(&frame)? {
                Packet::Event(name, message) => self.keep(name, message),
                _ => return Err(Error::Unexpected),
            }
        }
    }

    /// `version`.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn version(&mut self) -> Result<Version, Error> {
        Ok(from_message(&self.call("version", Message::new()).await?)?)
    }

    /// `stats`.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn stats(&mut self) -> Result<Stats, Error> {
        Ok(from_message(&self.call("stats", Message::new()).await?)?)
    }

    /// `list-sas`: IKE SAs and their children, without waiting for busy ones.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn list_sas(&mut self, filter: &ListSas) -> Result<Vec<IkeSa>, Error> {
        let selector = Selector {
            ike: filter.ike.clone(),
            child: filter.child.clone(),
            ike_id: filter.ike_id,
            child_id: filter.child_id,
        };
        let args = selector.to_message().with("noblock", "yes");
        let mut stream = self.stream("list-sas", "list-sa", args).await?;
        let mut sas: Vec<IkeSa> = Vec::new();
        while let Some(message) = stream.next().await? {
            for (name, section) in message.sections() {
                let mut sa: IkeSa = from_message(section)?;
                name.clone_into(&mut sa.name);
                match sas.last_mut() {
                    // One with many children comes in parts.
                    Some(last) if last.uniqueid == sa.uniqueid => {
                        last.children.append(&mut sa.children);
                    }
                    _ => sas.push(sa),
                }
            }
        }
        check(stream.into_response())?;
        Ok(sas)
    }

    /// `list-conns`, `list-policies` and the like: the sections of all events, by name.
    ///
    /// # Errors
    /// See [`Client::call`], and if a section does not have the form of `T`.
    pub async fn list<T: DeserializeOwned>(
        &mut self,
        command: &str,
        event: &str,
        args: Message,
    ) -> Result<Vec<(String, T)>, Error> {
        let mut stream = self.stream(command, event, args).await?;
        let mut found = Vec::new();
        while let Some(message) = stream.next().await? {
            for (name, section) in message.sections() {
                found.push((name.to_owned(), from_message(section)?));
            }
        }
        check(stream.into_response())?;
        Ok(found)
    }

    /// `get-conns`, `get-keys`, `get-shared`: the one list of the answer.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn names(&mut self, command: &str) -> Result<Vec<String>, Error> {
        let reply = self.call(command, Message::new()).await?;
        let list = if command == "get-conns" {
            "conns"
        } else {
            "keys"
        };
        let values = reply.list(list).unwrap_or_default();
        Ok(values
            .iter()
            .map(|value| String::from_utf8_lossy(value).into_owned())
            .collect())
    }

    /// `get-counters`, of one connection, or of all, or the global ones.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn counters(&mut self, name: Option<&str>, all: bool) -> Result<Counters, Error> {
        let mut args = Message::new();
        if let Some(name) = name {
            args.push("name", name);
        }
        args.push_flag("all", all);
        let reply = self.call("get-counters", args).await?;
        let counters = reply.section("counters").map(from_message).transpose()?;
        Ok(counters.unwrap_or_default())
    }

    /// `initiate`; log lines go to `log` as they come.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::Refused`] says why the child or IKE SA did not come up.
    pub async fn initiate(
        &mut self,
        what: &Initiate,
        log: impl FnMut(LogLine),
    ) -> Result<(), Error> {
        let mut args = Message::new();
        for (name, value) in [("child", &what.child), ("ike", &what.ike)] {
            if let Some(value) = value {
                args.push(name, value);
            }
        }
        args.push_display("timeout", what.timeout_ms);
        if let Some(level) = what.log_level {
            args.push_display("loglevel", level);
        }
        self.logged("initiate", args, log).await.map(drop)
    }

    /// `terminate`; log lines go to `log` as they come.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::Refused`] if nothing matched or not all went down.
    pub async fn terminate(
        &mut self,
        selector: &Selector,
        force: bool,
        timeout_ms: i64,
        log: impl FnMut(LogLine),
    ) -> Result<Terminated, Error> {
        let mut args = selector.to_message();
        args.push_flag("force", force);
        args.push_display("timeout", timeout_ms);
        Ok(from_message(&self.logged("terminate", args, log).await?)?)
    }

    /// `rekey`: queues it and returns the number of SAs that matched.
    ///
    /// # Errors
    /// See [`Client::call`]; [`Error::Refused`] if nothing matched.
    pub async fn rekey(&mut self, selector: &Selector, reauth: bool) -> Result<u32, Error> {
        let mut args = selector.to_message();
        args.push_flag("reauth", reauth);
        let reply: Terminated = from_message(&self.call("rekey", args).await?)?;
        Ok(reply.matches)
    }

    /// `load-conn`: loads or replaces one connection.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn load_conn(&mut self, name: &str, definition: Message) -> Result<(), Error> {
        let args = Message::new().with_section(name, definition);
        self.call("load-conn", args).await.map(drop)
    }

    /// `unload-conn`.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn unload_conn(&mut self, name: &str) -> Result<(), Error> {
        self.call("unload-conn", Message::new().with("name", name))
            .await
            .map(drop)
    }

    /// `load-shared`: a pre-shared key (`kind` is `IKE`) or password, for the given identities.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn load_shared(
        &mut self,
        id: &str,
        kind: &str,
        secret: &[u8],
        owners: &[&str],
    ) -> Result<(), Error> {
        let args = Message::new()
            .with("id", id)
            .with("type", kind)
            .with("data", secret)
            .with_list("owners", owners);
        self.call("load-shared", args).await.map(drop)
    }

    /// `load-key`: a private key in PEM or DER; returns its id.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn load_key(&mut self, kind: &str, data: &[u8]) -> Result<String, Error> {
        let args = Message::new().with("type", kind).with("data", data);
        let reply = self.call("load-key", args).await?;
        Ok(reply.str("id").unwrap_or_default().to_owned())
    }

    /// `load-cert`: an X.509 certificate in PEM or DER; `flag` is `NONE` or `CA`.
    ///
    /// # Errors
    /// See [`Client::call`].
    pub async fn load_cert(&mut self, flag: &str, data: &[u8]) -> Result<(), Error> {
        let args = Message::new()
            .with("type", "X509")
            .with("flag", flag)
            .with("data", data);
        self.call("load-cert", args).await.map(drop)
    }

    async fn logged(
        &mut self,
        command: &str,
        args: Message,
        mut log: impl FnMut(LogLine),
    ) -> Result<Message, Error> {
        let mut stream = self.stream(command, "control-log", args).await?;
        while let Some(message) = stream.next().await? {
            log(from_message(&message)?);
        }
        check(stream.into_response())
    }

    fn begin(&mut self) -> Result<(), Error> {
        if self.busy {
            return Err(Error::Interrupted);
        }
        self.busy = true;
        Ok(())
    }

    async fn send_request(&mut self, command: &str, args: Message) -> Result<(), Error> {
        let packet = Packet::Request(command.to_owned(), args);
        let frame = match packet.to_frame() {
            Ok(frame) => Zeroizing::new(frame),
            Err(error) => {
                // Nothing was sent, so nothing is on its way.
                self.busy = false;
                return Err(error.into());
            }
        };
        if let Packet::Request(_, args) = packet {
            drop(Zeroizing::new(args));
        }
        self.send(&frame).await
    }

    async fn send(&mut self, frame: &[u8]) -> Result<(), Error> {
        self.writer.write_all(frame).await?;
        // TLS may keep octets back.
        Ok(self.writer.flush().await?)
    }

    async fn register(&mut self, event: &str, on: bool) -> Result<(), Error> {
        let packet = if on {
            Packet::EventRegister(event.to_owned())
        } else {
            Packet::EventUnregister(event.to_owned())
        };
        self.send(&packet.to_frame()?).await?;
        loop {
            match self.receive().await? {
                Packet::Event(name, message) => self.keep(name, message),
                Packet::EventConfirm => return Ok(()),
                Packet::EventUnknown => {
                    self.busy = false;
                    return Err(Error::UnknownEvent(event.to_owned()));
                }
                _ => return Err(Error::Unexpected),
            }
        }
    }

    async fn receive(&mut self) -> Result<Packet, Error> {
        let next = self.reader.next();
        let frame = match self.timeout {
            None => next.await?,
            Some(limit) => timeout(limit, next)
                .await
                .map_err(|_| Error::Timeout(limit))??,
        };
        Ok(Packet::parse(&frame.ok_or(Error::Closed)?)?)
    }

    fn keep(&mut self, name: String, message: Message) {
        if !self.subscribed.contains(&name) {
            return;
        }
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.lost_events += 1;
        }
        self.events.push_back(Event { name, message });
    }
}

/// The events of a running command.
#[derive(Debug)]
pub struct Stream<'a> {
    client: &'a mut Client,
    command: String,
    event: String,
    response: Option<Message>,
}

impl Stream<'_> {
    /// The next event, or `None` once the response is there.
    ///
    /// # Errors
    /// If the connection fails or the daemon does not know the command.
    pub async fn next(&mut self) -> Result<Option<Message>, Error> {
        if self.response.is_some() {
            return Ok(None);
        }
        loop {
            match self.client.receive().await? {
                Packet::Event(name, message) if name == self.event => return Ok(Some(message)),
                Packet::Event(name, message) => self.client.keep(name, message),
                other => {
                    if !self.client.subscribed.contains(&self.event) {
                        self.client.register(&self.event, false).await?;
                    }
                    self.client.busy = false;
                    self.response = Some(response(&self.command, other)?);
                    return Ok(None);
                }
            }
        }
    }

    /// The response, after [`Stream::next`] returned `None`; an empty message before.
    pub fn into_response(self) -> Message {
        self.response.unwrap_or_default()
    }
}

fn response(command: &str, packet: Packet) -> Result<Message, Error> {
    match packet {
        Packet::Response(message) => Ok(message),
        Packet::CommandUnknown => Err(Error::UnknownCommand(command.to_owned())),
        _ => Err(Error::Unexpected),
    }
}

pub(crate) fn check(reply: Message) -> Result<Message, Error> {
    match reply.str("success") {
        None | Some("yes") => Ok(reply),
        Some(_) => Err(Error::Refused {
            text: reply
                .str("errmsg")
                .unwrap_or("the daemon gave no reason")
                .to_owned(),
            reply,
        }),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;

    /// A server that expects packets and sends others, in order.
    async fn script(stream: DuplexStream, steps: Vec<(Packet, Vec<Packet>)>) {
        let (reader, mut writer) = tokio::io::split(stream);
        let mut reader = FrameReader::new(reader);
        for (expected, answers) in steps {
            let frame = reader.next().await.unwrap().unwrap();
            assert_eq!(Packet::parse(&frame).unwrap(), expected);
            for answer in answers {
                writer.write_all(&answer.to_frame().unwrap()).await.unwrap();
            }
        }
        // Stay connected until the client goes.
        assert!(reader.next().await.unwrap().is_none());
    }

    fn pair(steps: Vec<(Packet, Vec<Packet>)>) -> (Client, tokio::task::JoinHandle<()>) {
        let (near, far) = tokio::io::duplex(1 << 20);
        (Client::over(near), tokio::spawn(script(far, steps)))
    }

    fn request(name: &str, args: Message) -> Packet {
        Packet::Request(name.into(), args)
    }

    fn event(name: &str, message: Message) -> Packet {
        Packet::Event(name.into(), message)
    }

    #[tokio::test]
    async fn list_sas_registers_reads_and_unregisters() {
        let child = Message::new().with("name", "net").with("bytes-in", "84");
        let sa = Message::new()
            .with("uniqueid", "1")
            .with("initiator", "yes")
            .with_section("child-sas", Message::new().with_section("net-1", child));
        let (mut client, server) = pair(vec![
            (
                Packet::EventRegister("list-sa".into()),
                vec![Packet::EventConfirm],
            ),
            (
                request("list-sas", Message::new().with("noblock", "yes")),
                vec![
                    event("list-sa", Message::new().with_section("gw", sa)),
                    Packet::Response(Message::new()),
                ],
            ),
            (
                Packet::EventUnregister("list-sa".into()),
                vec![Packet::EventConfirm],
            ),
        ]);

        let sas = client.list_sas(&ListSas::default()).await.unwrap();

        assert_eq!(sas.len(), 1);
        assert_eq!(
            (sas[0].name.as_str(), sas[0].uniqueid, sas[0].initiator),
            ("gw", 1, true)
        );
        assert_eq!(sas[0].children[0].bytes_in, 84);
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn events_of_a_subscription_survive_a_command_in_between() {
        let up = Message::new().with("up", "yes");
        let (mut client, server) = pair(vec![
            (
                Packet::EventRegister("ike-updown".into()),
                vec![Packet::EventConfirm],
            ),
            (
                request("version", Message::new()),
                vec![
                    event("ike-updown", up.clone()),
                    Packet::Response(Message::new().with("daemon", "charon")),
                ],
            ),
        ]);

        client.subscribe(&["ike-updown"]).await.unwrap();
        let version = client.version().await.unwrap();
        let event = client.next_event().await.unwrap();

        assert_eq!(version.daemon, "charon");
        assert_eq!((event.name.as_str(), event.message), ("ike-updown", up));
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn refusals_and_unknown_names_are_errors() {
        let refusal = Message::new()
            .with("success", "no")
            .with("errmsg", "no such thing");
        let (mut client, server) = pair(vec![
            (
                request("unload-conn", Message::new().with("name", "x")),
                vec![Packet::Response(refusal)],
            ),
            (
                request("nonsense", Message::new()),
                vec![Packet::CommandUnknown],
            ),
            (
                Packet::EventRegister("nope".into()),
                vec![Packet::EventUnknown],
            ),
        ]);

        let refused = client.unload_conn("x").await.unwrap_err();
        let command = client
            .request("nonsense", Message::new())
            .await
            .unwrap_err();
        let event = client.subscribe(&["nope"]).await.unwrap_err();

        assert_eq!(refused.to_string(), "no such thing");
        assert!(matches!(command, Error::UnknownCommand(name) if name == "nonsense"));
        assert!(matches!(event, Error::UnknownEvent(name) if name == "nope"));
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn after_a_timeout_the_connection_refuses_commands() {
        let (mut client, _server) = pair(vec![(request("stats", Message::new()), vec![])]);
        client.set_timeout(Some(Duration::from_millis(10)));

        let late = client.request("stats", Message::new()).await.unwrap_err();
        let next = client.request("stats", Message::new()).await.unwrap_err();

        assert!(matches!(late, Error::Timeout(_)));
        assert!(matches!(next, Error::Interrupted));
    }

    #[tokio::test]
    async fn an_oversize_request_leaves_the_connection_usable() {
        let (mut client, server) = pair(vec![(
            request("version", Message::new()),
            vec![Packet::Response(Message::new())],
        )]);

        let too_long = Message::new().with("v", vec![0; 70_000]);
        assert!(matches!(
            client.request("x", too_long).await,
            Err(Error::Encode(_))
        ));
        assert!(client.request("version", Message::new()).await.is_ok());
        drop(client);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn addresses_that_are_none_are_refused() {
        assert!(matches!(
            Client::connect("vsock://2:1").await,
            Err(Error::Address(_))
        ));
        assert!(matches!(
            Client::connect("/nonexistent/vici").await,
            Err(Error::Connect { .. })
        ));
    }
}
