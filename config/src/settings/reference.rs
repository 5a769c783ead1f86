// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings that are honoured, for the documentation and for suggestions.

/// One setting.
pub(super) struct Row {
    pub(super) key: &'static str,
    pub(super) default: &'static str,
    pub(super) meaning: &'static str,
}

const fn row(key: &'static str, default: &'static str, meaning: &'static str) -> Row {
    Row {
        key,
        default,
        meaning,
    }
}

/// Below `charon`.
pub(super) const CHARON: &[Row] = &[
    row("port", "500", "UDP port of IKE; 0 takes any that is free"),
    row(
        "port_nat_t",
        "4500",
        "UDP port of IKE and ESP behind NAT; 0 takes any that is free",
    ),
    row(
        "retransmit_tries",
        "5",
        "retransmissions before a peer counts as dead",
    ),
    row(
        "retransmit_timeout",
        "4.0",
        "seconds before the first retransmission",
    ),
    row(
        "retransmit_base",
        "1.8",
        "factor from one interval to the next",
    ),
    row(
        "retransmit_jitter",
        "0",
        "percentage by which intervals are shortened at random, up to 20",
    ),
    row(
        "retransmit_limit",
        "0",
        "longest interval in seconds; 0 is without limit",
    ),
    row(
        "half_open_timeout",
        "30s",
        "time for a responder's handshake to complete",
    ),
    row(
        "dos_protection",
        "yes",
        "`no` switches cookies and blocking off",
    ),
    row(
        "cookie_threshold",
        "30",
        "half-open SAs from which cookies are demanded; 0 is never",
    ),
    row(
        "cookie_threshold_ip",
        "3",
        "the same for one source address, or one IPv6 network of 64 bits",
    ),
    row(
        "block_threshold",
        "5",
        "half-open SAs from which a source address (or IPv6 network of 64 bits) is refused; 0 is never. Configured peers return a cookie instead",
    ),
    row(
        "init_limit_half_open",
        "4096",
        "half-open SAs from which new ones are refused; 0 is never. Configured peers return a cookie instead",
    ),
    row("ikesa_limit", "0", "most IKE SAs; 0 is without limit"),
    row("keep_alive", "20s", "interval of NAT keepalives; 0 is off"),
    row(
        "fragment_size",
        "1280",
        "largest IP packet of a fragmented IKE message; where packets of this size get lost, 1280 and over IPv4 576 octets are tried",
    ),
    row(
        "max_packet",
        "10000",
        "largest IKE message that is accepted",
    ),
    row(
        "delete_rekeyed_delay",
        "5s",
        "time for which a replaced inbound CHILD SA still receives",
    ),
    row(
        "reuse_ikesa",
        "yes",
        "new children use an IKE SA that is up",
    ),
    row(
        "close_ike_on_child_failure",
        "no",
        "a failed child of IKE_AUTH ends its IKE SA",
    ),
    row(
        "make_before_break",
        "yes",
        "reauthentication sets up the new SA before it deletes the old",
    ),
    row(
        "prefer_configured_proposals",
        "yes",
        "own order of proposals decides, not the peer's",
    ),
    row(
        "signature_authentication",
        "yes",
        "digital signatures of RFC 7427",
    ),
    row(
        "rsa_pss",
        "no",
        "RSASSA-PSS rather than PKCS#1 with RSA keys",
    ),
    row(
        "replay_window",
        "32",
        "anti-replay window in packets, where a child sets none; the kernel is given the next power of two above 32 or with ESN (at most 4096), since its bitmap takes no other size right",
    ),
    row("reqid_base", "1", "first request id"),
    row(
        "follow_redirects",
        "yes",
        "gateways may send this side to other ones (RFC 5685)",
    ),
    row("install_routes", "yes", "routes for remote selectors"),
    row(
        "install_virtual_ip",
        "yes",
        "virtual addresses are added to the interface that has the local address",
    ),
    row(
        "user",
        "",
        "owner of the VICI socket; needs CAP_CHOWN, which the shipped unit does not give: use `Group=` there",
    ),
    row(
        "group",
        "",
        "group of the VICI socket; as for `charon.user`",
    ),
    row(
        "plugins.vici.socket",
        "unix:///var/run/charon.vici",
        "where VICI listens",
    ),
];

