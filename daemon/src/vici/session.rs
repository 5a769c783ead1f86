// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client: frames in, one command at a time, frames out.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use swanherd_ike::api::Event;
use swanherd_vici::{FrameError, FrameReader, Message, Packet, PacketType, RawPacket};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::clients::Dropped;
use super::render::Moment;
use super::socket::Socket;
use super::{args, commands, events};
use crate::control::Control;
use crate::hub::{Kinds, Overrun, Subscription};

/// Octets of requests that may wait for the one that runs.
const MAX_INBOX: usize = 1024 * 1024;
/// Requests that may wait for the one that runs.
const MAX_INBOX_FRAMES: usize = 1024;
/// A running command and events pause while more octets than these wait to be sent.
const SOFT_OUTBOX: usize = 256 * 1024;
/// When events that weigh more than this wait, the client has to be quicker.
const HEAVY: usize = 8 * 1024 * 1024;
/// A client that takes nothing for so long is dropped.
const STALL: Duration = Duration::from_secs(30);
/// The same, while more events wait than [`HEAVY`].
const STALL_HEAVY: Duration = Duration::from_secs(2);
/// How long a client that is refused may take to stop writing.
const LINGER: Duration = Duration::from_secs(2);

/// Answer of a command.
pub(super) type Reply = Pin<Box<dyn Future<Output = Message> + Send>>;

/// Where a command puts the events that make up its answer.
#[derive(Clone, Debug)]
pub(super) struct Emitter {
    sender: mpsc::Sender<(&'static str, Message)>,
    registered: Arc<BTreeMap<String, usize>>,
}

impl Emitter {
    /// Whether the client registered for `event`; if not, making one is for nothing.
    pub(super) fn wants(&self, event: &str) -> bool {
        self.registered.contains_key(event)
    }

    /// Sends an event to the client, if it registered for it. Waits while the client is busy
    /// reading earlier ones.
    pub(super) async fn emit(&self, event: &'static str, message: Message) {
        if self.wants(event) {
            // The session ends the command when it ends, so nobody hears of a failure.
            let _ = self.sender.send((event, message)).await;
        }
    }
}

/// One client, as it was accepted.
pub(super) struct Client {
    /// To see it leave.
    pub(super) socket: Socket,
    /// Who it is.
    pub(super) name: String,
    /// Turns true when the daemon ends: what is on its way is all that there will be.
    pub(super) closing: watch::Receiver<bool>,
}

/// Serves one client until it leaves or has to be dropped.
pub(super) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    client: Client,
    control: Control,
) {
    let (reader, writer) = tokio::io::split(stream);
    let clients = Arc::clone(&control.clients);
    let mut session = Session {
        control,
        registered: Arc::default(),
        subscription: None,
        inbox: VecDeque::new(),
        inbox_octets: 0,
        outbox: Outbox::default(),
        running: None,
    };
    let name = client.name.clone();
    let end = session.run(FrameReader::new(reader), writer, client).await;
    let (events, weight) = session
        .subscription
        .as_ref()
        .map_or((0, 0), Subscription::waiting);
    let (unsent, frames) = (session.outbox.octets, session.outbox.frames.len());
    match end {
        End::Closed => {}
        End::Failed(error @ FrameError::TooLong(_)) => {
            clients.drop_one(Dropped::TooLong);
            tracing::warn!(client = %name, %error, "VICI client dropped");
        }
        End::Failed(error) => {
            clients.drop_one(Dropped::Broken);
            tracing::debug!(client = %name, %error, "VICI connection failed");
        }
        End::Stalled(patience) => {
            clients.drop_one(Dropped::Stalled);
            tracing::warn!(
                client = %name, unsent, frames, events, weight,
                "VICI client dropped: it has read nothing for {} seconds",
                patience.as_secs()
            );
        }
        End::Backlog => {
            clients.drop_one(Dropped::Backlog);
            tracing::warn!(
                client = %name, unsent, frames,
                "VICI client dropped: events of more than {} octets waited for it",
                crate::hub::MAX_WEIGHT
            );
        }
    }
}

enum End {
    Closed,
    Failed(FrameError),
    Stalled(Duration),
    Backlog,
}

struct Session {
    control: Control,
    registered: Arc<BTreeMap<String, usize>>,
    /// Exists while the client is registered for events of the engine.
    subscription: Option<Subscription>,
    inbox: VecDeque<Zeroizing<Vec<u8>>>,
    inbox_octets: usize,
    outbox: Outbox,
    running: Option<Running>,
}

