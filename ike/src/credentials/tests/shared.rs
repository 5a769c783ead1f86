// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::super::shared::{LOOKED_AT, fit};
use super::*;

fn secret(id: &str, owners: &[&str]) -> SharedSecret {
    SharedSecret {
        id: Some(id.to_owned()),
        kind: SharedKind::Ike,
        secret: Secret::copy_of(id.as_bytes()),
        owners: owners
            .iter()
            .map(|owner| IdentityPattern::parse(owner).unwrap())
            .collect(),
    }
}

fn loaded(secrets: &[SharedSecret]) -> Credentials {
    let mut credentials = Credentials::new();
    for secret in secrets {
        credentials.add_shared(secret.clone());
    }
    credentials
}

fn ip(text: &str) -> Identity {
    Identity::from_ip(text.parse().unwrap())
}

fn found(credentials: &Credentials, local: &Identity, remote: &Identity) -> Option<String> {
    let found = credentials.shared_secret(SharedKind::Ike, local, remote)?;
    found.secret.id.clone()
}

#[test]
fn the_pair_of_identities_decides() {
    let credentials = loaded(&[
        secret("wan1", &["192.0.2.1", "203.0.113.9"]),
        secret("wan2", &["192.0.2.2", "203.0.113.9"]),
    ]);
    let remote = ip("203.0.113.9");

    assert_eq!(
        found(&credentials, &ip("192.0.2.1"), &remote).as_deref(),
        Some("wan1")
    );
    assert_eq!(
        found(&credentials, &ip("192.0.2.2"), &remote).as_deref(),
        Some("wan2")
    );
}

#[test]
fn an_exact_owner_beats_a_pattern_and_a_pattern_beats_none() {
    let credentials = loaded(&[
        secret("any", &[]),
        secret("pattern", &["*.example.org"]),
        secret("exact", &["b.example.org"]),
    ]);
    let local = Identity::fqdn("gw.example.net");

    for (remote, expected) in [
        ("b.example.org", "exact"),
        ("c.example.org", "pattern"),
        ("c.example.com", "any"),
    ] {
        assert_eq!(
            found(&credentials, &local, &Identity::fqdn(remote)).as_deref(),
            Some(expected)
        );
    }
}

#[test]
fn the_remote_side_counts_before_the_local_side() {
    let credentials = loaded(&[
        secret("local", &["gw.example.net", "%any"]),
        secret("remote", &["*.example.org"]),
        secret("local only", &["gw.example.net"]),
    ]);
    let local = Identity::fqdn("gw.example.net");

    for (remote, expected) in [("b.example.org", "remote"), ("b.example.com", "local")] {
        assert_eq!(
            found(&credentials, &local, &Identity::fqdn(remote)).as_deref(),
            Some(expected)
        );
    }
}

#[test]
fn several_without_owners_are_a_guess_that_is_told() {
    let credentials = loaded(&[secret("a", &[]), secret("b", &[]), secret("c", &[])]);
    let (local, remote) = (Identity::fqdn("a"), Identity::fqdn("b"));

    let found = credentials
        .shared_secret(SharedKind::Ike, &local, &remote)
        .unwrap();

    assert_eq!(found.secret.id.as_deref(), Some("a"));
    assert_eq!(found.candidates, 3);
}

#[test]
fn a_name_that_looks_like_an_address_is_no_address() {
    let credentials = loaded(&[secret("name", &["@203.0.113.9"])]);

    assert_eq!(
        found(&credentials, &ip("192.0.2.1"), &ip("203.0.113.9")),
        None
    );
}

#[test]
fn owners_that_name_neither_side_do_not_fit() {
    let credentials = loaded(&[secret("other", &["x.example.org"])]);

    let found = found(&credentials, &Identity::fqdn("a"), &Identity::fqdn("b"));

    assert_eq!(found, None);
}

#[test]
fn the_same_id_replaces_and_other_kinds_are_ignored() {
    let mut credentials = loaded(&[secret("a", &[]), secret("a", &["b"])]);
    assert_eq!(credentials.shared().len(), 1);
    assert!(credentials.remove_shared("a"));
    assert!(!credentials.remove_shared("a"));

    credentials.add_shared(SharedSecret {
        kind: SharedKind::Eap,
        ..secret("eap", &[])
    });

    let found = found(&credentials, &Identity::fqdn("a"), &Identity::fqdn("b"));
    assert_eq!(found, None);
}

#[test]
fn a_secret_is_found_among_ten_thousand_with_as_little_work_as_among_ten() {
    let local = Identity::fqdn("gw.example.org");
    // Of a known peer; of one that is not known, where all secrets name this side, or none does.
    for (own, known) in [(true, true), (false, true), (true, false), (false, false)] {
        let mut work = Vec::new();
        for size in [10, 10_000] {
            let mut credentials = Credentials::new();
            for n in 0..size {
                let peer = format!("b{n}.example.org");
                let owners: &[&str] = if own {
                    &["gw.example.org", &peer]
                } else {
                    &[&peer]
                };
                credentials.add_shared(secret(&format!("s{n}"), owners));
            }
            let peer = if known { "B7.example.org" } else { "x" };
            LOOKED_AT.set(0);
            let found = found(&credentials, &local, &Identity::fqdn(peer));
            work.push(LOOKED_AT.get());
            let expected = match (known, own) {
                (true, _) => Some("s7"),
                (false, true) => Some("s0"),
                (false, false) => None,
            };
            assert_eq!(found.as_deref(), expected);
        }
        assert!(work[1] <= 17, "{own} {known}: {work:?}");
        if known {
            assert_eq!(work[0], work[1]);
        }
    }
}

proptest::proptest! {
    #[test]
    fn the_index_finds_what_a_walk_over_all_secrets_finds(
        loaded in proptest::collection::vec(
            (
                0..8u8,
                proptest::sample::subsequence(
                    vec!["a", "b", "A.x", "*.x", "%any", "10.0.0.1", "10.0.0.0/24", "C=CH, CN=a"],
                    0..3,
                ),
            ),
            0..8,
        ),
        removed in 0..8u8,
        local in proptest::sample::select(vec!["a", "a.x", "10.0.0.1"]),
        remote in proptest::sample::select(vec!["b", "a.x", "10.0.0.1", "C=CH, CN=A", "z"]),
    ) {
        let mut credentials = Credentials::new();
        for (name, owners) in &loaded {
            credentials.add_shared(secret(&format!("s{name}"), owners));
        }
        credentials.remove_shared(&format!("s{removed}"));
        let id = |text: &str| IdentityPattern::parse(text).unwrap().identity().unwrap();
        let (local, remote) = (id(local), id(remote));

        let fits: Vec<_> = credentials
            .shared()
            .filter_map(|secret| Some((fit(&secret.owners, &local, &remote)?, secret.id.clone())))
            .collect();
        let best = fits.iter().map(|(fit, _)| *fit).max();
        let equal: Vec<_> = fits.iter().filter(|(fit, _)| Some(*fit) == best).collect();
        let found = credentials.shared_secret(SharedKind::Ike, &local, &remote);
        proptest::prop_assert_eq!(
            found.map(|found| (found.secret.id.clone(), found.candidates)),
            equal.first().map(|(_, id)| (id.clone(), equal.len()))
        );
    }
}
