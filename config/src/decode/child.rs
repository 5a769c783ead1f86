// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `children.<child>` sections.

use std::time::Duration;

use swanherd_ipsec::ProtocolId;
use swanherd_ipsec::plane::Mode;

use super::{Decoder, Opt, options};
use crate::diagnostic::Diagnostic;
use crate::model::{Action, Child, ChildMode, CopyDscp, HwOffload, IfId, MarkSpec, SelectorSpec};
use crate::proposal::{default_proposals, lacks_integrity};
use crate::tree::Tree;
use crate::value;

pub(crate) const KEYS: &[&str] = &[
    "ah_proposals",
    "esp_proposals",
    "sha256_96",
    "local_ts",
    "remote_ts",
    "rekey_time",
    "life_time",
    "rand_time",
    "rekey_bytes",
    "life_bytes",
    "rand_bytes",
    "rekey_packets",
    "life_packets",
    "rand_packets",
    "updown",
    "hostaccess",
    "mode",
    "policies",
    "policies_fwd_out",
    "dpd_action",
    "start_action",
    "close_action",
    "ipcomp",
    "inactivity",
    "reqid",
    "priority",
    "interface",
    "mark_in",
    "mark_out",
    "mark_in_sa",
    "set_mark_in",
    "set_mark_out",
    "if_id_in",
    "if_id_out",
    "label",
    "label_mode",
    "tfc_padding",
    "replay_window",
    "per_cpu_sas",
    "hw_offload",
    "copy_df",
    "copy_ecn",
    "copy_dscp",
    "icmp",
];

/// Soft limit, hard limit and jitter as given.
#[derive(Clone, Copy, Default)]
struct Limits {
    rekey: Option<u64>,
    life: Option<u64>,
    rand: Option<u64>,
}

/// The limits of a child in their three measures.
#[derive(Clone, Copy, Default)]
struct AllLimits {
    time: Limits,
    bytes: Limits,
    packets: Limits,
}

impl Limits {
    /// Completes what is not given: each follows from the other, the jitter from their difference.
    fn complete(self, default: u64) -> (u64, u64, u64) {
        // In 128 bits, because the limits may be any 64-bit number.
        let scaled = |value: u64, by: u128, over: u128| {
            u64::try_from(u128::from(value) * by / over).unwrap_or(u64::MAX)
        };
        let rekey = self.rekey.unwrap_or_else(|| match self.life {
            Some(life) if life > 0 => scaled(life, 100, 110),
            // No hard limit is no reason to give up rekeying.
            Some(_) | None => default,
        });
        let life = self.life.unwrap_or_else(|| scaled(rekey, 110, 100));
        let rand = self.rand.unwrap_or_else(|| life.saturating_sub(rekey));
        (rekey, life, rand)
    }
}

