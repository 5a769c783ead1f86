// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A blocking VICI client that shares no code with the daemon, so that one error in a shared codec
//! cannot hide on both sides.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Key, value pairs in the order of the wire.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Message(pub Vec<(String, Value)>);

/// What a key stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
    /// A section.
    Section(Message),
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Vici(UnixStream);

/// What a daemon sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The type of the packet.
    pub kind: u8,
    /// The name, of those that have one.
    pub name: String,
    /// The message, of those that have one.
    pub message: Message,
}

/// What a daemon has told since somebody listens.
#[derive(Debug)]
pub struct Events {
    received: Arc<Mutex<Vec<Event>>>,
    stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// Something that a daemon has told.
#[derive(Clone, Debug)]
pub struct Event {
    /// When it arrived.
    pub at: Instant,
    /// Its name.
    pub name: String,
    /// What it says.
    pub message: Message,
}

impl Events {
    /// Listens to events with these names until it is dropped.
    ///
    /// # Errors
    /// When nothing listens at the socket, or does not know the events.
    pub fn listen(socket: &Path, names: &[&str]) -> io::Result<Self> {
        let mut vici = Vici::connect(socket)?;
        for name in names {
            vici.send(3, name, None)?;
            vici.expect(5)?;
        }
        vici.0.set_read_timeout(None)?;
        let received = Arc::new(Mutex::new(Vec::new()));
        let stream = vici.0.try_clone()?;
        let list = Arc::clone(&received);
        let thread = std::thread::spawn(move || {
            while let Ok(packet) = vici.receive() {
                let mut rest = packet.get(1..).unwrap_or_default();
                let Ok(name) = short(&mut rest) else { return };
                let Ok(message) = Message::decode(&mut rest) else {
                    return;
                };
                list.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(Event {
                        at: Instant::now(),
                        name,
                        message,
                    });
            }
        });
        Ok(Self {
            received,
            stream,
            thread: Some(thread),
        })
    }

    /// All of them up to now.
    #[must_use]
    pub fn so_far(&self) -> Vec<Event> {
        self.received
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Message {
    /// As VICI's raw form has it, on one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, (key, value)) in self.0.iter().enumerate() {
            f.write_str(if index > 0 { " " } else { "" })?;
            match value {
                Value::Text(text) => write!(f, "{key}={text}"),
                Value::List(items) => write!(f, "{key}=[{}]", items.join(" ")),
                Value::Section(section) => write!(f, "{key} {section:?}"),
            }?;
        }
        f.write_str("}")
    }
}

impl Message {
    /// A message of texts.
    #[must_use]
    pub fn new(pairs: &[(&str, &str)]) -> Self {
        Self(
            pairs
                .iter()
                .map(|(k, v)| ((*k).into(), Value::Text((*v).into())))
                .collect(),
        )
    }

    /// Reads keys with values, lists in brackets and sections in braces, with blanks between them,
    /// as in `name=gw ids=[1 2] child {mode=\"a b\"}`. Texts with blanks or brackets are quoted.
    ///
    /// # Panics
    /// When it is nothing of that.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut rest = text.trim();
        let message = parse_section(&mut rest);
        assert!(rest.trim().is_empty(), "behind the end: {rest}");
        message
    }

