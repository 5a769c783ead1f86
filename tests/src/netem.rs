// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Links that lose and delay packets, and say how many.

use crate::lab::Namespace;

/// A device that treats what leaves it as netem is told to, ESP apart from all else, so that what
/// happened to the packets of tunnels is known to the packet. Addresses are resolved unharmed.
#[derive(Debug)]
pub struct Netem {
    namespace: Namespace,
    dev: String,
}

/// What became of packets of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// Those that left.
    pub sent: u32,
    /// Those that did not.
    pub dropped: u32,
}

const ESP: &str = "10:";
const OTHER: &str = "20:";

impl Netem {
    /// Puts it on a device, with netem's arguments (`loss 5% delay 100ms 50ms`).
    ///
    /// # Panics
    /// When the kernel has no netem.
    #[must_use]
    pub fn on(namespace: &Namespace, dev: &str, quality: &str) -> Self {
        let this = Self {
            namespace: namespace.clone(),
            dev: dev.to_owned(),
        };
        // Anything that no filter takes goes to the second band.
        let bands = "1 ".repeat(16);
        this.tc(&format!(
            "qdisc add dev {dev} root handle 1: prio bands 3 priomap {bands}"
        ));
        for (parent, handle) in [("1:1", ESP), ("1:2", OTHER)] {
            this.tc(&format!(
                "qdisc add dev {dev} parent {parent} handle {handle} netem limit 100000 {quality}"
            ));
        }
        this.tc(&format!(
            "filter add dev {dev} parent 1: protocol ip prio 1 u32 match ip protocol 50 0xff \
             flowid 1:1"
        ));
        this.tc(&format!(
            "filter add dev {dev} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:3"
        ));
        this
    }

    /// What became of ESP.
    ///
    /// # Panics
    /// When the device is gone.
    #[must_use]
    pub fn esp(&self) -> Class {
        self.class(ESP)
    }

    /// What became of everything else, which is IKE for the most part.
    ///
    /// # Panics
    /// When the device is gone.
    #[must_use]
    pub fn other(&self) -> Class {
        self.class(OTHER)
    }

    /// Changes what it does to packets.
    ///
    /// # Panics
    /// When netem does not understand it.
    pub fn change(&self, quality: &str) {
        for (parent, handle) in [("1:1", ESP), ("1:2", OTHER)] {
            self.tc(&format!(
                "qdisc change dev {} parent {parent} handle {handle} netem limit 100000 {quality}",
                self.dev
            ));
        }
    }

    fn class(&self, handle: &str) -> Class {
        let text = self.tc(&format!("-s qdisc show dev {}", self.dev));
        let start = format!("qdisc netem {handle} ");
        let counts = text
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .nth(1)
            .unwrap_or_else(|| panic!("no {handle} in {text}"));
        Class {
            sent: number(counts, " bytes ", " pkt"),
            dropped: number(counts, "(dropped ", ","),
        }
    }

    fn tc(&self, args: &str) -> String {
        self.namespace
            .run("tc", args.split_whitespace())
            .expect_ok()
    }
}

impl Drop for Netem {
    /// The device is as it was, so that daemons can say goodbye.
    fn drop(&mut self) {
        let args = ["qdisc", "del", "dev", &self.dev, "root"];
        self.namespace.run("tc", args);
    }
}

fn number(text: &str, before: &str, after: &str) -> u32 {
    text.split_once(before)
        .and_then(|(_, rest)| rest.split_once(after))
        .and_then(|(number, _)| number.trim().parse().ok())
        .unwrap_or_else(|| panic!("no number between {before:?} and {after:?} in {text:?}"))
}
