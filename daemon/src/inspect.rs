// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `policies` and `reconcile`: what is in the data plane, as the daemon tells it, or as the kernel
//! and the ledger do where no daemon runs.

use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use swanherd_kernel::xfrm::{Inspection, inspect};
use swanherd_vici::Error;
use swanherd_vici::installed::{Finding, InstalledPolicy, Masked, Reconciled};

use crate::cli::{Policies, Reconcile, Server};
use crate::client::{connect, print_json, put, say};
use crate::installed::{finding, installed_policy};
use crate::paths;

/// Dumps of very many policies take their time, and an audit waits for the one that runs.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Who told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    /// The daemon.
    Daemon,
    /// The kernel itself, and the ledger of an earlier run.
    Kernel,
}

#[derive(Debug, Serialize)]
struct PolicyList {
    source: Source,
    policies: Vec<InstalledPolicy>,
}

#[derive(Debug, Serialize)]
struct Outcome {
    source: Source,
    /// Whether nothing is left that differs.
    clean: bool,
    #[serde(flatten)]
    reconciled: Reconciled,
}

/// `swanherd policies`
pub(crate) async fn policies(args: Policies) -> ExitCode {
    let (source, mut policies) = match listed(&args.server).await {
        Ok(listed) => listed,
        Err(error) => return fail(&error),
    };
    policies.sort_by_cached_key(order);
    if args.json {
        print_json(&PolicyList { source, policies });
    } else {
        put(&table(&policies));
        put(&format!(
            "{}{}\n",
            count(policies.len() as u64, "policy", "policies"),
            from(source)
        ));
    }
    ExitCode::SUCCESS
}

/// `swanherd reconcile`
pub(crate) async fn reconcile(args: Reconcile) -> ExitCode {
    let (source, reconciled) = match reconciled(&args).await {
        Ok(reconciled) => reconciled,
        Err(error) => return fail(&error),
    };
    let left = reconciled.findings.iter().filter(|found| !mended(found));
    let outcome = Outcome {
        source,
        clean: left.count() == 0,
        reconciled,
    };
    if args.json {
        print_json(&outcome);
    } else {
        put(&report(&outcome));
    }
    ExitCode::from(u8::from(!outcome.clean))
}

fn mended(found: &Finding) -> bool {
    !matches!(found.remedy.as_str(), "none" | "failed")
}

async fn listed(server: &Server) -> Result<(Source, Vec<InstalledPolicy>), String> {
    let asked = async {
        let mut client = connect(server).await?;
        client.set_timeout(Some(ANSWER_LIMIT));
        client.installed_policies().await
    };
    match asked.await {
        Ok(policies) => Ok((Source::Daemon, policies)),
        Err(error) if nobody_to_ask(server, &error) => {
            let seen = look().await?;
            let policies = seen.policies.iter().map(installed_policy).collect();
            Ok((Source::Kernel, policies))
        }
        Err(error) => Err(error.to_string()),
    }
}