    /// The value at a path of keys that are separated by dots.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Value> {
        let (key, rest) = path
            .split_once('.')
            .map_or((path, None), |(k, r)| (k, Some(r)));
        let value = &self.0.iter().find(|(k, _)| k == key)?.1;
        match (rest, value) {
            (None, value) => Some(value),
            (Some(rest), Value::Section(section)) => section.get(rest),
            (Some(_), _) => None,
        }
    }

    /// The text at a path, or nothing.
    #[must_use]
    pub fn text(&self, path: &str) -> &str {
        match self.get(path) {
            Some(Value::Text(text)) => text,
            _ => "",
        }
    }

    /// The number at a path, or 0.
    #[must_use]
    pub fn number(&self, path: &str) -> u64 {
        self.text(path).parse().unwrap_or(0)
    }

    /// The sections in the section at a path, in order; the root's when the path is empty.
    #[must_use]
    pub fn sections(&self, path: &str) -> Vec<(&str, &Self)> {
        let within = if path.is_empty() {
            Some(self)
        } else {
            match self.get(path) {
                Some(Value::Section(section)) => Some(section),
                _ => None,
            }
        };
        within
            .iter()
            .flat_map(|m| &m.0)
            .filter_map(|(k, v)| match v {
                Value::Section(section) => Some((k.as_str(), section)),
                Value::Text(_) | Value::List(_) => None,
            })
            .collect()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        for (key, value) in &self.0 {
            match value {
                Value::Text(text) => {
                    out.push(3);
                    name(out, key);
                    long(out, text);
                }
                Value::List(items) => {
                    out.push(4);
                    name(out, key);
                    for item in items {
                        out.push(5);
                        long(out, item);
                    }
                    out.push(6);
                }
                Value::Section(section) => {
                    out.push(1);
                    name(out, key);
                    section.encode(out);
                    out.push(2);
                }
            }
        }
    }

    fn decode(input: &mut &[u8]) -> io::Result<Self> {
        let mut message = Self::default();
        while !input.is_empty() {
            match take(input, 1)?[0] {
                1 => {
                    let key = short(input)?;
                    message.0.push((key, Value::Section(Self::decode(input)?)));
                }
                2 => return Ok(message),
                3 => {
                    let key = short(input)?;
                    message.0.push((key, Value::Text(text(input)?)));
                }
                4 => {
                    let key = short(input)?;
                    let mut items = Vec::new();
                    while take(input, 1)?[0] == 5 {
                        items.push(text(input)?);
                    }
                    message.0.push((key, Value::List(items)));
                }
                other => return Err(io::Error::other(format!("element of type {other}"))),
            }
        }
        Ok(message)
    }
}

impl Vici {
    /// Connects to the daemon's socket.
    ///
    /// # Errors
    /// When nothing listens there.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self(stream))
    }

    /// A command with one answer.
    ///
    /// # Errors
    /// When the daemon does not know the command, does not answer within 20 s, or hangs up.
    pub fn request(&mut self, command: &str, message: &Message) -> io::Result<Message> {
        self.send(0, command, Some(message))?;
        self.answer(None).map(|(_, answer)| answer)
    }

    /// A command that answers by events; the events.
    ///
    /// # Errors
    /// As for [`Vici::request`].
    pub fn stream(
        &mut self,
        command: &str,
        event: &str,
        message: &Message,
    ) -> io::Result<Vec<Message>> {
        self.send(3, event, None)?;
        self.expect(5)?;
        self.send(0, command, Some(message))?;
        let (events, answer) = self.answer(Some(event))?;
        self.send(4, event, None)?;
        self.expect(5)?;
        if answer.text("success") == "no" {
            return Err(io::Error::other(answer.text("errmsg").to_owned()));
        }
        Ok(events)
    }

    /// All IKE SAs, each as (name of its connection, keys).
    ///
    /// # Errors
    /// As for [`Vici::request`].
    pub fn list_sas(&mut self) -> io::Result<Vec<(String, Message)>> {
        let events = self.stream("list-sas", "list-sa", &Message::default())?;
        Ok(events
            .into_iter()
            .flat_map(|m| m.0)
            .filter_map(|(name, value)| match value {
                Value::Section(section) => Some((name, section)),
                Value::Text(_) | Value::List(_) => None,
            })
            .collect())
    }

    /// Writes octets as they are.
    ///
    /// # Errors
    /// When the daemon has hung up.
    pub fn write(&mut self, octets: &[u8]) -> io::Result<()> {
        self.0.write_all(octets)
    }

    /// Reads a packet of any type.
    ///
    /// # Errors
    /// When the daemon hangs up, or sends nothing for a while.
    pub fn packet(&mut self) -> io::Result<Packet> {
        let packet = self.receive()?;
        let mut rest = packet.get(1..).unwrap_or_default();
        let kind = *packet
            .first()
            .ok_or_else(|| io::Error::other("an empty packet"))?;
        let name = if kind == 7 {
            short(&mut rest)?
        } else {
            String::new()
        };
        Ok(Packet {
            kind,
            name,
            message: Message::decode(&mut rest)?,
        })
    }

    fn send(&mut self, kind: u8, what: &str, message: Option<&Message>) -> io::Result<()> {
        self.write(&frame(kind, what, message))
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length)?;
        let mut body = vec![0; u32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut body)?;
        Ok(body)
    }

    fn expect(&mut self, kind: u8) -> io::Result<()> {
        loop {
            match self.receive()?.first() {
                Some(&got) if got == kind => return Ok(()),
                Some(7) => {}
                got => return Err(io::Error::other(format!("packet of type {got:?}"))),
            }
        }
    }

    fn answer(&mut self, event: Option<&str>) -> io::Result<(Vec<Message>, Message)> {
        let mut events = Vec::new();
        loop {
            let packet = self.receive()?;
            let mut rest = packet.get(1..).unwrap_or_default();
            match packet.first() {
                Some(1) => return Ok((events, Message::decode(&mut rest)?)),
                Some(2) => return Err(io::Error::other("unknown command")),
                Some(7) => {
                    let name = short(&mut rest)?;
                    let message = Message::decode(&mut rest)?;
                    if Some(name.as_str()) == event {
                        events.push(message);
                    }
                }
                got => return Err(io::Error::other(format!("packet of type {got:?}"))),
            }
        }
    }
}

