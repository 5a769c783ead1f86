// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A replay for people: what came in and what was done, one line each, as an analyser of protocols
//! shows it; protected messages with what is inside.

use std::collections::VecDeque;

use swanherd_ipsec::plane::Op;

use super::tape::Draw;
use crate::api::{Action, Computed, Event, Input, LogLine};
use crate::wire::{Message, Payload, parse_payloads};

/// How many sealed payloads are remembered, to show what is inside of messages that are sent.
const REMEMBERED: usize = 64;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Sealed payloads and their contents.
    sealed: VecDeque<(Vec<u8>, Vec<u8>)>,
}

impl Listing {
    /// An input, with what was drawn for it.
    pub(super) fn input(&mut self, input: &Input, draws: &[Draw]) -> String {
        let mut opened = None;
        for draw in draws {
            match draw {
                Draw::Sealed { plain, sealed } => {
                    if self.sealed.len() >= REMEMBERED {
                        self.sealed.pop_front();
                    }
                    self.sealed.push_back((sealed.clone(), plain.clone()));
                }
                Draw::Opened(plain) => opened = Some(plain.as_slice()),
                _ => {}
            }
        }
        match input {
            Input::Datagram(datagram) => format!(
                "< {} to {}: {}",
                datagram.remote,
                datagram.local,
                message(&datagram.payload, opened)
            ),
            Input::Timeout => "  a timer fires".to_owned(),
            Input::Plane(token, Ok(outcome)) => format!("  plane #{token}: {outcome:?}"),
            Input::Plane(token, Err(error)) => format!("  plane #{token}: {error}"),
            Input::Computed(token, computed) => {
                format!("  computed #{token}: {}", outcome(computed))
            }
            Input::Resolved(token, addrs) => format!("  resolved #{token}: {addrs:?}"),
            Input::Source(token, addr) => format!("  source #{token}: {addr:?}"),
            Input::Usage(token, Some(ago)) => {
                format!("  usage #{token}: {:.3} s ago", ago.as_secs_f64())
            }
            Input::Usage(token, None) => format!("  usage #{token}: none"),
            Input::PlaneEvent(event) => format!("  plane event: {event:?}"),
            Input::Addresses(addresses) => {
                let addrs: Vec<_> = addresses.iter().map(|host| host.addr).collect();
                format!("  addresses of this host: {addrs:?}")
            }
            Input::TooLong(transmit) => format!(
                "  too long for the path to {}: {}",
                transmit.remote,
                message(&transmit.payload, None)
            ),
            Input::Load(connection) => format!("  load connection {}", connection.name),
            Input::Unload(connection) => format!("  unload connection {connection}"),
            Input::Credentials(credentials) => format!(
                "  credentials: {} secrets, {} private keys, {} certificates",
                credentials.shared().len(),
                credentials.keys().count(),
                credentials.certificates().len()
            ),
            Input::Settings(_) => "  settings".to_owned(),
            Input::Command(id, command) => format!("  command #{id}: {command:?}"),
            Input::Cancel(id) => format!("  command #{id} is cancelled"),
            Input::Shutdown => "  shutdown".to_owned(),
        }
    }

    /// An action, unless it is for machines only.
    pub(super) fn action(&self, action: &Action) -> Option<String> {
        Some(match action {
            Action::Transmit(transmit) if transmit.keepalive => {
                format!("> {} to {}: keepalive", transmit.local, transmit.remote)
            }
            Action::Transmit(transmit) => {
                let inside = self
                    .sealed
                    .iter()
                    .rev()
                    .find(|(sealed, _)| transmit.payload.ends_with(sealed))
                    .map(|(_, plain)| plain.as_slice());
                format!(
                    "> {} to {}: {}",
                    transmit.local,
                    transmit.remote,
                    message(&transmit.payload, inside)
                )
            }
            Action::Plane(token, op) => format!("  -> plane #{token}: {}", operation(op)),
            Action::Compute(token, job) => format!("  -> compute #{token}: {job:?}"),
            Action::Resolve(token, name) => format!("  -> resolve #{token}: {name}"),
            Action::Source(token, remote) => format!("  -> source #{token}: to {remote}"),
            Action::Usage(token, sas) => {
                let spis: Vec<String> = sas.iter().map(|sa| format!("{:08x}", sa.spi)).collect();
                format!("  -> usage #{token}: of {}", spis.join(" "))
            }
            Action::Event(event) => return told(event),
        })
    }
}

