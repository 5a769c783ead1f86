// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events of the engine on their way to whoever asked for them.
//!
//! A subscriber says what it wants, and nothing else is put into its queue. Queues are bounded by
//! what their events weigh rather than by their number, because the engine hands over whole batches
//! at once: thousands of SAs may go down in one turn, and nobody can read in between. Events are
//! shared, so that many subscribers who are behind weigh hardly more than one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use swanherd_ike::api::{ChildSaInfo, Event, IkeSaInfo};
use tokio::sync::Notify;

use crate::vici::OF_ENGINE;

/// What the events in one queue may weigh, in octets. A batch of 20,000 SAs that go down fits.
pub(crate) const MAX_WEIGHT: usize = 128 * 1024 * 1024;

/// A set of kinds of events: a bit for each name, by its place among those of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds(u32);

impl Kinds {
    /// Every event, those without a name included.
    #[cfg(test)]
    pub(crate) const ALL: Self = Self(u32::MAX);
    /// Events that have no name, because only the engine has a use for them.
    const INTERNAL: Self = Self(1 << 31);

    /// The kind of that name; `None` if no event of the engine has it.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let bit = OF_ENGINE.iter().position(|known| *known == name)?;
        Some(Self(1 << bit))
    }

    fn of(event: &Event) -> Self {
        crate::vici::event_name(event)
            .and_then(Self::named)
            .unwrap_or(Self::INTERNAL)
    }

    /// Both sets together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Where the engine puts events. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hub {
    queues: Arc<Mutex<Vec<Weak<Queue>>>>,
}

impl Hub {
    /// Passes an event to everybody who wants it. Never waits.
    pub(crate) fn send(&self, event: Event) {
        let mut queues = lock(&self.queues);
        if queues.is_empty() {
            return;
        }
        let kind = Kinds::of(&event);
        let weight = weight(&event);
        let event = Arc::new(event);
        let mut left = false;
        for queue in queues.iter() {
            match queue.upgrade() {
                Some(queue) => queue.put(kind, &event, weight),
                None => left = true,
            }
        }
        if left {
            queues.retain(|queue| queue.strong_count() > 0);
        }
    }

    /// All events of these kinds from now on.
    pub(crate) fn subscribe(&self, kinds: Kinds) -> Subscription {
        let queue = Arc::new(Queue {
            wanted: AtomicU32::new(kinds.0),
            state: Mutex::default(),
            news: Notify::new(),
        });
        lock(&self.queues).push(Arc::downgrade(&queue));
        Subscription { queue }
    }
}

/// Events that wait for one subscriber.
#[derive(Debug)]
pub(crate) struct Subscription {
    queue: Arc<Queue>,
}

impl Subscription {
    /// Wants these kinds from now on. Events that wait already stay.
    pub(crate) fn want(&self, kinds: Kinds) {
        self.queue.wanted.store(kinds.0, Ordering::Relaxed);
    }

    /// The next event. Cancelling this future loses nothing.
    ///
    /// # Errors
    /// If more piled up than [`MAX_WEIGHT`]: there is a gap from here on.
    pub(crate) async fn next(&self) -> Result<Arc<Event>, Overrun> {
        loop {
            {
                let mut state = lock(&self.queue.state);
                if state.overrun {
                    return Err(Overrun);
                }
                if let Some((event, weight)) = state.events.pop_front() {
                    state.weight -= weight;
                    return Ok(event);
                }
            }
            self.queue.news.notified().await;
        }
    }

    /// The next event, if one waits.
    #[cfg(test)]
    pub(crate) fn try_next(&self) -> Option<Arc<Event>> {
        let mut state = lock(&self.queue.state);
        let (event, weight) = state.events.pop_front()?;
        state.weight -= weight;
        Some(event)
    }

    /// How many events wait, and what they weigh.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let state = lock(&self.queue.state);
        if state.overrun {
            return (0, MAX_WEIGHT);
        }
        (state.events.len(), state.weight)
    }

    /// Waits until more than `limit` octets wait.
    pub(crate) async fn heavier_than(&self, limit: usize) {
        while self.waiting().1 <= limit {
            self.queue.news.notified().await;
        }
    }
}

/// More piled up than a queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

