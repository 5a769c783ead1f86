// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A settings file that an operator, or a program of theirs, wrote.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use swanherd_config::check::findings;
use swanherd_config::files::MemoryFiles;
use swanherd_config::grammar::parse_str;
use swanherd_config::load::load_swanctl_from;
use swanherd_config::names::Names;

static NAMES: LazyLock<Names> = LazyLock::new(Names::builtin);

fuzz_target!(|data: &[u8]| {
    match parse_str("fuzz.conf", data) {
        Ok(parsed) => {
            // What was read can be written, and means the same.
            let text = parsed.tree.to_config();
            let again = parse_str("again.conf", &text).expect("what was written is well-formed");
            assert_eq!(again.tree.to_config(), text);
        }
        Err(diagnostic) => {
            let _ = diagnostic.render(false);
        }
    }

    let mut files = MemoryFiles::new();
    files.insert("/etc/swanctl/swanctl.conf", data);
    let path = Path::new("/etc/swanctl/swanctl.conf");
    if let Ok(loaded) = load_swanctl_from(path, &files, &NAMES) {
        for diagnostic in loaded.all_diagnostics().chain(&findings(&loaded)) {
            let _ = diagnostic.render(false);
        }
        for (name, connection) in &loaded.connections {
            // Whole, or with what is wrong with it.
            match connection {
                Ok(connection) => assert_eq!(&connection.name, name),
                Err(error) => assert!(error.path.contains(name.as_str())),
            }
        }
    }
});