impl Decoder<'_> {
    pub(super) fn child(&mut self, name: &str, tree: &Tree) -> Child {
        let mut child = blank(name);
        let mut limits = AllLimits::default();
        for option in options(tree) {
            let result = self.child_option(option, &mut child, &mut limits);
            self.keep(result);
        }
        for (entry, _) in tree.sections() {
            self.keep(Err(Diagnostic::error(
                "unknown-section",
                format!("`{}` is no section of a child", entry.name),
            )
            .stock(format!("invalid section: {}", entry.name))
            .key(&entry.name)
            .at(entry.location.as_ref())));
        }
        let (rekey, life, rand) = limits.time.complete(3600);
        child.rekey_time = Duration::from_secs(rekey);
        child.life_time = Duration::from_secs(life);
        child.rand_time = Duration::from_secs(rand);
        (child.rekey_bytes, child.life_bytes, child.rand_bytes) = limits.bytes.complete(0);
        (child.rekey_packets, child.life_packets, child.rand_packets) = limits.packets.complete(0);
        complete(&mut child);
        child.proposals.shrink_to_fit();
        child.local_ts.shrink_to_fit();
        child.remote_ts.shrink_to_fit();
        child
    }

    fn child_option(
        &mut self,
        option: Opt<'_>,
        child: &mut Child,
        limits: &mut AllLimits,
    ) -> Result<(), Diagnostic> {
        match option.name() {
            "esp_proposals" => {
                child.proposals = self.proposals(option, KEYS, ProtocolId::Esp)?;
                if child.proposals.iter().any(lacks_integrity) {
                    self.warnings.push(
                        option
                            .doubt(
                                "insecure",
                                "a proposal encrypts without protecting integrity",
                            )
                            .help("add an integrity algorithm such as `sha256`, or use GCM"),
                    );
                }
            }
            "ah_proposals" => {
                if !self.list(option, KEYS)?.is_empty() {
                    return Err(option.unsupported("AH is not supported"));
                }
            }
            "sha256_96" => {
                if self.boolean(option, KEYS)? {
                    return Err(option
                            .unsupported("truncating SHA-256 to 96 bits behind the peer's back is not supported")
                            .help("use the keyword `sha256_96` in `esp_proposals` if the peer can negotiate it"));
                }
            }
            "local_ts" => child.local_ts = self.selectors(option)?,
            "remote_ts" => child.remote_ts = self.selectors(option)?,
            "rekey_time" => limits.time.rekey = Some(self.time(option, KEYS)?.as_secs()),
            "life_time" => limits.time.life = Some(self.time(option, KEYS)?.as_secs()),
            "rand_time" => limits.time.rand = Some(self.time(option, KEYS)?.as_secs()),
            "rekey_bytes" => limits.bytes.rekey = Some(self.bytes(option)?),
            "life_bytes" => limits.bytes.life = Some(self.bytes(option)?),
            "rand_bytes" => limits.bytes.rand = Some(self.bytes(option)?),
            "rekey_packets" => limits.packets.rekey = Some(self.count(option)?),
            "life_packets" => limits.packets.life = Some(self.count(option)?),
            "rand_packets" => limits.packets.rand = Some(self.count(option)?),
            "updown" => child.updown = self.optional(option)?,
            "hostaccess" => child.hostaccess = self.boolean(option, KEYS)?,
            "mode" => child.mode = self.mode(option)?,
            "policies" => child.policies = self.boolean(option, KEYS)?,
            "policies_fwd_out" => child.policies_fwd_out = self.boolean(option, KEYS)?,
            "dpd_action" => child.dpd_action = self.action(option)?,
            "start_action" => child.start_action = self.action(option)?,
            "close_action" => child.close_action = self.action(option)?,
            "ipcomp" => self.left_off(option, "IPComp is not supported and is not offered")?,
            "icmp" => self.left_off(
                option,
                "ICMP errors from outside the selectors are not accepted: not supported",
            )?,
            "inactivity" => child.inactivity = self.time(option, KEYS)?,
            "reqid" => child.reqid = self.number(option, KEYS)?,
            "priority" => child.priority = self.number(option, KEYS)?,
            "interface" => {
                child.interface = self.optional(option)?;
                let set = child.interface.is_some();
                self.inert(option, set, "policies are not bound to an interface");
            }
            "mark_in" => child.mark_in = self.mark(option, false)?,
            "mark_out" => child.mark_out = self.mark(option, false)?,
            "mark_in_sa" => child.mark_in_sa = self.boolean(option, KEYS)?,
            "set_mark_in" => child.set_mark_in = self.mark(option, true)?,
            "set_mark_out" => child.set_mark_out = self.mark(option, true)?,
            "if_id_in" => child.if_id_in = self.if_id(option, KEYS)?,
            "if_id_out" => child.if_id_out = self.if_id(option, KEYS)?,
            "label" => {
                child.label = self.optional(option)?;
                if child.label.is_some() {
                    return Err(option.unsupported("security labels are not supported"));
                }
            }
            "label_mode" => {
                self.choice(
                    option,
                    KEYS,
                    &[("system", ()), ("simple", ()), ("selinux", ())],
                )?;
                self.warnings
                    .push(option.without_effect("security labels are not supported"));
            }
            "tfc_padding" => {
                let text = self.text(option, KEYS)?;
                child.tfc_padding = if text == "mtu" {
                    None
                } else {
                    Some(self.number(option, KEYS)?)
                };
                if child.tfc_padding != Some(0) {
                    self.warnings.push(option.doubt(
                            "unsupported",
                            "traffic flow confidentiality padding is not supported; packets keep their size",
                        ));
                }
            }
            "replay_window" => child.replay_window = Some(self.number(option, KEYS)?),
            "per_cpu_sas" => {
                let text = self.text(option, KEYS)?;
                if !text.eq_ignore_ascii_case("encap") && !self.boolean(option, KEYS)? {
                    return Ok(());
                }
                self.warnings.push(option.doubt(
                    "unsupported",
                    "SAs per CPU are not supported; one SA serves all",
                ));
            }
            "hw_offload" => {
                child.hw_offload = self.choice(
                    option,
                    KEYS,
                    &[
                        ("no", HwOffload::No),
                        ("yes", HwOffload::Crypto),
                        ("crypto", HwOffload::Crypto),
                        ("packet", HwOffload::Packet),
                        ("auto", HwOffload::Auto),
                    ],
                )?;
            }
            "copy_df" => child.copy_df = self.boolean(option, KEYS)?,
            "copy_ecn" => child.copy_ecn = self.boolean(option, KEYS)?,
            "copy_dscp" => {
                child.copy_dscp = self.choice(
                    option,
                    KEYS,
                    &[
                        ("out", CopyDscp::Out),
                        ("in", CopyDscp::In),
                        ("yes", CopyDscp::Yes),
                        ("no", CopyDscp::No),
                    ],
                )?;
            }
            _ => return Err(option.unknown(KEYS)),
        }
        Ok(())
    }

    fn selectors(&mut self, option: Opt<'_>) -> Result<Vec<SelectorSpec>, Diagnostic> {
        let mut selectors = Vec::new();
        for text in self.list(option, KEYS)? {
            let Some((selector, remark)) = value::selector(text, self.names) else {
                let error = option.invalid(format!("`{text}` is no traffic selector"));
                let help = if text == "%dynamic" {
                    "write `dynamic`"
                } else {
                    "write an address, network or range, or `dynamic`, followed by [protocol/port] if needed; to give several ports, repeat the whole selector"
                };
                return Err(error.help(help));
            };
            if let Some(remark) = remark {
                self.warnings.push(option.doubt("host-bits", remark));
            }
            selectors.push(selector);
        }
        Ok(selectors)
    }

    fn bytes(&self, option: Opt<'_>) -> Result<u64, Diagnostic> {
        self.parse(
            option,
            KEYS,
            "a size such as 500000, 100k, 20m or 1g",
            value::bytes,
        )
    }

    fn count(&self, option: Opt<'_>) -> Result<u64, Diagnostic> {
        self.parse(option, KEYS, "a number", value::number)
    }

    fn action(&self, option: Opt<'_>) -> Result<Action, Diagnostic> {
        self.parse(
            option,
            KEYS,
            "none, trap, start or trap|start",
            value::action,
        )
    }

    fn mark(&self, option: Opt<'_>, output: bool) -> Result<MarkSpec, Diagnostic> {
        let mark = self.parse(option, KEYS, "a mark such as 42 or 0x2a/0xff", value::mark)?;
        let fits = match mark {
            MarkSpec::Same(_) => output,
            MarkSpec::Unique(_) | MarkSpec::UniqueDir(_) => !output,
            MarkSpec::None | MarkSpec::Mark(_) => true,
        };
        if fits {
            Ok(mark)
        } else {
            Err(option.invalid(if output {
                "an output mark is a number or %same"
            } else {
                "a mark is a number, %unique or %unique-dir"
            }))
        }
    }

    fn mode(&self, option: Opt<'_>) -> Result<ChildMode, Diagnostic> {
        if self.text(option, KEYS)?.eq_ignore_ascii_case("iptfs") {
            return Err(option.unsupported("IP-TFS (RFC 9347) is not supported"));
        }
        self.choice(
            option,
            KEYS,
            &[
                ("tunnel", ChildMode::Ipsec(Mode::Tunnel)),
                ("transport", ChildMode::Ipsec(Mode::Transport)),
                ("transport_proxy", ChildMode::TransportProxy),
                ("beet", ChildMode::Ipsec(Mode::Beet)),
                ("pass", ChildMode::Pass),
                ("drop", ChildMode::Drop),
            ],
        )
    }

    fn optional(&self, option: Opt<'_>) -> Result<Option<String>, Diagnostic> {
        let text = self.text(option, KEYS)?;
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }

    /// An option that is harmless to leave off, with a warning.
    fn left_off(&mut self, option: Opt<'_>, message: &str) -> Result<(), Diagnostic> {
        if self.boolean(option, KEYS)? {
            self.warnings.push(option.doubt("unsupported", message));
        }
        Ok(())
    }
}

