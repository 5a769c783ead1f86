// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A static daemon for MIPS routers (mt7621 and its like), from packages of Debian and Python only.
//!
//! No distribution carries Rust's standard library for `mipsel-unknown-linux-musl`, so it is built
//! too: Debian's `rustc-web` is recent and comes with its source, and `ziglang` brings a C compiler,
//! a linker and musl for soft-float MIPS.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Parser;

use crate::groups::executables;
use crate::shell::{Error, cache, command, is_root, quiet, stream, target, workspace};
use crate::{packages, shell};

const TARGET: &str = "mipsel-unknown-linux-musl";
const EMULATOR: &str = "qemu-mipsel-static";
/// What is in small routers: MIPS32r2 without FPU.
const CPU: &str = "24Kc";

/// `cargo xtask mips`
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Build only
    #[arg(long)]
    no_run: bool,
}

/// Builds, and runs `swanherd check` and a handshake under emulation.
pub(crate) fn mips(args: &Args) -> Result<u8, Error> {
    if args.no_run {
        let built = build()?;
        println!("{}", built.daemon.display());
        return Ok(0);
    }
    let mut failed = false;
    for (what, outcome) in checks()? {
        match outcome {
            Ok(()) => println!("{what}: ok"),
            Err(error) => {
                println!("{what}: {error}");
                failed = true;
            }
        }
    }
    Ok(u8::from(failed))
}

/// What was checked, and what came of it.
pub(crate) type Check = (String, Result<(), Error>);

/// The checks of the group `mips`.
pub(crate) fn checks() -> Result<Vec<Check>, Error> {
    let built = build()?;
    let sample = cache()?.join("mips-sample");
    fs::create_dir_all(&sample)?;
    fs::write(sample.join("swanctl.conf"), SAMPLE)?;
    let size = fs::metadata(&built.daemon)?.len();
    eprintln!("xtask: {} has {} KiB", built.daemon.display(), size / 1024);
    Ok(vec![
        (
            "the binary is static MIPS32 without FPU".into(),
            is_static_mips(&built.daemon),
        ),
        (
            "swanherd --version".into(),
            emulate(&built.daemon, &["--version".as_ref()]),
        ),
        (
            "swanherd check".into(),
            emulate(
                &built.daemon,
                &["check".as_ref(), sample.join("swanctl.conf").as_path()],
            ),
        ),
        (
            "two endpoints shake hands".into(),
            emulate(&built.loopback, &[]),
        ),
    ])
}

struct Built {
    daemon: PathBuf,
    loopback: PathBuf,
}

fn build() -> Result<Built, Error> {
    if !is_root() {
        return Err("the cross tools come from Debian packages: run as root".into());
    }
    packages::install(&[
        "cargo-web",
        "python3",
        "python3-venv",
        "qemu-user-static",
        "rust-web-src",
        "rustc-web",
    ])?;
    let tools = zig()?;
    let upper = TARGET.to_uppercase().replace('-', "_");
    let under = TARGET.replace('-', "_");
    let mut build = command(
        "/usr/bin/cargo",
        [
            "build",
            "-Zbuild-std=std,panic_abort",
            "--target",
            TARGET,
            "--profile",
            "small",
        ],
    );
    build
        .args([
            "-p",
            "swanherd",
            "-p",
            "swanherd-ike",
            "--bin",
            "swanherd",
            "--example",
            "loopback",
        ])
        .args([
            "--locked",
            "--message-format",
            "json-render-diagnostics",
            "--target-dir",
        ])
        .arg(target().join("mips"))
        .current_dir(workspace())
        .env("RUSTC", "/usr/bin/rustc")
        .env("RUSTC_BOOTSTRAP", "1")
        .env_remove("RUSTUP_TOOLCHAIN")
        .env(format!("CARGO_TARGET_{upper}_LINKER"), &tools.compiler)
        .env(format!("CC_{under}"), &tools.compiler)
        .env(format!("AR_{under}"), &tools.archiver)
        .env(
            format!("CARGO_TARGET_{upper}_RUSTFLAGS"),
            "-C link-self-contained=no -C target-feature=+crt-static -C relocation-model=static",
        );
    // What the cargo that runs us has set would send Debian's to the wrong compiler.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") || text == "CARGO"
        {
            build.env_remove(&name);
        }
    }
    eprintln!("xtask: building the standard library and the daemon for {TARGET}");
    let built = executables(&shell::build(build)?);
    let find = |name: &str| {
        built
            .iter()
            .find(|(target, _)| target == name)
            .map(|(_, path)| path.clone())
            .ok_or_else(|| Error::from(format!("cargo built no {name}")))
    };
    Ok(Built {
        daemon: find("swanherd")?,
        loopback: find("loopback")?,
    })
}

