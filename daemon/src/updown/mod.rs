// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scripts that are run when a CHILD SA comes up or goes down (`updown`).
//!
//! ```text
//!   engine ──notices──▶ thread: interface, environments ──orders──▶ helper process ──▶ /bin/sh
//!                                              log ◀──answers── thread ◀────┘
//! ```
//!
//! The engine notes what happened and goes on; however slow, many or broken the scripts are, IKE
//! never waits for them. The helper is started with the first script that is to be run.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use swanherd_config::model::Connection;
use swanherd_ike::api::{ChildSaId, Event, HostAddress, IkeSaInfo, LogGroup, LogLine};

mod env;
mod helper;

pub(crate) use helper::main as helper_main;

use helper::{About, Answer, End, Job, Order, Ran};

/// Scripts that may wait. A gateway whose scripts fall further behind is broken; more would only
/// take its memory.
const MAX_WAITING: usize = 10_000;

/// What the engine has in hand. By default, no scripts are run.
#[derive(Debug, Default)]
pub(crate) struct Scripts {
    notices: Option<mpsc::Sender<Message>>,
    /// Of the children that are up. What a child came up with, it goes down with.
    up: BTreeMap<ChildSaId, Arc<Script>>,
    /// Links of this host's addresses.
    links: BTreeMap<IpAddr, u32>,
}

/// Ends the scripts along with the daemon.
#[derive(Debug)]
pub(crate) struct Runner {
    notices: mpsc::Sender<Message>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Script {
    command: String,
    host_access: bool,
    /// As it was called when the child came up.
    interface: OnceLock<Option<String>>,
}

#[derive(Debug)]
enum Message {
    Notice(Notice),
    /// Nothing more comes; what is ordered may take so long.
    End(Duration),
}

/// A child came up or went down.
#[derive(Debug)]
struct Notice {
    up: bool,
    /// Holds only this child.
    sa: Box<IkeSaInfo>,
    script: Arc<Script>,
    link: Option<u32>,
}

/// Starts what runs scripts, each for at most `limit`.
///
/// # Errors
/// If there can be no thread for it.
pub(crate) fn start(limit: Duration) -> io::Result<(Scripts, Runner)> {
    let (notices, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("updown".to_owned())
        .spawn(move || {
            let mut helper = Helper::default();
            for message in receiver {
                match message {
                    Message::Notice(notice) => helper.order(&notice, limit),
                    Message::End(grace) => return helper.end(Some(grace)),
                }
            }
            helper.end(None);
        })?;
    let scripts = Scripts {
        notices: Some(notices.clone()),
        ..Scripts::default()
    };
    Ok((scripts, Runner { notices, thread }))
}

impl Runner {
    /// Waits for the scripts that were ordered, for `grace` at most. The rest is cut off.
    pub(crate) fn finish(self, grace: Duration) {
        // A thread that is gone already has nothing more to do.
        let _ = self.notices.send(Message::End(grace));
        let _ = self.thread.join();
    }
}

impl Scripts {
    /// The addresses of this host have changed.
    pub(crate) fn addresses(&mut self, found: &[HostAddress]) {
        if self.notices.is_some() {
            self.links = found.iter().map(|host| (host.addr, host.link)).collect();
        }
    }

    /// Orders scripts if the event calls for them.
    pub(crate) fn note(&mut self, event: &Event, connections: &BTreeMap<String, Arc<Connection>>) {
        let Some(notices) = &self.notices else {
            return;
        };
        let (up, sa) = match event {
            Event::ChildUpDown { up, sa } => (*up, sa),
            Event::ChildRekey { old, new, .. } => {
                if let Some(script) = self.up.remove(&old.id) {
                    self.up.insert(new.id, script);
                }
                return;
            }
            _ => return,
        };
        for child in sa.children.values() {
            let script = if up {
                let connection = sa
                    .connection
                    .as_ref()
                    .and_then(|name| connections.get(name));
                let script = connection.and_then(|one| script(one, &child.name));
                if let Some(script) = &script {
                    self.up.insert(child.id, Arc::clone(script));
                }
                script
            } else {
                self.up.remove(&child.id)
            };
            if let Some(script) = script {
                // The thread ends with the daemon.
                let _ = notices.send(Message::Notice(Notice {
                    up,
                    sa: sa.clone(),
                    script,
                    link: self.links.get(&sa.local.ip()).copied(),
                }));
            }
        }
    }
}

fn script(connection: &Connection, child: &str) -> Option<Arc<Script>> {
    let child = connection.children.iter().find(|one| one.name == child)?;
    Some(Arc::new(Script {
        command: child.updown.clone()?,
        host_access: child.hostaccess,
        interface: OnceLock::new(),
    }))
}

/// The helper process, once there is one.
#[derive(Debug, Default)]
struct Helper(Option<Running>);

#[derive(Debug)]
struct Running {
    process: Child,
    orders: ChildStdin,
    /// Reads answers until there are no more.
    answers: JoinHandle<()>,
    /// Orders without an answer.
    waiting: Arc<AtomicUsize>,
}

impl Helper {
    fn order(&mut self, notice: &Notice, limit: Duration) {
        let interface = notice
            .script
            .interface
            .get_or_init(|| notice.link.and_then(interface));
        for order in orders(notice, interface.as_deref(), limit) {
            let about = order.about.clone();
            if let Err(error) = self.send(&Order::Run(order)) {
                let text = format!("updown: the script cannot be run: {error}");
                log(&about, 0, text);
            }
        }
    }

    fn send(&mut self, order: &Order) -> Result<(), String> {
        let mut line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        line.push('\n');
        let mut again = true;
        loop {
            let running = match &mut self.0 {
                Some(running) => running,
                none => none.insert(spawn().map_err(|error| format!("no helper: {error}"))?),
            };
            let waiting = running.waiting.fetch_add(1, Ordering::Relaxed);
            if waiting >= MAX_WAITING {
                running.waiting.fetch_sub(1, Ordering::Relaxed);
                return Err(format!("{waiting} others wait already"));
            }
            match running.orders.write_all(line.as_bytes()) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    // It has died. Whoever did that may have had a reason, but not a second one.
                    self.end(None);
                    if !std::mem::take(&mut again) {
                        return Err(error.to_string());
                    }
                }
            }
        }
    }