/// A packet with a name, and a message if there is one, behind its length.
///
/// # Panics
/// When it does not fit into a packet.
#[must_use]
pub fn frame(kind: u8, what: &str, message: Option<&Message>) -> Vec<u8> {
    let mut body = vec![kind];
    name(&mut body, what);
    if let Some(message) = message {
        message.encode(&mut body);
    }
    let length = u32::try_from(body.len()).expect("packets in tests are short");
    [&length.to_be_bytes()[..], &body].concat()
}

/// The inner part of a section, from its brace on; without braces, up to the end.
fn parse_section(rest: &mut &str) -> Message {
    let braced = rest.starts_with('{');
    *rest = rest.strip_prefix('{').unwrap_or(rest).trim_start();
    let mut message = Message::default();
    loop {
        if rest.is_empty() || rest.starts_with('}') {
            assert_eq!(braced, rest.starts_with('}'), "braces do not match: {rest}");
            *rest = rest.strip_prefix('}').unwrap_or(rest).trim_start();
            return message;
        }
        let end = rest.find(['=', ' ', '{']).expect("a key has a value");
        let (key, tail) = rest.split_at(end);
        *rest = tail.trim_start();
        let value = if let Some(tail) = rest.strip_prefix("=[") {
            *rest = tail.trim_start();
            let mut items = Vec::new();
            while !rest.starts_with(']') {
                items.push(parse_text(rest));
            }
            *rest = rest[1..].trim_start();
            Value::List(items)
        } else if let Some(tail) = rest.strip_prefix('=') {
            *rest = tail;
            Value::Text(parse_text(rest))
        } else {
            Value::Section(parse_section(rest))
        };
        message.0.push((key.to_owned(), value));
    }
}

fn parse_text(rest: &mut &str) -> String {
    let (text, tail) = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"').expect("quotes are closed"),
        None => rest.split_at(rest.find([' ', '}', ']']).unwrap_or(rest.len())),
    };
    *rest = tail.trim_start();
    text.to_owned()
}

fn name(out: &mut Vec<u8>, name: &str) {
    out.push(u8::try_from(name.len()).expect("names in tests are short"));
    out.extend(name.as_bytes());
}

fn long(out: &mut Vec<u8>, text: &str) {
    let length = u16::try_from(text.len()).expect("values in tests are short");
    out.extend(length.to_be_bytes());
    out.extend(text.as_bytes());
}

fn take<'a>(input: &mut &'a [u8], length: usize) -> io::Result<&'a [u8]> {
    let (head, tail) = input
        .split_at_checked(length)
        .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    *input = tail;
    Ok(head)
}

fn short(input: &mut &[u8]) -> io::Result<String> {
    let length = take(input, 1)?[0];
    Ok(String::from_utf8_lossy(take(input, length.into())?).into_owned())
}

fn text(input: &mut &[u8]) -> io::Result<String> {
    let length = take(input, 2)?;
    let length = u16::from_be_bytes([length[0], length[1]]);
    Ok(String::from_utf8_lossy(take(input, length.into())?).into_owned())
}
