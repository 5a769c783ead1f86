// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The same octets to charon and to ours: what comes back has to be the same, packet by packet and
//! key by key, but for each [`Deviation`] that a test states.
//!
//! A case is one connection to the daemon. Its steps are separated by `;`:
//!
//! - `COMMAND MESSAGE`: a request, with a message as [`Message::parse`] reads it;
//! - `register EVENT`, `unregister EVENT`;
//! - `octets HEX`: a packet, of which only the length is added;
//! - `frame HEX`: octets as they are.
//!
//! Each case ends with a request that is always answered, so that silence is seen, too.

use std::fmt::Write;

use swanherd_tests::{Daemon, Lab, Message, Node, Packet, Pki, Plane, Value, frame, subject};

/// Ours and the reference, with the same definitions, and nobody to talk to.
struct Bench {
    nodes: [Node; 2],
    pki: Pki,
    _lab: Lab,
}

/// Where ours differs, on purpose.
struct Deviation {
    /// The case, as it is written.
    case: &'static str,
    /// What ours answers, as [`Bench::ask`] shows it.
    ours: &'static str,
}

impl Bench {
    fn start() -> Self {
        let mut lab = Lab::new();
        let pki = Pki::new(&lab.dir().join("pki"), "ecdsa", "256");
        let nodes = [("ours", subject()), ("charon", Daemon::Charon)].map(|(name, daemon)| {
            let namespace = lab.namespace(name);
            namespace.ip("addr add 192.0.2.1/24 dev lo");
            let mut node = Node::new(&lab, &namespace, daemon, Plane::Kernel, "");
            node.configure("");
            node.start();
            node
        });
        pki.issue("gw.example.org", &lab.dir().join("issued"));
        Self {
            nodes,
            pki,
            _lab: lab,
        }
    }

    /// What both answer.
    fn both(&self, case: &str) -> [String; 2] {
        [0, 1].map(|index| self.ask(&self.nodes[index], case))
    }

    /// What a daemon answers to the steps of a case, one line for each packet.
    fn ask(&self, node: &Node, case: &str) -> String {
        let mut vici = node.vici();
        for step in case.split(';') {
            if vici.write(&self.octets(step.trim())).is_err() {
                break;
            }
        }
        let _ = vici.write(&frame(0, "get-algorithms", Some(&Message::default())));
        let mut shown = String::new();
        loop {
            match vici.packet() {
                Ok(packet) if packet.kind == 1 && packet.message.get("encryption").is_some() => {
                    return shown;
                }
                Ok(packet) => {
                    let _ = writeln!(shown, "{}", show(&packet));
                }
                Err(error) => {
                    let end = match error.kind() {
                        std::io::ErrorKind::WouldBlock => "silence",
                        _ => "the end",
                    };
                    let _ = writeln!(shown, "{end}");
                    return shown;
                }
            }
        }
    }

    fn octets(&self, step: &str) -> Vec<u8> {
        let (word, rest) = step.split_once(' ').unwrap_or((step, ""));
        match word {
            "register" => frame(3, rest, None),
            "unregister" => frame(4, rest, None),
            "frame" => unhex(rest),
            "octets" => {
                let packet = unhex(rest);
                let length = u32::try_from(packet.len()).expect("a short packet");
                [&length.to_be_bytes()[..], &packet].concat()
            }
            command => {
                let mut message = Message::parse(rest);
                self.fill_in(&mut message);
                frame(0, command, Some(&message))
            }
        }
    }

    /// Credentials, for the texts that stand for them.
    fn fill_in(&self, message: &mut Message) {
        for (_, value) in &mut message.0 {
            match value {
                Value::Section(section) => self.fill_in(section),
                Value::Text(text) => {
                    if let Some(file) = text.strip_prefix('$') {
                        *text = self.pki.pem(file);
                    }
                }
                Value::List(items) => {
                    for item in items {
                        if let Some(file) = item.strip_prefix('$') {
                            *item = self.pki.pem(file);
                        }
                    }
                }
            }
        }
    }
}

