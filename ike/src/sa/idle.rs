// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Children that carry no packets for as long as `inactivity` says are taken down.
//!
//! Only the data plane knows when packets passed, and it is asked no more often than needed: once
//! when the time might be up, and then again when it might be after the packet that was seen. A
//! rekey does not begin the time anew, since it is no use of the child.

use std::time::{Duration, Instant};

use super::IkeSa;
use super::env::Env;
use crate::api::{ChildSaId, ChildState, LogGroup, Now};

/// When to ask again if there is no answer, or no time to act on it.
const AGAIN: Duration = Duration::from_secs(10);

/// How long a child has been idle.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Idle {
    /// Since when no packet is known of; `None` where nobody cares.
    since: Option<Instant>,
    /// When the data plane is asked.
    pub(super) check_at: Option<Instant>,
}

impl IkeSa {
    /// A child is installed: from now on it may be idle.
    pub(super) fn watch_idleness(&mut self, now: Now, id: ChildSaId) {
        let Some(child) = self.children.get(&id) else {
            return;
        };
        let limit = child.cfg().inactivity;
        if limit.is_zero() {
            return;
        }
        let before = child.replaces.and_then(|old| self.children.get(&old));
        let before = before.and_then(|old| old.idle.since);
        let idle = Idle {
            since: Some(before.unwrap_or(now.instant)),
            // The SAs that are replaced can still be asked for, in a while they cannot.
            check_at: Some(before.map_or(now.instant + limit, |_| now.instant)),
        };
        if let Some(child) = self.children.get_mut(&id) {
            child.idle = idle;
        }
    }

    /// Asks when a child, or one that it has replaced, was last used.
    pub(super) fn check_idleness(&mut self, env: &mut Env, now: Now, id: ChildSaId) {
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        child.idle.check_at = Some(now.instant + AGAIN);
        let replaced = child.replaces;
        let sas = self
            .children
            .values()
            .filter(|kin| kin.id == id || Some(kin.id) == replaced || kin.replaced_by == Some(id))
            .flat_map(|kin| [kin.inbound(), kin.outbound()])
            .flatten()
            .collect();
        env.usage(self.id, id, sas);
    }

    /// The data plane has answered that.
    pub(super) fn usage_told(
        &mut self,
        env: &mut Env,
        now: Now,
        id: ChildSaId,
        ago: Option<Duration>,
    ) {
        let settling = self.rekey_of_is_open(id);
        let Some(child) = self.children.get_mut(&id) else {
            return;
        };
        let Some(since) = child.idle.since else {
            return;
        };
        let used = ago.and_then(|ago| now.instant.checked_sub(ago));
        let since = used.map_or(since, |used| used.max(since));
        child.idle.since = Some(since);
        // What is being replaced hands its idleness on; should that fail, it is asked again.
        let lasts = child.state == ChildState::Installed && child.is_lasting();
        if !lasts || settling || child.replaced_by.is_some() || child.taken_down {
            return;
        }
        let end = since + child.cfg().inactivity;
        if now.instant < end {
            child.idle.check_at = Some(end);
            self.arm_children(now);
            return;
        }
        child.idle = Idle::default();
        let idle = now.instant.saturating_duration_since(since).as_secs();
        let line = format!(
            "CHILD_SA {}{{{id}}} has carried nothing for {idle} s and is deleted",
            child.cfg().name
        );
        self.log(env, LogGroup::Job, 1, line);
        self.take_down(env, now, id);
    }
}
