// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the data plane can do what a connection asks for, found out before it is negotiated.

use swanherd_config::model::{Child, ChildMode, Connection, IfId, MarkSpec};
use swanherd_ike::api::Settings;
use swanherd_ipsec::Proposal;
use swanherd_ipsec::plane::Mode;
use swanherd_ipsec::proposal::Transform;
use swanherd_kernel::Capabilities;

/// Takes the algorithms that the plane lacks out of what `connection` offers.
///
/// # Errors
/// Names the child and the option that the plane cannot do.
pub(crate) fn fit(connection: &mut Connection, plane: &Capabilities) -> Result<(), String> {
    let (name, if_ids) = (
        connection.name.clone(),
        [connection.if_id_in, connection.if_id_out],
    );
    for child in &mut connection.children {
        let lacking = lacking(child, if_ids, plane);
        let shunt = matches!(child.mode, ChildMode::Pass | ChildMode::Drop);
        let algorithms = if shunt {
            Ok(())
        } else {
            fit_proposals(&name, child, plane)
        };
        let reason = match (lacking, algorithms) {
            (Some(what), _) => what.to_owned(),
            (None, Err(reason)) => reason,
            (None, Ok(())) => continue,
        };
        return Err(format!(
            "{name}/{}: {reason}, which ESP in user space cannot do; it needs a kernel with ESP \
             (swanherd.dataplane = xfrm)",
            child.name
        ));
    }
    Ok(())
}

/// Whether this host has the port that a connection wants to use: `charon.port` or
/// `charon.port_nat_t`, which 500 and 4500 stand for.
///
/// # Errors
/// If it has not.
pub(crate) fn fit_ports(connection: &Connection, settings: &Settings) -> Result<(), String> {
    let (ike, nat_t) = (settings.port, settings.port_nat_t);
    if [500, 4500, ike, nat_t].contains(&connection.local_port) {
        return Ok(());
    }
    Err(format!(
        "{}: local_port = {} is neither charon.port ({ike}) nor charon.port_nat_t ({nat_t}), the \
         ports that this daemon has",
        connection.name, connection.local_port
    ))
}

fn lacking(child: &Child, connection: [IfId; 2], plane: &Capabilities) -> Option<&'static str> {
    let mode = match child.mode {
        ChildMode::Ipsec(Mode::Transport) => Some("mode = transport"),
        ChildMode::Ipsec(Mode::Beet) => Some("mode = beet"),
        ChildMode::TransportProxy => Some("mode = transport_proxy"),
        ChildMode::Ipsec(Mode::Tunnel) | ChildMode::Pass | ChildMode::Drop => None,
    };
    let marks = [
        ("mark_in", child.mark_in),
        ("mark_out", child.mark_out),
        ("set_mark_in", child.set_mark_in),
        ("set_mark_out", child.set_mark_out),
    ];
    let interfaces = [
        ("if_id_in", child.if_id_in, connection[0]),
        ("if_id_out", child.if_id_out, connection[1]),
    ];
    let mark = marks
        .into_iter()
        .find_map(|(option, mark)| (mark != MarkSpec::None).then_some(option));
    let interface = interfaces.into_iter().find_map(|(option, own, inherited)| {
        ([own, inherited] != [IfId::None, IfId::None]).then_some(option)
    });
    mode.filter(|_| !plane.host_modes)
        .or_else(|| mark.filter(|_| !plane.marks))
        .or_else(|| interface.filter(|_| !plane.interfaces))
}

fn fit_proposals(connection: &str, child: &mut Child, plane: &Capabilities) -> Result<(), String> {
    let mut fitting = Vec::new();
    let mut removed = Vec::new();
    for proposal in &child.proposals {
        let (kept, lost): (Vec<_>, Vec<_>) = proposal
            .transforms
            .iter()
            .copied()
            .partition(|transform| can(transform, plane));
        let keeps = |kind: fn(&Transform) -> bool| {
            kept.iter().any(kind) || !proposal.transforms.iter().any(kind)
        };
        let whole = keeps(|t| matches!(t, Transform::Encryption { .. }))
            && keeps(|t| matches!(t, Transform::Integrity(_)));
        removed.extend(lost.iter().map(name_of));
        if whole {
            fitting.push(Proposal {
                protocol: proposal.protocol,
                transforms: kept,
            });
        }
    }
    let removed = removed.join(", ");
    if fitting.is_empty() && !child.proposals.is_empty() {
        return Err(format!("esp_proposals = {removed}"));
    }
    if !removed.is_empty() {
        tracing::warn!(
            child = %format_args!("{connection}/{}", child.name),
            "not offered, since ESP in user space cannot do it: {removed}"
        );
    }
    child.proposals = fitting;
    Ok(())
}

