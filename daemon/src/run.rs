// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `swanherd run`: puts the daemon together, announces it, and takes it apart again.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use swanherd_config::settings::Settings;
use swanherd_ike::crypto::Provider;
use swanherd_ike::endpoint::Endpoint;
use swanherd_ike::record::Recorded;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::cli::Run;
use crate::client::say;
use crate::control::Control;
use crate::engine::{DATAGRAM_QUEUE, Engine, Parts};
use crate::loader::Loader;
use crate::recording::Recording;
use crate::{logging, metrics, paths, plane, updown, vici};

/// Something of this host prevents the daemon from running.
const CANNOT_RUN: u8 = 1;
/// `EX_CONFIG`: the settings or definitions are wrong.
const WRONG_CONFIGURATION: u8 = 78;

/// How long the last scripts of children may take, together.
const SCRIPTS_GRACE: Duration = Duration::from_secs(2);

/// See the module's text.
pub(crate) async fn run(args: Run) -> ExitCode {
    let settings_file = paths::settings_file(args.settings);
    let (settings, warnings) = match paths::load_settings(&settings_file) {
        Ok(loaded) => loaded,
        Err(error) => {
            say(error.render(false).trim_end());
            return ExitCode::from(WRONG_CONFIGURATION);
        }
    };
    let _flusher = logging::start(settings.log.format);
    logging::configure(settings.filelogs.clone());
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        settings = %settings_file.display(),
        "swanherd starts"
    );
    for warning in warnings {
        tracing::warn!("{}", warning.line());
    }
    let definitions = paths::definitions_file(args.config.or_else(|| settings.config.clone()));
    let record = args
        .record
        .map(|path| (path, u64::from(args.record_limit) * 1024 * 1024));
    match serve(&settings, settings_file, definitions, record).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            say(&error);
            ExitCode::from(CANNOT_RUN)
        }
    }
}

async fn serve(
    settings: &Settings,
    settings_file: std::path::PathBuf,
    definitions: std::path::PathBuf,
    record: Option<(std::path::PathBuf, u64)>,
) -> Result<(), String> {
    let mut signals = Signals::new().map_err(|error| format!("cannot catch signals: {error}"))?;
    // The VICI socket may be in it.
    std::fs::create_dir_all(&settings.run_dir).map_err(|error| {
        let folder = settings.run_dir.display();
        format!("cannot make the folder {folder} (swanherd.run_dir): {error}")
    })?;
    let vici = vici::Options {
        uri: settings.vici_socket.clone(),
        owner: (settings.user.clone(), settings.group.clone()),
        ..vici::Options::default()
    };
    let mut server = vici::Server::bind(&vici)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", vici.uri))?;
    if let Some(tls) = &settings.vici_tls {
        let listen = tls.listen;
        match server.add_tls(tls).await {
            Ok(()) => tracing::info!(%listen, "serving VICI over TLS"),
            // Tunnels matter more than who manages them from elsewhere.
            Err(error) => tracing::error!("cannot serve VICI over TLS on {listen}: {error}"),
        }
    }
    let (datagram_sender, datagrams) = mpsc::channel(DATAGRAM_QUEUE);
    let plane = plane::open(settings, datagram_sender).await?;
    tracing::info!("data plane: {}; {}", plane.plane.name(), plane.reason);

    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|error| format!("no randomness: {error}"))?;
    let given = plane.given();
    let ike = plane::ike_settings(settings, given);
    let endpoint = Endpoint::new(ike, Provider::ring(), seed);
    let (endpoint, recording) = match record {
        None => (Recorded::new(endpoint), None),
        Some((path, limit)) => {
            let (recording, sink) = Recording::begin(&path, limit)?;
            tracing::info!(path = %path.display(), limit, "everything that IKE does is recorded");
            let program = concat!("swanherd ", env!("CARGO_PKG_VERSION"));
            let endpoint = Recorded::recording(endpoint, crate::engine::now(), program, sink);
            (endpoint, Some(recording))
        }
    };
    let (mut engine, control) = Engine::new(Parts {
        endpoint,
        plane: Arc::new(plane.plane),
        plane_events: plane.events,
        sender: plane.sockets,
        datagrams,
        counters_interval: settings.counters_interval,
        reconcile_interval: settings.reconcile_interval,
        reload_settings: Box::new(move || {
            paths::load_settings(&settings_file)
                .map(|(settings, _)| {
                    logging::configure(settings.filelogs.clone());
                    plane::ike_settings(&settings, given)
                })
                .map_err(|error| format!("reloading '{}' failed", error.line()))
        }),
    });

    let (scripts, runner) = updown::start(settings.updown_timeout)
        .map_err(|error| format!("cannot start a thread for scripts: {error}"))?;
    engine.set_scripts(scripts);

    let (stop, stopped) = watch::channel(false);
    let mut engine = tokio::spawn(engine.run(wait_for(stopped.clone())));
    let metrics = metrics::start(settings, control.clone(), wait_for(stopped.clone())).await;
    let metrics = metrics.unwrap_or_else(|error| {
        // Tunnels matter more than their metrics.
        tracing::error!("{error}");
        None
    });

    let mut loader = Loader::new(definitions, control.clone());
    load(&mut loader).await;
    // Clients that came early wait in the backlog of the socket and find the definitions loaded.
    let vici = tokio::spawn(server.run(control.clone(), wait_for(stopped)));
    notify(&[sd_notify::NotifyState::Ready]);
    tracing::info!(vici = %settings.vici_socket, "ready");

    let watchdog = tokio::spawn(watchdog(control.clone()));
    let died = tokio::select! {
        () = signals.serve(&mut loader, &control) => None,
        died = &mut engine => Some(died),
    };
    if let Some(died) = died {
        if let Some(recording) = recording {
            recording.close();
        }
        // Without its engine the daemon is of no use to anybody, and must not look alive.
        let reason = match died {
            Ok(()) => "it ended".to_owned(),
            Err(error) => error.to_string(),
        };
        return Err(format!("the engine died: {reason}"));
    }
    notify(&[sd_notify::NotifyState::Stopping]);
    tracing::info!("swanherd stops");
    watchdog.abort();
    // The receivers may be gone already if a task died; the wait below tells.
    let _ = stop.send(true);
    let engine = engine
        .await
        .map_err(|error| format!("the engine died: {error}"));
    if let Some(recording) = recording {
        recording.close();
    }
    // Children that were closed at the end have their scripts, too.
    let scripts = tokio::task::spawn_blocking(|| runner.finish(SCRIPTS_GRACE));
    let _ = vici.await;
    let _ = scripts.await;
    if let Some(metrics) = metrics {
        let _ = metrics.await;
    }
    engine
}

