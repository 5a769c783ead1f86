// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Giving up attempts: children that are not up yet are not to come up.

use super::Endpoint;
use crate::api::{FailureReason, IkeSaId, Now, Selector};
use crate::sa::Task;

impl Endpoint {
    /// Gives up what brings up the children that `selector` names: planned attempts, and those
    /// under way for which there is no CHILD SA yet. Whether there was anything.
    pub(super) fn abandon(&mut self, now: Now, selector: &Selector) -> bool {
        if selector.child_id.is_some() {
            return false;
        }
        let child = selector.child.as_deref();
        let mut any = false;
        if selector.ike_id.is_none() {
            let names: Vec<String> = match &selector.ike {
                Some(name) => vec![name.clone()],
                None => self
                    .env
                    .connections
                    .iter()
                    .map(|c| c.name.clone())
                    .collect(),
            };
            for name in names {
                let waiting = self.keep.waiting(&name);
                any |= waiting.iter().any(|one| child.is_none_or(|c| c == one));
                self.keep.forget(&name, child);
            }
        }
        if let Some(child) = child {
            let sa_only = Selector {
                child: None,
                ..selector.clone()
            };
            for found in self.matches(&sa_only) {
                any |= self.abandon_on(now, found.ike, child);
            }
        }
        any
    }

    /// Whether an IKE SA has to do with making a child of that name.
    fn abandon_on(&mut self, now: Now, id: IkeSaId, child: &str) -> bool {
        let abandoned = self.with(id, |sa, env| {
            let named = |task: &Task| {
                task.makes().is_some_and(|(conn, index)| {
                    conn.children
                        .get(index)
                        .is_some_and(|cfg| cfg.name == child)
                })
            };
            let before = sa.queue.len() + sa.delayed.len();
            sa.queue.retain(|task| !named(task));
            sa.delayed.retain(|(_, task)| !named(task));
            let any = sa.queue.len() + sa.delayed.len() < before;
            if any && sa.is_connecting() && !sa.has_purpose() {
                sa.farewell(env, now);
                let text = "taken down before it was up".to_owned();
                sa.end(env, FailureReason::LocalDeleted, text);
            }
            any
        });
        let abandoned = abandoned == Some(true);
        if abandoned {
            self.is_failed(id, child, Some("it was taken down"));
        }
        abandoned
    }
}
