// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Debian's cloud kernels, unpacked and not installed; and a module for one of them that Debian
//! leaves out.

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

    /// netdevsim, a network device to which ESP can be offloaded, as a module for this kernel.
    /// Debian builds it for no kernel, so that it is built from Debian's sources.
    pub(crate) fn netdevsim(self) -> Result<PathBuf, Error> {
        let module = cache()?.join(format!("netdevsim-{}.ko", self.name()));
        let version = self.version()?;
        let stamp = module.with_extension("version");
        let built = fs::read_to_string(&stamp).unwrap_or_default();
        if module.exists() && built == version {
            return Ok(module);
        }
        packages::install(packages::MODULE_BUILD)?;
        let apt = Apt::new(self.release())?;
        apt.update()?;
        let folder = cache()?.join(format!("netdevsim-{}", self.name()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        let outcome = build_netdevsim(self, &version, &apt, &folder)
            .and_then(|built| Ok(fs::rename(built, &module)?));
        fs::remove_dir_all(&folder)?;
        outcome?;
        fs::write(stamp, version)?;
        Ok(module)
    }

    /// Its release, as `uname -r` prints it.
    fn version(self) -> Result<String, Error> {
        let modules = self.unpacked()?.join("lib/modules");
        fs::read_dir(&modules)?
            .flatten()
            .find(|entry| entry.path().is_dir())
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .ok_or_else(|| format!("no kernel in {}", modules.display()).into())
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

/// Builds the module in `folder`, as for any module outside of the kernel's tree: with the headers
/// of the very kernel, and the sources of the same version.
fn build_netdevsim(
    kernel: Kernel,
    version: &str,
    apt: &Apt,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let series = kernel.name();
    let headers = format!("linux-headers-{version}");
    let package_version = apt.version(&headers)?;
    let common = apt.depends(&headers, |name| {
        name.starts_with("linux-headers-") && name.ends_with("-common")
    })?;
    let tools = apt.depends(&headers, |name| name.starts_with("linux-kbuild-"))?;
    let wanted = [
        headers.clone(),
        common.clone(),
        tools,
        format!("linux-source-{series}"),
    ];
    let root = folder.join("root");
    for name in wanted {
        // Each is unpacked into a folder of its own; their files go side by side.
        let parts = folder.join("parts");
        packages::unpack_with(&apt.options, &format!("{name}={package_version}"), &parts)?;
        fs::create_dir_all(&root)?;
        let mut copy = command("cp", ["-a", "--link"]);
        copy.arg(parts.join("usr")).arg(&root);
        quiet(copy)?;
        fs::remove_dir_all(&parts)?;
    }
    let sources = root.join("usr/src");
    let driver = format!("linux-source-{series}/drivers/net/netdevsim");
    let mut unpack = command("tar", ["-x", "-J", "-f"]);
    unpack
        .arg(sources.join(format!("linux-source-{series}.tar.xz")))
        .arg("-C")
        .arg(folder)
        .arg(&driver);
    quiet(unpack)?;
    let tree = sources.join(&headers);
    // It names the place where the package would be installed.
    let include = sources.join(&common).join("Makefile");
    fs::write(
        tree.join("Makefile"),
        format!("include {}\n", include.display()),
    )?;
    let driver = folder.join(driver);
    let mut make = command("make", ["-j2", "CC=gcc", "CONFIG_NETDEVSIM=m"]);
    make.arg("-C")
        .arg(&tree)
        .arg(format!("M={}", driver.display()))
        .arg("modules");
    quiet(make)?;
    let module = driver.join("netdevsim.ko");
    let mut strip = command("strip", ["-g"]);
    strip.arg(&module);
    quiet(strip)?;
    Ok(module)
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
        self.depends(META, |name| {
            name.starts_with("linux-image-")
                && name.contains(|c: char| c.is_ascii_digit())
                && name != META
        })
    }

    /// The first package that another one depends upon and that is of some name.
    fn depends(&self, package: &str, wanted: impl Fn(&str) -> bool) -> Result<String, Error> {
        let mut depends = command("apt-cache", ["depends", package]);
        depends.args(&self.options);
        quiet(depends)?
            .split_whitespace()
            .find(|word| wanted(word))
            .map(str::to_owned)
            .ok_or_else(|| format!("apt knows nothing of the kind below {package}").into())
    }

    /// The version of a package.
    fn version(&self, package: &str) -> Result<String, Error> {
        let mut show = command("apt-cache", ["show", "--no-all-versions", package]);
        show.args(&self.options);
        quiet(show)?
            .lines()
            .find_map(|line| line.strip_prefix("Version: "))
            .map(str::to_owned)
            .ok_or_else(|| format!("apt knows no {package}").into())
    }
}

fn keyring() -> Option<&'static str> {
    ["/usr/share/keyrings/debian-archive-keyring.gpg"]
        .into_iter()
        .find(|path| Path::new(path).exists())
}