fn can(transform: &Transform, plane: &Capabilities) -> bool {
    match transform {
        Transform::Encryption { id, key_bits } => (plane.cipher)(*id, *key_bits),
        Transform::Integrity(id) => (plane.integrity)(*id),
        Transform::Prf(_)
        | Transform::KeyExchange(_)
        | Transform::Esn(_)
        | Transform::AdditionalKeyExchange { .. }
        | Transform::Unknown { .. } => true,
    }
}

fn name_of(transform: &Transform) -> String {
    match transform {
        Transform::Encryption {
            id,
            key_bits: Some(bits),
        } => format!("{id} with {bits} bits"),
        Transform::Encryption { id, key_bits: None } => id.to_string(),
        Transform::Integrity(id) => id.to_string(),
        other => format!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use swanherd_config::decode::{Origin, decode_connection};
    use swanherd_config::names::Names;
    use swanherd_config::tree::{Tree, Value};
    use swanherd_ipsec::registry::{EncryptionId, IntegrityId};

    use super::*;

    const LIMITED: Capabilities = Capabilities {
        host_modes: false,
        marks: false,
        interfaces: false,
        cipher: |id, bits| match id {
            EncryptionId::AesGcm16 => bits == Some(128),
            id => id == EncryptionId::AesCbc,
        },
        integrity: |id| id == IntegrityId::HmacSha2_256_128,
    };

    fn connection(options: &[(&str, &str)]) -> Connection {
        let mut child = Tree::new();
        for (key, value) in options {
            if key.ends_with("proposals") {
                child.push_list(*key, value.split(',').map(Value::new));
            } else {
                child.push_value(*key, *value);
            }
        }
        let mut children = Tree::new();
        children.push_section("net", child);
        let mut definition = Tree::new();
        definition.push_section("children", children);
        decode_connection("gw", &definition, Origin::Message, &Names::builtin())
            .unwrap()
            .value
    }

    #[test]
    fn what_a_plane_cannot_do_is_refused_with_its_place() {
        for (key, value, word) in [
            ("mode", "transport", "mode = transport"),
            ("mode", "beet", "mode = beet"),
            ("mark_out", "7", "mark_out"),
            ("if_id_in", "%unique", "if_id_in"),
            ("esp_proposals", "chacha20poly1305", "CHACHA20"),
        ] {
            let mut conn = connection(&[(key, value)]);
            let error = fit(&mut conn, &LIMITED).unwrap_err();
            assert!(error.starts_with("gw/net: "), "{error}");
            assert!(
                error.to_uppercase().contains(&word.to_uppercase()),
                "{error}"
            );
            assert!(error.contains("needs a kernel"), "{error}");
            assert_eq!(
                fit(&mut connection(&[(key, value)]), &Capabilities::EVERYTHING),
                Ok(())
            );
        }
    }

    #[test]
    fn algorithms_that_a_plane_lacks_are_not_offered() {
        let proposals = "aes256gcm16-aes128gcm16-x25519,aes256-sha256-sha512,aes128-sha1";
        let mut conn = connection(&[("esp_proposals", proposals)]);

        assert_eq!(fit(&mut conn, &LIMITED), Ok(()));

        let offered = &conn.children[0].proposals;
        assert_eq!(offered.len(), 2, "{offered:?}");
        assert!(offered[0].transforms.contains(&Transform::Encryption {
            id: EncryptionId::AesGcm16,
            key_bits: Some(128)
        }));
        assert_eq!(
            offered
                .iter()
                .flat_map(|p| &p.transforms)
                .filter(|t| !can(t, &LIMITED))
                .count(),
            0
        );
    }

    #[test]
    fn shunts_need_no_algorithms() {
        let mut conn = connection(&[("mode", "drop")]);
        assert_eq!(fit(&mut conn, &LIMITED), Ok(()));
    }
}