struct Running {
    reply: Reply,
    events: mpsc::Receiver<(&'static str, Message)>,
}

enum Step {
    Event(&'static str, Message),
    Done(Message),
}

impl Session {
    async fn run<R, W>(
        &mut self,
        mut reader: FrameReader<R>,
        mut writer: W,
        mut client: Client,
    ) -> End
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        // A packet that is too long is refused in its turn, and is the last one.
        let mut refused: Option<FrameError> = None;
        let mut told = false;
        loop {
            // A client that does not read its answers gets no more of them.
            while self.running.is_none()
                && self.outbox.octets < SOFT_OUTBOX
                && let Some(frame) = self.inbox.pop_front()
            {
                self.inbox_octets -= frame.len();
                self.handle(&frame);
                self.begin().await;
            }
            let idle = self.running.is_none() && self.inbox.is_empty();
            if let Some(error) = refused.take_if(|_| idle) {
                if !told {
                    told = true;
                    self.outbox
                        .push(&Packet::Response(args::failure(error.to_string())));
                    refused = Some(error);
                } else if !self.outbox.is_pending() {
                    linger(reader.get_mut(), &mut writer).await;
                    return End::Failed(error);
                } else {
                    refused = Some(error);
                }
            }
            let room = refused.is_none()
                && self.inbox_octets < MAX_INBOX
                && self.inbox.len() < MAX_INBOX_FRAMES;
            let calm = self.outbox.octets < SOFT_OUTBOX;
            let pending = self.outbox.is_pending();
            let (events, weight) = self
                .subscription
                .as_ref()
                .map_or((0, 0), Subscription::waiting);
            let closing = *client.closing.borrow_and_update();
            if closing && !pending && events == 0 {
                return End::Closed;
            }
            let heavy = weight > HEAVY;
            let patience = if heavy { STALL_HEAVY } else { STALL };
            tokio::select! {
                frame = reader.next(), if room => match frame {
                    Ok(Some(frame)) => {
                        self.inbox_octets += frame.len();
                        self.inbox.push_back(frame);
                    }
                    Ok(None) => return End::Closed,
                    Err(error @ FrameError::TooLong(_)) => refused = Some(error),
                    Err(error) => return End::Failed(error),
                },
                // With no room to read, the end of what it sends would not be seen.
                () = client.socket.left(), if !room => return End::Closed,
                written = send(&mut writer, &self.outbox), if pending => match written {
                    Ok(Sent::Octets(0)) => return End::Closed,
                    Ok(Sent::Octets(count)) => self.outbox.advance(count),
                    Ok(Sent::All) => self.outbox.unflushed = false,
                    Err(error) => return End::Failed(error.into()),
                },
                step = step(&mut self.running, calm) => match step {
                    Step::Event(name, message) => {
                        if !self.send_event(name, message) {
                            // Without it the answer would look whole.
                            self.running = None;
                            self.outbox.push(&too_long());
                        }
                    }
                    Step::Done(message) => self.finish(message),
                },
                event = next(&self.subscription), if calm => match event {
                    Ok(event) => self.tell(&event),
                    // A gap would be silent; a lost connection tells the client to look afresh.
                    Err(Overrun) => return End::Backlog,
                },
                () = gets_heavy(&self.subscription), if !calm && !heavy => {}
                _ = client.closing.changed(), if !closing => {}
                () = tokio::time::sleep_until(self.outbox.progress + patience), if pending => {
                    return End::Stalled(patience);
                }
            }
        }
    }

    fn handle(&mut self, frame: &[u8]) {
        let packet = match RawPacket::parse(frame) {
            Ok(packet) => packet,
            Err(error) => {
                tracing::debug!(%error, "VICI client sent a broken packet; ignored");
                return;
            }
        };
        match packet.packet_type {
            PacketType::Request => self.start(packet.name, packet.body),
            PacketType::EventRegister => self.register(packet.name),
            PacketType::EventUnregister => self.unregister(packet.name),
            other => tracing::debug!(?other, "VICI client sent a packet of a server; ignored"),
        }
    }

    fn start(&mut self, name: &str, body: &[u8]) {
        let (sender, events) = mpsc::channel(16);
        let emitter = Emitter {
            sender,
            registered: Arc::clone(&self.registered),
        };
        let parsed = Message::parse(body).map(Zeroizing::new);
        let broken = parsed.is_err();
        let arguments = parsed.unwrap_or_default();
        match commands::start(name, &self.control, arguments, emitter) {
            None => {
                self.outbox.push(&Packet::CommandUnknown);
            }
            Some(_) if broken => {
                self.outbox
                    .push(&Packet::Response(args::failure("parsing request failed")));
            }
            Some(reply) => self.running = Some(Running { reply, events }),
        }
    }

    /// Lets a command that was just started get as far as it can. A client may leave right after it
    /// has asked for something: what it asked for is passed on before its end is looked for.
    async fn begin(&mut self) {
        let Some(running) = &mut self.running else {
            return;
        };
        let first = std::future::poll_fn(|cx| Poll::Ready(running.reply.as_mut().poll(cx))).await;
        if let Poll::Ready(message) = first {
            self.finish(message);
        }
    }

    fn finish(&mut self, message: Message) {
        if let Some(mut running) = self.running.take() {
            while let Ok((name, message)) = running.events.try_recv() {
                if !self.send_event(name, message) {
                    self.outbox.push(&too_long());
                    return;
                }
            }
        }
        if !self.outbox.push(&Packet::Response(message)) {
            self.outbox.push(&too_long());
        }
    }

