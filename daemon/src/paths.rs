// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which files and sockets the daemon and its tools use, by the same rules as strongSwan's.

use std::path::{Path, PathBuf};

use swanherd_config::Diagnostic;
use swanherd_config::settings::{self, Settings};

/// The settings file: as given, else `STRONGSWAN_CONF`, else the default.
pub(crate) fn settings_file(given: Option<PathBuf>) -> PathBuf {
    given.unwrap_or_else(|| settings::strongswan_conf(std::env::var_os("STRONGSWAN_CONF")))
}

/// The definitions: as given, else in `SWANCTL_DIR`, else the default.
pub(crate) fn definitions_file(given: Option<PathBuf>) -> PathBuf {
    given.unwrap_or_else(|| settings::swanctl_conf(std::env::var_os("SWANCTL_DIR")))
}

/// Settings and warnings. The default file may be absent: then everything has its default.
///
/// # Errors
/// If the file cannot be read or is wrong.
pub(crate) fn load_settings(path: &Path) -> Result<(Settings, Vec<Diagnostic>), Diagnostic> {
    settings::load_settings(path)
}

/// Where the xfrm plane keeps what is needed to recognise what is ours.
pub(crate) fn ledger(settings: &Settings) -> PathBuf {
    settings.run_dir.join("xfrm.ledger")
}

/// Where the tools look for a daemon.
pub(crate) fn default_vici_uri() -> String {
    match load_settings(&settings_file(None)) {
        Ok((settings, _)) => settings.vici_socket,
        Err(_) => swanherd_vici::client::DEFAULT_URI.to_owned(),
    }
}
