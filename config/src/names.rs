// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names of IP protocols and services, as traffic selectors use and listings print them.

use std::collections::BTreeMap;

use crate::files::Files;

/// Built-in protocols; the system's `/etc/protocols` goes first where it is read.
const PROTOCOLS: &[(&str, u8)] = &[
    ("icmp", 1),
    ("igmp", 2),
    ("ipencap", 4),
    ("ipip", 4),
    ("tcp", 6),
    ("egp", 8),
    ("igp", 9),
    ("udp", 17),
    ("dccp", 33),
    ("ipv6", 41),
    ("ipv6-route", 43),
    ("ipv6-frag", 44),
    ("rsvp", 46),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("ipv6-icmp", 58),
    ("icmpv6", 58),
    ("icmp6", 58),
    ("ipv6-nonxt", 59),
    ("ipv6-opts", 60),
    ("eigrp", 88),
    ("ospf", 89),
    ("ax.25", 93),
    ("etherip", 97),
    ("pim", 103),
    ("ipcomp", 108),
    ("vrrp", 112),
    ("l2tp", 115),
    ("isis", 124),
    ("sctp", 132),
    ("mobility-header", 135),
    ("udplite", 136),
    ("mpls-in-ip", 137),
    ("hip", 139),
    ("shim6", 140),
];

/// Built-in services; the system's `/etc/services` goes first where it is read.
const SERVICES: &[(&str, u16)] = &[
    ("tcpmux", 1),
    ("echo", 7),
    ("discard", 9),
    ("systat", 11),
    ("daytime", 13),
    ("chargen", 19),
    ("ftp-data", 20),
    ("ftp", 21),
    ("ssh", 22),
    ("telnet", 23),
    ("smtp", 25),
    ("time", 37),
    ("whois", 43),
    ("tacacs", 49),
    ("domain", 53),
    ("bootps", 67),
    ("bootpc", 68),
    ("tftp", 69),
    ("gopher", 70),
    ("finger", 79),
    ("http", 80),
    ("www", 80),
    ("kerberos", 88),
    ("pop3", 110),
    ("sunrpc", 111),
    ("auth", 113),
    ("nntp", 119),
    ("ntp", 123),
    ("netbios-ns", 137),
    ("netbios-dgm", 138),
    ("netbios-ssn", 139),
    ("imap2", 143),
    ("imap", 143),
    ("snmp", 161),
    ("snmp-trap", 162),
    ("bgp", 179),
    ("ldap", 389),
    ("svrloc", 427),
    ("https", 443),
    ("snpp", 444),
    ("microsoft-ds", 445),
    ("kpasswd", 464),
    ("submissions", 465),
    ("isakmp", 500),
    ("syslog", 514),
    ("printer", 515),
    ("route", 520),
    ("ripng", 521),
    ("dhcpv6-client", 546),
    ("dhcpv6-server", 547),
    ("rtsp", 554),
    ("submission", 587),
    ("ldaps", 636),
    ("domain-s", 853),
    ("rsync", 873),
    ("imaps", 993),
    ("pop3s", 995),
    ("socks", 1080),
    ("openvpn", 1194),
    ("ms-sql-s", 1433),
    ("l2f", 1701),
    ("l2tp", 1701),
    ("radius", 1812),
    ("radius-acct", 1813),
    ("nfs", 2049),
    ("mysql", 3306),
    ("ms-wbt-server", 3389),
    ("ipsec-nat-t", 4500),
    ("iax", 4569),
    ("vxlan", 4789),
    ("sip", 5060),
    ("sip-tls", 5061),
    ("mdns", 5353),
    ("postgresql", 5432),
    ("http-alt", 8080),
];

/// The names that are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    protocol_numbers: BTreeMap<String, u8>,
    protocol_names: BTreeMap<u8, String>,
    ports: BTreeMap<String, u16>,
    /// Key: protocol name and port.
    services: BTreeMap<(String, u16), String>,
    /// For look-ups without a protocol.
    any_services: BTreeMap<u16, String>,
}

impl Names {
    /// Those that are built in.
    pub fn builtin() -> Self {
        let mut names = Self {
            protocol_numbers: BTreeMap::new(),
            protocol_names: BTreeMap::new(),
            ports: BTreeMap::new(),
            services: BTreeMap::new(),
            any_services: BTreeMap::new(),
        };
        names.add_builtin();
        names
    }

