// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Namespaces and links, and their certain end.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::process::{Output, run, run_command, run_ok};

const PREFIX: &str = "swh";

static LABS: AtomicU32 = AtomicU32::new(0);

/// A set of namespaces and a folder, which exist as long as this value.
#[derive(Debug)]
pub struct Lab {
    id: String,
    dir: PathBuf,
    namespaces: Vec<Namespace>,
    keep: bool,
}

/// A network namespace of a [`Lab`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace(String);

impl Lab {
    /// An empty lab, with a folder for its files.
    ///
    /// # Panics
    /// When the caller is not root, or the folder cannot be made.
    #[must_use]
    pub fn new() -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "network namespaces need root"
        );
        sweep();
        let id = format!(
            "{PREFIX}{}x{}",
            std::process::id(),
            LABS.fetch_add(1, Ordering::Relaxed)
        );
        let dir = std::env::temp_dir().join(&id);
        fs::create_dir_all(&dir).expect("a folder for the lab");
        Self {
            id,
            dir,
            namespaces: Vec::new(),
            keep: false,
        }
    }

    /// Adds a namespace; `name` is short, for people who look with `ip netns`.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn namespace(&mut self, name: &str) -> Namespace {
        let namespace = Namespace(format!("{}-{name}", self.id));
        run_ok("ip", ["netns", "add", &namespace.0]);
        self.namespaces.push(namespace.clone());
        namespace.ip("link set lo up");
        namespace
    }

    /// Joins two namespaces by a pair of virtual Ethernet devices with the given addresses
    /// (with prefix length); the device has the name `dev` at both ends.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn link(&self, a: (&Namespace, &str, &str), b: (&Namespace, &str, &str)) {
        run_ok(
            "ip",
            [
                "link", "add", a.1, "netns", &a.0.0, "type", "veth", "peer", "name", b.1, "netns",
                &b.0.0,
            ],
        );
        for (namespace, dev, address) in [a, b] {
            if !address.is_empty() {
                namespace.ip(&format!("addr add {address} dev {dev}"));
            }
            // Without link-local addresses, whose coming up makes peers send updates at odd moments.
            namespace.ip(&format!("link set {dev} addrgenmode none"));
            namespace.ip(&format!("link set {dev} up"));
        }
    }

    /// The lab's folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Leaves the folder behind when the lab ends.
    pub fn keep_files(&mut self) {
        self.keep = true;
    }
}

impl Default for Lab {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            run("ip", ["netns", "del", &namespace.0]);
        }
        if self.keep || (std::thread::panicking() && std::env::var_os("SWANHERD_KEEP").is_some()) {
            eprintln!("files are left in {}", self.dir.display());
        } else {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

impl Namespace {
    /// Its name, for `ip netns exec`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Runs `ip` in it, with arguments separated by spaces.
    ///
    /// # Panics
    /// When `ip` fails.
    pub fn ip(&self, args: &str) -> String {
        run_ok(
            "ip",
            ["-n", &self.0].into_iter().chain(args.split_whitespace()),
        )
    }

    /// A command that will run in it.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]);
        command
    }

    /// Runs a command in it and waits, for a minute at the most.
    pub fn run<S: AsRef<OsStr>>(&self, program: &str, args: impl IntoIterator<Item = S>) -> Output {
        let mut command = self.command(program);
        command.args(args);
        run_command(command, Duration::from_secs(60))
    }

    /// Runs `work` on a thread that has entered the namespace: sockets made there belong to it,
    /// wherever they are used afterwards.
    ///
    /// # Panics
    /// When the namespace cannot be entered, or when `work` does.
    pub fn enter<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let path = Path::new("/run/netns").join(&self.0);
        let entered = std::thread::spawn(move || {
            let file = fs::File::open(&path).expect("the namespace exists");
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .expect("root may enter it");
            work()
        });
        entered
            .join()
            .unwrap_or_else(|e| std::panic::resume_unwind(e))
    }
}

/// Removes what labs of processes that no longer exist have left, after a `kill -9` for example.
pub fn sweep() {
    for name in left_behind(Path::new("/run/netns")) {
        run("ip", ["netns", "del", &name]);
    }
    let folder = std::env::temp_dir();
    for name in left_behind(&folder) {
        if std::env::var_os("SWANHERD_KEEP").is_none() {
            let _ = fs::remove_dir_all(folder.join(name.split('-').next().unwrap_or(&name)));
        }
    }
}

fn left_behind(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| {
            name.strip_prefix(PREFIX)
                .and_then(|rest| rest.split_once('x'))
                .and_then(|(pid, _)| pid.parse::<u32>().ok())
                .is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
        })
        .collect()
}
