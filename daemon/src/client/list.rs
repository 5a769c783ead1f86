// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `list`: connections, SAs, certificates and pools, one kind at a time.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use serde::Serialize;
use swanherd_config::identity::display_identity;
use swanherd_ike::credentials::Certificate;
use swanherd_ipsec::hex;
use swanherd_vici::types::ListSas;
use swanherd_vici::{Client, Error, IkeSa, Message};

use super::status::{child_suite, endpoint, ike_suite, seconds};
use super::style::{Colour, colours};
use super::{OK, WRONG, connect, fail, print_json, put, say};
use crate::cli::{List, Listed, Policies};

/// `swanherd list`
pub(crate) async fn list(args: List) -> ExitCode {
    if args.what == Listed::Policies {
        let policies = Policies {
            server: args.server,
            json: args.json,
        };
        return crate::inspect::policies(policies).await;
    }
    let mut client = match connect(&args.server).await {
        Ok(client) => client,
        Err(error) => return fail(&error),
    };
    let name = args.name.as_deref();
    let shown = match args.what {
        Listed::Certs => certificates(&mut client, args.json).await,
        Listed::Conns => connections(&mut client, name, args.names, args.json).await,
        Listed::Pools => pools(&mut client, name, args.json).await,
        Listed::Sas => sas(&mut client, name, args.json).await,
        Listed::Policies => Ok(true),
    };
    match (shown, name) {
        (Ok(true), _) => ExitCode::from(OK),
        (Ok(false), Some(name)) => {
            say(&format!("nothing is called '{name}'"));
            ExitCode::from(WRONG)
        }
        (Ok(false), None) => ExitCode::from(OK),
        (Err(error), _) => fail(&error),
    }
}

/// A section with its name as the first key.
#[derive(Debug, Serialize)]
struct Named {
    name: String,
    #[serde(flatten)]
    section: Message,
}

async fn connections(
    client: &mut Client,
    name: Option<&str>,
    names: bool,
    json: bool,
) -> Result<bool, Error> {
    let filter = name.map_or_else(Message::new, |name| Message::new().with("ike", name));
    let mut stream = client.stream("list-conns", "list-conn", filter).await?;
    let mut found = Vec::new();
    while let Some(message) = stream.next().await? {
        for (name, section) in message.sections() {
            found.push(Named {
                name: name.to_owned(),
                section: section.clone(),
            });
        }
    }
    if json {
        print_json(&found);
    } else if names {
        for connection in &found {
            put(&names_of(connection));
        }
    } else {
        for connection in &found {
            put(&connection_text(connection));
        }
    }
    Ok(!found.is_empty())
}

/// The connection and its children, a line each.
fn names_of(connection: &Named) -> String {
    let mut text = format!("{}\n", connection.name);
    for (child, _) in children(&connection.section) {
        text += &format!("{}/{child}\n", connection.name);
    }
    text
}

fn children(connection: &Message) -> impl Iterator<Item = (&str, &Message)> {
    let children = connection.section("children");
    children.into_iter().flat_map(Message::sections)
}

/// The values of a list, as text.
fn texts(section: &Message, name: &str) -> String {
    let values = section.list(name).unwrap_or_default();
    let values: Vec<_> = values
        .iter()
        .map(|value| String::from_utf8_lossy(value))
        .collect();
    values.join(" ")
}

fn connection_text(connection: &Named) -> String {
    let section = &connection.section;
    let mut text = format!(
        "{}: {}, {} ... {}\n",
        connection.name,
        section.str("version").unwrap_or_default(),
        texts(section, "local_addrs"),
        texts(section, "remote_addrs")
    );
    for (side, round) in section.sections().filter(|(name, _)| *name != "children") {
        let method = round.str("class").unwrap_or("any");
        let id = round.str("id").unwrap_or("%any");
        text += &format!("  {side}: {method}, {id}");
        for (kind, names) in [("certificate", "certs"), ("CA", "cacerts")] {
            let names = texts(round, names);
            if !names.is_empty() {
                text += &format!(", {kind} \"{names}\"");
            }
        }
        text.push('\n');
    }
    for (name, child) in children(section) {
        text += &format!(
            "  {name}: {}, {} === {}\n",
            child.str("mode").unwrap_or_default(),
            texts(child, "local-ts"),
            texts(child, "remote-ts")
        );
    }
    text
}

