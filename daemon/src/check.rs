// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `swanherd check`: reads definitions and settings as `run` would, and says what is wrong.

mod examine;

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;
use swanherd_config::load::{self, CheckReport};
use swanherd_config::settings::Settings;
use swanherd_config::{Diagnostic, load_swanctl};

use crate::cli::Check;
use crate::client::{put, say};
use crate::{metrics, paths, vici};

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    definitions: CheckReport,
    settings: SettingsReport,
}

#[derive(Serialize)]
struct SettingsReport {
    ok: bool,
    file: String,
    diagnostics: Vec<swanherd_config::diagnostic::Report>,
}

/// See the module's text.
pub(crate) fn check(args: &Check) -> ExitCode {
    let path = definitions(args.path.clone());
    let loaded = load_swanctl(&path);
    let settings_path = paths::settings_file(None);
    let settings = paths::load_settings(&settings_path);
    let (settings_ok, found) = judge(settings);
    let findings = loaded.as_ref().map(examine::examine).unwrap_or_default();
    let report = load::report(&loaded, &findings);
    let ok = report.ok && settings_ok;
    if args.json {
        let report = Report {
            definitions: report,
            settings: SettingsReport {
                ok: settings_ok,
                file: settings_path.display().to_string(),
                diagnostics: found.iter().map(Diagnostic::to_report).collect(),
            },
        };
        match serde_json::to_string_pretty(&report) {
            Ok(text) => put(&(text + "\n")),
            Err(error) => say(&format!("cannot print the report: {error}")),
        }
    } else {
        let colour = crate::client::style::colours();
        for diagnostic in &found {
            put(&diagnostic.render(colour));
        }
        put(&load::render(&loaded, &findings, colour));
    }
    ExitCode::from(u8::from(!ok))
}

/// Whether the daemon would start with the settings, and what there is to say about them.
fn judge(settings: Result<(Settings, Vec<Diagnostic>), Diagnostic>) -> (bool, Vec<Diagnostic>) {
    match settings {
        Ok((settings, mut found)) => {
            // The daemon starts all the same, for tunnels matter more than who looks at them from
            // elsewhere; but whoever asks wants to know.
            let before = found.len();
            for (path, checked) in [
                ("swanherd.metrics", metrics::check(&settings)),
                ("swanherd.vici", vici::check(&settings)),
            ] {
                if let Err(error) = checked {
                    found.push(Diagnostic::error("unreadable", error).path(path));
                }
            }
            (found.len() == before, found)
        }
        Err(error) => (false, vec![error]),
    }
}

/// The file that a path given by the operator means.
fn definitions(path: Option<PathBuf>) -> PathBuf {
    match path {
        Some(path) if path.is_dir() => path.join("swanctl.conf"),
        Some(path) => path,
        None => paths::definitions_file(None),
    }
}
