// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same `swanctl.conf` given to ours and to charon: states, policies, routes and rules in the
//! kernel are equal, with SPIs, keys and counters masked. Part of `cargo xtask test --only kernel`.

use swanherd_tests::{Daemon, Node, Plane, Scenario, subject, xfrm};

/// A child of the connection `t`.
#[derive(Clone, Copy)]
struct Child {
    name: &'static str,
    /// Its selectors at the left.
    local: &'static str,
    /// Its selectors at the right.
    remote: &'static str,
    /// Settings on both sides.
    both: &'static str,
    /// Settings of the side whose kernel is looked at.
    left: &'static str,
}

const CHILD: Child = Child {
    name: "c",
    local: "10.1.0.0/24",
    remote: "10.2.0.0/24",
    both: "",
    left: "",
};

/// The addresses of both ends.
const OUTER4: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
const OUTER6: [&str; 2] = ["2001:db8::1", "2001:db8::2"];

fn definitions(outer: [&str; 2], children: &[Child], left: bool) -> String {
    let own = usize::from(!left);
    let children: String = children
        .iter()
        .map(|c| {
            let (local, remote, only) = if left {
                (c.local, c.remote, c.left)
            } else {
                (c.remote, c.local, "")
            };
            format!(
                "      {} {{\n        esp_proposals = aes128gcm16\n        local_ts = {local}\n        \
                 remote_ts = {remote}\n        {}\n        {only}\n      }}\n",
                c.name, c.both
            )
        })
        .collect();
    format!(
        "connections {{
  t {{
    version = 2
    local_addrs = {}
    remote_addrs = {}
    proposals = aes128gcm16-prfsha256-x25519
    local {{
      auth = psk
      id = gw{}.example.org
    }}
    remote {{
      auth = psk
      id = gw{}.example.org
    }}
    children {{
{children}    }}
  }}
}}
secrets {{
  ike-1 {{
    secret = \"a secret for the laboratory\"
  }}
}}
",
        outer[own],
        outer[1 - own],
        own + 1,
        2 - own,
    )
}

/// What the kernel of a node has been given, entry by entry.
fn programmed(node: &Node) -> Vec<String> {
    let namespace = &node.namespace;
    let mut all = [xfrm(namespace, "state"), xfrm(namespace, "policy")].concat();
    for family in ["-4", "-6"] {
        // A table that nobody has used does not exist, which is an error to `ip`.
        let routes = namespace.run("ip", [family, "route", "show", "table", "220"]);
        let rules = namespace.ip(&format!("{family} rule"));
        // Ours says whose its routes and rules are, and has a rule for a table that has a route.
        let used = !routes.stdout.trim().is_empty();
        all.extend(
            routes
                .stdout
                .lines()
                .chain(
                    rules
                        .lines()
                        .filter(|rule| used || !rule.starts_with("220:")),
                )
                .map(|line| line.replace(" proto 220", "").replace(" proto static", ""))
                .map(|line| format!("{family} {}\n", line.trim())),
        );
    }
    all
}

/// As [`programmed`], once it no longer changes: loading answers before its traps and shunts are
/// with the kernel.
fn settled(node: &Node) -> Vec<String> {
    let mut last = programmed(node);
    node.wait_until("a kernel that is left alone", 20, |n| {
        std::thread::sleep(std::time::Duration::from_millis(700));
        let now = programmed(n);
        std::mem::replace(&mut last, now.clone()) == now
    });
    last
}

