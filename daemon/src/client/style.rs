// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Colours, where somebody sees them and has nothing against them.

use std::io::IsTerminal as _;

/// A colour of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// Bad.
    Red,
    /// Good.
    Green,
    /// Neither.
    Yellow,
}

impl Colour {
    /// `text` in this colour, if colours are wanted.
    pub(crate) fn paint(self, text: &str, wanted: bool) -> String {
        if !wanted {
            return text.to_owned();
        }
        let code = match self {
            Self::Red => 31,
            Self::Green => 32,
            Self::Yellow => 33,
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }
}

/// Whether standard output is a terminal, and neither `NO_COLOR` nor `TERM` forbids colours.
pub(crate) fn colours() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    wanted(
        std::io::stdout().is_terminal(),
        set("NO_COLOR").is_some(),
        set("TERM").is_some_and(|term| term == "dumb"),
    )
}

fn wanted(terminal: bool, forbidden: bool, dumb: bool) -> bool {
    terminal && !forbidden && !dumb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_whose_users_want_them() {
        assert!(wanted(true, false, false));
        for (terminal, forbidden, dumb) in [
            (false, false, false),
            (true, true, false),
            (true, false, true),
        ] {
            assert!(!wanted(terminal, forbidden, dumb));
        }
        assert_eq!(Colour::Red.paint("down", true), "\u{1b}[31mdown\u{1b}[0m");
        assert_eq!(Colour::Red.paint("down", false), "down");
    }
}