/// Applies the definitions; what is wrong with them is logged and does not stop the daemon.
async fn load(loader: &mut Loader) {
    let path = loader.path().display().to_string();
    match loader.apply().await {
        Ok(summary) => tracing::info!(
            %path,
            loaded = summary.loaded,
            refused = summary.refused.len(),
            unloaded = summary.unloaded,
            "definitions applied"
        ),
        Err(error) => tracing::error!(%path, "definitions not applied: {error}"),
    }
}

/// Reads strongswan.conf again, and begins log files anew that were moved away.
async fn reload_settings(control: &Control) {
    match control.ask(crate::control::Request::ReloadSettings).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!("settings not read again: {error}"),
        Err(error) => tracing::error!("settings not read again: {error}"),
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Reads settings and definitions again on SIGHUP, returns on SIGTERM and SIGINT.
    async fn serve(&mut self, loader: &mut Loader, control: &Control) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {
                    let mut reloading = vec![sd_notify::NotifyState::Reloading];
                    if let Ok(now) = sd_notify::NotifyState::monotonic_usec_now() {
                        reloading.push(now);
                    }
                    notify(&reloading);
                    reload_settings(control).await;
                    load(loader).await;
                    notify(&[sd_notify::NotifyState::Ready]);
                }
            }
        }
    }
}

/// Tells the service manager, if there is one, that the engine still answers.
async fn watchdog(control: Control) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut tick = tokio::time::interval(limit / 3);
    loop {
        tick.tick().await;
        if control
            .ask(crate::control::Request::FlushCerts)
            .await
            .is_err()
        {
            return;
        }
        notify(&[sd_notify::NotifyState::Watchdog]);
    }
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager was not told");
    }
}

async fn wait_for(mut stopped: watch::Receiver<bool>) {
    // A sender that is gone means stop as well.
    let _ = stopped.wait_for(|stop| *stop).await;
}
