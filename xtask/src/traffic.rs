// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TCP through tunnels, both ways at once, at a given rate.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use swanherd_tests::Namespace;

use crate::shell::Error;

const PORT: u16 = 5001;
const BLOCK: usize = 32 * 1024;

/// A connection through one tunnel, with both of its ends in this process.
#[derive(Debug)]
pub(crate) struct Flow {
    stop: Arc<AtomicBool>,
    ends: [TcpStream; 2],
    threads: Vec<JoinHandle<u64>>,
}

impl Flow {
    /// Connects from an address of a namespace to one of another, and sends from both ends,
    /// `mbit` Mbit/s each; 0 is as fast as it goes.
    pub(crate) fn start(
        from: (&Namespace, Ipv4Addr),
        to: (&Namespace, Ipv4Addr),
        mbit: u32,
    ) -> Result<Self, Error> {
        let server = SocketAddr::from((to.1, PORT));
        let client = SocketAddr::from((from.1, 0));
        let listener = to.0.enter(move || TcpListener::bind(server))?;
        let near = from.0.enter(move || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.bind(&client.into())?;
            socket.connect_timeout(&server.into(), Duration::from_secs(10))?;
            Ok::<TcpStream, std::io::Error>(socket.into())
        })?;
        let (far, _) = listener.accept()?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for end in [&near, &far] {
            let (source, sink, stop) = (end.try_clone()?, end.try_clone()?, Arc::clone(&stop));
            source.set_write_timeout(Some(Duration::from_secs(1)))?;
            sink.set_read_timeout(Some(Duration::from_secs(1)))?;
            threads.push(worker({
                let stop = Arc::clone(&stop);
                move || send(source, &stop, mbit)
            })?);
            threads.push(worker(move || receive(sink, &stop))?);
        }
        Ok(Self {
            stop,
            ends: [near, far],
            threads,
        })
    }

    /// Ends the traffic; the octets that arrived at the far and at the near end.
    pub(crate) fn finish(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        for end in &self.ends {
            let _ = end.shutdown(Shutdown::Both);
        }
        let counts: Vec<u64> = self
            .threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(0))
            .collect();
        // Each end has a sender, then a receiver; the near end comes first.
        (counts[3], counts[1])
    }
}

fn worker(work: impl FnOnce() -> u64 + Send + 'static) -> Result<JoinHandle<u64>, Error> {
    // Tunnels may be many, and these threads need next to no stack.
    Ok(std::thread::Builder::new()
        .stack_size(128 * 1024)
        .spawn(work)?)
}

fn send(mut stream: TcpStream, stop: &AtomicBool, mbit: u32) -> u64 {
    let block = vec![0xa5; BLOCK];
    let begun = Instant::now();
    let mut sent: u64 = 0;
    while !stop.load(Ordering::Relaxed) {
        match stream.write(&block) {
            Ok(n) => sent += n as u64,
            Err(e) if retry(&e) => continue,
            Err(_) => break,
        }
        if mbit > 0 {
            let due = Duration::from_micros(sent * 8 / u64::from(mbit));
            std::thread::sleep(
                due.saturating_sub(begun.elapsed())
                    .min(Duration::from_millis(500)),
            );
        }
    }
    sent
}

fn receive(mut stream: TcpStream, stop: &AtomicBool) -> u64 {
    let mut block = vec![0; BLOCK];
    let mut received = 0;
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut block) {
            Ok(0) => break,
            Ok(n) => received += n as u64,
            Err(e) if retry(&e) => {}
            Err(_) => break,
        }
    }
    received
}

fn retry(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
