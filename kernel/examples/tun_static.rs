// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a TUN plane with fixed keys, for tests and benchmarks without IKE. Never for real
//! traffic: the keys are in this file.
//!
//! `tun_static a|b LOCAL REMOTE LOCAL_TS REMOTE_TS [SUITE] [key=value ...]`
//!
//! Selectors are `ADDRESS/LENGTH`. Suites: `aes128gcm`, `aes256gcm`, `chacha20`, `aes128cbc-sha1`,
//! `aes256cbc-sha256`, `null-sha256`. Options: `soft_packets=N`, `hard_packets=N`,
//! `soft_seconds=N`, `hard_seconds=N`, `esn=1`, `workers=N`, `trap=1` (policies without SAs).
//!
//! Prints a line `ready DEVICE` on standard output, then each event; on end of input prints
//! counters and drops, and cleans up.

use std::net::IpAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use swanherd_ipsec::plane::{
    Direction, Lifetime, Mode, Op, PolicyAction, PolicySet, SaEntry, SaKeys, UdpEncap,
};
use swanherd_ipsec::registry::{EncryptionId, IntegrityId};
use swanherd_ipsec::{Secret, TrafficSelector};
use swanherd_kernel::DataPlane as _;
use swanherd_kernel::tun::{DEFAULT_MARK, TunConfig, TunPlane};
use swanherd_kernel::udp::{IkeSocket, SocketOptions};

const PORT: u16 = 4500;
const REQID: u32 = 1;

type Error = Box<dyn std::error::Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tun_static: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [side, local, remote, local_ts, remote_ts, rest @ ..] = args.as_slice() else {
        return Err(
            "usage: tun_static a|b LOCAL REMOTE LOCAL_TS REMOTE_TS [SUITE] [KEY=VALUE ...]".into(),
        );
    };
    let (suite, options) = match rest.split_first() {
        Some((suite, options)) => (suite.as_str(), options),
        None => ("aes128gcm", rest),
    };
    let option = |name: &str| {
        options
            .iter()
            .filter_map(|option| option.split_once('='))
            .find_map(|(key, value)| (key == name).then(|| value.parse::<u64>()))
            .transpose()
    };
    let local: IpAddr = local.parse()?;
    let remote: IpAddr = remote.parse()?;
    let lifetime = Lifetime {
        soft_packets: option("soft_packets")?,
        hard_packets: option("hard_packets")?,
        soft_time: option("soft_seconds")?.map(Duration::from_secs),
        hard_time: option("hard_seconds")?.map(Duration::from_secs),
        ..Lifetime::default()
    };
    let esn = option("esn")?.is_some();

    let socket = Arc::new(IkeSocket::bind(
        None,
        PORT,
        &SocketOptions::for_tun_plane(DEFAULT_MARK),
    )?);
    let config = TunConfig {
        workers: option("workers")?.map_or(Ok(1), usize::try_from)?,
        ..TunConfig::default()
    };
    let (plane, mut events, mut ike) = TunPlane::start(socket, &config).await?;

    let (spi_out, spi_in) = if side == "a" {
        (0xc000_000b, 0xc000_000a)
    } else {
        (0xc000_000a, 0xc000_000b)
    };
    if option("trap")?.is_none() {
        for (direction, spi, src, dst) in [
            (Direction::In, spi_in, remote, local),
            (Direction::Out, spi_out, local, remote),
        ] {
            let entry = SaEntry {
                esn,
                replay_window: 1024,
                encap: Some(UdpEncap {
                    src_port: PORT,
                    dst_port: PORT,
                }),
                lifetime,
                ..SaEntry::tunnel(direction, spi, [src, dst], REQID, keys(suite)?)
            };
            plane.apply(Op::InstallSa(Box::new(entry))).await?;
        }
    }
    let set = PolicySet {
        trap: option("trap")?.is_some(),
        ..PolicySet::new(
            1,
            "static/static".to_owned(),
            vec![selector(local_ts)?],
            vec![selector(remote_ts)?],
            PolicyAction::Protect {
                mode: Mode::Tunnel,
                local,
                remote,
                reqid: REQID,
                spi: 0,
            },
        )
    };
    plane.apply(Op::InstallPolicies(Box::new(set))).await?;
    println!("ready {}", plane.device());

    // A thread, for a blocking read must not stop the runtime.
    let (ended, mut end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let copied = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ended.send(copied)
    });
    loop {
        tokio::select! {
            Some(event) = events.recv() => println!("event {event:?}"),
            Some(message) = ike.recv() => {
                println!("ike {} octets from {}", message.payload.len(), message.remote);
            }
            ended = &mut end => {
                ended??;
                break;
            }
        }
    }
    for (id, counters) in plane.counters().await? {
        println!(
            "sa {:08x} bytes {} packets {} replay {} integrity {}",
            id.spi,
            counters.bytes,
            counters.packets,
            counters.replay_drops,
            counters.integrity_drops
        );
    }
    for (reason, packets) in plane.event_counts().drops.by_reason() {
        if packets > 0 {
            println!("drops {reason} {packets}");
        }
    }
    plane.shutdown().await;
    Ok(())
}

fn selector(text: &str) -> Result<TrafficSelector, Error> {
    let (addr, len) = text.split_once('/').ok_or("a selector is ADDRESS/LENGTH")?;
    TrafficSelector::network(addr.parse()?, len.parse()?).ok_or_else(|| "prefix too long".into())
}

fn keys(suite: &str) -> Result<SaKeys, Error> {
    let (encryption, key_len, integrity) = match suite {
        "aes128gcm" => (EncryptionId::AesGcm16, 20, None),
        "aes256gcm" => (EncryptionId::AesGcm16, 36, None),
        "chacha20" => (EncryptionId::ChaCha20Poly1305, 36, None),
        "aes128cbc-sha1" => (
            EncryptionId::AesCbc,
            16,
            Some((IntegrityId::HmacSha1_96, 20)),
        ),
        "aes256cbc-sha256" => (
            EncryptionId::AesCbc,
            32,
            Some((IntegrityId::HmacSha2_256_128, 32)),
        ),
        "null-sha256" => (
            EncryptionId::Null,
            0,
            Some((IntegrityId::HmacSha2_256_128, 32)),
        ),
        other => return Err(format!("unknown suite {other}").into()),
    };
    let octets = |len: usize| Secret::new((0..len).map(|i| i as u8 ^ 0x5a).collect());
    Ok(SaKeys {
        encryption,
        encryption_key: octets(key_len),
        integrity: integrity.map(|(id, len)| (id, octets(len))),
    })
}
