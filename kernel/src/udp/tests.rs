// SPDX-License-Identifier: Apache-2.0 OR MIT

use std::time::Duration;

use super::*;

fn localhost(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)
}

async fn next(socket: &IkeSocket) -> Received {
    tokio::time::timeout(Duration::from_secs(5), socket.recv())
        .await
        .expect("a datagram arrives")
        .unwrap()
}

#[tokio::test]
async fn a_datagram_arrives_with_both_addresses_and_the_marker() {
    let options = SocketOptions::default();
    let a = IkeSocket::bind(None, 0, &options).unwrap();
    let b = IkeSocket::bind(None, 0, &options).unwrap();

    a.send(&Outgoing {
        local: Some(Ipv4Addr::new(127, 0, 0, 5).into()),
        remote: localhost(b.port()),
        payload: b"hello",
        dscp: 46,
        marker: true,
    })
    .unwrap();

    let received = next(&b).await;
    assert_eq!(received.local, localhost(b.port()));
    assert_eq!(
        received.remote,
        SocketAddr::new(Ipv4Addr::new(127, 0, 0, 5).into(), a.port())
    );
    assert_eq!(
        NatTraversal::classify(&received.payload),
        NatTraversal::Ike(b"hello")
    );
}

#[tokio::test]
async fn a_coalesced_batch_is_taken_apart() {
    let options = SocketOptions {
        gro: true,
        ..SocketOptions::default()
    };
    let a = IkeSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0, &options).unwrap();
    let b = IkeSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0, &options).unwrap();
    let data: Vec<u8> = (0..=249).collect();

    send_group(
        a.fd_for(Ipv4Addr::LOCALHOST.into()).unwrap(),
        &SendGroup {
            local: None,
            remote: localhost(b.port()),
            data: &data,
            segment: 100,
            tos: 0,
        },
    )
    .unwrap();

    let mut sizes = Vec::new();
    let mut joined = Vec::new();
    for _ in 0..3 {
        let received = next(&b).await;
        sizes.push(received.payload.len());
        joined.extend_from_slice(&received.payload);
    }
    assert_eq!(sizes, [100, 100, 50]);
    assert_eq!(joined, data);
}

#[tokio::test]
async fn ipv6_serves_the_same_port() {
    let options = SocketOptions::default();
    let a = IkeSocket::bind(None, 0, &options).unwrap();
    if a.v6.is_none() {
        assert!(a.fd_for(Ipv6Addr::LOCALHOST.into()).is_err());
        return;
    }
    let to = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), a.port());

    a.send_keepalive(Some(Ipv6Addr::LOCALHOST.into()), to, 0)
        .unwrap();

    let received = next(&a).await;
    assert_eq!((received.local, received.remote), (to, to));
    assert_eq!(
        NatTraversal::classify(&received.payload),
        NatTraversal::Keepalive
    );
}

#[tokio::test]
async fn the_code_point_is_in_the_ip_header_of_messages_and_keepalives() {
    let options = SocketOptions::default();
    let a = IkeSocket::bind(None, 0, &options).unwrap();
    let b = IkeSocket::bind(None, 0, &options).unwrap();
    let mut ends = vec![(Ipv4Addr::LOCALHOST.into(), &b.v4)];
    if b.v6.is_some() {
        ends.push((Ipv6Addr::LOCALHOST.into(), &b.v6));
    }
    for (addr, leg) in ends {
        let remote = SocketAddr::new(addr, b.port());
        for dscp in [0, 46, 63] {
            let message = Outgoing {
                local: Some(addr),
                remote,
                payload: b"message",
                dscp,
                marker: false,
            };
            a.send(&message).unwrap();
            a.send_keepalive(Some(addr), remote, dscp).unwrap();
            for _ in 0..2 {
                // Over the loopback a datagram is there once it is sent.
                let mut buffer = [0; 64];
                let fd = leg.as_ref().unwrap().fd();
                let meta = receive(fd, &mut buffer, b.port()).unwrap();
                assert_eq!(meta.tos >> 2, dscp, "{remote}");
            }
        }
    }
}

#[test]
fn the_nat_traversal_port_tells_ike_esp_and_keepalives_apart() {
    let esp = [0, 0, 1, 0, 0, 0, 0, 1, 9];
    assert_eq!(NatTraversal::classify(&[0xff]), NatTraversal::Keepalive);
    assert_eq!(NatTraversal::classify(&[0; 4]), NatTraversal::Ike(&[]));
    assert_eq!(NatTraversal::classify(&esp), NatTraversal::Esp(&esp));
    assert_eq!(NatTraversal::classify(&esp[..8]), NatTraversal::Malformed);
    assert_eq!(NatTraversal::classify(&[]), NatTraversal::Malformed);
}
