// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Debian's cloud kernels, unpacked and not installed.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::packages;
use crate::shell::{Error, cache, command, quiet};

/// A kernel of a Debian release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernel {
    /// Of Debian 11
    #[value(name = "5.10")]
    V5_10,
    /// Of Debian 12
    #[value(name = "6.1")]
    V6_1,
    /// Of Debian 13
    #[value(name = "6.12")]
    V6_12,
}

impl Kernel {
    /// From the oldest to the newest.
    pub(crate) const ALL: [Self; 3] = [Self::V5_10, Self::V6_1, Self::V6_12];

    /// Its version, as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    fn release(self) -> &'static str {
        match self {
            Self::V5_10 => "bullseye",
            Self::V6_1 => "bookworm",
            Self::V6_12 => "trixie",
        }
    }

    /// The folder with `boot/` and `lib/modules/` of the kernel.
    pub(crate) fn unpacked(self) -> Result<PathBuf, Error> {
        let root = cache()?.join(format!("kernel-{}", self.name()));
        let complete = root.join("lib/modules/complete");
        if complete.exists() {
            return Ok(root);
        }
        let _ = fs::remove_dir_all(&root);
        let apt = Apt::new(self.release())?;
        apt.update()?;
        let package = apt.kernel()?;
        packages::unpack_with(&apt.options, &package, &root)?;
        // Debian's newest release has the modules below /usr.
        let modules = root.join("lib/modules");
        if !modules.is_dir() {
            fs::create_dir_all(root.join("lib"))?;
            fs::rename(root.join("usr/lib/modules"), &modules)?;
        }
        for version in fs::read_dir(&modules)?.flatten() {
            let mut depmod = command("depmod", ["-b"]);
            depmod.arg(&root).arg(version.file_name());
            quiet(depmod)?;
        }
        fs::write(complete, "")?;
        Ok(root)
    }
}

/// An apt with sources and lists of its own, for a release that this machine does not run: the
/// machine's settings, mirrors and keys, and nothing of its state.
struct Apt {
    options: Vec<String>,
}

impl Apt {
    fn new(release: &str) -> Result<Self, Error> {
        let root = cache()?.join(format!("apt-{release}"));
        for folder in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(folder))?;
        }
        fs::write(root.join("status"), "")?;
        let sources = root.join("sources.list");
        let mirror = packages::mirror()?;
        let signed = keyring().map_or_else(String::new, |path| format!("[signed-by={path}] "));
        fs::write(&sources, format!("deb {signed}{mirror} {release} main\n"))?;
        let root = root.display();
        let options = [
            format!("Dir::State={root}/state"),
            format!("Dir::State::status={root}/status"),
            format!("Dir::Cache={root}/cache"),
            format!("Dir::Etc::SourceList={}", sources.display()),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Acquire::Languages=none".to_owned(),
            // The last state of an old release stays what it is.
            "Acquire::Check-Valid-Until=false".to_owned(),
        ];
        Ok(Self {
            options: options
                .into_iter()
                .flat_map(|option| ["-o".to_owned(), option])
                .collect(),
        })
    }

    fn update(&self) -> Result<(), Error> {
        let mut update = command("apt-get", ["update", "-q"]);
        update.args(&self.options);
        quiet(update)?;
        Ok(())
    }

    /// The package that the release's package without a version depends upon.
    fn kernel(&self) -> Result<String, Error> {
        const META: &str = "linux-image-cloud-amd64";
        let mut depends = command("apt-cache", ["depends", META]);
        depends.args(&self.options);
        quiet(depends)?
            .split_whitespace()
            .find(|word| {
                word.starts_with("linux-image-")
                    && word.contains(|c: char| c.is_ascii_digit())
                    && *word != META
            })
            .map(str::to_owned)
            .ok_or_else(|| format!("apt knows no kernel for {META}").into())
    }
}

fn keyring() -> Option<&'static str> {
    ["/usr/share/keyrings/debian-archive-keyring.gpg"]
        .into_iter()
        .find(|path| Path::new(path).exists())
}