/// A message with its SPIs, and what is inside if it is known.
fn message(octets: &[u8], inside: Option<&[u8]>) -> String {
    let mut message = match Message::parse(octets) {
        Ok(message) => message,
        Err(error) => return format!("{} octets, {error}", octets.len()),
    };
    let spis = format!(
        "{:016x}_i {:016x}_r",
        message.header.spi_i, message.header.spi_r
    );
    let part = match (message.payloads.last(), inside) {
        (Some(Payload::Sk(sk)), Some(plain)) => {
            if let Ok(inner) = parse_payloads(sk.first, plain) {
                message.payloads = inner;
            }
            String::new()
        }
        (Some(Payload::Skf(skf)), _) => format!(", fragment {} of {}", skf.number, skf.total),
        _ => String::new(),
    };
    format!("{message}{part} ({} octets, {spis})", octets.len())
}

fn outcome(computed: &Computed) -> String {
    let kind = match computed {
        Computed::Generated(Ok(_)) => "key exchange value",
        Computed::Agreed(Ok(_)) => "key exchange finished",
        Computed::Responded(Ok(_)) => "key exchange answered",
        Computed::Signed(Ok((method, _))) => return format!("signature, {method}"),
        Computed::Verified(Ok(peer)) => {
            return format!("the peer's {} signature is right", peer.scheme.name());
        }
        Computed::Generated(Err(error))
        | Computed::Agreed(Err(error))
        | Computed::Responded(Err(error)) => return error.to_string(),
        Computed::Signed(Err(error)) => return error.to_string(),
        Computed::Verified(Err(error)) => return error.to_string(),
    };
    kind.to_owned()
}

fn operation(op: &Op) -> String {
    match op {
        Op::AllocSpi { src, dst, reqid } => {
            format!("{} from {src} to {dst}, reqid {reqid}", op.name())
        }
        Op::InstallSa(sa) => format!(
            "{} {:08x} {:?} from {} to {}, reqid {}, {}",
            op.name(),
            sa.spi,
            sa.direction,
            sa.src,
            sa.dst,
            sa.reqid,
            sa.keys.encryption
        ),
        Op::UpdateSa { id, src, dst, .. } => {
            format!("{} {:08x}, now from {src} to {dst}", op.name(), id.spi)
        }
        Op::RemoveSa(id) => format!("{} {:08x} to {}", op.name(), id.spi, id.dst),
        Op::InstallPolicies(set) => format!("{} #{} of {}", op.name(), set.id, set.owner),
        Op::RemovePolicies(id) => format!("{} #{id}", op.name()),
        Op::AddAddress { addr, .. } => format!("{} {addr}", op.name()),
        Op::RemoveAddress(addr) => format!("{} {addr}", op.name()),
    }
}

fn told(event: &Event) -> Option<String> {
    let sa = |sa: &crate::api::IkeSaInfo| {
        let name = sa.connection.as_deref().unwrap_or("(unnamed)");
        format!("{name}[{}]", sa.id)
    };
    Some(match event {
        Event::Log(LogLine {
            group,
            ike_sa,
            message,
            ..
        }) => {
            let whose = ike_sa
                .as_ref()
                .map_or_else(String::new, |(name, id)| format!(" <{name}|{id}>"));
            format!("  [{group:?}]{whose} {message}")
        }
        Event::IkeUpDown { up, sa: ike } => format!("  ike-updown {} up={up}", sa(ike)),
        Event::IkeRekey { old, new } => format!("  ike-rekey {} to {}", sa(old), sa(new)),
        Event::IkeUpdate {
            sa: ike,
            local,
            remote,
        } => format!("  ike-update {}: now {local} to {remote}", sa(ike)),
        Event::ChildUpDown { up, sa: ike } => {
            let names: Vec<_> = ike
                .children
                .values()
                .map(|child| format!("{}{{{}}}", child.name, child.id))
                .collect();
            format!("  child-updown {} {} up={up}", sa(ike), names.join(" "))
        }
        Event::ChildRekey { sa: ike, old, new } => format!(
            "  child-rekey {} {}{{{}}} to {{{}}}",
            sa(ike),
            old.name,
            old.id,
            new.id
        ),
        Event::Alert { kind, .. } => format!("  alert {kind}"),
        Event::CommandDone { id, result } => match result {
            Ok(()) => format!("  command #{id} is done"),
            Err(text) => format!("  command #{id} failed: {text}"),
        },
        Event::Failure {
            connection,
            child,
            reason,
            text,
        } => {
            let mut whose = connection
                .clone()
                .unwrap_or_else(|| "no connection".to_owned());
            if let Some(child) = child {
                whose.push_str(", child ");
                whose.push_str(child);
            }
            format!("  failure of {whose} ({reason:?}): {text}")
        }
        Event::NextAttempt {
            connection,
            child,
            at,
        } => match at {
            Some(_) => format!("  next attempt for {connection}, child {child}, is planned"),
            None => format!("  no attempt for {connection}, child {child}, is planned any more"),
        },
        Event::Counter { .. } | Event::Changed(_) | Event::Gone(_) => return None,
    })
}