fn complete(child: &mut Child) {
    if child.proposals.is_empty() {
        child.proposals = default_proposals(ProtocolId::Esp);
    }
    for selectors in [&mut child.local_ts, &mut child.remote_ts] {
        if selectors.is_empty() {
            selectors.push(SelectorSpec::Dynamic {
                protocol: 0,
                start_port: 0,
                end_port: u16::MAX,
            });
        }
    }
}

fn blank(name: &str) -> Child {
    Child {
        name: name.to_owned(),
        proposals: Vec::new(),
        local_ts: Vec::new(),
        remote_ts: Vec::new(),
        rekey_time: Duration::ZERO,
        life_time: Duration::ZERO,
        rand_time: Duration::ZERO,
        rekey_bytes: 0,
        life_bytes: 0,
        rand_bytes: 0,
        rekey_packets: 0,
        life_packets: 0,
        rand_packets: 0,
        updown: None,
        hostaccess: false,
        mode: ChildMode::Ipsec(Mode::Tunnel),
        policies: true,
        policies_fwd_out: false,
        dpd_action: Action::default(),
        start_action: Action::default(),
        close_action: Action::default(),
        inactivity: Duration::ZERO,
        reqid: 0,
        priority: 0,
        interface: None,
        mark_in: MarkSpec::None,
        mark_in_sa: false,
        mark_out: MarkSpec::None,
        set_mark_in: MarkSpec::None,
        set_mark_out: MarkSpec::None,
        if_id_in: IfId::None,
        if_id_out: IfId::None,
        label: None,
        tfc_padding: Some(0),
        replay_window: None,
        hw_offload: HwOffload::No,
        copy_df: true,
        copy_ecn: true,
        copy_dscp: CopyDscp::Out,
    }
}
