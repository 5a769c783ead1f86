// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of users and groups as numbers, from the local files.
//!
//! A static binary has no name service switch, and the owner of a system daemon's socket is a
//! local account as a rule.

use std::io;

/// The ids of a user and a group; names that are `None` have none.
///
/// # Errors
/// If a name is unknown, or the file cannot be read.
pub(super) fn ids(
    (user, group): &(Option<String>, Option<String>),
) -> io::Result<(Option<u32>, Option<u32>)> {
    let lookup = |name: &Option<String>, file: &str| {
        let Some(name) = name else { return Ok(None) };
        id_of(name, &std::fs::read_to_string(file)?)
            .map(Some)
            .ok_or_else(|| {
                io::Error::new(io::ErrorKind::NotFound, format!("{file} has no '{name}'"))
            })
    };
    Ok((lookup(user, "/etc/passwd")?, lookup(group, "/etc/group")?))
}

/// The third field of the line that begins with `name`; a number stands for itself.
fn id_of(name: &str, table: &str) -> Option<u32> {
    let listed = table.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name))
            .then(|| fields.nth(1)?.parse().ok())
            .flatten()
    });
    listed.or_else(|| name.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "root:x:0:\nswanherd:x:997:\nbroken\n";

    #[test]
    fn a_name_is_looked_up_in_the_table() {
        assert_eq!(id_of("swanherd", TABLE), Some(997));
        assert_eq!(id_of("root", TABLE), Some(0));
    }

    #[test]
    fn a_number_stands_for_itself() {
        assert_eq!(id_of("12", TABLE), Some(12));
    }

    #[test]
    fn an_unknown_name_has_no_id() {
        assert_eq!(id_of("swan", TABLE), None);
        assert_eq!(id_of("broken", TABLE), None);
    }
}
