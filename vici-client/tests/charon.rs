// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client against strongSwan's charon, in namespaces of its own. Needs root and Debian's
//! `strongswan-charon`; says so and passes where it has not, except in CI.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use swanherd_vici::types::{Initiate, ListSas, Selector};
use swanherd_vici::{Client, Error, Message};

const CHARON: &str = "/usr/lib/ipsec/charon";

#[tokio::test]
async fn the_typed_helpers_work_against_charon() {
    let Some(charon) = Charon::start() else {
        return;
    };
    let mut client = charon.connect().await;

    let version = client.version().await.unwrap();
    assert!(version.daemon.starts_with("charon"), "{version:?}");
    assert_eq!(
        (version.sysname.as_str(), version.swanherd),
        ("Linux", None)
    );
    let stats = client.stats().await.unwrap();
    assert_eq!(stats.ikesas.total, 0);
    assert!(stats.plugins.iter().any(|name| name == "vici"));

    client
        .load_shared("ike-1", "IKE", b"labsecret", &["gw1", "gw2"])
        .await
        .unwrap();
    client.load_conn("gw", definition()).await.unwrap();
    assert_eq!(client.names("get-shared").await.unwrap(), ["ike-1"]);
    assert_eq!(client.names("get-conns").await.unwrap(), ["gw"]);
    let listed: Vec<(String, Listed)> = client
        .list("list-conns", "list-conn", Message::new())
        .await
        .unwrap();
    assert_eq!(listed[0].0, "gw");
    assert_eq!(listed[0].1.version, "IKEv2");
    assert_eq!(listed[0].1.children.keys().collect::<Vec<_>>(), ["net"]);
    assert!(
        client
            .list_sas(&ListSas::default())
            .await
            .unwrap()
            .is_empty()
    );

    client.unload_conn("gw").await.unwrap();
    let missing = client.unload_conn("gw").await.unwrap_err();
    assert_eq!(missing.to_string(), "unload: connection 'gw' not found");
}

#[tokio::test]
async fn an_attempt_streams_its_log_and_goes_on_after_the_timeout() {
    let Some(charon) = Charon::start() else {
        return;
    };
    let mut client = charon.connect().await;
    client.load_conn("gw", definition()).await.unwrap();
    client.subscribe(&["log"]).await.unwrap();
    let mut lines = Vec::new();
    let what = Initiate {
        child: Some("net".into()),
        timeout_ms: 300,
        ..Initiate::default()
    };

    let late = client
        .initiate(&what, |line| lines.push(line.msg))
        .await
        .unwrap_err();
    let sas = client.list_sas(&ListSas::default()).await.unwrap();
    let gw = Selector {
        ike: Some("gw".into()),
        ..Selector::default()
    };
    let ended = client.terminate(&gw, true, 0, drop).await.unwrap();
    let again = client.terminate(&gw, true, 0, drop).await.unwrap_err();

    assert_eq!(
        late.to_string(),
        "CHILD_SA 'net' not established after 300ms"
    );
    assert!(
        lines
            .iter()
            .any(|line| line.contains("initiating IKE_SA gw")),
        "{lines:?}"
    );
    assert_eq!(sas.len(), 1);
    assert_eq!(
        (sas[0].name.as_str(), sas[0].state.as_str()),
        ("gw", "CONNECTING")
    );
    assert!(sas[0].initiator && sas[0].children.is_empty());
    assert_eq!((ended.matches, ended.terminated), (1, 1));
    assert!(matches!(again, Error::Refused { reply, .. } if reply.str("matches") == Some("0")));
    // The events of the subscription were kept while commands ran.
    let mut seen = false;
    while !seen {
        let event = tokio::time::timeout(Duration::from_secs(5), client.next_event());
        let message = event.await.unwrap().unwrap().message;
        seen = message
            .str("msg")
            .is_some_and(|text| text.contains("initiating IKE_SA gw"));
    }
}

#[tokio::test]
async fn unknown_names_and_broken_definitions_are_refused_as_documented() {
    let Some(charon) = Charon::start() else {
        return;
    };
    let mut client = charon.connect().await;

    let command = client
        .request("nonsense", Message::new())
        .await
        .unwrap_err();
    let event = client.subscribe(&["nonsense"]).await.unwrap_err();
    let broken = Message::new().with("mobike", "perhaps");
    let option = client.load_conn("gw", broken).await.unwrap_err();

    assert!(matches!(command, Error::UnknownCommand(_)));
    assert!(matches!(event, Error::UnknownEvent(_)));
    assert_eq!(
        option.to_string(),
        "invalid value for: mobike, config discarded"
    );
    // The connection survives all of that.
    assert!(client.version().await.is_ok());
}

#[derive(Debug, serde::Deserialize)]
struct Listed {
    version: String,
    children: std::collections::BTreeMap<String, Empty>,
}

#[derive(Debug, serde::Deserialize)]
struct Empty {}

fn definition() -> Message {
    let auth = |id: &str| Message::new().with("auth", "psk").with("id", id);
    let child = Message::new()
        .with_list("local_ts", ["10.1.0.0/24"])
        .with_list("remote_ts", ["10.2.0.0/24"]);
    Message::new()
        .with("version", "2")
        .with_list("local_addrs", ["127.0.0.1"])
        .with_list("remote_addrs", ["127.0.0.77"])
        .with("remote_port", "9")
        .with_section("local", auth("gw1"))
        .with_section("remote", auth("gw2"))
        .with_section("children", Message::new().with_section("net", child))
}

struct Charon {
    process: Child,
    dir: tempfile::TempDir,
}

impl Charon {
    fn start() -> Option<Self> {
        let root = Command::new("id")
            .arg("-u")
            .output()
            .is_ok_and(|out| out.stdout == b"0\n");
        if !root || !Path::new(CHARON).exists() {
            assert!(
                std::env::var_os("CI").is_none(),
                "needs root and strongswan-charon"
            );
            eprintln!("skipped: needs root and strongswan-charon");
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let conf = dir.path().join("strongswan.conf");
        let socket = dir.path().join("vici");
        let settings = format!(
            "charon {{\n load = random nonce openssl curve25519 kdf hmac sha1 sha2 aes \
             kernel-netlink socket-default vici\n plugins {{ vici {{ socket = unix://{}\n }} }}\n}}\n",
            socket.display()
        );
        std::fs::write(&conf, settings).expect("settings can be written");
        // charon's file with its process id has a fixed name, so it gets a /run of its own.
        let script = format!("ip link set lo up && mount -t tmpfs run /run && exec {CHARON}");
        let process = Command::new("unshare")
            .args([
                "--net",
                "--mount",
                "setpriv",
                "--pdeathsig",
                "KILL",
                "sh",
                "-c",
                &script,
            ])
            .env("STRONGSWAN_CONF", &conf)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("unshare is installed");
        Some(Self { process, dir })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("vici")
    }

    async fn connect(&self) -> Client {
        let uri = format!("unix://{}", self.socket().display());
        let begun = Instant::now();
        loop {
            match Client::connect(&uri).await {
                Ok(mut client) => {
                    client.set_timeout(Some(Duration::from_secs(20)));
                    return client;
                }
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Charon {
    fn drop(&mut self) {
        // Either fails only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
