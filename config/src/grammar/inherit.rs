// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out references: `child : parent { }` sees the parent's keys and sections.

use std::collections::BTreeSet;

use super::{Index, ROOT, RawSection};
use crate::diagnostic::Diagnostic;
use crate::tree::{Entry, Item, Tree};

/// Bound the work, and the size of the result, in proportion to the input: references multiply,
/// and hostile files could make them do so exponentially.
const FREE_STEPS: usize = 200_000;
const STEPS_PER_ITEM: usize = 16;
/// Longest chain of references.
const MAX_CHAIN: usize = 32;
/// Deepest nesting of what references may produce by pointing at an enclosing section.
const MAX_NESTING: usize = 96;

/// The tree in which every reference has been carried out.
pub(super) fn resolve(sections: &[RawSection]) -> Result<Tree, Diagnostic> {
    let items: usize = sections
        .iter()
        .map(|section| 1 + section.keys.len() + section.references.len())
        .sum();
    let mut resolver = Resolver {
        sections,
        steps: FREE_STEPS.saturating_add(items.saturating_mul(STEPS_PER_ITEM)),
    };
    resolver.expand(&[ROOT], 0)
}

struct Resolver<'a> {
    sections: &'a [RawSection],
    /// That are left.
    steps: usize,
}

impl Resolver<'_> {
    /// Pays for one step and for searching `searched` others.
    fn step(&mut self, searched: usize) -> Result<(), Diagnostic> {
        self.steps = self.steps.checked_sub(1 + searched / 64).ok_or_else(|| {
            Diagnostic::error(
                "too-large",
                "the references between sections multiply beyond all bounds",
            )
        })?;
        Ok(())
    }

    /// The sections that make up the section at a dotted path, own ones first.
    fn layers(&mut self, dotted: &str, chain: usize) -> Result<Vec<Index>, Diagnostic> {
        let mut layers = vec![ROOT];
        for name in dotted.split('.') {
            layers = self.children(&layers, name, chain)?;
            if layers.is_empty() {
                break;
            }
        }
        Ok(layers)
    }

    /// The sections called `name` in `layers`, each followed by what it refers to.
    fn children(
        &mut self,
        layers: &[Index],
        name: &str,
        chain: usize,
    ) -> Result<Vec<Index>, Diagnostic> {
        let mut found = Vec::new();
        for &layer in layers {
            self.step(found.len())?;
            let Some(&child) = self.sections[layer].section_index.get(name) else {
                continue;
            };
            if found.contains(&child) {
                continue;
            }
            found.push(child);
            // A chain that long is a loop; what it would add is there already.
            if chain >= MAX_CHAIN {
                continue;
            }
            for reference in &self.sections[child].references {
                for inherited in self.layers(reference, chain + 1)? {
                    self.step(found.len())?;
                    if !found.contains(&inherited) {
                        found.push(inherited);
                    }
                }
            }
        }
        Ok(found)
    }

    fn expand(&mut self, layers: &[Index], depth: usize) -> Result<Tree, Diagnostic> {
        let mut tree = Tree::new();
        let mut seen = BTreeSet::new();
        for &layer in layers {
            for key in &self.sections[layer].keys {
                self.step(0)?;
                if !seen.insert(key.name.as_str()) {
                    continue;
                }
                if let Some(value) = &key.value {
                    tree.push(Entry {
                        name: key.name.clone(),
                        location: Some(key.location.clone()),
                        item: Item::Value(value.clone()),
                    });
                }
            }
        }
        let mut seen = BTreeSet::new();
        for &layer in layers {
            for (name, location, _) in &self.sections[layer].sections {
                self.step(0)?;
                if !seen.insert(name.as_str()) {
                    continue;
                }
                if depth >= MAX_NESTING {
                    return Err(Diagnostic::error(
                        "too-large",
                        format!("`{name}` refers to a section that contains it"),
                    )
                    .at(Some(location)));
                }
                let children = self.children(layers, name, 0)?;
                let section = self.expand(&children, depth + 1)?;
                tree.push(Entry {
                    name: name.clone(),
                    location: Some(location.clone()),
                    item: Item::Section(section),
                });
            }
        }
        Ok(tree)
    }
}