    fn register(&mut self, name: &str) {
        if !events::known().any(|known| known == name) {
            self.outbox.push(&Packet::EventUnknown);
            return;
        }
        *Arc::make_mut(&mut self.registered)
            .entry(name.to_owned())
            .or_default() += 1;
        self.subscribe();
        self.outbox.push(&Packet::EventConfirm);
    }

    fn unregister(&mut self, name: &str) {
        let registered = Arc::make_mut(&mut self.registered);
        let Some(count) = registered.get_mut(name) else {
            self.outbox.push(&Packet::EventUnknown);
            return;
        };
        *count -= 1;
        if *count == 0 {
            registered.remove(name);
            self.subscribe();
        }
        self.outbox.push(&Packet::EventConfirm);
    }

    /// Has the engine's events queued that the client is registered for.
    fn subscribe(&mut self) {
        let kinds = self
            .registered
            .keys()
            .filter_map(|name| Kinds::named(name))
            .fold(Kinds::default(), Kinds::and);
        match &self.subscription {
            _ if kinds == Kinds::default() => self.subscription = None,
            None => self.subscription = Some(self.control.events(kinds)),
            Some(subscription) => subscription.want(kinds),
        }
    }

    fn tell(&mut self, event: &Event) {
        // It may have been queued before the client lost its interest.
        let Some(name) = events::name(event).filter(|name| self.registered.contains_key(*name))
        else {
            return;
        };
        let snapshot = self.control.snapshot();
        let moment = Moment {
            instant: std::time::Instant::now(),
            unix: unix_now(),
            counters: &snapshot.sa_counters,
        };
        self.send_event(name, events::message(event, moment));
    }

    /// Whether the protocol can carry it.
    fn send_event(&mut self, name: &str, message: Message) -> bool {
        self.outbox.push(&Packet::Event(name.to_owned(), message))
    }
}

fn too_long() -> Packet {
    Packet::Response(args::failure("the answer is too long"))
}

/// Ends a connection whose client still writes: were it closed at once, the client would fail with
/// a broken pipe before it reads why.
async fn linger(reader: &mut (impl AsyncRead + Unpin), writer: &mut (impl AsyncWrite + Unpin)) {
    let ended = async {
        // It may have left, which is as good.
        let _ = writer.shutdown().await;
        let mut ignored = vec![0; 16 * 1024];
        while reader.read(&mut ignored).await.is_ok_and(|count| count > 0) {}
    };
    let _ = tokio::time::timeout(LINGER, ended).await;
}

/// The next thing that the running command yields; never, if none runs.
async fn step(running: &mut Option<Running>, calm: bool) -> Step {
    let Some(running) = running else {
        return std::future::pending().await;
    };
    tokio::select! {
        biased;
        Some((name, message)) = running.events.recv(), if calm => Step::Event(name, message),
        message = &mut running.reply => Step::Done(message),
    }
}

async fn next(subscription: &Option<Subscription>) -> Result<Arc<Event>, Overrun> {
    match subscription {
        Some(subscription) => subscription.next().await,
        None => std::future::pending().await,
    }
}

async fn gets_heavy(subscription: &Option<Subscription>) {
    match subscription {
        Some(subscription) => subscription.heavier_than(HEAVY).await,
        None => std::future::pending().await,
    }
}

enum Sent {
    Octets(usize),
    All,
}

/// Writes some of what waits; once all is written, sees it off, for TLS may keep octets back.
async fn send(writer: &mut (impl AsyncWrite + Unpin), outbox: &Outbox) -> std::io::Result<Sent> {
    match outbox.front() {
        [] => writer.flush().await.map(|()| Sent::All),
        octets => writer.write(octets).await.map(Sent::Octets),
    }
}

/// Frames that wait to be sent.
struct Outbox {
    frames: VecDeque<Vec<u8>>,
    /// Of the first frame.
    sent: usize,
    octets: usize,
    /// Written, but perhaps not on its way.
    unflushed: bool,
    /// When the client last took something, or the outbox was last empty.
    progress: Instant,
}

impl Default for Outbox {
    fn default() -> Self {
        Self {
            frames: VecDeque::new(),
            sent: 0,
            octets: 0,
            unflushed: false,
            progress: Instant::now(),
        }
    }
}

impl Outbox {
    /// Whether the protocol can carry the packet.
    fn push(&mut self, packet: &Packet) -> bool {
        let frame = match packet.to_frame() {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(%error, "VICI packet cannot be sent");
                return false;
            }
        };
        if !self.is_pending() {
            self.progress = Instant::now();
        }
        self.octets += frame.len();
        self.frames.push_back(frame);
        true
    }

    fn is_pending(&self) -> bool {
        self.unflushed || !self.frames.is_empty()
    }

    fn front(&self) -> &[u8] {
        self.frames.front().map_or(&[], |frame| &frame[self.sent..])
    }

    fn advance(&mut self, count: usize) {
        self.progress = Instant::now();
        self.unflushed = true;
        self.octets -= count;
        self.sent += count;
        if self.front().is_empty() {
            self.frames.pop_front();
            self.sent = 0;
        }
    }
}

pub(super) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