async fn reconciled(args: &Reconcile) -> Result<(Source, Reconciled), String> {
    let asked = async {
        let mut client = connect(&args.server).await?;
        client.set_timeout(Some(ANSWER_LIMIT));
        client.reconcile(args.dry_run).await
    };
    match asked.await {
        Ok(reconciled) => Ok((Source::Daemon, reconciled)),
        Err(error @ Error::Connect { .. }) if nobody_to_ask(&args.server, &error) => {
            let begun = Instant::now();
            let audit = look().await?.audit;
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH);
            let reconciled = Reconciled {
                dry_run: true,
                at: seconds.map_or(0, |since| since.as_secs()),
                took_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
                sas: audit.sas as u64,
                policies: audit.policies as u64,
                alien_sas: audit.alien_sas as u64,
                alien_policies: audit.alien_policies as u64,
                findings: audit.findings.iter().map(finding).collect(),
            };
            Ok((Source::Kernel, reconciled))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Whether there is no daemon that could tell: none at all, or one that is not ours. If a socket
/// was named, the answer has to come from there.
fn nobody_to_ask(server: &Server, error: &Error) -> bool {
    let absent = match error {
        Error::Connect { source, .. } => matches!(
            source.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
        ),
        Error::UnknownEvent(_) | Error::UnknownCommand(_) => true,
        _ => false,
    };
    absent && server.uri.is_none()
}

/// Reads the kernel.
async fn look() -> Result<Inspection, String> {
    let file = paths::settings_file(None);
    let settings = match paths::load_settings(&file) {
        Ok((settings, _)) => settings,
        Err(error) => return Err(error.render(false).trim_end().to_owned()),
    };
    inspect(&paths::ledger(&settings))
        .await
        .map_err(|error| error.to_string())
}

fn from(source: Source) -> &'static str {
    match source {
        Source::Daemon => "",
        Source::Kernel => ", as the kernel and the ledger tell; no daemon of ours answers",
    }
}

fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// By direction as packets pass them, then as they are consulted.
fn order(policy: &InstalledPolicy) -> (u8, u32, String, String, u32) {
    let direction = match policy.dir.as_str() {
        "in" => 0,
        "fwd" => 1,
        _ => 2,
    };
    (
        direction,
        policy.priority,
        policy.src.clone(),
        policy.dst.clone(),
        policy.index,
    )
}

/// Aligned columns. Those that would be empty are left out.
fn table(policies: &[InstalledPolicy]) -> String {
    let head = [
        "DIR",
        "PRIORITY",
        "SOURCE",
        "DESTINATION",
        "PROTO",
        "ACTION",
        "REQID",
        "IF_ID",
        "MARK",
        "OWNER",
    ];
    let rows: Vec<[String; 10]> = policies.iter().map(row).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let columns: BTreeMap<usize, usize> = (0..head.len())
        .filter_map(|column| {
            let widest = width(column).unwrap_or(0);
            let optional = matches!(head[column], "PROTO" | "REQID" | "IF_ID" | "MARK");
            (widest > 0 || !optional).then_some((column, widest.max(head[column].len())))
        })
        .collect();
    let mut text = String::new();
    let head = head.map(str::to_owned);
    for row in core::iter::once(&head).chain(&rows) {
        let cells = columns.iter().map(|(&column, &width)| {
            let cell = &row[column];
            let right = matches!(head[column].as_str(), "PRIORITY" | "REQID" | "IF_ID");
            match right {
                true => format!("{cell:>width$}"),
                false => format!("{cell:width$}"),
            }
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn row(policy: &InstalledPolicy) -> [String; 10] {
    let mut proto = policy.proto.map_or_else(String::new, |proto| match proto {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        47 => "gre".to_owned(),
        58 => "icmpv6".to_owned(),
        132 => "sctp".to_owned(),
        other => other.to_string(),
    });
    for (name, port) in [("from", policy.sport), ("to", policy.dport)] {
        if let Some(port) = port {
            proto.push_str(&format!(" {name} {}", ports(port)));
        }
    }
    let action = match (&policy.mode, policy.action.as_str()) {
        (Some(mode), "protect") => mode.clone(),
        (_, action) => action.to_owned(),
    };
    let some = |number: u32| match number {
        0 => String::new(),
        number => number.to_string(),
    };
    let mark = policy.mark.map_or_else(String::new, |mark| {
        format!("{:#x}/{:#x}", mark.value, mark.mask)
    });
    let owner = match &policy.owner.name {
        Some(name) => format!("{} {name}", policy.owner.kind),
        None => policy.owner.kind.clone(),
    };
    [
        policy.dir.clone(),
        policy.priority.to_string(),
        policy.src.clone(),
        policy.dst.clone(),
        proto.trim_start().to_owned(),
        action,
        some(policy.reqid.unwrap_or(0)),
        some(policy.if_id),
        mark,
        owner,
    ]
}

/// A port, a range of ports, or value and mask of something else.
fn ports(port: Masked) -> String {
    let free = !port.mask & 0xffff;
    if free == 0 {
        port.value.to_string()
    } else if (free & (free + 1)) == 0 {
        let first = port.value & port.mask;
        format!("{first}-{}", first | free)
    } else {
        format!("{:#x}/{:#x}", port.value, port.mask)
    }
}

fn report(outcome: &Outcome) -> String {
    let reconciled = &outcome.reconciled;
    let mut text = String::new();
    for found in &reconciled.findings {
        text.push_str(&sentence(found));
        text.push('\n');
    }
    let total = reconciled.findings.len();
    let mended = reconciled.findings.iter().filter(|f| mended(f)).count();
    text.push_str(&match (total, mended) {
        (0, _) => "nothing differs".to_owned(),
        (total, mended) if mended == total => {
            format!(
                "{}, mended",
                count(total as u64, "difference", "differences")
            )
        }
        (total, mended) => format!(
            "{}, {mended} mended, {} left",
            count(total as u64, "difference", "differences"),
            total - mended
        ),
    });
    text.push_str(&format!(
        "; {}, {} of them alien; {}, {} of them alien{}\n",
        count(reconciled.sas, "SA", "SAs"),
        reconciled.alien_sas,
        count(reconciled.policies, "policy", "policies"),
        reconciled.alien_policies,
        from(outcome.source)
    ));
    text
}

fn sentence(found: &Finding) -> String {
    let owner = found
        .owner
        .as_ref()
        .map_or_else(String::new, |owner| format!(" of {owner}"));
    let remedy = match found.remedy.as_str() {
        "installed" => "; installed again".to_owned(),
        "removed" => "; removed".to_owned(),
        "renegotiated" => "; to be negotiated again".to_owned(),
        "failed" => format!(
            "; cannot be mended: {}",
            found.error.as_deref().unwrap_or("for no reason given")
        ),
        _ => String::new(),
    };
    format!("{}{owner}: {}{remedy}", found.what, found.reason)
}

fn fail(error: &str) -> ExitCode {
    say(error);
    ExitCode::from(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(dir: &str, priority: u32) -> InstalledPolicy {
        InstalledPolicy {
            index: 9,
            dir: dir.to_owned(),
            src: "10.1.0.0/24".to_owned(),
            dst: "10.2.0.0/16".to_owned(),
            priority,
            action: "protect".to_owned(),
            mode: Some("tunnel".to_owned()),
            reqid: Some(7),
            owner: swanherd_vici::installed::PolicyOwner {
                kind: "child".to_owned(),
                name: Some("gw/net".to_owned()),
            },
            ..InstalledPolicy::default()
        }
    }

    #[test]
    fn the_table_is_sorted_aligned_and_leaves_out_empty_columns() {
        let mut policies = vec![
            policy("out", 375_423),
            InstalledPolicy {
                proto: Some(6),
                dport: Some(Masked {
                    value: 1024,
                    mask: 0xfc00,
                }),
                action: "pass".to_owned(),
                mode: None,
                reqid: None,
                owner: swanherd_vici::installed::PolicyOwner {
                    kind: "alien".to_owned(),
                    name: None,
                },
                ..policy("out", 5)
            },
            policy("in", 375_423),
        ];
        policies.sort_by_cached_key(order);

        assert_eq!(
            table(&policies),
            "\
DIR  PRIORITY  SOURCE       DESTINATION  PROTO             ACTION  REQID  OWNER
in     375423  10.1.0.0/24  10.2.0.0/16                    tunnel      7  child gw/net
out         5  10.1.0.0/24  10.2.0.0/16  tcp to 1024-2047  pass           alien
out    375423  10.1.0.0/24  10.2.0.0/16                    tunnel      7  child gw/net
"
        );
    }

    #[test]
    fn ports_are_written_as_what_they_are() {
        for (value, mask, text) in [
            (443, 0xffff, "443"),
            (1024, 0xfc00, "1024-2047"),
            (0x50, 0xf0f0, "0x50/0xf0f0"),
        ] {
            assert_eq!(ports(Masked { value, mask }), text);
        }
    }

    #[test]
    fn json_has_the_documented_keys() {
        let list = PolicyList {
            source: Source::Kernel,
            policies: vec![policy("in", 1)],
        };

        assert_eq!(
            serde_json::to_string(&list).unwrap(),
            r#"{"source":"kernel","policies":[{"index":9,"dir":"in","src":"10.1.0.0/24","dst":"10.2.0.0/16","proto":null,"sport":null,"dport":null,"priority":1,"action":"protect","mode":"tunnel","reqid":7,"tunnel_src":null,"tunnel_dst":null,"if_id":0,"mark":null,"owner":{"kind":"child","name":"gw/net"}}]}"#
        );
    }

    #[test]
    fn a_report_tells_what_is_left() {
        let found = |remedy: &str, error: Option<&str>| Finding {
            object: "policy".to_owned(),
            what: "policy out 10.1.0.0/24 10.2.0.0/16".to_owned(),
            difference: "missing".to_owned(),
            owner: Some("gw/net".to_owned()),
            reason: "it is not there".to_owned(),
            remedy: remedy.to_owned(),
            error: error.map(str::to_owned),
        };
        let outcome = |findings: Vec<Finding>| Outcome {
            source: Source::Daemon,
            clean: findings.is_empty(),
            reconciled: Reconciled {
                sas: 4,
                policies: 6,
                alien_policies: 1,
                findings,
                ..Reconciled::default()
            },
        };

        assert_eq!(
            report(&outcome(Vec::new())),
            "nothing differs; 4 SAs, 0 of them alien; 6 policies, 1 of them alien\n"
        );
        assert_eq!(
            report(&outcome(vec![
                found("installed", None),
                found("failed", Some("No space left"))
            ])),
            "policy out 10.1.0.0/24 10.2.0.0/16 of gw/net: it is not there; installed again\n\
             policy out 10.1.0.0/24 10.2.0.0/16 of gw/net: it is not there; cannot be mended: No space left\n\
             2 differences, 1 mended, 1 left; 4 SAs, 0 of them alien; 6 policies, 1 of them alien\n"
        );
    }
}