#[derive(Debug)]
struct Queue {
    wanted: AtomicU32,
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<(Arc<Event>, usize)>,
    weight: usize,
    overrun: bool,
}

impl Queue {
    fn put(&self, kind: Kinds, event: &Arc<Event>, weight: usize) {
        if !kind.meets(Kinds(self.wanted.load(Ordering::Relaxed))) {
            return;
        }
        let mut state = lock(&self.state);
        if state.overrun {
            return;
        }
        if state.weight + weight > MAX_WEIGHT {
            *state = State {
                overrun: true,
                ..State::default()
            };
        } else {
            state.weight += weight;
            state.events.push_back((Arc::clone(event), weight));
        }
        drop(state);
        self.news.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under the locks leaves anything half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// About how much memory an event takes.
fn weight(event: &Event) -> usize {
    let inner = match event {
        Event::IkeUpDown { sa, .. }
        | Event::IkeUpdate { sa, .. }
        | Event::ChildUpDown { sa, .. } => of_ike(sa),
        Event::IkeRekey { old, new } => of_ike(old) + of_ike(new),
        Event::ChildRekey { sa, old, new } => of_ike(sa) + of_child(old) + of_child(new),
        Event::Alert { sa, .. } => sa.as_deref().map_or(0, of_ike),
        Event::Log(line) => line.message.len(),
        _ => 0,
    };
    size_of::<Event>() + inner
}

fn of_ike(sa: &IkeSaInfo) -> usize {
    size_of::<IkeSaInfo>() + sa.children.values().map(of_child).sum::<usize>()
}

fn of_child(child: &ChildSaInfo) -> usize {
    let selectors = child.local_ts.len() + child.remote_ts.len();
    size_of::<ChildSaInfo>()
        + selectors * size_of::<swanherd_ipsec::TrafficSelector>()
        + child.name.len()
}

#[cfg(test)]
mod tests {
    use swanherd_ike::api::{LogGroup, LogLine};

    use super::*;

    fn log(text: String) -> Event {
        Event::Log(LogLine {
            group: LogGroup::Ike,
            level: 1,
            ike_sa: None,
            message: text,
        })
    }

    fn alert() -> Event {
        Event::Alert {
            kind: "ts-mismatch",
            sa: None,
        }
    }

    #[test]
    fn only_what_is_wanted_is_kept() {
        let hub = Hub::default();
        let kinds = |name| Kinds::named(name).unwrap();
        let logs = hub.subscribe(kinds("log"));
        let alerts = hub.subscribe(kinds("alert"));
        let both = hub.subscribe(kinds("log").and(kinds("alert")));
        let all = hub.subscribe(Kinds::ALL);

        hub.send(log("x".into()));
        hub.send(alert());
        hub.send(Event::Changed(1));
        logs.want(kinds("alert"));
        hub.send(alert());

        let waiting = [&logs, &alerts, &both, &all].map(|one| one.waiting().0);
        assert_eq!(waiting, [2, 2, 3, 4]);
        assert_eq!(Kinds::named("list-sa"), None);
    }

    #[tokio::test]
    async fn a_batch_of_any_number_is_read_whole_and_in_order() {
        let hub = Hub::default();
        let subscription = hub.subscribe(Kinds::named("log").unwrap());
        for number in 0..100_000 {
            hub.send(log(number.to_string()));
        }
        for number in 0..100_000 {
            let event = subscription.next().await.unwrap();
            let Event::Log(line) = &*event else { panic!() };
            assert_eq!(line.message, number.to_string());
        }
        assert_eq!(subscription.waiting(), (0, 0));
    }

    #[tokio::test]
    async fn too_much_is_a_gap_that_is_told_and_frees_the_memory() {
        let hub = Hub::default();
        let behind = hub.subscribe(Kinds::named("log").unwrap());
        let text = "x".repeat(1024 * 1024);
        for _ in 0..129 {
            hub.send(log(text.clone()));
        }

        behind.heavier_than(MAX_WEIGHT - 1).await;
        assert!(matches!(behind.next().await, Err(Overrun)));
        assert!(lock(&behind.queue.state).events.is_empty());
    }

    #[test]
    fn those_who_left_are_forgotten() {
        let hub = Hub::default();
        drop(hub.subscribe(Kinds::ALL));
        hub.send(alert());
        assert!(lock(&hub.queues).is_empty());
    }
}
