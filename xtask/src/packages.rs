// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Debian packages that tasks need, installed when missing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::shell::{Error, command, is_root, quiet};

/// Namespaces and traffic.
pub(crate) const NETWORK: &[&str] = &[
    "iproute2",
    "iptables",
    "iputils-ping",
    "procps",
    "util-linux",
];

/// strongSwan as the peer, and its tools.
pub(crate) const STRONGSWAN: &[&str] = &[
    "iperf3",
    "libcharon-extra-plugins",
    "libstrongswan-extra-plugins",
    "libstrongswan-standard-plugins",
    // Names of protocols and services.
    "netbase",
    "strongswan-charon",
    "strongswan-pki",
    "strongswan-swanctl",
];

/// What a tree of another release needs for its charon to run.
pub(crate) const CHARON: &[&str] = &[
    "libcharon-extra-plugins",
    "libstrongswan-extra-plugins",
    "libstrongswan-standard-plugins",
    // Names of protocols and services.
    "netbase",
    "strongswan-charon",
    "strongswan-swanctl",
];

/// Makes trees of other releases.
pub(crate) const DEBOOTSTRAP: &[&str] = &["debootstrap", "debian-archive-keyring"];

/// IKE daemons of other makes that cannot be installed beside strongSwan, and are unpacked instead.
pub(crate) const PEERS: &[&str] = &["libreswan", "openiked"];

/// What [`PEERS`] are linked with, and their tools.
pub(crate) const PEER_LIBRARIES: &[&str] = &[
    "iptables",
    "libcurl3-nss",
    "libevent-2.1-7",
    "libevent-core-2.1-7",
    "libevent-pthreads-2.1-7",
    "libldns3",
    "libnss3-tools",
    "libunbound8",
    "openssl",
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

/// What a kernel module is built with; the kernel's own tools are linked with libelf.
pub(crate) const MODULE_BUILD: &[&str] = &["binutils", "gcc", "libelf1", "make", "xz-utils"];

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

/// Unpacks a package into a folder, without installing it; a folder that is there already stays.
pub(crate) fn unpack(package: &str, folder: &Path) -> Result<(), Error> {
    unpack_with(&[], package, folder)
}

/// As [`unpack`], with options for `apt-get`.
pub(crate) fn unpack_with(options: &[String], package: &str, folder: &Path) -> Result<(), Error> {
    if folder.is_dir() {
        return Ok(());
    }
    eprintln!("xtask: unpacking {package}");
    let parts = folder.with_extension("part");
    let _ = fs::remove_dir_all(&parts);
    fs::create_dir_all(&parts)?;
    let download = || {
        let mut download = command("apt-get", ["download", "-q"]);
        download.args(options).arg(package).current_dir(&parts);
        quiet(download)
    };
    if download().is_err() {
        let mut update = command("apt-get", ["update", "-q"]);
        update.args(options);
        quiet(update)?;
        download()?;
    }
    let archive = fs::read_dir(&parts)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .ok_or("apt-get download left no package")?;
    let mut unpack = command("dpkg-deb", ["-x"]);
    unpack.arg(&archive).arg(&parts);
    quiet(unpack)?;
    fs::remove_file(archive)?;
    fs::rename(&parts, folder)?;
    Ok(())
}

/// Makes a tree of another release of Debian with some packages; one that is there already stays.
pub(crate) fn bootstrap(release: &str, packages: &[&str], folder: &Path) -> Result<(), Error> {
    if folder.is_dir() {
        return Ok(());
    }
    eprintln!("xtask: debootstrap of {release}");
    let parts = folder.with_extension("part");
    let _ = fs::remove_dir_all(&parts);
    fs::create_dir_all(&parts)?;
    let mut bootstrap = command("debootstrap", ["--variant=minbase"]);
    bootstrap
        .arg(format!("--include={}", packages.join(",")))
        .arg(release)
        .arg(&parts)
        .arg(mirror()?);
    quiet(bootstrap)?;
    fs::rename(&parts, folder)?;
    Ok(())
}

/// The mirror that this machine gets Debian itself from.
pub(crate) fn mirror() -> Result<String, Error> {
    let format = "$(REPO_URI) $(RELEASE) $(COMPONENT)";
    let targets = quiet(command(
        "apt-get",
        ["indextargets", "--format", format, "Created-By: Packages"],
    ))?;
    targets
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (uri, release, component) = (words.next()?, words.next()?, words.next()?);
            // Security updates and the like come from other places, or lack most packages.
            (component == "main" && !release.contains('-')).then(|| uri.to_owned())
        })
        .next()
        .ok_or_else(|| "apt has no source of Debian's main component".into())
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