/// Starts a daemon at the left with the children, initiates those whose names begin with `c`, and
/// gives what its kernel has then, and when all is terminated.
fn run(daemon: Daemon, outer: [&str; 2], children: &[Child]) -> [Vec<String>; 2] {
    let mut pair = Scenario {
        left: daemon,
        // charon speaks of BEET to its like only.
        settings: "  send_vendor_id = yes\n",
        ..Scenario::new(Plane::Kernel)
    }
    .start();
    for (node, own) in [(&pair.left, "1"), (&pair.right, "2")] {
        let namespace = &node.namespace;
        namespace.ip(&format!("addr add 2001:db8::{own}/64 dev u0 nodad"));
        namespace.ip(&format!("addr add fd00:{own}::1/128 dev lo nodad"));
        node.configure(&definitions(outer, children, own == "1"));
        node.load();
    }
    let up: Vec<&Child> = children
        .iter()
        .filter(|c| c.name.starts_with('c'))
        .collect();
    for child in &up {
        let arguments = ["--initiate", "--child", child.name, "--timeout", "20"];
        let output = pair.left.swanctl(&arguments);
        assert!(output.ok(), "{output}\n{}", pair.logs());
    }
    let first = settled(&pair.left);
    if !up.is_empty() {
        let arguments = ["--terminate", "--ike", "t", "--timeout", "10"];
        let output = pair.left.swanctl(&arguments);
        assert!(output.ok(), "{output}\n{}", pair.logs());
        // Either may answer before its kernel has done it all; routes and policies go at once then.
        pair.left.wait_until("no state", 10, |n| {
            xfrm(&n.namespace, "state").is_empty() && xfrm(&n.namespace, "policy").is_empty()
        });
    }
    let second = settled(&pair.left);
    pair.left.stop();
    [first, second]
}

/// Both daemons make the same of the children.
fn compare(outer: [&str; 2], children: &[Child]) {
    let reference = run(Daemon::Charon, outer, children);
    if subject() == Daemon::Charon {
        return;
    }
    let ours = run(subject(), outer, children);
    for (when, (ours, reference)) in ["installed", "terminated"]
        .iter()
        .zip(ours.iter().zip(&reference))
    {
        assert!(!reference.is_empty(), "the reference has something {when}");
        let only = |one: &[String], other: &[String]| {
            let mut rest = other.to_vec();
            one.iter()
                .filter(|entry| match rest.iter().position(|o| o == *entry) {
                    Some(at) => {
                        rest.swap_remove(at);
                        false
                    }
                    None => true,
                })
                .cloned()
                .collect::<String>()
        };
        let [surplus, missing] = [only(ours, reference), only(reference, ours)];
        assert!(
            surplus.is_empty() && missing.is_empty(),
            "{when}, only ours:\n{surplus}\n{when}, only charon:\n{missing}"
        );
    }
}

#[test]
fn a_tunnel() {
    compare(OUTER4, &[CHILD]);
}

#[test]
fn modes() {
    compare(
        OUTER4,
        &[
            Child {
                name: "c-transport",
                local: "dynamic",
                remote: "dynamic",
                both: "mode = transport",
                ..CHILD
            },
            Child {
                name: "c-beet",
                local: "10.1.1.1/32",
                remote: "10.2.1.1/32",
                both: "mode = beet",
                ..CHILD
            },
            CHILD,
        ],
    );
}

#[test]
fn selectors() {
    compare(
        OUTER4,
        &[
            Child {
                name: "c-many",
                local: "10.1.0.0/24,10.1.1.0/25",
                remote: "10.2.0.0/24,10.2.128.0/17",
                ..CHILD
            },
            Child {
                name: "c-ports",
                local: "10.1.4.0/24[tcp/443]",
                remote: "10.2.4.0/24[tcp]",
                ..CHILD
            },
            Child {
                name: "c-icmp",
                local: "10.1.5.0/24[icmp]",
                remote: "10.2.5.0/24[icmp]",
                ..CHILD
            },
            Child {
                name: "c-host",
                local: "dynamic[gre]",
                remote: "dynamic[gre]",
                both: "mode = transport",
                ..CHILD
            },
        ],
    );
}