    /// The system's, completed by the built-in ones.
    pub fn system(files: &dyn Files) -> Self {
        let read = |path: &str| {
            files
                .read(path.as_ref())
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .unwrap_or_default()
        };
        Self::from_tables(&read("/etc/protocols"), &read("/etc/services"))
    }

    /// From the contents of `/etc/protocols` and `/etc/services`, completed by the built-in ones.
    pub fn from_tables(protocols: &str, services: &str) -> Self {
        let mut names = Self {
            protocol_numbers: BTreeMap::new(),
            protocol_names: BTreeMap::new(),
            ports: BTreeMap::new(),
            services: BTreeMap::new(),
            any_services: BTreeMap::new(),
        };
        for mut fields in table(protocols) {
            let (Some(name), Some(number)) = (fields.next(), fields.next()) else {
                continue;
            };
            let Ok(number) = number.parse::<u8>() else {
                continue;
            };
            // `ip` is 0, which means any protocol here.
            if number != 0 {
                names.add_protocol(name, number);
                fields.for_each(|alias| names.add_protocol(alias, number));
            }
        }
        for mut fields in table(services) {
            let (Some(name), Some(port)) = (fields.next(), fields.next()) else {
                continue;
            };
            let Some((port, protocol)) = port.split_once('/') else {
                continue;
            };
            let Ok(port) = port.parse::<u16>() else {
                continue;
            };
            names.add_service(name, port, protocol);
            for alias in fields {
                names.ports.entry(alias.to_owned()).or_insert(port);
            }
        }
        names.add_builtin();
        names
    }

    fn add_builtin(&mut self) {
        for (name, number) in PROTOCOLS {
            self.add_protocol(name, *number);
        }
        for (name, port) in SERVICES {
            let known = self.any_services.contains_key(port);
            self.ports.entry((*name).to_owned()).or_insert(*port);
            if !known {
                self.any_services.insert(*port, (*name).to_owned());
                for protocol in ["tcp", "udp"] {
                    self.services
                        .insert((protocol.to_owned(), *port), (*name).to_owned());
                }
            }
        }
    }

    fn add_protocol(&mut self, name: &str, number: u8) {
        self.protocol_numbers
            .entry(name.to_owned())
            .or_insert(number);
        self.protocol_names
            .entry(number)
            .or_insert_with(|| name.to_owned());
    }

    fn add_service(&mut self, name: &str, port: u16, protocol: &str) {
        self.ports.entry(name.to_owned()).or_insert(port);
        self.services
            .entry((protocol.to_owned(), port))
            .or_insert_with(|| name.to_owned());
        self.any_services
            .entry(port)
            .or_insert_with(|| name.to_owned());
    }

    /// The protocol of that name.
    pub fn protocol(&self, name: &str) -> Option<u8> {
        self.protocol_numbers.get(name).copied()
    }

    /// The name of a protocol.
    pub fn protocol_name(&self, number: u8) -> Option<&str> {
        self.protocol_names.get(&number).map(String::as_str)
    }

    /// The port of the service of that name.
    pub fn port(&self, service: &str) -> Option<u16> {
        self.ports.get(service).copied()
    }

    /// The service on a port of a protocol; protocol 0 is any.
    pub fn service(&self, protocol: u8, port: u16) -> Option<&str> {
        if protocol == 0 {
            return self.any_services.get(&port).map(String::as_str);
        }
        let protocol = self.protocol_name(protocol)?;
        self.services
            .get(&(protocol.to_owned(), port))
            .map(String::as_str)
    }
}

fn table(text: &str) -> impl Iterator<Item = impl Iterator<Item = &str>> {
    text.lines().map(|line| {
        line.split('#')
            .next()
            .unwrap_or_default()
            .split_whitespace()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_tables_come_before_the_built_in_ones() {
        let names = Names::from_tables("tcp 6 TCP\nfoo 200 # x\n", "web 443/tcp secure\n");
        assert_eq!(names.protocol("TCP"), Some(6));
        assert_eq!(names.protocol_name(200), Some("foo"));
        assert_eq!(names.protocol("gre"), Some(47));
        assert_eq!(names.port("secure"), Some(443));
        assert_eq!(names.service(6, 443), Some("web"));
        assert_eq!(names.service(0, 53), Some("domain"));
        assert_eq!(names.service(47, 53), None);
    }
}
