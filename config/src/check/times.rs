// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits that leave no time to rekey.

use std::time::Duration;

use super::Definitions;
use crate::diagnostic::Diagnostic;

pub(super) fn children(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for (connection, child) in definitions.children() {
        for (soft, hard, rekey, life) in [
            (
                "rekey_time",
                "life_time",
                child.rekey_time.as_secs(),
                child.life_time.as_secs(),
            ),
            (
                "rekey_bytes",
                "life_bytes",
                child.rekey_bytes,
                child.life_bytes,
            ),
            (
                "rekey_packets",
                "life_packets",
                child.rekey_packets,
                child.life_packets,
            ),
        ] {
            if rekey > 0 && life > 0 && life <= rekey {
                let finding = Diagnostic::warning(
                    "expires-before-rekey",
                    format!("`{hard}` ({life}) is no more than `{soft}` ({rekey}): the SA ends before it is replaced"),
                )
                .help(format!("leave `{hard}` out to have a tenth more than `{soft}`"));
                found.push(definitions.about(
                    finding,
                    connection,
                    &["children", &child.name],
                    Some(hard),
                ));
            }
        }
    }
}

pub(super) fn connections(definitions: &Definitions<'_>, found: &mut Vec<Diagnostic>) {
    for connection in definitions.connections() {
        let interval = connection.rekey_time.max(connection.reauth_time);
        if interval > Duration::ZERO && connection.over_time == Duration::ZERO {
            let finding = Diagnostic::warning(
                "no-margin",
                "`over_time = 0`: the IKE SA is closed as soon as it is due to be replaced",
            )
            .help("leave `over_time` out to have a tenth of the interval");
            found.push(definitions.about(finding, connection, &[], Some("over_time")));
        }
    }
}