#[test]
fn marks_interfaces_and_fixed_numbers() {
    compare(
        OUTER4,
        &[
            Child {
                name: "c-mark",
                local: "10.1.1.0/24",
                remote: "10.2.1.0/24",
                left: "mark_in = 42\n mark_out = 0x2b/0xff",
                ..CHILD
            },
            Child {
                name: "c-set",
                local: "10.1.2.0/24",
                remote: "10.2.2.0/24",
                left: "set_mark_in = 7\n set_mark_out = 0x8/0xff",
                ..CHILD
            },
            Child {
                name: "c-if",
                local: "10.1.3.0/24",
                remote: "10.2.3.0/24",
                left: "if_id_in = 5\n if_id_out = 6",
                ..CHILD
            },
            Child {
                name: "c-fixed",
                local: "10.1.4.0/24",
                remote: "10.2.4.0/24",
                left: "reqid = 777\n priority = 1234",
                ..CHILD
            },
            Child {
                name: "c-unique",
                local: "10.1.5.0/24",
                remote: "10.2.5.0/24",
                left: "mark_in = %unique\n mark_out = %unique",
                ..CHILD
            },
        ],
    );
}

#[test]
fn windows_headers_and_forwarding() {
    compare(
        OUTER4,
        &[
            Child {
                name: "c-esn",
                local: "10.1.1.0/24",
                remote: "10.2.1.0/24",
                both: "esp_proposals = aes128gcm16-esn\n replay_window = 128",
                ..CHILD
            },
            Child {
                name: "c-window",
                local: "10.1.6.0/24",
                remote: "10.2.6.0/24",
                both: "replay_window = 0",
                ..CHILD
            },
            Child {
                name: "c-df",
                local: "10.1.2.0/24",
                remote: "10.2.2.0/24",
                left: "copy_df = no\n copy_ecn = no\n copy_dscp = in",
                ..CHILD
            },
            Child {
                name: "c-dscp",
                local: "10.1.3.0/24",
                remote: "10.2.3.0/24",
                left: "copy_dscp = yes",
                ..CHILD
            },
            Child {
                name: "c-fwd",
                local: "10.1.4.0/24",
                remote: "10.2.4.0/24",
                left: "policies_fwd_out = yes",
                ..CHILD
            },
            Child {
                name: "c-no",
                local: "10.1.5.0/24",
                remote: "10.2.5.0/24",
                left: "policies = no",
                ..CHILD
            },
            Child {
                name: "c-cbc",
                local: "10.1.7.0/24",
                remote: "10.2.7.0/24",
                both: "esp_proposals = aes256-sha256",
                ..CHILD
            },
        ],
    );
}

#[test]
fn traps_and_shunts() {
    compare(
        OUTER4,
        &[
            Child {
                name: "trap",
                left: "start_action = trap",
                ..CHILD
            },
            Child {
                name: "trap-mark",
                local: "10.1.3.0/24",
                remote: "10.2.3.0/24",
                left: "start_action = trap\n mark_out = 9\n mark_in = 9\n policies_fwd_out = yes",
                ..CHILD
            },
            Child {
                name: "pass",
                local: "10.1.1.0/24",
                remote: "10.2.1.0/24",
                left: "mode = pass\n start_action = trap",
                ..CHILD
            },
            Child {
                name: "drop",
                local: "10.1.2.0/24",
                remote: "10.2.2.0/24[tcp/25]",
                left: "mode = drop\n start_action = trap",
                ..CHILD
            },
        ],
    );
}

#[test]
fn ipv6_over_ipv4() {
    compare(
        OUTER4,
        &[Child {
            local: "fd00:1::/64",
            remote: "fd00:2::/64",
            ..CHILD
        }],
    );
}

#[test]
fn either_family_over_ipv6() {
    compare(
        OUTER6,
        &[
            Child {
                name: "c-six",
                local: "fd00:1::/64",
                remote: "fd00:2::/64",
                ..CHILD
            },
            Child {
                name: "c-four",
                ..CHILD
            },
            Child {
                name: "c-host",
                local: "dynamic",
                remote: "dynamic",
                both: "mode = transport",
                ..CHILD
            },
        ],
    );
}
