// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads for the computations that would hold up the engine: key exchanges and signatures.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use swanherd_ike::api::{Computed, Job};

/// Jobs that may wait. Beyond it the submitter computes itself, which slows the intake of new
/// handshakes to what the host can do.
const QUEUE: usize = 1024;
const MOST_THREADS: usize = 4;

type Task = Box<dyn FnOnce() + Send>;

/// See the module's text. Threads end when this is dropped and the queue is empty.
pub(crate) struct Workers {
    queue: SyncSender<Task>,
}

impl Workers {
    /// Starts one thread per core, a few at most.
    pub(crate) fn new() -> Self {
        let (queue, tasks) = sync_channel::<Task>(QUEUE);
        let tasks = Arc::new(Mutex::new(tasks));
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MOST_THREADS);
        for index in 0..threads {
            let tasks = Arc::clone(&tasks);
            let started = std::thread::Builder::new()
                .name(format!("crypto-{index}"))
                .spawn(move || work(&tasks));
            if let Err(error) = started {
                tracing::warn!(%error, "cannot start a worker thread");
            }
        }
        Self { queue }
    }

    /// Runs `job` on some thread and gives its result to `done` there.
    pub(crate) fn submit(&self, job: Job, done: impl FnOnce(Computed) + Send + 'static) {
        let task: Task = Box::new(move || done(job.run()));
        match self.queue.try_send(task) {
            Ok(()) => {}
            Err(TrySendError::Full(task) | TrySendError::Disconnected(task)) => task(),
        }
    }
}

fn work(tasks: &Mutex<Receiver<Task>>) {
    loop {
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(task) = task else { return };
        task();
    }
}
