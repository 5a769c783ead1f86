#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Asks what the public Prometheus exporters ask, as strictly as they read it, and prints the names of
the series that would come of it. Values are left out: two daemons are never at the same one.
"""

import sys

import vici

# What the exporters read of an IKE_SA and of a CHILD_SA; numbers are decimal, flags "yes".
IKE_NUMBERS = ("uniqueid", "version", "local-port", "remote-port", "encr-keysize", "established", "rekey-time")
IKE_TEXTS = ("state", "local-host", "local-id", "remote-host", "remote-id", "initiator-spi", "responder-spi", "encr-alg", "prf-alg", "dh-group")
IKE_OPTIONAL = ("integ-alg", "integ-keysize", "reauth-time")
FLAGS = ("initiator", "nat-local", "nat-remote", "nat-fake", "nat-any")
CHILD_NUMBERS = ("uniqueid", "reqid", "encr-keysize", "bytes-in", "packets-in", "bytes-out", "packets-out", "rekey-time", "life-time", "install-time")
CHILD_TEXTS = ("name", "state", "mode", "protocol", "spi-in", "spi-out", "encr-alg")
CHILD_OPTIONAL = ("encap", "integ-alg", "dh-group", "use-in", "use-out", "cpu", "mark-in", "if-id-in")
STATES = ("CREATED", "CONNECTING", "ESTABLISHED", "PASSIVE", "REKEYING", "REKEYED", "DELETING", "DESTROYING")
CHILD_STATES = ("CREATED", "ROUTED", "INSTALLING", "INSTALLED", "UPDATING", "REKEYING", "REKEYED", "RETRYING", "DELETING", "DELETED", "DESTROYING")


def text(message, key):
    value = message[key]
    if not isinstance(value, bytes):
        raise ValueError(f"{key} is no text")
    return value.decode()


def number(message, key):
    value = text(message, key)
    if not value.isdecimal():
        raise ValueError(f"{key} = {value}: no decimal number")
    return int(value)


def known(message, key, words):
    if text(message, key) not in words:
        raise ValueError(f"{key} = {text(message, key)}")


def show(prefix, message, numbers, texts, optional):
    for key in numbers:
        number(message, key)
        print(prefix, key, "number")
    for key in texts:
        text(message, key)
        print(prefix, key, "text")
    for key in optional:
        if key in message:
            text(message, key)
            print(prefix, key, "optional")


def main():
    session = vici.Session(socket_to(sys.argv[1]))

    for listed in session.list_sas():
        for name, ike in listed.items():
            known(ike, "state", STATES)
            show(f"ike {name}", ike, IKE_NUMBERS, IKE_TEXTS, IKE_OPTIONAL)
            print("flags", [flag for flag in FLAGS if ike.get(flag) == b"yes"])
            for unique, child in ike["child-sas"].items():
                known(child, "state", CHILD_STATES)
                show(f"child {unique}", child, CHILD_NUMBERS, CHILD_TEXTS, CHILD_OPTIONAL)
                print("selectors", [len(child[key]) for key in ("local-ts", "remote-ts")])
    for listed in session.list_conns():
        for name, conn in listed.items():
            print("conn", name, text(conn, "version"), number(conn, "reauth_time"), number(conn, "rekey_time"))
            for child, settings in conn["children"].items():
                print("conn", name, child, text(settings, "mode"), [number(settings, key) for key in ("rekey_time", "rekey_bytes", "rekey_packets")])
    for cert in session.list_certs({"type": "X509"}):
        print("cert", text(cert, "flag"), text(cert, "type"), len(cert["data"]) > 100, cert.get("has_privkey"))
    print("pools", dict(session.get_pools({"leases": "no"})))
    stats = session.stats()
    for section, keys in (("uptime", ("running", "since")), ("ikesas", ("total", "half-open"))):
        for key in keys:
            print("stats", section, key, bool(text(stats[section], key)))
    number(stats["workers"], "total")
    number(stats["workers"], "idle")
    for kind in ("active", "queues"):
        inner = stats["workers"]["active"] if kind == "active" else stats["queues"]
        for priority in ("critical", "high", "medium", "low"):
            number(inner, priority)
    number(stats, "scheduled")


def socket_to(path):
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


if __name__ == "__main__":
    main()