/// Below `charon`: what can be said, but not changed.
pub(super) const FIXED: &[Row] = &[
    row("routing_table", "220", "routes are in table 220"),
    row(
        "routing_table_prio",
        "220",
        "the rule for table 220 has priority 220",
    ),
    row(
        "process_route",
        "yes",
        "changes of routes are always followed",
    ),
    row(
        "install_virtual_ip_on",
        "",
        "virtual addresses are added to the interface that has the local address",
    ),
    row(
        "interfaces_use",
        "",
        "every interface is used; `local_addrs` of a connection restricts it",
    ),
    row(
        "interfaces_ignore",
        "",
        "every interface is used; `local_addrs` of a connection restricts it",
    ),
    row(
        "prefer_temporary_addrs",
        "no",
        "the kernel chooses source addresses",
    ),
    row("spi_min", "0xc0000000", "SPIs begin at 0xc0000000"),
    row("spi_max", "0xcfffffff", "SPIs end at 0xcfffffff"),
    row(
        "ignore_acquire_ts",
        "no",
        "the packet that asked for an SA is named to the peer",
    ),
    row(
        "plugins.kernel-netlink.fwmark",
        "",
        "the rule for table 220 is for all packets",
    ),
    row(
        "plugins.kernel-netlink.mtu",
        "0",
        "routes have no MTU of their own",
    ),
    row(
        "plugins.kernel-netlink.mss",
        "0",
        "routes have no MSS of their own",
    ),
    row(
        "plugins.kernel-netlink.install_routes_xfrmi",
        "no",
        "children with an interface id get no routes",
    ),
    row(
        "plugins.kernel-netlink.policy_update",
        "no",
        "policies of others are never changed",
    ),
    row(
        "plugins.kernel-netlink.port_bypass",
        "no",
        "the IKE sockets have policies of their own, so no ports need be let through",
    ),
    row(
        "plugins.kernel-netlink.process_rules",
        "no",
        "changes of rules are not followed",
    ),
    row(
        "plugins.kernel-netlink.roam_events",
        "yes",
        "changes of addresses and links are always followed",
    ),
    row(
        "plugins.kernel-netlink.hw_offload_feature_interface",
        "lo",
        "offload is tried on the device that it is wanted of",
    ),
    row(
        "plugins.kernel-netlink.xfrm_acq_expires",
        "165",
        "an SA may be installed after its reservation has expired; the system's `net.core.xfrm_acq_expires` is left alone",
    ),
    row(
        "plugins.kernel-netlink.spdh_thresh.ipv4.lbits",
        "32",
        "see `swanherd.spd_hash`",
    ),
    row(
        "plugins.kernel-netlink.spdh_thresh.ipv4.rbits",
        "32",
        "see `swanherd.spd_hash`",
    ),
    row(
        "plugins.kernel-netlink.spdh_thresh.ipv6.lbits",
        "128",
        "see `swanherd.spd_hash`",
    ),
    row(
        "plugins.kernel-netlink.spdh_thresh.ipv6.rbits",
        "128",
        "see `swanherd.spd_hash`",
    ),
];

/// Below `swanherd`.
pub(super) const OWN: &[Row] = &[
    row(
        "config",
        "",
        "file with the tunnel definitions; without it `swanctl.conf` in `SWANCTL_DIR`",
    ),
    row(
        "run_dir",
        "/run/swanherd",
        "directory for what must survive a crash of the daemon, but not a reboot",
    ),
    row(
        "dataplane",
        "auto",
        "`xfrm` (the kernel), `tun` (userspace ESP), or `auto`: the kernel if it can do ESP",
    ),
    row(
        "counters_interval",
        "1s",
        "how often the SAs' counters are read",
    ),
    row(
        "reconcile_interval",
        "60s",
        "how often the data plane is compared with what should be in it, and mended; 0 is only at start and on demand",
    ),
    row(
        "updown_timeout",
        "10s",
        "how long a script of a child (`updown`) may run before it is killed; read at start",
    ),
    row(
        "spd_hash",
        "auto",
        "the kernel's hash thresholds of policies follow the prefixes in use (`auto`) or stay as they are (`no`)",
    ),
    row("log.format", "text", "`text` or `json`, on standard error"),
    row(
        "metrics.listen",
        "127.0.0.1:9814",
        "address and port of `/metrics` and `/healthz`, or `off`; needs TLS off the loopback",
    ),
    row(
        "metrics.tls_cert",
        "",
        "PEM file with the certificate chain of the metrics endpoint",
    ),
    row("metrics.tls_key", "", "PEM file with its private key"),
    row(
        "vici.tls_listen",
        "off",
        "address and port of VICI over TLS, beside the socket of `charon.plugins.vici.socket`; needs the three files",
    ),
    row(
        "vici.tls_cert",
        "",
        "PEM file with the certificate chain of VICI over TLS",
    ),
    row("vici.tls_key", "", "PEM file with its private key"),
    row(
        "vici.tls_client_ca",
        "",
        "PEM file with the authorities whose certificates clients of VICI over TLS must have",
    ),
    row(
        "tun.device",
        "ipsec%d",
        "name of the TUN device; `%d` takes the first free number",
    ),
    row("tun.mtu", "1400", "MTU of the TUN device"),
    row(
        "tun.workers",
        "1",
        "threads that encrypt; more than one makes a device with several queues",
    ),
];

/// The tables of the settings as Markdown, generated from what the code honours.
pub fn reference() -> String {
    let mut text = String::new();
    for (title, [value, meaning], root, rows) in [
        (
            "Settings of `swanherd { }`",
            ["Default", "Meaning"],
            "swanherd",
            OWN,
        ),
        (
            "Honoured settings of `charon { }`",
            ["Default", "Meaning"],
            "charon",
            CHARON,
        ),
        (
            "Settings of `charon { }` that have one value",
            ["Value", "Any other is a warning, because"],
            "charon",
            FIXED,
        ),
    ] {
        text.push_str(&format!(
            "## {title}\n\n| Setting | {value} | {meaning} |\n|---|---|---|\n"
        ));
        for row in rows {
            let default = if row.default.is_empty() {
                "none".to_owned()
            } else {
                format!("`{}`", row.default)
            };
            text.push_str(&format!(
                "| `{root}.{}` | {default} | {} |\n",
                row.key, row.meaning
            ));
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}