    /// Ends it. What is ordered may take `grace`; without that, only what runs goes on to its end.
    fn end(&mut self, grace: Option<Duration>) {
        let Some(mut running) = self.0.take() else {
            return;
        };
        if let Some(grace) = grace {
            let ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
            if let Ok(line) = serde_json::to_string(&Order::End(ms)) {
                // One that is dead already needs no order to end.
                let _ = running.orders.write_all((line + "\n").as_bytes());
            }
        }
        drop(running.orders);
        let _ = running.answers.join();
        if let Err(error) = running.process.wait() {
            tracing::warn!(%error, "the helper for updown scripts cannot be waited for");
        }
    }
}

/// Starts the helper: this program again, whatever lies at its path by now.
fn spawn() -> io::Result<Running> {
    use std::os::unix::process::CommandExt as _;

    let mut process = Command::new("/proc/self/exe")
        .arg("updown-helper")
        // Interrupts from a terminal are for the daemon, which then has scripts run still.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (Some(orders), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let waiting = Arc::new(AtomicUsize::new(0));
    let open = Arc::clone(&waiting);
    let answers = std::thread::Builder::new()
        .name("updown-log".to_owned())
        .spawn(move || read_answers(answers, &open))?;
    Ok(Running {
        process,
        orders,
        answers,
        waiting,
    })
}

fn read_answers(answers: ChildStdout, waiting: &AtomicUsize) {
    for line in BufReader::new(answers).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Answer::Ran(ran)) => {
                waiting.fetch_sub(1, Ordering::Relaxed);
                report(&ran);
            }
            Ok(Answer::Abandoned(number)) => {
                tracing::warn!(
                    number,
                    "updown scripts were cut off by the end of the daemon"
                );
            }
            Err(error) => tracing::warn!(%error, "the helper for updown scripts talks nonsense"),
        }
    }
}

