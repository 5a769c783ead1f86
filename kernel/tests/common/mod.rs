// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Namespaces to try the planes in.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Addresses of the two hosts of a [`Lab`], outer and inner.
pub(crate) const OUTER: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
pub(crate) const INNER: [&str; 2] = ["10.1.0.1", "10.2.0.1"];

/// Whether tests that need root may run; says so where they may not.
pub(crate) fn may_use_namespaces() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: needs root for network namespaces");
    }
    root
}

/// Whether this kernel can do ESP. The kernel test group sets `SWANHERD_LAB` when it boots one
/// that can; a failure to install an SA is a failure there.
pub(crate) fn kernel_has_esp() -> bool {
    let lab = std::env::var_os("SWANHERD_LAB").is_some();
    if !lab {
        println!("SKIPPED: needs a kernel with ESP (cargo xtask test --only kernel)");
        return false;
    }
    static LOADED: Once = Once::new();
    LOADED.call_once(load_modules);
    true
}

/// The lab's kernel cannot load modules by itself: its helper runs outside the lab's root.
fn load_modules() {
    for module in [
        "veth",
        "xfrm_user",
        "esp4",
        "esp6",
        "esp4_offload",
        "esp6_offload",
        "authenc",
        "seqiv",
        "echainiv",
        "aes_generic",
        "cbc",
        "ctr",
        "gcm",
        "ccm",
        "ghash_generic",
        "hmac",
        "sha1_generic",
        "sha256_generic",
        "sha512_generic",
        "chacha_generic",
        "poly1305_generic",
        "chacha20poly1305",
        "crypto_null",
        "cmac",
        "xcbc",
        "drbg",
        "jitterentropy_rng",
        "tun",
        "sch_netem",
    ] {
        // One that is built in or absent shows in the tests that need it.
        let _ = Command::new("modprobe")
            .arg(module)
            .stderr(std::process::Stdio::null())
            .status();
    }
}

/// Two network namespaces joined by a veth pair, or one alone. Removed on drop.
pub(crate) struct Lab {
    names: Vec<String>,
}

impl Lab {
    /// One namespace with nothing but its loopback interface.
    pub(crate) fn single() -> Self {
        let lab = Self {
            names: vec![unique_name("s")],
        };
        ip(&format!("netns add {}", lab.names[0]));
        lab.ip(0, "link set lo up");
        lab
    }

    /// Two namespaces: interface `veth` with [`OUTER`], and [`INNER`] on the loopback interface.
    pub(crate) fn pair() -> Self {
        let lab = Self {
            names: vec![unique_name("a"), unique_name("b")],
        };
        for name in &lab.names {
            ip(&format!("netns add {name}"));
        }
        ip(&format!(
            "link add veth netns {} type veth peer name veth netns {}",
            lab.names[0], lab.names[1]
        ));
        for side in 0..2 {
            lab.ip(side, "link set lo up");
            lab.ip(side, &format!("addr add {}/24 dev veth", OUTER[side]));
            lab.ip(side, &format!("addr add {}/24 dev lo", INNER[side]));
            lab.ip(side, "link set veth up");
        }
        lab
    }

    /// Runs `action` with this thread in namespace `side`. Sockets that it opens stay there.
    pub(crate) async fn within<T>(&self, side: usize, action: impl Future<Output = T>) -> T {
        let home = File::open("/proc/thread-self/ns/net").unwrap();
        let there = File::open(format!("/run/netns/{}", self.names[side])).unwrap();
        enter(&there);
        let result = action.await;
        enter(&home);
        result
    }

    /// Output of `ip ARGUMENTS` in namespace `side`; panics if it fails.
    pub(crate) fn ip(&self, side: usize, arguments: &str) -> String {
        ip(&format!("-n {} {arguments}", self.names[side]))
    }

    /// Whether `count` pings from the inner address of `side` to that of the other are answered.
    pub(crate) fn ping(&self, side: usize, count: u32) -> bool {
        let target = INNER[1 - side];
        self.exec(
            side,
            &format!("ping -q -i 0.1 -c {count} -W 2 -I {} {target}", INNER[side]),
        )
    }

    /// Whether a command in namespace `side` succeeds.
    pub(crate) fn exec(&self, side: usize, command: &str) -> bool {
        Command::new("ip")
            .args(["netns", "exec", &self.names[side]])
            .args(command.split_whitespace())
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap()
            .success()
    }

    /// Starts a command in namespace `side`.
    pub(crate) fn spawn(&self, side: usize, command: &str) -> std::process::Child {
        Command::new("ip")
            .args(["netns", "exec", &self.names[side]])
            .args(command.split_whitespace())
            .spawn()
            .unwrap()
    }

    /// SAs and policies that `ip` lists in namespace `side`; per-socket policies left out.
    pub(crate) fn xfrm_entries(&self, side: usize) -> (usize, usize) {
        let count = |text: &str, marker: &str| text.matches(marker).count();
        let states = self.ip(side, "xfrm state");
        let policies = self.ip(side, "xfrm policy");
        (count(&states, "proto esp"), count(&policies, "\tdir "))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// A runtime on this thread, which is the one that changes namespaces.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

fn unique_name(side: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("xfrm-{}-{number}{side}", std::process::id())
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

#[allow(unsafe_code)]
fn enter(namespace: &File) {
    // SAFETY: setns takes a descriptor, which `namespace` keeps open, and changes this thread only.
    let result = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