async fn sas(client: &mut Client, name: Option<&str>, json: bool) -> Result<bool, Error> {
    let filter = ListSas {
        ike: name.map(str::to_owned),
        ..ListSas::default()
    };
    let sas = client.list_sas(&filter).await?;
    if json {
        print_json(&sas);
    } else {
        for sa in &sas {
            put(&sa_text(sa));
        }
    }
    Ok(!sas.is_empty())
}

fn sa_text(sa: &IkeSa) -> String {
    let mut text = format!(
        "{} #{}: {}, {} [{}] ... {} [{}]\n",
        sa.name,
        sa.uniqueid,
        sa.state,
        endpoint(&sa.local_host, sa.local_port),
        sa.local_id,
        endpoint(&sa.remote_host, sa.remote_port),
        sa.remote_id
    );
    let times = [
        ("established", sa.established),
        ("rekey in", sa.rekey_time),
        ("reauthentication in", sa.reauth_time),
    ];
    text += &details(ike_suite(sa), &times);
    for child in &sa.children {
        text += &format!(
            "  {} #{}: {}, {}, {} === {}\n",
            child.name,
            child.uniqueid,
            child.state,
            child.mode,
            child.local_ts.join(" "),
            child.remote_ts.join(" ")
        );
        let times = [
            ("installed", child.install_time),
            ("rekey in", child.rekey_time),
            ("ends in", child.life_time),
        ];
        text += &details(child_suite(child), &times)
            .lines()
            .map(|line| format!("  {line}\n"))
            .collect::<String>();
        if let (Some(inbound), Some(outbound)) = (&child.spi_in, &child.spi_out) {
            text += &format!(
                "    in {inbound}: {} octets, {} packets; out {outbound}: {} octets, {} packets\n",
                child.bytes_in, child.packets_in, child.bytes_out, child.packets_out
            );
        }
    }
    text
}

/// An indented line of algorithms and times; nothing if there are none.
fn details(suite: Option<String>, times: &[(&str, Option<i64>); 3]) -> String {
    let times = times.iter().filter(|(_, time)| time.is_some());
    let times = times.map(|(what, time)| match *what {
        "established" | "installed" => format!("{what} {} ago", seconds(*time)),
        _ => format!("{what} {}", seconds(*time)),
    });
    let parts: Vec<_> = suite.into_iter().chain(times).collect();
    if parts.is_empty() {
        String::new()
    } else {
        format!("  {}\n", parts.join(", "))
    }
}

/// One certificate. Times are in seconds since the epoch.
#[derive(Debug, Serialize)]
struct Certified {
    subject: String,
    issuer: String,
    alternative_names: Vec<String>,
    serial: String,
    not_before: u64,
    not_after: u64,
    /// `valid`, `expired` or `not yet valid`.
    validity: &'static str,
    /// Such as `RSA 2048`.
    key: String,
    /// Whether it is a certificate authority's.
    ca: bool,
    /// Whether the daemon has its private key.
    private_key: bool,
}

async fn certificates(client: &mut Client, json: bool) -> Result<bool, Error> {
    let filter = Message::new().with("type", "X509");
    let mut stream = client.stream("list-certs", "list-cert", filter).await?;
    let mut found = Vec::new();
    let mut unreadable = 0u32;
    while let Some(message) = stream.next().await? {
        let data = message.value("data").unwrap_or_default();
        match Certificate::parse(data) {
            Ok(certificate) => found.push(certified(
                &certificate,
                message.str("has_privkey") == Some("yes"),
                unix_now(),
            )),
            Err(_) => unreadable += 1,
        }
    }
    if json {
        print_json(&found);
    } else {
        for certificate in &found {
            put(&certificate_text(certificate, colours()));
        }
    }
    if unreadable > 0 {
        say(&format!(
            "{unreadable} certificates are of a kind that is not understood here"
        ));
    }
    Ok(!found.is_empty())
}

fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_secs())
}