struct Tools {
    compiler: PathBuf,
    archiver: PathBuf,
}

/// Zig as a C compiler, linker and archiver, behind scripts that drop what it does not understand.
fn zig() -> Result<Tools, Error> {
    let folder = cache()?.join("zig");
    let python = folder.join("bin/python");
    let works = || {
        let mut check = Command::new(&python);
        check.args(["-m", "ziglang", "version"]);
        quiet(check).is_ok()
    };
    if !works() {
        let mut venv = command("/usr/bin/python3", ["-m", "venv", "--clear"]);
        venv.arg(&folder);
        quiet(venv)?;
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "ziglang==0.17.1"]);
        quiet(install)?;
    }
    let python = python.display();
    let tools = Tools {
        compiler: folder.join("zcc"),
        archiver: folder.join("zar"),
    };
    script(
        &tools.compiler,
        &format!(
            r#"args=()
for arg in "$@"; do
  case $arg in
  --target=* | -march=* | -mabi=*) ;;
  *) args+=("$arg") ;;
  esac
done
exec '{python}' -m ziglang cc -target mipsel-linux-musleabi -mcpu=mips32r2+soft_float "${{args[@]}}"
"#
        ),
    )?;
    script(
        &tools.archiver,
        &format!("exec '{python}' -m ziglang ar \"$@\"\n"),
    )?;
    Ok(tools)
}

fn script(path: &Path, body: &str) -> Result<(), Error> {
    fs::write(path, format!("#!/bin/bash\n{body}"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// ELF of 32 bits, little endian, for MIPS, soft float, and without an interpreter.
fn is_static_mips(path: &Path) -> Result<(), Error> {
    let elf = fs::read(path)?;
    if !elf.starts_with(b"\x7fELF\x01\x01") || elf.get(18..20) != Some(&[8, 0]) {
        return Err("not a little-endian 32-bit ELF for MIPS".into());
    }
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(elf.get(at..at + 4)?.try_into().ok()?))
    };
    let half = |at: usize| -> Option<usize> {
        Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?).into())
    };
    let (Some(table), Some(size), Some(count)) = (word(28), half(42), half(44)) else {
        return Err("cut short".into());
    };
    const INTERPRETER: u32 = 3;
    for index in 0..count {
        if word(table as usize + index * size) == Some(INTERPRETER) {
            return Err("needs an interpreter: it is not static".into());
        }
    }
    Ok(())
}

fn emulate(binary: &Path, args: &[&Path]) -> Result<(), Error> {
    let mut run = command(EMULATOR, ["-cpu", CPU]);
    run.arg(binary).args(args);
    let ended = stream(run, Duration::from_secs(120), |_| ())?;
    if ended.ok() {
        Ok(())
    } else {
        Err(format!("ended with status {}", ended.status).into())
    }
}

const SAMPLE: &str = r#"connections {
  branch {
    version = 2
    local_addrs = 192.0.2.1
    remote_addrs = 198.51.100.7
    proposals = aes256-sha256-modp2048, aes128gcm16-prfsha256-x25519
    local {
      auth = psk
      id = router.example.org
    }
    remote {
      auth = psk
      id = gateway.example.org
    }
    children {
      net {
        local_ts = 10.1.0.0/24
        remote_ts = 10.2.0.0/16
        esp_proposals = aes128gcm16
        start_action = start
      }
    }
  }
}
secrets {
  ike-branch {
    id = gateway.example.org
    secret = "not a secret, but a sample"
  }
}
"#;
