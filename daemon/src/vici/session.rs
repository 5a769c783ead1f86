// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client: frames in, one command at a time, frames out.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use swanherd_ike::api::Event;
use swanherd_vici::{FrameError, FrameReader, Message, Packet, PacketType, RawPacket};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::render::Moment;
use super::{args, commands, events};
use crate::control::Control;

/// Octets of requests that may wait for the one that runs.
const MAX_INBOX: usize = 1024 * 1024;
/// Requests that may wait for the one that runs.
const MAX_INBOX_FRAMES: usize = 1024;
/// A running command pauses while more octets than these wait to be sent.
const SOFT_OUTBOX: usize = 256 * 1024;
/// A client that lets more octets of events pile up is dropped.
const MAX_OUTBOX: usize = 8 * 1024 * 1024;
/// A client that takes nothing for so long is dropped.
const STALL: Duration = Duration::from_secs(30);

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

/// Serves one client until it leaves or has to be dropped.
pub(super) async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, control: Control) {
    let (reader, writer) = tokio::io::split(stream);
    let session = Session {
        control,
        registered: Arc::default(),
        subscription: None,
        inbox: VecDeque::new(),
        inbox_octets: 0,
        outbox: Outbox::default(),
        running: None,
    };
    match session.run(FrameReader::new(reader), writer).await {
        End::Closed => {}
        End::Broken(error) => tracing::debug!(%error, "VICI client dropped"),
        End::Slow => tracing::warn!("VICI client dropped: it does not read what it asked for"),
    }
}

enum End {
    Closed,
    Broken(FrameError),
    Slow,
}

struct Session {
    control: Control,
    registered: Arc<BTreeMap<String, usize>>,
    /// Exists while the client is registered for events of the engine.
    subscription: Option<broadcast::Receiver<Arc<Event>>>,
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
    async fn run<R, W>(mut self, mut reader: FrameReader<R>, mut writer: W) -> End
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            // A client that does not read its answers gets no more of them.
            while self.running.is_none()
                && self.outbox.octets < SOFT_OUTBOX
                && let Some(frame) = self.inbox.pop_front()
            {
                self.inbox_octets -= frame.len();
                self.handle(&frame);
            }
            let room = self.inbox_octets < MAX_INBOX && self.inbox.len() < MAX_INBOX_FRAMES;
            let calm = self.outbox.octets < SOFT_OUTBOX;
            let pending = !self.outbox.frames.is_empty();
            tokio::select! {
                frame = reader.next(), if room => match frame {
                    Ok(Some(frame)) => {
                        self.inbox_octets += frame.len();
                        self.inbox.push_back(frame);
                    }
                    Ok(None) => return End::Closed,
                    Err(error) => return End::Broken(error),
                },
                written = writer.write(self.outbox.front()), if pending => match written {
                    Ok(0) => return End::Closed,
                    Ok(count) => self.outbox.advance(count),
                    Err(error) => return End::Broken(error.into()),
                },
                step = step(&mut self.running, calm) => match step {
                    Step::Event(name, message) => self.send_event(name, message),
                    Step::Done(message) => self.finish(message),
                },
                event = next(&mut self.subscription) => {
                    if self.tell(event).is_err() || self.outbox.octets > MAX_OUTBOX {
                        return End::Slow;
                    }
                }
                () = tokio::time::sleep_until(self.outbox.progress + STALL), if pending => {
                    return End::Slow;
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

    fn finish(&mut self, message: Message) {
        if let Some(mut running) = self.running.take() {
            while let Ok((name, message)) = running.events.try_recv() {
                self.send_event(name, message);
            }
        }
        if !self.outbox.push(&Packet::Response(message)) {
            self.outbox
                .push(&Packet::Response(args::failure("the answer is too long")));
        }
    }

    fn register(&mut self, name: &str) {
        if !events::KNOWN.contains(&name) {
            self.outbox.push(&Packet::EventUnknown);
            return;
        }
        *Arc::make_mut(&mut self.registered)
            .entry(name.to_owned())
            .or_default() += 1;
        if self.subscription.is_none() && !is_streamed(name) {
            self.subscription = Some(self.control.events());
        }
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
        }
        if registered.keys().all(|name| is_streamed(name)) {
            self.subscription = None;
        }
        self.outbox.push(&Packet::EventConfirm);
    }

    fn tell(&mut self, event: Result<Arc<Event>, RecvError>) -> Result<(), ()> {
        match event {
            Ok(event) => {
                let Some(name) = events::name(&event) else {
                    return Ok(());
                };
                if self.registered.contains_key(name) {
                    let snapshot = self.control.snapshot();
                    let moment = Moment {
                        instant: std::time::Instant::now(),
                        unix: unix_now(),
                        counters: &snapshot.sa_counters,
                    };
                    self.send_event(name, events::message(&event, moment));
                }
                Ok(())
            }
            // A gap would be silent; a lost connection tells the client to look afresh.
            Err(RecvError::Lagged(_)) => Err(()),
            Err(RecvError::Closed) => {
                self.subscription = None;
                Ok(())
            }
        }
    }

    fn send_event(&mut self, name: &str, message: Message) {
        self.outbox.push(&Packet::Event(name.to_owned(), message));
    }
}

/// Events that only come as part of a command's answer.
fn is_streamed(name: &str) -> bool {
    name.starts_with("list-") || matches!(name, "control-log" | "reconcile-finding")
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

async fn next(
    subscription: &mut Option<broadcast::Receiver<Arc<Event>>>,
) -> Result<Arc<Event>, RecvError> {
    match subscription {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

/// Frames that wait to be sent.
struct Outbox {
    frames: VecDeque<Vec<u8>>,
    /// Of the first frame.
    sent: usize,
    octets: usize,
    /// When the client last took something, or the outbox was last empty.
    progress: Instant,
}

impl Default for Outbox {
    fn default() -> Self {
        Self {
            frames: VecDeque::new(),
            sent: 0,
            octets: 0,
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
        if self.frames.is_empty() {
            self.progress = Instant::now();
        }
        self.octets += frame.len();
        self.frames.push_back(frame);
        true
    }

    fn front(&self) -> &[u8] {
        self.frames.front().map_or(&[], |frame| &frame[self.sent..])
    }

    fn advance(&mut self, count: usize) {
        self.progress = Instant::now();
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