fn certified(certificate: &Certificate, private_key: bool, now: u64) -> Certified {
    let (not_before, not_after) = certificate.validity();
    let key = certificate.public_key();
    Certified {
        subject: display_identity(&certificate.subject()),
        issuer: display_identity(&certificate.issuer()),
        alternative_names: certificate
            .alternative_names()
            .iter()
            .map(display_identity)
            .collect(),
        serial: hex::encode(certificate.serial()),
        not_before,
        not_after,
        validity: if now > not_after {
            "expired"
        } else if now < not_before {
            "not yet valid"
        } else {
            "valid"
        },
        key: format!("{} {}", key.type_name(), key.bits()),
        ca: certificate.is_ca(),
        private_key,
    }
}

fn certificate_text(certificate: &Certified, coloured: bool) -> String {
    let mut text = format!("{}\n", certificate.subject);
    if certificate.issuer == certificate.subject {
        text += "  self-signed\n";
    } else {
        text += &format!("  issuer: {}\n", certificate.issuer);
    }
    if !certificate.alternative_names.is_empty() {
        text += &format!("  names: {}\n", certificate.alternative_names.join(", "));
    }
    let validity = match certificate.validity {
        "valid" => Colour::Green,
        _ => Colour::Red,
    };
    text += &format!(
        "  {}: {} to {}\n",
        validity.paint(certificate.validity, coloured),
        date(certificate.not_before),
        date(certificate.not_after)
    );
    let mut kinds = vec![certificate.key.as_str()];
    if certificate.ca {
        kinds.push("certificate authority");
    }
    if certificate.private_key {
        kinds.push("with private key");
    }
    text + &format!("  serial {}, {}\n", certificate.serial, kinds.join(", "))
}

/// In UTC, as certificates have it.
fn date(unix: u64) -> String {
    let at = i64::try_from(unix).ok();
    let at = at.and_then(|seconds| Timestamp::from_second(seconds).ok());
    at.map_or_else(
        || "for ever".to_owned(),
        |at| at.strftime("%F %T UTC").to_string(),
    )
}

async fn pools(client: &mut Client, name: Option<&str>, json: bool) -> Result<bool, Error> {
    let mut args = Message::new().with("leases", "yes");
    if let Some(name) = name {
        args.push("name", name);
    }
    let reply = client.request("get-pools", args).await?;
    let found: Vec<_> = reply
        .sections()
        .filter(|(pool, _)| name.is_none_or(|name| name == *pool))
        .map(|(name, section)| Named {
            name: name.to_owned(),
            section: section.clone(),
        })
        .collect();
    if json {
        print_json(&found);
    } else {
        for pool in &found {
            put(&pool_text(pool));
        }
    }
    Ok(!found.is_empty())
}