fn show(packet: &Packet) -> String {
    let mut message = packet.message.clone();
    // What ours says beside charon's words, and what charon lists since 6.0 only.
    message.0.retain(|(key, _)| key != "reason");
    forget(&mut message, &["local_port", "remote_port", "dpd_timeout"]);
    let kind = match packet.kind {
        1 => "response",
        2 => "unknown command",
        5 => "confirmed",
        6 => "unknown event",
        7 => "event",
        _ => "packet",
    };
    if packet.kind == 7 {
        format!("{kind} {} {message:?}", packet.name)
    } else {
        format!("{kind} {message:?}")
    }
}

fn forget(message: &mut Message, keys: &[&str]) {
    message.0.retain(|(key, _)| !keys.contains(&key.as_str()));
    for (key, value) in &mut message.0 {
        match value {
            Value::Section(section) => forget(section, keys),
            // charon lists credentials in the order of a table of hashes, and connections as they came;
            // ours lists by name.
            Value::List(items) if ["keys", "conns"].contains(&key.as_str()) => items.sort(),
            Value::List(_) | Value::Text(_) => {}
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks(2)
        .map(|pair| u8::try_from(pair[0] * 16 + pair[1]).expect("two digits"))
        .collect()
}

/// Runs cases one after another, and tells all that differ.
fn compare(cases: &[&str], deviations: &[Deviation]) {
    let bench = Bench::start();
    let mut wrong = String::new();
    for case in cases {
        let [ours, reference] = bench.both(case);
        let stated = deviations.iter().find(|deviation| deviation.case == *case);
        let fits = match stated.map(|deviation| deviation.ours) {
            None => ours == reference,
            Some(expected) => ours != reference && ours.trim_end() == expected,
        };
        if !fits {
            let _ = write!(
                wrong,
                "\n{case}\nours:\n{ours}charon:\n{reference}{}",
                stated.map_or(String::new(), |d| format!("stated:\n{}\n", d.ours))
            );
        }
    }
    for deviation in deviations {
        assert!(cases.contains(&deviation.case), "{}", deviation.case);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A connection to nobody.
const GW: &str = "load-conn {gw {local_addrs=[192.0.2.1] remote_addrs=[192.0.2.9] \
    local {auth=psk id=gw.example.org} remote {auth=psk id=peer.example.org} \
    children {net {local_ts=[10.1.0.0/24] remote_ts=[10.2.0.0/24]}}}}";

#[test]
fn connections_load_list_and_unload_as_with_charon() {
    compare(
        &[
            "get-conns",
            GW,
            GW,
            "get-conns",
            "register list-conn; list-conns; unregister list-conn",
            "register list-conn; list-conns {ike=gw}",
            "register list-conn; list-conns {ike=nobody}",
            "register list-conn; list-conns {nonsense=1}",
            "list-conns",
            "load-conn {a {version=2 mobike=no fragmentation=force encap=yes dpd_delay=30s \
             dpd_timeout=90s rekey_time=2h reauth_time=1d over_time=300 rand_time=10m \
             unique=replace keyingtries=0 send_cert=always send_certreq=no \
             proposals=[aes256-sha384-ecp384 aes128gcm16-prfsha256-x25519] \
             local_addrs=[192.0.2.1 2001:db8::1] remote_addrs=[192.0.2.0/24 peer.example.org] \
             vips=[0.0.0.0 ::] if_id_in=7 if_id_out=0x8 \
             local-1 {auth=psk id=a.example.org} remote-1 {auth=psk id=%any} \
             children {one {mode=tunnel local_ts=[\"10.1.0.0/24[tcp/80]\" dynamic] \
             remote_ts=[\"10.2.0.0/24[udp/1024-2048]\" 10.3.0.0-10.3.0.9] \
             esp_proposals=[aes128-sha256-esn default] rekey_time=1h rekey_bytes=500M \
             rekey_packets=1000 life_time=2h life_bytes=1G life_packets=2000 rand_bytes=1000 \
             dpd_action=restart close_action=trap policies=yes reqid=17 priority=5 \
             mark_in=1/0xff mark_out=2 set_mark_in=%same copy_df=no copy_ecn=yes copy_dscp=in \
             replay_window=64} \
             two {mode=transport start_action=none close_action=start dpd_action=clear} \
             three {mode=pass local_ts=[10.9.0.0/24] remote_ts=[10.9.0.0/24]} \
             four {mode=drop} five {mode=beet close_action=trap|start dpd_action=trap}}}}",
            "register list-conn; list-conns {ike=a}",
            "load-conn {b {}}",
            "register list-conn; list-conns {ike=b}",
            "load-conn {pk {local {auth=pubkey certs=[$gw.example.org.crt] id=gw.example.org} \
             remote {auth=pubkey id=\"C=CH, O=swanherd, CN=*\" cacerts=[$ca.crt]} children {c {}}}}",
            "register list-conn; list-conns {ike=pk}",
            "load-conn {w {local {auth=ecdsa-384-sha384 id=@#0123} remote {auth=rsa-2048-sha256}}}",
            "register list-conn; list-conns {ike=w}",
            "get-conns",
            "load-conn {x {colour=red}}",
            "load-conn {x {local {colour=red}}}",
            "load-conn {x {children {c {colour=red}}}}",
            "load-conn {x {children {c {esp_proposals=aes128}}}}",
            "load-conn {x {local_addrs=192.0.2.1}}",
            "load-conn {x {mobike=[yes]}}",
            "load-conn {x {proposals=[nonsense]}}",
            "load-conn {x {rekey_time=never}}",
            "load-conn {x {rekey_time=5x}}",
            "load-conn {x {version=9}}",
            "load-conn {x {unique=sometimes}}",
            "load-conn {x {mobike=perhaps}}",
            "load-conn {x {fragmentation=perhaps}}",
            "load-conn {x {children {c {mode=tunel}}}}",
            "load-conn {x {children {c {dpd_action=hope}}}}",
            "load-conn {x {children {c {start_action=hope}}}}",
            "load-conn {x {children {c {local_ts=[10.0.0.0/99]}}}}",
            "load-conn {x {children {c {mark_in=blue}}}}",
            "load-conn {x {children {c {reqid=many}}}}",
            "load-conn {x {children {c {replay_window=wide}}}}",
            "load-conn {x {local {auth=magic}}}",
            "load-conn {x {local {certs=[nonsense]}}}",
            "load-conn {x {nonsense {a=b}}}",
            "load-conn {x {local {nonsense {a=b}}}}",
            "load-conn {x {children {c {nonsense {a=b}}}}}",
            "load-conn {x {local {cert1 {a=b}}}}",
            "load-conn {x {local {cert1 {}}}}",
            "load-conn",
            "load-conn {x=y}",
            "unload-conn {name=a}",
            "unload-conn {name=a}",
            "unload-conn",
            "unload-conn {name=b}; unload-conn {name=pk}; unload-conn {name=w}; unload-conn {name=gw}",
        ],
        &[
            Deviation {
                case: "load-conn {x {version=9}}",
                ours: "response {success=no errmsg=invalid value for: version, config discarded}",
            },
            Deviation {
                case: "load-conn {x {children {c {local_ts=[10.0.0.0/99]}}}}",
                ours: "response {success=no errmsg=invalid value for: local_ts, config discarded}",
            },
            Deviation {
                case: "load-conn {x {children {c {nonsense {a=b}}}}}",
                ours: "response {success=no errmsg=invalid section: nonsense}",
            },
            Deviation {
                case: "load-conn {x=y}",
                ours: "response {success=no errmsg=parsing request failed}",
            },
        ],
    );
}

#[test]
fn credentials_load_list_and_unload_as_with_charon() {
    compare(
        &[
            "get-keys",
            "get-shared",
            "load-key {type=ecdsa data=$gw.example.org.key}",
            "load-key {type=any data=$gw.example.org.key}",
            "load-key {type=ANY data=$ca.key}",
            "get-keys",
            "load-key {type=rsa data=$gw.example.org.key}",
            "load-key {type=any data=nonsense}",
            "load-key {type=any}",
            "load-key {data=nonsense}",
            "load-key {type=dsa data=nonsense}",
            "load-key",
            "unload-key",
            "unload-key {id=00}",
            "unload-key {id=nonsense}",
            "load-cert {type=X509 flag=NONE data=$gw.example.org.crt}",
            "load-cert {type=X509 flag=CA data=$ca.crt}",
            "load-cert {type=x509ca data=$ca.crt}",
            "load-cert {type=x509 data=$gw.example.org.crt}",
            "load-cert {type=X509 flag=CA data=$gw.example.org.crt}",
            "load-cert {type=X509 flag=NONE data=nonsense}",
            "load-cert {type=X509 flag=NONE}",
            "load-cert {type=X509 flag=SPARKLING data=nonsense}",
            "load-cert {type=PARCHMENT data=nonsense}",
            "load-cert {data=nonsense}",
            "load-cert",
            "register list-cert; list-certs",
            "register list-cert; list-certs {type=X509 flag=CA}",
            "register list-cert; list-certs {type=X509 flag=NONE}",
            "register list-cert; list-certs {type=ANY flag=ANY}",
            "register list-cert; list-certs {type=x509ca}",
            "register list-cert; list-certs {type=x509}",
            "register list-cert; list-certs {type=X509_CRL}",
            "register list-cert; list-certs {type=PUBKEY}",
            "register list-cert; list-certs {type=PARCHMENT}",
            "register list-cert; list-certs {flag=SPARKLING}",
            "register list-cert; list-certs {flag=CA}",
            "register list-cert; list-certs {type=ANY flag=NONE}",
            "register list-cert; list-certs {type=X509 flag=SPARKLING}",
            "register list-cert; list-certs {type=X509 flag=AA}",
            "register list-cert; list-certs {type=X509}",
            "register list-cert; list-certs {subject=\"C=CH, O=swanherd, CN=gw.example.org\"}",
            "register list-cert; list-certs {subject=nobody.example.org}",
            "list-certs",
            "load-shared {id=one type=IKE data=secret owners=[a.example.org b.example.org]}",
            "load-shared {id=one type=ike data=other owners=[a.example.org]}",
            "load-shared {id=two type=EAP data=secret owners=[bob]}",
            "load-shared {id=three type=PPK data=secret owners=[carol]}",
            "load-shared {type=IKE data=secret}",
            "get-shared",
            "load-shared {id=four type=RUMOUR data=secret}",
            "load-shared {id=four data=secret}",
            "load-shared {id=four type=IKE}",
            "load-shared",
            "unload-shared {id=one}",
            "unload-shared {id=one}",
            "unload-shared",
            "get-shared",
            "flush-certs",
            "flush-certs {type=X509}",
            "flush-certs {type=PARCHMENT}",
            "clear-creds",
            "get-keys",
            "get-shared",
            "register list-cert; list-certs",
        ],
        &[Deviation {
            case: "load-key {type=dsa data=nonsense}",
            ours: "response {success=no errmsg=invalid key type: dsa}",
        }],
    );
}

#[test]
fn control_commands_refuse_as_charon_does() {
    compare(
        &[
            GW,
            "initiate",
            "initiate {child=nobody}",
            "initiate {child=nobody timeout=-1}",
            "initiate {ike=nobody}",
            "initiate {ike=gw child=nobody}",
            "initiate {child=net timeout=-1}",
            "terminate",
            "terminate {ike=nobody}",
            "terminate {child=nobody}",
            "terminate {ike-id=9999}",
            "terminate {child-id=9999}",
            "terminate {ike=gw force=yes timeout=-1}",
            "rekey",
            "rekey {ike=nobody}",
            "rekey {child=nobody}",
            "rekey {ike-id=9999}",
            "rekey {ike=nobody reauth=yes}",
            "redirect",
            "redirect {gateway=192.0.2.7}",
            "redirect {gateway=192.0.2.7 ike=nobody}",
            "install",
            "install {child=nobody}",
            "install {child=nobody ike=gw}",
            "uninstall",
            "uninstall {child=nobody}",
            "uninstall {child=net}",
            "register list-policy; list-policies {trap=yes}",
            "register list-policy; list-policies {drop=yes pass=yes}",
            "register list-policy; list-policies",
            "register list-sa; list-sas",
            "register list-sa; list-sas {ike=nobody}",
            "register list-sa; list-sas {noblock=yes}",
            "register list-sa; list-sas {ike-id=9999}",
            "list-sas",
            "unload-conn {name=gw}",
        ],
        &[],
    );
}

#[test]
fn counters_pools_and_authorities_answer_as_charons() {
    compare(
        &[
            "get-counters",
            "get-counters {name=nobody}",
            "get-counters {all=yes}",
            "get-counters {name=nobody all=yes}",
            "reset-counters",
            "reset-counters {name=nobody}",
            "reset-counters {all=yes}",
            "get-pools",
            "get-pools {leases=yes}",
            "get-pools {name=nobody}",
            "unload-pool",
            "unload-pool {name=nobody}",
            "get-authorities",
            "register list-authority; list-authorities",
            "register list-authority; list-authorities {name=nobody}",
            "unload-authority",
            "unload-authority {name=nobody}",
            "load-authority {a {}}",
            "load-authority",
            "load-token",
            "reload-settings",
        ],
        &[],
    );
}

#[test]
fn odd_packets_are_treated_as_charon_treats_them() {
    compare(
        &[
            // Unknown names.
            "nonsense",
            "register nonsense",
            "unregister nonsense",
            "unregister ike-updown",
            "register ike-updown; unregister ike-updown; unregister ike-updown",
            "register list-sa; register list-conn; register list-policy; register list-cert; \
             register list-authority; register log; register control-log; register ike-updown; \
             register ike-rekey; register ike-update; register child-updown; register child-rekey",
            // Types that a client has no business with.
            "octets 01",
            "octets 02",
            "octets 05",
            "octets 06",
            "octets 07",
            "octets 08",
            "octets ff",
            // Nothing at all, and names that are not all there.
            "octets",
            "octets 00",
            "octets 00 05 61",
            "octets 03",
            "octets 03 05 61",
            "octets 04 ff",
            // get-keys, and what is no message.
            "octets 00 08 6765742d6b657973",
            "octets 00 08 6765742d6b657973 00",
            "octets 00 08 6765742d6b657973 09",
            "octets 00 08 6765742d6b657973 02",
            "octets 00 08 6765742d6b657973 05 0000",
            "octets 00 08 6765742d6b657973 06",
            "octets 00 08 6765742d6b657973 03 01",
            "octets 00 08 6765742d6b657973 03 01 61",
            "octets 00 08 6765742d6b657973 03 01 61 00",
            "octets 00 08 6765742d6b657973 03 01 61 0005 62",
            "octets 00 08 6765742d6b657973 04 01 61 03 01 62 0000",
            "octets 00 08 6765742d6b657973 04 01 61 05 0001 62 06",
            "octets 00 08 6765742d6b657973 03 00 0000",
            "octets 00 08 6765742d6b657973 03 01 61 0001 ff",
            // Several in one write are answered in order.
            "get-keys; nonsense; get-conns; register nonsense; get-shared",
        ],
        &[
            Deviation {
                case: "octets 00 08 6765742d6b657973 00",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 09",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 02",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 05 0000",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 06",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 03 01",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 03 01 61",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 03 01 61 00",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 03 01 61 0005 62",
                ours: "response {success=no errmsg=parsing request failed}",
            },
            Deviation {
                case: "octets 00 08 6765742d6b657973 04 01 61 03 01 62 0000",
                ours: "response {success=no errmsg=parsing request failed}",
            },
        ],
    );
}
