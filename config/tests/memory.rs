// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What ten thousand connections take, once loaded.

#![allow(
    unsafe_code,
    reason = "counting what is allocated needs an allocator, which is unsafe to implement"
)]
#![allow(
    clippy::unwrap_used,
    reason = "a test that fails to read its own data must panic"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use swanherd_config::files::MemoryFiles;
use swanherd_config::load::load_swanctl_from;
use swanherd_config::model::Connection;
use swanherd_config::names::Names;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `alloc` above with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const COUNT: usize = 10_000;

/// A fleet as a provisioning system writes it: all in one file.
fn fleet() -> String {
    let mut text = String::from("connections {\n");
    for n in 0..COUNT {
        let _ = write!(
            text,
            "  branch-{n} {{
    version = 2
    proposals = aes256gcm16-prfsha384-ecp384, aes256-sha256-modp2048
    dpd_delay = 30s
    local {{
      auth = psk
      id = gw.example.org
    }}
    remote {{
      auth = psk
      id = branch-{n}.example.org
    }}
    children {{
      net {{
        local_ts = 10.0.0.0/16
        remote_ts = 10.{}.{}.0/24
        esp_proposals = aes256gcm16-ecp384, aes256-sha256-modp2048
        start_action = trap
        dpd_action = trap
      }}
    }}
  }}
",
            1 + n / 256,
            n % 256
        );
    }
    text.push_str("}\nsecrets {\n");
    for n in 0..COUNT {
        let _ = write!(
            text,
            "  ike-{n} {{\n    id-1 = gw.example.org\n    id-2 = branch-{n}.example.org\n    secret = hush-{n}\n  }}\n"
        );
    }
    text.push_str("}\n");
    text
}

#[test]
fn ten_thousand_connections_in_one_file_load_and_take_three_kilobytes_each() {
    let mut files = MemoryFiles::new();
    files.insert("/s/swanctl.conf", fleet().as_bytes());
    let names = Names::builtin();
    let loaded = load_swanctl_from(Path::new("/s/swanctl.conf"), &files, &names).unwrap();
    assert!(!loaded.has_errors());
    assert_eq!(
        (loaded.connections.len(), loaded.secrets.len()),
        (COUNT, COUNT)
    );

    // As the daemon holds them.
    let connections: Vec<Arc<Connection>> = loaded
        .connections
        .into_iter()
        .filter_map(|(_, connection)| connection.ok().map(Arc::new))
        .collect();
    assert_eq!(connections.len(), COUNT);
    let with = HELD.load(Ordering::Relaxed);
    drop(loaded.secrets);
    let without_secrets = HELD.load(Ordering::Relaxed);
    drop(connections);
    let without_connections = HELD.load(Ordering::Relaxed);

    let each = (without_secrets - without_connections) / COUNT;
    let secret = (with - without_secrets) / COUNT;
    println!("{each} octets a connection, {secret} a secret");
    assert!(each <= 3072, "{each} octets a connection");
    assert!(secret <= 512, "{secret} octets a secret");
}