fn pool_text(pool: &Named) -> String {
    let value = |section: &Message, name: &str| section.str(name).unwrap_or("-").to_owned();
    let mut text = format!(
        "{}: {}, {} addresses, {} in use, {} reserved\n",
        pool.name,
        value(&pool.section, "base"),
        value(&pool.section, "size"),
        value(&pool.section, "online"),
        value(&pool.section, "offline")
    );
    let leases = pool.section.section("leases");
    for (_, lease) in leases.into_iter().flat_map(Message::sections) {
        text += &format!(
            "  {} {} {}\n",
            value(lease, "address"),
            value(lease, "status"),
            value(lease, "identity")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use swanherd_vici::ChildSa;

    use super::*;

    fn connection() -> Named {
        let round = |id: &str| {
            Message::new()
                .with("id", id)
                .with("class", "public key")
                .with_list("certs", ["CN=gw"])
        };
        let child = Message::new()
            .with("mode", "TUNNEL")
            .with_list("local-ts", ["10.1.0.0/24", "10.3.0.0/24"])
            .with_list("remote-ts", ["10.2.0.0/24"]);
        Named {
            name: "site".to_owned(),
            section: Message::new()
                .with_list("local_addrs", ["192.0.2.1"])
                .with_list("remote_addrs", ["%any"])
                .with("version", "IKEv2")
                .with_section("local-1", round("gw.example.org"))
                .with_section("remote-1", Message::new())
                .with_section("children", Message::new().with_section("net", child)),
        }
    }

    #[test]
    fn connections_are_shown_named_and_serialized() {
        let connection = connection();

        assert_eq!(
            connection_text(&connection),
            "\
site: IKEv2, 192.0.2.1 ... %any
  local-1: public key, gw.example.org, certificate \"CN=gw\"
  remote-1: any, %any
  net: TUNNEL, 10.1.0.0/24 10.3.0.0/24 === 10.2.0.0/24
"
        );
        assert_eq!(names_of(&connection), "site\nsite/net\n");
        let json = serde_json::to_string(&connection).unwrap();
        assert!(
            json.starts_with("{\"name\":\"site\",\"local_addrs\":[\"192.0.2.1\"],"),
            "{json}"
        );
    }

    #[test]
    fn sas_are_shown_with_their_children() {
        let sa = IkeSa {
            name: "site".to_owned(),
            uniqueid: 3,
            state: "ESTABLISHED".to_owned(),
            local_host: "2001:db8::1".to_owned(),
            local_port: 500,
            local_id: "a".to_owned(),
            remote_host: "2001:db8::2".to_owned(),
            remote_port: 500,
            remote_id: "b".to_owned(),
            encr_alg: Some("AES_GCM_16".to_owned()),
            encr_keysize: Some(128),
            established: Some(60),
            rekey_time: Some(13_000),
            children: vec![ChildSa {
                name: "net".to_owned(),
                uniqueid: 7,
                state: "INSTALLED".to_owned(),
                mode: "TUNNEL".to_owned(),
                spi_in: Some("c0000001".to_owned()),
                spi_out: Some("c0000002".to_owned()),
                install_time: Some(60),
                bytes_in: 840,
                packets_in: 10,
                local_ts: vec!["10.1.0.0/24".to_owned()],
                remote_ts: vec!["10.2.0.0/24".to_owned()],
                ..ChildSa::default()
            }],
            ..IkeSa::default()
        };

        assert_eq!(
            sa_text(&sa),
            "\
site #3: ESTABLISHED, [2001:db8::1]:500 [a] ... [2001:db8::2]:500 [b]
  AES_GCM_16-128, established 60s ago, rekey in 3h
  net #7: INSTALLED, TUNNEL, 10.1.0.0/24 === 10.2.0.0/24
    installed 60s ago
    in c0000001: 840 octets, 10 packets; out c0000002: 0 octets, 0 packets
"
        );
    }

    #[test]
    fn certificates_tell_whether_they_are_valid() {
        let mut params = rcgen::CertificateParams::new(["gw.example.org".to_owned()]).unwrap();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "gw");
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = rcgen::date_time_ymd(2027, 1, 1);
        params.serial_number = Some(0x1234u64.into());
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let certificate = Certificate::parse(certificate.der()).unwrap();
        let begin = 1_767_225_600;

        let valid = certified(&certificate, true, begin + 1);

        assert_eq!(
            certified(&certificate, true, begin - 1).validity,
            "not yet valid"
        );
        assert_eq!(
            certified(&certificate, true, begin + 366 * 86_400).validity,
            "expired"
        );
        let text = certificate_text(&valid, false);
        assert!(text.contains("  names: gw.example.org\n"), "{text}");
        assert!(
            text.contains("  valid: 2026-01-01 00:00:00 UTC to 2027-01-01 00:00:00 UTC\n"),
            "{text}"
        );
        assert!(text.contains("  serial 1234, "), "{text}");
        assert!(text.ends_with(" 256, with private key\n"), "{text}");
    }

    #[test]
    fn pools_are_shown_with_their_leases() {
        let lease = Message::new()
            .with("address", "10.9.0.1")
            .with("identity", "moon")
            .with("status", "online");
        let pool = Named {
            name: "road".to_owned(),
            section: Message::new()
                .with("base", "10.9.0.0")
                .with("size", "254")
                .with("online", "1")
                .with("offline", "0")
                .with_section("leases", Message::new().with_section("0", lease)),
        };

        assert_eq!(
            pool_text(&pool),
            "road: 10.9.0.0, 254 addresses, 1 in use, 0 reserved\n  10.9.0.1 online moon\n"
        );
    }
}
