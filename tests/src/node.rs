// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One IKE daemon in a namespace.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::lab::{Lab, Namespace};
use crate::process::{Output, run_command};
use crate::vici::{Message, Vici};

/// Whose daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Daemon {
    /// Ours.
    Swanherd,
    /// strongSwan's.
    Charon,
}

/// Who encrypts the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// The daemon, with a TUN device (charon's plugin kernel-libipsec).
    User,
    /// The kernel.
    Kernel,
    /// The daemon's choice; for charon, that of [`Plane::User`].
    Auto,
}

/// A daemon, its namespace and its files.
#[derive(Debug)]
pub struct Node {
    /// Where it runs.
    pub namespace: Namespace,
    /// Which daemon it is.
    pub daemon: Daemon,
    dir: PathBuf,
    binary: Option<PathBuf>,
    record: bool,
    child: Option<Child>,
    resolver: bool,
}

/// What `swanctl` looks into; it complains about each that is missing.
const FOLDERS: [&str; 14] = [
    "bliss", "conf.d", "ecdsa", "pkcs12", "pkcs8", "private", "pubkey", "rsa", "x509", "x509aa",
    "x509ac", "x509ca", "x509crl", "x509ocsp",
];

/// The daemon under test: what `SWANHERD_BIN` names, or the one beside the running test.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn swanherd_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("SWANHERD_BIN") {
        return path.into();
    }
    let own = std::env::current_exe().expect("the path of the running program");
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("swanherd"))
        .find(|path| path.is_file())
        .expect("the daemon is built: `cargo build -p swanherd`, or set SWANHERD_BIN")
}

impl Node {
    /// Writes the settings for a daemon; `settings` is added to the section `charon`, whichever
    /// daemon it is.
    ///
    /// # Panics
    /// When files cannot be written.
    #[must_use]
    pub fn new(
        lab: &Lab,
        namespace: &Namespace,
        daemon: Daemon,
        plane: Plane,
        settings: &str,
    ) -> Self {
        let dir = lab.dir().join(namespace.name());
        for folder in FOLDERS {
            fs::create_dir_all(dir.join("swanctl").join(folder)).expect("a folder for the node");
        }
        let path = dir.display();
        let own = match (daemon, plane) {
            (Daemon::Charon, _) => None,
            (Daemon::Swanherd, Plane::User) => Some("tun"),
            (Daemon::Swanherd, Plane::Kernel) => Some("xfrm"),
            (Daemon::Swanherd, Plane::Auto) => Some("auto"),
        }
        .map(|plane| format!("swanherd {{\n  dataplane = {plane}\n  run_dir = {path}/run\n}}\n"))
        .unwrap_or_default();
        let libipsec = if plane != Plane::Kernel {
            "kernel-libipsec"
        } else {
            ""
        };
        let plugins = match daemon {
            Daemon::Swanherd => String::new(),
            Daemon::Charon => format!(
                "  load = random nonce openssl curve25519 kdf pem pkcs1 pkcs8 pubkey x509 \
                 constraints hmac sha1 sha2 aes gcm gmp {libipsec} kernel-netlink socket-default \
                 counters updown vici\n"
            ),
        };
        let marks = match (daemon, plane) {
            // Packets that the daemon itself has sealed must not take the route into the tunnel.
            (Daemon::Charon, Plane::User | Plane::Auto) => {
                "    kernel-libipsec {\n      allow_peer_ts = yes\n    }\n    \
                 kernel-netlink {\n      fwmark = !0x42\n    }\n    \
                 socket-default {\n      fwmark = 0x42\n    }\n"
            }
            (Daemon::Charon, Plane::Kernel) | (Daemon::Swanherd, _) => "",
        };
        // What ours logs unasked.
        let times = match daemon {
            Daemon::Swanherd => "",
            Daemon::Charon => {
                "      time_format = %FT%T\n      time_add_ms = yes\n      ike_name = yes\n"
            }
        };
        let conf = format!(
            "charon {{\n{plugins}{settings}\n  filelog {{\n    log {{\n      path = {path}/log\n      \
             default = 1\n      flush_line = yes\n{times}    }}\n  }}\n  plugins {{\n    vici {{\n      \
             socket = unix://{path}/vici\n    }}\n{marks}  }}\n}}\n{own}swanctl {{\n  \
             load = openssl pem pkcs1 pkcs8 pubkey x509 random nonce\n  socket = unix://{path}/vici\n}}\n",
        );
        fs::write(dir.join("strongswan.conf"), conf).expect("settings can be written");
        Self {
            namespace: namespace.clone(),
            daemon,
            dir,
            binary: None,
            record: false,
            child: None,
            resolver: false,
        }
    }

