// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Debian packages that tasks need, installed when missing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::shell::{Error, command, is_root, quiet};

/// Namespaces and traffic.
pub(crate) const NETWORK: &[&str] = &["iproute2", "iputils-ping", "util-linux"];

/// strongSwan as the peer, and its tools.
pub(crate) const STRONGSWAN: &[&str] = &[
    "iperf3",
    "libcharon-extra-plugins",
    "libstrongswan-extra-plugins",
    "libstrongswan-standard-plugins",
    "strongswan-charon",
    "strongswan-pki",
    "strongswan-swanctl",
];

/// Kernels with ESP as a process.
pub(crate) const UML: &[&str] = &["busybox-static", "user-mode-linux"];

/// Kernels with ESP under an emulator.
pub(crate) const VM: &[&str] = &[
    "busybox-static",
    "kmod",
    "qemu-system-common",
    "qemu-system-x86",
    "xz-utils",
    "zstd",
];

/// Compilers for what libFuzzer and ring bring along.
pub(crate) const COMPILERS: &[&str] = &["gcc", "g++", "libc6-dev"];

/// Makes sure that packages are there: `Err` says which are not, and why they cannot be had.
pub(crate) fn install(packages: &[&str]) -> Result<(), Error> {
    let missing: Vec<&str> = packages.iter().copied().filter(|p| !installed(p)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !Path::new("/usr/bin/apt-get").exists() {
        return Err(format!("this is no Debian, and these are not installed: {list}").into());
    }
    if !is_root() {
        return Err(format!("not installed, and only root may install: {list}").into());
    }
    eprintln!("xtask: installing {list}");
    let _no_services = NoServices::new();
    let get = |args: &[&str]| {
        let mut get = command("apt-get", ["-y", "-q", "-o", "DPkg::Lock::Timeout=120"]);
        get.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        quiet(get)
    };
    let install = [&["install", "--no-install-recommends"], missing.as_slice()].concat();
    if get(&install).is_err() {
        get(&["update"])?;
        get(&install)?;
    }
    Ok(())
}

/// Whether a package is installed.
pub(crate) fn installed(package: &str) -> bool {
    quiet(command(
        "dpkg-query",
        ["-W", "-f", "${db:Status-Status}", package],
    ))
    .is_ok_and(|status| status.trim() == "installed")
}

/// While it lives, packages do not start the services they bring: we want charon's program, not
/// a running charon.
struct NoServices(bool);

const POLICY: &str = "/usr/sbin/policy-rc.d";

impl NoServices {
    fn new() -> Self {
        if Path::new(POLICY).exists() {
            return Self(false);
        }
        let made = fs::write(POLICY, "#!/bin/sh\nexit 101\n").is_ok()
            && fs::set_permissions(POLICY, fs::Permissions::from_mode(0o755)).is_ok();
        Self(made)
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.0 {
            let _ = fs::remove_file(POLICY);
        }
    }
}
