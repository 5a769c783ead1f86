// SPDX-License-Identifier: Apache-2.0 OR MIT

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