    /// Writes its `swanctl.conf`.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn configure(&self, swanctl_conf: &str) {
        fs::write(self.swanctl_dir().join("swanctl.conf"), swanctl_conf)
            .expect("definitions can be written");
    }

    /// Lets the daemon ask this server for names, and no other, from its next start on.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn set_resolver(&mut self, server: &str) {
        fs::write(
            self.dir.join("resolv.conf"),
            format!("nameserver {server}\n"),
        )
        .expect("a file for the resolver");
        self.resolver = true;
    }

    /// Runs another build of swanherd than [`swanherd_binary`].
    pub fn set_binary(&mut self, path: &Path) {
        self.binary = Some(path.to_owned());
    }

    /// Has swanherd record what it does from its next start on.
    pub fn set_record(&mut self, record: bool) {
        self.record = record;
    }

    /// The recording of its last run.
    #[must_use]
    pub fn recording(&self) -> PathBuf {
        self.dir.join("recording")
    }

    /// Its `strongswan.conf`.
    #[must_use]
    pub fn settings(&self) -> PathBuf {
        self.dir.join("strongswan.conf")
    }

    /// The build of swanherd that it runs.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn binary(&self) -> PathBuf {
        self.binary.clone().unwrap_or_else(swanherd_binary)
    }

    /// Its `/etc/swanctl`.
    #[must_use]
    pub fn swanctl_dir(&self) -> PathBuf {
        self.dir.join("swanctl")
    }

    /// Its VICI socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.join("vici")
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Starts it and waits until it answers over VICI.
    ///
    /// # Panics
    /// When it does not within 20 s.
    pub fn start(&mut self) {
        self.spawn();
        self.await_ready();
    }

    /// Starts it; [`Node::await_ready`] has to follow.
    ///
    /// # Panics
    /// When the program cannot be started.
    pub fn spawn(&mut self) {
        let _ = fs::remove_file(self.socket());
        let out = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("out"))
            .expect("a file for what the daemon prints");
        let err = out.try_clone().expect("a second handle of it");
        // Should this process be killed, the kernel ends the daemon. charon's file with its
        // process id has a fixed name, so that each needs a /run of its own.
        let mut command = self.namespace.command("setpriv");
        let resolver = if self.resolver {
            format!(
                "mount --bind '{}/resolv.conf' /etc/resolv.conf && ",
                self.dir.display()
            )
        } else {
            String::new()
        };
        let daemon = match self.daemon {
            Daemon::Charon => charon(),
            Daemon::Swanherd if self.record => format!(
                "exec '{}' run --record '{}'",
                self.binary().display(),
                self.recording().display()
            ),
            Daemon::Swanherd => format!("exec '{}' run", self.binary().display()),
        };
        command
            .args(["--pdeathsig", "KILL", "sh", "-c"])
            .arg(resolver + &daemon);
        self.child = Some(
            self.environment(&mut command)
                .stdin(Stdio::null())
                .stdout(out)
                .stderr(err)
                .spawn()
                .expect("the daemon can be started"),
        );
    }

    /// Waits until it answers over VICI.
    ///
    /// # Panics
    /// When it does not within 20 s, or ends.
    pub fn await_ready(&mut self) {
        let begun = Instant::now();
        loop {
            let answer = Vici::connect(&self.socket())
                .and_then(|mut vici| vici.request("version", &Message::default()));
            if answer.is_ok() {
                return;
            }
            let ended = self
                .child
                .as_mut()
                .is_none_or(|c| !matches!(c.try_wait(), Ok(None)));
            assert!(
                !ended && begun.elapsed() < patience(20),
                "{} does not answer over VICI\n{}",
                self.namespace.name(),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Asks it to end (SIGTERM), and waits.
    ///
    /// # Panics
    /// When it has not ended after 20 s.
    pub fn stop(&mut self) {
        assert!(
            self.signal_and_wait(Signal::TERM, patience(20)),
            "{} goes on after SIGTERM\n{}",
            self.namespace.name(),
            self.log()
        );
    }

    /// Ends it without a chance to say goodbye (SIGKILL).
    pub fn kill(&mut self) {
        self.signal_and_wait(Signal::KILL, Duration::from_secs(5));
    }

    /// Asks it to read its files again (SIGHUP).
    pub fn reload(&self) {
        let pid = self
            .pid()
            .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::HUP);
        }
    }

    fn signal_and_wait(&mut self, signal: Signal, limit: Duration) -> bool {
        let Some(mut child) = self.child.take() else {
            return true;
        };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
        let begun = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if begun.elapsed() > limit {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Runs the stock `swanctl` against it.
    #[must_use]
    pub fn swanctl(&self, args: &[&str]) -> Output {
        self.tool("swanctl", args, Duration::from_secs(60))
    }

    /// Runs `swanherd` with another subcommand, with the environment of this node.
    #[must_use]
    pub fn swanherd(&self, args: &[&str]) -> Output {
        let program = self.binary();
        self.tool(&program.to_string_lossy(), args, Duration::from_secs(60))
    }

    /// Runs any tool with the environment of this node, outside its namespace.
    #[must_use]
    pub fn tool(&self, program: &str, args: &[&str], limit: Duration) -> Output {
        let mut command = Command::new(program);
        command.args(args);
        self.environment(&mut command);
        run_command(command, limit)
    }

    fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("STRONGSWAN_CONF", self.dir.join("strongswan.conf"))
            .env("SWANCTL_DIR", self.swanctl_dir())
            .env("LC_ALL", "C.UTF-8")
            .env_remove("NOTIFY_SOCKET")
    }

    /// Loads its definitions with `swanctl --load-all`.
    ///
    /// # Panics
    /// When it fails.
    pub fn load(&self) {
        let _ = self.swanctl(&["--load-all", "--noprompt"]).expect_ok();
    }

    /// Initiates a child and waits for it.
    ///
    /// # Panics
    /// When it is not up within 20 s.
    pub fn initiate(&self, child: &str) {
        let output = self.swanctl(&["--initiate", "--child", child, "--timeout", "20"]);
        assert!(
            output.ok(),
            "{output}\n--- {}\n{}",
            self.namespace.name(),
            self.log()
        );
    }

    /// Its VICI server.
    ///
    /// # Panics
    /// When nothing listens.
    #[must_use]
    pub fn vici(&self) -> Vici {
        Vici::connect(&self.socket()).expect("the daemon listens")
    }

    /// Its IKE SAs, each as (name of the connection, keys).
    ///
    /// # Panics
    /// When the daemon does not answer.
    #[must_use]
    pub fn sas(&self) -> Vec<(String, Message)> {
        self.vici().list_sas().expect("list-sas is answered")
    }

    /// The child SAs with a state, of all IKE SAs.
    ///
    /// # Panics
    /// When the daemon does not answer.
    #[must_use]
    pub fn children(&self, state: &str) -> Vec<Message> {
        self.sas()
            .iter()
            .flat_map(|(_, ike)| ike.sections("child-sas"))
            .filter(|(_, child)| child.text("state") == state)
            .map(|(_, child)| child.clone())
            .collect()
    }

    /// What it has logged and printed.
    #[must_use]
    pub fn log(&self) -> String {
        ["log", "out"]
            .map(|file| tail(&self.dir.join(file)))
            .join("--- printed\n")
    }

    /// All that it has logged.
    #[must_use]
    pub fn whole_log(&self) -> String {
        fs::read(self.dir.join("log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until something holds.
    ///
    /// # Panics
    /// When it does not within `seconds`; shows the log.
    pub fn wait_until(&self, what: &str, seconds: u64, mut holds: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(
                begun.elapsed() < patience(seconds),
                "{}: not within {seconds} s: {what}\n{:?}\n{}",
                self.namespace.name(),
                self.vici().list_sas(),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let limit = Duration::from_secs(if std::thread::panicking() { 1 } else { 5 });
        self.signal_and_wait(Signal::TERM, limit);
    }
}

/// What starts charon: the one that is installed, or the one in a tree of another release of
/// Debian, which `SWANHERD_CHARON_ROOT` names. That one sees this machine's `/tmp`.
fn charon() -> String {
    let run = "exec /usr/lib/ipsec/charon";
    match std::env::var("SWANHERD_CHARON_ROOT") {
        Err(_) => format!("mount -t tmpfs run /run && {run}"),
        Ok(root) => format!(
            "cd '{root}' && mount -t tmpfs run run && mount --rbind /tmp tmp && \
             mount --rbind /proc proc && mount --rbind /dev dev && \
             exec chroot . sh -c '{run}'"
        ),
    }
}

/// A limit of time, which is longer where programs are emulated.
fn patience(seconds: u64) -> Duration {
    let emulated = std::env::var_os("SWANHERD_LAB").is_some_and(|lab| lab == "vm");
    Duration::from_secs(if emulated { 3 * seconds } else { seconds })
}

pub(crate) fn tail(path: &Path) -> String {
    let text = fs::read(path)
        .map(|b| String::from_utf8_lossy(&b).into_owned())
        .unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(120)..].join("\n") + "\n"
}