fn report(ran: &Ran) {
    for line in &ran.output {
        log(&ran.about, 1, format!("updown: {line}"));
    }
    let trouble = match &ran.end {
        End::Exit(0) => {
            let text = format!("updown: the script took {} ms", ran.took_ms);
            return log(&ran.about, 2, text);
        }
        End::Exit(status) => format!("ended with status {status}"),
        End::Signal(signal) => format!("was ended by signal {signal}"),
        End::Late => format!("was killed after {} ms", ran.took_ms),
        End::Failed(error) => format!("cannot be run: {error}"),
    };
    log(&ran.about, 0, format!("updown: the script {trouble}"));
}

fn log(about: &About, level: u8, text: String) {
    crate::logging::write(&LogLine {
        group: LogGroup::Chd,
        level,
        ike_sa: Some((about.connection.clone(), about.ike_sa)),
        message: format!("{text} ({} of {})", about.verb, about.child),
    });
}

/// The scripts that a notice calls for.
fn orders(notice: &Notice, interface: Option<&str>, limit: Duration) -> Vec<Job> {
    let sa = &notice.sa;
    let connection = sa.connection.clone().unwrap_or_default();
    let remote = swanherd_config::identity::display_identity(&sa.remote_id);
    let path = std::env::var("PATH").unwrap_or_else(|_| PATH.to_owned());
    let mut orders = Vec::new();
    for child in sa.children.values() {
        let subject = env::Subject {
            up: notice.up,
            sa,
            child,
            interface,
            host_access: notice.script.host_access,
        };
        for call in env::calls(subject) {
            let mut variables = vec![("PATH".to_owned(), path.clone())];
            variables.extend(call.variables);
            orders.push(Job {
                // Of one peer, nothing overtakes anything else.
                lane: format!("{connection} {remote}"),
                about: About {
                    connection: connection.clone(),
                    ike_sa: sa.id,
                    child: child.name.clone(),
                    verb: call.verb,
                },
                command: notice.script.command.clone(),
                variables,
                limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            });
        }
    }
    orders
}

/// For scripts of a daemon that has none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The name of a link.
fn interface(link: u32) -> Option<String> {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};

    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None).ok()?;
    netdevice::index_to_name(any, link).ok()
}

#[cfg(test)]
mod tests {
    use swanherd_config::model::Connection;
    use swanherd_ike::api::{ChildSaInfo, ChildState, IkeState};
    use swanherd_ipsec::identity::IdType;
    use swanherd_ipsec::plane::Mode;
    use swanherd_ipsec::{Identity, TrafficSelector};

    use super::*;

    fn fqdn(name: &str) -> Identity {
        Identity {
            id_type: IdType::Fqdn,
            data: name.as_bytes().to_vec(),
        }
    }

    pub(super) fn ike_info() -> IkeSaInfo {
        IkeSaInfo {
            id: 3,
            connection: Some("gw".to_owned()),
            state: IkeState::Established,
            local: "192.0.2.1:4500".parse().unwrap(),
            remote: "192.0.2.2:4500".parse().unwrap(),
            local_id: fqdn("gw1.example.org"),
            remote_id: fqdn("gw2.example.org"),
            initiator: true,
            spi_i: 1,
            spi_r: 2,
            nat_local: false,
            nat_remote: false,
            nat_fake: false,
            suite: None,
            local_vips: Vec::new(),
            established: None,
            rekey_at: None,
            reauth_at: None,
            tasks_queued: Vec::new(),
            tasks_active: Vec::new(),
            tasks_passive: Vec::new(),
            wanted: Vec::new(),
            children: BTreeMap::new(),
        }
    }

    pub(super) fn child_info() -> ChildSaInfo {
        let net = |addr: [u8; 4]| TrafficSelector::network(addr.into(), 24).unwrap();
        ChildSaInfo {
            id: 7,
            name: "net".to_owned(),
            reqid: 5,
            state: ChildState::Installed,
            mode: Mode::Tunnel,
            encap: false,
            inbound: None,
            outbound: None,
            suite: None,
            if_id: (0, 0),
            mark_in: None,
            mark_out: None,
            local_ts: vec![net([10, 1, 0, 0])],
            remote_ts: vec![net([10, 2, 0, 0])],
            installed: None,
            rekey_at: None,
            expires_at: None,
        }
    }

    fn up_down(up: bool, id: ChildSaId, name: &str) -> Event {
        let child = ChildSaInfo {
            id,
            name: name.to_owned(),
            ..child_info()
        };
        Event::ChildUpDown {
            up,
            sa: Box::new(IkeSaInfo {
                children: BTreeMap::from([(id, child)]),
                ..ike_info()
            }),
        }
    }

    fn definitions(script: &str) -> BTreeMap<String, Arc<Connection>> {
        let text = format!(
            "connections {{ gw {{ children {{ net {{ updown = \"{script}\"\nhostaccess = yes }}\n\
             other {{ }} }} }} }}"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("swanctl.conf");
        std::fs::write(&file, text).unwrap();
        let loaded = swanherd_config::load_swanctl(&file).unwrap();
        loaded
            .connections
            .into_iter()
            .map(|(name, connection)| (name, Arc::new(connection.unwrap())))
            .collect()
    }

    fn scripts() -> (Scripts, mpsc::Receiver<Message>) {
        let (notices, receiver) = mpsc::channel();
        let scripts = Scripts {
            notices: Some(notices),
            ..Scripts::default()
        };
        (scripts, receiver)
    }

    fn notice(receiver: &mpsc::Receiver<Message>) -> Notice {
        match receiver.try_recv().unwrap() {
            Message::Notice(notice) => notice,
            Message::End(_) => panic!("an end"),
        }
    }

    #[test]
    fn a_child_goes_down_with_the_script_that_it_came_up_with_over_rekeyings() {
        let (mut scripts, receiver) = scripts();
        scripts.addresses(&[HostAddress {
            addr: [192, 0, 2, 1].into(),
            link: 4,
            routed: true,
        }]);
        let with = |id| Box::new(ChildSaInfo { id, ..child_info() });

        scripts.note(&up_down(true, 7, "net"), &definitions("/old"));
        scripts.note(
            &Event::ChildRekey {
                sa: Box::new(ike_info()),
                old: with(7),
                new: with(8),
            },
            &definitions("/new"),
        );
        scripts.note(&up_down(false, 8, "net"), &definitions("/new"));

        let (up, down) = (notice(&receiver), notice(&receiver));
        assert_eq!((up.up, down.up), (true, false));
        assert_eq!(up.link, Some(4));
        for notice in [up, down] {
            assert_eq!(notice.script.command, "/old");
            assert!(notice.script.host_access);
        }
        assert!(receiver.try_recv().is_err());
        assert!(scripts.up.is_empty());
    }

    #[test]
    fn children_without_a_script_and_daemons_without_scripts_order_none() {
        let (mut scripts, receiver) = scripts();
        scripts.note(&up_down(true, 7, "other"), &definitions("/x"));
        scripts.note(&up_down(false, 7, "other"), &definitions("/x"));
        scripts.note(&up_down(false, 9, "net"), &definitions("/x"));

        assert!(receiver.try_recv().is_err());
        Scripts::default().note(&up_down(true, 7, "net"), &definitions("/x"));
    }

    #[test]
    fn an_order_has_path_limit_and_the_lane_of_its_peer() {
        let (mut scripts, receiver) = scripts();
        scripts.note(&up_down(true, 7, "net"), &definitions("/x --y"));

        let orders = orders(&notice(&receiver), None, Duration::from_secs(10));

        let [order] = &orders[..] else {
            panic!("{orders:?}");
        };
        assert_eq!(order.lane, "gw gw2.example.org");
        assert_eq!(order.command, "/x --y");
        assert_eq!(order.limit_ms, 10_000);
        assert_eq!(order.variables[0].0, "PATH");
        assert!(
            order
                .variables
                .contains(&("PLUTO_INTERFACE".to_owned(), "unknown".to_owned()))
        );
    }

    #[test]
    fn the_loopback_interface_is_called_lo() {
        assert_eq!(interface(1).as_deref(), Some("lo"));
        assert_eq!(interface(u32::MAX), None);
    }
}
